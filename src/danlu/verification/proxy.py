"""The small model of a verification as all of its processes have it, and its training on the processes of a layout.

`decoder_proxy.py` prepares decoders and packs of tokens, `classifier_proxy.py` classifiers and images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from danlu.adapters.peft_folder import write_adapter
from danlu.assembly.optimizer import optimizer_of
from danlu.assembly.parallelize import place, subject_of
from danlu.core.layer_types import TRAINED
from danlu.core.shard_box import BoxValue
from danlu.core.stop_signals import StopRequest
from danlu.core.types import Item, Pack
from danlu.data.batch import EMPTY_PACK
from danlu.models.config import ModelConfig
from danlu.models.layer_spec import LayerSpec
from danlu.models.rope_config import Rope
from danlu.models.saving import save
from danlu.numerics.loss_scaling import LossScaler
from danlu.optim.ema import Ema
from danlu.parallel.comm import ALONE, new_group
from danlu.parallel.ranks import Ranks
from danlu.recipe import Recipe
from danlu.recipe.sections import Model, Schedule
from danlu.recipe.sections import Watch as WatchSection
from danlu.stages.builder import placed_decoder
from danlu.stages.classifier import ClassifierBuilder, ClassifierExporter, PlacedClassifier
from danlu.stages.placed import PlacedDecoder
from danlu.stages.protocols import PlacedModel
from danlu.stages.table import STAGES
from danlu.training.checkpoints.loading import read_group
from danlu.training.checkpoints.store import CheckpointStore
from danlu.training.data_loader import DataLoader
from danlu.training.executor import AnyLearner
from danlu.training.run_folder import Start
from danlu.training.state import Cadence, Run
from danlu.training.watch import Watch
from danlu.verification.data import ItemList

MicroBatches = Sequence[Sequence[tuple[int, Any]]]
"""The micro-batches of one process in a step: for each item its number in the step, and the item."""
_FP16_SCALE = 1024.0  # at first; small enough that none of the few steps overflows and is skipped
_CONSTANT = Schedule(kind="constant", warmup=0)  # a warm-up would make the first steps too small to see


@dataclass(frozen=True)
class Proxy:
    """Facts of the shrunken model that all processes of a verification know, in addition to the recipe; pickled to each
    of them."""

    config: ModelConfig | None  # of a decoder; None: a classifier of images
    vocab_size: int | None = None
    """Texts that adapters start from are encoded as bytes modulo this; None: by the recipe's tokenizer."""
    has_files: bool = True  # a config.json can say its model, so that a result can be written
    empty: Pack = EMPTY_PACK  # an item without targets, with the columns and facts of the others
    staged_ropes: Mapping[int, tuple[Rope, ...]] = field(default_factory=dict)  # as of `Decoder`

    @property
    def layer_kinds(self) -> Sequence[LayerSpec]:
        """The layers of a decoder that differ from each other."""
        return () if self.config is None else self.config.kinds

    @property
    def has_tied_head(self) -> bool:
        """Whether its head is its embedding."""
        return self.config is not None and self.config.tie_word_embeddings

    @property
    def has_experts(self) -> bool:
        """Whether any layer has experts."""
        return self.config is not None and self.config.has_experts

    @property
    def norms_all_heads(self) -> bool:
        """Whether any layer norms all of its queries, and all of its keys, together."""
        return any(getattr(kind.mixer, "qk_norm", None) == "full" for kind in self.layer_kinds)

    def place(self, recipe: Recipe, ranks: Ranks, device: torch.device, resumed: Path | None) -> PlacedModel:
        """The model on the processes of a layout; resumed: a checkpoint that will be loaded into it."""
        stage = STAGES[recipe.stage]
        if self.config is None:
            start = None if resumed is None else Start(resumed, ())
            return ClassifierBuilder(recipe, stage).place_policy(ranks, device, start)
        subject = subject_of(
            recipe,
            self.config,
            device,
            saved=None if resumed is None or recipe.adapter is None else read_group(resumed, "model"),
            resumed=resumed is not None,
            encode=lambda text: self._encoded(text, recipe.model),
            ranks=ranks,
        )
        placed = place(subject, recipe, ranks, device, resumed=resumed is not None)
        placed.subject.model.staged_ropes = self.staged_ropes
        decoder = placed_decoder(recipe, stage, placed, self.config, device, resumed=resumed is not None)
        return replace(decoder, empty=self.empty)

    def write(self, placed: PlacedModel, target: Path, value: BoxValue | None, *, writes: bool) -> None:
        """Writes the weights of the model that `place` has placed as a run ends with them, without a tokenizer.

        value, writes: as `Exporter.write` has them.
        """
        if isinstance(placed, PlacedClassifier):
            ClassifierExporter(placed).write(target, value, writes=writes)
            return
        assert isinstance(placed, PlacedDecoder), "the other kind of model"
        adapters = placed.placed.subject.adapters
        if adapters is None:
            save(placed.model, target, value=value, writes=writes)
            return
        if writes:
            target.mkdir(parents=True, exist_ok=True)
        write_adapter(adapters, TRAINED, target, base="base", base_fingerprint=None, value=value, writes=writes)

    def _encoded(self, text: str, model: Model) -> list[int]:
        """Token ids of a text that prompt tuning starts from."""
        if self.vocab_size is not None:
            return [byte % self.vocab_size for byte in text.encode()]
        # transformers, seconds and hundreds of MiB that only such a recipe needs.
        from danlu.data.tokenizer import load_tokenizer
        from danlu.inference.chat_tokenizer import ChatTokenizer

        named = model.tokenizer or model.path
        tokenizer = load_tokenizer(
            str(named), model.chat_template, model.chat_template_date, model.chat_template_kwargs
        )
        return ChatTokenizer(tokenizer).encode_prompt(text)


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
    notes: Sequence[str] = ()  # what is not as the recipe says, apart from sizes
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
            scaler=LossScaler(_FP16_SCALE) if self.recipe.activations == "fp16" else None,
            ema=None if self.recipe.ema is None else Ema(parameters, self.recipe.ema.decay),
        )
