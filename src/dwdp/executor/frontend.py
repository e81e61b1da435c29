"""The front end's side of its rank processes: starting them, talking to them, noticing a death, ending
them."""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping

import msgspec

from dwdp import errors
from dwdp.executor import messages
from dwdp.executor.messages import Command, Event, Failed, Hello, Log, Progress, RankSettings
from dwdp.group.parent import make_private_folder, remove_private_folder

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
START_SECONDS = 120.0
SHUTDOWN_SECONDS = 5.0
FAILURE_GRACE_SECONDS = 2.0
"""How long the other ranks' errors are collected after the first: the cause may be reported after its
echo."""
MAX_FOLDER_BYTES = 60
"""A socket's path has room for 107 bytes, of which a long TMPDIR would leave none for its name."""

ProgressCallback = Callable[[int, str, int, int], None]


class Frontend:
    """The rank processes of `settings` and the sockets to them. Context manager; `close` is idempotent.

    Not for concurrent use but for `stop`: one call at a time. Raises RankDiedError naming `rank K` from any call
    when a rank is dead; everything has been ended by then.
    """

    def __init__(self, settings: RankSettings, *, on_progress: ProgressCallback | None = None) -> None:
        self.ranks = settings.ranks
        self.settings = settings
        self.pids: dict[int, int] = {}
        self._on_progress = on_progress or (lambda *_: None)
        self._calls = 0
        self._error: BaseException | None = None
        self._stopping = self._closed = self._ended = False
        self._launcher = self._socket = self._context = self._store = None
        self._folder = private_folder()
        try:
            self._start()
        except BaseException:
            self.close(at_once=True)
            raise

    def _start(self) -> None:
        import zmq

        from dwdp.group.backends import host_store
        from dwdp.group.launch import RANK_MODULE, RankLauncher

        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        path = os.path.join(self._folder, "control")
        self._socket.bind(f"ipc://{path}")
        if self.settings.has_group:
            # Hosted here and not by a rank: it outlives any of them, and ends with this process.
            self._store, port = host_store()
            folder = self.settings.socket_dir or os.path.join(self._folder, "ranks")
            self.settings = msgspec.structs.replace(self.settings, store_port=port, socket_dir=folder)
        arguments = [*RANK_MODULE, "--control", path]
        self._launcher = RankLauncher(
            self.ranks, [{}] * self.ranks, args_per_rank=[arguments] * self.ranks, folder=self._folder
        )
        self._launcher.start()
        deadline = time.monotonic() + START_SECONDS
        while len(self.pids) < self.ranks:
            self._receive()
            self._raise_for_the_dead()
            if time.monotonic() > deadline:
                missing = sorted(set(range(self.ranks)) - set(self.pids))
                raise errors.DwdpError(f"ranks {missing} did not start within {START_SECONDS:.0f} s")

    def next_call(self) -> int:
        """A fresh call number: an answer that carries another belongs to a call that was interrupted."""
        self._calls += 1
        return self._calls

    def call(self, commands: Mapping[int, Command]) -> dict[int, tuple[Event, list[bytes]]]:
        """Sends each rank its command (all of one call number) and waits for every answer.

        -> rank -> (answer, frames). Raises what a rank reported; RankDiedError when one died meanwhile.
        """
        if self._error is not None:
            raise copy.copy(self._error)  # a fresh one: every raise of the same would lengthen its traceback
        self._raise_if_closed()
        self._raise_for_the_dead()
        encoded = {rank: messages.encode_command(command) for rank, command in commands.items()}
        for rank, data in encoded.items():
            self._send(rank, data)
        call = {command.call for command in commands.values()}
        answers: dict[int, tuple[Event, list[bytes]]] = {}
        failures: dict[int, Failed] = {}

        def take_messages() -> None:
            for rank, event, frames in self._receive():
                if getattr(event, "call", None) not in call:
                    continue
                if isinstance(event, Failed):
                    failures[rank] = event
                else:
                    answers[rank] = (event, frames)

        give_up = None
        while len(answers) + len(failures) < len(commands):
            self._raise_if_closed()
            take_messages()
            if any(failure.fatal for failure in failures.values()):
                give_up = give_up or time.monotonic() + FAILURE_GRACE_SECONDS
                if time.monotonic() > give_up:
                    break
            elif self._launcher.poll():
                take_messages()  # its last words may only just have arrived
                if not failures:
                    self._raise_for_the_dead()
        if failures:
            self._raise_failure(failures)
        return answers

    def stop(self) -> None:
        """Makes a call that another thread is in raise, within a moment; to be followed by `close`."""
        self._stopping = True

    def _raise_if_closed(self) -> None:
        if self._closed or self._stopping:
            raise errors.DwdpError("the LLM is closed")

    def _send(self, rank: int, data: bytes) -> None:
        import zmq

        try:
            self._socket.send_multipart([str(rank).encode(), data])
        except zmq.ZMQError:
            # Its connection is gone a moment before its agent notices the end; who died is told by the wait.
            logger.debug("rank %d cannot be reached", rank, exc_info=True)

    def _receive(self) -> list[tuple[int, Event, list[bytes]]]:
        """Waits a moment for messages; progress, logs and greetings are dealt with here."""
        received = []
        timeout = int(POLL_SECONDS * 1000)
        while self._socket.poll(timeout):
            timeout = 0
            identity, header, *frames = self._socket.recv_multipart()
            rank, event = int(identity), messages.decode_event(header)
            if isinstance(event, Hello):
                self.pids[rank] = event.pid
            elif isinstance(event, Progress):
                self._on_progress(rank, event.stage, event.done, event.total)
            elif isinstance(event, Log):
                logging.getLogger(event.name).log(event.level, "rank %d: %s", rank, event.text)
            else:
                received.append((rank, event, frames))
        return received

    def _raise_failure(self, failures: dict[int, Failed]) -> None:
        # A rank whose own step failed says more than its peers, which only tell that it did; and a rank that
        # died without a word says nothing.
        own = [failure for failure in failures.values() if not failure.echo]
        if not own and self._launcher.poll().keys() - failures.keys():
            self._raise_for_the_dead(failures.keys())
        failure = (own or list(failures.values()))[0]
        error = rebuild_error(failure)
        if any(f.fatal for f in failures.values()):
            self._fail(error)
        raise error

    def _raise_for_the_dead(self, explained: Collection[int] = ()) -> None:
        """explained: ranks that ended because another one did."""
        dead = {rank: ended for rank, ended in self._launcher.poll().items() if rank not in explained}
        if not dead:
            return
        rank = min(dead)
        self._fail(errors.RankDiedError(rank, f"rank {rank} died ({dead[rank]})"))
        raise self._error

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self.close(at_once=True)

    def close(self, *, at_once: bool = False) -> None:
        """Ends every rank: asked first and then killed, or killed at once. Idempotent; errors are logged.

        Interrupts on the way (Ctrl-C) are raised when everything is ended.
        """
        first, self._closed = not self._closed, True
        if self._ended:
            return
        try:
            if first and not at_once and self._launcher is not None:
                self._ask_to_leave()
        except Exception:
            logger.exception("asking the ranks to leave failed")
        finally:
            self._end_whatever_comes()

    def _end_whatever_comes(self) -> None:
        interrupt = None
        while not self._ended:
            try:
                self._end()
                self._ended = True
            except (KeyboardInterrupt, SystemExit) as error:
                interrupt = error  # every step may be done again, and all have a bound
        if interrupt is not None:
            raise interrupt

    def _end(self) -> None:
        if self._launcher is not None:
            try:
                self._launcher.close(kill_after_seconds=0.0)  # whoever was asked had its time to leave
            except Exception:
                logger.exception("ending the rank processes failed")
        self._store = None
        if self._socket is not None:
            self._socket.close(linger=0)
        if self._context is not None:
            self._context.term()
        remove_private_folder(self._folder)

    def _ask_to_leave(self) -> None:
        call = self.next_call()
        for rank in self.pids:
            self._send(rank, messages.encode(messages.Shutdown(call)))
        deadline = time.monotonic() + SHUTDOWN_SECONDS
        while len(self._launcher.poll()) < self.ranks and time.monotonic() < deadline:
            self._receive()

    def __enter__(self) -> Frontend:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def private_folder() -> str:
    """A new folder of mode 0700 whose path leaves room for the name of a Unix socket."""
    folder = make_private_folder()
    try:
        if len(folder.encode()) <= MAX_FOLDER_BYTES:
            return folder
    except UnicodeEncodeError:
        pass  # bytes that are no UTF-8, as which messages carry it
    remove_private_folder(folder)
    return make_private_folder("/tmp")


def rebuild_error(failure: Failed) -> Exception:
    """The exception that a rank reported: of its class where that is public, else a DwdpError with its
    text."""
    from dwdp.config.gate import GateError

    if failure.arguments is not None:
        return getattr(errors, failure.kind)(*failure.arguments)
    known = {"GateError": GateError, "ValueError": ValueError}
    return known.get(failure.kind, errors.DwdpError)(failure.text)
