"""The CUDA memory domain: cuMemCreate handles, reserved addresses, whole-handle maps, tensors without a copy.

[Note: rights on CUDA] Access is given to a whole mapping at a time, by one cuMemSetAccess behind its cuMemMap.
Peers map read-only where the driver grants it, so that a stray write of theirs is a fault and not wrong weights.
"""

from __future__ import annotations

import ctypes
import logging
import os
from typing import TYPE_CHECKING, Any

from dwdp.errors import MemoryDomainError
from dwdp.memory.domain import MemoryDomain
from dwdp.memory.driver import Driver, DriverError
from dwdp.memory.pages import Budget
from dwdp.memory.ranges import Handle, Hold, Mapping, Range

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

FABRIC, POSIX_FD = "fabric", "posix_fd"
HANDLE_TYPES = {FABRIC: "CU_MEM_HANDLE_TYPE_FABRIC", POSIX_FD: "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"}
FABRIC_HANDLE_BYTES = 64


class CudaDomain(MemoryDomain):
    """Memory of one rank on the GPU `device_index`.

    page_granules: granules (2 MiB each, as the driver says) of a ring page
    mapping_budget: mappings at a time; the driver has no known limit, each costs 4 KB of host memory
    handle_type: `fabric`, `posix_fd`, or `auto`: none until `choose_handle_type` has tried them, see capability.py
    read_only_peers: map peers read-only; where the driver refuses that, a warning says so once
    driver: what has the names of cuda.bindings.driver, for tests
    """

    name = "cuda"

    def __init__(
        self,
        rank: int,
        device_index: int,
        *,
        page_granules: int = 8,
        mapping_budget: int = 120_000,
        handle_type: str = "auto",
        read_only_peers: bool = True,
        driver: Any = None,
    ) -> None:
        if handle_type != "auto" and handle_type not in HANDLE_TYPES:
            raise ValueError(f"handle_type is {handle_type!r}, not one of auto, {', '.join(HANDLE_TYPES)}")
        self.driver = Driver(driver, device_index)
        self.device_index = device_index
        self.uuid = self.driver.device_uuid(device_index)
        self.handle_type = None if handle_type == "auto" else handle_type
        self.forced_handle_type = self.handle_type
        self.peers_read_only = read_only_peers
        flags = self.driver.api.CUmemAllocationGranularity_flags
        granularity = self.driver(
            "cuMemGetAllocationGranularity",
            self._properties(None),
            flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
            what=f"device {device_index}",
        )
        mappings = Budget("mappings", mapping_budget, "use larger pages (page_granules), or raise mapping_budget")
        super().__init__(rank, int(granularity), page_granules, mappings, None)
        # One byte to and from the device; pinned memory is not needed for that.
        self._byte = ctypes.create_string_buffer(1)

    @property
    def exports_descriptors(self) -> bool:
        return self.handle_type != FABRIC

    def describe(self) -> dict[str, Any]:
        """For the status: which type handles have and how peers are mapped."""
        return {
            "memory": self.name,
            "device": self.uuid,
            "handle_type": self.handle_type,
            "forced": self.forced_handle_type is not None,
            "peers_read_only": self.peers_read_only,
        }

    def free_bytes(self, size: int | None = None, *, held_bytes: int = 0, ranks_on_host: int = 1) -> int:
        """Bytes free on the device, read after torch's allocator has given back what it caches."""
        self.reclaim()
        free, _ = self.driver("cuMemGetInfo")
        return int(free)

    def reclaim(self) -> None:
        import torch

        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    # handles

    def create(self, nbytes: int, what: str, *, exportable: bool = True) -> Handle:
        if exportable and self.handle_type is None:
            raise MemoryDomainError(
                f"handle {what} of rank {self.rank} is to be exported before a handle type was chosen "
                "(choose_handle_type)"
            )
        return self.create_as(self.handle_type if exportable else None, nbytes, what)

    def create_as(self, handle_type: str | None, nbytes: int, what: str) -> Handle:
        """As `create`, with the type given; None makes a handle that cannot be exported."""
        self._check_open()
        self._check_size(nbytes, f"handle {what}")
        with self._lock:
            detail = f"{_word(handle_type)} handle {what} of {nbytes} bytes on rank {self.rank}"
            raw = self.driver("cuMemCreate", nbytes, self._properties(handle_type), 0, what=detail)
            self.allocated_bytes += nbytes
            exportable = handle_type is not None
            handle = Handle(self, what, nbytes, None, False, exportable=exportable, raw=raw, handle_type=handle_type)
            self._handles[id(handle)] = handle
            return handle

    def import_handle(self, exported: int | bytes, nbytes: int) -> Handle:
        is_fd = isinstance(exported, int)
        try:
            self._check_open()
            self._check_size(nbytes, "imported handle")
            handle_type = POSIX_FD if is_fd else FABRIC
            if not is_fd and len(exported) != FABRIC_HANDLE_BYTES:
                raise MemoryDomainError(f"a fabric handle has {FABRIC_HANDLE_BYTES} bytes, {len(exported)} were sent")
            with self._lock:
                if is_fd:
                    self.descriptor_budget.check(1, f"an imported handle of rank {self.rank}")
                detail = f"{_word(handle_type)} handle of {nbytes} bytes imported on rank {self.rank}"
                raw = self.driver(
                    "cuMemImportFromShareableHandle", exported, self._type(handle_type), what=detail
                )  # fmt: skip
                fd = exported if is_fd else None
                self.descriptor_budget.used += is_fd
                handle = Handle(self, "imported", nbytes, fd, True, raw=raw, handle_type=handle_type)
                self._handles[id(handle)] = handle
                return handle
        except BaseException:
            if is_fd:
                self._attempt("close of an imported descriptor", os.close, exported)
            raise

    def export(self, handle: Handle) -> int | bytes:
        self._check_exportable(handle)
        with self._lock:
            if handle.fd is not None:
                return handle.fd
            is_fd = handle.handle_type == POSIX_FD
            if is_fd:
                self.descriptor_budget.check(1, f"the export of {handle.what} of rank {self.rank}")
            detail = f"{_word(handle.handle_type)} handle {handle.what} of {handle.nbytes} bytes on rank {self.rank}"
            exported = self.driver(
                "cuMemExportToShareableHandle", handle.raw, self._type(handle.handle_type), 0, what=detail
            )
            if not is_fd:
                return bytes(exported.data)
            handle.fd = int(exported)
            self.descriptor_budget.used += 1
            os.set_inheritable(handle.fd, False)
            return handle.fd

    # the calls of CUDA

    def _properties(self, handle_type: str | None) -> Any:
        api = self.driver.api
        properties = api.CUmemAllocationProp()
        properties.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self.device_index
        properties.requestedHandleTypes = self._type(handle_type)
        return properties

    def _type(self, handle_type: str | None) -> Any:
        types = self.driver.api.CUmemAllocationHandleType
        return getattr(types, HANDLE_TYPES[handle_type] if handle_type else "CU_MEM_HANDLE_TYPE_NONE")

    def _why_unmappable(self, handle: Handle) -> str | None:
        return "it was released" if handle.released else None

    def _seal(self, handle: Handle) -> None:
        pass  # an importer gives its own mapping its rights; see [Note: rights on CUDA]

    def _release(self, handle: Handle) -> Exception | None:
        raw, handle.raw = handle.raw, None
        return self._attempt(f"release of {handle.what}", self.driver, "cuMemRelease", raw)

    def _num_areas(self, area: Range) -> int:
        return len(area.mappings)

    def _more_areas(self, before: int, offset: int, end: int, behind: int) -> int:
        return 1

    def _reserve(self, nbytes: int) -> int:
        what = f"a range of {nbytes} bytes of rank {self.rank}"
        return int(self.driver("cuMemAddressReserve", nbytes, self.granularity, 0, 0, what=what))

    def _map(self, area: Range, offset: int, handle: Handle, writable: bool) -> None:
        address, nbytes = area.address + offset, handle.nbytes
        what = f"handle {handle.what} of {nbytes} bytes at offset {offset} on rank {self.rank}"
        self.driver("cuMemMap", address, nbytes, 0, handle.raw, 0, what=what)
        try:
            if writable or not self._allow_reads(address, nbytes, what):
                self._set_access(address, nbytes, "PROT_READWRITE", what)
        except BaseException:
            self._attempt(f"unmap of {handle.what}", self.driver, "cuMemUnmap", address, nbytes)
            raise

    def _allow_reads(self, address: int, nbytes: int, what: str) -> bool:
        """Whether the mapping is read-only now."""
        if not self.peers_read_only:
            return False
        try:
            self._set_access(address, nbytes, "PROT_READ", what)
        except DriverError as error:
            if error.out_of_memory:
                raise
            self.peers_read_only = False
            logger.warning("rank %d maps its peers' memory writable: %s", self.rank, error)
            return False
        return True

    def _set_access(self, address: int, nbytes: int, rights: str, what: str) -> None:
        api = self.driver.api
        access = api.CUmemAccessDesc()
        access.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.device_index
        access.flags = getattr(api.CUmemAccess_flags, f"CU_MEM_ACCESS_FLAGS_{rights}")
        self.driver("cuMemSetAccess", address, nbytes, [access], 1, what=f"{what}, {rights}")

    def _unmap(self, mapping: Mapping) -> None:
        self.driver("cuMemUnmap", mapping.address, mapping.nbytes, what=f"handle {mapping.handle.what}")

    def _clear(self, area: Range, mappings: list[Mapping]) -> Exception | None:
        # What torch was given to do with tensors over the range may not be over, and would fault behind the unmap.
        try:
            self.driver("cuCtxSynchronize")
        except DriverError:
            pass  # work has failed: whoever waits for it is told, and the memory goes all the same
        errors = [self._attempt(f"unmap of {mapping.handle.what}", self._unmap, mapping) for mapping in mappings]
        return next((error for error in errors if error is not None), None)

    def _free(self, area: Range, mappings: list[Mapping]) -> Exception | None:
        # Addresses that something may still be mapped at are not given to anybody else.
        return self._clear(area, mappings) or self._free_cleared(area)

    def _free_cleared(self, area: Range) -> Exception | None:
        return self._attempt("release of a range", self.driver, "cuMemAddressFree", area.address, area.nbytes)

    def _bytes(self, address: int, nbytes: int, hold: Hold) -> torch.Tensor:
        import torch

        # With a device: without one torch would take its current device, the CPU, and copy. Memory of another GPU is
        # copied too, which `tensor` refuses.
        return torch.as_tensor(DeviceBytes(address, nbytes, hold), device=torch.device("cuda", self.device_index))

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        import torch

        return torch.empty(shape, dtype=dtype, device=torch.device("cuda", self.device_index))

    def _probe(self, mapping: Mapping) -> int:
        """The first and the last byte, see [Note: rights on CUDA]; a writable one is written back as it is."""
        byte, handle = ctypes.addressof(self._byte), mapping.handle
        for at in (0, mapping.nbytes - 1):
            what = (
                f"byte {at} of handle {handle.what} of {handle.nbytes} bytes, mapped "
                f"{'writable' if mapping.writable else 'read-only'} at offset {mapping.offset} on rank {self.rank}"
            )
            self.driver("cuMemcpyDtoH", byte, mapping.address + at, 1, what=what)
            if mapping.writable:
                self.driver.write(mapping.address + at, byte, 1, what=what)
        return 2

    def _close_descriptor(self, fd: int) -> None:
        os.close(fd)


class DeviceBytes:
    """`nbytes` bytes of device memory at `address` for torch, which keeps this object, and it the range."""

    def __init__(self, address: int, nbytes: int, hold: Hold) -> None:
        self.hold = hold
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


def _word(handle_type: str | None) -> str:
    return handle_type.upper() if handle_type else "unexported"
