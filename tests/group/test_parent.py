"""A child notices that its parent is gone; socket folders that others can enter are refused."""

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from dwdp import env
from dwdp.errors import ConfigError
from dwdp.group.parent import (
    PARENT_GONE_EXIT_CODE,
    ParentSocket,
    check_socket_folder,
    end_with_this_process,
    leave_nothing,
    make_private_folder,
    watch_parent,
)

# a copy that runs for ever in C without the interpreter lock, as memmove does
BUSY_CHILD = """
import ctypes, sys
from dwdp.group.parent import watch_parent
assert "torch" not in sys.modules
watch_parent(sys.argv[1])
print("ready", flush=True)
ctypes.CDLL(None).pause()
"""


def test_a_child_in_a_long_c_call_ends_when_the_parents_socket_closes():
    with ParentSocket(1) as parent:
        child = subprocess.Popen(
            [sys.executable, "-c", BUSY_CHILD, parent.path],
            env=env.child_environment(),
            stdout=subprocess.PIPE,
        )
        assert child.stdout.readline() == b"ready\n"
        assert child.poll() is None
    assert child.wait(5) == PARENT_GONE_EXIT_CODE
    child.stdout.close()


def test_a_parent_that_is_gone_already_counts_as_closed():
    with ParentSocket(1) as parent:
        folder = os.path.dirname(parent.path)
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert not os.path.exists(folder)
    called = []
    assert watch_parent(parent.path, lambda: called.append(1)) is None
    assert called == [1]


def test_a_watch_may_take_an_inherited_socket_and_may_be_ended():
    for ending in ("parent closes", "watch closes"):
        ours, theirs = socket.socketpair()
        gone = threading.Event()
        watch = watch_parent(theirs.detach(), gone.set)
        if ending == "parent closes":
            ours.close()
            assert gone.wait(2)
        watch.close()
        watch.close()
        ours.close()
        time.sleep(0.02)
        assert gone.is_set() == (ending == "parent closes")
    assert not any(t.name == "dwdp-parent-watch" for t in threading.enumerate())


def test_socket_folders_are_made_private_and_others_refused(tmp_path, monkeypatch):
    made = str(tmp_path / "new")
    check_socket_folder(made, create=True)
    assert stat.S_IMODE(os.stat(made).st_mode) == 0o700
    os.chmod(made, 0o750)
    with pytest.raises(ConfigError, match=r"DWDP_SOCKET_DIR.*mode 0750.*0700"):
        check_socket_folder(made, create=True)
    with pytest.raises(ConfigError, match="No such file.*DWDP_SOCKET_DIR"):
        check_socket_folder(str(tmp_path / "absent"), create=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is not a folder"):
        check_socket_folder(str(tmp_path / "file"), create=True)
    os.chmod(made, 0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="runs as uid 12345"):
        check_socket_folder(made, create=True)


def test_a_folder_with_a_long_path_serves_too(tmp_path):
    long = tmp_path / ("x" * 120)
    long.mkdir(mode=0o700)
    gone = threading.Event()
    with ParentSocket(1, folder=str(long)) as parent:
        watch = watch_parent(parent.path, gone.set)
        assert not gone.wait(0.05)
    assert gone.wait(2) and os.listdir(long) == []
    watch.close()


def test_a_fork_of_the_parent_keeps_no_child_alive():
    fork = None
    with ParentSocket(1) as parent:
        gone = threading.Event()
        watch_parent(parent.path, gone.set)
        fork = os.fork()
        if fork == 0:
            time.sleep(60)
            os._exit(0)
    try:
        assert gone.wait(5)
    finally:
        os.kill(fork, signal.SIGKILL)
        os.waitpid(fork, 0)


def test_where_no_folder_can_be_made_the_variable_is_named(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(ConfigError, match="TMPDIR"):
        ParentSocket(1)


def test_a_process_that_ends_without_its_clean_ups_kills_its_children_and_removes_its_folders():
    class Children:
        killed = 0

        def kill(self):
            self.killed += 1

    children, folder = Children(), make_private_folder()
    end_with_this_process(children)
    leave_nothing()
    assert children.killed == 1 and not os.path.exists(folder)
