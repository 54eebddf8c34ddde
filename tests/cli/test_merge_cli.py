"""`danlu merge`: what it takes, what it writes and what it says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from builders.adapter_folders import adapted_logits, adapter_folder
from builders.tiny_adapters import logits
from builders.tiny_world import World, danlu

from danlu.assembly.quantizing import quantize
from danlu.cli.train import suggested_commands
from danlu.models.loading import load
from danlu.recipe import sections


@pytest.fixture(scope="module")
def folders(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [adapter_folder(tiny_world.base, root / f"a{seed}", sections.Lora(rank=4), seed=seed) for seed in (1, 2)]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What is told of a command that ends with this code."""

    def run(*arguments: object, code: int = 0) -> str:
        assert danlu("merge", *arguments) == code
        out = capsys.readouterr()
        assert out.out == "" and "Traceback" not in out.err
        return out.err

    return run


def test_one_adapter(tiny_world: World, tmp_path: Path, folders: list[Path], said: Callable[..., str]) -> None:
    out = tmp_path / "out"
    assert said(folders[0], out) == (
        f"{folders[0]} merged into {tiny_world.base}\n"
        "written in float32, as it was computed: nothing was rounded\n"
        f"model in {out}: try `danlu generate {out} --prompt ...` or `danlu chat {out}`\n"
    )
    expected = adapted_logits(tiny_world.base, folders[0])
    torch.testing.assert_close(logits(load(out)), expected, rtol=1e-5, atol=1e-5)
    assert (out / "tokenizer.json").read_bytes() == (tiny_world.tokenizer / "tokenizer.json").read_bytes()
    assert "is there already. Choose an empty or new folder" in said(folders[0], out, code=6)
    assert danlu("generate", out, "--prompt", "Hi", "--max-new-tokens", 2) == 0


def test_a_chat_is_suggested_only_where_there_is_a_template(
    tiny_world: World, tmp_path: Path, folders: list[Path]
) -> None:
    for made in (tiny_world.base, folders[0]):
        assert f"`danlu chat {made}`" in suggested_commands(made)
        copy = shutil.copytree(made, tmp_path / made.name)
        for file in tiny_world.tokenizer.iterdir():
            shutil.copy(file, copy)
        assert f"`danlu chat {copy}`" in suggested_commands(copy)
        (copy / "chat_template.jinja").unlink()
        told = suggested_commands(copy)
        assert f"`danlu generate {copy} --prompt ...`" in told and "danlu chat" not in told


def test_a_reward_model_is_to_be_evaluated(tiny_world: World, tmp_path: Path, said: Callable[..., str]) -> None:
    folder = adapter_folder(tiny_world.base, tmp_path / "reward", sections.Lora(rank=4), scores=True)
    out = tmp_path / "out"
    assert said(folder, out).endswith(f"model in {out}: try `danlu eval {out} --data FILE`\n")


def test_what_peft_does_not_see_of_an_adapter_upon_another_is_told(
    tiny_world: World, tmp_path: Path, folders: list[Path], said: Callable[..., str]
) -> None:
    section = sections.Lora(rank=2)
    upon = [
        adapter_folder(tiny_world.base, tmp_path / f"upon{seed}", section, seed=seed, below=(folders[0],))
        for seed in (3, 4)
    ]
    told = suggested_commands(upon[0])  # the end of a run, and of `danlu checkpoint export`
    assert told == (
        f"try `danlu chat {upon[0]}` or `danlu merge {upon[0]} MODEL_FOLDER`\n"
        f"  warning: it was trained upon {folders[0].resolve()}, which adapter_config.json cannot say: PEFT and vLLM "
        f"put it on {tiny_world.base.resolve()} alone, which is another model. For them use what `danlu merge` writes, "
        "all of it merged"
    )
    assert "warning: it was trained upon" in said(*upon, tmp_path / "both", "--as-adapter")
    assert "warning" not in suggested_commands(folders[0])
    said(upon[0], tmp_path / "merged")
    expected = adapted_logits(tiny_world.base, folders[0], upon[0])
    torch.testing.assert_close(logits(load(tmp_path / "merged")), expected, rtol=1e-5, atol=1e-5)


def test_a_base_in_4_bits_and_rounding(
    tiny_world: World, tmp_path: Path, folders: list[Path], said: Callable[..., str]
) -> None:
    quantize(tiny_world.base, tmp_path / "nf4", sections.Nf4())
    told = said(folders[0], tmp_path / "one", "--into", tmp_path / "nf4", "--dtype", "bf16")
    assert "the base is quantized: merged into its dequantized weights, and written unquantized\n" in told
    assert "written in bfloat16: against base and adapters unmerged, the matrices differ by 0.1" in told
    assert "% on average, at most by 0.1" in told and "||difference|| / ||matrix||, Frobenius norms" in told
    assert json.loads((tmp_path / "one" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    said(folders[0], tmp_path / "other", "--quantization", "nf4", "--dtype", "bf16")
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "other"))
    assert one == other


def test_several_with_weights(tiny_world: World, tmp_path: Path, folders: list[Path], said: Callable[..., str]) -> None:
    told = said(*folders, tmp_path / "sum", "--weights", "0.7,-0.3")
    assert told.startswith(f"{folders[0]}, {folders[1]} (linear, weights 0.7 and -0.3) merged into")
    told = said(*folders, tmp_path / "ties", "--method", "ties", "--density", "0.2", "--majority", "frequency")
    assert "(ties, weights 1 and 1, density 0.2)" in told
    assert not torch.equal(logits(load(tmp_path / "sum")), logits(load(tmp_path / "ties")))
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        said(*folders, tmp_path / name, "--method", "dare-linear", "--density", "0.5", "--seed", seed)
    dare = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert dare[0] == dare[1] != dare[2]


def test_one_adapter_of_several(
    tiny_world: World, tmp_path: Path, folders: list[Path], said: Callable[..., str]
) -> None:
    told = said(*folders, tmp_path / "cat", "--as-adapter")
    assert told == (
        f"{folders[0]}, {folders[1]} (cat, weights 1 and 1) in one adapter\n"
        f"adapter in {tmp_path / 'cat'}: try `danlu chat {tmp_path / 'cat'}` or "
        f"`danlu merge {tmp_path / 'cat'} MODEL_FOLDER`\n"
    )
    expected = adapted_logits(tiny_world.base, *folders)
    torch.testing.assert_close(adapted_logits(tiny_world.base, tmp_path / "cat"), expected, rtol=1e-5, atol=1e-5)
    told = said(*folders, tmp_path / "linear", "--as-adapter", "--method", "linear")
    assert "it differs from the combined changes by" in told and "has no such error, nor has --method cat" in told
    told = said(*folders, tmp_path / "ties", "--as-adapter", "--method", "ties", "--density", "0.5", "--rank", "3")
    assert "it differs from the combined changes by" in told and told.count("has no such error\n") == 1
    assert json.loads((tmp_path / "ties" / "adapter_config.json").read_text())["r"] == 3


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["{0}"], 2, "error: Missing argument: danlu merge RUN_OR_ADAPTER... OUT. See `danlu merge --help`"),
        (["{0}", "out", "--dtype", "int8"], 2, "error: --dtype: 'int8' is unknown; use auto, fp32, bf16, fp16\n"),
        (
            ["{0}", "out", "--method", "sum"],
            2,
            "--method: 'sum' is unknown; use linear, cat, ties, dare-linear, dare-t",
        ),
        (["{0}", "out", "--method", "ties"], 2, "error: --density: --method ties needs one, the share of each change"),
        (["{0}", "out", "--density", "0.5"], 2, "error: --density: --method linear keeps all\n"),
        (["{0}", "out", "--method", "ties", "--density", "0"], 2, "--density: 0.0 is out of range; it must be above 0"),
        (["{0}", "{1}", "out", "--weights", "1"], 2, "error: --weights: 1 are given for 2 adapters\n"),
        (["{0}", "out", "--weights", "a"], 2, "error: --weights: 'a' are no numbers; give one for each adapter"),
        (["{0}", "out", "--weights", "nan"], 2, "error: --weights: 'nan' are not all finite\n"),
        (["{0}", "out", "--majority", "most"], 2, "error: --majority: 'most' is unknown; use total, frequency\n"),
        (
            ["{0}", "out", "--quantization", "int1"],
            2,
            "error: --quantization: 'int1' is unknown; use nf4, fp4, int8, int",
        ),
        (["{0}", "out", "--as-adapter"], 2, "error: --as-adapter makes one adapter of several, without a base"),
        (["{0}", "{1}", "out", "--as-adapter", "--force"], 2, "error: --as-adapter makes one adapter of several"),
        (["{0}", "{1}", "out", "--as-adapter", "--into", "nowhere"], 4, "error: nowhere: no such folder"),
        (["nowhere", "out"], 4, "error: nowhere: no such folder; an adapter is a folder with adapter_config.json"),
        (["{0}", "out", "--into", "nowhere"], 4, "error: nowhere: no such folder"),
    ],
)
def test_misuse(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[..., str],
    arguments: list[str], code: int, message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert message in said(*(one.format(*folders) for one in arguments), code=code)
    assert list(tmp_path.iterdir()) == []


def test_mistakes_are_told_before_torch_is_imported() -> None:
    script = (
        "import sys; from danlu.cli.main import main\n"
        "assert main(['merge', 'a', 'b', '--density', '3']) == 2\n"
        "assert main(['quantize', 'nowhere/a', 'b']) == 4\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], env={"PYTHONPATH": ":".join(sys.path)}, check=False)
    assert done.returncode == 0
