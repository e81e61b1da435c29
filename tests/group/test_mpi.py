"""Groups over MPI: what each rank gets and raises, as over a store; deaths; processes that never come."""

import json
import os
import subprocess
import sys

import pytest

from dwdp.errors import ConfigError
from dwdp.group import mpi, mpi_world
from tests.support.mpirun import (
    SURVIVE,
    environment,
    mpirun,
    segments,  # noqa: F401  (a fixture of this module)
)

SCRIPT = os.path.join(os.path.dirname(__file__), "mpi_process.py")


def run(size, mode, *flags, before=()):
    """-> (the ranks' lines, what mpirun returned)."""
    program = [*before, sys.executable, SCRIPT, mode]
    command = program if size is None else [*mpirun(*flags), "-n", str(size), *program]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return lines, done


@pytest.fixture(scope="module")
def protocol():
    """Scenario -> what it gave on ranks 0 to 3; all in one world, one after the other."""
    lines, done = run(4, "protocol")
    assert done.returncode == 0, done.stderr
    found = {}
    for line in sorted(lines, key=lambda line: line["rank"]):
        found.setdefault(line.pop("scenario"), []).append(line)
    return found


def test_every_rank_gets_all_payloads_in_rank_order_also_large_ones(protocol):
    for rank, got in enumerate(protocol["gathers"]):
        assert got["ranks"] == [0, 1, 2, 3] and got["raw"] == ["", "01", "0202", "030303"]
        assert got["objects"] == [{"rank": r, "list": [1, None, "x"]} for r in range(4)]
        assert got["large"] == [3_000_000] * 4 and got["same"]
        assert f"rank {rank} has closed the group" in got["again"]["text"]


def test_a_vote_raises_the_own_error_where_it_failed_and_names_it_elsewhere_and_the_group_goes_on(protocol):
    text = "rank 1 failed in phase 'create': MemoryError: no page 7; rank 3 failed in phase 'create': KeyboardInterrupt"
    errors = [(got["error"], got["text"]) for got in protocol["votes"]]
    assert errors[1] == ("MemoryError", "no page 7") and errors[3] == ("KeyboardInterrupt", "")
    assert errors[0] == errors[2] == ("GroupError", text)
    assert all(got["data"] == [{"from": r} for r in range(4)] for got in protocol["votes"])


@pytest.mark.parametrize(
    ("scenario", "error", "words"),
    [
        ("tags", "GroupError", "rank 0 in 'right', rank 1 in 'left', rank 2 in 'right', rank 3 in 'right'"),
        ("skipped", "GroupError", "rank 0 in 'first', rank 1 in 'second', rank 2 in 'first', rank 3 in 'first'"),
        ("differ", "GroupError", "rank 2 has config 'abd', most ranks have 'abc'"),
        ("deadline", "GroupTimeoutError", "ranks 1, 3 of 4 did not come to 'load' of group 'dwdp' within 0.4 s"),
        ("late", "GroupTimeoutError", "rank 2 of 4 did not come to 'making the communicator, tag 0x4456'"),
        ("aborts", "GroupError", "rank 2 aborted the group 'dwdp': disk full"),
        ("refuses", "GroupError", "rank 1 aborted the group 'dwdp': ConfigError: ranks must be 4"),
    ],
)
def test_every_rank_raises_what_names_the_culprit_within_a_second(protocol, scenario, error, words):
    """Mismatched tags, a skipped collective, reports that differ, a missing rank in a collective and before the
    group exists (the late rank learns it too, and a later attempt succeeds), an abort, one before the first
    collective."""
    for got in protocol[scenario]:
        assert got["error"] == error and words in got["text"] and got["seconds"] < 1
    assert all(got["again"] == got["text"] for got in protocol["aborts"])


def test_groups_of_different_tags_or_names_never_pair(protocol):
    texts = [got["text"] for got in protocol["dense"]]
    assert {got["error"] for got in protocol["dense"]} == {"GroupTimeoutError"}
    assert all("rank 3 of 4 did not come to" in text for text in texts[:3])
    assert "ranks 0, 1, 2 of 4" in texts[3] and "tag 0x4457" in texts[3]
    for got in protocol["names"]:
        assert got["error"] == "GroupError" and "'dwdp'" in got["text"] and "'other'" in got["text"]


def test_descriptors_reach_every_peer_and_a_failing_exchange_raises_on_all_and_leaks_nothing(protocol):
    for rank, got in enumerate(protocol["descriptors"]):
        assert got["payloads"] == [f"from {r}" for r in range(4)]
        assert got["seen"] == [[f"{r}:{i}" for i in range(r + 1)] if r != rank else [] for r in range(4)]
        assert got["leaked"] == 0 and got["failed"]["seconds"] < 2
        if rank == 1:
            assert got["failed"]["error"] == "OSError"
        else:
            assert "rank 1 failed in phase 'bad handles: descriptors': OSError" in got["failed"]["text"]


def test_a_clean_close_is_no_death_but_a_collective_that_needs_the_rank_says_that_it_left(protocol):
    for rank, got in enumerate(protocol["leaves"]):
        if rank != 1:
            assert got["error"] == "GroupError" and "rank 1 left the group" in got["text"] and got["seconds"] < 1
            assert got["deaths"] == []


def test_a_group_does_not_wait_for_a_late_one_in_its_world_and_a_larger_one_follows(protocol):
    assert [got["place"] for got in protocol["two_groups"]] == [[0, 2], [1, 2], [1, 2], [0, 2]]
    assert all(got["seconds"] < 0.8 for got in protocol["two_groups"])  # the others come after 1 s
    assert all(got["all"] == "00010203" for got in protocol["two_groups"])


def test_no_thread_and_no_message_is_left_over(protocol):
    assert all((got["threads"], got["sends"]) == (2, 0) for got in protocol["leaks"])  # the main and MPI's own


def test_a_killed_rank_is_named_by_the_others_within_a_second_and_they_go_on_and_end():
    lines, done = run(3, "death", "-disable-auto-cleanup", before=SURVIVE)
    killed = next(line["killed"] for line in lines if "killed" in line)
    survivors = {line["rank"]: line for line in lines if "error" in line}
    assert sorted(survivors) == [0, 1], done.stderr
    for line in survivors.values():
        assert line["error"] == "RankDiedError" and "rank 2 died" in line["text"]
        assert line["at"] - killed < 1 and line["dead"] == [2]
    assert done.returncode == 137  # of the killed one: the others left without an error, and without MPI_Finalize


def test_a_rank_that_is_killed_before_it_joins_is_named_within_five_seconds():
    """Fails without `_look_for_dead` in the polls: MPI itself never tells."""
    lines, done = run(3, "unjoined", "-disable-auto-cleanup", before=SURVIVE)
    killed = next(line["killed"] for line in lines if "killed" in line)
    survivors = {line["rank"]: line for line in lines if "error" in line}
    assert sorted(survivors) == [0, 1], done.stderr
    for line in survivors.values():
        assert line["error"] == "RankDiedError" and "rank 2 (pid" in line["text"] and "'join'" in line["text"]
        assert line["at"] - killed < 5


def test_ranks_on_two_hosts_join_over_mpi_with_one_token(protocol):
    for got in protocol["hosts"]:
        assert got["names"] == ["node-0", "node-0", "node-1", "node-1"] and got["got"] == [64] * 4
        assert "span host node-0 (ranks 0, 1), host node-1 (ranks 2, 3)" in got["fds"]
        assert got["wrong"].endswith("rank 2 has another group token (DWDP_GROUP_TOKEN) than the other ranks")


def test_a_process_that_ends_before_mpi_starts_makes_the_others_fail_at_the_deadline():
    lines, done = run(2, "early")
    assert lines[0]["error"] == "GroupTimeoutError" and "MPI_Init did not return within 1 s" in lines[0]["text"]
    assert lines[0]["seconds"] < 3 and done.returncode == 3


def test_another_mpi_than_the_launchers_is_said_to_be_that():
    mpirun()
    lines, _ = run(None, "alone")
    assert lines[0]["error"] == "ConfigError"
    assert "rank 1 of 4, but MPI says 0 of 1" in lines[0]["text"] and "DWDP_MASTER_ADDR" in lines[0]["text"]


def test_without_mpi4py_the_error_says_how_to_install_it_and_what_needs_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.setattr(mpi_world, "_world", None)
    with pytest.raises(ConfigError, match=r"pip install 'dwdp\[mpi\]'.*DWDP_MASTER_ADDR and DWDP_MASTER_PORT"):
        mpi.MpiGroup()
