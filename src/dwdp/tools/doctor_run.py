"""The rank processes of `dwdp doctor`: started, watched within bounds, ended, and what they found put together."""

from __future__ import annotations

import os
import re
import socket
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dwdp import env
from dwdp.executor.messages import one_line
from dwdp.group.parent import make_private_folder, remove_private_folder
from dwdp.group.ranks import name_ranks
from dwdp.tools.doctor_cures import CURE_BYTES, Problem, cure_of, cure_of_death, cure_of_hang, process_state
from dwdp.tools.doctor_events import Record
from dwdp.tools.doctor_probe import GROUP
from dwdp.weights.transfers import TRANSFERS

if TYPE_CHECKING:
    from dwdp.config.schema import DwdpConfig

PROBE = ("-P", "-m", "dwdp.tools.doctor_probe")
START_SECONDS = {"host": 25.0, "cuda": 60.0}
"""How long nothing may happen while ranks start, for as many ranks as cores; a GPU's context takes its time."""
STEP_SECONDS = {"host": 8.0, "cuda": 30.0}
"""How long nothing may happen afterwards; the gather kernel is compiled in one step."""
WORK_SECONDS = 60.0
"""Bound of all steps together once the ranks have started."""
GRACE_SECONDS = 3.0
"""How long the others may take to end once a rank failed; the group tells them within a second."""
POLL_SECONDS = 0.05


class ProbeRun:
    """One run of the rank processes: `run`, then what it found in `records` and `problems`.

    memory: host or cuda. config: of the launch that is asked about. probe: arguments of the ranks' Python.
    env_per_rank: variables laid over this process's. step_seconds: how long nothing may happen once every rank has
    started.
    """

    def __init__(
        self,
        ranks: int,
        nbytes: int,
        *,
        memory: str,
        config: DwdpConfig,
        probe: Sequence[str] = PROBE,
        env_per_rank: Sequence[Mapping[str, str]] | None = None,
        step_seconds: float | None = None,
    ) -> None:
        self.size, self._most_bytes, self.memory, self.config, self.probe = ranks, nbytes, memory, config, probe
        self.step_seconds = STEP_SECONDS[memory] if step_seconds is None else step_seconds
        self.env_per_rank = env_per_rank or [{}] * ranks
        self.start_seconds = START_SECONDS[memory] * max(1.0, ranks / (os.cpu_count() or 1) / 2)
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
            self.culprits.append(Problem(f"the probe did not run: {text}", cure_of(text)))
        finally:
            remove_private_folder(self._folder)
            folders.clean(sure=all(record.done for record in self.records))

    def _run(self) -> None:
        from dwdp.group.backends import host_store
        from dwdp.group.launch import RankLauncher

        self._store, port = host_store()
        arguments = [
            *self.probe, "--size", str(self.size), "--port", str(port), "--nbytes", str(self._most_bytes),
            "--memory", self.memory, "--config", self.config.model_dump_json(),
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
            self.culprits.append(Problem(what, cure_of_death(how.exit_code)))
            # Peers that have no socket to it yet would wait for it.
            publish_abort(self._store, GROUP, what, dead_rank=rank)

    def _name_the_hung(self, living: list[Record], seconds: float) -> None:
        """See [Note: events] for who it is."""
        lowest = min((record.step, record.waiting) for record in living)
        for record in living:
            if (record.step, record.waiting) == lowest:
                state = process_state(record.pid)
                what = (
                    f"rank {record.rank} (pid {record.pid}) hangs while {record.doing}: nothing happened for "
                    f"{seconds:.0f} s; its process {state}"
                )
                self.culprits.append(Problem(what, cure_of_hang(state)))

    # what was found

    @property
    def nbytes(self) -> int:
        """Of each copy, as the ranks agreed on it."""
        return next((record.nbytes for record in self.records if record.nbytes is not None), self._most_bytes)

    @property
    def handle_types(self) -> dict[str, list[str]]:
        """Type -> why it does not work, empty where it does; nothing where none was tried."""
        return next((record.handle_types for record in self.records if record.handle_types), {})

    @property
    def handle_type(self) -> str | None:
        """The type that the ranks took, None where they took none."""
        return next((record.handle_type for record in self.records if record.handle_type), None)

    def transfers(self) -> dict[str, dict[str, Any]]:
        """Transfer -> whether every rank can do it, and why not."""
        found: dict[str, dict[str, Any]] = {}
        for name in TRANSFERS:
            told = {record.rank: record.transfers[name] for record in self.records if name in record.transfers}
            unable = {rank: why for rank, why in told.items() if why is not None}
            why = None
            if unable:
                rank, reason = next(iter(unable.items()))
                why = f"{name_ranks(list(unable)) if len(unable) < len(told) else 'every rank'}: {reason}"
            found[name] = {"works": not unable if told else None, "why": why}
        return found

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
        found += [Problem(f"{name_ranks(ranks)}: {text}", cure_of(text)) for text, ranks in shown.items()]
        for record in self.records:
            for source, text in record.errors.items():
                what = f"rank {record.rank} could not map the memory of rank {source}: {text}"
                found.append(Problem(what, cure_of(text)))
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
                "read_only": target.read_only.get(source.rank),
                "peer_access": target.reaches.get(source.rank),
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
        if self.handle_type == "fabric":
            none = {"works": None, "why": "not needed: FABRIC handles are bytes"}
            return {"used": None, "scm_rights": none, "pidfd_getfd": none, "socket_folders": self._socket_folders()}
        return {
            "used": ("pidfd_getfd" if warnings else "scm_rights") if passed else None,
            "scm_rights": _way(passed or bool(warnings), warnings, "one message over the peers' Unix socket"),
            "pidfd_getfd": _way(tried, refused, "the fallback; the kernel lets ranks take each other's descriptors"),
            "socket_folders": self._socket_folders(),
        }

    def _socket_folders(self) -> list[str]:
        return sorted({record.socket_dir for record in self.records if record.socket_dir is not None})


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
