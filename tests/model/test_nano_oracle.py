"""The shipped model against another implementation: fp32 equal, bf16 as near as bf16 allows, experts its own."""

from __future__ import annotations

import pytest
import torch

from dwdp.model.checkpoint import Checkpoint
from dwdp.model.loader import load_model
from tests.support.precision import NANO, NANO_FOLDER, Precision, nano_prompts


@pytest.fixture(scope="module")
def prompts() -> list[torch.Tensor]:
    return nano_prompts()


@pytest.fixture(scope="module")
def wanted(prompts) -> list[torch.Tensor]:
    pytest.importorskip("mlx_lm")
    from tests.support.oracle import MlxK3

    with Checkpoint(NANO_FOLDER) as checkpoint:
        tensors = {name: checkpoint.read(entry).float() for name, entry in checkpoint.entries.items()}
        oracle = MlxK3(checkpoint.config, tensors)
    return [oracle.logits(ids) for ids in prompts]


@torch.no_grad()
def test_fp32_logits_equal_the_oracle(prompts, wanted):
    model = load_model(NANO_FOLDER, dtype=torch.float32)
    assert max((model(ids) - want).abs().max().item() for ids, want in zip(prompts, wanted)) < 1e-4


@torch.no_grad()
def test_bf16_top_1_agrees_with_the_fp32_oracle_outside_near_ties(prompts, wanted):
    """Nothing is forced here: a bf16 model picks its own experts. 99.5 % of the clear positions must agree."""
    model = load_model(NANO_FOLDER, dtype=torch.bfloat16)
    found = Precision(NANO)
    for ids, want in zip(prompts, wanted):
        found.add(model(ids), want)
    wrong, text = found.result()
    deviation = torch.cat([w.flatten() for w in wanted]).std()
    print(f"bf16 nano-k3 against the fp32 oracle (logit standard deviation {deviation:.1f}): {text}")
    assert not wrong, f"{wrong}: {text}"
