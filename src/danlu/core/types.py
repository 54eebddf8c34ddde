"""The types that rooms exchange. Importing this file imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

# S tokens of one sample · T packed tokens · N trained targets · M branches · D model width
# H query heads · K key/value heads · C head width · I, O inputs and outputs of a linear layer


class Branch(NamedTuple):
    """A run of tokens in the tree of a sample: it sees itself and its ancestors, and no other branch.

    Branches are in pre-order: a branch comes after its parent, and its descendants come before all later branches.
    Together they are the sample's tokens, in order. Positions go on from the end of the parent.
    """

    parent: int  # number of the branch that it continues, smaller than its own; -1 for a root, a document of its own
    start: int  # of its tokens
    stop: int


class Run(NamedTuple):
    """Tokens of one document, or of one branch of a tree, that follow one another and are on the same rank."""

    document: int  # its number in the packed sequence; where there are trees, that of the branch
    position: int  # of the first token, as in `Batch.positions`
    start: int  # of the first token, in the packed sequence or in the rows of the rank
    stop: int
    ancestors: tuple[int, ...] = ()  # numbers of the branches that it sees besides its own, from the root on

    @property
    def tokens(self) -> int:
        """How many there are."""
        return self.stop - self.start


ROTARY_LENGTH = "rotary_length"
"""The fact of a branch: tokens that the text might have at last when an answer was drawn, by which LongRoPE chose its
factors."""
ROUTES = "routes"
"""The column [S, layers with experts, experts of a token] int16 of `Batch.routes`."""


class Share(NamedTuple):
    """The tokens of one rank, in the order in which they lie there: those of whole documents, then those of chunks."""

    whole: tuple[Run, ...]
    """Documents that this rank alone has, in order; of a tree a run for each branch."""
    chunks: tuple[Run, ...]
    """The chunks of documents that are cut, in order."""

    @property
    def runs(self) -> tuple[Run, ...]:
        """All of them."""
        return (*self.whole, *self.chunks)

    @property
    def tokens(self) -> int:
        """Tokens of all runs."""
        return sum(run.tokens for run in self.runs)


@dataclass(frozen=True)
class Sample:
    """One tokenised row: a document that attention never leaves, or a tree of branches that share their beginnings.

    `weights[i]` belongs to token i *as a target*, predicted from the tokens before it (of the first token of a branch:
    from its parent's last one); the first token of a root has nothing before it, so its weight is 0.
    """

    tokens: np.ndarray  # [S] int32
    weights: np.ndarray  # [S] float32, 0 = context only
    row: str  # where it came from, for messages: "alpaca.json row 17"
    source: str = ""  # short name of its file, data set or mixture part (`data.sources.source_names`), for metrics
    branches: tuple[Branch, ...] = ()  # empty: one branch, which is the whole sample
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    """[S, ...] each, cached values of every token: the log-probability that a reference gives it, an advantage. A batch
    has `ROUTES` for all its tokens, and others for its targets alone.
    """
    facts: Mapping[str, np.ndarray] = field(default_factory=dict)
    """[branches] float32 each, values of every branch, NaN where one has none: a label, a margin, a reward, a group."""
    is_filler: bool = False
    """Whether the sample is of no row: a process without rows runs the model on it, so that all processes do."""

    @property
    def documents(self) -> int:
        """The number of roots: virtual tokens are put before them, and attention is cut at them."""
        return sum(branch.parent < 0 for branch in self.branches) or 1

    def rearranged(self, places: np.ndarray, branches: Sequence[Branch], numbers: np.ndarray | Sequence[int]) -> Sample:
        """The tokens at some places, as other branches: each has the facts of the one with its number among the old."""
        return replace(
            self,
            tokens=self.tokens[places],
            weights=self.weights[places],
            branches=tuple(branches),
            columns={name: values[places] for name, values in self.columns.items()},
            facts={name: values[numbers] for name, values in self.facts.items()},
        )


@dataclass(frozen=True)
class Pack:
    """Samples laid end to end, without padding. One or more packs make a micro-batch."""

    samples: tuple[Sample, ...]
    stage_length: int | None = None
    """Tokens that a pack may have in its stage of lengths (`long_context.stages`), by which its documents are rotated;
    None: the model's own rotation."""

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        return sum(len(sample.tokens) for sample in self.samples)

    @property
    def targets(self) -> int:
        """Tokens that carry weight."""
        return sum(int((sample.weights != 0).sum()) for sample in self.samples)

    @property
    def weight(self) -> float:
        """The sum of the targets' weights."""
        return float(sum(sample.weights.sum(dtype="float64") for sample in self.samples))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sample."""
        return tuple(len(sample.tokens) for sample in self.samples)

    @property
    def documents(self) -> int:
        """Documents of all samples: a tree counts as one for each of its roots."""
        return sum(sample.documents for sample in self.samples)

    @property
    def rows(self) -> tuple[str, ...]:
        """The place of each sample's row, for messages."""
        return tuple(sample.row for sample in self.samples)


SECONDS_OF_ITEMS = frozenset({"hand_over_s", "rollout_s", "reward_s", "scoring_s"})
"""Metrics of items that models make: how long answering, judging and scoring took."""


class Item(Protocol):
    """The unit of a step's batch in the loop: a pack of documents, or an image."""

    @property
    def tokens(self) -> int: ...  # an image counts as one

    @property
    def targets(self) -> int: ...  # that carry weight

    @property
    def weight(self) -> float: ...  # the sum of their weights

    @property
    def lengths(self) -> tuple[int, ...]: ...  # tokens of each document

    @property
    def rows(self) -> tuple[str, ...]: ...  # where each document came from, for messages


@dataclass(frozen=True)
class Totals:
    """The totals of a whole optimizer step, over all its micro-batches and processes.

    It follows from the step's items alone, so every process knows it before its first forward pass. The step divides
    the loss's `total` once, by `weight`; an objective that has a term with another divisor d multiplies that term by
    `weight / d`.
    """

    weight: float  # the sum over all targets
    tokens: int
    targets: int
    document_lengths: tuple[int, ...]  # in tokens, in the order of the items
    divisors: Mapping[str, float] = field(default_factory=dict)
    """Further divisors of the step, by an objective's names for them: pairs, tokens of chosen answers."""

    @property
    def has_targets(self) -> bool:
        """Whether the step has a mean loss: trained weight, and a divisor of the objective above 0."""
        return self.weight > 0 and (not self.divisors or any(self.divisors.values()))

    @classmethod
    def of(cls, items: Iterable[Item]) -> Totals:
        """The totals of a step that consists of `items`: of all processes, not of this one's alone."""
        weight, tokens, targets, lengths = 0.0, 0, 0, list[int]()
        for item in items:
            weight += item.weight
            tokens += item.tokens
            targets += item.targets
            lengths += item.lengths
        return cls(weight, tokens, targets, tuple(lengths))


@dataclass(frozen=True)
class TargetSources:
    """The source of rows of each target of a micro-batch, in a run that reports several."""

    names: tuple[str, ...]  # [K] of all sources that are reported, whether or not the micro-batch has targets of them
    indices: Tensor  # [N] int64, into `names`; K for a target of another source
    weights: tuple[float, ...]  # [K] the weight that the micro-batch's targets of each source have in sum


WHOLE_SHARE = 1 / 8
"""Context ranks leave a document whole if it costs no more than this part of a rank's mean cost, so no rank exceeds the
mean by more because of it."""


@dataclass(frozen=True)
class SharedBranches:
    """Branches with tokens on several context ranks, and the sums by which each rank has values of whole branches.

    Every rank knows all M branches (where there are no trees, documents). It sums its tokens of each, and `all_reduce`
    adds up the ranks; a value that is computed from a whole branch is counted by one rank alone, for losses and metrics
    are summed over the ranks.
    """

    target_numbers: Tensor  # [N] int64: which one each target is among those of all ranks
    branch_of_token: Tensor  # [T] int64, on the host
    last_tokens: Tensor  # [M] int64, on the host: the row of each branch's last token, -1 where another rank has it
    are_counted: bool  # whether this is the rank that counts what is made of whole branches
    all_reduce: Callable[[Tensor], Tensor]
    """The sum over the ranks, a new tensor. Its gradient is the sum of the ranks' gradients: each adds the share that
    its own part of the loss has."""


@dataclass(frozen=True)
class Batch:
    """A micro-batch on the device: packed documents, and the targets that carry weight.

    Target n is predicted from hidden state `logits_indices[n]`: that of the token just before it in the same branch, or
    of the parent's last one.
    """

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64, restart at 0 in each document; in a branch they go on from its parent's end
    real: Tensor  # [T] bool: of the rows; False for virtual tokens, fillers, and what fills the batch up to its size
    boundaries: tuple[int, ...]  # [documents + 1] offsets into T, from 0 to T
    packs: tuple[int, ...]  # [packs + 1] offsets into T, from 0 to T
    logits_indices: Tensor  # [N] int64, rising where there are no trees
    targets: Tensor  # [N] int64
    weights: Tensor  # [N] float32, all > 0 (see `data.batch.pad_to_bucket` for those that are not)
    weight: float  # sum of `weights`
    rows: tuple[str, ...]  # one per document, for messages
    target_sources: TargetSources | None = None  # None where all rows of the run are from one source
    trees: tuple[Branch, ...] = ()
    """[M] branches of all samples, with offsets into T (of a context rank, into T of whole packs); empty where each
    document is one branch."""
    branch: Tensor | None = None  # [N] int64, the branch of each target; None where there are no trees
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # [N, ...] each: of every target
    facts: Mapping[str, Tensor] = field(default_factory=dict)
    """The facts of every branch, [M] float32 each; on the host, so that decisions on them do not wait for a GPU."""
    stage_length: int | None = None  # of its packs
    routes: Tensor | None = None
    """[T, layers with experts, experts of a token] int16: the experts that the policy sends each token to, -1 where its
    router chooses; None where it chooses for all."""
    shares: tuple[Share, ...] = ()
    """The share of each context rank, where these tokens are the share of one; empty where they are all tokens. With
    shares, `boundaries` and `rows` are those of the rank's runs, not of whole documents."""
    document_lengths: Tensor | None = None
    """[T] int64, of each token's whole document, the longest path of a tree; None where documents are whole."""
    shared_branches: SharedBranches | None = None  # where `shares` are not empty


class MicroBatch(Protocol):
    """The fields of a micro-batch that loop and objectives read, whatever it is made of."""

    @property
    def targets(self) -> Tensor: ...  # [N] int64

    @property
    def weights(self) -> Tensor: ...  # [N] float32

    @property
    def weight(self) -> float: ...  # the sum of `weights`, known without waiting for the device

    @property
    def target_sources(self) -> TargetSources | None: ...


Task = Literal["causal-lm", "sequence-classification", "token-classification"]
"""The task of a decoder. One that classifies has no head over the vocabulary, but one with a few labels (`score`)."""

Role = str
"""The role of a model in a stage: the policy, which is trained and the result; a reference, teacher, reward, value."""


@dataclass(frozen=True)
class Metric:
    """A number to be shown: a sum, and the weight that it is divided by once both are summed over a step."""

    sum: Tensor  # scalar, without gradient
    weight: float


@dataclass(frozen=True)
class Loss:
    """The result of an objective for a micro-batch: sums, never means."""

    total: Tensor  # scalar; carries the gradient, and is divided by `Totals.weight` once per optimizer step
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """The same names for every micro-batch on every process, for they are added up."""


@dataclass(frozen=True)
class TargetLosses:
    """The cross-entropy of a micro-batch's targets; the scalars are sums over targets of weight x value."""

    total: Tensor  # scalar: cross-entropy with label smoothing and z-loss; carries the gradient
    nll: Tensor  # scalar: negative log-likelihood, without the two extras
    correct: Tensor  # scalar: 1 for targets that are the argmax of their logits; of equal logits the first counts
    by_target: Tensor | None = None  # [N] nll of each target, without its weight and gradient; where it is asked for


class Outputs(Protocol):
    """The outputs of one model for a micro-batch, each computed when it is asked for; logits [N, V] are never held.

    An objective's `needs` names the methods it calls.
    """

    def cross_entropy(
        self, *, label_smoothing: float = 0.0, z_loss: float = 0.0, by_target: bool = False
    ) -> TargetLosses: ...

    def logprobs(
        self,
        *,
        temperature: float = 1.0,
        support: Tensor | None = None,  # [N, K] int64: ids it is confined to; -1 is no id, and no ids are all
        entropy: bool = False,
        collision: bool = False,
    ) -> TokenLogprobs: ...

    def divergence(
        self,
        teacher: Outputs,
        *,
        kind: DivergenceKind,
        beta: float = 0.5,
        temperature: float = 1.0,
        top_k: int | None = None,
    ) -> Tensor: ...  # [N] float32, nats, times temperature^2: see `objectives.divergence`

    # of ids below `vocab_size`
    def top_tokens(self, k: int, *, temperature: float = 1.0, vocab_size: int | None = None) -> TopTokens: ...

    def scores(self) -> Tensor: ...  # [M] or [M, labels] float32: what the head says at the last token of each branch

    def values(self) -> Tensor: ...  # [N] float32: what the head says at the place each target is predicted from

    def hidden(self) -> Tensor: ...  # [T, D] last hidden states


@dataclass(frozen=True)
class TokenLogprobs:
    """The distribution at each target's place: softmax(logits / temperature), within its support where one is given.

    Outputs that were not asked for are None.
    """

    logprobs: Tensor  # [N] float32, nats: of the target; carries gradients where the model does
    entropy: Tensor | None = None  # [N] float32, nats; carries gradients too
    collision: Tensor | None = None  # [N] float32, nats: log of the sum of squared probabilities, without gradient


DivergenceKind = Literal["forward", "reverse", "jensen-shannon"]
"""KL(teacher || policy), KL(policy || teacher), or the generalised Jensen-Shannon divergence between both."""


@dataclass(frozen=True)
class TopTokens:
    """The likeliest tokens at each target's place, and all others as one more outcome."""

    ids: Tensor  # [N, K] int64
    logprobs: Tensor  # [N, K + 1] float32, nats: of each, then of all others together


class Objective(Protocol):
    """A pure function from the outputs of a stage's models to a loss.

    One that has parameters of its own (a value head, a projection) or running statistics is an `nn.Module`: its
    parameters are trained together with the policy's, and with its buffers they have a place in every checkpoint.
    """

    @property
    def needs(self) -> frozenset[str]: ...  # names of the methods of `Outputs` that it calls

    def __call__(self, outputs: Mapping[Role, Outputs], batch: Any, totals: Totals) -> Loss: ...


@runtime_checkable
class HeadObjective(Protocol):
    """An objective (a module) that has a head of a few labels on the policy's hidden states."""

    @property
    def score_head(self) -> nn.Linear: ...  # [labels, D]: what the policy's `scores` and `values` apply


@runtime_checkable
class RoleObjective(Protocol):
    """An objective that names the models that it reads besides the policy: others of the stage are not run for it."""

    @property
    def roles(self) -> frozenset[Role]: ...


@runtime_checkable
class CountingObjective(Protocol):
    """An objective with terms that have divisors of their own."""

    def divisors(self, items: Iterable[Pack]) -> Mapping[str, float]:
        """`Totals.divisors` of a step of these items; sums over the items, so that they do not depend on the layout.

        The names are the same for any items, also for none.
        """


@dataclass(frozen=True)
class StepLogprobs:
    """The log-probabilities of all M branches of a step, in the order of its items, from a pass without gradients.

    Each is the weighted sum over the branch's targets; 0 for a branch without any.
    """

    policy: Tensor  # [M] float64, on the host; with the dropout of the step
    reference: Tensor | None  # [M] float64, without dropout; None in a stage without a reference
    targets: Tensor  # [M] float64, the weight of each branch's targets
    facts: Mapping[str, Tensor]  # [M] float32 each


@runtime_checkable
class StepObjective(Protocol):
    """An objective that has to see the whole step before the loss of its first micro-batch (a sort, a mean over it)."""

    def step_items(self, items: Sequence[Pack]) -> Sequence[Pack]:
        """Returns the items of the pass without gradients, one for each item; for most the items themselves."""

    def prepared(self, items: Sequence[Pack], logprobs: StepLogprobs, *, training: bool) -> Sequence[Pack]:
        """The items of the pass with gradients, one for each: with more facts, or without branches that are done.

        logprobs: of the branches of `step_items`. training: whether running statistics take the step in.
        """


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int  # real tokens of this step; an image counts as one
    trained_tokens: int
    tokens_per_second: float
    memory_bytes: int  # peak so far: resident on CPU, allocated on CUDA
    extra: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool in an answer."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class MalformedCall:
    """A call that an answer means and that cannot be made; with its text, where it comes from an answer."""

    problem: str
    text: str = field(default="", compare=False)
