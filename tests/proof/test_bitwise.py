"""DWDP moves bytes and computes nothing: its logits are bit for bit those of replicated weights."""

from __future__ import annotations

import functools
import logging
import threading
from collections import Counter

import pytest
import torch

from dwdp.weights import copy, mover, transfers
from tests.support.system import DENSE, prompt, replicated, shared, write_random

LENGTH, CHUNK, DECODE = 14, 9, 2  # a whole chunk, the rest of one, two steps


def pairs(num_experts: int, n: int) -> dict[str, tuple[int, int]]:
    """One (size, stride) of every partition kind that fits, found by the definitions of the kinds."""
    found = {"balanced": (0, 0)}
    if n == 1:
        return found
    if num_experts % n == 0:
        found["uniform"] = (num_experts // n, num_experts // n)
    for stride in range(num_experts // n, 0, -1):
        size = num_experts - (n - 1) * stride
        if stride < size <= 2 * stride + 2:
            found["redundant"] = (size, stride)
            break
    size = -(-num_experts // n)
    if (n - 1) * size < num_experts < n * size:
        found["capped"] = (size, size)
    return found


CASES = [
    (num_experts, n, kind, dtype)
    for num_experts in (7, 32, 33)
    for n in (2, 3, 4)
    for kind in pairs(num_experts, n)
    for dtype in ("float32", "bfloat16")
    if num_experts != 32 or dtype == "float32" or kind == "uniform"  # the other kinds are in bfloat16 with 7 and 33
]


def compute(rank) -> dict[str, torch.Tensor]:
    """Whole prefill, chunked prefill with decode, of this rank's own prompt, and of rank 0's."""
    tokens = prompt(rank.rank, LENGTH)
    return {
        "prefill": rank.logits(tokens),
        "chunks": rank.logits(tokens, chunk_size=CHUNK, decode=DECODE),
        "again": rank.logits(prompt(0, LENGTH)),
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    @functools.cache
    def model(num_experts: int):
        folder = tmp_path_factory.mktemp("models") / f"e{num_experts}"
        return write_random(folder, num_experts=num_experts, num_experts_per_token=3)

    return model


@pytest.fixture(scope="module")
def references(models):
    @functools.cache
    def reference(num_experts: int, dtype: str):
        def body(rank):
            found = []
            for r in range(4):
                tokens = prompt(r, LENGTH)
                found.append({
                    "prefill": rank.logits(tokens),
                    "chunks": rank.logits(tokens, chunk_size=CHUNK, decode=DECODE),
                    "again": rank.logits(prompt(0, LENGTH)),
                })  # fmt: skip
            return found

        return replicated(models(num_experts), body, dtype=dtype)

    return reference


def check_counters(counters: dict) -> None:
    assert counters["demand_fetches"] == 0 and counters["fences"] == 0 and counters["restarts"] == 0
    assert counters["forwards"] > 1 and counters["primed_forwards"] == counters["forwards"] - 1


@pytest.mark.parametrize("num_experts, n, kind, dtype", CASES)
def test_logits_equal_the_replicated_run_bit_for_bit(models, references, num_experts, n, kind, dtype):
    """Mutation-checked: a plan that skips its last slice makes every case fail (see test_negative_controls)."""
    size, stride = pairs(num_experts, n)[kind]

    def body(rank):
        return compute(rank), rank.report(), rank.manager.partition.kind

    results = shared(
        models(num_experts), n, body, dtype=dtype,
        dwdp={"num_experts_per_worker": size, "num_prefetch_experts": stride},
    )  # fmt: skip
    for rank, (logits, report, found_kind) in enumerate(results):
        assert found_kind == kind
        for name, value in references(num_experts, dtype)[rank].items():
            assert torch.equal(logits[name], value), (rank, name)
        check_counters(report["counters"])
        ledger = report["ledger"]
        for key in ("expert_moved_bytes", "dense_moved_bytes", "slot_bytes", "ring_bytes", "stored_bytes"):
            assert ledger[key] > 0, key


@pytest.mark.parametrize("num_slots", [3, 4])
def test_more_ring_slots_change_no_bit(models, references, num_slots):
    def body(rank):
        return compute(rank), rank.report()

    for rank, (logits, report) in enumerate(shared(models(7), 2, body, dwdp={"num_prefetch_slots": num_slots})):
        assert all(torch.equal(logits[k], v) for k, v in references(7, "float32")[rank].items())
        check_counters(report["counters"])


DENSE_CASES = [None, {"segments": "attn"}, {"store_chunk_mb": 1}, {"own_rows": "map"}, {"roots": "discover"}]


@pytest.mark.parametrize("dense", DENSE_CASES)
def test_experts_alone_attention_alone_a_chunked_store_mapped_rows_and_discovery_change_no_bit(
    models, references, dense
):
    def body(rank):
        return compute(rank), rank.report()

    for rank, (logits, report) in enumerate(shared(models(7), 3, body, dense=dense and {**DENSE, **dense})):
        assert all(torch.equal(logits[k], v) for k, v in references(7, "float32")[rank].items())
        check_counters(report["counters"])
        assert (report["ledger"]["dense_moved_bytes"] == 0) == (dense is None)


TRANSFERS = [
    # dwdp section, environment -> the transfer, its kernel
    ({}, {}, "per_slice", None),
    ({"contention_opt": True}, {}, "batched", None),
    ({"prefetch_gather": True}, {}, "gather", "tma"),
    ({"prefetch_gather": True, "gather_kernel": "ldst"}, {}, "gather", "ldst"),
    ({"prefetch_gather": True, "contention_opt": True}, {}, "gather", "tma"),
    ({}, {"DWDP_PREFETCH_GATHER": "1"}, "gather", "tma"),
    ({"prefetch_gather": True, "contention_opt": True}, {"DWDP_PREFETCH_GATHER": "0"}, "batched", None),
    ({"prefetch_gather": True, "gather_kernel": "tma"}, {"TRTLLM_DWDP_GATHER_KERNEL": "ldst"}, "gather", "ldst"),
]


@pytest.mark.parametrize("dwdp, environ, transfer, kernel", TRANSFERS)
def test_every_transfer_moves_experts_and_dense_weights_bit_for_bit(
    models, references, dwdp, environ, transfer, kernel, monkeypatch, caplog
):
    """The sizes of slice and tile are made small, so that rows of this model are many of them.

    Mutation-checked: a batch that is planned without its last slice is refused by set-up's verification (what is lost
    later changes the logits, see test_negative_controls); a Transfer that ignores one of the fields.
    """
    monkeypatch.setattr(transfers, "SLICE_UNIT_BYTES", 4096)
    monkeypatch.setattr(transfers, "TILE_BYTES", 4096)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    caplog.set_level(logging.INFO, "dwdp")
    barrier = threading.Barrier(3)

    def body(rank):
        barrier.wait(30)
        if rank.rank == 0:
            ran.clear()  # from here on no set-up copies
        barrier.wait(30)
        return compute(rank), rank.report(), rank.manager.report

    ran = count_submissions(monkeypatch)
    for rank, (logits, report, setup) in enumerate(shared(models(33), 3, body, dwdp=dwdp)):
        for part in ("experts", "dense"):
            assert (setup[part]["transfer"], setup[part]["gather_kernel"]) == (transfer, kernel)
        for name, value in references(33, "float32")[rank].items():
            assert torch.equal(logits[name], value), (rank, name)
        check_counters(report["counters"])
    shown = transfer if kernel is None else f"{transfer} ({kernel})"
    lines = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith(f"expert transfer: {shown}, ") for line in lines) == 3, "once a rank"
    assert sum("dense DWDP committed" in line and line.endswith(f"transfer {shown}") for line in lines) == 3
    # What really ran, experts and dense: each dense row of a rank's own is a plain copy with every transfer.
    assert ran["plain"] > 0
    assert (ran["batched"] > 0) == (transfer == "batched")
    assert {name for name in ("tma", "ldst") if ran[name]} == ({kernel} if kernel else set())


def count_submissions(monkeypatch) -> Counter:
    """How often each kind of submission runs, over all ranks."""
    ran, run = Counter(), copy.run_plan

    def counted(plan):
        ran["batched"] += bool(plan.batch)
        ran["plain"] += len(plan.slices)
        if plan.gather is not None:
            ran[plan.gather.kernel] += 1
        run(plan)

    monkeypatch.setattr(mover, "run_plan", counted)
    return ran


def test_one_rank_alone_computes_the_same(models, references):
    def body(rank):
        return compute(rank), rank.report()

    ((logits, report),) = shared(models(32), 1, body, dense=None)
    assert all(torch.equal(logits[k], v) for k, v in references(32, "float32")[0].items())
    assert report["ledger"]["ring_bytes"] == 0


@pytest.mark.parametrize("expert_format, fp8", [("mxfp4", False), ("nvfp4", False), ("nvfp4", True)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_experts_and_fp8_projections_change_no_bit(tmp_path, expert_format, fp8, dtype):
    model = write_random(
        tmp_path / "m", expert_format=expert_format, fp8_attention=fp8, num_experts=7,
        moe_intermediate_size=32, routed_expert_hidden_size=64,
    )  # fmt: skip

    expected = replicated(model, lambda rank: rank.logits(prompt(0, LENGTH), chunk_size=CHUNK, decode=2), dtype=dtype)
    results = shared(
        model, 2, lambda rank: (rank.logits(prompt(0, LENGTH), chunk_size=CHUNK, decode=2), rank.report()),
        dtype=dtype,
    )  # fmt: skip
    for logits, report in results:
        assert torch.equal(logits, expected)
        check_counters(report["counters"])
