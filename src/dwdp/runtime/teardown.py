"""How DWDP's parts are given back: in agreed steps, where a failure is logged and stops nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

logger = logging.getLogger(__name__)

RELEASE_BARRIER_SECONDS = 60.0  # a teardown waits this long for a peer, then goes on without it


def give_back(parts: Iterable, group=None) -> None:
    """Drains, unmaps the peers' memory and releases own memory, each step of all parts before the next one.

    parts: with `drain`, `unmap_imports` and `release_own`, in the order of each step. group: its ranks wait
    (bounded) for each other between the steps, dead ones skipped; None: nobody waits.
    """
    parts = list(parts)
    for step, tag in (
        ("drain", "release: copies drained"),
        ("unmap_imports", "release: peers unmapped"),
        ("release_own", None),
    ):
        for part in parts:
            attempt(getattr(part, step))
        if group is not None and tag is not None:
            attempt(lambda tag=tag: group.barrier(tag, timeout_seconds=RELEASE_BARRIER_SECONDS, skip_dead=True), tag)


def attempt(step: Callable[[], object], what: str | None = None) -> None:
    """A step of a teardown: a failure is logged with its traceback and stops nothing."""
    try:
        step()
    except Exception:
        logger.exception("%s failed; the teardown goes on", what or getattr(step, "__qualname__", step))
