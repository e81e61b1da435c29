"""What a checkpoint's quantization_config says about each module.

Two dialects exist: compressed-tensors `mxfp4-pack-quantized` (targets and an ignore list) and ModelOpt
`MIXED_PRECISION` (a table `quantized_layers` of module names), in config.json or in ModelOpt's own
hf_quant_config.json. Without one all is plain. Imports no torch.
"""

from __future__ import annotations

import re
from collections import Counter
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dwdp.errors import CheckpointError
from dwdp.model.config import ModelConfig
from dwdp.model.headers import READ_FROM
from dwdp.model.name_rules import PREFIX, ModuleTable, NameRules, strip_prefix

__all__ = ["PREFIX", "Declared", "Formats", "expert_format", "expert_module", "read_formats", "strip_prefix"]

MXFP4_GROUP, NVFP4_GROUP, FP8_BLOCK = 32, 16, 128
"""Columns that share a scale; rows and columns of a block that do."""

MATRICES = ("w1", "w2", "w3")
_MODELOPT_FORMATS = {"NVFP4": ("nvfp4", NVFP4_GROUP), "FP8_PB_WO": ("fp8", FP8_BLOCK)}
# compressed-tensors: modules that the releases keep plain though no ignore entry names them
_PLAIN_UNNAMED = re.compile(
    r"(embed_tokens|_res_proj|\.gate|\.routed_expert_(down|up)_proj|\.mlp\.(gate|up|down)_proj)$"
)


@dataclass(frozen=True)
class Declared:
    """The declared format of one module (plain, mxfp4, nvfp4, fp8) and the entry of the config that says so.

    `optional`: the entry's silence is no promise, a plain tensor fits too.
    `contradiction`: why the config contradicts itself about this module, else empty.
    """

    format: str
    entry: str
    optional: bool = False
    contradiction: str = ""


class PlainFormats:
    """No quantization_config: every module is plain."""

    _declared = Declared("plain", "the absence of a quantization_config")

    def declared(self, module: str) -> Declared:
        return self._declared

    def experts_below(self, parent: str) -> PlainFormats:
        return self


class CompressedTensorsFormats:
    """compressed-tensors: a Linear that a group targets and no ignore entry names is MXFP4."""

    def __init__(self, where: str, entry: str, config: dict[str, Any]) -> None:
        groups = config.get("config_groups")
        top_format = config.get("format")
        self._implicit = groups is None  # a format alone speaks of the routed experts, not of other layers
        if groups is None:
            groups = {"(absent)": {"targets": ["Linear"]}}
        if not isinstance(groups, dict) or not groups:
            raise CheckpointError(f"{where} config_groups is not an object with groups")
        targets: list[tuple[str, tuple[Declared, Declared]]] = []
        for name, group in groups.items():
            if not isinstance(group, dict) or not _strings(group.get("targets")):
                raise CheckpointError(f"{where} config_groups.{name} has no list of targets")
            declared = group.get("format") or top_format
            weights = group.get("weights")
            weights = weights if isinstance(weights, dict) else {}
            bits, group_size = weights.get("num_bits", 4), weights.get("group_size", MXFP4_GROUP)
            if declared != "mxfp4-pack-quantized" or (bits, group_size) != (4, MXFP4_GROUP):
                raise CheckpointError(
                    f"{where} config_groups.{name} has format {declared!r} with {bits!r} bits in groups of "
                    f"{group_size!r}; mxfp4-pack-quantized (4 bits, groups of {MXFP4_GROUP}) is served"
                )
            for target in group["targets"]:
                named = f"{entry} config_groups.{name} target {target!r}"
                silence = f"{named}, and no entry of its ignore list names the module,"
                both = Declared("mxfp4", silence), Declared("mxfp4", silence, optional=True)
                targets.append(("*" if target == "Linear" else target, both))
        self._targets = NameRules(where, targets)
        self._ignore = _ignore_list(where, entry, config)
        self._untargeted = Declared("plain", f"{entry} config_groups, none of which targets it")

    def declared(self, module: str) -> Declared:
        ignored = self._ignore.first(module)
        if ignored is not None:
            return ignored
        targeted = self._targets.first(module)
        if targeted is None:
            return self._untargeted
        if ".experts." in module:
            return targeted[0]
        return targeted[1 if self._implicit or _PLAIN_UNNAMED.search(module) else 0]

    def experts_below(self, parent: str) -> CompressedTensorsFormats:
        narrowed = copy(self)
        narrowed._targets, narrowed._ignore = self._targets.experts_below(parent), self._ignore.experts_below(parent)
        return narrowed


class ModelOptFormats:
    """ModelOpt MIXED_PRECISION: `quantized_layers` names modules, parents of modules, or `*` patterns."""

    def __init__(self, where: str, entry: str, config: dict[str, Any]) -> None:
        table = config.get("quantized_layers")
        if not isinstance(table, dict):
            raise CheckpointError(f"{where} is MIXED_PRECISION without a quantized_layers table")
        names: dict[str, Declared] = {}
        patterns: list[tuple[str, Declared]] = []
        for name, layer in table.items():
            algo = layer.get("quant_algo") if isinstance(layer, dict) else None
            named = f"quantized_layers entry {name!r}"
            if not isinstance(algo, str) or algo.upper() not in _MODELOPT_FORMATS:
                known = " and ".join(_MODELOPT_FORMATS)
                raise CheckpointError(f"{where} {named} has quant_algo {algo!r}; served are {known}")
            declared, group = _MODELOPT_FORMATS[algo.upper()]
            if layer.get("group_size") not in (None, group):
                given = layer["group_size"]
                raise CheckpointError(f"{where} {named} has group_size {given!r}; {group} is served")
            found = Declared(declared, f"{entry} {named} ({algo})")
            if "*" in name:
                patterns.append((name, found))
            else:
                names[name] = found
        self._names = ModuleTable(names)
        self._patterns = NameRules(where, patterns)
        self._ignore = _ignore_list(where, entry, config)
        self._unnamed = Declared("plain", f"{entry} quantized_layers, which has no entry for it,")

    def declared(self, module: str) -> Declared:
        found = self._names.nearest(module) or self._patterns.first(module)
        ignored = self._ignore.first(module)
        if found is None:
            return ignored or self._unnamed
        if ignored is None:
            return found
        return Declared(found.format, found.entry, contradiction=f"{found.entry} and {ignored.entry} both name it")

    def experts_below(self, parent: str) -> ModelOptFormats:
        narrowed = copy(self)
        narrowed._patterns, narrowed._ignore = self._patterns.experts_below(parent), self._ignore.experts_below(parent)
        return narrowed


Formats = PlainFormats | CompressedTensorsFormats | ModelOptFormats
"""`declared(module)`: of a module, without prefix. `experts_below(parent)`: the same for experts' matrices, faster."""


def read_formats(path: Path, config: dict[str, Any]) -> Formats:
    """The reader for a config as `read_config` gives it (`path`: its folder, for messages); CheckpointError if not
    served."""
    text = config.get("text_config")
    nested = text.get("quantization_config") if isinstance(text, dict) else None
    top = config.get("quantization_config")
    if nested is not None and top is not None and nested != top:
        raise CheckpointError(f"{path}/config.json has two different quantization_config: on top, in text_config")
    quantization = nested if nested is not None else top
    if quantization is None:
        return PlainFormats()
    if not isinstance(quantization, dict):
        raise CheckpointError(f"{path}/config.json quantization_config is not a JSON object")
    entry = quantization.get(READ_FROM) or "config.json quantization_config"
    where = f"{path}/{entry}"
    if isinstance(quantization.get("quantization"), dict):  # the layout of ModelOpt's own file
        quantization = quantization["quantization"] | {"quant_method": "modelopt"}
    method, algo = quantization.get("quant_method"), quantization.get("quant_algo")
    if method == "compressed-tensors":
        return CompressedTensorsFormats(where, entry, quantization)
    if method in ("modelopt", None) and algo == "MIXED_PRECISION":
        return ModelOptFormats(where, entry, quantization)
    raise CheckpointError(
        f"{where} has quant_method {method!r} and quant_algo {algo!r}; compressed-tensors "
        "(mxfp4-pack-quantized) and modelopt (MIXED_PRECISION) are served"
    )


def expert_module(layer: int, expert: int | None = None, matrix: str = "") -> str:
    """The release's name (no prefix) of a layer's routed experts, or of one expert's matrix."""
    base = f"model.layers.{layer}.block_sparse_moe.experts"
    return base if expert is None else f"{base}.{expert}.{matrix}"


def expert_format(path: Path, config: ModelConfig, formats: Formats) -> str:
    """The format (plain, mxfp4, nvfp4) declared for most experts of the first MoE layer; that all others have it an
    `Inventory` finds out. Raises CheckpointError for one that routed experts are not served in."""
    if not config.moe_layer_indices:
        return "plain"
    layer = config.moe_layer_indices[0]
    below = formats.experts_below(expert_module(layer))
    declared = [below.declared(expert_module(layer, e, w)) for e in range(config.num_experts) for w in MATRICES]
    most = Counter(d.format for d in declared).most_common(1)[0][0]
    if most == "fp8":
        entry = next(d.entry for d in declared if d.format == "fp8")
        raise CheckpointError(f"{path}: {entry}: routed experts are not served in FP8")
    return most


def fp8_scale_shapes(n: int, k: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The two accepted shapes of an [n, k] weight's block scales: the release's four dimensions, and two."""
    blocks = (-(-n // FP8_BLOCK), -(-k // FP8_BLOCK))
    return (blocks[0], 1, blocks[1], 1), blocks


def _strings(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _ignore_list(where: str, entry: str, config: dict[str, Any]) -> NameRules[Declared]:
    names = config.get("ignore") or config.get("exclude_modules") or []
    if not _strings(names):
        raise CheckpointError(f"{where} ignore is not a list of names")
    return NameRules(where, [(name, Declared("plain", f"{entry} ignore entry {name!r}")) for name in names])
