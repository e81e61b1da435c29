"""Rank processes that run one scenario each, on GPUs or, to try a scenario out, on the fake driver.

A scenario is a function of a `Site`; what it returns on every rank comes back, what it raises fails the test.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from dwdp.executor import memory
from dwdp.executor.create import build_rank
from dwdp.executor.messages import RankSettings
from dwdp.executor.settings import resolve
from dwdp.group.backends import StoreGroup, host_store, open_store
from tests.support.system import DENSE

SECONDS = 110


class Site:
    """One rank of a scenario. `shared`, `lockstep` and `replicated` give a rank of the executor, as contexts."""

    def __init__(self, rank: int, size: int, port: int, fake: bool) -> None:
        self.rank, self.size, self.fake = rank, size, fake
        self.device = "cpu" if fake else "cuda"
        self._store = open_store(rank, "127.0.0.1", port, timeout_seconds=60)
        self._talk: StoreGroup | None = None
        self._names = (f"group-{number}" for number in itertools.count())

    def group(self, size: int | None = None, *, name: str | None = None, timeout_seconds: float = 60) -> StoreGroup:
        """A new group of all ranks, or of the first `size`; then with a name of its own."""
        name = name or next(self._names)
        return StoreGroup(self._store, self.rank, size or self.size, name=name, timeout_seconds=timeout_seconds)

    def agree(self, value: Any) -> list[Any]:
        """Every rank's value, as JSON has it; a barrier too. In a group that lasts, beside those of the set-ups."""
        if self._talk is None:
            self._talk = self.group()
            self._talk.join({})
        return self._talk.allgather_object("agree", value)

    def close(self) -> None:
        if self._talk is not None:
            self._talk.close()

    @contextlib.contextmanager
    def replicated(self, model: Path, *, dtype: str = "auto"):
        settings = resolve(model, ranks=1, dtype=dtype, device=self.device, environ={}).settings
        with build_rank(settings, rank=self.rank) as rank:
            yield rank

    def settings(
        self, model: Path, *, dwdp: dict | None = None, dense: dict | None = DENSE, dtype: str = "auto"
    ) -> RankSettings:
        """Asks the GPU what it can, as a front end does once for all ranks; of `shared`."""
        dwdp = {"allow_shared_device": True, "page_granules": 1, **(dwdp or {})}
        return resolve(
            model, ranks=self.size, dtype=dtype, device=self.device, dwdp=dwdp, dense_dwdp=dense, environ={}
        ).settings

    @contextlib.contextmanager
    def shared(self, model: Path, *, settings: RankSettings | None = None, trace: bool = False, **options):
        """settings: what `self.settings(model, **options)` gave, where it was asked before."""
        settings = settings or self.settings(model, **options)
        with build_rank(settings, self.group(), rank=self.rank, trace=trace) as rank:
            yield rank

    @contextlib.contextmanager
    def lockstep(self, model: Path, *, dense: dict | None, environ: dict | None = None, **build):
        settings = resolve(
            model, tp_size=self.size, attention_dp=True, device=self.device, dense_dwdp=dense, environ=environ or {}
        ).settings
        settings = msgspec.structs.replace(settings, allow_shared_device=True)
        with build_rank(settings, self.group(), rank=self.rank, **build) as rank:
            yield rank

    def free_bytes(self) -> int:
        """Of this rank's GPU, with torch's cache given back."""
        if self.fake:
            return 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def settled_bytes(self) -> int:
        """The same once every rank has given back what it can; the least that a rank saw."""
        self.free_bytes()
        self.agree(None)
        return min(self.agree(self.free_bytes()))


def run(
    scenario: Callable[..., Any],
    size: int,
    *args: Any,
    fake: bool = False,
    lost: tuple[int, ...] = (),
    seconds: float = SECONDS,
) -> dict:
    """scenario(site, *args) in `size` processes -> rank -> what it returned. lost: ranks that kill themselves;
    seconds: until the processes are ended."""
    reserved, port = host_store()
    del reserved  # rank 0 serves there
    context = multiprocessing.get_context("forkserver" if fake else "spawn")
    if fake:
        context.set_forkserver_preload(["torch", "torch.distributed"])  # 3 s of a processor a rank otherwise
    results, all_told = context.Queue(), context.Event()
    told = results, all_told
    ranks = [
        context.Process(target=_child, args=(scenario, rank, size, port, fake, args, *told, dict(os.environ)))
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    found: dict[int, Any] = {}
    failed: list[str] = []
    deadline = time.monotonic() + seconds
    try:
        while len(found) + len(failed) < size - len(lost) and time.monotonic() < deadline:
            with contextlib.suppress(Exception):  # empty for now
                rank, value, error = results.get(timeout=0.5)
                if error is None:
                    found[rank] = value
                else:
                    failed.append(f"rank {rank}: {error}")
            if failed:
                deadline = min(deadline, time.monotonic() + 10)  # the others fail too, or wait for the lost one
            ended = {r for r, process in enumerate(ranks) if process.exitcode not in (None, 0)} - set(lost)
            if ended - set(found) and not failed:
                deadline = min(deadline, time.monotonic() + 10)
    finally:
        all_told.set()
        for process in ranks:
            process.join(5)
            process.kill()
            process.join()
    missing = sorted(set(range(size)) - set(found) - set(lost))
    codes = [process.exitcode for process in ranks]
    assert not failed and not missing, f"ranks {missing} have no result (exit codes {codes})\n" + "\n".join(failed)
    return found


def one_after_another(site: Site, works: dict[str, tuple]) -> dict[str, tuple[str | None, Any]]:
    """Scenarios in the same processes: name -> (scenario, *arguments); -> name -> (what went wrong, what came of it).

    What one rank raises is told, and the next scenario is begun together.
    """
    found: dict[str, tuple[str | None, Any]] = {}
    for name, (scenario, *arguments) in works.items():
        began = time.monotonic()
        try:
            found[name] = None, scenario(site, *arguments)
        except Exception:
            found[name] = traceback.format_exc(), None
        site.agree(None)
        if site.rank == 0:
            print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
    return found


def _child(scenario, rank, size, port, fake, args, results, all_told, environ) -> None:
    os.environ.clear()  # the fork server has that of the test which started it
    os.environ.update(environ)
    logging.basicConfig(level=logging.WARNING, format=f"rank {rank}: %(message)s")
    torch.set_num_threads(1)
    if fake:
        from tests.memory import fake_driver
        from tests.support.fake_cuda import FakeMemory

        fake_driver.GRANULE = 4096
        memory.create_memory = FakeMemory(shared=True)
    site = None
    try:
        site = Site(rank, size, port, fake)
        results.put((rank, scenario(site, *args), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    finally:
        if rank == 0:
            all_told.wait(SECONDS)  # it serves the store, which the others need until their scenario ends
        if site is not None:
            site.close()
    results.close()
    results.join_thread()
