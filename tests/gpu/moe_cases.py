"""What `check_moe` computes with: layers of random experts at Kimi-K3's widths; whether kernels are right on them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dwdp.kernels import activation, formats, moe, product, rows
from dwdp.kernels.packed import in_lanes
from dwdp.model import quant
from dwdp.model.norms import rms_normalise, situ, wide
from tests.kernels.packs import FORMATS, decoded, every_nibble, packed, picks, routed_in_fp32, same_bits

BETA, LINEAR_BETA = 4.0, 25.0


@dataclass(frozen=True)
class Shape:
    """Widths and counts of a run. experts: of a full layer; few: of the layer that values are checked on."""

    device: str
    hidden: int
    width: int
    inter: int
    experts: int
    top_k: int
    few: int
    few_tokens: int
    tokens: tuple[int, ...]
    projection: tuple[int, int]


K3 = Shape("cuda", 7168, 3584, 3072, 896, 16, 16, 700, (1, 64, 1024, 2048, 4096, 8192, 16384), (12288, 7168))
TINY = Shape("cpu", 128, 128, 128, 4, 2, 4, 5, (1, 3), (130, 128))


def act(gate: Tensor, up: Tensor) -> Tensor:
    return situ(gate, up, BETA, LINEAR_BETA)


def layer(format: str, shape: Shape) -> moe.Experts:
    """A full layer of random experts, filled in place a few at a time: nothing as large as a table beside it."""
    tables = []
    for out, columns, parts in ((2 * shape.inter, shape.width, 2), (shape.width, shape.inter, 1)):
        first, _, tensors = packed(format, 1, out, columns, parts=parts, device=shape.device)
        full = [torch.empty((shape.experts, *one.shape[1:]), dtype=one.dtype, device=shape.device) for one in tensors]
        for start in range(0, shape.experts, 8):
            count = min(8, shape.experts - start)
            _, _, some = packed(format, count, out, columns, parts=parts, seed=start, device=shape.device, decode=False)
            for table, piece in zip(full, some):
                table[start : start + count] = piece
        tables.append(formats.weights(format, *full))
    return moe.Experts(*tables, 0, shape.experts, BETA, LINEAR_BETA)


def nbytes(experts: moe.Experts) -> int:
    """Of all tables of a layer."""
    parts = [part for stack in (experts.w13, experts.w2) for part in (stack.values, stack.words, stack.factors)]
    return sum(part.nbytes for part in parts if part is not None)


def inputs(shape: Shape, tokens: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator(shape.device).manual_seed(tokens)
    x = torch.randn(tokens, shape.width, generator=draw, device=shape.device).bfloat16()
    return x, *picks(tokens, experts, shape.top_k, seed=tokens, device=shape.device)


def distance(got: Tensor, want: Tensor) -> tuple[float, float]:
    """The largest difference over the largest value, and the root of the mean squares of both."""
    error = (got.float() - want.float()).abs()
    return (error.max() / want.abs().max()).item(), (error.norm() / want.float().norm()).item()


Check = tuple[str, Callable[[], tuple[bool, str]]]


def checks(shape: Shape, formats: Sequence[str] = FORMATS) -> Iterator[Check]:
    """Name and check; a check gives whether it holds and the figures."""
    yield "decoding, every nibble and scale", lambda: decoding(shape)
    for format in formats:
        yield f"routed experts, {format}", lambda format=format: values(format, shape)
    yield "fp8 projection", lambda: projection(shape)
    yield "router scores", lambda: router(shape)
    yield "norm, residual mix, activation", lambda: small(shape)


def decoding(shape: Shape) -> tuple[bool, str]:
    nibbles = every_nibble(256).to(shape.device)
    first = torch.arange(256)[:, None]
    e8m0 = (first + torch.tensor([0, 85, 170, 255])).remainder(256).to(torch.uint8)[None].to(shape.device)
    e4m3 = (first + torch.arange(8) * 32).remainder(256).to(torch.uint8)[None].to(shape.device)
    e4m3 = e4m3.view(torch.float8_e4m3fn)
    factor = torch.tensor([2.9e-5], device=shape.device)
    mxfp4 = same_bits(
        decoded(formats.weights("mxfp4", nibbles, e8m0)), quant.dequantise_mxfp4(nibbles, e8m0, torch.bfloat16)[0]
    )
    nvfp4 = same_bits(
        decoded(formats.weights("nvfp4", nibbles, e4m3, factor)),
        quant.dequantise_nvfp4(nibbles, e4m3, factor, torch.bfloat16)[0],
    )
    stack, expanded, _ = packed("fp8", 1, 256, 128, device=shape.device)
    one = torch.eye(128, device=shape.device).bfloat16()  # its product is the matrix
    fp8 = torch.equal(product.linear(one, stack), expanded[0].T)  # a sum of -0 and 0 is 0
    found = {"mxfp4": mxfp4, "nvfp4": nvfp4, "fp8": fp8}
    if moe.lanes_on("mxfp4", shape.device):
        found["mxfp4 in lanes"] = all(lanes(shape, tile) for row in moe.LANE_TILES for tile in row[1:])
    return all(found.values()), "same bits: " + ", ".join(f"{name} {same}" for name, same in found.items())


def lanes(shape: Shape, tile: product.Tile) -> bool:
    """Whether products of one column each are that column, for every nibble and every scale that leaves it finite."""
    nibbles = every_nibble(256).to(shape.device)
    scale = (torch.arange(256)[:, None] + torch.tensor([0, 85, 170, 255])).remainder(252).to(torch.uint8)
    scale = scale[None].to(shape.device)
    stack = formats.weights("mxfp4", nibbles, scale)
    experts = moe.Experts(stack, stack, 0, 1, BETA, LINEAR_BETA)
    one = in_lanes(torch.eye(128, device=shape.device).bfloat16())
    out = torch.full((128, 256), float("nan"), device=shape.device).bfloat16()
    cuts = torch.tensor([[0, 128]], dtype=torch.int32, device=shape.device)
    moe._product(one, None, out, stack, moe._works(cuts, 128, tile), 0, 0, experts, lanes=True)
    return torch.equal(out, quant.dequantise_mxfp4(nibbles, scale, torch.bfloat16)[0].T)


def values(format: str, shape: Shape) -> tuple[bool, str]:
    """Bounds: 2^-6 of the largest value, and 2^-8 in the mean: hidden rows and outputs are rounded to bf16, 2^-9 each.
    And bits: again, from tables elsewhere, in several ranges, in another batch; with every tile is only reported."""
    count, two = shape.few, (2 * shape.inter, shape.width)
    w13, wide13, t13 = packed(format, count, *two, parts=2, device=shape.device)
    w2, wide2, t2 = packed(format, count, shape.width, shape.inter, seed=1, device=shape.device)
    experts = moe.Experts(w13, w2, 0, count, BETA, LINEAR_BETA)
    x, ids, weights = inputs(shape, shape.few_tokens, count)
    want = routed_in_fp32(x, ids, weights, wide13, wide2, act)
    table = moe.tile_table(format, shape.device)
    tiles = table[-1][1:]
    found, texts = True, []
    whole = moe.routed(x, ids, weights, experts, tiles=tiles)
    largest, mean = distance(whole, want)
    found &= largest <= 2**-6 and mean <= 2**-8 and bool(whole.isfinite().all())
    texts.append(f"max {largest:.1e} rms {mean:.1e}")
    bits = {"again": torch.equal(moe.routed(x, ids, weights, experts, tiles=tiles), whole)}
    moved = [moe.Experts(*(formats.weights(format, *elsewhere(t)) for t in (t13, t2)), 0, count, BETA, LINEAR_BETA)]
    bits["elsewhere"] = torch.equal(moe.routed(x, ids, weights, moved[0], tiles=tiles), whole)
    if shape.device == "cuda":  # the interpreter's sums depend on a token's place in a tile
        before, moe.WORKSPACE_BYTES = moe.WORKSPACE_BYTES, len(x) * shape.width * 2 + (4 << 20)
        try:
            bits["ranges"] = torch.equal(moe.routed(x, ids, weights, experts, tiles=tiles), whole)
        finally:
            moe.WORKSPACE_BYTES = before
        some = slice(3, 3 + len(x) // 3)
        bits["batch"] = torch.equal(moe.routed(x[some], ids[some], weights[some], experts, tiles=tiles), whole[some])
    found &= all(bits.values())
    texts.append("same bits: " + ", ".join(f"{name} {same}" for name, same in bits.items()))
    others = [torch.equal(moe.routed(x, ids, weights, experts, tiles=row[1:]), whole) for row in table]
    texts.append(f"other tiles {others}")
    some = (formats.weights(format, *(one[1:3].clone() for one in tensors)) for tensors in (t13, t2))
    part = moe.Experts(*some, 1, count, BETA, LINEAR_BETA)
    got = moe.routed(x, ids, weights, part)
    largest, mean = distance(got, routed_in_fp32(x, ids, weights, wide13[1:3], wide2[1:3], act, first=1))
    found &= largest <= 2**-6
    texts.append(f"two of the experts max {largest:.1e}")
    return found, "; ".join(texts)


def elsewhere(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Copies at addresses that are multiples of 64 and of nothing larger."""
    copies = []
    for one in tensors:
        room = torch.empty(one.nbytes + 320, dtype=torch.uint8, device=one.device)
        start = -room.data_ptr() % 256 + 64
        copy = room[start : start + one.nbytes].view(one.dtype).view(one.shape)
        copies.append(copy.copy_(one))
    return copies


def projection(shape: Shape) -> tuple[bool, str]:
    found, texts = True, []
    n, k = shape.projection
    for rows_, columns in ((n, k), (n // 128 * 128 // 2 + 64, k)):
        stack, expanded, _ = packed("fp8", 1, rows_, columns, device=shape.device)
        for tokens in (3, 300) if shape.device == "cuda" else (3,):
            x = torch.randn(tokens, columns, device=shape.device).bfloat16()
            largest, mean = distance(product.linear(x, stack), x.float() @ expanded[0].float().T)
            found &= largest <= 2**-8 and mean <= 2**-8
            texts.append(f"[{tokens}, {columns}] x [{rows_}] max {largest:.1e} rms {mean:.1e}")
    return found, "; ".join(texts)


def router(shape: Shape) -> tuple[bool, str]:
    """Beside fp64: no further away than 2e-5, a twentieth of what rounding to bf16 costs. Tensor cores cut sums off."""
    weight = (torch.randn(shape.experts, shape.hidden, device=shape.device) * shape.hidden**-0.5).bfloat16()
    x = torch.randn(shape.few_tokens, shape.hidden, device=shape.device).bfloat16()
    exact = torch.sigmoid(F.linear(x.double(), weight.double()))
    got = product.linear(x, formats.weights("plain", weight[None]), sigmoid=True)
    kernel = (got - exact).abs().max().item()
    fp32 = (torch.sigmoid(F.linear(x.float(), weight.float())) - exact).abs().max().item()
    bf16 = (torch.sigmoid(F.linear(x, weight).float()) - exact).abs().max().item()
    return kernel <= 2e-5, f"from fp64: kernel {kernel:.1e}, fp32 product {fp32:.1e}, bf16 product {bf16:.1e}"


def small(shape: Shape) -> tuple[bool, str]:
    """Each beside its formula in fp32: one rounding to bf16, two of a norm with its weight."""
    x = torch.randn(9, shape.few_tokens, shape.hidden, device=shape.device).bfloat16()
    weight = (1 + 0.1 * torch.randn(shape.hidden, device=shape.device)).bfloat16()
    proj = torch.randn(shape.hidden, device=shape.device).bfloat16()
    normed = rows.rms_norm(x[0], weight, 1e-5)
    found = {"norm": distance(normed, rms_normalise(x[0], 1e-5) * weight.float())}
    scores = torch.stack([(rms_normalise(row, 1e-5) * weight.float() * proj.float()).sum(-1) for row in x])
    mixed = (torch.softmax(scores, 0).unsqueeze(-1) * x.to(wide(x.dtype))).sum(0)
    found["mix"] = distance(rows.residual_mix(list(x), proj, weight, 1e-5), mixed)
    gate, up = x[1] * 3, x[2] * 30
    found["activation"] = distance(
        activation.gated_activation(gate, up, BETA, LINEAR_BETA), act(gate.float(), up.float())
    )
    text = ", ".join(f"{name} max {largest:.1e} rms {mean:.1e}" for name, (largest, mean) in found.items())
    return all(largest <= 2**-7 and mean <= 2**-8 for largest, mean in found.values()), text


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
