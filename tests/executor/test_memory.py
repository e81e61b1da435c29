"""What a rank says that it holds."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from dwdp.executor.memory import held_bytes


def test_on_a_gpu_all_that_torch_has_taken_counts_and_not_its_tensors_alone(monkeypatch):
    """Fails when the model's bytes are counted, when cached blocks are not, or when another device is asked."""
    gpu = torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda where: {gpu: 700}[where])
    held = held_bytes(SimpleNamespace(allocated_bytes=40), gpu, 5)
    assert held == {"domain_bytes": 40, "torch_bytes": 700, "total_bytes": 740}
    assert held_bytes(None, torch.device("cpu"), 5) == {"domain_bytes": 0, "torch_bytes": 5, "total_bytes": 5}
