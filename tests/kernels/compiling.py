"""Kernels compiled for sm_90 on a machine without a GPU: `python -m tests.kernels.compiling` prints what each needs.

Every tile of the tables is compiled at Kimi-K3's shapes. A kernel must leave shared memory at most at the 227 KiB that
a block may have, its programs must fit on an SM as often as the tile says, and no more than a few values that a loop
does not touch may spill to local memory. Weights that are decoded must reach the tensor cores from registers, and
attention must use their products of warp groups.

A process of its own, since kernels of a process with TRITON_INTERPRET are not compiled.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHARED_LIMIT = 227 * 1024  # of a block, and what an SM has for all of its blocks beside 1 KiB a block
REGISTERS = 65536  # of an SM
LOCAL_LIMIT = 160  # bytes a thread: of addresses and bounds; 144 is the most that was seen, of the widest nvfp4 tile


@dataclass(frozen=True)
class Case:
    """One kernel with types or constants of its arguments. Integers are multiples of 16 but those that say "odd".

    local_limit: bytes of local memory a thread; products: whether it must use those of warp groups; most_registers:
    what the launch allows.
    """

    name: str
    kernel: Any
    arguments: dict[str, str]
    constants: dict[str, Any]
    warps: int
    stages: int
    resident: int = 1
    local_limit: int = LOCAL_LIMIT
    products: bool = False
    most_registers: int | None = None


@dataclass(frozen=True)
class Built:
    """What a compiled kernel takes: bytes of shared memory, registers and bytes of local memory a thread."""

    shared: int
    registers: int
    local: int
    ptx: str
    ttgir: str

    def from_registers(self) -> bool:
        """Whether every tensor-core product takes its first operand from registers."""
        dots = [line for line in self.ttgir.splitlines() if "warp_group_dot " in line]
        return bool(dots) and all("dot_op<{opIdx = 0" in line for line in dots)


def grouped_cases() -> Iterator[Case]:
    from dwdp.kernels.moe import TILES, grouped_kernel

    pointers = {"plain": "*bf16", "mxfp4": "*u8", "nvfp4": "*u8", "fp8": "*u8"}
    scales = {"mxfp4": "*i32", "nvfp4": "*i64", "fp8": "*fp32"}
    for format, table in TILES.items():
        for most, *tiles in table:
            for gated, tile in zip((True, False), tiles):
                arguments = {"x": "*bf16", "out": "*bf16", "w": pointers[format]}
                arguments |= dict.fromkeys(("tile_expert", "tile_ends", "starts", "ends"), "*i32")
                numbers = ("N", "K", "num_experts", "range_start", "x_stride", "w_stride", "scale_rows")
                arguments |= dict.fromkeys(numbers, "i32")
                arguments["scale_stride"] = "i32, odd"  # 28 or 24 words a row
                constants: dict[str, Any] = {"tokens": None, "s": None, "f": None}
                for name, kind in (("tokens", "*i32" if gated else None), ("s", scales.get(format))):
                    if kind:
                        arguments[name] = kind
                        del constants[name]
                if format == "nvfp4":
                    arguments["f"] = "*fp32"
                    del constants["f"]
                constants |= dict(
                    FORMAT=format, GATED=gated, EVEN=True, HOST=False, HALVES=gated and format in ("mxfp4", "nvfp4"),
                    BETA=4.0, LINEAR_BETA=25.0, BLOCK_M=tile.tokens, BLOCK_N=tile.rows, BLOCK_K=tile.step,
                )  # fmt: skip
                name = f"{format} {'first' if gated else 'second'} up to {most if most < 1 << 60 else 'any'}"
                yield Case(name, grouped_kernel, arguments, constants, tile.warps, tile.stages, tile.resident)


def lanes_cases() -> Iterator[Case]:
    """MXFP4 on Hopper, in Gluon."""
    from dwdp.kernels.moe import LANE_TILES, registers
    from dwdp.kernels.packed import WORD, grouped_mxfp4_kernel

    large = [tile for _, *pair in LANE_TILES for tile in pair]
    for tile in dict.fromkeys([*large, *(tile.rest for tile in large if tile.rest)]):
        for gated in (True, False):
            arguments = {"x": "*bf16", "out": "*bf16", "w": "*u8", "s": "*u8", "tokens": "*i32"}
            arguments |= dict.fromkeys(("tile_expert", "tile_ends", "starts", "ends"), "*i32")
            numbers = ("N", "K", "num_experts", "range_start", "x_stride", "w_stride", "scale_stride")
            arguments |= dict.fromkeys(numbers, "i32")
            constants = dict(GATED=gated, LANES=gated, BETA=4.0, LINEAR_BETA=25.0, WORD=WORD)
            constants |= dict(TOKENS=tile.tokens, ROWS=tile.rows, STAGES=tile.stages)
            if not gated:
                del arguments["tokens"]
                constants["tokens"] = None
            name = f"lanes {'first' if gated else 'second'} of {tile.tokens}"
            yield Case(
                name, grouped_mxfp4_kernel, arguments, constants, tile.warps, tile.stages, tile.resident,
                products=True, most_registers=registers(tile), local_limit=320,  # 40 bytes with Triton 3.6
            )  # fmt: skip


def other_cases() -> Iterator[Case]:
    """The products of one matrix and the kernels over rows, at the hidden width."""
    from dwdp.kernels.activation import gated_kernel
    from dwdp.kernels.moe import sum_kernel
    from dwdp.kernels.product import LINEAR_TILES, linear_kernel
    from dwdp.kernels.rows import mix_kernel, rms_norm_kernel

    for format, sigmoid in (("fp8", False), ("plain", True)):
        for most, tile in LINEAR_TILES:
            arguments = {"x": "*bf16", "w": "*u8" if format == "fp8" else "*bf16", "out": "*bf16"}
            arguments |= dict.fromkeys(("M", "N", "K", "x_stride"), "i32") | {"scale_stride": "i32, odd"}
            constants = dict(FORMAT=format, SIGMOID=sigmoid, EVEN=True, HOST=False, GROUP=8)
            constants |= dict(BLOCK_M=tile.tokens, BLOCK_N=tile.rows, BLOCK_K=tile.step)
            if format == "fp8":
                arguments["s"] = "*fp32"
            else:
                constants["s"] = None
            if sigmoid:
                arguments["out"] = "*fp32"
            name = f"{'router' if sigmoid else 'fp8 linear'} up to {most if most < 1 << 60 else 'any'}"
            yield Case(name, linear_kernel, arguments, constants, tile.warps, tile.stages, tile.resident)
    arguments = dict(out="*bf16", places="*i32", weights="*fp32", borders="*i32", total="*fp32")
    arguments |= dict.fromkeys(("width", "num_experts", "range_start"), "i32")
    yield Case("sum of a token", sum_kernel, arguments, dict(FIRST=False, TOP_K=16, BLOCK=1024), 4, 3)
    arguments = dict(x="*bf16", weight="*bf16", out="*bf16", width="i32", x_stride="i32", eps="fp32")
    yield Case("rms norm", rms_norm_kernel, arguments, dict(HALF=True, HOST=False, BLOCK=8192), 16, 3)
    arguments = dict.fromkeys((*(f"r{i}" for i in range(9)), "proj", "norm", "out"), "*bf16")
    arguments |= dict(width="i32", eps="fp32")
    yield Case("residual mix of 9", mix_kernel, arguments, dict(COUNT=9, HALF=True, HOST=False, BLOCK=8192), 16, 3)
    constants = dict(BETA=4.0, LINEAR_BETA=25.0, HALF=True, HOST=False, BLOCK=1024)
    arguments = dict(gate="*bf16", up="*bf16", out="*bf16", count="i32")
    yield Case("activation", gated_kernel, arguments, constants, 4, 3)


HEADS, NOPE, ROPE, VALUE, LATENT = 96, 128, 64, 128, 512


def attention_cases() -> Iterator[Case]:
    """Latent attention, the short convolution and the gate. None may keep its running sums in local memory; decode's
    fill all registers but a few: one version of the compiler moves up to 80 words of a thread, another none."""
    import torch

    from dwdp.kernels import attention, decode, gated, short_conv

    blocks = attention.prefill_blocks(torch.bfloat16)
    arguments = dict.fromkeys(("query", "expanded", "shared", "out"), "*bf16")
    arguments |= dict.fromkeys(("carried", "carried_highest", "carried_summed"), "*fp32")
    arguments |= {"tiles": "*i32", "scale": "fp32", "expanded_stride": "i32", "shared_stride": "i32"}
    constants = dict(
        HEADS=HEADS, NOPE=NOPE, ROPE=ROPE, VALUE=VALUE, NOPE_BLOCK=NOPE, ROPE_BLOCK=ROPE, VALUE_BLOCK=VALUE
    )
    constants |= dict(QUERIES=blocks.rows, KEYS=blocks.keys, CARRIES=True, PRECISION="tf32")
    sizes = dict(warps=blocks.warps, stages=blocks.stages, local_limit=0, products=True)
    yield Case("prefill", attention._prefill, arguments, constants, **sizes)
    blocks = decode.decode_blocks(torch.bfloat16)
    arguments = dict.fromkeys(("query_latent", "query_rope", "rows"), "*bf16") | {"slots": "*i64", "contexts": "*i64"}
    arguments |= dict.fromkeys(("partial", "partial_highest", "partial_summed"), "*fp32") | {"scale": "fp32"}
    strides = ("latent_stride", "latent_head_stride", "rope_stride", "rope_head_stride", "row_stride")
    arguments |= dict.fromkeys(strides, "i32") | {"slot_stride": "i64", "splits": "i32, odd"}
    constants = dict(HEADS=HEADS, LATENT=LATENT, ROPE=ROPE, LATENT_BLOCK=LATENT, ROPE_BLOCK=ROPE)
    constants |= dict(HEADS_BLOCK=blocks.rows, KEYS=blocks.keys, PRECISION="tf32")
    sizes = dict(warps=blocks.warps, stages=blocks.stages, local_limit=320, products=True)
    yield Case("decode", decode._decode, arguments, constants, **sizes)
    arguments = dict.fromkeys(("partial", "partial_highest", "partial_summed"), "*fp32") | {"out": "*bf16"}
    arguments |= {"splits": "i32, odd", "out_stride": "i32", "out_head_stride": "i32"}
    constants = dict(HEADS=HEADS, LATENT=LATENT, LATENT_BLOCK=LATENT)
    yield Case("parts of decode", decode._combine, arguments, constants, 4, 3, local_limit=0)
    arguments = dict.fromkeys(("q", "k", "v", "past", "q_out", "k_out", "v_out", "next_past"), "*bf16")
    arguments |= dict.fromkeys(("q_taps", "k_taps", "v_taps"), "*fp32") | {"begins": "*i64", "token_sequences": "*i64"}
    arguments |= {"num_tokens": "i32, odd", "num_tiles": "i32, odd", "eps": "fp32"}
    constants = dict(HEADS=HEADS, WIDTH=128, WIDTH_BLOCK=128, TAPS=4, TOKENS=short_conv.TOKENS)
    yield Case("short convolution", short_conv._short_conv, arguments, constants, 4, 3, local_limit=0)
    arguments = dict.fromkeys(("x", "gate", "out"), "*bf16") | {
        "weight": "*fp32",
        "num_rows": "i32, odd",
        "eps": "fp32",
    }
    constants = dict(WIDTH=128, WIDTH_BLOCK=128, ROWS=gated.ROWS, NORM=True)
    yield Case("norm and gate", gated._gated, arguments, constants, 4, 3, local_limit=0)


def build(case: Case) -> Built:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    order = {name: i for i, name in enumerate(case.kernel.arg_names)}
    signature = {name: case.arguments.get(name, "constexpr").removesuffix(", odd") for name in order}
    multiples = [name for name, kind in case.arguments.items() if kind[0] == "*" or kind in ("i32", "i64")]
    aligned = {(order[name],): [["tt.divisibility", 16]] for name in multiples}
    kind = GluonASTSource if case.kernel.is_gluon() else ASTSource
    source = kind(case.kernel, signature, constexprs=case.constants, attrs=aligned)
    options = dict(num_warps=case.warps, num_stages=case.stages, maxnreg=case.most_registers)
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    registers, local = _usage(found.asm["cubin"])
    return Built(found.metadata.shared, registers, local, found.asm["ptx"], found.asm["ttgir"])


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers a thread and bytes of local memory, as the compiled code itself says."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, timeout=60).stdout
    registers, stack, local = (int(re.search(rf"{key}:(\d+)", text)[1]) for key in ("REG", "STACK", "LOCAL"))
    return registers, stack + local


def problems(case: Case, built: Built) -> list[str]:
    found = []
    if built.shared * case.resident + 1024 * case.resident > SHARED_LIMIT + 1024:
        found.append(f"{case.resident} x {built.shared} bytes of shared memory are more than an SM has")
    if built.registers * 32 * case.warps * case.resident > REGISTERS:
        found.append(f"{built.registers} registers do not let {case.resident} programs stay on an SM")
    decoded = case.constants.get("FORMAT", "plain") != "plain"
    if decoded and built.ttgir.count("warp_group_dot ") and not built.from_registers():
        found.append("decoded weights go through shared memory")
    if case.products and "wgmma.mma_async" not in built.ptx:
        found.append("no products of warp groups")
    if built.local > case.local_limit:
        found.append(f"{built.local} bytes of local memory a thread")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", help="a case by its name; may be given again")
    options = parser.parse_args(arguments)
    wrong = 0
    for case in [*grouped_cases(), *lanes_cases(), *other_cases(), *attention_cases()]:
        if options.only and case.name not in options.only:
            continue
        built = build(case)
        faults = problems(case, built)
        wrong += bool(faults)
        products = "warp_group_dot " in built.ttgir
        where = "registers" if built.from_registers() else "shared memory" if products else "-"
        print(
            f"{case.name:32} {built.shared:7} bytes shared {built.registers:4} registers  weights from {where:13} "
            f"{'; '.join(faults) or 'ok'}", flush=True,
        )  # fmt: skip
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
