"""Whether `numerics: exact` holds for a model on this machine: tried on its own weights before anything relies on it.

The same random tokens go through the model as training lays them out (a pack, a tree) and as rollouts do (prompts,
prompts in chunks, several sequences a token at a time, one alone). The outputs of each module and each attention for a
token must have the same bits every time. The first operation of a pass that does not keep this is named.

T tokens of a pass, flat · D model width · V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from danlu.core.errors import ResourceError
from danlu.core.layer_types import Attend, Keys
from danlu.core.types import Branch
from danlu.inference.exact_paged import ExactPagedAttention
from danlu.inference.pool import CachePool
from danlu.inference.scheduler import Chunk, Plan
from danlu.models.attend import BlockwiseAttention
from danlu.models.decoder import Decoder, Layer
from danlu.models.experts import Experts
from danlu.models.modules import Linear
from danlu.numerics import batch_invariant
from danlu.objectives.token_logprobs import logprobs_of_logits, token_logprobs
from danlu.objectives.vocab_slices import EXACT_SLICE_ROWS, logits_in_slices
from danlu.parallel.comm import ALONE, Group

LENGTHS = (150, 70)
"""The lengths of the two sequences: several blocks of keys, and more than one tile of rows."""
STEM = 90
"""Tokens of the longer one before its branches: they end inside a block of keys."""
CHUNKS = (37, 1, 70)
"""The chunks that the longer one is read in, before the rest."""
DECODED = 4
"""Tokens at the end that are computed one at a time."""
BLOCK = 16


def check_exact(
    model: Decoder,
    dtype: torch.dtype,
    *,
    virtual_token_ids: Sequence[int] = (),
    seed: int = 0,
    world: Group = ALONE,
) -> None:
    """Raises ResourceError naming the first operation with bits that depend on other tokens of the pass.

    virtual_token_ids: tokens that the adapter puts before every sequence. world: all processes that have a part of the
    model or a copy; each calls this, and each raises if one finds something.
    """
    own = variant_operation(model, dtype, virtual_token_ids=virtual_token_ids, seed=seed)
    problems = [problem for problem in world.all_gather_objects(own) if problem is not None]
    if problems:
        raise ResourceError(
            f"numerics: exact does not hold for this model on {next(model.parameters()).device}, with torch "
            f"{torch.__version__}: {'; '.join(dict.fromkeys(problems))}. Use numerics: fast"
        )


def variant_operation(
    model: Decoder, dtype: torch.dtype, *, virtual_token_ids: Sequence[int] = (), seed: int = 0
) -> str | None:
    """Returns the first operation with bits that depend on other tokens of the pass, and in which pass; None if there
    is none."""
    config = model.config
    if config.rotates_by_growth:
        return (
            "its rotary frequencies follow the length of the text (dynamic rotary scaling), which a rollout does not "
            "know beforehand"
        )
    if config.has_states:
        return "its linear attention sums tokens in chunks in training and one by one in decoding"
    if model.vocab_shard is not None:
        return "the head is cut over tensor ranks, and their sums over the vocabulary are added in another order"
    with batch_invariant.batch_invariant(), torch.no_grad():
        return _Check(model, dtype, tuple(virtual_token_ids), seed).first_difference()


class _Check:
    """The passes over two sequences, and the fingerprints of their computations."""

    def __init__(self, model: Decoder, dtype: torch.dtype, virtual_token_ids: tuple[int, ...], seed: int) -> None:
        self.model, self.dtype = model, dtype
        self.device = next(model.parameters()).device
        generator = torch.Generator().manual_seed(seed)
        context = model.config.context_length
        self.sequences = [
            [*virtual_token_ids, *torch.randint(model.config.vocab_size, (length,), generator=generator).tolist()][
                :context
            ]
            for length in LENGTHS
        ]
        self._fingerprints = _Fingerprints(model)
        self._reference: list[tuple[str, list[Tensor]]] = []  # of each operation in order: of each sequence [T]

    def first_difference(self) -> str | None:
        self._reference = self._by_sequence(self._packed())
        rollout = {
            "a prompt's pass": [[(0, 0, len(self.sequences[0])), (1, 0, len(self.sequences[1]))]],
            "prompts read in chunks": self._chunks(),
            "decoding of two sequences": self._decoding([0, 1]),
            "decoding of one sequence": self._decoding([0]),
        }
        # All passes are made, whatever comes of the first: other processes take part in them.
        differences: list[str] = []
        if operation := self._compare(self._tree(), [(0, 0, len(self.sequences[0]))]):
            differences.append(f"{operation}: other bits in a tree than in a pack of training")
        for name, passes in rollout.items():
            pool = self._pool()
            for chunks in passes:
                if operation := self._compare(self._paged(pool, chunks), chunks):
                    differences.append(f"{operation}: other bits in {name} than in training")
        return differences[0] if differences else None

    def _chunks(self) -> list[list[tuple[int, int, int]]]:
        """The longer sequence in chunks, and the other one whole in the first pass."""
        length = len(self.sequences[0])
        stops = [stop for stop in torch.tensor(CHUNKS).cumsum(0).tolist() if stop < length]
        passes = [[(0, start, stop)] for start, stop in zip([0, *stops], [*stops, length], strict=True)]
        passes[0].append((1, 0, len(self.sequences[1])))
        return passes

    def _decoding(self, numbers: Sequence[int]) -> list[list[tuple[int, int, int]]]:
        """The last tokens of some sequences one by one, after the pass that reads the tokens before them."""
        begins = {number: max(1, len(self.sequences[number]) - DECODED) for number in numbers}
        passes = [[(number, 0, begin) for number, begin in begins.items()]]
        for step in range(DECODED):
            chunks = [
                (number, begin + step, begin + step + 1)
                for number, begin in begins.items()
                if begin + step < len(self.sequences[number])
            ]
            passes += [chunks] if chunks else []
        return passes

    def _packed(self) -> list[tuple[str, Tensor]]:
        lengths = list(map(len, self.sequences))
        tokens = [token for sequence in self.sequences for token in sequence]
        positions = [position for length in lengths for position in range(length)]
        return self._run(tokens, positions, BlockwiseAttention((0, lengths[0], sum(lengths))))

    def _tree(self) -> list[tuple[str, Tensor]]:
        """The first sequence as a shared prefix with a branch, after another branch; the rows of that one left out."""
        sequence, other = self.sequences
        stem = min(STEM, len(sequence) - 1)
        beside = len(other) // 2
        ends = stem, stem + beside, len(sequence) + beside
        trees = (Branch(-1, 0, ends[0]), Branch(0, ends[0], ends[1]), Branch(0, ends[1], ends[2]))
        tokens = [*sequence[:stem], *other[:beside], *sequence[stem:]]
        positions = [*range(stem), *range(stem, stem + beside), *range(stem, len(sequence))]
        computed = self._run(tokens, positions, BlockwiseAttention((0, ends[2]), trees))
        return [(name, torch.cat((rows[:stem], rows[ends[1] :]))) for name, rows in computed]

    def _pool(self) -> CachePool:
        layers = [cast(Layer, layer).attention.cache for layer in self.model.layers.values()]
        return CachePool(
            layers, blocks=sum(map(len, self._blocks())), block=BLOCK, dtype=self.dtype, device=self.device
        )

    def _blocks(self) -> list[range]:
        """The blocks of the pool for each sequence, taken from its end."""
        counts = [-(-len(sequence) // BLOCK) for sequence in self.sequences]
        first, total = counts[0], sum(counts)
        return [range(total - 1, total - 1 - first, -1), range(total - first - 1, -1, -1)]

    def _paged(self, pool: CachePool, chunks: Sequence[tuple[int, int, int]]) -> list[tuple[str, Tensor]]:
        blocks = self._blocks()
        planned = (
            Chunk(number, start, stop, blocks[number], len(self.sequences[number]), len(self.sequences[number]))
            for number, start, stop in chunks
        )
        plan = Plan(chunks=tuple(planned))
        pool.carry_out(plan)
        tokens = [token for number, start, stop in chunks for token in self.sequences[number][start:stop]]
        positions = [position for _, start, stop in chunks for position in range(start, stop)]
        return self._run(tokens, positions, ExactPagedAttention(plan, pool), decodes=True)

    def _run(
        self, tokens: Sequence[int], positions: Sequence[int], attend: Attend, *, decodes: bool = False
    ) -> list[tuple[str, Tensor]]:
        """Returns a fingerprint of each token's bits, [T] int64, for each operation of a pass, in the order of their
        ends.

        decodes: whether log-probabilities are computed as a sampler does it.
        """
        columns = [torch.tensor(column, device=self.device) for column in (tokens, positions)]
        with self._fingerprints.recording(len(tokens)) as recorded:
            hidden = self.model(*columns, partial(self._fingerprints.attend, attend), self.dtype)  # [T, D]
        if self.model.config.task != "causal-lm":
            return recorded
        head, cap = self.model.head_weight, self.model.config.final_softcap
        hidden = self.model.head_input(hidden)
        targets = (columns[0] + columns[1]) % len(head)  # some token of each row, the same in every pass
        if decodes:
            logits = logits_in_slices(hidden, head, softcap=cap, slice_rows=EXACT_SLICE_ROWS)
            logprobs = logprobs_of_logits(logits, targets, temperature=0.7, slice_rows=EXACT_SLICE_ROWS)
        else:
            logprobs = token_logprobs(
                hidden, head, targets, temperature=0.7, softcap=cap, slice_rows=EXACT_SLICE_ROWS
            ).logprobs
        return [*recorded, (f"the head, product {_product(head)}, or its log-probabilities", _bits(logprobs))]

    def _by_sequence(self, computed: Sequence[tuple[str, Tensor]]) -> list[tuple[str, list[Tensor]]]:
        lengths = list(map(len, self.sequences))
        return [(name, list(rows.split(lengths))) for name, rows in computed]

    def _compare(self, computed: Sequence[tuple[str, Tensor]], chunks: Sequence[tuple[int, int, int]]) -> str | None:
        """The first operation with other bits than in the reference; `chunks` says which tokens its rows are."""
        for (name, rows), (reference_name, by_sequence) in zip(computed, self._reference, strict=True):
            assert name == reference_name, "a pass calls the same operations in the same order"
            wanted = torch.cat([by_sequence[number][start:stop] for number, start, stop in chunks])
            if not torch.equal(rows, wanted):
                return name
        return None


@dataclass
class _Fingerprints:
    """Numbers that follow from the bits of each operation's output for each token."""

    model: Decoder
    _recorded: list[tuple[str, Tensor]] = field(default_factory=list)
    _tokens: int = 0

    @contextmanager
    def recording(self, tokens: int) -> Iterator[list[tuple[str, Tensor]]]:
        """A context with a list that the operations of a pass over `tokens` tokens fill."""
        self._recorded, self._tokens = [], tokens
        # Rows of experts are sorted by expert, and may be of other processes' tokens, as many as there are here or not.
        of_experts = {
            inner for module in self.model.modules() if isinstance(module, Experts) for inner in module.modules()
        }
        handles = [
            module.register_forward_hook(partial(self._record_output, name))
            for name, module in self.model.named_modules()
            if name and module not in of_experts
        ]
        try:
            yield self._recorded
        finally:
            for handle in handles:
                handle.remove()

    def attend(self, attend: Attend, layer: int, q: Tensor, keys: Keys, **options: Any) -> Tensor:
        """Computes attention, and records its inputs and output."""
        where = f"layers.{layer}.attention"
        names = ("keys", "values") if len(keys.stored) == 2 else ("cached rows",)
        for name, rows in (("queries", q), *zip(names, keys.stored, strict=True)):
            self._record(f"{where}: its {name} (projection, adapter, norm or rotation)", rows)
        # What makes keys of stored rows runs over what is cached, so its rows are not those of the pass.
        tokens, self._tokens = self._tokens, -1
        out = attend(layer, q, keys, **options)
        self._tokens = tokens
        self._record(f"{where}: attention over cached keys", out)
        return out

    def _record_output(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            described = f"{name}, product {_product(module)}" if isinstance(module, Linear) else name
            self._record(described, output)

    def _record(self, name: str, rows: Tensor) -> None:
        if len(rows) == self._tokens:
            self._recorded.append((name, _bits(rows)))


def _product(matrix: Linear | Tensor) -> str:
    outputs, inputs = matrix.shape
    return f"[T, {inputs}] x [{inputs}, {outputs}]"


def _bits(rows: Tensor) -> Tensor:
    """[T] int64: a weighted sum of each row's bits, equal for equal bits and almost never else."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()]
    bits = rows.reshape(len(rows), -1).contiguous().view(integers).long()
    # Odd factors, of which each is a bijection modulo 2^64, into which the sum wraps.
    factors = torch.arange(bits.shape[1], device=rows.device) * 0x9E3779B97F4A7C1 | 1
    return (bits * factors).sum(1)
