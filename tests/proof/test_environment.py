"""What the environment does to torch's own allocator does nothing to memory that ranks share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from dwdp import env

ROOT = Path(__file__).parent.parent.parent
RUN = """
import sys, torch
from pathlib import Path
from tests.support.system import prompt, replicated, shared, write_random

model = write_random(Path(sys.argv[1]) / "model", num_experts=7)
expected = replicated(model, lambda rank: rank.logits(prompt(0, 8)))

def body(rank):
    tables = [table for layer in rank.model.moe_layers() for table in layer.expert_tables().values()]
    assert all(map(rank.domain.holds, tables))
    return torch.equal(rank.logits(prompt(0, 8)), expected)

assert shared(model, 2, body) == [True, True]
"""


def test_settings_of_torchs_allocator_change_nothing(tmp_path):
    """Weights are exported from handles of the memory domain, never from torch's allocator."""
    settings = {name: "expandable_segments:True" for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")}
    run = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=60,
        env=env.child_environment(OMP_NUM_THREADS="1", **settings),
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
