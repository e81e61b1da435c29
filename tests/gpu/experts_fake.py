"""The fake driver with the kernels of the measurement of expert copies; see experts_site.py."""

from __future__ import annotations

import ctypes
import time
from enum import IntEnum
from types import SimpleNamespace

from tests.memory.fake_driver import OK, FakeDriver


class CUstreamCaptureMode(IntEnum):
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1


class BenchDriver(FakeDriver):
    CUstreamCaptureMode = CUstreamCaptureMode
    captured: list[tuple] | None = None  # copies of the graph that is being captured

    def cuMemcpyAsync(self, dst, src, size, stream):
        if self.captured is None:
            return super().cuMemcpyAsync(dst, src, size, stream)
        self.captured.append((dst, src, size))
        return (OK,)

    cuMemcpyDtoDAsync = FakeDriver.cuMemcpyAsync
    CUmemcpyFlags = SimpleNamespace(CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE=1)

    def cuStreamBeginCapture(self, stream, mode):
        self.captured = []
        return (OK,)

    def cuStreamEndCapture(self, stream):
        graph, self.captured = self.captured, None
        return OK, graph

    def cuGraphInstantiate(self, graph, flags):
        return OK, graph

    def cuGraphLaunch(self, graph, stream):
        for copy in graph:
            self.cuMemcpyAsync(*copy, stream)
        return (OK,)

    def cuGraphExecDestroy(self, graph):
        return (OK,)

    cuGraphDestroy = cuGraphExecDestroy

    def _kernel_spin(self, arguments, grid, block):
        seconds = ctypes.c_ulonglong.from_address(arguments[0]).value / 1e9
        return lambda: time.sleep(seconds)

    def _kernel_plain_copy(self, arguments, grid, block):
        dst, src, count = (ctypes.c_ulonglong.from_address(arguments[i]).value for i in range(3))
        return self._copy(dst, src, 16 * count)
