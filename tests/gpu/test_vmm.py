"""The smoke run: on the fake driver anywhere, on a GPU where there is one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def smoke(*arguments: str) -> str:
    command = [sys.executable, "-m", "tests.gpu.smoke_vmm", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=115)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_processes_share_memory_on_the_fake_driver(tmp_path):
    """Two real processes pass real descriptors; each has a fake driver of its own."""
    shown = smoke("--fake", "--out", str(tmp_path))
    assert "all checks hold" in shown and "imex-channels" in shown and (tmp_path / "trace.json").stat().st_size > 500
    assert shown.count("handle type between processes") == 2 and "WRONG" not in shown


@pytest.mark.gpu
def test_processes_share_memory_on_gpus(tmp_path):
    assert "all checks hold" in smoke("--out", str(tmp_path))
