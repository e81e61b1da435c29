"""Which bytes of which files are read, in which order and in how large pieces. Nothing is read here; no torch.

[Note: what a read costs] A disk or a file server takes about as long to begin a read as to deliver CHEAP_GAP bytes, so
what is needed on both sides of a smaller gap is read at once, gap included. A gap of up to MAX_GAP is read along only
where it spares a read of less than MIN_READ. All gaps together stay below OVER_READ of what is needed, smallest first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MIB = 1 << 20
MIN_READ_NBYTES = 8 * MIB
# Halves of a read that is just too large, less a gap at both ends, are not below MIN_READ_NBYTES.
MAX_READ_NBYTES = 20 * MIB
MAX_GAP_NBYTES = MIB
CHEAP_GAP_NBYTES = 64 << 10
OVER_READ = 0.04  # of the bytes needed; with the headers less than 5 %
MAX_PIECES = 500  # of a read: with a gap between any two they are one system call (1,024 buffers)


class Need(NamedTuple):
    """Bytes [offset, offset + nbytes) of a file; `unit`: bytes of an element, which no read cuts."""

    file: str
    offset: int
    nbytes: int
    unit: int = 1


class Piece(NamedTuple):
    """Bytes [start, start + nbytes) of need number `need`, which lie at byte `at` of the file."""

    need: int
    start: int
    nbytes: int
    at: int


@dataclass(frozen=True, slots=True)
class Read:
    """One read: bytes [offset, offset + nbytes) of a file, the pieces in it in file order, gaps between them."""

    file: str
    offset: int
    nbytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """reads: file by file, offsets ascending. needed: bytes asked for; nbytes: bytes read, gaps included."""

    reads: tuple[Read, ...]
    needed: int

    @property
    def nbytes(self) -> int:
        return sum(read.nbytes for read in self.reads)


def plan_reads(needs: Sequence[Need]) -> ReadPlan:
    """The reads that cover every need once, in file order.

    Each read has at least MIN_READ_NBYTES where its neighbourhood has them, at most MAX_READ_NBYTES and MAX_PIECES
    pieces; all together read at most 1 + OVER_READ times what is needed. Needs without bytes are in no read.
    ValueError for needs that overlap.
    """
    order = sorted((i for i, need in enumerate(needs) if need.nbytes), key=lambda i: (needs[i].file, needs[i].offset))
    gaps = list(_gaps(needs, order))
    needed = sum(needs[i].nbytes for i in order)
    joined = _bridge([needs[i].nbytes for i in order], gaps, int(needed * OVER_READ))
    reads: list[Read] = []
    start = 0
    for k in range(1, len(order) + 1):
        if k == len(order) or not joined[k - 1]:
            reads += _split(needs, order[start:k])
            start = k
    return ReadPlan(tuple(reads), needed)


def _gaps(needs: Sequence[Need], order: list[int]) -> Iterator[int | None]:
    """Bytes between each need and the next one; None between files."""
    for i, j in zip(order, order[1:]):
        one, other = needs[i], needs[j]
        if one.file != other.file:
            yield None
            continue
        gap = other.offset - one.offset - one.nbytes
        if gap < 0:
            raise ValueError(f"{one.file}: bytes {other.offset}..{one.offset + one.nbytes} are needed twice")
        yield gap


def _bridge(sizes: list[int], gaps: list[int | None], budget: int) -> list[bool]:
    """Whether each need is read together with the next one; see [Note: what a read costs]."""
    joined = [gap == 0 for gap in gaps]
    run = list(range(len(sizes)))  # need -> another of its run, by which the run is found

    def find(k: int) -> int:
        while run[k] != k:
            run[k] = run[run[k]]
            k = run[k]
        return k

    def join(k: int) -> None:
        left, right = find(k), find(k + 1)
        run[right] = left
        nbytes[left] += nbytes[right] + gaps[k]

    nbytes = list(sizes)
    for k, together in enumerate(joined):
        if together:
            join(k)
    for k in sorted((k for k, gap in enumerate(gaps) if gap and gap <= MAX_GAP_NBYTES), key=lambda k: (gaps[k], k)):
        if gaps[k] > budget:
            break
        if gaps[k] <= CHEAP_GAP_NBYTES or min(nbytes[find(k)], nbytes[find(k + 1)]) < MIN_READ_NBYTES:
            budget -= gaps[k]
            joined[k] = True
            join(k)
    return joined


def _split(needs: Sequence[Need], run: list[int]) -> Iterator[Read]:
    """The reads of a run: equal shares of it, cut between elements, a gap at a cut left out."""
    first, last = needs[run[0]], needs[run[-1]]
    begin, span = first.offset, last.offset + last.nbytes - first.offset
    count = -(-span // (MAX_READ_NBYTES - 16))  # a cut moves by less than an element
    share, cut = 1, begin + span // count
    pieces: list[Piece] = []
    for i in run:
        _, offset, nbytes, unit = needs[i]
        start = 0
        while start < nbytes:
            if pieces and (offset + start >= cut or len(pieces) == MAX_PIECES):
                yield _read(first.file, pieces)
                pieces = []
            while offset + start >= cut:
                share += 1
                cut = begin + share * span // count
            end = nbytes if share == count else min(nbytes, start + max(unit, (cut - offset - start) // unit * unit))
            pieces.append(Piece(i, start, end - start, offset + start))
            if end < nbytes:  # the cut is at most an element behind this
                yield _read(first.file, pieces)
                pieces, share = [], share + 1
                cut = begin + share * span // count
            start = end
    if pieces:
        yield _read(first.file, pieces)


def _read(file: str, pieces: list[Piece]) -> Read:
    start, last = pieces[0].at, pieces[-1]
    return Read(file, start, last.at + last.nbytes - start, tuple(pieces))
