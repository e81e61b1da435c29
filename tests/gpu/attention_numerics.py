"""Each kernel of attention against fp32 or fp64 formulas, within stated bounds, and bit for bit when run again."""

from __future__ import annotations

import contextlib
import copy

import torch

from dwdp.kernels import kda as delta
from dwdp.kernels.attention import attend
from dwdp.kernels.gated import gated
from dwdp.kernels.short_conv import short_conv
from dwdp.model.kda import kda_chunk, kda_gate
from dwdp.model.norms import l2norm, rms_normalise, sigmoid_gated
from dwdp.model.state import KdaState, MlaState
from tests.gpu.attention_site import Site, flash_mla_missing, form, own_decode
from tests.kernels.references import attention_case


def difference(got, want) -> float:
    """Largest difference over the largest value."""
    got, want = got.double(), want.double()
    return float((got - want).abs().max() / want.abs().max())


def latent_attention(site: Site) -> None:
    """Every stage in one batch, in several rounds, at full width."""
    lengths, starts = ([20, 1, 3, 1], [0, 40, 30, 33]) if site.cpu else ([300, 1, 150, 1, 64], [0, 3000, 2500, 70, 0])
    widths = (
        {}
        if site.cpu
        else dict(heads=96, nope=128, rope=64, value=128, latent=512, dtype=site.dtype, device=site.device)
    )
    case = attention_case(lengths, starts, capacity=128 if site.cpu else 3008, **widths)  # whole pages

    def run():
        case.batch.plans.clear()
        return attend(
            case.query, case.rows, case.batch, case.cache, case.weight, span=32 if site.cpu else 1024, **case.where
        )

    want = case.expected()
    missing = flash_mla_missing(site)
    for which, chosen in (("FlashMLA", contextlib.nullcontext), ("Triton", own_decode)):
        if which == "FlashMLA" and missing is not None:
            site.row(f"latent attention, {which}", f"MISSING: {missing}; our kernel runs in its place")
            continue
        with chosen():
            got = run()
            # As in the plan of the forward, which has pages where FlashMLA decoded and none where it did not.
            taken = any(key[0] == "pages" for key in case.batch.plans)
            site.check(f"latent attention, {which}, decodes by another form", float(taken != (which == "FlashMLA")), 0)
            # One rounding of the weights of a sum, one of keys or absorbed queries, one of the result: 3 of 2^-9.
            site.check(
                f"latent attention, {which}, all stages, against fp64", difference(got, want),
                5e-6 if site.cpu else 1.5e-2,
            )  # fmt: skip
            site.check(f"latent attention, {which}, again, bits that differ", float((run() != got).sum()), 0)


def convolution_and_gate(site: Site) -> None:
    linear = site.config.linear_attn_config
    heads, width = linear.num_heads, linear.head_dim
    lengths = [5, 1, 18] if site.cpu else [500, 1, 3, 1000]
    batch = site.batch(lengths)
    parts = [site.noise(sum(lengths), heads * width) for _ in range(3)]
    taps = [site.noise(heads * width, 1, 4, dtype=torch.float32) for _ in range(3)]
    past = site.noise(len(lengths), 3, 3 * heads * width)
    got, kept = short_conv(parts, taps, past, batch, heads=heads)
    worst, moved = 0.0, 0.0
    for b, (start, end) in enumerate(batch.bounds()):
        windows = [torch.cat([old, new[start:end]]) for old, new in zip(past[b].chunk(3, -1), parts)]
        moved += float((kept[b] != torch.cat([w[end - start :] for w in windows], -1)).sum())
        for i, window in enumerate(windows):
            total = sum(taps[i][:, 0, j] * window[j : j + end - start].float() for j in range(4))
            want = torch.nn.functional.silu(total).unflatten(-1, (heads, width))
            worst = max(worst, difference(got[i][0, start:end], l2norm(want) if i < 2 else want))
    site.check("short convolution against fp32", worst, 2e-6 if site.cpu else 8e-3)
    site.check("short convolution, kept rows that differ", moved, 0)
    x, gate, weight = (site.noise(1, 70, heads, width) for _ in range(3))
    want = sigmoid_gated(rms_normalise(x, 1e-5) * weight[0, 0, 0].float(), gate.float())
    found = difference(gated(x, gate, weight[0, 0, 0].float(), 1e-5), want)
    site.check("norm and gate against fp32", found, 2e-6 if site.cpu else 6e-3)


def delta_rule(site: Site) -> None:
    """Chunks and single tokens through the library against the torch form in fp32, states too; gates at the bound."""
    linear = site.config.linear_attn_config
    heads, width = linear.num_heads, linear.head_dim
    for name, lengths, at_bound in (
        ("chunks", [20, 1, 5] if site.cpu else [700, 1, 64, 130], False),
        ("chunks at the bound", [20, 2] if site.cpu else [200, 65], True),
        ("single tokens", [1, 1], False),
    ):
        batch = site.batch(lengths)
        shape = (1, sum(lengths), heads, width)
        q, k = (l2norm(site.noise(*shape)).to(site.dtype) for _ in range(2))
        v, f = site.noise(*shape), site.noise(*shape)
        if at_bound:
            f = torch.full_like(f, 50.0)
        beta = torch.sigmoid(site.noise(1, sum(lengths), heads, dtype=torch.float32))
        rate = torch.rand(heads, generator=site.draw, device=site.device)
        bias = site.noise(heads * width, dtype=torch.float32) - 1
        state = site.noise(len(lengths), heads, width, width, dtype=torch.float32)
        kept = state.clone()

        def run():
            return delta.delta_rule(q, k, v, f, beta, rate, bias, linear.gate_lower_bound, state, batch)  # noqa: B023

        got, after = run()
        again, after_again = run()
        g = kda_gate(f, rate, bias, linear.gate_lower_bound)
        outs, states = [], []
        for b, (start, end) in enumerate(batch.bounds()):
            one = [x[:, start:end].float() for x in (q, k, v, g, beta)]
            one[0] = one[0] * width**-0.5
            out, new = kda_chunk(*one, state[b : b + 1], gate_floor=linear.gate_lower_bound)
            outs.append(out)
            states.append(new)
        bound = 2e-5 if site.cpu else 2e-2
        site.check(f"delta rule, {name}, against fp32", difference(got, torch.cat(outs, 1)), bound)
        site.check(f"delta rule, {name}, states", difference(after, torch.cat(states)), bound)
        differing = (again != got).sum() + (after_again != after).sum() + (state != kept).sum()
        site.check(f"delta rule, {name}, again, bits that differ", float(differing), 0)


def blocks(site: Site) -> None:
    """Whole attention blocks: at most four times the error of the torch form, which keeps more in fp32."""
    lengths, starts = ([9, 1, 4], [0, 12, 5]) if site.cpu else ([200, 1, 90], [0, 600, 300])
    batch = site.batch(lengths, starts)
    x = site.noise(1, sum(lengths), site.config.hidden_size)
    for name in ("kda", "mla"):
        block = getattr(site, name)()
        state = site.kda_state(3) if name == "kda" else site.mla_state(3, max(starts) + max(lengths), 0)
        found = {}
        for which in ("triton", "torch", "reference"):
            module, given = (block, x) if which != "reference" else (copy.deepcopy(block).float(), x.float())
            dtype = site.dtype if which != "reference" else torch.float32
            if name == "kda":
                own = KdaState(state.conv.to(dtype), state.recurrent)
            else:
                own = MlaState(state.rows.to(dtype).clone(), state.lengths)
            with form("triton" if which == "triton" else "torch"):
                found[which] = module(given, own, batch)
            del module
        error, plain = (difference(found[which], found["reference"]) for which in ("triton", "torch"))
        site.check(f"{name} block against fp32 (torch form: {plain:.1e})", error, 4 * plain + 2e-5)


CASES = (
    ("latent attention", 5, latent_attention),
    ("convolution and gate", 3, convolution_and_gate),
    ("delta rule", 5, delta_rule),
    ("blocks", 8, blocks),
)
