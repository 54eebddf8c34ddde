"""Prompts as tokens that a model continues: a text as it stands, or a conversation by the chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from danlu.core.errors import DataError
from danlu.data.chat_template import Turn, render_begun
from danlu.data.messages import Conversation, turn_of
from danlu.data.render import half_character, shown_messages
from danlu.data.shown_texts import texts_left_out
from danlu.data.tokenizer import Tokenizer


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of plain text to continue, after the beginning-of-text token where the tokenizer adds one.

    Empty text becomes that token alone, where there is one. Raises DataError where there is none, and for text that has
    no UTF-8.
    """
    tokens = encode_utf8(tokenizer, text)
    if tokenizer.bos_id is not None and (tokenizer.adds_bos or not tokens) and tokens[:1] != [tokenizer.bos_id]:
        return [tokenizer.bos_id, *tokens]
    if not tokens:
        raise DataError(
            f"{tokenizer.path}: the prompt is empty, and this tokenizer has no beginning-of-text token: "
            "give at least one character"
        )
    return tokens


def encode_conversation(tokenizer: Tokenizer, conversation: Conversation, system: str | None = None) -> list[int]:
    """The tokens of a conversation by the chat template, with its generation prompt for the assistant; of one that ends
    in the assistant's turn up to the end of that, which the answer goes on with.

    system: the system message of a conversation without one.
    Raises DataError where there is no template, or it refuses the conversation or has no place for its tools or calls,
    and for text that has no UTF-8.
    """
    # The template writes the beginning-of-text token itself.
    return encode_utf8(tokenizer, _rendered(tokenizer, conversation, system)[1])


def keys_left_out(tokenizer: Tokenizer, conversation: Conversation, system: str | None = None) -> tuple[str, ...]:
    """The keys of messages with text that the prompt of a conversation does not show, as they are not the last.

    Raises DataError for text that the chat template shows of no message.
    """
    turns, text = _rendered(tokenizer, conversation, system)
    template = tokenizer.template(bool(conversation.tools))
    left_out = texts_left_out(turns, conversation.tools, template, text, prompt=not _ends_in_answer(turns))
    return tuple(dict.fromkeys(part.key for part in left_out))


def _rendered(tokenizer: Tokenizer, conversation: Conversation, system: str | None) -> tuple[list[dict[str, Any]], str]:
    """Returns the messages of a conversation as the chat template sees them, and the prompt that it writes of them."""
    template = tokenizer.template(bool(conversation.tools))
    turns = [turn_of(message) for message in shown_messages(conversation, template, system)]
    if _ends_in_answer(turns):
        return turns, render_begun(lambda marked: template.render(marked, conversation.tools), turns)
    return turns, template.render(turns, conversation.tools, prompt=True)


def _ends_in_answer(turns: Sequence[Turn]) -> bool:
    return bool(turns) and turns[-1]["role"] == "assistant"


def encode_utf8(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text as it stands. Raises DataError for one that has no UTF-8: with half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(half_character(error)) from None
    return tokenizer.encode(text)


def shorten_conversation(conversation: Conversation, fits: Callable[[Conversation], bool]) -> Conversation | None:
    """Returns the conversation without as many of its first exchanges as it takes to fit; None if the last user turn
    does not fit.

    The rest begins with a turn of the user; system messages stay before it.
    """
    messages = conversation.messages
    system = tuple(message for message in messages if message.role == "system")
    users = [number for number, message in enumerate(messages) if message.role == "user"]
    shorter = (replace(conversation, messages=(*system, *messages[start:])) for start in users[1:])
    longest = next(filter(fits, shorter), None)
    if longest is not None or not users:
        return longest
    question, *rest = conversation.messages[users[-1] :]

    def asking(text: str) -> Conversation:
        return replace(conversation, messages=(*system, replace(question, content=text), *rest))

    text = shorten_text(question.content, lambda text: fits(asking(text)))
    return None if text is None else asking(text)


def shorten_text(text: str, fits: Callable[[str], bool]) -> str | None:
    """The longest end of a text that fits, up to the place where it is cut; None if not even its last character does.

    fits: true of every end that is shorter than one of which it is true, nearly: tokens at the cut may differ.
    """
    fewest, most = 1, len(text)  # characters to leave out: `most` would leave nothing
    while fewest < most:
        middle = (fewest + most) // 2
        fewest, most = (fewest, middle) if fits(text[middle:]) else (middle + 1, most)
    return text[fewest:] if fewest < len(text) and fits(text[fewest:]) else None
