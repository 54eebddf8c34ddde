"""Speculative decoding in the embedded engine: by n-grams and with a draft model, against decoding without."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from builders.covering import fast

from danlu.core.errors import ModelError
from danlu.inference.draft_model import DraftModelProposer
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import DraftOptions, EngineOptions
from danlu.inference.request import Request, SamplingOptions
from danlu.inference.sampling import DrawRow
from danlu.inference.speculative import DraftSequence
from danlu.numerics.batch_invariant import batch_invariant
from danlu.planning.cache_memory import block_bytes

GREEDY = SamplingOptions(temperature=0)
SAMPLED = SamplingOptions(temperature=0.8, top_k=20, top_p=0.9, repetition_penalty=1.2, seed=4)
DRAWN = SamplingOptions(seed=2)
PROMPTS = [[3, 9, 4, 3, 9, 4], [7], [3, 9, 4], [11, 12, 13, 14, 15, 16, 17], list(range(40))]
NGRAM, MODEL = DraftOptions(tokens=3), DraftOptions(kind="model", tokens=3)


def requests(options=GREEDY, count=20, prompts=PROMPTS, **settings):
    return [Request(number, tuple(prompt), options, count, **settings) for number, prompt in enumerate(prompts)]


def blocks_of(model, blocks, block=4, draft_model=None, **settings):
    """Options with a cache of so many blocks, and as many of the draft model."""
    models = [model] if draft_model is None else [model, draft_model]
    size = sum(block_bytes([layer.attention.cache for layer in one.layers.values()], block, 4) for one in models)
    return EngineOptions(block=block, cache_gib=(blocks + 0.5) * size / 2**30, swap_gib=1000 * size / 2**30, **settings)


def perturbed(model, small_decoder, share=0.05):
    """A draft model that often agrees with the model."""
    draft = small_decoder()
    for (_, own), parameter in zip(draft.named_parameters(), model.parameters(), strict=True):
        noise = torch.randn(own.shape, generator=torch.Generator().manual_seed(9))
        own.copy_(parameter + share * parameter.std() * noise)
    return draft


def check_same(completions, expected):
    """Equal but for the rounding of log-probabilities, which follows the size of a pass unless numerics are exact."""
    for completion, reference in zip(completions, expected, strict=True):
        numbers = [*reference.logprobs, *reference.drawn]
        assert [*completion.logprobs, *completion.drawn] == pytest.approx(numbers, abs=1e-4)
        supports = [None if c.support is None else [s.ids.tolist() for s in c.support] for c in (completion, reference)]
        assert supports[0] == supports[1]
        unlike = {"logprobs": reference.logprobs, "drawn": reference.drawn, "support": reference.support}
        assert dataclasses.replace(completion, **unlike) == reference


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_answers_with_ngrams_are_those_without(small_decoder, options):
    model = small_decoder()
    asked = requests(options, samples=2)
    engine = EmbeddedEngine(model, EngineOptions(draft=NGRAM))
    check_same(engine.generate(asked), EmbeddedEngine(model).generate(asked))
    statistics = engine.statistics
    assert 0 < statistics.drafts_accepted < statistics.drafts_proposed
    assert statistics.generated_tokens >= 2 * 20 * len(PROMPTS)


@pytest.mark.parametrize("kind", ["llama", "window", "softcap"])
def test_greedy_answers_with_a_draft_model_are_those_without(small_decoder, kind):
    model = small_decoder(kind)
    draft_model = perturbed(model, small_decoder) if kind == "llama" else small_decoder("qk-norm")
    asked = requests(samples=2)
    engine = EmbeddedEngine(model, EngineOptions(draft=MODEL), draft_model=draft_model)
    plain = EmbeddedEngine(model)
    check_same(engine.generate(asked), plain.generate(asked))
    if kind == "llama":
        assert engine.statistics.drafts_accepted > engine.statistics.drafts_proposed / 4
        assert engine.statistics.passes < plain.statistics.passes * 0.7


@pytest.mark.parametrize(
    ("draft", "preempt"),
    fast(itertools.product([NGRAM, MODEL], ["recompute", "swap"]), (NGRAM, "recompute"), (MODEL, "swap")),
)
def test_drafts_survive_preemption_and_neighbours(small_decoder, draft, preempt):
    """Each answer alone, with all the room there is, and together with others in a small cache."""
    model = small_decoder()
    draft_model = perturbed(model, small_decoder) if draft is MODEL else None
    asked = requests(SamplingOptions(temperature=0.9, top_p=0.95, seed=1), count=20, samples=2)
    alone = EmbeddedEngine(model, EngineOptions(draft=draft), draft_model=draft_model)
    expected = [completion for request in asked for completion in alone.generate([request])]
    options = blocks_of(model, 18, draft_model=draft_model, draft=draft, preempt=preempt, batch_tokens=24)
    engine = EmbeddedEngine(model, options, draft_model=draft_model)
    check_same(engine.generate(asked), expected)
    assert engine.statistics.preemptions > 0
    other = EmbeddedEngine(model, EngineOptions(draft=draft), draft_model=draft_model)
    differing = dataclasses.replace(asked[0], sampling=SamplingOptions(seed=2))
    assert [c.tokens for c in other.generate([differing])] != [c.tokens for c in expected[:2]], "control"


@pytest.mark.parametrize("draft", [NGRAM, MODEL], ids=["ngram", "model"])
def test_drafts_survive_restarts_and_states(small_decoder, draft):
    model = small_decoder()
    draft_model = perturbed(model, small_decoder) if draft is MODEL else None

    def new_engine():
        return EmbeddedEngine(model, EngineOptions(draft=draft), draft_model=draft_model)

    asked = requests(SamplingOptions(temperature=0.9, seed=1), 32)
    expected = new_engine().generate(asked)
    engine = new_engine()
    for request in asked:
        engine.submit(request)
    for _ in range(5):
        assert not engine.step()
    engine.update(0)  # everything is read again
    for _ in range(3):
        engine.step()
    heir = new_engine()
    heir.restore(engine.state())
    completions = []
    while heir.unfinished:
        completions += heir.step()
    check_same(sorted(completions, key=lambda completion: completion.number), expected)


@pytest.mark.parametrize(
    ("draft", "batch_tokens"), fast(itertools.product([NGRAM, MODEL], [1, 4]), (MODEL, 1), (NGRAM, 4))
)
def test_answers_with_more_drafts_than_a_pass_has_tokens_are_those_without(small_decoder, batch_tokens, draft):
    model = small_decoder()
    asked = requests(GREEDY, 12)
    draft_model = perturbed(model, small_decoder) if draft is MODEL else None
    options = EngineOptions(batch_tokens=batch_tokens, draft=dataclasses.replace(draft, tokens=4))
    engine = EmbeddedEngine(model, options, draft_model=draft_model)
    check_same(engine.generate(asked), EmbeddedEngine(model).generate(asked))
    assert (engine.statistics.drafts_accepted > 0) == (batch_tokens > 1)


@pytest.mark.parametrize("draft", [NGRAM, MODEL], ids=["ngram", "model"])
def test_answers_end_where_they_do_without_drafts(small_decoder, draft):
    """A stop token among accepted proposals, and the end of the context."""
    model = small_decoder(context=48)
    plain = EmbeddedEngine(model)
    text = plain.generate(requests(count=40))[0].tokens
    stops = frozenset({text[9]})
    asked = requests(count=60, stop_ids=stops)
    engine = EmbeddedEngine(
        model, EngineOptions(draft=draft), draft_model=small_decoder(context=48) if draft is MODEL else None
    )
    completions = engine.generate(asked)
    check_same(completions, plain.generate(asked))
    assert completions[0].finish == "stop" and {c.finish for c in completions} == {"stop", "context"}
    assert engine.statistics.blocks_used == 0


def test_texts_past_the_draft_models_context_go_on_without_proposals(small_decoder):
    model, draft_model = small_decoder(), small_decoder(context=20)
    asked = requests(SamplingOptions(seed=3), count=30)
    engine = EmbeddedEngine(model, EngineOptions(draft=MODEL), draft_model=draft_model)
    check_same(
        engine.generate(asked[:4]),
        [
            EmbeddedEngine(model, EngineOptions(draft=MODEL), draft_model=draft_model).generate([r])[0]
            for r in asked[:4]
        ],
    )
    greedy = requests(count=30)
    check_same(engine.generate(greedy), EmbeddedEngine(model).generate(greedy))


def test_exact_numerics_make_answers_with_drafts_equal_to_the_last_bit(small_decoder):
    model = small_decoder()
    asked = requests(SamplingOptions(temperature=0.9, top_p=0.95), count=12)
    with batch_invariant():
        expected = EmbeddedEngine(model, EngineOptions(exact=True)).generate(asked)
        got = EmbeddedEngine(model, EngineOptions(exact=True, draft=NGRAM)).generate(asked)
        assert [(c.tokens, c.logprobs, c.drawn) for c in got] == [(c.tokens, c.logprobs, c.drawn) for c in expected]
        draft_model = perturbed(model, small_decoder)
        options = EngineOptions(exact=True, draft=MODEL)
        together = EmbeddedEngine(model, options, draft_model=draft_model).generate(asked)
        alone = [EmbeddedEngine(model, options, draft_model=draft_model).generate([request])[0] for request in asked]
        assert [(c.tokens, c.logprobs) for c in together] == [(c.tokens, c.logprobs) for c in alone]


def draft_sequence(number, tokens, limit=3, options=GREEDY, virtual=0):
    return DraftSequence(number, tokens, 2 + virtual, limit, DrawRow(options, number, 0, len(tokens)), virtual, 0)


@pytest.mark.parametrize(
    ("options", "blocks"), fast(itertools.product([GREEDY, DRAWN], [12, 100]), (DRAWN, 12), (GREEDY, 100))
)
def test_a_draft_models_cache_changes_no_proposal(small_decoder, options, blocks):
    """Texts that grow by what was proposed and by other tokens, in a pool with room for two of five and for all."""
    draft_model = small_decoder()
    settings = blocks_of(draft_model, blocks, batch_tokens=11)
    cached = DraftModelProposer(draft_model, settings, vocab_size=61)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, 61, (4 + 3 * i,), generator=generator).tolist() for i in range(5)]
    for step in range(4):
        sequences = [draft_sequence(i, text, options=options) for i, text in enumerate(texts)]
        fresh = DraftModelProposer(draft_model, EngineOptions(), vocab_size=61)
        got = cached.propose(sequences)
        for sequence, proposed, text in zip(sequences, got, texts, strict=True):
            (expected,) = fresh.propose([sequence])
            assert [token.token for token in proposed] == [token.token for token in expected]
            assert len(proposed) == 3 + (options.temperature > 0)
            for token, other in zip(proposed, expected, strict=True):
                if options.temperature > 0:
                    torch.testing.assert_close(token.probabilities, other.probabilities, atol=1e-5, rtol=1e-4)
            accepted = (step + sequence.number) % 4
            text += [token.token for token in proposed[:accepted]] + [(text[-1] + step) % 61, 5][: 1 + step % 2]
        cached.forget(step)
    other = DraftModelProposer(small_decoder(seed=1), EngineOptions(), vocab_size=61)
    tokens = [[[token.token for token in proposed] for proposed in of.propose(sequences)] for of in (fresh, other)]
    assert tokens[0] != tokens[1], "control"


def test_virtual_tokens_are_not_read_by_the_draft_model(small_decoder):
    proposer = DraftModelProposer(small_decoder(), EngineOptions(), vocab_size=61)
    (plain,) = proposer.propose([draft_sequence(0, [5, 6, 7])])
    (virtual,) = proposer.propose([draft_sequence(1, [61, 62, 5, 6, 7], virtual=2)])
    assert [token.token for token in plain] == [token.token for token in virtual]


def test_a_draft_model_of_another_vocabulary_is_refused(small_decoder):
    model, draft_model = small_decoder(), small_decoder(vocab_size=70)
    with pytest.raises(
        ModelError, match=r"draft model's vocabulary has 70 tokens, and the model's has 61: choose a draft"
    ):
        EmbeddedEngine(model, EngineOptions(draft=MODEL), draft_model=draft_model)
