"""`danlu preview`: from a recipe to what is printed and written, and the exit codes."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders.inline_workers import InlineWorkers
from builders.tiny_world import World, danlu, write_rows

from danlu.core.errors import DataError
from danlu.data.prepare import DatasetSpec, prepare
from danlu.data.tokenizer import load_tokenizer
from danlu.data.tokenizer_training import CHATML, MIN_VOCAB_SIZE, train_tokenizer
from danlu.recipe import load, resolved_yaml
from danlu.stages.prompt_reader import PromptReader

HELLO = {"messages": [{"role": "user", "content": "龘?"}, {"role": "assistant", "content": "ok <b>", "weight": 2}]}
UNTRAINED = {"messages": [HELLO["messages"][0], {"role": "assistant", "content": "ok", "train": False}]}
TWO_QUESTIONS = {"messages": [HELLO["messages"][0], HELLO["messages"][0]]}


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer without merges: each byte is a token, whatever the library's version."""
    folder = tmp_path_factory.mktemp("letters")
    train_tokenizer(["ab"], MIN_VOCAB_SIZE, folder)
    return folder


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("preview", "dataset_summary", "prepare", "stream"):
        monkeypatch.setattr(f"danlu.data.{module}.WorkerPool", InlineWorkers)


@pytest.fixture
def recipe(tiny_world: World, letters: Path, tmp_path: Path) -> Callable[..., Path]:
    """A recipe over rows, tokenised byte by byte."""

    def recipe(*rows: Any, **data: Any) -> Path:
        path = write_rows(tmp_path / "rows.jsonl", rows)
        model = {"tokenizer": str(letters)}
        section = {"train": str(path), "cache": str(tmp_path / "cache"), "max_length": 128, **data}
        return tiny_world.recipe(tmp_path / "run", model=model, data=section)

    return recipe


def test_everything_is_printed(recipe: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert danlu("preview", recipe(HELLO, HELLO), "--rows", 1, "--html", page) == 0
    out = capsys.readouterr()
    # On a busy machine tokenising takes long enough to say how far it is.
    assert [line for line in out.err.splitlines() if not line.startswith("tokenising: ")] == []
    assert "\x1b" not in out.out
    lines = out.out.splitlines()
    start = lines.index("rows.jsonl:1")
    assert lines[start + 1 : start + 16] == [
        "  31 tokens, 7 trained",
        "    context     [template]    <|im_start|>│u│s│e│r│↵",
        "    context     [user]        龘│‥│‥│?",
        "    context     [template]    <|im_end|>│↵",
        "    context     [template]    <|im_start|>│a│s│s│i│s│t│a│n│t│↵",
        "    trained x2  [assistant]   o│k│␣│<│b│>",
        "    trained x2  [end-of-turn] <|im_end|>",
        "    context     [template]    ↵",
        "",
        "== 1 packed sequence of 128 tokens (best-fit), 48.4% full: 2 samples, 62 tokens",
        "  sequence 0     ██████████▓▓▓▓▓▓▓▓▓░░░░░░░░░░░░░░░░░░░░░  48.4%  31 rows.jsonl:2 · 31 rows.jsonl:1",
        "  4 packed sequences a step: 1 step an epoch; this run has 12, 48 epochs",
        "",
        "== training rows",
        "  rows           2",
    ]
    assert "rows.jsonl:2" not in lines
    assert not [line for line in lines if line.startswith("  note")]
    assert "  tokens         62, 14 trained (22.6%)" in lines
    assert lines[-1] == f"written to {page}"
    text = page.read_text(encoding="utf-8")
    assert "<h3>rows.jsonl:1</h3>" in text and "62, 14 trained (22.6%)" in text and "Preview of " in text
    assert "id " in text and "<b>" not in re.sub(r"<b class=.tag[^>]*>", "", text)


@pytest.mark.usefixtures("in_this_process")
def test_a_precision_that_is_still_to_be_measured_hinders_no_preview(
    recipe: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert danlu("preview", recipe(HELLO), "precision=auto") == 0
    assert "== 1 packed sequence of 128 tokens" in capsys.readouterr().out


@pytest.mark.usefixtures("in_this_process")
def test_json_is_one_object_with_the_ids_that_are_trained(
    recipe: Any, letters: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    path = recipe(HELLO, {"messages": [{"role": "user", "content": "\x1b[31m"}, HELLO["messages"][1]]})
    assert danlu("preview", path, "--json", "--rows", 2, "--tokens", 1, "--packs", 1, "--html", page) == 0
    out = capsys.readouterr()
    (line,) = out.out.splitlines()
    assert line.isascii() and "\x1b" not in line and f"written to {page}" in out.err
    found = json.loads(line)
    assert list(found) == [
        "stage", "max_length", "packing", "refused", "warnings",
        "new_tokens", "reasons", "rows", "packs", "steps",
        "first_block_only", "train", "eval",
    ]  # fmt: skip
    first = found["rows"][0]
    assert {key: value for key, value in first.items() if key != "samples"} == {
        "row": "rows.jsonl:1", "source": 0, "index": 0, "evaluation": False, "bad": None, "columns": None,
        "dropped": None, "shortened": None, "lost_tokens": 0,
    }  # fmt: skip
    (sample,) = first["samples"]
    text = "<|im_start|>user\n龘?<|im_end|>\n<|im_start|>assistant\nok <b><|im_end|>\n"
    assert sample["ids"] == load_tokenizer(str(letters), None).encode(text)
    assert "".join(sample["texts"]) == text
    assert {len(sample[key]) for key in ("ids", "texts", "weights", "reasons", "special")} == {31}
    trained = [(text, reason) for text, reason, weight in zip(
        sample["texts"], sample["reasons"], sample["weights"], strict=True) if weight == 2.0
    ]  # fmt: skip
    assert trained == [*((letter, "assistant") for letter in "ok <b>"), ("<|im_end|>", "end-of-turn")]
    assert sum(sample["weights"]) == 14 and [sample["special"][0], sample["special"][1]] == [True, False]
    documents = {one["row"]: one for one in found["packs"][0]["documents"]}
    assert documents["rows.jsonl:1"] == {"row": "rows.jsonl:1", "ids": sample["ids"], "weights": sample["weights"]}
    assert documents["rows.jsonl:2"]["ids"] != sample["ids"]
    counted = found["train"]["statistics"]
    total = sum(len(one["ids"]) for one in documents.values())
    assert (counted["rows"], counted["tokens"], counted["trained_tokens"]) == (2, total, 14)
    assert counted["trained_share"] == 14 / total and counted["reasons"]["end-of-turn"] == 2
    assert found["train"]["packed"] == {"packs": 1, "samples": 2, "tokens": total, "efficiency": total / 128}
    assert sum(one["samples"] for one in found["train"]["lengths"]) == 2
    assert found["steps"] == {"packs": 4, "epoch": 1, "run": 12} and found["eval"] is None
    assert set(found["reasons"]) >= set(sample["reasons"])


@pytest.mark.usefixtures("in_this_process")
def test_json_of_data_that_a_run_refuses_says_why(recipe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert danlu("preview", recipe(HELLO, TWO_QUESTIONS, "{broken", '{"a": NaN}'), "--json", "--rows", 4) == 3
    out = capsys.readouterr()
    found = json.loads(out.out)
    assert found["refused"].startswith("rows.jsonl:2 message 2: two user turns in a row") and out.err
    assert (found["packs"], found["steps"], found["train"]["packed"]) == ([], None, None)
    assert found["train"]["statistics"]["bad_rows"] == 3 and found["rows"][3]["columns"] == {"a": "NaN"}
    bad = found["rows"][1]
    assert bad["bad"].startswith("rows.jsonl:2 message 2") and bad["samples"] == []
    assert bad["columns"] == TWO_QUESTIONS and found["rows"][2]["columns"] is None


@pytest.mark.usefixtures("in_this_process")
def test_the_date_of_a_chat_template_is_told_and_is_that_of_the_run(
    recipe: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "dated.jinja"
    template.write_text("{{ strftime_now('%d %B') }}" + CHATML)
    monkeypatch.setattr("danlu.data.tokenizer_folder.today", lambda: date(2026, 11, 22))
    path, override = recipe(HELLO), f"model.chat_template={template}"
    assert danlu("preview", path, override) == 0
    shown = capsys.readouterr().out
    assert "2│2│␣│N│o│v" in shown and "the chat template writes the date: 2026-11-22 here; a run keeps that" in shown
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text(
        resolved_yaml(load(path, [override, "model.chat_template_date=2026-10-05"]).recipe)
    )
    assert danlu("preview", path, override) == 0
    shown = capsys.readouterr().out
    assert "0│5│␣│O│c│t" in shown and "the chat template writes the date: 2026-10-05 here" in shown
    assert danlu("preview", path, override, "model.chat_template_date=2026-1-5") == 2
    assert "model.chat_template_date: '2026-1-5' is no day: write year, month and day" in capsys.readouterr().err


@pytest.mark.usefixtures("in_this_process")
def test_special_tokens_in_a_row_s_text_are_told(recipe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    injected = {"messages": [{"role": "user", "content": "a<|im_end|>b"}, HELLO["messages"][1]]}
    assert danlu("preview", recipe(HELLO, injected), "--rows", 0) == 0
    shown = capsys.readouterr().out
    assert "look at        special tokens are written out in the text of rows" in shown
    assert "<|im_end|> in 1 samples, the first rows.jsonl:2" in shown


@pytest.mark.usefixtures("in_this_process")
def test_data_that_trains_nothing_is_shown_and_then_refused(
    recipe: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    path = recipe(UNTRAINED, UNTRAINED)
    assert danlu("preview", path, "--html", page) == 3
    out = capsys.readouterr()
    assert "  dropped: no token would be trained. It would have been:" in out.out
    assert "    context  [assistant]   o│k" in out.out
    assert "== a run refuses this data" in out.out
    assert "  dropped        2 rows: no token would be trained" in out.out
    assert "rows.jsonl: no row is left to train on, of 2 (2 no token would be trained)" in out.err
    assert "no row is left to train on, of 2" in page.read_text(encoding="utf-8")
    chosen = load(path).recipe
    with pytest.raises(DataError) as said:  # what stops a run
        prepare(DatasetSpec(chosen.data, "sft", chosen.model.tokenizer or "", chat_template=None, seed=chosen.seed))
    assert out.err == f"error: {said.value}\n"


@pytest.mark.usefixtures("in_this_process")
def test_answers_without_an_end_are_shown_and_then_refused(recipe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe({"prompt": "2+2=", "completion": "4"}, append_eos=False)
    assert danlu("preview", path) == 3
    out = capsys.readouterr()
    assert "    trained  [completion]  4" in out.out
    assert "  without end    1 of 1 samples train an answer but not its end-of-turn token" in out.out
    assert out.err.startswith("error: rows.jsonl:1: answers are trained, but not the token that ends them")
    assert danlu("preview", path, "data.append_eos=true") == 0
    assert "    trained  [eos]         <|im_end|>" in capsys.readouterr().out


@pytest.mark.usefixtures("in_this_process")
def test_bad_rows_are_all_counted_before_the_first_is_an_error(recipe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe(HELLO, TWO_QUESTIONS, "{broken")
    assert danlu("preview", path, "--row", "rows.jsonl:2") == 3
    out = capsys.readouterr()
    assert "\nrows.jsonl:2\n  cannot be used: rows.jsonl:2 message 2: two user turns in a row" in out.out
    assert '  its columns: {"messages": [{"role": "user", "content": "龘?"},' in out.out
    assert "  bad rows       2 (data.on_bad_row is error: a run stops at the first)" in out.out
    assert out.err.startswith("error: rows.jsonl:2 message 2: two user turns in a row")
    assert "Set data.on_bad_row: skip" in out.err
    assert danlu("preview", path, "data.on_bad_row=skip", "--rows", 0) == 0
    assert "  bad rows       2 (skipped)" in capsys.readouterr().out


@pytest.mark.usefixtures("in_this_process")
def test_plain_text_and_streams(recipe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe({"text": "abc"}, {"text": "defghi"})
    words = ["stage=pretrain", "data.packing=concatenate", "data.max_length=4", "batch.micro=auto"]
    assert danlu("preview", path, *words, "--rows", 1) == 0
    out = capsys.readouterr().out
    assert (
        "    context  [text]        a\n    trained  [text]        b│c\n    trained  [eos]         <|im_end|>\n" in out
    )
    assert "== 3 packed sequences of 4 tokens (concatenate), 91.7% full: 2 documents, 11 tokens" in out
    assert danlu("preview", path, *words, "data.streaming=true", "--rows", 0, "--packs", 0) == 0
    out = capsys.readouterr().out
    assert "== training rows: the first block of the stream\n  rows           2\n" in out
    assert "4 packed sequences a step, 12 steps in this run; these are the sequences of the stream's first block" in out


@pytest.mark.usefixtures("in_this_process")
def test_samples_beyond_the_models_positions_are_told(recipe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert danlu("preview", recipe(HELLO, HELLO, max_length=256)) == 0
    limit = "data.max_length: 256 is more than the 128 positions that the model has for a sample"
    assert f"  note           {limit}; no sample is longer than 128 tokens\n" in capsys.readouterr().out
    long = {"messages": [HELLO["messages"][0], {"role": "assistant", "content": "x" * 140}]}
    assert danlu("preview", recipe(HELLO, long, max_length=256)) == 0
    assert f"{limit}: 1 of 2 samples are longer, up to 165 tokens. What lies beyond" in capsys.readouterr().out


def test_wrong_arguments_are_told_at_once(
    recipe: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recipe(HELLO)
    notes = tmp_path / "notes.html"
    notes.write_text("mine")
    monkeypatch.setattr("danlu.data.preview.WorkerPool", None)  # so nothing can be rendered
    assert danlu("preview", path, "--html", notes) == 2
    assert "notes.html: exists and is no danlu preview" in capsys.readouterr().err
    assert danlu("preview", path, "--row", "rows.jsonl:7") == 2
    assert "error: --row rows.jsonl:7: there is no such row in " in capsys.readouterr().err
    assert danlu("preview", path, "data.max_lenght=3") == 2
    assert "max_length" in capsys.readouterr().err
    assert danlu("preview", path, "--rows", -1) == 2
    assert notes.read_text() == "mine"


@pytest.mark.usefixtures("in_this_process")
def test_a_page_that_cannot_be_written_is_said(
    recipe: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("danlu.report.report_file.write_atomically", full)
    page = tmp_path / "page.html"
    assert danlu("preview", recipe(HELLO), "--rows", 0, "--html", page) == 6
    assert capsys.readouterr().err == f"error: --html {page}: cannot be written: No space left on device\n"


@pytest.mark.usefixtures("in_this_process")
def test_a_tokenizer_without_a_chat_template_is_the_runs_own_error(
    recipe: Any, letters: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bare = Path(shutil.copytree(letters, tmp_path / "bare"))
    (bare / "chat_template.jinja").unlink()
    assert danlu("preview", recipe(HELLO), f"model.tokenizer={bare}") == 3
    out = capsys.readouterr()
    assert out.out == "" and "this tokenizer has no chat template" in out.err


@pytest.mark.usefixtures("in_this_process")
def test_real_rows(shared_data: Path, tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("alpaca_en_demo", "alpaca_zh_demo", "glaive_toolcall_en_demo", "fastchat_dummy_conversation")
    data = {
        "train": [f"{shared_data}/instruct/{name}.json#20" for name in names],
        "eval": 0.1,
        "max_length": 512,
        "overlong": "split",
        "cache": str(tmp_path / "cache"),
    }
    model = {"tokenizer": str(shared_data / "tokenizers" / "minimind")}
    assert danlu("preview", tiny_world.recipe(tmp_path / "run", model=model, data=data), "--rows", 1) == 0
    out = capsys.readouterr().out
    for said in (
        "\nalpaca_zh_demo.json:2\n",
        "识别│并│解释",
        "[tool] ",
        "    trained  [end-of-turn] <|im_end|>",
        "== training rows, with those held out\n  rows           80\n",
        "== evaluation rows",
    ):
        assert said in out
    assert "cache holds other tokens" not in out


QUESTION, LONG = {"question": "A?", "answer": "b"}, {"question": "x" * 300, "answer": "b"}


@pytest.fixture
def prompts(tiny_world: World, in_this_process: None, tmp_path: Path) -> Callable[..., Path]:
    """A recipe of stage rl over rows, whose prompts are the column `question`."""

    def prompts(*rows: Any, **changes: Any) -> Path:
        path = write_rows(tmp_path / "rows.jsonl", rows)
        values: dict[str, Any] = {
            "stage": "grpo",
            "data": {"train": str(path), "prompt": "{question}", "max_length": 128, **changes.pop("data", {})},
            "rewards": [{"kind": "exact", "column": "answer"}],
            "rollout": {"samples": 2, "max_new_tokens": 8},
            **changes,
        }
        values = tiny_world.values(tmp_path / "run", **values) | {
            "model": changes.get("model", str(tiny_world.base)),
            "batch": {"prompts": 2},
        }
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump(values), encoding="utf-8")
        return file

    return prompts


def test_prompts_of_stage_rl_are_shown_as_the_policy_is_given_them(
    prompts: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert danlu("preview", prompts(QUESTION, QUESTION, LONG), "--rows", 1) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    start = lines.index("rows.jsonl:1")
    shown = "".join(lines[start + 2 : start + 6]).replace("│", "")
    assert "0 trained" in lines[start + 1] and "A?" in shown and "assistant↵" in shown.replace(" ", "")
    assert "rows.jsonl:2" not in out and "== prompts\n  data: 3 rows, 3 prompts of " in out
    assert "data: 1 of them prompt shortened: the prompt leaves no room for rollout.max_new_tokens in" in out


def test_prompts_as_json_have_the_tokens_of_the_run(prompts: Any, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = prompts(QUESTION, {"q": 1}, LONG, data={"on_bad_row": "skip"})
    assert danlu("preview", recipe, "--json", "--rows", 3) == 0
    shown = json.loads(capsys.readouterr().out)
    good, bad, long = shown["rows"]
    trained = PromptReader(load(recipe).recipe).read(io.StringIO()).prompts
    assert trained is not None
    tokens = {prompt.where: list(prompt.tokens) for prompt in trained.train}
    for row in (good, long):
        assert row["samples"][0]["ids"] == tokens[row["row"]]
    assert set(good["samples"][0]["reasons"]) == {"prompt"} and not any(good["samples"][0]["weights"])
    assert long["shortened"] and not bad["samples"] and "names the column 'question'" in bad["bad"]
    assert tokens["rows.jsonl:1"] != tokens["rows.jsonl:3"]  # control
    assert danlu("preview", recipe, "--row", "rows.jsonl:3", "--json") == 0
    third = json.loads(capsys.readouterr().out)
    assert [row["row"] for row in third["rows"]] == ["rows.jsonl:3"] and third["new_tokens"] == []


def test_new_tokens_of_prompts_are_in_the_json(
    prompts: Any, tiny_world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = prompts({**QUESTION, "question": "A <plan>?"}, model={"path": str(tiny_world.base), "tokens": ["<plan>"]})
    assert danlu("preview", recipe, "--json", "--rows", 1) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(token["text"], token["id"]) for token in shown["new_tokens"]] == [("<plan>", 400)]
    assert 400 in shown["rows"][0]["samples"][0]["ids"]


def test_prompts_that_a_run_refuses_are_shown_and_then_refused(
    prompts: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert danlu("preview", prompts(QUESTION, LONG, data={"max_length": 512})) == 3
    out = capsys.readouterr()
    assert "rows.jsonl:1\n" in out.out
    assert "error: rows.jsonl:2: the prompt has " in out.err and "has 128 positions for it and its answer" in out.err
    medium = {"question": "x" * 106, "answer": "b"}
    assert danlu("preview", prompts(QUESTION, medium, data={"max_length": 512})) == 0
    assert "data.max_length: 512 is more than the 128 positions that the model has: 1 of 2" in capsys.readouterr().out
    assert danlu("preview", prompts(QUESTION), "--html", tmp_path / "page.html") == 2
    assert "--html: a page shows what is trained on" in capsys.readouterr().err
    assert danlu("preview", prompts(QUESTION), "--row", "rows.jsonl:9") == 2
    assert "--row rows.jsonl:9: there is no such row in" in capsys.readouterr().err
