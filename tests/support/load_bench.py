"""How fast a checkpoint is loaded beside a plain read of its files: `python -m tests.support.load_bench`.

Writes random checkpoint files of about --gb GB below --folder, then in turn, --rounds times each, with none of them in
the page cache: reads them from the first to the last byte in one thread, into one buffer and into memory that was never
touched, and has --ranks processes load them, each its own experts and all dense weights. Prints every round, and the
medians as JSON. All that was written is removed.

The rate of loading is the files' bytes over the time in which the slowest rank loads: headers, checks and memory are
included, imports and process start are not; "reading" is without headers and checks. "asked" is what ranks asked the
kernel for over what they need; "from disk" what the kernel fetched for all of them over the files' bytes; "beside" the
largest peak of a rank's memory less its tensors.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dwdp.env import child_environment

BLOCK = 16 << 20


def wide_config(gb: float) -> dict:
    """A config like nano's, with experts of 6.7 MB in MXFP4, 32 a layer, and as many layers as make `gb` GB."""
    from tests.support.tiny import tiny_config_dict

    layers = 1 + max(1, round(gb * 1e9 / 237e6))
    full = [i for i in range(1, layers + 1) if i % 4 == 0]
    config = tiny_config_dict(
        hidden_size=1024, vocab_size=8192, intermediate_size=4096, num_hidden_layers=layers, num_experts=32,
        moe_intermediate_size=2048, routed_expert_hidden_size=2048, attn_res_block_size=4,
    )  # fmt: skip
    config["linear_attn_config"] |= {
        "num_heads": 8, "head_dim": 64, "full_attn_layers": full,
        "kda_layers": [i for i in range(1, layers + 1) if i % 4],
    }  # fmt: skip
    return config


def drop(folder: Path) -> None:
    """Nothing of the files is left in the page cache."""
    for file in sorted(folder.glob("*.safetensors")):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def from_disk() -> int:
    """Bytes that the kernel has fetched from a disk for this process."""
    return int(re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.M)[1])


def status(key: str) -> int:
    return int(re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)[1]) * 1024


def plain_read(folder: Path, *, fresh: bool = False) -> dict:
    """fresh: into memory that nobody has touched, as a model's is, in place of one buffer."""
    files = sorted(folder.glob("*.safetensors"))
    memory = mmap.mmap(-1, sum(file.stat().st_size for file in files)) if fresh else bytearray(BLOCK)
    view, at = memoryview(memory), 0
    before, began = from_disk(), time.monotonic()
    for file in files:
        with open(file, "rb", buffering=0) as stream:
            while count := stream.readinto(view[at : at + BLOCK] or bytearray(1)):
                at += count if fresh else 0
    found = {"seconds": time.monotonic() - began, "disk": from_disk() - before}
    view.release()
    if fresh:
        memory.close()
    return found


def load_once(folder: Path, rank: int, ranks: int, dtype: str) -> None:
    """In a process of its own: says "ready", loads when it is told to, prints what it took."""
    import torch

    from dwdp.model import loader

    torch.set_num_threads(1)
    experts = json.loads((folder / "config.json").read_text())["num_experts"]
    mine = (rank * experts // ranks, (rank + 1) * experts // ranks)
    needed = sum(entry.nbytes for entry in loader.load_reads(folder, expert_range=mine))
    fill, reading = loader._fill, []
    loader._fill = lambda *args, **options: reading.append(fill(*args, **options).seconds)
    Path("/proc/self/clear_refs").write_text("5")
    asked: list[int] = []
    before, disk = status("VmRSS"), from_disk()
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.monotonic()
    model = loader.load_model(folder, dtype=dtype, expert_range=mine, read_log=lambda *read: asked.append(read[2]))
    seconds = time.monotonic() - began
    peak = status("VmHWM") - before
    tensors = sum(parameter.nbytes for parameter in model.parameters())
    found = {"seconds": seconds, "asked": sum(asked), "needed": needed, "disk": from_disk() - disk}
    print(json.dumps(found | {"reading": sum(reading), "beside": peak - tensors}), flush=True)


def load(folder: Path, ranks: int, dtype: str) -> list[dict]:
    """Every rank's numbers, all loading at the same time."""
    command = [sys.executable, "-m", "tests.support.load_bench", "--child", str(folder), "--dtype", dtype]
    children: list[subprocess.Popen] = []
    try:
        for rank in range(ranks):
            options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            arguments = ["--ranks", str(ranks), "--rank", str(rank)]
            environment = child_environment(PYTHONPATH=os.pathsep.join(sys.path))
            children.append(subprocess.Popen(command + arguments, env=environment, **options))
        for child in children:
            child.stdout.readline()
        drop(folder)  # they have read the headers
        for child in children:
            child.stdin.write("go\n")
            child.stdin.flush()
        return [json.loads(child.communicate(timeout=600)[0]) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()


def measure(folder: Path, *, ranks: int, rounds: int, dtype: str) -> dict:
    """Medians of `rounds` rounds; bytes and seconds."""
    nbytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    plain, fresh, loads, reading, ratios = [], [], [], [], []
    for number in range(rounds):
        drop(folder)
        one = plain_read(folder)
        drop(folder)
        fresh.append(plain_read(folder, fresh=True)["seconds"])
        found = load(folder, ranks, dtype)
        slowest = max(rank["seconds"] for rank in found)
        plain.append(one["seconds"])
        loads.append(slowest)
        ratios.append(one["seconds"] / slowest)
        reading.append(max(rank["reading"] for rank in found))
        asked, needed, disk = (sum(rank[key] for rank in found) for key in ("asked", "needed", "disk"))
        beside = max(rank["beside"] for rank in found)
        print(
            f"round {number + 1}: plain {nbytes / one['seconds'] / 1e9:.2f} GB/s, "
            f"from disk {one['disk'] / nbytes:.3f}, into fresh memory {nbytes / fresh[-1] / 1e9:.2f} GB/s; "
            f"load {nbytes / slowest / 1e9:.2f} GB/s, reading {nbytes / reading[-1] / 1e9:.2f} GB/s, "
            f"asked {asked / needed:.4f}, from disk {disk / nbytes:.3f}, beside {beside / 2**20:.0f} MiB; "
            f"machine's load {os.getloadavg()[0]:.1f}",
            flush=True,
        )

    def gbps(seconds: list[float]) -> float:
        return nbytes / statistics.median(seconds) / 1e9

    return {
        "bytes": nbytes, "plain_gbps": gbps(plain), "fresh_gbps": gbps(fresh), "load_gbps": gbps(loads),
        "reading_gbps": gbps(reading), "ratio": statistics.median(ratios), "asked": asked / needed,
        "from_disk": disk / nbytes, "beside_mib": beside / 2**20,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=3.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--dtype", default="bf16", help="bf16: as in the files; fp32: dense weights pass through staging"
    )
    parser.add_argument("--folder", help="where the files are written; they are removed again")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        load_once(Path(arguments.child), arguments.rank, arguments.ranks, arguments.dtype)
        return
    from dwdp.model.writer import random_checkpoint

    with tempfile.TemporaryDirectory(prefix="dwdp-load-", dir=arguments.folder) as folder:
        path = Path(folder)
        random_checkpoint(
            path, wide_config(arguments.gb), expert_format="mxfp4", shards=max(1, round(arguments.gb / 1.0))
        )
        found = measure(path, ranks=arguments.ranks, rounds=arguments.rounds, dtype=arguments.dtype)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
