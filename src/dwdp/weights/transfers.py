"""Three ways to submit what a layer's copy moves, each from the same list of runs. No memory is touched.

    per_slice   one plain copy a run
    batched     one submission of slices, dealt round-robin over the peers (`contention_opt`)
    gather      one launch of a kernel over a table with one row a peer (`prefetch_gather`)

They move the same bytes. A rank's own rows, which dense blobs have, are one plain copy each in all three: inside one
GPU, batched pieces of 2 MiB run at a quarter of the speed of a plain copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dwdp.weights.plan import CopyPlan, CopySlice, Descriptor, GatherRow, GatherTable, round_up

TRANSFERS = ("per_slice", "batched", "gather")
KERNELS = ("tma", "ldst")

SLICE_UNIT_BYTES = 2 << 20
MAX_SLICES = 512
"""Measured between two H200: a batch of 2 MiB slices moves at the full 374 GB/s, and 512 slices take the host 640 us;
larger ones are no faster, and finer ones would cost the host more than a layer has."""

TILE_BYTES = 32 << 10
"""What a resident block of threads moves at a time. Measured with stages of this size: 8 blocks reach 333 GB/s."""


@dataclass(frozen=True)
class Transfer:
    """How copies are submitted. kernel: of the gather, tma or ldst; None with the others."""

    name: str = "per_slice"
    kernel: str | None = None

    @classmethod
    def named(cls, name: str, gather_kernel: str = "auto") -> Transfer:
        """name: of TRANSFERS. gather_kernel: tma, ldst or auto, which is tma; read by the gather alone.

        Raises ValueError for another name or kernel.
        """
        kernel = "tma" if gather_kernel == "auto" else gather_kernel
        if name not in TRANSFERS or kernel not in KERNELS:
            raise ValueError(
                f"no transfer {name!r} with gather kernel {gather_kernel!r}: transfers are {', '.join(TRANSFERS)}, "
                f"kernels auto, {', '.join(KERNELS)}"
            )
        return cls(name, kernel if name == "gather" else None)

    def __str__(self) -> str:
        return self.name if self.kernel is None else f"{self.name} ({self.kernel})"

    def plan(self, runs: Sequence[CopySlice], *, rank: int, num_ranks: int, pos: int) -> CopyPlan:
        """The plan of one copy of layer `pos` on `rank`; the peers' runs go first, own rows are plain copies."""
        own = tuple(run for run in runs if run.peer == rank)
        remote = [run for run in runs if run.peer != rank]
        nbytes = sum(run.nbytes for run in runs)
        peers = peers_in_turn(rank, num_ranks, pos)
        if self.name == "batched":
            return CopyPlan(own, nbytes, batch=deal(remote, peers))
        if self.name == "gather":
            return CopyPlan(own, nbytes, gather=gather_table(remote, peers, self.kernel, TILE_BYTES))
        return CopyPlan((*remote, *own), nbytes)

    def describe(self, plans: Sequence[CopyPlan]) -> str:
        """One line on the largest of `plans`, for the log."""
        if self.name == "batched":
            slices = max(len(plan.batch) for plan in plans)
            largest = max(piece.nbytes for plan in plans for piece in plan.batch)
            return f"{self}, one submission a layer, at most {slices} slices of at most {largest} bytes"
        if self.name == "gather":
            rows = max(len(plan.gather.rows) for plan in plans)
            descriptors = max(len(plan.gather.descriptors) for plan in plans)
            return (
                f"{self}, one launch a layer over at most {descriptors} runs in {rows} rows, tiles of "
                f"{plans[0].gather.tile_nbytes} bytes"
            )
        return f"{self}, at most {max(len(plan.slices) for plan in plans)} copies a layer"


PER_SLICE = Transfer()


def peers_in_turn(rank: int, num_ranks: int, pos: int = 0) -> list[int]:
    """The other ranks in cyclic order from `rank + 1`, turned by one peer from layer to layer.

    At any pos the ranks begin at peers that are all different.
    """
    others = num_ranks - 1
    return [(rank + 1 + (pos + i) % others) % num_ranks for i in range(others)]


def slice_bytes(runs: Sequence[CopySlice]) -> int:
    """The smallest multiple of 2 MiB that cuts `runs` into at most MAX_SLICES slices; at most one run is one slice.

    More runs than MAX_SLICES cannot be cut into fewer: then no run is cut.
    """
    sizes = [run.nbytes for run in runs]
    longest = round_up(max(sizes, default=0), SLICE_UNIT_BYTES)
    nbytes = max(SLICE_UNIT_BYTES, round_up(-(-sum(sizes) // MAX_SLICES), SLICE_UNIT_BYTES))
    while nbytes < longest and sum(-(-size // nbytes) for size in sizes) > MAX_SLICES:
        nbytes += SLICE_UNIT_BYTES
    return nbytes


def deal(runs: Sequence[CopySlice], peers: Sequence[int]) -> tuple[CopySlice, ...]:
    """The runs cut into slices, one from each peer in turn until none has any left."""
    largest = slice_bytes(runs)
    waiting: dict[int, deque[CopySlice]] = {peer: deque() for peer in peers}
    for run in runs:
        for at in range(0, run.nbytes, largest):
            nbytes = min(largest, run.nbytes - at)
            waiting[run.peer].append(CopySlice(run.dst + at, run.src + at, nbytes, run.peer))
    dealt = []
    while any(waiting.values()):
        dealt += [pieces.popleft() for pieces in waiting.values() if pieces]
    return tuple(dealt)


def gather_table(runs: Sequence[CopySlice], peers: Sequence[int], kernel: str, tile_nbytes: int) -> GatherTable:
    """One row for each peer that has a run, in the order of `peers`."""
    rows, descriptors = [], []
    for peer in peers:
        first, tiles = len(descriptors), 0
        for run in runs:
            if run.peer == peer and run.nbytes:
                descriptors.append(Descriptor(run.dst, run.src, run.nbytes, tiles))
                tiles += -(-run.nbytes // tile_nbytes)
        if tiles:
            rows.append(GatherRow(peer, first, len(descriptors), tiles))
    return GatherTable(tuple(rows), tuple(descriptors), tile_nbytes, kernel)
