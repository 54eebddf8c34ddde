"""vLLM and SGLang behind the engine's protocol: answers, interruptions, and servers that die, against stand-ins."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace

import pytest
import torch
from builders.remote_engines import KINDS, answer_in_part, only_server, scores, servers_of, serving
from builders.rollout_servers import TIMEOUT_S, VLLM
from builders.small_config import small_config

from danlu.core.errors import DataError, ModelError, ResourceError
from danlu.inference.request import Request, SamplingOptions
from danlu.models.decoder import Decoder
from danlu.models.initialize import initialize
from danlu.models.loading import build
from danlu.models.rope_config import DynamicScaling, LongRopeScaling
from danlu.remote_engines.hand_over import FolderHandOver
from danlu.remote_engines.http_engine import FRUITLESS_ATTEMPTS, HTTPEngine
from danlu.remote_engines.server_interface import ServerOptions, check_version

GREEDY = SamplingOptions(temperature=0)
SAMPLED = SamplingOptions(seed=4)
PROMPTS = [(3, 9, 4), (7,), (11, 12, 13, 14)]

PATHS = ("/v1/completions", "/generate")

both = pytest.mark.parametrize("kind", sorted(KINDS))


def requests(options=SAMPLED, count=6, prompts=PROMPTS, **settings):
    return [Request(number, prompt, options, count, **settings) for number, prompt in enumerate(prompts)]


def check_logprobs(model, asked, completions, temperature=1.0):
    """Against log softmax(logits / temperature) by full passes."""
    by_number = {request.number: request for request in asked}
    for completion in completions:
        prompt = by_number[completion.number].prompt
        ids = torch.tensor([*prompt, *completion.tokens])
        (row,) = scores(_Scaled(model, temperature))([ids.tolist()], [len(prompt)], None)
        assert completion.logprobs == pytest.approx(row, abs=1e-4)


class _Scaled:
    """A model whose logits are divided by a temperature."""

    def __init__(self, model, temperature):
        self.model, self.temperature = model, temperature

    def __call__(self, *arguments):
        return self.model(*arguments)

    def logits(self, hidden):
        return self.model.logits(hidden) / self.temperature


@both
def test_answers_with_the_log_probabilities_of_the_model(small_decoder, kind):
    model, asked = small_decoder(), requests(samples=2)
    with serving(kind, model) as (engine, _):
        completions = engine.generate(asked)
        again = engine.generate(asked)
    assert [(completion.number, completion.sample) for completion in completions] == [
        (number, sample) for number in range(3) for sample in range(2)
    ]
    check_logprobs(model, asked, completions)
    assert all(len(completion.tokens) == 6 and completion.finish == "length" for completion in completions)
    assert all(completion.versions == [0] * 6 and completion.drawn == completion.logprobs for completion in completions)
    assert completions == again  # draws follow from the request alone
    assert completions[0].tokens != completions[1].tokens
    with pytest.raises(AssertionError):
        check_logprobs(model, asked, completions, temperature=0.7)


@both
def test_greedy_takes_the_likeliest_token_which_is_certain_to_be_drawn(small_decoder, kind):
    model = small_decoder()
    with serving(kind, model) as (engine, _):
        completions = engine.generate(requests(GREEDY, top_logprobs=3))
    check_logprobs(model, requests(), completions)
    for completion in completions:
        assert completion.drawn == [0.0] * 6
        assert [entry[0][0] for entry in completion.top] == completion.tokens
        assert all(len(entry) == 3 for entry in completion.top)


def test_other_temperatures_with_log_probabilities_of_what_was_drawn_from(small_decoder):
    model, asked = small_decoder(), requests(SamplingOptions(temperature=0.7))
    for kind, settings in (("vllm", {"logprobs_mode": "processed_logprobs"}), ("sglang", {})):
        with serving(kind, model, **settings) as (engine, _):
            check_logprobs(model, asked, engine.generate(asked), temperature=0.7)


def test_servers_that_leave_out_the_temperature_are_refused_there(small_decoder):
    asked = requests(SamplingOptions(temperature=0.7))
    for kind, settings, flag in (
        ("vllm", {}, "--logprobs-mode processed_logprobs"),
        ("sglang", {"original_logprobs": True}, "SGLANG_RETURN_ORIGINAL_LOGPROB"),
    ):
        with serving(kind, small_decoder(), **settings) as (engine, stand_in):
            before = len(stand_in.calls)
            with pytest.raises(DataError, match=f"temperature 0.7: .*{flag}"):
                engine.generate(asked)
            assert len(stand_in.calls) == before and engine.unfinished == 0


def test_sglang_tells_what_filters_left_and_what_was_drawn_with(small_decoder):
    model, asked = small_decoder(), requests(SamplingOptions(temperature=0.8, top_k=7, top_p=0.9))
    with serving("sglang", model) as (engine, _):
        completions = engine.generate(asked)
    check_logprobs(model, asked, completions, temperature=0.8)
    for completion in completions:
        assert len(completion.support) == len(completion.tokens)
        for token, logprob, drawn, support in zip(
            completion.tokens, completion.logprobs, completion.drawn, completion.support, strict=True
        ):
            assert token in support.ids and len(support.ids) <= 7 and support.vocab_size == 61
            assert drawn >= logprob - 1e-6


@pytest.mark.parametrize(
    "options",
    [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.2}, {"allowed_ids": (3, 4)}],
)
def test_vllm_has_one_log_probability_so_filters_are_refused(small_decoder, options):
    with serving("vllm", small_decoder()) as (engine, _), pytest.raises(DataError, match="one log-probability a token"):
        engine.generate(requests(SamplingOptions(**options)))


@pytest.mark.parametrize("server", ["vllm", "sglang"])
@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_penalties_that_an_interruption_would_forget_are_refused(small_decoder, server, name):
    with serving(server, small_decoder()) as (engine, _), pytest.raises(DataError, match="leave both at 0"):
        engine.generate(requests(SamplingOptions(temperature=0, **{name: 0.5})))


def test_log_probabilities_of_prompts_are_refused(small_decoder):
    with serving("vllm", small_decoder()) as (engine, _), pytest.raises(DataError, match="leave prompt_logprobs out"):
        engine.generate([Request(0, (3, 4), SamplingOptions(), 2, prompt_logprobs=True)])


def test_what_sglang_does_not_have_is_refused(small_decoder):
    with serving("sglang", small_decoder()) as (engine, _):
        with pytest.raises(DataError, match="repetition_penalty"):
            engine.generate(requests(SamplingOptions(repetition_penalty=1.2)))
        with pytest.raises(DataError, match="allowed_ids"):
            engine.generate(requests(SamplingOptions(allowed_ids=(3,))))


@both
def test_stop_tokens_and_stop_strings_end_answers(small_decoder, kind):
    model = small_decoder()

    def decode(tokens):
        return "".join(chr(ord("a") + token % 26) for token in tokens)

    with serving(kind, model, decode=decode) as (engine, _):
        (free,) = engine.generate([Request(0, (3, 9, 4), GREEDY, 12)])
        stop = free.tokens[3]
        (stopped,) = engine.generate([Request(1, (3, 9, 4), GREEDY, 12, stop_ids=frozenset({stop}))])
        text = free.text[2:4]
        (cut,) = engine.generate([Request(2, (3, 9, 4), GREEDY, 12, stop_strings=(text,))])
    first = free.tokens.index(stop)
    assert (stopped.tokens, stopped.finish) == (free.tokens[: first + 1], "stop")
    assert stopped.text == decode(free.tokens[:first])
    assert cut.finish == "stop_string" and cut.text == free.text[: free.text.index(text)]
    assert cut.tokens == free.tokens[: len(cut.tokens)]


@both
def test_a_stop_string_without_a_tokenizer_and_a_prompt_past_the_context_are_refused(small_decoder, kind):
    with serving(kind, small_decoder(), context=8) as (engine, _):
        with pytest.raises(DataError, match="stop strings"):
            engine.generate([Request(0, (3,), stop_strings=("x",))])
        with pytest.raises(DataError, match="prompt 0 has 8 tokens, and the server was started for 8 at most"):
            engine.generate([Request(0, (3,) * 8)])
        with pytest.raises(DataError, match="prompt 1 has token 61"):
            engine.generate([Request(0, (3,)), Request(1, (61,))])
        assert engine.unfinished == 0
        (completion,) = engine.generate([Request(0, (3,) * 6, max_new_tokens=9)])
        assert (len(completion.tokens), completion.finish) == (2, "context")


@both
def test_each_token_is_told_when_its_answer_arrives(small_decoder, kind):
    told = []
    with serving(kind, small_decoder()) as (engine, _):
        engine.submit(Request(0, (3, 9), max_new_tokens=4), told.append)
        (completion,) = engine.step()
    assert [token.token for token in told] == completion.tokens
    assert [token.finish for token in told] == [None, None, None, "length"]


@both
def test_an_unknown_adapter_is_refused_and_its_request_forgotten(small_decoder, kind):
    with serving(kind, small_decoder()) as (engine, _):
        with pytest.raises(DataError, match="prompt 5: .*refuses it.*missing"):
            engine.generate([Request(5, (3,), adapter="missing", samples=3)])
        assert engine.unfinished == 0
        assert len(engine.generate(requests())) == 3


# -- what is checked before anything is asked --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("vllm", {"version": "0.28.0"}, r"vLLM 0.28.0 is not supported, only vLLM >=0.32.0,<0.34"),
        ("sglang", {"version": "0.6.0"}, r"SGLang 0.6.0 is not supported, only SGLang >=0.5.23,<0.5.24"),
        ("vllm", {"dev_mode": False}, "VLLM_SERVER_DEV_MODE=1"),
        ("vllm", {"logprobs_mode": "raw_logits"}, "gives no log-probabilities. Use processed_logprobs"),
        ("vllm", {"vocab_size": 60}, "smaller than that of the model in training, which has 61"),
        ("vllm", {"vocab_size": 62}, "larger than that of the model in training, which has 61"),
        ("sglang", {"vocab_size": 60}, "smaller than that of the model in training, which has 61"),
        ("sglang", {"vocab_size": 62}, "larger than that of the model in training, which has 61"),
    ],
)
def test_servers_that_cannot_be_trusted_are_refused(small_decoder, kind, settings, message):
    with pytest.raises(ModelError, match=message), serving(kind, small_decoder(), **settings):
        pass


def test_rows_that_no_token_has_are_not_drawn(small_decoder):
    """A server has them as any other; here they are the likeliest."""
    rows = small_decoder(vocab_size=61)
    rows.lm_head.weight[58:] = 3 * rows.lm_head.weight[:3]
    model = Decoder(replace(rows.config, vocab_size=58, vocab_padding=3)).requires_grad_(False)
    model.load_state_dict(rows.state_dict())
    asked, answers = requests(samples=4), []
    for config in (model.config, rows.config):
        stand_in = VLLM(rows, logprobs_mode="processed_logprobs")
        options = ServerOptions((stand_in.url,), timeout_s=TIMEOUT_S, reconnect_s=0.2)
        engine = HTTPEngine(servers_of("vllm", options), options, config)
        answers.append(engine.generate(asked))
        engine.close()
        stand_in.close()
    check_logprobs(model, asked, answers[0])
    assert max(max(answer.tokens) for answer in answers[0]) < 58
    assert max(max(answer.tokens) for answer in answers[1]) >= 58  # the control
    refusals = {"vllm": "has 3 rows .* Start it with --logprobs-mode processed", "sglang": "which SGLang would draw"}
    for kind, message in refusals.items():
        stand_in = KINDS[kind](rows)
        options = ServerOptions((stand_in.url,), timeout_s=TIMEOUT_S, reconnect_s=0.2)
        with pytest.raises(ModelError, match=message):
            HTTPEngine(servers_of(kind, options), options, model.config)
        stand_in.close()


@pytest.mark.parametrize(("kind", "question"), [("vllm", "/version"), ("sglang", "/server_info")])
def test_another_version_is_sent_nothing_but_the_question(small_decoder, kind, question, monkeypatch):
    calls = []
    respond = KINDS[kind].respond
    monkeypatch.setattr(KINDS[kind], "respond", lambda self, *call: calls.append(call[1]) or respond(self, *call))
    with pytest.raises(ModelError), serving(kind, small_decoder(), version="9.9"):
        pass
    assert calls == ["/health", question]


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0", "0.33.1", "0.33.0rc2", "0.33.2.dev7+gabc"])
def test_versions_of_a_supported_release(version):
    check_version("vLLM", "url", version)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0", "unknown", None])
def test_versions_of_another_release(version):
    with pytest.raises(ModelError):
        check_version("vLLM", "url", version)


@pytest.mark.parametrize("left", ["paused", "asleep"])
def test_a_server_that_a_killed_trainer_has_left_is_taken_over(small_decoder, capsys, left):
    model = small_decoder()
    with serving("vllm", model) as (engine, _):
        undisturbed = engine.generate(requests())
    stand_in = VLLM(model)
    if left == "asleep":
        stand_in._sleep("abort")
    else:
        stand_in.served.pause("keep")
    options = ServerOptions((stand_in.url,), timeout_s=TIMEOUT_S, reconnect_s=0.2)
    engine = HTTPEngine(servers_of("vllm", options), options, model.config)
    assert f"vLLM was {left}, and goes on for this run" in capsys.readouterr().err
    assert engine.generate(requests()) == undisturbed
    assert stand_in.asleep == set()
    engine.close()
    stand_in.close()


@pytest.mark.parametrize("biased", [False, True])
def test_a_bias_that_vllm_leaves_out_is_told(small_decoder, capsys, biased):
    model = build(small_config(head_bias=biased)) if biased else small_decoder()
    initialize(model, 0)
    with serving("vllm", model):
        pass
    assert ("vLLM leaves out the bias of this model's head" in capsys.readouterr().err) == biased


def test_no_server_is_told_with_its_url(small_decoder):
    options = ServerOptions(("http://127.0.0.1:9",), reconnect_s=0.2, timeout_s=1)
    with pytest.raises(ResourceError, match="http://127.0.0.1:9: no rollout server answers GET /health"):
        HTTPEngine(servers_of("vllm", options), options, small_decoder().config)


# -- interruptions -----------------------------------------------------------------------------------------------------


def in_thread(call):
    """Starts a call; a function that waits for it and returns its result."""
    results = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()

    def result():
        thread.join(TIMEOUT_S)
        return results[0]

    return result


@both
def test_pausing_to_keep_changes_no_answer(small_decoder, kind):
    with serving(kind, small_decoder()) as (engine, stand_in):
        undisturbed = engine.generate(requests(count=20))
        for request in requests(count=20):
            engine.submit(request)
        answer_in_part(engine, stand_in)
        engine.servers.each(lambda server: server.pause("keep"))
        stand_in.served.go_on()
        engine.servers.each(lambda server: server.resume())
        done = []
        while engine.unfinished:
            done += engine.step()
    done.sort(key=lambda completion: completion.number)
    assert [completion.tokens for completion in done] == [completion.tokens for completion in undisturbed]


@both
def test_answers_that_a_server_aborts_are_asked_for_again_from_their_tokens(small_decoder, kind):
    with serving(kind, small_decoder(), connections=2) as (engine, stand_in):
        (whole, *_) = engine.generate(requests(count=20))
        for request in requests(count=20):
            engine.submit(request)
        answer_in_part(engine, stand_in)
        engine.servers.each(lambda server: server.pause("abort"))
        engine._receive(wait=True)
        (first,) = [entry["answers"][0] for entry in engine.state()["requests"] if entry["request"]["number"] == 0]
        assert [token for token, *_ in first["drawn"]] in (whole.tokens[:3], [])
        stand_in.served.go_on()
        engine.servers.each(lambda server: server.resume())
        done = []
        while engine.unfinished:
            done += engine.step()
        assert sorted((each.number, len(each.tokens), each.finish) for each in done) == [
            (number, 20, "length") for number in range(3)
        ]


@both
def test_a_request_that_is_forgotten_is_aborted_and_the_others_go_on(small_decoder, kind):
    with serving(kind, small_decoder()) as (engine, stand_in):
        for request in [Request(0, (3,), max_new_tokens=20), Request(1, (4,), max_new_tokens=5)]:
            engine.submit(request)
        answer_in_part(engine, stand_in)
        engine._forget(0)
        engine._in_flight.abort_abandoned()
        assert stand_in.calls[-1][1] == {"vllm": "/abort_requests", "sglang": "/abort_request"}[kind]
        stand_in.served.go_on()
        done = []
        while engine.unfinished:
            done += engine.step()
    assert [(completion.number, completion.finish) for completion in done] == [(1, "length")]


@both
def test_answers_go_on_from_their_tokens_after_sleep(small_decoder, kind):
    model = small_decoder()
    with serving(kind, model) as (engine, stand_in):
        asked = requests(count=40)
        for request in asked:
            engine.submit(request)
        answer_in_part(engine, stand_in)
        engine.sleep()
        assert engine.unfinished == 3 and engine.step() == [] and not stand_in.served.running
        assert [len(answer["drawn"]) for entry in engine.state()["requests"] for answer in entry["answers"]] == [3] * 3
        stand_in.served.go_on()
        engine.wake()
        done = []
        while engine.unfinished:
            done += engine.step()
    assert [len(completion.tokens) for completion in done] == [40] * 3
    asked_for = [body["prompt" if kind == "vllm" else "input_ids"] for _, path, body in stand_in.calls if path in PATHS]
    assert sorted(map(len, asked_for[-3:])) == [len(prompt) + 3 for prompt in sorted(PROMPTS, key=len)]
    check_logprobs(model, asked, done)


@both
def test_another_engine_takes_up_what_is_unfinished(small_decoder, kind):
    model = small_decoder()
    asked = requests(count=5, samples=2)
    with serving(kind, model, connections=1) as (engine, _):
        expected = engine.generate(asked)
        for request in asked:
            engine.submit(request)
        done = engine.step()
        state = json.loads(json.dumps(engine.state()))
    with serving(kind, model) as (engine, _):
        engine.restore(state)
        while engine.unfinished:
            done += engine.step()
    assert sorted(done, key=lambda completion: (completion.number, completion.sample)) == expected


# -- servers that die --------------------------------------------------------------------------------------------------


def come_back(stand_in, label=None):
    """Has a server that died answer again; with a label as one that was started anew."""
    while not stand_in.dead:
        time.sleep(0.005)
    time.sleep(0.1)
    stand_in.faults.die_after = None
    stand_in.served.label = label or stand_in.served.label
    stand_in.dead = False


@both
def test_a_server_that_dies_loses_no_answer_and_gives_none_twice(small_decoder, kind):
    model, asked = small_decoder(), requests(samples=4)
    with serving(kind, model) as (engine, _):
        expected = engine.generate(asked)
    with serving(kind, model, faults={"die_after": 5}, connections=3, reconnect_s=TIMEOUT_S) as (engine, stand_in):
        came_back = in_thread(lambda: come_back(stand_in))
        completions = engine.generate(asked)
        came_back()
    assert completions == expected


@both
def test_a_server_that_stays_away_is_told_with_what_is_unfinished(small_decoder, kind):
    model, asked = small_decoder(), requests(samples=4)
    with serving(kind, model, faults={"die_after": 5}, connections=1) as (engine, stand_in):
        for request in asked:
            engine.submit(request)
        done = []
        while len(done) < 5:
            done += engine.step()
        with pytest.raises(ResourceError, match="not back within 0.2 s .*7 answers are unfinished, to prompts 1, 2"):
            engine.step()
        assert len(done) == 5 and engine.unfinished == 7
        assert len(engine.state()["requests"]) == 2
        stand_in.faults.die_after, stand_in.dead = None, False
        while engine.unfinished:
            done += engine.step()
    keys = [(completion.number, completion.sample) for completion in done]
    assert sorted(keys) == [(number, sample) for number in range(3) for sample in range(4)]


@both
@pytest.mark.parametrize("control", ["sleep", "wake", "update"])
def test_a_server_that_dies_as_it_is_controlled_is_told_with_what_to_do(small_decoder, tmp_path, kind, control):
    model = small_decoder()
    hand_over = FolderHandOver(model.config, tmp_path, 1)
    with serving(kind, model, hand_over=hand_over) as (engine, stand_in):
        if control == "wake":
            engine.sleep()
        stand_in.dead = True
        arguments = (1, model.named_parameters()) if control == "update" else ()
        with pytest.raises(ResourceError, match=r"POST /.*Start the server again, and then the run, .*reconnect_s"):
            getattr(engine, control)(*arguments)
        stand_in.dead = False
        engine.is_asleep = engine.is_paused = False  # for closing


@both
def test_a_server_that_comes_back_with_other_weights_is_not_asked_on(small_decoder, kind):
    settings = {"faults": {"die_after": 1}, "connections": 1, "reconnect_s": TIMEOUT_S}
    with serving(kind, small_decoder(), **settings) as (engine, stand_in):
        for request in requests():
            engine.submit(request)
        done = engine.step()
        started = in_thread(lambda: come_back(stand_in, label="default"))
        with pytest.raises(ResourceError, match="weights 'default' in place of version 0.*2 answers are unfinished"):
            engine.step()
        started()
        assert engine.unfinished == 2
        stand_in.served.label = "0"
        while engine.unfinished:
            done += engine.step()
        assert [completion.number for completion in done] == [0, 1, 2]


@both
def test_an_answer_that_never_comes_is_not_asked_for_without_end(small_decoder, kind):
    with serving(kind, small_decoder()) as (engine, stand_in):
        asked = []
        routes = stand_in.routes()
        path = "/v1/completions" if kind == "vllm" else "/generate"

        def breaks(body, query):
            asked.append(body)
            raise RuntimeError("engine core is dead")

        stand_in.routes = lambda: routes | {path: breaks}
        # What the check asks is answered.
        only_server(engine).check = lambda vocab_size: None
        with pytest.raises(
            ResourceError, match="asked for 3 times without a token.*engine core is dead.*1 answers are"
        ):
            engine.generate([Request(0, (3,))])
        assert len(asked) == FRUITLESS_ATTEMPTS


LONGROPE = LongRopeScaling((1.0,) * 4, (1.0, 3.0, 6.0, 8.0), 16, 8.0)


@both
@pytest.mark.parametrize("scaling", [LONGROPE, DynamicScaling(4.0)], ids=["longrope", "dynamic"])
def test_a_model_that_is_rotated_by_the_length_of_each_text_needs_a_short_context_there(small_decoder, kind, scaling):
    model = small_decoder(context=128, rope_scaling=scaling)
    short = model.config.fixed_rotation_length
    refusal = f"started for {short + 1} tokens.*--max-model-len {short}; SGLang: --context-length {short}"
    with pytest.raises(ModelError, match=refusal), serving(kind, model, context=short + 1):
        pass
    with serving(kind, model, context=short) as (engine, _):  # control
        assert engine.generate(requests(GREEDY, 2))
    plain = small_decoder(context=128)
    with serving(kind, plain, context=short + 1) as (engine, _):  # control
        assert engine.generate(requests(GREEDY, 2))
