"""The dense part of a plan: what a rank stores, stages and still holds whole, and what a layer's gather pulls.

The layout is computed as set-up computes it, and cut into handles and slots by set-up's own functions. No torch.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from functools import cached_property

from dwdp.memory.pages import fit_page_bytes
from dwdp.model.config import ModelConfig
from dwdp.model.dense_shapes import DenseShapes, dense_shapes
from dwdp.partition.layout import DenseLayout
from dwdp.runtime.dense_schedule import SLOT_COUNTS
from dwdp.runtime.slots import mapped_slot_bytes, slot_bytes
from dwdp.weights.store import count_mapped_rows, single_rows, store_chunks

EXPERT_FACTORS = "per-expert factors of all experts"


PAGE_GRANULES = 8
"""Of a slot's pages where own rows are mapped in place, as of the ring's."""


@dataclass(frozen=True)
class DenseRank:
    """One rank. handles: bytes of each own handle, rounding included. mappings: own and peers' handles, and slots or
    their pages."""

    handles: tuple[int, ...]
    slot_bytes: int
    mappings: int

    @property
    def stored_bytes(self) -> int:
        return sum(self.handles)

    @property
    def nbytes(self) -> int:
        return self.stored_bytes + self.slot_bytes


@dataclass(frozen=True)
class DensePlan:
    """Dense DWDP on N ranks. gathered_bytes: what peers send for a mean MoE layer.

    Ranks are alike, but for own rows mapped in place, whose handles begin and end in granules of their neighbours'.
    page_bytes: of slots then, else None; chunk_nbytes: see `store_chunks`; granularity: of handles, in bytes.
    """

    layout: DenseLayout
    a_kda_bytes: int
    a_mla_bytes: int
    d_bytes: int
    moved_bytes: int
    replicated_bytes: int
    gathered_bytes: float
    granularity: int
    chunk_nbytes: int
    page_bytes: int | None

    def rank(self, rank: int) -> DenseRank:
        """What `rank` allocates and maps; set-up's own arithmetic."""
        if self.page_bytes is not None:
            where = (self.layout, rank, self.granularity, self.page_bytes)
            handles = tuple(chunk.nbytes for chunk in single_rows(self.layout, rank, self.granularity))
            return DenseRank(handles, mapped_slot_bytes(*where), count_mapped_rows(*where))
        handles = tuple(chunk.nbytes for chunk in store_chunks(self.layout, self.chunk_nbytes, self.granularity))
        num_slots = sum(count for segment, count in SLOT_COUNTS.items() if self.layout.largest(segment))
        slots = slot_bytes(self.layout, self.granularity)
        return DenseRank(handles, slots, self.layout.num_ranks * len(handles) + num_slots)

    @cached_property
    def fullest(self) -> DenseRank:
        """The rank whose rows and slots take most, the lowest of several."""
        if self.page_bytes is None:
            return self.rank(0)
        return max(map(self.rank, range(self.layout.num_ranks)), key=lambda rank: rank.nbytes)

    @cached_property
    def mappings(self) -> int:
        """Of the rank that has most."""
        if self.page_bytes is None:
            return self.fullest.mappings
        where = (self.granularity, self.page_bytes)
        return max(count_mapped_rows(self.layout, rank, *where) for rank in range(self.layout.num_ranks))

    def held_bytes(self, rank: int) -> int:
        """What `rank` holds of everything but the routed experts."""
        return self.rank(rank).nbytes + self.replicated_bytes

    def document(self) -> dict[str, int]:
        """The `dense` part of `--json`; rows and slots are those of the fullest rank."""
        own = {"stored_bytes": self.fullest.stored_bytes, "slot_bytes": self.fullest.slot_bytes}
        names = "a_kda_bytes a_mla_bytes d_bytes moved_bytes".split()
        return {name: getattr(self, name) for name in names} | own | {"replicated_bytes": self.replicated_bytes}


@dataclass(frozen=True)
class DenseSizes:
    """What a plan needs of a model and of `dense_dwdp`. kinds: "A kda", "A mla", "D" -> layers and bytes of one.

    stays: why -> bytes that every rank keeps whole; whole_nbytes: of everything but the routed experts.
    """

    shapes: DenseShapes
    kinds: dict[str, tuple[int, int]]
    stays: dict[str, int]
    whole_nbytes: int
    num_layers: int
    chunk_nbytes: int
    mapped: bool

    @classmethod
    def of(cls, config: ModelConfig, settings, *, factor_nbytes: int, kept_fp8: Container[str] = ()) -> DenseSizes:
        """settings: a DenseConfig. factor_nbytes: of the small per-expert tensors, all layers. kept_fp8: see
        `dense_shapes`."""
        shapes = dense_shapes(config, segments=settings.segments, min_bytes=settings.min_bytes, kept_fp8=kept_fp8)
        kinds: dict[str, tuple[int, int]] = {}
        for blob in shapes.layout.blobs:
            kind = f"A {config.layer_kind(blob.layer_index)}" if blob.segment == "A" else "D"
            kinds[kind] = (kinds.get(kind, (0, 0))[0] + 1, blob.moved_nbytes)
        stays = shapes.stays | ({EXPERT_FACTORS: factor_nbytes} if factor_nbytes else {})
        return cls(
            shapes=shapes,
            kinds=kinds,
            stays=stays,
            whole_nbytes=shapes.layout.moved_nbytes + sum(stays.values()),
            num_layers=len(config.moe_layer_indices),
            chunk_nbytes=settings.store_chunk_mb << 20,
            mapped=settings.own_rows == "map",
        )

    def on(
        self, num_ranks: int, granularity: int, *, page_bytes: int | None = None, mapping_budget: int | None = None
    ) -> DensePlan:
        """granularity: bytes that a handle's size is a multiple of. page_bytes: that slots' pages start from, unset:
        PAGE_GRANULES granules. mapping_budget: for all that dense DWDP maps on a rank, unset: without a limit.

        Raises MemoryBudgetError where own rows are mapped in place and no page keeps the budget.
        """
        layout = self.shapes.layout_of(num_ranks)
        page = None
        if self.mapped:
            page = PAGE_GRANULES * granularity if page_bytes is None else page_bytes
            if mapping_budget is not None:
                page = _fit_page(layout, granularity, page, mapping_budget)
        nbytes_of = {kind: nbytes for kind, (_, nbytes) in self.kinds.items()}
        return DensePlan(
            layout=layout,
            a_kda_bytes=nbytes_of.get("A kda", 0),
            a_mla_bytes=nbytes_of.get("A mla", 0),
            d_bytes=nbytes_of.get("D", 0),
            moved_bytes=layout.moved_nbytes,
            replicated_bytes=self.whole_nbytes - layout.moved_nbytes,
            gathered_bytes=sum(blob.nbytes - blob.row_nbytes for blob in layout.blobs) / self.num_layers,
            granularity=granularity,
            chunk_nbytes=self.chunk_nbytes,
            page_bytes=page,
        )


def _fit_page(layout: DenseLayout, granularity: int, page_bytes: int, budget: int) -> int:
    """One page size for all ranks: that of the rank with most mappings."""
    # A bound that is cheap, for plans of many ranks: a range has less than two pages over what its blob fills.
    most = sum(layout.num_ranks + blob.nbytes // page_bytes + 3 for blob in layout.blobs)
    if most <= budget:
        return page_bytes

    def mappings(page: int) -> int:
        return max(count_mapped_rows(layout, rank, granularity, page) for rank in range(layout.num_ranks))

    return fit_page_bytes(page_bytes, mappings, budget)
