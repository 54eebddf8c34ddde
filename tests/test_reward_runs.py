"""Stage reward from end to end: layouts, adapters, resumption, and what transformers and PEFT make of the result."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.pair_stage import trained_tensors
from builders.process_group import run_group
from builders.reward_stage import RewardRows, train
from builders.tiny_run import tiny_model
from builders.tiny_world import CONFIG, World, write_rows
from builders.worst_errors import worst_relative_error
from torch import Tensor

from danlu.assembly.merging import merge
from danlu.cli.main import main
from danlu.core.errors import DataError, ModelError, RecipeError
from danlu.core.types import Pack
from danlu.inference.load_model import load_chat_tokenizer, load_model
from danlu.inference.quantization_choice import quantization_section
from danlu.inference.resolve_model import resolve_model
from danlu.models.saving import save
from danlu.recipe import load
from danlu.run import train as run
from danlu.stages.scoring import scored_rows, scoring_learner
from danlu.training.checkpoints.loading import read_group

pytestmark = pytest.mark.usefixtures("module_tokenises_here")

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {}),
    "zero3": (2, {"shard": "zero3"}),
    "tensor": (2, {"tensor": 2}),
    "sequence": (2, {"tensor": 2, "sequence": True}),
    "context": (2, {"context": 2}),
    "pipeline": (2, {"pipeline": 2}),
}
CLOSE = 1e-5
STEPWISE = {"objective": {"kind": "stepwise"}}


def recipe(world: World, folder: Path, name: str, parallel: Mapping[str, Any] | None = None, **changes: Any) -> str:
    values: dict[str, Any] = {
        "stage": "reward",
        "objective": {"kind": "bradley-terry", "centring": 0.01},
        "steps": 4,
        "batch": {"sequences": None, "rows": 6, "micro": 1},
        "data": {"eval": 5},
        "evaluation": {"every": 2},
        "checkpoint": {"every": 2},
        **changes,
    }
    return str(world.recipe(folder / name, folder / f"{name}.yaml", parallel=dict(parallel or {}), **values))


@pytest.fixture(scope="module")
def outcome(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outcome")
    assert train([recipe(tiny_world, folder, "run")]) == [0]
    return folder / "run"


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    named = ("loss", "accuracy", "margin", "eval_loss", "eval_accuracy", "eval_margin")
    return [line[name] for line in lines for name in named if name in line]


def our_scores(path: Path, items: Sequence[Pack]) -> Tensor:
    """What `danlu eval` says of the branches of rows, one after the other."""
    resolved = resolve_model(str(path), may_classify=True)
    tokenizer = load_chat_tokenizer(resolved.tokenizer_folder, model=resolved.folder)
    loaded = load_model(resolved, tokenizer, precision="fp32", quantization=quantization_section(None, resolved))
    rows = scored_rows(scoring_learner(loaded), items)
    return torch.cat([torch.from_numpy(row.scores) for row in rows])


def paths(items: Sequence[Pack]) -> list[list[int]]:
    """The tokens from the root to the end of each branch, of all rows."""
    found = []
    for pack in items:
        (sample,) = pack.samples
        whole: list[list[int]] = []
        for parent, start, stop in sample.branches:
            whole.append([*(whole[parent] if parent >= 0 else []), *sample.tokens[start:stop].tolist()])
        found += whole
    return found


def padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """(ids, attention mask) [rows, longest], padded on the right as transformers' tokenizers pad."""
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows])
    return ids, torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])


def theirs(model: Any, rows: Sequence[Sequence[int]]) -> Tensor:
    """transformers' scores [rows] on one padded batch."""
    ids, mask = padded(rows, model.config.pad_token_id)
    with torch.no_grad():
        scores: Tensor = model.eval()(input_ids=ids, attention_mask=mask).logits.squeeze(-1)
    return scores


ITEMS = [RewardRows().at(2000 + number) for number in range(6)]
STEP_ITEMS = [RewardRows(steps=True).at(2000 + number) for number in range(6)]


def close(ours: Tensor, expected: Tensor) -> bool:
    return ours.shape == expected.shape and bool(torch.allclose(ours, expected, rtol=CLOSE, atol=CLOSE))


def test_the_head_is_trained_and_saved_beside_a_model_without_a_head_over_the_vocabulary(outcome: Path) -> None:
    tensors = trained_tensors(outcome)
    assert tensors["objective.score.weight"].shape == (1, 32) and "lm_head.weight" not in tensors
    config = json.loads((outcome / "model" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"] and config["id2label"] == {"0": "LABEL_0"}
    assert not (outcome / "model" / "generation_config.json").exists()
    first = read_group(min((outcome / "checkpoints").glob("step-*")), "model")
    assert not torch.equal(first["objective.score.weight"], tensors["objective.score.weight"])


def test_transformers_scores_a_padded_batch_as_danlu_does(outcome: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model, loading = AutoModelForSequenceClassification.from_pretrained(outcome / "model", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    ours = our_scores(outcome, ITEMS)
    assert close(ours, theirs(model, paths(ITEMS)))
    tokenizer = AutoTokenizer.from_pretrained(outcome / "model")
    assert tokenizer.pad_token_id == model.config.pad_token_id != tokenizer.eos_token_id
    # Control: answers that end with the token that pads are scored one token earlier.
    ends = [[*path[:-1], 2] for path in paths(ITEMS)]
    right = theirs(model, ends)
    model.config.pad_token_id = 2
    assert not close(theirs(model, ends), right)


def test_a_process_reward_model_is_a_token_classifier(tiny_world: World, tmp_path: Path) -> None:
    from transformers import AutoModelForTokenClassification

    assert train([recipe(tiny_world, tmp_path, "run", **STEPWISE)]) == [0]
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "run" / "model").eval()
    rows = paths(STEP_ITEMS)
    ids, mask = padded(rows, model.config.pad_token_id)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits  # [rows, S, 2]
    lasts = torch.tensor([len(row) - 1 for row in rows])
    ours = our_scores(tmp_path / "run", STEP_ITEMS)
    assert ours.shape[1] == 2 and close(ours, logits[torch.arange(len(rows)), lasts])
    assert not close(ours, logits[torch.arange(len(rows)), lasts - 1])


def test_micro_batches_change_nothing(tiny_world: World, tmp_path: Path, outcome: Path) -> None:
    assert train([recipe(tiny_world, tmp_path, "run", batch={"rows": 6, "micro": 8, "sequences": None})]) == [0]
    assert losses(tmp_path / "run") == pytest.approx(losses(outcome), rel=1e-5)
    assert worst_relative_error(trained_tensors(tmp_path / "run"), trained_tensors(outcome)) < 2e-5


def test_it_goes_on_where_it_stopped(tiny_world: World, tmp_path: Path, outcome: Path) -> None:
    shutil.copytree(outcome, tmp_path / "run")
    shutil.rmtree(max((tmp_path / "run" / "checkpoints").glob("step-*")))
    shutil.rmtree(tmp_path / "run" / "model")
    assert train([recipe(tiny_world, tmp_path, "run")]) == [0]
    resumed, uninterrupted = trained_tensors(tmp_path / "run"), trained_tensors(outcome)
    assert resumed.keys() == uninterrupted.keys()
    assert [name for name, tensor in uninterrupted.items() if not torch.equal(tensor, resumed[name])] == []


def test_a_reward_model_is_trained_on_from_its_own_head(tiny_world: World, tmp_path: Path, outcome: Path) -> None:
    model = {"path": str(outcome / "model"), "tokenizer": None, "config": None}
    still = {"optimizer": {"learning_rate": 1e-12}, "steps": 1, "schedule": {"warmup": 0}}
    assert train([recipe(tiny_world, tmp_path, "run", model=model, **still)]) == [0]
    assert close(our_scores(tmp_path / "run", ITEMS), our_scores(outcome, ITEMS))
    with pytest.raises(RecipeError, match="score head of .* without a bias, and this objective's is .2, 32. with one"):
        train([recipe(tiny_world, tmp_path, "steps", model=model, **still, **STEPWISE)])
    with pytest.raises(RecipeError, match="stage sft trains a model for causal-lm"):
        run.train(load(tiny_world.recipe(tmp_path / "sft", model=model)), log=lambda line: None)


def test_it_writes_no_text(outcome: Path) -> None:
    with pytest.raises(ModelError, match="a reward model .* it scores answers, and has no head over the vocabulary"):
        resolve_model(str(outcome))


def test_a_file_is_scored(outcome: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"prompt": "How do you do?", "chosen": " Well, thank you.", "rejected": " No."},
        {"prompt": "And then?", "chosen": " We went home.", "rejected": " Then we did not go anywhere at all."},
    ]
    pairs = write_rows(tmp_path / "pairs.jsonl", rows)
    alone = write_rows(
        tmp_path / "alone.jsonl", [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
    )
    settings = [f"data.cache={tmp_path / 'cache'}", "data.workers=1"]
    scored = tmp_path / "scores.jsonl"

    def evaluated(data: Path, *flags: str) -> dict[str, Any]:
        assert main(["eval", str(outcome), "--data", str(data), "--json", *flags, *settings]) == 0
        values: dict[str, Any] = json.loads(capsys.readouterr().out)
        return values

    means = evaluated(pairs, "--scores", str(scored))
    lines = [json.loads(line) for line in scored.read_text().splitlines()]
    assert [line["row"] for line in lines] == ["pairs.jsonl:1", "pairs.jsonl:2"]
    margins = [line["chosen"] - line["rejected"] for line in lines]
    assert means["accuracy"] == sum(margin > 0 for margin in margins) / 2
    assert means["margin"] == pytest.approx(sum(margins) / 2)
    assert means["chosen_score"] == pytest.approx(sum(line["chosen"] for line in lines) / 2)
    # The same answers by themselves have the same scores.
    assert evaluated(alone)["score"] == pytest.approx(means["chosen_score"], rel=1e-5)
    assert main(["eval", str(outcome), "--data", str(pairs), "--scores", str(scored), *settings]) != 0
    assert "is there already" in capsys.readouterr().err
    steps = write_rows(tmp_path / "steps.jsonl", [{"prompt": "1 + 1?", "completions": ["It is 2."], "labels": [True]}])
    assert main(["eval", str(outcome), "--data", str(steps), *settings]) != 0
    assert "scores whole answers, and these rows are steps" in capsys.readouterr().err


def test_steps_are_scored(tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = {"prompt": "1 + 1 + 1?", "completions": ["1 + 1 is 2.", "2 + 1 is 4."], "labels": [True, False]}
    rows = write_rows(tmp_path / "steps.jsonl", [steps, {**steps, "labels": [True, True]}])
    settings = {"data": {"train": str(rows), "cache": str(tmp_path / "cache"), "eval": None}, "evaluation": None}
    file = recipe(tiny_world, tmp_path, "run", **STEPWISE, **settings)
    assert run.train(load(Path(file)), log=lambda line: None, stream=io.StringIO()).exit_code == 0
    scored = tmp_path / "scores.jsonl"
    flags = ["--scores", str(scored), "--json", f"data.cache={tmp_path / 'cache'}", "data.workers=1"]
    assert main(["eval", str(tmp_path / "run"), "--data", str(rows), *flags]) == 0
    means = json.loads(capsys.readouterr().out)
    lines = [json.loads(line) for line in scored.read_text().splitlines()]
    assert means["steps"] == 4 and lines[0]["labels"] == [1, 0]
    right = [(p > 0.5) == label for line in lines for p, label in zip(line["steps"], line["labels"], strict=True)]
    assert means["accuracy"] == sum(right) / 4


@pytest.fixture(scope="module")
def base(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model with a tokenizer whose padding token is the end of texts, as many have it."""
    folder = tmp_path_factory.mktemp("base")
    save(
        tiny_model(vocab_size=400, tie_word_embeddings=False, eos_token_id=2),
        folder / "base",
        tokenizer_from=tiny_world.tokenizer,
    )
    settings = folder / "base" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"pad_token": "<|endoftext|>"}))
    return folder / "base"


@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_an_adapter_is_scored_alike_by_peft_and_merged(
    tiny_world: World, tmp_path: Path, base: Path, quantization: str | None
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    changes = {"model": {"path": str(base), "tokenizer": None, "config": None}, "adapter": {"kind": "lora", "rank": 4}}
    assert train([recipe(tiny_world, tmp_path, "run", **changes, quantization=quantization)]) == [0]
    folder = tmp_path / "run" / "adapter"
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["task_type"] == "SEQ_CLS" and settings["modules_to_save"] == ["score"]
    ours = our_scores(tmp_path / "run", ITEMS)
    pad = AutoTokenizer.from_pretrained(folder).pad_token_id
    assert pad != 2
    merge([tmp_path / "run"], tmp_path / "merged")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert merged.config.pad_token_id == pad
    bare = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, pad_token_id=pad)
    peft = PeftModel.from_pretrained(bare, folder)
    if quantization is None:
        assert close(ours, theirs(peft, paths(ITEMS)))
        assert close(ours, theirs(merged, paths(ITEMS))) and close(ours, our_scores(tmp_path / "merged", ITEMS))
        # Control: without the adapter's head it is another model.
        other = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, pad_token_id=pad)
        assert not close(ours, theirs(other, paths(ITEMS)))
    else:  # trained and scored over the rounded weights
        assert close(theirs(peft, paths(ITEMS)), theirs(merged, paths(ITEMS)))
        assert not close(ours, theirs(peft, paths(ITEMS)))


CLASSLESS = [
    ("granite", {}, "sequence-classification", "gemma2, gemma3_text"),
    ("granite", STEPWISE, "token-classification", "gemma2"),
    ("gemma3_text", STEPWISE, "token-classification", "gemma2"),
    ("olmo2", STEPWISE, "token-classification", "gemma2"),
    ("olmo3", STEPWISE, "token-classification", "gemma2"),
]


@pytest.mark.parametrize(("family", "objective", "task", "others"), CLASSLESS)
def test_a_family_without_a_class_for_scores_is_refused_before_rows_are_read(
    tiny_world: World, tmp_path: Path, family: str, objective: dict[str, Any], task: str, others: str
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", ["this is no JSON"])

    def start(model_type: str) -> None:
        changes = {**objective, "model": {"config": {**CONFIG, "model_type": model_type}}, "data": {"train": str(rows)}}
        changes |= {"evaluation": None}
        run.train(
            load(Path(recipe(tiny_world, tmp_path, "run", **changes))), log=lambda line: None, stream=io.StringIO()
        )

    with pytest.raises(
        RecipeError, match=f"no class for {task} with a {family} model, .* has one for .*{others}, .*llama"
    ):
        start(family)
    with pytest.raises(DataError, match="broken JSON"):  # control: a family that has one comes to its rows
        start("llama")


def test_an_adapter_scores_on_a_family_without_a_class_for_it(tiny_world: World, tmp_path: Path) -> None:
    """PEFT finds no class for its base, and danlu needs none."""
    base = tmp_path / "granite"
    save(tiny_model(model_type="granite", vocab_size=400), base, tokenizer_from=tiny_world.tokenizer)
    changes = {"model": {"path": str(base), "tokenizer": None, "config": None}, "adapter": {"kind": "lora", "rank": 2}}
    assert train([recipe(tiny_world, tmp_path, "run", **changes)]) == [0]
    scores = our_scores(tmp_path / "run", ITEMS)
    assert scores.isfinite().all() and scores.unique().numel() > len(ITEMS)


@pytest.mark.distributed
def test_every_layout_trains_what_one_process_does(tiny_world: World, tmp_path: Path, outcome: Path) -> None:
    files = [recipe(tiny_world, tmp_path, name, parallel) for name, (_, parallel) in LAYOUTS.items()]
    assert run_group(train, 2, files) == [[0] * len(files)] * 2
    for name in LAYOUTS:
        assert losses(tmp_path / name) == pytest.approx(losses(outcome), rel=1e-4), name
        tensors, wanted = trained_tensors(tmp_path / name), trained_tensors(outcome)
        assert tensors.keys() == wanted.keys(), name
        assert worst_relative_error(tensors, wanted) < 2e-5, name
        torch.testing.assert_close(our_scores(tmp_path / name, ITEMS), our_scores(outcome, ITEMS), rtol=1e-4, atol=1e-4)


def test_the_head_may_have_a_learning_rate_of_its_own(tiny_world: World, tmp_path: Path) -> None:
    plain = {"optimizer": {"kind": "sgd", "learning_rate": 1e-2}, "schedule": {"warmup": 0}, "steps": 1}
    plain |= {"data": {}, "evaluation": {}, "checkpoint": {"every": 1}}
    for name, ratio in (("still", 1e-6), ("same", 1.0), ("double", 2.0)):
        objective = {"kind": "bradley-terry", "rate_ratio": ratio}
        assert train([recipe(tiny_world, tmp_path, name, objective=objective, **plain)]) == [0]
    still, same, double = (trained_tensors(tmp_path / name) for name in ("still", "same", "double"))
    own = "objective.score.weight"
    torch.testing.assert_close(double[own] - still[own], 2 * (same[own] - still[own]), rtol=1e-3, atol=1e-6)
    assert [name for name in same if not torch.equal(same[name], double[name])] == [own]


@pytest.mark.slow
def test_a_compiled_decoder_has_the_same_scores(
    tiny_world: World, tmp_path: Path, outcome: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = list[bool]()
    torch_compile = partial(torch.compile, backend="eager")  # traced, and run as it is

    def compile_(*arguments: Any, **options: Any) -> Any:
        compiled.append(True)
        return torch_compile(*arguments, **options)

    monkeypatch.setattr(torch, "compile", compile_)
    assert train([recipe(tiny_world, tmp_path, "compiled", compile=True)]) == [0]
    assert compiled
    assert losses(tmp_path / "compiled") == pytest.approx(losses(outcome), rel=1e-4)
