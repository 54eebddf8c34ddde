"""A stem that answers share beside one repeated for each: time of forward and backward, in one process, interleaved.

    python benchmarks/shared_stem.py [--cases pairs groups] [--model small] [--rounds 9] [--threads 2]

The learner of a run takes a micro-batch of DPO with the reference's log-probabilities in a column, in bf16, on random
tokens: pairs of answers of 64 tokens behind a prompt of 512, and other shapes. A figure is the median over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch
from sft import SHAPES

from danlu.core.types import Branch, Pack, Sample
from danlu.data.trees import repeat_stem
from danlu.models.hf_config import read_config_values
from danlu.models.initialize import initialize
from danlu.models.loading import build
from danlu.objectives.preference import preference_objective
from danlu.recipe.sections import Sigmoid
from danlu.stages.learner import DecoderLearner
from danlu.stages.preference import REFERENCE, ColumnLogprobs
from danlu.stages.roles import StoredOutputs


@dataclass(frozen=True)
class Case:
    """Rows of a micro-batch."""

    stem: int  # tokens of each prompt
    answers: int  # behind each
    tokens: int  # of each answer
    rows: int


CASES = {
    "pairs": Case(512, 2, 64, rows=1),
    "four pairs": Case(512, 2, 64, rows=4),
    "long answers": Case(512, 2, 512, rows=1),
    "short prompts": Case(64, 2, 64, rows=4),
    "long prompts": Case(2048, 2, 64, rows=1),
    "groups": Case(512, 8, 64, rows=1),
}


def row(case: Case, vocabulary: int, seed: int) -> Sample:
    random = np.random.default_rng(seed)
    ends = [case.stem + case.tokens * answer for answer in range(case.answers + 1)]
    branches = (Branch(-1, 0, case.stem), *(Branch(0, end, end + case.tokens) for end in ends[:-1]))
    weights = (np.arange(ends[-1]) >= case.stem).astype(np.float32)
    labels = [np.nan, *(1 - answer % 2 for answer in range(case.answers))]
    reference = -10 * random.random(ends[-1]).astype(np.float32)
    return Sample(
        random.integers(0, vocabulary, ends[-1]).astype(np.int32), weights, f"row {seed}", "", branches,
        {REFERENCE: reference}, {"label": np.array(labels, np.float32)},
    )  # fmt: skip


def step_s(learner: DecoderLearner, items: list[Pack]) -> float:
    start = time.perf_counter()
    learner.losses(learner.collate(items), learner.totals(items)).total.backward()
    seconds = time.perf_counter() - start
    learner.model.zero_grad()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--model", default="small", choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096}
    values = {"model_type": "llama", **heads, "tie_word_embeddings": False, **SHAPES[options.model]}
    config = read_config_values(values, where=options.model)
    model = build(config)
    initialize(model, 0)
    objective = preference_objective((Sigmoid(),), has_reference=True)
    roles = {REFERENCE: StoredOutputs(ColumnLogprobs)}
    learner = DecoderLearner(model, model, torch.device("cpu"), torch.bfloat16, 1, objective, roles=roles)
    print("| rows | prompt | answers | shared, ms | repeated, ms | ratio |\n|---|---|---|---|---|---|")
    for case in (CASES[name] for name in options.cases):
        samples = [row(case, config.vocab_size, seed) for seed in range(case.rows)]
        shared = [Pack((sample,)) for sample in samples]
        repeated = [Pack((repeat_stem(sample),)) for sample in samples]
        times = [(step_s(learner, shared), step_s(learner, repeated)) for _ in range(options.rounds + 1)][1:]
        medians = [statistics.median(column) * 1e3 for column in zip(*times, strict=True)]
        print(
            f"| {case.rows} | {case.stem} | {case.answers} x {case.tokens} | {medians[0]:.0f} | {medians[1]:.0f} "
            f"| {medians[1] / medians[0]:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
