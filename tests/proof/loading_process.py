"""Memory while two rank threads load and set up, in a process of its own: `loading_process.py MODEL SMALL HOW`.

SMALL is a model that is set up first, so that what the process takes once is not counted. HOW is direct or copied.

Prints one JSON line, all in bytes and of both ranks together: `moving`, the peak until the first ring is allocated;
`peak`, the peak of all; `rest`, when both are set up; and the sums of the ledgers. Memory is what the kernel counts as
anonymous, beyond what the process had before, and the memfds that exist, whether their pages were touched or not.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from pathlib import Path

import torch

from dwdp.executor.create import build_rank
from dwdp.executor.settings import resolve
from dwdp.group.threads import run_rank_threads
from dwdp.memory.host import HostDomain
from dwdp.model.reader import _Run
from dwdp.runtime.manager import DwdpManager
from dwdp.weights.ring import PrefetchRing

RANKS = 2


def anonymous_bytes() -> int:
    text = Path("/proc/self/status").read_text()
    return int(re.search(r"^RssAnon:\s+(\d+) kB", text, re.M)[1]) * 1024


class Watch:
    """Looks wherever memory is taken: behind every tensor read and every new memfd."""

    def __init__(self) -> None:
        self.before = anonymous_bytes()
        self.domains: set[HostDomain] = set()
        self.moving = self.peak = 0
        self.ring_begun = False
        self._lock = threading.Lock()
        for owner, name in ((HostDomain, "create"), (_Run, "_complete")):
            setattr(owner, name, self._behind(getattr(owner, name)))
        allocate = PrefetchRing.allocate

        def allocating(ring):
            self.ring_begun = True
            allocate(ring)

        PrefetchRing.allocate = allocating

    def _behind(self, call):
        def wrapper(owner, *args, **options):
            if isinstance(owner, HostDomain):
                self.domains.add(owner)
            result = call(owner, *args, **options)
            self.look()
            return result

        return wrapper

    def look(self) -> int:
        with self._lock:
            held = anonymous_bytes() - self.before + sum(domain.allocated_bytes for domain in self.domains)
            self.peak = max(self.peak, held)
            if not self.ring_begun:
                self.moving = max(self.moving, held)
            return held


def set_up(model: str, look) -> list:
    """-> by rank: (look() when both ranks are set up, ledger)."""
    settings = resolve(model, ranks=RANKS, dtype="bfloat16", device="cpu", dwdp={"page_granules": 64}).settings
    together = threading.Barrier(RANKS)

    def run(group):
        with build_rank(settings, group, rank=group.rank) as rank:
            together.wait(60)
            rest = look()
            together.wait(60)
            return rest, rank.report()["ledger"]

    return run_rank_threads(RANKS, run, timeout=120)


def main(model: str, small: str, how: str) -> None:
    if how == "copied":
        DwdpManager.prepare = DwdpManager.check_model
    torch.set_num_threads(1)
    set_up(small, lambda: None)
    watch = Watch()
    found = set_up(model, watch.look)
    sums = {key: sum(ledger[key] for _, ledger in found) for key in ("stored_bytes", "ring_bytes", "replicated_bytes")}
    print(json.dumps({"moving": watch.moving, "peak": watch.peak, "rest": max(r for r, _ in found)} | sums))


if __name__ == "__main__":
    main(*sys.argv[1:])
