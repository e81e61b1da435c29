"""How fast a layer's copy is beside raw copies of the same bytes, and what its submission costs the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from dwdp.partition.experts import ExpertPartition
from dwdp.runtime.experts import ExpertRuntime
from dwdp.weights.cuda_copy import DEFAULT_CTAS, GatherCopy, PerSliceCopy
from dwdp.weights.plan import CopyPlan, CopySlice, TableAddresses, expert_runs
from tests.gpu.experts_reads import ExpertsInMemory
from tests.gpu.experts_site import K3_MOE_LAYERS, NUM_SLOTS, TRANSFERS, Machine, Together

HOST_LIMITS = {"per_slice": 500e-6, "batched": 1e-3, "gather tma": 100e-6, "gather ldst": 100e-6}
HOOKS_LIMIT = 40e-6
ALIGNMENT = 4096  # of the runs' places where addresses repeat; that of rows is smaller


class Rates:
    """Timed on the copy stream by events of the device. wait_for_all: returns when every rank has called it; raw: the
    slices of the raw copies."""

    def __init__(self, experts: ExpertsInMemory, wait_for_all: Callable[[], Any]) -> None:
        self.experts, self._machine, self._wait = experts, experts.machine, wait_for_all
        self._kernels: list[Any] = []
        machine, driver = self._machine, self._machine.driver
        timed = int(driver.api.CUevent_flags.CU_EVENT_DEFAULT)
        self._events = [driver("cuEventCreate", timed) for _ in range(2)]
        self.methods: dict[str, tuple[Any, int]] = {}  # name -> (submission, bytes)
        self._plans = {name: experts.plans(transfer)[0] for name, transfer in TRANSFERS.items()}
        for name, plan in self._plans.items():
            self.methods[name] = machine.mover.submission(plan), plan.nbytes
        raw = self.raw = self._one_piece_a_peer()
        nbytes = sum(piece.nbytes for piece in raw)
        self.methods["raw cuMemcpyAsync"] = PerSliceCopy(driver, raw), nbytes
        self.methods["torch kernel, all SMs"] = self._by_torch(raw), nbytes
        for num_ctas in (DEFAULT_CTAS, machine.num_sms):
            pieces = [machine.plain_copy(one.dst, one.src, one.nbytes, num_ctas) for one in raw]
            self.methods[f"plain kernel, {num_ctas} SMs"] = Together(pieces), nbytes
            for name in ("tma", "ldst"):
                self._kernels.append(machine.gather_kernel(name, num_ctas))
                self.methods[f"{name} in one piece, {num_ctas} SMs"] = GatherCopy(self._kernels[-1], raw), nbytes

    def _one_piece_a_peer(self) -> list[CopySlice]:
        """What layer 0 takes from each peer as one contiguous copy: from the peer's mappings to the pages of slot 0."""
        experts = self.experts
        from_peer: dict[int, int] = {}
        for run in experts.runs(0):
            from_peer[run.peer] = from_peer.get(run.peer, 0) + run.nbytes
        areas = dict(zip(experts.transport.peers, experts.transport.peer_areas))
        pieces, at = [], 0
        for peer, nbytes in from_peer.items():
            nbytes = min(nbytes, experts.flat.nbytes - at, areas[peer].nbytes) // 16 * 16
            pieces.append(CopySlice(experts.flat.address + at, areas[peer].address, nbytes, peer))
            at += nbytes
        return pieces

    def _by_torch(self, pieces: list[CopySlice]) -> Callable[[], None]:
        """An elementwise kernel: `copy_` itself would be a cudaMemcpyAsync."""
        experts, domain = self.experts, self._machine.domain
        areas = dict(zip(experts.transport.peers, experts.transport.peer_areas))
        pairs = []
        for one in pieces:
            shape = (one.nbytes // 8,)
            to = domain.tensor(experts.flat, one.dst - experts.flat.address, shape, torch.int64)
            pairs.append((to, domain.tensor(areas[one.peer], 0, shape, torch.int64)))

        def run() -> None:
            for to, of in pairs:
                torch.bitwise_xor(of, 0, out=to)

        return run

    def measure(self, repeats: int, *, together: bool) -> dict[str, float]:
        """Bytes/s of each method, alternating, by the median of `repeats` behind one that does not count."""
        seconds: dict[str, list[float]] = {name: [] for name in self.methods}
        for _ in range(repeats + 1):
            for name, (submission, _) in self.methods.items():
                if together:
                    self._wait()
                seconds[name].append(self.time(submission))
        return {name: self.methods[name][1] / statistics.median(found[1:]) for name, found in seconds.items()}

    def time(self, submission: Any) -> float:
        """Seconds on the device."""
        device, driver = self._machine.device, self._machine.driver
        driver("cuEventRecord", self._events[0], device.copy.raw)
        device.enqueue(device.copy, submission)
        driver("cuEventRecord", self._events[1], device.copy.raw)
        self._machine.finish()
        return max(1e-9, driver("cuEventElapsedTime", *self._events) / 1e3)

    def close(self) -> None:
        self._machine.device.drain()
        methods, self.methods = self.methods, {}
        self._machine.mover.forget(list(self._plans.values()))
        for name, (submission, _) in methods.items():
            if name not in self._plans:
                getattr(submission, "close", lambda: None)()
        for kernel in self._kernels:
            kernel.close()
        for event in self._events:
            self._machine.driver("cuEventDestroy", event)


def sm_reference(rates: dict[str, float]) -> str:
    """The name of the fastest copy of one piece with as many SMs as the gather has."""
    same = [name for name in rates if name.endswith(f", {DEFAULT_CTAS} SMs")]
    return max(same, key=rates.__getitem__)


def k3_plan(experts: ExpertsInMemory, transfer: str, num_ranks: int) -> CopyPlan:
    """The plan of rank 0 of `num_ranks` for a whole layer of Kimi-K3, every run with its real size and its place in
    memory that is there: in slot 0, and in a peer's rows."""
    widths = experts.machine.widths
    num_experts = 32 if experts.machine.fake else 896
    partition = ExpertPartition.balanced(num_ranks, num_experts)
    others = list(enumerate(partition.ranges))[1:]
    tables, base = [], 1 << 44
    for rows, columns in widths.tables.values():
        nbytes = rows * columns
        peers = {peer: (base + start * nbytes, start, end) for peer, (start, end) in others}
        tables.append(TableAddresses(base, nbytes, peers))
        base += 1 << 40
    area, at = experts.transport.peer_areas[0], 0
    runs = []
    for run in expert_runs(tables, partition, 0):
        room = min(experts.flat.nbytes, area.nbytes) - run.nbytes
        at = at if at <= room else 0
        assert room >= 0, f"a run of {run.nbytes} bytes does not fit"
        runs.append(CopySlice(experts.flat.address + at, area.address + at, run.nbytes, run.peer))
        at += -(-run.nbytes // ALIGNMENT) * ALIGNMENT
    return TRANSFERS[transfer].plan(runs, rank=0, num_ranks=num_ranks, pos=0)


def submission_seconds(experts: ExpertsInMemory, transfer: str, num_ranks: int, repeats: int) -> dict[str, Any]:
    """What the host needs to hand a whole layer of Kimi-K3 to the driver; the copies run behind the clock."""
    machine, plan = experts.machine, k3_plan(experts, transfer, num_ranks)
    try:
        found = host_seconds(machine, machine.mover.submission(plan), repeats)
    finally:
        machine.device.drain()
        machine.mover.forget([plan])
    table = plan.gather
    return {
        **found,
        "descriptors": len(plan.slices) + len(plan.batch) + (len(table.descriptors) if table else 0),
        "bytes": plan.nbytes,
    }


def host_seconds(machine: Machine, submission: Any, repeats: int) -> dict[str, float]:
    """What the host needs for a submission to a stream with nothing on it."""
    device, seconds = machine.device, []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        device.enqueue(device.copy, submission)
        seconds.append(time.perf_counter() - start)
        machine.finish()
    return percentiles(seconds[2:])


class NoCopies:
    """A mover whose copies are nothing."""

    def submission(self, plan: CopyPlan) -> None:
        return None

    def forget(self, plans: Any) -> None:
        pass


def hook_seconds(machine: Machine, repeats: int) -> dict[str, float]:
    """What the host needs for a layer's bind and finish and its share of the forward's start, copies left out."""
    runtime = ExpertRuntime(machine.device, [CopyPlan((), 0)] * K3_MOE_LAYERS, NUM_SLOTS, mover=NoCopies())
    seconds = []
    try:
        for _ in range(repeats + 2):
            start = time.perf_counter()
            runtime.start_forward()
            for pos in range(K3_MOE_LAYERS):
                runtime.bind(pos)
                runtime.finish(pos)
            seconds.append((time.perf_counter() - start) / K3_MOE_LAYERS)
            machine.finish()
    finally:
        runtime.release()
    return percentiles(seconds[2:])


def percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {"median": statistics.median(ordered), "p90": ordered[int(0.9 * (len(ordered) - 1))]}
