"""Conversations with an environment as tokens: its replies are appended to the very ids that were drawn.

The conversation is rendered as text at each turn, and compared with the text that the ids stand for. Where it begins
with that, the rest alone is encoded and appended: ids are never decoded and encoded again. Where it does not, the chat
template rewrites history (Qwen3's leaves out earlier thoughts, others move the system message), and the whole
conversation is encoded again, as a prompt of its own. White space does not count: templates trim answers, while the
policy continues its untrimmed ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from danlu.core.errors import DataError
from danlu.data.messages import Conversation, Message, parse_turns, turn_of
from danlu.data.prompt_encoding import encode_text
from danlu.data.prompts import Prompt
from danlu.data.render import shown_messages
from danlu.data.template_process import template_process
from danlu.data.tokenizer import Tokenizer
from danlu.rewards.environments.protocol import TurnText

_SPACES = re.compile(r"\s+")


@dataclass
class Dialogue:
    """A conversation up to where the assistant goes on."""

    turns: list[Mapping[str, Any]]
    """Messages as the template sees them; those of a plain text too."""
    text: str
    """The text of `ids`, without the tokens that were drawn last."""
    ids: tuple[int, ...]
    first_turns: int
    """Messages of the prompt."""

    @property
    def after_prompt(self) -> list[Mapping[str, Any]]:
        """The messages behind the prompt's."""
        return self.turns[self.first_turns :]


@dataclass(frozen=True)
class TurnRenderer:
    """Renders turns by a tokenizer's chat template, or one behind the other where it has none.

    Args:
        stop_ids: tokens that end an answer.
        system: the system message of prompts without one.
        tools: that the template tells of.
    """

    tokenizer: Tokenizer
    stop_ids: frozenset[int]
    system: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    silent_ids: frozenset[int] = field(default_factory=frozenset)

    def begin(self, prompt: Prompt, first: Sequence[TurnText]) -> Dialogue:
        """Begins a conversation: the prompt, with the environment's first reply after its last message.

        Raises DataError where the template refuses it.
        """
        if not self.tokenizer.has_template:
            assert isinstance(prompt.prompt, str), "conversations are refused without a template"
            said = "".join(f"\n\n{turn.text}" for turn in first)
            ids = tuple(encode_text(self.tokenizer, prompt.prompt + said)) if said else prompt.tokens
            turns: list[Mapping[str, Any]] = [{"role": "user", "content": prompt.prompt + said}]
            return Dialogue(turns, "", ids, 1)
        messages = _messages_of(prompt)
        for turn in first:
            *before, last = messages
            if last.role != "user":
                raise DataError(f"{prompt.where}: what reset returns stands behind a user's message, not {last.role}'s")
            joined = f"{last.content}\n\n{turn.text}" if last.content else turn.text
            messages = (*before, Message("user", joined))
        shown = self._shown(messages)
        template = self.tokenizer.template(bool(self.tools))
        text = template_process().render(template, shown, self.tools, prompt=True)
        ids = tuple(self.tokenizer.encode(text)) if first else prompt.tokens
        return Dialogue(shown, text, ids, len(shown))

    def prompt_messages(self, prompt: Prompt) -> list[Mapping[str, Any]]:
        """The messages of a row's prompt as the template sees them. Raises DataError where it refuses them."""
        return self._shown(_messages_of(prompt))

    def _shown(self, messages: tuple[Message, ...]) -> list[Mapping[str, Any]]:
        conversation = Conversation(messages, tuple(dict(tool) for tool in self.tools) or None)
        template = self.tokenizer.template(bool(self.tools))
        return [turn_of(message) for message in shown_messages(conversation, template, self.system)]

    def answered(self, dialogue: Dialogue, tokens: Sequence[int]) -> str:
        """Takes an answer into the conversation. Returns its text, a stop string and all, without its end token."""
        shown = tokens[:-1] if tokens and tokens[-1] in self.stop_ids else tokens
        text = self.tokenizer.decode([token for token in shown if token not in self.silent_ids])
        dialogue.turns.append({"role": "assistant", "content": text})
        dialogue.text += text
        dialogue.ids = (*dialogue.ids, *tokens)
        return text

    def go_on(self, dialogue: Dialogue, turns: Sequence[TurnText]) -> bool:
        """Adds the environment's reply to the conversation. Returns whether history was rewritten: then `ids` are
        replaced, else they have grown.

        Raises DataError where the template refuses it.
        """
        if not self.tokenizer.has_template:
            said = "".join(turn.text for turn in turns)
            dialogue.turns += [{"role": turn.role, "content": turn.text} for turn in turns]
            dialogue.ids = (*dialogue.ids, *self.tokenizer.encode(said))
            return False
        messages = [
            {"role": turn.role, "content": turn.text, **({"name": turn.name} if turn.name else {})} for turn in turns
        ]
        return self.extend(dialogue, messages, self.tools)

    def open(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Dialogue:
        """A conversation that somebody else has written, up to where the assistant goes on.

        Raises DataError where the template refuses it.
        """
        text = template_process().render(self.tokenizer.template(bool(tools)), messages, tools, prompt=True)
        return Dialogue(list(messages), text, tuple(self.tokenizer.encode(text)), 0)

    def extend(
        self, dialogue: Dialogue, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> bool:
        """Takes messages behind an answer into the conversation; see `go_on`."""
        dialogue.turns += messages
        template = self.tokenizer.template(bool(tools))
        if any(message["role"] == "tool" for message in messages) and not template.takes_results:
            raise DataError(
                "the chat template does not show messages of role tool. Name one that does in model.chat_template, or "
                "let the environment speak as the user"
            )
        whole = template_process().render(template, dialogue.turns, tools, prompt=True)
        place = _end_of_same(dialogue.text, whole)
        if place is None:
            dialogue.text, dialogue.ids = whole, tuple(self.tokenizer.encode(whole))
            return True
        dialogue.text += whole[place:]
        dialogue.ids = (*dialogue.ids, *self._behind(dialogue.ids, whole[place:], template.terminators))
        return False

    def _behind(self, ids: Sequence[int], text: str, terminators: Sequence[str]) -> list[int]:
        """Returns the ids of a text after an answer; the answer may have drawn the end token itself."""
        if not ids or ids[-1] not in self.stop_ids:
            return self.tokenizer.encode(text)
        closing = text.lstrip()
        terminator = next((each for each in terminators if closing.startswith(each)), None)
        if terminator is None:
            return self.tokenizer.encode(text)
        # Encoded with the end token before it: some tokenizers put a space where a text begins.
        encoded = self.tokenizer.encode(closing)
        return encoded[len(self.tokenizer.encode(terminator)) :]


def _messages_of(prompt: Prompt) -> tuple[Message, ...]:
    given = [{"role": "user", "content": prompt.prompt}] if isinstance(prompt.prompt, str) else prompt.prompt
    return parse_turns([dict(turn) for turn in given], {}, prompt.where).messages


def _end_of_same(text: str, whole: str) -> int | None:
    """The position in `whole` after all of `text`, white space aside; None where `whole` says something else."""
    if whole.startswith(text):
        return len(text)
    squeezed = _SPACES.sub("", text)
    if not _SPACES.sub("", whole).startswith(squeezed):
        return None
    place = 0
    for _ in squeezed:
        while whole[place].isspace():
            place += 1
        place += 1
    return place
