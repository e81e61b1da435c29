"""`dwdp plan`: where experts lie, what a rank holds and moves, whether it fits a GPU and from which step on it pays.

Arithmetic on the model's config.json and, for a folder, on the headers of its files: no torch, no GPU, no weights.
Geometry is that of CUDA memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dwdp.errors import ConfigError, MemoryBudgetError
from dwdp.kernels.flash_mla import page_rows
from dwdp.memory.pages import fit_page_bytes
from dwdp.model import shapes
from dwdp.model.config import ModelConfig
from dwdp.model.kept_fp8 import held_tensors
from dwdp.partition.experts import ExpertPartition
from dwdp.tools.hardware import Gpu
from dwdp.tools.plan_dense import PAGE_GRANULES, DensePlan, DenseSizes
from dwdp.tools.plan_folder import LoadPlan
from dwdp.tools.plan_model import FORMATS, KNOWN_MODELS, folder_of, kept_projections, read_model
from dwdp.weights.plan import composite_geometry, count_mappings

GRANULE_BYTES = 2 << 20
PAGE_BYTES = PAGE_GRANULES * GRANULE_BYTES
MAPPING_BUDGET = 120_000
WORKING_RESERVE_BYTES = 8 << 30
"""Kept free beside weights and cache: CUDA context and libraries (1 to 2 GiB) and the activations of a Kimi-K3 step
of 16,384 tokens (residual snapshots 2 GB, tokens gathered for their experts and the experts' inner rows 5 GB)."""
KV_FRACTION = 0.9
"""Share of the memory that is left which the KV cache takes, where no option says otherwise."""


@dataclass(frozen=True)
class Split:
    """How experts are to be spread; the fields that `ExpertPartition` reads."""

    dwdp_size: int
    num_experts_per_worker: int = 0
    num_prefetch_experts: int = 0


@dataclass(frozen=True)
class ModelSizes:
    """What a plan needs of a model: E, L, bytes of an expert's row of each table of a layer, and bytes of what every
    rank holds whole without dense DWDP, of a sequence's state and of a token's cache rows; FLOP of a token in a mean
    MoE layer. factor_nbytes: of the small per-expert tensors of all experts and layers, part of whole_nbytes. kv_page:
    tokens by which a sequence's cache grows."""

    num_experts: int
    num_layers: int
    row_nbytes: tuple[int, ...]
    whole_nbytes: int
    state_nbytes: int
    kv_token_nbytes: int
    flops_per_token: float
    factor_nbytes: int = 0
    kv_page: int = 1

    @classmethod
    def of(cls, config: ModelConfig, expert_format: str, kept_fp8: Container[str] = ()) -> ModelSizes:
        """expert_format: plain, mxfp4 or nvfp4; everything else is bf16, but for FP8 weights of modules in kept_fp8:
        those of others are widened when loaded."""
        layers = config.moe_layer_indices
        if not layers:
            raise ConfigError("the model has no routed experts, there is nothing to plan")
        small = sum(tensor.nbytes for tensor in shapes.small_expert_tensors(config, expert_format).values())
        factors = len(layers) * config.num_experts * small
        dense = sum(tensor.nbytes for tensor in held_tensors(config, kept_fp8).values())
        return cls(
            num_experts=config.num_experts,
            num_layers=len(layers),
            row_nbytes=tuple(table.nbytes for table in shapes.expert_tables(config, expert_format).values()),
            whole_nbytes=dense + factors,
            state_nbytes=shapes.state_bytes_per_sequence(config),
            kv_token_nbytes=shapes.kv_bytes_per_token(config),
            flops_per_token=sum(shapes.layer_flops_per_token(config, i) for i in layers) / len(layers),
            factor_nbytes=factors,
            kv_page=page_rows(config.mla_cache_width),
        )

    @property
    def expert_nbytes(self) -> int:
        """Bytes of one expert of one layer."""
        return sum(self.row_nbytes)

    @property
    def layer_nbytes(self) -> int:
        """Bytes of all experts of one layer."""
        return self.num_experts * self.expert_nbytes


@dataclass(frozen=True)
class RankPlan:
    """One rank. handle_bytes, mappings and remote_bytes_per_forward are over all layers."""

    rank: int
    pages_per_slot: int
    handle_bytes: int
    ring_bytes: int
    remote_bytes_per_layer: int
    remote_bytes_per_forward: int
    mappings: int


@dataclass(frozen=True)
class GpuPlan:
    """What a GPU makes of the plan; field names are those of the JSON document.

    fits: while it serves. copy_seconds_per_layer: from the peers, of the rank that copies most, with dense DWDP its
    dense weights included. compute_seconds_per_layer: of one token, mean over the MoE layers. break_even_tokens: tokens
    of a step whose compute lasts as long as the copy. kv_tokens: cached tokens of one sequence on the fullest rank, in
    whole pages; None when no layer has a cache. smallest_ranks_that_fit: with balanced ranges.
    """

    fits: bool
    copy_seconds_per_layer: float
    compute_seconds_per_layer: float
    break_even_tokens: int
    kv_tokens: int | None
    state_bytes_per_sequence: int
    load_bytes_per_rank: int
    smallest_ranks_that_fit: int | None


@dataclass(frozen=True)
class Plan:
    """load: of a folder with weights, else None."""

    partition: ExpertPartition
    num_slots: int
    page_bytes: int
    ranks: tuple[RankPlan, ...]
    gpu: GpuPlan | None = None
    dense: DensePlan | None = None
    load: LoadPlan | None = None

    def document(self) -> dict[str, Any]:
        """The document of `--json`, without reads."""
        ranges = [list(bounds) for bounds in self.partition.ranges]
        ranks = [asdict(rank) for rank in self.ranks]
        if self.load is not None:
            ranks = [rank | load.document() for rank, load in zip(ranks, self.load.loads)]
        return {
            "partition": {"kind": self.partition.kind, "ranges": ranges},
            "page_bytes": self.page_bytes,
            **({} if self.load is None else {"checkpoint": self.load.checkpoint()}),
            "ranks": ranks,
            **({} if self.dense is None else {"dense": self.dense.document()}),
            **({} if self.gpu is None else asdict(self.gpu)),
        }


def make_plan(
    sizes: ModelSizes,
    split: Split,
    num_slots: int,
    gpu: Gpu | None = None,
    *,
    dense: DenseSizes | None = None,
    kv_fraction: float = KV_FRACTION,
) -> Plan:
    """Raises ValueError for numbers that no partition takes, MemoryBudgetError when no page keeps the budget."""
    partition = ExpertPartition.from_config(split, num_experts=sizes.num_experts)
    plan = _expert_plan(sizes, partition, num_slots, dense)
    if gpu is None:
        return plan
    left = min(bytes_left(sizes, rank, gpu, plan.dense) for rank in plan.ranks)
    gathered = 0 if plan.dense is None else plan.dense.gathered_bytes
    copied = max(rank.remote_bytes_per_layer for rank in plan.ranks) + gathered
    copy_seconds = copied / (gpu.link_gb_per_s * 1e9)
    token_seconds = sizes.flops_per_token / gpu.flops_per_second
    stored = max(end - start for start, end in partition.ranges)
    gpu_plan = GpuPlan(
        fits=_fits(sizes, left, kv_fraction),
        copy_seconds_per_layer=copy_seconds,
        compute_seconds_per_layer=token_seconds,
        break_even_tokens=-int(-copy_seconds // token_seconds),
        kv_tokens=cached_tokens(sizes, left, kv_fraction),
        state_bytes_per_sequence=sizes.state_nbytes,
        load_bytes_per_rank=stored * sizes.expert_nbytes * sizes.num_layers + sizes.whole_nbytes,
        smallest_ranks_that_fit=smallest_ranks_that_fit(sizes, num_slots, gpu, dense=dense, kv_fraction=kv_fraction),
    )
    return replace(plan, gpu=gpu_plan)


def bytes_left(sizes: ModelSizes, rank: RankPlan, gpu: Gpu, dense: DensePlan | None) -> int:
    """Bytes for cached tokens, below 0 when the rank does not fit: the GPU's memory less own experts, ring, all other
    weights as the rank holds them, working reserve and one sequence's state."""
    others = sizes.whole_nbytes if dense is None else dense.held_bytes(rank.rank)
    resident = rank.handle_bytes + rank.ring_bytes + others
    return gpu.memory_bytes - resident - WORKING_RESERVE_BYTES - sizes.state_nbytes


def cached_tokens(sizes: ModelSizes, left: int, kv_fraction: float) -> int | None:
    """Tokens in the KV cache's share of `left` bytes, in whole pages; None when no layer has a cache."""
    if not sizes.kv_token_nbytes:
        return None
    return max(0, int(left * kv_fraction) // (sizes.kv_page * sizes.kv_token_nbytes) * sizes.kv_page)


def smallest_ranks_that_fit(
    sizes: ModelSizes,
    num_slots: int,
    gpu: Gpu,
    *,
    dense: DenseSizes | None = None,
    kv_fraction: float = KV_FRACTION,
) -> int | None:
    """The smallest N whose balanced ranges fit on every rank, None when there is none."""
    for num_ranks in range(1 if dense is None else 2, sizes.num_experts + 1):
        partition = ExpertPartition.from_config(Split(num_ranks), num_experts=sizes.num_experts)
        try:
            dense_plan = _dense_plan(sizes, partition, dense)
        except MemoryBudgetError:
            return None  # more ranks hold even more mappings

        def fits(rank: RankPlan, dense_plan=dense_plan) -> bool:
            return _fits(sizes, bytes_left(sizes, rank, gpu, dense_plan), kv_fraction)

        # Rank 0 alone, with the smallest pages, is quick and decides nearly always.
        if not fits(_rank_plan(sizes, partition, 0, num_slots, PAGE_BYTES)):
            continue
        try:
            plan = _expert_plan(sizes, partition, num_slots, dense)
        except MemoryBudgetError:
            return None  # more ranks hold even more mappings
        if all(fits(rank) for rank in plan.ranks):
            return num_ranks
    return None


def _fits(sizes: ModelSizes, left: int, kv_fraction: float) -> bool:
    """At least one token has room, and the page that it takes."""
    return left >= 0 and cached_tokens(sizes, left, kv_fraction) != 0


def _expert_plan(sizes: ModelSizes, partition: ExpertPartition, num_slots: int, dense: DenseSizes | None) -> Plan:
    """The plan without a GPU. Dense DWDP is set up first: what it maps is gone from the budget."""
    ranks = range(len(partition.ranges))
    page_bytes = PAGE_BYTES
    dense_plan = _dense_plan(sizes, partition, dense)
    if dense_plan is not None and dense_plan.page_bytes is not None:
        page_bytes = dense_plan.page_bytes
    if len(ranks) > 1:
        budget = MAPPING_BUDGET - (0 if dense_plan is None else dense_plan.mappings)
        page_bytes = _fit_page(sizes, partition, page_bytes, budget)
    plans = tuple(_rank_plan(sizes, partition, rank, num_slots, page_bytes) for rank in ranks)
    return Plan(partition, num_slots, page_bytes, plans, dense=dense_plan)


def _dense_plan(sizes: ModelSizes, partition: ExpertPartition, dense: DenseSizes | None) -> DensePlan | None:
    """Own rows mapped in place share the ring's page size, and the budget with own expert tables, which lie first."""
    if dense is None:
        return None
    num_ranks = len(partition.ranges)
    if not dense.mapped:
        return dense.on(num_ranks, GRANULE_BYTES)
    return dense.on(
        num_ranks,
        GRANULE_BYTES,
        page_bytes=_fit_page(sizes, partition, PAGE_BYTES, MAPPING_BUDGET),
        mapping_budget=MAPPING_BUDGET - sizes.num_layers * len(sizes.row_nbytes),
    )


def _fit_page(sizes: ModelSizes, partition: ExpertPartition, page_bytes: int, budget: int) -> int:
    """One page size for all ranks: that of the rank with most mappings."""
    ranks = range(len(partition.ranges))
    return fit_page_bytes(
        page_bytes, lambda page: max(_mappings(sizes, partition, rank, page) for rank in ranks), budget
    )


def _rank_plan(sizes: ModelSizes, partition: ExpertPartition, rank: int, num_slots: int, page_bytes: int) -> RankPlan:
    start, end = partition.ranges[rank]
    tables = [composite_geometry(b, start, end, sizes.num_experts, GRANULE_BYTES, page_bytes) for b in sizes.row_nbytes]
    pages = sum((table.before + table.after) // page_bytes for table in tables)
    remote = (sizes.num_experts - (end - start)) * sizes.expert_nbytes
    return RankPlan(
        rank=rank,
        pages_per_slot=pages,
        handle_bytes=sizes.num_layers * sum(table.handle.nbytes for table in tables),
        ring_bytes=min(num_slots, sizes.num_layers) * pages * page_bytes,
        remote_bytes_per_layer=remote,
        remote_bytes_per_forward=sizes.num_layers * remote,
        mappings=_mappings(sizes, partition, rank, page_bytes),
    )


def _mappings(sizes: ModelSizes, partition: ExpertPartition, rank: int, page_bytes: int) -> int:
    if len(partition.ranges) == 1:
        return 0  # one rank keeps its tables where they are
    return sizes.num_layers * count_mappings(sizes.row_nbytes, partition, rank, GRANULE_BYTES, page_bytes)


def run_plan(
    model: str,
    ranks: int,
    format_name: str | None,
    gpu: Gpu | None,
    *,
    config_file: Path | None = None,
    experts: Mapping[str, int | None],
    dense: bool = False,
    dense_options: Mapping[str, Any],
    kv_fraction: float | None = None,
    reads_of: int | None = None,
    as_json: bool,
) -> None:
    """Makes the plan and prints it. experts, dense_options: by field of their config sections, None where not given.
    reads_of: the rank whose reads of the folder are printed too.

    Raises ValueError or MemoryBudgetError before anything is printed.
    """
    from dwdp.executor.settings import SHIPPED_CONFIG
    from dwdp.tools.plan_settings import read_settings

    if kv_fraction is None:
        kv_fraction = KV_FRACTION
    elif gpu is None:
        raise ConfigError(f"--kv-fraction {kv_fraction:g} has no effect without a GPU: name one or describe it")
    elif not 0 < kv_fraction <= 1:
        raise ConfigError(f"--kv-fraction {kv_fraction:g} must be above 0 and at most 1")
    if reads_of is not None and not 0 <= reads_of < ranks:
        raise ConfigError(f"--reads {reads_of} is no rank of --ranks {ranks}: 0 to {ranks - 1}")
    planned = read_model(model, format_name)
    config, format_name = planned.config, planned.format_name
    if reads_of is not None and planned.folder is None:
        raise ConfigError(f"--reads {reads_of}: --model {model} is no folder with safetensors files")
    shipped = None if model in KNOWN_MODELS else folder_of(model) / SHIPPED_CONFIG
    settings = read_settings(ranks, config_file, shipped, experts=experts, dense=dense, dense_options=dense_options)
    kept = kept_projections(model, config, format_name) if settings.keep_fp8 else frozenset()
    sizes = ModelSizes.of(config, FORMATS[format_name], kept)
    dense_sizes = None
    if settings.dense is not None:
        dense_sizes = DenseSizes.of(config, settings.dense, factor_nbytes=sizes.factor_nbytes, kept_fp8=kept)
    size, stride, num_slots = settings.experts.values()
    split = Split(ranks, size, stride)
    plan = make_plan(sizes, split, num_slots, gpu, dense=dense_sizes, kv_fraction=kv_fraction)
    if planned.folder is not None:
        sharded = settings.dense if settings.dense is not None and settings.dense.load == "sharded" else None
        plan = replace(plan, load=LoadPlan(planned.folder, plan.partition, sharded))
    reads = None if reads_of is None else plan.load.reads(reads_of)
    skipped = () if planned.folder is None or not planned.folder.skipped.count else (planned.folder.skipped.describe(),)
    for note in (*skipped, *settings.notes):
        print(f"dwdp: {note}", file=sys.stderr)
    if as_json:
        listed = {} if reads is None else {"reads": [read.document() for read in reads]}
        print(json.dumps(plan.document() | listed))
        return
    from dwdp.tools.plan_text import print_plan

    title = f"{model} with {format_name} experts"
    if dense_sizes is None:
        print_plan(title, sizes, plan, gpu, kv_fraction=kv_fraction)
    else:
        alone = make_plan(sizes, split, num_slots, gpu, kv_fraction=kv_fraction)
        print_plan(
            title, sizes, plan, gpu, kv_fraction=kv_fraction, alone=alone, dense=dense_sizes, settings=settings.dense
        )
    if plan.load is not None:
        from dwdp.tools.plan_folder_text import print_load

        print_load(plan.load, reads_of, reads)
