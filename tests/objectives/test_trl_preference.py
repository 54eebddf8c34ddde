"""Preference losses are those of TRL: loss, metrics and every gradient (`builders/trl_preference_vectors.py`)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.covering import fast
from builders.preference_samples import judged, pair, preference_learner, step_gradients
from builders.worst_errors import worst_relative_error
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file
from torch import Tensor

from danlu.core.types import Pack
from danlu.models.decoder import Decoder
from danlu.models.hf_layout import hf_tensors
from danlu.models.loading import load
from danlu.objectives.preference import preference_objective
from danlu.recipe.sections import Objective, PreferenceTerm

DATA = Path(__file__).parent / "data"
CONTENT = json.loads((DATA / "trl_preference.json").read_text())
CASES: dict[str, Any] = CONTENT["cases"]
TERM: TypeAdapter[PreferenceTerm] = TypeAdapter(Objective)
CLOSE = 1e-5


@dataclass(frozen=True)
class Vectors:
    """The models that TRL was given, as folders, and its gradients."""

    folder: Path
    tensors: dict[str, Tensor]

    def model(self, role: str) -> Decoder:
        return load(self.folder / role, dtype=torch.float64)  # so that what differs is the formula

    def gradients(self, case: str, model: Decoder) -> dict[str, Tensor]:
        return {
            tensor.parameters[0]: self.tensors[f"{case}/{tensor.name}"]
            for tensor in hf_tensors(model.config)
            if len(tensor.parts) == 1
        }


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Vectors:
    folder, tensors = tmp_path_factory.mktemp("trl"), load_file(DATA / "trl_preference.safetensors")
    for role in ("policy", "reference"):
        (folder / role).mkdir()
        weights = {name.split("/")[1]: value for name, value in tensors.items() if name.startswith(f"{role}/")}
        save_file(weights, folder / role / "model.safetensors")
        (folder / role / "config.json").write_text(json.dumps(CONTENT["config"]))
    return Vectors(folder, tensors)


def terms_of(case: str) -> list[PreferenceTerm]:
    return [TERM.validate_python(term) for term in CASES[case]["terms"]]


def items_of(case: str) -> list[Pack]:
    rows = CONTENT["rows"][CASES[case]["rows"]]
    return judged(rows) if "answer" in rows[0] else [pair(row) for row in rows]


def outcome(vectors: Vectors, terms: list[PreferenceTerm], items: list[Pack]) -> tuple[float, Any, dict[str, Tensor]]:
    policy, reference = vectors.model("policy"), vectors.model("reference")
    objective = preference_objective(terms, has_reference=True)
    step, gradients = step_gradients(
        preference_learner(policy, reference, objective, items, micro=4, dtype=torch.float64), items
    )
    return step.loss, step.metrics, gradients


@pytest.mark.parametrize("case", CASES)
def test_it_is_what_trl_makes_of_it(vectors: Vectors, case: str) -> None:
    wanted, items = CASES[case], items_of(case)
    loss, metrics, gradients = outcome(vectors, terms_of(case), items)
    assert loss == pytest.approx(wanted["loss"], rel=CLOSE)
    assert {name: metrics[name] for name in wanted["metrics"]} == pytest.approx(wanted["metrics"], rel=CLOSE, abs=1e-6)
    expected = vectors.gradients(case, vectors.model("policy"))
    assert len(gradients) == len(expected) == 21
    assert worst_relative_error(gradients, expected) < CLOSE


@pytest.mark.parametrize("case", fast(CASES, *list(CASES)[::3]))  # a control of the comparison, not of the cases
def test_another_beta_or_the_answers_the_other_way_round_are_seen(vectors: Vectors, case: str) -> None:
    wanted, items = CASES[case], items_of(case)
    expected = vectors.gradients(case, vectors.model("policy"))
    terms = [
        term.model_copy(update={"beta": 1.5 * term.beta} if hasattr(term, "beta") else {"weight": 1.5 * term.weight})
        for term in terms_of(case)
    ]
    for changed in (
        outcome(vectors, terms, items),
        outcome(vectors, terms_of(case), [_turned(item) if number == 1 else item for number, item in enumerate(items)]),
    ):
        assert changed[0] != pytest.approx(wanted["loss"], rel=100 * CLOSE)
        assert worst_relative_error(changed[2], expected) > 100 * CLOSE


def _turned(item: Pack) -> Pack:
    label = item.samples[0].facts["label"]
    label[1:] = 1 - label[1:]
    return item
