"""mpich's mpirun for tests: processes of this machine that talk over shared memory."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from dwdp import env

SURVIVE = ("sh", "-c", 'trap "" USR1; "$@"; exit $?', "sh")
"""In front of a program: a process that is killed is an exit code to mpirun, which ends no other for it."""


def mpirun(*flags: str) -> list[str]:
    """The command line up to the number of processes. Skips the test where mpich or mpi4py is not installed."""
    pytest.importorskip("mpi4py", exc_type=ImportError)
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    program = shutil.which("mpirun", path=path)
    if program is None:
        pytest.skip("mpirun is not installed")
    return [program, "-launcher", "fork", "-iface", "lo", *flags]


def environment(**extra: str) -> dict[str, str]:
    """Without sockets: UCX would listen on the machine's address for processes of other machines."""
    return env.child_environment(UCX_TLS="self,posix", OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="FATAL", **extra)


@pytest.fixture(scope="module", autouse=True)
def segments() -> Iterator[None]:
    """To be imported by a module of MPI tests: mpich leaves the shared memory of processes that were killed."""
    pattern = "mpich_shm_*"
    before = set(Path("/dev/shm").glob(pattern))
    yield
    for left in set(Path("/dev/shm").glob(pattern)) - before:
        left.unlink(missing_ok=True)
