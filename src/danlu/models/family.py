"""What a model family is to danlu: how its layers are read from a config.json and written, and its tensors' names.

`families.py` has the table of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from danlu.models.config import ModelConfig
from danlu.models.hf_rope import RopeRules, read_rope
from danlu.models.hf_values import HFValues
from danlu.models.layer_spec import Activation, Delta, Dense, Heads, LayerSpec
from danlu.models.spec_shapes import check_sizes

if TYPE_CHECKING:  # it imports numpy, and a wrong recipe is told without
    from danlu.types import Task

ACTIVATIONS: dict[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh", "silu": "silu", "swish": "silu"}
HF_ACTIVATIONS: dict[Activation, str] = {"gelu_tanh": "gelu_pytorch_tanh", "silu": "silu"}
"""Not of clamped ones, which a family writes as more keys than this one."""

ARCHITECTURE_ENDINGS: dict[Task, str] = {
    "causal-lm": "ForCausalLM",
    "sequence-classification": "ForSequenceClassification",
    "token-classification": "ForTokenClassification",
}
"""By task, how the classes of transformers are called: LlamaForCausalLM."""

LLAMA_MODULES: dict[str, str] = {
    "attention": "self_attn",
    "attention_norm": "input_layernorm",
    "mlp": "mlp",
    "mlp_norm": "post_attention_layernorm",
}
"""Module inside a layer, here -> on disk. The longest dotted prefix that is listed is replaced."""
POST_NORM_MODULES: dict[str, str] = {
    "attention": "self_attn",
    "mlp": "mlp",
    "post_attention_norm": "post_attention_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}
GEMMA_MODULES: dict[str, str] = {
    **LLAMA_MODULES,
    "mlp_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}
PHI3_MODULES: dict[str, str] = {
    **LLAMA_MODULES,
    # Modules that share a name on disk lie there one under the other, in the order of the forward pass.
    "attention.q_proj": "self_attn.qkv_proj",
    "attention.k_proj": "self_attn.qkv_proj",
    "attention.v_proj": "self_attn.qkv_proj",
    "mlp.gate_proj": "mlp.gate_up_proj",
    "mlp.up_proj": "mlp.gate_up_proj",
}


@dataclass(frozen=True)
class Stored:
    """How a parameter of a layer lies on disk, where that is not as rows of a tensor.

    Parameters of the same `name` share the tensor. With `*` in it each expert of stacked parameters [E, ...] has one of
    its own, and `*` is its number.
    """

    name: str
    transposed: bool = False
    """Whether matrices are [inputs, outputs] on disk."""
    alternates: bool = False
    """Whether the outputs of those that share the tensor take turns one by one: gate, up, gate, up."""
    turns: Callable[[LayerSpec], int] = lambda layer: 1
    """How often those that share the tensor take turns, each time with an equal number of their outputs: as often as
    there are heads, where each head of q_proj is followed by the same head of its gate."""


@dataclass(frozen=True)
class Family:
    architecture: str
    """The classes of transformers that load it, without the task: Llama of LlamaForCausalLM."""
    read: Callable[[HFValues, LayerSpec, int], dict[str, Any]]
    """From config.json, a layer by the keys that all families have, and the number of layers: fields of ModelConfig,
    `layers` among them."""
    write: Callable[[ModelConfig], dict[str, Any]]
    """What only some families have, as keys of config.json."""
    defaults: Mapping[str, Any]
    """What transformers (5.23) takes for absent keys. A key/value head count is always asked for where it guesses."""
    modules: Mapping[str, str | Stored] = field(default_factory=lambda: LLAMA_MODULES)
    linear_modules: Mapping[str, str | Stored] | None = None
    """What `modules` is for layers with linear attention."""
    rope: RopeRules = field(default_factory=RopeRules)
    ropes_differ: bool = False
    """Whether layers may be rotated differently: its reader then reads how, and the plain layer has no rotation."""
    has_experts: bool = False
    architectures: Mapping[Task, str | None] = field(default_factory=dict)
    """Classes of transformers by task that are not called by `architecture`; None: it has none."""
    has_mtp: bool = False
    """Whether folders may hold layers that predict further tokens (MTP), behind the last layer or under `mtp.`."""
    has_mtp_module: bool = False
    """Whether they may hold such layers under `mtp.` alone."""
    mtp_keys: Sequence[str] = ()
    """The keys of config.json that tell of them."""

    def modules_of(self, layer: LayerSpec) -> Mapping[str, str | Stored]:
        """Modules inside a layer, here -> on disk."""
        if not isinstance(layer.mixer, Delta):
            return self.modules
        assert self.linear_modules is not None, f"{self.architecture} has no linear attention"
        return self.linear_modules

    def architecture_of(self, task: Task) -> str | None:
        """The class of transformers that loads it for a task; None where there is none."""
        return self.architectures.get(task, self.architecture + ARCHITECTURE_ENDINGS[task])


def kv_heads_of(hf: HFValues, heads: int) -> int:
    """`null` means as many as query heads, and so does absence in the families that began without grouped queries."""
    if "num_key_value_heads" in hf or "num_key_value_heads" not in hf.keys():  # noqa: SIM118 - `in hf` asks for a value
        return hf.integer("num_key_value_heads")
    return heads


def activation_of(hf: HFValues, key: str) -> Activation:
    name = hf.text(key)
    if name not in ACTIVATIONS:
        raise hf.error(key, f"activation {name!r} is not supported; supported: {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]


def windows_by_type(hf: HFValues, layers: int) -> tuple[int | None, ...]:
    types, window = hf.raw("layer_types"), hf.optional_integer("sliding_window")
    if not isinstance(types, list) or len(types) != layers:
        raise hf.error("layer_types", f"expected a list with one entry for each of {layers} layers, found {types!r}")
    if wrong := sorted({str(kind) for kind in types} - {"full_attention", "sliding_attention"}):
        raise hf.error("layer_types", f"not supported: {', '.join(wrong)}")
    if window is None and "sliding_attention" in types:
        raise hf.error("sliding_window", "missing, but layer_types names sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def with_windows(plain: LayerSpec, windows: Sequence[int | None], **mixer: Any) -> dict[str, Any]:
    """Layers that are alike but for their windows; mixer: what else is not as in `plain`."""
    return {"layers": tuple(replace(plain, mixer=replace(plain.attention, window=each, **mixer)) for each in windows)}


def windows_of(config: ModelConfig) -> list[int | None]:
    return [layer.mixer.window for layer in config.layers]


def layer_types_of(config: ModelConfig) -> list[str]:
    return ["full_attention" if window is None else "sliding_attention" for window in windows_of(config)]


def one_window(config: ModelConfig) -> int | None:
    """The window of the layers that have one: a config.json has a key for only one."""
    return next((window for window in windows_of(config) if window is not None), None)


def plain_layer(hf: HFValues, family: Family) -> LayerSpec:
    """A layer by the keys that all families have."""
    heads, width = hf.integer("num_attention_heads"), hf.integer("hidden_size")
    if "head_dim" not in hf and (heads < 1 or width % heads):
        raise hf.error(
            "hidden_size", f"{width} does not divide over {heads} attention heads, and head_dim is not given"
        )
    head_dim = hf.integer("head_dim") if "head_dim" in hf else width // heads
    check_sizes({"heads": heads, "head_dim": head_dim})
    mixer = Heads(
        heads=heads,
        kv_heads=kv_heads_of(hf, heads),
        head_dim=head_dim,
        rope=None if family.ropes_differ else read_rope(hf, head_dim, family.rope),
    )
    return LayerSpec(mixer, Dense(hf.integer("intermediate_size"), activation_of(hf, "hidden_act")))
