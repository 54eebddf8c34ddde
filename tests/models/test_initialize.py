from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from danlu.models.attend import PackedAttention
from danlu.models.decoder import Decoder
from danlu.models.initialize import initialize

BIG = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "vocab_size": 1000}


def test_same_name_same_bits_whatever_else_the_model_has(tiny_model: Callable[..., Decoder]) -> None:
    short, long = tiny_model("qwen2"), tiny_model("qwen2", num_hidden_layers=5, vocab_size=77)
    name = "layers.2.attention.q_proj.weight"
    assert torch.equal(short.get_parameter(name), long.get_parameter(name))
    assert not torch.equal(short.get_parameter(name), short.get_parameter("layers.1.attention.q_proj.weight"))
    before = short.get_parameter(name).clone()
    initialize(short, 1)
    assert not torch.equal(short.get_parameter(name), before)
    initialize(short, 0)
    assert torch.equal(short.get_parameter(name), before)


def test_neither_the_global_generator_nor_the_storage_type_matters(tiny_model: Callable[..., Decoder]) -> None:
    model = tiny_model("llama-2")
    torch.manual_seed(99)
    state = torch.get_rng_state()
    again = tiny_model("llama-2")
    assert torch.equal(torch.get_rng_state(), state)
    narrow = again.to(torch.bfloat16)
    initialize(narrow, 0)
    for one, other in zip(model.parameters(), narrow.parameters(), strict=True):
        assert torch.equal(one.to(torch.bfloat16), other)


@pytest.mark.parametrize("case", ["gemma2", "llama-2", "llama-biased-multi-query", "llama-tied-smollm2"])
def test_spread_is_as_documented(case: str, tiny_model: Callable[..., Decoder]) -> None:
    model = tiny_model(case, **BIG, num_attention_heads=4)
    small = (2 / (5 * 256)) ** 0.5
    tied = model.config.tie_word_embeddings
    for name, parameter in model.state_dict().items():
        if name.endswith(".bias"):
            assert not parameter.any()
        elif "norm" in name:
            assert (parameter == (0.0 if case == "gemma2" else 1.0)).all()
        else:
            expected = small
            if "o_proj" in name or "down_proj" in name:
                expected = small / 4
            if "embed" in name and not tied:
                expected = 1.0
            assert float(parameter.std()) == pytest.approx(expected, rel=0.03), name
            assert abs(float(parameter.mean())) < 0.02 * expected + 4 * expected / parameter.numel() ** 0.5


def test_scores_without_a_factor_start_as_if_they_had_one(tiny_model: Callable[..., Decoder]) -> None:
    parameters = tiny_model("gemma4").state_dict()
    norms = [parameters[f"layers.{layer}.attention.{name}.weight"] for layer in (0, 1) for name in ("q_norm", "k_norm")]
    assert [float(norm[0]) for norm in norms] == pytest.approx([8**-0.25, 8**-0.25, 0.5, 0.5])
    assert (parameters["layers.0.attention_norm.weight"] == 1).all() and parameters["layers.0.layer_scalar.weight"] == 1
    assert (tiny_model("qwen3").get_parameter("layers.0.attention.q_norm.weight") == 1).all()  # control


def test_an_embedding_that_is_multiplied_starts_as_much_smaller(tiny_model: Callable[..., Decoder]) -> None:
    """Gemma multiplies it by the root of the width: the stream starts near one all the same."""
    tokens = torch.randint(0, 1000, (64,), generator=torch.Generator().manual_seed(0))
    for case, multiplier in (("gemma2", 16.0), ("llama-2", 1.0)):
        model = tiny_model(case, **BIG, num_attention_heads=4, tie_word_embeddings=False)
        assert model.config.embedding_multiplier == multiplier
        assert float(model.embed_tokens.weight.detach().std()) == pytest.approx(1 / multiplier, rel=0.03)
        assert float(model.embed_tokens(tokens, torch.float32).detach().std()) == pytest.approx(1.0, rel=0.05)


def test_the_stream_starts_near_one_and_the_loss_near_uniform(tiny_model: Callable[..., Decoder]) -> None:
    model = tiny_model("llama-2", **BIG)
    tokens = torch.randint(0, 1000, (64,), generator=torch.Generator().manual_seed(0))
    assert float(model.embed_tokens(tokens, torch.float32).detach().std()) == pytest.approx(1.0, rel=0.05)
    with torch.no_grad():
        logits = model.logits(model(tokens, torch.arange(64), PackedAttention((0, 64))))
    loss = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:])
    assert float(loss) == pytest.approx(torch.tensor(1000.0).log().item(), rel=0.06)
