"""Classifiers of images in a verification: small as they are, so nothing of them is shrunk but the number of images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from danlu.data.images import Image, ImageSampler, read_images
from danlu.errors import DataError
from danlu.images.classifier import ClassifierBuilder, PlacedClassifier
from danlu.models import lenet
from danlu.parallel.collective_traffic import CollectiveTraffic
from danlu.parallel.layout import Layout
from danlu.parallel.ranks import Ranks
from danlu.recipe import Recipe
from danlu.stages import STAGES
from danlu.train.run_folder import Start
from danlu.verify.collective_traffic import sent_over_data
from danlu.verify.proxy import Groups, PlacedProxy, Prepared
from danlu.verify.proxy_model import small_optimizer


@dataclass(frozen=True)
class ClassifierProxy:
    """A `Proxy`: the classifier itself."""

    tied: bool = False
    norms: bool = False

    def place(self, recipe: Recipe, ranks: Ranks, device: torch.device, resumed: Path | None) -> PlacedClassifier:
        start = None if resumed is None else Start(resumed, ())
        return ClassifierBuilder(recipe, STAGES["classify"]).place(ranks, device, start)

    def sent(self, learning: PlacedProxy, groups: Groups) -> list[CollectiveTraffic]:
        return sent_over_data(learning, groups, gathered=torch.float32)


def prepared(recipe: Recipe, layout: Layout, count: int, folder: Path, *, full: bool) -> Prepared:
    """So many of the recipe's own images, or made ones with a reason where there are none to be read."""
    try:
        pictures = ImageSampler(read_images(recipe.data.train, side=lenet.SIDE, classes=lenet.CLASSES), recipe.seed)
        items, source = [pictures.at(number) for number in range(count)], "the recipe's own data"
    except DataError as error:
        items = made_images(recipe.seed, count)
        source = f"synthetic data, for the recipe's cannot be used ({str(error).splitlines()[0]})"
    optimizer, notes = (recipe.optimizer, []) if full else small_optimizer(recipe.optimizer)
    parameters = sum(parameter.numel() for parameter in lenet.LeNet5().parameters())
    return Prepared(
        recipe=recipe.model_copy(update={"optimizer": optimizer}),
        proxy=ClassifierProxy(),
        items=items,
        parameters=parameters,
        counted_in="images",
        model="LeNet-5, which is small as it is",
        data=source,
        notes=notes,
    )


def made_images(seed: int, count: int) -> list[Image]:
    """Images of noise; a function of the seed."""
    random = np.random.default_rng(seed)
    shape = (count, lenet.SIDE, lenet.SIDE)
    pixels, labels = random.integers(0, 256, shape, dtype=np.uint8), random.integers(0, lenet.CLASSES, count)
    return [Image(pixels[number], int(labels[number]), "made images", number) for number in range(count)]
