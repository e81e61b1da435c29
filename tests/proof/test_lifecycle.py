"""The attached lifecycle is as it was written down: set-up, two forwards, an abort, recovery, teardown."""

from __future__ import annotations

from tests.support.lifecycle import GOLDEN, record


def test_the_attached_lifecycle_reads_as_recorded():
    """Fails when a fill at H2, a wait at H1 or the barrier after an abort is left out, or a collective is added."""
    assert record() == GOLDEN.read_text()
