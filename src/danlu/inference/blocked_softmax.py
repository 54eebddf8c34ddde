"""The softmax of rows of logits by blocks of the vocabulary, which draws, log-probabilities and filters start from.

Over the whole vocabulary it computes the maxima of blocks, the exponentials and their sums, whatever is needed after
that. A draw finds the block by the sums, then the token in it; the likeliest tokens are found by maxima.

B sequences · V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Columns with exponentials that are summed together: a draw finds the block by the sums of blocks, then its token.
# The published vocabularies are multiples of it, or of half of it.
SUM_BLOCK = 256

# Columns of which one maximum is taken where a few likeliest tokens are looked for.
MAX_BLOCK = 64

# Largest share of a sum that is still below it after rounding.
BELOW_ONE = 1 - 2.0**-52


@dataclass(frozen=True)
class BlockSums:
    """Weights [B, V] of a distribution, not normalised, in blocks of the vocabulary, and their sums."""

    vocab_size: int
    weights: Tensor  # [B, blocks, SUM_BLOCK] float32, 0 beyond the vocabulary
    cumulative: Tensor  # [B, blocks] float64; float32 sums drift over 100k tokens

    @classmethod
    def of(cls, weights: Tensor) -> BlockSums:
        """Sums weights [B, V], at least 0."""
        return cls.of_blocks(weights.shape[1], _in_blocks(weights, 0.0))

    @classmethod
    def of_blocks(cls, vocab_size: int, weights: Tensor) -> BlockSums:
        """Sums weights [B, blocks, SUM_BLOCK]."""
        return cls(vocab_size, weights, cumsum(weights.sum(dim=2)))

    @property
    def total(self) -> Tensor:
        """The sum of all weights of each row, [B, 1] float64."""
        return self.cumulative[:, -1:]

    @property
    def probabilities(self) -> Tensor:
        """The normalised weights, [B, V] float32."""
        return self.weights.flatten(1)[:, : self.vocab_size] / self.total.float()

    def draw(self, numbers: Tensor) -> Tensor:
        """[B] int64: inverse of the cumulative distribution, in vocabulary order, at numbers [B, 1] float64 in [0, 1).

        The block is found first, then the token in it: no sums over the whole vocabulary are stored.
        """
        targets = numbers * self.total
        blocks = search(self.cumulative, targets)  # [B, 1]
        below = F.pad(self.cumulative, (1, 0)).gather(1, blocks)
        inside = cumsum(_block(self.weights, blocks))  # [B, SUM_BLOCK]
        tokens = blocks * SUM_BLOCK + search(inside, targets - below)
        return tokens.squeeze(1).clamp_(max=self.vocab_size - 1)  # as in `search`

    def rows(self, index: Tensor) -> BlockSums:
        """Those of some rows."""
        return BlockSums(self.vocab_size, self.weights[index], self.cumulative[index])


@dataclass(frozen=True)
class BlockedSoftmax:
    """exp(z - max z) of logits z [B, V] in blocks of the vocabulary."""

    maxima: Tensor  # [B, blocks] float32, of each block
    highest: Tensor  # [B, 1] float32
    exp: BlockSums

    @classmethod
    def of(cls, z: Tensor) -> BlockedSoftmax:
        """Computes the softmax of logits z [B, V] float32."""
        blocks = _in_blocks(z, float("-inf"))
        maxima = blocks.amax(dim=2)
        highest = maxima.amax(dim=1, keepdim=True)
        return cls(maxima, highest, BlockSums.of_blocks(z.shape[1], (blocks - highest.unsqueeze(2)).exp_()))

    def logprobs(self, z: Tensor, tokens: Tensor) -> Tensor:
        """[B] float32, of softmax(z) at tokens [B]."""
        return (z.gather(1, tokens.unsqueeze(1)) - self.highest - self.exp.total.log().float()).squeeze(1)

    def argmax(self, z: Tensor) -> Tensor:
        """[B] int64, of z [B, V]: the first of the largest.

        The block is found first: argmax over a row of 128256 takes a CPU twenty times as long as the maximum alone.
        """
        blocks = self.maxima.argmax(dim=1, keepdim=True)
        columns = blocks * SUM_BLOCK + torch.arange(SUM_BLOCK, device=z.device)
        inside = z.gather(1, columns.clamp_(max=z.shape[1] - 1))  # repeats of the last come after it
        return blocks.squeeze(1) * SUM_BLOCK + inside.argmax(dim=1)

    def rows(self, index: Tensor) -> BlockedSoftmax:
        """Those of some rows."""
        return BlockedSoftmax(self.maxima[index], self.highest[index], self.exp.rows(index))


def _in_blocks(x: Tensor, beyond: float) -> Tensor:
    """x [B, V] as [B, blocks, SUM_BLOCK], with a value beyond the vocabulary."""
    rest = -x.shape[1] % SUM_BLOCK
    return (F.pad(x, (0, rest), value=beyond) if rest else x).reshape(len(x), -1, SUM_BLOCK)


def _block(blocks_of_rows: Tensor, index: Tensor) -> Tensor:
    """[B, SUM_BLOCK]: block index[b] of each row of [B, blocks, SUM_BLOCK]."""
    return blocks_of_rows.gather(1, index.unsqueeze(2).expand(-1, -1, SUM_BLOCK)).squeeze(1)


def search(cumulative: Tensor, targets: Tensor) -> Tensor:
    """[B, 1]: the first column of cumulative [B, n] above targets [B, 1], never one that adds nothing.

    Targets at or above the last sum, which rounding can make, count as just below it.
    """
    columns = torch.searchsorted(cumulative, torch.minimum(targets, cumulative[:, -1:] * BELOW_ONE), right=True)
    return columns.clamp_(max=cumulative.shape[1] - 1)  # only for sums that are NaN, which the caller notices


def cumsum(x: Tensor) -> Tensor:
    """Sums [B, n] from the left, float64; torch has none on a GPU that gives the same bits each time, so where that is
    asked for it is done on the CPU."""
    if x.device.type == "cuda" and torch.are_deterministic_algorithms_enabled():
        return x.cpu().cumsum(dim=1, dtype=torch.float64).to(x.device)
    return x.cumsum(dim=1, dtype=torch.float64)


def likeliest(z: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row of z [B, V], falling, and their columns: each [B, count].

    They lie in the `count` blocks of largest maxima, so where these are a small part of the row, only they are sorted.
    """
    rows, vocab_size = z.shape
    if vocab_size % MAX_BLOCK or count * MAX_BLOCK * 2 > vocab_size:
        values, columns = z.topk(count, dim=1)
        return values, columns
    maxima = z.reshape(rows, -1, MAX_BLOCK).amax(dim=2)
    blocks = maxima.topk(count, dim=1, sorted=False).indices
    columns = (blocks.unsqueeze(2) * MAX_BLOCK + torch.arange(MAX_BLOCK, device=z.device)).view(rows, -1)
    values, order = z.gather(1, columns).topk(count, dim=1)
    return values, columns.gather(1, order)


def column(values: Sequence[float], like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[B, 1] on the device of `like`."""
    return torch.tensor(values, dtype=dtype, device=like.device).unsqueeze(1)
