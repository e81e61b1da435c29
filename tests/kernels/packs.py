"""Random weights in every format, as kernels read them and as `model/quant.py` decodes them. Needs no pytest."""

from __future__ import annotations

import torch
from torch import Tensor

from dwdp.kernels import formats
from dwdp.kernels.lang import tl, triton
from dwdp.model import quant

FORMATS = ("plain", "mxfp4", "nvfp4", "fp8")


def packed(
    format: str, count: int, rows: int, columns: int, *, parts: int = 1, seed: int = 0, device: str = "cpu",
    decode: bool = True,
):  # fmt: skip
    """-> (Weights of `count` matrices, the same in bf16 [count, rows, columns], the tensors). Values around
    columns ** -0.5; parts: factors of a matrix, nvfp4 only; decode: False gives None in place of the second."""
    draw = torch.Generator(device).manual_seed(seed)
    shape, one = (count, rows, columns), columns**-0.5
    if format == "plain":
        values = (torch.randn(shape, generator=draw, device=device) * one).bfloat16()
        return formats.weights(format, values), values, (values,)
    if format == "fp8":
        values = _bytes(shape, draw, device)
        values = torch.where(values & 127 == 127, values - 1, values).view(torch.float8_e4m3fn)
        blocks = (count, -(-rows // 128), -(-columns // 128))
        scale = one / 200 * (0.5 + torch.rand(blocks, generator=draw, device=device))
        each = range(count if decode else 0)
        wide = [quant.dequantise_fp8_block(values[i], scale[i], torch.bfloat16) for i in each]
        return formats.weights(format, values, scale), torch.stack(wide) if decode else None, (values, scale)
    values = _bytes((count, rows, columns // 2), draw, device)
    if format == "mxfp4":
        exponent = torch.log2(torch.tensor(one / 3)).round().int().item() + 127
        scale = _bytes((count, rows, columns // 32), draw, device, exponent - 1, exponent + 2)
        wide = quant.dequantise_mxfp4(values, scale, torch.bfloat16) if decode else None
        return formats.weights(format, values, scale), wide, (values, scale)
    scale = _bytes((count, rows, columns // 16), draw, device, 0x60, 0x70).view(torch.float8_e4m3fn)
    factors = one / 200 * (0.5 + torch.rand((count, parts), generator=draw, device=device))
    factors = factors if parts > 1 else factors[:, 0].contiguous()
    wide = quant.dequantise_nvfp4(values, scale, factors, torch.bfloat16) if decode else None
    return formats.weights(format, values, scale, factors), wide, (values, scale, factors)


def _bytes(shape: tuple[int, ...], draw: torch.Generator, device: str, low: int = 0, high: int = 256) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=draw, device=device)


def picks(tokens: int, experts: int, top_k: int, *, seed: int = 0, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Ids [tokens, top_k], different and ascending a token, and weights that add up to one."""
    draw = torch.Generator(device).manual_seed(seed)
    noise = torch.rand((tokens, experts), generator=draw, device=device)
    ids = noise.topk(top_k, dim=1).indices.sort(1).values
    weights = 0.1 + torch.rand((tokens, top_k), generator=draw, device=device)
    return ids, weights / weights.sum(1, keepdim=True)


def routed_in_fp32(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, activation, first: int = 0):
    """What `kernels.moe.routed` gives, in fp32 throughout, an expert at a time; w13, w2: of experts from `first` on."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for row in range(w13.shape[0]):
        token, place = (ids == first + row).nonzero(as_tuple=True)
        if token.numel():
            gate, up = (x[token].float() @ w13[row].float().T).chunk(2, -1)
            total[token] += activation(gate, up) @ w2[row].float().T * weights[token, place, None]
    return total


@triton.jit
def decode_packed(values, words, factor, even, odd, ROWS: tl.constexpr, FORMAT: tl.constexpr, HOST: tl.constexpr):
    row, byte = tl.arange(0, ROWS), tl.arange(0, 64)
    at = row[:, None] * 64 + byte[None, :]
    first, second = formats.packed_tiles(
        tl.load(values + at), tl.load(words + row), tl.load(factor), FORMAT, 64, HOST
    )  # fmt: skip
    tl.store(even + at, first)
    tl.store(odd + at, second)


@triton.jit
def decode_fp8(values, scale, out, ROWS: tl.constexpr, HOST: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, 128)
    at = row[:, None] * 128 + column[None, :]
    tl.store(out + at, formats.fp8_tile(tl.load(values + at), tl.load(scale + row), HOST))


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    """NaN is any NaN."""
    got, want = got.cpu(), want.cpu()
    return torch.equal(got.isnan(), want.isnan()) and torch.equal(
        torch.where(got.isnan(), 0, got.view(torch.int16)), torch.where(want.isnan(), 0, want.view(torch.int16))
    )


def decoded(weights: formats.Weights) -> torch.Tensor:
    """[rows, 128] of a stack of one packed matrix of 128 columns, put together from both tiles."""
    rows, values = weights.rows, weights.values
    even, odd = (torch.empty(rows, 64, dtype=torch.bfloat16, device=values.device) for _ in range(2))
    factor = weights.factors if weights.factors is not None else torch.ones(1, device=values.device)
    decode_packed[(1,)](
        values, weights.words, factor, even, odd, ROWS=rows, FORMAT=weights.format, HOST=not values.is_cuda
    )  # fmt: skip
    return torch.stack([even, odd], -1).view(rows, 128)


def every_nibble(rows: int) -> torch.Tensor:
    """uint8 [1, rows, 64]: each eight bytes hold each nibble once, low and high; each row in another order."""
    low = (torch.arange(64)[None, :] * 5 + torch.arange(rows)[:, None]) % 16
    high = (torch.arange(64)[None, :] * 11 + torch.arange(rows)[:, None] * 3 + 8) % 16
    return (low | high << 4).to(torch.uint8)[None]
