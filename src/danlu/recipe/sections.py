"""The sections of a recipe: frozen, strict pydantic models; each field's docstring is what `danlu explain` prints.

Variants are told apart by `kind`. A section that has a short form says so in its `short` class variable: the field
that a bare value fills (`model: folder` means `model: {path: folder}`). Where a field takes a list, a bare value is a
list of one. Rules that concern more than one field are in `rules.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        defer_build=True,  # usually only Recipe's validator is needed; building all of them costs 60 ms at start
    )

    short: ClassVar[str | None] = None
    """The field that a bare value fills."""
    switch: ClassVar[tuple[str, str] | None] = None
    """What `true` and `false` mean for `short`, where they mean something."""
    one_of: ClassVar[tuple[str, ...]] = ()
    """Fields that exclude each other; an override of one of them takes the place of what the file gives."""


PositiveInt = Annotated[int, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Steps = Annotated[int, Field(ge=1)] | Annotated[float, Field(ge=0, lt=1)]


class Model(Section):
    """Where the weights start."""

    short = "path"
    one_of = ("path", "preset", "config")

    path: str | None = None
    """A folder in Hugging Face form, a finished danlu run, or a hub id (read from the local cache when offline)."""
    preset: Literal["tiny", "small", "lenet5"] | None = None
    """A model from scratch: Llama-shaped, tiny (about 5M parameters) or small (about 58M), with the vocabulary of the
    tokenizer; for stage classify, lenet5 (61,706 parameters)."""
    config: str | dict[str, Any] | None = None
    """From scratch: a config.json (path) or its content. Weights are drawn from (seed, parameter name)."""
    tokenizer: str | None = None
    """Tokenizer folder or hub id; by default the one in `path`."""
    chat_template: str | None = None
    """A Jinja file that replaces the tokenizer's own chat template."""
    adapters: list[str] = []
    """Adapter folders (danlu's or PEFT's, or finished runs) to start from, one upon the other. Without `adapter` they
    are merged and the whole model is trained; with `adapter: continue` the last one is trained on; with any other
    `adapter` they stay as they are below the new one."""


class Source(Section):
    """One file or data set of rows."""

    short = "path"

    path: str
    """A json, jsonl, csv, parquet, arrow or txt file, a folder of them, or a hub data set id. For stage classify a
    folder with idx files of images and labels, or such a file of images. `path#500` takes the first 500 rows."""
    rows: PositiveInt | None = None
    """Take only this many rows from the front (the same as `path#N`)."""
    weight: Annotated[float, Field(gt=0)] | None = None
    """Share of the mixture, relative to the other sources. Without weights every row of every source is used once
    an epoch."""
    format: Literal["auto", "text", "alpaca", "sharegpt", "messages", "prompt-completion", "tokenized"] = "auto"
    """How to read a row; auto recognises it from the columns."""
    split: str = "train"
    """Split of a hub data set; of a folder of images, train or test."""


class Packing(Section):
    """How samples are laid into packs. Attention never crosses samples, whatever the kind."""

    short = "kind"
    switch = ("best-fit", "none")

    kind: Literal["best-fit", "concatenate", "none"] = "best-fit"
    """best-fit fills packs of max_length with whole samples; concatenate (text only) joins documents with an
    end-of-text token and cuts every max_length tokens; none makes each sample a pack of its own (still no padding)."""
    window: PositiveInt = 4096
    """Samples looked at together when filling packs; larger packs tighter, smaller keeps the shuffled order closer."""


class Data(Section):
    """What is trained on, and how rows become tokens."""

    short = "train"

    train: list[Source]
    """One or more sources."""
    eval: list[Source] | Annotated[float, Field(gt=0, lt=1)] | PositiveInt | None = None
    """Held-out rows: a share (0.02), a number of rows (200), or sources of its own."""
    max_length: PositiveInt = 1024
    """Longest sample, and length of a pack, in tokens."""
    packing: Packing = Packing()
    """How samples are laid into packs: true or best-fit, false or none, or concatenate."""
    overlong: Literal["truncate", "split", "drop"] = "truncate"
    """What happens to a row longer than max_length; counted and shown in every case."""
    train_on: Literal["all", "assistant", "last"] = "assistant"
    """Which messages of a conversation carry loss: every one, every assistant turn, or only the last assistant turn."""
    system: str | None = None
    """System prompt for conversations that have none."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A row that cannot be read: stop with its file and line, or count and skip it."""
    bad_row_limit: PositiveInt = 100
    """With on_bad_row: skip, stop after this many."""
    append_eos: bool = True
    """Close each plain-text document and each prompt/completion pair with the end-of-text token."""
    streaming: bool = False
    """Read rows while training, for data larger than memory; needs `steps`. Rows are shuffled within a buffer."""
    shuffle_buffer: PositiveInt = 10_000
    """Rows held while streaming, from which the next is drawn."""
    workers: PositiveInt | Literal["auto"] = "auto"
    """Processes that tokenise; auto takes one per core."""
    cache: str = "~/.cache/danlu"
    """Where tokenised data is kept, keyed by content, template and settings."""


Decay = Literal["matrices", "all"]


class AdamW(Section):
    """Adam with decoupled weight decay (arXiv:1711.05101)."""

    short = "kind"

    kind: Literal["adamw"] = "adamw"
    learning_rate: NonNegative = 2e-4
    """Peak learning rate; `schedule` scales it over the run."""
    weight_decay: NonNegative = 0.1
    """Each step shrinks a weight by learning_rate x weight_decay of itself."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Memory of the gradient's mean and of its square."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment, against division by zero."""
    decay: Decay = "matrices"
    """matrices leaves norms, biases and embeddings without weight decay."""


class SGD(Section):
    """Stochastic gradient descent with momentum."""

    short = "kind"

    kind: Literal["sgd"] = "sgd"
    learning_rate: NonNegative = 1e-2
    """Peak learning rate; `schedule` scales it over the run."""
    weight_decay: NonNegative = 0.0
    """Added to the gradient as weight_decay x weight."""
    momentum: Beta = 0.9
    """Share of the last direction that is kept; 0 keeps no state."""
    nesterov: bool = False
    """Look ahead along the momentum; needs momentum above 0."""
    decay: Decay = "matrices"
    """matrices leaves norms, biases and embeddings without weight decay."""


class Adafactor(Section):
    """Factored second moments: optimizer state of rows + columns instead of rows x columns (arXiv:1804.04235)."""

    short = "kind"

    kind: Literal["adafactor"] = "adafactor"
    learning_rate: NonNegative = 1e-2
    """Peak learning rate; `schedule` scales it over the run."""
    weight_decay: NonNegative = 0.0
    """Each step shrinks a weight by learning_rate x weight_decay of itself."""
    beta2_decay: Annotated[float, Field(le=0)] = -0.8
    """The second moment at step t forgets at the rate t ** beta2_decay."""
    clip_threshold: Annotated[float, Field(ge=1)] = 1.0
    """Largest root mean square of a tensor's update."""
    decay: Decay = "matrices"
    """matrices leaves norms, biases and embeddings without weight decay."""


class Lion(Section):
    """The sign of a momentum: one state tensor, updates of equal size (arXiv:2302.06675)."""

    short = "kind"

    kind: Literal["lion"] = "lion"
    learning_rate: NonNegative = 3e-5
    """Peak learning rate; 3 to 10 times smaller than AdamW's."""
    weight_decay: NonNegative = 1.0
    """Each step shrinks a weight by learning_rate x weight_decay of itself; 3 to 10 times larger than AdamW's."""
    betas: tuple[Beta, Beta] = (0.9, 0.99)
    """Weight of the old momentum in the step, and memory of the momentum."""
    decay: Decay = "matrices"
    """matrices leaves norms, biases and embeddings without weight decay."""


class Muon(Section):
    """Momentum made orthogonal by a Newton-Schulz iteration, for matrices; AdamW for the rest."""

    short = "kind"

    kind: Literal["muon"] = "muon"
    learning_rate: NonNegative = 2e-2
    """For hidden matrices; the rest (embeddings, head, norms, biases) is trained by AdamW."""
    weight_decay: NonNegative = 0.01
    """Each step shrinks a weight by learning_rate x weight_decay of itself."""
    momentum: Beta = 0.95
    """Share of the last direction that is kept."""
    newton_schulz_steps: Annotated[int, Field(ge=1, le=99)] = 5
    """Iterations of the orthogonalisation."""
    adamw_learning_rate: NonNegative = 2e-4
    """Peak learning rate of the AdamW part."""
    adamw_betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Betas of the AdamW part."""
    decay: Decay = "matrices"
    """matrices leaves norms, biases and embeddings without weight decay."""


class AdamW8bit(Section):
    """AdamW with 8-bit moments (arXiv:2110.02861): a quarter of the state; on a CPU an update takes 7 times as long."""

    short = "kind"

    kind: Literal["adamw8bit"] = "adamw8bit"
    learning_rate: NonNegative = 2e-4
    """Peak learning rate; `schedule` scales it over the run."""
    weight_decay: NonNegative = 0.1
    """Each step shrinks a weight by learning_rate x weight_decay of itself."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Memory of the gradient's mean and of its square."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment, against division by zero."""
    block: PositiveInt = 256
    """Elements that share a scale: with 256, state is 2.03 bytes a parameter instead of 8. An update of 63M parameters
    takes 0.33 s instead of 0.05 on two CPU threads."""
    smallest: Annotated[int, Field(ge=0)] = 4096
    """Parameters with fewer elements than this keep float32 moments."""
    decay: Decay = "matrices"
    """matrices leaves norms, biases and embeddings without weight decay."""


class PagedAdamW(Section):
    """AdamW with its state in a file (on a GPU: in the host's memory), so that no spike of memory can end the run."""

    short = "kind"

    kind: Literal["paged-adamw"] = "paged-adamw"
    learning_rate: NonNegative = 2e-4
    """Peak learning rate; `schedule` scales it over the run."""
    weight_decay: NonNegative = 0.1
    """Each step shrinks a weight by learning_rate x weight_decay of itself."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Memory of the gradient's mean and of its square."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment, against division by zero."""
    bits: Literal[8, 32] = 32
    """32 keeps moments in float32, with the results of adamw bit for bit and twice the time of an update on a CPU (more
    when the disk has to help); 8 keeps them as adamw8bit does."""
    folder: str | None = None
    """Folder of the file, which has no name and is gone when the run ends. By default TMPDIR, or else /var/tmp; on a
    GPU the host's memory."""
    decay: Decay = "matrices"
    """matrices leaves norms, biases and embeddings without weight decay."""


class GaLore(Section):
    """All weights trained, with gradients of hidden matrices projected to a low rank (arXiv:2403.03507); else AdamW."""

    short = "kind"

    kind: Literal["galore"] = "galore"
    learning_rate: NonNegative = 1e-3
    """Peak learning rate; hidden matrices learn at `scale` times it (the paper pretrains with 1e-2)."""
    weight_decay: NonNegative = 0.0
    """Each step shrinks a weight by learning_rate x weight_decay of itself."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Memory of the gradient's mean and of its square."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment, against division by zero."""
    rank: PositiveInt = 128
    """Dimensions that are left of a gradient, at most the smaller dimension of every hidden matrix. Gradients and
    moments of a matrix shrink by rank / that dimension; the gradient norm and clipping see projected gradients."""
    update_every: PositiveInt = 200
    """Steps between new projections: the first singular vectors of the gradient of the step's first micro-batch."""
    scale: Annotated[float, Field(gt=0)] = 0.25
    """What an update is multiplied by when it is projected back."""
    states: Literal["adamw", "adamw8bit"] = "adamw"
    """How moments are kept: in float32, or in 8 bits."""
    decay: Decay = "matrices"
    """matrices leaves norms, biases and embeddings without weight decay."""


Optimizer = Annotated[
    AdamW | AdamW8bit | PagedAdamW | GaLore | SGD | Adafactor | Lion | Muon, Field(discriminator="kind")
]


class _Targeted(Section):
    """What every adapter of linear layers is told."""

    short = "kind"

    kind: str
    targets: list[str] = ["all-linear"]
    """Where it sits: all-linear (every linear layer but the head), attention, mlp, names such as q_proj or
    embed_tokens, or a regular expression over full names such as `.*layers.[0-3].*up_proj`."""
    modules_to_save: list[str] = []
    """Modules trained in full and saved with the adapter: embed_tokens, lm_head, norm, ..."""


class LowRank(_Targeted):
    """What LoRA and its relatives are told."""

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
    leave the base (arXiv:2404.02948); olora: the same by QR (arXiv:2406.01775); loftq: what a quantized base loses
    (arXiv:2310.08659)."""
    svd_iterations: PositiveInt | None = None
    """pissa: power iterations of a fast SVD (16 is good); by default the exact one."""
    loftq_iterations: PositiveInt = 1
    """loftq: how often quantization and low-rank rest are improved in turn."""
    rank_pattern: dict[str, PositiveInt] = {}
    """Another rank for modules whose name ends with (or matches) a key."""
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Another alpha, likewise."""
    bias: Literal["none", "all", "adapted"] = "none"
    """Which biases of the base are trained as well: none, all, or those of adapted layers."""
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
    """LoRA that starts from what a quantized base loses (arXiv:2310.08659)."""

    kind: Literal["loftq"] = "loftq"
    init: Literal["loftq"] = "loftq"
    """The low-rank part of the quantization error starts in A and B."""


class LoraFa(LowRank):
    """LoRA with A frozen (arXiv:2308.03303)."""

    kind: Literal["lora-fa"] = "lora-fa"
    freeze_a: Literal[True] = True
    """Train B alone, so that no inputs are kept for A."""


class LoraPlus(LowRank):
    """LoRA whose B learns faster than A (arXiv:2402.12354)."""

    kind: Literal["lora-plus"] = "lora-plus"
    rate_ratio: Annotated[float, Field(gt=0)] = 16.0
    """B learns this many times faster than A."""


class Dora(LowRank):
    """LoRA for the direction of each row of W, and a trained magnitude for its length (arXiv:2402.09353)."""

    kind: Literal["dora"] = "dora"
    exact_norm: bool = False
    """Let gradients flow through the norm of the direction too; the paper (section 4.3) takes it as a constant."""


class Vera(_Targeted):
    """Random matrices shared by all layers and frozen, with a trained vector for each side (arXiv:2310.11454)."""

    kind: Literal["vera"] = "vera"
    rank: PositiveInt = 256
    """Width of the shared matrices; trained are rank + outputs numbers a layer."""
    dropout: Beta = 0.0
    """Share of the inputs that the adapter's path leaves out while training."""
    initial_d: float = 0.1
    """What the vector over the rank starts as; the one over the outputs starts at 0."""
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


class Bottleneck(Section):
    """Small networks behind attention and MLP: down, activation, up, added to what came in (arXiv:1902.00751)."""

    short = "kind"

    kind: Literal["bottleneck"] = "bottleneck"
    placement: Literal["houlsby", "pfeiffer"] = "houlsby"
    """houlsby: behind attention and behind the MLP; pfeiffer: behind the MLP alone (arXiv:2005.00247)."""
    width: PositiveInt = 64
    """Width between down and up."""
    activation: Literal["gelu", "relu", "silu"] = "gelu"
    """Between down and up."""
    modules_to_save: list[str] = []
    """Modules trained in full and saved with the adapter: embed_tokens, lm_head, norm, ..."""


class Prefix(Section):
    """Trained keys and values before every document, in every layer (arXiv:2101.00190)."""

    short = "kind"

    kind: Literal["prefix"] = "prefix"
    tokens: PositiveInt = 20
    """Length of the prefix."""
    projection: PositiveInt | None = None
    """Train through an MLP of this width, as the paper does for stability; it is folded away when saving."""


class Prompt(Section):
    """Trained embeddings before every document (arXiv:2104.08691)."""

    short = "kind"

    kind: Literal["prompt"] = "prompt"
    tokens: PositiveInt = 20
    """Length of the soft prompt."""
    text: str | None = None
    """Start from the embeddings of this text, cut or repeated to length; by default from random words."""


class Continue(Section):
    """Go on training the last of `model.adapters`."""

    short = "kind"

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
    | Vera
    | Mora
    | Ia3
    | Bottleneck
    | Prefix
    | Prompt
    | Continue
)
Adapter = Annotated[AdapterSection, Field(discriminator="kind")]


class _FourBit(Section):
    short = "kind"

    kind: str
    block: Literal[32, 64, 128, 256, 512, 1024, 2048, 4096] = 64
    """Numbers that share a scale."""
    double: bool = True
    """Quantize the scales too: 4.13 bits a parameter instead of 4.5."""


class Nf4(_FourBit):
    """Four bits with levels at quantiles of the normal distribution, as in QLoRA (arXiv:2305.14314)."""

    kind: Literal["nf4"] = "nf4"


class Fp4(_FourBit):
    """Four-bit floating point: a sign, two bits of exponent, one of mantissa."""

    kind: Literal["fp4"] = "fp4"


class _Integers(Section):
    short = "kind"

    kind: str
    group: PositiveInt = 128
    """Inputs of a row that share a scale."""


class Int8(_Integers):
    """Eight-bit integers, rounded to nearest."""

    kind: Literal["int8"] = "int8"


class Int4(_Integers):
    """Four-bit integers, rounded to nearest."""

    kind: Literal["int4"] = "int4"


QuantizationSection = Nf4 | Fp4 | Int8 | Int4
Quantization = Annotated[QuantizationSection, Field(discriminator="kind")]


class Schedule(Section):
    """The learning rate over the run, as a multiple of the optimizer's own."""

    short = "kind"

    kind: Literal["constant", "linear", "cosine", "wsd", "inverse-sqrt"] = "cosine"
    warmup: Steps | Literal[0] = 0.05
    """Steps (an integer) or share of the run (below 1) over which the rate rises linearly from 0."""
    floor: Share = 0.1
    """The last rate as a share of the peak, for linear, cosine and wsd."""
    decay: Steps = 0.2
    """wsd only: steps or share at the end over which the rate falls."""


class BatchSize(Section):
    """What one optimizer step sees, whatever the machine: never changed by micro-batching or layout."""

    short = "sequences"
    one_of = ("tokens", "sequences")

    tokens: PositiveInt | None = None
    """Tokens in a step; a multiple of data.max_length when packing."""
    sequences: PositiveInt | None = None
    """Packs in a step (rows, without packing; images, with stage classify)."""
    micro: PositiveInt | Literal["auto"] = "auto"
    """Packs that go through the model at once; auto finds the most that fit in `memory`."""
    memory: Annotated[float, Field(gt=0)] | None = None
    """Budget in GiB for auto; by default most of what is free."""

    def packs(self, max_length: int) -> int:
        """Packs in a step (rows, without packing), each of `max_length` tokens."""
        if self.tokens is not None:
            return max(1, self.tokens // max_length)
        assert self.sequences is not None, "the recipe's rules ask for tokens or sequences"
        return self.sequences


class LossOptions(Section):
    """Additions to the cross-entropy."""

    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the probability spread evenly over the vocabulary."""
    z_loss: NonNegative = 0.0
    """Weight of log(Z)^2, which keeps logits from drifting (PaLM, arXiv:2204.02311, sec. 5)."""


class Watch(Section):
    """What to do when a step looks wrong. A non-finite loss always stops the run."""

    short = "policy"

    policy: Literal["warn", "skip", "rewind"] = "warn"
    """warn reports it; skip leaves the update out; rewind goes back to the last checkpoint and leaves those rows
    out."""
    loss_spike: Annotated[float, Field(gt=0)] | None = 6.0
    """A loss this many robust standard deviations above the recent median is a spike."""
    gradient_norm: Annotated[float, Field(gt=0)] | None = None
    """A gradient norm (before clipping) above this is a spike."""
    window: PositiveInt = 64
    """Recent steps that make the median; nothing is judged before half of it has passed."""
    rewinds: PositiveInt = 3
    """Stop after going back this often."""


class Ema(Section):
    """An exponential moving average of the weights, evaluated and exported beside them."""

    short = "decay"

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """Share of the average that a step keeps."""


class EarlyStop(Section):
    """End the run when the evaluation loss no longer falls."""

    short = "patience"

    patience: PositiveInt = 3
    """Evaluations without improvement before the run ends."""
    min_delta: NonNegative = 0.0
    """A smaller fall of the loss than this is no improvement."""


class Samples(Section):
    """Texts generated while training, to read."""

    short = "prompts"

    prompts: list[str]
    """One or more texts to continue (pretrain) or to answer (sft)."""
    max_new_tokens: PositiveInt = 64
    """Longest continuation."""
    temperature: NonNegative = 0.0
    """0 takes the likeliest token each time."""


class Evaluation(Section):
    """Loss, perplexity and token accuracy on `data.eval` while training."""

    short = "every"

    every: PositiveInt | None = None
    """Steps between evaluations; by default ten over the run."""
    early_stop: EarlyStop | None = None
    """End the run when the evaluation loss no longer falls."""
    samples: Samples | None = None
    """Texts generated at each evaluation, to read."""


class Parallel(Section):
    """How a run is spread over processes; what is computed stays the same, and `danlu verify` shows it."""

    short = "shard"

    data: PositiveInt | Literal["auto"] = "auto"
    """Processes (times `context`, `tensor` and `pipeline`) that each take other rows; auto: as many as there are."""
    shard: Literal["none", "zero1", "zero2", "zero3"] = "none"
    """What data ranks share instead of holding it each: nothing (DDP), optimizer state (zero1), gradients too (zero2),
    parameters too (zero3, the same as FSDP)."""
    replicate: PositiveInt = 1
    """Hybrid sharding: this many copies of a model that is sharded among data / replicate ranks."""
    tensor: PositiveInt = 1
    """Ranks among which every matrix is cut, with its attention heads and its part of the vocabulary."""
    sequence: bool = False
    """With tensor: cut tokens among the same ranks where norms and residuals are computed (arXiv:2205.05198)."""
    pipeline: PositiveInt = 1
    """Stages of layers, one after the other. Only 1 so far."""
    context: PositiveInt = 1
    """Ranks among which the tokens of long documents are cut. Only 1 so far."""
    expert: PositiveInt = 1
    """Ranks among which experts are dealt out. Only 1 so far."""
    accumulate: Literal["auto", "local", "sharded"] = "auto"
    """Between micro-batches: local keeps whole gradients and sends them once a step; sharded sends after each
    micro-batch and keeps a share. auto: sharded with zero2 and zero3, else local."""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """Type in which gradients are summed over data ranks; bf16 halves what is sent, and loses digits."""
    prefetch: Annotated[int, Field(ge=0)] = 1
    """zero3: layers whose parameters are gathered ahead of use."""
    workers: Literal["processes", "threads"] = "processes"
    """threads: data parallel in one process, a copy of the model for each device (a teaching mode: Python runs one
    thread at a time, so it is slower)."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """How often the whole group starts again from the last checkpoint when a process dies."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """A collective that takes longer has failed; the processes that wait, and where, are told before."""


class Recompute(Section):
    """Activations that are dropped in the forward pass and made again in the backward pass."""

    short = "kind"

    kind: Literal["none", "full", "every", "selective", "planned"] = "none"
    """none; full: every layer; every: each `layers`-th; selective: attention and element-wise operations, while matrix
    products are kept; planned: what costs least time under `budget`, from sizes and times measured on this model."""
    layers: PositiveInt | None = None
    """every: segments of so many layers keep their input alone; by default the root of the number of layers."""
    budget: Annotated[float, Field(gt=0)] | None = None
    """planned: GiB that activations of a micro-batch may take."""


class Memory(Section):
    """What is traded for memory."""

    short = "recompute"

    recompute: Recompute = Recompute()
    """Activations that are made again instead of being kept."""
    offload: list[Literal["parameters", "gradients", "optimizer", "activations"]] = []
    """What is kept in the host's memory (or, with `folder`, on its disk) instead of the device's."""
    folder: str | None = None
    """A folder on a local disk (NVMe): offloaded optimizer state and parameters lie in memory-mapped files there."""


class Checkpoint(Section):
    """What is kept to go on from, and how often."""

    short = "every"

    every: PositiveInt | None = None
    """Steps between checkpoints; by default ten over the run. The last step is always saved."""
    keep: PositiveInt = 2
    """Newest checkpoints kept."""
    keep_every: PositiveInt | None = None
    """Also keep every checkpoint whose step is a multiple of this."""
    keep_best: bool = False
    """Also keep the one with the lowest evaluation loss, saved as soon as it is seen, and export it at the end."""
    background: bool = True
    """Flush to disk and publish in a thread while training goes on."""


class Log(Section):
    """What is written down while training."""

    short = "every"

    every: PositiveInt = 1
    """Steps between lines of metrics.jsonl and of the console."""
    tensorboard: bool = True
    """Write TensorBoard events to the run folder."""
    wandb: str | None = None
    """Weights & Biases project; needs the wandb package."""


class Recipe(Section):
    """A whole recipe."""

    one_of = ("epochs", "steps")

    stage: Literal["pretrain", "sft", "classify"]
    """What is trained: plain text (pretrain), conversations (sft), or a classifier of small images (classify)."""
    model: Model
    """Where the weights start."""
    data: Data
    """What is trained on, and how rows become tokens."""
    adapter: Adapter | None = None
    """Train few parameters beside a frozen base: lora, dora, rslora, pissa, olora, loftq, lora-fa, lora-plus, vera,
    mora, ia3, bottleneck, prefix, prompt; continue trains the last of `model.adapters` on."""
    quantization: Quantization | None = None
    """Hold the frozen base in few bits: nf4, fp4, int8, int4."""
    optimizer: Optimizer = AdamW()
    """How gradients become updates: adamw, adamw8bit, paged-adamw, galore, sgd, adafactor, lion or muon."""
    schedule: Schedule = Schedule()
    """The learning rate over the run."""
    batch: BatchSize = BatchSize(sequences=8)
    """What one optimizer step sees."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the data; 1 when neither epochs nor steps is given."""
    steps: PositiveInt | None = None
    """Optimizer steps, instead of epochs."""
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Type of activations and matrix products. Trained weights and gradient sums are float32 in every case, and
    so is optimizer state unless the optimizer says otherwise."""
    parallel: Parallel = Parallel()
    """How the run is spread over processes: none (DDP), zero1, zero2, zero3, tensor, sequence."""
    memory: Memory = Memory()
    """Recompute and offload."""
    loss: LossOptions = LossOptions()
    """Additions to the cross-entropy."""
    gradient_clipping: NonNegative | None = 1.0
    """Largest global gradient norm; null to leave gradients alone."""
    watch: Watch = Watch()
    """What to do when a step looks wrong."""
    ema: Ema | None = None
    """An average of the weights, kept beside them."""
    evaluation: Evaluation = Evaluation()
    """How often to evaluate, when to stop early, what to generate."""
    checkpoint: Checkpoint = Checkpoint()
    """What is kept to go on from, and how often."""
    log: Log = Log()
    """What is written down while training."""
    compile: bool = False
    """torch.compile the model; the first steps are slow, later ones may be faster."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPU where there is one."""
    threads: PositiveInt | None = None
    """CPU threads for matrix products; by default one per core."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Decides the order of the data, the first weights and every other draw."""
    output: str
    """The run folder."""
