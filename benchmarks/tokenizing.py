"""Rows per second from a file to the token cache: reading, parsing, rendering, tokenising, writing.

    python benchmarks/tokenizing.py [--rows 50000] [--data FILE] [--tokenizer FOLDER] [--workers 1 2] [--repeats 3]

Without arguments it makes its own chat rows of about 160 tokens and trains a tokenizer of 8,192 entries on them. Every
measurement goes through `danlu.data.prepare.prepare` into a fresh cache, processes started and ended included. CPU
seconds are those of this process and of all its tokenising processes; rows per core-second are rows over CPU seconds.
Beside it, in one process and without a cache: transformers' `apply_chat_template`, and the tokenizers library alone on
texts rendered before. Medians of interleaved repeats, on a machine that does nothing else: cores that
share their arithmetic units count a second each, but do less in it while the other is busy.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORDS, TURN_WORDS = 30_000, 32
BATCH = 256
WORD_LENGTHS = (2, 3, 4, 4, 5, 5, 6, 7, 8, 9, 11)


@dataclass(frozen=True)
class Figure:
    wall_s: float
    cpu_s: float


def make_rows(count: int, file: Path) -> None:
    """Chat rows of made-up words, as frequent as words in real text (Zipf), with punctuation, numbers and Chinese."""
    chance = random.Random(0)
    letters = "etaoinshrdlcumwfgypbvk"
    frequencies = [1 / (rank + 1) for rank in range(len(letters))]
    words = ["".join(chance.choices(letters, frequencies, k=chance.choice(WORD_LENGTHS))) for _ in range(WORDS)]
    weights = [1 / (rank + 3) for rank in range(WORDS)]

    def sentence() -> str:
        text = chance.choices(words, weights, k=TURN_WORDS)
        for _ in range(4):
            text[chance.randrange(TURN_WORDS)] += chance.choice((",", ".", ".\n\n", ":", f" {chance.randrange(1000)}"))
        return " ".join(text).capitalize() + chance.choice((".", "?", "!", "。你好，世界！"))

    with file.open("w", encoding="utf-8") as out:
        for _ in range(count):
            turns = [{"role": role, "content": sentence()} for role in ("user", "assistant") * chance.choice((1, 1, 2))]
            out.write(json.dumps({"messages": turns}, ensure_ascii=False) + "\n")


def make_tokenizer(data: Path, folder: Path) -> None:
    from danlu.data.tokenizer_training import train_tokenizer

    train_tokenizer((turn["content"] for turns in conversations(str(data)) for turn in turns[0]), 8192, folder)


def conversations(data: str) -> Iterator[tuple[list[dict[str, Any]], Any]]:
    """Rows as the messages and tools that transformers is given."""
    from danlu.data import sources
    from danlu.data.messages import Conversation, turn_of
    from danlu.data.raw_rows import BadRow
    from danlu.data.rows import parse_row
    from danlu.recipe.sections import Source

    for raw in sources.read_rows(Source(path=data)):
        if isinstance(raw.value, BadRow):
            raise SystemExit(raw.value.message)
        row = parse_row(raw.value, "auto", raw.where)
        if not isinstance(row, Conversation):
            raise SystemExit(f"{data}: only conversations are measured")
        yield [turn_of(message) for message in row.messages], list(row.tools) if row.tools else None


def measured(work: Callable[[], object]) -> Figure:
    def cpu() -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(usage.ru_utime + usage.ru_stime for usage in used)

    begin, cpu_begin = time.perf_counter(), cpu()
    work()
    return Figure(time.perf_counter() - begin, cpu() - cpu_begin)


def prepare_with(workers: int, data: str, tokenizer: str, cache: str) -> Any:
    from danlu.data.prepare import DatasetSpec, prepare
    from danlu.recipe.sections import Data, Source

    settings = Data(train=[Source(path=data)], cache=cache, workers=workers, max_length=4096)
    return prepare(DatasetSpec(settings, "sft", tokenizer, chat_template=None, seed=0))


def fresh(workers: int, data: str, tokenizer: str) -> Figure:
    with tempfile.TemporaryDirectory() as cache:
        return measured(lambda: prepare_with(workers, data, tokenizer, cache))


def others(data: str, tokenizer: str) -> dict[str, Callable[[], object]]:
    """The same rows without danlu's pipeline, in this process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from transformers import AutoTokenizer

    pretrained: Any = AutoTokenizer.from_pretrained(tokenizer)
    rows = list(conversations(data))
    texts = [pretrained.apply_chat_template(turns, tools=tools, tokenize=False) for turns, tools in rows]
    parts = [slice(start, start + BATCH) for start in range(0, len(rows), BATCH)]

    def one_by_one() -> None:
        for turns, tools in rows:
            pretrained.apply_chat_template(turns, tools=tools)

    def in_batches() -> None:
        for part in parts:
            pretrained.apply_chat_template([turns for turns, _ in rows[part]])

    def without_rendering() -> None:
        for part in parts:
            pretrained.backend_tokenizer.encode_batch(texts[part], add_special_tokens=False)

    ways: dict[str, Callable[[], object]] = {"transformers, row by row": one_by_one}
    if not any(tools for _, tools in rows):
        ways["transformers, in batches"] = in_batches
    return ways | {"tokenizers, rendered texts": without_rendering}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=50_000, help="rows to make, or to take of --data")
    parser.add_argument("--data", help="a file of conversations instead of made rows")
    parser.add_argument("--tokenizer", help="a folder with a tokenizer and a chat template instead of a trained one")
    parser.add_argument("--workers", type=int, nargs="+", help="default: 1 and one for each core")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    workers = arguments.workers or sorted({1, len(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as parent:
        data = arguments.data
        if data is None:
            data = str(Path(parent) / "made.jsonl")
            make_rows(arguments.rows, Path(data))
        data = f"{data}#{arguments.rows}"
        tokenizer = arguments.tokenizer or str(Path(parent) / "tokenizer")
        if arguments.tokenizer is None:
            make_tokenizer(Path(data.rpartition("#")[0]), Path(tokenizer))
        measure(data, tokenizer, workers, arguments.repeats, str(Path(parent) / "cache"))


def measure(data: str, tokenizer: str, workers: list[int], repeats: int, cache: str) -> None:
    prepared = prepare_with(workers[-1], data, tokenizer, cache)
    count = prepared.statistics.rows
    print(
        f"{count:,} rows, {prepared.statistics.tokens / count:.0f} tokens a row, "
        f"vocabulary of {prepared.tokenizer.vocab_size:,}; medians of {repeats}"
    )
    ways: dict[str, Callable[[], Figure]] = {
        f"danlu prepare, {number} process{'es' * (number > 1)}": lambda number=number: fresh(number, data, tokenizer)
        for number in workers
    }
    ways |= {name: lambda work=work: measured(work) for name, work in others(data, tokenizer).items()}
    # The ways take turns, so that a slow minute of the machine hits all of them.
    runs = [{name: way() for name, way in ways.items()} for _ in range(repeats)]
    print(f"\n{'':<36}{'seconds':>9}{'CPU s':>9}{'rows/s':>10}{'rows/core-s':>13}")
    for name in ways:
        wall, cpu = (statistics.median(getattr(run[name], of) for run in runs) for of in ("wall_s", "cpu_s"))
        print(f"{name:<36}{wall:>9.2f}{cpu:>9.2f}{count / wall:>10,.0f}{count / cpu:>13,.0f}")
    again = [measured(lambda: prepare_with(1, data, tokenizer, cache)).wall_s for _ in range(max(3, repeats))]
    print(f"\nprepare again, everything in the cache: {1000 * statistics.median(again):.1f} ms")


if __name__ == "__main__":
    main()
