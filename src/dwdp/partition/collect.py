"""Which dense weights of a model move, and who holds them.

The roots (roots.py) say which modules belong to a segment of a layer; here their tensors are grouped by storage. A
module under a root whose attribute `weights_transformed` is False still waits for its post-load transform.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dwdp.errors import DwdpError
from dwdp.group.ranks import join_problems
from dwdp.partition.holders import TABLES, HolderWalk
from dwdp.partition.layout import Blob, DenseLayout, StorageSpec, ViewSpec, align
from dwdp.partition.roots import SEGMENT_LETTERS, LayerRoots, find_roots

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Binding:
    """Where a module holds a tensor: kind is `_parameters`, `_buffers` or `attribute`.

    original: the tensor's values where they lie until they move; `tensor` itself is pointed elsewhere by then.
    """

    module: nn.Module
    kind: str
    attribute: str
    name: str
    tensor: torch.Tensor
    original: torch.Tensor

    def assign(self, tensor: torch.Tensor) -> None:
        """Puts `tensor` in the place of the present one."""
        table = self.module.__dict__ if self.kind == "attribute" else self.module.__dict__[self.kind]
        table[self.attribute] = tensor


@dataclass
class Collected:
    """The layout and the originals behind it: for each blob, for each of its storages, its bindings.

    roots: of every layer that has some. stays explains each storage that was large enough to move and stays
    replicated.
    """

    layout: DenseLayout
    bindings: list[list[list[Binding]]]
    roots: list[LayerRoots] = field(default_factory=list)
    stays: list[str] = field(default_factory=list)

    def storage_bytes(self, blob: int, storage: int) -> torch.Tensor:
        """uint8 [nbytes] over the original storage, zero-copy."""
        return bytes_of(self.bindings[blob][storage][0].original.untyped_storage())


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """uint8 [nbytes] over a storage, zero-copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@dataclass
class _Held:
    """A storage, who holds it, and the places that may move it: (layer number in model order, segment).

    derived: bindings that move only with a parameter or buffer of the same storage. unknown: (name, what it is) under
    the roots that may not move. left_out: (layer number, name) beside the roots of a discovered layer.
    """

    storage: torch.UntypedStorage
    places: set[tuple[int, str]] = field(default_factory=set)
    bindings: list[Binding] = field(default_factory=list)
    derived: list[Binding] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    unknown: list[tuple[str, str]] = field(default_factory=list)
    left_out: list[tuple[int, str]] = field(default_factory=list)


def collect(
    model: nn.Module,
    *,
    num_ranks: int,
    segments: Sequence[str],
    min_bytes: int,
    strict: bool,
    roots: str = "declared",
    without_bytes: bool = False,
) -> Collected:
    """Finds what moves. roots: `declared` or `discover`.

    A storage moves whole with every view of it that the model holds. It stays where it is smaller than
    `min_bytes`, shared across layers, or held by anything that does not move: another module, an excluded name, a
    container, a closure. With `strict` all but the first are a DwdpError that names the tensors, and so is a plain
    attribute of `min_bytes` or more in neither of a layer's tables, and what discovery leaves out of a covered layer.
    A module that waits for its transform, and weights without bytes, always are.
    `without_bytes` allows the meta device: the layout of a model that is not loaded, of which nothing can be moved.
    """
    layers = find_roots(model, roots)
    held, problems = _hold_everything(model, layers, segments, max(min_bytes, 1))
    large = [entry for entry in held if entry.storage.nbytes() >= max(min_bytes, 1)]
    moving: dict[tuple[int, str], list[_Held]] = {}
    for entry in large:
        problem = _why_it_stays(entry, layers)
        if problem:
            problems.append(problem)
        elif entry.places:
            if entry.storage.device.type == "meta" and not without_bytes:
                name = entry.bindings[0].name
                raise DwdpError(f"dense DWDP: {name} has no bytes (meta device); load the weights before setup")
            # Shared by both segments of a layer: D's window, H1 to H3, covers A's.
            moving.setdefault((min(entry.places)[0], max(s for _, s in entry.places)), []).append(entry)
    covered = {number for number, _ in moving}
    problems += [
        f"{entry.left_out[0][1]} ({entry.storage.nbytes()} bytes) is part of a covered layer, but discovery found it "
        "neither in its attention nor in its MoE block; it stays replicated"
        for entry in large
        if not entry.places and not entry.unknown and any(number in covered for number, _ in entry.left_out)
    ]
    for problem in problems:
        logger.log(logging.ERROR if strict else logging.INFO, "dense DWDP: %s", problem)
    if strict and problems:
        raise DwdpError("dense DWDP (strict): " + join_problems(problems))
    return _lay_out(moving, layers, num_ranks, problems)


def _why_it_stays(entry: _Held, layers: list[LayerRoots]) -> str | None:
    nbytes = entry.storage.nbytes()
    if entry.unknown:
        name, what = entry.unknown[0]
        return f"{name} ({nbytes} bytes, {what}) is in neither dense_dwdp_allowed nor dense_dwdp_excluded; it stays"
    if not entry.places:
        return None
    name = entry.bindings[0].name
    if entry.outside:
        return f"{name} ({nbytes} bytes) shares its storage with {entry.outside[0]}, which stays; it stays too"
    if len({layer for layer, _ in entry.places}) > 1:
        shared = ", ".join(str(layers[i].index) for i in sorted({layer for layer, _ in entry.places}))
        return f"{name} ({nbytes} bytes) is shared across layers {shared}; it stays replicated"
    return None


def _places(layers: list[LayerRoots], segments: Sequence[str]) -> dict[int, set[tuple[int, str]]]:
    """Module -> the places where its tensors may lie, for the segments that move."""
    places: dict[int, set[tuple[int, str]]] = {}
    for number, layer in enumerate(layers):
        for segment in segments:
            for module in layer.segments.get(segment, ()):
                if getattr(module, "weights_transformed", True) is False:
                    raise DwdpError(
                        f"dense DWDP: {type(module).__name__} of layer {layer.index} still waits for its "
                        "post-load transform; run it before setup"
                    )
                places.setdefault(id(module), set()).add((number, SEGMENT_LETTERS[segment]))
    return places


def _hold_everything(
    model: nn.Module, layers: list[LayerRoots], segments: Sequence[str], min_bytes: int
) -> tuple[list[_Held], list[str]]:
    """Every storage that the model holds, those that may move in the order of their first tensor; and what of
    `min_bytes` or more lies under the roots but has no storage of its own to move."""
    places_of = _places(layers, segments)
    remaining = _beside_segments(layers)
    walk = HolderWalk({id(module) for module in model.modules()})
    held: dict[int, _Held] = {}
    # By first binding: what else holds a storage, and when it was found, must not change the layout.
    movable: dict[int, _Held] = {}
    problems = []
    for path, module in model.named_modules():
        places = places_of.get(id(module), set())
        discovered = any(layers[number].discovered for number, _ in places)
        for kind, attribute, tensor, holder in _tensors_of(module, walk):
            name = f"{path}.{attribute}" if path else attribute
            if tensor.layout != torch.strided:
                if places and _nbytes(tensor) >= min_bytes:
                    problems.append(f"{name} has the layout {tensor.layout}, which cannot move; it stays replicated")
                continue
            storage = tensor.untyped_storage()
            entry = held.setdefault(storage._cdata, _Held(storage))
            if not places or any(layers[number].excludes(name) for number, _ in places):
                entry.outside.append(f"{name} ({holder})" if holder else name)
                if id(module) in remaining:
                    entry.left_out.append((remaining[id(module)], name))
                continue
            if kind == "held":
                entry.outside.append(f"{name} ({holder})")
                entry.unknown.append((name, f"held in a {holder}"))
                continue
            allowed = any(attribute in layers[number].allowed for number, _ in places)
            persists = kind == "_buffers" and attribute not in module._non_persistent_buffers_set
            if allowed or kind == "_parameters" or persists or (kind == "_buffers" and not discovered):
                entry.places |= places
                entry.bindings.append(_bind(module, kind, attribute, name, tensor))
                movable.setdefault(storage._cdata, entry)
            elif discovered:
                entry.derived.append(_bind(module, kind, attribute, name, tensor))
            else:
                entry.outside.append(name)
                entry.unknown.append((name, "a plain attribute"))
    for entry in held.values():
        _settle_derived(entry)
    return [*movable.values(), *(entry for key, entry in held.items() if key not in movable)], problems


def _bind(module: nn.Module, kind: str, attribute: str, name: str, tensor: torch.Tensor) -> Binding:
    with torch._C.DisableTorchFunctionSubclass():
        return Binding(module, kind, attribute, name, tensor, tensor.detach())


def _settle_derived(entry: _Held) -> None:
    """A plain attribute or buffer that discovery does not know moves as a view of a weight, and stays alone.

    Alone it may be scratch that a forward writes: a mask, a cache, a rotary table.
    """
    if entry.bindings:
        entry.bindings += entry.derived
    else:
        for binding in entry.derived:
            entry.outside.append(binding.name)
            entry.unknown.append((binding.name, "neither a parameter nor a saved buffer"))


def _beside_segments(layers: list[LayerRoots]) -> dict[int, int]:
    """Modules of discovered layers that are in no segment, moving or not, and no routed expert -> layer number."""
    remaining = {}
    for number, layer in enumerate(layers):
        if layer.discovered:
            known = {id(m) for part in (layer.routed, *layer.segments.values()) for m in part}
            remaining |= {id(m): number for m in layer.layer.modules() if id(m) not in known}
    return remaining


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.element_size() * (tensor._nnz() if tensor.is_sparse else tensor.numel())


def _tensors_of(module: nn.Module, walk: HolderWalk) -> Iterator[tuple[str, str, torch.Tensor, str]]:
    """(kind, attribute, tensor, holder): parameters, buffers, plain attributes, and what other things hold."""
    for kind in ("_parameters", "_buffers"):
        for attribute, tensor in module.__dict__[kind].items():
            if tensor is not None:
                yield from _parts(kind, attribute, tensor, walk)
    for attribute, value in module.__dict__.items():
        if attribute in TABLES:
            continue
        if isinstance(value, torch.Tensor):
            yield from _parts("attribute", attribute, value, walk)
        else:
            for tensor, holder in walk.tensors_behind(value):
                yield "held", attribute, tensor, holder


def _parts(kind: str, attribute: str, tensor: torch.Tensor, walk: HolderWalk) -> Iterator:
    """A tensor and what hangs on it; of a wrapper, which has no bytes of its own, the tensors inside."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield "held", attribute, getattr(tensor, name), type(tensor).__name__
    else:
        yield kind, attribute, tensor, ""
    if tensor.__dict__:
        for found, holder in walk.tensors_behind(tensor.__dict__):
            yield "held", attribute, found, holder


def _lay_out(
    moving: dict[tuple[int, str], list[_Held]], layers: list[LayerRoots], num_ranks: int, stays: list[str]
) -> Collected:
    numbers = sorted({number for number, _ in moving})
    blobs: list[Blob] = []
    bindings: list[list[list[Binding]]] = []
    for key in sorted(moving):
        offset, storages = 0, []
        for entry in moving[key]:
            nbytes = entry.storage.nbytes()
            views = tuple(
                ViewSpec(
                    b.name,
                    str(b.original.dtype),
                    tuple(b.original.shape),
                    b.original.stride(),
                    b.original.storage_offset(),
                )
                for b in entry.bindings
            )
            storages.append(StorageSpec(offset, nbytes, views))
            offset = align(offset + nbytes)
        number, segment = key
        pos = numbers.index(number)
        blobs.append(Blob(pos, layers[number].index, segment, num_ranks, tuple(storages)))
        bindings.append([entry.bindings for entry in moving[key]])
    return Collected(DenseLayout(num_ranks, tuple(blobs)), bindings, layers, stays)
