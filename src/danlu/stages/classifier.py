"""Stage `classify`: images with labels, and LeNet-5 as it is placed, learns and is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO, cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from danlu.core.errors import RecipeError, TrainingError
from danlu.core.memory_parts import MemoryParts
from danlu.core.types import (
    Loss,
    Objective,
    Outputs,
    Role,
    TargetLosses,
    TokenLogprobs,
    Totals,
)
from danlu.data.images import Image, ImageBatch, ImageSampler, collate_images, held_out, read_images
from danlu.data.sources import reported_sources
from danlu.models import lenet
from danlu.models.hf_folder import resolve_folder
from danlu.numerics.dtypes import DTYPES
from danlu.objectives.cross_entropy import CrossEntropy, logits_cross_entropy
from danlu.objectives.gradient_scale import scale_gradient
from danlu.parallel import data
from danlu.parallel.batch_sharding import shard_in_order
from danlu.parallel.local_parameter import local_parameters_of
from danlu.parallel.parallel_context import ParallelContext
from danlu.parallel.ranks import Ranks
from danlu.recipe import Recipe
from danlu.recipe.sections import Parallel
from danlu.stages.protocols import LeastSeconds, PlacedStage, Stage, StageData
from danlu.training.diagnosis import non_finite_on_any
from danlu.training.learner import Activation, MicroStep
from danlu.training.memory_parts import Activations
from danlu.training.run_folder import Start
from danlu.training.state import Generate, Run

# Images that go through the model at once, where the recipe leaves it open: 10 MB of activations on any device.
MAX_IMAGES_PER_MICRO_BATCH = 512
OFFERED = frozenset({"cross_entropy", "logprobs"})


@dataclass(frozen=True)
class ImageReader:
    """A `Reader`: images of the size that LeNet-5 takes."""

    recipe: Recipe
    items: str = "images"
    counted: str = "images"

    def read(self, stream: TextIO) -> StageData:
        """All images into memory; nothing is shown, for that takes less than a second."""
        section, seed = self.recipe.data, self.recipe.seed
        train = read_images(section.train, side=lenet.SIDE, classes=lenet.CLASSES)
        lines = [f"data: {len(train):,} images"]
        if section.eval is None:
            evaluation = None
        elif isinstance(section.eval, list):
            evaluation = read_images(section.eval, side=lenet.SIDE, classes=lenet.CLASSES)
            lines.append(f"evaluation data: {len(evaluation):,} images")
        else:
            train, evaluation = held_out(train, section.eval, seed)
            lines.append(f"evaluation data: {len(evaluation):,} of these images are held out")
        images = ImageSampler(train, seed)
        kept = None if evaluation is None else [evaluation.image(number) for number in range(len(evaluation))]
        return StageData(images, images.per_epoch, kept, lines, sources=reported_sources(section))

    def amount(self, items: int) -> str:
        """The number of images, as text."""
        return f"{items} images"

    def targets(self, items: int) -> int:
        """One label an image."""
        return items


@dataclass(frozen=True)
class ClassifierBuilder:
    """A `ModelBuilder`: LeNet-5 on images."""

    recipe: Recipe
    stage: Stage

    def check(self, start: Start | None) -> None:
        """Apart from the recipe's rules only the stage and the model to begin from can be wrong, read in a moment."""
        self._objectives()
        if self.recipe.model.path is not None and start is None:
            lenet.load(resolve_folder(self.recipe.model.path))

    def with_columns(self, ranks: Ranks, device: torch.device, stage_data: StageData, stream: TextIO) -> StageData:
        """The same images: nothing is asked about them before training."""
        return stage_data

    def place(
        self, ranks: Ranks, device: torch.device, start: Start | None, stage_data: StageData | None = None
    ) -> PlacedStage:
        """The model, which is small enough to be made whole on each process and only then sharded."""
        policy = self.place_policy(ranks, device, start)
        return PlacedStage(policy, ClassifierBudget(policy), ClassifierExporter(policy))

    def place_policy(self, ranks: Ranks, device: torch.device, start: Start | None) -> PlacedClassifier:
        """The model on the processes of a layout."""
        if self.recipe.model.path is None:
            model = lenet.LeNet5().to(device)
            if start is None:
                lenet.initialize(model, self.recipe.seed)
        else:
            model = lenet.load(resolve_folder(self.recipe.model.path), device=device)
        return self._placed(model, parallel_context_of(model, self.recipe.parallel, ranks), device)

    def unplaced(self, checkpoint: Path) -> tuple[PlacedClassifier, ClassifierExporter]:
        """A model on the CPU with memory for the weights of a checkpoint, and its exporter."""
        policy = self._placed(lenet.LeNet5(), ParallelContext(), torch.device("cpu"))
        return policy, ClassifierExporter(policy)

    def _placed(self, model: lenet.LeNet5, parallel: ParallelContext, device: torch.device) -> PlacedClassifier:
        return PlacedClassifier(self.recipe, model, parallel, device, *self._objectives())

    def _objectives(self) -> tuple[Objective, Objective]:
        """Raises RecipeError for a stage with more than one model, or with parameters in its objective."""
        objectives = self.stage.objectives(self.recipe, OFFERED, "a classifier of images")
        if self.stage.models(self.recipe) or any(isinstance(objective, nn.Module) for objective in objectives):
            raise RecipeError(
                f"stage {self.recipe.stage}: a classifier of images trains alone, without frozen models or "
                "parameters in its objective"
            )
        return objectives


def parallel_context_of(model: nn.Module, section: Parallel, ranks: Ranks) -> ParallelContext:
    """The part of this process in each step; the model's parameters are sharded where the recipe says so."""
    if ranks.alone:
        return ParallelContext(ranks)
    sharded = section.shard != "none" and ranks.data.size > 1
    if sharded:
        # No type to gather in: as on one process, the model itself makes float32 weights narrow.
        data.Sharder(model, ranks, section, gathered=None, whole=()).rest()
    parallel = ParallelContext(ranks, local_parameters_of(model, ranks, {}))
    return data.sharded_step(parallel, model, section) if sharded else parallel


@dataclass(frozen=True)
class PlacedClassifier:
    """A `PlacedModel`: a classifier of images."""

    recipe: Recipe
    model: lenet.LeNet5
    parallel: ParallelContext
    device: torch.device
    objective: Objective
    evaluation: Objective
    name: str = "LeNet-5"
    notes: Sequence[str] = ()

    def parameters(self) -> list[tuple[str, Parameter]]:
        """All parameters of the model by name: this process's shard of each."""
        local = self.parallel.local_parameters
        return [(name, local[name].local if local else parameter) for name, parameter in self.model.named_parameters()]

    def base(self) -> None:
        """None: all of a classifier is trained."""

    def weights(self) -> dict[str, Tensor]:
        """All of the model by name, live."""
        return {name: parameter.detach() for name, parameter in self.parameters()}

    def learner(self, micro: int, sources: tuple[str, ...] = ()) -> ClassifierLearner:
        """The placed model with the objective."""
        recipe = self.recipe
        parallel = data.replicated_step(self.parallel, recipe.parallel)
        counted = Activations.beside([*self.model.parameters(), *self.model.buffers()])
        dtype = DTYPES[recipe.activations]
        return ClassifierLearner(
            self.model, self.device, dtype, micro, self.objective, self.evaluation, parallel, counted, sources
        )

    def check_weights(self) -> None:
        """Nothing: images are not drawn from a model."""

    def generate(self) -> Generate | None:
        """None: it writes no texts."""
        return None


@dataclass(frozen=True)
class ClassifierBudget:
    """The `StepBudget` of a classifier of images."""

    policy: PlacedClassifier

    def automatic_micro(self) -> int:
        """The number of images in a micro-batch where the recipe leaves it open."""
        return MAX_IMAGES_PER_MICRO_BATCH

    def peak(self) -> None:
        """None: without utilisation there is nothing to divide by."""

    def least_seconds(self) -> LeastSeconds | None:
        """None: its products are too small for the machine's peak to say anything."""
        return None

    def memory(self, run: Run) -> MemoryParts:
        """The parts of the run's memory, as they were counted in training."""
        counted = run.learner.activations
        assert counted is not None, "a classifier counts them"
        return MemoryParts(
            weights=sum(parameter.nbytes for _, parameter in self.policy.parameters()),
            adapter=0,
            gradients=run.optimizer.gradient_bytes(),
            optimizer=run.optimizer.resident_state_bytes(),
            average=0 if run.ema is None else sum(tensor.nbytes for tensor in run.ema.state_tensors().values()),
            activations=counted.peak_bytes,
            logits=0,  # autograd keeps them, so they are among the activations
        )


@dataclass(frozen=True)
class ClassifierExporter:
    """The `Exporter` of a classifier of images."""

    policy: PlacedClassifier

    def write(self, target: Path, value: Callable[[str], Tensor | None] | None, *, writes: bool) -> None:
        """The model's folder; value and writes as in `models.saving.save`."""
        dtype = torch.bfloat16 if self.policy.recipe.activations == "bf16" else torch.float32
        lenet.save(self.policy.model, target, dtype=dtype, value=value, writes=writes)


@dataclass(frozen=True)
class ClassifierOutputs:
    """The likelihood of each label: of `Outputs` the methods that are `OFFERED`, which are all that is asked for."""

    logits: Tensor  # [N, C] float32
    batch: ImageBatch

    def cross_entropy(
        self, *, label_smoothing: float = 0.0, z_loss: float = 0.0, by_target: bool = False
    ) -> TargetLosses:
        """The cross-entropy of the labels."""
        return logits_cross_entropy(
            self.logits, self.batch.targets, self.batch.weights, label_smoothing=label_smoothing, z_loss=z_loss
        )

    def logprobs(
        self,
        *,
        temperature: float = 1.0,
        support: Tensor | None = None,
        entropy: bool = False,
        collision: bool = False,
    ) -> TokenLogprobs:
        """Computes the log-probability [N] of each label; on request also the entropy and collision of the labels'
        distribution, [N] each."""
        assert support is None, "labels are not sampled, so nothing confines them"
        logprobs = (self.logits / temperature).log_softmax(-1)  # [N, C]
        return TokenLogprobs(
            logprobs.gather(-1, self.batch.targets[:, None]).squeeze(-1),
            -(logprobs.exp() * logprobs).sum(-1) if entropy else None,
            (2 * logprobs.detach()).logsumexp(-1) if collision else None,
        )


@dataclass(frozen=True)
class ClassifierLearner:
    """The `Learner` of a classifier of images."""

    model: lenet.LeNet5
    device: torch.device
    dtype: torch.dtype  # of activations; parameters are float32
    micro: int  # images in a micro-batch
    objective: Objective = field(default_factory=CrossEntropy)
    evaluation: Objective = field(default_factory=lambda: CrossEntropy(reports_nll=True))
    parallel: ParallelContext = field(default_factory=ParallelContext)
    activations: Activations | None = None
    source_names: tuple[str, ...] = ()  # of the images, for the loss by source

    def weights(self) -> dict[str, Tensor]:
        """All parameters of the model: this process's shard of each."""
        return self.parallel.local_weights({name: each.detach() for name, each in self.model.named_parameters()})

    def totals(self, items: Sequence[Image]) -> Totals:
        """The totals of a step of these images."""
        return Totals.of(items)

    def micro_batches(self, items: Sequence[Image]) -> Sequence[Sequence[int]]:
        """A contiguous share of the images, `micro` in each micro-batch."""
        return shard_in_order(items, self.parallel, self.micro)

    def prepare(
        self, items: Sequence[Image], micro_batches: Sequence[Sequence[int]], step: int | None
    ) -> Sequence[Image]:
        """The images as they are: the likelihood of one asks nothing of the others."""
        return items

    def end_step(self) -> Mapping[str, float]:
        """Returns no metrics: nothing is counted."""
        return {}

    def updated(self, step: int) -> None:
        """Nothing depends on the weights but the model."""

    def collate(self, items: Sequence[Image]) -> ImageBatch:
        """The micro-batch of `items` on the device."""
        return collate_images(items, self.device, side=lenet.SIDE, source_names=self.source_names)

    def at(self, micro_step: MicroStep[ImageBatch]) -> AbstractContextManager[None]:
        """LeNet-5 has no dropout."""
        return nullcontext()

    def forward(self, chunk: int, micro_step: MicroStep[ImageBatch], x: Activation | None) -> Loss:
        """The loss of a micro-batch: all of LeNet-5 is one chunk."""
        if micro_step.step is None:
            return self.assess(micro_step.batch, micro_step.totals)
        return self.losses(micro_step.batch, micro_step.totals, micro_step.gradient_scale)

    @property
    def trained_activations(self) -> int:
        """One, were it in several chunks."""
        return 1

    def empty_activation(self, micro_step: MicroStep[ImageBatch]) -> Activation:
        """Nothing passes between chunks of a model in one chunk."""
        raise AssertionError("LeNet-5 is one chunk")

    def losses(self, batch: ImageBatch, totals: Totals, gradient_scale: float = 1.0) -> Loss:
        """The objective's loss of a micro-batch."""
        loss = self.objective(self._outputs(batch), batch, totals)
        return replace(loss, total=scale_gradient(loss.total, gradient_scale))

    def assess(self, batch: ImageBatch, totals: Totals) -> Loss:
        """The evaluation's loss of a micro-batch, without gradients."""
        with torch.no_grad():
            return self.evaluation(self._outputs(batch), batch, totals)

    def _outputs(self, batch: ImageBatch) -> Mapping[Role, Outputs]:
        return {"policy": cast(Outputs, ClassifierOutputs(self.model(batch.pixels, self.dtype), batch))}

    def explain(self, batch: ImageBatch, step: int) -> TrainingError:
        """Explains why the loss of `batch` is not finite: names weights that are not finite, or the images without
        finite logits."""
        if names := non_finite_on_any(self.parallel.ranks.world, self.weights().items()):
            return TrainingError(
                f"step {step}: the loss is not finite because a weight is not: {', '.join(names[:3])}. The run stopped "
                "before the update. Go back to an earlier checkpoint with a lower optimizer.learning_rate."
            )
        with torch.no_grad():
            finite = self.model(batch.pixels, self.dtype).isfinite().all(-1)  # [N]
        rows = [batch.rows[number] for number in (~finite).nonzero().flatten().tolist()] or list(batch.rows)
        return TrainingError(
            f"step {step}: the loss is not finite, for {', '.join(rows[:3])}. The weights themselves are finite, and "
            "the run stopped before the update. Lower optimizer.learning_rate, or use precision: fp32."
        )
