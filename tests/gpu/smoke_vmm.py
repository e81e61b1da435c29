"""CUDA memory, copies and kernels between processes, on real GPUs: `python -m tests.gpu.smoke_vmm [--ranks 2]`.

Two processes share one GPU, or have one each where there are enough. Every step's bytes are checked; a table with
rates comes last, and the exit status is that of the checks. `--fake` runs the same on the fake driver of the tests.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from functools import partial
from pathlib import Path

import numpy as np
import torch

from dwdp.device.cuda import CudaDevice
from dwdp.errors import DwdpError
from dwdp.group.backends import StoreGroup, host_store, open_store
from dwdp.group.fds import take_fd
from dwdp.memory.capability import choose_handle_type, probe_handle_types
from dwdp.memory.checksum import checksum_of
from dwdp.memory.exchange import exchange_handles
from dwdp.memory.vmm import CudaDomain
from dwdp.tools.trace import chrome_trace
from dwdp.weights.cuda_checksum import ChecksumKernel, DeviceChecksums
from dwdp.weights.cuda_copy import BatchedCopy, GatherCopy, GatherKernel, PerSliceCopy
from dwdp.weights.plan import CopySlice


class Smoke:
    """One rank's run; `rows` is the table, `failed` what did not hold."""

    def __init__(self, rank: int, group, options) -> None:
        self.rank, self.group, self.options = rank, group, options
        self.rows: list[tuple[str, str]] = []
        self.failed: list[str] = []
        if options.fake:
            from tests.device.test_cuda import FakeCudaDevice
            from tests.memory.fake_driver import FakeCudaDomain, FakeDriver, FakeMachine

            api = FakeDriver(FakeMachine(gpu_bytes=1 << 30))
            self.domain = FakeCudaDomain(rank, 0, driver=api)
            self.make_device = lambda **more: FakeCudaDevice(api=api, **more)
            self.compiler = {"compiler": lambda *args: b"cubin"}
        else:
            index = rank % torch.cuda.device_count()
            torch.cuda.set_device(index)
            self.domain = CudaDomain(rank, index)
            self.make_device = lambda **more: CudaDevice(index, **more)
            self.compiler = {}
        self.driver, self.index = self.domain.driver, self.domain.device_index
        self.piece = self.domain.granularity * (1 if options.fake else 32)  # 64 MiB
        self.num_pieces = 16
        self.nbytes = self.piece * self.num_pieces

    def say(self, name: str, value: object) -> None:
        self.rows.append((name, str(value)))
        if self.rank == 0:
            print(f"  {name}: {value}", flush=True)

    def check(self, name: str, holds: bool, value: object = "right") -> None:
        self.say(name, value if holds else f"WRONG ({value})")
        if not holds:
            self.failed.append(name)

    def run(self) -> None:
        self.say("device", self.domain.uuid)
        self.say("granularity", self.domain.granularity)
        free = self.domain.free_bytes()
        for name, why in probe_handle_types(self.domain).items():
            self.say(f"{name} in this process", why or "works")
        self.say("handle type between processes", choose_handle_type(self.domain, self.group))
        self.share()
        self.pidfd()
        self.composite()
        with self.make_device() as device:
            self.device = device
            self.transfers()
            self.odd_slices()
            self.overheads()
        self.timeline()
        self.kernel.close()
        del self.own
        self.group.barrier("done")
        errors = self.domain.close()
        self.check("all given back", not errors and self.domain.allocated_bytes == 0)
        self.group.barrier("closed")
        change = self.domain.free_bytes() - free
        self.check("free memory as before", change > -self.nbytes // 2, change)

    # ---- sharing ----

    def share(self) -> None:
        """Own random rows exported, every peer's mapped, and all checksums told."""
        domain = self.domain
        self.handle = domain.create(self.nbytes, "rows")
        area = domain.reserve(self.nbytes)
        domain.map(area, 0, self.handle, writable=True)
        domain.seal(self.handle)
        self.own_address = area.address
        self.own = domain.tensor(area, 0, (self.nbytes,), torch.uint8)
        self.own.random_(0, 256)
        self.sync()
        self.kernel = ChecksumKernel(self.driver, self.index, **self.compiler)
        mine = self.checksums(area.address)
        host = [checksum_of(self.own[at : at + self.piece].cpu().numpy()) for at in range(0, self.nbytes, self.piece)]
        self.check("checksums of device and host", mine == host and len(set(mine)) == self.num_pieces)
        self.sums = self.group.allgather_object("checksums", mine)
        answers = exchange_handles(self.group, domain, "rows", [domain.export(self.handle)], b"")
        self.peer = (self.rank + 1) % self.group.size
        imported = domain.import_handle(answers[self.peer][1].pop(0), self.nbytes)
        there = domain.reserve(self.nbytes)
        domain.map(there, 0, imported, writable=False)
        imported.close_fd()
        self.peer_address = there.address
        domain.probe(area), domain.probe(there)
        if not self.options.fake:
            location = self.driver.api.CUmemLocation()
            location.type = self.driver.api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            location.id = self.index
            rights = int(self.driver("cuMemGetAccess", location, there.address))
            self.check("peer is mapped read-only", (rights == 1) is domain.peers_read_only, f"rights {rights}")
        self.check("checksums through the mapping", self.checksums(there.address) == self.sums[self.peer])

    def pidfd(self) -> None:
        """The same descriptor by pidfd_getfd, which needs no socket and may be refused."""
        if not self.domain.exports_descriptors:
            return
        told = self.group.allgather_object("pids", [os.getpid(), self.domain.export(self.handle)])
        try:
            handle = self.domain.import_handle(take_fd(*told[self.peer]), self.nbytes)
            area = self.domain.reserve(self.nbytes)
            self.domain.map(area, 0, handle, writable=False)
            self.check("pidfd_getfd", self.checksums(area.address) == self.sums[self.peer], "works")
            self.domain.free(area)
            self.domain.release(handle)
        except OSError as error:
            self.say("pidfd_getfd", f"refused: {error}")
        self.group.barrier("taken")
        self.handle.close_fd()

    def composite(self) -> None:
        """[pages | own handle | pages] as one tensor, and a pure destination for the copies."""
        domain, page = self.domain, self.domain.page_bytes
        own = domain.create(3 * domain.granularity, "composite")
        area = domain.reserve(2 * page + own.nbytes)
        pages = [domain.create(page, "ring", exportable=False) for _ in range(2)]
        for offset, handle in ((0, pages[0]), (page, own), (page + own.nbytes, pages[1])):
            domain.map(area, offset, handle, writable=True)
        tensor = domain.tensor(area, 0, (area.nbytes // 4,), torch.int32)
        torch.arange(len(tensor), dtype=torch.int32, device=tensor.device, out=tensor)
        right = bool((tensor[1:] - tensor[:-1] == 1).all()) and tensor.data_ptr() == area.address
        self.check("composite range is one tensor", right, str(tensor.device))
        self.check("probe", domain.probe(area) == 6)
        del tensor
        target = domain.reserve(-(-self.nbytes // page) * page)
        for offset in range(0, target.nbytes, page):
            domain.map(target, offset, domain.create(page, "ring", exportable=False), writable=True)
        self.target_area, self.target_address = target, target.address

    # ---- copies ----

    def prepare(self, name: str, slices: list[CopySlice]):
        if name == "per_slice":
            return PerSliceCopy(self.driver, slices)
        if name == "batched":
            return BatchedCopy(self.driver, slices)
        kernel = GatherKernel(self.driver, self.index, name, num_ctas=self.options.ctas, **self.compiler)
        return GatherCopy(kernel, slices)

    def slices(self, size: int, source: int) -> list[CopySlice]:
        return [
            CopySlice(self.target_address + at, source + at, min(size, self.nbytes - at), self.peer)
            for at in range(0, self.nbytes, size)
        ]

    def transfers(self) -> None:
        granule = self.domain.granularity
        for where, source, sums in (
            ("peer", self.peer_address, self.sums[self.peer]), ("own", self.own_address, self.sums[self.rank]),
        ):  # fmt: skip
            plans = [("raw cuMemcpyAsync", "per_slice", self.nbytes), ("per_slice", "per_slice", self.piece),
                     ("batched", "batched", granule), ("gather ldst", "ldst", self.piece),
                     ("gather tma", "tma", self.piece)]  # fmt: skip
            for title, name, size in plans:
                self.group.barrier(f"{where} {title}")
                copy = self.prepare(name, self.slices(size, source))
                self.clear()
                seconds, host = self.time(copy)
                right = self.checksums(self.target_address) == sums
                rate = f"{copy.nbytes / seconds / 1e9:.0f} GB/s, submit {host * 1e6:.0f} us"
                self.check(f"{title} from {where}", right, rate)
                copy.close()
        sums = DeviceChecksums(self.kernel, [(self.own_address, self.nbytes)] * 4)
        seconds, _ = self.time(sums)
        self.say("checksum kernel", f"{4 * self.nbytes / seconds / 1e9:.0f} GB/s")
        sums.close()

    def odd_slices(self) -> None:
        """Slices of any length at any alignment, by each transfer."""
        random = np.random.default_rng(self.rank)
        starts = np.sort(random.choice(self.nbytes - 64, 200, replace=False))
        parts = []
        for start, end in zip(starts, [*starts[1:], self.nbytes - 64]):
            nbytes = int(random.integers(0, end - start + 1))
            parts.append((int(start), int(start + random.integers(0, 33)), nbytes))
        slices = [CopySlice(self.target_address + to, self.peer_address + at, n, self.peer) for to, at, n in parts if n]
        expected = None
        for name in ("per_slice", "batched", "ldst", "tma"):
            copy = self.prepare(name, slices)
            self.clear()
            copy.submit(self.device.copy.raw)
            self.device.drain()
            sums = self.checksums(self.target_address)
            expected = expected or sums  # per_slice comes first: the driver's own copies
            self.check(f"{name}, 200 odd slices", sums == expected)
            copy.close()

    def clear(self) -> None:
        self.domain.tensor(self.target_area, 0, (self.target_area.nbytes,), torch.uint8).fill_(0xFF)
        self.sync()

    def checksums(self, address: int) -> list[int]:
        sums = DeviceChecksums(self.kernel, [(address + i * self.piece, self.piece) for i in range(self.num_pieces)])
        sums.submit(self.driver.api.CUstream(0))
        self.sync()
        found = sums.read()
        sums.close()
        return found

    def time(self, copy) -> tuple[float, float]:
        """(seconds on the device, seconds of the host's submission), medians of five."""
        api, stream = self.driver.api, self.device.copy.raw
        events = [self.driver("cuEventCreate", int(api.CUevent_flags.CU_EVENT_DEFAULT)) for _ in range(2)]
        device, host = [], []
        for _ in range(1 if self.options.fake else 6):
            self.driver("cuEventRecord", events[0], stream)
            start = time.perf_counter()
            copy.submit(stream)
            host.append(time.perf_counter() - start)
            self.driver("cuEventRecord", events[1], stream)
            self.device.drain()
            device.append(max(1e-9, self.driver("cuEventElapsedTime", *events) / 1e3))
        for event in events:
            self.driver("cuEventDestroy", event)
        return statistics.median(device[-5:]), statistics.median(host[-5:])

    def sync(self) -> None:
        self.driver("cuCtxSynchronize")

    # ---- the device ----

    def overheads(self) -> None:
        device, event = self.device, self.device.event("e")
        count = 10 if self.options.fake else 2000
        for name, call in (
            ("record", lambda: device.record(event, device.compute)),
            ("wait", lambda: device.wait(device.compute, event)),
        ):
            device.drain()
            start = time.perf_counter()
            for _ in range(count):
                call()
            self.say(f"host time of a {name}", f"{(time.perf_counter() - start) / count * 1e6:.1f} us")
        device.drain()

    def timeline(self) -> None:
        """An exposed wait is measured, with and without a trace, and torch works on the copy stream."""
        for trace in (False, True):
            with self.make_device(trace=trace, measure_waits=True) as device:
                ready = device.event("ready")
                copy = PerSliceCopy(self.driver, self.slices(self.piece, self.peer_address))
                for layer in range(2):
                    for _ in range(10):
                        device.enqueue(device.copy, copy, slot="E0", layer=layer, nbytes=copy.nbytes)
                    device.record(ready, device.copy, slot="E0", layer=layer)
                    device.wait(device.compute, ready, slot="E0", layer=layer)
                done: list = []
                device.enqueue(device.copy, partial(self.torch_work, done), kind="read")
                device.drain()
                waits = {layer: f"{1e3 * s:.2f} ms" for layer, s in device.exposed_wait_by_layer.items()}
                right = set(waits) == {0, 1} and device.exposed_wait_seconds > 0 and float(done[0]) == 4
                self.check(f"exposed waits, trace {trace}", right, waits)
                if trace and self.rank == 0 and self.options.out:
                    Path(self.options.out, "trace.json").write_text(json.dumps(chrome_trace(device.stamp_trace())))

    def torch_work(self, done: list) -> None:
        done.append(torch.ones(4, device=self.own.device).sum())


def run_rank(rank: int, port: int, options, results) -> None:
    try:
        store = open_store(rank, "127.0.0.1", port, timeout_seconds=60)
        group = StoreGroup(store, rank, options.ranks, host_rank=0, timeout_seconds=60)
        with group:
            smoke = Smoke(rank, group, options)
            group.join({"device_uuid": smoke.domain.uuid, "allow_shared_device": True})
            try:
                smoke.run()
            finally:
                results.put((rank, smoke.rows, smoke.failed))
    except BaseException as error:
        traceback.print_exc()
        results.put((rank, [], [f"rank {rank}: {type(error).__name__}: {error}"]))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ctas", type=int, default=16)
    parser.add_argument("--fake", action="store_true")
    parser.add_argument("--out", default="")
    options = parser.parse_args(arguments)
    if not options.fake and not torch.cuda.is_available():
        raise DwdpError("there is no GPU; --fake runs on the fake driver")
    reserved, port = host_store()
    del reserved  # rank 0 serves there
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    ranks = [context.Process(target=run_rank, args=(r, port, options, results)) for r in range(options.ranks)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(110)
    failed, rows = [f"rank {r} did not end" for r, process in enumerate(ranks) if process.is_alive()], []
    for process in ranks:
        process.kill()
    while not results.empty():
        rank, table, wrong = results.get()
        failed += wrong
        rows = table if rank == 0 and table else rows
    print(f"\n{'what':<40} rank 0 of {options.ranks}")
    for name, value in rows:
        print(f"{name:<40} {value[:160]}")
    print("FAILED: " + "; ".join(failed) if failed else "all checks hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
