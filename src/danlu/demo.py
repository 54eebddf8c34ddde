"""The demo: from nothing to a model that answers, on data that danlu makes itself.

It does what a user would do by hand. It writes a tokenizer, data files and two recipes into a folder, trains the
recipes one after the other, and asks the pretrained and the tuned model the same questions. Everything stays there to
be read, edited and trained again; doing it again goes on where it stopped.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TextIO

from danlu import __version__, recipe, run
from danlu.atomic_write import write_atomically
from danlu.data.demo_data import Question, conversations, every_question, pretraining_documents, questions
from danlu.data.tokenizer_training import train_tokenizer
from danlu.errors import ResourceError
from danlu.output_folder import refuse_foreign_files
from danlu.rollout.load_engine import engine_of
from danlu.rollout.load_model import load_chat_tokenizer, load_model
from danlu.rollout.request import Request, SamplingOptions
from danlu.rollout.resolve_model import resolve_model

MARK = "demo.json"
"""Written first; it tells a folder of the demo from any other."""

LONGEST_ANSWER = 48  # tokens; the longest right one, a story apart, has about 20

Say = Callable[[str], None]


@dataclass(frozen=True)
class Size:
    """How much data, and how large a model.

    With the defaults it takes a few minutes on two cores, and nearly every question is answered right.
    """

    documents: int = 7_000  # of about 120 tokens
    conversations: int = 4_000  # of about 73 tokens
    vocabulary: int = 768
    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    sft_epochs: int = 2


@dataclass(frozen=True)
class Answered:
    """A question, and the answers before instruction tuning and after it."""

    question: Question
    before: str
    after: str

    @property
    def is_right(self) -> bool:
        """Whether the answer after instruction tuning is the right one."""
        return self.after == self.question.answer


@dataclass(frozen=True)
class Tally:
    """How many questions of a kind there are, and how many are answered right before and after instruction tuning."""

    of: int
    before: int
    after: int


@dataclass(frozen=True)
class Result:
    """What the demo leaves and shows. After a signal (exit_code is not 0) there are no answers yet."""

    place: Place
    exit_code: int
    shown: tuple[Answered, ...] = ()
    asked: Tally = Tally(0, 0, 0)  # questions of the kind, and about the facts, that the conversations have
    held_out: Tally = Tally(0, 0, 0)  # about facts that only the documents tell


class Place:
    """The folder, and what is where in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = folder / "tokenizer"
        self.documents = folder / "data" / "documents.jsonl"
        self.conversations = folder / "data" / "conversations.jsonl"
        self.cache = folder / "cache"
        self.answers = folder / "answers.json"

    def recipe(self, stage: str) -> Path:
        return self.folder / f"{stage}.yaml"

    def run(self, stage: str) -> Path:
        return self.folder / stage


def demo(folder: Path, *, size: Size | None = None, say: Say, stream: TextIO | None = None) -> Result:
    """Makes everything that is not there yet, trains what is not trained, and asks both models the same questions.

    Args:
        folder: where; made when missing.
        size: of a new folder; one that was begun keeps its own.
        say: takes the lines for the console.
        stream: where training shows its progress; stderr by default.

    Raises ResourceError for a folder that holds other things or cannot be written, and what `run.train` raises, whose
    recipes may have been edited since.
    """
    place = Place(folder)
    size = _begin(place, size or Size())
    say(f"1. Data, a tokenizer and two recipes, all in {folder}")
    _write_missing(place, size)
    for number, stage, what in (
        (2, "pretrain", "Pretraining: a model from scratch reads the documents"),
        (3, "sft", "Instruction tuning: the same model learns to answer from conversations"),
    ):
        say(f"{number}. {what} ({place.recipe(stage)})")
        outcome = run.train(recipe.load(place.recipe(stage)), say=say, stream=stream)
        if outcome.exit_code:
            say(outcome.stopped)
            return Result(place, outcome.exit_code)
        if outcome.already:
            say(f"finished already, after step {outcome.steps}")
    say("4. The same questions for the pretrained and the tuned model")
    result = _compare(place)
    write_atomically(place.answers, _as_json(result).encode())
    return result


# -- the folder -------------------------------------------------------------------------------------------------------


def _begin(place: Place, size: Size) -> Size:
    """Marks the folder as the demo's. Returns the size; of a folder that is marked already, the one it has."""
    mark = place.folder / MARK
    try:
        place.folder.mkdir(parents=True, exist_ok=True)
        if mark.is_file():
            return Size(**json.loads(mark.read_text(encoding="utf-8"))["size"])
        advice = "Name an empty or new one with --output."
        refuse_foreign_files(place.folder, lambda name: False, holds="the folder holds other things", advice=advice)
        write_atomically(mark, json.dumps({"danlu": __version__, "size": asdict(size)}, indent=2).encode())
    except OSError as error:
        raise ResourceError(
            f"{place.folder}: cannot be written: {error.strerror}. Name another folder with --output."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ResourceError(
            f"{mark}: not what the demo wrote ({error}). Name another folder with --output, or delete this one."
        ) from error
    return size


def _write_missing(place: Place, size: Size) -> None:
    """Whatever is there stays as it is: the user may have edited it."""
    files: list[tuple[Path, Callable[[], str]]] = [
        (place.documents, lambda: _lines({"text": text} for text in _documents(size.documents))),
        (place.conversations, lambda: _lines(conversations(0, size.conversations))),
        (place.recipe("pretrain"), lambda: _pretrain_recipe(place, size)),
        (place.recipe("sft"), lambda: _sft_recipe(place, size)),
    ]
    try:
        for path, content in files:
            if not path.exists():
                path.parent.mkdir(exist_ok=True)
                write_atomically(path, content().encode())
    except OSError as error:
        raise ResourceError(f"{path}: cannot be written: {error.strerror}. Free some space and try again.") from error
    # The template is written last of the three files, so it says that the other two are there.
    if not (place.tokenizer / "chat_template.jinja").exists():
        train_tokenizer(_texts(size), size.vocabulary, place.tokenizer)


def _lines(rows: Iterable[object]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _documents(count: int) -> Iterator[str]:
    """Pages of three to five passages: attention costs less in one text of 100 tokens than in four of 25."""
    passages = pretraining_documents(0, 5 * count)
    for number in range(count):
        yield "\n".join(islice(passages, random.Random(f"page {number}").choice((3, 4, 5))))


def _texts(size: Size) -> Iterator[str]:
    yield from _documents(min(size.documents, 2000))
    for row in conversations(0, min(size.conversations, 2000)):
        yield from (message["content"] for message in row["messages"])


# -- the recipes ------------------------------------------------------------------------------------------------------


def _pretrain_recipe(place: Place, size: Size) -> str:
    return f"""\
# Pretraining, as `danlu demo` does it: a small model reads about a small world.
# Edit what you like. Paths are those of the folder that danlu is started in.
#
#   danlu train {place.recipe("pretrain")}    goes on where it stopped, or says that it is finished
#   danlu explain KEY --recipe {place.recipe("pretrain")}    what a key means, and its value here

stage: pretrain

model:
  config:                         # from scratch, as a Hugging Face config.json would say it
    model_type: llama
    hidden_size: {size.hidden_size}
    intermediate_size: {3 * size.hidden_size}
    num_hidden_layers: {size.layers}
    num_attention_heads: {size.heads}
    num_key_value_heads: {size.heads // 2}
    max_position_embeddings: 512
    tie_word_embeddings: true
  tokenizer: {_quoted(place.tokenizer)}

data:
  train: {_quoted(place.documents)}
  eval: 0.02                      # a share is set aside, to see how well it predicts what it has not read
  max_length: 256                 # tokens of a sequence
  packing: concatenate            # documents end to end; attention never crosses from one to the next
  cache: {_quoted(place.cache)}

optimizer: {{kind: adamw, learning_rate: 2e-3, weight_decay: 0.1}}  # a model this small likes a high rate
schedule: {{kind: cosine, warmup: 0.05, floor: 0.1}}
batch: {{tokens: 2048}}  # of one optimizer step
epochs: 1

precision: bf16
evaluation: {{every: 100, samples: {{prompts: ["One day,"], max_new_tokens: {LONGEST_ANSWER}}}}}
checkpoint: {{every: 100, keep: 2}}
seed: 0
output: {_quoted(place.run("pretrain"))}
"""


def _sft_recipe(place: Place, size: Size) -> str:
    return f"""\
# Instruction tuning, as `danlu demo` does it: the pretrained model learns to answer.
# Edit what you like. Paths are those of the folder that danlu is started in.
#
#   danlu preview {place.recipe("sft")}       every token in colour: trained or only read, and why
#   danlu train {place.recipe("sft")}         goes on where it stopped, or says that it is finished
#   danlu train {place.recipe("sft")} output={place.folder / "again"} optimizer.learning_rate=3e-4

stage: sft

model: {_quoted(place.run("pretrain"))}  # the run before, or any folder in Hugging Face form

data:
  train: {_quoted(place.conversations)}
  eval: 0.02                      # a share is set aside
  max_length: 256
  train_on: assistant             # the answers are trained, the questions only read
  packing: true                   # conversations share a sequence without seeing each other
  cache: {_quoted(place.cache)}

optimizer: {{kind: adamw, learning_rate: 5e-4, weight_decay: 0.1}}  # gentle enough not to forget what it read
schedule: {{kind: cosine, warmup: 0.05, floor: 0.1}}
batch: {{sequences: 8}}  # packs of max_length in one optimizer step
epochs: {size.sft_epochs}

precision: bf16
evaluation: {{every: 50, samples: {{prompts: ["What does the owl eat?"], max_new_tokens: {LONGEST_ANSWER}}}}}
checkpoint: {{every: 50, keep: 2}}
seed: 0
output: {_quoted(place.run("sft"))}
"""


def _quoted(path: Path) -> str:
    """A path as YAML reads it back, whatever characters it has."""
    text = str(path)
    if re.fullmatch(r"[/._-]*[A-Za-z][A-Za-z0-9/._-]*", text):
        return text
    return json.dumps(text.replace("${", "$${"), ensure_ascii=False)


# -- asking -----------------------------------------------------------------------------------------------------------


def _compare(place: Place) -> Result:
    asked = {"shown": questions(), "asked": every_question(held_out=False), "held_out": every_question(held_out=True)}
    every = [question for group in asked.values() for question in group]
    before, after = (_answers(place.run(stage), every) for stage in ("pretrain", "sft"))
    answered = [Answered(*answers) for answers in zip(every, before, after, strict=True)]
    first = len(asked["shown"])
    second = first + len(asked["asked"])
    return Result(
        place, 0, tuple(answered[:first]), asked=_tally(answered[first:second]), held_out=_tally(answered[second:])
    )


def _answers(run_folder: Path, asked: list[Question]) -> list[str]:
    """The likeliest answer to each question, by the tokenizer's chat template."""
    resolved = resolve_model(str(run_folder))
    tokenizer = load_chat_tokenizer(resolved.tokenizer_folder)
    loaded = load_model(resolved, tokenizer)
    greedy = SamplingOptions(temperature=0.0)
    prompts = [tuple(tokenizer.encode_chat(question.messages)) for question in asked]
    requests = [
        Request(number, prompt, greedy, LONGEST_ANSWER, stop_ids=loaded.stop_ids)
        for number, prompt in enumerate(prompts)
    ]
    return [completion.text.strip() for completion in engine_of(loaded).generate(requests)]


def _tally(answered: list[Answered]) -> Tally:
    return Tally(
        len(answered),
        sum(each.before == each.question.answer for each in answered),
        sum(each.is_right for each in answered),
    )


def _as_json(result: Result) -> str:
    shown = [
        {**asdict(each.question), "before": each.before, "after": each.after, "right": each.is_right}
        for each in result.shown
    ]
    content = {"right": {"asked": asdict(result.asked), "held_out": asdict(result.held_out)}, "shown": shown}
    return json.dumps(content, ensure_ascii=False, indent=2) + "\n"
