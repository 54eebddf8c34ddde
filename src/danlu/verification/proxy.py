"""The interface of a verification to the kind of model that a recipe trains. All else is the same for all kinds.

`decoder_proxy.py` answers for decoders on packs of tokens, `classifier_proxy.py` for classifiers of images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from danlu.assembly.optimizer import optimizer_of
from danlu.core.shard_box import BoxValue
from danlu.core.types import Item
from danlu.models.layer_spec import Experts, LayerSpec
from danlu.numerics.loss_scaling import LossScaler
from danlu.optim.ema import Ema
from danlu.parallel.collective_traffic import CollectiveTraffic
from danlu.parallel.comm import ALONE, new_group
from danlu.parallel.ranks import Ranks
from danlu.recipe import Recipe
from danlu.recipe.sections import Schedule
from danlu.recipe.sections import Watch as WatchSection
from danlu.stages.protocols import PlacedModel
from danlu.stages.table import STAGES
from danlu.training.checkpoints.store import CheckpointStore
from danlu.training.data_loader import DataLoader
from danlu.training.executor import AnyLearner
from danlu.training.signals import StopRequest
from danlu.training.state import Cadence, Run
from danlu.training.watch import Watch
from danlu.verification.data import ItemList

MicroBatches = Sequence[Sequence[tuple[int, Any]]]
"""The micro-batches of one process in a step: for each item its number in the step, and the item."""
_FP16_SCALE = 1024.0  # at first; small enough that none of the few steps overflows and is skipped
_CONSTANT = Schedule(kind="constant", warmup=0)  # a warm-up would make the first steps too small to see


class Proxy(Protocol):
    """Facts of the shrunken model that all processes of a verification know, in addition to the recipe; pickled to each
    of them."""

    @property
    def has_tied_head(self) -> bool: ...  # its head is its embedding

    @property
    def has_norms(self) -> bool: ...  # it has parameters of one dimension that tensor parallelism does not cut

    @property
    def has_files(self) -> bool: ...  # a config.json can say its model, so that a result can be written

    @property
    def layer_kinds(self) -> Sequence[LayerSpec]: ...  # the layers that differ from each other; none of no decoder

    def trains_experts(self, recipe: Recipe) -> bool:
        """Whether experts have trained parameters: their own, or those of an adapter that sits on them."""
        ...

    def place(self, recipe: Recipe, ranks: Ranks, device: torch.device, resumed: Path | None) -> PlacedModel:
        """The model on the processes of a layout; resumed: a checkpoint that will be loaded into it."""
        ...

    def write(self, placed: Any, target: Path, value: BoxValue | None, *, writes: bool) -> None:
        """Writes the weights of the model that `place` has placed as a run ends with them, without a tokenizer.

        value, writes: as `Exporter.write` has them.
        """
        ...

    def expected_traffic(self, training: ProxyTraining, micro_batches: MicroBatches) -> list[CollectiveTraffic]:
        """Predicts the traffic of this process in a step of these micro-batches, by the formulas of
        `planning.traffic`."""
        ...


def has_experts(proxy: Proxy) -> bool:
    """Whether any layer has experts."""
    return any(isinstance(kind.feed, Experts) for kind in proxy.layer_kinds)


def norms_all_heads(proxy: Proxy) -> bool:
    """Whether any layer norms all of its queries, and all of its keys, together."""
    return any(getattr(kind.mixer, "qk_norm", None) == "full" for kind in proxy.layer_kinds)


@dataclass(frozen=True)
class PreparedProxy:
    """A recipe made ready to be verified: shrunken, unless it was asked for as it is."""

    recipe: Recipe
    proxy: Proxy
    items: Sequence[Item]  # of all steps, then those held out
    parameters: int  # numbers in the model
    item_name: str  # "packed sequences", "images"
    model_summary: str
    data_summary: str  # where the items are from
    notes: Sequence[str] = ()  # what is not as the recipe says, beside sizes
    stages: Sequence[int] = ()  # keys of the stages of lengths, in order, one after the other at each step


class ProxyTraining:
    """A recipe's model on the processes of a layout, ready for steps; no data, and no folder but for checkpoints."""

    def __init__(
        self,
        recipe: Recipe,
        proxy: Proxy,
        ranks: Ranks,
        device: torch.device,
        *,
        micro: int,
        resumed: Path | None = None,
    ) -> None:
        """Places the model on the processes of `ranks`; all of them call this together.

        Args:
            micro: items in a micro-batch.
            resumed: a checkpoint that will be loaded, so that memory for weights is enough.
        """
        self.recipe, self.proxy, self.ranks = recipe, proxy, ranks
        self.placed = proxy.place(recipe, ranks, device, resumed)
        self.learner: AnyLearner = self.placed.learner(micro)

    def run(self, steps: Sequence[Sequence[Item]], folder: Path | None = None) -> Run:
        """A `Run` over the items of `steps`, which all have the same number of them, at a constant learning rate.

        folder: where its checkpoints go, if any. No metrics are written and no signals are handled.
        """
        parameters = self.placed.parameters()
        checkpoint_group = (
            ALONE
            if self.ranks.alone or folder is None
            else new_group("checkpoint", self.ranks.world.ranks, backend="gloo")
        )
        return Run(
            learner=self.learner,
            optimizer=optimizer_of(parameters, self.recipe, self.learner.device),
            roles=STAGES[self.recipe.stage].trained_roles(self.recipe),
            schedule=_CONSTANT,
            clip=self.recipe.gradient_clipping,
            data_loader=DataLoader(
                ItemList([item for step in steps for item in step]), per_step=len(steps[0]), total=None
            ),
            cadence=Cadence(total=len(steps), log=1, checkpoint=len(steps), evaluation=None),
            watch=Watch(WatchSection()),
            store=CheckpointStore(folder or Path("no checkpoints"), background=False, group=checkpoint_group),
            metrics=None,
            recorders=(),
            stop_request=StopRequest(),
            scaler=LossScaler(_FP16_SCALE) if self.recipe.precision == "fp16" else None,
            ema=None if self.recipe.ema is None else Ema(parameters, self.recipe.ema.decay),
        )
