"""Expert layers set up by the product itself, and forwards whose every read is compared with the owners' sums.

A forward's read of a layer is the checksum kernel over the rows of all experts, between bind and finish on the compute
stream, so that nothing but the schedule's events keeps it apart from the copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dwdp.config.schema import DwdpConfig
from dwdp.runtime.experts import ExpertRuntime
from dwdp.runtime.manager import DwdpManager
from dwdp.weights.cuda_checksum import DeviceChecksums
from dwdp.weights.plan import CopyPlan, CopySlice, expert_runs
from dwdp.weights.transfers import Transfer
from tests.gpu.experts_site import NUM_SLOTS, ExpertModel, Kind, Machine, Together

FORWARDS = 3


class ExpertsInMemory:
    """One partition in the memory of all ranks; collective to make and to close.

    plans(transfer): a copy plan a layer. expected: uint64 [tables x experts] a layer, the owners' sums. flat: the
    pages of slot 0 as one contiguous range.
    """

    def __init__(self, machine: Machine, group, kind: Kind) -> None:
        self.machine, self.group, self.kind = machine, group, kind
        self.flat: Any = None
        self.reads: list[list[DeviceChecksums]] = []  # by forward and layer
        config = DwdpConfig(
            dwdp_size=group.size,
            num_experts_per_worker=kind.size,
            num_prefetch_experts=kind.stride,
            num_prefetch_slots=NUM_SLOTS,
            allow_shared_device=True,
            verify_every=0,
        )
        resources = {"group": group, "domain": machine.domain, "device": machine.device}
        self.manager = DwdpManager(config, None, num_experts=kind.num_experts, **resources)
        self.manager.__enter__()
        try:
            self._load()
        except BaseException as error:
            self.close(error)
            raise

    def _load(self) -> None:
        manager = self.manager
        self.partition = manager.partition
        self.model = ExpertModel(self.kind, self.machine.widths, *self.partition.ranges[self.group.rank])
        self._agreed("making the experts' rows", self._make_rows)
        manager.setup(self.model)
        self._agreed("preparing the reads", self._prepare)

    def _agreed(self, phase: str, step: Callable[[], None]) -> None:
        """A local step that raises on every rank when it fails on one."""
        failed = None
        try:
            step()
        except Exception as error:
            failed = error
        self.group.vote(phase, failed)

    def _make_rows(self) -> None:
        self.manager.prepare(self.model)
        self.model.fill()

    def _prepare(self) -> None:
        machine, manager = self.machine, self.manager
        self.transport = manager.experts.transport
        self.addresses = self.transport.addresses()
        positions = range(self.kind.num_layers)
        specs = [table.spec for table in self.transport.tables]
        self._of_layer = [[i for i, spec in enumerate(specs) if spec.pos == pos] for pos in positions]
        self.expected = [self._owners_sums(pos) for pos in positions]
        rows = [self._rows(pos) for pos in positions]
        kernel = machine.mover.checksum_kernel()
        for _ in range(FORWARDS):
            self.reads.append([])
            for pos in positions:
                self.reads[-1].append(DeviceChecksums(kernel, rows[pos]))
        self._lay_flat()

    def _rows(self, pos: int) -> list[tuple[int, int]]:
        tables = [self.addresses[i] for i in self._of_layer[pos]]
        experts = range(self.partition.num_experts)
        return [(table.local(expert), table.row_nbytes) for table in tables for expert in experts]

    def _owners_sums(self, pos: int) -> np.ndarray:
        partition, infos = self.partition, self.transport.infos
        owners = [partition.owner(expert) for expert in range(partition.num_experts)]
        return np.array(
            [
                infos[owner][i].checksums[expert - partition.ranges[owner][0]]
                for i in self._of_layer[pos]
                for expert, owner in enumerate(owners)
            ],
            dtype=np.uint64,
        )

    def _lay_flat(self) -> None:
        domain, ring = self.machine.domain, self.manager.experts._ring
        pages = ring._pool._pages[: ring.slot_pages[0]]
        self.flat = domain.reserve(len(pages) * ring.page_bytes)
        for number, page in enumerate(pages):
            domain.map(self.flat, number * ring.page_bytes, page, writable=True)

    def runs(self, pos: int) -> list[CopySlice]:
        return expert_runs([self.addresses[i] for i in self._of_layer[pos]], self.partition, self.group.rank)

    def plans(self, transfer: Transfer) -> list[CopyPlan]:
        where = {"rank": self.group.rank, "num_ranks": self.group.size}
        return [transfer.plan(self.runs(pos), pos=pos, **where) for pos in range(self.kind.num_layers)]

    def forwards(self, plans: list[CopyPlan], mover: Any, *, read_delay: float = 0.0, device: Any = None) -> int:
        """Rows that FORWARDS forwards through the schedule read wrong. read_delay: seconds before every read."""
        device = device or self.machine.device
        for plan in plans:  # as the set-up's verification does: a first copy that is made here would wait for reads
            mover.submission(plan)
        runtime = ExpertRuntime(device, plans, NUM_SLOTS, mover=mover)
        delay = self.machine.spin(read_delay)
        try:
            for reads in self.reads:
                runtime.start_forward()
                for pos, read in enumerate(reads):
                    runtime.bind(pos)
                    if read_delay:
                        device.enqueue(device.compute, delay, kind="read")
                    device.enqueue(device.compute, read, kind="read")
                    runtime.finish(pos)
            self.machine.finish()
            assert runtime.counters.demand_fetches == runtime.counters.restarts == 0, runtime.counters
        finally:
            runtime.release()  # has no transport: the memory stays
        return sum(
            int((np.array(read.read(), dtype=np.uint64) != expected).sum())
            for reads in self.reads
            for read, expected in zip(reads, self.expected)
        )

    def close(self, error: BaseException | None = None) -> None:
        self.machine.device.drain()
        reads, self.reads = self.reads, []
        for of_forward in reads:
            for read in of_forward:
                read.close()
        flat, self.flat = self.flat, None
        if flat is not None:
            self.machine.domain.free(flat)
        self.manager.__exit__(type(error) if error else None, error, None)


class SlowMover:
    """A mover whose copies each begin with a kernel that takes a while, on the copy stream."""

    def __init__(self, mover: Any, before: Any) -> None:
        self._mover, self._before = mover, before

    def submission(self, plan: CopyPlan) -> Together:
        return Together([self._before, self._mover.submission(plan)])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mover, name)


class DeafDevice:
    """A device whose stream `deaf` waits for no event: what the schedule's waits are there for."""

    def __init__(self, device: Any, deaf: str) -> None:
        self._device, self._deaf = device, deaf

    def wait(self, stream: Any, event: Any, **where: Any) -> None:
        if stream.name != self._deaf:
            self._device.wait(stream, event, **where)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


def slow_reads(experts: ExpertsInMemory, transfer: Transfer, seconds: float) -> int:
    """Wrong rows when every read begins late: a copy that does not wait for it overwrites what it reads."""
    return experts.forwards(experts.plans(transfer), experts.machine.mover, read_delay=seconds)


def slow_copies(experts: ExpertsInMemory, transfer: Transfer, seconds: float) -> int:
    """Wrong rows when every copy begins late: a read that does not wait for it finds another layer's rows."""
    mover = SlowMover(experts.machine.mover, experts.machine.spin(seconds))
    return experts.forwards(experts.plans(transfer), mover)


def without_waits(experts: ExpertsInMemory, deaf: str, seconds: float) -> int:
    """Wrong rows when stream `deaf` waits for nothing. There must be some, else the reads above prove nothing."""
    machine, plans = experts.machine, experts.plans(Transfer("per_slice"))
    device = DeafDevice(machine.device, deaf)
    if deaf == "compute":
        return experts.forwards(plans, SlowMover(machine.mover, machine.spin(seconds)), device=device)
    return experts.forwards(plans, machine.mover, read_delay=seconds, device=device)
