"""Scripts of a simulation: what happens to the forwards, one event a line.

`#` begins a comment. Layers are counted from 0, as in the trace.

    forward [without-start]       a forward; without-start: the executor did not announce it, as in a warm-up
    start                         a start whose forward never reaches the model
    abort before-H1 L             a forward that fails at the entry of layer L,
    abort before-H2 L               behind the kernels of its attention,
    abort after-bind L              behind the kernels of its routed experts, which were bound and are not finished,
    abort before-H3 L               behind all its kernels, auxiliary streams not joined,
    abort in-fill L [K]             or in place of the K-th op on the copy stream that its hooks enqueue (default: 2)
    abort in-H0 [K]               the same inside the priming of a forward that was not started
    abort in-start [K]            the same inside the executor's start
    invalidate                    the experts have new weights
    release                       DWDP is given back, with copies in flight; the last event

An abort may end with without-start too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dwdp.tools.copy_order import Setting

BETWEEN_HOOKS = ("before-H1", "before-H2", "after-bind", "before-H3")
INSIDE = ("in-fill", "in-H0", "in-start")


@dataclass(frozen=True)
class Abort:
    """Where a forward fails: between hooks of `layer`, or inside a hook in place of the op-th op on the copy stream."""

    point: str
    layer: int | None = None
    op: int = 2


@dataclass(frozen=True)
class Event:
    """A line of a script. name: forward, start, abort, invalidate or release."""

    name: str
    started: bool = True
    abort: Abort | None = None
    line: int = 0


def read_script(path: Path, setting: Setting) -> list[Event]:
    """The events of a file. ValueError names the file and the line that cannot be used."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--script {path} cannot be read: {error}") from None
    try:
        return parse_script(text, setting)
    except ValueError as error:
        raise ValueError(f"--script {path}: {error}") from None


def parse_script(text: str, setting: Setting) -> list[Event]:
    """The events of a script's text. ValueError names the line that cannot be used."""
    events: list[Event] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if events and events[-1].name == "release":
            raise ValueError(f"line {number}: nothing can follow a release, got {line.strip()!r}")
        try:
            events.append(_parse(words, setting, number))
        except ValueError as error:
            raise ValueError(f"line {number}: {line.strip()!r}: {error}") from None
    if not events:
        raise ValueError("the script holds no event")
    return events


def _parse(words: list[str], setting: Setting, line: int) -> Event:
    name, *rest = words
    started = rest[-1:] != ["without-start"]
    rest = rest if started else rest[:-1]
    if name == "abort":
        abort = _parse_abort(rest, setting)
        if abort.point == "in-start" and not started:
            raise ValueError("an abort in-start needs the start")
        return Event(name, started and abort.point != "in-H0", abort, line)
    if name not in ("forward", "start", "invalidate", "release"):
        raise ValueError("an event is forward, start, abort, invalidate or release")
    if rest or not (started or name == "forward"):
        raise ValueError(f"{name} does not take {' '.join(words[1:])!r}")
    if name == "invalidate" and not setting.experts:
        raise ValueError("there are no experts to invalidate in mode standalone")
    return Event(name, started, None, line)


def _parse_abort(words: list[str], setting: Setting) -> Abort:
    point, *numbers = words or [""]
    if point not in BETWEEN_HOOKS + INSIDE:
        raise ValueError(f"an abort is one of {', '.join(BETWEEN_HOOKS + INSIDE)}")
    if not all(number.isascii() and number.isdigit() for number in numbers):
        raise ValueError("layers and ops are whole numbers")
    if (point == "after-bind" and not setting.experts) or (point == "in-H0" and not setting.dense):
        raise ValueError(f"mode {setting.mode} has no point {point}")
    values = [int(number) for number in numbers]
    layer = None
    if point in BETWEEN_HOOKS or point == "in-fill":
        if not values or values[0] >= setting.layers:
            raise ValueError(f"{point} needs a layer from 0 to {setting.layers - 1}")
        layer = values.pop(0)
    if len(values) > (point in INSIDE) or 0 in values:
        raise ValueError("only a point inside a hook takes another number, of an op from 1 on")
    return Abort(point, layer, *values)
