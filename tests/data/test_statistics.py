from __future__ import annotations

import numpy as np

from danlu.data.statistics import beyond_positions


def test_samples_longer_than_the_models_positions_are_told() -> None:
    lengths = np.array([3, 40, 17, 300], np.int32)
    assert beyond_positions(64, 64, lengths) == []
    (said,) = beyond_positions(16, 128, lengths)
    assert said.startswith(
        "data.max_length: 128 is more than the 16 positions that the model has for a sample: 3 of 4 samples are "
        "longer, up to 128 tokens. "
    )
    assert "Set data.max_length to 16, or give the model more (max_position_embeddings, rope_scaling)" in said
    (said,) = beyond_positions(512, 2048, lengths)
    assert said.endswith("the 512 positions that the model has for a sample; no sample is longer than 512 tokens")
    (said,) = beyond_positions(512, 2048, None)
    assert "2,048 is more than the 512 positions that the model has for a sample. What lies beyond" in said
