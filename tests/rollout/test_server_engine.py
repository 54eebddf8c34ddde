"""Engines over servers, put together from options alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders.remote_engines import KINDS, adapter_writer
from builders.rollout_servers import TIMEOUT_S

from danlu.errors import RecipeError
from danlu.rollout.request import Request, SamplingOptions
from danlu.rollout.server_engine import HandedAdapter, server_engine
from danlu.rollout.server_interface import ServerOptions

REQUEST = Request(0, (3, 9, 4), SamplingOptions(temperature=0), 6)


@pytest.fixture(params=sorted(KINDS))
def stand_in(request, small_decoder):
    running = KINDS[request.param](small_decoder())
    running.kind = request.param
    yield running
    running.close()


def options_of(stand_in, **settings):
    return ServerOptions(stand_in.url, timeout_s=TIMEOUT_S, reconnect_s=1, **settings)


def test_weights_as_a_folder_whose_path_the_server_understands(stand_in, small_decoder, tmp_path, monkeypatch):
    new = small_decoder(seed=1)
    monkeypatch.chdir(tmp_path)
    options = options_of(stand_in, hand_over="folder", exchange_folder=Path("hand-over"))
    engine = server_engine(stand_in.kind, options, new.config)
    (before,) = engine.generate([REQUEST])
    engine.update(1, new.named_parameters())
    (after,) = engine.generate([REQUEST])
    engine.close()
    assert after.tokens != before.tokens and after.versions == [1] * 6
    paths = [str(body) for _, path, body in stand_in.calls if path in ("/collective_rpc", "/update_weights_from_disk")]
    assert len(paths) == 1 and f"{tmp_path}/hand-over/weights-1" in paths[0]


def test_the_adapter_alone(stand_in, small_decoder, tmp_path):
    options = options_of(stand_in, hand_over="adapter", exchange_folder=tmp_path)
    adapter = HandedAdapter("policy", adapter_writer(small_decoder(), 1))
    engine = server_engine(stand_in.kind, options, small_decoder().config, adapter=adapter)
    engine.update(1)
    assert engine.generate([REQUEST])[0].versions == [1] * 6
    engine.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hand_over": "folder"}, "exchange_folder: missing; hand_over: folder lays files there"),
        ({"hand_over": "adapter", "exchange_folder": "x"}, "there is no adapter to hand over"),
    ],
)
def test_what_is_missing_is_told_before_the_server_is_asked(small_decoder, tmp_path, settings, message):
    if "exchange_folder" in settings:
        settings = settings | {"exchange_folder": tmp_path}
    options = ServerOptions("http://127.0.0.1:9", **settings)
    with pytest.raises(RecipeError, match=message):
        server_engine("vllm", options, small_decoder().config)
