"""The models of a recipe that synthesizes, as answerers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from danlu.production.synthesis.answerer import Answerer
from danlu.production.synthesis.endpoint import Endpoint, key_variable

if TYPE_CHECKING:
    from danlu.inference.stepwise import StepwiseEngine
    from danlu.production.synthesis.local_model import LocalModel
    from danlu.recipe.sections.synthesis import AnsweringModel

_SERVER_IN_FLIGHT, _ENGINE_IN_FLIGHT = 16, 256


def answerer_of(model: AnsweringModel, threads: int | None = None) -> Answerer:
    """A model of a recipe. Its weights are read with the first request.

    threads: CPU threads of a model of this machine; None for one per core.

    Raises RecipeError for a url that is none, ModelError and DataError for a folder without a model or tokenizer.
    """
    if model.url is None:
        return _local(model, threads)
    assert model.name is not None, "the recipe's rules ask for it"
    return Endpoint(
        model.url,
        model.name,
        key_variable(model.key),
        model.price or (0.0, 0.0),
        model.in_flight or _SERVER_IN_FLIGHT,
        model.retries,
        model.timeout_s,
    )


def _local(model: AnsweringModel, threads: int | None) -> LocalModel:
    from danlu.inference.resolve_model import resolve_model

    assert model.path is not None, "the recipe's rules ask for it"
    resolved = resolve_model(model.path)
    # torch, a second: a folder that is not there is reported without it.
    from danlu.inference.engine import EngineOptions
    from danlu.inference.load_engine import engine_of
    from danlu.inference.load_model import load_chat_tokenizer, load_model
    from danlu.production.synthesis.local_model import LocalModel

    tokenizer = load_chat_tokenizer(resolved.tokenizer_folder, model=resolved.folder)

    def make_engine() -> tuple[StepwiseEngine, frozenset[int]]:
        import torch

        if threads is not None:
            torch.set_num_threads(threads)
        loaded = load_model(resolved, tokenizer, precision=model.precision, device=model.device, merged=True)
        return engine_of(loaded, EngineOptions(exact=model.exact)), loaded.stop_ids

    return LocalModel(resolved.given_path.name, tokenizer, make_engine, model.in_flight or _ENGINE_IN_FLIGHT)
