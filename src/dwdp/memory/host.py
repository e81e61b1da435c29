"""The host memory domain: memfd handles, reserved ranges filled with MAP_FIXED, tensors without a copy."""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dwdp.errors import MemoryDomainError
from dwdp.memory.libc import (
    HOLE,
    MAP_FIXED,
    MAP_FIXED_NOREPLACE,
    MAP_SHARED,
    PROT_NONE,
    PROT_READ,
    PROT_WRITE,
    HostCalls,
    available_bytes,
    max_map_count,
    raise_descriptor_limit,
)
from dwdp.memory.pages import Budget, fit_page_bytes
from dwdp.memory.ranges import Handle, Hold, Mapping, Range, probe_mapping

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class HostDomain:
    """Memory of one rank on the host. A context manager; `close()` releases what is still live.

    granule_bytes: granularity of handles and offsets, a multiple of the system's page size
    page_granules: granules of a ring page
    mapping_budget: areas that may be mapped or reserved at a time (default vm.max_map_count less 10 %)
    descriptor_budget: descriptors that may be open at a time (default RLIMIT_NOFILE, raised to its hard
        limit, less 10 %)

    Unmap, release and free are idempotent, never raise, and return the error that they logged or None.
    Everything else raises MemoryDomainError, MemoryBudgetError, or ValueError for an argument.
    """

    name = "host"

    def __init__(
        self,
        rank: int,
        *,
        granule_bytes: int = 65536,
        page_granules: int = 8,
        mapping_budget: int | None = None,
        descriptor_budget: int | None = None,
    ) -> None:
        if granule_bytes <= 0 or granule_bytes % mmap.PAGESIZE:
            raise ValueError(
                f"host_granule_bytes is {granule_bytes}, it must be a positive multiple of {mmap.PAGESIZE}"
            )
        if page_granules < 1:
            raise ValueError(f"page_granules is {page_granules}, it must be at least 1")
        self.calls = HostCalls()
        self.rank, self.granularity = rank, granule_bytes
        self.page_bytes = page_granules * granule_bytes
        limit = raise_descriptor_limit()
        self.descriptor_budget = Budget(
            "open descriptors",
            limit * 9 // 10 if descriptor_budget is None else descriptor_budget,
            "raise the hard limit (ulimit -Hn) or use fewer ranks",
        )
        # Counts what the kernel counts: mappings and the holes of ranges.
        self.mapping_budget = Budget(
            "mappings",
            max_map_count() * 9 // 10 if mapping_budget is None else mapping_budget,
            "use larger pages (page_granules), or raise vm.max_map_count",
        )
        self.allocated_bytes = 0  # of own handles that are not both released and unmapped
        self._lock = threading.RLock()
        self._handles: dict[int, Handle] = {}
        self._ranges: dict[int, Range] = {}
        self._closed = False

    # handles

    def create(self, nbytes: int, what: str) -> Handle:
        """A new handle of `nbytes` (a multiple of the granularity), zeros, in memfd `dwdp-<what>-<rank>`."""
        self._check_open()
        self._check_size(nbytes, f"handle {what}")
        if not 0 < len(what) <= 200 or not what.isprintable() or " " in what or "/" in what:
            raise ValueError(f"{what!r} cannot be part of a memfd's name")
        with self._lock:
            self.descriptor_budget.check(1, f"handle {what} of rank {self.rank}")
            free = available_bytes()
            if nbytes > free:
                raise MemoryDomainError(
                    f"handle {what} of rank {self.rank} needs {nbytes} bytes but this host has {free} bytes "
                    "available; use more ranks, fewer slots, or free memory"
                )
            fd = self.calls.memfd(f"dwdp-{what}-{self.rank}", nbytes)
            self.allocated_bytes += nbytes
            return self._add_handle(Handle(self, what, nbytes, fd, imported=False))

    def import_handle(self, fd: int, nbytes: int) -> Handle:
        """A peer's handle of `nbytes`. Owns `fd` from now on, also when this fails; maps read-only."""
        try:
            self._check_open()
            self._check_size(nbytes, "imported handle")
            size = os.fstat(fd).st_size
            if size != nbytes:
                # Reading behind the end of a file is SIGBUS.
                raise MemoryDomainError(f"an imported handle has {size} bytes where its owner announced {nbytes} bytes")
            with self._lock:
                self.descriptor_budget.check(1, f"an imported handle of rank {self.rank}")
                return self._add_handle(Handle(self, "imported", nbytes, fd, imported=True))
        except BaseException:
            self._attempt("close of an imported descriptor", self.calls.close_fd, fd)
            raise

    def seal(self, handle: Handle) -> None:
        """Refuse every further writable map of an own handle, here and in peers; idempotent.

        Its writable mapping must exist already and goes on writing.
        """
        if handle.sealed:
            return
        if handle.imported or handle.fd is None:
            raise MemoryDomainError(
                f"handle {handle.what} cannot be sealed: its descriptor is "
                + ("a peer's" if handle.imported else "closed")
            )
        if handle.num_writable == 0:
            raise MemoryDomainError(
                f"handle {handle.what} is sealed before its writable map exists; nobody could write it"
            )
        self.calls.seal_future_writes(handle.fd, f"{handle.what} of {handle.nbytes} bytes")
        handle.sealed = True

    def release(self, handle: Handle) -> Exception | None:
        """Give a handle back. Its memory is free once its mappings are gone too."""
        with self._lock:
            if handle.released:
                return None
            handle.released = True
            self._handles.pop(id(handle), None)
            error = self._close_fd(handle)
            self._uncount(handle)
            return error

    # ranges and mappings

    def reserve(self, nbytes: int) -> Range:
        """Reserve addresses for `nbytes` (a multiple of the granularity) that cannot be accessed yet."""
        self._check_open()
        self._check_size(nbytes, "range")
        with self._lock:
            self.mapping_budget.check(1, f"a range of rank {self.rank}")
            address = self.calls.mmap(0, nbytes, PROT_NONE, HOLE, -1, f"range of rank {self.rank}")
            area = Range(self, address, nbytes)
            self._ranges[id(area)] = area
            self.mapping_budget.used += 1
            return area

    def map(self, area: Range, offset: int, handle: Handle, *, writable: bool) -> Mapping:
        """Map the whole handle at `area.address + offset`; the bytes there must be a hole so far."""
        self._check_open()
        end = offset + handle.nbytes
        if area.freed or handle.fd is None:
            raise MemoryDomainError(
                f"handle {handle.what} cannot be mapped: its "
                + ("range was freed" if area.freed else "descriptor is closed")
            )
        if offset < 0 or offset % self.granularity or end > area.nbytes:
            raise ValueError(
                f"handle {handle.what} of {handle.nbytes} bytes does not fit at offset {offset} of a range "
                f"of {area.nbytes} bytes with granularity {self.granularity}"
            )
        if writable and handle.imported:
            raise MemoryDomainError("a peer's memory is mapped read-only, a writable map was asked for")
        with self._lock:
            index, before, behind = area.neighbours(offset)
            if before > offset or behind < end:
                raise ValueError(
                    f"handle {handle.what} at [{offset}, {end}) would lie over a mapping; the hole there is "
                    f"[{before}, {behind})"
                )
            # The hole is replaced by the mapping and what is left of the hole on either side.
            more = (offset > before) + (end < behind)
            self.mapping_budget.check(more, f"handle {handle.what} of rank {self.rank}")
            what = f"{handle.what}, {'writable' if writable else 'read-only'}, at offset {offset}"
            prot = PROT_READ | (PROT_WRITE if writable else 0)
            address = area.address + offset
            try:
                self.calls.mmap(address, handle.nbytes, prot, MAP_SHARED | MAP_FIXED, handle.fd, what)
            except BaseException:
                self._reserve_again(address, handle.nbytes)
                raise
            mapping = Mapping(area, offset, handle, writable)
            area.mappings.insert(index, mapping)
            handle.num_mappings += 1
            handle.num_writable += writable
            self.mapping_budget.used += more
            return mapping

    def unmap(self, mapping: Mapping) -> Exception | None:
        """Take a mapping away; its bytes of the range stay reserved and cannot be accessed."""
        with self._lock:
            if not mapping.live:
                return None
            error = self._attempt(
                f"unmap of {mapping.handle.what}", self.calls.mmap,
                mapping.address, mapping.nbytes, PROT_NONE, HOLE | MAP_FIXED, -1, "hole",
            )  # fmt: skip
            area = mapping.area
            self.mapping_budget.used -= area.num_areas()
            area.mappings.remove(mapping)
            self.mapping_budget.used += area.num_areas()
            self._end(mapping)
            return error

    def free(self, area: Range) -> Exception | None:
        """Give a range's addresses back, with all mappings in it.

        While a tensor over the range is alive its addresses stay reserved, so that a late access faults
        and never meets memory that somebody else got there.
        """
        with self._lock:
            if area.freed:
                return None
            area.freed = True
            self._ranges.pop(id(area), None)
            self.mapping_budget.used -= area.num_areas()
            mappings, area.mappings = area.mappings, []
            alive = list(area.holds)
            if alive:
                logger.warning(
                    "a range of %d bytes of rank %d is freed while %d tensors over it are alive",
                    area.nbytes, self.rank, len(alive),
                )  # fmt: skip
                error = self._attempt(
                    "unmap of a range", self.calls.mmap,
                    area.address, area.nbytes, PROT_NONE, HOLE | MAP_FIXED, -1, "hole",
                )  # fmt: skip
                self._unmap_late(area, alive)
            else:
                error = self._attempt("unmap of a range", self.calls.munmap, area.address, area.nbytes)
            for mapping in mappings:
                self._end(mapping)
            return error

    # tensors

    def tensor(self, area: Range, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of `shape` over the mapped bytes at `offset`; never a copy.

        The tensor's storage holds the range. Writing through it needs writable mappings.
        Raises ValueError when it is misaligned or out of bounds, MemoryDomainError over a hole.
        """
        import torch

        self._check_open()
        shape = tuple(int(n) for n in shape)
        if any(n < 0 for n in shape):
            raise ValueError(f"a tensor cannot have shape {shape}")
        nbytes = math.prod(shape) * dtype.itemsize
        address = area.address + offset
        if offset < 0 or offset + nbytes > area.nbytes:
            raise ValueError(
                f"a tensor {shape} of {dtype} ({nbytes} bytes) at offset {offset} leaves its range of "
                f"{area.nbytes} bytes"
            )
        if address % dtype.itemsize:
            raise ValueError(f"offset {offset} is not a multiple of the {dtype.itemsize} bytes of {dtype}")
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype)  # no bytes, nothing to copy
        with self._lock:
            if area.freed or not area.covers(offset, nbytes):
                raise MemoryDomainError(
                    f"a tensor {shape} of {dtype} at offset {offset} would lie over "
                    + ("a freed range" if area.freed else "bytes of its range that are not mapped")
                )
            buffer = (ctypes.c_ubyte * nbytes).from_address(address)
            buffer.hold = Hold(area)  # the storage holds the buffer, the buffer its range
            area.holds.add(buffer.hold)
        tensor = torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(shape)
        if tensor.data_ptr() != address:
            raise MemoryDomainError(f"torch copied a tensor {shape} of {dtype} instead of using {address:#x}")
        return tensor

    def address_of(self, tensor: torch.Tensor) -> int:
        """Address of the first byte of the tensor's storage."""
        return tensor.untyped_storage().data_ptr()

    def contains(self, address: int, nbytes: int) -> bool:
        """Whether [address, address + nbytes) lies in one live range of this domain."""
        end = address + max(1, nbytes)
        with self._lock:
            return any(a.address <= address and end <= a.address + a.nbytes for a in self._ranges.values())

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage lies in this domain."""
        storage = tensor.untyped_storage()
        return storage.nbytes() > 0 and self.contains(storage.data_ptr(), storage.nbytes())

    def probe(self, area: Range) -> int:
        """Prove access to one byte of every granule of every mapping; returns how many.

        Values do not change; nobody else may write meanwhile. Raises MemoryDomainError naming handle,
        offset and access.
        """
        return sum(probe_mapping(mapping, self.granularity) for mapping in list(area.mappings))

    # pages

    def grow_pages(self) -> int:
        """Double `page_bytes`; returns it."""
        self.page_bytes *= 2
        return self.page_bytes

    def plan_page_bytes(
        self,
        num_mappings_for: Callable[[int], int],
        num_descriptors_for: Callable[[int], int] | None = None,
    ) -> int:
        """Double `page_bytes` until the plan fits what is left of the budgets; returns it.

        num_mappings_for, num_descriptors_for: page size in bytes -> how many the plan still adds.
        Raises MemoryBudgetError when no page size fits.
        """
        page_bytes = fit_page_bytes(
            self.page_bytes,
            num_mappings_for,
            self.mapping_budget.left,
            num_descriptors_for=num_descriptors_for,
            descriptor_budget=self.descriptor_budget.left,
        )
        while self.page_bytes < page_bytes:
            self.grow_pages()
        return self.page_bytes

    # the end

    def live(self) -> dict[str, int]:
        """What is live now: handles not released, mappings, ranges, open descriptors."""
        with self._lock:
            return {
                "handles": len(self._handles),
                "mappings": sum(len(area.mappings) for area in self._ranges.values()),
                "ranges": len(self._ranges),
                "descriptors": self.descriptor_budget.used,
            }

    def close(self) -> list[Exception]:
        """Unmap and release everything still live; returns the errors, which are logged."""
        with self._lock:
            self._closed = True
            errors = [self.free(area) for area in list(self._ranges.values())]
            errors += [self.release(handle) for handle in list(self._handles.values())]
            return [error for error in errors if error is not None]

    def __enter__(self) -> HostDomain:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    # helpers

    def _check_open(self) -> None:
        if self._closed:
            raise MemoryDomainError(f"the host memory of rank {self.rank} is closed")

    def _check_size(self, nbytes: int, what: str) -> None:
        if nbytes <= 0 or nbytes % self.granularity:
            raise ValueError(f"{what} has {nbytes} bytes, not a positive multiple of {self.granularity}")

    def _add_handle(self, handle: Handle) -> Handle:
        self._handles[id(handle)] = handle
        self.descriptor_budget.used += 1
        return handle

    def _close_fd(self, handle: Handle) -> Exception | None:
        with self._lock:
            if handle.fd is None:
                return None
            fd, handle.fd = handle.fd, None
            self.descriptor_budget.used -= 1
            return self._attempt(f"close of {handle.what}'s descriptor", self.calls.close_fd, fd)

    def _end(self, mapping: Mapping) -> None:
        mapping.live = False
        mapping.handle.num_mappings -= 1
        mapping.handle.num_writable -= mapping.writable
        self._uncount(mapping.handle)

    def _uncount(self, handle: Handle) -> None:
        if handle.released and handle.num_mappings == 0 and not handle.imported:
            self.allocated_bytes -= handle.nbytes

    def _unmap_late(self, area: Range, alive: list) -> None:
        """Unmap a freed range when its last hold dies."""
        others = [None] * (len(alive) - 1)

        def one_gone() -> None:
            try:
                others.pop()
            except IndexError:
                self._attempt("late unmap of a range", self.calls.munmap, area.address, area.nbytes)

        for hold in alive:
            weakref.finalize(hold, one_gone).atexit = False

    def _reserve_again(self, address: int, nbytes: int) -> None:
        """After a failed MAP_FIXED the kernel may have dropped the hole; nobody else may get it."""
        try:
            self.calls.mmap(address, nbytes, PROT_NONE, HOLE | MAP_FIXED_NOREPLACE, -1, "hole")
        except MemoryDomainError:
            pass  # EEXIST: the hole is still there

    def _attempt(self, what: str, call: Callable, *args) -> Exception | None:
        """Run a step of cleanup; a failure is logged with its traceback, returned, and stops nothing."""
        try:
            call(*args)
        except Exception as error:
            logger.exception("rank %d: %s failed", self.rank, what)
            return error
        return None
