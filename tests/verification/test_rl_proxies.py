"""Made rollouts that stage rl is verified with: what its objectives read is there, and a layout computes the same."""

from __future__ import annotations

import numpy as np
import pytest
from builders.faults import injected
from builders.tiny_world import CONFIG, tiny_world, write_rows

from danlu.recipe import load
from danlu.verification.synthetic_rollouts import synthetic_rollouts
from danlu.verification.verification import Options, verify

RECIPE = """
stage: {stage}
model: {{config: {{model_type: llama}}, tokenizer: {tokenizer}}}
data: {{train: {rows}, prompt: "{{question}}"}}
rewards: [{{kind: exact, column: answer}}]
rollout: {{samples: 3, max_new_tokens: 8{filters}}}
batch: {{prompts: 4}}
{more}output: run
"""


def recipe(tmp_path, stage="grpo", filters="", more=""):
    file = tmp_path / "rl.yaml"
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1 + 1", "answer": "2"}\n')
    file.write_text(RECIPE.format(rows=rows, tokenizer=tmp_path, stage=stage, filters=filters, more=more))
    return load(file).recipe


@pytest.mark.parametrize(
    ("stage", "filters", "columns"),
    [
        ("grpo", "", {"sampled", "old", "advantage"}),
        ("grpo", ", top_p: 0.9", {"sampled", "old", "advantage", "support"}),
        ("ppo", "", {"sampled", "old", "advantage", "value_old", "return"}),
    ],
)
def test_made_rollouts_have_what_the_stage_reads(tmp_path, stage, filters, columns):
    items = synthetic_rollouts(recipe(tmp_path, stage, filters), 5, max_length=24, vocab_size=50)
    for number, item in enumerate(items):
        (sample,) = item.samples
        assert sample.columns.keys() == columns and len(sample.branches) == 4
        assert {"reward", "reward/exact", "group", "length", "truncated", "fresh"} == sample.facts.keys()
        assert sample.facts["group"][1:].tolist() == [number] * 3 and np.isnan(sample.facts["group"][0])
        assert all(stop - start + sample.branches[0].stop <= 24 for _, start, stop in sample.branches[1:])
        if "support" in columns:
            assert (sample.columns["support"] == sample.tokens[:, None]).any(1).all()
    again = synthetic_rollouts(recipe(tmp_path, stage, filters), 5, max_length=24, vocab_size=50)
    assert np.array_equal(items[3].samples[0].tokens, again[3].samples[0].tokens)
    assert not np.array_equal(items[3].samples[0].tokens[:5], items[4].samples[0].tokens[:5])


@pytest.mark.distributed
@pytest.mark.parametrize("stage", ["grpo", pytest.param("ppo", marks=pytest.mark.slow)])
def test_stages_of_a_pipeline_compute_the_same_policy_gradient(tmp_path, stage):
    config = {**CONFIG, "num_hidden_layers": 4}
    rows = write_rows(tmp_path / "rows.jsonl", [{"question": "1 + 1", "answer": "2"}])
    values = {
        "stage": stage,
        "model": {"config": config},
        "data": {"train": str(rows), "prompt": "{question}"},
        "rewards": [{"kind": "exact", "column": "answer"}],
        "rollout": {"samples": 3, "max_new_tokens": 8},
        "batch": None,
        "parallel": {"pipeline": {"stages": 2, "schedule": "zbv"}},
    }
    if stage == "grpo":
        values["objective"] = {"kl": {"coefficient": 0.1}}
    own = load(tiny_world().recipe(tmp_path / "run", tmp_path / "recipe.yaml", **values)).recipe
    found, _ = verify("recipe.yaml", own, Options(steps=1))
    assert found.finding is None and all(check.holds for check in found.checks)
    broken, _ = verify("recipe.yaml", own, Options(steps=1, fault=injected("norm-of-one-stage")))
    assert broken.finding is not None  # control
