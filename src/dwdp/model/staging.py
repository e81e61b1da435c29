"""Host memory that bytes pass through on their way from a file to where they belong, and the copies out of it.

[Note: staging] Bytes whose place is host memory of the file's dtype are read there and never come here. All others
wait in one of BUFFERS buffers: pinned where the place is on a GPU, so that the copy runs by itself. A buffer is read
into again when the event behind its last copy has come; one more than reads are in flight, so that nobody waits for the
copy that was just begun.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from dwdp.model.read_plan import MAX_PIECES, MAX_READ_NBYTES

ALIGNMENT = 64  # of each piece, so that it can be seen as any dtype
BUFFER_NBYTES = MAX_READ_NBYTES + MAX_PIECES * ALIGNMENT
BUFFERS = 6


class HostCopies:
    """Copies within host memory, over when they return."""

    pinned = False

    def readable_into(self, room: Tensor, dtype: torch.dtype) -> bool:
        """Whether the bytes of a file's tensor of `dtype` may be read into `room` as they are."""
        return room.device.type == "cpu" and room.dtype == dtype and room.is_contiguous()

    def copy(self, room: Tensor, staged: Tensor) -> None:
        """staged: as many elements, in the file's dtype; they become those of `room`."""
        room.copy_(staged)

    def mark(self) -> Any:
        """What to `synchronize` with before memory that was copied from is written to; None for nothing."""
        return None


class CudaCopies(HostCopies):
    """Copies from pinned memory on the device's current stream; dtypes are changed there."""

    pinned = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def copy(self, room: Tensor, staged: Tensor) -> None:
        room.copy_(staged, non_blocking=True)

    def mark(self) -> Any:
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def copies_to(device: str | torch.device) -> HostCopies:
    """The copies for a model whose weights are on `device`."""
    device = torch.device(device)
    return CudaCopies(device) if device.type == "cuda" else HostCopies()


class Buffer:
    """memory: uint8 [BUFFER_NBYTES]."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.bytes = memoryview(memory.numpy())
        self.event: Any = None  # behind the last copy out of it


class Staging:
    """BUFFERS buffers in one piece of memory, allocated when the first is taken; for one thread."""

    def __init__(self, copies: HostCopies) -> None:
        self._copies = copies
        self._free: deque[Buffer] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return 0 if self._free is None else BUFFERS * BUFFER_NBYTES

    def take(self) -> Buffer:
        """The buffer that was given back first, once nothing is copied from it any more."""
        if self._free is None:
            slab = torch.empty(BUFFERS * BUFFER_NBYTES, dtype=torch.uint8, pin_memory=self._copies.pinned)
            self._free = deque(Buffer(memory) for memory in slab.split(BUFFER_NBYTES))
        buffer = self._free.popleft()
        _wait(buffer)
        return buffer

    def give_back(self, buffer: Buffer) -> None:
        """Copies out of it may still run."""
        buffer.event = self._copies.mark()
        self._free.append(buffer)

    def drain(self) -> None:
        """Every copy out of the buffers is over."""
        for buffer in self._free or ():
            _wait(buffer)


def _wait(buffer: Buffer) -> None:
    if buffer.event is not None:
        buffer.event.synchronize()
        buffer.event = None
