"""VeRA: random matrices that all layers share, frozen, with a trained vector on each side (arXiv:2310.11454).

T tokens · O, I outputs and inputs of a layer · r rank
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from danlu.adapters.adapter import Adapter, DenseLinear, TensorAxes, module_of_type
from danlu.adapters.dropout import Dropout
from danlu.adapters.hf_layers import Rows, adapted_layers, hf_layers
from danlu.adapters.peft_values import PREFIX, ModuleValues, PeftContent, PeftReader, target_modules
from danlu.adapters.shapes import VERA_AXES, AdapterTensor, largest_shape, vera_projection, vera_vectors
from danlu.core import device_moves
from danlu.core.errors import ModelError
from danlu.core.layer_types import LinearLayer, LinearShard, Recomputed, Site
from danlu.core.weight_gradients import Deferral, deferral_of, made_or_deferred
from danlu.recipe import sections

_A, _B = "base_model.vera_A", "base_model.vera_B"
_HARMLESS: dict[str, tuple[Any, ...]] = {"bias": ("none", None), "fan_in_fan_out": (False, None)}


class Projection(nn.Module):
    """The random matrices A [r, I] and B [O, r] of one adapter; I and O are those of its largest layers."""

    def __init__(self, rank: int, shape: tuple[int, int], *, seed: int, device: torch.device | str = "cpu") -> None:
        super().__init__()
        matrices = vera_projection(rank, shape)
        # Drawn as PEFT draws them, from one generator: A, then B, each uniform with variance 2 / columns (Kaiming).
        generator = torch.Generator("cpu").manual_seed(seed)
        self.vera_A = nn.Parameter(_kaiming(matrices["vera_A"], generator).to(device), requires_grad=False)
        self.vera_B = nn.Parameter(_kaiming(matrices["vera_B"], generator).to(device), requires_grad=False)
        self._copies: dict[torch.device, tuple[tuple[int, int], Tensor, Tensor]] = {}
        """Copies by device, with the versions of the originals."""

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """A and B where a layer is: copies on other devices than their own, where layers lie on several."""
        a, b = self.vera_A, self.vera_B
        if a.device == device:
            return a, b
        versions = a._version, b._version
        if device not in self._copies or self._copies[device][0] != versions:
            self._copies[device] = (
                versions,
                device_moves.move(a.detach(), device),
                device_moves.move(b.detach(), device),
            )
        _, *copies = self._copies[device]
        return copies[0], copies[1]


def _kaiming(matrix: AdapterTensor, generator: torch.Generator) -> Tensor:
    bound = math.sqrt(3.0) * (math.sqrt(2) / math.sqrt(matrix.shape[1]))
    return torch.empty(matrix.shape).uniform_(-bound, bound, generator=generator)


class Vera(Adapter):
    """W x + b * B (d * A x), where A and B are cut out of the shared matrices.

    Parameters: vera_lambda_d [r], vera_lambda_b [O]; the projection is frozen, and the same object in every layer.

    Args:
        rows: the rows of B; a part of a layer that Hugging Face folders keep fused has those of its own outputs.
        inputs: I, how many columns of A.
        initial_d: the initial value of vera_lambda_d; vera_lambda_b starts at zero.
        lambda_d: the vera_lambda_d of another part of such a layer, which PEFT has once for all parts.

    Where tensor parallelism cuts the layer, it uses fewer rows or columns of the shared matrices, which stay whole.
    """

    def __init__(
        self,
        projection: Projection,
        rows: Rows,
        inputs: int,
        dropout: Dropout,
        *,
        initial_d: float,
        lambda_d: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        a, b = projection.vera_A, projection.vera_B
        self.columns = slice(0, inputs)
        self.rows = rows
        self.dropout = dropout
        vectors = vera_vectors(len(b[:, 0][rows]), len(a))
        first = a.new_full(vectors["vera_lambda_d"].shape, initial_d)
        self.vera_lambda_d = nn.Parameter(first) if lambda_d is None else lambda_d
        self.vera_lambda_b = nn.Parameter(b.new_zeros(vectors["vera_lambda_b"].shape))
        self.projection = projection

    @property
    def a(self) -> Tensor:
        """This layer's columns of the shared A, [r, I local]."""
        return self.projection.on(self.vera_lambda_b.device)[0][:, self.columns]

    @property
    def b(self) -> Tensor:
        """This layer's rows of the shared B, [O local, r]."""
        return self.projection.on(self.vera_lambda_b.device)[1][self.rows]

    @property
    def tensor_axes(self) -> TensorAxes:
        return VERA_AXES

    def narrow(self, shard: LinearShard) -> None:
        if isinstance(self.rows, slice):
            first = self.rows.start
            self.rows = slice(first + shard.outputs.start, first + shard.outputs.stop)
        else:
            self.rows = self.rows[shard.outputs]
        self.columns = shard.inputs
        self.dropout.first_feature = shard.inputs.start

    def adapt_output(self, x: Tensor, y: Tensor, linear: LinearLayer, recomputed: Recomputed | None = None) -> Tensor:
        dropout = self.dropout if self.dropout.active else None
        b, deferral = self.vera_lambda_b, deferral_of(self.vera_lambda_b)
        shown = b if deferral is None else deferral.anchor
        path: Tensor = _Path.apply(x, self.vera_lambda_d, shown, self.a, self.b, dropout, deferral)
        return y + path

    def merged_into(self, dense: DenseLinear) -> DenseLinear:
        dtype = dense.weight.dtype
        left = self.vera_lambda_b.to(dtype).unsqueeze(1) * self.b.to(dtype)
        right = self.vera_lambda_d.to(dtype).unsqueeze(1) * self.a.to(dtype)
        return DenseLinear(dense.weight.addmm(left, right), dense.bias)


class _Path(torch.autograd.Function):
    """b * B (d * A x). Of activations only A x [T, r] is saved, and no copy of A or B in x's dtype.

    With a deferral its anchor stands for b: its gradient takes a product as large as any, and the queue computes it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        d: Tensor,
        b: Tensor,
        big_a: Tensor,
        big_b: Tensor,
        dropout: Dropout | None,
        deferral: Deferral | None,
    ) -> Tensor:
        if deferral is not None:
            (b,) = deferral.weights
        ctx.deferral = deferral
        u = F.linear(x if dropout is None else dropout(x), big_a.to(x.dtype))  # [T, r]
        ctx.save_for_backward(u, d, b, big_a, big_b)
        ctx.dropout = dropout
        ctx.token_keys = None if dropout is None else dropout.token_keys(x)
        return F.linear(u * d.to(u.dtype), big_b.to(u.dtype)) * b.to(u.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        u, d, b, big_a, big_b = ctx.saved_tensors
        wants_x, wants_d, wants_b = ctx.needs_input_grad[:3]
        wide = torch.promote_types(grad.dtype, torch.float32)
        grad_x = grad_d = grad_b = None
        if wants_b:
            make = partial(_gradient_of_b, b.dtype)
            (grad_b,) = made_or_deferred(ctx.deferral, make, grad, u, d, big_b)
        if wants_d or wants_x:
            grad_z = (grad * b.to(grad.dtype)) @ big_b.to(grad.dtype)  # [T, r]
            grad_d = (grad_z * u).sum(0, dtype=wide).to(d.dtype) if wants_d else None
            if wants_x:
                grad_x = (grad_z * d.to(grad.dtype)) @ big_a.to(grad.dtype)
                grad_x = grad_x if ctx.dropout is None else ctx.dropout(grad_x, ctx.token_keys)
        return grad_x, grad_d, grad_b, None, None, None, None


def _gradient_of_b(dtype: torch.dtype, grad: Tensor, u: Tensor, d: Tensor, big_b: Tensor) -> tuple[Tensor]:
    """grad [T, O], u = A x [T, r], d [r] and B [O, r] -> [O] in `dtype`."""
    z = u * d.to(u.dtype)
    # The sum over tokens of grad * B z is the diagonal of (grad^T z) B^T.
    return (((grad.t() @ z).to(dtype) * big_b.to(dtype)).sum(1),)


# ── PEFT's format ──


def to_peft(section: sections.Vera, modules: Mapping[str, nn.Module], sites: Sequence[Site]) -> PeftContent:
    """Values of adapter_config.json, and tensors by name. modules: by site name; sites: all of the model's."""
    tensors: dict[str, Tensor] = {}
    for layer in adapted_layers(modules, sites):
        lambda_b = torch.zeros(layer.shape[0])  # the value of a part without an adapter
        for site, rows in layer.rows():
            if site.name in modules:
                module = module_of_type(modules[site.name], Vera)
                lambda_b[rows] = module.vera_lambda_b.detach().cpu()
                tensors[f"{PREFIX}{layer.name}.vera_lambda_d"] = module.vera_lambda_d.detach()
                if section.save_projection:
                    tensors |= {_A: module.projection.vera_A.detach(), _B: module.projection.vera_B.detach()}
        tensors[f"{PREFIX}{layer.name}.vera_lambda_b"] = lambda_b
    values = {
        "peft_type": "VERA",
        "r": section.rank,
        "target_modules": target_modules(modules, sites),
        "projection_prng_key": section.projection_seed,
        "save_projection": section.save_projection,
        "vera_dropout": section.dropout,
        "d_initial": section.initial_d,
        "fan_in_fan_out": False,
        "bias": "none",
    }
    return values, tensors


def from_peft(reader: PeftReader, sites: Sequence[Site]) -> tuple[sections.Vera, ModuleValues]:
    """The section, and the values of each site's module.

    Raises ModelError for settings that danlu does not compute, and for tensors that do not fit the model.
    """
    reader.check_supported(_HARMLESS)
    rank, saved = reader.positive_int("r"), bool(reader.values.get("save_projection", True))
    layers = [layer for layer in hf_layers(sites) if f"{PREFIX}{layer.name}.vera_lambda_b" in reader.tensors]
    if not layers:
        raise ModelError(f"{reader.where}: holds no tensor of a VeRA adapter of this model")
    by_site: ModuleValues = {}
    for layer in layers:
        lambda_d = reader.tensor(f"{PREFIX}{layer.name}.vera_lambda_d", (rank,))
        lambda_b = reader.tensor(f"{PREFIX}{layer.name}.vera_lambda_b", (layer.shape[0],))
        for site, rows in layer.rows():
            by_site[site.name] = {"vera_lambda_d": lambda_d, "vera_lambda_b": lambda_b[rows]}
    if saved:
        outputs, inputs = largest_shape(layers)
        by_site[layers[0].parts[0].name] |= {
            "projection.vera_A": reader.tensor(_A, (rank, inputs)),
            "projection.vera_B": reader.tensor(_B, (outputs, rank)),
        }
    section = sections.Vera(
        rank=rank,
        dropout=reader.finite_number("vera_dropout", 0.0),
        initial_d=reader.finite_number("d_initial", 0.1),
        projection_seed=int(reader.finite_number("projection_prng_key", 0)),
        save_projection=saved,
        targets=list(by_site),
    )
    return section, by_site
