"""CUDA C++ compiled at set-up with NVRTC: source text -> cubin -> functions of a module."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from dwdp.errors import MemoryDomainError
from dwdp.memory.driver import Driver

logger = logging.getLogger(__name__)

Compiler = Callable[[str, str, Sequence[str]], bytes]


@functools.cache
def compile_cubin(source: str, arch: str, options: tuple[str, ...] = ()) -> bytes:
    """The cubin of `source` for `arch` (sm_90, ...), compiled once a process.

    Raises MemoryDomainError with the compiler's log.
    """
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise MemoryDomainError(
            f"kernels need cuda-bindings and NVRTC (nvidia-cuda-nvrtc): pip install 'dwdp[gpu]' ({error})"
        ) from error

    def check(result: Any, *values: Any) -> Any:
        if int(result) != 0:
            raise MemoryDomainError(f"NVRTC failed with {getattr(result, 'name', result)}")
        return values[0] if values else None

    try:
        program = check(*nvrtc.nvrtcCreateProgram(source.encode(), b"dwdp.cu", 0, [], []))
    except RuntimeError as error:
        raise MemoryDomainError(f"NVRTC cannot be loaded, install nvidia-cuda-nvrtc: {error}") from error
    try:
        flags = [f"--gpu-architecture={arch}", "--std=c++17", *options]
        (result,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
        if int(result) != 0:
            text = b" " * check(*nvrtc.nvrtcGetProgramLogSize(program))  # filled in place
            check(*nvrtc.nvrtcGetProgramLog(program, text))
            raise MemoryDomainError(
                f"NVRTC could not compile for {arch}: {text.decode(errors='replace').rstrip(chr(0) + chr(10))}"
            )
        cubin = b" " * check(*nvrtc.nvrtcGetCUBINSize(program))
        check(*nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


class Kernels:
    """The functions of one compiled source on one device. `close()` is idempotent and logs what fails.

    compiler: as `compile_cubin`, for tests.
    """

    def __init__(
        self,
        driver: Driver,
        device_index: int,
        source: str,
        options: Sequence[str] = (),
        *,
        compiler: Compiler = compile_cubin,
    ) -> None:
        self.driver = driver
        self.capability = tuple(
            driver.attribute(f"COMPUTE_CAPABILITY_{part}", device_index) for part in ("MAJOR", "MINOR")
        )
        cubin = compiler(source, "sm_{}{}".format(*self.capability), options)
        self._module = driver("cuModuleLoadData", cubin, what="a cubin")

    def function(self, name: str, *, dynamic_bytes: int = 0) -> Any:
        """A `__global__` function; dynamic_bytes: of shared memory that its launches will take."""
        found = self.driver("cuModuleGetFunction", self._module, name.encode(), what=name)
        if dynamic_bytes:
            attributes = self.driver.api.CUfunction_attribute
            attribute = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self.driver("cuFuncSetAttribute", found, attribute, dynamic_bytes, what=f"{name}, {dynamic_bytes} bytes")
        return found

    def close(self) -> None:
        module, self._module = self._module, None
        if module is not None:
            try:
                self.driver("cuModuleUnload", module)
            except Exception:
                logger.exception("a kernel's module could not be unloaded")


class Launch:
    """A kernel launch whose arguments are prepared: `submit(stream)` is one driver call.

    arguments: ctypes values in the order of the kernel's parameters; they are kept.
    """

    def __init__(
        self, driver: Driver, function: Any, grid: int, block: int, dynamic_bytes: int, arguments: Sequence[Any]
    ) -> None:
        self._driver, self._arguments = driver, list(arguments)
        pointers = [ctypes.addressof(argument) for argument in self._arguments]
        self._pointers = (ctypes.c_void_p * len(pointers))(*pointers)
        self._call = driver.api.cuLaunchKernel
        self._before = (function, grid, 1, 1, block, 1, 1, dynamic_bytes)
        self._behind = (ctypes.addressof(self._pointers), 0)
        self._ok = driver.api.CUresult.CUDA_SUCCESS

    def submit(self, stream: Any) -> None:
        """stream: the driver's stream, in whose order the kernel runs."""
        (result,) = self._call(*self._before, stream, *self._behind)
        if result != self._ok:
            raise self._driver.error("cuLaunchKernel", result, "a prepared kernel")


class DeviceTable:
    """A table in device memory, by cuMemAlloc. `close()` is idempotent and logs what fails.

    table: a contiguous NumPy array; an empty one has address 0.
    """

    def __init__(self, driver: Driver, table: Any) -> None:
        self._driver = driver
        self.nbytes = table.nbytes
        self.address = 0
        if table.nbytes:
            self.address = int(driver("cuMemAlloc", table.nbytes, what=f"a table of {table.nbytes} bytes"))
            try:
                driver.write(self.address, table.ctypes.data, table.nbytes, what="a table")
            except BaseException:
                self.close()
                raise

    def read_into(self, table: Any) -> None:
        """Copies the memory back into an array of the same size; waits for the device's earlier work on it."""
        self._driver("cuMemcpyDtoH", table.ctypes.data, self.address, table.nbytes, what="a table")

    def close(self) -> None:
        address, self.address = self.address, 0
        if address:
            try:
                self._driver("cuMemFree", address)
            except Exception:
                logger.exception("a table of %d bytes in device memory could not be freed", self.nbytes)


class TableLaunch:
    """A launch over tables that lie in device memory until `close()`: the base of the prepared kernels.

    tables: contiguous NumPy arrays. prepare: makes the launch from the tables' addresses, None where there is nothing
    to do. A step that fails gives back what the ones before it took.
    """

    def __init__(
        self,
        driver: Driver,
        tables: Sequence[Any],
        prepare: Callable[[list[ctypes.c_void_p]], Launch | None],
    ) -> None:
        self._tables: list[DeviceTable] = []
        self._launch: Launch | None = None
        try:
            for table in tables:
                self._tables.append(DeviceTable(driver, table))
            self._launch = prepare([ctypes.c_void_p(table.address) for table in self._tables])
        except BaseException:
            self.close()
            raise

    def submit(self, stream: Any) -> None:
        """stream: the driver's stream, in whose order the kernel runs."""
        if self._launch is not None:
            self._launch.submit(stream)

    def close(self) -> None:
        """Gives the tables back; no launch may be in flight. Idempotent."""
        self._launch = None
        tables, self._tables = self._tables, []
        for table in tables:
            table.close()
