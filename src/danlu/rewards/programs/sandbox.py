"""Sandboxes for programs: bubblewrap where it is installed, the same by system calls elsewhere on Linux, else none.

A sandbox has a PID, mount, network, IPC and user namespace of its own, a read-only root that holds the system's and the
interpreter's folders and no file of the user's, and a private temporary folder. It is ended with all that runs in it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import marshal
import os
import select
import shutil
import signal
import site
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from danlu.core.errors import ResourceError
from danlu.rewards.programs.cgroups import Cgroup, give_cgroup_back, remove_all, take_cgroup
from danlu.rewards.programs.pod import END, PROGRAM, REUSABLE

MIB = 2**20
MOST_FILE_MIB = 16
MOST_TEMPORARY_MIB = 64
MOST_PROCESSES = 64
PROBE_S = 60.0
REST_S = 10.0
GUEST = ("values", "guest", "limits", "pod")
JUDGE = ("values", "proxies", "limits", "judge")
"""The modules of this folder that a sandbox gets, as code; it runs the last one's `main`."""
SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/gnu/store")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime")
BOOTSTRAP = """
import marshal, sys
options = eval(sys.argv[1])
for name, code in marshal.load(open(0, "rb", closefd=False)):
    module = sys.modules["danlu.rewards.programs." + name] = type(sys)("danlu.rewards.programs." + name)
    exec(code, module.__dict__)
def run():
    module.main(*options["main"])
if options["namespaces"] is None:
    run()
sys.modules["danlu.rewards.programs.namespaces"].enter(options["namespaces"], run)
"""
ENTER_CGROUPS = 'for folder in $0; do echo $$ > "$folder/cgroup.procs" || exit 96; done; exec "$@"'
KINDS = ("bubblewrap", "unshare")


@dataclass(frozen=True)
class Limits:
    """The limits of a sandbox's processes, for each and together."""

    memory_mib: int
    cpu_s: int | None = None
    """The limit of processor time of each process."""

    def of_each(self) -> dict[str, int]:
        """Returns the system's limits for each process, by name."""
        limits = {
            "RLIMIT_AS": self.memory_mib * MIB,
            "RLIMIT_FSIZE": MOST_FILE_MIB * MIB,
            "RLIMIT_NPROC": MOST_PROCESSES,
            "RLIMIT_CORE": 0,
        }
        return limits if self.cpu_s is None else {**limits, "RLIMIT_CPU": self.cpu_s}


class Sandbox:
    """A process in a sandbox, which is sent sockets.

    Args:
        kind: one of `KINDS`, or "none".
        modules: `GUEST` or `JUDGE`.
        is_shared_limit: the limits hold for all processes together, by a control group or by being looked after.
    """

    def __init__(self, kind: str, modules: tuple[str, ...], limits: Limits, *, is_shared_limit: bool) -> None:
        self._limits = limits
        self._cgroup: Cgroup | None = None
        self._is_watched, self._is_namespace = is_shared_limit, kind != "none"
        self._folder = None if self._is_namespace else tempfile.mkdtemp(dir=_folder())
        ours, child_socket = socket.socketpair()
        self.socket = ours
        self._info, info = os.pipe()
        if is_shared_limit and sys.platform == "linux":
            self._cgroup = take_cgroup(limits.memory_mib * MIB, MOST_PROCESSES)
        self._kills = 0 if self._cgroup is None else self._cgroup.kills()
        try:
            command = self._command(kind, modules, child_socket.fileno(), info)
            with open(_bundle(("namespaces", *modules) if kind == "unshare" else modules), "rb") as code:
                self.process = subprocess.Popen(
                    command,
                    stdin=code,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(child_socket.fileno(), info),
                    cwd=self._folder or "/",
                    env={"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                    start_new_session=True,
                )
        finally:
            child_socket.close()
            os.close(info)

        _running.add(self)

    def hand_over(self, order: bytes, descriptors: Sequence[int]) -> bool:
        """Sends sockets to the process; False where it has ended."""
        try:
            if descriptors:
                socket.send_fds(self.socket, [order], list(descriptors))
            else:
                self.socket.send(order)
        except OSError:
            return False
        return True

    def rest(self) -> bool:
        """Ends the program that runs in it, and all that this has started; whether it may run another's."""
        if not self.hand_over(END, []):
            return False
        readable, _, _ = select.select([self.socket], [], [], REST_S)
        try:
            return bool(readable) and self.socket.recv(1) == REUSABLE
        except OSError:  # it has ended
            return False

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def tick_s(self) -> float:
        """The seconds after which `excess` is to be called again while something runs."""
        return 1.0 if self._cgroup is not None or not self._is_watched else 0.02

    def excess(self) -> str | None:
        """Why the processes have to be ended: they take more memory together than they may, or there are too many."""
        if self._cgroup is not None:
            return "too much memory" if self._cgroup.kills() > self._kills else None
        if not self._is_watched:
            return None
        pids = _descendants(self.process.pid)
        if len(pids) > MOST_PROCESSES:
            return "too many processes"
        return "too much memory" if sum(map(_resident_bytes, pids)) > self._limits.memory_mib * MIB else None

    def end(self) -> None:
        """Ends every process of the sandbox, and returns when none is left."""
        first = self._first_process()
        if first is not None:
            _kill_and_wait(first)
        pids = [] if self._is_namespace else _descendants(self.process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        _running.discard(self)
        self.socket.close()
        os.close(self._info)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._cgroup is not None:
            give_cgroup_back(self._cgroup, self._limits.memory_mib * MIB)

    def _first_process(self) -> int | None:
        """The first process of the PID namespace, with which all of it ends; None where it does not exist (yet)."""
        if not self._is_namespace:
            return None
        readable, _, _ = select.select([self._info], [], [], 0)
        text = os.read(self._info, 4096) if readable else b""
        return int(json.loads(text)["child-pid"]) if text.strip().endswith(b"}") else None

    def _command(self, kind: str, modules: tuple[str, ...], control: int, info: int) -> list[str]:
        namespaces: dict[str, Any] | None = None
        before: list[str] = []
        if kind == "unshare":
            namespaces = {
                "binds": _binds(),
                "links": _links(),
                "temporary_bytes": MOST_TEMPORARY_MIB * MIB,
                "info": info,
            }
        elif kind == "bubblewrap":
            before = [
                *_bubblewrap(),
                "--info-fd",
                str(info),
                "--",
            ]
        temporary_bytes = MOST_TEMPORARY_MIB * MIB if self._is_namespace else None
        options = {
            "main": (control, _import_folders(), self._limits.of_each(), temporary_bytes),
            "namespaces": namespaces,
        }
        python = [_interpreter(), "-I", "-S", "-B", "-X", "utf8", "-c", BOOTSTRAP, repr(options)]
        if self._cgroup is not None:
            folders = " ".join(map(str, self._cgroup.folders))
            before = ["/bin/sh", "-c", ENTER_CGROUPS, folders, *before]
        return [*before, *python]


_running: set[Sandbox] = set()


def end_all(pid: int) -> None:
    """Ends the sandboxes of a process, if it is this one: a fork of it has them too, and leaves them alone."""
    if os.getpid() == pid:
        for sandbox in list(_running):
            sandbox.end()
        remove_all()


atexit.register(end_all, os.getpid())


def find_sandbox(wanted: str = "auto") -> str:
    """The kind of sandbox that works here: one of `KINDS`, or "none" where that is wanted.

    Raises ResourceError where the wanted kind does not work, or none does.
    """
    if wanted == "none":
        return wanted
    kinds = KINDS if wanted == "auto" else (wanted,)
    with _finding:
        works = next((kind for kind in kinds if _works(kind)), None)
    if works is not None:
        return works
    tried = "bubblewrap (bwrap) and user namespaces do not" if wanted == "auto" else f"sandbox {wanted} does not"
    raise ResourceError(
        f"rewards of kind code: {tried} work on this system, so answers' programs would reach its files and network. "
        "Install bubblewrap, or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1; in a container, its "
        "seccomp profile); `sandbox: none` runs them without any of this, for machines that hold nothing else"
    )


_finding = threading.Lock()


@cache
def _works(kind: str) -> bool:
    """Whether a program can be run in a sandbox of a kind, which is tried."""
    if sys.platform != "linux" or (kind == "bubblewrap" and shutil.which("bwrap") is None):
        return False
    sandbox = Sandbox(kind, GUEST, Limits(memory_mib=512), is_shared_limit=False)
    ours, child_socket = socket.socketpair()
    try:
        sandbox.hand_over(PROGRAM, [child_socket.fileno()])
        child_socket.close()
        ours.settimeout(PROBE_S)
        deadline = time.monotonic() + PROBE_S
        while not sandbox.has_ended and time.monotonic() < deadline:
            if select.select([ours], [], [], 0.05)[0]:
                return b"ready" in ours.recv(64)
        return False
    finally:
        ours.close()
        sandbox.end()


@cache
def _bundle(modules: tuple[str, ...]) -> str:
    """A file with the compiled modules, which Python would compile again for each program."""
    folder = Path(__file__).parent
    code = []
    for name in modules:
        path = folder / f"{name}.py"
        code.append((name, compile(path.read_text(encoding="utf-8"), f"<danlu {name}>", "exec", dont_inherit=True)))
    path = Path(_folder()) / "-".join(modules)
    path.write_bytes(marshal.dumps(code))
    return str(path)


@cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="danlu-code-")


def _folder() -> str:
    return _temporary().name


def _interpreter() -> str:
    """The interpreter itself, and not the link to it in a virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@cache
def _import_folders() -> list[str]:
    """The interpreter's folders of installed packages, without the user's own and PYTHONPATH."""
    return [folder for folder in site.getsitepackages() if os.path.isdir(folder)]


@cache
def _links() -> list[tuple[str, str]]:
    """(target, place) of the system's folders that are links, as /bin often is."""
    return [(os.readlink(each), each) for each in SYSTEM_FOLDERS if os.path.islink(each)]


@cache
def _binds() -> list[tuple[str, str]]:
    """Returns (source, place) of the files and folders in a sandbox, all of them read-only."""
    wanted = [each for each in (*SYSTEM_FOLDERS, *SYSTEM_FILES) if os.path.exists(each)]
    wanted = [each for each in wanted if each in SYSTEM_FILES or not os.path.islink(each)]
    own = [sys.base_prefix, sys.base_exec_prefix, os.path.dirname(os.path.dirname(_interpreter())), *_import_folders()]
    binds: list[tuple[str, str]] = []
    for place in [*wanted, *sorted({os.path.abspath(each) for each in own}, key=len)]:
        source = os.path.realpath(place)
        if place != "/" and not any(
            place == known == where or (f"{place}/".startswith(f"{where}/") and known == where)
            for known, where in binds
        ):
            binds.append((source, place))
    return binds


@cache
def _bubblewrap() -> list[str]:
    command = [str(shutil.which("bwrap")), "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc"]
    command += ["--unshare-uts", "--unshare-cgroup-try", "--uid", "1000", "--gid", "1000", "--new-session"]
    for source, place in _binds():
        command += ["--ro-bind", source, place]
    for target, place in _links():
        command += ["--symlink", target, place]
    command += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    for place in ("/tmp", "/dev/shm"):
        command += ["--size", str(MOST_TEMPORARY_MIB * MIB), "--tmpfs", place]
    return [*command, "--remount-ro", "/", "--chdir", "/tmp"]


def _kill_and_wait(pid: int) -> None:
    """Ends a process, which is not a child of this one, and returns when it is gone."""
    try:
        descriptor = os.pidfd_open(pid)
    except (OSError, AttributeError):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        select.select([descriptor], [], [], 10.0)
    finally:
        os.close(descriptor)


def _descendants(pid: int) -> list[int]:
    """A process and all that it and they have started; itself alone where the system does not tell."""
    pids, waiting = list[int](), [pid]
    while waiting:
        pids.append(waiting.pop())
        with contextlib.suppress(OSError):
            for path in Path(f"/proc/{pids[-1]}/task").iterdir():
                waiting += map(int, (path / "children").read_text().split())
    return pids


def _resident_bytes(pid: int) -> int:
    """The memory of a process that is its own."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    sizes = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("RssAnon", "RssShmem"))}
    return 1024 * sum(map(int, sizes.values()))
