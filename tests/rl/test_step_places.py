"""Steps of an answer, in characters, at the tokens that complete them."""

from __future__ import annotations

import numpy as np
import pytest

from danlu.inference.episode import Episode, Segment
from danlu.inference.request import Completion
from danlu.rewards.protocol import StepRewards
from danlu.rl.step_places import token_rewards

WORDS = ["ab", "c\n", "d", "", "\n\ne", " f"]
"""Of each token; the empty one is the end."""


def decode(ids):
    return "".join(WORDS[token] for token in ids)


def completion(tokens, text):
    values = [-1.0] * len(tokens)
    return Completion(0, 0, tokens, values, values, None, [0] * len(tokens), text, "stop")


def places(ends, tokens=(0, 1, 2, 4, 5, 3), text="abc\nd\n\ne f", prompt=(2,)):
    placed = token_rewards(
        completion(list(tokens), text), prompt, {1: StepRewards(tuple(ends), tuple(map(float, ends)))}, decode
    )
    assert placed.keys() == {1} and placed[1][1].tolist() == list(ends)
    return placed[1][0].tolist()


@pytest.mark.parametrize(
    ("ends", "wanted"),
    [([3, 5, 10], [1, 2, 4]), ([2], [0]), ([4], [1]), ([1, 6, 7, 8], [0, 3, 3, 3]), ([99], [5])],
)
def test_a_step_ends_with_the_token_that_has_its_last_character(ends, wanted):
    assert places(ends) == wanted


def test_a_character_of_several_tokens_ends_with_the_last():
    pieces = {0: b"x", 1: b"\xc3", 2: b"\xa4", 3: b"y"}

    def of_bytes(ids):
        return b"".join(pieces[token] for token in ids).decode(errors="replace")

    placed = token_rewards(completion([0, 1, 2, 3], "xäy"), (0,), {0: StepRewards((2, 3), (1.0, 1.0))}, of_bytes)
    assert placed[0][0].tolist() == [2, 3]


def test_nothing_is_placed_of_no_steps_and_no_tokens():
    assert token_rewards(completion([0], "ab"), (2,), {}, decode) == {}
    assert token_rewards(completion([], ""), (2,), {0: StepRewards((1,), (1.0,))}, decode) == {}


def test_of_several_turns_the_last_is_judged():
    tokens, drawn = (0, 1, 3, 2, 2, 0, 1, 3), (True, True, True, False, False, True, True, True)
    own = [token for token, is_own in zip(tokens, drawn, strict=True) if is_own]
    values = [-1.0] * len(own)
    episode = Episode(
        0, 0, own, values, values, None, [0] * len(own), "abc\n", "stop", segments=(Segment((2,), tokens, drawn),)
    )
    placed = token_rewards(episode, (2,), {0: StepRewards((2, 3), (0.5, 1.0))}, decode)
    np.testing.assert_array_equal(placed[0][0], [3, 4])  # behind the three tokens of the first turn
