"""(IA)^3: outputs or inputs of a layer times a trained vector (arXiv:2205.05638).

T tokens · O, I outputs and inputs of a layer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from danlu.adapters.adapter import Adapter, DenseLinear, TensorAxes, module_of_type, saved_inputs
from danlu.adapters.hf_layers import adapted_layers, hf_layers
from danlu.adapters.peft_values import PREFIX, ModuleValues, PeftContent, PeftReader, target_modules
from danlu.adapters.shapes import ia3_vector
from danlu.core.errors import ModelError
from danlu.core.layer_types import LinearLayer, Recomputed, Site
from danlu.recipe import sections

_HARMLESS: dict[str, tuple[Any, ...]] = {"fan_in_fan_out": (False, None)}


class Ia3(Adapter):
    """l * (W x + b), as on keys and values; with `of_inputs` W (l * x) + b, as on the last matrix of an MLP.

    Parameter: ia3_l [O], or [I] with `of_inputs`; ones at first.

    vector: the ia3_l of another part of the same layer, where Hugging Face folders keep the parts fused: with
    `of_inputs` they share it, because they have the same inputs.
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
        own = ia3_vector(shape, of_inputs=of_inputs)["ia3_l"]
        self.axes: TensorAxes = {"ia3_l": own.axes}
        self.ia3_l = nn.Parameter(torch.ones(own.shape, device=device)) if vector is None else vector

    @property
    def tensor_axes(self) -> TensorAxes:
        return self.axes

    def adapt_input(self, x: Tensor, recomputed: Recomputed | None = None) -> Tensor:
        return _scaled(x, self.ia3_l, recomputed) if self.of_inputs else x

    def adapt_output(self, x: Tensor, y: Tensor, linear: LinearLayer, recomputed: Recomputed | None = None) -> Tensor:
        return y if self.of_inputs else _scaled(y, self.ia3_l, None)

    def merged_into(self, dense: DenseLinear) -> DenseLinear:
        vector = self.ia3_l.to(dense.weight.dtype)
        if self.of_inputs:
            return DenseLinear(dense.weight * vector, dense.bias)
        return DenseLinear(dense.weight * vector.unsqueeze(1), None if dense.bias is None else dense.bias * vector)


def _scaled(x: Tensor, vector: Tensor, recomputed: Recomputed | None) -> Tensor:
    scaled: Tensor = _Scaled.apply(x, vector, recomputed)
    return scaled


class _Scaled(torch.autograd.Function):
    """x [T, F] * vector [F] in x's dtype, multiplied in float32: near one, bfloat16 has steps of 1/128.

    For the backward pass x is saved in its own type, or the inputs that recompute it; autograd would save it in
    float32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, vector: Tensor, recomputed: Recomputed | None) -> Tensor:
        saved_x = saved_inputs(x, recomputed) if ctx.needs_input_grad[1] else ()
        ctx.save_for_backward(vector, *saved_x)
        # Without its inputs: recomputation and offload can only free what `save_for_backward` was given.
        ctx.recompute = None if recomputed is None else recomputed.function
        return (x * vector).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        vector, *saved_x = ctx.saved_tensors
        grad_x = (grad * vector).to(grad.dtype) if ctx.needs_input_grad[0] else None
        grad_vector = None
        if ctx.needs_input_grad[1]:
            x = saved_x[0] if ctx.recompute is None else ctx.recompute(*saved_x)
            grad_vector = (grad * x).sum(0, dtype=vector.dtype)
        return grad_x, grad_vector, None


# ── PEFT's format ──


def to_peft(section: sections.Ia3, modules: Mapping[str, nn.Module], sites: Sequence[Site]) -> PeftContent:
    """Values of adapter_config.json, and tensors by name. modules: by site name; sites: all of the model's."""
    tensors: dict[str, Tensor] = {}
    of_inputs: dict[str, bool] = {}  # by name on disk
    for layer in adapted_layers(modules, sites):
        adapted = {site.name: module_of_type(modules[site.name], Ia3) for site in layer.parts if site.name in modules}
        first = next(iter(adapted.values()))
        of_inputs[layer.name] = first.of_inputs
        vector = first.ia3_l.detach().cpu().unsqueeze(0)  # [1, I]
        if not first.of_inputs:
            vector = torch.ones(layer.shape[0], 1)  # the value of a part without an adapter
            for site, rows in layer.rows():
                if site.name in adapted:
                    vector[rows, 0] = adapted[site.name].ia3_l.detach().cpu()
        tensors[f"{PREFIX}{layer.name}.ia3_l"] = vector
    targets = target_modules(modules, sites)
    scaling_inputs = [name for name, inside in of_inputs.items() if inside]
    feedforward = [target for target in targets if any(name.endswith(target) for name in scaling_inputs)]
    if any(not inside and name.endswith(tuple(feedforward)) for name, inside in of_inputs.items()):
        # The end of a name would mean layers of both kinds.
        targets, feedforward = list(of_inputs), scaling_inputs
    values = {
        "peft_type": "IA3",
        "target_modules": targets,
        "feedforward_modules": feedforward,
        "fan_in_fan_out": False,
        "init_ia3_weights": True,
    }
    return values, tensors


def from_peft(reader: PeftReader, sites: Sequence[Site]) -> tuple[sections.Ia3, ModuleValues]:
    """The section, and the values of each site's module.

    Raises ModelError for settings that danlu does not compute, and for tensors that do not fit the model.
    """
    reader.check_supported(_HARMLESS)
    by_site: ModuleValues = {}
    of_inputs: list[str] = []
    for layer in hf_layers(sites):
        key = f"{PREFIX}{layer.name}.ia3_l"
        if key not in reader.tensors:
            continue
        outputs, inputs = layer.shape
        if reader.tensors[key].shape[0] == 1:  # a row for inputs, a column for outputs
            vector = reader.tensor(key, (1, inputs))[0]
            by_site |= {site.name: {"ia3_l": vector} for site in layer.parts}
            of_inputs += [site.name for site in layer.parts]
        else:
            vector = reader.tensor(key, (outputs, 1))[:, 0]
            by_site |= {site.name: {"ia3_l": vector[rows]} for site, rows in layer.rows()}
    if not by_site:
        raise ModelError(f"{reader.where}: holds no tensor of an (IA)^3 adapter of this model")
    return sections.Ia3(targets=list(by_site), feedforward=of_inputs), by_site
