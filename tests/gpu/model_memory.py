"""What ranks that share a GPU hold of packed weights, beside `dwdp plan` of the same folder; what a forward takes.

On the host ranks share host memory with a GPU's granule, and compute in the torch form; the allocator does not tell.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import torch

from dwdp.env import child_environment
from dwdp.executor.settings import resolve
from tests.gpu import ranks
from tests.gpu.model_site import Site
from tests.support.system import DENSE, prompt, write_random
from tests.support.tiny import TWO_LAYERS, WIDER

MIB = 1 << 20
TEMPORARY_MIB = 256
TOKENS = 4096
# Two MoE layers of Kimi-K3's expert widths: 1.12 GB of MXFP4 each.
K3_LIKE = {
    **WIDER, "hidden_size": 2048, "moe_intermediate_size": 3072, "routed_expert_hidden_size": 3584, "num_experts": 64,
    "num_experts_per_token": 16, "num_hidden_layers": 3,
    "linear_attn_config": {"head_dim": 64, "kda_layers": [1, 2], "full_attn_layers": [3]},
}  # fmt: skip
# A rank's part of a table fills several pages of 16 MiB.
MEDIUM = {
    **WIDER, "hidden_size": 1024, "moe_intermediate_size": 1536, "routed_expert_hidden_size": 1792, "num_experts": 32
}  # fmt: skip
# name -> (expert format, FP8 attention that is kept, changes)
FORMATS = {
    "mxfp4": ("mxfp4", False, K3_LIKE),
    "nvfp4": ("nvfp4", False, MEDIUM),
    "nvfp4, FP8 kept": ("nvfp4", True, MEDIUM),
    "plain, FP8 kept": ("plain", True, WIDER),
}


def cases(site: Site) -> list:
    return [("folders", 30.0, write), *((f"{n} ranks", 40.0, lambda site, n=n: held(site, n)) for n in (2, 4))]


def write(site: Site) -> None:
    def one(name: str) -> None:
        expert_format, fp8, changes = FORMATS[name]
        changes = TWO_LAYERS if site.cpu else changes
        write_random(site.folder(f"held {name}"), expert_format=expert_format, fp8_attention=fp8, **changes)

    with ThreadPoolExecutor() as pool:  # random numbers and files are made without the interpreter's lock
        list(pool.map(one, FORMATS))
    site.note("folders", f"{sum(f.stat().st_size for f in site.folders.rglob('*.safetensors')) / 1e9:.2f} GB written")


def held(site: Site, n: int) -> None:
    """Every format in the same rank processes; the first one's peak as well."""
    works, cpu = {}, site.cpu
    for name, (_, fp8, _) in FORMATS.items():
        works[name] = (look, site.folder(f"held {name}"), fp8, cpu, TOKENS if name == "mxfp4" and n == 2 else 0)
    with site.form("torch" if cpu else "triton"):
        found = ranks.run(ranks.one_after_another, n, works, seconds=600 if cpu else max(30.0, site.left()))
    for name, (expert_format, fp8, _) in FORMATS.items():
        outcome = {rank: by_name[name] for rank, by_name in found.items()}
        errors = [text for text, _ in outcome.values() if text]
        if errors:
            site.check(f"{name}, {n} ranks", False, errors[0].strip().splitlines()[-1][:300])
            continue
        planned = plan_of(site.folder(f"held {name}"), n, expert_format, fp8)
        wrong = {
            f"rank {rank} {key}": (seen["ledger"][key], value)
            for rank, (_, seen) in sorted(outcome.items())
            for key, value in planned[rank].items()
            if seen["ledger"][key] != value
        }
        text = "as planned on every rank; rank 0: " + ", ".join(f"{key} {value:,}" for key, value in planned[0].items())
        site.check(f"{name}, {n} ranks: bytes", not wrong, f"(held, planned): {wrong}" if wrong else text)
        for rank, (_, seen) in sorted(outcome.items()):
            check_computed(site, f"{name}, {n} ranks, rank {rank}", seen)


def check_computed(site: Site, name: str, seen: dict) -> None:
    wanted = "torch" if site.cpu else "triton"
    ran = seen["kernels"] == wanted and (site.cpu or seen["routed_calls"] > 0) and seen["finite"]
    if not ran:
        site.check(
            f"{name}: computed by kernels", False, str({k: seen[k] for k in ("kernels", "routed_calls", "finite")})
        )
    if seen["peak"] is None:
        return
    peak, tokens = seen["peak"], seen["tokens"]
    bound = TEMPORARY_MIB + seen["activation_bytes"] / MIB
    site.check(
        f"{name}: peak of a forward of {tokens} tokens", peak["forward"] / MIB <= bound,
        f"{peak['forward'] / MIB:.0f} MiB above what is held, bound {TEMPORARY_MIB} MiB beside activations of "
        f"{seen['activation_bytes'] / MIB:.0f} MiB", peak_bytes=peak["forward"],
    )  # fmt: skip
    for what in ("routed", "largest"):
        texts = {"routed": "routed experts beside their result", "largest": "the largest single allocation"}
        if peak[what] is None:
            site.note(f"{name}: {texts[what]}", "this torch does not tell")
            continue
        text = f"{peak[what] / MIB:.0f} MiB, bound {TEMPORARY_MIB}"
        site.check(f"{name}: {texts[what]}", peak[what] / MIB <= TEMPORARY_MIB, text, bytes=peak[what])


def plan_of(folder: Path, n: int, expert_format: str, keep_fp8: bool) -> list[dict[str, int]]:
    """Rank -> the ledger's figures, by the command a user has."""
    config = folder / "serve.json"
    config.write_text(json.dumps({"keep_fp8": keep_fp8}))
    named = {"plain": "bf16"}.get(expert_format, expert_format)
    command = [sys.executable, "-m", "dwdp.tools.cli", "plan", str(folder), "--ranks", str(n), "--format", named]
    command += ["--dense", "--min-bytes", "1", "--config", str(config), "--json"]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    dense = document["dense"]
    # a forward of a rank brings in all experts but its own, so that each is counted for n - 1 ranks
    experts = sum(rank["remote_bytes_per_forward"] for rank in document["ranks"]) // (n - 1)
    return [
        {
            "stored_bytes": rank["handle_bytes"] + dense["stored_bytes"],
            "moved_bytes": experts + dense["moved_bytes"],
            "expert_moved_bytes": experts,
            "dense_moved_bytes": dense["moved_bytes"],
            "ring_bytes": rank["ring_bytes"],
            "slot_bytes": dense["slot_bytes"],
            "replicated_bytes": dense["replicated_bytes"],
        }
        for rank in document["ranks"]
    ]


# ---- in the rank processes ----


def look(site: ranks.Site, folder: Path, keep_fp8: bool, cpu: bool, tokens: int) -> dict:
    """A rank behind two forwards, and for a number of `tokens` what a forward of so many takes on a GPU."""
    settings = resolve(
        folder, ranks=site.size, dtype="bfloat16", device="cpu" if cpu else "cuda", keep_fp8=keep_fp8, environ={},
        dwdp={"allow_shared_device": True, "host_granule_bytes": 2 * MIB}, dense_dwdp=DENSE,
    ).settings  # fmt: skip
    calls = []
    from dwdp.kernels import moe

    routed = moe.routed
    with (
        site.shared(folder, settings=settings) as rank,
        mock.patch.object(moe, "routed", lambda *args, **options: calls.append(None) or routed(*args, **options)),
    ):
        logits = [rank.logits(prompt(site.rank, 12), chunk_size=7, decode=2) for _ in range(2)]
        assert torch.equal(*logits), "two forwards of the same prompt differ"
        seen = rank.report() | {
            "routed_calls": len(calls), "finite": bool(logits[0].isfinite().all()), "peak": None, "tokens": tokens
        }  # fmt: skip
        if tokens and not cpu:
            seen |= {"peak": peak_of(rank, tokens), "activation_bytes": activation_bytes(rank.model.config, tokens)}
    return seen


def activation_bytes(config, tokens: int) -> int:
    """Rows of the stream (prefix, snapshots, mixes, norms, projections), of the shared experts and of the latent."""
    shared = config.num_shared_experts * config.moe_intermediate_size
    return tokens * 2 * (12 * config.hidden_size + 3 * shared + 4 * config.expert_width)


def peak_of(rank, tokens: int) -> dict[str, int | None]:
    """Bytes above what is held: of a forward, of its largest call of routed experts beside the result, and the largest
    allocation (None where torch does not tell)."""
    from dwdp.kernels import moe

    ids = torch.randint(rank.model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(1))
    forward = lambda: _forward(rank, ids)  # noqa: E731
    forward()  # compiles, and takes workspaces that stay
    whole = _above(forward)[0]
    original, found = moe.routed, []

    def measured(*args, **options):
        above, result = _above(lambda: original(*args, **options))
        found.append(above - result.nbytes)
        return result

    with mock.patch.object(moe, "routed", measured):
        forward()
    return {"forward": whole, "routed": max(found), "largest": _largest_allocation(forward)}


def _largest_allocation(body) -> int | None:
    memory = torch.cuda.memory
    try:  # not public
        memory._record_memory_history("all", context=None, max_entries=1_000_000)
    except (AttributeError, TypeError):
        return None
    try:
        body()
        torch.cuda.synchronize()
        traces = memory._snapshot()["device_traces"]
    finally:
        memory._record_memory_history(None)
    return max((entry["size"] for trace in traces for entry in trace if entry["action"] == "alloc"), default=None)


def _forward(rank, ids: torch.Tensor) -> None:
    state = rank.model.new_state(1, ids.shape[1])
    rank.manager.start_forward()
    with torch.no_grad():
        rank.model(ids, state, last_only=True)
    rank.manager.end_forward()


def _above(body) -> tuple[int, object]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = body()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, result
