"""A part of a parameter that is read in place of the whole: what a loader and the owner of rows agree on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Part:
    """Elements [start, end) of a parameter, flattened; none when they are equal.

    take: is given them, once. room: gives uint8 memory for all of them in the parameter's dtype, into which they may be
    read before `take` is given that memory; None: there is none.
    """

    start: int
    end: int
    take: Callable[[torch.Tensor], None]
    room: Callable[[], torch.Tensor] | None = None
