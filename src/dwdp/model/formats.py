"""What config.json's quantization_config says about each module of a checkpoint.

Two dialects exist: compressed-tensors `mxfp4-pack-quantized` (targets and an ignore list) and ModelOpt
`MIXED_PRECISION` (a table `quantized_layers` of module names). Without a quantization_config all is plain.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import translate
from pathlib import Path
from typing import Any

from dwdp.errors import CheckpointError
from dwdp.model.quant import FP8_BLOCK, MXFP4_GROUP, NVFP4_GROUP

PREFIX = "language_model."
ENTRY = "config.json quantization_config"
_MODELOPT_FORMATS = {"NVFP4": ("nvfp4", NVFP4_GROUP), "FP8_PB_WO": ("fp8", FP8_BLOCK)}
# compressed-tensors: modules that the releases keep plain though no ignore entry names them
_PLAIN_UNNAMED = re.compile(
    r"(embed_tokens|_res_proj|\.gate|\.routed_expert_(down|up)_proj|\.mlp\.(gate|up|down)_proj)$"
)

# a module's name without prefix -> whether an entry of the config names it
Matches = Callable[[str], bool]


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

    def declared(self, module: str) -> Declared:
        return Declared("plain", "the absence of a quantization_config")


class CompressedTensorsFormats:
    """compressed-tensors: a Linear that a group targets and no ignore entry names is MXFP4."""

    def __init__(self, where: str, config: dict[str, Any]) -> None:
        self._targets: list[tuple[Matches | None, str]] = []
        groups = config.get("config_groups")
        top_format = config.get("format")
        self._implicit = groups is None  # a format alone speaks of the routed experts, not of other layers
        if groups is None:
            groups = {"(absent)": {"targets": ["Linear"]}}
        if not isinstance(groups, dict) or not groups:
            raise CheckpointError(f"{where} config_groups is not an object with groups")
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
                matches = None if target == "Linear" else _matcher(where, target)
                self._targets.append((matches, f"config_groups.{name} target {target!r}"))
        self._ignore = _ignore_list(where, config)

    def declared(self, module: str) -> Declared:
        for pattern, matches in self._ignore:
            if matches(module):
                return Declared("plain", f"{ENTRY} ignore entry {pattern!r}")
        for matches, entry in self._targets:
            if matches is None or matches(module):
                silence = f"{ENTRY} {entry}, and no entry of its ignore list names the module,"
                usual = _PLAIN_UNNAMED.search(module) or (self._implicit and ".experts." not in module)
                return Declared("mxfp4", silence, optional=bool(usual))
        return Declared("plain", f"{ENTRY} config_groups, none of which targets it")


class ModelOptFormats:
    """ModelOpt MIXED_PRECISION: `quantized_layers` names modules, parents of modules, or `*` patterns."""

    def __init__(self, where: str, config: dict[str, Any]) -> None:
        table = config.get("quantized_layers")
        if not isinstance(table, dict):
            raise CheckpointError(f"{where} is MIXED_PRECISION without a quantized_layers table")
        self._names: dict[str, tuple[str, str]] = {}
        self._patterns: list[tuple[Matches, tuple[str, str]]] = []
        for name, entry in table.items():
            algo = entry.get("quant_algo") if isinstance(entry, dict) else None
            named = f"quantized_layers entry {name!r}"
            if not isinstance(algo, str) or algo.upper() not in _MODELOPT_FORMATS:
                known = " and ".join(_MODELOPT_FORMATS)
                raise CheckpointError(f"{where} {named} has quant_algo {algo!r}; served are {known}")
            declared, group = _MODELOPT_FORMATS[algo.upper()]
            if entry.get("group_size") not in (None, group):
                given = entry["group_size"]
                raise CheckpointError(f"{where} {named} has group_size {given!r}; {group} is served")
            if "*" in name:
                self._patterns.append((_matcher(where, name), (declared, f"{ENTRY} {named} ({algo})")))
            else:
                self._names[strip_prefix(name)] = (declared, f"{ENTRY} {named} ({algo})")
        self._ignore = _ignore_list(where, config)

    def declared(self, module: str) -> Declared:
        found = self._lookup(module)
        ignored = next((pattern for pattern, matches in self._ignore if matches(module)), None)
        if found is None and ignored is None:
            return Declared("plain", f"{ENTRY} quantized_layers, which has no entry for it,")
        if found is None:
            return Declared("plain", f"{ENTRY} ignore entry {ignored!r}")
        if ignored is None:
            return Declared(*found)
        both = f"{found[1]} and {ENTRY} ignore entry {ignored!r} both name it"
        return Declared(*found, contradiction=both)

    def _lookup(self, module: str) -> tuple[str, str] | None:
        name = module
        while name:
            if name in self._names:
                return self._names[name]
            name = name.rpartition(".")[0]
        return next((found for matches, found in self._patterns if matches(module)), None)


Formats = PlainFormats | CompressedTensorsFormats | ModelOptFormats


def read_formats(path: Path, config: dict[str, Any]) -> Formats:
    """The reader for a config.json dict (`path`: its folder, for messages); CheckpointError if not served."""
    text = config.get("text_config")
    nested = text.get("quantization_config") if isinstance(text, dict) else None
    top = config.get("quantization_config")
    if nested is not None and top is not None and nested != top:
        raise CheckpointError(f"{path}/config.json has two different quantization_config: on top, in text_config")
    quantization = nested if nested is not None else top
    where = f"{path}/config.json quantization_config"
    if quantization is None:
        return PlainFormats()
    if not isinstance(quantization, dict):
        raise CheckpointError(f"{where} is not a JSON object")
    if isinstance(quantization.get("quantization"), dict):  # the layout of ModelOpt's own file
        quantization = quantization["quantization"] | {"quant_method": "modelopt"}
    method, algo = quantization.get("quant_method"), quantization.get("quant_algo")
    if method == "compressed-tensors":
        return CompressedTensorsFormats(where, quantization)
    if method in ("modelopt", None) and algo == "MIXED_PRECISION":
        return ModelOptFormats(where, quantization)
    raise CheckpointError(
        f"{where} has quant_method {method!r} and quant_algo {algo!r}; compressed-tensors "
        "(mxfp4-pack-quantized) and modelopt (MIXED_PRECISION) are served"
    )


def strip_prefix(name: str) -> str:
    return name.removeprefix(PREFIX)


def _strings(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _ignore_list(where: str, config: dict[str, Any]) -> list[tuple[str, Matches]]:
    names = config.get("ignore") or config.get("exclude_modules") or []
    if not _strings(names):
        raise CheckpointError(f"{where} ignore is not a list of names")
    return [(name, _matcher(where, name)) for name in names]


def _matcher(where: str, pattern: str) -> Matches:
    """Whether an entry names a module: a regular expression, a `*` pattern, or whole parts of the name."""
    if pattern.startswith("re:"):
        try:
            match = re.compile(pattern[3:]).match
        except re.error as error:
            raise CheckpointError(f"{where} has the bad regular expression {pattern!r}: {error}") from error
    elif "*" in pattern:
        match = re.compile(translate(pattern)).match
    else:
        part = f".{strip_prefix(pattern)}."
        return lambda module: part in f".{module}."
    return lambda module: match(PREFIX + module) is not None or match(module) is not None
