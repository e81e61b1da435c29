"""Per-token maths that runs in fp32 whatever the model's dtype: norms, activations, the residual mix.

Each function widens its inputs to `wide(dtype)`, computes there and rounds once at the end. Where kernels run
(`kernels/select.py`) RMSNorm, GatedActivation and residual_mix are one kernel each; what is written here is the
reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dwdp.kernels.select import use_triton
from dwdp.model.config import ModelConfig


def wide(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the parts that must not be narrower than fp32; fp64 stays fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widen(x: Tensor) -> Tensor:
    return x.to(wide(x.dtype))


def normal_init(weight: Tensor, std: float = 1.0) -> Tensor:
    """Fills a weight with normal noise and returns it; a meta tensor, which has no values, is left alone.

    torch would run the noise of a meta tensor through its compiler: seconds of imports, and a folder in TMPDIR.
    """
    return weight if weight.is_meta else nn.init.normal_(weight, std=std)


def runs_as_kernel(x: Tensor, *weights: Tensor) -> bool:
    """Whether a computation on x and weights runs as a kernel, which has no backward."""
    if torch.is_grad_enabled() and any(weight.requires_grad for weight in weights):
        return False
    return use_triton(x)


def rms_normalise(x: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last axis, in fp32: x [..., d] -> fp32 [..., d]."""
    x = widen(x)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class RMSNorm(nn.Module):
    """x [..., d] -> the same. fp32 inside, cast to the input's dtype, then times the weight."""

    def __init__(self, width: int, eps: float, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        if runs_as_kernel(x, self.weight):
            from dwdp.kernels.rows import rms_norm

            out = rms_norm(x, self.weight, self.eps)
            if out is not None:
                return out
        return rms_normalise(x, self.eps).to(x.dtype) * self.weight


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last axis, in fp32.

    eps is added to the sum inside the root, so that a zero row stays zero and small rows shrink.
    """
    x = widen(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """SiTU in fp32, one rounding: beta tanh(g/beta) sig(g) * linear_beta tanh(u/linear_beta).

    gate, up: [..., width] of one dtype, the result's. Without `linear_beta` the up half is taken as is.
    """
    g, u = widen(gate), widen(up)
    if linear_beta is not None:
        u = linear_beta * torch.tanh(u / linear_beta)
    return (beta * torch.tanh(g / beta) * torch.sigmoid(g) * u).to(gate.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up in fp32, one rounding."""
    return (F.silu(widen(gate)) * widen(up)).to(gate.dtype)


@dataclass(frozen=True)
class GatedActivation:
    """SiTU of a gate and an up half, or SwiGLU with beta 0. linear_beta 0: the up half is taken as it is."""

    beta: float
    linear_beta: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """gate, up: [..., width] of one dtype -> the same."""
        if runs_as_kernel(gate, up):
            from dwdp.kernels.activation import gated_activation

            out = gated_activation(gate, up, self.beta, self.linear_beta)
            if out is not None:
                return out
        if not self.beta:
            return swiglu(gate, up)
        return situ(gate, up, self.beta, self.linear_beta or None)


def gated_activation(config: ModelConfig) -> GatedActivation:
    """The config's activation as a function of (gate half, up half)."""
    if config.hidden_act == "silu":
        return GatedActivation(0.0, 0.0)
    return GatedActivation(config.activation_situ_beta, config.activation_situ_linear_beta or 0.0)


def sigmoid_gated(x: Tensor, gate: Tensor) -> Tensor:
    """x * sig(gate) in fp32, rounded once to the gate's dtype."""
    return (widen(x) * torch.sigmoid(widen(gate))).to(gate.dtype)


def residual_mix(prefix: Tensor, snapshots: Sequence[Tensor], proj: Tensor, norm: Tensor, eps: float) -> Tensor:
    """Attention residual: softmax-weighted sum of the raw snapshots and the running prefix, per token.

    prefix and each snapshot: [..., hidden]; proj: [1, hidden]; norm: [hidden]. Rows are scored after an RMS
    norm but summed raw. Without snapshots the prefix itself is returned. fp32 inside, one rounding.
    """
    if not snapshots:
        return prefix
    if runs_as_kernel(prefix, proj, norm):
        from dwdp.kernels import rows as row_kernels

        out = row_kernels.residual_mix([*snapshots, prefix], proj, norm, eps)
        if out is not None:
            return out
    direction = widen(norm) * widen(proj).reshape(-1)
    # A row at a time: a stacked fp32 copy of all rows would be the largest tensor of a long prefill.
    rows = [*snapshots, prefix]
    scores = torch.stack([(rms_normalise(row, eps) * direction).sum(-1) for row in rows])
    weights = torch.softmax(scores, 0).unsqueeze(-1)
    mixed = weights[0] * widen(rows[0])
    for weight, row in zip(weights[1:], rows[1:]):
        mixed = mixed + weight * widen(row)
    return mixed.to(prefix.dtype)
