"""What the ranks read of a checkpoint folder when they start: bytes of each rank, and one rank's reads. No torch.

[Note: each byte once a host] Routed experts are read by the ranks that store them, and with `load: sharded` the dense
weights that move by the rank whose row they lie in. All other dense weights every rank needs. They come from the disk
once a host, since the other ranks find them in its page cache, and are counted once: for one rank each, whole tensors
in file order, in shares of about equal bytes. What a rank reads of the others' shares is `cached_nbytes`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dwdp.errors import DwdpError
from dwdp.model.dense_shapes import dense_shapes
from dwdp.model.folder import Folder
from dwdp.model.inventory import SKIPPED, canonical_name
from dwdp.model.safetensors_file import ITEMSIZE, TensorEntry
from dwdp.partition.experts import ExpertPartition
from dwdp.partition.layout import DenseLayout, cuts

LARGE_READ = 8 << 20
"""Bytes from which on a read is as fast as the disk."""

_EXPERTS = ".block_sparse_moe.experts."


@dataclass(frozen=True)
class Read:
    """Neighbouring ranges of a file as one: tensors, or parts of them, that it is made of."""

    file: str
    offset: int
    nbytes: int
    num_tensors: int

    def document(self) -> dict[str, str | int]:
        return {"file": self.file, "offset": self.offset, "nbytes": self.nbytes}


@dataclass(frozen=True)
class RankLoad:
    """Bytes of files. dense_nbytes: its own rows and its share of what all need. cached_nbytes: what it needs of the
    others' shares. Load is experts + dense. See [Note: each byte once a host]."""

    expert_nbytes: int
    dense_nbytes: int
    cached_nbytes: int

    @property
    def load_nbytes(self) -> int:
        return self.expert_nbytes + self.dense_nbytes

    def document(self) -> dict[str, int]:
        """The part of a rank's entry of `--json`."""
        return {
            "expert_bytes": self.expert_nbytes,
            "dense_bytes": self.dense_nbytes,
            "load_bytes": self.load_nbytes,
            "cached_bytes": self.cached_nbytes,
        }


@dataclass(frozen=True)
class _Dense:
    """A dense tensor. rank: that it is counted for, where all need it; else the parts: rank -> byte ranges of the
    file that only that rank reads."""

    entry: TensorEntry
    rank: int | None
    parts: dict[int, list[tuple[int, int]]]


class LoadPlan:
    """Who reads what of a folder. sharded: the switches of dense DWDP (a DenseConfig) with `load: sharded`, else None.

    Raises DwdpError when the tensors do not add up, which would be a fault of the plan.
    """

    def __init__(self, folder: Folder, partition: ExpertPartition, sharded=None) -> None:
        self.folder, self.partition = folder, partition
        self.is_sharded = sharded is not None
        num_ranks = len(partition.ranges)
        layout = None
        if sharded is not None:
            shapes = dense_shapes(folder.config, segments=sharded.segments, min_bytes=sharded.min_bytes)
            layout = shapes.layout_of(num_ranks)
        self._experts, dense = _divide(folder)
        self._dense = _assign(dense, layout, num_ranks)
        self.expert_nbytes = [0] * folder.config.num_experts
        for entry, expert in self._experts:
            self.expert_nbytes[expert] += entry.nbytes
        self.dense_nbytes = sum(entry.nbytes for entry in dense)
        common = sum(one.entry.nbytes for one in self._dense if one.rank is not None)
        own, shares = [0] * num_ranks, [0] * num_ranks
        for one in self._dense:
            if one.rank is not None:
                shares[one.rank] += one.entry.nbytes
            for rank, ranges in one.parts.items():
                own[rank] += sum(end - start for start, end in ranges)
        self.loads = tuple(
            RankLoad(sum(self.expert_nbytes[start:end]), own[rank] + shares[rank], common - shares[rank])
            for rank, (start, end) in enumerate(partition.ranges)
        )
        if sum(load.dense_nbytes for load in self.loads) != self.dense_nbytes:
            raise DwdpError("the ranks' dense bytes do not add up to those of the folder")

    def checkpoint(self) -> dict[str, str | int]:
        """The `checkpoint` part of `--json`."""
        form = self.folder.expert_format
        return {
            "format": "bf16" if form == "plain" else form,
            "files": len(self.folder.headers.files),
            "tensors": len(self.folder.headers.entries),
            "skipped_bytes": self.folder.skipped.nbytes,
        }

    @property
    def common_nbytes(self) -> int:
        """Bytes of the dense tensors that every rank needs whole."""
        return sum(one.entry.nbytes for one in self._dense if one.rank is not None)

    def reads(self, rank: int) -> list[Read]:
        """What a rank reads from the disk, file by file in ascending order, ranges that touch merged into one read.

        Raises DwdpError when their bytes are not the rank's experts and its dense part.
        """
        start, end = self.partition.ranges[rank]
        ranges = [(e.file, e.offset, e.end) for e, expert in self._experts if start <= expert < end and e.nbytes]
        for one in self._dense:
            if one.rank == rank and one.entry.nbytes:
                ranges.append((one.entry.file, one.entry.offset, one.entry.end))
            ranges += [(one.entry.file, first, last) for first, last in one.parts.get(rank, ())]
        reads = list(_merged(sorted(ranges)))
        if sum(read.nbytes for read in reads) != self.loads[rank].load_nbytes:
            raise DwdpError(
                f"rank {rank}'s reads have {sum(read.nbytes for read in reads)} bytes, its experts "
                f"{self.loads[rank].expert_nbytes} and its dense part {self.loads[rank].dense_nbytes}"
            )
        return reads


def largest_gap(reads: Sequence[Read]) -> int:
    """Most bytes that are left out between two reads of the same file."""
    gaps = (b.offset - a.offset - a.nbytes for a, b in zip(reads, reads[1:]) if a.file == b.file)
    return max(gaps, default=0)


def _divide(folder: Folder) -> tuple[list[tuple[TensorEntry, int]], list[TensorEntry]]:
    """-> (tensors below `experts.E.` with their E, all other text tensors), in file order."""
    experts, dense = [], []
    for name, entry in folder.headers.entries.items():
        if name.startswith(SKIPPED):
            continue
        at = name.find(_EXPERTS)
        if at >= 0:
            number = name[at + len(_EXPERTS) :].partition(".")[0]
            experts.append((entry, int(number)))
        else:
            dense.append(entry)
    return experts, dense


def _assign(dense: Sequence[TensorEntry], layout: DenseLayout | None, num_ranks: int) -> list[_Dense]:
    parts = {} if layout is None else _parts(layout)
    # A_log is read whole for its tail, which is none of the parameter's.
    moved = [canonical_name(e.name) in parts and not e.name.endswith(".A_log") for e in dense]
    total = sum(entry.nbytes for entry, moves in zip(dense, moved) if not moves)
    found, before = [], 0
    for entry, moves in zip(dense, moved):
        if not moves:
            middle = before + entry.nbytes // 2
            found.append(_Dense(entry, min(num_ranks - 1, middle * num_ranks // max(total, 1)), {}))
            before += entry.nbytes
            continue
        size, ranges = ITEMSIZE[entry.dtype], {}
        for rank, start, end in parts[canonical_name(entry.name)]:
            ranges.setdefault(rank, []).append((entry.offset + start * size, entry.offset + end * size))
        found.append(_Dense(entry, None, ranges))
    return found


def _parts(layout: DenseLayout) -> dict[str, list[tuple[int, int, int]]]:
    """Parameter's name -> (rank, first element, end) of the cuts of its storage."""
    found: dict[str, list[tuple[int, int, int]]] = {}
    for blob in layout.blobs:
        for cut in cuts(blob):
            storage = blob.storages[cut.storage]
            view = storage.views[0]
            size = storage.nbytes // max(1, math.prod(view.shape))
            start, end = ((at - storage.offset) // size for at in (cut.start, cut.end))
            found.setdefault(view.name, []).append((cut.row, start, end))
    return found


def _merged(ranges: Sequence[tuple[str, int, int]]) -> Iterator[Read]:
    """ranges: (file, first byte, end), sorted, none overlapping."""
    if not ranges:
        return
    file, first, last, count = *ranges[0], 1
    for other, start, end in ranges[1:]:
        if other == file and start == last:
            last, count = end, count + 1
            continue
        yield Read(file, first, last - first, count)
        file, first, last, count = other, start, end, 1
    yield Read(file, first, last - first, count)
