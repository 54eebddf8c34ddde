"""vLLM behind its HTTP interface: completions of token ids, pausing, and the weight updates of its development mode.

The interface is that of vLLM 0.32 and 0.33 (vllm/entrypoints/openai/completion, vllm/entrypoints/rl/online,
vllm/entrypoints/serve/dev, vllm/distributed/weight_transfer). Completions of 0.32 do not say which weights drew each
token, so the label is read before and after each answer, and updates abort the answers that are under way.

The server is started with VLLM_SERVER_DEV_MODE=1, for adapters also with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and
--enable-lora, for `hand_over: group` with --weight-transfer-config '{"backend": "nccl"}'.

It reports one log-probability for each token. With --logprobs-mode raw_logprobs (its default) that is log
softmax(logits), with processed_logprobs that of the sampling distribution. Both satisfy `Completion` at temperature 1
without filters, the latter at other temperatures too. With filters a Completion has two log-probabilities and the
tokens that were left, so such requests are refused.

A grammar is different: both modes count the tokens that it allows alone, and with `--structured-outputs-config.backend
guidance` llguidance says here which they were. The log-probability over the whole vocabulary is then not known.

Folders, adapters, rows of new tokens, grammars and the comparison of tensors are tested with vLLM 0.32 on a CPU
(tests/remote_engines/test_real_vllm.py). 0.33 was tested against a stand-in that speaks this interface, and transfers
over NCCL were never run.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from danlu.core.errors import ModelError
from danlu.core.http_client import HTTPClient, RequestRefused
from danlu.core.layer_types import LANGUAGE_PART
from danlu.core.safetensors_format import raw_bytes
from danlu.core.terminal import print_status
from danlu.inference.engine import PauseMode
from danlu.inference.grammar import shared_lark
from danlu.inference.request import Request
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

OpenGroup = Callable[[str, int], tuple[dict[str, Any], Callable[[], WeightGroup]]]
"""Maps (this machine's address, processes of the group) to the server's description of the group, and a function that
joins it as rank 0; the server joins at the same time."""

FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Layers that vLLM stacks by rows, of those in a model folder."""
PACKED = hashlib.sha256(b"").hexdigest()
"""The digest of a layer that vLLM has packed for its kernels, as it does on CPUs: nothing of the tensor is left."""
UNCHANGED = (
    *("self_attn.o_proj", "mlp.down_proj", "layernorm", "model.norm"),
    *("self_attn.qkv_proj", "mlp.gate_up_proj", "self_attn.q_norm", "self_attn.k_norm"),
    *("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", "final_layer_norm"),
)
"""Layers that vLLM has as a model folder does; rows of the embedding and the head are padded. The last are GPT-NeoX's,
which vLLM computes by transformers' class: queries, keys and values lie head by head there too."""
_NEVER = -100.0
"""vLLM's least bias of a logit, whose probability is then beyond float32."""
PREFIXES = {"gpt_neox.": "model.", f"{LANGUAGE_PART}.": "language_model.model."}
"""How tensors begin in model folders, and in vLLM, where the two differ. Those of language parts are read from the
mappers of vLLM 0.32 (qwen2_5_vl.py, qwen3_vl.py, gemma3_mm.py, gemma4_mm.py, mistral3.py)."""


def open_nccl_group(address: str, world_size: int) -> tuple[dict[str, Any], Callable[[], WeightGroup]]:
    """Opens a group of vLLM's own kind: NCCL, by an id that the server receives, through torch's binding alone."""
    from danlu.parallel.external_group import NCCLGroup

    unique_id = NCCLGroup.unique_id()
    info = {"nccl_unique_id_b64": base64.b64encode(unique_id).decode()}
    return info, lambda: NCCLGroup(unique_id, world_size)


class VLLMServer(GroupServer):
    """A `RolloutServer` for vLLM."""

    name = "vLLM"

    def __init__(self, client: HTTPClient, *, bucket_bytes: int, open_group: OpenGroup = open_nccl_group) -> None:
        super().__init__(client)
        self._bucket_bytes = bucket_bytes
        self._open_group = open_group
        self._model = ""
        self._logprobs_mode = ""
        self._structured_outputs: dict[str, Any] = {}
        self._padding: dict[str, float] = {}
        """The bias of rows that no token has, which are not to be drawn."""

    def check(self, config: ModelConfig) -> None:
        url = self.client.url
        release = check_version(self.name, url, self.client.get("/version").get("version"))
        self.labels_tokens = release >= (0, 33)
        try:
            settings = self.client.get("/server_info", {"config_format": "json"})["vllm_config"]
        except RequestRefused as error:
            if error.status != 404:
                raise
            raise ModelError(
                f"{url}: vLLM was started without VLLM_SERVER_DEV_MODE=1, so its weights cannot be replaced: start it "
                "with that variable, where nobody but the trainer can reach it"
            ) from None
        self._logprobs_mode = settings["model_config"]["logprobs_mode"]
        self._structured_outputs = settings["structured_outputs_config"]
        if not self._logprobs_mode.endswith("_logprobs"):
            raise ModelError(
                f"{url}: vLLM was started with --logprobs-mode {self._logprobs_mode}, which gives no "
                "log-probabilities. Use processed_logprobs"
            )
        self._padding = {str(row): _NEVER for row in range(config.vocab_size, config.vocab_rows)}
        if self._padding and self._logprobs_mode == "raw_logprobs":
            raise ModelError(
                f"{url}: the model has {config.vocab_padding} rows that no token has (vocab_padding in config.json), "
                "which vLLM counts in its log-probabilities. Start it with --logprobs-mode processed_logprobs"
            )
        self._take_over()
        base = next(card for card in self.client.get("/v1/models")["data"] if card.get("parent") is None)
        self._model, self.context = base["id"], base["max_model_len"]
        check_vocabulary(self.name, url, config.vocab_rows, lambda token: is_accepted(lambda: self._probe(token)))
        check_rotation(self.name, url, config, self.context)
        if config.head_bias:  # of vLLM 0.32, models/phimoe.py, which has the bias and gives its logits none
            print_status(
                f"{url}: vLLM leaves out the bias of this model's head. Where it is not zero, answers are another "
                "model's, and the canary ends the run: use rollout.engine: embedded"
            )

    def _take_over(self) -> None:
        """Wakes and resumes a server that a trainer which was killed has left asleep or paused.

        It would answer nothing until then, not even the check's own requests.
        """
        asleep = self.client.get("/is_sleeping")["is_sleeping"]
        if not asleep and not self.client.get("/is_paused")["is_paused"]:
            return
        print_status(f"{self.client.url}: vLLM was {'asleep' if asleep else 'paused'}, and goes on for this run")
        if asleep:
            self.wake()
        self.pause("abort")
        self.resume()

    def _probe(self, token: int) -> None:
        """Asks for one token after this one."""
        self.client.post("/v1/completions", {"model": self._model, "prompt": [token], "max_tokens": 1})

    def check_grammars(self) -> None:
        settings = self._structured_outputs
        parser = None if settings["enable_in_reasoning"] else settings["reasoning_parser"]
        flag = "--structured-outputs-config.backend"
        check_grammar_engine(f"{self.client.url}: {self.name}", flag, settings["backend"], "guidance", parser)

    def problem(self, request: Request) -> str | None:
        sampling = request.sampling
        greedy, raw = sampling.temperature == 0, self._logprobs_mode == "raw_logprobs"
        changed = sampling.repetition_penalty != 1 or sampling.allowed_ids is not None
        if sampling.truncates or (changed and not (greedy and raw)):
            return (
                "vLLM gives one log-probability a token, but with top_k, top_p, min_p, repetition_penalty or "
                "allowed_ids the model's differs from the one that was drawn with: leave these at their defaults"
            )
        if raw and sampling.temperature not in (0, 1):
            return (
                f"temperature {sampling.temperature:g}: vLLM was started with --logprobs-mode raw_logprobs, and these "
                "log-probabilities leave out the temperature: start it with --logprobs-mode processed_logprobs"
            )
        return unknown_option(self.name, request)

    def answer(self, continuation: Continuation) -> ServerAnswer:
        request, sampling = continuation.request, continuation.request.sampling
        body = {
            "model": continuation.adapter or self._model,
            "prompt": list(continuation.tokens),
            "add_special_tokens": False,
            "request_id": continuation.request_id,
            "max_tokens": continuation.max_new_tokens,
            "temperature": sampling.temperature,
            # All of them, since the server has defaults of its own from generation_config.json.
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "allowed_token_ids": None if sampling.allowed_ids is None else list(sampling.allowed_ids),
            "logit_bias": self._padding or None,
            "structured_outputs": None if request.grammar is None else {"grammar": shared_lark(request.grammar)},
            "seed": continuation.seed,
            "stop_token_ids": sorted(request.stop_ids),
            "ignore_eos": True,  # the request names every token that ends its answers
            "stop": list(request.stop_strings),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "logprobs": request.top_logprobs,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "return_weight_versions": True,
        }
        label = None if self.labels_tokens else self.version_label()
        choice = self.client.post("/v1/completions", body)["choices"][0]
        if label is not None and label != self.version_label():
            # The weights were replaced meanwhile, and nothing says before which token: it is asked for again.
            return ServerAnswer([], [], [], [], "abort")
        tokens, logprobs = choice["token_ids"], choice["logprobs"]
        own = [float(value) for value in logprobs["token_logprobs"]]
        top = None
        if request.top_logprobs:
            top = [_likeliest(entry, request.top_logprobs) for entry in logprobs["top_logprobs"]]
        labels = [label] * len(tokens) if label else versions_by_token(choice["weight_versions"] or (), len(tokens))
        drawn = [0.0] * len(own) if sampling.temperature == 0 else list(own)
        if request.grammar is not None:
            own = [math.nan] * len(own)
        lacks_support = request.grammar is not None
        return ServerAnswer(tokens, own, drawn, labels, choice["finish_reason"], lacks_support=lacks_support, top=top)

    def abort(self, request_ids: Sequence[str]) -> None:
        # As the completions interface names the one prompt of a request.
        self.client.post("/abort_requests", {"request_ids": [f"cmpl-{request_id}-0" for request_id in request_ids]})

    def pause(self, mode: PauseMode) -> None:
        self.client.post("/pause", query={"mode": mode})

    def resume(self) -> None:
        self.client.post("/resume")

    def sleep(self) -> None:
        # Level 1: weights move to the host's memory, keys and values are dropped.
        self.client.post("/sleep", query={"level": 1, "mode": "abort"})

    def wake_weights(self) -> None:
        self.client.post("/wake_up", query={"tags": "weights"})

    def wake(self) -> None:
        self.client.post("/wake_up")

    def drop_prefix_cache(self) -> None:
        if not self.client.post("/reset_prefix_cache", query={"reset_running_requests": "true"})["success"]:
            raise RequestRefused(
                f"{self.client.url}: vLLM could not drop its prefix cache, some of which is in use", 200
            )

    def version_label(self) -> str:
        return str(self.client.get("/weight_info")["weight_version"])

    def label_version(self, label: str) -> None:
        self.client.post("/update_weight_version", {"new_version": label})

    def load_folder(self, folder: Path, label: str) -> None:
        self.client.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        self.label_version(label)

    def open_group(self, address: str) -> WeightGroup:
        world_size = self.client.get("/get_world_size")["world_size"] + 1
        info, join = self._open_group(address, world_size)
        info |= {"rank_offset": 1, "world_size": world_size}
        info |= {"packed": True, "packed_buffer_size_bytes": self._bucket_bytes}
        return during(join, self.client, "/init_weight_transfer_engine", {"init_info": info})

    def begin_update(self) -> None:
        self.client.post("/start_weight_update")

    def send_bucket(self, group: WeightGroup, bucket: Sequence[tuple[str, Tensor]]) -> None:
        import torch

        info = {
            "names": [name for name, _ in bucket],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
        }
        packed = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in bucket])
        during(lambda: group.broadcast(packed), self.client, "/update_weights", {"update_info": info})

    def finish_update(self, label: str) -> None:
        self.client.post("/finish_weight_update", {"weight_version": label})

    def load_adapter(self, name: str, folder: Path) -> None:
        body = {"lora_name": name, "lora_path": str(folder), "load_inplace": True}
        self.client.post("/v1/load_lora_adapter", body)

    def differing(self, tensors: Mapping[str, Tensor]) -> list[str]:
        checksums = self.client.post("/weight_checker", {"action": "checksum"})["checksums"]
        prefixes, names = zip(*(key.rsplit(":", 1) for key in checksums), strict=True)
        if len(set(prefixes)) > 1:
            return []  # cut over several ranks
        served = dict(zip(names, checksums.values(), strict=True))
        names_differing = []
        for name, parts in comparable_tensors(tensors).items():
            digest = served.get(name, PACKED)
            if digest != PACKED and digest not in _digests([tensors[part] for part in parts]):
                names_differing += parts
        return names_differing


def comparable_tensors(names: Mapping[str, Any]) -> dict[str, list[str]]:
    """Maps vLLM's name of each comparable tensor to the tensors of a model folder that it is stacked of."""
    stacks: dict[str, list[str]] = {}
    for name in names:
        module, _, attribute = name.rpartition(".")
        for fused, parts in FUSED.items():
            stem = next((module.removesuffix(part) for part in parts if module.endswith(part)), None)
            if stem is not None:
                stacks[f"{stem}{fused}.{attribute}"] = [f"{stem}{part}.{attribute}" for part in parts]
        if module.endswith(UNCHANGED):
            stacks[name] = [name]
    return {_vllm_name(name): parts for name, parts in stacks.items() if all(part in names for part in parts)}


def _vllm_name(name: str) -> str:
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
    return PREFIXES.get(prefix, "") + name.removeprefix(prefix)


def _digests(parts: Sequence[Tensor]) -> set[str]:
    """SHA-256 of a stack of tensors, as they are and in each type that they, or a server's, may be rounded to."""
    import torch

    whole = torch.cat([part.detach().to("cpu") for part in parts])
    rounded = [whole.to(dtype) for dtype in {whole.dtype, torch.bfloat16, torch.float16}]
    casts = (*rounded, *(value.float() for value in rounded))
    return {hashlib.sha256(raw_bytes(cast.contiguous())).hexdigest() for cast in casts}


def _likeliest(logprobs: Mapping[str, float], count: int) -> tuple[tuple[int, float], ...]:
    """Returns the likeliest tokens of {"token_id:17": -0.3, ...}, which has the drawn token too."""
    pairs = [(int(name.removeprefix("token_id:")), value) for name, value in logprobs.items()]
    return tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:count])
