"""Running copies on the host: one memmove a slice, which releases the interpreter lock."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from dwdp.weights.plan import CopyPlan, CopySlice


def copy_slices(slices: Iterable[CopySlice]) -> None:
    """Copies each slice. The addresses must be mapped: a wrong one kills the process."""
    for piece in slices:
        ctypes.memmove(piece.dst, piece.src, piece.nbytes)


def run_plan(plan: CopyPlan) -> None:
    """Copies every slice of a layer's plan."""
    copy_slices(plan.slices)
