"""The process of one rank of `dwdp doctor`: it maps its peers' memory as serving does, checks and times copies.

[Note: events] What it finds it appends to a file in the doctor's private folder, one JSON object a line. So
nothing is lost when it dies, and the file needs none of the facilities that are probed. The steps have the same
numbers on every rank, which tells who holds up the others: whoever is at the lowest step and does not wait.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from dwdp.group.fds import close_fds, take_fd

if TYPE_CHECKING:
    import numpy

GROUP = "doctor"
REPEATS = 5
MEMORY_STEP = 2
"""The step in which memory is made; the one before is meeting the peers."""
LONGEST_WAIT_SECONDS = 600.0
"""Of a collective. The doctor notices much earlier that nothing moves, and ends every rank."""


class Events:
    """The file of one rank, see [Note: events]."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def __call__(self, **event: object) -> None:
        os.write(self._fd, json.dumps(event).encode() + b"\n")


class Probe:
    """One rank's part. nbytes: of its memory and of each copy, a multiple of the host domain's granule.

    copy, take: how bytes are copied and how a descriptor is taken from another process.
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
        copy: Callable[[Iterable], None] | None = None,
        take: Callable[[int, int], int] = take_fd,
    ) -> None:
        from dwdp.weights.copy import copy_slices

        self.rank, self.size, self.nbytes = rank, size, nbytes
        self.peers = [peer for peer in range(size) if peer != rank]
        self._say, self._port, self._socket_dir = say, port, socket_dir
        self._copy_slices, self._take = copy or copy_slices, take
        self._step_number = 0

    def run(self) -> None:
        """Takes part until the end. Raises whatever failed; peers then raise too."""
        from dwdp.group.backends import StoreGroup, connect_store
        from dwdp.memory.host import HostDomain

        self._step("meeting its peers")
        store = connect_store(self._port, timeout_seconds=LONGEST_WAIT_SECONDS)
        group = StoreGroup(
            store, self.rank, self.size,
            name=GROUP, timeout_seconds=LONGEST_WAIT_SECONDS, socket_dir=self._socket_dir,
        )  # fmt: skip
        with group, HostDomain(self.rank) as domain:
            self._wait()
            group.join({"nbytes": self.nbytes})
            self._step("writing its pattern")
            self.domain, self.into = domain, domain.reserve(self.nbytes)
            domain.map(self.into, 0, domain.create(self.nbytes, "doctor-copy"), writable=True)
            handle = self._own_memory()
            self._pass_descriptors(group, handle)
            areas = self._map_peers(group, handle)
            for turn in range(self.size):
                self._step(f"timing copies into rank {turn}")
                if turn == self.rank:
                    self._measure(areas)
                self._wait()
                group.barrier(f"turn of rank {turn}")
            errors = domain.close()
            if errors:
                raise errors[0]

    def _step(self, doing: str) -> None:
        self._step_number += 1
        self._say(step=self._step_number, waiting=False, doing=doing)

    def _wait(self) -> None:
        self._say(step=self._step_number, waiting=True)

    def _own_memory(self):
        area = self.domain.reserve(self.nbytes)
        handle = self.domain.create(self.nbytes, "doctor")
        self.domain.map(area, 0, handle, writable=True)
        self._bytes(area)[:] = pattern(self.rank, self.nbytes)
        self.domain.seal(handle)
        return handle

    def _bytes(self, area) -> numpy.ndarray:
        import torch

        return self.domain.tensor(area, 0, (self.nbytes,), torch.uint8).numpy()

    # descriptors

    def _pass_descriptors(self, group, handle) -> None:
        """Tries `pidfd_getfd` with every peer; the group itself would use it only where SCM_RIGHTS fails."""
        self._step("asking for descriptors with pidfd_getfd")
        self._wait()
        status = os.fstat(handle.fd)
        told = group.allgather_object("descriptors", [os.getpid(), handle.fd, status.st_dev, status.st_ino])
        for source in self.peers:
            pid, fd, *file = told[source]
            error = None
            try:
                taken = self._take(pid, fd)
                status = os.fstat(taken)
                close_fds([taken])
                if [status.st_dev, status.st_ino] != file:
                    error = f"pidfd_getfd(pid {pid}, descriptor {fd}) gave another file"
            except OSError as failure:
                error = failure.strerror or str(failure)
            self._say(pidfd=source, error=error)

    def _map_peers(self, group, handle) -> dict[int, object]:
        """-> source -> the range in which its memory is mapped read-only, each checked byte by byte."""
        self._step("passing descriptors")
        self._wait()
        passed = group.exchange_fds("memory", [handle.fd], b"")
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
            self._say(source=source, bytes_ok=right, wrong=wrong, error=failures.get(source))
        self._wait()
        group.barrier("checked")
        return areas

    def _find_wrong_byte(self, source: int, area) -> str | None:
        expected, copied, mapped = pattern(source, self.nbytes), self._bytes(self.into), self._bytes(area)
        copied[:] = 0
        self._copy(source, area, 0, self.nbytes)
        at = first_difference(copied, expected)
        if at is None:
            return None
        in_mapping = first_difference(mapped, expected)
        where = "the mapping reads right" if in_mapping is None else f"so does the mapping, from {in_mapping:,} on"
        return (
            f"differs from byte {at:,} of {self.nbytes:,} on (0x{copied[at]:02x}, the owner wrote "
            f"0x{expected[at]:02x}); {where}"
        )

    # rates

    def _copy(self, source: int, area, start: int, end: int) -> None:
        from dwdp.weights.plan import CopySlice

        self._copy_slices([CopySlice(self.into.address + start, area.address + start, end - start, source)])

    def _measure(self, areas: dict[int, object]) -> None:
        for source, area in areas.items():
            rate = self._rate(lambda source=source, area=area: self._copy(source, area, 0, self.nbytes))
            self._say(source=source, gb_per_s=rate)
        if not areas:
            return
        # From all peers at once an equal part each, so that the bytes are as many as from one.
        bounds = [self.nbytes * part // len(areas) for part in range(len(areas) + 1)]
        parts = [(source, area, start, end) for (source, area), start, end in zip(areas.items(), bounds, bounds[1:])]
        with ThreadPoolExecutor(len(parts)) as pool:
            rate = self._rate(lambda: list(pool.map(lambda part: self._copy(*part), parts)))
        self._say(many_to_one=rate, sources=sorted(areas))

    def _rate(self, copy: Callable[[], object]) -> float:
        """1e9 bytes a second: the median of a few copies after one that is not counted."""
        seconds = []
        for _ in range(REPEATS + 1):
            start = time.perf_counter()
            copy()
            seconds.append(time.perf_counter() - start)
        return self.nbytes / statistics.median(seconds[1:]) / 1e9


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
    """Runs one rank's part; -> the exit code. seams: `Probe`'s copy and take."""
    import argparse

    parser = argparse.ArgumentParser(prog="python -m dwdp.tools.doctor_probe")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--port", type=int, required=True, help="of the group's store")
    parser.add_argument("--nbytes", type=int, required=True)
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
    from dwdp.executor.messages import one_line

    say = Events(os.path.join(options.folder, f"events-{options.rank}"))
    say(pid=os.getpid(), step=0, waiting=False, doing="starting")
    logs = logging.getLogger("dwdp")
    logs.addHandler(_TellWarnings(say))
    logs.propagate = False
    try:
        socket_dir = env.socket_dir() or options.socket_dir
        say(socket_dir=socket_dir)
        probe = Probe(
            options.rank, options.size, say,
            port=options.port, socket_dir=socket_dir, nbytes=options.nbytes, **seams,
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
