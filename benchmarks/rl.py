"""GRPO side by side with TRL's GRPOTrainer: steps per second, where their time goes, and peak memory.

    python benchmarks/rl.py --peers-python PEERS/bin/python                 # 5M in fp32, 58M in bf16; both cases
    python benchmarks/rl.py --peers-python PEERS/bin/python --sizes 5M --cases equal --rounds 1 --steps 3
    python benchmarks/rl.py --engines danlu danlu-exact no-cache            # without TRL

A step is a rollout of 8 answers to each of 8 prompts of 64 tokens, the rewards of a Python function, and one update.
Every engine starts from the same random Llama (`generation.SIZES`), with two threads, each run in a process of its own,
engines in turns. What is trained is the same: advantages by group, no KL term, the mean over the tokens of the step,
AdamW at a constant rate. The first step of a run is left out; figures are medians over the steps of all rounds.

    equal     all answers have 128 tokens
    samples   log-normal lengths: those of `generation.samples`, a mean near 71 tokens and up to 292

Answers have the same lengths in every engine and step. danlu: each answer is asked for as a request of its own that has
no stop tokens and its own `max_new_tokens`, so the end token is drawn as any other. TRL: a logits processor allows the
end token as the last token of its row alone. The tokens of every answer are compared with what was asked for.

    danlu           stage grpo, numerics: fast
    danlu-exact     with numerics: exact
    trl-8, trl-64   TRL in micro-batches of so many answers (`--peer-rows`); all 64 are generated at once
    trl-8-bf16      the same with weights, gradients and moments in bf16 too, where products are (of 58M); danlu and
                    the others have these in float32
    no-cache        generation alone, with the forward pass that training has: for each token of the answers the trees
                    of prompts and answers so far go through the decoder, packed. Each `--every`-th pass is computed
                    and timed, and counts so often; tokens between are random

`update_s` is what is left of a step: forward, backward, optimizer, and all that is in no other part. Of TRL `scoring_s`
is what it does between rewards and the first forward, such as padding. Peak memory is VmHWM of the process that trains,
imports and, of danlu, saving included; danlu calls rewards in processes of their own, whose peaks sum to `workers_mib`.

The peers' environment: `pip install torch transformers trl accelerate`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from generation import SIZES, random_llama, random_prompts, samples
from peers import LEARNING_RATE, peak_rss_bytes
from sft import result_of

PROMPTS, SAMPLES, PROMPT_TOKENS = 8, 8, 64
CASES = ("equal", "samples")
PRECISIONS = {"5M": "fp32", "58M": "bf16"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PARTS = ("rollout_s", "reward_s", "scoring_s", "update_s")
REWARD = '''
def even_share(completions, **columns):
    """The share of even numbers among those of an answer."""
    answers = [text.split() for text in completions]
    return [sum(number[-1] in "02468" for number in answer) / max(1, len(answer)) for answer in answers]
'''


def number_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer in which each id has a text, its number: prompts of any length, and answers to be rewarded."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {str(number): number for number in range(3, vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "unk_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def make_inputs(folder: Path, size: str, steps: int) -> None:
    """Model, tokenizer, prompts and reward function, in one folder."""
    random_llama(folder / "model", size)
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        (folder / "model" / file).unlink(missing_ok=True)
    vocab_size = SIZES[size]["vocab_size"]
    number_tokenizer(folder / "model", vocab_size)
    prompts = random_prompts(PROMPTS * steps, PROMPT_TOKENS, vocab_size)
    lines = [json.dumps({"prompt": " ".join(map(str, prompt))}) + "\n" for prompt in prompts]
    (folder / "prompts.jsonl").write_text("".join(lines))
    (folder / "rewards.py").write_text(REWARD)


def lengths_of(case: str, new_tokens: int) -> list[int]:
    """The tokens of each answer of a rollout, by prompt and sample."""
    if case == "equal":
        return [new_tokens] * (PROMPTS * SAMPLES)
    return [length for _, length in samples(4)]


# -- runs in processes of their own -----------------------------------------------------------------------------------


def workers_mib() -> float:
    """The sum of the largest resident sets that the living children of this process have had."""
    (children,) = Path("/proc/self/task").glob(f"{os.getpid()}/children")
    statuses = [Path(f"/proc/{pid}/status").read_text() for pid in children.read_text().split()]
    return sum(int(status.partition("VmHWM:")[2].split()[0]) for status in statuses) / 1024


def force_lengths(lengths: Sequence[int], workers: list[float]) -> None:
    """From here on the engine's answers have these lengths, by prompt and sample of each rollout.

    workers: takes up `workers_mib` of each rollout; that of the first is before rewards are called.
    """
    from danlu.inference.embedded import EmbeddedEngine
    from danlu.inference.request import Completion, Request

    generate: Callable[..., list[Completion]] = EmbeddedEngine.generate

    def generate_lengths(engine: EmbeddedEngine, requests: Sequence[Request]) -> list[Completion]:
        keys = [(request, sample) for request in requests for sample in range(request.samples)]
        own = [
            replace(
                request,
                number=request.number * request.samples + sample,
                samples=1,
                max_new_tokens=length,
                stop_ids=frozenset(),
            )
            for (request, sample), length in zip(keys, lengths, strict=True)
        ]
        completions = generate(engine, own)
        workers.append(workers_mib())
        return [
            replace(completion, number=request.number, sample=sample)
            for (request, sample), completion in zip(keys, completions, strict=True)
        ]

    EmbeddedEngine.generate = generate_lengths  # type: ignore[method-assign]


def run_danlu(options: argparse.Namespace, lengths: Sequence[int], exact: bool) -> dict[str, Any]:
    """Trains in this process."""
    from danlu.cli.main import main as danlu

    workers: list[float] = []
    force_lengths(lengths, workers)
    with tempfile.TemporaryDirectory() as scratch:
        recipe = {
            "stage": "grpo",
            "model": str(options.inputs / "model"),
            "data": {
                "train": [str(options.inputs / "prompts.jsonl")],
                "prompt": "{prompt}",
                "cache": f"{scratch}/cache",
            },
            "rollout": {"samples": SAMPLES, "max_new_tokens": max(lengths), "temperature": 1.0},
            "rewards": [f"{options.inputs / 'rewards.py'}:even_share"],
            "batch": {"prompts": PROMPTS, "micro": options.micro},
            "optimizer": {"kind": "adamw", "learning_rate": LEARNING_RATE, "weight_decay": 0.0, "betas": [0.9, 0.999]},
            "schedule": {"kind": "constant", "warmup": 0},
            "steps": options.steps,
            "checkpoint": {"every": 10_000},
            "log": {"tensorboard": False},
            "precision": options.precision,
            "numerics": "exact" if exact else "fast",
            "threads": options.threads,
            "output": f"{scratch}/run",
        }
        file = Path(scratch) / "recipe.yaml"
        file.write_text(json.dumps(recipe))
        assert danlu(["train", str(file)]) == 0
        run = Path(scratch) / "run"
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        rollouts = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "elapsed_s" in line]
    steps = []
    for before, line in itertools.pairwise(lines):
        step_s = line["elapsed_s"] - before["elapsed_s"]
        parts = {part: line[part] for part in PARTS[:-1]}
        steps.append({"step_s": step_s, **parts, "update_s": step_s - sum(parts.values())})
    tokens: Counter[int] = Counter()
    for rollout in rollouts:
        tokens[rollout["step"]] += sum(len(answer["tokens"]) for answer in rollout["answers"])
    return {
        "steps": steps,
        "tokens": list(tokens.values()),
        "rewards": [line["reward"] for line in lines],
        "reward_std": lines[0]["reward_std"],
        "entropy": lines[0]["entropy"],
        "grad_norm": lines[0]["grad_norm"],
        "gap": max(line["gap"] for line in lines),
        "prompt_tokens": len(rollouts[0]["prompt"].split()),
        "peak_rss_bytes": peak_rss_bytes(),
        "workers_mib": round(workers[-1]),
    }


def run_without_cache(options: argparse.Namespace, lengths: Sequence[int]) -> dict[str, Any]:
    """Generates as many tokens as a rollout has with the training forward; answers that are complete are left out."""
    from danlu.models.loading import load

    dtype = DTYPES[options.precision]
    model = load(options.inputs / "model", dtype=dtype, device="cpu")
    prompts = random_prompts(PROMPTS, PROMPT_TOKENS, model.config.vocab_size)
    chance = torch.Generator().manual_seed(2)
    answers: list[list[int]] = [[] for _ in lengths]
    seconds = 0.0
    for place in range(-options.every, max(lengths)):  # those before 0 warm up, with the first prompt tokens alone
        live = [row for row, length in enumerate(lengths) if place < length]
        drawn = torch.randint(3, model.config.vocab_size, (len(live),), generator=chance).tolist()
        if place < 0 or place % options.every == 0:
            start = time.perf_counter()
            drawn = next_tokens(model, dtype, prompts, answers, live)
            if place >= 0:
                seconds += options.every * (time.perf_counter() - start)
        if place >= 0:
            for row, token in zip(live, drawn, strict=True):
                answers[row].append(token)
    return {"rollout_s": seconds, "tokens": [sum(map(len, answers))], "peak_rss_bytes": peak_rss_bytes()}


@torch.no_grad()
def next_tokens(
    model: Any, dtype: torch.dtype, prompts: Sequence[list[int]], answers: Sequence[list[int]], live: Sequence[int]
) -> list[int]:
    """A token for each of the live answers, drawn after a forward pass over the trees of all."""
    from danlu.core.types import Branch, Pack, Sample
    from danlu.data.batch import collate, pad_to_bucket
    from danlu.models.attend import attend_for

    items, last, offset = [], [], 0
    for number, prompt in enumerate(prompts):
        own = [answers[row] for row in live if row // SAMPLES == number]
        if not own:
            continue
        stops = np.cumsum([len(prompt), *(len(answer) for answer in own if answer)]).tolist()
        branches = [Branch(-1, 0, stops[0]), *(Branch(0, start, stop) for start, stop in itertools.pairwise(stops))]
        tokens = np.array(list(itertools.chain(prompt, *own)), np.int32)
        weights = np.zeros(len(tokens), np.float32)
        items.append(Pack((Sample(tokens, weights, f"prompt {number}", branches=tuple(branches)),)))
        ends = stops[1:] or stops * len(own)  # the first token of each answer follows the prompt
        last += [offset + stop - 1 for stop in ends]
        offset += len(tokens)
    batch = pad_to_bucket(collate(items))
    hidden = model(batch.tokens, batch.positions, attend_for(batch), dtype)
    probabilities = torch.softmax(model.logits(hidden[last]), -1)
    drawn: list[int] = torch.multinomial(probabilities, 1)[:, 0].tolist()
    return drawn


def run_here(options: argparse.Namespace) -> None:
    """One run of danlu, in a process that was started for it."""
    lengths = json.loads(options.lengths.read_text())
    if options.run == "no-cache":
        result = run_without_cache(options, lengths)
    else:
        result = run_danlu(options, lengths, options.run == "danlu-exact")
    print("RESULT " + json.dumps(result))


# -- turns ------------------------------------------------------------------------------------------------------------


def command_of(engine: str, inputs: Path, lengths: Path, precision: str, options: argparse.Namespace) -> list[str]:
    common = ["--lengths", str(lengths), "--steps", str(options.steps), "--threads", str(options.threads)]
    if not engine.startswith("trl-"):
        own = ["--run", engine, "--inputs", str(inputs), "--precision", precision]
        return [sys.executable, __file__, *own, "--micro", str(options.micro), "--every", str(options.every), *common]
    _, rows, *weights = engine.split("-")
    script = str(Path(__file__).with_name("peer_grpo.py"))
    command = [options.peers_python, script, "--model", str(inputs / "model"), "--rows", rows, *common]
    command += ["--prompts", str(inputs / "prompts.jsonl"), "--rewards", f"{inputs / 'rewards.py'}:even_share"]
    command += ["--bf16"] if precision == "bf16" else []
    return [*command, *(["--weights", "bfloat16"] if weights else [])]


def engines_of(options: argparse.Namespace, precision: str) -> list[str]:
    """In the order of a round."""
    engines = [engine for engine in options.engines if engine != "trl"]
    if "trl" in options.engines:
        kinds = ("", "-bf16") if precision == "bf16" else ("",)
        engines += [f"trl-{rows}{kind}" for rows in options.peer_rows for kind in kinds]
    return engines


def compare(size: str, case: str, inputs: Path, options: argparse.Namespace) -> None:
    precision = PRECISIONS[size]
    lengths = lengths_of(case, options.new_tokens)
    file = inputs / f"{case}.json"
    file.write_text(json.dumps(lengths))
    runs: dict[str, list[dict[str, Any]]] = {}
    for _ in range(options.rounds):
        for engine in engines_of(options, precision):
            result = result_of(command_of(engine, inputs, file, precision, options))
            assert set(result["tokens"]) == {sum(lengths)}, f"{engine}: {result['tokens']} tokens, not {sum(lengths)}"
            assert result.get("prompt_tokens", PROMPT_TOKENS) == PROMPT_TOKENS, f"{engine}: {result['prompt_tokens']}"
            runs.setdefault(engine, []).append(result)
    label = f"{size} {precision} {case}"
    for engine, results in runs.items():
        print(json.dumps({"case": label, "engine": engine, **summary(results), "rounds": options.rounds}), flush=True)
    print(json.dumps({"case": label, **ratios(runs)}), flush=True)


def step_median(results: Sequence[dict[str, Any]], part: str) -> float:
    return statistics.median(step[part] for result in results for step in result["steps"])


def peak_mib(results: Sequence[dict[str, Any]]) -> float:
    return statistics.median(result["peak_rss_bytes"] for result in results) / 2**20


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over steps; reward, its deviation, entropy and gradient are of the first step of the first round."""
    first = results[0]
    row: dict[str, Any] = {"tokens": first["tokens"][0], "peak_mib": round(peak_mib(results))}
    if "steps" not in first:
        return {"rollout_s": round(statistics.median(result["rollout_s"] for result in results), 3), **row}
    seconds = [step["step_s"] for result in results for step in result["steps"]]
    row |= {"steps_per_s": round(1 / statistics.median(seconds), 4), "step_s": round(statistics.median(seconds), 3)}
    row |= {"fastest_s": round(min(seconds), 3), "slowest_s": round(max(seconds), 3)}
    row |= {part: round(step_median(results, part), 3) for part in PARTS}
    row |= {"first_reward": round(first["rewards"][0], 4), "last_reward": round(first["rewards"][-1], 4)}
    row |= {name: round(first[name], 4) for name in ("reward_std", "entropy", "grad_norm")}
    return row | {name: first[name] for name in ("gap", "workers_mib") if name in first}


def ratios(runs: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """danlu beside each other engine: how many times as many steps, and the share of memory."""
    if "danlu" not in runs:
        return {}
    row: dict[str, float] = {}
    for engine, results in runs.items():
        if engine == "no-cache":
            seconds = statistics.median(result["rollout_s"] for result in results)
            row["rollout_over_no-cache"] = round(seconds / step_median(runs["danlu"], "rollout_s"), 2)
        elif engine != "danlu":
            row[f"steps_over_{engine}"] = round(
                step_median(results, "step_s") / step_median(runs["danlu"], "step_s"), 2
            )
            row[f"memory_of_{engine}"] = round(peak_mib(runs["danlu"]) / peak_mib(results), 2)
    return row


@cache
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", help="needed by the engine trl")
    parser.add_argument("--sizes", nargs="+", default=[*PRECISIONS], choices=[*PRECISIONS])
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=CASES)
    engines = ["danlu", "danlu-exact", "no-cache", "trl"]
    parser.add_argument("--engines", nargs="+", default=engines, choices=engines)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of a run, the first of which is not timed")
    parser.add_argument("--new-tokens", type=int, default=128, help="of `equal`")
    parser.add_argument("--peer-rows", nargs="+", type=int, default=[8, 64], help="TRL's micro-batches, in answers")
    parser.add_argument("--micro", default="auto", type=lambda value: value if value == "auto" else int(value))
    parser.add_argument("--every", type=int, default=4, help="of `no-cache`: which passes are timed")
    parser.add_argument("--threads", type=int, default=2)
    hidden = {"help": argparse.SUPPRESS}
    parser.add_argument("--run", choices=["danlu", "danlu-exact", "no-cache"], **hidden)
    parser.add_argument("--inputs", type=Path, **hidden)
    parser.add_argument("--lengths", type=Path, **hidden)
    parser.add_argument("--precision", choices=[*DTYPES], **hidden)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    options = parser().parse_args(argv)
    torch.set_num_threads(options.threads)
    if options.run:
        run_here(options)
        return
    if "trl" in options.engines and options.peers_python is None:
        parser().error("--peers-python: give the python of the peers' environment, or --engines without trl")
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # of the processes that are launched
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as scratch:
            make_inputs(Path(scratch), size, options.steps)
            for case in options.cases:
                compare(size, case, Path(scratch), options)


if __name__ == "__main__":
    main()
