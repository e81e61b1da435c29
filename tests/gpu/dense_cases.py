"""Set-up of dense DWDP at full width: what it moves, takes, frees and costs, whole and into a GPU with little room."""

from __future__ import annotations

import bisect
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from dwdp.executor.create import RankExecutor
from dwdp.runtime.dense_manager import DenseDwdpManager
from dwdp.runtime.setup_dense import DenseSetup
from tests.gpu.dense_bench import CACHES, GIB, Bench
from tests.gpu.dense_models import (
    config_dict,
    config_folder,
    expert_bytes,
    plan_of,
    wait_for,
    weights_made_on_device,
)

GRANULARITY = 2 << 20
MOST_BYTES = 125 * 10**9  # of both ranks together
LEFT_FREE = 5 * GIB
MOST_LAYERS = 92
FAKE_LAYERS = 5
PHASES = ("_p1_compare", "_p2_write_rows", "_p3_map_peers", "_p4_verify", "_p5_repoint", "_p6_drop_originals")
CAPPED_LAYERS = {False: 9, True: 4}  # fake or not; 10.5 GB in bf16


def close_to(value: float, expected: float, share: float = 0.02) -> bool:
    return abs(value - expected) <= share * abs(expected)


def layers_that_fit(bench: Bench, meet) -> int:
    """Most layers whose weights a rank can hold whole beside its row of them and its slots; the same on every rank."""
    if bench.options["layers"]:
        return bench.options["layers"]
    if bench.fake:
        return FAKE_LAYERS
    free = torch.cuda.mem_get_info()[0]
    room = min(MOST_BYTES, meet.allgather_object("free", free)[0] - LEFT_FREE) // bench.site.size

    def needed(layers: int) -> int:
        config = config_dict(layers, fake=False)
        plan = plan_of(config, {}, GRANULARITY)
        return plan.moved_bytes + plan.held_bytes(0) + expert_bytes(config)

    return max(1, bisect.bisect_right(range(1, MOST_LAYERS + 1), room, key=needed))


@contextlib.contextmanager
def measured_setup(bench: Bench, meet) -> Iterator[dict[str, Any]]:
    """What dense set-up takes of ranks that are built inside: seconds, in all and by phase, and bytes."""
    found: dict[str, Any] = {"phases": {}}
    real = DenseDwdpManager.setup

    def timed(phase: str, work):
        def wrapped(*args):
            bench.sync()
            start = time.perf_counter()
            try:
                return work(*args)
            finally:
                bench.sync()
                found["phases"][phase[1:3].upper()] = time.perf_counter() - start

        return wrapped

    def setup(manager, model, **resources):
        domain = resources["domain"]
        before, own = bench.used(meet, model, domain), domain.allocated_bytes
        if not bench.fake:
            torch.cuda.reset_peak_memory_stats()
            found["whole"] = torch.cuda.memory_allocated()
        start = time.perf_counter()
        report = real(manager, model, **resources)
        bench.sync()
        found["seconds"] = time.perf_counter() - start
        found["taken"] = domain.allocated_bytes - own
        if not bench.fake:
            found["peak"] = torch.cuda.max_memory_allocated() + found["taken"]
        found["gain"] = (before - bench.used(meet, model, domain)) / bench.site.size
        return report

    with contextlib.ExitStack() as patches:
        for phase in PHASES:
            patches.enter_context(mock.patch.object(DenseSetup, phase, timed(phase, getattr(DenseSetup, phase))))
        patches.enter_context(mock.patch.object(DenseDwdpManager, "setup", setup))
        yield found


def check_bytes(bench: Bench, rank: RankExecutor, config: dict) -> dict[str, Any]:
    """Set-up's report, which must be the plan's arithmetic."""
    report = rank.manager.report["dense"]
    plan = plan_of(config, bench.dense, rank.domain.granularity)
    own = plan.rank(rank.rank)
    expected = {"moved": plan.moved_bytes, "stored": own.stored_bytes, "slot": own.slot_bytes}
    got = {key: report[f"{key}_bytes"] for key in expected}
    shown = ", ".join(f"{key} {value:,}" for key, value in got.items())
    bench.check("moved, stored, slots as `dwdp plan --dense`", got == expected, shown, **got)
    whole = rank.report()["ledger"]["replicated_bytes"]
    bench.check("held whole as planned", whole == plan.replicated_bytes, f"{whole:,}", replicated=whole)
    layers = (report["status"], report["covered_layers"], report["leaks"])
    right = layers == ("committed", config["num_hidden_layers"], 0)
    bench.check("committed, every layer verified (P4, P5), no leak", right, f"{layers[1]} layers")
    return report


def attached_setup(bench: Bench, meet) -> None:
    """As many layers as fit, whole on both ranks first; then the ledger against what the GPU says."""
    config = config_dict(layers_that_fit(bench, meet), fake=bench.fake)
    start = time.perf_counter()
    with config_folder(config) as folder, measured_setup(bench, meet) as found:
        with weights_made_on_device(), bench.rank(folder, {}) as rank:
            bench.say("a rank built, weights made, all set up", f"{time.perf_counter() - start:.2f} s")
            report = check_bytes(bench, rank, config)
            memory_of_setup(bench, report, found)
            times_of_setup(bench, meet, report["moved_bytes"], found)
            ledger_and_gpu(bench, meet, rank)
    del rank
    back = bench.used(meet) - bench.base["used"]
    bench.check("all memory given back", back < CACHES, f"{back:,} bytes more than before", back=back)


def memory_of_setup(bench: Bench, report: dict[str, Any], found: dict[str, Any]) -> None:
    moved, rows, slots = (report[f"{key}_bytes"] for key in ("moved", "stored", "slot"))
    bench.check("rows and slots are what the domain took", found["taken"] == rows + slots, f"{found['taken']:,}")
    gain, expected = found["gain"], moved - rows - slots
    shown = f"{gain / 1e9:.3f} GB of {expected / 1e9:.3f} GB (moved - stored - slots)"
    bench.target("gain in free memory a rank", close_to(gain, expected), shown, gain=gain, expected_gain=expected)
    if not bench.fake:
        limit = found["whole"] + rows + slots
        shown = f"{found['peak'] / 1e9:.3f} GB of {limit / 1e9:.3f} GB (whole + row + slots)"
        bench.target("peak in set-up", found["peak"] <= limit, shown, peak=found["peak"], peak_limit=limit)


def times_of_setup(bench: Bench, meet, moved: int, found: dict[str, Any]) -> None:
    plain = bench.plain_pass(meet, moved)
    phases = ", ".join(f"{name} {seconds:.3f}" for name, seconds in found["phases"].items())
    times = found["seconds"] / plain
    shown = f"{found['seconds']:.3f} s ({phases}) = {times:.1f} plain passes of {plain:.3f} s"
    bench.say("seconds of dense set-up", shown, seconds=found["seconds"], phases=found["phases"], plain_pass=plain)


def ledger_and_gpu(bench: Bench, meet, rank: RankExecutor) -> None:
    """The total that a rank reports against the GPU's own figure less the constant of contexts and kernels."""
    used = bench.used(meet, rank.model, rank.domain) - bench.base["used"] + bench.base["torch"]
    report = rank.report()
    ledger, held = report["ledger"], report["memory"]
    keys = ("stored_bytes", "ring_bytes", "slot_bytes")
    own = sum(ledger[key] for key in keys) == held["domain_bytes"]
    bench.check("stored + ring + slots are the domain's bytes", own, f"{held['domain_bytes']:,}")
    total = sum(meet.allgather_object("ledgers", held["total_bytes"])) / bench.site.size
    measured = used / bench.site.size
    shown = f"{total / 1e9:.3f} GB, the device says {measured / 1e9:.3f} GB (mean of ranks, less the constant)"
    bench.target("ledger's total against device memory", close_to(total, measured), shown, ledger=total, gpu=measured)
    now, before = bench.nvml_bytes(), bench.base["nvml"]
    if now is None or before is None:
        bench.say("NVML's figure of the process", "none (it does not know this process); the device's total was used")
        return
    of_process, total = now - before + bench.base["own torch"], held["total_bytes"]
    shown = f"{total / 1e9:.3f} GB, NVML {of_process / 1e9:.3f} GB"
    bench.target("ledger's total against NVML's process", close_to(total, of_process), shown, nvml=of_process)


def sharded_under_a_cap(bench: Bench, meet) -> None:
    """A GPU with less room than both ranks' whole weights: `load: sharded` starts, `load: whole` fails cleanly."""
    config = config_dict(CAPPED_LAYERS[bench.fake], fake=bench.fake, router=False)
    plan = plan_of(config, bench.dense, 4096 if bench.fake else GRANULARITY)
    own = plan.rank(0).nbytes
    experts = expert_bytes(config)
    whole = 2 * (plan.moved_bytes + plan.replicated_bytes + experts)
    sharded = 2 * (plan.held_bytes(0) + experts)
    cap = (whole + sharded) // 2
    if not bench.fake:  # tiny weights fill less than the rounding of their rows
        shown = f"{whole / 1e9:.2f} GB whole, {sharded / 1e9:.2f} GB sharded; {cap / 1e9:.2f} GB are free"
        bench.check("both ranks need", sharded < cap < whole, shown)
    folder = Path(bench.options["checkpoint"])
    wait_for(folder, 60)
    with bench.ballast(meet, cap, of_fake=2 * own + (1 << 20)):
        start = time.perf_counter()
        with bench.rank(folder, {"load": "sharded"}) as rank:
            bench.say("load: sharded starts", f"{time.perf_counter() - start:.2f} s, loading too")
            check_bytes(bench, rank, config)
        del rank
    # What the fake's GPU does not hold of torch's weights is taken off the room that it leaves.
    with bench.ballast(meet, cap, of_fake=own - 1):
        before = bench.used(meet)
        error = whole_fails(bench, folder)
        errors = meet.allgather_object("errors", error)
        back = bench.used(meet) - before
    right = all(errors) and all("\n" not in text for text in errors)
    bench.check("load: whole fails on every rank, one line each", right, " | ".join(map(str, errors)))
    clear = any("load: sharded" in text or "bytes are free" in text for text in errors if text)
    bench.check("the error says what was needed and what to do", clear, "as above")
    bench.check("its memory is given back", back < CACHES, f"{back:,} bytes more than before")


def whole_fails(bench: Bench, folder: Path) -> str | None:
    try:
        with bench.rank(folder, {}):
            return None
    except Exception as error:
        return f"{type(error).__name__}: {error}"


CASES = (
    ("set-up", 30, attached_setup),
    ("capped", 35, sharded_under_a_cap),
)
