"""The demo: from nothing to a model that answers; again, interrupted, and in folders that are not its own."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from builders.docs_scripts import script
from builders.tiny_world import danlu, differences

from danlu import recipe
from danlu.cli import demo as verb
from danlu.core.errors import CheckpointError, DataError, ResourceError
from danlu.core.shipped_files import shipped_folder
from danlu.data.demo_data import Question, every_question, questions
from danlu.demo import demo
from danlu.demo.demo import Answered, AnsweredSum, Result, Tally
from danlu.demo.demo_recipes import Place, Size
from danlu.recipe import Chain, load_recipe_or_chain
from danlu.run.train import Outcome

SMALL = Size(
    documents=64, conversations=64, vocabulary=300, hidden_size=16, layers=1, heads=2, sft_epochs=1,
    worked_sums=40, bare_sums=60, sums_epochs=1, grpo_steps=2, prompts=4, held_out_sums=6,
)  # fmt: skip
STAGES = ("pretrain", "sft", "sums", "grpo")

pytestmark = pytest.mark.end_to_end


def steps(run_folder: Path) -> list[dict[str, object]]:
    lines = map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


def quietly(folder: Path, *, size: Size = SMALL, stream: io.TextIOBase | None = None) -> Result:
    return demo.demo(folder, size=size, log=lambda line: None, stream=stream or io.StringIO())  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def one_process(module_tokenises_here: None) -> Iterator[None]:
    """Everything of a demo in this process and on one thread: an extra one takes longer than its rows."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, one_process: None) -> Iterator[Result]:
    """A whole demo at a size that learns nothing; its folder is `demo` in the working directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("demo"))
        yield quietly(Path("demo"))


def test_what_it_leaves(finished: Result) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = finished.place
    assert finished.exit_code == 0
    assert {entry.name for entry in place.folder.iterdir()} == {
        "demo.json", "data", "tokenizer", "cache", "answers.json", *STAGES, *(f"{stage}.yaml" for stage in STAGES),
    }  # fmt: skip
    assert [len(steps(place.run(stage))) > 1 for stage in STAGES] == [True] * 4
    for stage in STAGES:
        written = recipe.load(place.recipe(stage)).recipe
        kept = recipe.load(place.run(stage) / "recipe.yaml").recipe
        assert written.precision in ("auto", kept.precision)  # a run keeps what multiplies faster here
        assert written.model_copy(update={"precision": kept.precision}) == kept
        model = AutoModelForCausalLM.from_pretrained(place.run(stage) / "model")
        assert model.num_parameters() == 300 * 16 + 4 * 16 * 16 - 2 * 16 * 8 + 3 * 16 * 48 + 3 * 16
        tokenizer = AutoTokenizer.from_pretrained(place.run(stage) / "model")
        assert "<|im_start|>assistant" in tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
        )


def test_the_answers_are_counted_and_kept(finished: Result) -> None:
    assert [finished.asked.of, finished.held_out.of] == [len(every_question(held_out)) for held_out in (False, True)]
    assert {one.question.held_out for one in finished.shown} == {False, True}
    kept = json.loads(finished.place.answers.read_text(encoding="utf-8"))
    assert kept["right"]["held_out"] == {
        "of": finished.held_out.of,
        "before": finished.held_out.before,
        "after": finished.held_out.after,
    }
    assert [one["after"] for one in kept["shown"]] == [one.after for one in finished.shown]


def test_right_answers_are_those_that_say_the_same(monkeypatch: pytest.MonkeyPatch, finished: Result) -> None:
    facts = [*questions(), *every_question(held_out=False), *every_question(held_out=True)]
    sums = [json.loads(line)["answer"] for line in finished.place.held_out_sums.read_text().splitlines()]

    def answers(run_folder: Path, asked: list[tuple[dict[str, str], ...]], longest: int) -> list[str]:
        stage = run_folder.name
        if stage in ("sums", "grpo"):
            wrong = [] if stage == "grpo" else [1, 2]
            return [f"1+1=2, {'' if index not in wrong else '9'}{sum_}" for index, sum_ in enumerate(sums)]
        known = stage == "sft"
        return [one.answer if known and not (one.held_out and index % 2) else "" for index, one in enumerate(facts)]

    monkeypatch.setattr(demo, "_answers", answers)
    measured = finished.place.answers.read_bytes()
    counted = quietly(finished.place.folder)
    finished.place.answers.write_bytes(measured)  # other tests read what the whole demo measured
    assert counted.asked == Tally(of=finished.asked.of, before=0, after=finished.asked.of)
    assert 0 < counted.held_out.after < counted.held_out.of
    assert counted.sums == Tally(of=6, before=4, after=6)
    assert [(each.was_right, each.is_right) for each in counted.shown_sums] == [(False, True)] * 2 + [(True, True)] * 2


def test_the_report_shows_the_curve_of_reinforcement_learning(finished: Result) -> None:
    shown = finished.place.report.read_text(encoding="utf-8")
    assert "<svg" in shown and "Reward" in shown and "eval_reward" in shown
    first = json.loads((finished.place.run("grpo") / "rollouts.jsonl").read_text().splitlines()[0])
    assert first["prompt"] in {json.loads(line)["question"] for line in finished.place.sums.open()}


def test_sums_are_right_as_the_reward_says() -> None:
    each = AnsweredSum("What is 17 plus 15?", "32", "7+5=12, 1+1+1=3, 33", "7+5=12, 1+1+1=3, 32")
    assert (each.was_right, each.is_right) == (False, True)


def test_data_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "train", None)  # control: nothing is trained
    assert danlu("demo", "--data-only") == 0
    told = capsys.readouterr().out
    assert "danlu recipes copy chain" in told and "Right answers" not in told
    loaded = load_recipe_or_chain(shipped_folder() / "chain.yaml")
    assert isinstance(loaded, Chain) and len(loaded.stages) == 6  # whose files are checked


def test_again_it_says_that_it_is_finished_and_touches_nothing(finished: Result) -> None:
    place, said = finished.place, []
    place.recipe("sft").write_text(place.recipe("sft").read_text() + "# a note of my own\n")
    files = [place.run(stage) / "model" / "model.safetensors" for stage in STAGES]
    files += [place.documents, place.conversations, place.recipe("sft"), place.tokenizer / "tokenizer.json"]
    before = [file.stat().st_mtime_ns for file in files]
    again = demo.demo(place.folder, log=said.append, stream=io.StringIO())
    assert [line for line in said if line.startswith("finished already")] == [
        f"finished already, after step {len(steps(place.run(stage)))}" for stage in STAGES
    ]
    assert [file.stat().st_mtime_ns for file in files] == before
    assert again == replace(finished, place=again.place)


class Interrupting(io.StringIO):
    """Sends this process a Ctrl-C when training tells of a step."""

    def __init__(self, line: str) -> None:
        super().__init__()
        self.line = line

    def write(self, text: str) -> int:
        if text.startswith(self.line):
            os.kill(os.getpid(), signal.SIGINT)
        return super().write(text)


def test_interrupted_it_goes_on_to_the_same_model(
    finished: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = finished.place.folder.absolute()
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    stopped = demo.demo(Path("demo"), size=SMALL, log=said.append, stream=Interrupting("step 1/"))
    assert stopped.exit_code == 130
    assert stopped.shown == ()
    assert said[-1] == "stopped after step 1, saved in demo/pretrain; the same command goes on from there"
    # The second time at the size it began with, whatever is asked for.
    stopped = demo.demo(Path("demo"), size=Size(), log=said.append, stream=Interrupting("step 1/"))
    assert said[-1] == "stopped after step 1, saved in demo/sft; the same command goes on from there"
    stopped = demo.demo(Path("demo"), log=said.append, stream=Interrupting("step 1/"))
    stopped = demo.demo(Path("demo"), log=said.append, stream=Interrupting("step 1/"))
    assert said[-1] == "stopped after step 1, saved in demo/grpo; the same command goes on from there"
    done = quietly(Path("demo"))
    assert done == replace(finished, place=done.place)
    for stage in STAGES:
        assert differences(whole / stage, Path("demo") / stage) == []
    assert "model/model.safetensors" in differences(whole / "pretrain", Path("demo") / "sft")


@pytest.mark.parametrize("stage", ["pretrain", "sft"])
def test_an_edited_recipe_is_refused_when_the_run_depends_on_it(finished: Result, stage: str, tmp_path: Path) -> None:
    copy = tmp_path / "demo"
    shutil.copytree(finished.place.folder, copy)
    file = copy / f"{stage}.yaml"
    file.write_text(file.read_text().replace("seed: 0", "seed: 1").replace("demo/", f"{copy}/"))
    with pytest.raises(CheckpointError, match="holds a run of another recipe"):
        quietly(copy)


def test_the_picture_shows_what_was_measured(finished: Result) -> None:
    drawn = script("demo_picture").picture(finished.place.folder)
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    runs = [finished.place.run(stage) for stage in ("pretrain", "sft")]
    curves = [points.count(",") for points in re.findall(r'<path class="\w+" d="M([^"]+)"', drawn)]
    assert curves == [len(steps(folder)) for folder in runs]
    for tally, name in (
        (finished.asked, "asked in training"),
        (finished.held_out, "only read, never asked"),
        (finished.sums, "sums never seen, GRPO"),
    ):
        assert f"right of {tally.of} {name}: {tally.before} before, {tally.after} after" in drawn


# -- folders ----------------------------------------------------------------------------------------------------------


def test_a_folder_with_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("mine")
    message = r"the folder holds other things \(letter.txt\). Name an empty or new one with --output"
    with pytest.raises(ResourceError, match=message):
        quietly(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["letter.txt"]


def test_a_folder_of_the_demo_may_hold_more(tmp_path: Path, not_trained: None) -> None:
    quietly(tmp_path / "demo")
    (tmp_path / "demo" / "letter.txt").write_text("mine")
    assert quietly(tmp_path / "demo").exit_code == 130


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="file/demo: cannot be written: Not a directory. Name another folder"):
        quietly(tmp_path / "file" / "demo")


def test_a_mark_that_is_not_the_demos(tmp_path: Path) -> None:
    (tmp_path / "demo.json").write_text('{"size": {"documents": 3, "elephants": 4}}')
    with pytest.raises(ResourceError, match="demo.json: not what the demo wrote .*elephants"):
        quietly(tmp_path)


def test_an_error_of_training_passes_through(tmp_path: Path, one_process: None) -> None:
    with pytest.raises(DataError, match="a vocabulary of 20 is too small"):
        quietly(tmp_path / "demo", size=Size(documents=3, conversations=3, vocabulary=20))


@pytest.fixture
def not_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo ends where training would begin."""
    monkeypatch.setattr(demo, "train", lambda loaded, **_: Outcome(Path(loaded.recipe.output), 0, 130, ()))


@pytest.mark.parametrize(
    "name", ["demo", "my demo", "a#5: b", "x ${HOME}", "1e3", "null", 'it\'s {a} "quoted"', "丹炉"]
)
def test_recipes_find_their_files_whatever_the_folder_is_called(name: str, tmp_path: Path, not_trained: None) -> None:
    place = quietly(tmp_path / name).place
    loaded = recipe.load(place.recipe("pretrain")).recipe
    assert (loaded.output, loaded.model.tokenizer) == (str(place.run("pretrain")), str(place.tokenizer))
    assert loaded.data.train[0].path == str(place.documents)
    place.run("pretrain").mkdir()
    assert recipe.load(place.recipe("sft")).recipe.model.path == str(place.run("pretrain"))


@pytest.mark.parametrize("name", ["1e3", "null", "true"])
def test_a_relative_folder_whose_name_reads_as_something_else(
    name: str, tmp_path: Path, not_trained: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = quietly(Path(name)).place
    assert recipe.load(place.recipe("pretrain")).recipe.output == f"{name}/pretrain"


# -- what is shown ----------------------------------------------------------------------------------------------------


def test_every_command_that_is_suggested_works(
    finished: Result, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, one_process: None
) -> None:
    lines = list(verb.next_lines(finished.place, "danlu"))
    commands = [line.strip().split("  ")[0] for line in lines if line.startswith("  danlu ")]
    assert [command.split()[1] for command in commands] == [
        "chat", "generate", "generate", "generate", "preview", "train", "eval", "recipes",
    ]  # fmt: skip
    monkeypatch.setattr("sys.stdin", io.StringIO("Where does the owl live?\n"))
    for command in commands:
        _, *arguments = shlex.split(command)
        assert danlu(*arguments) == 0, (command, capsys.readouterr().err)
        assert capsys.readouterr().out.strip() or "train" in arguments, command
    assert Path("demo/again/model/config.json").is_file()
    for line in lines[1 : lines.index("")]:
        assert Path(line.split()[0]).exists(), line


def test_answers_as_lines() -> None:
    fox, owl = (
        Question(({"role": "user", "content": f"Where does the {name} live?"},), f"In a {home}.", held_out)
        for name, home, held_out in (("fox", "hole", False), ("owl", "tree", True))
    )
    pirate = Question(({"role": "system", "content": "Arr."}, *fox.messages), "Arr! In a hole.", False)
    shown = (
        Answered(fox, "The dog " * 20, "In a hole."),
        Answered(pirate, "x\ny", "Arr! In a hole."),
        Answered(owl, "who?", "In a hole."),
    )
    sums = (AnsweredSum("What is 17 plus 15?", "32", "7+5=12, 1+1=2, 22", "7+5=12, 1+1+1=3, 32"),)
    result = Result(Place(Path("demo")), 0, shown, Tally(124, 0, 120), Tally(21, 1, 18), sums, Tally(200, 93, 171))
    assert (
        "\n".join(verb.answer_lines(result, colour=False))
        == """
Facts that the conversations asked for:
  Where does the fox live?
      before  The dog The dog The dog The dog The dog The dog The dog The dog T...
      after   In a hole.   (right)
  system: Arr.
  Where does the fox live?
      before  x y
      after   Arr! In a hole.   (right)

Facts that it only read, and was never asked for (held out):
  Where does the owl live?
      before  who?
      after   In a hole.   (wrong: In a tree.)

Right answers                       before       after
asked in the conversations           0/124     120/124
only read, never asked                1/21       18/21

Sums that it has never seen, before and after reinforcement learning:
  What is 17 plus 15?
      before  7+5=12, 1+1=2, 22   (wrong: 32)
      after   7+5=12, 1+1+1=3, 32   (right)

Right results                       before       after
sums never seen                     93/200     171/200"""
    )
    coloured = "\n".join(verb.answer_lines(result, colour=True))
    assert "(\033[32mright\033[0m)" in coloured and "(\033[31mwrong: In a tree.\033[0m)" in coloured


def test_danlu_is_called_as_the_shell_finds_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def executable(folder: str) -> str:
        file = tmp_path / folder / "danlu"
        file.parent.mkdir()
        file.write_text("")
        file.chmod(0o755)
        return str(file)

    mine, other = executable("mine"), executable("other")
    monkeypatch.setenv("PATH", str(tmp_path / "mine"))
    for started, called in ((mine, "danlu"), (other, other), ("/usr/lib/danlu/__main__.py", "danlu")):
        monkeypatch.setattr("sys.argv", [started, "demo"])
        assert verb.program() == called
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    monkeypatch.setattr("sys.argv", [mine, "demo"])
    assert verb.program() == mine


@pytest.fixture
def at_small_size(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = demo.demo

    def small(folder: Path, **settings: object) -> Result:
        return whole(folder, size=SMALL, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(demo, "demo", small)


def test_the_verb(finished: Result, capsys: pytest.CaptureFixture[str], at_small_size: None, not_trained: None) -> None:
    assert danlu("demo", "--output", "stopped") == 130
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines()[-1].startswith("stopped before the first step, with nothing to save")


def test_the_verb_shows_answers_on_stdout_and_progress_on_stderr(
    finished: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    assert danlu("demo") == 0
    told = capsys.readouterr()
    assert "Right answers" in told.out and "What to try next" in told.out and "\033" not in told.out
    assert "demo/grpo/report.html" in told.out
    assert told.err.startswith("1. Data, a tokenizer and four recipes, all in demo\n")


@pytest.mark.slow
def test_at_full_size_it_answers_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = quietly(Path("demo"), size=Size())
    assert result.exit_code == 0
    assert result.asked.before + result.held_out.before <= 3
    assert result.asked.after >= 0.95 * result.asked.of
    assert result.held_out.after >= 0.6 * result.held_out.of
    assert result.sums.after >= result.sums.before + 0.15 * result.sums.of
