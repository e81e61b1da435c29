"""Weights of every format as tiles of a product, decoded in registers to the bits that `model/quant.py` gives.

[Note: halves] A packed byte holds an even column in its low nibble and the odd one behind it in the high nibble. To
put them side by side would send every decoded tile through shared memory; so a step takes the low nibbles of its 128
columns as one tile, the high ones as another, and its rows of x in the same order: in each block of 128 columns the 64
even ones first (`in_halves`). A sum over columns does not mind their order.

[Note: HOST] Triton's interpreter cuts float32 off where it should round it to bf16, loses the smallest numbers on the
way, and multiplies bf16 tiles as the integers that hold them. With HOST, as tests of kernels on a CPU have it, both
conversions are integer arithmetic and products are of float32; the rest of a kernel is what a GPU runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dwdp.kernels.lang import tl, triton

HALVES_BLOCK = 128  # columns of a step over packed weights, and of an FP8 weight's scale
PACKED = ("mxfp4", "nvfp4")
_ALIGNMENT = 16  # bytes: of the first value of each table, which wide loads need


@dataclass(frozen=True)
class Weights:
    """A stack of matrices [count, rows, columns] as kernels read it, in place.

    values: bf16 [count, rows, columns], or bytes: packed [count, rows, columns / 2] or E4M3 [count, rows, columns].
    words: the scales of 128 columns of a row as one integer: int32 [count, rows, columns / 128] for mxfp4, int64 for
    nvfp4; float32 [count, rows / 128, columns / 128], both rounded up, for fp8. factors: float32 [count] or
    [count, 2], nvfp4 only.
    """

    format: str
    values: Tensor
    words: Tensor | None = None
    factors: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.values.shape[1]

    @property
    def columns(self) -> int:
        return self.values.shape[2] * (2 if self.format in PACKED else 1)


def weights(format: str, values: Tensor, scale: Tensor | None = None, factors: Tensor | None = None) -> Weights | None:
    """The stack for kernels, or None where they cannot read it in place: other dtypes, columns that are no multiple of
    128 (packed), rows that are not contiguous or lie on no 16 bytes.

    format: plain, mxfp4, nvfp4 or fp8; values, scale, factors: as `RoutedExperts` and `model/quant.py` have them.
    """
    wanted = {"plain": torch.bfloat16, "fp8": torch.float8_e4m3fn}.get(format, torch.uint8)
    if values.dtype != wanted or not _wide(values) or (scale is not None and not _wide(scale)):
        return None
    if format == "plain":
        return Weights(format, values)
    if format == "fp8":
        return Weights(format, values.view(torch.uint8), scale)
    if values.shape[-1] * 2 % HALVES_BLOCK:
        return None
    return Weights(format, values, scale.view(torch.int32 if format == "mxfp4" else torch.int64), factors)


def _wide(table: Tensor) -> bool:
    """Whether rows are contiguous and begin where wide loads may; a whole stack of them is dense."""
    return table.is_contiguous() and table.data_ptr() % _ALIGNMENT == 0


def in_halves(x: Tensor) -> Tensor:
    """x: [tokens, columns] -> a copy whose blocks of 128 columns hold the 64 even ones first; see [Note: halves]."""
    tokens, columns = x.shape
    blocks = x.reshape(tokens, columns // HALVES_BLOCK, HALVES_BLOCK // 2, 2)
    return blocks.transpose(-1, -2).reshape(tokens, columns)


@triton.jit
def in_halves_row(position):
    """Which column stands at a position of `in_halves`."""
    inside = position % 128
    return position - inside + 2 * (inside % 64) + inside // 64


@triton.jit
def e2m1_values(nibbles):
    """int32, the low four bits count -> float32, exact: the bits of a small float32, then its exponent corrected."""
    bits = ((nibbles & 8) << 28) | ((nibbles & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def e8m0_values(bytes_):
    """int32 bytes -> float32 2^(byte - 127), exact; 255 is NaN."""
    bits = tl.where(bytes_ == 0, 0x00400000, bytes_ << 23)
    return tl.where(bytes_ == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_values(bytes_):
    """int32 bytes -> float32, exact; 127 and 255 are NaN."""
    bits = ((bytes_ & 128) << 24) | ((bytes_ & 127) << 20)
    values = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return tl.where((bytes_ & 127) == 127, float("nan"), values)


@triton.jit
def rounded(x, HOST: tl.constexpr):
    """float32 -> bf16, to nearest and ties to even; see [Note: HOST]."""
    if HOST:
        bits = x.to(tl.int32, bitcast=True)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        value = tl.where(x != x, 0x7FC0, near).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        value = x.to(tl.bfloat16)
    return value


@triton.jit
def widened(x, HOST: tl.constexpr):
    """bf16 -> float32; see [Note: HOST]."""
    if HOST:
        value = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        value = x.to(tl.float32)
    return value


@triton.jit
def multiplied(a, b, acc, HOST: tl.constexpr):
    """acc + a @ b, of bf16 tiles into a float32 one."""
    if HOST:
        acc = tl.dot(widened(a, HOST), widened(b, HOST), acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def packed_tiles(packed, words, factor, FORMAT: tl.constexpr, HALF: tl.constexpr, HOST: tl.constexpr):
    """packed: uint8 [rows, HALF], words: the scales of the rows [rows], factor: float32 -> the bf16 tiles [rows, HALF]
    of the even and of the odd columns.

    A scale is decoded for each value here, and once a row and group by the compiler, which knows what a thread holds.
    """
    nibbles = packed.to(tl.int32)
    byte = tl.arange(0, HALF)[None, :]
    if FORMAT == "mxfp4":
        scale = e8m0_values((words[:, None] >> ((byte // 16) * 8)) & 255)
        even = e2m1_values(nibbles) * scale
        odd = e2m1_values(nibbles >> 4) * scale
    else:
        scale = e4m3_values(((words[:, None] >> ((byte // 8) * 8).to(tl.int64)) & 255).to(tl.int32))
        even = e2m1_values(nibbles) * scale * factor
        odd = e2m1_values(nibbles >> 4) * scale * factor
    return rounded(even, HOST), rounded(odd, HOST)


@triton.jit
def fp8_tile(values, scale, HOST: tl.constexpr):
    """values: the bytes of E4M3 [rows, columns] below one scale a row [rows] -> bf16 [rows, columns]."""
    if HOST:
        wide = e4m3_values(values.to(tl.int32))
    else:
        wide = values.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return rounded(wide * scale[:, None], HOST)
