"""What `dwdp doctor` found, as text: tables and sentences."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

MATRIX_RANKS = 12
"""With more ranks a row tells only its slowest and fastest source."""


def print_document(document: dict[str, Any]) -> None:
    # Without markup: paths and errors may hold brackets.
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    ranks, pairs = document["ranks"], document["pairs"]
    domain = document["memory"]
    console.print(
        f"{_count(ranks, 'rank')} of this host, in processes of their own; memory domain: {domain['used']} "
        f"({domain['why']})."
    )
    for device in document["devices"]:
        console.print(_device(device))
    checked = sum(pair["bytes_ok"] is not None for pair in pairs)
    if pairs:
        right = sum(pair["bytes_ok"] is True for pair in pairs)
        console.print(
            f"{_count(len(pairs), 'ordered pair')}, {checked:,} checked byte by byte, {right:,} right; "
            f"copies of {_size(document['copy_bytes'])}. {_rights(pairs)}"
        )
    if checked:
        console.print(_rates(document))
    console.print(_handles(document["handle_types"]))
    console.print(_transfers(document["transfers"]))
    used = document["transfer"]
    console.print(f"Transfer: {used['used'] or 'none'}; {used['why']}.")
    console.print(_passing(document["descriptor_passing"]))
    console.print(_limits(document["limits"], domain["used"]))
    for note in document["notes"]:
        console.print(f"Note: {note}.")
    for problem in document["problems"]:
        console.print(f"Problem: {problem['what'].rstrip('.')}. Cure: {problem['cure']}.")
    found = len(document["problems"])
    console.print(f"Verdict: {_count(found, 'problem')}." if found else "Verdict: all is well.")


def _device(one: dict[str, Any]) -> str:
    sizes = (
        f"granularity {_size(one['granularity'])}, pages of {_size(one['page_bytes'])}, {_size(one['free_bytes'])} free"
    )
    if one["uuid"] is None:
        return f"Rank {one['rank']}: {one['name']}, {sizes}."
    fabric = f"attribute FABRIC {_yes(one['fabric_attribute'])}, {_count(one['imex_channels'], 'IMEX channel')}"
    return f"Rank {one['rank']}: {one['name']} {one['uuid']}, GPU {one['visible_as']} here; {sizes}; {fabric}."


def _rights(pairs: list[dict[str, Any]]) -> str:
    """How peers are mapped, and which GPUs do not reach each other."""
    mapped = [pair["read_only"] for pair in pairs if pair["read_only"] is not None]
    if not mapped:
        return "No peer was mapped."
    text = "Peers are mapped read-only." if all(mapped) else f"{mapped.count(False):,} maps of peers are writable."
    apart = [f"{pair['source']} to {pair['target']}" for pair in pairs if pair["peer_access"] is False]
    return text + (f" No peer access from {', '.join(apart)}." if apart else "")


def _transfers(transfers: list[dict[str, Any]]) -> Table:
    table = _table("Transfers", "transfer", "works", "why not")
    for one in transfers:
        table.add_row(one["transfer"], _yes(one["works"]), one["why"] or "")
    return table


def _rates(document: dict[str, Any]) -> Table:
    ranks = range(document["ranks"])
    cells = {(pair["target"], pair["source"]): pair for pair in document["pairs"]}
    many = {row["target"]: f"{row['gb_per_s']:.2f}" for row in document["many_to_one"]}
    table = _table("GB/s of a copy into a rank (row) from a rank (column)", "into rank")
    matrix = len(ranks) <= MATRIX_RANKS
    for heading in map(str, ranks) if matrix else ("slowest", "fastest", "wrong"):
        table.add_column(heading, justify="right")
    table.add_column("all at once", justify="right")
    for target in ranks:
        row = [cells.get((target, source)) for source in ranks]
        if matrix:
            texts = [_cell(pair) for pair in row]
        else:
            rates = [pair["gb_per_s"] for pair in row if pair and pair["gb_per_s"] is not None]
            texts = [f"{min(rates):.2f}", f"{max(rates):.2f}"] if rates else ["-", "-"]
            texts.append(str(sum(pair is not None and pair["bytes_ok"] is False for pair in row)))
        table.add_row(str(target), *texts, many.get(target, "-"))
    return table


def _cell(pair: dict[str, Any] | None) -> str:
    if pair is None:
        return ""
    if pair["bytes_ok"] is False:
        return "wrong"
    return "-" if pair["gb_per_s"] is None else f"{pair['gb_per_s']:.2f}"


def _handles(types: list[dict[str, Any]]) -> Table:
    table = _table("Handle types", "type", "domain", "tried", "works", "why")
    for one in types:
        table.add_row(one["type"], one["domain"], _yes(one["tried"]), _yes(one["works"]), one["why"])
    return table


def _passing(passing: dict[str, Any]) -> Table:
    table = _table("Passing descriptors", "way", "used", "works", "why")
    for key, name in (("scm_rights", "SCM_RIGHTS"), ("pidfd_getfd", "pidfd_getfd")):
        table.add_row(name, _yes(passing["used"] == key), _yes(passing[key]["works"]), passing[key]["why"])
    return table


def _limits(limits: dict[str, int | None], memory: str) -> Table:
    table = _table("Limits", "limit", "now", "for dwdp")
    descriptors, mappings = _budget(limits["descriptor_budget"]), f"{_number(limits['mapping_budget'])} a rank"
    for what, now, used in (
        ("descriptors, soft (ulimit -n)", _number(limits["descriptors_soft"]), "raised to the hard limit"),
        ("descriptors, hard (ulimit -Hn)", _number(limits["descriptors_hard"]), descriptors),
        ("mappings (vm.max_map_count)", _number(limits["max_map_count"]), mappings if memory == "host" else "nothing"),
        ("mappings (dwdp.mapping_budget)", "", mappings if memory == "cuda" else "as above, or fewer"),
        (
            "memory available",
            _size(limits["memory_available_bytes"]),
            "weights and rings of all ranks" if memory == "host" else "loading",
        ),
        ("/dev/shm, size", _size(limits["dev_shm_bytes"]), "nothing"),
        ("/dev/shm, in use", _size(limits["dev_shm_used_bytes"]), "nothing"),
    ):
        table.add_row(what, now, used)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for column in columns:
        table.add_column(column)
    return table


def _budget(number: int | None) -> str:
    return f"{_number(number)} a rank, 10 % less"


def _number(number: int | None) -> str:
    return "unlimited" if number is None else f"{number:,}"


def _size(nbytes: int | None) -> str:
    if nbytes is None:
        return "unknown"
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:,.1f} {name}".replace(".0 ", " ")
    return f"{nbytes / 1024:,.0f} KiB"


def _yes(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "no"


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"
