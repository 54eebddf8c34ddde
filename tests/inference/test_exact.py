"""`numerics: exact`: what the engine records of its answers is what training computes of them, to the last bit."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from builders.covering import fast
from builders.tiny_adapters import adapter_set, perturb

from danlu.assembly.arithmetic import set_arithmetic
from danlu.core.types import Branch, Pack, Sample
from danlu.data.batch import collate
from danlu.inference import model_runner
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import DraftOptions, EngineOptions
from danlu.inference.logprob_gap import RolloutGap, rollout_gap
from danlu.inference.request import Completion, Request, SamplingOptions
from danlu.inference.support import support_matrix
from danlu.models.decoder import Decoder
from danlu.models.modules import Linear
from danlu.numerics.batch_invariant import batch_invariant
from danlu.numerics.four_bit_weight import FourBitWeight
from danlu.objectives import vocab_slices
from danlu.planning.cache_memory import block_bytes
from danlu.recipe import sections
from danlu.stages.learner import DecoderLearner

SAMPLING = {
    "T1": SamplingOptions(seed=3),
    "T0.7": SamplingOptions(temperature=0.7, seed=3),
    "top-p": SamplingOptions(temperature=0.7, top_p=0.9, seed=3),
}
VOCABULARY = 300
PROMPTS = ((3, 9, 4), tuple(range(11, 61)), (11, 12, 13, 14, 15, 16, 17))
ANSWER = 16
EXACT = EngineOptions(exact=True, batch_tokens=32)


@pytest.fixture(autouse=True)
def several_slices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Exact products in each test, and a head of several slices, the last one narrower."""
    for module in (vocab_slices, model_runner):
        monkeypatch.setattr(module, "EXACT_SLICE_ROWS", 128)
    monkeypatch.setattr("danlu.stages.outputs.EXACT_SLICE_ROWS", 128)
    with batch_invariant():
        yield


def requests(sampling: SamplingOptions, samples: int = 2) -> list[Request]:
    return [Request(number, prompt, sampling, ANSWER, samples) for number, prompt in enumerate(PROMPTS)]


def engine(model: Decoder, options: EngineOptions = EXACT, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    return EmbeddedEngine(model.requires_grad_(False), options, dtype=dtype, **more)


def as_documents(asked: Sequence[Request], completions: Sequence[Completion]) -> Pack:
    """Each answer behind a copy of its prompt."""
    prompts = {request.number: request.prompt for request in asked}
    samples = []
    for completion in completions:
        prompt = prompts[completion.number]
        weights = np.repeat(np.float32([0, 1]), [len(prompt), len(completion.tokens)])
        samples.append(Sample(np.int32([*prompt, *completion.tokens]), weights, "row"))
    return Pack(tuple(samples))


def as_trees(asked: Sequence[Request], completions: Sequence[Completion]) -> Pack:
    """Each prompt once, with all of its answers as branches."""
    samples = []
    for request in asked:
        answers = [completion.tokens for completion in completions if completion.number == request.number]
        tokens, branches = [*request.prompt], [Branch(-1, 0, len(request.prompt))]
        for answer in answers:
            branches.append(Branch(0, len(tokens), len(tokens) + len(answer)))
            tokens += answer
        weights = np.float32([0] * len(request.prompt) + [1] * (len(tokens) - len(request.prompt)))
        samples.append(Sample(np.int32(tokens), weights, "row", branches=tuple(branches)))
    return Pack(tuple(samples))


def trained(
    model: Decoder,
    pack: Pack,
    completions: Sequence[Completion],
    temperature: float,
    dtype: torch.dtype = torch.float32,
    *,
    supported: bool = False,
    virtual_token_ids: Sequence[int] = (),
    exact: bool = True,
) -> list[list[float]]:
    """The log-probabilities that a trainer computes with gradients, by completion."""
    model.requires_grad_(True)
    learner = DecoderLearner(model, model, torch.device("cpu"), dtype, 1, exact=exact)
    batch = collate([pack], virtual_token_ids=virtual_token_ids)
    support = None
    if supported:
        kept = [support for completion in completions for support in completion.support or ()]
        support = torch.from_numpy(support_matrix(kept))
    outputs = learner.outputs(batch, 1.0)["policy"]
    logprobs = outputs.logprobs(temperature=temperature, support=support).logprobs
    assert logprobs.requires_grad
    values = iter(logprobs.tolist())
    return [[next(values) for _ in completion.tokens] for completion in completions]


def gap(completions: Sequence[Completion], trainer: Sequence[Sequence[float]]) -> RolloutGap:
    found = rollout_gap(completions, trainer)
    assert found.tokens == sum(len(completion.tokens) for completion in completions) > 0
    return found


PACKED_AS = {"T1": (as_documents, as_trees), "T0.7": (as_trees,), "top-p": (as_documents,)}
"""How the answers of each way of sampling are laid out for training, which knows no sampling but its temperature."""


ATTENTIONS = (
    "llama", "window", "sliding", "softcap", "qk-norm", "sinks", "latent", "factorized", "key-reuse", "experts",
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "dtype"),
    fast(
        itertools.product(ATTENTIONS, [torch.float32, torch.bfloat16]),
        *((kind, torch.float32) for kind in ATTENTIONS),
        *((kind, torch.bfloat16) for kind in ("softcap", "latent", "experts")),
    ),
    ids=str,
)
def test_the_gap_is_nothing(small_decoder: Any, kind: str, dtype: torch.dtype) -> None:
    model = small_decoder(kind, vocab_size=VOCABULARY)
    by_name = {
        name: [dataclasses.replace(request, number=10 * place + request.number) for request in requests(sampling)]
        for place, (name, sampling) in enumerate(SAMPLING.items())
    }
    every = engine(model, dtype=dtype).generate([request for asked in by_name.values() for request in asked])
    for name, asked in by_name.items():
        numbers, sampling = {request.number for request in asked}, SAMPLING[name]
        completions = [completion for completion in every if completion.number in numbers]
        for form in PACKED_AS[name]:
            pack = form(asked, completions)
            assert gap(completions, trained(model, pack, completions, sampling.temperature, dtype)).largest == 0
        if sampling.truncates:
            pack = as_trees(asked, completions)
            values = trained(model, pack, completions, sampling.temperature, dtype, supported=True)
            drawn = [dataclasses.replace(completion, logprobs=completion.drawn) for completion in completions]
            assert gap(drawn, values).largest == 0
            assert gap(completions, values).largest > 0.01  # the control: without the support


def lora(model: Decoder) -> tuple[int, ...]:
    return adapted(model, sections.Lora(rank=4, targets=["all-linear"]))


def nf4(model: Decoder) -> tuple[int, ...]:
    for module in model.layers.modules():
        if isinstance(module, Linear):
            module.store(FourBitWeight.quantize(module.get_parameter("weight").detach()))
    return lora(model)


def adapted(model: Decoder, section: Any) -> tuple[int, ...]:
    """Puts an adapter on, as after training; its virtual tokens."""
    adapters = adapter_set(model)
    adapters.add("one", section)
    adapters.train_only("one")
    perturb(adapters, "one", size=0.1)
    return tuple(adapters.virtual_token_ids)


KINDS = {
    "lora": lora,
    "nf4": nf4,
    "dora": lambda model: adapted(model, sections.Dora(rank=4)),
    "lora-on-embedding-and-head": lambda model: adapted(
        model, sections.Lora(rank=4, targets=["all-linear", "embed_tokens", "lm_head"])
    ),
    "vera": lambda model: adapted(model, sections.Vera(rank=8)),
    "mora": lambda model: adapted(model, sections.Mora(rank=4)),
    "mora-sharing": lambda model: adapted(model, sections.Mora(rank=4, form="sharing")),
    "ia3": lambda model: adapted(model, sections.Ia3()),
    "bottleneck": lambda model: adapted(model, sections.Bottleneck(width=12)),
    "prompt": lambda model: adapted(model, sections.Prompt(tokens=3)),
    "prefix": lambda model: adapted(model, sections.Prefix(tokens=3)),
}


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, torch.float32) for kind in KINDS), ("lora", torch.bfloat16), ("nf4", torch.bfloat16)]
)
def test_the_gap_is_nothing_with_adapters_and_packed_weights(small_decoder: Any, kind: str, dtype: torch.dtype) -> None:
    sampling = SAMPLING["T0.7"]
    model = small_decoder("llama", vocab_size=VOCABULARY)
    virtual_token_ids = KINDS[kind](model)
    asked = requests(sampling, samples=1)
    completions = engine(model, dtype=dtype, virtual_token_ids=virtual_token_ids).generate(asked)
    pack = as_documents(asked, completions)
    values = trained(model, pack, completions, 0.7, dtype, virtual_token_ids=virtual_token_ids)
    assert gap(completions, values).largest == 0
    base = small_decoder("llama", vocab_size=VOCABULARY)
    assert gap(completions, trained(base, pack, completions, 0.7, dtype)).largest > 0.01


@pytest.mark.parametrize(
    ("kind", "recipe", "dtype"),
    [
        ("llama", "tile", torch.float32),
        pytest.param("experts", "tile", torch.float32, marks=pytest.mark.slow),
        pytest.param("latent", "row", torch.float32, marks=pytest.mark.slow),
        pytest.param("llama", "mxfp8", torch.float32, marks=pytest.mark.slow),
        pytest.param("llama", "tile", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_the_gap_is_nothing_with_products_in_8_bits(
    small_decoder: Any, kind: str, recipe: Any, dtype: torch.dtype
) -> None:
    """The controls: training without them, and one scale of all tokens of a pass."""
    model, asked = small_decoder(kind, vocab_size=VOCABULARY), requests(SAMPLING["T1"], samples=1)
    set_arithmetic(model, sections.Fp8Products(recipe=recipe))
    completions = engine(model, dtype=dtype).generate(asked)
    pack = as_trees(asked, completions)
    assert gap(completions, trained(model, pack, completions, 1.0, dtype)).largest == 0
    plain = small_decoder(kind, vocab_size=VOCABULARY)
    assert gap(completions, trained(plain, pack, completions, 1.0, dtype)).largest > 1e-3
    set_arithmetic(model, sections.Fp8Products(recipe="tensor"))
    completions = engine(model, dtype=dtype).generate(asked)
    assert gap(completions, trained(model, as_trees(asked, completions), completions, 1.0, dtype)).largest > 1e-3


def test_two_forms_of_latent_attention_are_seen(small_decoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys expanded in decoding and absorbed in training: the same function, in other bits."""
    model = small_decoder("latent", vocab_size=VOCABULARY)
    asked = requests(SAMPLING["T1"])
    with monkeypatch.context() as patch:
        patch.setattr("danlu.inference.exact_paged.exact_absorb", lambda keys: None)
        completions = engine(model).generate(asked)
    pack = as_documents(asked, completions)
    assert 0 < gap(completions, trained(model, pack, completions, 1.0)).largest < 1e-4


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_nothing_hangs_on_what_the_engine_does_meanwhile(small_decoder: Any, preempt: Any) -> None:
    """Chunks, neighbours, the size of blocks, shared prefixes, preemption: answers are equal with all their numbers."""
    model = small_decoder("softcap", vocab_size=VOCABULARY)
    asked = requests(SAMPLING["T0.7"])
    want = engine(model, EngineOptions(exact=True, prefix_sharing=False)).generate(asked)
    layers = [layer.attention.cache for layer in model.layers.values()]  # type: ignore[union-attr]
    size = block_bytes(layers, 8, 4)  # type: ignore[arg-type]
    cramped = EngineOptions(
        exact=True, block=8, batch_tokens=13, cache_gib=18 * size / 2**30, swap_gib=1.0, preempt=preempt
    )
    crowded = engine(model, cramped)
    assert crowded.generate(asked) == want
    assert crowded.statistics.preemptions > 0
    alone = [completion for request in asked for completion in engine(model).generate([request])]
    assert alone == want
    fast = engine(model, dataclasses.replace(cramped, exact=False)).generate(asked)
    assert [completion.logprobs for completion in fast] != [completion.logprobs for completion in want]  # the control


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gap_is_nothing_where_drafts_are_checked(
    small_decoder: Any, dtype: torch.dtype, temperature: float
) -> None:
    """Several tokens of a sequence are computed in one pass, and some of them are taken back."""
    model = small_decoder("window", vocab_size=VOCABULARY)
    asked = requests(SamplingOptions(temperature=temperature, seed=3), samples=1)
    proposing, generator = small_decoder("window", vocab_size=VOCABULARY), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in proposing.parameters():
            parameter += 0.03 * torch.randn(parameter.shape, generator=generator)
    options = dataclasses.replace(EXACT, draft=DraftOptions("model"))
    drafting = engine(model, options, dtype, draft_model=proposing)
    completions = drafting.generate(asked)
    assert 0 < drafting.statistics.drafts_accepted < drafting.statistics.drafts_proposed
    values = trained(model, as_documents(asked, completions), completions, temperature or 1.0, dtype)
    assert gap(completions, values).largest == 0
    if temperature == 0:
        assert engine(model, dtype=dtype).generate(asked) == completions


@contextmanager
def fast_training(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's attention in training."""
    with monkeypatch.context() as patch:
        from danlu.models.attend import PackedAttention
        from danlu.stages import learner

        def fast(batch: Any, **options: Any) -> PackedAttention:
            return PackedAttention(batch.boundaries, batch.trees)

        patch.setattr(learner, "attend_for", fast)
        yield


@contextmanager
def slices_that_follow_the_targets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr("danlu.stages.outputs.EXACT_SLICE_ROWS", None)
        yield


@pytest.mark.parametrize("mistake", [fast_training, slices_that_follow_the_targets])
def test_each_part_is_needed(small_decoder: Any, mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_decoder("llama", vocab_size=VOCABULARY)
    asked = requests(SAMPLING["T1"])
    completions = engine(model).generate(asked)
    pack = as_documents(asked, completions)
    with mistake(monkeypatch):
        assert 0 < gap(completions, trained(model, pack, completions, 1.0)).largest < 1e-4
    assert gap(completions, trained(model, pack, completions, 1.0)).largest == 0


def test_products_of_as_many_rows_as_there_are_sequences_are_seen(
    small_decoder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_decoder("llama", vocab_size=VOCABULARY)
    asked = requests(SAMPLING["T1"])
    with monkeypatch.context() as patch:
        patch.setattr("danlu.numerics.batch_invariant._rows_are_tokens", lambda left: False)
        # One at a time: some CPUs round products of two rows as those of many, but none a single row.
        completions = engine(model, replace(EXACT, sequences=1)).generate(asked)
    pack = as_documents(asked, completions)
    assert 0 < gap(completions, trained(model, pack, completions, 1.0)).largest < 1e-4


def test_another_softmax_in_the_sampler_is_seen(small_decoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_decoder("llama", vocab_size=VOCABULARY)
    asked = requests(SAMPLING["T1"])
    draw = model_runner.draw
    monkeypatch.setattr(model_runner, "draw", lambda logits, rows, slice_rows: draw(logits, rows))
    completions = engine(model).generate(asked)
    pack = as_documents(asked, completions)
    assert 0 < gap(completions, trained(model, pack, completions, 1.0)).largest < 1e-4
