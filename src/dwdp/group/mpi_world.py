"""MPI in this process: starting it, leaving it and calling what may never return, each with a bound.

[Note: calls that hold the GIL]
mpi4py calls MPI_Init and MPI_Finalize with the GIL held, and both wait for every process of the world: nothing
in this process, no timer and no signal handler, could end the wait for one that is gone. They are called
through ctypes, which releases the GIL, on a thread that may be left behind in them.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from dwdp import env
from dwdp.errors import ConfigError, GroupError, GroupTimeoutError
from dwdp.group.posts import Deadline

logger = logging.getLogger(__name__)

LEAVE_TAG = 0x4458
LEAVE_SECONDS = 5.0
"""How long a process waits at its end for the others of the world, before it leaves without MPI_Finalize."""

INSTALL = "install it with: pip install 'dwdp[mpi]'"
WITHOUT_MPI = "or give the ranks a store instead: DWDP_MASTER_ADDR and DWDP_MASTER_PORT, the same on all"


class MpiWorld:
    """MPI in this process: started once, under a deadline, and left once, at the process's end.

    `lost`: ranks of MPI_COMM_WORLD that are known to have died; then nobody waits in MPI_Finalize.
    """

    def __init__(self, timeout_seconds: float | None = None) -> None:
        self.MPI, started = _import_mpi()
        self._library = ctypes.CDLL(self.MPI.__file__)  # finds the MPI library that the module is linked to
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._work, name="dwdp-mpi", daemon=True).start()
        self.lost: set[int] = set()
        self._attempts: dict[tuple, int] = {}
        self._unfinished: list = []
        self._comms: list = [self.MPI.COMM_WORLD]
        if not started:
            self._start(Deadline(env.rendezvous_timeout_seconds() if timeout_seconds is None else timeout_seconds))
        if self.MPI.Query_thread() < self.MPI.THREAD_MULTIPLE:
            raise ConfigError("MPI was started without MPI_THREAD_MULTIPLE, which a group needs")

    def _start(self, deadline: Deadline) -> None:
        # What mpich's mpirun tells those who are still there when a rank is gone; by default it would end them.
        if threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
                signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        provided = ctypes.c_int()
        init = self._library.MPI_Init_thread
        codes: list[int] = []
        wanted = self.MPI.THREAD_MULTIPLE
        if not self.call(lambda: codes.append(init(None, None, wanted, ctypes.byref(provided))), deadline.remaining):
            raise GroupTimeoutError(
                f"MPI_Init did not return within {deadline.seconds:g} s: a process that the launcher started has "
                "ended before it or never came to it (the deadline is DWDP_RENDEZVOUS_TIMEOUT_S)"
            )
        if codes != [self.MPI.SUCCESS]:
            raise GroupError(f"MPI_Init failed: {self.MPI.Get_error_string(codes[0])}")
        for comm in (self.MPI.COMM_WORLD, self.MPI.COMM_SELF):
            comm.Set_errhandler(self.MPI.ERRORS_RETURN)  # else MPI would end the process
        atexit.register(self._leave)

    def call(self, function: Callable[[], Any], seconds: float) -> bool:
        """Runs `function` on MPI's own thread, which is lost when this returns False: it did not end in time.

        Raises what it raises."""
        future: Future = Future()
        self._jobs.put((function, future))
        try:
            future.result(seconds)
        except TimeoutError:
            if future.done():
                raise
            return False
        return True

    def _work(self) -> None:
        while True:
            function, future = self._jobs.get()
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            del function, future

    def next_attempt(self, parent: Any, tag: int, ranks: Sequence[int]) -> int:
        key = (parent.handle, tag, *ranks)
        self._attempts[key] = self._attempts.get(key, 0) + 1
        return self._attempts[key]

    def used(self, comm: Any) -> None:
        """Tells that messages may be under way on `comm` when the process ends."""
        if comm not in self._comms:
            self._comms.append(comm)

    def keep(self, sends: Iterable) -> None:
        """Sends that nobody waits for any more: their buffers must live until MPI has read them."""
        self._unfinished = [send for send in [*self._unfinished, *sends] if not self.is_done(send)]

    def is_done(self, request: Any) -> bool:
        """Whether a send is over; one that failed is, its receiver is gone."""
        try:
            return request.Test()
        except self.MPI.Exception as error:
            logger.debug("a message was not delivered: %s", error)
            return True

    def receive(self, comm: Any, source: int, tag: int) -> tuple[Any, bytearray, int] | None:
        """-> (the running receive, its buffer, who sent it), None when nothing has come."""
        status = self.MPI.Status()
        message = comm.Improbe(source, tag, status)
        if message is None:
            return None
        buffer = bytearray(status.Get_count(self.MPI.BYTE))
        return message.Irecv([buffer, self.MPI.BYTE]), buffer, status.Get_source()

    def _leave(self) -> None:
        """At the process's end: MPI_Finalize when every process of the world comes to it, else not at all."""
        try:
            if not self._all_leave():
                logger.debug("left without MPI_Finalize: a process of the world is gone")
            elif not self.call(self._library.MPI_Finalize, LEAVE_SECONDS):
                logger.warning("MPI_Finalize did not return within %g s and is left", LEAVE_SECONDS)
        except self.MPI.Exception as error:
            logger.debug("left without MPI_Finalize: %s", error)

    def _all_leave(self) -> bool:
        """Whether every process of the world is at its end too, within 5 s."""
        world, byte = self.MPI.COMM_WORLD, self.MPI.BYTE
        others = set(range(world.Get_size())) - {world.Get_rank()} - self.lost
        word = b"lost" if self.lost else b"fine"
        self.keep([world.Isend([word, byte], rank, LEAVE_TAG) for rank in others])
        deadline, together = Deadline(LEAVE_SECONDS), not self.lost
        while together and others and not deadline.passed:
            if found := self.receive(world, self.MPI.ANY_SOURCE, LEAVE_TAG):
                request, buffer, source = found
                request.Wait()
                others.discard(source)
                together = bytes(buffer) == b"fine"
            else:
                time.sleep(0.001)
        # With messages that nobody took, mpich's MPI_Finalize returns but mpirun may miss that it did.
        for comm in self._comms:
            while found := self.receive(comm, self.MPI.ANY_SOURCE, self.MPI.ANY_TAG):
                self._unfinished.append(found[0])
        self.keep(())
        return together and not others


_world: MpiWorld | None = None


def mpi_world(timeout_seconds: float | None = None) -> MpiWorld:
    """MPI of this process, started now if it has not been.

    timeout_seconds: for MPI_Init, which waits for every process that the launcher started (None:
    DWDP_RENDEZVOUS_TIMEOUT_S). Raises ConfigError with what to install, GroupTimeoutError.
    """
    global _world
    if _world is None:
        _world = MpiWorld(timeout_seconds)
    return _world


def _import_mpi() -> tuple[Any, bool]:
    """-> (mpi4py's module, whether MPI was started before)."""
    try:
        import mpi4py
    except ImportError:
        raise ConfigError(f"a group over MPI needs mpi4py: {INSTALL}; {WITHOUT_MPI}") from None
    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"mpi4py finds no MPI library ({reason}): load the one that mpirun belongs to, or install one with: pip "
            f"install mpich; {WITHOUT_MPI}"
        ) from None
    return MPI, MPI.Is_initialized()
