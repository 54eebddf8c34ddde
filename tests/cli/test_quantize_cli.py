"""`danlu quantize` and `danlu bench quantization`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from builders.expert_folder import expert_folder
from builders.tiny_world import World, danlu
from transformers import AutoModelForCausalLM, AutoTokenizer

from danlu.models.config import parameter_shapes
from danlu.models.hf_folder import read_config, read_json

STORY = "Tom has a red ball. The ball is big and round. Tom plays with the ball all day long. "

FORMATS = ["nf4", "nf4, scales whole", "fp4", "int8", "int4", "int3", "int2", "fp8", "mxfp8", "mxfp4", "nvfp4"]


def test_a_model_in_4_bits(tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "nf4"
    assert danlu("quantize", tiny_world.base, out) == 0
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"{tiny_world.base} in nf4: 18,432 of 44,192 parameters packed to 4.1")
    assert f"model in {out}: try `danlu eval {out} --data FILE` or `danlu chat {out}`\n" in told.err
    assert danlu("generate", out, "--prompt", "Tom", "--max-new-tokens", 3) == 0
    assert danlu("quantize", out, tmp_path / "again") == 4
    assert "is quantized already (nf4); quantizing it again would round twice" in capsys.readouterr().err
    assert danlu("quantize", tiny_world.base, out) == 6
    assert "is there already. Choose an empty or new folder" in capsys.readouterr().err


def test_flags(tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert danlu("quantize", tiny_world.base, tmp_path / "fp4", "--kind", "fp4", "--no-double", "--dtype", "bf16") == 0
    assert "packed to 4.500 bits each" in capsys.readouterr().err
    values = read_json(tmp_path / "fp4" / "config.json")["quantization_config"]
    assert values["bnb_4bit_quant_type"] == "fp4" and not values["bnb_4bit_use_double_quant"]
    assert values["bnb_4bit_compute_dtype"] == "bfloat16" and values["llm_int8_skip_modules"] == ["lm_head"]
    assert danlu("quantize", tiny_world.base, tmp_path / "x", "--kind", "int4", "--dtype", "fp8") == 2
    assert capsys.readouterr().err == (
        "error: --kind: 'int4' is unknown; use nf4 or fp4\n"
        "error: --dtype: 'fp8' is unknown; use auto, fp32, bf16, fp16\n"
    )


def test_experts_are_quantized_unless_they_are_left_out(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = expert_folder(tiny_world)
    packed = []
    for name, flags in (("with", []), ("without", ["--no-experts"])):
        assert danlu("quantize", folder, tmp_path / name, *flags) == 0
        packed.append(int(capsys.readouterr().err.split(" in nf4: ")[1].split(" of ")[0].replace(",", "")))
    sizes = {name: math.prod(shape) for name, shape in parameter_shapes(read_config(folder)).items()}
    assert packed[0] - packed[1] == sum(size for name, size in sizes.items() if ".experts." in name) > 0


# -- danlu bench quantization -----------------------------------------------------------------------------------------


def test_a_row_for_each_format(tiny_world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert danlu("bench", "quantization", tiny_world.base) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{tiny_world.base}: 18,432 parameters in linear layers"
    assert lines[1].split() == ["format", "bits", "error", "worst", "mean"]
    assert [line.split("  ")[0] for line in lines[2:]] == FORMATS
    assert lines[3].split()[3] == "4.500" and len(lines) == 2 + len(FORMATS)


def test_perplexity_is_that_of_the_model_on_the_text(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "story.txt").write_text(STORY * 9)
    assert danlu("bench", "quantization", tiny_world.base, "--text", tmp_path / "story.txt", "--json") == 0
    row = json.loads(capsys.readouterr().out)
    assert list(row) == ["model", "parameters", "text", "tokens", "perplexity", "formats"]
    assert [list(one) for one in row["formats"]] == [
        ["format", "bits", "error", "worst", "worst_layer", "mean", "perplexity"]
    ] * len(FORMATS)
    model = AutoModelForCausalLM.from_pretrained(tiny_world.base).eval()
    ids = AutoTokenizer.from_pretrained(tiny_world.base)(STORY * 9)["input_ids"]
    nats = scored = 0.0
    for start in range(0, len(ids), 128):  # the model's context
        piece = torch.tensor([ids[start : start + 128]])
        with torch.no_grad():
            nats += float(model(piece, labels=piece).loss) * (piece.shape[1] - 1)
        scored += piece.shape[1] - 1
    assert row["tokens"] == scored and len(ids) > 256
    assert row["perplexity"] == pytest.approx(math.exp(nats / scored), rel=1e-4)
    others = [one["perplexity"] for one in row["formats"]]
    assert (
        len({round(other, 6) for other in (*others, row["perplexity"])}) == len(FORMATS) + 1
    )  # each is a model of its own
    assert danlu("bench", "quantization", tiny_world.base, "--text", tmp_path / "story.txt", "--tokens", 50) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"perplexity of 49 tokens of {tmp_path / 'story.txt'}"
    assert lines[2].split()[:2] == ["as", "stored"] and len(lines) == 4 + len(FORMATS)


def test_what_cannot_be_measured(tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert danlu("quantize", tiny_world.base, tmp_path / "nf4") == 0
    (tmp_path / "short").write_text("a")
    (tmp_path / "latin").write_bytes(b"caf\xe9 " * 9)
    capsys.readouterr()
    for model, text, code, message in (
        (tmp_path / "nf4", None, 4, "nf4: is quantized already"),
        (tiny_world.base, "short", 3, "the text has fewer than two tokens: there is nothing to predict"),
        (tiny_world.base, "latin", 3, "latin: not UTF-8 text; convert it first"),
        (tiny_world.base, "none", 3, "none: cannot be read: No such file or directory"),
        (tmp_path / "nowhere", None, 4, "nowhere: no such folder"),
    ):
        more = [] if text is None else ["--text", tmp_path / text]
        assert danlu("bench", "quantization", model, *more) == code
        assert message in capsys.readouterr().err
