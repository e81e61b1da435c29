"""On a GPU: `python -m pytest tests/gpu -m gpu`. The grouped product against the loop over experts, and what kernels
take; `python -m tests.gpu.check_moe` has their values and rates."""

from __future__ import annotations

from dataclasses import replace

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


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["plain", "mxfp4", "nvfp4", "fp8"])
def test_kernels_take_no_more_than_256_mib_beside_input_and_result(format):
    """Hidden rows and outputs of all pairs at once would be 830 MiB."""
    from dwdp.kernels import moe  # not above: where no GPU is, tests of kernels must be the first to import them
    from tests.gpu.moe_cases import K3, inputs, layer

    shape = replace(K3, experts=16)
    experts, (x, ids, weights) = layer(format, shape), inputs(shape, 4096, 16)
    moe.routed(x, ids, weights, experts)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    total = moe.routed(x, ids, weights, experts)
    assert torch.cuda.max_memory_allocated() - before - total.nbytes <= 256 << 20
