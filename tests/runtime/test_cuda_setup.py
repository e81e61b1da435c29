"""Both set-ups over the CUDA domain and device on the fake driver: two hosts by FABRIC, one by descriptors."""

import contextlib
import gc
import os
import time

import pytest

from dwdp.group.ranks import Host
from dwdp.group.threads import run_rank_threads
from dwdp.memory.capability import choose_handle_type
from dwdp.memory.driver import DriverError
from tests.device.test_cuda import FakeCudaDevice
from tests.memory.fake_driver import CUresult, FakeCudaDomain, FakeDriver, FakeMachine, zero_live
from tests.support.dense_ranks import NOTHING_LIVE, dense_ranks, forward_and_check
from tests.support.toy_decoder import snapshot as dense_snapshot
from tests.weights.fake_experts import (
    build_model,
    partition_of,
    raw,
    reference_layers,
    set_up,
    snapshot,
    take_down,
    unchanged,
)

HOSTS = {"fabric": lambda rank: f"host{rank % 2}", "posix_fd": lambda rank: "host0"}


class Cluster:
    """Fake GPUs of one or two hosts; `parts(group)` gives a rank its domain, whose type was tried, and device."""

    def __init__(self, handle_type, **driver_options):
        self.handle_type, self.options = handle_type, {"imex": handle_type == "fabric", **driver_options}
        self.machine = FakeMachine()
        self.drivers = []

    @contextlib.contextmanager
    def parts(self, group):
        host = HOSTS[self.handle_type](group.rank)
        group._hosts = [Host(HOSTS[self.handle_type](rank), "") for rank in range(group.size)]
        driver = FakeDriver(self.machine, host=host, **self.options)
        self.drivers.append(driver)
        domain = FakeCudaDomain(group.rank, group.rank, page_granules=1, driver=driver)
        with domain, FakeCudaDevice(api=driver, num_aux=1, measure_waits=True) as device:
            assert choose_handle_type(domain, group) == self.handle_type
            yield domain, device

    def experts(self, n, body):
        def run(group):
            group.join({})
            with self.parts(group) as (domain, device):
                return body(group, domain, device)

        found = run_rank_threads(n, run)
        gc.collect()
        return found

    def check_nothing_left(self):
        gc.collect()
        assert self.machine.used == 0
        assert [driver.live() for driver in self.drivers] == [zero_live()] * len(self.drivers)


@pytest.fixture(params=["fabric", "posix_fd"])
def handle_type(request):
    before = len(os.listdir("/proc/self/fd"))
    yield request.param
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("slow", ["copy", "compute"])
def test_experts_are_read_right_while_a_stream_is_slow(handle_type, slow):
    """Fails when compute does not wait for a slot's copy (slow copies), or a copy not for the slot's end of read
    (slow reads)."""
    cluster = Cluster(handle_type)
    reference, partition = reference_layers(21, 5), partition_of(3, 21)  # layers of a slot share its pages
    wrong = []

    def body(group, domain, device):
        model, runtime = set_up(group, reference, partition, domain, device)
        layers = model.moe_layers()
        if slow == "copy":
            domain.driver.api.seconds_per_copy = 0.002

        def read(pos):
            if slow == "compute":
                time.sleep(0.005)
            for name, whole in reference[pos][0].items():
                if raw(layers[pos].expert_tables()[name]) != raw(whole):
                    wrong.append((group.rank, pos, name))

        for _ in range(3):
            runtime.start_forward()
            for pos in range(len(layers)):
                runtime.bind(pos)
                device.enqueue(device.compute, lambda pos=pos: read(pos), kind="read", slot=f"E{pos % 2}", layer=pos)
                runtime.finish(pos)
        device.synchronize()
        assert device.exposed_wait_seconds > (0.005 if slow == "copy" else 0)
        domain.driver.api.seconds_per_copy = 0.0
        assert domain.live()["descriptors"] == 0, "what was exported is closed once every peer has mapped it"
        rights = {mapping.rights for mapping in domain.driver.api._mappings.values() if mapping.imported}
        assert rights == {1}, "peers map read-only"
        take_down(runtime, group)
        runtime = model = layers = None
        gc.collect()
        assert domain.live() == NOTHING_LIVE

    cluster.experts(3, body)
    assert wrong == []
    cluster.check_nothing_left()


@pytest.mark.parametrize(
    "call, number",
    [
        ("cuMemCreate", 4),
        ("cuMemExportToShareableHandle", 3),
        ("cuMemImportFromShareableHandle", 5),
        ("cuMemMap", 14),
        ("cuMemSetAccess", 5),
        ("cuMemcpyDtoH", 12),
        ("cuMemAddressReserve", 6),
    ],
)
def test_a_failing_call_on_one_rank_raises_everywhere_and_leaves_nothing(handle_type, call, number, caplog):
    """Fails when a step is not undone, or a rank skips a collective: then a call hangs or something stays."""
    cluster = Cluster(handle_type)
    reference, partition = reference_layers(21), partition_of(3, 21)

    def body(group, domain, device):
        calls = []
        if group.rank == 1:
            domain.driver.api.fail[call] = lambda *args: (
                calls.append(1),
                CUresult.CUDA_ERROR_INVALID_VALUE if len(calls) == number else None,
            )[1]
        model = build_model(reference, partition, group.rank)
        before = snapshot(model)
        with pytest.raises(RuntimeError) as caught:
            set_up_model(model, group, partition, domain, device)
        assert unchanged(model, before) and model.unusable is None
        assert domain.live() == NOTHING_LIVE and domain.allocated_bytes == 0
        group.barrier("all have left")
        assert len(calls) >= number or group.rank != 1
        return caught.value

    errors = cluster.experts(3, body)
    assert isinstance(errors[1], DriverError) and errors[1].call == call
    assert all(f"{call} failed with CUDA_ERROR_INVALID_VALUE" in str(errors[rank]) for rank in (0, 2))
    del errors
    cluster.check_nothing_left()
    assert "tensors over it are alive" not in caplog.text


def set_up_model(model, group, partition, domain, device):
    from dwdp.runtime.setup_experts import setup_experts

    return setup_experts(model, group=group, domain=domain, device=device, partition=partition, num_slots=2)


def test_dense_weights_are_read_right(handle_type):
    cluster = Cluster(handle_type)

    def body(rank):
        expected = dense_snapshot(rank.model)
        report = rank.setup()
        assert report["status"] == "committed" and report["leaks"] == 0
        assert rank.domain.live()["descriptors"] == 0
        checked = []

        def read_all(count):
            forward_and_check(rank, expected, count)
            checked.append(count)

        read_in_order(rank, read_all)
        assert checked == [2]
        return report["digest"]

    assert len(set(dense_ranks(3, body, parts=cluster.parts))) == 1
    cluster.check_nothing_left()


def test_the_originals_are_summed_up_in_one_launch_and_a_blob_is_compared_in_one(handle_type):
    """Fails when P1 sums up storage by storage, or P4 or P5 compares so: a launch, its tables and a wait for each."""
    cluster = Cluster(handle_type)

    def body(rank):
        rank.setup()
        api, blobs = rank.domain.driver.api, len(rank.manager.weights.layout.blobs)
        launched = [api._functions[call[1]] for call in api.calls if call[0] == "cuLaunchKernel"]
        cuts = sum(len(sums) - 1 for sums in rank.manager.weights.checksums)
        assert cuts > 2 * blobs > 4
        return launched.count("row_checksums"), launched.count("first_differences") / blobs

    assert dense_ranks(2, body, parts=cluster.parts) == [(1, 2.0), (1, 2.0)]
    cluster.check_nothing_left()


def read_in_order(rank, read_all):
    """The toy model reads in the calling thread, so each wait on compute must be over before the read."""
    device, wait = rank.device, rank.device._wait_for

    def waiting(stream, events, *where):
        wait(stream, events, *where)
        if stream is device.compute:
            device.api.cuStreamSynchronize(stream.raw)

    device._wait_for = waiting
    try:
        read_all(2)
    finally:
        device._wait_for = wait


def test_a_failing_import_of_dense_rows_leaves_the_model_as_it_was(handle_type):
    cluster = Cluster(handle_type)

    def body(rank):
        expected = dense_snapshot(rank.model)
        if rank.group.rank == 1:
            rank.domain.driver.api.fail["cuMemImportFromShareableHandle"] = CUresult.CUDA_ERROR_NOT_PERMITTED
        with pytest.raises(RuntimeError, match="cuMemImportFromShareableHandle failed with CUDA_ERROR_NOT_PERMITTED"):
            rank.setup()
        assert dense_snapshot(rank.model) == expected

    dense_ranks(3, body, parts=cluster.parts)
    cluster.check_nothing_left()
