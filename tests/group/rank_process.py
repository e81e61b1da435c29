"""Ranks as processes of their own, for tests: `rank_process.py SIZE PORT MODE` forks SIZE ranks.

Each rank writes JSON lines with its number to stdout: {"joined": pid}, then the outcome. Modes: `serving`
(the test serves the store at PORT; setup is marked done; all but the last rank go into a collective), `hosts`
(the same with every two ranks on a host of their own), `host`
(the same with the store served by rank 0, which does not come to the collective), `leave` (rank 0 serves, all
leave by a barrier), `store` (only a store is served, by the one process).
"""

import json
import os
import sys
import time
import traceback

from dwdp.group.backends import StoreGroup, connect_store, host_store, open_store
from dwdp.group.ranks import Host


def say(rank: int, **what: object) -> None:
    os.write(1, (json.dumps({"rank": rank, **what}) + "\n").encode())


def run_rank(rank: int, size: int, port: int, mode: str) -> None:
    if mode == "store":
        kept = host_store("127.0.0.1", port)
        say(rank, joined=os.getpid())
        time.sleep(60)
        del kept
    options = {}
    if mode == "hosts":
        options = {"host": Host(f"boot-{rank // 2}", f"node-{rank // 2}"), "token": "one secret"}
        mode = "serving"
    if mode == "serving":
        store, host_rank = connect_store(port, timeout_seconds=20), None
    else:
        store, host_rank = open_store(rank, "127.0.0.1", port, timeout_seconds=20), 0
    group = StoreGroup(store, rank, size, timeout_seconds=60, host_rank=host_rank, **options)
    group.join({"config": "same"})
    if mode == "serving":
        group.mark_setup_done()
    say(rank, joined=os.getpid())
    if mode == "leave":
        if rank > 0:
            # slow to read the barrier's last answers, which rank 0 must not take away
            read = group._store.get_all
            group._store.get_all = lambda *args: (time.sleep(0.5), read(*args))[1]
        group.barrier("teardown")
        group.close()
        say(rank, left=True)
        return
    if rank == (0 if mode == "host" else size - 1):
        time.sleep(60)  # to be killed
    error = None
    try:
        group.barrier("needs everybody")
    except Exception as failure:
        error = failure
    at = time.time()
    if mode == "serving":
        group.barrier("the living", skip_dead=True)
    group.close()
    say(rank, error=type(error).__name__, text=str(error), at=at, dead=sorted(group.dead))


def main() -> None:
    size, port, mode = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    children = []
    for rank in range(size):
        # Forked, so that torch is imported once; nothing has started a thread yet.
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                run_rank(rank, size, port, mode)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
