"""The tokenizer of a folder with `tiktoken.model`, as Kimi's models are released, through the `tiktoken` package.

tiktoken.model has a line `base64 rank` for each token; 256 control tokens lie behind the ranks, named by
`added_tokens_decoder` of tokenizer_config.json. The folder's own Python is not run: all that it adds is the pattern
below, `pat_str` of tokenization_kimi.py in moonshotai's Kimi-K2 and Kimi-K3 folders.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from dwdp.errors import CheckpointError
from dwdp.model.headers import is_there, read_json
from dwdp.model.safetensors_file import file_bytes

if TYPE_CHECKING:
    import tiktoken

MODEL_NAME = "tiktoken.model"
CONFIG_NAME = "tokenizer_config.json"
NUM_CONTROL = 256

_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]", r"\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_BEFORE, _BEHIND = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"{_BEFORE}[{_UPPER}]*[{_LOWER}]+{_BEHIND}",
        rf"{_BEFORE}[{_UPPER}]+[{_LOWER}]*{_BEHIND}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""What a text is cut into before bytes are merged, in the syntax of Rust's regular expressions."""

# [Note: long white space] tiktoken panics on half a million white characters that no line end follows, in `\s+(?!\S)`.
# That alternative takes such a run whole, less its last character where text follows; nothing else can begin in it.
# So the run is cut out and encoded as the one piece that it is.
_BLANK = "\t\v\f \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
MOST_BLANKS = 100_000


class TiktokenModel:
    """encode and decode by ranks. tokens: the bytes of each id, control tokens' text included; special: the ids that
    decoding leaves out unless asked for."""

    def __init__(self, ranks: dict[bytes, int], control: Sequence[str], special: frozenset[int]) -> None:
        import tiktoken

        self._ranks, self._special = ranks, special
        self._tokens = [*ranks, *(text.encode() for text in control)]
        self._encoding = tiktoken.Encoding("folder", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
        # only from its first blank on, and without a step back: linear in the text
        self._long = re.compile(f"(?<![{_BLANK}])[{_BLANK}]{{{MOST_BLANKS},}}+")

    def encode(self, text: str) -> list[int]:
        """The ids of `text`. No control token is ever among them: its text is encoded as any other."""
        ids: list[int] = []
        done = 0
        for run in self._long.finditer(text):  # [Note: long white space]
            if text[run.end() : run.end() + 1] in ("\r", "\n"):
                continue
            end = run.end() if run.end() == len(text) else run.end() - 1
            ids += self._encoding.encode_ordinary(text[done : run.start()])
            ids += self._whole.encode_ordinary(text[run.start() : end])
            done = end
        return ids + self._encoding.encode_ordinary(text[done:] if done else text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; ids of no token are left out. Bytes that are no UTF-8 become U+FFFD."""
        left_out = self._special if skip_special_tokens else ()
        known = (self._tokens[i] for i in ids if 0 <= i < len(self._tokens) and i not in left_out)
        return b"".join(known).decode("utf-8", errors="replace")

    @cached_property
    def _whole(self) -> tiktoken.Encoding:
        """Takes any text as one piece."""
        import tiktoken

        return tiktoken.Encoding("whole", pat_str=r"[\s\S]+", mergeable_ranks=self._ranks, special_tokens={})


def read_tiktoken_model(folder: Path, vocab_size: int) -> TiktokenModel:
    """The tokenizer of a folder that has tiktoken.model.

    CheckpointError, one line: for a line that is no token and rank, ranks with gaps, a byte without a token, ids at or
    over vocab_size, and an `added_tokens_decoder` that names an id which is no control token's.
    """
    ranks = _read_ranks(folder / MODEL_NAME)
    end = len(ranks) + NUM_CONTROL
    if end > vocab_size:
        raise CheckpointError(
            f"{folder / MODEL_NAME}: {len(ranks)} ranks and {NUM_CONTROL} control tokens reach id {end - 1}, the "
            f"model's vocab_size is {vocab_size}"
        )
    named, plain = _added_tokens(folder / CONFIG_NAME, len(ranks), end)
    control = [named.get(i, f"<|reserved_token_{i}|>") for i in range(len(ranks), end)]
    return TiktokenModel(ranks, control, frozenset(range(len(ranks), end)) - plain)


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Token -> rank, in the order of the ranks."""
    lines = file_bytes(path).splitlines()
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            token, value = base64.b64decode(token, validate=True), int(rank)
        except (ValueError, binascii.Error):
            raise CheckpointError(f"{path} line {number} is no base64 token with its rank: {line[:80]!r}") from None
        if not token or value < 0 or token in ranks:
            why = "is there already" if token in ranks else "has no bytes or a rank below 0"
            raise CheckpointError(f"{path} line {number}: token {token[:80]!r} {why}")
        ranks[token] = value
    ranks = dict(sorted(ranks.items(), key=lambda item: item[1]))
    wrong = next((i for i, rank in enumerate(ranks.values()) if rank != i), None)
    if wrong is not None:
        raise CheckpointError(f"{path} of {len(ranks)} tokens has none with rank {wrong}, or two with another rank")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise CheckpointError(f"{path} has no token for {len(missing)} single bytes, {missing[0]:#04x} the first")
    return ranks


def _added_tokens(path: Path, start: int, end: int) -> tuple[dict[int, str], set[int]]:
    """id -> text of the control tokens that tokenizer_config.json names, and those of them that are not special."""
    if not is_there(path):
        return {}, set()
    added = read_json(path).get("added_tokens_decoder") or {}
    if not isinstance(added, dict):
        raise CheckpointError(f"{path} added_tokens_decoder is not an object of ids")
    named: dict[int, str] = {}
    plain: set[int] = set()
    for key, token in added.items():
        text = token.get("content") if isinstance(token, dict) else token
        if not (key.isascii() and key.isdigit() and len(key) < 20) or not _is_text(text):
            shown = f"{key[:80]!r} is no id with its content: {repr(token)[:200]}"
            raise CheckpointError(f"{path} added_tokens_decoder entry {shown}")
        if not start <= int(key) < end:
            raise CheckpointError(
                f"{path} added_tokens_decoder names id {key} ({text!r}), which is no control token: these are "
                f"{start} to {end - 1}, behind the ranks of {MODEL_NAME}"
            )
        if int(key) in named:
            raise CheckpointError(f"{path} added_tokens_decoder names id {int(key)} twice")
        named[int(key)] = text
        if isinstance(token, dict) and token.get("special") is False:
            plain.add(int(key))
    if len(set(named.values())) < len(named):
        twice = next(text for text in named.values() if list(named.values()).count(text) > 1)
        raise CheckpointError(f"{path} added_tokens_decoder gives {twice!r} two ids")
    return named, plain


def _is_text(value: object) -> bool:
    """Whether it has characters, and no surrogate alone: that is no character, and no bytes."""
    return isinstance(value, str) and value != "" and not any("\ud800" <= one <= "\udfff" for one in value)
