"""Which rank stores which experts: the one table that every range comes from, and the geometry of a handle.

Computed from the config's numbers and E alone, so that all ranks agree without a collective.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Protocol


class PartitionNumbers(Protocol):
    """What the table needs of a `DwdpConfig`."""

    dwdp_size: int
    num_experts_per_worker: int
    num_prefetch_experts: int


@dataclass(frozen=True)
class ExpertPartition:
    """Every rank's range of the experts of a layer.

    kind: balanced, uniform, redundant or capped. ranges: a rank's (start, end), by rank. num_experts: E.
    stride: experts from one rank's start to the next one's, 0 for the balanced table.
    """

    kind: str
    ranges: tuple[tuple[int, int], ...]
    num_experts: int
    stride: int

    @classmethod
    def from_config(cls, config: PartitionNumbers, *, num_experts: int) -> ExpertPartition:
        """The table for `num_experts` experts; the same object for the same numbers.

        Raises ValueError naming E, N, size, stride and the nearest accepted pairs.
        """
        return _partition(config.dwdp_size, config.num_experts_per_worker, config.num_prefetch_experts, num_experts)

    @classmethod
    def balanced(cls, num_ranks: int, num_experts: int) -> ExpertPartition:
        """The table of ranks that divide the experts as evenly as they can. Raises ValueError as `from_config`."""
        return _partition(num_ranks, 0, 0, num_experts)

    def owner(self, expert: int) -> int:
        """The rank that serves `expert` to the others: the lowest one that stores it."""
        if not 0 <= expert < self.num_experts:
            raise ValueError(f"expert {expert} is not one of the {self.num_experts} experts")
        return next(rank for rank, (start, end) in enumerate(self.ranges) if start <= expert < end)

    def remote_runs(self, rank: int) -> list[tuple[int, int, int]]:
        """Runs (owner, start, end) that cover each expert `rank` does not store exactly once.

        In expert order; each run lies inside its owner's rows.
        """
        self._check_rank(rank)
        own_start, own_end = self.ranges[rank]
        runs = []
        served = 0  # experts below are served by lower ranks: starts and ends grow with the rank
        for owner, (_, end) in enumerate(self.ranges):
            start, served = served, end
            for low, high in ((start, min(end, own_start)), (max(start, own_end), end)):
                if low < high:
                    runs.append((owner, low, high))
        return runs

    def describe(self) -> str:
        """One line for the log, such as `balanced, 8 x 75 + 4 x 74 of 896`."""
        counts = [end - start for start, end in self.ranges]
        shares = " + ".join(f"{len(list(group))} x {count}" for count, group in groupby(counts))
        stride = f" at stride {self.stride}" if self.kind == "redundant" else ""
        return f"{self.kind}, {shares}{stride} of {self.num_experts}"

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < len(self.ranges):
            raise ValueError(f"rank {rank} is not one of the {len(self.ranges)} ranks")


@cache
def _partition(num_ranks: int, size: int, stride: int, num_experts: int) -> ExpertPartition:
    kind = _kind(num_ranks, size, stride, num_experts)
    if kind is None:
        raise ValueError(_refusal(num_ranks, size, stride, num_experts))
    if kind == "balanced":
        base, rest = divmod(num_experts, num_ranks)
        starts = [rank * base + min(rank, rest) for rank in range(num_ranks + 1)]
        ranges = tuple(zip(starts, starts[1:]))
    else:
        ranges = tuple((rank * stride, min(rank * stride + size, num_experts)) for rank in range(num_ranks))
    return ExpertPartition(kind, ranges, num_experts, stride)


def _kind(num_ranks: int, size: int, stride: int, num_experts: int) -> str | None:
    """The kind of a pair, or None when it is not accepted."""
    if num_ranks < 1 or num_experts < num_ranks:
        return None
    if (size, stride) == (0, 0):
        return "balanced"
    if size < 1 or not 1 <= stride <= size:
        return None
    if num_ranks == 1:
        return "uniform" if size == stride == num_experts else None
    if size == stride:
        if num_ranks * size == num_experts:
            return "uniform"
        return "capped" if (num_ranks - 1) * size < num_experts < num_ranks * size else None
    return "redundant" if (num_ranks - 1) * stride + size == num_experts else None


def _accepted_pairs(num_ranks: int, num_experts: int) -> list[tuple[int, int]]:
    """All accepted (size, stride) pairs. For each stride at most two sizes can be right."""
    pairs = [(0, 0)]
    for stride in range(1, num_experts + 1):
        pairs += [(size, stride) for size in {stride, num_experts - (num_ranks - 1) * stride}]
    return sorted(pair for pair in pairs if _kind(num_ranks, *pair, num_experts) is not None)


def _refusal(num_ranks: int, size: int, stride: int, num_experts: int) -> str:
    asked = (
        f"no expert partition for E={num_experts} experts on N={num_ranks} ranks with "
        f"num_experts_per_worker (size) {size} and num_prefetch_experts (stride) {stride}"
    )
    pairs = _accepted_pairs(num_ranks, num_experts) if num_ranks >= 1 else []
    if not pairs:
        return f"{asked}: every rank stores at least one expert, so N must be from 1 to E"

    def distance(pair: tuple[int, int]) -> int:
        return abs(pair[0] - size) + abs(pair[1] - stride)

    smallest = min(map(distance, pairs))
    nearest = ", ".join(f"{s}/{t}" for s, t in pairs if distance((s, t)) == smallest)
    return f"{asked}; nearest accepted size/stride: {nearest}"


@dataclass(frozen=True)
class HandleGeometry:
    """Where a rank's rows of one expert tensor lie, in bytes from expert 0's first byte.

    page_start, page_end: the range rounded outwards to the granularity. nbytes: size of the handle.
    data_offset: the first own row inside the handle.
    """

    page_start: int
    page_end: int
    nbytes: int
    data_offset: int


def handle_geometry(b: int, start: int, end: int, g: int) -> HandleGeometry:
    """Geometry of the handle for experts [start, end): `b` bytes an expert row, granularity `g` bytes.

    Serves every rank's range. Raises ValueError for an empty range or sizes that are not positive.
    """
    if b < 1 or g < 1 or not 0 <= start < end:
        raise ValueError(
            f"no handle geometry for {b} bytes a row, experts [{start}, {end}), granularity {g}: "
            "row bytes and granularity must be positive and the range not empty"
        )
    page_start = start * b // g * g
    page_end = -(-end * b // g) * g
    return HandleGeometry(page_start, page_end, page_end - page_start, start * b - page_start)
