"""Kimi Delta Attention: short convolutions, forget gate per channel, delta rule, gated output norm.

Gate, beta, recurrence and state are fp32. Prefill uses the chunk form, one new token the recurrence itself.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dwdp.kernels.batch import PackedBatch
from dwdp.kernels.select import use_triton
from dwdp.model.config import ModelConfig
from dwdp.model.norms import RMSNorm, l2norm, rms_normalise, sigmoid_gated, wide, widen
from dwdp.model.state import KdaState

CHUNK = 64
SUB = 16
# Elements [batch, heads, tokens, head_dim] of the chunk form at a time: bounds its fp32 temporaries.
SEGMENT_ELEMENTS = 1 << 25


def kda_gate(f: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """Log decay per key channel, fp32: f [B, T, H, K], a_log [H], dt_bias [H * K] -> [B, T, H, K], below 0.

    With a bound: bound * sig(exp(a_log) * (f + dt_bias)); without: -exp(a_log) * softplus(f + dt_bias).
    """
    heads, width = f.shape[-2:]
    f = widen(f) + widen(dt_bias).view(heads, width)
    rate = widen(a_log).exp()[:, None]
    if lower_bound is None:
        return -rate * F.softplus(f)
    return lower_bound * torch.sigmoid(rate * f)


def kda_recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence, token by token, all fp32.

    q, k, g: [B, T, H, K]; v: [B, T, H, V]; beta: [B, T, H];
    state: [B, H, K, V]. Returns outputs [B, T, H, V] and the last state (a new tensor).
    """
    outputs = []
    for t in range(q.shape[1]):
        state = g[:, t].exp().unsqueeze(-1) * state
        recalled = (k[:, t].unsqueeze(-1) * state).sum(-2)
        update = beta[:, t].unsqueeze(-1) * (v[:, t] - recalled)
        state = state + k[:, t].unsqueeze(-1) * update.unsqueeze(-2)
        outputs.append((q[:, t].unsqueeze(-1) * state).sum(-2))
    return torch.stack(outputs, 1), state


def kda_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    gate_floor: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The same as `kda_recurrent` (same arguments), 64 tokens at a time.

    gate_floor: a bound that every gate respects (g >= gate_floor), or None when there is none; it lets the
    decays inside a sub-chunk be factorised, see [Note: decay inside a chunk].
    """
    batch, num_tokens, heads, width = q.shape
    step = max(1, SEGMENT_ELEMENTS // (batch * heads * width * CHUNK)) * CHUNK
    outputs = []
    for start in range(0, num_tokens, step):
        part = [x[:, start : start + step] for x in (q, k, v, g, beta)]
        out, state = _kda_segment(*part, state, gate_floor)
        outputs.append(out)
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)), state


def _kda_segment(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, gate_floor: float | None
) -> tuple[Tensor, Tensor]:
    num_tokens = q.shape[1]
    # Padding with k = v = 0, beta = 0, g = 0 leaves outputs and state exact.
    pad = -num_tokens % CHUNK
    q, k, v, g = (F.pad(x, (0, 0, 0, 0, 0, pad)).transpose(1, 2).unflatten(2, (-1, CHUNK)) for x in (q, k, v, g))
    beta = F.pad(beta, (0, 0, 0, pad)).transpose(1, 2).unflatten(2, (-1, CHUNK)).unsqueeze(-1)

    from_start, to_end, kk, qk = _decayed_products(q, k, g, gate_floor)
    # (I + A)^-1 applied to both right-hand sides by forward substitution.
    right = torch.cat([beta * v, beta * k * from_start], -1)
    solved = torch.linalg.solve_triangular((beta * kk).tril(-1), right, upper=False, unitriangular=True)
    values, keys = solved.split([v.shape[-1], k.shape[-1]], -1)
    q_in, k_out = q * from_start, k * to_end
    qk = qk.tril()
    decay = from_start[..., -1, :].unsqueeze(-1)

    outputs = []
    for c in range(q.shape[2]):
        new = values[:, :, c] - keys[:, :, c] @ state
        outputs.append(q_in[:, :, c] @ state + qk[:, :, c] @ new)
        state = decay[:, :, c] * state + k_out[:, :, c].transpose(-1, -2) @ new
    return torch.cat(outputs, 2)[:, :, :num_tokens].transpose(1, 2), state


def _decayed_products(
    q: Tensor, k: Tensor, g: Tensor, gate_floor: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Everything of a chunk that holds exp of summed gates. q, k, g: [..., 64, K].

    Returns exp(G) and exp(G_last - G) [..., 64, K], and the products k_i.k_j exp(G_i - G_j) and
    q_i.k_j exp(G_i - G_j) [..., 64, 64], of which only j <= i mean anything.

    [Note: decay inside a chunk] 64 gates at the bound of -5 sum to -320, and exp(320) overflows, so the decay
    must not be split into exp(G_i) * exp(-G_j). Sums are taken inside sub-chunks of 16. Between two of them
    the decay is (row to its sub-chunk's start) * (sub-chunks between) * (column to its sub-chunk's end), each
    factor at most 1. Inside one it is split around the middle row when the gate is bounded, so that no
    exponent passes 8 * 5 = 40 in size, and else taken as pairwise differences, 16 x 16 x K of them. Sums and
    differences are fp64: exp turns the rounding of a sum of 80 into an error of 4e-6 of a neighbour's decay.
    """
    q, k, g = (x.unflatten(-2, (-1, SUB)) for x in (q, k, g))  # [..., 4, 16, K]
    num_subs = q.shape[-3]
    local = g.double().cumsum(-2)
    total = local[..., -1:, :]
    from_start, to_end, whole = (x.to(g.dtype).exp() for x in (local, total - local, total))
    rows = torch.stack([k, q], -4)  # [..., 2, 4, 16, K]: both left factors meet the same right factor
    diagonal = _sub_chunk_products(rows, k, local, gate_floor)

    ahead = rows * from_start.unsqueeze(-4)
    behind = k * to_end
    blocks, carried = [], None  # carried: keys of all earlier sub-chunks, decayed to the start of this one
    for a in range(num_subs):
        if a:
            last = behind[..., a - 1, :, :]
            carried = last if carried is None else torch.cat([carried * whole[..., a - 1, :, :], last], -2)
            left = ahead[..., a, :, :] @ carried.unsqueeze(-3).transpose(-1, -2)
            block = torch.cat([left, diagonal[..., a, :, :]], -1)
        else:
            block = diagonal[..., a, :, :]
        blocks.append(F.pad(block, (0, (num_subs - 1 - a) * SUB)))
    products = torch.cat(blocks, -2)

    before = total.cumsum(-3) - total
    after = total.sum(-3, keepdim=True) - before - total
    return (
        (before + local).to(g.dtype).exp().flatten(-3, -2),
        (after + (total - local)).to(g.dtype).exp().flatten(-3, -2),
        products[..., 0, :, :],
        products[..., 1, :, :],
    )


def _sub_chunk_products(rows: Tensor, k: Tensor, local: Tensor, gate_floor: float | None) -> Tensor:
    """rows_i.k_j exp(L_i - L_j) inside sub-chunks: rows [..., 2, 4, 16, K]; k, L (fp64) [..., 4, 16, K]."""
    if gate_floor is not None and gate_floor * (SUB // 2) >= -40.0:
        shift = local - local[..., SUB // 2 - 1 : SUB // 2, :]
        grow, shrink = shift.exp().to(k.dtype), (-shift).exp().to(k.dtype)
        return (rows * grow.unsqueeze(-4)) @ (k * shrink).unsqueeze(-4).transpose(-1, -2)
    difference = (local.unsqueeze(-2) - local.unsqueeze(-3)).to(k.dtype)  # [..., 4, 16 (i), 16 (j), K]
    later = torch.ones(SUB, SUB, dtype=torch.bool, device=k.device).triu(1).unsqueeze(-1)
    decayed = k.unsqueeze(-3) * difference.masked_fill(later, float("-inf")).exp()
    return torch.einsum("...rsik,...sijk->...rsij", rows, decayed)


class KimiDeltaAttention(nn.Module):
    """KDA block; parameter names are the release's, below `self_attn.`."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        linear, hidden = config.linear_attn_config, config.hidden_size
        self.num_heads, self.head_dim = linear.num_heads, linear.head_dim
        self.kernel_size, self.lower_bound = linear.short_conv_kernel_size, linear.gate_lower_bound
        width, fp32 = linear.width, wide(dtype)

        def projection(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, dtype=dtype, device=device)

        self.q_proj = projection(hidden, width)
        self.k_proj = projection(hidden, width)
        self.v_proj = projection(hidden, width)
        self.q_conv1d = ShortConv(width, self.kernel_size, dtype=fp32, device=device)
        self.k_conv1d = ShortConv(width, self.kernel_size, dtype=fp32, device=device)
        self.v_conv1d = ShortConv(width, self.kernel_size, dtype=fp32, device=device)
        self.f_a_proj = projection(hidden, self.head_dim)
        self.f_b_proj = projection(self.head_dim, width)
        self.b_proj = projection(hidden, self.num_heads)
        self.A_log = nn.Parameter(torch.zeros(self.num_heads, dtype=fp32, device=device))
        self.dt_bias = nn.Parameter(torch.zeros(width, dtype=fp32, device=device))
        self.full_rank_gate = linear.use_full_rank_gate
        if self.full_rank_gate:
            self.g_proj = projection(hidden, width)
        else:
            self.g_a_proj = projection(hidden, self.head_dim)
            self.g_b_proj = projection(self.head_dim, width)
        self.o_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype=fp32, device=device)
        self.o_proj = projection(width, hidden)

    def forward(self, x: Tensor, state: KdaState | None = None, batch: PackedBatch | None = None) -> Tensor:
        """x: [B, T, hidden], or [1, N, hidden] of a packed batch -> the same. `state` is read; its successor is left
        in `state.pending`."""
        heads = (self.num_heads, self.head_dim)
        raw = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        f = self.f_b_proj(self.f_a_proj(x)).unflatten(-1, heads)
        parts = (*raw, f, self.b_proj(x))
        past = self._past(x, state, batch)
        as_kernels = batch is not None and use_triton(x)
        if as_kernels:
            out, pending = self._by_kernels(*parts, *past, batch)
        elif batch is None:
            out, pending = self._mixed(*parts, *past)
        else:
            # Each sequence for itself: the same sums as without the others.
            results = [
                self._mixed(*(part[:, start:end] for part in parts), *(one[b : b + 1] for one in past))
                for b, (start, end) in enumerate(batch.bounds())
            ]
            out = torch.cat([one for one, _ in results], 1)
            pending = tuple(torch.cat(ones) for ones in zip(*(kept for _, kept in results)))
        if state is not None:
            state.pending = pending

        gate = self.g_proj(x) if self.full_rank_gate else self.g_b_proj(self.g_a_proj(x))
        gate = gate.unflatten(-1, heads)
        if as_kernels:
            from dwdp.kernels.gated import gated

            return self.o_proj(gated(out, gate, self.o_norm.weight, self.o_norm.eps).flatten(-2))
        out = rms_normalise(out, self.o_norm.eps) * self.o_norm.weight
        return self.o_proj(sigmoid_gated(out, gate).flatten(-2))

    def _by_kernels(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        f: Tensor,
        beta: Tensor,
        past: Tensor,
        recurrent: Tensor,
        batch: PackedBatch,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """As `_mixed`, over a packed batch; where the library of the delta rule is missing, that is torch's."""
        from dwdp.kernels.kda import delta_rule, runs_on
        from dwdp.kernels.short_conv import short_conv

        taps = [conv.weight for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d)]
        (q, k, v), conv = short_conv([q[0], k[0], v[0]], taps, past, batch, heads=self.num_heads)
        beta = torch.sigmoid(widen(beta))
        if runs_on(q):
            gate = (self.A_log, self.dt_bias, self.lower_bound)
            out, recurrent = delta_rule(q, k, v, f, beta, *gate, recurrent, batch)
            return out, (conv, recurrent)
        g = kda_gate(f, self.A_log, self.dt_bias, self.lower_bound)
        parts = (widen(q) * self.head_dim**-0.5, widen(k), widen(v), g, beta)
        results = []
        for b, (start, end) in enumerate(batch.bounds()):
            one = [part[:, start:end] for part in parts]
            if end - start == 1:
                results.append(kda_recurrent(*one, recurrent[b : b + 1]))
            else:
                results.append(kda_chunk(*one, recurrent[b : b + 1], gate_floor=self.lower_bound))
        outs, states = zip(*results)
        return torch.cat(outs, 1), (conv, torch.cat(states))

    def _past(self, x: Tensor, state: KdaState | None, batch: PackedBatch | None) -> tuple[Tensor, Tensor]:
        """conv and recurrent of the sequences, zeros for those that begin here; see KdaState."""
        if state is not None:
            return (state.conv, state.recurrent) if batch is None else state.read(batch)
        count, width = x.shape[0] if batch is None else len(batch.lengths), self.num_heads * self.head_dim
        return (
            x.new_zeros(count, self.kernel_size - 1, 3 * width),
            x.new_zeros(count, self.num_heads, self.head_dim, self.head_dim, dtype=wide(x.dtype)),
        )

    def _mixed(
        self, q: Tensor, k: Tensor, v: Tensor, f: Tensor, beta: Tensor, past: Tensor, recurrent: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Convolutions and recurrence over projections [B, T, width] (f: [B, T, H, K], beta: [B, T, H], both raw)
        -> fp32 [B, T, H, V] and the sequences' next conv rows and state."""
        num_tokens, heads = q.shape[1], (self.num_heads, self.head_dim)
        windows = [torch.cat(pair, 1) for pair in zip(past.chunk(3, -1), (q, k, v))]
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        q, k, v = (conv(window).unflatten(-1, heads) for conv, window in zip(convs, windows))
        q = l2norm(q) * self.head_dim**-0.5
        k = l2norm(k)

        g = kda_gate(f, self.A_log, self.dt_bias, self.lower_bound)
        beta = torch.sigmoid(widen(beta))
        if num_tokens == 1:
            out, recurrent = kda_recurrent(q, k, widen(v), g, beta, recurrent)
        else:
            out, recurrent = kda_chunk(q, k, widen(v), g, beta, recurrent, gate_floor=self.lower_bound)
        return out, (torch.cat([w[:, num_tokens:] for w in windows], -1), recurrent)


class ShortConv(nn.Module):
    """Depthwise causal convolution and SiLU, fp32 inside, one rounding. weight: [width, 1, kernel]."""

    def __init__(self, width: int, kernel: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, 1, kernel, dtype=dtype, device=device))

    def forward(self, window: Tensor) -> Tensor:
        """window: [B, kernel - 1 + T, width], past rows first -> [B, T, width] of the same dtype."""
        taps = self.weight[:, 0].unbind(-1)
        num_tokens = window.shape[1] - len(taps) + 1
        # Shifted products and not conv1d: the sum per token does not depend on batch or chunk.
        total = sum(tap * window[:, j : j + num_tokens] for j, tap in enumerate(taps))
        return F.silu(total).to(window.dtype)
