"""What a rank computes on and in which dtype; torch is imported only where it is asked about."""

from __future__ import annotations

import os
from collections.abc import Sequence

from dwdp.errors import ConfigError

NVIDIA_PATHS = ("/dev/nvidia0", "/proc/driver/nvidia")
DTYPES = {"float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16"}


def choose_device(device: str, *, nvidia_paths: Sequence[str] = NVIDIA_PATHS) -> tuple[str, str]:
    """`auto`, `cpu` or `cuda` -> (the device that is used, why). Raises ConfigError where it cannot be used.

    On a machine with an NVIDIA device `auto` never falls back to the CPU silently.
    """
    if device == "cpu":
        return "cpu", "asked for"
    if device not in ("auto", "cuda"):
        raise ConfigError(f"device {device!r} is unknown: it is auto, cpu or cuda")
    found = next((path for path in nvidia_paths if os.path.exists(path)), None)
    if device == "auto" and found is None:
        return "cpu", "this machine has no NVIDIA device"
    why = f"device {device}: " + (f"this machine has an NVIDIA device ({found})" if found else "a GPU was asked for")
    lacking = _lacking_for_cuda()
    if lacking:
        raise ConfigError(
            f"{why} but {' and '.join(lacking)}; install with: pip install 'dwdp[gpu]' and a CUDA build of "
            "torch, or run on the CPU with --device cpu"
        )
    raise ConfigError(f"{why} but this version has no CUDA memory domain yet; run on the CPU with --device cpu")


def _lacking_for_cuda() -> list[str]:
    import importlib.util

    import torch

    lacking = []
    if torch.version.cuda is None:
        lacking.append(f"torch {torch.__version__} is built without CUDA")
    try:
        has_bindings = importlib.util.find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:
        has_bindings = False
    if not has_bindings:
        lacking.append("cuda-bindings is not installed")
    return lacking


def compute_dtype(dtype: str):
    """A dtype's name -> torch dtype; `auto` is float32, the CPU's. Raises ConfigError for another name."""
    import torch

    if dtype == "auto":
        return torch.float32
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is unknown: it is auto, {', '.join(DTYPES)}")
    return getattr(torch, DTYPES[dtype])
