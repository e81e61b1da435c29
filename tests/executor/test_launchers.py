"""`dwdp generate` under every launcher: each process answers its own prompts as one run with ranks of our own does;
what a refusal and a death do to the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dwdp.env import child_environment
from tests.executor.checkpoints import write_tiny
from tests.support import mpirun as mpi
from tests.support.groups import free_port
from tests.support.mpirun import segments  # noqa: F401  (a fixture of this module)

RANKS = 4
PROMPTS = ("ab", "cd", "efg", "h", "xyz")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--master-addr", "127.0.0.1"]


def program(model: Path, *more: str, prompts=PROMPTS, ranks=RANKS) -> list[str]:
    asked = [word for prompt in prompts for word in ("--prompt", prompt)]
    options = ["--model", str(model), "--device", "cpu", "--ranks", str(ranks), "--json"]
    return ["-m", "dwdp.tools.cli", "generate", *options, *asked, *more]


def start(command: list[str], **variables: str) -> subprocess.Popen:
    env = child_environment(mpi.environment(), **variables)
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def end(process: subprocess.Popen, seconds: float = 60) -> tuple[list[dict], str, str]:
    """-> (the documents on stdout, stdout, stderr) once the process and all that share its streams have ended."""
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")], out, err


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=64)


@pytest.fixture(scope="module")
def expected(tiny):
    """Index -> token ids, of ranks that the command starts itself."""
    process = start([sys.executable, *program(tiny, "--max-tokens", "4", "--quiet")])
    documents, _, err = end(process)
    assert process.returncode == 0 and [report["rank"] for report in documents[0]["ranks"]] == list(range(RANKS)), err
    return {output["index"]: output["token_ids"] for output in documents[0]["outputs"]}


def check(documents: list[dict], expected: dict) -> None:
    assert len(documents) == RANKS
    for one in documents:
        rank = one["ranks"][0]["rank"]
        mine = [index for index in range(len(PROMPTS)) if index % RANKS == rank]
        assert len(one["ranks"]) == 1 and [output["index"] for output in one["outputs"]] == mine
        assert all(output["token_ids"] == expected[output["index"]] for output in one["outputs"])
        assert one["ranks"][0]["ledger"]["moved_bytes"] > 0  # the weights are shared, not replicated
    assert sorted(one["ranks"][0]["rank"] for one in documents) == list(range(RANKS))


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun", "mpirun with a store"])
def test_processes_of_a_launcher_answer_their_own_prompts_as_our_ranks_do(launcher, tiny, expected):
    variables = {}
    if launcher == "torchrun":
        command, place = [*TORCHRUN, "--master-port", str(free_port())], "torchrun: rank {} of 4 at 127.0.0.1:"
    else:
        command, place = [*mpi.mpirun(), "-n", str(RANKS), sys.executable], "MPI: rank {} of 4 without a store"
        if launcher == "mpirun with a store":
            variables = {"DWDP_MASTER_ADDR": "127.0.0.1", "DWDP_MASTER_PORT": str(free_port())}
            place = "MPI: rank {} of 4 at 127.0.0.1:" + variables["DWDP_MASTER_PORT"]
    process = start([*command, *program(tiny, "--max-tokens", "4")], **variables)
    documents, out, err = end(process)
    assert process.returncode == 0, out + err
    check(documents, expected)
    assert all(f"rank and address are taken from {place.format(rank)}" in err for rank in range(RANKS)), err


def test_processes_of_a_slurm_step_answer_their_own_prompts_as_our_ranks_do(tiny, expected):
    address = {"DWDP_MASTER_ADDR": "127.0.0.1", "DWDP_MASTER_PORT": str(free_port())}
    processes = [
        start([sys.executable, *program(tiny, "--max-tokens", "4")], SLURM_PROCID=str(r), SLURM_NTASKS="4", **address)
        for r in range(RANKS)
    ]
    ended = [end(process) for process in processes]
    for rank, (process, (documents, _, err)) in enumerate(zip(processes, ended)):
        assert process.returncode == 0 and documents[0]["ranks"][0]["rank"] == rank, err
        assert f"taken from Slurm: rank {rank} of 4" in err
    check([documents[0] for documents, _, _ in ended], expected)


def test_a_process_that_refuses_the_launch_under_mpirun_is_named_by_the_others_at_once(tiny):
    """Its gate refuses before there is a group; without a word the others would wait for it in MPI_Init."""
    rank = [sys.executable, *program(tiny, "--quiet", prompts=("a", "b"), ranks=2)]
    process = start([*mpi.mpirun(), "-n", "1", *rank, ":", "-env", "DWDP_DENSE", "maybe", "-n", "1", *rank])
    documents, _, err = end(process, 30)
    assert process.returncode != 0 and documents == []
    lines = sorted(line for line in err.splitlines() if line.startswith("dwdp: "))
    assert len(lines) == 2 and lines[0].startswith("dwdp: DWDP_DENSE='maybe' cannot be read"), err
    assert lines[1].startswith("dwdp: rank 1 aborted the group 'dwdp': ConfigError: DWDP_DENSE='maybe'"), err


# -- a rank that dies


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """A model whose completions take long enough to be interrupted."""
    return write_tiny(tmp_path_factory.mktemp("long"))


def kill_one(process: subprocess.Popen, variable: str, ranks: int) -> tuple[str, str, float]:
    """Kills the process of rank 1 once all ranks are set up; -> (stdout, stderr, seconds until all had ended)."""
    said = ""
    while said.count("is set up") < ranks:
        line = process.stderr.readline()
        assert line, said
        said += line
    mine = descendants(process.pid)
    victim = next(pid for pid in mine if f"{variable}=1" in read(pid, "environ") and is_rank(pid))
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    # not communicate(): it would miss the lines that readline has buffered
    said += process.stderr.read()
    out = process.stdout.read()
    process.wait(20)
    return out, said, time.monotonic() - killed


def descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [one for child in map(int, children) for one in (child, *descendants(child))]


def read(pid: int, name: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace").split("\0")
    except OSError:
        return []


def is_rank(pid: int) -> bool:
    command = read(pid, "cmdline")
    return "python" in command[0] and "dwdp.tools.cli" in command and "torch.distributed.run" not in command


LONG = ("--max-tokens", "3000", "--ignore-eos")


@pytest.mark.parametrize(
    ("launcher", "survive"), [("torchrun", False), ("mpirun", False), ("mpirun that lets the others live", True)]
)
def test_what_a_launcher_does_to_the_others_when_a_rank_is_killed(launcher, survive, long):
    """torchrun and mpirun end them; mpirun does not when told so and when the death is an exit code to it."""
    rank = [sys.executable, *program(long, *LONG, prompts=("a", "b"), ranks=2)]
    if launcher == "torchrun":
        command = [*TORCHRUN, "--nproc-per-node", "2", "--master-port", str(free_port()), *rank[1:]]
    elif survive:
        command = [*mpi.mpirun("-disable-auto-cleanup"), "-n", "2", *mpi.SURVIVE, *rank]
    else:
        command = [*mpi.mpirun(), "-n", "2", *rank]
    process = start(command)
    try:
        out, err, seconds = kill_one(process, "RANK" if launcher == "torchrun" else "PMI_RANK", 2)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode != 0 and "outputs" not in out and seconds < 10
    assert any(line.startswith("dwdp: rank 1 died") for line in err.splitlines()) is survive, err
