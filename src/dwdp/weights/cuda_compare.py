"""Where pieces of device memory differ, byte for byte and without memory for a mask; as fast as both can be read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dwdp.device.nvrtc import TableLaunch
from dwdp.weights.cuda_checksum import RowKernel

NONE = (1 << 64) - 1  # no byte differs

SOURCE = r"""
typedef unsigned long long u64;
struct Pair { u64 left, right, nbytes; };

// CTAs pair * parts ... pair * parts + parts - 1 compare one pair. firsts[pair] starts as the largest number.
extern "C" __global__ void __launch_bounds__(256)
first_differences(const Pair* pairs, int num_pairs, u64* firsts, int parts) {
    const int index = blockIdx.x / parts, part = blockIdx.x % parts;
    const Pair pair = pairs[index];
    const u64 first = (u64)part * blockDim.x + threadIdx.x, step = (u64)parts * blockDim.x;
    const unsigned char* left = (const unsigned char*)pair.left;
    const unsigned char* right = (const unsigned char*)pair.right;
    u64 found = ~0ull, at = 0;
    if (pair.left % 16 == 0 && pair.right % 16 == 0) {
        const uint4 *a = (const uint4*)left, *b = (const uint4*)right;
        const u64 count = pair.nbytes / 16;
        u64 q = first;
        for (; q + 3 * step < count; q += 4 * step) {
            uint4 v[4], w[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) { v[j] = __ldcs(a + q + j * step); w[j] = __ldcs(b + q + j * step); }
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if ((v[j].x ^ w[j].x) | (v[j].y ^ w[j].y) | (v[j].z ^ w[j].z) | (v[j].w ^ w[j].w))
                    found = min(found, q + j * step);
        }
        for (; q < count; q += step) {
            const uint4 v = __ldcs(a + q), w = __ldcs(b + q);
            if ((v.x ^ w.x) | (v.y ^ w.y) | (v.z ^ w.z) | (v.w ^ w.w)) found = min(found, q);
        }
        if (found != ~0ull) {
            u64 byte = 16 * found;
            while (left[byte] == right[byte]) ++byte;
            found = byte;
        }
        at = 16 * count;
    }
    for (u64 i = at + first; i < pair.nbytes; i += step)
        if (left[i] != right[i]) found = min(found, i);
    if (found != ~0ull) atomicMin(firsts + index, found);
}
"""


class CompareKernel(RowKernel):
    """Finds the first byte in which the halves of a pair differ."""

    SOURCE, NAME = SOURCE, "first_differences"


class DeviceDifferences(TableLaunch):
    """The first difference of each pair, prepared: `submit(stream)` computes them, `read()` fetches them.

    pairs: (address, address, bytes) each, in device memory that this device may read. Submitted once.
    """

    def __init__(self, kernel: CompareKernel, pairs: Sequence[tuple[int, int, int]]) -> None:
        self._firsts = np.full(len(pairs), NONE, dtype=np.uint64)
        table = np.array(pairs, dtype=np.int64).reshape(-1, 3)
        super().__init__(kernel.driver, (table, self._firsts), lambda found: kernel.launch(found, table[:, 2]))

    def read(self) -> list[int | None]:
        """Byte in each pair, None where all are equal; the stream must have been synchronised."""
        if self._launch is not None:
            self._tables[1].read_into(self._firsts)
        return [None if first == NONE else first for first in self._firsts.tolist()]
