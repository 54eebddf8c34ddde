"""SGLang behind its HTTP interface: generation from token ids, pausing, and weight updates.

The interface is that of SGLang 0.5.23 (sglang/srt/entrypoints/http_server.py, managers/io_struct.py, layers/sampler.py,
model_executor/model_runner_components/weight_updater.py). It is started with --enable-lora for adapters, and with
--enable-memory-saver for sleep. Seeds count only where it is started with --enable-deterministic-inference; else each
run has other draws.

It reports log softmax(logits / temperature) over the whole vocabulary, before top-k, top-p and min-p, and, where they
are on, the tokens that they left and the log-probability that was drawn with: all that a `Completion` promises. A
repetition penalty is in its log-probabilities, and allowed tokens it does not have: such requests are refused. With a
grammar the vocabulary of its log-probabilities is what the grammar allows (`--grammar-backend llguidance`). Besides the
stop tokens of a request it always ends at those of its own tokenizer and model.

Tested against a stand-in that speaks this interface, not against SGLang: transfers over NCCL were never run.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from danlu.core.errors import ModelError
from danlu.core.http_client import HTTPClient, RequestRefused
from danlu.inference.engine import PauseMode
from danlu.inference.grammar import shared_lark
from danlu.inference.request import Request
from danlu.inference.support import Support
from danlu.remote_engines.server_interface import (
    Continuation,
    GroupServer,
    ServerAnswer,
    WeightGroup,
    check_grammar_engine,
    check_rotation,
    check_version,
    check_vocabulary,
    during,
    is_accepted,
    unknown_option,
    versions_by_token,
)

if TYPE_CHECKING:
    from torch import Tensor

    from danlu.models.config import ModelConfig

COMPARED_ROWS = 2
"""Rows of a matrix that are compared; one alone would do for weights that were trained."""
MISPLACED = (".k_proj.", ".v_proj.")
"""Read from a place in the stack of query, key and value that SGLang works out from hidden_size / heads, which is not
the width of a head in every model."""
_PROBE_TEMPERATURES = (1.0, 2.0)


class SGLangServer(GroupServer):
    """A `RolloutServer` for SGLang."""

    name = "SGLang"

    def __init__(self, client: HTTPClient) -> None:
        super().__init__(client)
        self._vocab_size = 0
        self._workers = 1
        self._replicas = 1
        self._scales_by_temperature = True
        self._adapters: set[str] = set()
        self._grammar_backend = self._reasoning_parser = None

    def check(self, config: ModelConfig) -> None:
        url = self.client.url
        info = self.client.get("/server_info")
        check_version(self.name, url, info.get("version"))
        if config.vocab_padding:
            raise ModelError(
                f"{url}: the model has {config.vocab_padding} rows that no token has (vocab_padding in config.json), "
                "which SGLang would draw. Use engine: embedded, vllm, or http with danlu serve --rollouts"
            )
        self._vocab_size = config.vocab_size
        self._grammar_backend, self._reasoning_parser = info.get("grammar_backend"), info.get("reasoning_parser")
        self._workers, self._replicas = info["tp_size"], info["dp_size"] * info["pp_size"]
        cards = self.client.get("/v1/models")["data"]
        self.context = next(card["max_model_len"] for card in cards if card.get("parent") is None)
        self._adapters = {card["id"] for card in cards if card.get("parent") is not None}
        check_vocabulary(self.name, url, config.vocab_size, lambda token: is_accepted(lambda: self._probe(1.0, token)))
        check_rotation(self.name, url, config, self.context)
        logprobs = [self._probe(temperature, 0) for temperature in _PROBE_TEMPERATURES]
        # Equal where SGLANG_RETURN_ORIGINAL_LOGPROB leaves out the temperature, which no question tells.
        self._scales_by_temperature = abs(logprobs[0] - logprobs[1]) > 1e-3

    def _probe(self, temperature: float, token: int) -> float:
        """The log-probability of a token after token 0, as the server reports it at a temperature."""
        # Two tokens to choose from, since with one SGLang counts the temperature as 1.
        sampling = {"temperature": temperature, "top_k": 2, "max_new_tokens": 1}
        body = {"input_ids": [0], "sampling_params": sampling, "return_logprob": True, "token_ids_logprob": [token]}
        return float(self.client.post("/generate", body)["meta_info"]["output_token_ids_logprobs"][0][0][0])

    def check_grammars(self) -> None:
        where, engine = f"{self.client.url}: {self.name}", self._grammar_backend
        check_grammar_engine(where, "--grammar-backend", engine, "llguidance", self._reasoning_parser)

    def problem(self, request: Request) -> str | None:
        sampling = request.sampling
        if sampling.repetition_penalty != 1:
            return "SGLang's log-probabilities are those after repetition_penalty: leave it at 1"
        if sampling.allowed_ids is not None:
            return "SGLang cannot confine an answer to allowed_ids: leave them out"
        if not self._scales_by_temperature and sampling.temperature not in (0, 1):
            return (
                f"temperature {sampling.temperature:g}: SGLang was started with SGLANG_RETURN_ORIGINAL_LOGPROB, and "
                "its log-probabilities leave out the temperature: start it without"
            )
        return unknown_option(self.name, request)

    def answer(self, continuation: Continuation) -> ServerAnswer:
        request, sampling = continuation.request, continuation.request.sampling
        body = {
            "rid": continuation.request_id,
            "input_ids": list(continuation.tokens),
            "sampling_params": {
                "max_new_tokens": continuation.max_new_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "min_p": sampling.min_p,
                "sampling_seed": continuation.seed,
                "stop_token_ids": sorted(request.stop_ids),
                "stop": list(request.stop_strings),
                "no_stop_trim": True,
                "skip_special_tokens": False,
                "ebnf": None if request.grammar is None else shared_lark(request.grammar),
            },
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": request.top_logprobs,
            "return_sampling_mask": sampling.truncates,
            "lora_path": continuation.adapter,
        }
        answer = self.client.post("/generate", body)
        tokens, info = answer["output_ids"], answer["meta_info"]
        logprobs = [float(value) for value, *_ in info["output_token_logprobs"]]
        support, top = None, None
        drawn = [0.0] * len(logprobs) if sampling.temperature == 0 else list(logprobs)
        if sampling.truncates:
            drawn = [float(value) for value in info["output_token_sampling_logprobs"]]
            support = [self._support(ids) for ids in info["output_token_sampling_mask"]]
        if request.top_logprobs:
            top = [tuple((token, value) for value, token, *_ in entry) for entry in info["output_top_logprobs"]]
        spans = info.get("weight_versions") or [{"version": info["weight_version"], "start": 0, "end": len(tokens)}]
        labels = versions_by_token(spans, len(tokens))
        if request.grammar is not None:
            logprobs = [math.nan] * len(logprobs)
        lacks_support = request.grammar is not None and support is None
        return ServerAnswer(tokens, logprobs, drawn, labels, info["finish_reason"]["type"], support, lacks_support, top)

    def _support(self, ids: Sequence[int]) -> Support:
        import numpy as np

        return Support.of(np.array(sorted(ids), dtype=np.int64), self._vocab_size)

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.client.post("/abort_request", {"rid": request_id})

    def pause(self, mode: PauseMode) -> None:
        # retract: running answers give their cache back, so that it can be dropped, and are read again.
        self.client.post("/pause_generation", {"mode": "abort" if mode == "abort" else "retract"})

    def resume(self) -> None:
        self.client.post("/continue_generation", {})

    def sleep(self) -> None:
        self.pause("abort")
        # Weights that are released are lost; keys and values are read again.
        self.client.post("/release_memory_occupation", {"tags": ["kv_cache"]})

    def wake(self) -> None:
        self.client.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
        self.resume()

    def drop_prefix_cache(self) -> None:
        self.client.post("/flush_cache")

    def version_label(self) -> str:
        return str(self.client.get("/model_info")["weight_version"])

    def label_version(self, label: str) -> None:
        self.client.post("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    def load_folder(self, folder: Path, label: str) -> None:
        body = {"model_path": str(folder), "weight_version": label, "flush_cache": True}
        self.client.post("/update_weights_from_disk", body)

    def open_group(self, address: str) -> WeightGroup:
        from danlu.parallel.external_group import TorchGroup

        if self._replicas > 1:
            raise ModelError(
                f"{self.client.url}: hand_over: group: SGLang takes weights over a process group only without data and "
                f"pipeline parallelism, and this one has {self._replicas} replicas or stages. Use hand_over: folder"
            )
        group = TorchGroup(
            f"danlu-weights-{uuid.uuid4().hex[:8]}", self._workers + 1, address, timeout_s=self.client.timeout_s
        )
        body = {
            "master_address": address,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": self._workers + 1,
            "group_name": group.name,
            "backend": group.backend,
        }
        return during(group.join, self.client, "/init_weights_update_group", body)

    def begin_update(self) -> None:
        self.client.post("/begin_weight_update", {})

    def send_bucket(self, group: WeightGroup, bucket: Sequence[tuple[str, Tensor]]) -> None:
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": group.name,
            "flush_cache": False,  # once, after the last
        }

        def broadcast() -> None:
            for _, tensor in bucket:
                group.broadcast(tensor)

        during(broadcast, self.client, "/update_weights_from_distributed", body)

    def finish_update(self, label: str) -> None:
        self.client.post("/end_weight_update", {})
        self.label_version(label)

    def load_adapter(self, name: str, folder: Path) -> None:
        if name in self._adapters:
            self.client.post("/unload_lora_adapter", {"lora_name": name})
        self.client.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        self._adapters.add(name)

    def differing(self, tensors: Mapping[str, Tensor]) -> list[str]:
        names = []
        for name, tensor in tensors.items():
            if any(part in name for part in MISPLACED):
                continue
            try:
                rows = self.client.post("/get_weights_by_name", {"name": name, "truncate_size": COMPARED_ROWS})
            except RequestRefused:
                continue  # the model has no such tensor, or not as a model folder does
            if rows and not _equal_rounded(tensor[:COMPARED_ROWS], rows):
                names.append(name)
        return names


def _equal_rounded(tensor: Tensor, values: list[Any]) -> bool:
    """Whether values are those of a tensor, as they are or rounded to a type that a server may keep them in."""
    import torch

    served = torch.tensor(values, dtype=torch.float32)
    own = tensor.detach().to("cpu")
    casts = (own.to(dtype).float() for dtype in {own.dtype, torch.bfloat16, torch.float16})
    return any(torch.equal(cast, served) for cast in casts)
