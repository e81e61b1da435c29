"""Ranks that outlive a killed one serve on with the right bits, name it, and refuse to set up without it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys

from dwdp import env
from dwdp.group.backends import host_store
from tests.support.system import prompt, replicated, write_random

SCRIPT = os.path.join(os.path.dirname(__file__), "survivor_process.py")
RANKS, KILLED, LENGTH = 3, 1, 12


class Rank:
    """A rank process and the JSON lines that it writes."""

    def __init__(self, rank: int, port: int, model: str, tokens: list[int], errors: str) -> None:
        with open(errors, "w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, SCRIPT, str(rank), str(port), model, json.dumps(tokens)],
                env=env.child_environment(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="FATAL"),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
            )  # fmt: skip
        self.errors = errors

    def read(self, key: str) -> dict:
        """The next line that has `key`."""
        for line in self.process.stdout:
            found = json.loads(line)
            if key in found:
                return found
        raise AssertionError(f"no {key!r} any more: {self.stderr()}")

    def go_on(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def stderr(self) -> str:
        with open(self.errors) as file:
            return file.read()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(20)
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()


def test_survivors_compute_the_same_bits_a_hundred_times_and_refuse_a_new_setup(tmp_path):
    """Mutation-checked: without the check for dead ranks in `DwdpManager.setup`, and with a release whose barriers
    do not skip them, this fails."""
    model, tokens = str(write_random(tmp_path / "model")), prompt(0, LENGTH)
    expected = hashlib.sha256(replicated(model, lambda rank: rank.logits(tokens)).numpy().tobytes()).hexdigest()
    store, port = host_store()
    ranks = [Rank(r, port, model, tokens, str(tmp_path / f"stderr-{r}")) for r in range(RANKS)]
    try:
        assert [rank.read("first")["first"] for rank in ranks] == [expected] * RANKS
        victim, survivors = ranks[KILLED], [rank for r, rank in enumerate(ranks) if r != KILLED]
        victim.go_on()
        assert victim.read("forward")["forward"] == 0
        os.kill(victim.process.pid, signal.SIGKILL)  # in one of its forwards; the others wait
        assert victim.process.wait(20) == -signal.SIGKILL
        for rank in survivors:
            rank.go_on()
        for rank in survivors:
            while rank.read("forward")["forward"] < 99:
                pass
            rank.go_on()
        outcomes = [rank.read("release_seconds") for rank in survivors]
        assert [rank.process.wait(20) for rank in survivors] == [0, 0]
    finally:
        for rank in ranks:
            rank.end()
    del store
    print()
    for rank, outcome in zip(survivors, outcomes):
        print(outcome)
        assert outcome["forwards"] == 100 and outcome["different"] == 0
        assert outcome["dead"] == [KILLED] and outcome["committed"]
        refused = outcome["refused"]
        assert refused["setup"]["error"] == "RankDiedError" and f"rank {KILLED} died" in refused["setup"]["text"]
        assert refused["barrier"]["error"] == "RankDiedError"
        assert f"rank {KILLED} died" in refused["barrier"]["text"]
        assert refused["join"]["error"] == "GroupTimeoutError" and refused["join"]["seconds"] < 5
        assert f"rank {KILLED}" in refused["join"]["text"]
        assert outcome["release_seconds"] < 5
        assert outcome["live"] == {"handles": 0, "mappings": 0, "ranges": 0, "descriptors": 0}
        counters = outcome["counters"]
        assert counters["demand_fetches"] == counters["restarts"] == counters["fences"] == 0
        assert "Traceback" not in rank.stderr() and f"rank {KILLED} died" in rank.stderr()
