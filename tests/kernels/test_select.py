"""Which form of a computation runs, and how a form that cannot run is refused."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch

from dwdp import env
from dwdp.errors import ConfigError
from dwdp.kernels import select
from dwdp.kernels.select import kernels_for, use_triton


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU of the given compute capability; returns what sets it."""

    def of(major: int, *, installed: bool = True) -> str:
        select._form.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (major, 0))
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: "found" if installed else None)
        return "cuda:0"

    yield of
    select._form.cache_clear()


def test_the_host_runs_the_torch_form_and_refuses_kernels_in_one_line():
    assert kernels_for("cpu", {}) == kernels_for("cpu", {"DWDP_KERNELS": "torch"}) == "torch"
    for environ in ({"DWDP_KERNELS": "triton"}, {"DWDP_KERNELS": " Triton ", "TRITON_INTERPRET": "0"}):
        with pytest.raises(ConfigError, match="DWDP_KERNELS=triton needs a GPU") as caught:
            kernels_for("cpu", environ)
        assert "\n" not in str(caught.value)


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_the_interpreter_runs_kernels_on_the_host_where_the_tests_have_triton():
    """Fails, and does not skip, where the development extra was not installed: no kernel would be tested there."""
    assert importlib.util.find_spec("triton") is not None
    assert kernels_for("cpu", {"DWDP_KERNELS": "triton", "TRITON_INTERPRET": "1"}) == "triton"


def test_auto_takes_kernels_on_a_gpu_that_has_run_them(gpu):
    pytest.importorskip("triton")
    assert kernels_for(gpu(9), {}) == "triton"
    assert kernels_for(gpu(8), {}) == kernels_for(gpu(10), {}) == kernels_for(gpu(9, installed=False), {}) == "torch"
    assert kernels_for(gpu(8), {"DWDP_KERNELS": "triton"}) == "triton"
    assert kernels_for(gpu(9), {"DWDP_KERNELS": "torch"}) == "torch"


def test_kernels_without_triton_are_refused(gpu):
    with pytest.raises(ConfigError, match="triton is not installed"):
        kernels_for(gpu(9, installed=False), {"DWDP_KERNELS": "triton"})


def test_a_word_that_is_no_form_is_refused_when_the_environment_is_read():
    with pytest.raises(ConfigError, match="DWDP_KERNELS='cutlass' cannot be read: it accepts auto, torch or triton"):
        env.check_environment({"DWDP_KERNELS": "cutlass"})


def test_what_needs_a_gradient_and_fp64_run_as_torch(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("DWDP_KERNELS", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x = torch.zeros(2, requires_grad=True)
    assert not use_triton(x) and not use_triton(x.double().detach())
    assert use_triton(x.detach())
    with torch.no_grad():
        assert use_triton(x)


def test_a_module_of_kernels_imports_without_triton_and_refuses_a_launch():
    code = """
import sys
sys.modules['triton'] = None
from dwdp.errors import ConfigError
from dwdp.kernels.lang import triton, tl, MISSING
@triton.jit
def kernel(x: 'tl.constexpr'): pass
assert MISSING
for attempt in (lambda: kernel[(1,)](2), lambda: triton.cdiv(3, 2)):
    try:
        attempt()
    except ConfigError as error:
        assert "triton" in str(error)
    else:
        raise AssertionError
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "lost", ["gluon.constexpr_function", "language.DistributedLinearLayout", "language.nvidia.hopper"]
)
def test_a_triton_whose_gluon_has_other_names_has_all_other_kernels(lost):
    pytest.importorskip("triton")
    place, _, name = f"triton.experimental.gluon.{lost.removeprefix('gluon.')}".rpartition(".")
    code = f"""
import importlib, sys
if {name!r} == 'hopper':
    sys.modules['{place}.hopper'] = None
else:
    delattr(importlib.import_module({place!r}), {name!r})
from dwdp.kernels import moe
from dwdp.kernels.lang import GLUON_MISSING, MISSING
assert GLUON_MISSING and not MISSING
assert not moe.lanes_on('mxfp4', 'cuda:0')
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
