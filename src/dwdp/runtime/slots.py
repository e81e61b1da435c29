"""Staging slots of the dense weights: two for attention, three for the MoE block's dense part."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dwdp.partition.layout import DenseLayout, StorageSpec, ViewSpec
from dwdp.runtime.dense_schedule import SLOT_COUNTS, slot_name
from dwdp.weights.plan import CopyPlan, CopySlice, round_up
from dwdp.weights.store import RowStore

NAN_BYTE = 0xFF  # a run of these is NaN in every float type from fp8 to fp64


def slot_bytes(layout: DenseLayout, granularity: int) -> int:
    """What all slots of a layout allocate, rounding included."""
    sizes = {segment: layout.largest(segment) for segment in SLOT_COUNTS}
    return sum(count * round_up(sizes[s], granularity) for s, count in SLOT_COUNTS.items())


@dataclass
class Slot:
    """One slot: `data` is uint8 [largest blob of its segment], over own memory that is not exported."""

    name: str
    data: torch.Tensor
    address: int


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
        granularity = self.domain.granularity
        for segment, count in SLOT_COUNTS.items():
            largest = self.layout.largest(segment)
            for i in range(count if largest else 0):
                nbytes = round_up(largest, granularity)
                handle = self.domain.create(nbytes, f"dense-{segment}{i}")
                self._handles.append(handle)
                area = self.domain.reserve(nbytes)
                self._ranges.append(area)
                self.domain.map(area, 0, handle, writable=True)
                self.domain.seal(handle)
                handle.close_fd()  # never exported
                data = self.domain.tensor(area, 0, (largest,), torch.uint8)
                self.slots[f"{segment}{i}"] = Slot(f"{segment}{i}", data, area.address)
                self.nbytes += nbytes

    def view(self, slot: str, storage: StorageSpec, spec: ViewSpec) -> torch.Tensor:
        """The tensor over a slot that stands for one view of a storage: same dtype, shape and stride."""
        dtype = getattr(torch, spec.dtype.removeprefix("torch."))
        offset = storage.offset // dtype.itemsize + spec.offset
        base = self.slots[slot].data.untyped_storage()
        return torch.empty(0, dtype=dtype, device=base.device).set_(base, offset, spec.shape, spec.stride)

    def storage_bytes(self, slot: str, storage: StorageSpec) -> torch.Tensor:
        """uint8 [storage.nbytes]: where a storage lies in a slot."""
        return self.slots[slot].data[storage.offset : storage.offset + storage.nbytes]

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


def gather_plans(layout: DenseLayout, store: RowStore, slots: DenseSlots) -> list[dict[str, CopyPlan]]:
    """For each pos: slot -> the plan that copies every rank's row, this rank's own included, into the slot.

    One plain copy a row. Peers come first, from the next rank on, so that ranks do not all read the same one.
    """
    plans: list[dict[str, CopyPlan]] = [{} for _ in range(layout.num_layers)]
    ranks = [(store.rank + i) % layout.num_ranks for i in range(1, layout.num_ranks + 1)]
    for number, blob in enumerate(layout.blobs):
        name = slot_name(blob.segment, blob.pos)
        start = slots.slots[name].address
        slices = tuple(
            CopySlice(start + peer * blob.row_nbytes, store.address(peer, number), blob.row_nbytes, peer)
            for peer in ranks
        )
        plans[blob.pos][name] = CopyPlan(slices, blob.nbytes)
    return plans
