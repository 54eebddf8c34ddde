"""The engine's statistics in Prometheus's text format."""

from __future__ import annotations

from danlu.inference.engine import EngineStatistics


def metrics_text(statistics: EngineStatistics) -> str:
    """The engine's statistics in Prometheus's text format."""
    metrics = (
        ("requests_running", "gauge", "Answers that grow.", statistics.running),
        ("requests_waiting", "gauge", "Answers that wait for room.", statistics.waiting),
        ("cache_blocks", "gauge", "Blocks of the cache of keys and values.", statistics.blocks),
        ("cache_blocks_used", "gauge", "Blocks that unfinished answers need.", statistics.blocks_used),
        ("tokens_generated_total", "counter", "Tokens drawn.", statistics.generated_tokens),
        ("prompt_tokens_computed_total", "counter", "Tokens of prompts read.", statistics.prompt_tokens_computed),
        ("prompt_tokens_reused_total", "counter", "Tokens of prompts found cached.", statistics.prompt_tokens_reused),
        ("preemptions_total", "counter", "Answers that had to make room.", statistics.preemptions),
    )
    lines = [
        f"# HELP danlu_{name} {about}\n# TYPE danlu_{name} {kind}\ndanlu_{name} {value}"
        for name, kind, about, value in metrics
    ]
    return "\n".join(lines) + "\n"
