"""The calls of a set-up over CUDA, counted; one may fail, and what the driver has given out is known at every time.

Of the process that it is used in, which is one rank. What is called is a step of set-up, as in
tests/support/faults.py, or a function of the driver.
"""

from __future__ import annotations

import threading
from collections import Counter

from dwdp.memory.driver import Driver
from dwdp.runtime.setup_dense import DenseSetup
from dwdp.weights.cuda_mover import CudaMover
from tests.support.faults import POINTS, Injected

SHARED = ("exchange_fds", "allgather", "vote", "barrier", "check of rows", "first_difference", "value_bytes")
STEPS = {name: POINTS[name] for name in SHARED} | {
    "copy_slices": [(CudaMover, "copy"), (CudaMover, "run")],
    "row_checksums": [(CudaMover, "row_sums")],
    "checksum": [(CudaMover, "sums")],
    "first_difference": [(CudaMover, "first_differences")],
}
"""In place of the host's memfd, mmap and seal there are the driver's calls."""

# What a call gives out (+1) or takes back (-1).
GIVEN = {
    "cuMemCreate": ("handles", 1), "cuMemImportFromShareableHandle": ("handles", 1), "cuMemRelease": ("handles", -1),
    "cuMemAddressReserve": ("ranges", 1), "cuMemAddressFree": ("ranges", -1),
    "cuMemMap": ("mappings", 1), "cuMemUnmap": ("mappings", -1),
    "cuMemAlloc": ("tables", 1), "cuMemFree": ("tables", -1),
    "cuMemHostAlloc": ("pinned", 1), "cuMemFreeHost": ("pinned", -1),
    "cuModuleLoadData": ("modules", 1), "cuModuleUnload": ("modules", -1),
    "cuStreamEndCapture": ("graphs", 1), "cuGraphDestroy": ("graphs", -1),
    "cuGraphInstantiate": ("prepared graphs", 1), "cuGraphExecDestroy": ("prepared graphs", -1),
    "cuEventCreate": ("events", 1), "cuEventDestroy": ("events", -1),
    "cuStreamCreateWithPriority": ("streams", 1), "cuStreamDestroy": ("streams", -1),
}  # fmt: skip


class Calls:
    """A context manager: counts the calls made in it. fault: the `number`-th call of that name fails."""

    def __init__(self, fault: str | None = None, number: int = 0) -> None:
        self.fault, self.number, self.fired = fault, number, 0
        self.counts: Counter[str] = Counter()
        self.given: Counter[str] = Counter()
        self.until_set_up: Counter[str] = Counter()  # the counts when set-up had ended
        self.dense: tuple[Counter[str], Counter[str]] | None = None  # before and behind the dense part of set-up
        self._lock = threading.Lock()
        self._undo: list[tuple] = []

    def __enter__(self) -> Calls:
        for name, places in STEPS.items():
            for owner, attribute in places:
                self._replace(owner, attribute, self._step(name, getattr(owner, attribute)))
        make, run = Driver.__init__, DenseSetup.run

        def made(driver, *args):
            make(driver, *args)
            driver.api = _CountedApi(driver.api, self)

        def counted(setup):
            before = self.counts.copy()
            found = run(setup)
            self.dense = before, self.counts.copy()
            return found

        self._replace(Driver, "__init__", made)
        self._replace(DenseSetup, "run", counted)
        return self

    def __exit__(self, *exc) -> None:
        while self._undo:
            setattr(*self._undo.pop())

    @property
    def left(self) -> dict[str, int]:
        """What the driver gave out and has not got back."""
        return {what: count for what, count in self.given.items() if count}

    def fails(self, name: str) -> bool:
        """Counts a call; whether it is the one that fails."""
        with self._lock:
            self.counts[name] += 1
            fails = name == self.fault and self.counts[name] == self.number
            self.fired += fails
        return fails

    def count_given(self, name: str) -> None:
        if name in GIVEN:
            what, change = GIVEN[name]
            with self._lock:
                self.given[what] += change

    def _replace(self, owner, attribute, replacement) -> None:
        self._undo.append((owner, attribute, getattr(owner, attribute)))
        setattr(owner, attribute, replacement)

    def _step(self, name, original):
        def step(*args, **kwargs):
            if self.fails(name):
                raise Injected(f"{name} call {self.number}")
            return original(*args, **kwargs)

        return step


class _CountedApi:
    """The names of cuda.bindings.driver; a call that is to fail returns an error and does nothing."""

    def __init__(self, api, calls: Calls) -> None:
        self._api, self._calls = api, calls

    def __getattr__(self, name):
        found = getattr(self._api, name)
        if not name.startswith("cu"):
            return found
        calls, failure = self._calls, (self._api.CUresult.CUDA_ERROR_INVALID_VALUE,)

        def call(*args):
            if calls.fails(name):
                return failure
            result = found(*args)
            if int(result[0]) == 0:
                calls.count_given(name)
            return result

        return call
