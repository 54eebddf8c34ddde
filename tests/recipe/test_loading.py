"""Loading a recipe: short forms, and every problem at once with its place."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from danlu.core.errors import ModelError, RecipeError
from danlu.recipe import load
from danlu.recipe.explanation import explain
from danlu.recipe.loading import load_resolved
from danlu.recipe.resolved_yaml import resolved_yaml
from danlu.recipe.sections import Adafactor, EarlyStop, Ema, Lion, Ngram, Samples, Source

Write = Callable[..., str]

MINIMAL = "stage: sft\nmodel: base\ndata: rows.json\noutput: runs/x\n"


def problems(path: str, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load(path, overrides)
    return caught.value.problems


def test_four_lines_are_a_recipe(write: Write) -> None:
    recipe = load(write()).recipe
    assert recipe.model.path == "base"
    assert recipe.data.train == [Source(path="rows.json")]
    assert recipe.batch.sequences == 16


@pytest.mark.parametrize(
    ("line", "read", "value"),
    [
        ("data: [rows.json, more.jsonl]", "data.train", [Source(path="rows.json"), Source(path="more.jsonl")]),
        ("data: {train: {path: rows.json, rows: 5}}", "data.train", [Source(path="rows.json", rows=5)]),
        ("data: {train: rows.json, eval: more.jsonl}", "data.eval", [Source(path="more.jsonl")]),
        ("data: {train: rows.json, eval: 0.02}", "data.eval", 0.02),
        ("data: {train: rows.json, eval: 200}", "data.eval", 200),
        ("data: {train: rows.json, packing: true}", "data.packing.kind", "best-fit"),
        ("data: {train: rows.json, packing: false}", "data.packing.kind", "none"),
        ("data: {train: rows.json, packing: none}", "data.packing.kind", "none"),
        ("optimizer: lion", "optimizer", Lion(learning_rate=2e-6, weight_decay=0.0)),
        ("optimizer: {kind: adafactor}", "optimizer", Adafactor(learning_rate=6.7e-4)),
        ("optimizer: {learning_rate: 1e-3}", "optimizer.learning_rate", 1e-3),
        ("schedule: linear", "schedule.kind", "linear"),
        ("schedule: {warmup: 0}", "schedule.warmup", 0),
        ("batch: 4", "batch.sequences", 4),
        ("checkpoint: 500", "checkpoint.every", 500),
        ("evaluation: {every: 10, samples: hello}", "evaluation.samples", Samples(prompts=["hello"])),
        ("evaluation: {samples: [a, b]}", "evaluation.samples.prompts", ["a", "b"]),
        ("ema: 0.99", "ema", Ema(decay=0.99)),
        ("ema: {}", "ema", Ema()),
        ("watch: skip", "watch.policy", "skip"),
        ("log: 10", "log.every", 10),
        ("gradient_clipping: null", "gradient_clipping", None),
        ("rollout: embedded", "rollout.engine", "embedded"),
        ("evaluation: {every: 9, samples: a}\nrollout: {draft: ngram}", "rollout.draft", Ngram()),
    ],
)
def test_short_forms(write: Write, line: str, read: str, value: object) -> None:
    kept = [other for other in MINIMAL.splitlines() if other.split(":")[0] != line.split(":")[0]]
    found: object = load(write("\n".join([*kept, line]))).recipe
    for part in read.split("."):
        found = getattr(found, part)
    assert found == value


@pytest.mark.parametrize("line", ["steps: null", "epochs: null", "steps:\nepochs:", "seed: 0"])
def test_a_key_without_a_value_leaves_the_steps_to_stages_of_lengths(write: Write, line: str) -> None:
    stages = "long_context: {method: yarn, stages: [{length: 64, steps: 5}, {length: 128, steps: 2}]}"
    recipe = load(write(f"{MINIMAL}{line}\n{stages}\n")).recipe
    assert (recipe.steps, recipe.epochs, recipe.data.max_length) == (7, None, 128)


def test_every_problem_at_once_in_file_order(write: Write) -> None:
    path = write(
        "\n".join(
            [
                "stage: sftt",
                "model: base",
                "data:",
                "  train: [{path: rows.json, formt: auto}]",
                "  eval: [{pth: x}]",
                '  max_length: "4096"',
                "  packing: bestfit",
                "optimizer: {kind: adamm, betas: 3}",
                "schedule: {warmup: lots}",
                "steps: 1e4",
                "batch: {micro: x}",
                "agents: {engine: paged}",
                "lr: 1e-3",
                "compile: yes",
                "output: 5",
            ]
        )
    )
    assert problems(path, "ema=3", "checkpoint.kep=1", "seed") == [
        "recipe.yaml:1:8 stage: expected one of pretrain, sft, classify, preference, reward, distill, rl, not 'sftt'. "
        "Did you mean 'sft'?",
        "recipe.yaml:4:29 data.train.0.formt: unknown key in Source. Did you mean 'format'?",
        "recipe.yaml:5:10 data.eval.0.path: missing: add 'path: ...' under 'data.eval.0' (a text): "
        "A json, jsonl, csv, parquet, arrow or txt file (compressed too, as rows.jsonl.gz), a folder of them, or a "
        "hub data set id.",
        "recipe.yaml:5:11 data.eval.0.pth: unknown key in Source. Did you mean 'path'?",
        "recipe.yaml:6:15 data.max_length: expected a whole number, 1 or more, not the text '4096'. "
        "Write it without quotes",
        "recipe.yaml:7:12 data.packing.kind: expected one of best-fit, concatenate, none, not 'bestfit'. "
        "Did you mean 'best-fit'?",
        "recipe.yaml:8:19 optimizer.kind: unknown kind 'adamm'. Did you mean 'adamw'? "
        "One of: adafactor, adamw, adamw8bit, galore, lion, muon, paged-adamw, sgd",
        "recipe.yaml:9:20 schedule.warmup: expected a whole number, 1 or more, or a number from 0 to below 1, "
        "not 'lots'",
        "recipe.yaml:10:8 steps: expected a whole number, 1 or more, or null, not 10000.0. Write 10000",
        "recipe.yaml:11:16 batch.micro: expected a whole number, 1 or more, or auto, not 'x'.",
        "recipe.yaml:12:1 agents: unknown key. Known: stage, model, data, objective, rewards, reward_limits, "
        "environment, reference, value, teacher, on_policy, adapter, long_context, quantization, optimizer, schedule, "
        "batch, epochs, steps, precision, numerics, parallel, memory, loss, router, gradient_clipping, watch, ema, "
        "evaluation, rollout, checkpoint, log, compile, deterministic, device, threads, seed, output",
        "recipe.yaml:13:1 lr: unknown key. danlu's key for it is optimizer.learning_rate",
        "recipe.yaml:14:10 compile: expected true or false, not 'yes'. Write true",
        "recipe.yaml:15:9 output: expected a text, not 5",
        "override 'ema=3' ema.decay: expected a number above 0 and below 1, not 3",
        "override 'checkpoint.kep=1' checkpoint.kep: unknown key in Checkpoint. Did you mean 'keep'?",
        "override 'seed': write it as section.key=value, for example steps=100",
    ]


def test_missing_keys_say_where_to_add_them(write: Write) -> None:
    assert problems(write("stage: sft\ndata: {eval: 0.1}\n")) == [
        "recipe.yaml:1:1 model: missing: add 'model: ...' at the top level (a mapping of Model keys (or its path "
        "alone)): Where the weights start.",
        "recipe.yaml:1:1 output: missing: add 'output: ...' at the top level (a text): The run folder.",
        "recipe.yaml:2:7 data.train: missing: add 'train: ...' under 'data' (a list of sources): One or more sources.",
    ]


def test_a_key_of_the_recipe_in_a_section_and_a_kind_of_another_tool(write: Write) -> None:
    text = "stage: sft\nmodel: {path: base, quantization: nf4}\ndata: rows.jsonl\noutput: out\nadapter: qlora\n"
    assert problems(write(text)) == [
        "recipe.yaml:2:21 model.quantization: unknown key in Model. quantization is a key of the recipe itself, not of "
        "model",
        "recipe.yaml:5:10 adapter.kind: unknown kind 'qlora'. Write adapter: lora and quantization: nf4",
    ]


def test_a_key_with_the_name_of_its_kind_is_told_from_the_kind(write: Write) -> None:
    rl = 'stage: rl\nmodel: base\ndata: {train: rows.jsonl, prompt: "{q}"}\noutput: out\n'
    assert problems(write(rl + 'rewards: [{kind: function, function: "letters.py:letters"}]\n')) == [
        "recipe.yaml:5:11 rewards.0.path: missing: add 'path: ...' under 'rewards.0' (a text): The file and the "
        "name of the function in it, as in my_rewards.py:short.",
        "recipe.yaml:5:28 rewards.0.function: unknown key in FunctionReward. Known: kind, weight, name, path",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("epochs: -1", "epochs: expected a number above 0 or null, not -1"),
        ("epochs: .nan", "epochs: expected a number above 0 or null, not nan"),
        ("gradient_clipping: .inf", "gradient_clipping: expected a number, 0 or more, or null, not inf"),
        (
            "optimizer: {kind: lion, betas: [0.9]}",
            "optimizer.betas: expected a list of 2, each a number from 0 to below 1",
        ),
        ("optimizer: {kind: lion, betas: [0.9, 1]}", "optimizer.betas.1: expected a number from 0 to below 1, not 1"),
        ("optimizer: {kind: lion, eps: 1}", "optimizer.eps: unknown key in Lion. Known: kind, learning_rate"),
        (
            "optimizer: 3",
            "optimizer.kind: expected one of adafactor, adamw, adamw8bit, galore, lion, muon, paged-adamw, sgd, not 3",
        ),
        ("loss: 3", "loss: expected a mapping of LossOptions keys, not 3"),
        (
            "evaluation: {metric: {question}}",
            'not a mapping (question). YAML reads braces so: write "{question}", in double quotes',
        ),
        ("seed: true", "seed: expected a whole number from 0 to below 2^63, not true"),
        ("compile: null", "compile: expected true or false, not nothing (null)"),
        ("evaluation: {samples: [1]}", "evaluation.samples.prompts.0: expected a text, not 1"),
        ("batch: {tokens: [1, 2]}", "batch.tokens: expected a whole number, 1 or more, or null, not a list of 2"),
        ("learning_rate: 1", "learning_rate: unknown key. danlu's key for it is optimizer.learning_rate"),
        ("output_dir: x", "output_dir: unknown key. danlu's key for it is output"),
    ],
)
def test_messages(write: Write, line: str, message: str) -> None:
    (said,) = problems(write(f"stage: sft\nmodel: base\ndata: rows.json\noutput: runs/x\n{line}\n"))
    assert said.startswith("recipe.yaml:5:")
    assert message in said


def test_pydantic_is_never_heard(write: Write) -> None:
    broken = (
        "stage: 1\nmodel: []\ndata: 5\noptimizer: [a]\nschedule: {warmup: {}}\nbatch: x\nlog: {every: 0}\noutput: {}\n"
    )
    said = "\n".join(problems(write(broken)))
    for word in ("Input should", "valid", "Field required", "Extra inputs", "pydantic", "discriminator", "constrained"):
        assert word not in said
    assert said.count("\n") == 7  # one for each line of the file


def test_rules_are_shown_beside_wrong_values(write: Write) -> None:
    text = "stage: sft\nmodel: base\ndata: row.json\nsteps: 10\nschedule: {warmup: 20}\nlog: often\noutput: runs/x\n"
    said = problems(write(text))
    assert [line.split(": ")[0] for line in said] == [
        "recipe.yaml:3:7 data.train.0.path",
        "recipe.yaml:5:20 schedule.warmup",
        "recipe.yaml:6:6 log.every",
    ]
    assert said[0].endswith("Did you mean 'rows.json'?")


def test_a_rule_is_silent_about_a_value_that_is_wrong_itself(write: Write) -> None:
    text = "stage: sft\nmodel: base\ndata: rows.json\nsteps: ten\nschedule: {warmup: 20}\noutput: runs/x\n"
    assert len(problems(write(text))) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "recipe.yaml: the file is empty. `danlu recipes copy sft` writes one to begin with"),
        ("# nothing\n", "recipe.yaml: the file is empty"),
        ("- a\n- b\n", "recipe.yaml:1:1: a recipe is a mapping of keys such as 'stage: sft'"),
        ("stage: sft: x\n", "recipe.yaml:1:11: not valid YAML: a second ': ' on this line"),
    ],
)
def test_files_that_are_no_recipe(write: Write, text: str, message: str) -> None:
    (said,) = problems(write(text))
    assert said.startswith(message)


def test_files_that_cannot_be_read(write: Write, tmp_path: Path) -> None:
    write()
    (tmp_path / "latin.yaml").write_bytes(b"stage: \xe9")
    assert problems("recip.yaml") == ["recip.yaml: no such file. Did you mean 'recipe.yaml'?"]
    assert problems("nothing") == ["nothing: no such file. `danlu recipes list` shows recipes to copy"]
    assert problems("no/where.yaml") == ["no/where.yaml: no such file, and no folder 'no'"]
    assert problems("latin.yaml") == ["latin.yaml: not UTF-8 text (byte 7). Save the recipe as UTF-8"]
    assert problems(".") == [".: this is a folder, not a recipe. Did you mean 'recipe.yaml'?"]
    os.mkfifo(tmp_path / "pipe.yaml")
    assert problems("pipe.yaml") == ["pipe.yaml: not a recipe that can be read: it is a named pipe, not a file"]
    assert problems("/dev/zero") == ["/dev/zero: not a recipe that can be read: it is a device, not a file"]
    (tmp_path / "big.yaml").touch()
    os.truncate(tmp_path / "big.yaml", 20 << 20)
    assert problems("big.yaml") == [
        "big.yaml: not a recipe that can be read: larger than 1 MiB, the most that such a file may have"
    ]


def test_what_is_found_out_later_is_told_with_its_place(write: Write) -> None:
    loaded = load(
        write("stage: sft\nmodel: base\ndata: rows.json\noutput: x\nparallel: {tensor: 3}\n"), ["data.eval=1"]
    )
    lines = [
        "parallel.tensor: 3 does not divide the model's 4 attention heads",
        "data.eval: 1 holds out all rows",
        "model.chat_template: cannot be read",
        "seed: no seed will do",
        "model.layers.0.mlp.up_proj.weight: is no key of a recipe",
        "--processes 3: nor is this",
    ]
    with pytest.raises(RecipeError) as caught, loaded.naming_places():
        raise RecipeError(lines)
    placed = [
        f"recipe.yaml:5:20 {lines[0]}",
        f"override 'data.eval=1' {lines[1]}",
        f"recipe.yaml:2:8 {lines[2]}",  # of the nearest key above it that was written
        *lines[3:],
    ]
    assert caught.value.problems == placed and str(caught.value) == "\n".join(placed)
    with (
        pytest.raises(ModelError, match=r"^recipe\.yaml:5:20 parallel\.tensor: 3 does not") as of_model,
        loaded.naming_places(),
    ):
        raise ModelError(lines[0])
    assert type(of_model.value) is ModelError


def test_origins(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN", "one")
    path = write("stage: sft\nmodel: base\ndata: rows.json\noutput: runs/${RUN}\nevaluation: {early_stop: 2}\n")
    loaded = load(path, ["data.eval=0.1", "batch.micro=2"])
    assert loaded.recipe.evaluation.early_stop == EarlyStop(patience=2)
    assert loaded.origin("stage") == "recipe.yaml:1:8"
    assert loaded.origin("model.path") == "recipe.yaml:2:8"
    assert loaded.origin("data.train.0.path") == "recipe.yaml:3:7"
    assert loaded.origin("output") == "environment $RUN (recipe.yaml:4:9)"
    assert loaded.origin("data.eval") == "override 'data.eval=0.1'"
    assert loaded.origin("batch.micro") == "override 'batch.micro=2'"
    assert loaded.origin("seed") == "default"


def test_a_recipe_in_the_words_of_another_tool(write: Write) -> None:
    """Each key leads to danlu's, and one that stands under its other name is not missing besides."""
    path = write("stage: sft\nmodel_name_or_path: base\ndataset: rows.json\noutput_dir: runs/x\nlora_target: all\n")
    with pytest.raises(RecipeError) as caught:
        load(path)
    assert [line.partition(" ")[2] for line in caught.value.problems] == [
        "model_name_or_path: unknown key. danlu's key for it is model.path",
        "dataset: unknown key. danlu's key for it is data.train: write data.train: [rows.json]",
        "output_dir: unknown key. danlu's key for it is output",
        "lora_target: unknown key. danlu's key for it is adapter.targets: write adapter.targets: [all-linear]",
    ]
    with pytest.raises(RecipeError) as caught:
        load(write("stage: sft\ndataset: rows.json\noutput_dir: runs/x\nlora_rank: 8\n"))
    assert any("model: missing: add 'model: ...'" in line for line in caught.value.problems)


@pytest.mark.parametrize(
    ("stage", "remedy"),
    [
        ("rm", "not 'rm'. Write stage: reward"),
        ("GRPO", "not 'GRPO'. Write stage: grpo"),
        ("online_dpo", "not 'online_dpo'. Write stage: online-dpo"),
        ("ppoo", "not 'ppoo'. Did you mean 'ppo'?"),
        ("7", "not 7"),
    ],
)
def test_a_stage_by_another_name_leads_to_it(write: Write, stage: str, remedy: str) -> None:
    (said,) = problems(write(f"stage: {stage}\nmodel: base\ndata: a.jsonl\noutput: run\n"))
    assert said.endswith(remedy)


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("adapter: none", "adapter.kind: unknown kind 'none'. Write adapter: null, or leave it out"),
        ("quantization: 4", "quantization.kind: unknown kind 4. Write quantization: nf4"),
        ("parallel: fsdp", "not 'fsdp'. Write parallel.shard: zero3"),
        ("objective: dpo", "unknown kind 'dpo'. Write objective: sigmoid"),
        ("objective: [nca_pair]", "unknown kind 'nca_pair'. Write objective.kind: nca"),
        ("memory: {recompute: true}", "planned, not true"),
    ],
)
def test_a_value_of_another_tool_leads_to_danlus(write: Write, line: str, remedy: str) -> None:
    said = problems(write(f"stage: sft\nmodel: base\ndata: a.jsonl\noutput: run\n{line}\n"))
    assert said[-1].endswith(remedy)


def test_a_key_of_a_source_leads_there(write: Write) -> None:
    said = problems(write("stage: sft\nmodel: base\ndata: {train: a.jsonl, rows: 9}\noutput: run\n"))
    assert said[-1].endswith("data.rows: unknown key in Data. danlu's key for it is data.train.rows")


def test_the_earlier_name_of_a_key_is_read(write: Write) -> None:
    """`batch.pairs` is `batch.rows` now: in a file, as an override, in a run's own recipe, and in `explain`."""
    recipe = "stage: dpo\nmodel: base\ndata: rows.json\noutput: runs/x\n"
    present = load(write(f"{recipe}batch: {{rows: 4, micro: 2}}\n")).recipe
    earlier = load(write(f"{recipe}batch: {{pairs: 4, micro: 2}}\n"))
    assert earlier.recipe == present and earlier.is_written("batch.rows")
    assert earlier.origin("batch.rows") == "recipe.yaml:5:16"
    assert load(write(f"{recipe}batch: {{rows: 9, micro: 2}}\n"), ["batch.pairs=4"]).recipe == present
    assert load(write(f"{recipe}batch: {{pairs: 9, micro: 2}}\n"), ["batch.rows=4"]).recipe == present
    assert load(write(f"{recipe}batch: {{pairs: 5, micro: 2}}\n")).recipe != present
    resolved = resolved_yaml(present)
    assert "rows: 4" in resolved and "pairs" not in resolved
    assert load_resolved(write(resolved.replace("rows: 4", "pairs: 4"))) == present
    assert explain("batch.pairs") == explain("batch.rows")
    with pytest.raises(RecipeError, match="batch.pairs: unknown key in BatchSize: it is the earlier name of rows"):
        load(write(f"{recipe}batch: {{pairs: 4, rows: 4}}\n"))
