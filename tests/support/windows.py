"""Records every operation on a tensor over a dense slot and what is open: A(l) from H1 to H2, D(l) from H1 to H3."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class WindowRecorder(TorchDispatchMode):
    """Active around forwards of one rank's model.

    reads: every (layer, name) that an operation saw as an input; problems: operations on a weight whose window is not
    open, and on a view that was made before its window opened. A view is known by the operation that made it, so one
    that outlives its window is told from the next layer's weight in the same slot.
    """

    def __init__(self, rank) -> None:
        super().__init__()
        self.problems: list[str] = []
        self.reads: set[str] = set()
        self.opened = 0  # how many windows were opened so far
        self.open: dict[str, tuple[int, int]] = {}  # segment -> (layer, which window)
        weights = rank.manager.dense.weights
        blobs = range(len(weights.layout.blobs))
        self.slots = {weights.slots.data(number).untyped_storage()._cdata for number in blobs}
        places = {
            view.name: (blob.layer_index, blob.segment)
            for blob in weights.layout.blobs
            for storage in blob.storages
            for view in storage.views
        }
        self.weights = WeakIdKeyDictionary()  # tensor -> (name, layer, segment)
        for name, tensor in rank.model.named_parameters():
            if name in places:
                self.weights[tensor] = (name, *places[name])
        assert len(self.weights) == len(places)
        self.views = WeakIdKeyDictionary()  # tensor -> (name, layer, segment, which window)
        for hook in ("h1", "h2", "h3"):
            setattr(rank.manager.dense, hook, self._watching(hook, getattr(rank.manager.dense, hook)))

    def _watching(self, hook, real):
        def watched(layer):
            if hook != "h1":
                self.open.pop({"h2": "A", "h3": "D"}[hook], None)
            real(layer)
            if hook == "h1":
                self.opened += 1
                self.open = dict.fromkeys("AD", (layer, self.opened))

        return watched

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        origins = [self._check(func, t) for t in tree_leaves((args, kwargs)) if self._in_slot(t)]
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if self._in_slot(tensor) and tensor not in self.weights:
                self.views[tensor] = origins[0]
        return out

    def _in_slot(self, tensor) -> bool:
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            return False
        return tensor.untyped_storage()._cdata in self.slots

    def _check(self, func, tensor):
        """Returns what a view that the operation makes comes from."""
        if tensor in self.weights:
            name, layer, segment = self.weights[tensor]
            made = None
        elif tensor in self.views:
            name, layer, segment, made = self.views[tensor]
        else:
            self.problems.append(f"{func} reads a tensor over a slot that nobody announced")
            return ("?", None, "A", None)
        self.reads.add(name)
        now = self.open.get(segment)
        if now is None or now[0] != layer:
            self.problems.append(f"{func} reads {name} while {now} is open")
        elif made is not None and made != now[1]:
            self.problems.append(f"{func} reads a view of {name} that was made in an earlier window")
        return (name, layer, segment, now and now[1])
