"""TRL's GRPOTrainer, one run in the peers' environment: prints what each step took, and on what, as JSON.

    python benchmarks/peer_grpo.py --model FOLDER --prompts PROMPTS.jsonl --lengths LENGTHS.json --rewards FILE.py:NAME
                                   --steps N [--samples 8] [--rows 8] [--bf16] [--weights bfloat16]

Nothing of danlu is imported here. LENGTHS has the tokens of each answer of a rollout; the rollout is of one step. What
costs time or memory on a CPU and is not asked for is off: no KL term, so no reference model; one update a rollout, so
no second pass for old log-probabilities; no recomputation, dropout, saving or reports.

The end of answer r is forced by a logits processor of a few operations: it takes the end token's logit away until
LENGTHS[r] - 1 tokens are drawn, and then leaves none but it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peers import LEARNING_RATE, peak_rss_bytes
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class ForcedLengths(LogitsProcessor):
    """The end token comes as the last of so many tokens in each row, and never before."""

    def __init__(self, lengths: torch.Tensor, prompt_tokens: int, end: int) -> None:
        self.lengths, self.prompt_tokens, self.end = lengths, prompt_tokens, end

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        is_last = self.lengths == input_ids.shape[1] - self.prompt_tokens + 1
        scores[:, self.end] = -torch.inf
        if is_last.any():
            scores[is_last] = -torch.inf
            scores[is_last, self.end] = 0
        return scores


class StepTimes(TrainerCallback):
    """When each step ended, and the seconds of its parts."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.parts: list[dict[str, float]] = []
        self._present: dict[str, float] = {}

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose seconds are added to a part of the present step."""

        def call(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self._present[part] = self._present.get(part, 0.0) + time.perf_counter() - start

        return call

    def on_step_end(self, *arguments: Any, **named: Any) -> None:
        self.ends.append(time.perf_counter())
        self.parts.append(self._present)
        self._present = {}


def reward_function(reference: str) -> Callable[..., list[float]]:
    """The function of FILE.py:NAME."""
    file, _, name = reference.rpartition(":")
    spec = importlib.util.spec_from_file_location("rewards", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def trainer_of(options: argparse.Namespace, lengths: list[int], times: StepTimes) -> GRPOTrainer:
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.weights))
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    generate, ends = model.generate, torch.tensor(lengths)

    def generate_lengths(*, input_ids: torch.Tensor, **named: Any) -> torch.Tensor:
        forced = ForcedLengths(ends, input_ids.shape[1], tokenizer.eos_token_id)
        return generate(input_ids=input_ids, logits_processor=LogitsProcessorList([forced]), **named)

    model.generate = times.timed("rollout_s", generate_lengths)
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=options.rows,
        gradient_accumulation_steps=len(lengths) // options.rows,  # and so many of them in a rollout
        num_generations=options.samples,
        max_completion_length=max(lengths),
        num_iterations=1,
        beta=0.0,
        loss_type="dapo",
        scale_rewards="group",
        temperature=1.0,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        optim="adamw_torch_fused",
        max_steps=options.steps,
        bf16=options.bf16,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=False,
        gradient_checkpointing=False,
        disable_dropout=True,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        seed=0,
    )
    rows = [json.loads(line) for line in Path(options.prompts).read_text().splitlines()]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward_function(options.rewards),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[times],
    )
    trainer._generate_and_score_completions = times.timed(
        "experience_s",
        trainer._generate_and_score_completions,
    )
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True, help="lines of {prompt: text}")
    parser.add_argument("--lengths", required=True)
    parser.add_argument("--rewards", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--rows", type=int, default=8, help="answers that are trained on at a time")
    parser.add_argument("--bf16", action="store_true", help="products in bf16, by autocast")
    parser.add_argument("--weights", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lengths = json.loads(Path(options.lengths).read_text())
    times = StepTimes()
    trainer = trainer_of(options, lengths, times)
    calculate_rewards = times.timed("reward_s", trainer._calculate_rewards)
    tokens: list[int] = []

    def checked_rewards(inputs: Any, prompts: Any, completions: Any, completion_ids: list[list[int]]) -> Any:
        assert [len(ids) for ids in completion_ids] == lengths, "answers have other lengths than those forced"
        tokens.append(sum(map(len, completion_ids)))
        return calculate_rewards(inputs, prompts, completions, completion_ids)

    trainer._calculate_rewards = checked_rewards
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    steps = []
    for start, end, parts in zip(times.ends[:-1], times.ends[1:], times.parts[1:], strict=True):
        experience_s = parts.pop("experience_s")
        other_s = experience_s - parts["rollout_s"] - parts["reward_s"]
        steps.append({"step_s": end - start, **parts, "scoring_s": other_s, "update_s": end - start - experience_s})
    result = {
        "steps": steps,
        "tokens": tokens,
        "rewards": [entry["reward"] for entry in log],
        "reward_std": log[0]["reward_std"],
        "entropy": log[0]["entropy"],
        "grad_norm": log[0]["grad_norm"],
        "prompt_tokens": len(trainer.processing_class(text=trainer.train_dataset[0]["prompt"])["input_ids"]),
        "peak_rss_bytes": peak_rss_bytes(),
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
