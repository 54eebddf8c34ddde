"""Peak host memory and time of loading and saving a Hugging Face folder, beside transformers.

    python benchmarks/loading.py [--parameters 125e6] [--repeats 3]

Makes a sharded Llama folder in float32 and in bfloat16, then opens each in fresh processes. Memory is the process's
high-water mark (VmHWM, Linux) less what it was after the imports, over the bytes of the float32 model. Quantizing while
loading is said to need the packed model and one tensor: the largest here is the embedding. Writes a table to stdout.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

MEASURE = """
import json, sys, time
from pathlib import Path

def status(key):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024

def touch(model):
    # A mapped file is not resident until it is used, and a model is loaded to be used.
    return [float(parameter.detach().sum()) for parameter in model.parameters()]

{imports}
import torch
torch.ones(8, 8) @ torch.ones(8, 8)
baseline = status("VmHWM")
begin = time.perf_counter()
{action}
extra = status("VmHWM") - baseline
print(json.dumps(dict(seconds=time.perf_counter() - begin, extra_bytes=extra, held_bytes=globals().get("held", 0))))
"""
ENGINES = {
    "danlu load": ("from danlu.models.loading import load", "touch(load(sys.argv[1]))"),
    "danlu load + save": (
        "from danlu.models.loading import load\nfrom danlu.models.saving import save",
        "save(load(sys.argv[1]), sys.argv[1] + '-saved', shard_bytes=100_000_000)",
    ),
    "danlu load in NF4": (
        "from pathlib import Path\nfrom danlu.assembly.frozen_base import load_frozen, model_bytes\n"
        "from danlu.numerics.quantized_weight import dense_workspace_bytes\nfrom danlu.recipe.sections import Nf4",
        "kept = load_frozen(Path(sys.argv[1]), dtype=torch.bfloat16, quantization=Nf4()).model\n"
        "held = model_bytes(kept)",
    ),
    "transformers load": (
        "from transformers import LlamaForCausalLM",
        "touch(LlamaForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32))",
    ),
}


def measure(engine: str, folder: Path) -> dict[str, float]:
    imports, action = ENGINES[engine]
    script = MEASURE.format(imports=imports, action=action)
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
    )
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def make_folders(parent: Path, parameters: float) -> tuple[dict[str, Path], int]:
    """A model of about `parameters` parameters in each stored type, and the bytes it takes in float32."""
    import torch

    from danlu.models.hf_config import read_config_values
    from danlu.models.initialize import initialize
    from danlu.models.loading import build
    from danlu.models.saving import save

    shape = {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    }
    one, two = (read_config_values(shape | {"num_hidden_layers": n}).parameter_count() for n in (1, 2))
    layers = max(1, round((parameters - one) / (two - one)) + 1)
    model = build(read_config_values(shape | {"num_hidden_layers": layers}))
    initialize(model, 0)
    folders = {}
    for name, dtype in {"float32": torch.float32, "bfloat16": torch.bfloat16}.items():
        folders[name] = parent / name
        save(model, folders[name], dtype=dtype, shard_bytes=100_000_000)
    return folders, 4 * model.config.parameter_count()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=125e6)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        folders, model_bytes = make_folders(Path(parent), arguments.parameters)
        print(f"model: {model_bytes / 1e6:.0f} MB in float32; medians of {arguments.repeats} fresh processes")
        print(f"{'engine':<20}{'stored as':<12}{'extra MB':>10}{'/ model':>10}{'seconds':>10}")
        for stored, folder in folders.items():
            # Engines take turns, so that a slow minute of the machine hits all of them.
            runs = [{engine: measure(engine, folder) for engine in ENGINES} for _ in range(arguments.repeats)]
            for engine in ENGINES:
                extra = statistics.median(run[engine]["extra_bytes"] for run in runs)
                seconds = statistics.median(run[engine]["seconds"] for run in runs)
                share = extra / model_bytes
                held = runs[0][engine]["held_bytes"]
                more = f"   {held / 1e6:.0f} MB of weights and {(extra - held) / 1e6:.0f} MB more" if held else ""
                print(f"{engine:<20}{stored:<12}{extra / 1e6:>10.0f}{share:>10.3f}{seconds:>10.2f}{more}")


if __name__ == "__main__":
    main()
