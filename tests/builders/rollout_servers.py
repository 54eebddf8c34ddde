"""Stand-ins for vLLM and SGLang: their HTTP interfaces, as far as danlu speaks them, over a small real model.

A server runs in threads of the test's process, on a free port of the loopback.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch
import torch.distributed as dist

from builders.served_model import Faults, GrammarMatcher, ServedModel
from danlu.models.decoder import Decoder
from danlu.parallel.external_group import TorchGroup

TIMEOUT_S = 20.0


class Refusal(Exception):
    """An answer with a status of its own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class StandIn:
    """A running server. `calls` are (method, path, body) of all that was asked, in order."""

    def __init__(self, model: Decoder, *, port: int = 0, **settings: Any) -> None:
        self.faults = Faults(**settings.pop("faults", {}))
        self.settings = settings
        self.served = ServedModel(model, self.faults)
        self.vocab_size = settings.get("vocab_size", model.config.vocab_size)
        self.calls: list[tuple[str, str, Any]] = []
        self.dead = False
        self.answers = 0
        self.answer_gate = threading.Event()  # answers are given while it is set
        self.answer_gate.set()
        self.group: Any = None
        self.asleep: set[str] = set()  # what vLLM has let go of
        handler = type("Handler", (_Handler,), {"stand_in": self})
        ThreadingHTTPServer.request_queue_size = 64
        self._http = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self._http.daemon_threads = True
        self._http.block_on_close = False
        self.port: int = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self.dead = True
        self._http.shutdown()
        self._http.server_close()

    def paths(self) -> list[str]:
        return [path for _, path, _ in self.calls]

    def routes(self) -> dict[str, Callable[[Any, dict[str, str]], Any]]:
        raise NotImplementedError

    def respond(self, method: str, path: str, body: Any, query: dict[str, str]) -> Any:
        self.calls.append((method, path, body if body is not None else query))
        routes = self.routes() | {"/health": lambda body, query: ""}
        if path not in routes:
            raise Refusal(404, "Not Found")
        return routes[path](body, query)

    def matcher(self, grammar: str | None) -> GrammarMatcher | None:
        return None if grammar is None else GrammarMatcher(self.settings["tokenizer"], self.vocab_size, grammar)

    def check_alive(self) -> None:
        """Breaks the connection where the server has died."""
        if self.dead:
            raise ConnectionAbortedError

    def survive(self, counts: bool) -> None:
        """Gives an answer, unless it was to die before. Questions of the check do not count."""
        with self.served.lock:
            self.answers += counts
            limit = self.faults.die_after
            self.dead |= limit is not None and self.answers > limit
        self.check_alive()


class _Handler(BaseHTTPRequestHandler):
    stand_in: StandIn

    def do_GET(self) -> None:
        self._handle("GET")

    def do_POST(self) -> None:
        self._handle("POST")

    def _handle(self, method: str) -> None:
        parts = urlsplit(self.path)
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status: int
        try:
            self.stand_in.check_alive()
            body = json.loads(content) if content else None
            answer, status = self.stand_in.respond(method, parts.path, body, dict(parse_qsl(parts.query))), 200
        except ConnectionAbortedError:
            self.close_connection = True
            return  # nothing is said
        except Refusal as refusal:
            answer, status = {"error": {"message": str(refusal)}}, refusal.status
        except Exception as error:
            answer, status = {"error": {"message": f"{type(error).__name__}: {error}"}}, 500
        written = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(written)))
        self.end_headers()
        self.wfile.write(written)

    def log_message(self, *arguments: Any) -> None:
        return None


def spans(labels: list[str]) -> list[dict[str, Any]]:
    """Ranges of tokens with one label."""
    found: list[dict[str, Any]] = []
    for index, label in enumerate(labels):
        if found and found[-1]["version"] == label:
            found[-1]["end"] = index + 1
        else:
            found.append({"version": label, "start": index, "end": index + 1})
    return found


class VLLM(StandIn):
    """settings: version, logprobs_mode, dev_mode, context, tokenizer (a folder), structured_outputs (its settings)."""

    def routes(self) -> dict[str, Callable[[Any, dict[str, str]], Any]]:
        served = self.served
        routes: dict[str, Callable[[Any, dict[str, str]], Any]] = {
            "/version": lambda body, query: {"version": self.settings.get("version", "0.33.0")},
            "/v1/models": lambda body, query: {"data": self._cards()},
            "/v1/completions": lambda body, query: self._completions(body),
            "/v1/load_lora_adapter": lambda body, query: served.load_adapter(
                body["lora_name"], Path(body["lora_path"])
            ),
        }
        if not self.settings.get("dev_mode", True):
            return routes
        mode = self.settings.get("logprobs_mode", "raw_logprobs")
        forms = {"backend": "guidance", "reasoning_parser": "", "enable_in_reasoning": False}
        forms |= self.settings.get("structured_outputs", {})
        config = {"model_config": {"logprobs_mode": mode}, "structured_outputs_config": forms}
        return routes | {
            "/server_info": lambda body, query: {"vllm_config": config},
            "/pause": lambda body, query: served.pause(query.get("mode", "abort")),
            "/resume": lambda body, query: served.resume(),
            "/is_paused": lambda body, query: {"is_paused": served.paused},
            "/is_sleeping": lambda body, query: {"is_sleeping": bool(self.asleep)},
            "/sleep": lambda body, query: self._sleep(query["mode"]),
            "/wake_up": lambda body, query: self._wake(query.get("tags")),
            "/abort_requests": lambda body, query: served.abort(body["request_ids"]),
            "/reset_prefix_cache": lambda body, query: served.drop_cache() or {"success": True},
            "/weight_info": lambda body, query: {"weight_version": served.label},
            "/update_weight_version": lambda body, query: self._label(body["new_version"]),
            "/collective_rpc": lambda body, query: self._rpc(body),
            "/get_world_size": lambda body, query: {"world_size": 1},
            "/init_weight_transfer_engine": lambda body, query: self._join(body["init_info"]),
            "/start_weight_update": lambda body, query: None,
            "/update_weights": lambda body, query: self._receive(body["update_info"]),
            "/finish_weight_update": lambda body, query: self._label(body["weight_version"]),
            "/weight_checker": lambda body, query: {"checksums": served.checksums()},
        }

    def _cards(self) -> list[dict[str, Any]]:
        base = {"id": "base", "parent": None, "max_model_len": self.settings.get("context", 512)}
        return [base, *({"id": name, "parent": "base", "max_model_len": None} for name in self.served.loaded)]

    def _label(self, label: str) -> None:
        self.served.label = label

    def _sleep(self, mode: str) -> None:
        self.served.pause(mode)
        self.served.drop_cache()
        self.asleep = {"weights", "kv_cache"}

    def _wake(self, tag: str | None) -> None:
        self.asleep -= self.asleep if tag is None else {tag}
        if not self.asleep:
            self.served.resume()

    def _rpc(self, body: Any) -> None:
        assert body["method"] == "reload_weights" and "weights" not in self.asleep
        self.served.load_folder(Path(body["kwargs"]["weights_path"]))

    def _completions(self, body: Any) -> Any:
        adapter = None if body["model"] == "base" else body["model"]
        if adapter is not None and adapter not in self.served.loaded:
            raise Refusal(404, f"The model `{adapter}` does not exist.")
        if max(body["prompt"]) >= self.vocab_size:
            raise Refusal(400, f"Token id {max(body['prompt'])} is out of vocabulary")
        self.answer_gate.wait(TIMEOUT_S)
        answer = self.served.generate(
            f"cmpl-{body.get('request_id')}-0",
            body["prompt"],
            max_new_tokens=body["max_tokens"],
            temperature=body.get("temperature", 1.0),
            top_k=body.get("top_k", 0),
            top_p=body.get("top_p", 1.0),
            seed=body.get("seed", 0),
            stop_ids=body.get("stop_token_ids", ()),
            allowed=body.get("allowed_token_ids"),
            bias=body.get("logit_bias") or {},
            adapter=adapter,
            matcher=self.matcher((body.get("structured_outputs") or {}).get("grammar")),
        )
        self.survive("request_id" in body)
        raw = self.settings.get("logprobs_mode", "raw_logprobs") == "raw_logprobs"
        rows = answer.logprobs if raw else answer.drawn
        count = body.get("logprobs") or 0
        top = [{f"token_id:{token}": float(row[token]) for token in row.topk(count).indices.tolist()} for row in rows]
        for entry, row, token in zip(top, rows, answer.tokens, strict=True):
            entry[f"token_id:{token}"] = float(row[token])
        values = [float(row[token]) for row, token in zip(rows, answer.tokens, strict=True)]
        choice = {
            "token_ids": answer.tokens,
            "finish_reason": answer.finish,
            "logprobs": {"token_logprobs": values, "top_logprobs": top},
        }
        if not self.settings.get("version", "").startswith("0.32"):
            choice["weight_versions"] = spans(answer.labels)
        return {"choices": [choice]}

    def _join(self, info: Any) -> None:
        assert info["packed"] and info["rank_offset"] == 1
        store: Any = dist.TCPStore("127.0.0.1", info["port"], is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
        for prefix in (info["name"], f"{info['name']}/", "cpu/"):
            store = dist.PrefixStore(prefix, store)
        self.group = dist.ProcessGroupGloo(store, 1, info["world_size"], timedelta(seconds=TIMEOUT_S))

    def _receive(self, info: Any) -> None:
        assert "weights" not in self.asleep
        dtypes = [getattr(torch, name) for name in info["dtype_names"]]
        sizes = [
            torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(info["shapes"], dtypes, strict=True)
        ]
        packed = torch.empty(sum(sizes), dtype=torch.uint8)
        _receive(self.group, packed)
        for name, part, dtype, shape in zip(info["names"], packed.split(sizes), dtypes, info["shapes"], strict=True):
            self.served.load(name, part.clone().view(dtype).view(shape).float())


def open_gloo_group(address: str, world_size: int) -> tuple[dict[str, Any], Callable[[], TorchGroup]]:
    """In place of vLLM's NCCL group."""
    group = TorchGroup("weights", world_size, address, timeout_s=TIMEOUT_S)
    return {"name": group.name, "port": group.port}, group.join


class SGLang(StandIn):
    """settings: version, original_logprobs, context, tokenizer (a folder), grammar_backend, reasoning_parser."""

    def routes(self) -> dict[str, Callable[[Any, dict[str, str]], Any]]:
        served = self.served
        info = {"version": self.settings.get("version", "0.5.23"), "tp_size": 1, "dp_size": 1, "pp_size": 1}
        info["grammar_backend"] = self.settings.get("grammar_backend", "llguidance")
        info["reasoning_parser"] = self.settings.get("reasoning_parser")
        return {
            "/server_info": lambda body, query: info,
            "/model_info": lambda body, query: {"weight_version": served.label},
            "/v1/models": lambda body, query: {"data": self._cards()},
            "/generate": lambda body, query: self._generate(body),
            "/pause_generation": lambda body, query: served.pause(body["mode"]),
            "/continue_generation": lambda body, query: served.resume(),
            "/release_memory_occupation": lambda body, query: self._release(body),
            "/resume_memory_occupation": lambda body, query: None,
            "/abort_request": lambda body, query: served.abort([body["rid"]]),
            "/flush_cache": lambda body, query: served.drop_cache() or "Cache flushed.\n",
            "/update_weight_version": lambda body, query: self._label(body["new_version"]),
            "/update_weights_from_disk": lambda body, query: self._from_disk(body),
            "/init_weights_update_group": lambda body, query: self._join(body),
            "/begin_weight_update": lambda body, query: {"success": True},
            "/update_weights_from_distributed": lambda body, query: self._receive(body),
            "/end_weight_update": lambda body, query: {"success": True},
            "/load_lora_adapter": lambda body, query: self._load_adapter(body),
            "/unload_lora_adapter": lambda body, query: served.loaded.pop(body["lora_name"]),
            "/get_weights_by_name": lambda body, query: served.tensor(body["name"])[: body["truncate_size"]].tolist(),
        }

    def _cards(self) -> list[dict[str, Any]]:
        base = {"id": "base", "parent": None, "max_model_len": self.settings.get("context", 512)}
        return [base, *({"id": name, "parent": "base", "max_model_len": None} for name in self.served.loaded)]

    def _label(self, label: str) -> Any:
        self.served.label = label
        return {"success": True}

    def _release(self, body: Any) -> None:
        assert body["tags"] == ["kv_cache"] and not self.served.running
        self.served.drop_cache()

    def _load_adapter(self, body: Any) -> Any:
        if body["lora_name"] in self.served.loaded:
            raise Refusal(400, f"LoRA with name {body['lora_name']} already exists")
        self.served.load_adapter(body["lora_name"], Path(body["lora_path"]))
        return {"success": True}

    def _generate(self, body: Any) -> Any:
        sampling = body["sampling_params"]
        wanted = body.get("token_ids_logprob", [])
        if any(token >= self.vocab_size for token in wanted):
            raise Refusal(400, f"token_ids_logprob contains out-of-vocabulary token id {max(wanted)}")
        adapter = body.get("lora_path")
        if adapter is not None and adapter not in self.served.loaded:
            raise Refusal(400, f"LoRA adapter {adapter} was not loaded")
        self.answer_gate.wait(TIMEOUT_S)
        temperature = sampling.get("temperature", 1.0)
        answer = self.served.generate(
            str(body.get("rid")),
            body["input_ids"],
            max_new_tokens=sampling["max_new_tokens"],
            temperature=temperature,
            top_k=max(sampling.get("top_k", -1), 0),
            top_p=sampling.get("top_p", 1.0),
            seed=sampling.get("sampling_seed", 42),
            stop_ids=sampling.get("stop_token_ids", ()),
            adapter=adapter,
            matcher=self.matcher(sampling.get("ebnf")),
        )
        self.survive("rid" in body)
        rows = answer.logprobs if self.settings.get("original_logprobs") else answer.scaled
        count = body.get("top_logprobs_num", 0)
        info = {
            "finish_reason": {"type": answer.finish},
            "weight_version": self.served.label,
            "weight_versions": spans(answer.labels),
            "output_token_logprobs": [
                [float(row[token]), token, None] for row, token in zip(rows, answer.tokens, strict=True)
            ],
            "output_top_logprobs": [
                [[float(row[token]), token, None] for token in row.topk(count).indices.tolist()] for row in rows
            ],
            "output_token_ids_logprobs": [
                [[float(row[token % len(row)]), token, None] for token in wanted] for row in rows
            ],
        }
        if body.get("return_sampling_mask"):
            info["output_token_sampling_mask"] = [row.isfinite().nonzero()[:, 0].tolist() for row in answer.drawn]
            info["output_token_sampling_logprobs"] = [
                float(row[token]) for row, token in zip(answer.drawn, answer.tokens, strict=True)
            ]
        return {"output_ids": answer.tokens, "meta_info": info}

    def _from_disk(self, body: Any) -> Any:
        self.served.load_folder(Path(body["model_path"]))
        self.served.drop_cache()
        return self._label(body["weight_version"])

    def _join(self, body: Any) -> Any:
        # As torch.distributed forms the group that SGLang joins.
        from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper

        name, timeout = body["group_name"], timedelta(seconds=TIMEOUT_S)
        store = dist.TCPStore(body["master_address"], body["master_port"], is_master=False, timeout=timeout)
        self.group, _ = _new_process_group_helper(
            body["world_size"],
            body["rank_offset"],
            [],
            Backend(body["backend"]),
            PrefixStore(name, store),
            group_name=name,
            timeout=timeout,
        )
        return {"success": True}

    def _receive(self, body: Any) -> Any:
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            value = torch.empty(shape, dtype=getattr(torch, dtype))
            _receive(self.group, value)
            self.served.load(name, value.float())
        return {"success": True}


def _receive(group: Any, tensor: torch.Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()
