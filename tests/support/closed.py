"""What a memory domain does behind its `close`, the same in both domains."""

from __future__ import annotations

import os

import pytest

from dwdp.errors import MemoryDomainError


def refuses_everything(domain, text: str) -> None:
    """Making anything raises with `text`, and an import closes the descriptor that it was given."""
    nbytes = domain.granularity
    for call in (lambda: domain.create(nbytes, "x"), lambda: domain.reserve(nbytes)):
        with pytest.raises(MemoryDomainError, match=text):
            call()
    fd = os.open("/dev/null", os.O_RDONLY)
    with pytest.raises(MemoryDomainError, match="closed"):
        domain.import_handle(fd, nbytes)
    with pytest.raises(OSError):
        os.fstat(fd)
