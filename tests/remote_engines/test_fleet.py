"""Several rollout servers as one: who is asked, what becomes of requests when one dies, and how it comes back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.remote_engines import KINDS, scores
from builders.rollout_servers import TIMEOUT_S, StandIn

from danlu.core.errors import ModelError, ResourceError, TrainingError
from danlu.core.http_client import RequestRefused
from danlu.inference.request import Completion, Request, SamplingOptions
from danlu.models.decoder import Decoder
from danlu.remote_engines import fleet as fleet_module
from danlu.remote_engines.canary import Canary, CanaryAnswers, compare_with_servers
from danlu.remote_engines.detect import Demands, detect_server
from danlu.remote_engines.fleet import ServerFleet
from danlu.remote_engines.hand_over import FolderHandOver
from danlu.remote_engines.http_engine import HTTPEngine
from danlu.remote_engines.server_interface import ServerOptions
from danlu.remote_engines.vllm import VLLMServer

SAMPLED = SamplingOptions(seed=4)
PROMPTS = [(3, 9, 4), (7,), (11, 12, 13, 14)]


@pytest.fixture(autouse=True)
def looking_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "POLL_S", 0.02)


def requests(samples: int = 4) -> list[Request]:
    return [Request(number, prompt, SAMPLED, 6, samples) for number, prompt in enumerate(PROMPTS)]


def tokens(completions: list[Completion]) -> list[tuple[int, int, list[int]]]:
    return [(completion.number, completion.sample, completion.tokens) for completion in completions]


def until(is_so: Any) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.005)


@contextmanager
def fleet_of(
    stand_ins: list[StandIn],
    model: Decoder,
    folder: Path | None = None,
    *,
    connections: int = 4,
    reconnect_s: float = 0.3,
) -> Iterator[tuple[HTTPEngine, ServerFleet]]:
    urls = tuple(stand_in.url for stand_in in stand_ins)
    options = ServerOptions(urls, timeout_s=TIMEOUT_S, reconnect_s=reconnect_s, connections=connections)
    fleet = ServerFleet(options.clients, lambda client: detect_server(client, Demands(bucket_bytes=20_000)))
    hand_over = None if folder is None else FolderHandOver(model.config, folder, 1)
    try:
        engine = HTTPEngine(fleet, options, model.config, hand_over=hand_over)
        yield engine, fleet
        engine.close()
    finally:
        fleet.close()
        for stand_in in stand_ins:
            stand_in.answer_gate.set()
            stand_in.served.resume()
            stand_in.close()


def asked(stand_in: StandIn) -> int:
    return sum(path in ("/v1/completions", "/generate") and bool(set(body) & {"request_id", "rid"})
               for _, path, body in stand_in.calls if isinstance(body, dict))  # fmt: skip


def die(stand_in: StandIn) -> None:
    stand_in.dead = True


def come_back(stand_in: StandIn, model: Decoder) -> None:
    """As one that was started anew, with the weights of the beginning."""
    stand_in.served.model.load_state_dict(model.state_dict())
    stand_in.served.label = "default"
    stand_in.served.drop_cache()
    stand_in.faults.die_after = None
    stand_in.dead = False


def canary_answers(engine: HTTPEngine, model: Decoder) -> CanaryAnswers:
    return Canary([(5, 6, 7) * 5], scores(model), 1e-3, 4).check(engine).answers


def changed(model: Decoder) -> Decoder:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.2).add_(0.02)
    return model


@pytest.mark.parametrize("kinds", [("vllm", "vllm"), ("sglang", "vllm")])
def test_requests_go_to_the_server_with_the_fewest(small_decoder: Any, kinds: tuple[str, str]) -> None:
    stand_ins = [KINDS[kind](small_decoder()) for kind in kinds]
    with fleet_of(stand_ins, small_decoder()) as (engine, fleet):
        for stand_in in stand_ins:
            stand_in.answer_gate.clear()
        for request in requests():
            engine.submit(request)
        engine._dispatch()  # as many as there are connections
        until(lambda: [replica.in_flight for replica in fleet.replicas] == [2, 2])
        for stand_in in stand_ins:
            stand_in.answer_gate.set()
        done = []
        while engine.unfinished:
            done += engine.step()
        assert [replica.in_flight for replica in fleet.replicas] == [0, 0] and not fleet._places
    keys = sorted((completion.number, completion.sample) for completion in done)
    assert keys == [(number, sample) for number in range(3) for sample in range(4)]
    assert sum(map(asked, stand_ins)) == 12


def test_what_a_server_loses_that_dies_the_others_answer(small_decoder: Any) -> None:
    with fleet_of([KINDS["vllm"](small_decoder())], small_decoder()) as (engine, _):
        expected = engine.generate(requests())
    stand_ins = [KINDS["vllm"](small_decoder(), faults=faults) for faults in ({"die_after": 2}, {})]
    with fleet_of(stand_ins, small_decoder()) as (engine, fleet):
        completions = engine.generate(requests())
        assert [replica.is_usable for replica in fleet.replicas] == [False, True]
        assert tokens(engine.generate([replace(each, number=each.number + 10) for each in requests()]))
    assert tokens(completions) == tokens(expected)


def test_one_that_comes_back_gets_the_present_weights_and_passes_the_canary(
    small_decoder: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, stand_ins = small_decoder(), [KINDS["vllm"](small_decoder()) for _ in range(2)]
    trained = changed(small_decoder())
    with fleet_of(stand_ins, first, tmp_path) as (engine, fleet):
        engine.update(1, trained.named_parameters())
        fleet.accept(canary_answers(engine, trained))
        die(stand_ins[1])
        expected = engine.generate(requests())
        until(lambda: len(fleet.usable) == 1)
        come_back(stand_ins[1], first)
        until(lambda: len(fleet.usable) == 2)
        die(stand_ins[0])
        again = engine.generate(requests())
        assert tokens(again) == tokens(expected)
        assert {version for completion in again for version in completion.versions} == {1}
        paths = stand_ins[1].paths()
        paths = paths[len(paths) - paths[::-1].index("/collective_rpc") - 1 :]
        assert paths.index("/reset_prefix_cache") < paths.index("/resume") < paths.index("/v1/completions")
    assert f"{stand_ins[1].url} is there again with weights 1" in capsys.readouterr().err


def test_one_that_does_not_take_the_weights_is_not_asked_until_there_are_others(
    small_decoder: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, stand_ins = small_decoder(), [KINDS["vllm"](small_decoder()) for _ in range(2)]
    trained = changed(small_decoder())
    with fleet_of(stand_ins, first, tmp_path) as (engine, fleet):
        engine.update(1, trained.named_parameters())
        fleet.accept(canary_answers(engine, trained))
        die(stand_ins[1])
        engine.generate(requests())
        stand_ins[1].faults.ignored = ("model.layers.1.mlp.down_proj.weight",)
        before = asked(stand_ins[1])
        come_back(stand_ins[1], first)
        until(lambda: fleet.replicas[1].refused_at == "1")
        engine.generate(requests())
        assert asked(stand_ins[1]) == before + 1  # the canary alone
        stand_ins[1].faults.ignored = ()
        engine.update(2, trained.named_parameters())
        until(lambda: len(fleet.usable) == 2)
    said = capsys.readouterr().err
    assert f"{stand_ins[1].url} is there again, but not asked until it has other weights: canary: " in said


def test_a_server_that_answers_otherwise_stops_the_run_when_weights_were_handed_over(
    small_decoder: Any, tmp_path: Path
) -> None:
    trained = changed(small_decoder())
    faults = {"ignored": ("model.layers.1.mlp.down_proj.weight",)}
    stand_ins = [KINDS["vllm"](small_decoder()), KINDS["vllm"](small_decoder(), faults=faults)]
    with fleet_of(stand_ins, small_decoder(), tmp_path) as (engine, fleet):
        engine.update(1, trained.named_parameters())
        differing = compare_with_servers(fleet, trained.config, trained.get_parameter)
        assert differing(None) == [f"model.layers.1.mlp.down_proj.weight ({stand_ins[1].url})"]
        report = canary_answers(engine, trained)  # by the first, which has fewest
        with pytest.raises(TrainingError, match=f"canary: {stand_ins[1].url} does not answer as"):
            fleet.accept(report)


def test_all_are_gone(small_decoder: Any) -> None:
    stand_ins = [KINDS["vllm"](small_decoder(), faults={"die_after": 1}) for _ in range(2)]
    with fleet_of(stand_ins, small_decoder(), connections=2) as (engine, fleet):
        for request in requests():
            engine.submit(request)
        done: list[Completion] = []

        def answer_all() -> None:
            while engine.unfinished:
                done.extend(engine.step())

        with pytest.raises(ResourceError, match="not back within 0.3 s .*10 answers are unfinished"):
            answer_all()
        assert len(done) == 2 and not fleet.usable
        come_back(stand_ins[1], small_decoder())
        until(lambda: len(fleet.usable) == 1)
        answer_all()
    keys = sorted((completion.number, completion.sample) for completion in done)
    assert keys == [(number, sample) for number in range(3) for sample in range(4)]


def test_none_is_there_at_first_or_some_are(small_decoder: Any, capsys: pytest.CaptureFixture[str]) -> None:
    options = ServerOptions(("http://127.0.0.1:9", "http://127.0.0.1:10"), timeout_s=1, reconnect_s=0.1)
    fleet = ServerFleet(options.clients, lambda client: detect_server(client, Demands()))
    with pytest.raises(ResourceError, match="127.0.0.1:9, http://127.0.0.1:10: no rollout server answers"):
        HTTPEngine(fleet, options, small_decoder().config)
    fleet.close()
    stand_in = KINDS["sglang"](small_decoder())
    missing = StandIn(small_decoder())
    missing.close()
    with fleet_of([stand_in, missing], small_decoder()) as (engine, fleet):
        assert len(engine.generate(requests())) == 12
    assert f"no rollout server answers at {missing.url}; going on with the others" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("demands", "message"),
    [
        (Demands(exact="float32"), "vLLM has kernels of its own.*Use danlu serve --rollouts --numerics exact there"),
        (Demands(push=True), "vLLM takes no files over HTTP"),
    ],
)
def test_what_other_servers_cannot_do(small_decoder: Any, demands: Demands, message: str) -> None:
    stand_in = KINDS["vllm"](small_decoder())
    (client,) = ServerOptions((stand_in.url,), timeout_s=TIMEOUT_S).clients
    with pytest.raises(ModelError, match=message):
        detect_server(client, demands)
    stand_in.routes = dict  # type: ignore[method-assign]
    with pytest.raises(ModelError, match="neither danlu serve --rollouts nor vLLM nor SGLang answers there"):
        detect_server(client, demands)
    stand_in.close()


@pytest.mark.parametrize(("status", "left"), [(500, 2), (502, 0)])
def test_a_request_that_servers_fail_at_takes_none_of_them_out(
    small_decoder: Any, monkeypatch: pytest.MonkeyPatch, status: int, left: int
) -> None:
    stand_ins = [KINDS["vllm"](small_decoder()) for _ in range(2)]
    with fleet_of(stand_ins, small_decoder()) as (engine, fleet):
        real = type(fleet.replicas[0].connected).answer

        def answer(self: Any, continuation: Any) -> Any:
            if continuation.request.number == 1:
                raise RequestRefused(f"{self.address}: the model answers with NaN", status)
            return real(self, continuation)

        monkeypatch.setattr(VLLMServer, "answer", answer)
        monkeypatch.setattr(fleet, "_take_back", lambda replica: None)
        with pytest.raises(ResourceError) as raised:
            engine.generate(requests())
        assert len(fleet.usable) == left  # control: what says that a server is gone takes it out
        if left:
            assert "prompt 1, sample" in str(raised.value) and "3 times without a token" in str(raised.value)
            assert "answers with NaN" in str(raised.value)
