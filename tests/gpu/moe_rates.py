"""Times of `check_moe`: routed experts, projections, kernels over rows, each beside a raw product of its run.

Experts see tokens and not sequences: one sequence of 1,024 tokens and 64 of 16 are one case, and 64 tokens are a step
of 64 sequences.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from dwdp.kernels import activation, formats, moe, product, rows
from dwdp.kernels.product import Tile
from tests.gpu.moe_cases import BETA, LINEAR_BETA, Shape, inputs
from tests.kernels.packs import packed

Row = dict[str, Any]

# What a sweep tries, (tokens, rows, step, warps, stages, resident), for the first and for the second product.
PACKED_FIRST = (
    (16, 128, 128, 4, 4, 2), (32, 64, 128, 4, 4, 2), (32, 128, 128, 4, 3, 2), (32, 128, 128, 8, 4, 1),
    (64, 64, 128, 4, 3, 2), (64, 128, 128, 4, 3, 2), (64, 128, 128, 8, 4, 1),
    (128, 64, 128, 4, 2, 2), (128, 128, 128, 8, 2, 1), (128, 128, 128, 8, 3, 1), (256, 64, 128, 8, 2, 1),
)  # fmt: skip
PACKED_SECOND = (
    (16, 128, 128, 4, 5, 2), (32, 128, 128, 4, 4, 2), (32, 256, 128, 8, 4, 1),
    (64, 128, 128, 4, 3, 2), (64, 256, 128, 8, 4, 1),
    (128, 128, 128, 4, 2, 2), (128, 256, 128, 8, 2, 1), (128, 256, 128, 8, 3, 1), (256, 128, 128, 8, 2, 1),
)  # fmt: skip
PLAIN_FIRST = (
    (32, 64, 64, 4, 4, 2), (64, 64, 64, 4, 4, 2), (64, 128, 64, 8, 4, 1), (128, 64, 64, 4, 3, 2),
    (128, 128, 64, 8, 3, 1), (128, 128, 64, 8, 4, 1), (256, 64, 64, 8, 3, 1),
)  # fmt: skip
PLAIN_SECOND = (
    (32, 128, 64, 4, 4, 2), (64, 128, 64, 4, 4, 2), (64, 256, 64, 8, 4, 1), (128, 128, 64, 4, 3, 2),
    (128, 128, 64, 8, 4, 1), (128, 256, 64, 8, 3, 1), (128, 256, 64, 8, 4, 1), (256, 128, 64, 8, 4, 1),
)  # fmt: skip
_REST_16 = Tile(16, 128, 128, 8, 4, 2)
_REST_32 = Tile(32, 128, 128, 8, 4, 2)
LANES = (
    _REST_16, Tile(16, 64, 128, 4, 4, 4), _REST_32,
    Tile(64, 128, 128, 8, 3, 2), Tile(64, 128, 128, 8, 3, 2, _REST_16), Tile(64, 128, 128, 8, 3, 2, _REST_32),
    Tile(128, 128, 128, 8, 4), Tile(128, 128, 128, 8, 4, 1, _REST_32), Tile(128, 128, 128, 8, 3, 1, _REST_32),
)  # fmt: skip
CANDIDATES = {"mxfp4": (LANES, LANES), "plain": (PLAIN_FIRST, PLAIN_SECOND)}


def tile(numbers: Sequence[int] | Tile) -> Tile:
    return numbers if isinstance(numbers, Tile) else Tile(*numbers)


def fitting(candidates: Sequence[Sequence[int] | Tile], average: float) -> list[Tile]:
    """Those whose tokens are not far from the average of pairs an expert."""
    tiles = [tile(numbers) for numbers in candidates]
    return [one for one in tiles if average / 4 <= one.tokens <= max(32, 2 * average)]


class Timer:
    """Seconds of calls on a device. repeats: of each arm, alternating, behind one that is not counted."""

    def __init__(self, shape: Shape, repeats: int) -> None:
        self.cuda, self.repeats = shape.device == "cuda", repeats
        size = 8192 if self.cuda else 64
        self.a, self.b = (torch.randn(size, size, device=shape.device).bfloat16() for _ in range(2))
        self.raw_flops = 2 * size**3

    def once(self, call: Callable[[], object]) -> float:
        if not self.cuda:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        before, behind = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        call()
        behind.record()
        behind.synchronize()
        return before.elapsed_time(behind) / 1e3

    def raw(self) -> None:
        for _ in range(4 if self.cuda else 1):
            torch.mm(self.a, self.b)

    def arms(self, *calls: Callable[[], object]) -> tuple[list[float], float]:
        """Medians of the calls, and the rate of the raw product (FLOP/s), all alternating."""
        found: list[list[float]] = [[] for _ in (*calls, self.raw)]
        for number in range(self.repeats + 1):
            for times, call in zip(found, (*calls, self.raw)):
                seconds = self.once(call)
                if number:
                    times.append(seconds)
        *medians, raw = (statistics.median(times) for times in found)
        return medians, self.raw_flops * (4 if self.cuda else 1) / raw

    def seconds(self, call: Callable[[], object]) -> float:
        return self.arms(call)[0][0]


def routed_flops(shape: Shape, tokens: int) -> int:
    return 2 * tokens * shape.top_k * 3 * shape.inter * shape.width


def routed_row(format: str, experts: moe.Experts, weight_bytes: int, shape: Shape, tokens: int, timer: Timer) -> Row:
    """Time of one layer's routed experts and what the allocator had at most beside its input and result."""
    x, ids, weights = inputs(shape, tokens, shape.experts)
    peak = 0
    if timer.cuda:
        moe.routed(x, ids, weights, experts)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        total = moe.routed(x, ids, weights, experts)
        peak = torch.cuda.max_memory_allocated() - before - total.nbytes
        del total
    (seconds,), raw = timer.arms(lambda: moe.routed(x, ids, weights, experts))
    used = weight_bytes * min(1.0, ids.unique().numel() / shape.experts)
    flops = routed_flops(shape, tokens) / seconds
    return {
        "what": "routed", "format": format, "tokens": tokens, "ms": seconds * 1e3, "tflops": flops / 1e12,
        "raw_tflops": raw / 1e12, "share": flops / raw, "gb_per_s": used / seconds / 1e9, "peak_mib": peak / 2**20,
    }  # fmt: skip


def parts(experts: moe.Experts, shape: Shape, tokens: int) -> str:
    """The kernels of one call and their milliseconds, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    x, ids, weights = inputs(shape, tokens, shape.experts)
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if shape.device == "cuda" else [])
    try:
        with profile(activities=kinds) as seen:
            moe.routed(x, ids, weights, experts)
            if shape.device == "cuda":
                torch.cuda.synchronize()
    except Exception as error:  # a machine may not let anybody profile
        return f"{type(error).__name__}: {error}"
    times = [(getattr(one, "self_device_time_total", 0) / 1e3, one.count, one.key) for one in seen.key_averages()]
    listed = sorted(times, reverse=True)[:7]
    return "; ".join(f"{name[:44]} x{count} {ms:.2f} ms" for ms, count, name in listed)


def sweep(format: str, experts: moe.Experts, shape: Shape, tokens: int, timer: Timer, left: Callable[[], float]) -> Row:
    """The best tiles for a number of tokens: the first product's with the second as it is, then the second's."""
    x, ids, weights = inputs(shape, tokens, shape.experts)
    quick = Timer.__new__(Timer)
    quick.__dict__ |= timer.__dict__ | {"repeats": 3 if timer.cuda else 1}
    average = ids.numel() / shape.experts
    best = list(moe.tiles_of(experts, ids.numel(), x.device))
    tried: list[tuple[float, str]] = []
    for place, candidates in enumerate(CANDIDATES[format]):
        times = []
        for one in [best[place], *fitting(candidates, average)]:
            if left() < 0:
                break
            tiles = tuple(best[:place] + [one] + best[place + 1 :])
            try:
                seconds = quick.seconds(lambda tiles=tiles: moe.routed(x, ids, weights, experts, tiles=tiles))
            except Exception as error:  # a tile may need more than the GPU has
                tried.append((0.0, f"{'first' if place == 0 else 'second'} {one}: {type(error).__name__}"))
                continue
            times.append((seconds, one))
            tried.append((seconds, f"{'first' if place == 0 else 'second'} {short(one)} {seconds * 1e3:.3f} ms"))
        if times:
            best[place] = min(times, key=lambda found: found[0])[1]
    for _, text in tried:
        print(f"    {format} {tokens} tokens: {text}", flush=True)
    (seconds,), raw = timer.arms(lambda: moe.routed(x, ids, weights, experts, tiles=tuple(best)))
    flops = routed_flops(shape, tokens) / seconds
    return {
        "what": "best", "format": format, "tokens": tokens, "average": average, "ms": seconds * 1e3,
        "tflops": flops / 1e12, "share": flops / raw, "first": short(best[0]), "second": short(best[1]),
    }  # fmt: skip


def short(one: Tile) -> str:
    text = f"Tile({one.tokens}, {one.rows}, {one.step}, warps={one.warps}, stages={one.stages}"
    text += f", resident={one.resident}" if one.resident > 1 else ""
    return text + (f", rest={short(one.rest)})" if one.rest else ")")


def projection_rows(shape: Shape, timer: Timer) -> list[Row]:
    """FP8 projections beside the same product of bf16 weights by torch."""
    found = []
    for (n, k), tokens in itertools.product((shape.projection, shape.projection[::-1]), shape.tokens[1::2]):
        k += -k % 8
        stack, wide, _ = packed("fp8", 1, n, k, device=shape.device)
        x = torch.randn(tokens, k, device=shape.device).bfloat16()
        (fp8, bf16), raw = timer.arms(
            lambda x=x, stack=stack: product.linear(x, stack), lambda x=x, wide=wide: F.linear(x, wide[0])
        )
        flops = 2 * tokens * n * k
        found.append({
            "what": f"fp8 [{n}, {k}]", "tokens": tokens, "ms": fp8 * 1e3, "bf16_ms": bf16 * 1e3,
            "tflops": flops / fp8 / 1e12, "bf16_tflops": flops / bf16 / 1e12, "share": flops / fp8 / raw,
        })  # fmt: skip
    return found


def small_rows(shape: Shape, timer: Timer) -> list[Row]:
    """Router, norm, mix and activation at the largest number of tokens: time, and bytes moved a second."""
    tokens, hidden = shape.tokens[-1], shape.hidden
    x = [torch.randn(tokens, hidden, device=shape.device).bfloat16() for _ in range(9)]
    weight = torch.ones(hidden, device=shape.device).bfloat16()
    router = (torch.randn(shape.experts, hidden, device=shape.device) * hidden**-0.5).bfloat16()
    copy = torch.empty_like(x[0])
    stack = formats.weights("plain", router[None])
    one = x[0].nbytes
    cases: list[tuple[str, Callable[[], object], int]] = [
        ("copy", lambda: copy.copy_(x[0]), 2 * one),
        ("norm", lambda: rows.rms_norm(x[0], weight, 1e-5), 2 * one),
        ("mix of 9", lambda: rows.residual_mix(x, weight, weight, 1e-5), 10 * one),
        ("activation", lambda: activation.gated_activation(x[0], x[1], BETA, LINEAR_BETA), 3 * one),
        ("router", lambda: product.linear(x[0], stack, sigmoid=True), one),
    ]
    return [
        {"what": name, "tokens": tokens, "ms": seconds * 1e3, "gb_per_s": moved / seconds / 1e9}
        for name, call, moved in cases
        for seconds in [timer.seconds(call)]
    ]


def warmed(format: str, shape: Shape, tiles: Sequence[tuple[Tile, Tile]]) -> int:
    """Compiles a format's kernels for these pairs of tiles into the cache on disk: arguments are as those of a layer in
    all that a kernel is compiled for. Returns how many pairs there were."""
    few = replace(shape, experts=shape.few)
    w13, _, _ = packed(format, few.experts, 2 * few.inter, few.width, parts=2, device=few.device, decode=False)
    w2, _, _ = packed(format, few.experts, few.width, few.inter, device=few.device, decode=False)
    experts = moe.Experts(w13, w2, 0, few.experts, BETA, LINEAR_BETA)
    x, ids, weights = inputs(few, 8, few.experts)
    for pair in tiles:
        try:
            moe.routed(x, ids, weights, experts, tiles=pair)
        except Exception as error:
            print(f"    {format} {pair}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
    return len(tiles)


def pairs_of(format: str, device: str, *, swept: bool) -> list[tuple[Tile, Tile]]:
    """All tiles that a run of a format needs, two at a time."""
    firsts = [row[1] for row in moe.tile_table(format, device)]
    seconds = [row[2] for row in moe.tile_table(format, device)]
    if swept and format in CANDIDATES:
        firsts += [tile(numbers) for numbers in CANDIDATES[format][0]]
        seconds += [tile(numbers) for numbers in CANDIDATES[format][1]]
    firsts, seconds = list(dict.fromkeys(firsts)), list(dict.fromkeys(seconds))
    count = max(len(firsts), len(seconds))
    return [(firsts[i % len(firsts)], seconds[i % len(seconds)]) for i in range(count)]
