"""Building one rank: gate -> managers -> model -> load -> set-up, each stage with an undo.

[Note: the first error is the one raised] On any BaseException the undos of the stages that were done run in
reverse; one that fails is logged and stops neither the others nor the error that led to it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dwdp.executor.messages import RankSettings, WorkItem, WorkResult, one_line
from dwdp.runtime.teardown import RELEASE_BARRIER_SECONDS

logger = logging.getLogger(__name__)

StageProgress = Callable[[str, int, int], None]


class Stages:
    """What was built so far and how to take it back."""

    def __init__(self) -> None:
        self._undos: list[tuple[str, Callable[[], object]]] = []
        self.groups: list = []  # whose ranks are told when a later stage fails

    def own_group(self, name: str, group) -> None:
        """The stage `name` made or took over a group of ranks."""
        self.groups.append(group)
        self.done(name, group.close)

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
    exchange: object | None = None
    _set_up_ops: int = 0  # of the trace

    def generate(self, items: Sequence[WorkItem], *, logits_sha256: bool = False) -> list[WorkResult]:
        """Completes the items; see SimpleLoop.generate."""
        return self._running().generate(items, logits_sha256=logits_sha256)

    def logits(self, token_ids: Sequence[int], *, chunk_size: int | None = None, decode: int = 0):
        """Float32 [tokens, vocab]; see SimpleLoop.logits."""
        return self._running().logits(token_ids, chunk_size=chunk_size, decode=decode)

    def update_weights(self, path: str, *, check_only: bool = False, progress: StageProgress | None = None) -> None:
        """Overwrites the weights in place with those of another checkpoint of the same config.json; collective where
        ranks share weights. check_only: looks at the checkpoint alone.

        Raises on every rank when any fails, CheckpointError naming this rank for a checkpoint that does not fit.
        The weights are then as they were, or the model says in every forward why it cannot run.
        """
        from dwdp.errors import CheckpointError
        from dwdp.model.loader import WeightUpdate
        from dwdp.runtime.update import update_weights

        def checked() -> WeightUpdate:
            self._running()
            return WeightUpdate(
                path,
                self.model,
                expert_range=self._expert_range(),
                progress=lambda done, total: (progress or (lambda *_: None))("update", done, total),
            )

        try:
            if check_only:
                with checked():
                    return
            if self.exchange is not None:  # these ranks divide the experts: one that fails would mix old and new
                update_weights(self.model, checked, group=self.exchange.group, device=self.device)
            elif self.manager is not None:
                self.manager.update_weights(self.model, checked)
            else:
                update_weights(self.model, checked)
        except CheckpointError as error:
            raise CheckpointError(f"rank {self.rank}: {error}") from error

    def mark_unusable(self, reason: str) -> None:
        """No forward runs any more, and nothing but `release` is of use."""
        from dwdp.errors import DwdpError

        if self.model is not None and self.model.unusable is None:
            self.model.unusable = DwdpError(reason)

    def report(self) -> dict:
        """{rank, pid, kernels, ledger, memory, counters}; ledger and memory in bytes, zeros in the ledger without DWDP.

        kernels: the form that is chosen, `torch` or `triton`, None without a model; what has no kernel for its widths
        computes in torch all the same. memory: what the rank holds now, see `held_bytes`; the ledger does not change
        after set-up.
        """
        report = empty_report(self.rank)
        if self.manager is not None:
            report["ledger"] |= self.manager.ledger()
            report["counters"] |= self.manager.counters()
        elif self.loop is not None:
            report["counters"]["forwards"] = self.loop.forwards
        if self.model is not None:
            from dwdp.executor.memory import held_bytes
            from dwdp.kernels.select import kernels_for
            from dwdp.runtime.setup_experts import outside_bytes

            model_nbytes = outside_bytes(self.model, self.domain)
            report["kernels"] = kernels_for(self.model.lm_head.weight.device)
            report["ledger"]["replicated_bytes"] = model_nbytes
            report["memory"] = held_bytes(self.domain, self.model.lm_head.weight.device, model_nbytes)
        return report

    def trace(self) -> list[dict]:
        """What the device was given to do since set-up, in host enqueue order: ops in the neutral form, with `t0` and
        `t1` in seconds of the host's monotonic clock. Waits for the device. DwdpError where nothing is traced."""
        from dwdp.errors import DwdpError

        if self.device is None:
            raise DwdpError(f"rank {self.rank} has no trace: DWDP is off, so that no weights move")
        return self.device.stamp_trace()[self._set_up_ops :]

    def _expert_range(self) -> tuple[int, int] | None:
        """The experts whose rows this rank writes where expert DWDP is on; elsewhere all that its tables have."""
        partition = getattr(self.manager, "partition", None)
        return None if partition is None else partition.ranges[self.rank]

    def release(self) -> None:
        """Gives DWDP back, agreed with the other ranks, and drops the model. Raises what the teardown
        raises."""
        manager, self.manager = self.manager, None
        self.loop = None
        try:
            if manager is not None:
                manager.release()
            if self.exchange is not None:
                self.exchange.leave(RELEASE_BARRIER_SECONDS)
        finally:
            self.model = None
            self._stages.undo_all()

    def _running(self):
        from dwdp.errors import ModelReleasedError, ModelUnusableError

        if self.loop is None:
            raise ModelReleasedError(f"rank {self.rank} was released; set it up again first")
        if self.manager is not None and self.manager.verification_error is not None:
            raise self.manager.verification_error
        if self.model.unusable is not None:
            # Before any step: an attention-DP rank that fails in one ends it for good.
            raise ModelUnusableError(f"this model cannot run: {self.model.unusable}") from self.model.unusable
        return self.loop

    def __enter__(self) -> RankExecutor:
        return self

    def __exit__(self, kind, error: BaseException | None, trace: object) -> None:
        if error is not None and self.exchange is not None:
            # The other ranks may be in a step, where they would wait for this one until the deadline.
            self.exchange.abort(one_line(error) or type(error).__name__)
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
    memory = dict.fromkeys(("domain_bytes", "torch_bytes", "total_bytes"), 0)
    counters = Counters().as_dict()
    return {
        "rank": rank, "pid": os.getpid(), "kernels": None, "ledger": ledger, "memory": memory, "counters": counters
    }  # fmt: skip


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

    group: of all ranks, when `settings.has_group`; owned from now on, also when this fails.
    copy_bytes_per_second: throttles the copies, for tests; trace: the device records what it does, also where the
    settings do not say so.
    Raises the first error, with everything taken back and the peers told.
    """
    stages = Stages()
    if group is not None:
        stages.own_group("group", group)
    try:
        if group is not None:
            group.announce()
        return _build(
            settings, group, rank, progress or (lambda *_: None), copy_bytes_per_second, trace or settings.trace, stages
        )
    except BaseException as error:
        for group in stages.groups:
            _tell_peers(group, error)
        # A load that was given up has tensors in its frames, over handles that go now.
        traceback.clear_frames(error.__traceback__)
        stages.undo_all()
        raise


def _build(settings, group, rank, progress, copy_bytes_per_second, trace, stages: Stages) -> RankExecutor:
    from dwdp.executor.devices import choose_device, compute_dtype
    from dwdp.executor.lockstep import LockstepLoop, join_instance
    from dwdp.executor.loop import SimpleLoop
    from dwdp.executor.memory import rank_device
    from dwdp.kernels.select import kernels_for
    from dwdp.model.loader import load_model
    from dwdp.model.lockstep import LockstepExperts
    from dwdp.model.tokenizer import eos_token_ids

    device_name, _ = choose_device(settings.device)
    dtype = compute_dtype(settings.dtype, device_name)
    where = rank_device(device_name, rank)
    if where.type == "cuda":
        stages.done("torch's cache", _empty_cache)  # the last to be undone
    kernels_for(where)  # refuses kernels that cannot run here before anything is loaded
    domain = device = manager = exchange = None
    expert_range = None
    options = {"where": where, "copy_bytes_per_second": copy_bytes_per_second, "trace": trace}
    if settings.dwdp is not None:
        domain, device, manager = _create_managers(settings, group, rank, options, stages)
        expert_range = manager.partition.ranges[group.rank]
    elif settings.attention_dp:
        exchange, expert_range = join_instance(settings, group, where)
        stages.done("exchange", exchange.close)
        if settings.dense_dwdp is not None:
            domain, device, manager = _create_standalone(settings, group, rank, options, stages)
    model = load_model(
        settings.weights or settings.model,
        dtype=dtype or "auto",
        keep_fp8=settings.keep_fp8,
        expert_range=expert_range,
        device=where,
        progress=lambda done, total: progress("load", done, total),
        built=None if manager is None else manager.prepare,
        log_skipped=False,  # the front end has said it
    )
    if manager is not None:
        progress("setup", 0, 1)
        manager.setup(model)
        progress("setup", 1, 1)
    vocabulary = {
        "eos_ids": eos_token_ids(settings.model, model.config.vocab_size),
        "decode": _decoder(settings.model, model.config.vocab_size),
        "max_batch_size": settings.max_batch_size,
    }
    if exchange is None:
        loop = SimpleLoop(model, manager, **vocabulary)
    else:
        loop = LockstepLoop(model, manager, step=LockstepExperts(exchange, model.moe_layers()), **vocabulary)
        group.mark_setup_done()
    set_up_ops = len(device.trace) if device is not None and device.trace is not None else 0
    return RankExecutor(rank, settings, model, loop, domain, device, manager, stages, exchange, set_up_ops)


def _create_managers(settings, group, rank, options, stages: Stages):
    from dwdp.config.schema import DwdpConfig, validate
    from dwdp.executor.memory import choose_handles, create_memory, where_joined
    from dwdp.model.config import ModelConfig
    from dwdp.model.headers import read_config
    from dwdp.runtime.manager import DwdpManager

    config = validate(DwdpConfig, None, what="dwdp", as_json=json.dumps(settings.dwdp))
    dense = None if settings.dense_dwdp is None else _dense_config(settings)
    domain, device = create_memory(config, rank=rank, done=stages.done, **options)
    model_document = read_config(settings.model)
    group.join(join_info(settings, config, model_document, **where_joined(domain, options["where"])))
    choose_handles(domain, group)
    num_experts = ModelConfig.from_dict(model_document).num_experts
    manager = DwdpManager(config, dense, group=group, domain=domain, device=device, num_experts=num_experts)
    _enter(manager, stages)
    return domain, device, manager


def join_info(
    settings, config, model_document: dict, *, device_uuid: str | None, memory: str = "host", device: str = "cpu"
) -> dict:
    """What a rank tells the others of itself when it joins; see `where_joined`. device_uuid: of its GPU, None on the
    host."""
    return {
        "dwdp_config": digest(config.model_dump(mode="json")),
        "model_config": digest(model_document),
        "dtype": settings.dtype,
        "keep_fp8": settings.keep_fp8,
        "memory": memory,
        "device": device,
        "device_uuid": device_uuid,
        "allow_shared_device": config.allow_shared_device,
    }


def _create_standalone(settings, group, rank, options, stages: Stages):
    """Memory, device and manager of dense DWDP on an attention-DP instance; the manager has a group of its own."""
    from dwdp.config.schema import DwdpConfig
    from dwdp.executor.memory import choose_handles, create_memory
    from dwdp.runtime.standalone import StandaloneDenseManager, join_dense
    from dwdp.weights.mover import mover_of
    from dwdp.weights.transfers import Transfer

    config = DwdpConfig(dwdp_size=settings.ranks)  # there is no dwdp section: its defaults hold
    domain, device = create_memory(config, rank=rank, done=stages.done, **options)
    dense_group = group.dense_group()
    stages.own_group("dense group", dense_group)
    dense = _dense_config(settings)
    transfer = Transfer.named(dense.copy, mover_of(domain).best_kernel(settings.dense_gather_kernel))
    join_dense(dense_group)
    choose_handles(domain, dense_group)
    manager = StandaloneDenseManager(
        dense,
        group=dense_group,
        domain=domain,
        device=device,
        transfer=transfer,
        verify_every=config.verify_every,
        sm_reserve=settings.dense_sm_reserve,
    )
    _enter(manager, stages)
    return domain, device, manager


def _dense_config(settings):
    from dwdp.config.schema import DenseConfig, validate

    return validate(DenseConfig, None, what="dense_dwdp", as_json=json.dumps(settings.dense_dwdp))


def _empty_cache() -> None:
    """What this rank's tensors took goes back to the GPU, for whatever comes next in this process or another."""
    import torch

    torch.cuda.empty_cache()


def _enter(manager, stages: Stages) -> None:
    manager.__enter__()
    # A manager that this call registered is exited once, with no error: the caller's is raised anyway.
    stages.done("managers", lambda: manager.__exit__(None, None, None))


def digest(document: dict) -> str:
    """Of a document as JSON with sorted keys: the same on every rank that has the same values."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]


def _decoder(model: str, vocab_size: int) -> Callable[[list[int]], str] | None:
    from dwdp.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model, vocab_size)
    return None if tokenizer is None else tokenizer.decode


def _tell_peers(group, error: BaseException) -> None:
    from dwdp.errors import RankDiedError
    from dwdp.executor.messages import one_line

    try:
        group.abort(error if isinstance(error, RankDiedError) else one_line(error) or type(error).__name__)
    except Exception:
        logger.exception("telling the peers failed")
