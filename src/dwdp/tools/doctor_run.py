"""The rank processes of `dwdp doctor`: started, watched within bounds, ended, and what they found put together."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dwdp import env
from dwdp.executor.messages import one_line
from dwdp.group.parent import make_private_folder, remove_private_folder
from dwdp.group.ranks import name_ranks
from dwdp.tools.doctor_probe import GROUP

PROBE = ("-P", "-m", "dwdp.tools.doctor_probe")
START_SECONDS = 25.0
"""How long nothing may happen while ranks start, for as many ranks as cores."""
STEP_SECONDS = 8.0
"""How long nothing may happen afterwards."""
WORK_SECONDS = 60.0
"""Bound of all steps together once the ranks have started."""
GRACE_SECONDS = 3.0
"""How long the others may take to end once a rank failed; the group tells them within a second."""
POLL_SECONDS = 0.05

CURE_DESCRIPTORS = (
    "raise the hard limit: ulimit -Hn 65536, --ulimit nofile=65536 of a container, LimitNOFILE= of a service"
)
CURE_MAPPINGS = "raise it: sysctl -w vm.max_map_count=262144"
CURE_BYTES = (
    "do not serve on this machine: look for memory errors (dmesg, EDAC counters), and where GPUs copy for IOMMU and "
    "PCIe ACS settings"
)


@dataclass(frozen=True)
class Problem:
    """What is wrong and what to do about it; each one line."""

    what: str
    cure: str


@dataclass
class Record:
    """What is known of one rank's process; see [Note: events]. errors: why, by source."""

    rank: int
    pid: int | None = None
    socket_dir: str | None = None
    step: int = -1
    waiting: bool = False
    doing: str = "starting its process"
    done: bool = False
    passed: bool = False
    error: str | None = None
    kind: str | None = None
    bytes_ok: dict[int, bool] = field(default_factory=dict)
    wrong: dict[int, str] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    gb_per_s: dict[int, float] = field(default_factory=dict)
    many_to_one: dict[str, Any] | None = None
    pidfd: dict[int, str | None] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    offset: int = 0

    def read(self, path: str) -> bool:
        """Takes in what the rank has written since; -> whether there was anything."""
        try:
            with open(path, "rb") as file:
                file.seek(self.offset)
                text = file.read()
        except FileNotFoundError:
            return False
        end = text.rfind(b"\n") + 1  # the last line may still be on its way
        self.offset += end
        for line in text[:end].splitlines():
            self._take(json.loads(line))
        return end > 0

    def _take(self, event: dict[str, Any]) -> None:
        match event:
            case {"source": source, "bytes_ok": ok}:
                self.bytes_ok[source] = ok
                for texts, key in ((self.wrong, "wrong"), (self.errors, "error")):
                    if event[key] is not None:
                        texts[source] = event[key]
            case {"source": source, "gb_per_s": rate}:
                self.gb_per_s[source] = round(rate, 3)
            case {"many_to_one": rate, "sources": sources}:
                self.many_to_one = {"target": self.rank, "sources": sources, "gb_per_s": round(rate, 3)}
            case {"pidfd": source, "error": error}:
                self.pidfd[source] = error
            case {"warning": text}:
                self.warnings.append(text)
            case _:
                for key, value in event.items():
                    setattr(self, key, value)


class ProbeRun:
    """One run of the rank processes: `run`, then what it found in `records` and `problems`.

    probe: arguments of the ranks' Python. env_per_rank: variables laid over this process's. step_seconds: how
    long nothing may happen once every rank has started.
    """

    def __init__(
        self,
        ranks: int,
        nbytes: int,
        *,
        probe: Sequence[str] = PROBE,
        env_per_rank: Sequence[Mapping[str, str]] | None = None,
        step_seconds: float = STEP_SECONDS,
    ) -> None:
        self.size, self.nbytes, self.probe, self.step_seconds = ranks, nbytes, probe, step_seconds
        self.env_per_rank = env_per_rank or [{}] * ranks
        self.start_seconds = START_SECONDS * max(1.0, ranks / (os.cpu_count() or 1) / 2)
        self.records = [Record(rank) for rank in range(ranks)]
        self.culprits: list[Problem] = []

    def run(self) -> None:
        """Starts the ranks, waits for them within bounds and ends them; nothing of them is left."""
        self._folder = make_private_folder()
        given = [env.socket_dir({**env.child_environment(), **own}) for own in self.env_per_rank]
        folders = _SocketFolders({folder for folder in given if folder is not None})
        try:
            self._run()
        except Exception as error:
            text = one_line(error) or type(error).__name__
            self.culprits.append(Problem(f"the probe did not run: {text}", _cure(text)))
        finally:
            remove_private_folder(self._folder)
            folders.clean(sure=all(record.done for record in self.records))

    def _run(self) -> None:
        from dwdp.group.backends import host_store
        from dwdp.group.launch import RankLauncher

        self._store, port = host_store()
        arguments = [
            *self.probe, "--size", str(self.size), "--port", str(port), "--nbytes", str(self.nbytes),
            "--folder", self._folder, "--socket-dir", os.path.join(self._folder, "ranks"),
        ]  # fmt: skip
        launcher = RankLauncher(
            self.size, self.env_per_rank, args_per_rank=[arguments] * self.size, folder=self._folder
        )
        try:
            launcher.start()
            for rank, pid in launcher.pids().items():
                self.records[rank].pid = pid
            self._watch(launcher)
        finally:
            launcher.close(kill_after_seconds=0.5)
            self._store = None

    def _watch(self, launcher) -> None:
        start = moved = time.monotonic()
        give_up = None
        while True:
            ended = launcher.poll()  # before their last words are read
            if any([record.read(self._path(record.rank)) for record in self.records]):
                moved = time.monotonic()
            now = time.monotonic()
            dead = {r: how for r, how in ended.items() if not self.records[r].done and self.records[r].error is None}
            if give_up is None and (dead or any(record.error for record in self.records)):
                give_up = now + GRACE_SECONDS
                self._name_the_dead(dead)
            living = [record for record in self.records if record.rank not in ended]
            if not living or (give_up is not None and now > give_up):
                return
            starting = any(record.step < 1 for record in living)
            quiet = self.start_seconds if starting else self.step_seconds
            if give_up is None and (now - moved > quiet or now - start > self.start_seconds + WORK_SECONDS):
                self._name_the_hung(living, now - moved)
                return
            time.sleep(POLL_SECONDS)

    def _path(self, rank: int) -> str:
        return os.path.join(self._folder, f"events-{rank}")

    def _name_the_dead(self, dead: Mapping[int, Any]) -> None:
        from dwdp.group.backends import publish_abort

        for rank, how in dead.items():
            record = self.records[rank]
            what = f"rank {rank} (pid {how.pid}) died ({how}) while {record.doing}"
            self.culprits.append(Problem(what, _cure_death(how.exit_code)))
            # Peers that have no socket to it yet would wait for it.
            publish_abort(self._store, GROUP, what, dead_rank=rank)

    def _name_the_hung(self, living: list[Record], seconds: float) -> None:
        """See [Note: events] for who it is."""
        lowest = min((record.step, record.waiting) for record in living)
        for record in living:
            if (record.step, record.waiting) == lowest:
                state = _process_state(record.pid)
                what = (
                    f"rank {record.rank} (pid {record.pid}) hangs while {record.doing}: nothing happened for "
                    f"{seconds:.0f} s; its process {state}"
                )
                self.culprits.append(Problem(what, _cure_hang(state)))

    # what was found

    @property
    def problems(self) -> list[Problem]:
        """The causes; that other ranks stopped because of them is left out."""
        own, echoes = {}, {}
        for record in self.records:
            if record.error is not None:
                texts = echoes if _is_echo(record.kind, record.error) else own
                texts.setdefault(record.error, []).append(record.rank)
        found = list(self.culprits)
        shown = own or ({} if found else echoes)
        found += [Problem(f"{name_ranks(ranks)}: {text}", _cure(text)) for text, ranks in shown.items()]
        for record in self.records:
            for source, text in record.errors.items():
                what = f"rank {record.rank} could not map the memory of rank {source}: {text}"
                found.append(Problem(what, _cure(text)))
            for source, text in record.wrong.items():
                what = f"the copy of rank {source}'s memory in rank {record.rank} {text}"
                found.append(Problem(what, CURE_BYTES))
        return found

    def pairs(self) -> list[dict[str, Any]]:
        """Every ordered pair; None where the probe did not come so far."""
        return [
            {
                "source": source.rank,
                "target": target.rank,
                "pids": [source.pid, target.pid],
                "bytes_ok": target.bytes_ok.get(source.rank),
                "gb_per_s": target.gb_per_s.get(source.rank),
            }
            for source in self.records
            for target in self.records
            if source is not target
        ]

    def descriptor_passing(self) -> dict[str, Any]:
        """How descriptors went from rank to rank, and whether the other way would do."""
        refused = [error for record in self.records for error in record.pidfd.values() if error is not None]
        tried = any(record.pidfd for record in self.records)
        warnings = [text for record in self.records for text in record.warnings if "SCM_RIGHTS to rank" in text]
        passed = all(record.passed for record in self.records) and self.size > 1
        return {
            "used": ("pidfd_getfd" if warnings else "scm_rights") if passed else None,
            "scm_rights": _way(passed or bool(warnings), warnings, "one message over the peers' Unix socket"),
            "pidfd_getfd": _way(tried, refused, "the fallback; the kernel lets ranks take each other's descriptors"),
            "socket_folders": sorted({r.socket_dir for r in self.records if r.socket_dir is not None}),
        }


class _SocketFolders:
    """The folders that the user gave for sockets: what the ranks leave there is taken away again."""

    def __init__(self, folders: Iterable[str]) -> None:
        self._before = {folder: _listing(folder) for folder in folders}

    def clean(self, *, sure: bool) -> None:
        """sure: every rank has ended well, and has unlinked its socket itself."""
        for folder, before in self._before.items():
            for name in set(_listing(folder) or ()) - set(before or ()):
                path = os.path.join(folder, name)
                if not sure and re.fullmatch(r"[0-9a-f]{16}-\d+", name) and _nobody_listens(path):
                    os.unlink(path)
            if before is None:
                try:
                    os.rmdir(folder)
                except OSError:
                    pass  # it was never made, or somebody else uses it now


def _listing(folder: str) -> list[str] | None:
    try:
        return os.listdir(folder)
    except OSError:
        return [] if os.path.lexists(folder) else None


def _nobody_listens(path: str) -> bool:
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.setblocking(False)
            sock.connect(path)
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


def _way(tried: bool, failures: Sequence[str], works: str) -> dict[str, Any]:
    if not tried:
        return {"works": None, "why": "not tried"}
    return {"works": not failures, "why": failures[0] if failures else works}


def _is_echo(kind: str | None, text: str) -> bool:
    """Whether a rank's error only tells that another one failed."""
    told = re.match(r"rank \d+ failed in phase", text) or re.search(r" aborted the group | left the group ", text)
    return kind in ("RankDiedError", "GroupTimeoutError") or (kind == "GroupError" and told is not None)


def _cure(text: str) -> str:
    named = re.search(r"socket folder '([^']*)'", text)
    folder = named[1] if named else "FOLDER"
    cures = (
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


def _cure_death(exit_code: int | None) -> str:
    if exit_code == -signal.SIGKILL:
        return "most often the kernel's or a container's memory killer (see dmesg): free memory, or use fewer ranks"
    if exit_code == -signal.SIGBUS:
        return "shared memory could not be backed: free memory, or raise the container's memory limit"
    return "see what it wrote to stderr, and dmesg"


def _process_state(pid: int | None) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            letter = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "is not there"
    return {"T": "is stopped", "t": "is stopped", "D": "waits in the kernel", "R": "runs"}.get(letter, "sleeps")


def _cure_hang(state: str) -> str:
    if state == "is stopped":
        return "find who stops it: SIGSTOP, a debugger, or a frozen container"
    if state == "waits in the kernel":
        return "see dmesg for a device or a file system that does not answer"
    return "check this machine's load (uptime) and run it again; if it stays, run it with fewer ranks"
