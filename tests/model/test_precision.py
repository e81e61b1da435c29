"""What must be fp32 in a bf16 model is, and a bf16 model is as near to the fp32 oracle as bf16 allows."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dwdp.model import kda, moe, norms
from dwdp.model.moe import Router
from tests.support.make_golden import bf16_exact
from tests.support.tiny import (
    chunked,
    random_tensors,
    tiny_config_dict,
    tiny_model,
    tiny_model_config,
    token_ids,
)

# 11 experts: no other product has 11 columns, so a router product is known by its shape.
CONFIG = tiny_model_config(num_experts=11)
NEAR_TIE = 0.2  # margin of the reference's two best logits (their standard deviation is 1)
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
    errors, agreed, flipped = [], [], []
    for seed in range(3):
        weights = bf16_exact(config, random_tensors(config, seed))
        exact = {name: t.float() for name, t in weights.items()}
        ids = token_ids(500, seed=seed)
        want = MlxK3(tiny_config_dict(), exact).logits(ids)
        picks: list[torch.Tensor] = []
        reference, model = tiny_model(config, exact), tiny_model(config, exact, torch.bfloat16)
        for router in (m for m in reference.modules() if isinstance(m, Router)):
            router.register_forward_hook(lambda module, args, out, to=picks: to.append(out[0]))
        assert (reference(ids) - want).abs().max() < 2e-4
        left = iter(picks)

        def as_reference(router, args, out, left=left):
            chosen = next(left)
            flipped.append((chosen != out[0]).any(-1).float())
            scores = torch.sigmoid(args[0].float() @ router.weight.float().T).gather(-1, chosen)
            return chosen, scores / scores.sum(-1, keepdim=True)

        for router in (m for m in model.modules() if isinstance(m, Router)):
            router.register_forward_hook(as_reference)
        got = model(ids)
        errors.append((got - want).abs().flatten())
        best = want.topk(2, -1).values
        clear = best[..., 0] - best[..., 1] > NEAR_TIE
        agreed.append((got.argmax(-1) == want.argmax(-1))[clear].float())
    error, agreement = torch.cat(errors), torch.cat(agreed)
    median, p99 = error.median().item(), error.kthvalue(int(0.99 * error.numel())).values.item()
    flips = torch.cat(flipped).mean().item()
    print(
        f"bf16 against the fp32 oracle: median {median:.3f}, p99 {p99:.3f}; top-1 agrees on "
        f"{agreement.mean():.2%} of {agreement.numel()} tokens with a margin above {NEAR_TIE}; other experts "
        f"for {flips:.1%} of the tokens of a layer"
    )
    assert median < 0.03 and p99 < 0.3
    assert agreement.numel() > 500 and agreement.mean() >= 0.995
    assert flips < 0.05
