"""The server that tests fork processes from: it imports once what each of those processes would import for itself.

Python keeps one such server a process and gives it the list of modules that was set last before it starts. So there is
one list, for groups, for runs that are killed and for `danlu verify`, and it does not hang on which of them is first:
tests/conftest.py sets it when all tests are collected, and lets nothing else set one.
The server itself never runs a backward pass, after which torch cannot fork.
"""

from __future__ import annotations

import multiprocessing
import sys

SERVER = multiprocessing.get_context("forkserver")
MODULES = [
    "danlu.cli.train",
    "danlu.data.jinja_sandbox",
    "danlu.models.families.llama",
    "danlu.models.gated_delta_net",
    "danlu.parallel.context_attention",
    "danlu.parallel.process_group",
    "danlu.rl.rollout_processes",
    "danlu.run.train",
    "danlu.stages.prompt_reader",
    "danlu.stages.reinforcement",
    "danlu.verification.classifier_proxy",
    "danlu.verification.decoder_proxy",
    "danlu.verification.workers",
    "numpy.ma",
    "pytest",  # which modules with workers import
    "tensorboard.summary.writer",
    "torch._dynamo",  # FSDP2 imports it when it is first used
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "transformers",
    "transformers.models.auto.tokenization_auto",
]


def modules_to_import() -> list[str]:
    """Those of `MODULES` that this process has not loaded yet: a server passes over silently what it cannot import."""
    return [name for name in MODULES if name not in sys.modules]
