"""The SM gather: one kernel launch moves a layer's remote bytes with a few resident CTAs.

[Note: units of the gather] Runs are cut into units (dst, src, nbytes) whose addresses and sizes are multiples of 16,
as bulk copies need; what lies before and behind, and runs whose ends are not aligned alike, are edges, copied by
plain stores. Units are dealt round-robin over the peers, and CTA c of G takes units c, c + G, ..., so that all
links carry bytes at all times. `tma` moves a unit in chunks through shared memory by bulk copies that one thread a CTA
issues; `ldst` moves it by 16-byte loads and stores of all threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dwdp.weights.plan import CopySlice

ALIGNMENT = 16
LARGEST_UNIT = 1 << 20
SMALLEST_UNIT = 1 << 15
UNITS_PER_CTA = 32  # at least, where the layer is large enough: the last units end at about one time

STAGES, CHUNK_BYTES, STAGES_AHEAD = 6, 32 << 10, 4
"""Of `tma`: buffers in shared memory, their size, and how many loads are under way while the oldest is stored."""
THREADS = {"tma": 128, "ldst": 512}
SHARED_BYTES = {"tma": STAGES * CHUNK_BYTES, "ldst": 0}
OPTIONS = (f"-DSTAGES={STAGES}", f"-DCHUNK={CHUNK_BYTES}", f"-DAHEAD={STAGES_AHEAD}")

SOURCE = r"""
typedef unsigned long long u64;
typedef unsigned int u32;
struct Unit { u64 dst, src, nbytes; };

__device__ __forceinline__ void copy_edges(const Unit* edges, int count, u32 thread, u32 threads) {
    for (int e = blockIdx.x; e < count; e += gridDim.x) {
        const Unit edge = edges[e];
        const u64 all = edge.dst | edge.src | edge.nbytes;
        if ((all & 7) == 0) {
            for (u64 i = thread; i < edge.nbytes / 8; i += threads) ((u64*)edge.dst)[i] = ((const u64*)edge.src)[i];
        } else if ((all & 3) == 0) {
            for (u64 i = thread; i < edge.nbytes / 4; i += threads) ((u32*)edge.dst)[i] = ((const u32*)edge.src)[i];
        } else {
            for (u64 i = thread; i < edge.nbytes; i += threads)
                ((unsigned char*)edge.dst)[i] = ((const unsigned char*)edge.src)[i];
        }
    }
}

extern "C" __global__ void __launch_bounds__(512)
gather_ldst(const Unit* units, int num_units, const Unit* edges, int num_edges) {
    const u64 step = blockDim.x;
    for (int i = blockIdx.x; i < num_units; i += gridDim.x) {
        const Unit unit = units[i];
        const uint4* src = (const uint4*)unit.src;
        uint4* dst = (uint4*)unit.dst;
        const u64 count = unit.nbytes / 16;
        u64 k = threadIdx.x;
        for (; k + 7 * step < count; k += 8 * step) {
            uint4 v[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) v[j] = __ldcs(src + k + j * step);
#pragma unroll
            for (int j = 0; j < 8; ++j) __stcs(dst + k + j * step, v[j]);
        }
        for (; k < count; k += step) __stcs(dst + k, __ldcs(src + k));
    }
    copy_edges(edges, num_edges, threadIdx.x, blockDim.x);
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void load_chunk(u32 to, u64 from, u32 nbytes, u32 barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(nbytes) : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        ::"r"(to), "l"(from), "r"(nbytes), "r"(barrier) : "memory");
}

__device__ __forceinline__ void store_chunk(u64 to, u32 from, u32 nbytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(nbytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

__device__ __forceinline__ void wait_full(u32 barrier, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    } while (!done);
}

// Chunk k goes through stage k % STAGES. Its load may begin once the store of chunk k - STAGES has read the stage;
// when it begins, the stores up to chunk k - AHEAD were issued, so all but STAGES - AHEAD of them must have read.
extern "C" __global__ void __launch_bounds__(128)
gather_tma(const Unit* units, int num_units, const Unit* edges, int num_edges) {
    extern __shared__ __align__(128) unsigned char stages[];
    __shared__ __align__(8) u64 full[STAGES];
    __shared__ u64 targets[STAGES];
    __shared__ u32 sizes[STAGES];
    if (threadIdx.x >= 32) {
        copy_edges(edges, num_edges, threadIdx.x - 32, blockDim.x - 32);
        return;
    }
    if (threadIdx.x != 0) return;
    for (int s = 0; s < STAGES; ++s)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&full[s])) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    int index = blockIdx.x;
    Unit unit = {0, 0, 0};
    if (index < num_units) unit = units[index];
    u64 loaded = 0, stored = 0;
    for (;;) {
        if (unit.nbytes != 0) {
            const u32 s = (u32)(loaded % STAGES);
            const u32 nbytes = unit.nbytes < CHUNK ? (u32)unit.nbytes : CHUNK;
            if (loaded >= STAGES) asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(STAGES - AHEAD) : "memory");
            targets[s] = unit.dst;
            sizes[s] = nbytes;
            load_chunk(shared_address(stages + s * CHUNK), unit.src, nbytes, shared_address(&full[s]));
            ++loaded;
            unit.dst += nbytes;
            unit.src += nbytes;
            unit.nbytes -= nbytes;
            if (unit.nbytes == 0) {
                index += gridDim.x;
                if (index < num_units) unit = units[index];
            }
            if (loaded - stored < AHEAD) continue;
        }
        if (stored == loaded) break;
        const u32 s = (u32)(stored % STAGES);
        wait_full(shared_address(&full[s]), (u32)(stored / STAGES) & 1);
        store_chunk(targets[s], shared_address(stages + s * CHUNK), sizes[s]);
        ++stored;
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
#endif
"""


@dataclass(frozen=True)
class KernelTable:
    """What the kernel reads: int64 [n, 3] each, rows (dst, src, nbytes), see [Note: units of the gather]."""

    units: np.ndarray
    edges: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes that a launch moves."""
        return int(self.units[:, 2].sum() + self.edges[:, 2].sum())


def kernel_table(slices: Sequence[CopySlice], num_ctas: int) -> KernelTable:
    """Cuts a layer's slices for `num_ctas` CTAs. No two slices overlap, so that order does not matter."""
    total = sum(piece.nbytes for piece in slices)
    unit_bytes = min(LARGEST_UNIT, max(SMALLEST_UNIT, total // (num_ctas * UNITS_PER_CTA)))
    unit_bytes -= unit_bytes % SMALLEST_UNIT
    by_peer: dict[int, list[np.ndarray]] = {}
    edges = []
    for piece in slices:
        head, body = _aligned(piece)
        if body:
            by_peer.setdefault(piece.peer, []).append(_cut(piece.dst + head, piece.src + head, body, unit_bytes))
        for start, end in ((0, head), (head + body, piece.nbytes)):
            if start < end:
                edges.append(_cut(piece.dst + start, piece.src + start, end - start, SMALLEST_UNIT))
    return KernelTable(_deal([np.concatenate(parts) for parts in by_peer.values()]), _join(edges))


def _aligned(piece: CopySlice) -> tuple[int, int]:
    """(bytes before the aligned part, bytes of it)."""
    if (piece.dst - piece.src) % ALIGNMENT:
        return piece.nbytes, 0
    head = min(piece.nbytes, -piece.dst % ALIGNMENT)
    return head, (piece.nbytes - head) // ALIGNMENT * ALIGNMENT


def _cut(dst: int, src: int, nbytes: int, size: int) -> np.ndarray:
    starts = np.arange(0, nbytes, size, dtype=np.int64)
    return np.stack([dst + starts, src + starts, np.minimum(size, nbytes - starts)], axis=1)


def _deal(groups: list[np.ndarray]) -> np.ndarray:
    """One row of each group in turn, until all are empty."""
    if not groups:
        return _join([])
    rounds = np.concatenate([np.arange(len(group)) for group in groups])
    members = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    return np.ascontiguousarray(np.concatenate(groups)[np.lexsort((members, rounds))])


def _join(parts: Iterable[np.ndarray]) -> np.ndarray:
    return np.ascontiguousarray(np.concatenate([np.empty((0, 3), dtype=np.int64), *parts]))
