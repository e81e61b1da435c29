"""A layer's copies on CUDA, prepared at set-up: `submit(stream)` only hands finished arguments to the driver.

    per_slice   one cuMemcpyAsync a slice; where there are several, as one CUDA graph
    batched     one cuMemcpyBatchAsync a layer
    gather      one kernel launch a layer, see gather_kernel.py

All move the same bytes. A prepared copy knows no stream: the device gives its own, see `CudaDevice.enqueue`.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from typing import Any

from dwdp.device.nvrtc import Compiler, Kernels, Launch, TableLaunch, compile_cubin
from dwdp.errors import DwdpError
from dwdp.memory.driver import Driver
from dwdp.weights.gather_kernel import OPTIONS, SHARED_BYTES, SOURCE, THREADS, kernel_table
from dwdp.weights.plan import CopySlice

BATCH_VERSION = 13000
"""cuMemcpyBatchAsync as cuda-bindings 13 calls it came with CUDA 13.0."""
BULK_CAPABILITY = (9, 0)
DEFAULT_CTAS = 16
GRAPH_FROM = 8
"""Slices from which one launch of a graph costs the host less than the calls."""

logger = logging.getLogger(__name__)


class PerSliceCopy:
    """One cuMemcpyAsync for each slice, in order."""

    transfer = "per_slice"

    def __init__(self, driver: Driver, slices: Sequence[CopySlice]) -> None:
        pointer = driver.api.CUdeviceptr
        self.nbytes = sum(piece.nbytes for piece in slices)
        self._driver, self._copy = driver, driver.api.cuMemcpyAsync
        self._ok = driver.api.CUresult.CUDA_SUCCESS
        self._calls = [(pointer(piece.dst), pointer(piece.src), piece.nbytes) for piece in slices if piece.nbytes]

    def submit(self, stream: Any) -> None:
        copy, ok = self._copy, self._ok
        for dst, src, nbytes in self._calls:
            (result,) = copy(dst, src, nbytes, stream)
            if result != ok:
                raise self._driver.error("cuMemcpyAsync", result, f"{nbytes} bytes from {int(src):#x} to {int(dst):#x}")

    def close(self) -> None:
        """Nothing is held."""


class GraphCopy:
    """The copies of `PerSliceCopy`, in the same order, captured once: one launch costs the host what one copy does."""

    transfer = "per_slice"

    def __init__(self, driver: Driver, slices: Sequence[CopySlice]) -> None:
        api, copies = driver.api, PerSliceCopy(driver, slices)
        self.nbytes = copies.nbytes
        self._driver, self._call, self._ok = driver, api.cuGraphLaunch, api.CUresult.CUDA_SUCCESS
        self._graph = self._prepared = None
        _, highest = driver("cuCtxGetStreamPriorityRange")
        stream = driver("cuStreamCreateWithPriority", int(api.CUstream_flags.CU_STREAM_NON_BLOCKING), highest)
        what = f"a graph of {len(slices)} copies"
        try:
            # Of this thread alone: other threads of the process, and torch's, go on as they are.
            driver("cuStreamBeginCapture", stream, api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            try:
                copies.submit(stream)
            finally:  # nothing else may be done with the stream before
                self._graph = driver("cuStreamEndCapture", stream, what=what)
            self._prepared = driver("cuGraphInstantiate", self._graph, 0, what=what)
        except BaseException:
            self.close()
            raise
        finally:
            self._destroy("cuStreamDestroy", stream)

    def submit(self, stream: Any) -> None:
        (result,) = self._call(self._prepared, stream)
        if result != self._ok:
            raise self._driver.error("cuGraphLaunch", result, f"copies of {self.nbytes} bytes")

    def close(self) -> None:
        """Gives the graph back; no launch may be in flight. Idempotent."""
        prepared, self._prepared = self._prepared, None
        graph, self._graph = self._graph, None
        self._destroy("cuGraphExecDestroy", prepared)
        self._destroy("cuGraphDestroy", graph)

    def _destroy(self, name: str, handle: Any) -> None:
        if handle is not None:
            try:
                self._driver(name, handle)
            except Exception:
                logger.exception("%s of copies that are one graph failed", name)


class BatchedCopy:
    """One cuMemcpyBatchAsync for all slices; within it they run in any order."""

    transfer = "batched"

    def __init__(self, driver: Driver, slices: Sequence[CopySlice]) -> None:
        refuse_batched(driver)
        slices = [piece for piece in slices if piece.nbytes]  # the driver refuses empty ones
        api = driver.api
        self.nbytes = sum(piece.nbytes for piece in slices)
        self._driver, self._call = driver, api.cuMemcpyBatchAsync
        self._ok = api.CUresult.CUDA_SUCCESS
        attributes = api.CUmemcpyAttributes()
        # Sources are read behind what is on the stream already: the wait for the slot's end of read among it.
        attributes.srcAccessOrder = api.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        count = len(slices)
        self._arguments = (
            [api.CUdeviceptr(piece.dst) for piece in slices],
            [api.CUdeviceptr(piece.src) for piece in slices],
            [piece.nbytes for piece in slices],
            count,
            [attributes],
            [0],
            1,
        )

    def submit(self, stream: Any) -> None:
        if not self._arguments[3]:
            return
        (result,) = self._call(*self._arguments, stream)
        if result != self._ok:
            what = f"{self._arguments[3]} slices of {self.nbytes} bytes together"
            raise self._driver.error("cuMemcpyBatchAsync", result, what)

    def close(self) -> None:
        """Nothing is held."""


class GatherCopy(TableLaunch):
    """One launch of the gather kernel."""

    transfer = "gather"

    def __init__(self, kernel: GatherKernel, slices: Sequence[CopySlice]) -> None:
        table = kernel_table(slices, kernel.num_ctas)
        self.nbytes = table.nbytes
        tables = (table.units, table.edges)

        def prepare(addresses: list[ctypes.c_void_p]) -> Launch | None:
            pairs = [(address, ctypes.c_int(len(rows))) for address, rows in zip(addresses, tables)]
            return kernel.launch([argument for pair in pairs for argument in pair]) if table.nbytes else None

        super().__init__(kernel.driver, tables, prepare)


class GatherKernel:
    """The compiled kernel, shared by all layers. name: `tma`, `ldst`, or `auto` for the best that the device has.

    num_ctas: CTAs of a launch, which hold as many SMs. Raises DwdpError where a demanded kernel cannot run.
    """

    def __init__(
        self,
        driver: Driver,
        device_index: int,
        name: str = "auto",
        *,
        num_ctas: int = DEFAULT_CTAS,
        compiler: Compiler = compile_cubin,
    ) -> None:
        if name not in ("auto", *THREADS):
            raise ValueError(f"gather_kernel is {name!r}, not one of auto, {', '.join(THREADS)}")
        if num_ctas < 1:
            raise ValueError(f"the gather kernel needs at least one CTA, not {num_ctas}")
        self.driver, self.num_ctas = driver, num_ctas
        self._kernels = Kernels(driver, device_index, SOURCE, OPTIONS, compiler=compiler)
        try:
            refuse_kernel(name, self._kernels.capability, device_index)
            self.name = best_kernel(self._kernels.capability) if name == "auto" else name
            self._function = self._kernels.function(f"gather_{self.name}", dynamic_bytes=SHARED_BYTES[self.name])
        except BaseException:
            self.close()
            raise

    def launch(self, arguments: Sequence[Any]) -> Launch:
        return Launch(
            self.driver, self._function, self.num_ctas, THREADS[self.name], SHARED_BYTES[self.name], arguments
        )

    def close(self) -> None:
        """Unloads the kernel; its copies must be closed. Idempotent."""
        self._kernels.close()


def available_transfers(
    driver: Driver, device_index: int, *, gather_kernel: str | None = "auto", compiler: Compiler = compile_cubin
) -> dict[str, str | None]:
    """Transfer -> None where this device can do it, else why not. For the launch gate: no context is made.

    gather_kernel: None leaves the gather out, whose kernel is compiled to find out.
    """

    def reason(attempt: Callable[[], object]) -> str | None:
        try:
            attempt()
        except DwdpError as error:
            return str(error)
        return None

    def compile_gather() -> None:
        if gather_kernel is not None:
            capability = device_capability(driver, device_index)
            refuse_kernel(gather_kernel, capability, device_index)
            compiler(SOURCE, "sm_{}{}".format(*capability), OPTIONS)

    return {"per_slice": None, "batched": reason(lambda: refuse_batched(driver)), "gather": reason(compile_gather)}


def device_capability(driver: Driver, device_index: int) -> tuple[int, int]:
    """(major, minor) of a device."""
    major, minor = (driver.attribute(f"COMPUTE_CAPABILITY_{part}", device_index) for part in ("MAJOR", "MINOR"))
    return major, minor


def best_kernel(capability: tuple[int, int]) -> str:
    """What `auto` means for the gather's kernel."""
    return "tma" if capability >= BULK_CAPABILITY else "ldst"


def refuse_kernel(name: str, capability: tuple[int, int], device_index: int) -> None:
    """Raises DwdpError where the gather's kernel `name` cannot run."""
    if name == "tma" and capability < BULK_CAPABILITY:
        raise DwdpError(
            "the gather kernel tma needs compute capability 9.0, device {} has {}.{}; take ldst".format(
                device_index, *capability
            )
        )


def refuse_batched(driver: Driver) -> None:
    """Raises DwdpError where the driver cannot copy in batches."""
    version = driver.version()
    if version < BATCH_VERSION or not hasattr(driver.api, "cuMemcpyBatchAsync"):
        raise DwdpError(
            f"batched copies (contention_opt) need a driver of CUDA {_version(BATCH_VERSION)} and cuda-bindings 13, "
            f"the driver is of CUDA {_version(version)}; update it, or take per_slice or gather"
        )


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
