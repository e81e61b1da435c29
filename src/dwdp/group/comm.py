"""Collectives of a group of ranks: gathering, votes, deadlines, aborts. Used in setup and teardown only.

A back end (see backends.py) moves one message of every rank to every rank; everything else is here.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import msgspec

from dwdp import env
from dwdp.errors import GroupError, GroupTimeoutError, RankDiedError
from dwdp.group.fds import close_fds
from dwdp.group.parent import check_socket_folder, make_private_folder, remove_private_folder
from dwdp.group.ranks import RankInfo, compare_reports, join_problems, name_ranks
from dwdp.group.sockets import PeerSockets

logger = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
MAX_ERROR_CHARS = 4000
PROGRESS_SECONDS = 30.0
"""How often a rank that waits says for whom."""

PER_RANK_KEYS = frozenset({"rank", "host", "pid", "device", "device_uuid"})
"""Keys of a join's report in which ranks may differ."""


class Deadline:
    """`seconds` from now; also the text of how long that was."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.start = time.monotonic()
        self.at = self.start + seconds

    @property
    def passed(self) -> bool:
        return time.monotonic() > self.at

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.start

    @property
    def remaining(self) -> float:
        return max(0.0, self.at - time.monotonic())


class Post(msgspec.Struct, array_like=True, frozen=True):
    """What one rank hands in to one collective. number and tag must be the same on every rank."""

    number: int
    tag: str
    payload: bytes


class Abort(msgspec.Struct, frozen=True):
    """Why a group is unusable. rank: who failed or died, None when a process outside says so.

    kind: `failed`, `mismatch`, `timeout` or `died`; it decides the exception that the others raise.
    """

    kind: str
    rank: int | None
    text: str

    def error(self, group: str) -> GroupError:
        if self.kind == "died":
            return RankDiedError(self.rank, self.text)
        if self.kind == "timeout":
            return GroupTimeoutError(self.text)
        if self.kind == "mismatch":
            return GroupError(self.text)
        who = "a process outside" if self.rank is None else f"rank {self.rank}"
        return GroupError(f"{who} aborted the group {group!r}: {self.text}")


class Group(ABC):
    """An ordered set of ranks. Context manager: an exception inside aborts the group; `close()` is
    idempotent.

    timeout_seconds: the deadline of each collective (None: DWDP_RENDEZVOUS_TIMEOUT_S). socket_dir: an
    existing or new folder of mode 0700 for the peers' sockets (None: DWDP_SOCKET_DIR, else a private
    temporary one).

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
    ) -> None:
        self.info = RankInfo.here(rank, size)
        self.rank, self.size, self.name = rank, size, name
        self.timeout_seconds = env.rendezvous_timeout_seconds() if timeout_seconds is None else timeout_seconds
        self._socket_dir = env.socket_dir() if socket_dir is None else socket_dir
        self._busy = threading.Lock()
        self._phase = "setup"
        self._number = 0
        self._aborted: Abort | None = None
        self._folder: str | None = None
        self._joined = self._closed = False
        self._peers: PeerSockets | None = None
        self._callback_lock = threading.Lock()
        self._callbacks: list[Callable[[int], None]] = []
        self._announced: list[int] = []

    # -- what a back end gives

    @abstractmethod
    def _collect(self, post: Post, deadline: Deadline, skip_gone: bool) -> list[Post | None]:
        """Hands in `post` and waits for everybody's; None for a rank that is skipped because it is gone."""

    @abstractmethod
    def _publish(self, abort: Abort) -> None:
        """Tells every rank; an abort that came earlier stays. Errors are logged, not raised; bounded by 1
        s."""

    @abstractmethod
    def _find_abort(self, deadline: Deadline) -> Abort | None:
        """The abort that some rank published, if any."""

    @abstractmethod
    def _claim_rank(self, deadline: Deadline) -> None:
        """Raises GroupError when this rank is taken or the group's setup is done."""

    def _make_folder(self) -> str:
        """A private folder for the peers' sockets, removed by `_remove_folder`. Called on rank 0 only."""
        self._folder = make_private_folder()
        return self._folder

    def _remove_folder(self) -> None:
        if self._folder is not None:
            remove_private_folder(self._folder)
            self._folder = None

    @abstractmethod
    def _refuse_late_joiners(self, deadline: Deadline) -> None: ...

    @abstractmethod
    def dense_group(self) -> Group:
        """A new group of the same ranks, for a standalone dense manager; a rank without one never makes it."""

    @abstractmethod
    def exchange_store(self) -> tuple[Any, Any]:
        """Collective: (a torch store that every rank reaches, what keeps it alive here). See exchange.py."""

    @abstractmethod
    def _release(self) -> None:
        """The end of `close`. Must not raise."""

    # -- collectives

    @property
    def dead(self) -> set[int]:
        """The ranks that are known to have died."""
        return set() if self._peers is None else set(self._peers.dead)

    @property
    def _gone(self) -> set[int]:
        return set() if self._peers is None else self._peers.dead | self._peers.left

    def allgather(self, tag: str, payload: bytes) -> list[bytes]:
        """Every rank's payload, in rank order. A few MB each are fine."""
        return [post.payload for post in self._run(tag, payload)]

    def allgather_object(self, tag: str, obj: Any) -> list[Any]:
        """`allgather` of anything that msgpack holds (tuples come back as lists)."""
        try:
            payload = msgspec.msgpack.encode(obj)
        except Exception as error:
            self.abort(f"{_describe(error)} in {tag!r}")
            raise
        return [msgspec.msgpack.decode(payload) for payload in self.allgather(tag, payload)]

    def barrier(self, tag: str, *, timeout_seconds: float | None = None, skip_dead: bool = False) -> None:
        """Waits until every rank is here. skip_dead: not for those that died or closed the group."""
        self._run(tag, b"", timeout_seconds=timeout_seconds, skip_gone=skip_dead)

    def vote(self, phase: str, error: BaseException | None) -> None:
        """Every rank hands in its own error or None; if any failed, all raise. See `vote_with`."""
        self.vote_with(phase, error)

    def vote_with(self, phase: str, error: BaseException | None, payload: Any = None) -> list[Any]:
        """A vote that carries data: every rank's payload when no rank failed; ignored from one that did.

        A rank that failed raises its own error, the others a GroupError (a RuntimeError) naming every rank
        that failed, the phase and the text. If the vote itself fails, a rank that had failed raises its own
        error with the vote's as context.
        """
        packed = b"\xc0"  # msgpack's nil
        if error is None:
            try:
                packed = msgspec.msgpack.encode(payload)
            except Exception as unencodable:
                error = unencodable
        ballot = {"error": error and _describe(error), "payload": msgspec.Raw(packed)}
        try:
            ballots = self.allgather_object(f"vote: {phase}", ballot)
        except BaseException:
            if error is not None:
                raise error  # noqa: B904 - the vote's own failure becomes its context
            raise
        if error is not None:
            raise error
        failures = [
            f"rank {rank} failed in phase {phase!r}: {ballot['error']}"
            for rank, ballot in enumerate(ballots)
            if ballot["error"] is not None
        ]
        if failures:
            raise GroupError(join_problems(failures))
        return [ballot["payload"] for ballot in ballots]

    def _run(
        self, tag: str, payload: bytes, *, timeout_seconds: float | None = None, skip_gone: bool = False
    ) -> list[Post]:
        if not self._busy.acquire(blocking=False):
            raise GroupError(f"{tag!r} of group {self.name!r} was called while another collective runs")
        try:
            self._check_usable(tag)
            deadline = Deadline(self.timeout_seconds if timeout_seconds is None else timeout_seconds)
            post = Post(self._number, tag, payload)
            self._number += 1
            posts = self._collect(post, deadline, skip_gone)
            self._check_tags(post, posts)
            return posts
        except GroupError:
            raise
        except BaseException as error:
            # KeyboardInterrupt too: the peers would wait for this rank until their deadline.
            self.abort(f"{_describe(error)} in {tag!r}")
            raise
        finally:
            self._busy.release()

    def _check_usable(self, tag: str) -> None:
        if self._closed:
            raise GroupError(f"{tag!r}: rank {self.rank} has closed the group {self.name!r}")
        if self._aborted is not None:
            raise self._aborted.error(self.name)

    def _check_tags(self, own: Post, posts: Sequence[Post | None]) -> None:
        found = {(post.number, post.tag) for post in posts if post is not None}
        if len(found) < 2:
            return
        by_rank = ", ".join(f"rank {rank} in {post.tag!r}" for rank, post in enumerate(posts) if post is not None)
        text = f"the ranks of group {self.name!r} are in different collectives (number {own.number}): {by_rank}"
        self._fail(Abort("mismatch", self.rank, text))

    def _raise_timeout(self, missing: Sequence[int], post: Post, deadline: Deadline) -> None:
        text = (
            f"{name_ranks(missing)} of {self.size} did not come to {post.tag!r} of group {self.name!r} "
            f"within {deadline.seconds:g} s (collective {post.number} of {self._phase}; the deadline is "
            "DWDP_RENDEZVOUS_TIMEOUT_S)"
        )
        self._fail(Abort("timeout", self.rank, text))

    def _log_waiting(self, missing: Sequence[int], post: Post, deadline: Deadline) -> None:
        logger.info(
            "group %s: rank %d has waited %.0f of %.0f s in %r for %s",
            self.name,
            self.rank,
            deadline.elapsed,
            deadline.seconds,
            post.tag,
            name_ranks(missing),
        )

    def _fail(self, abort: Abort) -> None:
        self._set_aborted(abort)
        raise abort.error(self.name)

    def _set_aborted(self, abort: Abort) -> None:
        if self._aborted is None:
            self._aborted = abort
            self._publish(abort)

    def check_alive(self) -> None:
        """Raises what keeps the group from going on: an abort that a rank published, or the death of one."""
        self._raise_if_aborted(Deadline(1.0))
        for rank in sorted(self.dead):
            raise RankDiedError(rank, f"rank {rank} of the group {self.name!r} died")

    def abort(self, reason: str) -> None:
        """Makes the group unusable: peers that wait in a collective, now or later, raise naming this rank.

        Idempotent; never raises. The group still has to be closed.
        """
        if not self._closed:
            self._set_aborted(Abort("failed", self.rank, reason))

    # -- joining

    def join(self, info: dict[str, Any]) -> list[dict[str, Any]]:
        """The first collective: compares what the ranks report and connects their sockets. -> every rank's
        report.

        info: protocol-level facts such as digests of the configs. Keys other than rank, host, pid, device and
        device_uuid must have the same value everywhere; each report comes back with rank, size, host, pid and
        protocol added. Two ranks with one `device_uuid` (not None) are refused unless info says
        allow_shared_device. Raises GroupError naming the ranks, keys and values that differ; ConfigError for
        a socket folder that cannot be used.
        """
        if self._joined:
            raise GroupError(f"rank {self.rank} has joined the group {self.name!r} before")
        self._check_usable("join")
        deadline = Deadline(self.timeout_seconds)
        self._claim_rank(deadline)
        self._joined = True
        report = info | {
            "protocol": PROTOCOL_VERSION,
            "rank": self.rank,
            "size": self.size,
            "host": self.info.host,
            "pid": self.info.pid,
        }
        reports = self.allgather_object("join", report)
        problems = compare_reports(reports, ignore=PER_RANK_KEYS) or _shared_devices(reports)
        if problems:
            text = f"the ranks of group {self.name!r} do not fit together: {join_problems(problems)}"
            self._fail(Abort("mismatch", self.rank, text))
        if self.size > 1:
            self._connect_peers()
        return reports

    def _connect_peers(self) -> None:
        folder, error = self._socket_dir, None
        if self.rank == 0 and folder is None:
            try:
                folder = self._make_folder()
            except OSError as failure:
                error = failure
        try:
            folders = self.vote_with("socket folder", error, folder)
            # A rank's own setting comes first: containers may mount one folder at different places.
            folder = self._socket_dir or folders[0]
            self._peers = PeerSockets(self.rank, self.size, self.name, self._notify_death)
            name, error = None, None
            try:
                check_socket_folder(folder, create=self._socket_dir is not None)
                name = self._peers.listen(folder)
            except (OSError, ValueError) as failure:
                error = self._cause_of(failure)
            names = self.vote_with("listening for peers", error, name)
            error = None
            try:
                self._peers.connect(folder, names, lambda: self._raise_if_aborted(Deadline(1.0)))
            except BaseException as failure:
                error = self._cause_of(failure)
            self.vote("connecting to peers", error)
            self._peers.stop_listening()
        finally:
            self._remove_folder()

    def _raise_if_aborted(self, deadline: Deadline) -> None:
        abort = self._find_abort(deadline)
        if abort is not None:
            # Not published again: it is there already.
            self._aborted = self._aborted or abort
            raise abort.error(self.name)

    def _cause_of(self, failure: BaseException) -> BaseException:
        """The abort behind a failure of sockets, where there is one: who aborted leaves, and takes the folder along.

        Without it the others would name a rank that left, or a path that is gone, and not who failed.
        """
        if isinstance(failure, (GroupError, OSError)):
            try:
                self._raise_if_aborted(Deadline(1.0))
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

    def exchange_fds(self, tag: str, fds: Sequence[int], payload: bytes) -> list[tuple[bytes, list[int]]]:
        """Every rank gives all its descriptors and a payload to every other: (payload, descriptors) per rank.

        The own entry has the own payload and no descriptors. Received descriptors are duplicates that the
        caller owns. The given ones must stay open until this returns. Any rank's failure raises on all, as a
        vote does, and leaves nothing open.
        """
        if self.size > 1 and self._peers is None:
            raise GroupError(f"{tag!r}: rank {self.rank} has not joined the group {self.name!r}")
        heads = self.allgather_object(tag, {"count": len(fds), "payload": bytes(payload)})
        if self.size == 1:
            return [(heads[0]["payload"], [])]
        received: list[list[int]] = []
        error = None
        deadline = Deadline(self.timeout_seconds)
        try:
            received = self._peers.exchange(
                fds,
                [head["count"] for head in heads],
                repr(tag),
                deadline=deadline.at,
                check=lambda: self._raise_if_aborted(Deadline(1.0)),
            )
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
        space.

        A rank that dies later disturbs the others only in a collective that needs it.
        """
        self.barrier("setup done")
        self._phase = "serving"
        self._number = 0
        self._refuse_late_joiners(Deadline(self.timeout_seconds))

    def close(self) -> None:
        """Leaves the group: the peers see a clean end, not a death. Idempotent; errors are logged."""
        if self._closed:
            return
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
            self.abort(_describe(error))
        self.close()


def _describe(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS] + "..."


def _shared_devices(reports: Sequence[dict[str, Any]]) -> list[str]:
    if all(report.get("allow_shared_device") for report in reports):
        return []
    ranks: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        if report.get("device_uuid") is not None:
            ranks.setdefault(report["device_uuid"], []).append(rank)
    return [
        f"ranks {', '.join(map(str, sharing))} are on one device, {uuid}; give each its own or set allow_shared_device"
        for uuid, sharing in ranks.items()
        if len(sharing) > 1
    ]
