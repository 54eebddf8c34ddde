"""Weights that did not arrive stop the run, whichever way they got lost, and those that did are let pass."""

from __future__ import annotations

import itertools

import pytest
import torch
from builders.covering import covering, fast
from builders.remote_engines import KINDS, adapter_writer, hand_over_of, only_server, scores, serving
from builders.served_model import ServedModel
from builders.tiny_adapters import adapter_set

from danlu.adapters.adapter_config import read_adapter_config
from danlu.adapters.peft_folder import add_adapter
from danlu.core.errors import TrainingError
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import EngineOptions
from danlu.remote_engines.canary import Canary, compare_with_servers
from danlu.remote_engines.hand_over import AdapterHandOver, folder_weights
from danlu.remote_engines.vllm import PACKED

PROMPTS = [tuple(range(3, 40)), tuple(range(60, 22, -1))]  # of several blocks
TOLERANCE = 1e-3

both = pytest.mark.parametrize("kind", sorted(KINDS))
ways = pytest.mark.parametrize(
    ("kind", "route"),
    fast(itertools.product(sorted(KINDS), ["folder", "group"]), *zip(sorted(KINDS), ["group", "folder"], strict=True)),
)


def parameters(model):
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def canary_of(engine, trainer, **settings):
    differing = compare_with_servers(engine.servers, trainer.config, trainer.get_parameter)
    return Canary(PROMPTS, scores(trainer), TOLERANCE, new_tokens=8, differing=differing, **settings)


# -- servers -----------------------------------------------------------------------------------------------------------


@ways
def test_weights_that_arrived_are_let_pass(small_decoder, tmp_path, kind, route):
    trainer = small_decoder(seed=1)
    with serving(kind, small_decoder(), hand_over=hand_over_of(route, trainer, tmp_path)) as (engine, _):
        for version in range(1, 4):
            with torch.no_grad():
                for parameter in trainer.parameters():
                    parameter.add_(0.02 * torch.randn_like(parameter))
            engine.update(version, parameters(trainer))
            report = canary_of(engine, trainer).check(engine)
            assert report.gap.tokens == 16 and report.gap.largest < 1e-4 and report.adapter_gap is None
        trainer.norm.weight.data.mul_(1.1)
        with pytest.raises(TrainingError):  # which were not handed over
            canary_of(engine, trainer).check(engine)


@both
def test_weights_in_bfloat16_are_the_trainer_s_rounded(small_decoder, tmp_path, kind):
    trainer = small_decoder(seed=1)
    hand_over = hand_over_of("folder", trainer, tmp_path)
    hand_over._dtype = torch.bfloat16
    with serving(kind, small_decoder(), hand_over=hand_over) as (engine, _):
        engine.update(1, parameters(trainer))
        with pytest.raises(TrainingError, match="all tensors that can be compared are equal.*another precision"):
            canary_of(engine, trainer).check(engine)


def test_layers_that_vllm_has_packed_are_not_compared_and_others_are(small_decoder, monkeypatch):
    """On a CPU vLLM 0.32 packs linear layers for oneDNN, and a parameter of no elements is left of each."""
    whole = ServedModel.checksums

    def checksums(self):
        return {name: PACKED if "_proj." in name else digest for name, digest in whole(self).items()}

    monkeypatch.setattr(ServedModel, "checksums", checksums)
    model, other = small_decoder(), small_decoder(seed=1)
    other.norm.weight.data.mul_(1.1)
    with serving("vllm", model) as (engine, _):
        for trainer, expected in ((model, []), (other, ["model.norm.weight"])):
            tensors = dict(folder_weights(trainer.config, parameters(trainer)))
            names = only_server(engine).differing(tensors)
            assert [name for name in names if "_proj." not in name and "layernorm" not in name] == expected
            assert not [name for name in names if "_proj." in name]


STALE = "model.layers.{}.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("kind", "route", "fault"), covering(sorted(KINDS), ["folder", "group"], ["ignored", "transposed"])
)
def test_a_tensor_that_is_not_the_trainer_s_is_named(small_decoder, tmp_path, kind, route, fault):
    trainer = small_decoder(seed=1)
    name = STALE.format(2) if fault == "ignored" else "model.layers.0.self_attn.o_proj.weight"
    hand_over = hand_over_of(route, trainer, tmp_path)
    with serving(kind, small_decoder(), hand_over=hand_over, faults={fault: (name,)}) as (engine, _):
        for version in (1, 2, 3):  # of which one looks at its layer
            engine.update(version, parameters(trainer))
            with pytest.raises(
                TrainingError, match=f"weights of version {version}: {name} has other values there. Log-"
            ):
                canary_of(engine, trainer).check(engine)


@both
def test_a_stale_tensor_shows_in_its_layer_s_turn_even_where_log_probabilities_hardly_move(
    small_decoder, tmp_path, kind
):
    server, trainer = small_decoder(), small_decoder()
    name = STALE.format(2)
    hand_over = hand_over_of("folder", trainer, tmp_path)
    with serving(kind, server, hand_over=hand_over, faults={"ignored": (name,)}) as (engine, _):
        trainer.layers["2"].mlp.down_proj.weight.data[0, 0] += 1e-3
        for version in (3, 4, 5):
            engine.update(version, parameters(trainer))
            if version < 5:
                assert canary_of(engine, trainer).check(engine).gap.mean < TOLERANCE
            else:
                with pytest.raises(TrainingError, match=f"{name} has other values there"):
                    canary_of(engine, trainer).check(engine)


@both
def test_log_probabilities_alone_find_a_stale_tensor_too(small_decoder, tmp_path, kind):
    trainer = small_decoder(seed=1)
    hand_over = hand_over_of("folder", trainer, tmp_path)
    with serving(kind, small_decoder(), hand_over=hand_over, faults={"ignored": (STALE.format(0),)}) as (engine, _):
        engine.update(1, parameters(trainer))
        with pytest.raises(TrainingError, match="the engine does not tell what its tensors are. .* nats on average"):
            Canary(PROMPTS, scores(trainer), TOLERANCE).check(engine)


@ways
def test_a_prefix_cache_that_was_not_dropped_is_found(small_decoder, tmp_path, kind, route):
    trainer = small_decoder()
    hand_over = hand_over_of(route, trainer, tmp_path)
    with serving(kind, small_decoder(), hand_over=hand_over, faults={"keeps_prefix_cache": True}) as (engine, _):
        canary_of(engine, trainer).check(engine)
        with torch.no_grad():
            for parameter in trainer.parameters():
                parameter.mul_(1.05)
        engine.update(1, parameters(trainer))
        with pytest.raises(
            TrainingError, match="all tensors that can be compared are equal, so it may be keys and values"
        ):
            canary_of(engine, trainer).check(engine)


class TrainedAdapter:
    """What a trainer has: a base, and an adapter that was read from the folder which it wrote."""

    def __init__(self, model, folder):
        self.model, self.adapters = model, adapter_set(model)
        add_adapter(self.adapters, "policy", read_adapter_config(folder))

    def score(self):
        return scores(self.model, lambda adapter: self.adapters.activate(*(() if adapter == "none" else ("policy",))))


@pytest.mark.parametrize(
    ("kind", "size"),
    fast(itertools.product(sorted(KINDS), [0.3, 1e-5]), *zip(sorted(KINDS), [0.3, 1e-5], strict=True)),
)
def test_an_adapter_that_reaches_the_rollouts_is_let_pass_and_one_that_does_not_is_found(
    small_decoder, tmp_path, kind, size
):
    write = adapter_writer(small_decoder(), 1, size)
    folder = tmp_path / "trainer"
    folder.mkdir()
    write(folder)
    trainer = TrainedAdapter(small_decoder(), folder)
    canary = Canary(PROMPTS, trainer.score(), TOLERANCE, adapter="policy")
    for ignores in (False, True):
        hand_over = AdapterHandOver("policy", tmp_path / "exchange", write)
        settings = {"hand_over": hand_over, "faults": {"ignores_adapters": ignores}}
        with serving(kind, small_decoder(), **settings) as (engine, _):
            engine.update(1)
            if ignores:
                with pytest.raises(TrainingError, match="adapter policy .version 1. does not reach the rollout engine"):
                    canary.check(engine)
            else:
                report = canary.check(engine)
                assert (report.adapter_gap < TOLERANCE) == (size < 0.1)


@both
def test_an_adapter_that_does_nothing_yet_cannot_be_missed(small_decoder, tmp_path, kind):
    write = adapter_writer(small_decoder(), 1, 0.0)
    folder = tmp_path / "trainer"
    folder.mkdir()
    write(folder)
    canary = Canary(PROMPTS, TrainedAdapter(small_decoder(), folder).score(), TOLERANCE, adapter="policy")
    with serving(kind, small_decoder(), hand_over=AdapterHandOver("policy", tmp_path / "x", write)) as (engine, _):
        engine.update(1)
        assert canary.check(engine).adapter_gap == 0


# -- within the process ------------------------------------------------------------------------------------------------


def test_an_engine_with_the_trainer_s_tensors_is_let_pass(small_decoder):
    model = small_decoder()
    engine = EmbeddedEngine(model, EngineOptions(block=4))
    canary = Canary(PROMPTS, scores(model), 1e-4)
    assert canary.check(engine).gap.largest < 1e-4
    model.norm.weight.data.mul_(1.5)
    model.layers["0"].attention.k_proj.weight.data.mul_(1.5)
    engine.update(1)
    canary.check(engine)
    model.layers["0"].attention.k_proj.weight.data.mul_(1.5)
    with pytest.raises(TrainingError, match="does not answer with the trainer's weights of version 1"):
        canary.check(engine)  # its prefixes are of the weights before


def test_processes_without_the_server_help_with_the_values_and_hear_what_differs(small_decoder):
    model = small_decoder()
    asked = []

    def value(name):
        asked.append(name)

    differing = compare_with_servers(None, model.config, value, lambda make: ["a.weight"])
    assert differing(4) == ["a.weight"]
    layers = {name.split(".")[1] for name in asked if name.startswith("layers.")}
    assert layers == {"1"} and {"embed_tokens.weight", "norm.weight"} <= set(asked)
