"""On a GPU: the model equals the golden tensors that another implementation made on a CPU."""

from __future__ import annotations

import pytest
import torch

from dwdp.model.config import ModelConfig
from dwdp.model.decoder import KimiK3Model
from tests.support import make_golden
from tests.support.tiny import fill_model


@pytest.mark.gpu
def test_fp32_logits_equal_the_golden_ones_whole_and_in_chunks():
    weights, golden = make_golden.load()
    config = ModelConfig.from_dict(make_golden.CONFIG)
    model = KimiK3Model(config, dtype=torch.float32, device="cuda")
    fill_model(model, {name: tensor.float() for name, tensor in weights.items()})
    ids, want = golden["ids"].view(1, -1).cuda(), golden["logits"].view(-1, config.vocab_size)
    with torch.no_grad():
        whole = model(ids)[0].cpu()
        state = model.new_state(1, ids.shape[1])
        parts = torch.cat([model(ids[:, a:b], state)[0] for a, b in ((0, 70), (70, 96), (96, 97))]).cpu()
    assert (whole - want).abs().max() < 1e-4
    assert (parts - want).abs().max() < 1e-4
