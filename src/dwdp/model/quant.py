"""Four-bit and eight-bit weight formats of the releases: unpacking and packing.

E2M1 holds 0, 0.5, 1, 1.5, 2, 3, 4, 6 and, from nibble 8 on, their negatives; the LOW nibble of a byte is the
even column. MXFP4 has one E8M0 scale (2^(byte - 127)) for 32 columns; NVFP4 one E4M3 scale for 16 columns and
one float32 factor per matrix; FP8 blocks one float32 scale for 128 x 128 weights.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from dwdp.model.formats import FP8_BLOCK, MXFP4_GROUP, NVFP4_GROUP, fp8_scale_shapes

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX, E4M3_MAX = 6.0, 448.0


@lru_cache(maxsize=16)
def _byte_pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[256, 2]: the two values that a packed byte holds, even column first."""
    values = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), dtype=dtype)
    byte = torch.arange(256)
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=1).to(device)


@lru_cache(maxsize=16)
def _e8m0_values(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[256]: 2^(byte - 127); byte 255 is the format's NaN."""
    values = torch.pow(2.0, torch.arange(256, dtype=torch.float64) - 127)
    values[255] = torch.nan
    return values.to(dtype).to(device)


def _lookup(table: Tensor, index: Tensor) -> Tensor:
    return table.index_select(0, index.reshape(-1).int())


def unpack_e2m1(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """packed: uint8 [..., columns / 2] -> dtype [..., columns], exact in every float type."""
    pairs = _lookup(_byte_pairs(dtype, packed.device), packed)
    return pairs.view(*packed.shape[:-1], packed.shape[-1] * 2)


def pack_e2m1(codes: Tensor) -> Tensor:
    """codes: nibbles [..., columns] -> uint8 [..., columns / 2], the even column in the low nibble."""
    codes = codes.to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def dequantise_mxfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """packed: uint8 [..., out, in / 2], scale: uint8 [..., out, in / 32] -> dtype [..., out, in].

    Exact in bfloat16 and float32: a product of a two-bit mantissa and a power of two.
    """
    _check_groups(packed, scale, MXFP4_GROUP)
    # float16 cannot hold most powers of two, bfloat16 and float32 hold them all
    work = torch.float32 if dtype == torch.float16 else dtype
    values = unpack_e2m1(packed, work).view(*scale.shape, MXFP4_GROUP)
    values *= _lookup(_e8m0_values(work, scale.device), scale).view(*scale.shape, 1)
    return values.view(*packed.shape[:-1], packed.shape[-1] * 2).to(dtype)


def dequantise_nvfp4(packed: Tensor, scale: Tensor, scale_2: Tensor, dtype: torch.dtype) -> Tensor:
    """packed: uint8 [..., out, in / 2], scale: E4M3 [..., out, in / 16] -> dtype [..., out, in].

    scale_2: float32, one factor per matrix `[...]`, or `[..., parts]` for matrices that are `parts` equal
    blocks of rows with a factor each (w13 is w1 over w3: parts = 2), or any shape of as many dimensions as
    `packed` that broadcasts. nibble * scale is exact in float32: one rounding there and one to dtype.
    """
    _check_groups(packed, scale, NVFP4_GROUP)
    values = unpack_e2m1(packed, torch.float32).view(*scale.shape, NVFP4_GROUP)
    values *= scale.float().unsqueeze(-1)
    values = values.view(*packed.shape[:-1], packed.shape[-1] * 2)
    values *= _matrix_factor(scale_2, packed)
    return values.to(dtype)


def _matrix_factor(scale_2: Tensor, packed: Tensor) -> Tensor:
    lead, rows = packed.dim() - 2, packed.shape[-2]
    if scale_2.dim() == lead:
        return scale_2[..., None, None]
    if scale_2.dim() == lead + 1:
        parts = scale_2.shape[-1]
        if parts == 0 or rows % parts:
            raise ValueError(f"{rows} rows are not {parts} equal blocks of an NVFP4 factor each")
        return scale_2.repeat_interleave(rows // parts, dim=-1).unsqueeze(-1)
    return scale_2


def dequantise_fp8_block(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """weight: E4M3 [N, K], scale: float32 [ceil(N/128), 1, ceil(K/128), 1] or without the ones -> dtype.

    w = fp8 * scale; the last block of rows or columns may be partial.
    """
    if weight.dtype != torch.float8_e4m3fn:
        raise ValueError(f"an FP8 weight is float8_e4m3fn, not {weight.dtype}")
    out = weight.to(dtype)  # exact: every E4M3 value is a bfloat16 and a float16 value
    scale_fp8_blocks_(out, scale)
    return out


def scale_fp8_blocks_(weight: Tensor, scale: Tensor, *, first_row: int = 0, num_rows: int | None = None) -> None:
    """Multiplies weight [N, K] in place by its block scales, a block of rows at a time (float32 inside).

    weight may be the rows from `first_row` on of a whole weight of `num_rows` rows, whose scale is given.
    """
    n, k = weight.shape
    scale = fp8_scale_2d(scale, n if num_rows is None else num_rows, k)
    for block in range(first_row // FP8_BLOCK, -(-(first_row + n) // FP8_BLOCK)):
        start = max(0, block * FP8_BLOCK - first_row)
        rows = weight[start : (block + 1) * FP8_BLOCK - first_row]
        rows.copy_(rows.float() * scale[block].repeat_interleave(FP8_BLOCK)[:k])


def fp8_scale_2d(scale: Tensor, n: int, k: int) -> Tensor:
    """The block scales of an [n, k] weight as [ceil(n/128), ceil(k/128)]; ValueError for any other shape."""
    shapes = fp8_scale_shapes(n, k)
    if tuple(scale.shape) not in shapes:
        raise ValueError(f"FP8 scale of a [{n}, {k}] weight has shape {list(scale.shape)}, not {list(shapes[0])}")
    return scale.reshape(shapes[1])


def quantise_e2m1(x: Tensor) -> Tensor:
    """x: float [...] -> nibbles, rounded to nearest (ties to the even code), clamped at 6."""
    magnitude = x.abs()
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for lower in range(7):
        middle = (E2M1_VALUES[lower] + E2M1_VALUES[lower + 1]) / 2
        code += (magnitude > middle) if lower % 2 == 0 else (magnitude >= middle)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def quantise_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight: float [..., in] -> packed uint8 [..., in / 2], scale uint8 [..., in / 32].

    The scale is the smallest power of two with which the group's largest magnitude does not pass 6.
    """
    groups = _grouped(weight, MXFP4_GROUP)
    largest = groups.abs().amax(-1)
    exponent = torch.ceil(torch.log2(largest.double() / E2M1_MAX)).clamp(-127, 127)
    scale = (exponent + 127).to(torch.uint8)
    codes = quantise_e2m1(groups / _lookup(_e8m0_values(torch.float32, scale.device), scale).view(*scale.shape, 1))
    return pack_e2m1(codes.view(weight.shape)), scale


def quantise_nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """weight: float [out, in] -> packed uint8 [out, in / 2], scale E4M3 [out, in / 16], scale_2 float32 [].

    scale_2 maps the largest magnitude to 6 * 448, so that the block scales use E4M3's whole range.
    """
    groups = _grouped(weight, NVFP4_GROUP)
    largest = groups.abs().amax(-1)
    scale_2 = (largest.max() / (E2M1_MAX * E4M3_MAX)).clamp(min=torch.finfo(torch.float32).tiny)
    scale = (largest / E2M1_MAX / scale_2).to(torch.float8_e4m3fn)
    divisor = scale.float() * scale_2
    codes = quantise_e2m1(groups / torch.where(divisor == 0, 1.0, divisor).unsqueeze(-1))
    return pack_e2m1(codes.view(weight.shape)), scale, scale_2


def quantise_fp8_block(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight: float [N, K] -> E4M3 [N, K], scale float32 [ceil(N/128), 1, ceil(K/128), 1]."""
    n, k = weight.shape
    (rows, _, columns, _), _ = fp8_scale_shapes(n, k)
    padded = torch.zeros(rows * FP8_BLOCK, columns * FP8_BLOCK, device=weight.device)
    padded[:n, :k] = weight
    blocks = padded.view(rows, FP8_BLOCK, columns, FP8_BLOCK)
    scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / E4M3_MAX
    scale = torch.where(scale == 0, 1.0, scale)
    quantised = (blocks / scale).view(padded.shape)[:n, :k].to(torch.float8_e4m3fn).contiguous()
    return quantised, scale


def _grouped(weight: Tensor, group: int) -> Tensor:
    if weight.shape[-1] % group:
        raise ValueError(f"{weight.shape[-1]} columns are not a multiple of the group of {group}")
    return weight.float().reshape(*weight.shape[:-1], -1, group)


def _check_groups(packed: Tensor, scale: Tensor, group: int) -> None:
    expected = (*packed.shape[:-1], packed.shape[-1] * 2 // group)
    if packed.dtype != torch.uint8 or tuple(scale.shape) != expected or packed.shape[-1] * 2 % group:
        raise ValueError(
            f"packed weight {packed.dtype} {list(packed.shape)} and scale {list(scale.shape)} do not fit: "
            f"uint8 and one scale for {group} columns"
        )
