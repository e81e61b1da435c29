"""Dense DWDP on its own, on an attention-DP instance: the manager that owns set-up, forwards and teardown.

[Note: one schedule per forward] L(first), L(second) at the start of a forward, L(l + 2) at H2 of l, nothing at H3:
a completed forward leaves nothing enqueued, and a rank that brings no token to a step copies nothing.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dwdp.errors import GroupTimeoutError, ModelReleasedError
from dwdp.runtime.counters import Counters
from dwdp.runtime.dense_manager import DenseDwdpManager, refuse_weight_change
from dwdp.runtime.sm_reserve import drop_reserve, reserve_sms
from dwdp.runtime.teardown import attempt, give_back
from dwdp.weights.mover import mover_of
from dwdp.weights.transfers import Transfer

if TYPE_CHECKING:
    from dwdp.partition.parts import Part

logger = logging.getLogger(__name__)


def join_dense(group) -> None:
    """The first collective of the manager's own group. A rank with dense DWDP off never comes, and is named."""
    try:
        group.join({"dense_dwdp": "standalone"})
    except GroupTimeoutError as error:
        raise GroupTimeoutError(
            f"{error}; is dense DWDP (dense_dwdp.enabled, DWDP_DENSE) off there? It is on for rank {group.rank}"
        ) from error


class StandaloneDenseManager(DenseDwdpManager):
    """Dense DWDP of one rank in standalone mode. A context manager.

    config: a DenseConfig that is enabled; group: the manager's own, see `join_dense`; domain, device: this rank's,
    open until after `release`; transfer: how the copies are submitted, which DWDP_DENSE_COPY decides. sm_reserve: SMs
    that compute leaves free, whatever the transfer; None: those of a gather.
    The model is built between `__enter__` and `setup`.
    """

    prefetch_next_pass = False  # [Note: one schedule per forward]

    def __init__(
        self, config, *, group, domain, device, transfer: Transfer, verify_every: int = 0, sm_reserve: int | None = None
    ) -> None:
        super().__init__(config)
        self.transfer, self._sm_reserve = transfer, sm_reserve
        self.group, self.domain, self.device = group, domain, device
        self.verify_every = verify_every
        self._counters = Counters()
        self._exposed_before = 0.0
        self._model: Callable[[], Any] = lambda: None
        self._released = False

    def __enter__(self) -> StandaloneDenseManager:
        self.register()
        try:
            reserve_sms(self._sm_reserve, mover_of(self.domain).gather_sms() if self.transfer.name == "gather" else 0)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            self._release(agreed=kind is None)
        finally:
            drop_reserve()
            self.unregister()

    # ---- set-up ----

    def prepare(self, model) -> Mapping[str, Part]:
        """Before a model on the meta device is loaded; refuses as `check_model` does. See `make_room`."""
        self.check_model(model)
        return self.make_room(model, domain=self.domain, group=self.group)

    def setup(self, model) -> dict[str, Any]:
        """Spreads the loaded model's dense weights; collective. On a committed model: the same report again.

        Raises on every rank when any fails and REQUIRED is on, else every rank keeps its replicated weights.
        """
        if self._released:
            raise ModelReleasedError("this dense DWDP manager was released; make a new one for a newly loaded model")
        if self.runtime is not None:
            return self.report
        refuse_weight_change(model)
        self.group.refuse_without("set-up")
        self._model = weakref.ref(model)
        try:
            if self.check_model(model):
                self._spread(model)
            else:
                from dwdp.runtime.setup_dense import nothing_moved

                self.report = nothing_moved("no roots")
            if self.runtime is None:
                drop_reserve()  # nothing was committed, and no gather will run
            self.group.mark_setup_done()
        except BaseException as error:
            self._give_up(model, error)
            raise
        self._exposed_before = self.device.exposed_wait_seconds
        return self.report

    def _spread(self, model) -> None:
        def free_bytes() -> int:
            return self.domain.free_bytes(ranks_on_host=self.group.size)

        super().setup(
            model,
            group=self.group,
            domain=self.domain,
            device=self.device,
            counters=self._counters,
            free_bytes=free_bytes,
            verify_every=self.verify_every,
            transfer=self.transfer,
        )

    def _give_up(self, model, error: BaseException) -> None:
        """After a failure behind the commit: everything goes, and the model says why it cannot run."""
        if self.runtime is None:
            return  # the model is as it was; the reserve ends with the manager
        if getattr(model, "unusable", None) is None:
            model.unusable = error
        give_back([self])
        self.runtime = None

    # ---- a forward ----

    def prefetch_first_layers(self) -> None:
        """Called by the executor before a forward: L(first), L(second) unless enqueued; nothing after an abort."""
        self.device.mark("start")
        if self.runtime is not None:
            self.runtime.start_forward()

    def start_forward(self) -> None:
        """What every loop starts a forward with; here `prefetch_first_layers`."""
        self.prefetch_first_layers()

    def end_forward(self) -> None:
        """Called by the executor's loop after a forward that completed."""
        self.device.mark("end")
        self._counters.forwards += 1

    # ---- teardown ----

    def release(self) -> None:
        """Gives the weights back, agreed among the ranks; idempotent. The model cannot run afterwards."""
        self._release(agreed=True)

    def _release(self, *, agreed: bool) -> None:
        if self._released:
            return
        self._released = True
        drop_reserve()
        attempt(self.drop_loaded)
        model = self._model()
        if self.runtime is None:
            return
        if model is not None:
            model.released = True
        give_back([self], self.group if agreed else None)

    # ---- what it says ----

    @property
    def verification_error(self) -> Exception | None:
        """The first mismatch that the checks beside the forwards found, or None."""
        return None if self.runtime is None else self.runtime.verification_error

    def ledger(self) -> dict[str, int]:
        """Bytes, static after set-up; without `replicated_bytes`, which is the model's own. No expert is moved."""
        report = self.report or {}
        moved = report.get("moved_bytes", 0)
        return {
            "moved_bytes": moved,
            "expert_moved_bytes": 0,
            "dense_moved_bytes": moved,
            "ring_bytes": 0,
            **{key: report.get(key, 0) for key in ("stored_bytes", "slot_bytes", "freed_bytes")},
        }

    def counters(self) -> dict[str, int | float]:
        """What was counted since set-up."""
        if self.report:
            self._counters.exposed_wait_seconds = self.device.exposed_wait_seconds - self._exposed_before
        return self._counters.as_dict()
