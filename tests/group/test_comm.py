"""Collectives among rank threads: what each rank gets, and what each rank raises."""

import os
import secrets
import threading
import time

import pytest
import torch.distributed as dist

from dwdp.errors import ConfigError, GroupError, GroupTimeoutError
from dwdp.group import comm
from dwdp.group.backends import StoreGroup, publish_abort
from dwdp.group.fds import close_fds
from dwdp.group.place import ALIVE, GONE, LOOK_SECONDS
from dwdp.group.threads import run_rank_threads
from tests.support.groups import outcome


def errors_of(n, fn, **kwargs):
    """Runs `fn(group)`, which returns an exception, on n ranks whose groups stay open until all have
    theirs."""
    done = threading.Barrier(n)

    def body(group):
        error, _ = outcome(fn, group)
        done.wait(20)
        return error

    return run_rank_threads(n, body, **kwargs)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_allgather_gives_every_rank_all_payloads_in_rank_order(n):
    def body(group):
        group.join({"config": "abc"})
        raw = group.allgather("raw", bytes([group.rank]) * group.rank)
        objects = group.allgather_object("objects", {"rank": group.rank, "list": [1, None, "x"]})
        group.barrier("end")
        return raw, objects

    for raw, objects in run_rank_threads(n, body):
        assert raw == [bytes([rank]) * rank for rank in range(n)]
        assert objects == [{"rank": rank, "list": [1, None, "x"]} for rank in range(n)]


def test_payloads_of_megabytes_arrive_and_the_store_does_not_grow():
    store = dist.HashStore()
    payloads = [secrets.token_bytes(3_000_000) for _ in range(3)]
    sizes = []

    def body(rank):
        with StoreGroup(store, rank, 3, timeout_seconds=20) as group:
            for number in range(50):
                given = payloads[rank] if number % 25 == 0 else b"x"
                got = group.allgather(f"n{number}", given)
                assert got == (payloads if number % 25 == 0 else [b"x"] * 3)
                sizes.append(store.num_keys())

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(3)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(sizes) == 150 and max(sizes) <= 6


def test_different_tags_raise_on_every_rank_naming_ranks_and_tags():
    def body(group):
        group.barrier("same")
        group.barrier("left" if group.rank == 1 else "right")

    errors = errors_of(3, body)
    assert {type(e) for e in errors} == {GroupError}
    for error in errors:
        assert "rank 0 in 'right', rank 1 in 'left', rank 2 in 'right'" in str(error)


def test_a_rank_that_skipped_a_collective_is_a_mismatch_not_a_hang():
    def body(group):
        if group.rank != 1:
            group.barrier("first")
        group.barrier("second")

    for error in errors_of(3, body, timeout=20):
        assert "rank 0 in 'first', rank 1 in 'second', rank 2 in 'first'" in str(error)


def test_the_deadline_names_missing_ranks_and_tag_on_every_rank_and_reaches_the_late_ones():
    def body(group):
        if group.rank in (1, 3):
            time.sleep(0.6)
        group.barrier("load", timeout_seconds=0.3)

    errors = errors_of(4, body)
    assert {type(e) for e in errors} == {GroupTimeoutError}
    for error in errors:
        assert "ranks 1, 3 of 4 did not come to 'load'" in str(error) and "0.3 s" in str(error)


def test_progress_names_the_missing_ranks(monkeypatch, caplog):
    monkeypatch.setattr("dwdp.group.backends.PROGRESS_SECONDS", 0.1)
    caplog.set_level("INFO", logger="dwdp.group")

    def body(group):
        if group.rank == 1:
            time.sleep(0.35)
        group.barrier("slow")

    run_rank_threads(2, body)
    lines = [r.getMessage() for r in caplog.records if "has waited" in r.getMessage()]
    assert 2 <= len(lines) <= 4 and all("'slow' for rank 1" in line for line in lines)


def test_an_abort_ends_waiting_and_later_collectives_within_a_second():
    def body(group):
        if group.rank == 2:
            time.sleep(0.2)
            group.abort("disk full")
            group.abort("a later reason does not replace the first")
        error, seconds = outcome(group.barrier, "b")
        again, _ = outcome(group.barrier, "c")
        return error, seconds, again

    for error, seconds, again in run_rank_threads(3, body, timeout=30):
        assert type(error) is GroupError and seconds < 1
        assert str(error) == str(again) == "rank 2 aborted the group 'dwdp': disk full"


def test_an_interrupted_rank_aborts_its_peers():
    class Interrupting(StoreGroup):
        def _wait(self, *args):
            if self.rank == 1:
                raise KeyboardInterrupt
            return super()._wait(*args)

    store, errors = dist.HashStore(), {}

    def body(rank):
        group = Interrupting(store, rank, 2, timeout_seconds=20)
        # the post of rank 1 may be there before it is interrupted; it never comes to the next one
        errors[rank], seconds = outcome(lambda: [group.barrier(tag) for tag in "xy"])
        group.close()
        assert seconds < 1

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(2)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert type(errors[1]) is KeyboardInterrupt
    assert "rank 1 aborted" in str(errors[0]) and "KeyboardInterrupt" in str(errors[0])


def test_a_vote_raises_the_own_error_where_it_failed_and_names_it_elsewhere_and_the_group_goes_on():
    own = {1: MemoryError("no page 7"), 3: KeyboardInterrupt()}

    def body(group):
        error, _ = outcome(group.vote, "create", own.get(group.rank))
        group.vote("the next phase", None)
        return error, group.vote_with("data", None, {"from": group.rank})

    results = run_rank_threads(4, body)
    for rank, (error, data) in enumerate(results):
        assert data == [{"from": r} for r in range(4)]
        if rank in own:
            assert error is own[rank]
        else:
            assert isinstance(error, RuntimeError)
            assert str(error) == (
                "rank 1 failed in phase 'create': MemoryError: no page 7; "
                "rank 3 failed in phase 'create': KeyboardInterrupt"
            )


def test_when_the_verdict_fails_too_the_own_error_is_raised_with_it_as_context():
    def body(group):
        if group.rank == 0:
            group.vote("map", ValueError("mine"))
        time.sleep(0.4)

    with pytest.raises(ValueError, match="mine") as raised:
        run_rank_threads(2, body, timeout=0.2)
    assert isinstance(raised.value.__context__, GroupTimeoutError)
    assert "rank 1" in str(raised.value.__context__)


def test_a_payload_that_cannot_travel_fails_the_vote_instead_of_hanging_it():
    errors = errors_of(2, lambda g: g.vote_with("p", None, object() if g.rank else 1), timeout=20)
    assert "rank 1 failed in phase 'p': TypeError" in str(errors[0]) and isinstance(errors[1], TypeError)


def test_join_gives_all_reports_and_names_ranks_keys_and_values_that_differ():
    def good(group):
        return group.join({"config": "abc", "device_uuid": f"GPU-{group.rank}"})

    reports = run_rank_threads(3, good)[2]
    assert [r["rank"] for r in reports] == [0, 1, 2]
    assert all(r["pid"] == os.getpid() and r["size"] == 3 and r["config"] == "abc" for r in reports)

    def bad(group):
        group.join({"config": "abc" if group.rank != 2 else "abd"})

    for error in errors_of(3, bad):
        assert "rank 2 has config 'abd', most ranks have 'abc'" in str(error)


def test_two_ranks_on_one_device_are_refused_by_uuid_unless_allowed():
    uuids = ["GPU-a", "GPU-b", "GPU-a"]
    for error in errors_of(3, lambda g: g.join({"device_uuid": uuids[g.rank]})):
        assert "ranks 0, 2 are on one device, GPU-a" in str(error)
    run_rank_threads(3, lambda g: g.join({"device_uuid": uuids[g.rank], "allow_shared_device": True}))
    run_rank_threads(2, lambda g: g.join({"device_uuid": None}))


def test_groups_of_one_store_have_their_own_numbers_and_do_not_wait_for_each_other():
    store, results = dist.HashStore(), {}

    def body(world_rank):
        pair = StoreGroup(store, world_rank % 2, 2, name=f"pair{world_rank // 2}", timeout_seconds=20)
        everybody = StoreGroup(store, world_rank, 4, name="all", timeout_seconds=20)
        with pair, everybody:
            pair.join({})
            for number in range(3 if world_rank < 2 else 1):
                pair.barrier(f"n{number}")
            everybody.join({})
            results[world_rank] = everybody.allgather("all", bytes([world_rank]))

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert results == {rank: [b"\0", b"\1", b"\2", b"\3"] for rank in range(4)}


def test_late_and_double_ranks_are_refused_by_name_and_do_not_disturb_the_group():
    store = dist.HashStore()
    joined, refused = threading.Barrier(3), threading.Barrier(3)

    def body(rank):
        with StoreGroup(store, rank, 2, timeout_seconds=20) as group:
            group.join({})
            joined.wait(10)
            refused.wait(10)
            group.mark_setup_done()
            joined.wait(10)
            refused.wait(10)
            group.barrier("teardown")

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(2)]
    [t.start() for t in threads]
    texts = []
    for _ in range(2):
        joined.wait(10)
        with StoreGroup(store, 1, 2, timeout_seconds=20) as group:
            texts.append(str(outcome(group.join, {})[0]))
        refused.wait(10)
    [t.join() for t in threads]
    me = f"rank 1 (pid {os.getpid()} on "
    assert texts[0].startswith(me) and f"is refused: pid {os.getpid()}" in texts[0]
    assert texts[1].startswith(me) and "came too late: the group 'dwdp' has finished its setup" in texts[1]


@pytest.mark.parametrize("bound", [None, 0.3])
def test_the_option_of_the_deadline_is_named_only_where_it_is_the_deadline(bound):
    def body(group):
        group.join({})
        if group.rank == 1:
            return None
        with pytest.raises(GroupTimeoutError, match="rank 1 of 2 did not come to 'alone'") as caught:
            group.barrier("alone", timeout_seconds=bound)
        return "DWDP_RENDEZVOUS_TIMEOUT_S" in str(caught.value)

    store, found = dist.HashStore(), {}

    def run(rank):
        with StoreGroup(store, rank, 2, timeout_seconds=1.0) as group:
            found[rank] = body(group)
            done.wait(10)

    done = threading.Barrier(2)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert found == {0: bound is None, 1: None}


def test_a_rank_that_looks_gone_once_is_not_dead(monkeypatch):
    """Fails when one look is enough: a rank's post, or what it failed with, may be on its way."""
    seen = iter([GONE])
    monkeypatch.setattr(comm, "look_at", lambda *args: next(seen, ALIVE))

    def body(group):
        group.announce()
        if group.rank == 1:
            time.sleep(3 * LOOK_SECONDS)
        return len(group.join({}))

    assert run_rank_threads(2, body, timeout=10) == [2, 2]
    assert next(seen, None) is None, "somebody looked"


def test_a_group_may_be_set_up_again_and_its_numbers_go_on():
    """Fails when every end of a setup starts the numbers again: the third then finds the posts of the second."""
    came_late = threading.Event()

    def body(group):
        group.join({})
        for _ in range(2):
            group.mark_setup_done()
        if group.rank == 1:
            came_late.wait(0.3)
            came_late.set()
        group.mark_setup_done()
        assert came_late.is_set()
        return group.allgather_object("after", group.rank)

    assert run_rank_threads(2, body, timeout=10) == [[0, 1]] * 2


def test_a_process_outside_can_end_a_setup_in_the_name_of_a_dead_rank():
    store = dist.HashStore()
    group = StoreGroup(store, 0, 2, timeout_seconds=20)
    threading.Timer(0.1, publish_abort, (store, "dwdp", "rank 1 died"), {"dead_rank": 1}).start()
    error, seconds = outcome(group.join, {})
    group.close()
    assert error.rank == 1 and "rank 1 died" in str(error) and seconds < 1


def test_two_collectives_at_once_are_refused():
    group = StoreGroup(dist.HashStore(), 0, 2, timeout_seconds=1)
    thread = threading.Thread(target=outcome, args=(group.barrier, "a"))
    thread.start()
    time.sleep(0.1)
    assert "another collective runs" in str(outcome(group.barrier, "b")[0])
    group.abort("done")
    thread.join()
    group.close()
    assert "has closed the group" in str(outcome(group.barrier, "c")[0])


# -- descriptors


@pytest.mark.parametrize("n", [1, 2, 3])
def test_descriptors_reach_every_peer_and_show_the_same_bytes(n):
    def body(group):
        group.join({})
        own = []
        for number in range(group.rank + 1):
            fd = os.memfd_create(f"dwdp-test-{group.rank}")
            os.pwrite(fd, b"%d:%d" % (group.rank, number), 0)
            own.append(fd)
        entries = group.exchange_fds("handles", own, b"from %d" % group.rank)
        os.pwrite(own[0], b"later", 10)
        group.barrier("written")
        for rank, (payload, fds) in enumerate(entries):
            assert payload == b"from %d" % rank
            assert len(fds) == (0 if rank == group.rank else rank + 1)
            for number, fd in enumerate(fds):
                assert os.pread(fd, 10, 0).rstrip(b"\0") == b"%d:%d" % (rank, number)
            assert not fds or os.pread(fds[0], 5, 10) == b"later"
            close_fds(fds)
        group.barrier("read")
        close_fds(own)

    before = len(os.listdir("/proc/self/fd"))
    run_rank_threads(n, body)
    assert len(os.listdir("/proc/self/fd")) == before


def test_six_hundred_descriptors_go_in_one_exchange_both_ways_in_order():
    def body(group):
        group.join({})
        own = [os.memfd_create("many") for _ in range(600 if group.rank == 0 else 601)]
        inodes = group.allgather_object("inodes", [os.fstat(fd).st_ino for fd in own])
        entries = group.exchange_fds("many", own, b"")
        same = [os.fstat(fd).st_ino for fd in entries[1 - group.rank][1]] == inodes[1 - group.rank]
        group.barrier("compared")
        close_fds(own)
        close_fds(entries[1 - group.rank][1])
        return same

    assert run_rank_threads(2, body) == [True, True]


def test_a_failing_exchange_raises_on_all_leaves_nothing_open_and_the_next_one_works():
    before = len(os.listdir("/proc/self/fd"))
    done = threading.Barrier(3)

    def body(group):
        group.join({})
        own = [os.memfd_create("x") for _ in range(300)]
        given = [*own[:260], 99999, *own[260:]] if group.rank == 1 else own
        error, seconds = outcome(group.exchange_fds, "handles", given, b"")
        done.wait(10)
        entries = group.exchange_fds("handles again", own[:1], b"ok")
        assert [len(fds) for _, fds in entries] == [0 if r == group.rank else 1 for r in range(3)]
        for _, fds in entries:
            close_fds(fds)
        close_fds(own)
        return error, seconds

    results = run_rank_threads(3, body, timeout=30)
    assert isinstance(results[1][0], OSError)
    for rank in (0, 2):
        assert "rank 1 failed in phase 'handles: descriptors': OSError: [Errno 9]" in str(results[rank][0])
    assert all(seconds < 2 for _, seconds in results)
    assert len(os.listdir("/proc/self/fd")) == before


def test_descriptors_go_by_pidfd_getfd_when_messages_may_not_carry_them(monkeypatch):
    from dwdp.group import descriptors as exchange

    real = exchange.send_fds

    def refuse(sock, fds, payload, *, flags=0):
        if fds:
            raise PermissionError(1, "not in this sandbox")
        real(sock, fds, payload, flags=flags)

    monkeypatch.setattr(exchange, "send_fds", refuse)

    def body(group):
        group.join({})
        fd = os.memfd_create("x")
        os.pwrite(fd, b"%d" % group.rank, 0)
        taken = group.exchange_fds("h", [fd], b"")[1 - group.rank][1]
        content = os.pread(taken[0], 1, 0)
        close_fds([*taken, fd])
        return content

    assert run_rank_threads(2, body) == [b"1", b"0"]

    def fail(pid, fd):
        raise OSError(1, "pidfd_getfd(...): Operation not permitted; give the container CAP_SYS_PTRACE")

    monkeypatch.setattr(exchange, "take_fd", fail)
    with pytest.raises(GroupError, match="SCM_RIGHTS: .*not in this sandbox; pidfd_getfd.*CAP_SYS_PTRACE"):
        run_rank_threads(2, body)


def test_an_exchange_before_joining_is_refused():
    with pytest.raises(GroupError, match="has not joined"):
        run_rank_threads(2, lambda group: group.exchange_fds("h", [], b""))


# -- folders, leaving, leaks


def test_a_given_socket_folder_of_any_length_is_used_and_left_empty(tmp_path):
    folder = tmp_path / ("long" * 30)
    run_rank_threads(3, lambda group: group.join({}), socket_dir=str(folder))
    assert os.listdir(folder) == []
    os.chmod(folder, 0o755)
    with pytest.raises(ConfigError, match="mode 0755"):
        run_rank_threads(2, lambda group: group.join({}), socket_dir=str(folder))


def test_a_rank_that_cannot_see_the_folder_is_named_with_the_option(tmp_path):
    store, errors = dist.HashStore(), {}

    def body(rank):
        with StoreGroup(store, rank, 2, timeout_seconds=20, socket_dir=str(tmp_path / str(rank))) as group:
            errors[rank] = outcome(group.join, {})[0]

    start = time.monotonic()
    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(2)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert time.monotonic() - start < 5
    for error in errors.values():
        assert "DWDP_SOCKET_DIR" in str(error) and str(tmp_path) in str(error)


def test_a_clean_close_is_no_death_but_a_collective_that_needs_the_rank_says_that_it_left(caplog):
    deaths, closed = [], threading.Event()

    def body(group):
        group.join({})
        group.on_peer_death(deaths.append)
        group.mark_setup_done()
        if group.rank == 1:
            group.close()
            group.close()
            closed.set()
            return
        closed.wait(10)
        error, seconds = outcome(group.barrier, "needs all")
        assert type(error) is GroupError and "rank 1 left the group" in str(error) and seconds < 1
        group.barrier("the others", skip_dead=True)
        assert group.dead == set()

    run_rank_threads(3, body, timeout=30)
    assert deaths == [] and "died" not in caplog.text


def test_nothing_leaks_from_groups_that_joined_failed_or_aborted(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def fails(group):
        group.join({})
        group.vote("x", ValueError("no") if group.rank == 1 else None)

    def count():
        return len(os.listdir("/proc/self/fd")), threading.active_count(), os.listdir(tmp_path)

    run_rank_threads(3, lambda group: group.join({}))
    before = count()
    for _ in range(3):
        run_rank_threads(3, lambda group: group.join({}))
        with pytest.raises(ValueError):
            run_rank_threads(3, fails)
        with pytest.raises(GroupError):
            run_rank_threads(2, lambda group: group.join({"x": group.rank}))
    assert count() == before and before[2] == []
