"""One rank of the measurement of expert copies: its memory, Kimi-K3's expert tables, and kernels of its own.

The rows of a layer are random bytes that depend on layer, table and expert alone, made on the device straight in the
handles, so that ranks that store the same expert hold the same bytes and no original exists.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dwdp.device.cuda import CudaDevice
from dwdp.device.nvrtc import Kernels, Launch
from dwdp.memory.vmm import CudaDomain
from dwdp.weights.cuda_copy import GatherKernel
from dwdp.weights.mover import mover_of
from dwdp.weights.transfers import Transfer
from tests.gpu.ranks import Site

TRANSFERS = {
    "per_slice": Transfer("per_slice"),
    "batched": Transfer("batched"),
    "gather tma": Transfer("gather", "tma"),
    "gather ldst": Transfer("gather", "ldst"),
}
NUM_SLOTS = 2
K3_EXPERTS, K3_MOE_LAYERS = 896, 92
ALL_RANKS_BYTES = 118e9  # for the handles and rings of all ranks together, of the 149e9 that an H200 has


@dataclass(frozen=True)
class Widths:
    """Of NVFP4 experts: two values a byte, and a scale's byte for 16 values."""

    latent: int
    inter: int

    @property
    def tables(self) -> dict[str, tuple[int, int]]:
        """Name -> shape of an expert's row, uint8."""
        into, out = (self.inter, self.latent), (self.latent, self.inter)
        found = {}
        for name, (rows, columns) in (("w1", into), ("w3", into), ("w2", out)):
            found[name], found[f"{name}_scale"] = (rows, columns // 2), (rows, columns // 16)
        return found

    @property
    def expert_nbytes(self) -> int:
        return sum(rows * columns for rows, columns in self.tables.values())


K3, TINY = Widths(3584, 3072), Widths(64, 48)


@dataclass(frozen=True)
class Kind:
    """A partition to measure: of which kind, over how many experts and layers; size and stride as the config's."""

    name: str
    num_experts: int
    num_layers: int
    size: int = 0
    stride: int = 0

    def __str__(self) -> str:
        pair = f" {self.size}/{self.stride}" if self.size else ""
        return f"{self.name}{pair}, E={self.num_experts}, {self.num_layers} layers"


def kinds(num_ranks: int, *, fake: bool) -> list[Kind]:
    """Every kind of partition with as many experts as all ranks together have room for; none has equal ranges only
    because the numbers happen to divide."""
    layers = 4 if num_ranks == 2 else 3  # with two slots: a whole number of rounds, and not
    rows = ALL_RANKS_BYTES // K3.expert_nbytes
    most = 16 if fake else min(K3_EXPERTS, int(rows) // (layers + NUM_SLOTS * (num_ranks - 1)))
    each = most // num_ranks
    stride, capped = each - max(1, each // 8), each + max(1, each // 32)
    return [
        Kind("balanced", each * num_ranks - num_ranks // 2, layers),
        Kind("uniform", each * num_ranks, layers, each, each),
        Kind("redundant", (num_ranks - 1) * stride + each, layers, each, stride),
        Kind("capped", each * num_ranks, layers, capped, capped),
    ]


class ExpertLayer(nn.Module):
    """What the set-up asks of a layer's routed experts, with one table for each of w1, w3, w2 and their scales."""

    def __init__(self, layer_index: int, widths: Widths, num_experts: int, start: int, end: int) -> None:
        super().__init__()
        self.layer_index, self.num_experts, self.first_expert = layer_index, num_experts, start
        self.dwdp, self.dwdp_pos = None, None
        self._tables = tuple(widths.tables)
        for name, shape in widths.tables.items():
            table = torch.empty((end - start, *shape), dtype=torch.uint8, device="meta")
            self.register_parameter(name, nn.Parameter(table, requires_grad=False))

    def expert_tables(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).detach() for name in self._tables}

    def small_tensors(self) -> dict[str, Tensor]:
        return {}

    def rebind(self, tables: dict[str, Tensor], small: dict[str, Tensor]) -> None:
        for name, table in {**tables, **small}.items():
            self._parameters[name] = nn.Parameter(table, requires_grad=False)
        self.first_expert = 0


class ExpertModel(nn.Module):
    def __init__(self, kind: Kind, widths: Widths, start: int, end: int) -> None:
        super().__init__()
        layers = (ExpertLayer(i, widths, kind.num_experts, start, end) for i in range(kind.num_layers))
        self.layers = nn.ModuleList(layers)

    def moe_layers(self) -> list[ExpertLayer]:
        return list(self.layers)

    def fill(self) -> None:
        """Random bytes in every row; the same for an expert on every rank."""
        generator = None
        for layer in self.layers:
            for number, table in enumerate(layer.expert_tables().values()):
                generator = generator or torch.Generator(table.device)
                words = table.view(len(table), -1).view(torch.int64)
                for row in range(len(table)):
                    expert = layer.first_expert + row
                    generator.manual_seed(1 + expert + 10_000 * (number + 10 * layer.layer_index))
                    words[row].random_(generator=generator)


SOURCE = r"""
typedef unsigned long long u64;

extern "C" __global__ void spin(u64 nanoseconds) {
    u64 start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        __nanosleep(500);
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - start < nanoseconds);
}

// All threads walk through one contiguous range together: what a copy by SMs can do when it has nothing to look up.
extern "C" __global__ void __launch_bounds__(1024) plain_copy(uint4* dst, const uint4* src, u64 count) {
    const u64 step = (u64)gridDim.x * blockDim.x;
    u64 k = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    for (; k + 3 * step < count; k += 4 * step) {
        uint4 v[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] = __ldcs(src + k + j * step);
#pragma unroll
        for (int j = 0; j < 4; ++j) __stcs(dst + k + j * step, v[j]);
    }
    for (; k < count; k += step) __stcs(dst + k, __ldcs(src + k));
}
"""


class Machine:
    """A rank's domain, device and kernels, for the whole run. `close()` gives all back."""

    def __init__(self, site: Site) -> None:
        self.rank, self.fake = site.rank, site.fake
        self.widths = TINY if site.fake else K3
        if site.fake:
            from tests.device.test_cuda import FakeCudaDevice
            from tests.gpu.experts_fake import BenchDriver
            from tests.memory.fake_driver import FakeCudaDomain, FakeMachine

            api = BenchDriver(FakeMachine(gpu_bytes=1 << 30))
            self.domain = FakeCudaDomain(site.rank, 0, page_granules=1, driver=api)
            self.device = FakeCudaDevice(api=api, measure_waits=True)
            self.compiler, self.name, self.num_sms = {"compiler": lambda *arguments: b"cubin"}, "fake", 132
        else:
            torch.cuda.set_device(0)
            self.domain = CudaDomain(site.rank, 0)
            self.device = CudaDevice(0, measure_waits=True)
            properties = torch.cuda.get_device_properties(0)
            self.compiler, self.name, self.num_sms = {}, properties.name, properties.multi_processor_count
        self.driver, self.mover = self.domain.driver, mover_of(self.domain)
        self._kernels = Kernels(self.driver, 0, SOURCE, **self.compiler)
        self._spin, self._plain = self._kernels.function("spin"), self._kernels.function("plain_copy")

    def spin(self, seconds: float) -> Launch:
        """A prepared kernel that takes as long, by the clock of the device."""
        return Launch(self.driver, self._spin, 1, 1, 0, [ctypes.c_ulonglong(int(seconds * 1e9))])

    def plain_copy(self, dst: int, src: int, nbytes: int, num_ctas: int) -> Launch:
        """A prepared copy of one contiguous range by SMs; addresses and size are multiples of 16."""
        arguments = [ctypes.c_void_p(dst), ctypes.c_void_p(src), ctypes.c_ulonglong(nbytes // 16)]
        return Launch(self.driver, self._plain, num_ctas, 1024, 0, arguments)

    def gather_kernel(self, name: str, num_ctas: int) -> GatherKernel:
        return GatherKernel(self.driver, 0, name, num_ctas=num_ctas, **self.compiler)

    def finish(self) -> None:
        """Waits for the device; raises what work on it raised."""
        error = self.device.drain()
        if error is not None:
            raise error

    def close(self) -> None:
        self.device.close()
        self._kernels.close()
        self.domain.close()


class Together:
    """Prepared submissions, one behind the other, as one."""

    def __init__(self, parts: Sequence[Any], close: Callable[[], None] | None = None) -> None:
        self.parts, self._close = list(parts), close

    def submit(self, stream: Any) -> None:
        for part in self.parts:
            part.submit(stream)

    def close(self) -> None:
        for part in self.parts:
            getattr(part, "close", lambda: None)()
        if self._close is not None:
            self._close()
