"""Which handle type a group's ranks can share memory by, decided by trying it: make, export, import, map, read.

[Note: deciding by trying] A device may say that it supports a type whose handles cannot be made or imported: FABRIC
without an IMEX channel, say. So every rank makes a granule of each type, fills it with a pattern and exports it; its
neighbour, another process, imports and maps it and reads the pattern back. FABRIC is taken when every rank of the
group could, else POSIX_FD when all ranks share a host. Any failure but a shortage of memory moves on to the next
type; a shortage says nothing about types and ends the set-up.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import msgspec

from dwdp.errors import MemoryDomainError
from dwdp.group.ranks import join_problems
from dwdp.memory.driver import IMEX_CURE, DriverError
from dwdp.memory.exchange import Exported, close_exported
from dwdp.memory.vmm import FABRIC, POSIX_FD, CudaDomain

logger = logging.getLogger(__name__)

PATTERN_BYTES = 64


class Outcome(msgspec.Struct):
    """What one step of the trial of one type came to on one rank. error: None, or the failing call and its result."""

    error: str | None = None
    out_of_memory: bool = False


class Offer(msgspec.Struct):
    """A rank's part in the first collective. handle: its exported fabric handle; pattern: what its granules hold."""

    forced: str | None
    pattern: bytes
    outcomes: dict[str, Outcome]
    handle: bytes = b""


def choose_handle_type(domain: CudaDomain, group) -> str:
    """Sets `domain.handle_type` to the best type that works between all ranks of the group; returns it.

    Collective: two collectives where FABRIC works, up to three else, the same on every rank. With `handle_type`
    forced only that type is tried. Raises the same MemoryDomainError on every rank when none works: it names ranks,
    failing calls, their results and what to do.
    """
    return take_handle_type(domain, group, try_handle_types(domain, group))


def try_handle_types(domain: CudaDomain, group, *, every: bool = False) -> dict[str, list[str]]:
    """Type -> which ranks could not share memory by it and why, empty where all could; the best type first.

    Stops at the first that works unless `every`. Collective and the same on every rank, as is what it raises:
    MemoryDomainError for ranks that were asked for different types and for a shortage of memory.
    """
    names = (domain.forced_handle_type,) if domain.forced_handle_type else (FABRIC, POSIX_FD)
    trials = {name: _Trial(domain, name) for name in names}
    try:
        return _try(group, trials, domain.forced_handle_type, every)
    finally:
        for trial in trials.values():
            trial.close()


def take_handle_type(domain: CudaDomain, group, tried: dict[str, list[str]]) -> str:
    """What `choose_handle_type` does with the outcome of `try_handle_types`; no collective."""
    forced = domain.forced_handle_type
    name = next((name for name, failed in tried.items() if not failed), None)
    if name is None:
        raise MemoryDomainError(_no_type(tried, group.several_hosts, forced))
    domain.handle_type = name
    how = "asked for" if forced else "the first that works between all ranks"
    passed = "".join(f"; {other.upper()} does not: {why[0]}" for other, why in tried.items() if why)
    logger.info("rank %d shares GPU memory by %s handles (%s)%s", group.rank, name.upper(), how, passed)
    return name


def probe_handle_types(domain: CudaDomain) -> dict[str, str | None]:
    """Type -> None where this process alone can make, map and export a granule of it, else why not."""
    found = {}
    for name in (FABRIC, POSIX_FD):
        trial = _Trial(domain, name)
        try:
            trial.offer(os.urandom(PATTERN_BYTES))
        finally:
            trial.close()
        found[name] = trial.outcome.error
    return found


def _try(group, trials: dict[str, _Trial], forced: str | None, every: bool) -> dict[str, list[str]]:
    pattern = os.urandom(PATTERN_BYTES)
    for trial in trials.values():
        trial.offer(pattern)
    handle = trials[FABRIC].exported if FABRIC in trials else None
    outcomes = {name: trial.outcome for name, trial in trials.items()}
    offers = _gather(group, "handle types", Offer(forced, pattern, outcomes, handle or b""), Offer)
    asked = sorted({str(offer.forced or "auto") for offer in offers})
    if len(asked) > 1:
        raise MemoryDomainError(f"the ranks were asked for different handle types: {', '.join(asked)}")
    _refuse_shortage([offer.outcomes for offer in offers])
    neighbour = (group.rank - 1) % group.size
    found: dict[str, list[str]] = {}
    for name, trial in trials.items():
        failed = _failures(offer.outcomes[name] for offer in offers)
        if name == POSIX_FD and group.several_hosts:
            failed = [f"the ranks span {group.several_hosts}, descriptors stay on one host"]
        if not failed:
            if name == FABRIC:
                received = [offer.handle for offer in offers]
            else:
                received = _exchange_descriptors(group, trial)
            with _closing(received):
                outcome = trial.take(received, neighbour, offers[neighbour].pattern)
            results = _gather(group, f"handle type {name}", outcome, Outcome)
            _refuse_shortage([{name: result} for result in results])
            failed = _failures(results)
        found[name] = failed
        if not failed and not every:
            break
    return found


class _Trial:
    """One granule of one type on this rank, and what it imported; `close()` gives all of it back."""

    def __init__(self, domain: CudaDomain, handle_type: str) -> None:
        self.domain, self.handle_type = domain, handle_type
        self.outcome = Outcome()
        self.exported: Exported | None = None
        self._handles: list = []
        self._areas: list = []

    def offer(self, pattern: bytes) -> None:
        """Makes and exports the granule; its outcome says what failed."""

        def steps() -> None:
            domain, nbytes = self.domain, self.domain.granularity
            handle = domain.create_as(self.handle_type, nbytes, "trial")
            self._handles.append(handle)
            address = self._map(handle, writable=True)
            buffer = ctypes.create_string_buffer(pattern, len(pattern))
            for at in _places(nbytes):
                domain.driver.write(address + at, ctypes.addressof(buffer), len(pattern), what="a pattern")
            self.exported = domain.export(handle)

        self.outcome = _outcome(steps)

    def take(self, received: list[Exported | None], neighbour: int, pattern: bytes) -> Outcome:
        """Imports the neighbour's granule and reads the pattern back. Takes its descriptor out of `received`."""

        def steps() -> None:
            domain, nbytes = self.domain, self.domain.granularity
            if len(received) == 1:
                return  # one rank alone imports nothing
            exported, received[neighbour] = received[neighbour], None
            handle = domain.import_handle(exported, nbytes)
            self._handles.append(handle)
            address = self._map(handle, writable=False)
            buffer = ctypes.create_string_buffer(len(pattern))
            for at in _places(nbytes):
                what = f"the pattern of rank {neighbour}"
                domain.driver("cuMemcpyDtoH", ctypes.addressof(buffer), address + at, len(pattern), what=what)
                if buffer.raw != pattern:
                    raise MemoryDomainError(
                        f"byte {at} and on of the memory of rank {neighbour} read back wrong, though every call "
                        "succeeded; between GPUs check IOMMU and PCIe ACS settings"
                    )

        return _outcome(steps)

    def _map(self, handle, *, writable: bool) -> int:
        area = self.domain.reserve(handle.nbytes)
        self._areas.append(area)
        self.domain.map(area, 0, handle, writable=writable)
        return area.address

    def close(self) -> None:
        for area in self._areas:
            self.domain.free(area)
        for handle in self._handles:
            self.domain.release(handle)
        self._areas, self._handles = [], []


def _places(nbytes: int) -> tuple[int, ...]:
    return (0, nbytes // 2, nbytes - PATTERN_BYTES)


def _outcome(steps: Callable[[], None]) -> Outcome:
    try:
        steps()
    except Exception as error:
        short = isinstance(error, DriverError) and error.out_of_memory
        return Outcome(str(error), short)
    return Outcome()


def _gather(group, tag: str, mine: Any, kind: type) -> list[Any]:
    payload = msgspec.msgpack.encode(mine)
    return [msgspec.msgpack.decode(answer, type=kind) for answer in group.allgather(tag, payload)]


def _exchange_descriptors(group, trial: _Trial) -> list[Exported | None]:
    answers = group.exchange_fds("handle type posix_fd: descriptors", [trial.exported], b"")
    return [fds[0] if fds else None for _, fds in answers]


@contextmanager
def _closing(received: list[Exported | None]):
    """Closes the descriptors that nobody took over."""
    try:
        yield
    finally:
        close_exported(one for one in received if one is not None)


def _failures(outcomes) -> list[str]:
    return [f"rank {rank}: {o.error}" for rank, o in enumerate(outcomes) if o.error is not None]


def _refuse_shortage(by_rank: list[dict[str, Outcome]]) -> None:
    """A shortage of memory is told as one, whatever the type."""
    short = [
        f"rank {rank}: {outcome.error}"
        for rank, outcomes in enumerate(by_rank)
        for outcome in outcomes.values()
        if outcome.out_of_memory
    ]
    if short:
        raise MemoryDomainError(f"the device is out of memory before anything was moved: {join_problems(short)}")


def _no_type(reasons: dict[str, list[str]], several_hosts: str, forced: str | None) -> str:
    head = f"{forced.upper()} handles were asked for and do not work" if forced else "no handle type works"
    text = f"{head} between the ranks of this group; " + "; ".join(
        f"{name.upper()}: {join_problems(failed)}" for name, failed in reasons.items()
    )
    if several_hosts:
        only = "" if FABRIC in reasons else " (handle_type: auto or fabric)"
        text += f". Ranks on several hosts need FABRIC{only}: {IMEX_CURE}"
    return text
