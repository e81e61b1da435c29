"""Forks ranks that set DWDP up, of which one kills or stops itself on the way: `killed_setup_process.py MODEL`.

Reads one JSON line a wave from stdin, a list of `Case`s that run side by side, and writes one JSON line a wave to
stdout: of each case what every rank came to. Everything is imported once, before the first fork.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import tempfile
import threading
import time
from types import SimpleNamespace

import msgspec
import torch

from dwdp.device import host  # noqa: F401  (this and others are imported here, and not by every rank)
from dwdp.executor.create import build_rank
from dwdp.executor.settings import resolve
from dwdp.group.backends import StoreGroup, host_store, open_store
from dwdp.group.comm import Group
from dwdp.group.descriptors import DescriptorExchange
from dwdp.group.handshake import Handshake
from dwdp.group.posts import Deadline
from dwdp.memory.host import HostDomain
from dwdp.runtime import dense, setup_dense, setup_experts, watchdog  # noqa: F401
from tests.weights.fake_experts import dwdp_memfds

RANKS = 3
LONGEST_SECONDS = 40.0


class Case(msgspec.Struct):
    """What happens to rank `victim`, and when. do: `kill`, `stop` or `absent`.

    at: a phase: `announce`, `announced`, `connect`, `connected` (to one of two), the tag of a collective (before the
    rank comes to it), `posted TAG` (behind its post) or `exchange TAG` (before its descriptors are sent).
    """

    at: str
    do: str
    victim: int
    port: int
    folder: str
    timeout: float


def descriptors() -> dict[int, str]:
    found = {}
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return found


def opened(held: dict[int, str]) -> list[str]:
    return [what for number, what in descriptors().items() if number not in held]


def before(owner: type, name: str, fault, wanted=lambda *args: True) -> None:
    original = getattr(owner, name)

    def wrapper(*args, **kwargs):
        if wanted(*args):
            fault()
        return original(*args, **kwargs)

    setattr(owner, name, wrapper)


def after(owner: type, name: str, fault, wanted=lambda *args: True) -> None:
    original = getattr(owner, name)

    def wrapper(*args, **kwargs):
        found = original(*args, **kwargs)
        if wanted(*args):
            fault()
        return found

    setattr(owner, name, wrapper)


def arm(at: str, fault) -> None:
    """Makes this process, which is the victim, run `fault` in the phase `at`."""
    kind, _, tag = at.partition(" ")
    if at == "announce":
        before(Group, "announce", fault)
    elif at == "announced":
        after(Group, "announce", fault)
    elif at == "connect":
        before(Handshake, "run", fault)
    elif at == "connected":
        after(Handshake, "_through", fault)
    elif kind == "posted":
        before(StoreGroup, "_wait", fault, lambda group, keys, post, *rest: post.tag == tag)
    elif kind == "exchange":
        before(DescriptorExchange, "run", fault, lambda exchange, *rest: exchange.what == repr(tag))
    else:
        before(StoreGroup, "_collect", fault, lambda group, post, *rest: post.tag == at)


def run_rank(model: str, case: Case, rank: int, write: int) -> None:
    mine = SimpleNamespace(store=None, group=None)

    def say(**what: object) -> None:
        os.write(write, (json.dumps({"rank": rank, **what}) + "\n").encode())

    def fault() -> None:
        if rank == 0:
            wait_for_the_others(mine.group)
        say(fault=time.time())
        os.kill(os.getpid(), signal.SIGKILL if case.do == "kill" else signal.SIGSTOP)

    torch.set_num_threads(1)
    tempfile.tempdir = case.folder
    if rank == case.victim:
        arm(case.at, fault)
    live = {}
    close = HostDomain.close
    HostDomain.close = lambda domain: (live.update(domain.live()), close(domain))[1]
    launch = resolve(
        model, ranks=RANKS, dtype="float32", device="cpu", dense_dwdp={"enabled": True, "min_bytes": 1},
        dwdp={"host_granule_bytes": 4096, "page_granules": 2},
    )  # fmt: skip
    host_store()  # the first server of a process leaves a pipe of libuv's
    held = descriptors()
    start, error, text, dead = time.time(), None, "", []
    try:
        mine.store = open_store(rank, "127.0.0.1", case.port, timeout_seconds=20)
        mine.group = StoreGroup(mine.store, rank, RANKS, timeout_seconds=case.timeout, host_rank=0)
        build_rank(launch.settings, mine.group, rank=rank)
    except Exception as failure:
        error, text = type(failure).__name__, str(failure)
        dead = [] if mine.group is None else sorted(mine.group.dead)
    at = time.time()
    mine.store = mine.group = None
    gc.collect()
    end = time.monotonic() + 3  # a store's threads notice its end a moment later
    while opened(held) and time.monotonic() < end:
        time.sleep(0.02)
    say(
        error=error, text=text, at=at, seconds=at - start, dead=dead, live=live, memfds=dwdp_memfds(),
        descriptors=opened(held),
        threads=[thread.name for thread in threading.enumerate() if thread is not threading.main_thread()],
    )  # fmt: skip


def wait_for_the_others(group: StoreGroup) -> None:
    """Until they have announced themselves and looked at who else is there: before, they only miss a store."""
    while any(group._find_place(rank, Deadline(20)) is None for rank in range(1, RANKS)):
        time.sleep(0.01)
    if not group._connected:
        time.sleep(0.5)


def start_case(model: str, case: Case) -> tuple[dict[int, int], int]:
    """-> (pid of each rank, where the ranks' lines can be read)."""
    read, write = os.pipe()
    pids = {}
    for rank in range(RANKS):
        if rank == case.victim and case.do == "absent":
            continue
        pids[rank] = os.fork()
        if pids[rank] == 0:
            code = 1
            try:
                os.close(read)
                with open(f"{case.folder}.stderr", "a") as errors:
                    os.dup2(errors.fileno(), 2)
                run_rank(model, case, rank, write)
                code = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(code)
    os.close(write)
    return pids, read


def end_case(case: Case, pids: dict[int, int], read: int, deadline: float) -> dict:
    """Waits for all but a stopped victim, which is then killed. -> what the ranks said and how they ended."""
    waiting = {rank: pid for rank, pid in pids.items() if not (rank == case.victim and case.do == "stop")}
    ended = {}
    while waiting and time.monotonic() < deadline:
        for rank, pid in list(waiting.items()):
            if (found := os.waitpid(pid, os.WNOHANG))[0]:
                ended[rank] = os.waitstatus_to_exitcode(found[1])
                del waiting[rank]
        time.sleep(0.01)
    left = sorted(os.listdir(case.folder))
    for rank in pids.keys() - ended.keys():
        os.kill(pids[rank], signal.SIGKILL)
        os.waitpid(pids[rank], 0)
    with os.fdopen(read) as lines:
        said = [json.loads(line) for line in lines]
    return {"said": said, "ended": ended, "left": left, "stuck": sorted(waiting)}


def warm_up(model: str) -> None:
    """What the first load of a model imports takes longer than a set-up; no thread may be started before a fork."""
    with build_rank(resolve(model, ranks=1, dtype="float32", device="cpu").settings):
        assert threading.active_count() == 1


def main(model: str) -> None:
    warm_up(model)
    gc.collect()
    gc.freeze()  # the ranks' own collections need not go through, and so copy, all that was imported
    for line in sys.stdin:
        cases = msgspec.json.decode(line, type=list[Case])
        running = [(case, *start_case(model, case)) for case in cases]
        deadline = time.monotonic() + LONGEST_SECONDS
        print(json.dumps([end_case(*one, deadline) for one in running]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
