"""A row of the table of model families: how its layers are read from a config.json and written, and its
tensors' names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from danlu.models.config import ModelConfig
from danlu.models.hf_rope import RopeRules
from danlu.models.hf_values import HFValues
from danlu.models.layer_spec import Activation, LayerSpec
from danlu.models.mixer_spec import Delta

if TYPE_CHECKING:  # it imports numpy, and a wrong recipe is reported without
    from danlu.core.types import Task

ARCHITECTURE_ENDINGS: dict[Task, str] = {
    "causal-lm": "ForCausalLM",
    "sequence-classification": "ForSequenceClassification",
    "token-classification": "ForTokenClassification",
}
"""The endings of transformers' class names, by task: LlamaForCausalLM."""
GENERATION_ONLY: dict[Task, None] = {"sequence-classification": None, "token-classification": None}
"""The endings for families with no class in transformers that classifies."""

DEFAULTS: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
"""transformers' values for absent keys, in most families."""

LLAMA_MODULES: dict[str, str] = {
    "attention": "self_attn",
    "attention_norm": "input_layernorm",
    "mlp": "mlp",
    "mlp_norm": "post_attention_layernorm",
}
"""Module inside a layer, here -> on disk. The longest dotted prefix that is listed is replaced."""


@dataclass(frozen=True)
class Stored:
    """The layout of a parameter of a layer on disk, where it is not simply rows of a tensor.

    Parameters of the same `name` share the tensor. With `*` in it each expert of stacked parameters [E, ...] has one of
    its own, and `*` is its number.
    """

    name: str
    transposed: bool = False
    """Whether matrices are [inputs, outputs] on disk."""
    alternates: bool = False
    """Whether the outputs of parameters that share the tensor are interleaved one by one: gate, up, gate, up."""
    turns: Callable[[LayerSpec], int] = lambda layer: 1
    """The number of blocks in which parameters that share the tensor are interleaved, each with an equal number of
    their outputs.

    It is the number of heads where each head of q_proj is followed by the same head of its gate.
    """


@dataclass(frozen=True)
class Family:
    architecture: str
    """The classes of transformers that load it, without the task: Llama of LlamaForCausalLM."""
    read: Callable[[HFValues, LayerSpec, int], dict[str, Any]]
    """Reads a config.json, a layer by the keys that all families have, and the number of layers; returns fields of
    ModelConfig, `layers` among them.
    """
    write: Callable[[ModelConfig], dict[str, Any]]
    """Returns the keys of config.json that only some families have."""
    defaults: Mapping[str, Any]
    """transformers' (5.23) values for absent keys. A key/value head count is always required where transformers
    guesses.
    """
    modules: Mapping[str, str | Stored] = field(default_factory=lambda: LLAMA_MODULES)
    linear_modules: Mapping[str, str | Stored] | None = None
    """The same as `modules`, for layers with linear attention."""
    stacked_modules: Mapping[str, str | Stored] = field(default_factory=dict)
    """Replaces entries of `modules` where all experts of a layer share two tensors, as in transformers' own modules.

    It is empty for families that have no other form, or no experts.
    """
    prefix: str = "model"
    """The module of transformers' classes that has everything but the head."""
    outer_modules: Mapping[str, str] = field(default_factory=dict)
    """The modules outside of layers, here -> on disk, where the names differ: embed_tokens, norm, lm_head."""
    norm_eps_key: str = "rms_norm_eps"
    """The key of the epsilon of norms."""
    heads_split_width: bool = False
    """Whether the heads share the model's width among them: a config.json has no key for the width of one."""
    activations: Mapping[str, Activation] = field(default_factory=dict)
    """Values of `hidden_act` that mean another activation in this family than in others."""
    rope: RopeRules = field(default_factory=RopeRules)
    ropes_differ: bool = False
    """Whether layers may be rotated differently: its reader then reads how, and the plain layer has no rotation."""
    has_experts: bool = False
    experts_module: str = "mlp.experts"
    """The module with the stacked experts of a layer in transformers' class, by which adapters are named."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Keys of config.json that transformers takes for another one (`attribute_map`): it -> the other, which it
    outweighs."""
    architectures: Mapping[Task, str | None] = field(default_factory=dict)
    """Classes of transformers by task that are not called by `architecture`; None: it has none."""
    has_mtp: bool = False
    """Whether folders may hold layers that predict further tokens (MTP), behind the last layer or under `mtp.`."""
    has_mtp_module: bool = False
    """Whether folders may hold MTP layers under `mtp.` alone."""
    mtp_keys: Sequence[str] = ()
    """The keys of config.json that tell of them."""

    def modules_of(self, layer: LayerSpec, *, stacked: bool = False) -> Mapping[str, str | Stored]:
        """Modules inside a layer, here -> on disk. stacked: with `stacked_modules`."""
        modules = self.linear_modules if isinstance(layer.mixer, Delta) else self.modules
        assert modules is not None, f"{self.architecture} has no linear attention"
        return {**modules, **self.stacked_modules} if stacked else modules

    def architecture_of(self, task: Task) -> str | None:
        """The class of transformers that loads it for a task; None where there is none."""
        return self.architectures.get(task, self.architecture + ARCHITECTURE_ENDINGS[task])
