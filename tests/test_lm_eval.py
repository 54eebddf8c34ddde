"""A folder written by danlu runs under EleutherAI's lm-eval (`--model hf`) as it is, with danlu's log-likelihoods."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from danlu.models.attend import PackedAttention
from danlu.models.loading import load
from danlu.models.saving import save

TASK = Path(__file__).parent / "lm_eval_task"


@pytest.fixture(scope="module")
def lm_eval_python() -> str:
    """A Python that has lm_eval: DANLU_LM_EVAL_PYTHON, or this one."""
    given = os.environ.get("DANLU_LM_EVAL_PYTHON")
    if given is None and importlib.util.find_spec("lm_eval") is None:
        pytest.skip("lm_eval is not installed here: set DANLU_LM_EVAL_PYTHON to a Python that has it")
    return given or sys.executable


@pytest.fixture(scope="module")
def exported(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, folder = shared_data / "weights" / "stories260K-hf", tmp_path_factory.mktemp("export") / "model"
    save(load(source), folder, tokenizer_from=source)
    return folder


def run_lm_eval(python: str, folder: Path, out: Path) -> tuple[dict, list[dict]]:
    """Results and per-question samples of the local task."""
    command = [
        python, "-m", "lm_eval", "--model", "hf",
        "--model_args", f"pretrained={folder},dtype=float32,add_bos_token=True",
        "--tasks", "danlu_stories", "--include_path", str(TASK),
        "--device", "cpu", "--batch_size", "4", "--output_path", str(out), "--log_samples",
    ]  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(out / "hf"), "OMP_NUM_THREADS": "1"}
    # The checkout's own packages must not shadow those of the other Python.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | offline
    done = subprocess.run(command, cwd=TASK, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    (results,) = out.rglob("results_*.json")
    (samples,) = out.rglob("samples_danlu_stories_*.jsonl")
    lines = samples.read_text(encoding="utf-8").splitlines()
    return json.loads(results.read_text(encoding="utf-8")), [json.loads(line) for line in lines]


@pytest.mark.slow
def test_lm_eval_scores_the_exported_folder_as_danlu_does(lm_eval_python: str, exported: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    results, samples = run_lm_eval(lm_eval_python, exported, tmp_path)
    model, tokenizer = load(exported), AutoTokenizer.from_pretrained(exported)
    correct = 0
    rows = [json.loads(line) for line in (TASK / "stories.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(samples) == len(rows)
    for sample in samples:
        row = rows[sample["doc_id"]]
        context = tokenizer(row["beginning"])["input_ids"]
        ours = [
            loglikelihood(model, context, tokenizer(f"{row['beginning']} {e}")["input_ids"]) for e in row["endings"]
        ]
        theirs = [float(response[0][0]) for response in sample["resps"]]
        assert theirs == pytest.approx(ours, abs=2e-3)
        assert theirs != pytest.approx(ours[::-1], abs=2e-3)  # control: the endings are told apart
        correct += ours.index(max(ours)) == row["answer"]
    assert results["results"]["danlu_stories"]["acc,none"] == pytest.approx(correct / len(rows))
    assert correct / len(rows) > 1 / 3


def loglikelihood(model: torch.nn.Module, context: list[int], whole: list[int]) -> float:
    """Log-probability, in nats, of the tokens after `context`."""
    tokens = torch.tensor(whole)
    with torch.no_grad():
        hidden = model(tokens, torch.arange(len(whole)), PackedAttention((0, len(whole))))
        logprobs = model.logits(hidden).log_softmax(-1)
    targets = tokens[len(context) :]
    return logprobs[len(context) - 1 : -1].gather(1, targets[:, None]).sum().item()
