"""Which projections keep their FP8 weight and scales in memory, and the tensors that a model then holds. No torch."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import TYPE_CHECKING

from dwdp.model.config import ModelConfig
from dwdp.model.shapes import Tensors, TensorShape, model_tensors

if TYPE_CHECKING:
    from dwdp.model.formats import Formats

BLOCK = 128
SCALE = "weight_scale"
# Their owner reads their rows apart: they become the model's dtype when they are loaded. 0.8 % of Kimi-K3's FP8 bytes.
WIDENED = ("kv_b_proj",)
# Of the released NVFP4 folder, for a plan of it that has no folder at hand.
_RELEASED = re.compile(r"\.self_attn\.((q|k|v|g|o|q_a|q_b)_proj|kv_a_proj_with_mqa)$")


def is_kept(module: str, formats: Formats) -> bool:
    """Whether a projection (its name without prefix) keeps its FP8 weight: the config says that it has one."""
    return module.rpartition(".")[2] not in WIDENED and formats.declared(module).format == "fp8"


def kept_fp8(config: ModelConfig, formats: Formats) -> frozenset[str]:
    """The names of all projections that keep it."""
    return frozenset(name for name in _projections(config) if is_kept(name, formats))


def released_fp8(config: ModelConfig) -> frozenset[str]:
    """As `kept_fp8`, of the released NVFP4 folder with this config."""
    return frozenset(name for name in _projections(config) if _RELEASED.search(name))


def held_tensors(config: ModelConfig, kept: Container[str] = ()) -> Tensors:
    """`model_tensors`, with an FP8 weight and its scale in the place of the weight of a module in `kept`."""
    held: Tensors = {}
    for name, tensor in model_tensors(config).items():
        module = name.removesuffix(".weight")
        if module == name or module not in kept:
            held[name] = tensor
            continue
        held[name] = TensorShape(tensor.shape, "float8_e4m3fn")
        held[f"{module}.{SCALE}"] = TensorShape(tuple(-(-size // BLOCK) for size in tensor.shape), "float32")
    return held


def _projections(config: ModelConfig) -> list[str]:
    return [
        name.removesuffix(".weight")
        for name, tensor in model_tensors(config).items()
        if len(tensor.shape) == 2 and name.endswith("_proj.weight") or name.endswith("_with_mqa.weight")
    ]
