"""What the proofs rest on is shown to fail: each mechanism is taken away once and its absence is seen."""

from __future__ import annotations

import threading

import pytest
import torch

from dwdp.errors import DwdpError
from dwdp.runtime.dense_schedule import DenseSchedule
from dwdp.runtime.schedule import PrefetchSchedule
from dwdp.weights import copy
from tests.support.system import DENSE, prompt, replicated, shared, write_random

LENGTH = 20
NO_CHECKS = {"verify": "off", "verify_every": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_random(tmp_path_factory.mktemp("m") / "model", num_experts=7)


@pytest.fixture(scope="module")
def expected(model):
    return replicated(model, lambda rank: rank.logits(prompt(0, LENGTH), chunk_size=8, decode=2))


def compute(rank):
    return rank.logits(prompt(0, LENGTH), chunk_size=8, decode=2), rank.report()["counters"]


def close_only(segment):
    def hook(self, pos):
        yield from self._close(segment, pos)
        if segment == "D" and pos == self.num_layers - 1:
            self.open = self._started = False

    return hook


def test_without_fills_layers_are_fetched_on_demand_and_the_logits_stay_right(model, expected, monkeypatch):
    """The fill at H3 makes up for a missing one at H2 when dense DWDP is attached, so both are taken away."""
    monkeypatch.setattr(DenseSchedule, "h2", close_only("A"))
    monkeypatch.setattr(DenseSchedule, "h3", close_only("D"))
    for logits, counters in shared(model, 2, compute):
        assert counters["demand_fetches"] > 0
        assert torch.equal(logits, expected)


def test_attention_alone_without_its_fill_at_h2_is_fetched_on_demand(model, expected, monkeypatch):
    """Standalone order: nothing fills at H3, so a missing fill at H2 shows as demand fetches."""
    monkeypatch.setattr(DenseSchedule, "h2", close_only("A"))
    before = DenseSchedule.__init__

    def standalone(self, segments, *, prefetch_next_pass):
        before(self, segments, prefetch_next_pass=False)

    monkeypatch.setattr(DenseSchedule, "__init__", standalone)
    for logits, counters in shared(model, 2, compute, dense={**DENSE, "segments": "attn"}):
        assert counters["demand_fetches"] > 0
        assert torch.equal(logits, expected)


def test_a_missing_fill_at_h2_shows_in_the_order_of_the_copies(model, monkeypatch):
    def order(rank):
        rank.logits(prompt(0, LENGTH))
        copies = [op for op in rank.device.trace if op["kind"] == "copy"]
        return [(op["slot"][0], op["layer"]) for op in copies]

    right = shared(model, 2, order, trace=True)[0]
    monkeypatch.setattr(DenseSchedule, "h2", close_only("A"))
    wrong = shared(model, 2, order, trace=True)[0]
    assert sorted(right) == sorted(wrong) and right != wrong


def test_without_priming_into_the_next_forward_no_forward_is_primed(model, expected, monkeypatch):
    before = DenseSchedule.__init__

    def unprimed(self, segments, *, prefetch_next_pass):
        before(self, segments, prefetch_next_pass=False)

    monkeypatch.setattr(DenseSchedule, "__init__", unprimed)
    for logits, counters in shared(model, 2, compute):
        assert counters["forwards"] > 2 and counters["primed_forwards"] == 0
        assert torch.equal(logits, expected)


def test_experts_alone_are_not_primed_when_the_last_fill_stops_at_the_last_layer(model, expected, monkeypatch):
    fill = PrefetchSchedule._fill

    def stops(self, by_start=False):
        for action in fill(self, by_start):
            if not by_start and action.layer < self.num_slots:
                return
            yield action

    monkeypatch.setattr(PrefetchSchedule, "_fill", stops)
    for logits, counters in shared(model, 2, compute, dense=None):
        assert counters["primed_forwards"] == 0
        assert torch.equal(logits, expected)


@pytest.mark.parametrize("dense", [None, DENSE], ids=["experts", "experts and dense"])
@pytest.mark.parametrize("transfer", [{}, {"contention_opt": True}, {"prefetch_gather": True}], ids=str)
def test_a_copy_that_skips_a_slice_after_setup_gives_wrong_logits(model, expected, dense, transfer, monkeypatch):
    """Every slot was filled right in setup, so the skipped bytes are another layer's, not zeros."""
    skipping = threading.Event()

    def skip_last(slices):
        slices = list(slices)
        return run(slices[:-1] if skipping.is_set() and len(slices) > 1 else slices)

    def skip_last_tile(*args):
        found = list(tiles(*args))
        return found[:-1] if skipping.is_set() else found

    run, tiles = copy.copy_slices, copy.worker_tiles
    monkeypatch.setattr(copy, "worker_tiles", skip_last_tile)
    if "prefetch_gather" not in transfer:
        monkeypatch.setattr(copy, "copy_slices", skip_last)

    def body(rank):
        skipping.set()
        return rank.logits(prompt(0, LENGTH), chunk_size=8, decode=2)

    dwdp = NO_CHECKS | transfer
    assert any(not torch.equal(x, expected) for x in shared(model, 3, body, dwdp=dwdp, dense=dense))


def test_a_row_changed_in_its_owners_store_after_setup_changes_the_peers_logits(model, expected):
    """The peer really reads its owner's bytes at every gather; nothing is kept from setup."""
    changed = threading.Barrier(2)

    def body(rank):
        if rank.rank == 1:
            with torch.no_grad():
                experts = rank.model.moe_layers()[-1]
                start, end = rank.manager.partition.ranges[1]
                experts.w2[start:end] += 1.0
        changed.wait(20)
        rank.manager.invalidate_prefetch()
        return rank.logits(prompt(0, LENGTH), chunk_size=8, decode=2)

    changed_logits = shared(model, 2, body, dwdp=NO_CHECKS, dense=None)
    assert all(not torch.equal(x, expected) for x in changed_logits)
    assert torch.equal(*changed_logits)


@pytest.mark.parametrize("dense", [None, DENSE], ids=["experts", "experts and dense"])
def test_a_byte_lost_in_a_copy_is_caught_by_setup_on_every_rank(model, dense, monkeypatch):
    run = copy.copy_slices

    def flips(slices):
        slices = list(slices)
        run(slices)
        if threading.current_thread() is not threading.main_thread() and slices and slices[-1].nbytes > 512:
            import ctypes

            byte = ctypes.c_ubyte.from_address(slices[-1].dst + 7)
            byte.value ^= 1

    monkeypatch.setattr(copy, "copy_slices", flips)
    errors = []

    def body(rank):
        raise AssertionError("set-up served a wrong byte")

    with pytest.raises((DwdpError, RuntimeError)) as caught:
        shared(model, 2, body, dense=dense)
    errors.append(str(caught.value))
    assert "layer" in errors[0] and "rank" in errors[0], errors
