"""The process of one rank of `dwdp doctor`: it maps its peers' memory as serving does, checks and times copies.

What it finds it writes down as it goes, see [Note: events] in doctor_events.py.
"""

from __future__ import annotations

import logging
import os
import statistics
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from dwdp.errors import DwdpError
from dwdp.group.fds import take_fd
from dwdp.tools.doctor_events import Events

if TYPE_CHECKING:
    import numpy

    from dwdp.config.schema import DwdpConfig
    from dwdp.tools.doctor_memory import CudaMemory, HostMemory
    from dwdp.weights.plan import CopySlice

GROUP = "doctor"
REPEATS = 5
LOOK_BYTES = 64
MEMORY_STEP = 2
"""The step in which memory is made; the one before is meeting the peers."""
LONGEST_WAIT_SECONDS = 600.0
"""Of a collective. The doctor notices much earlier that nothing moves, and ends every rank."""


class Probe:
    """One rank's part. nbytes: of its memory and of each copy at most, a multiple of the domain's granularity.

    memory: (rank, config) -> its memory, see doctor_memory.py; take: how a descriptor is taken from another process.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        say: Events,
        *,
        port: int,
        socket_dir: str,
        nbytes: int,
        config: DwdpConfig,
        memory: Callable[[int, DwdpConfig], HostMemory | CudaMemory],
        take: Callable[[int, int], int] = take_fd,
    ) -> None:
        self.rank, self.size, self.nbytes, self.config = rank, size, nbytes, config
        self.peers = [peer for peer in range(size) if peer != rank]
        self._say, self._port, self._socket_dir = say, port, socket_dir
        self._open_memory, self._take = memory, take
        self._step_number = 0

    def run(self) -> None:
        """Takes part until the end. Raises whatever failed; peers then raise too."""
        from dwdp.group.backends import StoreGroup, connect_store

        self._say(step=0, waiting=False, doing="opening its memory")
        with self._open_memory(self.rank, self.config) as memory:
            self.memory, self.domain = memory, memory.domain
            self._say(device=memory.device())
            self._step("meeting its peers")
            store = connect_store(self._port, timeout_seconds=LONGEST_WAIT_SECONDS)
            group = StoreGroup(
                store, self.rank, self.size,
                name=GROUP, timeout_seconds=LONGEST_WAIT_SECONDS, socket_dir=self._socket_dir,
            )  # fmt: skip
            with group:
                self._wait()
                reports = group.join(
                    {
                        "nbytes": self.nbytes,
                        "memory": memory.name,
                        "device_uuid": getattr(self.domain, "uuid", None),
                        "allow_shared_device": self.config.allow_shared_device,
                    }
                )
                self._say(reaches={peer: memory.peer_access(reports[peer]["device_uuid"]) for peer in self.peers})
                self._probe(group)

    def _probe(self, group) -> None:
        self._step("making handles of each type")
        tried = self.memory.try_handles(group)
        self._say(handle_types=tried)
        self._say(handle_type=self.memory.take_handles(group, tried))
        self._step("writing its pattern")
        self.nbytes = self.memory.fit(group, self.nbytes)
        self._say(nbytes=self.nbytes)
        self.into = self.domain.reserve(self.nbytes)
        self.domain.map(self.into, 0, self.domain.create(self.nbytes, "doctor-copy"), writable=True)
        handle = self._own_memory()
        self._pass_descriptors(group, handle)
        areas = self._map_peers(group, handle)
        self._step("looking at its transfers")
        self._say(transfers=self.memory.transfers())
        self._wait()
        group.barrier("transfers")
        for turn in range(self.size):
            self._step(f"timing copies into rank {turn}")
            if turn == self.rank:
                self._measure(areas)
            self._wait()
            group.barrier(f"turn of rank {turn}")

    def _step(self, doing: str) -> None:
        self._step_number += 1
        self._say(step=self._step_number, waiting=False, doing=doing)

    def _wait(self) -> None:
        self._say(step=self._step_number, waiting=True)

    def _own_memory(self):
        area = self.domain.reserve(self.nbytes)
        handle = self.domain.create(self.nbytes, "doctor")
        self.domain.map(area, 0, handle, writable=True)
        self.memory.write(area, pattern(self.rank, self.nbytes))
        self.domain.seal(handle)
        return handle

    # descriptors

    def _pass_descriptors(self, group, handle) -> None:
        """Tries `pidfd_getfd` with every peer; the group itself would use it only where SCM_RIGHTS fails."""
        self._step("asking for descriptors with pidfd_getfd")
        self._wait()
        if not self.domain.exports_descriptors:
            return
        told = group.allgather_object("descriptors", [os.getpid(), self.domain.export(handle)])
        for source in self.peers:
            error = None
            try:
                self._look_through(source, *told[source])
            except OSError as failure:
                error = failure.strerror or str(failure)
            except DwdpError as failure:
                error = str(failure)
            self._say(pidfd=source, error=error)

    def _look_through(self, source: int, pid: int, fd: int) -> None:
        """Raises unless the descriptor that the kernel gives is one of that rank's memory."""
        imported = self.domain.import_handle(self._take(pid, fd), self.nbytes)
        area = self.domain.reserve(self.nbytes)
        try:
            self.domain.map(area, 0, imported, writable=False)
            found = bytes(self.memory.read(area, LOOK_BYTES))
            if found != bytes(pattern(source, self.nbytes)[:LOOK_BYTES]):
                raise DwdpError(f"pidfd_getfd(pid {pid}, descriptor {fd}) gave other memory than rank {source}'s")
        finally:
            self.domain.free(area)
            self.domain.release(imported)

    def _map_peers(self, group, handle) -> dict[int, object]:
        """-> source -> the range in which its memory is mapped read-only, each checked byte by byte."""
        from dwdp.memory.exchange import exchange_handles

        self._step("passing descriptors")
        self._wait()
        passed = exchange_handles(group, self.domain, "memory", [self.domain.export(handle)], b"")
        self._say(passed=True)
        self._step("mapping and checking its peers' memory")
        areas, failures = {}, {}
        for source in self.peers:
            try:
                imported = self.domain.import_handle(passed[source][1][0], self.nbytes)
                area = self.domain.reserve(self.nbytes)
                self.domain.map(area, 0, imported, writable=False)
                areas[source] = area
            except Exception as error:
                failures[source] = str(error) or type(error).__name__
        for source in self.peers:
            wrong = None if source in failures else self._find_wrong_byte(source, areas[source])
            right = source in areas and wrong is None
            read_only = self.memory.read_only(areas[source]) if source in areas else None
            self._say(
                source=source, bytes_ok=right, wrong=wrong, error=failures.get(source), read_only=read_only
            )  # fmt: skip
        self._wait()
        group.barrier("checked")
        return areas

    def _find_wrong_byte(self, source: int, area) -> str | None:
        expected = pattern(source, self.nbytes)
        self.memory.write(self.into, expected ^ 0xFF)  # not a byte of it is right before the copy
        self._copy(source, area)
        copied = self.memory.read(self.into, self.nbytes)
        at = first_difference(copied, expected)
        if at is None:
            return None
        in_mapping = first_difference(self.memory.read(area, self.nbytes), expected)
        where = "the mapping reads right" if in_mapping is None else f"so does the mapping, from {in_mapping:,} on"
        return (
            f"differs from byte {at:,} of {self.nbytes:,} on (0x{copied[at]:02x}, the owner wrote "
            f"0x{expected[at]:02x}); {where}"
        )

    # rates

    def _slice(self, source: int, area, start: int, end: int) -> CopySlice:
        from dwdp.weights.plan import CopySlice

        return CopySlice(self.into.address + start, area.address + start, end - start, source)

    def _copy(self, source: int, area) -> None:
        self.memory.copy([self._slice(source, area, 0, self.nbytes)])

    def _measure(self, areas: dict[int, object]) -> None:
        for source, area in areas.items():
            self._say(source=source, gb_per_s=self._rate([[self._slice(source, area, 0, self.nbytes)]]))
        if not areas:
            return
        # From all peers at once an equal part each, so that the bytes are as many as from one.
        bounds = [self.nbytes * part // len(areas) for part in range(len(areas) + 1)]
        parts = zip(areas.items(), bounds, bounds[1:])
        lanes = [[self._slice(source, area, start, end)] for (source, area), start, end in parts]
        self._say(many_to_one=self._rate(lanes), sources=sorted(areas))

    def _rate(self, lanes: list[list[CopySlice]]) -> float:
        """1e9 bytes a second: the median of a few copies after one that is not counted."""
        seconds = [self.memory.seconds(lanes) for _ in range(REPEATS + 1)]
        return self.nbytes * self.memory.rounds / statistics.median(seconds[1:]) / 1e9


def pattern(source: int, nbytes: int) -> numpy.ndarray:
    """The bytes of rank `source`: uint8 [nbytes], random with the source as seed. nbytes: a multiple of 8."""
    import numpy

    words = numpy.random.default_rng([0xD0C, source]).integers(0, 1 << 64, nbytes // 8, dtype=numpy.uint64)
    return words.view(numpy.uint8)


def first_difference(found: numpy.ndarray, expected: numpy.ndarray) -> int | None:
    """Index of the first byte that differs."""
    import numpy

    wrong = numpy.not_equal(found, expected)
    at = int(wrong.argmax())
    return at if wrong[at] else None


class _TellWarnings(logging.Handler):
    def __init__(self, say: Events) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(warning=record.getMessage())


def main(arguments: list[str], **seams: object) -> int:
    """Runs one rank's part; -> the exit code. seams: `Probe`'s memory and take."""
    import argparse

    parser = argparse.ArgumentParser(prog="python -m dwdp.tools.doctor_probe")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--port", type=int, required=True, help="of the group's store")
    parser.add_argument("--nbytes", type=int, required=True)
    parser.add_argument("--memory", required=True, help="host or cuda")
    parser.add_argument("--config", required=True, help="a DwdpConfig as JSON")
    parser.add_argument("--folder", required=True, help="the doctor's private folder")
    parser.add_argument("--socket-dir", required=True, help="for sockets, where DWDP_SOCKET_DIR names none")
    parser.add_argument("--parent-socket", required=True, help="the socket whose end-of-file ends this process")
    options = parser.parse_args(arguments)
    from dwdp.group.parent import PARENT_GONE_EXIT_CODE, remove_private_folder, watch_parent

    def leave() -> None:
        # The doctor was killed and cannot remove it.
        remove_private_folder(options.folder)
        os._exit(PARENT_GONE_EXIT_CODE)

    watch_parent(options.parent_socket, leave)
    from dwdp import env
    from dwdp.config.schema import DwdpConfig, validate
    from dwdp.executor.messages import one_line
    from dwdp.tools.doctor_memory import MEMORIES

    say = Events(os.path.join(options.folder, f"events-{options.rank}"))
    say(pid=os.getpid(), step=0, waiting=False, doing="starting")
    logs = logging.getLogger("dwdp")
    logs.addHandler(_TellWarnings(say))
    logs.propagate = False
    try:
        socket_dir = env.socket_dir() or options.socket_dir
        say(socket_dir=socket_dir)
        config = validate(DwdpConfig, None, what="dwdp", as_json=options.config)
        probe = Probe(
            options.rank, options.size, say,
            port=options.port, socket_dir=socket_dir, nbytes=options.nbytes, config=config,
            **{"memory": MEMORIES[options.memory], **seams},
        )  # fmt: skip
        probe.run()
    except BaseException as error:
        say(error=one_line(error) or type(error).__name__, kind=type(error).__name__)
        return 1
    say(done=True)
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # no thread of a step that failed may keep the process alive
    os._exit(code)
