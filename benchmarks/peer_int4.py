"""Quantizes a model with another tool, in that tool's environment; `int4.py --peer` runs it.

    PYTHON benchmarks/peer_int4.py MODEL DOCUMENTS OUTPUT --tool gptqmodel|llm-compressor --method gptq|awq --group 64
        [--zero integer] [--act-order | --group-aware]

MODEL is a folder of transformers', DOCUMENTS a JSON list of lists of token ids, each of which is a calibration sample.
Weights are int4 in groups; without --zero the range is symmetric. It imports nothing of danlu.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any


def with_gptqmodel(options: argparse.Namespace, documents: list[list[int]]) -> None:
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # with the one of two cores its pool of loaders does not start
    import torch
    from gptqmodel import GPTQModel, QuantizeConfig
    from gptqmodel.quantization import FORMAT, METHOD

    kind: dict[str, Any] = {"quant_method": METHOD.GPTQ, "format": FORMAT.GPTQ, "desc_act": options.act_order}
    kind["act_group_aware"] = options.group_aware  # GPTQModel's default without --act-order
    if options.method == "awq":
        kind = {"quant_method": METHOD.AWQ, "format": FORMAT.GEMM, "desc_act": False}  # needs CUDA in 7.6
    config = QuantizeConfig(bits=4, group_size=options.group, sym=not options.zero, **kind)
    model = GPTQModel.load(str(options.model), config, device="cpu", dtype=torch.float32)
    samples = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in documents]
    model.quantize(samples, batch_size=1)
    model.save(str(options.output))


def with_llm_compressor(options: argparse.Namespace, documents: list[list[int]]) -> None:
    import torch
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from transformers import AutoModelForCausalLM

    if not torch.cuda.is_available():  # 0.14's AWQ pins what it has cached here too, where torch refuses it
        torch.Tensor.pin_memory = lambda self: self  # type: ignore[method-assign,misc,assignment]
    weights = QuantizationArgs(
        num_bits=4,
        type="int",
        strategy="group",
        group_size=options.group,
        symmetric=not options.zero,
        **({"actorder": "group"} if options.act_order else {}),
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    settings: dict[str, Any] = {"config_groups": {"group_0": scheme}, "ignore": ["lm_head"]}
    recipe = (
        [AWQModifier(), QuantizationModifier(**settings)] if options.method == "awq" else [GPTQModifier(**settings)]
    )
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    samples = Dataset.from_list([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in documents])
    longest = max(map(len, documents))
    oneshot(model=model, dataset=samples, recipe=recipe, num_calibration_samples=len(documents), max_seq_length=longest)
    model.save_pretrained(options.output, save_compressed=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("documents", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tool", choices=("gptqmodel", "llm-compressor"), required=True)
    parser.add_argument("--method", choices=("gptq", "awq"), required=True)
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--zero", choices=("integer",), help="an integer zero for each group")
    parser.add_argument("--act-order", action="store_true")
    parser.add_argument(
        "--group-aware", action="store_true", help="gptqmodel: by importance of groups, and within them"
    )
    options = parser.parse_args()
    documents = json.loads(options.documents.read_text(encoding="utf-8"))
    (with_gptqmodel if options.tool == "gptqmodel" else with_llm_compressor)(options, documents)


if __name__ == "__main__":
    main()
