"""The bits of every stage, of answers and of `verify` in a checkout, for changes that should not move any number.

    python benchmarks/bits.py CHECKOUT --out before.json
    python benchmarks/bits.py CHECKOUT --compare before.json        exits 1 where anything differs
    python benchmarks/bits.py CHECKOUT --only dpo serve             cases with one of these in their name

Each line of the output is a name and a hash:

    train NAME xN     `danlu train` of `small_recipes.STAGE_CASES` in N processes: every line of metrics.jsonl, but for
                      times and memory, the tensors of the result, and the recorded answers of rollouts
    generate          greedy and sampled tokens of `danlu generate`
    serve             the same of `danlu serve`, with their log-probabilities
    verify LAYOUT     what `danlu verify` prints of six layouts, times left out

The runs use only what a user sees, so that any checkout can be given. `same_bits.py` compares two checkouts, with every
checkpoint, and resumes in one what the other began.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from same_bits import NOT_COMPARED, tensors
from small_recipes import SHAPE, STAGE_CASES, Case, command, environment, run, write_inputs, write_recipe

LAYOUTS: dict[str, dict[str, Any]] = {
    "zero3": {"parallel": "zero3"},
    "tensor": {"parallel": {"tensor": 2}},
    "pipeline": {"parallel": {"pipeline": 2}},
    "context": {"parallel": {"context": 2}},
    "ema": {"parallel": "zero1", "ema": 0.9},
    "dpo": {"stage": "dpo", "parallel": "zero2", "batch": {"pairs": 4, "micro": 2}},
}
"""What `danlu verify` proves in two processes, as changes of a recipe."""
TIMES = re.compile(r"\b\d+(\.\d+)? ?(ms|s|min)\b")
PROMPTS = ("the cat sat", "seven birds above an old river", "a")


def digest(values: Any) -> str:
    """16 hexadecimal digits of the SHA-256 of values as JSON, or of a text."""
    text = values if isinstance(values, str) else json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def bits_of_run(output: Path) -> str:
    """The hash of a run's metrics, of its result and of its recorded rollouts."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    metrics = [{key: value for key, value in line.items() if key not in NOT_COMPARED} for line in lines]
    metrics = [{key: value for key, value in line.items() if not key.endswith("_s")} for line in metrics]
    result = {key: value for key, value in tensors(output).items() if not key.startswith("checkpoints/")}
    assert metrics and result, f"{output} has no metrics or no result"
    rollouts = output / "rollouts.jsonl"
    answers = [json.loads(line) for line in rollouts.read_text().splitlines()] if rollouts.exists() else []
    kept = [{key: value for key, value in answer.items() if not key.endswith("_s")} for answer in answers]
    return digest([metrics, result, kept])


def train(checkout: Path, folder: Path, name: str, case: Case, base: Path) -> str:
    recipe, output = folder / f"{name}.yaml", folder / name
    write_recipe(recipe, case, folder / "inputs", output, base, folder / "cache")
    run(command(recipe, case, "checkpoint.every=1000"), environment(checkout))
    return bits_of_run(output)


def generate(checkout: Path, base: Path, *flags: str) -> str:
    """The hash of the answers of `danlu generate` to each prompt."""
    said = []
    for prompt in PROMPTS:
        arguments = ["generate", str(base), "--prompt", prompt, "--max-new-tokens", "24", "--seed", "5", "--json"]
        done = subprocess.run(
            [sys.executable, "-P", "-m", "danlu", *arguments, *flags],
            env=environment(checkout),
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        said += [json.loads(line) for line in done.stdout.splitlines()]
    return digest([{key: value for key, value in answer.items() if not key.endswith("_s")} for answer in said])


def serve(checkout: Path, base: Path) -> dict[str, str]:
    """The greedy and the sampled answers of `danlu serve`, by kind of drawing."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    arguments = ["serve", str(base), "--port", str(port)]
    server = subprocess.Popen(
        [sys.executable, "-P", "-m", "danlu", *arguments],
        env=environment(checkout),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                break
            except (urllib.error.URLError, ConnectionError):
                if time.monotonic() > deadline or server.poll() is not None:
                    raise RuntimeError("danlu serve did not start") from None
                time.sleep(0.2)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=60) as response:
            model = json.load(response)["data"][0]["id"]
        drawings = {"greedy": {"temperature": 0}, "sampled": {"temperature": 0.9, "top_p": 0.9, "seed": 7}}
        found = {}
        for name, drawing in drawings.items():
            answers = []
            for prompt in PROMPTS:
                body = {"model": model, "prompt": prompt, "max_tokens": 24, "logprobs": 2, **drawing}
                request = urllib.request.Request(
                    f"http://127.0.0.1:{port}/v1/completions",
                    json.dumps(body).encode(),
                    {"Content-Type": "application/json"},
                )
                with urllib.request.urlopen(request, timeout=60) as response:
                    answers.append(json.load(response)["choices"])
            found[name] = digest(answers)
        return found
    finally:
        server.terminate()
        server.wait(30)


def verify(checkout: Path, folder: Path, layout: str, base: Path) -> str:
    """The hash of the output of `danlu verify` for a layout. Raises AssertionError where the proof fails."""
    changes = LAYOUTS[layout]
    is_pairs = changes.get("stage") == "dpo"
    case = Case(changes if is_pairs else {"model": {"config": SHAPE}, **changes}, on_base=is_pairs)
    recipe = folder / f"verify-{layout}.yaml"
    write_recipe(recipe, case, folder / "inputs", folder / f"verify-{layout}", base, folder / "cache")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "danlu", "verify", str(recipe), "--processes", "2"],
        env={**environment(checkout), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return digest(TIMES.sub("", done.stdout.replace(str(folder), "")))


def measure(checkout: Path, folder: Path, only: list[str]) -> Iterator[tuple[str, str]]:
    write_inputs(folder / "inputs")
    base = folder / "pretrain-1" / "model"
    for processes in (1, 2):
        for name, case in STAGE_CASES.items():
            title = f"train {name} x{processes}"
            if (name, processes) == ("pretrain", 1) or not only or any(word in title for word in only):
                yield title, train(checkout, folder, f"{name}-{processes}", replace(case, processes=processes), base)
    sampled = ("--temperature", "0.9", "--top-p", "0.9")
    for title, flags in (("generate greedy", ("--temperature", "0")), ("generate sampled", sampled)):
        if not only or any(word in title for word in only):
            yield title, generate(checkout, base, *flags)
    if not only or any(word in "serve" for word in only):
        yield from ((f"serve {name}", bits) for name, bits in serve(checkout, base).items())
    for layout in LAYOUTS:
        title = f"verify {layout}"
        if not only or any(word in title for word in only):
            yield title, verify(checkout, folder, layout, base)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT")
    parser.add_argument("--out", type=Path, help="a JSON file for the hashes")
    parser.add_argument("--compare", type=Path, help="hashes that an earlier checkout had")
    parser.add_argument("--only", nargs="+", default=[])
    options = parser.parse_args()
    earlier = json.loads(options.compare.read_text()) if options.compare else {}
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="bits-") as temporary:
        for name, bits in measure(options.checkout.resolve(), Path(temporary), options.only):
            found[name] = bits
            note = "" if name not in earlier else "same" if earlier[name] == bits else f"DIFFERS, was {earlier[name]}"
            print(f"{name:24} {bits} {note}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(earlier.get(name, bits) != bits for name, bits in found.items()))


if __name__ == "__main__":
    sys.exit(main())
