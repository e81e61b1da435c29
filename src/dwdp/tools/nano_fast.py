"""Makes nano-k3's training step quick on a GPU; what it computes stays the same.

The model is so small that starting kernels costs more than running them. So the elementwise parts are
compiled, and the whole step is captured as one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dwdp.model import decoder, kda, mla, moe, norms

BLOCK = 16


def count(ids: Tensor, *, minlength: int) -> Tensor:
    """torch.bincount for ids below `minlength`, without waiting for the GPU to learn the largest."""
    counts = torch.zeros(minlength, dtype=torch.int64, device=ids.device)
    return counts.scatter_add_(0, ids, torch.ones_like(ids))


def solve(a: Tensor, b: Tensor, *, upper: bool, unitriangular: bool) -> Tensor:
    """torch.linalg.solve_triangular for a lower unit-triangular a [..., n, n], n in multiples of 16.

    Block forward substitution in plain products, which a graph can hold and the compiler can see through.
    """
    if upper or not unitriangular or a.shape[-1] % BLOCK:
        raise ValueError("only lower unit-triangular matrices of whole blocks are solved here")
    starts = range(0, a.shape[-1], BLOCK)
    power = torch.stack([a[..., s : s + BLOCK, s : s + BLOCK] for s in starts], -3).tril(-1)
    # (I + N)^-1 = (I - N)(I + N^2)(I + N^4)(I + N^8), since N^16 = 0
    inverse = torch.eye(BLOCK, dtype=a.dtype, device=a.device) - power
    for _ in range(3):
        power = power @ power
        inverse = inverse + inverse @ power
    solved: list[Tensor] = []
    for i, s in enumerate(starts):
        right = b[..., s : s + BLOCK, :]
        if solved:
            right = right - a[..., s : s + BLOCK, :s] @ torch.cat(solved, -2)
        solved.append(inverse[..., i, :, :] @ right)
    return torch.cat(solved, -2)


class Fast:
    """While entered, the model's parts run compiled (if asked for) and without waiting for the GPU."""

    def __init__(self, *, compiled: bool) -> None:
        owners = [
            (kda.KimiDeltaAttention, "forward"),
            (mla.LatentAttention, "forward"),
            (moe.GatedMLP, "forward"),
            (moe.Router, "forward"),
            (norms.RMSNorm, "forward"),
            (norms, "situ"),
        ]
        self._replaced: list[tuple[object, str, Callable, Callable]] = [
            (torch, "bincount", torch.bincount, count),
            (torch.linalg, "solve_triangular", torch.linalg.solve_triangular, solve),
        ]
        if compiled:
            torch._dynamo.config.recompile_limit = 64
            for owner, name in owners:
                plain = getattr(owner, name)
                self._replaced.append((owner, name, plain, torch.compile(plain, dynamic=False)))
            mix = decoder.residual_mix
            self._replaced.append((decoder, "residual_mix", mix, _mixing(torch.compile(mix, dynamic=False))))

    def __enter__(self) -> None:
        for owner, name, _, quick in self._replaced:
            setattr(owner, name, quick)

    def __exit__(self, *exception) -> None:
        for owner, name, plain, _ in self._replaced:
            setattr(owner, name, plain)


def _mixing(compiled: Callable) -> Callable:
    # A first call without snapshots has nothing to compile, and the compiler then gives the function up.
    return lambda prefix, snapshots, *rest: compiled(prefix, snapshots, *rest) if snapshots else prefix


class chunk:
    """While entered, KDA's chunks are of `size` tokens: short rows are not padded to 64."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __enter__(self) -> None:
        self.before, kda.CHUNK = kda.CHUNK, self.size

    def __exit__(self, *exception) -> None:
        kda.CHUNK = self.before


def captured(step: Callable[[], None], *, warm_up: int = 3) -> Callable[[], None]:
    """`step` as a CUDA graph, after `warm_up` runs of it. Its inputs and outputs are tensors that stay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
