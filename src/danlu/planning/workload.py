"""The models that a recipe trains and runs, as tensors and settings of layers, from configs alone. Imports no torch.

Nothing is read here: configs and the facts of folders are handed in (`run.read_workload`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from danlu.memory.layer_plan import Kind, LayerPlan, plan_of_layers
from danlu.models.chunks import Chunks
from danlu.models.config import ModelConfig, parameter_shapes
from danlu.optim.state_shapes import FLOAT32_BYTES
from danlu.parallel.schedules import placement
from danlu.planning.layer_graph import LayerTraining
from danlu.planning.layer_training import layers_training
from danlu.planning.lengths import FULL_PACKS, Lengths
from danlu.planning.model_tensors import ModelTensor, ModelTensors
from danlu.planning.pipeline_split import chunk_sizes, num_chunks
from danlu.recipe import Recipe

if TYPE_CHECKING:
    import numpy as np

    from danlu.core.types import Role
    from danlu.planning.rollout_lengths import RolloutLengths
    from danlu.planning.row_batches import RowBatches


@dataclass(frozen=True)
class FrozenModel:
    """A model that is run and not trained: a reference, a teacher."""

    role: Role
    config: ModelConfig
    tensors: tuple[ModelTensor, ...]


class OtherModel(NamedTuple):
    """A model of another role, with a folder of its own, which is divided among the processes as the policy is."""

    key: str
    """The key of the recipe that names it."""
    path: str
    config: ModelConfig


@dataclass(frozen=True)
class Workload:
    """The models of a recipe, and the documents that they are trained on."""

    recipe: Recipe
    config: ModelConfig
    """The policy."""
    policy: ModelTensors
    frozen: tuple[FrozenModel, ...] = ()
    critic: ModelConfig | None = None
    """The model of values, where it is a whole decoder."""
    others: tuple[OtherModel, ...] = ()
    """Those of both, and models that are asked before training, that do not start as the policy does."""
    reward_bytes: int = 0
    """Bytes of reward models, which the first process loads."""
    reward_models: tuple[tuple[Role, ModelConfig], ...] = ()
    """The reward models by role, upon the policy's base or not."""
    lengths: Lengths = FULL_PACKS
    rollout_lengths: RolloutLengths | None = None
    """The lengths of drawn answers and their prompts; None: all are as long as they may be."""
    data_ranks: int = 1
    """The data ranks that rows with judged answers are dealt out to."""
    planned_kinds: tuple[Kind, ...] = ()
    """The kind of each layer that `memory.recompute: planned` is expected to choose (`planned_kinds`)."""

    @property
    def critic_tensors(self) -> tuple[ModelTensor, ...]:
        """The tensors of such a model of values, all of them trained."""
        if self.critic is None:
            return ()
        return tuple(
            ModelTensor(name, shape, FLOAT32_BYTES * _count(shape), trained=True)
            for name, shape in parameter_shapes(self.critic).items()
        )

    @cached_property
    def training(self) -> tuple[LayerTraining, ...]:
        """The parts of each layer of the policy that are trained."""
        return tuple(layers_training(self.recipe, self.config))

    @cached_property
    def row_lengths(self) -> np.ndarray | None:
        """[rows] int64: tokens of each row; None where they are not known."""
        if not self.lengths.documents:
            return None
        import numpy as np  # here: full packs, which have no lengths, need none

        return np.array(self.lengths.documents, dtype=np.int64)

    @cached_property
    def row_batches(self) -> RowBatches | None:
        """The micro-batches of rows with compared or judged answers; None for other rows, and unknown lengths."""
        recipe, trees = self.recipe, self.lengths.trees
        if trees is None or recipe.batch.rows is None:
            return None
        from danlu.planning.row_batches import RowBatches

        stages = recipe.parallel.pipeline.stages
        least = 1 if stages == 1 else 2 * stages  # `ParallelContext.least_micro_batches`
        return RowBatches(trees, recipe.batch.rows, recipe.steps, self.data_ranks, recipe.data.max_length, least)

    def dealt_to(self, data_ranks: int) -> Workload:
        """Returns the workload with its rows dealt out to data ranks; the same one where nothing depends on them."""
        return self if self.lengths.trees is None else replace(self, data_ranks=data_ranks)

    def micro_batches(self, micro: int, data_ranks: int) -> tuple[int, int]:
        """(packed sequences of a micro-batch, micro-batches of a rank in a step), for a recipe's `micro`."""
        if (rows := self.dealt_to(data_ranks).row_batches) is not None:
            return micro, rows.micro_batches(micro)
        per_step = -(-self.recipe.batch.packs(self.recipe.data.max_length) // data_ranks)
        micro = min(micro, per_step)
        return micro, -(-per_step // micro)

    def chunks(self, stage: int, config: ModelConfig | None = None) -> Chunks:
        """The chunks of a pipeline's stage; config: of another model than the policy."""
        section, config = self.recipe.parallel.pipeline, config or self.config
        if section.stages == 1:
            return Chunks.whole(len(config.layers))
        local = placement(section.schedule, section.stages, num_chunks(section) // section.stages)[stage]
        return Chunks.of_sizes(chunk_sizes(section, config), local)

    def recompute(self, chunks: Chunks) -> list[LayerPlan]:
        """The recomputation of the layers of a stage, numbered within it; empty where a choice is still to be made."""
        section = self.recipe.memory.recompute
        if section.kind == "planned":
            if len(self.planned_kinds) != sum(map(len, chunks.layers)):
                return []
            return [LayerPlan(layer, self.planned_kinds[layer]) for layer in chunks.local_layers]
        return plan_of_layers(section, chunks.local_layers, [chunks.layers[chunk] for chunk in chunks.local])


def _count(shape: Sequence[int]) -> int:
    count = 1
    for side in shape:
        count *= side
    return count
