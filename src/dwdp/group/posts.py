"""What ranks hand in to collectives, why a group ends, and how long a wait may take."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from dwdp.errors import GroupError, GroupTimeoutError, RankDiedError
from dwdp.group.ranks import join_problems

MAX_ERROR_CHARS = 4000


class Deadline:
    """`seconds` from now; also the text of how long that was. what: for which collective."""

    def __init__(self, seconds: float, what: str = "") -> None:
        self.seconds, self.what = seconds, what
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
    completed: number of the last collective that the rank which says so had come through. Everybody had handed in that
        one, so a slower rank comes through it too, with the same outcome, and raises in the next.
    """

    kind: str
    rank: int | None
    text: str
    completed: int = -1

    def error(self, group: str) -> GroupError:
        if self.kind == "died":
            return RankDiedError(self.rank, self.text)
        if self.kind == "timeout":
            return GroupTimeoutError(self.text)
        if self.kind == "mismatch":
            return GroupError(self.text)
        who = "a process outside" if self.rank is None else f"rank {self.rank}"
        return GroupError(f"{who} aborted the group {group!r}: {self.text}")


def raise_failures(phase: str, texts: Sequence[str | None]) -> None:
    """GroupError naming every rank that handed in an error's text to a phase's collective; nothing when none did."""
    failed = [f"rank {rank} failed in phase {phase!r}: {text}" for rank, text in enumerate(texts) if text is not None]
    if failed:
        raise GroupError(join_problems(failed))


def describe(error: BaseException) -> str:
    """An error as a rank hands it in, in bounded length."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS] + "..."
