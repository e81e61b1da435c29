"""The order of the expert copies, as text: when E(l) is issued, waited for and read.

[Note: schedule] The managed layers form one circular sequence, the last layer of a forward followed by the
first layer of the next. Layer l uses slot l mod S. With L = 4 layers and S = 2 slots a forward reads

    start      E(0) E(1)
    bind(0)    compute waits for E(0)
    finish(0)  end of read, slot 0 is free      E(2)
    bind(1)    compute waits for E(1)
    finish(1)  end of read, slot 1 is free      E(3)
    bind(2)    compute waits for E(2)
    finish(2)  end of read, slot 0 is free      E(0) of the next forward
    bind(3)    compute waits for E(3)
    finish(3)  end of read, slot 1 is free      E(1) of the next forward

so a completed forward leaves the first min(S, L) layers of the next one issued, and its start has nothing to
do.

[Note: actions] Every method yields the actions to perform, in order. State changes only when the caller asks
for the next action, that is, after the last one was performed: a caller that raises while it performs an
action leaves the schedule as if the action had never been reached. A slot is never claimed by a copy that is
not whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Issue:
    """E(layer): the copy stream waits for the slot's end-of-read event, copies, records the ready event."""

    layer: int
    slot: int


@dataclass(frozen=True)
class Wait:
    """The compute stream waits for the slot's ready event; the read window opens."""

    layer: int
    slot: int


@dataclass(frozen=True)
class Record:
    """The slot's end-of-read event is recorded on the compute stream; the read window closes."""

    layer: int
    slot: int


@dataclass(frozen=True)
class Synchronise:
    """The host waits for the whole device: `layer` was bound and never finished."""

    layer: int


@dataclass(frozen=True)
class Restart:
    """The sequence begins anew at `layer`; to be counted and logged."""

    layer: int


@dataclass(frozen=True)
class Demand:
    """`layer` was reached although nothing had enqueued its copy; to be counted and logged."""

    layer: int


Action = Issue | Wait | Record | Synchronise | Restart | Demand


@dataclass
class _Slot:
    """What a slot holds: `layer` whole (None: nothing to trust), and who issued it."""

    layer: int | None = None
    read: bool = False  # the holder's finish was recorded
    by_start: bool = False

    @property
    def free(self) -> bool:
        return self.layer is None or self.read


class PrefetchSchedule:
    """Pure logic of the expert prefetch over `num_layers` layers and min(num_slots, num_layers) slots.

    The methods are generators of actions ([Note: actions]); run each to its end before the next call.
    """

    def __init__(self, num_layers: int, num_slots: int) -> None:
        if num_layers < 1 or num_slots < 1:
            raise ValueError(f"a schedule needs layers and slots, not {num_layers} layers, {num_slots} slots")
        self.num_layers = num_layers
        self.num_slots = min(num_slots, num_layers)
        self._slots = [_Slot() for _ in range(self.num_slots)]
        self._next_bind = 0
        self._next_issue = 0
        self._bound: int | None = None

    def slot(self, layer: int) -> int:
        """The slot of `layer`."""
        return layer % self.num_slots

    @property
    def bound(self) -> int | None:
        """The layer that is bound and not finished, or None."""
        return self._bound

    @property
    def in_flight(self) -> bool:
        """The next bind expected is the first layer and all first min(S, L) copies were issued whole."""
        return self._at_first_layer() and all(self._holds(layer) for layer in range(self.num_slots))

    @property
    def primed(self) -> bool:
        """`in_flight`, and the forward before issued these copies, not a start."""
        return self.in_flight and not any(slot.by_start for slot in self._slots)

    # The hooks.

    def start_forward(self) -> Iterator[Action]:
        """Before a forward: whatever of the first layers is missing, or a restart after an abort."""
        if self._at_first_layer():
            yield from self._fill(by_start=True)
        else:
            yield from self._restart(0, by_start=True)

    def bind(self, layer: int) -> Iterator[Action]:
        """Just before the routed experts of `layer` are read."""
        self._check(layer)
        if self._bound is not None or layer != self._next_bind or not self._holds(layer):
            yield Demand(layer)
            yield from self._restart(layer)
        yield Wait(layer, self.slot(layer))
        self._bound = layer

    def finish(self, layer: int) -> Iterator[Action]:
        """After every kernel of `layer`: closes its read window, then issues what has become possible."""
        self._check(layer)
        if self._bound != layer:
            bound = "none is" if self._bound is None else f"layer {self._bound} is"
            raise RuntimeError(f"finish of layer {layer} without its bind: {bound} bound")
        yield Record(layer, self.slot(layer))
        self._slots[self.slot(layer)].read = True
        self._bound = None
        self._next_bind = self._after(layer)
        yield from self._fill()

    def invalidate(self) -> None:
        """Drops every copy not yet read. A bound layer stays bound, so that the next start synchronises."""
        for slot in self._slots:
            if self._bound is None or slot.layer != self._bound:
                slot.layer = None
        self._next_issue = self._next_bind if self._bound is None else self._after(self._bound)

    # The steps.

    def _fill(self, by_start: bool = False) -> Iterator[Action]:
        """Each next layer of the circular sequence, in order, while its slot is free."""
        while self._slots[self.slot(self._next_issue)].free:
            layer = self._next_issue
            slot = self._slots[self.slot(layer)]
            slot.layer = None  # from the copy's first wait until its ready event the slot holds nothing
            yield Issue(layer, self.slot(layer))
            slot.layer, slot.read, slot.by_start = layer, False, by_start
            self._next_issue = self._after(layer)

    def _restart(self, layer: int, by_start: bool = False) -> Iterator[Action]:
        if self._bound is not None:
            # Kernels of the aborted layer may still read its slot; no end-of-read event tells when they end.
            yield Synchronise(self._bound)
            self._bound = None
        yield Restart(layer)
        for slot in self._slots:
            slot.layer = None
        self._next_bind = self._next_issue = layer
        yield from self._fill(by_start)

    def _at_first_layer(self) -> bool:
        return self._bound is None and self._next_bind == 0

    def _holds(self, layer: int) -> bool:
        slot = self._slots[self.slot(layer)]
        return slot.layer == layer and not slot.read

    def _after(self, layer: int) -> int:
        return (layer + 1) % self.num_layers

    def _check(self, layer: int) -> None:
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer {layer} is not one of the {self.num_layers} managed layers")
