"""Rank processes forked from one that has torch and dwdp imported: a start in milliseconds instead of seconds of CPU.

For tests of what ranks do. Those of how ranks start and end (tests/group/test_launch.py, most of tests/test_llm.py, the
runs of tests/tools/test_cli.py and of every launcher) start interpreters, as does all that is not opted in.

`Nursery` is the side of the tests; this file run as a script is the process that forks. It keeps to one thread, so a
child has no lock of a thread that it lacks; each child gets its environment, its session and its descriptors as
`dwdp.group.launch` gives them, and then runs the module as `python -m` would.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from unittest import mock

MODULE = "dwdp.executor.rank"
LARGEST_REQUEST = 1 << 20
PR_SET_PDEATHSIG = 1


class Nursery:
    """Context manager. `popen` stands in for `subprocess.Popen` where torch's elastic agents start the ranks."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST_REQUEST)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
        environment["TORCH_CPP_LOG_LEVEL"] = "FATAL"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno())],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._lock = threading.Lock()

    def popen(self, args, env=None, **others):
        """A forked rank for the command line of one; any other starts as ever."""
        args = list(args)
        module = ["-P", "-m", MODULE]
        at = next((i for i in range(len(args)) if args[i : i + 3] == module), None)
        if at is None or others.get("stdout") or others.get("stderr") or not others.get("start_new_session"):
            return subprocess.Popen(args, env=env, **others)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {"arguments": args[at + 3 :], "environment": env, "folder": os.getcwd()}
        with theirs, self._lock:
            descriptors = array.array("i", [theirs.fileno(), 2])
            self._socket.sendmsg([json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
        return WarmProcess(args, ours)

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Ranks that are started inside the block are forked."""
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        with mock.patch.object(subprocess_handler, "Popen", self.popen):
            yield

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(20)


class WarmProcess:
    """What elastic and our launcher use of a `Popen`. A returncode is known once the process has been reaped."""

    def __init__(self, args: list[str], status: socket.socket) -> None:
        self.args, self._status, self.returncode = args, status, None
        self._lock = threading.Lock()
        self.pid = int(status.recv(64) or b"-1")
        if self.pid < 0:
            raise OSError("the process that forks ranks is gone")

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def _look(self, seconds: float | None) -> int | None:
        with self._lock:
            if self.returncode is None:
                poller = select.poll()  # select() refuses descriptors above 1,023
                poller.register(self._status, select.POLLIN)
                if poller.poll(None if seconds is None else 1000 * seconds):
                    # Without an answer the forking process is gone; its children end with their front end's socket.
                    self.returncode = int(self._status.recv(64) or -signal.SIGKILL)
                    self._status.close()
            return self.returncode


def serve(requests: socket.socket) -> list[str] | None:
    """Forks until the other side closes, then -> None. In a child -> its arguments."""
    poller = select.poll()
    poller.register(requests, select.POLLIN)
    # The child's pidfd, then the socket where its end was told -> (pid, that socket, whether it has ended).
    children: dict[int, tuple[int, socket.socket, bool]] = {}
    while True:
        for ready, _ in poller.poll():
            if ready != requests.fileno():
                pid, status, ended = children[ready]
                poller.unregister(ready)
                if not ended:
                    # A zombie until the other side has the code and closes, as a child of its own would be: its
                    # process id stays taken as long as somebody may send signals to it.
                    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                    code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
                    with contextlib.suppress(OSError):  # nobody may want to know any more
                        status.send(str(code).encode())
                    del children[ready]
                    os.close(ready)
                    children[status.fileno()] = pid, status, True
                    poller.register(status, select.POLLIN)
                    continue
                del children[ready]
                status.close()
                os.waitpid(pid, 0)
                continue
            data, ancillary, _, _ = requests.recvmsg(LARGEST_REQUEST, socket.CMSG_SPACE(2 * 4))
            if not data:
                return None
            descriptors = array.array("i")
            descriptors.frombytes(ancillary[0][2])
            status, stderr = socket.socket(fileno=descriptors[0]), descriptors[1]
            pid = os.fork()
            if pid == 0:
                for place, (_, other, ended) in children.items():
                    if not ended:
                        os.close(place)
                    other.close()
                requests.close()
                return become(json.loads(data), stderr, status)
            os.close(stderr)
            pidfd = os.pidfd_open(pid)
            children[pidfd] = pid, status, False
            poller.register(pidfd, select.POLLIN)


def become(request: dict, stderr: int, status: socket.socket) -> list[str]:
    """What `start_new_session` and the launcher's own first lines in a child do. -> the rank's arguments.

    Who asked learns the process id once it is that of a session, which may then be killed."""
    os.setsid()
    with status, contextlib.suppress(OSError):
        status.send(str(os.getpid()).encode())
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)
    os.dup2(stderr, 2)
    os.dup2(stderr, 1)
    os.close(stderr)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    return request["arguments"]


def main() -> None:
    import gc

    import torch  # noqa: F401
    import zmq  # noqa: F401

    from dwdp.device import host  # noqa: F401
    from dwdp.executor import create, loop, messages  # noqa: F401
    from dwdp.group import backends, comm  # noqa: F401
    from dwdp.runtime import dense, manager, setup_dense, setup_experts, standalone, watchdog  # noqa: F401

    gc.collect()
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1  # a fork copies no other thread, but the locks that it holds
    requests = socket.socket(fileno=int(sys.argv[1]))
    arguments = serve(requests)
    if arguments is not None:
        sys.argv[1:] = arguments
        runpy.run_module(MODULE, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
