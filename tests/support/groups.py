"""Rank processes, ports and outcomes, for tests of groups."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time

from dwdp import env

SCRIPT = os.path.join(os.path.dirname(os.path.dirname(__file__)), "group", "rank_process.py")


_PORTS = itertools.count(random.SystemRandom().randrange(1 << 20))


def free_port() -> int:
    """That a process started later can listen on. Not one the system gives out by itself: between here and there
    another test's connection or server could be given it."""
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        first_given_out = max(11_000, int(file.read().split()[0]))
    for _ in range(1000):
        port = 10_000 + next(_PORTS) % (first_given_out - 10_000)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port")


class Ranks:
    """The ranks of `rank_process.py`, once all have joined."""

    def __init__(self, size, port, mode):
        environment = env.child_environment(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="FATAL")
        self.process = subprocess.Popen(
            [sys.executable, SCRIPT, str(size), str(port), mode],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.lines, self.pids = [], {}
        while len(self.pids) < size:
            line = json.loads(self.process.stdout.readline() or self.process.stderr.read())
            self.pids.setdefault(line["rank"], line.get("joined"))
            self.lines += [] if "joined" in line else [line]

    def end(self):
        """-> (outcome by rank, stderr) once every rank has ended."""
        # not communicate(): it would miss the lines that readline has buffered
        out, err = self.process.stdout.read(), self.process.stderr.read()
        self.process.wait(20)
        outcomes = [*self.lines, *map(json.loads, out.splitlines())]
        return {line["rank"]: line for line in outcomes if "joined" not in line}, err

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(20)
        self.process.stdout.close()
        self.process.stderr.close()


def listening():
    """(address, port) of every listening TCP socket of this process, IPv6 too."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{fd}").removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in open(f"/proc/self/net/{table}").readlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, port = fields[1].split(":")
                raw = b"".join(bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8))
                found.add((socket.inet_ntop(family, raw), int(port, 16)))
    return found


def outcome(call, *args, **kwargs):
    """The exception that a call raises, or None; and how long it took."""
    start = time.monotonic()
    try:
        call(*args, **kwargs)
    except BaseException as error:
        return error, time.monotonic() - start
    return None, time.monotonic() - start
