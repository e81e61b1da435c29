"""Dense DWDP on decoders that know nothing of it: roots discovered, hooks put on their modules.

Mutation-checked once, each caught by a test below: no hook at H0, H1, H2 or H3; H3 not put off where the MoE block runs
first; the first layer does not stand in for H0; windows left open by a layer that skips a part; no check that a part
runs in its layer, once; no check for writes; hooks that keep the model alive; weights that are never sealed.
"""

from __future__ import annotations

import gc
import re
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch

from dwdp.config.schema import DenseConfig, DwdpConfig
from dwdp.device.host import HostDevice
from dwdp.errors import DwdpError, ModelReleasedError
from dwdp.group.threads import run_rank_threads
from dwdp.memory.host import HostDomain
from dwdp.runtime.manager import DwdpManager
from tests.support.dense_ranks import config, dense_ranks
from tests.support.foreign_decoders import (
    FOREIGN,
    Attention,
    HubModel,
    HubMoE,
    HybridModel,
    Mixer,
    MixtralModel,
    OwnTablesMoE,
    SpreadModel,
    build,
    spread_model,
)
from tests.support.tiny import tiny_model, tiny_model_config, token_ids

IDS = [torch.arange(start, start + 9) % 40 for start in (0, 7, 21)]


def discovering(rank=None, **changes):
    return config(**({"roots": "discover", "debug": 1} | changes))


def run(kind, body, *, n=2, settings=discovering, **options):
    """body(rank, logits): on rank threads; logits are what the model computes on its own weights, for each of IDS."""
    reference = build(kind, **options)
    expected = [reference(ids) for ids in IDS]
    return dense_ranks(n, lambda rank: body(rank, expected), build=partial(build, kind, **options), settings=settings)


def check(rank, expected):
    for ids, logits in zip(IDS, expected):
        assert torch.equal(rank.model(ids), logits)


def no_trouble(rank):
    c = rank.counters
    assert (c.demand_fetches, c.fences, c.synchronisations) == (0, 0, 0)


@pytest.mark.parametrize("segments", ["attn,moe", "attn"])
@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_decoder_computes_the_same_bits(kind, segments):
    """Slots start as NaN and every layer's weights differ: a read outside its window shows itself."""

    def body(rank, expected):
        report = rank.setup()
        assert report["status"] == "committed" and report["leaks"] == 0
        for _ in range(3):
            check(rank, expected)
        no_trouble(rank)
        assert rank.counters.barriers == 0
        assert rank.counters.copies == 9 * report["covered_layers"] + 2, "one gather a layer, two of the next forward"

    run(kind, body, n=3, settings=lambda rank: discovering(segments=segments))


def test_windows_are_open_while_their_weights_are_read():
    """The order of hooks and modules, as the schedule wants it, in a layer and where the MoE block runs first."""

    def body(rank, expected):
        rank.setup()
        calls = []
        for name in ("h0", "h1", "h2", "h3"):
            real = getattr(rank.manager, name)
            setattr(rank.manager, name, lambda *a, name=name, real=real: (calls.append((name, *a)), real(*a)))
        for module in rank.model.modules():
            if isinstance(module, torch.nn.Embedding | Attention | HubMoE | Mixer | OwnTablesMoE):
                real = module.forward
                name = type(module).__name__
                module.forward = lambda *a, name=name, real=real: (calls.append(name), real(*a))[1]
        rank.model(IDS[0])
        return calls

    (hub, _) = run(HubModel, body, num_layers=2)
    layer = [("h1", 1), "Attention", ("h2", 1), "HubMoE", ("h3", 1)]
    assert hub == [("h0",), "Embedding", "Attention", *layer]
    (hybrid, _) = run(HybridModel, body, num_layers=1)
    assert hybrid == [("h0",), "Embedding", ("h1", 1), "OwnTablesMoE", "Mixer", ("h2", 1), ("h3", 1)]


def test_the_module_that_runs_the_layers_may_be_called_alone():
    def body(rank, expected):
        rank.setup()
        inner = rank.model.model
        for ids, logits in zip(IDS, expected):
            assert torch.equal(rank.model.lm_head(inner(ids)), logits)
        no_trouble(rank)

    run(HubModel, body)


def test_without_a_call_of_the_module_around_the_layers_the_first_layer_is_the_entry():
    def body(rank, expected):
        rank.setup()

        def forward(ids):
            x = rank.model.model.embed_tokens(ids)
            for layer in rank.model.model.layers:
                x = layer(x)
            return rank.model.lm_head(rank.model.model.norm(x))

        rank.model.forward = forward
        for _ in range(2):
            check(rank, expected)
        no_trouble(rank)

    run(HubModel, body)


@pytest.mark.parametrize("point", ["model.norm", "model.layers.2", "model.layers.3.self_attn", "model.layers.4.mlp"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_aborted_forward_leaves_the_next_one_right(point, when):
    def body(rank, expected):
        rank.setup()
        check(rank, expected)
        module = rank.model.get_submodule(point)
        real = module.forward

        def fails(*args):
            if when == "after":
                real(*args)
            raise RuntimeError("aborted")

        module.forward = fails
        with pytest.raises(RuntimeError, match="aborted"):
            rank.model(IDS[0])
        module.forward = real
        check(rank, expected)
        no_trouble(rank)
        assert rank.counters.barriers == (point != "model.norm"), "behind the last layer the forward is over"

    run(HubModel, body)


def test_a_layer_that_skips_its_moe_block_closes_its_windows_at_its_end():
    def body(rank, expected):
        rank.setup()
        layer = rank.model.model.layers[2]
        real = layer.forward
        layer.forward = lambda x: x + layer.self_attn(layer.input_layernorm(x))
        rank.model(IDS[0])
        rank.model(IDS[0])
        layer.forward = real
        check(rank, expected)
        no_trouble(rank)
        assert rank.counters.barriers == 0, "no window was left for H0 to clean up"

    run(HubModel, body)


# ---- what is refused ----


def refused(rank, kind, match):
    rank.setup()
    with pytest.raises(kind, match=match):
        rank.model(IDS[0])


def test_a_part_that_runs_twice_or_outside_its_layer_is_refused():
    def twice(rank, expected):
        attention = rank.model.model.layers[2].self_attn
        rank.model.model.layers[2].forward = lambda x: attention(attention(x))
        refused(rank, DwdpError, "the attention runs a second time in layer 2")

    def outside(rank, expected):
        layer = rank.model.model.layers[1]
        rank.model.model.norm.forward = lambda x: layer.mlp(x)  # a module would become a child
        refused(rank, DwdpError, "the MoE block runs outside its layer's forward")

    def direct(rank, expected):
        layer = rank.model.model.layers[1]
        rank.model.model.forward = lambda ids: layer.forward(rank.model.model.embed_tokens(ids))
        refused(rank, DwdpError, "the attention runs outside its layer's forward")

    for body in (twice, outside, direct):
        run(HubModel, body)


def test_a_forward_that_reaches_no_layer_as_a_module_is_refused():
    def body(rank, expected):
        def forward(x):
            for layer in rank.model.transformer["h"]:
                attention, moe = layer.attention.forward, layer.block_sparse_moe.forward
                x = x + moe(layer.norm_2(attention(layer.norm_1(x))))
            return x

        rank.model.forward = lambda ids: forward(rank.model.transformer["wte"](ids))
        refused(rank, DwdpError, "h.0.attention.q_proj.weight is used outside .* must call its layers, .* as modules")

    run(MixtralModel, body)


def _late_shared_expert(layer, layers):
    return lambda x: layer.mlp(layer.self_attn(x)) + layer.mlp.shared_experts(x)


def _late_functional_read(layer, layers):
    return lambda x: layer.mlp(layer.self_attn(x)) + x @ layer.self_attn.o_proj.weight


def _attention_weights_in_the_moe_block(layer, layers):
    real = layer.mlp.forward
    layer.mlp.forward = lambda x: real(x) + layer.self_attn.v_proj(x)
    return layer.forward


def _attention_of_another_layer(layer, layers):
    return lambda x: layer.mlp(layers[0].self_attn(x))


def _part_of_another_layer(layer, layers):
    return lambda x: layer.mlp(layer.self_attn(x)) + layers[4].mlp.gate(x)[0].sum()


@pytest.mark.parametrize(
    "change, name",
    [
        (_late_shared_expert, "3.mlp.shared_experts.gate_proj.weight is used outside its layer's call"),
        (_late_functional_read, "3.self_attn.o_proj.weight is used outside the call of its layer's attention"),
        (_attention_weights_in_the_moe_block, "3.self_attn.v_proj.weight is used outside"),
        (_attention_of_another_layer, "0.self_attn.q_proj.weight is used outside"),
        (_part_of_another_layer, "4.mlp.gate.weight is used outside"),
    ],
)
def test_a_read_outside_its_window_raises_and_names_the_weight_and_the_next_forward_is_right(change, name):
    """Without the seals every one of these computes with another layer's weights, and nothing shows it.

    Fails when a window is not closed, or closed for the layer's other segment, or the attention's is never closed.
    """

    def body(rank, expected):
        rank.setup()
        layers = rank.model.model.layers
        layer = layers[3]
        real = layer.forward, layer.mlp.forward
        layer.forward = change(layer, layers)
        with pytest.raises(DwdpError, match=re.escape(f"model.layers.{name}")):
            rank.model(IDS[0])
        layer.forward, layer.mlp.forward = real
        check(rank, expected)

    run(HubModel, body, dense_layers=0)


def test_between_forwards_weights_say_what_they_are_like_and_cannot_be_loaded_saved_or_converted():
    def body(rank, expected):
        before = [(name, p.shape, p.dtype, p.device) for name, p in rank.model.named_parameters()]
        state = {name: tensor.clone() for name, tensor in rank.model.state_dict().items()}
        rank.setup()
        assert [(name, p.shape, p.dtype, p.device) for name, p in rank.model.named_parameters()] == before
        assert all(isinstance(p, torch.nn.Parameter) for p in rank.model.parameters())
        attention = rank.model.model.layers[1].self_attn
        for step in (
            attention.state_dict,
            rank.model.state_dict,
            attention.half,
            lambda: attention.q_proj.weight.sum(),
            lambda: attention.q_proj.weight.data_ptr(),
        ):
            with pytest.raises(DwdpError, match="self_attn.q_proj.weight is used outside"):
                step()
        with pytest.raises(RuntimeError, match="q_proj.weight is used outside"):
            rank.model.load_state_dict(state)
        assert "q_proj.weight" in repr(attention.q_proj.weight)
        attention.q_proj.weight = torch.nn.Parameter(torch.zeros(16, 16), requires_grad=False)
        assert not torch.equal(rank.model(IDS[0]), expected[0])
        assert not attention.q_proj.weight.any(), "what somebody else puts there stays"

    run(HubModel, body)


def test_after_release_nothing_lies_over_a_slot_any_more(caplog):
    def body(rank, expected):
        rank.setup()
        check(rank, expected)
        held = list(rank.model.parameters())
        rank.manager.drain()
        rank.manager.unmap_imports()
        rank.group.barrier("unmapped")
        rank.manager.release_own()
        return held

    run(HubModel, body)
    assert "tensors over it are alive" not in caplog.text


def test_a_saved_buffer_that_the_forward_writes_is_named():
    def body(rank, expected):
        for layer in rank.model.model.layers:
            layer.self_attn.register_buffer("cache", torch.zeros(32, 16))
        attention = rank.model.model.layers[3].self_attn
        real = attention.forward
        attention.forward = lambda x: (attention.cache[: len(x)].copy_(x), real(x))[1]
        refused(rank, DwdpError, "layer 3 writes model.layers.3.self_attn.cache, which lies in a slot")

    run(HubModel, body)


def test_a_forward_after_release_is_refused():
    def body(rank, expected):
        rank.setup()
        rank.manager.drain()
        rank.manager.unmap_imports()
        rank.group.barrier("unmapped")
        rank.manager.release_own()
        for forward in (rank.model, rank.model.model):
            with pytest.raises(ModelReleasedError):
                forward(IDS[0])

    run(HubModel, body)


def test_a_model_that_cannot_be_discovered_is_refused_or_stays_replicated():
    def ambiguous():
        model = build(HubModel)
        model.draft = build(HubModel)
        return model

    def refusing(rank):
        before = [p.data_ptr() for p in rank.model.parameters()]
        for step in (rank.setup, lambda: rank.manager.check_model(rank.model)):
            with pytest.raises(DwdpError, match="several lists hold layers"):
                step()
        assert [p.data_ptr() for p in rank.model.parameters()] == before

    def serving(rank):
        assert not rank.manager.check_model(rank.model)
        assert rank.setup()["status"] == "abandoned"
        rank.model(IDS[0])
        assert not rank.model._forward_pre_hooks and not rank.model.model._forward_pre_hooks

    dense_ranks(2, refusing, build=ambiguous, settings=discovering)
    dense_ranks(2, serving, build=ambiguous, settings=lambda rank: discovering(required=False))


def test_a_model_that_calls_the_hooks_itself_gets_none():
    def body(rank):
        assert rank.setup()["status"] == "committed"
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in rank.model.modules())
        rank.model(token_ids(9))
        no_trouble(rank)

    dense_ranks(2, body, settings=discovering, build=lambda: tiny_model(tiny_model_config()))


@pytest.mark.parametrize("slots", [2, 3])
def test_attached_to_expert_dwdp_a_foreign_decoder_computes_the_same_bits(slots):
    """H0 starts the experts' prefetch too; every forward but the first finds its first copies enqueued."""
    reference = build(SpreadModel)
    expected = [reference(ids) for ids in IDS]

    def on_rank(group):
        group.join({})
        settings = DwdpConfig(dwdp_size=3, page_granules=2, num_prefetch_slots=slots)
        with HostDomain(group.rank, granule_bytes=4096, page_granules=2) as domain, HostDevice() as device:
            resources = {"group": group, "domain": domain, "device": device}
            with DwdpManager(settings, discovering(), num_experts=8, **resources) as manager:
                model = spread_model(*manager.partition.ranges[group.rank])
                manager.check_model(model)
                report = manager.setup(model)
                assert report["dense"]["status"] == "committed" and report["dense"]["covered_layers"] == 4
                for ids, logits in zip(IDS * 2, expected * 2):
                    manager.start_forward()
                    assert torch.equal(model(ids), logits)
                    manager.end_forward()
                counters = manager.counters()
                assert not any(counters[name] for name in ("demand_fetches", "fences", "barriers", "synchronisations"))
                assert (counters["forwards"], counters["primed_forwards"]) == (6, 5)
                group.barrier("computed")
            with pytest.raises(ModelReleasedError):
                model(IDS[0])

    run_rank_threads(3, on_rank, timeout=30)


def test_attached_a_rank_that_does_not_discover_is_told_by_the_first_collective():
    def on_rank(group):
        group.join({})
        settings = DwdpConfig(dwdp_size=2, page_granules=2)
        with HostDomain(group.rank, granule_bytes=4096, page_granules=2) as domain, HostDevice() as device:
            resources = {"group": group, "domain": domain, "device": device}
            off = DenseConfig(enabled=False, roots="discover")
            with pytest.raises(DwdpError, match="DWDP_DENSE .rank 0: on, rank 1: off") as caught:
                dense = discovering() if group.rank == 0 else off
                with DwdpManager(settings, dense, num_experts=8, **resources) as manager:
                    manager.setup(spread_model(*manager.partition.ranges[group.rank]))
            return str(caught.value)

    run_rank_threads(2, on_rank, timeout=30)


def test_the_example_of_the_docs_runs(capsys):
    page = (Path(__file__).parents[2] / "docs" / "discovery.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.S)
    exec(compile(example, "discovery.md", "exec"), {"__name__": "example"})
    moved = 6 * 4 * (32 * 96 + 32 * 32 + 32 * 32)  # qkv, out and the shared expert
    assert capsys.readouterr().out.startswith(f"[(6, {moved}, ") and moved == 122880


def test_the_hooks_keep_no_model_alive():
    def body(rank, expected):
        rank.setup()
        check(rank, expected)
        model = weakref.ref(rank.model)
        rank.model = None
        gc.collect()
        return model() is None

    assert run(HubModel, body, n=1) == [True]
