"""A classifier in a verification: its own images where they can be read, made ones where not, and nothing shrunk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from builders.digits import digits_folder

from danlu.data.images import Image
from danlu.parallel.layout import Layout
from danlu.recipe import Recipe, load
from danlu.verification.classifier_proxy import prepare_proxy, synthetic_images
from danlu.verification.proxy_recipe import EPS


def recipe(folder: Path, images: Path) -> Recipe:
    file = folder / "recipe.yaml"
    file.write_text(
        f"stage: classify\nmodel: {{preset: lenet5}}\ndata: {images}\nbatch: {{sequences: 16}}\nsteps: 4\n"
        f"output: {folder / 'run'}\n"
    )
    return load(file).recipe


def test_its_own_images_come_first_and_only_eps_is_changed(tmp_path: Path) -> None:
    given = recipe(tmp_path, digits_folder(tmp_path / "digits", train=16, test=4))
    small = prepare_proxy(given, Layout(shard=2), 20, tmp_path, full=False)
    assert (len(small.items), small.item_name, small.data_summary) == (20, "images", "the recipe's own data")
    assert all("train-images" in item.rows[0] for item in small.items)
    assert small.recipe == given.model_copy(update={"optimizer": given.optimizer.model_copy(update={"eps": EPS})})
    assert small.notes == [f"optimizer.eps {EPS:g}, so that rounding alone turns no update round"]
    assert prepare_proxy(given, Layout(shard=2), 20, tmp_path, full=True).recipe == given


def test_images_that_cannot_be_read_are_made_and_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    small = prepare_proxy(recipe(tmp_path, tmp_path / "empty"), Layout(shard=2), 3, tmp_path, full=False)
    assert (
        small.data_summary.startswith("synthetic data, for the recipe's cannot be used (")
        and "no images" in small.data_summary
    )
    assert [item.rows for item in small.items] == [(f"synthetic images image {number}",) for number in (1, 2, 3)]


def test_made_images_are_a_function_of_the_seed() -> None:
    def pixels(images: list[Image]) -> np.ndarray:
        return np.stack([one.pixels for one in images])

    assert np.array_equal(pixels(synthetic_images(0, 4)), pixels(synthetic_images(0, 4)))
    assert not np.array_equal(pixels(synthetic_images(0, 4)), pixels(synthetic_images(1, 4)))
    assert {one.label for one in synthetic_images(0, 200)} == set(range(10))
