"""`numerics: exact` beside `fast`: what it costs in training and decoding, and the gap that each leaves.

    python benchmarks/numerics.py [--model tiny small] [--precision fp32 bf16] [--rounds 5] [--threads 2]

A step is forward and backward over 2048 tokens in documents of 256, without the optimizer; decoding continues prompts
of 64 tokens by 64, for 1, 8 and 32 sequences. Both take turns in one process; a figure is the median over rounds. The
gap is that between the log-probabilities of a trainer and those recorded with sampled answers (temperature 0.7), in
nats. Prints a JSON object a case.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch

from danlu.core.types import Pack, Sample
from danlu.data.batch import collate
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import EngineOptions
from danlu.inference.logprob_gap import rollout_gap
from danlu.inference.request import Completion, Request, SamplingOptions
from danlu.models.decoder import Decoder
from danlu.models.hf_config import read_config_values
from danlu.models.initialize import initialize
from danlu.models.loading import build
from danlu.models.presets import PRESETS
from danlu.numerics.batch_invariant import batch_invariant
from danlu.stages.learner import DecoderLearner

VOCABULARY = {"tiny": 4096, "small": 32000}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NUMERICS = ("fast", "exact")
TOKENS, DOCUMENT, PROMPT, ANSWER = 2048, 256, 64, 64
SEQUENCES = (1, 8, 32)


def document(tokens: list[int], prompt: int) -> Sample:
    """A row whose tokens behind the prompt are trained."""
    return Sample(np.int32(tokens), (np.arange(len(tokens)) >= prompt).astype(np.float32), "row")


def random_tokens(name: str, count: int, seed: int) -> list[int]:
    """So many tokens of the model's vocabulary."""
    tokens: list[int] = np.random.default_rng(seed).integers(0, VOCABULARY[name], count).tolist()
    return tokens


class Case:
    """A model in one precision, with what is done with it by either numerics."""

    def __init__(self, name: str, precision: str) -> None:
        self.name, self.dtype = name, DTYPES[precision]
        self.model: Decoder = build(read_config_values({**PRESETS[name], "vocab_size": VOCABULARY[name]}))
        initialize(self.model, 0)

    def step(self, exact: bool) -> None:
        """Forward and backward."""
        rows = [document(random_tokens(self.name, DOCUMENT, seed), 1) for seed in range(TOKENS // DOCUMENT)]
        learner = self._learner(exact)
        learner.losses(collate([Pack(tuple(rows))]), learner.totals([Pack(tuple(rows))])).total.backward()
        self.model.zero_grad(set_to_none=True)

    def decode(self, sequences: int, exact: bool) -> tuple[list[Request], list[Completion]]:
        """Answers of full length."""
        sampling = SamplingOptions(temperature=0.7)
        asked = [
            Request(number, tuple(random_tokens(self.name, PROMPT, number)), sampling, ANSWER)
            for number in range(sequences)
        ]
        engine = EmbeddedEngine(self.model, EngineOptions(exact=exact, cache_gib=0.5), dtype=self.dtype)
        return asked, engine.generate(asked)

    def gap(self, exact: bool) -> dict[str, float]:
        """Between a trainer and a rollout."""
        asked, completions = self.decode(8, exact)
        rows = [document([*one.prompt, *two.tokens], PROMPT) for one, two in zip(asked, completions, strict=True)]
        outputs = self._learner(exact).outputs(collate([Pack(tuple(rows))]), 1.0)["policy"]
        trainer = outputs.logprobs(temperature=0.7).logprobs.detach().view(len(asked), ANSWER).tolist()
        gap = rollout_gap(completions, trainer)
        return {"largest": gap.largest, "mean": gap.mean}

    def _learner(self, exact: bool) -> DecoderLearner:
        return DecoderLearner(self.model, self.model, torch.device("cpu"), self.dtype, 1, exact=exact)


def medians(work: Callable[[bool], Any], rounds: int) -> dict[str, float]:
    """Seconds with either numerics, which take turns, and how many times as long exact takes."""
    seconds: dict[str, list[float]] = {name: [] for name in NUMERICS}
    for _ in range(rounds + 1):
        for name in NUMERICS:
            with batch_invariant() if name == "exact" else nullcontext():
                start = time.perf_counter()
                work(name == "exact")
                seconds[name].append(time.perf_counter() - start)
    fast, exact = (statistics.median(seconds[name][1:]) for name in NUMERICS)
    return {"fast_s": round(fast, 4), "exact_s": round(exact, 4), "ratio": round(exact / fast, 2)}


def main() -> None:
    """All cases, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=VOCABULARY, default=list(VOCABULARY))
    parser.add_argument("--precision", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name in arguments.model:
        for precision in arguments.precision:
            case = Case(name, precision)
            result: dict[str, Any] = {"model": name, "precision": precision}
            for numerics in NUMERICS:
                with batch_invariant() if numerics == "exact" else nullcontext():
                    result[f"gap_{numerics}"] = case.gap(numerics == "exact")
            result["step"] = medians(case.step, arguments.rounds)
            for sequences in SEQUENCES:
                result[f"decode_{sequences}"] = medians(partial(case.decode, sequences), arguments.rounds)
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
