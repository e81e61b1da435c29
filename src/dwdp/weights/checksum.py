"""A checksum of bytes that the host and a GPU compute alike and fast.

[Note: the checksum] The bytes, zeros behind them up to a multiple of four, are little-endian 32-bit words w[i]; the
checksum is nbytes * LENGTH + sum of w[i] * (1 + 2 * FACTOR * i), mod 2^64. Every factor is odd, so any change inside
one word shows. Two words that change places show too, less than 2^32 words apart: the difference of their factors,
2 * FACTOR * distance, and that of the words together have fewer than 64 factors of two. A sum has no order, so any
number of threads may add it up.
"""

from __future__ import annotations

import ctypes
import functools

import numpy as np

MASK = (1 << 64) - 1
FACTOR = 0x9E3779B97F4A7C15
LENGTH = 0xD1B54A32D192ED03
BLOCK_WORDS = 1 << 14


def row_checksums(address: int, num_rows: int, row_nbytes: int) -> list[int]:
    """The checksum of each of `num_rows` rows of `row_nbytes` bytes from `address`, in host memory."""
    return [checksum(address + row * row_nbytes, row_nbytes) for row in range(num_rows)]


def checksum(address: int, nbytes: int) -> int:
    """The checksum of the bytes at an address in host memory, see [Note: the checksum]."""
    if not nbytes:
        return 0
    return checksum_of(np.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=np.uint8))


def checksum_of(data: np.ndarray) -> int:
    """data: uint8 [n], contiguous."""
    whole = len(data) // 4 * 4
    total = len(data) * LENGTH
    words = data[:whole].view("<u4")
    for start in range(0, len(words), BLOCK_WORDS):
        total += _weighted(words[start : start + BLOCK_WORDS], start)
    if whole < len(data):
        total += int.from_bytes(data[whole:].tobytes(), "little") * (1 + 2 * FACTOR * (whole // 4))
    return total & MASK


def _weighted(words: np.ndarray, start: int) -> int:
    """Sum of words[i] * (1 + 2 * FACTOR * (start + i)): the block's factors are the first block's and a constant."""
    wide = words.astype(np.uint64)
    return int(np.dot(wide, _factors()[: len(wide)])) + int(wide.sum()) * 2 * FACTOR * start


@functools.cache
def _factors() -> np.ndarray:
    return np.arange(BLOCK_WORDS, dtype=np.uint64) * np.uint64(2 * FACTOR & MASK) + np.uint64(1)
