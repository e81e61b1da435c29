"""Where ranks listen, and what a look at their sockets tells about their processes."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys

import msgspec
import pytest

from dwdp import env
from dwdp.errors import ConfigError
from dwdp.group import place as places
from dwdp.group.place import ALIVE, GONE, UNSEEN, Listener, Place, look_at, sweep_up
from dwdp.group.ranks import Host

HERE, THERE = Host("boot", "here"), Host("other", "there")
LISTEN = """
import os, signal, sys, tempfile
from dwdp.group.place import Listener
from dwdp.group.ranks import Host
import msgspec
tempfile.tempdir = sys.argv[1]
listener = Listener(1, 2, Host("boot", "here"), sys.argv[2] if len(sys.argv) > 2 else None)
place = listener.open("127.0.0.1")
os.write(1, msgspec.json.encode(place) + b"\\n")
signal.pause()
"""


@pytest.fixture
def listening(tmp_path):
    """Starts a process that listens as rank 1 with the given folder; -> (it, its place)."""
    started = []

    def start(*arguments):
        process = subprocess.Popen(
            [sys.executable, "-c", LISTEN, str(tmp_path), *arguments], env=env.child_environment(), text=True,
            stdout=subprocess.PIPE,
        )  # fmt: skip
        started.append(process)
        return process, msgspec.json.decode(process.stdout.readline(), type=Place)

    yield start
    for process in started:
        process.kill()
        process.wait(10)
        process.stdout.close()


def kill(process, how=signal.SIGKILL):
    os.kill(process.pid, how)
    process.wait(10)


def test_a_process_is_alive_while_it_lives_frozen_or_not_and_gone_once_it_is_killed(listening):
    process, place = listening()
    remote = msgspec.structs.replace(place, host_id="other")
    assert [look_at(one, HERE, None) for one in (place, remote)] == [ALIVE, ALIVE]
    os.kill(process.pid, signal.SIGSTOP)
    # nobody accepts: a backlog that is full of such looks does not make it dead
    assert {look_at(one, HERE, None) for one in (place, remote) for _ in range(30)} == {ALIVE}
    kill(process)
    assert [look_at(one, HERE, None) for one in (place, remote)] == [GONE, GONE]


def test_a_socket_whose_folder_is_gone_tells_nothing_in_another_tree_of_files(listening):
    process, place = listening()
    kill(process)
    sweep_up(place, HERE, None)
    assert look_at(place, HERE, None) == GONE
    assert look_at(msgspec.structs.replace(place, root="a container's"), HERE, None) == UNSEEN


def test_what_a_killed_process_left_is_swept_up_and_nothing_else(listening, tmp_path):
    process, place = listening()
    folder = os.fsdecode(place.folder)
    kill(process)
    assert os.listdir(folder) == [place.name]
    for other in (
        msgspec.structs.replace(place, host_id="other"),
        msgspec.structs.replace(place, name="../precious"),
        msgspec.structs.replace(place, folder=os.fsencode(tmp_path)),
    ):
        sweep_up(other, HERE, None)
    assert os.listdir(folder) == [place.name]
    sweep_up(place, HERE, None)
    sweep_up(place, HERE, None)
    assert not os.path.exists(folder)


def test_a_given_folder_is_left_when_its_sockets_are_swept_up(listening, tmp_path):
    given = tmp_path / "dwdp-given"
    process, place = listening(str(given))
    kill(process)
    sweep_up(place, HERE, str(given))
    assert os.listdir(given) == [] and stat.S_IMODE(given.stat().st_mode) == 0o700


def test_a_shared_folder_is_found_where_each_rank_has_it(tmp_path):
    listener = Listener(0, 2, HERE, str(tmp_path / "mine"))
    place = listener.open(None)
    assert place.folder_for("/elsewhere") == "/elsewhere" and place.folder_for(None) == str(tmp_path / "mine")
    assert look_at(place, HERE, "/elsewhere") == UNSEEN and look_at(place, HERE, None) == ALIVE
    listener.close()
    assert look_at(place, HERE, "/elsewhere") == UNSEEN and look_at(place, HERE, None) == GONE
    private = Listener(0, 2, HERE, None)
    place = private.open(None)
    assert place.folder_for("/elsewhere") == os.fsdecode(place.folder)
    private.close()
    private.close()
    assert not os.path.exists(os.fsdecode(place.folder))


def test_a_folder_that_others_can_enter_is_refused_and_a_relative_one_becomes_absolute(tmp_path, monkeypatch):
    (tmp_path / "open").mkdir(mode=0o755)
    listener = Listener(0, 2, HERE, str(tmp_path / "open"))
    with pytest.raises(ConfigError, match="mode 0755"):
        listener.open(None)
    listener.close()
    monkeypatch.chdir(tmp_path)
    listener = Listener(0, 2, HERE, "relative")
    assert os.fsdecode(listener.open(None).folder) == str(tmp_path / "relative")
    listener.close()


def test_a_machine_that_does_not_answer_is_not_called_dead(monkeypatch):
    monkeypatch.setattr(places, "PROBE_TCP_SECONDS", 0.05)
    full = socket.socket()
    full.bind(("127.0.0.1", 0))
    full.listen(0)
    waiting = [socket.socket() for _ in range(4)]
    for sock in waiting:
        sock.setblocking(False)
        sock.connect_ex(full.getsockname())
    place = Place(rank=1, pid=1, host_id="other", host="there", claim="", root="", folder=b"", shared=False, name="",
                  address="127.0.0.1", port=full.getsockname()[1])  # fmt: skip
    assert look_at(place, HERE, None) == ALIVE
    assert look_at(msgspec.structs.replace(place, address=None), HERE, None) == ALIVE
    [sock.close() for sock in [full, *waiting]]
    assert look_at(place, HERE, None) == GONE and place.on == THERE


def test_old_sockets_that_nobody_listens_on_are_removed_from_a_given_folder(tmp_path):
    """Fails when age or listening is not looked at: a socket that is just being made refuses too."""
    folder = tmp_path / "given"
    folder.mkdir(mode=0o700)
    names = ["0" * 15 + f"{number}-{number}" for number in range(3)]
    held = []
    for name in [*names, "somebody-elses"]:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.bind(str(folder / name))
        held.append(sock)
        if name != names[2]:  # the last of ours is new
            os.utime(folder / name, (1, 1))
    held[1].listen()
    listener = Listener(3, 4, HERE, str(folder))
    mine = listener.open(None).name
    assert sorted(os.listdir(folder)) == sorted([*names[1:], "somebody-elses", mine])
    listener.close()
    [sock.close() for sock in held]
