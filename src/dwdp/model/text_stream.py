"""Text of tokens as they come, in whole characters."""

from __future__ import annotations

from collections.abc import Callable, Iterable

REPLACEMENT = "\ufffd"
"""What decoders write for bytes that are no UTF-8; at the end of a text the first bytes of a character become one."""


class TextStream:
    """Adds up to `decode` of all ids at once. decode: ids -> text, of any tokenizer.

    Decoders may treat the beginning of a text in a way of their own, so a few tokens before the new ones are always
    decoded along, and what is new is what these do not give alone.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []  # from the tokens whose text went out last
        self._known = 0  # of these, how many went out

    def add(self, ids: Iterable[int]) -> str:
        """The text that is complete with these ids; bytes of a character that is not wait for the rest."""
        self._ids += ids
        text = self._new_text()
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._ids, self._known = self._ids[self._known :], len(self._ids) - self._known
        return text

    def end(self) -> str:
        """What still waits, as `decode` writes it."""
        text = self._new_text()
        self._known = len(self._ids)
        return text

    def _new_text(self) -> str:
        return self._decode(self._ids)[len(self._decode(self._ids[: self._known])) :]
