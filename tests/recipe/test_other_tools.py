"""Every key of other tools leads to a key, a flag, or the reason why there is none."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders.docs_scripts import TOP, script
from pydantic import TypeAdapter, ValidationError

from danlu.cli.main import command
from danlu.core.shipped_files import templates
from danlu.recipe.explanation import keys
from danlu.recipe.other_tools import (
    BASES,
    LIST,
    NOT_THERE,
    NOTHING,
    PRODUCT,
    REFUSED,
    SAME,
    SUM,
    TITLES,
    ForeignKey,
    advice,
    find,
    of_tool,
    rows,
    value_lines,
)
from danlu.recipe.short_forms import expand
from danlu.recipe.stage_names import OBJECTIVE_NAMES
from danlu.recipe.type_hints import fields_at
from danlu.recipe.yaml_reader import parse
from danlu.registry import VERBS

ALL_ROWS = [row for tool in TITLES for row in rows(tool)]
STAGES = ("pretrain", "sft", "preference", "reward", "rl", "distill")


def test_every_row_leads_to_something_that_exists() -> None:
    known = set(keys())
    assert len(ALL_ROWS) > 1000
    wrong = [row for row in ALL_ROWS if row.is_key and row.target not in known]
    assert wrong == []
    for row in ALL_ROWS:
        assert row.stage in ("", *STAGES), row
        if row.is_command:
            _assert_command(row.target)


def _assert_command(target: str) -> None:
    """The verb exists, and its flag."""
    _, verb, *rest = target.split()
    node = command(verb, VERBS[verb].target)
    if rest and not rest[0].startswith("-"):
        node = node.commands[rest.pop(0)]
    flags = {flag for parameter in node.params for flag in parameter.opts}
    assert set(rest) <= flags, target


def test_no_name_stands_twice() -> None:
    counted = Counter((row.tool, row.stage, row.name) for row in ALL_ROWS)
    assert [each for each, count in counted.items() if count > 1] == []


def _results() -> Iterator[tuple[ForeignKey, str, str]]:
    """(row, key, text) of each value that a row writes out."""
    for row in ALL_ROWS:
        if row.values.startswith("@"):
            kind, names = row.parts
            assert row.values == LIST or (kind in (SUM, PRODUCT) and len(names) > 1), row
            continue
        for case in filter(None, row.values.split("; ")):
            assert ": " in case, row
            pattern, _, result = case.partition(": ")
            for part in result.split(", "):
                key, equals, text = part.partition("=")
                yield row, key if equals else row.target, text if equals else part
                if part == SAME:
                    yield from ((row, row.target, word) for word in pattern.split() if "*" not in word)


def test_every_value_that_is_written_is_one_that_the_key_takes() -> None:
    known = set(keys())
    checked = 0
    for row, key, text in _results():
        if text in (SAME, NOTHING, REFUSED, LIST) or row.is_command:
            continue
        assert key in known, row
        assert _takes(key, text), f"{row}: {key}: {text}"
        checked += 1
        if key == "model.chat_template":
            assert text in templates(), row
    assert checked > 200
    assert not _takes("adapter", "lorra") and not _takes("steps", "many")


def _takes(key: str, text: str) -> bool:
    """Whether a field with this key takes a value, as a short form too; keys that it needs besides do not count."""
    if (key, text) == ("evaluation", "null"):  # read before the types: evaluation_off.py
        return True
    return (key == "stage" and text in OBJECTIVE_NAMES) or any(_fits(field.hint, text) for field in fields_at(key))


def _fits(hint: Any, text: str) -> bool:
    node = parse(text, "", [])
    assert node is not None
    try:
        TypeAdapter(hint).validate_json(json.dumps(expand(node, hint).plain))
    except ValidationError as error:
        return {detail["type"] for detail in error.errors()} == {"missing"}
    return True


def test_every_key_of_published_files_leads_somewhere(shared_data: Path) -> None:
    """None leads nowhere, more of them to a key or a flag than to none, and the table of RESULTS.md says how many."""
    counting = script("keys_of_recipes")
    uses = list(counting.uses(shared_data / "recipes"))
    assert [use for use in uses if use.leads == counting.NOWHERE] == []
    assert len({(use.tool, use.file) for use in uses}) == 106
    counts = Counter((use.tool, use.leads) for use in uses)
    for tool in ("llama-factory", "axolotl", "torchtune"):
        assert counts[tool, counting.CONVERTED] > counts[tool, NOT_THERE] > 0, counts
    assert counting.table(uses) in (TOP / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    assert of_tool("trl", "no_such_key") is None


@pytest.mark.parametrize(
    ("tool", "stage", "key", "value", "written"),
    [
        ("llama-factory", "", "finetuning_type", "lora", {"adapter": "lora"}),
        ("llama-factory", "", "finetuning_type", "full", {"adapter": None}),
        ("llama-factory", "", "finetuning_type", "freeze", None),
        ("llama-factory", "", "lora_target", "q_proj,v_proj", {"adapter.targets": ["q_proj", "v_proj"]}),
        ("llama-factory", "", "lora_target", "all", {"adapter.targets": ["all-linear"]}),
        ("llama-factory", "", "stage", "rm", {"stage": "reward"}),
        ("llama-factory", "", "val_size", 0.1, {"data.eval": 0.1}),
        ("llama-factory", "", "val_size", 0.0, {}),
        ("llama-factory", "", "resume_from_checkpoint", None, {}),
        ("trl", "preference", "loss_type", "sigmoid", {"objective.kind": "sigmoid"}),
        ("trl", "preference", "loss_type", "exo_pair", {"objective.kind": "exo"}),
        ("trl", "rl", "loss_type", "dr_grpo", {"objective.kind": "dr-grpo"}),
        ("trl", "rl", "loss_type", "cispo", {"objective.kind": "grpo", "objective.loss": "cispo"}),
        ("trl", "rl", "beta", 0.04, {"objective.kl.coefficient": 0.04}),
        ("trl", "preference", "beta", 0.04, {"objective.beta": 0.04}),
        ("trl", "sft", "loss_type", "dft", None),
        ("trl", "", "logging_dir", "logs", {}),
        ("trl", "", "dataset_text_field", "text", {}),
        ("trl", "", "dataset_text_field", "body", {"data.columns": {"text": "body"}}),
        ("axolotl", "", "datasets.field_messages", "chat", {"data.train.columns": {"messages": "chat"}}),
        ("axolotl", "", "tokens", ["<plan>"], {"model.tokens": ["<plan>"]}),
        ("axolotl", "", "chat_template", "qwen_25", {"model.chat_template": "qwen"}),
        ("llama-factory", "", "template", "llama3", {"model.chat_template": "llama3"}),
        ("llama-factory", "", "enable_thinking", False, {"model.chat_template_kwargs": {"enable_thinking": False}}),
        ("trl", "", "ref_model", "base", {"reference.model": "base"}),
        ("axolotl", "", "adapter", "qlora", {"adapter": "lora", "quantization": "nf4"}),
        ("axolotl", "", "optimizer", "paged_adamw_8bit", {"optimizer.kind": "paged-adamw", "optimizer.bits": 8}),
        ("axolotl", "", "optimizer", "adamw_bnb_8bit", {"optimizer.kind": "adamw8bit"}),
        ("axolotl", "", "rl", "dpo", {"stage": "dpo"}),
        ("torchtune", "", "optimizer._component_", "torch.optim.AdamW", {"optimizer.kind": "adamw"}),
        ("torchtune", "", "optimizer.lr", 2e-5, {"optimizer.learning_rate": 2e-5}),
        ("torchtune", "", "optimizer", {"lr": 2e-5}, {}),
        ("torchtune", "", "optimizer", "adamw", None),
        ("torchtune", "", "reward_functions", [{"think_tag": "think"}], {}),
        ("torchtune", "", "reward_functions.think_tag", "think", None),
        ("axolotl", "", "chat_template_kwargs", {"a": 1}, {"model.chat_template_kwargs": {"a": 1}}),
        ("axolotl", "", "fsdp_config", {"version": 2}, {"parallel.shard": "zero3"}),
        (
            "torchtune",
            "",
            "dataset_val._component_",
            "torchtune.datasets.alpaca_cleaned_dataset",
            {"data.eval.format": "alpaca", "data.eval.path": "yahma/alpaca-cleaned"},
        ),
        ("torchtune", "", "metric_logger._component_", "x.WandBLogger", {"log.wandb": "torchtune"}),
        ("trl", "", "report_to", "wandb", {"log.wandb": "huggingface"}),
        ("trl", "", "eval_strategy", "no", {"evaluation": None}),
        ("trl", "", "eval_strategy", False, {"evaluation": None}),
        ("unsloth", "", "load_in_4bit", True, {"quantization": "nf4"}),
        ("unsloth", "", "max_grad_norm", 0, {"gradient_clipping": None}),
    ],
)
def test_values_of_other_tools(tool: str, stage: str, key: str, value: Any, written: dict[str, Any] | None) -> None:
    row = of_tool(tool, key, stage)
    assert row is not None
    assert row.convert(value) == written


def test_accumulated_batches_are_a_product() -> None:
    row = of_tool("trl", "gradient_accumulation_steps", "sft")
    assert row is not None
    others = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}
    assert row.convert(8, others) == {"batch.sequences": 32}
    assert row.convert(8, {**others, "num_processes": 2}) == {"batch.sequences": 64}
    of_pairs = of_tool("trl", "gradient_accumulation_steps", "preference")
    assert of_pairs is not None and of_pairs.convert(8, others) == {"batch.rows": 32}


def test_a_product_is_written_out() -> None:
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}
    said = advice("gradient_accumulation_steps", 8, "sft", given)
    assert said is not None and said.startswith(
        "danlu's key for it is batch.sequences: write batch.sequences: 32 (per_device_train_batch_size x "
        "gradient_accumulation_steps), times num_processes. danlu accumulates"
    )
    said = advice("gradient_accumulation_steps", 8, "preference", {**given, "num_processes": 2})
    assert said is not None and "write batch.rows: 64 (" in said and "times" not in said


@pytest.mark.parametrize(
    ("name", "value", "stage", "said"),
    [
        ("lora-rank", 8, "sft", "danlu's key for it is adapter.rank"),
        ("--lora_rank", None, "", "danlu's key for it is adapter.rank"),
        ("finetuning_type", "full", "sft", "danlu's key for it is adapter: write adapter: null"),
        ("loss_type", "nca_pair", "preference", "danlu's key for it is objective.kind: write objective.kind: nca"),
        (
            "gradient_accumulation_steps",
            8,
            "sft",
            "danlu's key for it is batch.sequences: per_device_train_batch_size x gradient_accumulation_steps x "
            "num_processes",
        ),
        ("val_size", 0.1, "sft", "danlu's key for it is data.eval"),
        ("resume_from_checkpoint", True, "", "danlu has `danlu train --resume` for it: By default (auto) a run goes"),
        ("logging_dir", "logs", "", "danlu does it by itself: TensorBoard events lie in the run folder"),
        ("neftune_noise_alpha", 5, "", "danlu does not have it: No noise is added to embeddings. Leave it out"),
        ("ref_model", "base", "preference", "danlu's key for it is reference.model"),
        ("dataset_text_field", "body", "sft", "danlu's key for it is data.columns: write data.columns: {text: body}"),
        ("optimizer.lr", 1e-4, "", "danlu's key for it is optimizer.learning_rate"),
        ("nothing_like_it", 1, "", None),
    ],
)
def test_advice(name: str, value: Any, stage: str, said: str | None) -> None:
    given = advice(name, value, stage)
    assert given is None if said is None else given is not None and given.startswith(said)


@pytest.mark.parametrize(
    ("key", "value", "lines"),
    [
        ("adapter", "qlora", "adapter: lora and quantization: nf4"),
        ("optimizer", "adamw_torch", "optimizer.kind: adamw"),
        ("optimizer", "adamw_8bit", "optimizer.kind: adamw8bit"),
        ("quantization", 4, "quantization: nf4"),
        ("parallel.shard", "fsdp", "parallel.shard: zero3"),
        ("precision", "bfloat16", "precision: bf16"),
        ("adapter", "full", "adapter: null"),
        ("data.packing.kind", "bfd", "data.packing: best-fit"),
        ("memory.recompute.kind", "true", None),
        ("adapter", "lora", None),
        ("adapter", "oft", None),
        ("optimizer", "nothing", None),
    ],
)
def test_kinds_of_other_tools(key: str, value: str, lines: str | None) -> None:
    assert value_lines(key, value) == lines


def test_tools_inherit_only_from_tools() -> None:
    assert {tool for bases in BASES.values() for tool in bases} | set(BASES) <= set(TITLES)
    assert {row.target for row in find("learning_rate")} == {"optimizer.learning_rate"}
    assert all(re.fullmatch(r"[\w.*]+", row.name) for row in ALL_ROWS)
