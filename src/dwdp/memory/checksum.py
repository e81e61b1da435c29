"""A checksum of bytes that the host and a GPU compute alike and fast.

[Note: the checksum] The bytes, zeros behind them up to a multiple of four, are little-endian 32-bit words w[i]; the
checksum is nbytes * LENGTH + sum of w[i] * (1 + 2 * FACTOR * i), mod 2^64. Every factor is odd, so any change inside
one word shows. Two words that change places show too, less than 2^32 words apart: the difference of their factors,
2 * FACTOR * distance, and that of the words together have fewer than 64 factors of two. A sum has no order, so any
number of threads may add it up.
"""

from __future__ import annotations

import ctypes

import numpy as np

MASK = (1 << 64) - 1
FACTOR = 0x9E3779B97F4A7C15
LENGTH = 0xD1B54A32D192ED03
SIDE = 256
BLOCK_WORDS = SIDE * SIDE
_INDEX = np.arange(SIDE, dtype=np.uint64)


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
    wide = np.empty(min(BLOCK_WORDS, -(-len(words) // SIDE) * SIDE), dtype=np.uint64)
    for start in range(0, len(words), BLOCK_WORDS):
        total += _weighted(words[start : start + BLOCK_WORDS], start, wide)
    if whole < len(data):
        total += int.from_bytes(data[whole:].tobytes(), "little") * (1 + 2 * FACTOR * (whole // 4))
    return total & MASK


def chained(before: int, value: int) -> int:
    """One number for a series of checksums in their order."""
    return (before * FACTOR + value) & MASK


def of_zeros(nbytes: int) -> int:
    """The checksum of so many zero bytes."""
    return nbytes * LENGTH & MASK


def _weighted(words: np.ndarray, start: int, wide: np.ndarray) -> int:
    """Sum of words[i] * (1 + 2 * FACTOR * (start + i)), from the sums of the rows and columns of a square.

    With i = SIDE * row + column the sum of words[i] * i needs a product for each row and each column only; nothing
    overflows, so that numpy's sums are whole numbers. wide: uint64 [BLOCK_WORDS], for this function to use.
    """
    count, rows = len(words), -(-len(words) // SIDE)
    square = wide[: rows * SIDE]
    np.copyto(square[:count], words)
    square[count:] = 0
    square = square.reshape(rows, SIDE)
    by_row, by_column = square.sum(1), square.sum(0)
    total = int(by_row.sum())
    by_place = SIDE * int(np.dot(by_row, _INDEX[:rows])) + int(np.dot(by_column, _INDEX))
    return total + 2 * FACTOR * (by_place + start * total)
