"""The bounds of a server's work, its health and numbers, and who may ask from where."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from builders.served import Loaded, Served, ask, serving, wait_until

from danlu.cli.serve_flags import LimitFlags, WebFlags
from danlu.core.errors import RecipeError
from danlu.inference.engine import EngineOptions
from danlu.serving.metrics import Histogram
from danlu.serving.server import Limits

ASK: dict[str, Any] = {"model": "tiny", "prompt": "Once", "temperature": 0, "extra_body": {"ignore_eos": True}}
JSON = {"Content_Type": "application/json"}


class Held:
    """An engine's steps, which wait while they are held."""

    def __init__(self, served: Served, patch: pytest.MonkeyPatch) -> None:
        self.goes_on = threading.Event()
        step = served.server.engine._engine.step

        def held_step() -> Any:
            assert self.goes_on.wait(20)
            return step()

        patch.setattr(served.server.engine._engine, "step", held_step)


@pytest.fixture
def held(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Served, Held]]:
    limits = Limits(queue=1, hung_s=0.05)
    with serving(loaded.served, loaded.engine(EngineOptions(cache_gib=0.01, sequences=1)), limits=limits) as served:
        held = Held(served, monkeypatch)
        yield served, held
        held.goes_on.set()


def test_a_queue_that_is_full_and_an_engine_that_hangs(held: tuple[Served, Held]) -> None:
    served, engine = held
    client = served.client()
    assert ask(f"{served.root}/health") == (200, {"status": "ready"})
    threads = [threading.Thread(target=lambda: client.completions.create(**ASK, max_tokens=4)) for _ in range(2)]
    for number, thread in enumerate(threads, 1):
        thread.start()
        wait_until(lambda number=number: served.server.engine.open_answers == number)  # type: ignore[misc]
    with pytest.raises(openai.RateLimitError, match="1 answers wait, which is the queue's limit") as refused:
        client.completions.create(**ASK)
    assert refused.value.response.headers["retry-after"] == "1" and refused.value.code == "rate_limit_exceeded"
    wait_until(lambda: ask(f"{served.root}/health") == (503, {"status": "hung"}))
    engine.goes_on.set()
    for thread in threads:
        thread.join(20)
    wait_until(lambda: ask(f"{served.root}/health") == (200, {"status": "ready"}))
    assert client.completions.create(**ASK, max_tokens=2).choices[0].text
    assert "danlu_requests_rejected_total 1" in ask(f"{served.root}/metrics")[1]


def test_the_time_of_an_answer_is_bounded(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(loaded.served, loaded.engine(), limits=Limits(timeout_s=0.2)) as served:
        client = served.client()
        assert client.completions.create(**ASK, max_tokens=1).choices[0].finish_reason == "length"
        engine = Held(served, monkeypatch)
        with pytest.raises(
            openai.InternalServerError, match=r"not complete after 0.2 s, the server's --request"
        ) as late:
            client.completions.create(**ASK)
        assert late.value.status_code == 504 and late.value.response.headers["x-should-retry"] == "false"
        with pytest.raises(openai.APIError, match="not complete after 0.2 s"):
            list(client.completions.create(**ASK, stream=True))
        engine.goes_on.set()
        wait_until(lambda: served.blocks_used == 0)


def test_the_longest_text_of_a_server(loaded: Loaded) -> None:
    with serving(loaded.served, loaded.engine(), limits=Limits(longest=20)) as served:
        client = served.client()
        assert client.models.retrieve("tiny").model_extra == {"max_model_len": 20}
        answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}])
        assert answer.usage is not None and answer.usage.total_tokens <= 20
        with pytest.raises(openai.BadRequestError, match=r"more than the 20 that the server takes \(--max-model-len\)"):
            client.completions.create(**ASK, max_tokens=20)
    with pytest.raises(RecipeError, match="--max-model-len: 129 is more than the model's context of 128 tokens"):
        LimitFlags(max_model_len=129).check(128)


def test_health_knows_asleep_and_paused(loaded: Loaded) -> None:
    with serving(loaded.served, loaded.engine()) as served:
        engine = served.server.engine._engine
        for begin, end, state in (
            (engine.sleep, engine.wake, "asleep"),
            (lambda: engine.pause("keep"), engine.resume, "paused"),
        ):
            begin()
            assert ask(f"{served.root}/health") == (200, {"status": state})
            assert (f'vllm:engine_sleep_state{{model_name="tiny"}} {int(state == "asleep")}') in ask(
                f"{served.root}/metrics"
            )[1]
            end()
        assert ask(f"{served.root}/health") == (200, {"status": "ready"})


def test_numbers_by_vllms_names(loaded: Loaded) -> None:
    with serving(loaded.served, loaded.engine()) as served:
        served.client().completions.create(**ASK, max_tokens=4, n=2)
        list(served.client().completions.create(**ASK, max_tokens=4, stream=True))
        text = ask(f"{served.root}/metrics")[1]
    values = dict(re.findall(r'^(vllm:\w+)\{model_name="tiny"(?:,finished_reason="length")?\} (\S+)$', text, re.M))
    assert values["vllm:generation_tokens_total"] == "12" and values["vllm:request_success_total"] == "3"
    for name in ("time_to_first_token", "request_time_per_output_token"):
        assert values[f"vllm:{name}_seconds_count"] == "3" and float(values[f"vllm:{name}_seconds_sum"]) > 0
    assert values["vllm:num_requests_running"] == values["vllm:kv_cache_usage_perc"].rstrip(".0") + "0"[:1]
    assert 'vllm:e2e_request_latency_seconds_bucket{model_name="tiny",le="+Inf"} 3' in text


def test_a_histogram_counts_up_to_each_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.add(value)
    assert list(histogram.lines("x", 'a="b"')) == [
        'x_bucket{a="b",le="1.0"} 2',
        'x_bucket{a="b",le="2.0"} 3',
        'x_bucket{a="b",le="+Inf"} 4',
        'x_sum{a="b"} 12.0',
        'x_count{a="b"} 4',
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_sigterm_lets_answers_end(
    loaded: Loaded, number: signal.Signals, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "raise_signal", lambda number: None)  # which ends the process afterwards
    with serving(loaded.served, loaded.engine(), limits=Limits(drain_s=20)) as served:
        client, answers = served.client(), []
        options = {**ASK, "max_tokens": 100}
        thread = threading.Thread(target=lambda: answers.append(_finish(client, options)))
        thread.start()
        wait_until(lambda: served.server.engine.open_answers == 1)
        served.server.handle_exit(number, None)
        thread.join(20)
    assert answers == ["length" if number == signal.SIGTERM else "abort"]
    assert ("SIGTERM: 1 answers have 20 s; new requests are refused" in capsys.readouterr().err) == (
        answers == ["length"]
    )


def _finish(client: openai.OpenAI, options: dict[str, Any]) -> Any:
    return list(client.completions.create(**options, stream=True))[-1].choices[0].finish_reason


def test_pages_of_allowed_origins(loaded: Loaded) -> None:
    with serving(loaded.served, loaded.engine(), allowed_origins=("https://a.example",), api_key="k") as served:
        import urllib.request

        def answered(origin: str, method: str) -> tuple[int, Any]:
            headers = {"Origin": origin, "Access-Control-Request-Method": "POST", "Authorization": "Bearer k"}
            request = urllib.request.Request(f"{served.url}/models", headers=headers, method=method)
            try:
                with urllib.request.urlopen(request, timeout=20) as response:
                    return response.status, response.headers.get("access-control-allow-origin")
            except urllib.error.HTTPError as error:
                return error.code, error.headers.get("access-control-allow-origin")

        assert answered("https://a.example", "OPTIONS") == answered("https://a.example", "GET")
        assert answered("https://a.example", "GET") == (200, "https://a.example")
        assert answered("https://b.example", "OPTIONS")[0] == 400 and answered("https://b.example", "GET")[1] is None


def test_a_certificate(loaded: Loaded, tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.pem" for name in ("cert", "key", "other")}
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    for key in ("other", "key"):
        subprocess.run([*make, "-keyout", files[key], "-out", files["cert"]], check=True, capture_output=True)
    with pytest.raises(RecipeError, match="--ssl-keyfile: TLS needs a certificate and its key; give both, or neither"):
        WebFlags(ssl_certfile=files["cert"]).certificate()
    with pytest.raises(RecipeError, match="cannot be used: .*KEY_VALUES_MISMATCH"):
        WebFlags(ssl_certfile=files["cert"], ssl_keyfile=files["other"]).certificate()
    certificate = WebFlags(ssl_certfile=files["cert"], ssl_keyfile=files["key"]).certificate()
    with serving(loaded.served, loaded.engine(), certificate=certificate) as served:
        url = served.root.replace("http://", "https://")
        command = ["curl", "--silent", "--insecure", "--noproxy", "*", "--max-time", "20", f"{url}/health"]
        assert (
            json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["status"] == "ready"
        )
        assert subprocess.run([*command[:-1], f"{served.root}/health"], capture_output=True).returncode != 0
