"""What ranks tell each other when they join, and what keeps them from being one group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dwdp.group.place import Place
from dwdp.group.ranks import Host, compare_reports, name_hosts, name_ranks

PROTOCOL_VERSION = 2

PER_RANK_KEYS = frozenset({"rank", "host", "pid", "device", "device_uuid", "place", "has_token"})
"""Keys of a join's report in which ranks may differ."""

TOKEN = "DWDP_GROUP_TOKEN"
ONE_HOST = "run all ranks on one host, or use CUDA memory whose handles cross hosts (handle_type: fabric)"


def join_report(info: dict[str, Any], place: Place, size: int, *, has_token: bool) -> dict[str, Any]:
    """`info` and what the group itself adds; `place` is taken out again before the caller sees it."""
    return info | {
        "protocol": PROTOCOL_VERSION,
        "rank": place.rank,
        "size": size,
        "host": place.host,
        "pid": place.pid,
        "has_token": has_token,
        "place": place,
    }


def judge(reports: Sequence[dict[str, Any]]) -> tuple[list[str], list[Place]]:
    """-> (why the ranks are no group, empty when they are one; every rank's place). The same on every rank."""
    if problems := compare_reports(reports, ignore=PER_RANK_KEYS):
        return problems, []  # of another version of the protocol, perhaps
    places = [msgspec.convert(report["place"], Place) for report in reports]
    hosts = [place.on for place in places]
    problems = (
        _shared_devices(reports)
        or _memory_problems(reports, hosts)
        or _token_problems(reports, hosts)
        or _address_problems(places)
    )
    return problems, places


def spans_hosts(hosts: Sequence[Host]) -> bool:
    return len({host.id for host in hosts}) > 1


def _memory_problems(reports: Sequence[dict[str, Any]], hosts: Sequence[Host]) -> list[str]:
    if not spans_hosts(hosts) or reports[0].get("memory") != "host":
        return []
    return [f"the ranks span {name_hosts(hosts)}, and host memory cannot be shared between hosts: {ONE_HOST}"]


def _token_problems(reports: Sequence[dict[str, Any]], hosts: Sequence[Host]) -> list[str]:
    without = [rank for rank, report in enumerate(reports) if not report["has_token"]]
    if spans_hosts(hosts) and without:
        lacking = "" if len(without) == len(reports) else f"; {name_ranks(without)} {_has(without)} none"
        return [f"the ranks span {name_hosts(hosts)}: set {TOKEN} to one secret on all of them{lacking}"]
    if without and len(without) < len(reports):
        return [f"{name_ranks(without)} {_has(without)} no group token and the others have one: set {TOKEN} on all"]
    return []


def _address_problems(places: Sequence[Place]) -> list[str]:
    if not spans_hosts([place.on for place in places]):
        return []
    return [
        f"rank {place.rank} on host {place.host} cannot be reached from other hosts: "
        + (place.problem or "its group has no store with a network address")
        for place in places
        if place.address is None
    ]


def other_tokens(refused: Sequence[Sequence[int]]) -> str | None:
    """Who has another group token, or None. refused: of each rank, those whose proof it found wrong."""
    size = len(refused)
    differ = {(rank, peer) for rank, peers in enumerate(refused) for peer in peers}
    differ |= {(peer, rank) for rank, peer in differ}
    if not differ:
        return None
    alike = [frozenset(peer for peer in range(size) if (rank, peer) not in differ) for rank in range(size)]
    most = max(alike, key=len)
    if 2 * len(most) > size:
        others = sorted(set(range(size)) - most)
        return f"{name_ranks(others)} {_has(others)} another group token ({TOKEN}) than the other ranks"
    return f"{name_ranks(range(size))} have different group tokens ({TOKEN})"


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _shared_devices(reports: Sequence[dict[str, Any]]) -> list[str]:
    if all(report.get("allow_shared_device") for report in reports):
        return []
    ranks: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        if report.get("device_uuid") is not None:
            ranks.setdefault(report["device_uuid"], []).append(rank)
    return [
        f"ranks {', '.join(map(str, sharing))} are on one device, {uuid}; give each its own or set allow_shared_device"
        for uuid, sharing in ranks.items()
        if len(sharing) > 1
    ]
