"""(IA)^3: outputs of a layer, or what goes into it, times a trained vector (arXiv:2205.05638).

T tokens · O, I outputs and inputs of a layer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from danlu.adapters.adapter import Adapter, Dense, TensorAxes
from danlu.adapters.hf_layers import hf_layers
from danlu.adapters.peft_lora import target_modules
from danlu.adapters.peft_values import PREFIX, check_supported, take_tensor
from danlu.errors import ModelError
from danlu.recipe import sections
from danlu.types import LinearLayer, Recomputed, Site

_HARMLESS: dict[str, tuple[Any, ...]] = {"fan_in_fan_out": (False, None)}


class Ia3(Adapter):
    """l * (W x + b), as on keys and values; with `of_inputs` W (l * x) + b, as on the last matrix of an MLP.

    Parameter: ia3_l [O], or [I] with `of_inputs`; ones at first.

    vector: that of the other parts of a layer that Hugging Face folders keep fused, for their inputs are one.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        *,
        of_inputs: bool,
        vector: nn.Parameter | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.of_inputs = of_inputs
        self.ia3_l = nn.Parameter(torch.ones(shape[of_inputs], device=device)) if vector is None else vector

    @property
    def tensor_axes(self) -> TensorAxes:
        return {"ia3_l": ("inputs" if self.of_inputs else "outputs",)}

    def below(self, x: Tensor, recomputed: Recomputed | None = None) -> Tensor:
        return _scaled(x, self.ia3_l, recomputed) if self.of_inputs else x

    def add(self, x: Tensor, y: Tensor, linear: LinearLayer, recomputed: Recomputed | None = None) -> Tensor:
        return y if self.of_inputs else _scaled(y, self.ia3_l, None)

    def applied(self, dense: Dense) -> Dense:
        vector = self.ia3_l.to(dense.weight.dtype)
        if self.of_inputs:
            return Dense(dense.weight * vector, dense.bias)
        return Dense(dense.weight * vector.unsqueeze(1), None if dense.bias is None else dense.bias * vector)


def _scaled(x: Tensor, vector: Tensor, recomputed: Recomputed | None) -> Tensor:
    scaled: Tensor = _Scaled.apply(x, vector, recomputed)
    return scaled


class _Scaled(torch.autograd.Function):
    """x [T, F] * vector [F] in x's dtype, multiplied in float32: near one, bfloat16 has steps of 1/128.

    Kept is x in its own type, or what it is made of; autograd would keep it in float32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, vector: Tensor, recomputed: Recomputed | None) -> Tensor:
        kept: tuple[Tensor, ...] = ()
        if ctx.needs_input_grad[1]:
            kept = (x,) if recomputed is None else recomputed.inputs
        ctx.save_for_backward(vector, *kept)
        ctx.make = None if recomputed is None else recomputed.function  # not its tensors: see `low_rank._Products`
        return (x * vector).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        vector, *kept = ctx.saved_tensors
        grad_x = (grad * vector).to(grad.dtype) if ctx.needs_input_grad[0] else None
        grad_vector = None
        if ctx.needs_input_grad[1]:
            x = kept[0] if ctx.make is None else ctx.make(*kept)
            grad_vector = (grad * x).sum(0, dtype=vector.dtype)
        return grad_x, grad_vector, None


# ── in PEFT's words ──


def to_peft(
    section: sections.Ia3, modules: Mapping[str, nn.Module], sites: Sequence[Site]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config values and tensors of an adapter: `modules` by site name, `sites` all of the model's."""
    tensors: dict[str, Tensor] = {}
    layers = hf_layers(sites)
    of_inputs: dict[str, bool] = {}  # by name on disk
    for layer in layers:
        own = {site.name: _ia3(modules[site.name]) for site in layer.parts if site.name in modules}
        if not own:
            continue
        first = next(iter(own.values()))
        of_inputs[layer.name] = first.of_inputs
        vector = first.ia3_l.detach().cpu().unsqueeze(0)  # [1, I]
        if not first.of_inputs:
            vector = torch.ones(layer.shape[0], 1)  # what a part without an adapter has
            for site, rows in layer.rows():
                if site.name in own:
                    vector[rows, 0] = own[site.name].ia3_l.detach().cpu()
        tensors[f"{PREFIX}{layer.name}.ia3_l"] = vector
    targets = target_modules(list(of_inputs), [layer.name for layer in layers])
    by_inputs = [one for one in targets if any(inside and name.endswith(one) for name, inside in of_inputs.items())]
    if any(not inside and name.endswith(tuple(by_inputs)) for name, inside in of_inputs.items()):
        # One end of a name would mean both.
        targets, by_inputs = list(of_inputs), [name for name, inside in of_inputs.items() if inside]
    values = {
        "peft_type": "IA3",
        "target_modules": targets,
        "feedforward_modules": by_inputs,
        "fan_in_fan_out": False,
        "init_ia3_weights": True,
    }
    return values, tensors


def from_peft(
    values: Mapping[str, Any], tensors: Mapping[str, Tensor], sites: Sequence[Site], where: str
) -> tuple[sections.Ia3, dict[str, dict[str, Tensor]], set[str]]:
    """The section, the values of each site's module by name, and the keys of `tensors` that they came from.

    Raises ModelError for settings that danlu does not compute, and for tensors that do not fit the model.
    """
    check_supported(values, _HARMLESS, where)
    by_site: dict[str, dict[str, Tensor]] = {}
    used: set[str] = set()
    of_inputs: list[str] = []
    for layer in hf_layers(sites):
        key = f"{PREFIX}{layer.name}.ia3_l"
        if key not in tensors:
            continue
        used.add(key)
        outputs, inputs = layer.shape
        if tensors[key].shape[0] == 1:  # a row for inputs, a column for outputs
            vector = take_tensor(tensors, key, (1, inputs), where)[0]
            by_site |= {site.name: {"ia3_l": vector} for site in layer.parts}
            of_inputs += [site.name for site in layer.parts]
        else:
            vector = take_tensor(tensors, key, (outputs, 1), where)[:, 0]
            by_site |= {site.name: {"ia3_l": vector[rows]} for site, rows in layer.rows()}
    if not by_site:
        raise ModelError(f"{where}: holds no tensor of an (IA)^3 adapter of this model")
    return sections.Ia3(targets=list(by_site), feedforward=of_inputs), by_site, used


def _ia3(module: nn.Module) -> Ia3:
    assert isinstance(module, Ia3)
    return module
