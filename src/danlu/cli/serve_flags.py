"""Flags of `danlu serve` in groups: its engine, the bounds of its work, and the web that it is a part of."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from danlu.core.errors import RecipeError

if TYPE_CHECKING:
    from danlu.inference.engine import EngineOptions


@dataclass(frozen=True)
class EngineFlags:
    """The engine's settings."""

    cache_gib: Annotated[float, typer.Option(min=0.001, help="Memory for keys and values, in GiB.")] = 2.0
    cache: Annotated[
        Literal["auto", "fp8", "int8", "int4"],
        typer.Option(help="Keys and values in the type of activations, or in 8 or 4 bits."),
    ] = "auto"
    sequences: Annotated[int, typer.Option(min=1, help="Most answers that grow at a time.")] = 256
    adapters_root: Annotated[
        Path | None,
        typer.Option(help="Let requests load adapters below this folder, and drop them: /v1/load_lora_adapter"),
    ] = None
    pooling: Annotated[
        Literal["last", "mean"], typer.Option(help="/v1/embeddings: the last token's hidden state, or the mean of all.")
    ] = "last"
    draft_tokens: Annotated[
        int,
        typer.Option(min=0, help="Tokens that are guessed from the text so far and checked in one pass; 0: none."),
    ] = 0

    def check(self) -> None:
        """Raises RecipeError for a folder of adapters that is not there."""
        if self.adapters_root is not None and not self.adapters_root.is_dir():
            raise RecipeError(f"--adapters-root {self.adapters_root}: there is no such folder")

    def options(self, *, exact: bool, routes: bool) -> EngineOptions:
        """The engine's options. exact, routes: as there."""
        from danlu.inference.engine import DraftOptions, EngineOptions

        draft = DraftOptions(tokens=self.draft_tokens) if self.draft_tokens else None
        return EngineOptions(
            cache_gib=self.cache_gib,
            cache=self.cache,
            sequences=self.sequences,
            draft=draft,
            exact=exact,
            routes=routes,
        )


@dataclass(frozen=True)
class LimitFlags:
    """The bounds of a server's work, in the order of `serving.server.Limits`."""

    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Most tokens of a prompt with its answer. Default: the model's context.")
    ] = None
    queue_limit: Annotated[
        int | None,
        typer.Option(
            min=0, help="Most answers that wait for those that grow; more get status 429. Default: any number."
        ),
    ] = None
    request_timeout: Annotated[
        float | None, typer.Option(min=0.001, help="Most seconds of an answer. Default: any number.")
    ] = None
    hung_after: Annotated[
        float, typer.Option(min=0.001, help="Seconds of one step after which /health says that the engine hangs.")
    ] = 300.0
    drain: Annotated[float, typer.Option(min=0, help="Seconds that unfinished answers have after SIGTERM.")] = 0.0

    def check(self, context: int) -> None:
        """Raises RecipeError for more tokens than a model's context has."""
        if self.max_model_len is not None and self.max_model_len > context:
            raise RecipeError(
                f"--max-model-len: {self.max_model_len} is more than the model's context of {context} tokens"
            )


@dataclass(frozen=True)
class WebFlags:
    """Where the server listens, who may ask, and its certificate."""

    host: Annotated[str, typer.Option(help="The address to listen at; 0.0.0.0 for all networks.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="DANLU_API_KEY", help="What clients have to send; none: anyone may ask, but with --rollouts."
        ),
    ] = None
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(help="The origin of a web page that may ask (CORS), or *; may be given several times."),
    ] = None
    ssl_certfile: Annotated[Path | None, typer.Option(help="The TLS certificate; with --ssl-keyfile: https.")] = None
    ssl_keyfile: Annotated[Path | None, typer.Option(help="The certificate's key, without a password.")] = None

    @property
    def checked_key(self) -> str | None:
        """The API key. Raises RecipeError for an empty one."""
        if self.api_key == "":
            raise RecipeError("--api-key: an empty key would let everybody in; leave the option out, or give a key")
        return self.api_key

    def certificate(self) -> tuple[Path, Path] | None:
        """The files of the TLS certificate and its key; None for plain HTTP.

        Raises RecipeError where they do not belong together.
        """
        file, key = self.ssl_certfile, self.ssl_keyfile
        if file is None and key is None:
            return None
        if file is None or key is None:
            missing = "--ssl-certfile" if file is None else "--ssl-keyfile"
            raise RecipeError(f"{missing}: TLS needs a certificate and its key; give both, or neither")
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(file, key, password="")
        except (OSError, ValueError) as error:
            raise RecipeError(f"--ssl-certfile {file}, --ssl-keyfile {key}: cannot be used: {error}") from None
        return file, key
