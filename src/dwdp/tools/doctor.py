"""`dwdp doctor`: whether N rank processes of this machine can share memory, how fast, and what is wrong if not.

Every ordered pair of ranks is probed in separate processes, through the same group and memory domain that
serving uses: host memory, or the memory of GPUs (see doctor_probe.py and doctor_memory.py).
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dwdp import env
from dwdp.config import files
from dwdp.config.schema import DwdpConfig, ServeConfig, dwdp_section, validate
from dwdp.errors import ConfigError
from dwdp.executor.devices import NVIDIA_PATHS, join_clauses, lacking_for_cuda, nvidia_path
from dwdp.memory.host import HostDomain
from dwdp.memory.libc import available_bytes, max_map_count
from dwdp.tools.doctor_cures import CURE_DESCRIPTORS, CURE_MAPPINGS, CURE_TRANSFER, Problem
from dwdp.tools.doctor_probe import MEMORY_STEP
from dwdp.tools.doctor_run import ProbeRun

MAX_RANKS = 64
GRANULE_BYTES = 65536
COPY_BYTES = {"host": 64 << 20, "cuda": 256 << 20}
"""Of each copy: more than caches hold, and enough that a link between GPUs is full."""
TIMED_BYTES = 20e9
"""Copied in all at most on the host, so that many ranks take about as long as few."""
CHECKED_BYTES = 4 << 30
"""Made and compared by the host at most for a rank of GPUs."""
CUDA_MAPPINGS = 120_000

KIMI_K3_TABLES = 92 * 4
"""Expert tables of the largest model: MoE layers times tables. Each is a handle on every rank."""

NAMES = {"host": ("memfd",), "cuda": ("FABRIC", "POSIX_FD")}


def examine(
    ranks: int,
    *,
    memory: str = "host",
    why: str = "asked for",
    config: DwdpConfig | None = None,
    nbytes: int | None = None,
    said: tuple[str, ...] = (),
    **seams: Any,
) -> dict[str, Any]:
    """Probes and judges; -> the document of `--json`, of one shape for both domains.

    memory, why: host or cuda. nbytes: of each copy, a multiple of 64 KiB (None: 64 MiB on the host and 256 MiB on a
    GPU, less for many ranks or little memory). said: lines on where settings are from. seams: `ProbeRun`'s options.
    """
    if not 1 <= ranks <= MAX_RANKS:
        raise ValueError(f"--ranks {ranks}: the doctor probes 1 to {MAX_RANKS} ranks of one host")
    env.socket_dir()  # one that cannot be read is refused before anything starts
    config = dwdp_section(None, ranks) if config is None else config
    limits = read_limits(memory, config)
    nbytes = nbytes or copy_bytes(ranks, limits["memory_available_bytes"], memory, config.host_granule_bytes)
    probe = ProbeRun(ranks, nbytes, memory=memory, config=config, **seams)
    probe.run()
    passing, transfers = probe.descriptor_passing(), probe.transfers()
    used = transfer(ranks, config, transfers)
    problems = limit_problems(limits, ranks, memory) + probe.problems
    if used["used"] is None and ranks > 1:
        problems.append(Problem(used["why"], CURE_TRANSFER))
    devices = [record.device for record in probe.records if record.device is not None]
    types = handle_types(probe, devices)
    return {
        "ranks": ranks,
        "memory": {"used": memory, "why": why},
        "verdict": "problems" if problems else "ok",
        "devices": devices,
        "copy_bytes": probe.nbytes,
        "pairs": probe.pairs(),
        "many_to_one": [record.many_to_one for record in probe.records if record.many_to_one is not None],
        "handle_types": types,
        "handle_type": probe.handle_type,
        "transfers": [{"transfer": name, **found} for name, found in transfers.items()],
        "transfer": used,
        "descriptor_passing": passing,
        "limits": limits,
        "notes": [*said, *notes(probe, passing, types, transfers, devices)],
        "problems": [asdict(problem) for problem in problems],
    }


def run_doctor(
    ranks: int,
    *,
    as_json: bool,
    config_file: Path | None = None,
    memory: str | None = None,
    handle_type: str | None = None,
    allow_shared_device: bool = False,
) -> bool:
    """Prints what was found; -> whether all is well. Raises ConfigError for what cannot be probed here."""
    given = {"memory": memory, "handle_type": handle_type, "allow_shared_device": allow_shared_device or None}
    config, device, said = read_settings(ranks, config_file, given)
    domain, why = choose_memory(config, device)
    document = examine(ranks, memory=domain, why=why, config=config, said=tuple(said))
    if as_json:
        print(json.dumps(document))
    else:
        from dwdp.tools.doctor_text import print_document

        print_document(document)
    return document["verdict"] == "ok"


# what is asked


def read_settings(
    ranks: int, config_file: Path | None, given: Mapping[str, Any], environ: env.Environ = None
) -> tuple[DwdpConfig, str, list[str]]:
    """-> (the `dwdp` section as a launch would have it, the `device` field, lines on where values are from).

    given: fields of the section that the command line gives, None where it does not.
    """
    given = {field: value for field, value in given.items() if value is not None}
    validate(DwdpConfig, {"dwdp_size": ranks, **given}, what="command line")  # so that no file is blamed for it
    launch = ServeConfig() if config_file is None else files.load_config_file(config_file, {"ranks": ranks})
    asked = {} if launch.dwdp is None else launch.dwdp.model_dump(exclude_unset=True)
    section = dwdp_section(asked | given, ranks, what="dwdp" if config_file is None else f"{config_file} dwdp")
    section, lines = env.override_section(section, env.expert_overrides(environ), title="dwdp")
    return section, launch.device, lines


def choose_memory(config: DwdpConfig, device: str = "auto", nvidia_paths=NVIDIA_PATHS) -> tuple[str, str]:
    """(host or cuda, why). Raises ConfigError where it cannot be probed; GPUs are never passed over silently."""
    asked = {"cpu": "host"}.get(device, device) if config.memory == "auto" else config.memory
    found = nvidia_path(nvidia_paths)
    if asked == "host" or (asked == "auto" and found is None):
        if config.handle_type != "auto":
            raise ConfigError(f"handle_type {config.handle_type} is of GPU memory, and host memory is probed")
        return "host", "asked for" if asked == "host" else "this machine has no NVIDIA device"
    if lacking := lacking_for_cuda(nvidia_paths):
        why = "GPU memory was asked for" if asked == "cuda" else f"this machine has an NVIDIA device ({found})"
        raise ConfigError(
            f"memory {asked} (--memory, dwdp.memory): {why} but {join_clauses(lacking)}; install with: pip install "
            "'dwdp[gpu]' and a CUDA build of torch, or probe host memory with --memory host"
        )
    return "cuda", "asked for" if asked == "cuda" else f"this machine has an NVIDIA device ({found})"


def copy_bytes(ranks: int, memory_available_bytes: int, memory: str = "host", granule: int = GRANULE_BYTES) -> int:
    """Of each copy: all ranks together take no more than half of the memory, and the copies about 10 s.

    On GPUs the ranks make it less where their memory is short.
    """
    if memory == "cuda":
        return min(COPY_BYTES["cuda"], CHECKED_BYTES // ranks // GRANULE_BYTES * GRANULE_BYTES)
    copies = 6 * ranks * ranks
    fitting = min(COPY_BYTES["host"], memory_available_bytes // (8 * ranks), int(TIMED_BYTES) // copies)
    return max(granule, fitting // granule * granule)


# limits


def read_limits(memory: str, config: DwdpConfig) -> dict[str, int | None]:
    """Of this machine and process; None is unlimited or unknown. Raises MemoryDomainError where there is no
    host memory domain."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with HostDomain(0, mapping_budget=config.mapping_budget) as domain:
        descriptors, mappings = domain.descriptor_budget.limit, domain.mapping_budget.limit
    if memory == "cuda":
        mappings = config.mapping_budget or CUDA_MAPPINGS
    try:
        shm = os.statvfs("/dev/shm")
        shm_bytes, shm_used = shm.f_blocks * shm.f_frsize, (shm.f_blocks - shm.f_bfree) * shm.f_frsize
    except OSError:
        shm_bytes = shm_used = None
    return {
        "descriptors_soft": None if soft == resource.RLIM_INFINITY else soft,
        "descriptors_hard": None if hard == resource.RLIM_INFINITY else hard,
        "descriptor_budget": descriptors,
        "max_map_count": max_map_count(),
        "mapping_budget": mappings,
        "memory_available_bytes": available_bytes(),
        "dev_shm_bytes": shm_bytes,
        "dev_shm_used_bytes": shm_used,
    }


def limit_problems(limits: Mapping[str, int | None], ranks: int, memory: str = "host") -> list[Problem]:
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
        limit = (
            f"vm.max_map_count is {limits['max_map_count']:,}, a" if memory == "host" else "dwdp.mapping_budget is a"
        )
        what = (
            f"{limit} budget of {limits['mapping_budget']:,} mappings a "
            f"rank; the experts of Kimi-K3 on {ranks} ranks need at least {mappings:,} (smaller models fewer)"
        )
        found.append(Problem(what, CURE_MAPPINGS if memory == "host" else "raise dwdp.mapping_budget"))
    return found


# what will be used


def handle_types(probe: ProbeRun, devices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each type that there is, probed or not."""
    rows = []
    for domain, names in NAMES.items():
        for name in names:
            tried, works, why = False, None, None
            if domain != probe.memory:
                why = f"{probe.memory} memory is probed; --memory {domain} asks for this"
                if domain == "cuda" and nvidia_path() is None:
                    why = "no NVIDIA device on this machine"
            elif domain == "host":
                tried, works, why = memfd_row(probe)
            elif name.lower() in probe.handle_types:
                tried, works, why = cuda_row(probe, name.lower(), devices)
            else:
                forced = probe.config.handle_type
                why = f"handle_type {forced} was asked for" if forced != "auto" else "the probe did not come so far"
            rows.append({"type": name, "domain": domain, "tried": tried, "works": works, "why": why})
    return rows


def memfd_row(probe: ProbeRun) -> tuple[bool, bool | None, str]:
    tried = any(record.step >= MEMORY_STEP for record in probe.records)
    works = every_pair_works(probe)
    why = "made, passed, mapped read-only and read in every pair" if works else "see the problems"
    return tried, works if tried else None, why


def cuda_row(probe: ProbeRun, name: str, devices: list[dict[str, Any]]) -> tuple[bool, bool, str]:
    failed = probe.handle_types[name]
    if failed:
        why = failed[0] + (f" (so {len(failed)} ranks)" if len(failed) > 1 else "")
        if name == "fabric" and any(device["fabric_attribute"] for device in devices):
            why += "; the attribute of the device says that FABRIC is supported"
            if not any(device["imex_channels"] for device in devices):
                why += ", but there is no IMEX channel device below /dev/nvidia-caps-imex-channels"
        return True, False, why
    if name != probe.handle_type:
        return True, True, f"made, imported by a neighbour and read; {str(probe.handle_type).upper()} is taken"
    works = every_pair_works(probe)
    return True, works, "made, passed, mapped and read in every pair" if works else "see the problems"


def every_pair_works(probe: ProbeRun) -> bool:
    return all(record.done for record in probe.records) and all(pair["bytes_ok"] for pair in probe.pairs())


def transfer(ranks: int, config: DwdpConfig, transfers: Mapping[str, Mapping[str, Any]]) -> dict[str, str | None]:
    """What a launch with this section submits copies by."""
    if ranks == 1:
        return {"used": None, "why": "one rank copies from nobody"}
    asked = config.transfer
    if transfers[asked]["works"] is False:
        field = "prefetch_gather" if asked == "gather" else "contention_opt"
        return {"used": None, "why": f"dwdp.{field} asks for {asked} copies: {transfers[asked]['why']}"}
    why = "the default; contention_opt asks for batched, prefetch_gather for the gather"
    if asked != "per_slice":
        why = "prefetch_gather asks for it" if asked == "gather" else "contention_opt asks for it"
    return {"used": asked, "why": why}


def notes(
    probe: ProbeRun,
    passing: Mapping[str, Any],
    types: list[dict[str, Any]],
    transfers: Mapping[str, Mapping[str, Any]],
    devices: list[dict[str, Any]],
) -> list[str]:
    """What is no problem but good to know."""
    found = []
    scm, pidfd = passing["scm_rights"], passing["pidfd_getfd"]
    if passing["used"] == "scm_rights" and pidfd["works"] is False:
        found.append(f"pidfd_getfd is refused and not needed, descriptors go as SCM_RIGHTS: {pidfd['why']}")
    if passing["used"] == "pidfd_getfd":
        found.append(f"SCM_RIGHTS fails and pidfd_getfd is used: {scm['why']}")
    if probe.memory == "host":
        found.append("/dev/shm may be small or full: shared memory is memfd, which it does not limit")
        if nvidia_path() is not None:
            found.append(f"this machine has an NVIDIA device ({nvidia_path()}): --memory cuda probes its memory")
        return found
    refused = [row["type"] for row in types if row["works"] is False]
    if "FABRIC" in refused and probe.handle_type == "posix_fd":
        found.append("FABRIC handles are refused, as the table says, and not needed on one host")
    sharing: dict[str, list[int]] = {}
    for device in devices:
        sharing.setdefault(device["uuid"], []).append(device["rank"])
    for uuid, ranks in sharing.items():
        if len(ranks) > 1:
            named = ", ".join(map(str, ranks))
            found.append(f"ranks {named} share {uuid}: rates between them are of its own memory, not of a link")
    writable = [text for record in probe.records for text in record.warnings if "memory writable" in text]
    if writable:
        found.append(f"peers' memory is mapped writable, as read-only maps are not granted: {writable[0]}")
    for name, one in transfers.items():
        if one["works"] is False and name != probe.config.transfer:
            found.append(f"{name} copies do not work here and are not asked for: {one['why']}")
    return found
