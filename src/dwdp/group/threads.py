"""A whole group in one process: a thread per rank and a HashStore. For tests and tools; nothing is
started."""

from __future__ import annotations

import contextvars
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from dwdp.errors import GroupError, GroupTimeoutError
from dwdp.group.backends import StoreGroup

GRACE_SECONDS = 2.0
"""How long the threads may take to end once their groups were aborted."""


@dataclass
class _RankThread:
    rank: int
    group: StoreGroup
    result: Any = None
    error: BaseException | None = None
    ended_at: float = 0.0
    thread: threading.Thread = field(init=False)

    def run(self, fn: Callable[[StoreGroup], Any]) -> None:
        try:
            with self.group:
                self.result = fn(self.group)
        except BaseException as error:
            self.error = error
        finally:
            self.ended_at = time.monotonic()


def run_rank_threads(
    n: int,
    fn: Callable[[StoreGroup], Any],
    *,
    timeout: float = 60.0,
    name: str = "dwdp",
    socket_dir: str | None = None,
) -> list[Any]:
    """Calls `fn(group)` for every rank of a group of `n`, each in its own thread and copy of this context.

    -> what each returned. timeout: seconds for each collective and for the whole. A rank that raises aborts
    its group, so that the others end too; then the error that came first is raised, one that is not itself
    about the group before any that is, with the others' as notes. Raises GroupTimeoutError with the stacks of
    the ranks that do not end.
    """
    store = dist.HashStore()
    ranks = [
        _RankThread(
            rank,
            StoreGroup(store, rank, n, name=name, timeout_seconds=timeout, socket_dir=socket_dir),
        )
        for rank in range(n)
    ]
    for one in ranks:
        context = contextvars.copy_context()
        one.thread = threading.Thread(
            target=context.run, args=(one.run, fn), name=f"{name}-rank-{one.rank}", daemon=True
        )
    try:
        for one in ranks:
            one.thread.start()
        _join(ranks, timeout)
        running = [one for one in ranks if one.thread.is_alive()]
    except BaseException as error:
        _abort_all(ranks, f"{type(error).__name__}: {error}")
        raise
    if running:
        stacks = [_stack(one) for one in running]
        _abort_all(ranks, f"the run took longer than {timeout:g} s")
        late = GroupTimeoutError(
            f"rank threads {', '.join(str(one.rank) for one in running)} did not end within {timeout:g} s"
        )
        for stack in stacks:
            late.add_note(stack)
        raise late
    failed = sorted(
        (one for one in ranks if one.error is not None),
        key=lambda one: (isinstance(one.error, GroupError), one.ended_at),
    )
    if failed:
        first = failed[0]
        for other in failed[1:]:
            if other.error is not first.error:
                first.error.add_note(f"rank {other.rank} raised {type(other.error).__name__}: {other.error}")
        raise first.error
    return [one.result for one in ranks]


def _join(ranks: list[_RankThread], timeout: float) -> None:
    # A collective's own error says more than this one, so it gets the time to arrive.
    deadline = time.monotonic() + timeout + GRACE_SECONDS
    for one in ranks:
        one.thread.join(max(0.0, deadline - time.monotonic()))


def _abort_all(ranks: list[_RankThread], reason: str) -> None:
    for one in ranks:
        one.group.abort(reason)
    for one in ranks:
        if one.thread.ident is not None:
            one.thread.join(GRACE_SECONDS)


def _stack(one: _RankThread) -> str:
    frame = sys._current_frames().get(one.thread.ident)
    where = "".join(traceback.format_stack(frame)) if frame is not None else "(just ended)\n"
    return f"rank {one.rank} is in:\n{where}"
