"""An exponential moving average of the weights, kept in addition to them and swapped in for evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from danlu.optim.gradients import chunks
from danlu.optim.groups import trainable

# Elements exchanged at a time: a swap then needs 4 MiB, not the size of the largest parameter.
_CHUNK = 1 << 20


class Ema:
    """The average of the weights after each update, in float32; one more copy of the trained weights in memory.

    After t updates the average is sum_i decay^(t-i) w_i / sum_i decay^(t-i): true from the first update, where it is
    w_1, and without any share of the initial weights (the usual `ema = w_0` start keeps decay^t of them). It is
    computed in place as ema += (w_t - ema) x (1 - decay) / (1 - decay^t).
    """

    def __init__(self, named_parameters: Iterable[tuple[str, torch.nn.Parameter]], decay: float) -> None:
        """Averages the trainable ones; before the first update the average is their present value."""
        self.decay = decay
        self.updates = 0
        self._parameters = dict(trainable(named_parameters))
        self._averages = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._swapped = False

    @torch.no_grad()
    def update(self) -> None:
        """Takes in the weights as they are now; call once after each optimizer step that was made."""
        assert not self._swapped, "the average would be taken of itself"
        self.updates += 1
        share = (1 - self.decay) / (1 - self.decay**self.updates)
        for name, parameter in self._parameters.items():
            self._averages[name].lerp_(parameter, share)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Puts the average into the model's parameters within the block; after it, also after an exception, they have
        their own values.

        Values are exchanged in place, chunk by chunk: views of the parameters (a decoding engine, fused weights) see
        the average too, and no second copy is made.
        """
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def state_tensors(self) -> dict[str, Tensor]:
        """The averages by parameter name; live, so a checkpoint can be read right into them.

        With them and `updates` the average goes on where it was.
        """
        assert not self._swapped, "the average is in the model now, and the weights are here"
        return dict(self._averages)

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, parameter in self._parameters.items():
            pairs = zip(chunks(parameter, _CHUNK), chunks(self._averages[name], _CHUNK), strict=True)
            for weight, average in pairs:
                saved = weight.clone()
                weight.copy_(average)
                average.copy_(saved)
        self._swapped = not self._swapped
