"""`danlu serve --rollouts` behind its HTTP interface: the embedded engine, in a process of its own.

It says all that a `Completion` has: both log-probabilities of each token, the tokens that filters left, and the weights
that each was drawn with. Draws follow from the request alone, so any such server gives the same answer, and one that
was started with --numerics exact gives the trainer's log-probabilities to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from danlu import __version__
from danlu.core.errors import ModelError
from danlu.core.http_client import HTTPClient
from danlu.inference.engine import PauseMode
from danlu.remote_engines.danlu_protocol import PREFIX, PROTOCOL, answer_from_json, continuation_to_json, float_digest
from danlu.remote_engines.server_interface import Continuation, RolloutServer, ServerAnswer, check_vocabulary

if TYPE_CHECKING:
    from torch import Tensor

    from danlu.models.config import ModelConfig


class DanluServer(RolloutServer):
    """A client of such a server.

    Args:
        exact: the type of activations ("float32") that a trainer with numerics: exact computes in, which the server has
            to be as exact as; None: it may round otherwise.
        routes: whether answers come with the experts that their tokens went to.
        push: whether files of weights are sent; else the server reads them from the trainer's folder.
    """

    name = "danlu serve"
    shares_grammars = True

    def __init__(
        self, client: HTTPClient, *, exact: str | None = None, push: bool = False, routes: bool = False
    ) -> None:
        super().__init__(client)
        self._routes = routes
        self._dtype = exact
        self._push = push

    def check(self, config: ModelConfig) -> None:
        url, info = self.client.url, self._info()
        if info.get("protocol") != PROTOCOL:
            raise ModelError(
                f"{url}: danlu {info.get('version')} there and {__version__} here do not speak the same rollout "
                f"protocol ({info.get('protocol')} and {PROTOCOL}): install the same release"
            )
        check_vocabulary(self.name, url, config.vocab_size, lambda token: token < info["vocab_size"])
        self.context = info["context"]
        if info["paused"]:  # by a trainer that was killed
            self.pause("abort")
            self.wake()
        if self._dtype is not None and (not info["exact"] or info["dtype"] != self._dtype):
            flag = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[self._dtype]
            numerics = "exact" if info["exact"] else "fast"
            raise ModelError(
                f"{url}: numerics: exact in {self._dtype} needs a server that computes as the trainer does, and this "
                f"one was started with --numerics {numerics} in {info['dtype']}. Start it with --numerics exact "
                f"--dtype {flag}"
            )

    def _info(self) -> dict[str, Any]:
        info: dict[str, Any] = self.client.get(f"{PREFIX}/info")
        return info

    def answer(self, continuation: Continuation) -> ServerAnswer:
        return answer_from_json(self._post("answer", continuation_to_json(continuation, routes=self._routes)))

    def _post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return self.client.post(f"{PREFIX}/{path}", {} if body is None else body)

    def abort(self, request_ids: Sequence[str]) -> None:
        self._post("abort", {"request_ids": list(request_ids)})

    def pause(self, mode: PauseMode) -> None:
        self._post("pause", {"mode": mode})

    def resume(self) -> None:
        self._post("resume")

    def sleep(self) -> None:
        self._post("sleep")

    def wake(self) -> None:
        self._post("wake")

    def drop_prefix_cache(self) -> None:
        self._post("drop_prefix_cache")

    def version_label(self) -> str:
        return str(self._info()["label"])

    def label_version(self, label: str) -> None:
        self._post("label", {"label": label})

    def load_folder(self, folder: Path, label: str) -> None:
        self._post("weights", {**self._where(folder), "label": label})

    def load_adapter(self, name: str, folder: Path) -> None:
        self._post("adapter", {**self._where(folder), "name": name})

    def _where(self, folder: Path) -> dict[str, str]:
        """Says where a folder's files are, which are sent first where the server does not see them."""
        if not self._push:
            return {"folder": str(folder)}
        for file in sorted(folder.iterdir()):
            self.client.post_file(f"{PREFIX}/uploads/{folder.name}/{file.name}", file)
        return {"upload": folder.name}

    def differing(self, tensors: Mapping[str, Tensor]) -> list[str]:
        import torch

        served = self._post("digests", {"names": list(tensors)})["digests"]
        names = []
        for name, tensor in tensors.items():
            casts = (tensor.to(dtype) for dtype in {tensor.dtype, torch.bfloat16, torch.float16})
            if name in served and served[name] not in map(float_digest, casts):
                names.append(name)
        return names
