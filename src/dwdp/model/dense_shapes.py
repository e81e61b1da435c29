"""The dense layout that set-up finds in a model, and what stays whole and why, from its configuration alone.

No torch: what `partition/collect.py` finds in the model itself; a test holds the two equal to the byte.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from dwdp.model.config import ModelConfig
from dwdp.model.kept_fp8 import held_tensors
from dwdp.model.shapes import TensorShape
from dwdp.partition.layout import Blob, DenseLayout, StorageSpec, ViewSpec, align

NEVER_MOVED = ("e_score_correction_bias",)  # as `DecoderLayer.dense_dwdp_excluded`
_ROOTS = {"self_attn.": "A", "block_sparse_moe.": "D"}  # below a layer -> segment; routed experts are not listed

EMBEDDING = "embedding and output head"
DENSE_LAYERS = "layers without experts"
NORMS = "norms and residual mixes"
EXCLUDED = "routing bias, excluded by name"
SMALL = "storages below min_bytes"
MOE_OFF = "MoE-dense weights (segments)"


@dataclass(frozen=True)
class DenseShapes:
    """layout: of one rank, each blob one row. stays: why -> bytes of the tensors that every rank keeps whole, routed
    experts and their factors left out."""

    layout: DenseLayout
    stays: dict[str, int]

    def layout_of(self, num_ranks: int) -> DenseLayout:
        """The layout that `num_ranks` ranks agree on."""
        return DenseLayout(num_ranks, tuple(replace(blob, num_rows=num_ranks) for blob in self.layout.blobs))


def dense_shapes(
    config: ModelConfig,
    *,
    segments: Sequence[str],
    min_bytes: int,
    dtype: str = "bfloat16",
    kept_fp8: Container[str] = (),
) -> DenseShapes:
    """dtype: the model's; what the release keeps in fp32 is fp32 in any. kept_fp8: modules that keep an FP8 weight."""
    moving: dict[tuple[int, str], list[StorageSpec]] = {}
    stays = dict.fromkeys((EMBEDDING, DENSE_LAYERS, NORMS, EXCLUDED, SMALL, MOE_OFF), 0)
    for name, tensor in held_tensors(config, kept_fp8).items():
        if tensor.dtype == "bfloat16":
            tensor = TensorShape(tensor.shape, dtype)
        place = _place(config, name)
        if not isinstance(place, str):
            index, segment = place
            if segment == "D" and "moe" not in segments:
                place = MOE_OFF
            elif tensor.nbytes < max(min_bytes, 1):
                place = SMALL
        if isinstance(place, str):
            stays[place] += tensor.nbytes
            continue
        storages = moving.setdefault(place, [])
        offset = align(storages[-1].offset + storages[-1].nbytes) if storages else 0
        storages.append(StorageSpec(offset, tensor.nbytes, (_view(name, tensor),)))
    numbers = sorted({index for index, _ in moving})
    blobs = tuple(
        Blob(numbers.index(index), index, segment, 1, tuple(moving[index, segment]))
        for index, segment in sorted(moving)
    )
    return DenseShapes(DenseLayout(1, blobs), {why: nbytes for why, nbytes in stays.items() if nbytes})


def _place(config: ModelConfig, name: str) -> tuple[int, str] | str:
    """(layer index, segment) of a tensor that may move, or why it never does."""
    parts = name.split(".", 3)
    if parts[:2] != ["model", "layers"]:
        return EMBEDDING if "embed" in name or name.startswith("lm_head") else NORMS
    index, below = int(parts[2]), parts[3]
    if not config.is_moe(index):
        return DENSE_LAYERS
    if below.rpartition(".")[2] in NEVER_MOVED:
        return EXCLUDED
    return next(((index, segment) for root, segment in _ROOTS.items() if below.startswith(root)), NORMS)


def _view(name: str, tensor: TensorShape) -> ViewSpec:
    shape = tensor.shape
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return ViewSpec(name, f"torch.{tensor.dtype}", shape, stride, 0)
