"""MoRA: one square matrix a layer, with fixed ways into it and out of it (arXiv:2405.12130).

LoRA's r (I + O) numbers, arranged as a square of width w = sqrt(r (I + O)), have rank up to w instead of r. Inputs are
laid down in groups of w, the last one filled up from the front. *sharing* (equation 6; type 1 of the authors' code)
sums the groups, takes the sum through the square and repeats the result over the outputs. *rotation* (equation 9; type
6) turns group g by the angles of rotary embedding at position g, takes each group through the square, and lays the
results end to end over the outputs, from the front again where there are too few. The path is not scaled.

Where a layer is cut over processes, the square is whole on each: every input reaches every output through it. Inputs
that are elsewhere count as zeros, outputs that are elsewhere are left out.

T tokens · O, I outputs and inputs of a layer · w width of the square · G groups of inputs
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from danlu.adapters.adapter import Adapter, Dense
from danlu.adapters.dropout import Dropout
from danlu.adapters.hf_layers import HFLayer, hf_layers
from danlu.adapters.peft_lora import target_modules
from danlu.adapters.peft_values import PREFIX, choice, finite_number, positive_int, take_tensor
from danlu.adapters.targets import Form, square_width
from danlu.errors import ModelError
from danlu.recipe import sections
from danlu.types import LinearLayer, LinearShard, Recomputed, Site

Angles = tuple[Tensor, Tensor] | None
"""cos and sin [G, w/2] of every pair of every group, in the type of activations; None for sharing."""
KIND = "DANLU_MORA"
ROTARY_BASE = 10000.0
# Inputs whose column of the dense matrix is made at once: the identity is never held whole.
TILE = 1024


@dataclass(frozen=True)
class Folding:
    """The fixed ways in and out; both linear, each with its transpose."""

    inputs: int
    outputs: int
    width: int
    form: Form
    held_inputs: slice | None = None  # what of them is here; None: all
    held_outputs: slice | None = None

    @property
    def groups(self) -> int:
        return -(-self.inputs // self.width)

    def angles(self) -> tuple[Tensor, Tensor]:
        """cos and sin [G, w/2] float64 of group times frequency."""
        exponents = torch.arange(0, self.width, 2, dtype=torch.float64) / self.width
        angles = torch.outer(torch.arange(self.groups, dtype=torch.float64), ROTARY_BASE**-exponents)
        return angles.cos(), angles.sin()

    def compress(self, x: Tensor, angles: Angles) -> Tensor:
        """[T, I] -> [T, G, w]; sharing has one group, the sum of all."""
        x = _widened(x, self.held_inputs, self.inputs)
        missing = self.groups * self.width - self.inputs
        grouped = torch.cat((x, x[:, :missing]), 1) if missing else x
        grouped = grouped.unflatten(1, (self.groups, self.width))
        return grouped.sum(1, keepdim=True) if angles is None else _turned(grouped, *angles)

    def compress_transposed(self, z: Tensor, angles: Angles) -> Tensor:
        """[T, G, w] -> [T, I]"""
        z = z.expand(-1, self.groups, -1) if angles is None else _turned(z, angles[0], -angles[1])
        x = z.flatten(1)  # [T, G w]
        if x.shape[1] != self.inputs:
            x, wrapped = x[:, : self.inputs], x[:, self.inputs :]
            x = x + F.pad(wrapped, (0, self.inputs - wrapped.shape[1]))
        return x if self.held_inputs is None else x[:, self.held_inputs]

    def decompress(self, z: Tensor) -> Tensor:
        """[T, G, w] -> [T, O]"""
        flat = z.flatten(1)
        repeats = -(-self.outputs // flat.shape[1])
        y = flat.repeat(1, repeats)[:, : self.outputs] if repeats > 1 else flat[:, : self.outputs]
        return y if self.held_outputs is None else y[:, self.held_outputs]

    def decompress_transposed(self, y: Tensor) -> Tensor:
        """[T, O] -> [T, G, w]"""
        groups = 1 if self.form == "sharing" else self.groups
        y = _widened(y, self.held_outputs, self.outputs)
        y = F.pad(y, (0, -self.outputs % (groups * self.width)))
        return y.unflatten(1, (-1, groups, self.width)).sum(1)


def _widened(x: Tensor, held: slice | None, features: int) -> Tensor:
    """[T, those held] -> [T, features], with zeros for the others."""
    return x if held is None else F.pad(x, (held.start, features - held.stop))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[T, G, w] with pair i of a group being its features i and i + w/2."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Mora(Adapter):
    """W x + decompress(M compress(x)). Parameter: mora_M [w, w], zero at first."""

    cos: Tensor | None
    sin: Tensor | None

    def __init__(
        self, shape: tuple[int, int], width: int, form: Form, dropout: Dropout, *, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        outputs, inputs = shape
        self.folding = Folding(inputs, outputs, width, form)
        self.dropout = dropout
        self.mora_M = nn.Parameter(torch.zeros(width, width, device=device))
        cos, sin = self.folding.angles() if form == "rotation" else (None, None)
        self.register_buffer("cos", None if cos is None else cos.to(device), persistent=False)
        self.register_buffer("sin", None if sin is None else sin.to(device), persistent=False)

    def narrow(self, share: LinearShard) -> None:
        if share.axis == "inputs":
            self.folding = replace(self.folding, held_inputs=share.inputs)
        else:
            self.folding = replace(self.folding, held_outputs=share.outputs)
        self.dropout.first_feature = share.inputs.start

    def add(self, x: Tensor, y: Tensor, linear: LinearLayer, recomputed: Recomputed | None = None) -> Tensor:
        dropout = self.dropout if self.dropout.active else None
        path: Tensor = _Path.apply(x, self.mora_M, self.cos, self.sin, self.folding, dropout, recomputed)
        return y + path

    def applied(self, dense: Dense) -> Dense:
        return Dense(dense.weight + self.delta(dense.weight.dtype), dense.bias)

    def delta(self, dtype: torch.dtype) -> Tensor:
        """[O, I]: the path as a matrix, from what it makes of the columns of the identity; differentiable."""
        m, angles = self.mora_M.to(dtype), _angles(self.cos, self.sin, dtype)
        held = self.folding.held_inputs
        inputs = self.folding.inputs if held is None else held.stop - held.start
        columns = []
        for start in range(0, inputs, TILE):
            count = min(TILE, inputs - start)
            tile = m.new_zeros(count, inputs)
            tile.diagonal(start).fill_(1)
            columns.append(self.folding.decompress(self.folding.compress(tile, angles) @ m.t()))
        return torch.cat(columns).t()


class _Path(torch.autograd.Function):
    """decompress(M compress(x)). Kept is x, which others keep too, and not its groups; or what x is made of."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        m: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        folding: Folding,
        dropout: Dropout | None,
        recomputed: Recomputed | None,
    ) -> Tensor:
        kept: tuple[Tensor, ...] = ()
        if ctx.needs_input_grad[1]:
            kept = (x,) if recomputed is None else recomputed.inputs
        ctx.save_for_backward(m, cos, sin, *kept)
        ctx.folding, ctx.dropout = folding, dropout
        ctx.make = None if recomputed is None else recomputed.function  # not its tensors: see `low_rank._Products`
        ctx.rows = None if dropout is None else dropout.state.token_keys(x)
        z = folding.compress(x if dropout is None else dropout(x), _angles(cos, sin, x.dtype))  # [T, G, w]
        return folding.decompress(z @ m.to(x.dtype).t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        m, cos, sin, *kept = ctx.saved_tensors
        folding: Folding = ctx.folding
        dropout: Dropout | None = ctx.dropout
        angles = _angles(cos, sin, grad.dtype)
        grad_z = folding.decompress_transposed(grad)  # [T, G, w]
        grad_x = grad_m = None
        if ctx.needs_input_grad[1]:
            x = kept[0] if ctx.make is None else ctx.make(*kept)
            z = folding.compress(x if dropout is None else dropout(x, ctx.rows), angles)
            grad_m = (grad_z.flatten(0, 1).t() @ z.flatten(0, 1)).to(m.dtype)
        if ctx.needs_input_grad[0]:
            grad_x = folding.compress_transposed(grad_z @ m.to(grad.dtype), angles)
            grad_x = grad_x if dropout is None else dropout(grad_x, ctx.rows)
        return grad_x, grad_m, None, None, None, None, None


def _angles(cos: Tensor | None, sin: Tensor | None, dtype: torch.dtype) -> Angles:
    return None if cos is None or sin is None else (cos.to(dtype), sin.to(dtype))


# ── on disk: in the manner of PEFT, which does not know MoRA ──


def to_peft(
    section: sections.Mora, modules: Mapping[str, nn.Module], sites: Sequence[Site]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config values and tensors of an adapter: `modules` by site name, `sites` all of the model's."""
    layers = hf_layers(sites)
    tensors: dict[str, Tensor] = {}
    for layer in layers:
        for site in layer.parts:
            if site.name in modules:
                module = modules[site.name]
                assert isinstance(module, Mora)
                tensors[_key(layer, site)] = module.mora_M.detach()
    chosen = [layer.name for layer in layers if any(site.name in modules for site in layer.parts)]
    values = {
        "peft_type": KIND,
        "description": "MoRA (arXiv:2405.12130), written by danlu; PEFT has no such kind",
        "r": section.rank,
        "mora_form": section.form,
        "mora_dropout": section.dropout,
        "target_modules": target_modules(chosen, [layer.name for layer in layers]),
    }
    return values, tensors


def from_peft(
    values: Mapping[str, Any], tensors: Mapping[str, Tensor], sites: Sequence[Site], where: str
) -> tuple[sections.Mora, dict[str, dict[str, Tensor]], set[str]]:
    """The section, the values of each site's module by name, and the keys of `tensors` that they came from.

    Raises ModelError for settings that danlu does not compute, and for tensors that do not fit the model.
    """
    rank, form = positive_int(values, "r", where), choice(values, "mora_form", get_args(Form), where)
    by_site: dict[str, dict[str, Tensor]] = {}
    used: set[str] = set()
    for layer in hf_layers(sites):
        for site in layer.parts:
            if (key := _key(layer, site)) in tensors:
                width = square_width(site.shape, rank, form)
                by_site[site.name] = {"mora_M": take_tensor(tensors, key, (width, width), where)}
                used.add(key)
    if not by_site:
        raise ModelError(f"{where}: holds no tensor of a MoRA adapter of this model")
    dropout = finite_number(values, "mora_dropout", 0.0, where)
    return sections.Mora(rank=rank, form=form, dropout=dropout, targets=list(by_site)), by_site, used


def _key(layer: HFLayer, site: Site) -> str:
    """A part of a fused layer is told by its own name."""
    part = "" if len(layer.parts) == 1 else f".{site.name.rpartition('.')[2]}"
    return f"{PREFIX}{layer.name}{part}.mora_M"
