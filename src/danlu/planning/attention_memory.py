"""The tensors that attention keeps for its backward pass, by kernel, in closed form. Imports no torch.

On a CPU, `models.attend` computes short documents, windows and softcaps in blocks of query rows
(`models.block_attention`), and each longer document by torch's flash kernel. On a GPU a flash kernel takes all of them.

H query heads · K key/value heads · C head width · W width of a value
"""

from __future__ import annotations

from danlu.models.kernel_limits import (
    BLOCK_ROWS,
    GROUP_ELEMENTS,
    ROW_MULTIPLE,
)
from danlu.models.layer_spec import LayerSpec
from danlu.models.mixer_spec import Delta, Factorized, Heads, Latent
from danlu.models.operations import Operation
from danlu.planning.batch_shape import BatchShape, ContextCut, DocumentRun

_FLOAT32 = 4


def attention_kept(
    spec: LayerSpec, operation: Operation, batch: BatchShape, degree: int, *, again: bool
) -> tuple[tuple[str, ...], int, int]:
    """The values that attention keeps: (names of the list, further elements, further float32 elements).

    degree: tensor ranks that share the heads. again: whether probabilities are computed again in the backward pass.
    """
    mixer = spec.mixer
    assert not isinstance(mixer, Delta), "a recurrence has no pairs of tokens"
    heads = mixer.heads // degree
    groups = max(1, mixer.kv_heads // degree)
    values = mixer.v_head_dim if isinstance(mixer, Latent) else mixer.head_dim
    if batch.context is not None:
        return _context(operation, batch, batch.context, heads, groups * (mixer.head_dim + values), values)
    if batch.kernels == "flash":
        return _flash(operation, batch, mixer, heads, groups, values)
    return _cpu(operation, batch, mixer, heads, groups, values, again=again)


def _context(
    operation: Operation, batch: BatchShape, cut: ContextCut, heads: int, keys: int, values: int
) -> tuple[tuple[str, ...], int, int]:
    """Tiles keep queries, keys, values, the output and a logsumexp of each row; gathered keys are kept too, and where
    heads are exchanged the output of a rank's heads next to that of its tokens.

    keys: numbers of the keys and values of a token.
    """
    elements = batch.tokens * keys * (cut.ring - 1) * cut.gathers
    elements += batch.tokens * heads * values * (cut.heads > 1)
    return (*operation.reads, operation.makes[0].name), elements, batch.tokens * heads


def _flash(
    operation: Operation, batch: BatchShape, mixer: Heads | Latent | Factorized, heads: int, groups: int, values: int
) -> tuple[tuple[str, ...], int, int]:
    """A flash kernel keeps queries, keys, values, its output and a logsumexp of each row."""
    tokens, size = batch.tokens, mixer.head_dim
    elements = 0
    names = (*operation.reads, operation.makes[0].name)
    if values != size:  # the kernel knows one width: values are filled up, and so is the output
        names = operation.reads[:2]
        elements = tokens * size * (groups + heads)
    elif groups != heads and not batch.grouped_heads:
        names = (operation.reads[0], operation.makes[0].name)
        elements = 2 * tokens * heads * size
    return names, elements, tokens * heads


def _cpu(
    operation: Operation,
    batch: BatchShape,
    mixer: Heads | Latent | Factorized,
    heads: int,
    groups: int,
    values: int,
    *,
    again: bool,
) -> tuple[tuple[str, ...], int, int]:
    """Short documents, windows and softcaps go by blocks, which keep probabilities; each longer document by torch's
    flash kernel, which keeps copies that are filled up, and a logsumexp of each row."""
    elements = float32 = 0
    has_sinks = isinstance(mixer, Heads) and mixer.sinks
    in_blocks = [
        all(_goes_by_blocks(run, mixer, batch.short_document) for run in document) for document in batch.documents
    ]
    calls = sum(not own or not before for own, before in zip(in_blocks, [False, *in_blocks], strict=False))
    names = set[str]()
    for document, blocks in zip(batch.documents, in_blocks, strict=True):
        for run in document:
            if blocks or _goes_by_blocks(run, mixer, batch.short_document):
                names |= set(operation.reads)
                if not again:
                    pairs, rows = block_pairs(run, mixer.window)
                    elements += heads * pairs * (2 if mixer.softcap is not None else 1)
                    float32 += heads * rows if has_sinks else 0
                continue
            own, more, statistics = _cpu_flash(
                operation, run, mixer, heads, groups, values, multiple=batch.document_multiple, alone=calls == 1
            )
            names |= own
            elements += more
            float32 += statistics
    return tuple(name for name in (*operation.reads, operation.makes[0].name) if name in names), elements, float32


def _goes_by_blocks(run: DocumentRun, mixer: Heads | Latent | Factorized, short: int) -> bool:
    keys = run.tokens + run.before
    has_sinks = isinstance(mixer, Heads) and mixer.sinks
    is_windowed = mixer.window is not None and mixer.window < keys
    is_short = run.tokens * keys <= max(0, short) ** 2
    return is_short or is_windowed or mixer.softcap is not None or (has_sinks and run.before > 0)


def _cpu_flash(
    operation: Operation,
    run: DocumentRun,
    mixer: Heads | Latent | Factorized,
    heads: int,
    groups: int,
    values: int,
    *,
    multiple: int,
    alone: bool,
) -> tuple[set[str], int, int]:
    """One long document in torch's kernel.

    multiple: of rows, to which they are filled up. alone: whether its output is that of the whole micro-batch.
    """
    size = max(mixer.head_dim, values)
    filled = -(-run.tokens // multiple) * multiple
    queries, keys, of_values = operation.reads
    names, elements = set[str](), 0
    for name, count, width in ((queries, heads, mixer.head_dim), (keys, groups, mixer.head_dim)):
        if filled == run.tokens and width == size:
            names.add(name)
        else:
            elements += filled * count * size
    if filled == run.tokens and values == size:
        names.add(of_values)
    else:
        elements += filled * groups * size
    if alone and values == size:
        names.add(operation.makes[0].name)
        elements += (filled - run.tokens) * heads * size
    else:
        elements += filled * heads * size
    return names, elements, heads * filled


def block_pairs(run: DocumentRun, window: int | None) -> tuple[int, int]:
    """(pairs of queries and keys, query rows) of the blocks that attention cuts a run into (`models.block_attention`).

    Rows of a block are filled up to a multiple of `ROW_MULTIPLE`, and keys by as many; those of a branch once more
    before the first.
    """
    pairs = rows = 0
    window = None if window is None or window >= run.tokens + run.before else window
    for start in range(0, run.tokens, BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, run.tokens)
        count = stop - start
        filled = -(-count // ROW_MULTIPLE) * ROW_MULTIPLE
        first = 0 if window is None else max(0, run.before + start - window + 1)
        keys = run.before + stop - first + filled - count
        keys += -keys % ROW_MULTIPLE if run.before else 0
        pairs += filled * keys
        rows += filled
    return pairs, rows


def attention_temporaries(spec: LayerSpec, batch: BatchShape, degree: int, *, backward: bool) -> int:
    """The most bytes at a time that the mixing of tokens takes besides what it reads, makes and keeps.

    In blocks these are the float32 scores and probabilities of one block of queries. The backward pass has gradients of
    both, with those of the block before, and float32 sums of the gradients of keys and values.
    """
    mixer = spec.mixer
    if isinstance(mixer, Delta):
        return _scan_temporaries(mixer, batch, degree, backward=backward)
    heads, groups = mixer.heads // degree, max(1, mixer.kv_heads // degree)
    values = mixer.v_head_dim if isinstance(mixer, Latent) else mixer.head_dim
    if batch.context is not None:
        return _ring_temporaries(mixer.head_dim, values, heads, groups, batch, backward=backward)
    if batch.kernels == "flash":
        return 0
    sizes = [0, 0]
    for run in (run for document in batch.documents for run in document):
        if _goes_by_blocks(run, mixer, batch.short_document):
            sizes += _block_sizes(run, mixer.window)
    before, largest = sorted(sizes)[-2:]
    if not backward:
        return 2 * heads * largest * _FLOAT32
    of_keys = batch.tokens * groups * (mixer.head_dim + values) * _FLOAT32
    of_block = heads * BLOCK_ROWS * (mixer.head_dim + values) if largest else 0
    return (heads * (2 * largest + before) + of_block) * batch.element_bytes + of_keys * batch.is_half


def _ring_temporaries(size: int, values: int, heads: int, groups: int, batch: BatchShape, *, backward: bool) -> int:
    """Bytes of the float32 sums of a ring, and of the keys and values of two other ranks.

    Forward the sums are those of outputs, and two numbers of each row; backward those of the gradients of queries, keys
    and values, with the gradients of the keys that travel.
    """
    keys = batch.tokens * groups * (size + values)
    if not backward:
        return batch.tokens * heads * (values + 2) * _FLOAT32 + 2 * keys * batch.element_bytes
    return (batch.tokens * heads * size + 3 * keys) * _FLOAT32 + 2 * keys * batch.element_bytes


def _block_sizes(run: DocumentRun, window: int | None) -> tuple[int, int]:
    """Scores of one head in the last two blocks of a run, which are its largest."""
    last = (run.tokens - 1) % BLOCK_ROWS + 1
    sizes = []
    for tokens, after in ((last, 0), (min(BLOCK_ROWS, run.tokens - last), last)):
        part = DocumentRun(tokens, run.before + run.tokens - tokens - after)
        sizes.append(block_pairs(part, window)[0] if tokens else 0)
    return sizes[0], sizes[1]


def _scan_temporaries(mixer: Delta, batch: BatchShape, degree: int, *, backward: bool) -> int:
    """Bytes of a group of heads in the delta rule: matrices of chunks [C, C] and rows of keys and values, in float32.

    The numbers of tensors are those at the peak of `models.delta_rule`, where one sum is made in float64.
    """
    size, chunks = batch.chunks
    shared, groups = mixer.heads // mixer.key_heads, mixer.key_heads // degree
    at_once = min(groups, max(1, GROUP_ELEMENTS // (chunks * size * mixer.key_dim * shared)))
    matrices, keys, values = (11, 6, 5) if backward else (6, 4, 3)
    width = matrices * size + keys * mixer.key_dim + values * mixer.value_dim
    return at_once * shared * chunks * size * width * _FLOAT32
