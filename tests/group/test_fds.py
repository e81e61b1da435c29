"""Descriptors over a Unix socket and by pidfd_getfd."""

import ctypes
import errno
import os
import resource
import socket
import time
from types import SimpleNamespace

import pytest

from dwdp.group import fds as fds_module
from dwdp.group.fds import MAX_FDS_PER_MESSAGE, close_fds, recv_fds, send_fds, take_fd


@pytest.fixture
def pair():
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with a, b:
        yield a, b


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_received_descriptor_is_the_same_file_and_closed_at_exec(pair):
    a, b = pair
    fd = os.memfd_create("pattern")
    os.pwrite(fd, b"dwdp", 100)
    send_fds(a, [fd, fd], b"head")
    os.close(fd)
    payload, fds = recv_fds(b, time.monotonic() + 5)
    assert payload == b"head" and len(fds) == 2
    assert all(os.pread(one, 4, 100) == b"dwdp" and not os.get_inheritable(one) for one in fds)
    close_fds(fds)
    close_fds(fds)  # closed already: nothing happens


def test_the_largest_message_arrives_whole_and_a_larger_one_is_refused(pair):
    a, b = pair
    fd = os.memfd_create("x")
    send_fds(a, [fd] * MAX_FDS_PER_MESSAGE, b"x" * 65536)
    payload, fds = recv_fds(b, None)
    assert len(fds) == 250 and len(payload) == 65536
    close_fds(fds)
    for count, size in ((251, 1), (0, 0), (0, 65537)):
        with pytest.raises(ValueError):
            send_fds(a, [fd] * count, b"x" * size)
    os.close(fd)


def test_deadline_and_end_of_file_are_told_apart(pair):
    a, b = pair
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        recv_fds(b, start + 0.1)
    assert 0.09 < time.monotonic() - start < 2
    a.close()
    with pytest.raises(EOFError):
        recv_fds(b, None)


def test_a_message_that_the_descriptor_limit_cuts_leaves_nothing_open(pair):
    a, b = pair
    fd = os.memfd_create("x")
    send_fds(a, [fd] * 50, b"x")
    before = open_descriptors()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, hard))  # the 50 cannot all be below 40
        with pytest.raises(OSError, match="RLIMIT_NOFILE") as raised:
            recv_fds(b, None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert raised.value.errno == errno.EMFILE and open_descriptors() == before
    os.close(fd)


def test_take_fd_duplicates_a_descriptor_of_another_process():
    fd = os.memfd_create("mine")
    os.pwrite(fd, b"abc", 0)
    taken = take_fd(os.getpid(), fd)
    assert taken != fd and os.pread(taken, 3, 0) == b"abc"
    os.close(taken)
    os.close(fd)


def test_take_fd_names_call_and_cause():
    before = open_descriptors()
    with pytest.raises(OSError, match=rf"pidfd_getfd\(pid {os.getpid()}, descriptor 9999\): Bad file"):
        take_fd(os.getpid(), 9999)
    with pytest.raises(OSError, match="pidfd_open"):
        take_fd(2**22 + 5, 0)
    assert open_descriptors() == before


@pytest.mark.parametrize("number, cure", [(errno.EPERM, True), (errno.ENOSYS, True), (errno.ESRCH, False)])
def test_whichever_of_the_two_calls_is_refused_is_named_with_its_cure(monkeypatch, number, cure):
    """Fails when the hint is given for one of the calls only, or for every error."""
    before = open_descriptors()

    def refused(*args):
        ctypes.set_errno(number)
        return -1

    with monkeypatch.context() as patch:
        patch.setattr(fds_module, "_libc", SimpleNamespace(syscall=refused))
        with pytest.raises(OSError, match="pidfd_getfd") as getting:
            take_fd(os.getpid(), 0)

    def not_opened(pid):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pidfd_open", not_opened)
    with pytest.raises(OSError, match=f"pidfd_open.{os.getpid()}") as opening:
        take_fd(os.getpid(), 0)
    for caught in (getting, opening):
        assert caught.value.errno == number and ("CAP_SYS_PTRACE" in str(caught.value)) is cure
    assert open_descriptors() == before
