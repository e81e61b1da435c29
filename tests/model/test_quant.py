"""The packed formats equal an independent implementation bit for bit."""

import numpy as np
import pytest
import torch

from dwdp.model import quant


def _bytes(shape, low=0, high=256, seed=0):
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def _mlx_dequantise(packed, scale, group, mode):
    mx = pytest.importorskip("mlx.core")
    words = mx.array(packed.numpy()).view(mx.uint32)
    values = mx.dequantize(words, mx.array(scale.numpy()), group_size=group, bits=4, mode=mode)
    return torch.from_numpy(np.array(values.astype(mx.float32)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_values_equal_mlx(dtype):
    packed, scale = _bytes((48, 64)), _bytes((48, 4), 100, 150, seed=1)
    got = quant.dequantise_mxfp4(packed, scale, dtype)
    assert got.dtype == dtype and torch.equal(got.float(), _mlx_dequantise(packed, scale, 32, "mxfp4"))


def test_nvfp4_values_equal_mlx_when_the_matrix_factor_is_one():
    scale = _bytes((48, 8), 0, 0x7F, seed=1)  # all finite positive E4M3 values
    packed = _bytes((48, 64))
    got = quant.dequantise_nvfp4(packed, scale.view(torch.float8_e4m3fn), torch.tensor(1.0), torch.float32)
    assert torch.equal(got, _mlx_dequantise(packed, scale, 16, "nvfp4"))


def test_the_low_nibble_is_the_even_column():
    packed = torch.tensor([[0x21] + [0] * 15], dtype=torch.uint8)
    got = quant.dequantise_mxfp4(packed, torch.tensor([[127]], dtype=torch.uint8), torch.float32)
    assert got[0, :2].tolist() == [0.5, 1.0]
    assert quant.pack_e2m1(torch.tensor([1, 2]))[0] == 0x21


def test_mxfp4_scale_range_and_nan():
    packed = torch.full((1, 16), 0x22, dtype=torch.uint8)
    for byte, value in ((0, 2.0**-127), (1, 2.0**-126), (254, 2.0**127)):
        got = quant.dequantise_mxfp4(packed, torch.tensor([[byte]], dtype=torch.uint8), torch.float32)
        assert got[0, 0].item() == value
    assert quant.dequantise_mxfp4(packed, torch.tensor([[255]], dtype=torch.uint8), torch.bfloat16).isnan().all()


def test_float16_takes_the_range_from_the_product_not_from_the_scale():
    packed, scale = _bytes((4, 16)), torch.full((4, 1), 127 - 20, dtype=torch.uint8)
    got = quant.dequantise_mxfp4(packed, scale, torch.float16)
    assert torch.equal(got, quant.dequantise_mxfp4(packed, scale, torch.float32).half()) and got.abs().max() > 0


def test_nvfp4_factors_per_matrix_and_per_half():
    packed = _bytes((3, 8, 16))
    scale = _bytes((3, 8, 2), 0x30, 0x40, seed=1).view(torch.float8_e4m3fn)
    factors = torch.tensor([[0.5, 3.0], [0.25, 7.0], [1.0, 0.125]])
    whole = quant.dequantise_nvfp4(packed, scale, torch.ones(3), torch.float32)
    got = quant.dequantise_nvfp4(packed, scale, factors, torch.float32)
    assert torch.equal(got[:, :4], whole[:, :4] * factors[:, 0, None, None])
    assert torch.equal(got[:, 4:], whole[:, 4:] * factors[:, 1, None, None])
    per_matrix = quant.dequantise_nvfp4(packed, scale, factors[:, 0], torch.float32)
    assert torch.equal(per_matrix, whole * factors[:, 0, None, None])
    with pytest.raises(ValueError, match="8 rows are not 3 equal blocks"):
        quant.dequantise_nvfp4(packed, scale, torch.ones(3, 3), torch.float32)


def test_wrong_scale_shape_is_refused():
    with pytest.raises(ValueError, match="do not fit"):
        quant.dequantise_mxfp4(_bytes((4, 32)), _bytes((4, 4)), torch.float32)


def test_rounding_to_e2m1_is_to_nearest_with_ties_to_even():
    x = torch.tensor([0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.01, 9.0, -0.75, -5.0])
    values = quant.unpack_e2m1(quant.pack_e2m1(quant.quantise_e2m1(x)))
    assert values.tolist() == [0, 0.5, 1, 1, 2, 2, 4, 4, 6, 6, -1, -4]


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4"])
def test_representable_weights_survive_the_round_trip_exactly(mode):
    weight = quant.unpack_e2m1(_bytes((64, 128))) * 0.25
    weight[:, ::16] = 1.5  # every group holds the largest value, so that every block scale is one value
    if mode == "mxfp4":
        got = quant.dequantise_mxfp4(*quant.quantise_mxfp4(weight), torch.float32)
    else:
        got = quant.dequantise_nvfp4(*quant.quantise_nvfp4(weight), torch.float32)
    assert torch.allclose(got, weight, rtol=0 if mode == "mxfp4" else 1e-6, atol=0)


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4"])
def test_gaussian_weights_come_back_within_a_quantisation_step(mode):
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)) * 0.02
    weight[3] = 0
    if mode == "mxfp4":
        got = quant.dequantise_mxfp4(*quant.quantise_mxfp4(weight), torch.float32)
    else:
        got = quant.dequantise_nvfp4(*quant.quantise_nvfp4(weight), torch.float32)
    relative = (got - weight).norm() / weight.norm()
    assert 0.02 < relative < 0.15 and (got[3] == 0).all()


@pytest.mark.parametrize("shape", [(128, 128), (576, 200), (96, 300)])
@pytest.mark.parametrize("dims", [2, 4])
def test_fp8_blocks_equal_the_plain_formula_with_partial_blocks(shape, dims):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    fp8, scale = quant.quantise_fp8_block(weight)
    n, k = shape
    assert scale.shape == (-(-n // 128), 1, -(-k // 128), 1)
    full = scale[:, 0, :, 0].repeat_interleave(128, 0).repeat_interleave(128, 1)[:n, :k]
    got = quant.dequantise_fp8_block(fp8, scale if dims == 4 else scale[:, 0, :, 0], torch.float32)
    assert torch.equal(got, fp8.float() * full)
    assert (got - weight).abs().max() < 0.07 * weight.abs().max()
    rounded = quant.dequantise_fp8_block(fp8, scale, torch.bfloat16)
    assert torch.equal(rounded, (fp8.float() * full).bfloat16())


def test_fp8_with_a_scale_of_another_shape_is_refused():
    fp8, scale = quant.quantise_fp8_block(torch.randn(200, 200))
    with pytest.raises(ValueError, match=r"\[1, 1, 2, 1\], not \[2, 1, 2, 1\]"):
        quant.dequantise_fp8_block(fp8, scale[:1], torch.float32)
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        quant.dequantise_fp8_block(torch.randn(200, 200), scale, torch.float32)


@pytest.mark.parametrize("first, last", [(0, 300), (0, 1), (5, 130), (127, 129), (128, 256), (200, 300), (299, 300)])
def test_rows_of_a_block_scaled_weight_are_scaled_as_in_the_whole_one(first, last):
    """Fails when the first row's block of scales is taken for all of them, and when it is the block before."""
    weight, scale = torch.randn(300, 200), torch.rand(3, 2) + 0.5
    whole, rows = weight.clone(), weight[first:last].clone()
    quant.scale_fp8_blocks_(whole, scale)
    quant.scale_fp8_blocks_(rows, scale, first_row=first, num_rows=300)
    assert torch.equal(rows, whole[first:last])
