"""What `check_layers` runs: three layers of the model in a row at Kimi-K3's widths, cases of packed sequences for them,
and marks around their routed experts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dwdp.kernels.batch import PackedBatch
from dwdp.model.config import ModelConfig
from dwdp.model.decoder import DecoderLayer
from dwdp.model.moe import RoutedExperts
from dwdp.model.state import KdaState, MlaState
from tests.gpu import attention_site
from tests.gpu.attention_site import Site
from tests.kernels.packs import packed
from tests.support.tiny import tiny_config_dict

# In the middle of 93 layers: KDA, KDA, MLA, behind the snapshots of layers 0, 12, 24, 36 and 48.
NUM_LAYERS, LAYERS, NUM_SNAPSHOTS = 93, (49, 50, 51), 5
TINY_LAYERS, TINY_SNAPSHOTS = LAYERS[1:], 1  # the interpreter takes a second for each layer's step
K3_EXPERTS = dict(num_experts_per_token=16, moe_intermediate_size=3072, routed_expert_hidden_size=3584)
TINY_EXPERTS = dict(num_experts_per_token=1, moe_intermediate_size=128, routed_expert_hidden_size=128)
# Of a layer. plain: 98 GB for three layers, and a multiple of 16, for which kernels were compiled ahead.
NUM_EXPERTS = {"mxfp4": 896, "nvfp4": 896, "plain": 496}
FILLED_AT_ONCE = 8


def layers_config(cpu: bool, format: str) -> ModelConfig:
    """Of the release, in what these layers see of it; tiny on the host."""
    base, experts = (
        (attention_site.TINY, TINY_EXPERTS | {"num_experts": 2})
        if cpu
        else (attention_site.K3, K3_EXPERTS | {"num_experts": NUM_EXPERTS[format]})
    )
    full = [*range(4, NUM_LAYERS, 4), NUM_LAYERS]
    kinds = {"full_attn_layers": full, "kda_layers": [i for i in range(1, NUM_LAYERS + 1) if i not in full]}
    linear = {**base["linear_attn_config"], **kinds}
    changes = {**base, **experts, "linear_attn_config": linear}
    return ModelConfig.from_dict(
        tiny_config_dict(**changes, num_hidden_layers=NUM_LAYERS, num_shared_experts=2, attn_res_block_size=12)
    )


def indices(site: Site) -> tuple[int, ...]:
    return TINY_LAYERS if site.cpu else LAYERS


def build(site: Site, format: str) -> list[DecoderLayer]:
    """Layers with random weights; the routing bias is zero, so that experts get about the same number of tokens."""
    config = site.config
    layers = []
    for index in indices(site):
        layer = DecoderLayer(
            config, index, dtype=site.dtype, expert_format=format, expert_range=(0, config.num_experts),
            device=site.device,
        ).requires_grad_(False)  # fmt: skip
        assert layer.is_moe and layer.dense is None and not layer.starts_block
        moe = layer.block_sparse_moe
        for block in (
            layer.self_attn, moe.gate, moe.shared_experts, moe.routed_expert_down_proj, moe.routed_expert_up_proj,
            layer.self_attention_res_proj, layer.mlp_res_proj,
        ):  # fmt: skip
            site.filled(block)
        moe.gate.e_score_correction_bias.zero_()
        _fill_experts(moe.experts, format, index * config.num_experts)
        layers.append(layer)
    return layers


def _fill_experts(experts: RoutedExperts, format: str, seed: int) -> None:
    """In place, a few experts at a time; plain tables have their noise from the constructor."""
    device = experts.w13.device.type
    if format == "plain":
        if device == "cpu":  # the model is fp32 there, and kernels read plain experts in bf16
            experts.rebind({name: table.bfloat16() for name, table in experts.expert_tables().items()}, {})
        return
    inter = experts.w13.shape[1] // 2
    for which, rows, columns, parts in (("w13", 2 * inter, experts.width, 2), ("w2", experts.width, inter, 1)):
        tables = [getattr(experts, which + end, None) for end in ("", "_scale", "_scale_2")]
        for start in range(0, experts.num_rows, FILLED_AT_ONCE):
            count = min(FILLED_AT_ONCE, experts.num_rows - start)
            _, _, some = packed(
                format, count, rows, columns, parts=parts, seed=seed + start, device=device, decode=False
            )
            for table, piece in zip(tables, some):
                table[start : start + count] = piece


def dense_weights(layers: list[DecoderLayer]) -> list[Tensor]:
    """All parameters but the routed experts' tables."""
    return [p for layer in layers for name, p in layer.named_parameters() if ".experts." not in name]


def expert_bytes(layers: list[DecoderLayer]) -> int:
    return sum(p.nbytes for layer in layers for p in layer.block_sparse_moe.experts.parameters())


@dataclass
class Case:
    """One packed batch and what its step reads. snapshots: sums at the heads of blocks before these layers."""

    batch: PackedBatch
    x: Tensor
    snapshots: list[Tensor]
    states: list[KdaState | MlaState]

    @classmethod
    def of(cls, site: Site, x: Tensor, snapshots: list[Tensor], count: int, before: int = 0) -> Case:
        """x: [1, N, hidden], of `count` sequences of equal length that hold `before` tokens already."""
        length = x.shape[1] // count
        states = []
        for index in indices(site):
            if site.config.layer_kind(index) == "mla":
                states.append(site.mla_state(count, before + length, before))
            else:
                state = site.kda_state(count)
                if before == 0:
                    state.conv.zero_()
                    state.recurrent.zero_()
                states.append(state)
        return cls(site.batch([length] * count, [before] * count), x, snapshots, states)


def step(layers: list[DecoderLayer], case: Case) -> list[Tensor]:
    """One forward of the layers -> its output and the next states of the KDA layers. The case's states stay as they
    were: nothing commits, and latent rows are written to the same places each time."""
    prefix, snapshots, kept = case.x, list(case.snapshots), []
    for layer, state in zip(layers, case.states):
        prefix = layer(prefix, snapshots, state, case.batch)
        if isinstance(state, KdaState):
            kept += state.pending
            state.pending = None
    return [prefix, *kept]


def dense_flops(site: Site, layers: list[DecoderLayer], case: Case) -> float:
    """Model FLOPs of a step without routed experts: every dense matrix, once a token, and the attentions' own products
    (of new sequences)."""
    config, linear = site.config, site.config.linear_attn_config
    tokens = case.batch.num_tokens
    flops = 2.0 * tokens * sum(p.numel() for p in dense_weights(layers) if p.ndim == 2)
    for layer in layers:
        if config.layer_kind(layer.index) == "kda":
            # Per token and head, in chunks of 64: four products with the chunk, three with the state.
            flops += tokens * 2 * linear.num_heads * (4 * 64 * linear.head_dim + 3 * linear.head_dim**2)
        else:
            width = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
            pairs = sum(length * (length + 1) // 2 for length in case.batch.lengths)
            flops += pairs * 2 * config.num_attention_heads * width
    return flops


def routed_flops(site: Site, tokens: int) -> float:
    """Of all layers: three matrices for each expert that a token picked."""
    config = site.config
    matrix = config.moe_intermediate_size * config.expert_width
    return 2.0 * len(indices(site)) * tokens * config.num_experts_per_token * 3 * matrix


class Marks:
    """Hooks around `RoutedExperts.forward` of all layers: by `mode`, events ("time"), the allocator's peaks ("memory"),
    the arguments ("keep"), or nothing ("").

    Events stand in the same step that is timed as a whole: an event costs microseconds beside milliseconds, and both
    parts are then of one step at the same clocks, so that their difference is the rest of just that step.
    """

    def __init__(self, site: Site, layers: list[DecoderLayer]) -> None:
        self.cpu, self.mode = site.cpu, ""
        self.begun: list[Any] = []
        self.ended: list[Any] = []
        self.peaks: list[int] = []
        self.kept: list[tuple[RoutedExperts, tuple[Tensor, ...]]] = []
        for layer in layers:
            layer.block_sparse_moe.experts.register_forward_pre_hook(self._before)
            layer.block_sparse_moe.experts.register_forward_hook(self._behind)

    def start(self, mode: str) -> None:
        self.mode = mode
        self.begun, self.ended, self.peaks, self.kept = [], [], [], []
        if mode == "memory" and not self.cpu:
            torch.cuda.synchronize()
            self.highest = 0
            self.at_start = self._from_here()

    def _before(self, module: RoutedExperts, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, ids, weights = arguments
        if self.cpu:
            x = x.bfloat16()  # as on a GPU: the kernels of experts know nothing else
        if self.mode == "keep":
            self.kept.append((module, (x, ids, weights)))
        elif self.mode == "memory" and not self.cpu:
            self.highest = max(self.highest, torch.cuda.max_memory_allocated())
            self.allocated = self._from_here()
        elif self.mode == "time":
            self.begun.append(self._now())
        return x, ids, weights

    def _behind(self, module: RoutedExperts, arguments: tuple[Tensor, ...], out: Tensor) -> None:
        if self.mode == "time":
            self.ended.append(self._now())
        elif self.mode == "memory":
            self.peaks.append(0 if self.cpu else torch.cuda.max_memory_allocated() - self.allocated - out.nbytes)

    @staticmethod
    def _from_here() -> int:
        """Bytes allocated now, from which on the allocator's peak counts; the device need not have come that far."""
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def _now(self) -> Any:
        if self.cpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def peak_bytes(self) -> tuple[int, int]:
        """Since `start("memory")`: of the whole above its start, and of the routed experts of a layer beside their
        input and result; zeros on the host, which does not tell."""
        if self.cpu:
            return 0, 0
        return max(self.highest, torch.cuda.max_memory_allocated()) - self.at_start, max(self.peaks)

    def seconds(self) -> float:
        """Inside the routed experts since `start("time")`; call it when the step has ended on the device."""
        pairs = list(zip(self.begun, self.ended, strict=True))
        if self.cpu:
            return sum(end - begin for begin, end in pairs)
        return sum(begin.elapsed_time(end) for begin, end in pairs) / 1e3
