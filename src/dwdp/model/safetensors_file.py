"""The header of one safetensors file: where each tensor lies, checked; and reads from such a file. No torch.

A header is decoded and checked on a fast path, and whatever that path does not like goes through a slow one that says
what is wrong.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Iterable
from operator import attrgetter
from pathlib import Path
from typing import Annotated

import msgspec

from dwdp.errors import CheckpointError

# file name, offset in the file, bytes: called once for every read, headers included
ReadLog = Callable[[str, int, int], None]

ITEMSIZE = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "I16": 2,
    "I32": 4,
    "I64": 8,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F16": 2,
    "BF16": 2,
    "F32": 4,
    "F64": 8,
}
"""Name of a dtype in a header -> bytes of one element."""

_MAX_HEADER_NBYTES = 100_000_000  # the format's own limit
_MAX_DIMS = 64  # of a shape; a header of nothing else would be multiplied out for hours
_MAX_SIZE = 1 << 63  # of a dimension, and of a tensor's bytes
_MAX_READ_NBYTES = 1 << 30  # Linux moves at most 2 GiB - 4 KiB a call


class TensorEntry(msgspec.Struct, frozen=True, gc=False):
    """Where one tensor lies: `offset` is counted from the start of the file. A million of them cost the garbage
    collector nothing."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    def describe(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def open_file(path: Path) -> int:
    """A descriptor of a regular file for reading; CheckpointError naming it when there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointError(f"{path} is not a regular file")
    return fd


def file_bytes(path: Path) -> bytes:
    """All of a regular file; CheckpointError naming it when it cannot be read. A pipe or device is refused, which might
    never end."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise CheckpointError(f"{path} cannot be read: it is not a regular file")
            with open(fd, "rb", closefd=False) as file:
                return file.read()
        finally:
            os.close(fd)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def read_at(fd: int, path: Path, offset: int, out: memoryview, what: str) -> None:
    """Fills `out` from `offset` on; CheckpointError for a file that ends before or cannot be read. what: is read."""
    done = 0
    while done < len(out):
        try:
            count = os.preadv(fd, [out[done : done + _MAX_READ_NBYTES]], offset + done)
        except OSError as error:
            raise CheckpointError(f"{path}: {what} cannot be read: {error.strerror}") from error
        if count == 0:  # the file shrank after its header was checked
            raise CheckpointError(
                f"{path} is truncated: {what} ends at byte {offset + len(out)}, the file at {os.fstat(fd).st_size}"
            )
        done += count


_Natural = Annotated[int, msgspec.Meta(ge=0)]


class _Info(msgspec.Struct, gc=False):
    dtype: str = ""
    shape: tuple[_Natural, ...] = ()
    data_offsets: tuple[_Natural, ...] = ()


_HEADER = msgspec.json.Decoder(dict[str, _Info])


def read_header(folder: Path, file: str, read_log: ReadLog | None, known: dict[tuple, tuple]) -> list[TensorEntry]:
    """The tensors of a file in the order of their offsets. known: (dtype, shape) -> both and their bytes, filled here,
    so that a million entries share the shapes that they have in common."""
    path = folder / file
    fd = open_file(path)
    try:
        size = os.fstat(fd).st_size

        def read(offset: int, nbytes: int) -> bytes:
            out = bytearray(nbytes)
            if nbytes:
                if read_log is not None:
                    read_log(file, offset, nbytes)
                read_at(fd, path, offset, memoryview(out), "its header")
            return bytes(out)

        if size < 8:
            raise CheckpointError(f"{path} is truncated: {size} bytes, and a header's length alone takes 8")
        length = int.from_bytes(read(0, 8), "little")
        if length > _MAX_HEADER_NBYTES or 8 + length > size:
            raise CheckpointError(
                f"{path} has a bad header or is truncated: it declares a header of {length} bytes in a file "
                f"of {size} bytes"
            )
        header = read(8, length)
    finally:
        os.close(fd)
    entries = _fast_entries(file, header, 8 + length, size, known)
    return _slow_entries(path, header, 8 + length, size) if entries is None else entries


def _fast_entries(
    file: str, header: bytes, data_start: int, size: int, known: dict[tuple, tuple]
) -> list[TensorEntry] | None:
    """None for whatever is not as it should be, and now and then for what is."""
    try:
        infos = _HEADER.decode(header)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    infos.pop("__metadata__", None)
    # The decoder keeps the last of several equal names; each has its offsets, so that counting these finds it.
    if header.count(b'"data_offsets"') != len(infos):
        return None
    entries = []
    for name, info in infos.items():
        key = (info.dtype, info.shape)
        shared = known.get(key)
        if shared is None:
            if info.dtype not in ITEMSIZE or len(info.shape) > _MAX_DIMS:
                return None
            if max(info.shape, default=0) >= _MAX_SIZE:
                return None
            shared = known[key] = (*key, math.prod(info.shape) * ITEMSIZE[info.dtype])
        dtype, shape, nbytes = shared
        if len(info.data_offsets) != 2:
            return None
        begin, end = info.data_offsets
        if end - begin != nbytes:
            return None
        entries.append(TensorEntry(name, dtype, shape, file, data_start + begin, nbytes))
    entries.sort(key=attrgetter("offset", "nbytes"))
    end = data_start
    for entry in entries:
        if entry.offset != end:
            return None
        end += entry.nbytes
    return entries if end == size else None


def _slow_entries(path: Path, text: bytes, data_start: int, size: int) -> list[TensorEntry]:
    try:
        header = json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:  # of the JSON, of its UTF-8, of a repeated name
        raise CheckpointError(f"{path} has a bad header: {one_line(error)}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a bad header: not a JSON object")
    header.pop("__metadata__", None)
    problems: list[str] = []
    entries: list[TensorEntry] = []
    for name, info in header.items():
        try:
            entries.append(_entry(path.name, name, info, data_start))
        except ValueError as error:
            problems.append(f"{path} tensor {name}: {error}")
    entries.sort(key=attrgetter("offset", "nbytes"))
    problems += _layout_problems(path, entries, data_start, size)
    if problems:
        raise CheckpointError("; ".join(problems))
    return entries


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
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        raise ValueError(f"unknown dtype {_short(dtype)}")
    if not _naturals(shape) or len(shape) > _MAX_DIMS:
        raise ValueError(f"bad shape {_short(shape)}")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"bad data_offsets {_short(offsets)}")
    nbytes = math.prod(shape) * ITEMSIZE[dtype]
    if nbytes >= _MAX_SIZE:
        raise ValueError(f"bad shape {_short(shape)}: no file holds as many bytes")
    if offsets[1] - offsets[0] != nbytes:
        raise ValueError(f"{dtype} {shape} takes {nbytes} bytes, data_offsets span {offsets[1] - offsets[0]}")
    return TensorEntry(name, dtype, tuple(shape), file, data_start + offsets[0], nbytes)


def _naturals(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < _MAX_SIZE for value in values)


def _short(value: object) -> str:
    """Of a value that may be as long as a header."""
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."


def _layout_problems(path: Path, ordered: Iterable[TensorEntry], data_start: int, size: int) -> list[str]:
    """The data section holds the tensors without overlap, gap or surplus (the format's own rule)."""
    problems: list[str] = []
    end, previous = data_start, None
    cut = [entry for entry in ordered if entry.end > size]
    if cut:
        last, ends = cut[-1].name, cut[-1].end
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
        if entry.end > end:
            end, previous = entry.end, entry.name
    if not problems and end < size:
        problems.append(f"{path} has {size - end} bytes behind its last tensor, which ends at byte {end}")
    return problems


def one_line(error: Exception) -> str:
    return "; ".join(str(error).splitlines())
