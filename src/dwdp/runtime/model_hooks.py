"""H0 to H3 for a decoder that does not call them itself: forward hooks on the modules that discovery found.

H0 comes before the forward of the module that runs the layers, H1 before a layer's, H2 after its attention's, H3 after
its MoE block's (after both where the MoE block runs first).

[Note: hooked modules must be called] Forward hooks see `module(x)` and not `module.forward(x)`. A read that no hook
announces would find another layer's weights, so whatever shows that one was missed raises: a part that runs outside its
layer or twice, and any read outside a window ([Note: sealed weights]).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from dwdp.errors import DwdpError, ModelReleasedError, ModelUnusableError
from dwdp.partition.roots import LayerRoots
from dwdp.runtime.sealed import Seals


def install_hooks(manager, model: nn.Module, roots: Sequence[LayerRoots]) -> None:
    """Hooks the layers that do not call the hooks of `manager`, a DenseDwdpManager that has committed, themselves.

    The hooks live as long as the model. After the manager's release they refuse a forward: the weights are gone.
    """
    layers = [layer for layer in roots if layer.discovered and not layer.calls_hooks]
    if not layers:
        return
    moved = {id(tensor) for tensor in (reference() for reference in manager.weights.repointed)}
    versions = {layer.index: _versions(layer, moved) for layer in layers}
    seals = Seals(layers, moved)
    manager.weights.repointed += [weakref.ref(tensor) for tensor in seals.sealed()]  # they lie in slots too
    hooks = _ForwardHooks(manager, seals, first=layers[0].index)
    owner = layers[0].hooks.owner
    owner.register_forward_pre_hook(hooks.before_owner, prepend=True)
    # What surrounds the owner may run the layers without calling it.
    model.register_forward_pre_hook(hooks.before_model, prepend=True)
    hooked: set[int] = set()
    for layer in layers:
        layer.layer.register_forward_pre_hook(partial(hooks.before_layer, layer.index), prepend=True)
        layer.layer.register_forward_hook(partial(hooks.after_layer, layer.index, versions[layer.index]))
        for part, module in (("attention", layer.hooks.attention), ("MoE block", layer.hooks.moe)):
            if id(module) not in hooked:  # layers may share one
                module.register_forward_pre_hook(partial(hooks.before_part, part), prepend=True)
                module.register_forward_hook(partial(hooks.after_part, part))
            hooked.add(id(module))


class _ForwardHooks:
    """Where one model's forward stands. Holds no module, so that a model that is dropped is freed.

    first: index of the first layer that is hooked.
    """

    def __init__(self, manager, seals: Seals, *, first: int) -> None:
        self.manager, self.seals, self.first = manager, seals, first
        self.entered = False  # H0 was called, the first layer was not reached yet
        self.layer: int | None = None  # the layer whose forward runs
        self.done: set[str] = set()  # its parts that have run

    def before_model(self, module: nn.Module, *_: Any) -> None:
        if getattr(module, "unusable", None) is not None:
            raise ModelUnusableError(f"this model cannot run: {module.unusable}") from module.unusable
        self._refuse_released()

    def before_owner(self, *_: Any) -> None:
        self._refuse_released()
        self.entered, self.layer = True, None
        self.seals.close_all()  # of a forward that was given up
        self.manager.h0()

    def before_layer(self, index: int, *_: Any) -> None:
        self._refuse_released()
        if index == self.first and not self.entered:  # the owner's forward was not called
            self.manager.h0()
        self.entered = False
        self.layer, self.done = index, set()
        self.seals.close_all()
        self.manager.h1(index)
        self.seals.open(index)

    def before_part(self, part: str, *_: Any) -> None:
        self._refuse_released()
        if self.layer is None or part in self.done:
            what = "outside its layer's forward" if self.layer is None else f"a second time in layer {self.layer}"
            raise DwdpError(
                f"dense DWDP: the {part} runs {what}, where its weights are not there; a decoder with discovered roots "
                "must call its layers as modules, and their attention and MoE block once"
            )

    def after_part(self, part: str, *_: Any) -> None:
        self.done.add(part)
        if part == "attention":
            self.seals.close(self.layer, "attn")
            self.manager.h2(self.layer)
        if len(self.done) == 2:
            self.seals.close(self.layer, "moe")
            self.manager.h3(self.layer)

    def after_layer(self, index: int, versions: list[tuple[str, torch.Tensor, int]], *_: Any) -> None:
        """Closes what a layer that skipped a part has left open, and refuses one that writes its weights."""
        for part in ("attention", "MoE block"):
            if part not in self.done:
                self.after_part(part)
        self.layer = None
        for name, tensor, version in versions:
            if tensor._version != version:
                raise DwdpError(
                    f"dense DWDP: the forward of layer {index} writes {name}, which lies in a slot that other layers "
                    "take over; name it in dense_dwdp_excluded of the layer"
                )

    def _refuse_released(self) -> None:
        if self.manager.runtime is None or self.manager.runtime.released:
            raise ModelReleasedError("the weights of this model were released; build and load a new one")


def _versions(layer: LayerRoots, moved: set[int]) -> list[tuple[str, torch.Tensor, int]]:
    """(name, tensor, version) of the layer's tensors that lie in slots; torch counts every write in the version."""
    modules = {id(module) for modules in layer.segments.values() for module in modules}
    return [
        (f"{layer.path}.{path}.{name}", tensor, tensor._version)
        for path, module in layer.layer.named_modules()
        if id(module) in modules
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]
        if id(tensor) in moved and not tensor.is_inference()
    ]
