"""What a rank's model has of the routed experts: described, ready to be compared with its peers, and checked."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dwdp.partition.experts import ExpertPartition
from dwdp.weights.plan import TableSpec, row_bytes
from dwdp.weights.small import SmallSpec, describe_small


@dataclass(frozen=True)
class Description:
    """tables, small: in layer order. report: JSON-like, the same on every rank when the models fit
    together."""

    tables: list[TableSpec]
    small: list[SmallSpec]
    report: dict[str, Any]


def describe_tables(layers: Sequence[Any], partition: ExpertPartition, rank: int, domain) -> Description:
    """Describes the expert tables and small tensors of `layers` (the routed experts of each MoE layer).

    Shapes and dtypes alone: the tables may be on the meta device. Raises ValueError, naming layer and table, for
    a layer that does not hold exactly the rank's experts.
    """
    start, end = partition.ranges[rank]
    if not layers:
        raise ValueError("expert DWDP needs a model with MoE layers, this one has none")
    report: dict[str, Any] = {
        "experts": partition.num_experts,
        "ranges": [list(pair) for pair in partition.ranges],
        "kind": partition.kind,
        "granularity": domain.granularity if len(partition.ranges) > 1 else 0,
        "layers": [layer.layer_index for layer in layers],
    }
    tables, small = [], []
    for pos, layer in enumerate(layers):
        index = layer.layer_index
        if layer.num_experts != partition.num_experts or layer.first_expert != start:
            raise ValueError(
                f"layer {index} has {layer.num_experts} experts and begins at {layer.first_expert}; "
                f"rank {rank} stores experts {start} to {end - 1} of {partition.num_experts}"
            )
        for name, table in layer.expert_tables().items():
            what = f"layer {index} table {name}"
            if table.shape[0] != end - start:
                raise ValueError(f"{what} has {table.shape[0]} rows, rank {rank} stores {end - start} experts")
            shape, dtype = tuple(table.shape[1:]), str(table.dtype).removeprefix("torch.")
            tables.append(TableSpec(pos, index, name, shape, dtype, row_bytes(shape, table.dtype.itemsize)))
            report[what] = [list(shape), dtype]
        for name, tensor in layer.small_tensors().items():
            spec = describe_small(pos, index, name, tensor, end - start, partition.num_experts)
            small.append(spec)
            report[f"layer {index} small {name}"] = [spec.kind, list(spec.shape), str(spec.dtype)]
    return Description(tables, small, report)


def check_movable(layers: Sequence[Any], domain, own: Collection[int] = ()) -> None:
    """Raises ValueError, naming layer and table, for a table that could not be moved or whose original would not be
    freed, and for a layer whose attribute `weights_transformed` is False.

    own: addresses of tables that may lie in the domain, because this setup's handles are below them.
    """
    storages: dict[int, str] = {}
    for layer in layers:
        if getattr(layer, "weights_transformed", True) is False:
            where = f"the experts of layer {layer.layer_index}"
            raise ValueError(f"{where} still wait for their post-load transform; run it before setup")
        for name, table in layer.expert_tables().items():
            _check_movable(f"layer {layer.layer_index} table {name}", table, domain, own, storages)


def _check_movable(what: str, table: torch.Tensor, domain, own: Collection[int], storages: dict[int, str]) -> None:
    if table.is_meta or not table.numel():
        raise ValueError(f"{what} has no bytes: its weights are not loaded")
    nbytes = table.numel() * table.dtype.itemsize
    if not table.is_contiguous() or table.untyped_storage().nbytes() != nbytes:
        raise ValueError(f"{what} is a part of a larger or strided storage; it must be a tensor of its own")
    if domain is not None and domain.holds(table) and table.data_ptr() not in own:
        raise ValueError(f"{what} lies in mapped memory already, in a dense slot or in another setup's handle")
    other = storages.setdefault(table.untyped_storage().data_ptr(), what)
    if other != what:
        raise ValueError(f"{what} shares its storage with {other}")
