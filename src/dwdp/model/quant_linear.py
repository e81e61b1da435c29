"""Projections that keep the FP8 weight and block scales of a checkpoint: half the bytes of bf16, read in place.

A kernel decodes them in registers (`kernels/product.py`). The torch form, which is the reference, decodes some rows at
a time; both multiply by the bf16 (or fp32) values that `quant.dequantise_fp8_block` gives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dwdp.model.kept_fp8 import is_kept
from dwdp.model.norms import runs_as_kernel
from dwdp.model.quant import FP8_BLOCK, dequantise_fp8_block, fp8_scale_shapes

if TYPE_CHECKING:
    from dwdp.model.formats import Formats

DECODED_BYTES = 64 << 20  # of decoded rows at a time in the torch form


class FP8Linear(nn.Module):
    """x @ w^T without a bias. weight: E4M3 [out, in]; weight_scale: float32 [out / 128, in / 128], both rounded up."""

    def __init__(self, inputs: int, outputs: int, *, device: torch.device | str) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        weight = torch.empty((outputs, inputs), dtype=torch.float8_e4m3fn, device=device)
        scale = torch.empty(fp8_scale_shapes(outputs, inputs)[1], dtype=torch.float32, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in] -> [..., out] in x's dtype."""
        if x.dtype == torch.bfloat16 and runs_as_kernel(x):
            from dwdp.kernels.formats import weights
            from dwdp.kernels.product import linear

            stack = weights("fp8", self.weight.detach()[None], self.weight_scale.detach()[None])
            if stack is not None:
                return linear(x.reshape(-1, x.shape[-1]), stack).view(*x.shape[:-1], -1)
        step = max(1, DECODED_BYTES // (self.in_features * x.element_size()) // FP8_BLOCK) * FP8_BLOCK
        parts = [F.linear(x, self._rows(start, step, x.dtype)) for start in range(0, self.out_features, step)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def _rows(self, start: int, count: int, dtype: torch.dtype) -> Tensor:
        """`count` rows from `start` on, a multiple of 128, decoded."""
        block = start // FP8_BLOCK
        scale = self.weight_scale[block : block + count // FP8_BLOCK]
        return dequantise_fp8_block(self.weight[start : start + count], scale, dtype)


def keep_fp8_linears(model: nn.Module, formats: Formats) -> None:
    """Puts an FP8Linear in the place of every Linear of a model that keeps its FP8 weight."""
    for prefix, module in list(model.named_modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and is_kept(f"{prefix}.{name}".lstrip("."), formats):
                outputs, inputs = child.weight.shape
                setattr(module, name, FP8Linear(inputs, outputs, device=child.weight.device))
