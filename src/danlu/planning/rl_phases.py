"""The seconds of a rollout and of the steps that train on it, by phase: stage rl, and distillation on own answers.

The phases are those that a run's metrics have: `hand_over_s`, `rollout_s`, `reward_s`, `scoring_s`, and `update_s` in
its report. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from danlu.memory.layer_plan import Kind
from danlu.models.config import ModelConfig
from danlu.parallel.layout import Layout
from danlu.planning.answer_trees import micro_batches, trained_trees, trees_of
from danlu.planning.batch_shape import ELEMENT_BYTES, Document, DocumentRun, Kernels
from danlu.planning.cache_memory import CacheSizes, EngineBounds, PoolSize
from danlu.planning.decoder_seconds import DecoderSeconds
from danlu.planning.layer_graph import LayerTraining
from danlu.planning.layer_training import layers_training
from danlu.planning.primitives import PassSeconds
from danlu.planning.rollout_lengths import AskedPrompt, RolloutLengths, draws_answers
from danlu.planning.rollout_memory import engine_model, pool_for
from danlu.planning.rollout_passes import RolloutPasses
from danlu.planning.rollout_seconds import EngineModel, EngineSeconds
from danlu.planning.speeds import Speeds
from danlu.planning.step_plan import Phase, RlSeconds
from danlu.planning.step_work import clip_work, update_work
from danlu.planning.target import Target
from danlu.planning.workload import Workload
from danlu.recipe import Recipe
from danlu.recipe.policy_scores import scores_of, trains_on_pairs
from danlu.recipe.roles import CachedModel, PolicyWithoutAdapter, RewardModel, frozen_roles, roles_of
from danlu.recipe.value import value_share

if TYPE_CHECKING:
    from danlu.core.types import Role

_CPU_TOKENS = 4096
"""Tokens of a micro-batch, at most, where its size is not known."""
_JUDGED_TOKENS = 4096
"""Tokens that a reward model reads at a time (`stages.scoring`)."""


@dataclass(frozen=True)
class RlPlace:
    """The processes that compute, and their speeds."""

    speeds: Speeds
    device: Literal["cpu", "cuda"] = "cpu"
    kernels: Kernels = "cpu"
    data: int = 1
    """Ranks that share prompts."""
    tensor: int = 1
    """Ranks that share each product."""
    micro: int | None = None
    """Sequences of `data.max_length` tokens that a micro-batch has the tokens of; None: as the recipe says."""
    link: Callable[[int], float] | None = None
    """Bytes -> the seconds in which they reach the rollout servers; None: unknown."""


def rl_phases(
    workload: Workload,
    lengths: RolloutLengths,
    bounds: EngineBounds,
    place: RlPlace,
    update_s: float | None = None,
) -> RlSeconds:
    """The seconds of each phase from one rollout to the next.

    update_s: of one step, from its plan; None: computed for one process of a layout without a pipeline. Raises
    ResourceError for a cache that does not hold one block.
    """
    return _Phases(replace(workload, rollout_lengths=lengths), lengths, bounds, place).all(update_s)


def planned_rollout(
    workload: Workload, layout: Layout, target: Target, micro: int, update_s: float | None
) -> RlSeconds | None:
    """The seconds from one rollout to the next in a layout; None where no answers are drawn, or speeds are not known.

    micro: packed sequences of a micro-batch. update_s: of a step, as its plan has it: taken in a pipeline. Raises
    ResourceError as `rl_phases` does.
    """
    recipe, speeds = workload.recipe, target.speeds
    if not draws_answers(recipe) or speeds is None:
        return None
    lengths = workload.rollout_lengths or RolloutLengths.longest(recipe)
    device: Literal["cpu", "cuda"] = "cpu" if target.device_type == "cpu" else "cuda"
    place = RlPlace(speeds, device, target.kernels, layout.data * layout.context, layout.tensor, micro)
    return rl_phases(workload, lengths, EngineBounds.of(recipe), place, update_s if layout.pipeline > 1 else None)


@dataclass(frozen=True)
class _Phases:
    workload: Workload
    lengths: RolloutLengths
    bounds: EngineBounds
    place: RlPlace

    def all(self, update_s: float | None) -> RlSeconds:
        recipe = self.recipe
        steps = recipe.batch.updates * recipe.batch.passes if recipe.stage == "rl" else 1
        phases = [self.hand_over(), self.rollout()]
        if recipe.stage == "rl":
            phases.append(self.reward())
            if scores_of(recipe):
                phases.append(self.scoring())
        phases.append(self.update() if update_s is None else Phase("update", steps * update_s))
        return RlSeconds(tuple(phases), steps, recipe.stage == "rl" and recipe.rollout.staleness > 0)

    @property
    def recipe(self) -> Recipe:
        return self.workload.recipe

    @property
    def config(self) -> ModelConfig:
        return self.workload.config

    @cached_property
    def training(self) -> list[LayerTraining]:
        return layers_training(self.recipe, self.config)

    @cached_property
    def engine_model(self) -> EngineModel:
        return engine_model(self.workload, self.place.device, self.place.tensor)

    def hand_over(self) -> Phase:
        """The weights, on their way to the engine; one that sleeps takes the memory of its cache again."""
        recipe = self.recipe
        if recipe.rollout.engine != "embedded" or recipe.rollout.staleness:
            tensors = (each for each in self.workload.policy.tensors if each.trained or recipe.adapter is None)
            size = sum(tensor.bytes for tensor in tensors)
            if recipe.rollout.engine == "embedded":  # written to memory that the rollout process reads
                return Phase("hand_over", 2 * self.place.speeds.moved(2 * size))
            if self.place.link is None:
                return Phase("hand_over", None, f"{size} bytes of weights go to the servers: the link is not known")
            return Phase("hand_over", self.place.link(size), f"{size} bytes of weights go to the servers")
        is_sharded = recipe.parallel.shard != "none" and self.place.data > 1
        said = "gathering sharded weights is left out" if is_sharded else ""
        if self.place.device == "cpu":  # a page is taken when it is first written
            return Phase("hand_over", 0.0, said)
        pool, sizes = self.pool
        return Phase("hand_over", float(self.place.speeds.moved(pool.bytes_of(sizes))), said)

    @cached_property
    def pool(self) -> tuple[PoolSize, CacheSizes]:
        return pool_for(self.engine_model, self.bounds, self.lengths.prompts)

    def rollout(self) -> Phase:
        recipe = self.recipe
        said = [self.lengths.assumption]
        if recipe.rollout.engine != "embedded":
            return Phase("rollout", None, "servers answer, with an engine and on machines of their own")
        if self.bounds.drafts:
            said.append("no proposed token is kept")
        if recipe.environment is not None:
            said.append("each answer has one turn, and its environment takes no time")
        if self.place.tensor > 1:
            said.append("sums over tensor ranks are left out")
        shares = recipe.rollout.processes if recipe.rollout.staleness else self.place.data
        seconds = EngineSeconds(self.engine_model, self.place.speeds, self.bounds.drafts)
        passes = RolloutPasses(self._share(shares), self.bounds, self.pool[0], self.config.has_states)
        total = seconds.of_passes(passes.runs())
        if passes.preemptions:
            said.append(f"{passes.preemptions} answers make room for others and are read again")
        return Phase("rollout", total, "; ".join(said))

    def _share(self, shares: int) -> Sequence[AskedPrompt]:
        """The prompts of the process with the most tokens to draw."""
        own = [self.lengths.prompts[number::shares] for number in range(min(shares, len(self.lengths.prompts)))]
        return max(own, key=lambda prompts: sum(sum(prompt.answers) for prompt in prompts))

    def reward(self) -> Phase:
        judges = {role: each for role, each in roles_of(self.recipe).items() if isinstance(each, RewardModel)}
        others = len(self.recipe.rewards or ()) - len(judges)
        said = [f"{others} other rewards take no time: how long their code runs is unknown"] if others else []
        lengths = (prompt.tokens + tokens for prompt in self.lengths.prompts for tokens in prompt.answers)
        texts: list[Document] = [(DocumentRun(length),) for length in lengths]
        seconds = 0.0
        for role in judges:
            if (config := dict(self.workload.reward_models).get(role)) is None:
                return Phase("reward", None, f"the reward model of {role} is not read")
            seconds += self._decoder(config).forward(micro_batches(texts, _JUDGED_TOKENS), 0)
        return Phase("reward", seconds, "; ".join(said))

    def scoring(self) -> Phase:
        """The pass without gradients, in which the policy runs whoever is asked."""
        prompts = self.lengths.prompts[:: self.place.data]
        scores, documents = scores_of(self.recipe), trees_of(prompts, shared=self.recipe.data.share_stem)
        batches, targets = self._micro_batches(documents), _targets(documents)
        seconds = self._policy.forward(batches, targets if scores.old else 0)
        asked = [*(["reference"] if scores.reference else []), *scores.teachers]
        for role, config in self._frozen_models():
            if role in asked:
                seconds += self._decoder(config).forward(batches, targets)
        if scores.values and value_share(self.recipe) in ("base", "none"):
            seconds += self._decoder(self.workload.critic or self.config).forward(batches, 0)
        return Phase("scoring", seconds)

    def update(self) -> Phase:
        recipe, said = self.recipe, ""
        if recipe.stage == "rl" and trains_on_pairs(recipe):
            said = "the best and the worst answer to a prompt are of middle length"
        documents = trained_trees(self.workload, self.place.data)
        batches, targets = self._micro_batches(documents), _targets(documents)
        rounds, updates = (recipe.batch.passes, recipe.batch.updates) if recipe.stage == "rl" else (1, 1)
        seconds = self._policy.training_step(batches, targets)
        scores = scores_of(recipe) if recipe.stage == "rl" else None
        scored = () if scores is None else ((*scores.teachers, "reference") if scores.reference else scores.teachers)
        for role, config in self._frozen_models():
            if role not in scored:
                seconds += self._decoder(config).forward(batches, targets)
        if value_share(recipe) in ("base", "none"):
            seconds += self._critic.training_step(batches, 0)
        return Phase("update", rounds * (seconds + updates * self._optimizer()), said)

    def _optimizer(self) -> float:
        """Seconds of clipping and of the optimizer's update."""
        shards = 1 if self.recipe.parallel.shard == "none" else self.place.data
        shapes = self.workload.policy.trained
        work = [update_work(self.recipe.optimizer, shapes, self.place.device)]
        if self.recipe.gradient_clipping is not None:
            work.append(clip_work(sum(map(math.prod, shapes.values()))))
        return PassSeconds.of(work, self.place.speeds).forward / (shards * self.place.tensor)

    def _micro_batches(self, documents: Sequence[Document]) -> list[list[Document]]:
        micro, length = self.place.micro or self.recipe.batch.micro, self.recipe.data.max_length
        return micro_batches(documents, _CPU_TOKENS if micro == "auto" else micro * length)

    @property
    def _policy(self) -> DecoderSeconds:
        plan = self.workload.recompute(self.workload.chunks(0))
        kinds: tuple[Kind, ...] = tuple(entry.kind for entry in plan)
        return self._decoder(self.config, tuple(self.training), kinds if len(kinds) == len(self.config.layers) else ())

    @property
    def _critic(self) -> DecoderSeconds:
        return self._policy if self.workload.critic is None else self._decoder(self.workload.critic)

    def _decoder(
        self, config: ModelConfig, training: tuple[LayerTraining, ...] = (), recompute: tuple[Kind, ...] = ()
    ) -> DecoderSeconds:
        return DecoderSeconds(
            config,
            self.place.speeds,
            ELEMENT_BYTES[self.recipe.activations],
            self.place.device,
            self.place.kernels,
            training,
            recompute,
        )

    def _frozen_models(self) -> Iterator[tuple[Role, ModelConfig]]:
        """The models that run next to the policy, which itself may be one of them, without its adapter."""
        configs = {model.role: model.config for model in self.workload.frozen}
        for role, model in frozen_roles(self.recipe).items():
            if isinstance(model, PolicyWithoutAdapter):
                yield role, self.config
            elif not isinstance(model, CachedModel) and role in configs:
                yield role, configs[role]


def _targets(documents: Sequence[Document]) -> int:
    """The tokens of answers."""
    return sum(run.tokens for document in documents for run in document[1:])
