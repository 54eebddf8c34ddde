"""A mistake is there while it is injected, and gone afterwards."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from builders.faults import FAULTS
from builders.tiny_world import tiny_world
from torch.distributed.fsdp import FSDPModule

from danlu.adapters import dropout
from danlu.adapters.adapter_set import AdapterSet
from danlu.data import context_sharding
from danlu.models import load_balancing, router_replay
from danlu.models.decoder import Decoder
from danlu.models.experts import Router, RowOrder
from danlu.models.load_balancing import Balancer, BatchTokens
from danlu.models.modules import RMSNorm
from danlu.optim import gradients
from danlu.optim.build import Optimizers
from danlu.parallel import local_parameter, parallel_context, ring_attention
from danlu.parallel.comm import Group
from danlu.parallel.context_groups import ContextGroups
from danlu.parallel.gradient_buckets import GradientBuckets
from danlu.parallel.layout import Layout
from danlu.parallel.parallel_context import ParallelContext
from danlu.parallel.pipeline import Pipeline
from danlu.parallel.ranks import DataGroups, Ranks
from danlu.parallel.weight_stash import WeightStash
from danlu.recipe import load
from danlu.stages import frozen_models, learner
from danlu.stages.learner import DecoderLearner
from danlu.training import loop, step
from danlu.training import state as state_module
from danlu.training.checkpoints.gathering import Gathering
from danlu.training.step import StepSums
from danlu.verification import trace

TOUCHED = [
    (step, "clip_grad_norms"),
    (loop, "accumulate"),
    (trace, "clip_grad_norm"),
    (ParallelContext, "reduce_gradients"),
    (ParallelContext, "local_range"),
    (Decoder, "head_weight"),
    (dropout.DropoutState, "begin"),
    (dropout.Dropout, "__call__"),
    (FSDPModule, "set_reshard_after_backward"),
    (Optimizers, "load_state"),
    (DecoderLearner, "prepare"),
    (DecoderLearner, "at"),
    (Pipeline, "actions"),
    (DecoderLearner, "_attend"),
    (context_sharding, "share_of_batch"),
    (ContextGroups, "sum"),
    (ring_attention, "as_rows"),
    (ring_attention, "finished"),
    (ring_attention, "tiles_between"),
    (learner, "shard_by_tokens"),
    (AdapterSet, "without"),
    (frozen_models, "place_frozen"),
    (RMSNorm, "forward"),
    (ParallelContext, "norm_weights"),
    (RowOrder, "weighted_sum"),
    (Router, "eligible"),
    (load_balancing, "Balancer"),
    (Balancer, "end_step"),
    (load_balancing, "is_recomputing"),
    (BatchTokens, "of"),
    (router_replay, "replaying"),
    (Optimizers, "step"),
    (WeightStash, "_copy_parameters"),
    (state_module, "load_checkpoint"),
    (state_module, "_optimizer_scalars"),
    (Gathering, "part"),
    (GradientBuckets, "__init__"),
    (parallel_context, "_all_reduce_flat"),
    (StepSums, "own_means"),
    (gradients, "_global_norm"),
    (local_parameter, "_copied"),
]


def state() -> list[object]:
    return [owner.__dict__[name] for owner, name in TOUCHED]


@pytest.mark.parametrize("name", FAULTS)
def test_nothing_stays_behind(name: str, tmp_path: Path) -> None:
    recipe = load(tiny_world().recipe(tmp_path / "run", tmp_path / "recipe.yaml")).recipe
    data, shard = Group("data", (0, 1)), Group("shard", (0, 1))
    ranks = Ranks(Layout(shard=2), data=data, shard=shard, dense_data=DataGroups(data, shard=shard))
    original = state()
    with FAULTS[name].inject(recipe, ranks):
        assert state() != original
    assert state() == original
    with suppress(KeyError), FAULTS[name].inject(recipe, ranks):
        raise KeyError
    assert state() == original


@pytest.mark.parametrize("name", FAULTS)
def test_what_a_mistake_needs_is_gone_afterwards(name: str) -> None:
    original = state()
    with FAULTS[name].setting():
        assert (state() != original) == (name == "idle-expert-without-gradient")
    assert state() == original
