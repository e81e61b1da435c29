"""Decode of latent attention: one query a sequence over the latent rows where they lie, through FlashMLA where that can
be used (`flash_mla.runs_on`).

Softmax is fp32 and in base 2: scores are scaled by log2(e) once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dwdp.kernels import flash_mla
from dwdp.kernels.lang import tl, triton

LOG2_E = 1.4426950408889634
# Registers and shared memory of one program fill an SM; two waves of programs hide the end of the first.
WAVES = 2


@dataclass(frozen=True)
class Blocks:
    """queries or heads, and keys, that a program takes at a time; warps; stages of the loads."""

    rows: int
    keys: int
    warps: int
    stages: int


def decode_blocks(dtype: torch.dtype) -> Blocks:
    return Blocks(64, 64, 8, 2) if dtype.itemsize == 2 else Blocks(16, 16, 4, 1)


def block_width(width: int) -> int:
    """The power of two that holds `width` columns and that a matrix product takes."""
    return max(16, triton.next_power_of_2(width))


def precision(dtype: torch.dtype) -> str:
    """fp32 stays fp32; narrower operands have one precision anyway."""
    return "ieee" if dtype == torch.float32 else "tf32"


@triton.jit
def weighted(scores, values, total, highest, summed, PRECISION: tl.constexpr):
    """Scores [lines, keys] and the keys' values [keys, width] into the running softmax of the lines."""
    above = tl.maximum(highest, tl.max(scores, 1))
    shrink = tl.exp2(highest - above)
    weights = tl.exp2(scores - above[:, None])
    summed = summed * shrink + tl.sum(weights, 1)
    total = total * shrink[:, None]
    total = tl.dot(weights.to(values.dtype), values, total, input_precision=PRECISION)
    return total, above, summed


@triton.jit
def _over_rows(
    q_latent, q_rope, total, highest, summed, base, low, high, scale, row_stride,
    LATENT: tl.constexpr, ROPE: tl.constexpr, LATENT_BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr,
    KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Latent rows [low, high) into the running softmax of a block of heads."""
    latent, rope = tl.arange(0, LATENT_BLOCK), tl.arange(0, ROPE_BLOCK)
    for at in range(low, high, KEYS):
        keys = at + tl.arange(0, KEYS)
        # Past the end the last row is read again and weighs nothing: no load has a mask. Offsets of 32 bits reach 3.7
        # million rows; wider ones would not leave enough registers.
        offsets = tl.minimum(keys, high - 1)[:, None] * row_stride
        if LATENT < LATENT_BLOCK or ROPE < ROPE_BLOCK:
            c = tl.load(base + (offsets + latent[None, :]), mask=(latent < LATENT)[None, :], other=0.0)
            r = tl.load(base + LATENT + (offsets + rope[None, :]), mask=(rope < ROPE)[None, :], other=0.0)
        else:
            c, r = tl.load(base + (offsets + latent[None, :])), tl.load(base + LATENT + (offsets + rope[None, :]))
        scores = tl.dot(q_latent, tl.trans(c), input_precision=PRECISION)
        scores = tl.dot(q_rope, tl.trans(r), scores, input_precision=PRECISION) * scale
        scores = tl.where((keys < high)[None, :], scores, float("-inf"))
        total, highest, summed = weighted(scores, c, total, highest, summed, PRECISION)
    return total, highest, summed


@triton.jit(do_not_specialize=["splits"])
def _decode(
    query_latent, query_rope, rows, slots, contexts, partial, partial_highest, partial_summed,
    scale, latent_stride, latent_head_stride, rope_stride, rope_head_stride, slot_stride, row_stride, splits,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr,
    LATENT_BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr,
    HEADS_BLOCK: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of heads of one sequence against one split of its context."""
    sequence, split = tl.program_id(2), tl.program_id(1)
    heads = tl.program_id(0) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
    latent, rope = tl.arange(0, LATENT_BLOCK), tl.arange(0, ROPE_BLOCK)
    context = tl.load(contexts + sequence).to(tl.int32)
    share = tl.cdiv(tl.cdiv(context, splits), KEYS) * KEYS
    low = split * share
    high = tl.minimum(low + share, context)
    line = (sequence * splits + split) * HEADS + heads
    known = heads < HEADS
    if low >= high:
        tl.store(partial_highest + line, tl.full([HEADS_BLOCK], float("-inf"), tl.float32), mask=known)
        tl.store(partial_summed + line, tl.zeros([HEADS_BLOCK], tl.float32), mask=known)
    else:
        c_at = query_latent + sequence * latent_stride + heads[:, None] * latent_head_stride + latent[None, :]
        r_at = query_rope + sequence * rope_stride + heads[:, None] * rope_head_stride + rope[None, :]
        q_latent = tl.load(c_at, mask=known[:, None] & (latent < LATENT)[None, :], other=0.0)
        q_rope = tl.load(r_at, mask=known[:, None] & (rope < ROPE)[None, :], other=0.0)
        total = tl.zeros([HEADS_BLOCK, LATENT_BLOCK], dtype=tl.float32)
        highest = tl.full([HEADS_BLOCK], float("-inf"), dtype=tl.float32)
        summed = tl.zeros([HEADS_BLOCK], dtype=tl.float32)
        base = rows + tl.load(slots + sequence).to(tl.int64) * slot_stride
        total, highest, summed = _over_rows(
            q_latent, q_rope, total, highest, summed, base, low, high, scale, row_stride,
            LATENT, ROPE, LATENT_BLOCK, ROPE_BLOCK, KEYS, PRECISION,
        )  # fmt: skip
        cells = line[:, None].to(tl.int64) * LATENT + latent[None, :]
        tl.store(partial + cells, total, mask=known[:, None] & (latent < LATENT)[None, :])
        tl.store(partial_highest + line, highest, mask=known)
        tl.store(partial_summed + line, summed, mask=known)


@triton.jit(do_not_specialize=["splits"])
def _combine(
    partial, partial_highest, partial_summed, out, splits, out_stride, out_head_stride,
    HEADS: tl.constexpr, LATENT: tl.constexpr, LATENT_BLOCK: tl.constexpr,
):  # fmt: skip
    """The splits of one sequence and head, in ascending order, into one."""
    head, sequence = tl.program_id(0), tl.program_id(1)
    latent = tl.arange(0, LATENT_BLOCK)
    first = (sequence * splits) * HEADS + head
    highest = tl.load(partial_highest + first)
    for split in range(1, splits):
        highest = tl.maximum(highest, tl.load(partial_highest + first + split * HEADS))
    total = tl.zeros([LATENT_BLOCK], dtype=tl.float32)
    summed = 0.0
    for split in range(0, splits):
        line = first + split * HEADS
        one = tl.load(partial_highest + line)
        share = tl.exp2(one - highest)
        # A split without keys has written nothing but its -inf.
        written = (latent < LATENT) & (tl.zeros([LATENT_BLOCK], dtype=tl.float32) + one > float("-inf"))
        total += share * tl.load(partial + line.to(tl.int64) * LATENT + latent, mask=written, other=0.0)
        summed += share * tl.load(partial_summed + line)
    out_at = out + sequence * out_stride + head * out_head_stride + latent
    tl.store(out_at, (total / summed).to(out.dtype.element_ty), mask=latent < LATENT)


def num_splits(num_sequences: int, num_head_blocks: int, longest: int, processors: int) -> int:
    """Into how many parts contexts are cut: two waves of programs, of at least 256 keys each."""
    return max(1, min(WAVES * processors // (num_sequences * num_head_blocks), -(-longest // 256)))


def decode(
    query: Tensor,
    cache: Tensor,
    slots: Tensor,
    contexts: Tensor,
    longest: int,
    weight: Tensor,
    *,
    nope: int,
    value: int,
    scale: float,
    pages: flash_mla.Pages | None = None,
    blocks: Blocks | None = None,
    splits: int | None = None,
) -> Tensor:
    """One query of each sequence over its latent rows, which are read where they lie -> [B, heads, value].

    query: [B, heads, nope + rope]; cache: [slots, capacity, latent + rope]; slots, contexts: integers [B] on the
    device, contexts counts the new row; longest: the largest of contexts; weight: as of `attend`. pages: of these
    slots and contexts, FlashMLA reads the rows; None: our own kernel, which blocks and splits are for.
    """
    count, heads, width = query.shape
    latent, rope = weight.shape[1], width - nope
    to_key, to_value = weight.view(heads, nope + value, latent).split([nope, value], 1)
    joined = query.new_empty(count, heads, latent + rope)
    out = query.new_empty(count, heads, value)
    with torch.no_grad():  # products into given places have no backward, and neither has what is between them
        torch.bmm(query[..., :nope].transpose(0, 1), to_key, out=joined[..., :latent].transpose(0, 1))
        joined[..., latent:].copy_(query[..., nope:])
        gathered = rows_of_heads(
            joined, cache, slots, contexts, longest, latent, scale=scale, pages=pages, blocks=blocks, splits=splits
        )
        torch.bmm(gathered.transpose(0, 1), to_value.transpose(1, 2), out=out.transpose(0, 1))
    return out


def rows_of_heads(
    query: Tensor,
    cache: Tensor,
    slots: Tensor,
    contexts: Tensor,
    longest: int,
    latent: int,
    *,
    scale: float,
    pages: flash_mla.Pages | None = None,
    blocks: Blocks | None = None,
    splits: int | None = None,
) -> Tensor:
    """Attention in the latent width. query: [B, heads, latent + rope] -> [B, heads, latent]; see `decode`."""
    if pages is not None:
        return flash_mla.decode(query, cache, pages, scale)
    count, heads, width = query.shape
    rope, query_rope = width - latent, query[..., latent:]
    out = query.new_empty(count, heads, latent)
    blocks = decode_blocks(query.dtype) if blocks is None else blocks
    num_blocks = -(-heads // blocks.rows)
    if splits is None:
        splits = num_splits(count, num_blocks, longest, _processors(query.device))
    partial = torch.empty(count, splits, heads, latent, dtype=torch.float32, device=query.device)
    highest, summed = (partial.new_empty(count, splits, heads) for _ in range(2))
    _decode[(num_blocks, splits, count)](
        query, query_rope, cache, slots, contexts, partial, highest, summed,
        scale * LOG2_E, query.stride(0), query.stride(1), query_rope.stride(0), query_rope.stride(1),
        cache.stride(0), cache.stride(1), splits,
        HEADS=heads, LATENT=latent, ROPE=rope, LATENT_BLOCK=block_width(latent), ROPE_BLOCK=block_width(rope),
        HEADS_BLOCK=blocks.rows, KEYS=blocks.keys, PRECISION=precision(query.dtype),
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    _combine[(heads, count)](
        partial, highest, summed, out, splits, out.stride(0), out.stride(1),
        HEADS=heads, LATENT=latent, LATENT_BLOCK=block_width(latent), num_warps=4,
    )  # fmt: skip
    return out


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # of the interpreter: a few splits
    return torch.cuda.get_device_properties(device).multi_processor_count
