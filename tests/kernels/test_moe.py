"""Grouped products over experts of every format, interpreted: values, order of sums, ranges, bounded memory."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton")

from dwdp.kernels import moe, select  # noqa: E402
from dwdp.kernels.product import Tile  # noqa: E402
from dwdp.model.moe import LatentMoE  # noqa: E402
from dwdp.model.norms import situ, swiglu  # noqa: E402
from tests.kernels.packs import FORMATS, packed, picks, routed_in_fp32  # noqa: E402
from tests.support.tiny import tiny_model_config  # noqa: E402

WIDTH, INTER, EXPERTS, TOP_K = 256, 128, 4, 2


def layer(format: str, *, first: int = 0, count: int = EXPERTS, beta: float = 4.0, linear_beta: float = 25.0):
    """Experts `first` on of EXPERTS for kernels, and their weights in bf16."""
    w13, wide13, _ = packed(format, count, 2 * INTER, WIDTH, parts=2)
    w2, wide2, _ = packed(format, count, WIDTH, INTER, seed=1)
    return moe.Experts(w13, w2, first, EXPERTS, beta, linear_beta), wide13, wide2


def tiles(format: str) -> tuple[Tile, Tile]:
    """Small ones, the second in steps that do not divide the columns where the format allows it."""
    step = 64 if format == "plain" else 128
    return Tile(16, 64, step, warps=4, stages=2), Tile(16, 128, step, warps=4, stages=2)


def tokens(count: int) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(5)).bfloat16()


@pytest.mark.parametrize("format", FORMATS)
def test_routed_experts_equal_the_sum_in_fp32(format):
    """Mutated once: nibbles exchanged, the up half's scales taken for both, a border shifted by one; each fails."""
    experts, w13, w2 = layer(format)
    x, (ids, weights) = tokens(7), picks(7, EXPERTS, TOP_K)
    got = moe.routed(x, ids, weights, experts, tiles=tiles(format))
    want = routed_in_fp32(x, ids, weights, w13, w2, lambda g, u: situ(g, u, 4.0, 25.0))
    assert got.dtype == torch.float32
    # two roundings to bf16 on the way: of the hidden row, of an expert's output
    torch.testing.assert_close(got, want, atol=2**-7 * want.abs().max().item(), rtol=0)


def test_experts_of_one_rank_add_what_is_theirs_and_swiglu_is_served():
    """Experts 1 and 2 of four; a token that picked neither gets zeros, whose memory held something else."""
    experts, w13, w2 = layer("plain", first=1, count=2, beta=0.0, linear_beta=0.0)
    ids = torch.tensor([[0, 1], [1, 2], [0, 3], [2, 3]])
    weights = torch.rand(4, 2, generator=torch.Generator().manual_seed(2))
    got = moe.routed(tokens(4), ids, weights, experts, tiles=tiles("plain"))
    want = routed_in_fp32(tokens(4), ids, weights, w13, w2, swiglu, first=1)
    assert not got[2].any()
    torch.testing.assert_close(got, want, atol=2**-7 * want.abs().max().item(), rtol=0)


def exact_layer() -> moe.Experts:
    """Whole numbers in w13 and one 1 in each row of w2: sums of the interpreter are exact in whichever order its matrix
    product adds, which changes with a token's place in a tile; a GPU's does not, see `tests/gpu/check_moe.py`."""
    draw = torch.Generator().manual_seed(4)
    w13 = torch.randint(-2, 3, (EXPERTS, 2 * INTER, WIDTH), generator=draw).bfloat16()
    w2 = torch.eye(INTER)[torch.randint(INTER, (EXPERTS, WIDTH), generator=draw)].bfloat16()
    return moe.Experts(moe.Weights("plain", w13), moe.Weights("plain", w2), 0, EXPERTS, 4.0, 25.0)


def test_ranges_and_batches_change_no_bit(monkeypatch):
    """20 tokens in one range, in ranges of 16 pairs, and in pieces: the same bits. Mutated once: a range that begins
    anew instead of adding fails."""
    experts = exact_layer()
    draw = torch.Generator().manual_seed(6)
    x = torch.randint(-1, 2, (20, WIDTH), generator=draw) * (torch.rand(20, WIDTH, generator=draw) < 0.05)
    x, (ids, weights) = x.bfloat16(), picks(20, EXPERTS, TOP_K)
    tile = Tile(16, 128, 128, warps=4, stages=2)
    whole = moe.routed(x, ids, weights, experts, tiles=(tile, tile))
    assert whole.unique().numel() > 1000
    monkeypatch.setattr(moe, "_RANGE_STEP", 16)
    monkeypatch.setattr(moe, "WORKSPACE_BYTES", 1)
    assert moe.range_pairs(40, 20, experts) == 16
    assert torch.equal(moe.routed(x, ids, weights, experts, tiles=(tile, tile)), whole)
    monkeypatch.setattr(moe, "TOKENS_AT_ONCE", 17)
    assert torch.equal(moe.routed(x, ids, weights, experts, tiles=(tile, tile)), whole)
    few = moe.routed(x[3:5], ids[3:5], weights[3:5], experts, tiles=(tile, tile))
    assert torch.equal(few, whole[3:5])


class Storages(TorchDispatchMode):
    """The largest storage that any operation inside returns, those that are given left out."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self.given = {one.untyped_storage().data_ptr() for one in given}
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in tree_leaves(out):
            if isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in self.given:
                self.largest = max(self.largest, one.untyped_storage().nbytes())
        return out


def test_no_storage_is_larger_than_the_workspace(monkeypatch):
    """Beside the result. Without ranges hidden rows and outputs of all pairs are larger."""
    experts, *_ = layer("plain")
    x, (ids, weights) = tokens(300), picks(300, EXPERTS, TOP_K)
    monkeypatch.setattr(moe.grouped_kernel, "run", lambda *args, **kwargs: None)
    monkeypatch.setattr(moe.sum_kernel, "run", lambda *args, **kwargs: None)
    seen = {}
    for limit in (1 << 30, 100_000):
        monkeypatch.setattr(moe, "WORKSPACE_BYTES", limit)
        with Storages(x, ids, weights) as storages:
            moe.routed(x, ids, weights, experts, tiles=tiles("plain"))
        seen[limit] = storages.largest
    result = x.numel() * 4
    assert seen[1 << 30] == max(result, 600 * 2 * WIDTH) and seen[100_000] == result
    assert 128 * 2 * (WIDTH + INTER) <= 100_000


@pytest.mark.parametrize("tokens", [1, 64, 1024, 2730, 4096, 16384])
@pytest.mark.parametrize("format", ["plain", "mxfp4"])
def test_the_workspace_at_full_width_is_below_256_mib(format, tokens):
    """Arithmetic alone: meta tensors stand for Kimi-K3's tables."""
    kind, per_byte = (torch.bfloat16, 1) if format == "plain" else (torch.uint8, 2)
    w13, w2 = (
        moe.Weights(format, torch.empty(896, rows, columns // per_byte, dtype=kind, device="meta"))
        for rows, columns in ((6144, 3584), (3584, 3072))
    )
    experts = moe.Experts(w13, w2, 0, 896, 4.0, 25.0)
    pairs = tokens * 16
    size = moe.range_pairs(pairs, tokens, experts)
    reordered = tokens * 3584 * 2 if format == "mxfp4" else 0
    lists = pairs * (4 + 8 + 8 + 4 + 4 + 4) + 897 * 4 * 8  # keys, order, quotient, tokens, places, numbers
    assert min(size, pairs) * 2 * (3584 + 3072) + reordered + lists <= 256 << 20
    assert size % 128 == 0 and -(-pairs // size) == -(-pairs // ((moe.WORKSPACE_BYTES - reordered) // 13312))


@pytest.mark.parametrize("expert_format", ["plain", "mxfp4", "nvfp4"])
def test_a_block_runs_its_experts_norms_and_activations_as_kernels(expert_format, monkeypatch):
    """The whole MoE block, kernels and torch form of the same bf16 weights."""
    config = tiny_model_config(hidden_size=64, routed_expert_hidden_size=128, moe_intermediate_size=128)
    torch.manual_seed(0)
    where = dict(dtype=torch.bfloat16, expert_range=(0, 8), device="cpu")
    block = LatentMoE(config, 1, expert_format=expert_format, **where).requires_grad_(False)
    if expert_format != "plain":
        for name, parts in (("w13", 2), ("w2", 1)):
            rows = getattr(block.experts, name).shape[1]
            _, _, tensors = packed(expert_format, 8, rows, 128, parts=parts)
            for end, tensor in zip(("", "_scale", "_scale_2"), tensors):
                getattr(block.experts, name + end).copy_(tensor)
    x = torch.randn(1, 3, 64).bfloat16()
    want = block(x)
    monkeypatch.setenv("DWDP_KERNELS", "triton")
    called = []
    monkeypatch.setattr(moe, "routed", lambda *args, real=moe.routed, **k: called.append(1) or real(*args, **k))
    got = block(x)
    assert called == [1]
    torch.testing.assert_close(got, want, atol=2**-6 * want.abs().max().item(), rtol=0)


@pytest.mark.parametrize("experts", [40, 1])
@pytest.mark.parametrize("rest", [None, Tile(16, 128, 128, 4, 2), Tile(32, 128, 128, 4, 2)])
def test_tiles_cover_every_pair_of_every_range_once(rest, experts):
    """Mutated once: large tiles for what is left up to three small ones leave pairs out, and a bound of the number of
    large tiles by their smallest load alone is below it where one expert has all pairs."""
    draw = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 300, (3, experts), generator=draw, dtype=torch.int32)
    if experts == 1:
        counts[:, 0] = torch.tensor([4224, 10112, 64])
    else:
        counts[0, :5] = torch.tensor([0, 1, 32, 33, 64])
    cuts = torch.nn.functional.pad(counts.cumsum(1, dtype=torch.int32), (1, 0))
    size = int(cuts[:, -1].max())
    works = moe._works(cuts, size, Tile(64, 128, 128, 4, 2, rest=rest))
    for number in range(3):
        seen = torch.zeros(size, dtype=torch.int32)
        for work in works:
            total = int(work.tile_ends[number, -1])
            assert total <= work.most
            for place in range(total):
                expert = int(work.tile_expert[number, place])
                inside = place - int(work.tile_ends[number, expert])
                first = int(work.starts[number, expert]) + inside * work.tile.tokens
                last = min(first + work.tile.tokens, int(work.ends[number, expert]))
                assert cuts[number, expert] <= first < last <= cuts[number, expert + 1]
                seen[first:last] += 1
        assert bool((seen[: cuts[number, -1]] == 1).all()) and not seen[cuts[number, -1] :].any()


def test_small_tiles_behind_large_ones_change_nothing_but_rounding():
    experts, _, _ = layer("plain")
    x = tokens(40)
    ids, weights = picks(40, EXPERTS, TOP_K)
    tile = Tile(32, 64, 64, 4, 2)
    want = moe.routed(x, ids, weights, experts, tiles=(tile, tile))
    mixed = Tile(32, 64, 64, 4, 2, rest=Tile(16, 64, 64, 4, 2))
    got = moe.routed(x, ids, weights, experts, tiles=(mixed, mixed))
    assert torch.allclose(got, want, rtol=2**-7, atol=2**-9 * float(want.abs().max()))


def test_tables_of_ranges_may_lie_anywhere_without_a_kernel_for_each_address():
    """Rows of tables of several ranges are 4, 8 or 12 bytes from a multiple of 16: kernels must not be made anew."""
    tables = {"tile_expert", "tile_ends", "starts", "ends"}
    for kernel, names in (
        (moe.grouped_kernel, tables),
        (moe.grouped_mxfp4_kernel, tables),
        (moe.sum_kernel, {"borders"}),
    ):
        plain = kernel if hasattr(kernel, "params") else None
        if plain is not None:  # not the interpreter's
            assert names <= {one.name for one in plain.params if one.do_not_specialize_on_alignment}


def test_without_a_gluon_that_is_known_mxfp4_goes_through_triton(monkeypatch):
    monkeypatch.setattr(select, "hopper", lambda device: device.type == "cuda")
    assert moe.lanes_on("mxfp4", "cuda:0") and not moe.lanes_on("nvfp4", "cuda:0")
    assert moe.tile_table("mxfp4", "cuda:0") is moe.LANE_TILES
    monkeypatch.setattr(moe, "GLUON_MISSING", "no module of that name")
    assert not moe.lanes_on("mxfp4", "cuda:0") and moe.tile_table("mxfp4", "cuda:0") is moe.TILES["mxfp4"]
