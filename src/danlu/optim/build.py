"""The optimizer of a recipe: one object that steps, is saved and is resumed, whichever optimizers are in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from danlu.core.errors import CheckpointError, ModelError, RecipeError
from danlu.optim.adamw import AdamW, Float32Moments, Moments, StatePages, TensorSpecs, specs_of
from danlu.optim.gradients import HasGradient, densify_gradient, has_sparse_gradient
from danlu.optim.groups import parameter_groups, trainable
from danlu.optim.state_shapes import (
    OptimizerBytes,
    eight_bits,
    has_bfloat16_moments,
    is_hidden,
    optimizer_bytes,
    parameter_state,
)
from danlu.recipe import sections

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from danlu.optim.galore import GaLore

    AnyOptimizer = torch.optim.Optimizer | AdamW | GaLore

NamedParameters = list[tuple[str, Parameter]]
RateOf = Callable[[str], float]
_FLOAT32 = "float32"
PagedState = Callable[[Mapping[Parameter, TensorSpecs], str | None], StatePages]
"""A function from (tensors kept for each parameter, folder of the file) to the pages that keep them."""


def check_state(tensors: Mapping[str, Tensor], expected: TensorSpecs) -> None:
    """Raises CheckpointError for a state tensor that is missing, unknown, or of another shape or type."""
    problem = None
    if missing := sorted(expected.keys() - tensors.keys()):
        problem = f"{len(missing)} tensors are missing, the first is {missing[0]}"
    elif unknown := sorted(tensors.keys() - expected.keys()):
        problem = f"{len(unknown)} tensors belong to no trained parameter, the first is {unknown[0]}"
    else:
        for name, spec in expected.items():
            tensor = tensors[name]
            if (tensor.shape, tensor.dtype) != (spec.shape, spec.dtype):
                problem = f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {spec.dtype} {list(spec.shape)}"
                break
    if problem:
        raise CheckpointError(
            f"optimizer state of the checkpoint: {problem}. It was written by another model or recipe; "
            "resume with the recipe of the run, or start a new run from its weights."
        )


def replace_state(optimizer: AnyOptimizer, states: Mapping[Parameter, dict[str, Tensor]]) -> None:
    """Replaces an optimizer's state by its own method, which knows the device of each tensor.

    Some of torch's step counters stay on the host. `states` has the tensors kept for each parameter, by name.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer.load(states)
        return
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indexed = {index: states[parameter] for index, parameter in enumerate(ordered) if parameter in states}
    optimizer.load_state_dict({"state": indexed, "param_groups": optimizer.state_dict()["param_groups"]})


class Optimizers:
    """One or more optimizers over disjoint, named parameters, used as one.

    State is known by `<state>.<parameter name>` ("exp_avg.model.norm.weight"), so it can be written to safetensors and
    read back into a model that lists its parameters in another order. State tensors are float32, or bfloat16 or uint8
    where moments are kept so; step counters are tensors of shape [].
    """

    def __init__(
        self,
        section: sections.Optimizer,
        optimizers: Sequence[AnyOptimizer],
        named_parameters: NamedParameters,
        *,
        paged: bool,
    ) -> None:
        self.section = section
        self.kind = section.kind
        self.paged = paged
        """Whether the state is in pages, those of one parameter in memory at a time."""
        self.optimizers = tuple(optimizers)
        self.parameters = dict(named_parameters)
        self._optimizer_of = {
            p: optimizer for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]
        }
        assert set(self._optimizer_of) == set(self.parameters.values()), "the optimizers do not cover the parameters"
        self._multiplier = 1.0
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["base_lr"] = group["lr"]
        self.set_learning_rate(1.0)

    @property
    def learning_rate(self) -> float:
        """The current rate: the recipe's `learning_rate` times the schedule. Groups may have a ratio to it."""
        return float(self.optimizers[0].param_groups[0]["base_lr"]) * self._multiplier

    def set_learning_rate(self, multiplier: float) -> None:
        """Sets each group's rate to its own base rate times its ratio times `multiplier`."""
        self._multiplier = multiplier
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * group["ratio"] * multiplier

    def gradient_holders(self) -> list[HasGradient]:
        """Everything with a `.grad` that a step divides and clips: the parameters, and the holders of low-rank
        gradients.
        """
        return [holder for _, holder in self.named_gradient_holders()]

    def named_gradient_holders(self) -> Iterator[tuple[str, HasGradient]]:
        """`gradient_holders`, each with the name of its parameter."""
        yield from self.parameters.items()
        names = {parameter: name for name, parameter in self.parameters.items()}
        for optimizer in self._galore_optimizers():
            for parameter, low_rank in optimizer.gradients.items():
                yield names[parameter], low_rank

    def named_gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        """The gradient that each parameter has, low-rank where it is projected."""
        low_rank = {
            parameter: low.grad
            for optimizer in self._galore_optimizers()
            for parameter, low in optimizer.gradients.items()
        }
        for name, parameter in self.parameters.items():
            yield name, low_rank.get(parameter) if parameter.grad is None else parameter.grad

    def step(self, free_gradients: bool = False) -> None:
        """Updates every parameter that has a gradient; with `free_gradients` each gradient goes as it has been used.

        The result is the same bit for bit. On CPU parameters are always stepped one by one: 60M parameters in 115
        tensors take 43 ms either way. On CUDA it costs a launch per parameter instead of one for all.
        """
        # Row-sparse gradients come last, one at a time: those that must be made dense then find the others freed.
        row_sparse = {parameter for parameter in self.parameters.values() if has_sparse_gradient(parameter)}
        for optimizer in self.optimizers:
            if _projects(optimizer):
                optimizer.step(free_gradients)
            elif (
                free_gradients
                or row_sparse
                or all(p.device.type == "cpu" for group in optimizer.param_groups for p in group["params"])
            ):
                _step_one_by_one(optimizer, set(self.parameters.values()) - row_sparse, free_gradients)
            else:
                optimizer.step()
        for optimizer in self.optimizers if row_sparse else ():
            _step_one_by_one(optimizer, row_sparse, free_gradients)

    def zero_grad(self) -> None:
        """Drops all gradients (sets them to None)."""
        for parameter in self.parameters.values():
            parameter.grad = None
        for optimizer in self._galore_optimizers():
            optimizer.zero_grad()

    def state_tensors(self) -> dict[str, Tensor]:
        """The state itself by name, not a copy: the next step changes it."""
        return {
            f"{key}.{name}": value
            for name, parameter in self.parameters.items()
            for key, value in self._optimizer_of[parameter].state.get(parameter, {}).items()
            if value is not None  # torch keeps `momentum_buffer: None` for SGD without momentum
        }

    def state_scalars(self) -> dict[str, Any]:
        """The JSON part of the state: the kind, how it keeps moments where that can be chosen, and the parameters that
        have had no gradient yet."""
        unstepped = [name for name, p in self.parameters.items() if not self._optimizer_of[p].state.get(p)]
        scalars: dict[str, Any] = {"kind": self.kind, "unstepped": unstepped}
        # Not of float32, which a checkpoint means that was written before there was a choice.
        return scalars if self._moments_kind == _FLOAT32 else {**scalars, "moments": self._moments_kind}

    def empty_state(self, scalars: Mapping[str, Any]) -> dict[str, Tensor]:
        """Tensors to read a saved state into, for `load_state`; of a paged state they are the pages themselves.

        Raises CheckpointError for another kind of optimizer.
        """
        tensors = {}
        for name, spec in self._expected_state(scalars).items():
            key, _, parameter_name = name.partition(".")
            parameter = self.parameters[parameter_name]
            optimizer = self._optimizer_of[parameter]
            if isinstance(optimizer, AdamW) and optimizer.pages is not None:
                tensors[name] = optimizer.pages.tensors(parameter)[key]
            else:
                tensors[name] = torch.empty(spec.shape, dtype=spec.dtype)
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        """Replaces the whole state; the next step is then the one the saved run would have made.

        The tensors become the state (a copy would double it in memory): the caller must not use them afterwards.
        Raises CheckpointError, before anything is changed, for another kind of optimizer and for a state tensor that is
        missing, unknown, or of another shape or type.
        """
        expected = self._expected_state(scalars)
        check_state(tensors, expected)
        states: dict[AnyOptimizer, dict[Parameter, dict[str, Tensor]]] = defaultdict(dict)
        for name in expected:
            key, _, parameter_name = name.partition(".")
            parameter = self.parameters[parameter_name]
            states[self._optimizer_of[parameter]].setdefault(parameter, {})[key] = tensors[name]
        for optimizer in self.optimizers:
            replace_state(optimizer, states[optimizer])

    def state_bytes(self) -> int:
        """Bytes of state once every parameter has been stepped, known before the first step allocates it."""
        return self._bytes.state

    def resident_state_bytes(self) -> int:
        """The part of `state_bytes` that stays in memory; of paged state, that of the largest parameter."""
        return self._bytes.resident

    def gradient_bytes(self) -> int:
        """The bytes of all gradients of a step; projected ones have a low rank, and one of them is whole at a time."""
        return self._bytes.gradients

    @property
    def _moments_kind(self) -> str:
        return self.section.moments if isinstance(self.section, sections.AdamW) else _FLOAT32

    @property
    def _bytes(self) -> OptimizerBytes:
        shapes = {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}
        return optimizer_bytes(self.section, shapes, paged=self.paged)

    def _galore_optimizers(self) -> list[GaLore]:
        return [optimizer for optimizer in self.optimizers if _projects(optimizer)]

    def _expected_state(self, scalars: Mapping[str, Any]) -> TensorSpecs:
        """Shape and type of every tensor of the state that `state_scalars` belong to, by its name.

        Raises CheckpointError for another kind of optimizer, and for moments that are kept in another way.
        """
        if scalars.get("kind") != self.kind:
            raise CheckpointError(
                f"the checkpoint holds the state of optimizer {scalars.get('kind')!r}, the recipe asks for "
                f"{self.kind!r}. Resume with the recipe of the run, or start a new run from its weights."
            )
        if (moments := scalars.get("moments", _FLOAT32)) != self._moments_kind:
            raise CheckpointError(
                f"optimizer.moments: the checkpoint holds {moments}, the recipe asks for {self._moments_kind}. "
                f"Resume with moments: {moments}, or start a new run from its weights."
            )
        unstepped = set(scalars.get("unstepped", ()))
        return {
            f"{key}.{name}": spec
            for name, parameter in self.parameters.items()
            if name not in unstepped
            for key, spec in specs_of(parameter_state(self.section, name, tuple(parameter.shape))).items()
        }


def build(
    named_parameters: Iterable[tuple[str, Parameter]],
    section: sections.Optimizer,
    *,
    rate_of: RateOf | None = None,
    offload: bool = False,
    folder: str | None = None,
    paged_state: PagedState | None = None,
) -> Optimizers:
    """Builds the optimizer of a recipe over the trainable ones of `named_parameters` (all float32; frozen ones may be
    any).

    rate_of: the ratio of a parameter's learning rate, by its name, to the recipe's; by default 1 for all.
    offload: keep AdamW's moments as paged-adamw does: in a file in `folder`, or on a GPU in the host's memory.
    paged_state: makes the pages of paged-adamw and offloaded state, from the specs of each parameter's tensors and the
        folder (`memory.pages`); only called for those.
    Raises ModelError when nothing is trainable or a parameter is not float32; RecipeError when the section does not fit
    the parameters; ResourceError when paged state has no room.
    """
    named = trainable(named_parameters)
    if not named:
        raise ModelError("the model has no trainable parameter: every one is frozen (requires_grad is False).")
    for name, parameter in named:
        if parameter.dtype != torch.float32:
            raise ModelError(
                f"parameter {name} is {parameter.dtype}, but trained parameters are float32. "
                "Load the model in float32; `precision` sets the type of activations."
            )
    paged = offload or isinstance(section, sections.PagedAdamW)
    # The section stays the recipe's own: offloaded state is the same, so a resumed run may begin to offload it.
    make_pages = None
    if paged:
        assert paged_state is not None, "a paged optimizer needs `paged_state`, which makes its pages"
        assert isinstance(section, sections.AdamW | sections.AdamW8bit | sections.PagedAdamW), (
            f"the recipe's rules offload AdamW's state alone, not that of {section.kind}"
        )
        own_folder = section.folder if isinstance(section, sections.PagedAdamW) else None
        in_folder = own_folder or (folder if offload else None)
        make_pages = partial(_pages_in, paged_state, in_folder)
    return Optimizers(section, _make_optimizers(named, section, rate_of, make_pages), named, paged=paged)


def _pages_in(paged_state: PagedState, folder: str | None, specs: Mapping[Parameter, TensorSpecs]) -> StatePages:
    return paged_state(specs, folder)


def _make_optimizers(
    named: NamedParameters,
    section: sections.Optimizer,
    rate_of: RateOf | None,
    make_pages: Callable[[Mapping[Parameter, TensorSpecs]], StatePages] | None,
) -> list[AnyOptimizer]:
    groups = _param_groups(named, section, rate_of)
    rate = section.learning_rate
    match section:
        case sections.AdamW() | sections.AdamW8bit() | sections.PagedAdamW():
            moments = _moments(section)
            specs = {parameter: moments.specs(parameter.shape) for _, parameter in named}
            pages = None if make_pages is None else make_pages(specs)
            return [AdamW(groups, rate, section.betas, section.eps, moments=moments, pages=pages)]
        case sections.SGD():
            # fused is one pass over memory on CPU; on CUDA not with a parameter that gets its first gradient late.
            fused = all(parameter.device.type == "cpu" for _, parameter in named)
            return [torch.optim.SGD(groups, rate, section.momentum, nesterov=section.nesterov, fused=fused)]
        case sections.Adafactor():
            return [torch.optim.Adafactor(groups, rate, section.beta2_decay, d=section.clip_threshold)]
        case sections.Lion():
            from danlu.optim.lion import Lion

            return [Lion(groups, lr=rate, betas=section.betas)]
        case sections.Muon():
            return _muon(named, section, rate_of)
        case sections.GaLore():
            return _galore(named, section, rate_of)


def _projects(optimizer: AnyOptimizer) -> TypeIs[GaLore]:
    """Whether the optimizer is GaLore, without loading GaLore to see that others are not."""
    return not isinstance(optimizer, AdamW | torch.optim.Optimizer)


def _moments(section: sections.Optimizer) -> Moments:
    """The moments of a section's AdamW, or of its AdamW part."""
    if has_bfloat16_moments(section):
        from danlu.optim.bfloat16_moments import Bfloat16Moments

        return Bfloat16Moments()
    bits = eight_bits(section)
    if bits is None:
        return Float32Moments()
    from danlu.optim.eight_bit import EightBitMoments

    return EightBitMoments(bits.block, bits.smallest)


def _hidden(named: NamedParameters) -> tuple[NamedParameters, NamedParameters]:
    """Hidden matrices, and the rest (stacked [E, out, in] weights too)."""
    hidden = [(name, parameter) for name, parameter in named if is_hidden(name, parameter.ndim)]
    names = {name for name, _ in hidden}
    return hidden, [pair for pair in named if pair[0] not in names]


def _muon(named: NamedParameters, section: sections.Muon, rate_of: RateOf | None) -> list[AnyOptimizer]:
    """Muon for hidden matrices, AdamW for the rest."""
    hidden, rest = _hidden(named)
    optimizers: list[AnyOptimizer] = []
    if hidden:
        groups = _param_groups(hidden, section, rate_of)
        rate, steps = section.learning_rate, section.newton_schulz_steps
        optimizers.append(torch.optim.Muon(groups, lr=rate, momentum=section.momentum, ns_steps=steps))
    if rest:
        groups = _param_groups(rest, section, rate_of)
        optimizers.append(AdamW(groups, section.adamw_learning_rate, section.adamw_betas, eps=1e-8))
    return optimizers


def _galore(named: NamedParameters, section: sections.GaLore, rate_of: RateOf | None) -> list[AnyOptimizer]:
    """GaLore for hidden matrices, AdamW for the rest."""
    hidden, rest = _hidden(named)
    if not hidden:
        raise ModelError("the model has no trainable hidden matrix that optimizer galore could project. Use adamw.")
    name, narrowest = min(hidden, key=lambda pair: min(pair[1].shape))
    if section.rank > min(narrowest.shape):
        raise RecipeError(
            f"optimizer.rank: {section.rank} is above {min(narrowest.shape)}, the smaller dimension of {name} "
            f"{list(narrowest.shape)}. Use {min(narrowest.shape)} or less."
        )
    moments = _moments(section)
    rate, betas, eps = section.learning_rate, section.betas, section.eps
    groups = _param_groups(hidden, section, rate_of)
    from danlu.optim.galore import GaLore

    rank, every, scale = section.rank, section.update_every, section.scale
    optimizers: list[AnyOptimizer] = [
        GaLore(groups, rate, betas, eps, rank=rank, update_every=every, scale=scale, moments=moments)
    ]
    if rest:
        groups = _param_groups(rest, section, rate_of)
        optimizers.append(AdamW(groups, rate, betas, eps, moments=moments))
    return optimizers


def _param_groups(named: NamedParameters, section: sections.Optimizer, rate_of: RateOf | None) -> list[dict[str, Any]]:
    return parameter_groups(named, section.decay, section.weight_decay, rate_of)


def _step_one_by_one(optimizer: AnyOptimizer, parameters: Set[Parameter], free_gradients: bool) -> None:
    """Steps those of an optimizer's parameters that are in `parameters`, one at a time.

    For each, the optimizer's groups are cut down to that parameter alone. The result is the same: no optimizer carries
    anything from one parameter of a step to the next.
    """
    members = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = []
    try:
        for group, own in zip(optimizer.param_groups, members, strict=True):
            for parameter in own:
                if parameter.grad is None or parameter not in parameters:
                    continue
                sparse = has_sparse_gradient(parameter)
                if not (sparse and isinstance(optimizer, AdamW) and optimizer.step_rows(group, parameter)):
                    densify_gradient(parameter)
                    group["params"] = [parameter]
                    optimizer.step()
                if free_gradients:
                    parameter.grad = None
            group["params"] = []
    finally:
        for group, own in zip(optimizer.param_groups, members, strict=True):
            group["params"] = own
