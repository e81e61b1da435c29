"""Lists of entries that name modules, as quantisation configs have them: expressions, patterns, parts of names.

A release asks such a list about a quarter of a million expert matrices. `experts_below` gives what of a list may speak
about the experts of one layer, which is nearly always nothing.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import translate
from typing import Generic, TypeVar

from dwdp.errors import CheckpointError

PREFIX = "language_model."
T = TypeVar("T")
_OF_AN_EXPERT = ".0123456789w"
"""Characters of what follows a layer's experts in the name of a matrix: `12.w1`."""


def strip_prefix(name: str) -> str:
    return name.removeprefix(PREFIX)


@dataclass(frozen=True)
class _Rule(Generic[T]):
    """names: whether the entry names a module (no prefix). may_name: whether it may name a matrix of an expert below a
    parent."""

    value: T
    names: Callable[[str], bool]
    may_name: Callable[[str], bool]


class NameRules(Generic[T]):
    """entries: (entry, value). An entry is a regular expression (`re:`, from the start of the name), a `*` pattern, or
    whole parts of a name; each may have the prefix `language_model.` or not. where: for messages.

    Raises CheckpointError for a bad expression.
    """

    def __init__(self, where: str, entries: Iterable[tuple[str, T]]) -> None:
        self._rules = [_rule(where, entry, value) for entry, value in entries]

    def first(self, module: str) -> T | None:
        """The value of the first entry that names `module`, a name without prefix."""
        for rule in self._rules:
            if rule.names(module):
                return rule.value
        return None

    def experts_below(self, parent: str) -> NameRules[T]:
        """The entries that may name a module `PARENT.E.w1`, w2 or w3: for these `first` is the same."""
        narrowed: NameRules[T] = NameRules("", ())
        narrowed._rules = [rule for rule in self._rules if rule.may_name(parent)]
        return narrowed


class ModuleTable(Generic[T]):
    """Module name (with or without prefix) -> value, which holds for all modules below it too."""

    def __init__(self, table: dict[str, T]) -> None:
        self._table = {strip_prefix(name): value for name, value in table.items()}

    def nearest(self, module: str) -> T | None:
        """The value of the module or of its nearest parent that has one."""
        name = module
        while name:
            if name in self._table:
                return self._table[name]
            name = name.rpartition(".")[0]
        return None


def _rule(where: str, entry: str, value: T) -> _Rule[T]:
    if entry == "*":
        return _Rule(value, lambda module: True, lambda parent: True)
    if entry.startswith("re:"):
        try:
            with warnings.catch_warnings():  # of what another version will read otherwise: not for the user's eyes
                warnings.simplefilter("ignore")
                match = re.compile(entry[3:]).match
        except (re.error, OverflowError, RecursionError) as error:
            shown = entry if len(entry) <= 200 else entry[:197] + "..."
            raise CheckpointError(f"{where} has the bad regular expression {shown!r}: {error}") from error
        anywhere, text = _after(entry[3:].removeprefix("^"), ".*")
        literal = "" if _has_choice(text) else _literal_start(text)
    elif "*" in entry:
        match = re.compile(translate(entry)).match
        anywhere, text = _after(entry, "*")
        literal = re.split(r"[*?\[]", text, maxsplit=1)[0]
    else:
        return _parts_rule(strip_prefix(entry), value)

    def may_name(parent: str) -> bool:
        names = (f"{parent}.", f"{PREFIX}{parent}.")
        return any(map(_may_lie_in if anywhere else _may_begin, (literal, literal), names))

    return _Rule(value, lambda module: match(PREFIX + module) is not None or match(module) is not None, may_name)


def _after(text: str, anything: str) -> tuple[bool, str]:
    """(whether it begins with what matches anything, what follows)."""
    return text.startswith(anything), text.removeprefix(anything)


def _may_begin(literal: str, parent: str) -> bool:
    """Whether a name that goes on behind `parent` may begin with `literal`."""
    return parent.startswith(literal) or literal.startswith(parent)


def _may_lie_in(literal: str, parent: str) -> bool:
    """Whether `literal` may lie in a name that goes on behind `parent` with an expert's number and matrix."""
    return literal in parent or any(
        parent.endswith(literal[:length]) and not literal[length:].strip(_OF_AN_EXPERT)
        for length in range(len(literal) + 1)
    )


def _parts_rule(entry: str, value: T) -> _Rule[T]:
    part = f".{entry}."
    return _Rule(value, lambda module: part in f".{module}.", lambda parent: _may_lie_in(part, f".{parent}."))


def _has_choice(expression: str) -> bool:
    """Whether there may be a `|` outside of all groups."""
    if "[" in expression or "\\\\" in expression:  # where a parenthesis or a backslash may mean nothing
        return "|" in expression
    depth = 0
    for at, character in enumerate(expression):
        if expression[at - 1 : at] != "\\":
            depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "|" and depth <= 0:
            return True
    return False


def _literal_start(expression: str) -> str:
    """Characters that everything begins with that the expression matches; maybe fewer than there are."""
    start, at = "", 0
    while at < len(expression):
        step = 2 if expression[at] == "\\" and expression[at + 1 : at + 2] in (".", "-", "_") else 1
        literal = expression[at + step - 1]
        if step == 1 and not (literal.isalnum() or literal in "_-"):
            break
        if expression[at + step : at + step + 1] in ("*", "+", "?", "{"):
            break
        start, at = start + literal, at + step
    return start
