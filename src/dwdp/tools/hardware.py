"""GPUs that a plan can name: memory, link and matrix rate of each, with where the figure is from."""

from __future__ import annotations

import math
from dataclasses import dataclass

MATMUL_SHARE = 0.75
"""Share of the datasheet's dense bf16 rate that a large product sustains: 736-748 of 989 TFLOP/s on H200."""
COPY_SLOWDOWN = 1.115
"""How much longer the same product takes while the copy engines pull weights; measured on two H200."""
LINK_SHARE = 374 / 450
"""Share of the datasheet's NVLink rate in one direction that batched copies between two H200 reached, both ways
at once."""


@dataclass(frozen=True)
class Gpu:
    """memory_gib: what CUDA may allocate, GiB. link_gb_per_s: 1e9 bytes a second into one GPU from its peers.
    tflops: dense bf16 TFLOP/s of the datasheet. source: of the three, in this order."""

    name: str
    memory_gib: float
    link_gb_per_s: float
    tflops: float
    source: str

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * (1 << 30))

    @property
    def flops_per_second(self) -> float:
        """Sustained beside the copies."""
        return self.tflops * 1e12 * MATMUL_SHARE / COPY_SLOWDOWN


_NVLINK5 = "NVIDIA: NVLink 5, 1.8 TB/s a GPU, both directions together; 900 GB/s x the share reached on H200"

GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            "h200", 139, 374, 989,
            "measured (141 GB by the datasheet); measured with both directions busy (450 GB/s by the datasheet); "
            "NVIDIA H200 datasheet, 1,979 with sparsity",
        ),
        Gpu(
            "b200", 178, 900 * LINK_SHARE, 2250,
            "CUDA's total on DGX B200, 178.35 GiB (180 GB by the datasheet); "
            f"{_NVLINK5}; NVIDIA HGX B200 datasheet, 36 PFLOP/s with sparsity for 8 GPUs",
        ),
        Gpu(
            "gb200", 184, 900 * LINK_SHARE, 2500,
            "nvidia-smi's total of 189,471 MiB less 1 GiB (13.4 TB for 72 GPUs by the datasheet); "
            f"{_NVLINK5}; NVIDIA GB200 NVL72 datasheet, 360 PFLOP/s with sparsity for 72 GPUs",
        ),
        Gpu(
            "gb300", 276, 900 * LINK_SHARE, 2500,
            "nvidia-smi's total of 284,208 MiB less 1 GiB (20 TB for 72 GPUs by the datasheet); "
            f"{_NVLINK5}; NVIDIA GB300 NVL72 datasheet, 360 PFLOP/s with sparsity for 72 GPUs",
        ),
    )
}  # fmt: skip


_LEAST, _MOST = 1e-9, 1e12  # of a described GPU's numbers, in their units: far from what a float loses


def choose_gpu(
    name: str | None, memory_gib: float | None, link_gb_per_s: float | None, tflops: float | None
) -> Gpu | None:
    """The GPU that the options name or describe, None when there is none of them. Raises ValueError, one line."""
    described = {"--gpu-memory": memory_gib, "--link-gbps": link_gb_per_s, "--tflops": tflops}
    given = {option: value for option, value in described.items() if value is not None}
    if name is not None and given:
        raise ValueError(f"--gpu {name} and {' '.join(given)}: name a GPU or describe one, not both")
    if name is not None:
        if name not in GPUS:
            raise ValueError(f"--gpu {name} is unknown; known are {', '.join(GPUS)}; others need {' '.join(described)}")
        return GPUS[name]
    if not given:
        return None
    missing = [option for option in described if option not in given]
    if missing:
        raise ValueError(f"{' '.join(given)} without {' '.join(missing)}: a GPU is described by all three")
    for option, value in given.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{option} {value:g} must be a positive number")
        if not _LEAST <= value <= _MOST:
            raise ValueError(f"{option} {value:g} is no GPU's: it must be from {_LEAST:g} to {_MOST:g}")
    return Gpu("described", memory_gib, link_gb_per_s, tflops, "the command line")
