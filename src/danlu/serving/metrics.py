"""The numbers of a server in Prometheus's text format, by danlu's names and by vLLM's where these mean the same.

vLLM's are those of its page "Production Metrics" (docs.vllm.ai, version 0.32).
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from danlu.inference.engine import EngineStatistics
from danlu.inference.request import Completion

FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
PER_TOKEN_S = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
WHOLE_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0)


class Histogram:
    """Counts of values by upper bounds, as Prometheus has them."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self._counts)

    def add(self, value: float) -> None:
        """Takes a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def lines(self, name: str, label: str) -> Iterable[str]:
        """Returns the samples in text. label: such as `model_name="tiny"`."""
        below = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            below += count
            yield f'{name}_bucket{{{label},le="{bound}"}} {below}'
        yield f"{name}_sum{{{label}}} {self.total}"
        yield f"{name}_count{{{label}}} {below}"


@dataclass
class AnswerTimes:
    """How long answers take, seen from their requests; filled by the thread of the engine."""

    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_S))
    per_token: Histogram = field(default_factory=lambda: Histogram(PER_TOKEN_S))
    whole: Histogram = field(default_factory=lambda: Histogram(WHOLE_S))
    finished: Counter[str] = field(default_factory=Counter)
    """Answers by the reason of their end."""
    rejected: int = 0
    """Requests that found the queue full."""

    def add(self, completion: Completion, waited_s: float | None, total_s: float) -> None:
        """Takes a complete answer. waited_s: until its first token; None where it has none."""
        self.finished[completion.finish] += 1
        self.whole.add(total_s)
        if waited_s is not None:
            self.first_token.add(waited_s)
            if len(completion.tokens) > 1:
                self.per_token.add((total_s - waited_s) / (len(completion.tokens) - 1))


def metrics_text(statistics: EngineStatistics, times: AnswerTimes, model: str, *, sleeps: bool = False) -> str:
    """All numbers. model: the name of the first model of the server."""
    label = f"model_name={json.dumps(model)}"
    own = (
        ("requests_running", "gauge", "Answers that grow.", statistics.running),
        ("requests_waiting", "gauge", "Answers that wait for room.", statistics.waiting),
        ("requests_rejected_total", "counter", "Requests that found the queue full.", times.rejected),
        ("cache_blocks", "gauge", "Blocks of the cache of keys and values.", statistics.blocks),
        ("cache_blocks_used", "gauge", "Blocks that unfinished answers need.", statistics.blocks_used),
        ("tokens_generated_total", "counter", "Tokens drawn.", statistics.generated_tokens),
        ("prompt_tokens_computed_total", "counter", "Tokens of prompts read.", statistics.prompt_tokens_computed),
        ("prompt_tokens_reused_total", "counter", "Tokens of prompts found cached.", statistics.prompt_tokens_reused),
        ("preemptions_total", "counter", "Answers that had to make room.", statistics.preemptions),
    )
    lines = [
        f"# HELP danlu_{name} {about}\n# TYPE danlu_{name} {kind}\ndanlu_{name} {value}"
        for name, kind, about, value in own
    ]
    read = statistics.prompt_tokens_computed + statistics.prompt_tokens_reused
    as_vllm = (
        ("num_requests_running", "gauge", "Answers that grow.", statistics.running),
        ("num_requests_waiting", "gauge", "Answers that wait for room.", statistics.waiting),
        ("kv_cache_usage_perc", "gauge", "Share of the cache in use; 1 is all.", _share(statistics)),
        ("engine_sleep_state", "gauge", "Whether the engine sleeps.", int(sleeps)),
        ("prefix_cache_queries_total", "counter", "Tokens of prompts looked for in the cache.", read),
        ("prefix_cache_hits_total", "counter", "Tokens of prompts found there.", statistics.prompt_tokens_reused),
        ("prompt_tokens_total", "counter", "Tokens of prompts.", read),
        ("generation_tokens_total", "counter", "Tokens drawn.", statistics.generated_tokens),
        ("num_preemptions_total", "counter", "Answers that had to make room.", statistics.preemptions),
    )
    for name, kind, about, value in as_vllm:
        lines += [f"# HELP vllm:{name} {about}", f"# TYPE vllm:{name} {kind}", f"vllm:{name}{{{label}}} {value}"]
    lines += ["# HELP vllm:request_success_total Answers by their end.", "# TYPE vllm:request_success_total counter"]
    lines += [
        f'vllm:request_success_total{{{label},finished_reason="{reason}"}} {count}'
        for reason, count in sorted(times.finished.items())
    ]
    for name, about, histogram in (
        ("time_to_first_token_seconds", "From the request to the first token.", times.first_token),
        ("request_time_per_output_token_seconds", "Mean of an answer, from its first token on.", times.per_token),
        ("e2e_request_latency_seconds", "From the request to the end of the answer.", times.whole),
    ):
        lines += [f"# HELP vllm:{name} {about}", f"# TYPE vllm:{name} histogram"]
        lines += histogram.lines(f"vllm:{name}", label)
    return "\n".join(lines) + "\n"


def _share(statistics: EngineStatistics) -> float:
    return statistics.blocks_used / max(1, statistics.blocks)
