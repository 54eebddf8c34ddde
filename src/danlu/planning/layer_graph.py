"""The values that a layer keeps from its forward pass to its backward pass, by name and in bytes. Imports no torch.

The rules are those of autograd and of danlu's own functions, applied to the list of a layer's operations
(`models.operations`). An operation keeps what its backward pass reads if a gradient goes through it. Two operations
that read one value keep it once. A recomputed function keeps its inputs in place of all that it makes
(`memory.recomputed_function`). Tests compare names and bytes with the tensors that autograd really saves.

D model width
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Literal

from danlu.models.layer_operations import ENTER, layer_operations
from danlu.models.layer_spec import Experts, LayerSpec
from danlu.models.operations import EMBEDDINGS, KEYS, OF_OTHERS, ROTATION, VALUES, Operation, Value, made_by
from danlu.planning.attention_memory import attention_kept
from danlu.planning.batch_shape import WHOLE, BatchShape, RankShare

Recompute = Literal["none", "elementwise", "selective", "full"]
_WITHOUT_RECOMPUTATION = frozenset(("_listed", "operations", "values", "gradients", "with_backward", "saved"))
"""The properties of a `LayerGraph` that do not depend on what is recomputed."""
_TYPE_BYTES = {"float32": 4, "int64": 8, "bool": 1}


@dataclass(frozen=True)
class LowRankAdapter:
    """An adapter of low rank on a product."""

    rank: int
    has_magnitude: bool = False
    """DoRA: the output is kept for the gradient of the magnitude."""
    trains_a: bool = True
    drops_out: bool = False
    """Whether numbers of its input are zeroed, by a mask that each pass draws again (`adapters.dropout`)."""


@dataclass(frozen=True)
class LayerTraining:
    """The parts of a layer that are trained."""

    weights: bool = True
    """Whether all weights of the layer are trained; otherwise they are frozen and have the type of activations."""
    adapters: tuple[tuple[str, LowRankAdapter], ...] = ()
    """The products with an adapter, by their name in the layer: "attention.q_proj"."""
    quantized: bool = False
    """Whether the frozen products are stored in few bits."""
    input_needs_gradient: bool = True
    """Whether a gradient goes back through the layer's input."""
    adapts_embeddings: bool = False
    """Whether an adapter sits on the product that makes layers' own embeddings; gradients go back through them then, as
    where all weights are trained.
    """

    rounded: Literal["kept", "encoded"] | None = None
    """Whether products have weights rounded to a format of few bits: from codes that are kept between updates, or
    encoded for each product; None: they are not rounded."""
    fp8: str | None = None
    """The recipe of products in 8 bits; None without them."""

    @property
    def trains_embeddings(self) -> bool:
        """Whether a gradient goes back through the layer's own embeddings."""
        return self.weights or self.adapts_embeddings

    def adapter_of(self, product: str) -> LowRankAdapter | None:
        """The adapter of a product, by its name in the layer."""
        return next((adapter for name, adapter in self.adapters if name == product), None)


TRAINED = LayerTraining()
"""All weights of a layer are trained."""


@dataclass
class KeptValues:
    """The values that are kept, and the rest that has no name in the list of operations."""

    names: set[str] = field(default_factory=set)
    """Names of values, with `x` for the layer's input, and those of `operations.OF_OTHERS` that it reads."""
    elements: int = 0
    """Further elements in the type of activations: probabilities, and copies that a kernel fills up or widens."""
    float32: int = 0
    """Further float32 elements: the statistics of attention's rows, and adapters' scaled matrices."""


@dataclass(frozen=True)
class LayerGraph:
    """The operations of one layer as one rank runs them, with the values that their backward passes need."""

    spec: LayerSpec
    width: int
    """D."""
    batch: BatchShape
    training: LayerTraining = TRAINED
    recompute: Recompute = "none"
    share: RankShare = WHOLE
    gathers_again: bool = True
    """Whether tokens that enter a sublayer are gathered once more in the backward pass, under sequence parallelism;
    a whole layer that runs once more keeps them from then on."""

    def recomputing(self, kind: Literal["none", "selective", "full"]) -> LayerGraph:
        """The layer with another kind of recomputation, which changes neither operations nor what each of them saves.

        Not from or to `elementwise`: its attention saves other values.
        """
        assert self.recompute != "elementwise", "its attention saves other values"
        graph = replace(self, recompute=kind)
        vars(graph).update({name: value for name, value in vars(self).items() if name in _WITHOUT_RECOMPUTATION})
        return graph

    @cached_property
    def operations(self) -> tuple[Operation, ...]:
        """The operations in the order of the forward pass, without borders where nothing is gathered or scattered."""
        return self._listed[0]

    @cached_property
    def _listed(self) -> tuple[tuple[Operation, ...], Mapping[str, Value]]:
        """The operations, and all values by name."""
        operations = _operations(self.spec, self.width, self.share)
        values = dict(self._values_of(operations))
        if self.training.fp8 is not None:
            from danlu.planning.kept_in_few_bits import KEEPING, in_few_bits

            if self.training.fp8 in KEEPING:
                adapted = [name for name, _ in self.training.adapters]
                operations = tuple(in_few_bits(operations, values, self.training.fp8, adapted))
        return operations, values

    @cached_property
    def values(self) -> Mapping[str, Value]:
        """The layer's input, values of other layers that it reads, and all values that are made, by name; those that
        are kept in few bits once more."""
        return self._listed[1]

    def _values_of(self, operations: Sequence[Operation]) -> Mapping[str, Value]:
        read = {"x": Value("x", self.width, is_local=True)}
        if self.spec.per_layer_width:
            read[EMBEDDINGS] = Value(EMBEDDINGS, self.spec.per_layer_width, is_local=True)
        if self.spec.mixer.sharing == "reads":
            keys = self.spec.attention
            read |= {name: Value(name, keys.kv_width, parts=keys.kv_heads) for name in (KEYS, VALUES)}
        return read | made_by(operations)

    @property
    def output(self) -> str:
        """The name of the layer's output."""
        return self.operations[-1].makes[0].name

    @cached_property
    def gradients(self) -> frozenset[str]:
        """Names of the values that have a gradient."""
        names = {"x", KEYS, VALUES} if self.training.input_needs_gradient else set[str]()
        names |= {EMBEDDINGS} if self.training.trains_embeddings else set[str]()
        for operation in self.operations:
            if self._needs_gradient(operation, names):
                names |= {value.name for value in operation.makes if value.type not in ("int64", "bool")}
        return frozenset(names)

    @cached_property
    def with_backward(self) -> tuple[Operation, ...]:
        """The operations that have a backward pass, in the order of the forward pass."""
        return tuple(each for each in self.operations if self._needs_gradient(each, self.gradients))

    @cached_property
    def saved(self) -> Mapping[str, tuple[str, ...]]:
        """Name of an operation with a backward pass -> names of the values that this reads."""
        return {operation.name: tuple(self._saved(operation)) for operation in self.with_backward}

    @cached_property
    def regions(self) -> Mapping[str, tuple[Operation, ...]]:
        """Recomputed function -> its operations."""
        regions: dict[str, tuple[Operation, ...]] = {}
        for operation in self.operations:
            if (region := self.region(operation)) is not None:
                regions[region] = (*regions.get(region, ()), operation)
        return regions

    @cached_property
    def region_of(self) -> Mapping[str, str]:
        """Value -> the recomputed function that makes it; other values are left out."""
        return {
            value.name: region
            for region, operations in self.regions.items()
            for operation in operations
            for value in operation.makes
        }

    @cached_property
    def kept(self) -> KeptValues:
        """The values that are kept; those of a recomputed function are replaced by its inputs.

        Under sequence parallelism the tokens that enter a sublayer are gathered again (`memory.recompute`).
        """
        kept = KeptValues()
        if self.recompute == "full":
            if self.with_backward:
                kept.names |= {"x", ROTATION, *self.given}
            return kept
        needed = set[str]()
        for operation in self.with_backward:
            region = self.region(operation)
            if region is not None:
                needed |= {region} if self.saved[operation.name] else set()
                continue
            kept.names |= set(self.saved[operation.name])
            elements, float32 = self.unnamed(operation)
            kept.elements += elements
            kept.float32 += float32
        while made_again := kept.names & self.region_of.keys():
            needed |= {self.region_of[name] for name in made_again}
            kept.names -= made_again
        inputs = {name for region in needed for name in self.inputs_of(region)}
        while made_again := inputs & self.region_of.keys():  # an input of one region is the output of another
            inputs -= made_again
            inputs |= {each for name in made_again for each in self.inputs_of(self.region_of[name])}
        kept.names |= inputs
        if self.recompute == "selective":
            kept.names |= self.given
        elif self.recompute == "elementwise":  # what its attention keeps, those of later layers keep too
            kept.names |= self.given.intersection(*(self.saved.get(each.name, ()) for each in self._attentions))
        return kept

    @property
    def _attentions(self) -> Iterator[Operation]:
        return (each for each in self.operations if each.kind == "attention")

    @cached_property
    def given(self) -> frozenset[str]:
        """Names of the keys and values that later layers read: they are kept, whatever this layer makes again."""
        if self.spec.mixer.sharing != "gives":
            return frozenset()
        return frozenset(name for each in self._attentions for name in each.reads[1:])

    @property
    def kept_bytes(self) -> int:
        """The bytes of kept values on this rank, without those of other layers and those that layers share."""
        named = sum(self.bytes_of(name) for name in self.kept.names - OF_OTHERS)
        return named + self.bytes_of_elements(self.kept.elements, self.kept.float32)

    def bytes_of_elements(self, elements: int, float32: int) -> int:
        """The bytes of numbers in the type of activations and of float32 ones."""
        return elements * self.batch.element_bytes + float32 * _TYPE_BYTES["float32"]

    def bytes_of(self, name: str) -> int:
        """The bytes of one value on this rank."""
        value, batch = self.values[name], self.batch
        if value.type == "narrow" and not batch.is_half:
            return 0
        count = {
            "token": batch.tokens,
            "row": batch.tokens * self.rows_per_token,
            "chunk": batch.chunks[1],
            "layer": 1,
        }[value.per]
        if value.is_local and self.share.sequence:
            count = -(-count // self.share.degree)
        width = value.width // min(self.share.degree, value.parts)
        if value.type == "codes":
            from danlu.planning.kept_in_few_bits import code_bytes

            assert self.training.fp8 is not None
            return code_bytes(self.training.fp8, width, count)
        return width * count * _TYPE_BYTES.get(value.type, batch.element_bytes)

    @property
    def rows_per_token(self) -> int:
        """Experts of a token; 1 without experts."""
        return self.spec.feed.top_k if isinstance(self.spec.feed, Experts) else 1

    def region(self, operation: Operation) -> str | None:
        """The recomputed function that an operation is a part of."""
        if operation.name.endswith(f".{ENTER}"):
            return operation.name if self.share.sequence and self.gathers_again else None
        match self.recompute:
            case "elementwise":
                return operation.elementwise
            case "selective":
                return operation.selective
        return None

    def _needs_gradient(self, operation: Operation, with_gradient: Set[str]) -> bool:
        is_trained = bool(operation.weights) and self.training.weights
        return is_trained or operation.name in self._in_adapted_calls or not with_gradient.isdisjoint(operation.reads)

    @cached_property
    def _in_adapted_calls(self) -> frozenset[str]:
        """Names of the operations with an adapter, and of the products that share its input and its function."""
        names = {name for name, _ in self.training.adapters}
        for _, call in groupby(self.operations, key=lambda each: (each.kind, each.reads, each.in_float32)):
            products = {operation.name for operation in call if operation.kind == "product"}
            names |= set() if names.isdisjoint(products) else products
        return frozenset(names)

    def inputs_of(self, region: str) -> Iterator[str]:
        """Names of the values that a recomputed function is given."""
        inside = {value.name for operation in self.regions[region] for value in operation.makes}
        return (name for operation in self.regions[region] for name in operation.reads if name not in inside)

    def _saved(self, operation: Operation) -> Iterator[str]:
        match operation.kind:
            case "attention":
                yield from self._attention(operation)[0]
            case "product" | "grouped":
                yield from self._saved_by_product(operation)
            case _:
                yield from operation.saves
                yield from (value for value, other in operation.factors if other in self.gradients)

    def _saved_by_product(self, operation: Operation) -> Iterator[str]:
        adapter, training = self.training.adapter_of(operation.name), self.training
        is_grouped, is_wide = operation.kind == "grouped", operation.in_float32 and self.batch.is_half
        is_narrow = training.quantized or training.fp8 is not None or training.rounded is not None
        frozen_keeps = is_grouped and not is_narrow
        if training.weights or is_wide or frozen_keeps:
            yield from operation.saves
        elif is_grouped:
            yield from (name for name in operation.saves if name != operation.reads[0] and not name.endswith(".codes"))
        if adapter is None:
            return
        if is_grouped:
            yield from operation.reads
        elif adapter.trains_a:
            yield from self._input_of_adapter(operation)
        if adapter.has_magnitude:
            yield operation.makes[0].name

    def _input_of_adapter(self, operation: Operation) -> tuple[str, ...]:
        """The input of a product with an adapter, or what it is made from again (`gated_activation`)."""
        maker = self.maker_of_adapter_s_input(operation)
        return operation.reads if maker is None else maker.reads

    def maker_of_adapter_s_input(self, operation: Operation) -> Operation | None:
        """The operation that makes the input of a product's adapter once more in the backward pass; None: it is
        kept."""
        adapter = self.training.adapter_of(operation.name)
        if adapter is None or not adapter.trains_a or not operation.name.endswith("down_proj"):
            return None
        makers = (each for each in self.operations if operation.reads[0] in {value.name for value in each.makes})
        return next(makers, None)

    def unnamed(self, operation: Operation) -> tuple[int, int]:
        """(elements in the type of activations, float32 elements) that an operation keeps besides named values."""
        if operation.kind == "attention":
            return self._attention(operation)[1:]
        adapter = self.training.adapter_of(operation.name)
        if adapter is None:
            return 0, 0
        if operation.kind != "grouped":
            return self.batch.tokens * adapter.rank, 0
        count, outputs = operation.weights[0][1][:2]  # B of all experts times the scale
        scaled = count * outputs * adapter.rank // self.share.degree
        return self.batch.tokens * self.rows_per_token * adapter.rank, scaled

    def _attention(self, operation: Operation) -> tuple[tuple[str, ...], int, int]:
        return attention_kept(
            self.spec, operation, self.batch, self.share.degree, again=self.recompute == "elementwise"
        )


@lru_cache(maxsize=256)
def _operations(spec: LayerSpec, width: int, share: RankShare) -> tuple[Operation, ...]:
    return tuple(_without_borders(layer_operations(spec, width), share))


def _without_borders(operations: Sequence[Operation], share: RankShare) -> Iterator[Operation]:
    names: dict[str, str] = {}
    for operation in operations:
        is_border = operation.kind == "gather" and operation.name.rpartition(".")[2] in (ENTER, "leave")
        if is_border and not share.sequence:
            names[operation.makes[0].name] = names.get(operation.reads[0], operation.reads[0])
            continue
        yield _renamed(operation, names)


def _renamed(operation: Operation, names: Mapping[str, str]) -> Operation:
    reads, saves = (tuple(names.get(name, name) for name in each) for each in (operation.reads, operation.saves))
    factors = tuple((names.get(value, value), names.get(other, other)) for value, other in operation.factors)
    return replace(operation, reads=reads, saves=saves, factors=factors)
