"""Reinforcement learning on tasks with a checkable answer, and with LoRA beside full training; figures as Markdown.

    python benchmarks/rl_tasks.py tasks DATA OUTPUT [--steps 40] [--seed 0]   simple_arithmetic and countdown
    python benchmarks/rl_tasks.py length DATA OUTPUT [--steps 40] [--seed 0]  a reward for short stories: full and LoRA
    python benchmarks/rl_tasks.py rollouts DATA OUTPUT [--steps 40] [--seeds 0 1 2]  in full, rollouts in 8 bits

`tasks` trains a model of 0.9M parameters from scratch with danlu alone: a tokenizer, SFT on generated puzzles of both
kinds, then GRPO on each kind from there. What it is judged by is never trained on: the 60 sums of BIG-bench's
simple_arithmetic in DATA/rl and `--more-sums` others of two and three digits like them, and the last 500 rows of
DATA/rl/countdown_generated.jsonl (the first 500 are prompts of GRPO). Before and after are greedy answers, judged by
the reward of the recipe (`danlu eval --rewards`). `--tasks` chooses among the two kinds; SFT has both in any case.

The table has the difference with its standard error in points, as of two samples that have nothing to do with each
other. That is more than it is, since both models answer the same rows.

`length` starts from DATA/weights/stories260K-hf, lets it write one sentence after openings of stories, and rewards
short ones: 0 up to 5 tokens, falling to -1 at 45.

`rollouts` trains on that reward in full with answers that are drawn in the trainer's type, with products and cache in
int8 (corrected by `importance: token`, the default there), and so without correction, for each seed.

Recipes, data and rewards are written to OUTPUT and run by `danlu train`, so that each can be read, changed and run
again; a run that is finished is not repeated.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import yaml

CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
REWARD = '''
"""1 for an expression that uses each number once and gives the target, as Countdown asks for; else 0."""

import ast
import operator
from fractions import Fraction

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def value(node, used):
    """The value of an expression, whose numbers are added to `used`. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](value(node.left, used), value(node.right, used))
    raise ValueError("no sum, difference, product or quotient of numbers")


def countdown(completion, nums, target, **row):
    used = []
    try:
        result = value(ast.parse(completion.strip(), mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return 0.0
    return float(result == target and sorted(used) == sorted(nums))
'''


def danlu(*arguments: object) -> str:
    """Runs a verb and returns what it says on stdout."""
    command = [sys.executable, "-m", "danlu", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def train(file: Path, recipe: dict[str, Any]) -> list[dict[str, Any]]:
    """Writes a recipe, trains it, and returns the lines of metrics.jsonl."""
    file.write_text(yaml.safe_dump(recipe, sort_keys=False))
    danlu("train", file)
    lines = (Path(recipe["output"]) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


# -- simple_arithmetic and countdown ----------------------------------------------------------------------------------


def sum_question(a: int, b: int) -> str:
    return f"Q: {a} + {b} ="


def worked_sum(a: int, b: int) -> str:
    """From the ones on, each digit with what is carried; the result last: `7+8=15, 4+2+1=7, 75`."""
    steps, carried, left, right = [], 0, a, b
    while left or right or not steps:
        digits = left % 10 + right % 10 + carried
        steps.append(f"{left % 10}+{right % 10}{'+1' if carried else ''}={digits}")
        carried, left, right = digits // 10, left // 10, right // 10
    return ", ".join([*steps, str(a + b)])


def sums(count: int, asked: set[str], chance: random.Random, least_digits: int = 1) -> Iterator[tuple[int, int]]:
    """Sums of two numbers of up to three digits that are not among those `asked`, as often as each other length.

    least_digits: of the longer number.
    """
    while count:
        digits = chance.randint(least_digits, 3)
        pair = tuple(chance.randint(1, 10 ** (digits if other else chance.randint(1, digits)) - 1) for other in (0, 1))
        a, b = chance.sample(pair, 2)
        if sum_question(a, b) not in asked:
            count -= 1
            yield a, b


def countdown_question(row: dict[str, Any]) -> str:
    return f"Make {row['target']} of {', '.join(map(str, row['nums']))}."


def puzzles(count: int, known: set[str], chance: random.Random) -> Iterator[dict[str, Any]]:
    """Puzzles of three or four numbers with a solution, none of which is among those `known`."""
    while count:
        nums = sorted(chance.randint(1, 99) for _ in range(chance.choice((3, 3, 3, 4))))
        parts = [(str(number), number) for number in nums]
        while len(parts) > 1:
            chance.shuffle(parts)
            (left, a), (right, b), *others = parts
            sign, result = chance.choice((("+", a + b), ("-", a - b), *((("*", a * b),) if a * b < 100 else ())))
            parts = [(f"({left}{sign}{right})", result), *others]
        row = {"nums": nums, "target": parts[0][1], "solution": parts[0][0]}
        if 10 <= row["target"] <= 200 and countdown_question(row) not in known:
            count -= 1
            yield row


def conversation(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def tasks(data: Path, output: Path, options: argparse.Namespace) -> None:
    """SFT on both kinds of puzzles, GRPO on each, and a table of before and after."""
    from danlu.data.tokenizer_training import train_tokenizer

    given = [json.loads(line) for line in (data / "rl/bigbench_simple_arithmetic.jsonl").read_text().splitlines()]
    held_out_sums = [{"question": row["context"], "answer": row["continuation"]} for row in given]
    made = [json.loads(line) for line in (data / "rl/countdown_generated.jsonl").read_text().splitlines()]
    every = [row | {"question": countdown_question(row)} for row in made]
    chance, others = random.Random(0), random.Random(1)
    more: dict[str, str] = {}
    of_big_bench = {row["question"] for row in held_out_sums}
    while (
        len(more) < options.more_sums
    ):  # a stream of its own: what is trained on follows from `chance` as without them
        (pair,) = sums(1, of_big_bench, others, least_digits=2)
        more[sum_question(*pair)] = str(sum(pair))
    held_out_sums += [{"question": question, "answer": answer} for question, answer in more.items()]
    asked = {row["question"] for row in held_out_sums}
    known = {row["question"] for row in every}
    worked = [conversation(sum_question(a, b), worked_sum(a, b)) for a, b in sums(options.worked_sums, asked, chance)]
    solved = [conversation(countdown_question(row), row["solution"]) for row in puzzles(options.solved, known, chance)]
    prompts = sums(32 * options.steps, asked, chance)
    files = {
        "sft": write_rows(output / "sft.jsonl", chance.sample([*worked, *solved], len(worked) + len(solved))),
        "simple_arithmetic": write_rows(
            output / "sums.jsonl", [{"question": sum_question(a, b), "answer": str(a + b)} for a, b in prompts]
        ),
        "countdown": write_rows(output / "countdown.jsonl", every[:500]),
    }
    held_out = {
        "simple_arithmetic": write_rows(output / "held-out-sums.jsonl", held_out_sums),
        "countdown": write_rows(output / "held-out-countdown.jsonl", every[500:]),
    }
    (output / "countdown_reward.py").write_text(REWARD)
    rewards: dict[str, Any] = {
        "simple_arithmetic": {"kind": "numeric", "column": "answer"},
        "countdown": f"{output / 'countdown_reward.py'}:countdown",
    }
    texts = (message["content"] for row in [*worked, *solved] for message in row["messages"])
    train_tokenizer(texts, 300, output / "tokenizer")
    base = output / "sft"
    sft = {
        "stage": "sft",
        "model": {"config": CONFIG, "tokenizer": str(output / "tokenizer")},
        "data": {"train": [str(files["sft"])], "max_length": 256},
        "optimizer": {"kind": "adamw", "learning_rate": 2e-3, "weight_decay": 0.1},
        "schedule": {"kind": "cosine", "warmup": 0.05, "floor": 0.1},
        "batch": {"sequences": 16},
        "epochs": options.epochs,
        "precision": "bf16",
        "seed": options.seed,
        "threads": options.threads,
        "output": str(base),
    }
    print(f"sft: loss {train(output / 'sft.yaml', sft)[-1]['loss']:.4f}", flush=True)
    print(
        "| task | held out | SFT | SFT + GRPO | points more | reward of drawn answers, first and last tenth |\n"
        "|---|---|---|---|---|---|"
    )
    for task, file in files.items():
        if task not in options.tasks:
            continue
        recipe = {
            "stage": "grpo",
            "model": str(base),
            "data": {"train": [str(file)], "prompt": "{question}", "max_length": 96},
            "rollout": {"samples": options.samples, "max_new_tokens": 40},
            "rewards": [rewards[task]],
            "optimizer": {"kind": "adamw", "learning_rate": 1e-4, "weight_decay": 0.0},
            "schedule": {"kind": "constant", "warmup": 0.05},
            "batch": {"prompts": 32},
            "steps": options.steps,
            "precision": "fp32",
            "seed": options.seed,
            "threads": options.threads,
            "output": str(output / task),
        }
        lines = train(output / f"{task}.yaml", recipe)
        (before, count), (after, _) = (
            right(run, output / f"{task}.yaml", held_out[task]) for run in (base, output / task)
        )
        error = ((before * (1 - before) + after * (1 - after)) / count) ** 0.5
        first, last = ends([line["reward"] for line in lines if "reward" in line])
        print(
            f"| {task} | {count} | {before:.1%} | {after:.1%} | {100 * (after - before):+.1f} +- {100 * error:.1f} | "
            f"{first:.3f}, {last:.3f} |",
            flush=True,
        )


def right(run: Path, recipe: Path, rows: Path) -> tuple[float, int]:
    """The share of greedy answers to the rows of a file that are right, and the number of rows."""
    flags = ("--samples", 1, "--temperature", 0, "--max-new-tokens", 40, "--json")
    told = json.loads(danlu("eval", run, "--rewards", recipe, "--data", rows, *flags))
    (summary,) = told["rewards"].values()
    return summary["mean"], told["rows"]


# -- a reward for short answers ---------------------------------------------------------------------------------------

OPENINGS = ("Once upon a time", "One day", "There was", "Lily and Tom", "A little dog", "In the park", "The sun", "Mia")


def short_stories(data: Path, output: Path, name: str, options: argparse.Namespace, rate: float) -> dict[str, Any]:
    """The recipe of a run with a reward for short answers."""
    rows = write_rows(output / "openings.jsonl", [{"prompt": opening} for opening in OPENINGS])
    return {
        "stage": "grpo",
        "model": str(data / "weights/stories260K-hf"),
        "data": {"train": [str(rows)], "max_length": 64},
        "rollout": {"samples": 8, "max_new_tokens": 45, "stop_strings": ["."]},
        "rewards": [{"kind": "length", "most": 5, "slack": 40}],
        "optimizer": {"kind": "adamw", "learning_rate": rate, "weight_decay": 0.0},
        "schedule": {"kind": "constant", "warmup": 0},
        "batch": {"prompts": 8},
        "steps": options.steps,
        "precision": "fp32",
        "seed": options.seed,
        "threads": options.threads,
        "output": str(output / name),
    }


def length(data: Path, output: Path, options: argparse.Namespace) -> None:
    """GRPO with the same reward in full and with LoRA: a table of reward and length along the run."""
    adapters: dict[str, Any] = {
        "full": None,
        "lora": {"kind": "lora", "rank": 8, "alpha": 16, "targets": "all-linear"},
    }
    curves = {}
    for name, adapter in adapters.items():
        recipe = short_stories(data, output, name, options, options.rates[name != "full"])
        recipe |= {"adapter": adapter} if adapter else {}
        lines = [line for line in train(output / f"{name}.yaml", recipe) if "reward" in line]
        curves[name] = lines
    print("| steps | full: reward | tokens | LoRA: reward | tokens |\n|---|---|---|---|---|")
    bounds = [round(part * options.steps / 5) for part in range(6)]
    for start, end in pairwise(bounds):
        cells = [
            f"{fmean(line['reward'] for line in lines[start:end]):.3f} | "
            f"{fmean(line['length'] for line in lines[start:end]):.1f}"
            for lines in curves.values()
        ]
        print(f"| {start + 1} to {end} | {' | '.join(cells)} |")


def rollouts(data: Path, output: Path, options: argparse.Namespace) -> None:
    """GRPO with the same reward and rollouts in 8 bits: rewards of each seed, and their means with the spread."""
    int8 = {"precision": "int8", "cache": "int8"}
    kinds: dict[str, dict[str, Any]] = {
        "fp32": {},
        "int8": {"rollout": int8},
        "int8, uncorrected": {"rollout": int8, "stage": "rl", "objective": [{"kind": "grpo", "importance": None}]},
    }
    print("| rollouts | reward over the run | spread of seeds | in the last tenth | spread | by seed |")
    print("|---|---|---|---|---|---|")
    for kind, changes in kinds.items():
        rewards = []
        for seed in options.seeds:
            options.seed = seed
            name = f"{kind.replace(', ', '-')}-{seed}"
            recipe = short_stories(data, output, name, options, options.rates[0])
            recipe |= {**changes, "rollout": recipe["rollout"] | changes.get("rollout", {})}
            lines = train(output / f"{name}.yaml", recipe)
            rewards.append([line["reward"] for line in lines if "reward" in line])
        means, lasts = [fmean(each) for each in rewards], [ends(each)[1] for each in rewards]
        figures = (fmean(means), stdev(means), fmean(lasts), stdev(lasts))
        by_seed = ", ".join(f"{mean:.4f}" for mean in means)
        print(f"| {kind} | {' | '.join(f'{figure:.4f}' for figure in figures)} | {by_seed} |", flush=True)


def ends(values: list[float]) -> tuple[float, float]:
    """The means of the first and of the last tenth."""
    tenth = max(1, len(values) // 10)
    return fmean(values[:tenth]), fmean(values[-tenth:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["tasks", "length", "rollouts"])
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=40, help="of each GRPO run")
    parser.add_argument("--samples", type=int, default=8, help="tasks: answers to each prompt")
    kinds = ["simple_arithmetic", "countdown"]
    parser.add_argument("--tasks", nargs="+", default=kinds, choices=kinds)
    parser.add_argument("--more-sums", type=int, default=540, help="that it is judged by, beside BIG-bench's 60")
    parser.add_argument("--worked-sums", type=int, default=4000)
    parser.add_argument("--solved", type=int, default=6000, help="countdown puzzles of SFT")
    parser.add_argument("--epochs", type=int, default=2, help="of SFT")
    parser.add_argument("--rates", type=float, nargs=2, default=[1e-4, 2e-3], help="length: learning rates, full, LoRA")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="rollouts")
    options = parser.parse_args()
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    run: Callable[[Path, Path, argparse.Namespace], None] = {
        "tasks": tasks,
        "length": length,
        "rollouts": rollouts,
    }[options.what]
    run(options.data.resolve(), output, options)


if __name__ == "__main__":
    main()
