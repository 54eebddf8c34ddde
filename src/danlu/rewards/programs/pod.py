"""The main program of a sandbox: it starts one program after the other, and ends each with all its processes.

Where the system allows it, each program has user, mount, PID and IPC namespaces of its own inside of the sandbox's,
and an empty temporary folder. It sees none of this process, and the sandbox serves the next answer when it has
ended. Elsewhere a program is a plain child, and the sandbox ends with its answer.
"""

from __future__ import annotations

import _socket
import posix
import sys

from danlu.rewards.programs.guest import PRELUDE, serve
from danlu.rewards.programs.limits import limit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PROGRAM, CONTEST, END = b"t", b"c", b"e"
"""Orders: to start a program on the socket that comes along, one that takes the names of `PRELUDE` for granted, and to
end it, which is answered by REUSABLE or SPENT."""
REUSABLE, SPENT = b"n", b"p"
NEW_USER, NEW_MOUNT, NEW_PID, NEW_IPC = 0x10000000, 0x20000, 0x20000000, 0x8000000
NO_SUID, NO_DEVICES, NO_EXEC, RECURSIVE, PRIVATE = 2, 4, 8, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 24, 38
CAPABILITY_VERSION = 0x20080522
SIGKILL = 9


def main(control: int, paths: list[str], limits: dict[str, int], temporary_bytes: int | None) -> None:
    """Follows orders until the other end of the socket closes. temporary_bytes: None where there is no sandbox."""
    sys.path += paths
    nothing = posix.open("/dev/null", posix.O_RDWR)
    for descriptor in (0, 1, 2):
        posix.dup2(nothing, descriptor)
    connection = _socket.socket(fileno=control)
    programs = Programs(limits, temporary_bytes)
    while True:
        order, ancillary, _, _ = connection.recvmsg(1, _socket.CMSG_LEN(4))
        programs.end()
        if order == END:
            connection.send(REUSABLE if programs.libc is not None else SPENT)
        elif not ancillary:
            posix._exit(0)
        else:
            if order == CONTEST:
                exec(PRELUDE, {})  # once for all programs of this sandbox
            descriptor = int.from_bytes(ancillary[0][2][:4], sys.byteorder)
            programs.start(descriptor, connection)
            posix.close(descriptor)


class Programs:
    """The program that runs, and the one that started it."""

    def __init__(self, limits: dict[str, int], temporary_bytes: int | None) -> None:
        self._limits, self._temporary_bytes = limits, temporary_bytes
        self.libc: Any = None
        """The library of system calls, where programs have namespaces of their own."""
        if temporary_bytes is not None and sys.platform == "linux":
            import ctypes

            self.libc = ctypes.CDLL(None, use_errno=True)
        self._child, self._first, self._number = 0, 0, 0

    def start(self, descriptor: int, connection: Any) -> None:
        """Starts a program."""
        self._number += 1
        if self.libc is not None and not self._start_in_namespaces(descriptor, connection):
            self.libc = None
        if self.libc is None:
            self._child = posix.fork()
            if not self._child:
                connection.close()
                limit(self._limits)
                posix.mkdir(f"{self._number}")
                serve(descriptor, f"{self._number}")

    def end(self) -> None:
        """Ends the program and all that it has started; returns when they are gone."""
        if not self._child:
            return
        try:
            posix.kill(self._first or self._child, SIGKILL)
            if self.libc is None and self._temporary_bytes is not None and posix.getppid() == 1:
                posix.kill(-1, SIGKILL)  # all of the sandbox's PID namespace but this process and the first
        except ProcessLookupError:
            pass
        posix.waitpid(self._child, 0)
        self._child = self._first = 0

    def _start_in_namespaces(self, descriptor: int, connection: Any) -> bool:
        """Whether a program could be started in namespaces of its own."""
        reader, writer = posix.pipe()
        self._child = posix.fork()
        if not self._child:
            posix.close(reader)
            connection.close()
            self._enter_and_serve(descriptor, writer)
        posix.close(writer)
        self._first = int(posix.read(reader, 32) or b"0")
        posix.close(reader)
        if not self._first:
            self.end()
        return self._first != 0

    def _enter_and_serve(self, descriptor: int, writer: int) -> None:
        """Enters namespaces in a child, and has the program run by a child of its own, the first process there."""
        try:
            user, group = posix.getuid(), posix.getgid()
            if self.libc.unshare(NEW_USER | NEW_MOUNT | NEW_PID | NEW_IPC):
                posix._exit(1)
            for name, text in ("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1"):
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
            first = posix.fork()
            if first:
                posix.write(writer, b"%d" % first)
                posix.close(writer)
                posix.close(descriptor)
                posix.waitpid(first, 0)
                posix._exit(0)
            posix.close(writer)
            posix.setsid()  # so that a signal to its process group reaches nothing else
            self.libc.prctl(PR_SET_PDEATHSIG, SIGKILL)
            self._hide()
            limit(self._limits)
            serve(descriptor, "/tmp")
        finally:
            posix._exit(1)

    def _hide(self) -> None:
        """Puts empty folders over those that the sandbox shares, and gives up the powers of a namespace's first
        process.
        """
        options = f"mode=1777,size={self._temporary_bytes}".encode()
        self._require(self.libc.mount(b"none", b"/", None, RECURSIVE | PRIVATE, None))
        for folder in (b"/tmp", b"/dev/shm"):
            self._require(self.libc.mount(b"tmpfs", folder, b"tmpfs", NO_SUID | NO_DEVICES, options))
        if self.libc.mount(b"proc", b"/proc", b"proc", NO_SUID | NO_DEVICES | NO_EXEC, None):
            self._require(self.libc.mount(b"tmpfs", b"/proc", b"tmpfs", NO_SUID | NO_DEVICES, b"size=0,mode=555"))
        for capability in range(64):
            self.libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
        import ctypes

        header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
        self._require(self.libc.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())))
        self._require(self.libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))

    def _require(self, result: int) -> None:
        if result:
            posix._exit(1)
