"""One failure in the set-up of whole rank threads: the k-th call of a function on one rank raises."""

from __future__ import annotations

import gc
import os
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from dwdp.device.host import WorkerStream
from dwdp.errors import MemoryDomainError
from dwdp.executor.create import build_rank
from dwdp.executor.settings import resolve
from dwdp.group.comm import Group
from dwdp.group.threads import run_rank_threads
from dwdp.memory.host import HostDomain
from dwdp.memory.libc import HostCalls
from dwdp.runtime import setup_dense
from dwdp.weights import copy, mover
from dwdp.weights.mover import HostMover
from dwdp.weights.verify import RowChecker
from tests.support.system import DENSE, SMALL_PAGES
from tests.weights.fake_experts import dwdp_memfds

# What is called -> where set-up finds it. The two names of copy_slices are one series of calls.
POINTS = {
    "memfd": [(HostCalls, "memfd")],
    "mmap": [(HostCalls, "mmap")],
    "seal": [(HostCalls, "seal_future_writes")],
    "exchange_fds": [(Group, "exchange_fds")],
    "allgather": [(Group, "allgather")],
    "vote": [(Group, "vote")],
    "barrier": [(Group, "barrier")],
    "copy_slices": [(copy, "copy_slices"), (mover, "copy_slices")],
    "row_checksums": [(mover, "row_checksums")],
    "check of rows": [(RowChecker, "check")],
    "checksum": [(HostMover, "sums")],
    "first_difference": [(HostMover, "first_differences")],
    "value_bytes": [(setup_dense, "_value_bytes")],
}


class Injected(MemoryDomainError):
    """What the failing call raises."""


class Calls:
    """Counts every call of POINTS by rank thread (a copy thread counts for its rank); may make one fail."""

    def __init__(self, monkeypatch, point: str | None = None, rank: int = 0, call: int = 0) -> None:
        self.fault, self.call, self.fired = (point, rank), call, 0
        self.counts: dict[tuple[str, int], int] = {}
        self._owners: dict[threading.Thread, threading.Thread] = {}
        self._lock = threading.Lock()
        start_stream = WorkerStream.__init__

        def started(stream, *args, **kwargs):
            start_stream(stream, *args, **kwargs)
            self._owners[stream._thread] = threading.current_thread()

        monkeypatch.setattr(WorkerStream, "__init__", started)
        for name, places in POINTS.items():
            for owner, attribute in places:
                monkeypatch.setattr(owner, attribute, self._wrap(name, getattr(owner, attribute)))

    def _wrap(self, point, original):
        def wrapper(*args, **kwargs):
            thread = threading.current_thread()
            name = self._owners.get(thread, thread).name
            if name.startswith("dwdp-rank-"):
                key = (point, int(name.rsplit("-", 1)[1]))
                with self._lock:
                    number = self.counts[key] = self.counts.get(key, 0) + 1
                if key == self.fault and number == self.call:
                    self.fired += 1
                    raise Injected(f"{point} call {number}")
            return original(*args, **kwargs)

        return wrapper


@dataclass
class Outcome:
    """What set-up did on one rank; found: what `body` returned where it succeeded."""

    error: type | None
    text: str
    live: dict[str, int] | None
    found: object = None


def set_up_ranks(model: Path, n: int, monkeypatch, body, *, dense: dict = DENSE, timeout: float = 20.0):
    """build_rank on n rank threads; -> every rank's Outcome, `live` as it was just before its domain was closed."""
    settings = resolve(model, ranks=n, dtype="float32", device="cpu", dwdp=SMALL_PAGES, dense_dwdp=dense).settings
    live: dict[int, dict[str, int]] = {}
    close = HostDomain.close

    def closing(domain):
        live.setdefault(domain.rank, domain.live())
        return close(domain)

    monkeypatch.setattr(HostDomain, "close", closing)

    def run(group):
        try:
            with build_rank(settings, group, rank=group.rank) as rank:
                return Outcome(None, "", None, body(rank))
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            return Outcome(type(error), str(error), live.get(group.rank))

    return run_rank_threads(n, run, timeout=timeout)


def held() -> tuple[int, list[str], int]:
    """Open descriptors, our memfds (descriptors and mappings), threads."""
    gc.collect()
    return _held()


def held_again(before, *, seconds: float = 3.0):
    """`held()`, once it is `before` or `seconds` have passed: watching threads end a moment after their group."""
    end = time.monotonic() + seconds
    now = held()
    while now != before and time.monotonic() < end:
        time.sleep(0.05)
        now = _held()
    return now


def _held():
    return len(os.listdir("/proc/self/fd")), dwdp_memfds(), threading.active_count()
