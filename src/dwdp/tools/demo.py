"""`dwdp demo`: the shipped model with DWDP and with replicated weights, side by side."""

from __future__ import annotations

from typing import Any

from dwdp.executor.request import RequestOutput, SamplingParams
from dwdp.executor.settings import NANO_MODEL, launch_fields, resolve
from dwdp.llm import LLM

PROMPTS = ("123+456=", "900-77=", "45-368=")
MAX_TOKENS = 8
MIB = 1024 * 1024
_ROWS = (
    ("moved_bytes", "weights that DWDP manages, full size"),
    ("stored_bytes", "stored by this rank for all, in whole pages"),
    ("ring_bytes", "expert ring"),
    ("slot_bytes", "dense slots"),
    ("freed_bytes", "freed: managed less this rank's share"),
    ("replicated_bytes", "held whole by every rank"),
)
_HELD = ("stored_bytes", "ring_bytes", "slot_bytes", "replicated_bytes")


def run_demo(*, ranks: int = 2, quiet: bool = False, model: str = NANO_MODEL) -> bool:
    """Runs both and prints completions, hashes and the ledger; -> whether all logits were bitwise equal."""
    spread, spread_reports = _run(model, ranks, replicated=False, quiet=quiet)
    whole, whole_reports = _run(model, ranks, replicated=True, quiet=quiet)
    for with_dwdp, replicated in zip(spread, whole):
        print(f"{with_dwdp.prompt!r} -> {with_dwdp.outputs[0].text!r}")
        print(f"  logits with DWDP  {with_dwdp.outputs[0].logits_sha256}")
        print(f"  logits replicated {replicated.outputs[0].logits_sha256}")
    _print_ledger(spread_reports, whole_reports)
    hashes = [[output.outputs[0].logits_sha256 for output in run] for run in (spread, whole)]
    identical = hashes[0] == hashes[1] and None not in hashes[0]
    print(f"identical: {'yes' if identical else 'no'}")
    return identical


def _run(model: str, ranks: int, *, replicated: bool, quiet: bool) -> tuple[list[RequestOutput], list[dict]]:
    fields = launch_fields(model, None, {"ranks": ranks, "replicated": replicated, "device": "cpu"})
    with LLM.from_launch(resolve(**fields), quiet=quiet) as llm:
        params = SamplingParams(max_tokens=MAX_TOKENS, stop=("\n",))
        return llm.generate(list(PROMPTS), params, logits_sha256=True), llm.report()


def _print_ledger(spread: list[dict[str, Any]], whole: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="memory, MiB")
    table.add_column("")
    for report in spread:
        table.add_column(f"DWDP rank {report['rank']}", justify="right")
    table.add_column("replicated rank 0", justify="right")
    for key, text in _ROWS:
        cells = [report["ledger"][key] / MIB for report in (*spread, whole[0])]
        table.add_row(text, *(f"{cell:.2f}" for cell in cells))
    held = [sum(report["ledger"][key] for key in _HELD) / MIB for report in (*spread, whole[0])]
    table.add_row("in memory, sum", *(f"{cell:.2f}" for cell in held))
    Console().print(table)
