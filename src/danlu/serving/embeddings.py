"""POST /v1/embeddings: vectors of texts, from the last hidden states of the model."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from danlu.inference.prompts import prompt_problem
from danlu.serving.api_endpoints import as_api_errors, read_request
from danlu.serving.openai_api import ApiError, Body, as_prompts

if TYPE_CHECKING:
    from danlu.inference.embedded import EmbeddedEngine
    from danlu.serving.api_endpoints import Api

Pooling = Literal["last", "mean"]
MAX_INPUTS = 2048
"""The most texts of one request, as with OpenAI."""


class EmbeddingBody(Body):
    """The body of POST /v1/embeddings."""

    input: Annotated[list[str | list[int]], BeforeValidator(as_prompts), Field(max_length=MAX_INPUTS)]
    encoding_format: Literal["float", "base64"] = "float"


class Embeddings:
    """The endpoint. pooling: of the hidden states of a text: that of its last token, or their mean."""

    def __init__(self, api: Api, engine: EmbeddedEngine, pooling: Pooling) -> None:
        self._api, self._engine, self._pooling = api, engine, pooling

    @property
    def routes(self) -> list[Route]:
        return [Route("/v1/embeddings", self.embeddings, methods=["POST"])]

    async def embeddings(self, request: Request) -> Response:
        body = await read_request(EmbeddingBody, request)
        model = self._api.models.find(body.model)
        sequences = [await self._api.encode_text(model, text, "input") for text in body.input]
        for index, tokens in enumerate(sequences):
            if problem := prompt_problem(self._engine.config, tokens, model.virtual_tokens):
                raise ApiError(f"input: text {index} {problem}", param="input", code="context_length_exceeded")
        vectors: list[np.ndarray] = []
        for tokens in sequences:  # each between two steps of the engine, so that answers go on
            with as_api_errors("input"):
                await self._api.engine.do(partial(self._embed, tokens, model.adapter, vectors))
        count = sum(map(len, sequences))
        data = [
            {"object": "embedding", "index": index, "embedding": _written(vector, body.encoding_format)}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": count, "total_tokens": count}
        return JSONResponse(
            {"object": "list", "data": data, "model": model.name, "usage": usage, "pooling": self._pooling}
        )

    def _embed(self, tokens: Sequence[int], adapter: str | None, vectors: list[np.ndarray]) -> None:
        """Adds the vector of a text, of length 1. In the engine's thread."""
        states = self._engine.hidden_states(tokens, adapter)  # [S, D]
        vector = states[-1] if self._pooling == "last" else states.mean(axis=0)
        vectors.append(vector / max(float(np.linalg.norm(vector)), 1e-12))


def _written(vector: np.ndarray, encoding: str) -> Any:
    if encoding == "float":
        return vector.tolist()
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
