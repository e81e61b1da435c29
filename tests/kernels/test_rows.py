"""Norm, residual mix, activation, FP8 projection and router scores as kernels, interpreted, beside the torch form."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from dwdp.kernels import activation, product, rows  # noqa: E402
from dwdp.kernels.formats import weights  # noqa: E402
from dwdp.kernels.product import Tile  # noqa: E402
from dwdp.model.moe import Router  # noqa: E402
from dwdp.model.norms import GatedActivation, RMSNorm, residual_mix, situ, swiglu  # noqa: E402
from dwdp.model.quant_linear import FP8Linear  # noqa: E402
from tests.kernels.packs import packed  # noqa: E402
from tests.support.tiny import tiny_model_config  # noqa: E402

DTYPES = [torch.bfloat16, torch.float32]
STEP = {torch.bfloat16: 2**-8, torch.float32: 1e-6}  # half the distance of two numbers, relative


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def kernels(monkeypatch):
    """From here on everything runs as kernels."""
    return lambda: monkeypatch.setenv("DWDP_KERNELS", "triton")


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_equals_the_torch_form(dtype, kernels):
    """Rows of a slice too, as MLA norms them. A bf16 result differs where a sum in another order rounds otherwise."""
    norm = RMSNorm(48, 1e-5, dtype=dtype, device="cpu").requires_grad_(False)
    norm.weight.copy_(1 + 0.1 * noise(48))
    x = noise(2, 3, 80, dtype=dtype)[..., 16:64] * 3
    want = norm(x)
    kernels()
    got = norm(x)
    assert got.dtype == dtype and got.shape == x.shape
    torch.testing.assert_close(got, want, rtol=2 * STEP[dtype], atol=0)


def test_a_norm_that_must_be_differentiable_or_mixes_dtypes_stays_in_torch(kernels, monkeypatch):
    monkeypatch.setattr(rows, "rms_norm_kernel", None)
    kernels()
    assert RMSNorm(48, 1e-5, dtype=torch.float32, device="cpu")(noise(2, 48)).requires_grad
    mixed = RMSNorm(48, 1e-5, dtype=torch.float32, device="cpu").requires_grad_(False)
    assert mixed(noise(2, 48, dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_mix_equals_the_torch_form(count, dtype, kernels):
    """One snapshot and Kimi-K3's eight; scores of either sign, the largest anywhere. Mutated once: sums that are not
    scaled down when a larger score comes fail."""
    prefix, *snapshots = (noise(2, 2, 100, seed=i, dtype=dtype) for i in range(count + 1))
    proj, norm = noise(1, 100, seed=20, dtype=dtype), 1 + 0.1 * noise(100, seed=21, dtype=dtype)
    want = residual_mix(prefix, snapshots, proj, norm, 1e-5)
    kernels()
    got = residual_mix(prefix, snapshots, proj, norm, 1e-5)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, rtol=2 * STEP[dtype], atol=4 * STEP[dtype])
    assert residual_mix(prefix, [], proj, norm, 1e-5) is prefix


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_equal_the_torch_form_near_zero_and_far_from_it(dtype, kernels):
    """Values from 1e-6 to 60, where 1 - exp would cancel and where exp overflows."""
    size = torch.exp(noise(1500, seed=1) * 5 - 2).clamp(1e-6, 60)
    gate, up = (size * noise(1500, seed=2).sign()).to(dtype), (size.flip(0) * noise(1500, seed=3).sign()).to(dtype)
    kernels()
    for beta, linear, want in (
        (4.0, 25.0, situ(gate, up, 4.0, 25.0)),
        (4.0, 0.0, situ(gate, up, 4.0, None)),
        (0.0, 0.0, swiglu(gate, up)),
    ):
        got = GatedActivation(beta, linear)(gate, up)
        torch.testing.assert_close(got, want, rtol=max(2 * STEP[dtype], 4e-6), atol=1e-12)
        assert activation.gated_activation(gate.double(), up.double(), beta, linear) is None


@pytest.mark.parametrize("shape", [(5, 200, 256), (3, 130, 200)])
@pytest.mark.parametrize("step", [64, 128])
def test_fp8_projection_equals_the_product_of_decoded_weights(shape, step):
    """Last blocks of rows and columns that are partial, and a strided x. Mutated once: the scale of the next block of
    rows fails."""
    tokens, n, k = shape
    stack, wide, _ = packed("fp8", 1, n, k)
    x = noise(tokens, k + 8, dtype=torch.bfloat16)[:, :k]
    got = product.linear(x, stack, tile=Tile(16, 64, step, warps=4, stages=2))
    torch.testing.assert_close(got.float(), x.float() @ wide[0].float().T, rtol=2**-7, atol=1e-5)


def test_an_fp8_linear_runs_as_a_kernel(kernels):
    """As the torch form, which rounds its output alike."""
    stack, wide, (values, scale) = packed("fp8", 1, 130, 256)
    module = FP8Linear(256, 130, device="cpu")
    module.weight.data.copy_(values[0])
    module.weight_scale.data.copy_(scale[0])
    x = noise(2, 3, 256, dtype=torch.bfloat16)
    want = module(x)
    assert torch.equal(want, F.linear(x, wide[0]))
    kernels()
    got = module(x)
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-4)


def test_router_scores_are_those_of_a_product_in_fp32(kernels):
    """And not of one that is rounded to bf16, which is 1,000 times further away."""
    router = Router(tiny_model_config(), dtype=torch.bfloat16, device="cpu").requires_grad_(False)
    x = noise(6, 64, dtype=torch.bfloat16)
    want_ids, want = router(x)
    kernels()
    ids, got = router(x)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    exact = torch.sigmoid(F.linear(x.double(), router.weight.double()))
    scores = product.linear(x, weights("plain", router.weight.detach()[None]), sigmoid=True)
    assert scores.dtype == torch.float32 and (scores - exact).abs().max() < 1e-6
    assert (torch.sigmoid(F.linear(x, router.weight).float()) - exact).abs().max() > 1e-4
