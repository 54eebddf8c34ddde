"""Grammars that answers have to follow: the tokens that each may go on with, computed by llguidance.

A grammar is text, as llguidance serializes one: `json_grammar` and its neighbours make it. The package is optional
(`pip install 'danlu[serve]'`), and imported where the first grammar is compiled.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from danlu.core.errors import DataError, ResourceError
from danlu.data.thoughts import THOUGHTS, opened_thought

if TYPE_CHECKING:
    from danlu.data.tokenizer import Tokenizer

MAX_GRAMMAR_CHARACTERS = 256 * 2**10
"""The longest grammar that is compiled. A schema of some thousand keys is shorter."""
PROMPT_END = 32
"""The tokens at the end of a prompt that are read for a thought which it opens."""
COMPILED_GRAMMARS = 64
"""The number of compiled grammars that are kept."""
WHITESPACE = r"( |\n[ \t]{0,64})"
"""The white space between two tokens of JSON, as compact and indented JSON has it: bounded, so that a weak model does
not fill its answer with it."""


# -- grammars ----------------------------------------------------------------------------------------------------------


def json_grammar(schema: Mapping[str, Any]) -> str:
    """The grammar of JSON values that a JSON schema describes. An object of any keys: `{"type": "object"}`."""
    return json.dumps({"grammars": [{"json_schema": _with_bounded_space(schema)}]})


def regex_grammar(pattern: str) -> str:
    """The grammar of texts that match a regular expression as a whole. Raises ResourceError without llguidance."""
    return lark_grammar(f"start: /{require_llguidance().regex_to_lark(pattern)}/")


def choice_grammar(choices: Sequence[str]) -> str:
    """The grammar of texts that are one of several."""
    return lark_grammar(f"start: {' | '.join(map(literal, choices))}")


def lark_grammar(rules: str) -> str:
    """The grammar of rules in llguidance's dialect of Lark, of which `start` is the whole answer."""
    return json.dumps({"grammars": [{"lark_grammar": rules}]})


def json_rule(schema: Mapping[str, Any]) -> str:
    """JSON by a schema, as a part of a rule in Lark."""
    return f"%json {json.dumps(_with_bounded_space(schema))}"


def literal(text: str) -> str:
    """A text as it stands, as a part of a rule in Lark."""
    return json.dumps(text, ensure_ascii=False)


def special_token(token: int) -> str:
    """A token that no text is, as a part of a rule in Lark."""
    return f"<[{token}]>"


def after_thought(grammar: str, end: str, end_id: int | None = None) -> str:
    """A grammar that begins behind a thought that the prompt has opened: any text, its end, and white space first.

    end: the text that ends the thought. end_id: its token, where it is a special one.
    """
    (answer,) = json.loads(grammar)["grammars"]
    if end_id is None:
        thought = f"thought[lazy]: /(?s:.*){re.escape(end).replace('/', chr(92) + '/')}/"
    else:
        thought = f"thought: /(?s:.*)/ {special_token(end_id)}"
    rules = f"start: thought blank @answer\n{thought}\nblank: /[ \\n]{{0,4}}/\n"
    return json.dumps({"grammars": [{"lark_grammar": rules}, {**answer, "name": "answer"}]})


def after_opened_thought(grammar: str, tokenizer: Tokenizer, prompt: str) -> str:
    """The grammar of answers to a prompt: behind the thought that it opens, where it ends in one."""
    opened = opened_thought(prompt)
    if opened is None:
        return grammar
    end_id = tokenizer.vocabulary.get(THOUGHTS[opened])
    return after_thought(grammar, THOUGHTS[opened], end_id if end_id in tokenizer.special_ids else None)


def form_grammar(kinds: Mapping[str, Any]) -> str:
    """The grammar of a form: of `json_schema`, `regex`, `choice` or `grammar` with its value, which is the only one."""
    makers: dict[str, Callable[[Any], str]] = {
        "json_schema": json_grammar,
        "regex": regex_grammar,
        "choice": choice_grammar,
        "grammar": lark_grammar,
    }
    ((kind, value),) = kinds.items()
    return makers[kind](value)


def shared_lark(grammar: str) -> str:
    """A grammar as one text in llguidance's dialect of Lark, which servers with another release of llguidance read
    alike: JSON has any white space between its tokens, since releases bound it in different ways (1.7 lets a pattern of
    white space repeat, 1.9 does not).
    """
    first, *rest = json.loads(grammar)["grammars"]
    rules = _shared_rules(first)
    for answer in rest:  # behind a thought
        inner = _shared_rules(answer) if "json_schema" in answer else f"%lark {{\n{_shared_rules(answer)}\n}}"
        rules = f"{rules.replace('@' + answer['name'], answer['name'], 1)}{answer['name']}: {inner}\n"
    if "json_schema" in first:
        rules = f"start: {rules}"
    # By which servers tell Lark from other ways to write a grammar.
    return rules if "%llguidance" in rules else f"%llguidance {{}}\n{rules}"


def _shared_rules(grammar: Mapping[str, Any]) -> str:
    if "lark_grammar" in grammar:
        return str(grammar["lark_grammar"])
    schema = {key: value for key, value in grammar["json_schema"].items() if key != "x-guidance"}
    return f"%json {json.dumps(schema)}"


def check_grammar(grammar: str) -> None:
    """Raises DataError for a grammar that no tokenizer could follow, ResourceError where llguidance is missing."""
    if problem := require_llguidance().LLMatcher.validate_grammar(grammar):
        raise DataError(f"the grammar cannot be followed: {_first_line(problem)}")


def prompt_grammar(kinds: Mapping[str, Any], tokenizer: Tokenizer, prompt: Sequence[int]) -> str:
    """The grammar of a form for answers to a prompt [S]."""
    return after_opened_thought(form_grammar(kinds), tokenizer, tokenizer.decode(prompt[-PROMPT_END:]))


def _with_bounded_space(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}


# -- matchers ----------------------------------------------------------------------------------------------------------


class TokenMatcher:
    """The state of one answer in its grammar."""

    def __init__(self, matcher: Any, end_ids: frozenset[int]) -> None:
        self.matcher = matcher
        self._end_ids = end_ids
        self.is_complete = False
        """Whether the answer has ended: by an end token, or where there is none because nothing may follow."""

    @property
    def problem(self) -> str | None:
        """The reason why the answer cannot go on by its grammar; None where it can."""
        return _first_line(self.matcher.get_error()) if self.matcher.is_error() else None

    def copy(self) -> TokenMatcher:
        """The same state, which goes on by itself."""
        copied = TokenMatcher(self.matcher.deep_copy(), self._end_ids)
        copied.is_complete = self.is_complete
        return copied

    def accept(self, token: int) -> None:
        """Takes the next token of the answer. A token that the grammar does not allow is a `problem`."""
        self.matcher.consume_token(token)
        self.is_complete = self.ended_by(token) or (not self._end_ids and self.matcher.is_stopped())

    def ended_by(self, token: int) -> bool:
        """Whether a token ends every answer."""
        return token in self._end_ids


class Grammars:
    """Compiles grammars for the tokens of one tokenizer. Safe for several threads.

    Args:
        vocab_size: the model's, which may have rows that no token of the tokenizer belongs to.
        end_ids: tokens that end an answer; they are allowed where the grammar is complete.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Collection[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._end_ids = frozenset(end_ids)
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._lock = Lock()

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""
        return self._end_ids

    def ended_by_eos(self) -> Grammars:
        """The same for other servers with llguidance, which end an answer at the tokenizer's eos_token alone.

        Raises DataError for a tokenizer that has none.
        """
        eos_id = self._tokenizer.eos_id
        if eos_id is None:
            raise DataError(
                f"{self._tokenizer.path}: this tokenizer has no eos_token, at which vLLM and SGLang end an answer in a "
                "form. Add it to tokenizer_config.json, there too, or use engine: embedded"
            )
        return self if self._end_ids == {eos_id} else Grammars(self._tokenizer, self._vocab_size, {eos_id})

    def compile(self, grammar: str) -> None:
        """Compiles a grammar, which `matcher` then has ready.

        Raises DataError for one that is wrong, that is too large, and that no answer can follow; ResourceError where
        llguidance is not installed.
        """
        with self._lock:
            self._find(grammar)

    def matcher(self, grammar: str) -> TokenMatcher:
        """The state at the beginning of an answer. Raises the errors of `compile`."""
        with self._lock:
            return TokenMatcher(self._find(grammar).deep_copy(), self._end_ids)

    def _find(self, grammar: str) -> Any:
        if grammar in self._compiled:
            self._compiled.move_to_end(grammar)
        else:
            self._compiled[grammar] = self._compile(grammar)
            if len(self._compiled) > COMPILED_GRAMMARS:
                self._compiled.popitem(last=False)
        return self._compiled[grammar]

    def _compile(self, grammar: str) -> Any:
        if len(grammar) > MAX_GRAMMAR_CHARACTERS:
            raise DataError(
                f"the grammar has {len(grammar):,} characters; more than {MAX_GRAMMAR_CHARACTERS:,} are not compiled. "
                "Give a smaller schema"
            )
        llguidance = require_llguidance()
        matcher = llguidance.LLMatcher(self._token_trie, grammar, log_level=0)
        if matcher.is_error():
            raise DataError(f"the grammar cannot be followed: {_first_line(matcher.get_error())}")
        first = matcher.deep_copy()
        allowed = _ids(np.frombuffer(first.compute_bitmask(), np.uint8))
        if first.is_error() or not np.isin(allowed, list(self._end_ids), invert=True).any():
            raise DataError("the grammar allows no answer: no token of this model may begin one")
        return matcher

    @cached_property
    def _token_trie(self) -> Any:
        """The tokens as llguidance has them: a second for a vocabulary of 150,000."""
        llguidance = require_llguidance()
        try:
            return llguidance.LLTokenizer(
                self._tokenizer.fast.to_str(), n_vocab=self._vocab_size, eos_token=sorted(self._end_ids) or None
            )
        except ValueError as error:
            raise DataError(
                f"{self._tokenizer.path}: a grammar needs a tokenizer of bytes, as byte-level BPE is or SentencePiece "
                f"with byte fallback: {_first_line(str(error))}"
            ) from None


def require_llguidance() -> Any:
    """The package llguidance. Raises ResourceError where it is not installed."""
    try:
        import llguidance
    except ModuleNotFoundError:
        raise ResourceError(
            "a grammar (response_format, structured_outputs, rollout.format) needs the package llguidance, which is "
            "not installed: pip install 'danlu[serve]'"
        ) from None
    return llguidance


def _ids(bits: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(bits, bitorder="little"))


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0]
