"""Adapters: few parameters, trained on a frozen base."""

from typing import Annotated, Literal

from pydantic import Field

from danlu.recipe.sections.base import Beta, PositiveInt, ReadWith, VariantSection


class _Targeted(VariantSection):
    """The settings that every adapter of linear layers has."""

    targets: list[str] = ["all-linear"]
    """The adapted layers: all-linear (every linear layer but the head and the matrices of experts), attention, mlp,
    experts (lora and its relatives alone), names such as q_proj, embed_tokens or experts.down_proj, or a regular
    expression over full names such as `.*layers.[0-3].*up_proj`.
    """
    modules_to_save: list[str] = []
    """Modules trained in full and saved with the adapter: embed_tokens, lm_head, norm, ..."""


class LowRank(_Targeted):
    """The settings that LoRA and its relatives have."""

    rank: PositiveInt = 8
    """Width of the bottleneck; trained parameters grow linearly with it."""
    alpha: Annotated[float, Field(gt=0)] = 16.0
    """B A x is multiplied by alpha / rank (`scaling`)."""
    dropout: Beta = 0.0
    """Share of the inputs that the low-rank path (not the base) leaves out while training."""
    scaling: Literal["standard", "rslora"] = "standard"
    """standard divides alpha by the rank; rslora by its root, which keeps large ranks learning (arXiv:2312.03732)."""
    init: Literal["default", "gaussian", "pissa", "olora", "loftq"] = "default"
    """default: A uniform (Kaiming), B zero; gaussian: A normal, B zero; pissa: the principal singular vectors, which
    leave the base (arXiv:2404.02948); olora: the same by QR (arXiv:2406.01775); loftq: the error of a quantized base
    (arXiv:2310.08659).
    """
    svd_iterations: Annotated[PositiveInt | None, ReadWith("init", "pissa")] = None
    """pissa: power iterations of a fast SVD (16 is good); by default the exact one."""
    loftq_iterations: Annotated[PositiveInt, ReadWith("init", "loftq")] = 1
    """loftq: how often quantization and low-rank rest are improved in turn."""
    rank_pattern: dict[str, PositiveInt] = {}
    """Another rank for modules with a name that ends with (or matches) a key."""
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Another alpha, likewise."""
    bias: Literal["none", "all", "adapted"] = "none"
    """The biases of the base that are trained as well: none, all, or those of adapted layers."""
    trainable_tokens: list[str] = []
    """Tokens of the base with rows of embedding and head that are trained too, such as an end token that the base was
    never trained on; those of `model.tokens` always are."""
    freeze_a: bool = False
    """Train B alone, so that no inputs are kept for A (LoRA-FA, arXiv:2308.03303)."""
    rate_ratio: Annotated[float, Field(gt=0)] = 1.0
    """B learns this many times faster than A (LoRA+, arXiv:2402.12354)."""


class Lora(LowRank):
    """Low-rank adapters: W x + alpha / rank B A x, with W frozen (arXiv:2106.09685)."""

    kind: Literal["lora"] = "lora"


class RsLora(LowRank):
    """LoRA scaled by alpha / sqrt(rank) (arXiv:2312.03732)."""

    kind: Literal["rslora"] = "rslora"
    scaling: Literal["standard", "rslora"] = "rslora"
    """rslora divides alpha by the root of the rank, which keeps large ranks learning; standard by the rank."""


class Pissa(LowRank):
    """LoRA on the principal singular vectors, with the rest as base (arXiv:2404.02948)."""

    kind: Literal["pissa"] = "pissa"
    init: Literal["pissa"] = "pissa"
    """The principal singular vectors start in A and B and leave the base."""


class Olora(LowRank):
    """LoRA that starts from a QR decomposition of the weights (arXiv:2406.01775)."""

    kind: Literal["olora"] = "olora"
    init: Literal["olora"] = "olora"
    """Columns of Q start in B, rows of R in A, and their product leaves the base."""


class Loftq(LowRank):
    """LoRA that starts from the error of a quantized base (arXiv:2310.08659)."""

    kind: Literal["loftq"] = "loftq"
    init: Literal["loftq"] = "loftq"
    """The low-rank part of the quantization error starts in A and B."""


class LoraFa(LowRank):
    """LoRA with A frozen (arXiv:2308.03303)."""

    kind: Literal["lora-fa"] = "lora-fa"
    freeze_a: Literal[True] = True
    """Train B alone, so that no inputs are kept for A."""


class LoraPlus(LowRank):
    """LoRA with a higher learning rate for B than for A (arXiv:2402.12354)."""

    kind: Literal["lora-plus"] = "lora-plus"
    rate_ratio: Annotated[float, Field(gt=0)] = 16.0
    """B learns this many times faster than A."""


class Dora(LowRank):
    """LoRA for the direction of each row of W, and a trained magnitude for its length (arXiv:2402.09353)."""

    kind: Literal["dora"] = "dora"
    exact_norm: bool = False
    """Let gradients flow through the norm of the direction too; the paper (section 4.3) takes it as a constant."""


class QaLora(LowRank):
    """LoRA with inputs that are averaged by groups, so that it merges into the zeros of a quantized base
    (arXiv:2309.14717)."""

    kind: Literal["qa-lora"] = "qa-lora"
    group: PositiveInt = 128
    """Neighbouring inputs that A has one column for: as many as share a scale in the base, or a multiple."""


class Vera(_Targeted):
    """Random matrices shared by all layers and frozen, with a trained vector for each side (arXiv:2310.11454)."""

    kind: Literal["vera"] = "vera"
    rank: PositiveInt = 256
    """Width of the shared matrices; trained are rank + outputs numbers a layer."""
    dropout: Beta = 0.0
    """Share of the inputs that the adapter's path leaves out while training."""
    initial_d: float = 0.1
    """The initial value of the vector over the rank; the one over the outputs starts at 0."""
    projection_seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the shared matrices; they are saved as well."""
    save_projection: bool = True
    """Write the shared matrices to the adapter folder, so that no other random generator is needed to read it."""


class Mora(_Targeted):
    """One square matrix a layer, with inputs compressed to it and outputs grown from it (arXiv:2405.12130)."""

    kind: Literal["mora"] = "mora"
    rank: PositiveInt = 8
    """The square has as many parameters as LoRA of this rank would have."""
    dropout: Beta = 0.0
    """Share of the inputs that the adapter's path leaves out while training."""
    form: Literal["rotation", "sharing"] = "rotation"
    """How inputs reach the square: rotation tells groups of inputs apart by angles (equation 9); sharing sums them
    (equation 6)."""


class Ia3(_Targeted):
    """Keys, values and inner activations rescaled by trained vectors (arXiv:2205.05638)."""

    kind: Literal["ia3"] = "ia3"
    targets: list[str] = ["k_proj", "v_proj", "down_proj"]
    """Layers that are rescaled."""
    feedforward: list[str] = ["down_proj"]
    """Those of them of which it is the inputs; of the others it is the outputs."""


class Bottleneck(VariantSection):
    """Small networks behind attention and MLP: down, activation, up, added to their input (arXiv:1902.00751)."""

    kind: Literal["bottleneck"] = "bottleneck"
    placement: Literal["houlsby", "pfeiffer"] = "houlsby"
    """houlsby: behind attention and behind the MLP; pfeiffer: behind the MLP alone (arXiv:2005.00247)."""
    width: PositiveInt = 64
    """Width between down and up."""
    activation: Literal["gelu", "relu", "silu"] = "gelu"
    """The activation between down and up."""
    modules_to_save: list[str] = []
    """Modules trained in full and saved with the adapter: embed_tokens, lm_head, norm, ..."""


class Prefix(VariantSection):
    """Trained keys and values before every document, in every layer (arXiv:2101.00190)."""

    kind: Literal["prefix"] = "prefix"
    tokens: PositiveInt = 20
    """Length of the prefix."""
    projection: PositiveInt | None = None
    """Train through an MLP of this width, as the paper does for stability; it is folded away when saving."""


class Prompt(VariantSection):
    """Trained embeddings before every document (arXiv:2104.08691)."""

    kind: Literal["prompt"] = "prompt"
    tokens: PositiveInt = 20
    """Length of the soft prompt."""
    text: str | None = None
    """Start from the embeddings of this text, cut or repeated to length; by default from random tokens."""


class Continue(VariantSection):
    """Go on training the last of `model.adapters`."""

    kind: Literal["continue"] = "continue"


AdapterSection = (
    Lora
    | RsLora
    | Pissa
    | Olora
    | Loftq
    | LoraFa
    | LoraPlus
    | Dora
    | QaLora
    | Vera
    | Mora
    | Ia3
    | Bottleneck
    | Prefix
    | Prompt
    | Continue
)

Adapter = Annotated[AdapterSection, Field(discriminator="kind")]
