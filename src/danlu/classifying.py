"""Classifiers of images as the task of a run: idx files, LeNet-5, and a folder with its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from danlu.data.images import Image, ImageBatch, ImageSampler, collate_images, held_out, read_images
from danlu.errors import TrainingError
from danlu.models import lenet
from danlu.models.hf_folder import resolve_folder
from danlu.objectives.classification import cross_entropy
from danlu.objectives.crossentropy import CrossEntropy
from danlu.optim.build import Optimizers
from danlu.optim.clip import non_finite
from danlu.parallel import data
from danlu.parallel.local_parameter import local_parameters_of
from danlu.parallel.ranks import Ranks
from danlu.parallel.step_parallel import StepParallel
from danlu.plan.precision import DTYPES
from danlu.recipe import Recipe
from danlu.recipe.sections import LossOptions
from danlu.tasks import LeastSeconds, Material
from danlu.train.memory_parts import Activations, MemoryParts
from danlu.train.run_folder import Start
from danlu.train.state import Generate, Run
from danlu.train.step import Losses

# Images that go through the model at once, where the recipe leaves it open: 10 MB of activations on any device.
MOST_IMAGES = 512


@dataclass(frozen=True)
class Classifying:
    """A `Task`: LeNet-5 on images."""

    recipe: Recipe
    items: str = "images"
    counted: str = "images"

    def check(self, start: Start | None) -> None:
        """Apart from the recipe's rules only the model to begin from can be wrong; it is read in a moment."""
        if self.recipe.model.path is not None and start is None:
            lenet.load(resolve_folder(self.recipe.model.path))

    def read(self, stream: TextIO) -> Material:
        section, seed = self.recipe.data, self.recipe.seed
        train = read_images(section.train, side=lenet.SIDE, classes=lenet.CLASSES)
        lines = [f"data: {len(train):,} images"]
        if section.eval is None:
            judged = None
        elif isinstance(section.eval, list):
            judged = read_images(section.eval, side=lenet.SIDE, classes=lenet.CLASSES)
            lines.append(f"evaluation data: {len(judged):,} images")
        else:
            train, judged = held_out(train, section.eval, seed)
            lines.append(f"evaluation data: {len(judged):,} of these images are held out")
        images = ImageSampler(train, seed)
        kept = None if judged is None else [judged.image(place) for place in range(len(judged))]
        return Material(images, images.per_epoch, kept, lines)

    def place(self, ranks: Ranks, device: torch.device, start: Start | None) -> PlacedClassifier:
        """A model this small is made whole on each process, and only then sharded."""
        if self.recipe.model.path is None:
            model = lenet.LeNet5().to(device)
            if start is None:
                lenet.initialize(model, self.recipe.seed)
        else:
            model = lenet.load(resolve_folder(self.recipe.model.path), device=device)
        return PlacedClassifier(self.recipe, model, step_parallel_of(model, self.recipe, ranks), device)

    def unplaced(self, checkpoint: Path) -> PlacedClassifier:
        return PlacedClassifier(self.recipe, lenet.LeNet5(), StepParallel(), torch.device("cpu"))

    def amount(self, items: int) -> str:
        return f"{items} images"

    def targets(self, items: int) -> int:
        return items


def step_parallel_of(model: nn.Module, recipe: Recipe, ranks: Ranks) -> StepParallel:
    """The part of this process in each step; the model's parameters are sharded where the recipe says so."""
    section = recipe.parallel
    if ranks.alone:
        return StepParallel(ranks)
    sharded = section.shard != "none" and ranks.data.size > 1
    if sharded:
        # No type to gather in: as on one process, the model itself makes float32 weights narrow.
        data.Sharder(model, ranks, section, gathered=None, whole=()).rest()
    parallel = StepParallel(ranks, local_parameters_of(model, ranks, {}))
    return data.sharded_step(parallel, model, section) if sharded else parallel


@dataclass(frozen=True)
class PlacedClassifier:
    """A `PlacedModel`: a classifier of images."""

    recipe: Recipe
    model: lenet.LeNet5
    parallel: StepParallel
    device: torch.device
    name: str = "LeNet-5"
    notes: Sequence[str] = ()

    def parameters(self) -> list[tuple[str, Parameter]]:
        held = self.parallel.local_parameters
        return [(name, held[name].local if held else one) for name, one in self.model.named_parameters()]

    def base(self) -> None:
        """All of a classifier is trained."""

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.parameters()}

    def micro(self, optimizer: Optimizers, most: int) -> int:
        asked = self.recipe.batch.micro
        return min(MOST_IMAGES if asked == "auto" else asked, most)

    def learner(self, micro: int) -> Classifier:
        """Under DDP where every data rank holds all of the model."""
        parallel, recipe = self.parallel, self.recipe
        counted = Activations.beside([*self.model.parameters(), *self.model.buffers()])
        classifier = Classifier(
            self.model, self.device, DTYPES[recipe.precision], micro, recipe.loss, parallel, activations=counted
        )
        if parallel.ranks.data.alone or recipe.parallel.shard != "none":
            return classifier
        wrapped = data.replicate(
            Losses(self.model, partial(weighted_loss, classifier)), parallel.ranks, recipe.parallel
        )
        data.settle(wrapped, classifier.collate([]), classifier.loss, 1.0)
        return replace(classifier, through=wrapped, parallel=data.replicated_step(parallel, wrapped))

    def generate(self) -> Generate | None:
        return None

    def peak(self) -> None:
        """Without utilisation there is nothing to divide by."""

    def least_seconds(self) -> LeastSeconds | None:
        """Its products are too small for the machine's peak to say anything."""
        return None

    def expected(self, run: Run) -> None:
        """It is too small for its memory to be a question."""

    def memory(self, run: Run) -> MemoryParts:
        counted = run.compute.activations
        assert counted is not None, "a classifier counts them"
        return MemoryParts(
            weights=sum(parameter.nbytes for _, parameter in self.parameters()),
            adapter=0,
            gradients=run.optimizer.gradient_bytes(),
            optimizer=run.optimizer.resident_state_bytes(),
            average=0 if run.ema is None else sum(one.nbytes for one in run.ema.state_tensors().values()),
            activations=counted.most,
            logits=0,  # autograd keeps them, so they are among the activations
        )

    def write(self, target: Path, value: Callable[[str], Tensor | None] | None, *, writes: bool) -> None:
        dtype = torch.bfloat16 if self.recipe.precision == "bf16" else torch.float32
        lenet.save(self.model, target, dtype=dtype, value=value, writes=writes)


@dataclass(frozen=True)
class Classifier:
    """A classifier as it learns: the `Learner` of images."""

    model: lenet.LeNet5
    device: torch.device
    dtype: torch.dtype  # of activations; parameters are float32
    micro: int  # images in a micro-batch
    loss: LossOptions
    parallel: StepParallel
    activations: Activations | None = None
    through: Callable[..., CrossEntropy] | None = None  # DDP around `Losses`

    def weights(self) -> dict[str, Tensor]:
        """All of the model: as much of each parameter as this process holds."""
        held = self.parallel.local_parameters
        return {name: (held[name].local if held else one).detach() for name, one in self.model.named_parameters()}

    def collate(self, packs: Sequence[Image]) -> ImageBatch:
        return collate_images(packs, self.device, side=lenet.SIDE)

    def set_dropout(self, step: int | None, packs: Sequence[tuple[int, Image]] = ()) -> None:
        """LeNet-5 has no dropout."""

    def losses(self, batch: ImageBatch, loss: LossOptions, gradient_scale: float = 1.0) -> CrossEntropy:
        """The weighted sum of losses of a micro-batch."""
        if self.through is not None and torch.is_grad_enabled():
            return self.through(batch, loss, gradient_scale)
        return weighted_loss(self, batch, loss, gradient_scale)

    def explain(self, batch: ImageBatch, step: int) -> TrainingError:
        """Why the loss of `batch` is not finite: a weight that is not, or the images of which it is not."""
        # Each process has its part of the weights.
        by_rank = self.parallel.ranks.world.all_gather_objects(non_finite(self.weights().items()))
        if names := [name for names in by_rank for name in names]:
            return TrainingError(
                f"step {step}: the loss is not finite because a weight is not: {', '.join(names[:3])}. The run stopped "
                "before the update. Go back to an earlier checkpoint with a lower optimizer.learning_rate."
            )
        with torch.no_grad():
            bad = (~self.model(batch.pixels, self.dtype).isfinite().all(-1)).nonzero().flatten().tolist()
        rows = [batch.rows[place] for place in bad] or list(batch.rows)
        return TrainingError(
            f"step {step}: the loss is not finite, for {', '.join(rows[:3])}. The weights themselves are finite, and "
            "the run stopped before the update. Lower optimizer.learning_rate, or use precision: fp32."
        )


def weighted_loss(classifier: Classifier, batch: ImageBatch, loss: LossOptions, gradient_scale: float) -> CrossEntropy:
    return cross_entropy(
        classifier.model(batch.pixels, classifier.dtype),
        batch.targets,
        batch.weights,
        label_smoothing=loss.label_smoothing,
        z_loss=loss.z_loss,
        gradient_scale=gradient_scale,
    )
