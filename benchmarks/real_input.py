"""Real text and conversations: pretrain a 5M model, tune it and a published one; what came of it, as Markdown.

    python benchmarks/real_input.py DATA OUTPUT [--only pretrain|sft|stories]

DATA holds text/*.txt|jsonl, instruct/*.json, tokenizers/minimind and weights/stories260K-hf. The recipes are written to
OUTPUT and run by `danlu train`, so each can be read, changed and run again; a run that is finished is not repeated. The
perplexity on wikitext2_valid is on text that no part of the training text is like.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

TEXTS = [
    "books/alice.txt",
    "books/moby_dick.txt",
    "books/pride_and_prejudice.txt",
    "c4_demo.jsonl",
    "tang_poems_zh.txt",
    "tinyshakespeare.txt",
    "wiki_demo.txt",
]
CONVERSATIONS = [
    "alpaca_en_demo.json",
    "alpaca_zh_demo.json",
    "glaive_toolcall_en_demo.json",
    "fastchat_dummy_conversation.json",
]
# For a tokenizer without a chat template and without special tokens for turns.
PLAIN_TEMPLATE = """\
{%- if tools -%}Tools: {{ tools | tojson }}
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
Answer: {{ message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor -%}
{{ eos_token }}
{% else -%}
{{ message.role | capitalize }}: {{ message.content }}
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}Answer: {% endif -%}
"""
QUESTIONS = ["What is the capital of France?", "介绍一下你自己。"]


def recipes(data: Path, output: Path) -> dict[str, dict[str, Any]]:
    conversations = [str(data / "instruct" / name) for name in CONVERSATIONS]
    config = {
        "model_type": "llama",
        "hidden_size": 256,
        "num_hidden_layers": 5,
        "intermediate_size": 688,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    }
    return {
        "pretrain": {
            "stage": "pretrain",
            "model": {"config": config, "tokenizer": str(data / "tokenizers" / "minimind")},
            "data": {
                "train": [str(data / "text" / name) for name in TEXTS],
                "eval": [str(data / "text" / "wikitext2_valid.txt")],
                "max_length": 512,
                "packing": "concatenate",
            },
            "optimizer": {"kind": "adamw", "learning_rate": 1.5e-3},
            "batch": {"tokens": 8192},
            "epochs": 2,
            "evaluation": {"every": 150, "samples": {"prompts": ["It was a dark night, and"], "max_new_tokens": 40}},
            "output": str(output / "pretrain"),
        },
        "sft": {
            "stage": "sft",
            "model": str(output / "pretrain"),
            "data": {"train": conversations, "eval": 0.05, "max_length": 1024},
            "optimizer": {"kind": "adamw", "learning_rate": 8e-4},
            "batch": {"sequences": 8},
            "epochs": 2,
            "evaluation": {"every": 30, "samples": {"prompts": QUESTIONS, "max_new_tokens": 40}},
            "output": str(output / "sft"),
        },
        "stories": {
            "stage": "sft",
            "model": {
                "path": str(data / "weights" / "stories260K-hf"),
                "chat_template": str(output / "plain.jinja"),
            },
            "data": {"train": conversations, "eval": 0.05, "max_length": 512, "overlong": "split"},
            "optimizer": {"kind": "adamw", "learning_rate": 2e-3},
            "batch": {"sequences": 16},
            "epochs": 2,
            "evaluation": {"every": 50, "samples": {"prompts": QUESTIONS[:1], "max_new_tokens": 40}},
            "output": str(output / "stories"),
        },
    }


def report(name: str, recipe: dict[str, Any]) -> None:
    """A table of the evaluations, with the training loss of the steps before each."""
    lines = [json.loads(line) for line in (Path(recipe["output"]) / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    print(f"\n### {name}: {len(steps)} steps, {sum(line['tokens'] for line in steps):,} tokens\n")
    print("| step | training loss | held-out loss | perplexity | token accuracy |\n|---|---|---|---|---|")
    before = 0
    for line in lines:
        if "eval_loss" in line:
            recent = [step["loss"] for step in steps if before < step["step"] <= line["step"]]
            before = line["step"]
            print(
                f"| {line['step']} | {sum(recent) / max(1, len(recent)):.3f} | {line['eval_loss']:.3f} | "
                f"{line['eval_perplexity']:.1f} | {line['eval_accuracy']:.1%} |"
            )
    for line in lines[-5:]:
        if line.get("event") == "sample":
            print(f"\n- {line['prompt']!r} -> {line['text']!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--only", choices=["pretrain", "sft", "stories"])
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "plain.jinja").write_text(PLAIN_TEMPLATE)
    for name, recipe in recipes(options.data.resolve(), options.output.resolve()).items():
        if options.only in (None, name):
            file = options.output / f"{name}.yaml"
            file.write_text(yaml.safe_dump(recipe, allow_unicode=True, sort_keys=False))
            subprocess.run([sys.executable, "-m", "danlu", "train", str(file)], check=True)
            report(name, recipe)


if __name__ == "__main__":
    main()
