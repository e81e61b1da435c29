"""Decoders in other projects' shapes, which know nothing of DWDP: no declared roots, no hooks called."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from dwdp.model.moe import RoutedExperts
from tests.support.tiny import tiny_model_config

HIDDEN = 16


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x):
        return F.layer_norm(x, (HIDDEN,)) * self.weight


class Attention(nn.Module):
    """Causal, one head; `mask` is a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(HIDDEN, HIDDEN, bias=False))
        self.register_buffer("mask", torch.ones(32, 32, dtype=torch.bool).tril(), persistent=False)

    def forward(self, x):
        """x: [T, hidden]"""
        n = x.shape[0]
        scores = (self.q_proj(x) @ self.k_proj(x).T).masked_fill(~self.mask[:n, :n], -torch.inf)
        return self.o_proj(scores.softmax(-1) @ self.v_proj(x))


class MLP(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(HIDDEN, width, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(width, HIDDEN, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


# ---- names as in the hub's DeepSeek and Qwen models: mlp.gate, mlp.experts, mlp.shared_experts ----


class HubGate(nn.Module):
    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_experts, HIDDEN))
        self.register_buffer("e_score_correction_bias", torch.randn(num_experts) * 0.1)

    def forward(self, x):
        scores = F.linear(x, self.weight).sigmoid()
        return scores, (scores + self.e_score_correction_bias).topk(2).indices


class HubMoE(nn.Module):
    def __init__(self, num_experts: int = 6) -> None:
        super().__init__()
        self.gate = HubGate(num_experts)
        self.experts = nn.ModuleList(MLP(8) for _ in range(num_experts))
        self.shared_experts = MLP()

    def forward(self, x):
        scores, ids = self.gate(x)
        kept = torch.zeros_like(scores).scatter(-1, ids, scores.gather(-1, ids))
        routed = sum(kept[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        return routed + self.shared_experts(x)


class HubLayer(nn.Module):
    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), moe
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class HubInner(nn.Module):
    def __init__(self, num_layers: int, dense_layers: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(40, HIDDEN)
        self.layers = nn.ModuleList(HubLayer(MLP() if i < dense_layers else HubMoE()) for i in range(num_layers))
        self.norm = Norm()

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class HubModel(nn.Module):
    """ids [T] -> logits [T, 40]; the first `dense_layers` layers have no MoE."""

    def __init__(self, num_layers: int = 5, dense_layers: int = 1) -> None:
        super().__init__()
        self.model = HubInner(num_layers, dense_layers)
        self.lm_head = nn.Linear(HIDDEN, 40, bias=False)

    def forward(self, ids):
        return self.lm_head(self.model(ids))


# ---- Mixtral's block: stacked tables, no shared expert; layers below a ModuleDict, run by the model itself ----


class StackedExperts(nn.Module):
    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(num_experts, 8, HIDDEN) * 0.2)
        self.w2 = nn.Parameter(torch.randn(num_experts, HIDDEN, 8) * 0.2)

    def forward(self, x, weights):
        inner = F.silu(torch.einsum("th,eih->tei", x, self.w1))
        return torch.einsum("tei,ehi,te->th", inner, self.w2, weights)


class SparseBlock(nn.Module):
    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, num_experts)
        self.experts = StackedExperts(num_experts)

    def forward(self, x):
        return self.experts(x, self.gate(x).softmax(-1))


class MixtralLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = Norm(), Norm()
        self.attention, self.block_sparse_moe = Attention(), SparseBlock()

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.block_sparse_moe(self.norm_2(x))


class MixtralModel(nn.Module):
    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(40, HIDDEN), "h": nn.ModuleList(MixtralLayer() for _ in range(num_layers))}
        )

    def forward(self, ids):
        x = self.transformer["wte"](ids)
        for layer in self.transformer["h"]:
            x = layer(x)
        return x


# ---- a hybrid of another shape: an unnamed mixer, the MoE block before it, tables in the block, a Sequential ----


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN)

    def forward(self, x):
        return self.out(self.into(x).cumsum(0).tanh())


class OwnTablesMoE(nn.Module):
    """Router and tables are parameters of the block itself."""

    def __init__(self, num_experts: int = 3) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(num_experts, HIDDEN))
        self.tables = nn.Parameter(torch.randn(num_experts, HIDDEN, HIDDEN) * 0.2)
        self.shared = MLP()

    def forward(self, x):
        weights = F.linear(x, self.router).softmax(-1)
        return torch.einsum("te,eoh,th->to", weights, self.tables, x) + self.shared(x)


class HybridLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe, self.temporal, self.norm = OwnTablesMoE(), Mixer(), Norm()

    def forward(self, x):
        x = x + self.moe(self.norm(x))
        return x + self.temporal(x)


class HybridModel(nn.Sequential):
    """A Sequential that is the model and the list of layers in one."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__(nn.Embedding(40, HIDDEN), *(HybridLayer() for _ in range(num_layers)), nn.Linear(HIDDEN, 40))


FOREIGN = (HubModel, MixtralModel, HybridModel)


def build(kind, *args, seed: int = 0, **options) -> nn.Module:
    """A foreign decoder with weights that are a function of the seed, also where other threads build theirs."""
    model = kind(*args, **options).requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(seed)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * tensor.shape[-1] ** -0.5)
    return model


# ---- a decoder of another project whose routed experts are DWDP's, so that it can run attached ----


class SpreadMoE(nn.Module):
    """A block around `RoutedExperts`, with their bind and finish; it declares nothing for dense DWDP."""

    def __init__(self, index: int, expert_range: tuple[int, int]) -> None:
        super().__init__()
        config = tiny_model_config(routed_expert_hidden_size=HIDDEN)
        self.gate = nn.Linear(HIDDEN, config.num_experts, bias=False)
        where = {"dtype": torch.float32, "device": "cpu"}
        self.experts = RoutedExperts(config, index, expert_format="plain", expert_range=expert_range, **where)
        self.shared_expert = MLP()

    def forward(self, x):
        weights, ids = self.gate(x).softmax(-1).topk(3)
        ids, order = ids.sort(-1)
        if self.experts.dwdp is not None:
            self.experts.dwdp.bind(self.experts.dwdp_pos)
        out = self.experts(x, ids, weights.gather(-1, order))
        if self.experts.dwdp is not None:
            self.experts.dwdp.finish(self.experts.dwdp_pos)
        return out + self.shared_expert(x)


class SpreadModel(HubModel):
    """HubModel with SpreadMoE blocks."""

    def __init__(self, expert_range: tuple[int, int] = (0, 8)) -> None:
        super().__init__()
        for index, layer in enumerate(self.model.layers):
            if index:
                layer.mlp = SpreadMoE(index, expert_range)

    def moe_layers(self):
        return [layer.mlp.experts for layer in self.model.layers[1:]]


def spread_model(start: int, end: int) -> SpreadModel:
    """One rank's SpreadModel, with rows start..end of the same experts as everybody's."""
    whole, model = build(SpreadModel), SpreadModel((start, end)).requires_grad_(False)
    for name, tensor in model.state_dict().items():
        source = whole.state_dict()[name]
        tensor.copy_(source[start:end] if ".experts." in name else source)
    return model
