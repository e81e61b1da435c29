"""What moves and sums up bytes: on the host here, on a GPU in cuda_mover.py. Nothing else knows which it is.

[Note: movers] A domain has one mover, which lives as long as it does. What it does at once (`run`, `copy`, `row_sums`,
`sums`, `first_differences`, `read`) comes behind everything that was enqueued before on any stream, and is over when it
returns; set-up and control actions use that. Between them only `submission` and `check` are used: what they give goes
to `device.enqueue`, and the host waits for neither.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dwdp.memory.checksum import checksum, row_checksums
from dwdp.weights.copy import copy_slices, first_difference, memory_bytes, run_plan
from dwdp.weights.plan import CopyPlan, CopySlice

if TYPE_CHECKING:
    import torch

Rows = Sequence[tuple[int, int]]
"""(address, bytes) each."""
Pairs = Sequence[tuple[int, int, int]]
"""(address, address, bytes) each."""
Judge = Callable[[list[int]], None]
"""Is given the checksums of rows. It may not raise: nobody would be there to see it."""


class HostMover:
    """Copies and sums of the host's memory, by the thread that runs them."""

    at_rest = True  # rows that a check has summed up are still there when its judge is called

    def submission(self, plan: CopyPlan) -> Any:
        """What a device runs on its copy stream for a plan."""
        return partial(run_plan, plan)

    def run(self, plan: CopyPlan) -> None:
        """Copies what a plan says."""
        run_plan(plan)

    def copy(self, slices: Sequence[CopySlice]) -> None:
        copy_slices(slices)

    def row_sums(self, address: int, num_rows: int, nbytes: int) -> list[int]:
        """The checksum of each of `num_rows` rows of `nbytes` bytes from `address`; see checksum.py."""
        return row_checksums(address, num_rows, nbytes)

    def sums(self, rows: Rows) -> list[int]:
        """The checksum of each row."""
        return [checksum(address, nbytes) for address, nbytes in rows]

    def tensor_sum(self, data: torch.Tensor) -> str:
        """The checksum of a contiguous tensor's bytes, as text."""
        return f"{self.sums([(data.data_ptr(), data.nbytes)])[0]:016x}"

    def first_differences(self, pairs: Pairs) -> list[int | None]:
        """The first byte at which the two pieces of each pair differ, or None."""
        return [first_difference(*pair) for pair in pairs]

    def read(self, address: int, nbytes: int) -> bytes:
        return memory_bytes(address, nbytes)

    def check(self, rows: Callable[[], Rows], judge: Judge) -> HostCheck:
        """A check of rows that a device runs on its copy stream."""
        return HostCheck(self, rows, judge)

    def settle(self) -> None:
        """Everything enqueued is over."""

    def best_kernel(self, asked: str) -> str:
        """The gather's kernel that is used where `asked` (auto, tma, ldst) was asked for."""
        return "tma" if asked == "auto" else asked

    def gather_sms(self) -> int:
        """SMs that a gather holds while it runs."""
        return 0

    def forget(self, plans: Sequence[CopyPlan]) -> None:
        """Gives back what was prepared for plans; no copy of them may be in flight. Idempotent."""

    def close(self) -> None:
        """Gives everything back; idempotent."""


class HostCheck:
    """Runs in the copy stream's thread, so that its result is there at once."""

    def __init__(self, mover: HostMover, rows: Callable[[], Rows], judge: Judge) -> None:
        self._mover, self._rows, self._judge = mover, rows, judge

    def __call__(self) -> None:
        self._judge(self._mover.sums(self._rows()))

    def poll(self) -> bool:
        """Whether no result is outstanding; on CUDA this is where the judge is called."""
        return True

    def close(self) -> None:
        """Gives back what is held; nothing may be in flight. Idempotent."""


HOST_MOVER = HostMover()


def mover_of(domain: Any) -> Any:
    """The mover of a domain; the host's also where there is none, as in a simulation."""
    if domain is None or domain.name == "host":
        return HOST_MOVER
    if domain.mover is None:
        from dwdp.weights.cuda_mover import CudaMover

        domain.mover = CudaMover(domain)
    return domain.mover


class Checks:
    """The sampled checks of a runtime: one each key, prepared once; their results are read when they are there."""

    def __init__(self, mover: Any) -> None:
        self._mover = mover
        self._made: dict[Hashable, Any] = {}
        self._open: list[Any] = []

    def prepare(self, key: Hashable, rows: Callable[[], Rows], judge: Judge) -> None:
        self._made[key] = self._mover.check(rows, judge)

    def enqueued(self, key: Hashable) -> Any:
        """The check of a key, which the caller enqueues now."""
        check = self._made[key]
        if check not in self._open:
            self._open.append(check)
        return check

    def poll(self) -> None:
        """Judges what has been computed; never waits."""
        if self._open:
            self._open = [check for check in self._open if not check.poll()]

    def close(self) -> None:
        """Idempotent; nothing may be in flight."""
        made, self._made, self._open = self._made, {}, []
        for check in made.values():
            check.close()
