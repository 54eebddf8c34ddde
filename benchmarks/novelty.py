"""Seconds in which new instructions are compared with all before them by ROUGE-L, next to package rouge-score.

    python benchmarks/novelty.py SEEDS [--rows 10000] [--threshold 0.7] [--peer PYTHON]

SEEDS is a file of JSON lines or a list with instructions (`instruction`), such as self-instruct's seed tasks. New ones
are made of them: two instructions cut and joined, and words of a third put in. PYTHON is of an environment with
rouge-score, which compares so many of the same pairs as take it five seconds. Seconds are those of the processor.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path

from danlu.production.synthesis.novelty import Novelty, rouge_l, rouge_words

PEER = """
import json, sys, time
from rouge_score.rouge_scorer import RougeScorer
texts, scorer, pairs = json.load(sys.stdin), RougeScorer(["rougeL"], use_stemmer=False), []
start = time.process_time()
for row in range(1, len(texts)):
    if time.process_time() - start > 5:
        break
    for other in range(row):
        pairs.append(scorer.score(texts[other], texts[row])["rougeL"].fmeasure)
print(json.dumps({"seconds": time.process_time() - start, "rouge": pairs}))
"""


def instructions(seeds: list[str], count: int, draw: random.Random) -> list[str]:
    """Texts that share words and runs of words with each other, as what a model makes of a few examples does."""
    texts = list[str]()
    for _ in range(count):
        first, second, third = (draw.choice(seeds).split() for _ in range(3))
        words = first[: draw.randrange(1, len(first) + 1)] + second[draw.randrange(len(second)) :]
        for _ in range(draw.randrange(6)):
            words.insert(draw.randrange(len(words) + 1), draw.choice(third))
        texts.append(" ".join(words))
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", type=Path)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--threshold", type=float, default=0.7)
    parser.add_argument("--peer", help="a Python with rouge-score")
    arguments = parser.parse_args()
    content = arguments.seeds.read_text(encoding="utf-8")
    rows = json.loads(content) if content.startswith("[") else [json.loads(line) for line in content.splitlines()]
    texts = instructions([row["instruction"] for row in rows], arguments.rows, random.Random(0))

    novelty, kept = Novelty(arguments.threshold), 0
    start = time.process_time()
    for text in texts:
        if novelty.nearest(text).number < 0:
            novelty.add(text)
            kept += 1
    seconds = time.process_time() - start
    pairs = kept * (kept - 1) // 2
    print(f"{len(texts):,} instructions, {kept:,} novel at {arguments.threshold}: {seconds:.1f} s")
    if arguments.peer is None:
        return
    answer = subprocess.run(
        [arguments.peer, "-c", PEER], input=json.dumps(texts), capture_output=True, text=True, check=False
    )
    if answer.returncode:
        sys.exit(answer.stderr)
    peer = json.loads(answer.stdout)
    compared = ((texts[other], texts[row]) for row in range(1, len(texts)) for other in range(row))
    worst = max(
        abs(rouge_l(rouge_words(left), rouge_words(right)) - theirs)
        for (left, right), theirs in zip(compared, peer["rouge"], strict=False)
    )
    a_pair = peer["seconds"] / len(peer["rouge"])
    print(
        f"rouge-score: {len(peer['rouge']):,} pairs in {peer['seconds']:.1f} s, the {pairs:,} pairs of what is novel "
        f"in {pairs * a_pair:,.0f} s ({pairs * a_pair / seconds:,.0f} times as long); largest difference {worst:.1e}"
    )


if __name__ == "__main__":
    main()
