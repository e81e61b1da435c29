"""SMs that persistent compute kernels leave free, so that a gather beside them finds its own.

[Note: the reserve] A persistent kernel fills every SM that it is given and gives none back before it ends; a gather
that is launched beside it would wait that long, and every layer with it. So compute takes `reserved_sms()` less. A
manager sets the reserve before the model is built and drops it when it ends or has moved nothing; one rank has one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar

logger = logging.getLogger(__name__)

_reserved: ContextVar[int] = ContextVar("dwdp_sm_reserve", default=0)


def reserved_sms() -> int:
    """SMs that compute of this rank leaves free; 0 without a reserve."""
    return _reserved.get()


def reserve_sms(pinned: int | None, gather_ctas: int) -> None:
    """Sets the reserve. pinned: what was asked for, honoured with every transfer; None: as many as a gather has
    CTAs, 0 without one."""
    count = gather_ctas if pinned is None else pinned
    _reserved.set(count)
    if count:
        why = "asked for" if pinned is not None else "the gather's CTAs"
        logger.info("%d SMs are kept out of persistent compute grids (%s)", count, why)


def drop_reserve() -> None:
    """Compute may use every SM again; idempotent."""
    _reserved.set(0)


@contextlib.contextmanager
def leaving_sms() -> Iterator[None]:
    """Torch's persistent kernels that are launched inside leave the reserve free."""
    import torch

    count = reserved_sms()
    if not count:
        yield
        return
    before = torch._C._get_sm_carveout_experimental()
    torch._C._set_sm_carveout_experimental(count)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(before)
