"""The decoder: names, sizes, batches, states, DWDP's hooks and read windows, gradients, golden tensors."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dwdp.errors import DwdpError, ModelReleasedError
from dwdp.model import decoder
from dwdp.model.config import ModelConfig
from dwdp.model.decoder import KimiK3Model
from dwdp.model.norms import residual_mix
from dwdp.model.state import ModelState
from tests.support import make_golden
from tests.support.tiny import (
    chunked,
    fill_model,
    random_tensors,
    tiny_config_dict,
    tiny_model,
    tiny_model_config,
    token_ids,
)

CONFIG = tiny_model_config()


@pytest.fixture(scope="module")
def model() -> KimiK3Model:
    return tiny_model(CONFIG)


def test_golden_logits_and_states():
    """An independent implementation's results, for machines where it cannot run."""
    weights, want = make_golden.load()
    config = ModelConfig.from_dict(make_golden.CONFIG)
    model = tiny_model(config, {name: t.float() for name, t in weights.items()})
    state = model.new_state(1, make_golden.NUM_TOKENS)
    got = model(want["ids"], state)
    assert (got - want["logits"]).abs().max() < make_golden.TOLERANCE
    assert (got - want["logits"]).abs().median() < 1e-5
    for name in want:
        if name.startswith("state."):
            _, layer, which = name.split(".")
            ours = getattr(state.layers[int(layer)], which)
            torch.testing.assert_close(ours, want[name], atol=1e-4, rtol=0)


def test_k3_has_the_releases_names_sizes_and_layer_kinds():
    """Every parameter count of the release's arithmetic, on the meta device at full size."""
    full = [*range(4, 89, 4), 92, 93]
    config = ModelConfig.from_dict(
        tiny_config_dict(
            vocab_size=163840, hidden_size=7168, num_hidden_layers=93, num_attention_heads=96,
            num_key_value_heads=96, intermediate_size=33792, q_lora_rank=1536, kv_lora_rank=512,
            qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, num_experts=896,
            num_experts_per_token=16, moe_intermediate_size=3072, routed_expert_hidden_size=3584,
            attn_res_block_size=12,
            linear_attn_config={
                "num_heads": 96, "head_dim": 128, "full_attn_layers": full,
                "kda_layers": [i for i in range(1, 94) if i not in full],
            },
        )
    )  # fmt: skip
    model = KimiK3Model(config, expert_range=(112, 224))
    layers = model.model.layers
    assert [i for i in range(93) if config.layer_kind(i) == "mla"] == [*range(3, 88, 4), 91, 92]
    assert [i for i, layer in enumerate(layers) if layer.starts_block] == list(range(0, 85, 12))

    def count(module):
        return sum(p.numel() for p in module.parameters())

    kda, mla, moe = layers[1].self_attn, layers[3].self_attn, layers[1].block_sparse_moe
    assert (count(kda), count(mla)) == (443_740_416 - 32, 232_196_096)
    assert count(moe) - count(moe.experts) == 189_927_808
    assert count(moe.experts) == 112 * 33_030_144
    assert [e.layer_index for e in model.moe_layers()] == list(range(1, 93))
    total = count(model) + 92 * (896 - 112) * 33_030_144 + 69 * 32
    assert round(total / 1e9, 1) == 2779.5
    fp32 = {n.split("self_attn.")[1] for n, p in kda.named_parameters("self_attn") if p.dtype == torch.float32}
    convs = {f"{c}_conv1d.weight" for c in "qkv"}
    assert fp32 == {"A_log", "dt_bias", "o_norm.weight"} | convs
    assert moe.gate.e_score_correction_bias.dtype == torch.float32
    assert moe.gate.weight.dtype == torch.bfloat16
    names = dict(model.named_parameters())
    for name, shape in {
        "model.embed_tokens.weight": (163840, 7168),
        "model.norm.weight": (7168,),
        "model.output_attn_res_proj.weight": (1, 7168),
        "model.output_attn_res_norm.weight": (7168,),
        "lm_head.weight": (163840, 7168),
        "model.layers.0.self_attention_res_proj.weight": (1, 7168),
        "model.layers.0.mlp_res_norm.weight": (7168,),
        "model.layers.0.mlp.gate_proj.weight": (33792, 7168),
        "model.layers.0.self_attn.q_conv1d.weight": (12288, 1, 4),
        "model.layers.0.self_attn.f_b_proj.weight": (12288, 128),
        "model.layers.0.self_attn.A_log": (96,),
        "model.layers.92.self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
        "model.layers.92.self_attn.kv_b_proj.weight": (24576, 512),
        "model.layers.92.self_attn.q_a_layernorm.weight": (1536,),
        "model.layers.92.block_sparse_moe.gate.weight": (896, 7168),
        "model.layers.92.block_sparse_moe.routed_expert_norm.weight": (3584,),
        "model.layers.92.block_sparse_moe.shared_experts.down_proj.weight": (7168, 6144),
        "model.layers.92.block_sparse_moe.experts.w13": (112, 6144, 3584),
        "model.layers.92.block_sparse_moe.experts.w2": (112, 3584, 3072),
    }.items():
        assert tuple(names[name].shape) == shape, name


def test_residual_mix_equals_its_formula():
    draw = torch.Generator().manual_seed(0)
    rows = [3 * torch.randn(2, 5, 64, generator=draw, dtype=torch.float64) for _ in range(4)]
    proj, norm = (torch.randn(s, generator=draw, dtype=torch.float64) for s in ((1, 64), (64,)))
    stacked = torch.stack(rows)
    score = (stacked / (stacked.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm * proj[0]).sum(-1)
    want = (score.exp() / score.exp().sum(0))[..., None].mul(stacked).sum(0)
    torch.testing.assert_close(residual_mix(rows[3], rows[:3], proj, norm, 1e-5), want)
    assert residual_mix(rows[3], [], proj, norm, 1e-5) is rows[3]


def test_decode_of_sequences_of_unequal_length_equals_each_alone(model):
    prompts = [token_ids(n, seed=n) for n in (5, 64, 1, 100)]
    states = [model.new_state(1, 128) for _ in prompts]
    for ids, state in zip(prompts, states):
        model(ids, state)
    together = ModelState.stack(states)
    assert together.lengths == [5, 64, 1, 100]
    for step in range(3):
        new = token_ids(1, batch=4, seed=step)
        got = model(new, together)
        for i, state in enumerate(states):
            torch.testing.assert_close(got[i], model(new[i : i + 1], state)[0], atol=5e-5, rtol=0)
    last = together.select([3, 1])
    assert last.lengths == [103, 67] and together.lengths == [8, 67, 4, 103]
    new = token_ids(2, batch=2, seed=9)
    got = model(new, last)
    for row, i in enumerate((3, 1)):
        torch.testing.assert_close(got[row], model(new[row : row + 1], states[i])[0], atol=5e-5, rtol=0)


def test_a_batch_equals_its_sequences(model):
    ids = token_ids(70, batch=3)
    got = model(ids)
    for i in range(3):
        torch.testing.assert_close(got[i : i + 1], model(ids[i : i + 1]), atol=5e-5, rtol=0)
    torch.testing.assert_close(model(ids, last_only=True), got[:, -1:], atol=5e-5, rtol=0)


@pytest.mark.parametrize("at", ["first", "last"])
def test_a_forward_that_raises_leaves_the_state_as_it_was(at):
    model = tiny_model(CONFIG)
    ids, state = token_ids(80), model.new_state(2, 100)
    model(ids.expand(2, -1), state)
    uneven = ModelState.stack([state.select([0]), model.new_state(1, 100)])
    want = model(ids[:, :3].expand(2, -1), uneven.select([0, 1]))
    layer = model.model.layers[0 if at == "first" else -1]

    def fail(*_):
        raise RuntimeError("injected")

    handle = layer.post_attention_layernorm.register_forward_pre_hook(fail)
    for rows in (l.rows for l in uneven.layers.values() if hasattr(l, "rows")):
        rows[1, 50:] = torch.nan  # what a forward on broken weights may leave beyond the length
    with pytest.raises(RuntimeError, match="injected"):
        model(ids[:, :20].expand(2, -1), uneven)
    handle.remove()
    assert uneven.lengths == [80, 0]
    assert torch.equal(model(ids[:, :3].expand(2, -1), uneven), want)


def test_what_does_not_fit_is_refused(model):
    state = model.new_state(2, 10)
    with pytest.raises(ValueError, match=r"room for 10 tokens a sequence; the longest has 0 and 11 more"):
        model(token_ids(11, batch=2), state)
    with pytest.raises(ValueError, match=r"holds 2 sequences but the batch has 1"):
        model(token_ids(1), state)
    with pytest.raises(ValueError, match=r"\[1, 0\]"):
        model(token_ids(0))
    model(token_ids(5, batch=2), state)
    with pytest.raises(ValueError, match="capacity 3 is below"):
        ModelState.stack([state], capacity=3)
    assert ModelState.stack([state], capacity=40).capacity == 40


def test_released_and_unusable_models_refuse_a_forward():
    model = tiny_model(CONFIG)
    model.unusable = RuntimeError("rank 2 died in setup")
    with pytest.raises(DwdpError, match="rank 2 died in setup"):
        model(token_ids(1))
    model.released = True
    with pytest.raises(ModelReleasedError):
        model(token_ids(1))


# -- hooks and read windows ---------------------------------------------------------------------------------


class Windows:
    """Dense manager and expert runtime of a test: opens and closes read windows as the real ones do."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.open: set[tuple] = set()

    def h0(self) -> None:
        self.calls.append(("h0",))

    def h1(self, layer: int) -> None:
        self.calls.append(("h1", layer))
        self.open |= {("attn", layer), ("moe", layer)}

    def h2(self, layer: int) -> None:
        self.calls.append(("h2", layer))
        self.open.discard(("attn", layer))

    def h3(self, layer: int) -> None:
        self.calls.append(("h3", layer))
        self.open.discard(("moe", layer))

    def bind(self, pos: int) -> None:
        self.calls.append(("bind", pos))
        self.open.add(("experts", pos))

    def finish(self, pos: int) -> None:
        self.calls.append(("finish", pos))
        self.open.discard(("experts", pos))


class ReadRecorder(TorchDispatchMode):
    """Fails on any operation that takes a watched storage, itself or through a view, outside its window."""

    def __init__(self, windows: Windows, watched: dict[int, tuple]) -> None:
        super().__init__()
        self.windows, self.watched, self.reads = windows, watched, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                place = self.watched.get(leaf.untyped_storage().data_ptr())
                if place is not None:
                    assert place in self.windows.open, f"{func} reads {place} outside its window"
                    self.reads.add(place)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def watched(monkeypatch):
    windows = Windows()
    monkeypatch.setattr(decoder, "_dense_manager", lambda: windows)
    model = tiny_model(CONFIG)
    storages: dict[int, tuple] = {}
    for layer in model.model.layers:
        for segment, roots in layer.dense_dwdp_roots().items():
            for parameter in (p for root in roots for p in root.parameters()):
                storages[parameter.untyped_storage().data_ptr()] = (segment, layer.index)
    for pos, experts in enumerate(model.moe_layers()):
        experts.dwdp, experts.dwdp_pos = windows, pos
        for table in experts.expert_tables().values():
            storages[table.untyped_storage().data_ptr()] = ("experts", pos)
    return model, windows, storages


PATHS = {
    "prefill without state": lambda m: m(token_ids(70, batch=2)),
    "prefill": lambda m: m(token_ids(70), m.new_state(1, 80)),
    "chunks": lambda m: chunked(m, token_ids(70), [10, 30]),
    "decode": lambda m: chunked(m, token_ids(12), [10, 11]),
    "decode of unequal lengths": lambda m: m(token_ids(1, batch=2), ModelState.stack([_fed(m, 3), _fed(m, 9)])),
}


def _fed(model, count):
    state = model.new_state(1, 32)
    model(token_ids(count), state)
    return state


@pytest.mark.parametrize("path", PATHS)
def test_weights_are_read_inside_their_windows_only(watched, path):
    model, windows, storages = watched
    with ReadRecorder(windows, storages) as recorder:
        PATHS[path](model)
    assert recorder.reads == set(storages.values()), "every watched segment was read"
    assert len(recorder.reads) == 4 * 3 and not windows.open


def test_the_recorder_sees_a_read_outside_the_window(watched, monkeypatch):
    model, windows, storages = watched
    monkeypatch.setattr(windows, "h1", lambda layer: None)
    with ReadRecorder(windows, storages), pytest.raises(AssertionError, match="outside its window"):
        model(token_ids(3))


def test_hooks_come_in_order_around_the_experts(watched):
    model, windows, _ = watched
    model(token_ids(3))
    expected = [("h0",), ("h1", 0), ("h2", 0), ("h3", 0)]
    for pos, layer in enumerate(range(1, 5)):
        expected += [("h1", layer), ("h2", layer), ("bind", pos), ("finish", pos), ("h3", layer)]
    assert windows.calls == expected


def test_roots_cover_what_may_move_and_only_moe_layers(watched):
    model, _, _ = watched
    assert model.model.layers[0].dense_dwdp_roots() == {}
    layer = model.model.layers[1]
    moe = layer.block_sparse_moe
    assert layer.dense_dwdp_roots() == {
        "attn": [layer.self_attn],
        "moe": [
            moe.gate,
            moe.shared_experts,
            moe.routed_expert_down_proj,
            moe.routed_expert_up_proj,
            moe.routed_expert_norm,
        ],
    }
    assert layer.dense_dwdp_excluded == {"e_score_correction_bias"}


# -- training -----------------------------------------------------------------------------------------------


def test_gradients_equal_finite_differences():
    """Through every kind of layer, in fp64, along a random direction of all weights."""
    torch.manual_seed(0)
    model = KimiK3Model(CONFIG, dtype=torch.float64, device="cpu")
    fill_model(model, random_tensors(CONFIG))
    ids = token_ids(80, batch=2)

    def loss():
        logits = model(ids[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert all(n.endswith("e_score_correction_bias") for n in frozen)
    loss().backward()
    unused = {n for n, p in trained.items() if p.grad is None}
    assert unused == {f"model.layers.0.self_attention_res_{w}.weight" for w in ("proj", "norm")}
    direction = {n: torch.randn_like(p) for n, p in trained.items() if n not in unused}
    slope = sum((p.grad * direction[n]).sum() for n, p in trained.items() if n in direction).item()
    values = []
    with torch.no_grad():
        for step in (1e-6, -2e-6):
            for n, d in direction.items():
                trained[n] += step * d
            values.append(loss().item())
    assert abs((values[0] - values[1]) / 2e-6 - slope) < 1e-5 * abs(slope) + 1e-7
