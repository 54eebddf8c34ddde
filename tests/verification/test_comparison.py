"""Comparing synthetic numbers: equal ones pass, an error is found where it is, and rounding is allowed for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from danlu.core.shard_box import ShardBox
from danlu.recipe import sections
from danlu.verification.comparison import Comparison, compare, module_of, sign_flip_distance
from danlu.verification.trace import AverageTrace, LocalShards, SpoiledStep, StepTrace, Trace, assemble
from danlu.verification.workers import Traces

NAMES = ("embed_tokens.weight", "layers.0.attention.q_proj.weight", "layers.0.mlp_norm.weight", "lm_head.weight")
SHAPES = ((6, 4), (4, 4), (4,), (6, 4))


def tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in zip(NAMES, SHAPES, strict=True)}


def full_shards(values: dict[str, Tensor]) -> LocalShards:
    return {name: (ShardBox.full(value.shape), value.clone()) for name, value in values.items()}


def shard(values: dict[str, Tensor], rank: int) -> dict[str, tuple[ShardBox, Tensor]]:
    """Rows cut in two for matrices, 1-D tensors on both."""
    shards = {}
    for name, value in values.items():
        if value.ndim == 1:
            shards[name] = ShardBox.full(value.shape, replicas=2, is_writer=rank == 0), value.clone()
            continue
        half = value.shape[0] // 2
        start = (rank * half, 0)
        box = ShardBox(tuple(value.shape), start, (half, value.shape[1]))
        shards[name] = box, box.view_of(value).clone()
    return shards


def step(number: int, values: dict[str, Tensor] | None = None, rank: int | None = None) -> StepTrace:
    gradients, weights = tensors(10 * number), values or tensors(10 * number + 1)
    cut = full_shards if rank is None else lambda of: shard(of, rank)
    return StepTrace(2.5 / number, 1.5, 1.0, 100, cut(gradients), cut(weights))


def make_trace(rank: int | None = None) -> Trace:
    trace = Trace([step(1, rank=rank), step(2, rank=rank)], evaluation=2.0)
    cut = full_shards if rank is None else lambda of: shard(of, rank)
    trace.initial_weights = cut(tensors(0))
    trace.next_step = trace.resumed_step = step(3, rank=rank)
    trace.loaded_weights = cut(tensors(21))
    return trace


def make_traces() -> Traces:
    return Traces([make_trace(0), make_trace(1)], make_trace(), make_trace())


def wrong(comparison: Comparison) -> list[tuple[str, str | None]]:
    return [(tensor.stage, tensor.name) for tensor in comparison.compared if not tensor.holds]


def test_what_is_the_same_passes() -> None:
    comparison = compare(make_traces(), 1e-6)
    assert comparison.first_failure() is None
    assert [check.what for check in comparison.checks()] == [
        "first weights",
        "targets",
        "loss",
        "gradients",
        "gradient norm",
        "clipped norm",
        "weights",
        "evaluation",
        "saved weights, loaded",
        "a step after resuming",
    ]
    assert [module.name for module in comparison.modules()] == [
        "embed_tokens",
        "layers.0.attention",
        "layers.0.mlp_norm",
        "lm_head",
    ]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", ["gradients", "weights"])
def test_one_number_that_is_off_is_found_where_it_is(name: str, what: str) -> None:
    traces = make_traces()
    _, value = getattr(traces.by_rank[0].steps[1], what)[name]
    value.view(-1)[0] += 1e-3
    comparison = compare(traces, 1e-6)
    first = comparison.first_failure()
    assert first is not None and (first.stage, first.name) == (f"{what} of step 2", name)
    assert [failure for failure in wrong(comparison) if "checkpoint" not in failure[0]] == [(f"{what} of step 2", name)]
    (module,) = [module for module in comparison.modules() if not module.holds]
    assert module.name == module_of(name)


def test_copies_of_a_part_have_to_be_the_same_to_the_last_bit() -> None:
    traces = make_traces()
    name = "layers.0.mlp_norm.weight"
    _, value = traces.by_rank[1].steps[0].weights[name]
    value[0] = torch.nextafter(value[0], torch.tensor(9.0))
    comparison = compare(traces, 1e-6)
    first = comparison.first_failure()
    assert first is not None and first.ranks == (0, 1) and first.error < 1e-6
    (check,) = [check for check in comparison.checks() if check.what == "weights"]
    assert not check.holds and check.error_text == "copies differ"
    assert wrong(comparison) == [("weights of step 1", name)]


@pytest.mark.parametrize("number", ["loss", "grad_norm", "clipped_norm"])
def test_numbers_are_compared_on_every_rank(number: str) -> None:
    traces = make_traces()
    setattr(traces.by_rank[1].steps[0], number, getattr(traces.by_rank[1].steps[0], number) * 1.001)
    stages = [stage for stage, _ in wrong(compare(traces, 1e-6))]
    assert stages == [{"loss": "loss", "grad_norm": "norm", "clipped_norm": "clipped norm"}[number] + " of step 1"]


def test_numbers_have_to_be_the_same_to_the_last_bit_on_every_rank() -> None:
    traces = make_traces()
    traces.by_rank[1].steps[0].loss *= 1 + 1e-12
    first = compare(traces, 1e-6).first_failure()
    assert first is not None and (first.stage, first.ranks) == ("loss of step 1", (0, 1))
    assert first.error < 1e-6


def test_a_target_more_is_found() -> None:
    traces = make_traces()
    for trace in traces.by_rank:
        trace.steps[1].trained_tokens += 1
    assert wrong(compare(traces, 1e-6)) == [("targets of step 2", None)]


def test_a_rank_without_a_gradient_is_found() -> None:
    traces = make_traces()
    for trace in traces.by_rank:
        trace.steps[0] = replace(
            trace.steps[0], gradients={k: v for k, v in trace.steps[0].gradients.items() if k != NAMES[1]}
        )
    assert wrong(compare(traces, 1e-6)) == [("gradients of step 1", NAMES[1])]


def test_weights_that_are_loaded_are_those_that_were_saved() -> None:
    traces = make_traces()
    traces.by_rank[0].loaded_weights[NAMES[0]][1][0, 0] += 1e-7
    assert wrong(compare(traces, 1e-6)) == [("weights of one process's checkpoint in the layout", NAMES[0])]


def test_a_layout_that_ends_with_numbers_that_are_not_finite_is_wrong_there() -> None:
    traces = make_traces()
    for trace in traces.by_rank:
        trace.steps, trace.hit_non_finite, trace.evaluation, trace.loaded_weights = trace.steps[:1], True, None, {}
    first = compare(traces, 1e-6).first_failure()
    assert first is not None and (first.stage, first.ranks) == ("loss of step 2", None)
    assert wrong(compare(traces, 1e-6)) == [("loss of step 2", None)]


@pytest.mark.parametrize("side", ["layout", "reference"])
def test_a_checkpoint_that_cannot_be_gone_on_from_is_wrong_there(side: str) -> None:
    traces = make_traces()
    for trace in traces.by_rank if side == "layout" else [traces.reference]:
        trace.resumed_step, trace.hit_non_finite = None, True
    whose = {"layout": "one process's checkpoint in the layout", "reference": "the layout's checkpoint in one process"}[
        side
    ]
    assert wrong(compare(traces, 1e-6)) == [(f"a step of {whose}", None)]


def test_copies_that_are_not_finite_alike_do_not_differ() -> None:
    traces = make_traces()
    for trace in traces.by_rank:
        trace.steps[0].gradients["layers.0.mlp_norm.weight"][1][0] = float("nan")
    first = compare(traces, 1e-6).first_failure()
    assert first is not None and first.ranks is None and first.error == float("inf")


NAN = float("nan")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", ["gradients", "weights"])
def test_a_number_that_is_not_finite_is_wrong_on_whichever_sides_it_is(name: str, what: str) -> None:
    """On all sides too: a layout that is as broken as one process has proved nothing."""
    for sides in ((True, False, False), (False, True, True), (True, True, True)):
        traces = make_traces()
        for broken, side in zip(sides, (traces.by_rank, [traces.reference], [traces.perturbed]), strict=True):
            for trace in side if broken else []:
                if name in (parts := getattr(trace.steps[0], what)):
                    parts[name][1].view(-1)[-1] = NAN
        comparison = compare(traces, 1e-6, flip_distance=1e-2)
        assert (f"{what} of step 1", name) in wrong(comparison)
        assert not all(check.holds for check in comparison.checks())


@pytest.mark.parametrize("number", ["loss", "grad_norm", "clipped_norm"])
@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_a_number_that_is_not_finite_on_all_sides_is_wrong(number: str, bad: float) -> None:
    traces = make_traces()
    for trace in (*traces.by_rank, traces.reference, traces.perturbed):
        setattr(trace.steps[0], number, bad)
    stage = {"loss": "loss", "grad_norm": "norm", "clipped_norm": "clipped norm"}[number]
    assert (f"{stage} of step 1", None) in wrong(compare(traces, 1e-6))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", ["gradients", "weights", "loss"])
def test_rounding_that_is_not_finite_allows_nothing(name: str, what: str) -> None:
    """Of the second run by one process: it neither hides a mistake nor makes one of what is right."""
    traces = make_traces()
    first = traces.perturbed.steps[0]
    if what == "loss":
        first.loss = NAN
    else:
        getattr(first, what)[name][1].view(-1)[0] = NAN
    assert wrong(compare(traces, 1e-6)) == []
    for trace in traces.by_rank:
        for shards in (trace.steps[0].weights, trace.steps[1].gradients):
            if name in shards:
                shards[name][1].mul_(1.01)
    assert wrong(compare(traces, 1e-6))[0] == ("weights of step 1", name)
    assert ("gradients of step 2", name) in wrong(compare(traces, 1e-6))


def test_as_much_as_rounding_does_is_allowed() -> None:
    traces = make_traces()
    for parts, share in ((traces.perturbed.steps[0].gradients, 1e-4), (traces.by_rank[0].steps[0].gradients, 4e-4)):
        parts[NAMES[1]][1].mul_(1 + share)
    assert compare(traces, 1e-6).first_failure() is None
    traces.by_rank[0].steps[0].gradients[NAMES[1]][1].mul_(1.01)
    assert wrong(compare(traces, 1e-6)) == [("gradients of step 1", NAMES[1])]


def test_a_turned_update_is_allowed_where_rounding_turns_it() -> None:
    traces = make_traces()
    traces.by_rank[0].steps[0].weights[NAMES[1]][1][0, 0] += 2e-2
    assert wrong(compare(traces, 1e-6)) == [("weights of step 1", NAMES[1])]
    assert compare(traces, 1e-6, flip_distance=2e-2).first_failure() is None
    traces.by_rank[0].steps[0].weights[NAMES[1]][1].add_(0.1)
    assert ("weights of step 1", NAMES[1]) in wrong(compare(traces, 1e-6, flip_distance=2e-2))


def test_only_some_optimizers_turn() -> None:
    assert sign_flip_distance(sections.Lion(learning_rate=1e-3)) == 2e-3
    assert sign_flip_distance(sections.AdamW(learning_rate=1e-3)) == 2e-3
    assert sign_flip_distance(sections.AdamW(learning_rate=1e-3, eps=1e-4)) == 0
    assert sign_flip_distance(sections.SGD(learning_rate=1e-3)) == 0


def test_shards_are_assembled_and_what_no_process_holds_is_refused() -> None:
    values = tensors(5)
    assembled, differing = assemble([shard(values, 0), shard(values, 1)])
    assert not differing and all(torch.equal(assembled[name], values[name]) for name in NAMES)
    with pytest.raises(ValueError, match=r"embed_tokens\.weight: no process holds all of it"):
        assemble([shard(values, 0)])


def test_modules_of_many_layers_are_shown_together() -> None:
    assert module_of("layers.7.attention.q_proj.adapter.default.lora_A") == "layers.7.attention"
    assert module_of("layers.7.attention.q_proj.weight", all_layers=True) == "layers.*.attention"


def with_state() -> Traces:
    """Traces with all that is compared beside steps."""
    traces = make_traces()
    for rank, trace in enumerate([*traces.by_rank, traces.reference, traces.perturbed]):
        cut = full_shards if rank > 1 else lambda of, rank=rank: shard(of, rank)  # type: ignore[misc]
        average = AverageTrace(cut(tensors(5)), 2)
        trace.average = trace.loaded_average = average
        trace.next_average = trace.resumed_average = AverageTrace(cut(tensors(6)), 3)
        trace.counters = trace.loaded_counters = {"steps": 2, "tokens": 200}
        trace.evaluation_metrics = {"nll": 2.0, "accuracy": 0.25}
        trace.steps = [replace(step, metrics={"nll": 2.5, "kl": 0.0}) for step in trace.steps]
        trace.exported = {"model/lm_head.weight": torch.ones(6, 4)} if rank in (0, 2) else None
        trace.spoiled = SpoiledStep("lm_head.weight" if rank == 1 else "", "step 4: in lm_head.weight")
    return traces


def doubled(average: AverageTrace | None) -> AverageTrace:
    assert average is not None
    weights = {
        name: (box, 2 * value if name == "lm_head.weight" else value) for name, (box, value) in average.weights.items()
    }
    return replace(average, weights=weights)


def test_state_that_is_the_same_passes() -> None:
    comparison = compare(with_state(), 1e-6)
    assert comparison.first_failure() is None
    assert comparison.modules()[-1].parameters == 24
    kinds = {tensor.kind for tensor in comparison.compared}
    assert kinds >= {
        "metrics",
        "moving average",
        "counters",
        "saved average, loaded",
        "saved counters, loaded",
        "exported result",
        "gradient not finite",
    }


def metric_of_rank_1(trace: Trace) -> None:
    trace.steps[1] = replace(trace.steps[1], metrics={"nll": 2.5, "kl": 1e-6})


def metric_missing(trace: Trace) -> None:
    trace.evaluation_metrics = {"nll": 2.0}


def average_changed(trace: Trace) -> None:
    trace.average = doubled(trace.average)


def average_counted_anew(trace: Trace) -> None:
    assert trace.loaded_average is not None
    trace.loaded_average = replace(trace.loaded_average, updates=0)


def average_not_loaded(trace: Trace) -> None:
    trace.loaded_average = doubled(trace.loaded_average)


def average_after_resuming(trace: Trace) -> None:
    trace.resumed_average = doubled(trace.resumed_average)


def counted_twice(trace: Trace) -> None:
    trace.counters = {"steps": 2, "tokens": 400}


def begun_anew(trace: Trace) -> None:
    trace.loaded_counters = {"steps": 0, "tokens": 200}


def not_told(trace: Trace) -> None:
    trace.spoiled = SpoiledStep("lm_head.weight", None)


def told_without_name(trace: Trace) -> None:
    trace.spoiled = SpoiledStep("lm_head.weight", "step 4: in its global norm")


def not_saved(trace: Trace) -> None:
    trace.problems["saving"] = "CheckpointError: two files"


def not_loaded(trace: Trace) -> None:
    trace.problems["loading"] = "CheckpointError: it does not fit"


def gap(trace: Trace) -> None:
    box, value = trace.steps[0].gradients["lm_head.weight"]
    there = replace(box, offsets=(box.offsets[0] - 1, 0))
    trace.steps[0] = replace(trace.steps[0], gradients={**trace.steps[0].gradients, "lm_head.weight": (there, value)})


@pytest.mark.parametrize(
    ("mistake", "stage", "name"),
    [
        (metric_of_rank_1, "kl of step 2", None),
        (metric_missing, "accuracy of evaluation", None),
        (average_changed, "average of the last step", "lm_head.weight"),
        (average_counted_anew, "updates of the average of one process's checkpoint in the layout", None),
        (average_not_loaded, "average of one process's checkpoint in the layout", "lm_head.weight"),
        (
            average_after_resuming,
            "average after a step of one process's checkpoint in the layout",
            "lm_head.weight",
        ),
        (counted_twice, "tokens after the last step", None),
        (begun_anew, "steps of one process's checkpoint in the layout", None),
        (not_told, "a gradient that is not finite", "lm_head.weight"),
        (told_without_name, "a gradient that is not finite", "lm_head.weight"),
        (not_saved, "saving", None),
        (not_loaded, "loading one process's checkpoint in the layout", None),
        (gap, "gradients of step 1", "lm_head.weight"),
    ],
)
def test_a_mistake_of_one_process_in_what_surrounds_a_step_is_found(
    mistake: Callable[[Trace], None], stage: str, name: str | None
) -> None:
    traces = with_state()
    mistake(traces.by_rank[1])
    first = compare(traces, 1e-6).first_failure()
    assert first is not None and (first.stage, first.name) == (stage, name)


def test_an_average_that_all_processes_count_anew_is_found() -> None:
    """Processes that agree with each other are compared with one process all the same."""
    traces = with_state()
    for trace in traces.by_rank:
        average_counted_anew(trace)
    first = compare(traces, 1e-6).first_failure()
    assert first is not None and first.stage == "updates of the average of one process's checkpoint in the layout"


def test_each_tensor_of_the_result_has_to_be_the_same_to_the_last_bit() -> None:
    for exported in (
        {"model/lm_head.weight": torch.nextafter(torch.ones(6, 4), torch.tensor(2.0))},
        {},
        {"model/lm_head.weight": torch.ones(4, 6)},
        {"model/lm_head.weight": torch.ones(6, 4), "model/more": torch.ones(1)},
    ):
        traces = with_state()
        traces.by_rank[0].exported = exported
        first = compare(traces, 1e-6).first_failure()
        assert first is not None and first.stage == "exported result"
        assert first.name == ("model/more" if len(exported) > 1 else "model/lm_head.weight")


def test_metrics_may_differ_by_what_rounding_makes_of_them() -> None:
    for off, holds in ((4e-6, True), (4e-3, False)):
        traces = with_state()
        for trace, error in ((traces.by_rank[0], off), (traces.by_rank[1], off), (traces.perturbed, 1e-6)):
            trace.steps = [replace(step, metrics={"nll": 2.5, "kl": error}) for step in trace.steps]
        assert (compare(traces, 1e-6).first_failure() is None) == holds
