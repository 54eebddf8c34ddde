"""A folder like MNIST's, of made images that can be learnt: class k is a bright box at a place of its own, in noise."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np

SIDE, CLASSES = 28, 10


def digits(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """pixels [N, 28, 28] and labels [N], both uint8."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, CLASSES, count).astype(np.uint8)
    pixels = random.integers(0, 90, (count, SIDE, SIDE)).astype(np.uint8)
    for place, label in enumerate(labels):
        top, left = 2 + 13 * (int(label) // 5), 1 + 5 * (int(label) % 5)
        pixels[place, top : top + 9, left : left + 5] = 220
    return pixels, labels


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return header + array.tobytes()


def write_split(folder: Path, prefix: str, pixels: np.ndarray, labels: np.ndarray, *, packed: bool = True) -> None:
    for name, array in (("images-idx3-ubyte", pixels), ("labels-idx1-ubyte", labels)):
        content = idx(array)
        file = folder / f"{prefix}-{name}{'.gz' if packed else ''}"
        file.write_bytes(gzip.compress(content) if packed else content)


def digits_folder(folder: Path, train: int = 512, test: int = 64) -> Path:
    folder.mkdir()
    write_split(folder, "train", *digits(train, 1))
    write_split(folder, "t10k", *digits(test, 2), packed=False)
    return folder
