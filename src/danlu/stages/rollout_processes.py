"""Rollout processes that answer with the policy: how each makes its engine, and the weights that it receives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from danlu.assembly.arithmetic import set_arithmetic
from danlu.assembly.machine_memory import processes_here
from danlu.assembly.parallelize import Placed, Subject, subject_of
from danlu.core.machine import usable_cores
from danlu.core.terminal import print_status
from danlu.inference.chat_tokenizer import ChatTokenizer
from danlu.models.config import ModelConfig
from danlu.numerics.batch_invariant import batch_invariant
from danlu.numerics.deterministic import deterministic
from danlu.parallel.parallel_context import ParallelContext
from danlu.recipe import Recipe
from danlu.recipe.sections import Value
from danlu.recipe.value import value_share
from danlu.rl.rollout_processes import RolloutProcesses
from danlu.rl.rollout_worker import WorkerEngine
from danlu.stages.environments import episode_engine
from danlu.stages.learner import trained_weights
from danlu.stages.reader import chat_tokenizer_of
from danlu.stages.rollout import embedded_engine, grammars_of, policy_parameters
from danlu.training.checkpoints.gathering import Gathering

if TYPE_CHECKING:
    from danlu.rl.asynchronous import AsynchronousEngine


@dataclass(frozen=True)
class PolicyEngineJob:
    """A `rollout_worker.EngineJob`: the engine of a recipe, with weights that the trainer hands over."""

    recipe: Recipe
    config: ModelConfig
    device: str
    cache_gib: float
    threads: int

    @contextmanager
    def __call__(self) -> Iterator[WorkerEngine]:
        """A context in which the engine answers as one within the trainer would."""
        recipe, device = self.recipe, torch.device(self.device)
        torch.set_num_threads(self.threads)
        chat = chat_tokenizer_of(recipe, self.config)
        with ExitStack() as closing:
            closing.enter_context(deterministic(recipe.deterministic))
            if recipe.numerics == "exact":
                closing.enter_context(batch_invariant())
            if device.type == "cuda":
                torch.cuda.set_device(device)
            subject = policy_copy(recipe, self.config, device, chat)
            engine = self._engine(subject, chat)
            if recipe.environment is None:
                closing.callback(engine.close)
                yield engine
                return
            played = episode_engine(recipe, chat, subject, engine)
            closing.callback(played.close)
            yield played

    def _engine(self, subject: Subject, chat: ChatTokenizer) -> WorkerEngine:
        grammars = grammars_of(self.recipe, chat, subject.model.config.vocab_size)
        if self.recipe.rollout.engine != "embedded":
            from danlu.stages.served_rollouts import ServedRollouts

            return ServedRollouts(self.recipe, subject, chat.decode, grammars)
        placed = Placed(subject, ParallelContext())
        return embedded_engine(self.recipe, placed, decode=chat.decode, grammars=grammars, cache_gib=self.cache_gib)


def policy_copy(recipe: Recipe, config: ModelConfig, device: torch.device, chat: ChatTokenizer) -> Subject:
    """The policy of a recipe, for weights that are handed over; without the adapter of PPO's values, if it has one."""
    if value_share(recipe) == "base":
        recipe = recipe.model_copy(update={"value": Value(share="policy")})
    # Of a model that is trained as a whole all values are handed over; of an adapter, those of the adapter.
    subject = subject_of(
        recipe,
        config,
        device,
        resumed=recipe.adapter is None,
        encode=lambda text: chat.encode_prompt(text),
    )
    if recipe.fp8 is not None:  # which the engine multiplies with where numerics are exact
        set_arithmetic(subject.model, recipe.fp8)
    subject.model.requires_grad_(False).eval()
    return subject


def rollout_processes(recipe: Recipe, placed: Placed, cache_gib: float) -> AsynchronousEngine:
    """The rollout processes of a recipe, which load their models meanwhile; on the first process of a run.

    cache_gib: the size of the cache that the answers drawn at a time need. Raises ResourceError where there is no
    memory for the weights that they receive.
    """
    count = recipe.rollout.processes
    threads = recipe.threads or max(1, usable_cores() // (1 + count))
    config = placed.subject.model.config
    jobs = [PolicyEngineJob(recipe, config, device, cache_gib, threads) for device in _devices(placed, count)]
    return RolloutProcesses(jobs, _shapes(placed), print_status)


def policy_weights(placed: Placed) -> Iterator[tuple[str, Tensor]]:
    """The policy's trained tensors, whole, by name, on the first process; all go through it together."""
    parallel = placed.parallel
    if parallel.alone:
        yield from trained_weights(placed.subject.model, placed.subject.adapters).items()
        return
    parallel.reshard()
    with Gathering(parallel.ranks.world) as gathering:
        for name, parameter in policy_parameters(placed).items():
            if (whole := gathering.whole(name, parameter.local, parameter.box)) is not None:
                yield name, whole


def _shapes(placed: Placed) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and types of `policy_weights`."""
    if placed.parallel.alone:
        weights = trained_weights(placed.subject.model, placed.subject.adapters)
        return {name: (tuple(value.shape), value.dtype) for name, value in weights.items()}
    parameters = policy_parameters(placed)
    return {name: (tuple(each.box.global_shape), each.local.dtype) for name, each in parameters.items()}


def _devices(placed: Placed, count: int) -> list[str]:
    """The device of each rollout process: GPUs without a trainer come first."""
    device = next(placed.subject.model.parameters()).device
    if device.type != "cuda":
        return [str(device)] * count
    trainers, gpus = processes_here(placed.parallel.ranks.world.size), torch.cuda.device_count()
    return [f"cuda:{(trainers + number) % gpus}" for number in range(count)]
