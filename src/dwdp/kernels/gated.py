"""What stands between attention and its last projection, in one pass: the norm of each head and the sigmoid gate."""

from __future__ import annotations

import torch
from torch import Tensor

from dwdp.kernels.lang import tl, triton

ROWS = 32  # of a program; a row is a head of a token


@triton.jit(do_not_specialize=["num_rows"])
def _gated(
    x, gate, weight, out, num_rows, eps,
    WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inner = tl.arange(0, WIDTH_BLOCK)
    mask = (rows < num_rows)[:, None] & (inner < WIDTH)[None, :]
    cells = rows[:, None] * WIDTH + inner[None, :]
    values = tl.load(x + cells, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        values = values / tl.sqrt(tl.sum(values * values, 1) / WIDTH + eps)[:, None]
        values *= tl.load(weight + inner, mask=inner < WIDTH, other=0.0).to(tl.float32)[None, :]
    gates = tl.load(gate + cells, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + cells, (values * tl.sigmoid(gates)).to(out.dtype.element_ty), mask=mask)


def gated(x: Tensor, gate: Tensor, weight: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """x * sigmoid(gate), with `weight` x / rms(x) * weight over the last axis in the place of x; fp32 inside.

    x: [..., d]; gate: as many elements, in the result's dtype; weight: [d]. One rounding, to the gate's dtype.
    """
    width = x.shape[-1]
    x, gate = x.contiguous(), gate.contiguous()
    out = torch.empty(x.shape, dtype=gate.dtype, device=x.device)
    num_rows = x.numel() // width
    _gated[(triton.cdiv(num_rows, ROWS),)](
        x, gate, gate if weight is None else weight, out, num_rows, eps,
        WIDTH=width, WIDTH_BLOCK=triton.next_power_of_2(width), ROWS=ROWS, NORM=weight is not None, num_warps=4,
    )  # fmt: skip
    return out
