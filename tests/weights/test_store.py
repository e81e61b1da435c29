"""The row store: what a rank keeps of every blob, and its peers' rows mapped read-only.

Mutation-checked once, each caught by a test below: a row written without the rank's offset; a chunk's offset ignored in
`address`; imports that are not released.
"""

import ctypes
import os

import pytest
import torch

from dwdp.errors import DwdpError, MemoryDomainError
from dwdp.memory.host import HostDomain
from dwdp.partition.collect import collect
from dwdp.weights.store import RowStore, store_chunks
from tests.support.toy_decoder import ToyModel


def collected(num_ranks=3, num_layers=4):
    return collect(ToyModel(num_layers), num_ranks=num_ranks, segments=("attn", "moe"), min_bytes=1, strict=True)


def originals(found, number):
    return [found.storage_bytes(number, i) for i in range(len(found.layout.blobs[number].storages))]


def blob_bytes(found, number):
    blob = found.layout.blobs[number]
    data = torch.zeros(blob.nbytes, dtype=torch.uint8)
    for storage, original in zip(blob.storages, originals(found, number)):
        data[storage.offset : storage.offset + storage.nbytes] = original
    return data


@pytest.mark.parametrize("chunk_bytes", [0, 1, 6000, 10**9])
def test_rows_of_all_ranks_make_up_every_blob_with_one_handle_and_with_several(chunk_bytes):
    found = collected()
    domains = [HostDomain(rank, granule_bytes=4096) for rank in range(3)]
    stores = [RowStore(domains[r], found.layout, r, chunk_bytes=chunk_bytes) for r in range(3)]
    for store in stores:
        store.allocate()
        for number in range(len(found.layout.blobs)):
            store.write_row(number, originals(found, number))
    for store in stores:
        for peer in stores:
            if peer is not store:
                store.import_rows(peer.rank, [os.dup(fd) for fd in peer.exports()])
    for store in stores:
        store.close_exports()
    for store in stores:
        for number in range(len(found.layout.blobs)):
            rows = torch.cat([store.row(rank, number) for rank in range(3)])
            assert torch.equal(rows, blob_bytes(found, number))
            nbytes = found.layout.blobs[number].row_nbytes
            assert ctypes.string_at(store.address(1, number), nbytes) == rows[nbytes : 2 * nbytes].numpy().tobytes()
        assert store.domain.allocated_bytes == store.nbytes
        del rows
    for store in stores:
        store.close()
        store.close()
    for domain in domains:
        assert domain.live() == {"handles": 0, "mappings": 0, "ranges": 0, "descriptors": 0}
        domain.close()


def test_chunks_hold_whole_layers_and_pass_their_size_for_a_single_layer_only():
    layout = collected().layout
    layer_bytes = [sum(b.row_nbytes for b in layout.blobs if b.pos == pos) for pos in range(4)]
    assert [len(chunk.offsets) for chunk in store_chunks(layout, 0, 4096)] == [8]
    assert [sorted(chunk.offsets) for chunk in store_chunks(layout, 1, 4096)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    two = store_chunks(layout, layer_bytes[0] + layer_bytes[1], 4096)
    assert sorted(two[0].offsets) == [0, 1, 2, 3]
    assert all(chunk.nbytes % 4096 == 0 for chunk in two)


def test_peers_rows_cannot_be_written():
    found = collected(num_ranks=2)
    with HostDomain(0, granule_bytes=4096) as mine, HostDomain(1, granule_bytes=4096) as other:
        with RowStore(other, found.layout, 1) as store, RowStore(mine, found.layout, 0) as reader:
            store.allocate()
            handle = mine.import_handle(os.dup(store.exports()[0]), store.nbytes)
            with pytest.raises(MemoryDomainError, match="read-only"):
                mine.map(mine.reserve(store.nbytes), 0, handle, writable=True)
            reader.import_rows(1, [os.dup(store.exports()[0])])
            maps = open("/proc/self/maps").read()
            line = next(x for x in maps.splitlines() if x.startswith(f"{reader.address(1, 0):x}-"))
            assert line.split()[1] == "r--s" and "memfd:dwdp-dense-store0-1" in line


def test_a_wrong_number_of_handles_is_refused_by_rank():
    found = collected(num_ranks=2)
    with HostDomain(0, granule_bytes=4096) as domain, RowStore(domain, found.layout, 0) as store:
        with pytest.raises(DwdpError, match="rank 1 sent 0 handles for its dense rows, 1 expected"):
            store.import_rows(1, [])


@pytest.mark.parametrize("failing_call", [1, 2])
def test_a_failure_partway_through_the_allocation_leaves_nothing(failing_call, monkeypatch):
    found = collected()
    with HostDomain(0, granule_bytes=4096) as domain:
        calls = []
        real = domain.reserve

        def reserve(nbytes):
            calls.append(nbytes)
            if len(calls) > failing_call:
                raise MemoryDomainError("no more addresses")
            return real(nbytes)

        monkeypatch.setattr(domain, "reserve", reserve)
        with pytest.raises(MemoryDomainError, match="no more addresses"):
            with RowStore(domain, found.layout, 0, chunk_bytes=1) as store:
                store.allocate()
        assert domain.live() == {"handles": 0, "mappings": 0, "ranges": 0, "descriptors": 0}


@pytest.mark.parametrize("failing_chunk", [0, 1, 3])
def test_a_failure_partway_through_the_import_leaves_nothing(failing_chunk):
    found = collected(num_ranks=2)
    with HostDomain(0, granule_bytes=4096) as mine, HostDomain(1, granule_bytes=4096) as other:
        with RowStore(other, found.layout, 1, chunk_bytes=1) as store:
            store.allocate()
            descriptors = [os.dup(fd) for fd in store.exports()]
            wrong = os.memfd_create("short")
            os.close(descriptors[failing_chunk])
            descriptors[failing_chunk] = wrong
            with pytest.raises(MemoryDomainError):
                with RowStore(mine, found.layout, 0, chunk_bytes=1) as reader:
                    reader.import_rows(1, descriptors)
            for fd in descriptors:
                os.close(fd)  # what was not taken over is still the caller's
            assert mine.live() == {"handles": 0, "mappings": 0, "ranges": 0, "descriptors": 0}
