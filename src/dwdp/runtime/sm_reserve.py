"""SMs that persistent compute kernels leave free, so that a gather beside them finds its own.

[Note: the reserve] A persistent kernel fills every SM that it is given and gives none back before it ends; a gather
that is launched beside it would wait that long, and every layer with it. So compute takes `reserved_sms()` less. A
manager sets the reserve before the model is built and drops it when it ends or has moved nothing; one rank has one.

[Note: cooperative launches] A cooperative launch starts only when all of its CTAs find an SM at once, so beside a
gather it waits for the gather's. No kernel of this package is launched so, but a decoder's own may be: MoE routing of
TensorRT-LLM, which asks TLLM_ROUTING_DISABLE_COOP_LAUNCH. As long as a gather takes SMs, that variable and
DWDP_DISABLE_COOP_ROUTING are set in this process; a value of the user's is kept.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar

from dwdp import env

logger = logging.getLogger(__name__)

COOPERATIVE = "DWDP_DISABLE_COOP_ROUTING"

_beside_gather: ContextVar[bool] = ContextVar("dwdp_beside_gather", default=False)
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
    if gather_ctas and not _beside_gather.get():
        found = env.hold_default(COOPERATIVE, "1")
        _beside_gather.set(True)
        if not found.value:
            logger.warning(
                "%s=%s is kept: cooperative launches of MoE routing wait for the SMs that the gather holds",
                found.variable, found.text,
            )  # fmt: skip


def cooperative_launches() -> bool:
    """Whether code that asks the environment may launch cooperatively; see [Note: cooperative launches]."""
    return not env.value(COOPERATIVE)


def drop_reserve() -> None:
    """Compute may use every SM again, by any launch; idempotent."""
    _reserved.set(0)
    if _beside_gather.get():
        _beside_gather.set(False)
        env.drop_default(COOPERATIVE)


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
