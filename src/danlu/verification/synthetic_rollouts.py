"""Made rollouts for a verification of stage rl: prompts with answers of random tokens; a function of a seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from danlu.core.types import ROUTES, Pack
from danlu.inference.recorded_routes import NO_ROUTE
from danlu.inference.request import Completion
from danlu.models.config import ModelConfig
from danlu.models.layer_spec import Experts
from danlu.recipe import Recipe
from danlu.recipe.policy_scores import trains_on_pairs
from danlu.rl.answer_pairs import with_pair
from danlu.rl.estimators import RETURN, VALUE_OLD
from danlu.rl.experience_trees import ADVANTAGE, OLD, SUPPORT, answer_tree, with_columns
from danlu.stages.policy_objective import estimator_of
from danlu.stages.rollout import leaves_tokens_out

SHORTEST = 3  # tokens of a prompt
MOST_SAMPLES = 4  # answers to a prompt
SUPPORT_SIZE = 8  # tokens that filters leave


def synthetic_rollouts(recipe: Recipe, count: int, *, max_length: int, vocab_size: int) -> list[Pack]:
    """Makes `count` items with the columns and facts that stage rl trains on; a prompt with an answer has at most
    `max_length` tokens.

    Log-probabilities, advantages, values and rewards are drawn, so that ratios are clipped on both sides. The policy
    that drew is not the one that is trained: each answer is of a rollout that was trained on before.
    """
    samples = max(2, min(recipe.rollout.samples, MOST_SAMPLES))
    parts = [f"reward/{name}" for name in recipe.reward_weights]
    items = []
    for number in range(count):
        random = np.random.default_rng([recipe.seed, number])
        room = max(4 * SHORTEST, max_length)
        prompt = random.integers(0, vocab_size, int(random.integers(SHORTEST, room // 2))).tolist()
        completions = []
        for sample in range(samples):
            tokens = random.integers(0, vocab_size, int(random.integers(1, room - len(prompt) + 1))).tolist()
            drawn = random.normal(-np.log(vocab_size), 0.3, len(tokens)).tolist()
            completions.append(Completion(number, sample, tokens, drawn, drawn, None, [0] * len(tokens), "", "stop"))
        facts = {name: random.random(samples).tolist() for name in ("reward", *parts)}
        facts |= {
            "group": [float(number)] * samples,
            "length": [float(len(completion.tokens)) for completion in completions],
            "truncated": [0.0] * samples,
            "fresh": [0.0] * samples,
        }
        item = answer_tree(prompt, completions, f"synthetic prompt {number}", facts)
        item = with_columns(item, _columns(recipe, item, random, vocab_size))
        items.append(with_pair(item, (1, 0)) if trains_on_pairs(recipe) else item)
    return items


def with_synthetic_routes(items: Sequence[Pack], config: ModelConfig, seed: int) -> list[Pack]:
    """Adds the column `ROUTES`, [S, L, k] int16: drawn experts, so that hardly a token goes where its router would send
    it. The last token of each branch has none, for no engine ever read it.

    config: of a model with experts in its layers.
    """
    feeds = [layer.feed for layer in config.layers if isinstance(layer.feed, Experts)]
    shape = len(feeds), max(feed.top_k for feed in feeds)
    with_routes = []
    for number, item in enumerate(items):
        random = np.random.default_rng([seed, number, 1])
        (sample,) = item.samples
        routes = np.full((len(sample.tokens), *shape), NO_ROUTE, np.int16)
        for layer, feed in enumerate(feeds):
            order = random.random((len(routes), feed.num_experts)).argsort(1)
            routes[:, layer, : feed.top_k] = order[:, : feed.top_k]
        routes[[branch.stop - 1 for branch in sample.branches]] = NO_ROUTE
        with_routes.append(with_columns(item, {ROUTES: routes}))
    return with_routes


def _columns(recipe: Recipe, item: Pack, random: np.random.Generator, vocab_size: int) -> dict[str, np.ndarray]:
    (sample,) = item.samples
    tokens = len(sample.tokens)
    names = [OLD, *estimator_of(recipe).columns]
    scales = {OLD: (-np.log(vocab_size), 0.3), ADVANTAGE: (0.0, 1.0), VALUE_OLD: (0.0, 0.3), RETURN: (0.5, 0.5)}
    columns: dict[str, np.ndarray] = {name: random.normal(*scales[name], tokens).astype(np.float32) for name in names}
    if leaves_tokens_out(recipe.rollout):
        support = random.integers(0, vocab_size, (tokens, SUPPORT_SIZE)).astype(np.int32)
        support[:, 0] = sample.tokens  # what was drawn is among what was left
        columns[SUPPORT] = support
    return columns
