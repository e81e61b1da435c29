"""A group of ranks: joining, descriptors, deaths, leaving. Used in setup and teardown only.

Collectives are in collectives.py, what moves their messages in backends.py and mpi.py, connections in sockets.py.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from dwdp import env
from dwdp.errors import GroupError, GroupTimeoutError, RankDiedError
from dwdp.group.collectives import Collectives
from dwdp.group.fds import close_fds
from dwdp.group.joining import ONE_HOST, join_report, judge, other_tokens, spans_hosts
from dwdp.group.place import GONE, LOOK_SECONDS, Place, look_at
from dwdp.group.posts import Abort, Deadline, Post
from dwdp.group.ranks import Host, RankInfo, join_problems, name_hosts, name_ranks
from dwdp.group.sockets import PeerSockets

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 8.0
"""How long the connections may take once every rank listens; milliseconds when the folder is shared, and
ranks that do not share one are to fail within 10 s."""
LAST_SOCKET_SECONDS = 0.5
"""How long the kernel may take to close a killed process's sockets, one after the other."""


class Group(Collectives):
    """An ordered set of ranks. Context manager: an exception inside aborts the group; `close()` is
    idempotent.

    timeout_seconds: the deadline of each collective (None: DWDP_RENDEZVOUS_TIMEOUT_S). socket_dir: an
    existing or new folder of mode 0700 for the peers' sockets (None: DWDP_SOCKET_DIR, else each rank makes a
    private temporary one). token: the group's secret (None: DWDP_GROUP_TOKEN), needed when the ranks span hosts.
    host: where this rank is taken to be (None: on this machine), for tests.

    Collectives are called by every rank in the same order, from one thread at a time. They raise
    GroupTimeoutError naming the missing ranks and the tag, RankDiedError for a rank that died, GroupError for
    tags that differ, an abort, or a rank that left. After a timeout, a mismatch or an abort the group can
    only be closed; after a vote that failed or a death it goes on.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        name: str = "dwdp",
        timeout_seconds: float | None = None,
        socket_dir: str | None = None,
        token: str | None = None,
        host: Host | None = None,
    ) -> None:
        super().__init__(rank, size, name, timeout_seconds)
        self.host, self._host_given = host or Host.here(), host is not None
        self.info = RankInfo(rank, size, self.host.name, os.getpid())
        self._socket_dir = env.socket_dir() if socket_dir is None else socket_dir
        self._token = env.group_token() if token is None else token
        self._joined = self._connected = False
        self._peers: PeerSockets | None = None
        self._place: Place | None = None
        self._places: dict[int, Place] = {}
        """What is known so far about where other ranks are."""
        self._hosts: list[Host] = []
        self._suspects: set[int] = set()
        self._next_look = 0.0
        self._callback_lock = threading.Lock()
        self._callbacks: list[Callable[[int], None]] = []
        self._announced: list[int] = []

    # -- what a back end gives

    @abstractmethod
    def _announce(self, deadline: Deadline) -> None:
        """Publishes `self._place`. Raises GroupError, through `_refuse`, when this rank is taken or the group's setup
        is done."""

    @abstractmethod
    def _find_place(self, rank: int, deadline: Deadline) -> Place | None:
        """What another rank has announced so far. Before the connections are made only."""

    def _own_address(self) -> str | None:
        """The address on which ranks of other hosts reach this one, None where there is none."""
        return "127.0.0.1" if self._host_given else None

    @abstractmethod
    def _refuse_late_joiners(self, deadline: Deadline) -> None: ...

    @abstractmethod
    def dense_group(self) -> Group:
        """A new group of the same ranks, for a standalone dense manager; a rank without one never makes it."""

    @abstractmethod
    def exchange_store(self) -> tuple[Any, Any]:
        """Collective: (a torch store that every rank reaches, what keeps it alive here). See tensors.py."""

    @abstractmethod
    def _release(self) -> None:
        """The end of `close`. Must not raise."""

    # -- who is there

    @property
    def dead(self) -> set[int]:
        """The ranks that are known to have died."""
        return set() if self._peers is None else set(self._peers.dead)

    @property
    def _gone(self) -> set[int]:
        return set() if self._peers is None else self._peers.dead | self._peers.left

    @property
    def several_hosts(self) -> str:
        """Names of the hosts that the joined ranks span, for a message; empty when they are on one."""
        return name_hosts(self._hosts) if spans_hosts(self._hosts) else ""

    # -- joining

    def announce(self) -> None:
        """Opens this rank's sockets and publishes where they are; the first act of `join`, idempotent.

        Whoever builds something before it joins calls this first: from here on the other ranks name this one
        within a second or two when its process dies before the group is complete. Raises as `join` does.
        """
        if self._place is not None:
            return
        self._check_usable("announce")
        peers = PeerSockets(self.rank, self.size, self.name, self.host, self._socket_dir, self._notify_death)
        try:
            self._place = peers.listener.open(self._own_address() if self.size > 1 else None)
            self._peers = peers
            self._announce(Deadline(self.timeout_seconds, "announce"))
        except BaseException as error:
            if self._peers is None:
                peers.close()
            self.abort(error)
            raise

    def _refuse(self, text: str) -> None:
        """This process is no rank of the group, and does not disturb it."""
        self._aborted = Abort("mismatch", self.rank, text)
        raise GroupError(text)

    def join(self, info: dict[str, Any]) -> list[dict[str, Any]]:
        """The first collective: compares what the ranks report and connects their sockets. -> every rank's
        report.

        info: protocol-level facts such as digests of the configs. Keys other than rank, host, pid, device,
        device_uuid and has_token must have the same value everywhere; each report comes back with rank, size,
        host, pid, has_token and protocol added. `memory`: "host" refuses ranks that span hosts. Two ranks with one
        `device_uuid` (not None) are refused unless info says allow_shared_device. Raises GroupError naming the
        ranks, keys and values that differ, those with another group token, or the hosts; ConfigError for a socket
        folder that cannot be used.
        """
        if self._joined:
            raise GroupError(f"rank {self.rank} has joined the group {self.name!r} before")
        self.announce()
        self._check_usable("join")
        self._joined = True
        report = join_report(info, self._place, self.size, has_token=bool(self._token))
        reports = self.allgather_object("join", report)
        problems, places = judge(reports)
        if problems:
            text = f"the ranks of group {self.name!r} do not fit together: {join_problems(problems)}"
            self._fail(Abort("mismatch", self.rank, text))
        self._places = dict(enumerate(places))
        self._hosts = [place.on for place in places]
        self._connect_peers(places)
        for report in reports:
            del report["place"]
        return reports

    def _connect_peers(self, places: list[Place]) -> None:
        what, refused = "connecting to peers", []
        # less than the vote's: whoever is through must not name those that still wait for the rank that is missing
        seconds = min(CONNECT_SECONDS, 0.8 * self.timeout_seconds)
        try:
            refused = sorted(
                self._peers.connect(
                    places, self._token, seconds, what, lambda: self._raise_if_aborted(Deadline(1.0, what))
                )
            )
        except BaseException as failure:
            # Without connections there is no group to go on with: the others need not wait for a vote.
            error = self._cause_of(failure)
            if isinstance(error, RankDiedError):
                self._note_death(error.rank)
            if error is not failure:
                raise error from failure
            if isinstance(error, GroupTimeoutError):
                self._set_aborted(Abort("timeout", self.rank, str(error)))
            self.abort(error)
            raise
        text = other_tokens(self.vote_with(what, None, refused))
        if text is not None:
            self._fail(Abort("mismatch", self.rank, f"the group {self.name!r} cannot be made: {text}"))
        self._connected = True
        self._peers.stop_listening()

    def _note_death(self, rank: int) -> None:
        """Of a rank whose death something else than its sockets has told, such as the end of its store."""
        place = self._places.get(rank)
        if place is None or rank in self.dead or self._connected:
            return
        end = time.monotonic() + LAST_SOCKET_SECONDS
        while (gone := look_at(place, self.host, self._socket_dir) == GONE) is False and time.monotonic() < end:
            time.sleep(0.02)
        if gone:
            self._peers.lose(place)

    def _look_for_dead(self, missing: Sequence[int], post: Post, deadline: Deadline) -> None:
        """Raises RankDiedError for one of `missing` that announced itself and is gone, before there are connections
        that tell. Whoever calls this often is slowed down here.

        A rank must be gone and its post missing twice: see [Note: a dead rank's last message].
        """
        if self._connected or self._place is None or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_SECONDS
        gone = set()
        for rank in missing:
            place = self._find_place(rank, deadline)
            if place is not None and look_at(place, self.host, self._socket_dir) == GONE:
                gone.add(rank)
                if rank in self._suspects:
                    # one that failed said so before it closed its sockets
                    self._raise_if_aborted(deadline)
                    self._peers.lose(place)
                    text = (
                        f"rank {rank} (pid {place.pid} on {place.host}) died before the group {self.name!r} was "
                        f"complete; rank {self.rank} needed it in {post.tag!r}"
                    )
                    self._fail(Abort("died", rank, text))
        self._suspects = gone

    def _cause_of(self, failure: BaseException) -> BaseException:
        """The abort behind a failure of sockets, where there is one: who aborted leaves, and takes the folder along.

        Without it the others would name a rank that left, or a path that is gone, and not who failed.
        """
        if isinstance(failure, (GroupError, OSError)):
            try:
                self._raise_if_aborted(Deadline(1.0, "abort"))
            except GroupError as abort:
                return abort
        return failure

    def on_peer_death(self, callback: Callable[[int], None]) -> None:
        """Calls `callback(rank)` once for every rank that dies, from the watching thread; at once for those
        that have died already."""
        with self._callback_lock:
            self._callbacks.append(callback)
            announced = list(self._announced)
        for rank in announced:
            callback(rank)

    def _notify_death(self, rank: int) -> None:
        with self._callback_lock:
            self._announced.append(rank)
            callbacks = list(self._callbacks)
        for callback in callbacks:
            try:
                callback(rank)
            except Exception:
                logger.exception("a callback for the death of rank %d failed", rank)

    # -- descriptors

    def refuse_without(self, what: str) -> None:
        """RankDiedError when a rank is known to be dead: `what` needs all of them."""
        if self.dead:
            text = f"{name_ranks(self.dead)} died: no {what} can follow; start the group anew"
            raise RankDiedError(min(self.dead), text)

    def check_alive(self) -> None:
        """Raises what keeps the group from going on: an abort that a rank published, or the death of one."""
        self._raise_if_aborted(Deadline(1.0, "check"))
        for rank in sorted(self.dead):
            raise RankDiedError(rank, f"rank {rank} of the group {self.name!r} died")

    def exchange_fds(self, tag: str, fds: Sequence[int], payload: bytes) -> list[tuple[bytes, list[int]]]:
        """Every rank gives all its descriptors and a payload to every other: (payload, descriptors) per rank.

        The own entry has the own payload and no descriptors. Received descriptors are duplicates that the
        caller owns. The given ones must stay open until this returns. Any rank's failure raises on all, as a
        vote does, and leaves nothing open.
        """
        if self.size > 1 and not self._connected:
            raise GroupError(f"{tag!r}: rank {self.rank} has not joined the group {self.name!r}")
        if self.several_hosts:
            raise GroupError(
                f"{tag!r}: the ranks of group {self.name!r} span {self.several_hosts}, and descriptors cannot "
                f"cross hosts: {ONE_HOST}"
            )
        heads = self.allgather_object(tag, {"count": len(fds), "payload": bytes(payload)})
        if self.size == 1:
            return [(heads[0]["payload"], [])]
        received: list[list[int]] = []
        error = None
        deadline = Deadline(self.timeout_seconds, tag)
        try:
            received = self._peers.exchange(
                fds,
                [head["count"] for head in heads],
                repr(tag),
                deadline=deadline.at,
                check=lambda: self._raise_if_aborted(Deadline(1.0, tag)),
            )
        except GroupTimeoutError as late:
            # as of every collective: no second deadline for the vote
            self._fail(Abort("timeout", self.rank, str(late)))
        except BaseException as failure:
            error = self._cause_of(failure)
        try:
            self.vote(f"{tag}: descriptors", error)
        except BaseException:
            for taken in received:
                close_fds(taken)
            raise
        return [(head["payload"], taken) for head, taken in zip(heads, received)]

    # -- leaving

    def mark_setup_done(self) -> None:
        """The last collective of setup: from here on late joiners are refused, and teardown has a fresh key
        space. Again, after another setup of the same group, it is a barrier.

        A rank that dies later disturbs the others only in a collective that needs it.
        """
        self.barrier("setup done")
        if self._phase == "serving":
            return  # numbers start once in a key space
        self._phase, self._number, self._completed = "serving", 0, -1
        self._refuse_late_joiners(Deadline(self.timeout_seconds, "setup done"))

    def close(self) -> None:
        """Leaves the group: the peers see a clean end, not a death. Idempotent; errors are logged."""
        if self._closed:
            return
        if self._place is not None and not self._connected and self._aborted is None:
            self.abort("it closed the group before all ranks were connected")
        self._closed = True
        try:
            if self._peers is not None:
                self._peers.goodbye()
        except Exception:
            logger.exception("rank %d could not say goodbye to its peers", self.rank)
        try:
            self._release()
        finally:
            if self._peers is not None:
                self._peers.close()

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort(error)
        self.close()
