"""Handles that go from every rank to every other, whatever a domain exports: descriptors or bytes.

[Note: exported handles] An exported handle is a descriptor (an int, which its receiver owns) or the bytes of a
fabric handle (which nobody has to close). The exporter keeps its descriptors open until every importer has
mapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from dwdp.group.fds import close_fds

Exported = int | bytes


class _Message(msgspec.Struct, array_like=True):
    payload: bytes
    handles: list[bytes]


def exchange_handles(
    group, domain, tag: str, exported: Sequence[Exported], payload: bytes
) -> list[tuple[bytes, list[Exported]]]:
    """Every rank gives what `domain.export` gave it to every other: (payload, exported handles) per rank.

    One collective, `group.exchange_fds` where the domain exports descriptors; a rank that failed gives none
    and says so in its payload. The own entry has no handles. Received descriptors are the caller's.
    """
    if domain.exports_descriptors:
        return group.exchange_fds(tag, exported, payload)
    message = msgspec.msgpack.encode(_Message(payload, list(exported)))
    messages = [msgspec.msgpack.decode(answer, type=_Message) for answer in group.allgather(tag, message)]
    return [(m.payload, [] if rank == group.rank else m.handles) for rank, m in enumerate(messages)]


def close_exported(exported: Iterable[Exported]) -> None:
    """Closes received descriptors that no domain has taken over; bytes need nothing."""
    close_fds(one for one in exported if isinstance(one, int))
