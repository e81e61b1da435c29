"""One exchange of descriptors among the ranks of a host: all send to all and receive from all."""

from __future__ import annotations

import errno
import logging
import select
import socket
import time
from collections.abc import Callable, Mapping

from dwdp.errors import GroupError, GroupTimeoutError
from dwdp.group.fds import MAX_FDS_PER_MESSAGE, close_fds, recv_fds, send_fds, take_fd
from dwdp.group.links import Descriptors, Failed, Goodbye, decode, encode
from dwdp.group.ranks import name_ranks

logger = logging.getLogger(__name__)

CHECK_SECONDS = 0.05
STALL_SECONDS = 5.0
"""How long the kernel may refuse more descriptors in flight before the fallback is taken."""

# [Note: descriptors in flight]
# The kernel counts a user's descriptors that were sent and not yet received, over all processes, and refuses
# more with ETOOMANYREFS. The peers are receiving meanwhile, so that is a reason to wait, not a failure.
_TRY_AGAIN = frozenset({errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM})
PEER_GONE = frozenset({errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN})
_OWN_FAULT = frozenset({errno.EBADF})


class DescriptorExchange:
    """One run of `PeerSockets.exchange`: sends and receives at once, so that full buffers cannot deadlock."""

    def __init__(self, peers, number: int, fds: list[int], counts: list[int], what: str) -> None:
        self.peers, self.number, self.fds, self.counts, self.what = peers, number, fds, counts, what
        self.sent = dict.fromkeys(peers.socks, 0)
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
        for peer in self.peers.socks.keys() - self.gave_up:
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
            sock = self.peers.socks[peer]
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
        with self.peers.lock:
            try:
                payload, fds = recv_fds(self.peers.socks[peer], 0)
            except (TimeoutError, EOFError, ConnectionResetError):
                return False  # a hang-up is the monitor's to judge; `run` sees its verdict
            message = decode(payload)
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
            if self.peers.pids[peer] == 0:
                raise OSError(errno.ESRCH, f"pidfd_getfd: rank {peer} lives in another PID namespace")
            return take_fd(self.peers.pids[peer], number)
        except OSError as error:
            raise GroupError(
                f"rank {peer} could not pass its descriptors to rank {self.peers.rank}: SCM_RIGHTS: {cause}; "
                f"{error.strerror}"
            ) from error

    def _send(self, peer: int) -> bool:
        sock, start = self.peers.socks[peer], self.sent[peer]
        batch = self.fds[start : start + MAX_FDS_PER_MESSAGE]
        flags = socket.MSG_DONTWAIT
        try:
            try:
                send_fds(sock, batch, encode(Descriptors(self.number)), flags=flags)
            except OSError as error:
                if isinstance(error, BlockingIOError) or error.errno in PEER_GONE | _OWN_FAULT:
                    raise
                since = self.stalled_since.setdefault(peer, time.monotonic())
                if error.errno in _TRY_AGAIN and time.monotonic() - since < STALL_SECONDS:
                    return False  # [Note: descriptors in flight]
                logger.warning("SCM_RIGHTS to rank %d failed, pidfd_getfd is used: %s", peer, error)
                send_fds(sock, [], encode(Descriptors(self.number, batch, str(error))), flags=flags)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in PEER_GONE:
                return False
            raise
        self.stalled_since.pop(peer, None)
        self.sent[peer] = start + len(batch)
        return True
