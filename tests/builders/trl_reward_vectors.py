"""Writes what TRL's RewardTrainer makes of a two-layer model: its weights, pairs, loss and every gradient.

Run in an environment with trl 1.16 and transformers 5.23; danlu is not imported. Tests read the file alone.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import (
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedTokenizerFast,
)
from trl import RewardConfig, RewardTrainer

VOCABULARY, PAD, CENTRING = 32, 0, 0.05
PROMPTS = [[1, 5, 9, 7], [1, 4], [1, 11, 12, 13, 14, 15]]
CHOSEN = [[8, 3, 2], [6, 21, 22, 23, 2], [17, 2]]
REJECTED = [[19, 2], [20, 30, 2], [18, 25, 26, 27, 28, 2]]
MARGINS = [0.5, 0.0, 1.25]
STEPS = [[[8, 3], [9, 10, 3]], [[6, 3]], [[17, 18, 3], [5, 3], [7, 7, 7, 3]]]
STEP_LABELS = [[1, 0], [1], [1, 1, 0]]

config = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    pad_token_id=PAD,
    bos_token_id=1,
    eos_token_id=2,
    initializer_range=0.3,
    num_labels=1,
)
tensors: dict[str, torch.Tensor] = {}


def keep(model: torch.nn.Module, under: str) -> None:
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        tensors[f"{under}.gradients.{name}"] = parameter.grad.clone()


def outcome() -> None:
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(config).float()
    tensors.update({f"outcome.weights.{name}": value.detach().clone() for name, value in model.named_parameters()})
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({str(n): n for n in range(VOCABULARY)}, unk_token="0")),
        pad_token="0",
        eos_token="2",
    )
    rows = Dataset.from_dict(
        {
            "chosen_ids": [prompt + answer for prompt, answer in zip(PROMPTS, CHOSEN, strict=True)],
            "rejected_ids": [prompt + answer for prompt, answer in zip(PROMPTS, REJECTED, strict=True)],
            "margin": MARGINS,
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = RewardConfig(
            output_dir=folder,
            per_device_train_batch_size=len(PROMPTS),
            center_rewards_coefficient=CENTRING,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_dropout=True,
            report_to=[],
        )
        trainer = RewardTrainer(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer)
        batch = trainer.data_collator([rows[number] for number in range(len(PROMPTS))])
        model.train()
        loss = trainer.compute_loss(model, batch)
    loss.backward()
    tensors["outcome.loss"] = loss.detach()
    tensors["outcome.scores"] = model(**{key: batch[key] for key in ("input_ids", "attention_mask")}).logits.detach()
    keep(model, "outcome")


def process() -> None:
    """transformers' token classification with labels at the last token of each step, as TRL's PRMTrainer made them."""
    torch.manual_seed(1)
    config.num_labels = 2
    model = LlamaForTokenClassification(config).float()
    with torch.no_grad():
        model.score.bias.copy_(torch.tensor([0.6, -0.7]))
    tensors.update({f"process.weights.{name}": value.detach().clone() for name, value in model.named_parameters()})
    ids, labels = [], []
    for prompt, steps, right in zip(PROMPTS, STEPS, STEP_LABELS, strict=True):
        ids.append(prompt + [token for step in steps for token in step])
        labels.append(
            [-100] * len(prompt)
            + [-100 if n < len(s) - 1 else r for s, r in zip(steps, right, strict=True) for n in range(len(s))]
        )
    width = max(map(len, ids))
    loss = model.eval()(
        input_ids=torch.tensor([row + [PAD] * (width - len(row)) for row in ids]),
        attention_mask=torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids]),
        labels=torch.tensor([row + [-100] * (width - len(row)) for row in labels]),
    ).loss
    loss.backward()
    tensors["process.loss"] = loss.detach()
    keep(model, "process")


outcome()
process()
facts = {
    "prompts": PROMPTS, "chosen": CHOSEN, "rejected": REJECTED, "margins": MARGINS, "centring": CENTRING,
    "steps": STEPS, "step_labels": STEP_LABELS, "config": config.to_dict(),
}  # fmt: skip
data = Path(__file__).resolve().parents[1] / "objectives" / "data"
save_file(tensors, data / "reward.safetensors", metadata={"facts": json.dumps(facts)})
