"""Images with labels: pairs of idx files, the endless sequence of images, and micro-batches of them.

The n-th image of a run is a pure function of (images, seed, n), as packs are.

N images · H, W pixels
"""

from __future__ import annotations

import gzip
import hashlib
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from danlu.core.errors import CheckpointError, DataError
from danlu.core.types import TargetSources
from danlu.data.batch import source_numbers, weights_by_source
from danlu.data.permutation import Permutation
from danlu.data.sources import source_names, split_row_limit
from danlu.recipe.sections import Source

IMAGES, LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"
# The test files of MNIST and of sets made like it are called t10k.
PREFIXES = {"train": ("train",), "test": ("t10k", "test")}


@dataclass(frozen=True)
class Image:
    """One image with its label; steps of a classifier are counted in images."""

    # As an item of training: one token with one target, its label; every image counts alike.
    tokens: ClassVar[int] = 1
    targets: ClassVar[int] = 1
    weight: ClassVar[float] = 1.0
    lengths: ClassVar[tuple[int, ...]] = (1,)

    pixels: np.ndarray  # [H, W] uint8
    label: int
    file: str
    number: int  # in the file, from 0
    source: str = ""  # short name of its folder or file (`data.sources.source_names`), for metrics

    @property
    def rows(self) -> tuple[str, ...]:
        return (f"{self.file} image {self.number + 1}",)

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,)


@dataclass(frozen=True)
class ImageBatch:
    """A micro-batch on the device."""

    pixels: Tensor  # [N, H, W] uint8
    targets: Tensor  # [N] int64
    weights: Tensor  # [N] float32
    weight: float  # sum of `weights`
    rows: tuple[str, ...]  # [N]
    target_sources: TargetSources | None = None  # None where all images of the run are from one source


@dataclass(frozen=True)
class ImageDataset:
    """Some images in memory."""

    pixels: np.ndarray  # [N, H, W] uint8
    labels: np.ndarray  # [N] uint8
    files: tuple[str, ...]
    sources: tuple[str, ...]  # [files] the name of the source of each
    origin: np.ndarray  # [N] int32, into files
    numbers: np.ndarray  # [N] int32, in the file

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, place: int) -> Image:
        """The image at a place of this dataset, from 0."""
        file = self.origin[place]
        number = int(self.numbers[place])
        return Image(self.pixels[place], int(self.labels[place]), self.files[file], number, self.sources[file])

    def chosen(self, places: np.ndarray) -> ImageDataset:
        """The images at `places` [n], in that order."""
        columns = (self.pixels, self.labels, self.origin, self.numbers)
        pixels, labels, origin, numbers = (column[places] for column in columns)
        return replace(self, pixels=pixels, labels=labels, origin=origin, numbers=numbers)

    def digest(self) -> str:
        """Equal for equal images and labels in the same order."""
        state = hashlib.sha256(repr(self.pixels.shape).encode())
        for array in (self.pixels, self.labels):
            state.update(np.ascontiguousarray(array).tobytes())
        return state.hexdigest()[:16]


class ImageSampler:
    """Endless images of a dataset, in a new order each epoch, decided by the seed; in their own without shuffling.

    Raises DataError if there are none.
    """

    def __init__(self, dataset: ImageDataset, seed: int, *, shuffle: bool = True) -> None:
        if not len(dataset):
            raise DataError("there are no images to train on: every one is held out")
        self._dataset = dataset
        self._seed = seed
        self._shuffle = shuffle
        self._digest = f"{dataset.digest()} {seed}"
        # One epoch at a time: an order costs milliseconds as a whole, and as much for each hundred single elements.
        self._epoch, self._order = -1, np.arange(len(dataset))

    @property
    def per_epoch(self) -> int:
        """Images of an epoch: every one once."""
        return len(self._dataset)

    def at(self, number: int) -> Image:
        """Image `number` of the endless sequence; epoch = number // per_epoch."""
        epoch, place = divmod(number, len(self._dataset))
        if self._shuffle and epoch != self._epoch:
            self._epoch, self._order = epoch, Permutation.of(len(self._dataset), self._seed, "images", epoch).all()
        return self._dataset.image(int(self._order[place]))

    def state(self, number: int | None = None) -> dict[str, Any]:
        """Returns the state for a checkpoint: a digest by which `restore` recognises the images."""
        return {"images": self._digest}

    def restore(self, state: dict[str, Any]) -> None:
        """Raises CheckpointError if these are not the images the checkpoint was made with."""
        if state != self.state():
            raise CheckpointError(
                f"the training images are not what the checkpoint was made with ({self._digest}, checkpoint "
                f"{state.get('images')}): the files, their share or the seed changed. Restore them, or start a new run"
            )


def collate_images(
    images: Sequence[Image], device: torch.device, *, side: int, source_names: Sequence[str] = ()
) -> ImageBatch:
    """A micro-batch of weight 1 an image; of no images, one that is empty. source_names: as for `batch.collate`."""
    shape = (len(images), side, side)
    pixels = np.stack([image.pixels for image in images]) if images else np.empty(shape, dtype=np.uint8)
    labels = np.array([image.label for image in images], dtype=np.int64)
    sources = None
    if source_names:
        numbers = source_numbers([image.source for image in images], source_names)
        weights = weights_by_source(numbers, np.ones(len(images)), source_names)
        sources = TargetSources(tuple(source_names), torch.from_numpy(numbers).to(device), weights)
    return ImageBatch(
        torch.from_numpy(pixels).to(device),
        torch.from_numpy(labels).to(device),
        torch.ones(len(images), device=device),
        float(len(images)),
        tuple(row for image in images for row in image.rows),
        sources,
    )


def read_images(sources: Sequence[Source], *, side: int, classes: int) -> ImageDataset:
    """The images of all sources, one behind the other.

    side: pixels each way that an image must have. classes: labels are below.
    Raises DataError for files that are missing, broken, do not belong together, or hold other images.
    """
    parts = [_read(source, side, classes) for source in sources]
    files = tuple(name for name, _, _ in parts)
    counts = [len(labels) for _, _, labels in parts]
    return ImageDataset(
        np.concatenate([pixels for _, pixels, _ in parts]),
        np.concatenate([labels for _, _, labels in parts]),
        files,
        tuple(source_names(sources)),
        np.repeat(np.arange(len(parts), dtype=np.int32), counts),
        np.concatenate([np.arange(count, dtype=np.int32) for count in counts]),
    )


def held_out(dataset: ImageDataset, share: float | int, seed: int) -> tuple[ImageDataset, ImageDataset]:
    """(training, held-out) images: a share of them (below 1) or a number is held out, chosen by the seed."""
    count = share if isinstance(share, int) else max(1, round(share * len(dataset)))
    if count >= len(dataset):
        raise DataError(f"data.eval: {share} of {len(dataset)} images leaves none to train on")
    order = Permutation.of(len(dataset), seed, "held out").all()
    return dataset.chosen(np.sort(order[count:])), dataset.chosen(np.sort(order[:count]))


def _read(source: Source, side: int, classes: int) -> tuple[str, np.ndarray, np.ndarray]:
    """(name, pixels [N, H, W], labels [N]) of one source."""
    _, limit = split_row_limit(source.path)
    rows = int(limit) if limit else source.rows
    file, labels_file = image_files(source)
    pixels, labels = read_idx(file), read_idx(labels_file)
    if pixels.ndim != 3 or pixels.shape[1:] != (side, side):
        raise DataError(f"{file}: images of {' x '.join(map(str, pixels.shape[1:]))}; the model takes {side} x {side}")
    if labels.shape != pixels.shape[:1]:
        raise DataError(f"{labels_file}: {labels.size} labels for the {len(pixels)} images in {file.name}")
    if labels.size and labels.max() >= classes:
        first = int(np.flatnonzero(labels >= classes)[0])
        raise DataError(
            f"{labels_file}: label {labels[first]} of image {first + 1}; the model tells {classes} classes apart, "
            f"0 to {classes - 1}"
        )
    return str(file), pixels[:rows], labels[:rows]


def image_files(source: Source) -> tuple[Path, Path]:
    """The files of images and of their labels that a source means. Raises DataError for one that is missing."""
    file = _images_file(Path(split_row_limit(source.path)[0]).expanduser(), source.split)
    labels_file = file.with_name(file.name.replace(IMAGES, LABELS))
    if not labels_file.is_file():
        raise DataError(f"{file}: its labels are missing: there is no {labels_file.name} next to it")
    return file, labels_file


def _images_file(path: Path, split: str) -> Path:
    """The file of images that a source means: itself, or the one of the split in a folder."""
    if path.is_file():
        if IMAGES not in path.name:
            raise DataError(f"{path}: a file of images has {IMAGES} in its name, with its labels next to it")
        return path
    if not path.is_dir():
        raise DataError(f"{path}: no such folder of images")
    if split not in PREFIXES:
        raise DataError(f"{path}: split {split!r}; a folder of images has the splits {' and '.join(PREFIXES)}")
    starts = PREFIXES[split]
    files = {
        file.name.removesuffix(".gz"): file
        for suffix in (".gz", "")  # plain files take the place of packed ones
        for file in sorted(path.glob(f"*{IMAGES}{suffix}"))
        if file.name.startswith(starts)
    }
    if not files:
        expected = " or ".join(f"{start}-{IMAGES}[.gz]" for start in starts)
        raise DataError(f"{path}: no images of split {split}: expected {expected}")
    if len(files) > 1:
        raise DataError(f"{path}: several files of split {split}: {', '.join(sorted(files))}. Name the one to read")
    return next(iter(files.values()))


_UNSIGNED_BYTES = 8


def read_idx(file: Path) -> np.ndarray:
    """The array in a file of unsigned bytes, whatever its shape: uint8, not to be written to.

    Raises DataError for a file that cannot be read, is of another format or type, or does not have the bytes that its
    header promises.
    """
    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file}: cannot be read: {error}. Copy or download the file again") from None
    if len(content) < 4 or content[:2] != b"\0\0":
        raise DataError(f"{file}: not in the idx format: it begins with {content[:4].hex(' ') or 'nothing'}")
    kind, dimensions = content[2], content[3]
    if kind != _UNSIGNED_BYTES:
        raise DataError(f"{file}: idx of type {kind:#04x}; images and labels are unsigned bytes, 0x08")
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise DataError(f"{file}: truncated: the header of {start} bytes is cut off at {len(content)}")
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", dimensions, 4))
    if len(content) - start != math.prod(shape):
        raise DataError(
            f"{file}: the header promises {' x '.join(map(str, shape))} = {math.prod(shape)} bytes, and "
            f"{len(content) - start} follow. Copy or download the file again"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
