"""Whether a slot holds what it should: its checksum against P1's, and where it goes wrong."""

from __future__ import annotations

from collections.abc import Sequence

from dwdp.partition.layout import DenseLayout, first_difference, gathered_checksums
from dwdp.runtime.dense_schedule import slot_name
from dwdp.runtime.slots import DenseSlots
from dwdp.weights.store import RowStore


class SlotChecker:
    """Checks slots of one rank. checksums: P1's of every blob, see `original_checksums`."""

    def __init__(self, layout: DenseLayout, store: RowStore, slots: DenseSlots, checksums: Sequence[list[str]]) -> None:
        self.store, self.slots = store, slots
        self._blobs = {
            (blob.pos, slot_name(blob.segment, blob.pos)): (number, blob, checksums[number])
            for number, blob in enumerate(layout.blobs)
        }

    def problem(self, pos: int, slot: str) -> str | None:
        """None, or what is wrong with the slot that should hold layer pos, as text.

        It names rank, layer, segment, slot and first wrong byte. The slot must be filled and at rest.
        """
        number, blob, checksums = self._blobs[pos, slot]
        data = self.slots.data(number)
        if gathered_checksums(blob, data) == checksums:
            return None
        where = f"rank {self.store.rank}: slot {slot} does not hold the bytes of {blob.name}"
        for peer in range(blob.num_rows):
            start = peer * blob.row_nbytes
            at = first_difference(data[start : start + blob.row_nbytes], self.store.row(peer, number))
            if at is not None:
                found = f"{start + at} ({blob.locate(start + at)}, row of rank {peer})"
                return f"{where}; the first wrong byte is {found}"
        return f"{where}; it equals the ranks' rows, so a row itself has changed since set-up"
