"""Handles, ranges and mappings of a memory domain: plain records, changed by the domain only."""

from __future__ import annotations

import bisect
import ctypes
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dwdp.errors import MemoryDomainError

if TYPE_CHECKING:
    from dwdp.memory.domain import MemoryDomain

PROBES_PER_CALL = 512  # below IOV_MAX (1,024) and the smallest pipe (4,096 bytes)


@dataclass(eq=False)
class Handle:
    """Memory that maps whole. `fd` is None while it has no open descriptor; mappings outlive that.

    raw, handle_type: the driver's handle and how it was made or imported, on CUDA only.
    """

    domain: MemoryDomain = field(repr=False)
    what: str
    nbytes: int
    fd: int | None
    imported: bool
    released: bool = False
    sealed: bool = False
    num_mappings: int = 0
    num_writable: int = 0  # of the mappings
    exportable: bool = True
    raw: Any = None
    handle_type: str | None = None

    def close_fd(self) -> Exception | None:
        """Close the descriptor and keep the mappings. Idempotent; a failure is logged and returned."""
        return self.domain._close_fd(self)


@dataclass(eq=False)
class Mapping:
    """A whole handle at `area.address + offset`."""

    area: Range = field(repr=False)
    offset: int
    handle: Handle = field(repr=False)
    writable: bool
    live: bool = True

    @property
    def nbytes(self) -> int:
        return self.handle.nbytes

    @property
    def end(self) -> int:
        return self.offset + self.handle.nbytes

    @property
    def address(self) -> int:
        return self.area.address + self.offset


@dataclass(eq=False)
class Range:
    """Reserved addresses; holes in it cannot be accessed. `mappings` is sorted by offset."""

    domain: MemoryDomain = field(repr=False)
    address: int
    nbytes: int
    freed: bool = False
    mappings: list[Mapping] = field(default_factory=list, repr=False)
    holds: weakref.WeakSet = field(default_factory=weakref.WeakSet, repr=False)

    def num_areas(self) -> int:
        """Areas that the kernel keeps for this range: mappings and the holes between them."""
        holes, at = 0, 0
        for mapping in self.mappings:
            holes += mapping.offset > at
            at = mapping.end
        return len(self.mappings) + holes + (at < self.nbytes)

    def neighbours(self, offset: int) -> tuple[int, int, int]:
        """(index to insert at, end of the mapping before, start of the mapping behind) of `offset`."""
        index = bisect.bisect_right(self.mappings, offset, key=lambda m: m.offset)
        before = self.mappings[index - 1].end if index else 0
        behind = self.mappings[index].offset if index < len(self.mappings) else self.nbytes
        return index, before, behind

    def covers(self, offset: int, nbytes: int) -> bool:
        """Whether [offset, offset + nbytes) is mapped without a hole."""
        at, end = offset, offset + nbytes
        index = max(0, bisect.bisect_right(self.mappings, offset, key=lambda m: m.offset) - 1)
        for mapping in self.mappings[index:]:
            if at >= end or mapping.offset > at:
                break
            at = max(at, mapping.end)
        return at >= end


@dataclass(eq=False)
class Hold:
    """What a tensor's storage keeps of its range; gone when the last tensor of that storage is."""

    area: Range


def probe_mapping(mapping: Mapping, granularity: int) -> int:
    """Prove access to one byte of every granule of a mapping; returns how many.

    Raises MemoryDomainError naming the first byte without access.
    """
    offsets = range(0, mapping.nbytes, granularity)
    for first in range(0, len(offsets), PROBES_PER_CALL):
        part = offsets[first : first + PROBES_PER_CALL]
        if _refused(mapping, part) is None:
            continue
        for at in part:
            reason = _refused(mapping, [at])
            if reason is not None:
                handle = mapping.handle
                raise MemoryDomainError(
                    f"no access to byte {at} of handle {handle.what} of {handle.nbytes} bytes, mapped "
                    f"{'writable' if mapping.writable else 'read-only'} at offset {mapping.offset} of its "
                    f"range on rank {handle.domain.rank}: {reason}"
                )
    return len(offsets)


def _refused(mapping: Mapping, offsets: Sequence[int]) -> str | None:
    """Why the bytes at `offsets` cannot be accessed; None when they can.

    The kernel copies them out to a pipe and, where the mapping is writable, back again, so missing access
    is a result and not a signal.
    """
    views = [ctypes.c_ubyte.from_address(mapping.address + at) for at in offsets]
    out, into = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        done = os.writev(into, views)
        if done == len(views):
            done = os.readv(out, views) if mapping.writable else done
        return None if done == len(views) else f"{done} of {len(views)} bytes could be copied"
    except OSError as error:
        return str(error)
    finally:
        os.close(out)
        os.close(into)
