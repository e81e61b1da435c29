"""Do two processes, of one host or of two, share GPU memory by FABRIC handles? `python -m dwdp.tools.fabric_check`.

Without a place in a group it starts the second process itself. Where DWDP_RANK and its pair, torchrun or Slurm say
which of two ranks this process is, it is that one, and the other may be on another host (then DWDP_GROUP_TOKEN is
needed): see examples/fabric_check.sh. Rank 0 prints one table. Exit code 0: FABRIC works; 1: it does not; 2: this
machine cannot ask.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

from dwdp import env
from dwdp.config.schema import DwdpConfig
from dwdp.errors import ConfigError, DwdpError
from dwdp.executor.devices import join_clauses, lacking_for_cuda
from dwdp.executor.messages import one_line
from dwdp.memory.driver import IMEX_CURE
from dwdp.tools.doctor_memory import IMEX_CHANNELS, CudaMemory
from dwdp.tools.doctor_probe import REPEATS, first_difference, pattern

COMMAND = (sys.executable, "-P", "-m", "dwdp.tools.fabric_check")
SIZE = 2
COPY_MIB = 256
STEPS = ("create", "export", "import", "map", "read every byte", "copy to this rank")
NOT_REACHED = "-"
WAIT_SECONDS = 20.0


class FabricCheck:
    """One rank's part. rows: (what, how it went), the same whats on both ranks; failed: the first failure."""

    def __init__(self, group: Any, memory: CudaMemory, nbytes: int) -> None:
        self.group, self.memory, self.domain = group, memory, memory.domain
        self.peer, self._most_bytes = 1 - group.rank, nbytes
        self.rows: list[tuple[str, str]] = []
        self.failed: str | None = None

    def run(self) -> list[tuple[list[tuple[str, str]], str | None]]:
        """Collective; -> (rows, failed) of each rank. What fails on one rank is told and ends no other."""
        device = self.memory.device()
        self.rows = [
            ("host, process", f"{self.group.info.host}, {self.group.info.pid}"),
            ("GPU", f"{device['name']} {device['uuid']}"),
            ("attribute FABRIC supported", "yes" if device["fabric_attribute"] else "no"),
            (f"channels {IMEX_CHANNELS}", str(device["imex_channels"])),
        ]
        self.nbytes = self.memory.fit(self.group, self._most_bytes)
        exported = self._step("create", self._create) and self._step("export", self._export)
        theirs = self.group.allgather_object("handles", exported.hex() if exported else None)[self.peer]
        if theirs is None:
            self._say("import", "the other rank has no handle to import")
        elif imported := self._step("import", lambda: self.domain.import_handle(bytes.fromhex(theirs), self.nbytes)):
            if (
                self._step("map", lambda: self._map_theirs(imported))
                and self._step("read every byte", self._read)
            ):  # fmt: skip
                self._step("copy to this rank", self._copy)
        told = dict(self.rows)
        about = [row for row in self.rows if row[0] not in STEPS]
        self.rows = about + [(name, told.get(name, NOT_REACHED)) for name in STEPS]
        reports = self.group.allgather_object("reports", [self.rows, self.failed])
        return [([tuple(row) for row in rows], failed) for rows, failed in reports]

    def _say(self, name: str, text: str) -> None:
        self.rows.append((name, text))

    def _step(self, name: str, step: Callable[[], Any]) -> Any:
        """What the step returned, None when it failed, which is told."""
        try:
            found = step()
        except DwdpError as error:
            self._say(name, f"failed: {one_line(error)}")
            self.failed = self.failed or f"{name}: {one_line(error)}"
            return None
        self._say(name, found if isinstance(found, str) else "works")
        return found

    def _create(self) -> Any:
        self.handle = self.domain.create_as("fabric", self.nbytes, "fabric-check")
        self.memory.write(self._map(self.handle, writable=True), pattern(self.group.rank, self.nbytes))
        return self.handle

    def _export(self) -> bytes:
        return self.domain.export(self.handle)

    def _map(self, handle: Any, *, writable: bool) -> Any:
        area = self.domain.reserve(self.nbytes)
        self.domain.map(area, 0, handle, writable=writable)
        return area

    def _map_theirs(self, imported: Any) -> str:
        self.theirs = self._map(imported, writable=False)
        return "read-only" if self.memory.read_only(self.theirs) else "works, but read-only is not granted"

    def _read(self) -> str:
        at = first_difference(self.memory.read(self.theirs, self.nbytes), pattern(self.peer, self.nbytes))
        if at is not None:
            raise DwdpError(f"byte {at:,} of {self.nbytes:,} is not what rank {self.peer} wrote")
        return f"{self.nbytes:,} right"

    def _copy(self) -> str:
        from statistics import median

        from dwdp.weights.plan import CopySlice

        into = self._map(self.domain.create_as(None, self.nbytes, "copied"), writable=True)
        lane = [CopySlice(into.address, self.theirs.address, self.nbytes, self.peer)]
        seconds = median([self.memory.seconds([lane]) for _ in range(REPEATS + 1)][1:])
        if first_difference(self.memory.read(into, self.nbytes), pattern(self.peer, self.nbytes)) is not None:
            raise DwdpError("the copy is not what the other rank wrote")
        return f"{self.nbytes * self.memory.rounds / seconds / 1e9:.1f} GB/s"


def run_rank(
    place: env.RankPlace, memory: Callable[[int, DwdpConfig], CudaMemory], options: Any, store: Any = None
) -> int:
    """This process as one of the two ranks; -> the exit code. store: that the ranks meet in, where it is served
    already. Raises what keeps the ranks from checking at all."""
    with _group(place, options.seconds, store) as group:
        group.announce()  # so that the other rank is told when this one cannot go on
        _refuse_without_gpu(memory)
        config = DwdpConfig(dwdp_size=SIZE, handle_type="fabric", allow_shared_device=True)
        with memory(group.rank, config) as opened:
            group.join(
                {"memory": "cuda", "device_uuid": opened.domain.uuid, "allow_shared_device": True,
                 "nbytes": options.mib << 20}
            )  # fmt: skip
            reports = FabricCheck(group, opened, options.mib << 20).run()
            hosts = group.several_hosts or f"host {group.info.host}"
    if group.rank == 0:
        print_table(reports, hosts)
    return 0 if all(failed is None for _, failed in reports) else 1


def print_table(reports: Sequence[tuple[list[tuple[str, str]], str | None]], hosts: str) -> None:
    """The table, and what it comes to in the last line."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title="FABRIC handles between two processes", title_justify="left", box=box.SIMPLE)
    for heading in ("step", "rank 0", "rank 1"):
        table.add_column(heading, overflow="fold")
    for (name, first), (_, second) in zip(reports[0][0], reports[1][0]):
        table.add_row(name, first, second)
    console = Console(highlight=False, soft_wrap=False, markup=False, emoji=False)
    console.print(table)
    failures = [f"rank {rank}: {failed}" for rank, (_, failed) in enumerate(reports) if failed is not None]
    if failures:
        text = "; ".join(failures)
        cure = "" if IMEX_CURE in text else f". {IMEX_CURE}"
        print(f"FABRIC does not work between two processes on {hosts}: {text}{cure}.")
    else:
        print(f"FABRIC works between two processes on {hosts}.")


@contextmanager
def _group(place: env.RankPlace, seconds: float, store: Any):
    from dwdp.group.backends import StoreGroup, connect_store, open_store

    if not place.has_store:
        raise ConfigError(f"{place}: two ranks meet in a store here: set DWDP_MASTER_ADDR and DWDP_MASTER_PORT")
    address = place.master_addr, place.master_port
    if store is None and place.store_exists:
        store = connect_store(address[1], address[0], timeout_seconds=seconds, served_by="the launcher")
    elif store is None:
        store = open_store(place.rank, *address, timeout_seconds=seconds)
    host_rank = None if place.store_exists else 0
    group = StoreGroup(store, place.rank, SIZE, name="fabric-check", timeout_seconds=seconds, host_rank=host_rank)
    with group:
        yield group


def _refuse_without_gpu(memory: Any) -> None:
    if memory is CudaMemory and (lacking := lacking_for_cuda()):
        raise ConfigError(f"FABRIC handles are of GPU memory, but {join_clauses(lacking)}")


def main(
    arguments: Sequence[str],
    *,
    memory: Callable[[int, DwdpConfig], CudaMemory] = CudaMemory,
    command: Sequence[str] = COMMAND,
) -> int:
    """-> the exit code. memory, command: what opens a rank's memory, and what starts the other rank; for tests."""
    parser = argparse.ArgumentParser(prog="python -m dwdp.tools.fabric_check", description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=COPY_MIB, help="of a rank's memory and of a copy")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long the ranks wait for each other")
    parser.add_argument("--look", action="store_true", help="only look whether this machine can ask")
    options = parser.parse_args(arguments)
    other = store = None
    try:
        if options.look:
            _refuse_without_gpu(memory)
            return 0
        place = env.discover_rank(SIZE)
        if place is None:
            _refuse_without_gpu(memory)  # before another process is started
            from dwdp.group.backends import host_store

            store, port = host_store()
            place = env.RankPlace("started here", 0, SIZE, "127.0.0.1", port)
            child = env.child_environment(DWDP_RANK="1", DWDP_MASTER_ADDR="127.0.0.1", DWDP_MASTER_PORT=str(port))
            other = subprocess.Popen([*command, *arguments], env=child)
        return run_rank(place, memory, options, store)
    except Exception as error:
        print(f"fabric_check: {one_line(error) or type(error).__name__}", file=sys.stderr)
        return 2
    finally:
        if other is not None:
            try:
                other.wait(WAIT_SECONDS)
            except subprocess.TimeoutExpired:
                other.kill()
                other.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
