"""The rollout engine of a recipe, over the policy as it is placed on the processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from danlu.assembly.adapter_stacks import AdapterStacks
from danlu.assembly.base_model import weight_layouts
from danlu.assembly.machine_memory import gathered_element_bytes, processes_here
from danlu.assembly.parallelize import Placed
from danlu.core.dtensor import is_dtensor
from danlu.core.terminal import print_status
from danlu.inference.cache_size import cache_gib
from danlu.inference.chat_tokenizer import ChatTokenizer
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import DraftOptions, EngineOptions, RolloutEngine
from danlu.inference.engine_adapters import EngineAdapters, StackedAdapters
from danlu.inference.grammar import Grammars, form_grammar
from danlu.inference.pipelined_decoder import PipelinedDecoder
from danlu.inference.ranks import ParallelEngine
from danlu.inference.request import SamplingOptions
from danlu.inference.sharded_weights import ShardedWeights
from danlu.inference.stopping import Decode
from danlu.models.config import parameter_shapes
from danlu.models.decoder import Decoder
from danlu.models.hf_folder import resolve_folder
from danlu.models.loading import load
from danlu.numerics.dtypes import DTYPES
from danlu.parallel.local_parameter import LocalParameter
from danlu.recipe import Recipe
from danlu.recipe.routing_replay import replays_routes
from danlu.recipe.sections import DraftModel, Ngram, Rollout

POLICY = "policy"
"""The name of the trained adapter, with those stacked below it; active where a request names none."""


def rollout_engine(
    recipe: Recipe,
    placed: Placed,
    *,
    decode: Decode | None = None,
    grammars: Grammars | None = None,
    cache_gib: float | None = None,
) -> RolloutEngine:
    """An engine that answers with the policy, dealt among the processes or on a server; all processes make one.

    Asynchronous rollouts ask servers in a process of their own: the trainer then draws its own answers itself.

    decode: token ids to text without special tokens; without it answers have no text. grammars: see `grammars_of`.
    cache_gib: the size of the cache that the coming requests need, where that is known: no more is taken.
    Raises ResourceError for a cache that holds not one block, ModelError for a draft model that is not there or has
    another vocabulary.
    """
    model, parallel = placed.subject.model, placed.parallel
    if recipe.rollout.engine != "embedded" and recipe.rollout.staleness == 0:
        from danlu.stages.served_policy import ServedPolicy

        return ServedPolicy(recipe, placed, decode, grammars)
    stages = None if parallel.pipeline is None else PipelinedDecoder(model, parallel.pipeline)
    engine = embedded_engine(recipe, placed, decode=decode, grammars=grammars, cache_gib=cache_gib, stages=stages)
    if parallel.ranks.alone:
        return engine
    return ParallelEngine(engine, parallel.ranks, stages or model, sharded_weights(recipe, placed))


def embedded_engine(
    recipe: Recipe,
    placed: Placed,
    *,
    decode: Decode | None = None,
    grammars: Grammars | None = None,
    cache_gib: float | None = None,
    stages: PipelinedDecoder | None = None,
) -> EmbeddedEngine:
    """The engine of this process, with the arguments and errors of `rollout_engine`.

    stages: the model with the chunks of other processes.
    """
    model, dtype = placed.subject.model, DTYPES[recipe.activations]
    options = engine_options(recipe)
    if cache_gib is not None:
        options = replace(options, cache_gib=min(options.cache_gib, cache_gib))
    return EmbeddedEngine(
        model,
        options,
        dtype=dtype,
        decode=decode,
        adapters=policy_adapters(placed),
        draft_model=draft_model(recipe.rollout, model.input_device, dtype),
        stages=stages,
        grammars=grammars,
    )


def sleeping_engine(
    recipe: Recipe, placed: Placed, decode: Decode, lengths: Sequence[int], grammars: Grammars | None = None
) -> RolloutEngine:
    """The same engine, asleep, with a cache for texts of these lengths that are written together.

    It is no larger: training takes what there is of the device's memory. Raises as `rollout_engine` does.
    """
    dtype, pipeline = DTYPES[recipe.activations], placed.parallel.pipeline
    needed = cache_gib(placed.subject.model, dtype, lengths, engine_options(recipe), pipeline)
    engine = rollout_engine(recipe, placed, decode=decode, grammars=grammars, cache_gib=needed)
    engine.sleep()
    return engine


def engine_options(recipe: Recipe) -> EngineOptions:
    """The settings of the embedded engine in a recipe."""
    section = recipe.rollout
    return EngineOptions(
        block=section.block,
        cache_gib=section.cache_gib,
        cache=section.cache,
        precision=section.precision,
        fp8_recipe="tile" if recipe.fp8 is None else recipe.fp8.recipe,
        packed_gib=section.packed_gib,
        batch_tokens=section.batch_tokens,
        sequences=section.sequences,
        prefix_sharing=section.prefix_sharing,
        draft=draft_options(section),
        preempt=section.preempt,
        swap_gib=section.swap_gib,
        exact=recipe.numerics == "exact",
        routes=replays_routes(recipe),
    )


def grammars_of(recipe: Recipe, chat: ChatTokenizer, vocab_size: int) -> Grammars | None:
    """The compiler of the grammars of answers; None where the recipe gives answers no form.

    Raises the errors of `Grammars.compile` for a form that no answer can have.
    """
    if recipe.rollout.format is None:
        return None
    grammars = Grammars(chat.tokenizer, vocab_size, chat.stop_ids)
    grammars.compile(form_grammar(recipe.rollout.format.kinds))
    return grammars


def leaves_tokens_out(section: Rollout) -> bool:
    """Whether answers are drawn from a part of the vocabulary, which training has to know for each token."""
    return section.format is not None or sampling_options(section, 0).truncates


def sampling_options(section: Rollout, seed: int) -> SamplingOptions:
    """The sampling options of the answers that are trained on."""
    return SamplingOptions(section.temperature, section.top_p, section.top_k, section.min_p, seed=seed)


def draft_options(section: Rollout) -> DraftOptions | None:
    """Options of the drafts of speculative decoding, if there are any."""
    match section.draft:
        case Ngram() as ngram:
            return DraftOptions("ngram", ngram.tokens, longest=ngram.longest)
        case DraftModel() as draft:
            return DraftOptions("model", draft.tokens, model=draft.model)
    return None


def draft_model(section: Rollout, device: torch.device, dtype: torch.dtype) -> Decoder | None:
    """The model that proposes tokens, whole on each process, where one does."""
    if not isinstance(section.draft, DraftModel):
        return None
    folder = resolve_folder(section.draft.model)
    return load(folder, dtype=dtype, device=device, layouts=weight_layouts(folder))


def policy_adapters(placed: Placed) -> EngineAdapters | None:
    """The adapters that requests may switch between: those that are trained, and the base without any."""
    adapters = placed.subject.adapters
    if adapters is None:
        return None
    stacks = AdapterStacks(adapters)
    stacks.names.append(adapters.active)
    return StackedAdapters(stacks, [POLICY])


def sharded_weights(recipe: Recipe, placed: Placed) -> ShardedWeights | None:
    """The policy's weights as a rollout reads them, where data ranks (and context ranks) shard them or have other
    experts."""
    model, ranks = placed.subject.model, placed.parallel.ranks
    if ranks.dense_data.all.alone or (recipe.parallel.shard == "none" and ranks.expert.alone):
        return None
    whole_bytes = sum(
        parameter.numel() * gathered_element_bytes(recipe, parameter)
        for parameter in model.parameters()
        if is_dtensor(parameter)
    )
    return ShardedWeights(
        model,
        recipe.parallel,
        recipe.rollout,
        ranks,
        dtype=DTYPES[recipe.activations],
        whole_bytes=whole_bytes,
        processes_here=processes_here(ranks.world.size),
        log=print_status if ranks.leads else _keep_to_oneself,
    )


def policy_parameters(placed: Placed) -> dict[str, LocalParameter]:
    """This process's shard of each parameter of the policy that is trained, in an order that all processes have; empty
    for parameters of other stages."""
    everything, adapters = placed.parallel.all_parameters, placed.subject.adapters
    if adapters is None:
        names = [*parameter_shapes(placed.subject.model.config)]
    else:
        names = sorted(adapters.tensors(adapters.active[-1]))
    return {name: everything[name] for name in names}


def _keep_to_oneself(text: str) -> None:
    """Another process tells it."""
