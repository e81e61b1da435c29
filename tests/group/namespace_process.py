"""One of two ranks in mount, PID and network namespaces of its own: `namespace_process.py RANK FOLDER`.

It runs under `unshare -m -p -f -n`. FOLDER is shared; FOLDER/RANK becomes this rank's mount point. One JSON line a
scenario on stdout; a line on stdin is waited for before the last one.
"""

import json
import os
import subprocess
import sys
import tempfile
import time

import torch.distributed as dist

from dwdp.group import links
from dwdp.group.backends import StoreGroup
from dwdp.group.fds import close_fds
from dwdp.group.ranks import Host

ADDRESSES = ("192.168.77.1", "192.168.77.2")


def say(rank: int, **what: object) -> None:
    os.write(1, (json.dumps({"rank": rank, **what}) + "\n").encode())


def outcome(call, *args) -> dict:
    start = time.monotonic()
    try:
        call(*args)
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - start}
    return {"error": None, "text": "", "seconds": time.monotonic() - start}


def namespaces() -> list[str]:
    return [os.readlink(f"/proc/self/ns/{kind}") for kind in ("mnt", "pid", "net")]


def shared(rank: int, folder: str, store) -> dict:
    """The socket folder is shared, mounted elsewhere on each rank: descriptors arrive and show the same bytes."""
    mine = f"{folder}/{rank}"
    subprocess.run(["mount", "--bind", f"{folder}/sockets", mine], check=True)
    with StoreGroup(store, rank, 2, name="shared", timeout_seconds=20, socket_dir=mine) as group:
        hosts = [report["pid"] for report in group.join({"memory": "host"})]
        pids = dict(group._peers.pids)
        fd = os.memfd_create(f"dwdp-test-{rank}")
        os.pwrite(fd, b"rank %d" % rank, 0)
        fds = group.exchange_fds("handles", [fd], b"")[1 - rank][1]
        seen = os.pread(fds[0], 6, 0).decode()
        close_fds([fd, *fds])
        group.mark_setup_done()
        group.barrier("teardown")
    return {"seen": seen, "pids": hosts, "peer_pid": pids[1 - rank], "left": os.listdir(mine)}


def hidden(rank: int, folder: str, store) -> dict:
    """Every rank has a temporary folder that no other sees."""
    private = f"{folder}/tmp-{rank}"
    subprocess.run(["mount", "-t", "tmpfs", "none", private], check=True)
    tempfile.tempdir = private
    with StoreGroup(store, rank, 2, name="hidden", timeout_seconds=20) as group:
        found = outcome(group.join, {})
    return found | {"left": os.listdir(private)}


def vanished(rank: int, folder: str, store) -> dict:
    """Two hosts with a cable between them, which rank 1 cuts; the bounds are shortened from 3, 2 and 9 s to 1, 1, 2."""
    links.KEEPALIVE_IDLE_SECONDS = links.KEEPALIVE_INTERVAL_SECONDS = 1
    links.USER_TIMEOUT_SECONDS = 2
    sys.stdin.readline()  # the cable is there
    for command in (f"addr add {ADDRESSES[rank]}/24 dev cable{rank}", f"link set cable{rank} up", "link set lo up"):
        subprocess.run(["ip", *command.split()], check=True)
    host = Host(f"boot-{rank}", f"node-{rank}")
    with StoreGroup(store, rank, 2, name="vanished", timeout_seconds=20, token="secret", host=host) as group:
        group._own_address = lambda: ADDRESSES[rank]  # a store in a file has no address
        group.join({})
        group.barrier("joined")
        start = time.monotonic()
        if rank == 1:
            subprocess.run(["ip", "link", "set", "cable1", "down"], check=True)
        while not group.dead and time.monotonic() - start < 15:
            time.sleep(0.02)
        return {"dead": sorted(group.dead), "seconds": time.monotonic() - start}


def main(rank: int, folder: str) -> None:
    # not file:///…: the file is opened by this path in both mount namespaces
    store = dist.FileStore(f"{folder}/store", 2)
    for scenario in (shared, hidden, vanished):
        say(rank, scenario=scenario.__name__, **scenario(rank, folder, store))
    say(rank, scenario="end", namespaces=namespaces())


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
