"""Recipes, rows and reward functions of stage rl that are wrong."""

from __future__ import annotations

from typing import Any

from hostile.case import Arrange, Case, Place

TRAIN = ("train", "r.yaml")
GOOD = "def short(completion, **row):\n    return 1.0\n"
ROWS = ({"question": "What is red?", "answer": "fox"}, {"question": "What is blue?", "answer": "owl"})


def rl(*lines: object, reward: str = GOOD, **changes: Any) -> Arrange:
    """Arranges rows, `rewards.py` and a recipe of stage rl over them."""

    def arrange(place: Place) -> None:
        place.rows(*(lines or ROWS))
        (place.tmp / "rewards.py").write_text(reward, encoding="utf-8")
        values: dict[str, Any] = {
            "stage": "grpo",
            "model": {"path": "@base", "config": None, "tokenizer": None},
            "data": {"train": "@/rows.jsonl", "prompt": "{question}", "cache": None},
            "rewards": ["rewards.py:short"],
            "rollout": {"samples": 2, "max_new_tokens": 4},
            "batch": {"sequences": None, "micro": None, "prompts": 2},
        }
        for name, change in changes.items():
            both = isinstance(change, dict) and isinstance(values.get(name), dict)
            values[name] = {**values[name], **change} if both else change
        for section in ("data", "batch"):
            values[section] = {key: value for key, value in values[section].items() if value is not None}
        place.recipe(**values)

    return arrange


CASES = [
    Case("no rewards", TRAIN, 2, ("error: r.yaml:", "rewards: missing: stage rl learns from them"), rl(rewards=None)),
    Case(
        "reward file missing",
        TRAIN,
        2,
        ("error: r.yaml:", "rewards.0.path: no file or folder 'none.py' in '@'"),
        rl(rewards=["none.py:short"]),
    ),
    Case(
        "reward function missing",
        TRAIN,
        2,
        ("error: rewards.0: @/rewards.py has no function 'long'; it has short",),
        rl(rewards=["rewards.py:long"]),
    ),
    Case(
        "reward file that is no Python",
        TRAIN,
        2,
        ("error: rewards.0: @/rewards.py: the file raises SyntaxError: expected ':'",),
        rl(reward="def short(completion, **row)\n    return 1.0\n"),
    ),
    Case(
        "reward function of a column that is not there",
        TRAIN,
        3,
        ("error: rows.jsonl:1: reward short reads the column 'solution'; the row has 'question', 'answer'",),
        rl(reward="def short(completion, solution):\n    return 1.0\n"),
        max_bytes=120 << 20,
    ),
    Case(
        "reward of a column that is not there",
        TRAIN,
        3,
        ("error: rows.jsonl:1: reward exact reads the column 'answr'; the row has", "Did you mean 'answer'?"),
        rl(rewards=[{"kind": "exact", "column": "answr"}]),
        max_bytes=120 << 20,
    ),
    Case(
        "template of a column that is not there",
        TRAIN,
        3,
        ("error: rows.jsonl:1: data.prompt: the template names the column 'qestion'", "Did you mean 'question'?"),
        rl(data={"prompt": "{qestion}"}),
        max_bytes=120 << 20,
    ),
    Case(
        "updates that do not divide the prompts",
        TRAIN,
        2,
        ("error: r.yaml:", "batch.updates: 3 does not divide the 4 prompts of a rollout. Use 2 or 4"),
        rl(batch={"prompts": 4, "updates": 3}),
    ),
    Case(
        "group of one answer",
        TRAIN,
        2,
        ("error: r.yaml:", "rollout.samples: 1, and objective.baseline: group compares the answers to a prompt"),
        rl(rollout={"samples": 1}),
    ),
    Case(
        "answers at temperature 0",
        TRAIN,
        2,
        ("error: r.yaml:", "rollout.temperature: 0 takes the likeliest token each time, so all answers"),
        rl(rollout={"temperature": 0}),
    ),
    Case(
        "answers longer than everything",
        TRAIN,
        2,
        ("error: r.yaml:", "rollout.max_new_tokens: 64 leaves no room for a prompt in data.max_length 64"),
        rl(rollout={"max_new_tokens": 64}),
    ),
    Case(
        "rewards of another stage",
        TRAIN,
        2,
        ("error: r.yaml:", "rewards: only read with stage rl; this is sft"),
        lambda place: place.recipe(rewards=[{"kind": "exact", "column": "answer"}]),
    ),
]
