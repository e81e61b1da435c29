"""What bench_experts found, as text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.gpu.experts_rates import HOOKS_LIMIT, HOST_LIMITS
from tests.gpu.experts_site import TRANSFERS

RATE_TARGET = 0.9
WITH_TARGET = ("per_slice", "gather tma", "gather ldst")


def table(found: dict[str, Any]) -> str:
    """found: `rows`, each with its `what`; `skipped` and `failed`, names of cases."""
    rows = found["rows"]
    lines = ["", *_reads(rows), "", *_rates(_of(rows, "rates")), "", *_host(_of(rows, "host")), ""]
    lines += _variants(_of(rows, "variants"))
    if found["skipped"]:
        lines.append("skipped, no time was left: " + "; ".join(found["skipped"]))
    lines.append("FAILED: " + "; ".join(found["failed"]) if found["failed"] else "all checks hold")
    return "\n".join(lines)


def _of(rows: Iterable[dict], what: str) -> list[dict]:
    return [row for row in rows if row["what"] == what]


def _reads(rows: list[dict]) -> Iterable[str]:
    yield f"{'wrong rows with late reads + late copies':<44}" + "".join(f"{name:>13}" for name in TRANSFERS)
    for setup in _of(rows, "set-up"):
        mine = [row for row in rows if row.get("ranks") == setup["ranks"] and row.get("kind") == setup["kind"]]
        cells, read = "", 0
        for transfer in TRANSFERS:
            of_transfer = [row for row in _of(mine, "reads") if row["transfer"] == transfer]
            cells += f"{' + '.join(str(row['wrong']) for row in of_transfer) or '-':>13}"
            read += sum(row["rows"] for row in of_transfer)
        what = f"N={setup['ranks']} {setup['text']}"
        yield f"{what:<44}{cells}  of {read:,} read; {setup['gigabytes']:.1f} GB set up in {setup['seconds']:.1f} s"
        for row in _of(mine, "control"):
            yield f"  control, {row['deaf']} waits for nothing: {row['wrong']:,} wrong"


def _rates(rows: list[dict]) -> Iterable[str]:
    yield f"{'GB/s of one layer, a rank':<34}{'alone':>8}{'ratio':>8}{'at once':>9}{'ratio':>8}  beside"
    for row in rows:
        line = f"{'N={} {}'.format(row['ranks'], row['method']):<34}{row['alone'] / 1e9:>8.1f}"
        line += f"{_ratio(row['ratio'])}{row['at_once'] / 1e9:>9.1f}{_ratio(row['ratio_at_once'])}"
        if row["reference"]:
            line += f"  {row['reference']}"
            if row["reference_at_once"] != row["reference"]:
                line += f"; at once {row['reference_at_once']}"
        if row["method"] in WITH_TARGET:
            missed = min(row["ratio"], row["ratio_at_once"]) < RATE_TARGET
            line += f"  {'MISSED' if missed else 'ok'}, target {RATE_TARGET:.0%}"
        yield line


def _ratio(value: float | None) -> str:
    return f"{'':>8}" if value is None else f"{value:>8.1%}"


def _host(rows: list[dict]) -> Iterable[str]:
    yield f"{'us of the host for one layer of Kimi-K3':<44}{'median':>8}{'p90':>8}{'limit':>8}"
    for row in rows:
        limit = HOST_LIMITS.get(row["transfer"], HOOKS_LIMIT)
        what = "hooks without submission"
        if row["num_ranks"]:
            what = f"{row['transfer']}, N={row['num_ranks']}, {row['descriptors']} descriptors"
        verdict = "ok" if row["median"] <= limit else "MISSED"
        times = "".join(f"{1e6 * value:>8.1f}" for value in (row["median"], row["p90"], limit))
        yield f"{what:<44}{times}  {verdict}"


def _variants(rows: list[dict]) -> Iterable[str]:
    for row in rows:
        shown = row.get("error")
        if shown is None:
            shown = f"{row['bytes_per_second'] / 1e9:>8.1f} GB/s"
            if "median" in row:
                shown += f", {1e6 * row['median']:.1f} us of the host"
        yield f"variant: {row['variant']:<44}{shown}"
