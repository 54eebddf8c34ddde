"""Soft prompts and prefixes as virtual tokens: packed, cached, several at once, and their gradients against PEFT's."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from builders.generation import generate
from builders.tiny_adapters import DOCUMENTS, adapter_set, logits, perturb
from builders.tiny_run import VOCABULARY, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from danlu.adapters.adapter_set import AdapterSet
from danlu.core.types import Pack, Sample
from danlu.data.batch import collate
from danlu.inference.engine import EngineOptions
from danlu.inference.request import SamplingOptions
from danlu.models.attend import PackedAttention
from danlu.models.decoder import Decoder
from danlu.models.saving import save
from danlu.recipe import sections

KINDS = [sections.Prompt(tokens=3), sections.Prefix(tokens=3), sections.Prefix(tokens=3, projection=5)]
TOKENS = torch.randint(0, VOCABULARY, (DOCUMENTS[-1],), generator=torch.Generator().manual_seed(5))


def name_of(section: Any) -> str:
    return "-".join(str(value) for value in section.model_dump(exclude_defaults=True).values())


def adapted(section: Any, **model: Any) -> tuple[Decoder, AdapterSet]:
    decoder = tiny_model(**model)
    adapters = adapter_set(decoder)
    adapters.add("one", section)
    adapters.train_only("one")
    perturb(adapters, "one")
    return decoder, adapters


@pytest.mark.parametrize("section", KINDS, ids=name_of)
@pytest.mark.parametrize("family", [{}, {"model_type": "gemma2", "head_dim": 8, "sliding_window": 4}])
def test_packed_is_one_by_one(section: Any, family: dict[str, Any]) -> None:
    model, adapters = adapted(section, **family)
    virtual_token_ids = adapters.virtual_token_ids
    packed = logits(model, TOKENS, virtual_token_ids=virtual_token_ids)
    alone = []
    for start, end in pairwise(DOCUMENTS):
        ids = torch.cat((torch.tensor(virtual_token_ids), TOKENS[start:end]))
        with torch.no_grad():
            hidden = model(ids, torch.arange(len(ids)), PackedAttention((0, len(ids))))
            alone.append(model.logits(hidden)[len(virtual_token_ids) :])
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(packed, logits(model, TOKENS), atol=1e-2)


@pytest.mark.parametrize("section", KINDS, ids=name_of)
def test_what_was_in_one_pass_is_nothing_to_the_next(section: Any) -> None:
    model, adapters = adapted(section)
    with adapters.disabled():
        base = logits(model, TOKENS)
    first = logits(model, TOKENS, virtual_token_ids=adapters.virtual_token_ids)
    assert torch.equal(logits(model, TOKENS), base)  # no virtual token, nothing of the adapter
    assert torch.equal(logits(model, TOKENS, virtual_token_ids=adapters.virtual_token_ids), first)
    assert not torch.equal(first, base)


@pytest.mark.parametrize("section", KINDS, ids=name_of)
@pytest.mark.parametrize("batch_tokens", [2, 1000])
def test_cached_is_uncached(section: Any, batch_tokens: int) -> None:
    """Prompts read in pieces that cut the virtual tokens apart too, and prompts that go on from cached ones."""
    model, adapters = adapted(section)
    virtual_token_ids = adapters.virtual_token_ids
    pieces = [TOKENS[start:end].tolist() for start, end in pairwise(DOCUMENTS)]
    whole = logits(model, TOKENS, virtual_token_ids=virtual_token_ids)
    ends = [(end + place, piece[: len(piece) + place + 1]) for end, piece in zip(DOCUMENTS[1:], pieces, strict=True)
            for place in (-2, -1)]  # fmt: skip
    answers = generate(
        model,
        [prompt for _, prompt in ends],
        SamplingOptions(temperature=0),
        1,
        options=EngineOptions(batch_tokens=batch_tokens, block=2),
        top_logprobs=VOCABULARY,
        virtual_token_ids=virtual_token_ids,
    )
    for (end, _), answer in zip(ends, answers, strict=True):
        assert answer.top is not None
        got = torch.tensor([logprob for _, logprob in sorted(answer.top[0])])
        torch.testing.assert_close(got, whole[end].log_softmax(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("section", KINDS, ids=name_of)
def test_generating_is_taking_the_likeliest_token_of_full_passes(section: Any) -> None:
    model, adapters = adapted(section)
    virtual_token_ids = adapters.virtual_token_ids
    prompts = [[3, 9, 4], [7], [3, 9, 4]]
    got = generate(model, prompts, SamplingOptions(temperature=0), 8, virtual_token_ids=virtual_token_ids)
    for prompt, completion in zip(prompts, got, strict=True):
        ids = [*virtual_token_ids, *prompt]
        for _ in range(8):
            with torch.no_grad():
                hidden = model(torch.tensor(ids), torch.arange(len(ids)), PackedAttention((0, len(ids))))
            ids.append(int(model.logits(hidden[-1:]).argmax()))
        assert completion.tokens == ids[len(virtual_token_ids) + len(prompt) :]
    free = generate(model, prompts, SamplingOptions(temperature=0), 8)
    assert [one.tokens for one in free] != [one.tokens for one in got]


def test_several_have_ids_of_their_own_and_stand_in_the_order_they_are_active() -> None:
    model = tiny_model()
    base = logits(model, TOKENS)
    adapters = adapter_set(model)
    for name, section in {"a": sections.Prompt(tokens=2), "b": sections.Prefix(tokens=3), "c": sections.Lora()}.items():
        adapters.add(name, section)
        adapters.train_only(name)
        perturb(adapters, name)
    assert adapters.virtual_token_ids == (64, 65, 66, 67, 68)
    together = logits(model, TOKENS, virtual_token_ids=adapters.virtual_token_ids)
    adapters.activate("b", "a")
    assert adapters.virtual_token_ids == (66, 67, 68, 64, 65)
    other_order = logits(model, TOKENS, virtual_token_ids=adapters.virtual_token_ids)
    adapters.activate("b")
    alone = logits(model, TOKENS, virtual_token_ids=adapters.virtual_token_ids)
    found = [together, other_order, alone, base]
    assert not any(torch.allclose(one, other, atol=1e-3) for i, one in enumerate(found) for other in found[:i])
    adapters.add("d", sections.Prompt(tokens=1))
    assert adapters.virtual_token_ids == (66, 67, 68, 69)
    for name in ("a", "b", "d"):
        adapters.remove(name)
    adapters.activate()
    assert torch.equal(logits(model, TOKENS), base)


def test_two_prefixes_are_one_prefix_of_both() -> None:
    model = tiny_model()
    adapters = adapter_set(model)
    for name, tokens in {"a": 2, "b": 3, "both": 5}.items():
        adapters.add(name, sections.Prefix(tokens=tokens))
    tables = {name: adapters.tensors(name) for name in adapters.added}
    for layer in "01":
        parts = [tables[name][f"layers.{layer}.attention.prefix.{name}.embedding.weight"] for name in ("a", "b")]
        tables["both"][f"layers.{layer}.attention.prefix.both.embedding.weight"].data.copy_(torch.cat(parts))
    adapters.activate("a", "b")
    apart = logits(model, TOKENS, virtual_token_ids=adapters.virtual_token_ids)
    adapters.activate("both")
    torch.testing.assert_close(logits(model, TOKENS, virtual_token_ids=adapters.virtual_token_ids), apart)


def test_an_adapter_of_the_embedding_leaves_virtual_tokens_alone() -> None:
    """Upon a soft prompt and below it LoRA on the embedding changes words, not the prompt."""
    model, adapters = adapted(sections.Prompt(tokens=2))
    adapters.add("words", sections.Lora(targets=["embed_tokens"]))
    adapters.train_only("words")
    perturb(adapters, "words")
    virtual_token_ids = torch.tensor(adapters.virtual_token_ids)
    rows = model.embed_tokens(virtual_token_ids, torch.float32)
    assert torch.equal(rows, adapters.tensors("one")["embed_tokens.adapter.one.embedding.weight"])
    upon = logits(model, TOKENS, virtual_token_ids=adapters.virtual_token_ids)
    adapters.activate("words", "one")
    assert torch.equal(logits(model, TOKENS, virtual_token_ids=adapters.virtual_token_ids), upon)
    adapters.activate("one")
    assert not torch.allclose(logits(model, TOKENS, virtual_token_ids=adapters.virtual_token_ids), upon, atol=1e-3)


def test_a_virtual_token_that_no_active_adapter_knows_is_an_error() -> None:
    model, adapters = adapted(sections.Prompt(tokens=2))
    adapters.add("two", sections.Prompt(tokens=2))
    virtual_token_ids = adapters.virtual_token_ids
    adapters.activate("one")
    with pytest.raises(IndexError):
        logits(model, TOKENS, virtual_token_ids=virtual_token_ids)
    with adapters.disabled(), pytest.raises(IndexError):
        logits(model, TOKENS, virtual_token_ids=virtual_token_ids[:2])


def packs() -> list[Pack]:
    """The documents of `TOKENS`, every token but the first a target."""
    samples = []
    for start, end in pairwise(DOCUMENTS):
        weights = np.ones(end - start, np.float32)
        weights[0] = 0
        samples.append(Sample(TOKENS[start:end].numpy().astype(np.int32), weights, "made"))
    return [Pack(tuple(samples))]


def our_gradient(model: Decoder, adapters: AdapterSet) -> dict[str, Tensor]:
    batch = collate(packs(), virtual_token_ids=adapters.virtual_token_ids)
    hidden = model(batch.tokens, batch.positions, PackedAttention(batch.boundaries))
    loss = torch.nn.functional.cross_entropy(model.logits(hidden[batch.logits_indices]), batch.targets, reduction="sum")
    own = {name: parameter for name, parameter in adapters.tensors("one").items() if parameter.requires_grad}
    return dict(zip(own, torch.autograd.grad(loss, list(own.values())), strict=True))


@pytest.mark.parametrize(
    ("section", "config"),
    [
        (sections.Prompt(tokens=3), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
        (sections.Prefix(tokens=3), peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
    ],
    ids=["prompt", "prefix"],
)
def test_gradients_of_the_loss_are_pefts(tmp_path: Path, section: Any, config: Any) -> None:
    model, adapters = adapted(section)
    save(model, tmp_path / "base")
    theirs: Any = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32, attn_implementation="eager"),
        config,
    )
    tables = [tensor for name, tensor in adapters.tensors("one").items() if name.endswith("embedding.weight")]
    parameter = theirs.prompt_encoder["default"].embedding.weight
    parameter.data.copy_(torch.cat(tables, 1))
    loss = torch.zeros(())
    for start, end in pairwise(DOCUMENTS):
        ids = TOKENS[start:end].unsqueeze(0)
        found = theirs(input_ids=ids).logits[0, -ids.shape[1] : -1]
        loss = loss + torch.nn.functional.cross_entropy(found, ids[0, 1:], reduction="sum")
    (expected,) = torch.autograd.grad(loss, [parameter])
    found = torch.cat(list(our_gradient(model, adapters).values()), 1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert expected.abs().max() > 1e-2
