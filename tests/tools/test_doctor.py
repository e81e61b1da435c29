"""`dwdp doctor`: real rank processes probe each other's memory; every planted fault is named with its cure.

Faults inside a rank are planted as doctor_runs.py says. This is host memory; test_doctor_cuda.py has GPUs.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time

import pytest

from dwdp.config.schema import dwdp_section
from dwdp.env import child_environment
from dwdp.model.config import ModelConfig
from dwdp.tools import doctor, doctor_run, plan
from dwdp.tools.cli import run
from tests.tools.doctor_runs import SMALL, alive, check_wrong_byte, examine, faulty, whats


def test_a_healthy_machine_has_every_pair_right_and_no_problem(tmp_path, monkeypatch):
    document = examine(tmp_path, monkeypatch, 3)
    assert document["problems"] == [] and document["copy_bytes"] == SMALL
    assert [(pair["source"], pair["target"]) for pair in document["pairs"]] == [
        (0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1),
    ]  # fmt: skip
    assert all(pair["bytes_ok"] is True and pair["gb_per_s"] > 0 for pair in document["pairs"])
    pid_of = {pair["source"]: pair["pids"][0] for pair in document["pairs"]}
    assert all(pair["pids"] == [pid_of[pair["source"]], pid_of[pair["target"]]] for pair in document["pairs"])
    assert os.getpid() not in pid_of.values()
    assert {row["target"]: row["sources"] for row in document["many_to_one"]} == {0: [1, 2], 1: [0, 2], 2: [0, 1]}
    assert all(row["gb_per_s"] > 0 for row in document["many_to_one"])
    types = {one["type"]: one for one in document["handle_types"]}
    assert types["memfd"]["works"] is True
    assert all(types[name]["tried"] is False and types[name]["why"] for name in ("FABRIC", "POSIX_FD"))
    assert document["transfer"]["used"] == "per_slice" and document["transfer"]["why"]
    assert document["descriptor_passing"]["used"] == "scm_rights"
    limits = document["limits"]
    assert limits["descriptor_budget"] == limits["descriptors_hard"] * 9 // 10
    assert limits["mapping_budget"] == limits["max_map_count"] * 9 // 10
    assert limits["memory_available_bytes"] > 0


def test_a_low_descriptor_limit_and_an_open_socket_folder_are_both_named(tmp_path):
    """The whole command, under the limit; the text says each problem and its cure in one line."""
    folder = tmp_path / "sockets"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    result = subprocess.run(
        [sys.executable, "-m", "dwdp.tools.cli", "doctor", "--ranks", "2"],
        env=child_environment(DWDP_SOCKET_DIR=str(folder), TMPDIR=str(tmp_path)),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
        capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert result.returncode == 1 and result.stderr == ""
    problems = [line for line in result.stdout.splitlines() if line.startswith("Problem: ")]
    assert len(problems) == 2
    assert "RLIMIT_NOFILE (ulimit -Hn) is 64, a budget of 57" in problems[0] and "Cure: raise" in problems[0]
    assert f"ranks 0, 1: the socket folder '{folder}'" in problems[1] and "mode 0755" in problems[1]
    assert f"Cure: make it private: chmod 0700 {folder}," in problems[1]
    assert result.stdout.splitlines()[-1] == "Verdict: 2 problems."
    assert sorted(os.listdir(tmp_path)) == ["sockets"] and os.listdir(folder) == []


def test_ranks_with_different_socket_folders_are_named(tmp_path, monkeypatch):
    folders = [str(tmp_path / name) for name in ("a", "b")]
    document = examine(tmp_path, monkeypatch, 2, env_per_rank=[{"DWDP_SOCKET_DIR": folder} for folder in folders])
    assert all("must share that folder (option DWDP_SOCKET_DIR)" in what for what in whats(document))
    assert any(f" in {folder}:" in what for folder in folders for what in whats(document))
    assert "same folder of mode 0700" in document["problems"][0]["cure"]
    assert document["descriptor_passing"]["socket_folders"] == folders
    assert os.listdir(tmp_path) == []  # they were made for this run
    assert all(pair["bytes_ok"] is None and pair["gb_per_s"] is None for pair in document["pairs"])


def test_a_wrong_byte_is_found_in_its_pair_only_and_a_refused_fallback_is_but_a_note(tmp_path, monkeypatch):
    plant = "seams = copying_with(wrong_byte, host) | {'take': refused}"
    document = examine(tmp_path, monkeypatch, 2, probe=faulty(plant))
    check_wrong_byte(document)
    passing = document["descriptor_passing"]
    assert passing["used"] == "scm_rights" and passing["pidfd_getfd"]["works"] is False
    assert any("not needed" in note and "Operation not permitted" in note for note in document["notes"])


def test_both_ways_to_pass_descriptors_failing_is_named_with_both_causes(tmp_path, monkeypatch):
    document = examine(tmp_path, monkeypatch, 2, probe=faulty("no_rights(); seams = {'take': refused}"))
    assert whats(document)
    for problem in document["problems"]:
        assert "SCM_RIGHTS is not allowed here" in problem["what"] and "pidfd_getfd(pid" in problem["what"]
        assert "CAP_SYS_PTRACE" in problem["cure"]
    passing = document["descriptor_passing"]
    assert passing["used"] is None
    assert passing["scm_rights"]["works"] is False and passing["pidfd_getfd"]["works"] is False


def test_a_rank_that_dies_is_the_one_that_is_named(tmp_path, monkeypatch):
    start = time.monotonic()
    document = examine(tmp_path, monkeypatch, 2, probe=faulty("seams = copying_with(killed, host)"))
    (problem,) = document["problems"]
    pid = next(pair["pids"][0] for pair in document["pairs"] if pair["source"] == 1)
    assert problem["what"].startswith(f"rank 1 (pid {pid}) died (killed by SIGKILL) while mapping and checking")
    assert "dmesg" in problem["cure"]
    assert time.monotonic() - start < 60


def test_a_rank_that_stops_is_named_within_the_bound(tmp_path, monkeypatch):
    """Its peers wait for it, so nothing moves; whoever is behind the others and does not wait holds them up."""
    document = examine(tmp_path, monkeypatch, 2, probe=faulty("seams = copying_with(stopped, host)"), step_seconds=3.0)
    (problem,) = document["problems"]
    assert problem["what"].startswith("rank 1 (pid ")
    assert "hangs while mapping and checking its peers' memory" in problem["what"]
    assert "its process is stopped" in problem["what"] and "SIGSTOP" in problem["cure"]


def test_a_doctor_that_is_killed_leaves_nothing(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "dwdp.tools.cli", "doctor", "--ranks", "2", "--json"],
        env=child_environment(TMPDIR=str(tmp_path)), stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        pids: list[int] = []
        while len(pids) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
            texts = [path.read_text() for path in tmp_path.glob("dwdp-*/events-*")]
            pids = [json.loads(text.splitlines()[0])["pid"] for text in texts if "\n" in text]
        assert len(pids) == 2
        process.send_signal(signal.SIGKILL)
        while (any(map(alive, pids)) or os.listdir(tmp_path)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not any(map(alive, pids)) and os.listdir(tmp_path) == []
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["doctor"], ["--ranks"]),
        (["doctor", "--ranks", "0"], ["--ranks", "0"]),
        (["doctor", "--ranks", "65"], ["--ranks", "65"]),
        (["doctor", "--ranks", "two"], ["--ranks", "two"]),
    ],
)
def test_bad_input_is_refused_in_one_line(capsys, monkeypatch, arguments, words):
    monkeypatch.setattr(subprocess, "Popen", None)
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1
    assert all(word in captured.err for word in words)


def test_an_unreadable_socket_folder_variable_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("DWDP_SOCKET_DIR", " ")
    assert run(["doctor", "--ranks", "2"]) == 2
    assert "DWDP_SOCKET_DIR" in capsys.readouterr().err


def test_what_kimi_k3_needs_is_what_its_config_says():
    config = ModelConfig.from_dict(json.loads(plan.KNOWN_MODELS["kimi-k3"].read_text()))
    tables = 4  # w13, w2 and their scales
    assert doctor.KIMI_K3_TABLES == len(config.moe_layer_indices) * tables


def test_limits_are_judged_by_the_number_of_ranks():
    limits = {"descriptors_hard": 4096, "descriptor_budget": 3686, "max_map_count": 65530, "mapping_budget": 58977}
    assert doctor.limit_problems(limits, 8) == []
    (problem,) = doctor.limit_problems(limits, 16)
    assert "5,888" in problem.what and "3,686" in problem.what and "nofile" in problem.cure
    (problem,) = doctor.limit_problems(limits | {"max_map_count": 2000, "mapping_budget": 1800}, 8)
    assert "3,680" in problem.what and "sysctl" in problem.cure


def test_copies_shrink_with_many_ranks_and_little_memory():
    assert doctor.copy_bytes(4, 16 << 30) == 64 << 20
    for ranks, available in ((64, 1 << 40), (16, 1 << 30), (64, 1 << 20)):
        nbytes = doctor.copy_bytes(ranks, available)
        assert nbytes % doctor.GRANULE_BYTES == 0 and 0 < nbytes < 64 << 20
        assert nbytes == doctor.GRANULE_BYTES or 8 * ranks * nbytes <= available


def test_the_rank_that_holds_up_the_others_is_found_among_waiting_ones():
    """All wait: the one that is a step behind is the cause, not those that wait for it further on."""
    probe = doctor_run.ProbeRun(3, SMALL, memory="host", config=dwdp_section(None, 3))
    for record, (step, waiting) in zip(probe.records, ((5, True), (4, True), (5, False))):
        record.step, record.waiting, record.pid = step, waiting, os.getpid()
    probe._name_the_hung(probe.records, 8.0)
    assert [problem.what.split(" (")[0] for problem in probe.culprits] == ["rank 1"]
