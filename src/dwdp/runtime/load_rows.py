"""Loading dense weights straight into rows (`load: sharded`): a model whose dense weights do not fit whole starts.

[Note: no originals] The layout is known before a byte is read, so the rows are allocated then. Each tensor that moves
is read whole, one at a time; its checksum is kept, the part that lies in this rank's row is written there, and the
rest is dropped. The module keeps a tensor without bytes (on the meta device) until set-up points it into a slot.
Set-up has checksums to compare with and no originals, and cannot put any back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

from dwdp.errors import DwdpError
from dwdp.partition.collect import Collected, collect
from dwdp.partition.layout import checksum
from dwdp.weights.store import RowStore

Sink = Callable[[torch.Tensor], None]


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

    collected: of the model on the meta device. sinks: parameter's name -> what takes its values, once.
    """

    def __init__(self, model: nn.Module, config, domain, group) -> None:
        """Allocates; without a collective. Raises what an allocation raises, with nothing left."""
        self.collected = collect_dense(model, config, group.size, without_bytes=True)
        self.store = new_row_store(domain, self.collected.layout, config, group.rank)
        self._checksums: dict[tuple[int, int], str] = {}
        self.sinks: Mapping[str, Sink] = self._find_sinks(model)
        try:
            if self.collected.layout.blobs:
                self.store.allocate()
        except BaseException:
            self.store.close()
            raise

    def _find_sinks(self, model: nn.Module) -> dict[str, Sink]:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        sinks = {}
        for number, blob in enumerate(self.collected.layout.blobs):
            for i, bindings in enumerate(self.collected.bindings[number]):
                tensor = bindings[0].tensor
                whole = tensor.is_contiguous() and tensor.numel() * tensor.itemsize == blob.storages[i].nbytes
                if id(tensor) not in names or not whole or any(other.tensor is not tensor for other in bindings):
                    raise DwdpError(
                        f"dense DWDP: {bindings[0].name} is not one whole parameter and cannot be loaded straight into "
                        "rows; use load: whole"
                    )
                sinks[names[id(tensor)]] = partial(self._take, number, i)
        return sinks

    def _take(self, number: int, i: int, values: torch.Tensor) -> None:
        data = values.detach().reshape(-1).view(torch.uint8)
        self._checksums[number, i] = checksum(data)
        self.store.write_storage(number, i, data)

    def checksums(self, number: int) -> list[str]:
        """As `layout.original_checksums`. DwdpError for a tensor that was never loaded."""
        blob = self.collected.layout.blobs[number]
        for i, storage in enumerate(blob.storages):
            if (number, i) not in self._checksums:
                raise DwdpError(f"dense DWDP: {storage.name} was not loaded into its row")
        pad = torch.zeros(blob.nbytes - blob.moved_nbytes, dtype=torch.uint8)
        return [self._checksums[number, i] for i in range(len(blob.storages))] + [checksum(pad)]

    def close(self) -> None:
        """Gives the rows back; for a load that failed."""
        self.sinks = {}
        self.store.close()
