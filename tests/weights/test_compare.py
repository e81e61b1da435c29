"""Where pieces of memory differ: the host and the GPU's prepared form find the same first byte."""

import ctypes

import numpy as np
import pytest

from dwdp.device.nvrtc import compile_cubin
from dwdp.errors import MemoryDomainError
from dwdp.weights import copy
from dwdp.weights.cuda_compare import SOURCE
from dwdp.weights.mover import HOST_MOVER
from tests.memory.fake_driver import CUresult
from tests.weights.test_cuda_copy import Setting

SIZES = [(0, 0, 100_000), (16, 32, 4096), (3, 8, 1001), (5, 9, 1), (7, 7, 0), (4096, 8192, 70_000)]


@pytest.fixture
def setting(monkeypatch):
    monkeypatch.setattr(copy, "COMPARED_BYTES", 1000)  # a difference may lie in any of many steps
    setting = Setting()
    yield setting
    setting.close()


def pairs_of(setting):
    """Every piece of the source and of the target, which are equal over each pair."""
    src, dst = setting.addresses
    pairs, at = [], 0
    for left, right, nbytes in SIZES:
        ctypes.memmove(dst + at + right, src + at + left, nbytes)
        pairs.append((src + at + left, dst + at + right, nbytes))
        at += -(-(nbytes + 64) // 65536) * 65536
    return pairs


def found(mover, pairs):
    return mover.first_differences(pairs)


def test_the_first_byte_that_differs_is_found_in_each_pair_and_none_in_equal_ones(setting):
    """Fails when the offset of a step or of a pair is lost, or when the last difference is taken."""
    pairs = pairs_of(setting)
    movers = (HOST_MOVER, setting.domain.mover)
    for mover in movers:
        assert found(mover, pairs) == [None] * len(pairs) and found(mover, []) == []
    expected = [99_999, 2049, 1000, 0, None, 12_345]
    for (_, right, nbytes), first in zip(pairs, expected):
        for at in () if first is None else {first, (first + nbytes) // 2, nbytes - 1}:
            ctypes.c_ubyte.from_address(right + at).value ^= 1
    for mover in movers:
        assert found(mover, pairs) == expected
    assert setting.api.live()[3] == 0  # no table is left


def test_one_launch_compares_all_pairs_and_a_failing_table_leaves_nothing(setting):
    pairs = pairs_of(setting)
    found(setting.domain.mover, pairs)
    launches = [call for call in setting.api.calls if call[0] == "cuLaunchKernel"]
    assert len(launches) == 1
    setting.api.fail["cuMemcpyHtoD"] = CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(MemoryDomainError, match="cuMemcpyHtoD"):
        found(setting.domain.mover, pairs)
    assert setting.api.live()[3] == 0
    setting.api.fail.clear()


def test_the_host_compares_without_a_mask_of_everything(monkeypatch):
    """Fails when all bytes are compared at once."""
    left, right = np.zeros(10_000_000, np.uint8), np.zeros(10_000_000, np.uint8)
    asked, real = [], np.frombuffer
    monkeypatch.setattr(copy.np, "frombuffer", lambda data, dtype: asked.append(len(data)) or real(data, dtype=dtype))
    assert copy.first_difference(left.ctypes.data, right.ctypes.data, len(left)) is None
    assert sum(asked) == 2 * len(left) and max(asked) <= 1 << 20


def test_the_kernel_compiles():
    pytest.importorskip("cuda.bindings.nvrtc")
    try:
        assert b"first_differences" in compile_cubin(SOURCE, "sm_90")
    except MemoryDomainError as error:
        if "cannot be loaded" in str(error):
            pytest.skip(str(error))
        raise
