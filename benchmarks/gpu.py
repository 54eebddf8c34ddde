"""Ten minutes on a machine with a GPU: is everything right there, and how fast is it.

    python benchmarks/gpu.py                     all blocks, one after the other, each in a process with a time limit
    python benchmarks/gpu.py --only preflight attention
    python benchmarks/gpu.py --tiny --device cpu   small sizes, to try the script itself

Each measurement is a line of JSON in OUT/gpu-BLOCK.jsonl ($OUT, or --out) as soon as it is made, so that a block that
fails, or is ended at its limit, leaves what it had. Next to measured steps stands what `danlu plan` expects of them on
this card; (!) marks errors beyond 10 % of the bytes or 20 % of the speed. Needs torch and the packages that `preflight`
names; it says which are missing, and takes them from wheels/ (see `make gpu-wheels`) on a machine without network.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
WHEELS, INSTALLED = ROOT / "wheels", ROOT / ".gpu-packages"

# What is imported, and where it comes from. torch brings numpy only if asked to.
NEEDED = {
    "torch": "torch",
    "numpy": "numpy",
    "pydantic": "pydantic",
    "pydantic_core": "pydantic-core",
    "annotated_types": "annotated-types",
    "typing_inspection": "typing-inspection",
    "typing_extensions": "typing-extensions",
    "yaml": "pyyaml",
    "safetensors": "safetensors",
    "pytest": "pytest",
    "pluggy": "pluggy",
    "iniconfig": "iniconfig",
    "packaging": "packaging",
    "pygments": "pygments",
}
OPTIONAL = {
    "bitsandbytes": "bitsandbytes",
    "triton": "triton (with torch: for compiled code and flex attention)",
    "transformers": "transformers (what `peers` is measured beside)",
    "peft": "peft (likewise)",
    "tokenizers": "tokenizers (of `training`, which runs `danlu train`)",
}

LIMITS_S = {
    "preflight": 30,
    "tests": 110,
    "adapters": 50,
    "full": 60,
    "peers": 50,
    "experts": 35,
    "attention": 35,
    "loss": 15,
    "optimizers": 20,
    "decoding": 40,
    "training": 150,
}
"""Seconds a block may take, in the order in which they run; ten minutes together."""

Write = Callable[..., None]


# ── packages ──


def missing(packages: dict[str, str]) -> list[str]:
    return [name for module, name in packages.items() if importlib.util.find_spec(module) is None]


def bring() -> list[str]:
    """Takes what is missing out of wheels/, which pip need not be there for. Returns what is still missing."""
    sys.path.insert(0, str(INSTALLED))
    wanted = set(missing(NEEDED)) | set(missing(OPTIONAL))
    for wheel in sorted(WHEELS.glob("*.whl")):
        name = wheel.name.split("-")[0].replace("_", "-").lower()
        if name in {package.lower() for package in wanted} and fits(wheel.name):
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(INSTALLED)
    importlib.invalidate_caches()
    return missing(NEEDED)


def fits(wheel: str) -> bool:
    """Whether a wheel is for this Python: `pydantic_core-2.50.4-cp312-cp312-manylinux_2_17_x86_64.whl`."""
    python, abi = wheel.removesuffix(".whl").split("-")[-3:-1]
    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return any(tag.startswith("py") or tag == version for tag in python.split(".")) or abi == "abi3"


# ── measuring ──


def wait(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], Any], device: Any, rounds: int = 5) -> float:
    """The median time of a call, the first left out."""
    taken = []
    for number in range(rounds + 1):
        wait(device)
        start = time.perf_counter()
        work()
        wait(device)
        if number:
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)


@contextmanager
def peak(device: Any) -> Iterator[dict[str, int]]:
    """The most bytes that tensors took within it; 0 on a CPU."""
    import torch

    peak = {"bytes": 0}
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    yield peak
    if device.type == "cuda":
        peak["bytes"] = torch.cuda.max_memory_allocated(device)


def config_values_of(size: str, layers: int, length: int) -> dict[str, Any]:
    """The config.json of Llama 3's 8 billion parameters with so many layers; tiny for trying."""
    shapes = {
        "8B": {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
        "tiny": {
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 300,
        },
    }[size]
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "max_position_embeddings": max(length, 64),
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        **shapes,
    }


def config_of(size: str, layers: int, length: int) -> Any:
    from danlu.models.hf_config import read_config_values

    return read_config_values(config_values_of(size, layers, length))


def packs_of(count: int, length: int, vocabulary: int) -> list[Any]:
    import numpy as np

    from danlu.core.types import Pack, Sample

    chance = np.random.default_rng(0)
    packs = []
    for number in range(count):
        weights = np.ones(length, dtype=np.float32)
        weights[0] = 0
        tokens = chance.integers(3, vocabulary, length).astype(np.int32)
        packs.append(Pack((Sample(tokens, weights, f"pack {number}"),)))
    return packs


def recipe_of(**changes: Any) -> Any:
    """A recipe as far as its step is planned from it, without the rules between keys."""
    from danlu.recipe import Recipe

    values: dict[str, Any] = {
        "stage": "pretrain",
        "model": {"config": {}, "tokenizer": "none"},
        "data": {"train": [{"path": "none.jsonl"}], "max_length": 4096},
        "batch": {"sequences": 1, "micro": 1},
        "steps": 1,
        "output": "none",
        "precision": "bf16",
    }
    return Recipe.model_validate({**values, **changes})


def trained_in_full(length: int) -> Any:
    """The recipe of a step of two micro-batches of one packed sequence, with all weights trained by AdamW."""
    return recipe_of(
        optimizer={"kind": "adamw"},
        batch={"sequences": 2, "micro": 1},
        data={"max_length": length, "train": [{"path": "none.jsonl"}]},
    )


def frozen_with_adapter(config: Any, device: Any, adapter: Any, quantization: Any) -> Any:
    """(model, adapters): random weights in bf16 or packed, one matrix in memory at a time, and LoRA on top."""
    import torch
    from torch.nn import Parameter

    from danlu.assembly.frozen_base import adapters_of, quantize_weight
    from danlu.models.loading import meta_decoder

    model = meta_decoder(config)
    adapters = adapters_of(model, device=device)
    adapters.add("default", adapter)
    linears = {site.name: site.module for site in adapters.sites if site.group in ("attention", "mlp")}
    for name, parameter in adapters.base_parameters().items():
        owner, _, attribute = name.rpartition(".")
        if parameter.ndim < 2:
            value = torch.ones(parameter.shape, device=device)
        else:
            value = torch.empty(parameter.shape, device=device, dtype=torch.bfloat16).normal_(std=0.02)
        if quantization is not None and owner in linears:
            linears[owner].store(quantize_weight(value, quantization, name))
        else:
            setattr(model.get_submodule(owner), attribute, Parameter(value, requires_grad=False))
    adapters.finish_loading()
    adapters.train_only("default")
    return model, adapters


def random_model(config: Any, device: Any) -> Any:
    """A decoder in float32 whose weights are drawn on the device, which takes no time there."""
    import torch

    from danlu.models.loading import build

    model = build(config, device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02) if parameter.ndim > 1 else parameter.fill_(1.0)
    return model


# ── blocks ──


def preflight(write: Write, device: Any, tiny: bool) -> None:
    """What there is, and how fast it multiplies, copies and sends."""
    import torch

    write(
        "packages",
        python=sys.version.split()[0],
        torch=torch.__version__,
        cuda=torch.version.cuda,
        missing_optional=missing(OPTIONAL),
        taken_from_wheels=sorted(path.name for path in INSTALLED.iterdir()) if INSTALLED.is_dir() else [],
    )
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        free, whole = torch.cuda.mem_get_info(device)
        write(
            "device",
            name=properties.name,
            capability=list(torch.cuda.get_device_capability(device)),
            free_bytes=free,
            whole_bytes=whole,
            devices=torch.cuda.device_count(),
        )
    from danlu.models.attention_kernels import kernels_of

    kernels = kernels_of(device)
    write(
        "attention kernels",
        varlen=kernels.varlen is not None,
        flex=kernels.flex is not None,
        tiles=kernels.tiles is not None,
    )
    try:
        from danlu.numerics.four_bit_weight import FourBitWeight

        packed = FourBitWeight.quantize(torch.randn(256, 256, device=device))
        write("nf4", works=bool(packed.dense().isfinite().all()))
    except Exception as error:
        write("nf4", works=False, error=repr(error))
    size = 256 if tiny else 8192
    for name in ("float32", "bfloat16", "float16"):
        a, b = (torch.randn(size, size, device=device, dtype=getattr(torch, name)) for _ in range(2))
        taken = seconds(lambda a=a, b=b: a @ b, device)
        write("product", dtype=name, size=size, flops=2 * size**3 / taken)
    count = 2**20 if tiny else 2**30
    source, target = (torch.empty(count, dtype=torch.uint8, device=device) for _ in range(2))
    write("copy within the device", bytes_per_s=2 * count / seconds(lambda: target.copy_(source), device))
    if device.type == "cuda":
        host = torch.empty(count // 4, dtype=torch.uint8, pin_memory=True)
        part = target[: count // 4]
        write("host to device", bytes_per_s=len(part) / seconds(lambda: part.copy_(host, non_blocking=True), device))
        write("device to host", bytes_per_s=len(part) / seconds(lambda: host.copy_(part, non_blocking=True), device))


def tests(write: Write, device: Any, tiny: bool) -> None:
    """tests/gpu, each file in a process of its own and all at once: most of their time goes into compiling."""
    files = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    threads = str(max(1, (os.cpu_count() or 1) // len(files)))  # each process would take all cores for itself
    environ = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": threads, "OMP_NUM_THREADS": threads}
    if device.type == "cpu":
        environ["DANLU_GPU_TESTS"] = "cpu"
    start = time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider", "-rfE", "--tb=short"]
    processes = {
        file: subprocess.Popen(
            [*command, "--durations=5", "--show-capture=no", "--confcutdir", "tests/gpu", str(file)],
            cwd=ROOT,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for file in (files[:1] if tiny else files)
    }
    until = start + LIMITS_S["tests"] - 10

    def output_of(process: subprocess.Popen[str]) -> list[str]:
        try:
            return process.communicate(timeout=max(1.0, until - time.perf_counter()))[0].splitlines()
        except subprocess.TimeoutExpired:
            process.kill()
            return [*process.communicate()[0].splitlines(), "ended at the limit of the tests"]

    with ThreadPoolExecutor(len(processes)) as pool:
        running = {pool.submit(output_of, process): file for file, process in processes.items()}
        for ended in as_completed(running):
            file, lines = running[ended], ended.result()
            passed = processes[file].returncode == 0
            write(
                file.name,
                passed=passed,
                summary=lines[-1] if lines else "",
                failed=[line for line in lines if line.startswith(("FAILED", "ERROR"))],
                slowest=[line for line in lines if " call " in line or " setup " in line][:5],
                s=round(time.perf_counter() - start, 1),
                output=None if passed else "\n".join(lines)[-12000:],
            )


def adapters(write: Write, device: Any, tiny: bool) -> None:
    """LoRA and QLoRA on 8B shapes with random weights at 4096 tokens, with each recomputation: speed, and memory
    beside what was predicted."""
    import torch
    from planned_figures import planned_figures

    from danlu.memory.recompute import plan_of, unwrap_layer, wrap
    from danlu.optim.build import build
    from danlu.recipe import sections
    from danlu.stages.learner import DecoderLearner
    from danlu.training.step import accumulate

    length, layers = (64, 2) if tiny else (4096, 32)
    config = config_of("tiny" if tiny else "8B", layers, length)
    section = sections.Lora(rank=16)
    packs = packs_of(1, length, config.vocab_size)
    for name, quantization in (("lora", None), ("qlora", sections.Nf4())):
        start = time.perf_counter()
        model, made = frozen_with_adapter(config, device, section, quantization)
        wait(device)
        write("made", kind=name, s=round(time.perf_counter() - start, 2))
        compute = DecoderLearner(model, model, device, torch.bfloat16, 1, adapters=made)
        for kind in ("full", "selective", "none"):
            wrap(model, plan_of(sections.Recompute(kind=kind), model))
            optimizer = build(model.named_parameters(), sections.AdamW(learning_rate=1e-4))
            recipe = recipe_of(
                adapter=section,
                quantization=quantization,
                memory={"recompute": {"kind": kind}},
                data={"max_length": length, "train": [{"path": "none.jsonl"}]},
            )
            predicted = planned_figures(recipe, config, device)

            def step(compute: Any = compute, optimizer: Any = optimizer) -> None:
                accumulate(compute, packs, step=1, clip=1.0)
                optimizer.step(free_gradients=True)
                optimizer.zero_grad()

            try:
                with peak(device) as most:
                    taken = seconds(step, device, rounds=1 if tiny else 3)
            except torch.OutOfMemoryError as error:
                write("step", kind=name, recompute=kind, out_of_memory=str(error)[:300], **predicted)
            else:
                write(
                    "step",
                    kind=name,
                    recompute=kind,
                    tokens_per_second=length / taken,
                    peak_bytes=most["bytes"],
                    **predicted,
                )
            for layer in model.layers.values():
                unwrap_layer(layer)
            model.segments = ()
            optimizer.zero_grad()
        del model, made, compute


def full(write: Write, device: Any, tiny: bool) -> None:
    """Four layers of 8B trained in full, eager and compiled, and what the time of a step goes into."""
    import torch
    from planned_figures import planned_figures
    from torch.profiler import ProfilerActivity, profile

    from danlu.optim.build import build
    from danlu.planning.flops import DecoderFlops
    from danlu.recipe import sections
    from danlu.stages.learner import DecoderLearner
    from danlu.training.step import accumulate

    length, layers = (64, 2) if tiny else (4096, 4)
    config = config_of("tiny" if tiny else "8B", layers, length)
    packs = packs_of(2, length, config.vocab_size)
    predicted = planned_figures(trained_in_full(length), config, device)
    model = random_model(config, device)
    for compiled in (False, True) if device.type == "cuda" else (False,):
        forward = model.compiled() if compiled else model
        compute = DecoderLearner(model, forward, device, torch.bfloat16, 1)
        optimizer = build(model.named_parameters(), sections.AdamW(learning_rate=1e-4))

        def step(compute: Any = compute, optimizer: Any = optimizer) -> None:
            accumulate(compute, packs, step=1, clip=1.0)
            optimizer.step(free_gradients=True)
            optimizer.zero_grad()

        start = time.perf_counter()
        step()
        wait(device)
        first = time.perf_counter() - start
        with peak(device) as most:
            taken = seconds(step, device, rounds=1 if tiny else 4)
        flops = DecoderFlops(config).training([length] * len(packs), length * len(packs))
        write(
            "step",
            compiled=compiled,
            first_s=round(first, 2),
            tokens_per_second=length * len(packs) / taken,
            flops=flops / taken,
            peak_bytes=most["bytes"],
            **({} if compiled else predicted),  # eager steps are planned
        )
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        with profile(activities=activities) as seen:
            step()
            wait(device)
        key = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
        rows = sorted(seen.key_averages(), key=lambda one: getattr(one, key, 0), reverse=True)[:25]
        write(
            "profile",
            compiled=compiled,
            us={row.key[:80]: round(getattr(row, key, 0)) for row in rows},
            calls={row.key[:80]: row.count for row in rows},
        )
        del compute, optimizer


def peers(write: Write, device: Any, tiny: bool) -> None:
    """transformers with PEFT on what `adapters` and `full` train: the same shapes, tokens and kinds of step.

    Weights of a LoRA base are bfloat16; in full they are float32 under autocast, as danlu has them, or bfloat16.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    length = 64 if tiny else 4096

    def model_of(layers: int, dtype: Any) -> Any:
        values = config_values_of("tiny" if tiny else "8B", layers, length)
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                return LlamaForCausalLM._from_config(LlamaConfig(**values), attn_implementation="sdpa")
        finally:
            torch.set_default_dtype(torch.float32)

    model = model_of(2 if tiny else 32, torch.bfloat16)
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    model.enable_input_require_grads()
    for kind in ("full", "none"):
        if kind == "full":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            model.gradient_checkpointing_disable()
        peer_steps(write, model, length, device, tiny, micro_batches=1, kind="lora", recompute=kind)
    del model
    for dtype in (torch.float32, torch.bfloat16):
        model = model_of(2 if tiny else 4, dtype)
        peer_steps(write, model, length, device, tiny, micro_batches=2, kind="full")
        del model


def experts(write: Write, device: Any, tiny: bool) -> None:
    """Four layers with 64 experts in the widths of Qwen3-30B-A3B, trained in full, beside transformers'."""
    import torch
    from planned_figures import planned_figures

    from danlu.models.hf_config import read_config_values
    from danlu.optim.build import build
    from danlu.recipe import sections
    from danlu.stages.learner import DecoderLearner
    from danlu.training.step import accumulate

    length = 64 if tiny else 4096
    values = {
        "model_type": "qwen3_moe",
        "hidden_size": 64 if tiny else 2048,
        "intermediate_size": 64 if tiny else 6144,
        "moe_intermediate_size": 32 if tiny else 768,
        "num_hidden_layers": 2 if tiny else 4,
        "num_attention_heads": 4 if tiny else 32,
        "num_key_value_heads": 4,
        "head_dim": 16 if tiny else 128,
        "num_experts": 8 if tiny else 64,
        "num_experts_per_tok": 2 if tiny else 8,
        "norm_topk_prob": True,
        "vocab_size": 300 if tiny else 32000,
        "max_position_embeddings": length,
        "tie_word_embeddings": False,
    }
    config = read_config_values(values)
    model = random_model(config, device)
    learner = DecoderLearner(model, model, device, torch.bfloat16, 1)
    optimizer = build(model.named_parameters(), sections.AdamW(learning_rate=1e-4))
    packs = packs_of(2, length, config.vocab_size)

    def step(learner: Any = learner, optimizer: Any = optimizer) -> None:
        accumulate(learner, packs, step=1, clip=1.0)
        optimizer.step(free_gradients=True)
        optimizer.zero_grad()

    with peak(device) as most:
        taken = seconds(step, device, rounds=1 if tiny else 4)
    predicted = planned_figures(trained_in_full(length), config, device)
    write("step", engine="danlu", tokens_per_second=2 * length / taken, peak_bytes=most["bytes"], **predicted)
    del model, learner, optimizer, step
    from transformers import AutoConfig, AutoModelForCausalLM

    for dtype in (torch.float32, torch.bfloat16):
        with torch.device(device):
            peer = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values), attn_implementation="sdpa")
        peer.set_experts_implementation("grouped_mm")
        peer_steps(write, peer.to(dtype), length, device, tiny, micro_batches=2, engine="transformers grouped_mm")
        del peer


def peer_steps(
    write: Write, model: Any, length: int, device: Any, tiny: bool, *, micro_batches: int, **told: Any
) -> None:
    """Writes the speed and memory of transformers' training steps: under autocast where weights are float32."""
    import torch

    model.train()
    trained = [each for each in model.parameters() if each.requires_grad]
    dtype = model.lm_head.weight.dtype
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    tokens = torch.randint(3, 200, (1, length), device=device)

    def step() -> None:
        for _ in range(micro_batches):
            with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.float32):
                loss = model(tokens, labels=tokens, use_cache=False).loss / micro_batches
            loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    told["weights"] = str(dtype).removeprefix("torch.")
    try:
        with peak(device) as most:
            taken = seconds(step, device, rounds=1 if tiny else 4)
    except Exception as error:  # out of memory, or an operator that its kernels do not have
        write("step", **told, error=repr(error)[:500])
    else:
        write("step", **told, tokens_per_second=micro_batches * length / taken, peak_bytes=most["bytes"])


def training(write: Write, device: Any, tiny: bool) -> None:
    """`danlu train`, as a user runs it, on models of three sizes: the first runs of `benchmarks/throughput.py`."""
    import tempfile

    from throughput import CPU_RUNS, CUDA_RUNS, measure, write_rows

    from danlu.data.demo_data import pretraining_documents
    from danlu.data.tokenizer_training import train_tokenizer

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        train_tokenizer(pretraining_documents(0, 500), 600, folder / "tokenizer")
        write_rows(folder / "rows.jsonl", 200 if tiny else 3000)
        runs = CPU_RUNS[:1] if device.type == "cpu" else CUDA_RUNS[:4]  # as many as there is time for
        for name, precision, packs, compiled in runs:
            found = measure(folder, name, precision, packs, compiled, 5 if tiny else 12)
            write("run", model=name, precision=precision, compiled=compiled, packs=packs, **found)


def attention(write: Write, device: Any, tiny: bool) -> None:
    """Forward and backward over packed documents: plain, windows, softcaps, groups."""
    import torch

    from danlu.core.layer_types import Keys
    from danlu.models.attend import PackedAttention

    total = 128 if tiny else 8192
    q, k, v, grad = (torch.randn(total, heads, 128, device=device, dtype=torch.bfloat16) for heads in (32, 8, 8, 32))
    for lengths in ([total], [total // 8] * 8, [total // 64] * 64):
        boundaries = tuple(torch.tensor([0, *lengths]).cumsum(0).tolist())
        for name, window, softcap in (
            ("plain", None, None),
            ("window", total // 16, None),
            ("softcap", None, 50.0),
            ("softcap in a window", total // 16, 50.0),
        ):

            def step(boundaries: Any = boundaries, window: Any = window, softcap: Any = softcap) -> None:
                attend = PackedAttention(boundaries)
                leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
                keys = Keys(tuple(leaves[1:]))
                attend(0, leaves[0], keys, scale=128**-0.5, window=window, softcap=softcap).backward(grad)

            try:
                with peak(device) as most:
                    taken = seconds(step, device, rounds=3)
                write("attention", variant=name, documents=len(lengths), ms=1e3 * taken, peak_bytes=most["bytes"])
            except Exception as error:
                write("attention", variant=name, documents=len(lengths), error=repr(error)[:500])


def loss(write: Write, device: Any, tiny: bool) -> None:
    """The head and its cross-entropy by the size of its slices, trained and frozen, with and without Triton kernels."""
    import torch

    from danlu.objectives import linear_cross_entropy as crossentropy

    tokens, width, vocab_size = (64, 32, 300) if tiny else (4096, 4096, 128256)
    hidden = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    targets, weights = torch.randint(0, vocab_size, (tokens,), device=device), torch.ones(tokens, device=device)
    kernels_for = crossentropy._kernels_for
    for frozen, kernels in ((False, True), (False, False), (True, True), (True, False)):
        crossentropy._kernels_for = kernels_for if kernels else lambda x: None
        dtype = torch.bfloat16 if frozen else torch.float32
        head = torch.empty(vocab_size, width, device=device, dtype=dtype).normal_(std=0.02).requires_grad_(not frozen)
        for rows in (None,) if frozen else (None, *((64,) if tiny else (16384, 32768))):

            def step(rows: Any = rows, head: Any = head) -> None:
                found = crossentropy.linear_cross_entropy(hidden, head, targets, weights, slice_rows=rows)
                found.total.backward()
                hidden.grad = head.grad = None

            with peak(device) as most:
                taken = seconds(step, device, rounds=5)
            told = {"frozen": frozen, "kernels": kernels, "slice_rows": rows}
            write("loss", **told, ms=1e3 * taken, peak_bytes=most["bytes"])


def optimizers(write: Write, device: Any, tiny: bool) -> None:
    """An update of half a billion parameters by each optimizer."""
    import torch
    from torch.nn import Parameter

    from danlu.memory.pages import paged_state
    from danlu.optim.build import build
    from danlu.recipe import sections

    width, count = (64, 4) if tiny else (4096, 32)
    kinds: dict[str, Any] = {
        "adamw": sections.AdamW(),
        "adamw8bit": sections.AdamW8bit(),
        "paged-adamw": sections.PagedAdamW(),
        "sgd": sections.SGD(learning_rate=1e-4),
        "lion": sections.Lion(),
        "muon": sections.Muon(),
        "adafactor": sections.Adafactor(),
    }
    for name, section in kinds.items():
        parameters = [
            (f"layers.{index}.weight", Parameter(torch.randn(width, width, device=device))) for index in range(count)
        ]
        try:
            optimizer = build(parameters, section, paged_state=paged_state)

            def step(optimizer: Any = optimizer, parameters: Any = parameters) -> None:
                for _, parameter in parameters:
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step(free_gradients=True)

            with peak(device) as most:
                taken = seconds(step, device, rounds=1 if tiny else 3)
            write("update", optimizer=name, parameters=count * width**2, ms=1e3 * taken, peak_bytes=most["bytes"])
        except Exception as error:
            write("update", optimizer=name, error=repr(error)[:500])


def decoding(write: Write, device: Any, tiny: bool) -> None:
    """Greedy tokens per second of a random model, one prompt and sixteen."""
    import torch

    from danlu.inference.embedded import EmbeddedEngine
    from danlu.inference.request import Request, SamplingOptions

    config = config_of("tiny" if tiny else "8B", 2 if tiny else 8, 1024)
    model = random_model(config, device)
    new, greedy = 8 if tiny else 64, SamplingOptions(temperature=0.0)
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)
        for count in (1, 16):
            length = 8 if tiny else 64
            requests = [
                Request(row, tuple((7 * place + row) % 200 + 3 for place in range(length)), greedy, new)
                for row in range(count)
            ]
            with peak(device) as most:
                taken = seconds(
                    lambda requests=requests, dtype=dtype: EmbeddedEngine(model, dtype=dtype).generate(requests),
                    device,
                    rounds=1 if tiny else 3,
                )
            write(
                "decoding",
                dtype=str(dtype).removeprefix("torch."),
                layers=len(config.layers),
                prompts=count,
                tokens_per_second=new * count / taken,
                peak_bytes=most["bytes"],
            )


BLOCKS: dict[str, Callable[[Write, Any, bool], None]] = {
    "preflight": preflight,
    "tests": tests,
    "adapters": adapters,
    "full": full,
    "peers": peers,
    "experts": experts,
    "attention": attention,
    "loss": loss,
    "optimizers": optimizers,
    "decoding": decoding,
    "training": training,
}


# ── running ──


def writer(out: Path, block: str) -> Write:
    """A function that adds a line to a block's file, which is on the disk when it returns."""
    from planned_figures import comparison

    file = out / f"gpu-{block}.jsonl"
    file.unlink(missing_ok=True)

    def write(what: str, **values: Any) -> None:
        line = json.dumps({"block": block, "what": what, **values}, default=str)
        with file.open("a") as handle:
            handle.write(line + "\n")
            handle.flush()
            os.fsync(handle.fileno())
        print(line if len(line) < 400 else f"{line[:400]}...", flush=True)
        if (compared := comparison(values)) is not None:
            print(f"   danlu plan: {compared}", flush=True)

    return write


def run_block(name: str, out: Path, device: str, tiny: bool) -> int:
    """In a process of its own: one block, whose error is a line too."""
    import torch

    write = writer(out, name)
    start = time.perf_counter()
    try:
        BLOCKS[name](write, torch.device(device), tiny)
    except Exception as error:
        write("failed", error=repr(error)[:2000], traceback=traceback.format_exc()[-6000:])
        return 1
    finally:
        write("end", s=round(time.perf_counter() - start, 1))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-results")))
    parser.add_argument("--only", nargs="+", choices=list(BLOCKS), default=list(BLOCKS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try this script")
    parser.add_argument("--total", type=float, default=590.0, help="seconds for all blocks together")
    parser.add_argument("--block", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if lacking := bring():
        print(
            f"missing: {', '.join(lacking)}. Install them with pip. For a machine without network fill wheels/ on one "
            f"that has it, by `make gpu-wheels GPU_PYTHON_VERSION={sys.version_info.major}.{sys.version_info.minor}`, "
            "and carry it along with this tree",
            file=sys.stderr,
        )
        return 2
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no CUDA device; --tiny --device cpu tries the script on a CPU", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    if options.block:
        return run_block(options.block, options.out, options.device, options.tiny)
    until = time.monotonic() + options.total
    environ = dict(os.environ)
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(INSTALLED), environ.get("PYTHONPATH", "")])
    bad = []
    for name in options.only:
        left = until - time.monotonic()
        limit = min(LIMITS_S[name], left)
        if left <= 5:
            print(f"{name}: left out, the time is over", flush=True)
            bad.append(name)
            continue
        command = [sys.executable, str(Path(__file__).resolve()), "--block", name, "--out", str(options.out)]
        command += ["--device", options.device, *(["--tiny"] if options.tiny else [])]
        print(f"── {name} (at most {limit:.0f} s)", flush=True)
        process = subprocess.Popen(command, env=environ, start_new_session=True)  # with the compilers that it starts
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            with (options.out / f"gpu-{name}.jsonl").open("a") as handle:
                handle.write(json.dumps({"block": name, "what": "ended at its limit", "s": limit}) + "\n")
            print(f"{name}: ended at its limit of {limit:.0f} s; what it had measured is in {options.out}", flush=True)
        if code:
            bad.append(name)
    print(f"results in {options.out}" + (f"; not all right: {', '.join(bad)}" if bad else ""), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
