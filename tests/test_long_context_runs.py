"""Runs whose lengths grow in stages: what each step takes, resumed anywhere, on several processes; what is refused."""

from __future__ import annotations

import io
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from builders.process_group import run_group
from builders.tiny_world import World, danlu, differences, last_state, metrics
from builders.train_worker import train
from builders.worst_errors import worst_relative_error
from safetensors.torch import load_file

from danlu.core.errors import DataError
from danlu.training import loop

STAGES = [{"length": 32, "steps": 5}, {"length": 64, "steps": 7}]
LONG = {"method": "yarn", "original_length": 32, "stages": STAGES}


class Killed(BaseException):
    """What a kill is to the process it ends."""


def recipe(world: World, output: Path, **changes: Any) -> Path:
    """256 tokens a step: 8 packs of 32, then 4 of 64, in micro-batches of 128 tokens."""
    data = {"train": str(world.text), "eval": 10, "overlong": "split"}
    values = world.values(output, stage="pretrain", long_context=LONG, data=data, evaluation={"every": 4}, **changes)
    values["batch"] = {"tokens": 256, "micro": 2}
    del values["steps"], values["data"]["max_length"]
    file = output.with_name(f"{output.name}.yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(values))
    return file


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(run) if "learning_rate" in line]


@pytest.mark.usefixtures("tokenising_here")
def test_interrupted_in_each_stage_and_resumed_equals_uninterrupted(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert danlu("train", recipe(tiny_world, whole)) == 0
    file, real = recipe(tiny_world, parts), loop.accumulate

    def interrupt(at: int, how: str) -> None:
        def accumulate(*arguments: Any, **options: Any) -> Any:
            if options["step"] == at:
                monkeypatch.setattr(loop, "accumulate", real)
                if how == "kill":
                    raise Killed
                signal.raise_signal(signal.SIGTERM)
            return real(*arguments, **options)

        monkeypatch.setattr(loop, "accumulate", accumulate)

    interrupt(3, "signal")  # within the first stage
    assert danlu("train", file) == 143
    interrupt(5, "signal")  # behind its last step
    assert danlu("train", file) == 143
    interrupt(8, "signal")  # within the second
    assert danlu("train", file) == 143
    interrupt(10, "kill")
    with pytest.raises(Killed):
        danlu("train", file)
    assert last_state(parts)[0].name == "step-00000008"
    assert danlu("train", file) == 0
    assert differences(whole, parts) == []

    lines = steps_of(whole)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [(line["stage"], line["max_length"]) for line in lines] == [(1, 32)] * 5 + [(2, 64)] * 7
    assert all(line["tokens"] <= 256 for line in lines)
    rates = [line["learning_rate"] for line in lines]
    assert rates[0] < rates[1] and rates[1:] == sorted(rates[1:], reverse=True)  # one schedule spans both


@pytest.mark.usefixtures("tokenising_here")
def test_the_result_has_the_scaling_of_the_longest_stage(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert danlu("train", recipe(tiny_world, run)) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "; 12 steps of 8 x 32 tokens, from step 6 on of 4 x 64 tokens (micro-batches of 2)" in said
    assert "only 12 optimizer steps of 8 x 32 tokens, from step 6 on of 4 x 64 tokens" in said
    config = json.loads((run / "model" / "config.json").read_text())
    assert config["rope_scaling"] == {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
    assert config["max_position_embeddings"] == 64
    resolved = yaml.safe_load((run / "recipe.yaml").read_text())
    assert resolved["steps"] == 12 and resolved["data"]["max_length"] == 64

    from transformers import AutoModelForCausalLM

    from danlu.models.attend import PackedAttention
    from danlu.models.loading import load

    theirs = AutoModelForCausalLM.from_pretrained(run / "model", attn_implementation="eager").eval()
    ours, tokens = load(run / "model"), torch.arange(60)
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
        found = ours.logits(ours(tokens, torch.arange(60), PackedAttention((0, 60))))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.usefixtures("tokenising_here")
def test_a_stage_is_what_a_run_of_its_length_would_be(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first steps with stages have the packs and losses of a model that is not scaled."""
    taken: list[tuple[int, list[int], int | None]] = []
    real = loop.accumulate

    def accumulate(learner: Any, items: Any, **options: Any) -> Any:
        batches = learner.micro_batches(items)
        taken.append((len(items), [len(batch) for batch in batches], items[0].stage_length))
        assert all(length <= items[0].stage_length for item in items for length in item.lengths)
        assert max(item.tokens for item in items) <= items[0].stage_length
        return real(learner, items, **options)

    monkeypatch.setattr(loop, "accumulate", accumulate)
    assert danlu("train", recipe(tiny_world, tmp_path / "yarn")) == 0
    assert taken == [(8, [4, 4], 32)] * 5 + [(4, [2, 2], 64)] * 7
    none = recipe(tiny_world, tmp_path / "none")
    values = yaml.safe_load(none.read_text())
    values["long_context"]["method"] = "none"
    none.write_text(yaml.safe_dump(values))
    assert danlu("train", none) == 0
    scaled, unscaled = ([line["loss"] for line in steps_of(tmp_path / name)] for name in ("yarn", "none"))
    assert scaled[:5] == unscaled[:5]
    assert scaled[5] != unscaled[5]


@pytest.mark.usefixtures("tokenising_here")
def test_held_out_rows_are_the_same_at_every_length(tiny_world: World, tmp_path: Path) -> None:
    """With rows dropped by length the usable rows differ, and with them what a share would draw."""
    from danlu.assembly.recipe_adapters import dataset_spec
    from danlu.data.prepare import prepare
    from danlu.recipe import load

    file = recipe(tiny_world, tmp_path / "run")
    loaded = load(file, ["data.overlong=drop"]).recipe
    sides = {}
    held_out_rows = None
    for length in (64, 40):
        spec = dataset_spec(loaded.model_copy(update={"data": loaded.data.model_copy(update={"max_length": length})}))
        alone = prepare(spec)
        sides[length] = prepare(spec, held_out_rows=held_out_rows)
        held_out_rows = sides[length].held_out_rows
        assert sides[length].train is not None
        trained = set(sides[length].train.row_numbers.tolist())
        assert not trained & set(held_out_rows[0].tolist())
    assert alone.train is not None
    assert set(alone.train.row_numbers.tolist()) & set(held_out_rows[0].tolist())  # else the test would say nothing
    assert (sides[40].held_out_rows[0] == sides[64].held_out_rows[0]).all()


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"stages": [{"length": 64, "steps": 5}, {"length": 32, "steps": 5}]},
        "yaml:{line}:13 long_context.stages.1.length: 32",
    ),
    ({"stages": [{"length": 32}, {"length": 64, "steps": 5}]}, "long_context.stages.0.steps: missing"),
    ({"stages": [{"length": 48, "steps": 5}, {"length": 64, "steps": 5}]}, "48 does not divide batch.tokens 256"),
    ({"method": "longrope"}, "longrope divides each frequency by a factor of its own"),
    ({"method": "yarn", "long_factor": [1.0]}, "only method longrope reads it; this is yarn"),
    ({"method": "longrope", "long_factor": [1.0], "short_factor": [1.0, 1.0]}, "2 factors, and long_factor has 1"),
    ({"method": "longrope", "long_factor": [1.0, 2.0]}, "2 factors, and the model's 8 rotated features"),
]


@pytest.mark.usefixtures("tokenising_here")
@pytest.mark.parametrize(("change", "message"), WRONG)
def test_what_cannot_be_is_refused_before_rows_are_read(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    file = recipe(tiny_world, tmp_path / "run")
    values = yaml.safe_load(file.read_text())
    values["long_context"] |= change
    text = yaml.safe_dump(values)
    file.write_text(text)
    assert danlu("train", file) != 0
    written = capsys.readouterr().err
    if "{line}" in message:
        line = next(number for number, each in enumerate(text.splitlines(), 1) if each.strip() == "- length: 32")
        message = message.format(line=line)
        assert "lengths do not shrink" in written
    assert message in " ".join(written.split())
    assert "rows" not in written.partition(message)[0]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.usefixtures("tokenising_here")
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps=13", "steps: 13, but the stages of long_context have 12 steps"),
        ("epochs=1", "epochs: the run's length is that of its stages"),
        ("data.max_length=128", "data.max_length: 128, but long_context.stages say how long samples are, at last 64"),
        ("data.streaming=true", "data.streaming: a stream is read once"),
        ("stage=dpo", "long_context: stage preference takes a model as it is"),
        ("long_context.search={}", "long_context.search: only method longrope reads it"),
    ],
)
def test_stages_say_how_long_the_run_is(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    assert danlu("train", recipe(tiny_world, tmp_path / "run"), override) != 0
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.distributed
def test_any_layout_ends_where_one_process_does(tiny_world: World, tmp_path: Path) -> None:
    layouts: dict[str, dict[str, Any]] = {"one": {}, "ddp": {"shard": "none"}, "zero3": {"shard": "zero3"}}
    found = {}
    for name, parallel in layouts.items():
        file = str(recipe(tiny_world, tmp_path / name, parallel=parallel))
        ended = [train([file])] if name == "one" else run_group(train, 2, [file])
        assert all(each == [(12, 0)] for each in ended)
        found[name] = load_file(tmp_path / name / "model" / "model.safetensors")
        assert [line["stage"] for line in steps_of(tmp_path / name)] == [1] * 5 + [2] * 7
    for name in ("ddp", "zero3"):
        assert worst_relative_error(found[name], found["one"]) < 1e-4
    other = str(recipe(tiny_world, tmp_path / "other", seed=1))
    train([other])
    moved = load_file(tmp_path / "other" / "model" / "model.safetensors")
    assert worst_relative_error(moved, found["one"]) > 1e-2


LORA = {"adapter": {"kind": "lora", "rank": 2}}


def search_recipe(world: World, output: Path, **changes: Any) -> Path:
    """Rows longer than the 32 tokens that the base counts as trained at, and a search of a dozen candidates."""
    search = {"documents": 2, "population": 4, "parents": 2, "mutations": 2, "crossovers": 2, "generations": 2}
    section = {"method": "longrope", "original_length": 32, "search": search}
    data = {"train": str(world.text), "eval": 10, "overlong": "split"}
    more = {"model": {"path": str(world.base), "config": None, "tokenizer": None}, "steps": 2}
    return world.recipe(output, stage="pretrain", long_context=section, data=data, **more, **changes)


@pytest.mark.usefixtures("tokenising_here")
def test_factors_are_searched_once_and_written_down(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from danlu.stages import longrope_search

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert danlu("train", search_recipe(tiny_world, whole)) == 0
    lines = [json.loads(line) for line in (whole / "longrope_search.jsonl").read_text().splitlines()[1:]]
    assert {line["generation"] for line in lines} == {0, 1, 2}
    best = min(lines, key=lambda line: (line["loss"], line["factors"]))
    resolved = yaml.safe_load((whole / "recipe.yaml").read_text())
    config = json.loads((whole / "model" / "config.json").read_text())
    assert resolved["long_context"]["long_factor"] == best["factors"] == config["rope_scaling"]["long_factor"]
    assert config["rope_scaling"]["short_factor"] == [1.0] * 4

    # Interrupted after a few candidates, it goes on from them and finds the same.
    real, judged = longrope_search._loss_of, []

    def loss_of(config: Any, *more: Any) -> float:
        judged.append(config)
        if len(judged) == 6:
            raise Killed
        return real(config, *more)

    monkeypatch.setattr(longrope_search, "_loss_of", loss_of)
    with pytest.raises(Killed):
        danlu("train", search_recipe(tiny_world, parts))
    assert danlu("train", search_recipe(tiny_world, parts)) == 0
    assert (parts / "longrope_search.jsonl").read_text() == (whole / "longrope_search.jsonl").read_text()
    assert len(judged) == len(lines) + 1  # the one that was interrupted is asked for again
    assert differences(whole, parts) == []
    assert danlu("train", search_recipe(tiny_world, parts, checkpoint={"keep": 3})) == 0  # ended; nothing is searched
    assert len(judged) == len(lines) + 1


@pytest.mark.usefixtures("tokenising_here")
@pytest.mark.parametrize("changes", [{}, LORA], ids=["whole", "lora"])
def test_a_candidate_is_worth_what_a_model_with_its_factors_is(
    changes: dict[str, Any], tiny_world: World, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert danlu("train", search_recipe(tiny_world, run, **changes)) == 0
    header, *lines = [json.loads(line) for line in (run / "longrope_search.jsonl").read_text().splitlines()]

    from danlu.assembly.recipe_adapters import dataset_spec
    from danlu.data.prepare import prepare
    from danlu.models.attend import PackedAttention
    from danlu.models.hf_folder import read_config
    from danlu.models.loading import load
    from danlu.models.long_context import with_long_context
    from danlu.recipe import load_resolved

    recipe = load_resolved(run / "recipe.yaml")
    held_out = prepare(dataset_spec(recipe)).eval
    assert held_out is not None and recipe.long_context is not None
    documents = [held_out.sample(number) for number in range(len(held_out))]
    documents = [sample for sample in documents if sample.row in header["longrope_search"]["documents"]]
    documents = sorted(documents, key=lambda sample: -len(sample.tokens))[:2]
    assert [len(sample.tokens) for sample in documents] == [64, 64]

    def loss(factors: list[float]) -> float:
        section = recipe.long_context.model_copy(update={"long_factor": factors})
        model = load(tiny_world.base, config=with_long_context(read_config(tiny_world.base), section, 64))
        total, count = 0.0, 0
        for sample in documents:
            tokens = torch.from_numpy(sample.tokens.astype("int64"))
            with torch.no_grad():
                hidden = model(tokens, torch.arange(len(tokens)), PackedAttention((0, len(tokens))))
                scores = model.logits(hidden)[:-1].double().log_softmax(-1)
            total -= scores[torch.arange(len(tokens) - 1), tokens[1:]].sum().item()
            count += len(tokens) - 1
        return total / count

    for line in (lines[0], lines[-1]):
        assert line["loss"] == pytest.approx(loss(line["factors"]), rel=3e-6)
    assert abs(loss(lines[0]["factors"]) - loss(lines[1]["factors"])) > 1e-5 * lines[0]["loss"]


@pytest.mark.usefixtures("tokenising_here")
def test_documents_that_packs_cut_are_cut_for_the_search(tiny_world: World, tmp_path: Path) -> None:
    """Of packing concatenate the samples are whole documents, which may be many times as long."""
    from danlu.recipe import load
    from danlu.stages.longrope_search import _documents

    file = search_recipe(tiny_world, tmp_path / "run")
    for packing, longest in (("concatenate", 48), ("best-fit", 48)):
        recipe = load(file, [f"data.packing={packing}", "data.max_length=48"]).recipe
        documents = _documents(recipe, 32, 2, io.StringIO())
        assert [len(document.tokens) for document in documents] == [longest] * 2
        assert all(document.weights[0] == 0 for document in documents)
    with pytest.raises(DataError, match="the longest held-out document has 89 tokens, and the model was trained at 90"):
        _documents(load(file, ["data.packing=concatenate", "data.eval=90"]).recipe, 90, 2, io.StringIO())
