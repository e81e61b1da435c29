"""The handle type is what works between the ranks, tried on a fake driver: hosts, IMEX, shortages, wrong bytes."""

import logging
import os
import threading
from dataclasses import replace

import pytest
import torch

from dwdp.errors import MemoryDomainError
from dwdp.group.comm import Group
from dwdp.group.ranks import Host
from dwdp.group.threads import run_rank_threads
from dwdp.memory.capability import choose_handle_type, probe_handle_types, take_handle_type, try_handle_types
from dwdp.memory.exchange import close_exported, exchange_handles
from dwdp.weights.plan import CopySlice
from tests.memory.fake_driver import GRANULE, CUresult, FakeCudaDomain, FakeDriver, FakeMachine, zero_live

NOT_SUPPORTED = CUresult.CUDA_ERROR_NOT_SUPPORTED


def choose(n=2, *, hosts=None, handle_type="auto", machine=None, per_rank=None, **driver_options):
    """choose_handle_type on n rank threads -> each rank's type, or its error; nothing stays behind.

    hosts: of each rank its host's name, or (identity, name).
    """
    machine = machine or FakeMachine()
    before = len(os.listdir("/proc/self/fd"))
    drivers = []

    def run(group):
        options = {**driver_options, **(per_rank or {}).get(group.rank, {})}
        if hosts:
            group._hosts = [Host(*host) if isinstance(host, tuple) else Host(host, host) for host in hosts]
            group.info = replace(group.info, host=group._hosts[group.rank].name)
            options["host"] = group._hosts[group.rank].id
        driver = FakeDriver(machine, **options)
        drivers.append(driver)
        forced = handle_type[group.rank] if isinstance(handle_type, list) else handle_type
        with FakeCudaDomain(group.rank, group.rank, handle_type=forced, driver=driver) as domain:
            try:
                chosen = choose_handle_type(domain, group)
                assert domain.handle_type == chosen and domain.create(GRANULE, "own").handle_type == chosen
            except MemoryDomainError as error:
                chosen = error
            domain.driver.api.fail.clear()
            assert domain.live()["ranges"] == 0
        return chosen

    def body(group):
        joined.append(group.join({}))
        return run(group)

    joined = []
    found = run_rank_threads(n, body, timeout=30)
    assert [driver.live() for driver in drivers] == [zero_live()] * n and machine.used == 0
    assert len(os.listdir("/proc/self/fd")) == before
    return found


def one_error(found):
    """The text of the error that every rank raised alike."""
    assert all(isinstance(one, MemoryDomainError) for one in found), found
    (text,) = {str(one) for one in found}
    return text


def test_fabric_is_taken_where_every_rank_can(caplog):
    with caplog.at_level(logging.INFO):
        assert choose(3, imex=True) == ["fabric"] * 3
    assert caplog.text.count("shares GPU memory by FABRIC handles (the first that works between all ranks)") == 3


def test_without_an_imex_channel_descriptors_are_taken_though_the_attribute_says_fabric(caplog):
    """The log names the path and why the better one is not taken."""
    with caplog.at_level(logging.INFO):
        assert choose(3) == ["posix_fd"] * 3
    assert "by POSIX_FD handles" in caplog.text and "FABRIC does not: rank 0: cuMemCreate failed with" in caplog.text


def test_one_rank_without_a_channel_decides_for_all():
    assert choose(3, imex=True, per_rank={1: {"imex": False}}) == ["posix_fd"] * 3


def test_fabric_spans_two_hosts():
    assert choose(4, hosts=["a", "a", "b", "b"], imex=True) == ["fabric"] * 4


def test_two_hosts_without_fabric_are_an_error_that_names_rank_call_result_and_cure():
    text = one_error(choose(2, hosts=["a", "b"], imex=True, per_rank={1: {"imex": False}}))
    assert "FABRIC: rank 1: cuMemCreate failed with CUDA_ERROR_NOT_PERMITTED (800)" in text
    assert "POSIX_FD: the ranks span host a (rank 0), host b (rank 1), descriptors stay on one host" in text
    assert "/dev/nvidia-caps-imex-channels" in text and "nvidia-smi -q" in text


@pytest.mark.parametrize("forced", ["auto", "fabric"])
def test_memory_of_another_host_is_reached_by_one_exchange_of_fabric_handles(forced):
    """Two hosts, one rank each: the type is tried, rows go around, are mapped read-only and copied byte for byte."""
    machine = FakeMachine()

    def run(group):
        group.join({"memory": "cuda"})
        group._hosts = [Host("a", "node-a"), Host("b", "node-b")]
        assert group.several_hosts
        driver = FakeDriver(machine, imex=True, host="ab"[group.rank])
        with FakeCudaDomain(group.rank, 0, handle_type=forced, driver=driver) as domain:
            assert choose_handle_type(domain, group) == "fabric" and not domain.exports_descriptors
            handle, own = domain.create(GRANULE, "rows"), domain.reserve(GRANULE)
            domain.map(own, 0, handle, writable=True)
            domain.tensor(own, 0, (GRANULE,), torch.uint8).copy_(rows_of(group.rank))
            answers = exchange_handles(group, domain, "rows", [domain.export(handle)], b"")
            peer = 1 - group.rank
            (exported,) = answers[peer][1]
            assert isinstance(exported, bytes) and answers[group.rank][1] == []
            there, into = domain.reserve(GRANULE), domain.reserve(GRANULE)
            domain.map(there, 0, domain.import_handle(exported, GRANULE), writable=False)
            domain.map(into, 0, domain.create(GRANULE, "into"), writable=True)
            domain.mover.copy([CopySlice(into.address, there.address, GRANULE, peer)])
            assert torch.equal(domain.tensor(into, 0, (GRANULE,), torch.uint8), rows_of(peer))
            assert domain.peers_read_only
            group.barrier("copied")
        return driver.live()

    assert run_rank_threads(2, run, timeout=30) == [zero_live()] * 2 and machine.used == 0


def rows_of(rank):
    """uint8 [GRANULE]"""
    return torch.randint(0, 256, (GRANULE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("call", ["cuMemExportToShareableHandle", "cuMemImportFromShareableHandle"])
def test_two_hosts_where_one_cannot_export_or_import_fabric_name_that_call(call):
    """No descriptor is passed between hosts, whatever fails."""
    text = one_error(choose(2, hosts=["a", "b"], imex=True, per_rank={1: {"fail": {call: NOT_SUPPORTED}}}))
    assert f"FABRIC: rank 1: {call} failed with CUDA_ERROR_NOT_SUPPORTED (801)" in text
    assert "descriptors stay on one host" in text and "Ranks on several hosts need FABRIC: " in text


def test_containers_of_one_host_with_names_of_their_own_pass_descriptors():
    """Fails when hosts are told by their names, which differ from container to container."""
    assert choose(2, hosts=[("one machine", "container-a"), ("one machine", "container-b")]) == ["posix_fd"] * 2


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle"])
@pytest.mark.parametrize("result", ["INVALID_VALUE", "INVALID_DEVICE", "NOT_PERMITTED", "NOT_SUPPORTED"])
def test_any_failure_of_fabric_but_a_shortage_moves_on_to_descriptors(call, result):
    code = getattr(CUresult, f"CUDA_ERROR_{result}")

    def fail(*args):
        kind = args[1].requestedHandleTypes if call == "cuMemCreate" else args[1]
        return code if int(kind) == 8 else None

    assert choose(2, imex=True, per_rank={1: {"fail": {call: fail}}}) == ["posix_fd"] * 2


@pytest.mark.parametrize("call", ["cuMemMap", "cuMemSetAccess"])
def test_a_failure_on_every_type_names_both(call):
    text = one_error(choose(2, imex=True, per_rank={1: {"fail": {call: NOT_SUPPORTED}}}))
    assert text.count(f"rank 1: {call} failed with CUDA_ERROR_NOT_SUPPORTED") == 2
    assert "no handle type works" in text and "FABRIC: " in text and "POSIX_FD: " in text


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemImportFromShareableHandle"])
def test_a_shortage_is_told_as_one_on_every_rank_and_tries_nothing_else(call):
    short = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    text = one_error(choose(2, imex=True, per_rank={1: {"fail": {call: short}}}))
    assert "out of memory" in text and f"rank 1: {call} failed with CUDA_ERROR_OUT_OF_MEMORY" in text
    assert "no handle type works" not in text


def test_a_full_device_is_a_shortage():
    text = one_error(choose(2, imex=True, machine=FakeMachine(gpu_bytes=GRANULE)))
    assert "CUDA_ERROR_OUT_OF_MEMORY" in text and "POSIX_FD handle trial" in text


def test_a_forced_type_is_the_only_one_tried_and_its_failure_is_an_error():
    assert choose(2, imex=True, handle_type="posix_fd") == ["posix_fd"] * 2
    text = one_error(choose(2, handle_type="fabric"))
    assert text.startswith("FABRIC handles were asked for and do not work") and "NOT_PERMITTED" in text
    assert "imex-channels" in text and "POSIX_FD" not in text
    text = one_error(choose(2, imex=True, hosts=["a", "b"], handle_type="posix_fd"))
    assert "POSIX_FD handles were asked for and do not work" in text and "span host a (rank 0), host b" in text
    assert "need FABRIC (handle_type: auto or fabric): " in text and "imex-channels" in text
    text = one_error(choose(2, hosts=["a", "b"], handle_type="fabric", imex=True, per_rank={1: {"imex": False}}))
    assert "FABRIC: rank 1: cuMemCreate failed with CUDA_ERROR_NOT_PERMITTED (800)" in text
    assert "POSIX_FD" not in text and "Ranks on several hosts need FABRIC: " in text
    assert choose(2, hosts=["a", "b"], handle_type="fabric", imex=True) == ["fabric"] * 2


def test_ranks_that_were_asked_for_different_types_are_told():
    assert "different handle types: auto, fabric" in one_error(choose(2, imex=True, handle_type=["fabric", "auto"]))


@pytest.mark.parametrize("imex", [False, True])
def test_memory_that_reads_back_wrong_is_never_taken(imex):
    """Every call succeeds and the bytes are lost, as behind a bad IOMMU."""
    text = one_error(choose(2, imex=imex, machine=FakeMachine(drop_writes=True)))
    assert "the memory of rank 0 read back wrong" in text and "IOMMU and PCIe ACS" in text


def test_every_type_is_tried_where_all_are_asked_about():
    """The doctor asks; what is taken afterwards is what a launch takes."""

    def run(group):
        group.join({})
        with FakeCudaDomain(group.rank, group.rank, driver=FakeDriver(machine, imex=True)) as domain:
            tried = try_handle_types(domain, group, every=True)
            assert domain.handle_type is None
            return tried, take_handle_type(domain, group, tried)

    machine = FakeMachine()
    assert run_rank_threads(2, run, timeout=30) == [({"fabric": [], "posix_fd": []}, "fabric")] * 2
    assert machine.used == 0


def test_one_rank_alone_needs_no_peer():
    assert choose(1) == ["posix_fd"]


def test_the_number_of_collectives_is_bounded(monkeypatch):
    counts = {}
    for name in ("allgather", "exchange_fds"):
        original = getattr(Group, name)

        def wrapped(group, *args, name=name, original=original, **kwargs):
            if group.rank == 0 and counting.is_set():
                counts[name] = counts.get(name, 0) + 1
            return original(group, *args, **kwargs)

        monkeypatch.setattr(Group, name, wrapped)
    counting = threading.Event()
    join = Group.join

    def joined(group, info):
        found = join(group, info)
        counting.set()
        return found

    monkeypatch.setattr(Group, "join", joined)
    choose(2, imex=True)
    assert counts == {"allgather": 2}


def test_a_single_process_can_ask_what_it_could_export():
    with FakeCudaDomain(0, 0, driver=FakeDriver(FakeMachine())) as domain:
        found = probe_handle_types(domain)
        assert found["posix_fd"] is None and "NOT_PERMITTED" in found["fabric"]
        assert domain.live()["handles"] == 0 and domain.handle_type is None


@pytest.mark.parametrize("handle_type", ["fabric", "posix_fd"])
def test_handles_are_exchanged_with_their_payload_whatever_the_type(handle_type):
    machine = FakeMachine()

    def run(group):
        group.join({})
        host = f"host{group.rank}" if handle_type == "fabric" else "host0"
        driver = FakeDriver(machine, imex=True, host=host)
        with FakeCudaDomain(group.rank, group.rank, handle_type=handle_type, driver=driver) as domain:
            handles = [domain.create(GRANULE, f"h{i}") for i in range(group.rank + 1)]
            exported = [domain.export(handle) for handle in handles]
            answers = exchange_handles(group, domain, "handles", exported, b"rank %d" % group.rank)
            assert [payload for payload, _ in answers] == [b"rank 0", b"rank 1", b"rank 2"]
            assert [len(sent) for _, sent in answers] == [0 if r == group.rank else r + 1 for r in range(3)]
            taken = answers[(group.rank + 1) % 3][1]
            domain.import_handle(taken.pop(), GRANULE)
            for _, sent in answers:
                close_exported(sent)
            group.barrier("imported")

    before = len(os.listdir("/proc/self/fd"))
    run_rank_threads(3, run, timeout=30)
    assert machine.used == 0 and len(os.listdir("/proc/self/fd")) == before
