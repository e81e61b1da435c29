"""SiTU and SwiGLU of two halves: in the epilogue of a product, and as a kernel of their own. float32 inside, one
rounding at the end, as `model/norms.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from dwdp.kernels.formats import rounded
from dwdp.kernels.lang import tl, triton

_BLOCK = 1024


@triton.jit
def tanh(x):
    """float32, a few units in the last place: a polynomial where 1 - exp would cancel."""
    small = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - small) / (1.0 + small)
    large = tl.where(x < 0, -large, large)
    square = x * x
    near = x * (1.0 + square * (-0.33333333333 + square * (0.13333333333 - square * 0.05396825397)))
    return tl.where(tl.abs(x) < 0.2, near, large)


@triton.jit
def gated(gate, up, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr):
    """float32 halves -> float32. BETA 0: SwiGLU; LINEAR_BETA 0: the up half as it is."""
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    if BETA == 0:
        value = gate * sigmoid * up
    else:
        if LINEAR_BETA != 0:
            up = LINEAR_BETA * tanh(up / LINEAR_BETA)
        value = BETA * tanh(gate / BETA) * sigmoid * up
    return value


@triton.jit
def gated_kernel(
    gate, up, out, count,
    BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, HALF: tl.constexpr, HOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    value = gated(g, u, BETA, LINEAR_BETA)
    if HALF:
        value = rounded(value, HOST)
    tl.store(out + at, value, mask=inside)


def gated_activation(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor | None:
    """gate, up: [..., width] of one dtype, bf16 or float32 -> the same; None for other dtypes. Betas as `gated` has
    them."""
    if gate.dtype not in (torch.bfloat16, torch.float32):
        return None
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    if gate.numel():
        gated_kernel[(triton.cdiv(gate.numel(), _BLOCK),)](
            gate, up, out, gate.numel(),
            BETA=beta, LINEAR_BETA=linear_beta, HALF=gate.dtype == torch.bfloat16, HOST=not gate.is_cuda,
            BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    return out
