"""The transport: originals leave one at a time, peers cannot write, a wrong announcement is refused."""

import ctypes
import mmap
import os

import pytest
import torch

from dwdp.errors import MemoryDomainError
from dwdp.weights.plan import TableSpec
from dwdp.weights.transport import ExpertTransport, HandleInfo
from tests.weights.fake_experts import build_model, partition_of, rank_parts, raw, reference_layers

EXPERTS = 7


def specs_of(model):
    return [
        TableSpec(pos, layer.layer_index, name, tuple(table.shape[1:]), str(table.dtype)[6:], table[0].nbytes)
        for pos, layer in enumerate(model.moe_layers())
        for name, table in layer.expert_tables().items()
    ]


@pytest.fixture
def two():
    """Both ranks of a group in one thread: (model, transport) of each, rows not yet taken in."""
    partition, reference = partition_of(2, EXPERTS), reference_layers(EXPERTS, 2)
    with rank_parts(0) as (first, _), rank_parts(1) as (second, _):
        pairs = []
        for rank, domain in enumerate((first, second)):
            model = build_model(reference, partition, rank)
            transport = ExpertTransport(domain, partition, rank, specs_of(model), model.moe_layers())
            pairs.append((model, transport))
        yield pairs
        for _, transport in pairs:
            transport.detach()
            transport.close()
            assert transport.domain.live() == dict.fromkeys(["handles", "mappings", "ranges", "descriptors"], 0)


def exchange(pairs):
    exports = [transport.exports() for _, transport in pairs]
    for rank, (_, transport) in enumerate(pairs):
        fds, infos = exports[1 - rank]
        transport.infos = {1 - rank: list(infos), rank: exports[rank][1]}
        transport.map_peers({1 - rank: [os.dup(fd) for fd in fds]})


def test_at_most_one_table_more_than_at_rest_is_in_memory(two, monkeypatch):
    (model, transport), _ = two
    tables = [table for layer in model.moe_layers() for table in layer.expert_tables().values()]
    largest = max(table.nbytes for table in tables)
    total = sum(table.nbytes for table in tables)
    del tables
    peaks, make = [], transport.domain.create

    def create(nbytes, what, **options):
        handle = make(nbytes, what, **options)
        originals = [t for layer in model.moe_layers() for t in layer.expert_tables().values()]
        outside = sum(t.untyped_storage().nbytes() for t in originals if not transport.domain.holds(t))
        rows = sum(t.spec.row_nbytes * 4 for t in transport.tables if t.handle is not None)
        peaks.append(outside + rows + transport.tables[len(peaks)].spec.row_nbytes * 4)
        return handle

    monkeypatch.setattr(transport.domain, "create", create)
    transport.take_in()
    assert len(peaks) == 4 and max(peaks) <= total + largest
    assert all(transport.domain.holds(t) for layer in model.moe_layers() for t in layer.expert_tables().values())


def test_peers_read_what_owners_wrote_and_cannot_write(two):
    for _, transport in two:
        transport.take_in()
    fd = two[0][1].exports()[0][0]
    nbytes = two[0][1].tables[0].handle.nbytes
    with pytest.raises(PermissionError):
        mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError):
        os.ftruncate(fd, 0)
    exchange(two)
    for rank, (_, transport) in enumerate(two):
        peer_model = two[1 - rank][0]
        for table, addresses in zip(transport.tables, transport.addresses()):
            rows = peer_model.moe_layers()[table.spec.pos].expert_tables()[table.spec.name]
            address, start, end = addresses.peers[1 - rank]
            assert ctypes.string_at(address, (end - start) * table.spec.row_nbytes) == raw(rows)


def test_the_composite_tensor_shows_own_rows_where_their_experts_belong(two):
    _, (model, transport) = two
    before = [table.clone() for layer in model.moe_layers() for table in layer.expert_tables().values()]
    transport.take_in()
    for table, rows in zip(transport.tables, before):
        address = table.area.address + table.geometry.padding + 4 * table.spec.row_nbytes
        assert ctypes.string_at(address, rows.nbytes) == raw(rows)
        assert len(table.checksums) == 3


def test_restore_gives_tensors_of_their_own_with_the_same_bytes(two):
    (model, transport), _ = two
    parameters = dict(model.named_parameters())
    before = {name: raw(tensor) for name, tensor in parameters.items()}
    transport.take_in()
    transport.restore()
    assert {name: raw(tensor) for name, tensor in model.named_parameters()} == before
    assert all(model.get_parameter(name) is tensor for name, tensor in parameters.items())
    assert not any(transport.domain.holds(tensor) for tensor in model.parameters())
    assert transport.domain.allocated_bytes == 0


@pytest.mark.parametrize("field, value", [("nbytes", 4096), ("data_offset", 8), ("layer", 5), ("rank", 0)])
def test_an_announcement_that_does_not_fit_is_refused_and_no_descriptor_stays(two, field, value):
    for _, transport in two:
        transport.take_in()
    (_, transport), (_, peer) = two
    fds, infos = peer.exports()
    changed = {name: getattr(infos[1], name) for name in HandleInfo.__struct_fields__} | {field: value}
    transport.infos = {1: [infos[0], HandleInfo(**changed), *infos[2:]]}
    open_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MemoryDomainError, match="rank 1 announced the handle"):
        transport.map_peers({1: [os.dup(fd) for fd in fds]})
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_all_descriptors_are_counted_before_the_first_handle(two):
    from dwdp.errors import MemoryBudgetError

    (model, transport), _ = two
    limit = transport.domain.descriptor_budget
    limit.limit = 7  # four tables on two ranks are eight
    with pytest.raises(MemoryBudgetError, match="8"):
        transport.take_in()
    assert transport.domain.allocated_bytes == 0 and not any(map(transport.domain.holds, model.parameters()))


def test_exotic_types_move_bit_for_bit():
    partition = partition_of(2, 5)
    kinds = [torch.bool, torch.float8_e4m3fn, torch.complex64]
    reference = [({str(k)[6:]: torch.arange(5 * 16, dtype=torch.uint8).view(5, 16).view(k) for k in kinds}, {})]
    with rank_parts(0) as (domain, _):
        model = build_model(reference, partition, 0)
        before = {name: raw(tensor) for name, tensor in model.named_parameters()}
        transport = ExpertTransport(domain, partition, 0, specs_of(model), model.moe_layers())
        transport.take_in()
        assert {name: raw(tensor) for name, tensor in model.named_parameters()} == before
        transport.restore()
        assert {name: raw(tensor) for name, tensor in model.named_parameters()} == before
