"""A small decoder, packs made of a seed, and a whole Run on a folder: what the tests of the loop work on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from danlu.core.stop_signals import StopRequest
from danlu.core.types import Pack, Sample
from danlu.models.config import ModelConfig
from danlu.models.decoder import Decoder
from danlu.models.initialize import initialize
from danlu.models.layer_spec import Experts
from danlu.models.load_balancing import Balancer, Balancing
from danlu.models.loading import build
from danlu.models.presets import from_scratch
from danlu.models.saving import save
from danlu.numerics.loss_scaling import LossScaler
from danlu.optim.build import build as build_optimizer
from danlu.optim.ema import Ema
from danlu.recipe import sections
from danlu.stages.learner import DecoderLearner
from danlu.training.checkpoints.store import CheckpointStore
from danlu.training.data_loader import DataLoader
from danlu.training.metrics import MetricsLog
from danlu.training.state import Cadence, Run
from danlu.training.watch import Watch

VOCABULARY = 64


def tiny_config(**changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    return from_scratch(sections.Model(config=values | changes, tokenizer="none"), VOCABULARY, 1, 2)


def tiny_model(seed: int = 0, **changes: Any) -> Decoder:
    model = build(tiny_config(**changes))
    initialize(model, seed)
    return model


def saved_models(folder: Path, families: Mapping[str, Mapping[str, Any]]) -> dict[str, Path]:
    """A `tiny_model` for each name with these changes of its config, saved below `folder`; returns their folders."""
    for name, changes in families.items():
        save(tiny_model(**changes), folder / name)
    return {name: folder / name for name in families}


class SyntheticPacks:
    """Pack n is a function of (seed, n): one to four documents of counting numbers, which can be learnt."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def at(self, n: int) -> Pack:
        random = np.random.default_rng([self.seed, n])
        samples = []
        for document in range(random.integers(1, 5)):
            length, start = int(random.integers(2, 12)), int(random.integers(0, VOCABULARY))
            tokens = ((start + np.arange(length)) % VOCABULARY).astype(np.int32)
            weights = np.ones(length, dtype=np.float32)
            weights[0] = 0
            samples.append(Sample(tokens, weights, f"made.jsonl:{n}.{document}"))
        return Pack(tuple(samples))

    def state(self, number: int) -> dict[str, Any]:
        return {"seed": self.seed}

    def restore(self, state: Mapping[str, Any]) -> None:
        assert state == self.state(0)


def tiny_run(
    folder: Path,
    *,
    steps: int = 6,
    source: Any = None,
    dtype: torch.dtype = torch.float32,
    ema: bool = False,
    micro: int = 2,
    checkpoint: int = 2,
    evaluation: int | None = None,
    watch: sections.Watch | None = None,
    scaler: LossScaler | None = None,
    stop_request: StopRequest | None = None,
    early_stop: sections.EarlyStop | None = None,
    device: str = "cpu",
    compiled: bool = False,
    experts: Experts | None = None,
    balancing: Balancing | None = None,
    **model: Any,
) -> Run:
    """experts: of every layer, kept even by `balancing`; by default layers are dense."""
    decoder = tiny_model(**model).to(device)
    balancer = None
    if experts is not None:
        feed = experts
        decoder = Decoder(decoder.config.with_layers(lambda layer: replace(layer, feed=feed))).to(device)
        initialize(decoder, 0)
        balancer = Balancer(decoder, balancing or Balancing())
    forward = decoder.compiled() if compiled else decoder
    metrics = MetricsLog(folder / "metrics.jsonl")
    return Run(
        learner=DecoderLearner(decoder, forward, torch.device(device), dtype, micro, balancer=balancer),
        optimizer=build_optimizer(decoder.named_parameters(), sections.AdamW(learning_rate=1e-2)),
        schedule=sections.Schedule(warmup=2),
        clip=1.0,
        data_loader=DataLoader(source or SyntheticPacks(), per_step=3, total=None),
        cadence=Cadence(total=steps, log=1, checkpoint=checkpoint, evaluation=evaluation),
        watch=Watch(watch or sections.Watch()),
        store=CheckpointStore(folder / "checkpoints", keep=100, background=False),
        metrics=metrics,
        recorders=(metrics,),
        stop_request=stop_request or StopRequest(),
        scaler=scaler,
        ema=Ema(decoder.named_parameters(), 0.9) if ema else None,
        held_out=(lambda: [SyntheticPacks(seed=7).at(n) for n in range(4)]) if evaluation else None,
        early_stop=early_stop,
    )
