"""Who takes part: a rank's identity, how ranks are named in messages, and how their reports are compared."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

MAX_PROBLEMS = 8
MAX_VALUE_CHARS = 120


BOOT_ID_FILE = "/proc/sys/kernel/random/boot_id"


@dataclass(frozen=True)
class Host:
    """A machine. id: its kernel's boot id, which all of its containers see alike; name: for messages only, since
    every container has its own."""

    id: str
    name: str

    @classmethod
    def here(cls) -> Host:
        name = socket.gethostname()
        try:
            with open(BOOT_ID_FILE, encoding="ascii") as file:
                return cls(file.read().strip() or name, name)
        except OSError:
            return cls(name, name)


@dataclass(frozen=True)
class RankInfo:
    """One rank of a group: its number, the group's size, and the process that holds it."""

    rank: int
    size: int
    host: str
    pid: int

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is not in a group of {self.size} ranks")

    @classmethod
    def here(cls, rank: int, size: int) -> RankInfo:
        """This process as `rank` of `size`. Raises ValueError when rank is outside 0..size-1."""
        return cls(rank, size, Host.here().name, os.getpid())

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


def name_ranks(ranks: Iterable[int]) -> str:
    """'rank 2', or 'ranks 1, 3'."""
    ordered = sorted(ranks)
    return f"rank{'' if len(ordered) == 1 else 's'} {', '.join(map(str, ordered))}"


def name_hosts(hosts: Sequence[Host]) -> str:
    """'host a (ranks 0, 1), host b (rank 2)' for the host of every rank; a host has the name its lowest rank gives."""
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host.id, []).append(rank)
    return ", ".join(f"host {hosts[on[0]].name} ({name_ranks(on)})" for on in ranks.values())


def compare_reports(reports: Sequence[Mapping[str, object] | None], *, ignore: Collection[str] = ()) -> list[str]:
    """The ways in which the ranks' reports differ; empty when they agree.

    Each rank is held against the most common report; without a strict majority every rank is listed with its
    own values. A rank whose report is None sent none, which is a problem of its own. Keys in `ignore` are
    left out. Values are JSON-like.
    """
    problems = [f"rank {rank} sent no report" for rank, report in enumerate(reports) if report is None]
    given = {
        rank: {key: value for key, value in report.items() if key not in ignore}
        for rank, report in enumerate(reports)
        if report is not None
    }
    texts = {rank: msgspec.json.encode(report, order="sorted") for rank, report in given.items()}
    counts = Counter(texts.values())
    if len(counts) < 2:
        return problems
    text, count = counts.most_common(1)[0]
    if 2 * count > len(reports):
        common = next(given[rank] for rank in given if texts[rank] == text)
        for rank, report in given.items():
            for key in _differing([common, report]):
                problems.append(f"rank {rank} has {key} {_shown(report, key)}, most ranks have {_shown(common, key)}")
        return problems
    keys = _differing(list(given.values()))
    for rank, report in given.items():
        problems.append(f"rank {rank} has " + ", ".join(f"{key} {_shown(report, key)}" for key in keys))
    return problems


def join_problems(problems: Sequence[str]) -> str:
    """At most 8 problems in one line, then a count of the others."""
    shown = "; ".join(problems[:MAX_PROBLEMS])
    more = len(problems) - MAX_PROBLEMS
    return f"{shown}; and {more} more" if more > 0 else shown


_ABSENT = object()


def _differing(reports: Sequence[Mapping[str, object]]) -> list[str]:
    keys = sorted({key for report in reports for key in report})
    # compared as encoded, as the reports were: 1 and 1.0 are equal in Python but not in a digest
    return [key for key in keys if len({_text(report.get(key, _ABSENT)) for report in reports}) > 1]


def _text(value: object) -> bytes:
    return b"" if value is _ABSENT else msgspec.json.encode(value, order="sorted")


def _shown(report: Mapping[str, object], key: str) -> str:
    if key not in report:
        return "(missing)"
    text = repr(report[key])
    return text if len(text) <= MAX_VALUE_CHARS else text[:MAX_VALUE_CHARS] + "..."
