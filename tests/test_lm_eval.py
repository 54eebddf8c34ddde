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

from danlu.cli.main import main
from danlu.models.attend import PackedAttention
from danlu.models.loading import load
from danlu.models.saving import save

TASKS = Path(__file__).parent / "lm_eval_task"


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


def run_lm_eval(python: str, task: str, model: str, out: Path) -> tuple[dict, list[dict]]:
    """Metrics and per-question samples of a local task; `model` is what follows `--model_args`."""
    command = [
        python, "-m", "lm_eval", "--model", "hf", "--model_args", model,
        "--tasks", task, "--include_path", str(TASKS),
        "--device", "cpu", "--batch_size", "4", "--output_path", str(out), "--log_samples",
    ]  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(out / "hf"), "OMP_NUM_THREADS": "1"}
    # The checkout's own packages must not shadow those of the other Python.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | offline
    done = subprocess.run(command, cwd=TASKS, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    (results,) = out.rglob("results_*.json")
    (samples,) = out.rglob(f"samples_{task}_*.jsonl")
    lines = samples.read_text(encoding="utf-8").splitlines()
    metrics = json.loads(results.read_text(encoding="utf-8"))["results"][task]
    return metrics, [json.loads(line) for line in lines]


@pytest.mark.slow
def test_multiple_choice_is_scored_as_danlu_scores_it(lm_eval_python: str, exported: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    metrics, samples = run_lm_eval(lm_eval_python, "danlu_stories", f"pretrained={exported},dtype=float32", tmp_path)
    model, tokenizer = load(exported), AutoTokenizer.from_pretrained(exported)
    correct = 0
    rows = [json.loads(line) for line in (TASKS / "stories.jsonl").read_text(encoding="utf-8").splitlines()]
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
    assert metrics["acc,none"] == pytest.approx(correct / len(rows))
    assert correct / len(rows) > 1 / 3


@pytest.mark.slow
def test_bits_per_byte_are_those_of_danlu_eval(
    lm_eval_python: str, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # lm-eval itself puts the beginning-of-text token before a document; the tokenizer must not put another.
    # It counts the tokens that go into the model, danlu those of the piece, whose last one is a target only.
    # The long document has 2 x 228 tokens: a last piece that is not full would get more context from lm-eval.
    settings = f"pretrained={exported},dtype=float32,add_bos_token=False,max_length=228"
    metrics, _ = run_lm_eval(lm_eval_python, "danlu_text", settings, tmp_path)

    def ours(length: int) -> float:
        options = [f"data.max_length={length}", f"data.cache={tmp_path / 'cache'}"]
        assert main(["eval", str(exported), "--data", str(TASKS / "text.jsonl"), "--json", *options]) == 0
        row = json.loads(capsys.readouterr().out)
        assert row["shortened"] == {"split": 1}
        return float(row["bits_per_byte"])

    assert metrics["bits_per_byte,none"] == pytest.approx(ours(229), abs=1e-5)
    assert metrics["bits_per_byte,none"] != pytest.approx(ours(228), abs=1e-5)  # control: where it is cut matters


def loglikelihood(model: torch.nn.Module, context: list[int], whole: list[int]) -> float:
    """Log-probability, in nats, of the tokens after `context`."""
    tokens = torch.tensor(whole)
    with torch.no_grad():
        hidden = model(tokens, torch.arange(len(whole)), PackedAttention((0, len(whole))))
        logprobs = model.logits(hidden).log_softmax(-1)
    targets = tokens[len(context) :]
    return logprobs[len(context) - 1 : -1].gather(1, targets[:, None]).sum().item()
