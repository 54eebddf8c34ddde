"""The closed forms against torch's counter on the same products."""

from __future__ import annotations

import os
import subprocess
import sys

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from danlu.plan.flops import (
    Shape,
    attention_pairs,
    forward_flops,
    layer_parameters,
    training_flops,
)

SHAPE = Shape(hidden_size=16, layers=2, heads=4, kv_heads=2, head_dim=6, intermediate_size=20, vocab_size=50)


class Layer(nn.Module):
    def __init__(self, shape: Shape, window: int | None) -> None:
        super().__init__()
        self.shape, self.window = shape, window
        query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q, self.k, self.v = (nn.Linear(shape.hidden_size, out, bias=False) for out in (query, key, key))
        self.o = nn.Linear(query, shape.hidden_size, bias=False)
        self.gate, self.up = (nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [S, D], one document
        s, per_head = self.shape, (len(x), -1, self.shape.head_dim)
        q, k, v = self.q(x).view(per_head), self.k(x).view(per_head), self.v(x).view(per_head)
        k, v = (t.repeat_interleave(s.heads // s.kv_heads, dim=1) for t in (k, v))
        rows = []
        for i in range(len(x)):  # query by query: exactly the pairs that causal attention needs
            seen = slice(0 if self.window is None else max(0, i + 1 - self.window), i + 1)
            scores = torch.bmm(q[i].unsqueeze(1), k[seen].permute(1, 2, 0))  # [H, 1, keys]
            rows.append(torch.bmm(scores.softmax(-1), v[seen].transpose(0, 1)).view(-1))
        x = x + self.o(torch.stack(rows))
        return x + self.down(torch.sigmoid(self.gate(x)) * self.up(x))


def counted(shape: Shape, lengths: list[int], targets: list[int], backward: bool) -> int:
    layers = nn.Sequential(*(Layer(shape, window) for window in shape.windows or (None,) * shape.layers))
    head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
    with FlopCounterMode(display=False) as counter:
        for length, some in zip(lengths, targets, strict=True):
            loss = head(layers(torch.randn(length, shape.hidden_size, requires_grad=True))[:some]).sum()
            if backward:
                loss.backward()
    return counter.get_total_flops()


def test_forward_and_training_equal_what_torch_counts() -> None:
    lengths, targets = [5, 3, 1], [2, 3, 0]
    assert forward_flops(SHAPE, lengths, 5) == counted(SHAPE, lengths, targets, backward=False)
    assert training_flops(SHAPE, lengths, 5) == counted(SHAPE, lengths, targets, backward=True)
    assert training_flops(SHAPE, [sum(lengths)], 5) != counted(SHAPE, lengths, targets, backward=True)


def test_sliding_windows_equal_what_torch_counts() -> None:
    shape = Shape(**{**vars(SHAPE), "windows": (3, None)})
    assert training_flops(shape, [7, 2], 9) == counted(shape, [7, 2], [7, 2], backward=True)
    assert training_flops(SHAPE, [7, 2], 9) != training_flops(shape, [7, 2], 9)


def test_attention_pairs_equal_a_count() -> None:
    for window in (None, 1, 3, 50):
        lengths = [1, 4, 9]
        mask = [i - j < (window or 99) for length in lengths for i in range(length) for j in range(i + 1)]
        assert attention_pairs(lengths, window) == sum(mask)


def test_per_token_is_six_n_and_attention() -> None:
    shape = Shape(256, 6, 8, 4, 32, 1024, 4096)
    six_n = 6 * (6 * layer_parameters(shape) + 256 * 4096)
    attention = 3 * 4 * 8 * 32 * 6 * (1024 + 1) / 2
    assert training_flops(shape, (1024,), 1024) / 1024 == six_n + attention


def test_importing_the_formulas_does_not_import_torch() -> None:
    code = "import sys, danlu.plan.flops, danlu.optim.schedules; sys.exit('torch' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0
