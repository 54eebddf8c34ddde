"""`danlu generate` and `danlu chat` on a real model folder, in this process; and their messages on a random one."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest

from danlu.cli import chat as chat_verb
from danlu.cli.main import main

GREEDY = ["--temperature", "0"]


@pytest.fixture(scope="session")
def stories(shared_data: Path) -> Path:
    """A real model of 260k parameters that tells stories."""
    return shared_data / "weights" / "stories260K-hf"


@pytest.fixture
def copied(stories: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(stories, tmp_path / "copy"))


@pytest.fixture
def piped(monkeypatch):
    """Gives text to stdin, as a pipe does."""
    return lambda text: monkeypatch.setattr("sys.stdin", io.StringIO(text))


def edit_json(file: Path, **changes) -> None:
    values = json.loads(file.read_text(encoding="utf-8"))
    values.update(changes)
    file.write_text(json.dumps({name: value for name, value in values.items() if value is not None}), encoding="utf-8")


def reference_text(shared_data: Path) -> str:
    """The greedy sample that was published with the weights."""
    page = (shared_data / "weights" / "stories260K-llama2c" / "reference_sample.md").read_text(encoding="utf-8")
    return page.split("-t 0.0\n", 1)[1].split("\n```", 1)[0]


# -- generate ---------------------------------------------------------------------------------------------------------


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
    assert list(row) == ["prompt", "text", "tokens", "finish", "logprobs"]
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


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "error: give the text to continue with either --prompt TEXT or --file FILE (--file - reads stdin)\n"),
        (["--prompt", "a", "--file", "b"], 2, "error: give the text to continue with either --prompt TEXT or --file"),
        (["--file", "/no/such"], 3, "error: /no/such: cannot be read: No such file or directory\n"),
        (
            ["--prompt", "a", "--temperature", "-1", "--top-p", "2", "--dtype", "int3", "--stop", ""],
            2,
            "error: --temperature: -1.0 is out of range; it must be 0 (greedy) or a positive number\n"
            "error: --top-p: 2.0 is out of range; it must be above 0 and at most 1 (1 keeps every token)\n"
            "error: --dtype: 'int3' is unknown; use auto, fp32, bf16, fp16\n"
            "error: --stop: an empty text would stop before the first token\n",
        ),
        (
            ["--prompt", "very long " * 600],
            3,
            "tokens, but the model sees 512 tokens at most (max_position_embeddings)",
        ),
    ],
)
def test_misuse_of_generate(stories, capsys, arguments, code, message):
    assert main(["generate", str(stories), *arguments]) == code
    out = capsys.readouterr()
    assert message in out.err and "Traceback" not in out.err
    assert out.out == ""


def test_a_run_without_its_model_says_what_to_do(tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text("stage: sft\n", encoding="utf-8")
    assert main(["generate", str(tmp_path), "--prompt", "a"]) == 4
    err = capsys.readouterr().err
    assert "this run has not written its model yet" in err and f"`danlu train {tmp_path}/recipe.yaml`" in err


def test_a_finished_run_is_a_model(stories, tmp_path, capsys):
    shutil.copytree(stories, tmp_path / "run" / "model")
    (tmp_path / "run" / "recipe.yaml").write_text("stage: sft\n", encoding="utf-8")
    assert main(["generate", str(tmp_path / "run"), "--prompt", "Lily", *GREEDY, "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out


# -- chat -------------------------------------------------------------------------------------------------------------


def test_piped_lines_are_turns_and_answers_alone_come_out(stories, capsys, piped):
    flags = ["chat", str(stories), *GREEDY, "--max-new-tokens", "10"]
    piped("Hello\n\nTell me a story\n")
    assert main(flags) == 0
    both = capsys.readouterr()
    piped("Hello\n/exit\nnever asked\n")
    assert main(flags) == 0
    first = capsys.readouterr().out
    assert first and both.out.startswith(first) and len(both.out) > len(first)
    assert both.err == "(cut: --max-new-tokens)\n" * 2
    piped("/unknown word\n")  # a pipe may mean it
    assert main(flags) == 0
    assert capsys.readouterr().out


def test_commands(stories, capsys, piped):
    flags = ["chat", str(stories), *GREEDY, "--max-new-tokens", "10", "--system", "Be kind"]

    def answers(text):
        piped(text)
        assert main(flags) == 0
        return capsys.readouterr()

    once = answers("Hello\n").out
    assert answers("Hello\n/undo\nHello\n").out == once * 2
    assert answers("Hello\nAnd?\n/reset\nHello\n").out.endswith(once)
    assert "nothing to take back" in answers("/undo\n").err
    assert "/system" in answers("/help\n").err
    flags = flags[:-2]
    plain = answers("Hello\n").out
    assert answers("/system Be kind\nHello\n").out == once != plain


def test_terminal_session(stories, capsys, monkeypatch):
    """At a terminal: mistakes and interrupts end nothing."""
    typed = iter(["/rest", "Hello", KeyboardInterrupt, "long " * 600, "Hello", EOFError])
    asked = []

    def read(prompt):
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    real = chat_verb.answer

    def answer(conversation, turn):
        asked.append(turn)
        if len(asked) == 1:
            raise KeyboardInterrupt
        real(conversation, turn)

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(chat_verb, "answer", answer)
    assert main(["chat", str(stories), *GREEDY, "--max-new-tokens", "4"]) == 0
    out = capsys.readouterr()
    assert "/rest: no such command; there are /reset, /system, /undo, /exit, /help" in out.err
    assert "(interrupted; what was said so far is kept)" in out.err
    assert "(Ctrl-D or /exit leaves)" in out.err
    assert "and the model sees 512 at most" in out.err and "/undo takes the last turn back" in out.err
    assert asked[0] == asked[2] == "Hello" and len(asked) == 3 and out.out.strip()


def test_full_context_ends_a_pipe_with_an_error(stories, capsys, piped):
    piped("long " * 600 + "\n")
    assert main(["chat", str(stories)]) == 3
    assert "the conversation now takes" in capsys.readouterr().err


def test_no_chat_template(copied, capsys, piped, tmp_path):
    edit_json(copied / "tokenizer_config.json", chat_template=None)
    (copied / "chat_template.jinja").unlink(missing_ok=True)
    piped("Hello\n")
    assert main(["chat", str(copied)]) == 3
    err = capsys.readouterr().err
    assert "no chat template" in err and "--chat-template FILE.jinja" in err and "danlu generate" in err
    template = tmp_path / "own.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:", encoding="utf-8"
    )
    piped("Hello\n")
    assert main(["chat", str(copied), "--chat-template", str(template), "--max-new-tokens", "4"]) == 0
