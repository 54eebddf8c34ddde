"""`danlu generate` on a real model and on one that always says the same; what verbs say of folders they cannot use."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.adapter_folders import adapter_folder, of_another_tool
from builders.served import Loaded, serving
from builders.tiny_world import World, start, write_rows
from safetensors.torch import load_file, save_file

from danlu.cli.main import main
from danlu.inference.embedded import EmbeddedEngine
from danlu.recipe import sections

GREEDY = ["--temperature", "0"]

pytestmark = pytest.mark.end_to_end


def edit_json(file: Path, **changes: Any) -> None:
    """Sets keys of a JSON object; None takes one away."""
    values = json.loads(file.read_text(encoding="utf-8"))
    values.update(changes)
    file.write_text(json.dumps({name: value for name, value in values.items() if value is not None}), encoding="utf-8")


def reference_text(shared_data: Path) -> str:
    """The greedy sample that was published with the weights."""
    page = (shared_data / "weights" / "stories260K-llama2c" / "reference_sample.md").read_text(encoding="utf-8")
    return page.split("-t 0.0\n", 1)[1].split("\n```", 1)[0]


# -- what is said -----------------------------------------------------------------------------------------------------


def test_greedy_sample_is_the_published_one(stories, shared_data, capsys):
    assert main(["generate", str(stories), "--prompt", "", *GREEDY, "--max-new-tokens", "256"]) == 0
    out = capsys.readouterr()
    assert out.out == reference_text(shared_data) + "\n"
    assert out.err == ""


def test_json_agrees_with_text_and_transformers(stories, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    arguments = ["generate", str(stories), "--prompt", "Lily and Tom", *GREEDY, "--max-new-tokens", "40"]
    assert main(arguments) == 0
    plain = capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert list(row) == ["prompt", "sample", "text", "tokens", "logprobs", "finish"]
    assert row["text"] + "\n" == plain and row["finish"] == "length" and len(row["logprobs"]) == 40
    tokenizer, oracle = AutoTokenizer.from_pretrained(stories), AutoModelForCausalLM.from_pretrained(stories)
    inputs = tokenizer("Lily and Tom", return_tensors="pt")
    out = oracle.generate(**inputs, do_sample=False, max_new_tokens=40)[0]
    assert row["tokens"] == out[inputs.input_ids.shape[1] :].tolist()
    assert "Lily and Tom" + row["text"] == tokenizer.decode(out, skip_special_tokens=True)
    logprobs = oracle(out[None]).logits[0].log_softmax(-1)
    expected = [logprobs[-41 + i, token].item() for i, token in enumerate(row["tokens"])]
    assert row["logprobs"] == pytest.approx(expected, abs=1e-4)


def test_seed_decides_and_stop_cuts(stories, capsys):
    def run(*more):
        assert main(["generate", str(stories), "--prompt", "The dog", "--max-new-tokens", "30", *more]) == 0
        return capsys.readouterr().out

    assert run("--seed", "1") == run("--seed", "1") != run("--seed", "2")
    whole = run(*GREEDY)
    cut = run(*GREEDY, "--stop", "never there", "--stop", ".")
    assert cut == whole[: whole.index(".")] + "\n" != whole
    assert run(*GREEDY, "--repetition-penalty", "1.8") != whole


def test_prompt_from_file_and_stdin(stories, tmp_path, capsys, piped):
    file = tmp_path / "prompt.txt"
    file.write_text("The dog", encoding="utf-8")
    outs = []
    for source in (["--prompt", "The dog"], ["--file", str(file)], ["--file", "-"]):
        piped("The dog")
        assert main(["generate", str(stories), *source, *GREEDY, "--max-new-tokens", "12"]) == 0
        outs.append(capsys.readouterr().out)
    assert outs[0] == outs[1] == outs[2]


def test_chat_flag_uses_the_template(stories, capsys):
    assert main(["generate", str(stories), "--prompt", "Hi", *GREEDY, "--max-new-tokens", "8", "--chat", "--json"]) == 0
    chat = json.loads(capsys.readouterr().out)
    assert main(["generate", str(stories), "--prompt", "Hi", *GREEDY, "--max-new-tokens", "8", "--json"]) == 0
    assert chat["tokens"] != json.loads(capsys.readouterr().out)["tokens"]


def test_end_of_text_of_the_generation_config_stops(copied, capsys):
    arguments = ["generate", str(copied), "--prompt", "Lily", *GREEDY, "--max-new-tokens", "20", "--json"]
    assert main(arguments) == 0
    tokens = json.loads(capsys.readouterr().out)["tokens"]
    edit_json(copied / "generation_config.json", eos_token_id=[2, tokens[3]])
    assert main(arguments) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["tokens"] == tokens[: tokens.index(tokens[3]) + 1] and row["finish"] == "stop"


def test_makers_sampling_is_the_default_and_flags_win(copied, capsys):
    def run(*more):
        arguments = ["generate", str(copied), "--prompt", "Lily", "--max-new-tokens", "25", *more]
        assert main(arguments) == 0
        return capsys.readouterr().out

    greedy, own = run(*GREEDY), run()
    assert own == run("--temperature", "0.8", "--top-p", "0.95") != greedy
    edit_json(copied / "generation_config.json", do_sample=True, temperature=1.0, top_k=1)
    assert run() == greedy
    assert run("--top-k", "0", "--temperature", "2.0") != greedy
    edit_json(copied / "generation_config.json", do_sample=False, top_k=1)
    assert run() == own


# -- how it comes out -------------------------------------------------------------------------------------------------


class Recorder(io.StringIO):
    """Keeps what each write brings."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return super().write(text)


def test_characters_of_several_tokens_come_whole_and_as_soon_as_they_are(chanting, monkeypatch):
    monkeypatch.setattr("sys.stdout", Recorder())
    assert main(["generate", str(chanting), "--prompt", "x"]) == 0
    assert isinstance(sys.stdout, Recorder)
    assert [piece for piece in sys.stdout.pieces if piece] == ["丹", "炉", "é", "🎈", "\n"]


def test_a_cut_within_a_character_shows_as_one(chanting, capsys):
    assert main(["generate", str(chanting), "--prompt", "x", "--max-new-tokens", "5"]) == 0
    assert capsys.readouterr().out == "丹\ufffd\n"


@pytest.mark.parametrize(("stop", "left"), [("é", "丹炉"), ("炉é", "丹"), ("丹", ""), ("<|im_end|>", "丹炉é🎈")])
def test_stop_strings_are_never_shown(chanting, capsys, stop, left):
    assert main(["generate", str(chanting), "--prompt", "x", "--stop", stop]) == 0
    assert capsys.readouterr().out == f"{left}\n"


def test_a_terminal_that_has_no_such_characters(chanting, monkeypatch):
    out = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(out, encoding="ascii"))
    assert main(["generate", str(chanting), "--prompt", "x"]) == 0
    sys.stdout.flush()
    assert out.getvalue() == b"\\u4e39\\u7089\\xe9\\U0001f388\n"


def test_interrupt_ends_the_line_and_the_program(endless, tmp_path):
    output = tmp_path / "out"
    child = start(["generate", endless, "--prompt", "x", "--max-new-tokens", 1_000_000], output)
    while not (output.is_file() and output.stat().st_size > 100):
        assert child.is_alive(), output.read_text()
        time.sleep(0.01)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGINT)
    child.join()
    assert child.exitcode == 128 + signal.SIGINT
    said, _, last = output.read_text(encoding="utf-8").removesuffix("\n").rpartition("\n")
    assert last == "interrupted"
    assert said == ("丹炉é🎈" * len(said))[: len(said)] != ""


def test_a_reader_that_has_seen_enough(endless):
    """`danlu generate ... | head -c 50`."""
    command = [sys.executable, "-m", "danlu", "generate", str(endless), "--prompt", "x", "--max-new-tokens", "1000000"]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stderr is not None
        seen = child.stdout.read(50)
        child.stdout.close()
        assert child.stderr.read().decode() == f"reading {endless}\n"
    assert child.returncode == 128 + signal.SIGPIPE
    assert seen == ("丹炉é🎈" * 5).encode()[:50]


def environment() -> dict[str, str]:
    """For a Python of its own that finds what this one finds."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


# -- what cannot be done ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "error: give the text to continue with either --prompt TEXT or --file FILE (--file - reads stdin)\n"),
        (["--prompt", "a", "--file", "b"], 2, "error: give the text to continue with either --prompt TEXT or --file"),
        (["--file", "/no/such"], 3, "error: /no/such: cannot be read: No such file or directory\n"),
        (
            ["--prompt", "a", "--temperature", "-1", "--top-p", "2", "--dtype", "int3", "--stop", ""],
            2,
            "error: --temperature: -1.0 is out of range; it must be 0 (greedy) or a number of at least 1e-06\n"
            "error: --top-p: 2.0 is out of range; it must be above 0 and at most 1 (1 keeps every token)\n"
            "error: --dtype: 'int3' is unknown; use auto, fp32, bf16, fp16\n"
            "error: --stop: an empty text would stop before the first token\n",
        ),
        (
            ["--prompt", "a", "--repetition-penalty", "0", "--min-p", "1.5", "--top-k", "-1", "--device", "tpu"],
            2,
            "error: --top-k: -1 is out of range; it must be 0 (keep every token) or more\n"
            "error: --min-p: 1.5 is out of range; it must be between 0 (keep every token) and 1\n"
            "error: --repetition-penalty: 0.0 is out of range; it must be between 1e-06 and 1e+06 (1 changes nothing)\n"
            "error: --device: 'tpu' is unknown; use auto, cpu, cuda\n",
        ),
        (["--prompt", "a", "--max-new-tokens", "0"], 2, "Invalid value for '--max-new-tokens': "),
        (["--prompt", "a\udcff"], 3, "error: --prompt: not UTF-8 text (character 1); convert it first\n"),
        (
            ["--prompt", "very long " * 600],
            3,
            "tokens, but the model sees 512 tokens at most (max_position_embeddings)",
        ),
    ],
)
def test_misuse_of_generate(chanting, capsys, arguments, code, message):
    assert main(["generate", str(chanting), *arguments]) == code
    out = capsys.readouterr()
    assert message in out.err and "Traceback" not in out.err
    assert out.out == ""


def test_files_that_are_no_prompts(chanting, tmp_path, capsys, piped):
    (tmp_path / "latin").write_bytes("é".encode("latin-1"))
    assert main(["generate", str(chanting), "--file", str(tmp_path / "latin")]) == 3
    assert "latin: not UTF-8 text (byte 0); convert it first" in capsys.readouterr().err
    piped(b"ab\xff")
    assert main(["generate", str(chanting), "--file", "-"]) == 3
    assert "error: -: not UTF-8 text (byte 2); convert it first" in capsys.readouterr().err
    (tmp_path / "empty").touch()
    for source in (["--file", str(tmp_path / "empty")], ["--prompt", ""]):
        assert main(["generate", str(chanting), *source]) == 3
        err = capsys.readouterr().err
        assert "the prompt is empty, and this tokenizer has no beginning-of-text token" in err
        assert "give at least one character" in err


def test_makers_advice_that_makes_no_sense(chanting, tmp_path, capsys):
    folder = Path(shutil.copytree(chanting, tmp_path / "copy"))
    arguments = ["generate", str(folder), "--prompt", "x"]
    edit_json(folder / "generation_config.json", do_sample=True, top_p="0.9")
    assert main(arguments) == 4
    assert "generation_config.json: top_p: expected a number, found '0.9'" in capsys.readouterr().err
    edit_json(folder / "generation_config.json", top_p=1.5)
    assert main(arguments) == 4
    assert "generation_config.json: top_p: 1.5 is out of range" in capsys.readouterr().err
    edit_json(folder / "generation_config.json", top_p=0.9, eos_token_id="2")
    assert main(arguments) == 4
    assert "generation_config.json: eos_token_id: expected an integer or a list of them, found '2'" in (
        capsys.readouterr().err
    )


def spoil_weights(folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = change(tensors["model.norm.weight"])
    save_file(tensors, folder / "model.safetensors")


def cut_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def no_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink()


def unfinished_run(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "recipe.yaml").write_text("stage: sft\n", encoding="utf-8")


def emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def as_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.touch()


UNUSABLE: dict[str, tuple[Callable[[Path], Any], int, str]] = {
    "absent": (shutil.rmtree, 4, "{folder}: no such folder"),
    "empty": (emptied, 4, "{folder}: neither a model folder (config.json is missing) nor a finished run"),
    "file": (as_file, 4, "{folder}: a model is a folder with config.json and safetensors weights, this is a file"),
    "run": (unfinished_run, 4, "{folder}: this run has not written its model yet (no model/ folder). Finish it with "),
    "config": (lambda f: (f / "config.json").write_text("{"), 4, "config.json:1:2: broken JSON: "),
    "architecture": (
        lambda f: edit_json(f / "config.json", model_type="gptj"),
        4,
        "model_type 'gptj' is not supported; supported: cohere2, deepseek_v2, deepseek_v3, ",
    ),
    "tokenizer": (
        no_tokenizer,
        3,
        "{folder}: this model folder has no tokenizer, so no text can be given to the model",
    ),
    "broken tokenizer": (
        lambda f: (f / "tokenizer.json").write_text("{"),
        3,
        "{folder}: the tokenizer cannot be read: ",
    ),
    "vocabulary": (
        lambda f: edit_json(f / "config.json", vocab_size=200),
        4,
        "the tokenizer has 259 tokens, the model embeds only 200",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), 4, "{folder}: no weights: neither model.safetensors"),
    "cut weights": (cut_weights, 4, "model.safetensors"),
    "shape": (
        lambda f: spoil_weights(f, lambda norm: norm[1:]),
        4,
        "model.norm.weight in model.safetensors: expected shape [260], found [259]",
    ),
    "nan": (
        lambda f: spoil_weights(f, lambda norm: norm * torch.nan),
        4,
        "tensor model.norm.weight holds NaN or infinity; the weights are spoilt",
    ),
}


@pytest.mark.usefixtures("tokenising_here")
@pytest.mark.parametrize("verb", ["generate", "chat", "eval"])
@pytest.mark.parametrize("what", UNUSABLE)
def test_folders_that_are_no_models(chanting, tmp_path, capsys, piped, verb, what):
    spoil, code, message = UNUSABLE[what]
    if (what, verb) == ("vocabulary", "eval"):  # which looks at the weights' headers before it tokenises
        message = "lm_head.weight in model.safetensors: expected shape [200, 260], found [259, 260]"
    folder = Path(shutil.copytree(chanting, tmp_path / "copy"))
    spoil(folder)
    piped("Hello\n")
    (tmp_path / "text.txt").write_text("Some text.", encoding="utf-8")
    more = {
        "generate": ["--prompt", "a"],
        "chat": [],
        "eval": ["--data", str(tmp_path / "text.txt"), f"data.cache={tmp_path / 'cache'}"],
    }
    assert main([verb, str(folder), *more[verb]]) == code
    out = capsys.readouterr()
    assert out.out == ""
    assert out.err.startswith("error: ") and "Traceback" not in out.err
    assert message.format(folder=folder) in out.err


def test_mistakes_are_told_before_torch_is_imported(tmp_path):
    """And decoding does without torch's compiler: both are seconds that a user waits for."""
    script = (
        "import sys; from danlu.cli.main import main\n"
        f"assert main(['generate', {str(tmp_path / 'none')!r}, '--prompt', 'a']) == 4\n"
        f"assert main(['eval', {str(tmp_path)!r}, '--data', 'a']) == 4\n"
        f"assert main(['chat', {str(tmp_path)!r}, '--top-p', '3']) == 2\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "import torch; before = set(sys.modules)\n"
        "import danlu.inference.chat, danlu.inference.load_model\n"
        "brought = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "assert not brought & {'transformers', 'sympy', 'datasets', 'pandas', 'pydantic'}, brought\n"
        "assert 'torch._dynamo' in before or 'torch._dynamo' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_finished_run_is_a_model(stories, tmp_path, capsys):
    shutil.copytree(stories, tmp_path / "run" / "model")
    (tmp_path / "run" / "recipe.yaml").write_text("stage: sft\n", encoding="utf-8")
    assert main(["generate", str(tmp_path / "run"), "--prompt", "Lily", *GREEDY, "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out


# -- adapters and few bits --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "sft" / "adapter"
    return adapter_folder(tiny_world.base, folder, sections.Lora(), size=0.5)


def greedy(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    words = [str(one) for one in arguments]
    assert main(["generate", *words, "--prompt", "Tom", *GREEDY, "--max-new-tokens", "8", "--json"]) == 0
    row: dict[str, Any] = json.loads(capsys.readouterr().out)
    return row


def test_an_adapter_answers_as_the_model_it_makes(tiny_world, adapter, tmp_path, capsys):
    assert main(["merge", str(adapter), str(tmp_path / "merged")]) == 0
    expected, plain = greedy(capsys, tmp_path / "merged"), greedy(capsys, tiny_world.base)
    for named in (adapter, adapter.parent):
        row = greedy(capsys, named)
        assert row["tokens"] == expected["tokens"] != plain["tokens"]
        assert row["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-4)


@pytest.mark.parametrize("section", [sections.Lora(), sections.Prompt(tokens=4)], ids=["lora", "prompt"])
def test_an_adapter_on_a_base_answers_as_when_it_is_served(tiny_world, tmp_path, capsys, section):
    folder = of_another_tool(adapter_folder(tiny_world.base, tmp_path / "poet", section, size=0.5))
    generated = greedy(capsys, tiny_world.base, "--adapter", folder)
    assert generated == greedy(capsys, folder, "--base", tiny_world.base)
    loaded = Loaded.of(tiny_world.base, [folder])
    with serving(loaded.served, loaded.engine()) as served:
        answers = {
            name: served.client().completions.create(
                model=name, prompt="Tom", temperature=0, max_tokens=8, logprobs=0, extra_body={"return_token_ids": True}
            )
            for name in loaded.served.names
        }
    (by_adapter,), (by_base,) = answers["poet"].choices, answers[loaded.served.names[0]].choices
    assert generated["tokens"] == by_adapter.token_ids
    assert generated["logprobs"] == pytest.approx(by_adapter.logprobs.token_logprobs, abs=1e-4)
    assert generated["logprobs"] != pytest.approx(by_base.logprobs.token_logprobs, abs=1e-3)


def test_an_answer_is_by_one_adapter(tiny_world, adapter, tmp_path, capsys):
    other = adapter_folder(tiny_world.base, tmp_path / "other", sections.Lora())
    for arguments in ([adapter, "--adapter", other], [tiny_world.base, "--adapter", adapter, "--adapter", other]):
        assert main(["generate", *map(str, arguments), "--prompt", "a"]) == 2
        said = capsys.readouterr().err
        assert "error: --adapter: generate answers with one adapter, and there are 2, MODEL counted where it is" in said
        assert "one: adapter, other. danlu chat" in said


def test_few_bits_on_disk_and_while_loading_are_the_same(tiny_world, adapter, tmp_path, capsys):
    assert main(["quantize", str(tiny_world.base), str(tmp_path / "nf4")]) == 0
    for one, other in (
        ([tmp_path / "nf4"], [tiny_world.base, "--quantization", "nf4"]),
        ([adapter, "--base", tmp_path / "nf4"], [adapter, "--quantization", "nf4"]),
    ):
        stored, made = greedy(capsys, *one), greedy(capsys, *other)
        assert stored == made
        assert made["logprobs"] != pytest.approx(greedy(capsys, other[0])["logprobs"], abs=1e-4)


def test_soft_prompts_come_before_the_prompt(tiny_world, tmp_path, capsys):
    folder = adapter_folder(tiny_world.base, tmp_path / "soft", sections.Prompt(tokens=100), size=0.5)
    assert greedy(capsys, folder)["logprobs"] != pytest.approx(greedy(capsys, tiny_world.base)["logprobs"], abs=1e-3)
    assert main(["generate", str(folder), "--prompt", "a b " * 20]) == 3
    assert "and the adapter 100, but the model sees 128 tokens at most" in capsys.readouterr().err


@pytest.mark.usefixtures("tokenising_here")
@pytest.mark.parametrize("verb", ["generate", "chat", "eval"])
def test_adapters_that_cannot_be_used(tiny_world, adapter, chanting, tmp_path, capsys, piped, verb):
    piped("Hello\n")
    (tmp_path / "text.txt").write_text("Some text.", encoding="utf-8")
    more = {
        "generate": ["--prompt", "a"],
        "chat": [],
        "eval": ["--data", str(tmp_path / "text.txt"), f"data.cache={tmp_path / 'cache'}"],
    }
    copy = Path(shutil.copytree(adapter, tmp_path / "copy"))
    edit_json(copy / "adapter_config.json", base_model_name_or_path=str(tmp_path / "gone"))
    other = Path(shutil.copytree(adapter, tmp_path / "other"))
    edit_json(other / "adapter_config.json", peft_type="POLY")
    odd, bits = (Path(shutil.copytree(adapter, tmp_path / name)) for name in ("odd", "bits"))
    edit_json(odd / "danlu.json", quantization={"kind": "nf3"})
    edit_json(bits / "danlu.json", quantization={"kind": "nf4", "block": "x"})
    torn = Path(shutil.copytree(adapter, tmp_path / "torn"))
    (torn / "adapter_model.safetensors").write_bytes(b"torn")
    for arguments, code, message in (
        ([copy], 4, f"{copy}: the model it was trained on cannot be had. {tmp_path / 'gone'}: no such folder"),
        ([copy], 4, "Say where it is with --base FOLDER"),
        ([adapter, "--base", chanting], 4, "was trained on another base"),
        ([tiny_world.base, "--base", chanting], 2, "--base: "),
        ([other], 4, "peft_type 'POLY' is not supported"),
        (
            [odd],
            4,
            f"{odd / 'danlu.json'}: quantization is of the unknown kind 'nf3'; danlu knows nf4, fp4, int8, int4",
        ),
        ([bits], 4, f"{bits / 'danlu.json'}: quantization.block: Input should be"),
        ([torn], 4, "adapter_model.safetensors: cannot be read"),
        ([tiny_world.base, "--quantization", "nf3"], 2, "--quantization: 'nf3' is unknown; use nf4, fp4, int8, int4"),
    ):
        assert main([verb, *map(str, arguments), *more[verb]]) == code, arguments
        out = capsys.readouterr()
        assert out.out == "" and message in out.err and "Traceback" not in out.err
    assert greedy(capsys, copy, "--base", tiny_world.base) == greedy(capsys, adapter)


# -- files of prompts -------------------------------------------------------------------------------------------------


def answers(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    assert main(["generate", *map(str, arguments), "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def by_place(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["row"], row["sample"]))


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    rows = [{"prompt": "Lily and Tom", "id": 5}, {"messages": [{"role": "user", "content": "Hi"}]}, {"prompt": "The"}]
    return write_rows(tmp_path / "questions.jsonl", rows)


def test_each_row_has_a_line_for_each_of_its_samples(stories, questions, capsys):
    sampled = ["--temperature", "1", "--seed", "3", "--max-new-tokens", "12", "--samples", "3"]
    found = by_place(answers(capsys, stories, "--file", questions, *sampled))
    assert [(row["row"], row["sample"]) for row in found] == [(row, sample) for row in range(3) for sample in range(3)]
    assert list(found[0]) == ["row", "prompt", "sample", "text", "tokens", "logprobs", "finish"]
    assert found[0]["prompt"] == "Lily and Tom" and found[3]["messages"] == [{"role": "user", "content": "Hi"}]
    assert len({tuple(row["tokens"]) for row in found}) == 9
    assert all(len(row["tokens"]) == len(row["logprobs"]) for row in found)
    # Row 0 alone, as a prompt on the command line, draws the same.
    alone = answers(capsys, stories, "--prompt", "Lily and Tom", *sampled)
    assert [row["tokens"] for row in alone] == [row["tokens"] for row in found[:3]] and "row" not in alone[0]
    other = answers(capsys, stories, "--prompt", "Lily and Tom", *sampled, "--seed", "4")
    assert [row["tokens"] for row in other] != [row["tokens"] for row in alone]


def test_rows_are_answered_as_prompts_are(stories, questions, capsys):
    greedy_flags = [*GREEDY, "--max-new-tokens", "10"]
    found = by_place(answers(capsys, stories, "--file", questions, *greedy_flags))
    for row, more in ((0, ["--prompt", "Lily and Tom"]), (1, ["--prompt", "Hi", "--chat"]), (2, ["--prompt", "The"])):
        (alone,) = answers(capsys, stories, *more, *greedy_flags)
        assert found[row]["tokens"] == alone["tokens"]
        assert found[row]["logprobs"] == pytest.approx(alone["logprobs"], abs=1e-4)
    assert found[0]["tokens"] != found[2]["tokens"]  # control


def test_answers_are_written_as_soon_as_they_are_complete(stories, tmp_path, capsys):
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "Lily" + " and Tom" * 10}, {"prompt": "."}])
    flags = [*GREEDY, "--max-new-tokens", "30"]
    whole = by_place(answers(capsys, stories, "--file", rows, *flags))
    stop = whole[1]["text"][:8]
    assert stop not in whole[0]["text"]
    assert [row["row"] for row in answers(capsys, stories, "--file", rows, *flags, "--stop", stop)] == [1, 0]


def test_interrupted_answers_that_are_complete_stay(stories, tmp_path, capsys, monkeypatch):
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "Lily and Tom"}, {"prompt": "The"}])
    flags = [*GREEDY, "--max-new-tokens", "30"]
    whole = by_place(answers(capsys, stories, "--file", rows, *flags))
    stop, step, completed = whole[1]["text"][:8], EmbeddedEngine.step, []

    def interrupted(engine: EmbeddedEngine) -> Any:
        if completed:
            raise KeyboardInterrupt
        completed.extend(done := step(engine))
        return done

    monkeypatch.setattr(EmbeddedEngine, "step", interrupted)
    assert main(["generate", str(stories), "--file", str(rows), *flags, "--stop", stop, "--json"]) == 130
    out = capsys.readouterr()
    assert [json.loads(line)["row"] for line in out.out.splitlines()] == [1] and out.err == "interrupted\n"


def test_other_files_are_one_prompt(stories, tmp_path, capsys):
    text = tmp_path / "rows.txt"
    text.write_text('{"prompt": "a"}\n', encoding="utf-8")
    (row,) = answers(capsys, stories, "--file", text, *GREEDY, "--max-new-tokens", "2")
    assert row["prompt"] == '{"prompt": "a"}\n' and "row" not in row


@pytest.mark.parametrize(
    ("rows", "more", "code", "message"),
    [
        ([{"prompt": "a"}], ["--text"], 2, "error: several answers are lines of JSON: add --json\n"),
        ([{"prompt": "a"}, {"promt": "b"}], [], 3, "rows.jsonl:2:2: no 'prompt' and no 'messages', one of which a row"),
        ([{"prompt": "a"}, '{"prompt": "b"'], [], 3, "error: rows.jsonl:2:15: broken JSON: "),
        ([{"prompt": "a"}, {"prompt": ""}], [], 3, "error: rows.jsonl:2: "),
        ([{"messages": [{"role": "usr", "content": "b"}]}], [], 3, "rows.jsonl:1 message 1: unknown role 'usr'. Known"),
        ([{"prompt": "very long " * 600}], [], 3, "error: rows.jsonl:1: the prompt has "),
        ([{"prompt": "a"}], ["--draft", "no-such"], 4, "error: no-such: no such folder"),
        ([{"prompt": "a"}], ["--cache-gib", "0"], 2, "error: --cache-gib: 0 is out of range; it must be above 0\n"),
        (
            [{"prompt": "a"}],
            ["--cache-gib", "0.0005"],
            6,
            "error: prompt 0: 1 tokens with an answer of up to 600 need ",
        ),
    ],
)
def test_rows_that_cannot_be_answered(chanting, tmp_path, capsys, monkeypatch, rows, more, code, message):
    """All of them are told before the model's weights are read, but for what the cache cannot hold."""
    file = write_rows(tmp_path / "rows.jsonl", rows)
    arguments = ["generate", str(chanting), "--file", str(file), "--max-new-tokens", "600"]
    if code != 6:
        monkeypatch.setattr(
            "danlu.inference.load_model.load", lambda *args, **options: pytest.fail("weights were read")
        )
    assert (
        main([*arguments, *(flag for flag in more if flag != "--text"), *([] if "--text" in more else ["--json"])])
        == code
    )
    out = capsys.readouterr()
    assert message in out.err and "Traceback" not in out.err and out.out == ""


def test_a_draft_changes_no_greedy_answer(stories, chanting, capsys):
    flags = ["--prompt", "Lily and Tom", *GREEDY, "--max-new-tokens", "40"]
    (plain,) = answers(capsys, stories, *flags)
    for draft in ("ngram", stories):
        (row,) = answers(capsys, stories, *flags, "--draft", draft)
        assert row["tokens"] == plain["tokens"] and row["logprobs"] == pytest.approx(plain["logprobs"], abs=1e-4)
    assert main(["generate", str(stories), *flags, "--draft", str(chanting)]) == 4
    assert f"--draft: {chanting} has a vocabulary of 259 tokens, and {stories} one of 512" in capsys.readouterr().err
