"""Long context: a small model trained at 256 tokens, at 256, 1,024 and 4,096, by each method, untrained and tuned.

    python benchmarks/long_context.py --texts text/books text/wiki_demo.txt text/wikitext2_valid.txt [--threads 2]
    python benchmarks/long_context.py --texts ... --folder FOLDER  kept there; the same command goes on from it
    python benchmarks/long_context.py --texts ... --quick          a few steps of everything, to see that it runs

A Llama of about 0.9M parameters is trained from scratch on English text with `danlu train`, cut every 256 tokens. Then
each method of `long_context` is judged twice: as the base with its config.json alone (untrained), and after at most a
tenth of the base's steps in stages of 1,024 and 4,096 tokens (tuned). LongRoPE's factors are searched by `danlu train`.

Two perplexities by `danlu eval`, of tokens that no model was trained on, in float32:

    all     the mean over all tokens of documents of L tokens: the same text, cut every L tokens
    last    the mean over the same windows of 256 tokens, each with the L - 256 tokens before it

`ratio` is `all` at 4,096 over `all` at 256 of the same model: 1 or less where what lies far back does no harm. Asked of
the best method is at most 1.1. `last` says whether it is of use: it falls with L.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

TRAINED, LENGTHS = 256, (256, 1024, 4096)
LONGEST = LENGTHS[-1]
STEP_TOKENS = 8192
METHODS = ("none", "linear", "ntk", "dynamic", "yarn", "longrope")
MODEL = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": LONGEST,  # for the method `none`; the others are told what it was trained at
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
SEARCH = {"documents": 4, "population": 16, "parents": 8, "mutations": 8, "crossovers": 8, "generations": 3}
CHUNK = 40_000  # characters of a row: more than the longest length, and no whole book


def danlu(*arguments: object) -> str:
    """What a command line of danlu prints, in this process. Exits where it fails."""
    from danlu.cli.main import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main([str(argument) for argument in arguments])
    if code:
        sys.exit(f"danlu {' '.join(map(str, arguments))}: exit code {code}")
    return printed.getvalue()


def texts_of(paths: Sequence[Path]) -> Iterator[str]:
    for path in paths:
        for file in sorted(path.rglob("*.txt")) if path.is_dir() else [path]:
            yield file.read_text(encoding="utf-8")


def write_rows(file: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return file


def split_texts(paths: Sequence[Path], held_out: int) -> tuple[list[str], list[str]]:
    """Rows to train on, and as many rows held out of the end of each text, in turn, as make `held_out` in all."""
    by_text = [[text[at : at + CHUNK] for at in range(0, len(text) - CHUNK + 1, CHUNK)] for text in texts_of(paths)]
    kept: list[str] = []
    while len(kept) < held_out:
        taken = [rows.pop() for rows in by_text if len(rows) > 2]
        if not taken:
            sys.exit("--texts: too little to hold something out of; give more")
        kept += taken
    return [row for rows in by_text for row in rows], kept[:held_out]


def measured_rows(tokenizer: Path, rows: Sequence[str], folder: Path, documents: int) -> dict[tuple[str, int], Path]:
    """Files of token ids by (all or last, L): the same tokens at each length."""
    from danlu.data.tokenizer import load_tokenizer

    encode = load_tokenizer(str(tokenizer)).encode
    wholes = [ids[:LONGEST] for ids in map(encode, rows) if len(ids) >= LONGEST][:documents]
    if len(wholes) < documents:
        sys.exit(f"only {len(wholes)} held-out rows have {LONGEST} tokens")
    files = {}
    for length in LENGTHS:
        cut = [ids[at : at + length] for ids in wholes for at in range(0, LONGEST, length)]
        files["all", length] = write_rows(folder / f"all-{length}.jsonl", [{"input_ids": ids} for ids in cut])
        ends = [{"input_ids": ids[-length:], "labels": [-100] * (length - TRAINED) + ids[-TRAINED:]} for ids in wholes]
        files["last", length] = write_rows(folder / f"last-{length}.jsonl", ends)
    return files


def perplexities(model: Path, files: Mapping[tuple[str, int], Path], options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for (kind, length), file in files.items():
        settings = (f"data.max_length={length}", f"data.cache={options.folder / 'cache'}")
        printed = danlu("eval", model, "--data", file, "--json", "--dtype", "fp32", *settings)
        found[f"{kind}@{length}"] = json.loads(printed)["perplexity"]
    found["ratio"] = found[f"all@{LONGEST}"] / found[f"all@{TRAINED}"]
    return found


def recipe(options: argparse.Namespace, name: str, **changes: Any) -> Path:
    folder: Path = options.folder
    values = {
        "stage": "pretrain",
        "data": {"train": str(folder / "train.jsonl"), "packing": "concatenate", "cache": str(folder / "cache")},
        "optimizer": {"kind": "adamw", "learning_rate": 3e-3},
        "batch": {"tokens": STEP_TOKENS},
        "precision": "auto",
        "threads": options.threads,
        "log": {"tensorboard": False},
        "output": str(folder / name),
        **changes,
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def train_base(options: argparse.Namespace, tokenizer: Path) -> Path:
    data = {"train": str(options.folder / "train.jsonl"), "packing": "concatenate", "max_length": TRAINED}
    data["cache"] = str(options.folder / "cache")
    model = {"config": MODEL, "tokenizer": str(tokenizer)}
    danlu("train", recipe(options, "base", model=model, data=data, steps=options.steps))
    return options.folder / "base" / "model"


def tune(options: argparse.Namespace, method: str, base: Path) -> tuple[Path, list[float] | None]:
    """The tuned model's folder, and of LongRoPE the factors that were searched."""
    first = options.tune_steps // 2
    stages = [{"length": 1024, "steps": first}, {"length": LONGEST, "steps": options.tune_steps - first}]
    section: dict[str, Any] = {"method": method, "original_length": TRAINED, "stages": stages}
    data = {"train": str(options.folder / "train.jsonl"), "packing": "concatenate"}
    data |= {"cache": str(options.folder / "cache")}
    if method == "longrope":
        section["search"] = options.search
        data["eval"] = str(options.folder / "searched.jsonl")
    more = {"optimizer": {"kind": "adamw", "learning_rate": 1e-3}, "evaluation": {"every": 10**6}}
    more = more if method == "longrope" else {"optimizer": more["optimizer"]}
    name = f"tuned-{method}"
    danlu("train", recipe(options, name, model={"path": str(base)}, data=data, long_context=section, **more))
    resolved = yaml.safe_load((options.folder / name / "recipe.yaml").read_text())
    return options.folder / name / "model", resolved["long_context"].get("long_factor")


def untrained(options: argparse.Namespace, method: str, base: Path, factors: list[float] | None) -> Path:
    """The base's weights beside the config of a method."""
    from danlu.models.hf_config import config_values
    from danlu.models.hf_folder import read_config
    from danlu.models.long_context import with_long_context
    from danlu.recipe.sections import LongContext

    folder: Path = options.folder / f"untrained-{method}"
    shutil.copytree(base, folder, dirs_exist_ok=True)
    section = LongContext.model_validate({"method": method, "original_length": TRAINED, "long_factor": factors})
    config = with_long_context(read_config(base), section, LONGEST)
    (folder / "config.json").write_text(json.dumps(config_values(config, torch_dtype="float32")))
    return folder


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    columns = [*(f"all@{length}" for length in LENGTHS), *(f"last@{length}" for length in LENGTHS), "ratio"]
    print("| method | | " + " | ".join(columns) + " |")
    print("|---|---|" + "---|" * len(columns))
    for row in rows:
        numbers = [f"{row[name]:.3f}" if name == "ratio" else f"{row[name]:.4g}" for name in columns]
        print(f"| {row['method']} | {row['state']} | " + " | ".join(numbers) + " |")


def measure(options: argparse.Namespace) -> None:
    from danlu.data.tokenizer_training import train_tokenizer

    started = time.perf_counter()
    train, held_out = split_texts(options.texts, options.documents + 2 * SEARCH["documents"])
    # What the search judges candidates by is not what they are measured on.
    searched, measured = held_out[: 2 * SEARCH["documents"]], held_out[2 * SEARCH["documents"] :]
    write_rows(options.folder / "train.jsonl", [{"text": text} for text in train])
    write_rows(options.folder / "searched.jsonl", [{"text": text} for text in searched])
    tokenizer = options.folder / "tokenizer"
    if not tokenizer.is_dir():
        train_tokenizer(train, 1024, tokenizer)
    files = measured_rows(tokenizer, measured, options.folder, options.documents)
    base = train_base(options, tokenizer)
    rows = []
    for method in options.methods:
        begun = time.perf_counter()
        tuned, factors = tune(options, method, base)
        seconds = time.perf_counter() - begun
        for state, model in (("untrained", untrained(options, method, base, factors)), ("tuned", tuned)):
            row = {"method": method, "state": state, **perplexities(model, files, options)}
            rows.append(row)
            print(json.dumps({**row, **({"tuning_s": round(seconds, 1)} if state == "tuned" else {})}), flush=True)
        if factors is not None:
            print(json.dumps({"longrope_factors": factors}), flush=True)
    print()
    show(rows)
    best = min(rows, key=lambda row: row[f"all@{LONGEST}"] if math.isfinite(row["ratio"]) else math.inf)
    print(
        f"\n{options.steps} steps at {TRAINED} tokens, {options.tune_steps} to tune "
        f"({options.tune_steps / options.steps:.0%}); {options.documents} documents of {LONGEST} tokens; "
        f"{time.perf_counter() - started:,.0f} s with {options.threads} threads"
    )
    found = f"{best['method']}, {best['state']}: {best[f'all@{LONGEST}']:.4g}, {best['ratio']:.3f} of its value"
    print(f"best at {LONGEST}: {found} at {TRAINED} (asked: at most 1.1)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", nargs="+", type=Path, required=True, help="text files, or folders of them")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--steps", type=int, default=400, help=f"of the base, {STEP_TOKENS} tokens each")
    parser.add_argument("--tune-steps", type=int, default=40, help="of each method; at most a tenth of --steps")
    parser.add_argument("--documents", type=int, default=12, help=f"of {LONGEST} tokens, to measure on")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where runs are kept, so that one that was interrupted goes on")
    parser.add_argument("--quick", action="store_true", help="few steps, documents and candidates")
    options = parser.parse_args()
    options.search = SEARCH
    if options.quick:
        options.steps, options.tune_steps, options.documents = 40, 4, 2
        options.search = {**SEARCH, "population": 4, "parents": 2, "mutations": 1, "crossovers": 1, "generations": 1}
    if options.tune_steps * 10 > options.steps:
        parser.error(f"--tune-steps {options.tune_steps}: more than a tenth of --steps {options.steps}")
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
        measure(options)
        return
    with tempfile.TemporaryDirectory(prefix="danlu-long-context-") as folder:
        options.folder = Path(folder)
        measure(options)


if __name__ == "__main__":
    main()
