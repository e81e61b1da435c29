"""Tensors that a module of a model holds outside its tables: in containers, closures, partials, objects.

The collector asks here for views that would keep an original alive, or be read after its bytes have moved.
"""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterator

import torch
from torch import nn

TABLES = ("_parameters", "_buffers", "_modules")
# Of the standard library only what holds other things is looked into: a logger or a thread leads everywhere. torch's
# and our own objects that are no modules hold no weights of a model.
_LOOKED_INTO = frozenset({"builtins", "collections", "functools", "itertools", "operator", "types"})
_OPAQUE_PACKAGES = (sys.stdlib_module_names - _LOOKED_INTO) | {"torch", "dwdp", "numpy"}
_OPAQUE_TYPES = (type, types.ModuleType, types.FrameType, types.CodeType, types.BuiltinFunctionType)


class HolderWalk:
    """One walk over the modules of a model; what several of them reach is told for the first one alone.

    tree: the modules that are visited on their own.
    """

    def __init__(self, tree: set[int]) -> None:
        self._tree = tree
        self._seen: dict[int, object] = {}  # holds what it has seen, so that no id is used again

    def tensors_behind(self, start: object) -> Iterator[tuple[torch.Tensor, str]]:
        """(tensor, what kind of thing holds it) of every tensor that `start`, which is no tensor, leads to."""
        pending = [(start, start)]
        while pending:
            thing, holder = pending.pop()
            # type(), not isinstance: some objects answer __class__ with code of their own.
            kind = type(thing)
            if issubclass(kind, torch.Tensor):
                yield thing, _named(holder)
                continue
            if id(thing) in self._seen or not gc.is_tracked(thing) or self._is_opaque(thing, kind):
                continue
            self._seen[id(thing)] = thing
            pending += [(item, thing) for item in reversed(_referents(thing))]

    def _is_opaque(self, thing: object, kind: type) -> bool:
        if issubclass(kind, nn.Module):
            return id(thing) in self._tree
        return issubclass(kind, _OPAQUE_TYPES) or kind.__module__.partition(".")[0] in _OPAQUE_PACKAGES


def _referents(thing: object) -> list[object]:
    if isinstance(thing, types.FunctionType):  # its globals are everybody's
        return [x for x in (thing.__closure__, thing.__defaults__, thing.__kwdefaults__, thing.__dict__) if x]
    if type(thing) is dict:
        return [*thing.values(), *thing.keys()]
    return gc.get_referents(thing)


def _named(holder: object) -> str:
    kind = type(holder).__name__
    return {"cell": "closure", "method": "bound method"}.get(kind, kind)
