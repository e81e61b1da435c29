"""Matching a checkpoint's tensors with what a model expects, and collecting every fault of it. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from dwdp.errors import CheckpointError
from dwdp.model.formats import MXFP4_GROUP, NVFP4_GROUP, PREFIX, Declared, Formats, fp8_scale_shapes, strip_prefix
from dwdp.model.safetensors_file import TensorEntry

SKIPPED = ("vision_tower.", "mm_projector.")
_FLOATS = ("BF16", "F16", "F32")
_SUFFIXES = (".weight", ".weight_packed", ".weight_scale", ".weight_scale_2", ".input_scale")
_LEGACY_RES = re.compile(r"_res\.(proj|norm)_weight$")
_MOST_ALIKE = 1000
"""Format faults with the same reason that are listed one by one; of more the first few and their number."""
_MOST_MISSING = 100_000
"""Matrices of experts that may be missing and still be listed one by one."""


class Expected(msgspec.Struct, frozen=True, gc=False):
    """A tensor (kinds "tensor" and "a_log": `name` is its name), or the weight of a module in some format
    (kinds "linear" and "expert": `name` is the module's, `shape` the logical [out, in]).

    `format`: the one that a routed expert must have, since all experts of a model share it.
    """

    name: str
    shape: tuple[int, ...]
    kind: str = "tensor"
    format: str = ""


def expected_dense(name: str, shape: tuple[int, ...]) -> Expected:
    """What a checkpoint must hold for a parameter of the model that is no table of routed experts."""
    if name.endswith(".A_log"):
        return Expected(name, shape, "a_log")
    if name.endswith(".weight") and len(shape) == 2:
        return Expected(name.removesuffix(".weight"), shape, "linear")
    return Expected(name, shape)


class Found(msgspec.Struct, frozen=True):
    """Raw names of a found tensor by suffix ("" for a plain tensor), and the format they are in."""

    format: str = "plain"
    names: dict[str, str] = msgspec.field(default_factory=dict)


@dataclass(frozen=True)
class Skipped:
    """Tensors of the release that are no part of the text model: how many, and their bytes in the files."""

    count: int
    nbytes: int

    def describe(self) -> str:
        names = ", ".join(f"{name}*" for name in SKIPPED)
        return f"{self.count:,} vision tensors of {self.nbytes:,} bytes are skipped ({names}): only text is served"


def canonical_name(raw: str) -> str:
    """A checkpoint's tensor name without `language_model.`, in today's spelling."""
    name = strip_prefix(raw)
    return _LEGACY_RES.sub(r"_res_\1.weight", name) if "_res." in name else name


def check_expert_count(where: object, num_experts: int, num_layers: int, num_entries: int) -> None:
    """CheckpointError for experts of which nearly all are missing. Each would have its line: a wrong number in a
    config.json makes it billions. where: for the message; num_layers: with experts; num_entries: the files' tensors."""
    matrices = 3 * num_experts * num_layers
    if matrices - num_entries > _MOST_MISSING:
        raise CheckpointError(
            f"{where}: config.json has {num_experts} experts in each of {num_layers} layers, which are {matrices} "
            f"matrices, but all files together hold {num_entries} tensors"
        )


class Inventory:
    """The text tensors of a checkpoint by canonical name; `take` ticks off, `problems` says what is wrong.

    skipped: the vision tensors.
    """

    def __init__(self, entries: Mapping[str, TensorEntry], formats: Formats) -> None:
        self._formats = formats
        self._near: tuple[str, Formats] = ("", formats)
        self._left: dict[str, TensorEntry] = {}
        self._problems: list[str] = []
        self._misfits: dict[tuple[str, ...], list[str]] = {}
        self._prefix = ""
        count = nbytes = 0
        for raw, entry in entries.items():
            if raw.startswith(SKIPPED):
                count, nbytes = count + 1, nbytes + entry.nbytes
                continue
            self._left[canonical_name(raw)] = entry
            if not self._prefix and raw.startswith(PREFIX):
                self._prefix = PREFIX
        if len(self._left) != len(entries) - count:
            self._problems += _same_names(entries)
        self.skipped = Skipped(count, nbytes)

    def take(self, expected: Expected) -> Found:
        """The raw names of what is expected; faults are collected and give no names."""
        if expected.kind == "tensor":
            return self._tensor(expected.name, _FLOATS, (expected.shape,))
        if expected.kind == "a_log":
            return self._a_log(expected)
        return (expected.kind == "expert" and self._expert(expected)) or self._module(expected)

    def problems(self) -> list[str]:
        """Every fault, sorted; tensors that nothing expected are extra."""
        extra = [f"extra tensor {entry.name} ({entry.describe()})" for entry in self._left.values()]
        return sorted(self._problems + extra + [text for key in self._misfits for text in self._alike(key)])

    def _alike(self, reason: tuple[str, ...]) -> list[str]:
        """Lines for all tensors that do not fit for one reason; a wrong list makes it half a million of them."""
        texts = self._misfits[reason]
        if len(texts) <= _MOST_ALIKE:
            return texts
        return [*texts[:3], f"tensors: {len(texts) - 3:,} more of this kind ({', '.join(reason)})"]

    def _declared(self, expected: Expected) -> Declared:
        if expected.kind != "expert":
            return self._formats.declared(expected.name)
        parent = expected.name.rsplit(".", 2)[0]
        if self._near[0] != parent:  # experts come layer by layer
            self._near = (parent, self._formats.experts_below(parent))
        return self._near[1].declared(expected.name)

    def _tensor(self, name: str, dtypes: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], suffix="") -> Found:
        entry = self._left.pop(name, None)
        if entry is None:
            self._problems.append(f"missing tensor {self._prefix}{name} ({'/'.join(dtypes)} {list(shapes[0])})")
        elif entry.dtype not in dtypes or entry.shape not in shapes:
            self._problems.append(
                f"tensor {entry.name} is {entry.describe()}, not {'/'.join(dtypes)} {list(shapes[0])}"
            )
        else:
            return Found(names={suffix: entry.name})
        return Found()

    def _a_log(self, expected: Expected) -> Found:
        """[heads + any tail], or [1, 1, heads, 1] of older files; the tail's values are checked when read."""
        (heads,) = expected.shape
        entry = self._left.get(expected.name)
        shape = entry.shape if entry is not None else ()
        padded = len(shape) == 1 and shape[0] >= heads
        return self._tensor(expected.name, _FLOATS, (shape,) if padded else (expected.shape, (1, 1, heads, 1)))

    def _expert(self, expected: Expected) -> Found | None:
        """The tensors of a matrix of an expert, where they are as they should be; `_module` says what is wrong. A
        release has a quarter of a million of these matrices."""
        module, declared, left = expected.name, self._declared(expected), self._left
        if declared.format != expected.format or declared.contradiction:
            return None
        found = {}
        for suffix, (dtypes, shapes) in _layout(declared.format, expected.shape).items():
            entry = left.get(module + suffix)
            if entry is None or entry.dtype not in dtypes or entry.shape not in shapes:
                return None
            found[suffix] = entry.name
        for suffix in found:
            del left[module + suffix]
        if declared.format == "nvfp4" and module + ".input_scale" in left:
            self._input_scale(module)
        return Found(declared.format, found)

    def _input_scale(self, module: str) -> None:
        """For four-bit activations: checked, not used."""
        self._tensor(module + ".input_scale", ("F32",), ((), (1,)))

    def _module(self, expected: Expected) -> Found:
        module, declared = expected.name, self._declared(expected)
        left = self._left
        present = {suffix: left[name] for suffix in _SUFFIXES if (name := module + suffix) in left}
        actual = _format_of(present)
        fault = self._format_fault(expected, declared, actual, present)
        if fault:
            self._misfits.setdefault((f"they are {actual}", declared.entry), []).append(fault)
            for suffix in present:
                self._left.pop(module + suffix)
            return Found()
        # a linear layer that is declared four-bit and got here is plain by the releases' habit, or missing
        format = "plain" if expected.kind == "linear" and declared.format != "fp8" else declared.format
        names: dict[str, str] = {}
        for suffix, (dtypes, shapes) in _layout(format, expected.shape).items():
            names |= self._tensor(module + suffix, dtypes, shapes, suffix).names
        if format == "nvfp4" and module + ".input_scale" in self._left:
            self._input_scale(module)
        return Found(format, names)

    def _format_fault(
        self, expected: Expected, declared: Declared, actual: str | None, present: dict[str, TensorEntry]
    ) -> str:
        entry = present.get(".weight_packed") or present.get(".weight")
        weight = entry.name if entry is not None else f"{self._prefix}{expected.name}.weight"
        if declared.contradiction:
            return f"tensor {weight}: {declared.contradiction}"
        if expected.kind == "linear" and actual == declared.format and actual in ("mxfp4", "nvfp4"):
            return f"tensor {weight}: {declared.entry}: only routed experts are served as {declared.format}"
        if expected.kind == "expert" and declared.format != expected.format:
            return (
                f"tensor {weight}: {declared.entry} makes it {declared.format} while other routed experts "
                f"are {expected.format}, and all are served in one format"
            )
        if actual == "fp8" and ".weight_scale" not in present:
            return f"tensor {weight} is FP8 without its scale {weight}_scale ({declared.entry})"
        if entry is None or actual in (None, declared.format) or (actual == "plain" and declared.optional):
            return ""
        return (
            f"tensor {weight} is {entry.describe()}, which is {actual}, but {declared.entry} makes it {declared.format}"
        )


def _same_names(entries: Mapping[str, TensorEntry]) -> list[str]:
    """A line for every tensor that is there under another name already."""
    problems: list[str] = []
    first: dict[str, str] = {}
    for raw in entries:
        if not raw.startswith(SKIPPED):
            other = first.setdefault(canonical_name(raw), raw)
            if other != raw:
                problems.append(f"tensors {other} and {raw} are the same one")
    return problems


def _format_of(present: dict[str, TensorEntry]) -> str | None:
    """The format that a module's tensors are in; None when neither their names nor dtypes tell."""
    if ".weight_packed" in present:
        return "mxfp4"
    if ".weight" not in present:
        return None
    dtype = present[".weight"].dtype
    return {"U8": "nvfp4", "F8_E4M3": "fp8"}.get(dtype, "plain" if dtype in _FLOATS else None)


@lru_cache(maxsize=256)
def _layout(format: str, shape: tuple[int, ...]) -> dict[str, tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]]:
    """suffix -> (dtypes, shapes) of the tensors of one [out, in] weight."""
    rows, columns = shape
    if format == "mxfp4":
        return {
            ".weight_packed": (("U8",), ((rows, columns // 2),)),
            ".weight_scale": (("U8",), ((rows, columns // MXFP4_GROUP),)),
        }
    if format == "nvfp4":
        return {
            ".weight": (("U8",), ((rows, columns // 2),)),
            ".weight_scale": (("F8_E4M3",), ((rows, columns // NVFP4_GROUP),)),
            ".weight_scale_2": (("F32",), ((), (1,))),
        }
    if format == "fp8":
        return {
            ".weight": (("F8_E4M3",), (shape,)),
            ".weight_scale": (("F32",), fp8_scale_shapes(rows, columns)),
        }
    return {".weight": (_FLOATS, (shape,))}
