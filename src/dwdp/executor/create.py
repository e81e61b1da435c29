"""Building one rank: gate -> managers -> model -> load -> set-up, each stage with an undo.

[Note: the first error is the one raised] On any BaseException the undos of the stages that were done run in
reverse; one that fails is logged and stops neither the others nor the error that led to it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dwdp.executor.messages import RankSettings, WorkItem, WorkResult

logger = logging.getLogger(__name__)

StageProgress = Callable[[str, int, int], None]


class Stages:
    """What was built so far and how to take it back."""

    def __init__(self) -> None:
        self._undos: list[tuple[str, Callable[[], object]]] = []

    def done(self, name: str, undo: Callable[[], object]) -> None:
        """The stage `name` is complete; `undo` takes it back."""
        self._undos.append((name, undo))

    def undo_all(self) -> None:
        """Takes every stage back, the last one first; see [Note: the first error is the one raised]."""
        while self._undos:
            name, undo = self._undos.pop()
            try:
                undo()
            except BaseException:
                logger.exception("undoing the stage %s failed", name)


@dataclass
class RankExecutor:
    """One rank, ready to compute. Context manager; `release` is idempotent."""

    rank: int
    settings: RankSettings
    model: object
    loop: object
    domain: object
    device: object
    manager: object | None
    _stages: Stages

    def generate(self, items: Sequence[WorkItem], *, logits_sha256: bool = False) -> list[WorkResult]:
        """Completes the items; see SimpleLoop.generate."""
        return self._running().generate(items, logits_sha256=logits_sha256)

    def logits(self, token_ids: Sequence[int], *, chunk_size: int | None = None, decode: int = 0):
        """Float32 [tokens, vocab]; see SimpleLoop.logits."""
        return self._running().logits(token_ids, chunk_size=chunk_size, decode=decode)

    def report(self) -> dict:
        """{rank, pid, ledger, counters} with the ledger in bytes; zeros where DWDP is off."""
        report = empty_report(self.rank)
        if self.manager is not None:
            report["ledger"] |= self.manager.ledger()
            report["counters"] |= self.manager.counters()
        elif self.loop is not None:
            report["counters"]["forwards"] = self.loop.forwards
        if self.model is not None:
            from dwdp.runtime.setup_experts import outside_bytes

            report["ledger"]["replicated_bytes"] = outside_bytes(self.model, self.domain)
        return report

    def release(self) -> None:
        """Gives DWDP back, agreed with the other ranks, and drops the model. Raises what the teardown
        raises."""
        manager, self.manager = self.manager, None
        self.loop = None
        try:
            if manager is not None:
                manager.release()
        finally:
            self.model = None
            self._stages.undo_all()

    def _running(self):
        if self.loop is None:
            from dwdp.errors import ModelReleasedError

            raise ModelReleasedError(f"rank {self.rank} was released; set it up again first")
        if self.manager is not None and self.manager.verification_error is not None:
            raise self.manager.verification_error
        return self.loop

    def __enter__(self) -> RankExecutor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


LEDGER_KEYS = (
    "moved_bytes",
    "expert_moved_bytes",
    "dense_moved_bytes",
    "stored_bytes",
    "ring_bytes",
    "slot_bytes",
    "freed_bytes",
    "replicated_bytes",
)


def empty_report(rank: int) -> dict:
    """The report of a rank that holds nothing, in this process."""
    from dwdp.runtime.counters import Counters

    ledger = dict.fromkeys(LEDGER_KEYS, 0)
    return {"rank": rank, "pid": os.getpid(), "ledger": ledger, "counters": Counters().as_dict()}


def launched_group(settings: RankSettings, rank: int, epoch: int):
    """A fresh group of the ranks that a front end started, over the store that it serves.

    epoch: how often this front end has set its ranks up before; every set-up has a group of its own.
    """
    from dwdp.group.backends import StoreGroup, connect_store

    store = connect_store(settings.store_port, settings.store_host)
    return StoreGroup(store, rank, settings.ranks, name=f"dwdp-{epoch}", socket_dir=settings.socket_dir)


def independent_group(settings: RankSettings, rank: int, *, store_exists: bool):
    """The group of processes that nobody of ours started: rank 0 serves the store unless their launcher
    does."""
    from dwdp.group.backends import StoreGroup, connect_store, open_store

    host, port = settings.store_host, settings.store_port
    if store_exists:
        store = connect_store(port, host, served_by="the launcher")
    else:
        store = open_store(rank, host, port)
    return StoreGroup(
        store,
        rank,
        settings.ranks,
        socket_dir=settings.socket_dir,
        host_rank=None if store_exists else 0,
    )


def mpi_group(settings: RankSettings, rank: int):
    """The group of the processes that an MPI launcher started, where nothing says where a store is."""
    from dwdp.group.mpi import world_group

    return world_group(rank, settings.ranks, socket_dir=settings.socket_dir)


def build_rank(
    settings: RankSettings,
    group=None,
    *,
    rank: int = 0,
    progress: StageProgress | None = None,
    copy_bytes_per_second: float | None = None,
    trace: bool = False,
) -> RankExecutor:
    """Builds, loads and sets up one rank, in a process of its own or in a thread beside others.

    group: a `StoreGroup` of all ranks when `settings.dwdp` is given; owned from now on, also when this fails.
    copy_bytes_per_second: throttles the copies, for tests; trace: the device records what it does.
    Raises the first error, with everything taken back and the peers told.
    """
    stages = Stages()
    if group is not None:
        stages.done("group", group.close)
    try:
        return _build(settings, group, rank, progress or (lambda *_: None), copy_bytes_per_second, trace, stages)
    except BaseException as error:
        if group is not None:
            _tell_peers(group, error)
        stages.undo_all()
        raise


def _build(settings, group, rank, progress, copy_bytes_per_second, trace, stages: Stages) -> RankExecutor:
    from dwdp.executor.devices import choose_device, compute_dtype
    from dwdp.executor.loop import SimpleLoop
    from dwdp.model.loader import load_model
    from dwdp.model.tokenizer import eos_token_ids

    device_name, _ = choose_device(settings.device)
    dtype = compute_dtype(settings.dtype)
    domain = device = manager = None
    expert_range = None
    if settings.dwdp is not None:
        domain, device, manager = _create_managers(settings, group, rank, copy_bytes_per_second, trace, stages)
        expert_range = manager.partition.ranges[group.rank]
    model = load_model(
        settings.model,
        dtype=dtype,
        expert_range=expert_range,
        device=device_name,
        progress=lambda done, total: progress("load", done, total),
        built=None if manager is None else manager.check_model,
    )
    if manager is not None:
        progress("setup", 0, 1)
        manager.setup(model)
        progress("setup", 1, 1)
    loop = SimpleLoop(
        model,
        manager,
        eos_ids=eos_token_ids(settings.model, model.config.vocab_size),
        decode=_decoder(settings.model, model.config.vocab_size),
    )
    return RankExecutor(rank, settings, model, loop, domain, device, manager, stages)


def _create_managers(settings, group, rank, copy_bytes_per_second, trace, stages: Stages):
    from dwdp.config.schema import DenseConfig, DwdpConfig, validate
    from dwdp.device.host import HostDevice
    from dwdp.memory.host import HostDomain
    from dwdp.model.checkpoint import read_config
    from dwdp.model.config import ModelConfig
    from dwdp.runtime.manager import DwdpManager

    config = validate(DwdpConfig, None, what="dwdp", as_json=json.dumps(settings.dwdp))
    dense = None
    if settings.dense_dwdp is not None:
        dense = validate(DenseConfig, None, what="dense_dwdp", as_json=json.dumps(settings.dense_dwdp))
    domain = HostDomain(
        rank,
        granule_bytes=config.host_granule_bytes,
        page_granules=config.page_granules,
        mapping_budget=config.mapping_budget,
    )
    stages.done("memory domain", domain.close)
    device = HostDevice(copy_bytes_per_second=copy_bytes_per_second, trace=trace)
    stages.done("device", device.close)
    model_document = read_config(settings.model)
    group.join(
        {
            "dwdp_config": _digest(config.model_dump(mode="json")),
            "model_config": _digest(model_document),
            "dtype": settings.dtype,
            "device": "cpu",
            "device_uuid": None,
        }
    )
    num_experts = ModelConfig.from_dict(model_document).num_experts
    manager = DwdpManager(config, dense, group=group, domain=domain, device=device, num_experts=num_experts)
    manager.__enter__()
    # A manager that this call registered is exited once, with no error: the caller's is raised anyway.
    stages.done("managers", lambda: manager.__exit__(None, None, None))
    return domain, device, manager


def _digest(document: dict) -> str:
    """Of a document as JSON with sorted keys: the same on every rank that has the same values."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]


def _decoder(model: str, vocab_size: int) -> Callable[[list[int]], str] | None:
    from dwdp.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model, vocab_size)
    return None if tokenizer is None else tokenizer.decode


def _tell_peers(group, error: BaseException) -> None:
    from dwdp.executor.messages import one_line

    try:
        group.abort(one_line(error) or type(error).__name__)
    except Exception:
        logger.exception("telling the peers failed")
