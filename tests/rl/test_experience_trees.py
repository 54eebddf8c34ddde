"""Answers as trees: tokens, weights, columns and supports where they belong, and the same again from a checkpoint."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from danlu.core.types import ROUTES, Branch
from danlu.inference.episode import Episode, Segment
from danlu.inference.request import Completion
from danlu.inference.support import Support
from danlu.objectives.policy import answer_counts
from danlu.rl.experience_trees import (
    SAMPLED,
    SUPPORT,
    answer_tree,
    items_from_tensors,
    items_to_tensors,
    with_routes,
    with_supports,
)


def completion(tokens, drawn, support=None):
    return Completion(0, 0, list(tokens), list(drawn), list(drawn), support, [0] * len(tokens), "", "stop")


ANSWERS = [completion([7, 8], [-0.5, -1.0]), completion([9], [-2.0])]


def test_a_tree_has_the_prompt_as_its_stem():
    (sample,) = answer_tree([3, 4, 5], ANSWERS, "rows.jsonl row 1", {"reward": [1.0, 0.0]}).samples
    assert sample.tokens.tolist() == [3, 4, 5, 7, 8, 9]
    assert sample.weights.tolist() == [0, 0, 0, 1, 1, 1]
    assert sample.branches == (Branch(-1, 0, 3), Branch(0, 3, 5), Branch(0, 5, 6))
    assert sample.columns[SAMPLED].tolist() == [0, 0, 0, -0.5, -1.0, -2.0]
    assert np.isnan(sample.facts["reward"][0]) and sample.facts["reward"][1:].tolist() == [1, 0]


def test_supports_have_one_width_and_none_stands_for_all():
    whole = [completion([7, 8], [-0.5, -1.0], [Support.of(np.array([1, 7]), 16), Support.of(np.array([8]), 16)])]
    items = [answer_tree([3], answers, "row", {"reward": [0.0] * len(answers)}) for answers in (whole, ANSWERS)]
    first, second = (item.samples[0].columns[SUPPORT] for item in with_supports(items, [whole, ANSWERS]))
    assert first.tolist() == [[-1, -1], [1, 7], [8, -1]]
    assert second.tolist() == [[-1, -1]] * 4
    assert SUPPORT not in with_supports(items[1:], [ANSWERS])[0].samples[0].columns


def numbered(count, start=0):
    """Routes [count, 2, 1] that count up."""
    return np.arange(start, start + 2 * count, dtype=np.int16).reshape(count, 2, 1)


def test_routes_stand_at_their_tokens():
    """The last token of each branch is not read by the rollout; the prompt's are those of the first answer with any."""
    first = replace(completion([7, 8], [-0.5, -1.0]), routes=numbered(4))
    second = replace(completion([9], [-2.0]), routes=numbered(3, 100))
    answers = [[first, second], [completion([9], [-2.0]), second]]
    items = [answer_tree([3, 4, 5], of_item, "row", {"reward": [0.0, 0.0]}) for of_item in answers]
    one, other = (item.samples[0].columns[ROUTES] for item in with_routes(items, answers, [[3, 4, 5]] * 2))
    assert one.dtype == np.int16 and one[:, 0, 0].tolist() == [0, 2, 4, 6, -1, -1]
    assert other[:, 1, 0].tolist() == [101, 103, 105, -1, -1]
    nothing = with_routes(items, [ANSWERS, ANSWERS], [[3, 4, 5]] * 2)
    assert all(ROUTES not in item.samples[0].columns for item in nothing)
    again = items_from_tensors(items_to_tensors(with_routes(items, answers, [[3, 4, 5]] * 2)), ["a", "b"])
    np.testing.assert_array_equal(again[0].samples[0].columns[ROUTES], one, strict=True)


def test_routes_of_an_episode_are_those_of_its_segments():
    """A turn, what the environment said (6), a turn; then with a history that was rewritten a third one."""
    segments = (
        Segment((3, 4, 5), (7, 6, 8), (True, False, True)),
        Segment((3, 4, 9, 9), (2,), (True,)),
    )
    episode = Episode(
        0, 0, [7, 8, 2], [0.0] * 3, [0.0] * 3, None, [0] * 3, "", "stop", routes=numbered(9), segments=segments
    )
    (item,) = with_routes([answer_tree([3, 4, 5], [episode], "row", {"reward": [1.0]})], [[episode]], [[3, 4, 5]])
    (sample,) = item.samples
    assert sample.tokens.tolist() == [3, 4, 5, 7, 6, 8, 9, 9, 2]
    assert sample.columns[ROUTES][:, 0, 0].tolist() == [0, 2, 4, 6, 8, -1, 14, 16, -1]


def test_an_episode_with_a_rewritten_history_is_one_answer():
    segments = (
        Segment((3, 4, 5), (7,), (True,)),
        Segment((3, 4, 9), (2,), (True,)),
        Segment((3, 8), (2, 6), (True,) * 2),
    )
    episode = Episode(0, 0, [7, 2, 2, 6], [0.0] * 4, [0.0] * 4, None, [0] * 4, "", "stop", segments=segments)
    plain = Completion(0, 1, [7, 8], [0.0] * 2, [0.0] * 2, None, [0, 0], "", "stop")
    facts = {"group": [0.0, 0.0], "length": [4.0, 2.0], "fresh": [1.0, 1.0], "reward": [1.0, np.nan]}
    item = answer_tree([3, 4, 5], [episode, plain], "row", facts)
    assert len(item.samples[0].branches) == 5
    assert answer_counts([item]) == {"answers": 2, "groups": 1, "fresh_tokens": 6, "rewards": 1}
    # A history that is rewritten before anything is drawn leaves the answer's facts with its first branch.
    early = replace(episode, segments=(Segment((3, 4, 5), (7,), (False,)), Segment((3, 4, 9), (2,) * 4, (True,) * 4)))
    (sample,) = answer_tree([3, 4, 5], [early, plain], "row", facts).samples
    assert np.isnan(sample.facts["length"]).tolist() == [True, False, True, False]


def test_items_come_back_from_tensors():
    items = [
        answer_tree([3, 4], ANSWERS, "a", {"reward": [1.0, np.nan]}),
        answer_tree([5], ANSWERS[:1], "b", {"reward": [0.5]}),
    ]
    tensors = items_to_tensors(items)
    again = items_from_tensors({name: tensor.clone() for name, tensor in tensors.items()}, ["a", "b"])
    for one, other in zip(items, again, strict=True):
        (sample,), (back,) = one.samples, other.samples
        assert (sample.row, sample.branches) == (back.row, back.branches)
        for name in ("tokens", "weights"):
            np.testing.assert_array_equal(getattr(sample, name), getattr(back, name), strict=True)
        for group in ("columns", "facts"):
            mine, theirs = getattr(sample, group), getattr(back, group)
            assert mine.keys() == theirs.keys()
            for name in mine:
                np.testing.assert_array_equal(mine[name], theirs[name], strict=True)
    tensors["tokens"] = tensors["tokens"] + torch.tensor(1, dtype=torch.int32)
    assert items_from_tensors(tensors, ["a", "b"])[0].samples[0].tokens.tolist() != items[0].samples[0].tokens.tolist()
