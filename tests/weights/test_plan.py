"""Plans and geometry: every remote expert is copied once, from its owner's rows, and nothing else is
touched.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dwdp.weights.plan import (
    TableAddresses,
    composite_geometry,
    count_mappings,
    edge_slices,
    expert_runs,
)
from tests.weights.fake_experts import partition_of

PARTITIONS = [
    partition_of(1, 7),
    partition_of(3, 7),
    partition_of(4, 33),
    partition_of(4, 32, 8, 8),
    partition_of(3, 7, 3, 2),
    partition_of(3, 32, 11, 11),
    partition_of(4, 33, 12, 7),
]


def addresses(partition, rank, b, base=1 << 20):
    peers = {peer: ((peer + 2) << 24, *partition.ranges[peer]) for peer in range(len(partition.ranges)) if peer != rank}
    return TableAddresses(base, b, peers)


@pytest.mark.parametrize("partition", PARTITIONS, ids=lambda p: p.describe())
@pytest.mark.parametrize("b", [24, 100, 4096, 5000])
def test_runs_cover_every_remote_expert_once_inside_its_owners_rows(partition, b):
    for rank, (start, end) in enumerate(partition.ranges):
        table = addresses(partition, rank, b)
        written = []
        for run in expert_runs([table], partition, rank):
            first, _ = divmod(run.dst - table.expert_zero, b)
            assert run.nbytes % b == 0
            for expert in range(first, first + run.nbytes // b):
                written.append(expert)
                assert partition.owner(expert) == run.peer != rank
                assert run.src + (expert - first) * b == table.source(run.peer, expert)
        assert written == [e for e in range(partition.num_experts) if not start <= e < end]


@pytest.mark.parametrize("partition", PARTITIONS, ids=lambda p: p.describe())
@pytest.mark.parametrize("b", [24, 100, 1000, 4096, 5000])
def test_edges_are_filled_exactly_and_only_from_owners(partition, b):
    for rank, (start, end) in enumerate(partition.ranges):
        table = addresses(partition, rank, b)
        geometry = composite_geometry(b, start, end, partition.num_experts, 4096, 8192)
        filled = []
        for piece in edge_slices(table, partition, rank, geometry.handle):
            at = piece.dst - table.expert_zero
            expert = at // b
            assert partition.owner(expert) == piece.peer != rank
            assert piece.src == table.source(piece.peer, expert) + at - expert * b
            assert at + piece.nbytes <= (expert + 1) * b
            filled += range(at, at + piece.nbytes)
        handle = geometry.handle
        known = [*filled, *range(start * b, end * b), *range(partition.num_experts * b, handle.page_end)]
        assert sorted(known) == list(range(handle.page_start, handle.page_end))


@given(
    b=st.integers(1, 20000),
    experts=st.integers(1, 60),
    data=st.data(),
    granules=st.integers(1, 8),
)
def test_a_composite_range_has_room_for_every_expert(b, experts, data, granules):
    start = data.draw(st.integers(0, experts - 1))
    end = data.draw(st.integers(start + 1, experts))
    g, page = 4096, 4096 * granules
    geometry = composite_geometry(b, start, end, experts, g, page)
    assert 0 <= geometry.padding < page and geometry.padding % g == 0
    assert geometry.padding + experts * b <= geometry.nbytes
    assert geometry.before % page == geometry.after % page == 0
    # the handle lies where its experts belong
    assert geometry.before + geometry.handle.data_offset == geometry.padding + start * b
    offsets = geometry.page_offsets(page)
    covered = [(at, at + page) for at in offsets] + [(geometry.before, geometry.before + geometry.handle.nbytes)]
    assert sorted(covered)[0][0] == 0 and sorted(covered)[-1][1] == geometry.nbytes
    assert all(a[1] == b[0] for a, b in zip(sorted(covered), sorted(covered)[1:]))


def test_an_expert_that_a_peer_lacks_is_refused():
    partition = partition_of(3, 7)
    with pytest.raises(ValueError, match="rank 1 stores experts 3 to 4, not expert 5"):
        addresses(partition, 0, 8).source(1, 5)


def test_larger_pages_need_fewer_mappings():
    partition = partition_of(4, 33)
    counts = [count_mappings([50000, 900], partition, 1, 4096, 4096 << i) for i in range(6)]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1] >= 2 * 4
