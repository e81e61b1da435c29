"""The ledger is the memory: what it says is what the kernel counts, and all of it comes back."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dwdp import LLM
from dwdp.env import child_environment
from dwdp.model.writer import random_checkpoint
from dwdp.runtime.setup_experts import outside_bytes
from tests.support.system import prompt, replicated, shared, write_random
from tests.support.tiny import tiny_config_dict

LARGE = {
    "hidden_size": 512, "vocab_size": 2048, "intermediate_size": 1024, "num_experts": 80, "num_hidden_layers": 9,
    "moe_intermediate_size": 256, "routed_expert_hidden_size": 256, "num_attention_heads": 8,
    "num_key_value_heads": 8, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32, "v_head_dim": 64,
}  # fmt: skip


def large_config() -> dict:
    config = tiny_config_dict(**LARGE)
    config["linear_attn_config"] = config["linear_attn_config"] | {
        "num_heads": 8, "head_dim": 64, "full_attn_layers": [4, 8, 9], "kda_layers": [1, 2, 3, 5, 6, 7],
    }  # fmt: skip
    return config


def shmem_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.search(r"^Pss_Shmem:\s+(\d+) kB", text, re.M)[1]) * 1024


def memfds(pid: int) -> list[str]:
    return re.findall(r"memfd:(dwdp\S+)", Path(f"/proc/{pid}/maps").read_text())


@pytest.mark.timeout(240)
def test_the_ledger_equals_what_the_kernel_counts_on_a_large_checkpoint(tmp_path):
    folder = tmp_path / "large"
    random_checkpoint(folder, large_config(), seed=1)
    assert sum(f.stat().st_size for f in folder.iterdir()) >= 256 * 2**20
    with LLM(folder, ranks=2, dtype="bfloat16", device="cpu", dense_dwdp={"enabled": True, "min_bytes": 1}) as llm:
        for rank in range(2):
            llm.logits(prompt(rank, 40, 2048), rank=rank)
        report = llm.report()
        pids = [entry["pid"] for entry in report]
        during = sum(map(shmem_bytes, pids))
        own = {name for pid in pids for name in memfds(pid)}
        assert own and all(re.fullmatch(r"dwdp-[\w-]+-[01]", name) for name in own), own
        llm.release()
        assert [memfds(pid) for pid in pids] == [[], []]
        before = sum(map(shmem_bytes, pids))
        ledgers = [entry["ledger"] for entry in report]
        promised = sum(e["stored_bytes"] + e["slot_bytes"] + e["ring_bytes"] for e in ledgers)
        assert abs(during - before - promised) <= 0.02 * promised, (during, before, promised)
        for e in ledgers:
            assert e["moved_bytes"] == e["expert_moved_bytes"] + e["dense_moved_bytes"]
            # Half of what is moved is this rank's own; the handles add their rounding.
            assert abs(e["freed_bytes"] - e["moved_bytes"] / 2) <= 0.02 * e["moved_bytes"]


@pytest.fixture(scope="module")
def few_large_tables(tmp_path_factory):
    """Two MoE layers: a table of a rank is so large that one more of it cannot be missed."""
    config = tiny_config_dict(
        hidden_size=512, vocab_size=2048, num_hidden_layers=3, num_experts=40, moe_intermediate_size=1024,
        routed_expert_hidden_size=512,
    )  # fmt: skip
    config["linear_attn_config"] |= {"full_attn_layers": [3], "kda_layers": [1, 2]}
    folder = tmp_path_factory.mktemp("large") / "m"
    random_checkpoint(folder, config, seed=1)
    assert sum(f.stat().st_size for f in folder.iterdir()) >= 230 * 2**20
    small = write_random(tmp_path_factory.mktemp("small") / "m")
    return folder, small, 20 * 2 * 1024 * 512 * 2  # 20 experts' w13 in bf16


@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", ["direct", "copied"])
def test_the_peak_while_loading_and_setting_up_is_what_rests(few_large_tables, how):
    """Loaded into handles. Where tables are copied into them the peak has one table of a rank more, which this
    measure must show."""
    folder, warm_up, table = few_large_tables
    root = Path(__file__).parent
    child = subprocess.run(
        [sys.executable, str(root / "loading_process.py"), str(folder), str(warm_up), how],
        env=child_environment(PYTHONPATH=os.pathsep.join([str(root.parent.parent), *sys.path])),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout.splitlines()[-1])
    weights = found["stored_bytes"] + found["replicated_bytes"]
    assert found["stored_bytes"] > 230 * 2**20, found
    small = table // 3
    if how == "copied":
        assert found["moving"] > weights + table - small, (found, weights)
        return
    assert found["moving"] <= weights + small, (found, weights)
    assert found["peak"] <= weights + found["ring_bytes"] + small, (found, weights)
    assert found["peak"] <= found["rest"] + small, (found, weights)


def test_replicated_bytes_are_those_of_the_live_storages(tmp_path):
    """With DWDP on they are the replicated run's less everything that is moved."""
    model = write_random(tmp_path / "m", num_experts=8)

    def live(rank):
        rank.logits(prompt(0, 8))
        return outside_bytes(rank.model, rank.domain), rank.report()["ledger"]

    whole, ledger = replicated(model, live)
    assert ledger["replicated_bytes"] == whole
    assert ledger["moved_bytes"] == ledger["stored_bytes"] == ledger["ring_bytes"] == ledger["slot_bytes"] == 0
    for live_bytes, ledger in shared(model, 2, live):
        assert ledger["replicated_bytes"] == live_bytes == whole - ledger["moved_bytes"]


def census() -> tuple[int, int, int]:
    """(descriptors, memfd mappings, threads) of this process."""
    return len(os.listdir("/proc/self/fd")), len(memfds(os.getpid())), threading.active_count()


def test_five_setups_with_different_numbers_of_ranks_leave_nothing_behind(tmp_path):
    model = write_random(tmp_path / "m", num_experts=7)
    counts = []
    for n in (2, 3, 4, 2, 3):
        shared(model, n, lambda rank: rank.logits(prompt(0, 8)))
        counts.append(census())
    assert counts[1:] == counts[:1] * 4 and counts[0][1] == 0, counts


def test_five_releases_and_setups_in_the_same_rank_processes_leave_nothing_behind(tmp_path):
    model = write_random(tmp_path / "m", num_experts=7)

    def of(pid: int) -> tuple[int, int, int]:
        status = Path(f"/proc/{pid}/status").read_text()
        threads = int(re.search(r"^Threads:\s+(\d+)", status, re.M)[1])
        return len(os.listdir(f"/proc/{pid}/fd")), len(memfds(pid)), threads

    with LLM(model, ranks=2, device="cpu", dtype="float32", dense_dwdp={"enabled": True, "min_bytes": 1}) as llm:
        pids = [entry["pid"] for entry in llm.report()]
        first, counts = llm.logits(prompt(0, 8)), []
        for _ in range(5):
            llm.release()
            counts.append([of(pid) for pid in pids])
            llm.setup()
            assert (llm.logits(prompt(0, 8)) == first).all()
        assert [entry["pid"] for entry in llm.report()] == pids
    assert counts[1:] == counts[:1] * 4, counts
    assert all(mapped == 0 for _, mapped, _ in counts[0])
