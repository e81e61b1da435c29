"""Per-expert tensors too small to move (scales, alphas): every rank gets all rows in one exchange."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dwdp.partition.experts import ExpertPartition

PER_EXPERT, WHOLE = "per expert", "whole"


@dataclass(frozen=True)
class SmallSpec:
    """One declared small tensor of one managed layer.

    kind: `per expert` has a row for each expert this rank stores; `whole` is a scalar of the layer or has all
    E rows already, stays as it is, and must be bitwise equal on every rank. shape: without the expert axis
    for `per expert`.
    """

    pos: int
    layer: int
    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"layer {self.layer} {self.name}"


def describe_small(pos: int, layer: int, name: str, tensor: Tensor, rows: int, num_experts: int) -> SmallSpec:
    """Raises ValueError for a tensor that is neither per expert nor whole."""
    shape = tuple(tensor.shape)
    if shape and shape[0] == rows:
        return SmallSpec(pos, layer, name, PER_EXPERT, shape[1:], tensor.dtype)
    if not shape or shape[0] == num_experts:
        return SmallSpec(pos, layer, name, WHOLE, shape, tensor.dtype)
    raise ValueError(
        f"layer {layer} {name} has shape {list(shape)}: its first axis is neither the {rows} experts of this "
        f"rank nor all {num_experts}"
    )


def pack(tensor: Tensor) -> bytes:
    """The tensor's bytes in row order."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def disagreements(specs: list[SmallSpec], sent: list[list[bytes]], partition: ExpertPartition) -> list[str]:
    """What is not bitwise equal on all ranks that have it; sent: rank -> bytes in the order of `specs`."""
    problems = []
    for index, spec in enumerate(specs):
        if spec.kind == WHOLE:
            values = [rank_bytes[index] for rank_bytes in sent]
            if len(set(values)) > 1:
                common = max(values, key=values.count)
                if 2 * values.count(common) > len(values):
                    differing = [rank for rank, value in enumerate(values) if value != common]
                    problems.append(f"{spec} differs on rank {', '.join(map(str, differing))}")
                else:
                    shown = ", ".join(f"rank {rank} {value[:16].hex()}" for rank, value in enumerate(values))
                    problems.append(f"{spec} differs: {shown}")
            continue
        for rank, (start, end) in enumerate(partition.ranges):
            for expert in range(start, end):
                owner = partition.owner(expert)
                rows = (_row(spec, sent[r][index], expert, partition.ranges[r]) for r in (owner, rank))
                if owner != rank and len(set(rows)) > 1:
                    problems.append(f"{spec} of expert {expert} differs on rank {owner} and rank {rank}")
    return problems


def assemble(
    specs: list[SmallSpec], sent: list[list[bytes]], partition: ExpertPartition, prepared: list[Tensor | None]
) -> None:
    """Writes all E rows of each per-expert tensor into `prepared`, each from its owner."""
    for index, (spec, full) in enumerate(zip(specs, prepared)):
        if full is None:
            continue
        whole = b"".join(
            _row(spec, sent[owner][index], expert, partition.ranges[owner])
            for expert in range(partition.num_experts)
            for owner in (partition.owner(expert),)
        )
        if whole:
            full.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(whole), dtype=torch.uint8))


def _row(spec: SmallSpec, rows: bytes, expert: int, stored: tuple[int, int]) -> bytes:
    nbytes = len(rows) // (stored[1] - stored[0])
    at = (expert - stored[0]) * nbytes
    return rows[at : at + nbytes]
