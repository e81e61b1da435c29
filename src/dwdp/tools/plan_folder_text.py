"""What ranks read of a folder, as text: a table of ranks, and one rank's reads file by file."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table

from dwdp.tools.plan_folder import LARGE_READ, LoadPlan, Read, largest_gap

_WIDTH = 110
"""Of tables whose numbers of bytes would be cut off in fewer columns."""


def print_load(plan: LoadPlan, rank: int | None, reads: Sequence[Read] | None) -> None:
    """rank, reads: of the rank whose reads are printed, if any."""
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, _WIDTH)
    found, num_ranks = plan.checkpoint(), len(plan.loads)
    console.print(
        f"Folder: {found['tensors']:,} tensors in {found['files']:,} files, every name, dtype and shape as the config "
        f"has it; {sum(plan.expert_nbytes):,} bytes of experts, {plan.dense_nbytes:,} of dense weights, "
        f"{found['skipped_bytes']:,} of vision, which are skipped."
    )
    table = Table(title="Bytes of the files by rank", title_justify="left", box=box.SIMPLE)
    for heading in ("rank", "experts", "dense part", "read from disk", "dense, from the page cache"):
        table.add_column(heading, justify="right")
    for number, load in enumerate(plan.loads):
        sizes = (load.expert_nbytes, load.dense_nbytes, load.load_nbytes, load.cached_nbytes)
        table.add_row(str(number), *(f"{nbytes:,}" for nbytes in sizes))
    console.print(table)
    if num_ranks > 1:
        console.print(_division(plan))
    if reads is not None:
        _print_reads(console, plan, rank, reads)


def _division(plan: LoadPlan) -> str:
    common = f"{plan.common_nbytes:,}"
    once = (
        "counted for one rank each, in shares of about equal bytes: from the disk they come once a host, and the other "
        "ranks find them in its page cache"
    )
    if plan.is_sharded:
        return (
            "load: sharded: of the dense weights that move a rank reads its own rows alone; "
            f"the other {common} bytes every rank reads. They are {once}."
        )
    return (
        f"load: whole: every rank reads all {common} bytes of dense weights. They are {once}. With load: sharded "
        "(dense_dwdp, --dense) a rank reads only its own rows of those that move."
    )


def _print_reads(console: Console, plan: LoadPlan, rank: int, reads: Sequence[Read]) -> None:
    table = Table(title=f"Reads of rank {rank} from the disk, in this order", title_justify="left", box=box.SIMPLE)
    table.add_column("file")
    for heading in ("tensors", "reads", "of >= 8 MiB", "bytes", "largest gap"):
        table.add_column(heading, justify="right")
    for file, group in groupby(reads, key=lambda read: read.file):
        table.add_row(file, *_columns(list(group)))
    table.add_section()
    table.add_row("all", *_columns(reads))
    console.print(table)
    load, total = plan.loads[rank], sum(read.nbytes for read in reads)
    console.print(
        f"Rank {rank} reads {total:,} bytes = {load.expert_nbytes:,} of its experts + {load.dense_nbytes:,} of its "
        f"dense part ({'exactly' if total == load.load_nbytes else 'NOT EQUAL'})."
    )


def _columns(reads: Sequence[Read]) -> list[str]:
    large = sum(read.nbytes >= LARGE_READ for read in reads)
    numbers = (
        sum(read.num_tensors for read in reads),
        len(reads),
        large,
        sum(read.nbytes for read in reads),
        largest_gap(reads),
    )
    return [f"{number:,}" for number in numbers]
