"""Recipes, rows and reward functions of stage rl that are wrong."""

from __future__ import annotations

import json
import shutil
from typing import Any

from hostile.case import Arrange, Case, Place, both, json_with

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
            laid_over = isinstance(change, dict) and isinstance(values.get(name), dict)
            values[name] = {**values[name], **change} if laid_over else change
        for section in ("data", "batch"):
            values[section] = {key: value for key, value in values[section].items() if value is not None}
        place.recipe(**values)

    return arrange


UNREWARDED = "prompts 0 to 1 have no reward, and reward_limits.failures is 0.5. short:"


def words(place: Place) -> None:
    """Puts a tokenizer of three words beside the recipe, without one for words that it does not know."""
    shutil.copytree(place.world.tokenizer, place.tmp / "words")
    file = place.tmp / "words" / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    content["pre_tokenizer"], content["decoder"] = {"type": "Whitespace"}, None
    known = {word: number for number, word in enumerate(("red", "fox", "owl"), len(content["added_tokens"]))}
    known |= {token["content"]: token["id"] for token in content["added_tokens"]}
    content["model"] = {"type": "WordLevel", "vocab": known, "unk_token": "none"}
    file.write_text(json.dumps(content), encoding="utf-8")
    (place.tmp / "words" / "chat_template.jinja").unlink(missing_ok=True)
    json_with(place.tmp / "words" / "tokenizer_config.json", chat_template=None)


CASES = [
    Case(
        "processes for rollouts that wait for their answers",
        TRAIN,
        2,
        ("error: r.yaml:", "rollout.processes: only read with rollout.staleness above 0: the trainer itself answers"),
        rl(rollout={"processes": 2}),
    ),
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
        (" rewards.0: @/rewards.py has no function 'long'; it has short",),
        rl(rewards=["rewards.py:long"]),
    ),
    Case(
        "reward file that is no Python",
        TRAIN,
        2,
        (" rewards.0: @/rewards.py: the file raises SyntaxError: expected ':'",),
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
        "environment file missing",
        TRAIN,
        2,
        ("error: r.yaml:", "environment.path: no file or folder 'none.py' in '@'"),
        rl(environment="none.py:Maze", rewards=None),
    ),
    Case(
        "environment class missing",
        TRAIN,
        2,
        (" environment: @/rewards.py has no function 'Maze'; it has short",),
        rl(environment="rewards.py:Maze", rewards=None),
    ),
    Case(
        "environment without methods",
        TRAIN,
        7,
        ("of the answers to prompts 0 to 1 have no reward", "environment: TypeError: an environment has the methods"),
        rl(environment="rewards.py:short", rewards=None, reward="def short():\n    return 1\n"),
        max_bytes=120 << 20,
    ),
    Case(
        "environment without a name",
        TRAIN,
        2,
        ("error: r.yaml:", "environment.path: 'rewards.py' names no class: write its file and its name"),
        rl(environment={"kind": "python", "path": "rewards.py"}),
    ),
    Case(
        "tools without a name",
        TRAIN,
        2,
        ("error: r.yaml:", "environment.tools.0: 'rewards.py' names no function: write its file and its name"),
        rl(environment={"kind": "tools", "tools": ["rewards.py"]}),
    ),
    Case(
        "tools that say nothing of themselves",
        TRAIN,
        2,
        ("environment.tools.0: @/rewards.py:short: ", "with a line for each argument under Args:"),
        rl(environment={"kind": "tools", "tools": ["rewards.py:short"]}),
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
        "reward that raises",
        TRAIN,
        7,
        (
            f"error: 100% of the answers to {UNREWARDED} ValueError: no such unit: furlong (rewards.py:2)",
            "(prompt 0, sample 0, and 3 more). The answers are in rollouts.jsonl. Try the rewards on",
        ),
        rl(reward="def short(completion, **row):\n    raise ValueError('no such unit: furlong')\n"),
        max_bytes=120 << 20,
    ),
    Case(
        "reward that hangs",
        TRAIN,
        7,
        (f"error: 100% of the answers to {UNREWARDED} no answer within 0.2 s",),
        rl(
            reward="def short(completion, **row):\n    while True:\n        pass\n",
            reward_limits={"timeout_s": 0.2},
        ),
        max_bytes=120 << 20,
    ),
    Case(
        "reward that is None for all answers",
        TRAIN,
        7,
        (f"error: 100% of the answers to {UNREWARDED} it gave None",),
        rl(reward="def short(completion, **row):\n    return None\n"),
        max_bytes=120 << 20,
    ),
    Case(
        "reward that is NaN for all answers",
        TRAIN,
        7,
        (f"error: 100% of the answers to {UNREWARDED} it gave nan",),
        rl(reward="def short(completion, **row):\n    return float('nan')\n"),
        max_bytes=120 << 20,
    ),
    Case(
        "reward beyond float32",
        TRAIN,
        7,
        (f"error: 100% of the answers to {UNREWARDED} it gave", "e+39, more than float32 holds"),
        rl(reward="def short(completion, **row):\n    return 1e39 * len(completion)\n"),
        max_bytes=120 << 20,
    ),
    Case(
        "reward that is a text",
        TRAIN,
        7,
        (
            f"error: 100% of the answers to {UNREWARDED} TypeError: a reward is a number",
            "the function gave str: 'good'",
        ),
        rl(reward="def short(completion, **row):\n    return 'good'\n"),
        max_bytes=120 << 20,
    ),
    Case(
        "word without a token in a prompt",
        TRAIN,
        3,
        ("error: rows.jsonl:1: @/words: this tokenizer has no token for 'What'", "none for unknown words (unk_token)"),
        both(words, rl(model={"tokenizer": "@/words"})),
        max_bytes=120 << 20,
    ),
    Case(
        "prompts longer than the context of the model",
        TRAIN,
        3,
        ("error: rows.jsonl:1: the prompt has 1,216 tokens, and the model has 128 positions", "1 of 2 prompts are too"),
        rl(
            {"question": "red " * 400, "answer": "fox"}, {"question": "owl", "answer": "owl"}, data={"max_length": 4096}
        ),
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
