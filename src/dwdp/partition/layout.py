"""Where every byte of the dense weights that move lies: storages, blobs, rows, digest, checksums.

These are values that every rank computes alike; collect.py finds the tensors behind them. torch is imported where
bytes are read: a plan needs the places only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dwdp.memory.checksum import checksum_of, of_zeros

if TYPE_CHECKING:
    import torch

ALIGNMENT = 256  # bytes; of each storage in its blob and of a row's length, so that every dtype stays aligned


def align(nbytes: int) -> int:
    """nbytes rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class ViewSpec:
    """One tensor over a storage; `offset` counts elements, as torch's storage_offset does."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class StorageSpec:
    """A storage that moves whole: `offset` and `nbytes` in its blob, and every view and alias of it."""

    offset: int
    nbytes: int
    views: tuple[ViewSpec, ...]

    @property
    def name(self) -> str:
        return self.views[0].name

    def describe(self) -> str:
        """Everything that ranks must agree on, as one line."""
        views = "; ".join(f"{v.name} {v.dtype} {v.shape} stride {v.stride} at {v.offset}" for v in self.views)
        return f"{views} ({self.nbytes} bytes at byte {self.offset})"


@dataclass(frozen=True)
class Blob:
    """A(l) or D(l): one segment of one layer, cut into `num_rows` rows of `row_nbytes` bytes.

    Storages lie at multiples of 256 bytes; every byte that belongs to none of them is zero.
    """

    pos: int
    layer_index: int
    segment: str
    num_rows: int
    storages: tuple[StorageSpec, ...]

    @property
    def name(self) -> str:
        return f"layer {self.layer_index} {'attention' if self.segment == 'A' else 'MoE-dense'}"

    @property
    def row_nbytes(self) -> int:
        last = self.storages[-1]
        return align(-(-(last.offset + last.nbytes) // self.num_rows))

    @property
    def nbytes(self) -> int:
        """All rows, pad included."""
        return self.num_rows * self.row_nbytes

    @property
    def moved_nbytes(self) -> int:
        """The storages, without pad."""
        return sum(storage.nbytes for storage in self.storages)

    def share_nbytes(self, rank: int) -> int:
        """The bytes of storages, without pad, in the row of `rank`."""
        start = rank * self.row_nbytes
        end = start + self.row_nbytes
        return sum(max(0, min(end, s.offset + s.nbytes) - max(start, s.offset)) for s in self.storages)

    def locate(self, byte: int) -> str:
        """What lies at a byte of the blob, for messages."""
        for storage in self.storages:
            if storage.offset <= byte < storage.offset + storage.nbytes:
                return f"byte {byte - storage.offset} of {storage.name}"
        return f"pad byte {byte}"


@dataclass(frozen=True)
class DenseLayout:
    """The blobs of all covered layers, by pos, attention first; from the model and the switches alone."""

    num_ranks: int
    blobs: tuple[Blob, ...]

    @property
    def num_layers(self) -> int:
        return len({blob.pos for blob in self.blobs})

    @property
    def segments(self) -> tuple[str, ...]:
        """For each pos its segments: "A", "D" or "AD"."""
        found: dict[int, str] = {}
        for blob in self.blobs:
            found[blob.pos] = found.get(blob.pos, "") + blob.segment
        return tuple(found[pos] for pos in sorted(found))

    @property
    def positions(self) -> dict[int, int]:
        """layer_index -> pos."""
        return {blob.layer_index: blob.pos for blob in self.blobs}

    @property
    def moved_nbytes(self) -> int:
        return sum(blob.moved_nbytes for blob in self.blobs)

    def share_nbytes(self, rank: int) -> int:
        return sum(blob.share_nbytes(rank) for blob in self.blobs)

    def largest(self, segment: str) -> int:
        """Bytes of the largest blob of a segment, pad included; 0 without one."""
        return max((blob.nbytes for blob in self.blobs if blob.segment == segment), default=0)

    @property
    def digest(self) -> str:
        """SHA-256 over every name, shape, stride, dtype and offset."""
        digest = hashlib.sha256(f"{self.num_ranks} rows\n".encode())
        for blob in self.blobs:
            digest.update(f"{blob.pos} {blob.name} {blob.row_nbytes}\n".encode())
            for storage in blob.storages:
                digest.update(f"{storage.describe()}\n".encode())
        return digest.hexdigest()


def checksum(data: torch.Tensor) -> str:
    """Checksum of uint8 [n] as text, computed on the CPU; see checksum.py."""
    return f"{checksum_of(data.cpu().numpy()):016x}"


@dataclass(frozen=True)
class Cut:
    """Bytes [start, end) of a blob that lie in one storage and in one row."""

    storage: int
    row: int
    start: int
    end: int


def cuts(blob: Blob) -> list[Cut]:
    """The storages of a blob, cut where a row ends; in order. Each has a checksum of its own."""
    found = []
    for i, storage in enumerate(blob.storages):
        at, end = storage.offset, storage.offset + storage.nbytes
        while at < end:
            row = at // blob.row_nbytes
            until = min(end, (row + 1) * blob.row_nbytes)
            found.append(Cut(i, row, at, until))
            at = until
    return found


def original_cuts(blob: Blob, storages: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The bytes of each cut. storages: uint8 [nbytes] each."""
    found = []
    for cut in cuts(blob):
        offset = blob.storages[cut.storage].offset
        found.append(storages[cut.storage][cut.start - offset : cut.end - offset])
    return found


def original_checksums(blob: Blob, storages: Sequence[torch.Tensor]) -> list[str]:
    """A checksum of each cut, then one of the pad, which is zero; on the CPU. storages: uint8 [nbytes] each."""
    return [*map(checksum, original_cuts(blob, storages)), pad_checksum(blob)]


def checksums_of(blob: Blob, sums: Sequence[int]) -> list[str]:
    """As `original_checksums`, from the sums of the cuts."""
    return [*(f"{value:016x}" for value in sums), pad_checksum(blob)]


def pad_checksum(blob: Blob) -> str:
    """What the bytes of a blob that belong to no storage must have."""
    return f"{of_zeros(blob.nbytes - blob.moved_nbytes):016x}"


def gathered_checksums(blob: Blob, data: torch.Tensor, checksum: Callable[[torch.Tensor], str] = checksum) -> list[str]:
    """The same of a blob as it was gathered, pad included. data: uint8 [blob.nbytes]."""
    import torch

    ends = [(storage.offset, storage.offset + storage.nbytes) for storage in blob.storages]
    gaps = zip([0, *(end for _, end in ends)], [*(start for start, _ in ends), blob.nbytes])
    pad = torch.cat([data[start:end] for start, end in gaps])
    return [checksum(data[cut.start : cut.end]) for cut in cuts(blob)] + [checksum(pad)]
