"""Forwards of dense DWDP at full width: what the hooks cost the host, and how long compute waits for copies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from dwdp.executor.create import RankExecutor
from dwdp.runtime.counters import Counters
from dwdp.runtime.dense import DenseRuntime
from dwdp.runtime.dense_schedule import FULL, DenseSchedule
from dwdp.runtime.slots import gather_plans
from dwdp.runtime.watchdog import SlotChecker
from dwdp.weights.mover import mover_of
from dwdp.weights.transfers import Transfer
from tests.gpu.dense_bench import Bench
from tests.gpu.dense_cases import check_bytes
from tests.gpu.dense_models import Matmuls, config_dict, config_folder, weights_made_on_device

TRANSFERS = (Transfer("per_slice"), Transfer("batched"), Transfer("gather", "tma"))
LAYERS = 46
COMPUTED_LAYERS = 6
TOKENS = 8192
FORWARDS = {"hooks": 20, "exposed": 50}
HOST_SECONDS = 4e-3  # of all hooks and submissions of a forward of 46 layers
HOOK_SECONDS = 40e-6  # of a layer, without submission
EXPOSED_SECONDS = 20e-6  # of a layer


class NoCopies:
    """In place of a mover: what is submitted does nothing, so that only the hooks cost."""

    def submission(self, plan) -> NoCopies:
        return self

    def submit(self, stream) -> None:
        pass


class Running:
    """A runtime of its own over the rows and slots of a rank that is set up, with another transfer or fewer layers."""

    def __init__(self, rank: RankExecutor, transfer: Transfer, *, layers: int | None = None, mover: Any = None) -> None:
        weights, self.device = rank.manager.dense.weights, rank.device
        layout, self.mover = weights.layout, mover_of(rank.domain)
        self.plans = gather_plans(layout, weights.store, weights.slots, transfer)[:layers]
        self.schedule = DenseSchedule(layout.segments[:layers], prefetch_next_pass=True)
        positions = {index: pos for index, pos in layout.positions.items() if pos < len(self.plans)}
        self.indices = sorted(positions, key=positions.get)
        self.counters = Counters()
        self.runtime = DenseRuntime(
            rank.device, self.schedule, positions, self.plans, self.counters, mover=mover or self.mover
        )
        self._checker = SlotChecker(layout, weights.store, weights.slots, weights.checksums, self.mover)

    def forward(self, attention: Callable[[int], None], moe: Callable[[int], None]) -> None:
        runtime = self.runtime
        runtime.start_forward()
        runtime.h0()
        for index in self.indices:
            runtime.h1(index)
            attention(index)
            runtime.h2(index)
            moe(index)
            runtime.h3(index)

    def host_seconds(self, *, idle: bool = True) -> float:
        """Of the hooks of one forward, submissions included. idle: the device is, before each layer's."""
        runtime, drain, clock = self.runtime, self.device.drain, time.perf_counter
        hooks: list[Sequence[Callable[[], None]]] = [(runtime.start_forward, runtime.h0)]
        hooks += [[partial(hook, i) for hook in (runtime.h1, runtime.h2, runtime.h3)] for i in self.indices]
        total = 0.0
        for calls in hooks:
            start = clock()
            for call in calls:
                call()
            total += clock() - start
            if idle:
                drain()
        return total

    def problems(self) -> list[str]:
        """What is wrong with the slots that hold a layer for the next forward, and with the counters."""
        self.device.drain()
        held = [(slot.holder, name) for name, slot in self.schedule.slots.items() if slot.state == FULL]
        found = [self._checker.problem(pos, name) for pos, name in held] if held else ["no slot is full"]
        counted = {key: getattr(self.counters, key) for key in ("demand_fetches", "fences", "barriers")}
        found += [f"{key} {number}" for key, number in counted.items() if number]
        return [text for text in found if text]

    def close(self) -> None:
        self.runtime.release()
        self.device.drain()
        self.mover.forget([plan for plans in self.plans for plan in plans.values()])


def forwards_of_a_rank(bench: Bench, meet) -> None:
    """Rows only and weights that never were whole, so that all layers fit; every transfer over the same rows."""
    layers = bench.options["layers"] if bench.fake and bench.options["layers"] else 5 if bench.fake else LAYERS
    config = config_dict(layers, fake=bench.fake)
    start = time.perf_counter()
    with config_folder(config) as folder, weights_made_on_device(), bench.rank(folder, {"load": "sharded"}) as rank:
        bench.say("rows made in place and set up", f"{time.perf_counter() - start:.2f} s")
        check_bytes(bench, rank, config)
        hooks_alone(bench, rank)
        for transfer in TRANSFERS:
            meet.barrier(f"hooks {transfer}")
            hooks_and_submission(bench, rank, transfer)
        matmuls = Matmuls(rank.model, 4 if bench.fake else TOKENS)
        for transfer in TRANSFERS:
            if bench.time_left(meet, 15 if not bench.fake else 0):
                exposed_waits(bench, meet, rank, transfer, matmuls)
            else:
                bench.say(f"exposed waits, {transfer}", "skipped, too little time is left")
    del rank


def hooks_alone(bench: Bench, rank: RankExecutor) -> None:
    running = Running(rank, TRANSFERS[0], mover=NoCopies())
    try:
        seconds = [running.host_seconds(idle=False) for _ in range(_count(bench, "hooks") + 3)][3:]
    finally:
        running.close()
    layer = statistics.median(seconds) / len(running.indices)
    shown = f"{layer * 1e6:.1f} us a layer (at most {HOOK_SECONDS * 1e6:.0f})"
    bench.target("hooks without submission", layer <= HOOK_SECONDS, shown, hook_seconds=layer)


def hooks_and_submission(bench: Bench, rank: RankExecutor, transfer: Transfer) -> None:
    running = Running(rank, transfer)
    try:
        seconds = [running.host_seconds() for _ in range(_count(bench, "hooks") + 1)][1:]  # the first one prepares
        problems = running.problems()
    finally:
        running.close()
    median, layers = statistics.median(seconds), len(running.indices)
    shown = f"{median * 1e3:.2f} ms a forward of {layers} layers, {median / layers * 1e6:.0f} us a layer (at most 4 ms)"
    bench.target(
        f"hooks and submission, {transfer}", median <= HOST_SECONDS, shown, **{f"host_seconds {transfer}": median}
    )
    bench.check(f"slots and counters after that, {transfer}", not problems, "; ".join(problems) or "checksums equal")


def exposed_waits(bench: Bench, meet, rank: RankExecutor, transfer: Transfer, matmuls: Matmuls) -> None:
    layers = {layer.index: layer for layer in rank.model.model.layers}
    running = Running(rank, transfer, layers=min(COMPUTED_LAYERS, len(layers)))
    waited: dict[int, list[float]] = {pos: [] for pos in range(len(running.indices))}
    steps = (lambda index: matmuls.attention(layers[index]), lambda index: matmuls.moe(layers[index]))
    try:
        running.forward(*steps)
        running.device.drain()
        meet.barrier(f"exposed {transfer}")
        start = time.perf_counter()
        for _ in range(_count(bench, "exposed")):
            before = dict(running.device.exposed_wait_by_layer)
            running.forward(*steps)
            running.device.drain()
            for pos, seconds in running.device.exposed_wait_by_layer.items():
                if pos in waited:
                    waited[pos].append(seconds - before.get(pos, 0.0))
        elapsed = (time.perf_counter() - start) / _count(bench, "exposed") / len(running.indices)
        problems = running.problems()
        floor = floor_of_a_wait(bench, running.device)
    finally:
        running.close()
    behind = [seconds for pos, of_layer in waited.items() if pos for seconds in of_layer]
    median, worst = statistics.median(behind), statistics.quantiles(behind, n=20)[-1]
    shown = (
        f"median {median * 1e6:.1f} us a layer, 95 % {worst * 1e6:.1f} us; floor of a wait {floor * 1e6:.1f} us; "
        f"a layer {elapsed * 1e3:.1f} ms"
    )
    numbers = {f"exposed {transfer}": median, f"floor {transfer}": floor, f"layer seconds {transfer}": elapsed}
    bench.target(f"exposed waits, {transfer}", median < EXPOSED_SECONDS, shown, **numbers)
    bench.check(f"slots and counters after that, {transfer}", not problems, "; ".join(problems) or "checksums equal")


def floor_of_a_wait(bench: Bench, device) -> float:
    """Seconds that timing events around a wait show where the event was over long before."""
    event, first = device.event("long done"), 1_000_000
    device.record(event, device.copy)
    device.drain()
    x = torch.ones(64, 64, device=bench.device)
    number = 5 if bench.fake else 100
    for i in range(number):
        x.mul_(1.0)
        device.wait(device.compute, event, layer=first + i)
        x.mul_(1.0)
    device.drain()
    by_layer = device.exposed_wait_by_layer
    return statistics.median(by_layer.pop(first + i) for i in range(number))


def _count(bench: Bench, what: str) -> int:
    return 3 if bench.fake else FORWARDS[what]


CASES = (("forwards", 35, forwards_of_a_rank),)
