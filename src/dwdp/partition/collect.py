"""Which dense weights of a model move, and who holds them.

A decoder layer declares what may move:
  dense_dwdp_roots() -> {"attn": [modules], "moe": [modules]} (empty: the layer stays replicated);
  dense_dwdp_allowed: names of plain tensor attributes under the roots that move with them;
  dense_dwdp_excluded: names under the roots that never move (scratch, the routing bias);
  index: its number in the model.
A module under a root whose attribute `weights_transformed` is False still waits for its post-load transform.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from dwdp.errors import DwdpError
from dwdp.group.ranks import join_problems
from dwdp.partition.layout import Blob, DenseLayout, StorageSpec, ViewSpec, align

logger = logging.getLogger(__name__)

SEGMENT_LETTERS = {"attn": "A", "moe": "D"}


@dataclass(frozen=True)
class Binding:
    """Where a module holds a tensor: kind is `_parameters`, `_buffers` or `attribute`."""

    module: nn.Module
    kind: str
    attribute: str
    name: str
    tensor: torch.Tensor

    def assign(self, tensor: torch.Tensor) -> None:
        """Puts `tensor` in the place of the present one."""
        table = self.module.__dict__ if self.kind == "attribute" else self.module.__dict__[self.kind]
        table[self.attribute] = tensor


@dataclass
class Collected:
    """The layout and the originals behind it: for each blob, for each of its storages, its bindings.

    `stays` explains each storage that was large enough to move and stays replicated.
    """

    layout: DenseLayout
    bindings: list[list[list[Binding]]]
    stays: list[str] = field(default_factory=list)

    def storage_bytes(self, blob: int, storage: int) -> torch.Tensor:
        """uint8 [nbytes] over the original storage, zero-copy."""
        return bytes_of(self.bindings[blob][storage][0].tensor.untyped_storage())


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """uint8 [nbytes] over a storage, zero-copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Every module that declares dense roots, in model order."""
    return [module for module in model.modules() if callable(getattr(module, "dense_dwdp_roots", None))]


def has_dense_roots(model: nn.Module) -> bool:
    """Whether any layer of the model declares dense roots; needs no weights."""
    return any(any(layer.dense_dwdp_roots().values()) for layer in decoder_layers(model))


@dataclass
class _Held:
    """A storage, who holds it, and the places that may move it: (layer number in model order, segment)."""

    storage: torch.UntypedStorage
    order: int
    places: set[tuple[int, str]] = field(default_factory=set)
    bindings: list[Binding] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def collect(
    model: nn.Module,
    *,
    num_ranks: int,
    segments: Sequence[str],
    min_bytes: int,
    strict: bool,
    without_bytes: bool = False,
) -> Collected:
    """Finds what moves.

    A storage moves whole with every view of it that the model holds. It stays where it is smaller than
    `min_bytes`, shared across layers, or held by anything that does not move; with `strict` all but the first are
    a DwdpError that names the tensors, and so is a plain attribute of `min_bytes` or more in neither of a
    layer's tables. A module that waits for its transform, and weights without bytes, always are.
    `without_bytes` allows the meta device: the layout of a model that is not loaded, of which nothing can be moved.
    """
    layers = decoder_layers(model)
    held = _hold_everything(model, layers, segments)
    problems: list[str] = []
    moving: dict[tuple[int, str], list[_Held]] = {}
    for entry in sorted(held.values(), key=lambda entry: entry.order):
        if entry.storage.nbytes() < max(min_bytes, 1):
            continue
        problem = _why_it_stays(entry, layers, without_bytes)
        if problem:
            problems.append(problem)
        elif entry.places:
            if entry.storage.device.type == "meta" and not without_bytes:
                name = entry.bindings[0].name
                raise DwdpError(f"dense DWDP: {name} has no bytes (meta device); load the weights before setup")
            # Shared by both segments of a layer: D's window, H1 to H3, covers A's.
            moving.setdefault((min(entry.places)[0], max(s for _, s in entry.places)), []).append(entry)
    for problem in problems:
        logger.log(logging.ERROR if strict else logging.INFO, "dense DWDP: %s", problem)
    if strict and problems:
        raise DwdpError("dense DWDP (strict): " + join_problems(problems))
    return _lay_out(moving, layers, num_ranks, problems)


def _why_it_stays(entry: _Held, layers: list[nn.Module], without_bytes: bool) -> str | None:
    nbytes = entry.storage.nbytes()
    if entry.unknown:
        return (
            f"{entry.unknown[0]} ({nbytes} bytes) is a plain attribute in neither dense_dwdp_allowed nor "
            "dense_dwdp_excluded; it stays replicated"
        )
    if not entry.places:
        return None
    name = entry.bindings[0].name
    if entry.outside:
        return f"{name} ({nbytes} bytes) shares its storage with {entry.outside[0]}, which stays; it stays too"
    if len({layer for layer, _ in entry.places}) > 1:
        shared = ", ".join(str(layers[i].index) for i in sorted({layer for layer, _ in entry.places}))
        return f"{name} ({nbytes} bytes) is shared across layers {shared}; it stays replicated"
    return None


def _hold_everything(model: nn.Module, layers: list[nn.Module], segments: Sequence[str]) -> dict[int, _Held]:
    """Every storage that a module of the model holds, by the address of its C++ object."""
    roots: dict[int, set[tuple[int, str]]] = {}
    for number, layer in enumerate(layers):
        for segment, modules in layer.dense_dwdp_roots().items():
            if segment not in SEGMENT_LETTERS:
                raise DwdpError(f"layer {layer.index} declares dense roots for {segment!r}, not attn or moe")
            if segment in segments:
                for module in (m for root in modules for m in root.modules()):
                    if getattr(module, "weights_transformed", True) is False:
                        raise DwdpError(
                            f"dense DWDP: {type(module).__name__} of layer {layer.index} still waits for its "
                            "post-load transform; run it before setup"
                        )
                    roots.setdefault(id(module), set()).add((number, SEGMENT_LETTERS[segment]))
    held: dict[int, _Held] = {}
    for path, module in model.named_modules():
        places = roots.get(id(module), set())
        allowed, excluded = set(), set()
        for number, _ in places:
            allowed |= set(layers[number].dense_dwdp_allowed)
            excluded |= set(layers[number].dense_dwdp_excluded)
        for kind, attribute, tensor in _tensors_of(module):
            if tensor.layout != torch.strided:
                continue
            storage = tensor.untyped_storage()
            entry = held.setdefault(storage._cdata, _Held(storage, len(held)))
            name = f"{path}.{attribute}" if path else attribute
            if not places or attribute in excluded:
                entry.outside.append(name)
            elif kind == "container" or (kind == "attribute" and attribute not in allowed):
                entry.outside.append(name)
                entry.unknown.append(name)
            else:
                entry.places |= places
                entry.bindings.append(Binding(module, kind, attribute, name, tensor))
    return held


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(kind, attribute, tensor): parameters, buffers, plain attributes, tensors inside plain containers."""
    for kind in ("_parameters", "_buffers"):
        for attribute, tensor in module.__dict__[kind].items():
            if tensor is not None:
                yield kind, attribute, tensor
    for attribute, value in module.__dict__.items():
        if attribute in ("_parameters", "_buffers", "_modules"):
            continue
        if isinstance(value, torch.Tensor):
            yield "attribute", attribute, value
        elif isinstance(value, (list, tuple, dict, set)):
            for item in value.values() if isinstance(value, dict) else value:
                if isinstance(item, torch.Tensor):
                    yield "container", attribute, item


def _lay_out(
    moving: dict[tuple[int, str], list[_Held]], layers: list[nn.Module], num_ranks: int, stays: list[str]
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
                    str(b.tensor.dtype),
                    tuple(b.tensor.shape),
                    b.tensor.stride(),
                    b.tensor.storage_offset(),
                )
                for b in entry.bindings
            )
            storages.append(StorageSpec(offset, nbytes, views))
            offset = align(offset + nbytes)
        number, segment = key
        pos = numbers.index(number)
        blobs.append(Blob(pos, layers[number].index, segment, num_ranks, tuple(storages)))
        bindings.append([entry.bindings for entry in moving[key]])
    return Collected(DenseLayout(num_ranks, tuple(blobs)), bindings, stays)
