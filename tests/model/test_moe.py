"""Latent MoE: routing, order of summation, packed formats, partial tables, the grouped product."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from dwdp.errors import DwdpError
from dwdp.model import quant
from dwdp.model.moe import LatentMoE, RoutedExperts, Router
from dwdp.model.norms import situ, swiglu
from tests.support.tiny import tiny_model_config


def moe(dtype=torch.float32, **changes) -> LatentMoE:
    torch.manual_seed(0)
    config = tiny_model_config(**changes)
    return LatentMoE(config, 1, dtype=dtype, expert_format="plain", expert_range=(0, config.num_experts), device="cpu")


def by_formula(block: LatentMoE, x: torch.Tensor) -> torch.Tensor:
    """The formulas for one token in fp64, with K3's constants written out."""

    def lin(weight, v):
        return weight.double() @ v

    def activation(g, u):
        return 4 * torch.tanh(g / 4) / (1 + torch.exp(-g)) * 25 * torch.tanh(u / 25)

    x = x.double()
    s = 1 / (1 + torch.exp(-lin(block.gate.weight, x)))
    chosen = (s + block.gate.e_score_correction_bias.double()).argsort(descending=True)[:3]
    z = lin(block.routed_expert_down_proj.weight, x)
    r = torch.zeros_like(z)
    inter = block.experts.w2.shape[-1]
    for e in chosen:
        w13, w2 = block.experts.w13[e], block.experts.w2[e]
        r += s[e] / s[chosen].sum() * lin(w2, activation(lin(w13[:inter], z), lin(w13[inter:], z)))
    r = r / (r.square().mean() + 1e-5).sqrt() * block.routed_expert_norm.weight.double()
    shared = block.shared_experts
    return lin(block.routed_expert_up_proj.weight, r) + lin(
        shared.down_proj.weight, activation(lin(shared.gate_proj.weight, x), lin(shared.up_proj.weight, x))
    )


def test_block_equals_the_formula():
    block = moe().requires_grad_(False)
    block.gate.e_score_correction_bias.normal_(std=0.1)
    x = torch.randn(2, 9, 64)
    want = torch.stack([by_formula(block, row) for row in x.view(-1, 64)]).view(x.shape)
    torch.testing.assert_close(block(x).double(), want, atol=2e-5, rtol=0)


def test_bias_selects_but_does_not_weigh():
    config = tiny_model_config(routed_scaling_factor=2.446)
    router = Router(config, dtype=torch.float32, device="cpu").requires_grad_(False)
    router.e_score_correction_bias[5] = 10.0
    x = torch.randn(20, 64)
    ids, weights = router(x)
    assert (ids == 5).any(1).all(), "the bias forces its expert in"
    assert (ids.diff(dim=1) > 0).all(), "ascending ids"
    scores = torch.sigmoid(x @ router.weight.T).gather(1, ids)
    torch.testing.assert_close(weights, scores / scores.sum(1, keepdim=True) * 2.446)
    unscaled = Router(tiny_model_config(moe_renormalize=False), dtype=torch.float32, device="cpu")
    unscaled.load_state_dict(router.state_dict())
    torch.testing.assert_close(unscaled(x)[1], scores)


def test_activations_equal_their_formulas():
    g, u = torch.randn(1000) * 30, torch.randn(1000) * 60
    for i in range(0, 1000, 97):
        a, b = g[i].item(), u[i].item()
        gated = 4 * math.tanh(a / 4) / (1 + math.exp(-a))
        wants = {
            gated * 25 * math.tanh(b / 25): situ(g, u, 4.0, 25.0),
            gated * b: situ(g, u, 4.0, None),
            a / (1 + math.exp(-a)) * b: swiglu(g, u),
        }
        for want, got in wants.items():
            assert math.isclose(got[i].item(), want, rel_tol=1e-5, abs_tol=1e-5)
    # One rounding: the bf16 result is the rounded fp32 result of the bf16 inputs.
    want = situ(g.bfloat16().float(), u.bfloat16().float(), 4.0, 25.0).bfloat16()
    assert torch.equal(situ(g.bfloat16(), u.bfloat16(), 4.0, 25.0), want)


def test_a_token_is_summed_alike_in_every_batch():
    """Ascending expert order in an fp32 sum: what shares the batch does not change a token's order."""
    experts = moe().experts.requires_grad_(False)
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(12, 32, generator=draw)
    ids = torch.stack([torch.randperm(8, generator=draw)[:3].sort().values for _ in range(12)])
    weights = torch.rand(12, 3, generator=draw)
    together = experts(x, ids, weights)
    assert together.dtype == torch.float32
    for i in range(12):
        by_hand = torch.zeros(32)
        for e, w in zip(ids[i].tolist(), weights[i]):
            gate, up = F.linear(x[i : i + 1], experts.w13[e]).chunk(2, -1)
            by_hand = by_hand + F.linear(experts.activation(gate, up), experts.w2[e])[0] * w
        torch.testing.assert_close(together[i], by_hand, atol=1e-6, rtol=0)
        alone = experts(x[i : i + 1], ids[i : i + 1], weights[i : i + 1])
        assert torch.equal(alone[0], by_hand)


def test_bf16_sums_over_experts_in_fp32():
    block = moe(torch.bfloat16).requires_grad_(False)
    x = torch.randn(5, 32, dtype=torch.bfloat16)
    ids, weights = torch.tensor([[0, 3, 7]] * 5), torch.full((5, 3), 1 / 3)
    got = block.experts(x, ids, weights)
    want = torch.zeros(5, 32)
    for e in (0, 3, 7):
        gate, up = F.linear(x, block.experts.w13[e]).chunk(2, -1)
        want += F.linear(block.experts.activation(gate, up), block.experts.w2[e]).float() / 3
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)


@pytest.mark.parametrize("expert_format", ["mxfp4", "nvfp4"])
def test_packed_experts_equal_their_dequantised_tables(expert_format):
    config = tiny_model_config()
    options = dict(dtype=torch.float32, expert_range=(0, 8), device="cpu")
    packed = RoutedExperts(config, 1, expert_format=expert_format, **options)
    plain = RoutedExperts(config, 1, expert_format="plain", **options).requires_grad_(False)
    draw = torch.Generator().manual_seed(0)
    tables, small = {}, {}
    for name in ("w13", "w2"):
        table = packed.expert_tables()[name]
        tables[name] = torch.randint(256, table.shape, generator=draw, dtype=torch.uint8)
        scale = packed.expert_tables()[f"{name}_scale"]
        exponent = torch.randint(-6, -2, scale.shape, generator=draw)
        if expert_format == "mxfp4":
            tables[f"{name}_scale"] = (exponent + 127).to(torch.uint8)
            wide = quant.dequantise_mxfp4(tables[name], tables[f"{name}_scale"], torch.float32)
        else:
            tables[f"{name}_scale"] = torch.exp2(exponent.float()).to(torch.float8_e4m3fn)
            factor = packed.small_tensors()[f"{name}_scale_2"]
            small[f"{name}_scale_2"] = 0.5 + torch.rand(factor.shape, generator=draw)
            wide = quant.dequantise_nvfp4(tables[name], tables[f"{name}_scale"], torch.ones(8), torch.float32)
            factors = small[f"{name}_scale_2"]
            factors = factors.repeat_interleave(32, 1)[..., None] if name == "w13" else factors[:, None, None]
            wide = wide * factors
        getattr(plain, name).copy_(wide)
    packed.rebind(tables, small)
    x = torch.randn(6, 32, generator=draw)
    ids = torch.stack([torch.randperm(8, generator=draw)[:3].sort().values for _ in range(6)])
    weights = torch.rand(6, 3, generator=draw)
    torch.testing.assert_close(packed(x, ids, weights), plain(x, ids, weights), atol=1e-5, rtol=1e-5)


def test_partial_tables_refuse_to_compute_and_rebind_completes_them():
    config = tiny_model_config()
    part = RoutedExperts(config, 4, dtype=torch.float32, expert_format="plain", expert_range=(2, 5), device="cpu")
    assert {n: t.shape[0] for n, t in part.expert_tables().items()} == {"w13": 3, "w2": 3}
    ids, weights = torch.tensor([[0, 1, 2]]), torch.ones(1, 3)
    with pytest.raises(DwdpError, match=r"layer 4 holds experts 2\.\.4 of 8"):
        part(torch.zeros(1, 32), ids, weights)
    full = moe().experts.requires_grad_(False)
    part.rebind(full.expert_tables(), full.small_tensors())
    assert (part.first_expert, part.num_rows) == (0, 8)
    assert part.w13.data_ptr() == full.w13.data_ptr(), "rebind copies nothing"
    x = torch.randn(1, 32)
    assert torch.equal(part(x, ids, weights), full(x, ids, weights))


def test_impossible_tables_are_refused():
    config, options = tiny_model_config(), dict(dtype=torch.float32, device="meta")
    with pytest.raises(ValueError, match="int3"):
        RoutedExperts(config, 1, expert_format="int3", expert_range=(0, 8), **options)
    with pytest.raises(ValueError, match=r"3\.\.9"):
        RoutedExperts(config, 1, expert_format="plain", expert_range=(3, 9), **options)
    narrow = tiny_model_config(moe_intermediate_size=24)
    with pytest.raises(ValueError, match="multiples of 32"):
        RoutedExperts(narrow, 1, expert_format="mxfp4", expert_range=(0, 8), **options)
