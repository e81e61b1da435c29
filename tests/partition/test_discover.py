"""Dense roots of decoders that declare none: found from the structure, or refused naming what was found.

Mutation-checked once, each caught by a test below: shared experts taken for routed ones; the routing bias not excluded;
outer lists kept beside inner ones; a matrix count of one for attention; buffers that are not saved moved; what lies
beside the segments not looked at; routed experts reported as left out; the layout ordered by what was seen first.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import dwdp
from dwdp.errors import DwdpError
from dwdp.model.config import ModelConfig
from dwdp.model.decoder import DecoderLayer, KimiK3Model
from dwdp.model.loader import load_model
from dwdp.partition.collect import collect
from dwdp.partition.discover import discover_roots
from dwdp.partition.roots import find_roots, has_dense_roots, why_no_roots
from tests.support.foreign_decoders import MLP, Attention, HubModel, HubMoE, HybridModel, MixtralModel, Norm, build
from tests.support.tiny import tiny_48b_config_dict, tiny_config_dict


def collected(model, *, roots="discover", segments=("attn", "moe"), min_bytes=1, strict=False):
    return collect(model, num_ranks=3, segments=segments, min_bytes=min_bytes, strict=strict, roots=roots)


def moved(model, **options):
    return {
        (blob.layer_index, blob.segment, view.name)
        for blob in collected(model, **options).layout.blobs
        for storage in blob.storages
        for view in storage.views
    }


NANO = Path(dwdp.__file__).parent / "models" / "nano-k3"


def kimi(changes) -> KimiK3Model:
    return KimiK3Model(ModelConfig.from_dict(changes), dtype=torch.float32, device="cpu").requires_grad_(False)


def nano() -> KimiK3Model:
    return load_model(NANO, dtype=torch.bfloat16)


KIMI = {
    "nano-k3": nano,
    "tiny K3": lambda: kimi(tiny_config_dict()),
    "48B": lambda: kimi(tiny_48b_config_dict()),
    # As many experts as the latent width: a norm's weight is as long as the routing bias.
    "as many experts as columns": lambda: kimi(tiny_config_dict(num_experts=32, num_experts_per_token=3)),
    "one rank's experts": lambda: KimiK3Model(
        ModelConfig.from_dict(tiny_config_dict()), dtype=torch.float32, device="cpu", expert_range=(2, 5)
    ).requires_grad_(False),
}  # fmt: skip


@pytest.mark.parametrize("name", KIMI)
def test_discovery_finds_what_kimi_declares_without_its_declaration(name, monkeypatch):
    model = KIMI[name]()
    declared = collected(model, roots="declared").layout
    roots = find_roots(model)
    assert collected(model).layout.digest == declared.digest
    for attribute in ("dense_dwdp_roots", "dense_dwdp_allowed", "dense_dwdp_excluded"):
        monkeypatch.delattr(DecoderLayer, attribute)
    assert not has_dense_roots(model)
    found = discover_roots(model)
    assert collected(model).layout == declared and declared.blobs
    for one, other in zip(found, roots, strict=True):
        assert (one.index, one.layer) == (other.index, other.layer)
        assert {name: set(modules) for name, modules in one.segments.items()} == {
            name: set(modules) for name, modules in other.segments.items()
        }
        assert one.hooks.attention is one.layer.self_attn and one.hooks.moe is one.layer.block_sparse_moe
        assert one.hooks.owner is model.model


def attention_names(prefix):
    return {f"{prefix}.{name}_proj.weight" for name in "qkvo"}


def test_names_of_the_hub_and_a_layer_without_moe_stays_out():
    model = build(HubModel)
    expected = set()
    for i in range(1, 5):
        expected |= {(i, "A", name) for name in attention_names(f"model.layers.{i}.self_attn")}
        names = ["gate.weight", *(f"shared_experts.{n}_proj.weight" for n in ("gate", "up", "down"))]
        expected |= {(i, "D", f"model.layers.{i}.mlp.{name}") for name in names}
    assert moved(model) == expected
    assert moved(model, segments=("attn",)) == {place for place in expected if place[1] == "A"}
    assert moved(build(HubModel, dense_layers=0)) > expected, "layer 0 has a MoE block there"


def test_a_block_without_shared_expert_below_a_module_dict():
    model = build(MixtralModel)
    expected = set()
    for i in range(4):
        expected |= {(i, "A", name) for name in attention_names(f"transformer.h.{i}.attention")}
        expected.add((i, "D", f"transformer.h.{i}.block_sparse_moe.gate.weight"))
    assert moved(model) == expected
    assert discover_roots(model)[0].hooks.owner is model, "a container has no forward"


def test_an_unnamed_mixer_and_tables_in_the_block_itself():
    model = build(HybridModel)
    expected = set()
    for i in (1, 2, 3):
        expected |= {(i, "A", f"{i}.temporal.{m}.{t}") for m in ("into", "out") for t in ("weight", "bias")}
        expected |= {(i, "D", f"{i}.moe.shared.{n}_proj.weight") for n in ("gate", "up", "down")}
        expected.add((i, "D", f"{i}.moe.router"))
    assert moved(model) == expected


def test_a_list_of_shared_experts_is_dense():
    model = build(HubModel)
    for layer in model.model.layers[1:]:
        layer.mlp.shared_experts = nn.ModuleList([MLP(), MLP()])
    names = {name for _, _, name in moved(model)}
    assert "model.layers.2.mlp.shared_experts.1.up_proj.weight" in names
    assert not any(".experts." in name for name in names)


def test_it_needs_no_weights():
    with torch.device("meta"):
        assert len(discover_roots(HubModel())) == 4


# ---- what cannot be told ----


def a_draft_module(model):
    model.draft = HubModel(1, 0)
    return "several lists hold layers with attention and a MoE block: model.layers, draft.model.layers"


def two_attentions(model):
    model.model.layers[2].cross_attn = Attention()
    return "model.layers.2 needs one attention module beside its MoE block mlp but has several: self_attn, cross_attn"


def no_attention_in_one_layer(model):
    model.model.layers[2].self_attn = Norm()
    return "model.layers.2 needs one attention module .* but has self_attn, mlp, input_layernorm, post_att"


def no_attention_at_all(model):
    for layer in model.model.layers:
        layer.self_attn = Norm()
    return "no module beside the routed experts in model.layers looks like attention"


def two_moe_blocks(model):
    model.model.layers[3].second = HubMoE()
    return r"model.layers.3 has routed experts .mlp.experts, second.experts. but no module below it holds them"


def no_block_around_the_experts(model):
    layer = model.model.layers[1]
    layer.gate, layer.experts, layer.mlp = layer.mlp.gate, layer.mlp.experts, layer.mlp.shared_experts
    return r"model.layers.1 has routed experts .experts. but no module below it holds them and a router"


def the_same_layer_twice(model):
    model.model.layers[3] = model.model.layers[2]
    return "model.layers.2 and model.layers.3 are one module"


@pytest.mark.parametrize(
    "change",
    [
        a_draft_module,
        two_attentions,
        no_attention_in_one_layer,
        no_attention_at_all,
        two_moe_blocks,
        no_block_around_the_experts,
        the_same_layer_twice,
    ],
)
def test_what_could_mean_two_things_is_refused_with_one_line_that_names_them(change):
    model = build(HubModel)
    message = change(model)
    with pytest.raises(DwdpError, match=message) as caught:
        discover_roots(model)
    assert "\n" not in str(caught.value) and "declare them" in str(caught.value)
    assert why_no_roots(model, "discover") == str(caught.value) and not has_dense_roots(model, "discover")


def test_a_model_without_moe_has_no_roots():
    model = build(HubModel, dense_layers=5)
    assert discover_roots(model) == [] and "no layer of HubModel" in why_no_roots(model, "discover")


def test_stages_around_the_layers_are_no_second_list():
    model = nn.Sequential(nn.ModuleDict({"layers": build(HubModel).model.layers}))
    assert [layer.path for layer in discover_roots(model)] == [f"0.layers.{i}" for i in (1, 2, 3, 4)]


# ---- what discovery leaves out ----


def test_with_strict_what_lies_beside_the_segments_of_a_covered_layer_is_an_error_from_min_bytes_on():
    model = build(HubModel)
    model.model.layers[2].extra = MLP(50)
    model.model.layers[0].extra = MLP(60)  # not covered
    large = 16 * 50 * 4
    with pytest.raises(DwdpError, match="layers.2.extra.gate_proj.weight .3200 bytes. is part of a covered layer"):
        # Attention's weights are smaller than the extra one: nothing of layer 2 would move but for this buffer.
        model.model.layers[2].self_attn.register_buffer("table", torch.zeros(large))
        collected(model, min_bytes=large, strict=True)
    assert len(collected(model, min_bytes=large).stays) == 3
    del model.model.layers[2].self_attn.table
    collected(model, min_bytes=large, strict=True)  # a layer of which nothing moves is not covered
    with pytest.raises(DwdpError, match="input_layernorm.weight .64 bytes."):
        collected(build(HubModel), min_bytes=64, strict=True)
    collected(build(HybridModel), min_bytes=65, strict=True)  # routed tables are 2304 bytes and not left out


def test_buffers_that_are_not_saved_stay_and_are_an_error_with_strict():
    model = build(HubModel)
    collected(model, min_bytes=32 * 32 + 1, strict=True)
    with pytest.raises(DwdpError, match="self_attn.mask .1024 bytes, neither a parameter nor a saved buffer"):
        collected(model, min_bytes=32 * 32, strict=True)


def test_an_attribute_over_a_weight_moves_with_it_and_alone_it_stays():
    model = build(HubModel)
    for layer in model.model.layers[1:]:
        layer.self_attn.turned = layer.self_attn.q_proj.weight.data.t()
        layer.self_attn.copied = layer.self_attn.q_proj.weight.data.clone()
    names = {name for _, _, name in moved(model)}
    assert "model.layers.1.self_attn.turned" in names and "model.layers.1.self_attn.copied" not in names
    assert any("self_attn.copied" in line for line in collected(model).stays)


def test_views_seen_before_their_weight_do_not_change_the_order():
    plain, model = build(HubModel), build(HubModel)
    for layer in model.model.layers[1:]:
        layer.self_attn.turned = layer.self_attn.o_proj.weight.data.t()  # of the last weight, on the outer module
    order = [[s.name for s in blob.storages] for blob in collected(plain).layout.blobs]
    assert [[s.name for s in blob.storages] for blob in collected(model).layout.blobs] == order


def test_tables_of_names_on_a_layer_are_honoured():
    model = build(HubModel)
    for layer in model.model.layers:
        layer.dense_dwdp_allowed, layer.dense_dwdp_excluded = {"table"}, {"mask"}
        layer.self_attn.table = torch.zeros(300)
    names = {name for _, _, name in moved(model)}
    assert "model.layers.1.self_attn.table" in names
    collected(model, min_bytes=65, strict=True)
