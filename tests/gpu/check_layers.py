"""Three of the model's layers in a row at Kimi-K3's widths: `python -m tests.gpu.check_layers --seconds 120`.

On one GPU: two KDA layers and one MLA, random bf16 weights and experts of `--format`, over packed new sequences, one
and 64 of equal length. What a forward makes once for all its layers (the packed batch, attention's plan) is not
counted. A row has the milliseconds of the step, those inside the routed experts and the rest ("dense"), model TFLOP/s
of both beside a raw bf16 product of the same loop, the host's milliseconds of launching, and what the allocator had at
most beside weights, input, output and states. A rate below its target is marked MISSED. The exit status is 1 when a
value is not finite, bits differ in a second run, or routed experts take more than 256 MiB. What no time is left for is
skipped and named. `--profile` lists the kernels of a step. `--cpu` runs all of it at tiny widths in the interpreter.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from typing import Any
from unittest import mock

if "--cpu" in sys.argv:  # before a kernel is defined
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
import triton  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.autograd import DeviceType  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from dwdp.kernels import kda  # noqa: E402
from dwdp.model.decoder import DecoderLayer  # noqa: E402
from tests.gpu import layers_site, moe_rates  # noqa: E402
from tests.gpu.attention_site import Site, host_library  # noqa: E402
from tests.gpu.layers_site import NUM_SNAPSHOTS, TINY_SNAPSHOTS, Case, Marks  # noqa: E402
from tests.gpu.moe_cases import K3, TINY  # noqa: E402
from tests.gpu.moe_rates import Timer  # noqa: E402
from tests.gpu.outputs import output_file  # noqa: E402

TOKENS = (8192, 1024, 16384, 2048, 4096)  # in the order in which they are worth their time
TARGET_TOKENS, DENSE_TARGET, ROUTED_TARGET, RATIO_TARGET = 8192, 0.60, 0.45, 1.1
SEQUENCES, CACHED = 64, 2048
WORKSPACE_BYTES = 256 << 20
REPEATS, KERNELS = 7, 15


class Check:
    """The layers of one format, and the cases that are measured on them."""

    def __init__(self, site: Site, layers: list[DecoderLayer], marks: Marks, timer: Timer) -> None:
        self.site, self.layers, self.marks, self.timer = site, layers, marks, timer
        self.sequences = 2 if site.cpu else SEQUENCES
        self.table: list[str] = []

    def inputs(self, tokens: int) -> tuple[Tensor, list[Tensor]]:
        """Running sum and snapshots."""
        hidden, snapshots = self.site.config.hidden_size, TINY_SNAPSHOTS if self.site.cpu else NUM_SNAPSHOTS
        x, *others = (self.site.noise(1, tokens, hidden) for _ in range(1 + snapshots))
        return x, others

    def holds(self, name: str, case: Case) -> tuple[dict[str, float], list[Any]]:
        """Values and bits of a case, which decide the exit status -> what it allocates, in MiB, with the share of the
        experts that it uses; and the calls of routed experts. Warms up."""
        site, marks = self.site, self.marks
        marks.start("keep")
        first, calls = layers_site.step(self.layers, case), marks.kept
        used = [ids.unique().numel() for _, (_, ids, _) in calls]
        if not all(bool(one.isfinite().all()) for one in first):
            site.failed.append(f"{name}: values that are not finite")
        marks.start("memory")
        again = layers_site.step(self.layers, case)
        whole, routed = marks.peak_bytes()
        marks.start("")
        if not all(torch.equal(a, b) for a, b in zip(first, again, strict=True)):
            site.failed.append(f"{name}: other bits in another run")
        if routed > WORKSPACE_BYTES:
            site.failed.append(f"{name}: routed experts take {routed / 2**20:.0f} MiB, more than 256")
        activations = max(0, whole - sum(one.nbytes for one in again))  # again: output and next states
        row = {"activations_mib": activations / 2**20, "routed_mib": routed / 2**20}
        return row | {"experts_used": sum(used) / len(used) / site.config.num_experts}, calls

    def times(self, cases: list[Case], patience: float) -> tuple[list[dict[str, float]], float]:
        """Medians in ms of each case, and FLOP/s of the raw product, all alternating. patience: seconds in all."""
        found: list[dict[str, list[float]]] = [
            {"ms": [], "host_ms": [], "routed_ms": [], "dense_ms": []} for _ in cases
        ]
        raw, host, ends = [], [0.0], time.monotonic() + patience

        def run(case: Case) -> None:
            begun = time.perf_counter()
            layers_site.step(self.layers, case)
            host[0] = time.perf_counter() - begun

        for number in range(1 if self.site.cpu else REPEATS):
            if number >= 2 and time.monotonic() > ends:
                break
            for case, times in zip(cases, found):
                self.marks.start("time")
                whole = self.timer.once(lambda case=case: run(case))
                routed = self.marks.seconds()
                for name, seconds in zip(times, (whole, host[0], routed, whole - routed)):
                    times[name].append(seconds * 1e3)
            self.marks.start("")
            raw.append(self.timer.once(self.timer.raw))
        rate = self.timer.raw_flops * (1 if self.site.cpu else 4) / statistics.median(raw)
        return [{name: statistics.median(one) for name, one in times.items()} for times in found], rate

    def prefill(self, tokens: int, *, profiled: bool = False) -> None:
        """A new sequence beside many that are as many tokens in all."""
        x, snapshots = self.inputs(tokens)
        counts = (1, self.sequences)
        names = [f"{tokens} tokens, {count} sequence{'s' if count > 1 else ''}" for count in counts]
        cases = [Case.of(self.site, x, snapshots, count) for count in counts]
        found = [self.holds(name, case) for name, case in zip(names, cases)]
        medians, raw = self.times(cases, patience=8)
        ratio = medians[1]["ms"] / medians[0]["ms"]
        for name, case, (room, _), row in zip(names, cases, found, medians):
            row |= {"tokens": tokens, "sequences": len(case.batch.lengths), "raw_tflops": raw / 1e12, **room}
            text, missed = f"{row['ms']:9.3f} ms (host {row['host_ms']:7.3f})", []
            for part, flops, target in (
                ("dense", layers_site.dense_flops(self.site, self.layers, case), DENSE_TARGET),
                ("routed", layers_site.routed_flops(self.site, tokens), ROUTED_TARGET),
            ):
                rate = flops / max(row[f"{part}_ms"], 1e-6) * 1e3
                row |= {f"{part}_tflops": rate / 1e12, f"{part}_share": rate / raw}
                text += f", {part} {row[f'{part}_ms']:8.3f} ms {rate / 1e12:4.0f} TFLOP/s {rate / raw:4.0%}"
                if rate / raw < target and tokens == TARGET_TOKENS:
                    missed.append(f"{part} {target:.0%}")
            text += f" of raw {raw / 1e12:.0f}; activations {room['activations_mib']:.0f} MiB, routed "
            text += f"{room['routed_mib']:.0f} MiB"
            if row["sequences"] > 1:
                row["ratio"] = ratio
                text += f"; {ratio:.2f} of one sequence"
                if ratio > RATIO_TARGET and not self.site.cpu:
                    missed.append(f"ratio {RATIO_TARGET}")
            text += "".join(f" MISSED {one}" for one in missed)
            self.site.row(name, text, missed=missed, **row)
        if profiled:
            self.profile(cases[0], found[0][1])

    def decode(self) -> None:
        """One new token each of many sequences behind their cached ones: the weights are read, and little else."""
        cached = 4 if self.site.cpu else CACHED
        x, snapshots = self.inputs(self.sequences)
        case = Case.of(self.site, x, snapshots, self.sequences, before=cached)
        name = f"decode, {self.sequences} sequences behind {cached}"
        room, _ = self.holds(name, case)
        (row,), raw = self.times([case], patience=3)
        dense, routed = (
            sum(p.nbytes for p in layers_site.dense_weights(self.layers)),
            layers_site.expert_bytes(self.layers),
        )
        used = dense + routed * room["experts_used"]
        row |= {"raw_tflops": raw / 1e12, "weights_gb": used / 1e9, "gb_per_s": used / row["ms"] / 1e6, **room}
        parts = {"dense": dense, "routed": used - dense}
        text = f"{row['ms']:9.3f} ms (host {row['host_ms']:7.3f}), {row['gb_per_s']:.0f} GB/s of weights"
        for part, nbytes in parts.items():
            row[f"{part}_gb_per_s"] = nbytes / max(row[f"{part}_ms"], 1e-6) / 1e6
            text += f", {part} {row[f'{part}_ms']:.3f} ms {row[f'{part}_gb_per_s']:.0f} GB/s"
        self.site.row(name, f"{text}; {room['experts_used']:.0%} of experts used", **row)

    def profile(self, case: Case, calls: list[Any]) -> None:
        """Kernels of one step with most device time. Routed experts are run again by themselves, and the rest is what
        is left of the step."""
        name = f"{case.batch.num_tokens} tokens, kernels"
        try:
            whole = self.kernels(lambda: layers_site.step(self.layers, case))
            routed = self.kernels(lambda: [module.forward(*arguments) for module, arguments in calls])
        except Exception as error:  # a machine may not let anybody profile
            self.site.row(name, f"no profile: {type(error).__name__}: {error}")
            return
        dense = {name: (n - routed.get(name, (0, 0))[0], ms - routed.get(name, (0, 0))[1])
                 for name, (n, ms) in whole.items()}  # fmt: skip
        listed = {}
        for part, kernels in (("dense", dense), ("routed", routed)):
            most = sorted(((ms, n, kernel) for kernel, (n, ms) in kernels.items() if n > 0), reverse=True)
            total, launches = sum(ms for ms, _, _ in most), sum(n for _, n, _ in most)
            print(f"{part}: {total:.3f} ms in {launches} launches of {len(most)} kernels")
            for ms, n, kernel in most[:KERNELS]:
                print(f"    {ms:9.3f} ms {n:5} x {kernel[:90]}")
            listed[part] = [{"ms": ms, "count": n, "kernel": kernel} for ms, n, kernel in most[:KERNELS]]
        self.site.row(name, "listed above", **listed)

    def kernels(self, body: Any) -> dict[str, tuple[int, float]]:
        """Name -> launches and ms on the device; operations and their own time on the host."""
        on_host = self.site.cpu
        with profile(activities=[ProfilerActivity.CPU if on_host else ProfilerActivity.CUDA]) as seen:
            body()
            if not on_host:
                torch.cuda.synchronize()
        field = "self_cpu_time_total" if on_host else "self_device_time_total"
        kind = DeviceType.CPU if on_host else DeviceType.CUDA  # the host's calls may carry their kernels' time as well
        found = [one for one in seen.key_averages() if one.device_type == kind]
        return {one.key: (one.count, getattr(one, field) / 1e3) for one in found}


@contextlib.contextmanager
def compiled_ahead(site: Site, format: str):
    """The routed experts' kernels, each pair of tiles in a process, while the block runs."""
    if site.cpu:
        yield
        return
    pairs = moe_rates.pairs_of(format, site.device, swept=False)
    with multiprocessing.get_context("spawn").Pool(len(pairs)) as pool:
        found = pool.starmap_async(moe_rates.warmed, [(format, K3, [pair]) for pair in pairs], chunksize=1)
        yield
        site.row("pairs of tiles compiled", str(sum(found.get(timeout=max(30.0, site.left())))))


def check(given: argparse.Namespace) -> int:
    site = Site(given.cpu, given.seconds)
    site.config = layers_site.layers_config(given.cpu, given.format)
    name = "interpreter" if given.cpu else torch.cuda.get_device_name()
    print(
        f"{name}, Python {platform.python_version()}, torch {torch.__version__}, triton {triton.__version__}",
        flush=True,
    )
    with contextlib.ExitStack() as stack:
        if given.cpu:
            stack.enter_context(mock.patch.multiple(kda, operations=host_library, runs_on=lambda x: True))
        if kda.operations() is None:
            site.failed.append("fla-core cannot be used: KDA is in its torch form")
        tokens = given.tokens or ([2] if given.cpu else TOKENS)
        with compiled_ahead(site, given.format):
            layers = layers_site.build(site, given.format)
            check = Check(site, layers, Marks(site, layers), Timer(TINY if given.cpu else K3, 1))
            dense = sum(p.nbytes for p in layers_site.dense_weights(layers))
            site.row("weights", f"dense {dense / 1e9:.2f} GB, {site.config.num_experts} experts of {given.format} "
                     f"{layers_site.expert_bytes(layers) / 1e9:.2f} GB")  # fmt: skip
            if not given.cpu:  # attention's kernels are compiled meanwhile
                case = Case.of(site, *check.inputs(tokens[0]), 1)
                for layer, state in list(zip(layers, case.states))[1:]:
                    layer.self_attn(case.x, state, case.batch)
                del case, state
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
        first, *others = tokens
        site.case(f"{first} tokens", 5, lambda site: check.prefill(first, profiled=given.profile))
        site.case("decode", 5, lambda site: check.decode())
        for n in others:
            site.case(f"{n} tokens", 5, lambda site, n=n: check.prefill(n))
    print(f"\n{given.format}, {name}: {site.seconds - site.left():.0f} s of {site.seconds:.0f} s")
    for what, text in sorted(
        site.rows, key=lambda row: [int(word) if word.isdigit() else 0 for word in row[0].split()]
    ):
        print(f"{what:<28} {text}")
    print("FAILED: " + "; ".join(site.failed) if site.failed else "all checks hold")
    if given.json is not None:
        given.json.write_text(json.dumps({"numbers": site.numbers, "failed": site.failed}, indent=1))
    return 1 if site.failed else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--format", choices=["mxfp4", "nvfp4", "plain"], default="mxfp4", help="of the routed experts")
    parser.add_argument("--tokens", type=int, nargs="+", help="sizes in the place of 1,024 to 16,384, multiples of 64")
    parser.add_argument("--profile", action="store_true", help="also list the kernels of a step of the first size")
    parser.add_argument("--cpu", action="store_true", help="tiny widths through Triton's interpreter")
    parser.add_argument("--json", type=output_file, help="file for the numbers")
    given = parser.parse_args(arguments)
    multiple = 2 if given.cpu else SEQUENCES
    if any(n < multiple or n % multiple for n in given.tokens or []):
        parser.error(f"--tokens must be multiples of {multiple}")
    os.environ["DWDP_KERNELS"] = "triton"
    if not given.cpu and not torch.cuda.is_available():
        print("there is no GPU; --cpu runs in the interpreter", file=sys.stderr)
        return 2
    torch.set_grad_enabled(False)
    try:
        return check(given)
    finally:
        torch.set_grad_enabled(True)


if __name__ == "__main__":
    sys.exit(main())
