"""Which runs `--vary` and `--seeds` make, and what is refused."""

from __future__ import annotations

import pytest

from danlu.core.errors import RecipeError
from danlu.recipe.parameter_grid import parameter_grid, parse_vary_options


def combinations(*vary: str, seeds: str | None = None) -> dict[str, list[str]]:
    return {one.name: one.overrides for one in parameter_grid(parse_vary_options(vary, seeds))}


def test_every_combination_with_a_name_of_its_own() -> None:
    assert combinations("adapter.rank=4,8", "optimizer.learning_rate=1e-4, 2e-4", seeds="0,1") == {
        f"rank-{rank}_learning_rate-{rate}_seed-{seed}": [
            f"adapter.rank={rank}", f"optimizer.learning_rate={rate}", f"seed={seed}",
        ]
        for rank in ("4", "8") for rate in ("1e-4", "2e-4") for seed in ("0", "1")
    }  # fmt: skip


def test_keys_that_end_alike_are_named_in_full() -> None:
    assert list(combinations("optimizer.kind=lion", "schedule.kind=wsd", "seed=3")) == [
        "optimizer.kind-lion_schedule.kind-wsd_seed-3"
    ]


def test_commas_inside_brackets_and_quotes_belong_to_the_value() -> None:
    (one,) = parse_vary_options(["data.train=[a.json,b.json],{path: c.json, rows: 5},'d,e.json',f"], None)
    assert one.values == ("[a.json,b.json]", "{path: c.json, rows: 5}", "'d,e.json'", "f")


def test_values_that_no_folder_can_be_called_are_told_apart() -> None:
    names = list(combinations("model=a/b,a-b,a:b,../..,模型"))
    assert names[1] == "model-a-b"
    assert len(set(names)) == 5 and all(set(name) <= set("abcdefmol-.0123456789") for name in names)
    assert [name.rpartition("-")[0] for name in names] == ["model-a-b", "model-a", "model-a-b", "model-..-..", "model"]
    (long,) = combinations(f"model={'x' * 300}")
    assert len(long) < 60
    assert names == list(combinations("model=a/b,a-b,a:b,../..,模型"))  # and the same tomorrow


@pytest.mark.parametrize(
    ("vary", "seeds", "said"),
    [
        ([], None, ["nothing varies: say what does, for example --vary adapter.rank=4,8,16, or --seeds 0,1,2"]),
        (["adapter.rank"], None, ["--vary 'adapter.rank': write a key and its values, for example --vary a"]),
        (["=4"], None, ["--vary '=4': write a key"]),
        (["a=4,,8"], None, ["--vary 'a=4,,8': write a key"]),
        ([], "", ["--seeds '': write a key"]),
        (["a=4,8,4"], None, ["--vary 'a=4,8,4': 4 is given twice"]),
        (["output=a,b"], None, ["--vary 'output=a,b': every run has a folder of its own"]),
        (["seed=1,2"], "0,1", ["--vary 'seed=1,2' and --seeds '0,1': both vary seed. Give its values in one"]),
        (["a=1,1", "b"], None, ["'a=1,1': 1 is given twice", "--vary 'b': write"]),
    ],
)  # fmt: skip
def test_what_cannot_be_meant(vary: list[str], seeds: str | None, said: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_vary_options(vary, seeds)
    assert len(caught.value.problems) == len(said)
    assert all(part in problem for part, problem in zip(said, caught.value.problems, strict=True))
