"""The row store: this rank's row of every blob in exportable memory, and every peer's rows mapped read-only.

Row r of every blob lies in the store of rank r, blob after blob. All rows of a blob have one length, so every
rank's store has the same shape and the layout alone tells where a peer's row is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from dwdp.errors import DwdpError
from dwdp.partition.layout import DenseLayout
from dwdp.weights.plan import round_up


@dataclass(frozen=True)
class StoreChunk:
    """One handle of the store: the rows of whole layers. `offsets`: blob number -> byte of its row."""

    offsets: dict[int, int]
    nbytes: int


def store_chunks(layout: DenseLayout, chunk_bytes: int, granularity: int) -> tuple[StoreChunk, ...]:
    """Cuts the store into handles.

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


class RowStore:
    """Owns this rank's rows and the mappings of its peers' rows. Context manager with idempotent `close()`."""

    def __init__(self, domain, layout: DenseLayout, rank: int, *, chunk_bytes: int = 0) -> None:
        self.domain, self.layout, self.rank = domain, layout, rank
        self.chunks = store_chunks(layout, chunk_bytes, domain.granularity)
        self.place = {number: i for i, chunk in enumerate(self.chunks) for number in chunk.offsets}
        self.handles: list = []
        self.imported: list = []
        self.ranges: dict[tuple[int, int], object] = {}  # (rank, chunk) -> range with the whole handle at 0

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's handles, rounding included."""
        return sum(chunk.nbytes for chunk in self.chunks)

    def allocate(self) -> None:
        """Creates and maps this rank's handles; the caller closes the store when this raises."""
        for i, chunk in enumerate(self.chunks):
            handle = self.domain.create(chunk.nbytes, f"dense-store{i}")
            self.handles.append(handle)
            self.ranges[self.rank, i] = self.domain.reserve(chunk.nbytes)
            self.domain.map(self.ranges[self.rank, i], 0, handle, writable=True)
            self.domain.seal(handle)

    def write_row(self, number: int, storages: Iterable[torch.Tensor]) -> None:
        """Writes this rank's row of blob `number`; storages: uint8 [nbytes] each, as the blob lists them."""
        blob = self.layout.blobs[number]
        row = self.row(self.rank, number)
        start = self.rank * blob.row_nbytes
        for spec, data in zip(blob.storages, storages, strict=True):
            first, last = max(start, spec.offset), min(start + blob.row_nbytes, spec.offset + spec.nbytes)
            if first < last:
                row[first - start : last - start].copy_(data[first - spec.offset : last - spec.offset])

    def descriptors(self) -> list[int]:
        """Descriptors of this rank's handles, to be sent to the peers."""
        return [handle.fd for handle in self.handles]

    def import_rows(self, rank: int, descriptors: list[int]) -> None:
        """Maps the rows of a peer read-only. The list is emptied as descriptors are taken over."""
        if len(descriptors) != len(self.chunks):
            raise DwdpError(
                f"rank {rank} sent {len(descriptors)} handles for its dense rows, {len(self.chunks)} expected"
            )
        for i, chunk in enumerate(self.chunks):
            handle = self.domain.import_handle(descriptors.pop(0), chunk.nbytes)
            self.imported.append(handle)
            self.ranges[rank, i] = self.domain.reserve(chunk.nbytes)
            self.domain.map(self.ranges[rank, i], 0, handle, writable=False)
            handle.close_fd()  # the mapping stays

    def close_descriptors(self) -> None:
        """Closes this rank's own descriptors, once every peer has mapped them."""
        for handle in self.handles:
            handle.close_fd()

    def address(self, rank: int, number: int) -> int:
        """Where the row of `rank` of blob `number` lies in this process."""
        i = self.place[number]
        return self.ranges[rank, i].address + self.chunks[i].offsets[number]

    def row(self, rank: int, number: int) -> torch.Tensor:
        """uint8 [row_nbytes], zero-copy; only this rank's own row may be written."""
        i = self.place[number]
        shape = (self.layout.blobs[number].row_nbytes,)
        return self.domain.tensor(self.ranges[rank, i], self.chunks[i].offsets[number], shape, torch.uint8)

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
