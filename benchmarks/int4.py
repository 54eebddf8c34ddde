"""4-bit weights by rounding, AWQ, GPTQ, and SmoothQuant before GPTQ: how far the model's next-token distributions move.

    python benchmarks/int4.py MODEL TEXT [--groups 64 128] [--tokens 16384] [--evaluate 16384]

Prints, for each method, size of groups, and kind of zero, the KL divergence of the quantized model's distribution from
that of the model itself, in nats by token, and its ratio to that of rounding to the nearest. TEXT (txt, jsonl): its
first rows calibrate, the rows behind them are evaluated. Weights and activations are float32; everything but linear
layers of attention and MLP stays as it is.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from danlu.assembly.calibration import Calibration
from danlu.assembly.layerwise_quantizing import LayerwiseQuantizer, Method
from danlu.core.types import Pack
from danlu.data.batch import collate
from danlu.data.packed_dataset import PackedDataset
from danlu.data.prepare import DatasetSpec, prepare
from danlu.models.attend import attend_for
from danlu.models.decoder import Decoder
from danlu.models.hf_folder import read_config
from danlu.models.loading import load
from danlu.numerics.format import Format, ZeroKind
from danlu.numerics.quantizers.awq import Awq
from danlu.numerics.quantizers.gptq import Gptq
from danlu.numerics.quantizers.quantizer import Nearest
from danlu.recipe.sections import Data, Packing, Source

CPU = torch.device("cpu")


def packs_of(model: Path, text: str, tokens: int, length: int, cache: str) -> list[Pack]:
    """The first packs of a text, in its own order, with at least so many tokens."""
    data = Data(
        train=[Source(path=text)], max_length=length, packing=Packing(kind="concatenate"), workers=1, cache=cache
    )
    spec = DatasetSpec(data, "pretrain", str(model), None, seed=0)
    train = prepare(spec).train
    assert train is not None
    packs = PackedDataset(train, data.packing, length, 0, shuffle=False)
    chosen, count = list[Pack](), 0
    for number in range(packs.packs_per_epoch):
        if count >= tokens:
            return chosen
        chosen.append(packs.at(number))
        count += chosen[-1].tokens
    raise SystemExit(f"{text}: {count} tokens, {tokens} are needed")


@torch.no_grad()
def log_probabilities(model: Decoder, packs: list[Pack]) -> list[Tensor]:
    """[T, V] float32 of each pack."""
    of_packs = []
    for pack in packs:
        batch = collate([pack])
        hidden = model(batch.tokens, batch.positions, attend_for(batch))
        of_packs.append(model.logits(hidden).log_softmax(-1))
    return of_packs


def divergence(original: list[Tensor], other: list[Tensor]) -> float:
    """KL(original | other) by token, in nats."""
    total = sum(float((p.exp() * (p - q)).sum(dtype=torch.float64)) for p, q in zip(original, other, strict=True))
    return total / sum(map(len, original))


def quantized(model: Path, method: Method, packs: list[Pack], work: Path) -> Decoder:
    """The model with the numbers of its codes."""
    config, decoder = read_config(model), load(model)
    calibration = Calibration.of(config, model, packs, dtype=torch.float32, device=CPU)
    run = LayerwiseQuantizer(config, model, method, calibration, work, dtype=torch.float32, device=CPU)
    run.run()
    with torch.no_grad():
        for number in range(len(config.layers)):
            result = run.result(number)
            for note in result.notes:
                print(f"    {note}")
            for name, value in result.others.items():
                decoder.get_parameter(name).copy_(value)
            for name, scaled in result.quantized.items():
                decoder.get_parameter(name).copy_(scaled.decode())
    return decoder


def methods(form: Format) -> dict[str, Method]:
    """By the name that is printed; nearest first."""
    return {
        "nearest": Method(Nearest(), form),
        "awq": Method(Awq(), form, scaling=True),
        "gptq": Method(Gptq(act_order=False), form),
        "gptq act_order": Method(Gptq(), form),
        "smoothquant, gptq": Method(Gptq(), form, smoothing=0.5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text")
    parser.add_argument("--groups", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--tokens", type=int, default=16384, help="of calibration")
    parser.add_argument("--evaluate", type=int, default=16384, help="tokens")
    parser.add_argument("--length", type=int, default=256, help="tokens of a packed sequence")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        packs = packs_of(options.model, options.text, options.tokens + options.evaluate, options.length, folder)
        border = math.ceil(options.tokens / options.length)
        calibrated, evaluated = packs[:border], packs[border:]
        original = log_probabilities(load(options.model), evaluated)
        zeros: tuple[ZeroKind, ...] = ("none", "integer")
        print(f"{'group':>5}  {'zero':8} {'method':20} {'KL, nats':>9}  of nearest")
        for group in options.groups:
            for zero in zeros:
                nearest = 0.0
                for name, method in methods(Format("int4", (1, group), zero=zero)).items():
                    work = Path(folder) / f"{group}-{zero}-{name}"
                    found = divergence(
                        original, log_probabilities(quantized(options.model, method, calibrated, work), evaluated)
                    )
                    nearest = nearest or found
                    print(f"{group:5}  {zero:8} {name:20} {found:9.5f}  {found / nearest:.3f}", flush=True)


if __name__ == "__main__":
    main()
