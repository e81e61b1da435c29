"""Process entry of a rank: `python -m dwdp.executor.rank --control PATH --parent-socket PATH --rank K`.

[Note: a rank never outlives its front end] The first thing that the process does, before torch is imported,
is to hold a socket to the front end in a thread of its own. At its end-of-file the process leaves with all
its threads (`os._exit`), whatever they do: loading, copying, waiting in a collective. Nothing has to be told
to the peers; they notice a death by themselves.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections import deque

POLL_MILLISECONDS = 100


class RankServer:
    """Serves the front end's commands, one at a time, on the main thread.

    socket: a connected DEALER. Logs of any thread are queued and sent by the main thread, which alone may use
    it.
    """

    def __init__(self, rank: int, socket) -> None:
        self.rank, self.socket = rank, socket
        self.executor = None
        self._logs: deque = deque(maxlen=10_000)
        self._last_percent: dict[str, int] = {}

    def serve(self) -> int:
        """Runs until a shutdown or a fatal error; -> the exit code."""
        from dwdp.executor import messages

        self.send(messages.Hello(os.getpid()))
        while True:
            if not self.socket.poll(POLL_MILLISECONDS):
                self.flush_logs()
                continue
            command = messages.decode_command(self.socket.recv())
            try:
                self.handle(command)
            except BaseException as error:
                fatal = not self._goes_on(command, error)
                self.send(failure(command.call, error, fatal))
                if fatal:
                    return 1
            if isinstance(command, messages.Shutdown):
                return 0

    def _goes_on(self, command, error: BaseException) -> bool:
        """A refused request leaves the rank as it was, and a failed update leaves the old weights or a model that
        refuses to run; anything else may have left the rank half way."""
        from dwdp.errors import ModelReleasedError, ModelUnusableError, RequestError
        from dwdp.executor.messages import UpdateWeights

        if isinstance(command, UpdateWeights):
            return isinstance(error, Exception)
        return isinstance(error, (RequestError, ModelReleasedError, ModelUnusableError))

    def handle(self, command) -> None:
        from dwdp.executor import messages

        match command:
            case messages.Setup(call=call):
                self._setup(command)
                self.send(messages.Done(call))
            case messages.Generate(call=call, items=items, logits_sha256=hashed):
                results = self._ready().generate(items, logits_sha256=hashed)
                self.send(messages.Generated(call, results))
            case messages.Logits(call=call):
                logits = (
                    self._ready()
                    .logits(command.token_ids, chunk_size=command.chunk_size, decode=command.decode)
                    .contiguous()
                )
                frame = logits.numpy().astype("<f4", copy=False)
                self.send(messages.LogitsReady(call, list(logits.shape)), frame)
            case messages.UpdateWeights(call=call, path=path, check_only=check_only):
                self._last_percent.clear()
                self._ready().update_weights(path, check_only=check_only, progress=self.progress)
                self.send(messages.Done(call))
            case messages.MarkUnusable(call=call, reason=reason):
                if self.executor is not None:
                    self.executor.mark_unusable(reason)
                self.send(messages.Done(call))
            case messages.Report(call=call):
                self.send(messages.Reported(call, self._report()))
            case messages.Trace(call=call):
                import msgspec

                self.send(messages.Traced(call), msgspec.json.encode(self._ready().trace()))
            case messages.Release(call=call):
                self._release()
                self.send(messages.Done(call))
            case messages.Shutdown(call=call):
                self._release()
                self.send(messages.Done(call))

    def _ready(self):
        if self.executor is None:
            from dwdp.errors import ModelReleasedError

            raise ModelReleasedError(f"rank {self.rank} was released; set it up again first")
        return self.executor

    def _report(self) -> dict:
        if self.executor is not None:
            return self.executor.report()
        from dwdp.executor.create import empty_report

        return empty_report(self.rank)

    def _setup(self, command) -> None:
        import torch

        from dwdp.executor.create import build_rank, launched_group

        settings = command.settings
        torch.set_num_threads(max(1, settings.cores // settings.ranks))
        self._release()
        self._last_percent.clear()
        group = None
        if settings.has_group:
            group = launched_group(settings, self.rank, command.epoch)
        self.executor = build_rank(settings, group, rank=self.rank, progress=self.progress)

    def _release(self) -> None:
        executor, self.executor = self.executor, None
        if executor is not None:
            executor.release()

    def progress(self, stage: str, done: int, total: int) -> None:
        """Tells the front end how far a stage is, at most once a percent."""
        from dwdp.executor import messages

        percent = 100 * done // max(total, 1)
        if self._last_percent.get(stage) != percent and threading.current_thread() is threading.main_thread():
            self._last_percent[stage] = percent
            self.send(messages.Progress(stage, done, total))

    def log(self, level: int, name: str, text: str) -> None:
        """Queues a log record; sent at once on the main thread, else with its next message."""
        from dwdp.executor import messages

        self._logs.append(messages.Log(level, name, text))
        if threading.current_thread() is threading.main_thread():
            self.flush_logs()

    def flush_logs(self) -> None:
        from dwdp.executor import messages

        while self._logs:
            self.socket.send(messages.encode(self._logs.popleft()))

    def send(self, event, *frames) -> None:
        from dwdp.executor import messages

        self.flush_logs()
        self.socket.send_multipart([messages.encode(event), *frames])


def failure(call: int, error: BaseException, fatal: bool):
    """The error as a message."""
    from dwdp import errors
    from dwdp.executor import messages

    ours = getattr(errors, type(error).__name__, None) is type(error)
    return messages.Failed(
        call,
        type(error).__name__,
        messages.one_line(error) or type(error).__name__,
        fatal,
        arguments=list(error.__reduce__()[1]) if ours else None,
        echo=is_echo(error),
    )


def is_echo(error: BaseException) -> bool:
    """Whether the error only tells that another rank failed; the front end then shows that rank's own
    error."""
    from dwdp.errors import GroupError

    # a vote raises exactly RuntimeError on the ranks that had no error of their own
    return isinstance(error, GroupError) or type(error) is RuntimeError


class _ForwardLogs(logging.Handler):
    def __init__(self, server: RankServer) -> None:
        super().__init__(logging.INFO)
        self._server = server

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._server.log(record.levelno, record.name, self.format(record))
        except Exception:
            self.handleError(record)


def main(arguments: list[str]) -> int:
    """Serves one rank until the front end says so or is gone; -> the exit code."""
    import argparse

    parser = argparse.ArgumentParser(prog="python -m dwdp.executor.rank")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--parent-socket", required=True, help="the socket whose end-of-file ends this process")
    parser.add_argument("--control", required=True, help="the front end's socket for commands")
    options = parser.parse_args(arguments)
    # see [Note: a rank never outlives its front end]
    from dwdp.group.parent import PARENT_GONE_EXIT_CODE, watch_parent

    def leave() -> None:
        _remove_folder(options.control, options.parent_socket)
        os._exit(PARENT_GONE_EXIT_CODE)

    watch_parent(options.parent_socket, leave)
    import zmq

    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, str(options.rank).encode())
    socket.connect(f"ipc://{options.control}")
    server = RankServer(options.rank, socket)
    _forward_logs(server)
    try:
        return server.serve()
    finally:
        socket.close(linger=1000)
        context.term()


def _remove_folder(control: str, parent_socket: str) -> None:
    """What a front end that was killed could not remove: its sockets and, once empty, their folders."""
    folder = os.path.dirname(control)
    for remove, path in (
        (os.unlink, control),
        (os.unlink, parent_socket),
        (os.rmdir, os.path.join(folder, "ranks")),
        (os.rmdir, folder),
    ):
        try:
            remove(path)
        except OSError:
            pass


def _forward_logs(server: RankServer) -> None:
    """This package's logs go to the front end; warnings of libraries go nowhere, stderr is the front
    end's."""
    root = logging.getLogger("dwdp")
    root.setLevel(logging.INFO)
    root.propagate = False
    root.addHandler(_ForwardLogs(server))
    logging.captureWarnings(True)
    logging.getLogger("py.warnings").addHandler(logging.NullHandler())
    logging.getLogger("py.warnings").propagate = False


if __name__ == "__main__":
    # Ctrl-C is for the front end, which then tells its ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # no thread of a failed set-up may keep the process alive
    os._exit(code)
