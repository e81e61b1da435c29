"""The dense runtime: carries out the dense schedule's actions on a device's streams."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from dwdp.errors import DwdpError, VerificationError
from dwdp.runtime import dense_schedule as ds
from dwdp.runtime.counters import Counters
from dwdp.runtime.watchdog import SlotChecker
from dwdp.weights.mover import HOST_MOVER, Checks
from dwdp.weights.plan import CopyPlan

logger = logging.getLogger(__name__)

_METHODS = {name: name.lower() for name in ("H0", "H1", "H2", "H3")}
_LAST_READS = {"H2": "A", "H3": "D"}  # hook -> the segment whose window it closes


class DenseRuntime:
    """Hooks H0 to H3 of one rank over its schedule, its copy plans and a device.

    positions: layer_index -> pos of the covered layers; hooks of other layers do nothing. plans: for each
    pos, slot -> plan. checker: with `watch` (DEBUG=2) it checks every layer at H1, and every `verify_every`
    forwards (0: never) one layer behind its copy, on the copy stream. strict: a demand fetch and a mismatch of
    the watch are errors. mover: of the domain. After `release()` every hook does nothing.

    [Note: events belong to slots] Each slot has one ready event, recorded on the copy stream behind its copy,
    and one end-of-read event, recorded on the compute stream when its window closes. They are made once and
    recorded again and again; a wait means the latest record. Neither ever makes the host wait.
    """

    def __init__(
        self,
        device,
        schedule: ds.DenseSchedule,
        positions: Mapping[int, int],
        plans: Sequence[Mapping[str, CopyPlan]],
        counters: Counters,
        *,
        strict: bool = False,
        checker: SlotChecker | None = None,
        watch: bool = False,
        verify_every: int = 0,
        mover: Any = HOST_MOVER,
    ) -> None:
        self.device, self.schedule, self.counters = device, schedule, counters
        self.positions, self.plans = dict(positions), list(plans)
        self._nbytes = [sum(plan.nbytes for plan in slots.values()) for slots in self.plans]
        self.strict, self.checker, self.watch = strict, checker, watch
        self.verify_every = verify_every if checker is not None else 0
        self._verification_error: VerificationError | None = None
        self.watch_mismatches = 0
        self.released = False
        self.mover = mover
        self._checks = Checks(mover)
        for pos, slots in enumerate(self.plans if self.verify_every else ()):
            for slot in slots:
                judge = partial(self._verify, pos, slot)
                self._checks.prepare((pos, slot), partial(checker.rows, pos, slot), judge)
        self._forwards = 0
        self._verify_next: int | None = None
        names = sorted({name for plan in self.plans for name in plan})
        self._ready = {name: device.event(f"ready-{name}") for name in names}
        self._read_end = {name: device.event(f"read-end-{name}") for name in names}
        self._readers = (device.compute, *device.auxiliary)
        self._now = [device.event(f"dense-now-{stream.name}") for stream in self._readers]
        self._carry_out = {
            ds.Gather: self._gather,
            ds.WaitReady: self._wait_ready,
            ds.EndRead: self._end_read,
            ds.Demand: self._demand,
            ds.Fence: self._fence,
            ds.Barrier: self._barrier,
        }

    # ---- hooks ----

    def start_forward(self) -> None:
        """L(first), L(second) unless enqueued; nothing while an aborted forward is open."""
        if not self.released:
            self._run(self.schedule.start_forward())

    def h0(self) -> None:
        """Model forward entry: the barrier if one is due, then L(first), L(second) unless enqueued."""
        self._hook("H0", None)

    def h1(self, layer_index: int) -> None:
        """Decoder layer entry: the layer's slots may be read from here on."""
        pos = self._hook("H1", layer_index)
        if pos is not None and self.watch:
            self._watch(pos)

    def h2(self, layer_index: int) -> None:
        """After the attention call: attention weights are read no more."""
        self._hook("H2", layer_index)

    def h3(self, layer_index: int) -> None:
        """After the MoE block, auxiliary streams joined: the layer's dense weights are read no more."""
        if self.verify_every and self.positions.get(layer_index) == self.schedule.num_layers - 1:
            self._forwards += 1
            self._checks.poll()
            if self._forwards % self.verify_every == 0:
                self._verify_next = self._forwards // self.verify_every % self.schedule.num_layers
        self._hook("H3", layer_index)

    @property
    def needs_recovery(self) -> bool:
        """Whether an aborted forward waits for H0; until then a start has nothing to do."""
        return self.schedule.needs_recovery

    @property
    def primed(self) -> bool:
        """Whether the next forward's first layers are enqueued."""
        return self.schedule.primed

    def release(self) -> None:
        """No hook does anything any more. The caller drains the device and then gives the memory back."""
        self.released = True

    def _hook(self, name: str, layer_index: int | None) -> int | None:
        """Runs a hook of a covered layer and returns its pos; None where there is nothing to do."""
        refuse_tracing(name)
        pos = None if layer_index is None else self.positions.get(layer_index)
        if self.released or (pos is None and layer_index is not None):
            return None
        self.device.mark(name, layer=pos)
        hook = getattr(self.schedule, _METHODS[name])
        if name in _LAST_READS and self.device.trace is not None:
            self._trace_read(pos, _LAST_READS[name])
        self._run(hook() if pos is None else hook(pos))
        if name == "H1" and self.device.trace is not None:
            self._trace_read(pos, "AD")
        return pos

    def _trace_read(self, pos: int, segments: str) -> None:
        """See [Note: reads in a trace]."""
        for slot in self.schedule.slots_of(pos):
            if slot[0] in segments and self.schedule.slots[slot].holder == pos:
                self.device.note_read(slot, pos)

    # ---- checks; see watchdog.py ----

    def _watch(self, pos: int) -> None:
        """DEBUG=2 only, and the one place where the dense runtime waits for the device: counted."""
        self.device.synchronize()
        self.counters.synchronisations += 1
        for slot in self.schedule.slots_of(pos):
            problem = self.checker.problem(pos, slot)
            if problem:
                self.watch_mismatches += 1
                logger.error("%s", problem)
                if self.strict:
                    raise VerificationError(problem)

    @property
    def verification_error(self) -> VerificationError | None:
        """The first mismatch of the sampled checks that is known by now, or None."""
        self._checks.poll()
        return self._verification_error

    def _verify(self, pos: int, slot: str, sums: list[int]) -> None:
        """sums: made on the copy stream, behind the copy and before its ready event; keeps the first mismatch."""
        problem = self.checker.judge(pos, slot, sums, at_rest=self.mover.at_rest)
        if problem:
            logger.error("%s", problem)
            if self._verification_error is None:
                self._verification_error = VerificationError(problem)

    def close_checks(self) -> None:
        """Gives the sampled checks back; none may be in flight. Idempotent."""
        self._checks.close()

    # ---- actions; see [Note: an action is done before it counts] ----

    def _run(self, actions: Iterable[ds.Action]) -> None:
        for action in actions:
            self._carry_out[type(action)](action)

    def _gather(self, action: ds.Gather) -> None:
        copy, plans = self.device.copy, self.plans[action.pos]
        for slot in action.slots:
            self.device.wait(copy, self._read_end[slot], slot=slot, layer=action.pos)
        for slot in action.slots:
            where = {"slot": slot, "layer": action.pos}
            plan = plans[slot]
            self.device.enqueue(copy, self.mover.submission(plan), kind="copy", nbytes=plan.nbytes, **where)
            if action.pos == self._verify_next:
                self.device.enqueue(copy, self._checks.enqueued((action.pos, slot)), kind="read", **where)
        if action.pos == self._verify_next:
            self._verify_next = None
        for slot in action.slots:
            self.device.record(self._ready[slot], copy, slot=slot, layer=action.pos)
        self.counters.copies += 1
        self.counters.copied_bytes += self._nbytes[action.pos]

    def _wait_ready(self, action: ds.WaitReady) -> None:
        self.device.wait_all(self.device.compute, {slot: self._ready[slot] for slot in action.slots}, action.pos)

    def _end_read(self, action: ds.EndRead) -> None:
        read_end = self._read_end[action.slot]
        self.device.record(read_end, self.device.compute, slot=action.slot, layer=action.pos)

    def _demand(self, action: ds.Demand) -> None:
        self.counters.demand_fetches += 1
        self.device.mark("demand", layer=action.pos)
        message = f"dense weights of covered layer {action.pos} were not enqueued before the layer was reached"
        if self.strict:
            raise DwdpError(f"{message} (DWDP_DENSE_STRICT)")
        logger.warning("%s; they are copied now", message)

    def _fence(self, action: ds.Fence) -> None:
        self.counters.fences += 1
        self.device.mark("fence", layer=action.pos)
        logger.warning("a copy of covered layer %d goes behind a fence: its slot may still be read", action.pos)
        self._wait_for_readers()

    def _barrier(self, action: ds.Barrier) -> None:
        self.counters.barriers += 1
        self.device.mark("barrier")
        self._wait_for_readers()

    def _wait_for_readers(self) -> None:
        """The copy stream goes behind all work now on every stream that may read a slot."""
        for event, stream in zip(self._now, self._readers):
            self.device.record(event, stream)
            self.device.wait(self.device.copy, event)


def _fail_compilation(context) -> None:
    raise RuntimeError("dense DWDP hooks cannot be compiled: run the model eagerly, without torch.compile")


def refuse_tracing(hook: str) -> None:
    """Raises where a hook would be baked into a graph: its copies would run at capture and never again.

    Of the hooks of a forward the first alone asks whether a CUDA graph is captured: each of the others has work for
    compute, which the device refuses then.
    """
    if torch.compiler.is_compiling():
        # Dynamo runs code that raises in the trace eagerly instead, unseen; an error at compile time ends it.
        if torch.compiler.is_dynamo_compiling():
            from torch._dynamo.comptime import comptime

            comptime(_fail_compilation)
        raise RuntimeError(f"dense DWDP hook {hook} cannot be traced: run the model eagerly, without torch.compile")
    if hook == "H0" and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"dense DWDP hook {hook} cannot be captured: run the model without CUDA graphs")
