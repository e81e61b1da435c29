"""A plan as text: tables and sentences, sizes in GiB."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from dwdp.config.schema import DenseConfig
from dwdp.runtime.dense_schedule import SLOT_COUNTS
from dwdp.tools.hardware import COPY_SLOWDOWN, MATMUL_SHARE, Gpu
from dwdp.tools.plan import (
    GRANULE_BYTES,
    MAPPING_BUDGET,
    PAGE_BYTES,
    WORKING_RESERVE_BYTES,
    GpuPlan,
    ModelSizes,
    Plan,
    RankPlan,
    bytes_left,
)
from dwdp.tools.plan_dense import DensePlan, DenseSizes
from dwdp.weights.plan import CopySlice
from dwdp.weights.transfers import slice_bytes


def print_plan(
    title: str,
    sizes: ModelSizes,
    plan: Plan,
    gpu: Gpu | None,
    *,
    kv_fraction: float,
    alone: Plan | None = None,
    dense: DenseSizes | None = None,
    settings: DenseConfig | None = None,
) -> None:
    """title: model and format. With dense DWDP: `alone` is the plan without it."""
    console = Console(highlight=False, soft_wrap=True)
    layer, num_layers = sizes.layer_nbytes, sizes.num_layers
    console.print(
        f"{title}: {num_layers:,} MoE layers of {sizes.num_experts:,} experts, {_gib(layer)} a layer, "
        f"{_gib(layer * num_layers)} in all."
    )
    own = _own_experts(sizes, plan)
    console.print(
        f"Partition: {plan.partition.describe()}, on {_ranks(len(plan.ranks))}; up to {_gib(own)} of experts a rank."
    )
    console.print(_pages(sizes, plan))
    console.print(_rank_table(plan))
    if dense is not None:
        print_dense(console, sizes, plan.dense, dense, settings)
    if len(plan.ranks) > 1:
        console.print(_transfers(sizes, plan))
    if gpu is not None:
        loads_whole = dense is not None and settings.load == "whole"
        _print_gpu(console, sizes, plan, gpu, kv_fraction, alone, loads_whole=loads_whole)


def print_dense(console: Console, sizes: ModelSizes, plan: DensePlan, dense: DenseSizes, settings: DenseConfig) -> None:
    """What moves and what stays, and what that makes of a rank."""
    segments, least = ",".join(settings.segments), f"{settings.min_bytes:,}"
    table = Table(
        title=f"Dense DWDP, segments {segments}, min_bytes {least}, sizes in GiB",
        title_justify="left",
        box=box.SIMPLE,
    )
    table.add_column("weights")
    for heading in ("layers", "one layer", "in all"):
        table.add_column(heading, justify="right")
    for kind, what in _KINDS.items():
        if kind in dense.kinds:
            count, nbytes = dense.kinds[kind]
            table.add_row(f"moved: {what}", f"{count:,}", _number(nbytes), _number(count * nbytes))
    for why, nbytes in dense.stays.items():
        table.add_row(f"held whole: {why}", "", "", _number(nbytes))
    console.print(table)
    if not plan.layout.blobs:
        console.print(
            f"Dense DWDP moves nothing: no storage that may move has {least} bytes; lower --min-bytes "
            "(dense_dwdp.min_bytes, DWDP_DENSE_MIN_BYTES)."
        )
        return
    own = plan.fullest
    if plan.page_bytes is not None:
        handles = f"{len(own.handles):,} handles of a row each, mapped in place"
    else:
        handles = "one handle" if len(own.handles) == 1 else f"{len(own.handles):,} handles of whole layers"
    rounding = own.stored_bytes - sum(blob.row_nbytes for blob in plan.layout.blobs)
    pages = "" if plan.page_bytes is None else f", pages of {plan.page_bytes >> 20:,} MiB around the own row"
    which = "A rank" if plan.page_bytes is None else "The fullest rank"
    slots = " and ".join(
        f"{number} for {segment}(l) of {_gib(plan.layout.largest(segment))}"
        for segment, number in SLOT_COUNTS.items()
        if plan.layout.largest(segment)
    )
    console.print(
        f"Moved: {_gib(plan.moved_bytes)} in {len(plan.layout.blobs):,} blobs. {which} stores a row of each, "
        f"{_gib(own.stored_bytes)} in {handles} ({rounding:,} bytes of it round up to granules), and gathers into "
        f"{_gib(own.slot_bytes)} of slots: {slots}{pages}. That adds {plan.mappings:,} mappings."
    )
    saved = sizes.whole_nbytes - own.nbytes - plan.replicated_bytes
    console.print(
        f"Whole a rank holds {_gib(plan.replicated_bytes)} instead of {_gib(sizes.whole_nbytes)}; rows and slots "
        f"counted it holds {_gib(abs(saved))} {'less' if saved >= 0 else 'more'} than without dense DWDP."
    )


_KINDS = {"A kda": "A(l) of a KDA layer", "A mla": "A(l) of an MLA layer", "D": "D(l) of an MoE block"}


def _setup_peak(sizes: ModelSizes, plan: Plan, gpu: Gpu) -> str:
    """load: whole keeps the originals until the commit, before the expert ring is allocated."""
    peak = _own_experts(sizes, plan) + sizes.whole_nbytes + plan.dense.fullest.nbytes
    over = peak - gpu.memory_bytes
    return (
        f"While it sets up, before its whole dense weights are given back, a rank holds {_gib(peak)}"
        + (
            f", {_gib(over)} more than the GPU has, unless it loads straight into rows (load: sharded)"
            if over > 0
            else ""
        )
        + "."
    )


def _own_experts(sizes: ModelSizes, plan: Plan) -> int:
    return max(end - start for start, end in plan.partition.ranges) * sizes.expert_nbytes * sizes.num_layers


def _pages(sizes: ModelSizes, plan: Plan) -> str:
    if len(plan.ranks) == 1:
        return "One rank holds all experts: nothing is copied and there is no ring."
    size = f"{plan.page_bytes >> 20:,} MiB"
    if plan.page_bytes == PAGE_BYTES:
        why = f"{PAGE_BYTES // GRANULE_BYTES} granules of {GRANULE_BYTES >> 20} MiB"
    else:
        why = f"doubled from {PAGE_BYTES >> 20} MiB, which would pass the budget of {MAPPING_BUDGET:,} mappings"
    return f"Ring: {_slots(sizes, plan)} slots, pages of {size} ({why})."


def _transfers(sizes: ModelSizes, plan: Plan) -> str:
    """What each transfer submits for a layer on rank 0; the other ranks differ by a run or two."""
    runs = [
        CopySlice(0, 0, (end - start) * b, peer)
        for b in sizes.row_nbytes
        for peer, start, end in plan.partition.remote_runs(0)
    ]
    largest = slice_bytes(runs)
    slices = sum(-(-run.nbytes // largest) for run in runs)
    return (
        f"Rank 0 submits for a layer: by default {len(runs):,} copies; with contention_opt one batch of {slices:,} "
        f"slices of up to {largest >> 20:,} MiB; with prefetch_gather one launch over the {len(runs):,} runs, by peer."
    )


def _rank_table(plan: Plan) -> Table:
    table = Table(title="Expert DWDP by rank, sizes in GiB", title_justify="left", box=box.SIMPLE)
    table.add_column("ranks")
    for heading in ("experts", "pages a slot", "ring", "own handles", "copied a layer", "a forward", "mappings"):
        table.add_column(heading, justify="right", min_width=len(heading.rpartition(" ")[2]))
    alike: dict[tuple, list[int]] = {}
    for rank, (start, end) in zip(plan.ranks, plan.partition.ranges):
        row = (
            str(end - start),
            f"{rank.pages_per_slot:,}",
            _number(rank.ring_bytes),
            _number(rank.handle_bytes),
            _number(rank.remote_bytes_per_layer),
            _number(rank.remote_bytes_per_forward),
            f"{rank.mappings:,}",
        )
        alike.setdefault(row, []).append(rank.rank)
    for row, ranks in alike.items():
        table.add_row(_spans(ranks), *row)
    return table


def _print_gpu(
    console: Console,
    sizes: ModelSizes,
    plan: Plan,
    gpu: Gpu,
    kv_fraction: float,
    alone: Plan | None,
    *,
    loads_whole: bool,
) -> None:
    result = plan.gpu
    fullest = min(plan.ranks, key=lambda rank: bytes_left(sizes, rank, gpu, plan.dense))
    left = bytes_left(sizes, fullest, gpu, plan.dense)
    plans = [plan] if alone is None else [alone, plan]
    console.print(_memory_table(sizes, plans, fullest.rank, gpu))
    with_dense = "" if alone is None else " with dense DWDP"
    if not result.fits:
        console.print(f"It does not fit{with_dense}: rank {fullest.rank} lacks {_gib(max(-left, 1))}.")
    elif result.kv_tokens is None:
        console.print(f"It fits{with_dense}; no layer caches tokens.")
    else:
        console.print(
            f"It fits{with_dense}, with room for {result.kv_tokens:,} cached tokens of {sizes.kv_token_nbytes:,} bytes "
            f"a rank in {kv_fraction:g} of what is left{_gained(result, alone)}."
        )
    if result.smallest_ranks_that_fit is None:
        held = sizes.whole_nbytes if plan.dense is None else plan.dense.replicated_bytes
        console.print(
            f"No number of ranks fits this GPU{with_dense} within the mapping budget: every rank holds "
            f"{_gib(held)} of weights whole, and with many ranks the ring comes near "
            f"{_gib(_slots(sizes, plan) * sizes.layer_nbytes)}."
        )
    else:
        console.print(
            f"The smallest number of ranks that fits, balanced: {result.smallest_ranks_that_fit:,}{_alone_fits(alone)}."
        )
    if loads_whole:
        console.print(_setup_peak(sizes, plan, gpu))
    console.print(f"A rank reads at most {_gib(result.load_bytes_per_rank)} of weights when it starts.")
    if len(plan.ranks) > 1:
        console.print(
            f"A layer's copy takes {result.copy_seconds_per_layer * 1e3:.2f} ms at {gpu.link_gb_per_s:,.0f} GB/s; "
            f"a token's {sizes.flops_per_token / 1e9:,.2f} GFLOP of a mean MoE layer take "
            f"{result.compute_seconds_per_layer * 1e6:.2f} us at {gpu.flops_per_second / 1e12:,.0f} TFLOP/s "
            f"({gpu.tflops:,.0f} x {MATMUL_SHARE:g} sustained / {COPY_SLOWDOWN:g} beside copies)."
        )
        console.print(
            f"DWDP pays from {result.break_even_tokens:,} tokens a step and rank: there a layer's compute covers its "
            "copy. Smaller steps wait for the links. Attention over a long context lowers that number."
        )
    console.print(f"Sources: {gpu.source}.")


def _gained(result: GpuPlan, alone: Plan | None) -> str:
    if alone is None:
        return ""
    if not alone.gpu.fits:
        return "; experts alone do not fit"
    return f", {result.kv_tokens - alone.gpu.kv_tokens:,} more than the {alone.gpu.kv_tokens:,} with experts alone"


def _alone_fits(alone: Plan | None) -> str:
    if alone is None:
        return ""
    smallest = alone.gpu.smallest_ranks_that_fit
    return f" (with experts alone: {'none' if smallest is None else f'{smallest:,}'})"


def _memory_table(sizes: ModelSizes, plans: Sequence[Plan], rank: int, gpu: Gpu) -> Table:
    """A column of GiB for each plan; the last one's fullest rank is `rank`."""
    table = Table(title=f"Memory of rank {rank}, the fullest", title_justify="left", box=box.SIMPLE)
    table.add_column("on the GPU described" if gpu.name == "described" else f"on {gpu.name}")
    for heading in ("GiB",) if len(plans) == 1 else ("GiB, experts alone", "with dense"):
        table.add_column(heading, justify="right")
    columns = [_memory(sizes, plan, plan.ranks[rank], gpu) for plan in plans]
    for what in columns[-1]:
        table.add_row(what, *(_number(column.get(what, 0)) for column in columns))
    return table


def _memory(sizes: ModelSizes, plan: Plan, rank: RankPlan, gpu: Gpu) -> dict[str, int]:
    """What -> bytes, adding up to the memory."""
    dense = plan.dense
    parts = {"own experts, all layers": rank.handle_bytes, "ring": rank.ring_bytes}
    if dense is not None:
        own = dense.rank(rank.rank)
        parts |= {"own rows of dense weights": own.stored_bytes, "slots of dense weights": own.slot_bytes}
    held = sizes.whole_nbytes if dense is None else dense.replicated_bytes
    return parts | {
        "other weights, held whole": held,
        "working reserve: CUDA context, activations": WORKING_RESERVE_BYTES,
        "state of one sequence": sizes.state_nbytes,
        "left for cached tokens": bytes_left(sizes, rank, gpu, dense),
        "memory": gpu.memory_bytes,
    }


def _gib(nbytes: int) -> str:
    return f"{_number(nbytes)} GiB"


def _number(nbytes: int) -> str:
    gib = nbytes / (1 << 30)
    if abs(gib) >= 100:
        return f"{gib:,.1f}"
    return f"{gib:.2f}" if nbytes == 0 or abs(gib) >= 0.01 else f"{gib:.2g}"


def _slots(sizes: ModelSizes, plan: Plan) -> int:
    return min(plan.num_slots, sizes.num_layers)


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count:,} ranks"


def _spans(ranks: list[int]) -> str:
    """[0, 2, 3, 4] -> "0, 2-4"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
