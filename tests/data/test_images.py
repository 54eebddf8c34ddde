"""Images are found, checked, ordered by the seed alone, and laid into micro-batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from builders.digits import CLASSES, SIDE, digits, digits_folder, write_split

from danlu.core.errors import CheckpointError, DataError
from danlu.data.images import ImageDataset, ImageSampler, collate_images, held_out, read_images
from danlu.recipe.sections import Source


def read(*sources: Source) -> ImageDataset:
    return read_images(sources, side=SIDE, classes=CLASSES)


def test_a_folder_has_two_splits(tmp_path: Path) -> None:
    folder = str(digits_folder(tmp_path / "set", train=30, test=7))
    train, test = read(Source(path=folder)), read(Source(path=folder, split="test"))
    for found, (pixels, labels) in ((train, digits(30, 1)), (test, digits(7, 2))):
        np.testing.assert_array_equal(found.pixels, pixels)
        np.testing.assert_array_equal(found.labels, labels)
    both = read(Source(path=folder), Source(path=f"{folder}#4", split="test"))
    assert len(both) == 34
    assert both.image(33).rows == (f"{folder}/t10k-images-idx3-ubyte image 4",)
    np.testing.assert_array_equal(both.image(33).pixels, digits(7, 2)[0][3])
    assert (train.image(0).sources, both.image(0).sources, both.image(33).sources) == (
        ("set",),
        ("set (1)",),
        ("set (2)",),
    )
    rest, chosen = held_out(both, 4, seed=1)
    assert {rest.image(n).source for n in range(len(rest))} == {"set (1)", "set (2)"} and len(
        chosen.image(0).sources
    ) == 1
    file = read(Source(path=f"{folder}/t10k-images-idx3-ubyte", rows=2))
    assert file.labels.tolist() == digits(7, 2)[1][:2].tolist()


def test_plain_files_take_the_place_of_packed_ones(tmp_path: Path) -> None:
    folder = digits_folder(tmp_path / "set", train=5)
    write_split(folder, "train", *digits(3, 9), packed=False)
    assert len(read(Source(path=str(folder)))) == 3


def test_what_does_not_fit_is_told(tmp_path: Path) -> None:
    pixels, labels = digits(5, 1)
    folder = tmp_path / "set"
    folder.mkdir()

    def refused(said: str, split: str = "train", path: Path = folder) -> None:
        with pytest.raises(DataError, match=said):
            read(Source(path=str(path), split=split))

    refused("no such folder of images", path=tmp_path / "nowhere")
    refused("no images of split train: expected train-images-idx3-ubyte")
    refused("no images of split test: expected t10k-images-idx3-ubyte.* or test-images", "test")
    refused("split 'validation'; a folder of images has the splits train and test", "validation")
    write_split(folder, "train", pixels, labels[:4])
    refused("4 labels for the 5 images")
    write_split(folder, "train", pixels, np.array([0, 1, 2, 10, 3], dtype=np.uint8))
    refused("label 10 of image 4; the model tells 10 classes apart, 0 to 9")
    write_split(folder, "train", pixels[:, 1:], labels)
    refused("images of 27 x 28; the model takes 28 x 28")
    write_split(folder, "train", pixels, labels)
    write_split(folder, "train-more", pixels, labels)
    refused("several files of split train: train-images-idx3-ubyte, train-more-images-idx3-ubyte")
    (folder / "train-labels-idx1-ubyte.gz").unlink()
    refused("its labels are missing", path=folder / "train-images-idx3-ubyte.gz")
    refused("a file of images has images-idx3-ubyte in its name", path=folder / "train-more-labels-idx1-ubyte.gz")


def test_every_image_comes_once_an_epoch_in_an_order_of_the_seed(tmp_path: Path) -> None:
    pictures = read(Source(path=str(digits_folder(tmp_path / "set", train=50))))
    images = ImageSampler(pictures, seed=3)
    first, second = ([images.at(epoch * 50 + n).number for n in range(50)] for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second and first != list(range(50))
    again = ImageSampler(pictures, seed=3)
    backwards = [again.at(n).number for n in reversed(range(100))]
    assert backwards[::-1] == first + second  # whatever was asked for before
    assert [ImageSampler(pictures, seed=4).at(n).number for n in range(50)] != first
    in_order = ImageSampler(pictures, seed=3, shuffle=False)
    assert [in_order.at(n).number for n in range(51)] == [*range(50), 0]


def test_a_checkpoint_knows_its_images_again(tmp_path: Path) -> None:
    pictures = read(Source(path=str(digits_folder(tmp_path / "set", train=20))))
    ImageSampler(pictures, seed=0).restore(ImageSampler(pictures, seed=0).state())
    changed = pictures.pixels.copy()
    changed[3, 4, 5] ^= 1
    other = replace(pictures, pixels=changed)
    for state in (ImageSampler(other, seed=0).state(), ImageSampler(pictures, seed=1).state()):
        with pytest.raises(CheckpointError, match="not what the checkpoint was made with"):
            ImageSampler(pictures, seed=0).restore(state)


def test_images_are_set_aside(tmp_path: Path) -> None:
    pictures = read(Source(path=str(digits_folder(tmp_path / "set", train=40))))
    rest, judged = held_out(pictures, 0.1, seed=0)
    assert (len(rest), len(judged)) == (36, 4)
    numbers = [{part.image(n).number for n in range(len(part))} for part in (rest, judged)]
    assert numbers[0] | numbers[1] == set(range(40)) and not numbers[0] & numbers[1]
    assert {held_out(pictures, 7, seed=1)[1].image(n).number for n in range(7)} != numbers[1]
    for share in (40, 0.999):
        with pytest.raises(DataError, match="of 40 images leaves none to train on"):
            held_out(pictures, share, seed=0)


def test_a_micro_batch_and_one_that_is_nothing(tmp_path: Path) -> None:
    pictures = read(Source(path=str(digits_folder(tmp_path / "set", train=6))))
    batch = collate_images([pictures.image(n) for n in (4, 1)], torch.device("cpu"), side=SIDE)
    assert batch.pixels.dtype == torch.uint8 and batch.weight == 2.0
    assert batch.targets.tolist() == [pictures.labels[4], pictures.labels[1]]
    np.testing.assert_array_equal(batch.pixels.numpy(), pictures.pixels[[4, 1]])
    empty = collate_images([], torch.device("cpu"), side=SIDE)
    assert empty.pixels.shape == (0, SIDE, SIDE) and empty.weight == 0 and not len(empty.targets)
