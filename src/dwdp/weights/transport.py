"""Own expert rows in memory that peers map, and the peers' rows mapped here read-only.

[Note: composite range] Each table of each layer has one range [ring pages | own handle | ring pages]. Expert
i starts at its start + padding + i * row bytes, so one ordinary `[E, ...]` tensor covers own and remote
experts. A handle maps only whole: its first and last granule also hold bytes of the neighbours' rows ("edge
bytes").

[Note: who writes a handle] Its owner, through the one writable mapping that exists before the handle is
sealed: own rows once, before any peer can map them, and the edge bytes beside them. Peers read own rows only.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from dwdp.errors import MemoryDomainError
from dwdp.memory.exchange import Exported, close_exported
from dwdp.partition.experts import ExpertPartition, HandleGeometry, handle_geometry
from dwdp.weights.mover import mover_of
from dwdp.weights.plan import CompositeGeometry, TableAddresses, TableSpec, composite_geometry, edge_slices

logger = logging.getLogger(__name__)


class HandleInfo(msgspec.Struct, frozen=True):
    """What a rank says about one of its handles; nbytes and data_offset in bytes, checksums one a row."""

    layer: int
    table: str
    rank: int
    nbytes: int
    data_offset: int
    checksums: list[int]


@dataclass(eq=False)
class OwnTable:
    """One table of one layer on this rank: its composite range and the handle with its own rows."""

    spec: TableSpec
    geometry: CompositeGeometry
    module: weakref.ref
    area: Any = None
    handle: Any = None
    loading: Any = None  # a range with nothing but the handle, from before the rows are read until `take_in`
    moved: bool = False  # the module's rows lie in the handle, there is no original
    checksums: list[int] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.spec.dtype)


class ExpertTransport:
    """The handles of one rank. What it made it releases: `close()` is idempotent, in any state.

    modules: one object per managed layer with `expert_tables()`; a table's name is the attribute that holds
    it.
    """

    def __init__(self, domain, partition: ExpertPartition, rank: int, specs: list[TableSpec], modules: list) -> None:
        self.domain, self.partition, self.rank = domain, partition, rank
        self.mover = mover_of(domain)
        self.own_range = partition.ranges[rank]
        self.tables = [OwnTable(spec, self._geometry(spec), weakref.ref(modules[spec.pos])) for spec in specs]
        self.peer_areas: list = []
        self._imported: list = []
        # (table's index, peer) -> address of the peer's first own row here; and what the peer announced.
        self._first_rows: dict[tuple[int, int], int] = {}
        self.infos: dict[int, list[HandleInfo]] = {}

    @property
    def stored_bytes(self) -> int:
        """Bytes of this rank's own handles, rounding included."""
        return sum(table.handle.nbytes for table in self.tables if table.handle is not None)

    @property
    def peers(self) -> list[int]:
        return [rank for rank in range(len(self.partition.ranges)) if rank != self.rank]

    def _geometry(self, spec: TableSpec) -> CompositeGeometry:
        num_experts, domain = self.partition.num_experts, self.domain
        return composite_geometry(spec.row_nbytes, *self.own_range, num_experts, domain.granularity, domain.page_bytes)

    # Moving in.

    @property
    def num_loading(self) -> int:
        """Tables whose rows were loaded into their handles and that `take_in` has not reached."""
        return sum(table.loading is not None for table in self.tables)

    def make_room(self) -> set[int]:
        """Before weights are read: makes every handle, and the modules' meta tables tensors over them.

        Returns the addresses of these tables. What it made it gives back when it fails.

        [Note: loading into handles] While rows are read a handle is mapped in a range of its own, because what else
        will be mapped, and with it the size of the pages, is known only in the setup. `take_in` then maps it
        where it belongs and moves no byte.
        """
        self._check_descriptors()
        try:
            return {self._make_room(table) for table in self.tables}
        except BaseException:
            self.detach()
            self.close()
            raise

    def _make_room(self, table: OwnTable) -> int:
        domain, spec, handle = self.domain, table.spec, table.geometry.handle
        table.loading = domain.reserve(handle.nbytes)
        table.handle = domain.create(handle.nbytes, f"experts-{spec.layer}-{spec.name}")
        domain.map(table.loading, 0, table.handle, writable=True)
        start, end = self.own_range
        rows = domain.tensor(table.loading, handle.data_offset, (end - start, *spec.shape), table.dtype)
        setattr(table.module(), spec.name, torch.nn.Parameter(rows, requires_grad=False))
        table.moved = True
        return rows.data_ptr()

    def take_in(self) -> None:
        """Table by table: allocate the handle, copy this rank's rows in, drop the original; or, where the rows were
        loaded into the handle, map it where it belongs.

        At most one table more than at rest is in memory at any time.
        """
        self._check_descriptors()
        for table in self.tables:
            table.geometry = self._geometry(table.spec)  # pages may have grown since there was room made
            self._take_in(table)
        self.mover.settle()  # peers read the rows once they have the handles

    def _take_in(self, table: OwnTable) -> None:
        domain, geometry, spec = self.domain, table.geometry, table.spec
        module = table.module()
        original = module.expert_tables()[spec.name]
        table.area = domain.reserve(geometry.nbytes)
        if table.loading is None:
            table.handle = domain.create(geometry.handle.nbytes, f"experts-{spec.layer}-{spec.name}")
        domain.map(table.area, geometry.before, table.handle, writable=True)
        rows = self._own_rows(table)
        table.checksums = self.mover.row_sums(original.data_ptr(), len(original), spec.row_nbytes)
        if table.loading is None:
            rows.view(torch.uint8).copy_(original.detach().view(torch.uint8))
        getattr(module, spec.name).data = rows
        table.moved = True
        if module.expert_tables()[spec.name].data_ptr() != rows.data_ptr():
            raise MemoryDomainError(f"{spec}: the module's attribute of that name does not hold the table")
        if table.loading is None:
            self.mover.settle()  # the original is read no more
        del original  # the last tensor over the range that is freed now
        self._free_loading(table)
        domain.reclaim()
        domain.seal(table.handle)

    def _check_descriptors(self) -> None:
        opened = sum(table.handle is not None for table in self.tables)
        self.domain.descriptor_budget.check(
            len(self.tables) * len(self.partition.ranges) - opened,
            f"all handles of the experts on rank {self.rank}",
        )

    def sum_own_rows(self) -> list[list[int]]:
        """Checksums of this rank's rows as they are now: one list a table, one number a row."""
        for table in self.tables:
            first = table.area.address + table.geometry.padding + self.own_range[0] * table.spec.row_nbytes
            table.checksums = self.mover.row_sums(first, self.own_range[1] - self.own_range[0], table.spec.row_nbytes)
        return [table.checksums for table in self.tables]

    def _own_rows(self, table: OwnTable) -> torch.Tensor:
        """[rows, ...] over this rank's rows."""
        start, end = self.own_range
        offset = table.geometry.padding + start * table.spec.row_nbytes
        return self.domain.tensor(table.area, offset, (end - start, *table.spec.shape), table.dtype)

    def full_tensor(self, table: OwnTable) -> torch.Tensor:
        """[E, ...] over the whole composite range, which must be mapped."""
        shape = (self.partition.num_experts, *table.spec.shape)
        return self.domain.tensor(table.area, table.geometry.padding, shape, table.dtype)

    # Exchanging.

    def exports(self) -> tuple[list[Exported], list[HandleInfo]]:
        """All own handles, exported, and what they are, in one order on every rank."""
        infos = [
            HandleInfo(
                table.spec.layer, table.spec.name, self.rank, table.geometry.handle.nbytes,
                table.geometry.handle.data_offset, table.checksums,
            )
            for table in self.tables
        ]  # fmt: skip
        return [self.domain.export(table.handle) for table in self.tables], infos

    def close_exports(self) -> None:
        """Closes the exported descriptors; only after every importer has mapped."""
        for table in self.tables:
            if table.handle is not None:
                table.handle.close_fd()

    def peer_geometry(self, table: OwnTable, peer: int) -> HandleGeometry:
        """Geometry of the handle of `peer`, from its own range."""
        return handle_geometry(table.spec.row_nbytes, *self.partition.ranges[peer], self.domain.granularity)

    def map_peers(self, received: dict[int, list[Exported]]) -> None:
        """Maps every handle of every peer whole and read-only. Owns what it is given, also when it fails.

        received: peer -> its exported handles in the order of `exports`; `infos` must be set.
        """
        left = {peer: list(exported) for peer, exported in received.items()}
        try:
            for peer in self.peers:
                self._map_peer(peer, left[peer])
        except BaseException:
            for exported in left.values():
                close_exported(exported)
            raise

    def _map_peer(self, peer: int, exported: list[Exported]) -> None:
        infos = self.infos[peer]
        if len(exported) != len(self.tables) or len(infos) != len(self.tables):
            raise MemoryDomainError(
                f"rank {peer} sent {len(exported)} handles and {len(infos)} descriptions for {len(self.tables)} tables"
            )
        sizes = []
        for table, info in zip(self.tables, infos):
            expected = self.peer_geometry(table, peer)
            announced = (info.layer, info.table, info.rank, info.nbytes, info.data_offset)
            wanted = (table.spec.layer, table.spec.name, peer, expected.nbytes, expected.data_offset)
            if announced != wanted:
                raise MemoryDomainError(
                    f"rank {peer} announced the handle (layer, table, rank, bytes, data offset) {announced} "
                    f"where {wanted} belongs"
                )
            sizes.append(expected.nbytes)
        area = self.domain.reserve(sum(sizes))
        self.peer_areas.append(area)
        offset = 0
        for index, nbytes in enumerate(sizes):
            handle = self.domain.import_handle(exported.pop(0), nbytes)
            self._imported.append(handle)
            mapping = self.domain.map(area, offset, handle, writable=False)
            handle.close_fd()  # the mapping keeps the memory
            self._first_rows[index, peer] = mapping.address + infos[index].data_offset
            offset += nbytes

    def addresses(self) -> list[TableAddresses]:
        """Per table, in order, where its experts lie here and in each peer's mapping."""
        return [
            TableAddresses(
                expert_zero=table.area.address + table.geometry.padding,
                row_nbytes=table.spec.row_nbytes,
                peers={peer: (self._first_rows[index, peer], *self.partition.ranges[peer]) for peer in self.peers},
            )
            for index, table in enumerate(self.tables)
        ]

    def edges(self) -> list:
        """The slices that fill every edge byte of the own handles, each from its owner."""
        return [
            piece
            for table, addresses in zip(self.tables, self.addresses())
            for piece in edge_slices(addresses, self.partition, self.rank, table.geometry.handle)
        ]

    def probe(self) -> int:
        """Proves access to every mapping, as `domain.probe` does; returns how many bytes were tried."""
        areas = [table.area for table in self.tables] + self.peer_areas
        return sum(self.domain.probe(area) for area in areas)

    # Giving back.

    def restore(self) -> None:
        """Rollback: copies the rows back out, one table at a time, and releases the handle behind each.

        Raises when a copy does not fit; `close` then releases what is left.
        """
        for table in self.tables:
            module = table.module()
            if table.moved and module is not None:
                rows = self._own_rows(table)
                original = torch.empty_like(rows)
                original.view(torch.uint8).copy_(rows.view(torch.uint8))
                getattr(module, table.spec.name).data = original
                del rows
                table.moved = False
            self._release(table)

    def detach(self) -> None:
        """Leaves the modules empty tables where their rows lie in handles that are about to go."""
        for table in self.tables:
            module = table.module()
            if table.moved and module is not None:
                rows = getattr(module, table.spec.name)
                rows.data = torch.empty((0, *table.spec.shape), dtype=table.dtype, device=rows.device)
            table.moved = False

    def unmap_imports(self) -> None:
        """Gives the peers' memory back; the plans must not run any more."""
        areas, self.peer_areas = self.peer_areas, []
        imported, self._imported = self._imported, []
        for area in areas:
            self.domain.free(area)
        for handle in imported:
            self.domain.release(handle)

    def release_own(self) -> None:
        """Releases own handles and composite ranges; no tensor over them may be used any more."""
        for table in self.tables:
            self._release(table)

    def close(self) -> None:
        self.unmap_imports()
        self.release_own()

    def _free_loading(self, table: OwnTable) -> None:
        loading, table.loading = table.loading, None
        if loading is not None:
            self.domain.free(loading)

    def _release(self, table: OwnTable) -> None:
        self._free_loading(table)
        area, handle = table.area, table.handle
        table.area = table.handle = None
        if area is not None:
            self.domain.free(area)
        if handle is not None:
            self.domain.release(handle)
