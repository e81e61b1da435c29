"""What a probe does with memory, on the host and on a GPU: open it, write, read, copy, time, and tell what it can.

[Note: timed copies] A copy is timed as several of the same bytes back to back, between two events on a GPU, so that
what a submission costs does not count. The bytes are random everywhere: zeros move faster.
"""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from dwdp.errors import DwdpError
from dwdp.weights.plan import CopySlice

if TYPE_CHECKING:
    import numpy

    from dwdp.config.schema import DwdpConfig

Lanes = Sequence[Sequence[CopySlice]]
"""Copies that run at the same time, and within a lane one after the other."""

IMEX_CHANNELS = "/dev/nvidia-caps-imex-channels/channel*"
READS_PER_RANK = 4
"""Copies that a rank's share of free memory must hold: its own bytes, its target, and room for others."""


class HostMemory:
    """Memory of a rank in the host domain. A context manager that closes the domain and raises what that raises."""

    name, rounds = "host", 1

    def __init__(self, rank: int, config: DwdpConfig) -> None:
        from dwdp.memory.host import HostDomain

        self.rank = rank
        self.domain = HostDomain(
            rank,
            granule_bytes=config.host_granule_bytes,
            page_granules=config.page_granules,
            mapping_budget=config.mapping_budget,
        )

    def device(self) -> dict[str, Any]:
        """Of this rank, for the document; `uuid` is None where several ranks may share it."""
        domain = self.domain
        return {
            "rank": self.rank, "uuid": None, "name": "memory of this host", "visible_as": None,
            "granularity": domain.granularity, "page_bytes": domain.page_bytes, "free_bytes": domain.free_bytes(),
            "fabric_attribute": None, "imex_channels": None,
        }  # fmt: skip

    def fit(self, group: Any, nbytes: int) -> int:
        """The bytes of a copy that every rank has room for, at most `nbytes`; collective on a GPU."""
        return nbytes

    def try_handles(self, group: Any) -> dict[str, list[str]]:
        """Type -> which ranks could not share memory by it and why, where types are tried; collective then."""
        return {}

    def take_handles(self, group: Any, tried: dict[str, list[str]]) -> str:
        """The type that serving takes after that. Raises MemoryDomainError where none works."""
        return "memfd"

    def transfers(self) -> dict[str, str | None]:
        """Transfer -> None where this rank can do it, else why not."""
        return {"per_slice": None, "batched": None, "gather": None}

    def read_only(self, area: Any) -> bool:
        """Whether a mapped range of a peer cannot be written."""
        return True

    def peer_access(self, uuid: str | None) -> bool | None:
        """Whether this rank's device reaches the one of that identity; None where nothing says so."""
        return None

    def write(self, area: Any, data: numpy.ndarray) -> None:
        """data: uint8 [n], to the start of a range that is mapped writable."""
        self._view(area, len(data))[:] = data

    def read(self, area: Any, nbytes: int) -> numpy.ndarray:
        """uint8 [nbytes] of the start of a range, a copy or a view."""
        return self._view(area, nbytes)

    def copy(self, slices: Sequence[CopySlice]) -> None:
        """Returns when the bytes are there."""
        from dwdp.weights.copy import copy_slices

        copy_slices(slices)

    def seconds(self, lanes: Lanes) -> float:
        """How long `rounds` of the copies take, see [Note: timed copies]."""
        start = time.perf_counter()
        if len(lanes) == 1:
            self.copy(lanes[0])
        else:
            with ThreadPoolExecutor(len(lanes)) as pool:
                list(pool.map(self.copy, lanes))
        return time.perf_counter() - start

    def _view(self, area: Any, nbytes: int) -> numpy.ndarray:
        import torch

        return self.domain.tensor(area, 0, (nbytes,), torch.uint8).numpy()

    def __enter__(self) -> HostMemory:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        errors = self.domain.close()
        if errors and error is None:
            raise errors[0]


class CudaMemory:
    """Memory of a rank on its GPU; as `HostMemory`. The device is told by its UUID, whatever a process calls it."""

    name, rounds = "cuda", 4
    compiler: Any = None  # as `compile_cubin`, for tests

    def __init__(self, rank: int, config: DwdpConfig) -> None:
        self.rank, self.config = rank, config
        self.domain = self.open_domain()
        self.driver, self.index = self.domain.driver, self.domain.device_index
        self._streams: list[Any] = []
        self._events: list[Any] = []

    def open_domain(self) -> Any:
        """As serving opens it: GPU rank mod count of those that the process sees."""
        from dwdp.executor.memory import rank_device
        from dwdp.memory.vmm import CudaDomain

        budget = {} if self.config.mapping_budget is None else {"mapping_budget": self.config.mapping_budget}
        return CudaDomain(
            self.rank, rank_device("cuda", self.rank).index,
            page_granules=self.config.page_granules, handle_type=self.config.handle_type, **budget,
        )  # fmt: skip

    def device(self) -> dict[str, Any]:
        domain = self.domain
        name = self.driver("cuDeviceGetName", 100, self.driver("cuDeviceGet", self.index))
        return {
            "rank": self.rank, "uuid": domain.uuid, "name": bytes(name).split(b"\0")[0].decode(errors="replace"),
            "visible_as": self.index, "granularity": domain.granularity, "page_bytes": domain.page_bytes,
            "free_bytes": domain.free_bytes(),
            "fabric_attribute": bool(self.driver.attribute("HANDLE_TYPE_FABRIC_SUPPORTED", self.index)),
            "imex_channels": len(imex_channels()),
        }  # fmt: skip

    def fit(self, group: Any, nbytes: int) -> int:
        told = group.allgather_object("room", [self.domain.uuid, self.domain.free_bytes(), self.domain.granularity])
        sharing = {uuid: sum(one[0] == uuid for one in told) for uuid, *_ in told}
        room = min(free // (READS_PER_RANK * sharing[uuid]) for uuid, free, _ in told)
        granularity = max(one[2] for one in told)
        return max(granularity, min(nbytes, room) // granularity * granularity)

    def try_handles(self, group: Any) -> dict[str, list[str]]:
        from dwdp.memory.capability import try_handle_types

        return try_handle_types(self.domain, group, every=True)

    def take_handles(self, group: Any, tried: dict[str, list[str]]) -> str:
        from dwdp.memory.capability import take_handle_type

        return take_handle_type(self.domain, group, tried)

    def transfers(self) -> dict[str, str | None]:
        from dwdp.device.nvrtc import compile_cubin
        from dwdp.weights.cuda_copy import available_transfers

        return available_transfers(
            self.driver, self.index, gather_kernel=self.config.gather_kernel, compiler=self.compiler or compile_cubin
        )

    def read_only(self, area: Any) -> bool:
        """As the driver says it, where it can be asked."""
        location = self.driver.api.CUmemLocation()
        location.type = self.driver.api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = self.index
        try:
            rights = self.driver("cuMemGetAccess", location, area.address, what="a peer's memory")
        except DwdpError:
            return self.domain.peers_read_only
        return int(rights) == int(self.driver.api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ)

    def peer_access(self, uuid: str | None) -> bool | None:
        if uuid == self.domain.uuid:
            return True
        for other in range(int(self.driver("cuDeviceGetCount"))):
            if self.driver.device_uuid(other) == uuid:
                pair = (self.driver("cuDeviceGet", index) for index in (self.index, other))
                return bool(self.driver("cuDeviceCanAccessPeer", *pair))
        return None  # this process does not see it; the mapping itself tells

    def write(self, area: Any, data: numpy.ndarray) -> None:
        self.driver.write(area.address, data.ctypes.data, len(data), what=f"{len(data)} bytes")

    def read(self, area: Any, nbytes: int) -> numpy.ndarray:
        import numpy

        data = numpy.empty(nbytes, dtype=numpy.uint8)
        self.driver("cuMemcpyDtoH", data.ctypes.data, area.address, nbytes, what=f"{nbytes} bytes")
        return data

    def copy(self, slices: Sequence[CopySlice]) -> None:
        from dwdp.weights.mover import mover_of

        mover_of(self.domain).copy(slices)

    def seconds(self, lanes: Lanes) -> float:
        from dwdp.weights.cuda_copy import PerSliceCopy

        self._open_lanes(len(lanes))
        copies = [PerSliceCopy(self.driver, lane) for lane in lanes]
        start, end, *marks = self._events
        first, *others = self._streams[: len(lanes)]
        self.driver("cuEventRecord", start, first)
        for stream in others:
            self.driver("cuStreamWaitEvent", stream, start, 0)
        for _ in range(self.rounds):
            for copy, stream in zip(copies, (first, *others)):
                copy.submit(stream)
        for stream, mark in zip(others, marks):
            self.driver("cuEventRecord", mark, stream)
            self.driver("cuStreamWaitEvent", first, mark, 0)
        self.driver("cuEventRecord", end, first)
        self.driver("cuEventSynchronize", end)
        return max(1e-9, self.driver("cuEventElapsedTime", start, end) / 1e3)

    def _open_lanes(self, count: int) -> None:
        """A stream a lane, and two events more than other lanes need."""
        api = self.driver.api
        while len(self._streams) < count:
            flag = int(api.CUstream_flags.CU_STREAM_NON_BLOCKING)
            self._streams.append(self.driver("cuStreamCreateWithPriority", flag, 0))
        while len(self._events) < count + 1:
            self._events.append(self.driver("cuEventCreate", int(api.CUevent_flags.CU_EVENT_DEFAULT)))

    def __enter__(self) -> CudaMemory:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        streams, self._streams = self._streams, []
        events, self._events = self._events, []
        if error is None:  # else work may have failed on the device, and the process ends
            for call, owned in (("cuEventDestroy", events), ("cuStreamDestroy", streams)):
                for one in owned:
                    self.driver(call, one)
        errors = self.domain.close()
        if errors and error is None:
            raise errors[0]


MEMORIES = {"host": HostMemory, "cuda": CudaMemory}


def imex_channels() -> list[str]:
    """The IMEX channel devices that this process may open."""
    return [path for path in glob.glob(IMEX_CHANNELS) if os.access(path, os.R_OK | os.W_OK)]
