"""What NVML says that a process has of a GPU, where it says it: in a container it may know no process by its number."""

from __future__ import annotations

import ctypes
import os

NOT_AVAILABLE = (1 << 64) - 1
MOST_PROCESSES = 256


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("nbytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def process_bytes(uuid: str) -> int | None:
    """Bytes of the GPU `uuid` (GPU-...) that this process has, None where NVML is missing or does not say."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2():
        return None
    try:
        device, count = ctypes.c_void_p(), ctypes.c_uint(MOST_PROCESSES)
        found = (_Process * MOST_PROCESSES)()
        if nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)):
            return None
        if nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), found):
            return None
        own = [one.nbytes for one in found[: count.value] if one.pid == os.getpid() and one.nbytes != NOT_AVAILABLE]
        return own[0] if own else None
    finally:
        nvml.nvmlShutdown()
