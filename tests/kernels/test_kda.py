"""KDA's kernels in Triton's interpreter: convolution, norm and gate, and the delta rule of the library."""

from __future__ import annotations

import logging
from importlib import metadata

import pytest
import torch
import torch.nn.functional as F

from dwdp.kernels import kda as kernels
from dwdp.kernels.batch import PackedBatch
from dwdp.kernels.gated import gated
from dwdp.kernels.short_conv import short_conv
from dwdp.model.kda import ShortConv, kda_chunk, kda_gate
from dwdp.model.norms import l2norm, rms_normalise, sigmoid_gated

pytest.importorskip("triton")
pytest.importorskip("fla")


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_short_conv_equals_the_torch_form_and_keeps_the_last_raw_rows(dtype):
    """Lengths below, at and above the kernel's, with rows of an earlier chunk. Mutations that fail here: past rows
    counted from the end, the norm for all three parts, `begins` of the next sequence."""
    heads, width, lengths = 2, 12, [1, 3, 21, 2]
    batch = PackedBatch.of(lengths)
    parts = [draw(sum(lengths), heads * width, seed=i, dtype=dtype) for i in range(3)]
    taps = [draw(heads * width, 1, 4, seed=10 + i) for i in range(3)]
    past = draw(len(lengths), 3, 3 * heads * width, seed=20, dtype=dtype)
    got, kept = short_conv(parts, taps, past, batch, heads=heads)
    for b, (start, end) in enumerate(batch.bounds()):
        windows = [torch.cat([old, new[start:end]]) for old, new in zip(past[b].chunk(3, -1), parts)]
        assert torch.equal(kept[b], torch.cat([window[end - start :] for window in windows], -1))
        for i, window in enumerate(windows):
            conv = ShortConv(heads * width, 4, dtype=torch.float32, device="cpu")
            conv.weight.data = taps[i]
            want = conv(window[None]).unflatten(-1, (heads, width))
            want = l2norm(want).to(dtype) if i < 2 else want
            tolerance = 2e-6 if dtype == torch.float32 else 2e-3
            torch.testing.assert_close(got[i][:, start:end], want, atol=tolerance, rtol=tolerance)


def test_a_row_of_zeros_stays_zero_in_the_norm():
    parts = [torch.zeros(2, 16) for _ in range(3)]
    got, _ = short_conv(parts, [draw(16, 1, 4)] * 3, torch.zeros(1, 3, 48), PackedBatch.of([2]), heads=1)
    assert all(torch.equal(part, torch.zeros(1, 2, 1, 16)) for part in got)


def test_gate_with_and_without_the_norm_equals_the_torch_form():
    x, gate, weight = draw(1, 7, 3, 20), draw(1, 7, 3, 20, seed=1), draw(20, seed=2)
    torch.testing.assert_close(
        gated(x, gate, weight, 1e-5), sigmoid_gated(rms_normalise(x, 1e-5) * weight, gate), atol=2e-6, rtol=0
    )
    torch.testing.assert_close(gated(x, gate), sigmoid_gated(x, gate), atol=1e-6, rtol=0)
    assert gated(x, gate.half()).dtype == torch.float16


@pytest.fixture(scope="module")
def library():
    found = kernels.operations()
    assert found is not None
    return found


def delta_rule_case(lengths, heads=2, width=16):
    batch, tokens = PackedBatch.of(lengths), sum(lengths)
    q, k, v, f = (draw(1, tokens, heads, width, seed=i) for i in range(4))
    beta = torch.sigmoid(draw(1, tokens, heads, seed=4))
    rate, bias = draw(heads, seed=5).abs(), draw(heads * width, seed=6) - 1
    state = draw(len(lengths), heads, width, width, seed=7)
    return (l2norm(q), l2norm(k), v, f, beta, rate, bias), state, batch


@pytest.mark.parametrize("bound", [-5.0, None])
def test_single_tokens_go_through_the_librarys_recurrence(library, bound):
    """Its state is [K, V] as ours: a transposed one would have the same shape."""
    (q, k, v, f, beta, rate, bias), state, batch = delta_rule_case([1, 1, 1])
    got, after = kernels.delta_rule(q, k, v, f, beta, rate, bias, bound, state, batch)
    g = kda_gate(f, rate, bias, bound)
    for b in range(3):
        one = [x[:, b : b + 1] for x in (q * 16**-0.5, k, v, g, beta)]
        want, new = kda_chunk(*one, state[b : b + 1], gate_floor=bound)
        torch.testing.assert_close(got[:, b : b + 1], want, atol=2e-6, rtol=0)
        torch.testing.assert_close(after[b : b + 1], new, atol=2e-6, rtol=0)
    assert after is not state


def test_chunks_go_to_the_chunk_form_with_arguments_that_it_has(library, monkeypatch):
    """Its kernels need a GPU; what they compute there is compared in tests/gpu/check_attention.py."""
    import inspect

    chunk, recurrent = library
    calls = []
    monkeypatch.setattr(kernels, "operations", lambda: (lambda *a, **o: calls.append((a, o)), recurrent))
    arguments, state, batch = delta_rule_case([5, 1])
    kernels.delta_rule(*arguments, -5.0, state, batch)
    kernels.delta_rule(*arguments, None, state, batch)
    for given, options in calls:
        bound = inspect.signature(chunk).bind(*given, **options).arguments
        assert bound["scale"] == 0.25 and bound["cu_seqlens"].tolist() == [0, 5, 6] and bound["output_final_state"]
        assert not bound.get("use_beta_sigmoid_in_kernel") and not bound.get("state_v_first")
        assert set(bound["kwargs"]) == {"A_log", "dt_bias"}
    assert [options["safe_gate"] for _, options in calls] == [True, False]


def test_every_tuned_kernel_of_the_library_has_one_configuration(library):
    """Mutation: without `pin` the chunk form's kernels have between 4 and 72 each."""
    import sys

    from triton.runtime.autotuner import Autotuner

    chosen = kernels.pin(sys.modules)
    assert {
        "kda_gate_chunk_cumsum_vector_kernel", "chunk_kda_fwd_kernel_intra_sub_chunk",
        "chunk_kda_fwd_kernel_inter_solve_fused", "recompute_w_u_fwd_kda_kernel",
        "chunk_gated_delta_rule_fwd_kernel_h_blockdim64", "chunk_gla_fwd_kernel_o",
    } <= set(chosen)  # fmt: skip
    tuned = [
        getattr(value, "fn", value) if type(value).__name__ == "Heuristics" else value
        for name, module in list(sys.modules.items())
        if name.startswith("fla.ops.kda")
        for value in vars(module).values()
    ]
    tuned = [value for value in tuned if isinstance(value, Autotuner)]
    assert len(tuned) > 5 and all(len(value.configs) == 1 for value in tuned)


def test_a_pinned_configuration_wins_and_one_that_the_library_lacks_is_not_made_up(monkeypatch):
    import triton

    configs = [
        triton.Config({"BK": k}, num_warps=w, num_stages=s) for k in (32, 64, 128) for w in (2, 8) for s in (2, 4)
    ]
    assert kernels._choose("x", configs).kwargs == {"BK": 64}
    monkeypatch.setitem(kernels.PINNED, "x", ({"BK": 128}, 8, 4))
    assert kernels._choose("x", configs) is configs[-1]
    monkeypatch.setitem(kernels.PINNED, "x", ({"BK": 99}, 8, 4))
    assert kernels._choose("x", configs).kwargs == {"BK": 64}


@pytest.mark.parametrize("version", [None, "0.5.0"])
def test_a_missing_or_other_library_is_one_warning_and_the_torch_form(monkeypatch, caplog, version):
    def found(name):
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", found)
    kernels.operations.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, logger="dwdp"):
            for _ in range(3):
                assert kernels.operations() is None
        (record,) = caplog.records
        assert "slow torch form" in record.getMessage() and "0.6.0" in record.getMessage()
        assert "\n" not in record.getMessage()
    finally:
        kernels.operations.cache_clear()


def test_the_host_never_asks_for_the_library():
    assert not kernels.runs_on(F.pad(torch.zeros(1), (0, 1)))
