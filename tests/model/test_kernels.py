"""A whole model computed by kernels, in Triton's interpreter, equals the torch form."""

from __future__ import annotations

import pytest
import torch

from dwdp.kernels import attention, gated, short_conv
from dwdp.model.state import KdaState
from tests.support.tiny import tiny_model, tiny_model_config, token_ids

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def model():
    with torch.no_grad():
        linear = {"full_attn_layers": [2], "kda_layers": [1]}
        yield tiny_model(tiny_model_config(num_hidden_layers=2, linear_attn_config=linear))


def run(model):
    """Prefill of two sequences, a chunk and a decode together, then a step of a plain batch."""
    state, outs = model.new_state(2, 40), []
    for lengths, slots in [((3, 18), (1, 0)), ((1, 5), (0, 1))]:
        ids = torch.cat([token_ids(n, seed=n)[0] for n in lengths])
        outs.append(model(ids, state, lengths=lengths, slots=slots))
    outs.append(model(token_ids(2, batch=2), state, last_only=True).flatten(0, 1))
    return torch.cat(outs), state


def test_logits_and_states_equal_the_torch_form(model, monkeypatch):
    launched = []
    for module, name in [(attention, "attend"), (short_conv, "short_conv"), (gated, "gated")]:
        original = getattr(module, name)

        def spied(*args, name=name, original=original, **options):
            launched.append(name)
            return original(*args, **options)

        monkeypatch.setattr(module, name, spied)
    with torch.no_grad():
        monkeypatch.setenv("DWDP_KERNELS", "torch")
        want, plain = run(model)
        assert not launched
        monkeypatch.setenv("DWDP_KERNELS", "triton")
        got, state = run(model)
    assert {name: launched.count(name) for name in launched} == {"attend": 3, "short_conv": 3, "gated": 6}
    torch.testing.assert_close(got, want, atol=5e-5, rtol=0)
    assert state.lengths == plain.lengths == [21, 10]
    for i, layer in state.layers.items():
        other = plain.layers[i]
        if isinstance(layer, KdaState):
            torch.testing.assert_close(layer.conv, other.conv, atol=2e-5, rtol=0)
            torch.testing.assert_close(layer.recurrent, other.recurrent, atol=2e-5, rtol=0)
        else:
            torch.testing.assert_close(layer.rows, other.rows, atol=5e-5, rtol=0)


def test_a_forward_with_gradients_stays_in_the_torch_form(model, monkeypatch):
    monkeypatch.setenv("DWDP_KERNELS", "triton")
    monkeypatch.setattr(attention, "attend", None)
    with torch.enable_grad():
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        loss = model(token_ids(3)).sum()
        loss.backward()
    assert model.model.layers[1].self_attn.kv_b_proj.weight.grad is not None
