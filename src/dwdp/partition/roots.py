"""Which modules of which decoder layers hold the weights that dense DWDP may spread.

A decoder layer declares them:
  dense_dwdp_roots() -> {"attn": [modules], "moe": [modules]} (empty: the layer stays replicated);
  dense_dwdp_allowed: names of plain tensor attributes under the roots that move with them;
  dense_dwdp_excluded: names under the roots that never move (scratch, the routing bias);
  index: its number in the model;
  dense: the dense manager that was registered when it was built, whose hooks H1 to H3 it calls.
For a model that declares nothing discover.py finds the same, and runtime/model_hooks.py has the hooks called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from dwdp.errors import DwdpError

SEGMENT_LETTERS = {"attn": "A", "moe": "D"}


@dataclass(frozen=True)
class HookPoints:
    """Where a decoder that calls no hook itself is hooked: its owner's forward, a layer, and two parts of it.

    owner: the module whose forward runs all layers.
    """

    owner: nn.Module
    attention: nn.Module
    moe: nn.Module


@dataclass(frozen=True)
class LayerRoots:
    """What of one decoder layer may move.

    segments: attn and moe -> every module whose own tensors belong to it. excluded: names, or dotted paths below the
    layer. routed: the modules of the routed experts, which expert DWDP moves. hooks: set by discovery.
    """

    index: int
    path: str
    layer: nn.Module
    segments: Mapping[str, tuple[nn.Module, ...]]
    allowed: frozenset[str]
    excluded: frozenset[str]
    routed: tuple[nn.Module, ...] = ()
    hooks: HookPoints | None = None

    @property
    def discovered(self) -> bool:
        return self.hooks is not None

    @property
    def calls_hooks(self) -> bool:
        """Whether the layer calls H1 to H3 itself, as every layer that declares roots does."""
        return declares(self.layer)

    def excludes(self, name: str) -> bool:
        """name: of a tensor of this layer, as the model names it."""
        return name.rpartition(".")[2] in self.excluded or name.removeprefix(f"{self.path}.") in self.excluded


def declares(module: nn.Module) -> bool:
    return callable(getattr(module, "dense_dwdp_roots", None))


def find_roots(model: nn.Module, how: str = "declared") -> list[LayerRoots]:
    """The layers with roots, in model order; needs no weights. how: `declared` or `discover`.

    Raises DwdpError where discovery cannot tell which modules are meant, naming those it found.
    """
    if how == "discover":
        from dwdp.partition.discover import discover_roots

        return discover_roots(model)
    found = []
    for path, layer in model.named_modules():
        roots = layer.dense_dwdp_roots() if declares(layer) else {}
        for segment in roots:
            if segment not in SEGMENT_LETTERS:
                raise DwdpError(f"layer {layer.index} declares dense roots for {segment!r}, not attn or moe")
        if any(roots.values()):
            segments = {name: unique(m for root in modules for m in root.modules()) for name, modules in roots.items()}
            found.append(LayerRoots(layer.index, path, layer, segments, *tables(layer)))
    return found


def tables(layer: nn.Module) -> tuple[frozenset[str], frozenset[str]]:
    """(allowed, excluded) names that a layer declares."""
    return tuple(frozenset(getattr(layer, f"dense_dwdp_{which}", ())) for which in ("allowed", "excluded"))


def unique(modules) -> tuple[nn.Module, ...]:
    """Each module once, in order."""
    return tuple({id(module): module for module in modules}.values())


def why_no_roots(model: nn.Module, how: str = "declared") -> str | None:
    """Why no layer of the model has roots, as one line, or None when one has; needs no weights."""
    try:
        if find_roots(model, how):
            return None
    except DwdpError as error:
        return str(error)
    name = type(model).__name__
    if how == "discover":
        return f"no layer of {name} with attention and a MoE block (routed experts beside a router) was discovered"
    return f"no layer of {name} declares dense roots"


def has_dense_roots(model: nn.Module, how: str = "declared") -> bool:
    """Whether any layer of the model has dense roots; needs no weights."""
    return why_no_roots(model, how) is None
