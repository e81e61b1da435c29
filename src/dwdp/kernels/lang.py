"""Triton where it is installed, and Gluon, its language with layouts, for modules of kernels, which import without them
all the same.

Modules of kernels are imported inside the functions that launch one, so that nothing else loads Triton. Annotations
of their kernels stay text (`from __future__ import annotations`), as they could not be evaluated without it.
"""

from __future__ import annotations

from typing import Any

from dwdp.errors import ConfigError


class _Missing:
    """Stands for a module that is missing: a decorated kernel stays what it is until it is launched."""

    def __init__(self, what: str, why: str) -> None:
        why = " ".join(why.split())  # of one line
        self._text = f"{what}, which cannot be imported ({why}): pip install 'dwdp[gpu]'"

    def jit(self, fn: Any = None, **options: Any) -> Any:
        return self._refusing if fn is None else self._refusing(fn)

    def constexpr_function(self, fn: Any) -> Any:
        return fn

    def _refusing(self, fn: Any) -> Any:
        return _Unlaunchable(f"kernel {fn.__name__} needs {self._text}")

    def __getattr__(self, name: str) -> Any:
        raise ConfigError(f"kernels need {self._text}")


class _Unlaunchable:
    def __init__(self, text: str) -> None:
        self._text = text

    def __getitem__(self, grid: Any) -> Any:
        raise ConfigError(self._text)


MISSING: str | None = None
try:
    import triton
    import triton.language as tl
except ImportError as error:
    MISSING = str(error)
    triton = tl = _Missing("triton", MISSING)

# Gluon is an experiment of Triton's, whose names change with the version: only its own kernels depend on it.
GLUON_MISSING: str | None = None
try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_init

    for module, names in (
        (gluon, ("jit", "constexpr_function")),
        (gl, (
            "BlockedLayout", "DistributedLinearLayout", "DotOperandLayout", "NVMMADistributedLayout",
            "NVMMASharedLayout", "SliceLayout", "SwizzledSharedLayout",
            "allocate_shared_memory", "convert_layout", "inline_asm_elementwise",
        )),
        (hopper, ("fence_async_shared", "warpgroup_mma", "warpgroup_mma_wait")),
        (hopper.async_copy, ("commit_group", "wait_group")),
    ):  # fmt: skip
        for name in names:
            getattr(module, name)
    # The names of Triton 3.6, else those of later versions.
    barrier = getattr(gl, "thread_barrier", None) or gl.barrier
    copy_async = getattr(hopper.async_copy, "async_load", None) or hopper.async_copy.async_copy_global_to_shared
except (ImportError, AttributeError) as error:
    GLUON_MISSING = str(error)
    gluon = gl = hopper = _Missing("Gluon of triton", GLUON_MISSING)
    barrier = copy_async = warpgroup_mma_init = None

__all__ = [
    "GLUON_MISSING", "MISSING", "barrier", "copy_async", "gl", "gluon", "hopper", "tl", "triton", "warpgroup_mma_init",
]  # fmt: skip
