"""What a checkpoint folder says about itself: config.json, the index, all headers.

Imports no torch, and reads no weight.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import msgspec

from dwdp.errors import CheckpointError
from dwdp.model.safetensors_file import ReadLog, TensorEntry, file_bytes, one_line, read_header

INDEX_NAME = "model.safetensors.index.json"
MODELOPT_NAME = "hf_quant_config.json"
READ_FROM = "read_from"
"""Key of a `quantization_config` that is not config.json's own: the file that it is from."""


class Headers:
    """All headers of a checkpoint folder (one file, or an index and its shards); nothing stays open.

    `config`: config.json as a dict (see `read_config`). `files`: names, sorted. `entries`: raw tensor name ->
    TensorEntry, in (file, offset) order. Every fault of the index and of all headers is one CheckpointError line.
    """

    def __init__(self, path: str | os.PathLike, *, read_log: ReadLog | None = None) -> None:
        self.path = Path(path)
        self.config = read_config(self.path)
        weight_map = _weight_map(self.path)
        files = sorted(set(weight_map.values())) if weight_map else [_single_file(self.path)]
        known: dict[tuple, tuple] = {}
        problems: list[str] = []
        entries: dict[str, TensorEntry] = {}
        for file in files:
            try:
                found = read_header(self.path, file, read_log, known)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            own = {entry.name: entry for entry in found}
            if not entries.keys().isdisjoint(own):
                both = sorted(entries.keys() & own)
                problems += [f"tensor {name} is in both {entries[name].file} and {file}" for name in both]
            entries |= own
        # after a bad header the map cannot be checked: its complaints would only repeat the cause
        if weight_map and not problems:
            problems += _index_problems(weight_map, entries)
        if problems:
            raise CheckpointError("; ".join(sorted(problems)))
        self.files = files
        self.entries = entries

    def digest(self) -> str:
        """SHA-256 (hex) over config.json and every tensor's name, dtype and shape: cheap, no tensor is read.

        Ranks that load the same model agree on it also when their files are cut into other shards.
        """
        index = sorted((e.name, e.dtype, list(e.shape), e.nbytes) for e in self.entries.values())
        text = json.dumps([self.config, index], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def read_config(path: str | os.PathLike) -> dict:
    """config.json of a checkpoint folder; CheckpointError naming the file when absent or no JSON object.

    What ModelOpt says in a file of its own, hf_quant_config.json, becomes the `quantization_config` of a config.json
    that has none; where both speak and differ, it is refused.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a checkpoint folder")
    config = read_json(folder / "config.json")
    if not is_there(folder / MODELOPT_NAME):
        return config
    own = read_json(folder / MODELOPT_NAME)
    text = config.get("text_config")
    for holder in (config, text if isinstance(text, dict) else {}):
        if holder.get("quantization_config") is not None:
            differing = _differing(holder["quantization_config"], own)
            if differing:
                raise CheckpointError(f"{folder}: config.json and {MODELOPT_NAME} do not say the same: {differing}")
            return config
    return config | {"quantization_config": own | {READ_FROM: MODELOPT_NAME}}


def _differing(config: object, own: dict) -> str:
    """How a quantization_config and ModelOpt's own file differ, the first difference only; empty when they agree."""
    if not isinstance(config, dict):
        return ""  # refused by whoever reads it
    config, own = (c["quantization"] if isinstance(c.get("quantization"), dict) else c for c in (config, own))
    if config.get("quant_algo") != own.get("quant_algo"):
        return f"quant_algo is {config.get('quant_algo')!r} in one and {own.get('quant_algo')!r} in the other"
    tables = [c.get("quantized_layers") for c in (config, own)]
    if not all(isinstance(table, dict) for table in tables):
        return ""
    first, second = (
        {
            name.removeprefix("language_model."): entry.get("quant_algo") if isinstance(entry, dict) else entry
            for name, entry in table.items()
        }
        for table in tables
    )
    names = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
    if not names:
        return ""
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return (
        f"quantized_layers entry {names[0]!r}{more} is {first.get(names[0])!r} in one and {second.get(names[0])!r} "
        "in the other"
    )


def read_json(path: Path) -> dict:
    """The JSON object in a file; CheckpointError naming the file when there is none."""
    text = file_bytes(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value


def is_there(path: Path) -> bool:
    """Whether a folder has an entry of this name. A link to nothing is one, as a download that broke off leaves them:
    it is refused when it is read, not taken for a file that the folder does without."""
    return os.path.lexists(path)


# -- the index ----------------------------------------------------------------------------------------------------


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file of the index; empty when there is no index."""
    path = folder / INDEX_NAME
    if not is_there(path):
        return {}
    text = file_bytes(path)
    try:
        weight_map = msgspec.json.decode(text, type=_Index).weight_map
    except (msgspec.MsgspecError, ValueError, RecursionError):
        weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no 'weight_map' of tensor names to files")
    try:
        wrong = {file for file in set(weight_map.values()) if not _is_plain_name(file)}
    except TypeError:  # a list or an object in place of a name
        wrong = None
    if wrong is None or wrong:
        name, file = next((name, file) for name, file in weight_map.items() if not _is_plain_name(file))
        raise CheckpointError(f"{path} places tensor {name} in {file!r}, no file of its folder")
    missing = sorted(file for file in set(weight_map.values()) if not os.path.exists(folder / file))
    if missing:
        raise CheckpointError(f"{path} names {', '.join(missing)}, which the folder does not hold")
    return weight_map


def _is_plain_name(file: object) -> bool:
    return isinstance(file, str) and os.path.basename(file) == file and file not in ("", ".", "..")


def _single_file(folder: Path) -> str:
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    if "model.safetensors" in files:
        return "model.safetensors"
    if len(files) != 1:
        found = f"{len(files)} safetensors files and no {INDEX_NAME}" if files else "no safetensors file"
        raise CheckpointError(f"{folder} holds {found}")
    return files[0]


def _index_problems(weight_map: dict[str, str], found: dict[str, TensorEntry]) -> list[str]:
    problems = [
        f"tensor {name} is not in {file}, where {INDEX_NAME} places it"
        for name, file in weight_map.items()
        if name not in found or found[name].file != file
    ]
    if len(found) == len(weight_map) and not problems:
        return []
    problems += [
        f"tensor {entry.name} of {entry.file} is not in {INDEX_NAME}"
        for entry in found.values()
        if entry.name not in weight_map
    ]
    return problems
