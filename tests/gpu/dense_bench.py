"""One rank of the measurements: its rows of the table, its ranks of the executor, and what the GPU's memory holds."""

from __future__ import annotations

import contextlib
import gc
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from dwdp.executor import memory
from dwdp.executor.create import RankExecutor, build_rank
from dwdp.executor.settings import resolve
from dwdp.group.backends import StoreGroup
from dwdp.runtime.setup_experts import outside_bytes
from tests.gpu import nvml
from tests.gpu.ranks import Site

CACHES = 512 << 20  # bytes that libraries may keep for good on the GPU
GIB = 1 << 30


class Bench:
    """rows: (what, measured, verdict), the verdict "", right, WRONG, met or MISSED. numbers: the same for JSON.
    failed: checks that do not hold. options: of the command line; started: time.time() when it began."""

    def __init__(self, site: Site, options: dict[str, Any], started: float) -> None:
        self.site, self.options, self.started = site, options, started
        self.fake: bool = options["fake"]
        self.rows: list[tuple[str, str, str]] = []
        self.numbers: dict[str, Any] = {}
        self.failed: list[str] = []
        self.device = torch.device("cpu") if self.fake else torch.device("cuda", 0)
        self.base = {"used": 0, "torch": 0, "nvml": None}  # before any weight: contexts and kernels
        self._case, self._groups = "start", 0

    # ---- rows ----

    def say(self, name: str, value: object, verdict: str = "", **numbers: Any) -> None:
        self.rows.append((name, str(value), verdict))
        self.numbers |= {f"{self._case}: {key}": number for key, number in numbers.items()}
        if self.site.rank == 0:
            print(f"  [{self.elapsed:5.1f} s] {name}: {value} {verdict}", flush=True)

    def check(self, name: str, holds: bool, value: object, **numbers: Any) -> None:
        """Of bytes and their equality: a failure fails the run."""
        self.say(name, value, "right" if holds else "WRONG", **numbers)
        if not holds:
            self.failed.append(f"rank {self.site.rank}: {name} ({value})")

    def target(self, name: str, holds: bool, value: object, **numbers: Any) -> None:
        self.say(name, value, "met" if holds or self.fake else "MISSED", **numbers)

    @property
    def elapsed(self) -> float:
        return time.time() - self.started

    # ---- cases ----

    def case(self, name: str, seconds: float, body: Callable[[Bench, StoreGroup], None]) -> None:
        """Runs body(self, group of its own) on every rank unless fewer than `seconds` are left; goes on behind what it
        raises."""
        self._case, self._groups = name, 0
        with self.group() as meet:
            self.meet = meet
            meet.join({})
            try:
                if not self.time_left(meet, seconds):
                    self.say(name, "skipped, too little time is left")
                else:
                    body(self, meet)
            except BaseException as error:
                traceback.print_exc()
                lines = f"{type(error).__name__}: {error}".splitlines()
                meet.abort(lines[0])
                self.check(name, False, lines[0])
                traceback.clear_frames(error.__traceback__)
        self.empty()

    def time_left(self, meet: StoreGroup, seconds: float) -> bool:
        """Whether so many seconds are left, by the clock of rank 0."""
        return meet.allgather_object("time", self.options["seconds"] - self.elapsed)[0] >= seconds

    def group(self) -> StoreGroup:
        self._groups += 1
        name = f"{self._case}-{self._groups}".replace(" ", "-")
        return StoreGroup(self.site._store, self.site.rank, self.site.size, name=name, timeout_seconds=40)

    @contextlib.contextmanager
    def rank(self, folder: Path, dense: dict[str, Any]) -> Iterator[RankExecutor]:
        """A rank of an attached launch of both, from a folder that may hold no weights."""
        dwdp = {"allow_shared_device": True}
        dense = {"enabled": True, **self.dense, **dense}
        where = {"ranks": self.site.size, "device": self.site.device, "environ": {}}
        launch = resolve("nano-k3", dtype="bf16", dwdp=dwdp, dense_dwdp=dense, **where)
        settings = msgspec.structs.replace(launch.settings, model=str(folder))
        with build_rank(settings, self.group(), rank=self.site.rank) as rank:
            try:
                yield rank
            except BaseException as error:
                self.meet.abort(error)  # the other rank may wait there, and this one waits for it in the release
                raise

    @property
    def dense(self) -> dict[str, Any]:
        """What every launch has in its dense section: tiny storages move too."""
        return {"min_bytes": 1} if self.fake else {}

    # ---- the GPU ----

    def sync(self) -> None:
        if not self.fake:
            torch.cuda.synchronize()

    def empty(self) -> None:
        gc.collect()
        if not self.fake:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def used(self, meet: StoreGroup, model: Any = None, domain: Any = None) -> int:
        """Bytes taken of the GPU by all ranks, with torch's caches emptied and every rank standing still."""
        self.empty()
        if self.fake:
            held = 0 if domain is None else domain.allocated_bytes + outside_bytes(model, domain)
            return sum(meet.allgather_object("held", held))
        meet.barrier("emptied")
        free, total = torch.cuda.mem_get_info()
        meet.barrier("read")
        return total - free

    def seconds_of(self, meet: StoreGroup, work: Callable[[], None]) -> float:
        """Of work that all ranks begin together, until the GPU is done with it."""
        self.sync()
        meet.barrier("begin")
        start = time.perf_counter()
        work()
        self.sync()
        return time.perf_counter() - start

    def plain_pass(self, meet: StoreGroup, nbytes: int) -> float:
        """Seconds of plain copies of so many bytes, on every rank at once."""
        piece = min(nbytes, 2 * GIB)
        src, dst = (torch.empty(piece, dtype=torch.uint8, device=self.device) for _ in range(2))
        src.random_(0, 256)

        def copy() -> None:
            for at in range(0, nbytes, piece):
                count = min(piece, nbytes - at)
                dst[:count].copy_(src[:count])

        copy()
        return self.seconds_of(meet, copy)

    @contextlib.contextmanager
    def ballast(self, meet: StoreGroup, left: int, *, of_fake: int) -> Iterator[None]:
        """Leaves `left` bytes of the GPU free for all ranks together, or `of_fake` bytes of each rank's fake GPU."""
        held, gpu = None, None
        taken = 0
        if self.fake:
            gpu = memory.create_memory.machine.gpu("host0", 0)
            taken = gpu.total - gpu.used - of_fake
            gpu.used += taken
        else:
            self.used(meet)
            if self.site.rank == 0:
                held = torch.empty(max(1, torch.cuda.mem_get_info()[0] - left), dtype=torch.uint8, device=self.device)
        meet.barrier("ballast")
        try:
            yield
        finally:
            del held
            if gpu is not None:
                gpu.used -= taken
            self.empty()

    def nvml_bytes(self) -> int | None:
        if self.fake:
            return None
        from dwdp.memory.driver import Driver

        return nvml.process_bytes(Driver().device_uuid(0))

    def warm_up(self, meet: StoreGroup) -> None:
        """A context with its libraries and kernels, and what it takes: the constant beside every ledger."""
        if not self.fake:
            from dwdp.device.nvrtc import compile_cubin
            from dwdp.weights import cuda_checksum, cuda_compare, gather_kernel

            torch.cuda.set_device(self.device)
            x = torch.ones(256, 256, dtype=torch.bfloat16, device=self.device)
            (x @ x).normal_(generator=torch.Generator(self.device))
            arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
            for source, options in (
                (cuda_checksum.SOURCE, cuda_checksum.OPTIONS), (cuda_compare.SOURCE, ()),
                (gather_kernel.SOURCE, gather_kernel.OPTIONS),
            ):  # fmt: skip
                compile_cubin(source, arch, options)
            del x
        self.base["used"] = self.used(meet)
        reserved = 0 if self.fake else torch.cuda.memory_reserved()
        self.base["own torch"] = reserved
        self.base["torch"] = sum(meet.allgather_object("reserved", reserved))
        self.base["nvml"] = self.nvml_bytes()
        per_rank = (self.base["used"] - self.base["torch"]) / self.site.size
        self.say("context constant a rank", f"{per_rank / GIB:.3f} GiB", context_bytes=per_rank)
