"""Attention's kernels on one GPU at Kimi-K3's widths: `python -m tests.gpu.check_attention --seconds 85`.

Numerics against fp32 or fp64 within bounds decide the exit status; rates stand beside a plain product of the same run,
and one below its target is marked MISSED. Cases that no time is left for are skipped and named. Random weights. The
table comes last. FlashMLA is checked and timed beside our own decode where it is installed; where not, its lines say
so. `--cpu` runs every line with tiny widths in Triton's interpreter, FlashMLA and the library's chunk form replaced by
torch forms. `--tune` lets the library time its configurations and prints what it took, for PINNED in
`src/dwdp/kernels/kda.py`, and does nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys

from tests.gpu.outputs import output_file


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=85)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--json", type=output_file, help="file for the numbers")
    given = parser.parse_args(arguments)
    if given.cpu and given.tune:
        parser.error("--tune times the library's kernels, which need a GPU: not with --cpu")
    if given.cpu:
        os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is made
    os.environ["DWDP_KERNELS"] = "triton"
    import torch

    if not given.cpu and not torch.cuda.is_available():
        print("there is no GPU; --cpu runs in the interpreter", file=sys.stderr)
        return 2
    torch.set_grad_enabled(False)
    try:
        return tune() if given.tune else check(given)
    finally:
        torch.set_grad_enabled(True)


def check(given: argparse.Namespace) -> int:
    from unittest import mock

    import torch
    import triton

    from dwdp.kernels import kda
    from tests.gpu import attention_numerics, attention_rates
    from tests.gpu.attention_site import Site, host_flash_mla, host_library

    site = Site(given.cpu, given.seconds)
    print(f"Python {platform.python_version()}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    with contextlib.ExitStack() as stack:
        if given.cpu:
            stack.enter_context(host_flash_mla())
            stack.enter_context(mock.patch.multiple(kda, operations=host_library, runs_on=lambda x: True))
        library = kda.operations() is not None
        site.row("delta rule of the library", "used" if library else "MISSING: the torch form runs in its place")
        if not library:
            site.failed.append("fla-core cannot be used")
        for name, needed, body in (*attention_numerics.CASES, *attention_rates.CASES):
            if library or body is not attention_numerics.delta_rule:
                site.case(name, needed, body)
    print(f"\n{'what':<66} {site.seconds - site.left():.0f} s of {site.seconds:.0f} s")
    for name, text in site.rows:
        print(f"{name:<66} {text}")
    print("FAILED: " + "; ".join(site.failed) if site.failed else "all checks hold")
    if given.json is not None:
        given.json.write_text(json.dumps({"numbers": site.numbers, "failed": site.failed}, indent=1))
    return 1 if site.failed else 0


def tune() -> int:
    """What the library's own tuning takes for a chunk of 8,192 tokens."""
    import torch
    from triton.runtime.autotuner import Autotuner

    from dwdp.kernels import kda
    from tests.gpu.attention_site import Site

    site = Site(False, 0)
    kda.pin = lambda modules: {}
    block, state = site.kda(), site.kda_state(1)
    for _ in range(2):
        block(site.noise(1, 8192, site.config.hidden_size), state, site.batch([8192]))
    torch.cuda.synchronize()
    for name, module in list(sys.modules.items()):
        if name.startswith(kda.TUNED_MODULES):
            for value in vars(module).values():
                while type(value).__name__ == "Heuristics":
                    value = value.fn
                if isinstance(value, Autotuner) and value.cache:
                    print(f"{value.base_fn.__name__}: {[str(one) for one in value.cache.values()]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
