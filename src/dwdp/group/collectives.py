"""Collectives of some ranks: gathering, votes, deadlines, aborts.

A back end (see backends.py) moves one message of every rank to every rank; what the messages mean is here, who the
ranks are in comm.py.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from dwdp import env
from dwdp.errors import GroupError, RankDiedError
from dwdp.group.posts import Abort, Deadline, Post, describe, raise_failures
from dwdp.group.ranks import name_ranks

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 30.0
"""How often a rank that waits says for whom."""


class Collectives(ABC):
    """What every rank calls in the same order; see `Group`."""

    def __init__(self, rank: int, size: int, name: str, timeout_seconds: float | None) -> None:
        self.rank, self.size, self.name = rank, size, name
        self.timeout_seconds = env.rendezvous_timeout_seconds() if timeout_seconds is None else timeout_seconds
        self._busy = threading.Lock()
        self._phase = "setup"
        self._number = 0
        self._completed = -1  # the last collective that this rank came through
        self._aborted: Abort | None = None
        self._closed = False

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
    def _note_death(self, rank: int) -> None:
        """Called with a rank that a collective found dead."""

    def allgather(self, tag: str, payload: bytes) -> list[bytes]:
        """Every rank's payload, in rank order. A few MB each are fine."""
        return [post.payload for post in self._run(tag, payload)]

    def allgather_object(self, tag: str, obj: Any) -> list[Any]:
        """`allgather` of anything that msgpack holds (tuples come back as lists)."""
        try:
            payload = msgspec.msgpack.encode(obj)
        except Exception as error:
            self.abort(f"{describe(error)} in {tag!r}")
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
        ballot = {"error": error and describe(error), "payload": msgspec.Raw(packed)}
        try:
            ballots = self.allgather_object(f"vote: {phase}", ballot)
        except BaseException:
            if error is not None:
                raise error  # noqa: B904 - the vote's own failure becomes its context
            raise
        if error is not None:
            raise error
        raise_failures(phase, [ballot["error"] for ballot in ballots])
        return [ballot["payload"] for ballot in ballots]

    def _run(
        self, tag: str, payload: bytes, *, timeout_seconds: float | None = None, skip_gone: bool = False
    ) -> list[Post]:
        if not self._busy.acquire(blocking=False):
            raise GroupError(f"{tag!r} of group {self.name!r} was called while another collective runs")
        try:
            self._check_usable(tag)
            deadline = Deadline(self.timeout_seconds if timeout_seconds is None else timeout_seconds, tag)
            post = Post(self._number, tag, payload)
            self._number += 1
            posts = self._collect(post, deadline, skip_gone)
            self._check_tags(post, posts)
            self._completed = post.number
            return posts
        except RankDiedError as error:
            self._note_death(error.rank)
            raise
        except GroupError:
            raise
        except BaseException as error:
            # KeyboardInterrupt too: the peers would wait for this rank until their deadline.
            self.abort(f"{describe(error)} in {tag!r}")
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
        option = "; the deadline is DWDP_RENDEZVOUS_TIMEOUT_S" if deadline.seconds == self.timeout_seconds else ""
        text = (
            f"{name_ranks(missing)} of {self.size} did not come to {post.tag!r} of group {self.name!r} "
            f"within {deadline.seconds:g} s (collective {post.number} of {self._phase}{option})"
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
            self._aborted = msgspec.structs.replace(abort, completed=self._completed)
            self._publish(self._aborted)

    def abort(self, reason: str | BaseException) -> None:
        """Makes the group unusable: peers that wait in a collective, now or later, raise naming this rank.

        reason: also an exception; because of a RankDiedError the peers raise that, naming the dead rank. Idempotent;
        never raises. The group still has to be closed.
        """
        if self._closed:
            return
        if isinstance(reason, RankDiedError):
            self._set_aborted(Abort("died", reason.rank, str(reason)))
        else:
            text = reason if isinstance(reason, str) else describe(reason)
            self._set_aborted(Abort("failed", self.rank, text))

    def _raise_if_aborted(self, deadline: Deadline, post: Post | None = None) -> None:
        """post: of the collective that is under way; an abort behind it leaves it alone, see `Abort`."""
        abort = self._find_abort(deadline)
        if abort is not None and (post is None or abort.completed < post.number):
            # Not published again: it is there already.
            self._aborted = self._aborted or abort
            raise abort.error(self.name)
