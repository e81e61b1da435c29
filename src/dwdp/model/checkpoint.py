"""Reading the tensors of a checkpoint folder: plain reads of byte ranges into memory that the caller owns.

Nothing is ever mapped: one tensor of a mapped file keeps the whole file's pages accounted to the process.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from dwdp.model.headers import Headers
from dwdp.model.safetensors_file import ReadLog, TensorEntry, open_file, read_at

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


class Checkpoint:
    """A checkpoint folder whose headers have been read and checked (see `Headers`). Context manager.

    `config`: config.json as a dict. `files`: names, sorted. `entries`: raw tensor name -> TensorEntry, in
    (file, offset) order. Every fault of config.json, of the index and of all headers is one CheckpointError line.
    """

    def __init__(self, path: str | os.PathLike, *, read_log: ReadLog | None = None) -> None:
        self._headers = Headers(path, read_log=read_log)
        self.path, self.config = self._headers.path, self._headers.config
        self.files, self.entries = self._headers.files, self._headers.entries
        self._read_log = read_log
        self._open: tuple[str, int] | None = None

    def read_into(self, entry: TensorEntry, out: Tensor) -> None:
        """Reads one tensor's bytes into `out`: contiguous CPU memory of exactly the tensor's bytes."""
        if out.device.type != "cpu" or not out.is_contiguous() or out.nbytes != entry.nbytes:
            raise ValueError(f"{entry.name}: {entry.nbytes} bytes do not go into these {out.nbytes}")
        if entry.nbytes:
            raw = out.detach().reshape(-1).view(torch.uint8)
            self._pread(entry.file, entry.offset, memoryview(raw.numpy()), f"tensor {entry.name}")

    def read(self, entry: TensorEntry) -> Tensor:
        """One tensor in the checkpoint's dtype and shape, in fresh CPU memory."""
        out = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        self.read_into(entry, out)
        return out

    def digest(self) -> str:
        """SHA-256 (hex) over config.json and every tensor's name, dtype and shape (see `Headers.digest`)."""
        return self._headers.digest()

    def close(self) -> None:
        if self._open is not None:
            os.close(self._open[1])
            self._open = None

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _descriptor(self, file: str) -> int:
        # one open file at a time: readers go through a checkpoint file by file
        if self._open is None or self._open[0] != file:
            self.close()
            self._open = (file, open_file(self.path / file))
        return self._open[1]

    def _pread(self, file: str, offset: int, out: memoryview, what: str) -> None:
        fd = self._descriptor(file)
        if self._read_log is not None:
            self._read_log(file, offset, len(out))
        read_at(fd, self.path / file, offset, out, what)


def checkpoint_digest(path: str | os.PathLike) -> str:
    """`Headers.digest` of a folder."""
    return Headers(path).digest()
