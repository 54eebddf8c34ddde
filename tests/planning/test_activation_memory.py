"""The closed form of activation memory against the tensors autograd really keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from builders.tiny_run import tiny_model

from danlu.adapters.dropout import DropoutState, SiteNumbers
from danlu.memory.recompute import Kind, LayerPlan, wrap
from danlu.models import block_attention
from danlu.models.attend import PackedAttention
from danlu.models.config import ModelConfig
from danlu.models.decoder import Decoder
from danlu.models.initialize import initialize
from danlu.models.layer_spec import Dense, Experts, Feed, Mixer, Router
from danlu.models.mixer_spec import Factorized, Heads, Latent
from danlu.models.rope_config import Rope
from danlu.models.router_replay import routers_of
from danlu.planning import activation_memory
from danlu.planning.activation_memory import ActivationPlan, activation_bytes

SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "max_position_embeddings": 1024}
ROPE = Rope(1e4, 16, 1024)
EXPERTS = Experts(8, 2, 192, router=Router(normalise=True), shared=Dense(64), shared_gate=True)


def saved_bytes(
    lengths: list[int],
    dtype: torch.dtype,
    feed: Feed | None = None,
    mixer: Mixer | None = None,
    recompute: Kind = "none",
    draws: bool = False,
    **changes: Any,
) -> tuple[int, ModelConfig]:
    """Bytes of the distinct storages kept for backward, parameters left out. feed, mixer, changes: of all layers; None:
    a dense network, grouped queries. draws: whether routers draw experts."""
    model = tiny_model(**SIZES)
    if feed is not None or mixer is not None or changes:
        config = model.config.with_layers(
            lambda layer: replace(layer, feed=feed or layer.feed, mixer=mixer or layer.mixer, **changes)
        )
        model = Decoder(config)
        initialize(model, 0)
    if draws:
        state = DropoutState(0)
        state.begin(1, list(enumerate(lengths)))
        for place, router in routers_of(model).items():
            router.draws = SiteNumbers(f"router {place}", state)
    wrap(model, [LayerPlan(layer, recompute) for layer in range(len(model.layers))])
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # holding the storages keeps their addresses from being used again

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    boundaries = [0]
    for length in lengths:
        boundaries.append(boundaries[-1] + length)
    positions = torch.cat([torch.arange(length) for length in lengths])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attend = PackedAttention(tuple(boundaries), recomputed_layers=model.recomputed_attention)
        model(torch.zeros(boundaries[-1], dtype=torch.long), positions, attend, dtype)
    return sum(storage.nbytes() for storage in kept.values()), model.config


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lengths", [[512], [100, 156, 200, 56], [700]])
def test_predicted_activations_hold_what_is_kept_and_not_much_more(dtype: torch.dtype, lengths: list[int]) -> None:
    real, config = saved_bytes(lengths, dtype)
    predicted = activation_bytes(config, lengths, dtype.itemsize).kept
    assert real <= predicted <= 1.6 * real, f"{predicted / real:.2f}"


MIXERS = {
    "latent": Latent(8, 64, 16, 24, ROPE, q_lora_rank=48),
    "latent without one of queries": Latent(8, 64, 16, 24, ROPE),
    "factorized": Factorized(8, 32, ROPE, query_rank=32),
    "key reuse": Factorized(8, 32, ROPE, query_rank=48, key_reuse=True, query_norm=True),
    "sinks and gates": Heads(8, 4, 16, ROPE, sinks=True, output_gate=True),
    "normed values": Heads(8, 8, 16, ROPE, value_norm=True),
    "normed values that are keys": Heads(8, 8, 16, ROPE, qk_norm="head", value_norm=True, values_are_keys=True),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", MIXERS)
def test_so_it_is_with_every_attention(name: str, dtype: torch.dtype) -> None:
    lengths = [100, 156, 200, 56]
    real, config = saved_bytes(lengths, dtype, mixer=MIXERS[name])
    predicted = activation_bytes(config, lengths, dtype.itemsize).kept
    assert real <= predicted <= 1.6 * real, f"{predicted / real:.2f}"


PARALLEL: dict[str, dict[str, Any]] = {
    "gpt_neox": {"norm_kind": "layer-bias", "parallel": True, "feed": Dense(192, "gelu", bias=True, gated=False)},
    "cohere2": {"norm_kind": "layer", "parallel": True, "norms": "shared"},
}


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("name", PARALLEL)
def test_parallel_layers_keep_one_input(name: str, recompute: Kind) -> None:
    lengths = [100, 156, 200, 56]
    real, config = saved_bytes(lengths, torch.float32, recompute=recompute, **PARALLEL[name])
    plan = ActivationPlan(recompute=[(recompute, None)] * len(config.layers))
    predicted = activation_bytes(config, lengths, 4, plan).kept
    assert real <= predicted <= 1.6 * real, f"{predicted / real:.2f}"
    feed = config.layers[0].feed
    assert isinstance(feed, Dense)
    gated = replace(feed, gated=True)
    plain = config.with_layers(lambda layer: replace(layer, parallel=False, norms="pre", feed=gated))
    more = activation_bytes(plain, lengths, 4, plan).kept - predicted  # the control: a second input of each layer
    assert more >= sum(lengths) * config.hidden_size * 4


@pytest.mark.parametrize("recompute", ["none", "elementwise", "selective"])
def test_experts_that_are_normed_apart_keep_what_their_norms_read(recompute: Kind) -> None:
    lengths, router = [100, 156, 200, 56], Router(normalise=True, input_norm=True, expert_scales=True)
    apart = Experts(8, 2, 192, router=router, shared=Dense(64), branch_norms=True)
    real, config = saved_bytes(lengths, torch.float32, apart, recompute=recompute, norms="sandwich", scalar=True)
    plan = ActivationPlan(recompute=[(recompute, None)] * len(config.layers))
    predicted = activation_bytes(config, lengths, 4, plan).kept
    assert real <= predicted <= 1.6 * real, f"{predicted / real:.2f}"


@pytest.mark.parametrize("recompute", ["none", "elementwise", "selective"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_keep_a_row_for_each_expert_of_a_token(dtype: torch.dtype, recompute: Kind) -> None:
    lengths = [100, 156, 200, 56]
    real, config = saved_bytes(lengths, dtype, EXPERTS, recompute=recompute)
    plan = ActivationPlan(recompute=[(recompute, None)] * len(config.layers))
    predicted = activation_bytes(config, lengths, dtype.itemsize, plan).kept
    assert real <= predicted <= 1.6 * real, f"{predicted / real:.2f}"
    if recompute != "none":  # the rows of experts and their gated products are made again
        everything = saved_bytes(lengths, dtype, EXPERTS)[0]
        rows = sum(lengths) * 2 * (128 + 192) * dtype.itemsize * len(config.layers)
        assert everything - real >= rows
        return
    dense = config.with_layers(lambda layer: replace(layer, feed=Dense(2 * 192 + 64)))
    assert activation_bytes(dense, lengths, dtype.itemsize).kept < real  # without rows taken and given back


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_with_scattered_inputs_keep_the_factors(dtype: torch.dtype) -> None:
    lengths, scattered = [100, 156, 200, 56], Router("sparse-mixer", jitter=0.3, input_jitter=0.1)
    feed = Experts(8, 2, 192, router=scattered)
    real, config = saved_bytes(lengths, dtype, feed, draws=True)
    predicted = activation_bytes(config, lengths, dtype.itemsize).kept
    assert real <= predicted <= 1.6 * real, f"{predicted / real:.2f}"
    least = sum(lengths) * config.hidden_size * dtype.itemsize * len(config.layers)
    assert real - saved_bytes(lengths, dtype, feed)[0] >= least
    still = config.with_layers(lambda layer: replace(layer, feed=Experts(8, 2, 192, router=Router("sparse-mixer"))))
    assert predicted - activation_bytes(still, lengths, dtype.itemsize).kept >= 2 * least


def test_probabilities_that_are_computed_again_are_those_of_a_block() -> None:
    assert activation_memory._BLOCK_ROWS == block_attention.BLOCK_ROWS
    config = tiny_model(**SIZES).config
    scores = 4 * (1024 * 1025 // 2) * 4  # bytes, of four heads

    def recomputed(kind: Kind, keeps_scores: bool) -> int:
        plan = ActivationPlan([(kind, None)] * 4, keeps_scores=lambda length, mixer: keeps_scores)
        return activation_bytes(config, [1024], 4, plan).recomputed

    blocks = recomputed("elementwise", True) - recomputed("elementwise", False)
    assert blocks == 2 * 4 * 128 * 1024 * 4 < scores
    segments = ActivationPlan([("full", number) for number in range(4)])  # control: kept within a layer's replay
    assert activation_bytes(config, [1024], 4, segments).recomputed > recomputed("elementwise", True) + scores
