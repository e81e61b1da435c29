"""One of three independent ranks that outlive a killed one: `survivor_process.py RANK PORT MODEL`.

The store is the test's, at PORT. JSON lines on stdout: {"first": sha256, "pid": ...} once the prompt was computed;
a line on stdin then starts the 100 forwards; {"forward": i} while they run, and the outcome.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time

import torch

from dwdp.executor.create import build_rank
from dwdp.executor.settings import resolve
from dwdp.group.backends import StoreGroup, connect_store
from dwdp.model.loader import load_model
from dwdp.runtime.manager import DwdpManager

RANKS, FORWARDS, TIMEOUT_SECONDS = 3, 100, 20.0


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def refusal(action) -> dict[str, object]:
    """How `action` was refused, and after how many seconds."""
    start = time.monotonic()
    try:
        action()
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - start}
    return {"error": None, "text": "", "seconds": time.monotonic() - start}


def main(rank: int, port: int, model: str, prompt: list[int]) -> None:
    dwdp = {"host_granule_bytes": 4096, "page_granules": 2}
    launch = resolve(
        model, ranks=RANKS, dtype="float32", device="cpu", dwdp=dwdp, dense_dwdp={"enabled": True, "min_bytes": 1}
    )
    store = connect_store(port, timeout_seconds=TIMEOUT_SECONDS)
    group = StoreGroup(store, rank, RANKS, timeout_seconds=TIMEOUT_SECONDS)
    executor = build_rank(launch.settings, group, rank=rank)
    first = executor.logits(prompt)
    say(first=hashlib.sha256(first.numpy().tobytes()).hexdigest(), rank=rank)
    sys.stdin.readline()  # rank 1 is killed while it computes below, the others are told afterwards
    different = 0
    for index in range(FORWARDS):
        different += not torch.equal(executor.logits(prompt), first)
        say(forward=index)
    counters = executor.report()["counters"]
    sys.stdin.readline()
    manager = executor.manager
    dead = manager.status()["dead_ranks"]
    committed = manager.setup(executor.model) is manager.report  # the same report again, no collective

    def set_up_again() -> None:
        # a newly loaded model and a new manager over the same group
        config = manager.config
        fresh = load_model(model, dtype=torch.float32, expert_range=manager.partition.ranges[rank], device="cpu")
        parts = {"group": group, "domain": executor.domain, "device": executor.device}
        DwdpManager(config, None, num_experts=manager.partition.num_experts, **parts).setup(fresh)

    def join_again() -> None:
        with StoreGroup(store, rank, RANKS, timeout_seconds=1.5, name="dwdp-again") as again:
            again.join({})

    refused = {"setup": refusal(set_up_again), "barrier": refusal(lambda: group.barrier("needs everybody"))}
    refused["join"] = refusal(join_again)
    domain = executor.domain
    start = time.monotonic()
    executor.release()
    say(
        rank=rank, different=different, forwards=FORWARDS, dead=dead, committed=committed, refused=refused,
        release_seconds=time.monotonic() - start, live=domain.live(), counters=counters,
    )  # fmt: skip


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
