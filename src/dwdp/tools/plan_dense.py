"""The dense part of a plan: what a rank stores, stages and still holds whole, and what a layer's gather pulls.

The layout is computed as set-up computes it, and cut into handles and slots by set-up's own functions. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from dwdp.model.config import ModelConfig
from dwdp.model.dense_shapes import DenseShapes, dense_shapes
from dwdp.partition.layout import DenseLayout
from dwdp.runtime.dense_schedule import SLOT_COUNTS
from dwdp.runtime.slots import slot_bytes
from dwdp.weights.store import store_chunks

EXPERT_FACTORS = "per-expert factors of all experts"


@dataclass(frozen=True)
class DensePlan:
    """Dense DWDP on every rank of N; all ranks are alike. gathered_bytes: what peers send for a mean MoE layer.

    mappings: own handles, peers' handles and slots. handles: bytes of each own handle, rounding included.
    """

    layout: DenseLayout
    a_kda_bytes: int
    a_mla_bytes: int
    d_bytes: int
    moved_bytes: int
    stored_bytes: int
    slot_bytes: int
    replicated_bytes: int
    gathered_bytes: float
    handles: tuple[int, ...]
    mappings: int

    @property
    def held_bytes(self) -> int:
        """What a rank holds of everything but the routed experts."""
        return self.stored_bytes + self.slot_bytes + self.replicated_bytes

    def document(self) -> dict[str, int]:
        """The `dense` part of `--json`."""
        names = "a_kda_bytes a_mla_bytes d_bytes moved_bytes stored_bytes slot_bytes replicated_bytes"
        return {name: getattr(self, name) for name in names.split()}


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

    @classmethod
    def of(cls, config: ModelConfig, settings, *, factor_nbytes: int) -> DenseSizes:
        """settings: a DenseConfig. factor_nbytes: of the small per-expert tensors, all layers."""
        shapes = dense_shapes(config, segments=settings.segments, min_bytes=settings.min_bytes)
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
        )

    def on(self, num_ranks: int, granularity: int) -> DensePlan:
        """granularity: bytes that a handle's size is a multiple of."""
        layout = self.shapes.layout_of(num_ranks)
        handles = tuple(chunk.nbytes for chunk in store_chunks(layout, self.chunk_nbytes, granularity))
        num_slots = sum(count for segment, count in SLOT_COUNTS.items() if layout.largest(segment))
        nbytes_of = {kind: nbytes for kind, (_, nbytes) in self.kinds.items()}
        return DensePlan(
            layout=layout,
            a_kda_bytes=nbytes_of.get("A kda", 0),
            a_mla_bytes=nbytes_of.get("A mla", 0),
            d_bytes=nbytes_of.get("D", 0),
            moved_bytes=layout.moved_nbytes,
            stored_bytes=sum(handles),
            slot_bytes=slot_bytes(layout, granularity),
            replicated_bytes=self.whole_nbytes - layout.moved_nbytes,
            gathered_bytes=sum(blob.nbytes - blob.row_nbytes for blob in layout.blobs) / self.num_layers,
            handles=handles,
            mappings=num_ranks * len(handles) + num_slots,
        )
