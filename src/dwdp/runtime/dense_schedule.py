"""When dense weights move: the copy order L(l) of each hook, pure logic without a device.

[Note: an action is done before it counts]
Every method is a generator of actions. The caller runs an action and only then asks for the next one, so the
lines behind a `yield` run only after the action was enqueued whole. A caller that fails drops the generator:
a slot whose copy was not enqueued whole holds nothing, and the sequence has not advanced. An abort inside a
fill, inside H0's priming or inside a start therefore leaves nothing half claimed.

Layers are counted by `pos`, 0 to L - 1, over covered layers only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SLOT_COUNTS = {"A": 2, "D": 3}  # staging slots of a segment: A attention, D the MoE block's dense weights
LAYERS_AHEAD = 2  # a layer is gathered at most this many layers before it is read

EMPTY, FULL, OPEN, CLOSED = "empty", "full", "open", "closed"


def slot_name(segment: str, pos: int) -> str:
    """The slot that layer `pos` uses for a segment, such as "A1" or "D2"."""
    return f"{segment}{pos % SLOT_COUNTS[segment]}"


@dataclass(frozen=True)
class Gather:
    """L(pos): the copy stream waits for each slot's end of read, copies all rows, records each slot ready."""

    pos: int
    slots: tuple[str, ...]


@dataclass(frozen=True)
class WaitReady:
    """Compute waits for the copies that filled the slots."""

    pos: int
    slots: tuple[str, ...]


@dataclass(frozen=True)
class EndRead:
    """Compute records the end of the slot's read window."""

    pos: int
    slot: str


@dataclass(frozen=True)
class Demand:
    """Layer pos was reached although nothing had enqueued its copy: counted, an error with STRICT."""

    pos: int


@dataclass(frozen=True)
class Fence:
    """The copy stream waits for all work now on every stream that may read a slot: counted."""

    pos: int


@dataclass(frozen=True)
class Barrier:
    """As Fence, once in H0 after an aborted forward: counted apart."""


Action = Gather | WaitReady | EndRead | Demand | Fence | Barrier


@dataclass
class _Slot:
    holder: int | None = None
    state: str = EMPTY

    @property
    def free(self) -> bool:
        return self.state in (EMPTY, CLOSED)


class DenseSchedule:
    """The dense copy schedule of one rank.

    segments: for each covered layer its segments, "A", "D" or "AD". prefetch_next_pass: attached mode, where
    fills go on into the first layers of the next forward; without it (standalone) every forward primes anew.
    """

    def __init__(self, segments: Sequence[str], *, prefetch_next_pass: bool) -> None:
        if not segments or any(set(s) - set(SLOT_COUNTS) or not s for s in segments):
            raise ValueError(f"every covered layer needs segments out of A and D, got {list(segments)}")
        self.segments = tuple(segments)
        self.num_layers = len(self.segments)
        self._names = [
            tuple(slot_name(segment, pos) for segment in "AD" if segment in segments)
            for pos, segments in enumerate(self.segments)
        ]
        self.depth = min(LAYERS_AHEAD, self.num_layers)
        self.prefetch_next_pass = prefetch_next_pass
        self.slots = {f"{s}{i}": _Slot() for s in SLOT_COUNTS for i in range(SLOT_COUNTS[s])}
        self.expected = 0  # layer of the next H1; num_layers stands for the first one of the next forward
        self.ahead = 0  # layers enqueued and not yet reached: expected, expected + 1, ...
        self.open = False  # a forward is open from H0 to the last layer's H3
        self._started = False  # a start or H0 issued copies of this forward, not the forward before

    # ---- the hooks: their lines are the copy order ----

    def start_forward(self) -> Iterator[Action]:
        """The executor's start: L(first), L(second) unless enqueued; an aborted forward is left to H0."""
        if not self.needs_recovery:
            yield from self._prime()

    def h0(self) -> Iterator[Action]:
        """Model forward entry: the barrier if one is due, then L(first), L(second) unless enqueued."""
        aborted = self.needs_recovery
        self.open = True
        if aborted:
            yield Barrier()
            self._forget_all()  # no slot is trusted after an abort, intact or not
            self.expected = 0
        yield from self._prime()

    def h1(self, pos: int) -> Iterator[Action]:
        """Decoder layer entry: compute waits for the layer's slots; the expected layer advances here."""
        if pos != self.expected % self.num_layers or not self._holds(pos):
            yield from self._demand(pos)
        self.expected, self.ahead = pos + 1, self.ahead - 1
        for name in self.slots_of(pos):
            self.slots[name].state = OPEN  # before the wait, so that a wait that fails leaves the window open
        yield WaitReady(pos, self.slots_of(pos))

    def h2(self, pos: int) -> Iterator[Action]:
        """After the attention call: A(pos) is read no more, then the fill, L(pos + 2) within a forward."""
        yield from self._close("A", pos)
        yield from self._fill()

    def h3(self, pos: int) -> Iterator[Action]:
        """After the MoE block, auxiliary streams joined: D(pos) is read no more, then the fill."""
        yield from self._close("D", pos)
        if pos == self.num_layers - 1:
            self.open = self._started = False
        if self.prefetch_next_pass:
            yield from self._fill()

    # ---- what they are made of ----

    def _fill(self) -> Iterator[Action]:
        """Enqueue, in layer order, each next layer whose slots are free."""
        while self.ahead < self.depth:
            following = self.expected + self.ahead
            if following >= self.num_layers and not self.prefetch_next_pass:
                return
            following %= self.num_layers
            if not all(self.slots[name].free for name in self.slots_of(following)):
                return
            yield from self._gather(following)

    def _prime(self) -> Iterator[Action]:
        while self.ahead < self.depth:
            self._started = True
            yield from self._gather(self.ahead)

    def _demand(self, pos: int) -> Iterator[Action]:
        yield Demand(pos)
        if self._any_window_open():
            yield Fence(pos)
        self._forget_all()
        self.expected = pos
        yield from self._gather(pos)

    def _gather(self, pos: int) -> Iterator[Action]:
        names = self.slots_of(pos)
        if any(self.slots[name].state == OPEN for name in names):
            yield Fence(pos)  # no hook asks for this; without it a wrong caller would overwrite what is read
        for name in names:
            self.slots[name] = _Slot()  # from the copy's first wait on it holds nothing, until it is whole
        yield Gather(pos, names)
        for name in names:
            self.slots[name] = _Slot(pos, FULL)
        self.ahead += 1

    def _close(self, segment: str, pos: int) -> Iterator[Action]:
        name = slot_name(segment, pos)
        slot = self.slots[name]
        if segment in self.segments[pos] and slot.holder == pos and slot.state == OPEN:
            yield EndRead(pos, name)
            slot.state = CLOSED

    def slots_of(self, pos: int) -> tuple[str, ...]:
        """Slots of layer pos, attention first."""
        return self._names[pos]

    @property
    def needs_recovery(self) -> bool:
        """Whether an aborted forward left something behind that only H0 may clean up."""
        return self.open or self.expected % self.num_layers != 0 or self._any_window_open()

    @property
    def primed(self) -> bool:
        """Whether the forward before enqueued all first layers; to be read before the start."""
        return not self.needs_recovery and self.ahead == self.depth and not self._started

    def _holds(self, pos: int) -> bool:
        slots = (self.slots[name] for name in self.slots_of(pos))
        return all(slot.holder == pos and slot.state == FULL for slot in slots)

    def _any_window_open(self) -> bool:
        return any(slot.state == OPEN for slot in self.slots.values())

    def _forget_all(self) -> None:
        self.slots = {name: _Slot() for name in self.slots}
        self.ahead = 0
