"""Writing a checkpoint folder tensor by tensor: config.json, safetensors files, the index of several."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dwdp.model.checkpoint import DTYPE_NAMES
from dwdp.model.headers import INDEX_NAME


@dataclass(frozen=True)
class TensorToWrite:
    """A tensor that is made when its turn comes, so that writing needs the memory of one."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_checkpoint(
    path: str | os.PathLike, config: dict[str, Any], tensors: Sequence[TensorToWrite], *, shards: int = 1
) -> None:
    """Writes config.json and the tensors into folder `path` (made when absent).

    shards = 1 gives model.safetensors, more give an index and files of about equal bytes.
    """
    if not 1 <= shards <= max(1, len(tensors)):
        raise ValueError(f"{len(tensors)} tensors cannot be cut into {shards} shards")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    groups = _cut(tensors, shards)
    names = ["model.safetensors"]
    if shards > 1:
        names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    for name, group in zip(names, groups, strict=True):
        _write_file(folder / name, group)
    if shards > 1:
        weight_map = {t.name: name for name, group in zip(names, groups, strict=True) for t in group}
        total = sum(t.nbytes for t in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _cut(tensors: Sequence[TensorToWrite], shards: int) -> list[list[TensorToWrite]]:
    """Runs of about equal bytes, none empty."""
    total = sum(t.nbytes for t in tensors)
    groups: list[list[TensorToWrite]] = [[]]
    done = 0
    for position, tensor in enumerate(tensors):
        left = shards - len(groups)
        full = done >= total * len(groups) / shards
        if groups[-1] and left and (full or len(tensors) - position <= left):
            groups.append([])
        groups[-1].append(tensor)
        done += tensor.nbytes
    return groups


def _write_file(path: Path, tensors: Sequence[TensorToWrite]) -> None:
    # widest elements first, as the format's own library does: every tensor is aligned to its element
    ordered = sorted(tensors, key=lambda t: -t.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for t in ordered:
        header[t.name] = {
            "dtype": DTYPE_NAMES[t.dtype],
            "shape": list(t.shape),
            "data_offsets": [offset, offset + t.nbytes],
        }
        offset += t.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for t in ordered:
            value = t.make().detach().cpu().contiguous()
            if value.dtype != t.dtype or tuple(value.shape) != t.shape:
                raise ValueError(f"{t.name} was declared {t.dtype} {t.shape} and is {value.dtype} {value.shape}")
            if t.nbytes:
                file.write(memoryview(value.reshape(-1).view(torch.uint8).numpy()))
