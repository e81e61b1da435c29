"""Kernels of routed experts and other dense parts on a GPU: `python -m tests.gpu.check_moe [--seconds 150]`.

    values  every format beside fp32 within stated bounds; the same bits again, from other addresses, in other batches
    rates   FLOP/s of a full layer's routed experts at Kimi-K3's widths, beside a raw bf16 product; workspace
    sweep   tiles for `kernels/moe.py`, the best ones as lines of its table

One short table comes last. The exit status is 1 when a value was wrong, a workspace too large or a step failed.
`--cpu` runs every line at tiny sizes through Triton's interpreter. Needs torch and triton and nothing of the tests.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

if "--cpu" in sys.argv:  # before a kernel is defined
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402

from tests.gpu import moe_rates  # noqa: E402
from tests.gpu.moe_cases import K3, TINY, Shape, checks, layer, nbytes, release  # noqa: E402
from tests.gpu.moe_rates import Timer  # noqa: E402
from tests.gpu.outputs import output_file  # noqa: E402
from tests.kernels.packs import FORMATS  # noqa: E402

WORKSPACE_MIB = 256
COMPILERS = 12  # processes, each with a context of its own on the GPU
MEASURED = ("mxfp4", "plain", "nvfp4", "fp8")
LATER = {"mxfp4": 60.0, "plain": 30.0}  # seconds that a sweep leaves to what comes behind it
SWEPT_TOKENS = (1024, 2048, 4096, 8192, 16384)


class Run:
    """One run: steps with the time that is left, and what they found."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.shape: Shape = TINY if options.cpu else K3
        self.end = time.monotonic() + options.seconds
        self.rows: list[dict[str, Any]] = []
        self.wrong: list[str] = []

    def left(self) -> float:
        return self.end - time.monotonic()

    def say(self, text: str) -> None:
        print(f"[{self.options.seconds - self.left():6.1f} s] {text}", flush=True)

    def step(self, name: str, call: Callable[[], Any], *, reserve: float = 0.0) -> Any:
        """Runs a step unless time is out; one that fails is listed, and the next goes on."""
        if self.left() < reserve:
            self.say(f"{name}: no time left")
            self.rows.append({"what": "skipped", "step": name})
            return None
        try:
            return call()
        except Exception as error:
            traceback.print_exc()
            self.wrong.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            release()
            return None

    def all(self) -> int:
        options = self.options
        name = torch.cuda.get_device_name() if self.shape.device == "cuda" else "interpreter"
        self.say(f"{name}, torch {torch.__version__}")
        self.step("compiling", self.compile)
        for what, check in checks(self.shape, self.options.formats):
            self.step(what, lambda what=what, check=check: self.check(what, check))
            release()
        if not options.no_rates:
            timer = Timer(self.shape, 1 if options.cpu else 5)
            for format in (one for one in MEASURED if one in options.formats):
                self.step(f"rates of {format}", lambda format=format: self.rates(format, timer), reserve=5)
                release()
            for kind in (moe_rates.projection_rows, moe_rates.small_rows):
                found = self.step(kind.__name__, lambda kind=kind: kind(self.shape, timer), reserve=3)
                self.rows += found or []
                release()
        self.table()
        if options.out:
            options.out.write_text(json.dumps({"rows": self.rows, "wrong": self.wrong}, indent=1))
        return int(bool(self.wrong))

    def compile(self) -> None:
        """Ahead, several at once: kernels are compiled one after the other where they are first called."""
        jobs = []
        for format in self.options.formats:
            pairs = moe_rates.pairs_of(
                format, self.shape.device, swept=not (self.options.no_sweep or self.options.no_rates)
            )
            if self.options.cpu:
                pairs = pairs[:1]
            parts = 1 if self.options.cpu else min(len(pairs), 4)
            jobs += [(format, self.shape, pairs[i::parts]) for i in range(parts)]
        context = multiprocessing.get_context("spawn")
        with context.Pool(1 if self.options.cpu else COMPILERS) as pool:
            found = pool.starmap_async(moe_rates.warmed, jobs, chunksize=1)
            count = sum(found.get(timeout=max(60.0, self.left())))
        self.say(f"{count} pairs of tiles compiled")

    def check(self, what: str, check: Callable[[], tuple[bool, str]]) -> None:
        right, text = check()
        self.say(f"{'ok   ' if right else 'WRONG'} {what}: {text}")
        self.rows.append({"what": "value", "check": what, "right": right, "text": text})
        if not right:
            self.wrong.append(f"{what}: {text}")

    def rates(self, format: str, timer: Timer) -> None:
        experts = layer(format, self.shape)
        taken = nbytes(experts)
        self.say(f"{format}: a layer of {taken / 1e9:.2f} GB")
        for tokens in self.shape.tokens:
            row = moe_rates.routed_row(format, experts, taken, self.shape, tokens, timer)
            self.rows.append(row)
            self.say(
                f"{format} {tokens} tokens: {row['ms']:.3f} ms, {row['tflops']:.0f} TFLOP/s, {row['share']:.2f} of raw "
                f"{row['raw_tflops']:.0f}, {row['gb_per_s']:.0f} GB/s, workspace {row['peak_mib']:.0f} MiB"
            )
            if row["peak_mib"] > WORKSPACE_MIB:
                self.wrong.append(f"{format} {tokens} tokens: workspace of {row['peak_mib']:.0f} MiB")
        tokens = self.shape.tokens[-1]
        listed = self.step(f"parts of {format}", lambda: moe_rates.parts(experts, self.shape, tokens))
        self.say(f"{format} {tokens} tokens, parts: {listed}")
        if not self.options.no_sweep and format in moe_rates.CANDIDATES:
            for tokens in self.shape.tokens[-1:] if self.options.cpu else SWEPT_TOKENS:
                later = 5.0 if self.options.cpu else LATER[format]
                best = self.step(
                    f"sweep of {format}, {tokens} tokens",
                    lambda tokens=tokens, later=later: moe_rates.sweep(
                        format, experts, self.shape, tokens, timer, lambda: self.left() - later
                    ),
                    reserve=later,
                )
                if best:
                    self.rows.append(best)
                    self.say(f"best for {format}, {tokens} tokens: {best['ms']:.3f} ms, {best['share']:.2f} of raw")

    def table(self) -> None:
        def of(what: str) -> list[dict[str, Any]]:
            return [row for row in self.rows if row["what"] == what]

        print("\n== table")
        for row in of("value"):
            print(f"{'ok' if row['right'] else 'WRONG':6}{row['check']}: {row['text'][:200]}")
        for row in of("routed"):
            print(
                f"routed {row['format']:6} {row['tokens']:6} tokens {row['ms']:9.3f} ms {row['tflops']:6.0f} TFLOP/s "
                f"{row['share']:5.2f} of raw {row['raw_tflops']:4.0f} {row['gb_per_s']:5.0f} GB/s "
                f"{row['peak_mib']:4.0f} MiB"
            )
        for row in of("best"):
            print(
                f"best {row['format']} {row['tokens']} tokens, {row['average']:.0f} pairs an expert, "
                f"{row['ms']:.3f} ms, {row['tflops']:.0f} TFLOP/s, {row['share']:.2f}: "
                f"({row['first']}, {row['second']})"
            )
        for row in self.rows:
            if row["what"].startswith("fp8 "):
                print(
                    f"{row['what']} {row['tokens']:6} tokens {row['ms']:.3f} ms {row['tflops']:.0f} TFLOP/s "
                    f"{row['share']:.2f} of raw; torch bf16 {row['bf16_ms']:.3f} ms {row['bf16_tflops']:.0f}"
                )
            elif "gb_per_s" in row and row["what"] != "routed":
                print(f"{row['what']:12} {row['tokens']} tokens {row['ms']:.3f} ms {row['gb_per_s']:.0f} GB/s")
        for row in of("skipped"):
            print(f"skipped: {row['step']}")
        for text in self.wrong:
            print(f"WRONG: {text}")
        print(f"{'FAILED' if self.wrong else 'all right'}, {self.options.seconds - self.left():.0f} s", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150, help="when to stop measuring; values come first")
    parser.add_argument("--no-sweep", action="store_true")
    parser.add_argument("--no-rates", action="store_true")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--cpu", action="store_true", help="tiny sizes through Triton's interpreter")
    parser.add_argument("--out", type=output_file, help="a file for the rows as JSON")
    options = parser.parse_args(arguments)
    if not options.cpu and not torch.cuda.is_available():
        parser.error("there is no GPU here; --cpu runs tiny sizes")
    return Run(options).all()


if __name__ == "__main__":
    sys.exit(main())
