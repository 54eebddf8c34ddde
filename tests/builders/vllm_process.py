"""A real vLLM in an environment of its own, as `benchmarks/vllm_environment.py` makes it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from danlu.core.http_client import HTTPClient

START_S = 900.0
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass
class VLLMProcess:
    """One server; `end` and `start` again take the same port."""

    command: str
    model: Path
    log: Path
    flags: tuple[str, ...] = ()
    port: int = field(default=0)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        if not self.port:
            with socket.create_server(("127.0.0.1", 0)) as free:
                self.port = free.getsockname()[1]
        command = [self.command, "serve", str(self.model), "--port", str(self.port), "--host", "127.0.0.1"]
        command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512", *self.flags]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | SETTINGS, start_new_session=True
            )
        client, deadline = HTTPClient(self.url, 30.0), time.monotonic() + START_S
        while not client.wait_until_healthy(2.0):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.end()
                text = self.log.read_text(errors="replace")[-3000:]
                raise AssertionError(f"vLLM did not start:\n{text}")

    def end(self) -> None:
        """Kills the server and its workers."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None
