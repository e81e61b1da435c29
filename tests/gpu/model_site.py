"""Where the whole model is checked: a GPU, or the host with fewer tokens and Triton's interpreter."""

from __future__ import annotations

import os
import re
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Site:
    """What was found and failed gathers here. folders: where checkpoints are written; data: GSM8K's test questions."""

    cpu: bool
    seconds: float
    folders: Path
    data: Path | None = None
    begun: float = field(default_factory=time.monotonic)
    rows: list[dict[str, Any]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def device(self) -> str:
        return "cpu" if self.cpu else "cuda"

    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.begun)

    def note(self, name: str, text: str, **numbers: Any) -> None:
        self._row("", name, text, numbers)

    def check(self, name: str, holds: bool, text: str, **numbers: Any) -> None:
        self._row("ok" if holds else "WRONG", name, text, numbers)
        if not holds:
            self.failed.append(f"{name}: {text}")

    def _row(self, verdict: str, name: str, text: str, numbers: dict[str, Any]) -> None:
        self.rows.append({"verdict": verdict, "name": name, "text": text, **numbers})
        print(f"[{self.seconds - self.left():6.1f} s] {verdict:5} {name}: {text}", flush=True)

    def case(self, name: str, needed: float, body: Callable[[Site], None]) -> None:
        """Runs one; one that no time is left for, or that raises, has failed."""
        if self.left() < needed and not self.cpu:
            self.check(name, False, f"not run: {self.left():.0f} s left, {needed:.0f} s needed")
            return
        try:
            body(self)
        except Exception as error:
            traceback.print_exc()
            text = str(error).strip()
            self.check(name, False, f"{type(error).__name__}: {text.splitlines()[-1][:300] if text else ''}")
        if not self.cpu:
            import torch

            torch.cuda.empty_cache()

    def folder(self, name: str) -> Path:
        return self.folders / re.sub(r"\W+", "-", name)

    def lengths(self) -> tuple[int, ...]:
        """Tokens of the sequences of a packed batch."""
        return (2, 2) if self.cpu else (130, 2, 65, 257, 17, 400, 64, 3, 512)

    @contextmanager
    def form(self, name: str) -> Iterator[None]:
        """DWDP_KERNELS for a block of code."""
        before = os.environ["DWDP_KERNELS"]
        os.environ["DWDP_KERNELS"] = name
        try:
            yield
        finally:
            os.environ["DWDP_KERNELS"] = before
