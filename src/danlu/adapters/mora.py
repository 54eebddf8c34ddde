"""MoRA: one square matrix per layer, with fixed maps into it and out of it (arXiv:2405.12130).

LoRA's r (I + O) numbers, arranged as a square of width w = sqrt(r (I + O)), have rank up to w instead of r. Inputs are
cut into groups of w, the last one padded with the first inputs. *sharing* (equation 6; type 1 of the authors' code)
sums the groups, multiplies the sum by the square and repeats the result over the outputs. *rotation* (equation 9; type
6) rotates group g by the angles of rotary embedding at position g, multiplies each group by the square, and lays the
results end to end over the outputs, from the first again where there are too few. The path is not scaled.

Where tensor parallelism cuts a layer, the square is whole on each rank: every input reaches every output through it.
Inputs of other ranks count as zeros, outputs of other ranks are left out.

T tokens · O, I outputs and inputs of a layer · w width of the square · G groups of inputs
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from danlu.adapters.adapter import Adapter, DenseLinear, module_of_type, saved_inputs
from danlu.adapters.dropout import Dropout
from danlu.adapters.hf_layers import hf_layers
from danlu.adapters.peft_values import PREFIX, ModuleValues, PeftContent, PeftReader, target_modules
from danlu.adapters.shapes import mora_square
from danlu.adapters.targets import Form, square_width
from danlu.core.errors import ModelError
from danlu.core.layer_types import LinearLayer, LinearShard, Recomputed, Site
from danlu.core.weight_gradients import Deferral, deferral_of, made_or_deferred
from danlu.recipe import sections

Angles = tuple[Tensor, Tensor] | None
"""cos and sin [G, w/2] of every pair of features of every group, in the type of activations; None for sharing."""
KIND = "DANLU_MORA"
ROTARY_BASE = 10000.0
# Columns of the dense matrix that are computed at once, so that the identity [I, I] is never in memory.
COLUMNS_PER_TILE = 1024


@dataclass(frozen=True)
class Folding:
    """MoRA's fixed linear maps from inputs to groups and from groups to outputs, each with its transpose."""

    inputs: int
    outputs: int
    width: int
    form: Form
    local_inputs: slice | None = None  # this rank's, of all; None where they are not cut
    local_outputs: slice | None = None

    @property
    def groups(self) -> int:
        """G, the number of groups that the inputs are cut into."""
        return -(-self.inputs // self.width)

    def angles(self) -> tuple[Tensor, Tensor]:
        """cos and sin [G, w/2] float64 of group times frequency."""
        exponents = torch.arange(0, self.width, 2, dtype=torch.float64) / self.width
        angles = torch.outer(torch.arange(self.groups, dtype=torch.float64), ROTARY_BASE**-exponents)
        return angles.cos(), angles.sin()

    def compress(self, x: Tensor, angles: Angles) -> Tensor:
        """[T, I local] -> [T, G, w]; for sharing [T, 1, w], the sum of the groups."""
        x = _zero_padded(x, self.local_inputs, self.inputs)
        missing = self.groups * self.width - self.inputs  # padding, with the first inputs once more
        grouped = torch.cat((x, x[:, :missing]), 1) if missing else x
        grouped = grouped.unflatten(1, (self.groups, self.width))
        return grouped.sum(1, keepdim=True) if angles is None else _rotated(grouped, *angles)

    def compress_transposed(self, z: Tensor, angles: Angles) -> Tensor:
        """[T, G, w] -> [T, I local]"""
        z = z.expand(-1, self.groups, -1) if angles is None else _rotated(z, angles[0], -angles[1])
        x = z.flatten(1)  # [T, G w]
        if x.shape[1] != self.inputs:
            # The padding repeated the first inputs, so its gradient is added to theirs.
            x, wrapped = x[:, : self.inputs], x[:, self.inputs :]
            x = x + F.pad(wrapped, (0, self.inputs - wrapped.shape[1]))
        return x if self.local_inputs is None else x[:, self.local_inputs]

    def decompress(self, z: Tensor) -> Tensor:
        """[T, G, w] -> [T, O local]"""
        flat = z.flatten(1)
        repeats = -(-self.outputs // flat.shape[1])
        y = flat.repeat(1, repeats)[:, : self.outputs] if repeats > 1 else flat[:, : self.outputs]
        return y if self.local_outputs is None else y[:, self.local_outputs]

    def decompress_transposed(self, y: Tensor) -> Tensor:
        """[T, O local] -> [T, G, w]"""
        groups = 1 if self.form == "sharing" else self.groups
        y = _zero_padded(y, self.local_outputs, self.outputs)
        y = F.pad(y, (0, -self.outputs % (groups * self.width)))
        return y.unflatten(1, (-1, groups, self.width)).sum(1)


def _zero_padded(x: Tensor, local: slice | None, features: int) -> Tensor:
    """[T, local features] -> [T, features], with zeros for those of other ranks."""
    return x if local is None else F.pad(x, (local.start, features - local.stop))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair of features i and i + w/2 of x [T, G, w], rotated by the angle of its group, as in rotary embedding."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Mora(Adapter):
    """W x + decompress(M compress(x)). Parameter: mora_M [w, w], zero at first."""

    cos: Tensor | None
    sin: Tensor | None

    def __init__(
        self,
        shape: tuple[int, int],
        width: int,
        form: Form,
        dropout: Dropout,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        outputs, inputs = shape
        square = mora_square(inputs, width, form)["mora_M"]
        self.folding = Folding(inputs, outputs, width, form)
        self.dropout = dropout
        self.mora_M = nn.Parameter(torch.zeros(square.shape, device=device))
        cos, sin = self.folding.angles() if form == "rotation" else (None, None)
        self.register_buffer("cos", None if cos is None else cos.to(device), persistent=False)
        self.register_buffer("sin", None if sin is None else sin.to(device), persistent=False)

    def narrow(self, shard: LinearShard) -> None:
        if shard.axis == "inputs":
            self.folding = replace(self.folding, local_inputs=shard.inputs)
        else:
            self.folding = replace(self.folding, local_outputs=shard.outputs)
        self.dropout.first_feature = shard.inputs.start

    def adapt_output(self, x: Tensor, y: Tensor, linear: LinearLayer, recomputed: Recomputed | None = None) -> Tensor:
        dropout = self.dropout if self.dropout.active else None
        deferral = deferral_of(self.mora_M)
        m = self.mora_M if deferral is None else deferral.anchor
        path: Tensor = _Path.apply(x, m, self.cos, self.sin, self.folding, dropout, recomputed, deferral)
        return y + path

    def merged_into(self, dense: DenseLinear) -> DenseLinear:
        return DenseLinear(dense.weight + self.delta(dense.weight.dtype), dense.bias)

    def delta(self, dtype: torch.dtype) -> Tensor:
        """[O, I]: the path as a matrix, computed by applying it to the columns of the identity; differentiable."""
        m, angles = self.mora_M.to(dtype), _angles(self.cos, self.sin, dtype)
        local = self.folding.local_inputs
        inputs = self.folding.inputs if local is None else local.stop - local.start
        columns = []
        for start in range(0, inputs, COLUMNS_PER_TILE):
            count = min(COLUMNS_PER_TILE, inputs - start)
            tile = m.new_zeros(count, inputs)
            tile.diagonal(start).fill_(1)
            columns.append(self.folding.decompress(self.folding.compress(tile, angles) @ m.t()))
        return torch.cat(columns).t()


class _Path(torch.autograd.Function):
    """decompress(M compress(x)). Saved is x, which other operations save too, not its groups; or the inputs that
    recompute x.

    With a deferral its anchor stands for M, and the queue computes its gradient.
    """

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
        deferral: Deferral | None,
    ) -> Tensor:
        if deferral is not None:
            (m,) = deferral.weights
        ctx.deferral = deferral
        saved_x = saved_inputs(x, recomputed) if ctx.needs_input_grad[1] else ()
        ctx.save_for_backward(m, cos, sin, *saved_x)
        ctx.folding, ctx.dropout = folding, dropout
        # Without its inputs: recomputation and offload can only free what `save_for_backward` was given.
        ctx.recompute = None if recomputed is None else recomputed.function
        ctx.token_keys = None if dropout is None else dropout.token_keys(x)
        z = folding.compress(x if dropout is None else dropout(x), _angles(cos, sin, x.dtype))  # [T, G, w]
        return folding.decompress(z @ m.to(x.dtype).t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        m, cos, sin, *saved_x = ctx.saved_tensors
        folding: Folding = ctx.folding
        dropout: Dropout | None = ctx.dropout
        angles = _angles(cos, sin, grad.dtype)
        grad_z = folding.decompress_transposed(grad)  # [T, G, w]
        grad_x = grad_m = None
        if ctx.needs_input_grad[1]:
            x = saved_x[0] if ctx.recompute is None else ctx.recompute(*saved_x)
            z = folding.compress(x if dropout is None else dropout(x, ctx.token_keys), angles)
            (grad_m,) = made_or_deferred(ctx.deferral, partial(_gradient_of_m, m.dtype), grad_z, z)
        if ctx.needs_input_grad[0]:
            grad_x = folding.compress_transposed(grad_z @ m.to(grad.dtype), angles)
            grad_x = grad_x if dropout is None else dropout(grad_x, ctx.token_keys)
        return grad_x, grad_m, None, None, None, None, None, None


def _gradient_of_m(dtype: torch.dtype, grad_z: Tensor, z: Tensor) -> tuple[Tensor]:
    """grad_z and z = compress(x), both [T, G, w] -> [w, w] in `dtype`."""
    return ((grad_z.flatten(0, 1).t() @ z.flatten(0, 1)).to(dtype),)


def _angles(cos: Tensor | None, sin: Tensor | None, dtype: torch.dtype) -> Angles:
    return None if cos is None or sin is None else (cos.to(dtype), sin.to(dtype))


# ── a format like PEFT's, which has no MoRA ──


def to_peft(section: sections.Mora, modules: Mapping[str, nn.Module], sites: Sequence[Site]) -> PeftContent:
    """Values of adapter_config.json, and tensors by name. modules: by site name; sites: all of the model's."""
    tensors = {
        key: module_of_type(modules[site.name], Mora).mora_M.detach()
        for key, site in _by_key(sites).items()
        if site.name in modules
    }
    values = {
        "peft_type": KIND,
        "description": "MoRA (arXiv:2405.12130), written by danlu; PEFT has no such kind",
        "r": section.rank,
        "mora_form": section.form,
        "mora_dropout": section.dropout,
        "target_modules": target_modules(modules, sites),
    }
    return values, tensors


def from_peft(reader: PeftReader, sites: Sequence[Site]) -> tuple[sections.Mora, ModuleValues]:
    """The section, and the values of each site's module.

    Raises ModelError for settings that danlu does not compute, and for tensors that do not fit the model.
    """
    rank, form = reader.positive_int("r"), reader.choice("mora_form", get_args(Form))
    by_site: ModuleValues = {}
    for key, site in _by_key(sites).items():
        if key in reader.tensors:
            width = square_width(site.shape, rank, form)
            by_site[site.name] = {"mora_M": reader.tensor(key, (width, width))}
    if not by_site:
        raise ModelError(f"{reader.where}: holds no tensor of a MoRA adapter of this model")
    dropout = reader.finite_number("mora_dropout", 0.0)
    return sections.Mora(rank=rank, form=form, dropout=dropout, targets=list(by_site)), by_site


def _by_key(sites: Sequence[Site]) -> dict[str, Site]:
    """The sites by the key of their square; the parts of a fused layer are distinguished by their own names."""
    return {
        f"{PREFIX}{layer.name}{'' if len(layer.parts) == 1 else '.' + site.name.rpartition('.')[2]}.mora_M": site
        for layer in hf_layers(sites)
        for site in layer.parts
    }
