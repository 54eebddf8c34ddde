"""Reward models as rewards: the scores are those of transformers, of prompt and answer as the model knows them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.tiny_run import tiny_model
from builders.tiny_world import World
from safetensors.torch import load_file, save_file

from danlu.core.errors import DataError, ModelError
from danlu.core.types import Task
from danlu.models.saving import save
from danlu.models.score_head import new_score_head
from danlu.rewards.protocol import JudgedAnswer, StepRewards
from danlu.rewards.runner import RewardPart, RewardRunner
from danlu.stages.reward_model import RewardModel, load_reward_model
from danlu.stages.role_configs import resolve_reward_model

CONTEXT = 64
CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "How are you?"}]
ANSWERS = [
    JudgedAnswer("Well, thank you.", {}, CHAT),
    JudgedAnswer("No.", {}, CHAT),
    JudgedAnswer("", {}, CHAT),
    JudgedAnswer(" We went home.", {}, "And then?"),
    JudgedAnswer("", {}, "And then?"),
    JudgedAnswer("Well, thank you.", {}, CHAT[1:]),
]


def folder(world: World, path: Path, task: Task, labels: int, *, template: bool = True) -> Path:
    model = tiny_model(vocab_size=400, max_position_embeddings=CONTEXT, eos_token_id=2)
    head = new_score_head(model.config.hidden_size, labels, bias=labels > 1, seed=1, std=1.0)
    config = replace(model.config, task=task)
    save(model, path, tokenizer_from=world.tokenizer, config=config, score_head=head)
    if not template:
        (path / "chat_template.jinja").unlink()
    return path


@pytest.fixture(scope="module")
def plain(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[RewardModel, Path]:
    """One whose tokenizer has no chat template."""
    path = folder(tiny_world, tmp_path_factory.mktemp("reward") / "plain", "sequence-classification", 1, template=False)
    return load_reward_model(resolve_reward_model(str(path)), device="cpu"), path


@pytest.fixture(scope="module")
def scorer(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[RewardModel, Path]:
    path = folder(tiny_world, tmp_path_factory.mktemp("reward") / "model", "sequence-classification", 1)
    return load_reward_model(resolve_reward_model(str(path)), device="cpu"), path


def transformers_score(path: Path, answer: JudgedAnswer, *, ended: bool = True) -> float:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    if isinstance(answer.prompt, str) and tokenizer.chat_template is None:
        ids = [*tokenizer(answer.prompt + answer.text).input_ids, tokenizer.eos_token_id]
    else:
        asked = [{"role": "user", "content": answer.prompt}] if isinstance(answer.prompt, str) else answer.prompt
        turns = [*asked, {"role": "assistant", "content": answer.text}]
        ids = tokenizer(tokenizer.apply_chat_template(turns, tokenize=False), add_special_tokens=False).input_ids
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([ids if ended else ids[:-1]])).logits)


def test_scores_are_those_of_transformers(scorer: tuple[RewardModel, Path]) -> None:
    reward, path = scorer
    expected = [transformers_score(path, answer) for answer in ANSWERS]
    assert reward(ANSWERS) == pytest.approx(expected, rel=1e-4)
    assert reward([]) == []
    # A prompt that ends in the assistant's turn: one turn with the answer.
    begun = JudgedAnswer("thank you.", {}, [*CHAT, {"role": "assistant", "content": "Well, "}])
    assert reward([begun]) == pytest.approx(expected[:1], rel=1e-4)
    # Controls: another order, and answers without their last token.
    assert reward(ANSWERS[::-1]) != pytest.approx(expected, rel=1e-3)
    assert reward(ANSWERS) != pytest.approx([transformers_score(path, a, ended=False) for a in ANSWERS], rel=1e-3)


def test_texts_stand_as_they_are_without_a_template(plain: tuple[RewardModel, Path]) -> None:
    reward, path = plain
    texts = [answer for answer in ANSWERS if isinstance(answer.prompt, str)]
    assert reward(texts) == pytest.approx([transformers_score(path, answer) for answer in texts], rel=1e-4)
    with pytest.raises(DataError, match="chat template"):
        reward(ANSWERS)


def test_what_is_longer_than_the_context_loses_the_beginning_of_its_prompt(plain: tuple[RewardModel, Path]) -> None:
    reward, path = plain
    long = JudgedAnswer(" We went home.", {}, "Once upon a time, " * 40 + "And then?")
    (score,) = reward([long])
    tokenizer = reward.loaded.chat_tokenizer.tokenizer
    kept = tokenizer.decode(tokenizer.encode(str(long.prompt))[-(CONTEXT - len(tokenizer.encode(long.text)) - 1) :])
    assert score == pytest.approx(transformers_score(path, replace(long, prompt=kept)), rel=1e-3)
    assert reward([replace(long, text="word " * 200)])[0] is not None


def test_it_is_a_reward_among_others(scorer: tuple[RewardModel, Path]) -> None:
    reward, _ = scorer
    with RewardRunner([RewardPart("model", reward)]) as runner:
        table = runner.score(ANSWERS)
    assert table.values[:, 0].tolist() == reward(ANSWERS) and not table.failures


def test_a_process_reward_model_gives_its_least_certain_step(tiny_world: World, tmp_path: Path) -> None:
    from transformers import AutoModelForTokenClassification

    path = folder(tiny_world, tmp_path / "model", "token-classification", 2)
    reward = load_reward_model(resolve_reward_model(str(path)), device="cpu")
    answers = [JudgedAnswer("1 and 1 is 2.\n\n2 and 1 is 4.\n", {}, prompt) for prompt in ("1 + 1 + 1?", CHAT)]
    scores = reward([*answers, JudgedAnswer("\n", {}, "1 + 1?")])
    assert scores[2] is None
    model: Any = AutoModelForTokenClassification.from_pretrained(path).eval()
    for score, tree in zip(scores, reward._rendered(answers).values(), strict=False):
        with torch.no_grad():
            right = model(input_ids=torch.tensor(tree.tokens.tolist())[None]).logits[0].softmax(-1)[:, 1]
        assert len(tree.branches) == 3, "the prompt and two steps"
        steps = [float(right[branch.stop - 1]) for branch in tree.branches[1:]]
        assert score == pytest.approx(min(steps), rel=1e-4) and score != pytest.approx(max(steps), rel=1e-3)
    first, _, nothing = replace(reward, per_step=True)([*answers, JudgedAnswer("\n", {}, "1 + 1?")])
    assert isinstance(first, StepRewards) and nothing is None
    assert first.ends == (13, 28) and min(first.values) == scores[0] and len(set(first.values)) == 2
    long = replace(answers[0], text="1 and 1 is 2.\n" + "and so on, " * 200 + "\n3.")
    (cut,) = replace(reward, per_step=True)([long])
    assert isinstance(cut, StepRewards) and len(cut.values) == len(cut.ends) < 3  # what the model's context has


def test_what_gives_no_score_is_refused(tiny_world: World, tmp_path: Path) -> None:
    save(tiny_model(vocab_size=400), tmp_path / "language", tokenizer_from=tiny_world.tokenizer)
    with pytest.raises(ModelError, match="a language model, which gives no score. Name a reward model"):
        resolve_reward_model(str(tmp_path / "language"))
    path = folder(tiny_world, tmp_path / "model", "sequence-classification", 3)
    with pytest.raises(ModelError, match="its head has 3 labels. A reward is one score"):
        resolve_reward_model(str(path))
    headless = folder(tiny_world, tmp_path / "headless", "sequence-classification", 1)
    tensors = load_file(headless / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in tensors.items() if name != "score.weight"}, headless / "model.safetensors"
    )
    with pytest.raises(ModelError, match="and its weights have no score.weight"):
        resolve_reward_model(str(headless))
