"""Setting expert DWDP up: four collectives, whatever the number of layers, and all or nothing on every rank.

    handshake   what each rank has is compared
    handles     own rows move into handles, tensor by tensor; all handles are exchanged
    mapping     every rank has mapped every peer; exported descriptors are closed
    scalars     ring, edges, plans and verification are done; the small tensors are exchanged; the final vote

[Note: verdicts] A rank that fails goes on to the next collective and says so there; then every rank raises
after that collective, gives back what it made, and its model is as it was. Behind the final vote nothing can
fail.

[Note: loaded into handles] Where the rows were read straight into handles (`make_room`) there is no copy that could
be given back: after a failure the model is marked unusable instead. Nothing but the step that moves rows differs.

[Note: shares of the host] Where no size is declared, a rank's is its share of the memory that the host has
available right behind the handshake: every rank has loaded and none has begun its ring. A rank that asked the
host again later would divide what its peers' rings have left, and refuse a ring that fits.
"""

from __future__ import annotations

import hashlib
import logging
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from dwdp.errors import DwdpError, GroupError, VerificationError
from dwdp.group.posts import describe, raise_failures
from dwdp.group.ranks import compare_reports, join_problems
from dwdp.memory.exchange import Exported, close_exported, exchange_handles
from dwdp.partition.experts import ExpertPartition
from dwdp.runtime.counters import Counters
from dwdp.runtime.experts import ExpertRuntime, detach_module
from dwdp.weights.mover import mover_of
from dwdp.weights.plan import CopyPlan, TableSpec, count_mappings, expert_runs
from dwdp.weights.ring import PrefetchRing
from dwdp.weights.small import PER_EXPERT, SmallSpec, assemble, disagreements, pack
from dwdp.weights.tables import check_movable, describe_tables
from dwdp.weights.transfers import PER_SLICE, Transfer
from dwdp.weights.transport import ExpertTransport, HandleInfo
from dwdp.weights.verify import MODES, RowChecker, overlap_problems

logger = logging.getLogger(__name__)


class HandlesMessage(msgspec.Struct):
    """What a rank sends beside its descriptors; error: its own failure so far, and then nothing else."""

    error: str | None
    digest: str
    handles: list[HandleInfo]


@dataclass(frozen=True)
class LoadedTables:
    """Handles that a model's expert tables are loaded into; addresses: of the tables."""

    transport: ExpertTransport
    addresses: set[int]

    def close(self) -> None:
        """Gives the handles back and leaves the model empty tables. Idempotent; for a load that failed."""
        self.transport.detach()
        self.transport.close()


def make_room(model, domain, partition: ExpertPartition, rank: int) -> LoadedTables:
    """Handles for the expert tables of a model on the meta device, which become tensors over them.

    To be called before weights are read, without a collective; the result goes to `setup_experts`, or is closed.
    Raises what an allocation raises, with nothing left; the budgets are checked before the first handle.
    """
    layers = model.moe_layers()
    specs = describe_tables(layers, partition, rank, domain).tables
    plan_pages(domain, partition, rank, specs)
    transport = ExpertTransport(domain, partition, rank, specs, layers)
    return LoadedTables(transport, transport.make_room())


def plan_pages(domain, partition: ExpertPartition, rank: int, specs: list[TableSpec], given_back: int = 0) -> None:
    """Pages so large that all mappings fit the budget; given_back: mappings that will make room for them."""
    nbytes = [spec.row_nbytes for spec in specs]
    domain.plan_page_bytes(lambda page: count_mappings(nbytes, partition, rank, domain.granularity, page) - given_back)


def setup_experts(
    model,
    *,
    group,
    domain,
    device,
    partition: ExpertPartition,
    num_slots: int,
    verify: str = "full",
    verify_every: int = 0,
    counters: Counters | None = None,
    host_memory_bytes: int | None = None,
    dense_would_help: bool = False,
    restorable: bool = True,
    transfer: Transfer = PER_SLICE,
    loaded: LoadedTables | None = None,
) -> ExpertRuntime:
    """Moves the routed experts of `model.moe_layers()` into shared memory and returns their runtime.

    Every rank of `group` calls it, with its own model holding its rows of `partition` (a group of one rank
    makes no collective, and its tables stay as they are). host_memory_bytes: declared memory of this rank;
    None: the group's ranks share what the host has available, see [Note: shares of the host].
    dense_would_help: dense DWDP is a remedy for a ring that does not fit. restorable: False when the model
    cannot be as it was again (dense DWDP has committed); it is then marked unusable instead. transfer: how the
    copies are submitted. loaded: the handles that this model was loaded into, owned from now on; see [Note: loaded
    into handles].

    Raises on every rank when any rank fails: there its own error (PrefetchRingMemoryError, VerificationError,
    ValueError, MemoryDomainError, ...), elsewhere a RuntimeError naming rank, phase and text. The model is
    then as it was, or `model.unusable` is the error; nothing is left mapped.
    """
    if verify not in MODES:
        raise ValueError(f"verify is {verify!r}, not one of {', '.join(MODES)}")
    setup = _Setup(
        model, group, domain, device, partition,
        num_slots=num_slots,
        verify=verify,
        verify_every=verify_every,
        counters=counters,
        host_memory_bytes=host_memory_bytes,
        dense_would_help=dense_would_help,
        transfer=transfer,
        restorable=restorable and loaded is None,
        loaded=loaded,
    )  # fmt: skip
    return setup.alone() if len(partition.ranges) == 1 else setup.run()


def outside_bytes(model, domain=None) -> int:
    """Bytes of the model's distinct live storages outside the domain's memory.

    Counted are parameters, buffers and plain tensor attributes of every module, each storage once.
    """
    storages: dict[int, int] = {}
    for module in model.modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        tensors += [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
        for tensor in tensors:
            if not tensor.is_meta and (domain is None or not domain.holds(tensor)):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class _Setup:
    """One run of the setup on one rank."""

    def __init__(self, model, group, domain, device, partition: ExpertPartition, **options: Any) -> None:
        self.model, self.group, self.domain, self.device = model, group, domain, device
        self.partition, self.options = partition, options
        self.mover = mover_of(domain)
        self.plans: list[CopyPlan] = []
        self.layers = model.moe_layers()
        self.rank = 0 if group is None else group.rank
        self.error: Exception | None = None  # this rank's first failure, to be told at the next collective
        self.specs: list[TableSpec] = []
        self.small: list[SmallSpec] = []
        self.loaded: LoadedTables | None = options["loaded"]
        self.transport: ExpertTransport | None = self.loaded and self.loaded.transport
        self.ring: PrefetchRing | None = None
        self.runtime: ExpertRuntime | None = None
        self.received: dict[int, list[Exported]] = {}
        self.device_bytes: int | None = options["host_memory_bytes"]

    def alone(self) -> ExpertRuntime:
        """One rank holds all experts: nothing moves and there is nothing to prefetch."""
        self._describe()
        logger.info("expert DWDP (%s): one rank holds all experts, nothing moves", self.partition.describe())
        return ExpertRuntime(self.device, [], 0, counters=self.options["counters"], report=self._report())

    def run(self) -> ExpertRuntime:
        rebinding = False
        try:
            self._attempt(self._announce)
            self._handshake()
            self._handles()
            self._mapping()
            rebind = self._scalars()
            rebinding = True
            rebind()
        except BaseException as error:
            if rebinding or not isinstance(error, Exception):
                # The peers have gone on, or this rank will not come to the next collective.
                self.group.abort(f"expert setup of rank {self.rank} failed: {error!r}")
            self._roll_back(error, rebinding=rebinding)
            raise
        logger.info("expert DWDP is set up; free memory after setup %d bytes", self._free_bytes())
        return self.runtime

    # The four collectives.

    def _handshake(self) -> None:
        report = self._attempt(self._describe)
        reports = self.group.vote_with("expert handshake", self.error, report)
        problems = compare_reports(reports)
        if problems:
            raise DwdpError(f"expert handshake: the ranks disagree: {join_problems(problems)}")
        self.digest = hashlib.sha256(msgspec.json.encode(report, order="sorted")).hexdigest()
        if self.device_bytes is None:  # see [Note: shares of the host]
            self.device_bytes = self._free_bytes() + self._held_bytes()

    def _handles(self) -> None:
        self._attempt(self._move)
        exported, infos = self._attempt(lambda: self.transport.exports()) or ([], [])
        text = None if self.error is None else describe(self.error)
        payload = msgspec.msgpack.encode(HandlesMessage(text, self.digest, infos))
        try:
            answers = exchange_handles(self.group, self.domain, "expert handles", exported, payload)
        except Exception:
            if self.error is not None:
                raise self.error  # noqa: B904 - its context is the collective's error
            raise
        self.received = {peer: list(sent) for peer, (_, sent) in enumerate(answers) if peer != self.rank}
        messages = [msgspec.msgpack.decode(payload, type=HandlesMessage) for payload, _ in answers]
        self._judge_messages(messages)

    def _judge_messages(self, messages: list[HandlesMessage]) -> None:
        """The same verdict on every rank, from the same messages."""
        if self.error is not None:
            raise self.error
        raise_failures("expert handles", [message.error for message in messages])
        for rank, message in enumerate(messages):
            if message.digest != messages[0].digest:
                raise GroupError(f"rank {rank} sent handles of other tables than rank 0 (another digest)")
        checksums = [[info.checksums for info in message.handles] for message in messages]
        problems = overlap_problems(self.specs, checksums, self.partition)
        if problems:
            raise VerificationError(f"copies of an expert must be equal: {join_problems(problems)}")
        self.transport.infos = {rank: message.handles for rank, message in enumerate(messages)}

    def _mapping(self) -> None:
        def map_peers() -> None:
            received, self.received = self.received, {}
            self.transport.map_peers(received)

        self._attempt(map_peers)
        self.group.vote("expert mapping", self.error)
        self.transport.close_exports()

    def _scalars(self) -> Callable[[], None]:
        """Returns the rebinding, which cannot fail."""
        mine = self._attempt(self._build)
        sent = self.group.vote_with("expert scalars", self.error, mine)
        problems = disagreements(self.small, sent, self.partition)
        if problems:
            raise VerificationError(f"expert scalars: the ranks disagree: {join_problems(problems)}")
        assemble(self.small, sent, self.partition, self.prepared_small)
        prepared = []
        for pos in range(len(self.layers)):
            of_layer = self._of_layer(pos, zip(self.transport.tables, self.full))
            tables = {table.spec.name: full for table, full in of_layer}
            small = {
                spec.name: full
                for spec, full in zip(self.small, self.prepared_small)
                if spec.pos == pos and full is not None
            }
            prepared.append((tables, small))
        self.full = self.prepared_small = None

        def rebind() -> None:
            for pos, (layer, (tables, small)) in enumerate(zip(self.layers, prepared)):
                layer.rebind(tables, small)
                layer.dwdp, layer.dwdp_pos = self.runtime, pos

        return rebind

    # The local steps.

    def _attempt(self, step: Callable[[], Any]) -> Any:
        """Runs a local step unless this rank has failed; its failure waits for the next collective."""
        if self.error is None:
            try:
                return step()
            except Exception as error:
                # The frames' tensors lie over ranges that the rollback is about to free.
                traceback.clear_frames(error.__traceback__)
                self.error = error
        return None

    def _announce(self) -> None:
        logger.info(
            "expert DWDP (%s): waiting for all %d ranks; free memory before setup %d bytes",
            self.partition.describe(), self.group.size, self._free_bytes(),
        )  # fmt: skip

    def _describe(self) -> dict[str, Any]:
        """Checks this rank's tables and returns what every rank must have alike."""
        if self.group is not None and self.group.size != len(self.partition.ranges):
            raise ValueError(
                f"the partition is for {len(self.partition.ranges)} ranks, the group has {self.group.size}"
            )
        found = describe_tables(self.layers, self.partition, self.rank, self.domain)
        check_movable(self.layers, self.domain, self.loaded.addresses if self.loaded else ())
        self.specs, self.small = found.tables, found.small
        return found.report

    def _move(self) -> None:
        given_back = self.loaded.transport.num_loading if self.loaded else 0
        plan_pages(self.domain, self.partition, self.rank, self.specs, given_back)
        if self.loaded is None:
            self.transport = ExpertTransport(self.domain, self.partition, self.rank, self.specs, self.layers)
        self.transport.take_in()

    def _build(self) -> list[bytes]:
        """Ring, edges, plans, verification, and everything the rebinding needs; returns the small tensors."""
        transport, options = self.transport, self.options
        positions = range(len(self.layers))
        tables = [self._of_layer(pos, transport.tables) for pos in positions]
        self.ring = PrefetchRing(self.domain, tables, options["num_slots"])
        self.ring.check_fits(self._free_bytes(), self._remedies())
        self.ring.allocate()
        logger.info(
            "expert ring: %d bytes, slots of %s pages of %d bytes; free memory after the ring %d bytes",
            self.ring.nbytes, self.ring.slot_pages, self.ring.page_bytes, self._free_bytes(),
        )  # fmt: skip
        transport.probe()
        self.mover.copy(transport.edges())
        addresses = transport.addresses()
        plans = self.plans
        for pos in positions:
            runs = expert_runs(self._of_layer(pos, addresses), self.partition, self.rank)
            plans.append(options["transfer"].plan(runs, rank=self.rank, num_ranks=len(self.partition.ranges), pos=pos))
        logger.info("expert transfer: %s", options["transfer"].describe(plans))
        checksums = {rank: [info.checksums for info in infos] for rank, infos in transport.infos.items()}
        checker = RowChecker(self.specs, addresses, checksums, self.partition, self.rank, self.mover)
        rows = 0
        for pos, plan in enumerate(plans):
            self.mover.run(plan)
            rows += checker.check(pos, options["verify"])
        logger.info("%d expert rows from peers were verified (%s)", rows, options["verify"])
        self.full = [transport.full_tensor(table) for table in transport.tables]
        tensors = [self.layers[spec.pos].small_tensors()[spec.name] for spec in self.small]
        self.prepared_small = [
            tensor.new_empty((self.partition.num_experts, *spec.shape)) if spec.kind == PER_EXPERT else None
            for spec, tensor in zip(self.small, tensors)
        ]
        self.runtime = ExpertRuntime(
            self.device, plans, options["num_slots"],
            counters=options["counters"],
            transport=transport,
            small=self.small,
            ring=self.ring,
            modules=self.layers,
            checker=checker,
            verify_every=options["verify_every"],
            mover=self.mover,
            report=self._report(rows),
        )  # fmt: skip
        return [pack(tensor) for tensor in tensors]

    def _of_layer(self, pos: int, items: Iterable[Any]) -> list[Any]:
        """Those of one managed layer; items: one a table, in the order of `specs`."""
        return [item for spec, item in zip(self.specs, items, strict=True) if spec.pos == pos]

    def _held_bytes(self) -> int:
        return self.domain.allocated_bytes + outside_bytes(self.model, self.domain)

    def _free_bytes(self) -> int:
        held = self._held_bytes()
        return self.domain.free_bytes(self.device_bytes, held_bytes=held, ranks_on_host=self.group.size)

    def _remedies(self) -> list[str]:
        remedies = ["dense DWDP (DWDP_DENSE=1)"] if self.options["dense_would_help"] else []
        if self.options["num_slots"] > 2:
            remedies.append("fewer prefetch slots (num_prefetch_slots)")
        return [*remedies, "a larger N (dwdp_size)"]

    def _report(self, verified_rows: int = 0) -> dict[str, Any]:
        """What the status shows, and the experts' part of the ledger (bytes)."""
        start, end = self.partition.ranges[self.rank]
        row = sum(spec.row_nbytes for spec in self.specs)
        ring = self.ring
        return {
            "partition": {
                "kind": self.partition.kind,
                "ranges": [list(pair) for pair in self.partition.ranges],
            },
            "expert_moved_bytes": self.partition.num_experts * row,
            "stored_bytes": 0 if self.transport is None else self.transport.stored_bytes,
            "ring_bytes": 0 if ring is None else ring.nbytes,
            "freed_bytes": (self.partition.num_experts - (end - start)) * row,
            "page_bytes": 0 if ring is None else ring.page_bytes,
            "pages_per_slot": [] if ring is None else ring.slot_pages,
            "verify": self.options["verify"],
            "verified_rows": verified_rows,
            "transfer": self.options["transfer"].name if ring is not None else None,
            "gather_kernel": self.options["transfer"].kernel if ring is not None else None,
        }

    def _roll_back(self, error: BaseException, *, rebinding: bool) -> None:
        """Gives everything back; the model is as it was, or marked unusable. Never raises over `error`."""
        self.full = self.prepared_small = None
        for exported in self.received.values():
            close_exported(exported)
        self.received = {}
        restored = self.options["restorable"] and not rebinding
        if self.runtime is not None:
            self._clean_up(self.runtime.close_checks)
        self._clean_up(self.mover.forget, self.plans)
        if self.ring is not None:
            self._clean_up(self.ring.close)
        for layer in self.layers if rebinding else []:
            self._clean_up(detach_module, layer)
        if self.transport is not None:
            self._clean_up(self.transport.unmap_imports)
            if restored and not self._clean_up(self.transport.restore):
                logger.error("rank %d: the experts could not be copied back", self.rank)
                restored = False
        if not restored:
            self.model.unusable = error
        if self.transport is not None:
            self._clean_up(self.transport.detach)
            self._clean_up(self.transport.close)

    def _clean_up(self, step: Callable[..., None], *args) -> bool:
        """Whether a step of the rollback succeeded; a failure is logged and stops none of the others."""
        try:
            step(*args)
        except BaseException:
            logger.exception("rank %d: a step of the rollback failed: %s", self.rank, step.__qualname__)
            return False
        return True
