"""The Unix sockets between every two ranks of a group: they carry descriptors, and their end-of-file tells a
death.

[Note: what end-of-file means]
A rank that closes its group sends Goodbye first, so end-of-file behind a Goodbye is a clean leave and any
other is a death. The monitor thread never reads from a living peer's socket, where it could take descriptors
that an exchange waits for; it only polls for the hang-up. After a hang-up nothing that is still queued can be
of use: an exchange ends with a vote, which the peer can no longer take part in.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from dwdp.errors import GroupError, GroupTimeoutError, RankDiedError
from dwdp.group.fds import MAX_FDS_PER_MESSAGE, MAX_MESSAGE_BYTES, close_fds, recv_fds, send_fds, take_fd
from dwdp.group.parent import socket_address
from dwdp.group.ranks import name_ranks

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 8.0
"""How long the connections may take once every rank listens; milliseconds when the folder is shared, and
ranks that do not share one are to fail within 10 s."""
PROBE_SECONDS = 0.25
CHECK_SECONDS = 0.05
STALL_SECONDS = 5.0
"""How long the kernel may refuse more descriptors in flight before the fallback is taken."""

# [Note: descriptors in flight]
# The kernel counts a user's descriptors that were sent and not yet received, over all processes, and refuses
# more with ETOOMANYREFS. The peers are receiving meanwhile, so that is a reason to wait, not a failure.
_TRY_AGAIN = frozenset({errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM})
_PEER_GONE = frozenset({errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN})
_OWN_FAULT = frozenset({errno.EBADF})


class Hello(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """The first message of a connection: who connects."""

    group: str
    rank: int


class Goodbye(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """The sender closes its group."""


class Descriptors(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """Descriptors of one exchange, in order. numbers: empty when they came along as SCM_RIGHTS, else their
    numbers in the sender, for `pidfd_getfd`; cause: why SCM_RIGHTS failed."""

    exchange: int
    numbers: list[int] = []
    cause: str = ""


class Failed(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """The sender gave up this exchange; its error comes with the vote that ends it."""

    exchange: int


_decoder = msgspec.msgpack.Decoder(Hello | Goodbye | Descriptors | Failed)
_encode = msgspec.msgpack.Encoder().encode


class PeerSockets:
    """One connected socket to every peer, and the thread that watches them.

    on_death(rank) is called once a dead peer, from the watching thread. `dead` and `left` (said goodbye) only
    grow. Life: `listen`, `connect`, `stop_listening`, then exchanges, `goodbye`, `close` (idempotent, valid
    at any time).
    """

    def __init__(self, rank: int, size: int, name: str, on_death: Callable[[int], None]) -> None:
        self.rank, self.size, self.name = rank, size, name
        self.dead: set[int] = set()
        self.left: set[int] = set()
        self._on_death = on_death
        self._socks: dict[int, socket.socket] = {}
        self._pids: dict[int, int] = {}
        self._listener: socket.socket | None = None
        self._listen_path: str | None = None
        self._exchanges = 0
        # Guards reading a socket together with acting on what was read, and the two sets.
        self._lock = threading.Lock()
        self._closing = False
        self._wake = -1
        self._thread: threading.Thread | None = None

    # -- making the connections

    def listen(self, folder: str) -> str:
        """Listens in `folder` under a random name, which is returned. Raises OSError."""
        name = f"{secrets.token_hex(8)}-{self.rank}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listen_path = os.path.join(folder, name)
        with socket_address(folder, name) as address:
            self._listener.bind(address)
        self._listener.listen(4 * self.size + 8)
        self._listener.setblocking(False)
        return name

    def connect(self, folder: str, names: Sequence[str], check: Callable[[], None]) -> None:
        """Connects to the lower ranks and takes the connections of the higher ones, within 8 s.

        names: what each rank's `listen` returned; every rank listens by now. check: raises when the group was
        aborted. Whatever happens, the connections made so far are watched from here on. Raises RankDiedError
        for a rank whose socket is closed, GroupError for one that does not come or runs as another user.
        """
        try:
            for peer in range(self.rank):
                self._socks[peer] = self._connect_one(folder, names[peer], peer)
            self._accept_all(folder, names, check)
        finally:
            self._start_watching()

    def _connect_one(self, folder: str, name: str, peer: int) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.settimeout(CONNECT_SECONDS)
            with socket_address(folder, name) as address:
                sock.connect(address)
            sock.settimeout(None)
            self._pids[peer] = self._check_uid(sock, f"rank {peer}")
            sock.send(_encode(Hello(self.name, self.rank)), socket.MSG_NOSIGNAL)
            return sock
        except BaseException as error:
            sock.close()
            if isinstance(error, OSError):
                if error.errno in (errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE):
                    self.dead.add(peer)
                    raise RankDiedError(peer, f"rank {peer} died while the group {self.name!r} was made") from error
                raise self._unreachable(peer, folder, error.strerror or str(error)) from error
            raise

    def _accept_all(self, folder: str, names: Sequence[str], check: Callable[[], None]) -> None:
        deadline = time.monotonic() + CONNECT_SECONDS
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        suspects: set[int] = set()
        while missing := set(range(self.rank + 1, self.size)) - self._socks.keys():
            if poller.poll(PROBE_SECONDS * 1000):
                self._accept_one()
                continue
            # A rank connects before it closes its own socket, so one that was closed at the last probe and
            # still has no connection here is dead.
            if died := suspects & missing:
                self.dead |= died
                raise RankDiedError(min(died), f"rank {min(died)} died while the group {self.name!r} was made")
            if time.monotonic() > deadline:
                raise GroupError(
                    f"{name_ranks(missing)} did not connect to rank {self.rank} within "
                    f"{CONNECT_SECONDS:.0f} s over the sockets in {folder} (option DWDP_SOCKET_DIR)"
                )
            check()
            suspects = {peer for peer in missing if self._is_closed(folder, names[peer], peer)}

    def _accept_one(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        try:
            sock.settimeout(1.0)
            pid = self._check_uid(sock, "a process")
            hello = _decoder.decode(sock.recv(4096))
            if not isinstance(hello, Hello) or hello.group != self.name or not self.rank < hello.rank < self.size:
                raise GroupError(f"unexpected greeting {hello}")
            if hello.rank in self._socks:
                raise GroupError(f"rank {hello.rank} connected twice")
            sock.settimeout(None)
            self._socks[hello.rank], self._pids[hello.rank] = sock, pid
        except (OSError, msgspec.DecodeError, GroupError) as error:
            # A probe closes without a word; anything else is no rank of this group.
            sock.close()
            logger.debug("a connection to the socket of rank %d was closed: %s", self.rank, error)

    def _is_closed(self, folder: str, name: str, peer: int) -> bool:
        """Whether nobody listens behind the peer's socket any more. Raises GroupError when it is not in
        `folder`."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.setblocking(False)
            with socket_address(folder, name) as address:
                result = sock.connect_ex(address)
        if result == errno.ENOENT:
            raise self._unreachable(peer, folder, os.strerror(result))
        return result == errno.ECONNREFUSED

    def _unreachable(self, peer: int, folder: str, reason: str) -> GroupError:
        return GroupError(
            f"rank {self.rank} cannot reach the socket of rank {peer} in {folder}: {reason}; all ranks must "
            "share that folder (option DWDP_SOCKET_DIR)"
        )

    @staticmethod
    def _check_uid(sock: socket.socket, who: str) -> int:
        """-> the peer's pid (0 when it lives in another PID namespace)."""
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", credentials)
        if uid != os.geteuid():
            raise GroupError(f"{who} connected as uid {uid}, this process runs as uid {os.geteuid()}")
        return pid

    def stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._listen_path is not None:
            try:
                os.unlink(self._listen_path)
            except FileNotFoundError:
                pass
            self._listen_path = None

    # -- liveness

    def _start_watching(self) -> None:
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._watch, name=f"dwdp-peers-{self.name}-{self.rank}", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        peers = {}
        for peer, sock in self._socks.items():
            peers[sock.fileno()] = peer
            poller.register(sock, select.POLLRDHUP | select.POLLHUP)
        while True:
            for fd, _ in poller.poll():
                if fd == self._wake:
                    return
                poller.unregister(fd)
                self._hung_up(peers[fd])

    def _hung_up(self, peer: int) -> None:
        """See [Note: what end-of-file means]. Idempotent."""
        with self._lock:
            if self._closing or peer in self.dead or peer in self.left:
                return
            while True:
                try:
                    # without a buffer for descriptors: the kernel closes those that are still queued
                    payload = self._socks[peer].recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
                except ConnectionResetError:
                    continue  # reported once, in front of what is still queued
                except OSError:
                    break
                if not payload:
                    break
                if payload == _encode(Goodbye()):
                    self.left.add(peer)
                    return
            self.dead.add(peer)
        logger.error("rank %d died (group %s, noticed by rank %d)", peer, self.name, self.rank)
        self._on_death(peer)

    def raise_if_gone(self, peer: int, what: str) -> None:
        """Raises RankDiedError or GroupError when `peer` died or left."""
        if peer in self.dead:
            raise RankDiedError(peer, f"rank {peer} died; rank {self.rank} needed it in {what}")
        if peer in self.left:
            raise GroupError(f"rank {peer} left the group {self.name!r}; rank {self.rank} needed it in {what}")

    # -- descriptors

    def exchange(
        self,
        fds: Sequence[int],
        counts: Sequence[int],
        what: str,
        *,
        deadline: float,
        check: Callable[[], None],
    ) -> list[list[int]]:
        """Sends all `fds` to every peer and receives theirs: a list per rank, the own one empty.

        counts: descriptors of each rank, agreed before. deadline: a `time.monotonic()` value. check: raises
        when the group was aborted; called about every 50 ms. A peer that gives up leaves its list short: the
        vote that has to follow names it. On an error nothing received stays open, and the peers are told. The
        caller owns what is returned.
        """
        self._exchanges += 1
        exchange = _Exchange(self, self._exchanges, list(fds), list(counts), what)
        try:
            exchange.run(deadline, check)
        except BaseException:
            for received in exchange.received:
                close_fds(received)
            self._send_to_all(Failed(self._exchanges))
            raise
        return exchange.received

    def _send_to_all(self, message: Goodbye | Failed) -> None:
        for peer, sock in self._socks.items():
            poller = select.poll()
            poller.register(sock, select.POLLOUT)
            poller.poll(1000)  # a full buffer is being read, unless the peer is stuck
            try:
                sock.send(_encode(message), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except OSError as error:
                if error.errno not in _PEER_GONE:
                    logger.warning("rank %d could not tell rank %d: %s", self.rank, peer, error)

    # -- leaving

    def goodbye(self) -> None:
        """Tells every peer that this end closes."""
        self._send_to_all(Goodbye())
        for sock in self._socks.values():
            try:
                sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # the peer is gone already

    def close(self) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
        if self._thread is not None:
            os.eventfd_write(self._wake, 1)
            if self._thread is not threading.current_thread():
                self._thread.join()
            os.close(self._wake)
        self.stop_listening()
        for sock in self._socks.values():
            sock.close()


class _Exchange:
    """One run of `PeerSockets.exchange`: sends and receives at once, so that full buffers cannot deadlock."""

    def __init__(self, peers: PeerSockets, number: int, fds: list[int], counts: list[int], what: str) -> None:
        self.peers, self.number, self.fds, self.counts, self.what = peers, number, fds, counts, what
        self.sent = dict.fromkeys(peers._socks, 0)
        self.received: list[list[int]] = [[] for _ in counts]
        self.gave_up: set[int] = set()
        self.stalled_since: dict[int, float] = {}

    def run(self, deadline: float, check: Callable[[], None]) -> None:
        next_check = time.monotonic() + CHECK_SECONDS
        while True:
            wanted = self._wanted()
            if not wanted:
                return
            for peer in wanted:
                self.peers.raise_if_gone(peer, self.what)
            if not self._step(wanted):
                time.sleep(0.002)
            if time.monotonic() >= next_check:
                if time.monotonic() > deadline:
                    raise GroupTimeoutError(f"{name_ranks(wanted)} did not take part in {self.what} in time")
                check()
                next_check = time.monotonic() + CHECK_SECONDS

    def _wanted(self) -> Mapping[int, int]:
        """-> peer -> poll events that still matter."""
        wanted = {}
        for peer in self.peers._socks.keys() - self.gave_up:
            events = select.POLLIN if len(self.received[peer]) < self.counts[peer] else 0
            events |= select.POLLOUT if self.sent[peer] < len(self.fds) else 0
            if events:
                wanted[peer] = events
        return wanted

    def _step(self, wanted: Mapping[int, int]) -> bool:
        """-> whether anything moved."""
        poller = select.poll()
        by_fd = {}
        for peer, events in wanted.items():
            sock = self.peers._socks[peer]
            # also a peer that only has to be sent to may tell that it gave up
            poller.register(sock, events | select.POLLIN)
            by_fd[sock.fileno()] = peer
        moved = False
        for fd, events in poller.poll(CHECK_SECONDS * 1000):
            peer = by_fd[fd]
            if events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                moved |= self._receive(peer)
            if events & select.POLLOUT and wanted[peer] & select.POLLOUT and peer not in self.gave_up:
                moved |= self._send(peer)
        return moved

    def _receive(self, peer: int) -> bool:
        with self.peers._lock:
            try:
                payload, fds = recv_fds(self.peers._socks[peer], 0)
            except (TimeoutError, EOFError, ConnectionResetError):
                return False  # a hang-up is the monitor's to judge; `run` sees its verdict
            message = _decoder.decode(payload)
            if isinstance(message, Goodbye):
                self.peers.left.add(peer)
                return True
        if getattr(message, "exchange", None) != self.number:
            close_fds(fds)  # left over from an exchange that failed
        elif isinstance(message, Failed):
            self.gave_up.add(peer)
        else:
            self.received[peer].extend(fds)
            for number in message.numbers:
                self.received[peer].append(self._take(peer, number, message.cause))
        return True

    def _take(self, peer: int, number: int, cause: str) -> int:
        try:
            return take_fd(self.peers._pids[peer], number)
        except OSError as error:
            raise GroupError(
                f"rank {peer} could not pass its descriptors to rank {self.peers.rank}: SCM_RIGHTS: {cause}; "
                f"{error.strerror}"
            ) from error

    def _send(self, peer: int) -> bool:
        sock, start = self.peers._socks[peer], self.sent[peer]
        batch = self.fds[start : start + MAX_FDS_PER_MESSAGE]
        flags = socket.MSG_DONTWAIT
        try:
            try:
                send_fds(sock, batch, _encode(Descriptors(self.number)), flags=flags)
            except OSError as error:
                if isinstance(error, BlockingIOError) or error.errno in _PEER_GONE | _OWN_FAULT:
                    raise
                since = self.stalled_since.setdefault(peer, time.monotonic())
                if error.errno in _TRY_AGAIN and time.monotonic() - since < STALL_SECONDS:
                    return False  # [Note: descriptors in flight]
                logger.warning("SCM_RIGHTS to rank %d failed, pidfd_getfd is used: %s", peer, error)
                send_fds(sock, [], _encode(Descriptors(self.number, batch, str(error))), flags=flags)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in _PEER_GONE:
                return False
            raise
        self.stalled_since.pop(peer, None)
        self.sent[peer] = start + len(batch)
        return True
