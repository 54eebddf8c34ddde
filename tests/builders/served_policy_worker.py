"""The policy of a recipe on a stand-in for a rollout server, on one process or several."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from builders.parallel_steps import config_of
from builders.remote_engines import KINDS
from builders.rollout_servers import StandIn
from builders.rollout_worker import groups_of, placed_policy
from danlu.assembly.parallelize import Placed
from danlu.core.errors import DanluError
from danlu.inference.engine import RolloutEngine
from danlu.inference.request import Completion, Request, SamplingOptions
from danlu.models.loading import load as load_model
from danlu.parallel.ranks import Ranks
from danlu.recipe import Recipe, load
from danlu.stages.policy_logprobs import policy_logprobs
from danlu.stages.rollout import rollout_engine

REQUESTS = [
    Request(number, prompt, SamplingOptions(temperature=0), 5, samples=2) for number, prompt in ((4, (3, 9)), (1, (7,)))
]


@dataclass
class Served:
    """A policy with an engine over a server of its base."""

    recipe: Recipe
    placed: Placed
    engine: RolloutEngine
    stand_in: StandIn | None  # on the first process

    def gap(self, completions: list[Completion]) -> float:
        """The largest difference of the server's log-probabilities from the policy's, in nats."""
        prompts = {request.number: request.prompt for request in REQUESTS}
        rows = [(*prompts[each.number], *each.tokens) for each in completions]
        lengths = [len(prompts[each.number]) for each in completions]
        own = policy_logprobs(self.recipe, self.placed, rows, lengths, max_new_tokens=64)
        pairs = [
            pair for each, row in zip(completions, own, strict=True) for pair in zip(each.logprobs, row, strict=True)
        ]
        return max(abs(one - other) for one, other in pairs)

    @torch.no_grad()
    def train(self) -> None:
        """Changes what is trained: as much of it as this process has, each number by the same."""
        local = self.placed.parallel.local_parameters
        named = {name: each.local for name, each in local.items()} if local else dict(self.placed.parameters())
        adapters = self.placed.subject.adapters
        trained = named if adapters is None else adapters.tensors(adapters.active[-1])
        for name in trained.keys() & named.keys():  # of a pipeline's other stages nothing is here
            named[name].mul_(1.5).add_(0.02)
        self.placed.parallel.reshard()


@contextmanager
def served(file: str, ranks: Ranks | None = None, **faults: Any) -> Iterator[Served]:
    """The policy of a recipe, and a server with the weights that it starts from; faults: of the server."""
    ranks = ranks or Ranks()
    recipe = load(Path(file)).recipe
    stand_in: StandIn | None = None
    if ranks.leads:
        assert recipe.model.path is not None
        base = load_model(recipe.model.path)
        settings = {"context": config_of(recipe).context_length, "tokenizer": Path(recipe.model.path)}
        stand_in = KINDS[recipe.rollout.engine](base, faults=faults, **settings)
    (url, *_) = ranks.world.all_gather_bytes(b"" if stand_in is None else stand_in.url.encode())
    recipe = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"url": url.decode()})})
    engine: RolloutEngine | None = None
    try:
        placed = placed_policy(recipe, ranks)
        engine = rollout_engine(recipe, placed)
        yield Served(recipe, placed, engine, stand_in)
    finally:
        if engine is not None:
            engine.close()
        if stand_in is not None:
            stand_in.close()


def sampled_twice(file: str) -> dict[str, Any]:
    """On several processes: gaps after two updates, answers, and what a server that lacks a tensor ends in."""
    ranks = groups_of(load(Path(file)).recipe)
    seen: dict[str, Any] = {}
    with served(file, ranks) as policy:
        for version in (1, 2):
            policy.train()
            policy.engine.update(version)
            completions = policy.engine.generate(REQUESTS)
            seen[f"gap {version}"] = policy.gap(completions)
            seen[f"answers {version}"] = [
                (each.number, each.sample, each.tokens, each.versions) for each in completions
            ]
    with served(file, ranks, ignored=("lm_head.weight",)) as policy:
        policy.train()
        policy.engine.update(1)
        try:
            policy.engine.generate(REQUESTS)
        except DanluError as error:
            seen["error"] = f"{type(error).__name__}: {error}"
    return json.loads(json.dumps(seen))  # type: ignore[no-any-return]
