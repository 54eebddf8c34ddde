"""The shape of a micro-batch as plain data: its documents, and how a rank computes them. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from danlu.models.kernel_limits import CHUNK_SIZES, DOCUMENT_MULTIPLE, SHORT_DOCUMENT

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "auto": 2}
"""Precision -> bytes of an activation; `auto` counts as bf16 where it has not been measured yet."""

Kernels = Literal["cpu", "flash", "document"]
"""The attention kernels of a device (`models.attention_kernels`): those of a CPU, a flash kernel that takes all
documents, or torch's kernel document by document, with windows and softcaps by products.
"""


class DocumentRun(NamedTuple):
    """Tokens that see each other and those before them on their path: a document, or a branch of a tree."""

    tokens: int
    before: int = 0
    """Tokens of the path before the first one."""


Document = tuple[DocumentRun, ...]
"""The runs of a document: one, or of a tree the stem and its branches."""


class ContextCut(NamedTuple):
    """How documents are cut over context ranks (`parallel.context`)."""

    ring: int = 1
    """The ranks that keys travel among."""
    heads: int = 1
    """The neighbouring ranks that exchange tokens for heads."""
    gathers: bool = False
    """Whether keys of all ranks are gathered at once, instead of going around the ring."""


@dataclass(frozen=True)
class BatchShape:
    """The lengths of a micro-batch's documents, and the types and kernels that they are computed with."""

    documents: tuple[Document, ...]
    element_bytes: int
    """Bytes of an activation."""
    kernels: Kernels = "cpu"
    grouped_heads: bool = True
    """Whether the flash kernel takes fewer heads of keys than of queries; otherwise keys and values are repeated."""
    context: ContextCut | None = None
    """The cut of each document over context ranks; the runs of `documents` are then the tokens of this rank."""
    targets: int | None = None
    """Tokens with a loss; None: all of them."""

    @cached_property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return sum(run.tokens for document in self.documents for run in document)

    @property
    def short_document(self) -> int:
        """Tokens of a document up to which attention goes by blocks of products."""
        return SHORT_DOCUMENT if self.kernels == "cpu" else -1

    @property
    def document_multiple(self) -> int:
        """The multiple of tokens to which a longer document is filled up."""
        return DOCUMENT_MULTIPLE if self.kernels == "cpu" else 1

    @cached_property
    def chunks(self) -> tuple[int, int]:
        """(tokens of a chunk, chunks of all runs) in which a recurrence goes through the documents."""
        lengths = [run.tokens for document in self.documents for run in document]
        longest = max(lengths, default=0)
        size = next((size for size in CHUNK_SIZES if size >= longest), CHUNK_SIZES[-1])
        return size, sum(-(-length // size) for length in lengths)

    @property
    def is_half(self) -> bool:
        """Whether activations are narrower than float32."""
        return self.element_bytes < 4

    @classmethod
    def of_lengths(cls, lengths: Iterable[int], element_bytes: int, kernels: Kernels = "cpu") -> BatchShape:
        """Documents without branches."""
        return cls(tuple((DocumentRun(length),) for length in lengths), element_bytes, kernels)


@dataclass(frozen=True)
class RankShare:
    """The share of a layer that one tensor rank has."""

    degree: int = 1
    sequence: bool = False
    """Whether ranks have their own tokens outside of attention and the feed-forward network (arXiv:2205.05198)."""


WHOLE = RankShare()
