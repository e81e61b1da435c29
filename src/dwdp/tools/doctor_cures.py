"""What `dwdp doctor` says to do about what it found."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from dwdp.memory.driver import FABRIC_MANAGER_CURE, IMEX_CURE

CURE_DESCRIPTORS = (
    "raise the hard limit: ulimit -Hn 65536, --ulimit nofile=65536 of a container, LimitNOFILE= of a service"
)
CURE_MAPPINGS = "raise it: sysctl -w vm.max_map_count=262144"
CURE_BYTES = (
    "do not serve on this machine: look for memory errors (dmesg, EDAC counters), and where GPUs copy for IOMMU and "
    "PCIe ACS settings"
)
CURE_SHARED = "use no more ranks than GPUs, or --allow-shared-device (dwdp.allow_shared_device), which is for tests"

CURE_TRANSFER = "do what the reason says, or switch it off: expert DWDP runs with per_slice copies everywhere"


@dataclass(frozen=True)
class Problem:
    """What is wrong and what to do about it; each one line."""

    what: str
    cure: str


def cure_of(text: str) -> str:
    """For an error's text."""
    named = re.search(r"socket folder '([^']*)'", text)
    folder = named[1] if named else "FOLDER"
    cures = (
        (r"are on one device, GPU-", CURE_SHARED),
        (r"read back wrong", CURE_BYTES),
        (r"SYSTEM_NOT_READY|CUDA_ERROR_NOT_INITIALIZED", FABRIC_MANAGER_CURE),
        (r"device is out of memory|CUDA_ERROR_OUT_OF_MEMORY", "free memory on the GPU: nvidia-smi lists who holds it"),
        (r"FABRIC handles were asked for", IMEX_CURE),
        (r"CUDA_ERROR_\w+|cuda-bindings", "see the message; nvidia-smi tells whether driver and GPUs are well"),
        (r"SCM_RIGHTS: ", "let the container pass descriptors: allow sendmsg with SCM_RIGHTS, or add CAP_SYS_PTRACE"),
        (r"has mode \d+", f"make it private: chmod 0700 {folder}, or let DWDP_SOCKET_DIR name another folder"),
        (r"must share that folder", "give every rank the same folder of mode 0700 in DWDP_SOCKET_DIR"),
        (r"DWDP_SOCKET_DIR", "let DWDP_SOCKET_DIR name a folder of your own, of mode 0700, that every rank can reach"),
        (r"TMPDIR", "let TMPDIR name a folder that you can write"),
        (r"RLIMIT_NOFILE|Too many open files|EMFILE|ulimit -n|ulimit -Hn", CURE_DESCRIPTORS),
        (r"max_map_count", CURE_MAPPINGS),
        (r"bytes available|ENOSPC|ENOMEM|No space left|Cannot allocate", "free memory, or ask for fewer ranks"),
        (r"group's store", "bring loopback up (ip link set lo up); the ranks meet over TCP on 127.0.0.1"),
    )
    other = "correct what the message names; dwdp needs Linux with memfd_create, mmap and Unix sockets"
    return next((cure for pattern, cure in cures if re.search(pattern, text)), other)


def cure_of_death(exit_code: int | None) -> str:
    if exit_code == -signal.SIGKILL:
        return "most often the kernel's or a container's memory killer (see dmesg): free memory, or use fewer ranks"
    if exit_code == -signal.SIGBUS:
        return "shared memory could not be backed: free memory, or raise the container's memory limit"
    return "see what it wrote to stderr, and dmesg"


def process_state(pid: int | None) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            letter = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "is not there"
    return {"T": "is stopped", "t": "is stopped", "D": "waits in the kernel", "R": "runs"}.get(letter, "sleeps")


def cure_of_hang(state: str) -> str:
    if state == "is stopped":
        return "find who stops it: SIGSTOP, a debugger, or a frozen container"
    if state == "waits in the kernel":
        return "see dmesg for a device or a file system that does not answer"
    return "check this machine's load (uptime) and run it again; if it stays, run it with fewer ranks"
