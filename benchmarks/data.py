"""Documents a second of each step of curation on one core, next to datatrove and datasketch on the same documents.

    python benchmarks/data.py TEXTS [--peer PYTHON] [--only NAME ...]   speed of steps, and documents decided otherwise
    python benchmarks/data.py TEXTS --recall                            near duplicates against the index of all pairs
    python benchmarks/data.py TEXTS --rows 200000 [--peer PYTHON]       peak memory of MinHash over so many documents

TEXTS is a folder with *.jsonl ({"text": ...}) and *.txt, also in folders; a txt file is cut at line ends into documents
of some 2,500 characters. PYTHON is of an environment with datatrove, datasketch, nltk and spacy. Seconds are those of
the processor. Every step runs `--rounds` times, in turns with its peer, and the fastest counts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
from data_peers import begin_peak, resident_bytes

from danlu.curation.decontaminate import Benchmark, Decontaminate
from danlu.curation.duplicates import ExactDuplicates, RepeatedParagraphs
from danlu.curation.language import Language
from danlu.curation.near_duplicates import NearDuplicates, jaccard
from danlu.curation.personal.step import Personal
from danlu.curation.quality.c4 import C4Rules
from danlu.curation.quality.fineweb import FineWebRules
from danlu.curation.quality.gopher import GopherRules
from danlu.curation.quality.repetition import RepetitionRules
from danlu.curation.ragged import Ragged
from danlu.curation.repair import Repair
from danlu.curation.rows import Row, document
from danlu.curation.run_steps import run_steps
from danlu.curation.steps import Step
from danlu.curation.word_hashes import shingles
from danlu.curation.words import is_unspaced
from danlu.production.curate import CurateSettings, curate
from danlu.recipe.sections import Source

CHARACTERS = 2500  # of a document that is cut from a txt file; those of c4_demo have as many
BATCH = 256
QUALITY = {"c4": C4Rules(), "gopher": GopherRules(), "gopher-repetition": RepetitionRules(), "fineweb": FineWebRules()}


def read_documents(folder: Path) -> Iterator[str]:
    for file in sorted(folder.rglob("*.jsonl")):
        yield from (json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines())
    for file in sorted(folder.rglob("*.txt")):
        text, start = file.read_text(encoding="utf-8"), 0
        while start < len(text):
            stop = text.find("\n", start + CHARACTERS) + 1 or len(text)
            yield text[start:stop]
            start = stop


def batches_of(texts: Sequence[str]) -> list[list[Row]]:
    rows = [document(text, 0, number) for number, text in enumerate(texts)]
    return [rows[at : at + BATCH] for at in range(0, len(rows), BATCH)]


def steps_of(texts: Sequence[str]) -> dict[str, Sequence[Step]]:
    benchmark = Benchmark("some", tuple(texts[::50]))
    return {
        "minhash": [NearDuplicates()],
        **{name: [step] for name, step in QUALITY.items()},
        "exact": [ExactDuplicates()],
        "paragraph": [RepeatedParagraphs()],
        "repair": [Repair()],
        "language": [Language(keep=("en", "zh"))],
        "personal": [Personal()],
        "decontaminate": [Decontaminate((benchmark,))],
    }


def seconds(work: Callable[[], Any]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def peer(python: str, name: str, file: Path) -> dict[str, Any]:
    """The report of one peer: its seconds, its decisions where it makes any, and the peak of its memory."""
    script = Path(__file__).with_name("data_peers.py")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    output = subprocess.run(
        [python, str(script), name, str(file)], check=True, stdout=subprocess.PIPE, env=environment, text=True
    ).stdout
    report: dict[str, Any] = json.loads(output.splitlines()[-1])
    return report


def compare_speed(texts: Sequence[str], python: str | None, rounds: int, only: Sequence[str]) -> None:
    peers = {
        "minhash": ["datasketch", "datatrove-signatures"],
        **{name: [name] for name in QUALITY},
        "personal": ["personal"],
    }
    batches = batches_of(texts)
    print("| step | documents/s | peer | its documents/s | faster by | decided otherwise |\n|---|---|---|---|---|---|")
    totals = {"ours": 0.0, "peers": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "texts.json")
        file.write_text(json.dumps(texts), encoding="utf-8")
        for name, steps in steps_of(texts).items():
            if only and name not in only:
                continue
            run_steps(batches[:1], steps)  # imports and tables
            ours, reports = [], dict[str, list[dict[str, Any]]]()
            for _ in range(rounds):
                ours.append(seconds(lambda steps=steps: run_steps(batches, steps)))
                for each in peers.get(name, []) if python else []:
                    reports.setdefault(each, []).append(peer(str(python), each, file))
            speed = len(texts) / min(ours)
            rows = [f"| {name} | {speed:,.0f} |"]
            for each, results in reports.items():
                slowest = min(result["seconds"] for result in results)
                otherwise = _decided_otherwise(steps, batches, results[0].get("kept")) if name in QUALITY else ""
                rows.append(f" {each} | {len(texts) / slowest:,.0f} | {slowest / min(ours):.1f}x | {otherwise} |")
                if name in QUALITY:
                    totals["ours"] += min(ours)
                    totals["peers"] += slowest
            head, *rest = rows if len(rows) > 1 else [*rows, " | | | |"]
            print(head + rest[0], *(f"| | |{row}" for row in rest[1:]), sep="\n", flush=True)
    if totals["peers"]:
        speeds = [f"{len(texts) / total:,.0f}" for total in totals.values()]
        print(f"\nThe rule sets together, each over all documents: {' and '.join(speeds)} documents/s, ", end="")
        print(f"faster by {totals['peers'] / totals['ours']:.1f}x")


def _decided_otherwise(steps: Sequence[Step], batches: list[list[Row]], kept: list[bool] | None) -> str:
    """Documents that we drop and the peer keeps or the reverse, where each splits words and sentences itself.

    Documents in scripts without spaces are left out: the peer is asked for its English rules.
    """
    accounts = run_steps(batches, steps).accounts
    assert kept is not None, "a rule decides"
    spaced = [not is_unspaced(row.text) for batch in batches for row in batch]
    decisions = zip(accounts, kept, spaced, strict=True)
    differing = sum(counts and (account.outcome != "dropped") != each for account, each, counts in decisions)
    return f"{differing} of {sum(spaced)} ({100 * differing / sum(spaced):.1f} %)"


def planted(texts: Sequence[str], count: int, seed: int) -> list[str]:
    """Documents, some of them copies of another with a share of words replaced."""
    draw = random.Random(seed)
    vocabulary = sorted({word for text in texts for word in text.split()})
    results = draw.sample(list(texts), count // 2)
    while len(results) < count:
        share = draw.choice([0, 0.002, 0.005, 0.01, 0.02, 0.05])
        words = draw.choice(results).split(" ")
        results.append(" ".join(draw.choice(vocabulary) if draw.random() < share else word for word in words))
    draw.shuffle(results)
    return results


def measure_recall(texts: Sequence[str]) -> None:
    """Pairs with a Jaccard index of 0.8 or more of which one is dropped, and dropped rows without such a pair."""
    chosen = planted(texts, 1200, seed=0)
    sets = shingles(chosen, 5)
    unique = Ragged.of([sorted(set(sets[row].tolist())) for row in range(len(sets))], np.uint64)
    result = run_steps(batches_of(chosen), [NearDuplicates()])
    dropped = {account.place: account.decisions[0][1] for account in result.accounts if account.outcome == "dropped"}
    alike = missed = 0
    closest = dict.fromkeys(dropped, 0.0)
    for left in range(len(chosen)):
        for right in range(left):
            index = jaccard(unique[left], unique[right])
            alike += index >= 0.8
            missed += index >= 0.8 and not dropped.keys() & {left, right}
            if left in closest and right not in dropped:
                closest[left] = max(closest[left], index)
    print(
        f"{len(chosen)} documents, {alike} pairs with a Jaccard index of 0.8 or more, {1 - missed / alike:.4f} of them"
    )
    print(f"with one that is dropped. {len(dropped)} dropped, least like a row that stays: {min(closest.values()):.3f}")


def curated_from_files(folder: Path) -> tuple[float, int, int]:
    """Documents a second, bytes over what the process begins with, and rows that stay, of rows.jsonl in a folder."""
    settings = CurateSettings([Source(path=str(folder / "rows.jsonl"))], [NearDuplicates()], folder / "out", recipe={})
    before = begin_peak()
    begin = time.process_time()
    result = curate(settings)
    taken = time.process_time() - begin
    return sum(result.outcomes.values()) / taken, resident_bytes("VmHWM") - before, result.remaining


def measure_memory(texts: Sequence[str], count: int, python: str | None) -> None:
    """Peak memory of `danlu data clean` with MinHash alone over many documents, each with some words of its own, and of
    the peer, which has all texts in memory: what both take over what they begin with."""
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        many = [
            f"{text} {draw.random()} {draw.random()}"
            for text in (texts[number % len(texts)] for number in range(count))
        ]
        with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in many)
        if python:
            (folder / "texts.json").write_text(json.dumps(many), encoding="utf-8")
        with multiprocessing.get_context("spawn").Pool(1) as pool:  # whose memory has held no texts
            speed, added, remaining = pool.apply(curated_from_files, (folder,))
        print(f"danlu: {speed:,.0f} documents/s, {added / 2**20:,.0f} MiB, {remaining:,} stay", flush=True)
        if python:
            report = peer(python, "datasketch", folder / "texts.json")
            speed = count / report["seconds"]
            print(f"datasketch: {speed:,.0f} documents/s, {report['added_bytes'] / 2**20:,.0f} MiB over the texts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--peer", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--recall", action="store_true")
    parser.add_argument("--rows", type=int)
    options = parser.parse_args()
    texts = list(read_documents(options.texts))
    if not texts:
        sys.exit(f"{options.texts}: no jsonl or txt files in it")
    print(f"{len(texts)} documents of {sum(map(len, texts)) / len(texts):,.0f} characters", flush=True)
    if options.recall:
        measure_recall(texts)
    elif options.rows:
        measure_memory(texts, options.rows, options.peer)
    else:
        compare_speed(texts, options.peer, options.rounds, options.only)


if __name__ == "__main__":
    main()
