"""The prefetch ring: min(S, L) slots of pages that the layers' composite ranges map in turn."""

from __future__ import annotations

from collections.abc import Sequence

from dwdp.errors import PrefetchRingMemoryError
from dwdp.memory.pages import PagePool
from dwdp.weights.transport import OwnTable


class PrefetchRing:
    """Slots of pages. Layer `pos` uses slot pos mod S; every layer of a slot maps the slot's pages.

    layers: per managed layer its tables, whose composite ranges are reserved. Pages are made by `allocate`.
    """

    def __init__(self, domain, layers: Sequence[Sequence[OwnTable]], num_slots: int) -> None:
        self.domain = domain
        self.page_bytes = domain.page_bytes
        self.num_slots = min(num_slots, len(layers))
        self._places = [
            [(table, offset) for table in tables for offset in table.geometry.page_offsets(self.page_bytes)]
            for tables in layers
        ]
        # A slot serves the layer that needs most.
        self.slot_pages = [
            max(len(places) for places in self._places[slot :: self.num_slots]) for slot in range(self.num_slots)
        ]
        self._pool = PagePool(domain)

    @property
    def slot_nbytes(self) -> list[int]:
        """Bytes of each slot."""
        return [pages * self.page_bytes for pages in self.slot_pages]

    @property
    def nbytes(self) -> int:
        """Bytes of all pages that were allocated."""
        return self._pool.nbytes

    def check_fits(self, free_bytes: int, remedies: Sequence[str]) -> None:
        """Raises PrefetchRingMemoryError unless the whole ring fits `free_bytes`; before the first page."""
        if sum(self.slot_nbytes) > free_bytes:
            raise PrefetchRingMemoryError(self.slot_nbytes, free_bytes, list(remedies))

    def allocate(self) -> None:
        """Makes every page and maps it into each layer of its slot.

        Page by page, so that a page's descriptor is open only until its last layer has mapped it. On failure
        `close` releases every page once.
        """
        for slot, num_pages in enumerate(self.slot_pages):
            layers = self._places[slot :: self.num_slots]
            for index in range(num_pages):
                (page,) = self._pool.allocate(1, f"ring-{slot}")
                for places in layers:
                    if index < len(places):
                        table, offset = places[index]
                        self.domain.map(table.area, offset, page, writable=True)
                page.close_fd()

    def close(self) -> None:
        """Releases every page; the composite ranges that map them are the transport's to free. Idempotent."""
        self._pool.close()
