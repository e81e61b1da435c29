"""The checksum of rows in device memory, see [Note: the checksum] in checksum.py."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from dwdp.device.nvrtc import Compiler, Kernels, Launch, TableLaunch, compile_cubin
from dwdp.memory.checksum import FACTOR, LENGTH
from dwdp.memory.driver import Driver

logger = logging.getLogger(__name__)

THREADS = 256
BYTES_PER_CTA = 1 << 20
MAX_PARTS = 64

OPTIONS = (f"-DFACTOR={FACTOR}ull", f"-DLENGTH={LENGTH}ull")
SOURCE = r"""
typedef unsigned long long u64;
typedef unsigned int u32;
struct Row { u64 address, nbytes; };

__device__ __forceinline__ u64 weight(u64 i) { return 1 + 2 * FACTOR * i; }

__device__ __forceinline__ u64 quad(uint4 v, u64 i) {
    return v.x * weight(i) + v.y * weight(i + 1) + v.z * weight(i + 2) + v.w * weight(i + 3);
}

// CTAs row * parts ... row * parts + parts - 1 add up one row.
extern "C" __global__ void __launch_bounds__(256)
row_checksums(const Row* rows, int num_rows, u64* sums, int parts) {
    const int index = blockIdx.x / parts, part = blockIdx.x % parts;
    const Row row = rows[index];
    const u64 first = (u64)part * blockDim.x + threadIdx.x, step = (u64)parts * blockDim.x;
    const u64 words = row.nbytes / 4;
    const unsigned char* bytes = (const unsigned char*)row.address;
    u64 sum = 0, at = 0;
    if (row.address % 16 == 0) {
        const uint4* quads = (const uint4*)row.address;
        const u64 count = words / 4;
        u64 q = first;
        for (; q + 3 * step < count; q += 4 * step) {
            uint4 v[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) v[j] = __ldcs(quads + q + j * step);
#pragma unroll
            for (int j = 0; j < 4; ++j) sum += quad(v[j], 4 * (q + j * step));
        }
        for (; q < count; q += step) sum += quad(__ldcs(quads + q), 4 * q);
        at = 4 * count;
    }
    for (u64 i = at + first; i < words; i += step) {
        const unsigned char* p = bytes + 4 * i;
        const u32 word = row.address % 4 == 0 ? *(const u32*)p
            : (u32)p[0] | (u32)p[1] << 8 | (u32)p[2] << 16 | (u32)p[3] << 24;
        sum += word * weight(i);
    }
    if (first == 0) {
        u32 word = 0;
        for (u64 i = 4 * words; i < row.nbytes; ++i) word |= (u32)bytes[i] << (8 * (i & 3));
        sum += word * weight(words) + row.nbytes * LENGTH;
    }
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(0xffffffffu, sum, offset);
    __shared__ u64 warps[8];
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        u64 total = 0;
        for (int w = 0; w < 8; ++w) total += warps[w];
        atomicAdd(sums + index, total);
    }
}
"""


class RowKernel:
    """A compiled kernel that works on many rows of device memory, some CTAs on each; `close()` unloads it, idempotent.

    Its parameters are a table of rows, their number, a table of one result a row, and the CTAs of a row.
    """

    SOURCE: str
    OPTIONS: tuple[str, ...] = ()
    NAME: str

    def __init__(self, driver: Driver, device_index: int, *, compiler: Compiler = compile_cubin) -> None:
        self.driver = driver
        self._kernels = Kernels(driver, device_index, self.SOURCE, self.OPTIONS, compiler=compiler)
        try:
            self._function = self._kernels.function(self.NAME)
        except BaseException:
            self.close()
            raise

    def launch(self, addresses: Sequence[ctypes.c_void_p], lengths: Any) -> Launch | None:
        """addresses: of the rows' and the results' table; lengths: bytes of each row, an array."""
        count = len(lengths)
        if not count:
            return None
        parts = min(MAX_PARTS, max(1, int(lengths.max()) // BYTES_PER_CTA))
        rows, results = addresses
        arguments = [rows, ctypes.c_int(count), results, ctypes.c_int(parts)]
        return Launch(self.driver, self._function, count * parts, THREADS, 0, arguments)

    def close(self) -> None:
        self._kernels.close()


class ChecksumKernel(RowKernel):
    """Adds rows up."""

    SOURCE, OPTIONS, NAME = SOURCE, OPTIONS, "row_checksums"


class DeviceChecksums(TableLaunch):
    """The checksums of many rows, prepared: `submit(stream)` computes them, `read()` fetches the last ones.

    rows: (address, nbytes) each, in device memory that this device may read. fetched: every submission also brings
    the checksums to the host, in stream order, where `fetched()` finds them once the stream has come so far.
    """

    def __init__(self, kernel: ChecksumKernel, rows: Sequence[tuple[int, int]], *, fetched: bool = False) -> None:
        driver = self._driver = kernel.driver
        self._sums = np.zeros(len(rows), dtype=np.uint64)
        self._pinned = 0  # address of host memory that the device writes without the host's help
        table = np.array(rows, dtype=np.int64).reshape(-1, 2)

        def prepare(addresses: list[ctypes.c_void_p]) -> Launch | None:
            launch = kernel.launch(addresses, table[:, 1])
            if launch is not None and fetched:
                self._pinned = int(driver("cuMemHostAlloc", self._sums.nbytes, 0, what="checksums"))
            return launch

        super().__init__(driver, (table, self._sums), prepare)

    def submit(self, stream: Any) -> None:
        """Enqueues the computation behind what is on the driver's stream."""
        if self._launch is not None:
            self._driver("cuMemsetD8Async", self._tables[1].address, 0, self._sums.nbytes, stream, what="checksums")
            self._launch.submit(stream)
            if self._pinned:
                sums, nbytes = self._tables[1].address, self._sums.nbytes
                self._driver("cuMemcpyDtoHAsync", self._pinned, sums, nbytes, stream, what="checksums")

    def fetched(self) -> list[int]:
        """One checksum a row, of the last submission; the stream must have come past it."""
        if self._pinned:
            ctypes.memmove(self._sums.ctypes.data, self._pinned, self._sums.nbytes)
        return self._sums.tolist()

    def read(self) -> list[int]:
        """One checksum a row; the stream must have been synchronised."""
        if self._launch is not None:
            self._tables[1].read_into(self._sums)
        return self._sums.tolist()

    def close(self) -> None:
        super().close()
        pinned, self._pinned = self._pinned, 0
        if pinned:
            try:
                self._driver("cuMemFreeHost", pinned)
            except Exception:
                logger.exception("host memory of checksums could not be freed")
