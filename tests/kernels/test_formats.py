"""Decoding in kernels gives the bits that `model/quant.py` gives, for every nibble and every scale."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from dwdp.kernels import formats  # noqa: E402
from dwdp.model import quant  # noqa: E402
from tests.kernels.packs import decode_fp8, decoded, every_nibble, packed, same_bits  # noqa: E402


def test_mxfp4_of_every_nibble_and_scale():
    """Scale 0 is below the smallest normal number, 255 is NaN. Mutated once: 255 taken for infinity, nibbles shifted
    the wrong way, a group of 16; each fails."""
    values = every_nibble(256)
    scale = (torch.arange(256)[:, None] + torch.tensor([0, 85, 170, 255])).remainder(256).to(torch.uint8)[None]
    got = decoded(formats.weights("mxfp4", values, scale))
    assert same_bits(got, quant.dequantise_mxfp4(values, scale, torch.bfloat16)[0])


@pytest.mark.parametrize("factor", [1.0, 0.0020914715714752674, 2.9e-5])
def test_nvfp4_of_every_nibble_and_scale(factor):
    """Two roundings, in quant.py's order; with the second factor many products lie between two bf16 numbers. Mutated
    once: scale times factor first fails."""
    values = every_nibble(256)
    scale = (torch.arange(256)[:, None] + torch.arange(8) * 32).remainder(256).to(torch.uint8)[None]
    factors = torch.tensor([factor])
    got = decoded(formats.weights("nvfp4", values, scale.view(torch.float8_e4m3fn), factors))
    want = quant.dequantise_nvfp4(values, scale.view(torch.float8_e4m3fn), factors, torch.bfloat16)[0]
    assert same_bits(got, want)


def test_fp8_of_every_byte_under_scales_of_many_sizes():
    values = torch.arange(256, dtype=torch.uint8).repeat(64).view(128, 128)
    scale = torch.rand(128, generator=torch.Generator().manual_seed(0)) * torch.exp2(-(torch.arange(128) % 20))
    got = torch.empty(128, 128, dtype=torch.bfloat16)
    decode_fp8[(1,)](values, scale, got, ROWS=128, HOST=True)
    want = (values.view(torch.float8_e4m3fn).to(torch.bfloat16).float() * scale[:, None]).bfloat16()
    assert same_bits(got, want)


def test_tables_that_kernels_cannot_read_in_place_are_left_to_the_torch_form():
    _, _, (values, scale) = packed("mxfp4", 2, 64, 256)
    assert formats.weights("mxfp4", values, scale).columns == 256
    assert formats.weights("mxfp4", values[..., :96].contiguous(), scale[..., :6].contiguous()) is None
    assert formats.weights("mxfp4", values[..., 1:], scale) is None
    odd = torch.empty(values.numel() + 1, dtype=torch.uint8)[1:].view(values.shape)
    assert formats.weights("mxfp4", odd, scale) is None
    assert formats.weights("plain", torch.empty(2, 64, 64)) is None


def test_halves_are_undone_by_their_rows():
    x = torch.arange(512.0).view(2, 256)
    position = torch.arange(256)
    inside = position % 128
    assert torch.equal(formats.in_halves(x), x[:, position - inside + 2 * (inside % 64) + inside // 64])
