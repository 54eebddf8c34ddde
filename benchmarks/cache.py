"""Perplexity with each format of the rollout engine's cache, and the cache's bytes.

    python benchmarks/cache.py MODEL TEXT [TEXT ...] [--tokens 16384] [--length 512] [--blocks 16 32 64] [--written 32]

Rows of each TEXT (txt, jsonl) are packed as in training, and the engine scores them as prompts (`prompt_logprobs`),
where queries attend to what the cache has. A further text is the model's own: `--written` answers, drawn at temperature
1 with the cache as it is. Weights and activations are float32. Bytes are those of a sequence of `--length` tokens: its
blocks, and what it has in a slot.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from int4 import packs_of

from danlu.data.batch import collate
from danlu.inference.cache_size import cache_sizes
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import EngineOptions
from danlu.inference.request import Request, SamplingOptions
from danlu.models.decoder import Decoder
from danlu.models.loading import load

Texts = Sequence[Sequence[int]]
GREEDY = SamplingOptions(temperature=0)


def perplexity(model: Decoder, texts: Texts, options: EngineOptions) -> float:
    """exp of the mean negative log-probability of all tokens but the first of each text."""
    requests = [Request(number, tuple(text), GREEDY, 1, prompt_logprobs=True) for number, text in enumerate(texts)]
    total, count = 0.0, 0
    for completion in EmbeddedEngine(model, options).generate(requests):
        assert completion.prompt_logprobs is not None
        total -= math.fsum(completion.prompt_logprobs)
        count += len(completion.prompt_logprobs)
    return math.exp(total / count)


def written(model: Decoder, count: int, length: int) -> Texts:
    """Texts of the model itself, behind its first token."""
    sampling = SamplingOptions(temperature=1.0)
    requests = [Request(0, (1,), sampling, length - 2, samples=count)]
    return [[1, *completion.tokens] for completion in EmbeddedEngine(model, EngineOptions()).generate(requests)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", nargs="+")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--blocks", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--written", type=int, default=32)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, length = load(arguments.model), arguments.length
    with tempfile.TemporaryDirectory() as work:
        texts = {
            Path(text).name: [
                collate([pack]).tokens.tolist()[: length - 1]
                for pack in packs_of(arguments.model, text, arguments.tokens, length, work)
            ]
            for text in arguments.text
        }
    texts["its own"] = written(model, arguments.written, length)
    options = {
        "auto": EngineOptions(),
        "fp8": EngineOptions(cache="fp8"),
        "int8": EngineOptions(cache="int8"),
        **{f"int4, block: {block}": EngineOptions(cache="int4", block=block) for block in arguments.blocks},
    }
    print(f"| cache | bytes of {length} tokens | {' | '.join(f'{name}: perplexity | change' for name in texts)} |")
    print("|---" * (2 + 2 * len(texts)) + "|", flush=True)
    exact: dict[str, float] = {}
    for name, own in options.items():
        sizes = cache_sizes(model, own, torch.float32)
        stored = -(-length // own.block) * sizes.block_bytes + sizes.slot_bytes
        cells = []
        for text, rows in texts.items():
            value = perplexity(model, rows, own)
            exact.setdefault(text, value)
            cells.append(f"{value:.4f} | {100 * (value / exact[text] - 1):+.3f} %")
        print(f"| {name} | {stored:,} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
