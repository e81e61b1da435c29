"""Compiles every kernel of attention for sm_90 with Kimi-K3's shapes, without a GPU: `python -m
tests.kernels.compile_sm90` prints a JSON object, kernel -> what the compiler says of it.

A process of its own, since kernels of a process with TRITON_INTERPRET are not compiled.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dwdp.kernels import attention, gated, short_conv

BF16 = torch.bfloat16
HEADS, NOPE, ROPE, VALUE, LATENT = 96, 128, 64, 128, 512


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int, stages: int = 3) -> dict:
    """types: of the arguments in Triton's words; pointers, and integers named in `*_stride`, are multiples of 16."""
    names = kernel.arg_names
    aligned = [n for n in types if types[n].startswith("*") or n.endswith("_stride")]
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = dict(num_warps=warps, num_stages=stages)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return {
        "shared_bytes": built.metadata.shared,
        "warp_group_products": built.asm["ptx"].count("wgmma.mma_async"),
        **_resources(built.asm["cubin"]),
    }


def _resources(cubin: bytes) -> dict[str, int]:
    """Registers and bytes of local memory of a thread, where the disassembler that comes with Triton tells them."""
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    if not os.path.exists(tool):
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, timeout=60)
    return {
        name: int(found[1])
        for name, word in (("registers", "REG"), ("stack_bytes", "STACK"), ("local_bytes", "LOCAL"))
        if (found := re.search(rf"{word}:(\d+)", done.stdout))
    }


def prefill(carries: bool) -> dict:
    blocks = attention.prefill_blocks(BF16)
    types = dict.fromkeys(("query", "expanded", "shared", "out"), "*bf16")
    types |= dict.fromkeys(("carried", "carried_highest", "carried_summed"), "*fp32")
    types |= {"tiles": "*i32", "scale": "fp32", "expanded_stride": "i32", "shared_stride": "i32"}
    sizes = dict(HEADS=HEADS, NOPE=NOPE, ROPE=ROPE, VALUE=VALUE, NOPE_BLOCK=NOPE, ROPE_BLOCK=ROPE, VALUE_BLOCK=VALUE)
    sizes |= dict(QUERIES=blocks.rows, KEYS=blocks.keys, CARRIES=carries, PRECISION="tf32")
    return compiled(attention._prefill, types, sizes, blocks.warps, blocks.stages)


def decode() -> dict:
    blocks = attention.decode_blocks(BF16)
    types = dict.fromkeys(("query_latent", "query_rope", "rows"), "*bf16") | {"slots": "*i64", "contexts": "*i64"}
    types |= dict.fromkeys(("partial", "partial_highest", "partial_summed"), "*fp32") | {"scale": "fp32"}
    names = ("latent_stride", "latent_head_stride", "rope_stride", "rope_head_stride", "row_stride", "splits")
    types |= dict.fromkeys(names, "i32") | {"slot_stride": "i64"}
    sizes = dict(HEADS=HEADS, LATENT=LATENT, ROPE=ROPE, LATENT_BLOCK=LATENT, ROPE_BLOCK=ROPE)
    sizes |= dict(HEADS_BLOCK=blocks.rows, KEYS=blocks.keys, PRECISION="tf32")
    return compiled(attention._decode, types, sizes, blocks.warps, blocks.stages)


def combine() -> dict:
    types = dict.fromkeys(("partial", "partial_highest", "partial_summed"), "*fp32") | {"out": "*bf16"}
    types |= dict.fromkeys(("splits", "out_stride", "out_head_stride"), "i32")
    return compiled(attention._combine, types, dict(HEADS=HEADS, LATENT=LATENT, LATENT_BLOCK=LATENT), 4)


def convolution() -> dict:
    types = dict.fromkeys(("q", "k", "v", "past", "q_out", "k_out", "v_out", "next_past"), "*bf16")
    types |= dict.fromkeys(("q_taps", "k_taps", "v_taps"), "*fp32") | {"begins": "*i64", "token_sequences": "*i64"}
    types |= {"num_tokens": "i32", "num_tiles": "i32", "eps": "fp32"}
    sizes = dict(HEADS=HEADS, WIDTH=128, WIDTH_BLOCK=128, TAPS=4, TOKENS=short_conv.TOKENS)
    return compiled(short_conv._short_conv, types, sizes, 4)


def gate() -> dict:
    types = dict.fromkeys(("x", "gate", "out"), "*bf16") | {"weight": "*fp32", "num_rows": "i32", "eps": "fp32"}
    return compiled(gated._gated, types, dict(WIDTH=128, WIDTH_BLOCK=128, ROWS=gated.ROWS, NORM=True), 4)


def main() -> int:
    found = {
        "prefill": prefill(True),
        "decode": decode(),
        "combine": combine(),
        "short convolution": convolution(),
        "norm and gate": gate(),
    }
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
