"""Classifiers of images in a verification: LeNet-5 is small as it is, so only the number of images is reduced."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from danlu.core.errors import DataError
from danlu.data.images import Image, ImageSampler, read_images
from danlu.models import lenet
from danlu.parallel.layout import Layout
from danlu.recipe import Recipe
from danlu.verification.proxy import PreparedProxy, Proxy
from danlu.verification.proxy_recipe import proxy_optimizer


def prepare_proxy(recipe: Recipe, layout: Layout, count: int, folder: Path, *, full: bool) -> PreparedProxy:
    """`count` of the recipe's own images, or synthetic ones, with the reason, where none can be read.

    `layout` and `folder` are not used: nothing is cut, and nothing is started from.
    """
    try:
        images = ImageSampler(read_images(recipe.data.train, side=lenet.SIDE, classes=lenet.CLASSES), recipe.seed)
        items, source = [images.at(number) for number in range(count)], "the recipe's own data"
    except DataError as error:
        items = synthetic_images(recipe.seed, count)
        source = f"synthetic data, for the recipe's cannot be used ({str(error).splitlines()[0]})"
    optimizer, notes = (recipe.optimizer, []) if full else proxy_optimizer(recipe.optimizer)
    parameters = sum(parameter.numel() for parameter in lenet.LeNet5().parameters())
    return PreparedProxy(
        recipe=recipe.model_copy(update={"optimizer": optimizer}),
        proxy=Proxy(config=None),
        items=items,
        parameters=parameters,
        item_name="images",
        model_summary="LeNet-5, which is small as it is",
        data_summary=source,
        notes=notes,
    )


def synthetic_images(seed: int, count: int) -> list[Image]:
    """`count` images of noise with random labels; a function of the seed."""
    random = np.random.default_rng(seed)
    shape = (count, lenet.SIDE, lenet.SIDE)
    pixels, labels = random.integers(0, 256, shape, dtype=np.uint8), random.integers(0, lenet.CLASSES, count)
    return [Image(pixels[number], int(labels[number]), "synthetic images", number) for number in range(count)]
