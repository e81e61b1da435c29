"""A memory that exists on paper: dicts of granules, handles that map whole or not at all, a label in every byte.

It shares no code with a memory domain. Addresses are numbers that nothing lies at, so what is copied is played with
`Paper.copy`, which looks every byte up, refuses what is not mapped or not writable, and says whose bytes were read.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch


@dataclass(eq=False)
class PaperHandle:
    """`cells`: one label a byte, None before the first write; shared with those who imported it."""

    owner: int
    what: str
    nbytes: int
    cells: list
    fd: int | None
    imported: bool = False

    def close_fd(self) -> None:
        self.fd = None


@dataclass(eq=False)
class PaperRange:
    address: int
    nbytes: int


@dataclass
class Paper:
    """One rank's addresses. world: what all ranks share, descriptor -> handle."""

    rank: int
    granularity: int
    page_bytes: int
    world: dict[int, PaperHandle]
    granules: dict[int, tuple[PaperHandle, int, bool]] = field(default_factory=dict)  # address -> part, writable
    tensors: list[tuple[int, torch.Tensor]] = field(default_factory=list)  # as they were asked for
    handles: list[PaperHandle] = field(default_factory=list)
    descriptor_budget = SimpleNamespace(check=lambda more, what: None)

    def __post_init__(self) -> None:
        self._next = (self.rank + 1) << 32  # no two ranks have an address in common
        self._numbers = itertools.count(1000 * (self.rank + 1))

    # what a domain offers

    name = "host"

    def reclaim(self) -> None:
        pass

    def create(self, nbytes: int, what: str, *, exportable: bool = True) -> PaperHandle:
        assert nbytes > 0 and nbytes % self.granularity == 0, (what, nbytes)
        handle = PaperHandle(self.rank, what, nbytes, [None] * nbytes, next(self._numbers))
        self.world[handle.fd] = handle
        self.handles.append(handle)
        return handle

    def export(self, handle: PaperHandle) -> int:
        return handle.fd

    def import_handle(self, fd: int, nbytes: int) -> PaperHandle:
        theirs = self.world[fd]
        assert theirs.nbytes == nbytes, f"{theirs.what} has {theirs.nbytes} bytes, {nbytes} are to be mapped"
        return PaperHandle(theirs.owner, theirs.what, nbytes, theirs.cells, fd, imported=True)

    def reserve(self, nbytes: int) -> PaperRange:
        assert nbytes > 0 and nbytes % self.granularity == 0, nbytes
        area = PaperRange(self._next, nbytes)
        self._next += nbytes + 7 * self.granularity
        return area

    def map(self, area: PaperRange, offset: int, handle: PaperHandle, *, writable: bool):
        whole = 0 <= offset and offset % self.granularity == 0 and offset + handle.nbytes <= area.nbytes
        assert whole, f"{handle.what} of {handle.nbytes} bytes would be mapped in part at {offset} of {area.nbytes}"
        assert handle.fd is not None and not (writable and handle.imported)
        places = {area.address + offset + at: at for at in range(0, handle.nbytes, self.granularity)}
        assert not places.keys() & self.granules.keys(), f"{handle.what} would lie over another handle"
        self.granules.update({address: (handle, at, writable) for address, at in places.items()})
        return SimpleNamespace(address=area.address + offset)

    def seal(self, handle: PaperHandle) -> None:
        assert any(part is handle and writable for part, _, writable in self.granules.values())

    def tensor(self, area: PaperRange, offset: int, shape, dtype) -> torch.Tensor:
        tensor = torch.zeros(tuple(shape), dtype=dtype)
        assert all(self._cell(area.address + offset + at) for at in range(tensor.nbytes))
        self.tensors.append((area.address + offset, tensor))
        return tensor

    # what a reader of the paper sees

    def _cell(self, address: int) -> tuple[PaperHandle, int, bool]:
        handle, at, writable = self.granules[address // self.granularity * self.granularity]
        return handle, at + address % self.granularity, writable

    def label(self, address: int):
        handle, at, _ = self._cell(address)
        return handle.cells[at]

    def owner(self, address: int) -> int:
        """The rank whose handle lies there."""
        return self._cell(address)[0].owner

    def write(self, address: int, label) -> None:
        handle, at, writable = self._cell(address)
        assert writable, f"rank {self.rank} writes into {handle.what} of rank {handle.owner}"
        handle.cells[at] = label

    def copy(self, piece) -> list[tuple]:
        """Plays a slice; -> for each byte (its address, the label that is there now, whose memory it came from)."""
        moved = []
        for at in range(piece.nbytes):
            label = self.label(piece.src + at)
            self.write(piece.dst + at, label)
            moved.append((piece.dst + at, label, self.owner(piece.src + at)))
        return moved
