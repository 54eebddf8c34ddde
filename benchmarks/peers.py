"""One peer, one run, in the peers' environment: trains on rows of token ids, prints what each step took as JSON.

    python benchmarks/peers.py hf-flat|trl-packed|trl-dpo|trl-reward --model FOLDER --data ROWS.jsonl --steps N --rows R
                               [--length 1024] [--adapter lora|dora] [--nf4] [--accumulate A]

Nothing of danlu is imported here. Every option a peer has for speed on such a machine is on: bf16, no padding where it
can do without (TRL 1.16 pads pairs: the `padding_free` of its DPO is switched off in that version), its own fused loss
where it has one; saving, evaluation, recomputation and reports are off.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from typing import Any

LEARNING_RATE = 1e-5  # of preference.py's runs; constant, so that the losses of two engines can be compared


def peak_rss_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=["hf-flat", "trl-packed", "trl-dpo", "trl-reward"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rows", type=int, required=True, help="rows, packs (trl-packed) or pairs in a step")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--adapter", choices=["lora", "dora"], help="rank 8 on all linear layers, by PEFT (TRL only)")
    parser.add_argument(
        "--nf4", action="store_true", help="a base in 4 bits, by bitsandbytes, with double quantization"
    )
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches that a step's rows are divided into")
    options = parser.parse_args()

    import torch

    torch.set_num_threads(options.threads)
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback

    with open(options.data) as lines:
        rows = [json.loads(line) for line in lines]
    loading: dict[str, Any] = {"dtype": torch.float32}
    adapting: dict[str, Any] = {}
    if options.adapter:
        from peft import LoraConfig

        loading["dtype"] = torch.bfloat16  # PEFT keeps the adapter itself in float32
        use_dora = options.adapter == "dora"
        adapting["peft_config"] = LoraConfig(
            r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM", use_dora=use_dora
        )
    if options.nf4:
        from transformers import BitsAndBytesConfig

        loading["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    if options.engine == "trl-reward":
        model: Any = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=1, **loading)
        torch.nn.init.zeros_(model.score.weight)
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model, **loading)

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            self.ends.append(time.perf_counter())

    class Tokens:
        """Counts real tokens as they pass the collator: trainers pad, we do not count padding.

        A pair is two sequences, each with the prompt.
        """

        def __init__(self, collate: Any) -> None:
            self.collate, self.counts = collate, []

        def __call__(self, features: list[dict[str, Any]]) -> Any:
            self.counts.append(sum(map(tokens_of, features)))
            return self.collate(features)

    def tokens_of(feature: dict[str, Any]) -> int:
        if "input_ids" in feature:
            return len(feature["input_ids"])
        return 2 * len(feature.get("prompt_ids", ())) + len(feature["chosen_ids"]) + len(feature["rejected_ids"])

    common: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": options.rows // options.accumulate,
        "gradient_accumulation_steps": options.accumulate,
        "max_steps": options.steps,
        "bf16": True,
        "use_cpu": not torch.cuda.is_available(),
        "save_strategy": "no",
        "report_to": [],
        "logging_strategy": "steps",
        "logging_steps": 1,
        "optim": "adamw_torch_fused",
        "disable_tqdm": True,
        "seed": 0,
    }
    clock = Clock()
    if options.engine == "hf-flat":
        from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

        collate = Tokens(DataCollatorWithFlattening(return_flash_attn_kwargs=False))
        trainer: Any = Trainer(
            model=model,
            args=TrainingArguments(**common, remove_unused_columns=False),
            train_dataset=Dataset.from_list(rows),
            data_collator=collate,
            callbacks=[clock],
        )
    elif options.engine in ("trl-dpo", "trl-reward"):
        from transformers import AutoTokenizer
        from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

        common |= {"max_length": options.length, "gradient_checkpointing": False}
        common |= {"learning_rate": LEARNING_RATE, "lr_scheduler_type": "constant"}
        config_of, trainer_of = (
            (DPOConfig, DPOTrainer) if options.engine == "trl-dpo" else (RewardConfig, RewardTrainer)
        )
        trainer = trainer_of(
            model=model,
            args=config_of(**common),
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(options.model),
            callbacks=[clock],
            **adapting,
        )
        collate = Tokens(trainer.data_collator)
        trainer.data_collator = collate
    else:
        from transformers import AutoTokenizer
        from trl import SFTConfig, SFTTrainer

        # TRL masks by its own column; labels are made from it.
        masked = [
            {"input_ids": row["input_ids"], "completion_mask": [int(label != -100) for label in row["labels"]]}
            for row in rows
        ]
        config = SFTConfig(
            **common, packing=True, max_length=options.length, completion_only_loss=True, gradient_checkpointing=False
        )
        trainer = SFTTrainer(
            model=model,
            args=config,
            train_dataset=Dataset.from_list(masked),
            processing_class=AutoTokenizer.from_pretrained(options.model),
            callbacks=[clock],
            **adapting,
        )
        collate = Tokens(trainer.data_collator)
        trainer.data_collator = collate
    trainer.train()
    seconds = [end - start for start, end in zip(clock.ends[:-1], clock.ends[1:], strict=True)]
    by_step = [sum(micro) for micro in zip(*[iter(collate.counts)] * options.accumulate, strict=False)]
    counts = by_step[1 : 1 + len(seconds)]
    result = {
        "tokens": counts,
        "seconds": seconds,
        "peak_rss_bytes": peak_rss_bytes(),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "pid": os.getpid(),
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
