"""Checksums of expert rows, and the comparison of copied rows with what their owners announced."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterator, Sequence

import torch

from dwdp.errors import VerificationError
from dwdp.partition.experts import ExpertPartition
from dwdp.weights.plan import TableAddresses, TableSpec

MODES = ("full", "sample", "off")


def _view(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def row_checksums(address: int, num_rows: int, row_nbytes: int) -> list[int]:
    """CRC-32 of each of `num_rows` rows of `row_nbytes` bytes from `address`."""
    if num_rows == 0 or row_nbytes == 0:
        return [0] * num_rows
    view = _view(address, num_rows * row_nbytes)
    return [zlib.crc32(view[at : at + row_nbytes]) for at in range(0, len(view), row_nbytes)]


def tensor_checksum(tensor: torch.Tensor, start: int = 0) -> int:
    """CRC-32 of a tensor's bytes in row order, going on from `start`."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(data.numpy(), start)


def overlap_problems(
    specs: Sequence[TableSpec], checksums: Sequence[Sequence[Sequence[int]]], partition: ExpertPartition
) -> list[str]:
    """Experts whose rows are not the same on all ranks that store them; checksums: rank -> table -> row."""
    problems = []
    for index, spec in enumerate(specs):
        known: dict[int, tuple[int, int]] = {}  # expert -> (checksum, the lowest rank that stores it)
        for rank, (start, end) in enumerate(partition.ranges):
            for expert, checksum in zip(range(start, end), checksums[rank][index]):
                first, owner = known.setdefault(expert, (checksum, rank))
                if first != checksum:
                    problems.append(f"{spec} expert {expert} differs on rank {owner} and rank {rank}")
    return problems


class RowChecker:
    """Knows the checksum of every remote row of this rank and compares copies with it.

    specs, tables: of all layers in one order; checksums: peer -> a list of one checksum a row for each table.
    """

    def __init__(
        self,
        specs: Sequence[TableSpec],
        tables: Sequence[TableAddresses],
        checksums: dict[int, Sequence[Sequence[int]]],
        partition: ExpertPartition,
        rank: int,
    ) -> None:
        self._checksums, self._partition = checksums, partition
        self._runs = partition.remote_runs(rank)
        self._by_pos: dict[int, list[tuple[int, TableSpec, TableAddresses]]] = {}
        for index, (spec, table) in enumerate(zip(specs, tables)):
            self._by_pos.setdefault(spec.pos, []).append((index, spec, table))

    def renew(self, checksums: dict[int, Sequence[Sequence[int]]]) -> None:
        """The owners' rows have changed; no copy may be in flight."""
        self._checksums = checksums

    def check(self, pos: int, mode: str = "full") -> int:
        """Compares the rows that the plan of layer `pos` has just copied; returns how many were compared.

        mode: full, sample (the first and last row of each run) or off. Raises VerificationError naming peer,
        layer, expert and first wrong byte.
        """
        if mode not in MODES:
            raise ValueError(f"verify is {mode!r}, not one of {', '.join(MODES)}")
        count = 0
        for index, spec, table in self._by_pos[pos]:
            for peer, expert in self._experts(mode):
                expected = self._checksums[peer][index][expert - self._partition.ranges[peer][0]]
                if zlib.crc32(_view(table.local(expert), spec.row_nbytes)) != expected:
                    raise self._error(spec, table, peer, expert)
                count += 1
        return count

    def _experts(self, mode: str) -> Iterator[tuple[int, int]]:
        for peer, first, end in self._runs:
            if mode == "full":
                yield from ((peer, expert) for expert in range(first, end))
            elif mode == "sample":
                yield from ((peer, expert) for expert in sorted({first, end - 1}))

    @staticmethod
    def _error(spec: TableSpec, table: TableAddresses, peer: int, expert: int) -> VerificationError:
        copied = bytes(_view(table.local(expert), spec.row_nbytes))
        source = bytes(_view(table.source(peer, expert), spec.row_nbytes))
        wrong = next((at for at in range(len(copied)) if copied[at] != source[at]), None)
        where = f"{spec}, expert row {expert} copied from rank {peer}"
        if wrong is None:
            return VerificationError(
                f"{where}: the bytes in the memory of rank {peer} are not those it announced; the row's "
                f"first byte is {expert * spec.row_nbytes} of the table"
            )
        return VerificationError(
            f"{where}: first wrong byte {wrong} of the row, {expert * spec.row_nbytes + wrong} of the table: "
            f"{copied[wrong]:#04x} instead of {source[wrong]:#04x}. A copy between devices that loses "
            "bytes is often an IOMMU or PCIe ACS setting"
        )
