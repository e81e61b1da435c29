"""Running copies on the host: `memmove`, which releases the interpreter lock, and a twin of the gather kernel.

[Note: the gather's workers] A launch is a few resident workers that no order joins: none may need what another has
done, and any number of them moves every tile once. A worker takes every so many tiles of each peer's row and goes
round the peers, beginning at another one than its neighbour, so that the links to all peers are busy all the time. The
twin runs the workers one after the other. (The CUDA kernel has a table of its own: gather_kernel.py.)
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Iterator

import numpy as np

from dwdp.weights.plan import CopyPlan, CopySlice, GatherTable

WORKERS = 4
COMPARED_BYTES = 1 << 20  # at a time
VECTOR_BYTES = 16  # the widest load and store of a thread, and what a bulk copy's addresses and length are multiples of

_of_thread = threading.local()


def copy_slices(slices: Iterable[CopySlice]) -> None:
    """Copies each slice. The addresses must be mapped: a wrong one kills the process."""
    for piece in slices:
        ctypes.memmove(piece.dst, piece.src, piece.nbytes)


def memory_bytes(address: int, nbytes: int) -> bytes:
    """The bytes at an address."""
    return ctypes.string_at(address, nbytes)


def first_difference(left: int, right: int, nbytes: int) -> int | None:
    """The first byte at which the bytes at two addresses differ, or None; without a mask of all of them."""
    for start in range(0, nbytes, COMPARED_BYTES):
        count = min(COMPARED_BYTES, nbytes - start)
        one, other = ((ctypes.c_ubyte * count).from_address(address + start) for address in (left, right))
        differ = np.frombuffer(one, dtype=np.uint8) != np.frombuffer(other, dtype=np.uint8)
        if differ.any():
            return start + int(differ.argmax())
    return None


def run_plan(plan: CopyPlan) -> None:
    """Copies everything that a layer's plan submits."""
    if plan.batch:
        copy_slices(plan.batch)
    if plan.gather is not None:
        run_gather(plan.gather)
    if plan.slices:
        copy_slices(plan.slices)


def run_gather(table: GatherTable, num_workers: int = WORKERS) -> None:
    """One launch; see [Note: the gather's workers]."""
    staging = _staging(table.tile_nbytes) if table.kernel == "tma" else None
    for worker in range(num_workers):
        for dst, src, nbytes in worker_tiles(table, worker, num_workers):
            copy_tile(dst, src, nbytes, staging)


def worker_tiles(table: GatherTable, worker: int, num_workers: int) -> Iterator[tuple[int, int, int]]:
    """(dst, src, nbytes) of the tiles of one worker: tiles worker, worker + num_workers, ... of every row."""
    rows, descriptors = table.rows, table.descriptors
    at = [row.first for row in rows]  # the descriptor that the worker has come to in each row
    for tile in range(worker, max((row.tiles for row in rows), default=0), num_workers):
        for step in range(len(rows)):
            index = (worker + step) % len(rows)
            if tile >= rows[index].tiles:
                continue
            while at[index] + 1 < rows[index].end and descriptors[at[index] + 1].first_tile <= tile:
                at[index] += 1
            dst, src, nbytes, first_tile = descriptors[at[index]]
            offset = (tile - first_tile) * table.tile_nbytes
            yield dst + offset, src + offset, min(table.tile_nbytes, nbytes - offset)


def copy_tile(dst: int, src: int, nbytes: int, staging: int | None) -> None:
    """One tile, as the kernel's form says. staging: the address of the worker's buffer (tma), or None (ldst).

    Words are as wide as both addresses can be aligned to at once, 16 bytes at most; the bytes before the first and
    behind the last word go one by one. tma sends the words through `staging` as one bulk copy, where they are 16 bytes
    wide, which a bulk copy needs; ldst loads and stores them.
    """
    apart = (dst - src) % VECTOR_BYTES
    word = apart & -apart or VECTOR_BYTES
    head = min(-dst % word, nbytes)
    body = (nbytes - head) // word * word
    behind = head + body
    _load_store(dst, src, head, 1)
    if staging is not None and word == VECTOR_BYTES:
        _bulk(dst + head, src + head, body, staging)
    else:
        _load_store(dst + head, src + head, body, word)
    _load_store(dst + behind, src + behind, nbytes - behind, 1)


def _bulk(dst: int, src: int, nbytes: int, staging: int) -> None:
    ctypes.memmove(staging, src, nbytes)
    ctypes.memmove(dst, staging, nbytes)


def _load_store(dst: int, src: int, nbytes: int, word: int) -> None:
    if nbytes:
        _words(dst, nbytes, word)[:] = _words(src, nbytes, word)


def _words(address: int, nbytes: int, word: int) -> np.ndarray:
    """[nbytes / word] over memory, of words of `word` bytes without a meaning."""
    return np.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=f"V{word}")


def _staging(nbytes: int) -> int:
    """The address of this thread's buffer, as its workers run in turn; made once, not at every launch."""
    buffer = getattr(_of_thread, "staging", None)
    if buffer is None or len(buffer) < nbytes:
        buffer = _of_thread.staging = (ctypes.c_char * nbytes)()
    return ctypes.addressof(buffer)
