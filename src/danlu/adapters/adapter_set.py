"""The adapters of one model: put into its slots, switched, taken out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from danlu.adapters.adapter import DenseLinear, in_float32
from danlu.adapters.build import BuildContext, build_modules
from danlu.adapters.lora import LowRank
from danlu.adapters.low_rank_init import initialize_from_base
from danlu.adapters.prompt import Prompt, VirtualTokens
from danlu.adapters.shapes import BASE_CHANGING_INITS, NO_TOKENS, trained_in_full
from danlu.adapters.slot import Slot, new_slot
from danlu.adapters.targets import choose, sites_of_rows
from danlu.adapters.token_rows import TokenRows, build_rows
from danlu.core.errors import ModelError
from danlu.core.layer_types import Site

FROZEN = ("initial_A", "initial_B", "vera_A", "vera_B")
"""Parameters of adapters that are saved and never trained."""


@dataclass
class TrainedCopy:
    """A parameter of the base that an adapter trains in full: while the adapter is active, the copy is in its place."""

    name: str  # of the parameter
    owner: nn.Module
    attribute: str
    original: Parameter
    trained: Parameter


@dataclass
class AddedAdapter:
    """One adapter of a model, with all that belongs to it."""

    name: str
    section: Any
    sites: list[Site]
    modules: dict[str, nn.Module]  # by site, or by the slot they sit in where that is no site: "layers.0.after_mlp"
    copies: list[TrainedCopy] = field(default_factory=list)

    def slots(self) -> dict[str, nn.Module]:
        """The modules by the slot they sit in: "layers.0.attention.q_proj.adapter"."""
        sites = {site.name for site in self.sites}
        return {f"{place}.adapter" if place in sites else place: module for place, module in self.modules.items()}

    def virtual_tokens(self) -> list[VirtualTokens]:
        """Its modules that have virtual tokens; at most one."""
        return [module for module in self.modules.values() if isinstance(module, VirtualTokens)]

    def base_changing_sites(self) -> list[Site]:
        """The sites where its initial factors were subtracted from the base."""
        return [site for site in self.sites if _changed_base(self.modules[site.name])]


@dataclass(eq=False)
class AdapterSet:
    """All adapters of a model by name; some are active, stacked one on top of the other.

    The order of calls where weights are still to be loaded: `add`, then `prepare_weight` for each weight as it comes
    (an initialisation may subtract its factors from it), then `finish_loading`. On a model that has its weights `add`
    does all of it.

    Args:
        model: its parameters are frozen from now on.
        sites: every module of the model where an adapter may sit.
        hf_name: from the name of a module or parameter to its name in Hugging Face folders.
        build_context: the arguments for building modules.
        head_as_linear: gives a head that is tied to the embedding a linear layer of its own, and returns that.
        quantize_dequantize: a matrix as it comes back from the quantization of the base; for LoftQ.
    """

    model: nn.Module
    sites: Sequence[Site]
    hf_name: Callable[[str], str]
    build_context: BuildContext
    head_as_linear: Callable[[], nn.Module] = field(kw_only=True)
    quantize_dequantize: Callable[[Tensor], Tensor] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self.model.requires_grad_(False)
        self.added: dict[str, AddedAdapter] = {}
        self.active: tuple[str, ...] = ()
        self.tied = any(site.module is None for site in self.sites)
        """Whether the base ties its head to the embedding."""

    # ── putting in and taking out ──

    def add(
        self, name: str, section: Any, *, token_ids: Mapping[str, Sequence[int]] = NO_TOKENS, check_ranks: bool = True
    ) -> None:
        """Puts an adapter with first values into the model and activates it on top of those that are active.

        token_ids: tokens with rows that it trains, of the embedding and of the head ("embedding", "head").
        check_ranks: False for the section of an adapter that exists: PEFT may have cut its ranks to a layer's sides.
        Raises RecipeError for targets that match nothing and settings that do not fit a layer, and ModelError for a
        name that is taken and a stack that cannot be computed.
        """
        if name in self.added:
            raise ModelError(f"an adapter named {name!r} is there already")
        chosen = choose(self.sites, section, check_ranks=check_ranks)
        with_rows = sites_of_rows(self.sites, chosen, section, token_ids, tied=self.tied)
        sites = [
            site if site.module is not None else replace(site, module=self.head_as_linear())
            for site in (*chosen, *with_rows)
        ]
        (vocab_size,) = (site.shape[0] for site in self.sites if site.group == "embedding")
        taken = [tokens.ids.stop for added in self.added.values() for tokens in added.virtual_tokens()]
        first_id = max([vocab_size, *taken])
        modules = build_modules(
            sites[: len(chosen)], section, name, self.build_context, self.sites, first_virtual_id=first_id
        )
        modules |= build_rows(with_rows, token_ids, tied=self.tied, device=self.build_context.device)
        added = AddedAdapter(name, section, sites, modules)
        self.added[name] = added
        for slot, module in added.slots().items():
            self._slot(slot)[name] = module
        # Weights on the meta device are still to be loaded: then the caller goes on with `prepare_weight`.
        if not any(parameter.is_meta for parameter in self.model.parameters()):
            for site in sites:
                self._prepare_in_place(site, section)
            self.finish_loading()
        try:
            self.activate(*self.active, name)
        except ModelError:
            self.remove(name)
            raise

    def remove(self, name: str) -> None:
        """Removes an adapter, and adds the factors that its initialisation subtracted to the base again.

        Raises ModelError where that base is packed: the sum would have to be quantized again.
        """
        added = self.added[name]
        changed = added.base_changing_sites()
        if any(site.module.weight is None for site in changed):
            raise ModelError(
                f"adapter {name!r} ({added.section.init}) took its start out of a base that was packed without it. "
                "Load the base again to be without it"
            )
        self.activate(*(active for active in self.active if active != name))
        for site in changed:
            module: Any = added.modules[site.name]
            weight = site.module.weight
            with torch.no_grad():
                weight.addmm_(module.initial_B.to(weight.dtype), module.initial_A.to(weight.dtype), alpha=module.scale)
        for slot in added.slots():
            del self._slot(slot)[name]
        del self.added[name]

    def load_initial_factors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Sets an adapter's initial factors to those of the run that is resumed; called before weights are loaded.

        tensors: the run's saved tensors by name; other tensors, and adapters without initial factors, are ignored.
        """
        for site, module in self.added[name].modules.items():
            a, b = (tensors.get(f"{site}.adapter.{name}.{key}") for key in ("initial_A", "initial_B"))
            if isinstance(module, LowRank) and a is not None and b is not None:
                module.set_initial_factors(a, b)

    def prepare_weight(self, site_name: str, weight: Tensor) -> Tensor:
        """A weight [O, I] as it was loaded -> the weight less initial factors, float32; or the weight itself.

        Raises ModelError where a resumed run's LoftQ gets other factors than before.
        """
        for added in self.added.values():
            module = added.modules.get(site_name)
            if isinstance(module, LowRank) and added.section.init in BASE_CHANGING_INITS:
                weight = initialize_from_base(
                    module,
                    weight,
                    added.section,
                    site_name,
                    generator=self.build_context.generator(f"{site_name}.{added.name}.svd"),
                    quantize_dequantize=self.quantize_dequantize,
                )
        return weight

    def changed_by_initialization(self) -> set[str]:
        """Names of the base's parameters from which `prepare_weight` takes a part, or may."""
        return {
            f"{name}.weight"
            for added in self.added.values()
            for name, module in added.modules.items()
            if isinstance(module, LowRank) and added.section.init in BASE_CHANGING_INITS
        }

    @torch.no_grad()
    def loaded_weight(self, site: Site) -> Tensor | None:
        """A site's weight [O, I] as it was loaded, in float32 or wider: base plus all that was subtracted from it.

        None where the base is packed.
        """
        copies = [copy for added in self.added.values() for copy in added.copies if copy.name == f"{site.name}.weight"]
        weight: Tensor | None = copies[0].original if copies else site.module.weight
        if weight is None:
            return None
        weight = in_float32(weight)
        for added in self.added.values():
            module: Any = added.modules.get(site.name)
            if _changed_base(module):
                weight = weight.addmm(in_float32(module.initial_B), in_float32(module.initial_A), alpha=module.scale)
        return weight

    def finish_loading(self, within: str = "") -> None:
        """Finishes everything that needs the loaded weights: norms for DoRA, the start of soft prompts, copies of
        trained parameters.

        within: the prefix of the modules with loaded weights ("layers.3."), where others have none yet.
        """
        present = {name for name, _ in self.model.named_modules()}  # of a pipeline, other stages have the others
        for added in self.added.values():
            for site in added.sites:
                if not site.name.startswith(within) or site.name not in present:
                    continue
                module = added.modules[site.name]
                if isinstance(module, LowRank) and module.base_row_squares is None:
                    module.measure_base(site.module)
                if isinstance(module, Prompt) and not module.is_initialized:
                    module.initialize_from(site.module)
                if isinstance(module, TokenRows) and not module.is_initialized:
                    module.initialize_from(site.module.weight)
            copied = {copy.name for copy in added.copies}
            names = [name for name in self._fully_trained(added) if name.startswith(within) and name not in copied]
            added.copies += map(self._copy, names)
        self.activate(*self.active)

    def copy_trained(self, names: Collection[str]) -> None:
        """Makes the copies of those of these parameters that an adapter trains in full, before they leave the model."""
        for added in self.added.values():
            added.copies += [self._copy(name) for name in self._fully_trained(added) if name in names]
        self.activate(*self.active)

    def _prepare_in_place(self, site: Site, section: Any) -> None:
        if site.group == "embedding" or getattr(section, "init", None) not in BASE_CHANGING_INITS:
            return
        weight = dense_linear(site.module).weight
        base = self.prepare_weight(site.name, weight)
        if base is not weight:
            if site.module.weight is None:
                raise ModelError(
                    f"{site.hf_name} is quantized already; an initialisation that takes a part out of the weight "
                    "(pissa, olora, loftq) has to come before. Load the original weights"
                )
            with torch.no_grad():
                site.module.weight.copy_(base)

    def _slot(self, name: str) -> Slot:
        """The slot of this name, an empty one where nothing was in it."""
        owner_name, _, attribute = name.rpartition(".")
        owner: Any = self.model.get_submodule(owner_name)
        if getattr(owner, attribute) is None:
            empty = new_slot(attribute, next((site for site in self.sites if site.name == owner_name), None))
            empty.active = self.active
            setattr(owner, attribute, empty)
        slot = getattr(owner, attribute)
        assert isinstance(slot, Slot)
        return slot

    def _fully_trained(self, added: AddedAdapter) -> Iterator[str]:
        """Names of the base's parameters that this adapter trains in full; errors as `shapes.trained_in_full`."""
        if "lm_head" in getattr(added.section, "modules_to_save", []):
            self.head_as_linear()
        names = self.base_parameters()
        return trained_in_full(
            added.section,
            names,
            {*names, *(copy.name for copy in added.copies)},  # of a stage of a pipeline, those of other stages too
            adapted={f"{site.name}.bias" for site in added.sites},
            stacked={site.name for site in self.sites if site.experts is not None},
            hf_name=self.hf_name,
        )

    def fully_trained(self) -> set[str]:
        """Names of the base's parameters of which some adapter trains a copy."""
        return {name for added in self.added.values() for name in self._fully_trained(added)}

    def base_parameters(self) -> dict[str, Parameter]:
        """The model's own parameters by name, without those of adapters and packed weights."""
        return {
            name: parameter
            for name, parameter in self.model.named_parameters(remove_duplicate=False)
            if not {"adapter", "quantized", "prefix", "after_attention", "after_mlp"} & set(name.split("."))
        }

    def _copy(self, name: str) -> TrainedCopy:
        owner_name, _, attribute = name.rpartition(".")
        owner = self.model.get_submodule(owner_name)
        original = getattr(owner, attribute)
        return TrainedCopy(name, owner, attribute, original, Parameter(in_float32(original.detach()).clone()))

    def refresh_copies(self) -> None:
        """Takes the active copies from their places after the model's parameters were replaced (sharded, moved)."""
        highest = {copy.name: copy for name in self.active for copy in self.added[name].copies}
        for copy in highest.values():
            copy.trained = getattr(copy.owner, copy.attribute)

    # ── switching ──

    def activate(self, *names: str) -> None:
        """Makes exactly these adapters active, lowest first; without names the base alone.

        Raises ModelError for a name that is not there, and for an order that cannot be computed.
        """
        if unknown := [name for name in names if name not in self.added]:
            raise ModelError(f"there is no adapter {unknown[0]!r}; there are: {', '.join(self.added) or 'none'}")
        restoring = [name for name, added in self.added.items() if name not in names and added.base_changing_sites()]
        for name in names:
            if self.added[name].section.kind == "dora" and any(
                {site.name for site in self.added[below].sites} & {site.name for site in self.added[name].sites}
                for below in (*restoring, *names[: names.index(name)])
            ):
                raise ModelError(
                    f"adapter {name!r} is DoRA, which scales the weight itself: no other adapter can be stacked below "
                    "it. Put it first, or merge the others into the base"
                )
        self.active = names
        for slot in self.model.modules():
            if isinstance(slot, Slot):
                slot.active = names
        # All originals first, then the copies from the lowest adapter up: where several have one, the highest wins.
        for added in self.added.values():
            for module in added.modules.values():
                if isinstance(module, LowRank):
                    module.restores_base = added.name in restoring
            for copy in added.copies:
                setattr(copy.owner, copy.attribute, copy.original)
        for name in names:
            for copy in self.added[name].copies:
                setattr(copy.owner, copy.attribute, copy.trained)

    @property
    def virtual_token_ids(self) -> tuple[int, ...]:
        """Ids past the vocabulary that every document has to begin with while the active adapters are active."""
        return self.virtual_token_ids_of(self.active)

    def virtual_token_ids_of(self, names: Sequence[str]) -> tuple[int, ...]:
        """The same of a stack of adapters, lowest first, whether or not it is active."""
        tokens = [tokens for name in names for tokens in self.added[name].virtual_tokens()]
        return tuple(token for virtual in tokens for token in virtual.ids)

    def begin_pass(self, tokens: Tensor) -> None:
        """Tells active adapters which tokens [T] the next passes are over; see `VirtualTokens.begin_pass`."""
        for name in self.active:
            for virtual in self.added[name].virtual_tokens():
                virtual.begin_pass(tokens)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Makes the model its base, bit for bit, within the block.

        Where an initialisation subtracted its factors from the base (PiSSA, OLoRA, LoftQ), it is the base plus these
        factors, which is the original model up to rounding; the base without them never was a model.
        """
        with self.switched_to(()):
            yield

    @contextmanager
    def without(self, name: str) -> Iterator[None]:
        """Switches one adapter off within the block, with its copies of parameters; those stacked below it stay on.

        It is the model that an adapter which starts without effect was put on: the reference of preference and
        reinforcement learning.
        """
        with self.switched_to([active for active in self.active if active != name]):
            yield

    @contextmanager
    def switched_to(self, names: Sequence[str]) -> Iterator[None]:
        """Makes exactly these adapters active within the block, lowest first."""
        active = self.active
        if active != tuple(names):
            self.activate(*names)
        try:
            yield
        finally:
            if self.active != active:
                self.activate(*active)

    def train_only(self, *names: str) -> None:
        """Makes the parameters of these adapters trainable, except those that never train, and freezes all others."""
        for added in self.added.values():
            for name, parameter in self._parameters(added):
                frozen_a = getattr(added.section, "freeze_a", False) and name.endswith("lora_A")
                parameter.requires_grad_(added.name in names and not frozen_a and not name.endswith(FROZEN))

    def tensors(self, name: str) -> dict[str, Parameter]:
        """All parameters of one adapter, by the names that they have in the model while the adapter is active."""
        return dict(self._parameters(self.added[name]))

    def _parameters(self, added: AddedAdapter) -> Iterator[tuple[str, Parameter]]:
        seen: set[Parameter] = set()  # a parameter that modules share belongs to the first of them
        for slot, module in added.slots().items():
            for name, parameter in module.named_parameters():
                if parameter not in seen:
                    yield f"{slot}.{added.name}.{name}", parameter
                seen.add(parameter)
        for copy in added.copies:
            yield copy.name, copy.trained


def dense_linear(linear: Any) -> DenseLinear:
    """A linear layer's weight, dequantized where it is packed, and bias, without its adapters; float32 or wider."""
    weight = linear.dense_weight(torch.float32) if linear.weight is None else in_float32(linear.weight)
    return DenseLinear(weight, None if linear.bias is None else in_float32(linear.bias))


def _changed_base(module: nn.Module | None) -> bool:
    """Whether a module's initial factors were subtracted from the base."""
    return isinstance(module, LowRank) and module.initial_A is not None
