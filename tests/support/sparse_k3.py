"""A folder like a release's of Kimi-K3, at its full logical size (1.56 TB) and of holes: all names, shapes and headers,
no weights. `python -m tests.support.sparse_k3 --format mxfp4|nvfp4 PATH` makes one; with `--measure` it is planned then
for 8 ranks with the reads of rank 3, and time and memory of that are printed.

Names, dtypes and shapes of the quantised tensors are written down here once more, not taken from the code under test.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import os
import resource
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from dwdp.env import child_environment
from dwdp.model.config import ModelConfig
from dwdp.model.safetensors_file import ITEMSIZE
from dwdp.model.shapes import model_tensors
from dwdp.tools.plan_model import KNOWN_MODELS

PREFIX = "language_model."
FP8 = {
    "kda": ("q_proj", "k_proj", "v_proj", "g_proj", "o_proj"),
    "mla": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "g_proj", "o_proj"),
}
IGNORE = ["lm_head", r"re:.*self_attn.*", r"re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
IGNORE += [
    r"re:.*vision_tower.*",
    r"re:.*mm_projector.*",
    r"re:.*routed_expert_.*_proj",
    r"re:.*block_sparse_moe\.gate$",
]

Tensor = tuple[str, str, tuple[int, ...]]  # name, dtype of the header, shape


def k3_config() -> dict:
    return json.loads(KNOWN_MODELS["kimi-k3"].read_text())


def text_tensors(config: ModelConfig, expert_format: str) -> Iterator[Tensor]:
    """Of the language model, without the prefix; routed experts behind the other tensors of their layer."""
    layer = -1
    for name, tensor in model_tensors(config).items():
        parts = name.split(".")
        number = int(parts[2]) if parts[1] == "layers" else config.num_hidden_layers
        if number != layer and layer in config.moe_layer_indices:
            yield from _experts(config, layer, expert_format)
        layer = number
        shape, dtype = tensor.shape, {"bfloat16": "BF16", "float32": "F32"}[tensor.dtype]
        if name.endswith(".A_log"):
            shape = (-(-shape[0] // 32) * 32,)
        if expert_format == "nvfp4" and _is_fp8(config, name):
            yield name, "F8_E4M3", shape
            yield f"{name}_scale", "F32", (-(-shape[0] // 128), 1, -(-shape[1] // 128), 1)
        else:
            yield name, dtype, shape


def _is_fp8(config: ModelConfig, name: str) -> bool:
    parts = name.split(".")
    if len(parts) != 6 or parts[3] != "self_attn":
        return False
    return parts[4] in FP8[config.layer_kind(int(parts[2]))]


def _experts(config: ModelConfig, layer: int, expert_format: str) -> Iterator[Tensor]:
    width, inter = config.expert_width, config.moe_intermediate_size
    for expert in range(config.num_experts):
        for matrix, rows, columns in (("w1", inter, width), ("w2", width, inter), ("w3", inter, width)):
            name = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{matrix}"
            if expert_format == "mxfp4":
                yield f"{name}.weight_packed", "U8", (rows, columns // 2)
                yield f"{name}.weight_scale", "U8", (rows, columns // 32)
            else:
                yield f"{name}.weight", "U8", (rows, columns // 2)
                yield f"{name}.weight_scale", "F8_E4M3", (rows, columns // 16)
                yield f"{name}.weight_scale_2", "F32", ()
                yield f"{name}.input_scale", "F32", ()


def vision_tensors(layers: int = 27, width: int = 1152, hidden: int = 7168) -> Iterator[Tensor]:
    """About as many and as large as those of the release's vision tower and projector."""
    for layer in range(layers):
        block = f"vision_tower.encoder.blocks.{layer}"
        yield f"{block}.wqkv.weight", "BF16", (3 * width, width)
        yield f"{block}.wo.weight", "BF16", (width, width)
        yield f"{block}.mlp.fc0.weight", "BF16", (4 * width, width)
        yield f"{block}.mlp.fc1.weight", "BF16", (width, 4 * width)
        yield f"{block}.norm0.weight", "BF16", (width,)
    yield "mm_projector.linear_1.weight", "BF16", (4 * width, 4 * width)
    yield "mm_projector.linear_2.weight", "BF16", (hidden, 4 * width)


def quantization(config: ModelConfig, expert_format: str) -> dict:
    """The `quantization_config` of config.json."""
    if expert_format == "mxfp4":
        weights = {"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group", "symmetric": True}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "config_groups": {"group_0": group},
            "ignore": IGNORE,
        }
    table = {}
    for layer in range(config.num_hidden_layers):
        base = f"{PREFIX}model.layers.{layer}"
        for module in FP8[config.layer_kind(layer)]:
            table[f"{base}.self_attn.{module}"] = {"quant_algo": "FP8_PB_WO"}
        if config.is_moe(layer):
            table[f"{base}.block_sparse_moe.experts"] = {"quant_algo": "NVFP4", "group_size": 16}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": table}


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """tiktoken.model of vocab_size - 256 ranks, bytes first, then strings that no text is made of by merges."""
    lines = []
    for rank in range(vocab_size - 256):
        token = bytes([rank]) if rank < 256 else b"\xff" + struct.pack(">I", rank)
        lines.append(f"{base64.b64encode(token).decode()} {rank}\n")
    (folder / "tiktoken.model").write_text("".join(lines))
    first = vocab_size - 256
    named = {first: "[BOS]", first + 1: "[EOS]", first + 2: "<|end_of_msg|>", vocab_size - 1: "[PAD]"}
    added = {str(i): {"content": text, "special": True} for i, text in named.items()}
    document = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(document))
    generation = {"eos_token_id": [first + 1, first + 2], "temperature": 1.0, "top_p": 0.95}
    (folder / "generation_config.json").write_text(json.dumps(generation))


def make_sparse(folder: Path, expert_format: str, *, data: dict | None = None, num_files: int = 96) -> None:
    """data: a config with `text_config`, default Kimi-K3's. Files hold runs of about equal bytes in model order, each
    sorted as the safetensors library sorts, by element size and name."""
    data = json.loads(json.dumps(k3_config() if data is None else data))
    data["text_config"].pop("quantization_config", None)
    config = ModelConfig.from_dict(data)
    data["quantization_config"] = quantization(config, expert_format)
    data["vision_config"] = {"model_type": "moonvit", "patch_size": 14, "hidden_size": 1152, "num_hidden_layers": 27}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(data, indent=2))
    if expert_format == "nvfp4":
        own = {key: data["quantization_config"][key] for key in ("quant_algo", "quantized_layers")}
        document = {"producer": {"name": "modelopt"}, "quantization": own}
        (folder / "hf_quant_config.json").write_text(json.dumps(document))
    write_tokenizer(folder, config.vocab_size)
    tensors = [(PREFIX + name, dtype, shape) for name, dtype, shape in text_tensors(config, expert_format)]
    tensors += vision_tensors()
    sizes = [math.prod(shape) * ITEMSIZE[dtype] for _, dtype, shape in tensors]
    total, done = sum(sizes), 0
    groups: list[list[Tensor]] = [[] for _ in range(num_files)]
    for tensor, nbytes in zip(tensors, sizes):
        groups[min(num_files - 1, (done + nbytes // 2) * num_files // total)].append(tensor)
        done += nbytes
    names = [f"model-{i + 1:05d}-of-{num_files:06d}.safetensors" for i in range(num_files)]
    weight_map = {}
    for name, group in zip(names, groups):
        group.sort(key=lambda tensor: (-ITEMSIZE[tensor[1]], tensor[0]))
        _write_holes(folder / name, group)
        weight_map |= {tensor[0]: name for tensor in group}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_holes(path: Path, tensors: list[Tensor]) -> None:
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, dtype, shape in tensors:
        end = at + math.prod(shape) * ITEMSIZE[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)


_PLAN = """
import json, sys
from dwdp.tools.cli import run
code = run(["plan", *sys.argv[1:]])
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:"))
print(json.dumps({"peak_mib": int(peak) // 1024, "torch": "torch" in sys.modules}), file=sys.stderr)
sys.exit(code)
"""


def run_plan_alone(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """`dwdp plan FOLDER` in a process of its own, whose last line on stderr is a document: {peak_mib, torch}."""
    program = [sys.executable, "-c", _PLAN, str(folder), *more]
    return subprocess.run(program, capture_output=True, text=True, timeout=600, env=child_environment({}))


def measure(folder: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    result = run_plan_alone(folder, "--ranks", "8", "--reads", "3")
    seconds, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(*result.stdout.splitlines()[-1:], *result.stderr.splitlines(), sep="\n")
    load = os.getloadavg()[0]
    print(f"plan: exit {result.returncode}, {seconds:.1f} s, {cpu:.1f} s of a CPU, load average {load:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--format", choices=("mxfp4", "nvfp4"), required=True)
    parser.add_argument("--measure", action="store_true", help="plan the folder and print what that took")
    parser.add_argument("path", type=Path)
    options = parser.parse_args()
    make_sparse(options.path, options.format)
    if options.measure:
        measure(options.path)


if __name__ == "__main__":
    main()
