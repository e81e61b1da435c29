"""The predecessor's switches (Kimi-Linear 48B) against transformers' kimi_linear."""

from __future__ import annotations

import pytest
import torch

from dwdp.model.config import ModelConfig
from tests.support.oracle import assert_close, kimi_linear_logits
from tests.support.tiny import chunked, random_tensors, tiny_48b_config_dict, tiny_model, token_ids

pytest.importorskip("transformers.models.kimi_linear")


@pytest.mark.parametrize("q_lora_rank", [24, None])
def test_48b_mode_matches_transformers(q_lora_rank):
    config = tiny_48b_config_dict(q_lora_rank=q_lora_rank)
    parsed = ModelConfig.from_dict(config)
    tensors = random_tensors(parsed)
    ids = token_ids(150, batch=2)
    want = kimi_linear_logits(config, tensors, ids)
    ours, exact = tiny_model(parsed, tensors), tiny_model(parsed, tensors, torch.float64)(ids)
    assert_close(ours(ids), want, exact, f"48B, q_lora_rank {q_lora_rank}")
    assert_close(chunked(ours, ids, [67, 148, 149]), want, exact, "48B, chunks and decode")


def test_a_strong_unbounded_gate_is_finite_and_right():
    """softplus gates have no bound: decays inside a sub-chunk must not be factored either."""
    config = tiny_48b_config_dict()
    parsed = ModelConfig.from_dict(config)
    tensors = random_tensors(parsed)
    for name, tensor in tensors.items():
        if name.endswith("A_log"):
            tensor[:4] = torch.tensor([0.0, 1.0, 3.0, 4.0])
        if name.endswith("dt_bias"):
            tensor.add_(2.0)
    ids = token_ids(100)
    got = tiny_model(parsed, tensors)(ids)
    assert got.isfinite().all()
    exact = tiny_model(parsed, tensors, torch.float64)(ids)
    assert_close(got, kimi_linear_logits(config, tensors, ids), exact, "48B, strong gates")
