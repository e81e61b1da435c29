"""Whole set-up under faults: wherever a resource call fails on one rank, all ranks raise and nothing is left.

Four rank threads, dense and expert DWDP on, from the checkpoint to the last collective; the calls that may fail and
how often a clean run makes each are in tests/support/faults.py. Each case ends with a clean run in the same process.
"""

from __future__ import annotations

import threading

import pytest
import torch

from dwdp.errors import GroupError
from dwdp.runtime.setup_dense import DenseSetup
from tests.support.faults import POINTS, Calls, Injected, held, held_again, set_up_ranks
from tests.support.system import DENSE, prompt, replicated, shared, write_random

N, LENGTH = 4, 8
NOTHING = {"handles": 0, "mappings": 0, "ranges": 0, "descriptors": 0}
OPTIONAL = {**DENSE, "required": False}

# point -> how many of its calls fail in turn, from the first to the last of a clean run
SPREAD = {
    "memfd": 4,
    "mmap": 5,
    "seal": 3,
    "exchange_fds": 2,
    "allgather": 13,
    "vote": 2,
    "barrier": 1,
    "copy_slices": 3,
    "row_checksums": 2,
    "check of rows": 2,
    "checksum": 1,
    "first_difference": 2,
    "value_bytes": 1,
}
DENSE_SPREAD = {
    "memfd": 2,
    "mmap": 3,
    "seal": 1,
    "copy_slices": 2,
    "checksum": 1,
    "first_difference": 1,
    "value_bytes": 1,
}


def cases(spread: dict[str, int]) -> list:
    """(point, which, of, rank), with every rank in turn."""
    found = [(point, which, of) for point, of in spread.items() for which in range(of)]
    return [
        pytest.param(
            *case,
            number % N,
            id=f"{case[0]} {case[1] + 1} of {case[2]} on rank {number % N}",
        )
        for number, case in enumerate(found)
    ]


def call_number(which: int, of: int, count: int) -> int:
    return 1 if of == 1 else 1 + round(which * (count - 1) / (of - 1))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return write_random(folder, num_experts=7, num_experts_per_token=3)


@pytest.fixture(scope="module")
def reference(model):
    return replicated(model, lambda rank: [rank.logits(prompt(r, LENGTH)) for r in range(N)])


@pytest.fixture(scope="module")
def experts_alone(model):
    """What is live on each rank where expert DWDP alone serves."""
    return shared(model, N, lambda rank: rank.domain.live(), dense=None, timeout=20.0)


@pytest.fixture(scope="module")
def clean(model):
    """By (point, rank): calls of a whole clean set-up, those until its dense part begins and until it ends."""
    before: dict[tuple[str, int], int] = {}
    dense: dict[tuple[str, int], int] = {}
    with pytest.MonkeyPatch.context() as patch:
        calls = Calls(patch)
        run = DenseSetup.run

        def counting(setup):
            def note(counts):
                counts.update({key: n for key, n in calls.counts.items() if key[1] == setup.group.rank})

            note(before)
            result = run(setup)
            note(dense)
            return result

        patch.setattr(DenseSetup, "run", counting)

        def body(rank):
            return {key: n for key, n in calls.counts.items() if key[1] == rank.rank}

        outcomes = set_up_ranks(model, N, patch, body)
    assert [outcome.text for outcome in outcomes] == [""] * N
    return {key: n for outcome in outcomes for key, n in outcome.found.items()}, before, dense


def check_clean_run(model, reference) -> None:
    for rank, logits in enumerate(shared(model, N, lambda rank: rank.logits(prompt(rank.rank, LENGTH)), timeout=20.0)):
        assert torch.equal(logits, reference[rank]), rank


def test_every_call_that_is_made_to_fail_is_made_by_set_up_on_every_rank(clean):
    total, before, dense = clean
    assert SPREAD.keys() == POINTS.keys()
    for rank in range(N):
        for point, of in SPREAD.items():
            assert total[point, rank] >= of, (point, rank)
        for point, of in DENSE_SPREAD.items():
            assert total[point, rank] >= dense[point, rank], (point, rank)
            assert dense[point, rank] - before.get((point, rank), 0) >= of, (point, rank)


@pytest.mark.parametrize("point, which, of, failing", cases(SPREAD))
def test_a_failing_call_raises_on_every_rank_and_leaves_nothing(
    model, reference, clean, monkeypatch, caplog, point, which, of, failing
):
    number = call_number(which, of, clean[0][point, failing])
    before = held()
    with monkeypatch.context() as patch:
        calls = Calls(patch, point, failing, number)
        outcomes = set_up_ranks(model, N, patch, lambda rank: None)
        assert calls.fired == 1
    for rank, outcome in enumerate(outcomes):
        if rank == failing:
            assert (outcome.error, outcome.text) == (Injected, f"{point} call {number}")
        else:
            assert outcome.error is GroupError and f"rank {failing}" in outcome.text, (rank, outcome)
        assert outcome.live == NOTHING, rank
    assert held_again(before) == before, [thread.name for thread in threading.enumerate()]
    assert "tensors over it are alive" not in caplog.text
    check_clean_run(model, reference)


@pytest.mark.parametrize("point, which, of, failing", cases(DENSE_SPREAD))
def test_with_dense_not_required_every_rank_serves_on_with_replicated_dense_weights(
    model, reference, experts_alone, clean, monkeypatch, caplog, point, which, of, failing
):
    _, earlier, until = clean
    first = earlier.get((point, failing), 0)
    number = first + call_number(which, of, until[point, failing] - first)
    before = held()

    def body(rank):
        assert rank.domain.live() == experts_alone[rank.rank]
        logits = rank.logits(prompt(rank.rank, LENGTH))
        return logits, rank.manager.report["dense"]["status"], rank.report()["ledger"], rank.model.unusable

    with monkeypatch.context() as patch:
        calls = Calls(patch, point, failing, number)
        outcomes = set_up_ranks(model, N, patch, body, dense=OPTIONAL)
        assert calls.fired == 1
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, (rank, outcome.text)
        logits, status, ledger, unusable = outcome.found
        assert status == "abandoned" and unusable is None
        assert ledger["dense_moved_bytes"] == ledger["slot_bytes"] == 0
        assert ledger["expert_moved_bytes"] > 0 and ledger["ring_bytes"] > 0
        assert torch.equal(logits, reference[rank]), rank
    assert held_again(before) == before
    assert "tensors over it are alive" not in caplog.text
