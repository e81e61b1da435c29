"""Other ways than the product's, to choose by: the gather's kernel with other numbers, other submissions of copies."""

from __future__ import annotations

import ctypes
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dwdp.device.nvrtc import Kernels, Launch
from dwdp.memory.driver import Driver, DriverError
from dwdp.weights.cuda_copy import DEFAULT_CTAS, BatchedCopy, GatherCopy, GraphCopy, PerSliceCopy
from dwdp.weights.gather_kernel import CHUNK_BYTES, SOURCE, STAGES, STAGES_AHEAD, THREADS
from dwdp.weights.plan import CopySlice
from tests.gpu.experts_rates import Rates, host_seconds, k3_plan
from tests.gpu.experts_site import Machine

LDST_BOUNDS = "__launch_bounds__(512)\ngather_ldst"


@dataclass(frozen=True)
class Variant:
    """num_ctas, threads: of a launch; stages, chunk, ahead: of tma, as gather_kernel.py names them."""

    kernel: str
    num_ctas: int = DEFAULT_CTAS
    threads: int = 0
    stages: int = STAGES
    chunk: int = CHUNK_BYTES
    ahead: int = STAGES_AHEAD

    def __str__(self) -> str:
        if self.kernel == "ldst":
            return f"ldst, {self.num_ctas} CTAs of {self.threads or THREADS['ldst']} threads"
        return f"tma, {self.num_ctas} CTAs, {self.stages} x {self.chunk >> 10} KiB, {self.ahead} ahead"


VARIANTS = [
    *(Variant("tma", num_ctas) for num_ctas in (8, 16, 24, 32, 64)),
    *(Variant("tma", stages=s, chunk=c << 10, ahead=a) for s, c, a in
      ((6, 32, 3), (6, 32, 5), (7, 32, 5), (12, 16, 8), (13, 16, 10), (3, 64, 2), (24, 8, 18))),
    *(Variant("ldst", threads=threads) for threads in (256, 512, 1024)),
    Variant("ldst", 32),
]  # fmt: skip


class VariantKernel:
    """What a `GatherCopy` asks of its kernel."""

    def __init__(self, machine: Machine, variant: Variant) -> None:
        self.driver, self.num_ctas = machine.driver, variant.num_ctas
        self._threads = variant.threads or THREADS[variant.kernel]
        self._shared = variant.stages * variant.chunk if variant.kernel == "tma" else 0
        source, options = variant_source(variant)
        self._kernels = Kernels(machine.driver, 0, source, options, **machine.compiler)
        self._function = self._kernels.function(f"gather_{variant.kernel}", dynamic_bytes=self._shared)

    def launch(self, arguments: Sequence[Any]) -> Launch:
        return Launch(self.driver, self._function, self.num_ctas, self._threads, self._shared, arguments)

    def close(self) -> None:
        self._kernels.close()


def variant_source(variant: Variant) -> tuple[str, tuple[str, ...]]:
    """(source, options for the compiler)."""
    assert LDST_BOUNDS in SOURCE
    source = SOURCE
    if variant.kernel == "ldst" and variant.threads:
        source = SOURCE.replace(LDST_BOUNDS, LDST_BOUNDS.replace("512", str(variant.threads)))
    return source, (f"-DSTAGES={variant.stages}", f"-DCHUNK={variant.chunk}", f"-DAHEAD={variant.ahead}")


def measure_variants(rates: Rates, repeats: int) -> list[dict[str, Any]]:
    """Bytes/s of layer 0's whole gather with each variant, and the rows that were wrong behind it."""
    experts, machine = rates.experts, rates.experts.machine
    runs, read = experts.runs(0), experts.reads[0][0]
    wipe = PerSliceCopy(machine.driver, rates.raw)  # other rows of the peers lie in the slot then
    found = []
    for variant in VARIANTS:
        kernel = VariantKernel(machine, variant)
        copy = None
        try:
            copy = GatherCopy(kernel, runs)
            rates.time(wipe)
            seconds = [rates.time(copy) for _ in range(repeats + 1)][1:]
            machine.device.enqueue(machine.device.compute, read, kind="read")
            machine.finish()
            wrong = int((np.array(read.read(), dtype=np.uint64) != experts.expected[0]).sum())
            rate = copy.nbytes / statistics.median(seconds)
            found.append({"variant": str(variant), "bytes_per_second": rate, "wrong": wrong})
        finally:
            machine.device.drain()
            if copy is not None:
                copy.close()
            kernel.close()
    return found


class DeviceCopies:
    """As PerSliceCopy, by the call that is told that both sides are device memory."""

    def __init__(self, driver: Driver, slices: Sequence[CopySlice]) -> None:
        pointer = driver.api.CUdeviceptr
        self._driver, self._copy = driver, driver.api.cuMemcpyDtoDAsync
        self._calls = [(pointer(one.dst), pointer(one.src), one.nbytes) for one in slices]

    def submit(self, stream: Any) -> None:
        for call in self._calls:
            (result,) = self._copy(*call, stream)
            if int(result) != 0:
                raise self._driver.error("cuMemcpyDtoDAsync", result)

    def close(self) -> None:
        """Nothing is held."""


class BatchedOverlapping(BatchedCopy):
    """The driver is told that the copies run beside compute."""

    def __init__(self, driver: Driver, slices: Sequence[CopySlice]) -> None:
        super().__init__(driver, slices)
        (attributes,) = self._arguments[4]
        attributes.flags = driver.api.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE


class BatchedRaw:
    """The call of the driver's library itself over arrays that are made once: what the bindings cost beside it."""

    def __init__(self, driver: Driver, slices: Sequence[CopySlice]) -> None:
        self._call = ctypes.CDLL("libcuda.so.1").cuMemcpyBatchAsync_v2
        count = len(slices)
        addresses, sizes = ctypes.c_uint64 * count, ctypes.c_size_t * count
        self._arrays = (
            addresses(*(one.dst for one in slices)),
            addresses(*(one.src for one in slices)),
            sizes(*(one.nbytes for one in slices)),
        )
        self._count = ctypes.c_size_t(count)
        self._attributes = (ctypes.c_int * 6)(1)  # in the stream's order, no hints, no flags
        self._first = (ctypes.c_size_t * 1)(0)
        self._driver = driver

    def submit(self, stream: Any) -> None:
        result = self._call(
            *self._arrays, self._count, self._attributes, self._first, ctypes.c_size_t(1), ctypes.c_void_p(int(stream))
        )
        if result:
            raise DriverError("cuMemcpyBatchAsync_v2", str(result), f"cuMemcpyBatchAsync_v2 failed with {result}")

    def close(self) -> None:
        """Nothing is held."""


WAYS = {
    "per_slice": {"cuMemcpyAsync": PerSliceCopy, "cuMemcpyDtoDAsync": DeviceCopies, "a graph": GraphCopy},
    "batched": {"a batch": BatchedCopy, "a batch beside compute": BatchedOverlapping, "the library alone": BatchedRaw},
}


def measure_submissions(rates: Rates, repeats: int) -> list[dict[str, Any]]:
    """What the host needs for a layer of Kimi-K3 by copies that are submitted in other ways, and the bytes/s. A
    way that the driver refuses has its error instead."""
    machine, found = rates.experts.machine, []
    for num_ranks, transfer in itertools.product((8, 16), WAYS):
        plan = k3_plan(rates.experts, transfer, num_ranks)
        slices = plan.slices or plan.batch
        for way, make in WAYS[transfer].items():
            name = f"{len(slices)} copies by {way}, N={num_ranks}"
            try:
                copy = make(machine.driver, slices)
            except (DriverError, OSError) as error:
                found.append({"variant": name, "error": str(error)})
                continue
            try:
                seconds = statistics.median([rates.time(copy) for _ in range(3)])
                host = host_seconds(machine, copy, repeats)
                found.append({"variant": name, "bytes_per_second": plan.nbytes / seconds, **host})
            finally:
                machine.device.drain()
                copy.close()
    return found
