"""The measurements of dense DWDP: with tiny widths on the fake driver, and for real where there is a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.gpu.dense_bench import Bench

ROOT = Path(__file__).parents[2]


def bench(*arguments: str, seconds: float = 115) -> str:
    command = [sys.executable, "-m", "tests.gpu.bench_dense", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_every_case_runs_on_the_fake_driver(tmp_path):
    """Two real processes, their memory a fake GPU's. Fails when a case raises, and when a byte is not the plan's."""
    shown = bench("--fake", "--json", str(tmp_path / "numbers.json"))
    assert "all checks hold" in shown and "WRONG" not in shown and "skipped" not in shown
    for rank in json.loads((tmp_path / "numbers.json").read_text())["ranks"].values():
        numbers = rank["numbers"]
        assert numbers["set-up: moved"] > numbers["capped: moved"] > 0
        assert numbers["set-up: gain"] == numbers["set-up: expected_gain"]
        assert {name for name in numbers if "host_seconds" in name} == {
            f"forwards: host_seconds {name}" for name in ("per_slice", "batched", "gather (tma)")
        }
        assert sum("exposed" in name for name in numbers) == 3


class Meet:
    """In place of a group of one rank."""

    def __init__(self):
        self.aborted = []

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def join(self, info):
        pass

    def allgather_object(self, tag, value):
        return [value]

    def abort(self, reason):
        self.aborted.append(str(reason))


def test_a_case_without_time_is_named_and_one_that_raises_fails_the_run_and_tells_the_peers(monkeypatch):
    """Fails when a case that raises is no failed check, stops the ones behind it, or leaves its peers waiting."""
    bench, meet, ran = Bench(SimpleNamespace(rank=1, size=1), {"fake": True, "seconds": 50}, time.time()), Meet(), []
    monkeypatch.setattr(bench, "group", lambda: meet)

    def raises(bench, meet):
        raise ValueError("lost\na byte")

    bench.case("late", 60, lambda *_: ran.append("late"))
    bench.case("broken", 40, raises)
    bench.case("last", 40, lambda *_: ran.append("last"))
    assert ran == ["last"] and meet.aborted == ["ValueError: lost"]
    assert bench.rows == [
        ("late", "skipped, too little time is left", ""), ("broken", "ValueError: lost", "WRONG")
    ]  # fmt: skip
    assert bench.failed == ["rank 1: broken (ValueError: lost)"]


def test_a_figure_off_its_target_is_marked_and_wrong_bytes_fail():
    bench = Bench(SimpleNamespace(rank=1, size=1), {"fake": False, "seconds": 50}, time.time())
    bench.target("waits", False, "21 us")
    bench.target("hooks", True, "3 ms", host=3)
    bench.check("bytes", True, "5", moved=5)
    assert [row[2] for row in bench.rows] == ["MISSED", "met", "right"] and bench.failed == []
    assert bench.numbers == {"start: host": 3, "start: moved": 5}
    bench.check("bytes", False, "6")
    assert bench.rows[-1][2] == "WRONG" and len(bench.failed) == 1


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_every_case_runs_at_full_width_on_a_gpu():
    assert "all checks hold" in bench(seconds=280)
