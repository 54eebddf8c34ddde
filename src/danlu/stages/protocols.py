"""Protocols of a stage's parts, which a run uses: a reader of its rows, and a builder of the models it trains.

`table.py` has a row for each stage; `run/train.py` looks the recipe's up and knows no more of it than this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TextIO, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from danlu.core.errors import RecipeError
from danlu.core.memory_parts import MemoryParts
from danlu.core.shard_box import BoxValue
from danlu.core.types import Batch, HeadObjective, Item, Objective, Outputs, Role, Sample, Task
from danlu.data.samples import Samples
from danlu.data.tokenizer_info import TokenizerInfo
from danlu.parallel.parallel_context import ParallelContext
from danlu.parallel.ranks import Ranks
from danlu.planning.product_peak import Peak
from danlu.recipe import Recipe
from danlu.training.data_loader import ItemSource, Stretch
from danlu.training.executor import AnyLearner
from danlu.training.recorders import Remark
from danlu.training.run_folder import Start
from danlu.training.state import Generate, Run

if TYPE_CHECKING:
    from danlu.data.column_store import ColumnType
    from danlu.data.prompts import Prompt, PromptOrder
    from danlu.recipe.roles import ModelSpec, PolicyWithoutAdapter
    from danlu.training.criterion import Criterion
    from danlu.training.trained_roles import TrainedRoles

Better = Literal["lower", "higher"]
"""The direction of a metric that is an improvement."""

LeastSeconds = Callable[[Sequence[int], int], float]
"""Maps (document lengths, targets) of a step to the seconds that it would take at the matrix-product speed of all
devices."""


HeldOut = Callable[[], Sequence[Item]]
"""The items of an evaluation, asked for each time."""


@dataclass(frozen=True)
class StoredRows:
    """The rows of a run as samples that can be asked for by number, and how items are made of them."""

    train: Samples
    held_out: Samples | None
    stage_data: Callable[[Samples, Samples | None], StageData]  # the same with these samples in their place
    laid_out: Callable[[Sample], Sample] = lambda sample: sample
    """A sample as it goes through a model: perhaps with copies of some tokens. Columns go with their tokens."""


@dataclass(frozen=True)
class Prompts:
    """The prompts that a policy answers while it is trained."""

    order: PromptOrder  # over those of an epoch
    train: Sequence[Prompt]
    held_out: Sequence[Prompt]


@dataclass(frozen=True)
class StageData:
    """The datasets of a stage."""

    source: ItemSource | None  # None where models make the items of `prompts`
    per_epoch: int | None  # items; None for a stream
    held_out: Sequence[Item] | None
    lines: Sequence[str]  # what became of the rows, for the console
    late_lines: Callable[[], Sequence[str]] = tuple  # the same, of what is known only when all was read
    close: Callable[[], None] = lambda: None
    tokenizer: TokenizerInfo | None = None  # of rows of text, unless they are streamed
    sources: tuple[str, ...] = ()  # names of the files or mixture parts with losses of their own
    empty: Item | None = None  # without targets, like the others, for a process that has none; None: the usual one
    stored: StoredRows | None = None  # None for what columns cannot be added to: a stream, images
    prompts: Prompts | None = None  # that the policy answers itself
    stretches: Sequence[Stretch] = ()  # of steps with other items, where they differ

    def items(self) -> tuple[ItemSource, HeldOut | None]:
        """The items of steps and of evaluations, where they are read and not made by a model."""
        held_out = self.held_out
        assert self.source is not None, "rows were read"
        return self.source, (None if not held_out else lambda: held_out)


class Reader(Protocol):
    """Reads the rows of a recipe; made of the recipe."""

    @property
    def items(self) -> str: ...  # what a batch is counted in: "packed sequences", "images"

    @property
    def counted(self) -> str: ...  # what a model reads, and the unit of its speed: "tokens", "images"

    def read(self, stream: TextIO) -> StageData: ...  # showing its progress on `stream`

    def amount(self, items: int) -> str: ...  # in words: "4 x 64 tokens", "128 images"

    def targets(self, items: int) -> int: ...  # at most, of so many


class PlacedModel(Protocol):
    """The model that a stage trains, on the processes of a run: its parameters, its weights, and its learner."""

    @property
    def model(self) -> nn.Module: ...  # the policy

    @property
    def parallel(self) -> ParallelContext: ...

    @property
    def name(self) -> str: ...  # for the console: "llama"

    @property
    def notes(self) -> Sequence[str]: ...  # for the console: what is worth knowing of how it was placed

    def parameters(self) -> list[tuple[str, Parameter]]:
        """The parameters of optimizer and average, by name: this process's shard of each."""

    def base(self) -> Mapping[str, Any] | None: ...  # what tells the base of a trained adapter from another; JSON

    def weights(self) -> dict[str, Tensor]:
        """The model's tensors in a checkpoint, by name, live: this process's shard of each."""

    def learner(self, micro: int, sources: tuple[str, ...] = ()) -> AnyLearner: ...

    def check_weights(self) -> None:
        """Raises a DanluError for data that the weights of the first step, which are loaded now, cannot be
        trained on."""

    def generate(self) -> Generate | None: ...  # texts, where the recipe asks for samples


class StepBudget(Protocol):
    """The memory that a step of a placed model has taken, and the time that it takes at the least."""

    def automatic_micro(self) -> int | None: ...  # items of `batch.micro: auto`; None: what the plan of the step says

    def peak(self) -> Peak | None: ...  # what utilisation is measured against; None where that says nothing

    def least_seconds(self) -> LeastSeconds | None: ...

    def memory(self, run: Run) -> MemoryParts: ...  # of a run that has counted its activations


class Exporter(Protocol):
    """Writes the result of a run."""

    def write(self, target: Path, value: BoxValue | None, *, writes: bool) -> None:
        """Writes the result; `value` and `writes` as in `models.saving.save`."""


@dataclass(frozen=True)
class PlacedStage:
    """The model of a stage on the processes of a run, the budget of its steps, and the exporter of its result."""

    policy: PlacedModel
    budget: StepBudget
    exporter: Exporter


class ModelBuilder(Protocol):
    """Builds and places the models of a stage; made of the recipe and the stage."""

    def check(self, start: Start | None) -> None:
        """Raises a DanluError for faults that show before any data is read, the stage's objective and models included.

        start: as in `place`.
        """

    def with_columns(self, ranks: Ranks, device: torch.device, stage_data: StageData, stream: TextIO) -> StageData:
        """Returns the rows with the columns of the stage, computed where they are not stored, showing the progress on
        `stream`.

        Every process calls it, before models are placed: so the models that compute columns are alone in memory.
        """

    def place(self, ranks: Ranks, device: torch.device, start: Start | None, stage_data: StageData) -> PlacedStage:
        """The models on the processes of a layout; `start` is the checkpoint that will be loaded into them."""

    def unplaced(self, checkpoint: Path) -> tuple[PlacedModel, Exporter]:
        """The model on the CPU, to load a checkpoint into, and its exporter."""


@dataclass(frozen=True)
class FromColumns:
    """A role without a model: its outputs were computed before training, and are in the columns of the rows."""

    outputs: Callable[[Batch], Outputs]


RoleSpec: TypeAlias = "ModelSpec | PolicyWithoutAdapter | FromColumns"


def frozen_models(roles: Mapping[Role, RoleSpec]) -> dict[Role, ModelSpec]:
    """The frozen models of their own among the models of other roles, by role."""
    if not roles:  # then nothing more is imported
        return {}
    from danlu.recipe.roles import ModelSpec

    return {role: spec for role, spec in roles.items() if isinstance(spec, ModelSpec)}


@dataclass(frozen=True)
class ColumnSpec:
    """Columns of the rows: values of each token that a model says once, before training, and that are kept on disk.

    They are of the tokens that carry weight, and of all in branches that have a parent; 0 for others.
    """

    name: str  # leads the name of their folder: "reference"
    model: ModelSpec | None  # None: the policy as the run starts it, with its new adapter
    types: Mapping[str, ColumnType]  # by the columns' names
    compute: Callable[[Outputs, Batch], Mapping[str, Tensor]]  # [N, ...] each, also of a batch without targets
    identity: Mapping[str, Any] = field(default_factory=dict)
    """Inputs of the values apart from model, rows and numerics; JSON."""


def no_columns(recipe: Recipe) -> Sequence[ColumnSpec]:
    """The columns of a stage that computes none before training."""
    return ()


def read_items(
    placed: PlacedModel, stage_data: StageData, learner: AnyLearner, folder: Path
) -> tuple[ItemSource, HeldOut | None]:
    """The items of a stage that trains on the rows that were read."""
    return stage_data.items()


def policy_alone(recipe: Recipe) -> Mapping[Role, RoleSpec]:
    """The other models of a stage that has none."""
    return {}


@dataclass(frozen=True)
class Stage:
    """A kind of training: the reader of its rows, its models, and the objective over their outputs."""

    reader: Callable[[Recipe], Reader]
    builder: Callable[[Recipe, Stage], ModelBuilder]  # of the kind of model that the stage trains
    objective: Callable[[Recipe], Objective]
    # Models other than the policy, by role; none is trained.
    models: Callable[[Recipe], Mapping[Role, RoleSpec]] = policy_alone
    evaluation: Callable[[Recipe, Objective], Objective] = lambda recipe, objective: objective
    """Makes the objective that judges held-out items, from the recipe and the training objective."""
    task: Callable[[Recipe], Task] = lambda recipe: "causal-lm"
    """The task of the result: one that classifies has the head of the objective, and none over the vocabulary."""
    columns: Callable[[Recipe], Sequence[ColumnSpec]] = no_columns  # of the rows, computed before training
    items: Callable[[Any, StageData, AnyLearner, Path], tuple[ItemSource, HeldOut | None]] = read_items
    """Maps (placed model, stage_data, learner, folder of the run) to the items of steps and those of evaluations: the
    rows that were read, or items that the placed model makes of them."""
    objective_rate: Callable[[Recipe], float] = lambda recipe: 1.0
    """The factor on the learning rate for the objective's own parameters and a value model, which then are an optimizer
    group."""
    trained_roles: Callable[[Recipe], TrainedRoles | None] = lambda recipe: None
    """Maps each trained parameter to its role, where another model than the policy is trained too."""
    metrics: Callable[[Recipe], Mapping[str, Better]] = lambda recipe: {"loss": "lower"}
    """Metrics of an evaluation that a run can be judged by, by name: whether lower or higher is better."""
    remarks: Callable[[Recipe], Remark] | None = None
    """Makes warnings of the metrics of logged steps."""
    lead: Callable[[Mapping[str, float]], str] | None = None
    """Formats numbers of a logged step that the console shows before its loss."""

    def criterion(self, recipe: Recipe) -> Criterion:
        """The metric that judges the recipe's evaluations. Raises RecipeError for one that the stage does not
        report."""
        from danlu.training.criterion import Criterion

        metric, metrics = recipe.evaluation.metric, self.metrics(recipe)
        if metric not in metrics:
            known = ", ".join(f"{name} ({better} is better)" for name, better in metrics.items())
            raise RecipeError(
                f"evaluation.metric: {metric!r} is nothing that evaluations of this recipe report. They report {known}"
            )
        return Criterion(metric, metrics[metric] == "higher")

    def objectives(
        self, recipe: Recipe, offered: frozenset[str], model: str, *, offered_by_head: frozenset[str] = frozenset()
    ) -> tuple[Objective, Objective]:
        """Returns (objective, evaluation); first values of their parameters follow from the seed, so they are alike
        anywhere.

        offered: the methods of `Outputs` that a model has; offered_by_head: those that it has with a head of the
        objective; model: its name in messages.
        Raises RecipeError if an objective needs an output that is not offered.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            objective = self.objective(recipe)
            evaluation = self.evaluation(recipe, objective)
        if isinstance(objective, HeadObjective):
            offered |= offered_by_head
        if lacking := sorted((objective.needs | evaluation.needs) - offered):
            raise RecipeError(
                f"stage {recipe.stage}: its objective needs {', '.join(lacking)}, which {model} does not say; it says "
                f"{', '.join(sorted(offered))}"
            )
        return objective, evaluation
