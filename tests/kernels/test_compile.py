"""The kernels compile for a GPU of capability 9.0 with Kimi-K3's shapes, within its shared memory and registers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dwdp import env

pytest.importorskip("triton")

pytestmark = pytest.mark.timeout(300)  # ten seconds of compilation, on a busy machine more
SHARED_BYTES = 227 << 10  # that one program can have


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    environ = env.child_environment(TRITON_INTERPRET=None, TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("cache")))
    command = [sys.executable, "-m", "tests.kernels.compile_sm90"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_every_kernel_fits_the_shared_memory(found):
    assert len(found) == 5
    for name, one in found.items():
        assert one["shared_bytes"] <= SHARED_BYTES, name


def test_attention_uses_the_products_of_warp_groups(found):
    assert found["prefill"]["warp_group_products"] > 0 and found["decode"]["warp_group_products"] > 0


def test_no_kernel_keeps_its_running_sums_in_local_memory(found):
    """Decode's fill all registers but a few: this version's compiler moves up to 80 words of a thread, 3.6's none."""
    for name, one in found.items():
        assert one.get("local_bytes", 0) == 0, (name, one)
        assert one.get("stack_bytes", 0) <= (320 if name == "decode" else 0), (name, one)
