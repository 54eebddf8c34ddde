"""Context parallelism: peak memory of a rank and time of a token as a document gets longer; packed beside padded.

    python benchmarks/context.py [--sizes 1 2 4] [--methods ring gather ulysses] [--lengths 2048 4096 8192 16384]
                                 [--packed-tokens 8192] [--rounds 3] [--only lengths|packing]

Gloo processes of one thread each on this machine; a step is forward and backward passes of one packed sequence with the
sum of its gradients over context ranks, in float32, on a decoder of 4 layers of width 256. `peak` is the most that
tensors made in a step took at once on the fullest rank, gradients among them; weights are there besides. Times are
those of the slowest rank, over the real tokens of the whole sequence; medians over rounds behind one that warms up.
One process has one core, and two share two. So do four: their time of a token is of the whole machine, and not what
four machines would take. `core` is the time of cores that all ranks together took, which other work on the machine
changes less. Ratios are to the first of --sizes, whose loss every layout must have, or the exit status is 1.

lengths  one document, by its length.
packing  the same number of real tokens as one document; as documents of 32 to 1024 tokens end to end (packed); and each
         of these filled up to the longest with tokens that have no targets (padded); with the first of --methods.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from local_processes import in_group
from recompute import Live

from danlu.assembly.parallelize import place, subject_of
from danlu.core.types import Pack, Sample
from danlu.models.presets import from_scratch
from danlu.parallel.layout import layout_of
from danlu.parallel.ranks import ranks_of
from danlu.recipe import Recipe, sections
from danlu.stages.builder import placed_decoder
from danlu.stages.table import STAGES
from danlu.training.step import accumulate

WORDS = 2048
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
SHORTEST, LONGEST = 32, 1024  # documents that are packed
TOLERANCE = 1e-5  # of losses in float32, relative


@dataclass(frozen=True)
class Result:
    """What one layout needed for a step of one packed sequence."""

    peak_bytes: int
    seconds: float
    core_seconds: float  # of all threads of a process
    loss: float


def steps_of(size: int, method: str, packs: dict[str, Pack], rounds: int) -> dict[str, Result]:
    """Steps of each packed sequence on as many context ranks as there are processes, each of which calls this."""
    longest = max(pack.tokens for pack in packs.values())
    recipe = Recipe.model_validate(
        {
            "stage": "pretrain",
            "model": {"config": {}, "tokenizer": "none"},
            "data": {"train": [{"path": "none"}], "max_length": longest},
            "parallel": {"context": {"size": size, "method": method}},
            "precision": "fp32",
            "output": "none",
        }
    )
    config = from_scratch(
        sections.Model(config=CONFIG | {"max_position_embeddings": longest}, tokenizer="none"), WORDS, 1, 2
    )
    device, ranks = torch.device("cpu"), ranks_of(layout_of(recipe.parallel, dist.get_world_size()), "cpu")
    placed = place(subject_of(recipe, config, device, ranks=ranks), recipe, ranks, device)
    learner = placed_decoder(recipe, STAGES[recipe.stage], placed, config, device).learner(1)
    learner = replace(learner, activations=None)  # not counted by their bytes, which takes time
    weights = [*learner.model.parameters(), *learner.model.buffers()]
    results = {}
    for name, pack in packs.items():

        def step(pack: Pack = pack) -> float:
            loss = accumulate(learner, [pack], step=1, clip=1.0).loss
            learner.model.zero_grad()
            return loss

        with Live(weights) as live:
            loss = step()
        times = [_times(step) for _ in range(rounds)]
        seconds, core_seconds = (statistics.median(each) for each in zip(*times, strict=True))
        results[name] = Result(live.peak_bytes, seconds, core_seconds, loss)
    return results


def _times(step: Callable[[], float]) -> tuple[float, float]:
    """Seconds of a step, and those of cores that this process took."""
    dist.barrier()
    start, core_start = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - start, time.process_time() - core_start


def document(random: np.random.Generator, tokens: int, padding: int = 0) -> Sample:
    """Random tokens, each a target but the first; behind them `padding` tokens that are none."""
    weights = np.zeros(tokens + padding, dtype=np.float32)
    weights[1:tokens] = 1
    return Sample(random.integers(0, WORDS, tokens + padding).astype(np.int32), weights, "random")


def packing_cases(tokens: int) -> dict[str, Pack]:
    """So many real tokens as one document, as short ones, and as short ones that are filled up to the longest."""
    random, lengths = np.random.default_rng(0), list[int]()
    while sum(lengths) < tokens:
        drawn = int(np.exp(random.uniform(np.log(SHORTEST), np.log(LONGEST))))
        lengths.append(min(drawn, tokens - sum(lengths)))
    return {
        "one": Pack((document(random, tokens),)),
        "packed": Pack(tuple(document(random, length) for length in lengths)),
        "padded": Pack(tuple(document(random, length, max(lengths) - length) for length in lengths)),
    }


def measure(sizes: Sequence[int], methods: Sequence[str], packs: dict[str, Pack], rounds: int) -> bool:
    """Prints a row for each sequence and layout; whether some layout's loss is not that of the first size."""
    differs, firsts = False, dict[str, Result]()
    for size in sizes:
        for method in methods if size > 1 else methods[:1]:
            by_rank = in_group(steps_of, size, size, method, packs, rounds)
            for name, pack in packs.items():
                real = pack.targets + len(pack.samples)  # the first token of a document is none
                of_rank: list[Result] = [results[name] for results in by_rank]
                peak, seconds = max(each.peak_bytes for each in of_rank), max(each.seconds for each in of_rank)
                core_seconds = sum(each.core_seconds for each in of_rank)
                result = Result(peak, seconds, core_seconds, of_rank[0].loss)
                first = firsts.setdefault(name, result)
                is_same = abs(result.loss - first.loss) <= TOLERANCE * abs(first.loss)
                differs |= not is_same
                print(
                    f"{size}  {method if size > 1 else '':8} {name:>8} {real:6} {pack.tokens:6}  "
                    f"{peak / 2**20:7.1f} ({peak / first.peak_bytes:.2f})  "
                    f"{1e6 * seconds / real:7.1f} ({seconds / first.seconds:.2f})  "
                    f"{1e6 * core_seconds / real:7.1f} ({core_seconds / first.core_seconds:.2f})  "
                    f"{result.loss:.6f}{'' if is_same else ' differs'}",
                    flush=True,
                )
    return differs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument(
        "--methods", nargs="+", choices=["ring", "gather", "ulysses"], default=["ring", "gather", "ulysses"]
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--packed-tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["lengths", "packing"])
    options = parser.parse_args()
    header = "N  method       case   real computed  peak, MiB (ratio)  us/token (ratio)  core us/token (ratio)  loss"
    differs = False
    if options.only != "packing":
        print(f"one document, by its length; medians of {options.rounds}\n\n{header}")
        random = np.random.default_rng(0)
        packs = {str(length): Pack((document(random, length),)) for length in options.lengths}
        differs |= measure(options.sizes, options.methods, packs, options.rounds)
    if options.only != "lengths":
        print(f"\n{options.packed_tokens} real tokens; medians of {options.rounds}\n\n{header}")
        differs |= measure(options.sizes, options.methods[:1], packing_cases(options.packed_tokens), options.rounds)
    if differs:
        raise SystemExit(f"a layout has another loss than context {options.sizes[0]}")


if __name__ == "__main__":
    main()
