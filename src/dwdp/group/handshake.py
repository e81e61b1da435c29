"""Connecting every two ranks of a group, and proving on each connection that both ends have the group's token.

The lower rank accepts. Everything is polled in one loop, so that no rank waits for another one that itself waits,
and the ranks that are missing at the deadline are those that did nothing.

[Note: the token] The connector says who it is with a random nonce; the acceptor answers with its own nonce and an
HMAC of the token over both; the connector checks it and only then sends its own. The token itself is never sent. A
rank without a token proves that it has none. Whoever finds a wrong proof notes the rank and goes on: the vote that
follows has all ranks' notes, and every rank then tells which rank differs.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import select
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dwdp.errors import GroupError, GroupTimeoutError, RankDiedError
from dwdp.group.links import (
    Hello,
    Message,
    Proof,
    Refused,
    Reply,
    keep_alive,
    prove,
    proves,
    receive_message,
    send_message,
)
from dwdp.group.parent import socket_address
from dwdp.group.place import ALIVE, GONE, LOOK_SECONDS, UNSEEN, Listener, Place, look_at
from dwdp.group.ranks import name_ranks

logger = logging.getLogger(__name__)

GREETING_SECONDS = 1.0
"""How long a connection may take to say who it is."""
MAX_HANG_UPS = 3
"""How often a living rank may close the connection to this one; one that is slow to answer is asked again."""

_LATER = frozenset({errno.ECONNREFUSED, errno.EAGAIN, errno.EINPROGRESS, errno.ECONNRESET, errno.EPIPE})
"""Of a connect: whether the rank is gone is judged by looking twice."""


@dataclass
class _Open:
    """A connection whose handshake goes on. peer: None until it has said who it is."""

    sock: socket.socket
    peer: int | None
    hello: Hello | None
    nonce: bytes = b""
    pid: int = 0
    connected: bool = True
    since: float = 0.0


class Handshake:
    """One run of it. socks, pids: of the ranks that are through (pid 0 in another PID namespace, or on another
    host); refused: the ranks that have another token."""

    def __init__(self, group: str, listener: Listener, places: Sequence[Place], token: str | None) -> None:
        self.group, self.listener, self.places, self.token = group, listener, places, token
        self.rank, self.size = listener.rank, listener.size
        self.socks: dict[int, socket.socket] = {}
        self.pids: dict[int, int] = {}
        self.refused: set[int] = set()
        self.gone: set[int] = set()
        """Ranks that died on the way."""
        self._open: dict[int, _Open] = {}  # by descriptor
        self._suspects: set[int] = set()
        self._hang_ups: Counter[int] = Counter()

    def run(self, seconds: float, what: str, check: Callable[[], None]) -> None:
        """check: raises when the group was aborted; called about every 0.25 s.

        Raises RankDiedError, GroupTimeoutError naming the ranks that are missing after `seconds`, GroupError for one
        that cannot be reached, runs as another user, or hung up.
        """
        start = time.monotonic()
        next_look = start + LOOK_SECONDS
        try:
            for peer in range(self.rank):
                self._connect(peer)
            while missing := self._missing():
                self._step()
                if (now := time.monotonic()) < next_look:
                    continue
                next_look = now + LOOK_SECONDS
                check()
                for peer in missing:
                    self._look(peer, now)
                if now - start > seconds and (missing := self._missing()):
                    raise GroupTimeoutError(
                        f"{name_ranks(missing)} of {self.size} did not come to {what!r} of group {self.group!r} within "
                        f"{seconds:g} s ({'; '.join(self._where(peer) for peer in missing)})"
                    )
        finally:
            for one in self._open.values():
                one.sock.close()

    def _missing(self) -> list[int]:
        done = self.socks.keys() | self.refused
        return [peer for peer in range(self.size) if peer != self.rank and peer not in done]

    def _folder(self, peer: int) -> str:
        return self.places[peer].folder_for(self.listener.given)

    def _on_this_host(self, peer: int) -> bool:
        return self.places[peer].host_id == self.listener.host.id

    def _where(self, peer: int) -> str:
        place = self.places[peer]
        if self._on_this_host(peer):
            return f"rank {peer}: {self._folder(peer)}, option DWDP_SOCKET_DIR"
        return f"rank {peer}: host {place.host}, {place.address}:{place.port}"

    # -- the lower ranks: this one connects

    def _connect(self, peer: int) -> None:
        place = self.places[peer]
        try:
            sock, result = self._unix(peer) if self._on_this_host(peer) else self._tcp(place)
        except OSError as error:
            sock, result = None, error.errno
        if result in (0, errno.EINPROGRESS):
            hello = Hello(self.group, self.rank, peer, secrets.token_bytes(16))
            self._open[sock.fileno()] = one = _Open(sock, peer, hello, connected=result == 0)
            if result == 0:
                self._greet(one)
            return
        if sock is not None:
            sock.close()
        seen = self._on_this_host(peer) and look_at(place, self.listener.host, self.listener.given) != UNSEEN
        if result not in _LATER and not (result == errno.ENOENT and seen):
            raise self._unreachable(peer, os.strerror(result))

    def _unix(self, peer: int) -> tuple[socket.socket, int]:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        try:
            with socket_address(self._folder(peer), self.places[peer].name) as path:
                return sock, sock.connect_ex(path)
        except OSError:
            sock.close()
            raise

    def _tcp(self, place: Place) -> tuple[socket.socket, int]:
        family = socket.AF_INET6 if ":" in place.address else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        keep_alive(sock)
        return sock, sock.connect_ex((place.address, place.port))

    def _greet(self, one: _Open) -> None:
        if one.sock.family == socket.AF_UNIX:
            one.pid = self._check_uid(one.sock, f"rank {one.peer}")
        self._send(one, one.hello)

    # -- the higher ranks: this one accepts

    def _accept(self, listening: socket.socket) -> None:
        try:
            sock, _ = listening.accept()
        except OSError as error:
            logger.debug("rank %d could not accept a connection: %s", self.rank, error)
            return
        sock.setblocking(False)
        one = _Open(sock, None, None, since=time.monotonic())
        try:
            if sock.family == socket.AF_UNIX:
                one.pid = self._check_uid(sock, "a process")
            else:
                keep_alive(sock)
        except (OSError, GroupError) as error:
            logger.warning("rank %d closed a connection: %s", self.rank, error)
            sock.close()
            return
        self._open[sock.fileno()] = one

    @staticmethod
    def _check_uid(sock: socket.socket, who: str) -> int:
        """-> the peer's pid (0 when it lives in another PID namespace)."""
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", credentials)
        if uid != os.geteuid():
            raise GroupError(f"{who} connected as uid {uid}, this process runs as uid {os.geteuid()}")
        return pid

    # -- both

    def _step(self) -> None:
        """Waits a moment and deals with what came."""
        poller = select.poll()
        listening = {sock.fileno(): sock for sock in self.listener.sockets}
        for fd in listening:
            poller.register(fd, select.POLLIN)
        for fd, one in self._open.items():
            poller.register(fd, select.POLLIN if one.connected else select.POLLOUT)
        for fd, _ in poller.poll(LOOK_SECONDS * 1000):
            if fd in listening:
                self._accept(listening[fd])
            elif fd in self._open:
                self._advance(self._open[fd])

    def _advance(self, one: _Open) -> None:
        try:
            if not one.connected:
                self._finish_connecting(one)
                return
            message = receive_message(one.sock)
        except BlockingIOError:
            return
        except (OSError, EOFError, ValueError) as error:
            self._drop(one, error)
            return
        self._take(one, message)

    def _finish_connecting(self, one: _Open) -> None:
        code = one.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code and code not in _LATER:
            raise self._unreachable(one.peer, os.strerror(code))
        if code:
            raise OSError(code, os.strerror(code))
        one.connected = True
        self._greet(one)

    def _take(self, one: _Open, message: Message) -> None:
        """The next message of a connection; see [Note: the token]."""
        match message:
            case Hello() if one.hello is None and self._expects(message, one.sock):
                one.peer, one.hello, one.nonce = message.rank, message, secrets.token_bytes(16)
                self._send(one, Reply(one.nonce, prove(self.token, "acceptor", message, one.nonce)))
            case Reply(nonce, proof) if one.hello is not None and not one.nonce:
                if not proves(proof, self.token, "acceptor", one.hello, nonce):
                    self._refuse(one)
                elif self._send(one, Proof(prove(self.token, "connector", one.hello, nonce))):
                    self._through(one)
            case Proof(proof) if one.nonce:
                if proves(proof, self.token, "connector", one.hello, one.nonce):
                    self._through(one)
                else:
                    self._refuse(one)
            case Refused() if one.nonce:
                self._refuse(one)
            case _:
                self._drop(one, ValueError(f"unexpected {type(message).__name__}"))

    def _expects(self, hello: Hello, sock: socket.socket) -> bool:
        return (
            hello.group == self.group
            and hello.to == self.rank
            and self.rank < hello.rank < self.size
            and hello.rank not in self.socks
            and self._on_this_host(hello.rank) == (sock.family == socket.AF_UNIX)
        )

    def _send(self, one: _Open, message: Message) -> bool:
        try:
            send_message(one.sock, message)
            return True
        except OSError as error:
            self._drop(one, error)
            return False

    def _through(self, one: _Open) -> None:
        del self._open[one.sock.fileno()]
        self.refused.discard(one.peer)
        one.sock.setblocking(True)
        self.socks[one.peer], self.pids[one.peer] = one.sock, one.pid

    def _refuse(self, one: _Open) -> None:
        self.refused.add(one.peer)
        try:
            send_message(one.sock, Refused())
        except OSError:
            pass  # it finds out by itself
        self._close(one)

    def _drop(self, one: _Open, error: BaseException) -> None:
        if one.peer is not None:
            self._hang_ups[one.peer] += 1
        # a look at whether this rank lives hangs up without a word; anything else is no rank of this group
        logger.debug("a connection of rank %d was closed: %r", self.rank, error)
        self._close(one)

    def _close(self, one: _Open) -> None:
        self._open.pop(one.sock.fileno(), None)
        one.sock.close()

    # -- who is missing, and why

    def _look(self, peer: int, now: float) -> None:
        """Raises when `peer` is gone (seen twice), cannot be seen at all, or hangs up again and again."""
        for one in [one for one in self._open.values() if one.peer is None and now - one.since > GREETING_SECONDS]:
            self._drop(one, TimeoutError())
        if peer in self.socks or peer in self.refused:
            return
        state = look_at(self.places[peer], self.listener.host, self.listener.given)
        if state == UNSEEN:
            raise self._unreachable(peer, os.strerror(errno.ENOENT))
        if state == GONE and peer in self._suspects:
            self.gone.add(peer)
            raise RankDiedError(peer, f"rank {peer} died while the group {self.group!r} was made")
        if state == GONE:
            self._suspects.add(peer)
            return
        self._suspects.discard(peer)
        if self._hang_ups[peer] >= MAX_HANG_UPS:
            raise GroupError(f"rank {peer} closed its connection to rank {self.rank} of the group {self.group!r}")
        if peer < self.rank and state == ALIVE and not any(one.peer == peer for one in self._open.values()):
            self._connect(peer)

    def _unreachable(self, peer: int, reason: str) -> GroupError:
        place = self.places[peer]
        if self._on_this_host(peer):
            return GroupError(
                f"rank {self.rank} cannot reach the socket of rank {peer} in {self._folder(peer)}: {reason}; all ranks "
                "must share that folder (option DWDP_SOCKET_DIR)"
            )
        return GroupError(
            f"rank {self.rank} on host {self.listener.host.name} cannot reach rank {peer} on host {place.host} at "
            f"{place.address}:{place.port}, the address by which that rank reaches the group's store: {reason}"
        )
