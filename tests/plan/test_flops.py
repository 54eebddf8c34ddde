"""The closed forms against torch's counter on the same products."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from danlu.models.config import ModelConfig
from danlu.plan.flops import attention_pairs, forward_flops, layer_parameters, training_flops

CONFIG = ModelConfig(
    family="llama",
    hidden_size=16,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=6,
    intermediate_size=20,
    vocab_size=50,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    max_position_embeddings=64,
)


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, window: int | None) -> None:
        super().__init__()
        self.config, self.window = config, window
        query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q, self.k, self.v = (nn.Linear(config.hidden_size, out, bias=False) for out in (query, key, key))
        self.o = nn.Linear(query, config.hidden_size, bias=False)
        self.gate, self.up = (nn.Linear(config.hidden_size, config.intermediate_size, bias=False) for _ in range(2))
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [S, D], one document
        config, per_head = self.config, (len(x), -1, self.config.head_dim)
        q, k, v = self.q(x).view(per_head), self.k(x).view(per_head), self.v(x).view(per_head)
        k, v = (t.repeat_interleave(config.heads // config.kv_heads, dim=1) for t in (k, v))
        rows = []
        for i in range(len(x)):  # query by query: exactly the pairs that causal attention needs
            seen = slice(0 if self.window is None else max(0, i + 1 - self.window), i + 1)
            scores = torch.bmm(q[i].unsqueeze(1), k[seen].permute(1, 2, 0))  # [H, 1, keys]
            rows.append(torch.bmm(scores.softmax(-1), v[seen].transpose(0, 1)).view(-1))
        x = x + self.o(torch.stack(rows))
        return x + self.down(torch.sigmoid(self.gate(x)) * self.up(x))


def counted(config: ModelConfig, lengths: list[int], targets: list[int], backward: bool) -> int:
    layers = nn.Sequential(*(Layer(config, window) for window in config.windows))
    head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    with FlopCounterMode(display=False) as counter:
        for length, some in zip(lengths, targets, strict=True):
            loss = head(layers(torch.randn(length, config.hidden_size, requires_grad=True))[:some]).sum()
            if backward:
                loss.backward()
    return counter.get_total_flops()


def test_forward_and_training_equal_what_torch_counts() -> None:
    lengths, targets = [5, 3, 1], [2, 3, 0]
    assert forward_flops(CONFIG, lengths, 5) == counted(CONFIG, lengths, targets, backward=False)
    assert training_flops(CONFIG, lengths, 5) == counted(CONFIG, lengths, targets, backward=True)
    assert training_flops(CONFIG, [sum(lengths)], 5) != counted(CONFIG, lengths, targets, backward=True)


def test_sliding_windows_equal_what_torch_counts() -> None:
    config = replace(CONFIG, windows=(3, None))
    assert training_flops(config, [7, 2], 9) == counted(config, [7, 2], [7, 2], backward=True)
    assert training_flops(CONFIG, [7, 2], 9) != training_flops(config, [7, 2], 9)


def test_attention_pairs_equal_a_count() -> None:
    for window in (None, 1, 3, 50):
        lengths = [1, 4, 9]
        mask = [i - j < (window or 99) for length in lengths for i in range(length) for j in range(i + 1)]
        assert attention_pairs(lengths, window) == sum(mask)


def test_per_token_is_six_n_and_attention() -> None:
    config = replace(
        CONFIG,
        hidden_size=256,
        layers=6,
        heads=8,
        kv_heads=4,
        head_dim=32,
        intermediate_size=1024,
        vocab_size=4096,
        windows=(),
    )
    six_n = 6 * (6 * layer_parameters(config) + 256 * 4096)
    attention = 3 * 4 * 8 * 32 * 6 * (1024 + 1) / 2
    assert training_flops(config, (1024,), 1024) / 1024 == six_n + attention


def test_importing_the_formulas_does_not_import_torch() -> None:
    code = "import sys, danlu.plan.flops, danlu.optim.schedules; sys.exit('torch' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0
