"""The expert prefetch at run time: the schedule's actions on a device, and the end of it all."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from dwdp.errors import DwdpError, VerificationError
from dwdp.runtime.counters import Counters
from dwdp.runtime.schedule import (
    Action,
    Demand,
    Issue,
    PrefetchSchedule,
    Record,
    Restart,
    Synchronise,
    Wait,
)
from dwdp.weights.mover import HOST_MOVER, Checks
from dwdp.weights.plan import CopyPlan
from dwdp.weights.small import SmallSpec

logger = logging.getLogger(__name__)


class ExpertRuntime:
    """Performs the `PrefetchSchedule` of one rank on a device; the host waits only where the schedule says
    so.

    plans: one CopyPlan per managed layer; none (one rank alone) makes every method do nothing. num_slots: S;
    min(S, L) are used. transport, ring: what `release_own` gives back. small: the exchanged per-expert tensors.
    modules: the layers' routed experts, held weakly. checker, verify_every: every so many forwards one layer's rows
    are compared again on the copy stream; a mismatch is kept in `verification_error` and logged. mover: of the
    domain. report: what setup found.

    [Note: events] Each slot has one ready event and one end-of-read event. An event belongs to the slot that
    was read or written, never to the layer or to the slot of the copy that follows.
    """

    def __init__(
        self,
        device,
        plans: Sequence[CopyPlan],
        num_slots: int,
        *,
        counters: Counters | None = None,
        transport: Any = None,
        small: Sequence[SmallSpec] = (),
        ring: Any = None,
        modules: Sequence[Any] = (),
        checker: Any = None,
        verify_every: int = 0,
        mover: Any = HOST_MOVER,
        report: dict[str, Any] | None = None,
    ) -> None:
        self.device = device
        self.plans = list(plans)
        self.counters = Counters() if counters is None else counters
        self.report = {} if report is None else report
        self._verification_error: VerificationError | None = None
        self.verified_forward: int | None = None
        self.schedule = PrefetchSchedule(len(plans), num_slots) if plans else None
        slots = range(self.schedule.num_slots if self.schedule else 0)
        self._names = [f"E{slot}" for slot in slots]
        self._ready = [device.event(f"E{slot} ready") for slot in slots]
        self._end_of_read = [device.event(f"E{slot} end of read") for slot in slots]
        self.transport, self._ring = transport, ring
        self.small = list(small)
        self._modules = [weakref.ref(module) for module in modules]
        self.checker, self._verify_every = checker, verify_every
        self._forwards = 0
        self._check_next: int | None = None
        self._stopped = False
        self.mover = mover
        self._checks = Checks(mover)
        for pos in range(len(plans) if self._verify_every and checker is not None else 0):
            self._checks.prepare(pos, partial(checker.rows, pos), partial(self._verify, pos))

    @property
    def num_layers(self) -> int:
        return len(self.plans)

    @property
    def in_flight(self) -> bool:
        """The next bind expected is the first layer, and the first min(S, L) copies were issued whole."""
        return self.schedule is not None and self.schedule.in_flight

    @property
    def primed(self) -> bool:
        """`in_flight`, and issued by the forward before. To be read before `start_forward`."""
        return self.schedule is not None and self.schedule.primed

    # The hooks.

    def start_forward(self) -> None:
        """Issues what is missing of the first layers' copies; touches only the copy stream unless it
        restarts.
        """
        if self.schedule is not None:
            self._check_running()
            self._perform(self.schedule.start_forward())

    def bind(self, pos: int) -> None:
        """Just before the routed experts of layer `pos` are read: compute waits for its copy."""
        self._check_running()
        self.device.mark("bind", pos)
        self._perform(self.schedule.bind(pos))
        self._trace_read(pos)

    def finish(self, pos: int) -> None:
        """After every kernel of layer `pos`, auxiliary streams joined into compute; once per layer."""
        self._check_running()
        self.device.mark("finish", pos)
        self._trace_read(pos)
        if pos == self.num_layers - 1:
            self._count_forward()
        self._perform(self.schedule.finish(pos))

    def invalidate_prefetch(self) -> None:
        """Drops every copy not yet read, because the experts' rows are about to change or have changed."""
        if self.schedule is not None:
            self.device.mark("invalidate")
            self.schedule.invalidate()

    def _trace_read(self, pos: int) -> None:
        """See [Note: reads in a trace]."""
        if self.schedule.bound == pos:
            self.device.note_read(self._names[self.schedule.slot(pos)], pos)

    # One method per action of the schedule.

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            self._actions[type(action)](self, action)

    def _issue(self, action: Issue) -> None:
        device, plan, slot = self.device, self.plans[action.layer], action.slot
        where = {"slot": self._names[slot], "layer": action.layer}
        device.wait(device.copy, self._end_of_read[slot], **where)
        device.enqueue(device.copy, self.mover.submission(plan), kind="copy", nbytes=plan.nbytes, **where)
        if action.layer == self._check_next:
            self._check_next = None
            device.enqueue(device.copy, self._checks.enqueued(action.layer), kind="read", **where)
        device.record(self._ready[slot], device.copy, **where)
        self.counters.copies += 1
        self.counters.copied_bytes += plan.nbytes

    def _wait(self, action: Wait) -> None:
        name = self._names[action.slot]
        self.device.wait(self.device.compute, self._ready[action.slot], slot=name, layer=action.layer)

    def _record(self, action: Record) -> None:
        name = self._names[action.slot]
        self.device.record(self._end_of_read[action.slot], self.device.compute, slot=name, layer=action.layer)

    def _synchronise(self, action: Synchronise) -> None:
        logger.info("the device is synchronised: expert layer %d was bound and not finished", action.layer)
        self.device.synchronize()
        self.counters.synchronisations += 1

    def _restart(self, action: Restart) -> None:
        logger.info("the expert prefetch restarts at layer %d", action.layer)
        self.counters.restarts += 1

    def _demand(self, action: Demand) -> None:
        logger.info("expert layer %d is fetched on demand", action.layer)
        self.device.mark("demand", action.layer)
        self.counters.demand_fetches += 1

    _actions = {
        Issue: _issue,
        Wait: _wait,
        Record: _record,
        Synchronise: _synchronise,
        Restart: _restart,
        Demand: _demand,
    }

    # Verification beside the forwards.

    @property
    def verification_error(self) -> VerificationError | None:
        """The first mismatch that is known by now, or None."""
        self._checks.poll()
        return self._verification_error

    def _count_forward(self) -> None:
        self._forwards += 1
        self._checks.poll()
        if self.checker is not None and self._verify_every and self._forwards % self._verify_every == 0:
            self._check_next = self._forwards // self._verify_every % self.num_layers

    def _verify(self, pos: int, sums: list[int]) -> None:
        """sums: of the layer's rows, made on the copy stream after the copy and before its ready event. Keeps the
        first mismatch."""
        try:
            self.checker.compare(pos, sums, at_rest=self.mover.at_rest)
            self.verified_forward = self._forwards
        except VerificationError as error:
            if self._verification_error is None:
                self._verification_error = error
            logger.error("%s", error)

    # The end: drain, then (all ranks) unmap_imports, then (all ranks) release_own.

    def _check_running(self) -> None:
        if self._stopped:
            raise DwdpError("expert DWDP was released: no layer can be read any more")

    def drain(self) -> None:
        """Stops issuing and waits until no copy runs. An error of a copy is logged: the memory goes all the
        same.
        """
        self._stopped = True
        error = self.device.drain()
        if error is not None:
            logger.error("a copy failed before the expert prefetch was released", exc_info=error)

    def unmap_imports(self) -> None:
        """Detaches the model's expert tensors to empty ones and gives the peers' memory back; idempotent."""
        modules, self._modules = self._modules, []
        for reference in modules:
            module = reference()
            if module is not None and module.dwdp is self:
                detach_module(module)
        if self.transport is not None:
            self.transport.unmap_imports()

    def release_own(self) -> None:
        """Releases prepared copies, own handles, composite ranges and the ring's pages; idempotent."""
        self.close_checks()
        self.mover.forget(self.plans)
        if self.transport is not None:
            self.transport.release_own()
        if self._ring is not None:
            self._ring.close()

    def close_checks(self) -> None:
        """Gives the sampled checks back; none may be in flight. Idempotent."""
        self._checks.close()

    def release(self) -> None:
        """All three steps without the other ranks; idempotent."""
        self.drain()
        self.unmap_imports()
        self.release_own()


def detach_module(module) -> None:
    """Leaves `module` empty [0, ...] tensors; nothing of it refers to mapped memory any more."""
    tables = {name: tensor.new_empty((0, *tensor.shape[1:])) for name, tensor in module.expert_tables().items()}
    small = {name: tensor.new_empty((0, *tensor.shape[1:])) for name, tensor in module.small_tensors().items()}
    module.dwdp = None
    module.rebind(tables, small)
