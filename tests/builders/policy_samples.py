"""Answers that were drawn and scored, as trees of tokens: what policy gradients are of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from danlu.core.types import Branch, Pack, Sample

NAN = float("nan")


def drawn(group: int, prompt: Sequence[int], answers: Sequence[Mapping[str, Any]]) -> Pack:
    """A prompt and its answers, each of `tokens`, columns (lists, or numbers that are repeated) and facts (`reward`).

    What an answer does not say: weights of 1, no truncation, fresh, an advantage of its reward, log-probabilities of
    -1, a value and a return of 0.
    """
    tokens, branches = list(prompt), [Branch(-1, 0, len(prompt))]
    defaults = {"weights": 1.0, "sampled": -1.0, "old": -1.0, "value_old": 0.0, "return": 0.0}
    columns = {name: [0.0] * len(prompt) for name in (*defaults, "advantage")}
    facts: dict[str, list[float]] = {name: [NAN] for name in ("group", "reward", "length", "truncated", "fresh")}
    facts |= {name: [NAN] for answer in answers for name in answer if name.startswith("reward/")}
    for answer in answers:
        count = len(answer["tokens"])
        branches.append(Branch(0, len(tokens), len(tokens) + count))
        tokens += answer["tokens"]
        given = {"advantage": answer["reward"], **defaults, **answer}
        for name, values in columns.items():
            values += given[name] if isinstance(given[name], list) else [given[name]] * count
        known = {"group": group, "length": count, "truncated": 0, "fresh": 1, **answer}
        for name, of_branches in facts.items():
            of_branches.append(float(known.get(name, NAN)))
    weights = np.array(columns.pop("weights"), np.float32)
    sample = Sample(
        np.array(tokens, np.int32),
        weights,
        f"prompts.jsonl:{group}",
        branches=tuple(branches),
        columns={name: np.array(values, np.float32) for name, values in columns.items()},
        facts={name: np.array(values, np.float32) for name, values in facts.items()},
    )
    return Pack((sample,))


def random_items(count: int, vocabulary: int, *, support: int = 0, seed: int = 0) -> list[Pack]:
    """Prompts with one to four answers: some are masked in part or whole, some have no reward, some are not fresh.

    The two last ones have the same tokens as the first. support: the most ids that filters have left of a token; every
    third token was not filtered.
    """
    items = [
        _random_item(number, vocabulary, support, np.random.default_rng([seed, number])) for number in range(count)
    ]
    for number in (count - 2, count - 1):
        items[number] = _random_item(number, vocabulary, support, np.random.default_rng([seed, 0]))
    return items


def _random_item(number: int, vocabulary: int, support: int, random: np.random.Generator) -> Pack:
    def tokens(low: int, high: int) -> list[int]:
        return random.integers(0, vocabulary, random.integers(low, high)).tolist()

    answers: list[dict[str, Any]] = []
    for place in range(random.integers(1, 5)):
        drawn_tokens = tokens(1, 8)
        count = len(drawn_tokens)
        old = random.uniform(-5, -2, count)
        answers.append(
            {
                "tokens": drawn_tokens,
                "old": old.tolist(),
                "sampled": (old + random.normal(0, 0.4, count)).tolist(),
                "advantage": random.normal(0, 1.5, count).tolist(),
                "value_old": random.normal(0, 0.3, count).tolist(),
                "return": random.normal(0.5, 1, count).tolist(),
                "weights": random.choice([1.0, 1.0, 1.0, 0.0], count).tolist() if place != 2 else 0.0,
                "reward": NAN if place == 1 else float(random.normal()),
                "reward/math": NAN if place == 1 else float(random.integers(0, 2)),
                "truncated": float(place == 2),
                "fresh": float(number % 3 > 0),
            }
        )
    pack = drawn(number, tokens(1, 5), answers)
    if support:
        sample = pack.samples[0]
        ids = random.integers(0, vocabulary, (len(sample.tokens), support)).astype(np.int32)
        ids[random.random(ids.shape) < 0.3] = -1
        ids[::3] = -1
        sample.columns["support"] = ids  # type: ignore[index]  # a dict
    return pack
