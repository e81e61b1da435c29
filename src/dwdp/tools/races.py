"""Was every slot read behind its copy, and overwritten behind its reads? A judge of traces, with vector clocks.

    python -m dwdp.tools.races TRACE.json

A trace is {"ops": [{"stream", "kind", "slot", "layer", "event"}]} in host enqueue order, whoever wrote it; nothing
is known here about schedules. Kinds are copy and read (of a slot), record and wait (of an event), sync (the host
waits for every stream) and mark (ignored). Optional: a gather that is cut into several copies numbers them with
`part` out of `parts`; `epoch` on copies and reads tells versions of a layer's weights apart.

[Note: what orders two ops] A stream runs its ops one after the other. A wait puts what follows on its stream behind
the event's latest record so far in enqueue order; an event that was never recorded orders nothing. Whatever is
enqueued after a sync, or after an op of the stream "host", runs behind it. Nothing else orders anything: that an op
was enqueued earlier says nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

KINDS = ("copy", "read", "record", "wait", "sync", "mark")
HOST = "host"


@dataclass(frozen=True)
class Race:
    """Something that a run of the trace may get wrong.

    kind: `overwritten` (a copy that is not ordered after a read of its slot), `crossed` (a copy that is not ordered
    after a copy of something else into its slot), `unordered` (a read that is not ordered after a copy into its
    slot), `unfilled`, `wrong layer`, `stale` (another epoch), `incomplete` (parts are missing). op: index of the
    copy or read in the trace; other: index of the op that it meets, or None. text: all of it, to be read.
    """

    kind: str
    slot: str
    layer: int | None
    op: int
    other: int | None
    text: str

    def as_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


@dataclass
class _Slot:
    """What was enqueued for a slot so far. reads, copies: stream -> index of its last one; older ones of a stream
    are behind it in any case. copies, parts: of the content only, which a copy of something else replaces."""

    content: tuple | None = None  # layer and epoch
    num_parts: int = 1
    parts: set = field(default_factory=set)
    copies: dict[int, int] = field(default_factory=dict)
    reads: dict[int, int] = field(default_factory=dict)


def find_races(trace: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> list[Race]:
    """Every race of a trace, {"ops": [...]} or the list itself, in the order of the ops that show them.

    ValueError: an op that is not in the neutral form, by its index.
    """
    return _Checker(trace["ops"] if isinstance(trace, Mapping) else trace).run()


class _Checker:
    """clocks[s][t]: index of the last op of stream t that what is enqueued next on stream s runs behind."""

    def __init__(self, ops: Sequence[Mapping[str, Any]]) -> None:
        self.ops = ops
        names = {HOST: 0}
        for number, op in enumerate(ops):
            if op.get("kind") not in KINDS:
                raise ValueError(f"op {number} of the trace has no kind out of {', '.join(KINDS)}: {op}")
            if op["kind"] in ("mark", "sync"):
                continue
            if not isinstance(op.get("stream"), str):
                raise ValueError(f"op {number} of the trace has no stream: {op}")
            names.setdefault(op["stream"], len(names))
        self.streams = names
        self.clocks = [[-1] * len(names) for _ in names]
        self.events: dict[str, list[int]] = {}
        self.slots: dict[str, _Slot] = {}
        self.races: list[Race] = []

    def run(self) -> list[Race]:
        streams, clocks, events = self.streams, self.clocks, self.events
        for number, op in enumerate(self.ops):
            kind = op["kind"]
            if kind == "mark":
                continue
            if kind == "sync":
                everything = [max(column) for column in zip(*clocks)]
                for each in clocks:
                    each[:] = everything
                continue
            stream = streams[op["stream"]]
            clock = clocks[stream]
            if kind == "record":
                events[op["event"]] = clock.copy()
            elif kind == "wait":
                recorded = events.get(op["event"])
                if recorded is not None:
                    clock[:] = map(max, clock, recorded)
            elif op.get("slot") is not None:
                slot = self.slots.setdefault(op["slot"], _Slot())
                (self._copy if kind == "copy" else self._read)(number, op, stream, clock, slot)
            clock[stream] = number
            if stream == 0:
                for each in clocks:
                    each[:] = map(max, each, clock)
        return self.races

    def _copy(self, number: int, op: Mapping[str, Any], stream: int, clock: list[int], slot: _Slot) -> None:
        for other, read in slot.reads.items():
            if clock[other] < read:
                self._report("overwritten", number, read, "may run while the slot is still read")
        content = (op.get("layer"), op.get("epoch"))
        if content != slot.content:
            for other, copy in slot.copies.items():
                if clock[other] < copy:
                    self._report("crossed", number, copy, "is not ordered after a copy of something else")
            slot.content, slot.copies, slot.parts = content, {}, set()
        slot.num_parts = op.get("parts") or 1
        slot.parts.add(op.get("part"))
        slot.copies[stream] = number

    def _read(self, number: int, op: Mapping[str, Any], stream: int, clock: list[int], slot: _Slot) -> None:
        slot.reads[stream] = number
        if slot.content is None:
            self._report("unfilled", number, None, "reads what no copy has filled")
            return
        last = max(slot.copies.values())
        layer, epoch = slot.content
        if op.get("layer") not in (None, layer):
            self._report("wrong layer", number, last, f"finds layer {layer}")
        elif op.get("epoch") not in (None, epoch) and epoch is not None:
            self._report("stale", number, last, f"needs epoch {op['epoch']} and finds epoch {epoch}")
        elif len(slot.parts) < slot.num_parts:
            self._report("incomplete", number, last, f"finds {len(slot.parts)} parts of {slot.num_parts}")
        for other, copy in slot.copies.items():
            if clock[other] < copy:
                self._report("unordered", number, copy, "may run before the copy is done")

    def _report(self, kind: str, number: int, other: int | None, what: str) -> None:
        op = self.ops[number]
        text = f"op {number}, {_words(op)}, {what}"
        if other is not None:
            text += f": op {other}, {_words(self.ops[other])}"
        self.races.append(Race(kind, op["slot"], op.get("layer"), number, other, text))


def _words(op: Mapping[str, Any]) -> str:
    return f"{op['kind']} of layer {op.get('layer')} in {op.get('slot')} on {op['stream']}"


def main(arguments: list[str]) -> int:
    """Prints the races of a file; 1 when there are some, 2 when the file cannot be judged."""
    try:
        (path,) = arguments
        races = find_races(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        print(f"python -m dwdp.tools.races TRACE.json: {error}", file=sys.stderr)
        return 2
    for race in races:
        print(f"{race.kind}: {race.text}")
    if not races:
        print(f"{path}: no race")
    return 1 if races else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
