"""Starts the rank processes: torch's elastic agents, one per rank, as threads of this process.

One agent per rank, so that the death of one rank never stops another. The agents need no rendezvous: each is
a world of one with a store in memory. Ranks learn number, size and address from the front end's message.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch.distributed import HashStore
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import (
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from dwdp import env
from dwdp.errors import DwdpError
from dwdp.group.parent import ParentSocket, end_with_this_process

logger = logging.getLogger(__name__)

# -P: the working folder may hold a torch.py or an enum.py of somebody else
RANK_MODULE = ("-P", "-m", "dwdp.executor.rank")
START_SECONDS = 60.0
MONITOR_SECONDS = 0.1
REAP_SECONDS = 5.0
"""How long a process may take to vanish after SIGKILL before it is reported as stuck in the kernel."""

# Standard output belongs to the front end (`--json` prints one document there) and so does the keyboard.
# elastic can only redirect to files, so the child sorts its descriptors itself and then becomes the rank. One
# that we were started without becomes the null device: the next file that is opened would take its number.
# A rank that is stopped (SIGSTOP) reads no end-of-file, so the kernel is to continue it when its parent dies; that
# the signal comes already at the end of the thread that started it does no harm to a rank that runs.
_TRAMPOLINE = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGCONT), 0, 0, 0)  # PR_SET_PDEATHSIG
null = os.open(os.devnull, os.O_RDWR)
try:
    os.fstat(2)
except OSError:
    os.dup2(null, 2)
os.dup2(null, 0)
os.dup2(2, 1)
for number in (0, 1, 2):
    os.set_inheritable(number, True)
os.execv(sys.argv[1], sys.argv[1:])
"""


@dataclass(frozen=True)
class RankExit:
    """How a rank's process ended. exit_code: negative for a signal, None when it never started (see
    `error`)."""

    rank: int
    pid: int | None
    exit_code: int | None
    error: str | None = None

    def __str__(self) -> str:
        if self.exit_code is None:
            return self.error or "not started"
        if self.exit_code >= 0:
            return f"exit code {self.exit_code}"
        try:
            return f"killed by {signal.Signals(-self.exit_code).name}"
        except ValueError:
            return f"killed by signal {-self.exit_code}"


class RankLauncher:
    """`n` rank processes. Context manager with an idempotent `close()`; no process of it outlives this one.

    env_per_rank: variables laid over this process's environment, one mapping per rank. args_per_rank: the
    arguments of each rank's Python interpreter (default `-m dwdp.executor.rank`); `--parent-socket PATH
    --rank R` is added, and the child is to hand PATH to `watch_parent` first of all. folder: an existing
    folder of mode 0700 for that socket, else a private one is made. on_exit is called once a rank ended, from
    its agent's thread.

    Children write to this process's stderr, their stdout included; each is the leader of its own session, so
    that Ctrl-C does not reach it.
    """

    def __init__(
        self,
        n: int,
        env_per_rank: Sequence[Mapping[str, str]],
        *,
        args_per_rank: Sequence[Sequence[str]] | None = None,
        folder: str | None = None,
        on_exit: Callable[[RankExit], None] | None = None,
    ) -> None:
        args_per_rank = [RANK_MODULE] * n if args_per_rank is None else args_per_rank
        if n < 1 or len(env_per_rank) != n or len(args_per_rank) != n:
            raise ValueError(f"{n} ranks, {len(env_per_rank)} environments and {len(args_per_rank)} argument lists")
        self.size = n
        self._env_per_rank, self._args_per_rank = env_per_rank, args_per_rank
        self._folder, self._on_exit = folder, on_exit
        self._lock = threading.Lock()
        self._exits: dict[int, RankExit] = {}
        self._agents: list[_Agent] = []
        self._threads: list[threading.Thread] = []
        self._parent: ParentSocket | None = None
        self._stop = _Stop()
        self._closed = self._ended = False
        end_with_this_process(self)

    def start(self) -> None:
        """Starts every rank and returns when each has a process. Raises DwdpError naming one that did not
        start; then none is left running."""
        if self._parent is not None or self._closed:
            raise DwdpError("a rank launcher starts once")
        _keep_elastic_off_stderr()
        self._parent = ParentSocket(self.size, folder=self._folder)
        try:
            for rank in range(self.size):
                command = [
                    *self._args_per_rank[rank],
                    "--parent-socket",
                    self._parent.path,
                    "--rank",
                    str(rank),
                ]
                child_env = env.child_environment(**self._env_per_rank[rank])
                # A store whose host is gone is an exception with a name; torch's C++ trace of it would go to
                # stderr.
                child_env.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
                agent = _Agent(rank, command, child_env, self._stop)
                self._agents.append(agent)
                thread = threading.Thread(
                    target=self._run_agent, args=(agent,), name=f"{_THREAD_PREFIX}{rank}", daemon=True
                )
                self._threads.append(thread)
                thread.start()
            deadline = time.monotonic() + START_SECONDS
            for agent in self._agents:
                if not agent.started.wait(max(0.0, deadline - time.monotonic())) or agent.pid is None:
                    reason = self.poll().get(agent.rank, f"no process within {START_SECONDS:.0f} s")
                    raise DwdpError(f"rank {agent.rank} could not be started: {reason}")
        except BaseException:
            self.close(0.0)
            raise

    def _run_agent(self, agent: _Agent) -> None:
        error = None
        try:
            agent.run()
        except BaseException as failure:
            logger.debug("the agent of rank %d failed", agent.rank, exc_info=True)
            error = f"{type(failure).__name__}: {failure}"
        ended = RankExit(agent.rank, agent.pid, agent.exit_code, error)
        with self._lock:
            self._exits[agent.rank] = ended
        agent.started.set()
        if self._on_exit is not None:
            try:
                self._on_exit(ended)
            except Exception:
                logger.exception("the callback for the end of rank %d failed", agent.rank)

    def poll(self) -> dict[int, RankExit]:
        """Rank -> how it ended, for the ranks that have ended; noticed within about 0.1 s."""
        with self._lock:
            return dict(self._exits)

    def pids(self) -> dict[int, int]:
        """Rank -> process id, for every rank that was started."""
        return {agent.rank: agent.pid for agent in self._agents if agent.pid is not None}

    def kill(self) -> None:
        """SIGKILL to every rank that runs, and no wait; takes no lock (see `leave_nothing`)."""
        for rank, pid in self.pids().items():
            if rank not in self._exits:
                _kill_session(pid)

    def close(self, kill_after_seconds: float = 5.0) -> None:
        """Ends every rank: SIGTERM, and SIGKILL to what is left after `kill_after_seconds`.

        Idempotent; after an interrupt it goes on where it was.
        """
        if self._ended:
            return
        self._closed = True
        self._stop.request(kill_after_seconds)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(kill_after_seconds + 2 * REAP_SECONDS)
                if thread.is_alive():
                    logger.error("%s did not end: its process is stuck", thread.name)
        if self._parent is not None:
            self._parent.close()
        self._ended = True

    def __enter__(self) -> RankLauncher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Stop:
    """The request, shared by all agents, to end their processes."""

    def __init__(self) -> None:
        self.requested = threading.Event()
        self.kill_after_seconds = 5.0

    def request(self, kill_after_seconds: float) -> None:
        self.kill_after_seconds = kill_after_seconds
        self.requested.set()


class _AloneHandler(RendezvousHandler):
    """A rendezvous with nobody: no socket, nothing pickled, and the agent's loop asks it whether to go on."""

    def __init__(self, stop: _Stop) -> None:
        self._stop = stop

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 0))

    def num_nodes_waiting(self) -> int:
        # Asked at every look at the process. Raising this is elastic's way for a handler to end an agent: it
        # then stops its process, in its own thread, as it does at any other end.
        if self._stop.requested.is_set():
            raise RendezvousGracefulExitError("the launcher closes")
        return 0

    def get_backend(self) -> str:
        return "alone"

    def get_run_id(self) -> str:
        return "dwdp"

    def is_closed(self) -> bool:
        return self._stop.requested.is_set()

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True


class _Logs(LogsSpecs):
    """Children keep our streams; elastic makes no folder and no file. Sets the child's environment on the
    way."""

    def __init__(self, child_env: Mapping[str, str]) -> None:
        super().__init__()
        self._child_env = child_env

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        # Without elastic's own RANK, WORLD_SIZE and so on, which say "rank 0 of 1" to every rank.
        for child in envs.values():
            child.clear()
            child.update(self._child_env)
        return LogsDest({0: ""}, {0: ""}, {}, {}, {0: os.devnull})

    @property
    def root_log_dir(self) -> str:
        return os.devnull


class _Agent(LocalElasticAgent):
    """The agent of one rank."""

    def __init__(self, rank: int, args: Sequence[str], child_env: Mapping[str, str], stop: _Stop) -> None:
        self.rank = rank
        self.pid: int | None = None
        self.started = threading.Event()
        self._stop = stop
        spec = WorkerSpec(
            role=f"rank{rank}",
            local_world_size=1,
            rdzv_handler=_AloneHandler(stop),
            entrypoint=sys.executable,
            args=("-I", "-S", "-c", _TRAMPOLINE, sys.executable, *(_literal(arg) for arg in args)),
            max_restarts=0,
            monitor_interval=MONITOR_SECONDS,
        )
        super().__init__(spec, _Logs(child_env))

    @property
    def exit_code(self) -> int | None:
        process = self._process
        return None if process is None else process.returncode

    @property
    def _process(self) -> subprocess.Popen | None:
        handlers = getattr(self._pcontext, "subprocess_handlers", None)
        return handlers[0].proc if handlers else None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        pids = super()._start_workers(worker_group)
        self.pid = pids[0]
        self.started.set()
        return pids

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if self._process is None:
            return
        # Never 0: elastic waits as long again after its SIGKILL.
        super()._shutdown(death_sig, max(0.05, self._stop.kill_after_seconds))
        try:
            self._process.wait(REAP_SECONDS)
        except subprocess.TimeoutExpired:
            logger.error("rank %d (pid %d) does not end: stuck in the kernel", self.rank, self.pid)
            return
        _kill_session(self.pid)


def _kill_session(pid: int) -> None:
    """A rank leads its own session; what it started there goes with it."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def _literal(arg: str) -> str:
    """elastic fills `${local_rank}` into arguments; ours are to arrive as they are."""
    return arg.replace("$", "$$")


_THREAD_PREFIX = "dwdp-agent-"


class _ElasticFilter(logging.Filter):
    """Turns what elastic logs about our agents into debug messages of ours; leaves other users of elastic
    alone."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not (record.threadName or "").startswith(_THREAD_PREFIX):
            return True
        logger.debug("%s: %s", record.name, record.getMessage())
        return False


_elastic_filter = _ElasticFilter()


def _keep_elastic_off_stderr() -> None:
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).addFilter(_elastic_filter)
