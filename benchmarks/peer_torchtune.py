"""torchtune's LoRA, one run, in its own environment: prints what each step took as JSON, like peers.py.

    python benchmarks/peer_torchtune.py --model FOLDER --data ROWS.jsonl --steps N [--dora]

Its modules put together as its recipe lora_finetune_single_device does: bf16 weights, packed rows with its block mask,
chunked cross-entropy, adapters of rank 8 on all linear layers but the head, fused AdamW. The weights are those of the
other engines, converted by its own function. Its 4-bit base needs a torchao of its time and is left out.

The environment: `pip install torch torchtune==0.6.1 torchao==0.15.0`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dora", action="store_true")
    options = parser.parse_args()

    import torch

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    from safetensors.torch import load_file
    from torchtune.data import padded_collate_packed
    from torchtune.datasets import PackedDataset
    from torchtune.models.convert_weights import hf_to_tune
    from torchtune.models.llama3 import lora_llama3
    from torchtune.modules.loss import CEWithChunkedOutputLoss
    from torchtune.modules.peft import get_adapter_params, set_trainable_params

    config = json.loads((Path(options.model) / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = config["hidden_size"]
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    model = lora_llama3(
        ["q_proj", "k_proj", "v_proj", "output_proj"],
        apply_lora_to_mlp=True,
        vocab_size=config["vocab_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        embed_dim=width,
        max_seq_len=options.length,
        intermediate_dim=config["intermediate_size"],
        rope_base=10_000,
        lora_rank=8,
        lora_alpha=16,
        use_dora=options.dora,
    )
    torch.set_default_dtype(previous)
    weights = load_file(Path(options.model) / "model.safetensors")
    tuned = hf_to_tune(weights, num_heads=heads, num_kv_heads=kv_heads, dim=width)
    lost = model.load_state_dict({name: value.bfloat16() for name, value in tuned.items()}, strict=False)
    assert not lost.unexpected_keys and all("lora" in name or "magnitude" in name for name in lost.missing_keys), lost
    if options.dora:
        for module in model.modules():
            if hasattr(module, "initialize_dora_magnitude"):
                module.initialize_dora_magnitude()
    adapter = get_adapter_params(model)
    set_trainable_params(model, adapter)
    loss_of = CEWithChunkedOutputLoss()
    model.set_num_output_chunks(loss_of.num_output_chunks)
    optimizer = torch.optim.AdamW(adapter.values(), lr=2e-4, fused=True)

    class Rows(torch.utils.data.Dataset[dict[str, Any]]):
        def __init__(self) -> None:
            with open(options.data) as lines:
                self.rows = [json.loads(line) for line in lines]

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"tokens": self.rows[index]["input_ids"], "labels": self.rows[index]["labels"]}

    packs = PackedDataset(Rows(), max_seq_len=options.length)
    ignored = torch.full((1, 1), loss_of.ignore_index)
    counts, ends, losses = [], [], []
    for step in range(options.steps):
        batch = padded_collate_packed([packs[step]])
        real = int((packs[step]["tokens"] != packs.padding_idx).sum())
        labels = batch.pop("labels")
        labels = torch.hstack((labels[..., 1:], ignored))
        loss = loss_of(model(**batch), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(adapter.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        counts.append(real)
        losses.append(loss.item())
        ends.append(time.perf_counter())
    with open("/proc/self/status") as status:
        peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    seconds = [end - start for start, end in itertools.pairwise(ends)]
    print("RESULT " + json.dumps({"tokens": counts[1:], "seconds": seconds, "peak_rss_bytes": peak, "losses": losses}))


if __name__ == "__main__":
    main()
