"""The host memory domain: memfd handles, reserved ranges filled with MAP_FIXED, tensors without a copy."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING

from dwdp.errors import MemoryDomainError
from dwdp.memory.domain import MemoryDomain
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
)
from dwdp.memory.pages import Budget
from dwdp.memory.ranges import Handle, Hold, Mapping, Range, probe_mapping

if TYPE_CHECKING:
    import torch


class HostDomain(MemoryDomain):
    """Memory of one rank on the host.

    granule_bytes: granularity of handles and offsets, a multiple of the system's page size
    page_granules: granules of a ring page
    mapping_budget: areas that may be mapped or reserved at a time (default vm.max_map_count less 10 %); it
        counts what the kernel counts, mappings and the holes of ranges
    descriptor_budget: descriptors that may be open at a time (default RLIMIT_NOFILE, raised to its hard
        limit, less 10 %)
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
        self.calls = HostCalls()
        mappings = Budget(
            "mappings",
            max_map_count() * 9 // 10 if mapping_budget is None else mapping_budget,
            "use larger pages (page_granules), or raise vm.max_map_count",
        )
        super().__init__(rank, granule_bytes, page_granules, mappings, descriptor_budget)

    def free_bytes(self, size: int | None = None, *, held_bytes: int = 0, ranks_on_host: int = 1) -> int:
        if size is not None:
            return max(0, size - held_bytes)
        return available_bytes() // max(1, ranks_on_host)  # memory that is held already is not part of that

    def reclaim(self) -> None:
        """The host's allocator keeps nothing of what is as large as a table."""

    # handles

    def create(self, nbytes: int, what: str, *, exportable: bool = True) -> Handle:
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
            return self._add_handle(Handle(self, what, nbytes, fd, imported=False, exportable=exportable))

    def import_handle(self, exported: int, nbytes: int) -> Handle:
        """A peer's handle of `nbytes`. Owns the descriptor from now on, also when this fails; maps read-only."""
        try:
            self._check_open()
            self._check_size(nbytes, "imported handle")
            size = os.fstat(exported).st_size
            if size != nbytes:
                # Reading behind the end of a file is SIGBUS.
                raise MemoryDomainError(f"an imported handle has {size} bytes where its owner announced {nbytes} bytes")
            with self._lock:
                self.descriptor_budget.check(1, f"an imported handle of rank {self.rank}")
                return self._add_handle(Handle(self, "imported", nbytes, exported, imported=True))
        except BaseException:
            self._attempt("close of an imported descriptor", self._close_descriptor, exported)
            raise

    def export(self, handle: Handle) -> int:
        """The descriptor of an own handle."""
        self._check_exportable(handle)
        reason = self._why_unmappable(handle)
        if reason is not None:
            raise MemoryDomainError(f"handle {handle.what} of rank {self.rank} cannot be exported: {reason}")
        return handle.fd

    # the calls of the host

    def _why_unmappable(self, handle: Handle) -> str | None:
        return "its descriptor is closed" if handle.fd is None else None

    def _seal(self, handle: Handle) -> None:
        self.calls.seal_future_writes(handle.fd, f"{handle.what} of {handle.nbytes} bytes")

    def _release(self, handle: Handle) -> None:
        return None  # the descriptor was all

    def _num_areas(self, area: Range) -> int:
        return area.num_areas()

    def _more_areas(self, before: int, offset: int, end: int, behind: int) -> int:
        # The hole is replaced by the mapping and what is left of the hole on either side.
        return (offset > before) + (end < behind)

    def _reserve(self, nbytes: int) -> int:
        return self.calls.mmap(0, nbytes, PROT_NONE, HOLE, -1, f"range of rank {self.rank}")

    def _map(self, area: Range, offset: int, handle: Handle, writable: bool) -> None:
        what = f"{handle.what}, {'writable' if writable else 'read-only'}, at offset {offset}"
        prot = PROT_READ | (PROT_WRITE if writable else 0)
        address = area.address + offset
        try:
            self.calls.mmap(address, handle.nbytes, prot, MAP_SHARED | MAP_FIXED, handle.fd, what)
        except BaseException:
            self._reserve_again(address, handle.nbytes)
            raise

    def _unmap(self, mapping: Mapping) -> None:
        self._make_hole(mapping.address, mapping.nbytes)

    def _clear(self, area: Range, mappings: list[Mapping]) -> Exception | None:
        return self._attempt("unmap of a range", self._make_hole, area.address, area.nbytes)

    def _free(self, area: Range, mappings: list[Mapping]) -> Exception | None:
        return self._attempt("unmap of a range", self.calls.munmap, area.address, area.nbytes)

    def _free_cleared(self, area: Range) -> Exception | None:
        return self._attempt("late unmap of a range", self.calls.munmap, area.address, area.nbytes)

    def _bytes(self, address: int, nbytes: int, hold: Hold) -> torch.Tensor:
        import torch

        buffer = (ctypes.c_ubyte * nbytes).from_address(address)
        buffer.hold = hold  # the storage holds the buffer, the buffer its range
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        import torch

        return torch.empty(shape, dtype=dtype)

    def _probe(self, mapping: Mapping) -> int:
        return probe_mapping(mapping, self.granularity)  # one byte of every granule

    def _close_descriptor(self, fd: int) -> None:
        self.calls.close_fd(fd)

    def _add_handle(self, handle: Handle) -> Handle:
        self._handles[id(handle)] = handle
        self.descriptor_budget.used += 1
        return handle

    def _make_hole(self, address: int, nbytes: int) -> None:
        self.calls.mmap(address, nbytes, PROT_NONE, HOLE | MAP_FIXED, -1, "hole")

    def _reserve_again(self, address: int, nbytes: int) -> None:
        """After a failed MAP_FIXED the kernel may have dropped the hole; nobody else may get it."""
        try:
            self.calls.mmap(address, nbytes, PROT_NONE, HOLE | MAP_FIXED_NOREPLACE, -1, "hole")
        except MemoryDomainError:
            pass  # EEXIST: the hole is still there
