"""Groups of processes over a TCPStore: deaths, a store that goes away, addresses."""

import gc
import os
import signal
import socket
import threading
import time

import pytest
import torch.distributed as dist

from dwdp.errors import GroupError, GroupTimeoutError, RankDiedError
from dwdp.group.backends import StoreGroup, connect_store, host_store
from dwdp.group.posts import Deadline
from dwdp.group.store_client import StoreClient
from tests.support.groups import Ranks, free_port, listening


def test_a_killed_rank_is_named_by_the_others_within_a_second_and_they_go_on():
    store, port = host_store()
    with Ranks(3, port, "serving") as ranks:
        time.sleep(0.3)  # the others wait in the collective
        killed = time.time()
        os.kill(ranks.pids[2], signal.SIGKILL)
        outcomes, err = ranks.end()
    assert sorted(outcomes) == [0, 1]
    for line in outcomes.values():
        assert line["error"] == "RankDiedError" and "rank 2 died" in line["text"]
        assert line["at"] - killed < 1 and line["dead"] == [2]
    assert err.count("rank 2 died") == 2 and "Traceback" not in err
    del store


def test_when_the_rank_that_serves_the_store_is_killed_the_others_name_it_without_a_trace_on_stderr():
    with Ranks(3, free_port(), "host") as ranks:
        time.sleep(0.2)
        killed = time.time()
        os.kill(ranks.pids[0], signal.SIGKILL)
        outcomes, err = ranks.end()
    assert sorted(outcomes) == [1, 2]
    for line in outcomes.values():
        assert line["error"] == "RankDiedError" and "rank 0" in line["text"]
        assert line["at"] - killed < 1
    assert "frame #" not in err and "Traceback" not in err


def test_a_frozen_host_of_the_store_ends_no_wait_later_than_the_deadline_and_is_named():
    port = free_port()
    with Ranks(1, port, "store") as ranks:
        group = StoreGroup(connect_store(port), 1, 2, timeout_seconds=1.2, host_rank=0)
        os.kill(ranks.pids[0], signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(GroupTimeoutError, match="store, served by rank 0, did not answer within 1.2 s in 'x'"):
            group.barrier("x")
        group.close()
        assert time.monotonic() - start < 5


def test_the_host_of_the_store_leaves_last_so_nobody_loses_the_final_barrier():
    with Ranks(4, free_port(), "leave") as ranks:
        outcomes, err = ranks.end()
    assert sorted(outcomes) == [0, 1, 2, 3] and all(line["left"] for line in outcomes.values()), err
    assert "died" not in err


def test_the_store_listens_on_the_given_address_only():
    before = listening()
    store, port = host_store()
    assert listening() - before == {("127.0.0.1", port)}
    with pytest.raises(GroupError, match=f"127.0.0.1:{port}: Address already in use"):
        host_store("127.0.0.1", port)
    client = connect_store(port)
    client.set("k", b"v")
    assert store.get("k") == b"v"
    del client, store


def test_a_store_that_nobody_serves_is_named_at_the_deadline_and_not_long_after(capfd):
    port = free_port()
    start = time.monotonic()
    with pytest.raises(GroupTimeoutError, match=f"rank 0 does not serve .*127.0.0.1:{port} within 0.4 s"):
        connect_store(port, timeout_seconds=0.4, served_by="rank 0")
    assert time.monotonic() - start < 1.5
    assert capfd.readouterr().err == ""


def test_a_store_that_is_gone_before_the_group_is_closed_hangs_and_raises_nothing_at_close():
    store, port = host_store()
    group = StoreGroup(connect_store(port), 1, 2, timeout_seconds=5, host_rank=0)
    del store
    with pytest.raises(GroupError, match="rank 0, which serves it, died or left"):
        group.barrier("x")
    group.close()


def test_a_tcp_group_leaves_no_thread_and_no_descriptor():
    store, port = host_store()
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()

    def body(rank):
        client = connect_store(port)
        with StoreGroup(client, rank, 2, name="g", timeout_seconds=20) as group:
            group.join({})

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(2)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    del threads
    deadline = time.monotonic() + 3  # the server notices a client's end on its own thread
    while (now := (len(os.listdir("/proc/self/fd")), threading.active_count())) != before:
        assert time.monotonic() < deadline, (before, now)
        time.sleep(0.02)
    del store


def test_a_stranger_that_listens_and_never_answers_is_named_at_the_deadline():
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        start = time.monotonic()
        with pytest.raises(GroupTimeoutError, match=f"127.0.0.1:{port}: something else listens there"):
            connect_store(port, timeout_seconds=1.2)
        assert time.monotonic() - start < 4


def test_a_host_of_the_store_that_dies_while_it_is_connected_to_is_named_at_once():
    """Fails when `_listens` is not asked: the wait then lasts until the deadline."""
    stranger = socket.socket()
    stranger.bind(("127.0.0.1", 0))
    stranger.listen()
    port = stranger.getsockname()[1]
    threading.Timer(0.6, stranger.close).start()
    start = time.monotonic()
    with pytest.raises(GroupError, match=f"rank 0, which served the group's store at 127.0.0.1:{port}, died or left"):
        connect_store(port, timeout_seconds=20, served_by="rank 0")
    assert time.monotonic() - start < 4


def test_a_store_that_never_answers_ends_the_wait_once_its_host_is_known_to_be_dead():
    """As when the host vanishes: its connection stays open, and the peers' sockets tell.

    Fails when `_wait_for` does not ask `is_host_gone`."""
    port, dead = free_port(), threading.Event()
    with Ranks(1, port, "store") as ranks:
        client = StoreClient(connect_store(port), 0, dead.is_set)
        os.kill(ranks.pids[0], signal.SIGSTOP)
        threading.Timer(0.3, dead.set).start()
        start = time.monotonic()
        with pytest.raises(RankDiedError, match="rank 0, which serves it, died or left"):
            client.call("check", ["key"], deadline=Deadline(20, "x"))
        assert time.monotonic() - start < 2
        client.close()


def test_an_abort_behind_a_collective_leaves_the_slower_rank_its_outcome_and_ends_the_next():
    """Fails when every abort that is found ends the collective under way: then the verdicts of the ranks differ."""
    store, aborted = dist.HashStore(), threading.Event()

    class Slow(StoreGroup):
        def _raise_if_aborted(self, *args):
            assert aborted.wait(10)  # the other rank has read all, failed, and said so
            super()._raise_if_aborted(*args)

    fast, slow = StoreGroup(store, 0, 2, timeout_seconds=20), Slow(store, 1, 2, timeout_seconds=20)
    found: list[list[bytes]] = []
    thread = threading.Thread(target=lambda: found.append(slow.allgather("verdict", b"1")))
    thread.start()
    assert fast.allgather("verdict", b"0") == [b"0", b"1"]
    fast.abort("what all have read is bad")
    aborted.set()
    thread.join(10)
    assert found == [[b"0", b"1"]]
    with pytest.raises(GroupError, match="rank 0 aborted the group .*: what all have read is bad"):
        slow.allgather("next", b"")
    for group in (fast, slow):
        group.close()
