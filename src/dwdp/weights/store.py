"""The row store: this rank's row of every blob in exportable memory, and every peer's rows mapped read-only.

Row r of every blob lies in the store of rank r, blob after blob. All rows of a blob have one length, so the layout
alone tells where a peer's row is.

[Note: own rows in place] With `mapped` every row has a handle of its own, which this rank maps where the row belongs in
the blob: its range is [slot pages | own handle | slot pages], as the composite range of an expert table with one row a
rank. A handle maps only whole, so its first and last granule also hold bytes of the neighbours' rows ("edge bytes"):
every gather copies whole rows and so writes them, always with the same values, beside the row that peers read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dwdp.errors import DwdpError
from dwdp.memory.exchange import Exported
from dwdp.partition.experts import handle_geometry
from dwdp.partition.layout import DenseLayout
from dwdp.weights.plan import CompositeGeometry, composite_geometry, round_up

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class StoreChunk:
    """One handle of the store. `offsets`: blob number -> byte of its row."""

    offsets: dict[int, int]
    nbytes: int


def store_chunks(layout: DenseLayout, chunk_bytes: int, granularity: int) -> tuple[StoreChunk, ...]:
    """Cuts the store into handles of whole layers, alike on every rank.

    chunk_bytes: 0 for one handle, else the size that a handle of whole layers does not pass (one layer may).
    granularity: bytes that a handle's size is a multiple of.
    """
    layers: dict[int, list[int]] = {}
    for number, blob in enumerate(layout.blobs):
        layers.setdefault(blob.pos, []).append(number)
    chunks: list[StoreChunk] = []
    offsets: dict[int, int] = {}
    end = 0
    for pos in sorted(layers):
        layer_bytes = sum(layout.blobs[number].row_nbytes for number in layers[pos])
        if offsets and chunk_bytes and end + layer_bytes > chunk_bytes:
            chunks.append(StoreChunk(offsets, round_up(end, granularity)))
            offsets, end = {}, 0
        for number in layers[pos]:
            offsets[number] = end
            end += layout.blobs[number].row_nbytes
    if offsets:
        chunks.append(StoreChunk(offsets, round_up(end, granularity)))
    return tuple(chunks)


def single_rows(layout: DenseLayout, rank: int, granularity: int) -> tuple[StoreChunk, ...]:
    """A handle for each row of `rank`, rounded outwards to granules; see [Note: own rows in place]."""
    chunks = []
    for number, blob in enumerate(layout.blobs):
        geometry = handle_geometry(blob.row_nbytes, rank, rank + 1, granularity)
        chunks.append(StoreChunk({number: geometry.data_offset}, geometry.nbytes))
    return tuple(chunks)


def row_composite(layout: DenseLayout, number: int, rank: int, granularity: int, page_bytes: int) -> CompositeGeometry:
    """The range on `rank` of blob `number` with its own row mapped in place; see [Note: own rows in place]."""
    return composite_geometry(
        layout.blobs[number].row_nbytes, rank, rank + 1, layout.num_ranks, granularity, page_bytes
    )


def count_mapped_rows(layout: DenseLayout, rank: int, granularity: int, page_bytes: int) -> int:
    """Mappings on `rank` with own rows mapped in place: all ranks' handles, and slot pages in every blob's range."""
    pages = (
        len(row_composite(layout, number, rank, granularity, page_bytes).page_offsets(page_bytes))
        for number in range(len(layout.blobs))
    )
    return layout.num_ranks * len(layout.blobs) + sum(pages)


class RowStore:
    """Owns this rank's rows and the mappings of its peers' rows. Context manager with idempotent `close()`.

    chunk_bytes: as `store_chunks`; mapped: see [Note: own rows in place], and chunk_bytes has no effect then.
    """

    def __init__(self, domain, layout: DenseLayout, rank: int, *, chunk_bytes: int = 0, mapped: bool = False) -> None:
        self.domain, self.layout, self.rank, self.mapped = domain, layout, rank, mapped
        alike = () if mapped else store_chunks(layout, chunk_bytes, domain.granularity)
        self.chunks = [
            single_rows(layout, r, domain.granularity) if mapped else alike for r in range(layout.num_ranks)
        ]  # of every rank
        self.place = {number: i for i, chunk in enumerate(self.chunks[rank]) for number in chunk.offsets}
        self.handles: list = []
        self.imported: list = []
        # (rank, chunk) -> a range that holds the whole handle at that many bytes from its start
        self.ranges: dict[tuple[int, int], object] = {}
        self._starts: dict[tuple[int, int], int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's handles, rounding included."""
        return sum(chunk.nbytes for chunk in self.chunks[self.rank])

    def composite(self, number: int, page_bytes: int) -> CompositeGeometry:
        """The range of a blob whose own row is mapped in place; bytes."""
        return row_composite(self.layout, number, self.rank, self.domain.granularity, page_bytes)

    def allocate(self) -> None:
        """Creates and maps this rank's handles; the caller closes the store when this raises."""
        domain = self.domain
        domain.descriptor_budget.check(sum(map(len, self.chunks)), f"all handles of the dense rows on rank {self.rank}")
        if self.mapped:
            domain.plan_page_bytes(lambda page: count_mapped_rows(self.layout, self.rank, domain.granularity, page))
        for i, chunk in enumerate(self.chunks[self.rank]):
            handle = domain.create(chunk.nbytes, f"dense-store{i}")
            self.handles.append(handle)
            start, nbytes = 0, chunk.nbytes
            if self.mapped:
                geometry = self.composite(i, domain.page_bytes)
                start, nbytes = geometry.before, geometry.nbytes
            self._map(self.rank, i, handle, start, nbytes, writable=True)
            domain.seal(handle)

    def _map(self, rank: int, i: int, handle, start: int, nbytes: int, *, writable: bool) -> None:
        self.ranges[rank, i] = self.domain.reserve(nbytes)
        self._starts[rank, i] = start
        self.domain.map(self.ranges[rank, i], start, handle, writable=writable)

    def write_row(self, number: int, storages: Iterable[torch.Tensor]) -> None:
        """Writes this rank's row of blob `number`; storages: uint8 [nbytes] each, as the blob lists them."""
        blob = self.layout.blobs[number]
        start = self.rank * blob.row_nbytes
        for i, (spec, data) in enumerate(zip(blob.storages, storages, strict=True)):
            first, last = max(start, spec.offset), min(start + blob.row_nbytes, spec.offset + spec.nbytes)
            if first < last:
                self.write_part(number, i, data[first - spec.offset : last - spec.offset])

    def write_part(self, number: int, i: int, data: torch.Tensor) -> None:
        """Writes the part of storage i of blob `number` that lies in this rank's row; data: uint8, that part."""
        self.part(number, i).copy_(data)

    def part(self, number: int, i: int) -> torch.Tensor:
        """That part, uint8 [bytes of storage i in this rank's row], zero-copy."""
        blob = self.layout.blobs[number]
        begin = blob.storages[i].offset - self.rank * blob.row_nbytes
        end = min(begin + blob.storages[i].nbytes, blob.row_nbytes)
        return self.row(self.rank, number)[max(0, begin) : end]

    def exports(self) -> list[Exported]:
        """This rank's handles, exported, to be sent to the peers."""
        return [self.domain.export(handle) for handle in self.handles]

    def import_rows(self, rank: int, exported: list[Exported]) -> None:
        """Maps the rows of a peer read-only. The list is emptied as handles are taken over."""
        chunks = self.chunks[rank]
        if len(exported) != len(chunks):
            raise DwdpError(f"rank {rank} sent {len(exported)} handles for its dense rows, {len(chunks)} expected")
        for i, chunk in enumerate(chunks):
            handle = self.domain.import_handle(exported.pop(0), chunk.nbytes)
            self.imported.append(handle)
            self._map(rank, i, handle, 0, chunk.nbytes, writable=False)
            handle.close_fd()  # the mapping stays

    def close_exports(self) -> None:
        """Closes this rank's own descriptors, once every peer has mapped them."""
        for handle in self.handles:
            handle.close_fd()

    def address(self, rank: int, number: int) -> int:
        """Where the row of `rank` of blob `number` lies in this process."""
        return self.ranges[rank, self.place[number]].address + self._offset(rank, number)

    def row(self, rank: int, number: int) -> torch.Tensor:
        """uint8 [row_nbytes], zero-copy; only this rank's own row may be written."""
        import torch

        shape = (self.layout.blobs[number].row_nbytes,)
        area = self.ranges[rank, self.place[number]]
        return self.domain.tensor(area, self._offset(rank, number), shape, torch.uint8)

    def _offset(self, rank: int, number: int) -> int:
        i = self.place[number]
        return self._starts[rank, i] + self.chunks[rank][i].offsets[number]

    def unmap_imports(self) -> None:
        """Gives the mappings of the peers' rows back."""
        for key in [key for key in self.ranges if key[0] != self.rank]:
            self.domain.free(self.ranges.pop(key))
        while self.imported:
            self.domain.release(self.imported.pop())

    def close(self) -> None:
        """Unmaps everything and releases this rank's handles."""
        self.unmap_imports()
        while self.ranges:
            self.domain.free(self.ranges.popitem()[1])
        while self.handles:
            self.domain.release(self.handles.pop())

    def __enter__(self) -> RowStore:
        return self

    def __exit__(self, *exc) -> None:
        self.close()
