"""Ranks under mpirun, for tests: `mpi_process.py MODE`. Each writes one JSON line a scenario to stdout.

Modes: `protocol` (every scenario below, one after the other, on 4 ranks), `death` (the last of 3 ranks kills
itself once all have joined), `unjoined` (before it joins), `early` (rank 1 of 2 ends before MPI_Init), `alone` (a
process that no launcher started).
"""

import json
import os
import secrets
import signal
import sys
import threading
import time

from dwdp.errors import DwdpError
from dwdp.group.fds import close_fds
from dwdp.group.mpi import DENSE_GROUP_TAG, MpiGroup, world_group
from dwdp.group.mpi_world import mpi_world
from dwdp.group.ranks import Host


def say(rank: int, **what: object) -> None:
    os.write(1, (json.dumps({"rank": rank, **what}) + "\n").encode())


def outcome(call, *args, **kwargs) -> dict:
    """What a call raises and how long it takes."""
    start, error = time.monotonic(), None
    try:
        call(*args, **kwargs)
    except BaseException as failure:
        error = failure
    seconds = time.monotonic() - start
    return {"error": type(error).__name__, "text": str(error), "seconds": seconds}


def gathers(rank: int, world) -> dict:
    with MpiGroup(timeout_seconds=20) as group:
        reports = group.join({"config": "same", "device_uuid": f"GPU-{rank}"})
        raw = group.allgather("raw", bytes([rank]) * rank)
        objects = group.allgather_object("objects", {"rank": rank, "list": [1, None, "x"]})
        mine = secrets.token_bytes(3_000_000)
        digests = group.allgather_object("digests", [hash(mine[:100]) % 1000, len(mine)])
        large = group.allgather("large", mine)
        group.mark_setup_done()
        group.barrier("teardown", skip_dead=True)
    return {
        "ranks": [report["rank"] for report in reports],
        "raw": [payload.hex() for payload in raw],
        "objects": objects,
        "large": [len(payload) for payload in large],
        "same": large[rank] == mine and len(digests) == 4,
        "again": outcome(group.barrier, "after close"),
    }


def votes(rank: int, world) -> dict:
    with MpiGroup(timeout_seconds=20) as group:
        found = outcome(group.vote, "create", {1: MemoryError("no page 7"), 3: KeyboardInterrupt()}.get(rank))
        group.vote("the next phase", None)
        return found | {"data": group.vote_with("data", None, {"from": rank})}


def tags(rank: int, world) -> dict:
    group = MpiGroup(timeout_seconds=20)
    group.barrier("same")
    found = outcome(group.barrier, "left" if rank == 1 else "right")
    group.close()
    return found


def skipped(rank: int, world) -> dict:
    group = MpiGroup(timeout_seconds=20)
    group.barrier("same")
    found = outcome(lambda: [group.barrier(tag) for tag in ("first", "second") if rank != 1 or tag == "second"])
    group.close()
    return found


def differ(rank: int, world) -> dict:
    group = MpiGroup(timeout_seconds=20)
    found = outcome(group.join, {"config": "abd" if rank == 2 else "abc"})
    group.close()
    return found


def deadline(rank: int, world) -> dict:
    group = MpiGroup(timeout_seconds=20)
    group.barrier("same")
    time.sleep(0.7 if rank in (1, 3) else 0)
    found = outcome(group.barrier, "load", timeout_seconds=0.4)
    group.close()
    return found


def late(rank: int, world) -> dict:
    """Rank 2 comes after the others have given up; then all make the group after all."""
    time.sleep(0.8 if rank == 2 else 0)
    group = MpiGroup(timeout_seconds=0.5)
    found = outcome(group.join, {})
    group.close()
    world.Barrier()
    with MpiGroup(timeout_seconds=20) as group:
        group.join({})
    return found


def dense(rank: int, world) -> dict:
    """Rank 3 makes the group of a dense manager, the others another: they never pair. The last scenario, because
    the ranks have made different numbers of attempts afterwards."""
    group = MpiGroup(timeout_seconds=0.5, **({"tag": DENSE_GROUP_TAG} if rank == 3 else {}))
    found = outcome(group.join, {})
    group.close()
    return found


def names(rank: int, world) -> dict:
    group = MpiGroup(timeout_seconds=20, name="other" if rank == 3 else "dwdp")
    found = outcome(group.join, {})
    group.close()
    return found


def aborts(rank: int, world) -> dict:
    group = MpiGroup(timeout_seconds=20)
    group.barrier("same")
    if rank == 2:
        time.sleep(0.3)
        thread = threading.Thread(target=group.abort, args=("disk full",))  # as a watchdog would
        thread.start()
        thread.join()
        group.abort("a later reason does not replace the first")
    found = outcome(group.barrier, "b") | {"again": outcome(group.barrier, "c")["text"]}
    group.close()
    return found


def refuses(rank: int, world) -> dict:
    """Rank 1 gives up before it has come to any collective."""
    group = MpiGroup(timeout_seconds=20)
    if rank == 1:
        group.abort("ConfigError: ranks must be 4")
    found = outcome(group.join, {})
    group.close()
    return found


def descriptors(rank: int, world) -> dict:
    before = len(os.listdir("/proc/self/fd"))
    with MpiGroup(timeout_seconds=20) as group:
        group.join({})
        own = [os.memfd_create(f"dwdp-test-{rank}") for _ in range(rank + 1)]
        for number, fd in enumerate(own):
            os.pwrite(fd, b"%d:%d" % (rank, number), 0)
        entries = group.exchange_fds("handles", own, b"from %d" % rank)
        seen = [[os.pread(fd, 10, 0).decode() for fd in fds] for _, fds in entries]
        close_fds([fd for _, fds in entries for fd in fds])
        given = [*own, 99999] if rank == 1 else own
        failed = outcome(group.exchange_fds, "bad handles", given, b"")
        close_fds(own)
        group.barrier("end")
    return {
        "payloads": [p.decode() for p, _ in entries],
        "seen": seen,
        "failed": failed,
        "leaked": len(os.listdir("/proc/self/fd")) - before,
    }


def leaves(rank: int, world) -> dict:
    """A clean close is no death."""
    group, deaths = MpiGroup(timeout_seconds=20), []
    group.join({})
    group.on_peer_death(deaths.append)
    group.mark_setup_done()
    if rank == 1:
        group.close()
        return {"error": "NoneType", "text": "", "seconds": 0}
    found = outcome(group.barrier, "needs all")
    group.barrier("the others", skip_dead=True)
    group.close()
    return found | {"deaths": deaths}


def two_groups(rank: int, world) -> dict:
    """Ranks 2 and 3 are late with their group; 0 and 1 do not wait for them."""
    time.sleep(1.0 if rank >= 2 else 0)
    start = time.monotonic()
    ranks = [0, 1] if rank < 2 else [3, 2]
    with MpiGroup(ranks=ranks, timeout_seconds=20) as group:
        group.join({})
        for number in range(3 if rank < 2 else 1):
            group.barrier(f"n{number}")
        group.mark_setup_done()
        seconds = time.monotonic() - start
        with MpiGroup(name="all", timeout_seconds=20) as everybody:
            everybody.join({})
            got = everybody.allgather("all", bytes([rank]))
    return {"seconds": seconds, "place": [group.rank, group.size], "all": b"".join(got).hex()}


def hosts(rank: int, world) -> dict:
    """Two fake hosts: join, vote, no descriptors; then with another token on rank 2."""
    host = Host(f"boot-{rank // 2}", f"node-{rank // 2}")
    with MpiGroup(timeout_seconds=20, host=host, token="secret") as group:
        names = [report["host"] for report in group.join({})]
        group.vote("fine", None)
        found = outcome(group.exchange_fds, "handles", [], b"")
        got = group.allgather("opaque", bytes([rank]) * 64)
        group.barrier("end")
    world.Barrier()
    other = MpiGroup(timeout_seconds=20, host=host, token="other" if rank == 2 else "secret")
    wrong = outcome(other.join, {})
    other.close()
    return {"names": names, "fds": found["text"], "got": [len(one) for one in got], "wrong": wrong["text"]}


SCENARIOS = [
    gathers, votes, tags, skipped, differ, deadline, late, names, aborts, refuses, descriptors, leaves, two_groups,
    hosts, dense,
]  # fmt: skip


def death(rank: int) -> None:
    group = MpiGroup(timeout_seconds=20)
    group.join({"config": "same"})
    group.mark_setup_done()
    if rank == group.size - 1:
        time.sleep(0.3)
        say(rank, killed=time.time())
        os.kill(os.getpid(), signal.SIGKILL)
    found = outcome(group.barrier, "needs everybody")
    at = time.time()
    group.barrier("the living", skip_dead=True)
    group.close()
    say(rank, **found, at=at, dead=sorted(group.dead))


def unjoined(rank: int) -> None:
    """The last rank dies between its announcement and the join."""
    group = MpiGroup(timeout_seconds=20)
    group.announce()
    if rank == group.size - 1:
        time.sleep(0.3)
        say(rank, killed=time.time())
        os.kill(os.getpid(), signal.SIGKILL)
    found = outcome(group.join, {})
    at = time.time()
    group.close()
    say(rank, **found, at=at, dead=sorted(group.dead))


def main(mode: str) -> None:
    if mode == "early":
        if os.environ["PMI_RANK"] == "1":
            os._exit(3)
        say(0, **outcome(MpiGroup, timeout_seconds=1.0))
        return
    if mode == "alone":
        say(0, **outcome(world_group, 1, 4, timeout_seconds=10))
        return
    world = mpi_world(30).MPI.COMM_WORLD
    rank = world.Get_rank()
    if mode in ("death", "unjoined"):
        {"death": death, "unjoined": unjoined}[mode](rank)
        return
    for scenario in SCENARIOS:
        world.Barrier()
        say(rank, scenario=scenario.__name__, **scenario(rank, world))
    world.Barrier()
    say(rank, scenario="leaks", threads=threading.active_count(), sends=len(mpi_world()._unfinished))


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except DwdpError as error:
        sys.exit(f"{type(error).__name__}: {error}")
