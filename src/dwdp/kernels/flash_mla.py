"""Decode of latent attention through FlashMLA, where it is installed, on Hopper, over the cache as pages in place.

Everything here but the products is made once a forward and kept in the batch's plans: `pages`. Nothing of the
package's Python is imported, which asks for a newer torch than its library does: the library is loaded alone.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

logger = logging.getLogger(__name__)

FLASH_MLA_VERSION = "1.0.0"
LIBRARY = "flash_mla/_C_legacy.abi3.so"  # its kernels for Hopper
PAGE = 64  # rows; the library takes no other size
LATENT, ROPE = 512, 64  # columns of a row, the only ones that it has
DTYPE = "bfloat16"


@functools.cache
def operation() -> Callable[..., Any] | None:
    """The decode of the installed library, or None, with one line of the log a process, where it is missing or of
    another version than FLASH_MLA_VERSION, whose arguments these are.

    (q [B, 1, heads, 576], pages [n, PAGE, 1, 576], 512, lengths int32 [B], table int32 [B, most], scale, causal,
    schedule or None, splits or None) -> out [B, 1, heads, 512], sums, schedule, splits: made where they were None.
    """
    from importlib import metadata

    import torch

    try:
        package = metadata.distribution("sgl-flash-mla")
        if package.version != FLASH_MLA_VERSION:
            raise ImportError(f"sgl-flash-mla is {package.version}")
        torch.ops.load_library(str(package.locate_file(LIBRARY)))
        return torch.ops.flash_mla_legacy.dense_decode_fwd.default
    except Exception as error:  # what loads is foreign code, which may fail in any way
        logger.info(
            "Latent attention decodes by this package's own kernel: FlashMLA cannot be used (%s: %s); "
            "pip install --no-deps sgl-flash-mla==%s",
            type(error).__name__, error.__cause__ or error, FLASH_MLA_VERSION,
        )  # fmt: skip
        return None


def page_rows(width: int) -> int:
    """Of how many rows the size of a cache of bf16 rows on a GPU is a multiple, by the columns of a row."""
    return PAGE if width == LATENT + ROPE else 1


def padded(capacity: int, width: int, dtype: torch.dtype, device: torch.device | str) -> int:
    """Rows of a new cache of `width` columns with room for `capacity` tokens.

    Whole pages wherever the library might read it, installed or not: a plan of memory knows neither.
    """
    import torch

    on_gpu = torch.device(device).type == "cuda" and dtype == getattr(torch, DTYPE)
    rows = page_rows(width) if on_gpu else 1
    return -(-capacity // rows) * rows


def runs_on(query: Tensor, cache: Tensor, latent: int) -> bool:
    """Whether the library decodes `query` over `cache` [slots, capacity, latent + rope] as it lies.

    Its programs stay on every SM, so that it leaves none of [Note: the reserve] to a gather beside it.
    """
    import torch

    from dwdp.kernels import select
    from dwdp.runtime.sm_reserve import reserved_sms

    dtype = getattr(torch, DTYPE)
    return (
        latent == LATENT
        and cache.shape[2] == LATENT + ROPE
        and cache.shape[1] % PAGE == 0
        and query.dtype == cache.dtype == dtype
        and cache.is_contiguous()
        and select.hopper(query.device)
        and not reserved_sms()
        and operation() is not None
    )


@dataclass
class Pages:
    """Of the sequences of a forward that decode, the same in every layer.

    table: int32 [B, most], the pages of each, of which the first count; lengths: int32 [B], its rows. schedule: what
    the first layer's call made of them on the device.
    """

    table: Tensor
    lengths: Tensor
    schedule: tuple[Tensor | None, Tensor | None] = (None, None)


def pages(
    plans: dict[Any, Any], slots: Tensor, contexts: Tensor, longest: int, query: Tensor, cache: Tensor, latent: int
) -> Pages | None:
    """What `decode` needs, from `plans` or made and put there, or None where the library does not run. plans: of the
    batch; slots, contexts, longest: of those that decode; query: [B, heads, any]."""
    if not runs_on(query, cache, latent):
        return None
    import torch

    key = ("pages", query.shape[1], cache.shape[1])
    if key not in plans:
        # Behind a sequence's last page stand the next of its slot, which lie in the cache and are not read.
        within = torch.arange(-(-longest // PAGE), dtype=torch.int32, device=slots.device)
        first = (slots * (cache.shape[1] // PAGE)).to(torch.int32)
        plans[key] = Pages(first[:, None] + within, contexts.to(torch.int32))
    return plans[key]


def decode(query: Tensor, cache: Tensor, pages: Pages, scale: float) -> Tensor:
    """query: contiguous [B, heads, 576] -> [B, heads, 512]."""
    paged = cache.view(-1, PAGE, 1, cache.shape[2])
    out, _, *schedule = operation()(
        query.unsqueeze(1), paged, LATENT, pages.lengths, pages.table, scale, False, *pages.schedule
    )
    pages.schedule = tuple(schedule)
    return out.squeeze(1)
