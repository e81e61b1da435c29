"""How the bytes of a checkpoint's tensors become those of parameters: as they are, in another dtype, times their block
scales, without a tail, or a part of them in a row.

What a parameter takes as it is goes straight to its place. FP8 weights become the parameter's dtype where they belong,
which every E4M3 value is exact in, and wait there for their scale: nothing is held beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from dwdp.errors import CheckpointError
from dwdp.model.checkpoint import DTYPES
from dwdp.model.quant import fp8_scale_shapes, scale_fp8_blocks_
from dwdp.model.safetensors_file import TensorEntry
from dwdp.partition.parts import Part

# A part's FP8 weights wait outside of the model for a scale that is no further off in the file; others come first.
NEAR_NBYTES = 64 << 20


@dataclass(frozen=True)
class Place:
    """Where a tensor goes: a parameter or one expert's part of it. `how`: copy, fp8, fp8_scale or a_log."""

    parameter: str
    how: str = "copy"
    row: int | None = None
    part: slice | int | None = None

    def view(self, parameter: Tensor) -> Tensor:
        view = parameter.detach()
        view = view if self.row is None else view[self.row]
        return view if self.part is None else view[self.part]


@dataclass(frozen=True, slots=True)
class Landing:
    """Elements [start, end) of a checkpoint's tensor, flattened, and what becomes of them.

    room(): contiguous memory for them, [end - start], of any dtype on any device; called before the first is read.
    landed(room): called once, when all are in it.
    """

    entry: TensorEntry
    start: int
    end: int
    room: Callable[[], Tensor]
    landed: Callable[[Tensor], None]

    @property
    def file_range(self) -> tuple[int, int]:
        """(offset in the file, bytes)."""
        itemsize = DTYPES[self.entry.dtype].itemsize
        return self.entry.offset + self.start * itemsize, (self.end - self.start) * itemsize


class Landings:
    """The landings of a model's tensors. parts: parameter's name -> the part of it to read, in place of the whole.

    model: has dtype and shape of every parameter, and no bytes of those with a part.
    """

    def __init__(self, folder: Path, model: nn.Module, device: str | torch.device, parts: Mapping[str, Part]) -> None:
        self._folder, self._device, self._parts = folder, device, parts
        self._parameters = dict(model.named_parameters())
        # Of FP8 weights: [N, K] values that have no scale yet, and scales that have no values yet.
        self._unscaled: dict[str, Tensor] = {}
        self._scales: dict[str, Tensor] = {}

    def of(self, entry: TensorEntry, place: Place) -> Landing | None:
        """None where no byte of the tensor is needed."""
        part = self._parts.get(place.parameter)
        if part is None:
            return self._whole(entry, place)
        return self._part(entry, place, part) if part.start < part.end else None

    def passes(self, places: Mapping[str, Place], entries: Mapping[str, TensorEntry]) -> Iterator[list[Landing]]:
        """What to read one after another: far scales of FP8 parts, then all the rest."""
        far = {name for name in places if self._far_scale(name, places[name], places, entries)}
        for names in (far, places.keys() - far):
            landings = [self.of(entries[name], place) for name, place in places.items() if name in names]
            yield [landing for landing in landings if landing is not None]

    def checks(self, places: Mapping[str, Place], entries: Mapping[str, TensorEntry]) -> list[Landing]:
        """Landings that write nothing and raise what writing would."""
        return [
            Landing(entry, 0, _numel(entry), partial(_empty, entry), partial(self._check_a_log, entry, place.parameter))
            for entry, place in ((entries[name], place) for name, place in places.items() if place.how == "a_log")
        ]

    def _check_a_log(self, entry: TensorEntry, name: str, values: Tensor) -> None:
        self._a_log(entry, values, self._parameters[name].numel())

    def _far_scale(self, name: str, place: Place, places, entries) -> bool:
        if place.how != "fp8_scale" or place.parameter not in self._parts:
            return False
        scale, weight = entries[name], entries[name.removesuffix("_scale")]
        return scale.file != weight.file or abs(scale.offset - weight.offset - weight.nbytes) > NEAR_NBYTES

    def _whole(self, entry: TensorEntry, place: Place) -> Landing:
        parameter = self._parameters[place.parameter]
        target, whole = place.view(parameter), partial(Landing, entry, 0, _numel(entry))
        if place.how == "a_log":
            return whole(
                partial(_empty, entry), lambda values: target.copy_(self._a_log(entry, values, target.numel()))
            )
        if place.how == "fp8_scale":
            return whole(partial(_empty, entry, self._device), partial(self._have_scale, place.parameter))
        if not target.is_contiguous():
            room = partial(torch.empty, target.numel(), dtype=target.dtype, device=target.device)
            return whole(room, lambda values: target.copy_(values.view(target.shape)))
        if place.how == "fp8":
            return whole(lambda: target.view(-1), lambda _: self._have_weight(place.parameter, target))
        return whole(lambda: target.view(-1), _nothing)

    def _part(self, entry: TensorEntry, place: Place, part: Part) -> Landing:
        name, parameter = place.parameter, self._parameters[place.parameter]
        if place.how == "a_log":

            def take(values: Tensor) -> None:
                values = self._a_log(entry, values, parameter.numel())[part.start : part.end]
                part.take(values.to(device=self._device, dtype=parameter.dtype))

            return Landing(entry, 0, _numel(entry), partial(_empty, entry), take)
        if place.how == "fp8_scale":
            return Landing(
                entry, 0, _numel(entry), partial(_empty, entry, self._device), partial(self._have_scale, name)
            )
        start, end = part.start, part.end
        if place.how == "fp8":  # whole matrix rows, since blocks of rows have a scale
            columns = parameter.shape[1]
            start, end = start // columns * columns, -(-end // columns) * columns
            own = partial(torch.empty, end - start, dtype=parameter.dtype, device=self._device)
            return Landing(entry, start, end, own, lambda values: self._have_weight(name, values.view(-1, columns)))
        if part.room is not None:
            return Landing(entry, start, end, lambda: part.room().view(parameter.dtype), part.take)
        own = partial(torch.empty, end - start, dtype=parameter.dtype, device=self._device)
        return Landing(entry, start, end, own, part.take)

    def _have_weight(self, name: str, values: Tensor) -> None:
        self._unscaled[name] = values
        self._scale_if_both(name)

    def _have_scale(self, name: str, scale: Tensor) -> None:
        self._scales[name] = scale
        self._scale_if_both(name)

    def _scale_if_both(self, name: str) -> None:
        if name not in self._unscaled or name not in self._scales:
            return
        values, scale, part = self._unscaled.pop(name), self._scales.pop(name), self._parts.get(name)
        num_rows, columns = self._parameters[name].shape
        first_row = 0 if part is None else part.start // columns
        scale_fp8_blocks_(
            values, scale.view(fp8_scale_shapes(num_rows, columns)[1]), first_row=first_row, num_rows=num_rows
        )
        if part is not None:
            start = first_row * columns
            part.take(values.view(-1)[part.start - start : part.end - start])

    def _a_log(self, entry: TensorEntry, values: Tensor, heads: int) -> Tensor:
        """The first `heads` of a tensor's values; what lies behind them must be zero."""
        if values[heads:].count_nonzero():
            raise CheckpointError(
                f"{self._folder}: tensor {entry.name} of {values.numel()} values has a tail behind its "
                f"{heads} heads that is not zero"
            )
        return values[:heads]


def _numel(entry: TensorEntry) -> int:
    return entry.nbytes // DTYPES[entry.dtype].itemsize


def _empty(entry: TensorEntry, device: str | torch.device = "cpu") -> Tensor:
    return torch.empty(_numel(entry), dtype=DTYPES[entry.dtype], device=device)


def _nothing(room: Tensor) -> None:
    """What was read into its place needs nothing more."""
