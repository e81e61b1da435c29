"""Weights in slots that can be reached only while their layer's are there.

[Note: sealed weights] A slot holds each of many layers in turn, so a read outside the read window finds another
layer's bytes of the same shape, and nothing shows it. A decoder that calls the hooks itself is written for the windows.
One that knows nothing of them is not trusted: outside a tensor's window a `Sealed` takes its place in the module. It
answers what a tensor is like (shape, dtype, device) and raises where its values are asked for, be it a functional read,
another layer's or another part's call, `state_dict`, `load_state_dict` or a conversion. A tensor that was taken out of
a module inside the window and is used behind it is still not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from dwdp.errors import DwdpError
from dwdp.partition.roots import LayerRoots

WINDOWS = {"attn": "the call of its layer's attention", "moe": "its layer's call, up to the end of the MoE block"}
_ASKED = (
    "shape dtype device layout ndim is_meta is_cuda is_cpu is_sparse is_quantized is_mkldnn is_nested requires_grad "
    "is_leaf grad grad_fn itemsize nbytes _version"
)
_CALLED = (
    "size dim ndimension numel nelement stride storage_offset element_size is_contiguous is_floating_point is_complex "
    "is_signed is_inference untyped_storage get_device __len__ __hash__ _is_view"
)
_HARMLESS = {getattr(torch.Tensor, name).__get__ for name in _ASKED.split()}
_HARMLESS |= {getattr(torch.Tensor, name) for name in _CALLED.split()}
_HARMLESS |= {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_tensor}


class Sealed(torch.Tensor):
    """In the place of a tensor whose window is closed; see [Note: sealed weights].

    dwdp_name, dwdp_segment: what it stands for.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        one = next(tensor for tensor in _sealed_in([args, kwargs or {}]))
        raise DwdpError(
            f"dense DWDP: {one.dwdp_name} is used outside {WINDOWS[one.dwdp_segment]}, where its bytes are not there; "
            "a decoder with discovered roots must call its layers, their attention and MoE blocks as modules and use "
            "their weights only there, and cannot be loaded, saved or converted after set-up; a name in "
            "dense_dwdp_excluded of the layer stays replicated"
        )

    def __repr__(self, **_) -> str:
        return f"Sealed({self.__dict__.get('dwdp_name')})"


def _sealed_in(values: object) -> Iterator[Sealed]:
    if type(values) is Sealed:
        yield values
    elif isinstance(values, dict | list | tuple):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _sealed_in(value)


@dataclass(frozen=True)
class _Place:
    """One name of one module, which it does not hold: a model that is dropped is freed. table: a `Binding.kind`."""

    module: weakref.ref
    table: str
    attribute: str
    live: torch.Tensor
    sealed: Sealed

    def put(self, new: torch.Tensor, old: torch.Tensor) -> None:
        """What somebody else has put there meanwhile stays."""
        module = self.module()
        if module is not None:
            values = module.__dict__ if self.table == "attribute" else module.__dict__[self.table]
            if values.get(self.attribute) is old:
                values[self.attribute] = new


class Seals:
    """The places of one model's moved tensors, by (layer index, segment). All are sealed at first."""

    def __init__(self, layers: Iterable[LayerRoots], moved: set[int]) -> None:
        self._places: dict[tuple[int, str], list[_Place]] = {}
        self._open: set[tuple[int, str]] = set()
        for layer in layers:
            for place, segment in _places(layer, moved):
                self._places.setdefault((layer.index, segment), []).append(place)
        for places in self._places.values():
            for place in places:
                place.put(place.sealed, place.live)

    def sealed(self) -> list[Sealed]:
        """Every stand-in, each of which lies where its tensor lies."""
        return [place.sealed for places in self._places.values() for place in places]

    def open(self, index: int) -> None:
        """Both windows of a layer."""
        for segment in WINDOWS:
            self._open.add((index, segment))
            for place in self._places.get((index, segment), ()):
                place.put(place.live, place.sealed)

    def close(self, index: int, segment: str) -> None:
        """Idempotent."""
        if (index, segment) in self._open:
            self._open.discard((index, segment))
            for place in self._places.get((index, segment), ()):
                place.put(place.sealed, place.live)

    def close_all(self) -> None:
        for index, segment in list(self._open):
            self.close(index, segment)


def _places(layer: LayerRoots, moved: set[int]) -> Iterator[tuple[_Place, str]]:
    """A module of both segments has the longer window."""
    segment_of = {id(module): segment for segment in WINDOWS for module in layer.segments.get(segment, ())}
    sealed: dict[int, Sealed] = {}  # a tensor under two names stays one
    for path, module in layer.layer.named_modules():
        segment = segment_of.get(id(module))
        if segment is None:
            continue
        for table in ("_parameters", "_buffers", "attribute"):
            values = module.__dict__ if table == "attribute" else module.__dict__[table]
            for attribute, tensor in values.items():
                if id(tensor) in moved:
                    name = ".".join(part for part in (layer.path, path, attribute) if part)
                    if id(tensor) not in sealed:
                        sealed[id(tensor)] = _seal(tensor, name, segment)
                    yield _Place(weakref.ref(module), table, attribute, tensor, sealed[id(tensor)]), segment


def _seal(tensor: torch.Tensor, name: str, segment: str) -> Sealed:
    with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(tensor.is_inference()):
        one = torch.empty(0, dtype=tensor.dtype, device=tensor.device).as_subclass(Sealed)
        one.data = tensor.detach()  # no view, which would keep what it is a view of
        if tensor.requires_grad:
            one.requires_grad_()
    one.__dict__.update(dwdp_name=name, dwdp_segment=segment, _is_param=isinstance(tensor, nn.Parameter))
    return one
