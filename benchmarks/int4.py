"""4-bit weights by rounding, AWQ, GPTQ, and SmoothQuant before GPTQ: how far the model's next-token distributions move.

    python benchmarks/int4.py MODEL TEXT [--groups 64 128] [--tokens 8192] [--sets 3] [--evaluate 16384]
    python benchmarks/int4.py MODEL TEXT --peer gptqmodel=ENVIRONMENT/bin/python [--peer llm-compressor=PYTHON]
    python benchmarks/int4.py MODEL TEXT --trained int3 --groups 32 [--steps 200] [--rate 1e-3]

Prints, for each method, size of groups, and kind of zero, the KL divergence of the quantized model's distribution from
that of the model itself, in nats by token, and its ratio to that of rounding to the nearest: the median over several
sets of calibration rows, with the least and the greatest ratio. What is rounded up and what down changes with the rows,
and the ratio of one set by several percent with it. TEXT (txt, jsonl): its first rows are evaluated, the rows behind
them calibrate, one set after the other. Weights and activations are float32; everything but linear layers of attention
and MLP stays as it is.

With --peer other tools quantize the same model by the same documents, each in an environment of its own
(`peer_int4.py`), and danlu reads the folders that they write.

With --trained the model is trained on the first rows, once as it is and once for the format (`quantization.trained`),
by the same steps of AdamW; printed are losses on the rows behind them: of the first model, of the first one rounded,
and of the second one rounded, and how much of the gap that rounding makes the second one leaves.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from danlu.assembly.base_model import weight_layouts
from danlu.assembly.calibration import Calibration
from danlu.assembly.layerwise_quantizing import LayerwiseQuantizer, Method
from danlu.assembly.trained_quantization import set_trained_quantization
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
from danlu.recipe.sections import TRAINABLE, Data, Packing, Source

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
        "gptq act_order: group": Method(Gptq(act_order="group"), form),
        "smoothquant, gptq": Method(Gptq(), form, smoothing=0.5),
    }


PEER_METHODS = {
    "gptqmodel": {
        "gptq": ("gptq",),
        "gptq act_order": ("gptq", "--act-order"),
        "gptq act_group_aware": ("gptq", "--group-aware"),
    },
    "llm-compressor": {"gptq": ("gptq",), "gptq act_order": ("gptq", "--act-order"), "awq": ("awq",)},
}
"""By tool and printed name: the method, and flags of `peer_int4.py`. GPTQModel's AWQ needs CUDA."""


def documents_of(packs: list[Pack]) -> Iterator[list[int]]:
    """The token ids of each document, of a part of one where a pack begins or ends within it."""
    for pack in packs:
        batch = collate([pack])
        starts = [*torch.nonzero(batch.positions == 0).flatten().tolist(), pack.tokens]
        yield from (batch.tokens[start:stop].tolist() for start, stop in pairwise(sorted({0, *starts})))


def quantized_by(
    tool: str, python: str, model: Path, form: Format, method: str, documents: Path, work: Path
) -> Decoder:
    """The model with the numbers that another tool gives it, which are written into `work`."""
    name, *flags = PEER_METHODS[tool][method]
    group, zero = form.block[1], form.zero
    output = work / f"{tool}-{group}-{zero}-{method.replace(' ', '-')}-{documents.stem}"
    command = [os.path.abspath(python), str(Path(__file__).resolve().with_name("peer_int4.py")), str(model.resolve())]
    command += [str(documents), str(output), "--tool", tool, "--method", name, "--group", str(group), *flags]
    command += [] if zero == "none" else ["--zero", zero]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=work)  # tools leave logs there
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{ended.stdout[-2000:]}{ended.stderr[-4000:]}")
    return load(output, layouts=weight_layouts(output))


def ways(
    model: Path, form: Format, peers: dict[str, str], sets: list[list[Pack]], work: Path, only: Collection[str]
) -> Iterator[tuple[str, Callable[[int], Decoder]]]:
    """(name, the quantized model by the number of its calibration set) of each of danlu's methods, nearest first, and
    of each method of other tools; of those in `only`, where it has any."""

    def own(name: str, number: int) -> Decoder:
        folder = work / f"{form.block[1]}-{form.zero}-{name}-{number}"
        return quantized(model, methods(form)[name], sets[number], folder)

    def of_peer(tool: str, name: str, number: int) -> Decoder:
        documents = work / f"{number}.json"
        documents.write_text(json.dumps(list(documents_of(sets[number]))), encoding="utf-8")
        return quantized_by(tool, peers[tool], model, form, name, documents, work)

    for name in methods(form):
        if name == "nearest" or not only or name in only:
            yield name, partial(own, name)
    for tool in peers:
        for name in (each for each in PEER_METHODS[tool] if not only or each in only):
            yield f"{tool}: {name}", partial(of_peer, tool, name)


def compare(
    model: Path,
    form: Format,
    peers: dict[str, str],
    sets: list[list[Pack]],
    held_out: list[Pack],
    work: Path,
    only: Collection[str],
) -> None:
    """Prints the divergences of one size of groups and kind of zero."""
    original, nearest = log_probabilities(load(model), held_out), 0.0
    for name, quantized_with in ways(model, form, peers, sets, work, only):
        numbers = range(1 if name == "nearest" else len(sets))  # which looks at no rows
        try:
            of_sets = [divergence(original, log_probabilities(quantized_with(number), held_out)) for number in numbers]
        except RuntimeError as error:  # as a tool that does not take a size of groups
            print(error, flush=True)
            continue
        middle = median(of_sets)
        nearest = nearest or middle
        shares = [each / nearest for each in of_sets]
        spread = f"  {min(shares):.3f} to {max(shares):.3f}" if len(shares) > 1 else ""
        line = f"{form.block[1]:5}  {form.zero:8} {name:34} {middle:9.5f}  {middle / nearest:10.3f}{spread}"
        print(line, flush=True)


def loss_of(model: Decoder, packs: list[Pack]) -> Tensor:
    """The mean cross-entropy of the next token within documents, in nats."""
    batch = collate(packs)
    logits = model.logits(model(batch.tokens, batch.positions, attend_for(batch))).float()
    inside = batch.positions[1:] > 0
    return torch.nn.functional.cross_entropy(logits[:-1][inside], batch.tokens[1:][inside])


def fine_tuned(model: Path, section: Any, packs: list[Pack], steps: int, rate: float) -> Decoder:
    """The model after some steps of AdamW, four packs each; section: of the format that it is trained for."""
    decoder = load(model)
    if section is not None:
        set_trained_quantization(decoder, section, keeps=True)
    optimizer = torch.optim.AdamW(decoder.parameters(), rate, weight_decay=0.0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
        chosen = [packs[(4 * step + place) % len(packs)] for place in range(4)]
        loss_of(decoder, chosen).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if decoder.rounding is not None:
            decoder.rounding.weights_changed()
    return decoder


@torch.no_grad()
def evaluated(model: Decoder, packs: list[Pack]) -> float:
    """The mean of the losses of packs."""
    return sum(float(loss_of(model, [pack])) for pack in packs) / len(packs)


def compare_trained(model: Path, kind: str, group: int, packs: list[Pack], held_out: list[Pack], options: Any) -> None:
    """Prints the losses of one size of groups."""
    known = {each.model_fields["kind"].default: each for each in TRAINABLE}
    section: Any = known[kind](group=group, trained=True)
    plain = fine_tuned(model, None, packs, options.steps, options.rate)
    without = evaluated(plain, held_out)
    set_trained_quantization(plain, section, keeps=True)
    nearest = evaluated(plain, held_out)
    trained = evaluated(fine_tuned(model, section, packs, options.steps, options.rate), held_out)
    left = (trained - without) / (nearest - without)
    print(f"{kind} {group:7}  {without:9.4f} {nearest:9.4f} {trained:9.4f}  {left:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text")
    parser.add_argument("--groups", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--tokens", type=int, default=8192, help="of each set of calibration rows")
    parser.add_argument("--sets", type=int, default=3, help="of calibration rows")
    parser.add_argument("--evaluate", type=int, default=16384, help="tokens")
    parser.add_argument("--length", type=int, default=256, help="tokens of a packed sequence")
    parser.add_argument("--trained", help="a kind of quantization to train for: int3, int2, ...")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--peer", action="append", default=[], metavar="TOOL=PYTHON", help="gptqmodel, llm-compressor")
    parser.add_argument("--methods", nargs="+", default=[], help="by their printed names; nearest is always there")
    options = parser.parse_args()
    peers = dict(each.split("=", 1) for each in options.peer)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        size, border = (math.ceil(tokens / options.length) for tokens in (options.tokens, options.evaluate))
        count = 1 if options.trained is not None else options.sets
        needed = (count * size + border) * options.length
        packs = packs_of(options.model, options.text, needed, options.length, folder)
        if options.trained is not None:
            print("format  group    float32   nearest   trained  of the gap")
            for group in options.groups:
                compare_trained(options.model, options.trained, group, packs[:size], packs[size:], options)
            return
        held_out = packs[:border]
        sets = [packs[start : start + size] for start in range(border, len(packs), size)]
        zeros: tuple[ZeroKind, ...] = ("none", "integer")
        print(f"{'group':>5}  {'zero':8} {'method':34} {'KL, nats':>9}  of nearest  least to greatest")
        for group in options.groups:
            for zero in zeros:
                form = Format("int4", (1, group), zero=zero)
                compare(options.model, form, peers, sets, held_out, Path(folder), options.methods)


if __name__ == "__main__":
    main()
