"""Copies and checksums in a GPU's memory, prepared from the plans that the host runs itself; see [Note: movers]."""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dwdp.device.nvrtc import Compiler, compile_cubin
from dwdp.memory.vmm import CudaDomain
from dwdp.weights.cuda_checksum import ChecksumKernel, DeviceChecksums
from dwdp.weights.cuda_compare import CompareKernel, DeviceDifferences
from dwdp.weights.cuda_copy import (
    DEFAULT_CTAS,
    GRAPH_FROM,
    BatchedCopy,
    GatherCopy,
    GatherKernel,
    GraphCopy,
    PerSliceCopy,
    best_kernel,
    device_capability,
)
from dwdp.weights.mover import Judge, Pairs, Rows
from dwdp.weights.plan import CopyPlan, CopySlice, GatherTable

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class CudaMover:
    """Of one domain. Kernels are compiled when they are first needed; compiler: as `compile_cubin`, for tests."""

    at_rest = False  # a slot may hold another layer by the time that the host learns of a check's result

    def __init__(self, domain: CudaDomain, *, compiler: Compiler = compile_cubin) -> None:
        self._domain, self._driver, self._compiler = domain, domain.driver, compiler
        self._copies: dict[int, PlanCopy] = {}  # id of a plan, which is kept -> its submission
        self._checks: set[CudaCheck] = set()
        self._kernels: dict[tuple, Any] = {}  # what makes a kernel, and its name if it has one -> the kernel
        self._stream: Any = None

    # ---- what devices enqueue ----

    def submission(self, plan: CopyPlan) -> PlanCopy:
        """The prepared copy of a plan; made at the first call, which set-up's verification is."""
        copy = self._copies.get(id(plan))
        if copy is None:
            copy = self._copies[id(plan)] = PlanCopy(self, plan)
        return copy

    def check(self, rows: Callable[[], Rows], judge: Judge) -> CudaCheck:
        check = CudaCheck(self, rows(), judge)
        self._checks.add(check)
        return check

    # ---- at once ----

    def run(self, plan: CopyPlan) -> None:
        self._now(self.submission(plan))

    def copy(self, slices: Sequence[CopySlice]) -> None:
        self._now(PerSliceCopy(self._driver, slices))

    def row_sums(self, address: int, num_rows: int, nbytes: int) -> list[int]:
        return self.sums([(address + row * nbytes, nbytes) for row in range(num_rows)])

    def sums(self, rows: Rows) -> list[int]:
        sums = DeviceChecksums(self.checksum_kernel(), rows)
        try:
            self._now(sums)
            return sums.read()
        finally:
            sums.close()

    def tensor_sum(self, data: torch.Tensor) -> str:
        return f"{self.sums([(data.data_ptr(), data.nbytes)])[0]:016x}"

    def first_differences(self, pairs: Pairs) -> list[int | None]:
        differences = DeviceDifferences(self._kernel(CompareKernel), pairs)
        try:
            self._now(differences)
            return differences.read()
        finally:
            differences.close()

    def read(self, address: int, nbytes: int) -> bytes:
        self.settle()
        buffer = ctypes.create_string_buffer(nbytes)
        self._driver("cuMemcpyDtoH", ctypes.addressof(buffer), address, nbytes, what=f"{nbytes} bytes")
        return buffer.raw

    def settle(self) -> None:
        self._driver("cuCtxSynchronize")

    def _now(self, submission: Any) -> None:
        """Behind what every stream has been given, torch's among them; see [Note: movers]."""
        self.settle()
        if self._stream is None:  # a batch does not go to the default stream
            flag = int(self._driver.api.CUstream_flags.CU_STREAM_NON_BLOCKING)
            self._stream = self._driver("cuStreamCreateWithPriority", flag, 0)
        try:
            submission.submit(self._stream)
            self._driver("cuStreamSynchronize", self._stream)
        except BaseException:
            with contextlib.suppress(Exception):  # what the failed step began must not outlive what it reads
                self._driver("cuCtxSynchronize")
            raise

    # ---- kernels ----

    def best_kernel(self, asked: str) -> str:
        if asked != "auto":
            return asked
        return best_kernel(device_capability(self._driver, self._domain.device_index))

    def gather_sms(self) -> int:
        return DEFAULT_CTAS

    def gather_kernel(self, name: str) -> GatherKernel:
        return self._kernel(GatherKernel, name)

    def checksum_kernel(self) -> ChecksumKernel:
        return self._kernel(ChecksumKernel)

    def _kernel(self, make: Callable[..., Any], *name: str) -> Any:
        if (make, *name) not in self._kernels:
            made = make(self._driver, self._domain.device_index, *name, compiler=self._compiler)
            self._kernels[make, *name] = made
        return self._kernels[make, *name]

    # ---- the end ----

    def forget(self, plans: Sequence[CopyPlan]) -> None:
        for plan in plans:
            copy = self._copies.pop(id(plan), None)
            if copy is not None:
                copy.close()

    def dropped(self, check: CudaCheck) -> None:
        self._checks.discard(check)

    def close(self) -> None:
        copies, self._copies = self._copies, {}
        kernels, self._kernels = self._kernels, {}
        stream, self._stream = self._stream, None
        for owner in (*copies.values(), *list(self._checks), *kernels.values()):
            owner.close()
        if stream is not None:
            try:
                self._driver("cuStreamDestroy", stream)
            except Exception:
                logger.exception("a stream could not be destroyed")


class PlanCopy:
    """The parts of a plan, prepared, in the order in which the host runs them."""

    def __init__(self, mover: CudaMover, plan: CopyPlan) -> None:
        driver = mover._driver
        self.plan = plan  # kept: its id is the mover's key
        self._parts: list[Any] = []
        try:
            if plan.batch:
                self._parts.append(BatchedCopy(driver, plan.batch))
            if plan.gather is not None:
                self._parts.append(GatherCopy(mover.gather_kernel(plan.gather.kernel), table_slices(plan.gather)))
            if plan.slices:
                make = GraphCopy if len(plan.slices) >= GRAPH_FROM else PerSliceCopy
                self._parts.append(make(driver, plan.slices))
        except BaseException:
            self.close()
            raise

    def submit(self, stream: Any) -> None:
        for part in self._parts:
            part.submit(stream)

    def close(self) -> None:
        """Idempotent; nothing may be in flight."""
        parts, self._parts = self._parts, []
        for part in parts:
            part.close()


def table_slices(table: GatherTable) -> list[CopySlice]:
    """The runs of a gather's table, each with the peer that its row is of."""
    return [
        CopySlice(run.dst, run.src, run.nbytes, row.peer)
        for row in table.rows
        for run in table.descriptors[row.first : row.end]
    ]


class CudaCheck:
    """Sums rows up in stream order; the judge is called by the first `poll` behind that."""

    def __init__(self, mover: CudaMover, rows: Rows, judge: Judge) -> None:
        self._mover, self._driver, self._judge = mover, mover._driver, judge
        self._pending = False
        self._event: Any = None
        self._sums = DeviceChecksums(mover.checksum_kernel(), rows, fetched=True)
        try:
            flags = int(self._driver.api.CUevent_flags.CU_EVENT_DISABLE_TIMING)
            self._event = self._driver("cuEventCreate", flags, what="a check")
        except BaseException:
            self._sums.close()
            raise

    def submit(self, stream: Any) -> None:
        if self._pending and not self.poll():
            return  # the host has not read the last result; this one is left out
        self._sums.submit(stream)
        self._driver("cuEventRecord", self._event, stream, what="a check")
        self._pending = True

    def poll(self) -> bool:
        if self._pending:
            if not self._driver.reached(self._event, "a check"):
                return False
            self._pending = False
            self._judge(self._sums.fetched())
        return True

    def close(self) -> None:
        event, self._event, self._pending = self._event, None, False
        self._sums.close()
        if event is not None:
            try:
                self._driver("cuEventDestroy", event)
            except Exception:
                logger.exception("an event could not be destroyed")
        self._mover.dropped(self)
