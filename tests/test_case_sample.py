"""The sample of a parametrized test's cases: every value of each parameter, and a third of their products."""

from __future__ import annotations

import itertools

from builders.case_sample import sample

PRODUCTS = [
    "-".join(values) for values in itertools.product(("dense", "experts"), ("none", "full", "selective"), "1234")
]


def values(ids: set[str]) -> list[set[str]]:
    return [set(column) for column in zip(*(case.split("-") for case in ids), strict=True)]


def test_every_value_of_each_parameter_occurs_in_a_third_of_the_products() -> None:
    chosen = sample(PRODUCTS)
    assert len(chosen) == len(PRODUCTS) / 3 and values(chosen) == values(set(PRODUCTS))
    assert values(set(PRODUCTS[: len(chosen)])) != values(set(PRODUCTS))  # the first third lacks some


def test_it_does_not_hang_on_the_order_of_the_cases() -> None:
    assert sample(PRODUCTS[::-1]) == sample(PRODUCTS)


def test_cases_with_names_of_their_own_all_stay() -> None:
    names = ["llama", "qwen2", "gemma2 window", "gemma2 softcap", "mixtral"]
    assert sample(names) == set(names)
