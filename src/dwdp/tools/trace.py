"""Timelines of real runs as files: in the neutral form for whoever judges them, and as Chrome traces to be looked at
in chrome://tracing or Perfetto.

    dwdp generate --model nano-k3 --ranks 2 --prompt 17+25= --trace timeline
    python -m dwdp.tools.races timeline/rank0.json
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_traces(folder: Path, traces: Iterable[Mapping[str, Any]]) -> None:
    """traces: of ranks, as `LLM.trace` gives them -> `rankK.json` as they are and `rankK.chrome.json` in the folder,
    which exists."""
    for trace in traces:
        name = f"rank{trace['rank']}"
        (folder / f"{name}.json").write_text(json.dumps(trace), encoding="utf-8")
        drawn = chrome_trace(trace["ops"], rank=trace["rank"])
        (folder / f"{name}.chrome.json").write_text(json.dumps(drawn), encoding="utf-8")


def chrome_trace(ops: Iterable[Mapping[str, Any]], *, rank: int = 0) -> dict[str, Any]:
    """ops: in the neutral form, with `t0` and `t1` in seconds; those without are left out. One row a stream. The reads
    of one stream in one window are one span, see [Note: reads in a trace] in device.py.

    Returns the JSON object of the Chrome trace format; times in it are microseconds from the first op.
    """
    timed = [op for op in ops if "t0" in op]
    origin = min((op["t0"] for op in timed), default=0.0)
    rows: dict[str, int] = {}
    events = []
    for op in _spans(timed):
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


def _spans(ops: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The ops, with the reads that a stream does of a slot between two copies into it as one, in the first's place."""
    found: list[Mapping[str, Any]] = []
    windows: dict[str, dict[str, dict[str, Any]]] = {}  # slot -> stream -> its read since the last copy
    for op in ops:
        if op["kind"] == "read":
            of_slot = windows.setdefault(op["slot"], {})
            if op["stream"] in of_slot:
                of_slot[op["stream"]]["t1"] = op["t1"]
                continue
            op = of_slot[op["stream"]] = dict(op)
        elif op["kind"] == "copy":
            windows.pop(op["slot"], None)
        found.append(op)
    return found


def _title(op: Mapping[str, Any]) -> str:
    words = [op["name"] if op["kind"] == "mark" else op["kind"]]
    if op["slot"] is not None:
        words.append(op["slot"])
    if op["layer"] is not None:
        words.append(f"layer {op['layer']}")
    return " ".join(words)
