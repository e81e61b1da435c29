"""What rank processes of the GPU tests do; see ranks.py. Each runs where it is imported, in a process of its own."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from dwdp.errors import VerificationError
from tests.gpu.ranks import Site
from tests.support.soak import forward, forward_with_aborts
from tests.support.system import DENSE, prompt

LENGTH, CHUNK, DECODE = 24, 9, 3
TRANSFERS = {
    "per_slice": {},
    "batched": {"contention_opt": True},
    "gather tma": {"prefetch_gather": True, "gather_kernel": "tma"},
    "gather ldst": {"prefetch_gather": True, "gather_kernel": "ldst"},
}
DENSE_FORMS = (None, {"own_rows": "map"}, {"segments": "attn"}, {"load": "sharded"}, {"debug": 2, "strict": True})


def compute(rank, number: int) -> list[torch.Tensor]:
    own = prompt(number, LENGTH)
    return [rank.logits(own, chunk_size=CHUNK, decode=DECODE), rank.logits(own), rank.logits(prompt(0, 2 * LENGTH))]


def check_report(rank) -> dict:
    report = rank.report()
    counters, ledger = report["counters"], report["ledger"]
    for key in ("demand_fetches", "fences", "restarts"):
        assert counters[key] == 0, counters
    watched = rank.manager.dense is not None and rank.manager.dense.runtime.watch
    assert (counters["synchronisations"] > 0) == watched, counters
    assert counters["primed_forwards"] == counters["forwards"] - 1, counters
    held = ledger["stored_bytes"] + ledger["ring_bytes"] + ledger["slot_bytes"]
    assert held == rank.domain.allocated_bytes > 0, (ledger, rank.domain.allocated_bytes)
    assert ledger["moved_bytes"] == ledger["expert_moved_bytes"] + ledger["dense_moved_bytes"]
    return report


def attached(site: Site, model: Path) -> dict[str, dict]:
    """Every transfer, and every form of dense DWDP, gives the bits of replicated weights on the same GPU."""
    with site.replicated(model) as rank:
        expected = compute(rank, site.rank)
        assert (expected[0].device.type, rank.model.lm_head.weight.device.type) == ("cpu", site.device)
    reports = {}
    forms = [(name, dwdp, {}) for name, dwdp in TRANSFERS.items()]
    forms += [(f"per_slice {dense}", {}, dense) for dense in DENSE_FORMS]
    for name, dwdp, dense in forms:
        with site.shared(model, dwdp=dwdp, dense=None if dense is None else {**DENSE, **dense}) as rank:
            for got, want in zip(compute(rank, site.rank), expected):
                assert torch.equal(got, want), f"{name}: differs by {(got - want).abs().max()}"
            reports[name] = check_report(rank)
            assert rank.manager.report["experts"]["transfer"] == name.split()[0]
            assert rank.domain.describe()["handle_type"] in ("posix_fd", "fabric")
            if dense is not None and dense.get("debug"):
                assert rank.manager.dense.runtime.watch_mismatches == 0
    return reports


def standalone(site: Site, model: Path) -> None:
    """Every transfer of dense DWDP on its own gives the bits of the same instance without it."""
    with site.lockstep(model, dense=None) as rank:
        expected = compute(rank, site.rank)
    for copy, environ in (
        ("per_slice", {}), ("batched", {}), ("gather", {"DWDP_GATHER_KERNEL": "tma"}),
        ("gather", {"DWDP_GATHER_KERNEL": "ldst"}),
    ):  # fmt: skip
        with site.lockstep(model, dense={**DENSE, "copy": copy}, environ=environ) as rank:
            for got, want in zip(compute(rank, site.rank), expected):
                assert torch.equal(got, want), (copy, environ)
            assert rank.report()["ledger"]["slot_bytes"] > 0


def soak(site: Site, model: Path, forwards: int) -> dict:
    """Aborts anywhere, every slot checked at every layer."""
    tokens = prompt(0, 3)
    with site.replicated(model) as rank:
        expected = forward(rank, tokens)
    dense = {**DENSE, "debug": 2, "strict": True}
    with site.shared(model, dwdp={"prefetch_gather": bool(site.size % 2)}, dense=dense) as rank:
        aborts, rights = forward_with_aborts(rank, tokens, expected, forwards, site.rank)
        counters, mismatches = rank.report()["counters"], rank.manager.dense.runtime.watch_mismatches
    assert aborts > forwards // 7 and aborts + rights == forwards
    assert mismatches == counters["fences"] == counters["demand_fetches"] == 0
    assert counters["barriers"] > 0 and counters["restarts"] > 0
    return counters


def checks(site: Site, model: Path, what: str) -> str:
    """A bit that flips in a peer's row while serving is found by the sampled checks, beside the forwards."""
    with site.shared(model, dwdp={"verify_every": 1}) as rank:
        manager, tokens = rank.manager, prompt(0, 3)
        for _ in range(9):
            forward(rank, tokens)
        rank.device.drain()
        assert manager.verification_error is None and manager.experts.verified_forward >= 8
        manager.group.barrier("serving")
        rank.device.drain()
        if site.rank == 1 and what == "dense":
            manager.dense.weights.store.row(1, 2)[70] ^= 4
        elif site.rank == 1:
            (table,) = [t for t in manager.experts.transport.tables if (t.spec.pos, t.spec.name) == (1, "w2")]
            manager.experts.transport._own_rows(table)[1].view(-1).view(torch.uint8)[9] ^= 4
        manager.experts.mover.settle()
        manager.group.barrier("flipped")
        for _ in range(9):
            forward(rank, tokens)
        rank.device.drain()
        error = manager.verification_error
        if error is not None:
            with pytest.raises(VerificationError):
                rank.logits(tokens)
        manager.group.barrier("found")
        return str(error)


def updated(site: Site, old: Path, new: Path) -> None:
    """The weights of another checkpoint in place, and back."""
    expected = {}
    for model in (old, new):
        with site.replicated(model) as rank:
            expected[model] = compute(rank, site.rank)
    with site.shared(old, dense=None) as rank:
        for model in (old, new, old):
            if model is new or rank.loop.forwards:
                rank.update_weights(str(model))
            assert all(map(torch.equal, compute(rank, site.rank), expected[model]))


def survived(site: Site, model: Path, killed: int) -> list[int]:
    """A rank is killed; what the others read of its memory stays right, and they end."""
    with site.replicated(model) as rank:
        expected = compute(rank, site.rank)
    with site.shared(model) as rank:
        assert all(map(torch.equal, compute(rank, site.rank), expected))
        rank.manager.group.barrier("served")
        if site.rank == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        until = time.monotonic() + 20
        while killed not in rank.manager.group.dead:
            assert time.monotonic() < until, "the death was not noticed"
            time.sleep(0.05)
        for _ in range(10):
            assert all(map(torch.equal, compute(rank, site.rank), expected))
        dead = sorted(rank.manager.group.dead)
        start = time.monotonic()
    assert time.monotonic() - start < 60
    return dead
