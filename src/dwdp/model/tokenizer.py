"""The tokenizer of a checkpoint folder: tokenizer.json through the `tokenizers` library, or else tiktoken.model.

Text is data: no control token is added to it, and text that looks like one stays text.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from dwdp.errors import CheckpointError, RequestError
from dwdp.model.headers import is_there, read_config, read_json
from dwdp.model.safetensors_file import file_bytes, one_line
from dwdp.model.text_stream import TextStream
from dwdp.model.tiktoken_model import MODEL_NAME, TiktokenModel, read_tiktoken_model

if TYPE_CHECKING:
    import tokenizers

_ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


class Tokenizer:
    """encode and decode; `eos_ids`: the ids that end a completion; `vocab_size` bounds every id."""

    def __init__(self, model: _JsonModel | TiktokenModel, eos_ids: tuple[int, ...]) -> None:
        self._model = model
        self.eos_ids = eos_ids

    def encode(self, text: str) -> list[int]:
        """The ids of `text`: nothing added, the text of a control token encoded as any other text."""
        return self._model.encode(text)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; special tokens are left out unless asked for."""
        return self._model.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def stream(self) -> TextStream:
        """Gives the text of ids that come one by one, in whole characters."""
        return TextStream(self.decode)


class _JsonModel:
    """tokenizer.json. plain: as it is, for decoding; encoder: without what it would add or recognise."""

    def __init__(self, plain: tokenizers.Tokenizer, encoder: tokenizers.Tokenizer) -> None:
        self._plain, self._encoder = plain, encoder

    def encode(self, text: str) -> list[int]:
        try:
            return self._encoder.encode(text, add_special_tokens=False).ids
        except BaseException as error:
            if not _is_the_librarys(error):
                raise
            raise RequestError(f"tokenizer.json has no tokens for the text: {one_line(error)}") from error

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return self._plain.decode(ids, skip_special_tokens=skip_special_tokens)


def load_tokenizer(path: str | os.PathLike, vocab_size: int) -> Tokenizer | None:
    """The tokenizer of a checkpoint folder, None when it has neither tokenizer.json (which comes first) nor
    tiktoken.model.

    CheckpointError when it cannot be read or its largest id is >= vocab_size, and, with or without one, when a bos,
    eos or pad id of config.json or generation_config.json is outside vocab_size.
    """
    eos_ids = eos_token_ids(path, vocab_size)
    folder = Path(path)
    if is_there(folder / "tokenizer.json"):
        return Tokenizer(_read_json_model(folder / "tokenizer.json", vocab_size), eos_ids)
    if is_there(folder / MODEL_NAME):
        return Tokenizer(read_tiktoken_model(folder, vocab_size), eos_ids)
    return None


def _read_json_model(file: Path, vocab_size: int) -> _JsonModel:
    import tokenizers

    raw = file_bytes(file)
    try:
        text = raw.decode()
        plain = tokenizers.Tokenizer.from_str(text)
    except BaseException as error:
        if not _is_the_librarys(error):
            raise
        raise CheckpointError(f"{file} cannot be read: {one_line(error)}") from error
    largest, token = max(((i, token) for token, i in plain.get_vocab(True).items()), default=(-1, ""))
    if largest >= vocab_size:
        raise CheckpointError(f"{file}: token {token!r} has id {largest}, the model's vocab_size is {vocab_size}")
    encoder = tokenizers.Tokenizer.from_str(_added_tokens_as_special(text))
    encoder.encode_special_tokens = True
    encoder.no_truncation()
    encoder.no_padding()
    return _JsonModel(plain, encoder)


def _is_the_librarys(error: BaseException) -> bool:
    """Whether `tokenizers` may have raised it: a bare Exception or, from a Rust panic, not even that."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def check_tokenizer(path: str | os.PathLike, vocab_size: int) -> None:
    """Raises what `load_tokenizer` would raise; for a loader that needs no tokenizer itself."""
    load_tokenizer(path, vocab_size)


def eos_token_ids(path: str | os.PathLike, vocab_size: int) -> tuple[int, ...]:
    """Every end-of-sequence id of config.json (top level and text_config) and generation_config.json, sorted.

    CheckpointError names the file, the key and the value of any bos, eos or pad id outside 0..vocab_size - 1.
    """
    folder = Path(path)
    config = read_config(folder)
    sources = [("config.json", config), ("config.json text_config", config.get("text_config"))]
    generation = folder / "generation_config.json"
    if is_there(generation):
        sources.append((generation.name, read_json(generation)))
    eos_ids: set[int] = set()
    problems: list[str] = []
    for where, values in sources:
        for key in _ID_KEYS if isinstance(values, dict) else ():
            value = values.get(key)
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if all(type(i) is int and 0 <= i < vocab_size for i in ids):
                eos_ids.update(ids if key == "eos_token_id" else ())
            else:
                problems.append(f"{folder}/{where} has {key} {value!r}, outside the vocab_size of {vocab_size}")
    if problems:
        raise CheckpointError("; ".join(problems))
    return tuple(sorted(eos_ids))


def _added_tokens_as_special(text: str) -> str:
    """tokenizer.json with every added token marked special, but for those of white space.

    `encode_special_tokens` keeps only special tokens from being matched in text, while releases leave many
    control tokens (tool calls, thinking marks) unmarked. Runs of white space are added for compression only.
    """
    data = json.loads(text)
    for token in data.get("added_tokens") or ():
        token["special"] = token.get("special", False) or bool(token.get("content", "").strip())
    return json.dumps(data)
