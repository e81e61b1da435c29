"""The system calls of the host memory domain; each failure is a `MemoryDomainError` that says what to do.

`HostCalls` is one object per domain, so that a test can make one call of one rank fail.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import sys

from dwdp.errors import MemoryDomainError

PROT_NONE, PROT_READ, PROT_WRITE = 0, 1, 2
MAP_SHARED, MAP_PRIVATE, MAP_FIXED, MAP_ANONYMOUS = 0x01, 0x02, 0x10, 0x20
MAP_NORESERVE, MAP_FIXED_NOREPLACE = 0x4000, 0x100000
MAP_FAILED = ctypes.c_void_p(-1).value

F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_FUTURE_WRITE = 0x02, 0x04, 0x10

HOLE = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE

CURES = {
    ("memfd_create", errno.EMFILE): "raise the descriptor limit (ulimit -n) or use larger pages",
    ("memfd_create", errno.ENFILE): "raise fs.file-max",
    ("posix_fallocate", errno.ENOSPC): "free host memory, use more ranks, or declare a smaller model",
    ("posix_fallocate", errno.ENOMEM): "free host memory, use more ranks, or declare a smaller model",
    ("mmap", errno.ENOMEM): "raise vm.max_map_count or use larger pages (page_granules); check ulimit -v",
    ("mmap", errno.EPERM): "the memory is sealed against writable maps by its owner: map it read-only",
    ("mmap", errno.EACCES): "the descriptor does not allow this access: map it read-only",
    ("mmap", errno.EAGAIN): "raise the limit of locked memory (ulimit -l)",
}


def call_error(call: str, code: int, detail: str) -> MemoryDomainError:
    """The error of a failed `call` with errno `code`; `detail` has the names and sizes."""
    name = errno.errorcode.get(code, str(code))
    cure = CURES.get((call, code), "see the manual page of the call for this result")
    error = MemoryDomainError(f"{call} failed with {name} ({os.strerror(code)}) for {detail}; {cure}")
    error.errno = code
    return error


class HostCalls:
    """memfd and mmap calls. Addresses and sizes in bytes."""

    def __init__(self) -> None:
        if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
            raise MemoryDomainError(
                f"the host memory domain needs Linux (memfd_create and mmap), this is {sys.platform}"
            )
        libc = ctypes.CDLL(None, use_errno=True)
        self._mmap, self._munmap = libc.mmap, libc.munmap
        self._mmap.restype = ctypes.c_void_p
        self._mmap.argtypes = [
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
        ]  # fmt: skip
        self._munmap.restype = ctypes.c_int
        self._munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def memfd(self, name: str, nbytes: int) -> int:
        """A new memfd of `nbytes`, all of it allocated, of fixed size. Returns the descriptor."""
        try:
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise call_error("memfd_create", error.errno, f"{name} of {nbytes} bytes") from error
        try:
            # Allocated here and not at first touch: a shortage is an error now, not a SIGBUS in a copy.
            os.posix_fallocate(fd, 0, nbytes)
            # A peer that could shrink the file would turn our reads into SIGBUS.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, OSError):
                raise call_error("posix_fallocate", error.errno, f"{name} of {nbytes} bytes") from error
            raise
        return fd

    def seal_future_writes(self, fd: int, what: str) -> None:
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
        except OSError as error:
            raise call_error("fcntl(F_ADD_SEALS, F_SEAL_FUTURE_WRITE)", error.errno, what) from error

    def close_fd(self, fd: int) -> None:
        os.close(fd)

    def mmap(self, address: int, nbytes: int, prot: int, flags: int, fd: int, what: str) -> int:
        """The plain call, offset 0. Returns the address."""
        result = self._mmap(address or None, nbytes, prot, flags, fd, 0)
        if result == MAP_FAILED:
            raise call_error("mmap", ctypes.get_errno(), f"{what} of {nbytes} bytes")
        return result

    def munmap(self, address: int, nbytes: int) -> None:
        if self._munmap(address, nbytes) != 0:
            raise call_error("munmap", ctypes.get_errno(), f"{nbytes} bytes at {address:#x}")


def available_bytes() -> int:
    """MemAvailable of this host in bytes."""
    with open("/proc/meminfo", "rb") as file:
        for line in file:
            if line.startswith(b"MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise MemoryDomainError("/proc/meminfo has no MemAvailable line; declare host_memory_bytes")


def max_map_count() -> int:
    """vm.max_map_count of this host (65,530, the kernel's default, where it cannot be read)."""
    try:
        with open("/proc/sys/vm/max_map_count", "rb") as file:
            return int(file.read())
    except OSError:
        return 65530


def raise_descriptor_limit() -> int:
    """Raise RLIMIT_NOFILE to its hard limit; returns the limit that then holds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):
            pass  # the soft limit holds; the budget is computed from it
    return soft if soft != resource.RLIM_INFINITY else 1 << 30
