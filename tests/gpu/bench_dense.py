"""Dense DWDP at Kimi-K3's full width on one GPU that two ranks share: `python -m tests.gpu.bench_dense`.

Bytes, equality and verification are checks, which decide the exit status. Figures that a target is missed by are marked
MISSED. `--fake` runs everything with tiny widths on the fake driver of the tests.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from dwdp.errors import DwdpError
from tests.gpu import dense_cases, dense_forwards
from tests.gpu.dense_bench import Bench
from tests.gpu.dense_models import Checkpoint, config_dict
from tests.gpu.ranks import Site, run

RANKS = 2
CASES = (*dense_cases.CASES, *dense_forwards.CASES)


def measure(site: Site, options: dict[str, Any], started: float) -> dict[str, Any]:
    """All cases on one rank -> its rows, numbers and failed checks."""
    logging.getLogger("dwdp").setLevel(logging.ERROR)
    bench = Bench(site, options, started)
    bench.case("start", 0, lambda bench, meet: bench.warm_up(meet))
    for name, seconds, body in CASES:
        if options["only"] in ("", name):
            bench.case(name, 0 if bench.fake else seconds, body)
    return {"rows": bench.rows, "numbers": bench.numbers, "failed": bench.failed}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=150, help="cases that no time is left for are skipped")
    parser.add_argument("--layers", type=int, default=0, help="of the set-up's model; 0: as many as fit")
    parser.add_argument("--only", default="", choices=[name for name, _, _ in CASES], help="this case alone")
    parser.add_argument("--fake", action="store_true")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    given = parser.parse_args(arguments)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # the ranks share one GPU also where there are more
    if not given.fake and not torch.cuda.is_available():
        raise DwdpError("there is no GPU; --fake runs on the fake driver")
    started = time.time()
    checkpoint = Checkpoint(config_dict(dense_cases.CAPPED_LAYERS[given.fake], fake=given.fake, router=False))
    options = {key: getattr(given, key) for key in ("seconds", "layers", "fake", "only")}
    options["checkpoint"] = str(checkpoint.folder)
    if given.only in ("", "capped"):
        checkpoint.start()
    try:
        found = run(measure, RANKS, options, started, fake=given.fake, seconds=given.seconds + 60)
    finally:
        checkpoint.remove()
    failed = [text for of_rank in found.values() for text in of_rank["failed"]]
    print(f"\n{'what':<52} rank 0 of {RANKS}, {time.time() - started:.0f} s in all")
    for name, value, verdict in found[0]["rows"]:
        print(f"{name:<52} {verdict:<6} {value[:200]}")
    print("FAILED: " + "; ".join(failed) if failed else "all checks hold")
    if given.json is not None:
        given.json.write_text(json.dumps({"ranks": found, "failed": failed}, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
