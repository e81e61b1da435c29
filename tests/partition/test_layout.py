"""Which dense weights move and how they are laid out.

Mutation-checked once, each caught by a test below: storages not aligned; rows not rounded; a storage that is held
outside the roots moves; a view's offset dropped; excluded names ignored.
"""

import pytest
import torch
from torch import nn

from dwdp.errors import DwdpError
from dwdp.partition.collect import collect
from dwdp.partition.layout import ALIGNMENT, cuts, gathered_checksums, original_checksums
from dwdp.partition.roots import has_dense_roots
from tests.support.toy_decoder import ToyModel, Weights


def layout_of(model, *, num_ranks=3, segments=("attn", "moe"), min_bytes=1, strict=False):
    return collect(model, num_ranks=num_ranks, segments=segments, min_bytes=min_bytes, strict=strict)


def moved_names(collected):
    return {view.name for blob in collected.layout.blobs for s in blob.storages for view in s.views}


def test_exactly_the_declared_roots_move_with_allowed_attributes_and_aliases():
    collected = layout_of(ToyModel(2), strict=True)
    expected = {
        f"layers.{i}.{name}"
        for i in (1, 2)
        for name in ("attn.q", "attn.rows", "attn.o", "gate.weight", "shared.up", "shared.down")
    }
    assert moved_names(collected) == expected
    assert [(b.pos, b.layer_index, b.segment) for b in collected.layout.blobs] == [
        (0, 1, "A"),
        (0, 1, "D"),
        (1, 2, "A"),
        (1, 2, "D"),
    ]
    assert collected.stays == []


def test_a_view_shares_its_storage_and_keeps_offset_shape_stride_and_dtype():
    model = ToyModel(1)
    model.layers[1].attn.q.data = torch.randn(24, 25).t()  # a storage is moved as it lies, transposed or not
    model.layers[1].attn.rows = model.layers[1].attn.q[1:3]
    blob = layout_of(model).layout.blobs[0]
    by_name = {view.name.rpartition(".")[2]: (s, view) for s in blob.storages for view in s.views}
    assert by_name["q"][0] is by_name["rows"][0] and len(blob.storages) == 2
    q, rows, o = (by_name[name][1] for name in ("q", "rows", "o"))
    assert (q.shape, q.stride, q.offset) == ((25, 24), (1, 25), 0)
    assert (rows.shape, rows.stride, rows.offset) == ((2, 24), (1, 25), 1)
    assert o.dtype == "torch.bfloat16" and by_name["o"][0].nbytes == 24 * 7 * 2


def test_a_storage_larger_than_its_view_moves_whole():
    model = ToyModel(1)
    del model.layers[1].attn.rows
    model.layers[1].attn.q.data = torch.randn(1000)[10 : 10 + 24 * 24].view(24, 24)
    storage = layout_of(model).layout.blobs[0].storages[0]
    assert storage.nbytes == 4000 and storage.views[0].offset == 10


@pytest.mark.parametrize("num_ranks", [2, 3, 5, 7])
def test_storages_and_rows_are_multiples_of_256_bytes_and_shares_add_up(num_ranks):
    layout = layout_of(ToyModel(3), num_ranks=num_ranks).layout
    for blob in layout.blobs:
        end = 0
        for storage in blob.storages:
            assert storage.offset % ALIGNMENT == 0 and storage.offset - end < ALIGNMENT
            end = storage.offset + storage.nbytes
        assert blob.row_nbytes % ALIGNMENT == 0
        assert end <= blob.nbytes < end + num_ranks * ALIGNMENT
        assert blob.moved_nbytes == sum(blob.share_nbytes(rank) for rank in range(num_ranks))
        assert [blob.segment, blob.nbytes <= layout.largest(blob.segment)] == [blob.segment, True]
    assert layout.moved_nbytes == sum(layout.share_nbytes(rank) for rank in range(num_ranks))


def test_small_storages_stay_and_attention_alone_can_move():
    limit = 24 * 24 * 4
    names = moved_names(layout_of(ToyModel(2), min_bytes=limit, strict=True))
    assert names and not any(name.endswith(("gate.weight", ".o")) for name in names)
    attention = layout_of(ToyModel(2), segments=("attn",)).layout
    assert {blob.segment for blob in attention.blobs} == {"A"} and attention.segments == ("A", "A")


def test_layers_without_a_blob_do_not_count_in_pos():
    model = ToyModel(3)
    for module in (model.layers[2].attn, model.layers[2].gate, model.layers[2].shared):
        for parameter in module.parameters():
            parameter.data = torch.zeros(1)
    del model.layers[2].attn.rows
    assert layout_of(model, min_bytes=100).layout.positions == {1: 0, 3: 1}


def shared_across_layers(model):
    model.layers[2].attn.q = model.layers[1].attn.q
    model.layers[2].attn.rows = model.layers[2].attn.q[1:3]
    return {"attn.q", "attn.rows"}, "shared across layers 1, 2"


def held_outside(model):
    model.tied = model.layers[1].shared.up.data[1:]
    return {"shared.up"}, "shares its storage with tied"


def held_by_an_excluded_name(model):
    model.layers[1].attn.scratch = model.layers[1].attn.o
    return {"attn.o"}, "shares its storage with layers.1.attn.scratch"


def held_by_an_unknown_attribute(model):
    model.layers[1].attn.cached = model.layers[1].attn.o.data
    return {"attn.o"}, "layers.1.attn.cached .* neither dense_dwdp_allowed nor"


def held_in_a_list(model):
    model.layers[1].attn.cached = [model.layers[1].attn.o.data]
    return {"attn.o"}, "layers.1.attn.cached .* neither dense_dwdp_allowed nor"


@pytest.mark.parametrize(
    "change",
    [shared_across_layers, held_outside, held_by_an_excluded_name, held_by_an_unknown_attribute, held_in_a_list],
)
def test_what_others_hold_stays_and_is_an_error_with_strict(change):
    model = ToyModel(2)
    before = moved_names(layout_of(model))
    staying, message = change(model)
    collected = layout_of(model)
    gone = {name.split(".", 2)[2] for name in before - moved_names(collected)}
    assert gone == staying and len(collected.stays) == 1
    with pytest.raises(DwdpError, match=message):
        layout_of(model, strict=True)


def test_a_large_unknown_attribute_of_its_own_is_an_error_with_strict_only_from_min_bytes_on():
    model = ToyModel(1)
    model.layers[1].attn.table = torch.zeros(64)
    assert not any("table" in name for name in moved_names(layout_of(model)))
    layout_of(model, min_bytes=257, strict=True)
    with pytest.raises(DwdpError, match="table .256 bytes."):
        layout_of(model, min_bytes=256, strict=True)


def test_a_storage_shared_inside_a_layer_moves_once_and_with_the_longer_window():
    model = ToyModel(2)
    model.layers[1].attn.o = model.layers[1].gate.weight  # read in both segments: D's window covers A's
    layout = layout_of(model, strict=True).layout
    found = [(blob.name, s) for blob in layout.blobs for s in blob.storages if s.name.endswith("layers.1.attn.o")]
    assert len(found) == 1 and found[0][0] == "layer 1 MoE-dense"
    assert {view.name for view in found[0][1].views} == {"layers.1.attn.o", "layers.1.gate.weight"}


def test_what_attention_shares_with_the_moe_part_stays_when_attention_alone_moves():
    model = ToyModel(1)
    model.layers[1].attn.o = model.layers[1].gate.weight
    assert "layers.1.attn.o" not in moved_names(layout_of(model, segments=("attn",)))


def test_a_module_whose_transform_has_not_run_and_weights_without_bytes_are_refused():
    model = ToyModel(1)
    model.layers[1].shared.weights_transformed = False
    with pytest.raises(DwdpError, match="Weights of layer 1 still waits for its post-load transform"):
        layout_of(model)
    model.layers[1].shared.weights_transformed = True
    layout_of(model)
    model.layers[1].shared.up = nn.Parameter(torch.empty(9, 9, device="meta"), requires_grad=False)
    with pytest.raises(DwdpError, match="layers.1.shared.up has no bytes"):
        layout_of(model)


def test_layout_is_collected_after_a_transform_that_replaces_attributes():
    model = ToyModel(1)
    model.layers[1].shared.packed = nn.Parameter(model.layers[1].shared.up.data.clone(), requires_grad=False)
    del model.layers[1].shared.up
    names = moved_names(layout_of(model, strict=True))
    assert "layers.1.shared.packed" in names and "layers.1.shared.up" not in names


def test_the_digest_is_deterministic_and_depends_on_every_fact():
    digest = layout_of(ToyModel(2)).layout.digest
    assert digest == layout_of(ToyModel(2, seed=9)).layout.digest, "weights are no part of it"
    others = {layout_of(ToyModel(2), num_ranks=4).layout.digest, layout_of(ToyModel(3)).layout.digest}
    model = ToyModel(2)
    model.layers[1].attn.o.data = model.layers[1].attn.o.data.to(torch.float16)
    others.add(layout_of(model).layout.digest)
    model = ToyModel(2)
    model.layers[1].attn.rows = model.layers[1].attn.q[2:4]
    others.add(layout_of(model).layout.digest)
    assert len(others | {digest}) == 5


def test_checksums_see_every_byte_and_the_pad():
    collected = layout_of(ToyModel(1))
    blob = collected.layout.blobs[0]
    originals = [collected.storage_bytes(0, i) for i in range(len(blob.storages))]
    data = torch.zeros(blob.nbytes, dtype=torch.uint8)
    for storage, original in zip(blob.storages, originals):
        data[storage.offset : storage.offset + storage.nbytes] = original
    expected = original_checksums(blob, originals)
    assert gathered_checksums(blob, data) == expected
    pad_byte = blob.storages[0].nbytes
    assert blob.locate(pad_byte).startswith("pad byte") and data[pad_byte] == 0
    pieces = cuts(blob)
    of_second = next(i for i, cut in enumerate(pieces) if cut.storage == 1)
    pad = len(pieces)
    for byte, changed in ((3, 0), (pad_byte, pad), (blob.nbytes - 1, pad), (blob.storages[1].offset, of_second)):
        data[byte] ^= 1
        wrong = [i for i, (a, b) in enumerate(zip(gathered_checksums(blob, data), expected)) if a != b]
        assert wrong == [changed]
        data[byte] ^= 1


def test_a_model_without_declarations_has_no_roots_and_needs_no_weights_to_tell():
    assert not has_dense_roots(nn.Sequential(nn.Linear(2, 2)))
    assert not has_dense_roots(ToyModel(0))
    assert has_dense_roots(ToyModel(1).to("meta"))
    assert layout_of(ToyModel(0)).layout.blobs == ()


def test_roots_may_overlap_and_unknown_segments_are_refused():
    model = ToyModel(1)
    layer = model.layers[1]
    layer.dense_dwdp_roots = lambda: {"attn": [layer.attn, layer.attn]}
    assert len(layout_of(model).layout.blobs) == 1
    layer.dense_dwdp_roots = lambda: {"mlp": [Weights({})]}
    with pytest.raises(DwdpError, match="'mlp'"):
        layout_of(model)


def test_of_kimi_k3s_layers_exactly_attention_and_the_five_moe_roots_move():
    """The real layers, strict, from one byte on: nothing of layer 0, no routed expert, no routing bias, no norm."""
    from tests.support.tiny import tiny_model, tiny_model_config

    config = tiny_model_config()
    model = tiny_model(config)
    found = layout_of(model, strict=True)
    roots = {
        "A": ("self_attn.",),
        "D": tuple(
            f"block_sparse_moe.{name}."
            for name in (
                "gate", "shared_experts", "routed_expert_down_proj", "routed_expert_up_proj", "routed_expert_norm"
            )
        ),
    }  # fmt: skip
    expected = {
        (index, segment, name)
        for index in config.moe_layer_indices
        for segment, prefixes in roots.items()
        for name, _ in model.named_parameters()
        if name.startswith(tuple(f"model.layers.{index}.{prefix}" for prefix in prefixes))
        and not name.endswith("e_score_correction_bias")
    }
    moved = {
        (blob.layer_index, blob.segment, view.name)
        for blob in found.layout.blobs
        for storage in blob.storages
        for view in storage.views
    }
    kinds = {type(layer.self_attn).__name__ for layer in model.model.layers[1:]}
    assert moved == expected and len(kinds) == 2, "both kinds of attention are among them"
    assert {index for index, _, _ in moved} == {1, 2, 3, 4}
    assert not any(".experts." in name or "e_score_correction_bias" in name for _, _, name in moved)
    assert found.stays == [] and found.layout.moved_nbytes == sum(
        model.get_parameter(name).nbytes for _, _, name in expected
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_cuts_are_the_bytes_of_storages_once_and_none_crosses_the_end_of_a_row(num_ranks):
    for blob in layout_of(ToyModel(2), num_ranks=num_ranks).layout.blobs:
        owner = {}
        for cut in cuts(blob):
            storage = blob.storages[cut.storage]
            assert storage.offset <= cut.start < cut.end <= storage.offset + storage.nbytes
            for byte in range(cut.start, cut.end):
                assert byte not in owner and byte // blob.row_nbytes == cut.row
                owner[byte] = cut.storage
        assert len(owner) == blob.moved_nbytes
