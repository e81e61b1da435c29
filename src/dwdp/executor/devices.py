"""What a rank computes on and in which dtype; torch is imported only where it is asked about."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from typing import Any

from dwdp.errors import ConfigError

NVIDIA_PATHS = ("/dev/nvidia[0-9]*", "/proc/driver/nvidia")
DTYPES = {"float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16"}


def nvidia_path(patterns: Sequence[str] = NVIDIA_PATHS) -> str | None:
    """A file that says that this machine has an NVIDIA device; None without one."""
    return next((path for pattern in patterns for path in sorted(glob.glob(pattern))), None)


def choose_device(device: str, *, nvidia_paths: Sequence[str] = NVIDIA_PATHS) -> tuple[str, str]:
    """`auto`, `cpu` or `cuda` -> (the device that is used, why). Raises ConfigError where it cannot be used.

    On a machine with an NVIDIA device `auto` never falls back to the CPU silently.
    """
    if device == "cpu":
        return "cpu", "asked for"
    if device not in ("auto", "cuda"):
        raise ConfigError(f"device {device!r} is unknown: it is auto, cpu or cuda")
    found = nvidia_path(nvidia_paths)
    if device == "auto" and found is None:
        return "cpu", "this machine has no NVIDIA device"
    why = f"device {device}: " + (f"this machine has an NVIDIA device ({found})" if found else "a GPU was asked for")
    lacking = lacking_for_cuda(nvidia_paths)
    if lacking:
        raise ConfigError(
            f"{why} but {join_clauses(lacking)}; install with: pip install 'dwdp[gpu]' and a CUDA build of "
            "torch, or run on the CPU with --device cpu"
        )
    return "cuda", "asked for" if device == "cuda" else "this machine has an NVIDIA device"


def join_clauses(clauses: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join([", ".join(clauses[:-1]), clauses[-1]] if len(clauses) > 1 else clauses)


def lacking_for_cuda(nvidia_paths: Sequence[str] = NVIDIA_PATHS) -> list[str]:
    """What keeps this process from using a GPU, each as a clause; empty where nothing does."""
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
    if not lacking and not torch.cuda.is_available():
        lacking.append("torch sees no GPU (see nvidia-smi and CUDA_VISIBLE_DEVICES)")
    if lacking and nvidia_path(nvidia_paths) is None:
        lacking.insert(0, "this machine has no NVIDIA device")
    return lacking


def compute_dtype(dtype: str, device: str = "cpu"):
    """A dtype's name -> torch dtype; `auto` is float32 on a CPU, and on a GPU None, the checkpoint's. Raises
    ConfigError for another name."""
    import torch

    if dtype == "auto":
        return torch.float32 if device == "cpu" else None
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is unknown: it is auto, {', '.join(DTYPES)}")
    return getattr(torch, DTYPES[dtype])


def capabilities(
    device: str, *, gather_kernel: str | None, driver: Any = None, compiler: Any = None
) -> dict[str, str | None]:
    """What of a launch's demands a device cannot do, and why; None where it can, as the host's domain can everything.

    gather, batched: transfers. exportable: memory that peers can map. fabric, posix_fd: handle types, by what the
    device's attributes say: one that they promise may still be refused, which set-up finds out by trying.
    gather_kernel: that is asked for, None without the gather, which is then not looked at: it takes a compilation.
    Makes no context on the GPU. driver, compiler: as of `Driver` and `available_transfers`, for tests.
    """
    if device != "cuda":
        return dict.fromkeys(("gather", "batched", "exportable", "fabric", "posix_fd"))
    from dwdp.device.nvrtc import compile_cubin
    from dwdp.memory.driver import Driver
    from dwdp.weights.cuda_copy import available_transfers

    driver = Driver(driver)
    found = available_transfers(driver, 0, gather_kernel=gather_kernel, compiler=compiler or compile_cubin)
    able = {"gather": found["gather"], "batched": found["batched"], "exportable": None}
    for name, attribute in HANDLE_ATTRIBUTES.items():
        supported = _attribute(driver, attribute)
        able[name] = None if supported else f"the device's attribute {attribute} is {supported}"
    if not _attribute(driver, "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"):
        able["exportable"] = "the device has no virtual memory management"
    elif able["fabric"] and able["posix_fd"]:
        able["exportable"] = f"{able['fabric']}, and {able['posix_fd']}"
    return able


HANDLE_ATTRIBUTES = {
    "fabric": "HANDLE_TYPE_FABRIC_SUPPORTED",
    "posix_fd": "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
}


def _attribute(driver: Any, name: str) -> int:
    """0 also where the driver or the bindings are older than the attribute."""
    from dwdp.memory.driver import DriverError

    try:
        return driver.attribute(name, 0)
    except (DriverError, AttributeError):
        return 0
