"""Loading dense weights straight into rows (`load: sharded`): a model whose dense weights do not fit whole starts.

[Note: no originals] The layout is known before a byte is read, so the rows are allocated then. Of each tensor that
moves a rank reads only the part that lies in its row: straight into the row where the file has the parameter's dtype,
else by way of memory that is dropped at once. It keeps the part's checksum. The module keeps a tensor without bytes (on
the meta device) until set-up points it into a slot. Set-up has every rank's checksums to compare with and no originals,
and cannot put any back.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from dwdp.errors import DwdpError
from dwdp.partition.collect import Collected, collect
from dwdp.partition.layout import cuts, pad_checksum
from dwdp.partition.parts import Part
from dwdp.weights.mover import mover_of
from dwdp.weights.store import RowStore


def collect_dense(model: nn.Module, config, num_ranks: int, *, without_bytes: bool = False) -> Collected:
    """What moves of `model` under the switches of a DenseConfig."""
    return collect(
        model,
        num_ranks=num_ranks,
        segments=config.segments,
        min_bytes=config.min_bytes,
        strict=config.strict,
        roots=config.roots,
        without_bytes=without_bytes,
    )


def new_row_store(domain, layout, config, rank: int) -> RowStore:
    """The store of a rank's rows as a DenseConfig asks for it, nothing allocated."""
    mapped = config.own_rows == "map"
    return RowStore(domain, layout, rank, chunk_bytes=config.store_chunk_mb << 20, mapped=mapped)


class LoadedRows:
    """Rows that a model's dense weights are loaded into; goes to a set-up, or is closed. `close` is idempotent.

    collected: of the model on the meta device. parts: parameter's name -> the part that this rank reads, in place of
    memory in the model.
    """

    def __init__(self, model: nn.Module, config, domain, group) -> None:
        """Allocates; without a collective. Raises what an allocation raises, with nothing left."""
        self.collected = collect_dense(model, config, group.size, without_bytes=True)
        self.store = new_row_store(domain, self.collected.layout, config, group.rank)
        self._mover = mover_of(domain)
        self._checksums: dict[tuple[int, int], str] = {}
        self.parts: dict[str, Part] = self._find_parts(model)
        try:
            if self.collected.layout.blobs:
                self.store.allocate()
        except BaseException:
            self.store.close()
            raise

    def _find_parts(self, model: nn.Module) -> dict[str, Part]:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        parts = {}
        for number, blob in enumerate(self.collected.layout.blobs):
            own = {cut.storage: cut for cut in cuts(blob) if cut.row == self.store.rank}
            for i, bindings in enumerate(self.collected.bindings[number]):
                tensor, storage = bindings[0].tensor, blob.storages[i]
                whole = tensor.is_contiguous() and tensor.numel() * tensor.itemsize == storage.nbytes
                if id(tensor) not in names or not whole or any(other.tensor is not tensor for other in bindings):
                    raise DwdpError(
                        f"dense DWDP: {bindings[0].name} is not one whole parameter and cannot be loaded straight into "
                        "rows; use load: whole"
                    )
                start = end = 0
                if i in own:  # rows and storages begin at multiples of 256 bytes, so no element is cut
                    start, end = ((at - storage.offset) // tensor.itemsize for at in (own[i].start, own[i].end))
                room = partial(self.store.part, number, i)
                parts[names[id(tensor)]] = Part(start, end, partial(self._take, number, i), room)
        return parts

    def _take(self, number: int, i: int, values: torch.Tensor) -> None:
        data = values.detach().reshape(-1).view(torch.uint8)
        self._checksums[number, i] = self._mover.tensor_sum(data)
        if data.data_ptr() != self.store.part(number, i).data_ptr():  # else it was read there
            self.store.write_part(number, i, data)

    def checksums(self) -> list[list[str]]:
        """For each blob: of the cuts in this rank's row, in order. DwdpError for one that was never loaded."""
        found = []
        for number, blob in enumerate(self.collected.layout.blobs):
            own = [cut for cut in cuts(blob) if cut.row == self.store.rank]
            for cut in own:
                if (number, cut.storage) not in self._checksums:
                    raise DwdpError(f"dense DWDP: {blob.storages[cut.storage].name} was not loaded into its row")
            found.append([self._checksums[number, cut.storage] for cut in own])
        return found

    def close(self) -> None:
        """Gives the rows back; for a load that failed."""
        self.parts = {}
        self.store.close()


def all_checksums(layout, of_ranks: list[list[list[str]]]) -> list[list[str]]:
    """As `original_checksums` of every blob, from what each rank has of its own row."""
    found = []
    for number, blob in enumerate(layout.blobs):
        left = [iter(sums[number]) for sums in of_ranks]
        found.append([*(next(left[cut.row]) for cut in cuts(blob)), pad_checksum(blob)])
    return found
