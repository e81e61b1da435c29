"""The launch gate: refuses, before anything is built, what DWDP cannot serve. It probes nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dwdp.config.schema import DenseConfig, DwdpConfig, ServeConfig
from dwdp.errors import ConfigError

logger = logging.getLogger(__name__)

Mode = Literal["attached", "standalone", "off"]
COPY_MODES = ("batched", "per_slice", "gather")
ROLES = ("context", "generation", "both")
MODES = (
    "dense DWDP runs attached (a dwdp section with dwdp_size > 1, tp_size 1) or standalone (no dwdp section, "
    "attention_dp, tp_size > 1)"
)


class GateError(ValueError):
    """A launch that DWDP cannot serve; the message names the first requirement that it breaks."""


@dataclass(frozen=True)
class LaunchSettings:
    """What the gate judges, probed capabilities included.

    dense: dense DWDP is asked for. dwdp_size: of the `dwdp` section, None (or 0) without one. sleep, lora,
    speculative: whether one is configured. exportable_memory: memory handles can reach the peers.
    dense_copy: the text that asks for a copy mode, unread; None when nothing does. group: how the ranks
    meet, `store` or `mpi`. gather_available, batched_available: the gather kernel, batched copies run here.
    expert_transfer: how expert copies are to be submitted, None without expert DWDP. handle_type: that is asked
    for. unable: what does not work here -> why, by `gather`, `batched`, `exportable`, `fabric`, `posix_fd`.
    gathered_bytes_per_step: what one step of a standalone launch gathers, when it is known.
    """

    dense: bool = False
    dwdp_size: int | None = None
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    attention_dp: bool = False
    overlap_scheduler: bool = False
    cuda_graphs: object = False
    torch_compile: object = False
    prefill_graphs: object = False
    sleep: object = False
    lora: object = False
    speculative: object = False
    locality_domains: object = False
    exportable_memory: bool = True
    dense_copy: str | None = None
    group: str = "store"
    gather_available: bool = False
    batched_available: bool = True
    expert_transfer: str | None = None
    handle_type: str = "auto"
    unable: Mapping[str, str] = field(default_factory=dict)
    role: str = "context"
    gathered_bytes_per_step: int | None = None


def check_launch(settings: LaunchSettings) -> Mode:
    """The mode of dense DWDP for this launch. Raises GateError naming the first requirement it breaks.

    Memory, a handle type or a transfer that expert DWDP needs and that is not available here is refused with and
    without dense DWDP.
    """
    _check_experts(settings)
    if not settings.dense:
        return "off"
    _check_both_modes(settings)
    if settings.dwdp_size:
        _check_attached(settings)
        return "attached"
    _check_standalone(settings)
    return "standalone"


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise GateError(message)


def _because(settings: LaunchSettings, what: str) -> str:
    why = settings.unable.get(what)
    return f" ({why})" if why else ""


def _check_experts(settings: LaunchSettings) -> None:
    if (settings.dwdp_size or 0) > 1:
        _check_exportable(settings, "expert DWDP")
        wanted = settings.handle_type
        _require(
            wanted == "auto" or wanted not in settings.unable,
            f"dwdp.handle_type: {wanted} is not available on this device{_because(settings, wanted)}: "
            "auto takes what works",
        )
    for transfer, asked, available, what in (
        ("gather", "dwdp.prefetch_gather (DWDP_PREFETCH_GATHER)", settings.gather_available, "the gather kernel"),
        ("batched", "dwdp.contention_opt", settings.batched_available, "batched copies"),
    ):
        _require(
            settings.expert_transfer != transfer or available,
            f"{asked} needs {what}, which this device does not have{_because(settings, transfer)}: switch it off, "
            "expert DWDP runs without",
        )


def _check_exportable(settings: LaunchSettings, who: str) -> None:
    _require(
        settings.exportable_memory,
        f"{who} needs exportable memory: no handle type works here (exportable_memory is False)"
        f"{_because(settings, 'exportable')}",
    )


def _check_both_modes(settings: LaunchSettings) -> None:
    for name, words in (
        ("cuda_graphs", "eager execution, without CUDA graphs"),
        ("torch_compile", "eager execution, without torch.compile"),
        ("prefill_graphs", "eager execution, without prefill CUDA graphs"),
        ("sleep", "a launch without sleep"),
        ("lora", "a launch without LoRA"),
        ("speculative", "a launch without speculative decoding"),
        ("locality_domains", "locality domains off"),
    ):
        _require(not getattr(settings, name), f"dense DWDP needs {words}: {name} is set")
    for name in ("pp_size", "cp_size"):
        size = getattr(settings, name)
        _require(size == 1, f"dense DWDP needs {name} 1: {name} is {size}")
    _check_exportable(settings, "dense DWDP")
    _require(settings.role in ROLES, f"role {settings.role!r} is not one of {', '.join(ROLES)}")


def _check_attached(settings: LaunchSettings) -> None:
    size, tp_size = settings.dwdp_size, settings.tp_size
    _require(size > 1, f"attached dense DWDP needs dwdp_size > 1: dwdp_size is {size}")
    _require(
        tp_size == 1,
        f"expert DWDP on an attention-DP instance (a dwdp section with tp_size {tp_size}) is neither mode: " + MODES,
    )
    _require(
        not settings.overlap_scheduler,
        "attached dense DWDP needs the overlap scheduler off: overlap_scheduler is set",
    )
    _require(
        settings.role == "context",
        f"attached dense DWDP needs role context: role is {settings.role!r}, which would gather every layer "
        "in each decode step",
    )
    if settings.dense_copy is not None:
        logger.warning(
            "the dense copy mode %r (DWDP_DENSE_COPY or dense_dwdp.copy) is ignored: attached dense DWDP "
            "uses the transfer of expert DWDP",
            settings.dense_copy,
        )


def _check_standalone(settings: LaunchSettings) -> None:
    _require(
        settings.attention_dp,
        f"dense DWDP without a dwdp section needs attention_dp: attention_dp is off; {MODES}",
    )
    _require(
        settings.tp_size > 1,
        f"standalone dense DWDP needs tp_size > 1: tp_size is {settings.tp_size}; {MODES}",
    )
    _require(
        settings.group in ("store", "mpi"),
        f"standalone dense DWDP needs an MPI or store group: group is {settings.group!r}",
    )
    copy = "batched" if settings.dense_copy is None else settings.dense_copy.strip().lower()
    _require(
        copy in COPY_MODES,
        f"DWDP_DENSE_COPY (dense_dwdp.copy) accepts {', '.join(COPY_MODES)}: it is {settings.dense_copy!r}",
    )
    _require(
        copy != "batched" or settings.batched_available,
        "DWDP_DENSE_COPY (dense_dwdp.copy) batched needs batched copies, which are not available here"
        f"{_because(settings, 'batched')}: set per_slice",
    )
    if copy == "gather":
        _require(
            settings.gather_available,
            "DWDP_DENSE_COPY=gather needs the gather kernel, which is not available here"
            f"{_because(settings, 'gather')}: set batched or per_slice",
        )
        logger.warning(
            "standalone dense DWDP with gather: the validated settings are DWDP_DENSE_COPY=gather, "
            "DWDP_GATHER_KERNEL=tma and DWDP_DISABLE_COOP_ROUTING=1"
        )
    if settings.role != "context":
        known = settings.gathered_bytes_per_step
        amount = "the bytes of every covered layer" if known is None else f"{known} bytes"
        logger.warning(
            "role %s with standalone dense DWDP: every step gathers %s, each decode step included",
            settings.role,
            amount,
        )


def no_sms(asked: str) -> str:
    """Why SMs cannot be reserved on the host, as a message; asked: the option and its value."""
    return f"{asked} needs a GPU: a host device has no SMs to keep free"


def check_store(dense: DenseConfig) -> None:
    """Raises ConfigError for two settings that would both say how large the handles of the row store are."""
    if dense.own_rows == "map" and dense.store_chunk_mb:
        raise ConfigError(
            f"dense_dwdp.own_rows: map gives every row a handle of its own; store_chunk_mb "
            f"{dense.store_chunk_mb} does not go with it, set one of them back"
        )


def check_supported(config: ServeConfig, mode: Mode, device: str = "cpu") -> None:
    """Refuses settings that the schema knows and that cannot be served on this device or together.

    config: as `resolve` gives it. mode: as `check_launch` gives it. device: cpu or cuda, that is used. Raises
    ConfigError naming the fields. A choice of the gather's kernel where the gather is off is a warning, as a launch
    script may always set it.
    """
    dwdp = config.dwdp
    if dwdp is not None:
        if config.overlap_scheduler:
            raise ConfigError("overlap_scheduler: true does not go with expert DWDP")
        if config.tp_size > 1:
            raise ConfigError(f"tp_size {config.tp_size} does not go with a dwdp section; remove one of them")
        _check_memory(dwdp, device)
        if dwdp.sm_reserve is not None and device == "cpu":
            raise ConfigError(no_sms(f"dwdp.sm_reserve: {dwdp.sm_reserve} (DWDP_SM_RESERVE)"))
        if dwdp.gather_kernel != "auto" and not dwdp.prefetch_gather:
            logger.warning(
                "dwdp.gather_kernel: %s (DWDP_GATHER_KERNEL) has no effect: the gather is off; "
                "dwdp.prefetch_gather (DWDP_PREFETCH_GATHER) switches it on",
                dwdp.gather_kernel,
            )
    dense = config.dense_dwdp
    if dense is not None and mode != "off":
        check_store(dense)
        _require(
            dense.load == "whole" or dense.required,
            "dense_dwdp.load: sharded keeps no weights to serve on with after a failed set-up: it needs required "
            "(DWDP_DENSE_REQUIRED) on",
        )


def _check_memory(dwdp: DwdpConfig, device: str) -> None:
    """Weights that are shared lie where they are computed with."""
    if device == "cpu" and dwdp.memory == "cuda":
        raise ConfigError("dwdp.memory: cuda needs a GPU, and this launch computes on a CPU (device)")
    if device == "cpu" and dwdp.handle_type != "auto":
        raise ConfigError(
            f"dwdp.handle_type: {dwdp.handle_type} is of GPU memory, and this launch computes on a CPU (device)"
        )
    if device == "cuda" and dwdp.memory == "host":
        raise ConfigError("dwdp.memory: host needs device: cpu, and this launch computes on a GPU")
    if device == "cuda" and dwdp.host_memory_bytes is not None:
        logger.warning("dwdp.host_memory_bytes: %d has no effect: the device is a GPU", dwdp.host_memory_bytes)
