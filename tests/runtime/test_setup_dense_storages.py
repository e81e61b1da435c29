"""Dense set-up of storages that are not plain tensors of their own, of names that change, and with clean-up that fails.

Mutation-checked once, each caught: a view put at the start of its storage; strides made contiguous; only the bytes that
a view covers moved; a clean-up step that keeps the next one from running.
"""

from __future__ import annotations

import gc

import pytest
import torch

from dwdp.device.host import HostDevice
from dwdp.errors import DwdpError
from dwdp.runtime.setup_dense import DenseSetup
from dwdp.runtime.slots import DenseSlots
from dwdp.weights.store import RowStore
from tests.support.dense_ranks import NOTHING_LIVE, dense_ranks, forward_and_check
from tests.support.toy_decoder import snapshot, value_bytes


def padded(attn):
    """The view begins behind ten elements and ends before seven of its storage."""
    q = attn.q.data
    storage = torch.full((10 + q.numel() + 7,), 3.0)
    storage[10 : 10 + q.numel()] = q.reshape(-1)
    attn.q.data = storage[10 : 10 + q.numel()].view(q.shape)


def transposed(attn):
    attn.q.data = attn.q.data.t().contiguous().t()


def every_other(attn):
    attn.q.data = torch.stack([attn.q.data, torch.full_like(attn.q.data, 9.0)], -1)[..., 0]


def padded_rows(attn):
    """Rows of 32 elements, of which the view shows as many as it has columns."""
    q = attn.q.data
    storage = torch.zeros(q.shape[0], q.shape[1] + 8)
    storage[:, 5 : 5 + q.shape[1]] = q
    attn.q.data = storage[:, 5 : 5 + q.shape[1]]


def one_row_for_all(attn):
    attn.q.data = attn.q.data[:1].clone().expand(attn.q.shape)


@pytest.mark.parametrize("change", [padded, transposed, every_other, padded_rows, one_row_for_all])
def test_a_storage_that_is_no_plain_tensor_moves_as_it_lies_with_all_its_views(change):
    def prepare(rank, model):
        for layer in model.layers[1:]:
            change(layer.attn)
            layer.attn.rows = layer.attn.q[1:3]

    def body(rank):
        expected = snapshot(rank.model)
        attn = rank.model.layers[2].attn
        before = (attn.q.shape, attn.q.stride(), attn.rows.stride(), attn.q.untyped_storage().nbytes())
        moved = rank.setup()["moved_bytes"]
        assert (attn.q.shape, attn.q.stride(), attn.rows.stride()) == before[:3]
        assert attn.rows.data_ptr() == attn.q[1:3].data_ptr(), "aliases stay aliases"
        assert moved == sum(s.nbytes for b in rank.manager.weights.layout.blobs for s in b.storages)
        assert before[3] in {s.nbytes for b in rank.manager.weights.layout.blobs for s in b.storages}
        forward_and_check(rank, expected)

    dense_ranks(3, body, prepare=prepare)


def test_tables_are_found_by_the_names_that_they_have_after_loading():
    """The transform of a module replaces `up` by `packed` and drops the old name."""

    def prepare(rank, model):
        for layer in model.layers[1:]:
            layer.shared.packed = torch.nn.Parameter(layer.shared.up.data.flip(0), requires_grad=False)
            del layer.shared.up
            layer.weights = lambda segment, layer=layer: (
                {"packed": layer.shared.packed} if segment == "moe" else {"q": layer.attn.q}
            )

    def body(rank):
        expected = snapshot(rank.model)
        before = value_bytes(rank.model.layers[1].shared.packed)
        rank.setup()
        assert not hasattr(rank.model.layers[1].shared, "up")
        names = {v.name for b in rank.manager.weights.layout.blobs for s in b.storages for v in s.views}
        assert "layers.1.shared.packed" in names and "layers.1.shared.up" not in names
        assert before == expected[1, "moe", "packed"]
        forward_and_check(rank, expected)

    dense_ranks(2, body, prepare=prepare)


def test_a_module_whose_transform_has_not_run_is_refused_on_every_rank_with_its_name():
    def prepare(rank, model):
        if rank == 1:
            model.layers[2].shared.weights_transformed = False

    def body(rank):
        before = snapshot(rank.model)
        with pytest.raises(DwdpError, match="Weights of layer 2 still waits for its post-load transform"):
            rank.setup()
        assert snapshot(rank.model) == before and rank.domain.live() == NOTHING_LIVE

    dense_ranks(2, body, prepare=prepare)


# ---- the first error is the one that is raised ----

CLEAN_UP = {"slots": (DenseSlots, "close"), "store": (RowStore, "close"), "device": (HostDevice, "recover")}


@pytest.mark.parametrize("second", CLEAN_UP)
def test_an_error_of_the_clean_up_is_logged_and_the_one_that_led_to_it_is_raised(second, monkeypatch, caplog):
    owner, name = CLEAN_UP[second]
    clean, repoint = getattr(owner, name), DenseSetup._repoint

    def failing(self):
        repoint(self)
        raise OSError(f"P5 failed on rank {self.group.rank}")

    def failing_too(self):
        clean(self)
        raise RuntimeError(f"{second} went wrong as well")

    monkeypatch.setattr(DenseSetup, "_repoint", failing)
    monkeypatch.setattr(owner, name, failing_too)

    def body(rank):
        before = snapshot(rank.model)
        with pytest.raises(OSError, match=f"P5 failed on rank {rank.group.rank}"):
            rank.setup()
        rank.group.barrier("all have given up")
        gc.collect()
        assert snapshot(rank.model) == before
        assert rank.domain.live() == NOTHING_LIVE and rank.domain.allocated_bytes == 0

    dense_ranks(2, body)
    assert f"RuntimeError: {second} went wrong as well" in caplog.text
