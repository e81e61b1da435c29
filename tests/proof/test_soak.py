"""Many forwards with aborts anywhere, and bytes that go wrong while serving."""

from __future__ import annotations

import logging
import random

import pytest
import torch

from dwdp.errors import VerificationError
from dwdp.weights.plan import CopyPlan
from tests.support.system import DENSE, prompt, replicated, shared, write_random

FORWARDS = 500
LAYERS = 4  # managed ones of the tiny model


class Aborted(Exception):
    """What a forward fails with."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_random(tmp_path_factory.mktemp("m") / "model", num_experts=7)


def forward(rank, tokens):
    return rank.loop.forward(torch.tensor([tokens]), rank.model.new_state(1, len(tokens)))


def fail_at_random(rank, random_source):
    """Lets the next forward fail where a random one of its hooks begins or has ended. -> how to take it back."""
    owner, name = random_source.choice(
        [(rank.manager.dense.runtime, hook) for hook in ("h0", "h1", "h2", "h3")]
        + [(rank.manager.experts, hook) for hook in ("bind", "finish")]
    )
    hook, calls = getattr(owner, name), random_source.randrange(1 if name == "h0" else LAYERS)
    behind = random_source.random() < 0.5

    def failing(*arguments):
        nonlocal calls
        calls -= 1
        if calls < 0 and not behind:
            raise Aborted
        hook(*arguments)
        if calls < 0:
            raise Aborted

    setattr(owner, name, failing)
    return lambda: delattr(owner, name)


def test_500_forwards_with_random_aborts_never_find_a_wrong_byte_in_a_slot(model):
    """Fails when H0 trusts what slots hold behind an abort, instead of enqueueing L(first), L(second) again."""
    tokens = prompt(0, 3)
    expected = replicated(model, lambda rank: forward(rank, tokens))

    def body(rank):
        source, aborts, rights = random.Random(rank.rank), 0, 0
        for _ in range(FORWARDS):
            undo = fail_at_random(rank, source) if source.random() < 0.3 else None
            if source.random() < 0.2 and undo is None:
                rank.manager.invalidate_prefetch()
            try:
                logits = forward(rank, tokens)
            except Aborted:
                aborts += 1
            else:
                assert torch.equal(logits, expected)
                rights += 1
            finally:
                if undo is not None:
                    undo()
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
