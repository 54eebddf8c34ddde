"""`danlu eval` against transformers, row by row, and against what a run said of itself."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.adapter_folders import adapter_folder
from builders.tiny_world import CONFIG, World, danlu, metrics, write_rows

from danlu.data.tokenizer import load_tokenizer
from danlu.models.loading import build
from danlu.models.presets import from_scratch
from danlu.models.saving import save
from danlu.recipe import sections

pytestmark = pytest.mark.usefixtures("tokenising_here")

Row = tuple[list[int], list[int]]
"""Token ids, and labels with -100 where nothing is scored."""

TEXTS = ["The fox is red.", "Tom has 3 apples and 丹炉.", "A cat sat on the mat, and then it slept all day long."]
TALKS = [
    [("user", "What colour is the fox?"), ("assistant", "Red.")],
    [
        ("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello!"),
        ("user", "How many apples has Tom?"), ("assistant", "Three, of course."),
    ],
]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def without_progress_bars() -> Iterator[None]:
    """transformers shows none as it loads a model: `evaluated` looks at stderr."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    yield
    if shown:
        logging.enable_progress_bar()


@pytest.fixture(scope="module")
def folder(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama that is sure of itself, with a byte-level tokenizer and ChatML."""
    tokenizer = load_tokenizer(str(tiny_world.tokenizer))
    config = from_scratch(sections.Model(config=CONFIG, tokenizer="none"), tokenizer.vocab_size, None, tokenizer.eos_id)
    model, generator = build(config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
            if name.endswith("norm.weight"):
                parameter.add_(1.0)
    made = tmp_path_factory.mktemp("eval") / "model"
    save(model, made, tokenizer_from=tiny_world.tokenizer)
    return made


@pytest.fixture
def evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """The JSON that `danlu eval` prints."""

    def run(model: Path, data: Path, *overrides: str) -> dict[str, Any]:
        assert danlu("eval", model, "--data", data, "--json", *overrides, f"data.cache={tmp_path / 'cache'}") == 0
        out = capsys.readouterr()
        assert [line for line in out.err.splitlines() if not line.startswith("tokenising")] == []
        row: dict[str, Any] = json.loads(out.out)
        return row

    return run


def transformers_scores(folder: Path, rows: Sequence[Row]) -> dict[str, float]:
    """Loss, accuracy and scored tokens, a row at a time: the model's own loss, weighted by its labels."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    total = correct = count = 0.0
    for ids, labels in rows:
        tokens, wanted = torch.tensor([ids]), torch.tensor([labels])
        with torch.no_grad():
            out = model(tokens, labels=wanted)
        scored = wanted[0, 1:] != -100
        total += out.loss.item() * int(scored.sum())
        correct += int((out.logits[0, :-1].argmax(-1) == wanted[0, 1:])[scored].sum())
        count += int(scored.sum())
    return {"loss": total / count, "accuracy": correct / count, "scored_tokens": count}


def agree(row: dict[str, Any], expected: dict[str, float]) -> bool:
    return {name: row[name] for name in expected} == pytest.approx(expected, abs=1e-5)


# -- each format ------------------------------------------------------------------------------------------------------


def text_rows(tokenizer: Any) -> list[Row]:
    return [(ids, ids) for ids in (tokenizer(text)["input_ids"] for text in TEXTS)]


def spans_scored(tokenizer: Any, text: str, spans: Sequence[tuple[int, int]]) -> Row:
    """A text of which the tokens within character spans are scored."""
    encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    inside = [any(start <= a and b <= stop for start, stop in spans) for a, b in encoded["offset_mapping"]]
    ids = encoded["input_ids"]
    return ids, [token if yes else -100 for token, yes in zip(ids, inside, strict=True)]


def talk_row(tokenizer: Any, talk: Sequence[tuple[str, str]], last_only: bool = False) -> Row:
    messages = [{"role": role, "content": content} for role, content in talk]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    spans = [found.span(1) for found in re.finditer(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", text)]
    return spans_scored(tokenizer, text, spans[-1:] if last_only else spans)


def test_text(folder, tiny_world, tmp_path, evaluated):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = text_rows(tokenizer)
    jsonl = write_rows(tmp_path / "text.jsonl", [{"text": text} for text in TEXTS])
    row = evaluated(folder, jsonl)
    expected = transformers_scores(folder, rows)
    assert agree(row, expected)
    assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
    assert row["tokens"] == sum(len(ids) for ids, _ in rows) and row["rows"] == 3 and row["max_length"] == 128
    # Bits per byte are over the text that is scored: without a beginning-of-text token, all but each first token.
    scored_bytes = sum(
        len(text.encode()) - len(tokenizer.decode(ids[:1]).encode()) for text, (ids, _) in zip(TEXTS, rows, strict=True)
    )
    nats = expected["loss"] * expected["scored_tokens"]
    assert row["bits_per_byte"] == pytest.approx(nats / math.log(2) / scored_bytes, abs=1e-5)
    # Controls: one token fewer, one row fewer, another order of words.
    assert not agree(row, transformers_scores(folder, [(ids, [*ids[:-1], -100]) for ids, _ in rows]))
    assert not agree(row, transformers_scores(folder, rows[:-1]))
    assert not agree(row, transformers_scores(folder, [(ids[::-1], ids[::-1]) for ids, _ in rows]))


def test_end_of_text_is_scored_when_asked(folder, tmp_path, evaluated):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [([*ids, tokenizer.eos_token_id],) * 2 for ids, _ in text_rows(tokenizer)]
    row = evaluated(folder, write_rows(tmp_path / "text.jsonl", [{"text": t} for t in TEXTS]), "data.append_eos=true")
    assert agree(row, transformers_scores(folder, rows))
    assert not agree(row, transformers_scores(folder, text_rows(tokenizer)))


def test_every_file_type_gives_the_same(folder, tmp_path, evaluated):
    import pyarrow
    from pyarrow import parquet

    rows = [{"text": text} for text in TEXTS]
    (tmp_path / "a.json").write_text(json.dumps(rows), encoding="utf-8")
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "b.parquet")
    with (tmp_path / "c.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["text"])
        writer.writeheader()
        writer.writerows(rows)
    first = evaluated(folder, write_rows(tmp_path / "d.jsonl", rows))
    for name in ("a.json", "b.parquet", "c.csv"):
        assert evaluated(folder, tmp_path / name) == first | {"data": str(tmp_path / name)}
    part = evaluated(folder, Path(f"{tmp_path / 'd.jsonl'}#2"))
    assert part["rows"] == 2 and part["loss"] != first["loss"]


def test_prompt_and_completion(folder, tmp_path, evaluated):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    pairs = [("Q: 1+1?\nA:", " two"), ("The fox is", " red, they say.")]
    file = write_rows(tmp_path / "pairs.jsonl", [{"prompt": p, "completion": c} for p, c in pairs])
    row = evaluated(folder, file)
    expected = [spans_scored(tokenizer, p + c, [(len(p), len(p + c))]) for p, c in pairs]
    assert agree(row, transformers_scores(folder, expected)) and row["bits_per_byte"] is None
    everything = [(ids, ids) for ids, _ in expected]
    assert not agree(row, transformers_scores(folder, everything))
    assert agree(evaluated(folder, file, "data.train_on=all"), transformers_scores(folder, everything))


@pytest.mark.parametrize("form", ["messages", "sharegpt", "alpaca"])
def test_conversations(folder, tmp_path, evaluated, form):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    talks = TALKS[:1] if form == "alpaca" else TALKS
    speakers = {"user": "human", "assistant": "gpt", "system": "system"}
    rows: list[object] = {
        "messages": [{"messages": [{"role": who, "content": what} for who, what in talk]} for talk in talks],
        "sharegpt": [{"conversations": [{"from": speakers[w], "value": what} for w, what in talk]} for talk in talks],
        "alpaca": [{"instruction": talk[0][1], "output": talk[1][1]} for talk in talks],
    }[form]
    file = write_rows(tmp_path / "talks.jsonl", rows)
    row = evaluated(folder, file)
    expected = [talk_row(tokenizer, talk) for talk in talks]
    assert agree(row, transformers_scores(folder, expected)) and row["bits_per_byte"] is None
    assert not agree(row, transformers_scores(folder, [(ids, ids) for ids, _ in expected]))
    last = transformers_scores(folder, [talk_row(tokenizer, talk, last_only=True) for talk in talks])
    assert agree(evaluated(folder, file, "data.train_on=last"), last)
    assert agree(row, last) == (form == "alpaca")


def test_given_tokens(folder, tmp_path, evaluated):
    rows: list[Row] = [([5, 6, 7, 8], [-100, -100, 7, 8]), ([30, 31, 32], [30, 31, -100])]
    file = write_rows(tmp_path / "ids.jsonl", [{"input_ids": ids, "labels": labels} for ids, labels in rows])
    assert agree(evaluated(folder, file), transformers_scores(folder, rows))


def test_long_rows_are_cut_and_every_token_scored(folder, tmp_path, capsys):
    from transformers import AutoTokenizer

    text = " ".join(TEXTS * 4)
    ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    file, cache = write_rows(tmp_path / "long.jsonl", [{"text": text}]), f"data.cache={tmp_path / 'cache'}"
    # Pieces of 20 tokens; from the second on the first of them is the last of the piece before, for context.
    starts = range(0, len(ids) - 1, 19)
    pieces: list[Row] = [(ids[start : start + 20],) * 2 for start in starts]
    assert danlu("eval", folder, "--data", file, "--json", "data.max_length=20", cache) == 0
    row = json.loads(capsys.readouterr().out)
    assert agree(row, transformers_scores(folder, pieces))
    assert row["scored_tokens"] == len(ids) - 1
    assert row["shortened"] == {"split": 1} and row["lost_tokens"] == 0
    assert danlu("eval", folder, "--data", file, "data.max_length=20", "data.overlong=truncate", cache) == 0
    out = capsys.readouterr()
    assert "scored         19 of 20 tokens in 1 rows\n" in out.out
    assert out.err.endswith("note: 1 rows truncated (data.max_length 20)\n")
    short = tmp_path / "short"
    shutil.copytree(folder, short)
    values = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(values | {"max_position_embeddings": 24}))
    assert danlu("eval", short, "--data", file, cache) == 0
    assert capsys.readouterr().err.endswith("note: 1 rows split (data.max_length 24, all that the model sees)\n")
    assert danlu("eval", short, "--data", file, "data.max_length=25", cache) == 2
    assert "data.max_length: 25 is more than the 24 tokens that" in capsys.readouterr().err


def test_a_tokenizer_that_begins_with_a_token_and_a_space(stories, tmp_path, evaluated):
    """Llama's: the token before a document is context, so every byte of text is scored, and the space is not text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(stories)
    texts = ["Once upon a time, there was a cat.", "Zoë saw 丹炉 — €3!"]
    row = evaluated(stories, write_rows(tmp_path / "text.jsonl", [{"text": text} for text in texts]))
    rows = [(ids, ids) for ids in (tokenizer(text)["input_ids"] for text in texts)]
    assert all(ids[0] == tokenizer.bos_token_id for ids, _ in rows)
    expected = transformers_scores(stories, rows)
    assert agree(row, expected)
    nats, size = expected["loss"] * expected["scored_tokens"], sum(len(text.encode()) for text in texts)
    assert row["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, abs=1e-5)
    assert row["bits_per_byte"] != pytest.approx(nats / math.log(2) / (size + 1), abs=1e-5)


# -- runs -------------------------------------------------------------------------------------------------------------


def test_a_run_folder_scores_what_the_run_said(tiny_world, tmp_path, capsys, evaluated):
    held_out = write_rows(
        tmp_path / "held_out.jsonl",
        [{"messages": [{"role": who, "content": what} for who, what in talk]} for talk in TALKS],
    )
    run = tmp_path / "run"
    changes = {"data": {"eval": str(held_out), "max_length": 128}, "steps": 4, "evaluation": {"every": 4}}
    assert danlu("train", tiny_world.recipe(run, **changes)) == 0
    capsys.readouterr()
    said = [line for line in metrics(run) if "eval_loss" in line][-1]
    row = evaluated(run, held_out)
    assert row["loss"] == pytest.approx(said["eval_loss"], abs=1e-5)
    assert row["accuracy"] == pytest.approx(said["eval_accuracy"]) and row["tokens"] == said["eval_tokens"]
    assert row["model"] == str(run / "model")
    assert row["loss"] != pytest.approx(evaluated(run, tiny_world.chat)["loss"], abs=1e-3)  # control: other rows


def test_half_precision_is_close_and_not_the_same(folder, tmp_path, capsys):
    file, losses = write_rows(tmp_path / "text.jsonl", [{"text": text} for text in TEXTS]), []
    for dtype in ("auto", "fp32", "bf16"):
        options = ["--json", "--dtype", dtype, f"data.cache={tmp_path / 'cache'}"]
        assert danlu("eval", folder, "--data", file, *options) == 0
        losses.append(json.loads(capsys.readouterr().out)["loss"])
    assert losses[0] == losses[1] != losses[2] == pytest.approx(losses[1], rel=0.03)


# -- for people -------------------------------------------------------------------------------------------------------


def test_what_people_read(folder, tmp_path, capsys):
    file = write_rows(tmp_path / "text.jsonl", [*({"text": text} for text in TEXTS), "{broken"])
    cache = f"data.cache={tmp_path / 'cache'}"
    assert danlu("eval", folder, "--data", file, "data.on_bad_row=skip", cache) == 0
    out = capsys.readouterr()
    assert re.fullmatch(
        r"loss           \d+\.\d{4} nats per token\n"
        r"perplexity     [\d.e+]+\n"
        r"accuracy       \d+\.\d\d% of tokens are the likeliest one\n"
        r"bits per byte  \d+\.\d{4}\n"
        r"scored         \d+ of \d+ tokens in 4 rows\n",
        out.out,
    )
    assert "note: 1 rows could not be read and were skipped; the first: text.jsonl:4:2: broken" in out.err


@pytest.mark.parametrize(
    ("rows", "options", "code", "message"),
    [
        (None, [], 3, "none.jsonl: no such file"),
        ([], [], 3, "rows.jsonl: the file is empty"),
        (["{broken"], [], 3, "rows.jsonl:1:2: broken JSON"),
        ([{"other": 1}], [], 3, "rows.jsonl:1: no known row format has the columns other"),
        ([{"text": "a"}], [], 3, "is left to train on"),
        ([{"text": "ab cd"}], ["data.max_length=129"], 2, "data.max_length: 129 is more than the 128 tokens that"),
        ([{"text": "ab cd"}], ["data.max_length=1"], 2, "data.max_length: at least 2, as the first token"),
        ([{"text": "ab cd"}], ["data.train_on=al"], 2, "data.train_on: expected one of all, assistant, last, not 'al'"),
        ([{"text": "ab cd"}], ["data.maxlength=9"], 2, "danlu eval takes no 'data.maxlength'. Did you mean 'data.max_"),
        ([{"text": "ab cd"}], ["data.streaming=true"], 2, "danlu eval takes no 'data.streaming'. It takes data.col"),
        ([{"text": "ab cd"}], ["--dtype", "int4"], 2, "--dtype: 'int4' is unknown; use auto, fp32, bf16, fp16"),
    ],
)
def test_misuse(folder, tmp_path, capsys, rows, options, code, message):
    file = tmp_path / "none.jsonl" if rows is None else write_rows(tmp_path / "rows.jsonl", rows)
    assert danlu("eval", folder, "--data", file, *options, f"data.cache={tmp_path / 'cache'}") == code
    out = capsys.readouterr()
    assert message in out.err and "Traceback" not in out.err and out.out == ""


def test_numbers_out_of_range_are_no_result(folder, tmp_path, capsys):
    """fp16 overflows where a weight is large: the loss would be NaN."""
    from safetensors.torch import load_file, save_file

    large = tmp_path / "large"
    large.mkdir()
    for file in folder.iterdir():
        (large / file.name).write_bytes(file.read_bytes())
    tensors = load_file(large / "model.safetensors")
    tensors["model.norm.weight"] *= 60000.0 / tensors["model.norm.weight"].abs().max()
    save_file(tensors, large / "model.safetensors")
    file = write_rows(tmp_path / "rows.jsonl", [{"text": TEXTS[0]}])
    cache = f"data.cache={tmp_path / 'cache'}"
    assert danlu("eval", large, "--data", file, "--dtype", "fp16", cache) == 4
    assert "the loss is not a number: the model's numbers leave the range of float16; try --dtype fp32" in (
        capsys.readouterr().err
    )
    assert danlu("eval", large, "--data", file, "--dtype", "fp32", cache) == 0


def test_weights_that_are_cut_off_are_told_before_rows_are_tokenised(folder, tmp_path, capsys):
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    file = write_rows(tmp_path / "rows.jsonl", [{"text": TEXTS[0]}])
    assert danlu("eval", broken, "--data", file, f"data.cache={tmp_path / 'cache'}") == 4
    assert f"{weights}: truncated" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


# -- adapters and few bits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("section", [sections.Lora(), sections.Prefix(tokens=3)], ids=lambda section: section.kind)
def test_an_adapter_is_scored_beside_its_base(folder, tmp_path, evaluated, section):
    """As transformers and PEFT score it, or the model it can be merged into."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    adapter = adapter_folder(folder, tmp_path / "adapter", section, size=0.3)
    jsonl = write_rows(tmp_path / "text.jsonl", [{"text": text} for text in TEXTS])
    row = evaluated(adapter, jsonl)
    assert row["model"] == str(adapter) and row["max_length"] == (128 if section.kind == "lora" else 125)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), adapter).eval()
    total = count = 0.0
    for ids, _ in text_rows(AutoTokenizer.from_pretrained(folder)):
        with torch.no_grad():
            # PEFT's own loss has labels for virtual tokens too: here of the words alone.
            logits = model(torch.tensor([ids])).logits[0, -len(ids) : -1]
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum"))
        count += len(ids) - 1
    assert row["loss"] == pytest.approx(total / count, abs=1e-5)
    assert row["loss"] != pytest.approx(evaluated(folder, jsonl)["loss"], abs=1e-2)


def test_few_bits_are_scored(folder, tmp_path, capsys, evaluated):
    jsonl = write_rows(tmp_path / "text.jsonl", [{"text": text} for text in TEXTS])
    assert danlu("quantize", folder, tmp_path / "nf4") == 0
    capsys.readouterr()
    losses = [evaluated(folder, jsonl, "--quantization", kind)["loss"] for kind in ("nf4", "fp4", "int8", "int4")]
    assert evaluated(tmp_path / "nf4", jsonl)["loss"] == losses[0]
    assert len({round(loss, 7) for loss in (*losses, evaluated(folder, jsonl)["loss"])}) == 5


@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_a_run_scores_its_adapter_as_it_did_while_training(tiny_world, tmp_path, capsys, evaluated, quantization):
    held_out = write_rows(
        tmp_path / "held_out.jsonl",
        [{"messages": [{"role": who, "content": what} for who, what in talk]} for talk in TALKS],
    )
    run = tmp_path / "run"
    recipe = tiny_world.recipe(
        run,
        model={"config": None, "path": str(tiny_world.base), "tokenizer": None},
        data={"eval": str(held_out), "max_length": 128},
        steps=4,
        evaluation={"every": 4},
        adapter="lora",
        quantization=quantization,
    )
    assert danlu("train", recipe) == 0
    capsys.readouterr()
    said = [line for line in metrics(run) if "eval_loss" in line][-1]
    few_bits = [] if quantization is None else ["--quantization", quantization]
    assert evaluated(run, held_out)["loss"] == pytest.approx(said["eval_loss"], abs=1e-6)
    assert evaluated(run, held_out, *few_bits)["loss"] == pytest.approx(said["eval_loss"], abs=1e-6)
    assert evaluated(tiny_world.base, held_out, *few_bits)["loss"] != pytest.approx(said["eval_loss"], abs=1e-3)
    if quantization is not None:  # over the base as it is stored it is another model
        whole = evaluated(run, held_out, "--quantization", "none")
        assert whole["loss"] != pytest.approx(said["eval_loss"], abs=1e-6)


def test_a_run_says_what_to_do_with_its_adapter(tiny_world, tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "out"
    model = {"config": None, "path": str(tiny_world.base), "tokenizer": None}
    assert danlu("train", tiny_world.recipe(run, model=model, adapter="lora", steps=2)) == 0
    assert capsys.readouterr().err.endswith(
        f"  adapter in {run / 'adapter'}: try `danlu chat {run / 'adapter'}` or "
        f"`danlu merge {run / 'adapter'} MODEL_FOLDER`\n  curves and samples of the run: `danlu report {run}`\n"
    )
    assert danlu("checkpoint", "export", run, out) == 0
    said = capsys.readouterr().out
    assert said == f"step-00000002 written: try `danlu chat {out}` or `danlu merge {out} MODEL_FOLDER`\n"
    for name in ("adapter_model.safetensors", "adapter_config.json", "danlu.json", "tokenizer.json"):
        assert (out / name).read_bytes() == (run / "adapter" / name).read_bytes()
