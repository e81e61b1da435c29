"""What must be fp32 in a bf16 model is, and a bf16 model is as near to the fp32 oracle as bf16 allows."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dwdp.model import kda, moe, norms
from dwdp.model.moe import Router
from tests.support.make_golden import bf16_exact
from tests.support.precision import TINY, Picks, Precision, fp32_oracle
from tests.support.system import write_random
from tests.support.tiny import (
    WIDER,
    chunked,
    random_tensors,
    tiny_config_dict,
    tiny_model,
    tiny_model_config,
    token_ids,
)

# 11 experts: no other product has 11 columns, so a router product is known by its shape.
CONFIG = tiny_model_config(num_experts=11)
# sigmoid: gate, beta, router, SiTU, output gates; tanh: SiTU; exp, cumsum, solve: KDA; rsqrt: all norms.
WIDE_OPS = (
    "sigmoid",
    "tanh",
    "exp",
    "rsqrt",
    "cumsum",
    "linalg_solve_triangular",
    "_softmax",
    "silu",
    "topk",
)


class NarrowOps(TorchDispatchMode):
    """Lists the operations that must not see bf16 and do; counts those that were seen at all."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.narrow: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        out = func(*args, **(kwargs or {}))
        if name in ("mm", "addmm") and out.shape[-1] == CONFIG.num_experts:
            name = "router product"
        if name in WIDE_OPS or name == "router product":
            self.seen.add(name)
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            if any(t.dtype == torch.bfloat16 for t in tensors):
                self.narrow.add(name)
        return out


def watch(model) -> NarrowOps:
    with NarrowOps() as ops:
        chunked(model, token_ids(80), [70, 79])
    return ops


def test_fp32_parts_are_fp32_in_a_bf16_model():
    model = tiny_model(CONFIG, dtype=torch.bfloat16)
    ops = watch(model)
    assert ops.seen == {*WIDE_OPS, "router product"}
    assert ops.narrow == set()


NEGATIVE = {
    "norms": (norms, {"tanh", "rsqrt", "sigmoid", "_softmax"}),
    "router": (moe, {"router product"}),
    "KDA": (kda, {"sigmoid"}),
}


@pytest.mark.parametrize("name", NEGATIVE)
def test_the_watch_sees_what_is_computed_in_bf16(monkeypatch, name):
    """Negative control: without widening, the operations above do see bf16."""
    module, seen = NEGATIVE[name]
    model = tiny_model(CONFIG, dtype=torch.bfloat16)
    monkeypatch.setattr(module, "widen", lambda x: x)
    if module is moe:
        monkeypatch.setattr(module, "wide", lambda dtype: dtype)
    assert watch(model).narrow >= seen


def test_gate_beta_state_and_router_weights_have_fp32_values():
    model = tiny_model(CONFIG, dtype=torch.bfloat16)
    state = model.new_state(1, 96)
    logits = model(token_ids(80), state)
    assert logits.dtype == torch.float32
    layer = state.layers[0]
    assert (layer.recurrent.dtype, layer.conv.dtype) == (torch.float32, torch.bfloat16)
    assert state.layers[3].rows.dtype == torch.bfloat16
    assert (layer.recurrent != layer.recurrent.bfloat16()).float().mean() > 0.9, "not rounded on the way"
    f = torch.randn(1, 2, 4, 16, dtype=torch.bfloat16)
    block = model.model.layers[0].self_attn
    gate = kda.kda_gate(f, block.A_log, block.dt_bias, -5.0)
    assert gate.dtype == torch.float32
    ids, weights = model.model.layers[1].block_sparse_moe.gate(torch.randn(9, 64, dtype=torch.bfloat16))
    assert weights.dtype == torch.float32 and (weights != weights.bfloat16()).any()


def test_bf16_router_picks_as_fp32_would():
    """A router product in bf16 flips near-ties; with equal inputs the bf16 model must pick as fp32 does."""
    torch.manual_seed(0)
    narrow = Router(CONFIG, dtype=torch.bfloat16, device="cpu").requires_grad_(False)
    full = Router(CONFIG, dtype=torch.float32, device="cpu").requires_grad_(False)
    full.weight.copy_(narrow.weight)
    x = torch.randn(4000, 64, dtype=torch.bfloat16)
    assert torch.equal(narrow(x)[0], full(x.float())[0])
    rounded = torch.sigmoid(x @ narrow.weight.T).float().topk(3).indices.sort(-1).values
    assert (rounded != full(x.float())[0]).any(), "a bf16 product would have picked otherwise"


def test_bf16_against_the_fp32_oracle():
    """The routed experts are the reference's: another pick changes a token's logits."""
    pytest.importorskip("mlx_lm")
    from tests.support.oracle import MlxK3

    config = tiny_model_config()
    found = Precision(TINY)
    for seed in range(3):
        weights = bf16_exact(config, random_tensors(config, seed))
        exact = {name: t.float() for name, t in weights.items()}
        ids, picks = token_ids(500, seed=seed), Picks()
        want = MlxK3(tiny_config_dict(), exact).logits(ids)
        reference, model = tiny_model(config, exact), tiny_model(config, exact, torch.bfloat16)
        with picks.recorded(reference):
            assert (reference(ids) - want).abs().max() < 2e-4
        with picks.taken(model, found.flipped):
            found.add(model(ids), want)
    wrong, text = found.result()
    print(f"bf16 against the fp32 oracle: {text}")
    assert not wrong, f"{wrong}: {text}"


def test_the_oracle_of_packed_weights_has_their_values_and_equals_another_implementation(tmp_path):
    """What GPU checks compare with, on widths that kernels of packed experts take."""
    pytest.importorskip("mlx_lm")
    from tests.support.oracle import MlxK3

    write_random(tmp_path / "m", expert_format="nvfp4", fp8_attention=True, **WIDER)
    oracle = fp32_oracle(tmp_path / "m")
    names = dict(oracle.named_parameters())
    tensors = {name: value for name, value in names.items() if ".block_sparse_moe.experts." not in name}
    for experts in oracle.moe_layers():
        base = f"model.layers.{experts.layer_index}.block_sparse_moe.experts."
        for row in range(experts.num_rows):
            tensors[f"{base}{row}.w1.weight"], tensors[f"{base}{row}.w3.weight"] = experts.w13[row].chunk(2)
            tensors[f"{base}{row}.w2.weight"] = experts.w2[row]
    tensors = {
        n: torch.cat([t, t.new_zeros(-t.numel() % 32)]) if n.endswith("A_log") else t for n, t in tensors.items()
    }
    ids = token_ids(100)
    want = MlxK3(tiny_config_dict(**WIDER), tensors).logits(ids)
    assert (oracle(ids) - want).abs().max() < 2e-4


def test_a_model_that_is_off_by_its_p99_or_picks_another_token_is_not_within_bounds():
    """Negative control of the counting."""
    want = 5 * torch.randn(1, 600, 20, generator=torch.Generator().manual_seed(0))
    for change, what in ((0.31, ["p99"]), (None, ["median", "p99", "agreement"])):
        found = Precision(TINY)
        got = want.clone()
        if change is None:
            got = got.roll(1, -1)
        else:
            got[..., 0] += change
        found.add(got, want)
        wrong, _ = found.result()
        assert [one.split()[0] for one in wrong] == what
