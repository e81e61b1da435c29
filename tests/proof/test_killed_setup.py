"""A rank that is killed or stopped in any phase of the real set-up, that never comes, or that serves the store.

Three rank processes, rank 0 serving the store, expert and dense DWDP on. Each case is one fault; several run side by
side, forked by one process (killed_setup_process.py) that has everything imported.

Mutation-checked: without `_look_for_dead` a rank killed before the join is named after 20 s, without the second look of
the handshake after 8 s; without `sweep_up` the killed rank's folder stays; without the verdict of the watch on the
peers' sockets every later kill is named after 20 s; with a vote behind an exchange that timed out, or 8 s for the
connections whatever the deadline, those stops take more than twice the deadline.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dwdp import env
from tests.support.groups import free_port
from tests.support.system import write_random

SCRIPT = os.path.join(os.path.dirname(__file__), "killed_setup_process.py")
WAVES = {"kill": 6, "stop": 9}  # how many cases at once; those of a stop only wait
NOTHING = {"handles": 0, "mappings": 0, "ranges": 0, "descriptors": 0}
KILL_TIMEOUT, STOP_TIMEOUT = 20.0, 3.0

EARLY = ["announced", "join", "posted join", "connect", "connected", "vote: connecting to peers"]
DENSE = [
    "vote: dense P1", "posted vote: dense P1", "dense P2", "exchange dense P2", "vote: dense P2: descriptors",
    "vote: dense P3", "vote: dense P4", "vote: dense P5",
]  # fmt: skip
EXPERTS = [
    "vote: expert handshake", "expert handles", "exchange expert handles", "vote: expert handles: descriptors",
    "vote: expert mapping", "vote: expert scalars", "setup done",
]  # fmt: skip
PHASES = EARLY + DENSE + EXPERTS
WAITED_FOR = {
    "announce": "'join'",
    "announced": "'join'",
    "posted join": "'connecting to peers'",
    "connect": "'connecting to peers'",
    "connected": "connecting to peers'",  # of the connections or of their vote
    "posted vote: dense P1": "'dense P2'",
}
"""What the others wait in for a rank that stopped there, where it is not the phase itself."""
HOST_PHASES = ["announced", "posted join", "connect", "exchange dense P2", "vote: expert mapping", "setup done"]

CASES = (
    [(at, "kill", 1) for at in PHASES]
    + [(at, "kill", 0) for at in HOST_PHASES]
    + [(at, "kill", 2) for at in ("posted join", "connect", "connected")]
    + [(at, "stop", 1) for at in ["announce", *PHASES]]
    + [("never", "absent", 1), ("never", "absent", 2)]
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """(at, do, victim) -> what killed_setup_process.py found."""
    folder = tmp_path_factory.mktemp("killed")
    model = write_random(folder / "model")
    process = subprocess.Popen(
        [sys.executable, SCRIPT, str(model)],
        env=env.child_environment(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="FATAL", PYTHONPATH=python_path()),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    found = {}
    try:
        for number, wave in enumerate(waves()):
            cases = [described(case, folder / f"{number}-{index}") for index, case in enumerate(wave)]
            process.stdin.write(json.dumps(cases) + "\n")
            process.stdin.flush()
            found |= zip(wave, json.loads(process.stdout.readline()))
    finally:
        process.stdin.close()
        process.wait(20)
        process.stdout.close()
    return found


def waves() -> Iterator[list[tuple]]:
    for kinds in (("kill",), ("stop", "absent")):
        cases = [case for case in CASES if case[1] in kinds]
        size = WAVES[kinds[0]]
        yield from (cases[first : first + size] for first in range(0, len(cases), size))


def described(case: tuple, folder: Path) -> dict:
    at, do, victim = case
    folder.mkdir()
    timeout = KILL_TIMEOUT if do == "kill" else STOP_TIMEOUT
    return {"at": at, "do": do, "victim": victim, "port": free_port(), "folder": str(folder), "timeout": timeout}


def python_path() -> str:
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return os.pathsep.join([os.path.join(root, "src"), root])


def survivors(result: dict, victim: int) -> list[dict]:
    assert result["stuck"] == [], result
    lines = sorted((line for line in result["said"] if "error" in line), key=lambda line: line["rank"])
    assert [line["rank"] for line in lines] == [rank for rank in range(3) if rank != victim], result
    return lines


def fault_time(result: dict) -> float:
    times = [line["fault"] for line in result["said"] if "fault" in line]
    assert times, f"the phase was never reached: {result}"
    return times[0]


def check_nothing_left(line: dict) -> None:
    assert line["live"] in ({}, NOTHING) and line["memfds"] == [], line
    assert line["descriptors"] == [], line
    assert not [name for name in line["threads"] if name.startswith("dwdp")], line


def of(do: str) -> list:
    return [pytest.param(at, victim, id=f"{at} of rank {victim}") for at, what, victim in CASES if what == do]


@pytest.mark.parametrize("at, victim", of("kill"))
def test_a_rank_that_is_killed_is_named_by_all_others_within_five_seconds_and_leaves_nothing(outcomes, at, victim):
    result = outcomes[at, "kill", victim]
    killed = fault_time(result)
    for line in survivors(result, victim):
        assert line["error"] == "RankDiedError" and f"rank {victim}" in line["text"], line
        assert "died" in line["text"] and line["at"] - killed < 5, line
        check_nothing_left(line)
    assert result["ended"][str(victim)] == -9 and result["left"] == []


@pytest.mark.parametrize("at, victim", of("stop"))
def test_a_rank_that_is_stopped_is_named_as_missing_by_the_deadline(outcomes, at, victim):
    result = outcomes[at, "stop", victim]
    stopped = fault_time(result)
    tag = WAITED_FOR.get(at, at.removeprefix("exchange "))
    for line in survivors(result, victim):
        assert line["error"] == "GroupTimeoutError" and f"rank {victim} " in line["text"], line
        assert tag in line["text"], line
        assert line["at"] - stopped < STOP_TIMEOUT + 2.5, line
        check_nothing_left(line)


@pytest.mark.parametrize("at, victim", of("absent"))
def test_a_rank_that_never_comes_is_named_at_the_deadline(outcomes, at, victim):
    result = outcomes[at, "absent", victim]
    for line in survivors(result, victim):
        assert line["error"] == "GroupTimeoutError", line
        assert f"rank {victim} of 3 did not come to 'join'" in line["text"] and "within 3 s" in line["text"]
        assert STOP_TIMEOUT - 0.5 < line["seconds"] < STOP_TIMEOUT + 2.5
        check_nothing_left(line)
    assert result["left"] == []
