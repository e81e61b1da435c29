"""KDA: chunk form, recurrence and an independent fp64 recurrence agree; gate, norm and convolution too."""

from __future__ import annotations

import math

import pytest
import torch

from dwdp.model import kda
from dwdp.model.kda import KimiDeltaAttention, ShortConv, kda_chunk, kda_gate, kda_recurrent
from dwdp.model.norms import l2norm
from dwdp.model.state import KdaState
from tests.support.tiny import tiny_model_config


def inputs(tokens, heads=2, keys=16, values=8, batch=2, gate=None, dtype=torch.float64, seed=0):
    draw = torch.Generator().manual_seed(seed)
    shape = (batch, tokens, heads)
    q, k = (l2norm(torch.randn(*shape, keys, generator=draw, dtype=dtype)) for _ in range(2))
    v = torch.randn(*shape, values, generator=draw, dtype=dtype)
    g = -5 * torch.rand(*shape, keys, generator=draw, dtype=dtype) ** 3
    if gate is not None:
        g = torch.full_like(g, gate)
    beta = torch.rand(*shape, generator=draw, dtype=dtype)
    state = torch.randn(batch, heads, keys, values, generator=draw, dtype=dtype)
    return q, k, v, g, beta, state


def independent_recurrence(q, k, v, g, beta, state):
    """The formulas, one sequence, head and token at a time, in fp64 matrices."""
    out, last = torch.zeros_like(v, dtype=torch.float64), torch.zeros_like(state, dtype=torch.float64)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            s = state[b, h].double()
            for t in range(q.shape[1]):
                key, value = k[b, t, h].double(), v[b, t, h].double()
                s = torch.diag(g[b, t, h].double().exp()) @ s
                s = s + beta[b, t, h].double() * torch.outer(key, value - key @ s)
                out[b, t, h] = q[b, t, h].double() @ s
            last[b, h] = s
    return out, last


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 63, 64, 65, 128, 150])
def test_chunk_and_recurrent_equal_the_independent_recurrence(tokens):
    args = inputs(tokens, batch=1)
    want = independent_recurrence(*args)
    for got in (kda_recurrent(*args), kda_chunk(*args, gate_floor=-5.0), kda_chunk(*args)):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


@pytest.mark.parametrize("floor", [-5.0, None])
def test_fp32_chunk_stays_near_fp64(floor):
    args = inputs(300, keys=32, values=32)
    want = kda_recurrent(*args)
    got = kda_chunk(*(x.float() for x in args), gate_floor=floor)
    for g, w in zip(got, want):
        assert g.dtype == torch.float32
        assert (g - w).abs().max() < 5e-6


@pytest.mark.parametrize("floor", [-5.0, None])
def test_gates_at_the_bound_are_finite_and_right(floor):
    args = inputs(200, gate=-5.0)
    got = kda_chunk(*(x.float() for x in args), gate_floor=floor)
    for g, w in zip(got, independent_recurrence(*args)):
        assert g.isfinite().all()
        assert (g - w).abs().max() < 1e-6


def test_an_unbounded_gate_of_any_strength_is_finite_and_right():
    args = list(inputs(130))
    args[3] = -(torch.rand_like(args[3]) ** 8) * 300
    got = kda_chunk(*(x.float() for x in args))
    for g, w in zip(got, independent_recurrence(*args)):
        assert g.isfinite().all()
        assert (g - w).abs().max() < 5e-6


def test_segments_do_not_change_the_result(monkeypatch):
    args = inputs(300, dtype=torch.float32)
    want = kda_chunk(*args, gate_floor=-5.0)
    monkeypatch.setattr(kda, "SEGMENT_ELEMENTS", 1)
    torch.testing.assert_close(kda_chunk(*args, gate_floor=-5.0), want, atol=1e-6, rtol=0)


@pytest.mark.parametrize("floor", [-5.0, None])
def test_chunk_gradients_equal_the_recurrences(floor):
    args = [x.requires_grad_() for x in inputs(90, batch=1)]
    weight = torch.randn(1, 90, 2, 8, dtype=torch.float64)

    def gradients(form, **options):
        out, state = form(*args, **options)
        return torch.autograd.grad((out * weight).sum() + state.square().sum(), args)

    torch.testing.assert_close(gradients(kda_chunk, gate_floor=floor), gradients(kda_recurrent), atol=1e-10, rtol=1e-9)


def test_gate_formulas():
    f, a_log, dt_bias = torch.tensor([[[[0.3, -2.0]]]]), torch.tensor([0.7]), torch.tensor([-1.0, 0.5])
    shifted = [0.3 - 1.0, -2.0 + 0.5]
    bounded = [-5 / (1 + math.exp(-math.exp(0.7) * x)) for x in shifted]
    softplus = [-math.exp(0.7) * math.log1p(math.exp(x)) for x in shifted]
    torch.testing.assert_close(kda_gate(f, a_log, dt_bias, -5.0).flatten(), torch.tensor(bounded))
    torch.testing.assert_close(kda_gate(f, a_log, dt_bias, None).flatten(), torch.tensor(softplus))


def test_l2norm_adds_eps_to_the_sum_inside_the_root():
    """The whole-model comparison cannot see this eps: a row whose squares sum to 1e-6 shrinks by sqrt(2)."""
    row = torch.full((1, 128), (1e-6 / 128) ** 0.5)
    torch.testing.assert_close(l2norm(row).norm(), torch.tensor(0.5**0.5))
    mean_instead = row / (row.square().mean() + 1e-6).sqrt() / 128**0.5
    assert (l2norm(row) - mean_instead).abs().max() > 0.03
    assert torch.equal(l2norm(torch.zeros(1, 4)), torch.zeros(1, 4))


def test_short_convolution_is_causal_per_channel_then_silu():
    conv = ShortConv(3, 4, dtype=torch.float32, device="cpu").requires_grad_(False)
    conv.weight.normal_()
    window = torch.randn(1, 3 + 5, 3)
    want = torch.zeros(1, 5, 3, dtype=torch.float64)
    for t in range(5):
        for d in range(3):
            want[0, t, d] = sum(conv.weight[d, 0, j].double() * window[0, t + j, d] for j in range(4))
    want = want / (1 + torch.exp(-want))
    torch.testing.assert_close(conv(window).double(), want, atol=1e-6, rtol=0)


def test_conv_state_holds_the_last_raw_rows():
    """A state of the rows after convolution, or in another order, would pass every shape check."""
    config = tiny_model_config()
    block = KimiDeltaAttention(config, dtype=torch.float32, device="cpu").requires_grad_(False)
    x = torch.randn(2, 2, config.hidden_size)
    width = config.linear_attn_config.width
    state = KdaState(torch.zeros(2, 3, 3 * width), torch.zeros(2, 4, 16, 16))
    block(x, state)
    raw = torch.cat([block.q_proj(x), block.k_proj(x), block.v_proj(x)], -1)
    assert state.conv.abs().max() == 0, "nothing counts before the commit"
    state.commit()
    torch.testing.assert_close(state.conv, torch.cat([torch.zeros(2, 1, 3 * width), raw], 1))
