"""Distributed Weight Data Parallelism. `import dwdp` imports no torch: the names below are loaded when first
used."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dwdp.config.schema import DenseConfig, DwdpConfig
    from dwdp.executor.request import RequestOutput, SamplingParams
    from dwdp.llm import LLM

__all__ = ["LLM", "DenseConfig", "DwdpConfig", "RequestOutput", "SamplingParams"]

_WHERE = {
    "LLM": "dwdp.llm",
    "SamplingParams": "dwdp.executor.request",
    "RequestOutput": "dwdp.executor.request",
    "DwdpConfig": "dwdp.config.schema",
    "DenseConfig": "dwdp.config.schema",
}


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'dwdp' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
