"""Finds the dense roots of a decoder that declares none, from its structure; needs no weights.

The decoder layers are the elements of the one list (ModuleList, Sequential, ModuleDict, or children with numbers for
names) whose elements hold an attention module and a MoE block.

  routed experts  a list of like modules or a module with stacked tables [E, ...], named after experts but not shared
  MoE block       the smallest module below the layer around the routed experts and their router
  attention       the one module named attn or attention, or of a class named so, that holds two matrices or more; where
                  none is named, the one other part of the layer that holds two

Everything in the MoE block but the routed experts is the MoE segment; routing biases (one value an expert, beside the
router's matrix) never move. Whatever could be meant by two modules is refused, naming them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from dwdp.errors import DwdpError
from dwdp.partition.roots import HookPoints, LayerRoots, declares, tables, unique

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
EXPERT_NAMES = ("experts", "routed_experts", "local_experts")
ROUTER_NAMES = ("gate", "router", "wg", "gating")
EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "num_routed_experts")


@dataclass(frozen=True)
class _Element:
    """One element of a list of modules, its routed experts and what may be its attention, by path below it."""

    path: str
    layer: nn.Module
    experts: dict[str, nn.Module]
    attention: dict[str, nn.Module]


def discover_roots(model: nn.Module) -> list[LayerRoots]:
    """The decoder layers with attention and a MoE block, in order; [] when no list has routed experts in it.

    Raises DwdpError where several lists, blocks or attention modules could be meant.
    """
    lists = {path: _elements(path, module) for path, module in model.named_modules() if _is_list(module)}
    lists = {path: elements for path, elements in lists.items() if elements}
    if not lists:
        return []
    decoders = {path: elements for path, elements in lists.items() if any(e.experts and e.attention for e in elements)}
    # A list of stages holds the lists of layers: the innermost ones are meant.
    inner = [path for path in decoders if not any(p != path and p.startswith(_below(path)) for p in decoders)]
    if not inner:
        _refuse(model, f"no module beside the routed experts in {_some(lists)} looks like attention")
    if len(inner) > 1:
        _refuse(model, f"several lists hold layers with attention and a MoE block: {_some(inner)}")
    path = inner[0]
    found: dict[int, str] = {}
    layers = []
    for number, element in enumerate(decoders[path]):
        if not element.experts:
            continue
        if id(element.layer) in found:
            _refuse(model, f"{found[id(element.layer)]} and {element.path} are one module")
        found[id(element.layer)] = element.path
        layers.append(_layer_roots(model, _owner(model, path), number, element))
    return layers


def _layer_roots(model: nn.Module, owner: nn.Module, number: int, element: _Element) -> LayerRoots:
    layer = element.layer
    block_path, routers = _moe_block(model, element)
    attention = {path: m for path, m in element.attention.items() if not _related(path, block_path)}
    if len(attention) != 1:
        found = f"has several: {_some(attention)}" if attention else f"has {_some(layer._modules)}"
        _refuse(model, f"{element.path} needs one attention module beside its MoE block {block_path} but {found}")
    (attention_path,) = attention
    block = layer.get_submodule(block_path)
    routed = unique(m for path, e in element.experts.items() if path != block_path for m in e.modules())
    around = {id(layer.get_submodule(path)) for path in (block_path, *_ancestors(element.experts))}
    # Where the tables lie in the block itself its children are dense.
    own_tables = {f"{block_path}.{name}" for name in _stacked(block) if block_path in element.experts}
    experts = {id(m) for m in routed}
    dense = unique(m for m in block.modules() if id(m) not in experts and (id(m) not in around or any(_own_tensors(m))))
    paths = {id(m): path for path, m in layer.named_modules()}
    biases = {f"{paths[module]}.{name}" for module, name in _routing_biases(dense, around, routers)}
    allowed, excluded = tables(layer)
    return LayerRoots(
        layer.index if declares(layer) else number,
        element.path,
        layer,
        {"attn": unique(attention[attention_path].modules()), "moe": dense},
        allowed,
        excluded | biases | own_tables,
        routed,
        HookPoints(owner, attention[attention_path], block),
    )


# ---- lists and their elements ----


def _is_list(module: nn.Module) -> bool:
    return len(module._modules) > 0 and (
        isinstance(module, CONTAINERS) or all(name.isdecimal() for name in module._modules)
    )


def _elements(path: str, module: nn.Module) -> list[_Element]:
    """Every element of a list; [] when none of them holds routed experts."""
    children = {name: child for name, child in module._modules.items() if child is not None}
    experts = {name: _routed_experts(child) for name, child in children.items()}
    if not any(experts.values()):
        return []
    return [
        _Element(_below(path) + name, child, experts[name], _attention(child, experts[name]))
        for name, child in children.items()
    ]


def _owner(model: nn.Module, path: str) -> nn.Module:
    """The innermost module around the list at `path` that is no container, so has a forward that runs the layers."""
    owner = model
    names = path.split(".") if path else []
    for end in range(len(names)):
        module = model.get_submodule(".".join(names[:end]))
        if not isinstance(module, nn.ModuleList | nn.ModuleDict):
            owner = module
    return owner


# ---- the MoE block ----


def _routed_experts(layer: nn.Module) -> dict[str, nn.Module]:
    """Path below the layer -> module with routed experts, outermost ones only."""
    found: dict[str, nn.Module] = {}
    for path, module in layer.named_modules():
        if path and not any(_inside(path, other) for other in found) and _holds_experts(path, module):
            found[path] = module
    return found


def _holds_experts(path: str, module: nn.Module) -> bool:
    name, kind = path.rpartition(".")[2].lower(), type(module).__name__.lower()
    if any("shared" in part for part in (*path.lower().split("."), kind)):
        return False
    if name in EXPERT_NAMES:
        return True
    if "expert" in name or "expert" in kind:
        return bool(_stacked(module)) or (_is_list(module) and len(module._modules) > 1)
    # A block that holds its tables itself.
    return "moe" in name + kind and bool(_stacked(module))


def _stacked(module: nn.Module) -> list[str]:
    """Names of a module's own tables [E, ...] of three dimensions, when all of them agree on E."""
    stacked = {name: t.shape[0] for name, t in _own_tensors(module) if t.ndim >= 3}
    return list(stacked) if len(set(stacked.values())) == 1 else []


def _moe_block(model: nn.Module, element: _Element) -> tuple[str, set[int]]:
    """Path of the smallest module below the layer around experts and router, and how many experts there may be."""
    paths = list(element.experts)
    around = [*paths[:1], *_ancestors(paths[:1])]
    around = [path for path in around if all(_inside(other, path) for other in paths)]
    counts = _expert_counts(element)
    # A matrix with a row an expert tells more than a name; tables cut to a rank's range leave the name alone.
    for match in (lambda name, rows: rows in counts, lambda name, rows: name in ROUTER_NAMES):
        for path in around:
            rows = {rows for name, rows in _matrices_beside(element, path) if match(name, rows)}
            if rows:
                return path, rows
    _refuse(model, f"{element.path} has routed experts ({_some(paths)}) but no module below it holds them and a router")


def _matrices_beside(element: _Element, path: str) -> Iterator[tuple[str, int]]:
    """(name, rows) of every matrix in the module at `path` but outside its routed experts.

    The name is the parameter's, or of its module where it is just a weight.
    """
    experts = {id(m) for p, e in element.experts.items() if p != path for m in e.modules()}
    for below, module in element.layer.get_submodule(path).named_modules():
        if id(module) not in experts:
            for name, tensor in _own_tensors(module):
                if tensor.ndim == 2:
                    yield (below.rpartition(".")[2] if name == "weight" else name).lower(), tensor.shape[0]


def _expert_counts(element: _Element) -> set[int]:
    counts = set()
    for path, experts in element.experts.items():
        holders = [experts, *(element.layer.get_submodule(p) for p in _ancestors([path]) if p)]
        counts |= {n for m in holders for name in EXPERT_COUNTS if isinstance(n := getattr(m, name, None), int)}
        counts |= {len(experts._modules)} if _is_list(experts) else set()
        counts |= {t.shape[0] for _, t in _own_tensors(experts) if t.ndim >= 3}
    return counts


def _routing_biases(dense: tuple[nn.Module, ...], around: set[int], routers: set[int]) -> Iterator[tuple[int, str]]:
    """(module id, name) of every vector with a value an expert, beside the router's matrix or in the block itself."""
    for module in dense:
        own = list(_own_tensors(module))
        if id(module) in around or any(t.ndim == 2 and t.shape[0] in routers for _, t in own):
            yield from ((id(module), name) for name, t in own if t.ndim == 1 and t.shape[0] in routers)


# ---- attention ----


def _attention(layer: nn.Module, experts: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Path below the layer -> module that may be its attention, outermost ones only."""
    named: dict[str, nn.Module] = {}
    for path, module in layer.named_modules():
        name = (path.rpartition(".")[2] + " " + type(module).__name__).lower()
        skipped = not path or any(_related(path, other) for other in (*named, *experts))
        if not skipped and ("attn" in name or "attention" in name) and _num_matrices(module) > 1:
            named[path] = module
    if named:
        return named
    # Nothing is named so: every other part of the layer that computes with more than one matrix.
    return {
        name: child
        for name, child in layer.named_children()
        if not any(_inside(path, name) for path in experts) and _num_matrices(child) > 1
    }


def _num_matrices(module: nn.Module) -> int:
    return sum(tensor.ndim >= 2 for m in module.modules() for _, tensor in _own_tensors(m))


# ---- helpers ----


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for table in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in table.items() if tensor is not None)


def _below(path: str) -> str:
    return f"{path}." if path else ""


def _inside(path: str, other: str) -> bool:
    """Whether `path` is `other` or lies in it."""
    return path == other or path.startswith(_below(other))


def _related(path: str, other: str) -> bool:
    return _inside(path, other) or _inside(other, path)


def _ancestors(paths) -> list[str]:
    """Every path above the given ones, the innermost first, without the layer itself."""
    above = {".".join(names[:end]) for names in (p.split(".") for p in paths) for end in range(1, len(names))}
    return sorted(above, key=lambda path: -path.count("."))


def _some(paths) -> str:
    named = [path or "the model itself" for path in paths]
    return ", ".join(named[:6]) + (f" and {len(named) - 6} more" if len(named) > 6 else "")


def _refuse(model: nn.Module, found: str) -> None:
    raise DwdpError(
        f"dense roots of {type(model).__name__} cannot be discovered: {found}; declare them (dense_dwdp_roots on its "
        "layers, dense_dwdp.roots: declared)"
    )
