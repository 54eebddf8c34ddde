"""The passes of a rollout as the plan follows them, and as the engine's scheduler makes them."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from danlu.inference.blocks import BlockPool, root_digest
from danlu.inference.scheduler import Scheduler
from danlu.inference.sequence_state import SequenceState
from danlu.planning.cache_memory import EngineBounds, PoolSize
from danlu.planning.rollout_lengths import AskedPrompt
from danlu.planning.rollout_passes import PassRun, RolloutPasses

BOUNDS = EngineBounds(sequences=6, batch_tokens=24, block=4, cache_gib=1.0)


@dataclass(frozen=True)
class Pass:
    """One pass: its tokens, the positions behind all chunks added up, and the tokens that are drawn."""

    tokens: int
    stops: int
    draws: int


def scheduled(prompts: list[AskedPrompt], bounds: EngineBounds, pool: PoolSize, *, has_states: bool) -> list[Pass]:
    """The passes of the engine's scheduler, driven as `EmbeddedEngine` does."""
    scheduler = Scheduler(
        BlockPool(pool.blocks),
        block=bounds.block,
        batch_tokens=bounds.batch_tokens,
        running_limit=pool.running,
        has_states=has_states,
    )
    shares = bounds.prefix_sharing and not has_states
    number, ends, branches = 0, dict[int, int](), dict[int, list[int]]()

    def sequence(number: int, tokens: list[int], prompt: int, forks: int) -> SequenceState:
        return SequenceState(number, tokens, prompt, forks, [root_digest(None, 0)] if shares else None)

    for place, prompt in enumerate(prompts):
        text = [1000 * place + position for position in range(prompt.tokens)]
        for sample, length in enumerate(prompt.answers):
            ends[number + sample] = prompt.tokens + length
        branches[number] = list(range(number + 1, number + len(prompt.answers)))
        scheduler.add(sequence(number, text, prompt.tokens, len(prompt.answers) - 1))
        number += len(prompt.answers)
    passes = []
    while scheduler.sequences:
        plan = scheduler.plan()
        drawn = [scheduler.sequences[chunk.sequence] for chunk in plan.chunks]
        drawn = [each for each, chunk in zip(drawn, plan.chunks, strict=True) if chunk.stop == len(each.tokens)]
        tokens = sum(chunk.stop - chunk.start for chunk in plan.chunks)
        draws = len(drawn) + sum(len(branches.get(each.number, ())) for each in drawn)
        passes.append(Pass(tokens, sum(chunk.stop for chunk in plan.chunks), draws))
        for each in drawn:
            each.tokens.append(-1 - each.number)
        scheduler.commit(plan)
        for parent in list(drawn):
            children = [
                sequence(child, [*parent.tokens[: parent.prompt_length], -1 - child], parent.prompt_length, 0)
                for child in branches.pop(parent.number, ())
            ]
            if children:
                scheduler.fork(parent, children)
                drawn += children
        for each in drawn:
            if len(each.tokens) >= ends[each.number]:
                scheduler.remove(each)
    return passes


def one_by_one(runs: list[PassRun]) -> list[Pass]:
    """Each pass of some runs."""
    return [
        Pass(run.tokens, run.keys + number * run.growing + sum(stop for _, stop in run.chunks), run.draws)
        for run in runs
        for number in range(run.passes)
    ]


def some_prompts(rng: random.Random, most: int) -> list[AskedPrompt]:
    return [
        AskedPrompt(rng.randint(1, 30), tuple(rng.randint(1, most) for _ in range(rng.randint(1, 5))))
        for _ in range(rng.randint(1, 6))
    ]


@pytest.mark.parametrize("seed", range(4))
def test_passes_are_those_of_the_scheduler(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(25):
        prompts, has_states = some_prompts(rng, 40), rng.random() < 0.3
        bounds = replace(BOUNDS, batch_tokens=rng.randint(8, 40), block=rng.randint(1, 5))
        bounds = replace(bounds, prefix_sharing=rng.random() < 0.7, sequences=rng.randint(1, 8))
        pool = PoolSize(blocks=2000, slots=0, running=bounds.sequences, host_blocks=0)
        followed = RolloutPasses(prompts, bounds, pool, has_states)
        runs = [*followed.runs()]
        assert one_by_one(runs) == scheduled(prompts, bounds, pool, has_states=has_states), f"{prompts} {bounds}"
        assert followed.preemptions == 0
        drawn = sum(run.passes * run.draws for run in runs)
        assert drawn == sum(length for prompt in prompts for length in prompt.answers)
    wider = replace(bounds, sequences=bounds.sequences + 3)  # control: the limits matter
    longer = [AskedPrompt(9, (30, 20, 10)), AskedPrompt(9, (30, 20, 10, 7, 5, 2, 9, 10, 11, 12))]
    others = RolloutPasses(longer, wider, replace(pool, running=wider.sequences))
    assert one_by_one([*others.runs()]) != scheduled(longer, bounds, pool, has_states=False)


@pytest.mark.parametrize("prefix_sharing", [True, False])
def test_answers_that_make_room_are_read_again_as_the_scheduler_has_it(prefix_sharing: bool) -> None:
    rng = random.Random(1)
    bounds = EngineBounds(64, 256, 16, 1.0, prefix_sharing=prefix_sharing)
    prompts = [
        AskedPrompt(rng.randint(40, 200), tuple(min(300, int(rng.lognormvariate(4.5, 0.6)) + 1) for _ in range(8)))
        for _ in range(4)
    ]
    needed = sum(-(-(prompt.tokens + tokens) // 16) for prompt in prompts for tokens in prompt.answers)
    roomy = PoolSize(needed, 0, 64, 0)
    tight = replace(roomy, blocks=needed // 6)
    followed = RolloutPasses(prompts, bounds, tight)
    passes = one_by_one([*followed.runs()])
    assert passes == scheduled(prompts, bounds, tight, has_states=False)
    assert followed.preemptions > 10
    assert passes != one_by_one([*RolloutPasses(prompts, bounds, roomy).runs()])  # control: room matters


def test_work_follows_from_the_answers_and_not_from_their_tokens() -> None:
    prompts = [AskedPrompt(100, (5000, 7000, 9000, 9000))]
    runs = [*RolloutPasses(prompts, EngineBounds(8, 64, 16, 1.0), PoolSize(10_000, 0, 8, 0)).runs()]
    assert [run.passes for run in runs] == [1, 1, 4999, 2000, 2000]
    assert [run.growing for run in runs] == [0, 0, 4, 3, 2]
    assert [run.chunks for run in runs[:3]] == [((0, 64),), ((64, 100),), ()]
    assert [run.longest for run in runs[2:]] == [101, 5100, 7100]
