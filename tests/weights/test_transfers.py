"""The three transfers as plans: the same bytes, each once, from their owners; how a batch is cut and dealt.

Mutation-checked once, each caught by a test below: dealing from `rank` instead of `rank + 1`; no turn from layer to
layer; slices that grow by bytes and not by 2 MiB; the last slice of a run left out; own rows in the batch; a row of
the table whose first tiles do not add up.
"""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dwdp.weights.plan import CopySlice, TableAddresses, expert_runs
from dwdp.weights.transfers import MAX_SLICES, TRANSFERS, Transfer, peers_in_turn, slice_bytes
from tests.weights.fake_experts import partition_of

MIB = 1 << 20
KIMI_ROWS = [11 * MIB // 2, 11 * MIB // 32, 11 * MIB // 4, 11 * MIB // 64]  # bytes of an expert in its four tables
SMALL_ROWS = [1000, 24, 4099]

PARTITIONS = {
    "75 and 74": (12, 896, 0, 0),
    "45 and 44": (20, 896, 0, 0),
    "38 and 37": (24, 896, 0, 0),
    "uniform": (8, 896, 112, 112),
    "redundant": (12, 896, 82, 74),
    "capped": (12, 896, 75, 75),
    "redundant, peers that serve nothing": (4, 9, 6, 1),
    "two ranks": (2, 7, 0, 0),
}
ALL = [Transfer.named(name) for name in TRANSFERS]


def tables_of(partition, rank, rows):
    """Each table's composite range, and each peer's rows, a long way from everything else."""
    tables = []
    for number, b in enumerate(rows):
        peers = {
            peer: ((1 << 50) + (number << 44) + (peer << 38) + 4096 * peer, *partition.ranges[peer])
            for peer in range(len(partition.ranges))
            if peer != rank
        }
        tables.append(TableAddresses((1 << 40) + (number << 36), b, peers))
    return tables


def plan_of(transfer, partition, rank, rows, pos=0):
    runs = expert_runs(tables_of(partition, rank, rows), partition, rank)
    return transfer.plan(runs, rank=rank, num_ranks=len(partition.ranges), pos=pos)


def pieces_of(plan):
    """(dst, src, nbytes, peer) of everything that the plan submits, in order."""
    found = [(piece.dst, piece.src, piece.nbytes, piece.peer) for piece in (*plan.batch, *plan.slices)]
    if plan.gather is not None:
        for row in plan.gather.rows:
            found += [(d.dst, d.src, d.nbytes, row.peer) for d in plan.gather.descriptors[row.first : row.end]]
    return found


def check_bytes(plan, partition, rank, rows):
    """By intervals of bytes: what is written is all remote rows and nothing twice, and is read where it lies."""
    pieces = sorted(pieces_of(plan))
    for table in tables_of(partition, rank, rows):
        b, zero = table.row_nbytes, table.expert_zero
        start, end = partition.ranges[rank]
        todo = [(0, start * b), (end * b, partition.num_experts * b)]
        mine = [piece for piece in pieces if zero <= piece[0] < zero + (1 << 36)]
        pieces = [piece for piece in pieces if piece not in set(mine)]
        written = []
        for dst, src, nbytes, peer in mine:
            at = dst - zero
            base, first, behind = table.peers[peer]
            assert nbytes > 0 and base <= src and src + nbytes <= base + (behind - first) * b
            assert src - base == at - first * b
            for expert in {at // b, (at + nbytes - 1) // b}:
                stored_by = [r for r, (low, high) in enumerate(partition.ranges) if low <= expert < high]
                assert peer == min(stored_by)
            if written and written[-1][1] == at:
                written[-1][1] = at + nbytes
            else:
                written.append([at, at + nbytes])
        assert written == [[low, high] for low, high in todo if low < high]
    assert not pieces


@pytest.mark.parametrize("case", PARTITIONS)
@pytest.mark.parametrize("rows", [KIMI_ROWS, SMALL_ROWS], ids=["large rows", "small rows"])
@pytest.mark.parametrize("transfer", ALL, ids=str)
def test_every_remote_byte_moves_once_from_inside_its_owners_rows(case, rows, transfer):
    partition = partition_of(*PARTITIONS[case])
    n = len(partition.ranges)
    for rank in {0, 1, n // 2, n - 1}:
        plan = plan_of(transfer, partition, rank, rows, pos=rank)
        check_bytes(plan, partition, rank, rows)
        start, end = partition.ranges[rank]
        assert plan.nbytes == (partition.num_experts - (end - start)) * sum(rows)
        assert plan.nbytes == sum(nbytes for _, _, nbytes, _ in pieces_of(plan))


@pytest.mark.parametrize("case", PARTITIONS)
@pytest.mark.parametrize("transfer", ALL, ids=str)
def test_a_peers_load_is_the_bytes_that_it_serves(case, transfer):
    partition = partition_of(*PARTITIONS[case])
    owners = [partition.owner(expert) for expert in range(partition.num_experts)]
    for rank in range(len(partition.ranges)):
        load = dict.fromkeys(range(len(partition.ranges)), 0)
        for _, _, nbytes, peer in pieces_of(plan_of(transfer, partition, rank, SMALL_ROWS)):
            load[peer] += nbytes
        start, end = partition.ranges[rank]
        for peer in load:
            served = [e for e, owner in enumerate(owners) if owner == peer and not start <= e < end]
            assert load[peer] == len(served) * sum(SMALL_ROWS)


# How a batch is cut.


@pytest.mark.parametrize("case", PARTITIONS)
def test_a_layer_of_large_rows_has_at_most_512_slices_which_are_no_larger_than_that_needs(case):
    partition = partition_of(*PARTITIONS[case])
    runs = expert_runs(tables_of(partition, 0, KIMI_ROWS), partition, 0)
    plan = Transfer.named("batched").plan(runs, rank=0, num_ranks=len(partition.ranges), pos=0)
    largest = max(piece.nbytes for piece in plan.batch)
    assert len(plan.batch) <= 512 and not plan.slices and plan.gather is None
    if partition.num_experts == 896:
        assert largest % (2 * MIB) == 0 and largest > 2 * MIB
        smaller = largest - 2 * MIB
        assert sum(-(-run.nbytes // smaller) for run in runs) > 512
    sizes = {run.nbytes % largest or largest for run in runs} | {largest}
    assert {piece.nbytes for piece in plan.batch} <= sizes, "whole slices but for a run's last"


def runs_of(sizes, num_peers):
    """Runs of these bytes on rank 0 from the peers in turn, anywhere."""
    return [CopySlice((1 << 40) + (i << 34), (1 << 50) + (i << 34), n, 1 + i % num_peers) for i, n in enumerate(sizes)]


@given(sizes=st.lists(st.integers(1, 3000 * MIB), min_size=1, max_size=60))
def test_the_slice_is_the_smallest_whole_multiple_of_2_mib(sizes):
    def count(nbytes):
        return sum(-(-size // nbytes) for size in sizes)

    chosen = slice_bytes(runs_of(sizes, 3))
    expected = next(n for n in itertools.count(2 * MIB, 2 * MIB) if count(n) <= 512)
    assert chosen == expected


def test_more_runs_than_slices_are_allowed_are_not_cut():
    runs = runs_of([5 * MIB] * 600, 3)
    plan = Transfer.named("batched").plan(runs, rank=0, num_ranks=4, pos=0)
    assert len(plan.batch) == 600 > MAX_SLICES


# How a batch is dealt.


def check_deal(batch, n, rank, pos):
    """Round by round: each peer that has slices left gives one, in the order of the ring from its turned start."""
    left = {peer: sum(piece.peer == peer for piece in batch) for peer in range(n) if peer != rank}
    ring = [(rank + 1 + i) % n for i in range(n - 1)]
    turned = ring[pos % (n - 1) :] + ring[: pos % (n - 1)]
    given = iter(batch)
    while any(left.values()):
        for peer in turned:
            if left[peer]:
                assert next(given).peer == peer
                left[peer] -= 1
    assert next(given, None) is None


@pytest.mark.parametrize("case", PARTITIONS)
def test_slices_are_dealt_round_robin_from_the_next_rank_and_turned_from_layer_to_layer(case):
    partition = partition_of(*PARTITIONS[case])
    n = len(partition.ranges)
    for rank, pos in itertools.product((0, 1, n - 1), (0, 1, 2, n - 1, 91)):
        check_deal(plan_of(Transfer.named("batched"), partition, rank, KIMI_ROWS, pos).batch, n, rank, pos)


def test_consecutive_slices_come_from_different_peers_while_several_have_any():
    partition = partition_of(12, 896)
    batch = plan_of(Transfer.named("batched"), partition, 3, KIMI_ROWS, pos=5).batch
    left = {peer: sum(piece.peer == peer for piece in batch) for peer in range(12)}
    for piece, following in itertools.pairwise(batch):
        left[piece.peer] -= 1
        assert piece.peer != following.peer or sum(count > 0 for count in left.values()) == 1
    assert batch[0].peer == (3 + 1 + 5) % 12


@pytest.mark.parametrize("n", [2, 3, 4, 12])
def test_at_any_layer_the_ranks_begin_at_peers_that_are_all_different(n):
    for pos in range(2 * n):
        starts = [peers_in_turn(rank, n, pos)[0] for rank in range(n)]
        assert sorted(starts) == list(range(n)) and all(start != rank for rank, start in enumerate(starts))
        assert all(sorted([rank, *peers_in_turn(rank, n, pos)]) == list(range(n)) for rank in range(n))
    assert len({peers_in_turn(0, n, pos)[0] for pos in range(n - 1)}) == n - 1, "every peer is first in its turn"


@given(st.data())
def test_any_runs_are_dealt_whole_and_in_turn(data):
    n = data.draw(st.integers(2, 6))
    sizes = data.draw(st.lists(st.integers(1, 30 * MIB), max_size=40))
    pos = data.draw(st.integers(0, 100))
    runs = runs_of(sizes, n - 1)
    batch = Transfer.named("batched").plan(runs, rank=0, num_ranks=n, pos=pos).batch
    check_deal(batch, n, 0, pos)
    for run in runs:
        inside = sorted(
            (piece.dst, piece.src, piece.nbytes) for piece in batch if run.dst <= piece.dst < run.dst + run.nbytes
        )
        ends = [dst + nbytes for dst, _, nbytes in inside]
        assert [run.dst, *ends] == [*(dst for dst, _, _ in inside), run.dst + run.nbytes]
        assert all(src - run.src == dst - run.dst for dst, src, _ in inside)


# The gather's table.


@pytest.mark.parametrize("case", PARTITIONS)
def test_the_table_has_one_row_a_peer_with_all_its_runs_and_tiles(case):
    partition = partition_of(*PARTITIONS[case])
    n = len(partition.ranges)
    for rank, pos in ((0, 0), (n - 1, 3)):
        table = plan_of(Transfer.named("gather", "ldst"), partition, rank, KIMI_ROWS, pos).gather
        assert table.kernel == "ldst" and table.tile_nbytes % 16 == 0
        ring = [(rank + 1 + (pos + i) % (n - 1)) % n for i in range(n - 1)]
        served = {run.peer for run in expert_runs(tables_of(partition, rank, KIMI_ROWS), partition, rank)}
        assert [row.peer for row in table.rows] == [peer for peer in ring if peer in served]
        end = 0
        for row in table.rows:
            assert row.first == end < row.end
            end, tiles = row.end, 0
            for descriptor in table.descriptors[row.first : row.end]:
                assert descriptor.first_tile == tiles
                tiles += -(-descriptor.nbytes // table.tile_nbytes)
            assert row.tiles == tiles
        assert end == len(table.descriptors)


# What all have in common.


@pytest.mark.parametrize("transfer", ALL, ids=str)
@pytest.mark.parametrize("nbytes", [256, 40 * MIB])
def test_own_rows_are_one_plain_copy_each_behind_the_peers(transfer, nbytes):
    """As a dense blob of 4 ranks has them; in 2 MiB pieces they would take four times as long."""
    rows = [CopySlice((1 << 40) + rank * nbytes, (1 << 50) + (rank << 34), nbytes, rank) for rank in (3, 0, 1, 2)]
    plan = transfer.plan(rows, rank=2, num_ranks=4, pos=1)
    assert plan.slices[-1] == rows[-1] and plan.nbytes == 4 * nbytes
    others = [piece for piece in pieces_of(plan) if piece != (rows[-1].dst, rows[-1].src, nbytes, 2)]
    assert all(peer != 2 for _, _, _, peer in others) and sum(n for _, _, n, _ in others) == 3 * nbytes
    assert len(plan.slices) == (4 if transfer.name == "per_slice" else 1)


def test_a_transfer_has_a_kernel_only_when_it_is_the_gather_and_auto_means_tma():
    assert Transfer.named("gather") == Transfer("gather", "tma") != Transfer.named("gather", "ldst")
    assert Transfer.named("batched", "ldst") == Transfer("batched", None)
    for name, kernel in (("batch", "auto"), ("gather", "cute")):
        with pytest.raises(ValueError, match=f"{name}.*{kernel}.*per_slice, batched, gather.*tma, ldst"):
            Transfer.named(name, kernel)


def test_the_log_names_what_a_layer_submits():
    partition = partition_of(12, 896)
    said = {}
    for transfer in (*ALL, Transfer.named("gather", "ldst")):
        said[str(transfer)] = transfer.describe([plan_of(transfer, partition, 0, KIMI_ROWS)])
    assert said["per_slice"] == "per_slice, at most 44 copies a layer"
    assert said["batched"] == "batched, one submission a layer, at most 462 slices of at most 16777216 bytes"
    assert "gather (tma), one launch a layer over at most 44 runs in 11 rows" in said["gather (tma)"]
    assert said["gather (ldst)"] == said["gather (tma)"].replace("tma", "ldst")
