"""After which errors a rank process serves on."""

from __future__ import annotations

import pytest

from dwdp.errors import CheckpointError, GroupError, ModelUnusableError
from dwdp.executor import messages
from dwdp.executor.rank import RankServer


class Socket:
    """Hands the server these commands and keeps what it answers."""

    def __init__(self, commands) -> None:
        self.commands = [messages.encode(command) for command in commands]
        self.events: list = []

    def poll(self, _) -> bool:
        return True

    def recv(self) -> bytes:
        return self.commands.pop(0)

    def send_multipart(self, frames) -> None:
        self.events.append(messages.decode_event(frames[0]))


class Executor:
    """Fails as it is told."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def update_weights(self, path, **options) -> None:
        raise self.error

    def generate(self, items, **options):
        raise self.error

    def release(self) -> None:
        pass


@pytest.mark.parametrize(
    "error, update_fatal, generate_fatal",
    [
        (CheckpointError("does not fit"), False, True),
        (GroupError("rank 1 failed"), False, True),
        (OSError("disk gone"), False, True),
        (ModelUnusableError("half updated"), False, False),
        (KeyboardInterrupt(), True, True),
    ],
)
def test_a_failed_update_ends_no_rank_and_an_unusable_model_refuses_each_request(error, update_fatal, generate_fatal):
    """The front end can then say what happened and set up again in the same processes."""
    for command, fatal in (
        (messages.UpdateWeights(1, "/new"), update_fatal),
        (messages.Generate(1, []), generate_fatal),
    ):
        socket = Socket([command, messages.Shutdown(2)])
        server = RankServer(0, socket)
        server.executor = Executor(error)
        assert server.serve() == int(fatal)
        failed = socket.events[1]
        assert isinstance(failed, messages.Failed) and failed.fatal is fatal
        assert failed.kind == type(error).__name__
