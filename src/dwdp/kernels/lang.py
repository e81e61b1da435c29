"""Triton where it is installed: `triton` and `tl` for modules of kernels, which import without it all the same.

Modules of kernels are imported inside the functions that launch one, so that nothing else loads Triton. Annotations
of their kernels stay text (`from __future__ import annotations`), as they could not be evaluated without it.
"""

from __future__ import annotations

from typing import Any

from dwdp.errors import ConfigError

try:
    import triton
    import triton.language as tl

    MISSING: str | None = None
except ImportError as error:
    MISSING = str(error)

    class _NoTriton:
        """Stands for a module that is missing: a decorated kernel stays what it is until it is launched."""

        def jit(self, fn: Any = None, **options: Any) -> Any:
            return self._refusing if fn is None else self._refusing(fn)

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

    triton = tl = _NoTriton()

__all__ = ["MISSING", "tl", "triton"]
