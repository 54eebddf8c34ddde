"""Vectors of texts, against transformers' hidden states."""

from __future__ import annotations

from typing import Any

import numpy as np
import openai
import pytest
import torch
from builders.served import Loaded, ask, serving
from builders.tiny_world import World


def reference(loaded: Loaded, world: World, texts: list[str], pooling: str) -> np.ndarray:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(world.base, dtype=torch.float32).eval()
    vectors = []
    for text in texts:
        ids = torch.tensor([loaded.served.find("tiny").chat_tokenizer.encode_prompt(text)])
        with torch.no_grad():
            states = model(ids).last_hidden_state[0].numpy()
        vector = states[-1] if pooling == "last" else states.mean(axis=0)
        vectors.append(vector / np.linalg.norm(vector))
    return np.array(vectors)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_are_transformers_hidden_states(loaded: Loaded, tiny_world: World, pooling: str) -> None:
    texts = ["Once upon a time", "The fox"]
    expected = reference(loaded, tiny_world, texts, pooling)
    with serving(loaded.served, loaded.engine(), pooling=pooling) as served:
        client = served.client()
        by_itself: dict[str, Any] = {}  # the client then asks for base64
        for options in (by_itself, {"encoding_format": "float"}):
            got = client.embeddings.create(model="tiny", input=texts, **options)
            assert [each.index for each in got.data] == [0, 1] and got.model_extra == {"pooling": pooling}
            assert np.allclose([each.embedding for each in got.data], expected, atol=1e-5)
        ids = loaded.served.find("tiny").chat_tokenizer.encode_prompt(texts[0])
        alone = client.embeddings.create(model="tiny", input=ids)
        assert np.allclose(alone.data[0].embedding, expected[0], atol=1e-5) and alone.usage.prompt_tokens == len(ids)
        other = reference(loaded, tiny_world, texts, "mean" if pooling == "last" else "last")
        assert not np.allclose(alone.data[0].embedding, other[0], atol=1e-3)
        adapted = client.embeddings.create(model="lora", input=texts[0]).data[0].embedding
        assert not np.allclose(adapted, expected[0], atol=1e-3), "an adapter has vectors of its own"
        assert np.allclose(
            client.embeddings.create(model="tiny", input=texts[0]).data[0].embedding, expected[0], atol=1e-5
        )
        with pytest.raises(openai.BadRequestError, match="input: text 0 has 300 tokens, but the model sees 128"):
            client.embeddings.create(model="tiny", input=[5] * 300)
        with pytest.raises(openai.BadRequestError, match="dimensions: no parameter of this server"):
            client.embeddings.create(model="tiny", input="a", dimensions=4)
        assert ask(f"{served.root}/health") == (200, {"status": "ready"})
