"""Every needed byte is in one read; reads are large, in file order and hold few bytes that nobody needs."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from dwdp.env import child_environment
from dwdp.model import read_plan
from dwdp.model.read_plan import MAX_PIECES, MAX_READ_NBYTES, MIN_READ_NBYTES, Need, plan_reads

MIB = 1 << 20


def check(needs, plan):
    """What holds for every plan."""
    seen = {i: 0 for i in range(len(needs))}
    for read in plan.reads:
        at = read.offset
        for piece in read.pieces:
            need = needs[piece.need]
            assert read.file == need.file and piece.at == need.offset + piece.start >= at
            assert piece.start == seen[piece.need] and piece.nbytes > 0, "pieces of a need follow one another"
            assert piece.start % need.unit == piece.nbytes % need.unit == 0, "an element is cut"
            seen[piece.need] += piece.nbytes
            at = piece.at + piece.nbytes
        assert read.pieces[0].at == read.offset and at == read.offset + read.nbytes, "a gap at an end"
        assert read.nbytes <= MAX_READ_NBYTES and len(read.pieces) <= MAX_PIECES
    assert [seen[i] for i in seen] == [need.nbytes for need in needs]
    places = [(read.file, read.offset) for read in plan.reads]
    assert places == sorted(places)
    for one, other in zip(plan.reads, plan.reads[1:]):
        assert one.file != other.file or one.offset + one.nbytes <= other.offset
    assert plan.needed == sum(need.nbytes for need in needs)
    assert plan.needed <= plan.nbytes <= 1.04 * plan.needed


def row_of(sizes, gap=0, file="f", start=1000, unit=2):
    needs = []
    for nbytes in sizes:
        needs.append(Need(file, start, nbytes, unit))
        start += nbytes + gap
    return needs


@pytest.mark.parametrize("seed", range(60))
def test_any_needs_are_planned(seed):
    rng = random.Random(seed)
    sizes = [rng.choice([0, 8, 4096, 100_000, 3 * MIB, 25 * MIB, 50 * MIB]) for _ in range(rng.randint(1, 300))]
    needs, start = [], 0
    for nbytes in sizes:
        start += rng.choice([0, 0, 0, 1, 8, 5000, 300_000, 3 * MIB])
        needs.append(Need(f"f{rng.randint(0, 2)}", start, nbytes, rng.choice([1, 2, 4, 8])))
        start += nbytes
    rng.shuffle(needs)
    check(needs, plan_reads(needs))


@pytest.mark.parametrize("total", [8, 9, 19, 20, 21, 33, 40, 41, 100, 1000])
@pytest.mark.parametrize("size", [3001 * 2, MIB, 7 * MIB + 6, 90 * MIB])
def test_neighbours_are_read_in_at_least_eight_mebibytes(total, size):
    """Fails when a cut is rounded so that a share falls below, or when a rest is left."""
    count = max(1, -(-total * MIB // size))
    needs = row_of([size] * count)
    plan = plan_reads(needs)
    check(needs, plan)
    if size * MAX_PIECES > MAX_READ_NBYTES:
        assert all(read.nbytes >= MIN_READ_NBYTES for read in plan.reads)
        assert len(plan.reads) <= -(-count * size // (MAX_READ_NBYTES - MIB))


def test_gaps_at_cuts_do_not_make_reads_small():
    """Cuts that fall into gaps of the largest kind take one from both ends."""
    needs = row_of([9 * MIB, 9 * MIB, 2 * MIB], gap=MIB - 2)
    plan = plan_reads([*needs, *row_of([200 * MIB], file="g")])
    assert all(read.nbytes >= MIN_READ_NBYTES for read in plan.reads if read.file == "f")


def test_small_gaps_are_bridged_and_large_ones_are_not():
    small, large = 4, 2 * MIB
    assert len(plan_reads(row_of([4 * MIB] * 4, gap=small)).reads) == 1
    assert len(plan_reads(row_of([4 * MIB] * 4, gap=large)).reads) == 4


def test_a_gap_that_spares_no_small_read_is_bridged_only_where_it_is_cheap():
    assert len(plan_reads(row_of([9 * MIB, 9 * MIB], gap=128 << 10)).reads) == 2
    assert len(plan_reads(row_of([9 * MIB, 9 * MIB], gap=32 << 10)).reads) == 1
    assert len(plan_reads(row_of([3 * MIB, 9 * MIB], gap=128 << 10)).reads) == 1


@pytest.mark.parametrize("gap, size", [(60 << 10, 100_000), (1000, 8)])
def test_gaps_are_bridged_up_to_their_bound_only(gap, size):
    """Half of a file is needed, in stripes: without the bound most of the rest would be read too."""
    needs = row_of([size] * 400, gap=gap, unit=1)
    plan = plan_reads(needs)
    check(needs, plan)
    bridged = (plan.nbytes - plan.needed) // gap
    assert (bridged + 1) * gap > 0.04 * plan.needed or bridged == 399, "more could have been bridged"


def test_the_smallest_gaps_are_bridged_first():
    needs = [need for start in (1000, 101_000 + 11_950, 212_950 + 100) for need in row_of([100_000], start=start)]
    (one, other) = plan_reads(needs).reads
    assert [len(one.pieces), len(other.pieces)] == [1, 2]


def test_needs_that_overlap_are_refused_and_empty_ones_are_in_no_read():
    with pytest.raises(ValueError, match="f: bytes 1098..1100 are needed twice"):
        plan_reads([Need("f", 1000, 100), Need("f", 1098, 10)])
    assert plan_reads([Need("f", 10, 0), Need("g", 5, 0)]).reads == () == plan_reads([]).reads


def test_a_rank_of_the_releases_layout_reads_its_experts_whole(monkeypatch):
    """896 experts in the order of their names as text, one file a layer: each of 8 ranks plans large reads."""
    names = sorted(range(896), key=str)
    size = 17_547_264
    for rank in (0, 3, 7):
        own = range(112 * rank, 112 * rank + 112)
        needs = [Need("layer", at * size, size) for at, expert in enumerate(names) if expert in own]
        plan = plan_reads(needs)
        check(needs, plan)
        assert plan.nbytes == plan.needed and all(read.nbytes >= MIN_READ_NBYTES for read in plan.reads)


def test_planning_needs_no_torch():
    code = "import sys, dwdp.model.read_plan; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=child_environment())
    assert read_plan.MIB == MIB
