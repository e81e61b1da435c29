"""What the streams of real runs did, judged by their order, by the device's clock and by the bytes that were read."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

import torch

from dwdp.device.nvrtc import Kernels, Launch
from dwdp.memory.checksum import checksum_of
from dwdp.runtime.experts import ExpertRuntime
from dwdp.runtime.schedule import Record, Wait
from dwdp.tools.races import find_races
from dwdp.tools.trace import write_traces
from dwdp.weights.cuda_checksum import DeviceChecksums
from tests.gpu.ranks import Site
from tests.support.soak import forward
from tests.support.system import prompt

SPIN = r"""
extern "C" __global__ void spin(unsigned long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < nanoseconds);
}
"""


def timeline(site: Site, model: Path, forwards: int, folder: Path) -> dict:
    """Many forwards: no race by the order of their trace, as a user gets it, and no read window that opened before its
    copy had ended by the GPU's own clock. -> how many ops of each kind."""
    with site.shared(model, trace=True) as rank:
        for _ in range(forwards):
            forward(rank, prompt(0, 5))
        write_traces(folder, [{"rank": site.rank, "ops": rank.trace()}])
        num_layers, num_slots = rank.manager.experts.num_layers, 3  # E, A and D
    document = json.loads((folder / f"rank{site.rank}.json").read_text())
    ops = document["ops"]
    assert find_races(document) == []
    late, filled = 0, {}
    for op in ops:
        where = (op["slot"], op["layer"])
        if op["kind"] == "copy":
            filled[where] = op["t1"]
        elif op["kind"] == "read" and op["stream"] == "compute":
            late += op["t0"] < filled[where] - 20e-6  # timing events have a resolution of half a microsecond
    assert late == 0
    reads = [op for op in ops if op["kind"] == "read" and op["stream"] == "compute"]
    assert len(reads) == forwards * num_layers * num_slots * 2
    drawn = json.loads((folder / f"rank{site.rank}.chrome.json").read_text())["traceEvents"]
    spans = [event for event in drawn if event.get("cat") == "read" and event["dur"] > 0]
    assert len(spans) >= forwards * num_layers * num_slots * 0.9, "read windows have a length"
    kinds = [op["kind"] for op in ops]
    return {kind: kinds.count(kind) for kind in set(kinds)}


def slow_reads(site: Site, model: Path, seconds: float, forwards: int) -> dict:
    """A kernel that spins and then sums up what it reads, in each layer's window, with the right schedule and with
    one whose end of read comes before the kernel. -> {right, mutated: sums that are not the replicated ones', of,
    races}."""
    with site.replicated(model) as rank:
        expected = [
            [checksum_of(table.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()) for table in tables]
            for tables in (layer.expert_tables().values() for layer in rank.model.moe_layers())
        ]
    found = {"of": forwards * len(expected)}
    for name in ("right", "mutated"):
        with site.shared(model, dense=None, trace=True) as rank:
            if name == "mutated":
                record_before_the_kernel(rank.manager.experts)
            assert rank.report()["ledger"]["ring_bytes"] > 0, "all rows lie in the rank's own pages: no slot is reused"
            sums = read_slowly(rank, seconds, forwards)
            wrong = [pos for forward_sums in sums for pos, seen in enumerate(forward_sums) if seen != expected[pos]]
            races = find_races(rank.trace())
        found[name] = len(wrong)
        if name == "right":
            assert races == [], races[0].text
        else:
            found["races"] = sorted({race.kind for race in races})
    return found


def record_before_the_kernel(runtime: ExpertRuntime) -> None:
    """The mutation: the end of a slot's read is recorded when its layer is bound, and not when it is finished."""
    wait, record = runtime._actions[Wait], runtime._actions[Record]

    def opened(runtime, action):
        wait(runtime, action)
        record(runtime, Record(action.layer, action.slot))

    runtime._actions = {**runtime._actions, Wait: opened, Record: lambda *_: None}


def read_slowly(rank, seconds: float, forwards: int) -> list[list[list[int]]]:
    """The hooks of `forwards` forwards with nothing but slow reads between them -> forward -> layer -> sum a table."""
    runtime, device, mover = rank.manager.experts, rank.device, rank.manager.experts.mover
    driver, index = rank.domain.driver, rank.domain.device_index
    kernels = Kernels(driver, index, SPIN, compiler=mover._compiler)
    sums = []
    try:
        nanoseconds = ctypes.c_ulonglong(int(seconds * 1e9))
        spin = Launch(driver, kernels.function("spin"), 1, 1, 0, [nanoseconds])
        for layer in rank.model.moe_layers():
            rows = [(table.data_ptr(), table.nbytes) for table in layer.expert_tables().values()]
            sums.append(DeviceChecksums(mover.checksum_kernel(), rows, fetched=True))
        found = []
        for _ in range(forwards):
            runtime.start_forward()
            for pos in range(len(sums)):
                runtime.bind(pos)
                where = {"slot": f"E{runtime.schedule.slot(pos)}", "layer": pos}
                device.enqueue(device.compute, _SlowRead(spin, sums[pos]), kind="read", **where)
                runtime.finish(pos)
            assert device.drain() is None
            found.append([one.fetched() for one in sums])
        return found
    finally:
        device.drain()
        for owner in (*sums, kernels):
            owner.close()


class _SlowRead:
    def __init__(self, spin: Launch, sums: DeviceChecksums) -> None:
        self._spin, self._sums = spin, sums

    def submit(self, stream) -> None:
        self._spin.submit(stream)
        self._sums.submit(stream)
