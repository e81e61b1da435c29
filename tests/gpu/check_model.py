"""The whole model with kernels on, on one GPU: `python -m tests.gpu.check_model --seconds 240 --data test.jsonl`.

    numerics  bf16 and every packed format beside an fp32 oracle, packed batches beside single ones, and that the
              kernels did run
    memory    what ranks that share the GPU hold of each format is what `dwdp plan` says; what a forward takes on top
    identity  greedy answers to GSM8K's questions, DWDP on and replicated, by `examples/gsm8k_identity.py`

Each part may be asked for with `--only`. All processes have DWDP_KERNELS=triton. `--cpu` runs every part with host
memory, fewer tokens and Triton's interpreter or the torch form. A short table comes last; the exit status is 1 when
something was wrong, failed or had no time left.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from tests.gpu.outputs import output_file

PARTS = ("numerics", "memory", "identity")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240, help="cases that would not end before it are not begun")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--data", type=Path, help="GSM8K's test.jsonl; without it the identity part is left out")
    parser.add_argument("--json", type=output_file, help="a file for the rows")
    parser.add_argument("--cpu", action="store_true", help="host memory, tiny sizes")
    given = parser.parse_args(arguments)
    parts = [part.strip() for part in given.only.split(",")]
    if not set(parts) <= set(PARTS):
        parser.error(f"--only takes {', '.join(PARTS)}, not {given.only}")
    if given.cpu:
        os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is defined
    os.environ["DWDP_KERNELS"] = "triton"  # rank processes inherit it
    import torch

    from tests.gpu.model_site import Site

    if not given.cpu and not torch.cuda.is_available():
        parser.error("there is no GPU here; --cpu runs on the host")
    with tempfile.TemporaryDirectory(prefix="dwdp-check-") as folders, torch.no_grad():
        site = Site(given.cpu, given.seconds, Path(folders), given.data)
        site.note("machine", f"{'host' if given.cpu else torch.cuda.get_device_name()}, torch {torch.__version__}")
        for part in PARTS:
            if part in parts:
                run(site, part)
    print("\n== table")
    for row in site.rows:
        print(f"{row['verdict']:5} {row['name']}: {row['text'][:240]}")
    print(f"{'FAILED' if site.failed else 'all right'}, {site.seconds - site.left():.0f} s", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps({"rows": site.rows, "failed": site.failed}, indent=1))
    return int(bool(site.failed))


def run(site, part: str) -> None:
    """Imported late, kernels are defined for the interpreter or for a GPU when they are."""
    if part == "numerics":
        from tests.gpu import model_numerics as module
    elif part == "memory":
        from tests.gpu import model_memory as module
    else:
        from tests.gpu import model_identity as module
    for name, needed, body in module.cases(site):
        site.case(name, needed, body)


if __name__ == "__main__":
    sys.exit(main())
