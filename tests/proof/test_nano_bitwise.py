"""Dense DWDP changes no bit of the logits of nano-k3: attached and standalone, with own rows copied and mapped."""

from __future__ import annotations

import pytest
import torch

from dwdp.executor.messages import WorkItem
from dwdp.executor.request import SamplingParams
from dwdp.executor.settings import model_folder
from tests.support.system import DENSE, lockstep, prompt, replicated, shared

NANO = model_folder("nano-k3")


def compute(rank):
    """Chunks with carried states and decode steps; then a batch, whose states are stacked."""
    items = [WorkItem(i, prompt(i, 4 + 3 * i, vocab=200), SamplingParams(max_tokens=3)) for i in range(2)]
    return {
        "chunks": rank.logits(prompt(5, 23, vocab=200), chunk_size=9, decode=4),
        "hashes": [one.logits_sha256 for one in rank.generate(items, logits_sha256=True)],
    }


def same(found, expected) -> bool:
    return torch.equal(found["chunks"], expected["chunks"]) and found["hashes"] == expected["hashes"]


@pytest.fixture(scope="module")
def references():
    torch.set_num_threads(1)
    return {"attached": [replicated(NANO, compute)] * 2, "standalone": lockstep(NANO, 2, compute)}


@pytest.mark.parametrize("own_rows", ["copy", "map"])
@pytest.mark.parametrize("mode", ["attached", "standalone"])
def test_logits_are_those_of_the_same_configuration_without_it(references, mode, own_rows):
    """Fails when a plan leaves out its last row."""

    def body(rank):
        return compute(rank), rank.report()

    run = shared if mode == "attached" else lockstep
    for (found, report), expected in zip(run(NANO, 2, body, dense={**DENSE, "own_rows": own_rows}), references[mode]):
        assert same(found, expected)
        assert report["ledger"]["dense_moved_bytes"] > 0
        assert report["counters"]["demand_fetches"] == report["counters"]["fences"] == 0
