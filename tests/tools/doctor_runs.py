"""Small runs of the doctor with faults planted in its ranks, on the host and on fake GPUs.

A fault is planted by a probe of the test's own, which hands `doctor_probe.main` a faulty memory or a faulty way to
take a descriptor. Buffers are small: only the faults are looked at, not the rates.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from dwdp.tools import doctor

SMALL = 256 << 10

FAULTY = """
import errno, os, signal, sys
sys.path.insert(0, ROOT)
from dwdp.tools import doctor_memory, doctor_probe

rank = int(sys.argv[sys.argv.index("--rank") + 1])

def refused(pid, fd):
    raise OSError(errno.EPERM, f"pidfd_getfd(pid {pid}, descriptor {fd}): Operation not permitted")

def wrong_byte(slices):
    import ctypes
    last = slices[-1].dst + slices[-1].nbytes - 1
    ctypes.memset(last, ctypes.c_ubyte.from_address(last).value ^ 0xFF, 1)

def killed(slices):
    os.kill(os.getpid(), signal.SIGKILL)

def stopped(slices):
    os.kill(os.getpid(), signal.SIGSTOP)

def copying_with(fault, memory):
    class Faulty(memory):
        def copy(self, slices):
            super().copy(slices)
            if rank == 1:
                fault(slices)
    return {"memory": Faulty}

def on_fake_gpus(gpu=rank, compiler=lambda *arguments: b"cubin", machine=None, **options):
    from tests.memory.fake_driver import FakeCudaDomain, FakeDriver, FakeMachine
    class OnFake(doctor_memory.CudaMemory):
        def open_domain(self):
            driver = FakeDriver(FakeMachine(gpu_bytes=1 << 30, **(machine or {})), visible=gpus, **options)
            budget = {"page_granules": self.config.page_granules, "handle_type": self.config.handle_type}
            return FakeCudaDomain(rank, index, driver=driver, **budget)
    gpus, index = (range(8), gpu) if isinstance(gpu, int) else (gpu, 0)
    OnFake.compiler = staticmethod(compiler)
    return OnFake

def no_rights():
    from dwdp.group import descriptors
    send = descriptors.send_fds
    def refuse(sock, fds, payload, **flags):
        if fds:
            raise OSError(errno.EACCES, "SCM_RIGHTS is not allowed here")
        send(sock, fds, payload, **flags)
    descriptors.send_fds = refuse
    descriptors.take_fd = refused

host = doctor_memory.HostMemory
seams = {}
PLANT
os._exit(doctor_probe.main(sys.argv[1:], **seams))
""".replace("ROOT", repr(str(Path(__file__).parents[2])))


def faulty(plant: str) -> list[str]:
    return ["-P", "-c", FAULTY.replace("PLANT", plant)]


def examine(tmp_path, monkeypatch, ranks: int, **seams) -> dict:
    """The document of a small run that leaves no process, descriptor and file behind."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = open_files()
    document = doctor.examine(ranks, nbytes=SMALL, **seams)
    assert [name for name in os.listdir(tmp_path) if name.startswith("dwdp-")] == []
    assert open_files() == before
    pids = {pid for pair in document["pairs"] for pid in pair["pids"]}
    assert len(pids) == ranks and not any(map(alive, pids))
    assert json.loads(json.dumps(document)) == document
    assert all(problem["what"] and problem["cure"] for problem in document["problems"])
    assert document["verdict"] == ("problems" if document["problems"] else "ok")
    return document


def open_files() -> int:
    """Of this process, but for pipes: torch's launcher keeps one for the life of a process."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += not os.readlink(f"/proc/self/fd/{name}").startswith("pipe:")
        except FileNotFoundError:
            pass  # the one of the listing itself
    return count


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def whats(document: dict) -> list[str]:
    return [problem["what"] for problem in document["problems"]]


def check_wrong_byte(document: dict) -> None:
    """Of `wrong_byte` between two ranks: the pair, the byte and the cure are told, and no other pair is."""
    assert {(pair["source"], pair["target"]): pair["bytes_ok"] for pair in document["pairs"]} == {
        (0, 1): False, (1, 0): True,
    }  # fmt: skip
    (problem,) = document["problems"]
    assert problem["what"].startswith("the copy of rank 0's memory in rank 1 differs from byte 262,143 of 262,144 on")
    assert "the mapping reads right" in problem["what"] and "IOMMU" in problem["cure"]
