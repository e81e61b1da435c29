"""Rank threads: results in order, one's failure ends all, and the cause is what is raised."""

import contextvars
import threading
import time

import pytest

from dwdp.errors import GroupError, GroupTimeoutError
from dwdp.group.threads import run_rank_threads

setting = contextvars.ContextVar("setting", default="unset")


def test_results_come_in_rank_order_and_each_rank_has_its_own_context():
    setting.set("outer")

    def body(group):
        assert setting.get() == "outer"
        setting.set(f"rank {group.rank}")
        group.barrier("both have set it")
        return setting.get()

    assert run_rank_threads(3, body) == ["rank 0", "rank 1", "rank 2"]
    assert setting.get() == "outer"


def test_the_cause_is_raised_and_the_others_are_notes_and_nobody_waits_for_the_deadline():
    def body(group):
        if group.rank == 1:
            raise KeyError("boom")
        group.barrier("never complete")

    start = time.monotonic()
    with pytest.raises(KeyError, match="boom") as raised:
        run_rank_threads(3, body, timeout=30)
    assert time.monotonic() - start < 1
    notes = "\n".join(raised.value.__notes__)
    assert "rank 0 raised GroupError" in notes and "rank 2 raised GroupError" in notes
    assert "rank 1 aborted the group 'dwdp': KeyError: 'boom'" in notes


def test_ranks_that_do_not_end_are_named_with_their_stacks(monkeypatch):
    monkeypatch.setattr("dwdp.group.threads.GRACE_SECONDS", 0.2)
    release = threading.Event()

    def stuck_here(group):
        if group.rank == 1:
            release.wait(20)

    with pytest.raises(GroupTimeoutError, match="rank threads 1 did not end") as raised:
        threading.Timer(0.6, release.set).start()
        run_rank_threads(2, stuck_here, timeout=0.1)
    assert "stuck_here" in raised.value.__notes__[0]


def test_a_base_exception_in_one_rank_ends_the_others():
    def body(group):
        if group.rank == 0:
            raise KeyboardInterrupt
        with pytest.raises(GroupError, match="KeyboardInterrupt"):
            group.barrier("b")

    with pytest.raises(KeyboardInterrupt):
        run_rank_threads(2, body, timeout=30)
