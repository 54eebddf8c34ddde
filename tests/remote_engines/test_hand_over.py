"""New weights on the way to an engine: what arrives, by which calls, and what is refused."""

from __future__ import annotations

import pytest
import torch
from builders.remote_engines import KINDS, adapter_writer, answer_in_part, hand_over_of, only_server, scores, serving

from danlu.core.errors import DataError, ModelError, ResourceError
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.request import Request, SamplingOptions
from danlu.models.hf_config import read_config_values
from danlu.models.hf_layout import hf_tensors
from danlu.models.initialize import initialize
from danlu.models.loading import build
from danlu.remote_engines.hand_over import AdapterHandOver, buckets, folder_weights

GREEDY = SamplingOptions(temperature=0)
REQUEST = Request(0, (3, 9, 4), GREEDY, 8)

both = pytest.mark.parametrize("kind", sorted(KINDS))
routes = pytest.mark.parametrize("route", ["folder", "group"])


def parameters(model):
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


# -- tensors and buckets -----------------------------------------------------------------------------------------------


def test_buckets_are_full_but_for_what_comes_next():
    tensors = [(f"t{size}", torch.zeros(size, dtype=torch.uint8)) for size in (3, 4, 5, 11, 2, 2, 6)]
    sizes = [[tensor.nbytes for _, tensor in bucket] for bucket in buckets(tensors, 10)]
    assert sizes == [[3, 4], [5], [11], [2, 2, 6]]
    assert list(buckets([], 10)) == []


def test_parameters_become_the_tensors_of_a_model_folder():
    config = read_config_values(
        {
            "model_type": "phi3",
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": 40,
            "tie_word_embeddings": False,
        }
    )
    model = build(config)
    initialize(model, 0)
    weights = dict(folder_weights(config, parameters(model)))
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == {
        tensor.name: tensor.shape for tensor in hf_tensors(config)
    }
    layer = model.layers["0"].mlp
    fused = torch.cat([layer.gate_proj.weight, layer.up_proj.weight])
    assert torch.equal(weights["model.layers.0.mlp.gate_up_proj.weight"], fused)
    half = dict(folder_weights(config, parameters(model), torch.bfloat16))
    assert {tensor.dtype for tensor in half.values()} == {torch.bfloat16}


def test_parameters_that_do_not_fit_are_refused(small_decoder):
    model = small_decoder()
    named = parameters(model)

    def sent(changed):
        return list(folder_weights(model.config, changed))

    with pytest.raises(ModelError, match="1 parameters are missing, layers.2.mlp_norm"):
        sent([(name, value) for name, value in named if not name.startswith("layers.2.mlp_norm")])
    with pytest.raises(ModelError, match="layers.9.x is no parameter of this model"):
        sent([("layers.9.x", torch.zeros(1))])
    with pytest.raises(ModelError, match="is there twice"):
        sent([named[0], named[0]])
    with pytest.raises(ModelError, match=r"model.norm.weight is \[5\], and the server's model has \[32\]"):
        sent([(name, torch.zeros(5) if name == "norm.weight" else value) for name, value in named])


# -- on the way to a server --------------------------------------------------------------------------------------------


@both
@routes
def test_answers_follow_the_weights_that_were_handed_over(small_decoder, tmp_path, kind, route):
    old, new = small_decoder(seed=0), small_decoder(seed=1)
    with serving(kind, new) as (engine, _):
        (expected,) = engine.generate([REQUEST])
    with serving(kind, old, hand_over=hand_over_of(route, old, tmp_path)) as (engine, stand_in):
        (before,) = engine.generate([REQUEST])
        for version in (3, 4):  # a group is formed once
            engine.update(version, parameters(new))
            (after,) = engine.generate([REQUEST])
            assert after.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
            assert after.tokens == expected.tokens != before.tokens
            assert (before.versions, after.versions) == ([0] * 8, [version] * 8)
        for name, parameter in new.named_parameters():
            assert torch.equal(parameter, stand_in.served.parameter(name))
        assert engine.hand_over.route == route
    assert list(tmp_path.iterdir()) == []  # deleted with the engine


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_each_token_has_the_label_of_the_weights_that_drew_it(small_decoder, tmp_path, version):
    old, new = small_decoder(seed=0), small_decoder(seed=1)
    request = Request(1, (3, 9, 4), GREEDY, 8)
    with serving("vllm", old, hand_over=hand_over_of("folder", old, tmp_path), version=version) as (engine, stand_in):
        engine.submit(request)
        answer_in_part(engine, stand_in)
        engine.update(1, parameters(new))
        stand_in.served.go_on()
        completions = []
        while engine.unfinished:
            completions += engine.step()
        (completion,) = completions
    assert completion.versions == [0] * 3 + [1] * 5
    ids = [*request.prompt, *completion.tokens]
    (of_old,), (of_new,) = (scores(model)([ids], [3], None) for model in (small_decoder(seed=0), new))
    assert completion.logprobs == pytest.approx([*of_old[:3], *of_new[3:]], abs=1e-4)
    assert completion.logprobs != pytest.approx(of_new, abs=1e-4)


def test_an_answer_without_labels_over_a_replacement_is_asked_for_again(small_decoder):
    """vLLM 0.32 does not say which tokens came before it."""
    request = Request(1, (3, 9, 4), GREEDY, 4)
    with serving("vllm", small_decoder(), version="0.32.0") as (engine, stand_in):
        (undisturbed,) = engine.generate([request])
        engine.submit(request)
        answer_in_part(engine, stand_in)
        only_server(engine).label_version("7")
        stand_in.served.go_on()
        assert engine.step() == []
        engine.version = 7
        (completion,) = engine.step()
    assert (completion.tokens, completion.versions) == (undisturbed.tokens, [7] * 4)
    assert stand_in.paths().count("/v1/completions") == 2 + 3  # two are the check's


@pytest.mark.parametrize(
    ("kind", "route", "calls"),
    [
        ("vllm", "folder", ["/pause", "/collective_rpc", "/update_weight_version", "/reset_prefix_cache", "/resume"]),
        (
            "vllm",
            "group",
            [
                *("/pause", "/get_world_size", "/init_weight_transfer_engine", "/start_weight_update"),
                *("/update_weights", "/finish_weight_update", "/reset_prefix_cache", "/resume"),
            ],
        ),
        (
            "sglang",
            "folder",
            ["/pause_generation", "/update_weights_from_disk", "/flush_cache", "/continue_generation"],
        ),
        (
            "sglang",
            "group",
            [
                *("/pause_generation", "/init_weights_update_group", "/begin_weight_update"),
                *("/update_weights_from_distributed", "/end_weight_update", "/update_weight_version", "/flush_cache"),
                "/continue_generation",
            ],
        ),
    ],
)
def test_calls_of_an_update_in_order(small_decoder, tmp_path, kind, route, calls):
    model = small_decoder()
    with serving(kind, model, hand_over=hand_over_of(route, model, tmp_path)) as (engine, stand_in):
        start = len(stand_in.calls)
        engine.update(1, parameters(small_decoder(seed=1)))
        made = [path for _, path, _ in stand_in.calls[start:]]
        assert list(dict.fromkeys(made)) == calls
        buckets_sent = [
            body for _, path, body in stand_in.calls if path.startswith("/update_weights") and route == "group"
        ]
        assert route == "folder" or len(buckets_sent) > 3


@both
@routes
def test_answers_that_are_under_way_go_on_with_the_new_weights(small_decoder, tmp_path, kind, route):
    old, new = small_decoder(seed=0), small_decoder(seed=1)
    with serving(kind, old, hand_over=hand_over_of(route, old, tmp_path)) as (engine, stand_in):
        engine.submit(REQUEST)
        answer_in_part(engine, stand_in)
        engine.update(7, parameters(new))
        stand_in.served.go_on()
        (completion,) = engine.step()
    assert completion.versions == [0] * 3 + [7] * 5
    (expected,) = scores(new)([(*REQUEST.prompt, *completion.tokens)], [3], None)
    assert completion.logprobs[3:] == pytest.approx(expected[3:], abs=1e-4)
    assert completion.logprobs[:3] != pytest.approx(expected[:3], abs=1e-4)


@both
@routes
def test_a_server_that_sleeps_is_handed_weights_and_sleeps_on(small_decoder, tmp_path, kind, route):
    old, new = small_decoder(seed=0), small_decoder(seed=1)
    with serving(kind, old, hand_over=hand_over_of(route, old, tmp_path)) as (engine, stand_in):
        (before,) = engine.generate([REQUEST])
        engine.sleep()
        engine.sleep()  # it does already
        engine.update(1, parameters(new))
        assert stand_in.served.paused
        engine.wake()
        engine.wake()
        (after,) = engine.generate([REQUEST])
    assert after.versions == [1] * 8 and after.logprobs != before.logprobs


@both
def test_a_server_does_not_have_the_trainer_s_tensors(small_decoder, tmp_path, kind):
    model = small_decoder()
    with serving(kind, model, hand_over=hand_over_of("folder", model, tmp_path)) as (engine, _):
        with pytest.raises(ModelError, match="no weights were given"):
            engine.update(1)
        assert engine.version == 0


@both
def test_a_folder_is_replaced_when_the_server_has_the_next(small_decoder, tmp_path, kind):
    model = small_decoder()
    with serving(kind, model, hand_over=hand_over_of("folder", model, tmp_path)) as (engine, _):
        for version in (1, 2):
            engine.update(version, parameters(model))
            assert [folder.name for folder in tmp_path.iterdir()] == [f"weights-{version}"]


@both
def test_a_folder_that_cannot_be_written_is_told(small_decoder, tmp_path, kind):
    model = small_decoder()
    (tmp_path / "file").touch()
    with serving(kind, model, hand_over=hand_over_of("folder", model, tmp_path / "file")) as (engine, _):
        with pytest.raises(ResourceError, match=r"weights cannot be handed over here \(exchange_folder\)"):
            engine.update(1, parameters(model))
        assert engine.version == 0


@both
@routes
def test_after_an_update_that_failed_the_server_stays_paused(small_decoder, tmp_path, kind, route):
    model = small_decoder()
    with serving(kind, model, hand_over=hand_over_of(route, model, tmp_path)) as (engine, stand_in):
        with pytest.raises(ModelError, match="parameters are missing"):
            engine.update(1, parameters(model)[:3])
        assert engine.version == 0 and stand_in.served.paused
        engine.update(2, parameters(model))  # a further one is whole
        assert engine.generate([REQUEST])[0].versions == [2] * 8


# -- adapters ----------------------------------------------------------------------------------------------------------


@both
def test_an_adapter_alone_is_handed_over_and_answers_by_default(small_decoder, tmp_path, kind):
    writers = iter([adapter_writer(small_decoder(), seed) for seed in (1, 2)])
    hand_over = AdapterHandOver("policy", tmp_path, lambda folder: next(writers)(folder))
    with serving(kind, small_decoder(), hand_over=hand_over) as (engine, stand_in):
        (base,) = engine.generate([Request(0, (3, 9, 4), GREEDY, 8, adapter="none")])
        answers = []
        for version in (1, 2):
            engine.update(version)
            assert [folder.name for folder in tmp_path.iterdir()] == [f"policy-{version}"]
            answers += engine.generate([REQUEST])
            (named,) = engine.generate([Request(0, (3, 9, 4), GREEDY, 8, adapter="policy")])
            (unadapted,) = engine.generate([Request(0, (3, 9, 4), GREEDY, 8, adapter="none")])
            assert named.logprobs == answers[-1].logprobs
            assert unadapted.logprobs == pytest.approx(base.logprobs, abs=1e-6)
        assert list(stand_in.served.loaded) == ["policy"]
    assert answers[0].logprobs != answers[1].logprobs != base.logprobs
    assert [answer.versions for answer in answers] == [[1] * 8, [2] * 8]


@both
def test_before_the_first_hand_over_the_adapter_is_missing_and_not_left_out(small_decoder, tmp_path, kind):
    hand_over = AdapterHandOver("policy", tmp_path, adapter_writer(small_decoder(), 1))
    with (
        serving(kind, small_decoder(), hand_over=hand_over) as (engine, _),
        pytest.raises(DataError, match="prompt 0: .*refuses it.*policy"),
    ):
        engine.generate([REQUEST])


def test_shared_tensors_need_no_more_than_a_word(small_decoder):
    model = small_decoder()
    engine = EmbeddedEngine(model)
    (before,) = engine.generate([REQUEST])
    model.load_state_dict(small_decoder(seed=1).state_dict())
    engine.update(5)
    (after,) = engine.generate([REQUEST])
    assert after.versions == [5] * 8 and after.logprobs != before.logprobs
