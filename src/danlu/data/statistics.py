"""The outcomes of the rows: counted while tokenising, kept with the tokens, shown before a run and by preview."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, get_args

import numpy as np

from danlu.data.messages import MESSAGE_KEYS
from danlu.recipe.sections import PreferenceObjective, PreferenceTerm, RewardObjective

MAX_EXAMPLES = 5
REPORTED_CUT_SHARE = 0.1  # of the samples that train an answer
BEYOND_POSITIONS = (
    "What lies beyond is trained at positions the model was not made for, and generate, chat and eval stop there. Set "
    "data.max_length to {positions}, or give the model more (max_position_embeddings, rope_scaling)"
)
MAX_UNREAD_KEYS = 100  # counted
SHOWN_KEYS = 8


def beyond_positions(positions: int, max_length: int, lengths: np.ndarray | None) -> list[str]:
    """Returns warnings about samples longer than the model has positions for; none where max_length keeps them out.

    positions: the most positions that the model has for a sample. lengths: [samples] tokens of each; None while they
    are not known.
    """
    if max_length <= positions:
        return []
    limit = f"data.max_length: {max_length:,} is more than the {positions:,} positions that the model has for a sample"
    advice = BEYOND_POSITIONS.format(positions=positions)
    if lengths is None:
        return [f"{limit}. {advice}"]
    lengths = np.minimum(lengths, max_length)  # packs cut joined documents
    beyond = lengths[lengths > positions]
    if not len(beyond):
        return [f"{limit}; no sample is longer than {positions:,} tokens"]
    return [
        f"{limit}: {len(beyond):,} of {len(lengths):,} samples are longer, up to {int(beyond.max()):,} tokens. {advice}"
    ]


def unread_margins(statistics: Statistics, terms: Sequence[PreferenceTerm | RewardObjective]) -> list[str]:
    """Returns warnings about rows with a margin that no term of the objective reads; none where there are no
    such rows.
    """
    rows = statistics.judgements["margin"]
    if not rows or any(term.takes_margins for term in terms):
        return []
    asked_by = [kind.model_fields["kind"].default for kind in get_args(PreferenceObjective) if kind.takes_margins]
    return [
        f"not read: 'margin' in {rows:,} row{'' if rows == 1 else 's'}, which objective "
        f"{' and '.join(term.kind for term in terms)} does not ask for. {', '.join(asked_by)} do"
    ]


@dataclass
class Statistics:
    """Counts that add up over chunks, sources and runs."""

    rows: int = 0  # read, bad ones included
    bad_rows: int = 0  # skipped because they could not be read
    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    longest: int = 0  # tokens of the longest sample
    shortened: Counter[str] = field(default_factory=Counter)  # rows longer than max_length, by what was done with them
    lost_tokens: int = 0  # cut off by truncation or dropped with their row
    dropped: Counter[str] = field(default_factory=Counter)  # rows without a sample, by reason
    reasons: Counter[str] = field(default_factory=Counter)  # tokens, by the reason for their weight
    unread: Counter[str] = field(default_factory=Counter)  # rows, by a key of their messages that is not read
    added_thoughts: int = 0  # samples that train a thought which the chat template adds to a row that has none
    added_thought_example: str = ""  # the row of the first of them
    left_out: Counter[str] = field(
        default_factory=Counter
    )  # rows, by a key of turns with text that later turns do not see
    left_out_example: str = ""  # the first of these rows
    split_prompts: int = 0  # rows with a trained answer and a generation prompt that ends inside a token
    split_prompt_example: str = ""  # the first of them, and the token
    unlike_prompts: int = 0  # rows with a trained answer that does not stand behind its whole generation prompt
    unlike_prompt_example: str = ""  # the first of them
    written_specials: Counter[str] = field(default_factory=Counter)  # samples, by a special token that their text holds
    written_special_example: str = ""  # the row of the first of them
    answers: int = 0  # samples that train an answer
    endless_answers: int = 0  # of those, samples that train no token that ends one
    endless_example: str = ""  # the first of them, and what to do
    judgements: Counter[str] = field(default_factory=Counter)  # rows: desirable, undesirable, with or without margin
    margin_example: str = ""  # the first row with a margin
    no_margin_example: str = ""  # the first pair without one
    bad_examples: list[str] = field(default_factory=list)  # the first few messages

    @property
    def trained_share(self) -> float:
        return self.trained_tokens / self.tokens if self.tokens else 0.0

    def add(self, more: Statistics) -> None:
        """Count the rows of `more` too."""
        for name in (entry.name for entry in fields(self)):
            value, added = getattr(self, name), getattr(more, name)
            if name == "longest":
                self.longest = max(value, added)
            elif name.endswith("_example"):
                setattr(self, name, value or added)
            elif name == "bad_examples":
                self.bad_examples = (value + added)[:MAX_EXAMPLES]
            elif name == "unread":
                self.unread = Counter(dict((value + added).most_common(MAX_UNREAD_KEYS)))
            else:
                setattr(self, name, value + added)

    @classmethod
    def sum_of(cls, parts: Iterable[Statistics]) -> Statistics:
        """The counts of several parts together."""
        total = cls()
        for part in parts:
            total.add(part)
        return total

    def judgement_problem(self, where: str) -> str | None:
        """Returns the fault in the judgements of all rows together, those in the files `where`; None if there
        is none.
        """
        counted = self.judgements
        if counted["margin"] and counted["no margin"]:
            pairs = counted["margin"] + counted["no margin"]
            return (
                f"{self.no_margin_example}: no 'margin', which {counted['margin']:,} of {pairs:,} rows have (the first "
                f"is {self.margin_example}); give every row one, or none"
            )
        for name, other in (("desirable", "undesirable"), ("undesirable", "desirable")):
            if counted[name] and not counted[other]:
                return (
                    f"{where}: all {counted[name]:,} answers are {name}; nothing is learnt from one label, so add "
                    f"{other} ones"
                )
        return None

    def outcome_lines(self, name: str, remarks: Iterable[str]) -> list[str]:
        """Lines on the rows of `name`: those that were dropped, then `remarks`, and the bad ones last."""
        lines = [f"{name}: {count:,} rows dropped: {reason}" for reason, count in self.dropped.items()]
        lines += [f"{name}: {line}" for line in remarks]
        if self.bad_rows:
            plural = "row" if self.bad_rows == 1 else "rows"
            lines.append(f"{name}: {self.bad_rows:,} bad {plural} skipped, the first: {self.bad_examples[0]}")
        return lines

    def cut_lines(self) -> list[str]:
        """A line about answers that are cut before their end, where they are many; else none."""
        if not self.shortened or self.endless_answers < REPORTED_CUT_SHARE * self.answers or not self.endless_answers:
            return []
        return [
            f"{self.endless_answers:,} of {self.answers:,} samples train an answer that is cut before its end, and "
            "nothing of when to stop: raise data.max_length, or leave such rows out with data.overlong: drop"
        ]

    def unread_lines(self) -> list[str]:
        """Returns lines about keys of rows and messages that seem to be meant for training and are not read."""
        if not self.unread:
            return []
        keys = [f"{name!r} in {rows:,} row{'' if rows == 1 else 's'}" for name, rows in self.unread.most_common()]
        more = f" and {len(keys) - SHOWN_KEYS} more" if len(keys) > SHOWN_KEYS else ""
        return [
            f"not read: {', '.join(keys[:SHOWN_KEYS])}{more}. The keys of a message that are read: "
            f"{', '.join(MESSAGE_KEYS)}"
        ]

    def template_lines(self) -> list[str]:
        """Returns lines about effects of the chat template and the tokenizer that are easily overlooked."""
        lines = []
        if self.added_thoughts:
            lines.append(
                f"the chat template adds a thought that the row does not have, and it is trained: in "
                f"{self.added_thoughts:,} of {self.samples:,} samples, the first {self.added_thought_example}. Where "
                "that is not meant, give rows their thoughts (reasoning_content) or name a template without them "
                "(model.chat_template)"
            )
        lines += self.left_out_lines()
        if self.split_prompts:
            lines.append(
                f"the prompt ends inside a token in {self.split_prompts:,} of {self.rows:,} rows, the first "
                f"{self.split_prompt_example}: generation goes on behind other tokens than those that are trained, and "
                "its answers can be garbage. End the prompt before its last space and begin the answer with that, or "
                "name a chat template with a generation prompt that ends in a special token or a line break "
                "(model.chat_template)"
            )
        if self.unlike_prompts:
            lines.append(
                f"answers do not begin with the end of the generation prompt in {self.unlike_prompts:,} of "
                f"{self.rows:,} rows, the first {self.unlike_prompt_example}: generation goes on behind text that was "
                "not trained. Begin these answers as the generation prompt ends (with a thought, for example), or name "
                "another chat template (model.chat_template)"
            )
        if self.written_specials:
            examples = [f"{token} in {samples:,}" for token, samples in self.written_specials.most_common(SHOWN_KEYS)]
            more = len(self.written_specials) - len(examples)
            lines.append(
                f"special tokens are written out in the text of rows, and count as the tokens themselves: "
                f"{', '.join(examples)} samples{f' and {more} more tokens' if more else ''}, the first "
                f"{self.written_special_example}. Take them out where they are not meant"
            )
        return lines

    def left_out_lines(self) -> list[str]:
        """Says which texts of a turn the chat template shows only while it is the last; empty if there are none."""
        if not self.left_out:
            return []
        keys = " and ".join(f"{key} in {rows:,}" for key, rows in self.left_out.most_common())
        return [
            f"the chat template shows text of a turn only while it is the last, and not before later turns: {keys} of "
            f"{self.rows:,} rows, the first {self.left_out_example}. A turn that is trained is a sample of its own "
            "with this text; where later turns need it too, name another template (model.chat_template)"
        ]

    def to_json(self) -> dict[str, Any]:
        """The counts as JSON values, which `from_json` reads."""
        return {
            entry.name: dict(value) if isinstance(value := getattr(self, entry.name), Counter) else value
            for entry in fields(self)
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Statistics:
        read: dict[str, Any] = {
            name: Counter(value) if isinstance(value, dict) else value for name, value in values.items()
        }
        return cls(**read)
