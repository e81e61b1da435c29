"""A checkpoint folder on disk: config.json, safetensors headers, byte ranges, plain reads.

Files are read with `preadv` into memory that the caller owns. Nothing is ever mapped: one tensor of a mapped
file keeps the whole file's pages accounted to the process.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dwdp.errors import CheckpointError

# file name, offset in the file, bytes: called once for every read, headers included
ReadLog = Callable[[str, int, int], None]

INDEX_NAME = "model.safetensors.index.json"
_MAX_HEADER_NBYTES = 100_000_000  # the format's own limit
_MAX_READ_NBYTES = 1 << 30  # Linux moves at most 2 GiB - 4 KiB a call

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: `offset` is counted from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int

    def describe(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class Checkpoint:
    """The headers of a checkpoint folder (one file, or an index and its shards). Context manager.

    `config`: config.json as a dict. `entries`: raw tensor name -> TensorEntry, in (file, offset) order.
    Every fault of config.json, of the index and of all headers is one CheckpointError line.
    """

    def __init__(self, path: str | os.PathLike, *, read_log: ReadLog | None = None) -> None:
        self.path = Path(path)
        self._read_log = read_log
        self._open: tuple[str, int] | None = None
        self.config = read_config(self.path)
        weight_map = self._weight_map()
        files = sorted(set(weight_map.values())) if weight_map else [self._single_file()]
        problems: list[str] = []
        found: dict[str, TensorEntry] = {}
        try:
            for file in files:
                try:
                    for entry in self._read_header(file):
                        if entry.name in found:
                            other = found[entry.name].file
                            problems.append(f"tensor {entry.name} is in both {other} and {file}")
                        found[entry.name] = entry
                except CheckpointError as error:
                    problems.append(str(error))
            # after a bad header the map cannot be checked: its complaints would only repeat the cause
            if weight_map and not problems:
                problems += _index_problems(weight_map, found)
            if problems:
                raise CheckpointError("; ".join(sorted(problems)))
        except BaseException:
            self.close()
            raise
        self.files = files
        self.entries = dict(sorted(found.items(), key=lambda item: (item[1].file, item[1].offset, item[0])))

    def read_into(self, entry: TensorEntry, out: Tensor) -> None:
        """Reads one tensor's bytes into `out`: contiguous CPU memory of exactly the tensor's bytes."""
        if out.device.type != "cpu" or not out.is_contiguous() or out.nbytes != entry.nbytes:
            raise ValueError(f"{entry.name}: {entry.nbytes} bytes do not go into these {out.nbytes}")
        if entry.nbytes:
            raw = out.detach().reshape(-1).view(torch.uint8)
            self._pread(entry.file, entry.offset, memoryview(raw.numpy()), f"tensor {entry.name}")

    def read_elements(self, entry: TensorEntry, start: int, out: Tensor) -> None:
        """Reads elements from `start` on of a tensor, flattened, into `out`: CPU memory, 1-d, of the tensor's dtype."""
        if out.dtype != DTYPES[entry.dtype] or not 0 <= start * out.itemsize <= entry.nbytes - out.nbytes:
            raise ValueError(f"{entry.name}: {out.numel()} elements of {out.dtype} from {start} are not in it")
        if out.numel():
            raw = memoryview(out.view(torch.uint8).numpy())
            self._pread(entry.file, entry.offset + start * out.itemsize, raw, f"tensor {entry.name}")

    def read(self, entry: TensorEntry) -> Tensor:
        """One tensor in the checkpoint's dtype and shape, in fresh CPU memory."""
        out = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        self.read_into(entry, out)
        return out

    def digest(self) -> str:
        """SHA-256 (hex) over config.json and every tensor's name, dtype and shape: cheap, no tensor is read.

        Ranks that load the same model agree on it also when their files are cut into other shards.
        """
        index = sorted((e.name, e.dtype, list(e.shape), e.nbytes) for e in self.entries.values())
        text = json.dumps([self.config, index], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def close(self) -> None:
        if self._open is not None:
            os.close(self._open[1])
            self._open = None

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _weight_map(self) -> dict[str, str]:
        """Tensor name -> file of the index; empty when there is no index."""
        path = self.path / INDEX_NAME
        if not path.exists():
            return {}
        weight_map = read_json(path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{path} has no 'weight_map' of tensor names to files")
        for name, file in weight_map.items():
            if not isinstance(file, str) or os.path.basename(file) != file or file in ("", ".", ".."):
                raise CheckpointError(f"{path} places tensor {name} in {file!r}, no file of its folder")
        missing = sorted(file for file in set(weight_map.values()) if not (self.path / file).exists())
        if missing:
            raise CheckpointError(f"{path} names {', '.join(missing)}, which the folder does not hold")
        return weight_map

    def _single_file(self) -> str:
        files = sorted(file.name for file in self.path.glob("*.safetensors"))
        if "model.safetensors" in files:
            return "model.safetensors"
        if len(files) != 1:
            found = f"{len(files)} safetensors files and no {INDEX_NAME}" if files else "no safetensors file"
            raise CheckpointError(f"{self.path} holds {found}")
        return files[0]

    def _read_header(self, file: str) -> list[TensorEntry]:
        path = self.path / file
        size = self._file_size(file)
        if size < 8:
            raise CheckpointError(f"{path} is truncated: {size} bytes, and a header's length alone takes 8")
        length = int.from_bytes(self._read_bytes(file, 0, 8), "little")
        if length > _MAX_HEADER_NBYTES or 8 + length > size:
            raise CheckpointError(
                f"{path} has a bad header or is truncated: it declares a header of {length} bytes in a file "
                f"of {size} bytes"
            )
        try:
            header = json.loads(self._read_bytes(file, 8, length), object_pairs_hook=_unique_keys)
        except (ValueError, RecursionError) as error:  # of the JSON, of its UTF-8, of a repeated name
            raise CheckpointError(f"{path} has a bad header: {_one_line(error)}") from error
        if not isinstance(header, dict):
            raise CheckpointError(f"{path} has a bad header: not a JSON object")
        header.pop("__metadata__", None)
        problems: list[str] = []
        entries: list[TensorEntry] = []
        for name, info in header.items():
            try:
                entries.append(_entry(file, name, info, 8 + length))
            except ValueError as error:
                problems.append(f"{path} tensor {name}: {error}")
        problems += _layout_problems(path, entries, 8 + length, size)
        if problems:
            raise CheckpointError("; ".join(problems))
        return entries

    def _descriptor(self, file: str) -> int:
        # one open file at a time: readers go through a checkpoint file by file
        if self._open is None or self._open[0] != file:
            self.close()
            path = self.path / file
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from error
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                raise CheckpointError(f"{path} is not a regular file")
            self._open = (file, fd)
        return self._open[1]

    def _file_size(self, file: str) -> int:
        return os.fstat(self._descriptor(file)).st_size

    def _read_bytes(self, file: str, offset: int, nbytes: int) -> bytes:
        out = bytearray(nbytes)
        if nbytes:
            self._pread(file, offset, memoryview(out), "its header")
        return bytes(out)

    def _pread(self, file: str, offset: int, out: memoryview, what: str) -> None:
        fd = self._descriptor(file)
        if self._read_log is not None:
            self._read_log(file, offset, len(out))
        done = 0
        while done < len(out):
            try:
                count = os.preadv(fd, [out[done : done + _MAX_READ_NBYTES]], offset + done)
            except OSError as error:
                reason = f"{what} cannot be read: {error.strerror}"
                raise CheckpointError(f"{self.path / file}: {reason}") from error
            if count == 0:  # the file shrank after its header was checked
                raise CheckpointError(
                    f"{self.path / file} is truncated: {what} ends at byte {offset + len(out)}, the file "
                    f"at {self._file_size(file)}"
                )
            done += count


def read_config(path: str | os.PathLike) -> dict:
    """config.json of a checkpoint folder; CheckpointError naming the file when absent or no JSON object."""
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a checkpoint folder")
    return read_json(folder / "config.json")


def checkpoint_digest(path: str | os.PathLike) -> str:
    """`Checkpoint.digest` of a folder."""
    with Checkpoint(path) as checkpoint:
        return checkpoint.digest()


def read_json(path: Path) -> dict:
    """The JSON object in a file; CheckpointError naming the file when there is none."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {_one_line(error)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value


def _one_line(error: Exception) -> str:
    return "; ".join(str(error).splitlines())


def _unique_keys(pairs: list[tuple[str, object]]) -> dict:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        repeated = sorted({key for key, _ in pairs if key in seen or seen.add(key)})
        raise ValueError(f"{', '.join(repeated)} appears twice")
    return result


def _entry(file: str, name: str, info: object, data_start: int) -> TensorEntry:
    if not isinstance(info, dict):
        raise ValueError("its entry is not an object")
    dtype, shape, offsets = info.get("dtype"), info.get("shape"), info.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}")
    if not _naturals(shape):
        raise ValueError(f"bad shape {shape!r}")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"bad data_offsets {offsets!r}")
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise ValueError(f"{dtype} {shape} takes {nbytes} bytes, data_offsets span {offsets[1] - offsets[0]}")
    return TensorEntry(name, dtype, tuple(shape), file, data_start + offsets[0], nbytes)


def _naturals(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _layout_problems(path: Path, entries: list[TensorEntry], data_start: int, size: int) -> list[str]:
    """The data section holds the tensors without overlap, gap or surplus (the format's own rule)."""
    problems: list[str] = []
    end, previous = data_start, None
    ordered = sorted(entries, key=lambda e: (e.offset, e.nbytes))
    cut = [entry for entry in ordered if entry.offset + entry.nbytes > size]
    if cut:
        last, ends = cut[-1].name, cut[-1].offset + cut[-1].nbytes
        text = f"{path} is truncated: tensor {last} ends at byte {ends} of a file of {size} bytes"
        # A cut file lacks everything behind the cut; thousands of names would say no more than their number.
        more = f", and {len(cut) - 1} tensors before it are cut off too" if len(cut) > 1 else ""
        problems.append(text + more)
    for entry in ordered:
        if entry.offset < end:
            problems.append(
                f"{path} tensor {entry.name} at byte {entry.offset} overlaps {previous}, which ends at {end}"
            )
        elif entry.offset > end:
            problems.append(f"{path} has {entry.offset - end} bytes of no tensor before {entry.name}")
        if entry.offset + entry.nbytes > end:
            end, previous = entry.offset + entry.nbytes, entry.name
    if not problems and end < size:
        problems.append(f"{path} has {size - end} bytes behind its last tensor, which ends at byte {end}")
    return problems


def _index_problems(weight_map: dict[str, str], found: dict[str, TensorEntry]) -> list[str]:
    problems = [
        f"tensor {name} is not in {file}, where {INDEX_NAME} places it"
        for name, file in weight_map.items()
        if name not in found or found[name].file != file
    ]
    problems += [
        f"tensor {entry.name} of {entry.file} is not in {INDEX_NAME}"
        for entry in found.values()
        if entry.name not in weight_map
    ]
    return problems
