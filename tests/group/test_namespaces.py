"""Ranks as in containers: each in mount, PID and network namespaces of its own, which the kernel makes for the test."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from dwdp import env

SCRIPT = os.path.join(os.path.dirname(__file__), "namespace_process.py")
UNSHARE = ["unshare", "-m", "-p", "-f", "-n", "--kill-child"]


def missing() -> str | None:
    """Why namespaces cannot be made here, or None."""
    for program in ("unshare", "ip", "mount"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    done = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True)
    return None if done.returncode == 0 else f"namespaces cannot be made here: {done.stderr.strip()}"


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory):
    """Scenario -> what it gave on ranks 0 and 1."""
    if why := missing():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("ns")
    for name in ("sockets", "0", "1", "tmp-0", "tmp-1"):
        (folder / name).mkdir(mode=0o700)
    environment = env.child_environment(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="FATAL")
    ranks = []
    for rank in range(2):
        with open(folder / f"stderr-{rank}", "w") as stderr:
            ranks.append(
                subprocess.Popen(
                    [*UNSHARE, sys.executable, SCRIPT, str(rank), str(folder)], env=environment, text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True,
                )
            )  # fmt: skip
    lines: dict[str, list[dict]] = {"stderr": []}
    try:
        for number in range(4):
            if number == 2:
                assert "crashed" not in lines, (folder / "stderr-0").read_text() + (folder / "stderr-1").read_text()
                lay_cable([rank.pid for rank in ranks])
                for rank in ranks:
                    rank.stdin.write("\n")
                    rank.stdin.flush()
            for rank in ranks:
                line = json.loads(rank.stdout.readline() or '{"scenario": "crashed"}')
                lines.setdefault(line["scenario"], []).append(line)
        assert [rank.wait(20) for rank in ranks] == [0, 0], (folder / "stderr-0").read_text()
    finally:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait(20)
            for pipe in (rank.stdin, rank.stdout):
                pipe.close()
    lines["stderr"] = [(folder / f"stderr-{rank}").read_text() for rank in range(2)]
    return lines


def lay_cable(pids: list[int]) -> None:
    """A pair of network interfaces, `cable0` and `cable1`, one in the network namespace of each process."""
    ends = [f"dwdp{pid}" for pid in pids]  # of these names here, for a moment
    try:
        ip(f"link add {ends[0]} type veth peer name {ends[1]}")
        for rank, (end, pid) in enumerate(zip(ends, pids)):
            ip(f"link set {end} netns {pid} name cable{rank}")
    except subprocess.CalledProcessError:
        subprocess.run(["ip", "link", "del", ends[1]])
        raise


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True)


def test_the_ranks_share_no_namespace_and_not_this_process_s(scenarios):
    ours = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("mnt", "pid", "net")]
    first, second = (line["namespaces"] for line in scenarios["end"])
    assert all(len({a, b, c}) == 3 for a, b, c in zip(first, second, ours))


def test_a_shared_socket_folder_is_enough_wherever_it_is_mounted(scenarios):
    """Fails (the ranks never join) when the folder that the peer published is taken instead of the rank's own."""
    for rank, line in enumerate(scenarios["shared"]):
        assert line["seen"] == f"rank {1 - rank}"
        assert line["pids"] == [1, 1]  # every rank is the first process of its PID namespace
        assert line["peer_pid"] == 0 and line["left"] == []


def test_without_one_every_rank_fails_within_ten_seconds_naming_folder_and_option(scenarios):
    """Fails when a socket that cannot be seen counts as that of a dead rank."""
    for line in scenarios["hidden"]:
        assert line["error"] == "GroupError" and line["seconds"] < 10, line
        assert "(option DWDP_SOCKET_DIR)" in line["text"] and "/tmp-" in line["text"]
        assert "died" not in line["text"] and line["left"] == []


def test_a_host_that_vanishes_without_a_word_is_noticed_by_the_keepalive(scenarios):
    """Fails without `keep_alive`: the connections then stay open for hours."""
    for rank, line in enumerate(scenarios["vanished"]):
        assert line["dead"] == [1 - rank] and line["seconds"] < 6, line
    assert all(f"rank {1 - rank} died" in text for rank, text in enumerate(scenarios["stderr"]))
