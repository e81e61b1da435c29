"""Triton where it is installed, and Gluon, its language with layouts, for modules of kernels, which import without it
all the same.

Modules of kernels are imported inside the functions that launch one, so that nothing else loads Triton. Annotations
of their kernels stay text (`from __future__ import annotations`), as they could not be evaluated without it.
"""

from __future__ import annotations

from typing import Any

from dwdp.errors import ConfigError

try:
    import triton
    import triton.language as tl
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_init

    # The names of Triton 3.6, else those of later versions.
    barrier = getattr(gl, "thread_barrier", None) or gl.barrier
    copy_async = getattr(hopper.async_copy, "async_load", None) or hopper.async_copy.async_copy_global_to_shared
    MISSING: str | None = None
except ImportError as error:
    MISSING = str(error)

    class _NoTriton:
        """Stands for a module that is missing: a decorated kernel stays what it is until it is launched."""

        def jit(self, fn: Any = None, **options: Any) -> Any:
            return self._refusing if fn is None else self._refusing(fn)

        def constexpr_function(self, fn: Any) -> Any:
            return fn

        def _refusing(self, fn: Any) -> Any:
            return _Unlaunchable(fn.__name__)

        def __getattr__(self, name: str) -> Any:
            raise ConfigError(f"kernels need triton, which cannot be imported ({MISSING}): pip install 'dwdp[gpu]'")

    class _Unlaunchable:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: Any) -> Any:
            raise ConfigError(
                f"kernel {self.name} needs triton, which cannot be imported ({MISSING}): pip install 'dwdp[gpu]'"
            )

    triton = tl = gluon = gl = hopper = _NoTriton()
    barrier = copy_async = warpgroup_mma_init = None

__all__ = ["MISSING", "barrier", "copy_async", "gl", "gluon", "hopper", "tl", "triton", "warpgroup_mma_init"]
