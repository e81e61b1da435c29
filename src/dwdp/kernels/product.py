"""Products x @ w^T over weights of any format, a tile at a time; and the FP8 projection and the router's
scores made of them.

A tile is computed transposed, [weights' rows, tokens]: the decoded weights are then the operand that Hopper's tensor
cores take from registers, and never go through shared memory. Sums are float32, in steps of BLOCK_K columns in
ascending order: an element has the same value in whichever tile it lies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dwdp.kernels.formats import Weights, fp8_tile, multiplied, packed_tiles, rounded
from dwdp.kernels.lang import tl, triton


@dataclass(frozen=True)
class Tile:
    """tokens, rows: of a tile (rows of the weights; of each half where there are two). step: columns a step.
    stages: steps that are under way at once. resident: programs that one SM holds. rest: the tile of what is left of an
    expert's pairs, up to twice its tokens, where not this one."""

    tokens: int
    rows: int
    step: int
    warps: int
    stages: int
    resident: int = 1
    rest: Tile | None = None


# Of one matrix, by the largest number of tokens: (tokens, tile). See [Note: tiles].
LINEAR_TILES: tuple[tuple[int, Tile], ...] = (
    (16, Tile(16, 64, 128, warps=4, stages=5)),
    (64, Tile(64, 64, 128, warps=4, stages=4)),
    (512, Tile(128, 128, 64, warps=8, stages=4)),
    (1 << 62, Tile(128, 256, 64, warps=8, stages=4)),
)


def tile_for(tiles: tuple[tuple[int, Tile], ...], size: int) -> Tile:
    """The first tile of a table whose largest size is not below `size`."""
    return next(tile for largest, tile in tiles if size <= largest)


@triton.jit
def products(
    x_rows, w_a, w_b, s_a, s_b, f_a, f_b, K,
    FORMAT: tl.constexpr, BOTH: tl.constexpr, EVEN: tl.constexpr, HOST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The float32 tiles [BLOCK_N, BLOCK_M] of one or (BOTH) two sets of rows of the weights.

    x_rows: pointers [BLOCK_M] to rows of x, in halves for packed formats; w_a, w_b: pointers [BLOCK_N] to rows of the
    weights, s_a, s_b: to their scales; f_a, f_b: the matrix's factors. EVEN: K is a multiple of BLOCK_K.
    HOST: [Note: HOST].
    """
    acc_a = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    acc_b = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    if FORMAT == "mxfp4" or FORMAT == "nvfp4":
        half = tl.arange(0, BLOCK_K // 2)
        x_at = x_rows[:, None] + half[None, :]
        a_at = w_a[:, None] + half[None, :]
        b_at = w_b[:, None] + half[None, :]
        for step in range(0, K // BLOCK_K):
            x_even = tl.load(x_at + step * BLOCK_K)
            x_odd = tl.load(x_at + step * BLOCK_K + BLOCK_K // 2)
            even, odd = packed_tiles(
                tl.load(a_at + step * (BLOCK_K // 2)), tl.load(s_a + step), f_a, FORMAT, BLOCK_K // 2, HOST
            )
            acc_a = multiplied(even, tl.trans(x_even), acc_a, HOST)
            acc_a = multiplied(odd, tl.trans(x_odd), acc_a, HOST)
            if BOTH:
                even, odd = packed_tiles(
                    tl.load(b_at + step * (BLOCK_K // 2)), tl.load(s_b + step), f_b, FORMAT, BLOCK_K // 2, HOST
                )
                acc_b = multiplied(even, tl.trans(x_even), acc_b, HOST)
                acc_b = multiplied(odd, tl.trans(x_odd), acc_b, HOST)
    else:
        column = tl.arange(0, BLOCK_K)
        x_at = x_rows[:, None] + column[None, :]
        a_at = w_a[:, None] + column[None, :]
        b_at = w_b[:, None] + column[None, :]
        for step in range(0, tl.cdiv(K, BLOCK_K)):
            at = step * BLOCK_K
            if EVEN:
                x_tile = tl.load(x_at + at)
                a_tile = tl.load(a_at + at)
            else:
                inside = (column[None, :] + at) < K
                x_tile = tl.load(x_at + at, mask=inside, other=0.0)
                a_tile = tl.load(a_at + at, mask=inside, other=0.0)
            if FORMAT == "fp8":
                a_tile = fp8_tile(a_tile, tl.load(s_a + at // 128), HOST)
            acc_a = multiplied(a_tile, tl.trans(x_tile), acc_a, HOST)
            if BOTH:
                if EVEN:
                    b_tile = tl.load(b_at + at)
                else:
                    b_tile = tl.load(b_at + at, mask=inside, other=0.0)
                if FORMAT == "fp8":
                    b_tile = fp8_tile(b_tile, tl.load(s_b + at // 128), HOST)
                acc_b = multiplied(b_tile, tl.trans(x_tile), acc_b, HOST)
    return acc_a, acc_b


@triton.jit
def linear_kernel(
    x, w, s, out, M, N, K, x_stride, scale_stride,
    FORMAT: tl.constexpr, SIGMOID: tl.constexpr, EVEN: tl.constexpr, HOST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out [M, N] = x [M, K] @ w [N, K]^T, bf16, or its sigmoid in float32. Programs go through GROUP tiles of tokens
    before the next rows of w, so that those that run at once share what the L2 cache holds."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    number = tl.program_id(0)
    band = number // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - band * GROUP, GROUP)
    within = number % (GROUP * tiles_n)
    token = (band * GROUP + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = (within // height) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_rows = x + tl.minimum(token, M - 1).to(tl.int64) * x_stride
    safe = tl.minimum(row, N - 1)
    w_rows = w + safe.to(tl.int64) * K
    if FORMAT == "fp8":
        s_rows = s + (safe // 128) * scale_stride
    else:
        s_rows = w_rows
    tile, _ = products(
        x_rows, w_rows, w_rows, s_rows, s_rows, 1.0, 1.0, K, FORMAT, False, EVEN, HOST, BLOCK_M, BLOCK_N, BLOCK_K
    )  # fmt: skip
    target = out + token.to(tl.int64)[:, None] * N + row[None, :]
    inside = (token < M)[:, None] & (row < N)[None, :]
    if SIGMOID:
        tl.store(target, tl.trans(1.0 / (1.0 + tl.exp(-tile))), mask=inside)
    else:
        tl.store(target, tl.trans(rounded(tile, HOST)), mask=inside)


def linear(x: Tensor, weights: Weights, *, sigmoid: bool = False, tile: Tile | None = None) -> Tensor:
    """x: bf16 [tokens, K], weights: one plain or fp8 matrix [1, N, K] -> bf16 [tokens, N], or with `sigmoid` the
    float32 sigmoid of the float32 sums. tile: other than the table's, for a sweep."""
    tokens, columns = x.shape
    rows, scales = weights.rows, weights.words
    out = torch.empty((tokens, rows), dtype=torch.float32 if sigmoid else x.dtype, device=x.device)
    if tokens == 0:
        return out
    x = x if x.stride(1) == 1 and x.stride(0) % 8 == 0 else x.contiguous()
    tile = tile or tile_for(LINEAR_TILES, tokens)
    grid = (triton.cdiv(tokens, tile.tokens) * triton.cdiv(rows, tile.rows),)
    linear_kernel[grid](
        x, weights.values, scales, out, tokens, rows, columns, x.stride(0), 0 if scales is None else scales.shape[-1],
        FORMAT=weights.format, SIGMOID=sigmoid, EVEN=columns % tile.step == 0, HOST=not x.is_cuda,
        BLOCK_M=tile.tokens, BLOCK_N=tile.rows, BLOCK_K=tile.step, GROUP=8,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out
