"""The dense manager of a rank: registration before the model is built, hooks, set-up, guards on weight changes.

Importing this module loads no torch, so that whoever builds a model can ask for the registered manager.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from dwdp.errors import DwdpError, ModelReleasedError, ModelUnusableError
from dwdp.runtime.counters import Counters
from dwdp.runtime.teardown import give_back
from dwdp.weights.transfers import PER_SLICE, Transfer

if TYPE_CHECKING:
    from dwdp.partition.parts import Part
    from dwdp.runtime.dense import DenseRuntime
    from dwdp.runtime.experts import ExpertRuntime
    from dwdp.runtime.load_rows import LoadedRows
    from dwdp.runtime.setup_dense import DenseWeights

logger = logging.getLogger(__name__)

_current_dense: ContextVar[DenseDwdpManager | None] = ContextVar("dwdp_dense_manager", default=None)


def current_dense_manager() -> DenseDwdpManager | None:
    """The dense manager registered in this rank's context, or None; decoder layers capture it when built."""
    return _current_dense.get()


class DenseDwdpManager:
    """Owns the dense runtime of a rank; the model's layers call its hooks.

    Registered before the model is built, at most one per process and rank context. Until set-up has committed,
    and after release, the hooks do nothing. config: a DenseConfig that is enabled. This class alone is the attached
    mode's, owned by a DwdpManager; standalone.py has the other.
    """

    prefetch_next_pass = True  # fills go on into the next forward

    def __init__(self, config) -> None:
        self.config = config
        self.runtime: DenseRuntime | None = None
        self.weights: DenseWeights | None = None
        self.report: dict[str, Any] | None = None
        self.experts: ExpertRuntime | None = None  # attached: H0 starts their prefetch
        self.before_h0: Callable[[], None] | None = None
        self._no_roots_logged = False
        self._loaded: LoadedRows | None = None  # what the model is loaded into, until `setup` takes it over

    def register(self) -> None:
        """Makes this the manager that layers capture."""
        registered = _current_dense.get()
        if registered is not None and registered is not self:
            raise DwdpError("a dense DWDP manager is registered already in this rank's context; release it first")
        _current_dense.set(self)

    def unregister(self) -> None:
        """Idempotent; leaves another manager alone."""
        if _current_dense.get() is self:
            _current_dense.set(None)

    def check_model(self, model) -> bool:
        """Whether the model has dense roots, declared or discovered; needs no weights. Without: an error, or logged
        (REQUIRED=0)."""
        from dwdp.partition.roots import why_no_roots

        reason = why_no_roots(model, self.config.roots)
        if reason is None:
            return True
        message = f"dense DWDP is on but {reason}"
        if self.config.required:
            raise DwdpError(f"{message}; switch DWDP_DENSE off, or set DWDP_DENSE_REQUIRED=0 to serve without it")
        if not self._no_roots_logged:  # asked when the model is built and again by set-up
            logger.error("%s; its dense weights stay replicated", message)
        self._no_roots_logged = True
        return False

    def make_room(self, model, *, domain, group) -> Mapping[str, Part]:
        """With `load: sharded`, for a model on the meta device: allocates this rank's rows. Without a collective.

        Returns what is read of the parameters that move, by name; nothing of the model changes. A model that was loaded
        so is unusable after a set-up that fails.
        """
        from dwdp.runtime.load_rows import LoadedRows

        if self.config.load != "sharded" or not self.check_model(model):
            return {}
        loaded = LoadedRows(model, self.config, domain, group)
        if not loaded.parts:  # nothing is covered: an ordinary load, and set-up says so
            return {}
        self._loaded = loaded
        return loaded.parts

    def drop_loaded(self) -> None:
        """Gives back what a load that failed had allocated; idempotent."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            loaded.close()

    def setup(
        self,
        model,
        *,
        group,
        domain,
        device,
        counters: Counters,
        free_bytes,
        verify_every: int = 0,
        transfer: Transfer = PER_SLICE,
    ) -> dict[str, Any]:
        """Spreads the model's dense weights; see setup_dense.py. On a committed model: the same report again.

        transfer: how the copies are submitted.
        A leak with STRICT raises on this rank after the commit, and publishes an abort.
        """
        from dwdp.runtime.dense import DenseRuntime
        from dwdp.runtime.dense_schedule import DenseSchedule
        from dwdp.runtime.model_hooks import install_hooks
        from dwdp.runtime.setup_dense import DenseSetup
        from dwdp.runtime.watchdog import SlotChecker
        from dwdp.weights.mover import mover_of

        if self.runtime is not None:
            return self.report
        loaded, self._loaded = self._loaded, None
        setup = DenseSetup(
            model,
            self.config,
            group=group,
            domain=domain,
            device=device,
            free_bytes=free_bytes,
            transfer=transfer,
            manager=self,
            loaded=loaded,
        )
        self.report, self.weights = setup.run()
        if self.weights is None:
            return self.report
        for module in (model, *(layer.layer for layer in setup.collected.roots)):
            module.dense_dwdp_moved = True
        weights = self.weights
        try:
            self.runtime = DenseRuntime(
                device,
                DenseSchedule(weights.layout.segments, prefetch_next_pass=self.prefetch_next_pass),
                weights.layout.positions,
                weights.plans,
                counters,
                strict=self.config.strict,
                checker=SlotChecker(weights.layout, weights.store, weights.slots, weights.checksums, mover_of(domain)),
                watch=self.config.debug >= 2,
                verify_every=verify_every,
                mover=mover_of(domain),
            )
        except BaseException as error:
            # Committed, and without a runtime nobody else would give the memory back.
            model.unusable = error
            group.abort(error)
            give_back([self])
            raise
        install_hooks(self, model, setup.collected.roots)
        if weights.leaks and self.config.strict:
            message = f"dense DWDP (strict): originals are still alive after the commit: {'; '.join(weights.leaks)}"
            group.abort(message)
            raise DwdpError(message)
        return self.report

    # ---- hooks, called by the model ----

    def h0(self) -> None:
        """Model forward entry: dense priming, then the start of the expert prefetch."""
        if self.runtime is not None and not self.runtime.released:
            if self.before_h0 is not None:
                self.before_h0()
            self.runtime.h0()
            if self.experts is not None:
                self.experts.start_forward()

    def h1(self, layer_index: int) -> None:
        """Decoder layer entry."""
        if self.runtime is not None:
            self.runtime.h1(layer_index)

    def h2(self, layer_index: int) -> None:
        """After the attention call."""
        if self.runtime is not None:
            self.runtime.h2(layer_index)

    def h3(self, layer_index: int) -> None:
        """After the MoE block."""
        if self.runtime is not None:
            self.runtime.h3(layer_index)

    # ---- teardown, step by step, because the steps are agreed among the ranks ----

    def drain(self) -> None:
        """No hook issues anything any more; waits for the copies. What one of them raised is logged."""
        if self.runtime is not None:
            self.runtime.release()
            error = self.runtime.device.drain()
            if error is not None:
                logger.error("a copy failed before dense DWDP was released", exc_info=error)

    def unmap_imports(self) -> None:
        """Detaches the model's tensors to empty and gives the mappings of the peers' rows back."""
        if self.weights is not None:
            self.weights.detach()
            self.weights.store.unmap_imports()

    def release_own(self) -> None:
        """Releases prepared copies, this rank's rows and slots."""
        from dwdp.weights.mover import mover_of

        if self.runtime is not None:
            self.runtime.close_checks()
        if self.weights is not None:
            for plans in self.weights.plans:
                mover_of(self.weights.store.domain).forget(list(plans.values()))
            self.weights.slots.close()
            self.weights.store.close()
            self.weights = None


def refuse_weight_change(model) -> None:
    """Raises before a load, reload or incremental update of a model whose dense weights have moved.

    Also after teardown, and through wrappers. A model whose set-up was abandoned or never ran passes.
    """
    for part in _wrapped(model):
        if getattr(part, "released", False):
            raise ModelReleasedError("the weights of this model were released; build and load a new one")
        if getattr(part, "unusable", None) is not None:
            raise ModelUnusableError(f"this model cannot run any more: {part.unusable}; build and load a new one")
        if getattr(part, "dense_dwdp_moved", False):
            raise DwdpError(
                "dense DWDP has spread this model's weights over the ranks: they cannot be loaded or updated in "
                "place; release them, then build and load a new model and set it up"
            )


def _wrapped(model) -> Iterator[Any]:
    """The model, the modules in it, and what a wrapper that is no module holds as `model` or `module`."""
    seen: set[int] = set()
    pending = [model]
    while pending:
        part = pending.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        if callable(getattr(part, "modules", None)):
            yield from part.modules()
        else:
            pending += [getattr(part, name, None) for name in ("model", "module")]
