"""The delta rule of KDA through flash-linear-attention, over packed sequences with states in and out.

[Note: pinned configurations] Its kernels time several launch configurations when they first run and keep the fastest,
so that two ranks, or two runs, may add in another order. Here each kernel has one: PINNED, or what `_choose` takes from
the list, the same everywhere. Outputs are then the same bits on every rank and with DWDP on and off.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dwdp.kernels.batch import PackedBatch

logger = logging.getLogger(__name__)

FLA_VERSION = "0.6.0"
# What the delta rule's kernels are defined in; the library's others keep their tuning.
TUNED_MODULES = ("fla.ops.kda", "fla.ops.common", "fla.ops.gla", "fla.ops.utils")
# Kernel -> (its own block sizes, warps, stages) where the choice below is not the best on H200.
PINNED: dict[str, tuple[dict[str, int], int, int | None]] = {}


@functools.cache
def operations() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """(chunk form, recurrence) of the installed library, or None, with one warning a process, where it is missing or of
    another version than FLA_VERSION, whose arguments these are."""
    from importlib import metadata

    try:
        version = metadata.version("fla-core")
        if version != FLA_VERSION:
            raise ImportError(f"fla-core is {version}")
        from fla.ops.kda import chunk_kda, fused_recurrent_kda
    except Exception as error:  # its import looks at the GPU, which may fail in any way
        logger.warning(
            "KDA runs in its slow torch form: fla-core %s cannot be used (%s: %s); pip install 'dwdp[gpu]'",
            FLA_VERSION, type(error).__name__, error,
        )  # fmt: skip
        return None
    pin(sys.modules)
    return chunk_kda, fused_recurrent_kda


def pin(modules: dict[str, Any]) -> dict[str, Any]:
    """Leaves every tuned kernel of the library one configuration -> kernel name: that one; see [Note: pinned
    configurations]."""
    from triton.runtime.autotuner import Autotuner

    chosen = {}
    for name, module in list(modules.items()):
        if not name.startswith(TUNED_MODULES):
            continue
        for value in list(vars(module).values()):
            while value is not None and not isinstance(value, Autotuner) and type(value).__name__ == "Heuristics":
                value = value.fn
            if isinstance(value, Autotuner) and value.configs:
                kernel = getattr(value.base_fn, "__name__", "")
                value.configs = [_choose(kernel, value.configs)]
                value.cache.clear()
                chosen[kernel] = value.configs[0]
    return chosen


def _choose(kernel: str, configs: list[Any]) -> Any:
    """The pinned configuration, else of those with the largest blocks up to 64 the one nearest to 4 warps and 3
    stages."""
    if kernel in PINNED:
        blocks, warps, stages = PINNED[kernel]
        for one in configs:
            if one.kwargs == blocks and one.num_warps == warps and stages in (None, one.num_stages):
                return one

    def rank(one: Any) -> tuple:
        blocks = [size for size in one.kwargs.values() if isinstance(size, int)]
        return (
            sum(max(0, size - 64) for size in blocks),
            -sum(blocks),
            abs(one.num_warps - 4),
            abs(one.num_stages - 3),
        )

    return min(configs, key=rank)


def runs_on(x: Tensor) -> bool:
    """Whether the library computes with `x`. On the host the interpreter does not run all of its kernels, and products
    of fp32 would be TF32's: both stay in the torch form."""
    return x.is_cuda and x.dtype != torch.float32 and operations() is not None


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    beta: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    state: Tensor,
    batch: PackedBatch,
) -> tuple[Tensor, Tensor]:
    """q, k (normalised), v, f (raw gates): [1, N, heads, d]; beta: fp32 [1, N, heads]; a_log: fp32 [heads];
    dt_bias: fp32 [heads * d]; state: fp32 [B, heads, K, V] in the batch's order -> outputs [1, N, heads, d] in v's
    dtype and the next state (a new tensor). Gate as in `kda_gate` of the torch form; queries are scaled by d^-0.5."""
    chunk, recurrent = operations()
    options = dict(
        A_log=a_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        use_gate_in_kernel=True,
        scale=q.shape[-1] ** -0.5,
        initial_state=state.contiguous(),
        output_final_state=True,
        cu_seqlens=batch.cu_seqlens,
    )
    arguments = [x.contiguous() for x in (q, k, v, f, beta)]
    with torch.no_grad():
        if max(batch.lengths) == 1:
            return recurrent(*arguments, **options)
        # With a bound of -5 or more its sub-chunks of 16 stay within fp32; see [Note: decay inside a chunk].
        bounded = lower_bound is not None and -5 <= lower_bound < 0
        return chunk(*arguments, **options, safe_gate=bounded, cu_seqlens_cpu=batch.host_cu_seqlens)
