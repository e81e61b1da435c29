"""Faults that the race checker and the copy order must find, each a change of one class of a simulation.

They tell whether a proof can fail. Where a mutation shows, and where it is masked:

- Attached, a fill that is left out at H2 is made up for at H3, and experts that start before the dense weights are
  still awaited: only the copy order shows them. Standalone the missing fill becomes a demand fetch.
- With both segments and at most two layers nothing is filled at H2, and the end of D's read window stands in for A's.
- A fault of D's end of read shows only where the next forward takes over a slot that its last layers hold: both
  segments, and a number of layers that is no multiple of 3. The slot of A covers it everywhere else.
- Attached with more than two expert slots E(l) is enqueued before L(l) within a forward, so that the wait for L(l)
  covers E(l); a missing wait for experts shows at starts and boundaries only, and all over with experts alone.
- A slot that is claimed too early, and what a barrier forgets, need a forward that fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dwdp.runtime.dense import DenseRuntime
from dwdp.runtime.dense_schedule import DenseSchedule, Gather
from dwdp.runtime.experts import ExpertRuntime
from dwdp.runtime.manager import DenseDwdpManager
from dwdp.tools.copy_order import ATTACHED, EXPERTS, STANDALONE, Setting, forward_order
from dwdp.tools.simulate import Parts, SimulatedManager, TracingDevice

CLEAN = "forward\n" * 3


@dataclass(frozen=True)
class Mutation:
    """text: what is changed. parts: the changed classes. modes: where it changes anything. script: of a setting, the
    events that bring it out."""

    name: str
    text: str
    parts: Parts
    modes: tuple[str, ...]
    script: Callable[[Setting], str] = lambda setting: CLEAN

    def as_dict(self) -> dict[str, Any]:
        """What a list of mutations says."""
        return {"name": self.name, "text": self.text, "modes": list(self.modes)}


# ---- the schedule ----


class NoFillAtH2(DenseSchedule):
    def h2(self, pos):
        for action in super().h2(pos):
            if isinstance(action, Gather):
                return
            yield action


class ExpertsFirst(SimulatedManager):
    def start_forward(self):
        if self.experts is not None and not self.dense.runtime.needs_recovery:
            self.device.mark("start")
            self.experts.start_forward()
        super().start_forward()


class ExpertsFirstInH0(DenseDwdpManager):
    def h0(self):
        self.experts.start_forward()
        super().h0()


class ClaimEarlyDense(DenseRuntime):
    def _run(self, actions):
        super()._run(list(actions))  # the schedule moves on before anything is enqueued


class ClaimEarlyExperts(ExpertRuntime):
    def _perform(self, actions):
        super()._perform(list(actions))


# ---- the events; an end of read is the record on compute that names a slot ----


class EndOfReadMissing(TracingDevice):
    """Drops the end of read of a segment's slots; others below record it elsewhere."""

    segment = ""

    def __init__(self, num_aux):
        super().__init__(num_aux)
        self.ends = {}  # slot -> the event that its next copy waits for

    def end_of_read(self, slot, layer):
        pass

    def window_opens(self, slot, layer):
        pass

    def record(self, event, stream, *, slot=None, layer=None):
        if stream is self.compute and slot is not None and slot[0] == self.segment:
            self.end_of_read(slot, layer)
        else:
            super().record(event, stream, slot=slot, layer=layer)

    def wait(self, stream, event, *, slot=None, layer=None):
        super().wait(stream, event, slot=slot, layer=layer)
        if slot is not None and slot[0] == self.segment:
            if stream is self.copy:
                self.ends[slot] = event
            else:
                self.window_opens(slot, layer)

    def record_end(self, slot, layer):
        super().record(self.ends[slot], self.compute, slot=slot, layer=layer)


class WrongSlot(EndOfReadMissing):
    def end_of_read(self, slot, layer):
        slots = sorted(self.ends)
        following = slots[(slots.index(slot) + 1) % len(slots)]
        if following != slot:
            self.record_end(following, layer)


class BeforeKernel(EndOfReadMissing):
    def window_opens(self, slot, layer):
        self.record_end(slot, layer)


class NoReadyWait(TracingDevice):
    segment = ""  # or several

    def wait(self, stream, event, *, slot=None, layer=None):
        if stream is not self.compute or slot is None or slot[0] not in self.segment:
            super().wait(stream, event, slot=slot, layer=layer)


class ReadyBeforeCopy(TracingDevice):
    """The ready event is recorded where the copy should be, and the copy follows it."""

    def __init__(self, num_aux):
        super().__init__(num_aux)
        self.held = []

    def enqueue(self, stream, fn, *, kind="copy", slot=None, layer=None, nbytes=0):
        if kind == "copy":
            self.held.append((slot, layer))
        else:
            super().enqueue(stream, fn, kind=kind, slot=slot, layer=layer, nbytes=nbytes)

    def record(self, event, stream, *, slot=None, layer=None):
        super().record(event, stream, slot=slot, layer=layer)
        if stream is self.copy and (slot, layer) in self.held:
            self.held.remove((slot, layer))
            super().enqueue(stream, None, slot=slot, layer=layer)


class BarrierForgets(TracingDevice):
    """A barrier or fence records an event on a reader and lets the copy stream wait for it at once."""

    def forgets(self, stream):
        raise NotImplementedError

    def __init__(self, num_aux):
        super().__init__(num_aux)
        self.forgotten = set()

    def record(self, event, stream, *, slot=None, layer=None):
        self.forgotten.add(event) if self.forgets(stream) else self.forgotten.discard(event)
        super().record(event, stream, slot=slot, layer=layer)

    def wait(self, stream, event, *, slot=None, layer=None):
        if stream is not self.copy or slot is not None or event not in self.forgotten:
            super().wait(stream, event, slot=slot, layer=layer)


class BarrierForgetsAuxiliary(BarrierForgets):
    def forgets(self, stream):
        return stream in self.auxiliary


class BarrierForgetsCompute(BarrierForgets):
    def forgets(self, stream):
        return stream is self.compute


def _of(kind: type[TracingDevice], segment: str) -> Parts:
    return Parts(device=type(f"{kind.__name__}{segment}", (kind,), {"segment": segment}))


def _failed_fills(setting: Setting) -> str:
    """Forwards that fail inside a start and inside the last fills, behind which claims are believed."""
    script = "abort in-start 2\nforward\n"
    filling = {int(hook[:-1].partition("(")[2]) for hook in forward_order(setting)}
    for layer in sorted(filling)[-2:]:
        script += f"abort in-fill {layer} 2\nforward\n"
    return script + ("invalidate\nabort in-start 2\nforward\n" if setting.experts else "") + CLEAN


def _aborts(setting: Setting) -> str:
    """Forwards that fail with reads enqueued that nothing has recorded an end of."""
    layers = sorted({0, setting.layers // 2, setting.layers - 1})
    points = ("before-H2", "before-H3")
    return "".join(f"{CLEAN}abort {point} {layer}\nforward\n" for layer in layers for point in points)


def _all() -> list[Mutation]:
    dense, experts = (ATTACHED, STANDALONE), (ATTACHED, EXPERTS)
    words = {"A": "attention", "D": "MoE-dense", "E": "expert"}
    found = [
        Mutation("no-fill-at-h2", "H2 closes its window and enqueues nothing", Parts(schedule=NoFillAtH2), dense),
        Mutation("experts-before-dense", "the expert prefetch starts before the dense priming",
                 Parts(manager=ExpertsFirst, dense_manager=ExpertsFirstInH0), (ATTACHED,)),
    ]  # fmt: skip
    for segment, word in words.items():
        modes, suffix = experts if segment == "E" else dense, segment.lower()
        for name, text, kind in (
            ("wrong-slot", f"the end of read of {word} slots is recorded for the next slot", WrongSlot),
            ("before-kernel", f"the end of read of {word} slots is recorded when the window opens", BeforeKernel),
            ("missing", f"the end of read of {word} slots is not recorded", EndOfReadMissing),
        ):
            found.append(Mutation(f"end-of-read-{name}-{suffix}", text, _of(kind, segment), modes))
    found += [
        Mutation("no-ready-wait-dense", "compute does not wait for dense copies", _of(NoReadyWait, "AD"), dense),
        Mutation("no-ready-wait-e", "compute does not wait for expert copies", _of(NoReadyWait, "E"), experts),
        Mutation("ready-before-copy", "ready events are recorded before the copies", Parts(device=ReadyBeforeCopy),
                 (ATTACHED, STANDALONE, EXPERTS)),
        Mutation("claimed-early-dense", "dense slots hold a layer before its copy is whole",
                 Parts(dense=ClaimEarlyDense), dense, _failed_fills),
        Mutation("claimed-early-e", "expert slots hold a layer before its copy is whole",
                 Parts(experts=ClaimEarlyExperts), experts, _failed_fills),
        Mutation("barrier-forgets-auxiliary", "barriers leave the auxiliary streams out",
                 Parts(device=BarrierForgetsAuxiliary), dense, _aborts),
        Mutation("barrier-forgets-compute", "barriers leave the compute stream out",
                 Parts(device=BarrierForgetsCompute), dense, _aborts),
    ]  # fmt: skip
    return found


MUTATIONS = {mutation.name: mutation for mutation in _all()}


def find_mutation(name: str, setting: Setting) -> Mutation:
    """The mutation of that name. ValueError where there is none, or where it changes nothing in the setting's mode."""
    found = MUTATIONS.get(name)
    if found is None:
        raise ValueError(f"--mutate {name!r} is none of {', '.join(MUTATIONS)}")
    if setting.mode not in found.modes:
        raise ValueError(f"--mutate {name} changes nothing with --mode {setting.mode}, only {' or '.join(found.modes)}")
    return found
