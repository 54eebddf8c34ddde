"""The adapters of one model: put into its slots, switched, merged, taken out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from danlu.adapters import low_rank_init
from danlu.adapters.adapter import Dense
from danlu.adapters.build import BuildContext, build_modules
from danlu.adapters.lora import LowRank
from danlu.adapters.prompt import Prompt
from danlu.adapters.slot import EmbeddingSlot, LinearSlot, Slot, new_slot
from danlu.adapters.targets import choose
from danlu.adapters.virtual_tokens import VirtualTokens
from danlu.errors import ModelError, RecipeError
from danlu.types import Site

BASE_CHANGING_INITS = ("pissa", "olora", "loftq")
"""Initialisations that take their start out of the base."""
UNMERGEABLE_KINDS = ("bottleneck", "prefix", "prompt")
"""Kinds that cannot be said as other weights of the same model."""
FROZEN = ("initial_A", "initial_B", "vera_A", "vera_B")
"""Parameters of adapters that are kept and never trained."""


@dataclass
class Copy:
    """A parameter of the base that is trained in full: the original stays, and steps aside while the copy is active."""

    name: str  # of the parameter
    owner: nn.Module
    attribute: str
    original: Parameter
    trained: Parameter


@dataclass
class AddedAdapter:
    """One adapter, wherever it sits."""

    name: str
    section: Any
    sites: list[Site]
    modules: dict[str, nn.Module]  # by site, or by the slot they sit in where that is no site: "layers.0.after_mlp"
    copies: list[Copy] = field(default_factory=list)

    def slots(self) -> dict[str, nn.Module]:
        """The modules by the slot they sit in: "layers.0.attention.q_proj.adapter"."""
        sites = {site.name for site in self.sites}
        return {f"{place}.adapter" if place in sites else place: module for place, module in self.modules.items()}

    def virtual(self) -> Iterator[VirtualTokens]:
        yield from (module for module in self.modules.values() if isinstance(module, VirtualTokens))


class AdapterSet:
    """All adapters of a model by name, of which some are active, one upon the other.

    The order of calls where weights are still to be loaded: `add`, then `prepare_weight` for each weight as it comes
    (an initialisation may take its start out of it), then `finish_loading`. On a model that has its weights `add` does
    all of it.

    Args:
        model: frozen from now on.
        sites: every place of the model where an adapter may sit.
        hf_name: what Hugging Face folders call a module.
        rounded: a matrix as it comes back from the quantization of the base; for LoftQ.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[Site],
        hf_name: Callable[[str], str],
        build_context: BuildContext,
        *,
        head_as_linear: Callable[[], nn.Module],
        rounded: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.model = model.requires_grad_(False)
        self.sites = tuple(sites)
        self.hf_name = hf_name
        self.build_context = build_context
        self.added: dict[str, AddedAdapter] = {}
        self.active: tuple[str, ...] = ()
        self.head_as_linear = head_as_linear
        self._rounded = rounded
        self._merged: list[_Before] = []
        self.tied = any(site.module is None for site in self.sites)

    # ── putting in and taking out ──

    def add(self, name: str, section: Any, *, given: bool = False) -> None:
        """Puts an adapter with first values into the model and activates it above those that are active.

        given: the section was read off an adapter that exists, so its ranks are not judged.
        Raises RecipeError for targets that match nothing and settings that do not fit a layer.
        """
        if name in self.added:
            raise ModelError(f"an adapter named {name!r} is there already")
        sites = [self._opened(site) for site in choose(self.sites, section, given=given)]
        taken = [one.ids.stop for other in self.added.values() for one in other.virtual()]
        (words,) = (site.shape[0] for site in self.sites if site.group == "embedding")
        first_virtual = max([words, *taken])
        modules = build_modules(sites, section, name, self.build_context, every=self.sites, first_virtual=first_virtual)
        added = AddedAdapter(name, section, sites, modules)
        self.added[name] = added
        for slot, module in added.slots().items():
            self._slot(slot)[name] = module
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
        """Takes an adapter out, and puts back what its initialisation took from the base.

        Raises ModelError where that base is packed: it cannot be had back without rounding again.
        """
        added = self.added[name]
        starts = [site for site in added.sites if _takes_from_base(added.modules[site.name])]
        if any(site.module.weight is None for site in starts):
            raise ModelError(
                f"adapter {name!r} ({added.section.init}) took its start out of a base that was packed without it. "
                "Load the base anew to be without it"
            )
        self.activate(*(other for other in self.active if other != name))
        for site in starts:
            module: Any = added.modules[site.name]
            weight = site.module.weight
            with torch.no_grad():
                weight.addmm_(module.initial_B.to(weight.dtype), module.initial_A.to(weight.dtype), alpha=module.scale)
        for slot in added.slots():
            del self._slot(slot)[name]
        del self.added[name]

    def load_initial_factors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Before weights are loaded: where an adapter's start was, from the tensors of the run that began there."""
        for site, module in self.added[name].modules.items():
            a, b = (tensors.get(f"{site}.adapter.{name}.{key}") for key in ("initial_A", "initial_B"))
            if isinstance(module, LowRank) and a is not None and b is not None:
                module.begin(a, b)

    def prepare_weight(self, site_name: str, weight: Tensor) -> Tensor:
        """A weight as it was loaded -> the base: what an initialisation leaves of it, float32, or the weight itself."""
        for added in self.added.values():
            module = added.modules.get(site_name)
            if isinstance(module, LowRank) and added.section.init in BASE_CHANGING_INITS:
                weight = self._start(site_name, added, module, weight)
        return weight

    @torch.no_grad()
    def loaded_weight(self, site: Site) -> Tensor | None:
        """A site's weight [O, I] as it was loaded, in float32 or wider: with the starts that adapters took out of it.

        None where it is packed.
        """
        copies = [copy for added in self.added.values() for copy in added.copies if copy.name == f"{site.name}.weight"]
        weight: Tensor | None = copies[0].original if copies else site.module.weight
        if weight is None:
            return None
        weight = wide(weight)
        for added in self.added.values():
            module: Any = added.modules.get(site.name)
            if _takes_from_base(module):
                weight = weight.addmm(wide(module.initial_B), wide(module.initial_A), alpha=module.scale)
        return weight

    def finish_loading(self, within: str = "") -> None:
        """After the weights have come: DoRA measures them, and trained copies of parameters are made.

        within: where they have come, where that is not everywhere: "layers.3.".
        """
        for added in self.added.values():
            for site in added.sites:
                if not site.name.startswith(within):
                    continue
                module = added.modules[site.name]
                if isinstance(module, LowRank) and module.weight_norm is None:
                    module.measure(site.module, start=True)
                if isinstance(module, Prompt) and not module.started:
                    module.start(site.module)
            there = {copy.name for copy in added.copies}
            added.copies += [
                self._copy(name) for name in self._fully_trained(added) if name.startswith(within) and name not in there
            ]
        self.activate(*self.active)

    def _start(self, site_name: str, added: AddedAdapter, module: LowRank, weight: Tensor) -> Tensor:
        section, scale = added.section, module.scale
        known = module.initial_A, module.initial_B  # of a run that is taken up again
        if known[0] is not None and known[1] is not None and section.init != "loftq":
            return wide(weight).addmm(known[1], known[0], alpha=-scale)
        match section.init:
            case "pissa":
                generator = self.build_context.generator(f"{site_name}.{added.name}.svd")
                start = low_rank_init.pissa(
                    weight, module.rank, scale, iterations=section.svd_iterations, generator=generator
                )
            case "olora":
                start = low_rank_init.olora(weight, module.rank, scale)
            case _:
                assert self._rounded is not None, "the recipe's rules ask for quantization with loftq"
                start = low_rank_init.loftq(
                    weight, module.rank, scale, iterations=section.loftq_iterations, rounded=self._rounded
                )
        if known[0] is None or known[1] is None:
            module.begin(start.a, start.b)
        elif not (torch.equal(start.a, known[0]) and torch.equal(start.b, known[1])):
            raise ModelError(
                f"{site_name}: LoftQ finds another start here than where the run began (another processor or number of "
                "threads), and with it another base. Go on where it began, or start anew from the exported adapter"
            )
        return start.base

    def _prepare_in_place(self, site: Site, section: Any) -> None:
        if site.group == "embedding" or getattr(section, "init", None) not in BASE_CHANGING_INITS:
            return
        weight = _dense(site.module).weight
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
        owner_name, _, attribute = name.rpartition(".")
        owner: Any = self.model.get_submodule(owner_name)
        if getattr(owner, attribute) is None:
            made = new_slot(attribute, embedding=owner_name == "embed_tokens")
            made.active = self.active
            setattr(owner, attribute, made)
        slot = getattr(owner, attribute)
        assert isinstance(slot, Slot)
        return slot

    def _opened(self, site: Site) -> Site:
        return site if site.module is not None else replace(site, module=self.head_as_linear())

    def _fully_trained(self, added: AddedAdapter) -> Iterator[str]:
        """Names of the base's parameters that this adapter trains as well."""
        section = added.section
        in_full: list[str] = getattr(section, "modules_to_save", [])
        if "lm_head" in in_full:
            self.head_as_linear()
        bias = getattr(section, "bias", "none")
        adapted = {f"{site.name}.bias" for site in added.sites}
        names = self.base_parameters()
        for one in in_full:
            if not any(_within(name, self.hf_name(name), one) for name in names):
                raise RecipeError(f"adapter.modules_to_save: {one!r} matches no module of this model")
        for name in names:
            saved = any(_within(name, self.hf_name(name), one) for one in in_full)
            if saved or (name.endswith(".bias") and (bias == "all" or (bias == "adapted" and name in adapted))):
                yield name

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

    def _copy(self, name: str) -> Copy:
        owner_name, _, attribute = name.rpartition(".")
        owner = self.model.get_submodule(owner_name)
        original = getattr(owner, attribute)
        return Copy(name, owner, attribute, original, Parameter(wide(original.detach()).clone()))

    def refresh_copies(self) -> None:
        """After parameters have been replaced where they sit: the copy that sat there is what sits there now."""
        seen = set()
        for name in reversed(self.active):
            for copy in self.added[name].copies:
                if copy.name not in seen:
                    copy.trained = getattr(copy.owner, copy.attribute)
                seen.add(copy.name)

    # ── switching ──

    def activate(self, *names: str) -> None:
        """Makes exactly these active, lowest first; none leaves the base.

        Raises ModelError for a name that is not there, and for an order that cannot be computed.
        """
        if unknown := [name for name in names if name not in self.added]:
            raise ModelError(f"there is no adapter {unknown[0]!r}; there are: {', '.join(self.added) or 'none'}")
        asleep = [name for name in self.added if name not in names and self._takes_from_base(name)]
        for name in names:
            if self.added[name].section.kind == "dora" and any(
                {site.name for site in self.added[below].sites} & {site.name for site in self.added[name].sites}
                for below in (*asleep, *names[: names.index(name)])
            ):
                raise ModelError(
                    f"adapter {name!r} is DoRA, which scales the weight itself: no other adapter can be stacked below "
                    "it. Put it first, or merge the others into the base"
                )
        assert not self._merged, "adapters are switched while they are merged"
        self.active = names
        for slot in self._slots():
            slot.active = names
        for added in self.added.values():
            for module in added.modules.values():
                if isinstance(module, LowRank):
                    module.asleep = added.name in asleep
            for copy in added.copies:
                setattr(copy.owner, copy.attribute, copy.original)
        for name in names:
            for copy in self.added[name].copies:
                setattr(copy.owner, copy.attribute, copy.trained)

    @property
    def virtual_token_ids(self) -> tuple[int, ...]:
        """Ids past the vocabulary that every document has to begin with while the active adapters are active."""
        return tuple(one for name in self.active for virtual in self.added[name].virtual() for one in virtual.ids)

    def _takes_from_base(self, name: str) -> bool:
        return any(_takes_from_base(module) for module in self.added[name].modules.values())

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Within it the model is its base, bit for bit: the reference of preference and reinforcement learning.

        Where an initialisation took its start out of the base (PiSSA, OLoRA, LoftQ) it is base and start, which is the
        model before training up to rounding; what is left without the start never was a model.
        """
        active = self.active
        self.activate()
        try:
            yield
        finally:
            self.activate(*active)

    def train_only(self, *names: str) -> None:
        """Freezes every adapter but these."""
        for added in self.added.values():
            for name, parameter in self._parameters(added):
                frozen_a = getattr(added.section, "freeze_a", False) and name.endswith("lora_A")
                parameter.requires_grad_(added.name in names and not frozen_a and not name.endswith(FROZEN))

    def tensors(self, name: str) -> dict[str, Parameter]:
        """Everything that makes up one adapter, by its name in the model while the adapter is active."""
        return dict(self._parameters(self.added[name]))

    def _parameters(self, added: AddedAdapter) -> Iterator[tuple[str, Parameter]]:
        seen: set[Parameter] = set()  # what modules share is the first one's
        for slot, module in added.slots().items():
            for name, parameter in module.named_parameters():
                if parameter not in seen:
                    yield f"{slot}.{added.name}.{name}", parameter
                seen.add(parameter)
        for copy in added.copies:
            yield copy.name, copy.trained

    def _slots(self) -> Iterator[Slot]:
        for module in self.model.modules():
            if isinstance(module, Slot):
                yield module

    # ── merging ──

    @torch.no_grad()
    def merged(self, parameter: str) -> Tensor:
        """One parameter of the base with the active adapters in it, float32; a new tensor where anything is added.

        Raises ModelError for a kind of adapter that is no change of weights.
        """
        self.check_mergeable()
        if self.tied and parameter == "lm_head.weight":
            self.head_as_linear()
        owner_name, _, attribute = parameter.rpartition(".")
        owner: Any = self.model.get_submodule(owner_name)
        slot = getattr(owner, "adapter", None)
        if isinstance(slot, EmbeddingSlot):
            return slot.applied(wide(getattr(owner, attribute)))
        if isinstance(slot, LinearSlot) and slot.stack():
            dense = slot.applied(_dense(owner))
            found = dense.weight if attribute == "weight" else dense.bias
            assert found is not None
            return found
        if attribute == "weight" and getattr(owner, "quantized", None) is not None:
            return _dense(owner).weight
        value: Tensor = getattr(owner, attribute)
        return wide(value)

    @torch.no_grad()
    def merge(self, dtype: torch.dtype | None = None, *, for_good: bool = False) -> None:
        """Puts the active adapters into the weights, each rounded once; `unmerge` brings back the very tensors.

        dtype: of merged weights; by default that of the base, or of the matrix that was packed.
        for_good: let go of the base's weights, one by one: there is no way back.
        """
        self.check_mergeable()
        assert not self._merged, "merged already"
        if self.unties_head():
            self.head_as_linear()
        owners: list[Any] = [one for one in self.model.modules() if isinstance(getattr(one, "adapter", None), Slot)]
        for slot_owner in owners:
            slot = slot_owner.adapter
            if not slot.stack():
                continue
            before = _Before(
                slot_owner,
                slot_owner.weight,
                getattr(slot_owner, "quantized", None),
                getattr(slot_owner, "bias", None),
                slot,
            )
            if not for_good:
                self._merged.append(before)
            if isinstance(slot, EmbeddingSlot):
                weight, bias = slot.applied(wide(slot_owner.weight)), None
            else:
                assert isinstance(slot, LinearSlot)
                dense = slot.applied(_dense(slot_owner))
                weight, bias = dense.weight, dense.bias
            stored = dtype or (before.quantized.dtype if before.weight is None else before.weight.dtype)
            slot_owner.weight = Parameter(weight.to(stored), requires_grad=False)
            if before.quantized is not None:
                slot_owner.quantized = None
            if before.bias is not None and bias is not None:
                slot_owner.bias = Parameter(bias.to(before.bias.dtype), requires_grad=False)
            slot.merged = True

    @torch.no_grad()
    def unties_head(self) -> bool:
        """Whether the base ties its head to the embedding, and with the active adapters the two are different."""
        if not self.tied:
            return False
        if getattr(self.model, "lm_head", None) is None:
            embedding: Any = self.model.get_submodule("embed_tokens")
            return isinstance(embedding.adapter, Slot) and bool(embedding.adapter.stack())
        return not torch.equal(self.merged("lm_head.weight"), self.merged("embed_tokens.weight"))

    @torch.no_grad()
    def merge_and_unload(self) -> None:
        """Makes the active adapters part of the weights for good and takes every adapter out; all of it trains again.

        Raises ModelError where the result is no model of this shape: a tied head that is not its embedding any more.
        """
        if self.unties_head():
            raise ModelError(
                "the adapters train the head apart from the embedding, to which the base ties it. Merge them first "
                "(`danlu merge`), which writes a model with a head of its own"
            )
        self.merge(for_good=True)
        if self.tied:
            self.model.lm_head = None  # type: ignore[assignment]
        for module in self.model.modules():
            if isinstance(getattr(module, "adapter", None), Slot):
                module.adapter = None  # type: ignore[assignment]
        self.added, self.active = {}, ()
        self.model.requires_grad_(True)

    def unmerge(self) -> None:
        """The base as it was before `merge`, bit for bit, with the adapters beside it again."""
        for before in self._merged:
            before.owner.weight = before.weight
            if before.quantized is not None:
                before.owner.quantized = before.quantized
            if before.bias is not None:
                before.owner.bias = before.bias
            before.slot.merged = False
        self._merged = []

    def check_mergeable(self) -> None:
        """Raises ModelError if an active adapter is of a kind that is no change of weights."""
        for name in self.active:
            if (kind := self.added[name].section.kind) in UNMERGEABLE_KINDS:
                raise ModelError(
                    f"adapter {name!r} ({kind}) changes what flows through the model, not its weights: it cannot be "
                    "merged. Keep it as an adapter folder beside the base"
                )


@dataclass
class _Before:
    """A layer as it was before merging."""

    owner: Any
    weight: Parameter | None
    quantized: Any
    bias: Parameter | None
    slot: Slot


def wide(tensor: Tensor) -> Tensor:
    """In float32, or in float64 where it is that."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _dense(linear: Any) -> Dense:
    weight = linear.dense_weight(torch.float32) if linear.weight is None else wide(linear.weight)
    return Dense(weight, None if linear.bias is None else wide(linear.bias))


def _takes_from_base(module: nn.Module | None) -> bool:
    return isinstance(module, LowRank) and module.takes_from_base


def _within(parameter: str, hf_name: str, module: str) -> bool:
    """Whether a parameter belongs to a module that is named by the end of its name, here or on disk."""
    owners = (parameter.rpartition(".")[0], hf_name.rpartition(".")[0])
    return any(owner == module or owner.endswith(f".{module}") for owner in owners)
