"""Writes what TRL 1.16, where it is installed, makes of answers that a small model has drawn: run it as a script.

    PYTHONPATH=tests python tests/builders/trl_policy_vectors.py

For each case: the loss that GRPOTrainer's own code computes for a padded batch, its metrics, and the gradient of every
parameter of the policy. The trainer is made without its constructor, as in `trl_preference_vectors`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from builders.trl_preference_vectors import CONFIG, DATA, model, trainer_of

TEMPERATURE = 0.8
ANSWERS = (3, 2, 3)
"""Answers of each prompt."""
LENGTH = 7
METRICS = {
    "entropy": "entropy",
    "kl": "kl/k3",
    "clip_ratio/low_mean": "clip_low",
    "clip_ratio/high_mean": "clip_high",
    "clip_ratio/region_mean": "clip",
}
ARGUMENTS = {
    "delta": None,
    "use_bias_correction_kl": False,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "gradient_checkpointing_kwargs": None,
    "report_to": [],
}
ATTRIBUTES = {
    "importance_sampling_level": "token",
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "beta": 0.0,
    "entropy_coef": 0.0,
    "off_policy_mask_threshold": None,
    "use_vllm": False,
    "vllm_importance_sampling_correction": False,
    "max_completion_length": LENGTH,
    "use_adaptive_entropy": False,
    "top_entropy_quantile": 1.0,
}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": (
        {"normalise": "sequences", "kl": 0.2},
        {"loss_type": "grpo", "beta": 0.2},
    ),
    "grpo of one update": (
        {"normalise": "sequences", "single_update": True, "kl": 0.2, "kl_with_ratio": True},
        {"loss_type": "grpo", "beta": 0.2, "use_bias_correction_kl": True, "single_update": True},
    ),
    "gspo": (
        {"normalise": "sequences", "ratio": "sequence", "clip_low": 0.03, "clip_high": 0.04, "kl": 0.1},
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon_low": 0.03,
            "epsilon_high": 0.04,
            "beta": 0.1,
        },
    ),
    "bnpo": ({"normalise": "tokens", "entropy": 0.1}, {"loss_type": "bnpo", "entropy_coef": 0.1}),
    "bnpo of groups": ({"normalise": "groups"}, {"loss_type": "bnpo", "by_group": True}),
    "dr_grpo": (
        {"normalise": "constant", "constant_tokens": LENGTH, "off_policy": 0.1},
        {"loss_type": "dr_grpo", "off_policy_mask_threshold": 0.1},
    ),
    "dapo": (
        {"clip_high": 0.28, "dual_clip": 1.4, "kl": 0.3, "kl_with_ratio": True},
        {"loss_type": "dapo", "epsilon_high": 0.28, "delta": 1.4, "beta": 0.3, "use_bias_correction_kl": True},
    ),
    "dapo of groups": ({"clip_high": 0.28}, {"loss_type": "dapo", "epsilon_high": 0.28, "by_group": True}),
    "dapo, truncated": (
        {"importance": {"level": "token", "high": 1.2}},
        {"loss_type": "dapo", "mode": "token_truncate", "most": 1.2},
    ),
    "grpo, masked by sequence": (
        {
            "normalise": "sequences",
            "importance": {"level": "sequence", "low": 0.5, "high": 1.5, "masks": True},
        },
        {"loss_type": "grpo", "mode": "sequence_mask", "least": 0.5, "most": 1.5},
    ),
    "cispo": ({"loss": "cispo", "clip_high": 1.15}, {"loss_type": "cispo", "epsilon_high": 1.15}),
    "sapo": ({"loss": "sapo", "normalise": "sequences"}, {"loss_type": "sapo"}),
    "vespo": ({"loss": "vespo"}, {"loss_type": "vespo"}),
    "vespo, masked": (
        {"loss": "vespo", "importance": {"level": "token", "low": 0.5, "high": 1.7, "masks": True}},
        {"loss_type": "vespo", "mode": "token_mask", "least": 0.5, "most": 1.7},
    ),
    "luspo": (
        {"ratio": "sequence", "normalise": "constant", "constant_tokens": 1},
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    ),
}
"""By name: (settings of a PolicyGradient, attributes and arguments of TRL's trainer)."""


def padded(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """What the trainer's loss reads of answers: prompts padded at the left, answers at the right."""
    prompts = [torch.tensor(row["prompt"]) for row in rows]
    answers = [torch.tensor(row["tokens"]) for row in rows]
    columns = {
        name: pad_sequence([torch.tensor(row[name]) for row in rows], batch_first=True)
        for name in ("old", "sampled", "weights")
    }
    return {
        "prompt_ids": pad_sequence(prompts, batch_first=True, padding_side="left"),
        "prompt_mask": pad_sequence(list(map(torch.ones_like, prompts)), batch_first=True, padding_side="left"),
        "completion_ids": pad_sequence(answers, batch_first=True),
        "completion_mask": pad_sequence(list(map(torch.ones_like, answers)), batch_first=True),
        "tool_mask": columns["weights"].long(),
        "old_per_token_logps": columns["old"],
        "sampling_per_token_logps": columns["sampled"],
        "advantages": torch.tensor([row["advantage"] for row in rows]),
    }


def importance_ratio(inputs: Mapping[str, Tensor], mode: str, least: float | None, most: float) -> Tensor:
    """As GRPOTrainer._generate_and_score_completions has it."""
    mask = inputs["completion_mask"] * inputs["tool_mask"]
    difference = (inputs["old_per_token_logps"] - inputs["sampling_per_token_logps"]) * mask
    ratio = (difference.sum(-1, keepdim=True) if mode.startswith("sequence") else difference).exp()
    if mode.endswith("truncate"):
        return ratio.clamp(min=least, max=most)
    return ratio.masked_fill((ratio < (least or 0)) | (ratio > most), 0.0)


def grpo(policy: Any, reference: Any, batches: Sequence[Any], **options: Any) -> tuple[Tensor, dict[str, float]]:
    """(loss, metrics) of GRPOTrainer over the micro-batches of a step, accumulated as transformers' Trainer does."""
    from trl import GRPOTrainer
    from trl.trainer.utils import add_fused_lm_head

    for each in (policy, reference):
        add_fused_lm_head(each, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
    mode, least, most = (options.pop(name, None) for name in ("mode", "least", "most"))
    single = options.pop("single_update", False)
    arguments = {name: options.pop(name, value) for name, value in ARGUMENTS.items()}
    attributes = {**ATTRIBUTES, **options}
    if mode:
        attributes |= {"use_vllm": True, "vllm_importance_sampling_correction": True}
    trainer = trainer_of(
        GRPOTrainer,
        policy,
        reference,
        args=SimpleNamespace(**arguments, steps_per_generation=len(batches)),
        current_gradient_accumulation_steps=len(batches),
        _entropy_bonus_enabled=attributes["entropy_coef"] != 0,
        **attributes,
    )
    trainer.accelerator = SimpleNamespace(
        **vars(trainer.accelerator),
        num_processes=1,
        is_main_process=False,
        sync_gradients=True,
        reduce=lambda x, reduction: x,
        autocast=nullcontext,
    )
    inputs = [padded(rows) for rows in batches]
    tokens = sum(each["tool_mask"].sum() for each in inputs)
    total = torch.zeros(())
    for each in inputs:
        whole = {"num_items_in_batch": tokens, **each}
        if mode:
            whole["importance_sampling_ratio"] = importance_ratio(each, mode, least, most)
        with torch.no_grad():
            whole["ref_per_token_logps"] = _logps(trainer, reference, each)
        if single:
            del whole["old_per_token_logps"]
        total = total + trainer._compute_loss(policy, whole)
    return total, {key: values[-1] for key, values in trainer._metrics["train"].items()}


def _logps(trainer: Any, of: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    ids = torch.cat((inputs["prompt_ids"], inputs["completion_ids"]), 1)
    mask = torch.cat((inputs["prompt_mask"], inputs["completion_mask"]), 1)
    logps, _, _ = trainer._get_per_token_logps_and_entropies(of, ids, mask, inputs["completion_ids"].size(1))
    result: Tensor = logps
    return result


def rows() -> list[list[dict[str, Any]]]:
    """The answers of each prompt, with log-probabilities near the policy's own."""
    generator = torch.Generator().manual_seed(12)

    def tokens(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (), generator=generator))
        return torch.randint(0, CONFIG["vocab_size"], (length,), generator=generator).tolist()

    groups = []
    policy = model(0)
    for count in ANSWERS:
        prompt, answers = tokens(1, 5), []
        for _ in range(count):
            answer = tokens(2, LENGTH + 1)
            weights = [1.0] * len(answer)
            if len(answer) > 3:
                weights[1] = 0.0  # what a tool has said
            with torch.no_grad():
                logits = policy(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
            logps = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None]).squeeze(1)
            old = logps + torch.randn(logps.shape, generator=generator) * 0.4
            sampled = old + torch.randn(logps.shape, generator=generator) * 0.4
            advantage = float(torch.randn((), generator=generator))
            answers.append(
                {
                    "prompt": prompt,
                    "tokens": answer,
                    "weights": weights,
                    "old": old.tolist(),
                    "sampled": sampled.tolist(),
                    "advantage": advantage,
                }
            )
        groups.append(answers)
    return groups


def write() -> None:
    groups = rows()
    tensors: dict[str, Tensor] = {}
    for role, seed in (("policy", 0), ("reference", 1)):
        tensors |= {f"{role}/{name}": value.detach() for name, value in model(seed).named_parameters()}
    described = {}
    for name, (settings, given) in CASES.items():
        options = dict(given)
        batches = groups if options.pop("by_group", False) else [[row for group in groups for row in group]]
        policy, reference = model(0), model(1)
        loss, metrics = grpo(policy, reference, batches, **options)
        loss.backward()
        tensors |= {f"{name}/{key}": value.grad.clone() for key, value in policy.named_parameters()}
        # Means over tokens, of one micro-batch and of ratios by token: there TRL's metrics are danlu's.
        by_token = settings.get("ratio") != "sequence"
        shown = {METRICS[key]: float(metrics[key]) for key in METRICS if key in metrics and len(batches) == 1}
        shown = {key: value for key, value in shown.items() if by_token or not key.startswith("clip")}
        if settings.get("kl_with_ratio"):
            shown.pop("kl/k3", None)  # multiplied by the ratio there
        described[name] = {"settings": settings, "loss": float(loss.detach()), "metrics": shown}
        print(f"{name:26} {float(loss.detach()):.6f} {shown}")
    DATA.mkdir(exist_ok=True)
    save_file(tensors, DATA / "trl_policy.safetensors")
    content = {
        "trl": "1.16.0",
        "config": CONFIG,
        "temperature": TEMPERATURE,
        "groups": groups,
        "cases": described,
    }
    (DATA / "trl_policy.json").write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    write()
