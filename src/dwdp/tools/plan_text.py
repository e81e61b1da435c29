"""A plan as text: tables and sentences, sizes in GiB."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from dwdp.tools.hardware import COPY_SLOWDOWN, MATMUL_SHARE, Gpu
from dwdp.tools.plan import (
    GRANULE_BYTES,
    MAPPING_BUDGET,
    PAGE_BYTES,
    WORKING_RESERVE_BYTES,
    ModelSizes,
    Plan,
    RankPlan,
    bytes_left,
)


def print_plan(title: str, sizes: ModelSizes, plan: Plan, gpu: Gpu | None) -> None:
    """title: model and format."""
    console = Console(highlight=False, soft_wrap=True)
    layer, num_layers = sizes.layer_nbytes, sizes.num_layers
    console.print(
        f"{title}: {num_layers:,} MoE layers of {sizes.num_experts:,} experts, {_gib(layer)} a layer, "
        f"{_gib(layer * num_layers)} in all."
    )
    own = max(end - start for start, end in plan.partition.ranges) * sizes.expert_nbytes * num_layers
    console.print(
        f"Partition: {plan.partition.describe()}, on {_ranks(len(plan.ranks))}; up to {_gib(own)} of experts a rank."
    )
    console.print(_pages(sizes, plan))
    console.print(_rank_table(plan))
    if gpu is not None:
        _print_gpu(console, sizes, plan, gpu)


def _pages(sizes: ModelSizes, plan: Plan) -> str:
    if len(plan.ranks) == 1:
        return "One rank holds all experts: nothing is copied and there is no ring."
    size = f"{plan.page_bytes >> 20:,} MiB"
    if plan.page_bytes == PAGE_BYTES:
        why = f"{PAGE_BYTES // GRANULE_BYTES} granules of {GRANULE_BYTES >> 20} MiB"
    else:
        why = f"doubled from {PAGE_BYTES >> 20} MiB, which would pass the budget of {MAPPING_BUDGET:,} mappings"
    return f"Ring: {_slots(sizes, plan)} slots, pages of {size} ({why})."


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


def _print_gpu(console: Console, sizes: ModelSizes, plan: Plan, gpu: Gpu) -> None:
    result = plan.gpu
    fullest = min(plan.ranks, key=lambda rank: bytes_left(sizes, rank, gpu))
    left = bytes_left(sizes, fullest, gpu)
    console.print(_memory_table(sizes, fullest, left, gpu))
    if not result.fits:
        console.print(f"It does not fit: rank {fullest.rank} lacks {_gib(max(-left, 1))}.")
    elif result.kv_tokens is None:
        console.print("It fits; no layer caches tokens.")
    else:
        console.print(
            f"It fits, with room for {result.kv_tokens:,} cached tokens of {sizes.kv_token_nbytes:,} bytes a rank."
        )
    if result.smallest_ranks_that_fit is None:
        console.print(
            "No number of ranks fits this GPU within the mapping budget: every rank holds "
            f"{_gib(sizes.whole_nbytes)} of weights whole, and with many ranks the ring comes near "
            f"{_gib(_slots(sizes, plan) * sizes.layer_nbytes)}."
        )
    else:
        console.print(f"The smallest number of ranks that fits, balanced: {result.smallest_ranks_that_fit:,}.")
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


def _memory_table(sizes: ModelSizes, rank: RankPlan, left: int, gpu: Gpu) -> Table:
    table = Table(title=f"Memory of rank {rank.rank}, the fullest", title_justify="left", box=box.SIMPLE)
    table.add_column("on the GPU described" if gpu.name == "described" else f"on {gpu.name}")
    table.add_column("GiB", justify="right")
    for what, nbytes in (
        ("own experts, all layers", rank.handle_bytes),
        ("ring", rank.ring_bytes),
        ("weights held whole: all but the routed experts", sizes.whole_nbytes),
        ("working reserve: CUDA context, activations", WORKING_RESERVE_BYTES),
        ("state of one sequence", sizes.state_nbytes),
        ("left for cached tokens", left),
        ("memory", gpu.memory_bytes),
    ):
        table.add_row(what, _number(nbytes))
    return table


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
