"""Policy gradients are those of TRL: loss, metrics and every gradient (`builders/trl_policy_vectors.py`)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.covering import fast
from builders.policy_samples import drawn
from builders.policy_steps import Seen, one_step
from builders.preference_samples import preference_learner
from builders.worst_errors import worst_relative_error
from safetensors.torch import load_file, save_file
from torch import Tensor

from danlu.core.types import Pack
from danlu.models.decoder import Decoder
from danlu.models.hf_layout import hf_tensors
from danlu.models.loading import load
from danlu.objectives.policy import PolicyGradient, PolicyGradientSettings
from danlu.objectives.policy_losses import ImportanceBounds

DATA = Path(__file__).parent / "data"
CONTENT = json.loads((DATA / "trl_policy.json").read_text())
CASES: dict[str, Any] = CONTENT["cases"]
CLOSE = 1e-5
OTHERWISE: dict[str, Any] = {
    "clip_high": 0.5,
    "clip_low": 0.5,
    "constant_tokens": 9,
    "dual_clip": None,
    "entropy": 0.0,
    "importance": None,
    "kl": 0.0,
    "kl_with_ratio": False,
    "loss": "clip",
    "normalise": "groups",
    "off_policy": None,
    "ratio": "token",
}
"""Another value of each setting that a case has: its gradient must tell."""


@dataclass(frozen=True)
class Vectors:
    """The models that TRL was given, as folders, and its gradients."""

    folder: Path
    tensors: dict[str, Tensor]

    def model(self, role: str) -> Decoder:
        return load(self.folder / role, dtype=torch.float64)  # so that what differs is the formula

    def gradients(self, case: str) -> dict[str, Tensor]:
        return {
            tensor.parameters[0]: self.tensors[f"{case}/{tensor.name}"]
            for tensor in hf_tensors(self.model("policy").config)
            if len(tensor.parts) == 1
        }


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Vectors:
    folder, tensors = tmp_path_factory.mktemp("trl"), load_file(DATA / "trl_policy.safetensors")
    for role in ("policy", "reference"):
        (folder / role).mkdir()
        weights = {name.split("/")[1]: value for name, value in tensors.items() if name.startswith(f"{role}/")}
        save_file(weights, folder / role / "model.safetensors")
        (folder / role / "config.json").write_text(json.dumps(CONTENT["config"]))
    return Vectors(folder, tensors)


def settings_of(values: Mapping[str, Any]) -> PolicyGradientSettings:
    given = dict(values)
    if given.get("importance"):
        given["importance"] = ImportanceBounds(**given["importance"])
    return PolicyGradientSettings(temperature=CONTENT["temperature"], **given)


def items() -> list[Pack]:
    return [
        drawn(number, answers[0]["prompt"], [{**answer, "reward": 0.0} for answer in answers])
        for number, answers in enumerate(CONTENT["groups"])
    ]


def outcome(vectors: Vectors, values: Mapping[str, Any], micro: int = 3) -> Seen:
    objective = PolicyGradient(settings_of(values), has_reference=True)
    learner = preference_learner(
        vectors.model("policy"), vectors.model("reference"), objective, items(), micro, dtype=torch.float64
    )
    return one_step(learner, items())


@pytest.mark.parametrize(
    ("case", "micro"),
    fast(itertools.product(CASES, [1, 3]), *zip(CASES, itertools.cycle([1, 3]), strict=False)),
)
def test_it_is_what_trl_makes_of_it(vectors: Vectors, case: str, micro: int) -> None:
    wanted = CASES[case]
    loss, metrics, gradients = outcome(vectors, wanted["settings"], micro)
    assert loss == pytest.approx(wanted["loss"], rel=CLOSE)
    assert {name: metrics[name] for name in wanted["metrics"]} == pytest.approx(wanted["metrics"], rel=CLOSE, abs=1e-6)
    expected = vectors.gradients(case)
    assert len(gradients) == len(expected) == 21
    assert worst_relative_error(gradients, expected) < CLOSE


@pytest.mark.parametrize(
    ("case", "changed"),
    [
        (case, name)
        for case, values in CASES.items()
        for name in {**values["settings"], "normalise": ""}
        if name != "single_update" and OTHERWISE[name] != values["settings"].get(name)
    ],
)
def test_another_value_of_any_setting_is_seen(vectors: Vectors, case: str, changed: str) -> None:
    wanted = CASES[case]
    settings = {**wanted["settings"], changed: OTHERWISE[changed]}
    _, _, gradients = outcome(vectors, settings)
    assert worst_relative_error(gradients, vectors.gradients(case)) > 100 * CLOSE


def test_every_loss_of_trl_is_there() -> None:
    by_trl = {case.replace(",", "").split()[0] for case in CASES}
    assert by_trl - {"gspo"} == {"grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo"}
    shown = {name for case in CASES.values() for name, value in case["metrics"].items() if value}
    assert shown == {"entropy", "kl/k3", "clip_low", "clip_high", "clip"}
