"""Short convolutions of KDA over packed sequences, with SiLU and, for queries and keys, the norm of each head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dwdp.kernels.batch import PackedBatch
from dwdp.kernels.lang import tl, triton

TOKENS = 16  # of a program
NORM_EPS = 1e-6  # added to the sum of squares


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def _short_conv(
    q, k, v, q_taps, k_taps, v_taps, past, q_out, k_out, v_out, next_past, begins, token_sequences,
    num_tokens, num_tiles, eps,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr, TAPS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Program (i, head, part) is tile i of the tokens, or sequence i - num_tiles, whose next past rows it writes."""
    index, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    source, taps, out = q, q_taps, q_out
    if part == 1:
        source, taps, out = k, k_taps, k_out
    if part == 2:
        source, taps, out = v, v_taps, v_out
    inner = tl.arange(0, WIDTH_BLOCK)
    known = inner < WIDTH
    row: tl.constexpr = HEADS * WIDTH  # of each part; a past row has three of them
    column = head * WIDTH + inner
    past_column = part * row + column
    if index < num_tiles:
        tokens = index * TOKENS + tl.arange(0, TOKENS)
        valid = tokens < num_tokens
        sequence = tl.load(token_sequences + tokens, mask=valid, other=0)
        local = tokens - tl.load(begins + sequence, mask=valid, other=0)  # among the sequence's new tokens
        total = tl.zeros([TOKENS, WIDTH_BLOCK], dtype=tl.float32)
        for tap in tl.static_range(TAPS):
            back = TAPS - 1 - tap
            new = valid & (local >= back)
            old = valid & (local < back)
            here_at = source + (tokens - back)[:, None].to(tl.int64) * row + column[None, :]
            here = tl.load(here_at, mask=new[:, None] & known[None, :], other=0.0).to(tl.float32)
            line = sequence * (TAPS - 1) + tap + local
            past_at = past + line[:, None].to(tl.int64) * (3 * row) + past_column[None, :]
            here += tl.load(past_at, mask=old[:, None] & known[None, :], other=0.0).to(tl.float32)
            weight = tl.load(taps + column * TAPS + tap, mask=known, other=0.0).to(tl.float32)
            total += here * weight[None, :]
        # Rounded behind SiLU, as the torch form does, and once more behind the norm.
        total = (total * tl.sigmoid(total)).to(out.dtype.element_ty).to(tl.float32)
        if part < 2:
            total = total / tl.sqrt(tl.sum(total * total, 1) + eps)[:, None]
        out_at = out + tokens[:, None].to(tl.int64) * row + column[None, :]
        tl.store(out_at, total.to(out.dtype.element_ty), mask=valid[:, None] & known[None, :])
    else:  # names of its own: a name of both branches would need one type
        owner = (index - num_tiles).to(tl.int64)
        begin = tl.load(begins + owner)
        length = tl.load(begins + owner + 1) - begin
        for kept in tl.static_range(TAPS - 1):
            # The sequence's last raw rows; a short one keeps some that it had.
            place = length - (TAPS - 1) + kept
            new_at = source + (begin + place) * row + column
            old_at = past + (owner * (TAPS - 1) + kept + length) * (3 * row) + past_column
            is_new = tl.zeros([WIDTH_BLOCK], dtype=tl.int64) + place >= 0
            values = tl.load(new_at, mask=known & is_new, other=0.0)
            values += tl.load(old_at, mask=known & (is_new == 0), other=0.0)
            tl.store(next_past + (owner * (TAPS - 1) + kept) * (3 * row) + past_column, values, mask=known)


def short_conv(
    parts: Sequence[Tensor], taps: Sequence[Tensor], past: Tensor, batch: PackedBatch, *, heads: int
) -> tuple[list[Tensor], Tensor]:
    """Causal convolution, SiLU and, for the first two parts, x / sqrt(sum(x^2) + 1e-6) of each head.

    parts: raw queries, keys and values [N, heads * d]; taps: of each [heads * d, 1, kernel], fp32; past: the
    sequences' last raw rows before these [B, kernel - 1, 3 * heads * d], in the batch's order.
    Returns the three [1, N, heads, d] and the next past rows. The same rounding as the torch form's: to the parts'
    dtype behind SiLU and behind the norm.
    """
    num_tokens, row = parts[0].shape
    count, kernel = len(batch.lengths), taps[0].shape[-1]
    parts = [part.contiguous() for part in parts]
    past = past.contiguous()
    outs = [torch.empty_like(part) for part in parts]
    next_past = torch.empty_like(past)
    tiles = triton.cdiv(num_tokens, TOKENS)
    _short_conv[(tiles + count, heads, 3)](
        *parts, *(tap.contiguous() for tap in taps), past, *outs, next_past, batch.cu_seqlens, batch.token_sequences,
        num_tokens, tiles, NORM_EPS,
        HEADS=heads, WIDTH=row // heads, WIDTH_BLOCK=triton.next_power_of_2(row // heads), TAPS=kernel, TOKENS=TOKENS,
        num_warps=4,
    )  # fmt: skip
    return [out.view(1, num_tokens, heads, -1) for out in outs], next_past
