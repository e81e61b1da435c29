"""Checksums of expert rows, and the comparison of copied rows with what their owners announced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from dwdp.errors import VerificationError
from dwdp.memory.checksum import chained, checksum_of
from dwdp.partition.experts import ExpertPartition
from dwdp.weights.mover import HOST_MOVER
from dwdp.weights.plan import TableAddresses, TableSpec

MODES = ("full", "sample", "off")


def tensor_checksum(tensor: torch.Tensor, before: int = 0) -> int:
    """The checksum of a tensor's bytes in row order, wherever it lies, chained to those `before`."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return chained(before, checksum_of(data.numpy()))


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
    mover: of the domain that the tables lie in.
    """

    def __init__(
        self,
        specs: Sequence[TableSpec],
        tables: Sequence[TableAddresses],
        checksums: dict[int, Sequence[Sequence[int]]],
        partition: ExpertPartition,
        rank: int,
        mover=HOST_MOVER,
    ) -> None:
        self._mover = mover
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
        sums = self._mover.sums(self.rows(pos, mode))
        self.compare(pos, sums, mode)
        return len(sums)

    def rows(self, pos: int, mode: str = "full") -> list[tuple[int, int]]:
        """(address, bytes) of the rows that a check of layer `pos` sums up, for `compare`."""
        if mode not in MODES:
            raise ValueError(f"verify is {mode!r}, not one of {', '.join(MODES)}")
        return [
            (table.local(expert), spec.row_nbytes)
            for _, spec, table in self._by_pos[pos]
            for _, expert in self._experts(mode)
        ]

    def compare(self, pos: int, sums: Sequence[int], mode: str = "full", *, at_rest: bool = True) -> None:
        """Raises as `check` does for the checksums of `rows(pos, mode)`. at_rest: the rows are still there."""
        left = iter(sums)
        for index, spec, table in self._by_pos[pos]:
            for peer, expert in self._experts(mode):
                expected = self._checksums[peer][index][expert - self._partition.ranges[peer][0]]
                if next(left) != expected:
                    raise self._error(spec, table, peer, expert, expected, at_rest)

    def _experts(self, mode: str) -> Iterator[tuple[int, int]]:
        for peer, first, end in self._runs:
            if mode == "full":
                yield from ((peer, expert) for expert in range(first, end))
            elif mode == "sample":
                yield from ((peer, expert) for expert in sorted({first, end - 1}))

    def _error(
        self, spec: TableSpec, table: TableAddresses, peer: int, expert: int, expected: int, at_rest: bool
    ) -> VerificationError:
        mover, nbytes = self._mover, spec.row_nbytes
        local, theirs = table.local(expert), table.source(peer, expert)
        where = f"{spec}, expert row {expert} copied from rank {peer}"
        place = f"the row's first byte is {expert * nbytes} of the table"
        if mover.sums([(theirs, nbytes)]) != [expected]:
            return VerificationError(
                f"{where}: the bytes in the memory of rank {peer} are not those it announced; {place}"
            )
        cause = "A copy between devices that loses bytes is often an IOMMU or PCIe ACS setting"
        wrong = None
        if at_rest:
            copied, source = mover.read(local, nbytes), mover.read(theirs, nbytes)
            wrong = next((at for at in range(nbytes) if copied[at] != source[at]), None)
        if wrong is None:
            return VerificationError(
                f"{where}: a copy had other bytes than the memory of rank {peer}; {place}. {cause}"
            )
        return VerificationError(
            f"{where}: first wrong byte {wrong} of the row, {expert * nbytes + wrong} of the table: "
            f"{copied[wrong]:#04x} instead of {source[wrong]:#04x}. {cause}"
        )
