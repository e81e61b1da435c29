"""Staging slots of the dense weights: two for attention, three for the MoE block's dense part.

A blob lies in its slot whole, or, with own rows mapped in place, in a range of its own that the slot's pages and its
row's handle make up; see [Note: own rows in place].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dwdp.memory.pages import PagePool
from dwdp.partition.layout import DenseLayout, StorageSpec, ViewSpec
from dwdp.runtime.dense_schedule import SLOT_COUNTS, slot_name
from dwdp.weights.plan import CopyPlan, CopySlice, round_up
from dwdp.weights.store import RowStore, row_composite
from dwdp.weights.transfers import Transfer, peers_in_turn

if TYPE_CHECKING:
    import torch

NAN_BYTE = 0xFF  # a run of these is NaN in every float type from fp8 to fp64


def slot_bytes(layout: DenseLayout, granularity: int) -> int:
    """What all slots of a layout allocate, rounding included, where own rows are copied."""
    sizes = {segment: layout.largest(segment) for segment in SLOT_COUNTS}
    return sum(count * round_up(sizes[s], granularity) for s, count in SLOT_COUNTS.items())


def page_places(
    layout: DenseLayout, rank: int, granularity: int, page_bytes: int
) -> dict[str, list[tuple[int, list[int]]]]:
    """Slot -> (blob number, offsets of slot pages in its range) of each of its blobs: own rows mapped in place."""
    places: dict[str, list[tuple[int, list[int]]]] = {}
    for number, blob in enumerate(layout.blobs):
        offsets = row_composite(layout, number, rank, granularity, page_bytes).page_offsets(page_bytes)
        places.setdefault(slot_name(blob.segment, blob.pos), []).append((number, offsets))
    return places


def mapped_slot_bytes(layout: DenseLayout, rank: int, granularity: int, page_bytes: int) -> int:
    """What all slots of `rank` allocate where own rows are mapped in place: pages for the blob that needs most."""
    places = page_places(layout, rank, granularity, page_bytes)
    return page_bytes * sum(max(len(offsets) for _, offsets in blobs) for blobs in places.values())


@dataclass
class Slot:
    """One slot: `data` is uint8 [largest blob of its segment], over own memory that is not exported."""

    name: str
    data: torch.Tensor


class DenseSlots:
    """Owns the slots, by name: A0, A1, D0, D1, D2. A context manager; `close()` is idempotent."""

    def __init__(self, domain, layout: DenseLayout) -> None:
        self.domain, self.layout = domain, layout
        self.slots: dict[str, Slot] = {}
        self.nbytes = 0
        self._handles: list = []
        self._ranges: list = []

    def allocate(self) -> None:
        """Creates and maps every slot; the caller closes the slots when this raises."""
        import torch

        granularity = self.domain.granularity
        for segment, count in SLOT_COUNTS.items():
            largest = self.layout.largest(segment)
            for i in range(count if largest else 0):
                nbytes, name = round_up(largest, granularity), slot_name(segment, i)
                handle = self.domain.create(nbytes, f"dense-{name}", exportable=False)
                self._handles.append(handle)
                area = self.domain.reserve(nbytes)
                self._ranges.append(area)
                self.domain.map(area, 0, handle, writable=True)
                self.domain.seal(handle)
                handle.close_fd()  # never exported
                data = self.domain.tensor(area, 0, (largest,), torch.uint8)
                self.slots[name] = Slot(name, data)
                self.nbytes += nbytes

    def data(self, number: int) -> torch.Tensor:
        """uint8 [blob.nbytes]: where a blob lies when its slot holds it."""
        blob = self.layout.blobs[number]
        return self.slots[slot_name(blob.segment, blob.pos)].data[: blob.nbytes]

    def view(self, number: int, storage: StorageSpec, spec: ViewSpec) -> torch.Tensor:
        """The tensor over a blob's place that stands for one view of a storage: same dtype, shape and stride."""
        import torch

        dtype = getattr(torch, spec.dtype.removeprefix("torch."))
        offset = storage.offset // dtype.itemsize + spec.offset
        base = self.data(number).untyped_storage()
        return torch.empty(0, dtype=dtype, device=base.device).set_(base, offset, spec.shape, spec.stride)

    def fill_with_nan(self) -> None:
        """Makes every read before a copy show itself."""
        for slot in self.slots.values():
            slot.data.fill_(NAN_BYTE)

    def close(self) -> None:
        """Unmaps and releases every slot. Tensors over a slot must not be read any more."""
        self.slots = {}
        while self._ranges:
            self.domain.free(self._ranges.pop())
        while self._handles:
            self.domain.release(self._handles.pop())

    def __enter__(self) -> DenseSlots:
        return self

    def __exit__(self, *exc) -> None:
        self.close()


class MappedSlots(DenseSlots):
    """Slots of pages, with each blob's own row in place. The ranges are the store's, which must be allocated."""

    def __init__(self, store: RowStore) -> None:
        super().__init__(store.domain, store.layout)
        self.store = store
        self._pool = PagePool(store.domain)
        self._pages: list[torch.Tensor] = []  # of each page one mapping
        self._data: dict[int, torch.Tensor] = {}

    def allocate(self) -> None:
        """Makes every page and maps it into the range of each blob of its slot, then lays the blobs' tensors."""
        import torch

        domain, store, page_bytes = self.domain, self.store, self.domain.page_bytes
        for slot, blobs in page_places(store.layout, store.rank, domain.granularity, page_bytes).items():
            for index in range(max(len(offsets) for _, offsets in blobs)):
                (page,) = self._pool.allocate(1, f"dense-{slot}")
                for number, offsets in blobs:
                    if index < len(offsets):
                        area = store.ranges[store.rank, number]
                        domain.map(area, offsets[index], page, writable=True)
                        last = (area, offsets[index])
                self._pages.append(domain.tensor(*last, (page_bytes,), torch.uint8))
                page.close_fd()  # never exported
        self.nbytes = self._pool.nbytes
        for number, blob in enumerate(self.layout.blobs):
            padding = store.composite(number, page_bytes).padding
            area = store.ranges[store.rank, number]
            self._data[number] = domain.tensor(area, padding, (blob.nbytes,), torch.uint8)

    def data(self, number: int) -> torch.Tensor:
        return self._data[number]

    def fill_with_nan(self) -> None:
        for page in self._pages:
            page.fill_(NAN_BYTE)

    def close(self) -> None:
        self._pages, self._data = [], {}
        self._pool.close()


def gather_plans(
    layout: DenseLayout, store: RowStore, slots: DenseSlots, transfer: Transfer
) -> list[dict[str, CopyPlan]]:
    """For each pos: slot -> the plan that copies every rank's row into the slot, this rank's own too unless it is
    mapped in place.

    Peers come first, from the next rank on, so that ranks do not all read the same one; own rows last.
    """
    plans: list[dict[str, CopyPlan]] = [{} for _ in range(layout.num_layers)]
    ranks = [*peers_in_turn(store.rank, layout.num_ranks), store.rank]
    for number, blob in enumerate(layout.blobs):
        name = slot_name(blob.segment, blob.pos)
        start = slots.data(number).data_ptr()
        rows = [
            CopySlice(start + rank * blob.row_nbytes, store.address(rank, number), blob.row_nbytes, rank)
            for rank in ranks
            if not (store.mapped and rank == store.rank)
        ]
        plans[blob.pos][name] = transfer.plan(rows, rank=store.rank, num_ranks=layout.num_ranks, pos=blob.pos)
    return plans
