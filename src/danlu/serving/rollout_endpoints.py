"""The endpoints of `danlu serve --rollouts`: answers as a trainer needs them, and the weights that they are drawn with.

They are spoken to by `servers.danlu_server.DanluServer`. Whoever reaches them can replace the weights.
"""

from __future__ import annotations

import itertools
import re
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from danlu import __version__
from danlu.core.errors import DanluError
from danlu.inference import request as engine_request
from danlu.inference.engine_state import request_from_json
from danlu.inference.request import Completion
from danlu.inference.stopping import Decode
from danlu.remote_engines.danlu_protocol import PREFIX, PROTOCOL, completion_to_json
from danlu.serving.api_endpoints import as_api_errors, read_request, unless_gone
from danlu.serving.engine_thread import Call, EngineThread
from danlu.serving.event_stream import collect
from danlu.serving.openai_api import AnyBody, ApiError, Body
from danlu.serving.served_weights import ServedWeights

Handler = Callable[[Request], Awaitable[Response]]

FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")


class AnswerBody(Body):
    """One answer, or the rest of one; see `servers.server_interface.Continuation`."""

    request_id: str
    request: dict[str, Any]
    """A request as `engine_state.request_to_json` writes it."""
    routes: bool = False

    def engine_request(self, number: int) -> engine_request.Request:
        """The request to the engine. Raises ApiError for unknown fields and for invalid values."""
        if self.request.get("samples") != 1 or self.request.get("max_new_tokens", 0) == 0:
            raise ApiError("request: one answer of one token or more is asked for", param="request")
        try:
            return replace(request_from_json(self.request, complete=True), number=number)
        except DanluError as error:
            raise ApiError(str(error), param="request") from None


class PauseBody(Body):
    mode: Literal["abort", "keep"]


class AbortBody(Body):
    request_ids: list[str]


class LabelBody(Body):
    label: str


class WeightsBody(Body):
    """The place of weights: a folder that both sides see, or uploaded files."""

    folder: str | None = None
    upload: str | None = None


class FolderBody(WeightsBody):
    label: str


class AdapterBody(WeightsBody):
    name: str


class DigestsBody(Body):
    names: list[str]


class EmptyBody(Body):
    """An empty body: a page in a browser cannot send a body that is declared as JSON unasked."""


class RolloutEndpoints:
    """The endpoints, over the engine's thread.

    decode: token ids to text, in which stop strings are looked for. weights_root: where folders of weights lie.
    """

    def __init__(self, weights: ServedWeights, thread: EngineThread, decode: Decode, weights_root: Path) -> None:
        self._weights_root = weights_root.resolve()
        self._weights, self._engine, self._thread, self._decode = weights, weights.engine, thread, decode
        self._numbers = itertools.count(1 << 62)  # of engine requests, above those of other endpoints
        self._under_way: dict[str, int] = {}  # engine requests by the trainer's ids
        self._uploads = Path(tempfile.mkdtemp(prefix="danlu-uploads-"))

    def close(self) -> None:
        """Deletes the uploaded files."""
        shutil.rmtree(self._uploads, ignore_errors=True)

    @property
    def routes(self) -> list[Route]:
        engine, weights = self._engine, self._weights
        posts: Mapping[str, Handler] = {
            "answer": self.answer,
            "abort": self.abort,
            "pause": self._control(PauseBody, lambda body: engine.pause(body.mode)),
            "resume": self._control(EmptyBody, lambda body: engine.resume()),
            "sleep": self._control(EmptyBody, lambda body: self._sleep()),
            "wake": self._control(EmptyBody, lambda body: self._wake()),
            "drop_prefix_cache": self._control(EmptyBody, lambda body: engine.update(engine.version)),
            "label": self._control(LabelBody, lambda body: weights.name(body.label)),
            "weights": self.weights,
            "adapter": self.adapter,
            "digests": self.digests,
            "uploads/{upload}/{file}": self.upload,
        }
        routes = [Route(f"{PREFIX}/{path}", handler, methods=["POST"]) for path, handler in posts.items()]
        return [Route(f"{PREFIX}/info", self.info), *routes]

    async def info(self, request: Request) -> Response:
        return JSONResponse(
            {"server": "danlu", "version": __version__, "protocol": PROTOCOL, **self._weights.description()}
        )

    # -- answers

    async def answer(self, request: Request) -> Response:
        body = await read_request(AnswerBody, request)
        number = next(self._numbers)
        call = Call([body.engine_request(number)], self._decode, stream=False)
        self._under_way[body.request_id] = number
        try:
            with as_api_errors(answer_failed=422):  # as it would again: the trainer does not ask another time
                await self._thread.submit(call)
                (completion,) = await unless_gone(request, collect(call))
        finally:
            self._under_way.pop(body.request_id, None)
            self._thread.abort(call)
        return JSONResponse(completion_to_json(completion, self._weights.label_of, routes=body.routes))

    async def abort(self, request: Request) -> Response:
        body = await read_request(AbortBody, request)
        numbers = [self._under_way[name] for name in body.request_ids if name in self._under_way]

        def abort() -> list[Completion]:
            for number in numbers:
                self._engine.abort(number)
            return self._engine.pause("keep") if self._engine.is_paused else []  # no step will come for them

        return await self._do(abort)

    # -- control: between two steps

    def _control(self, kind: type[AnyBody], work: Callable[[AnyBody], list[Completion] | None]) -> Handler:
        """An endpoint that has the engine's thread do something with a body of this kind."""

        async def handle(request: Request) -> Response:
            return await self._do(partial(work, await read_request(kind, request)))

        return handle

    def _sleep(self) -> list[Completion]:
        """Gives the cache's memory back; unfinished answers end as they are."""
        completions = self._engine.pause("abort")
        self._engine.sleep()
        return completions

    def _wake(self) -> None:
        self._engine.wake()
        self._engine.resume()

    # -- weights

    async def weights(self, request: Request) -> Response:
        body = await read_request(FolderBody, request)
        return await self._load(body, lambda folder: self._weights.load_folder(folder, body.label))

    async def adapter(self, request: Request) -> Response:
        body = await read_request(AdapterBody, request)
        return await self._load(body, lambda folder: self._weights.load_adapter(body.name, folder))

    async def digests(self, request: Request) -> Response:
        body = await read_request(DigestsBody, request)
        digests: dict[str, str] = {}
        await self._do(lambda: digests.update(self._weights.digests(body.names)))
        return JSONResponse({"digests": digests})

    async def upload(self, request: Request) -> Response:
        """Takes one file of a folder of weights. An upload that is begun takes the place of any other."""
        upload, file = request.path_params["upload"], request.path_params["file"]
        if not (FILE_NAME.fullmatch(upload) and FILE_NAME.fullmatch(file)):
            raise ApiError(f"{upload}/{file}: names of files that are sent have letters, digits, '-', '_' and '.'")
        if request.headers.get("content-type") != "application/octet-stream":
            raise ApiError("a file is sent with the header Content-Type: application/octet-stream", status=415)
        for other in self._uploads.iterdir():
            if other.name != upload:
                shutil.rmtree(other, ignore_errors=True)
        folder = self._uploads / upload
        try:
            folder.mkdir(exist_ok=True)
            with (folder / file).open("wb") as written:
                async for chunk in request.stream():
                    written.write(chunk)
        except OSError as error:
            raise ApiError(f"{folder}: what is sent cannot be kept: {error}", status=500) from None
        return JSONResponse({})

    async def _load(self, body: WeightsBody, load: Callable[[Path], None]) -> Response:
        if (body.folder is None) == (body.upload is None):
            raise ApiError("weights: either a folder or an upload says where they are")
        if body.folder is not None:
            return await self._do(partial(load, self._allowed_folder(body.folder)))
        folder = self._uploads / str(body.upload)
        if not FILE_NAME.fullmatch(str(body.upload)) or not folder.is_dir():
            raise ApiError(f"upload: nothing was sent as {body.upload!r}", param="upload")
        try:
            return await self._do(partial(load, folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _allowed_folder(self, name: str) -> Path:
        """A folder below that of weights, links followed. Raises ApiError for another one, be it there or not."""
        try:
            folder = Path(name).resolve()
        except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a NUL
            raise ApiError(f"folder: {error}", param="folder") from None
        if not folder.is_relative_to(self._weights_root):
            raise ApiError(
                f"folder: {name} does not lie below {self._weights_root}, where this server reads weights: start it "
                "with another --weights-root, or have the trainer send them (rollout.server.push: true)",
                param="folder",
                status=403,
            )
        return folder

    # -- the engine's thread

    async def _do(self, work: Callable[[], list[Completion] | None]) -> Response:
        """Has the engine's thread do something between two steps."""
        with as_api_errors():
            await self._thread.do(work)
        return JSONResponse({})
