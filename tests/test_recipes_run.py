"""Each recipe that comes with danlu trains as it is, but for its size; transformers reads what it leaves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.digits import digits_folder
from builders.tiny_world import CONFIG, World, danlu, write_rows

from danlu.core.shipped_files import shipped_folder
from danlu.data.demo_data import conversations, pretraining_documents
from danlu.data.tokenizer import load_tokenizer
from danlu.demo import demo
from danlu.demo.demo_recipes import Size
from danlu.inference.load_model import load_chat_tokenizer
from danlu.models.attend import PackedAttention
from danlu.models.initialize import initialize
from danlu.models.loading import build, load
from danlu.models.presets import from_scratch
from danlu.models.saving import save
from danlu.recipe import library
from danlu.recipe.sections import Model
from danlu.study import runner
from danlu.study.plan import PlannedRun

PROMPT = "The fox lives in"
ANSWERS = ("chosen", "rejected")
SHORT_ANSWERS = ["rollout.samples=2", "rollout.max_new_tokens=8"]
SIZE = ["steps=4", "data.max_length=64", "data.cache=cache", "checkpoint.every=2"]


@pytest.fixture
def here(tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenising_here: None) -> Path:
    """The working directory, with every file that the recipes name."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_world.tokenizer, tmp_path / "tokenizer")
    for name in ("corpus.txt", "new-domain.txt", "general.txt", "held-out.txt"):
        documents = pretraining_documents(len(name), 120)
        (tmp_path / name).write_text("\n<|endoftext|>\n".join(documents), encoding="utf-8")
    (tmp_path / "instructions.json").write_text(json.dumps(list(conversations(0, 120))), encoding="utf-8")
    write_rows(tmp_path / "preferences.jsonl", list(pairs(60)))
    write_rows(tmp_path / "judged-answers.jsonl", list(judged_answers(60)))
    sums = [{"question": f"{n} and {n}", "answer": f"They are #### {2 * n}"} for n in range(20)]
    write_rows(tmp_path / "gsm8k_train.jsonl", sums)
    tokenizer = load_tokenizer("tokenizer")
    for seed, (name, width) in enumerate({"base-model": 32, "teacher-model": 64}.items()):
        config = {**CONFIG, "hidden_size": width}
        model = build(
            from_scratch(Model(config=config, tokenizer="tokenizer"), tokenizer.vocab_size, None, tokenizer.eos_id)
        )
        initialize(model, seed)
        save(model, tmp_path / name, tokenizer_from=tmp_path / "tokenizer")
    return tmp_path


def pairs(count: int) -> Iterator[dict[str, Any]]:
    """Right answers, each preferred to the answer to another question."""
    rows = [row["messages"] for row in conversations(0, count + 1)]
    for right, wrong in pairwise(rows):
        yield {
            "prompt": right[:-1],
            "chosen": right[-1:],
            "rejected": [{**wrong[-1], "content": f"No. {wrong[-1]['content']}"}],
        }


def judged_answers(count: int) -> Iterator[dict[str, Any]]:
    """Every second row of `pairs` with its right answer, the others with the wrong one."""
    for number, row in enumerate(pairs(count)):
        yield {
            "prompt": row["prompt"],
            "completion": row["rejected" if number % 2 else "chosen"],
            "label": number % 2 == 0,
        }


def logits(folder: Path, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of danlu and of transformers, [T, V] in float32."""
    from transformers import AutoModelForCausalLM

    ours = load(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor(tokens)
    with torch.no_grad():
        hidden = ours(ids, torch.arange(len(tokens)), PackedAttention((0, len(tokens))))
        return ours.logits(hidden), theirs(ids[None]).logits[0]


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("pretrain", ["batch.tokens=256", "evaluation.every=2", "evaluation.samples.max_new_tokens=8"]),
        ("sft", ["batch.sequences=2", "evaluation.every=2"]),
        ("continue", ["batch.tokens=256", "evaluation.every=2"]),
        ("dpo", ["batch.rows=4", "evaluation.every=2"]),
        ("kto", ["batch.rows=4", "evaluation.every=2"]),
        ("orpo", ["batch.rows=4", "evaluation.every=2"]),
        ("distill", ["batch.sequences=2", "evaluation.every=2"]),
        ("gkd", ["batch.sequences=2", "evaluation.every=2", "rollout.max_new_tokens=8"]),
        ("grpo", ["batch.prompts=4", "evaluation.every=2", "data.eval=4", *SHORT_ANSWERS]),
    ],
)
def test_a_shipped_recipe_trains(
    name: str, overrides: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    recipe = shipped_folder() / f"{name}.yaml"
    assert danlu("train", recipe, *SIZE, *overrides) == 0
    run = here / "runs" / name
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if "eval_loss" in line] == [2, 4]
    capsys.readouterr()
    assert danlu("generate", run, "--prompt", PROMPT, "--max-new-tokens", 8, "--temperature", 0) == 0
    assert capsys.readouterr().out.strip()

    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    tokens = tokenizer(PROMPT)["input_ids"]
    assert tokens == load_chat_tokenizer(run / "model").encode_prompt(PROMPT)
    assert tokenizer.decode(tokens) == PROMPT
    ours, theirs = logits(run / "model", tokens)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        torch.testing.assert_close(ours[:-1], theirs[1:], atol=1e-4, rtol=1e-4)


def test_the_recipe_of_an_adapter_trains(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = shipped_folder() / "lora.yaml"
    assert danlu("train", recipe, *SIZE, "batch.sequences=2", "evaluation.every=2", "quantization=nf4") == 0
    capsys.readouterr()
    assert danlu("generate", "runs/lora", "--prompt", PROMPT, "--max-new-tokens", 8, "--temperature", 0) == 0
    assert capsys.readouterr().out.strip()
    assert danlu("merge", "runs/lora", "merged") == 0
    tokens = load_tokenizer("tokenizer").encode(PROMPT)
    ours, theirs = logits(here / "merged", tokens)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_the_recipe_of_a_reward_model_trains(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    recipe = shipped_folder() / "reward.yaml"
    assert danlu("train", recipe, *SIZE, "batch.rows=4", "evaluation.every=2", "precision=fp32") == 0
    capsys.readouterr()
    command = ("eval", "runs/reward", "--data", "preferences.jsonl", "--json", "--scores", "scores.jsonl")
    assert danlu(*command) == 0
    scored = [json.loads(line) for line in Path("scores.jsonl").read_text().splitlines()]
    better = [line["margin"] > 0 for line in scored]
    assert json.loads(capsys.readouterr().out)["accuracy"] == pytest.approx(sum(better) / len(better))

    model = AutoModelForSequenceClassification.from_pretrained("runs/reward/model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained("runs/reward/model")
    compared = 0
    for row, line in zip(pairs(60), scored, strict=True):
        texts = [tokenizer.apply_chat_template(row["prompt"] + row[name], tokenize=False) for name in ANSWERS]
        tokens = [tokenizer(text, return_tensors="pt") for text in texts]
        if max(encoded["input_ids"].shape[1] for encoded in tokens) > 64:
            continue  # longer than the run's rows, so the prompt is shortened
        with torch.no_grad():
            scores = [model(**encoded).logits.item() for encoded in tokens]
        assert [line[name] for name in ANSWERS] == pytest.approx(scores, abs=2e-6)
        assert [line[name] for name in ANSWERS] != pytest.approx(scores[::-1], abs=2e-6)  # control: exchanged
        compared += 1
    assert compared >= 10


def test_the_recipe_of_ppo_trains_with_the_reward_model_of_another(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [*SIZE, "precision=fp32"]
    assert danlu("train", shipped_folder() / "reward.yaml", *small, "steps=2", "batch.rows=4") == 0
    recipe, own = shipped_folder() / "ppo.yaml", ["data.eval=4", "evaluation.every=2", *SHORT_ANSWERS]
    assert danlu("train", recipe, *small, "batch.prompts=4", *own) == 0
    lines = [json.loads(line) for line in (here / "runs/ppo/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert {"reward/model", "kl_in_reward", "value_loss", "explained_variance"} <= steps[0].keys()
    assert [line["ratio"] == 1 for line in steps] == [True, False, False, False]  # four updates of one rollout
    assert [line["step"] for line in lines if "eval_reward" in line] == [2, 4]
    tokens = load_tokenizer("tokenizer").encode(PROMPT)
    ours, theirs = logits(here / "runs/ppo/model", tokens)  # without the head of values
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_the_recipe_of_a_classifier_trains(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digits_folder(here / "mnist")
    recipe = shipped_folder() / "lenet_mnist.yaml"
    assert danlu("train", recipe, "batch.sequences=32", "epochs=2", "evaluation=16", "checkpoint.every=16") == 0
    capsys.readouterr()
    assert danlu("eval", "runs/lenet_mnist", "--data", "mnist", "--json") == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] > 0.9


class Ended:
    """A run of a study that was trained in this process."""

    def __init__(self, run: PlannedRun) -> None:
        run.log.touch()
        self.code = danlu("train", run.recipe_file)

    def wait(self, timeout: float | None = None) -> int:
        return self.code

    def send_signal(self, number: int) -> None:
        raise AssertionError("it has ended")


def test_the_rank_study_compares_ranks(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "launch", Ended)
    recipe, size = shipped_folder() / "rank_study.yaml", [*SIZE, "batch={sequences: 2, micro: 2}", "evaluation.every=2"]
    assert danlu("study", recipe, *size, "--vary", "adapter.rank=1,2") == 0
    headings, *rows = (
        [cell.strip() for cell in line.split("  ") if cell] for line in capsys.readouterr().out.splitlines()
    )
    shown = [dict(zip(headings, row, strict=False)) for row in rows[:2]]
    outputs_and_inputs = 2 * (64 + 2 * 48 + 64 + 3 * 96)  # of the seven matrices of each layer
    assert [(row["rank"], row["trained"]) for row in shown] == [
        (str(rank), f"{rank * outputs_and_inputs:,}") for rank in (1, 2)
    ]
    for rank in (1, 2):
        run = here / "runs" / "rank_study" / f"rank-{rank}"
        told = json.loads((run / "summary.json").read_text())
        assert told["trained_parameters"] == rank * outputs_and_inputs
        base = sum(parameter.numel() for parameter in load(here / "base-model").parameters())
        assert told["parameters"] == base + told["trained_parameters"]
        assert told["result"]["bytes"] >= 2 * told["trained_parameters"]
        assert told["evaluation"] is not None


@pytest.mark.slow
def test_the_recipe_of_a_chain_trains(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_data = Size(
        documents=120, conversations=120, worked_sums=60, bare_sums=60, grpo_steps=4, prompts=16, held_out_sums=8
    )
    demo.demo(here / "demo", size=small_data, log=lambda line: None, data_only=True)
    stages = ("pretrain", "sft", "reward", "ppo", "dpo", "grpo")
    small = ["pretrain.model.config.hidden_size=32", "pretrain.model.config.intermediate_size=64"]
    small += ["pretrain.batch.tokens=256", "data.max_length=128", "data.cache=cache", "data.workers=1"]
    small += [
        "steps=2",
        "sft.steps=1",
        "precision=fp32",
        "ppo.rollout.max_new_tokens=8",
        "grpo.rollout.max_new_tokens=8",
        "threads=1",
    ]
    recipe = shipped_folder() / "chain.yaml"
    assert danlu("train", recipe, *small) == 0
    for name, steps in zip(stages, (2, 1, 2, 2, 2, 2), strict=True):
        assert json.loads((here / "runs/chain" / name / "summary.json").read_text())["steps"] == steps
    said = capsys.readouterr().err
    assert [line.split()[0] for line in said[said.rindex("\nstage ") :].split("\n")[2:8]] == list(stages)
    begun_with = json.loads((here / "runs/chain/chain.json").read_text())
    assert [list(begun_with[name]) for name in ("dpo", "grpo")] == [["sft"], ["sft"]]
    lines = [json.loads(line) for line in (here / "runs/chain/ppo/metrics.jsonl").read_text().splitlines()]
    assert any("reward/model" in line for line in lines)
    assert danlu("train", recipe, *small) == 0
    assert capsys.readouterr().err.count("was finished already, after step") == len(stages)


def test_every_shipped_recipe_is_tried() -> None:
    tried = {case[0] for mark in test_a_shipped_recipe_trains.pytestmark for case in mark.args[1]}
    assert tried | {"chain", "lenet_mnist", "lora", "ppo", "rank_study", "reward"} == set(library.shipped())
