"""The two independent implementations that the model is compared with, behind functions of numpy and torch.

Neither is a dependency of the program; tests skip where they are not installed (macOS, GPU machines).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


class MlxK3:
    """mlx-lm's Kimi-K3, fp32 on the CPU, filled from tensors under release names (its own `sanitize`)."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        import mlx.core as mx
        from mlx_lm.models.kimi_k3 import Model, ModelArgs

        mx.set_default_device(mx.cpu)
        self._mx = mx
        args = ModelArgs.from_dict({"model_type": "kimi_k3", "text_config": config})
        self.model = Model(args)
        weights = {f"language_model.{name}": mx.array(t.numpy()) for name, t in tensors.items()}
        self.model.load_weights(list(self.model.sanitize(weights).items()), strict=True)
        self.model.eval()

    def logits(self, ids: Tensor, cache: Any = None) -> Tensor:
        """ids [B, T] -> fp32 logits [B, T, vocab]; `cache` from `new_cache` goes on."""
        out = self.model(self._mx.array(ids.numpy()), cache=cache)
        return to_torch(out)

    def new_cache(self) -> Any:
        return self.model.make_cache()

    def chunked(self, ids: Tensor, cuts: list[int]) -> Tensor:
        cache, edges = self.new_cache(), [0, *cuts, ids.shape[1]]
        return torch.cat([self.logits(ids[:, a:b], cache) for a, b in zip(edges, edges[1:])], 1)


def to_torch(array: Any) -> Tensor:
    """An mlx array of fp32 as a tensor (a copy)."""
    return torch.from_numpy(np.array(array))


@contextmanager
def _hidden(package: str) -> Iterator[None]:
    """`import package` fails in here; modules that were imported stay so afterwards."""
    known = package in sys.modules
    before = sys.modules.get(package)
    sys.modules[package] = None
    try:
        yield
    finally:
        del sys.modules[package]
        if known:
            sys.modules[package] = before


def kimi_linear_logits(config: dict[str, Any], tensors: dict[str, Tensor], ids: Tensor) -> Tensor:
    """fp32 logits of transformers' kimi_linear for tensors under release names."""
    from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig

    with _hidden("fla"):  # whose kernels it would take where they are installed; they need a GPU
        from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearForCausalLM

    settings = {k: v for k, v in config.items() if v is not None and k != "model_type"}
    settings |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    model = KimiLinearForCausalLM(KimiLinearConfig(**settings, attn_implementation="eager"))
    state: dict[str, Tensor] = {}
    for name, value in tensors.items():
        name = name.replace(".block_sparse_moe.", ".mlp.")
        if name.endswith("A_log"):
            value = value[: config["linear_attn_config"]["num_heads"]].view(1, 1, -1, 1)
        for part in ("f_a_proj", "f_b_proj", "A_log", "dt_bias"):
            name = name.replace(f"self_attn.{part}", f"self_attn.forget_gate.{part}")
        state[name] = value
    for layer in range(config["num_hidden_layers"]):
        attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        if f"{attention}q_conv1d.weight" in state:
            convs = [state.pop(f"{attention}{c}_conv1d.weight") for c in "qkv"]
            state[f"{attention}conv1d.weight"] = torch.cat(convs)
        if f"{mlp}experts.0.w1.weight" in state:
            experts = range(config["num_experts"])
            w1, w2, w3 = (
                torch.stack([state.pop(f"{mlp}experts.{e}.{w}.weight") for e in experts]) for w in ("w1", "w2", "w3")
            )
            state[f"{mlp}experts.gate_up_proj"] = torch.cat([w1, w3], 1)
            state[f"{mlp}experts.down_proj"] = w2
    model.load_state_dict(state, strict=True)
    with torch.no_grad():
        return model.eval()(ids).logits.float()


def differences(got: Tensor, want: Tensor) -> tuple[float, float]:
    """Largest and median absolute difference."""
    gap = (got.double() - want.double()).abs()
    return gap.max().item(), gap.median().item()


def assert_close(got: Tensor, oracle: Tensor, exact: Tensor, what: str) -> str:
    """max <= max(1e-4, 3 x the fp32 oracle's own distance from fp64), median <= 1e-5."""
    largest, median = differences(got, oracle)
    own, _ = differences(oracle, exact)
    line = f"{what}: max {largest:.2e}, median {median:.2e}; the oracle's own distance from fp64 {own:.2e}"
    assert largest <= max(1e-4, 3 * own) and median <= 1e-5, line
    print(line)
    return line
