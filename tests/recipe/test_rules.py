"""Rules between keys: each row of the table breaks exactly one of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from danlu.core.errors import RecipeError
from danlu.recipe import load
from danlu.recipe.explanation import explain as look_up
from danlu.recipe.explanation import keys
from danlu.recipe.rules import is_local, notes
from danlu.recipe.sections import ReadWith
from danlu.recipe.type_hints import fields_at, literal_values, walk_fields

Write = Callable[..., str]

BASE = {"stage": "sft", "model": "base", "data": "rows.json", "output": "runs/x"}


def text(**changed: str) -> str:
    return "\n".join(f"{key}: {value}" for key, value in {**BASE, **changed}.items())


def problems(path: str) -> list[str]:
    try:
        load(path)
    except RecipeError as error:
        return error.problems
    return []


PATHS = {
    "model.path": text(model="{{path: {}}}"),
    "model.config": text(model="{{config: {}, tokenizer: t}}"),
    "model.tokenizer": text(model="{{preset: tiny, tokenizer: {}}}"),
    "model.chat_template": text(model="{{path: base, chat_template: {}}}"),
    "model.adapters.0": text(model="{{path: base, adapters: [{}]}}"),
    "data.train.0.path": text(data="{}"),
    "data.eval.0.path": text(data="{{train: rows.json, eval: {}}}"),
    "data.cache": text(data="{{train: rows.json, cache: {}}}"),
    "memory.folder": text(memory="{{offload: [optimizer], folder: {}}}"),
    "optimizer.folder": text(optimizer="{{kind: paged-adamw, folder: {}}}"),
    "reference.model": text(stage="dpo", batch="{{rows: 4}}", reference="{{kind: frozen, model: {}}}"),
    "rewards.0.path": text(stage="grpo", rewards="{{kind: model, path: {}}}"),
    "rollout.draft.model": text(
        evaluation="{{every: 9, samples: hi}}", rollout="{{draft: {{kind: model, model: {}}}}}"
    ),
    "rollout.server.exchange_folder": text(
        evaluation="{{every: 9, samples: hi}}",
        rollout="{{engine: vllm, url: 'http://localhost:8000', server: {{exchange_folder: {}}}}}",
    ),
    "teacher.0.model": text(stage="distill", teacher="{}"),
    "output": text(output="{}"),
}

SAMPLED = {"evaluation": "{every: 10, samples: hi}"}
"""A recipe that has something to answer."""

BROKEN = [
    (
        {"router": "{balance: none, rate: 0.1}"},
        "router.rate: only read with balance: bias or step. Leave it out",
    ),
    ({"router": "{balance: step, sequence: 0.1}"}, "router.sequence: only read with balance: bias or sequence. Leave"),
    ({"router": "{balance: sequence, sequence: 0}"}, "router.sequence: 0 balances nothing. Give the loss a coeff"),
    ({"router": "bias", "adapter": "lora"}, "router.balance: bias changes what experts of the base are chosen by"),
    (
        {"router": "step", "parallel": "{workers: threads, data: 2}"},
        "router: threads run copies of the model at the same time, of which nothing is counted. Use workers: proc",
    ),
    (
        {"router": "{balance: step, capacity: 1.5}", "numerics": "exact"},
        "router.capacity: a token's experts would depend on the tokens before it in training, and not in a rollout",
    ),
    ({"steps": "5", "epochs": "1"}, "steps: the run's length is given twice: keep steps or epochs"),
    ({"model": "{tokenizer: t}"}, "model: path, preset and config are all missing: give exactly one"),
    ({"model": "{path: a, preset: tiny}"}, "model: both path and preset are given: give exactly one"),
    ({"model": "{preset: tiny}"}, "model.tokenizer: a model from a preset needs a tokenizer: add model.tokenizer"),
    (
        {"model": "{path: a, chat_template_date: tomorrow}"},
        "model.chat_template_date: 'tomorrow' is no day: write year",
    ),
    ({"model": "{path: a, chat_template_date: '20261122'}"}, "model.chat_template_date: '20261122' is no day"),
    ({"batch": "{tokens: 1024, sequences: 1}"}, "batch: tokens and sequences are both given: give one of them"),
    (
        {"batch": "{tokens: 3000}"},
        "batch.tokens: 3000 is not a multiple of data.max_length 1024, the length of a packed sequence. "
        "Use 2048 or 3072",
    ),
    ({"batch": "{tokens: 100}"}, "the length of a packed sequence. Use 1024"),
    (
        {"batch": "{tokens: 2048}", "data": "{train: rows.json, packing: none}"},
        "batch.tokens: without packing a step is counted in rows. Give batch.sequences instead",
    ),
    (
        {"batch": "{sequences: 12, micro: 5}"},
        "batch.micro: 5 does not divide the 12 sequences of a step. Use 4, or auto",
    ),
    ({"batch": "{tokens: 4096, micro: 3}"}, "batch.micro: 3 does not divide the 4 sequences of a step. Use 2, or auto"),
    (
        {"steps": "1000000000000000"},
        "steps: 1,000,000,000,000,000 is more than the 10,000,000,000 steps: a millisecond",
    ),
    ({"epochs": "1.0e+15"}, "epochs: 1,000,000,000,000,000.0 is more than the 10,000,000,000 epochs"),
    (
        {"batch": "1000000000"},
        "batch.sequences: 1,000,000,000 is more than the 16,777,216 in a step: each is an object",
    ),
    ({"batch": "{sequences: 1000000000, micro: 7}"}, "batch.sequences: 1,000,000,000 is more than the 16,777,216"),
    (
        {"batch": "{tokens: 1048576000000000, micro: 7}"},
        "batch.tokens: 1,048,576,000,000,000 tokens are 1,024,000,000,000 packed sequences of 1024 tokens, and a",
    ),
    (
        {"data": "{train: rows.json, max_length: 1000000000000}"},
        "data.max_length: 1,000,000,000,000 is more than the 16,777,216 tokens: those of a packed sequence go",
    ),
    ({"data": "{train: rows.json, max_length: 1}"}, "data.max_length: 1 trains nothing: the first token of a sample"),
    ({"data": "{train: rows.json, workers: 1000000}"}, "data.workers: 1,000,000 is more than the 1,024 processes"),
    ({"threads": "1000000"}, "threads: 1,000,000 is more than the 4,096 threads"),
    (
        {"data": "{train: rows.json, streaming: true, shuffle_buffer: 1000000000000}", "steps": "5"},
        "data.shuffle_buffer: 1,000,000,000,000 is more than the 1,000,000,000 rows: they are held in memory",
    ),
    (
        {"data": "{train: rows.json, eval: 5}", "evaluation": "{samples: {prompts: [a], max_new_tokens: 1000000000}}"},
        "evaluation.samples.max_new_tokens: 1,000,000,000 is more than the 16,777,216 tokens",
    ),
    ({"adapter": "{kind: lora, rank: 1000000000}"}, "adapter.rank: 1,000,000,000 is more than the 131,072 columns"),
    ({"adapter": "{kind: prompt, tokens: 1000000000}"}, "adapter.tokens: 1,000,000,000 is more than the 1,048,576"),
    (
        {"batch": "{sequences: 16777216, micro: 7}"},
        "batch.micro: 7 does not divide the 16777216 sequences of a step. Use 8, or auto",
    ),
    (
        {"steps": "10", "schedule": "{warmup: 11}"},
        "schedule.warmup: a warm-up of 11 steps is longer than the run of 10",
    ),
    (
        {"schedule": "{kind: wsd, warmup: 0.6, decay: 0.5}"},
        "schedule.warmup: warm-up 0.6 and decay 0.5 together are more than the whole run (1.0)",
    ),
    (
        {"steps": "10", "schedule": "{kind: wsd, warmup: 6, decay: 5}"},
        "schedule.decay: warm-up (6 steps) and decay (5) are longer than the run of 10",
    ),
    ({"schedule": "{decay: 0.5}"}, "schedule.decay: only the wsd schedule has a decay; this one is cosine"),
    ({"schedule": "{kind: constant, floor: 0.0}"}, "schedule.floor: the constant schedule has no floor"),
    (
        {"data": "{train: rows.json, packing: concatenate}"},
        "data.packing.kind: a conversation must stay whole, so concatenate is for stage pretrain. Use best-fit or none",
    ),
    (
        {"stage": "pretrain", "data": "{train: {path: rows.json, format: alpaca}, packing: concatenate}"},
        "data.train.0.format: concatenate joins plain text, and rows of alpaca are not. Use packing best-fit",
    ),
    (
        {"data": "{train: rows.json, packing: {kind: none, window: 9}}"},
        "data.packing.window: only best-fit packing has a window; this is none",
    ),
    (
        {"stage": "pretrain", "data": "{train: rows.json, train_on: last}"},
        "data.train_on: pretraining trains every token: train_on is for stage sft",
    ),
    ({"stage": "pretrain", "data": "{train: rows.json, system: hi}"}, "data.system: pretraining has no system prompt"),
    ({"data": "[]"}, "data.train: the list is empty: name at least one file or data set"),
    ({"data": "{train: rows.json, eval: []}"}, "data.eval: the list is empty"),
    (
        {"data": "[{path: rows.json, weight: 2}, more.jsonl]"},
        "data.train.1: has no weight although other sources do: give every source a weight, or none",
    ),
    ({"data": "[rows.json, more.jsonl, rows.json]"}, "data.train.2: the same as data.train.0. To use it more often"),
    (
        {"data": "{train: rows.json, streaming: true}"},
        "steps: missing: a stream has no known end, so streaming needs steps",
    ),
    (
        {"data": "{train: rows.json, streaming: true}", "epochs": "2"},
        "epochs: a stream has no known end, so it cannot run for epochs. Give steps",
    ),
    (
        {"data": "{train: rows.json, streaming: true, eval: 0.1}", "steps": "5"},
        "data.eval: 0.1 of a stream cannot be set aside. Give evaluation rows as files of their own",
    ),
    ({"data": "{train: rows.json, shuffle_buffer: 5}"}, "data.shuffle_buffer: only read with data.streaming: true"),
    ({"data": "{train: rows.json, bad_row_limit: 5}"}, "data.bad_row_limit: only read with data.on_bad_row: skip"),
    ({"evaluation": "{early_stop: 3}"}, "evaluation.early_stop: early stop needs rows to evaluate on: add data.eval"),
    ({"evaluation": "10"}, "evaluation.every: evaluation needs rows to evaluate on"),
    ({"checkpoint": "{keep_best: true}"}, "checkpoint.keep_best: keep_best needs rows to evaluate on"),
    (
        {"watch": "rewind", "checkpoint": "10", "steps": "10"},
        "watch.policy: rewind needs a checkpoint to go back to, and the first is at step 10 of 10",
    ),
    (
        {"optimizer": "{kind: sgd, nesterov: true, momentum: 0.0}"},
        "optimizer.nesterov: Nesterov's step needs momentum above 0",
    ),
    ({"output": "base"}, "output: model.path (base) is the output folder, where the run writes. Choose another"),
    ({"output": "runs", "model": "runs/a/model"}, "output: model.path (runs/a/model) lies in the output folder"),
    ({"output": "rows.json", "data": "rows.json#5"}, "output: data.train.0.path (rows.json) is the output folder"),
    ({"data": "row.json"}, "data.train.0.path: no file or folder 'row.json' in '{here}'. Did you mean 'rows.json'?"),
    ({"model": "no/such/model"}, "model.path: no file or folder 'no/such/model': there is no folder '{here}/no/such'"),
    ({"model": "{config: c.json, tokenizer: t}"}, "model.config: no file or folder 'c.json'"),
    ({"objective": "sigmoid"}, "objective: not read with stage sft: an objective of stage preference. Set stage, or"),
    (
        {"stage": "reward", "objective": "sigmoid"},
        "objective.0.kind: sigmoid is an objective of stage preference, not of stage reward",
    ),
    (
        {"stage": "dpo", "objective": "[sigmoid, bradley-terry]"},
        "objective.1.kind: bradley-terry is an objective of stage reward, not of stage preference",
    ),
    ({"stage": "dpo", "objective": "[]"}, "objective: empty: give at least one kind"),
    (
        {"stage": "reward", "objective": "[bradley-terry, stepwise]"},
        "objective: 2 terms: stage reward has one. Give one",
    ),
    (
        {"stage": "dpo", "objective": "[sft, sigmoid, kto]"},
        "objective.2.kind: kto takes answers judged one by one, sigmoid pairs of answers: a run has rows of one kind",
    ),
    ({"stage": "dpo", "objective": "{weight: 0}"}, "objective: every weight is 0: nothing would be learnt"),
    (
        {"stage": "dpo", "objective": "{kind: bco, shift: running-mean, ld_alpha: 0.5}"},
        "objective.0.ld_alpha: the running mean of rewards is one of whole answers. Use shift: none",
    ),
    (
        {"rollout": "{cache_gib: 1}"},
        "rollout: nothing is sampled: stage sft draws no answers, and there are no evaluation.samples. Leave it out, "
        "or add samples",
    ),
    (SAMPLED | {"rollout": "vllm"}, "rollout.url: missing: vllm runs as a server of its own. Say where it listens"),
    (
        SAMPLED | {"rollout": "{engine: sglang, url: 'localhost:30000'}"},
        "rollout.url: 'localhost:30000' is no address of a server: it begins with http:// or https://",
    ),
    (
        SAMPLED | {"rollout": "{engine: vllm, url: 'http://localhost:8000', draft: ngram}"},
        "rollout.draft: a setting of the embedded engine; vllm takes its own when it starts. Leave it out",
    ),
    (
        SAMPLED | {"rollout": "{url: 'http://localhost:8000'}"},
        "rollout.url: the embedded engine is no server. Leave it out, or choose engine: vllm or sglang",
    ),
    (
        SAMPLED | {"rollout": "{urls: ['http://localhost:8000']}"},
        "rollout.urls: the embedded engine is no server. Leave them out, or choose engine: http",
    ),
    (SAMPLED | {"rollout": "http"}, "rollout.urls: missing: say where servers listen, such as [http://node1:8000"),
    (
        SAMPLED | {"rollout": "{engine: http, url: 'http://a:1'}"},
        "rollout.url: engine: http reads urls, for there may be several. Write urls: [http://a:1]",
    ),
    (
        SAMPLED | {"rollout": "{engine: http, urls: ['http://a:1', 'a:2']}"},
        "rollout.urls.1: 'a:2' is no address of a server: it begins with http:// or https://",
    ),
    (
        SAMPLED | {"rollout": "{engine: http, urls: ['http://a:1', 'http://a:1/']}"},
        "rollout.urls.1: http://a:1/ is there twice. Name each server once",
    ),
    (
        SAMPLED | {"rollout": "{engine: vllm, url: 'http://a:1', urls: ['http://a:1']}"},
        "rollout.urls: only read with engine: http. Write url for the one server of vllm, or choose engine: http",
    ),
    (
        SAMPLED | {"rollout": "{engine: http, urls: ['http://a:1'], server: {hand_over: group}}"},
        "rollout.server.hand_over: group: with engine: http weights travel as files, which a server that comes back",
    ),
    (
        SAMPLED | {"rollout": "{engine: vllm, url: 'http://a:1', server: {push: true}}"},
        "rollout.server.push: only read with engine: http, by danlu serve. Leave it out",
    ),
    (
        SAMPLED | {"rollout": "{server: {timeout_s: 5}}"},
        "rollout.server: only read with engine: http, vllm or sglang. Leave it out",
    ),
    (
        SAMPLED | {"rollout": "{engine: vllm, url: 'http://localhost:8000', server: {hand_over: adapter}}"},
        "rollout.server.hand_over: adapter: the whole model is trained here, and there is no adapter to hand over. Use",
    ),
    (
        SAMPLED | {"adapter": "lora", "rollout": "{engine: vllm, url: 'http://a:1', server: {hand_over: folder}}"},
        "rollout.server.hand_over: folder: an adapter is trained here, and the server has the base already. Use adapt",
    ),
    (
        SAMPLED | {"rollout": "{engine: vllm, url: 'http://localhost:8000', server: {group_address: gpu}}"},
        "rollout.server.group_address: not read with hand_over: folder",
    ),
    (
        SAMPLED | {"rollout": "{engine: vllm, url: 'http://a:1', server: {hand_over: group, exchange_folder: /tmp/x}}"},
        "rollout.server.exchange_folder: not read with hand_over: group",
    ),
    (
        SAMPLED | {"parallel": "zero2", "rollout": "{gather: layer}"},
        "rollout.gather: only read with parallel.shard: zero3, which alone has layers with a part of their weights",
    ),
    (SAMPLED | {"rollout": "{swap_gib: 8}"}, "rollout.swap_gib: only read with preempt: swap"),
    (
        SAMPLED | {"rollout": "{sequences: 100000}"},
        "rollout.sequences: 100,000 is more than the 65,536 answers: each is an object of its own",
    ),
    (
        {"numerics": "exact", "compile": "true"},
        "compile: compiled code rounds by the shapes it is made for, so numerics: exact cannot hold. Leave one out",
    ),
    (
        SAMPLED | {"numerics": "exact", "rollout": "{engine: vllm, url: 'http://localhost:8000'}"},
        "rollout.engine: vllm has kernels of its own, which do not round as the trainer's do. Use engine: embedded, or",
    ),
    (
        {"numerics": "exact", "parallel": "{tensor: 2}"},
        "parallel.tensor: tensor ranks add their sums in an order of their own. Use parallel.tensor: 1, or numerics: f",
    ),
    (
        SAMPLED | {"numerics": "exact", "rollout": "{block: 24}"},
        "rollout.block: 24 does not divide the 64 keys that numerics: exact looks at together. Use 1, 2, 4, 8, 16, 32 "
        "or 64",
    ),
    (
        {"model": "{path: base, chat_template_kwargs: {tools: []}}"},
        "model.chat_template_kwargs: tools: danlu gives the template this variable with each conversation. Leave it",
    ),
    (
        {"model": "{path: base, chat_template_kwargs: {enable thinking: true}}"},
        "model.chat_template_kwargs: 'enable thinking' is no name of a variable",
    ),
    (
        {"data": "{train: rows.json, columns: {promt: ques}}"},
        "data.columns: 'promt' is no column that row formats read. Did you mean 'prompt'?",
    ),
    (
        {"data": "{train: {path: rows.json, columns: {body: text}}}"},
        "data.train.0.columns: 'body' is no column that row formats read. Known: text, instruction, input",
    ),
    (
        {"data": "{train: rows.json, columns: {text: '{title'}}"},
        "data.columns: text: a '{{' without its partner at character 1. Write",
    ),
    (
        {"data": "{train: rows.json, columns: {text: '{{x}}'}}"},
        "data.columns: text: the template names no column, so every row would be the same. Name one, as in {{title}}",
    ),
    ({"data": "{train: rows.json, columns: {text: ''}}"}, "data.columns: text: the text is empty. Name a column of"),
]


@pytest.mark.parametrize(("changed", "message"), BROKEN)
def test_one_broken_rule(write: Write, changed: dict[str, str], message: str) -> None:
    Path("runs/a/model").mkdir(parents=True)
    said = problems(write(text(**changed)))
    assert len(said) == 1, said
    assert message.format(here=Path.cwd()) in said[0]
    assert said[0].startswith("recipe.yaml:")


SOUND = [
    {"steps": "10000000000", "batch": "{sequences: 16777216, micro: 4096}"},
    {"data": "{train: rows.json, max_length: 16777216}"},
    {"data": "{train: rows.json, max_length: 2}"},
    {"steps": "10", "schedule": "{warmup: 10}"},
    {"steps": "10", "schedule": "{kind: wsd, warmup: 5, decay: 5}"},
    {"schedule": "{kind: wsd, warmup: 0.5, decay: 0.5}"},
    {"batch": "{tokens: 4096, micro: 2}"},
    {"batch": "{sequences: 12, micro: 4}"},
    {"stage": "pretrain", "data": "{train: rows.json, packing: concatenate, train_on: all}"},
    {"data": "[{path: rows.json, weight: 2}, {path: more.jsonl, weight: 1}]"},
    {"data": "[rows.json#5, more.jsonl, rows.json]"},
    {"data": "{train: rows.json, columns: {messages: dialog, role_tag: who, label: null, mine: null}}"},
    {"data": "[{path: rows.json, columns: {text: a}}, {path: rows.json, columns: {text: b}}]"},
    {"data": "{train: rows.json, streaming: true, eval: more.jsonl, shuffle_buffer: 5}", "steps": "5"},
    {"data": "{train: rows.json, eval: 0.1}", "evaluation": "{early_stop: 3}", "checkpoint": "{keep_best: true}"},
    {"evaluation": "{every: 10, samples: hi}"},
    {"watch": "rewind", "checkpoint": "5", "steps": "10"},
    {"model": "{preset: tiny, tokenizer: t}"},
    {"stage": "dpo", "objective": "[{kind: sigmoid}, {kind: sft, weight: 0.2}, {kind: hinge, weight: 0}]"},
    {"stage": "kto", "objective": "[kto, {kind: sft, weight: 0.1}, apo-zero-unpaired]"},
    {"stage": "dpo", "objective": "{kind: bco, ld_alpha: 0.5}"},
    {"rollout": "embedded"},
    {"model": "{path: base, chat_template: chatml, chat_template_kwargs: {enable_thinking: false}}"},
    SAMPLED | {"parallel": "zero3", "rollout": "{gather: layer}"},
    SAMPLED
    | {"numerics": "exact", "rollout": "{block: 32, draft: {kind: ngram, tokens: 8}, preempt: swap, swap_gib: 0}"},
    SAMPLED | {"rollout": "{engine: sglang, url: 'https://gpu:30000', server: {hand_over: group, bucket_mib: 64}}"},
    SAMPLED
    | {"adapter": "lora", "rollout": "{engine: vllm, url: 'http://a:1', server: {hand_over: adapter, reconnect_s: 0}}"},
    SAMPLED | {"rollout": "{block: 24, cache_gib: 0.5}", "compile": "true"},
]


@pytest.mark.parametrize("changed", SOUND)
def test_what_only_just_keeps_the_rules(write: Write, changed: dict[str, str]) -> None:
    assert problems(write(text(**changed))) == []


LONG = "x" * 300


@pytest.mark.parametrize("key", PATHS)
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("'a\\0b'", "holds a NUL character, which no file name can. Take it out"),
        ("''", "'' is an empty path. Name a file or a folder, or leave the key out"),
        ("'~nosuchuser/x.json'", "'~nosuchuser/x.json': there is no user 'nosuchuser'. Write the path in full"),
        (f"'/{LONG}/x'", "is too long: a name may have 255 bytes and a path 4,095, not 300"),
        ("'/" + "x/" * 2100 + "'", "is too long: a name may have 255 bytes and a path 4,095, not 4,201"),
    ],
    ids=["NUL", "empty", "user", "name", "path"],
)
def test_what_no_path_can_be(write: Write, key: str, path: str, message: str) -> None:
    """Wherever a recipe takes a path; the same recipe with a usual path has no such problem."""
    written = path.replace("'", '"')
    said = [
        line for line in problems(write(PATHS[key].format(written))) if line.partition(" ")[2].startswith(f"{key}:")
    ]
    assert len(said) == 1 and message in said[0], said
    assert not any("path" in line and message in line for line in problems(write(PATHS[key].format("rows.json"))))


def test_every_path_of_a_recipe_is_looked_at() -> None:
    """Each text of which the documentation says that it is a folder or a file."""
    named = {
        key
        for key, found in ((key, look_up(key)) for key in keys())
        if found.takes.startswith(("a text", "a list of texts")) and re.search(r"\b(folder|file|kept)", found.about)
    }
    assert {"model.path", "data.cache", "output"} <= named
    assert named - {key.replace(".0", "") for key in PATHS} == {
        f"data.{side}.{key}" for side in ("train", "eval") for key in ("split", "subset")
    }


def test_notes(write: Write) -> None:
    odd = text(
        precision="fp16", device="cpu", data="{train: rows.json, eval: rows.json#5}", optimizer="{learning_rate: 0}"
    )
    assert [note.partition(":")[0] for note in notes(load(write(odd)).recipe)] == [
        "precision",
        "data.eval",
        "optimizer.learning_rate",
    ]
    assert load(write(text())).notes == ()


@pytest.mark.parametrize(
    ("path", "local"),
    [
        ("Qwen/Qwen3-8B", False),
        ("gpt2", False),
        ("Qwen/Qwen2.5-0.5B", False),
        ("./gpt2", True),
        ("~/models/a", True),
        ("/models/a", True),
        ("rows.JSONL", True),
        ("runs/sft/model", True),
    ],
)
def test_what_cannot_be_a_hub_id(path: str, local: bool) -> None:
    assert is_local(path) == local


def test_conditions_of_fields_name_keys_and_values_that_there_are() -> None:
    conditions = [
        (field, each) for field in walk_fields() for each in field.info.metadata if isinstance(each, ReadWith)
    ]
    assert len({field.key for field, _ in conditions}) > 70
    for field, condition in conditions:
        siblings = fields_at(f"{field.key.rpartition('.')[0]}.{condition.key}".lstrip("."))
        there = siblings or fields_at(condition.key)
        assert there, field.key
        texts = {choice for choice in condition.choices if isinstance(choice, str)}
        assert texts <= {value for each in there for value in literal_values(each.hint)}, field.key


def test_a_key_that_is_not_read_is_reported_once(write: Write) -> None:
    """The streams of stage classify: rows of images have no tokens, which says more than that `streaming` is off."""
    broken = text(stage="classify", model="{preset: lenet5}", data="{train: ./digits, shuffle_buffer: 5}")
    said = [problem for problem in problems(write(broken)) if "data.shuffle_buffer" in problem]
    assert [problem.rpartition(": ")[2] for problem in said] == ["not read with stage classify, which has no tokens"]
