"""Names, shapes and cuts of the tensors that an adapter has, by its section of the recipe. No torch.

The modules of adapters allocate from the functions here, so that a plan counts what they will hold.

O, I outputs and inputs of a layer · r rank · V vocabulary · D model width · E experts · P virtual tokens · w width of a
square or bottleneck
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from danlu.adapters.hf_layers import HFLayer, target_layers
from danlu.adapters.targets import Form, by_pattern, choose, matches, sites_of_rows, square_width
from danlu.core.errors import RecipeError
from danlu.core.layer_types import Axis, Site
from danlu.recipe import sections

Shape = tuple[int, ...]
Axes = tuple[Axis | None, ...]
BASE_CHANGING_INITS = ("pissa", "olora", "loftq")
"""Initialisations that subtract their factors from the base."""
NO_TOKENS: Mapping[str, Sequence[int]] = MappingProxyType({})
BRANCHES = {"houlsby": ("after_attention", "after_mlp"), "pfeiffer": ("after_mlp",)}
"""Placement of bottleneck adapters -> the slots of a layer that they sit in."""

LOW_RANK_AXES: Mapping[str, Axes] = {
    "lora_A": (None, "inputs"),
    "lora_B": ("outputs", None),
    "lora_magnitude_vector": ("outputs",),
    "initial_A": (None, "inputs"),
    "initial_B": ("outputs", None),
}
GROUPED_AXES: Mapping[str, Axes] = {"lora_A": (None, None, "inputs"), "lora_B": (None, "outputs", None)}
EMBEDDING_AXES: Mapping[str, Axes] = {"lora_embedding_A": (None, "outputs")}
VERA_AXES: Mapping[str, Axes] = {"vera_lambda_b": ("outputs",)}


class AdapterTensor(NamedTuple):
    """Shape and type of a tensor of an adapter, and how it is cut with its layer."""

    shape: Shape
    axes: Axes = ()
    """Whether tensor parallelism cuts each dimension with the layer's outputs or inputs; (): it stays whole."""
    trained: bool = True
    type: Literal["float32", "float64", "int64"] = "float32"
    is_buffer: bool = False
    """Whether it is computed again instead of being saved."""

    @property
    def bytes(self) -> int:
        """Bytes of such a tensor."""
        return math.prod(self.shape) * (4 if self.type == "float32" else 8)

    def local(self, axis: Axis, features: int) -> Shape:
        """The part that a tensor rank has which has so many of its layer's outputs or inputs."""
        axes = self.axes or (None,) * len(self.shape)
        return tuple(features if cut == axis else size for cut, size in zip(axes, self.shape, strict=True))


Tensors = dict[str, AdapterTensor]


def low_rank(shape: tuple[int, int], section: sections.LowRank, rank: int) -> Tensors:
    """LoRA or DoRA on a layer [O, I], with the factors that its initialisation takes out of the base."""
    outputs, _ = shape
    if isinstance(section, sections.QaLora):
        return grouped_inputs(shape, rank, section.group, freeze_a=section.freeze_a)
    tensors = factors(shape, rank, freeze_a=section.freeze_a)
    if section.kind == "dora":
        tensors |= magnitudes(outputs)
        tensors["base_row_squares"] = AdapterTensor((outputs,), ("outputs",), trained=False, is_buffer=True)
    if section.init in BASE_CHANGING_INITS:
        for name, factor in (("initial_A", tensors["lora_A"]), ("initial_B", tensors["lora_B"])):
            tensors[name] = AdapterTensor(factor.shape, LOW_RANK_AXES[name], trained=False)
    return tensors


def factors(shape: tuple[int, int], rank: int, *, freeze_a: bool = False) -> Tensors:
    """A [r, I] and B [O, r] of LoRA."""
    outputs, inputs = shape
    return {
        "lora_A": AdapterTensor((rank, inputs), LOW_RANK_AXES["lora_A"], trained=not freeze_a),
        "lora_B": AdapterTensor((outputs, rank), LOW_RANK_AXES["lora_B"]),
    }


def grouped_inputs(shape: tuple[int, int], rank: int, group: int, *, freeze_a: bool = False) -> Tensors:
    """A [r, I / group] and B [O, r] of QA-LoRA; tensor ranks have A whole, and take the columns of their inputs."""
    outputs, inputs = shape
    return {
        "lora_A": AdapterTensor((rank, inputs // group), trained=not freeze_a),
        "lora_B": AdapterTensor((outputs, rank), LOW_RANK_AXES["lora_B"]),
    }


def magnitudes(outputs: int) -> Tensors:
    """The magnitudes [O] of DoRA."""
    return {"lora_magnitude_vector": AdapterTensor((outputs,), LOW_RANK_AXES["lora_magnitude_vector"])}


def grouped_factors(experts: int, shape: tuple[int, int], rank: int, *, freeze_a: bool = False) -> Tensors:
    """LoRA on the stacked layers [O, I] of E experts."""
    outputs, inputs = shape
    return {
        "lora_A": AdapterTensor((experts, rank, inputs), GROUPED_AXES["lora_A"], trained=not freeze_a),
        "lora_B": AdapterTensor((experts, outputs, rank), GROUPED_AXES["lora_B"]),
    }


def embedding_factors(shape: tuple[int, int], rank: int) -> Tensors:
    """LoRA on an embedding [V, D]."""
    vocab_size, width = shape
    return {
        "lora_embedding_A": AdapterTensor((rank, vocab_size), EMBEDDING_AXES["lora_embedding_A"]),
        "lora_embedding_B": AdapterTensor((width, rank)),
    }


def vera_vectors(outputs: int, rank: int) -> Tensors:
    """The vectors of VeRA on a layer of O outputs; the parts of a fused layer share the first."""
    return {
        "vera_lambda_d": AdapterTensor((rank,)),
        "vera_lambda_b": AdapterTensor((outputs,), VERA_AXES["vera_lambda_b"]),
    }


def vera_projection(rank: int, shape: tuple[int, int]) -> Tensors:
    """VeRA's frozen matrices for layers of at most [O, I], which all layers share."""
    outputs, inputs = shape
    return {
        "vera_A": AdapterTensor((rank, inputs), trained=False),
        "vera_B": AdapterTensor((outputs, rank), trained=False),
    }


def largest_shape(layers: Sequence[HFLayer]) -> tuple[int, int]:
    """(O, I) of the matrices that some layers share: the most outputs and the most inputs of any of them."""
    shapes = [layer.shape for layer in layers]
    return max(outputs for outputs, _ in shapes), max(inputs for _, inputs in shapes)


def mora_square(inputs: int, width: int, form: Form) -> Tensors:
    """MoRA's square on a layer of I inputs, and the angles of its groups of inputs."""
    square: Tensors = {"mora_M": AdapterTensor((width, width))}
    if form == "sharing":
        return square
    angles = AdapterTensor((-(-inputs // width), -(-width // 2)), trained=False, type="float64", is_buffer=True)
    return square | {"cos": angles, "sin": angles}


def ia3_vector(shape: tuple[int, int], *, of_inputs: bool) -> Tensors:
    """(IA)^3's vector over the outputs of a layer [O, I], or over its inputs."""
    return {"ia3_l": AdapterTensor((shape[of_inputs],), ("inputs" if of_inputs else "outputs",))}


def bottleneck(width: int, inner: int) -> Tensors:
    """A bottleneck adapter of width w in a model of width D."""
    return {
        "down_weight": AdapterTensor((inner, width)),
        "down_bias": AdapterTensor((inner,)),
        "up_weight": AdapterTensor((width, inner)),
        "up_bias": AdapterTensor((width,)),
    }


def prompt_vectors(count: int, width: int) -> Tensors:
    """The vectors of P virtual tokens, as a module `embedding` has them."""
    return {"embedding.weight": AdapterTensor((count, width))}


def prefix_projection(count: int, width: int, hidden: int) -> Tensors:
    """The network that all layers' prefixes are made from; width: of the widest layer's keys; hidden: its own."""
    return {
        **prompt_vectors(count, width),
        "weight": AdapterTensor((hidden, width)),
        "bias": AdapterTensor((hidden,)),
    }


def layer_prefix(count: int, width: int, hidden: int | None) -> Tensors:
    """Keys and values of one layer with keys of that width; hidden: of the projection that they are made from."""
    if hidden is None:
        return prompt_vectors(count, 2 * width)
    return {"weight": AdapterTensor((2 * width, hidden)), "bias": AdapterTensor((2 * width,))}


def row_tensors(count: int, width: int) -> Tensors:
    """The rows of some tokens in embedding or head, and the tokens' ids."""
    ids = AdapterTensor((count,), trained=False, type="int64", is_buffer=True)
    return {"token_rows": AdapterTensor((count, width)), "token_ids": ids}


# ── one site, and the whole adapter ──


def adapter_shapes(site: Site, section: Any) -> Tensors:
    """The tensors of an adapter on one site, by their names in its module.

    Without those that sites share: VeRA's matrices, and vectors that the parts of a fused layer have together.
    """
    match section:
        case sections.LowRank():
            rank = by_pattern(site, section.rank_pattern, section.rank)
            if site.group == "embedding":
                return embedding_factors(site.shape, rank)
            if site.experts is not None:
                return grouped_factors(site.experts, site.shape, rank, freeze_a=section.freeze_a)
            return low_rank(site.shape, section, rank)
        case sections.Vera():
            return vera_vectors(site.shape[0], section.rank)
        case sections.Mora():
            return mora_square(site.shape[1], square_width(site.shape, section.rank, section.form), section.form)
        case sections.Ia3():
            return ia3_vector(site.shape, of_inputs=any(matches(site, target) for target in section.feedforward))
        case sections.Prompt():
            return prompt_vectors(section.tokens, site.shape[1])
    raise AssertionError(f"{section.kind} sits on no site")


def shapes_of_adapter(
    name: str,
    section: Any,
    sites: Sequence[Site],
    parameters: Mapping[str, Shape],
    *,
    hf_name: Callable[[str], str],
    tied: bool,
    token_ids: Mapping[str, Sequence[int]] = NO_TOKENS,
) -> Tensors:
    """All tensors of the adapter `name`, by the names that `AdapterSet.tensors` gives them, and its buffers.

    Args:
        sites: all of the model's (`models.sites.sites_of`). parameters: the shapes of all of the model's parameters.
        hf_name: from the name of a parameter to the one by which adapters' folders know it.
        tied: whether the model ties its head to the embedding.
        token_ids: tokens with rows that it trains, by the group of the site: "embedding", "head".

    Raises RecipeError for a section that does not fit the model, as `AdapterSet.add` does.
    """
    chosen = choose(sites, section)
    with_rows = sites_of_rows(sites, chosen, section, token_ids, tied=tied)
    names = {site.name for site in (*chosen, *with_rows)}
    tensors: Tensors = {}
    for place, own in (*_by_place(section, chosen, sites), *_rows_by_place(with_rows, token_ids, tied=tied)):
        slot = f"{place}.adapter" if place in names else place
        tensors |= {f"{slot}.{name}.{key}": tensor for key, tensor in own.items()}
    known = dict(parameters)
    if tied and ("lm_head" in names or "lm_head" in getattr(section, "modules_to_save", [])):
        known["lm_head.weight"] = known["embed_tokens.weight"]
    adapted = {f"{site.name}.bias" for site in (*chosen, *with_rows)}
    stacked = {site.name for site in sites if site.experts is not None}
    for copied in trained_in_full(section, known, known, adapted=adapted, stacked=stacked, hf_name=hf_name):
        tensors[copied] = AdapterTensor(known[copied])
    return tensors


def _by_place(section: Any, chosen: Sequence[Site], sites: Sequence[Site]) -> Iterator[tuple[str, Tensors]]:
    """The tensors of each module by the name of its site, or of its slot where that is no site; what modules share
    belongs to the first of them.
    """
    match section:
        case sections.Vera():
            layers = target_layers(chosen, sites)
            projection = vera_projection(section.rank, largest_shape([layer for layer, _ in layers]))
            shared = {f"projection.{key}": tensor for key, tensor in projection.items()}
            for _, parts in layers:
                for number, site in enumerate(parts):
                    own = adapter_shapes(site, section)
                    if number:
                        del own["vera_lambda_d"]
                    yield site.name, own | shared
                    shared = {}
        case sections.Ia3():
            for _, parts in target_layers(chosen, sites):
                for number, site in enumerate(parts):
                    own = adapter_shapes(site, section)
                    if number == 0 or own["ia3_l"].axes == ("outputs",):
                        yield site.name, own
        case sections.Bottleneck():
            width = next(site for site in sites if site.group == "embedding").shape[1]
            for slot in branch_slots(sites, section.placement):
                yield slot, bottleneck(width, section.width)
        case sections.Prefix():
            widths = prefix_slots(sites)
            shared = {}
            if section.projection is not None:
                network = prefix_projection(section.tokens, max(widths.values()), section.projection)
                shared = {f"projection.{key}": tensor for key, tensor in network.items()}
            for slot, width in widths.items():
                yield slot, layer_prefix(section.tokens, width, section.projection) | shared
                shared = {}
        case _:
            for site in chosen:
                yield site.name, adapter_shapes(site, section)


def _rows_by_place(
    sites: Iterable[Site], token_ids: Mapping[str, Sequence[int]], *, tied: bool
) -> Iterator[tuple[str, Tensors]]:
    """Rows of single tokens by site; a tied head has those of the embedding."""
    shared = False
    for site in sites:
        own = row_tensors(len(token_ids[site.group]), site.shape[1])
        if site.group == "head" and shared:
            del own["token_rows"]
        shared = tied and site.group == "embedding"
        yield site.name, own


def branch_slots(sites: Sequence[Site], placement: str) -> list[str]:
    """The slots behind attention and MLP that a placement (houlsby, pfeiffer) fills: "layers.0.after_mlp"."""
    layers = dict.fromkeys(through_layer(site.name, site.layer) for site in sites if site.layer is not None)
    return [f"{layer}.{slot}" for layer in layers for slot in BRANCHES[placement]]


def through_layer(name: str, layer: int) -> str:
    """The part of a site's name that ends with its layer: sites of experts lie deeper in it than others."""
    number = f".{layer}."
    return f"{name.partition(number)[0]}.{layer}"


def prefix_slots(sites: Sequence[Site]) -> dict[str, int]:
    """The name of the slot `prefix` of every layer's attention, and D, the width of the layer's keys."""
    return {
        f"{site.name.removesuffix('k_proj')}prefix": site.shape[0] for site in sites if site.name.endswith(".k_proj")
    }


def trained_in_full(
    section: Any,
    names: Iterable[str],
    known: Iterable[str],
    *,
    adapted: Collection[str],
    stacked: Collection[str],
    hf_name: Callable[[str], str],
) -> Iterator[str]:
    """Those of some parameters of the base that an adapter trains in full, as copies.

    Args:
        known: all parameters, of other pipeline stages too. adapted: the biases of the layers that it sits on.
        stacked: the stacked layers of experts. hf_name: as in `shapes_of_adapter`.

    Raises RecipeError for `modules_to_save` that match nothing, and for stacked parameters of experts, of which an
    adapter's folder has no place for a copy.
    """
    saved: list[str] = getattr(section, "modules_to_save", [])
    bias = getattr(section, "bias", "none")
    for module in saved:
        if not any(_belongs_to(name, hf_name(name), module) for name in known):
            raise RecipeError(f"adapter.modules_to_save: {module!r} matches no module of this model")
    for name in names:
        is_saved = any(_belongs_to(name, hf_name(name), module) for module in saved)
        if not (is_saved or (name.endswith(".bias") and (bias == "all" or (bias == "adapted" and name in adapted)))):
            continue
        if name.rpartition(".")[0] in stacked:
            key = "modules_to_save" if is_saved else f"bias: {bias}"
            raise RecipeError(
                f"adapter.{key} would train {name} of all experts in full, which adapter folders have no place "
                "for. Put LoRA on them (adapter.targets: experts), or train the whole model"
            )
        yield name


def _belongs_to(parameter: str, hf_name: str, module: str) -> bool:
    """Whether a parameter is within a module given by the end of its name, in danlu or in Hugging Face folders."""
    owners = (parameter.rpartition(".")[0], hf_name.rpartition(".")[0])
    return any(f".{owner}".endswith(f".{module}") for owner in owners)
