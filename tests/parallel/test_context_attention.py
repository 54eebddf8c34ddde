"""Attention over documents that are cut over context ranks is that of one process under a dense mask."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from builders.context_steps import Case, attended, reference, traffic
from builders.process_group import run_group
from torch import Tensor

pytestmark = pytest.mark.distributed

KINDS = {
    "GQA": Case(),
    "window": Case(window=7),
    "long window": Case(window=50, pack="long"),
    "softcap and sinks": Case(softcap=2.0, sinks=True),
    "fewer key/value heads than ranks": Case(kv_heads=1, sinks=True, window=20),
    "latent": Case(latent=True),
    "latent, ranks without tokens": Case(latent=True, pack="few tokens"),
    "nothing is cut": Case(pack="short", sinks=True),
    "one document": Case(pack="long", kv_heads=4),
    "ranks without tokens": Case(pack="few tokens", sinks=True),
    "trees": Case(pack="trees", sinks=True),
    "trees, window": Case(pack="trees", window=25, softcap=2.0),
    "trees, latent": Case(pack="trees", latent=True),
    "float64": Case(dtype=torch.float64, window=30, sinks=True, softcap=3.0),
    "latent, float64": Case(latent=True, dtype=torch.float64),
    "by products": Case(window=20, sinks=True, kernels="none"),
    "by a GPU's kernel": Case(sinks=True, kernels="flash"),
    "window, by a GPU's kernel": Case(window=7, kernels="flash"),
    "trees, window, by a GPU's kernel": Case(pack="trees", window=25, kernels="flash"),
    "latent, by a GPU's kernel": Case(latent=True, kernels="flash", dtype=torch.float64),
}
METHODS = {
    "ring of 2": (2, "ring", 1),
    "gather of 2": (2, "gather", 1),
    "ulysses of 2": (2, "ring", 2),
    "ring of 4": (4, "ring", 1),
    "gather of 4": (4, "gather", 1),
    "ulysses of 4": (4, "ring", 4),
    "ring of 2 x ulysses of 2": (4, "ring", 2),
    "gather of 2 x ulysses of 2": (4, "gather", 2),
}
FAULTS = {
    "window off by one at a border": Case(window=7),
    "documents leak": Case(),
    "positions begin anew": Case(),
    "sinks once per rank": Case(sinks=True),
    "gradients of keys stay": Case(),
    "siblings": Case(pack="trees"),
    "parents are not seen": Case(pack="trees"),
}
CASES = {
    **{
        (method, kind): (ranks, replace(case, transport=transport, ulysses=ulysses))
        for method, (ranks, transport, ulysses) in METHODS.items()
        for kind, case in KINDS.items()
    },
    **{("ring of 4", fault): (4, replace(case, fault=fault)) for fault, case in FAULTS.items()},
}
Results = dict[tuple[str, str], list[Tensor]]


@pytest.fixture(scope="module")
def results() -> Results:
    """Of each case the output and the gradients of the whole pack, put together of all ranks'."""
    whole: Results = {}
    for size in (2, 4):
        names = [name for name, (ranks, _) in CASES.items() if ranks == size]
        by_rank = run_group(attended, size, [CASES[name][1] for name in names])
        for number, name in enumerate(names):
            whole[name] = assembled([rank[number] for rank in by_rank], CASES[name][1])
    return whole


def assembled(by_rank: list[list[Tensor]], case: Case) -> list[Tensor]:
    """Rows of tokens in the order of the pack; of parameters, sums over the ranks."""
    rows = torch.cat([tensors[0] for tensors in by_rank])
    of_tokens = 1 + 1 + (1 if case.latent else 2)  # output, q, what is stored
    parts = list(zip(*(tensors[1:] for tensors in by_rank), strict=True))
    return [torch.cat(part)[rows.argsort()] if n < of_tokens else sum(part) for n, part in enumerate(parts)]  # type: ignore[misc]


def distances(got: list[Tensor], want: list[Tensor]) -> list[float]:
    return [float((x.double() - y).norm() / y.norm()) for x, y in zip(got, want, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_context_ranks_are_one_process(results: Results, method: str, kind: str) -> None:
    case = CASES[method, kind][1]
    limit = 1e-12 if case.dtype == torch.float64 else 1e-6
    errors = distances(results[method, kind], reference(case))
    assert len(errors) == 4 + case.sinks and max(errors) < limit, errors


@pytest.mark.parametrize("fault", FAULTS)
def test_mistakes_are_seen(results: Results, fault: str) -> None:
    """Negative controls: each moves the output or a gradient by far more than rounding."""
    assert max(distances(results["ring of 4", fault], reference(FAULTS[fault]))) > 1e-3


def test_what_a_ring_sends() -> None:
    """To the byte: each rank passes on the keys of all ranks but the next one's, twice, and their gradients."""
    cases = [Case(), Case(latent=True), Case(pack="short"), Case(pack="few tokens"), Case(pack="trees")]
    for rank, counts in enumerate(run_group(traffic, 4, cases)):
        for case, sent in zip(cases, counts, strict=True):
            rows = [sum(run.tokens for run in share.chunks) for share in case.shares(4)]
            width = 12 if case.latent else case.kv_heads * 14
            keys = sum(rows) - rows[(rank + 1) % 4]
            gradients = sum(rows) - rows[rank]
            expected = 4 * width * (2 * keys + gradients)
            assert sent == ({"point-to-point": expected} if expected else {}), (case, rank)
