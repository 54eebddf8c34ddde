"""Writes what TRL 1.16, where it is installed, makes of the preferences of a small model: run it as a script.

For each case: the loss that TRL's own trainer computes for a padded batch, its metrics, and the gradient of every
parameter of the policy. Trainers are made without their constructors, which want a tokenizer and a data set; the loss
is their own code on the attributes that it reads.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

DATA = Path(__file__).resolve().parents[1] / "objectives" / "data"
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PAIRS = 6
METRICS = {
    "rewards/accuracies": "accuracy",
    "rewards/margins": "margin",
    "rewards/chosen": "rewards/chosen",
    "rewards/rejected": "rewards/rejected",
    "logps/chosen": "logps/chosen",
    "logps/rejected": "logps/rejected",
    "kl": "kl",
}


def model(seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    llama = LlamaForCausalLM(LlamaConfig(**CONFIG, attn_implementation="eager"))
    generator = torch.Generator().manual_seed(seed)
    for parameter in llama.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.4 + (parameter.dim() == 1)
    return llama


def rows(prompt_lengths: tuple[int, ...]) -> list[dict[str, list[int]]]:
    """Prompts with a chosen and a rejected answer, of random tokens and lengths."""
    generator = torch.Generator().manual_seed(3)

    def tokens(length: int) -> list[int]:
        return torch.randint(0, CONFIG["vocab_size"], (length,), generator=generator).tolist()

    lengths = torch.randint(2, 7, (len(prompt_lengths), 2), generator=generator).tolist()
    return [
        {"prompt": tokens(length), "chosen": tokens(chosen), "rejected": tokens(rejected)}
        for length, (chosen, rejected) in zip(prompt_lengths, lengths, strict=True)
    ]


def padded(prompts: list[list[int]], answers: list[list[int]]) -> dict[str, Tensor]:
    whole = [torch.tensor(prompt + answer) for prompt, answer in zip(prompts, answers, strict=True)]
    masks = [torch.tensor([0] * len(p) + [1] * len(a)) for p, a in zip(prompts, answers, strict=True)]
    return {
        "input_ids": pad_sequence(whole, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(each) for each in whole], batch_first=True),
        "completion_mask": pad_sequence(masks, batch_first=True),
    }


ACCELERATOR = SimpleNamespace(
    device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x, unwrap_model=lambda x: x
)


def trainer_of(kind: type, policy: Any, reference: Any, **attributes: Any) -> Any:
    trainer = kind.__new__(kind)
    vars(trainer).update(
        accelerator=ACCELERATOR,
        model=policy,
        ref_model=reference,
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        is_encoder_decoder=False,
        **attributes,
    )
    return trainer


def dpo(policy: Any, reference: Any, pairs: list[Any], types: list[str], weights: list[float], **options: Any) -> Any:
    """(loss, metrics) of DPOTrainer."""
    from trl import DPOTrainer
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(policy, outputs=("log_probs", "entropy", "mean_logits", "is_top1", "log_sum_sq_probs"))
    add_fused_lm_head(reference)
    defaults = {
        "beta": 0.1,
        "ld_alpha": None,
        "f_divergence_type": "reverse_kl",
        "f_alpha_divergence_coef": 0.5,
        "label_smoothing": 0.0,
        "use_weighting": False,
    }
    arguments = SimpleNamespace(discopop_tau=options.pop("discopop_tau", 0.05), gradient_checkpointing_kwargs=None)
    attributes = {**defaults, **options, "args": arguments, "loss_types": types, "loss_weights": weights}
    trainer = trainer_of(DPOTrainer, policy, reference, **attributes)
    prompts = [row["prompt"] for row in pairs]
    answers = [row["chosen"] for row in pairs] + [row["rejected"] for row in pairs]
    loss = trainer._compute_loss(policy, padded(prompts * 2, answers), False)
    return loss, {key: values[-1] for key, values in trainer._metrics["train"].items()}


def kto(policy: Any, reference: Any, judged: list[Any], loss_type: str, **options: Any) -> Any:
    """(loss, metrics) of KTOTrainer; the answer that a prompt is mismatched with is the next row's."""
    from trl import KTOTrainer
    from trl.trainer.utils import add_fused_lm_head

    for each in (policy, reference):
        add_fused_lm_head(each, outputs=("log_probs", "entropy", "mean_logits"))
    attributes = {
        "beta": 0.1,
        "desirable_weight": 1.0,
        "undesirable_weight": 1.0,
        "loss_type": loss_type,
        "calculate_KL": loss_type == "kto",
        "args": SimpleNamespace(gradient_checkpointing_kwargs=None),
        **options,
    }
    trainer = trainer_of(KTOTrainer, policy, reference, **attributes)
    prompts, answers = [row["prompt"] for row in judged], [row["answer"] for row in judged]
    mismatched = padded(prompts, answers[1:] + answers[:1])
    batch = padded(prompts, answers) | {f"KL_{key}": value for key, value in mismatched.items()}
    loss = trainer._compute_loss(policy, batch | {"label": torch.tensor([row["label"] for row in judged])}, False)
    return loss, {key: values[-1] for key, values in trainer._metrics["train"].items()}


def contrasted(policy: Any, pairs: list[Any], kind: str, **options: Any) -> Any:
    """(loss, metrics) of CPOTrainer or ORPOTrainer."""
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    defaults = {"beta": 0.1, "alpha": 0.0, "cpo_alpha": 1.0, "simpo_gamma": 0.5, "label_smoothing": 0.0}
    attributes = {**defaults, "loss_type": "sigmoid", "pad_token_id": 0, "padding_value": 0, **options}
    trainer = trainer_of(ORPOTrainer if kind == "orpo" else CPOTrainer, policy, None, **attributes)
    batch = {}
    for side in ("chosen", "rejected"):
        whole = padded([row["prompt"] for row in pairs], [row[side] for row in pairs])
        mask = whole.pop("completion_mask")
        batch |= {f"{side}_{key}": value for key, value in whole.items()}
        batch[f"{side}_labels"] = whole["input_ids"].masked_fill(mask == 0, -100)
    return trainer.get_batch_loss_metrics(policy, batch)


Compute = Callable[[Any, Any, Mapping[str, list[Any]]], Any]


def dpo_case(terms: Any, types: list[str], weights: list[float] | None = None, **options: Any) -> tuple[Any, Compute]:
    weights = weights or [1.0] * len(types)
    return (terms, "pairs"), lambda policy, reference, data: dpo(
        policy, reference, data["pairs"], types, weights, **options
    )


def cases() -> dict[str, tuple[Any, Compute]]:
    """By name: ((the terms of a danlu recipe, the rows), what computes TRL's)."""
    made = {}
    names = {"exo": "exo_pair", "nca": "nca_pair", "bco": "bco_pair", "sppo": "sppo_hard"}
    plain = ["sigmoid", "hinge", "ipo", "nca", "bco", "aot", "aot-unpaired", "apo-zero", "apo-down", "sigmoid-norm"]
    for kind in [*plain, "sppo", "discopop", "exo", "robust"]:
        terms, options = {"kind": kind, "beta": 0.3}, {"beta": 0.3}
        if kind in ("aot", "aot-unpaired", "robust", "exo"):
            terms["label_smoothing"] = options["label_smoothing"] = 0.1
        if kind == "discopop":
            terms["tau"] = options["discopop_tau"] = 0.2
        made[kind] = dpo_case([terms], [names.get(kind, kind.replace("-", "_"))], **options)
    for kind, divergence, name in (
        ("sigmoid", {"kind": "forward-kl"}, "forward_kl"),
        ("ipo", {"kind": "js"}, "js_divergence"),
        ("hinge", {"kind": "alpha", "alpha": 0.7}, "alpha_divergence"),
    ):
        options = {"beta": 0.3, "f_divergence_type": name, "f_alpha_divergence_coef": 0.7}
        terms = [{"kind": kind, "beta": 0.3, "divergence": divergence}]
        made[f"{kind} {divergence['kind']}"] = dpo_case(terms, [kind], **options)
    made["sigmoid wpo"] = dpo_case([{"kind": "sigmoid", "wpo": True}], ["sigmoid"], use_weighting=True)
    made["sigmoid ld"] = dpo_case([{"kind": "sigmoid", "ld_alpha": 0.4}], ["sigmoid"], ld_alpha=0.4)
    terms = [{"kind": "sigmoid", "weight": 0.8}, {"kind": "bco", "weight": 0.5}, {"kind": "sft", "weight": 0.2}]
    made["sum"] = dpo_case(terms, ["sigmoid", "bco_pair", "sft"], [0.8, 0.5, 0.2])
    for kind, trl in (("kto", "kto"), ("apo-zero-unpaired", "apo_zero_unpaired")):
        terms = [{"kind": kind, "beta": 0.3, "desirable": 1.5, "undesirable": 0.5}]
        made[kind] = (
            (terms, "judged"),
            lambda policy, reference, data, trl=trl: kto(
                policy, reference, data["judged"], trl, beta=0.3, desirable_weight=1.5, undesirable_weight=0.5
            ),
        )
    made["kto at zero"] = (  # the mean log-ratio of mismatched answers is below 0 there
        ([{"kind": "kto"}], "judged below zero"),
        lambda policy, reference, data: kto(policy, reference, data["judged below zero"], "kto"),
    )
    for name, terms, options in (
        ("cpo", {"kind": "cpo", "label_smoothing": 0.1, "nll": 0.7}, {"label_smoothing": 0.1, "cpo_alpha": 0.7}),
        ("simpo", {"kind": "simpo"}, {"loss_type": "simpo", "beta": 2.0, "cpo_alpha": 0.0}),
    ):
        made[name] = (
            ([terms], "pairs"),
            lambda policy, reference, data, options=options: contrasted(policy, data["pairs"], "cpo", **options),
        )
    # TRL takes the likelihood of the prompt in too; prompts of one token have nothing to predict.
    made["orpo"] = (
        ([{"kind": "orpo"}], "short"),
        lambda policy, reference, data: contrasted(policy, data["short"], "orpo"),
    )
    return made


def write() -> None:
    pairs = rows((1, 2, 3, 4, 2, 1))
    single = rows((2, 1, 3, 2, 4, 1, 2))
    judged = [
        {"prompt": row["prompt"], "answer": row["chosen"], "label": label}
        for row, label in zip(single, (True, False, True, True, False, False, True), strict=True)
    ]
    data = {"pairs": pairs, "judged": judged, "judged below zero": judged[1:5], "short": rows((1,) * PAIRS)}
    tensors: dict[str, Tensor] = {}
    for role, seed in (("policy", 0), ("reference", 1)):
        tensors |= {f"{role}/{name}": value.detach() for name, value in model(seed).named_parameters()}
    described = {}
    for name, ((terms, used), compute) in cases().items():
        policy, reference = model(0), model(1)
        loss, metrics = compute(policy, reference, data)
        loss.backward()
        tensors |= {f"{name}/{key}": value.grad.clone() for key, value in policy.named_parameters()}
        # TRL's log-probabilities of answers are means over tokens there, or leave tokens out.
        differ = "logps" if name in ("orpo", "simpo", "sigmoid ld") else "none"
        shown = {METRICS[key]: float(metrics[key]) for key in METRICS if key in metrics and not key.startswith(differ)}
        if name == "apo-zero-unpaired":
            del shown["kl"]  # which it does not estimate
        described[name] = {"terms": terms, "rows": used, "loss": float(loss), "metrics": shown}
        print(f"{name:20} {float(loss):.6f} {shown}")
    DATA.mkdir(exist_ok=True)
    save_file(tensors, DATA / "trl_preference.safetensors")
    content = {"trl": "1.16.0", "config": CONFIG, "rows": data, "cases": described}
    (DATA / "trl_preference.json").write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    write()
