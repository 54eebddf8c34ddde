"""danlu where calls of Linux are missing: as macOS is, and what Windows is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from builders.tiny_world import World, danlu

from danlu.core import machine


def test_what_linux_says() -> None:
    assert 1 <= machine.usable_cores() <= (os.cpu_count() or 1)
    assert 0 < machine.free_memory_bytes() <= machine.total_memory_bytes()
    assert machine.pid_is_alive(os.getpid()) and not machine.pid_is_alive(2**22 + 1)
    assert machine.process_start_ticks(os.getpid()).isdecimal() and machine.process_start_ticks(2**22 + 1) == ""


@pytest.mark.usefixtures("tokenising_here")
def test_a_run_without_what_only_linux_has(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.sysconf
    known = {name: number for name, number in os.sysconf_names.items() if name != "SC_AVPHYS_PAGES"}

    def sysconf(name: str) -> int:
        if name not in known:
            raise ValueError("unrecognized configuration name")
        return real(name)

    monkeypatch.setattr(os, "sysconf", sysconf)
    monkeypatch.setattr(os, "sysconf_names", known)
    for name in ("sched_getaffinity", "posix_fallocate", "posix_fadvise"):
        monkeypatch.delattr(os, name)
    assert machine.usable_cores() == os.cpu_count() and machine.free_memory_bytes() == machine.total_memory_bytes() // 2
    optimizer = {"kind": "paged-adamw", "learning_rate": 1e-2, "folder": str(tmp_path)}
    recipe = tiny_world.recipe(
        tmp_path / "run",
        steps=2,
        data={"workers": "auto", "cache": str(tmp_path / "cache")},
        batch={"micro": "auto"},
        optimizer=optimizer,
    )
    assert danlu("train", recipe) == 0, capsys.readouterr().err
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_windows_is_told_at_once() -> None:
    """Without the modules that Windows does not have."""
    program = (
        "import sys\n"
        "for name in ('fcntl', 'resource', 'termios', 'pwd'): sys.modules[name] = None\n"
        "import typer\n"  # which asks for the platform itself
        "sys.platform = 'win32'\n"
        "from danlu.cli.main import main\n"
        "sys.exit(main(['train', 'recipe.yaml']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 6
    assert done.stderr.startswith("error: danlu runs on Linux and macOS: it needs their file locks")
    assert "WSL 2" in done.stderr and "Traceback" not in done.stderr


def test_kills_for_want_of_memory_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_MEMORY_EVENTS", tmp_path / "memory.events")
    assert machine.oom_kill_count() is None
    (tmp_path / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert machine.oom_kill_count() == 2
