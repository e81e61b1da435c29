"""The transfers on real memory: right bytes at any length and alignment, and nothing else read or written.

Mutation-checked once, each caught by a test below: the bytes behind the last word left out; the bytes before the first
word left out; a tile that is always whole; a worker that begins at tile 0; words as wide as one address allows.
"""

import ctypes

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dwdp.weights import copy, transfers
from dwdp.weights.plan import CopyPlan, CopySlice
from dwdp.weights.transfers import Transfer, gather_table

TRANSFERS = [Transfer.named(*name) for name in (("per_slice",), ("batched",), ("gather", "tma"), ("gather", "ldst"))]
GUARD = 32


def memory(nbytes):
    """(buffer, its first address that is a multiple of 64)."""
    buffer = (ctypes.c_ubyte * (nbytes + 64))()
    return buffer, -(-ctypes.addressof(buffer) // 64) * 64


@st.composite
def layouts(draw, longest=700):
    """Runs of any length at any address: (bytes of an arena, [(dst offset, src offset, nbytes, peer)])."""
    runs, at = [], GUARD
    for _ in range(draw(st.integers(1, 6))):
        nbytes = draw(st.one_of(st.integers(0, 40), st.integers(0, longest)))
        dst, src = at + draw(st.integers(0, 17)), at + draw(st.integers(0, 17))
        runs.append((dst, src, nbytes, draw(st.integers(0, 3))))
        at += nbytes + 17 + GUARD
    return at, runs


def copied(arena, runs, run):
    """run(slices) between two arenas -> whether the target has exactly the runs' bytes of the source."""
    source_buffer, source = memory(arena)
    target_buffer, target = memory(arena)
    pattern = bytes((i * 7 + i // 251) % 255 + 1 for i in range(arena))
    ctypes.memmove(source, pattern, arena)
    ctypes.memset(target, 0, arena)
    run([CopySlice(target + dst, source + src, nbytes, peer) for dst, src, nbytes, peer in runs])
    expected = bytearray(arena)
    for dst, src, nbytes, _ in runs:
        expected[dst : dst + nbytes] = pattern[src : src + nbytes]
    right = ctypes.string_at(target, arena) == bytes(expected)
    assert ctypes.string_at(source, arena) == pattern
    del source_buffer, target_buffer
    return right


class Accesses:
    """Records what the twin would read and write, in place of doing it."""

    def __init__(self, monkeypatch):
        self.moves = []
        monkeypatch.setattr(copy, "_bulk", lambda dst, src, n, staging: self.moves.append(("bulk", dst, src, n, 16)))
        monkeypatch.setattr(
            copy, "_load_store", lambda dst, src, n, word: self.moves.append(("ldst", dst, src, n, word))
        )


@settings(max_examples=200)
@given(
    runs=st.lists(
        st.tuples(st.integers(0, 63), st.integers(0, 63), st.integers(0, 400), st.integers(1, 4)), max_size=8
    ),
    tile=st.sampled_from([16, 48, 64]),
    workers=st.integers(1, 7),
    kernel=st.sampled_from(["tma", "ldst"]),
)
def test_no_tile_reads_or_writes_outside_its_run_or_twice_or_across_an_alignment(runs, tile, workers, kernel):
    """Addresses alone; each run has a megabyte to itself."""
    slices = [
        CopySlice((1 << 40) + (i << 20) + dst, (1 << 50) + (i << 20) + src, nbytes, peer)
        for i, (dst, src, nbytes, peer) in enumerate(runs)
    ]
    with pytest.MonkeyPatch.context() as patch:
        moves = Accesses(patch).moves
        copy.run_gather(gather_table(slices, [1, 2, 3, 4], kernel, tile), workers)
    found = {}
    for form, dst, src, nbytes, word in moves:
        if nbytes == 0:
            continue
        assert dst % word == src % word == nbytes % word == 0 and nbytes <= tile
        assert form == ("bulk" if kernel == "tma" and word == 16 else "ldst")
        found.setdefault((dst >> 20) - (1 << 20), []).append((dst, src, nbytes))
    for i, run in enumerate(slices):
        at, pieces = run.dst, sorted(found.pop(i, []))
        for dst, src, nbytes in pieces:
            assert dst == at and src - run.src == dst - run.dst
            at += nbytes
        assert at == run.dst + run.nbytes
    assert not found


@pytest.mark.parametrize("transfer", TRANSFERS, ids=str)
@given(layout=layouts(), pos=st.integers(0, 5))
def test_every_transfer_copies_any_runs_right_and_writes_nothing_beside_them(transfer, layout, pos):
    """Rank 0 of 4: some runs are its own rows."""
    arena, runs = layout
    assert copied(arena, runs, lambda pieces: copy.run_plan(transfer.plan(pieces, rank=0, num_ranks=4, pos=pos)))


@pytest.mark.parametrize("transfer", TRANSFERS[1:], ids=str)
def test_runs_of_many_slices_and_tiles_are_copied_right(transfer, monkeypatch):
    monkeypatch.setattr(transfers, "SLICE_UNIT_BYTES", 4096)
    monkeypatch.setattr(transfers, "MAX_SLICES", 40)
    runs, at = [], 0
    for peer, nbytes, dst, src in ((1, 100_001, 0, 0), (2, 65_536, 3, 11), (1, 40_000, 1, 17), (3, 7, 5, 5)):
        runs.append((at + dst, at + src, nbytes, peer))
        at += nbytes + 32
    assert copied(at, runs, lambda pieces: copy.run_plan(transfer.plan(pieces, rank=0, num_ranks=4, pos=1)))


@settings(max_examples=200)
@given(
    layout=layouts(300),
    tile=st.sampled_from([1, 7, 16, 48, 64, 4096]),
    workers=st.integers(1, 7),
    kernel=st.sampled_from(["tma", "ldst"]),
)
def test_tiles_of_any_size_and_any_number_of_workers_copy_right(layout, tile, workers, kernel):
    arena, runs = layout

    def gather(pieces):
        copy.run_gather(gather_table(pieces, [2, 3, 0, 1], kernel, tile), workers)

    assert copied(arena, runs, gather)


def test_the_forms_differ_in_the_bulk_copies_and_both_take_the_widest_words(monkeypatch):
    """At aligned addresses; one byte further apart, both fall back to single bytes."""
    for kernel, apart, expected in (
        ("tma", 0, ("bulk", 16)), ("ldst", 0, ("ldst", 16)), ("tma", 8, ("ldst", 8)), ("ldst", 1, ("ldst", 1)),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            moves = Accesses(patch).moves
            plan = Transfer.named("gather", kernel).plan(
                [CopySlice(1 << 40, (1 << 50) + apart, 4096, 1)], rank=0, num_ranks=2, pos=0
            )
            copy.run_plan(plan)
        assert [(form, word) for form, _, _, nbytes, word in moves if nbytes >= 4000] == [expected]


def test_workers_share_every_row_and_begin_at_different_peers():
    rows = [CopySlice((peer << 30) | 1 << 40, (peer << 30) | 1 << 50, 64 * 10, peer) for peer in (1, 2, 3)]
    table = gather_table(rows, [2, 3, 1], "tma", 64)

    def peers(worker, num_workers=4):
        return [(dst >> 30) & 3 for dst, _, _ in copy.worker_tiles(table, worker, num_workers)]

    assert [peers(worker)[:4] for worker in range(3)] == [[2, 3, 1, 2], [3, 1, 2, 3], [1, 2, 3, 1]]
    assert [len(peers(worker)) for worker in range(4)] == [9, 9, 6, 6]
    assert all(set(peers(worker)) == {1, 2, 3} for worker in range(4))


def test_an_empty_plan_and_an_empty_launch_do_nothing():
    copy.run_plan(CopyPlan((), 0))
    copy.run_gather(gather_table([], [1], "tma", 64))
