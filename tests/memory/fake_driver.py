"""A CUDA driver without a GPU: the names of cuda.bindings.driver, its rules and its results, over memfds.

A `FakeMachine` is what processes share: hosts, GPUs and their memory, the fabric. Each `FakeDriver` is one process's
driver, so that rank threads have one each. Device memory is real memory of this process at the same addresses, so
bytes can be looked at; what has no access faults. Streams are threads that run copies in order.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import queue
import threading
import time
from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace

from dwdp.memory.host import HostDomain
from dwdp.memory.libc import (
    HOLE,
    MAP_FIXED,
    MAP_SHARED,
    PROT_NONE,
    PROT_READ,
    PROT_WRITE,
    HostCalls,
)  # fmt: skip
from dwdp.memory.vmm import CudaDomain
from dwdp.weights.cuda_mover import CudaMover

GRANULE = 64 << 10  # the real one is 2 MiB; the tests need not move that much


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES = 701
    CUDA_ERROR_NOT_PERMITTED = 800
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_SYSTEM_NOT_READY = 802
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906


OK = CUresult.CUDA_SUCCESS


class CUmemAllocationHandleType(IntEnum):
    CU_MEM_HANDLE_TYPE_NONE = 0
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1
    CU_MEM_HANDLE_TYPE_FABRIC = 8


class CUmemAllocationType(IntEnum):
    CU_MEM_ALLOCATION_TYPE_PINNED = 1


class CUmemLocationType(IntEnum):
    CU_MEM_LOCATION_TYPE_DEVICE = 1


class CUmemAccess_flags(IntEnum):  # noqa: N801 - the driver's name
    CU_MEM_ACCESS_FLAGS_PROT_READ = 1
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3


class CUmemAllocationGranularity_flags(IntEnum):  # noqa: N801
    CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0


class CUmemcpySrcAccessOrder(IntEnum):
    CU_MEMCPY_SRC_ACCESS_ORDER_STREAM = 1


class CUevent_flags(IntEnum):  # noqa: N801
    CU_EVENT_DEFAULT = 0
    CU_EVENT_DISABLE_TIMING = 2


class CUstream_flags(IntEnum):  # noqa: N801
    CU_STREAM_NON_BLOCKING = 1


class CUstreamCaptureStatus(IntEnum):
    CU_STREAM_CAPTURE_STATUS_NONE = 0
    CU_STREAM_CAPTURE_STATUS_ACTIVE = 1


class CUstreamCaptureMode(IntEnum):
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1


class CUdevice_attribute(IntEnum):  # noqa: N801
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76
    CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED = 128


class CUfunction_attribute(IntEnum):  # noqa: N801
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8


ENUMS = [
    CUresult, CUmemAllocationHandleType, CUmemAllocationType, CUmemLocationType, CUmemAccess_flags,
    CUmemAllocationGranularity_flags, CUmemcpySrcAccessOrder, CUevent_flags, CUstream_flags, CUstreamCaptureStatus,
    CUdevice_attribute, CUfunction_attribute, CUstreamCaptureMode,
]  # fmt: skip


class CUmemAllocationProp:
    def __init__(self):
        self.type = self.requestedHandleTypes = 0
        self.location = SimpleNamespace(type=0, id=-1)


class CUmemLocation:
    def __init__(self):
        self.type, self.id = 0, -1


class CUmemAccessDesc:
    def __init__(self):
        self.location, self.flags = SimpleNamespace(type=0, id=-1), 0


class CUmemcpyAttributes:
    def __init__(self):
        self.srcAccessOrder = 0


class CUdeviceptr(int):
    pass


class CUstream(int):
    pass


@dataclass(eq=False)
class Physical:
    """Device memory. It is taken from its GPU until no handle and no mapping of any process is left."""

    gpu: FakeGpu
    nbytes: int
    types: int
    fd: int
    handles: int = 0
    mappings: int = 0

    def drop(self):
        if self.fd >= 0 and not self.handles and not self.mappings:
            self.gpu.used -= self.nbytes
            self.gpu.machine.by_inode.pop(inode(self.fd), None)
            os.close(self.fd)
            self.fd = -1


@dataclass
class FakeGpu:
    machine: FakeMachine = field(repr=False)
    host: str
    index: int
    total: int
    used: int = 0

    @property
    def uuid(self) -> bytes:
        return f"{self.host}/{self.index}".encode().ljust(16, b"\0")[:16]


class FakeMachine:
    """gpu_bytes: memory of each GPU. drop_writes: peers' reads of it see zeros, as behind a bad IOMMU."""

    def __init__(self, *, gpu_bytes: int = 1 << 28, drop_writes: bool = False):
        self.gpu_bytes, self.drop_writes = gpu_bytes, drop_writes
        self.gpus: dict[tuple[str, int], FakeGpu] = {}
        self.by_inode: dict[tuple[int, int], Physical] = {}
        self.fabric: dict[bytes, Physical] = {}
        self.lock = threading.RLock()

    def gpu(self, host: str, index: int) -> FakeGpu:
        with self.lock:
            return self.gpus.setdefault((host, index), FakeGpu(self, host, index, self.gpu_bytes))

    @property
    def used(self) -> int:
        return sum(gpu.used for gpu in self.gpus.values())


def inode(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


@dataclass(eq=False)
class FakeMapping:
    address: int
    nbytes: int
    physical: Physical
    imported: bool
    rights: int = 0


class FakeDriver:
    """One process's driver.

    imex: whether an IMEX channel is there; the device attribute says that FABRIC is supported in any case
    fail: name of a call -> result, or a function of the call's arguments that gives a result or None
    version: of the driver; capability: of the GPU; seconds_per_copy: each copy on a stream takes as long
    visible: the host's GPUs that the process sees, in the order of their ordinals here
    attributes: of every GPU, by the name behind CU_DEVICE_ATTRIBUTE_; they replace the usual ones
    """

    def __init__(
        self, machine, *, host="host0", imex=False, fail=None, version=13000, capability=(9, 0), seconds_per_copy=0.0,
        visible=range(8), attributes=None,
    ):  # fmt: skip
        for enum in ENUMS:
            setattr(self, enum.__name__, enum)
        self.CUmemAllocationProp, self.CUmemAccessDesc = CUmemAllocationProp, CUmemAccessDesc
        self.CUmemLocation = CUmemLocation
        self.CUmemcpyAttributes, self.CUdeviceptr, self.CUstream = CUmemcpyAttributes, CUdeviceptr, CUstream
        self.machine, self.host, self.imex, self.fail = machine, host, imex, dict(fail or {})
        self.version, self.capability, self.seconds_per_copy = version, capability, seconds_per_copy
        self.seconds_per_write = 0.0  # else what is written lands that much behind the call, on the default stream
        self.visible, self.attributes = list(visible), dict(attributes or {})
        self.calls: list[tuple] = []
        self.capturing = False
        self._host_calls = HostCalls()
        self._handles: dict[int, tuple[Physical, bool, int]] = {}  # id -> (memory, imported, type it was imported as)
        self._ranges: dict[int, int] = {}
        self._mappings: dict[int, FakeMapping] = {}
        self._allocated: dict[int, object] = {}
        self._ids = itertools.count(1000)
        self._current = threading.local()
        self._initialised = False
        self._streams: dict[int, FakeStream] = {}
        self._events: dict[int, FakeEvent] = {}
        self._functions: dict[int, str] = {}
        self._captures: dict[int, list[tuple]] = {}  # stream -> copies that are captured
        self._graphs: dict[int, list[tuple]] = {}

    def __getattribute__(self, name):
        found = object.__getattribute__(self, name)
        return self._checked(name, found) if name.startswith("cu") else found

    def _checked(self, name, call):
        def checked(*args):
            self.calls.append((name, *args))
            planned = self.fail.get(name)
            result = planned(*args) if callable(planned) else planned
            if result:
                return (
                    (result, 0, 0)
                    if name in ("cuMemGetInfo", "cuCtxGetStreamPriorityRange")
                    else ((result,) if name in self.WITHOUT_VALUE else (result, 0))
                )
            if not self._initialised and name != "cuInit":
                return (CUresult.CUDA_ERROR_NOT_INITIALIZED, 0)
            if name in self.NEED_CONTEXT and not self._has_context():
                return (
                    (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
                    if name in self.WITHOUT_VALUE
                    else (CUresult.CUDA_ERROR_INVALID_CONTEXT, 0)
                )
            if name in ("cuEventSynchronize", "cuStreamSynchronize", "cuCtxSynchronize"):
                return call(*args)  # other processes go on meanwhile
            with self.machine.lock:
                return call(*args)

        return checked

    WITHOUT_VALUE = {
        "cuInit", "cuCtxSetCurrent", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease", "cuMemAddressFree",
        "cuMemcpyDtoH", "cuMemcpyHtoD", "cuMemcpyDtoHAsync",
        "cuMemFreeHost", "cuMemcpyAsync", "cuMemcpyBatchAsync", "cuEventRecord", "cuStreamWaitEvent",
        "cuEventSynchronize", "cuEventQuery", "cuEventDestroy", "cuStreamDestroy", "cuStreamSynchronize",
        "cuCtxSynchronize", "cuLaunchKernel", "cuMemFree", "cuModuleUnload", "cuMemsetD8Async", "cuFuncSetAttribute",
        "cuStreamBeginCapture", "cuGraphLaunch", "cuGraphDestroy", "cuGraphExecDestroy",
    }  # fmt: skip

    NEED_CONTEXT = {
        "cuMemAlloc", "cuMemFree", "cuMemHostAlloc", "cuMemFreeHost", "cuEventCreate", "cuStreamCreateWithPriority",
        "cuModuleLoadData", "cuModuleUnload", "cuCtxSynchronize", "cuLaunchKernel", "cuMemcpyAsync",
        "cuMemcpyBatchAsync", "cuMemsetD8Async", "cuMemcpyDtoHAsync", "cuGraphInstantiate", "cuGraphLaunch",
    }  # fmt: skip

    # device

    def cuInit(self, flags):
        self._initialised = True
        return (OK,)

    def cuDriverGetVersion(self):
        return OK, self.version

    def cuDeviceGet(self, index):
        return (OK, self.visible[index]) if 0 <= index < len(self.visible) else (CUresult.CUDA_ERROR_INVALID_DEVICE, 0)

    def cuDeviceGetCount(self):
        return OK, len(self.visible)

    def cuDeviceGetName(self, length, device):
        return OK, b"Fake GPU".ljust(length, b"\0")

    def cuDeviceCanAccessPeer(self, device, peer):
        return OK, int(device != peer)

    def cuDeviceGetUuid(self, device):
        return OK, SimpleNamespace(bytes=self.machine.gpu(self.host, device).uuid)

    def cuDeviceGetAttribute(self, attribute, device):
        names = {
            "COMPUTE_CAPABILITY_MAJOR": self.capability[0],
            "COMPUTE_CAPABILITY_MINOR": self.capability[1],
            "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 1,
            "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": 1,
            "HANDLE_TYPE_FABRIC_SUPPORTED": 1,
            **self.attributes,
        }
        return OK, names[attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_")]

    def cuDevicePrimaryCtxRetain(self, device):
        return OK, device

    def cuCtxSetCurrent(self, context):
        self._current.device = context
        return (OK,)

    def _has_context(self):
        return getattr(self._current, "device", None) is not None

    # memory

    def cuMemGetAllocationGranularity(self, properties, option):
        return OK, GRANULE

    def cuMemGetInfo(self):
        gpu = self.machine.gpu(self.host, self._current.device)
        return OK, gpu.total - gpu.used, gpu.total

    def cuMemCreate(self, size, properties, flags):
        wanted = int(properties.requestedHandleTypes)
        if size <= 0 or size % GRANULE or int(properties.type) != 1 or int(properties.location.type) != 1:
            return CUresult.CUDA_ERROR_INVALID_VALUE, 0
        if wanted & 8 and not self.imex:
            return CUresult.CUDA_ERROR_NOT_PERMITTED, 0
        gpu = self.machine.gpu(self.host, self.visible[properties.location.id])
        if gpu.used + size > gpu.total:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0
        fd = self._host_calls.memfd("fake-cuda", size)
        physical = Physical(gpu, size, wanted, fd)
        gpu.used += size
        self.machine.by_inode[inode(fd)] = physical
        return OK, self._add_handle(physical, False, 0)

    def _add_handle(self, physical, imported, kind):
        physical.handles += 1
        number = next(self._ids)
        self._handles[number] = (physical, imported, kind)
        return number

    def cuMemRelease(self, handle):
        if handle not in self._handles:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        physical, _, _ = self._handles.pop(handle)
        physical.handles -= 1
        physical.drop()
        return (OK,)

    def cuMemExportToShareableHandle(self, handle, kind, flags):
        physical, imported, _ = self._handles.get(handle, (None, False, 0))
        if physical is None or imported or not physical.types & int(kind):
            return CUresult.CUDA_ERROR_INVALID_VALUE, 0
        if int(kind) == 1:
            return OK, os.dup(physical.fd)
        # with where another process finds it
        name = b"%d/%d/" % (os.getpid(), physical.fd) + os.urandom(64)
        name = name[:64]
        self.machine.fabric[name] = physical
        return OK, SimpleNamespace(data=name)

    def cuMemImportFromShareableHandle(self, exported, kind):
        if int(kind) == 1:
            physical = self.machine.by_inode.get(inode(exported)) or self._from_another_process(exported)
            if physical is None or physical.gpu.host != self.host:
                return CUresult.CUDA_ERROR_INVALID_VALUE, 0
        else:
            if not self.imex:
                return CUresult.CUDA_ERROR_NOT_PERMITTED, 0
            physical = self.machine.fabric.get(bytes(exported)) or self._from_another_fabric(bytes(exported))
            if physical is None or physical.fd < 0:
                return CUresult.CUDA_ERROR_INVALID_VALUE, 0
        return OK, self._add_handle(physical, True, int(kind))

    def _from_another_process(self, fd):
        if "fake-cuda" not in os.readlink(f"/proc/self/fd/{fd}"):
            return None
        gpu = self.machine.gpu(self.host, 7)
        physical = Physical(gpu, os.fstat(fd).st_size, 1, os.dup(fd))
        gpu.used += physical.nbytes
        self.machine.by_inode[inode(fd)] = physical
        return physical

    def _from_another_fabric(self, name):
        try:
            pid, number, _ = name.split(b"/", 2)
            if int(pid) == os.getpid():
                return None
            fd = os.open(f"/proc/{int(pid)}/fd/{int(number)}", os.O_RDWR)
        except (ValueError, OSError):
            return None
        try:
            return self._from_another_process(fd)
        finally:
            os.close(fd)

    def cuMemAddressReserve(self, size, alignment, address, flags):
        if size <= 0 or size % GRANULE:
            return CUresult.CUDA_ERROR_INVALID_VALUE, 0
        address = self._host_calls.mmap(0, size, PROT_NONE, HOLE, -1, "range")
        self._ranges[address] = size
        return OK, CUdeviceptr(address)

    def cuMemAddressFree(self, address, size):
        address = int(address)
        if self._ranges.get(address) != size or self._overlapping(address, size):
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        del self._ranges[address]
        self._host_calls.munmap(address, size)
        return (OK,)

    def _overlapping(self, address, size):
        return [m for m in self._mappings.values() if m.address < address + size and address < m.address + m.nbytes]

    def cuMemMap(self, address, size, offset, handle, flags):
        address = int(address)
        physical, imported, _ = self._handles.get(handle, (None, False, 0))
        inside = any(start <= address and address + size <= start + n for start, n in self._ranges.items())
        if physical is None or not inside or address % 4096 or self._overlapping(address, size):
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        if offset or size < physical.nbytes:
            return (CUresult.CUDA_ERROR_NOT_SUPPORTED,)
        if size > physical.nbytes:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        physical.mappings += 1
        self._mappings[address] = FakeMapping(address, size, physical, imported)
        return (OK,)

    def _whole(self, address, size):
        mapping = self._mappings.get(int(address))
        return mapping if mapping is not None and mapping.nbytes == size else None

    def cuMemSetAccess(self, address, size, access, count):
        mapping = self._whole(address, size)
        if mapping is None or count != len(access) or count != 1:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        mapping.rights = int(access[0].flags)
        prot = PROT_READ | (PROT_WRITE if mapping.rights & 2 else 0)
        fd = mapping.physical.fd
        if self.machine.drop_writes and mapping.imported:
            fd = os.memfd_create("lost")
            os.truncate(fd, size)
        self._host_calls.mmap(mapping.address, size, prot, MAP_SHARED | MAP_FIXED, fd, "mapping")
        if fd != mapping.physical.fd:
            os.close(fd)
        return (OK,)

    def cuMemGetAccess(self, location, address):
        mapping = self._mappings.get(int(address))
        return (OK, mapping.rights) if mapping is not None else (CUresult.CUDA_ERROR_INVALID_VALUE, 0)

    def cuMemUnmap(self, address, size):
        mapping = self._whole(address, size)
        if mapping is None:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        del self._mappings[mapping.address]
        self._host_calls.mmap(mapping.address, size, PROT_NONE, HOLE | MAP_FIXED, -1, "hole")
        mapping.physical.mappings -= 1
        mapping.physical.drop()
        return (OK,)

    def cuMemAlloc(self, size):
        buffer = ctypes.create_string_buffer(size)
        self._allocated[ctypes.addressof(buffer)] = buffer
        return OK, CUdeviceptr(ctypes.addressof(buffer))

    def cuMemFree(self, address):
        found = self._allocated.pop(int(address), None)
        return (OK,) if found is not None else (CUresult.CUDA_ERROR_INVALID_VALUE,)

    def _accessible(self, address, size, rights):
        """Whether the device may touch [address, address + size), over as many mappings as it takes."""
        at, end = int(address), int(address) + size
        for start, buffer in self._allocated.items():
            if start <= at and end <= start + len(buffer):
                return True
        while at < end:
            mapping = next((m for m in self._mappings.values() if m.address <= at < m.address + m.nbytes), None)
            if mapping is None or mapping.rights & rights != rights:
                return False
            at = mapping.address + mapping.nbytes
        return True

    def cuMemcpyDtoH(self, host, device, size):
        if not self._has_context():
            return (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        if not self._accessible(device, size, 1):
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        if self.seconds_per_write:
            self._stream(0).finish()
        ctypes.memmove(host, int(device), size)
        return (OK,)

    def cuMemcpyHtoD(self, device, host, size):
        if not self._has_context():
            return (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        if not self._accessible(device, size, 3):
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        read = ctypes.string_at(host, size)  # what the call waits for; the bytes land in the default stream's order

        def land():
            time.sleep(self.seconds_per_write)
            ctypes.memmove(int(device), read, size)

        self._stream(0).put(land) if self.seconds_per_write else land()
        return (OK,)

    def cuMemcpyDtoHAsync(self, host, device, size, stream):
        if int(host) not in self._allocated or not self._accessible(device, size, 1):
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)  # the real one would wait for other memory of the host's
        self._stream(stream).put(lambda: ctypes.memmove(int(host), int(device), size))
        return (OK,)

    def cuMemHostAlloc(self, size, flags):
        return self.cuMemAlloc(size)

    def cuMemFreeHost(self, address):
        return self.cuMemFree(address)

    def cuMemsetD8Async(self, device, value, size, stream):
        if not self._accessible(device, size, 3):
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        self._stream(stream).put(lambda: ctypes.memset(int(device), value, size))
        return (OK,)

    # copies and kernels on streams

    def _copy(self, dst, src, size):
        if not self._accessible(src, size, 1) or not self._accessible(dst, size, 3):
            return None

        def move():
            time.sleep(self.seconds_per_copy)
            ctypes.memmove(int(dst), int(src), size)

        return move

    def cuMemcpyAsync(self, dst, src, size, stream):
        if int(stream) in self._captures:
            self._captures[int(stream)].append((dst, src, size))
            return (OK,)
        move = self._copy(dst, src, size)
        if move is None or not size:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        self._stream(stream).put(move)
        return (OK,)

    def cuMemcpyBatchAsync(self, dsts, srcs, sizes, count, attributes, firsts, num_attributes, stream):
        typed = all(isinstance(address, CUdeviceptr) for address in (*dsts, *srcs))
        lists = typed and len(dsts) == len(srcs) == len(sizes) == count
        orders = all(int(one.srcAccessOrder) in (1, 2, 3) for one in attributes)
        ordered = firsts and firsts[0] == 0 and num_attributes == len(attributes) == len(firsts) <= count
        if not (lists and ordered and orders and int(stream)):
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        moves = [self._copy(*piece) for piece in zip(dsts, srcs, sizes)]
        if None in moves or 0 in sizes:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        for move in reversed(moves):  # no order is promised
            self._stream(stream).put(move)
        return (OK,)

    def cuStreamBeginCapture(self, stream, mode):
        if int(stream) in self._captures or not int(stream):  # the default stream cannot be captured
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        self._captures[int(stream)] = []
        return (OK,)

    def cuStreamEndCapture(self, stream):
        copies = self._captures.pop(int(stream), None)
        if copies is None:
            return CUresult.CUDA_ERROR_INVALID_VALUE, 0
        number = next(self._ids)
        self._graphs[number] = copies
        return OK, number

    def cuGraphInstantiate(self, graph, flags):
        number = next(self._ids)
        self._graphs[number] = list(self._graphs[graph])
        return OK, number

    def cuGraphLaunch(self, graph, stream):
        moves = [self._copy(*copy) for copy in self._graphs[graph]]
        if None in moves:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        for move in moves:
            self._stream(stream).put(move)
        return (OK,)

    def cuGraphDestroy(self, graph):
        return (OK,) if self._graphs.pop(graph, None) is not None else (CUresult.CUDA_ERROR_INVALID_VALUE,)

    cuGraphExecDestroy = cuGraphDestroy

    def cuModuleLoadData(self, image):
        return OK, next(self._ids)

    def cuModuleUnload(self, module):
        return (OK,)

    def cuModuleGetFunction(self, module, name):
        number = next(self._ids)
        self._functions[number] = name.decode()
        return OK, number

    def cuFuncSetAttribute(self, function, attribute, value):
        return (OK,) if value <= 232448 - 1024 else (CUresult.CUDA_ERROR_INVALID_VALUE,)

    def cuLaunchKernel(self, function, gx, gy, gz, bx, by, bz, dynamic_bytes, stream, arguments, extra):
        kernel = getattr(self, "_kernel_" + self._functions[function])
        work = kernel(ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p)), gx, bx)
        if work is None:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        self._stream(stream).put(work)
        return (OK,)

    def _kernel_gather_tma(self, arguments, grid, block, bulk=True):
        def read(index, kind):
            return kind.from_address(arguments[index]).value

        tables = []
        for at in (0, 2):
            count, address = read(at + 1, ctypes.c_int), read(at, ctypes.c_void_p) or 0
            values = (ctypes.c_longlong * (3 * count)).from_address(address)[:] if count else []
            tables.append([values[i : i + 3] for i in range(0, len(values), 3)])
        if any(value % 16 for row in tables[0] for value in row):
            return lambda: self._fail_later(CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)  # misaligned bulk copy
        moves = [self._copy(*row) for table in tables for row in table]
        if None in moves:
            return lambda: self._fail_later(CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
        return lambda: [move() for move in moves]

    _kernel_gather_ldst = _kernel_gather_tma

    def _kernel_spin(self, arguments, grid, block):
        seconds = ctypes.c_ulonglong.from_address(arguments[0]).value / 1e9
        return lambda: time.sleep(seconds)

    def _kernel_row_checksums(self, arguments, grid, block):
        from dwdp.memory.checksum import checksum

        return self._over_rows(arguments, grid, 2, checksum)

    def _kernel_first_differences(self, arguments, grid, block):
        from dwdp.weights.copy import first_difference

        return self._over_rows(arguments, grid, 3, first_difference)

    def _over_rows(self, arguments, grid, columns, result_of):
        """The work of a kernel on rows of so many numbers; a row without a result keeps what is in its place."""
        rows, results = (ctypes.c_void_p.from_address(arguments[i]).value for i in (0, 2))
        count, parts = (ctypes.c_int.from_address(arguments[i]).value for i in (1, 3))
        if grid != count * parts:
            return None

        def work():
            for i in range(count):
                result = result_of(*(ctypes.c_longlong * columns).from_address(rows + 8 * columns * i))
                if result is not None:
                    ctypes.c_ulonglong.from_address(results + 8 * i).value = result

        return work

    def _fail_later(self, result):
        self.fail["cuCtxSynchronize"] = self.fail["cuEventRecord"] = result

    # streams and events

    def _stream(self, stream):
        number = int(stream)
        if number == 0 and 0 not in self._streams:
            self._streams[0] = FakeStream()
        return self._streams[number]

    def cuCtxGetStreamPriorityRange(self):
        return OK, 0, -5

    def cuStreamCreateWithPriority(self, flags, priority):
        number = CUstream(next(self._ids))
        self._streams[number] = FakeStream(priority)
        return OK, number

    def cuStreamDestroy(self, stream):
        self._captures.pop(int(stream), None)
        self._streams.pop(int(stream)).close()
        return (OK,)

    def cuStreamIsCapturing(self, stream):
        return OK, CUstreamCaptureStatus(int(self.capturing))

    def cuEventCreate(self, flags):
        number = next(self._ids)
        self._events[number] = FakeEvent(timed=not flags & 2)
        return OK, number

    def cuEventDestroy(self, event):
        return (OK,) if self._events.pop(event, None) else (CUresult.CUDA_ERROR_INVALID_HANDLE,)

    def cuEventRecord(self, event, stream):
        ticket = self._events[event].ticket = FakeTicket()
        self._stream(stream).put(ticket.reach)
        return (OK,)

    def cuStreamWaitEvent(self, stream, event, flags):
        ticket = self._events[event].ticket
        if ticket is not None:
            self._stream(stream).put(ticket.wait)
        return (OK,)

    def cuEventQuery(self, event):
        ticket = self._events[event].ticket
        return (OK,) if ticket is None or ticket.done.is_set() else (CUresult.CUDA_ERROR_NOT_READY,)

    def cuEventSynchronize(self, event):
        self._events[event].ticket.done.wait(10)
        return (OK,)

    def cuEventElapsedTime(self, start, end):
        pair = [self._events[event] for event in (start, end)]
        if not all(event.timed and event.ticket for event in pair):
            return CUresult.CUDA_ERROR_INVALID_HANDLE, 0.0
        if not all(event.ticket.done.is_set() for event in pair):
            return CUresult.CUDA_ERROR_NOT_READY, 0.0
        return OK, (pair[1].ticket.at - pair[0].ticket.at) * 1e3

    def cuStreamSynchronize(self, stream):
        if int(stream) or 0 in self._streams:
            self._stream(stream).finish()
        return (OK,)

    def cuCtxSynchronize(self):
        for stream in list(self._streams.values()):
            stream.finish()
        planned = self.fail.get("cuCtxSynchronize")
        return (OK if planned is None else planned,)

    # for tests

    def live(self):
        """What this process holds: handles, mappings, ranges, allocations, events, streams of its own, graphs."""
        own = [number for number in self._streams if number]
        held = (self._handles, self._mappings, self._ranges, self._allocated, self._events, own, self._graphs)
        return [len(x) for x in held]

    def end(self, *, keep_mappings=False):
        """The process dies: the system takes everything back."""
        for stream in self._streams.values():
            stream.close()
        self._streams = {}
        for mapping in list(self._mappings.values()):
            object.__getattribute__(self, "cuMemUnmap")(mapping.address, mapping.nbytes)
        for handle in list(self._handles):
            object.__getattribute__(self, "cuMemRelease")(handle)


class FakeTicket:
    def __init__(self):
        self.done, self.at = threading.Event(), 0.0

    def reach(self):
        self.at = time.perf_counter()
        self.done.set()

    def wait(self):
        self.done.wait(10)


@dataclass(eq=False)
class FakeEvent:
    timed: bool
    ticket: FakeTicket | None = None


class FakeStream:
    def __init__(self, priority=0):
        self.priority = priority
        self._queue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="fake-stream", daemon=True)
        self._thread.start()

    def put(self, work):
        self._queue.put(work)

    def _run(self):
        while (work := self._queue.get()) is not None:
            work()
            del work

    def finish(self):
        done = threading.Event()
        self.put(done.set)
        done.wait(10)

    def close(self):
        self._queue.put(None)
        self._thread.join(10)


class FakeCudaDomain(CudaDomain):
    """The CUDA domain with tensors over the fake's memory, which is the host's."""

    _bytes, _empty = HostDomain._bytes, HostDomain._empty

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.mover = CudaMover(self, compiler=lambda *arguments: b"cubin")


def zero_live() -> list[int]:
    return [0] * 7
