"""What the memory domains of the host and of CUDA share: handles that map whole, ranges, budgets, the end.

A domain adds the calls of its system, see the methods at the end of `MemoryDomain`.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dwdp.errors import MemoryDomainError
from dwdp.memory.libc import raise_descriptor_limit
from dwdp.memory.pages import Budget, fit_page_bytes
from dwdp.memory.ranges import Handle, Hold, Mapping, Range

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class MemoryDomain(ABC):
    """Memory of one rank. A context manager; `close()` releases what is still live.

    granularity: of handles and offsets, in bytes; page_bytes: of a ring page; allocated_bytes: of own handles
    that are not both released and unmapped.

    Unmap, release and free are idempotent, never raise, and return the error that they logged or None.
    Everything else raises MemoryDomainError, MemoryBudgetError, or ValueError for an argument.
    """

    name: str
    exports_descriptors = True  # what `export` gives: descriptors, else bytes

    def __init__(
        self, rank: int, granularity: int, page_granules: int, mapping_budget: Budget, descriptor_budget: int | None
    ) -> None:
        if page_granules < 1:
            raise ValueError(f"page_granules is {page_granules}, it must be at least 1")
        self.rank, self.granularity = rank, granularity
        self.page_bytes = page_granules * granularity
        limit = raise_descriptor_limit()
        self.descriptor_budget = Budget(
            "open descriptors",
            limit * 9 // 10 if descriptor_budget is None else descriptor_budget,
            "raise the hard limit (ulimit -Hn) or use fewer ranks",
        )
        self.mapping_budget = mapping_budget
        self.allocated_bytes = 0
        self.mover: Any = None  # of `weights`, where the domain has one of its own; closed with the domain
        self._lock = threading.RLock()
        self._handles: dict[int, Handle] = {}
        self._ranges: dict[int, Range] = {}
        self._closed = False

    @abstractmethod
    def free_bytes(self, size: int | None = None, *, held_bytes: int = 0, ranks_on_host: int = 1) -> int:
        """Bytes that this rank may still allocate.

        size: of a device that is the host's memory, of which `held_bytes` (the domain's memory and the weights
        outside it) are taken; None: what the host has available now, shared by its ranks. A GPU knows itself.
        """

    @abstractmethod
    def reclaim(self) -> None:
        """Tensors were dropped and handles are made next: what an allocator keeps of their memory is given back."""

    # handles

    @abstractmethod
    def create(self, nbytes: int, what: str, *, exportable: bool = True) -> Handle:
        """A new handle of `nbytes` (a multiple of the granularity), named after `what` and the rank."""

    @abstractmethod
    def import_handle(self, exported: int | bytes, nbytes: int) -> Handle:
        """A peer's handle of `nbytes`. Owns a descriptor from now on, also when this fails; maps read-only."""

    @abstractmethod
    def export(self, handle: Handle) -> int | bytes:
        """What a peer imports an own handle by: a descriptor, open until `handle.close_fd`, or bytes."""

    def seal(self, handle: Handle) -> None:
        """Refuse every further writable map of an own handle, here and in peers; idempotent.

        Its writable mapping must exist already and goes on writing.
        """
        if handle.sealed:
            return
        reason = "its descriptor is a peer's" if handle.imported else self._why_unmappable(handle)
        if reason is not None:
            raise MemoryDomainError(f"handle {handle.what} cannot be sealed: {reason}")
        if handle.num_writable == 0:
            raise MemoryDomainError(
                f"handle {handle.what} is sealed before its writable map exists; nobody could write it"
            )
        self._seal(handle)
        handle.sealed = True

    def release(self, handle: Handle) -> Exception | None:
        """Give a handle back. Its memory is free once its mappings are gone too."""
        with self._lock:
            if handle.released:
                return None
            handle.released = True
            self._handles.pop(id(handle), None)
            error = self._close_fd(handle)
            error = self._release(handle) or error
            self._uncount(handle)
            return error

    # ranges and mappings

    def reserve(self, nbytes: int) -> Range:
        """Reserve addresses for `nbytes` (a multiple of the granularity) that cannot be accessed yet."""
        self._check_open()
        self._check_size(nbytes, "range")
        with self._lock:
            area = Range(self, 0, nbytes)
            more = self._num_areas(area)
            self.mapping_budget.check(more, f"a range of rank {self.rank}")
            area.address = self._reserve(nbytes)
            self._ranges[id(area)] = area
            self.mapping_budget.used += more
            return area

    def map(self, area: Range, offset: int, handle: Handle, *, writable: bool) -> Mapping:
        """Map the whole handle at `area.address + offset`; the bytes there must be a hole so far."""
        self._check_open()
        end = offset + handle.nbytes
        reason = "its range was freed" if area.freed else self._why_unmappable(handle)
        if reason is not None:
            raise MemoryDomainError(f"handle {handle.what} cannot be mapped: {reason}")
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
            more = self._more_areas(before, offset, end, behind)
            self.mapping_budget.check(more, f"handle {handle.what} of rank {self.rank}")
            self._map(area, offset, handle, writable)
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
            error = self._attempt(f"unmap of {mapping.handle.what}", self._unmap, mapping)
            area = mapping.area
            self.mapping_budget.used -= self._num_areas(area)
            area.mappings.remove(mapping)
            self.mapping_budget.used += self._num_areas(area)
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
            self.mapping_budget.used -= self._num_areas(area)
            mappings, area.mappings = area.mappings, []
            alive = list(area.holds)
            if alive:
                logger.warning(
                    "a range of %d bytes of rank %d is freed while %d tensors over it are alive",
                    area.nbytes, self.rank, len(alive),
                )  # fmt: skip
                error = self._clear(area, mappings)
                if error is None:
                    self._free_late(area, alive)
            else:
                error = self._free(area, mappings)
            for mapping in mappings:
                self._end(mapping)
            return error

    # tensors

    def tensor(self, area: Range, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of `shape` over the mapped bytes at `offset`; never a copy.

        The tensor's storage holds the range. Writing through it needs writable mappings.
        Raises ValueError when it is misaligned or out of bounds, MemoryDomainError over a hole.
        """
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
            return self._empty(shape, dtype)  # no bytes, nothing to copy
        with self._lock:
            if area.freed or not area.covers(offset, nbytes):
                raise MemoryDomainError(
                    f"a tensor {shape} of {dtype} at offset {offset} would lie over "
                    + ("a freed range" if area.freed else "bytes of its range that are not mapped")
                )
            hold = Hold(area)
            area.holds.add(hold)
        tensor = self._bytes(address, nbytes, hold).view(dtype).view(shape)
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
        """Prove access to every mapping of a range; returns how many bytes were tried.

        Values do not change; nobody else may write meanwhile. Raises MemoryDomainError naming handle,
        offset and access.
        """
        return sum(self._probe(mapping) for mapping in list(area.mappings))

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
            mover, self.mover = self.mover, None
            if mover is not None:
                errors.append(self._attempt("giving prepared copies back", mover.close))
            return [error for error in errors if error is not None]

    def __enter__(self):
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    # what a domain adds; each raises MemoryDomainError unless it says that it returns the error

    @abstractmethod
    def _why_unmappable(self, handle: Handle) -> str | None:
        """Why a handle cannot be mapped any more."""

    @abstractmethod
    def _seal(self, handle: Handle) -> None: ...

    @abstractmethod
    def _release(self, handle: Handle) -> Exception | None:
        """Returns the error. The descriptor is closed already."""

    @abstractmethod
    def _num_areas(self, area: Range) -> int:
        """How much of the mapping budget a range takes."""

    @abstractmethod
    def _more_areas(self, before: int, offset: int, end: int, behind: int) -> int:
        """What a mapping of [offset, end) in the hole [before, behind) adds to that."""

    @abstractmethod
    def _reserve(self, nbytes: int) -> int: ...

    @abstractmethod
    def _map(self, area: Range, offset: int, handle: Handle, writable: bool) -> None: ...

    @abstractmethod
    def _unmap(self, mapping: Mapping) -> None: ...

    @abstractmethod
    def _clear(self, area: Range, mappings: list[Mapping]) -> Exception | None:
        """Take every mapping of a range away and keep its addresses; returns the error."""

    @abstractmethod
    def _free(self, area: Range, mappings: list[Mapping]) -> Exception | None:
        """Take every mapping away and give the addresses back; returns the error."""

    @abstractmethod
    def _free_cleared(self, area: Range) -> Exception | None:
        """Give the addresses of a range that was cleared back; returns the error."""

    @abstractmethod
    def _bytes(self, address: int, nbytes: int, hold: Hold) -> torch.Tensor:
        """uint8 [nbytes] at `address`, whose storage keeps `hold`."""

    @abstractmethod
    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...

    @abstractmethod
    def _probe(self, mapping: Mapping) -> int: ...

    @abstractmethod
    def _close_descriptor(self, fd: int) -> None: ...

    # helpers

    def _check_open(self) -> None:
        if self._closed:
            raise MemoryDomainError(f"the {self.name} memory of rank {self.rank} is closed")

    def _check_size(self, nbytes: int, what: str) -> None:
        if nbytes <= 0 or nbytes % self.granularity:
            raise ValueError(f"{what} has {nbytes} bytes, not a positive multiple of {self.granularity}")

    def _check_exportable(self, handle: Handle) -> None:
        reason = (
            "it is a peer's" if handle.imported
            else "it was released" if handle.released
            else None if handle.exportable
            else "it was made without an exportable type"
        )  # fmt: skip
        if reason is not None:
            raise MemoryDomainError(f"handle {handle.what} of rank {self.rank} cannot be exported: {reason}")

    def _close_fd(self, handle: Handle) -> Exception | None:
        with self._lock:
            if handle.fd is None:
                return None
            fd, handle.fd = handle.fd, None
            self.descriptor_budget.used -= 1
            return self._attempt(f"close of {handle.what}'s descriptor", self._close_descriptor, fd)

    def _end(self, mapping: Mapping) -> None:
        mapping.live = False
        mapping.handle.num_mappings -= 1
        mapping.handle.num_writable -= mapping.writable
        self._uncount(mapping.handle)

    def _uncount(self, handle: Handle) -> None:
        if handle.released and handle.num_mappings == 0 and not handle.imported:
            self.allocated_bytes -= handle.nbytes

    def _free_late(self, area: Range, alive: list) -> None:
        """Give the addresses of a cleared range back when its last hold dies."""
        others = [None] * (len(alive) - 1)

        def one_gone() -> None:
            try:
                others.pop()
            except IndexError:
                self._free_cleared(area)

        for hold in alive:
            weakref.finalize(hold, one_gone).atexit = False

    def _attempt(self, what: str, call: Callable, *args) -> Exception | None:
        """Run a step of cleanup; a failure is logged with its traceback, returned, and stops nothing."""
        try:
            call(*args)
        except Exception as error:
            logger.exception("rank %d: %s failed", self.rank, what)
            return error
        return None
