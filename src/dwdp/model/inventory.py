"""Matching a checkpoint's tensors with what a model expects, and collecting every fault of it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from dwdp.model.checkpoint import Checkpoint, TensorEntry
from dwdp.model.formats import PREFIX, Declared, Formats, strip_prefix
from dwdp.model.quant import MXFP4_GROUP, NVFP4_GROUP, fp8_scale_shapes

MATRICES = ("w1", "w2", "w3")
SKIPPED = ("vision_tower.", "mm_projector.")
_FLOATS = ("BF16", "F16", "F32")
_SUFFIXES = (".weight", ".weight_packed", ".weight_scale", ".weight_scale_2", ".input_scale")
_LEGACY_RES = re.compile(r"_res\.(proj|norm)_weight$")


@dataclass(frozen=True)
class Expected:
    """A tensor (kinds "tensor" and "a_log": `name` is its name), or the weight of a module in some format
    (kinds "linear" and "expert": `name` is the module's, `shape` the logical [out, in]).

    `format`: the one that a routed expert must have, since all experts of a model share it.
    """

    name: str
    shape: tuple[int, ...]
    kind: str = "tensor"
    format: str = ""


@dataclass(frozen=True)
class Found:
    """Raw names of a found tensor by suffix ("" for a plain tensor), and the format they are in."""

    format: str = "plain"
    names: dict[str, str] = field(default_factory=dict)


def expert_module(layer: int, expert: int | None = None, matrix: str = "") -> str:
    """The release's name (no prefix) of a layer's routed experts, or of one expert's matrix."""
    base = f"model.layers.{layer}.block_sparse_moe.experts"
    return base if expert is None else f"{base}.{expert}.{matrix}"


def canonical_name(raw: str) -> str:
    """A checkpoint's tensor name without `language_model.`, in today's spelling."""
    return _LEGACY_RES.sub(r"_res_\1.weight", strip_prefix(raw))


class Inventory:
    """The text tensors of a checkpoint by canonical name; `take` ticks off, `problems` says what is wrong."""

    def __init__(self, checkpoint: Checkpoint, formats: Formats) -> None:
        self._formats = formats
        self._left: dict[str, TensorEntry] = {}
        self._problems: list[str] = []
        raw_names = [name for name in checkpoint.entries if not name.startswith(SKIPPED)]
        self._prefix = PREFIX if any(name.startswith(PREFIX) for name in raw_names) else ""
        for raw in raw_names:
            name = canonical_name(raw)
            if name in self._left:
                self._problems.append(f"tensors {self._left[name].name} and {raw} are the same one")
            self._left[name] = checkpoint.entries[raw]

    def take(self, expected: Expected) -> Found:
        """The raw names of what is expected; faults are collected and give no names."""
        if expected.kind == "tensor":
            return self._tensor(expected.name, _FLOATS, (expected.shape,))
        if expected.kind == "a_log":
            return self._a_log(expected)
        return self._module(expected)

    def problems(self) -> list[str]:
        """Every fault, sorted; tensors that nothing expected are extra."""
        extra = [f"extra tensor {entry.name} ({entry.describe()})" for entry in self._left.values()]
        return sorted(self._problems + extra)

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

    def _module(self, expected: Expected) -> Found:
        module, declared = expected.name, self._formats.declared(expected.name)
        present = {s: self._left[module + s] for s in _SUFFIXES if module + s in self._left}
        actual = _format_of(present)
        fault = self._format_fault(expected, declared, actual, present)
        if fault:
            self._problems.append(fault)
            for suffix in present:
                self._left.pop(module + suffix)
            return Found()
        # a linear layer that is declared four-bit and got here is plain by the releases' habit, or missing
        format = "plain" if expected.kind == "linear" and declared.format != "fp8" else declared.format
        names: dict[str, str] = {}
        for suffix, (dtypes, shapes) in _layout(format, expected.shape).items():
            names |= self._tensor(module + suffix, dtypes, shapes, suffix).names
        if format == "nvfp4" and module + ".input_scale" in self._left:
            # for four-bit activations: checked, not used
            self._tensor(module + ".input_scale", ("F32",), ((), (1,)))
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


def _format_of(present: dict[str, TensorEntry]) -> str | None:
    """The format that a module's tensors are in; None when neither their names nor dtypes tell."""
    if ".weight_packed" in present:
        return "mxfp4"
    if ".weight" not in present:
        return None
    dtype = present[".weight"].dtype
    return {"U8": "nvfp4", "F8_E4M3": "fp8"}.get(dtype, "plain" if dtype in _FLOATS else None)


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
