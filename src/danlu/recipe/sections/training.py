"""The steps of a run: evaluations, checkpoints and logs on the way."""

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from danlu.recipe.sections.base import (
    OF_RL,
    OF_TOKENS,
    NonNegative,
    NotReadWith,
    PositiveInt,
    ReadWith,
    Section,
    Share,
    Steps,
    VariantSection,
)


class Schedule(Section):
    """The learning rate over the run, as a multiple of the optimizer's own."""

    short = "kind"

    kind: Literal["constant", "linear", "cosine", "wsd", "inverse-sqrt"] = "cosine"
    warmup: Steps | Literal[0] = 0.05
    """Steps (an integer) or share of the run (below 1) over which the rate rises linearly from 0."""
    floor: Annotated[
        Share,
        ReadWith("kind", ("linear", "cosine", "wsd"), "the {value} schedule has no floor; linear, cosine and wsd do"),
    ] = 0.1
    """The last rate as a share of the peak, for linear, cosine and wsd."""
    decay: Annotated[Steps, ReadWith("kind", "wsd", "only the wsd schedule has a decay; this one is {value}")] = 0.2
    """wsd only: steps or share at the end over which the rate falls."""

    def warmup_steps(self, total: int) -> int:
        """Steps of warm-up in a run of `total` steps; a share is rounded up to whole steps."""
        return _in_steps(self.warmup, total)

    def decay_steps(self, total: int) -> int:
        """Steps of decay at the end of a run of `total` steps, rounded up; 0 unless the schedule is wsd."""
        return _in_steps(self.decay, total) if self.kind == "wsd" else 0

    def problems(self, total: int | None) -> list[tuple[str, str]]:
        """Returns (field, message) of settings that do not fit into a run of `total` steps; None: known only once rows
        are counted.
        """
        shares = isinstance(self.warmup, float) and isinstance(self.decay, float)
        if self.kind == "wsd" and shares and self.warmup + self.decay > 1:
            return [
                ("warmup", f"warm-up {self.warmup} and decay {self.decay} together are more than the whole run (1.0)")
            ]
        if total is None:
            return []
        warmup, decay = self.warmup_steps(total), self.decay_steps(total)
        if warmup > total:
            advice = f"Use at most {total}, or a share of the run such as 0.05"
            return [("warmup", f"a warm-up of {warmup} steps is longer than the run of {total}. {advice}")]
        # Shares that each round up may overlap by a step or two; the decay then begins right after the warm-up.
        if warmup + decay > total and not shares:
            message = f"warm-up ({warmup} steps) and decay ({decay}) are longer than the run of {total}"
            return [("decay", f"{message}. Use at most {total - warmup} steps of decay, or less warm-up")]
        return []


def _in_steps(setting: float, total: int) -> int:
    """An integer is a number of steps; a float below 1 is a share of `total`, rounded up to whole steps."""
    return setting if isinstance(setting, int) else math.ceil(setting * total)


class BatchSize(Section):
    """The global batch of one optimizer step, whatever the world size, strategy or micro-batch size."""

    short = "sequences"
    one_of = ("tokens", "sequences", "rows", "prompts")
    old_names: ClassVar[dict[str, str]] = {"pairs": "rows"}

    tokens: Annotated[
        PositiveInt | None,
        NotReadWith("stage", "classify", f"{OF_TOKENS.message}. A step is counted in images: give batch.sequences"),
    ] = None
    """Tokens in a step; a multiple of data.max_length when packing."""
    sequences: PositiveInt | None = None
    """Packed sequences in a step (rows, without packing; images, with stage classify)."""
    rows: PositiveInt | None = None
    """Rows in a step, for stages preference and reward: pairs of answers, judged answers, or answers in steps. Its
    earlier name `pairs` is read too."""
    prompts: PositiveInt | None = None
    """Prompts of a rollout, for stage rl, each with rollout.samples answers."""
    updates: Annotated[PositiveInt, OF_RL] = 1
    """Stage rl: optimizer steps that the prompts of a rollout are divided among."""
    passes: Annotated[PositiveInt, OF_RL] = 1
    """Stage rl: how many times each answer of a rollout is trained on, in another order each time."""
    micro: PositiveInt | Literal["auto"] = "auto"
    """Micro-batch size: packed sequences that go through the model at once; auto finds the most that fit in `memory`.
    Where a step is counted in rows or prompts, as many rows go through at once as fit in this number times
    data.max_length tokens.
    """
    memory: Annotated[Annotated[float, Field(gt=0)] | None, OF_TOKENS] = None
    """Budget in GiB for auto; by default most of the free memory."""

    def packs(self, max_length: int) -> int:
        """Packs in a step (rows, without packing or counted in rows or prompts), each of `max_length` tokens."""
        if self.prompts is not None:
            return self.prompts // self.updates
        if self.rows is not None:
            return self.rows
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
    """The response when a step looks wrong. A non-finite loss always stops the run."""

    short = "policy"

    policy: Literal["warn", "skip", "rewind"] = "warn"
    """warn reports it; skip skips the update; rewind goes back to the last checkpoint and skips those rows
    from then on."""
    loss_spike: Annotated[float, Field(gt=0)] | None = 6.0
    """A loss this many robust standard deviations above the recent median is a spike."""
    gradient_norm: Annotated[float, Field(gt=0)] | None = None
    """A gradient norm (before clipping) above this is a spike."""
    window: PositiveInt = 64
    """Recent steps that make the median; nothing is judged before half of it has passed."""
    rewinds: PositiveInt = 3
    """Stop after going back this often."""


class Ema(Section):
    """An exponential moving average of the weights, evaluated and exported in addition to them."""

    short = "decay"

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """Share of the average that a step keeps."""


class EarlyStop(Section):
    """End the run when evaluations no longer get better, by `evaluation.metric`."""

    short = "patience"

    patience: PositiveInt = 3
    """Evaluations without improvement before the run ends."""
    min_delta: NonNegative = 0.0
    """A smaller fall of the loss (rise of an accuracy) than this is no improvement."""


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
    """Loss, perplexity and token accuracy on `data.eval` while training; null turns it off, and `data.eval` with it."""

    short = "every"

    every: PositiveInt | None = None
    """Steps between evaluations; by default ten over the run."""
    early_stop: EarlyStop | None = None
    """End the run when evaluations no longer get better."""
    metric: str = "loss"
    """The metric by which early stop and `checkpoint.keep_best` judge: a number that evaluations of the stage report,
    such as `accuracy`, `margin`, or `loss/NAME` of the rows of one source.
    """
    samples: Annotated[Samples | None, OF_TOKENS] = None
    """Texts generated at each evaluation, to read."""


_BALANCED = "only read with {key}: {values}. Leave it out"


class Router(Section):
    """How the experts of a mixture are kept evenly loaded; metrics.jsonl has the load of each layer in any case."""

    short = "balance"

    balance: Literal["bias", "sequence", "step", "none"] = "bias"
    """bias: a bias on the scores that choose experts moves after each update by `rate`, up for those with fewer tokens
    than the mean (for families that keep it: DeepSeek-V3, GLM-4 MoE, MiniMax-M2). sequence: a loss of each document
    (DeepSeek-V3). step: a loss of the load in the whole step before. none: nothing.
    """
    rate: Annotated[NonNegative, ReadWith("balance", ("bias", "step"), _BALANCED)] = 0.001
    """bias: how far a bias moves in an update. step: the coefficient of its loss."""
    sequence: Annotated[NonNegative, ReadWith("balance", ("bias", "sequence"), _BALANCED)] = 0.0001
    """bias and sequence: the coefficient of the loss of each document."""
    z: NonNegative = 0.0
    """The coefficient of a loss that keeps the router's logits small, the square of their logsumexp."""
    capacity: Annotated[float, Field(gt=0)] | None = None
    """The largest multiple of its even share of a packed sequence that an expert takes in training; later tokens of the
    sequence pass it by. By default no token is dropped.
    """


class Checkpoint(Section):
    """The checkpoints to resume from, and how often they are saved."""

    short = "every"

    every: PositiveInt | None = None
    """Steps between checkpoints; by default ten over the run. The last step is always saved."""
    keep: PositiveInt = 2
    """Newest checkpoints kept."""
    keep_every: PositiveInt | None = None
    """Also keep every checkpoint at a step that is a multiple of this."""
    keep_best: bool = False
    """Also keep the best one by `evaluation.metric`, saved as soon as it is seen, and export it at the end."""
    background: bool = True
    """Flush to disk and publish in a thread while training goes on."""


class Log(Section):
    """The files that are written while training."""

    short = "every"

    every: PositiveInt = 1
    """Steps between lines of metrics.jsonl and of the console. Where it is given the console shows all of these lines;
    else one in some seconds, which short steps would flood it with."""
    timeline: PositiveInt | None = None
    """The interval of steps, with a pipeline, for which each rank writes its timeline (timeline-RANK.jsonl), which
    `danlu schedule --run` draws. On a GPU such a step waits for each pass, and takes longer.
    """
    tensorboard: bool = True
    """Write TensorBoard events to the run folder."""
    wandb: str | None = None
    """Weights & Biases project; needs the wandb package."""


Activations = Literal["auto", "fp32", "bf16", "fp16"]

Fp8Recipe = Literal["tile", "row", "row-with-bf16-weight-gradient", "tensor", "mxfp8"]


class Fp8Products(VariantSection):
    """Matrix products of linear layers and experts in 8-bit floating-point numbers, which blocks of numbers share a
    scale of. Embedding, head, norms, routers and attention itself keep the type of activations; trained weights and
    gradients of weights are float32.
    """

    kind: Literal["fp8"] = "fp8"
    recipe: Fp8Recipe = "tile"
    """The blocks that share a scale. tile: 1 x 128 of activations and gradients, 128 x 128 of weights, in E4M3, with
    inputs kept in 8 bits for the backward pass (DeepSeek-V3, arXiv:2412.19437, section 3.3); row: a token's features,
    or a row of a weight, as torchao's rowwise; row-with-bf16-weight-gradient: the same, with the gradient of weights by
    a product in the type of activations; tensor: a whole tensor, with gradients in E5M2, as torchao's tensorwise;
    mxfp8: 32 numbers, with scales that are powers of two (OCP Microscaling formats 1.0).
    """
    activations: Literal["bf16", "fp32"] = "bf16"
    """The type of activations, and of the products that are not in 8 bits."""
