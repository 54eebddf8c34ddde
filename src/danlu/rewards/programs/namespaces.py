"""A sandbox by the system calls of Linux alone, for machines without bubblewrap, with the same isolation.

The process goes into user, mount, PID, network, IPC and UTS namespaces, sees a root of read-only binds and a private
temporary folder, gives its capabilities up, and leaves its work to a child below the namespace's first process.
"""

from __future__ import annotations

import ctypes
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

NEW_USER, NEW_MOUNT, NEW_PID, NEW_NET, NEW_IPC, NEW_UTS = (
    0x10000000,
    0x20000,
    0x20000000,
    0x40000000,
    0x8000000,
    0x4000000,
)
READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC, REMOUNT, NO_ATIME, NO_DIR_ATIME = 1, 2, 4, 8, 32, 1024, 2048
BIND, RECURSIVE, SLAVE, RELATIVE_ATIME = 4096, 16384, 1 << 19, 1 << 21
STATVFS_RELATIVE_ATIME = 4096
DETACH = 2
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 24, 38
CAPABILITY_VERSION = 0x20080522
OWN_ID = 1000
DEVICES = ("null", "zero", "full", "random", "urandom")
WRITABLE_IN_PROC = ("sys", "sysrq-trigger", "irq", "bus")
"""Entries of /proc that root could write even in a namespace of its own."""
FAILED = 97
"""The exit code of a process that could not make its namespaces."""


def enter(options: dict[str, Any], run: Callable[[], None]) -> None:
    """Runs a function in a sandbox, and returns never: this process waits, and ends with it.

    options: `binds` (source, target), `links` (target, place), `temporary_bytes`, and `info`, a descriptor that the
    number of the namespace's first process is written to.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    try:
        _check(libc.unshare(NEW_USER | NEW_MOUNT | NEW_PID | NEW_NET | NEW_IPC | NEW_UTS))
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{OWN_ID} {user} 1")
        _write("/proc/self/gid_map", f"{OWN_ID} {group} 1")
        first = os.fork()
    except OSError as error:
        _fail(error)
    if first:
        os.write(options["info"], f'{{"child-pid": {first}}}'.encode())
        os.close(options["info"])
        _, status = os.waitpid(first, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    libc.prctl(PR_SET_PDEATHSIG, 9)
    os.close(options["info"])
    try:
        _make_root(libc, options)
        _give_up_capabilities(libc)
        worker = os.fork()
    except OSError as error:
        _fail(error)
    if not worker:
        run()
        os._exit(0)
    while os.wait()[0] != worker:
        pass  # children of others are waited for here
    os._exit(0)


def _fail(error: OSError) -> None:
    os.write(2, f"namespaces: {error}\n".encode())
    os._exit(FAILED)


def _check(result: int, path: str = "") -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w") as file:
            file.write(text)
    except FileNotFoundError:
        pass  # setgroups, in old kernels


def _mount(libc: Any, source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if each is None else each.encode() for each in (source, target, kind, data)]
    _check(libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]), target)


def _make_root(libc: Any, options: dict[str, Any]) -> None:
    """Makes a root of read-only binds, and goes there."""
    _mount(libc, "none", "/", None, SLAVE | RECURSIVE)
    sources = [(os.open(source, os.O_PATH), os.path.isdir(source), target) for source, target in options["binds"]]
    devices = [(os.open(f"/dev/{name}", os.O_PATH), False, f"/dev/{name}") for name in DEVICES]
    root = "/tmp"
    size = f"size={options['temporary_bytes']}"
    _mount(libc, "tmpfs", root, "tmpfs", NO_SUID | NO_DEVICES, "mode=755,size=1m")
    for target, place in options["links"]:
        os.symlink(target, root + place)
    for descriptor, is_folder, target in sources + devices:
        place = root + target
        if is_folder:
            os.makedirs(place, exist_ok=True)
        elif not os.path.exists(place):
            os.makedirs(os.path.dirname(place), exist_ok=True)
            os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o644))
        _mount(libc, f"/proc/self/fd/{descriptor}", place, None, BIND | RECURSIVE)
        os.close(descriptor)
    for folder in ("tmp", "dev/shm", "proc"):
        os.makedirs(f"{root}/{folder}", exist_ok=True)
    for name, target in {"fd": "fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}.items():
        os.symlink(f"/proc/self/{target}", f"{root}/dev/{name}")
    _make_read_only(libc, root)
    for folder in ("tmp", "dev/shm"):
        _mount(libc, "tmpfs", f"{root}/{folder}", "tmpfs", NO_SUID | NO_DEVICES, f"mode=1777,{size}")
    _add_proc(libc, f"{root}/proc")
    os.chdir(root)
    _check(libc.pivot_root(b".", b"."), "pivot_root")
    _check(libc.umount2(b".", DETACH), "the old root")
    _remount(libc, "/")
    os.chdir("/tmp")


def _make_read_only(libc: Any, root: str) -> None:
    with open("/proc/self/mountinfo") as file:
        places = [line.split()[4].encode().decode("unicode_escape") for line in file]
    for place in places:
        if place.startswith(f"{root}/") and not place.startswith(f"{root}/dev/"):
            _remount(libc, place)


def _remount(libc: Any, place: str) -> None:
    """Makes a mount read-only, and keeps the other flags, which a user namespace may not take away."""
    present = os.statvfs(place).f_flag
    flags = present & (NO_SUID | NO_DEVICES | NO_EXEC | NO_ATIME | NO_DIR_ATIME)
    flags |= RELATIVE_ATIME if present & STATVFS_RELATIVE_ATIME else 0
    _mount(libc, "none", place, None, BIND | REMOUNT | READ_ONLY | flags)


def _add_proc(libc: Any, place: str) -> None:
    try:
        _mount(libc, "proc", place, "proc", NO_SUID | NO_DEVICES | NO_EXEC)
    except OSError:
        return  # a container that hides parts of its own /proc allows no other: the sandbox has none
    for name in WRITABLE_IN_PROC:
        if os.path.exists(f"{place}/{name}"):
            _mount(libc, f"{place}/{name}", f"{place}/{name}", None, BIND | RECURSIVE)
            _remount(libc, f"{place}/{name}")


def _give_up_capabilities(libc: Any) -> None:
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    _check(libc.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())), "capset")
    _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
