"""A release ends within its bound when a peer does not come, and takes no memory from under the peer.

Mutation-checked once: fails with barriers of the release that have no deadline of their own, and with one that ends the
release when it fails.
"""

from __future__ import annotations

import threading
import time

import pytest
import torch

from dwdp.errors import ModelReleasedError
from dwdp.runtime import teardown
from tests.support.system import prompt, replicated, shared, write_random

NOTHING = {"handles": 0, "mappings": 0, "ranges": 0, "descriptors": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_random(tmp_path_factory.mktemp("models") / "tiny", num_experts=7)


def test_a_release_does_not_wait_for_a_peer_longer_than_its_bound_and_the_peer_serves_on(model, monkeypatch, caplog):
    """Rank 1 goes on computing while rank 0, whose rows it reads, has given all its memory back."""
    monkeypatch.setattr(teardown, "RELEASE_BARRIER_SECONDS", 0.3)
    ids = prompt(0, 8)
    expected = replicated(model, lambda rank: rank.logits(ids))
    released, served = threading.Event(), threading.Event()

    def body(rank):
        assert torch.equal(rank.logits(ids), expected)
        if rank.rank == 1:
            assert released.wait(20)
            for _ in range(5):
                assert torch.equal(rank.logits(ids), expected)
            served.set()
            return None
        start = time.monotonic()
        rank.manager.release()
        seconds = time.monotonic() - start
        assert rank.domain.live() == NOTHING and rank.domain.allocated_bytes == 0
        with pytest.raises(ModelReleasedError):
            rank.model(torch.tensor([ids]))
        rank.manager.release()  # once more does nothing
        released.set()
        assert served.wait(20)
        return seconds

    seconds, _ = shared(model, 2, body)
    assert 0.25 < seconds < 3
    for tag in ("release: copies drained", "release: peers unmapped"):
        assert f"{tag} failed; the teardown goes on" in caplog.text
