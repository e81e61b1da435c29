"""Latent attention of a packed batch: prefill over expanded keys and values; single tokens go through `decode.py`.

[Note: keys in rounds] Prefill never holds scores, and never the keys of a whole context: it expands SPAN rows of each
sequence at a time, always cut at multiples of SPAN, and carries the running softmax of every query from one round to
the next. What a round needs is bounded by SPAN and by the new tokens, however long the context is.

Softmax is fp32 and in base 2: scores are scaled by log2(e) once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dwdp.kernels import flash_mla
from dwdp.kernels.batch import PackedBatch, upload, upload_parts
from dwdp.kernels.decode import LOG2_E, Blocks, block_width, decode, precision, weighted
from dwdp.kernels.lang import tl, triton

SPAN = 8192


def prefill_blocks(dtype: torch.dtype) -> Blocks:
    return Blocks(128, 64, 8, 3) if dtype.itemsize == 2 else Blocks(32, 32, 8, 1)


@triton.jit
def _over_keys(
    q_nope, q_rope, total, highest, summed, expanded, shared, key_row, key_first, low, high, key_end, positions,
    scale, expanded_stride, shared_stride, head,
    NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr,
    NOPE_BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    KEYS: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys [low, high) into the running softmax (total, highest, summed); key_first lies in workspace row key_row."""
    nope, rope, value = tl.arange(0, NOPE_BLOCK), tl.arange(0, ROPE_BLOCK), tl.arange(0, VALUE_BLOCK)
    key_base = expanded + head * (NOPE + VALUE)
    for at in range(low, high, KEYS):
        keys = at + tl.arange(0, KEYS)
        inside = keys < key_end
        rows = (key_row + keys - key_first).to(tl.int64)
        k_at = key_base + rows[:, None] * expanded_stride + nope[None, :]
        r_at = shared + rows[:, None] * shared_stride + rope[None, :]
        v_at = key_base + NOPE + rows[:, None] * expanded_stride + value[None, :]
        if MASKED or NOPE < NOPE_BLOCK or ROPE < ROPE_BLOCK or VALUE < VALUE_BLOCK:
            k = tl.load(k_at, mask=inside[:, None] & (nope < NOPE)[None, :], other=0.0)
            r = tl.load(r_at, mask=inside[:, None] & (rope < ROPE)[None, :], other=0.0)
            v = tl.load(v_at, mask=inside[:, None] & (value < VALUE)[None, :], other=0.0)
        else:
            k, r, v = tl.load(k_at), tl.load(r_at), tl.load(v_at)
        scores = tl.dot(q_nope, tl.trans(k), input_precision=PRECISION)
        scores = tl.dot(q_rope, tl.trans(r), scores, input_precision=PRECISION) * scale
        if MASKED:
            seen = inside[None, :] & (keys[None, :] <= positions[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        total, highest, summed = weighted(scores, v, total, highest, summed, PRECISION)
    return total, highest, summed


@triton.jit
def _prefill(
    query, expanded, shared, out, carried, carried_highest, carried_summed, tiles,
    scale, expanded_stride, shared_stride,
    HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr,
    NOPE_BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CARRIES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of queries and one head against the keys of one round; tiles: see `Round`."""
    # Tiles of one head run at a time, so that its keys and values stay in the L2 cache.
    tile, head = tiles + tl.program_id(0) * 6, tl.program_id(1)
    token, count, position = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    key_row, key_first, key_end = tl.load(tile + 3), tl.load(tile + 4), tl.load(tile + 5)
    lines = tl.arange(0, QUERIES)
    valid = lines < count
    places = (token + lines) * HEADS + head
    nope, rope, value = tl.arange(0, NOPE_BLOCK), tl.arange(0, ROPE_BLOCK), tl.arange(0, VALUE_BLOCK)
    q_at = query + places[:, None] * (NOPE + ROPE)
    q_nope = tl.load(q_at + nope[None, :], mask=valid[:, None] & (nope < NOPE)[None, :], other=0.0)
    q_rope = tl.load(q_at + NOPE + rope[None, :], mask=valid[:, None] & (rope < ROPE)[None, :], other=0.0)

    cells = places[:, None] * VALUE + value[None, :]
    stored = valid[:, None] & (value < VALUE)[None, :]
    total = tl.zeros([QUERIES, VALUE_BLOCK], dtype=tl.float32)
    highest = tl.full([QUERIES], float("-inf"), dtype=tl.float32)
    summed = tl.zeros([QUERIES], dtype=tl.float32)
    if CARRIES:
        later = tl.zeros([QUERIES], dtype=tl.int32) + key_first > 0
        total = tl.load(carried + cells, mask=stored & later[:, None], other=0.0)
        summed = tl.load(carried_summed + places, mask=valid & later, other=0.0)
        # A line of padding goes on from 0: it may see no key here, and -inf against -inf would be NaN.
        highest = tl.load(carried_highest + places, mask=valid & later, other=0.0)
        highest = tl.where(later, highest, float("-inf"))

    # Keys that every query of the tile sees, in whole blocks; then the rest, each query up to its own position.
    common = tl.maximum(tl.minimum(key_end, position + 1) - key_first, 0) // KEYS * KEYS + key_first
    high = tl.minimum(key_end, position + count)
    positions = position + lines
    total, highest, summed = _over_keys(
        q_nope, q_rope, total, highest, summed, expanded, shared, key_row, key_first, key_first, common, key_end,
        positions, scale, expanded_stride, shared_stride, head,
        NOPE, ROPE, VALUE, NOPE_BLOCK, ROPE_BLOCK, VALUE_BLOCK, KEYS, False, PRECISION,
    )  # fmt: skip
    total, highest, summed = _over_keys(
        q_nope, q_rope, total, highest, summed, expanded, shared, key_row, key_first, common, high, key_end,
        positions, scale, expanded_stride, shared_stride, head,
        NOPE, ROPE, VALUE, NOPE_BLOCK, ROPE_BLOCK, VALUE_BLOCK, KEYS, True, PRECISION,
    )  # fmt: skip
    if CARRIES:
        if position + count > key_end:  # a later round has keys for this tile
            tl.store(carried + cells, total, mask=stored)
            tl.store(carried_highest + places, highest, mask=valid)
            tl.store(carried_summed + places, summed, mask=valid)
        else:
            tl.store(out + cells, (total / summed[:, None]).to(out.dtype.element_ty), mask=stored)
    else:
        tl.store(out + cells, (total / summed[:, None]).to(out.dtype.element_ty), mask=stored)


@dataclass(frozen=True)
class Round:
    """Keys that are expanded at once, see [Note: keys in rounds].

    spans: (sequence of the batch, first key, end), which lie one behind the other in the workspace. tiles: int32
    [n, 6] on the device: first token and count of the queries, position of the first in its sequence, the span's
    first workspace row, its first key and its end.
    """

    spans: tuple[tuple[int, int, int], ...]
    tiles: Tensor


@dataclass(frozen=True)
class AttentionPlan:
    """What the latent attention of a batch does, the same in every layer.

    rounds: of the prefill. carries: whether a sequence has keys in several. decodes: int64 tokens on the device of
    sequences that decode (one new token behind others), or None; contexts: int64 keys of each of those.
    """

    rounds: tuple[Round, ...]
    carries: bool
    decodes: Tensor | None
    decode_slots: Tensor | None
    contexts: Tensor | None
    longest: int


def plan(batch: PackedBatch, size: int, span: int) -> AttentionPlan:
    """size: queries of a tile. span: keys of a round."""
    bounds = batch.bounds()
    decoding = [b for b, (n, before) in enumerate(zip(batch.lengths, batch.starts)) if n == 1 and before > 0]
    spans = []
    for b in sorted(set(range(len(bounds))) - set(decoding)):
        keys = batch.starts[b] + batch.lengths[b]
        spans += [(b, first, min(first + span, keys)) for first in range(0, keys, span)]
    # Round r has the r-th spans of the sequences; those of one round follow each other until the workspace is full.
    spans.sort(key=lambda one: (one[1], one[0]))
    groups: list[list[tuple[int, int, int]]] = []
    for one in spans:
        whole = groups and groups[-1][0][1] == one[1]
        if whole and sum(end - first for _, first, end in groups[-1]) + one[2] - one[1] <= span:
            groups[-1].append(one)
        else:
            groups.append([one])
    device = batch.cu_seqlens.device
    rounds = []
    for group in groups:
        tiles, row = [], 0
        for b, first, end in group:
            token, before, length = bounds[b][0], batch.starts[b], batch.lengths[b]
            for at in range(0, length, size):
                count = min(size, length - at)
                if before + at + count > first:
                    tiles.append((token + at, count, before + at, row, first, end))
            row += end - first
        tiles.sort(key=lambda tile: tile[4] - min(tile[5], tile[2] + tile[1]))  # the longest first
        rounds.append(Round(tuple(group), upload(torch.tensor(tiles, dtype=torch.int32), device)))
    if not decoding:
        return AttentionPlan(tuple(rounds), _carries(spans), None, None, None, 0)
    tokens, slots = [bounds[b][0] for b in decoding], [batch.slots[b] for b in decoding]
    contexts = [batch.starts[b] + 1 for b in decoding]
    uploaded = upload_parts([torch.tensor(part) for part in (tokens, slots, contexts)], device)
    return AttentionPlan(tuple(rounds), _carries(spans), *uploaded, max(contexts))


def _carries(spans: list[tuple[int, int, int]]) -> bool:
    return any(first > 0 for _, first, _ in spans)


def attend(
    query: Tensor,
    rows: Tensor,
    batch: PackedBatch,
    cache: Tensor | None,
    weight: Tensor,
    *,
    nope: int,
    value: int,
    scale: float,
    span: int = SPAN,
) -> Tensor:
    """Causal latent attention of a packed batch -> [N, heads, value] in the query's dtype.

    query: [N, heads, nope + rope]; rows: the new tokens' [N, latent + rope]; cache: [slots, capacity, latent + rope]
    that holds them already, or None where every sequence begins here; weight: [heads * (nope + value), latent].
    `weight` is read inside this call only.
    """
    heads, latent = query.shape[1], weight.shape[1]
    blocks = prefill_blocks(query.dtype)
    key = ("attention", blocks.rows, span)
    if key not in batch.plans:
        batch.plans[key] = plan(batch, blocks.rows, span)
    work: AttentionPlan = batch.plans[key]
    query = query.contiguous()
    out = query.new_empty(query.shape[0], heads, value)
    carried = _carry(out) if work.carries else (out, out, out)
    bounds = batch.bounds()
    for one in work.rounds:
        parts = [
            rows[bounds[b][0] + first : bounds[b][0] + end]
            if batch.starts[b] == 0
            else cache[batch.slots[b], first:end]
            for b, first, end in one.spans
        ]
        keys = parts[0] if len(parts) == 1 else _joined(parts, rows, one, bounds, batch)
        expanded = torch.nn.functional.linear(keys[:, :latent], weight)
        prefill(query, expanded, keys[:, latent:], out, carried, one.tiles, work.carries, nope, value, scale, blocks)
        del expanded  # before the next round's, so that there is one at a time
    if work.decodes is not None:
        alone = work.decodes.shape[0] == query.shape[0]  # every token decodes, in order
        some = query if alone else query.index_select(0, work.decodes)
        slots = work.decode_slots
        decoded = decode(
            some, cache, slots, work.contexts, work.longest, weight, nope=nope, value=value, scale=scale,
            pages=flash_mla.pages(batch.plans, slots, work.contexts, work.longest, some, cache, latent),
        )  # fmt: skip
        if alone:
            return decoded
        out.index_copy_(0, work.decodes, decoded)
    return out


def _carry(out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Running sums, maxima and weights of every query and head, fp32; the first round writes them."""
    total = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    return total, total.new_empty(out.shape[:2]), total.new_empty(out.shape[:2])


def _joined(parts: list[Tensor], rows: Tensor, one: Round, bounds: list, batch: PackedBatch) -> Tensor:
    """The spans' rows one behind the other, in place where they already lie so."""
    begins = [bounds[b][0] if batch.starts[b] == 0 and first == 0 else None for b, first, _ in one.spans]
    at = begins[0]
    for begin, part in zip(begins, parts):
        if begin is None or begin != at:
            return torch.cat(parts)
        at += len(part)
    return rows[begins[0] : at]


def prefill(
    query: Tensor,
    expanded: Tensor,
    shared: Tensor,
    out: Tensor,
    carried: tuple[Tensor, Tensor, Tensor],
    tiles: Tensor,
    carries: bool,
    nope: int,
    value: int,
    scale: float,
    blocks: Blocks,
) -> None:
    """One round of the prefill into `out` and `carried`.

    expanded: [R, heads * (nope + value)]; shared: [R, rope], rows at any distance; tiles: see `Round`.
    """
    heads, rope = query.shape[1], query.shape[2] - nope
    _prefill[(tiles.shape[0], heads)](
        query, expanded, shared, out, *carried, tiles,
        scale * LOG2_E, expanded.stride(0), shared.stride(0),
        HEADS=heads, NOPE=nope, ROPE=rope, VALUE=value,
        NOPE_BLOCK=block_width(nope), ROPE_BLOCK=block_width(rope), VALUE_BLOCK=block_width(value),
        QUERIES=blocks.rows, KEYS=blocks.keys, CARRIES=carries, PRECISION=precision(query.dtype),
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
