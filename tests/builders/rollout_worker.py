"""Answers of a recipe's policy in some layout, as each process of a group sees them, and in one process."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from builders.parallel_steps import config_of
from builders.tiny_run import SyntheticPacks
from danlu.assembly.parallelize import Placed, place, subject_of
from danlu.core.errors import DanluError, ModelError
from danlu.data.batch import collate, pad_to_bucket
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import RolloutEngine
from danlu.inference.ranks import ParallelEngine
from danlu.inference.request import Completion, Request, SamplingOptions
from danlu.inference.sharded_weights import ShardedWeights
from danlu.models import packed_weights
from danlu.models.attend import attend_for
from danlu.models.decoder import Decoder
from danlu.parallel.layout import Layout, layout_of
from danlu.parallel.pipeline import Messages
from danlu.parallel.ranks import Ranks, ranks_of
from danlu.recipe import Recipe, load
from danlu.stages.rollout import rollout_engine

DRAWN = SamplingOptions(temperature=0.9, top_k=40, top_p=0.95, seed=3)
GREEDY = SamplingOptions(temperature=0.0)

REQUESTS = [
    Request(3, (5, 6, 7, 8), GREEDY, max_new_tokens=4),
    Request(0, (9, 8, 7, 6, 5, 4, 3), DRAWN, max_new_tokens=12, samples=3),
    Request(8, (5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22), GREEDY, max_new_tokens=30),
    Request(1, (50,), DRAWN, max_new_tokens=9, top_logprobs=2),
    Request(2, (60, 61), SamplingOptions(temperature=1.0, seed=3), max_new_tokens=2, samples=2),
]
TIGHT: dict[str, Any] = {"cache_gib": 3e-5, "block": 4, "sequences": 2, "batch_tokens": 8}
"""An engine in which answers wait for each other and are preempted."""


@dataclass
class Policy:
    """What is sampled from."""

    placed: Placed
    engine: RolloutEngine


def policy_of(file: str, world: int | None = None) -> Policy:
    """The policy of a recipe as it is placed on this group, or on one process, with an engine over it."""
    torch.set_num_threads(1)
    recipe = load(Path(file)).recipe
    placed = placed_policy(recipe, Ranks() if world == 1 else groups_of(recipe))
    return Policy(placed, rollout_engine(recipe, placed))


def placed_policy(recipe: Recipe, ranks: Ranks) -> Placed:
    """The policy of a recipe on these ranks."""
    device = torch.device("cpu")
    return place(subject_of(recipe, config_of(recipe), device, ranks=ranks), recipe, ranks, device)


def groups_of(recipe: Recipe) -> Ranks:
    """This process in the layout of a recipe."""
    return _groups(layout_of(recipe.parallel, dist.get_world_size()))


@functools.cache
def _groups(layout: Layout) -> Ranks:
    """Groups take longer to make than a tiny model to sample from; the recipes of one layout share them."""
    return ranks_of(layout, "cpu")


def answers(files: Sequence[str], world: int | None = None) -> dict[str, list[Completion]]:
    """All answers to REQUESTS by the policy of each recipe."""
    return {file: policy_of(file, world).engine.generate(REQUESTS) for file in files}


def each_check(files: dict[str, str]) -> dict[str, Any]:
    """The checks below, each on the recipe of its name; what they found."""
    return {name: CHECKS[name.partition(":")[0]](file) for name, file in files.items()}


def difference(seen: list[Completion], wanted: list[Completion]) -> float:
    """How far log-probabilities are apart, in nats; infinity where an answer is another one."""
    if [(each.number, each.sample, each.tokens, each.finish) for each in seen] != [
        (each.number, each.sample, each.tokens, each.finish) for each in wanted
    ]:
        return float("inf")
    pairs = [
        (one, other)
        for a, b in zip(seen, wanted, strict=True)
        for one, other in zip((*a.logprobs, *a.drawn), (*b.logprobs, *b.drawn), strict=True)
    ]
    return max(abs(one - other) for one, other in pairs)


def uneven(file: str) -> Any:
    """One long answer beside many short ones, then a single request, then none at all."""
    engine = policy_of(file).engine
    long = [Request(7, (5, 6), GREEDY, max_new_tokens=40)]
    short = [Request(number, (9, number), GREEDY, max_new_tokens=1) for number in range(4)]
    return [engine.generate([*short, *long]), engine.generate(long), engine.generate([])]


def failing(file: str) -> Any:
    """A prompt that one rank cannot continue, a model that fails on one rank half way, and an answer afterwards."""
    policy = policy_of(file)
    engine, rank = policy.engine, dist.get_rank()
    assert isinstance(engine, ParallelEngine)
    said = [_said(lambda: engine.generate([*REQUESTS, Request(99, (10**6,), GREEDY)]))]
    local: Any = engine.engine
    step, left = local.step, [3]

    def fails_on_the_last_rank() -> list[Completion]:
        left[0] -= 1
        if rank == dist.get_world_size() - 1 and left[0] == 0:
            raise ModelError("not finite at position 9")
        return step()  # type: ignore[no-any-return]

    local.step = fails_on_the_last_rank
    said.append(_said(lambda: engine.generate(REQUESTS)))
    local.step = step
    return said, engine.generate(REQUESTS)


def _said(work: Callable[[], object]) -> str:
    try:
        work()
    except DanluError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def trains_afterwards(file: str) -> Any:
    """Answers after a step whose forward and backward pass follow a rollout; the same step on every rank."""
    policy = policy_of(file)
    policy.engine.generate(REQUESTS)
    model, parallel = policy.placed.subject.model, policy.placed.parallel
    batch = pad_to_bucket(collate([SyntheticPacks().at(0)], torch.device("cpu")), 1)
    hidden = model(batch.tokens, batch.positions, attend_for(batch))
    parallel.prepare_backward(True, 0)
    model.logits(hidden).square().mean().backward()
    parallel.reduce_gradients()
    sharded = any(each.local is not each.parameter for each in parallel.local_parameters.values())
    copies = parallel.ranks.data.size if sharded else 1  # FSDP2 has summed as many equal gradients
    with torch.no_grad():
        for parameter in parallel.local_parameters.values():
            if parameter.local.grad is not None:
                parameter.local.add_(parameter.local.grad, alpha=-5 / copies)
    policy.engine.update(1)
    return policy.engine.generate(REQUESTS)


def weight_copies(file: str) -> Any:
    """Copies of weights that the engine has after a rollout, and after it was put to sleep; then the same as on a CPU
    without packed products."""
    with mock.patch.object(packed_weights, "can_pack", return_value=False):
        unpacked = _weight_copies(file)
    return _weight_copies(file), unpacked


def _weight_copies(file: str) -> tuple[int, int]:
    engine = policy_of(file).engine
    assert isinstance(engine, ParallelEngine) and isinstance(engine.engine, EmbeddedEngine)
    held = engine.engine._runner.packed_weights
    engine.generate(REQUESTS)
    copies = held.copies
    engine.sleep()
    return copies, held.copies


def leaves_early(file: str) -> Any:
    """A rank that has come to its end makes no empty passes while others gather: the mistake that must show."""
    policy = policy_of(file)
    policy.engine.generate(REQUESTS)
    ShardedWeights.empty_pass = lambda weights: None  # type: ignore[method-assign]
    long, short = Request(1, (5, 6), GREEDY, max_new_tokens=40), Request(2, (9,), GREEDY, max_new_tokens=1)
    return policy.engine.generate([long, short])


def of_stages(files: Sequence[str], llama: str, uneven_split: str) -> dict[str, Any]:
    """Answers of two stages to all recipes, what they do wrong with one of them, and the cache that each stage has with
    another: (blocks, bytes). For processes that end with it."""
    seen: dict[str, Any] = {"answers": answers(files), "scored": scored(llama), "mistaken": {}}
    for name, mistake in MISTAKES.items():
        with mistake():
            seen["mistaken"][name] = policy_of(llama).engine.generate(REQUESTS)
    engine = policy_of(uneven_split).engine
    assert isinstance(engine, ParallelEngine) and isinstance(engine.engine, EmbeddedEngine)
    pool = engine.engine._runner.pool
    seen["cache"] = pool.blocks, sum(tensor.nbytes for layer in range(4) for tensor in pool.tensors(layer))
    seen["failed"] = [not_finite_on_the_last_stage(llama), fails_within_a_pass(llama)]
    return seen


def scored(file: str, world: int | None = None) -> list[Completion]:
    """Answers with the log-probabilities of their prompts, which are read in several passes."""
    policy = policy_of(file, world)
    requests = [dataclasses.replace(each, prompt_logprobs=True, top_logprobs=2) for each in REQUESTS]
    return policy.engine.generate(requests)


def not_finite_on_the_last_stage(file: str) -> str:
    """What is said of a weight that is NaN on the stage with the head alone."""
    policy = policy_of(file)
    if policy.placed.subject.model.chunks.has_last:
        with torch.no_grad():
            policy.placed.subject.model.norm.weight.fill_(torch.nan)
    return _said(lambda: policy.engine.generate(REQUESTS))


def fails_within_a_pass(file: str) -> str:
    """What each stage says where the first one has no memory left for a layer; its process ends then."""
    policy = policy_of(file)

    def out_of_memory(*_: object) -> None:
        raise RuntimeError("out of memory")

    if policy.placed.subject.model.chunks.has_first:
        policy.placed.subject.model.layers["0"].register_forward_pre_hook(out_of_memory)
    try:
        policy.engine.generate(REQUESTS)
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    return "nothing"


def _of_the_pass_before() -> AbstractContextManager[Any]:
    """A stage goes on with the hidden states of the pass before, where they are of as many tokens."""
    receive, last = Messages.receive, dict[tuple[int, ...], Any]()

    def received_before(messages: Messages, action: Any, into: Any) -> Callable[[], Any]:
        x = receive(messages, action, into)()
        shape = tuple(x[0].shape)
        before, last[shape] = last.get(shape, x), x
        return lambda: before

    return mock.patch.object(Messages, "receive", received_before)


def _without_the_last_layer() -> AbstractContextManager[Any]:
    """The last chunk of a stage gives back what it was given."""
    forward = Decoder.forward

    def skipped(decoder: Decoder, *args: Any, chunk: int = 0, x: Any = None) -> Any:
        return x if chunk == 2 else forward(decoder, *args, chunk=chunk, x=x)

    return mock.patch.object(Decoder, "forward", skipped)


MISTAKES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "hidden states of the pass before": _of_the_pass_before,
    "a chunk is left out": _without_the_last_layer,
}


CHECKS: dict[str, Callable[[str], Any]] = {
    "uneven": uneven,
    "failing": failing,
    "tight": lambda file: policy_of(file).engine.generate(REQUESTS),
    "trains afterwards": trains_afterwards,
    "weight copies": weight_copies,
}


def gathered_bytes() -> list[list[bytes]]:
    """What all ranks have of bytes of different lengths."""
    group = ranks_of(Layout(shard=2), "cpu").world
    own = [(b"", b""), (b"", b"\x00\xff"), (b"a" * 1000, b"")]
    return [group.all_gather_bytes(each[group.index]) for each in own]
