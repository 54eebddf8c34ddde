"""The shapes of published models have as many parameters as their publishers' files."""

from __future__ import annotations

from danlu.planning.model_sizes import MODELS, config_of_size

PUBLISHED = {
    "Qwen3-0.6B": 596_049_920,
    "Llama-3.2-1B": 1_235_814_400,
    "Qwen3-1.7B": 1_720_574_976,
    "Llama-3.2-3B": 3_212_749_824,
    "Llama-3.1-8B": 8_030_261_248,
    "Qwen3-32B": 32_762_123_264,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.1-405B": 405_853_388_800,
}
"""Numbers in the safetensors files of huggingface.co/Qwen and huggingface.co/meta-llama."""


def test_parameters_are_those_published() -> None:
    counts = {name: config_of_size(name).parameter_count() for name in MODELS}
    assert counts == PUBLISHED
    assert list(counts.values()) == sorted(counts.values())  # the largest that fits is looked for by halves
