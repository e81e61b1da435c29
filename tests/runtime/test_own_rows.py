"""Own rows mapped in place: slot pages and the own row's handle make up a blob's range, and only peers' rows move.

Mutation-checked once, each caught by a test below: a plan that copies the own row too; NaN bytes written over whole
ranges at commit; slots that count the own row's pages.
"""

import logging

import pytest
import torch

from dwdp.config.gate import check_supported
from dwdp.config.schema import DenseConfig, ServeConfig
from dwdp.errors import ConfigError
from dwdp.partition.layout import checksum
from tests.support.dense_ranks import config, dense_ranks, forward_and_check
from tests.support.toy_decoder import snapshot


def mapped(rank, **changes):
    return config(own_rows="map", **changes)


@pytest.mark.parametrize("num_ranks, num_layers", [(2, 3), (3, 5), (5, 2)])
def test_every_read_finds_the_original_bytes_and_own_rows_are_not_copied(num_ranks, num_layers):
    def body(rank):
        expected = snapshot(rank.model)
        report = rank.setup()
        weights, me = rank.manager.weights, rank.group.rank
        rows = [checksum(weights.store.row(me, number)) for number in range(len(weights.layout.blobs))]
        forward_and_check(rank, expected, count=3)
        layout = weights.layout
        per_forward = sum(blob.row_nbytes * (layout.num_ranks - 1) for blob in layout.blobs)
        ahead = sum(blob.row_nbytes * (layout.num_ranks - 1) for blob in layout.blobs if blob.pos < 2)
        assert rank.counters.copied_bytes == 3 * per_forward + ahead
        assert rows == [checksum(weights.store.row(me, number)) for number in range(len(rows))], "never written"
        assert rank.domain.allocated_bytes == report["stored_bytes"] + report["slot_bytes"]
        assert rank.domain.live()["descriptors"] == 0
        return report

    reports = dense_ranks(num_ranks, body, settings=mapped, num_layers=num_layers)
    assert {report["status"] for report in reports} == {"committed"}


def test_slots_need_less_memory_than_with_copied_rows_where_rows_are_large():
    """Two ranks: half of every slot is the own row, which is stored anyway."""

    def slots_of(own_rows):
        def body(rank):
            rank.domain.page_bytes = 4096
            return rank.setup()["slot_bytes"]

        settings = lambda rank: config(own_rows=own_rows)  # noqa: E731
        return dense_ranks(2, body, settings=settings, width=96)

    copied, in_place = slots_of("copy"), slots_of("map")
    assert all(less <= 0.6 * more for less, more in zip(in_place, copied)), (in_place, copied)


def test_edge_bytes_of_the_own_handle_are_the_neighbours_behind_setup():
    def body(rank):
        rank.setup()
        weights = rank.manager.weights
        for number, blob in enumerate(weights.layout.blobs):
            store, me = weights.store, rank.group.rank
            geometry = store.composite(number, rank.domain.page_bytes)
            first, end = geometry.handle.page_start, min(geometry.handle.page_end, blob.nbytes)
            rank.manager.weights.slots.fill_with_nan()
            found = weights.slots.data(number)[first:end]
            whole = torch.cat([store.row(peer, number) for peer in range(blob.num_rows)])
            assert torch.equal(found, whole[first:end]), (blob.name, me)

    dense_ranks(3, body, settings=mapped)


def test_debug_leaves_own_rows_alone_and_the_watchdog_reads_every_blob():
    def body(rank):
        expected = snapshot(rank.model)
        rank.setup()
        forward_and_check(rank, expected, count=2)
        assert rank.manager.runtime.watch_mismatches == 0
        assert rank.counters.synchronisations == 2 * 3

    dense_ranks(2, body, settings=lambda rank: mapped(rank, debug=2))


def test_a_flipped_byte_of_the_own_row_is_found_where_it_lies(caplog):
    caplog.set_level(logging.ERROR)

    def body(rank):
        rank.setup()
        if rank.group.rank == 0:
            rank.manager.weights.store.row(0, 0)[5] ^= 1
        rank.group.barrier("flipped")
        rank.model()
        return rank.manager.runtime.watch_mismatches

    assert dense_ranks(2, body, settings=lambda rank: mapped(rank, debug=2)) == [1, 1]
    assert "a row itself has changed since set-up" in caplog.text


def test_ranks_that_differ_on_it_all_abandon():
    def body(rank):
        expected = snapshot(rank.model)
        report = rank.setup()
        assert report["status"] == "abandoned" and "dense_dwdp.own_rows" in report["problem"]
        assert snapshot(rank.model) == expected

    dense_ranks(3, body, settings=lambda rank: config(own_rows="map" if rank == 1 else "copy", required=False))


def test_a_store_of_large_handles_does_not_go_with_it():
    dense = DenseConfig(enabled=True, own_rows="map", store_chunk_mb=16)
    with pytest.raises(ConfigError, match="own_rows: map .* store_chunk_mb 16"):
        check_supported(ServeConfig(ranks=2, dense_dwdp=dense), "attached")
