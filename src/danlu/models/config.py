"""The configuration of a decoder as plain data: every size and switch of all supported families, without torch.

`parameter_shapes` lists the parameters that `decoder.Decoder` will have; the plan counts them without building one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from danlu.core.errors import ModelError
from danlu.models.layer_spec import Experts, LayerSpec, NormKind, norm_shapes
from danlu.models.mixer_spec import MAXIMUMS as LAYER_MAXIMUMS
from danlu.models.mixer_spec import Delta, Shapes, check_sizes, linear_shapes
from danlu.models.rope_config import Rope

if TYPE_CHECKING:
    from danlu.core.types import Task

MAX_LAYERS = 10_000
MAXIMUMS = {"vocab_size": 2**31 - 1, "hidden_size": 2**31 - 1, "max_position_embeddings": 2**31 - 1}
"""Bounds far above every published model, below which sizes can be multiplied and listed without harm."""


@dataclass(frozen=True)
class ModelConfig:
    """The architecture of one decoder. Raises ModelError when its sizes do not fit each other."""

    family: str
    """Key of `families.FAMILIES`; the `model_type` of config.json."""
    vocab_size: int
    """Tokens: the ids that logits are over."""
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    rms_norm_eps: float
    """The epsilon of its norms, also where they are LayerNorms."""
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    embedding_multiplier: float = 1.0
    """Embeddings are multiplied by this, rounded to the type of activations (Gemma: sqrt(hidden_size))."""
    residual_multiplier: float = 1.0
    """The factor of attention's and the feed-forward network's outputs before they join the residual stream."""
    logits_divisor: float = 1.0
    """Logits over the vocabulary are divided by this (Granite); so are the hidden states that they are made of."""
    final_softcap: float | None = None
    norm_offset: float = 0.0
    """Norm weights are stored as differences from this (Gemma: 1)."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    task: Task = "causal-lm"
    vocab_padding: int = 0
    """Rows of embedding and head behind those of the tokens, which no token has: losses and sampling leave them out."""
    head_bias: bool = False
    """Whether the head over the vocabulary has a bias; a head that is tied has none."""
    multimodal: str | None = None
    """The `model_type` of the multimodal model that this is the language part of (`models.multimodal`)."""

    def __post_init__(self) -> None:
        check_sizes(vars(self), MAXIMUMS)
        if not self.layers:
            raise ModelError("layers is 0: it must be at least 1")
        if len(self.layers) > MAX_LAYERS:
            raise ModelError(f"layers is {len(self.layers):,}: at most {MAX_LAYERS:,} can be built")
        assert len({layer.per_layer_width for layer in self.layers}) == 1, "one table has the embeddings of all layers"
        for layer in range(len(self.layers)) if self.carries_values else ():
            self.key_source(layer)

    def __hash__(self) -> int:
        """That of a few sizes: caches look configs up, and layers are many."""
        return hash((self.family, self.vocab_size, self.hidden_size, len(self.layers), self.layers[-1], self.task))

    @property
    def vocab_rows(self) -> int:
        """Rows of embedding and head: config.json's `vocab_size`."""
        return self.vocab_size + self.vocab_padding

    @property
    def has_own_head(self) -> bool:
        """Whether the model has an output matrix of its own: a language model with a head that is not tied."""
        return self.task == "causal-lm" and not self.tie_word_embeddings

    @property
    def norm_kind(self) -> NormKind:
        """The kind of the final norm."""
        return self.layers[-1].norm_kind

    @cached_property
    def kinds(self) -> tuple[LayerSpec, ...]:
        """The layers that differ from each other, in the order in which they first occur."""
        return tuple(dict.fromkeys(self.layers))

    @property
    def has_experts(self) -> bool:
        """Whether some layer is a mixture of experts."""
        return any(isinstance(kind.feed, Experts) for kind in self.kinds)

    @cached_property
    def route_shape(self) -> tuple[int, int] | None:
        """(layers with experts, experts of a token, the most of any layer): the shape of a token's routes; None for a
        decoder without experts.
        """
        chosen = [layer.feed.top_k for layer in self.layers if isinstance(layer.feed, Experts)]
        return (len(chosen), max(chosen)) if chosen else None

    @cached_property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotary embeddings of its layers that differ from each other, in the order in which they first occur."""
        return tuple(dict.fromkeys(kind.mixer.rope for kind in self.kinds if kind.mixer.rope is not None))

    @cached_property
    def carries_values(self) -> bool:
        """Whether values travel between its layers next to the residual stream (`models.carried`)."""
        return any(kind.carries_values for kind in self.kinds)

    @property
    def shares_keys(self) -> bool:
        """Whether some layers read the keys and values of others."""
        return any(kind.mixer.sharing is not None for kind in self.kinds)

    @property
    def carried(self) -> str:
        """The values that travel between its layers next to the residual stream, for messages."""
        names = ["keys and values of earlier layers"] if self.shares_keys else []
        names += ["embeddings of their own of each token"] if self.per_layer_width else []
        return " and ".join(names)

    @property
    def per_layer_width(self) -> int:
        """Features of each layer's own embedding of a token; 0: layers have none."""
        return self.layers[0].per_layer_width

    @property
    def per_layer_columns(self) -> int:
        """Columns of the table that has the embeddings of all layers side by side."""
        return self.per_layer_width * len(self.layers)

    def key_source(self, layer: int) -> int | None:
        """The layer with the keys and values that a layer reads; None where they are its own.

        Raises ModelError where no layer before it gives such ones.
        """
        mixer = self.layers[layer].mixer
        if mixer.sharing != "reads":
            return None
        for source in reversed(range(layer)):
            given = self.layers[source].mixer
            if given.sharing == "gives" and given.window == mixer.window:
                if (given.kv_heads, given.head_dim) != (mixer.kv_heads, mixer.head_dim):
                    break
                return source
        raise ModelError(f"layer {layer} reads keys and values of an earlier layer, and none before it gives such ones")

    @cached_property
    def has_states(self) -> bool:
        """Whether some layer keeps a state of a sequence as a whole, which tokens change and cannot be taken from."""
        return any(isinstance(kind.mixer, Delta) for kind in self.kinds)

    @property
    def rotates_by_length(self) -> bool:
        """Whether the rotation of a document's tokens depends on its length, in some layer."""
        return any(rope.follows_length for rope in self.ropes)

    @property
    def rotates_by_growth(self) -> bool:
        """Whether the rotation of a growing text depends on its length: frequencies that have no two fixed sets
        (dynamic NTK).
        """
        return any(rope.follows_length and not rope.has_one_switch for rope in self.ropes)

    @property
    def rotates_by_text_length(self) -> bool:
        """Whether a text that grows is rotated by the tokens that it may have at last (LongRoPE)."""
        return self.rotates_by_length and not self.rotates_by_growth

    @property
    def fixed_rotation_length(self) -> int | None:
        """The most tokens of documents that are rotated alike, whatever their lengths; None: any number."""
        return min((rope.short_length for rope in self.ropes if rope.follows_length), default=None)

    @property
    def context_length(self) -> int:
        """Tokens the model can see at once: its positions, extended by a rotary scaling.

        Where layers are rotated differently, a config gives the positions behind all scaling (Gemma 3).
        """
        return self.ropes[0].context_length if len(self.ropes) == 1 else self.max_position_embeddings

    def parameter_count(self) -> int:
        """Parameters of the decoder; a tied head counts once."""
        return sum(math.prod(shape) for shape in parameter_shapes(self).values())

    @property
    def largest_size(self) -> tuple[str, int]:
        """The name and value of its largest size, for messages about a model that is too large."""
        sizes = {name: getattr(self, name) for name in MAXIMUMS} | {"layers": len(self.layers)}
        for kind in self.kinds:
            sizes |= dict(kind.sizes())
        maximums = MAXIMUMS | LAYER_MAXIMUMS | {"layers": MAX_LAYERS}
        name = max(sizes, key=lambda name: sizes[name] / maximums[name])
        return name, sizes[name]

    def with_layers(self, change: Callable[[LayerSpec], LayerSpec]) -> ModelConfig:
        """The same model with each layer changed."""
        return replace(self, layers=tuple(change(layer) for layer in self.layers))


def parameter_shapes(config: ModelConfig) -> Shapes:
    """Name -> shape of every parameter of the decoder, in the order of its forward pass."""
    vocabulary = (config.vocab_rows, config.hidden_size)
    shapes: Shapes = {"embed_tokens.weight": vocabulary}
    if config.per_layer_width:
        columns = config.per_layer_columns
        shapes["embed_tokens_per_layer.weight"] = (config.vocab_rows, columns)
        shapes["per_layer_model_projection.weight"] = (columns, config.hidden_size)
        shapes["per_layer_projection_norm.weight"] = (config.per_layer_width,)
    of_kind = {kind: kind.parameter_shapes(config.hidden_size) for kind in config.kinds}
    for index, layer in enumerate(config.layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in of_kind[layer].items()}
    shapes |= norm_shapes("norm", config.hidden_size, config.norm_kind)
    if config.has_own_head:
        shapes |= linear_shapes("lm_head", *vocabulary, config.head_bias)
    return shapes


def is_matrix(parameter: str, dimensions: int) -> bool:
    """Whether a parameter, by its name, multiplies activations in their type, and may be kept in it where it is frozen.

    Not so norms and biases, also those of stacked layers, nor a router's parameters, as it computes in float32.
    """
    return dimensions > 1 and not parameter.endswith(".bias") and not is_of_router(parameter)


def is_of_router(parameter: str) -> bool:
    """Whether a parameter, by its name, is one of a router's."""
    return ".router." in parameter


def is_stacked(parameter: str) -> bool:
    """Whether a parameter, by its name, has the experts of a layer in its first dimension."""
    return ".experts." in parameter


def with_rotation_of(config: ModelConfig, rotated: ModelConfig) -> ModelConfig:
    """The config with the rotary embedding of each layer, and the positions, that `rotated` has.

    Raises ModelError where the two differ in their layers otherwise, so that they cannot be of one model.
    """
    features = [[_rotated_features(layer) for layer in each.layers] for each in (config, rotated)]
    if features[0] != features[1]:
        raise ModelError(
            f"the rotary embedding of {len(rotated.layers)} layers of {rotated.family} does not fit the "
            f"{len(config.layers)} layers of {config.family}, or rotates other features: they are of different models"
        )
    ropes = iter([layer.mixer.rope for layer in rotated.layers])

    def changed(layer: LayerSpec) -> LayerSpec:
        mixer, rope = layer.mixer, next(ropes)
        return layer if isinstance(mixer, Delta) or rope is None else replace(layer, mixer=replace(mixer, rope=rope))

    return replace(config.with_layers(changed), max_position_embeddings=rotated.max_position_embeddings)


def same_rotation(first: ModelConfig, second: ModelConfig) -> bool:
    """Whether two configs of one model rotate queries and keys alike."""
    positions = first.max_position_embeddings == second.max_position_embeddings
    ropes = [[layer.mixer.rope for layer in config.layers] for config in (first, second)]
    return positions and ropes[0] == ropes[1]


def _rotated_features(layer: LayerSpec) -> tuple[type, int | None]:
    return type(layer.mixer), None if layer.mixer.rope is None else layer.mixer.rope.dim
