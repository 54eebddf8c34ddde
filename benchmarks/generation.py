"""Speed and memory of the rollout engine, beside transformers on the same Hugging Face folder.

    python benchmarks/generation.py                      # random Llamas of 5M and 58M parameters, fp32 and bf16
    python benchmarks/generation.py --model FOLDER --rounds 7 --cases equal samples
    python benchmarks/generation.py --peers generate     # without transformers' continuous batching, which is slow
    python benchmarks/generation.py --peers vllm --vllm FOLDER/bin/vllm --cases equal samples

vLLM serves from an environment of its own (`benchmarks/vllm_environment.py` makes one for CPUs) and is asked over HTTP,
a request for each answer, with its prefix cache emptied before each round, as danlu's is.

All run in turns, all but vLLM in one process, and a line of JSON a case has the medians: new tokens
per second of danlu's engine and of each peer (`danlu_over_...`: how many times as fast danlu is). Tokens are greedy;
only those of the answers are counted, and every engine gets the length of each answer.

    launch    from starting `danlu generate`, or a script of five lines with transformers, to the first piece of text
    equal     1, 8 and 32 prompts of 64 tokens, answers of 128
    samples   8 prompts of 128 tokens with 8 answers each, of log-normal lengths: the workload of reinforcement learning
    ragged    128 prompts of 64 tokens, answers of 16 to 512
    exact     what `numerics: exact` costs: 8 prompts, beside the same engine without it
    formats   weights in few bits beside bfloat16: the answers to one prompt of 8 tokens, or to several (--prompts)
    scoring   the same models reading two texts of 256 tokens, as they do to score them; these tokens are counted

`samples` and `ragged` also tell how full blocks are: the most slots that a live sequence has and does not use, their
share of all, and the cache's most memory beside that of rows as long as the longest.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from danlu.core.http_client import HTTPClient
from danlu.data.tokenizer_training import train_tokenizer
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import EngineOptions
from danlu.inference.request import NewToken, Request, SamplingOptions
from danlu.models.decoder import Decoder
from danlu.models.loading import load
from danlu.models.modules import Linear
from danlu.numerics.format import WHOLE, Format
from danlu.numerics.scaled_weight import ScaledWeight
from danlu.planning.cache_memory import block_bytes

CASES = ("launch", "equal", "samples", "ragged", "exact", "formats", "scoring")
PEERS = ("generate", "continuous", "vllm")
VLLM_SETTINGS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_SERVER_DEV_MODE": "1"}
SIZES = {
    "5M": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6, "vocab_size": 4096},
    "58M": {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "vocab_size": 32000},
    "86M": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6, "vocab_size": 4096},
}
BLOCK = EngineOptions().block


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


Workload = list[tuple[list[int], int]]
"""Prompts, each with the number of tokens of its answer."""


def equal(prompts: int, tokens: int, vocab_size: int) -> Workload:
    return [(prompt, tokens) for prompt in random_prompts(prompts, 64, vocab_size)]


def samples(vocab_size: int) -> Workload:
    """Lengths with a median of 55 tokens and a mean near 71, up to 292."""
    chance = random.Random(2)
    lengths = [min(292, max(4, round(chance.lognormvariate(4.0, 0.7)))) for _ in range(64)]
    return [(random_prompts(8, 128, vocab_size)[row // 8], length) for row, length in enumerate(lengths)]


def ragged(requests: int, vocab_size: int) -> Workload:
    chance = random.Random(3)
    return [(prompt, chance.randint(16, 512)) for prompt in random_prompts(requests, 64, vocab_size)]


def random_prompts(count: int, tokens: int, vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, vocab_size, (count, tokens), generator=generator).tolist()


class Danlu:
    """The embedded engine; nothing is left in its prefix cache from one run to the next."""

    def __init__(self, model: Decoder, dtype: torch.dtype, options: EngineOptions | None = None) -> None:
        self.engine = EmbeddedEngine(model, options, dtype=dtype)
        layers = [layer.attention.cache for layer in model.layers.values()]
        self._block_bytes = block_bytes(layers, BLOCK, dtype.itemsize)
        self._runs = 0

    def __call__(self, workload: Workload) -> list[list[int]]:
        self._drop_cache()
        return [completion.tokens for completion in self.engine.generate(requests(workload))]

    def occupancy(self, workload: Workload) -> dict[str, Any]:
        """How full blocks are after each pass. Where prompts are shared, slots of shared blocks are counted once."""
        self._drop_cache()
        drawn = [0] * len(workload)

        def count(token: NewToken) -> None:
            drawn[token.number] += 1

        for request in requests(workload):
            self.engine.submit(request, count)
        most_waste, slots, used, most_blocks = 0.0, 0, 0, 0
        shared = len({tuple(prompt) for prompt, _ in workload}) < len(workload)
        while self.engine.unfinished:
            self.engine.step()
            blocks = self.engine.statistics.blocks_used
            live = [row for row, (_, length) in enumerate(workload) if 0 < drawn[row] < length]
            most_blocks = max(most_blocks, blocks)
            # The last token that was drawn is not cached yet.
            tokens = sum(len(workload[row][0]) + drawn[row] - 1 for row in live)
            if live and not shared and self.engine.statistics.waiting == 0:
                most_waste = max(most_waste, (blocks * BLOCK - tokens) / len(live))
                slots, used = slots + blocks * BLOCK, used + tokens
        longest = max(len(prompt) + length for prompt, length in workload)
        row: dict[str, Any] = {
            "cache_mib": round(most_blocks * self._block_bytes / 2**20, 1),
            "preallocated_mib": round(len(workload) * longest / BLOCK * self._block_bytes / 2**20, 1),
        }
        if slots:
            row["unused_slots_a_sequence"] = round(most_waste, 1)
            row["unused_share"] = round(1 - used / slots, 4)
        return row

    def _drop_cache(self) -> None:
        self._runs += 1
        self.engine.update(self._runs)


def requests(workload: Workload) -> list[Request]:
    greedy = SamplingOptions(temperature=0)
    return [Request(number, tuple(prompt), greedy, length) for number, (prompt, length) in enumerate(workload)]


class Generate:
    """transformers' `generate`: one batch, which runs to the end of its longest answer."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        self.model.generation_config.eos_token_id = None

    def __call__(self, workload: Workload) -> list[list[int]]:
        from transformers import StoppingCriteria, StoppingCriteriaList

        ids = torch.tensor([prompt for prompt, _ in workload], device=self.model.device)
        ends = torch.tensor([ids.shape[1] + length for _, length in workload], device=ids.device)

        class Ends(StoppingCriteria):
            def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
                return input_ids.shape[1] >= ends

        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max(length for _, length in workload),
                stopping_criteria=StoppingCriteriaList([Ends()]),
                pad_token_id=0,
            )
        answers = out[:, ids.shape[1] :].tolist()
        return [answer[:length] for answer, (_, length) in zip(answers, workload, strict=True)]


class ContinuousBatching:
    """transformers' continuous batching, with a cache as large as danlu's may grow to for the workload."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()

    def __call__(self, workload: Workload) -> list[list[int]]:
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        page = 64
        pages = sum(-(-(len(prompt) + length) // page) for prompt, length in workload)
        config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1)
        settings = ContinuousBatchingConfig(page_size=page, num_blocks=pages + 8, max_batch_tokens=1024)
        answers: dict[str, list[int]] = {}
        with self.model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=settings, warmup=False
        ) as manager:
            names = [manager.add_request(prompt, max_new_tokens=length) for prompt, length in workload]
            while len(answers) < len(workload):
                result = manager.get_result(timeout=60)
                assert result is not None and result.error is None, f"continuous batching: {result}"
                if result.is_finished():
                    answers[result.request_id] = list(result.generated_tokens)
        return [answers[name] for name in names]


class VLLM:
    """A vLLM server, which is asked for all answers at once, each in a request of its own."""

    def __init__(self, folder: Path, dtype: torch.dtype, command: Path, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        flags = ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048"]
        serve = [str(command), "serve", str(folder), "--dtype", str(dtype).removeprefix("torch."), *flags]
        with log.open("wb") as file:
            environment = {**os.environ, **VLLM_SETTINGS, "HF_HUB_OFFLINE": "1"}
            self._process = subprocess.Popen(serve, stdout=file, stderr=file, env=environment, start_new_session=True)
        self._client = HTTPClient(f"http://127.0.0.1:{port}", 600.0)
        self._model = str(folder)
        while not self._client.wait_until_healthy(2.0):
            assert self._process.poll() is None, f"vLLM did not start:\n{log.read_text(errors='replace')[-3000:]}"

    def __call__(self, workload: Workload) -> list[list[int]]:
        self._client.post("/reset_prefix_cache")
        with ThreadPoolExecutor(len(workload)) as pool:
            return list(pool.map(self._answer, workload))

    def _answer(self, prompt_and_length: tuple[list[int], int]) -> list[int]:
        prompt, length = prompt_and_length
        body = {"model": self._model, "prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True}
        answer = self._client.post("/v1/completions", {**body, "return_token_ids": True})
        tokens: list[int] = answer["choices"][0]["token_ids"]
        return tokens

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


Engine = Callable[[Workload], list[list[int]]]


def compare(
    case: str, engines: dict[str, Engine], workload: Workload, rounds: int, *, counted: int | None = None, **also: Any
) -> None:
    """Runs the engines in turn and prints medians; ratios and agreement are the first's with each other one.

    counted: the tokens of a run; by default those of the answers.
    """
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    answers: dict[str, list[list[int]]] = {}
    for turn in range(rounds + 1):  # the first turn warms up
        for name, run in engines.items():
            start = time.perf_counter()
            answers[name] = run(workload)
            if turn:
                seconds[name].append(time.perf_counter() - start)
    tokens = counted or sum(length for _, length in workload)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    first, *others = engines
    for name in engines:
        assert [len(answer) for answer in answers[name]] == [length for _, length in workload], f"{name} stopped early"
    row = {"case": case, "tokens": tokens}
    row |= {f"{name}_tokens_per_s": round(tokens / taken, 1) for name, taken in medians.items()}
    for name in others:
        pairs = [
            a == b for ours, theirs in zip(answers[first], answers[name], strict=True)
            for a, b in zip(ours, theirs, strict=True)
        ]  # fmt: skip
        row[f"{first}_over_{name}"] = round(medians[name] / medians[first], 2)
        row[f"agree_with_{name}"] = round(sum(pairs) / len(pairs), 3)
    print(json.dumps(row | also | {"rounds": rounds, "threads": torch.get_num_threads()}), flush=True)


def run_folder(name: str, folder: Path, dtype: torch.dtype, arguments: argparse.Namespace) -> None:
    model = load(folder, dtype=dtype, device=arguments.device)
    vocab_size = model.config.vocab_size
    danlu = Danlu(model, dtype)
    engines: dict[str, Engine] = {"danlu": danlu}
    if "generate" in arguments.peers:
        engines["generate"] = Generate(folder, dtype, arguments.device)
    if "continuous" in arguments.peers:
        engines["continuous"] = ContinuousBatching(folder, dtype, arguments.device)
    label = f"{name} {str(dtype).removeprefix('torch.')}"
    if "vllm" not in arguments.peers:
        run_cases(label, engines, danlu, vocab_size, arguments)
        return
    with tempfile.TemporaryDirectory() as scratch:
        vllm = engines["vllm"] = VLLM(folder, dtype, arguments.vllm, Path(scratch) / "vllm.log")
        try:
            run_cases(label, engines, danlu, vocab_size, arguments)
        finally:
            vllm.close()


def run_cases(
    label: str, engines: dict[str, Engine], danlu: Danlu, vocab_size: int, arguments: argparse.Namespace
) -> None:
    if "equal" in arguments.cases:
        for prompts in (1, 8, 32):
            workload = equal(prompts, arguments.new_tokens, vocab_size)
            compare(f"{label} equal {prompts}", engines, workload, arguments.rounds)
    if "samples" in arguments.cases:
        workload = samples(vocab_size)
        compare(f"{label} 8 x 8 samples", engines, workload, arguments.rounds, **danlu.occupancy(workload))
    if "ragged" in arguments.cases:
        workload = ragged(arguments.requests, vocab_size)
        case = f"{label} ragged {arguments.requests}"
        compare(case, engines, workload, arguments.rounds, **danlu.occupancy(workload))


def run_exact(name: str, folder: Path, dtype: torch.dtype, arguments: argparse.Namespace) -> None:
    """The exact engine and the fast one in turns. Exact products are process-wide, so each round is a process."""
    seconds: dict[str, list[float]] = {"fast": [], "exact": []}
    for _ in range(arguments.rounds):
        for numerics, taken in seconds.items():
            command = [sys.executable, __file__, "--time-engine", numerics, "--model", str(folder)]
            command += ["--dtypes", str(dtype).removeprefix("torch."), "--device", arguments.device]
            command += ["--new-tokens", str(arguments.new_tokens), "--threads", str(torch.get_num_threads())]
            taken.append(float(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    medians = {numerics: statistics.median(taken) for numerics, taken in seconds.items()}
    row = {"case": f"{name} {str(dtype).removeprefix('torch.')} exact 8", "rounds": arguments.rounds}
    row |= {
        f"{numerics}_tokens_per_s": round(8 * arguments.new_tokens / taken, 1) for numerics, taken in medians.items()
    }
    print(json.dumps(row | {"exact_takes": round(medians["exact"] / medians["fast"], 2)}), flush=True)


def engines_of_formats(folder: Path, device: str) -> tuple[dict[str, Engine], int]:
    """Models of one folder with weights in bfloat16, in int8 by rows and in int4 by groups, and products in int8; and
    their vocabulary."""
    dtype = torch.bfloat16
    forms = {"int8": Format("int8", (1, WHOLE), narrow_range=True), "int4": Format("int4", (1, 32), narrow_range=True)}
    engines: dict[str, Engine] = {"bf16": Danlu(load(folder, dtype=dtype, device=device), dtype)}
    for kind, form in forms.items():
        model = load(folder, dtype=dtype, device=device)
        for linear in [each for each in model.layers.modules() if isinstance(each, Linear)]:
            linear.store(ScaledWeight.quantize(linear.stored_weight, form))
        engines[kind] = Danlu(model, dtype)
    model = load(folder, dtype=dtype, device=device)
    engines["int8_products"] = Danlu(model, dtype, EngineOptions(precision="int8"))
    return engines, model.config.vocab_size


def compare_formats(name: str, folder: Path, arguments: argparse.Namespace) -> None:
    """`formats` and `scoring`."""
    engines, vocab_size = engines_of_formats(folder, arguments.device)
    if "formats" in arguments.cases:
        for count in arguments.prompts:
            asked = [(prompt, arguments.new_tokens) for prompt in random_prompts(count, 8, vocab_size)]
            compare(f"{name} formats answer {count}", engines, asked, arguments.rounds)
    if "scoring" in arguments.cases:
        read = [(prompt, 1) for prompt in random_prompts(2, 256, vocab_size)]
        compare(f"{name} scoring", engines, read, arguments.rounds, counted=sum(len(prompt) for prompt, _ in read))


def time_engine(arguments: argparse.Namespace) -> None:
    """Prints the seconds that one engine takes for `equal` with 8 prompts: the shorter of two runs behind a first."""
    dtype = getattr(torch, arguments.dtypes[0])
    model = load(arguments.model, dtype=dtype, device=arguments.device)
    danlu = Danlu(model, dtype, EngineOptions(exact=arguments.time_engine == "exact"))
    workload = equal(8, arguments.new_tokens, model.config.vocab_size)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        danlu(workload)
        seconds.append(time.perf_counter() - start)
    print(min(seconds[1:]))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder instead of the random ones")
    parser.add_argument("--sizes", nargs="+", default=["5M", "58M"], choices=[*SIZES])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=CASES)
    parser.add_argument("--peers", nargs="*", default=["generate", "continuous"], choices=PEERS)
    parser.add_argument("--vllm", type=Path, help="the program of vLLM, for --peers vllm")
    parser.add_argument("--new-tokens", type=int, default=128, help="of `equal`, `exact` and `formats`")
    parser.add_argument("--prompts", nargs="+", type=int, default=[1], help="of `formats`, asked at a time")
    parser.add_argument("--requests", type=int, default=128, help="of `ragged`")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--time-engine", choices=["fast", "exact"], help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if "vllm" in arguments.peers and arguments.vllm is None:
        parser.error("--peers vllm needs --vllm, the program in an environment of vLLM")
    torch.set_num_threads(arguments.threads)
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # of the processes that are launched
    if arguments.time_engine:
        time_engine(arguments)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folders = {}
        if arguments.model is not None:
            folders[arguments.model.name] = arguments.model
        else:
            for size in arguments.sizes:
                folders[size] = Path(scratch) / size
                random_llama(folders[size], size)
        for name, folder in folders.items():
            if "launch" in arguments.cases:
                compare_launch(name, folder, arguments.rounds, arguments.device)
            if {"formats", "scoring"} & {*arguments.cases}:
                compare_formats(name, folder, arguments)
            if {"formats", "scoring"} >= {*arguments.cases}:
                continue
            for dtype in (getattr(torch, dtype) for dtype in arguments.dtypes):
                run_folder(name, folder, dtype, arguments)
                if "exact" in arguments.cases:
                    run_exact(name, folder, dtype, arguments)


if __name__ == "__main__":
    main()
