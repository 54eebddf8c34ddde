"""`danlu eval` of a classifier of images."""

from __future__ import annotations

import json

import torch

from danlu.core.errors import ModelError, RecipeError, ResourceError
from danlu.core.terminal import echo
from danlu.data.images import read_images
from danlu.models import lenet
from danlu.models.hf_folder import resolve_folder
from danlu.numerics.dtypes import DTYPES
from danlu.recipe.sections import Source
from danlu.stages.classifier import MAX_IMAGES_PER_MICRO_BATCH, ClassifierLearner
from danlu.training.evaluation import evaluate


def evaluate_images(model: str, data: str, unusable: list[str], *, as_json: bool, precision: str, device: str) -> None:
    """Prints loss and accuracy over the test files of a folder, or over a file of images.

    unusable: arguments that were given and mean nothing here.
    Raises RecipeError for those, DataError, ModelError, and ResourceError for a device that is not there.
    """
    if unusable:
        raise RecipeError(f"{', '.join(unusable)}: of no use for a classifier of images. Leave it out")
    if device == "cuda" and not torch.cuda.is_available():
        raise ResourceError("device cuda: torch sees no CUDA device here. Use auto or cpu")
    target = torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
    folder = resolve_folder(model)
    images = read_images([Source(path=data, split="test")], side=lenet.SIDE, classes=lenet.CLASSES)
    learner = ClassifierLearner(
        lenet.load(folder, device=target),
        target,
        DTYPES["fp32" if precision == "auto" else precision],
        MAX_IMAGES_PER_MICRO_BATCH,
    )
    scores = evaluate(learner, [images.image(number) for number in range(len(images))])
    if scores is None or scores.loss != scores.loss:
        raise ModelError(f"{folder}: no image of {data} has a loss that is a number; try --dtype fp32")
    wrong = round((1 - scores.accuracy) * scores.tokens)
    if as_json:
        row = {"model": str(model), "data": data, "loss": scores.loss, "accuracy": scores.accuracy}
        echo(json.dumps(row | {"images": scores.tokens, "wrong": wrong}, ensure_ascii=False))
        return
    echo(f"loss      {scores.loss:.4f} nats per image")
    echo(f"accuracy  {scores.accuracy:.2%}: {wrong:,} of {scores.tokens:,} images are taken for something else")
