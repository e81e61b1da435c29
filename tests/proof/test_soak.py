"""Many forwards with aborts anywhere, and bytes that go wrong while serving."""

from __future__ import annotations

import logging

import pytest
import torch

from dwdp.errors import VerificationError
from dwdp.weights.plan import CopyPlan
from tests.support.soak import LAYERS, forward, forward_with_aborts
from tests.support.system import DENSE, prompt, replicated, shared, write_random

FORWARDS = 500


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_random(tmp_path_factory.mktemp("m") / "model", num_experts=7)


def test_500_forwards_with_random_aborts_never_find_a_wrong_byte_in_a_slot(model):
    """Fails when H0 trusts what slots hold behind an abort, instead of enqueueing L(first), L(second) again."""
    tokens = prompt(0, 3)
    expected = replicated(model, lambda rank: forward(rank, tokens))

    def body(rank):
        aborts, rights = forward_with_aborts(rank, tokens, expected, FORWARDS, rank.rank)
        return aborts, rights, rank.manager.dense.runtime.watch_mismatches, rank.report()["counters"]

    for aborts, rights, mismatches, counters in shared(model, 2, body, dense={**DENSE, "debug": 2, "strict": True}):
        assert aborts > 80 and aborts + rights == FORWARDS
        assert mismatches == counters["fences"] == counters["demand_fetches"] == 0
        assert counters["barriers"] > 0 and counters["restarts"] > 0


def test_a_copy_that_skips_bytes_is_reported_with_layer_and_slot(model, caplog):
    caplog.set_level(logging.ERROR)

    def body(rank):
        runtime = rank.manager.dense.runtime
        forward(rank, prompt(0, 3))
        if rank.rank == 1:
            for slot, plan in runtime.plans[3].items():
                runtime.plans[3][slot] = CopyPlan(plan.slices[:-1], plan.nbytes)
        forward(rank, prompt(0, 3))
        return runtime.watch_mismatches

    assert shared(model, 2, body, dense={**DENSE, "debug": 2}) == [0, 2]
    layer = 4  # of the model, whose layer 0 is dense
    assert f"rank 1: slot A1 does not hold the bytes of layer {layer} attention; the first wrong byte is" in caplog.text
    assert f"rank 1: slot D0 does not hold the bytes of layer {layer} MoE-dense" in caplog.text


@pytest.mark.parametrize("what", ["dense", "experts"])
def test_a_bit_flipped_in_a_peers_row_while_serving_is_found_and_named(model, what):
    """Found within k x L forwards, k = verify_every; the rank then admits nothing more."""
    every = 2

    def body(rank):
        for _ in range(3):
            forward(rank, prompt(0, 3))
        rank.manager.group.barrier("serving")
        if rank.rank == 1:
            rank.device.drain()
            if what == "dense":
                rank.manager.dense.weights.store.row(1, 2)[70] ^= 4
            else:
                (table,) = [t for t in rank.manager.experts.transport.tables if (t.spec.pos, t.spec.name) == (1, "w2")]
                rank.manager.experts.transport._own_rows(table)[1].view(-1).view(torch.uint8)[9] ^= 4
        rank.manager.group.barrier("flipped")
        taken = 0
        while rank.manager.verification_error is None and taken < every * LAYERS:
            forward(rank, prompt(0, 3))
            rank.device.drain()
            taken += 1
        error = rank.manager.verification_error
        status = rank.manager.status()
        assert status["verification_error"] == (None if error is None else str(error))
        assert (status["dense"], status["transfer"], status["dead_ranks"]) == ("committed", "per_slice", [])
        if error is not None:
            with pytest.raises(VerificationError):
                rank.logits(prompt(0, 3))
        rank.manager.group.barrier("found")
        return str(error)

    texts = shared(model, 2, body, dwdp={"verify_every": every})
    if what == "dense":  # both ranks gather the row, its owner too
        assert all("layer 2 attention" in text for text in texts)
    else:
        assert "layer 2 table w2, expert row 5 copied from rank 1" in texts[0]
