"""MLA: expanded and absorbed forms, masks, scale, gate and norms against written-out formulas."""

from __future__ import annotations

import pytest
import torch

from dwdp.model.mla import LatentAttention
from dwdp.model.state import MlaState
from tests.support.tiny import tiny_model_config


def block(dtype=torch.float64, **changes) -> tuple[LatentAttention, object]:
    torch.manual_seed(0)
    config = tiny_model_config(**changes)
    return LatentAttention(config, dtype=dtype, device="cpu").requires_grad_(False), config


def by_formula(b: LatentAttention, config, x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """One sequence [T, hidden], one head at a time."""

    def rms(v, weight):
        return v / (v.square().mean(-1, keepdim=True) + eps).sqrt() * weight

    nope, rope, value, latent = b.nope, b.rope, b.value, b.latent
    if config.q_lora_rank is None:
        q = x @ b.q_proj.weight.T
    else:
        q = rms(x @ b.q_a_proj.weight.T, b.q_a_layernorm.weight) @ b.q_b_proj.weight.T
    kv = x @ b.kv_a_proj_with_mqa.weight.T
    c, e = rms(kv[:, :latent], b.kv_a_layernorm.weight), kv[:, latent:]
    causal = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    heads = []
    for h in range(b.num_heads):
        rows = b.kv_b_proj.weight[h * (nope + value) : (h + 1) * (nope + value)]
        key = torch.cat([c @ rows[:nope].T, e], -1)
        query = q[:, h * (nope + rope) : (h + 1) * (nope + rope)]
        scores = (query @ key.T / (nope + rope) ** 0.5).masked_fill(~causal, -torch.inf)
        heads.append(scores.softmax(-1) @ (c @ rows[nope:].T))
    out = torch.cat(heads, -1)
    if config.mla_use_output_gate:
        out = out / (1 + torch.exp(-x @ b.g_proj.weight.T))
    return out @ b.o_proj.weight.T


@pytest.mark.parametrize(
    "changes",
    [{}, {"q_lora_rank": None, "mla_use_output_gate": False}, {"v_head_dim": 40}],
    ids=["K3", "48B", "values wider than keys"],
)
def test_both_forms_equal_the_formula(changes):
    b, config = block(**changes)
    x = torch.randn(1, 40, config.hidden_size, dtype=torch.float64)
    want = by_formula(b, config, x[0])
    torch.testing.assert_close(b(x)[0], want, atol=1e-12, rtol=0)
    rows = torch.zeros(1, 64, config.mla_cache_width, dtype=torch.float64)
    state = MlaState(rows, [0])
    pieces = []
    for a, z in ((0, 17), (17, 18), (18, 36), (36, 37), (37, 38), (38, 40)):
        pieces.append(b(x[:, a:z], state)[0])
        state.lengths[0] = z
    torch.testing.assert_close(torch.cat(pieces), want, atol=1e-12, rtol=0)


@pytest.mark.parametrize("new", [1, 3])
def test_sequences_of_unequal_length_do_not_see_each_others_padding(new):
    b, config = block()
    lengths = [5, 20, 1]
    x = torch.randn(3, 20 + new, config.hidden_size, dtype=torch.float64)
    rows = torch.full((3, 32, config.mla_cache_width), 1e3, dtype=torch.float64)
    for i, length in enumerate(lengths):
        b(x[i : i + 1, :length], MlaState(rows[i : i + 1], [0]))
    batched = torch.stack([x[i, n : n + new] for i, n in enumerate(lengths)])
    got = b(batched, MlaState(rows, lengths))
    for i, length in enumerate(lengths):
        want = by_formula(b, config, x[i, : length + new])[length:]
        torch.testing.assert_close(got[i], want, atol=1e-12, rtol=0)


def test_latent_norms_use_their_own_eps():
    """The whole-model comparison cannot see 1e-6 against 1e-5; small inputs can."""
    b, config = block()
    assert config.rms_norm_eps == 1e-5
    x = 2e-3 * torch.randn(1, 12, config.hidden_size, dtype=torch.float64)
    right, wrong = by_formula(b, config, x[0]), by_formula(b, config, x[0], eps=1e-5)
    assert (right - wrong).abs().max() > 1e-2 * right.abs().max()
    torch.testing.assert_close(b(x)[0], right, atol=1e-12, rtol=1e-9)
    other, other_config = block(lora_norm_eps=1e-5)
    torch.testing.assert_close(other(x)[0], by_formula(other, other_config, x[0], eps=1e-5))


def test_decode_keeps_nothing_derived_from_kv_b():
    """Absorbed halves that outlive the call would go stale when the weight's memory is reused."""
    b, config = block()
    rows = torch.zeros(1, 8, config.mla_cache_width, dtype=torch.float64)
    x = torch.randn(1, 1, config.hidden_size, dtype=torch.float64)
    b(x, MlaState(rows, [3]))
    b.kv_b_proj.weight.copy_(torch.randn_like(b.kv_b_proj.weight))
    fresh, _ = block()
    fresh.load_state_dict(b.state_dict())
    assert torch.equal(b(x, MlaState(rows.clone(), [4])), fresh(x, MlaState(rows.clone(), [4])))
