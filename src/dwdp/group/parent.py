"""How a rank process learns that the process that started it is gone, whatever killed it.

The front end listens on a Unix socket, each rank connects and reads end-of-file when the kernel closes the
front end's side. Nothing is ever accepted or sent: a connection in the backlog is enough. This file imports
no torch, so that a rank watches before its slow imports begin.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import socket
import stat
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from dwdp.errors import ConfigError

logger = logging.getLogger(__name__)

PARENT_GONE_EXIT_CODE = 70
MAX_SOCKET_PATH_BYTES = 107
PRIVATE_FOLDER_PREFIX = "dwdp-"


@contextmanager
def socket_address(folder: str, name: str) -> Iterator[str]:
    """The address of the Unix socket `name` in `folder`, good inside the block.

    A socket's address holds 107 bytes; in a folder with a longer path it goes through an open descriptor.
    """
    path = os.path.join(folder, name)
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
        yield path
        return
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


_private_folders: set[str] = set()


def make_private_folder(inside: str | None = None) -> str:
    """A new folder of mode 0700 for sockets, in `inside` or where TMPDIR says. Raises ConfigError."""
    try:
        folder = tempfile.mkdtemp(prefix=PRIVATE_FOLDER_PREFIX, dir=inside)
    except OSError as error:
        raise ConfigError(f"no folder for sockets can be made (TMPDIR): {error.strerror or error}") from error
    _private_folders.add(folder)
    return folder


def remove_private_folder(folder: str) -> None:
    """Idempotent; a folder that cannot be removed is left."""
    shutil.rmtree(folder, ignore_errors=True)
    _private_folders.discard(folder)


class Children(Protocol):
    """Processes that end with this one."""

    def kill(self) -> None: ...


_children: weakref.WeakSet[Children] = weakref.WeakSet()


def end_with_this_process(children: Children) -> None:
    """`children` is killed by `leave_nothing`, for as long as somebody holds it."""
    _children.add(children)


def leave_nothing() -> None:
    """Kills the children and removes the private folders of a process that ends without its clean-ups.

    Takes no lock: a signal's handler calls it, whatever its thread was doing.
    """
    for children in list(_children):
        children.kill()
    for folder in list(_private_folders):
        remove_private_folder(folder)


def check_socket_folder(folder: str, *, create: bool) -> None:
    """Raises ConfigError unless `folder` is a folder of ours that no other user can enter (mode 0700).

    create: make it when it does not exist. The message names the folder and DWDP_SOCKET_DIR.
    """
    where = f"the socket folder {folder!r} (option DWDP_SOCKET_DIR)"
    try:
        if create:
            try:
                os.mkdir(folder, 0o700)
            except FileExistsError:
                pass
        status = os.stat(folder)
    except OSError as error:
        raise ConfigError(
            f"{where} cannot be used: {os.strerror(error.errno)}; ranks in separate mount namespaces need "
            "a folder that all of them share, named by DWDP_SOCKET_DIR"
        ) from error
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{where} is not a folder")
    if status.st_uid != os.geteuid():
        raise ConfigError(f"{where} belongs to uid {status.st_uid}, this process runs as uid {os.geteuid()}")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise ConfigError(f"{where} has mode {mode:04o}, which lets other users in; it must be 0700")


_listening: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _forget_in_fork() -> None:
    """A fork of the parent would keep the sockets open, and the children alive, when the parent is gone."""
    for sock in list(_listening):
        sock.close()
    _private_folders.clear()
    _children.clear()


os.register_at_fork(after_in_child=_forget_in_fork)


class ParentSocket:
    """The parent's end. Context manager with an idempotent `close()`.

    num_children: how many children connect. folder: an existing folder of mode 0700; a private one is made
    (and removed by `close`) without it. `path` is what a child gives to `watch_parent`.
    """

    def __init__(self, num_children: int, *, folder: str | None = None) -> None:
        self._own_folder = make_private_folder() if folder is None else None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _listening.add(self._socket)
        self.path = os.path.join(folder or self._own_folder, "parent")
        try:
            if folder is not None:
                check_socket_folder(folder, create=False)
            with socket_address(*os.path.split(self.path)) as address:
                self._socket.bind(address)
            # Nothing takes connections out of the backlog: it has to hold every child and a probe or two.
            self._socket.listen(num_children + 8)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Children that still watch end themselves now."""
        self._socket.close()
        try:
            os.unlink(self.path)
        except OSError:
            pass
        if self._own_folder is not None:
            remove_private_folder(self._own_folder)

    def __enter__(self) -> ParentSocket:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class ParentWatch:
    """A running watch. `close()` ends it, for a process that is to outlive its parent."""

    def __init__(self, sock: socket.socket, on_eof: Callable[[], None]) -> None:
        self._socket = sock
        self._on_eof = on_eof
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="dwdp-parent-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._socket, select.POLLRDHUP | select.POLLHUP)
        poller.register(self._wake, select.POLLIN)
        ready = [fd for fd, _ in poller.poll()]
        if self._wake not in ready:
            self._on_eof()

    def close(self) -> None:
        if self._wake < 0:
            return
        os.eventfd_write(self._wake, 1)
        if self._thread is not threading.current_thread():
            self._thread.join()
        os.close(self._wake)
        self._wake = -1
        self._socket.close()


def _leave() -> None:
    # Every thread ends with it, also one in a long copy. sys.exit would end this thread alone, and exit
    # handlers would wait for the others.
    os._exit(PARENT_GONE_EXIT_CODE)


def watch_parent(parent: str | int, on_eof: Callable[[], None] | None = None) -> ParentWatch | None:
    """Starts a thread that calls `on_eof` (default: `os._exit`) once the parent's end of `parent` is closed.

    parent: the path of a `ParentSocket`, or an inherited socket descriptor, which this call takes over. A
    parent that is gone already counts as closed: `on_eof` is called at once and None is returned.
    """
    on_eof = on_eof or _leave
    if isinstance(parent, int):
        return ParentWatch(socket.socket(fileno=parent), on_eof)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with socket_address(*os.path.split(parent)) as address:
            sock.connect(address)
    except OSError as error:
        sock.close()
        logger.error("the parent process is gone (%s: %s)", parent, os.strerror(error.errno))
        on_eof()
        return None
    return ParentWatch(sock, on_eof)
