"""One peer of data curation, in the peers' environment: its processor seconds over documents, its decisions, as JSON.

    python benchmarks/data_peers.py NAME TEXTS.json

Nothing of danlu is imported here. Words, models and tables are loaded before the time is taken.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

WORDS, BANDS, ROWS, THRESHOLD = 5, 14, 8, 0.75


def datasketch(texts: Sequence[str]) -> list[bool]:
    """MinHash in batches, and LSH with the same bands; a document is dropped that is like an earlier one."""
    from datasketch import MinHash, MinHashLSH

    lsh = MinHashLSH(num_perm=BANDS * ROWS, params=(BANDS, ROWS))
    kept, hashes = [], []
    for at in range(0, len(texts), 256):
        sets = []
        for text in texts[at : at + 256]:
            words = text.lower().split()
            sets.append([" ".join(words[n : n + WORDS]).encode() for n in range(max(1, len(words) - WORDS + 1))])
        hashes += MinHash.bulk(sets, num_perm=BANDS * ROWS)
    for number, each in enumerate(hashes):
        kept.append(all(each.jaccard(hashes[other]) < THRESHOLD for other in lsh.query(each)))
        if kept[-1]:
            lsh.insert(number, each)
    return kept


def datatrove_signatures(texts: Sequence[str]) -> None:
    """The first of datatrove's four steps: shingles and signatures, without writing them."""
    from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature

    step = MinhashDedupSignature("unused", MinhashConfig(n_grams=WORDS, num_buckets=BANDS, hashes_per_bucket=ROWS))
    for text in texts:
        set_of_text = step.get_shingles(text)
        if set_of_text.size:
            step.get_signature(set_of_text)


def datatrove_filter(name: str) -> Callable[[Sequence[str]], list[bool]]:
    from datatrove.data import Document
    from datatrove.pipeline import filters

    kinds = {
        "c4": filters.C4QualityFilter,
        "gopher": filters.GopherQualityFilter,
        "gopher-repetition": filters.GopherRepetitionFilter,
        "fineweb": filters.FineWebQualityFilter,
    }
    rules = kinds[name]()
    return lambda texts: [rules.filter(Document(text=text, id="")) is True for text in texts]


def datatrove_personal(texts: Sequence[str]) -> None:
    """E-mail and IP addresses, which are all that datatrove masks."""
    from datatrove.data import Document
    from datatrove.pipeline.formatters import PIIFormatter

    formatter = PIIFormatter()
    for text in texts:
        formatter.format(Document(text=text, id="").text)


def resident_bytes(name: str) -> int:
    """VmRSS, the resident memory of this process, or VmHWM, its peak."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(f"{name}:"))


def begin_peak() -> int:
    """Begins a new peak of memory (Linux), so that reading the texts is none of it; returns what is resident now."""
    with open("/proc/self/clear_refs", "w") as stream:
        stream.write("5")
    return resident_bytes("VmRSS")


def main() -> None:
    name, file = sys.argv[1:]
    with open(file, encoding="utf-8") as stream:
        texts = json.load(stream)
    others: dict[str, Callable[[Sequence[str]], Any]] = {
        "datasketch": datasketch,
        "datatrove-signatures": datatrove_signatures,
        "personal": datatrove_personal,
    }
    run = others[name] if name in others else datatrove_filter(name)
    run(texts[:20])
    before = begin_peak()
    begin = time.process_time()
    kept = run(texts)
    report: dict[str, Any] = {"seconds": time.process_time() - begin}
    report["added_bytes"] = resident_bytes("VmHWM") - before
    if kept is not None and len(texts) < 100_000:
        report["kept"] = kept
    print(json.dumps(report))


if __name__ == "__main__":
    main()
