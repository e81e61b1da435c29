"""Latent mixture of experts: fp32 router, routed experts in a latent width, shared experts.

Routed experts are the part that expert DWDP spreads over the ranks; `LatentMoE` calls its bind and finish.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dwdp.errors import DwdpError
from dwdp.model.config import ModelConfig
from dwdp.model.norms import RMSNorm, gated_activation, normal_init, runs_as_kernel, wide, widen
from dwdp.runtime.sm_reserve import leaving_sms

if TYPE_CHECKING:
    from dwdp.kernels.moe import Experts

EXPERT_FORMATS = ("plain", "mxfp4", "nvfp4")
_PARTS = ("w13", "w2")


class GatedMLP(nn.Module):
    """down(act(gate(x), up(x))): the dense MLP, and the shared experts as one MLP of their joint width."""

    def __init__(self, config: ModelConfig, width: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.gate_proj = nn.Linear(hidden, width, bias=False, dtype=dtype, device=device)
        self.up_proj = nn.Linear(hidden, width, bias=False, dtype=dtype, device=device)
        self.down_proj = nn.Linear(width, hidden, bias=False, dtype=dtype, device=device)
        self.activation = gated_activation(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x), self.up_proj(x)))


class Router(nn.Module):
    """Sigmoid scores in fp32; the bias takes part in the selection only."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.top_k, self.renormalize = config.num_experts_per_token, config.moe_renormalize
        self.scaling = config.routed_scaling_factor
        shape = (config.num_experts, config.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        bias = torch.zeros(config.num_experts, dtype=wide(dtype), device=device)
        self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)
        normal_init(self.weight, std=config.hidden_size**-0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [N, hidden] -> expert ids [N, k], ascending per token, and their fp32 weights [N, k]."""
        scores = self._scores(x)
        choice = scores.detach() + self.e_score_correction_bias
        ids = torch.topk(choice, self.top_k, dim=-1, sorted=False).indices.sort(-1).values
        weights = scores.gather(-1, ids)
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids, weights * self.scaling

    def _scores(self, x: Tensor) -> Tensor:
        """fp32 [N, num_experts]. A product that is rounded to bf16 flips picks that are nearly tied."""
        if x.dtype == torch.bfloat16 and runs_as_kernel(x, self.weight):
            from dwdp.kernels.formats import weights
            from dwdp.kernels.product import linear

            stack = weights("plain", self.weight.unsqueeze(0))
            if stack is not None:
                return linear(x, stack, sigmoid=True)  # bf16 operands, whose products are exact in its fp32 sums
        return torch.sigmoid(F.linear(widen(x), widen(self.weight)))


class RoutedExperts(nn.Module):
    """Expert tables of one layer: rows `first_expert ..` of `num_experts`, one row an expert.

    plain: w13 [rows, 2 * inter, width] (w1 above w3), w2 [rows, width, inter]. mxfp4 and nvfp4: both packed,
    two values a byte along the last axis, beside w13_scale and w2_scale (a byte for 32 or 16 values); nvfp4
    has the small fp32 tensors w13_scale_2 [rows, 2], w2_scale_2 [rows]. A layer computes alone only with all
    rows; with some of them it computes `contributions`, and `lockstep` adds those of all ranks.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_index: int,
        *,
        dtype: torch.dtype,
        expert_format: str,
        expert_range: tuple[int, int],
        device: torch.device | str,
    ) -> None:
        super().__init__()
        if expert_format not in EXPERT_FORMATS:
            raise ValueError(f"expert_format is {expert_format!r}, not one of {', '.join(EXPERT_FORMATS)}")
        start, end = expert_range
        if not 0 <= start < end <= config.num_experts:
            raise ValueError(f"expert_range {start}..{end} is not inside 0..{config.num_experts}")
        self.layer_index, self.num_experts = layer_index, config.num_experts
        self.first_expert, self.num_rows = start, end - start
        self.dtype, self.expert_format = dtype, expert_format
        self.width, self.top_k = config.expert_width, config.num_experts_per_token
        self.activation = gated_activation(config)
        self.lockstep: Any = None  # LockstepExperts, where ranks that step together divide the experts
        self.dwdp: Any = None  # object with bind(pos) and finish(pos), set by the expert runtime
        self.dwdp_pos: int | None = None
        width, inter = self.width, config.moe_intermediate_size
        if expert_format == "plain":
            shapes = {"w13": ((2 * inter, width), dtype), "w2": ((width, inter), dtype)}
        else:
            group, scale = (32, torch.uint8) if expert_format == "mxfp4" else (16, torch.float8_e4m3fn)
            if width % group or inter % group:
                raise ValueError(f"{expert_format} needs widths in multiples of {group}, not {width} and {inter}")
            shapes = {
                "w13": ((2 * inter, width // 2), torch.uint8),
                "w13_scale": ((2 * inter, width // group), scale),
                "w2": ((width, inter // 2), torch.uint8),
                "w2_scale": ((width, inter // group), scale),
            }
        self._tables = tuple(shapes)
        self._small: tuple[str, ...] = ()
        if expert_format == "nvfp4":
            shapes |= {"w13_scale_2": ((2,), torch.float32), "w2_scale_2": ((), torch.float32)}
            self._small = ("w13_scale_2", "w2_scale_2")
        for name, (shape, kind) in shapes.items():
            table = torch.empty((self.num_rows, *shape), dtype=kind, device=device)
            if expert_format == "plain":
                normal_init(table, std=shape[-1] ** -0.5)
            self.register_parameter(name, nn.Parameter(table, requires_grad=expert_format == "plain"))

    def expert_tables(self) -> dict[str, Tensor]:
        """The tables that expert DWDP moves, name -> [rows, ...]."""
        return {name: getattr(self, name).detach() for name in self._tables}

    def small_tensors(self) -> dict[str, Tensor]:
        """Per-expert tensors too small to move, name -> [rows, ...]; every rank gathers them once."""
        return {name: getattr(self, name).detach() for name in self._small}

    def rebind(self, tables: dict[str, Tensor], small: dict[str, Tensor]) -> None:
        """Point at full tables, row = expert id. Assigns only, so it cannot fail half-way."""
        for name, table in {**tables, **small}.items():
            self._parameters[name] = nn.Parameter(table, requires_grad=False)
        self.first_expert, self.num_rows = 0, self.num_experts

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x: [N, width]; ids, weights: [N, k], ids ascending per token -> fp32 [N, width], the weighted sum.

        Raises DwdpError while the layer holds only part of its experts and no other ranks compute with it.
        """
        if self.lockstep is not None:
            return self.lockstep.routed(self, x, ids, weights)
        if self.num_rows != self.num_experts:
            last = self.first_expert + self.num_rows - 1
            raise DwdpError(
                f"layer {self.layer_index} holds experts {self.first_expert}..{last} of {self.num_experts}; "
                "set expert DWDP up before a forward"
            )
        return self.contributions(x, ids, weights)

    def contributions(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """As `forward`, of the experts that are here; a token that picked none of them gets zeros."""
        experts = self._for_kernels(x)
        if experts is not None:
            from dwdp.kernels.moe import routed

            return routed(x, ids, weights, experts)
        order = ids.flatten().argsort(stable=True)
        tokens = order // ids.shape[1]
        counts = torch.bincount(ids.flatten(), minlength=self.num_experts)
        if self._groupable(x):
            return self._grouped(x, weights, order, tokens, counts)
        return self._one_by_one(x, weights, order, tokens, counts.tolist())

    def _one_by_one(self, x: Tensor, weights: Tensor, order: Tensor, tokens: Tensor, counts: list[int]) -> Tensor:
        """Experts in ascending order, each over its tokens: a token's sum has one order in every batch."""
        total = torch.zeros(x.shape, dtype=wide(x.dtype), device=x.device)
        flat_weights = weights.reshape(-1, 1)[order]
        at = sum(counts[: self.first_expert])
        for row, count in enumerate(counts[self.first_expert : self.first_expert + self.num_rows]):
            if count == 0:
                continue
            mine = tokens[at : at + count]
            w13, w2 = self._weights_of(row)
            gate, up = F.linear(x.index_select(0, mine), w13).chunk(2, -1)
            out = widen(F.linear(self.activation(gate, up), w2)) * flat_weights[at : at + count]
            total.index_add_(0, mine, out)
            at += count
        return total

    def _weights_of(self, row: int) -> tuple[Tensor, Tensor]:
        """w13 and w2 of the expert in a row, in the model's dtype; packed ones are expanded for this use only."""
        if self.expert_format == "plain":
            return self.w13[row], self.w2[row]
        if self.expert_format == "mxfp4":
            from dwdp.model.quant import dequantise_mxfp4

            return (
                dequantise_mxfp4(self.w13[row], self.w13_scale[row], self.dtype),
                dequantise_mxfp4(self.w2[row], self.w2_scale[row], self.dtype),
            )
        from dwdp.model.quant import dequantise_nvfp4

        return (
            dequantise_nvfp4(self.w13[row], self.w13_scale[row], self.w13_scale_2[row], self.dtype),
            dequantise_nvfp4(self.w2[row], self.w2_scale[row], self.w2_scale_2[row], self.dtype),
        )

    def _for_kernels(self, x: Tensor) -> Experts | None:
        """The tables as the grouped kernels read them in place; None where the torch form runs."""
        if x.dtype != torch.bfloat16 or not runs_as_kernel(x, self.w13, self.w2):
            return None
        from dwdp.kernels.formats import weights
        from dwdp.kernels.moe import Experts

        format = self.expert_format
        tables = {**self.expert_tables(), **self.small_tensors()}
        w13, w2 = (weights(format, *(tables.get(name + end) for end in ("", "_scale", "_scale_2"))) for name in _PARTS)
        if w13 is None or w2 is None:
            return None
        activation = self.activation
        return Experts(w13, w2, self.first_expert, self.num_experts, activation.beta, activation.linear_beta)

    def _groupable(self, x: Tensor) -> bool:
        """Whether the grouped product takes these operands: plain bf16 on CUDA, rows of whole 16 bytes."""
        return (
            self.expert_format == "plain"
            and self.num_rows == self.num_experts
            and x.is_cuda
            and x.dtype == torch.bfloat16
            and x.shape[0] > 0
            and self.w13.shape[-1] % 8 == 0
            and self.w2.shape[-1] % 8 == 0
            and torch.cuda.get_device_capability(x.device) >= (8, 0)
        )

    def _grouped(self, x: Tensor, weights: Tensor, order: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:
        """All experts in two grouped products, then the sum per token in ascending expert order."""
        ends = counts.cumsum(0).to(torch.int32)
        gathered = x.index_select(0, tokens)
        with leaving_sms():  # see [Note: the reserve]
            gate, up = F.grouped_mm(gathered, self.w13.transpose(-1, -2), offs=ends).chunk(2, -1)
            out = F.grouped_mm(self.activation(gate, up), self.w2.transpose(-1, -2), offs=ends)
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel(), device=order.device)
        place = place.view(weights.shape)
        total = torch.zeros(x.shape, dtype=wide(x.dtype), device=x.device)
        for j in range(weights.shape[1]):
            total = total + widen(out.index_select(0, place[:, j])) * weights[:, j : j + 1]
        return total


class LatentMoE(nn.Module):
    """MoE block; parameter names are the release's, below `block_sparse_moe.`, but for the expert tables."""

    def __init__(
        self,
        config: ModelConfig,
        layer_index: int,
        *,
        dtype: torch.dtype,
        expert_format: str,
        expert_range: tuple[int, int],
        device: torch.device | str,
    ) -> None:
        super().__init__()
        where: dict[str, Any] = dict(dtype=dtype, device=device)
        hidden, latent = config.hidden_size, config.routed_expert_hidden_size
        self.gate = Router(config, **where)
        self.experts = RoutedExperts(
            config, layer_index, expert_format=expert_format, expert_range=expert_range, **where
        )
        self.has_latent, self.has_norm = latent is not None, config.latent_moe_use_norm
        if self.has_latent:
            self.routed_expert_down_proj = nn.Linear(hidden, latent, bias=False, **where)
            self.routed_expert_up_proj = nn.Linear(latent, hidden, bias=False, **where)
        if self.has_norm:
            self.routed_expert_norm = RMSNorm(latent, config.rms_norm_eps, **where)
        self.has_shared = config.num_shared_experts > 0
        if self.has_shared:
            width = config.num_shared_experts * config.moe_intermediate_size
            self.shared_experts = GatedMLP(config, width, **where)

    def dense_roots(self) -> list[nn.Module]:
        """The modules whose weights dense DWDP may move: everything but the routed experts."""
        names = (
            "gate",
            "shared_experts",
            "routed_expert_down_proj",
            "routed_expert_up_proj",
            "routed_expert_norm",
        )
        return [getattr(self, name) for name in names if hasattr(self, name)]

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, hidden] -> the same."""
        flat = x.reshape(-1, x.shape[-1])
        ids, weights = self.gate(flat)
        inner = self.routed_expert_down_proj(flat) if self.has_latent else flat
        routed = self._routed(inner, ids, weights).to(x.dtype)
        # The norm is not linear: it must see the sum over all experts of a token.
        if self.has_norm:
            routed = self.routed_expert_norm(routed)
        if self.has_latent:
            routed = self.routed_expert_up_proj(routed)
        if self.has_shared:
            routed = routed + self.shared_experts(flat)
        return routed.view(x.shape)

    def _routed(self, inner: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        experts = self.experts
        if experts.dwdp is not None:
            experts.dwdp.bind(experts.dwdp_pos)
        out = experts(inner, ids, weights)
        if experts.dwdp is not None:
            experts.dwdp.finish(experts.dwdp_pos)
        return out
