"""Writing checkpoints in release names: random ones for tests and demos, and a trained model."""

from __future__ import annotations

import copy
import hashlib
import math
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dwdp.model.config import ModelConfig
from dwdp.model.decoder import KimiK3Model
from dwdp.model.formats import FP8_BLOCK, MATRICES, MXFP4_GROUP, NVFP4_GROUP, PREFIX, expert_module, fp8_scale_shapes
from dwdp.model.moe import RoutedExperts
from dwdp.model.quant import E2M1_VALUES, quantise_fp8_block
from dwdp.model.shards import TensorToWrite, write_checkpoint

A_LOG_MULTIPLE = 32  # the release pads A_log with zeros, so the files written here do
_WRITE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# the tensors that a release keeps in float32
_FLOAT32 = re.compile(r"(\.A_log|\.dt_bias|_conv1d\.weight|\.o_norm\.weight|\.e_score_correction_bias)$")
# the attention projections that the NVFP4 release has in FP8 blocks
_FP8_ATTENTION = re.compile(r"\.self_attn\.((q|k|v|g|o|q_a|q_b|kv_b)_proj|kv_a_proj_with_mqa)\.weight$")
_MXFP4_IGNORE = (
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    "re:.*lm_head.*",
    "re:.*vision_tower.*",
    "re:.*mm_projector.*",
)


def random_checkpoint(
    path: str | os.PathLike,
    config: dict[str, Any],
    *,
    seed: int = 0,
    expert_format: str = "plain",
    dtype: str = "bf16",
    fp8_attention: bool = False,
    prefix: str = PREFIX,
    shards: int = 1,
    tokenizer: str | None = None,
) -> None:
    """A checkpoint of random weights that keep activations and states alive, written tensor by tensor.

    config: a config.json dict; the quantization_config that fits is added to it. expert_format: plain, mxfp4
    or nvfp4 (packed experts are drawn as random codes). dtype: bf16 or fp32, of everything that is neither
    packed nor float32 in a release. fp8_attention: the attention projections in FP8 blocks, which goes with
    plain and nvfp4 experts. prefix: "language_model." or "". tokenizer: the text of a tokenizer.json to add.
    A tensor's values depend on the seed, its name and its format alone.
    """
    if dtype not in _WRITE_DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(_WRITE_DTYPES)}")
    if fp8_attention and expert_format == "mxfp4":
        raise ValueError("no release has MXFP4 experts and FP8 attention: expert_format plain or nvfp4 goes with it")
    model_config = ModelConfig.from_dict(config)
    model = KimiK3Model(model_config, dtype=_WRITE_DTYPES[dtype], expert_format=expert_format, device="meta")
    draw = _Draw(seed)
    tensors: list[TensorToWrite] = []
    fp8_modules: list[str] = []
    for name, parameter in model.named_parameters():
        if name.split(".")[-2] == "experts":
            if name.endswith(".w13"):  # all of the layer's tables at once, in expert order
                layer = int(name.split(".")[2])
                tensors += _random_experts(draw, model_config, layer, expert_format, parameter.dtype)
        elif fp8_attention and _FP8_ATTENTION.search(name):
            fp8_modules.append(name.removesuffix(".weight"))
            tensors += _random_fp8(draw, name, tuple(parameter.shape))
        else:
            tensors.append(_random_tensor(draw, name, tuple(parameter.shape), parameter.dtype))
    tensors = [replace(tensor, name=prefix + tensor.name) for tensor in tensors]
    quantization = _quantization_config(model_config, expert_format, fp8_modules, prefix)
    write_checkpoint(path, _with_quantization(config, quantization), tensors, shards=shards)
    if tokenizer is not None:
        (Path(path) / "tokenizer.json").write_text(tokenizer, encoding="utf-8")


def save_checkpoint(
    path: str | os.PathLike, model: KimiK3Model, config: dict[str, Any], *, prefix: str = "", shards: int = 1
) -> None:
    """Writes a model with plain, complete experts in release names: bfloat16, float32 where a release has it.

    config: the config.json dict to write; a quantization_config in it is dropped.
    """
    if model.released or model.expert_format != "plain":
        raise ValueError("only a model with plain experts that is not released can be saved")
    tensors: list[TensorToWrite] = []
    tables = {id(p): (experts, name) for experts in model.moe_layers() for name, p in experts.named_parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in tables:
            dtype = torch.float32 if _FLOAT32.search(name) else torch.bfloat16
            tensors.append(_saved(name, parameter, dtype))
            continue
        experts, table = tables[id(parameter)]
        if experts.num_rows != experts.num_experts:
            raise ValueError(f"{name} holds {experts.num_rows} of {experts.num_experts} experts; save needs all")
        if table == "w13":
            tensors += _saved_experts(experts)
    tensors = [replace(tensor, name=prefix + tensor.name) for tensor in tensors]
    write_checkpoint(path, _with_quantization(config, None), tensors, shards=shards)


def _saved(name: str, value: Tensor, dtype: torch.dtype) -> TensorToWrite:
    if not name.endswith(".A_log"):
        return TensorToWrite(name, dtype, tuple(value.shape), lambda: value.to(dtype))
    padded = _padded_heads(value.numel())
    return TensorToWrite(name, dtype, (padded,), lambda: _pad_a_log(value.detach().to(dtype)))


def _saved_experts(experts: RoutedExperts) -> Iterator[TensorToWrite]:
    inter = experts.w2.shape[-1]
    for expert in range(experts.num_experts):
        rows = experts.w13[expert]
        for matrix, value in (("w1", rows[:inter]), ("w2", experts.w2[expert]), ("w3", rows[inter:])):
            name = expert_module(experts.layer_index, expert, matrix)
            yield _saved(f"{name}.weight", value, torch.bfloat16)


def _padded_heads(heads: int) -> int:
    return -(-heads // A_LOG_MULTIPLE) * A_LOG_MULTIPLE


def _pad_a_log(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values, (0, _padded_heads(values.numel()) - values.numel()))


class _Draw:
    """Random numbers of a tensor: a generator of its own, from the seed and the tensor's name."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def generator(self, name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)

    def weight(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Float32 values of a release tensor: products of unit scale, gates that do not saturate."""
        generator = self.generator(name)
        if name.endswith(".A_log"):
            return 1.5 * torch.rand(shape, generator=generator)
        noise = torch.randn(shape, generator=generator)
        if name.endswith(".dt_bias"):
            return noise.mul_(0.5).sub_(1.0)
        if name.endswith(".e_score_correction_bias"):
            return noise.mul_(0.1)
        if name.endswith("embed_tokens.weight"):
            return noise
        if len(shape) == 1:
            return noise.mul_(0.1).add_(1.0)  # a norm's weight
        return noise.mul_(shape[-1] ** -0.5)

    def bytes(self, name: str, shape: tuple[int, ...], low: int, high: int) -> Tensor:
        """uint8 in low .. high - 1."""
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=self.generator(name))


def _random_tensor(draw: _Draw, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> TensorToWrite:
    if name.endswith(".A_log"):
        padded = (_padded_heads(shape[0]),)
        return TensorToWrite(name, dtype, padded, lambda: _pad_a_log(draw.weight(name, shape)))
    return TensorToWrite(name, dtype, shape, lambda: draw.weight(name, shape).to(dtype))


def _random_fp8(draw: _Draw, name: str, shape: tuple[int, ...]) -> Iterator[TensorToWrite]:
    # made twice from the same draw, since only one of the pair is in memory at a time
    scale_shape = fp8_scale_shapes(*shape)[0]
    yield TensorToWrite(name, torch.float8_e4m3fn, shape, lambda: quantise_fp8_block(draw.weight(name, shape))[0])
    yield TensorToWrite(
        f"{name}_scale", torch.float32, scale_shape, lambda: quantise_fp8_block(draw.weight(name, shape))[1]
    )


def _random_experts(
    draw: _Draw, config: ModelConfig, layer: int, expert_format: str, dtype: torch.dtype
) -> Iterator[TensorToWrite]:
    width, inter = config.expert_width, config.moe_intermediate_size
    for expert in range(config.num_experts):
        for matrix in MATRICES:
            shape = (width, inter) if matrix == "w2" else (inter, width)
            name = expert_module(layer, expert, matrix)
            if expert_format == "plain":
                yield _random_tensor(draw, f"{name}.weight", shape, dtype)
            else:
                yield from _random_packed(draw, name, shape, expert_format)


def _random_packed(draw: _Draw, module: str, shape: tuple[int, int], expert_format: str) -> Iterator[TensorToWrite]:
    """Uniform nibbles, with scales that bring their spread to about 1 / sqrt(fan in)."""
    rows, columns = shape
    unit = columns**-0.5 / math.sqrt(sum(v * v for v in E2M1_VALUES) / len(E2M1_VALUES))
    weight = f"{module}.weight_packed" if expert_format == "mxfp4" else f"{module}.weight"
    packed = (rows, columns // 2)
    yield TensorToWrite(weight, torch.uint8, packed, lambda: draw.bytes(weight, packed, 0, 256))
    scale = f"{module}.weight_scale"
    if expert_format == "mxfp4":
        groups, exponent = (rows, columns // MXFP4_GROUP), 127 + round(math.log2(unit))
        yield TensorToWrite(scale, torch.uint8, groups, lambda: draw.bytes(scale, groups, exponent - 1, exponent + 2))
        return
    groups = (rows, columns // NVFP4_GROUP)
    low, high = 0x34, 0x3D  # the E4M3 values from 0.75 to 1.5
    yield TensorToWrite(
        scale,
        torch.float8_e4m3fn,
        groups,
        lambda: draw.bytes(scale, groups, low, high).view(torch.float8_e4m3fn),
    )
    factor = f"{module}.weight_scale_2"
    yield TensorToWrite(
        factor,
        torch.float32,
        (),
        lambda: unit * (0.75 + 0.5 * torch.rand((), generator=draw.generator(factor))),
    )
    yield TensorToWrite(f"{module}.input_scale", torch.float32, (), lambda: torch.tensor(1.0))


def _quantization_config(
    config: ModelConfig, expert_format: str, fp8_modules: list[str], prefix: str
) -> dict[str, Any] | None:
    if expert_format == "mxfp4":
        weights = {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "strategy": "group",
            "group_size": MXFP4_GROUP,
            "scale_dtype": "torch.uint8",
            "dynamic": False,
        }
        group = {
            "format": "mxfp4-pack-quantized",
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(_MXFP4_IGNORE),
        }
    table: dict[str, dict[str, Any]] = {}
    for module in fp8_modules:
        table[prefix + module] = {"quant_algo": "FP8_PB_WO", "group_size": FP8_BLOCK}
    if expert_format == "nvfp4":
        for layer in config.moe_layer_indices:
            for expert in range(config.num_experts):
                for matrix in MATRICES:
                    name = prefix + expert_module(layer, expert, matrix)
                    table[name] = {"quant_algo": "NVFP4", "group_size": NVFP4_GROUP}
    if not table:
        return None
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": table}


def _with_quantization(config: dict[str, Any], quantization: dict[str, Any] | None) -> dict[str, Any]:
    """A copy of a config.json dict with this quantization_config, or with none."""
    config = copy.deepcopy(config)
    config.pop("quantization_config", None)
    text = config.get("text_config", config)
    text.pop("quantization_config", None)
    if quantization is not None:
        text["quantization_config"] = quantization
    return config
