"""Where attention is checked and timed: a GPU at Kimi-K3's widths, or the host with tiny ones and the interpreter."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from dwdp.kernels import flash_mla, select
from dwdp.kernels.batch import PackedBatch
from dwdp.model.config import ModelConfig
from dwdp.model.kda import KimiDeltaAttention, kda_chunk, kda_gate
from dwdp.model.mla import LatentAttention
from dwdp.model.state import KdaState, MlaState
from tests.kernels.references import decode_by_pages
from tests.support.tiny import tiny_config_dict

K3 = dict(
    hidden_size=7168, num_attention_heads=96, num_key_value_heads=96, q_lora_rank=1536, kv_lora_rank=512,
    qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    linear_attn_config={"num_heads": 96, "head_dim": 128},
)  # fmt: skip
TINY = dict(num_attention_heads=2, num_key_value_heads=2, linear_attn_config={"num_heads": 2})


@dataclass
class Site:
    """cpu: tiny and interpreted. Rows of the table and failed checks gather here; cases stop at `ends`."""

    cpu: bool
    seconds: float
    begun: float = field(default_factory=time.monotonic)
    rows: list[tuple[str, str]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.device = "cpu" if self.cpu else "cuda"
        self.dtype = torch.float32 if self.cpu else torch.bfloat16  # the interpreter's products know no bf16
        self.config = ModelConfig.from_dict(tiny_config_dict(**(TINY if self.cpu else K3)))
        self.draw = torch.Generator(self.device).manual_seed(0)
        self.raw_rate = 1.0  # of a plain matrix product, FLOP/s
        self.copy_rate = float("nan")  # of a plain copy, bytes/s read and written; no share is one of nothing measured

    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.begun)

    def row(self, name: str, text: str, **numbers: Any) -> None:
        self.rows.append((name, text))
        self.numbers[name] = numbers
        print(f"[{time.monotonic() - self.begun:5.1f} s] {name}: {text}", flush=True)

    def check(self, name: str, error: float, bound: float) -> None:
        """A difference that must not be above its bound; NaN is above every bound."""
        holds = error <= bound
        self.row(name, f"{error:.2e} (bound {bound:.1e}) {'' if holds else 'FAILED'}", error=error, bound=bound)
        if not holds:
            self.failed.append(f"{name}: {error:.3e} > {bound:.1e}")

    def case(self, name: str, needed: float, body: Callable[[Site], None]) -> None:
        """Runs one case; one that no time is left for is skipped, one that raises is a failure of its own."""
        if self.left() < needed and not self.cpu:
            self.row(name, f"skipped: {self.left():.0f} s left, {needed:.0f} s needed")
            return
        try:
            body(self)
        except Exception as error:
            import traceback

            traceback.print_exc()
            self.failed.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
        if not self.cpu:
            torch.cuda.empty_cache()

    def noise(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        wide = torch.randn(*shape, generator=self.draw, device=self.device)
        return (wide * scale).to(self.dtype if dtype is None else dtype)

    def seconds_of(self, body: Callable[[], Any], *, repeats: int = 5) -> float:
        """Median of runs behind one that warms up; of one on the host."""
        begun = time.perf_counter()
        body()
        if self.cpu:
            return time.perf_counter() - begun
        found = []
        for _ in range(repeats):
            first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            body()
            second.record()
            second.synchronize()
            found.append(first.elapsed_time(second) / 1000)
            if sum(found) > 1.5:
                break
        return statistics.median(found)

    def peak_bytes(self, body: Callable[[], Any]) -> int:
        """What `body` allocates above what is allocated before; the host does not tell, 0."""
        if self.cpu:
            body()
            return 0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        body()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    # ---- blocks of the model ----

    def kda(self) -> KimiDeltaAttention:
        block = KimiDeltaAttention(self.config, dtype=self.dtype, device=self.device)
        return self.filled(block)

    def mla(self) -> LatentAttention:
        return self.filled(LatentAttention(self.config, dtype=self.dtype, device=self.device))

    def filled(self, block: Any) -> Any:
        """Weights of variance 1 / inputs; gates that forget slowly, so that a wrong state shows."""
        for name, parameter in block.requires_grad_(False).named_parameters():
            if name == "A_log":
                parameter.copy_(1.5 * torch.rand(parameter.shape, generator=self.draw, device=self.device))
            elif name == "dt_bias":
                parameter.copy_(self.noise(*parameter.shape, dtype=parameter.dtype) - 1)
            elif "norm" in name:
                parameter.fill_(1.0)
            else:
                inputs = 4 if "conv" in name else parameter.shape[-1]
                parameter.copy_(self.noise(*parameter.shape, dtype=parameter.dtype, scale=inputs**-0.5))
        return block

    def kda_state(self, count: int) -> KdaState:
        linear = self.config.linear_attn_config
        return KdaState(
            self.noise(count, linear.short_conv_kernel_size - 1, 3 * linear.width),
            self.noise(count, linear.num_heads, linear.head_dim, linear.head_dim, dtype=torch.float32),
        )

    def mla_state(self, count: int, capacity: int, length: int) -> MlaState:
        """With whole pages of rows where a model's state has them."""
        width = self.config.mla_cache_width
        rows = flash_mla.padded(capacity, width, self.dtype, self.device)
        return MlaState(self.noise(count, rows, width), [length] * count)

    def batch(self, lengths: list[int], starts: list[int] | None = None) -> PackedBatch:
        return PackedBatch.of(lengths, starts=starts, device=self.device)


@contextmanager
def form(name: str):
    """DWDP_KERNELS for a block of code."""
    before = os.environ.get("DWDP_KERNELS")
    os.environ["DWDP_KERNELS"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["DWDP_KERNELS"]
        else:
            os.environ["DWDP_KERNELS"] = before


@contextmanager
def own_decode():
    """Latent attention decodes by our kernel for a block of code, whatever is installed."""
    with mock.patch.object(flash_mla, "runs_on", lambda *given: False):
        yield


def flash_mla_missing(site: Site) -> str | None:
    """Why FlashMLA cannot be checked here; the host has a stand-in."""
    if not select.hopper(torch.device(site.device, 0)):
        return "this GPU is none that it runs on"
    return None if flash_mla.operation() is not None else "it is not installed, or cannot be used"


@contextmanager
def host_flash_mla():
    """FlashMLA with tiny widths on the host for a block of code: its operation in torch."""
    stand_in = dict(
        operation=lambda: decode_by_pages, DTYPE="float32",
        LATENT=tiny_config_dict()["kv_lora_rank"], ROPE=tiny_config_dict()["qk_rope_head_dim"],
    )  # fmt: skip
    with mock.patch.multiple(flash_mla, **stand_in), mock.patch.object(select, "hopper", lambda device: True):
        yield


def host_library() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """In the place of the library's two operations, whose kernels need a GPU: the torch form under their names."""

    def operation(q, k, v, g, beta, *, A_log, dt_bias, lower_bound, scale, initial_state, cu_seqlens, **options):
        assert options.pop("use_gate_in_kernel") and options.pop("output_final_state")
        assert set(options) <= {"safe_gate", "cu_seqlens_cpu"}
        g = kda_gate(g, A_log, dt_bias, lower_bound)
        ends, outs, states = cu_seqlens.tolist(), [], []
        for b, (start, end) in enumerate(zip(ends[:-1], ends[1:])):
            one = [x[:, start:end] for x in (q.float() * scale, k.float(), v.float(), g, beta)]
            out, state = kda_chunk(*one, initial_state[b : b + 1], gate_floor=lower_bound)
            outs.append(out.to(v.dtype))
            states.append(state)
        return torch.cat(outs, 1), torch.cat(states)

    return operation, operation
