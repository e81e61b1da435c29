"""Every refusal of the command is one line on stderr that names the culprit, and exit code 2; nothing is
started.

Runs that do start ranks: documents, comparisons and endings of every kind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from dwdp.env import child_environment
from dwdp.tools.cli import run
from tests.executor.checkpoints import write_tiny
from tests.support.groups import free_port
from tests.support.tiny import random_tensors, tiny_model_config


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=64)


@pytest.fixture
def no_rank_is_started(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError(f"a process was started: {arguments}")

    monkeypatch.setattr(subprocess, "Popen", refuse)


def refused(capsys, arguments: list[str], *words: str) -> None:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1 and "Traceback" not in lines[0], captured.err
    assert all(word in lines[0] for word in words), lines[0]


def test_the_version_is_one_line(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"dwdp {version('dwdp')}\n"


@pytest.mark.usefixtures("no_rank_is_started")
def test_what_a_config_file_says_against_the_command_line_is_refused(tiny, capsys, tmp_path):
    file = tmp_path / "dwdp.yaml"
    for text, words in (
        ("{tp_size: 2, attention_dp: true}", ["tp_size 2", "--ranks"]),
        ("dwdp: {page_granules: 1000000000000}", ["dwdp.page_granules", "1000000000000"]),
        ("dwdp: {slots: 3}", ["dwdp.slots", "num_prefetch_slots is one"]),
    ):
        file.write_text(text)
        refused(capsys, command(tiny, "--prompt", "1", "--ranks", "1", "--config", str(file)), *words)


def command(model, *more: str) -> list[str]:
    return ["generate", "--model", str(model), "--device", "cpu", "--quiet", *more]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["command"]),
        (["frobnicate"], ["frobnicate"]),
        (["generate"], ["--model"]),
        (["generate", "--model", "m", "--frobnicate"], ["--frobnicate"]),
        (["generate", "--model", "m", "--ranks", "two"], ["--ranks", "two"]),
        (["generate", "--model", "m", "--ranks=0"], ["--ranks", "0"]),
        (["generate", "--model", "m", "--max-tokens", "0"], ["--max-tokens", "0"]),
        (["generate", "--model", "/nowhere", "--prompt", "a", "--quiet"], ["/nowhere"]),
        (["demo", "--ranks", "1"], ["--ranks", "1"]),
    ],
)
def test_usage_errors_name_the_option_and_its_value(no_rank_is_started, capsys, arguments, words):
    refused(capsys, arguments, *words)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--prompt", "a", "--ranks", "9"], ["8", "9"]),
        (["--prompt", ""], ["prompt 0", "empty"]),
        ([], ["--prompt", "--prompt-file"]),
        (["--prompt", "x" * 60, "--max-tokens", "5"], ["60", "5", "64"]),
        (["--prompt", "a", "--dtype", "int8"], ["dtype", "int8"]),
        (["--prompt", "a", "--device", "tpu"], ["device", "tpu"]),
        (["--prompt", "a", "--top-p", "2"], ["top_p", "2"]),
        (["--prompt", "a", "--top-k", "9" * 30], ["top_k", "9" * 30]),
        (["--prompt", "a\udcff"], ["prompt", "position 1"]),
        (["--prompt-file", "/nowhere/prompts"], ["--prompt-file", "/nowhere/prompts"]),
        (["--prompt", "a", "--config", "/nowhere/c.yaml"], ["/nowhere/c.yaml"]),
    ],
)
def test_a_bad_request_is_refused(no_rank_is_started, capsys, tiny, more, words):
    refused(capsys, command(tiny, *more), *words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("frobnicate: 1\n", ["frobnicate"]),
        ("dwdp:\n  frobnicate: 1\n", ["dwdp.frobnicate"]),
        ("dwdp:\n  num_experts_per_worker: 4\n", ["num_experts_per_worker", "4", "num_prefetch_experts"]),
        ("ranks: 2\nranks: 2\n", ["ranks", "uplicate"]),
        ("dense_dwdp:\n  enabled: yes\n", ["dense_dwdp.enabled", "yes"]),
        ("dwdp:\n  dwdp_size: 3\n", ["dwdp_size", "3", "2"]),
        (f"dwdp:\n  page_granules: {10**20}\n", ["dwdp.page_granules", str(10**20)]),
        (f"dense_dwdp:\n  min_bytes: {10**20}\n", ["dense_dwdp.min_bytes", str(10**20)]),
        ("- 1\n", ["mapping"]),
        ("dwdp: {num_experts_per_worker: 3, num_prefetch_experts: 3}\n", ["3", "8", "4/4"]),
    ],
)
def test_a_bad_config_file_is_refused_by_key_and_value(no_rank_is_started, capsys, tiny, tmp_path, text, words):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    refused(capsys, command(tiny, "--prompt", "a", "--ranks", "2", "--config", str(path)), *words)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DWDP_DENSE", "maybe"),
        ("DWDP_DENSE", ""),
        ("DWDP_DENSE_MIN_BYTES", "-1"),
        ("DWDP_RANK", "x"),
        ("DWDP_SERVE_GRACEFUL_SHUTDOWN_TIMEOUT_S", "soon"),
        ("TRTLLM_SERVE_GRACEFUL_SHUTDOWN_TIMEOUT_S", "0"),
    ],
)
def test_a_bad_variable_is_refused_by_name(no_rank_is_started, capsys, tiny, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    refused(capsys, command(tiny, "--prompt", "a", "--ranks", "2"), name, value)


def test_a_rank_number_outside_the_group_is_refused(no_rank_is_started, capsys, tiny, monkeypatch):
    monkeypatch.setenv("DWDP_RANK", "2")
    refused(capsys, command(tiny, "--prompt", "a", "--ranks", "2"), "DWDP_MASTER_ADDR", "DWDP_MASTER_PORT")
    monkeypatch.setenv("DWDP_MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("DWDP_MASTER_PORT", "1234")
    refused(capsys, command(tiny, "--prompt", "a", "--ranks", "2"), "DWDP_RANK", "2")


def test_broken_checkpoints_are_refused_by_file_and_tensor(no_rank_is_started, capsys, tiny, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    refused(capsys, command(folder, "--prompt", "a"), str(folder))
    (folder / "config.json").write_bytes((tiny / "config.json").read_bytes())
    refused(capsys, command(folder, "--prompt", "a"), str(folder), "safetensors")
    weights = (tiny / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-8])
    refused(capsys, command(folder, "--prompt", "a"), "model.safetensors")
    renamed = weights.replace(b"model.norm.weight", b"model.form.weight")
    (folder / "model.safetensors").write_bytes(renamed)
    refused(capsys, command(folder, "--prompt", "a"), "model.norm.weight", "model.form.weight")


def test_a_text_prompt_without_a_tokenizer_is_refused(no_rank_is_started, capsys, tmp_path):
    folder = write_tiny(tmp_path / "model", tokenizer=False)
    refused(capsys, command(folder, "--prompt", "a"), "tokenizer.json")


def test_a_newline_in_a_message_becomes_a_semicolon(no_rank_is_started, capsys):
    refused(capsys, ["generate", "--model", "no\nsuch", "--prompt", "a", "--quiet"], "no; such")


def start(model, *more: str, env: dict[str, str] | None = None) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "dwdp.tools.cli", *command(model, *more)],
        env=child_environment(**(env or {})),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen, code: int = 0) -> dict:
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert err == ""
    return json.loads(out)


def ranks_of(process: subprocess.Popen, count: int) -> list[int]:
    """The pids of the rank processes that a command has started, once there are so many."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        pids = [
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/cmdline")
            if "dwdp.executor.rank" in _read(path) and _read(path.parent / "status").find(f"PPid:\t{process.pid}\n") > 0
        ]
        if len(pids) == count:
            return pids
        time.sleep(0.1)
    raise AssertionError(f"the command did not start {count} ranks")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def gone(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(_read(Path(f"/proc/{pid}/cmdline")) for pid in pids):
            return True
        time.sleep(0.05)
    return False


RUN = (
    "--prompt",
    "one",
    "--prompt",
    "second",
    "--prompt",
    "3",
    "--max-tokens",
    "4",
    "--ranks",
    "2",
    "--json",
)


def test_the_document_of_a_run_with_dwdp_has_the_outputs_of_other_runs(tiny, tmp_path):
    """Of the replicated run and of independent processes."""
    config = tmp_path / "config.yaml"
    config.write_text("dwdp: {host_granule_bytes: 4096, page_granules: 1}\n")  # a tiny layer gets a ring
    run = (*RUN, "--config", str(config))
    spread, whole = finish(start(tiny, *run)), finish(start(tiny, *run, "--replicated"))
    assert set(spread) == {"outputs", "ranks", "partition"}
    assert spread["partition"] == {"kind": "balanced", "ranges": [[0, 4], [4, 8]]} and whole["partition"] is None
    assert [set(output) for output in spread["outputs"]] == [{"index", "text", "token_ids", "logits_sha256"}] * 3
    assert [output["index"] for output in spread["outputs"]] == [0, 1, 2]
    assert spread["outputs"] == whole["outputs"]
    assert [report["rank"] for report in spread["ranks"]] == [0, 1]
    assert spread["ranks"][0]["ledger"]["ring_bytes"] > 0 == whole["ranks"][0]["ledger"]["ring_bytes"]

    address = {"DWDP_MASTER_ADDR": "127.0.0.1", "DWDP_MASTER_PORT": str(free_port())}
    processes = [start(tiny, *run, env=address | {"DWDP_RANK": str(rank)}) for rank in (0, 1)]
    documents = [finish(process) for process in processes]
    assert [[output["index"] for output in one["outputs"]] for one in documents] == [[0, 2], [1]]
    assert documents[0]["outputs"] + documents[1]["outputs"] == [spread["outputs"][i] for i in (0, 2, 1)]
    assert [[report["rank"] for report in one["ranks"]] for one in documents] == [[0], [1]]
    assert [one["ranks"][0]["pid"] for one in documents] == [process.pid for process in processes]


LONG = ("--prompt", "a", "--prompt", "b", "--max-tokens", "3000", "--ignore-eos", "--ranks", "2", "--json")


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """A model whose completions take long enough to be interrupted."""
    return write_tiny(tmp_path_factory.mktemp("long"))


@pytest.mark.parametrize(
    ("which", "number", "code", "words"),
    [
        ("rank", signal.SIGKILL, 1, ["rank ", "died"]),
        ("command", signal.SIGTERM, 143, ["terminated"]),
        ("command", signal.SIGINT, 130, ["interrupted"]),
    ],
)
def test_however_a_run_is_ended_it_says_so_prints_no_document_and_leaves_nothing(long, which, number, code, words):
    process = start(long, *LONG)
    pids = ranks_of(process, 2)
    time.sleep(1.0)
    os.kill(pids[1] if which == "rank" else process.pid, number)
    out, err = process.communicate(timeout=10)
    assert process.returncode == code and out == ""
    assert len(err.splitlines()) == 1 and all(word in err for word in words), err
    assert gone(pids, 1)


@pytest.mark.parametrize("seconds", [0.5, 1.0, 2.0])
def test_two_signals_in_a_row_end_a_run_at_once_at_any_time_and_leave_no_folder(long, tmp_path, seconds):
    process = start(long, *LONG, env={"TMPDIR": str(tmp_path)})
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=5)
    assert out == "" and process.returncode in (130, 143)
    assert err in ("dwdp: interrupted\n", "dwdp: terminated\n")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_modules_of_the_same_names_and_closed_streams_disturb_nothing(tiny, tmp_path):
    for name in ("torch", "enum", "token", "dwdp"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')")
    program = [sys.executable, "-P", "-m", "dwdp.tools.cli", *command(tiny, "--prompt", "a", "--ranks", "2")]
    script = 'exec "$@" <&- 2>&-'
    process = subprocess.run(
        ["sh", "-c", script, "sh", *program], cwd=tmp_path, env=child_environment(), capture_output=True, timeout=60
    )
    assert process.returncode == 0 and process.stdout and process.stderr == b""


def test_what_is_said_on_a_closed_stderr_is_not_said_on_stdout():
    program = [sys.executable, "-m", "dwdp.tools.cli", *command("/nowhere", "--prompt", "a")]
    process = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", *program], env=child_environment(), capture_output=True, timeout=60
    )
    assert (process.returncode, process.stdout) == (2, b"")


def test_ranks_leave_when_the_command_is_killed_also_in_the_middle_of_their_start(long):
    process = start(long, *LONG)
    pids = ranks_of(process, 2)
    process.kill()
    process.communicate(timeout=10)
    assert gone(pids, 5)


def test_a_fault_that_only_reading_finds_is_one_line_too_and_ends_every_rank(tmp_path):
    tensors = random_tensors(tiny_model_config())
    name = "model.layers.0.self_attn.A_log"
    tensors[name] = tensors[name] + 1.0  # the padding behind the heads must be zeros
    folder = write_tiny(tmp_path / "model", tensors=tensors)
    process = start(folder, *RUN)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2 and out == ""
    assert len(err.splitlines()) == 1 and name in err, err


@pytest.mark.parametrize("victim", [0, 1])
def test_an_independent_process_names_the_rank_that_died_and_prints_no_document(long, victim):
    address = {"DWDP_MASTER_ADDR": "127.0.0.1", "DWDP_MASTER_PORT": str(free_port())}
    processes = [start(long, *LONG, env=address | {"DWDP_RANK": str(rank)}) for rank in (0, 1)]
    try:
        deadline = time.monotonic() + 60
        while not all("memfd:dwdp" in _read(Path(f"/proc/{one.pid}/maps")) for one in processes):
            assert time.monotonic() < deadline and processes[0].poll() is None
            time.sleep(0.1)
        time.sleep(1.0)
        processes[victim].kill()
        survivor = processes[1 - victim]
        out, err = survivor.communicate(timeout=10)
        assert survivor.returncode == 1 and out == ""
        assert len(err.splitlines()) == 1 and f"rank {victim}" in err and "died" in err
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_the_demo_compares_the_hashes_that_it_prints(tiny, capsys, monkeypatch, warm_start):
    from dwdp.tools import demo

    real, runs = demo._run, []

    def recording(*arguments, **options):
        runs.append(real(*arguments, **options))
        return runs[-1]

    monkeypatch.setattr(demo, "_run", recording)
    with warm_start():
        assert demo.run_demo(model=str(tiny), quiet=True)
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "identical: yes"
    hashes = [line.split()[-1] for line in out.splitlines() if line.strip().startswith("logits ")]
    assert len(hashes) == 6 and hashes[0::2] == hashes[1::2] and len(set(hashes)) == 3
    assert "expert ring" in out and "replicated rank 0" in out

    runs[1][0][2].outputs[0].logits_sha256 = "0" * 64
    monkeypatch.setattr(demo, "_run", lambda *_, **__: runs.pop())
    assert not demo.run_demo(model=str(tiny), quiet=True)
    assert capsys.readouterr().out.splitlines()[-1] == "identical: no"
