"""Attention over packed documents: each document by itself, by the kernels that suit it.

T packed tokens · H query heads · K key/value heads · G = H / K queries a key/value head serves · C head width
W width of a value · S tokens of one segment · L keys on its path
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.core.device_moves import copy_to
from danlu.core.errors import ModelError
from danlu.core.layer_types import Absorb, Keys
from danlu.core.types import Batch, Branch
from danlu.models.attention_kernels import FlashWithSinks, Kernels, documents_mask, kernels_of, padded, widened
from danlu.models.block_attention import BlockAttention, BlockSettings
from danlu.models.kernel_limits import BRANCH_ROWS
from danlu.models.segments import Document, Segment, documents_of

if TYPE_CHECKING:
    from danlu.models.blockwise import BlockwiseQueries
    from danlu.models.recurrent_order import RecurrentRuns

NOT_EXACT = (
    "numerics: exact does not hold for linear attention: its state sums tokens in chunks in training and one by one in "
    "decoding, which rounds differently. Use numerics: fast"
)


class PackedAttention:
    """Causal attention inside each document of a pack, along its branches; satisfies `danlu.core.layer_types.Attend`.

    Documents are attended one by one (where the device has one, by a kernel that takes all of them), so the cost is the
    sum of squared lengths and no mask over the pack is built. A dense block mask measured 3-6 times slower on CPU.

    boundaries: offsets of the documents in the pack, from 0 to T. trees: the branches of the documents, where a branch
    sees itself and its ancestors and nothing else; empty where each document is one branch. kernels: the kernels that
    may be used; by default all that the device has. recomputed_layers: where a kernel keeps probabilities, those of
    these are computed again in the backward pass instead.
    """

    def __init__(
        self,
        boundaries: tuple[int, ...],
        trees: tuple[Branch, ...] = (),
        kernels: Kernels | None = None,
        recomputed_layers: Container[int] = (),
    ) -> None:
        self.boundaries = boundaries
        self.documents = documents_of(boundaries, trees)
        self._has_trees = any(len(document) > 1 for document in self.documents)
        self._kernels = kernels
        self._recomputed_layers = recomputed_layers
        # An int32 copy on each device of the model, for the variable-length kernel.
        self._offsets: dict[torch.device, Tensor] = {}
        self._dealt: dict[tuple[Any, ...], list[_Part]] = {}  # see `_parts`
        self._masks: dict[tuple[torch.device, int | None], Any] = {}  # by window, for flex attention
        self._branch_masks: dict[tuple[torch.device, torch.dtype], Tensor] = {}  # see `_mask_of_branches`
        self._trees = trees

    @cached_property
    def runs(self) -> RecurrentRuns:
        """The runs of the pack, by which layers with a state go through it."""
        from danlu.models.recurrent_order import RecurrentOrder, RecurrentRuns

        return RecurrentRuns(RecurrentOrder(self.boundaries, self._trees))

    def __call__(
        self,
        layer: int,
        q: Tensor,  # [T, H, C]
        keys: Keys,  # of the same tokens
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # [T, H, W]
        k, v = keys.expanded()  # [T, K, C], [T, K, W]
        kernels = self._kernels or kernels_of(q.device)
        has_sinks = sinks is not None
        varlen = None if self._has_trees or has_sinks else kernels.varlen
        if varlen is not None and varlen.takes(q, v, window, softcap):
            longest = max(end - start for start, end in itertools.pairwise(self.boundaries))
            return varlen(q, k, v, self._offsets_on(q.device), longest, scale=scale, window=window)
        needs_flex = self._has_trees or softcap is not None or has_sinks
        if needs_flex and kernels.flex is not None and kernels.flex.takes(q, v):
            return kernels.flex(q, k, v, self._mask_on(q.device, window), scale=scale, softcap=softcap, sinks=sinks)
        parts = self._parts(kernels, scale, window, softcap, has_sinks)
        tokens = [part.tokens for part in parts]
        outputs: list[Tensor] = []
        recomputed = layer in self._recomputed_layers
        for part, own_q, own_k, own_v in zip(parts, q.split(tokens), k.split(tokens), v.split(tokens), strict=True):
            for call in part.calls:
                if isinstance(call, Segment):
                    outputs.append(self._long_segment(call, own_q, own_k, own_v, scale, kernels, sinks))
                else:
                    queries = _rows(own_q, call.first_query, call.segments[-1].stop)
                    outputs.append(BlockAttention.apply(queries, own_k, own_v, call, sinks, recomputed))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _parts(
        self, kernels: Kernels, scale: float, window: int | None, softcap: float | None, has_sinks: bool
    ) -> list[_Part]:
        """Deals the tokens to kernels; cached for all layers that are alike."""
        key = kernels, scale, window, softcap, has_sinks
        if key not in self._dealt:
            in_blocks = _takes_blocks(kernels, window, softcap, has_sinks)
            self._dealt[key] = [
                _part(run, in_blocks, scale, window, softcap) for run in _runs(self.documents, in_blocks)
            ]
        return self._dealt[key]

    def _long_segment(
        self, segment: Segment, q: Tensor, k: Tensor, v: Tensor, scale: float, kernels: Kernels, sinks: Tensor | None
    ) -> Tensor:
        """Computes the attention of a segment [S, H, W] by `scaled_dot_product_attention`; q, k, v are those of its
        whole document.
        """
        q = _rows(q, segment.start, segment.stop)
        k, v = (_concatenated([_rows(x, *part) for part in segment.path]) for x in (k, v))
        if segment.before == 0:
            return _scaled_dot_product(q, k, v, scale, kernels, sinks=sinks)
        outputs = []
        for start in range(0, len(q), BRANCH_ROWS):  # of which each but the last sees less than all keys
            rows = q[start : start + BRANCH_ROWS]
            seen = segment.before + start + len(rows)
            outputs.append(_scaled_dot_product(rows, k[:seen], v[:seen], scale, kernels, self._mask_of_branches(rows)))
        return _concatenated(outputs)

    def _offsets_on(self, device: torch.device) -> Tensor:
        if device not in self._offsets:
            self._offsets[device] = copy_to(torch.tensor(self.boundaries, dtype=torch.int32), device)
        return self._offsets[device]

    def _mask_on(self, device: torch.device, window: int | None) -> Any:
        if (device, window) not in self._masks:
            self._masks[device, window] = documents_mask(self.documents, window, device)
        return self._masks[device, window]

    def _mask_of_branches(self, like: Tensor) -> Tensor:
        """[R, W] in the type of `like`: 0 where row i sees column j, else -inf, for j <= i + W - 2 R.

        Rows with `before` keys before them have the columns from W - 2 R - `before` on as their mask, so that all
        branches and layers share one.
        """
        mask = self._branch_masks.get((like.device, like.dtype))
        if mask is None:
            width = max(segment.path_length for document in self.documents for segment in document) + 2 * BRANCH_ROWS
            hidden = torch.ones(BRANCH_ROWS, width, dtype=torch.bool, device=like.device)
            hidden = hidden.triu_(width - 2 * BRANCH_ROWS + 1)
            mask = like.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
            self._branch_masks[like.device, like.dtype] = mask
        return mask


class BlockwiseAttention:
    """`PackedAttention` in blocks of keys, with `numerics: exact`; satisfies `danlu.core.layer_types.Attend`.

    boundaries, trees: as in `PackedAttention`. A branch's keys are those of its path, and blocks are cut by position
    on it, so that a branch has the bits that its tokens have without siblings. Gradients are those of
    `PackedAttention`, computed by it: the same function up to rounding.
    """

    def __init__(self, boundaries: tuple[int, ...], trees: tuple[Branch, ...] = ()) -> None:
        self._packed = PackedAttention(boundaries, trees)
        self._queries: BlockwiseQueries | None = None

    @property
    def runs(self) -> RecurrentRuns:
        """Raises ModelError."""
        raise ModelError(NOT_EXACT)

    def __call__(
        self,
        layer: int,
        q: Tensor,  # [T, H, C]
        keys: Keys,  # of the same tokens
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # [T, H, W]
        if self._queries is None or self._queries.device != q.device:
            from danlu.models.blockwise import BlockwiseQueries, QueryRun

            segments = [segment for document in self._packed.documents for segment in document]
            runs = [QueryRun(segment.stop - segment.start, segment.before, segment.path) for segment in segments]
            self._queries = BlockwiseQueries(runs, q.device)
        options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
        if (absorb := exact_absorb(keys)) is not None:
            with torch.no_grad():
                k, v = absorbed_keys(keys.stored, absorb)
                mixed = self._queries.attend(absorb.queries(q, exact=True), k, v, sinks=sinks, **options)
                out = absorb.outputs(mixed, exact=True)
            if torch.is_grad_enabled():
                out = _WithGradientOf.apply(out, self._packed(layer, q, keys, sinks=sinks, **options))
            return out
        k, v = keys.expanded()
        out = _Blockwise.apply(q, k, v, sinks, self._queries, self._packed, options)
        return out


def exact_absorb(keys: Keys) -> Absorb | None:
    """Returns the map from queries to stored values that `numerics: exact` uses, in training and in decoding alike.

    None: keys and values are expanded. That is so where an adapter is merged into the map, as it may have dropout,
    which a merged adapter has not.
    """
    return None if keys.absorb is None or keys.absorb.merges_adapter else keys.absorb


def absorbed_keys(stored: Sequence[Tensor], absorb: Absorb) -> tuple[Tensor, Tensor]:
    """Returns keys [.., L] and values [.., value_width] of attention over stored values; both are views."""
    (rows,) = stored
    return rows, rows[..., : absorb.value_width]


class _WithGradientOf(torch.autograd.Function):
    """The first tensor's values, with the gradient of the second, which is the same function up to rounding."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, other: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        return None, grad


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        queries: BlockwiseQueries,
        packed: PackedAttention,
        options: dict[str, Any],
    ) -> Tensor:
        ctx.packed, ctx.options = packed, options
        ctx.save_for_backward(q, k, v, *(() if sinks is None else (sinks,)))
        return queries.attend(q, k, v, sinks=sinks, **options)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            q, k, v, *sinks = inputs
            out = ctx.packed(0, q, Keys((k, v)), sinks=sinks[0] if sinks else None, **ctx.options)
        gradients = torch.autograd.grad(out, inputs, grad)
        return *gradients, *(() if sinks else (None,)), None, None, None


def attend_for(
    batch: Batch, *, exact: bool = False, recomputed_layers: Container[int] = ()
) -> PackedAttention | BlockwiseAttention:
    """The attention that models are given for a packed batch, in training, evaluation and measuring alike.

    exact: whether a token's bits are to be those that it has in decoding; its gradients keep probabilities only while
        they are computed, of one layer. recomputed_layers: as `PackedAttention` has it.
    """
    if exact:
        return BlockwiseAttention(batch.boundaries, batch.trees)
    return PackedAttention(batch.boundaries, batch.trees, recomputed_layers=recomputed_layers)


def _scaled_dot_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    kernels: Kernels,
    branch_mask: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of q [S, H, C] over k [L, K, C], v [L, K, W] by torch's kernel, the last query at the last key.

    branch_mask: of `PackedAttention._mask_of_branches`, needed where L > S. sinks: not with one.
    """
    length, before, width = len(q), len(k) - len(q), v.shape[2]
    # The padding of q, k and v comes after every real query, which does not see it.
    q, k, v = (padded(x, kernels.document_multiple) for x in (q, k, v))
    # Where widths differ torch takes a kernel that keeps all scores (CPU) or has none for some types (CUDA). Features
    # that are zeros change neither scores nor what is asked for of the values.
    q, k, v = (widened(x, max(q.shape[2], width)) for x in (q, k, v))
    mask = None
    if branch_mask is not None:
        first = branch_mask.shape[1] - 2 * branch_mask.shape[0] - before
        mask = branch_mask[: len(q), first : first + len(k)]
        if q.device.type != "cpu":  # its kernels want rows of a mask aligned
            mask = mask.contiguous()
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, S or L, C]
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and q.dtype not in kernels.grouped_heads:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        groups = 1
    if sinks is not None:
        out = FlashWithSinks.apply(q, k, v, sinks, scale)
    else:
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=groups > 1
        )
    out = out.squeeze(0).transpose(0, 1)[:length]
    return out if out.shape[2] == width else out[..., :width]


def _rows(x: Tensor, start: int, stop: int) -> Tensor:
    """x[start:stop]; x itself where that is all of it, for a slice would have its gradient copied."""
    return x if (start, stop) == (0, len(x)) else x[start:stop]


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _takes_blocks(
    kernels: Kernels, window: int | None, softcap: float | None, has_sinks: bool
) -> Callable[[Segment], bool]:
    """Returns a function that says whether `BlockAttention` computes a segment.

    torch's kernels know no windows and no softcaps. They know sinks only if they return the logsumexp, and not behind a
    mask of branches. Other segments are computed in blocks where they have no more scores than a short document: a
    short completion behind a long shared prefix too.
    """
    most_scores = max(0, kernels.short_document) ** 2

    def takes(segment: Segment) -> bool:
        keys = segment.path_length
        is_short = (segment.stop - segment.start) * keys <= most_scores
        no_sinks = has_sinks and (segment.before > 0 or not kernels.has_sinks)
        return is_short or no_sinks or softcap is not None or (window is not None and window < keys)

    return takes


def _runs(documents: Sequence[Document], in_blocks: Callable[[Segment], bool]) -> list[Document]:
    """Segments of as many documents in a row as are done in blocks alone; those of every other one by itself."""
    runs: list[Document] = []
    open_run = False
    for document in documents:
        joins = all(map(in_blocks, document))
        if joins and open_run:
            runs[-1] += document
        else:
            runs.append(document)
        open_run = joins
    return runs


@dataclass(frozen=True)
class _Part:
    """Tokens that see nothing outside them."""

    tokens: int
    calls: tuple[BlockSettings | Segment, ...]
    """The calls of kernels, in order: segments done in blocks together, every other one by itself, with offsets into
    the part.
    """


def _part(
    run: Document, in_blocks: Callable[[Segment], bool], scale: float, window: int | None, softcap: float | None
) -> _Part:
    begin, end = run[0].start, run[-1].stop
    calls: list[BlockSettings | Segment] = []
    for blocks, several in itertools.groupby((segment.moved(-begin) for segment in run), in_blocks):
        segments = tuple(several)
        calls += [BlockSettings(segments, scale, window, softcap)] if blocks else segments
    return _Part(end - begin, tuple(calls))


def visible(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """[queries, keys] bool: True where a query sees a key, when the last query stands at the last key.

    A query sees itself and everything before it, or with a window itself and `window - 1` tokens before it.
    """
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return mask if window is None else mask.triu(keys - queries + 1 - window)
