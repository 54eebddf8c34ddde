"""Builds the decoders of a stage, the trained one and the frozen ones, and places them on the processes of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import torch
from torch import nn

from danlu.assembly.base_model import weight_layouts
from danlu.assembly.devices import device_map_of
from danlu.assembly.machine_memory import check_size
from danlu.assembly.parallelize import Placed, Subject, place, subject_of
from danlu.assembly.recipe_adapters import base_changes, base_config, base_identity, check_adapters, model_folder
from danlu.core.errors import CheckpointError, ModelError, RecipeError
from danlu.core.types import Objective, Pack, Role
from danlu.data.batch import empty_like
from danlu.data.tokenizer_info import TokenizerInfo, tokenizer_info
from danlu.models.config import ModelConfig
from danlu.models.hf_config import architecture_of
from danlu.models.hf_folder import check_headers, check_vocabulary
from danlu.models.layer_spec import Experts
from danlu.models.loading import build
from danlu.models.saving import check_untouched
from danlu.parallel.comm import world_size
from danlu.parallel.local_parameter import replicated_parameter, sums_over_data
from danlu.parallel.parallel_context import ParallelContext
from danlu.parallel.ranks import Ranks
from danlu.recipe import Recipe
from danlu.recipe.sections import Parallel, Router
from danlu.recipe.value import value_share
from danlu.stages.export import DecoderExporter
from danlu.stages.learner import objective_parameters, objective_tensors
from danlu.stages.outputs import OFFERED, OFFERED_BY_HEAD
from danlu.stages.placed import PlacedDecoder
from danlu.stages.protocols import ColumnSpec, PlacedStage, Stage, StageData, frozen_models
from danlu.stages.reader import tokenizer_of
from danlu.stages.step_budget import DecoderBudget
from danlu.training.checkpoints.loading import read_group, read_state
from danlu.training.run_folder import Start

if TYPE_CHECKING:
    from danlu.models.load_balancing import Balancer
    from danlu.stages.learner import DecoderLearner
    from danlu.stages.moving import MovingWeights


class DecoderBuilder:
    """A `ModelBuilder`: decoders, or adapters on the one that is trained."""

    def __init__(self, recipe: Recipe, stage: Stage) -> None:
        self.recipe, self.stage = recipe, stage

    def check(self, start: Start | None) -> None:
        """Raises a DanluError for models, adapters, layouts, sizes and prompts that cannot be, before rows are read."""
        recipe = self.recipe
        objective, _ = decoder_objectives(recipe, self.stage)
        if recipe.parallel.workers == "threads" and objective_parameters(objective):
            raise RecipeError(
                "parallel.workers: threads copies the model to each device, not the parameters of an objective (a "
                "score head, a projection of hidden states). Use workers: processes"
            )
        check_adapters(recipe.model, recipe.adapter)
        if value_share(recipe) is not None:
            from danlu.stages.value_model import check_critic

            check_critic(recipe)
        of_columns = (column.model for column in self.stage.columns(recipe) if column.model is not None)
        for spec in (*frozen_models(self.stage.models(recipe)).values(), *of_columns):
            from danlu.stages.frozen_models import check_frozen_model

            check_frozen_model(spec, recipe)
        if start is not None:
            self._check_base(start.path)
        if recipe.model.path is not None:
            folder, where = model_folder(recipe.model), recipe.model.path
            config = self._scaled(self._with_task(base_config(recipe.model)))
            self._check_layout(config)
            if recipe.trained_quantization is not None:
                from danlu.assembly.stored_base import refuse_quantized

                refuse_quantized(folder, "Train the model that it was made from")
            check_router(recipe.router, config, replays=recipe.rollout.routing_replay)
            if recipe.adapter is not None:
                from danlu.assembly.frozen_base import check_frozen

                check_frozen(folder, recipe.base_quantization, config)
            elif start is None:  # weights of a checkpoint will take the place of these
                check_headers(folder, config, quantized=False, layouts=weight_layouts(folder))
            else:
                check_untouched(folder, config)
        else:  # the tokenizer, which is not read yet, decides the vocabulary of a config that does not
            from danlu.models.presets import from_scratch

            config = self._scaled(self._with_task(from_scratch(recipe.model, 1)))
            where = recipe.model.preset or "model.config"
            # Whether it can be cut is reported where it is known.
            self._check_layout(replace(config, vocab_size=max(config.vocab_size, recipe.parallel.tensor)))
            check_router(recipe.router, config, replays=recipe.rollout.routing_replay)
        check_size(recipe, config, where, world_size())
        if recipe.evaluation.samples is not None:
            from danlu.inference.chat_tokenizer import ChatTokenizer
            from danlu.stages.samples import sample_prompts

            tokenizer = tokenizer_of(recipe)
            sample_prompts(recipe, ChatTokenizer(tokenizer), self._config(tokenizer_info(tokenizer)))

    def with_columns(self, ranks: Ranks, device: torch.device, stage_data: StageData, stream: TextIO) -> StageData:
        """Adds the columns that the stage computes with models before training, from the cache where they are
        stored."""
        if self.recipe.parallel.device_map is not None:
            device = self._loss_device(self._config(stage_data.tokenizer), device)
        for spec in self.stage.columns(self.recipe):
            from danlu.stages.columns import add_columns
            from danlu.stages.role_configs import frozen_config

            rows = stage_data.stored
            assert rows is not None, "the recipe's rules let no columns be asked of a stream"
            config = self._config(stage_data.tokenizer)
            asked_config = config if spec.model is None else frozen_config(spec.model.section, config.vocab_size)
            place = partial(self._placed_to_be_asked, spec, config, ranks, device)
            stage_data = rows.stage_data(
                *add_columns(rows, spec, asked_config, place, self.recipe, ranks, device, stream)
            )
            assert stage_data.stored is not None
            stage_data = replace(stage_data, empty=empty_like(stage_data.stored.train.sample(0)))
        return stage_data

    def _placed_to_be_asked(
        self, spec: ColumnSpec, config: ModelConfig, ranks: Ranks, device: torch.device
    ) -> DecoderLearner:
        """A model that is asked for columns, as the policy of a learner that trains nothing."""
        recipe = self.recipe
        if spec.model is not None:
            from danlu.stages.frozen_models import place_frozen

            placed = place_frozen(recipe, spec.model, config.vocab_size, ranks, device)
        else:
            subject = subject_of(recipe, config, device, encode=self._encode, ranks=ranks)
            placed = place(subject, recipe, ranks, device)
        from danlu.stages.no_grad_pass import learner_to_ask

        return learner_to_ask(recipe, placed, device)

    def place(self, ranks: Ranks, device: torch.device, start: Start | None, stage_data: StageData) -> PlacedStage:
        """The trained decoder and the frozen ones on the processes of a layout."""
        return self._stage(self._policy(ranks, device, start, stage_data), stage_data)

    def _stage(self, policy: PlacedDecoder, stage_data: StageData, reward_bytes: int = 0) -> PlacedStage:
        """The policy with its budget and exporter."""
        return PlacedStage(policy, DecoderBudget(policy, reward_bytes), DecoderExporter(policy))

    def _policy(
        self,
        ranks: Ranks,
        device: torch.device,
        start: Start | None,
        stage_data: StageData,
        put_on_base: Callable[[Subject], Sequence[str]] = lambda subject: (),
    ) -> PlacedDecoder:
        """Places the policy on the processes.

        put_on_base: adds modules that a stage needs to the policy before it is placed; returns lines for the console.
        """
        recipe, config = self.recipe, self._config(stage_data.tokenizer)
        self._check_layout(config)
        device = self._loss_device(config, device)
        saved = None if start is None or recipe.adapter is None else read_group(start.path, "model")
        subject = subject_of(
            recipe, config, device, saved=saved, resumed=start is not None, encode=self._encode, ranks=ranks
        )
        lines = put_on_base(subject)
        placed = place(subject, recipe, ranks, device, resumed=start is not None)
        if start is None:  # a run that is resumed needs no more of its base
            lines = [*lines, *self._untrained_lines(ranks, stage_data.tokenizer)]
        placed = replace(placed, notes=(*placed.notes, *lines))
        # On a GPU it would make the host wait in every micro-batch, and compiled code has no such tensors.
        # Processes sum whole gradients, and copies of the weights in threads hand dense ones back.
        alone = ranks.alone and recipe.parallel.workers != "threads"
        if recipe.long_context is not None:
            from danlu.models.long_context import ropes_by_length

            unscaled = self._unscaled(stage_data.tokenizer)
            placed.subject.model.staged_ropes = ropes_by_length(unscaled, recipe.long_context)
        if alone:
            embedding = placed.subject.model.embed_tokens
            embedding.sparse_gradient = embedding.weight.device.type == "cpu" and not recipe.compile
        decoder = placed_decoder(recipe, self.stage, placed, config, device, resumed=start is not None)
        if stage_data.empty is None:
            return decoder
        assert isinstance(stage_data.empty, Pack), "the items of a decoder are packs"
        return replace(decoder, empty=stage_data.empty)

    def _untrained_lines(self, ranks: Ranks, tokenizer: TokenizerInfo | None) -> list[str]:
        if not ranks.leads or tokenizer is None or self.recipe.model.path is None:
            return []
        from danlu.assembly.token_notes import untrained_lines

        return untrained_lines(self.recipe, tokenizer.end_of_turn_ids)

    def unplaced(self, checkpoint: Path) -> tuple[PlacedDecoder, DecoderExporter]:
        """The trained decoder on the CPU with memory for the weights of `checkpoint`, and its exporter."""
        self._check_base(checkpoint)
        device = torch.device("cpu")
        saved = None if self.recipe.adapter is None else read_group(checkpoint, "model")
        subject = subject_of(self.recipe, self._config(None), device, saved=saved, resumed=True, encode=self._encode)
        placed, objectives = Placed(subject, ParallelContext()), decoder_objectives(self.recipe, self.stage)
        moving: dict[Role, MovingWeights] = {}
        for role, spec in frozen_models(self.stage.models(self.recipe)).items():
            if spec.mixing is not None:
                from danlu.stages.moving import moving_weights

                own = Placed(Subject(build(subject.model.config)), ParallelContext())
                moving[role] = moving_weights(role, placed, own, spec.mixing)
        critic = None
        if value_share(self.recipe) == "none":
            from danlu.stages.role_configs import own_config

            critic = Placed(Subject(build(own_config(self.recipe, self._config(None).vocab_size))), ParallelContext())
        balancer = balancer_of(self.recipe.router, placed, threads=self.recipe.parallel.workers == "threads")
        policy = PlacedDecoder(
            self.recipe, placed, device, *objectives, own_critic=critic, moving=moving, balancer=balancer
        )
        return policy, DecoderExporter(policy)

    def _encode(self, text: str) -> list[int]:
        from danlu.inference.chat_tokenizer import ChatTokenizer

        return ChatTokenizer(tokenizer_of(self.recipe)).encode_prompt(text)

    def _check_layout(self, config: ModelConfig) -> None:
        """Raises RecipeError for a policy that cannot be divided, or not be trained as the recipe says."""
        recipe = self.recipe
        is_planned = recipe.memory.recompute.kind == "planned"
        if recipe.parallel == Parallel() and recipe.trained_quantization is None and not is_planned:
            return  # of a whole model in its own type nothing is asked
        from danlu.planning.layout_problems import policy_problems

        if wrong := [*policy_problems(recipe, config)]:
            raise RecipeError(wrong)

    def _loss_device(self, config: ModelConfig, device: torch.device) -> torch.device:
        """The device of micro-batches and losses: `device`, but with a device map that of the policy's head."""
        device_map = device_map_of(self.recipe.parallel.device_map, self.recipe.device, config)
        return device if device_map is None else torch.device(device_map.head)

    def _check_base(self, checkpoint: Path) -> None:
        """Raises CheckpointError if an adapter would go on upon another base than the one under its checkpoint."""
        saved = None if self.recipe.adapter is None else read_state(checkpoint).get("base")
        if saved is None:  # all weights are the checkpoint's, or it was written by a danlu that kept no fingerprint
            return
        if changes := base_changes(saved, base_identity(self.recipe.model)):
            raise CheckpointError(
                f"{checkpoint}: its adapter was trained on another base than the one that is there now (there -> "
                "here):\n  "
                + "\n  ".join(changes)
                + "\nPut back what was there; or, to train upon the new base, start "
                "again in another `output`."
            )

    def _config(self, tokenizer: TokenizerInfo | None) -> ModelConfig:
        return self._scaled(self._unscaled(tokenizer))

    def _scaled(self, config: ModelConfig) -> ModelConfig:
        """The config as it is at the longest length of the run."""
        if self.recipe.long_context is None:
            return config
        from danlu.models.long_context import with_long_context

        return with_long_context(config, self.recipe.long_context, self.recipe.data.max_length)

    def _unscaled(self, tokenizer: TokenizerInfo | None) -> ModelConfig:
        model, facts = self.recipe.model, tokenizer or tokenizer_info(tokenizer_of(self.recipe))
        if model.path is None:
            from danlu.models.presets import from_scratch

            config = from_scratch(model, facts.vocab_size, facts.bos_id, facts.eos_id)
        else:
            config = base_config(model)
        check_vocabulary(config, facts.vocab_size)
        return self._with_task(config)

    def _with_task(self, config: ModelConfig) -> ModelConfig:
        """Returns the config with the stage's task.

        Raises RecipeError where the model is for another task, or the result could not be written.
        """
        task = self.stage.task(self.recipe)
        if config.task not in ("causal-lm", task):
            raise RecipeError(
                f"model.path: {self.recipe.model.path} is for {config.task} (architectures in its config.json), and "
                f"stage {self.recipe.stage} trains a model for {task}. Start from a language model"
            )
        if self.recipe.adapter is None:
            try:
                architecture_of(config.family, task)
            except ModelError as error:
                raise RecipeError(f"model: stage {self.recipe.stage} trains one for {task}. {error}") from None
        return replace(config, task=task)


def placed_decoder(
    recipe: Recipe,
    stage: Stage,
    placed: Placed,
    config: ModelConfig,
    device: torch.device,
    *,
    resumed: bool = False,
) -> PlacedDecoder:
    """A placed policy with the objective of its stage, and with the frozen models and the critic.

    resumed: weights will be read from a checkpoint.
    Raises RecipeError if the objective asks for outputs that a decoder does not offer.
    """
    objective, evaluation = decoder_objectives(recipe, stage)
    for module in (objective, evaluation):
        if isinstance(module, nn.Module):
            module.to(device)
    beside = stage.models(recipe)
    frozen = dict[Role, Placed]()
    moving: dict[Role, MovingWeights] = {}
    for role, spec in frozen_models(beside).items():
        from danlu.stages.frozen_models import place_frozen

        frozen[role] = place_frozen(recipe, spec, config.vocab_size, placed.parallel.ranks, device)
        if spec.mixing is not None:
            from danlu.stages.moving import moving_weights

            moving[role] = moving_weights(role, placed, frozen[role], spec.mixing)
    critic, parallel = None, placed.parallel
    if value_share(recipe) == "none":
        from danlu.stages.value_model import place_own_critic, with_own_critic

        critic = place_own_critic(recipe, config.vocab_size, parallel.ranks, device, resumed=resumed)
        parallel = with_own_critic(parallel, critic)
    parallel = _with_objective(parallel, objective, in_buckets=recipe.parallel.shard == "none")
    balancer = balancer_of(recipe.router, placed, threads=recipe.parallel.workers == "threads")
    if balancer is not None and not parallel.ranks.alone:  # its tensors are whole on every process
        counts = balancer.tensors().items()
        local = {name: replicated_parameter(name, each, parallel.ranks) for name, each in counts}
        parallel = replace(parallel, local_parameters={**parallel.local_parameters, **local})
    if moving:
        from danlu.stages.moving import with_moving

        parallel = with_moving(parallel, moving)
    placed = replace(placed, parallel=parallel)
    return PlacedDecoder(
        recipe, placed, device, objective, evaluation, beside, frozen, critic, moving, balancer=balancer
    )


def decoder_objectives(recipe: Recipe, stage: Stage) -> tuple[Objective, Objective]:
    """Returns (objective, evaluation) of a stage that trains a decoder. Raises RecipeError for outputs that a decoder
    does not offer."""
    return stage.objectives(recipe, OFFERED, "a decoder", offered_by_head=OFFERED_BY_HEAD)


def check_router(router: Router | None, config: ModelConfig, *, replays: bool | None = None) -> None:
    """Raises RecipeError for a `router` or a replay of routes of a model without experts, or with biases that its
    family does not keep."""
    if replays and not config.has_experts:
        raise RecipeError(f"rollout.routing_replay: {config.family} as it is here has no experts. Leave it out")
    if router is None:
        return
    feeds = [kind.feed for kind in config.kinds if isinstance(kind.feed, Experts)]
    if not feeds:
        raise RecipeError(f"router: {config.family} as it is here has no experts to balance. Leave it out")
    if router.balance == "bias" and not all(feed.router.bias_correction for feed in feeds):
        raise RecipeError(
            f"router.balance: bias, but a folder of {config.family} has no place for the biases, and whoever loads it "
            "would choose other experts. Use sequence or step"
        )


def balancer_of(router: Router | None, placed: Placed, *, threads: bool) -> Balancer | None:
    """Returns the balancer that counts the load of the policy's experts and keeps it even; None for a policy without
    experts.

    threads: whether the policy has replicas in threads, which count nothing.
    """
    model = placed.subject.model
    if not model.config.has_experts or threads:
        return None
    from danlu.models.load_balancing import Balancer, Balancing

    balancing = Balancing()
    if router is not None:
        sequence = router.sequence if router.balance in ("bias", "sequence") else 0.0
        balancing = Balancing(router.balance, router.rate, sequence, router.z, router.capacity)
    return Balancer(model, balancing, adds_gradient=placed.parallel.ranks.tensor.index == 0)


def _with_objective(parallel: ParallelContext, objective: Objective, *, in_buckets: bool) -> ParallelContext:
    """Returns the same step with the objective's own tensors next to the model's: whole on every process.

    Their gradients are summed over data ranks, `in_buckets` where nothing is sharded. Tensor ranks have the same hidden
    states, and so the same gradients, which are not summed. In a pipeline the stage with the last chunk, where the
    objective is computed, trains and saves them; running statistics are on all stages, for each prepares its items.
    """
    ranks, tensors = parallel.ranks, objective_tensors(objective)
    if ranks.alone or not tensors:
        return parallel
    parameters = objective_parameters(objective)
    local = {name: replicated_parameter(name, parameters.get(name, tensor), ranks) for name, tensor in tensors.items()}
    if parallel.num_chunks - 1 not in parallel.chunks:
        local = {name: replace(each, box=replace(each.box, is_writer=False)) for name, each in local.items()}
        statistics = {name: each for name, each in local.items() if name not in parameters}
        return replace(
            parallel,
            local_parameters={**parallel.local_parameters, **statistics},
            elsewhere={**parallel.elsewhere, **{name: local[name] for name in parameters}},
        )
    trained = {name: local[name] for name in parameters}
    sums = sums_over_data(trained, ranks, in_buckets=in_buckets)
    return replace(
        parallel,
        local_parameters={**parallel.local_parameters, **local},
        partial_gradients=(*parallel.partial_gradients, *sums),
        chunk_of={**parallel.chunk_of, **dict.fromkeys(trained, parallel.num_chunks - 1)},
    )
