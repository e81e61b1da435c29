"""Where a rank can be reached: its listening sockets, what it publishes about them, and whether they still live.

[Note: a rank that dies before it is connected]
A rank publishes its sockets before anything else. Those that wait for it connect to them now and then, and hang up:
the kernel refuses as soon as the process is gone, whatever ended it, and keeps what it accepted in the backlog while
the process lives, frozen or not.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import socket
import time

import msgspec

from dwdp.errors import ConfigError
from dwdp.group.parent import (
    PRIVATE_FOLDER_PREFIX,
    check_socket_folder,
    make_private_folder,
    remove_private_folder,
    socket_address,
)
from dwdp.group.ranks import Host

ALIVE, GONE, UNSEEN = "alive", "gone", "unseen"
"""Of a rank's socket; unseen: its folder is another one, or not visible in this mount namespace, so nobody can tell."""

LOOK_SECONDS = 0.25
"""How often a rank that waits for others before they are connected looks whether they live."""
PROBE_TCP_SECONDS = 0.3
STALE_SECONDS = 60.0
"""How old a socket must be to count as left over: one that is being made is refused too, for a moment."""
SOCKET_NAME = re.compile(r"[0-9a-f]{16}-([0-9]+)")


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where `rank` can be reached, as it publishes it.

    claim: random, tells two processes that claim one rank apart. root: identity of the tree of files in which
    `folder` means something; shared: the folder was given (DWDP_SOCKET_DIR), so a peer may have it mounted elsewhere.
    name: of the Unix socket in it. address, port: of the TCP socket for ranks of other hosts, or None and why in
    `problem`.
    """

    rank: int
    pid: int
    host_id: str
    host: str
    claim: str
    root: str
    folder: bytes
    shared: bool
    name: str
    address: str | None = None
    port: int = 0
    problem: str = ""

    @property
    def on(self) -> Host:
        return Host(self.host_id, self.host)

    def folder_for(self, given: str | None) -> str:
        """Its folder as a peer finds it. given: the peer's own DWDP_SOCKET_DIR; containers may mount one folder at
        different places."""
        return os.path.abspath(given) if self.shared and given is not None else os.fsdecode(self.folder)


class Listener:
    """The listening sockets of a rank: a Unix one, and a TCP one where ranks may be on other hosts."""

    def __init__(self, rank: int, size: int, host: Host, given: str | None) -> None:
        self.rank, self.size, self.host, self.given = rank, size, host, given
        self.sockets: list[socket.socket] = []
        self.place: Place | None = None
        self._own_folder: str | None = None

    def open(self, address: str | None) -> Place:
        """address: to listen on for ranks of other hosts, None for none; the Unix socket lies in the given folder,
        else in a new private one. Raises ConfigError for a folder that cannot be used, OSError."""
        if self.given is None:
            folder = self._own_folder = make_private_folder()
        else:
            folder = os.path.abspath(self.given)
            check_socket_folder(folder, create=True)
            sweep_stale(folder)
        name = f"{secrets.token_hex(8)}-{self.rank}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sockets.append(sock)
        with socket_address(folder, name) as path:
            sock.bind(path)
        self.place = Place(
            rank=self.rank, pid=os.getpid(), host_id=self.host.id, host=self.host.name, claim=secrets.token_hex(8),
            root=root_identity(), folder=os.fsencode(folder), shared=self.given is not None, name=name,
        )  # fmt: skip
        sock.listen(self._backlog)
        sock.setblocking(False)
        return self.place if address is None else self.open_tcp(address)

    def open_tcp(self, address: str) -> Place:
        """Listens on exactly this address; one that cannot be had is told by the place."""
        try:
            family, kind, protocol, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
            sock = socket.socket(family, kind, protocol)
            self.sockets.append(sock)
            sock.bind(where)
            sock.listen(self._backlog)
            sock.setblocking(False)
            numeric, port = sock.getsockname()[:2]
            self.place = msgspec.structs.replace(self.place, address=numeric, port=port)
        except OSError as error:
            problem = f"cannot listen on {address}: {error.strerror or error}"
            self.place = msgspec.structs.replace(self.place, problem=problem)
        return self.place

    @property
    def _backlog(self) -> int:
        return 4 * self.size + 8  # connections and those of waiting peers that look whether this rank lives

    def close(self) -> None:
        """Idempotent; leaves no file and no folder of its own."""
        for sock in self.sockets:
            sock.close()
        self.sockets = []
        place, self.place = self.place, None
        if place is not None:
            try:
                os.unlink(os.path.join(os.fsdecode(place.folder), place.name))
            except OSError:
                pass
        if self._own_folder is not None:
            remove_private_folder(self._own_folder)
            self._own_folder = None


def root_identity() -> str:
    """Equal for processes that see one tree of files: mount namespace and root folder."""
    try:
        root = os.stat("/")
        return f"{os.readlink('/proc/self/ns/mnt')}:{root.st_dev}:{root.st_ino}"
    except OSError:
        return secrets.token_hex(8)  # unlike any other


def look_at(place: Place, host: Host, given: str | None) -> str:
    """Whether the process that published `place` still listens: ALIVE, GONE or UNSEEN. See [Note: a rank that dies
    before it is connected]. host, given: of the rank that asks."""
    if place.host_id != host.id:
        return _look_over_tcp(place)
    folder = place.folder_for(given)
    result = _connect(folder, place.name)
    if result == errno.ECONNREFUSED:
        return GONE
    if result in (errno.ENOENT, errno.ENOTDIR):
        same_folder = place.root == root_identity() and os.fsencode(folder) == place.folder
        return GONE if same_folder else UNSEEN
    return ALIVE


def _connect(folder: str, name: str) -> int:
    """-> the error number of connecting to a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.setblocking(False)
        try:
            with socket_address(folder, name) as path:
                return sock.connect_ex(path)
        except OSError as error:
            return error.errno


def _look_over_tcp(place: Place) -> str:
    if place.address is None:
        return ALIVE
    try:
        socket.create_connection((place.address, place.port), timeout=PROBE_TCP_SECONDS).close()
    except ConnectionRefusedError:
        return GONE
    except OSError:
        pass  # a host that does not answer: the deadline tells
    return ALIVE


def sweep_up(place: Place, host: Host, given: str | None) -> None:
    """Removes the socket, and the private folder, that a killed process of this host could not remove."""
    found = SOCKET_NAME.fullmatch(place.name)
    if place.host_id != host.id or found is None or int(found[1]) != place.rank:
        return
    folder = place.folder_for(given)
    try:
        check_socket_folder(folder, create=False)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, place.name))
        if not place.shared and os.path.basename(folder).startswith(PRIVATE_FOLDER_PREFIX):
            os.rmdir(folder)  # fails unless it is empty
    except (OSError, ConfigError):
        pass  # another rank was faster, or it is not this process's to remove


def sweep_stale(folder: str) -> None:
    """Removes the sockets in a given folder that processes left of which no rank survived to sweep up."""
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if (
                    SOCKET_NAME.fullmatch(entry.name)
                    and time.time() - entry.stat(follow_symlinks=False).st_mtime > STALE_SECONDS
                    and _connect(folder, entry.name) == errno.ECONNREFUSED
                ):
                    os.unlink(entry.path)
