"""The grouped product over MXFP4 experts for Hopper, in Gluon: what `moe.grouped_kernel` computes, with layouts said.

A warp group multiplies [64 rows of the weights, tokens] tiles whose decoded weights are the operand in registers. Two
sets of rows take turns: while the tensor cores work on one, the other is decoded.

[Note: lanes] The order of the columns within a step is free as long as x has the same. A thread takes 16 packed bytes
of a row, 32 columns below one scale, in one load, and decodes a word of four bytes to the two halves of four registers
where its nibbles lie: half 0 gets bytes 0 and 1, half 1 bytes 2 and 3. One multiplication puts a nibble's sign to the
end of a half and its other bits to where a bf16's exponent ends. `in_lanes` puts x in the order that
results: of each block of 128 columns the 64 even ones first, and in each half position (j3 j2 j1 t1 t0 j0), in bits,
holds byte (t1 t0 j3 j2 j0 j1).

[Note: two products] e2m1's bits, moved to the end of a bf16's exponent, are its value times 2^-126. Times 2^126, then
times the scale: each is exact or rounds once, as `model/quant.py` does.
"""

from __future__ import annotations

from torch import Tensor

from dwdp.kernels.lang import barrier, copy_async, gl, gluon, hopper, warpgroup_mma_init

STEP = 128  # columns

# $0, $1: even columns of a word of bytes, $2, $3: odd ones; $4: the word, $5 to $8: four times its scale.
WORD = """{
.reg .b32 n, upper;
shr.u32 upper, $4, 8;
and.b32 n, $4, 0x000F000F; mul.lo.u32 n, n, 4160; and.b32 $0, n, 0x81C081C0;
and.b32 n, upper, 0x000F000F; mul.lo.u32 n, n, 4160; and.b32 $1, n, 0x81C081C0;
and.b32 n, $4, 0x00F000F0; mul.lo.u32 n, n, 260; and.b32 $2, n, 0x81C081C0;
and.b32 n, upper, 0x00F000F0; mul.lo.u32 n, n, 260; and.b32 $3, n, 0x81C081C0;
mov.b32 n, 0x7E807E80;
mul.rn.bf16x2 $0, $0, n; mul.rn.bf16x2 $1, $1, n; mul.rn.bf16x2 $2, $2, n; mul.rn.bf16x2 $3, $3, n;
mul.rn.bf16x2 $0, $0, $5; mul.rn.bf16x2 $1, $1, $5; mul.rn.bf16x2 $2, $2, $5; mul.rn.bf16x2 $3, $3, $5;
}"""


def in_lanes(x: Tensor) -> Tensor:
    """x: [tokens, columns] -> a copy in the order of [Note: lanes]."""
    tokens, columns = x.shape
    bits = x.reshape(tokens, columns // STEP, 4, 2, 2, 2, 2, 2)  # t, j3, j2, j0, j1, odd
    return bits.permute(0, 1, 7, 3, 4, 6, 2, 5).reshape(tokens, columns)


@gluon.constexpr_function
def _packed_layout(rows, warps):
    """Of the packed bytes of a step: 16 neighbours a thread, 4 threads a row, rows as a product's operand has them."""
    more = [[16 * warps << i, 0] for i in range((rows // (16 * warps)).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [8, 0], *more],
        lane_bases=[[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16 << i, 0] for i in range(warps.bit_length() - 1)], block_bases=[], shape=[rows, 64],
    )  # fmt: skip


@gluon.constexpr_function
def _scale_layout(rows, warps):
    """Of the scales of a step [rows, 4], each where its columns are."""
    more = [[16 * warps << i, 0] for i in range((rows // (16 * warps)).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[8, 0], *more], lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16 << i, 0] for i in range(warps.bit_length() - 1)], block_bases=[], shape=[rows, 4],
    )  # fmt: skip


@gluon.jit
def _in_lanes_row(position):
    """Which column stands at a position of `in_lanes`."""
    odd = (position >> 6) & 1
    byte = ((position >> 1) & 3) * 16 + ((position >> 4) & 3) * 4 + (position & 1) * 2 + ((position >> 3) & 1)
    return position - position % 128 + 2 * byte + odd


@gluon.jit
def _scale(bytes_):
    """uint8 -> int32, the bf16 2^(byte - 127) in both halves; 255 is NaN."""
    wide = bytes_.to(gl.int32)
    bits = gl.where(wide == 255, 0x7FC0, gl.maximum(wide << 7, 0x40))
    return bits | (bits << 16)


@gluon.jit
def _parts(packed, scale, ROWS: gl.constexpr):
    """packed: uint8 [ROWS, 64]; scale: int32 [ROWS, 4] -> both halves of each thread's bytes, and their scales."""
    first, second = packed.reshape([ROWS, 4, 2, 8]).permute((0, 1, 3, 2)).split()
    scale = gl.convert_layout(scale, gl.SliceLayout(2, first.type.layout), assert_trivial=True).expand_dims(2)
    return first, second, scale


@gluon.jit
def _decoded(packed, scale, WORD: gl.constexpr, ROWS: gl.constexpr, OPERAND: gl.constexpr):
    """packed: uint8 [ROWS, 4, 8]; scale: int32 [ROWS, 4, 1] -> even and odd columns, bf16 [ROWS, 32] as an operand."""
    even, odd = gl.inline_asm_elementwise(
        WORD, "=&r,=&r,=&r,=&r,r,r,r,r,r", [packed, scale], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=4
    )  # fmt: skip
    even = even.reshape([ROWS, 4, 4, 2]).permute((0, 2, 1, 3)).reshape([ROWS, 32])
    odd = odd.reshape([ROWS, 4, 4, 2]).permute((0, 2, 1, 3)).reshape([ROWS, 32])
    return gl.convert_layout(even, OPERAND, assert_trivial=True), gl.convert_layout(odd, OPERAND, assert_trivial=True)


@gluon.jit
def _multiplied(
    packed, scales, next_scales_at, even_x, odd_x, acc, other,
    PACKED: gl.constexpr, OPERAND: gl.constexpr, WORD: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """One step of one set of rows onto `acc`, in two parts: one is multiplied while the next is decoded, so that there
    are never more operands in registers. The last part is under way when this returns, as that of `other` is before.
    -> acc, other, the next step's scales."""
    first, second, scale = _parts(packed.load(PACKED), _scale(scales), ROWS)
    next_scales = gl.load(next_scales_at)
    even, odd = _decoded(first, scale, WORD, ROWS, OPERAND)
    acc = hopper.warpgroup_mma(even, even_x.slice(0, 32, 1).permute((1, 0)), acc, is_async=True)
    acc = hopper.warpgroup_mma(odd, odd_x.slice(0, 32, 1).permute((1, 0)), acc, is_async=True)
    other = warpgroup_mma_init(hopper.warpgroup_mma_wait(2, deps=[other]))
    even, odd = _decoded(second, scale, WORD, ROWS, OPERAND)
    acc = hopper.warpgroup_mma(even, even_x.slice(32, 32, 1).permute((1, 0)), acc, is_async=True)
    acc = hopper.warpgroup_mma(odd, odd_x.slice(32, 32, 1).permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_init(hopper.warpgroup_mma_wait(2, deps=[acc]))
    return acc, other, next_scales


@gluon.jit
def _loads(x_even, x_odd, w_a, w_b, x, x_at, w_at, a_at, b_at, step, stage, inside):
    """The copies of one step into a stage, one group."""
    copy_async(x_even.index(stage), x + (x_at + step * 128), mask=inside)
    copy_async(x_odd.index(stage), x + (x_at + (step * 128 + 64)), mask=inside)
    copy_async(w_a.index(stage), w_at + (a_at + step * 64), mask=inside)
    copy_async(w_b.index(stage), w_at + (b_at + step * 64), mask=inside)
    hopper.async_copy.commit_group()


# Rows of tables of all ranges, which lie at any address: a kernel compiled for one would be so again for the next.
TABLES = ("tile_expert", "tile_ends", "starts", "ends")


@gluon.jit(do_not_specialize_on_alignment=TABLES)
def grouped_mxfp4_kernel(
    x, tokens, out, tile_expert, tile_ends, starts, ends, w, s,
    N, K, num_experts, range_start, x_stride, w_stride, scale_stride,
    GATED: gl.constexpr, LANES: gl.constexpr, BETA: gl.constexpr, LINEAR_BETA: gl.constexpr,
    TOKENS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, WORD: gl.constexpr,
):  # fmt: skip
    """As `moe.grouped_kernel`, whose arguments these are, but for `s`, uint8 scales, whose rows lie scale_stride bytes
    apart. A tile is TOKENS pairs and ROWS rows of each half (GATED), or 2 * ROWS rows. LANES: out's columns are in the
    order of [Note: lanes]. K is a multiple of 128, with LANES N too. ROWS need not divide N.
    """
    WARPS: gl.constexpr = gl.num_warps()
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TOKENS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    PACKED: gl.constexpr = _packed_layout(ROWS, WARPS)
    SCALES: gl.constexpr = _scale_layout(ROWS, WARPS)
    BYTES: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [WARPS, 1], [1, 0])
    HALVES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    X_SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    W_SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    x_even = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, 64], X_SHARED)
    x_odd = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, 64], X_SHARED)
    w_a = gl.allocate_shared_memory(gl.uint8, [STAGES, ROWS, 64], W_SHARED)
    w_b = gl.allocate_shared_memory(gl.uint8, [STAGES, ROWS, 64], W_SHARED)

    steps = K // 128
    if GATED:
        TILE_ROWS: gl.constexpr = ROWS
        expert_rows = 2 * N
    else:
        TILE_ROWS: gl.constexpr = 2 * ROWS
        expert_rows = N
    tiles_n = (N + TILE_ROWS - 1) // TILE_ROWS
    total = gl.load(tile_ends + num_experts) * tiles_n
    for number in range(gl.program_id(0), total, gl.num_programs(0)):
        # An expert's tiles are neighbours, those over the same weights closest: they run at once and share them.
        expert = gl.load(tile_expert + number // tiles_n)
        before = gl.load(tile_ends + expert)
        height = gl.load(tile_ends + expert + 1) - before
        inside = number - before * tiles_n
        start = gl.load(starts + expert)
        end = gl.load(ends + expert)
        first_pair = start + (inside % height) * TOKENS
        first_row = (inside // height) * TILE_ROWS

        pair = first_pair + gl.arange(0, TOKENS, gl.SliceLayout(1, HALVES))
        safe = gl.where(pair < end, pair, start)
        if GATED:
            x_row = gl.load(tokens + safe)
        else:
            x_row = safe - range_start
        x_at = (x_row * x_stride)[:, None] + gl.arange(0, 64, gl.SliceLayout(0, HALVES))[None, :]
        w_at = w + expert.to(gl.int64) * expert_rows * w_stride
        a_row, b_row = _rows(first_row, gl.arange(0, ROWS, gl.SliceLayout(1, BYTES)), N, ROWS, GATED, LANES)
        byte = gl.arange(0, 64, gl.SliceLayout(0, BYTES))
        a_at = (a_row * w_stride)[:, None] + byte[None, :]
        b_at = (b_row * w_stride)[:, None] + byte[None, :]
        s_at = s + expert.to(gl.int64) * expert_rows * scale_stride
        a_row, b_row = _rows(first_row, gl.arange(0, ROWS, gl.SliceLayout(1, SCALES)), N, ROWS, GATED, LANES)
        group = gl.arange(0, 4, gl.SliceLayout(0, SCALES))
        s_a_at = (a_row * scale_stride)[:, None] + group[None, :]
        s_b_at = (b_row * scale_stride)[:, None] + group[None, :]

        for step in gl.static_range(STAGES - 2):
            _loads(x_even, x_odd, w_a, w_b, x, x_at, w_at, a_at, b_at, step, step, step < steps)
        s_a = gl.load(s_at + s_a_at)
        s_b = gl.load(s_at + s_b_at)
        zeros = gl.zeros([ROWS, TOKENS], gl.float32, MMA)
        acc_a = warpgroup_mma_init(zeros)
        acc_b = warpgroup_mma_init(zeros)
        for step in range(steps):
            stage = step % STAGES
            hopper.async_copy.wait_group(STAGES - 3)
            barrier()  # every warp is done with the step before the last, whose place the next copies take
            hopper.fence_async_shared()
            later = step + STAGES - 2
            _loads(x_even, x_odd, w_a, w_b, x, x_at, w_at, a_at, b_at, later, later % STAGES, later < steps)
            barrier()  # what every warp has copied is there
            even_x = x_even.index(stage)
            odd_x = x_odd.index(stage)
            ahead = gl.minimum(step + 1, steps - 1) * 4
            acc_a, acc_b, s_a = _multiplied(
                w_a.index(stage), s_a, s_at + (s_a_at + ahead), even_x, odd_x, acc_a, acc_b, PACKED, OPERAND, WORD, ROWS
            )  # fmt: skip
            acc_b, acc_a, s_b = _multiplied(
                w_b.index(stage), s_b, s_at + (s_b_at + ahead), even_x, odd_x, acc_b, acc_a, PACKED, OPERAND, WORD, ROWS
            )  # fmt: skip
        tile = hopper.warpgroup_mma_wait(0, deps=[acc_a])
        other = hopper.warpgroup_mma_wait(0, deps=[acc_b])
        barrier()  # the next tile's copies go where these products have read
        hopper.async_copy.wait_group(0)
        if GATED:
            tile = _activated(tile, other, BETA, LINEAR_BETA)
            _store(out, tile, first_pair, end, range_start, first_row, N, TOKENS, ROWS)
        else:
            _store(out, tile, first_pair, end, range_start, first_row, N, TOKENS, ROWS)
            _store(out, other, first_pair, end, range_start, first_row + ROWS, N, TOKENS, ROWS)


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _inverse(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _at_least_minus_29(x):
    """NaN stays NaN."""
    return gl.inline_asm_elementwise(
        "max.NaN.f32 $0, $1, 0fC1E80000;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _tanh_parts(x):
    """Numerator and denominator of tanh; within 2^-14 of it where 1 - exp cancels, which bf16 does not see."""
    turns = _at_least_minus_29(x * 2.8853900817779268)  # tanh(-10) is -1
    small = _exp2(-turns)
    close = gl.abs(turns) < 0.0113  # of x: 2^-8
    return gl.where(close, x, 1.0 - small), gl.where(close, 1.0, 1.0 + small)


@gluon.jit
def _activated(gate, up, BETA: gl.constexpr, LINEAR_BETA: gl.constexpr):
    """`activation.gated` with one division for all of its fractions."""
    below = 1.0 + _exp2(gate * -1.4426950408889634)
    if BETA == 0:
        value = gate * up
    else:
        above, part = _tanh_parts(gate * (1.0 / BETA))
        below *= part
        if LINEAR_BETA != 0:
            more, part = _tanh_parts(up * (1.0 / LINEAR_BETA))
            below *= part
            up = LINEAR_BETA * more
        value = BETA * above * up
    return value * _inverse(below)


@gluon.jit
def _rows(first, number, N, ROWS: gl.constexpr, GATED: gl.constexpr, LANES: gl.constexpr):
    """Rows of both sets; those behind the last are the last."""
    a = gl.minimum(first + number, N - 1)
    b = a + N
    if not GATED:
        b = gl.minimum(first + ROWS + number, N - 1)
    elif LANES:
        a = _in_lanes_row(a)
        b = a + N
    return a, b


@gluon.jit
def _store(out, tile, first_pair, end, range_start, first_row, N, TOKENS: gl.constexpr, ROWS: gl.constexpr):
    WARPS: gl.constexpr = gl.num_warps()
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    tile = gl.convert_layout(tile.to(gl.bfloat16).permute((1, 0)), OUT)
    pair = first_pair + gl.arange(0, TOKENS, gl.SliceLayout(1, OUT))
    position = first_row + gl.arange(0, ROWS, gl.SliceLayout(0, OUT))
    at = out + ((pair - range_start).to(gl.int64) * N)[:, None] + position[None, :]
    gl.store(at, tile, mask=(pair < end)[:, None] & (position < N)[None, :])
