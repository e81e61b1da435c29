"""Whether a slot holds what it should: its checksums against P1's, and where it goes wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dwdp.memory.checksum import of_zeros
from dwdp.partition.layout import Blob, DenseLayout, cuts
from dwdp.runtime.dense_schedule import slot_name
from dwdp.runtime.slots import DenseSlots
from dwdp.weights.mover import HOST_MOVER
from dwdp.weights.store import RowStore


class SlotChecker:
    """Checks slots of one rank. checksums: P1's of every blob, see `original_checksums`; mover: of the domain."""

    def __init__(
        self,
        layout: DenseLayout,
        store: RowStore,
        slots: DenseSlots,
        checksums: Sequence[list[str]],
        mover: Any = HOST_MOVER,
    ) -> None:
        self.store, self.slots, self._mover = store, slots, mover
        self._blobs = {
            (blob.pos, slot_name(blob.segment, blob.pos)): (number, blob, checksums[number])
            for number, blob in enumerate(layout.blobs)
        }

    def problem(self, pos: int, slot: str) -> str | None:
        """None, or what is wrong with the slot that should hold layer pos, as text.

        It names rank, layer, segment, slot and first wrong byte. The slot must be filled and at rest.
        """
        return self.judge(pos, slot, self._mover.sums(self.rows(pos, slot)))

    def rows(self, pos: int, slot: str) -> list[tuple[int, int]]:
        """(address, bytes) of the parts of the slot that a check sums up, for `judge`."""
        number, blob, _ = self._blobs[pos, slot]
        start = self.slots.data(number).data_ptr()
        return [(start + first, end - first) for first, end in _parts(blob)]

    def judge(self, pos: int, slot: str, sums: Sequence[int], *, at_rest: bool = True) -> str | None:
        """As `problem`, from the checksums of `rows`. at_rest: the slot still holds what they were made of; else the
        part is named that the wrong byte is in, by its first byte."""
        number, blob, checksums = self._blobs[pos, slot]
        parts = _parts(blob)
        of_cuts = [int(text, 16) for text in checksums[:-1]]
        expected = of_cuts + [of_zeros(end - first) for first, end in parts[len(of_cuts) :]]
        wrong = [part for part, found, right in zip(parts, sums, expected) if found != right]
        if not wrong:
            return None
        where = f"rank {self.store.rank}: slot {slot} does not hold the bytes of {blob.name}"
        if not at_rest:
            first = min(wrong)[0]
            row = first // blob.row_nbytes
            return f"{where}; a wrong byte is behind {first} ({blob.locate(first)}, row of rank {row})"
        mover, address = self._mover, self.slots.data(number).data_ptr()
        for peer in range(blob.num_rows):
            start, nbytes = peer * blob.row_nbytes, blob.row_nbytes
            copied, row = mover.read(address + start, nbytes), mover.read(self.store.address(peer, number), nbytes)
            if copied != row:
                at = start + next(i for i in range(nbytes) if copied[i] != row[i])
                return f"{where}; the first wrong byte is {at} ({blob.locate(at)}, row of rank {peer})"
        return f"{where}; it equals the ranks' rows, so a row itself has changed since set-up"


def _parts(blob: Blob) -> list[tuple[int, int]]:
    """[first, end) of each cut, then of each stretch of pad between and behind them."""
    found = [(cut.start, cut.end) for cut in cuts(blob)]
    gaps = zip([0, *(end for _, end in found)], [*(first for first, _ in found), blob.nbytes])
    return [*found, *((first, end) for first, end in gaps if first < end)]
