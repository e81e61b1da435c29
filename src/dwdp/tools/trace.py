"""A device's trace as a Chrome trace, to be looked at in chrome://tracing or Perfetto."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def chrome_trace(ops: Iterable[Mapping[str, Any]], *, rank: int = 0) -> dict[str, Any]:
    """ops: in the neutral form, with `t0` and `t1` in seconds; those without are left out. One row a stream.

    Returns the JSON object of the Chrome trace format; times in it are microseconds from the first op.
    """
    timed = [op for op in ops if "t0" in op]
    origin = min((op["t0"] for op in timed), default=0.0)
    rows: dict[str, int] = {}
    events = []
    for op in timed:
        row = rows.setdefault(op["stream"], len(rows))
        event = {"name": _title(op), "cat": op["kind"], "pid": rank, "tid": row, "ts": (op["t0"] - origin) * 1e6}
        if op["kind"] in ("mark", "record"):
            event |= {"ph": "i", "s": "t"}
        else:
            event |= {"ph": "X", "dur": (op["t1"] - op["t0"]) * 1e6}
        args = {key: op[key] for key in ("slot", "layer", "event", "nbytes") if op.get(key) is not None}
        events.append(event | {"args": args})
    names = [
        {"name": "thread_name", "ph": "M", "pid": rank, "tid": row, "args": {"name": stream}}
        for stream, row in rows.items()
    ]
    process = {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
    return {"traceEvents": [process, *names, *events], "displayTimeUnit": "ms"}


def _title(op: Mapping[str, Any]) -> str:
    words = [op["name"] if op["kind"] == "mark" else op["kind"]]
    if op["slot"] is not None:
        words.append(op["slot"])
    if op["layer"] is not None:
        words.append(f"layer {op['layer']}")
    return " ".join(words)
