"""On a GPU: `python -m pytest tests/gpu -m gpu`. The grouped product against the loop over experts."""

from __future__ import annotations

import pytest
import torch

from dwdp.model.moe import RoutedExperts
from tests.support.tiny import tiny_model_config


@pytest.mark.gpu
@pytest.mark.parametrize("width", [32, 36])
def test_grouped_product_equals_the_loop_in_value_and_gradient(width):
    """36 columns are no whole 16 bytes, so there the loop must take over."""
    torch.manual_seed(0)
    config = tiny_model_config(routed_expert_hidden_size=width)
    experts = RoutedExperts(config, 1, dtype=torch.bfloat16, expert_format="plain", expert_range=(0, 8), device="cuda")
    x = torch.randn(100, width, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    ids = torch.stack([torch.randperm(7, device="cuda")[:3].sort().values for _ in range(100)])  # 7 is idle
    weights = torch.rand(100, 3, device="cuda", requires_grad=True)
    order = ids.flatten().argsort(stable=True)
    counts = torch.bincount(ids.flatten(), minlength=8)
    assert experts._groupable(x) == (width == 32)
    got = experts(x, ids, weights)
    want = experts._one_by_one(x, weights, order, order // 3, counts.tolist())
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)
    leaves = [x, weights, experts.w13, experts.w2]
    seed = torch.randn_like(got)
    for a, b in zip(torch.autograd.grad((got * seed).sum(), leaves), torch.autograd.grad((want * seed).sum(), leaves)):
        torch.testing.assert_close(a, b, atol=5e-2, rtol=5e-2)
