"""`memory.recompute: planned`: each layer's recomputation by measurements on the model that is being placed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from danlu.core.errors import RecipeError
from danlu.core.types import Pack, Sample
from danlu.data.batch import collate, pad_to_bucket
from danlu.memory import recompute_choice, recompute_planner
from danlu.memory.layer_plan import LayerPlan
from danlu.models.attend import attend_for
from danlu.models.decoder import Decoder
from danlu.models.initialize import initialize
from danlu.models.loading import build
from danlu.numerics.dtypes import DTYPES
from danlu.parallel import tensor
from danlu.parallel.ranks import Ranks
from danlu.recipe import Recipe

if TYPE_CHECKING:
    from danlu.adapters.adapter_set import AdapterSet


def fastest_plan(
    model: Decoder, adapters: AdapterSet | None, recipe: Recipe, ranks: Ranks, in_flight: float, device: torch.device
) -> list[LayerPlan]:
    """The plan of recompute kind `planned`: the fastest within the budget, by measurements.

    They are made on this model, or on one layer of each kind of its config where it is on the meta device; with
    micro-batches of full packs of one document each, padded as in a step. All processes measure, for layers that are
    cut communicate, and the numbers of the first one with the same layers make the plan of all that have them.
    in_flight: the micro-batches of which a stage of a pipeline keeps activations.
    """
    section, micro = recipe.memory.recompute, recipe.batch.micro
    assert isinstance(micro, int) and section.budget is not None, "the recipe's rules ask for both"
    shares = ranks.tensor.size if recipe.parallel.sequence else 1
    if any(parameter.is_meta for parameter in model.parameters()):
        config = replace(model.config, layers=model.config.kinds)
        probe = build(config, device=device)
        initialize(probe, recipe.seed)
        tensor.cut(probe, None, ranks.tensor, sequence=recipe.parallel.sequence)
    else:
        probe = model
    length = recipe.data.max_length
    full = Pack((Sample(np.zeros(length, dtype=np.int32), np.zeros(length, dtype=np.float32), "full"),))
    virtual = () if adapters is None else adapters.virtual_token_ids
    batch = pad_to_bucket(collate([full] * micro, device, virtual_token_ids=virtual), shares)
    exact = recipe.numerics == "exact"
    attend = attend_for(batch, exact=exact)
    recomputing = attend_for(batch, exact=exact, recomputed_layers=range(len(model.config.layers)))
    dropout_state = None if adapters is None else adapters.build_context.dropout_state
    if dropout_state is not None and recipe.drops_out:  # masks are saved for the backward pass too
        dropout_state.begin(0, [(0, len(batch.tokens))])
    costs = recompute_planner.measure_layers(
        probe,
        batch.tokens,
        batch.positions,
        attend,
        DTYPES[recipe.activations],
        recomputing=recomputing,
        gathered=shares > 1,
    )
    if dropout_state is not None:
        dropout_state.end()
    if probe is not model:
        of_kind = dict(zip(model.config.kinds, costs, strict=True))
        costs = [replace(of_kind[layer], layer=index) for index, layer in enumerate(model.config.layers)]
    costs = [each for each in costs if str(each.layer) in model.layers]
    plan: list[LayerPlan] | RecipeError
    try:
        plan = recompute_choice.fastest_plan(costs, int(section.budget * 2**30), in_flight)
    except RecipeError as error:
        plan = error
    plans = ranks.world.all_gather_objects((ranks.pipeline.index, plan))
    if (problem := next((each for _, each in plans if isinstance(each, RecipeError)), None)) is not None:
        raise problem
    return next(each for stage, each in plans if stage == ranks.pipeline.index)
