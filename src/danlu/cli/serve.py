"""`danlu serve`: a model and its adapters behind OpenAI's API."""

from __future__ import annotations

import secrets
from dataclasses import astuple
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal

import typer

from danlu.cli.model_flags import ModelArgument, ModelFlags, takes_flag_groups
from danlu.cli.serve_flags import EngineFlags, LimitFlags, WebFlags
from danlu.core.errors import RecipeError, ResourceError
from danlu.core.server_key import write_key
from danlu.core.terminal import print_status, print_status_early

EXTRA = ("starlette", "uvicorn")
"""Packages that only this verb needs."""


@takes_flag_groups
def serve(
    model: ModelArgument,
    *,
    adapter: Annotated[
        list[str] | None,
        typer.Option(help="An adapter folder or run, which requests choose by its name; may be given several times."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="What requests call the model. Default: its folder's name.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of requests that bring none. Default: another one each time.")
    ] = None,
    rollouts: Annotated[
        bool, typer.Option("--rollouts", help="Let a trainer (rollout.engine: http) replace the weights.")
    ] = False,
    weights_root: Annotated[
        Path | None,
        typer.Option(help="The folder below which a trainer may name folders of weights. Default: the current one."),
    ] = None,
    numerics: Annotated[
        Literal["fast", "exact"],
        typer.Option(help="exact: the log-probabilities of a trainer with numerics: exact, to the last bit."),
    ] = "fast",
    reasoning_parser: Annotated[
        Literal["auto", "none"], typer.Option(help="none: thoughts (<think>) stay in the text of chat answers.")
    ] = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", help="No line for each request.")] = False,
    web: WebFlags,
    engine_flags: EngineFlags,
    limits: LimitFlags,
    loading: ModelFlags,
) -> None:
    """Answer over HTTP as OpenAI's API does: completions and chat, streamed, by a model and its adapters.

    Any OpenAI client works with base_url http://127.0.0.1:8000/v1. Ctrl-C ends.
    """
    loading.check({}, seed or 0, [])
    if rollouts or weights_root is not None:
        _check_rollouts(weights_root, engine_flags, rollouts=rollouts, adapters=bool(adapter), numerics=numerics)
    engine_flags.check()
    certificate, api_key = web.certificate(), web.checked_key
    server = _server_module()
    # numpy, a tenth of a second, and below torch, more than one: for this verb, not for its --help.
    from danlu.inference.resolve_model import resolve_model

    resolved = resolve_model(model, loading.base, adapter or [])
    listener = server.bind(web.host, web.port)
    makes_key = rollouts and api_key is None
    if api_key is None and not makes_key and not server.is_loopback(listener):
        print_status(f"warning: anyone who can reach {web.host} can use this server: --api-key says who may")
    print_status_early(f"reading {resolved.given_path}")
    from danlu.inference.load_engine import engine_of, loadable_adapters
    from danlu.models.hf_folder import read_config
    from danlu.serving.adapter_endpoints import AdapterLoader
    from danlu.serving.served_models import served_models
    from danlu.serving.served_weights import served_weights

    limits.check(read_config(resolved.folder).context_length)
    loaded = loading.load(resolved, loading.load_tokenizer(resolved))
    models = served_models(resolved, loaded, name, *loading.template, reasoning=reasoning_parser == "auto")
    for note in models.notes:
        print_status(note)
    settings = engine_flags.options(exact=numerics == "exact", routes=rollouts)
    weights = served_weights(loaded, settings) if rollouts else None
    adapters = None if engine_flags.adapters_root is None else loadable_adapters(loaded)
    engine = engine_of(loaded, settings, adapters) if weights is None else weights.engine
    root, reasoning = engine_flags.adapters_root, reasoning_parser == "auto"
    loader = None
    if adapters is not None and root is not None:
        chat_tokenizer = loaded.chat_tokenizer
        loader = AdapterLoader(resolved, engine, adapters, chat_tokenizer, root, loading.chat_template, reasoning)
    if makes_key:
        api_key = _new_key(listener.getsockname()[1])
    options = server.ServerOptions(
        secrets.randbits(62) if seed is None else seed,
        api_key,
        quiet,
        limits=server.Limits(*astuple(limits)),
        allowed_origins=tuple(web.allowed_origins or ()),
        pooling=engine_flags.pooling,
        certificate=certificate,
        leaves_key=makes_key,
        weights_root=weights_root or Path.cwd(),
    )
    server.Server(models, engine, listener, options, weights, loader).listen()


def _check_rollouts(
    weights_root: Path | None, flags: EngineFlags, *, rollouts: bool, adapters: bool, numerics: str
) -> None:
    """Raises RecipeError for flags that a server for a trainer does not have, and for those that only it has."""
    if weights_root is not None and not (rollouts and weights_root.is_dir()):
        why = "there is no such folder" if rollouts else "weights are read with --rollouts only; leave it out"
        raise RecipeError(f"--weights-root {weights_root}: {why}")
    if adapters or flags.adapters_root is not None:
        flag = "--adapter" if adapters else "--adapters-root"
        raise RecipeError(f"{flag}: a trainer brings its adapter itself; leave it out with --rollouts")
    if flags.draft_tokens and numerics == "exact":
        raise RecipeError("--draft-tokens: drafts change the random numbers of a draw; leave it out with exact")


def _server_module() -> ModuleType:
    """The module of the server. Raises ResourceError where a package that only it needs is not installed."""
    try:
        from danlu.serving import server
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA:
            raise
        raise ResourceError(
            f"danlu serve needs the package {package}, which is not installed: pip install 'danlu[serve]'"
        ) from None
    return server


def _new_key(port: int) -> str:
    """A new API key, written to the file in which a trainer of this user looks for the one of a port, and printed."""
    api_key = secrets.token_urlsafe(32)
    file = write_key(port, api_key)
    print_status(
        f"--rollouts: the API key is {api_key}\nA trainer of this user on this machine reads it in {file}; another "
        "one needs it in the variable that rollout.server.api_key_variable names"
    )
    return api_key
