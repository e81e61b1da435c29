"""File descriptors that cross a process border: SCM_RIGHTS messages over a Unix socket, and `pidfd_getfd`.

They live beside the group's sockets because a group passes them and may import nothing from `memory`.
"""

from __future__ import annotations

import array
import ctypes
import errno
import os
import select
import socket
import time
from collections.abc import Iterable, Sequence

MAX_FDS_PER_MESSAGE = 250
"""Below the kernel's own limit of 253 (SCM_MAX_FD)."""

MAX_MESSAGE_BYTES = 64 * 1024

_SYS_PIDFD_GETFD = 438  # the same number on every architecture of Linux
_libc = ctypes.CDLL(None, use_errno=True)


def send_fds(sock: socket.socket, fds: Sequence[int], payload: bytes, *, flags: int = 0) -> None:
    """Sends one message with `fds` over a SOCK_SEQPACKET Unix socket; the receiver gets duplicates.

    payload: 1 to 65,536 bytes (an empty message would read as end-of-file). Raises ValueError for more than
    250 descriptors or a payload outside those bounds, OSError as `sendmsg` does.
    """
    if len(fds) > MAX_FDS_PER_MESSAGE:
        raise ValueError(f"{len(fds)} descriptors in one message, the limit is {MAX_FDS_PER_MESSAGE}")
    if not 1 <= len(payload) <= MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(payload)} bytes, accepted are 1 to {MAX_MESSAGE_BYTES}")
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([payload], rights, flags | socket.MSG_NOSIGNAL)


def recv_fds(sock: socket.socket, deadline: float | None) -> tuple[bytes, list[int]]:
    """Receives one message of `send_fds`: (payload, descriptors). The caller owns the descriptors.

    deadline: a `time.monotonic()` value, None to wait for ever, 0 not to wait. The descriptors are
    close-on-exec. Raises TimeoutError at the deadline, EOFError at end-of-file, OSError (EMFILE) when the
    process's descriptor limit did not let all of them in.
    """
    size = socket.CMSG_SPACE(MAX_FDS_PER_MESSAGE * array.array("i").itemsize)
    while True:
        try:
            # not socket.recv_fds: it drops the flags, and with them close-on-exec
            payload, ancillary, flags, _ = sock.recvmsg(
                MAX_MESSAGE_BYTES, size, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
            )
            break
        except BlockingIOError:
            _wait_readable(sock, deadline)
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    if flags & socket.MSG_CTRUNC:
        close_fds(fds)
        raise OSError(
            errno.EMFILE,
            f"only {len(fds)} descriptors of a message could be received: raise the descriptor limit "
            "(RLIMIT_NOFILE, ulimit -n)",
        )
    if not payload:
        raise EOFError("the peer closed its socket")
    return payload, list(fds)


def _wait_readable(sock: socket.socket, deadline: float | None) -> None:
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    remaining = None if deadline is None else deadline - time.monotonic()
    if remaining is not None and remaining <= 0:
        raise TimeoutError("no message with descriptors came in time")
    poller.poll(None if remaining is None else max(1, int(remaining * 1000)))


def take_fd(pid: int, fd: int) -> int:
    """Duplicates descriptor `fd` of process `pid` into this one with `pidfd_getfd`; close-on-exec.

    Raises OSError naming call, process and cure: a container without CAP_SYS_PTRACE refuses the call.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        raise OSError(error.errno, f"pidfd_open({pid}): {os.strerror(error.errno)}{_cure(error.errno)}") from error
    try:
        taken = _libc.syscall(_SYS_PIDFD_GETFD, pidfd, fd, 0)
        if taken < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"pidfd_getfd(pid {pid}, descriptor {fd}): {os.strerror(number)}{_cure(number)}")
        return taken
    finally:
        os.close(pidfd)


def _cure(number: int) -> str:
    return "; give the container CAP_SYS_PTRACE" if number in (errno.EPERM, errno.ENOSYS) else ""


def close_fds(fds: Iterable[int]) -> None:
    """Closes descriptors that this process owns; one that is closed already is passed over."""
    for fd in fds:
        try:
            os.close(fd)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
