"""What a probe's ranks write down, and what is known of each from that.

[Note: events] What a rank finds it appends to a file in the doctor's private folder, one JSON object a line. So
nothing is lost when it dies, and the file needs none of the facilities that are probed. The steps have the same
numbers on every rank, which tells who holds up the others: whoever is at the lowest step and does not wait.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any


class Events:
    """The file of one rank, see [Note: events]."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def __call__(self, **event: object) -> None:
        os.write(self._fd, json.dumps(event).encode() + b"\n")


@dataclass
class Record:
    """What is known of one rank's process; see [Note: events]. errors: why, by source."""

    rank: int
    pid: int | None = None
    socket_dir: str | None = None
    step: int = -1
    waiting: bool = False
    doing: str = "starting its process"
    done: bool = False
    passed: bool = False
    error: str | None = None
    kind: str | None = None
    bytes_ok: dict[int, bool] = field(default_factory=dict)
    wrong: dict[int, str] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    gb_per_s: dict[int, float] = field(default_factory=dict)
    many_to_one: dict[str, Any] | None = None
    read_only: dict[int, bool] = field(default_factory=dict)
    reaches: dict[int, bool | None] = field(default_factory=dict)
    pidfd: dict[int, str | None] = field(default_factory=dict)
    device: dict[str, Any] | None = None
    nbytes: int | None = None
    handle_types: dict[str, list[str]] = field(default_factory=dict)
    handle_type: str | None = None
    transfers: dict[str, str | None] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    offset: int = 0

    def read(self, path: str) -> bool:
        """Takes in what the rank has written since; -> whether there was anything."""
        try:
            with open(path, "rb") as file:
                file.seek(self.offset)
                text = file.read()
        except FileNotFoundError:
            return False
        end = text.rfind(b"\n") + 1  # the last line may still be on its way
        self.offset += end
        for line in text[:end].splitlines():
            self._take(json.loads(line))
        return end > 0

    def _take(self, event: dict[str, Any]) -> None:
        match event:
            case {"source": source, "bytes_ok": ok}:
                self.bytes_ok[source] = ok
                if event["read_only"] is not None:
                    self.read_only[source] = event["read_only"]
                for texts, key in ((self.wrong, "wrong"), (self.errors, "error")):
                    if event[key] is not None:
                        texts[source] = event[key]
            case {"source": source, "gb_per_s": rate}:
                self.gb_per_s[source] = round(rate, 3)
            case {"many_to_one": rate, "sources": sources}:
                self.many_to_one = {"target": self.rank, "sources": sources, "gb_per_s": round(rate, 3)}
            case {"pidfd": source, "error": error}:
                self.pidfd[source] = error
            case {"reaches": by_rank}:
                self.reaches = {int(rank): reached for rank, reached in by_rank.items()}
            case {"warning": text}:
                self.warnings.append(text)
            case _:
                for key, value in event.items():
                    setattr(self, key, value)
