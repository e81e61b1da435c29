"""Expert copies between ranks on one GPU at Kimi-K3's widths: `python -m tests.gpu.bench_experts [--seconds 130]`.

Two, then four processes share the GPU and set expert DWDP up over as many experts as it holds, with every kind of
partition. Measured and checked, with every transfer:

    reads   forwards through the schedule whose every row is compared with its owner's, with late reads and late copies
    rates   a layer's copy beside raw copies of the same bytes, the ranks one after the other and all at once
    host    what the submission of one layer of Kimi-K3 costs, and the hooks without it

One table comes last. The exit status is 1 when a row was wrong or a step failed; a target that is missed is only
marked. `--fake` runs the same at tiny widths on the fake driver of the tests.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dwdp.errors import DwdpError
from dwdp.memory.capability import choose_handle_type
from tests.gpu import ranks
from tests.gpu.experts_rates import Rates, hook_seconds, sm_reference, submission_seconds
from tests.gpu.experts_reads import FORWARDS, ExpertsInMemory, slow_copies, slow_reads, without_waits
from tests.gpu.experts_site import TRANSFERS, Kind, Machine, kinds
from tests.gpu.experts_table import table
from tests.gpu.experts_variants import measure_submissions, measure_variants

START_SECONDS = 40  # for the processes to begin and to end, beside the time that is asked for
DELAY, FAKE_DELAY = 5e-3, 2e-3  # of a late read or copy: more than the host is ahead, less than a copy takes
CONTROL_DELAY = 20e-3


class Bench:
    """One rank's run over groups of several sizes. gate: a barrier of processes, by group size."""

    def __init__(self, site: ranks.Site, options: argparse.Namespace, gates: dict[int, Any], start: float) -> None:
        self.site, self.options, self.gates = site, options, gates
        self.end = start + options.seconds
        self.machine = Machine(site)
        self.experts: ExpertsInMemory | None = None
        self.found: dict[str, Any] = {"device": self.machine.name, "rows": [], "skipped": [], "failed": []}
        self.repeats, self.host_repeats = (1, 3) if site.fake else (5, 30)

    def run(self, sizes: list[int]) -> dict[str, Any]:
        with self.site.group(name="all", timeout_seconds=self.options.seconds + START_SECONDS) as everybody:
            everybody.join({})
            self.say(f"all ranks are there, {self.end - time.monotonic():.0f} s left")
            for number, size in enumerate(sizes):
                if self.site.rank < size:
                    for kind in kinds(size, fake=self.site.fake):
                        self.of_kind(size, kind, first=number == 0)
                everybody.barrier(f"{size} ranks")
        self.machine.close()
        return self.found

    def of_kind(self, size: int, kind: Kind, *, first: bool) -> None:
        """In a group of its own, so that what fails here disturbs no other kind."""
        name, where = f"N={size} {kind.name}", {"ranks": size, "kind": kind.name}
        try:
            with self.site.group(size, name=name) as self.group:
                self.group.join({"device_uuid": self.machine.domain.uuid, "allow_shared_device": True})
                choose_handle_type(self.machine.domain, self.group)
                start = time.monotonic()
                try:
                    taken = self.together(f"{name} set-up", partial(self.keep, kind))
                    if taken is None:
                        return
                    seconds, gigabytes = time.monotonic() - start, sum(taken) / 1e9
                    self.row("set-up", **where, text=str(kind), seconds=seconds, gigabytes=gigabytes)
                    self.reads(name, where)
                    if kind.name == "balanced":
                        self.controls(name, where)
                        self.rates(name, where)
                        if first:
                            self.host()
                finally:
                    experts, self.experts = self.experts, None
                    if experts is not None:
                        experts.close()
                    self.group.barrier("given back")
        except Exception as error:
            traceback.print_exc()
            self.found["failed"].append(f"{name}: {type(error).__name__}: {error}".splitlines()[0])

    def keep(self, kind: Kind) -> int:
        """Bytes that this rank has taken."""
        self.experts = ExpertsInMemory(self.machine, self.group, kind)
        sums = {int(value) for layer in self.experts.expected for value in layer}
        if len(sums) != sum(map(len, self.experts.expected)):
            raise DwdpError("rows that should differ have the same checksum")
        return self.machine.domain.allocated_bytes

    # ---- what is measured ----

    def reads(self, name: str, where: dict) -> None:
        delay = FAKE_DELAY if self.site.fake else DELAY
        rows = FORWARDS * sum(map(len, self.experts.expected))
        for transfer, kind in TRANSFERS.items():
            for read in (slow_reads, slow_copies):
                what = f"{name} {transfer}, {read.__name__.replace('_', ' ')}"
                start = time.monotonic()
                wrong = self.together(what, partial(read, self.experts, kind, delay))
                if wrong is None:
                    continue
                self.row(
                    "reads", **where, transfer=transfer, how=read.__name__, wrong=sum(wrong),
                    rows=rows * self.group.size, seconds=time.monotonic() - start,
                )  # fmt: skip
                if any(wrong):
                    self.found["failed"].append(f"{what}: {wrong} wrong rows by rank")

    def controls(self, name: str, where: dict) -> None:
        for deaf in ("compute", "copy"):
            what = f"{name} control, {deaf} waits for nothing"
            wrong = self.together(what, partial(without_waits, self.experts, deaf, CONTROL_DELAY))
            if wrong is not None:
                self.row("control", **where, deaf=deaf, wrong=sum(wrong))
                if not all(wrong):
                    self.found["failed"].append(f"{what}: no wrong row was found ({wrong} by rank)")

    def rates(self, name: str, where: dict) -> None:
        def measure() -> list[Any]:
            rates = Rates(self.experts, self.gate)
            try:
                found = {}
                for rank in range(self.group.size):
                    self.gate()
                    if rank == self.group.rank:
                        found = rates.measure(self.repeats, together=False)
                self.gate()
                at_once = rates.measure(self.repeats, together=True)
                wanted = self.options.variants and self.group.rank == 0
                return [found, at_once, self.variants(rates) if wanted else []]
            finally:
                rates.close()

        of_ranks = self.together(f"{name} rates", measure)
        if of_ranks is None:
            return
        alone, at_once = (
            {method: statistics.mean(found[i][method] for found in of_ranks) for method in of_ranks[0][i]}
            for i in range(2)
        )
        for variant in of_ranks[0][2]:
            self.row("variants", **where, **variant)
            if variant.get("wrong"):
                self.found["failed"].append(f"{name} {variant['variant']}: {variant['wrong']} wrong rows")
        references = (sm_reference(alone), sm_reference(at_once))
        for method in alone:
            raw = ("raw cuMemcpyAsync",) * 2
            reference = references if method.startswith("gather") else raw if method in TRANSFERS else (None, None)
            self.row(
                "rates", **where, method=method, alone=alone[method], at_once=at_once[method],
                reference=reference[0], reference_at_once=reference[1],
                ratio=reference[0] and alone[method] / alone[reference[0]],
                ratio_at_once=reference[1] and at_once[method] / at_once[reference[1]],
            )  # fmt: skip

    def variants(self, rates: Rates) -> list[dict]:
        return measure_variants(rates, self.repeats) + measure_submissions(rates, self.host_repeats)

    def host(self) -> None:
        def on_rank_0(measure: Callable[[], Any]) -> Callable[[], Any]:
            return measure if self.group.rank == 0 else lambda: None

        for num_ranks in (8, 16):
            for transfer in TRANSFERS:
                what = f"host cost of {transfer}, K3 at N={num_ranks}"
                cost = partial(submission_seconds, self.experts, transfer, num_ranks, self.host_repeats)
                found = self.together(what, on_rank_0(cost))
                if found is not None:
                    self.row("host", transfer=transfer, num_ranks=num_ranks, **found[0])
        hooks = on_rank_0(lambda: hook_seconds(self.machine, self.host_repeats))
        found = self.together("host cost of the hooks", hooks)
        if found is not None:
            self.row("host", transfer="hooks", num_ranks=None, **found[0])

    # ---- all ranks alike ----

    def together(self, what: str, body: Callable[[], Any]) -> list[Any] | None:
        """What body() gave on each rank, or None where it failed on one or where no time is left; the same for all."""
        if not self.group.allgather_object("time is left", time.monotonic() < self.end)[0]:
            self.found["skipped"].append(what)
            return None
        value = error = None
        start = time.monotonic()
        try:
            value = body()
        except Exception as failure:
            traceback.print_exc()
            error = f"{type(failure).__name__}: {failure}".splitlines()[0]
            self.gates[self.group.size].abort()  # the others need not wait there
        answers = self.group.allgather_object("outcome", [value, error])
        errors = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(answers) if error is not None]
        self.say(f"{what}: {time.monotonic() - start:.2f} s {'; '.join(errors)}")
        if not errors:
            return [value for value, _ in answers]
        if self.group.rank == 0:
            self.gates[self.group.size].reset()
        self.group.barrier("the gate is there again")
        self.found["failed"] += [f"{what}: {error}" for error in errors]
        return None

    def gate(self) -> None:
        self.gates[self.group.size].wait(60)

    def row(self, what: str, **values: Any) -> None:
        self.found["rows"].append({"what": what, **values})

    def say(self, text: str) -> None:
        if self.site.rank == 0:
            print(f"  {text}", flush=True)


def measure(site: ranks.Site, options: argparse.Namespace, gates: dict[int, Any], start: float) -> dict[str, Any]:
    """One rank's run; rank 0 has what all found."""
    bench = Bench(site, options, gates, start)
    try:
        return bench.run(sorted(gates))
    except BaseException:
        if site.rank == 0:
            print(table(bench.found), flush=True)
        raise


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", help="group sizes, such as 2,4")
    parser.add_argument("--seconds", type=float, default=130, help="no case begins later")
    parser.add_argument("--fake", action="store_true", help="tiny widths on the fake driver")
    parser.add_argument("--variants", action="store_true", help="other kernels and submissions, too")
    parser.add_argument("--json", default="", metavar="FILE", help="writes what was found")
    options = parser.parse_args(arguments)
    if not options.fake and not torch.cuda.is_available():
        raise DwdpError("there is no GPU; --fake runs on the fake driver")
    start = time.monotonic()
    context = multiprocessing.get_context("spawn")
    gates = {size: context.Barrier(size) for size in sorted({int(size) for size in options.ranks.split(",")})}
    limit = options.seconds + START_SECONDS
    found = ranks.run(measure, max(gates), options, gates, start, fake=options.fake, seconds=limit)[0]
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))
    print(table(found))
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
