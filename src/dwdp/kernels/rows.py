"""Kernels over whole rows: RMS norm and the residual mix, each reading its rows once. float32 inside, rounded where
`model/norms.py` rounds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dwdp.kernels.formats import rounded, widened
from dwdp.kernels.lang import tl, triton

MAX_ROWS = 9  # of a mix: Kimi-K3's eight snapshots and the running sum
MAX_WIDTH = 16384  # a program holds a row in registers


@triton.jit
def rms_norm_kernel(
    x, weight, out, width, x_stride, eps, HALF: tl.constexpr, HOST: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One row. HALF: x is bf16, and so is the normalised row before its weight."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if HALF:
        value = rounded(widened(rounded(value, HOST), HOST) * scale, HOST)
    else:
        value = value * scale
    tl.store(out + row * width + column, value, mask=inside)


@triton.jit
def mix_kernel(
    r0, r1, r2, r3, r4, r5, r6, r7, r8, proj, norm, out, width, eps,
    COUNT: tl.constexpr, HALF: tl.constexpr, HOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token: a softmax over its COUNT rows that goes on while they are read, scaled down when a larger score
    comes."""
    at = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    direction = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    direction = direction * tl.load(proj + column, mask=inside, other=0.0).to(tl.float32)
    mixed = tl.zeros((BLOCK,), dtype=tl.float32)
    largest = -float("inf")
    weights = 0.0
    for i in tl.static_range(COUNT):
        if i == 0:
            row = r0
        elif i == 1:
            row = r1
        elif i == 2:
            row = r2
        elif i == 3:
            row = r3
        elif i == 4:
            row = r4
        elif i == 5:
            row = r5
        elif i == 6:
            row = r6
        elif i == 7:
            row = r7
        else:
            row = r8
        value = tl.load(row + at + column, mask=inside, other=0.0).to(tl.float32)
        root = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
        score = tl.sum(value * root * direction, 0)
        now = tl.maximum(largest, score)
        shrink = tl.exp(largest - now)
        weight = tl.exp(score - now)
        mixed = mixed * shrink + weight * value
        weights = weights * shrink + weight
        largest = now
    mixed = mixed / weights
    if HALF:
        mixed = rounded(mixed, HOST)
    tl.store(out + at + column, mixed, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor | None:
    """x: [..., width] bf16 or float32, weight: [width] of the same dtype -> the same; None for others or too wide."""
    width = x.shape[-1]
    if x.dtype != weight.dtype or x.dtype not in (torch.bfloat16, torch.float32) or width > MAX_WIDTH:
        return None
    rows = x.reshape(-1, width)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows.shape[0]:
        block = triton.next_power_of_2(width)
        rms_norm_kernel[(rows.shape[0],)](
            rows, weight, out, width, rows.stride(0), eps,
            HALF=x.dtype == torch.bfloat16, HOST=not x.is_cuda, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return out


def residual_mix(rows: Sequence[Tensor], proj: Tensor, norm: Tensor, eps: float) -> Tensor | None:
    """rows: [..., width] each, snapshots first, of one dtype, bf16 or float32; proj, norm: width values -> the same;
    None for other dtypes, widths or more than MAX_ROWS rows."""
    width, dtype = rows[0].shape[-1], rows[0].dtype
    if len(rows) > MAX_ROWS or dtype not in (torch.bfloat16, torch.float32) or width > MAX_WIDTH:
        return None
    rows = [row.contiguous() for row in rows]
    out = torch.empty(rows[0].shape, dtype=dtype, device=rows[0].device)
    tokens = out.numel() // width
    if tokens:
        block = triton.next_power_of_2(width)
        filled = [*rows, *[rows[0]] * (MAX_ROWS - len(rows))]
        mix_kernel[(tokens,)](
            *filled, proj.reshape(-1), norm, out, width, eps,
            COUNT=len(rows), HALF=dtype == torch.bfloat16, HOST=not out.is_cuda, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return out


def _warps(block: int) -> int:
    """A thread holds 16 values of a row, up to what a block of threads may be."""
    return max(1, min(16, block // 512))
