"""Dropout by a hash: it drops the share that it says, everywhere alike, and the same wherever a feature is computed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from danlu.adapters.dropout import Dropout, DropoutState, leave_token_keys_uncompiled

TOKENS, FEATURES = 512, 384


def mask(share: float, *, place: str = "layers.0", seed: int = 0, step: int = 0, first: int = 0) -> Tensor:
    """[T, F] True where an input is kept."""
    dropout_state = DropoutState(seed)
    dropout_state.begin(step, [(0, TOKENS)])
    dropout = Dropout(share, place, dropout_state)
    dropout.first_feature = first
    return dropout(torch.ones(TOKENS, FEATURES - first)) != 0


@pytest.mark.parametrize("share", [0.02, 0.1, 0.3, 0.5, 0.9])
def test_the_share_that_is_dropped_is_the_one_asked_for(share: float) -> None:
    kept = mask(share)
    deviation = (share * (1 - share)) ** 0.5
    assert abs(kept.double().mean() - (1 - share)) < 5 * deviation / kept.numel() ** 0.5
    for dim in (0, 1):  # and of each feature, and of each token
        means = kept.double().mean(dim)
        assert (means - (1 - share)).abs().max() < 6 * deviation / kept.shape[dim] ** 0.5


def test_what_is_kept_makes_up_for_what_is_not() -> None:
    dropout_state = DropoutState(0)
    dropout_state.begin(0, [(0, TOKENS)])
    x = Dropout(0.2, "", dropout_state)(torch.ones(TOKENS, FEATURES))
    assert set(x.unique().tolist()) == {0.0, 1.25}


@pytest.mark.parametrize("other", [{"place": "layers.1"}, {"seed": 1}, {"step": 1}, {"first": 1}])
def test_masks_of_different_places_have_nothing_in_common(other: dict[str, object]) -> None:
    one, two = mask(0.5), mask(0.5, **other)  # type: ignore[arg-type]
    both = (one[:, : two.shape[1]] == two).double()
    assert abs(both.mean() - 0.5) < 5 * 0.5 / both.numel() ** 0.5
    # Neighbouring tokens and features too.
    assert abs((one[1:] == one[:-1]).double().mean() - 0.5) < 0.01
    assert abs((one[:, 1:] == one[:, :-1]).double().mean() - 0.5) < 0.01


@pytest.mark.parametrize("first", [1, 96, 383])
def test_a_part_of_the_features_has_its_part_of_the_mask(first: int) -> None:
    assert torch.equal(mask(0.4, first=first), mask(0.4)[:, first:])
    assert not torch.equal(mask(0.4, first=first), mask(0.4)[:, : FEATURES - first])


def test_a_backward_pass_draws_the_masks_of_its_forward_pass_again() -> None:
    """Where other micro-batches came between, as in a pipeline."""
    dropout_state = DropoutState(0)
    dropout, x = Dropout(0.5, "layers.0", dropout_state), torch.ones(TOKENS, FEATURES)
    masks = []
    for pack in (0, 1, 0):
        dropout_state.begin(1, [(pack, TOKENS)])
        masks.append(dropout(x))
        dropout_state.end()
        assert dropout(x) is x
    assert torch.equal(masks[0], masks[2])
    assert not torch.equal(masks[0], masks[1])


def test_a_share_of_the_tokens_has_its_part_of_the_mask() -> None:
    """On each context rank, and where another share of the same packs was drawn before."""
    dropout_state = DropoutState(0)
    dropout = Dropout(0.5, "layers.0", dropout_state)
    shares, masks = (torch.arange(0, TOKENS, 2), torch.arange(1, TOKENS, 2)), []
    for rows in (*shares, None):
        dropout_state.begin(0, [(0, TOKENS)], rows)
        masks.append(dropout(torch.ones(TOKENS if rows is None else len(rows), FEATURES)) != 0)
    even, odd, whole = masks
    assert torch.equal(whole, mask(0.5))
    assert torch.equal(even, whole[shares[0]]) and torch.equal(odd, whole[shares[1]])
    assert not torch.equal(even, odd)


def test_packs_of_other_lengths_are_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DropoutState, "token_keys", DropoutState.token_keys)  # and restored
    assert times_compiled(lengths=(5, 6, 7)) >= 3  # control
    leave_token_keys_uncompiled()
    assert times_compiled(lengths=(5, 6, 7)) == times_compiled(lengths=(5,)) > 0


def times_compiled(lengths: tuple[int, ...]) -> int:
    from torch._dynamo.testing import CompileCounter  # seconds, once

    torch._dynamo.reset()
    counter, dropout_state = CompileCounter(), DropoutState(0)
    dropout = Dropout(0.5, "layers.0", dropout_state)
    compiled = torch.compile(lambda x: dropout(x), backend=counter, dynamic=True)
    for number, length in enumerate(lengths):
        dropout_state.begin(0, [(number, length)])
        x = torch.ones(length, FEATURES)
        assert torch.equal(compiled(x), dropout(x))
    return counter.frame_count
