"""Routed experts of all tokens in grouped products that read the expert tables in place, packed or not.

Pairs (token, expert) are sorted by expert. A first product makes the hidden rows of a range of pairs, the activation
in its epilogue; a second one their outputs; then each token adds up its own, times their routing weights, in ascending
expert order. The range bounds the memory: hidden rows and outputs exist for one range at a time, and an expert's
weights are read once, twice where small tiles follow large ones, and again where a range's border cuts it.

[Note: the same bits] A pair's output is a function of its token and its expert: sums over columns go in steps of a
fixed order (`product.py`), and a token's sum over experts goes in ascending order through float32, wherever ranges are
cut. Nothing depends on where the tables lie, on time or on what ran before: tiles come from one table by shape, no
atomic operation adds anything. So a forward gives the same bits with DWDP on and off.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dwdp.kernels import select
from dwdp.kernels.activation import gated
from dwdp.kernels.formats import PACKED, Weights, in_halves, in_halves_row, rounded
from dwdp.kernels.lang import GLUON_MISSING, tl, triton
from dwdp.kernels.packed import TABLES, WORD, grouped_mxfp4_kernel, in_lanes
from dwdp.kernels.product import Tile, products
from dwdp.runtime.sm_reserve import reserved_sms

# Bytes that hidden rows, outputs and the reordered input of one call take together, beside its input and its result.
WORKSPACE_BYTES = 240 << 20
TOKENS_AT_ONCE = 16384  # their reordered input is 112 MiB at Kimi-K3's latent width
_RANGE_STEP = 128  # pairs: ranges begin at multiples of it
_SUM_COLUMNS = 1024

# [Note: tiles] By format, then by the largest average of pairs an expert: (pairs, tile of the first product, of the
# second). The first has two sets of rows, so twice `rows` sums. Registers: 8 warps hold 256 x 128 sums beside the
# decoded weights, 4 warps half of that; shared memory: `stages` steps of x (tokens x step x 2 bytes) and of weights.
# Few pairs make the product a stream of weights: narrow tiles, deep queues, several programs an SM. Many make it one
# of x through the L2 cache: as many rows as registers allow. The list is the outcome of `tests/gpu/check_moe.py`'s
# sweep where that has run; change it from there and nowhere else.
_PACKED_TILES = (
    (10, Tile(16, 128, 128, warps=4, stages=4, resident=2), Tile(16, 128, 128, warps=4, stages=5, resident=2)),
    (24, Tile(32, 128, 128, warps=4, stages=3, resident=2), Tile(32, 128, 128, warps=4, stages=4, resident=2)),
    (50, Tile(64, 128, 128, warps=8, stages=4), Tile(64, 256, 128, warps=8, stages=4)),
    (1 << 62, Tile(128, 128, 128, warps=8, stages=3), Tile(128, 256, 128, warps=8, stages=3)),
)
TILES: dict[str, tuple[tuple[int, Tile, Tile], ...]] = {
    "mxfp4": _PACKED_TILES,
    "nvfp4": _PACKED_TILES,
    "fp8": (
        (24, Tile(32, 64, 128, warps=4, stages=3, resident=2), Tile(32, 128, 128, warps=4, stages=3, resident=2)),
        (50, Tile(64, 128, 64, warps=8, stages=4), Tile(64, 256, 64, warps=8, stages=4)),
        (1 << 62, Tile(128, 128, 64, warps=8, stages=4), Tile(128, 256, 64, warps=8, stages=4)),
    ),
    "plain": (
        (24, Tile(32, 64, 64, warps=4, stages=4, resident=2), Tile(32, 128, 64, warps=4, stages=4, resident=2)),
        (50, Tile(64, 128, 64, warps=8, stages=4), Tile(64, 256, 64, warps=8, stages=4)),
        (1 << 62, Tile(128, 128, 64, warps=8, stages=4), Tile(128, 256, 64, warps=8, stages=4)),
    ),
}
# Of the kernel for Hopper in `packed.py`, whose second product has twice `rows`; a step is 128 columns. What is left of
# an expert's pairs behind its large tiles goes to small ones: a tile's rest is computed in vain.
_LANES_16 = Tile(16, 128, 128, warps=8, stages=4, resident=2)
_LANES_32 = Tile(32, 128, 128, warps=8, stages=4, resident=2)
_LANES_64 = Tile(64, 128, 128, warps=8, stages=3, resident=2)
LANE_TILES: tuple[tuple[int, Tile, Tile], ...] = (
    (12, _LANES_16, _LANES_16),
    (24, _LANES_32, _LANES_32),
    (50, _LANES_64, _LANES_64),
    (1 << 62, *2 * (Tile(128, 128, 128, warps=8, stages=3, rest=_LANES_32),)),
)


@dataclass(frozen=True)
class Experts:
    """Some experts of a layer: w13 [rows, 2 * inter, width], w2 [rows, width, inter]; row 0 is expert `first` of
    `total`. beta, linear_beta: of the activation, as `activation.gated` has them."""

    w13: Weights
    w2: Weights
    first: int
    total: int
    beta: float
    linear_beta: float

    @property
    def count(self) -> int:
        return self.w13.values.shape[0]


@triton.jit(do_not_specialize_on_alignment=TABLES)
def grouped_kernel(
    x, tokens, out, tile_expert, tile_ends, starts, ends, w, s, f,
    N, K, num_experts, range_start, x_stride, w_stride, scale_rows, scale_stride,
    FORMAT: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr, HOST: tl.constexpr, HALVES: tl.constexpr,
    BETA: tl.constexpr, LINEAR_BETA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One product of a range of sorted pairs, by programs that stay and go through the tiles.

    GATED: x is [tokens, K], a pair's row is tokens[pair], the weights have 2N rows and out [pairs of the range, N] gets
    the activation of both halves, its columns in halves with HALVES. Otherwise x is [pairs of the range, K], the
    weights have N rows and out is their product.
    starts, ends: of each expert's pairs that these tiles take [num_experts]; tile_ends: tiles of experts before each
    [num_experts + 1]; tile_expert: the expert of each tile. Rows of weights lie w_stride apart (a number of its own:
    half of K is not known to be a multiple of 16, and loads would be half as wide). Scales lie scale_stride apart for a
    row (fp8: for 128 rows) and scale_rows rows for an expert.
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    total = tl.load(tile_ends + num_experts) * tiles_n
    for number in range(tl.program_id(0), total, tl.num_programs(0)):
        # An expert's tiles are neighbours, those over the same weights closest: they run at once and share them.
        expert = tl.load(tile_expert + number // tiles_n)
        before = tl.load(tile_ends + expert)
        height = tl.load(tile_ends + expert + 1) - before
        inside = number - before * tiles_n
        start = tl.load(starts + expert)
        end = tl.load(ends + expert)
        pair = start + (inside % height) * BLOCK_M + tl.arange(0, BLOCK_M)
        position = (inside // height) * BLOCK_N + tl.arange(0, BLOCK_N)
        real = pair < end
        safe = tl.where(real, pair, start)
        if GATED:
            x_rows = x + tl.load(tokens + safe).to(tl.int64) * x_stride
        else:
            x_rows = x + (safe - range_start).to(tl.int64) * x_stride
        row = tl.minimum(position, N - 1)
        if HALVES:
            row = in_halves_row(row)
        expert = expert.to(tl.int64)
        if GATED:
            weight_rows = 2 * N
        else:
            weight_rows = N
        w_a = w + expert * weight_rows * w_stride + row.to(tl.int64) * w_stride
        w_b = w_a + N.to(tl.int64) * w_stride
        f_a = 1.0
        f_b = 1.0
        if FORMAT == "plain":
            s_a = w_a
            s_b = w_b
        elif FORMAT == "fp8":
            s_a = s + expert * scale_rows * scale_stride + (row // 128) * scale_stride
            s_b = s + expert * scale_rows * scale_stride + ((row + N) // 128) * scale_stride
        else:
            s_a = s + expert * scale_rows * scale_stride + row.to(tl.int64) * scale_stride
            s_b = s_a + N.to(tl.int64) * scale_stride
        if FORMAT == "nvfp4":
            if GATED:
                f_a = tl.load(f + 2 * expert)
                f_b = tl.load(f + 2 * expert + 1)
            else:
                f_a = tl.load(f + expert)
        tile, other = products(
            x_rows, w_a, w_b, s_a, s_b, f_a, f_b, K, FORMAT, GATED, EVEN, HOST, BLOCK_M, BLOCK_N, BLOCK_K
        )  # fmt: skip
        if GATED:
            tile = gated(tile, other, BETA, LINEAR_BETA)
        target = out + (pair - range_start).to(tl.int64)[:, None] * N + position[None, :]
        tl.store(target, tl.trans(rounded(tile, HOST)), mask=real[:, None] & (position < N)[None, :])


@triton.jit(do_not_specialize_on_alignment=["borders"])
def sum_kernel(
    out, places, weights, borders, total, width, num_experts, range_start,
    FIRST: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """total [tokens, width] += the outputs of each token's pairs in the range, times their weights, in order.

    places: where each token's pairs lie in the sorted order, ascending [tokens, TOP_K]. FIRST: total is not read.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    start = tl.load(borders)
    end = tl.load(borders + num_experts)
    some = FIRST
    for j in tl.static_range(TOP_K):
        one_place = tl.load(places + token * TOP_K + j)
        some |= (one_place >= start) & (one_place < end)
    if some:
        if FIRST:
            value = tl.zeros((BLOCK,), dtype=tl.float32)
        else:
            value = tl.load(total + token * width + column, mask=inside, other=0.0)
        for j in tl.static_range(TOP_K):
            place = tl.load(places + token * TOP_K + j) + tl.zeros((BLOCK,), dtype=tl.int32)
            here = (place >= start) & (place < end)
            row = out + (place - range_start).to(tl.int64) * width
            one = tl.load(row + column, mask=inside & here, other=0.0).to(tl.float32)
            value = tl.where(here, value + one * tl.load(weights + token * TOP_K + j), value)
        tl.store(total + token * width + column, value, mask=inside)


def routed(
    x: Tensor, ids: Tensor, weights: Tensor, experts: Experts, *, tiles: tuple[Tile, Tile] | None = None
) -> Tensor:
    """x: bf16 [tokens, width]; ids, weights: [tokens, k], ids ascending a token -> float32 [tokens, width], the
    weighted sum over those of a token's experts that are here. tiles: other than the table's, for a sweep."""
    total = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    for start in range(0, x.shape[0], TOKENS_AT_ONCE):
        part = slice(start, start + TOKENS_AT_ONCE)
        _add(total[part], x[part], ids[part], weights[part], experts, tiles)
    return total


def _add(total: Tensor, x: Tensor, ids: Tensor, weights: Tensor, experts: Experts, tiles: tuple[Tile, Tile] | None):
    tokens, top_k = ids.shape
    pairs, inter = tokens * top_k, experts.w2.columns
    lanes = lanes_on(experts.w13.format, x.device)
    if lanes:
        x = in_lanes(x)
    elif experts.w13.format in PACKED:
        x = in_halves(x)
    elif x.stride(1) != 1 or x.stride(0) % 8:
        x = x.contiguous()
    # int32 keys sort in half the time; a stable sort keeps a token's experts and an expert's tokens ascending
    keys, order = ids.flatten().to(torch.int32).sort(stable=True)
    token_of = (order // top_k).to(torch.int32)
    places = torch.empty_like(token_of)
    places[order] = torch.arange(pairs, dtype=torch.int32, device=x.device)
    numbers = torch.arange(experts.first, experts.first + experts.count + 1, dtype=torch.int32, device=x.device)
    borders = torch.searchsorted(keys, numbers).to(torch.int32)
    first, second = tiles or tiles_of(experts, pairs, x.device)
    weights = weights.to(torch.float32).contiguous()
    size = range_pairs(pairs, tokens, experts)
    hidden = torch.empty((min(size, pairs), inter), dtype=x.dtype, device=x.device)
    out = torch.empty((min(size, pairs), x.shape[1]), dtype=x.dtype, device=x.device)
    edges = torch.arange(0, pairs, size, dtype=torch.int32, device=x.device)[:, None]
    cuts = torch.minimum(borders.clamp(min=edges), edges + size)  # of every range [ranges, experts + 1]
    works = {tile: _works(cuts, size, tile) for tile in {first, second}}
    for number, start in enumerate(range(0, pairs, size)):
        _product(x, token_of, hidden, experts.w13, works[first], number, start, experts, lanes)
        _product(hidden, None, out, experts.w2, works[second], number, start, experts, lanes)
        grid = (tokens, triton.cdiv(x.shape[1], _SUM_COLUMNS))
        sum_kernel[grid](
            out, places, weights, cuts[number], total, x.shape[1], experts.count, start,
            FIRST=number == 0, TOP_K=top_k, BLOCK=_SUM_COLUMNS, num_warps=4,
        )  # fmt: skip


@dataclass(frozen=True)
class Work:
    """Tiles of one kind for every range: see `grouped_kernel`; most: tiles that there can be in a range."""

    tile: Tile
    starts: Tensor
    ends: Tensor
    tile_ends: Tensor
    tile_expert: Tensor
    most: int


def _works(cuts: Tensor, size: int, tile: Tile) -> list[Work]:
    """The tiles of one product; cuts: where experts begin in each range [ranges, experts + 1]. Nothing waits for the
    GPU: how many tiles there are is known there alone, so that tables are as long as there can be."""
    starts, ends = cuts[:, :-1], cuts[:, 1:]
    counts, experts = ends - starts, cuts.shape[1] - 1
    if tile.rest is None:
        heights = (counts + (tile.tokens - 1)) // tile.tokens
        return [_work(tile, starts, ends, heights, size // tile.tokens + min(experts, size))]
    # Up to two of the small tiles take what is left behind the large ones.
    rest, most_left = tile.rest, 2 * tile.rest.tokens
    heights = ((counts + (tile.tokens - 1 - most_left)) // tile.tokens).clamp(min=0)
    middles = torch.minimum(starts + heights * tile.tokens, ends)
    small = (ends - middles + (rest.tokens - 1)) // rest.tokens
    return [
        _work(tile, starts, middles, heights, size // min(tile.tokens, most_left + 1)),
        _work(rest, middles, ends, small, min(2 * experts, size)),
    ]


def _work(tile: Tile, starts: Tensor, ends: Tensor, heights: Tensor, most: int) -> Work:
    ranges, experts = starts.shape
    tile_ends = torch.zeros((ranges, experts + 1), dtype=torch.int32, device=starts.device)
    torch.cumsum(heights, 1, dtype=torch.int32, out=tile_ends[:, 1:])
    most = max(most, 1)
    numbers = torch.arange(most, dtype=torch.int32, device=starts.device).expand(ranges, most)
    found = torch.searchsorted(tile_ends[:, 1:].contiguous(), numbers.contiguous(), right=True, out_int32=True)
    return Work(tile, starts.contiguous(), ends.contiguous(), tile_ends, found, most)


def _product(
    x: Tensor, token_of: Tensor | None, out: Tensor, weights: Weights, works: list[Work], number: int, start: int,
    experts: Experts, lanes: bool,
) -> None:  # fmt: skip
    """One of the two products of the pairs [start ..) of a range; the first when token_of is given."""
    gated_product = token_of is not None
    rows, words = out.shape[1], weights.words
    for work in works:
        tile = work.tile
        tables = (work.tile_expert[number], work.tile_ends[number], work.starts[number], work.ends[number])
        tile_rows = 2 * tile.rows if lanes and not gated_product else tile.rows
        grid = (min(work.most * triton.cdiv(rows, tile_rows), programs(x.device, tile)),)
        if lanes:
            grouped_mxfp4_kernel[grid](
                x, token_of, out, *tables, weights.values, words.view(torch.uint8),
                rows, weights.columns, experts.count, start, x.stride(0), weights.values.shape[2], words.shape[2] * 4,
                GATED=gated_product, LANES=gated_product, BETA=experts.beta, LINEAR_BETA=experts.linear_beta,
                TOKENS=tile.tokens, ROWS=tile.rows, STAGES=tile.stages, WORD=WORD,
                num_warps=tile.warps, maxnreg=registers(tile),
            )  # fmt: skip
            continue
        grouped_kernel[grid](
            x, token_of, out, *tables, weights.values, words, weights.factors,
            rows, weights.columns, experts.count, start, x.stride(0), weights.values.shape[2],
            0 if words is None else words.shape[1], 0 if words is None else words.shape[2],
            FORMAT=weights.format, GATED=gated_product, EVEN=weights.columns % tile.step == 0, HOST=not x.is_cuda,
            HALVES=gated_product and experts.w2.format in PACKED,
            BETA=experts.beta, LINEAR_BETA=experts.linear_beta,
            BLOCK_M=tile.tokens, BLOCK_N=tile.rows, BLOCK_K=tile.step,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip


def registers(tile: Tile) -> int:
    """Most registers of a thread with which an SM holds as many programs as the tile says."""
    return min(255, 65536 // (32 * tile.warps * tile.resident) // 8 * 8)


def programs(device: torch.device, tile: Tile) -> int:
    """How many programs of a tile a device runs at once, the SMs of [Note: the reserve] left out."""
    if device.type != "cuda":
        return 2
    return max(1, torch.cuda.get_device_properties(device).multi_processor_count - reserved_sms()) * tile.resident


def lanes_on(format: str, device: torch.device | str) -> bool:
    """Whether the kernel of `packed.py` computes: MXFP4 on Hopper, where this Triton's Gluon is one that it knows."""
    return format == "mxfp4" and GLUON_MISSING is None and select.hopper(torch.device(device))


def tile_table(format: str, device: torch.device | str) -> tuple[tuple[int, Tile, Tile], ...]:
    """See [Note: tiles]."""
    return LANE_TILES if lanes_on(format, device) else TILES[format]


def tiles_of(experts: Experts, pairs: int, device: torch.device) -> tuple[Tile, Tile]:
    """By how many pairs an expert of the layer gets on average, wherever experts lie."""
    table = tile_table(experts.w13.format, device)
    return next((first, second) for most, first, second in table if pairs <= most * experts.total)


def range_pairs(pairs: int, tokens: int, experts: Experts) -> int:
    """Pairs in a range: as many as the workspace holds hidden rows and outputs of, in ranges of equal size."""
    width, inter = experts.w13.columns, experts.w2.columns
    taken = tokens * width * 2 if experts.w13.format in PACKED else 0
    most = max(_RANGE_STEP, (WORKSPACE_BYTES - taken) // (2 * (width + inter)))
    count = -(-pairs // most)
    return -(-pairs // count // _RANGE_STEP) * _RANGE_STEP
