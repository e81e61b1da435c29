"""Dense set-up in six phases over five collectives: spread the dense weights, or leave the model as it was.

    P1  layout, digest, checksums, switches and a memory check are compared       vote that carries the reports
    P2  store and slots are allocated, own rows written                           exchange of handles
    P3  peers' rows are mapped, plans built                                       vote
    P4  every layer is gathered and compared byte for byte with the originals     vote
    P5  the module tensors are repointed into the slots, every layer checked      vote
    P6  the originals are dropped                                                 local

[Note: every rank enters every collective] A rank that failed in a phase hands its error in at that phase's
collective. A bad verdict ends set-up on all ranks there, with the original tensors back in their places.
"""

from __future__ import annotations

import logging
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from dwdp.errors import DwdpError, GroupTimeoutError, RankDiedError, VerificationError
from dwdp.group.posts import describe, raise_failures
from dwdp.group.ranks import compare_reports, join_problems
from dwdp.memory.exchange import Exported, close_exported, exchange_handles
from dwdp.partition.collect import Binding, Collected
from dwdp.partition.layout import Blob, DenseLayout, checksums_of, cuts, original_cuts
from dwdp.runtime.dense_schedule import slot_name
from dwdp.runtime.leaks import find_leaks
from dwdp.runtime.load_rows import LoadedRows, all_checksums, collect_dense, new_row_store
from dwdp.runtime.slots import DenseSlots, MappedSlots, gather_plans, mapped_slot_bytes, slot_bytes
from dwdp.runtime.watchdog import SlotChecker
from dwdp.weights.mover import mover_of
from dwdp.weights.plan import CopyPlan
from dwdp.weights.store import RowStore
from dwdp.weights.transfers import PER_SLICE, Transfer

logger = logging.getLogger(__name__)

# Every rank sets these alike. `enabled` and `required` are compared first and apart: where they differ all raise.
COMPARED_SETTINGS = (
    "segments",
    "min_bytes",
    "store_chunk_mb",
    "strict",
    "debug",
    "load",
    "roots",
    "own_rows",
)


@dataclass
class DenseWeights:
    """What a committed set-up leaves.

    plans: for each pos, slot -> plan. checksums: P1's of every blob, see `original_checksums`. repointed: weak
    references to the tensors in the modules that lie in slots; the model owns them.
    """

    layout: DenseLayout
    store: RowStore
    slots: DenseSlots
    plans: list[dict[str, CopyPlan]]
    checksums: list[list[str]]
    repointed: list[weakref.ref]
    leaks: list[str]

    def detach(self) -> None:
        """Leaves the model empty tensors in place of those in slots."""
        references, self.repointed = self.repointed, []
        for reference in references:
            tensor = reference()
            if tensor is not None:
                _point(tensor, torch.empty((0, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device))


class DenseSetup:
    """One attempt. `run()` returns the report and, when it committed, the weights; else the model is untouched.

    free_bytes: called in P1, bytes of memory that may still be allocated. config: a DenseConfig. transfer: how the
    copies are submitted; attached that of expert DWDP, standalone of `copy`.
    manager: whose hooks the layers must call when they call hooks themselves; None checks nothing. loaded: the rows
    that this model was loaded into, owned from now on: then a failure leaves it unusable, see [Note: no originals].
    """

    def __init__(
        self,
        model: nn.Module,
        config,
        *,
        group,
        domain,
        device,
        free_bytes: Callable[[], int],
        transfer: Transfer = PER_SLICE,
        manager=None,
        loaded: LoadedRows | None = None,
    ) -> None:
        self.model, self.config, self.loaded = model, config, loaded
        self.transfer, self.manager = transfer, manager
        self.group, self.domain, self.device = group, domain, device
        self.mover = mover_of(domain)
        self.free_bytes = free_bytes
        self.collected: Collected | None = None
        self.checksums: list[list[str]] = []
        self.store: RowStore | None = loaded and loaded.store
        self.slots: DenseSlots | None = None
        self.plans: list[dict[str, CopyPlan]] = []
        self.repointed: list[weakref.ref] | None = None  # None: the modules hold the originals

    def run(self) -> tuple[dict, DenseWeights | None]:
        """Raises on every rank when set-up failed anywhere and REQUIRED is on; a broken group always raises."""
        try:
            if not self._p1_compare():
                return nothing_moved("off"), None
            if not self.layout.blobs:
                return self._nothing_covered(), None
            peers = self._p2_write_rows()
            self._p3_map_peers(peers)
            self._p4_verify()
            self._p5_repoint()
        except BaseException as error:
            self._abandon()
            if self.loaded is not None:
                self.model.unusable = error
                raise
            # A group that broke in another way shows itself in its next collective.
            broken = isinstance(error, (_Disagreement, GroupTimeoutError, RankDiedError))
            if broken or self.config.required or not isinstance(error, Exception):
                raise
            logger.exception("dense DWDP set-up failed; every rank serves on with replicated dense weights")
            return nothing_moved("abandoned", f"{type(error).__name__}: {error}"), None
        try:
            return self._p6_drop_originals()
        except BaseException as error:
            # The peers have committed, and originals may be gone already.
            self.group.abort(f"dense P6 failed on rank {self.group.rank}: {error!r}")
            self.model.unusable = error
            self._weights([]).detach()
            self._abandon()
            raise

    @property
    def layout(self) -> DenseLayout:
        return self.collected.layout

    # ---- the phases ----

    def _p1_compare(self) -> bool:
        """Whether dense DWDP goes on; False when it is off on every rank."""
        error, report, loaded = None, {}, None
        if self.config.enabled:
            self.checksums = []
            error, report = _attempt(self._local_report)
        if error is None and self.loaded is not None:
            error, loaded = _attempt(self.loaded.checksums)
        mine = {
            "enabled": self.config.enabled,
            "required": self.config.required,
            "error": _text(error),
            "report": report or {},
            "loaded": loaded,
        }
        # The error rides in the payload: whether its ranks raise or serve on needs every rank's switches.
        reports = _collective(error, self.group.vote_with, "dense P1", None, mine)
        for key, switch in (("enabled", "DWDP_DENSE"), ("required", "DWDP_DENSE_REQUIRED")):
            values = [report[key] for report in reports]
            if len(set(values)) > 1:
                listed = ", ".join(f"rank {rank}: {'on' if v else 'off'}" for rank, v in enumerate(values))
                raise _Disagreement(f"the ranks differ on {switch} ({listed}); set it alike on every rank")
        if not self.config.enabled:
            return False
        self._verdict("dense P1", error, [report["error"] for report in reports])
        problems = what_differs([report["report"] for report in reports])
        if problems:
            raise DwdpError(f"dense DWDP cannot be set up, the ranks differ: {problems}")
        if self.loaded is not None:  # on every rank, since `load` is compared
            self.checksums = all_checksums(self.layout, [report["loaded"] for report in reports])
        return True

    def _local_report(self) -> dict[str, dict[str, str]]:
        """Three flat tables, so that a difference has a name: switches, every storage's place, its checksum."""
        c = self.config
        self.collected = collect_dense(self.model, c, self.group.size) if self.loaded is None else self.loaded.collected
        self._check_hooks()
        if not self.layout.blobs and c.strict:
            raise DwdpError(
                f"dense DWDP (strict): no layer has a weight of {c.min_bytes} bytes or more to move; lower min_bytes "
                "(DWDP_DENSE_MIN_BYTES)"
            )
        settings = {f"dense_dwdp.{key}": str(getattr(c, key)) for key in COMPARED_SETTINGS}
        settings["transfer (dense_dwdp.copy, gather_kernel)"] = str(self.transfer)
        layout = {"granularity of memory": str(self.domain.granularity), "layout digest": self.layout.digest}
        weights = {}
        self.checksums = self._original_checksums()
        for number, blob in enumerate(self.layout.blobs):
            sums = self.checksums[number]
            for i, storage in enumerate(blob.storages):
                layout[f"{blob.name} storage {i}"] = storage.describe()
                if self.loaded is None:
                    of_storage = [value for cut, value in zip(cuts(blob), sums) if cut.storage == i]
                    weights[f"the checksum of {storage.name} ({blob.name})"] = " ".join(of_storage)
        self._check_memory()
        return {"settings": settings, "layout": layout, "weights": weights}

    def _original_checksums(self) -> list[list[str]]:
        """Of every blob, all summed up in one go; nothing yet of what was loaded into rows."""
        blobs = self.layout.blobs
        if self.loaded is not None:
            return [[] for _ in blobs]
        rows = [original_cuts(blob, self._originals(number)) for number, blob in enumerate(blobs)]
        sums = iter(self.mover.sums([(row.data_ptr(), row.nbytes) for of_blob in rows for row in of_blob]))
        return [checksums_of(blob, [next(sums) for _ in of_blob]) for blob, of_blob in zip(blobs, rows)]

    def _check_hooks(self) -> None:
        """A layer without this manager's hooks would read what slots happen to hold."""
        for layer in self.collected.roots if self.manager is not None else ():
            if layer.calls_hooks and getattr(layer.layer, "dense", None) is not self.manager:
                raise DwdpError(
                    f"layer {layer.index} calls the hooks of no dense DWDP manager or of another one, because it was "
                    "built before this one was registered; build the model after that"
                )

    def _check_memory(self) -> None:
        rows = self.store or new_row_store(self.domain, self.layout, self.config, self.group.rank)
        store = rows.nbytes if self.loaded is None else 0  # loaded: allocated, and not free any more
        if rows.mapped:
            slots = mapped_slot_bytes(self.layout, rows.rank, self.domain.granularity, self.domain.page_bytes)
        else:
            slots = slot_bytes(self.layout, self.domain.granularity)
        free = self.free_bytes()
        if self.layout.blobs and store + slots > free:
            raise DwdpError(
                f"dense DWDP needs {store} bytes for its rows and {slots} bytes for its slots on rank "
                f"{self.group.rank} but {free} bytes are free; use more ranks, DWDP_DENSE_SEGMENTS=attn, or "
                "declare more memory"
            )

    def _p2_write_rows(self) -> dict[int, list[Exported]]:
        """Returns each peer's exported handles; this rank owns them."""
        error, sent = _attempt(self._write_rows)
        payload = msgspec.msgpack.encode(_text(error))
        received = _collective(error, exchange_handles, self.group, self.domain, "dense P2", sent or [], payload)
        peers = {rank: list(handles) for rank, (_, handles) in enumerate(received) if rank != self.group.rank}
        try:
            texts = [msgspec.msgpack.decode(payload) for payload, _ in received]
            self._verdict("dense P2", error, texts)
        except BaseException:
            for exported in peers.values():
                close_exported(exported)
            raise
        return peers

    def _write_rows(self) -> list[Exported]:
        if self.loaded is None:
            self.store = new_row_store(self.domain, self.layout, self.config, self.group.rank)
            self.store.allocate()
        self.slots = MappedSlots(self.store) if self.store.mapped else DenseSlots(self.domain, self.layout)
        self.slots.allocate()
        for number in range(len(self.layout.blobs)) if self.loaded is None else ():
            self.store.write_row(number, self._originals(number))
        self.mover.settle()  # peers read the rows once they have the handles
        return self.store.exports()

    def _p3_map_peers(self, peers: dict[int, list[Exported]]) -> None:
        error, _ = _attempt(self._map_peers, peers)
        for exported in peers.values():
            close_exported(exported)  # what was not taken over
        self.group.vote("dense P3", error)
        self.store.close_exports()  # every peer has mapped them

    def _map_peers(self, peers: dict[int, list[Exported]]) -> None:
        for rank, exported in peers.items():
            self.store.import_rows(rank, exported)
        self.plans = gather_plans(self.layout, self.store, self.slots, self.transfer)

    def _p4_verify(self) -> None:
        error, _ = _attempt(self._for_each_blob, self._compare_slot)
        self.group.vote("dense P4", error)

    def _p5_repoint(self) -> None:
        error, _ = _attempt(self._repoint)
        self.group.vote("dense P5", error)

    def _repoint(self) -> None:
        self.repointed = []
        bindings = [b for blob in self.collected.bindings for storage in blob for b in storage]
        moving = {id(b.tensor) for b in bindings}
        views: dict[int, torch.Tensor] = {}  # one tensor under two names stays one
        for number, blob in enumerate(self.layout.blobs):
            for storage, bindings in zip(blob.storages, self.collected.bindings[number]):
                for spec, binding in zip(storage.views, bindings):
                    key = id(binding.tensor)
                    if key not in views:
                        views[key] = _repointed(binding.tensor, self.slots.view(number, storage, spec), moving)
                        self.repointed.append(weakref.ref(views[key]))
                    binding.assign(views[key])
        self._for_each_blob(self._compare_modules)

    def _p6_drop_originals(self) -> tuple[dict, DenseWeights]:
        if self.config.debug >= 1:
            self.slots.fill_with_nan()
            self.mover.settle()  # the first copies come behind it
        originals = [
            (StorageWeakRef(bindings[0].original.untyped_storage()), storage.name)
            for number, blob in enumerate(self.layout.blobs if self.loaded is None else ())
            for storage, bindings in zip(blob.storages, self.collected.bindings[number])
        ]
        self.loaded = None
        self.collected = Collected(self.layout, [], self.collected.roots, self.collected.stays)
        leaks = find_leaks(originals, name_holders=self.config.debug >= 1)
        moved = self.layout.moved_nbytes
        report = {
            "status": "committed",
            "problem": None,
            "digest": self.layout.digest,
            "covered_layers": self.layout.num_layers,
            "moved_bytes": moved,
            "stored_bytes": self.store.nbytes,
            "slot_bytes": self.slots.nbytes,
            "freed_bytes": moved - self.layout.share_nbytes(self.group.rank),
            "leaks": len(leaks),
            "transfer": self.transfer.name,
            "gather_kernel": self.transfer.kernel,
        }
        logger.info(
            "dense DWDP committed: digest %s, %d layers, %d bytes moved, %d stored, %d in slots, %d freed, %d leaks, "
            "transfer %s",
            report["digest"][:16],
            *(report[key] for key in ("covered_layers", "moved_bytes", "stored_bytes", "slot_bytes", "freed_bytes")),
            len(leaks),
            self.transfer,
        )
        return report, self._weights(leaks)

    def _weights(self, leaks: list[str]) -> DenseWeights:
        return DenseWeights(self.layout, self.store, self.slots, self.plans, self.checksums, self.repointed, leaks)

    # ---- the ends without a commit ----

    def _abandon(self) -> None:
        """Puts the original tensors back and gives everything back that was allocated."""
        if self.repointed is not None:
            for binding in (b for blob in self.collected.bindings for storage in blob for b in storage):
                _point(binding.tensor, binding.original)
                binding.assign(binding.tensor)
        # No copy may run into memory that is given back; the error of one was this setup's, which is given up.
        forget = [lambda plans=plans: self.mover.forget(list(plans.values())) for plans in self.plans]
        steps = [
            self.device.recover,
            *forget,
            *(owner.close for owner in (self.slots, self.store) if owner is not None),
        ]
        for step in steps:
            try:
                step()
            except BaseException:  # it must neither hide the error that led here nor stop the other steps
                logger.exception("dense DWDP: a step of giving the set-up up failed: %s", step.__qualname__)
        self.plans = []

    def _nothing_covered(self) -> dict:
        stays = self.collected.stays
        why = f"no storage of {self.config.min_bytes} bytes or more may move" + (f" ({stays[0]})" if stays else "")
        logger.warning("dense DWDP moves nothing: %s", why)
        return nothing_moved("nothing covered", why)

    # ---- helpers ----

    def _originals(self, number: int) -> list[torch.Tensor]:
        return [self.collected.storage_bytes(number, i) for i in range(len(self.layout.blobs[number].storages))]

    def _verdict(self, phase: str, error: BaseException | None, texts: Sequence[str | None]) -> None:
        """As group.vote, for a collective that carried the errors' texts itself."""
        if error is not None:
            raise error
        raise_failures(phase, texts)

    def _for_each_blob(self, check: Callable[[int, Blob, str], None]) -> None:
        """Gathers every blob into its slot on the copy stream, and checks it there."""
        for number, blob in enumerate(self.layout.blobs):
            slot = slot_name(blob.segment, blob.pos)
            plan = self.plans[blob.pos][slot]
            self.device.enqueue(
                self.device.copy,
                self.mover.submission(plan),
                kind="copy",
                slot=slot,
                layer=blob.pos,
                nbytes=plan.nbytes,
            )
            self.device.synchronize()
            check(number, blob, slot)

    def _compare_slot(self, number: int, blob: Blob, slot: str) -> None:
        end, data = 0, self.slots.data(number)
        if self.loaded is not None:
            self._compare_checksums(number, blob, slot)
            return
        start = data.data_ptr()
        pairs = [
            (start + storage.offset, original.data_ptr(), storage.nbytes)
            for storage, original in zip(blob.storages, self._originals(number))
        ]
        for storage, at in zip(blob.storages, self.mover.first_differences(pairs)):
            self._check_pad(blob, slot, data, end, storage.offset)
            if at is not None:
                self._wrong_byte(blob, slot, storage.offset + at)
            end = storage.offset + storage.nbytes
        self._check_pad(blob, slot, data, end, blob.nbytes)

    def _compare_checksums(self, number: int, blob: Blob, slot: str) -> None:
        problem = SlotChecker(self.layout, self.store, self.slots, self.checksums, self.mover).problem(blob.pos, slot)
        if problem:
            raise VerificationError(f"{problem} (loaded straight into rows)")

    def _check_pad(self, blob: Blob, slot: str, data: torch.Tensor, start: int, end: int) -> None:
        pad = data[start:end]
        if start < end and pad.any():
            self._wrong_byte(blob, slot, start + int(pad.nonzero()[0]))

    def _wrong_byte(self, blob: Blob, slot: str, byte: int) -> None:
        raise VerificationError(
            f"{blob.name} gathered into slot {slot} differs from the original first at {blob.locate(byte)}, in the "
            f"row of rank {byte // blob.row_nbytes}; between GPUs check IOMMU and ACS settings"
        )

    def _compare_modules(self, number: int, blob: Blob, slot: str) -> None:
        if self.loaded is not None:
            self._compare_checksums(number, blob, slot)
        start = self.slots.data(number).data_ptr()
        values: list[tuple[Binding, torch.Tensor, torch.Tensor]] = []
        for storage, bindings in zip(blob.storages, self.collected.bindings[number]):
            for spec, binding in zip(storage.views, bindings):
                new, old = getattr(binding.module, binding.attribute), binding.original
                address = start + storage.offset + spec.offset * old.element_size()
                if new.data_ptr() != address and new.numel():
                    raise VerificationError(f"{binding.name} does not lie at its place in slot {slot}")
                if (new.dtype, new.shape, new.stride()) != (old.dtype, old.shape, old.stride()):
                    raise VerificationError(f"{binding.name} changed its dtype, shape or stride in slot {slot}")
                if self.loaded is None:
                    values.append((binding, _value_bytes(new), _value_bytes(old)))
        pairs = [(new.data_ptr(), old.data_ptr(), old.nbytes) for _, new, old in values]
        for (binding, _, _), at in zip(values, self.mover.first_differences(pairs) if pairs else ()):
            if at is not None:
                raise VerificationError(f"{binding.name} reads other bytes in slot {slot} than its original")


class _Disagreement(DwdpError):
    """Ranks differ on DENSE or REQUIRED, so REQUIRED cannot decide: all raise."""


def nothing_moved(status: str, problem: str | None = None) -> dict:
    """The dense part of the status where nothing was committed."""
    zeros = dict.fromkeys(("covered_layers", "moved_bytes", "stored_bytes", "slot_bytes", "freed_bytes", "leaks"), 0)
    return {"status": status, "problem": problem, "digest": None, "transfer": None, "gather_kernel": None, **zeros}


def what_differs(reports: Sequence[dict[str, dict[str, str]]]) -> str:
    """What differs between the ranks' reports, or "": switches before layout before weights, since one explains
    the next."""
    for part in ("settings", "layout", "weights"):
        problems = compare_reports([report[part] for report in reports])
        if problems:
            return join_problems(problems)
    return ""


def _repointed(tensor: torch.Tensor, view: torch.Tensor, moving: set[int]) -> torch.Tensor:
    """`tensor` itself over the bytes of `view`: its class, requires_grad and attributes stay, and whoever holds it
    sees the new bytes. A plain view of a tensor that does not move keeps that alive, so another takes its place.

    moving: ids of all tensors that are pointed into slots.
    """
    if tensor.is_meta:  # [Note: no originals]; torch lets no tensor change from there to memory
        view = nn.Parameter(view, requires_grad=tensor.requires_grad)
        view.__dict__.update(tensor.__dict__)
        return view
    if tensor._is_view() and id(tensor._base) not in moving and not isinstance(tensor, nn.Parameter):
        view.requires_grad_(tensor.requires_grad)
        view.__dict__.update(tensor.__dict__)
        return view
    _point(tensor, view)
    return tensor


def _point(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Points `tensor` at the bytes of `values`.

    A subclass may have a say in every call of torch, but not in where its bytes lie. A tensor made in inference mode
    takes the bytes from one of its kind only.
    """
    with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(tensor.is_inference()):
        if tensor.is_inference() and not values.is_inference():
            place = (values.storage_offset(), values.shape, values.stride())
            values = torch.empty(0, dtype=values.dtype, device=values.device).set_(values.untyped_storage(), *place)
        tensor.data = values


def _value_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [n] of a tensor's values: NaNs compare equal to themselves."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _attempt(work: Callable, *args):
    """(error or None, result or None); see [Note: every rank enters every collective]."""
    try:
        return None, work(*args)
    except BaseException as error:
        # The frames' tensors lie over slots that the rollback is about to free.
        traceback.clear_frames(error.__traceback__)
        return error, None


def _collective(own: BaseException | None, call: Callable, *args):
    """A collective that fails itself raises what this rank had failed with, with its own error as context."""
    try:
        return call(*args)
    except BaseException:
        if own is not None:
            raise own  # noqa: B904
        raise


def _text(error: BaseException | None) -> str | None:
    return None if error is None else describe(error)
