"""Decoding speed against transformers' `generate` on the same Hugging Face folder, interleaved in one process.

    python benchmarks/decode.py                      # random Llamas of 5M and 58M parameters, fp32 and bf16
    python benchmarks/decode.py --model FOLDER --rounds 7

Prints one JSON object a case: new tokens per second of both (medians over rounds that take turns), their ratio, and how
many greedy tokens agree. `batch 1` is one prompt of 64 tokens; `batch 16` is 16 of them, all answered at full length;
`ragged 16` is 16 whose answers end at different lengths, the workload of reinforcement learning: both engines are told
where each answer ends, by a stop token. `launch` is the time from starting `danlu generate`, or a script of five lines
with transformers, to the first piece of text.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from danlu.data.tokenizer_training import train_tokenizer
from danlu.models.loading import load
from danlu.rollout.embedded import EmbeddedEngine
from danlu.rollout.request import Request, SamplingOptions

PROMPT_TOKENS = 64
SIZES = {
    "5M": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6, "vocab_size": 4096},
    "58M": {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "vocab_size": 32000},
}


LAUNCH = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).to(sys.argv[2])
inputs = tokenizer("Once upon a time", return_tensors="pt").to(sys.argv[2])
model.generate(**inputs, do_sample=False, max_new_tokens=64, streamer=TextStreamer(tokenizer, skip_prompt=True))
"""


def random_llama(folder: Path, size: str) -> None:
    """A Llama of this size with random weights, saved by transformers, and a tokenizer whose words are letters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        **SIZES[size],
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        initializer_range=0.1,  # wide, so that greedy text does not fall into a loop at once
        bos_token_id=1,
        eos_token_id=2,
    )
    train_tokenizer(["Once upon a time"], 300, folder)
    LlamaForCausalLM(config).save_pretrained(folder)


def first_text(command: list[str]) -> float:
    """Seconds from the launch of a command to the first byte on its stdout; the rest is not waited for."""
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        first_byte = process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.kill()
    assert first_byte, f"{command[:4]} wrote nothing"
    return seconds


def compare_launch(name: str, folder: Path, rounds: int, device: str) -> None:
    ours = [sys.executable, "-m", "danlu", "generate", str(folder), "--prompt", "Once upon a time"]
    commands = {
        "danlu": [*ours, "--max-new-tokens", "64", "--temperature", "0", "--device", device],
        "transformers": [sys.executable, "-c", LAUNCH, str(folder), device],
    }
    seconds: dict[str, list[float]] = {engine: [] for engine in commands}
    for turn in range(rounds + 1):  # the first turn fills the page cache
        for engine, command in commands.items():
            taken = first_text(command)
            if turn:
                seconds[engine].append(taken)
    medians = {engine: statistics.median(taken) for engine, taken in seconds.items()}
    row = {
        "case": f"{name} launch to first text",
        "danlu_s": round(medians["danlu"], 2),
        "transformers_s": round(medians["transformers"], 2),
        "ratio": round(medians["transformers"] / medians["danlu"], 2),
        "rounds": rounds,
    }
    print(json.dumps(row), flush=True)


def compare(name: str, ours: Callable[[], list[list[int]]], theirs: Callable[[], list[list[int]]], rounds: int) -> None:
    """Runs the two in turn and prints medians. Each returns the new tokens of every prompt."""
    seconds: dict[str, list[float]] = {"danlu": [], "transformers": []}
    answers: dict[str, list[list[int]]] = {}
    for turn in range(rounds + 1):  # the first turn warms up
        for engine, run in (("danlu", ours), ("transformers", theirs)):
            start = time.perf_counter()
            answers[engine] = run()
            if turn:
                seconds[engine].append(time.perf_counter() - start)
    counts = {engine: sum(map(len, tokens)) for engine, tokens in answers.items()}
    speed = {engine: counts[engine] / statistics.median(taken) for engine, taken in seconds.items()}
    pairs = [
        pair
        for one, other in zip(answers["danlu"], answers["transformers"], strict=True)
        for pair in zip(one, other, strict=False)
    ]
    row = {
        "case": name,
        "danlu_tokens_per_s": round(speed["danlu"], 1),
        "transformers_tokens_per_s": round(speed["transformers"], 1),
        "ratio": round(speed["danlu"] / speed["transformers"], 2),
        "new_tokens": counts["danlu"],
        "agree": round(sum(a == b for a, b in pairs) / len(pairs), 3),
        "rounds": rounds,
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(row), flush=True)


def run_folder(name: str, folder: Path, dtype: torch.dtype, new_tokens: int, rounds: int, device: str) -> None:
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    model = load(folder, dtype=dtype, device=device)
    options = SamplingOptions(temperature=0)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, model.config.vocab_size, (16, PROMPT_TOKENS), generator=generator).tolist()

    def ours(prompts: list[list[int]], stops: list[int]) -> list[list[int]]:
        requests = [
            Request(number, tuple(prompt), options, new_tokens, stop_ids=frozenset(stops))
            for number, prompt in enumerate(prompts)
        ]
        return [answer.tokens for answer in EmbeddedEngine(model).generate(requests)]

    def theirs(prompts: list[list[int]], stops: list[int]) -> list[list[int]]:
        ids = torch.tensor(prompts, device=device)
        with torch.inference_mode():
            out = peer.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new_tokens,
                eos_token_id=stops or None,
                pad_token_id=0,
            )
        answers = out[:, PROMPT_TOKENS:].tolist()
        ends = [next((i + 1 for i, token in enumerate(answer) if token in stops), len(answer)) for answer in answers]
        return [answer[:end] for answer, end in zip(answers, ends, strict=True)]

    peer.generation_config.eos_token_id = None
    label = f"{name} {str(dtype).removeprefix('torch.')}"
    compare(f"{label} batch 1", lambda: ours(prompts[:1], []), lambda: theirs(prompts[:1], []), rounds)
    compare(f"{label} batch 16", lambda: ours(prompts, []), lambda: theirs(prompts, []), rounds)
    free = ours(prompts, [])
    # One token of each answer, at places spread over the length, ends it (and whoever else says it).
    stops = [answer[new_tokens * (row + 1) // 20] for row, answer in enumerate(free)]
    compare(f"{label} ragged 16", lambda: ours(prompts, stops), lambda: theirs(prompts, stops), rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder instead of the random ones")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, help="by default as many as there are cores")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
        os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # of the processes that are launched
    with tempfile.TemporaryDirectory() as scratch:
        folders = {}
        if arguments.model is not None:
            folders[arguments.model.name] = arguments.model
        else:
            for size in SIZES:
                folders[size] = Path(scratch) / size
                random_llama(folders[size], size)
        for name, folder in folders.items():
            compare_launch(name, folder, arguments.rounds, arguments.device)
            for dtype in arguments.dtypes:
                run_folder(
                    name, folder, getattr(torch, dtype), arguments.new_tokens, arguments.rounds, arguments.device
                )


if __name__ == "__main__":
    main()
