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
    preset: Literal["tiny", "small"] | None = None
    """A Llama-shaped model from scratch: tiny (about 5M parameters) or small (about 58M). The
    vocabulary comes from the tokenizer."""
    config: str | dict[str, Any] | None = None
    """From scratch: a config.json (path) or its content. Weights are drawn from (seed, parameter name)."""
    tokenizer: str | None = None
    """Tokenizer folder or hub id; by default the one in `path`."""
    chat_template: str | None = None
    """A Jinja file that replaces the tokenizer's own chat template."""


class Source(Section):
    """One file or data set of rows."""

    short = "path"

    path: str
    """A json, jsonl, csv, parquet, arrow or txt file, a folder of them, or a hub data set id. `path#500` takes the
    first 500 rows."""
    rows: PositiveInt | None = None
    """Take only this many rows from the front (the same as `path#N`)."""
    weight: Annotated[float, Field(gt=0)] | None = None
    """Share of the mixture, relative to the other sources. Without weights every row of every source is used once
    an epoch."""
    format: Literal["auto", "text", "alpaca", "sharegpt", "messages", "prompt-completion", "tokenized"] = "auto"
    """How to read a row; auto recognises it from the columns."""
    split: str = "train"
    """Split of a hub data set."""


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


Optimizer = Annotated[AdamW | SGD | Adafactor | Lion | Muon, Field(discriminator="kind")]


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
    """Packs in a step (rows, without packing)."""
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

    stage: Literal["pretrain", "sft"]
    """What is trained: plain text (pretrain) or conversations (sft)."""
    model: Model
    """Where the weights start."""
    data: Data
    """What is trained on, and how rows become tokens."""
    optimizer: Optimizer = AdamW()
    """How gradients become updates: adamw, sgd, adafactor, lion or muon."""
    schedule: Schedule = Schedule()
    """The learning rate over the run."""
    batch: BatchSize = BatchSize(sequences=8)
    """What one optimizer step sees."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the data; 1 when neither epochs nor steps is given."""
    steps: PositiveInt | None = None
    """Optimizer steps, instead of epochs."""
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Type of activations and matrix products. Weights, gradient sums and optimizer state are float32 in
    every case."""
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
