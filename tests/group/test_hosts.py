"""Groups whose ranks are on several hosts, by fake host identities on loopback, and the group's token."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time

import pytest
import torch.distributed as dist

from dwdp.errors import GroupError
from dwdp.group import handshake, links
from dwdp.group.backends import StoreGroup, connect_store, host_store
from dwdp.group.comm import Group
from dwdp.group.ranks import Host, name_hosts
from tests.support.groups import Ranks, listening, outcome

A, B = Host("boot-a", "node-a"), Host("boot-b", "node-b")
TWO_HOSTS = [A, A, B, B]
SECRET = "a-very-s3cret-word"


def run_ranks(body, *, hosts=TWO_HOSTS, tokens=None, store=None, timeout=20.0):
    """-> what `body(group)` returned or raised on each rank; all groups stay open until every rank has its own."""
    store = store or dist.HashStore()
    tokens = [SECRET] * len(hosts) if tokens is None else tokens
    found, done = {}, threading.Barrier(len(hosts))

    def run(rank):
        given = {"token": tokens[rank], "host": hosts[rank], "timeout_seconds": timeout}
        with StoreGroup(store, rank, len(hosts), **given) as group:
            try:
                found[rank] = body(group)
            except Exception as error:
                found[rank] = error
            done.wait(20)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(hosts))]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return [found[rank] for rank in range(len(hosts))]


def texts(errors, kind=GroupError):
    assert {type(error) for error in errors} == {kind}, errors
    return [str(error) for error in errors]


def test_the_boot_id_tells_hosts_apart_and_the_name_is_for_messages(monkeypatch, tmp_path):
    with open("/proc/sys/kernel/random/boot_id") as file:
        assert Host.here() == Host(file.read().strip(), socket.gethostname())
    monkeypatch.setattr("dwdp.group.ranks.BOOT_ID_FILE", str(tmp_path / "none"))
    assert Host.here().id == Host.here().name == socket.gethostname()
    assert name_hosts([A, B, Host("boot-a", "container")]) == "host node-a (ranks 0, 2), host node-b (rank 1)"


def test_containers_of_one_host_are_one_host_whatever_their_names():
    def body(group):
        reports = group.join({"memory": "host"})
        fd = os.memfd_create("dwdp-test-0")
        entries = group.exchange_fds("handles", [fd], b"")
        taken = entries[1 - group.rank][1]
        same = os.fstat(taken[0]).st_ino
        os.close(fd)
        os.close(taken[0])
        return [report["host"] for report in reports], same > 0

    for names, passed in run_ranks(body, hosts=[Host("boot", "c1"), Host("boot", "c2")], tokens=["", ""]):
        assert names == ["c1", "c2"] and passed


def test_ranks_on_two_hosts_join_gather_vote_and_keep_one_connection_a_pair():
    def body(group):
        reports = group.join({"config": "same"})
        families = {peer: sock.family for peer, sock in group._peers.socks.items()}
        alive = {
            (sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
             sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
            for sock in group._peers.socks.values()
            if sock.family != socket.AF_UNIX
        }  # fmt: skip
        handle = bytes([group.rank]) * 64  # an opaque handle of CUDA's FABRIC type travels as a payload
        got = group.allgather("handles", handle)
        error, _ = outcome(group.vote, "map", MemoryError("no") if group.rank == 3 else None)
        group.mark_setup_done()
        group.barrier("teardown", skip_dead=True)
        assert group._peers.listener.sockets == []
        return [report["host"] for report in reports], families, alive, got, error

    for rank, (names, families, alive, got, error) in enumerate(run_ranks(body)):
        assert names == ["node-a", "node-a", "node-b", "node-b"]
        for peer, family in families.items():
            assert family == (socket.AF_UNIX if TWO_HOSTS[rank] == TWO_HOSTS[peer] else socket.AF_INET)
        assert len(families) == 3 and alive == {(1, 9000)}
        assert got == [bytes([r]) * 64 for r in range(4)]
        assert type(error) is MemoryError if rank == 3 else "rank 3 failed in phase 'map'" in str(error)


def test_descriptors_cannot_cross_hosts_and_every_rank_says_so_and_goes_on():
    def body(group):
        group.join({})
        error, _ = outcome(group.exchange_fds, "expert handles", [], b"")
        group.barrier("afterwards")
        return error

    for text in texts(run_ranks(body)):
        assert (
            "'expert handles': the ranks of group 'dwdp' span host node-a (ranks 0, 1), host node-b (ranks 2, 3)"
            in text
        )
        assert "descriptors cannot cross hosts: run all ranks on one host, or use CUDA memory" in text


def test_host_memory_is_refused_at_the_join_of_ranks_on_two_hosts():
    for text in texts(run_ranks(lambda group: group.join({"memory": "host"}))):
        assert "span host node-a (ranks 0, 1), host node-b (ranks 2, 3), and host memory cannot be shared" in text
        assert "\n" not in text and "fabric" in text
    for reports in run_ranks(lambda group: group.join({"memory": "cuda"})):
        assert len(reports) == 4


def test_ranks_that_span_hosts_need_a_token():
    for text in texts(run_ranks(lambda group: group.join({}), tokens=[""] * 4)):
        assert text.endswith(
            "the ranks span host node-a (ranks 0, 1), host node-b (ranks 2, 3): set DWDP_GROUP_TOKEN to one secret on "
            "all of them"
        )
    for text in texts(run_ranks(lambda group: group.join({}), tokens=[SECRET, SECRET, "", SECRET])):
        assert "node-b (ranks 2, 3): set DWDP_GROUP_TOKEN to one secret on all of them; rank 2 has none" in text


@pytest.mark.parametrize("hosts", [TWO_HOSTS, [A] * 4], ids=["two hosts", "one host"])
def test_a_rank_with_another_token_is_named_by_every_rank(hosts):
    """Fails when `proves` accepts every proof, and when only the rank that found it raises."""
    for text in texts(run_ranks(lambda group: group.join({}), hosts=hosts, tokens=[SECRET, SECRET, "other", SECRET])):
        assert text.endswith("rank 2 has another group token (DWDP_GROUP_TOKEN) than the other ranks")


def test_two_ranks_with_different_tokens_are_both_named():
    for text in texts(run_ranks(lambda group: group.join({}), hosts=[A, A], tokens=["one", "two"])):
        assert text.endswith("ranks 0, 1 have different group tokens (DWDP_GROUP_TOKEN)")


def test_on_one_host_a_token_is_optional_but_one_rank_without_is_named():
    assert all(len(reports) == 3 for reports in run_ranks(lambda g: g.join({}), hosts=[A] * 3, tokens=[""] * 3))
    for text in texts(run_ranks(lambda group: group.join({}), hosts=[A] * 3, tokens=[SECRET, "", SECRET])):
        assert text.endswith("rank 1 has no group token and the others have one: set DWDP_GROUP_TOKEN on all")


def test_the_token_of_the_environment_is_used(monkeypatch, tmp_path):
    (tmp_path / "token").write_text(SECRET)
    (tmp_path / "token").chmod(0o600)
    monkeypatch.setenv("DWDP_GROUP_TOKEN", str(tmp_path / "token"))
    errors = run_ranks(lambda group: group.join({}), tokens=[None, SECRET, None, "other"])
    for text in texts(errors):
        assert text.endswith("rank 3 has another group token (DWDP_GROUP_TOKEN) than the other ranks")


def test_a_rank_that_only_claims_to_have_the_token_gets_no_handle():
    """The proof of a connector that does not check its peer's is checked all the same.

    Fails when the acceptor takes any Proof: rank 0 then holds a connection to rank 1."""
    lying = threading.local()
    real = handshake.proves

    def trusting(*args):
        return True if getattr(lying, "on", False) else real(*args)

    held = {}

    def body(group):
        lying.on = group.rank == 1
        error, _ = outcome(group.join, {})
        held[group.rank] = sorted(group._peers.socks)
        return error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handshake, "proves", trusting)
        errors = run_ranks(body, hosts=[A, A, A], tokens=[SECRET, "guess", SECRET])
    for text in texts(errors):
        assert "rank 1 has another group token" in text
    assert held[0] == [2] and held[2] == [0]


def test_the_token_is_never_sent_shown_or_logged(monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    sent = []
    monkeypatch.setattr(handshake, "send_message", lambda sock, m: (sent.append(links.encode(m)),
                                                                    links.send_message(sock, m)))  # fmt: skip
    gather = Group.allgather

    def recorded(group, tag, payload):
        sent.append(payload)
        return gather(group, tag, payload)

    monkeypatch.setattr(Group, "allgather", recorded)
    results = run_ranks(lambda group: group.join({}))
    results += run_ranks(lambda group: group.join({}), tokens=[SECRET, SECRET + "x", SECRET, SECRET])
    assert len(sent) > 20 and not any(SECRET.encode() in data for data in sent)
    assert SECRET not in caplog.text and not any(SECRET in str(result) for result in results)


def test_strangers_on_the_tcp_port_do_not_disturb_the_group():
    """One says nothing, one sends rubbish, one greets as a rank and is silent, one hangs up."""
    store, ready = dist.HashStore(), threading.Event()
    strangers = []

    def body(group):
        if group.rank == 0:
            group.announce()
            where = (group._place.address, group._place.port)
            for word in (b"", b"\xff" * 100, b"x", b"GET / HTTP/1.1\r\n\r\n"):
                strangers.append(socket.create_connection(where))
                strangers[-1].send(word) if word else None
            strangers.pop().close()
            ready.set()
        else:
            ready.wait(10)
        return len(group.join({}))

    start = time.monotonic()
    assert run_ranks(body, store=store) == [4] * 4
    assert time.monotonic() - start < 5
    [stranger.close() for stranger in strangers]


def test_a_stranger_cannot_be_a_rank_of_this_host_over_tcp():
    """On one host a token is optional, and the user's id and the private folder keep strangers out: over TCP nothing
    would. Fails when a rank of this host is taken at a TCP socket."""
    announced = threading.Event()
    answers = []

    def body(group):
        if group.rank == 1:
            announced.wait(10)
            time.sleep(0.3)
            return len(group.join({}))
        group.announce()
        stranger = socket.create_connection((group._place.address, group._place.port), timeout=5)
        links.send_message(stranger, links.Hello("dwdp", 1, 0, b"n" * 16))
        announced.set()
        joined = len(group.join({}))
        answers.append(stranger.recv(100))
        stranger.close()
        return joined

    assert run_ranks(body, hosts=[A, A], tokens=["", ""]) == [2, 2]
    assert answers == [b""]


def test_a_listening_rank_listens_on_the_address_by_which_it_reaches_the_store_alone():
    store, port = host_store()
    before = listening()
    group = StoreGroup(connect_store(port), 0, 2, timeout_seconds=5)
    group.announce()
    new = listening() - before
    assert new == {("127.0.0.1", group._place.port)} and group._place.address == "127.0.0.1"
    group.close()
    assert listening() == before
    del store


def test_a_rank_without_an_address_for_other_hosts_is_named():
    def body(group):
        group._own_address = lambda: None if group.rank == 2 else "127.0.0.1"
        return group.join({})

    for text in texts(run_ranks(body)):
        assert "rank 2 on host node-b cannot be reached from other hosts: its group has no store" in text

    def elsewhere(group):
        group._own_address = lambda: "192.0.2.1" if group.rank == 2 else "127.0.0.1"
        return group.join({})

    for text in texts(run_ranks(elsewhere)):
        assert "rank 2 on host node-b cannot be reached from other hosts: cannot listen on 192.0.2.1" in text


def test_nothing_is_left_of_groups_on_two_hosts(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def count():
        return len(os.listdir("/proc/self/fd")), threading.active_count(), os.listdir(tmp_path)

    run_ranks(lambda group: group.join({}))
    before = count()
    for tokens in (None, [SECRET, "x", SECRET, SECRET], [""] * 4):
        run_ranks(lambda group: group.join({}), tokens=tokens)
    assert count() == before and before[2] == []


def test_a_killed_rank_of_another_host_is_named_by_all_within_a_second_and_they_go_on():
    store, port = host_store()
    with Ranks(4, port, "hosts") as ranks:
        time.sleep(0.3)
        killed = time.time()
        os.kill(ranks.pids[3], signal.SIGKILL)
        outcomes, err = ranks.end()
    assert sorted(outcomes) == [0, 1, 2], err
    for line in outcomes.values():
        assert line["error"] == "RankDiedError" and "rank 3 died" in line["text"]
        assert line["at"] - killed < 1 and line["dead"] == [3]
    assert err.count("rank 3 died") == 3 and "Traceback" not in err
    del store


def test_a_clean_close_on_another_host_is_no_death():
    deaths, closed = [], threading.Event()

    def body(group):
        group.join({})
        group.on_peer_death(deaths.append)
        group.mark_setup_done()
        if group.rank == 2:
            group.close()
            closed.set()
            return "left"
        closed.wait(10)
        error, _ = outcome(group.barrier, "needs all")
        group.barrier("the others", skip_dead=True)
        return str(error)

    found = run_ranks(body)
    assert all("rank 2 left the group" in text for rank, text in enumerate(found) if rank != 2) and deaths == []
