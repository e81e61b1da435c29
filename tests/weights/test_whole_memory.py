"""All four kinds of partition over a memory on paper that maps handles only whole: every byte of every composite
range comes from the rank that must serve it.

Mutation-checked once, each caught: edges filled from one rank always, or up to behind the last expert; the pages
behind rounded down; a peer's rows looked for at this rank's data offset; no padding for the pages in front; a plan that
copies an expert from every rank that stores it; the highest such rank taken for its owner.
"""

import pytest
import torch

from dwdp.weights.plan import TableSpec, expert_runs
from dwdp.weights.ring import PrefetchRing
from dwdp.weights.transport import ExpertTransport
from tests.weights.fake_experts import build_model, partition_of, raw
from tests.weights.whole_memory import Paper

GRANULE, PAGE, LAYERS, SLOTS = 64, 128, 3, 2

# (size, stride) as given -> every rank's experts, written out by hand
KINDS = {
    "balanced": (3, 7, 0, 0, [(0, 3), (3, 5), (5, 7)]),
    "balanced of two": (2, 5, 0, 0, [(0, 3), (3, 5)]),
    "one each": (4, 4, 0, 0, [(0, 1), (1, 2), (2, 3), (3, 4)]),
    "uniform": (4, 12, 3, 3, [(0, 3), (3, 6), (6, 9), (9, 12)]),
    "redundant": (3, 7, 3, 2, [(0, 3), (2, 5), (4, 7)]),
    "redundant on three ranks": (4, 12, 6, 2, [(0, 6), (2, 8), (4, 10), (6, 12)]),
    "capped": (3, 10, 4, 4, [(0, 4), (4, 8), (8, 10)]),
    "capped to one": (3, 9, 4, 4, [(0, 4), (4, 8), (8, 9)]),
}
# Bytes of a row: many in a granule, not a multiple, a granule, larger and not a multiple, and several pages.
ROWS = [8, 24, 64, 100, 300]


def lowest(ranges, expert):
    return min(rank for rank, (start, end) in enumerate(ranges) if start <= expert < end)


class Rank:
    """One rank's transport and ring on paper, its own rows labelled (table, byte of the whole table)."""

    def __init__(self, rank, partition, reference, world):
        self.rank, self.partition = rank, partition
        self.paper = Paper(rank, GRANULE, PAGE, world)
        self.model = build_model(reference, partition, rank)
        layers = self.model.moe_layers()
        self.specs = [
            TableSpec(pos, pos + 1, name, tuple(table.shape[1:]), "uint8", table[0].nbytes)
            for pos, layer in enumerate(layers)
            for name, table in layer.expert_tables().items()
        ]
        self.transport = ExpertTransport(self.paper, partition, rank, self.specs, layers)
        self.transport.take_in()
        start, end = partition.ranges[rank]
        self.zero = []  # address of expert 0 of each table, from where the own rows were asked for
        for number, (spec, (address, rows)) in enumerate(zip(self.specs, self.paper.tensors)):
            assert raw(rows) == raw(reference[spec.pos][0][spec.name][start:end])
            self.zero.append(address - start * spec.row_nbytes)
            for at in range((end - start) * spec.row_nbytes):
                self.paper.write(address + at, (number, start * spec.row_nbytes + at))

    def connect(self, ranks):
        exports = [other.transport.exports() for other in ranks]
        self.transport.infos = {other: infos for other, (_, infos) in enumerate(exports)}
        self.transport.map_peers({other: list(fds) for other, (fds, _) in enumerate(exports) if other != self.rank})
        tables = [[t for t in self.transport.tables if t.spec.pos == pos] for pos in range(LAYERS)]
        self.ring = PrefetchRing(self.paper, tables, SLOTS)
        self.ring.allocate()
        addresses = self.transport.addresses()
        self.runs = [
            expert_runs([a for s, a in zip(self.specs, addresses) if s.pos == pos], self.partition, self.rank)
            for pos in range(LAYERS)
        ]

    def play(self, pieces, ranges):
        """Copies; every byte must come from an own row of the rank that serves its expert, to where it belongs."""
        own = range(*ranges[self.rank])
        for piece in pieces:
            for address, label, source in self.paper.copy(piece):
                number, byte = label
                expert = byte // self.specs[number].row_nbytes
                assert address == self.zero[number] + byte
                assert source == piece.peer == lowest(ranges, expert)
                assert expert not in own, "own rows are never written"


@pytest.mark.parametrize("b", ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_of_a_composite_range_comes_from_the_rank_that_must_serve_it(kind, b):
    n, experts, size, stride, ranges = KINDS[kind]
    partition = partition_of(n, experts, size, stride)
    assert list(partition.ranges) == ranges
    reference = [
        (
            {
                name: torch.randint(0, 256, (experts, nbytes), dtype=torch.uint8)
                for name, nbytes in (("a", b), ("z", 40))
            },
            {},
        )
        for _ in range(LAYERS)
    ]
    world = {}
    ranks = [Rank(rank, partition, reference, world) for rank in range(n)]
    for rank in ranks:
        rank.connect(ranks)

    for rank in ranks:
        start, end = ranges[rank.rank]
        rank.play(rank.transport.edges(), ranges)
        for number, table in enumerate(rank.transport.tables):
            # The handle is the smallest one of whole granules with the own rows; each of its bytes is right.
            row, handle = table.spec.row_nbytes, table.handle
            touched = {byte // GRANULE for byte in range(start * row, end * row)}
            first = min(touched) * GRANULE
            assert handle.nbytes == len(touched) * GRANULE
            for byte in range(first, first + handle.nbytes):
                right = (number, byte) if byte < experts * row else None  # behind the last expert nothing is written
                assert rank.paper.label(rank.zero[number] + byte) == right

    for rank in ranks:
        for pos in [*range(LAYERS), 0]:  # layer 2 takes the slot of layer 0, and layer 0 then takes it back
            rank.play(rank.runs[pos], ranges)
            start, end = ranges[rank.rank]
            row = sum(s.row_nbytes for s in rank.specs if s.pos == pos)
            assert sum(piece.nbytes for piece in rank.runs[pos]) == (experts - (end - start)) * row
            for number, spec in enumerate(rank.specs):
                if spec.pos == pos:
                    for byte in range(experts * spec.row_nbytes):
                        assert rank.paper.label(rank.zero[number] + byte) == (number, byte)
        pages = [h for h in rank.paper.handles if h.what.startswith("ring-")]
        assert all(page.nbytes == PAGE for page in pages)


def test_the_paper_refuses_what_a_driver_refuses():
    """Sensitivity: the proof above rests on it."""
    world = {}
    paper, peer = Paper(0, 64, 128, world), Paper(1, 64, 128, world)
    handle = paper.create(192, "own")
    for offset, nbytes in ((64, 192), (0, 128), (32, 320), (-64, 320)):
        with pytest.raises(AssertionError, match="in part"):
            paper.map(paper.reserve(nbytes), offset, handle, writable=True)
    area = paper.reserve(256)
    paper.map(area, 64, handle, writable=True)
    with pytest.raises(AssertionError, match="would lie over"):
        paper.map(area, 0, handle, writable=True)
    paper.write(area.address + 100, "x")
    with pytest.raises(KeyError):
        paper.label(area.address + 10)
    theirs = peer.import_handle(handle.fd, 192)
    with pytest.raises(AssertionError):
        peer.import_handle(handle.fd, 128)
    there = peer.reserve(192)
    with pytest.raises(AssertionError):
        peer.map(there, 0, theirs, writable=True)
    peer.map(there, 0, theirs, writable=False)
    assert peer.label(there.address + 36) == "x" and peer.owner(there.address) == 0
    with pytest.raises(AssertionError, match="rank 1 writes into own of rank 0"):
        peer.write(there.address, "y")
