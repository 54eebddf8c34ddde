"""Decoding in a form: tokens per second with a grammar over those without, and without one over those of another tree.

    python benchmarks/structured_outputs.py TOKENIZER                  # with and without a schema of 20 keys, by turns
    python benchmarks/structured_outputs.py TOKENIZER --plain          # without: seconds of each round
    python benchmarks/structured_outputs.py TOKENIZER --before TREE    # pairs of this tree and another one, without

A random model with a vocabulary of 151,936 and the width of Qwen2.5-0.5B, of a few layers: fewer layers leave the
grammar a larger share of the time. TOKENIZER is a folder with a byte-level BPE tokenizer, which is given tokens of two
of its own each until it has as many. Seconds are of the wall clock and of the processor: the latter where other
programs run on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import EngineOptions
from danlu.inference.request import Request, SamplingOptions
from danlu.models.decoder import Decoder
from danlu.models.loading import load

VOCABULARY = 151_936
KEYS = 20


def random_model(folder: Path, layers: int) -> Decoder:
    """A Qwen2 with random weights, saved by transformers."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return load(folder)


def wide_tokenizer(source: Path, folder: Path) -> Any:
    """A tokenizer with more tokens: each new one is two others, joined by a merge."""
    from transformers import AutoTokenizer

    from danlu.data.tokenizer import load_tokenizer

    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    values = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary, merges = values["model"]["vocab"], values["model"]["merges"]
    parts = [token for token in vocabulary if token.isalpha() and token.isascii()]
    chance, size = random.Random(0), max(vocabulary.values()) + 1
    while size < VOCABULARY - 300:
        left, right = chance.choice(parts), chance.choice(parts)
        if left + right not in vocabulary:
            vocabulary[left + right] = size
            merges.append([left, right] if isinstance(merges[0], list) else f"{left} {right}")
            size += 1
    (folder / "tokenizer.json").write_text(json.dumps(values), encoding="utf-8")
    return load_tokenizer(str(folder))


def schema() -> dict[str, Any]:
    """An object of 20 keys of all kinds."""
    kinds: list[dict[str, Any]] = [
        {"type": "string"},
        {"type": "integer"},
        {"enum": ["red", "green", "blue"]},
        {"type": "array", "items": {"type": "string"}},
        {"type": "boolean"},
    ]
    properties = {f"key_{number}": kinds[number % len(kinds)] for number in range(KEYS)}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def seconds(engine: EmbeddedEngine, batch: int, tokens: int, first: int, **values: Any) -> tuple[float, float]:
    """Wall and processor seconds of answers of so many tokens."""
    requests = [
        Request(first + number, (5, 6, 7 + number), SamplingOptions(), tokens, **values) for number in range(batch)
    ]
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    answers = engine.generate(requests)
    taken = time.perf_counter() - wall_s, time.process_time() - cpu_s
    assert all(len(answer.tokens) == tokens for answer in answers), "an answer ended early"
    return taken


def plain_rounds(engine: EmbeddedEngine, tokens: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    seconds(engine, 1, 4, 10**6)
    return {
        str(batch): [seconds(engine, batch, tokens, 1000 * number + batch) for number in range(rounds)]
        for batch in (1, 32)
    }


def compare_trees(arguments: argparse.Namespace) -> None:
    """Prints the ratios of pairs, this tree and the other by turns."""
    ratios: dict[str, list[float]] = {"1": [], "32": []}
    here = Path(__file__).resolve().parents[1]
    for pair in range(arguments.pairs):
        taken = {}
        trees = (here, arguments.before) if pair % 2 else (arguments.before, here)
        for tree in trees:
            command = [sys.executable, __file__, str(arguments.tokenizer), "--plain", "--layers", str(arguments.layers)]
            command += ["--tokens", str(arguments.tokens), "--rounds", "1"]
            environment = {**os.environ, "PYTHONPATH": str(Path(tree) / "src")}
            output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
            taken[tree] = json.loads(output.splitlines()[-1])
        for batch, of_batch in ratios.items():
            of_batch.append(taken[arguments.before][batch][0][1] / taken[here][batch][0][1])
        print(json.dumps({"pair": pair, "speed_over_before_by_processor_time": {b: r[-1] for b, r in ratios.items()}}))
    print(json.dumps({batch: statistics.median(of_batch) for batch, of_batch in ratios.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.before is not None:
        compare_trees(arguments)
        return
    with tempfile.TemporaryDirectory() as scratch:
        model = random_model(Path(scratch) / "model", arguments.layers)
        if arguments.plain:
            print(json.dumps(plain_rounds(EmbeddedEngine(model), arguments.tokens, arguments.rounds)))
            return
        from danlu.inference.grammar import Grammars, json_grammar  # which the other tree may not have

        tokenizer = wide_tokenizer(arguments.tokenizer, Path(scratch) / "tokenizer")
        grammars = Grammars(tokenizer, VOCABULARY, [tokenizer.eos_id])
        engine = EmbeddedEngine(model, EngineOptions(), grammars=grammars)
        form = json_grammar(schema())
        began_s = time.perf_counter()
        grammars.compile(form)
        print(json.dumps({"tokens": tokenizer.vocab_size, "compile_s": round(time.perf_counter() - began_s, 2)}))
        for batch in (1, 32):
            seconds(engine, batch, 8, 10**6, grammar=form)
            ratios = []
            for number in range(arguments.rounds):
                without = seconds(engine, batch, arguments.tokens, 2000 * number + batch)
                within = seconds(engine, batch, arguments.tokens, 2000 * number + 1000 + batch, grammar=form)
                ratios.append([round(before / after, 3) for before, after in zip(without, within, strict=True)])
            wall, cpu = (statistics.median(column) for column in zip(*ratios, strict=True))
            print(json.dumps({"batch": batch, "with_over_without": {"wall": wall, "processor": cpu}, "rounds": ratios}))


if __name__ == "__main__":
    main()
