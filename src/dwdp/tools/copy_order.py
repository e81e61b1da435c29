"""The copy order that a trace should have, computed from the slots alone, and where a trace leaves it.

Not every fault is a race: a fill that is left out, or experts that are started before the dense weights, only make
copies late. E(l) may be enqueued at the finish of the last layer that holds its slot, L(l) at the later of H2 of the
last layer with its attention slot and H3 of the last one with its MoE-dense slot, neither before its predecessor.
This is written down here once more, without the schedules' code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ATTACHED, STANDALONE, EXPERTS = MODES = ("attached", "standalone", "experts")
DENSE_SLOTS = {"A": 2, "D": 3}
LAYERS_AHEAD = 2
HOOKS = ("start", "H0", "H1", "H2", "bind", "finish", "H3")
_STAGE = {"H2": 0, "finish": 1, "H3": 2}


@dataclass(frozen=True)
class Setting:
    """What is simulated. layers: L; slots: S of the experts; segments: "AD" or "A"; num_aux: auxiliary streams that
    read D weights."""

    layers: int
    slots: int = 2
    mode: str = ATTACHED
    segments: str = "AD"
    num_aux: int = 1

    @property
    def dense(self) -> bool:
        return self.mode != EXPERTS

    @property
    def experts(self) -> bool:
        return self.mode != STANDALONE

    def slot(self, segment: str, pos: int) -> str:
        """The slot of a layer: segment A, D or E."""
        return f"{segment}{pos % (min(self.slots, self.layers) if segment == 'E' else DENSE_SLOTS[segment])}"

    @property
    def first_copies(self) -> list[str]:
        """What a forward needs enqueued before its first layer: L(0), L(1), then E(0) and on."""
        dense = [f"L({pos})" for pos in range(min(LAYERS_AHEAD, self.layers))] if self.dense else []
        return dense + ([f"E({pos})" for pos in range(min(self.slots, self.layers))] if self.experts else [])


def forward_order(setting: Setting) -> dict[str, list[str]]:
    """Hook -> the copies enqueued in it, such as {"H2(0)": ["L(2)"]}, of every forward behind its H0."""
    order: dict[str, list[str]] = {}
    for letter, wanted in (("L", setting.dense), ("E", setting.experts)):
        for copy, (layer, stage) in _copies(setting, letter) if wanted else ():
            if layer < setting.layers:
                hook = next(name for name, number in _STAGE.items() if number == stage)
                order.setdefault(f"{hook}({layer})", []).append(f"{letter}({copy % setting.layers})")
    return order


def _copies(setting: Setting, letter: str) -> Iterator[tuple[int, tuple[int, int]]]:
    """(layer, (layer, stage) where its copy is enqueued), layers counted on over the forwards."""
    segments = setting.segments if letter == "L" else "E"
    depth = min(LAYERS_AHEAD if letter == "L" else setting.slots, setting.layers)
    stage = {"A": _STAGE["H2"], "D": _STAGE["H3"], "E": _STAGE["finish"]}
    at = (0, 0)
    across = setting.mode != STANDALONE  # standalone every forward begins anew
    for layer in range(depth, (2 if across else 1) * setting.layers):
        for segment in segments:
            slot = setting.slot(segment, layer % setting.layers)
            holder = layer - 1
            while holder >= 0 and setting.slot(segment, holder % setting.layers) != slot:
                holder -= 1
            if holder >= 0:
                at = max(at, (holder, stage[segment]))
        yield layer, at


@dataclass
class HookCopies:
    """The copies enqueued between a mark of the host's program and the next one. hook: such as "H2(0)"; "abort",
    "end" and "invalidate" stand there too; demanded: a demand fetch was among them."""

    hook: str
    copies: list[str]
    demanded: bool = False

    @property
    def name(self) -> str:
        return self.hook.partition("(")[0]

    def __str__(self) -> str:
        return f"{self.hook:<10} {' '.join(self.copies)}".rstrip()


def hook_copies(ops: Sequence[Mapping[str, Any]]) -> list[HookCopies]:
    """The copies of a trace by hook; L(l) stands where its first slot's copy does."""
    found = [HookCopies("", [])]
    for op in ops:
        if op["kind"] == "mark":
            name = op["name"]
            if name in HOOKS or name in ("abort", "end", "invalidate"):
                layer = op.get("layer")
                found.append(HookCopies(name if layer is None or name == "abort" else f"{name}({layer})", []))
            elif name == "demand":
                found[-1].demanded = True
        elif op["kind"] == "copy" and op.get("slot"):
            copy = f"{'E' if op['slot'][0] == 'E' else 'L'}({op['layer']})"
            if copy[0] == "E" or copy not in found[-1].copies:
                found[-1].copies.append(copy)
    return found if found[0].copies else found[1:]


def order_problems(ops: Sequence[Mapping[str, Any]], setting: Setting) -> list[str]:
    """Where the copies of a trace are not in the order that they should be in, as text.

    After an abort or an invalidation only the sequence of the first copies is checked, not which of them are there;
    a forward with a demand fetch, or one of experts alone that begins so without a start, is not checked further.
    """
    order, first = forward_order(setting), setting.first_copies
    problems: list[str] = []
    due: list[str] | None = first  # first copies still missing before H1; None: whatever was lost
    skipping = False
    sections = hook_copies(ops)
    for number, section in enumerate(sections):
        name, copies = section.name, section.copies
        aborted = number + 1 < len(sections) and sections[number + 1].name == "abort"
        skipping = (skipping or section.demanded) and name not in ("start", "H0", "end", "abort")
        if name in ("start", "H0"):
            wanted = due
            if due is None:
                wanted = [copy for copy in first if copy in copies]
            if name == "H0" or due is not None or not setting.dense:  # a start leaves an aborted forward to H0
                due = []
        elif name in ("abort", "invalidate"):
            due, wanted = None, []
        elif name == "end":
            due, wanted = ([] if setting.mode != STANDALONE else first), []
        else:
            skipping = skipping or due is None  # experts alone, and nobody announced the forward
            due, wanted = due if name == "" else [], order.get(section.hook, [])
        if not skipping and copies != wanted and not (aborted and copies == wanted[: len(copies)]):
            where = section.hook or "before the first hook"
            problems.append(f"{where} enqueues {_list(copies)} instead of {_list(wanted)}")
    return problems


def _list(copies: list[str]) -> str:
    return " ".join(copies) or "nothing"
