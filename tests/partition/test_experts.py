"""Who stores which experts, judged against definitions written here, apart from the code's."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dwdp.config.schema import DwdpConfig
from dwdp.partition.experts import ExpertPartition, handle_geometry


def partition(num_ranks, size, stride, num_experts):
    numbers = SimpleNamespace(dwdp_size=num_ranks, num_experts_per_worker=size, num_prefetch_experts=stride)
    return ExpertPartition.from_config(numbers, num_experts=num_experts)


def blocks(n, s, t, e):
    """What each rank would store if it took `s` experts from `r * t` on, as far as there are experts."""
    return [[x for x in range(e) if r * t <= x < r * t + s] for r in range(n)]


def expected(n, s, t, e):
    """(kind, ranges) or None: the table written out with lists of experts, without the arithmetic of the code.

    balanced: experts are dealt to the ranks in turn, one each; every rank gets as many neighbours as it was dealt,
    and at least one. The others: rank r takes s experts from r * t on, and together the ranks hold all experts.
    uniform: s = t, each expert is on one rank and every rank has s. capped: s = t, only the last rank has fewer, and
    not none. redundant: t < s, every rank has s, and the last one ends with the last expert.
    """
    if s == t == 0:
        hands = [[x for x in range(e) if x % n == r] for r in range(n)]
        if not all(hands):
            return None
        deck, dealt = list(range(e)), []
        for hand in hands:
            dealt.append([deck.pop(0) for _ in hand])
        return "balanced", as_ranges(dealt)
    if s <= 0 or t <= 0 or t > s:
        return None
    taken = blocks(n, s, t, e)
    if not all(taken) or sorted({x for block in taken for x in block}) != list(range(e)):
        return None
    full = [len(block) == s for block in taken]
    if n == 1:
        return ("uniform", as_ranges(taken)) if s == t and full == [True] else None
    if s == t:
        if all(full):
            return "uniform", as_ranges(taken)
        return ("capped", as_ranges(taken)) if all(full[:-1]) else None
    return ("redundant", as_ranges(taken)) if all(full) else None


def as_ranges(lists):
    assert all(block == list(range(block[0], block[-1] + 1)) for block in lists)
    return [(block[0], block[-1] + 1) for block in lists]


def test_the_accepted_set_and_every_range_are_those_of_the_table_on_a_grid_of_over_60000():
    """Every pair from -1 to E + 1 for each N and E, and every refusal names E, N, size and stride.

    Fails when `_kind` takes a stride above the size, a capped last rank without an expert, or N = 1 with an overlap;
    when rank r's balanced share begins one late; and when the refusal leaves one of its four numbers out.
    """
    seen, kinds = 0, {}
    for n in range(1, 10):
        for e in range(1, 28):
            for s in range(-1, e + 2):
                for t in range(-1, e + 2):
                    seen += 1
                    right = expected(n, s, t, e)
                    try:
                        got = partition(n, s, t, e)
                    except ValueError as refused:
                        assert right is None, (n, s, t, e)
                        asked = f"E={e} experts on N={n} ranks with num_experts_per_worker (size) {s} and "
                        assert asked + f"num_prefetch_experts (stride) {t}" in str(refused), (n, s, t, e)
                    else:
                        assert (got.kind, list(got.ranges)) == right, (n, s, t, e)
                        kinds[got.kind] = kinds.get(got.kind, 0) + 1
    assert seen >= 60_000
    assert kinds.keys() == {"balanced", "uniform", "redundant", "capped"} and min(kinds.values()) > 50, kinds


@pytest.mark.parametrize("num_ranks", range(1, 7))
def test_nearest_pairs_are_all_at_the_smallest_distance(num_ranks):
    for e in range(num_ranks, 16):
        accepted = [(s, t) for s in range(e + 1) for t in range(e + 1) if expected(num_ranks, s, t, e)]
        for s in range(e + 3):
            for t in range(e + 3):
                if (s, t) in accepted:
                    continue
                distances = {pair: abs(pair[0] - s) + abs(pair[1] - t) for pair in accepted}
                nearest = {f"{a}/{b}" for (a, b), d in distances.items() if d == min(distances.values())}
                with pytest.raises(ValueError) as refused:
                    partition(num_ranks, s, t, e)
                named = str(refused.value).rpartition("nearest accepted size/stride: ")[2]
                assert set(named.split(", ")) == nearest, (num_ranks, s, t, e)


def test_a_refusal_names_experts_ranks_size_and_stride():
    with pytest.raises(ValueError) as refused:
        partition(12, 76, 73, 896)
    text = str(refused.value)
    assert "E=896" in text and "N=12" in text and "(size) 76" in text and "(stride) 73" in text
    assert text.endswith("nearest accepted size/stride: 75/75, 76/76") and "\n" not in text


@pytest.mark.parametrize(
    "size,stride,kind,counts,text",
    [
        (0, 0, "balanced", [75] * 8 + [74] * 4, "balanced, 8 x 75 + 4 x 74 of 896"),
        (82, 74, "redundant", [82] * 12, "redundant, 12 x 82 at stride 74 of 896"),
        (75, 75, "capped", [75] * 11 + [71], "capped, 11 x 75 + 1 x 71 of 896"),
    ],
)
def test_kimi_k3_on_twelve_ranks(size, stride, kind, counts, text):
    config = DwdpConfig(dwdp_size=12, num_experts_per_worker=size, num_prefetch_experts=stride)
    got = ExpertPartition.from_config(config, num_experts=896)
    assert got.kind == kind
    assert [end - start for start, end in got.ranges] == counts
    assert got.ranges[0][0] == 0 and got.ranges[-1][1] == 896
    assert got.describe() == text


def test_small_counts_and_counts_that_do_not_divide():
    assert [end - start for start, end in partition(3, 0, 0, 7).ranges] == [3, 2, 2]
    assert partition(8, 112, 112, 896).describe() == "uniform, 8 x 112 of 896"
    for n, first, rest in ((3, 86, 85), (5, 52, 51), (7, 37, 36)):
        counts = [end - start for start, end in partition(n, 0, 0, 256).ranges]
        assert sum(counts) == 256 and set(counts) == {first, rest}
    for n, size, stride in ((3, 86, 85), (5, 52, 51), (7, 40, 36)):
        assert partition(n, size, stride, 256).kind == "redundant"


@pytest.mark.parametrize("size,stride", [(0, 0), (1, 1), (2, 1)])
def test_fewer_experts_than_ranks_are_refused(size, stride):
    with pytest.raises(ValueError, match="E=3 experts on N=4 ranks"):
        partition(4, size, stride, 3)


@pytest.mark.parametrize("size,stride", [(-1, -1), (1, 0), (0, 1), (3, 4)])
def test_impossible_pairs_are_refused_with_the_numbers(size, stride):
    with pytest.raises(ValueError, match="nearest accepted size/stride: "):
        partition(2, size, stride, 7)


def test_the_table_is_computed_once_for_the_same_numbers():
    config = DwdpConfig(dwdp_size=4)
    again = DwdpConfig(dwdp_size=4, num_prefetch_slots=3)
    first = ExpertPartition.from_config(config, num_experts=10)
    assert ExpertPartition.from_config(again, num_experts=10) is first
    assert ExpertPartition.from_config(config, num_experts=11) is not first


@pytest.mark.parametrize("num_ranks", range(1, 8))
def test_owner_and_remote_runs_cover_each_remote_expert_once(num_ranks):
    for e in range(num_ranks, 25):
        for s in range(0, e + 1):
            for t in range(0, s + 1):
                if expected(num_ranks, s, t, e) is None:
                    continue
                got = partition(num_ranks, s, t, e)
                owners = [
                    min(r for r in range(num_ranks) if got.ranges[r][0] <= x < got.ranges[r][1]) for x in range(e)
                ]
                assert [got.owner(x) for x in range(e)] == owners
                for rank in range(num_ranks):
                    covered = [(x, owner) for owner, start, end in got.remote_runs(rank) for x in range(start, end)]
                    own = range(*got.ranges[rank])
                    assert covered == [(x, owners[x]) for x in range(e) if x not in own]
                    assert all(start < end for _, start, end in got.remote_runs(rank))


def test_an_expert_or_rank_that_is_not_there_is_refused():
    got = partition(2, 0, 0, 4)
    for bad in (-1, 4):
        with pytest.raises(ValueError, match=f"expert {bad} "):
            got.owner(bad)
    for bad in (-1, 2):
        with pytest.raises(ValueError, match=f"rank {bad} "):
            got.remote_runs(bad)


@settings(max_examples=300)
@given(st.integers(1, 60), st.integers(0, 9), st.integers(1, 9), st.integers(1, 50))
def test_geometry_is_the_smallest_set_of_whole_granules_with_the_rows(b, start, count, g):
    end = start + count
    got = handle_geometry(b, start, end, g)
    granules = {byte // g for byte in range(start * b, end * b)}
    assert got.page_start == min(granules) * g
    assert got.page_end == (max(granules) + 1) * g
    assert got.nbytes == len(granules) * g
    assert got.page_start + got.data_offset == start * b


@pytest.mark.parametrize("b,start,end,g", [(0, 0, 1, 1), (1, 0, 1, 0), (1, 2, 2, 4), (1, -1, 1, 4), (1, 3, 2, 4)])
def test_geometry_refuses_empty_ranges_and_sizes_that_are_not_positive(b, start, end, g):
    with pytest.raises(ValueError, match="no handle geometry"):
        handle_geometry(b, start, end, g)


def test_partition_and_config_import_without_torch():
    code = (
        "import sys; import dwdp.partition.experts, dwdp.config.gate, dwdp.config.files, dwdp.env;"
        "sys.exit('torch' in sys.modules)"
    )
    from dwdp import env

    run = subprocess.run([sys.executable, "-c", code], env=env.child_environment(), timeout=60)
    assert run.returncode == 0
