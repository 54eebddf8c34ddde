"""`danlu serve --rollouts` as a rollout engine: it answers as the embedded engine does, with weights it is given."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders.expert_folder import expert_folder
from builders.remote_engines import only_server
from builders.served import ask, serving_rollouts, wait_until
from builders.tiny_adapters import adapter_set, perturb
from builders.tiny_world import World

from danlu.adapters.peft_folder import write_adapter
from danlu.core.errors import DataError, ModelError, ResourceError
from danlu.core.http_client import HTTPClient, RequestRefused
from danlu.core.server_key import read_key, remove_key, write_key
from danlu.data.tokenizer import load_tokenizer
from danlu.inference.completion_bytes import to_bytes
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import EngineOptions
from danlu.inference.grammar import Grammars, regex_grammar
from danlu.inference.load_model import load_chat_tokenizer
from danlu.inference.request import Completion, Request, SamplingOptions
from danlu.models.decoder import Decoder
from danlu.models.loading import load
from danlu.recipe.sections.adapters import Lora
from danlu.remote_engines.danlu_protocol import continuation_to_json
from danlu.remote_engines.danlu_server import DanluServer
from danlu.remote_engines.detect import Demands, detect_server
from danlu.remote_engines.fleet import ServerFleet
from danlu.remote_engines.hand_over import AdapterHandOver, FolderHandOver, HandOver, folder_weights
from danlu.remote_engines.http_engine import HTTPEngine
from danlu.remote_engines.server_interface import Continuation, ServerOptions
from danlu.serving.openai_api import ApiError
from danlu.serving.rollout_endpoints import RolloutEndpoints

FILTERED = SamplingOptions(temperature=0.8, top_k=7, top_p=0.9, seed=4)
PROMPTS = [(3, 9, 4), (7,), (11, 12, 13, 14)]


def requests(options: SamplingOptions = FILTERED, count: int = 8, samples: int = 2, **more: Any) -> list[Request]:
    return [Request(number, prompt, options, count, samples, **more) for number, prompt in enumerate(PROMPTS)]


@contextmanager
def engine_at(
    url: str,
    model: Decoder,
    hand_over: HandOver | None = None,
    *,
    exact: str | None = None,
    push: bool = False,
    routes: bool = False,
    grammars: Grammars | None = None,
) -> Iterator[HTTPEngine]:
    options = ServerOptions((url.removesuffix("/v1"),), timeout_s=20, reconnect_s=0.2)
    demands = Demands(exact, push, routes=routes)
    servers = ServerFleet(options.clients, lambda client: detect_server(client, demands), reloads=False)
    engine = HTTPEngine(servers, options, model.config, hand_over=hand_over, grammars=grammars)
    try:
        yield engine
    finally:
        engine.close()


def embedded(model: Decoder, *, exact: bool = False, dtype: torch.dtype | None = None) -> EmbeddedEngine:
    return EmbeddedEngine(model, EngineOptions(cache_gib=0.01, exact=exact), dtype=dtype)


def bits(completions: Sequence[Completion]) -> bytes:
    """All that answers have but their text, for which these engines have no tokenizer."""
    return to_bytes([replace(completion, text="") for completion in completions])


def changed(model: Decoder) -> Decoder:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5).add_(0.02)
    return model


def test_it_answers_as_the_embedded_engine_does_to_the_last_bit(tiny_world: World, tmp_path: Path) -> None:
    model = load(tiny_world.base)
    with (
        serving_rollouts(tiny_world.base, exact=True) as served,
        engine_at(served.url, model, exact="float32") as engine,
    ):
        assert isinstance(only_server(engine), DanluServer)
        answers = engine.generate(requests(top_logprobs=2))
        others = engine.generate(requests(replace(FILTERED, seed=5), top_logprobs=2))
    own = embedded(model, exact=True)
    expected = own.generate(requests(top_logprobs=2))
    assert bits(answers) == bits(expected)
    assert all(answer.support is not None and answer.drawn != answer.logprobs for answer in answers)
    assert [answer.tokens for answer in others] != [answer.tokens for answer in answers]  # control


def test_it_answers_in_a_form_as_the_embedded_engine_does_also_the_rest_of_an_answer(tiny_world: World) -> None:
    pytest.importorskip("llguidance")
    model, tokenizer = load(tiny_world.base), load_tokenizer(str(tiny_world.base))
    grammars = Grammars(tokenizer, model.config.vocab_size, tokenizer.end_of_turn_ids)
    own = EmbeddedEngine(model, EngineOptions(cache_gib=0.01, exact=True), grammars=grammars)
    asked = requests(SamplingOptions(seed=4), count=40, grammar=regex_grammar("<[a-f]{4,9}>"))
    expected = own.generate(asked)
    with serving_rollouts(tiny_world.base, exact=True) as served:
        with engine_at(served.url, model, exact="float32", grammars=grammars) as engine:
            answers = engine.generate(asked)
            whole, server = expected[0], only_server(engine)
            begun = server.answer(Continuation("a", asked[0], asked[0].prompt, 3, None))
            tokens = (*asked[0].prompt, *begun.tokens)
            rest = server.answer(Continuation("b", asked[0], tokens, 37, None))
            anew = server.answer(Continuation("c", replace(asked[0], prompt=tokens), tokens, 37, None))
        with engine_at(served.url, model, exact="float32") as engine, pytest.raises(DataError, match="no tokenizer"):
            engine.generate(asked)
    assert bits(answers) == bits(expected) and whole.support is not None
    assert begun.tokens + rest.tokens == whole.tokens and begun.support is not None and rest.support is not None
    left = [support.ids.tolist() for support in (*begun.support, *rest.support)]
    assert left == [support.ids.tolist() for support in whole.support]
    assert anew.tokens != rest.tokens, "control: a form that begins again"


def test_it_says_which_experts_tokens_went_to(tiny_world: World) -> None:
    """Also of answers that were broken off and asked for again with the tokens that they had."""
    folder = expert_folder(tiny_world)
    model = load(folder)
    own = EmbeddedEngine(model, EngineOptions(cache_gib=0.01, exact=True, routes=True))
    expected = own.generate(requests(count=24))
    with (
        serving_rollouts(folder, exact=True) as served,
        engine_at(served.url, model, exact="float32", routes=True) as engine,
    ):
        for request in requests(count=24):
            engine.submit(request)
        answers = engine.step()
        engine.sleep()
        engine.wake()
        while engine.unfinished:
            answers += engine.step()
        with engine_at(served.url, model, exact="float32") as not_asking:
            assert all(answer.routes is None for answer in not_asking.generate(requests()))
    answers.sort(key=lambda answer: (answer.number, answer.sample))
    assert bits(answers) == bits(expected)
    assert expected[0].routes is not None and expected[0].routes.shape == (3 + 24 - 1, 2, 2)
    without = [replace(answer, routes=None) for answer in answers]
    assert bits(without) != bits(expected)  # control


@pytest.mark.parametrize("push", [False, True], ids=["folder", "push"])
def test_weights_arrive_whole_and_in_float32_where_numerics_are_exact(
    tiny_world: World, tmp_path: Path, push: bool
) -> None:
    model = changed(load(tiny_world.base))
    hand_over = FolderHandOver(model.config, tmp_path / "exchange", 1)
    hand_over._bucket_bytes = 20_000  # several files
    with (
        serving_rollouts(tiny_world.base, exact=True, dtype="bf16") as served,
        engine_at(served.url, model, hand_over, exact="bfloat16", push=push) as engine,
    ):
        before = engine.generate(requests())
        engine.update(1, model.named_parameters())
        assert len(list((tmp_path / "exchange" / "weights-1").iterdir())) > 3
        answers = engine.generate(requests())
        assert only_server(engine).version_label() == "1"
        tensors = dict(folder_weights(model.config, model.named_parameters()))
        assert only_server(engine).differing(tensors) == []
        tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1e-2
        assert only_server(engine).differing(tensors) == ["model.norm.weight"]
    assert not (tmp_path / "exchange" / "weights-1").exists()
    expected = embedded(model, exact=True, dtype=torch.bfloat16).generate(requests())
    expected = [replace(answer, versions=[1] * len(answer.tokens)) for answer in expected]
    assert bits(answers) == bits(expected)
    assert [answer.tokens for answer in before] != [answer.tokens for answer in answers]  # control


def test_a_running_answer_goes_on_with_new_weights_and_says_which(tiny_world: World, tmp_path: Path) -> None:
    model = load(tiny_world.base)
    hand_over = FolderHandOver(model.config, tmp_path, 1)
    with serving_rollouts(tiny_world.base) as served, engine_at(served.url, model, hand_over) as engine:
        for request in requests(SamplingOptions(seed=1), count=40, samples=1):
            engine.submit(request)
        only_server(engine).pause("keep")
        engine._dispatch()  # asked for while the server is paused, and answered by the weights that come
        engine.update(1, changed(model).named_parameters())
        done = []
        while engine.unfinished:
            done += engine.step()
    assert {version for completion in done for version in completion.versions} == {1}
    assert all(len(completion.tokens) == 40 for completion in done)


def test_what_is_aborted_is_asked_for_again_and_sleep_gives_the_cache_back(tiny_world: World) -> None:
    model = load(tiny_world.base)
    with serving_rollouts(tiny_world.base) as served, engine_at(served.url, model) as engine:
        expected = engine.generate(requests(count=60, samples=1))
        for request in requests(count=60, samples=1):
            engine.submit(request)
        engine._dispatch()
        only_server(engine).pause("abort")
        only_server(engine).resume()
        engine._dispatch()
        engine.sleep()
        assert served.blocks_used == 0 and engine.unfinished == 3
        engine.wake()
        done = []
        while engine.unfinished:
            done += engine.step()
    done.sort(key=lambda completion: completion.number)
    assert [completion.tokens for completion in done] == [completion.tokens for completion in expected]


def test_one_request_is_aborted(tiny_world: World) -> None:
    model = load(tiny_world.base)
    with serving_rollouts(tiny_world.base) as served, engine_at(served.url, model) as engine:
        only_server(engine).pause("keep")
        engine.submit(Request(0, (3,), max_new_tokens=60))
        engine._dispatch()
        rollouts = served.server._rollouts
        assert rollouts is not None
        wait_until(lambda: bool(rollouts._under_way))
        engine._forget(0)
        engine._in_flight.abort_abandoned()
        wait_until(lambda: not rollouts._under_way)


def test_an_adapter_is_replaced_by_its_name(tiny_world: World, tmp_path: Path) -> None:
    model = load(tiny_world.base)
    adapters = adapter_set(model)
    adapters.add("policy", Lora(rank=2, targets=["q_proj", "down_proj"]))

    def write(folder: Path) -> None:
        write_adapter(adapters, "policy", folder, base="base", base_fingerprint=None)

    hand_over = AdapterHandOver("policy", tmp_path, write)
    own = embedded(model)
    with serving_rollouts(tiny_world.base) as served, engine_at(served.url, model, hand_over, push=True) as engine:
        answers = []
        for version in (1, 2):
            perturb(adapters, "policy", seed=version, size=0.5)
            engine.update(version)
            answers.append(engine.generate(requests()))
            own.update(version)
            tokens = [answer.tokens for answer in own.generate(requests())]
            assert [answer.tokens for answer in answers[-1]] == tokens
            assert {each for answer in answers[-1] for each in answer.versions} == {version}
        base = engine.generate(requests(adapter="none"))
    assert answers[0] != answers[1]
    with adapters.disabled():
        own.update(3)
        assert [answer.tokens for answer in base] == [answer.tokens for answer in own.generate(requests())]
        assert [answer.tokens for answer in base] != [answer.tokens for answer in answers[1]]  # control


def test_what_a_server_is_not_started_for_is_said(tiny_world: World, tmp_path: Path) -> None:
    model = load(tiny_world.base)
    with serving_rollouts(tiny_world.base) as served:
        exact = detect_server(HTTPClient(served.root, 20), Demands(exact="bfloat16"))
        with pytest.raises(ModelError, match="fast in float32. Start it with --numerics exact --dtype bf16"):
            exact.check(model.config)
        smaller = replace(model.config, vocab_size=model.config.vocab_size - 1)
        server = detect_server(HTTPClient(served.root, 20), Demands())
        with pytest.raises(ModelError, match="larger than that of the model in training"):
            server.check(smaller)
        with pytest.raises(RequestRefused, match="no such folder on the server's machine.*push: true"):
            server.load_folder(tmp_path / "missing", "1")
        with pytest.raises(RequestRefused, match="either a folder or an upload"):
            server.client.post("/rollouts/weights", {"label": "1"})
        (tmp_path / "empty").mkdir()
        with pytest.raises(RequestRefused, match="no weights"):
            server.load_folder(tmp_path / "empty", "1")
        assert server.version_label() == "as started"
        with pytest.raises(DataError, match="no adapter 'missing'"), engine_at(served.url, model) as engine:
            engine.generate(requests(adapter="missing"))
        status, _ = ask(f"{served.root}/rollouts/uploads/a/..%2fb", b"x", Content_Type="application/octet-stream")
        assert status in (400, 404)
        status, _ = ask(f"{served.root}/rollouts/uploads/a/b", b"x", Content_Type="text/plain")
        assert status == 415


def test_a_server_without_the_flag_has_no_such_endpoints(tiny_world: World) -> None:
    from builders.served import Loaded, serving

    loaded = Loaded.of(tiny_world.base)
    with serving(loaded.served, loaded.engine()) as served:
        assert ask(f"{served.root}/rollouts/info")[0] == 404
        with pytest.raises(ModelError, match="started without --rollouts"):
            detect_server(HTTPClient(served.root, 20), Demands())


def test_a_server_that_a_killed_trainer_left_asleep_answers_the_next_one(tiny_world: World) -> None:
    model = load(tiny_world.base)
    with serving_rollouts(tiny_world.base) as served:
        with engine_at(served.url, model) as engine:
            expected = engine.generate(requests())
            only_server(engine).sleep()
            only_server(engine).sleep()  # as often as it comes
            assert only_server(engine).client.get("/rollouts/info")["paused"]
        with engine_at(served.url, model) as engine:
            again = engine.generate(requests())
    assert [answer.tokens for answer in again] == [answer.tokens for answer in expected]


# -- every field of a request crosses the process ----------------------------------------------------------------------

DEFAULT = Request(0, (3, 9, 4), SamplingOptions(seed=4), max_new_tokens=8)
SAMPLING_CASES: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.3,
    "top_k": 2,
    "min_p": 0.4,
    "repetition_penalty": 3.0,
    "presence_penalty": None,  # refused: the rest of an answer would count its own tokens alone
    "frequency_penalty": None,
    "seed": 5,
    "allowed_ids": (5, 6, 7),
    "biased_ids": None,  # both together; see below
    "biases": None,
}
CASES: dict[str, Any] = {
    "number": 5,
    "prompt": (7, 8),
    "max_new_tokens": 12,
    "samples": 2,
    "stop_ids": None,  # of the answer to `DEFAULT`; see below
    "stop_strings": None,
    "shows_stop": None,  # with a stop string
    "min_new_tokens": None,  # with a stop token
    "adapter": "none",
    "top_logprobs": 3,
    "first_sample": 1,
    "draw_number": 7,
    "draw_sample": 3,
    "rotary_length": 40,
}
LEFT_OUT = {"sampling", "prompt_logprobs", "grammar", "answer_tokens", "source"}
"""The first is in `SAMPLING_CASES`, the next is refused, forms have a test of their own, and the last is never JSON."""


@pytest.fixture(scope="module")
def longrope_folder(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base with LongRoPE that takes its long factors for texts of more than 16 tokens."""
    folder = tmp_path_factory.mktemp("longrope") / "base"
    shutil.copytree(tiny_world.base, folder)
    config = json.loads((folder / "config.json").read_text())
    pairs = config["hidden_size"] // config["num_attention_heads"] // 2
    config["rope_scaling"] = {
        "rope_type": "longrope",
        "short_factor": [1.0] * pairs,
        "long_factor": [1.0, *[6.0] * (pairs - 1)],
        "original_max_position_embeddings": 16,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_every_field_of_a_request_reaches_the_server(longrope_folder: Path) -> None:
    """Each alone gives what the embedded engine answers with it, which is another answer than without it."""
    assert set(CASES) | LEFT_OUT == {field.name for field in fields(Request)}
    assert set(SAMPLING_CASES) == {field.name for field in fields(SamplingOptions)}
    model = load(longrope_folder)
    own = embedded(model, exact=True)
    decode = load_chat_tokenizer(longrope_folder).decode
    own.decode = decode
    (plain,) = own.generate([DEFAULT])
    values = CASES | {"stop_ids": frozenset({plain.tokens[2]}), "stop_strings": (decode(plain.tokens)[2:4],)}
    asked = {name: replace(DEFAULT, **{name: value}) for name, value in values.items() if value is not None}
    asked["shows_stop"] = replace(asked["stop_strings"], shows_stop=True)
    asked["min_new_tokens"] = replace(asked["stop_ids"], min_new_tokens=5)
    asked["biased_ids"] = replace(DEFAULT, sampling=replace(DEFAULT.sampling, biased_ids=(5,), biases=(3.0,)))
    for name, value in SAMPLING_CASES.items():
        if value is not None:
            asked[name] = replace(DEFAULT, sampling=replace(DEFAULT.sampling, **{name: value}))
    with serving_rollouts(longrope_folder, exact=True) as served, engine_at(served.url, model) as engine:
        engine.decode = decode
        for name, request in asked.items():
            without_adapters = replace(request, adapter=None)
            expected = own.generate([without_adapters])
            assert to_bytes(engine.generate([request])) == to_bytes(expected), name
            if name != "adapter":  # control: the field matters
                told = [replace(answer, number=0, sample=0) for answer in expected]
                assert to_bytes(told) != to_bytes([plain]), name


def test_a_field_that_one_side_does_not_know_is_refused(longrope_folder: Path) -> None:
    model = load(longrope_folder)
    with serving_rollouts(longrope_folder) as served, engine_at(served.url, model) as engine:
        continuation = Continuation("a", DEFAULT, DEFAULT.prompt, 4, None)
        body = continuation_to_json(continuation)
        assert only_server(engine).client.post("/rollouts/answer", body)["tokens"]
        more = {**body, "request": {**body["request"], "mood": 1}}
        less = {**body, "request": {name: value for name, value in body["request"].items() if name != "draw_sample"}}
        wrong = {**body, "request": {**body["request"], "prompt": "abc"}}
        outside = {**body, "request": {**body["request"], "sampling": {**body["request"]["sampling"], "top_k": -1}}}
        for changed_body, said in (
            (more, "no field 'mood'"),
            (less, "the field 'draw_sample' is missing"),
            (wrong, "request.prompt: 'abc' is not of the type"),
            (outside, "top_k: -1 is out of range"),
            ({**body, "request": {**body["request"], "samples": 0}}, "one answer of one token or more"),
        ):
            with pytest.raises(RequestRefused, match=said) as refused:
                only_server(engine).client.post("/rollouts/answer", changed_body)
            assert refused.value.status == 400


def test_later_turns_of_the_samples_of_a_prompt_differ_as_with_the_embedded_engine(longrope_folder: Path) -> None:
    """As an environment asks them: one request for each sample, with the number of its draws."""
    model = load(longrope_folder)
    turns = [replace(DEFAULT, number=number, draw_number=0, draw_sample=number) for number in range(4)]
    with serving_rollouts(longrope_folder, exact=True) as served, engine_at(served.url, model) as engine:
        answers = engine.generate(turns)
    assert bits(answers) == bits(embedded(model, exact=True).generate(turns))
    assert len({tuple(answer.tokens) for answer in answers}) == 4


# -- who may say what to a server of rollouts --------------------------------------------------------------------------

CONTROLS = ("pause", "resume", "sleep", "wake", "drop_prefix_cache", "label", "weights", "adapter", "digests", "abort")


def test_no_control_takes_what_a_page_in_a_browser_can_send(tiny_world: World) -> None:
    """A form or a script of another site sends other types without asking, and says where it comes from."""
    with serving_rollouts(tiny_world.base) as served:
        for path in (*CONTROLS, "answer"):
            url = f"{served.root}/rollouts/{path}"
            for kind in ("text/plain", "application/x-www-form-urlencoded"):
                assert ask(url, b"{}", Content_Type=kind)[0] == 415, path
            assert ask(url, b"", Content_Type="application/json")[0] == 400, path
            for header in ({"Origin": "http://evil.example"}, {"Sec_Fetch_Site": "cross-site"}):
                assert ask(url, b"{}", Content_Type="application/json", **header)[0] == 403, path
            assert ask(url, b"{}", Content_Type="application/json", Host="evil.example")[0] == 403, path
        assert ask(f"{served.root}/rollouts/info", Origin="http://evil.example")[0] == 403
        assert not HTTPClient(served.root, 20).get("/rollouts/info")["paused"]
        assert ask(f"{served.root}/rollouts/sleep", b"{}", Content_Type="application/json")[0] == 200  # control
        assert HTTPClient(served.root, 20).get("/rollouts/info")["paused"]


def test_weights_lie_in_a_folder_or_were_sent(tmp_path: Path) -> None:
    """Not both, and not neither."""

    async def done(load: Any, *, paused: bool | None = None) -> Any:
        return load()

    (tmp_path / "sent").mkdir()
    endpoints: Any = SimpleNamespace(_uploads=tmp_path, _do=done, _allowed_folder=lambda name: Path(name))

    def loaded(**where: str | None) -> Any:
        body: Any = SimpleNamespace(**{"folder": None, "upload": None, **where})
        return asyncio.run(RolloutEndpoints._load(endpoints, body, lambda folder: folder))

    assert loaded(folder="/a") == Path("/a") and loaded(upload="sent") == tmp_path / "sent"
    for where in ({}, {"folder": "/a", "upload": "sent"}):
        with pytest.raises(ApiError, match="either a folder or an upload"):
            loaded(**where)


def test_folders_are_read_below_the_root_of_weights_alone(tiny_world: World, tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "link").symlink_to(outside)
    with serving_rollouts(tiny_world.base, weights_root=root) as served:
        client = HTTPClient(served.root, 20)
        for name in (str(outside), str(root / "link"), str(root / ".." / "outside"), "/", str(tmp_path / "missing")):
            for path, more in (("weights", {"label": "1"}), ("adapter", {"name": "a"})):
                with pytest.raises(RequestRefused, match="does not lie below .*--weights-root") as refused:
                    client.post(f"/rollouts/{path}", {"folder": name, **more})
                assert refused.value.status == 403
        with pytest.raises(RequestRefused, match="status 400: folder"):
            client.post("/rollouts/weights", {"folder": "a\0b", "label": "1"})
        with pytest.raises(RequestRefused, match="no such folder on the server's machine"):  # control
            client.post("/rollouts/weights", {"folder": str(root / "missing"), "label": "1"})


def test_a_trainer_of_this_machine_finds_the_key_that_a_server_made(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with serving_rollouts(tiny_world.base, api_key="made", leaves_key=True) as served:
        port = int(served.root.rpartition(":")[2])
        (client,) = ServerOptions((served.root,), timeout_s=20).clients
        with pytest.raises(RequestRefused, match="API key is missing or wrong"):
            client.get("/rollouts/info")
        file = write_key(port, "made")
        assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
        assert client.get("/rollouts/info")["server"] == "danlu"
        with pytest.raises(RequestRefused, match="API key"):  # control: other clients send none
            HTTPClient(served.root, 20).get("/rollouts/info")
        file.chmod(0o640)
        with pytest.raises(ResourceError, match="others can read or write the server's key"):
            client.get("/rollouts/info")
        file.chmod(0o600)
        assert read_key(f"http://node7:{port}") is None and read_key("http://localhost") is None
    assert not file.exists()  # deleted with the server
    write_key(port, "another's")
    remove_key(port, "made")
    assert read_key(f"http://127.0.0.1:{port}") == "another's"


def test_the_name_of_a_machine_may_have_capitals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("socket.gethostname", lambda: "Annes-Mac")
    write_key(8000, "made")
    assert read_key("http://Annes-Mac:8000") == "made" == read_key("http://annes-mac:8000")
    assert read_key("http://bobs-mac:8000") is None
