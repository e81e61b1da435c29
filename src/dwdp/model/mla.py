"""Multi-head latent attention without positions, with an optional sigmoid output gate.

Prefill expands keys and values per head; decode works on the cached latent rows (absorbed form).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dwdp.kernels.batch import PackedBatch
from dwdp.kernels.select import use_triton
from dwdp.model.config import ModelConfig
from dwdp.model.norms import RMSNorm, sigmoid_gated
from dwdp.model.state import MlaState


class LatentAttention(nn.Module):
    """MLA block; parameter names are the release's, below `self_attn.`."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        hidden, heads = config.hidden_size, config.num_attention_heads
        self.num_heads = heads
        self.latent, self.nope = config.kv_lora_rank, config.qk_nope_head_dim
        self.rope, self.value = config.qk_rope_head_dim, config.v_head_dim
        self.scale = (self.nope + self.rope) ** -0.5
        self.query_latent = config.q_lora_rank is not None

        def projection(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, dtype=dtype, device=device)

        query_width = heads * (self.nope + self.rope)
        if self.query_latent:
            self.q_a_proj = projection(hidden, config.q_lora_rank)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.lora_norm_eps, dtype=dtype, device=device)
            self.q_b_proj = projection(config.q_lora_rank, query_width)
        else:
            self.q_proj = projection(hidden, query_width)
        self.kv_a_proj_with_mqa = projection(hidden, self.latent + self.rope)
        self.kv_a_layernorm = RMSNorm(self.latent, config.lora_norm_eps, dtype=dtype, device=device)
        self.kv_b_proj = projection(self.latent, heads * (self.nope + self.value))
        self.output_gate = config.mla_use_output_gate
        if self.output_gate:
            self.g_proj = projection(hidden, heads * self.value)
        self.o_proj = projection(heads * self.value, hidden)

    def forward(self, x: Tensor, state: MlaState | None = None, batch: PackedBatch | None = None) -> Tensor:
        """x: [B, T, hidden], or [1, N, hidden] of a packed batch -> the same. With `state` its rows are read and the
        new ones appended."""
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if self.query_latent else self.q_proj(x)
        query = query.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [B, heads, T, nope + rope]
        latent, shared = self.kv_a_proj_with_mqa(x).split([self.latent, self.rope], -1)
        rows = torch.cat([self.kv_a_layernorm(latent), shared], -1)
        if batch is not None and use_triton(x):
            return self._by_kernels(x, query, rows, state, batch)
        if batch is not None:
            out = self._packed(query, rows, state, batch)
        elif state is None or max(state.lengths) == 0:
            if state is not None:
                state.append(rows)
            out = self._expanded(query, rows, None)
        else:
            rows, mask = state.append(rows), _visible(state.lengths, x.shape[1], x.device)
            out = (self._absorbed if x.shape[1] == 1 else self._expanded)(query, rows, mask)
        out = out.transpose(1, 2).flatten(-2)
        if self.output_gate:
            out = sigmoid_gated(out, self.g_proj(x))
        return self.o_proj(out)

    def _by_kernels(self, x: Tensor, query: Tensor, rows: Tensor, state: MlaState | None, batch: PackedBatch) -> Tensor:
        """As `forward`, of a packed batch. query: [1, heads, N, nope + rope]; rows: [1, N, latent + rope]."""
        from dwdp.kernels.attention import attend
        from dwdp.kernels.gated import gated

        if state is not None:
            state.append_packed(rows[0], batch)
        out = attend(
            query[0].transpose(0, 1), rows[0], batch, None if state is None else state.rows, self.kv_b_proj.weight,
            nope=self.nope, value=self.value, scale=self.scale,
        )  # fmt: skip
        if self.output_gate:
            out = gated(out, self.g_proj(x).view(out.shape))
        return self.o_proj(out.flatten(-2).unsqueeze(0))

    def _packed(self, query: Tensor, rows: Tensor, state: MlaState | None, batch: PackedBatch) -> Tensor:
        """query [1, heads, N, nope + rope] and new rows [1, N, latent + rope] -> [1, heads, N, value]."""
        if state is not None:
            state.append_packed(rows[0], batch)
        outs = []
        for (start, end), before, slot in zip(batch.bounds(), batch.starts, batch.slots):
            one = query[:, :, start:end]
            if before == 0:
                outs.append(self._expanded(one, rows[:, start:end], None))
                continue
            seen = state.rows[slot : slot + 1, : before + end - start]
            mask = _visible([before], end - start, query.device)
            outs.append((self._absorbed if end - start == 1 else self._expanded)(one, seen, mask))
        return torch.cat(outs, 2)

    def _expanded(self, query: Tensor, rows: Tensor, mask: Tensor | None) -> Tensor:
        """Keys and values per head: rows [B, S, latent + rope] -> [B, heads, T, value]; no mask: causal."""
        latent, shared = rows.split([self.latent, self.rope], -1)
        expanded = self.kv_b_proj(latent).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        key, value = expanded.split([self.nope, self.value], -1)
        key = torch.cat([key, shared.unsqueeze(1).expand(-1, self.num_heads, -1, -1)], -1)
        # Fused attention wants one width for all three; zero columns change no value.
        value = F.pad(value, (0, max(0, key.shape[-1] - self.value)))
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scale
        )
        return out[..., : self.value]

    def _absorbed(self, query: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
        """Attention over latent rows, all heads sharing them. query: [B, heads, 1, nope + rope].

        The halves of kv_b are views, used inside this call only: the weight may be gone after it.
        """
        weight = self.kv_b_proj.weight.unflatten(0, (self.num_heads, -1))
        to_key, to_value = weight.split([self.nope, self.value], 1)  # [heads, nope | value, latent]
        nope, rope = query.split([self.nope, self.rope], -1)
        query = torch.cat([torch.einsum("bhtn,hnl->bhtl", nope, to_key), rope], -1)
        # The heads take the place of the query positions of one shared head: rows are not repeated per head.
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2), rows.unsqueeze(1), rows[..., : self.latent].unsqueeze(1),
            attn_mask=mask, scale=self.scale,
        )  # fmt: skip
        return torch.einsum("bthl,hvl->bhtv", out, to_value)


def _visible(lengths: list[int], num_new: int, device: torch.device) -> Tensor:
    """[B or 1, 1, T, S] bool: whether new token t of a sequence sees position s (s <= length + t)."""
    same = len(set(lengths)) == 1
    start = torch.tensor(lengths[:1] if same else lengths, device=device)
    seen = torch.arange(max(lengths) + num_new, device=device)
    last = start[:, None] + torch.arange(num_new, device=device)
    return (seen <= last.unsqueeze(-1)).unsqueeze(1)
