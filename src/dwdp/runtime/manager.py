"""DWDP of a rank in attached mode: set-up (dense first, then experts), start of a forward, teardown.

Importing this module loads no torch, so that whoever builds a model can ask for the registered manager.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dwdp.errors import DwdpError, ModelReleasedError
from dwdp.partition.experts import ExpertPartition
from dwdp.runtime.counters import Counters
from dwdp.runtime.dense_manager import DenseDwdpManager, current_dense_manager, refuse_weight_change
from dwdp.runtime.sm_reserve import cooperative_launches, drop_reserve, reserve_sms, reserved_sms
from dwdp.runtime.teardown import attempt, give_back
from dwdp.weights.mover import mover_of
from dwdp.weights.transfers import Transfer

if TYPE_CHECKING:
    from dwdp.partition.parts import Part
    from dwdp.runtime.experts import ExpertRuntime
    from dwdp.runtime.setup_experts import LoadedTables
    from dwdp.runtime.update import OpenSource

__all__ = ["DenseDwdpManager", "DwdpManager", "current_dense_manager", "refuse_weight_change"]

logger = logging.getLogger(__name__)


class DwdpManager:
    """DWDP of one rank in attached mode: expert DWDP, with dense DWDP on top where it is on. A context manager.

    config: DwdpConfig; dense: DenseConfig or None; group: joined, of `config.dwdp_size` ranks (None for one);
    domain, device: this rank's, open until after `release`; num_experts: E. The model is built between
    `__enter__` and `setup`.
    """

    def __init__(self, config, dense, *, group, domain, device, num_experts: int) -> None:
        self.config, self.group, self.domain, self.device = config, group, domain, device
        self.partition = ExpertPartition.from_config(config, num_experts=num_experts)
        self.dense_config = dense
        enabled = dense is not None and dense.enabled
        if enabled and config.dwdp_size < 2:
            raise DwdpError("dense DWDP on top of expert DWDP needs dwdp_size > 1, it is 1")
        kernel = mover_of(domain).best_kernel(config.gather_kernel)
        self.transfer = Transfer.named(config.transfer, kernel)  # of expert and dense copies
        moves = config.dwdp_size > 1 and config.transfer == "gather"
        self._gather_sms = mover_of(domain).gather_sms() if moves else 0
        self.dense = DenseDwdpManager(dense) if enabled else None
        self.experts: ExpertRuntime | None = None
        self._loaded: LoadedTables | None = None  # what the model is loaded into, until `setup` takes it over
        self.report: dict[str, Any] | None = None
        self._counters = Counters()
        self._model: Callable[[], Any] = lambda: None
        self._started = False  # a start was called and H0 was not reached yet
        self._primed = False  # the forward that runs now found its first copies enqueued
        self._released = False

    def __enter__(self) -> DwdpManager:
        if self.dense is not None:
            self.dense.register()
        try:
            # One reserve for both: dense copies use the same transfer.
            reserve_sms(self.config.sm_reserve, self._gather_sms)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            self._release(agreed=kind is None)
        finally:
            drop_reserve()
            if self.dense is not None:
                self.dense.unregister()

    # ---- set-up ----

    def check_model(self, model) -> None:
        """Refuses, before weights are loaded, a model that dense DWDP is required for and that has no roots."""
        if self.dense is not None:
            self.dense.check_model(model)

    def prepare(self, model) -> Mapping[str, Part]:
        """Lets a model on the meta device be loaded straight into this rank's handles: its expert tables become
        tensors over them. Optional and without a collective; refuses as `check_model` does. Returns what is read of
        parameters that get no memory in the model, by name (`load: sharded`).

        A model that was prepared cannot be as it was after a set-up that fails: `model.unusable` is then the error.
        Everything is given back by `release`, whether `setup` was reached or not.
        """
        self.check_model(model)
        if self._released or self.report is not None or self._loaded is not None:
            raise DwdpError("this DWDP manager has a model already; make a new one for another model")
        if self.config.dwdp_size == 1:
            return {}
        from dwdp.runtime.setup_experts import make_room

        self._model = weakref.ref(model)
        self._loaded = make_room(model, self.domain, self.partition, self.group.rank)
        return self.dense.make_room(model, domain=self.domain, group=self.group) if self.dense is not None else {}

    def setup(self, model) -> dict[str, Any]:
        """Moves the loaded model's weights; collective. Returns the report, on a committed model the same again.

        Dense DWDP commits first, so that its originals are given back before the expert ring is allocated.
        Raises on every rank when any fails; where dense DWDP had committed or the model was loaded into handles
        (`prepare`), `model.unusable` is the error.
        """
        if self._released:
            raise ModelReleasedError("this DWDP manager was released; make a new one for a newly loaded model")
        if self.report is not None:
            return self.report
        refuse_weight_change(model)
        if self.group is not None:
            self.group.refuse_without("set-up")
        if self._loaded is not None and self._model() is not model:
            raise DwdpError("another model than this one was prepared for loading into handles")
        self._model = weakref.ref(model)
        try:
            dense_report = self._setup_dense(model)
            self.experts = self._setup_experts(model, dense_report)
            self._loaded = None
            self._attach()
            if self.group is not None:
                self.group.mark_setup_done()
        except BaseException as error:
            self._give_up(model, error)
            raise
        self.report = {"dense": dense_report, "experts": self.experts.report}
        self._exposed_before = self.device.exposed_wait_seconds
        return self.report

    def _setup_dense(self, model) -> dict[str, Any]:
        from dwdp.partition.roots import has_dense_roots
        from dwdp.runtime.setup_dense import DenseSetup, nothing_moved

        if self.config.dwdp_size < 2:
            return nothing_moved("off")
        how = self.dense_config.roots if self.dense_config is not None else "declared"
        if not has_dense_roots(model, how):
            if self.dense is not None:
                self.dense.check_model(model)
            return nothing_moved("no roots" if self.dense is not None else "off")
        resources = {"group": self.group, "domain": self.domain, "device": self.device}
        free_bytes = self._free_bytes_of(model)
        if self.dense is None:
            # Off here; a rank where it is on must not wait for this one.
            config = self.dense_config or _dense_off()
            return DenseSetup(model, config, free_bytes=free_bytes, **resources).run()[0]
        return self.dense.setup(
            model,
            counters=self._counters,
            free_bytes=free_bytes,
            transfer=self.transfer,
            verify_every=self.config.verify_every,
            **resources,
        )

    def _setup_experts(self, model, dense_report: dict[str, Any]) -> ExpertRuntime:
        from dwdp.partition.roots import has_dense_roots
        from dwdp.runtime.setup_experts import setup_experts

        return setup_experts(
            model,
            group=self.group,
            domain=self.domain,
            device=self.device,
            partition=self.partition,
            num_slots=self.config.num_prefetch_slots,
            verify=self.config.verify,
            verify_every=self.config.verify_every,
            counters=self._counters,
            host_memory_bytes=self.config.host_memory_bytes,
            dense_would_help=dense_report["status"] == "off" and has_dense_roots(model),
            restorable=not self._dense_committed,
            transfer=self.transfer,
            loaded=self._loaded,
        )

    def _attach(self) -> None:
        if not self._dense_committed:
            return
        self.dense.experts, self.dense.before_h0 = self.experts, self._reached_h0
        if self.config.num_prefetch_slots > 2:
            logger.info(
                "with %d expert prefetch slots each layer's expert copy runs ahead of its dense copy",
                self.config.num_prefetch_slots,
            )

    def _give_up(self, model, error: BaseException) -> None:
        """After a failure that cannot be undone: everything goes, and the model says why it cannot run."""
        if not self._dense_committed and self.experts is None and self._loaded is None:
            return  # the model is as it was
        self._drop_loaded()
        drop_reserve()
        if getattr(model, "unusable", None) is None:
            model.unusable = error
        give_back(self._parts())
        self.experts = None
        if self.dense is not None:
            self.dense.runtime = self.dense.experts = None

    def _drop_loaded(self) -> None:
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            attempt(loaded.close)
        if self.dense is not None:
            attempt(self.dense.drop_loaded)

    def _free_bytes_of(self, model) -> Callable[[], int]:
        def free_bytes() -> int:
            from dwdp.runtime.setup_experts import outside_bytes

            held = self.domain.allocated_bytes + outside_bytes(model, self.domain)
            declared = self.config.host_memory_bytes
            return self.domain.free_bytes(declared, held_bytes=held, ranks_on_host=self.group.size)

        return free_bytes

    # ---- a forward ----

    def start_forward(self) -> None:
        """Called by the executor's loop before each forward; enqueues what is missing of the first copies.

        L(first), L(second), then E(first) and on. After an aborted forward it leaves everything to H0. Never waits
        for the device.
        """
        self.device.mark("start")
        self._started, self._primed = True, self._is_primed()
        if self._dense_committed:
            if self.dense.runtime.needs_recovery:
                return
            self.dense.runtime.start_forward()
        if self.experts is not None:
            self.experts.start_forward()

    def _reached_h0(self) -> None:
        if not self._started:
            self._primed = self._is_primed()
        self._started = False

    def end_forward(self) -> None:
        """Called by the executor's loop after a forward that completed."""
        self.device.mark("end")
        self._counters.forwards += 1
        self._counters.primed_forwards += self._primed
        self._started = self._primed = False

    def invalidate_prefetch(self) -> None:
        """Drops every expert copy not yet read, because expert rows change; dense copies stay."""
        if self.experts is not None:
            self.experts.invalidate_prefetch()

    def update_weights(self, model, open_source: OpenSource) -> None:
        """Overwrites the weights of the model in place, between two forwards; collective. See update.py.

        Refused, with nothing changed, where dense DWDP has committed, after `release`, and without a dead rank.
        """
        from dwdp.runtime.update import update_weights

        if self._released:
            raise ModelReleasedError("this DWDP manager was released; its model cannot be updated")
        update_weights(
            model,
            open_source,
            group=self.group,
            device=self.device,
            experts=self.experts,
            verify=self.config.verify,
        )

    def _is_primed(self) -> bool:
        return (
            self.experts is not None
            and self.experts.primed
            and (not self._dense_committed or self.dense.runtime.primed)
        )

    # ---- teardown ----

    def release(self) -> None:
        """Gives DWDP back, agreed among the ranks; idempotent. The model cannot run afterwards.

        Stops, drains, waits (bounded) for the peers, unmaps their memory, waits again, releases own memory; dense
        before experts in every step. Dead ranks are skipped. What fails is logged and stops nothing.
        """
        self._release(agreed=True)

    def _release(self, *, agreed: bool) -> None:
        if self._released:
            return
        self._released = True
        parts = list(self._parts())
        drop_reserve()
        if not parts and self._loaded is None:
            return
        self._drop_loaded()
        model = self._model()
        if model is not None:
            model.released = True
        give_back(parts, self.group if agreed else None)

    def _parts(self) -> Iterator[DenseDwdpManager | ExpertRuntime]:
        if self._dense_committed:
            yield self.dense
        if self.experts is not None:
            yield self.experts

    # ---- what it says ----

    @property
    def _dense_committed(self) -> bool:
        return self.dense is not None and self.dense.runtime is not None

    @property
    def verification_error(self) -> Exception | None:
        """The first mismatch that the checks beside the forwards found, dense or experts, or None."""
        dense = self.dense.runtime.verification_error if self._dense_committed else None
        return dense or (self.experts.verification_error if self.experts is not None else None)

    def status(self) -> dict[str, Any]:
        """What an operator looks at first, as JSON has it.

        `dead_ranks`: peers that died; this rank serves on, and no set-up can follow. `dense`: committed, abandoned,
        off, ..., with its problem. `reserved_sms`, `cooperative_launches`: what compute is left beside a gather.
        `last_verified_forward`, `verification_error`: of the checks beside forwards.
        """
        dense = self.report["dense"] if self.report else {}
        error = self.verification_error
        return {
            "dead_ranks": [] if self.group is None else sorted(self.group.dead),
            "dense": dense.get("status"),
            "dense_problem": dense.get("problem"),
            "transfer": str(self.transfer),
            "reserved_sms": reserved_sms(),
            "cooperative_launches": cooperative_launches(),
            "last_verified_forward": None if self.experts is None else self.experts.verified_forward,
            "verification_error": None if error is None else str(error),
        }

    def ledger(self) -> dict[str, int]:
        """Bytes, static after set-up; without `replicated_bytes`, which is the model's own."""
        dense = self.report["dense"] if self.report else {}
        experts = self.report["experts"] if self.report else {}
        dense_moved, expert_moved = dense.get("moved_bytes", 0), experts.get("expert_moved_bytes", 0)
        return {
            "moved_bytes": expert_moved + dense_moved,
            "expert_moved_bytes": expert_moved,
            "dense_moved_bytes": dense_moved,
            "stored_bytes": experts.get("stored_bytes", 0) + dense.get("stored_bytes", 0),
            "ring_bytes": experts.get("ring_bytes", 0),
            "slot_bytes": dense.get("slot_bytes", 0),
            "freed_bytes": experts.get("freed_bytes", 0) + dense.get("freed_bytes", 0),
        }

    def counters(self) -> dict[str, int | float]:
        """What was counted since set-up."""
        if self.report:
            self._counters.exposed_wait_seconds = self.device.exposed_wait_seconds - self._exposed_before
        return self._counters.as_dict()


def _dense_off():
    from dwdp.config.schema import DenseConfig

    return DenseConfig()
