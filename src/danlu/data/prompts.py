"""The prompts of stage `rl`: rows as tokens that the policy continues, each with all columns for the rewards.

`danlu.data.prepare.prepare_prompts` reads them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from danlu.core.errors import CheckpointError, DataError
from danlu.core.prompt_template import PromptTemplate
from danlu.data.messages import Conversation, Message, turn_of
from danlu.data.permutation import Permutation
from danlu.data.prompt_encoding import (
    encode_conversation,
    encode_text,
    keys_left_out,
    shorten_conversation,
    shorten_text,
)
from danlu.data.prompt_formats import PromptColumns, parse_prompt
from danlu.data.raw_rows import BadRow, RawRow
from danlu.data.rows import Format
from danlu.data.statistics import Statistics
from danlu.data.tokenizer import Tokenizer
from danlu.data.tree_length import PROMPT_SHORTENED

TOO_LONG = "the prompt leaves no room for rollout.max_new_tokens in data.max_length"


@dataclass(frozen=True)
class Prompt:
    """The prompt that a row gives to the policy."""

    tokens: tuple[int, ...]
    """The whole prompt, generation prompt of the chat template or begun turn of the assistant included; without virtual
    tokens of adapters."""
    row: Mapping[str, Any]
    """Every column of the row, under the names that it has in the file and in `data.columns`."""
    prompt: str | list[Mapping[str, Any]]
    """The text, or the messages of a conversation, shortened where the prompt was too long."""
    where: str
    """The place of the row, for messages: "gsm8k.jsonl:17"."""


@dataclass(frozen=True)
class PromptSettings:
    """The settings that decide, besides a row and the tokenizer, which prompt the row becomes."""

    template: str | None
    format: Format | Literal["auto"]
    system: str | None
    longest: int
    overlong: Literal["truncate", "split", "drop"]
    tools: tuple[Mapping[str, Any], ...] = ()
    in_turns: bool = False
    """Whether answers have several turns, with an environment."""


@dataclass(frozen=True)
class PromptChunk:
    """The prompts of a chunk of rows."""

    prompts: tuple[Prompt, ...]
    statistics: Statistics
    bad: tuple[str, ...]
    """A message for each row that is none, in the order of the rows."""


@dataclass(frozen=True)
class PromptSets:
    """The prompts of a run."""

    train: tuple[Prompt, ...]
    """The prompts of an epoch; with weights of sources one may be there more than once."""
    eval: tuple[Prompt, ...]
    """Held out, or from sources of their own; none where `data.eval` is missing."""
    statistics: Statistics
    """The statistics of the training rows, before evaluation rows were taken out and sources mixed."""
    eval_statistics: Statistics | None
    """The statistics of separate evaluation sources; None where there are none."""
    column_lines: tuple[str, ...] = ()
    """Lines for the console on columns that a dataset_info.json names."""

    def lines(self) -> list[str]:
        """Returns lines for the console that report all rows which were shortened, dropped or skipped."""
        lines = [*self.column_lines, *prompt_lines("data", self.statistics)]
        if self.eval_statistics is not None:
            lines += prompt_lines("evaluation data", self.eval_statistics)
        elif self.eval:
            lines.append(f"evaluation data: {len(self.eval):,} prompts of these rows are held out")
        return lines


def no_prompt_left(statistics: Statistics, max_length: int, max_new_tokens: int) -> str:
    """Why a source has no prompt."""
    if statistics.bad_rows == statistics.rows:
        return f"none of {statistics.rows} rows can be used; the first: {statistics.bad_examples[0]}"
    return (
        f"no prompt is left of {statistics.rows} rows: {sum(statistics.dropped.values())} are longer than the "
        f"{max_length - max_new_tokens} tokens that rollout.max_new_tokens ({max_new_tokens}) leaves of "
        f"data.max_length ({max_length}). Raise data.max_length, or lower rollout.max_new_tokens"
    )


def prompt_lines(name: str, statistics: Statistics) -> list[str]:
    """Returns lines that report the outcome of the rows of training or of evaluation."""
    mean = statistics.tokens / max(1, statistics.samples)
    lines = [
        f"{name}: {statistics.rows:,} rows, {statistics.samples:,} prompts of {mean:,.0f} tokens on average and "
        f"{statistics.longest:,} at most"
    ]
    lines += [f"{name}: {count:,} of them {done}: {TOO_LONG}" for done, count in statistics.shortened.items()]
    return lines + statistics.outcome_lines(name, (*statistics.left_out_lines(), *statistics.unread_lines()))


class PromptOrder:
    """The endless sequence of a run's prompts: each epoch has all of them, reshuffled by the seed.

    Prompt n is a pure function of (prompts, seed, n), so a resumed run needs no more than its number.

    Args:
        prompts: the prompts of an epoch, at least one.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        assert prompts, "prepare_prompts refuses data without a prompt"
        self._prompts = prompts
        self._seed = seed

    @property
    def per_epoch(self) -> int:
        """Prompts of an epoch."""
        return len(self._prompts)

    def at(self, number: int) -> Prompt:
        """Prompt `number` of the run, from 0."""
        epoch, place = divmod(number, len(self._prompts))
        return self._prompts[Permutation.of(len(self._prompts), self._seed, "prompts", epoch)[place]]

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint: a digest by which `restore` recognises the prompts and their rows."""
        return {"prompts": self._digest}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Check that these are the prompts a checkpoint was made with. Raises CheckpointError where they are not."""
        if state != self.state():
            raise CheckpointError(
                "the prompts are not what the checkpoint was made with "
                f"(prompts {self._digest}, checkpoint {state.get('prompts')}): the rows, tokenizer, data.prompt or "
                "seed changed. Restore them, or start a new run"
            )

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.blake2b(str(self._seed).encode(), digest_size=8)
        for prompt in self._prompts:
            described = [prompt.tokens, sorted(prompt.row.items())]
            digest.update(json.dumps(described, default=str).encode())
        return digest.hexdigest()


# -- in tokenising processes -------------------------------------------------------------------------------------------


def render_prompts(tokenizer: Tokenizer, task: tuple[PromptSettings, list[RawRow]]) -> PromptChunk:
    """Renders rows as prompts; rows without a prompt are reported, not raised.

    Raises:
        DataError: every row needs something that the tokenizer lacks.
    """
    settings, raw = task
    renderer = _Renderer(tokenizer, settings)
    prompts: list[Prompt] = []
    bad: list[str] = []
    statistics = Statistics(rows=len(raw))
    for row in raw:
        if isinstance(row.value, BadRow):
            bad.append(row.value.message)
            continue
        try:
            read = row.value if renderer.template is None else row.columns
            columns = parse_prompt(read, renderer.template, settings.format, row.where)
        except DataError as error:
            bad.append(str(error))
            continue
        renderer.prepare(columns)
        try:
            left_out = renderer.keys_left_out(columns)
            fitting = renderer.fitted(columns)
        except DataError as error:
            bad.append(f"{row.where}: {error}")
            continue
        if isinstance(columns, Conversation):
            statistics.unread.update(columns.unread)
        if fitting is None:
            statistics.dropped[TOO_LONG] += 1
            continue
        shown, tokens = fitting
        if left_out:
            statistics.left_out.update(left_out)
            statistics.left_out_example = statistics.left_out_example or row.where
        statistics.shortened.update([PROMPT_SHORTENED] if shown is not columns else [])
        prompts.append(Prompt(tokens, row.columns, shown_prompt(shown), row.where))
    statistics.add(Statistics(bad_rows=len(bad), bad_examples=list(bad), samples=len(prompts)))
    lengths = [len(prompt.tokens) for prompt in prompts]
    statistics.add(Statistics(tokens=sum(lengths), longest=max(lengths, default=0)))
    return PromptChunk(tuple(prompts), statistics, tuple(bad))


def shown_prompt(columns: PromptColumns) -> str | list[Mapping[str, Any]]:
    """A prompt as rewards and logs see it: the text, or the messages."""
    return columns if isinstance(columns, str) else [turn_of(message) for message in columns.messages]


class _Renderer:
    """Prompts as tokens of one tokenizer: by its chat template where it has one, else as they stand."""

    def __init__(self, tokenizer: Tokenizer, settings: PromptSettings) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        self.template = None if settings.template is None else PromptTemplate.parse(settings.template)

    def prepare(self, columns: PromptColumns) -> None:
        """Checks that the tokenizer has everything that prompts of this kind need. Raises DataError otherwise."""
        if self._settings.tools:
            template = self._tokenizer.template(tools=True)
            if not (template.takes_tools and template.takes_results):
                raise DataError(
                    f"{self._tokenizer.path}: environment.tools: the chat template does not show tools and what they "
                    "return. Name one that does in model.chat_template"
                )
        elif isinstance(columns, Conversation) or self._tokenizer.has_template:
            self._tokenizer.template(isinstance(columns, Conversation) and bool(columns.tools))
        elif self._settings.system is not None:
            raise DataError(
                f"{self._tokenizer.path}: data.system is given, and this tokenizer has no chat template that could "
                "show it. Leave it out, or name a Jinja file in model.chat_template"
            )

    def encoded(self, columns: PromptColumns) -> tuple[int, ...]:
        """The tokens of a prompt. Raises DataError where the template refuses it."""
        if isinstance(columns, str) and not self._tokenizer.has_template:
            return tuple(encode_text(self._tokenizer, columns))
        return tuple(encode_conversation(self._tokenizer, self._conversation(columns), self._settings.system))

    def keys_left_out(self, columns: PromptColumns) -> tuple[str, ...]:
        """The keys of messages with text that the chat template leaves out, as it does of turns that are not the last.

        Raises DataError for text that it shows of no message.
        """
        if isinstance(columns, str) and not self._tokenizer.has_template:
            return ()
        return keys_left_out(self._tokenizer, self._conversation(columns), self._settings.system)

    def _conversation(self, columns: PromptColumns) -> Conversation:
        """The prompt as messages, with the tools that can be called."""
        conversation = Conversation((Message("user", columns),)) if isinstance(columns, str) else columns
        if self._settings.in_turns and conversation.messages[-1].role == "assistant":
            raise DataError(
                "the prompt ends in the assistant's turn, and with an environment each answer is a turn of its own. "
                "End it with the user's turn, or leave out environment"
            )
        if not self._settings.tools:
            return conversation
        if conversation.tools:
            raise DataError("the row has tools of its own, and those that can be called are in environment.tools")
        return replace(conversation, tools=tuple(dict(tool) for tool in self._settings.tools))

    def fitted(self, columns: PromptColumns) -> tuple[PromptColumns, tuple[int, ...]] | None:
        """Returns the prompt with its tokens, shortened where it is too long; None where `data.overlong` drops it, or
        it does not fit.

        Raises DataError where the template refuses it.
        """
        tokens = self.encoded(columns)
        if len(tokens) <= self._settings.longest:
            return columns, tokens
        if self._settings.overlong == "drop":
            return None
        if isinstance(columns, str):
            shorter: PromptColumns | None = shorten_text(columns, self._fits)
        else:
            shorter = shorten_conversation(columns, self._fits)
        return None if shorter is None else (shorter, self.encoded(shorter))

    def _fits(self, columns: PromptColumns) -> bool:
        return len(self.encoded(columns)) <= self._settings.longest
