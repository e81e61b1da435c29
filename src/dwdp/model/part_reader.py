"""Reading parts of parameters from a checkpoint: no byte more than their elements need, and no memory in the model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dwdp.errors import CheckpointError
from dwdp.model.checkpoint import DTYPES, Checkpoint, TensorEntry
from dwdp.model.quant import scale_fp8_blocks_
from dwdp.partition.parts import Part


class PartReader:
    """Reads the parts of some parameters of a model, in whatever order the checkpoint has their tensors.

    parts: parameter's name -> its part. model: has dtype and shape of the parameters, and no bytes of them.
    """

    def __init__(self, checkpoint: Checkpoint, model: nn.Module, parts: Mapping[str, Part], device) -> None:
        self._checkpoint, self._device = checkpoint, device
        self._parameters = {name: p for name, p in model.named_parameters() if name in parts}
        self._parts = dict(parts)
        self._rows: dict[str, Tensor] = {}  # matrix rows of FP8 weights, [rows, columns], that wait for their scale
        self._scales: dict[str, Tensor] = {}  # and scales that wait for their weight

    def nbytes(self, entry: TensorEntry, name: str, how: str) -> int:
        """Bytes of a tensor that `read` reads, or all where the parameter has no part."""
        if name not in self._parameters:
            return entry.nbytes
        part = self._parts[name]
        if part.start == part.end or how in ("a_log", "fp8_scale"):
            return entry.nbytes if part.start < part.end else 0
        start, end = self._range(name, how)
        return (end - start) * DTYPES[entry.dtype].itemsize

    def _range(self, name: str, how: str) -> tuple[int, int]:
        """Elements [start, end) that are read for a part: whole matrix rows where blocks of rows have a scale."""
        part = self._parts[name]
        if how != "fp8":
            return part.start, part.end
        columns = self._parameters[name].shape[1]
        return part.start // columns * columns, -(-part.end // columns) * columns

    def read(self, entry: TensorEntry, name: str, how: str) -> bool:
        """Reads what the part of parameter `name` needs of a tensor; False when the parameter has no part.

        how: copy, fp8, fp8_scale or a_log, as a loader's `Place` has it.
        """
        if name not in self._parameters:
            return False
        part, parameter = self._parts[name], self._parameters[name]
        if part.start == part.end:
            return True
        if how == "a_log":
            part.take(self._own(a_log_values(self._checkpoint, entry, parameter.numel())[part.start : part.end], name))
        elif how == "copy":
            part.take(self._own(self._elements(entry, part.start, part.end), name))
        elif how == "fp8":
            self._rows[name] = self._own(self._elements(entry, *self._range(name, how)), name)
        else:
            self._scales[name] = self._checkpoint.read(entry).to(self._device)
        if name in self._rows and name in self._scales:
            (num_rows, columns), values, (start, _) = parameter.shape, self._rows.pop(name), self._range(name, "fp8")
            scale_fp8_blocks_(
                values.view(-1, columns), self._scales.pop(name), first_row=start // columns, num_rows=num_rows
            )
            part.take(values[part.start - start : part.end - start])
        return True

    def _elements(self, entry: TensorEntry, start: int, end: int) -> Tensor:
        out = torch.empty(end - start, dtype=DTYPES[entry.dtype])
        self._checkpoint.read_elements(entry, start, out)
        return out

    def _own(self, values: Tensor, name: str) -> Tensor:
        return values.to(device=self._device, dtype=self._parameters[name].dtype)


def a_log_values(checkpoint: Checkpoint, entry: TensorEntry, heads: int) -> Tensor:
    """[heads] in the checkpoint's dtype; what lies behind them must be zero."""
    values = checkpoint.read(entry).flatten()
    if values[heads:].count_nonzero():
        raise CheckpointError(
            f"{checkpoint.path}: tensor {entry.name} of {values.numel()} values has a tail behind its "
            f"{heads} heads that is not zero"
        )
    return values[:heads]
