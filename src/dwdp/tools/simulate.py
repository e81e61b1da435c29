"""The real runtimes over a device that only writes down what it is asked, driven as executor and model do it.

Events come from a script (simulate_script.py). A race checker judges the trace (races.py), a second account of the
copy order compares it (copy_order.py), and faults on request tell whether both would find them (mutations.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dwdp.config.schema import DenseConfig, DwdpConfig
from dwdp.device.recording import RecordingDevice
from dwdp.runtime.counters import Counters
from dwdp.runtime.dense import DenseRuntime
from dwdp.runtime.dense_schedule import DenseSchedule
from dwdp.runtime.experts import ExpertRuntime
from dwdp.runtime.manager import DenseDwdpManager, DwdpManager
from dwdp.tools.copy_order import ATTACHED, EXPERTS, MODES, STANDALONE, Setting, hook_copies, order_problems
from dwdp.tools.races import find_races
from dwdp.tools.simulate_script import Abort, Event, parse_script, read_script
from dwdp.weights.plan import CopyPlan

PLAN = CopyPlan((), 1)  # copies of nothing: only their order counts here
FORWARDS = 3  # of a simulation that is given no script


class Aborted(Exception):
    """What a simulated forward fails with."""


class TracingDevice(RecordingDevice):
    """Marks expert copies and reads with the epoch of the experts' weights, and fails on request."""

    def __init__(self, num_aux: int) -> None:
        super().__init__(num_aux=num_aux, before_op=self._before)
        self.epoch = 0
        self.ops_left: int | None = None  # ops on the copy stream until one fails

    def _before(self, op: dict) -> None:
        if self.ops_left is not None and op["stream"] == "copy":
            self.ops_left -= 1
            if self.ops_left == 0:
                self.ops_left = None
                raise Aborted
        if op["slot"] is not None and op["slot"][0] == "E" and op["kind"] in ("copy", "read"):
            op["epoch"] = self.epoch


class SimulatedManager(DwdpManager):
    """The attached manager, and expert DWDP alone, around runtimes that nothing was set up for."""

    def __init__(self, device, setting: Setting, parts: Parts) -> None:
        config = DwdpConfig(dwdp_size=2, num_prefetch_slots=setting.slots)
        dense = DenseConfig(enabled=True) if setting.dense else None
        super().__init__(config, dense, group=None, domain=None, device=device, num_experts=2)
        self.experts = parts.experts(device, [PLAN] * setting.layers, setting.slots, counters=self._counters)
        if setting.dense:
            self.dense = parts.dense_manager(dense)
            self.dense.runtime = dense_runtime(device, setting, parts, self._counters)
        self._attach()


@dataclass(frozen=True)
class Parts:
    """The classes that a simulation is made of; a mutation replaces some."""

    manager: type[SimulatedManager] = SimulatedManager
    dense_manager: type[DenseDwdpManager] = DenseDwdpManager
    dense: type[DenseRuntime] = DenseRuntime
    schedule: type[DenseSchedule] = DenseSchedule
    experts: type[ExpertRuntime] = ExpertRuntime
    device: type[TracingDevice] = TracingDevice


def dense_runtime(device, setting: Setting, parts: Parts, counters: Counters) -> DenseRuntime:
    """A dense runtime whose copies move nothing."""
    schedule = parts.schedule([setting.segments] * setting.layers, prefetch_next_pass=setting.mode == ATTACHED)
    plans = [{slot: PLAN for slot in schedule.slots_of(pos)} for pos in range(setting.layers)]
    return parts.dense(device, schedule, {pos: pos for pos in range(setting.layers)}, plans, counters)


class Simulation:
    """A rank's runtimes, and the executor's loop and the model that use them."""

    def __init__(self, setting: Setting, parts: Parts | None = None) -> None:
        parts = parts or Parts()
        self.setting = setting
        self.device = parts.device(setting.num_aux)
        self.manager: SimulatedManager | None = None
        self.experts: ExpertRuntime | None = None
        if setting.mode == STANDALONE:
            self.counters = Counters()
            self.dense = parts.dense_manager(DenseConfig(enabled=True))
            self.dense.runtime = dense_runtime(self.device, setting, parts, self.counters)
        else:
            self.manager = parts.manager(self.device, setting, parts)
            self.dense, self.experts, self.counters = self.manager.dense, self.manager.experts, self.manager._counters
        aux = self.device.auxiliary if setting.dense and "D" in setting.segments else ()
        event = self.device.event
        self._aux = [(stream, event(f"fork {stream.name}"), event(f"join {stream.name}")) for stream in aux]

    @property
    def ops(self) -> list[dict]:
        """The trace so far."""
        return self.device.ops

    @property
    def primed(self) -> bool:
        """Whether the next forward's first copies are enqueued, by the forward before."""
        return (self.experts is None or self.experts.primed) and (self.dense is None or self.dense.runtime.primed)

    # ---- the executor's loop ----

    def forward(self, *, start: bool = True, abort: Abort | None = None) -> bool:
        """Whether the forward came to its end; `abort` makes it fail where it passes that point."""
        try:
            if start:
                self.start(abort)
            self._model(abort)
        except Aborted:
            self.device.mark("abort", None if abort is None else abort.layer)
            return False
        finally:
            self.device.ops_left = None
        self._end()
        return True

    def start(self, abort: Abort | None = None) -> None:
        """What the executor calls before a forward."""
        self._arm(abort, "in-start")
        if self.manager is not None:
            self.manager.start_forward()
        else:
            self.device.mark("start")
            self.dense.runtime.start_forward()
        self.device.ops_left = None

    def _end(self) -> None:
        if self.manager is not None:
            self.manager.end_forward()
        else:
            self.device.mark("end")
            self.counters.forwards += 1

    def invalidate(self) -> None:
        """The experts have new weights: what is enqueued from here on copies and needs those."""
        self.manager.invalidate_prefetch()
        self.device.epoch += 1

    def release(self) -> None:
        """DWDP is given back; no forward can follow."""
        self.manager.release() if self.manager is not None else self.dense.drain()

    # ---- the model ----

    def _model(self, abort: Abort | None) -> None:
        if self.dense is not None:
            self._arm(abort, "in-H0")
            self.dense.h0()
            self.device.ops_left = None
        for pos in range(self.setting.layers):
            self._layer(pos, abort)

    def _layer(self, pos: int, abort: Abort | None = None) -> None:
        """A decoder layer: kernels read A between H1 and H2, D between H1 and H3, E between bind and finish."""
        compute, dense = self.device.compute, self.dense
        _point(abort, "before-H1", pos)
        if dense is not None:
            dense.h1(pos)
            self.read(compute, "A", pos)
        _point(abort, "before-H2", pos)
        self._arm(abort, "in-fill", pos)
        if dense is not None:
            dense.h2(pos)
        for stream, fork, _ in self._aux:
            self.device.record(fork, compute)
            self.device.wait(stream, fork)
            self.read(stream, "D", pos)
        self.read(compute, "D", pos)
        if self.experts is not None:
            self.experts.bind(pos)
            self.read(compute, "E", pos)
        _point(abort, "after-bind", pos)
        if self.experts is not None:
            self.experts.finish(pos)
        self.read(compute, "D", pos)
        _point(abort, "before-H3", pos)
        for stream, _, join in self._aux:
            self.device.record(join, stream)
            self.device.wait(compute, join)
        if dense is not None:
            dense.h3(pos)
        self.device.ops_left = None

    def read(self, stream, segment: str, pos: int) -> None:
        """A kernel that reads a layer's slot, where the segment has slots at all."""
        if segment == "E" or (self.dense is not None and segment in self.setting.segments):
            self.device.enqueue(stream, None, kind="read", slot=self.setting.slot(segment, pos), layer=pos)

    def _arm(self, abort: Abort | None, point: str, pos: int | None = None) -> None:
        if abort is not None and abort.point == point and abort.layer == pos:
            self.device.ops_left = abort.op


def _point(abort: Abort | None, point: str, pos: int) -> None:
    if abort is not None and abort.point == point and abort.layer == pos:
        raise Aborted


def run_script(simulation: Simulation, events: Iterable[Event]) -> None:
    """Plays the events. ValueError: an abort whose point is not passed."""
    for event in events:
        if event.name in ("forward", "abort"):
            ended = simulation.forward(start=event.started, abort=event.abort)
            if ended and event.abort is not None:
                raise ValueError(f"line {event.line}: fewer than {event.abort.op} ops: the forward did not fail")
        else:
            getattr(simulation, event.name)()


# ---- what is found ----


def simulate(setting: Setting, events: Iterable[Event], parts: Parts | None = None) -> tuple[dict[str, Any], list[str]]:
    """Plays a script and judges its trace: the document of `dwdp simulate --json`, and what is found, as texts.

    Found are races, copies out of order, fences, demand fetches that the script does not call for, and in a script
    without an abort the host's waits for the device. parts: of a mutation.
    """
    events = list(events)
    simulation = Simulation(setting, parts)
    run_script(simulation, events)
    counters = simulation.counters
    races = find_races({"ops": simulation.ops})
    problems = order_problems(simulation.ops, setting)
    found = [f"race: {race.text}" for race in races] + [f"order: {problem}" for problem in problems]
    unannounced = setting.mode == EXPERTS and any(not event.started for event in events)
    if counters.fences:
        found.append(f"{counters.fences} fences")
    if counters.demand_fetches and not unannounced:
        found.append(f"{counters.demand_fetches} demand fetches")
    if counters.synchronisations and not any(event.abort for event in events):
        found.append(f"{counters.synchronisations} host waits for the device")
    document = {
        "ops": simulation.ops,
        "races": [race.as_dict() for race in races],
        "fences": counters.fences,
        "demand_fetches": counters.demand_fetches,
        "order_problems": problems,
        "counters": counters.as_dict(),
    }
    return document, found


def text_of(ops: list[dict]) -> str:
    """The copy order of a trace: one line a hook that enqueues copies."""
    sections = hook_copies(ops)
    return "\n".join(str(section) for section in sections if section.copies or section.name in ("abort", "end"))


def command(
    *,
    layers: int | None,
    slots: int,
    mode: str,
    segments: str,
    aux: int,
    forwards: int | None,
    script: Path | None,
    mutate: str | None,
    list_mutations: bool,
    as_json: bool,
) -> bool:
    """`dwdp simulate`: prints what its options ask for; whether nothing was found. ValueError: bad options."""
    from dwdp.tools.mutations import MUTATIONS, find_mutation

    if list_mutations:
        listed = [mutation.as_dict() for mutation in MUTATIONS.values()]
        lines = (f"{one['name']:<28} {one['text']} ({', '.join(one['modes'])})" for one in listed)
        print(json.dumps(listed) if as_json else "\n".join(lines))
        return True
    setting = _setting(layers, slots, mode, segments, aux)
    mutation = None if mutate is None else find_mutation(mutate, setting)
    if script is not None:
        if forwards is not None:
            raise ValueError(f"--forwards {forwards} and --script {script} exclude each other")
        events = read_script(script, setting)
    elif mutation is not None and forwards is None:
        events = parse_script(mutation.script(setting), setting)
    else:
        events = [Event("forward")] * (forwards or FORWARDS)
    document, found = simulate(setting, events, mutation and mutation.parts)
    if as_json:
        print(json.dumps(document))
        return not found
    print(text_of(document["ops"]))
    print(f"\n{len(document['ops'])} ops; {', '.join(f'{k} {v}' for k, v in document['counters'].items())}")
    print("\n".join(found) or "clean: no race, no copy out of order")
    return not found


def _setting(layers: int | None, slots: int, mode: str, segments: str, aux: int) -> Setting:
    if layers is None:
        raise ValueError("--layers is needed: the number of layers that DWDP manages")
    if mode not in MODES:
        raise ValueError(f"--mode is {', '.join(MODES)}, not {mode!r}")
    names = tuple(name.strip() for name in segments.split(","))
    if names not in (("attn",), ("attn", "moe"), ("moe", "attn")):
        raise ValueError(f"--segments is attn,moe or attn, not {segments!r}")
    return Setting(layers, slots, mode, "AD" if "moe" in names else "A", aux)
