"""A decision process that a language model walks through: prompts are first states, tokens are actions.

S states of the process · N prefixes, each a state of what it is unrolled to · V vocabulary
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from textbook.markov_decision_process import MarkovDecisionProcess
from textbook.planning import value_iteration
from textbook.policy_gradient import expected_return, policy_gradient
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor

from builders.reference_attention import ReferenceAttention
from danlu.models.decoder import Decoder

WORDS = ("stop", "left", "right", "wait", "harbour", "island")
STOP, LEFT, RIGHT = 0, 1, 2
STARTS = (4, 5)  # the tokens that prompts are: harbour is state 0, island state 1
TURNS = 3
"""The longest answer: by then every walk has ended."""
_NEAR, _FAR, END = 2, 3, 4
_MOVES = {
    (0, STOP): (END, 0.1),
    (0, LEFT): (_NEAR, 0.0),
    (0, RIGHT): (_FAR, -0.3),
    (1, STOP): (END, 0.2),
    (1, LEFT): (_FAR, -0.2),
    (1, RIGHT): (_NEAR, 0.0),
    (_NEAR, LEFT): (_FAR, 0.3),
    (_NEAR, RIGHT): (END, 0.3),
    (_FAR, LEFT): (END, 0.2),
    (_FAR, RIGHT): (END, 1.0),
}
"""(state, token): (next state, reward). What is not here ends the walk and pays nothing. The best walks go left, left,
right from the harbour, and right, left, right from the island; stopping at once pays more than their first step."""


def walk_process() -> MarkovDecisionProcess:
    """The process itself: S = 5, an action for each of the V = 6 words."""
    transitions, rewards = np.zeros((5, len(WORDS), 5)), np.zeros((5, len(WORDS)))
    transitions[:, :, END] = 1
    for (state, action), (following, reward) in _MOVES.items():
        transitions[state, action] = np.eye(5)[following]
        rewards[state, action] = reward
    return MarkovDecisionProcess(transitions, rewards, discount=1.0)


def walk_return(start: int, tokens: Sequence[int]) -> float:
    """What an answer earns from a prompt's token on: tokens without the one that ends a text, as rewards see it.

    Tokens behind the end of the walk earn nothing.
    """
    state, total = STARTS.index(start), 0.0
    for token in (*tokens, STOP)[:TURNS]:
        state, reward = _MOVES.get((state, token), (END, 0.0))
        total += reward
    return total


def optimal_return() -> float:
    """The mean over both prompts, by value iteration."""
    values = value_iteration(walk_process()).values
    return float(np.mean(values[: len(STARTS)]))


@dataclass(frozen=True)
class Prefixes:
    """The process as a language model sees it, which knows what was said: a tree whose states are prefixes."""

    tokens: tuple[tuple[int, ...], ...]  # N, prompt included; a walk is at its end behind the last of them
    process: MarkovDecisionProcess  # N + 1 states, the last of which is the end
    start: np.ndarray  # [N + 1] float64: both prompts are as likely

    def preferences(self, model: Decoder, *, temperature: float = 1.0, top_p: float = 1.0) -> Tensor:
        """[N, V]: logits over temperature, -inf for what top-p leaves out, with gradients; in the model's type."""
        lengths = [len(prefix) for prefix in self.tokens]
        boundaries = (0, *itertools.accumulate(lengths))
        weight = model.embed_tokens.weight
        hidden = model(
            torch.tensor([token for prefix in self.tokens for token in prefix]),
            torch.cat([torch.arange(length) for length in lengths]),
            ReferenceAttention(boundaries),
            weight.dtype,
        )
        head = weight if model.lm_head is None else model.lm_head.weight
        scaled = hidden[torch.tensor(boundaries[1:]) - 1] @ head.T / temperature
        if top_p < 1:
            ordered, index = scaled.detach().softmax(-1).sort(-1, descending=True)
            left = torch.zeros_like(scaled, dtype=torch.bool).scatter(-1, index, ordered.cumsum(-1) - ordered < top_p)
            scaled = scaled.masked_fill(~left, float("-inf"))
        return scaled

    def value(self, preferences: Tensor) -> float:
        """J: what the policy earns on average."""
        return expected_return(self.process, self._padded(preferences), self.start)

    def gradient(self, preferences: Tensor, model: Decoder) -> list[Tensor]:
        """dJ / dparameter for each parameter, by the policy gradient theorem; 0 for what was left out."""
        values = self._padded(preferences)
        exact = np.nan_to_num(policy_gradient(self.process, values, self.start))[:-1]
        left = preferences.isfinite()
        return list(torch.autograd.grad(preferences[left], model.parameters(), torch.from_numpy(exact)[left]))

    @staticmethod
    def _padded(preferences: Tensor) -> np.ndarray:
        """[N + 1, V] float64; at the end all actions are alike."""
        values = preferences.detach().double().numpy()
        return np.concatenate([values, np.zeros((1, values.shape[1]))])


def unrolled() -> Prefixes:
    """All prefixes after which a token is still to come."""
    walk = walk_process()
    others = [token for token in range(len(WORDS)) if token != STOP]
    prefixes = [
        (start, *said)
        for start in STARTS
        for length in range(TURNS)
        for said in itertools.product(others, repeat=length)
    ]
    places = {prefix: place for place, prefix in enumerate(prefixes)}
    end = len(prefixes)
    transitions, rewards = np.zeros((end + 1, len(WORDS), end + 1)), np.zeros((end + 1, len(WORDS)))
    transitions[end, :, end] = 1
    for prefix, place in places.items():
        state = STARTS.index(prefix[0])
        for token in prefix[1:]:
            state = int(walk.transitions[state, token].argmax())
        rewards[place] = walk.rewards[state]
        for token in range(len(WORDS)):
            transitions[place, token, places.get((*prefix, token), end)] = 1
    start = np.zeros(end + 1)
    start[[places[(token,)] for token in STARTS]] = 1 / len(STARTS)
    return Prefixes(tuple(prefixes), MarkovDecisionProcess(transitions, rewards, 1.0), start)


def write_words(folder: Path) -> Path:
    """A tokenizer of exactly the words, which adds nothing; `stop` ends a text, and what is no word is `wait`."""
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="wait"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens([WORDS[STOP]])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": WORDS[STOP]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def reward_file(folder: Path) -> Path:
    """A file with the reward function `walk`, which is `walk_return` of an answer's words."""
    file = folder / "rewards.py"
    file.write_text(
        f"MOVES, WORDS, STARTS, END = {_MOVES!r}, {WORDS!r}, {STARTS!r}, {END}\n\n\n"
        "def walk(completion, start, **row):\n"
        "    state, total = STARTS.index(start), 0.0\n"
        f"    for word in [*completion.split(), 'stop'][:{TURNS}]:\n"
        "        state, reward = MOVES.get((state, WORDS.index(word)), (END, 0.0))\n"
        "        total += reward\n"
        "    return total\n"
    )
    return file
