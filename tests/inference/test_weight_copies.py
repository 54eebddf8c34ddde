"""Copies of weights in the type of activations, which a rollout makes once, are never those of older weights."""

from __future__ import annotations

import torch

from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.request import Request, SamplingOptions


def test_an_engine_takes_up_weights_that_changed_without_counting(small_decoder):
    model = small_decoder("llama")
    engine = EmbeddedEngine(model, dtype=torch.bfloat16)
    requests = [Request(0, (3, 5, 7), SamplingOptions(temperature=0), 6)]

    def logprobs():
        return engine.generate(requests)[0].logprobs

    before = logprobs()
    for name, parameter in model.layers.named_parameters():
        if "proj" in name:
            parameter.data.mul_(1.5)  # as FSDP gathers: the version stays what it was
    assert logprobs() == before  # what would be seen without `update`: copies of the old weights
    engine.update(1)
    fresh = EmbeddedEngine(model, dtype=torch.bfloat16).generate(requests)[0].logprobs
    assert logprobs() == fresh != before
    engine.sleep()
    assert engine._runner.packed_weights.copies == 0
