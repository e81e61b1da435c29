"""Do copies run beside compute? Forwards with throttled copies against the same forwards on replicated weights.

    python -m dwdp.tools.overlap

A copy stream is throttled so that a layer's copies take a given share of its compute time. Copies that run beside
compute cost nothing while that share is below one; above one a forward takes as long as its copies.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from dwdp.executor.create import RankExecutor, build_rank
from dwdp.executor.settings import resolve
from dwdp.group.threads import run_rank_threads
from dwdp.model.writer import random_checkpoint

CONFIG = {
    "model_type": "kimi_linear", "vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 9,
    "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 512, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "q_lora_rank": 64, "kv_lora_rank": 64,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "mla_use_nope": True,
    "mla_use_output_gate": True, "num_experts": 8, "num_experts_per_token": 2, "num_shared_experts": 1,
    "moe_intermediate_size": 128, "routed_expert_hidden_size": 128, "latent_moe_use_norm": True,
    "moe_router_activation_func": "sigmoid", "topk_method": "noaux_tc", "use_grouped_topk": True,
    "num_expert_group": 1, "topk_group": 1, "moe_renormalize": True, "routed_scaling_factor": 1.0,
    "attn_res_block_size": 4, "num_nextn_predict_layers": 0, "tie_word_embeddings": False,
    "linear_attn_config": {
        "num_heads": 4, "head_dim": 64, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0,
        "use_full_rank_gate": True, "full_attn_layers": [5], "kda_layers": [1, 2, 3, 4, 6, 7, 8, 9],
    },
}  # fmt: skip


@dataclass(frozen=True)
class Overlap:
    """Medians over the timed forwards, in seconds; `share`: copy time over the replicated forward's time."""

    share: float
    replicated_seconds: float
    shared_seconds: float
    copy_seconds: float
    exposed_wait_seconds: float
    traced_wait_seconds: float

    @property
    def slowdown(self) -> float:
        return self.shared_seconds - self.replicated_seconds

    @property
    def excess(self) -> float:
        """What copies need beyond compute: the least that a forward can lose, and all it should lose."""
        return max(0.0, self.copy_seconds - self.replicated_seconds)


def _forward_seconds(rank: RankExecutor, tokens: list[int]) -> float:
    began = time.perf_counter()
    rank.logits(tokens)
    return time.perf_counter() - began


def _traced_waits(trace: list[dict]) -> float:
    """How long compute stood still, from the timestamps: a wait lasts until its slot was recorded ready."""
    total, ready = 0.0, {}
    for op in trace:
        where = (op.get("slot"), op.get("layer"))
        if op["kind"] == "record" and op["stream"] == "copy":
            ready[where] = op["t0"]
        elif op["kind"] == "wait" and op["stream"] == "compute" and where in ready:
            total += max(0.0, ready[where] - op["t0"])
    return total


def measure(folder: Path, share: float, *, tokens: int = 512, repeats: int = 5, num_ranks: int = 2) -> Overlap:
    """One model on `num_ranks` ranks of which rank 0 computes, alternating with a replicated copy of it.

    The forwards with DWDP are timed in a row: one on replicated weights in between would hide copies of the next.
    The throttle is set from the replicated forward's median before; the one after is what the result is compared
    with.
    """
    ids = torch.randint(0, CONFIG["vocab_size"], (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    whole = build_rank(resolve(folder, ranks=1, dtype="float32", device="cpu").settings)
    settings = resolve(
        folder, ranks=num_ranks, dtype="float32", device="cpu", dwdp={"verify": "sample", "verify_every": 0},
        dense_dwdp={"enabled": True, "min_bytes": 1},
    ).settings  # fmt: skip
    warm = statistics.median(_forward_seconds(whole, ids) for _ in range(4))
    nbytes = run_rank_threads(num_ranks, lambda group: _copied_bytes(settings, group, ids))[0]

    def timed(group):
        rate = nbytes / (share * warm)
        with build_rank(settings, group, rank=group.rank, copy_bytes_per_second=rate, trace=True) as rank:
            result = None
            if group.rank == 0:
                # The forward after setup pays for the copies that no forward before it could hide.
                for _ in range(2):
                    rank.logits(ids)
                alone, beside = [], []
                exposed, first = rank.report()["counters"]["exposed_wait_seconds"], len(rank.device.trace)
                for _ in range(repeats):
                    beside.append(_forward_seconds(rank, ids))
                trace = rank.device.trace[first:]
                exposed = rank.report()["counters"]["exposed_wait_seconds"] - exposed
                for _ in range(repeats):
                    alone.append(_forward_seconds(whole, ids))
                result = Overlap(
                    share, statistics.median(alone), statistics.median(beside), share * warm, exposed,
                    _traced_waits(trace),
                )  # fmt: skip
            group.barrier("measured", timeout_seconds=300)
            return result

    try:
        return run_rank_threads(num_ranks, timed, timeout=300)[0]
    finally:
        whole.release()


def _copied_bytes(settings, group, ids: list[int]) -> int:
    """Bytes that one forward copies in the steady state."""
    with build_rank(settings, group, rank=group.rank) as rank:
        counts = []
        for _ in range(3):
            rank.logits(ids[:8])
            counts.append(rank.report()["counters"]["copied_bytes"])
        return counts[2] - counts[1]


def write_model(folder: Path) -> Path:
    random_checkpoint(folder, CONFIG, seed=0)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.3, 3.0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model")
        print("copy/compute  replicated s  dwdp s  slowdown s  excess s  exposed wait s  from trace s")
        for share in arguments.shares:
            o = measure(model, share, tokens=arguments.tokens, repeats=arguments.repeats)
            print(
                f"{share:12.2f}  {o.replicated_seconds:12.4f}  {o.shared_seconds:6.4f}  {o.slowdown:10.4f}  "
                f"{o.excess:8.4f}  {o.exposed_wait_seconds:14.4f}  {o.traced_wait_seconds:12.4f}"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
