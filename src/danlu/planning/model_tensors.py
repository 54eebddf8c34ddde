"""The tensors of the policy that a recipe trains, from its config alone: shapes, stored bytes, what is trained.

Imports no torch. Nothing is read but what the caller hands in of the base's folder.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from danlu.core.layer_types import TRAINED, Axis
from danlu.models.config import ModelConfig, is_matrix, is_of_router, is_stacked, parameter_shapes
from danlu.optim.state_shapes import FLOAT32_BYTES
from danlu.planning.batch_shape import ELEMENT_BYTES
from danlu.planning.packed_shapes import Packing, packed_bytes
from danlu.recipe import Recipe, sections
from danlu.recipe.sections import QuantizationSection
from danlu.recipe.value import VALUE, value_adapter

_UNTRAINED = ("router.correction", "layer_scalar.weight")


class StoredBase(NamedTuple):
    """How the base's own folder stores its linear layers, where it has some of them in few bits."""

    packings: Mapping[str, Packing] = MappingProxyType({})
    """The packing of each parameter that has one."""


UNSTORED = StoredBase()


class FileAdapter(NamedTuple):
    """An adapter that files describe: one below the trained one, or the one that is continued."""

    section: Any
    """Its section, as a recipe would have it."""
    token_ids: Sequence[int] = ()
    """The tokens with rows of their own."""


NO_FILES: Mapping[str, FileAdapter] = MappingProxyType({})


@dataclass(frozen=True)
class ModelTensor:
    """A tensor of a model, of which each process may have a part."""

    name: str
    shape: tuple[int, ...]
    bytes: int
    """Bytes of the whole tensor as it is stored."""
    trained: bool
    is_parameter: bool = True
    """False for a buffer."""
    of_adapter: bool = False
    is_whole: bool = False
    """Whether data ranks do not share it: weights of norms and routers, rows of tokens, and what adapters of several
    layers have in common."""
    packed: Packing | None = None
    """The section that packs it, or its form in the folder; None: it is stored as numbers of one type."""
    linear: str = ""
    """The parameter of an adapted layer with which tensor ranks cut a tensor of its adapter, by `axes`."""
    axes: tuple[Axis | None, ...] = ()
    """Whether each dimension is cut with the outputs or inputs of that layer; (): the tensor stays whole."""

    @property
    def elements(self) -> int:
        """Numbers in the whole tensor."""
        return math.prod(self.shape)

    @cached_property
    def of_experts(self) -> bool:
        """Whether it has the experts of a layer in its first dimension."""
        return is_stacked(self.name)

    @cached_property
    def layer(self) -> int | None:
        """The number of its layer; None of what lies outside of layers, and of what adapters of all layers share."""
        if not self.name.startswith("layers.") or ".projection." in self.name:
            return None
        return int(self.name.split(".", 2)[1])


@dataclass(frozen=True)
class ModelTensors:
    """The tensors of the model that is trained, with its adapters."""

    tensors: tuple[ModelTensor, ...]
    originals: tuple[ModelTensor, ...] = ()
    """The frozen parameters in the place of which trained copies stand (`modules_to_save`)."""

    @property
    def trained(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of all trained parameters."""
        return {each.name: each.shape for each in self.tensors if each.trained}

    @property
    def adapter_bytes(self) -> int:
        """Bytes of the parameters of adapters and of trained copies."""
        return sum(each.bytes for each in self.tensors if each.of_adapter and each.is_parameter)


def policy_tensors(
    recipe: Recipe,
    config: ModelConfig,
    stored: StoredBase = UNSTORED,
    token_ids: Sequence[int] = (),
    files: Mapping[str, FileAdapter] = NO_FILES,
) -> ModelTensors:
    """The tensors of the policy of a recipe.

    token_ids: the tokens with rows that a new adapter trains. files: by name the adapter that is continued from files,
    and those below the trained one; what is not given is left out. Raises RecipeError for an adapter that does not fit
    the model.
    """
    shapes = parameter_shapes(config)
    if recipe.adapter is None:
        return ModelTensors(
            tuple(_float32(name, shape, trained=not name.endswith(_UNTRAINED)) for name, shape in shapes.items())
        )
    adapters = [*_adapter_tensors(recipe, config, token_ids, files)]
    copies = {each.name: each for each in adapters if each.name in shapes or each.name == "lm_head.weight"}
    linears = _linears(config) - copies.keys()
    packings: Mapping[str, Packing] = stored.packings
    if not packings and recipe.base_quantization is not None:
        packings = dict.fromkeys(linears, recipe.base_quantization)
    is_rounded = recipe.trained_quantization is not None  # with its adapter, in float32
    element_bytes = FLOAT32_BYTES if is_rounded else ELEMENT_BYTES[recipe.activations]
    base = []
    for name, shape in shapes.items():
        if name in copies:
            base.append(copies[name])
        elif name in linears and name in packings:
            base.append(_packed(name, shape, packings[name]))
        else:
            base.append(_frozen(name, shape, element_bytes if is_matrix(name, len(shape)) else FLOAT32_BYTES))
    originals = tuple(_frozen(name, shapes[name], FLOAT32_BYTES) for name in copies if name in shapes)
    return ModelTensors((*base, *(each for each in adapters if each.name not in shapes)), originals)


def _float32(name: str, shape: tuple[int, ...], *, trained: bool) -> ModelTensor:
    return ModelTensor(name, shape, FLOAT32_BYTES * math.prod(shape), trained, is_whole=_is_whole(name))


def _packed(name: str, shape: tuple[int, ...], packing: Packing) -> ModelTensor:
    return ModelTensor(
        name, shape, packed_bytes(shape, packing), trained=False, is_whole=_is_whole(name), packed=packing
    )


def _frozen(name: str, shape: tuple[int, ...], element_bytes: int) -> ModelTensor:
    return ModelTensor(name, shape, element_bytes * math.prod(shape), trained=False, is_whole=_is_whole(name))


def _is_whole(name: str) -> bool:
    owner = name.rpartition(".")[0]
    return owner.rpartition(".")[2].endswith("norm") or is_of_router(name)


def _linears(config: ModelConfig) -> set[str]:
    """Names of the weights of linear layers, those of experts included, which quantization packs."""
    from danlu.models.sites import sites_of

    return {f"{site.name}.weight" for site in sites_of(config) if site.layer is not None}


def _adapter_tensors(
    recipe: Recipe, config: ModelConfig, token_ids: Sequence[int], files: Mapping[str, FileAdapter]
) -> Iterator[ModelTensor]:
    """The tensors of the adapter that is trained, of that of a model of values on the same base, and of files."""
    # A run without an adapter loads none of these.
    from danlu.adapters.shapes import shapes_of_adapter
    from danlu.adapters.targets import ROW_GROUPS
    from danlu.models.sites import adapter_name, sites_of

    sites, shapes = sites_of(config), parameter_shapes(config)
    tied = config.task == "causal-lm" and config.tie_word_embeddings
    added = {TRAINED: FileAdapter(recipe.adapter, token_ids), VALUE: FileAdapter(value_adapter(recipe)), **files}
    for name, (section, row_ids) in added.items():
        if section is None or isinstance(section, sections.Continue):
            continue
        ids = dict.fromkeys(ROW_GROUPS, row_ids)
        tensors = shapes_of_adapter(
            name, section, sites, shapes, hf_name=lambda each: adapter_name(each, config), tied=tied, token_ids=ids
        )
        for place, tensor in tensors.items():
            yield ModelTensor(
                place,
                tensor.shape,
                tensor.bytes,
                tensor.trained and name in (TRAINED, VALUE),
                is_parameter=not tensor.is_buffer,
                of_adapter=True,
                is_whole=place.endswith(".token_rows") or ".projection." in place or _is_whole(place),
                linear=f"{place.partition('.adapter.')[0]}.weight",
                axes=tensor.axes,
            )


def frozen_tensors(
    config: ModelConfig,
    precision: str,
    section: QuantizationSection | None,
    *,
    in_float32: bool,
    stored: StoredBase = UNSTORED,
) -> tuple[ModelTensor, ...]:
    """The tensors of a frozen model without adapters.

    section: packs its linear layers. stored: as its folder stores them, where no section does. in_float32: whether all
    others are kept in float32, as those that follow the policy's are.
    """
    packings = stored.packings if section is None else dict.fromkeys(_linears(config), section)
    tensors = []
    for name, shape in parameter_shapes(config).items():
        if name in packings:
            tensors.append(_packed(name, shape, packings[name]))
        else:
            narrow = is_matrix(name, len(shape)) and not in_float32
            tensors.append(_frozen(name, shape, ELEMENT_BYTES[precision] if narrow else FLOAT32_BYTES))
    return tuple(tensors)
