"""`danlu chat`, by a pipe and at a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from builders.adapter_folders import adapter_folder
from builders.tiny_world import World

from danlu.cli import chat as chat_verb
from danlu.cli.main import main
from danlu.inference.chat import Conversation
from danlu.recipe import sections

GREEDY = ["--temperature", "0"]


@pytest.fixture
def said(stories: Path, capsys: pytest.CaptureFixture[str], piped: Callable[[str], None]) -> Callable[..., str]:
    """What the story model answers to lines, greedily and in ten tokens at most."""

    def answers(text: str, *more: str) -> str:
        piped(text)
        assert main(["chat", str(stories), *GREEDY, "--max-new-tokens", "10", *more]) == 0
        return str(capsys.readouterr().out)

    return answers


# -- by a pipe --------------------------------------------------------------------------------------------------------


def test_lines_are_turns_and_answers_alone_come_out(chanting, capsys, piped):
    piped("Hello\n\n  \nTell me a story")  # the last line has no end, blank ones are no turns
    assert main(["chat", str(chanting)]) == 0
    assert capsys.readouterr() == ("丹炉é🎈\n丹炉é🎈\n", "")


def test_nothing_to_say(chanting, capsys, piped):
    piped("")
    assert main(["chat", str(chanting)]) == 0
    assert capsys.readouterr() == ("", "")


def test_turns_are_those_of_transformers(stories, said):
    """Each answer is what transformers generates from the whole conversation, rendered by the template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, oracle = AutoTokenizer.from_pretrained(stories), AutoModelForCausalLM.from_pretrained(stories)

    def generated(messages: list[dict[str, str]]) -> str:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        out = oracle.generate(**inputs, do_sample=False, max_new_tokens=10)[0]
        start = len(tokenizer.decode(inputs.input_ids[0], skip_special_tokens=True))
        return str(tokenizer.decode(out, skip_special_tokens=True))[start:]

    messages: list[dict[str, str]] = [{"role": "system", "content": "Be kind"}]
    expected = []
    for turn in ("Hello", "Tell me a story", "Why?"):
        messages.append({"role": "user", "content": turn})
        expected.append(generated(messages))
        messages.append({"role": "assistant", "content": expected[-1]})
    assert said("Hello\nTell me a story\nWhy?\n", "--system", "Be kind") == "".join(f"{one}\n" for one in expected)
    assert generated(messages[:1] + messages[3:4]) != expected[1]  # control: what was said before matters


def test_commands(said, capsys, stories, piped):
    once = said("Hello\n", "--system", "Be kind")
    assert said("Hello\n/undo\nHello\n", "--system", "Be kind") == once * 2
    assert said("Hello\nAnd?\n/reset\nHello\n", "--system", "Be kind").endswith(once)
    assert said("Hello\n/exit\nnever asked\n", "--system", "Be kind") == once
    plain = said("Hello\n")
    assert said("/system Be kind\nHello\n/system\nHello\n") == once + plain != plain + plain
    assert said("Hello\nAnd?\n") != said("Hello\n/reset\nAnd?\n")  # control: a turn knows those before it
    piped("/undo\n/help\n")
    assert main(["chat", str(stories)]) == 0
    out = capsys.readouterr()
    assert out.out == "" and out.err.startswith("nothing to take back\n/reset    forget the conversation")
    assert all(command in out.err for command in ("/system", "/undo", "/adapter", "/exit", "/help"))


def test_a_line_that_looks_like_a_command_is_a_turn_in_a_pipe(chanting, capsys, piped):
    piped("/unknown word\n")
    assert main(["chat", str(chanting)]) == 0
    assert capsys.readouterr().out == "丹炉é🎈\n"


def test_answers_that_were_cut_say_so_beside_the_text(stories, endless, capsys, piped):
    piped("Hello\n")
    assert main(["chat", str(stories), *GREEDY, "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().err == "(cut: --max-new-tokens)\n"
    piped("a b " * 100 + "\n")
    assert main(["chat", str(stories), *GREEDY]) == 0
    assert capsys.readouterr().err == "(cut: the model's context is full; /undo or /reset makes room)\n"
    piped("Hello\n")
    assert main(["chat", str(endless), "--stop", "🎈丹"]) == 0
    assert capsys.readouterr() == ("丹炉é\n", "")


def test_a_conversation_longer_than_the_context_ends_a_pipe_with_an_error(chanting, capsys, piped):
    piped("Hello\n" + "long " * 600 + "\nnever asked\n")
    assert main(["chat", str(chanting)]) == 3
    out = capsys.readouterr()
    assert out.out == "丹炉é🎈\n"
    assert "the conversation now takes 30" in out.err and "and the model sees 512 at most" in out.err


def test_bytes_that_are_no_text(chanting, capsys, piped):
    piped(b"Hello\n\xff\n")
    assert main(["chat", str(chanting)]) == 3
    assert "not UTF-8 text; convert it first" in capsys.readouterr().err


def test_interrupt_in_a_pipe_ends_the_line_and_the_program(chanting, capsys, piped, monkeypatch):
    ask = Conversation.ask

    def interrupted(self: Conversation, text: str, on_text: Callable[[str], None]) -> None:
        def stop(piece: str) -> None:
            on_text(piece)
            raise KeyboardInterrupt

        ask(self, text, stop)

    monkeypatch.setattr(Conversation, "ask", interrupted)
    piped("Hello\nHello\n")
    assert main(["chat", str(chanting)]) == 130
    assert capsys.readouterr() == ("丹\n", "interrupted\n")


# -- adapters ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapters(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: adapter_folder(tiny_world.base, root / name, section, seed=seed, size=1.0)
        for seed, (name, section) in enumerate({"poet": sections.Lora(), "clerk": sections.Dora()}.items())
    }


def test_adapters_are_switched_in_a_conversation(tiny_world, adapters, capsys, piped):
    """Each answers as it does in a chat of its own with the same turns before it."""

    def said(lines: str, model: Path, *more: str) -> tuple[list[str], str]:
        piped(lines)
        assert main(["chat", str(model), *GREEDY, "--max-new-tokens", "6", *more]) == 0
        out = capsys.readouterr()
        return out.out.splitlines(), out.err.replace("(cut: --max-new-tokens)\n", "")

    both = [option for folder in adapters.values() for option in ("--adapter", str(folder))]
    lines = (
        "/adapter\nHi\n/undo\n/adapter clerk\nHi\n/undo\n/adapter none\nHi\n/undo\n/adapter poet\nHi\n/adapter poet\n"
    )
    answers, told = said(lines, tiny_world.base, *both)
    alone = [said("Hi\n", model)[0][0] for model in (adapters["poet"], adapters["clerk"], tiny_world.base)]
    assert answers == [*alone, alone[0]] and len(set(alone)) == 3
    assert told.splitlines() == [
        "[poet]  clerk  none",
        "poet  [clerk]  none",
        "poet  clerk  [none]",
        "[poet]  clerk  none",
        "[poet]  clerk  none",
    ]
    assert said("/adapter\nHi\n", adapters["clerk"], *both[:2]) == ([alone[1]], "[clerk]  poet  none\n")


def test_what_adapters_cannot_do(tiny_world, adapters, chanting, capsys, piped):
    piped("Hi\n/adapter pote\nnever asked\n")
    assert main(["chat", str(adapters["poet"]), *GREEDY, "--max-new-tokens", "2"]) == 3
    out = capsys.readouterr()
    assert out.out.count("\n") == 1 and "error: pote: no such adapter; there are poet and none" in out.err
    piped("/adapter\n")
    assert main(["chat", str(chanting)]) == 0
    assert "no adapters; `danlu chat MODEL --adapter PATH` brings some" in capsys.readouterr().err
    piped("Hi\n")
    assert main(["chat", str(chanting), "--adapter", str(adapters["poet"])]) == 4
    assert "was trained on another base" in capsys.readouterr().err


def test_a_mistyped_adapter_ends_nothing_at_a_terminal(adapters, capsys, typed):
    typed("/adapter pote", "/adapter none", "/exit")
    assert main(["chat", str(adapters["poet"]), *GREEDY]) == 0
    err = capsys.readouterr().err
    assert ", adapter poet  (/help lists the commands, Ctrl-D leaves)" in err
    assert "error: pote: no such adapter; there are poet and none\npoet  [none]\n" in err


# -- at a terminal ----------------------------------------------------------------------------------------------------


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A person at the keyboard: lines, and exceptions for Ctrl-C and Ctrl-D."""

    def give(*lines: str | type[BaseException]) -> None:
        waiting: Iterator[str | type[BaseException]] = iter(lines)

        def read(prompt: str) -> str:
            line = next(waiting)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", read)
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)

    return give


def test_mistakes_and_interrupts_end_nothing(chanting, capsys, monkeypatch, typed):
    typed("/rest", "Hello", KeyboardInterrupt, "long " * 600, "a\udcff", "Hello", EOFError)
    asked = []
    real = chat_verb.print_answer

    def answer(conversation: Conversation, turn: str) -> None:
        asked.append(turn)
        if len(asked) == 1:
            raise KeyboardInterrupt
        real(conversation, turn)

    monkeypatch.setattr(chat_verb, "print_answer", answer)
    assert main(["chat", str(chanting), "--max-new-tokens", "4"]) == 0
    out = capsys.readouterr()
    assert "/rest: no such command; there are /reset, /system, /undo, /adapter, /exit, /help" in out.err
    assert "(interrupted; what was said so far is kept)" in out.err
    assert "(Ctrl-D or /exit leaves)" in out.err
    assert "and the model sees 512 at most" in out.err and "/undo takes the last turn back, /reset all" in out.err
    assert "error: this line: not UTF-8 text" in out.err
    assert asked[0] == asked[2] == "Hello" and len(asked) == 3
    assert out.out == "丹\ufffd\n\n"  # four tokens are a character and a third of one; then the line of Ctrl-D


def test_exit(chanting, capsys, typed):
    typed("/exit")
    assert main(["chat", str(chanting)]) == 0
    out = capsys.readouterr()
    assert out.out == "" and out.err == f"{chanting}  (/help lists the commands, Ctrl-D leaves)\n"


# -- templates --------------------------------------------------------------------------------------------------------


def test_no_chat_template(copied, capsys, piped, tmp_path):
    settings = json.loads((copied / "tokenizer_config.json").read_text(encoding="utf-8"))
    del settings["chat_template"]
    (copied / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
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
    piped("Hello\n")
    assert main(["chat", str(copied), "--chat-template", str(tmp_path / "none.jinja")]) == 3
    assert "none.jinja cannot be read" in capsys.readouterr().err


def test_a_template_that_refuses(chanting, capsys, piped, tmp_path):
    template = tmp_path / "strict.jinja"
    template.write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system prompts') }}{% endif %}x", encoding="utf-8"
    )
    piped("Hello\n")
    assert main(["chat", str(chanting), "--chat-template", str(template), "--system", "Be kind"]) == 3
    assert "the chat template refuses this conversation" in capsys.readouterr().err
