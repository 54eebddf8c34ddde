"""Pairs of idx files as the items of a run: images with labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TextIO

from danlu.data.images import ImageSampler, held_out, read_images
from danlu.data.sources import reported_sources
from danlu.models import lenet
from danlu.recipe import Recipe
from danlu.stages.protocols import StageData


@dataclass(frozen=True)
class ImageReader:
    """A `Reader`: images of the size that LeNet-5 takes."""

    recipe: Recipe
    items: str = "images"
    counted: str = "images"

    def read(self, stream: TextIO) -> StageData:
        """All images into memory; nothing is shown, for that takes less than a second."""
        section, seed = self.recipe.data, self.recipe.seed
        train = read_images(section.train, side=lenet.SIDE, classes=lenet.CLASSES)
        lines = [f"data: {len(train):,} images"]
        if section.eval is None:
            evaluation = None
        elif isinstance(section.eval, list):
            evaluation = read_images(section.eval, side=lenet.SIDE, classes=lenet.CLASSES)
            lines.append(f"evaluation data: {len(evaluation):,} images")
        else:
            train, evaluation = held_out(train, section.eval, seed)
            lines.append(f"evaluation data: {len(evaluation):,} of these images are held out")
        images = ImageSampler(train, seed)
        kept = None if evaluation is None else [evaluation.image(number) for number in range(len(evaluation))]
        return StageData(images, images.per_epoch, kept, lines, sources=reported_sources(section))

    def amount(self, items: int) -> str:
        """The number of images, as text."""
        return f"{items} images"

    def targets(self, items: int) -> int:
        """One label an image."""
        return items
