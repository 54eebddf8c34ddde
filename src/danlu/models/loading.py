"""Weights from a model folder into a decoder: every problem found first, then bytes straight to their place.

Peak memory is the model plus one buffer: a parameter of the stored type is read in place, any other is converted a
buffer at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import FileIO
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor, nn

from danlu.errors import ModelError
from danlu.models.config import ModelConfig
from danlu.models.decoder import Decoder
from danlu.models.folder import read_config, read_tensors
from danlu.models.layout import EMBEDDING, HEAD, IGNORED, DiskTensor, disk_tensors
from danlu.models.tensor_bytes import BUFFER_BYTES, DTYPES, is_finite, ranges, read_exactly
from danlu.models.tensor_file import FLOAT_BYTES, Stored

_SHOWN = 10


def load(
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    check_finite: bool = True,
) -> Decoder:
    """The decoder of a Hugging Face folder, its parameters in `dtype` on `device`.

    check_finite: refuse weights with NaN or infinity, before they spoil a run.
    Raises ModelError for an unsupported architecture and for files or tensors that are missing, extra, truncated,
    mis-shaped, of the wrong type, or not finite.
    """
    folder = Path(folder)
    config = read_config(folder)
    stored = read_tensors(folder)
    wanted = disk_tensors(config)
    _check_tensors(folder, config, wanted, stored)
    if config.tie_word_embeddings and HEAD in stored and EMBEDDING in stored:
        _check_same(stored[EMBEDDING], stored[HEAD])
    model = build(config, dtype=dtype, device=device)
    parameters = dict(model.named_parameters())
    reader = _Reader(check_finite)
    places = [(tensor, stored.get(tensor.name) or stored[HEAD]) for tensor in wanted]
    places.sort(key=lambda place: (place[1].file, place[1].offset))  # disks and page caches like one direction
    for file, group in groupby(places, key=lambda place: place[1].file):
        with FileIO(file) as handle:
            for tensor, place in group:
                handle.seek(place.offset)
                for part in tensor.parts:
                    reader.fill(parameters[part], handle, place, tensor.name)
    return model


def build(config: ModelConfig, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Decoder:
    """A decoder whose parameters have memory but no values yet."""
    with torch.device("meta"):
        model = Decoder(config)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            # `to_empty` would take meta tensors through torch's operators in Python, which import sympy for 0.2 s.
            setattr(module, name, nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device=device)))
    return model


def _check_tensors(folder: Path, config: ModelConfig, wanted: list[DiskTensor], stored: Mapping[str, Stored]) -> None:
    """Raises one ModelError with everything that is wrong with the tensors as their headers describe them."""
    names = {tensor.name for tensor in wanted}
    problems = []
    for tensor in wanted:
        found = stored.get(tensor.name)
        if found is None and config.tie_word_embeddings and tensor.name == EMBEDDING:
            found = stored.get(HEAD)  # some tools keep a tied matrix under its other name
        if found is None:
            problems.append(f"{tensor.name}: missing; expected shape {list(tensor.shape)}")
        elif found.shape != tensor.shape:
            problems.append(
                f"{tensor.name} in {found.file.name}: expected shape {list(tensor.shape)}, found {list(found.shape)}"
            )
        elif found.dtype not in FLOAT_BYTES:
            problems.append(f"{tensor.name} in {found.file.name}: expected floating point, found {found.dtype}")
    may_hold = names | ({HEAD} if config.tie_word_embeddings else set())
    for name, found in stored.items():
        if name not in may_hold and not IGNORED.search(name):
            problems.append(f"{name} in {found.file.name}: not a tensor of this {config.family} model")
    if not problems:
        return
    if len(problems) == 1 and problems[0].startswith(f"{HEAD}: missing"):
        problems.append('if its head is the embedding, set "tie_word_embeddings": true in config.json')
    more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    raise ModelError("\n  ".join([f"{folder}: the weights do not fit config.json:", *problems[:_SHOWN], *more]))


class _Reader:
    """Reads consecutive ranges of files into parameters; owns the one buffer that conversion needs."""

    def __init__(self, check_finite: bool) -> None:
        self._check_finite = check_finite
        self._buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8)

    @torch.no_grad()
    def fill(self, parameter: Tensor, handle: FileIO, place: Stored, name: str) -> None:
        """The next `parameter.numel()` values of `handle`, in the stored type, into the parameter."""
        target, dtype = parameter.view(-1), DTYPES[place.dtype]
        in_place = target.dtype == dtype and target.device.type == "cpu"
        for start, end in ranges(target.numel(), BUFFER_BYTES // dtype.itemsize):
            piece = target[start:end]
            values = piece if in_place else self._buffer[: (end - start) * dtype.itemsize].view(dtype)
            if missing := read_exactly(handle, values):
                raise ModelError(f"{place.file}: tensor {name}: the file ended {missing} bytes early while it was read")
            if self._check_finite and not is_finite(values):
                raise ModelError(f"{place.file}: tensor {name} holds NaN or infinity; the weights are spoilt")
            if not in_place:
                piece.copy_(values)
                if self._check_finite and dtype != target.dtype and not is_finite(piece):
                    raise ModelError(f"{place.file}: tensor {name} has values too large for {target.dtype}")


def _check_same(one: Stored, other: Stored) -> None:
    """A tied matrix that is stored twice must be stored alike, or one of the two would silently be lost."""
    same = (one.dtype, one.shape) == (other.dtype, other.shape)
    with FileIO(one.file) as left, FileIO(other.file) as right:
        left.seek(one.offset)
        right.seek(other.offset)
        for start, end in ranges(one.bytes if same else 0, BUFFER_BYTES):
            same = same and left.read(end - start) == right.read(end - start)
    if not same:
        raise ModelError(
            f"{one.file.parent}: config.json ties the head to the embedding, but {HEAD} and {EMBEDDING} differ. "
            'Set "tie_word_embeddings": false to keep both'
        )
