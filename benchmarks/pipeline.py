"""Bubbles of pipeline schedules as they run, beside the formulas, and activations in flight beside what is promised.

    python benchmarks/pipeline.py [--quick] [--only sleeping|decoder] [--kinds 1f1b zbv] [--stages 2 4] [--unit-ms 50]
                                  [--rounds 3] [--real-time] [--timelines FOLDER]

One gloo process a stage, with the executor and the messages of a run. A bubble is idle time over busy time, from the
first pass of any rank to the last one; a figure is the median over rounds, each a step, after one that warms up.

sleeping  Two cores cannot run four stages, so chunks sleep: forward pass, input gradient and weight gradient one unit
          each, a backward pass that is not split two. Messages are a few bytes. `error` is measured less formula, with
          what is allowed in brackets: a tenth of the formula, and 0.02 at least. `within` is the longest idle time
          between a rank's own first and last pass, over its busy time: 0 in zbv. `in flight` counts, by rank, the
          (chunk, micro-batch) pairs whose activations were alive at once, as objects that autograd and the queue of
          weight gradients keep; where one differs from the formula the exit status is 1. With --real-time (Linux, as
          root) the scheduler prefers these processes, which hardly use a core but would wait for one on a busy machine.
decoder   A decoder of 8 layers on two processes of one thread each, beside a simulation of the same lists with the mean
          times of the same step, where messages take no time, and beside the formula, which holds for equal times.

With --timelines the last step of each case is written as a run's timeline is, which `danlu schedule --run` reads.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from local_processes import in_group
from pass_times import PassTimes, TimedLearner
from pipeline_case import Case
from sleeping_chunks import WIDTH, SleepingLearner

from danlu.assembly.parallelize import place, subject_of
from danlu.core.types import Pack, Sample, Totals
from danlu.models.presets import from_scratch
from danlu.parallel.layout import Layout, layout_of
from danlu.parallel.parallel_context import ParallelContext
from danlu.parallel.pipeline import Pipeline
from danlu.parallel.ranks import Ranks, ranks_of
from danlu.parallel.schedules import chunks_per_rank
from danlu.planning.pipeline_simulation import bubble, bubble_formula
from danlu.recipe import Recipe, sections
from danlu.stages.builder import placed_decoder
from danlu.stages.table import STAGES
from danlu.training.executor import AnyLearner, Executor
from danlu.training.learner import StepItems
from danlu.training.step import accumulate

KINDS = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev")
SLEEPING_MICRO_BATCHES = (4, 8, 16)
DECODER: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
WORDS, LENGTH, DECODER_STAGES, DECODER_MICRO_BATCHES = 1024, 256, 2, 8


def sleeping_cases(
    kinds: Sequence[str], micro_batches: Sequence[int], unit_s: float, rounds: int, real_time: bool
) -> list[Case]:
    """Every schedule on as many stages as there are processes, each of which calls this."""
    if real_time:  # threads of the process groups that are made from here on have it too
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    ranks, times, cases = ranks_of(Layout(pipeline=dist.get_world_size()), "cpu"), PassTimes(), []
    for kind in kinds:
        for count in micro_batches:
            if bubble_formula(kind, ranks.pipeline.size, chunks_per_rank(kind), count)[1] is None:
                continue  # zbv and dualpipev of fewer than 2p
            cases.append(_sleeping_case(ranks, times, kind, count, unit_s, rounds))
            if ranks.leads:
                _print_sleeping(cases[-1])
    return cases


def _sleeping_case(ranks: Ranks, times: PassTimes, kind: str, count: int, unit_s: float, rounds: int) -> Case:
    pipeline = Pipeline(kind, chunks_per_rank(kind), ranks.pipeline, ranks.downstream, ranks.upstream)
    learner = SleepingLearner(ParallelContext(ranks, pipeline=pipeline), unit_s)
    timed, actions = cast(AnyLearner, TimedLearner(learner, times)), pipeline.actions(count)
    tensors, micro_batches = cast(Any, list(torch.ones(count, WIDTH))), [[number] for number in range(count)]
    items = StepItems(tensors, micro_batches, Totals.of([]), step=1)
    steps = times.of_steps(ranks, actions, lambda number: Executor(timed, items).run(actions), rounds)
    for chunk, weight in learner.weights.items():
        passes = torch.full((WIDTH,), float(count * (rounds + 1)))
        assert weight.grad is not None and torch.equal(weight.grad, passes), f"gradients of chunk {chunk} are missing"
    return Case(kind, pipeline.stages.size, count, steps, tuple(ranks.world.all_gather_objects(learner.in_flight.peak)))


def _print_sleeping(case: Case) -> None:
    error, allowed = case.measured - case.formula, max(0.1 * case.formula, 0.02)
    mark = " " if abs(error) <= allowed else "!"
    counts, promised = (" ".join(map(str, each)) for each in (case.in_flight, case.promised_in_flight))
    print(
        f"{case.kind:11} {case.stages}  {case.micro_batches:2}  {case.measured:8.4f}  {case.formula:7.4f}  "
        f"{error:+.4f} ({allowed:.4f}){mark}  {case.within:6.4f}  {counts} / {promised}",
        flush=True,
    )


def decoder_cases(kinds: Sequence[str], rounds: int) -> list[Case]:
    """A decoder on as many stages as there are processes, each of which calls this."""
    times, cases = PassTimes(), []
    for kind in kinds:
        cases.append(_decoder_case(times, kind, rounds))
        if dist.get_rank() == 0:
            _print_decoder(cases[-1])
    return cases


def _decoder_case(times: PassTimes, kind: str, rounds: int) -> Case:
    device, count = torch.device("cpu"), DECODER_MICRO_BATCHES
    config = from_scratch(
        sections.Model(config=DECODER | {"max_position_embeddings": LENGTH}, tokenizer="none"), WORDS, 1, 2
    )
    recipe = Recipe.model_validate(
        {
            "stage": "pretrain",
            "model": {"config": {}, "tokenizer": "none"},
            "data": {"train": [{"path": "none"}], "max_length": LENGTH},
            "parallel": {"pipeline": {"stages": dist.get_world_size(), "schedule": kind}},
            "precision": "fp32",
            "output": "none",
        }
    )
    ranks = ranks_of(layout_of(recipe.parallel, dist.get_world_size()), "cpu")
    placed = place(subject_of(recipe, config, device, ranks=ranks), recipe, ranks, device)
    learner = placed_decoder(recipe, STAGES[recipe.stage], placed, config, device).learner(1)
    timed, packs = cast(AnyLearner, TimedLearner(learner, times)), _packs(count)

    def step(number: int) -> None:
        accumulate(timed, packs, step=number, clip=1.0)
        learner.model.zero_grad()

    steps = times.of_steps(ranks, learner.parallel.actions(count), step, rounds)
    return Case(kind, ranks.pipeline.size, count, steps)


def _packs(count: int) -> list[Pack]:
    """Each one document of random tokens."""
    random, weights = np.random.default_rng(0), np.ones(LENGTH, dtype=np.float32)
    weights[0] = 0
    return [
        Pack((Sample(random.integers(0, WORDS, LENGTH).astype(np.int32), weights, f"row {number}"),))
        for number in range(count)
    ]


def _print_decoder(case: Case) -> None:
    ratios = [bubble(events).ratio for events in case.steps]
    seconds = statistics.median(max(event.end_s for event in events) for events in case.steps)
    print(
        f"{case.kind:11} {case.stages}  {case.micro_batches:2}  {case.measured:.4f} ({min(ratios):.4f} to "
        f"{max(ratios):.4f})  {case.simulated:9.4f}  {case.formula:7.4f}  {seconds:7.3f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 micro-batches alone, one round")
    parser.add_argument("--only", choices=["sleeping", "decoder"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4], help="of chunks that sleep")
    parser.add_argument("--unit-ms", type=float, default=50.0)
    parser.add_argument("--rounds", type=int, default=3, help="of the decoder four more")
    parser.add_argument("--real-time", action="store_true")
    parser.add_argument("--timelines", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    rounds, cases = 1 if options.quick else options.rounds, list[Case]()
    if options.only != "decoder":
        print(f"chunks that sleep {options.unit_ms:g} ms in each pass; medians of {rounds} steps\n")
        print("schedule    p   m  measured  formula  error (allowed)    within  in flight by rank / formula")
        for stages in options.stages:
            counts = (8,) if options.quick else SLEEPING_MICRO_BATCHES
            arguments = options.kinds, counts, options.unit_ms / 1000, rounds, options.real_time
            cases += in_group(sleeping_cases, stages, *arguments)[0]
    if options.only != "sleeping":
        rounds = 1 if options.quick else options.rounds + 4
        print(f"\na decoder with {LENGTH} tokens in a micro-batch; medians of {rounds} steps (lowest to highest)\n")
        print("schedule    p   m  measured                   simulated  formula  step, s")
        cases += in_group(decoder_cases, DECODER_STAGES, options.kinds, rounds)[0]
    if options.timelines is not None:
        for case in cases:
            case.write(options.timelines)
    if differing := [case.shape for case in cases if case.differs_in_flight]:
        raise SystemExit(f"activations in flight differ from the formula: {differing}")


if __name__ == "__main__":
    main()
