"""A small decoder behind a stand-in for a rollout server: it answers one token at a time, uncached but for whole
prefixes.

Log-probabilities, adapters and weights are real; a cache of what each prefix ends in stands in for a prefix cache, so
that one which is not dropped keeps answering with old weights.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers
import torch
from safetensors.torch import load_file
from torch import Tensor

from builders.tiny_adapters import adapter_set
from danlu.adapters.adapter_config import read_adapter_config
from danlu.adapters.peft_folder import add_adapter
from danlu.models.attend import PackedAttention
from danlu.models.decoder import Decoder
from danlu.models.hf_layout import hf_tensors

NO_BIAS: Mapping[str, float] = MappingProxyType({})


@dataclass
class Faults:
    """What goes wrong on purpose."""

    die_after: int | None = None  # answers, then connections break
    ignored: tuple[str, ...] = ()  # tensors of a model folder that updates leave as they are
    transposed: tuple[str, ...] = ()  # square ones that updates turn
    keeps_prefix_cache: bool = False
    ignores_adapters: bool = False
    allowed_beside: tuple[int, ...] = ()  # tokens that grammars allow everywhere, without being read by them
    left_out: tuple[int, ...] = ()  # tokens that grammars leave out


class GrammarMatcher:
    """One answer's grammar, as the servers have llguidance read it: ended by eos_token alone."""

    def __init__(self, tokenizer: Path, vocab_size: int, text: str) -> None:
        import llguidance

        tokens = _grammar_tokens(tokenizer, vocab_size)
        self._matcher = llguidance.LLMatcher(tokens, llguidance.grammar_from("grammar", text))
        assert not self._matcher.is_error(), self._matcher.get_error()

    def masked(self, logits: Tensor, faults: Faults) -> Tensor:
        bits = torch.tensor(list(self._matcher.compute_bitmask()), dtype=torch.uint8)
        allowed = (bits[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).view(-1)[: len(logits)].bool()
        left = allowed.clone()
        left[list(faults.left_out)] = False
        if left.any():
            allowed = left
        allowed[list(faults.allowed_beside)] = True
        return logits.masked_fill(~allowed, float("-inf"))

    def accept(self, token: int, faults: Faults) -> None:
        if token not in faults.allowed_beside and not self._matcher.is_stopped():
            assert self._matcher.consume_token(token)


@cache
def _grammar_tokens(tokenizer: Path, vocab_size: int) -> Any:
    import llguidance

    end = json.loads((tokenizer / "tokenizer_config.json").read_text())["eos_token"]
    backend = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    end_id = backend.token_to_id(end if isinstance(end, str) else end["content"])
    return llguidance.LLTokenizer(backend.to_str(), n_vocab=vocab_size, eos_token=end_id)


@dataclass
class Generation:
    """One answer while it grows."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)  # [V] each, log softmax(logits)
    scaled: list[Tensor] = field(default_factory=list)  # [V] each, log softmax(logits / temperature)
    drawn: list[Tensor] = field(default_factory=list)  # [V] each, what was drawn from
    labels: list[str] = field(default_factory=list)
    finish: str | None = None


class ServedModel:
    """Safe for several threads: one token of one answer is computed at a time."""

    def __init__(self, model: Decoder, faults: Faults) -> None:
        self.model, self.faults = model, faults
        self.adapters = adapter_set(model)
        self.label = "default"
        self.loaded: dict[str, str] = {}  # name of each adapter: its name in the set, one for each time it was loaded
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.paused = False
        self.aborting: set[str] = set()
        self.running: set[str] = set()
        self.progress: dict[str, int] = {}  # tokens of each answer
        self.stop_after: int | None = None  # tokens, at which answers wait for `go_on`
        self._cache: dict[tuple[str | None, tuple[int, ...]], Tensor] = {}

    # -- generation ----------------------------------------------------------------------------------------------------

    def generate(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop_ids: Sequence[int] = (),
        allowed: Sequence[int] | None = None,
        bias: Mapping[str, float] = NO_BIAS,
        adapter: str | None = None,
        matcher: GrammarMatcher | None = None,
    ) -> Generation:
        """An answer, complete or aborted. matcher: all log-probabilities are among the tokens that it allows."""
        answer = Generation()
        with self.lock:
            while self.paused:
                self.changed.wait()
            self.running.add(request_id)
        generator = torch.Generator().manual_seed(seed)
        while answer.finish is None:
            with self.lock:
                self.progress[request_id] = len(answer.tokens)
                while (self.paused or len(answer.tokens) == self.stop_after) and request_id not in self.aborting:
                    self.changed.wait()
                if request_id in self.aborting:
                    answer.finish = "abort"
                    break
                logits = self._logits((*prompt, *answer.tokens), adapter)
                if matcher is not None:
                    logits = matcher.masked(logits, self.faults)
                scaled = logits / (temperature or 1.0)
                left = filtered(scaled, top_k, top_p)
                for biased, amount in bias.items():
                    left[int(biased)] += amount
                if allowed is not None:
                    outside = torch.ones(len(left), dtype=torch.bool)
                    outside[list(allowed)] = False
                    left = left.masked_fill(outside, float("-inf"))
                probabilities = left.softmax(-1)
                token = int(
                    left.argmax() if temperature == 0 else torch.multinomial(probabilities, 1, generator=generator)
                )
                answer.tokens.append(token)
                if matcher is not None:
                    matcher.accept(token, self.faults)
                answer.logprobs.append(logits.log_softmax(-1))
                answer.scaled.append(scaled.log_softmax(-1))
                answer.drawn.append(left.log_softmax(-1))
                answer.labels.append(self.label)
                if token in stop_ids:
                    answer.finish = "stop"
                elif len(answer.tokens) == max_new_tokens:
                    answer.finish = "length"
        with self.lock:
            self.running.discard(request_id)
            self.aborting.discard(request_id)
            self.changed.notify_all()
        return answer

    def _logits(self, tokens: tuple[int, ...], adapter: str | None) -> Tensor:
        """[V] float32 after a sequence."""
        key = (adapter, tokens)
        if key not in self._cache:
            active = () if adapter is None or self.faults.ignores_adapters else (self.loaded[adapter],)
            self.adapters.activate(*active)
            # A vocabulary that is said to be larger than it is has rows to answer with all the same.
            ids = torch.tensor(tokens).clamp(max=self.model.config.vocab_size - 1)
            positions = torch.arange(len(tokens))
            with torch.no_grad():
                hidden = self.model(ids, positions, PackedAttention((0, len(tokens))), torch.float32)
                self._cache[key] = self.model.logits(hidden[-1:])[0]
        return self._cache[key]

    def go_on(self) -> None:
        with self.lock:
            self.stop_after = None
            self.changed.notify_all()

    def abort(self, request_ids: Sequence[str]) -> None:
        with self.lock:
            self.aborting |= set(request_ids) & self.running
            self.changed.notify_all()

    def pause(self, mode: str) -> None:
        with self.lock:
            self.paused = True
            if mode == "abort":
                self.aborting |= self.running
                self.changed.notify_all()
                while self.running:
                    self.changed.wait()

    def resume(self) -> None:
        with self.lock:
            self.paused = False
            self.changed.notify_all()

    def drop_cache(self) -> None:
        with self.lock:
            if not self.faults.keeps_prefix_cache:
                self._cache.clear()

    # -- weights -------------------------------------------------------------------------------------------------------

    def load(self, name: str, value: Tensor) -> None:
        """Takes over one tensor of a model folder."""
        if name in self.faults.ignored:
            return
        value = value.T if name in self.faults.transposed else value
        whole = next(tensor for tensor in hf_tensors(self.model.config) if tensor.name == name)
        parts = [self.parameter(part) for part in whole.parameters]
        for parameter, rows in zip(parts, value.split([len(part) for part in parts]), strict=True):
            parameter.data.copy_(rows)

    def load_folder(self, folder: Path) -> None:
        for file in sorted(folder.glob("*.safetensors")):
            for name, value in load_file(file).items():
                self.load(name, value)

    def load_adapter(self, name: str, folder: Path) -> None:
        with self.lock:
            own = f"{name}-{len(self.adapters.added)}"
            add_adapter(self.adapters, own, read_adapter_config(folder))
            self.loaded[name] = own

    def parameter(self, name: str) -> Any:
        return self.adapters.base_parameters()[name]

    def tensor(self, name: str) -> Tensor:
        """A tensor of a model folder."""
        whole = next(tensor for tensor in hf_tensors(self.model.config) if tensor.name == name)
        return torch.cat([self.parameter(part).detach() for part in whole.parameters])

    def checksums(self) -> dict[str, str]:
        """By vLLM's names, of which some are stacked."""
        tensors = {tensor.name: self.tensor(tensor.name) for tensor in hf_tensors(self.model.config)}
        stacks = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
        for fused, parts in stacks.items():
            for name in [name for name in tensors if f".{parts[0]}." in name]:
                rows = [tensors.pop(name.replace(parts[0], part)) for part in parts]
                tensors[name.replace(parts[0], fused)] = torch.cat(rows)
        return {
            f"dp0:pp0:pcp0:tp0:{name}": hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
            for name, tensor in tensors.items()
        }


def filtered(scaled: Tensor, top_k: int, top_p: float) -> Tensor:
    """[V] with -inf where a token is left out."""
    order = scaled.argsort(descending=True)
    kept = torch.ones(len(order), dtype=torch.bool)
    if top_k > 0:
        kept[top_k:] = False
    probabilities = scaled[order].softmax(-1)
    kept &= probabilities.cumsum(-1) - probabilities < top_p
    left = torch.full_like(scaled, float("-inf"))
    left[order[kept]] = scaled[order[kept]]
    return left
