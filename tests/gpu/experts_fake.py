"""The fake driver with the kernels of the measurement of expert copies; see experts_site.py."""

from __future__ import annotations

import ctypes
import time
from types import SimpleNamespace

from tests.memory.fake_driver import FakeDriver


class BenchDriver(FakeDriver):
    cuMemcpyDtoDAsync = FakeDriver.cuMemcpyAsync
    CUmemcpyFlags = SimpleNamespace(CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE=1)

    def _kernel_spin(self, arguments, grid, block):
        seconds = ctypes.c_ulonglong.from_address(arguments[0]).value / 1e9
        return lambda: time.sleep(seconds)

    def _kernel_plain_copy(self, arguments, grid, block):
        dst, src, count = (ctypes.c_ulonglong.from_address(arguments[i]).value for i in range(3))
        return self._copy(dst, src, 16 * count)
