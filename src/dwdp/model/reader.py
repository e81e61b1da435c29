"""The one way in which weights are read: many large reads in file order, several at once, each byte to its place.

[Note: who does what] The thread that loads plans the reads, hands them to a few threads that do nothing but `preadv`,
and takes them back in file order: it copies what passes through staging memory, completes tensors, and calls progress
and read log. So everything but the reads happens in one thread and in one order, an interrupt arrives there, and the
first failure in file order is the one that is raised. The threads are gone before any memory they read into is.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dwdp.errors import CheckpointError
from dwdp.model.checkpoint import DTYPES
from dwdp.model.landing import Landing
from dwdp.model.read_plan import MAX_GAP_NBYTES, Need, Piece, Read, plan_reads
from dwdp.model.safetensors_file import ReadLog
from dwdp.model.staging import ALIGNMENT, BUFFERS, Buffer, HostCopies, Staging

MAX_THREADS = 4
IN_FLIGHT = BUFFERS - 1
# bytes placed so far, bytes to place in all
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ReadResult:
    """needed: bytes of the landings; nbytes: bytes read, with the gaps between; staged: bytes of staging memory."""

    needed: int = 0
    nbytes: int = 0
    reads: int = 0
    staged: int = 0
    seconds: float = 0.0

    def __add__(self, other: ReadResult) -> ReadResult:
        return ReadResult(
            self.needed + other.needed,
            self.nbytes + other.nbytes,
            self.reads + other.reads,
            max(self.staged, other.staged),
            self.seconds + other.seconds,
        )

    def describe(self) -> str:
        rate = self.nbytes / max(self.seconds, 1e-9) / 1e9
        return f"{self.nbytes} bytes in {self.reads} reads, {self.seconds:.2f} s, {rate:.2f} GB/s"


def read_landings(
    folder: Path,
    landings: Sequence[Landing],
    *,
    copies: HostCopies | None = None,
    read_log: ReadLog | None = None,
    progress: Progress | None = None,
) -> ReadResult:
    """Reads what every landing needs from the files of `folder` and completes each, in file order.

    copies: out of staging memory. read_log(file, offset, nbytes) is called for each read, in file order.
    CheckpointError, one line with file and tensor, for a file that cannot be opened or read or is too short;
    whatever a landing raises comes through. Either way no thread and no open file is left, but memory is half written.
    """
    began = time.monotonic()
    run = _Run(folder, landings, copies or HostCopies(), read_log, progress)
    try:
        run.run()
        run.staging.drain()
    finally:
        run.close()
    return ReadResult(
        run.plan.needed, run.plan.nbytes, len(run.plan.reads), run.staging.nbytes, time.monotonic() - began
    )


class _Pending(NamedTuple):
    read: Read
    future: Future
    buffer: Buffer | None
    staged: list[tuple[Piece, int]]  # pieces that pass through the buffer, and where in it they begin


class _Run:
    """One pass over the files."""

    def __init__(self, folder, landings, copies, read_log, progress) -> None:
        self.folder, self.landings, self.copies = folder, landings, copies
        self.read_log, self.progress = read_log, progress
        self.plan = plan_reads([Need(x.entry.file, *x.file_range, DTYPES[x.entry.dtype].itemsize) for x in landings])
        self.staging = Staging(copies)
        self._pool = ThreadPoolExecutor(_num_threads(), thread_name_prefix="dwdp-read")
        self._reads_left = Counter(read.file for read in self.plan.reads)
        self._descriptors: dict[str, int] = {}
        self._rooms: dict[int, Tensor] = {}
        self._bytes_left: dict[int, int] = {}
        self._gap = memoryview(bytearray(MAX_GAP_NBYTES))  # what is read and not needed, by all threads at once
        self._pending: deque[_Pending] = deque()
        self._done = 0

    def run(self) -> None:
        for i, landing in enumerate(self.landings):
            if landing.file_range[1] == 0:
                self._complete(i, self._room(i))
        reads = iter(self.plan.reads)
        while True:
            while len(self._pending) < IN_FLIGHT and (read := next(reads, None)) is not None:
                self._begin(read)
            if not self._pending:
                return
            self._take_back(self._pending.popleft())

    def close(self) -> None:
        """Ends the threads, also when interrupted meanwhile: the memory they read into may go only after them."""
        interrupt = None
        while True:
            try:
                self._pool.shutdown(wait=True, cancel_futures=True)
                break
            except KeyboardInterrupt as error:
                interrupt = error
        self._pending.clear()
        self._rooms.clear()
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
        if interrupt is not None:
            raise interrupt

    def _begin(self, read: Read) -> None:
        buffer, staged, used = None, [], 0
        views: list[memoryview] = []
        at = read.offset
        for piece in read.pieces:
            if piece.at > at:
                views.append(self._gap[: piece.at - at])
            at = piece.at + piece.nbytes
            room = self._rooms.get(piece.need)
            if room is None:
                room = self._rooms[piece.need] = self._room(piece.need)
                self._bytes_left[piece.need] = self.landings[piece.need].file_range[1]
            if self.copies.readable_into(room, DTYPES[self.landings[piece.need].entry.dtype]):
                raw = memoryview(room.view(torch.uint8).numpy())
                views.append(raw[piece.start : piece.start + piece.nbytes])
                continue
            if buffer is None:
                buffer = self.staging.take()
            views.append(buffer.bytes[used : used + piece.nbytes])
            staged.append((piece, used))
            used += -(-piece.nbytes // ALIGNMENT) * ALIGNMENT
        descriptor = self._descriptor(read.file)
        if self.read_log is not None:
            self.read_log(read.file, read.offset, read.nbytes)
        self._pending.append(_Pending(read, self._pool.submit(self._fetch, descriptor, read, views), buffer, staged))

    def _take_back(self, pending: _Pending) -> None:
        pending.future.result()
        read = pending.read
        for piece, at in pending.staged:
            self._place(piece, pending.buffer.memory[at : at + piece.nbytes])
        if pending.buffer is not None:
            self.staging.give_back(pending.buffer)
        self._reads_left[read.file] -= 1
        if not self._reads_left[read.file]:
            os.close(self._descriptors.pop(read.file))
        for piece in read.pieces:
            self._done += piece.nbytes
            self._bytes_left[piece.need] -= piece.nbytes
            if not self._bytes_left[piece.need]:
                self._complete(piece.need, self._rooms.pop(piece.need))
        if self.progress is not None:
            self.progress(self._done, self.plan.needed)

    def _room(self, i: int) -> Tensor:
        return self.landings[i].room()

    def _place(self, piece: Piece, staged: Tensor) -> None:
        dtype = DTYPES[self.landings[piece.need].entry.dtype]
        first, count = piece.start // dtype.itemsize, piece.nbytes // dtype.itemsize
        self.copies.copy(self._rooms[piece.need][first : first + count], staged.view(dtype))

    def _complete(self, i: int, room: Tensor) -> None:
        self.landings[i].landed(room)

    def _descriptor(self, file: str) -> int:
        if file not in self._descriptors:
            self._descriptors[file] = open_file(self.folder / file)
        return self._descriptors[file]

    def _fetch(self, descriptor: int, read: Read, views: list[memoryview]) -> None:
        """In a thread of its own: fills `views`, one after another, from the read's first byte on."""
        done = 0
        while done < read.nbytes:
            try:
                count = os.preadv(descriptor, views, read.offset + done)
            except OSError as error:
                what = self._tensor_at(read, read.offset + done)
                raise CheckpointError(
                    f"{self.folder / read.file}: tensor {what.name} cannot be read: {error.strerror}"
                ) from error
            if count == 0:  # the file shrank after its header was checked
                what = self._tensor_at(read, read.offset + done)
                raise CheckpointError(
                    f"{self.folder / read.file} is truncated: tensor {what.name} ends at byte "
                    f"{what.offset + what.nbytes}, the file at {os.fstat(descriptor).st_size}"
                )
            done += count
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if count:
                views[0] = views[0][count:]

    def _tensor_at(self, read: Read, offset: int):
        piece = next(piece for piece in read.pieces if piece.at + piece.nbytes > offset)
        return self.landings[piece.need].entry


def _num_threads() -> int:
    """Of reading: a rank's share of the cores, as torch has it. More would only take the cores from one another."""
    return max(1, min(MAX_THREADS, torch.get_num_threads()))


def open_file(path: Path) -> int:
    """A descriptor of a regular file, to be read forwards; CheckpointError naming the file where that cannot be."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointError(f"{path} is not a regular file")
        with contextlib.suppress(OSError):  # a hint, which some file systems do not take
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
