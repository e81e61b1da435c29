"""The sockets between every two ranks of a group: they carry descriptors, and their end-of-file tells a death.

[Note: what end-of-file means]
A rank that closes its group sends Goodbye first, so end-of-file behind a Goodbye is a clean leave and any
other is a death. The monitor thread never reads from a living peer's socket, where it could take descriptors
that an exchange waits for; it only polls for the hang-up. After a hang-up nothing that is still queued can be
of use: an exchange ends with a vote, which the peer can no longer take part in.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from collections.abc import Callable, Sequence

from dwdp.errors import GroupError, RankDiedError
from dwdp.group.descriptors import PEER_GONE, DescriptorExchange
from dwdp.group.fds import close_fds
from dwdp.group.handshake import Handshake
from dwdp.group.links import Failed, Goodbye, receive_message, send_message
from dwdp.group.place import Listener, Place, sweep_up
from dwdp.group.ranks import Host

logger = logging.getLogger(__name__)


class PeerSockets:
    """One connected socket to every peer, and the thread that watches them.

    given: the folder for Unix sockets, None for a private one. on_death(rank) is called once a dead peer, from
    the watching thread. `dead` and `left` (said goodbye) only grow. Life: `listen`, `connect`, `stop_listening`,
    then exchanges, `goodbye`, `close` (idempotent, valid at any time).
    """

    def __init__(
        self, rank: int, size: int, name: str, host: Host, given: str | None, on_death: Callable[[int], None]
    ) -> None:
        self.rank, self.size, self.name = rank, size, name
        self.dead: set[int] = set()
        self.left: set[int] = set()
        self.listener = Listener(rank, size, host, given)
        self._places: Sequence[Place] = ()
        self._on_death = on_death
        self.socks: dict[int, socket.socket] = {}
        self.pids: dict[int, int] = {}
        self._exchanges = 0
        # Guards reading a socket together with acting on what was read, and the two sets.
        self.lock = threading.Lock()
        self._closing = False
        self._wake = -1
        self._thread: threading.Thread | None = None

    # -- making the connections

    def connect(
        self, places: Sequence[Place], token: str | None, seconds: float, what: str, check: Callable[[], None]
    ) -> set[int]:
        """Connects to all ranks, see `Handshake.run`; -> those that have another token.

        places: of every rank; every rank listens by now. Whatever happens, the connections made so far are watched
        from here on.
        """
        self._places = places
        handshake = Handshake(self.name, self.listener, places, token)
        try:
            handshake.run(seconds, what, check)
            return handshake.refused
        finally:
            self.socks, self.pids = handshake.socks, handshake.pids
            for peer in handshake.gone:
                self.lose(places[peer])
            self._start_watching()

    def lose(self, place: Place) -> None:
        """Its rank is dead: what it left on this host is removed."""
        self.dead.add(place.rank)
        sweep_up(place, self.listener.host, self.listener.given)

    def stop_listening(self) -> None:
        self.listener.close()

    # -- liveness

    def _start_watching(self) -> None:
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._watch, name=f"dwdp-peers-{self.name}-{self.rank}", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        peers = {}
        for peer, sock in self.socks.items():
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
        with self.lock:
            if self._closing or peer in self.dead or peer in self.left:
                return
            while True:
                try:
                    message = receive_message(self.socks[peer])
                except ConnectionResetError:
                    continue  # reported once, in front of what is still queued
                except (OSError, EOFError, ValueError):
                    break
                if isinstance(message, Goodbye):
                    self.left.add(peer)
                    return
            self.lose(self._places[peer])
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
        """Sends all `fds` to every peer and receives theirs: a list per rank, the own one empty. All on one host.

        counts: descriptors of each rank, agreed before. deadline: a `time.monotonic()` value. check: raises
        when the group was aborted; called about every 50 ms. A peer that gives up leaves its list short: the
        vote that has to follow names it. On an error nothing received stays open, and the peers are told. The
        caller owns what is returned.
        """
        self._exchanges += 1
        exchange = DescriptorExchange(self, self._exchanges, list(fds), list(counts), what)
        try:
            exchange.run(deadline, check)
        except BaseException:
            for received in exchange.received:
                close_fds(received)
            self._send_to_all(Failed(self._exchanges))
            raise
        return exchange.received

    def _send_to_all(self, message: Goodbye | Failed) -> None:
        for peer, sock in self.socks.items():
            poller = select.poll()
            poller.register(sock, select.POLLOUT)
            poller.poll(1000)  # a full buffer is being read, unless the peer is stuck
            try:
                send_message(sock, message)
            except OSError as error:
                if error.errno not in PEER_GONE:
                    logger.warning("rank %d could not tell rank %d: %s", self.rank, peer, error)

    # -- leaving

    def goodbye(self) -> None:
        """Tells every peer that this end closes."""
        self._send_to_all(Goodbye())
        for sock in self.socks.values():
            try:
                sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # the peer is gone already

    def close(self) -> None:
        with self.lock:
            if self._closing:
                return
            self._closing = True
        if self._thread is not None:
            os.eventfd_write(self._wake, 1)
            if self._thread is not threading.current_thread():
                self._thread.join()
            os.close(self._wake)
        self.stop_listening()
        for sock in self.socks.values():
            sock.close()
