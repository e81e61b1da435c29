"""Kernels compile for sm_90 at Kimi-K3's shapes, within what an SM has; all: `python -m tests.kernels.compiling`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

ONE_OF_EACH = (
    "mxfp4 first up to any", "lanes first of 64", "nvfp4 second up to 24", "fp8 linear up to any", "sum of a token",
    "rms norm", "residual mix of 9", "activation", "prefill", "decode", "parts of decode",
    "short convolution", "norm and gate",
)  # fmt: skip


@pytest.mark.timeout(300)  # half a minute of compilation, on a busy machine more
def test_one_of_each_kernel_fits_on_an_sm(tmp_path):
    """In a process of its own: here kernels are interpreted. Mutated once: six stages in place of three fail."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.compiling"]
    command += [part for name in ONE_OF_EACH for part in ("--only", name)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert found.returncode == 0, found.stdout + found.stderr[-2000:]
    assert found.stdout.count("ok\n") == len(ONE_OF_EACH)
