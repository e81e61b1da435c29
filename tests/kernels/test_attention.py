"""Latent attention's kernels in Triton's interpreter, against the formula in fp64."""

from __future__ import annotations

import pytest
import torch

from dwdp.kernels import attention
from dwdp.kernels.attention import attend, plan
from dwdp.kernels.batch import PackedBatch
from dwdp.kernels.decode import Blocks, decode, num_splits
from tests.kernels.references import attention_case

pytest.importorskip("triton")

CLOSE = dict(atol=5e-6, rtol=0)
SMALL = Blocks(16, 16, 4, 1)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that a few tokens already fill several tiles and blocks of keys."""
    monkeypatch.setattr(attention, "prefill_blocks", lambda dtype: SMALL)
    monkeypatch.setattr("dwdp.kernels.decode.decode_blocks", lambda dtype: SMALL)


@pytest.mark.parametrize(
    ("lengths", "starts"),
    [
        ([21, 1, 16], [0, 0, 0]),  # new sequences, whose keys lie in place
        ([35, 3], [40, 17]),  # chunks behind a cache, in several rounds
        ([1, 1], [37, 5]),  # decode alone
        ([1, 18, 1, 2], [9, 0, 33, 30]),  # all at once
    ],
)
def test_every_stage_equals_the_formula_whatever_else_is_in_the_batch(lengths, starts):
    """Mutations that fail here: `<=` to `<` in the mask of the prefill, `later` always false, workspace rows of the
    second span counted from 0."""
    case = attention_case(lengths, starts)
    got = attend(case.query, case.rows, case.batch, case.cache, case.weight, span=32, **case.where)
    torch.testing.assert_close(got.double(), case.expected(), **CLOSE)


def test_narrow_operands_are_rounded_once_per_product():
    case = attention_case([18, 1], [20, 20], dtype=torch.float16)
    got = attend(case.query, case.rows, case.batch, case.cache, case.weight, span=32, **case.where)
    assert got.dtype == torch.float16
    assert (got.double() - case.expected()).abs().max() < 4e-3


def test_widths_that_are_no_power_of_two_and_sequences_without_a_cache():
    case = attention_case([19, 2], [0, 0], heads=2, nope=12, rope=6, value=20, latent=24)
    got = attend(case.query, case.rows, case.batch, None, case.weight, span=64, **case.where)
    torch.testing.assert_close(got.double(), case.expected(), **CLOSE)


@pytest.mark.parametrize("splits", [1, 3, 7])
def test_decode_gives_the_same_for_any_number_of_splits_also_empty_ones(splits):
    """Mutation: an end of each split that is one key later fails here."""
    case = attention_case([1, 1], [40, 2], heads=18)
    slots, contexts = case.batch.slot_index, case.batch.first_positions + 1
    got = decode(
        case.query, case.cache, slots, contexts, 41, case.weight, blocks=SMALL, splits=splits, **case.where
    )  # fmt: skip
    torch.testing.assert_close(got.double(), case.expected(), **CLOSE)


def test_a_sequences_bits_do_not_depend_on_where_its_cache_lies():
    """Strides and slots only move addresses."""
    case = attention_case([1, 20], [30, 25])
    first = attend(case.query, case.rows, case.batch, case.cache, case.weight, span=32, **case.where)
    wider = torch.full((9, 80, case.cache.shape[-1] + 5), torch.nan)[1::2, :, 2:-3]
    wider[: case.cache.shape[0], : case.cache.shape[1]] = case.cache
    case.batch.plans.clear()
    assert torch.equal(first, attend(case.query, case.rows, case.batch, wider, case.weight, span=32, **case.where))


def test_rounds_are_bounded_and_cover_every_key_of_every_query_once():
    lengths, starts = [70, 1, 5, 33, 200], [0, 90, 100, 31, 0]
    batch = PackedBatch.of(lengths, starts=starts)
    work = plan(batch, 16, 64)
    assert work.decodes.tolist() == [70] and work.contexts.tolist() == [91] and work.longest == 91 and work.carries
    seen = {}
    for one in work.rounds:
        assert sum(end - first for _, first, end in one.spans) <= 64
        rows = {b: row for row, b in _rows_of(one)}
        for token, count, position, row, first, end in one.tiles.tolist():
            assert 0 < count <= 16 and first % 64 == 0
            b = int(batch.token_sequences[token])
            assert row == rows[b] and position == batch.token_positions[token]
            for i in range(token, token + count):
                seen.setdefault(i, set()).update(range(first, min(end, int(batch.token_positions[i]) + 1)))
    assert sorted(seen) == [i for i in range(sum(lengths)) if i != 70]
    for i, keys in seen.items():
        assert keys == set(range(int(batch.token_positions[i]) + 1))


def _rows_of(one):
    row = 0
    for b, first, end in one.spans:
        yield row, b
        row += end - first


def test_the_workspace_does_not_grow_with_the_context(monkeypatch):
    """The largest tensor of a chunk is the same behind 32 and behind 320 tokens."""
    sizes = {}
    for before in (32, 320):
        case = attention_case([16], [before])
        largest = 0

        def recorded(keys, weight):
            nonlocal largest
            out = keys @ weight.T
            largest = max(largest, out.numel())
            return out

        with monkeypatch.context() as patched:
            patched.setattr(torch.nn.functional, "linear", recorded)
            got = attend(case.query, case.rows, case.batch, case.cache, case.weight, span=32, **case.where)
        torch.testing.assert_close(got.double(), case.expected(), **CLOSE)
        sizes[before] = largest
    assert sizes[32] == sizes[320] > 0


def test_splits_fill_the_processors_twice_and_are_not_too_short():
    assert num_splits(32, 2, 32768, 132) == 4
    assert num_splits(1, 2, 32768, 132) == 128
    assert num_splits(1, 2, 300, 132) == 2
    assert num_splits(500, 2, 32768, 132) == 1
