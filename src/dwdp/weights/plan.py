"""Where expert tables lie and which bytes a layer's gather moves; arithmetic on addresses, no memory is
touched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dwdp.partition.experts import ExpertPartition, HandleGeometry, handle_geometry


@dataclass(frozen=True)
class TableSpec:
    """One expert table of one managed layer, equal on every rank.

    pos: place among the managed layers; layer: the model's layer index; name: of the table;
    shape, dtype: of one expert's row, dtype as torch names it without the prefix; row_nbytes: its bytes.
    """

    pos: int
    layer: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    row_nbytes: int

    def __str__(self) -> str:
        return f"layer {self.layer} table {self.name}"


@dataclass(frozen=True)
class CompositeGeometry:
    """[ring pages | own handle | ring pages] of one table on one rank, in bytes.

    before, after: of the ring pages on either side; padding: from the range's start to expert 0.
    """

    handle: HandleGeometry
    before: int
    after: int
    padding: int

    @property
    def nbytes(self) -> int:
        return self.before + self.handle.nbytes + self.after

    def page_offsets(self, page_bytes: int) -> list[int]:
        """Offsets in the range at which ring pages are mapped."""
        behind = self.before + self.handle.nbytes
        return [*range(0, self.before, page_bytes), *range(behind, behind + self.after, page_bytes)]


def round_up(nbytes: int, unit: int) -> int:
    """The smallest multiple of `unit` that is not below `nbytes`."""
    return -(-nbytes // unit) * unit


def composite_geometry(
    b: int, start: int, end: int, num_experts: int, granularity: int, page_bytes: int
) -> CompositeGeometry:
    """Geometry of the rank that stores experts [start, end): `b` bytes a row; all sizes in bytes.

    Pages are whole, so the range before may begin before expert 0: that surplus lies in front of it.
    """
    handle = handle_geometry(b, start, end, granularity)
    before = round_up(handle.page_start, page_bytes)
    after = round_up(round_up(num_experts * b, granularity) - handle.page_end, page_bytes)
    return CompositeGeometry(handle, before, after, before - handle.page_start)


def count_mappings(
    row_nbytes: Sequence[int], partition: ExpertPartition, rank: int, granularity: int, page_bytes: int
) -> int:
    """Mappings that `rank` holds for tables with these row sizes: own handles, ring pages, peers' handles."""
    start, end = partition.ranges[rank]
    total = 0
    for b in row_nbytes:
        geometry = composite_geometry(b, start, end, partition.num_experts, granularity, page_bytes)
        total += len(partition.ranges) + (geometry.before + geometry.after) // page_bytes
    return total


@dataclass(frozen=True)
class CopySlice:
    """`nbytes` bytes from address `src`, in memory of rank `peer`, to address `dst`."""

    dst: int
    src: int
    nbytes: int
    peer: int


class Descriptor(NamedTuple):
    """One run in a gather's table. first_tile: number of its first tile among its row's tiles."""

    dst: int
    src: int
    nbytes: int
    first_tile: int


class GatherRow(NamedTuple):
    """What comes from `peer`: descriptors [first, end) of the table, cut into `tiles` tiles."""

    peer: int
    first: int
    end: int
    tiles: int


@dataclass(frozen=True)
class GatherTable:
    """What one launch of the gather moves, by peer. The host's twin walks it; on CUDA its runs are cut for the kernel,
    see `weights/gather_kernel.py:KernelTable`.

    tile_nbytes: of every tile but the last of a descriptor. kernel: tma or ldst.
    """

    rows: tuple[GatherRow, ...]
    descriptors: tuple[Descriptor, ...]
    tile_nbytes: int
    kernel: str


@dataclass(frozen=True)
class CopyPlan:
    """How one copy of a layer is submitted. Addresses are absolute and never change.

    slices: plain copies, one after the other, behind the two others; nbytes: of everything; batch: slices of one
    batched submission, in its order; gather: the table of one launch. See transfers.py.
    """

    slices: tuple[CopySlice, ...]
    nbytes: int
    batch: tuple[CopySlice, ...] = ()
    gather: GatherTable | None = None


@dataclass(frozen=True)
class TableAddresses:
    """Where one table of one layer lies in this rank's address space.

    expert_zero: address of expert 0 in the composite range; row_nbytes: bytes of an expert row;
    peers: peer rank -> (address of its first row, its first expert, the expert behind its last).
    """

    expert_zero: int
    row_nbytes: int
    peers: dict[int, tuple[int, int, int]]

    def local(self, expert: int) -> int:
        """Address of `expert`'s row in the composite range."""
        return self.expert_zero + expert * self.row_nbytes

    def source(self, peer: int, expert: int) -> int:
        """Address of `expert`'s row in the memory of `peer`; an expert that `peer` lacks is a ValueError."""
        first_row, start, end = self.peers[peer]
        if not start <= expert < end:
            raise ValueError(f"rank {peer} stores experts {start} to {end - 1}, not expert {expert}")
        return first_row + (expert - start) * self.row_nbytes


def expert_runs(tables: Sequence[TableAddresses], partition: ExpertPartition, rank: int) -> list[CopySlice]:
    """What a layer's copy moves: one run per table and run of experts that one peer serves; whole remote rows.

    The rows beside this rank's own share granules with them ("edge bytes") and are written again with the
    same values; own rows, which peers read, are never written.
    """
    runs = []
    for table in tables:
        for peer, first, end in partition.remote_runs(rank):
            table.source(peer, end - 1)  # the whole run lies inside its owner's rows
            nbytes = (end - first) * table.row_nbytes
            runs.append(CopySlice(table.local(first), table.source(peer, first), nbytes, peer))
    return runs


def edge_slices(
    table: TableAddresses, partition: ExpertPartition, rank: int, handle: HandleGeometry
) -> Iterator[CopySlice]:
    """Fills the bytes of the own handle that hold no own rows, each from the rank that serves its expert.

    When a row is smaller than a granule an edge holds several experts, of several owners perhaps. What lies
    behind the last expert belongs to nobody and stays zero.
    """
    b = table.row_nbytes
    start, end = partition.ranges[rank]
    behind = min(handle.page_end, partition.num_experts * b)
    for first, last in ((handle.page_start, start * b), (end * b, behind)):
        while first < last:
            expert = first // b
            until = min((expert + 1) * b, last)
            peer = partition.owner(expert)
            src = table.source(peer, expert) + first - expert * b
            yield CopySlice(table.expert_zero + first, src, until - first, peer)
            first = until


def row_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Bytes of one expert's row."""
    return math.prod(shape) * itemsize
