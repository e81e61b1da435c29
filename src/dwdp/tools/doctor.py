"""`dwdp doctor`: whether N rank processes of this machine can share memory, how fast, and what is wrong if not.

Every ordered pair of ranks is probed in separate processes, through the same group and memory domain that
serving uses (see doctor_probe.py). Probed is the host domain.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dwdp import env
from dwdp.executor.devices import nvidia_path
from dwdp.memory.host import HostDomain
from dwdp.memory.libc import available_bytes, max_map_count
from dwdp.tools.doctor_probe import MEMORY_STEP
from dwdp.tools.doctor_run import CURE_DESCRIPTORS, CURE_MAPPINGS, ProbeRun, Problem

MAX_RANKS = 64
GRANULE_BYTES = 65536
COPY_BYTES = 64 << 20
TIMED_BYTES = 20e9
"""Copied in all at most, so that many ranks take about as long as few."""

KIMI_K3_TABLES = 92 * 4
"""Expert tables of the largest model: MoE layers times tables. Each is a handle on every rank."""


def examine(ranks: int, *, nbytes: int | None = None, **seams: Any) -> dict[str, Any]:
    """Probes and judges; -> the document of `--json`. nbytes: of each copy, a multiple of 64 KiB (None: 64 MiB,
    less for many ranks or little memory). seams: `ProbeRun`'s options."""
    if not 1 <= ranks <= MAX_RANKS:
        raise ValueError(f"--ranks {ranks}: the doctor probes 1 to {MAX_RANKS} ranks of one host")
    env.socket_dir()  # one that cannot be read is refused before anything starts
    limits = read_limits()
    probe = ProbeRun(ranks, nbytes or copy_bytes(ranks, limits["memory_available_bytes"]), **seams)
    probe.run()
    problems = limit_problems(limits, ranks) + probe.problems
    passing = probe.descriptor_passing()
    pairs = probe.pairs()
    tried = any(record.step >= MEMORY_STEP for record in probe.records)
    works = all(record.done for record in probe.records) and all(pair["bytes_ok"] for pair in pairs)
    return {
        "ranks": ranks,
        "verdict": "problems" if problems else "ok",
        "copy_bytes": probe.nbytes,
        "pairs": pairs,
        "many_to_one": [record.many_to_one for record in probe.records if record.many_to_one is not None],
        "handle_types": handle_types(tried, works),
        "transfer": transfer(ranks),
        "descriptor_passing": passing,
        "limits": limits,
        "notes": notes(passing),
        "problems": [asdict(problem) for problem in problems],
    }


def run_doctor(ranks: int, *, as_json: bool) -> bool:
    """Prints what was found; -> whether all is well."""
    document = examine(ranks)
    if as_json:
        print(json.dumps(document))
    else:
        from dwdp.tools.doctor_text import print_document

        print_document(document)
    return document["verdict"] == "ok"


def copy_bytes(ranks: int, memory_available_bytes: int) -> int:
    """Of each copy: all ranks together take no more than half of the memory, and the copies about 10 s."""
    copies = 6 * ranks * ranks
    fitting = min(COPY_BYTES, memory_available_bytes // (8 * ranks), int(TIMED_BYTES) // copies)
    return max(GRANULE_BYTES, fitting // GRANULE_BYTES * GRANULE_BYTES)


# limits


def read_limits() -> dict[str, int | None]:
    """Of this machine and process; None is unlimited or unknown. Raises MemoryDomainError where there is no
    host memory domain."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with HostDomain(0) as domain:
        budgets = domain.descriptor_budget.limit, domain.mapping_budget.limit
    try:
        shm = os.statvfs("/dev/shm")
        shm_bytes, shm_used = shm.f_blocks * shm.f_frsize, (shm.f_blocks - shm.f_bfree) * shm.f_frsize
    except OSError:
        shm_bytes = shm_used = None
    return {
        "descriptors_soft": None if soft == resource.RLIM_INFINITY else soft,
        "descriptors_hard": None if hard == resource.RLIM_INFINITY else hard,
        "descriptor_budget": budgets[0],
        "max_map_count": max_map_count(),
        "mapping_budget": budgets[1],
        "memory_available_bytes": available_bytes(),
        "dev_shm_bytes": shm_bytes,
        "dev_shm_used_bytes": shm_used,
    }


def limit_problems(limits: Mapping[str, int | None], ranks: int) -> list[Problem]:
    """Held against what the experts of Kimi-K3 need; smaller models need less."""
    found = []
    descriptors = KIMI_K3_TABLES * ranks
    if limits["descriptor_budget"] < descriptors:
        what = (
            f"RLIMIT_NOFILE (ulimit -Hn) is {limits['descriptors_hard']:,}, a budget of "
            f"{limits['descriptor_budget']:,} descriptors a rank; the experts of Kimi-K3 on {ranks} ranks "
            f"need {descriptors:,} (smaller models fewer)"
        )
        found.append(Problem(what, CURE_DESCRIPTORS))
    mappings = KIMI_K3_TABLES * (ranks + 2)
    if limits["mapping_budget"] < mappings:
        what = (
            f"vm.max_map_count is {limits['max_map_count']:,}, a budget of {limits['mapping_budget']:,} mappings a "
            f"rank; the experts of Kimi-K3 on {ranks} ranks need at least {mappings:,} (smaller models fewer)"
        )
        found.append(Problem(what, CURE_MAPPINGS))
    return found


# what will be used


def handle_types(tried: bool, works: bool) -> list[dict[str, Any]]:
    why = "no NVIDIA device on this machine" if nvidia_path() is None else "the CUDA domain is not probed yet"
    return [
        {
            "type": "memfd", "domain": "host", "tried": tried, "works": works if tried else None,
            "why": "made, passed, mapped read-only and read in every pair" if works else "see the problems",
        },
        {"type": "FABRIC", "domain": "cuda", "tried": False, "works": None, "why": why},
        {"type": "POSIX_FD", "domain": "cuda", "tried": False, "works": None, "why": why},
    ]  # fmt: skip


def transfer(ranks: int) -> dict[str, str | None]:
    if ranks == 1:
        return {"used": None, "why": "one rank copies from nobody"}
    return {"used": "per_slice", "why": "the default; contention_opt asks for batched, prefetch_gather for the gather"}


def notes(passing: Mapping[str, Any]) -> list[str]:
    """What is no problem but good to know."""
    found = []
    scm, pidfd = passing["scm_rights"], passing["pidfd_getfd"]
    if passing["used"] == "scm_rights" and pidfd["works"] is False:
        found.append(f"pidfd_getfd is refused and not needed, descriptors go as SCM_RIGHTS: {pidfd['why']}")
    if passing["used"] == "pidfd_getfd":
        found.append(f"SCM_RIGHTS fails and pidfd_getfd is used: {scm['why']}")
    found.append("/dev/shm may be small or full: shared memory is memfd, which it does not limit")
    if nvidia_path() is not None:
        found.append(f"this machine has an NVIDIA device ({nvidia_path()}): the CUDA domain is not probed yet")
    return found
