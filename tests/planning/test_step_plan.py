"""The figures that follow from a plan of a step."""

from __future__ import annotations

from dataclasses import replace

from danlu.core.memory_parts import MemoryParts
from danlu.parallel.layout import Layout
from danlu.planning.step_plan import RankMemory, StagePlan, StepPlan, StepSeconds

PARTS = MemoryParts(weights=10, adapter=0, gradients=10, optimizer=20, average=0, activations=5, logits=1)


def _stage(kv_cache: int) -> StagePlan:
    return StagePlan(RankMemory(PARTS, {"policy": 10}, kv_cache=kv_cache, communication=2), ())


def test_a_plan_gives_speed_and_hours() -> None:
    seconds = StepSeconds({"product": 1.5}, {}, exposed=0.5, bubble=0.0, total=2.0)
    plan = StepPlan(Layout(shard=4), 1, 2, (_stage(0), _stage(7)), seconds, tokens=4000, flops=16_000)
    assert plan.worst.memory.allocated == 46 + 7 + 2
    assert plan.tokens_per_s == 2000
    assert plan.mfu(peak=10_000) == 16_000 / (2.0 * 4 * 10_000)
    assert plan.hours(tokens=4000 * 1800 - 1) == 1.0, "a last step that is not full takes as long"
    unknown = replace(plan, seconds=None)
    assert unknown.tokens_per_s is unknown.mfu(10_000) is unknown.hours(1) is None
