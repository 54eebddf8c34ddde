"""The closed forms against torch's counter on the same products."""

from __future__ import annotations

import os
import subprocess
import sys

import torch
from builders.small_config import small_config
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from danlu.models.config import ModelConfig
from danlu.models.layer_spec import LayerSpec
from danlu.planning.flops import DecoderFlops, attention_pairs

SIZES = {"hidden_size": 16, "heads": 4, "kv_heads": 2, "head_dim": 6, "intermediate_size": 20, "vocab_size": 50}
CONFIG = small_config(**SIZES)


class Layer(nn.Module):
    def __init__(self, width: int, spec: LayerSpec) -> None:
        super().__init__()
        self.mixer = spec.mixer
        query, key = spec.mixer.query_width, spec.mixer.kv_width
        self.q, self.k, self.v = (nn.Linear(width, out, bias=False) for out in (query, key, key))
        self.o = nn.Linear(query, width, bias=False)
        self.gate, self.up = (nn.Linear(width, spec.feed.intermediate_size, bias=False) for _ in range(2))
        self.down = nn.Linear(spec.feed.intermediate_size, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [S, D], one document
        mixer, per_head = self.mixer, (len(x), -1, self.mixer.head_dim)
        q, k, v = self.q(x).view(per_head), self.k(x).view(per_head), self.v(x).view(per_head)
        k, v = (t.repeat_interleave(mixer.heads // mixer.kv_heads, dim=1) for t in (k, v))
        rows = []
        for i in range(len(x)):  # query by query: exactly the pairs that causal attention needs
            seen = slice(0 if mixer.window is None else max(0, i + 1 - mixer.window), i + 1)
            scores = torch.bmm(q[i].unsqueeze(1), k[seen].permute(1, 2, 0))  # [H, 1, keys]
            rows.append(torch.bmm(scores.softmax(-1), v[seen].transpose(0, 1)).view(-1))
        x = x + self.o(torch.stack(rows))
        return x + self.down(torch.sigmoid(self.gate(x)) * self.up(x))


def counted(config: ModelConfig, lengths: list[int], targets: list[int], backward: bool) -> int:
    layers = nn.Sequential(*(Layer(config.hidden_size, spec) for spec in config.layers))
    head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    with FlopCounterMode(display=False) as counter:
        for length, some in zip(lengths, targets, strict=True):
            loss = head(layers(torch.randn(length, config.hidden_size, requires_grad=True))[:some]).sum()
            if backward:
                loss.backward()
    return counter.get_total_flops()


def test_forward_and_training_equal_what_torch_counts() -> None:
    lengths, targets = [5, 3, 1], [2, 3, 0]
    assert DecoderFlops(CONFIG).forward(lengths, 5) == counted(CONFIG, lengths, targets, backward=False)
    assert DecoderFlops(CONFIG).training(lengths, 5) == counted(CONFIG, lengths, targets, backward=True)
    assert DecoderFlops(CONFIG).training([sum(lengths)], 5) != counted(CONFIG, lengths, targets, backward=True)


def test_sliding_windows_equal_what_torch_counts() -> None:
    config = small_config(**SIZES, windows=(3, None))
    assert DecoderFlops(config).training([7, 2], 9) == counted(config, [7, 2], [7, 2], backward=True)
    assert DecoderFlops(CONFIG).training([7, 2], 9) != DecoderFlops(config).training([7, 2], 9)


def test_attention_pairs_equal_a_count() -> None:
    for window in (None, 1, 3, 50):
        lengths = [1, 4, 9]
        mask = [i - j < (window or 99) for length in lengths for i in range(length) for j in range(i + 1)]
        assert attention_pairs(lengths, window) == sum(mask)


def test_per_token_is_six_n_and_attention() -> None:
    sizes = {"hidden_size": 256, "heads": 8, "kv_heads": 4, "head_dim": 32, "intermediate_size": 1024}
    config = small_config(**sizes, layers=6, vocab_size=4096)
    assert DecoderFlops(config).weights == 6 * (2 * 256 * 32 * (8 + 4) + 3 * 256 * 1024)
    six_n = 6 * (DecoderFlops(config).weights + 256 * 4096)
    attention = 3 * 4 * 8 * 32 * 6 * (1024 + 1) / 2
    assert DecoderFlops(config).training((1024,), 1024) / 1024 == six_n + attention


def test_importing_the_formulas_does_not_import_torch() -> None:
    modules = "danlu.planning.layer_seconds, danlu.planning.step_work, danlu.planning.cluster, danlu.optim.schedules"
    modules += ", danlu.planning.rl_phases, danlu.planning.context_layers, danlu.planning.collective_seconds"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0
