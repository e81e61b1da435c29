"""Whole ranks over the CUDA domain and device on the fake driver: checkpoint, set-up, forwards, updates, the end.

CPU tensors stand in for the GPU's memory; copies, batches, kernels, events and handles are the fake driver's.
"""

from __future__ import annotations

import gc
import os

import msgspec
import pytest
import torch

from dwdp.errors import VerificationError
from dwdp.executor import memory
from dwdp.executor.create import build_rank
from dwdp.executor.settings import resolve
from dwdp.group.threads import run_rank_threads
from dwdp.weights import gather_kernel, transfers
from dwdp.weights.cuda_mover import CudaMover
from tests.memory import fake_driver
from tests.memory.fake_driver import CUresult, zero_live
from tests.support.fake_cuda import FakeMemory
from tests.support.system import DENSE, prompt, replicated, write_random

LENGTH, CHUNK, DECODE = 20, 8, 3
LAYERS = 4

TRANSFERS = [
    ({}, "per_slice", None),
    ({"contention_opt": True}, "batched", None),
    ({"prefetch_gather": True}, "gather", "tma"),
    ({"prefetch_gather": True, "gather_kernel": "ldst"}, "gather", "ldst"),
]


class Cluster:
    """Fake GPUs, one a rank, in place of what `create_memory` makes."""

    def __init__(self, monkeypatch):
        self.memory = FakeMemory()
        monkeypatch.setattr(memory, "create_memory", self.memory)
        monkeypatch.setattr(fake_driver, "GRANULE", 4096)  # a table of the tiny model is then several pages

    @property
    def drivers(self):
        return self.memory.drivers

    def shared(self, model, n, body, *, dwdp=None, dense=DENSE, **build):
        settings = resolve(
            model, ranks=n, dtype="float32", device="cpu", dwdp={"page_granules": 1, **(dwdp or {})}, dense_dwdp=dense
        ).settings
        return self.ranks(n, settings, body, **build)

    def lockstep(self, model, n, body, *, dense):
        settings = resolve(
            model, tp_size=n, attention_dp=True, dtype="float32", device="cpu", dense_dwdp=dense, environ={}
        ).settings
        return self.ranks(n, settings, body)

    def ranks(self, n, settings, body, **build):
        def run(group):
            with build_rank(settings, group, rank=group.rank, **build) as rank:
                return body(rank)

        found = run_rank_threads(n, run, timeout=60)
        self.check_nothing_left()
        return found

    def check_nothing_left(self):
        gc.collect()
        assert self.memory.machine.used == 0
        assert all(driver.live() == zero_live() for driver in self.drivers.values()), {
            rank: driver.live() for rank, driver in self.drivers.items()
        }


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_random(tmp_path_factory.mktemp("m") / "model", num_experts=7)


@pytest.fixture
def cluster(monkeypatch):
    before = len(os.listdir("/proc/self/fd"))
    yield Cluster(monkeypatch)
    assert len(os.listdir("/proc/self/fd")) == before


def compute(rank):
    return rank.logits(prompt(0, LENGTH), chunk_size=CHUNK, decode=DECODE), rank.logits(prompt(rank.rank, LENGTH))


@pytest.fixture(scope="module")
def expected(model):
    def body(rank):
        chunks = rank.logits(prompt(0, LENGTH), chunk_size=CHUNK, decode=DECODE)
        return chunks, [rank.logits(prompt(r, LENGTH)) for r in range(3)]

    return replicated(model, body)


@pytest.mark.parametrize("dwdp, transfer, kernel", TRANSFERS)
def test_attached_logits_equal_the_replicated_ones_bit_for_bit(
    model, expected, cluster, dwdp, transfer, kernel, monkeypatch
):
    """Fails when a plan's batch, table or plain copies are left out of what is prepared, or when the last of its
    parts is."""
    monkeypatch.setattr(transfers, "SLICE_UNIT_BYTES", 4096)
    monkeypatch.setattr(gather_kernel, "SMALLEST_UNIT", 4096)

    def body(rank):
        logits, report = compute(rank), rank.report()
        setup = rank.manager.report
        assert {(setup[p]["transfer"], setup[p]["gather_kernel"]) for p in setup} == {(transfer, kernel)}
        assert rank.manager.status()["cooperative_launches"] is (transfer != "gather")
        return logits, report

    for rank, (logits, report) in enumerate(cluster.shared(model, 3, body, dwdp=dwdp)):
        assert torch.equal(logits[0], expected[0]) and torch.equal(logits[1], expected[1][rank])
        counters, ledger = report["counters"], report["ledger"]
        assert counters["demand_fetches"] == counters["fences"] == counters["restarts"] == 0
        assert counters["synchronisations"] == 0 and counters["primed_forwards"] == counters["forwards"] - 1
        assert all(ledger[key] > 0 for key in ("stored_bytes", "ring_bytes", "slot_bytes", "dense_moved_bytes"))
    calls = {call[0] for driver in cluster.drivers.values() for call in driver.calls}
    assert ("cuMemcpyBatchAsync" in calls) == (transfer == "batched")
    launched = [
        driver._functions[c[1]] for driver in cluster.drivers.values() for c in driver.calls if "Launch" in c[0]
    ]
    of_setup = {"row_checksums", "first_differences"}
    assert set(launched) - of_setup == ({f"gather_{kernel}"} if kernel else set())


@pytest.mark.parametrize(
    "dense", [None, {"own_rows": "map"}, {"store_chunk_mb": 1}, {"debug": 2, "strict": True}, {"load": "sharded"}]
)
def test_experts_alone_mapped_rows_chunks_and_the_watchdog_change_no_bit(model, expected, cluster, dense):
    def body(rank):
        return compute(rank), rank.manager.dense and rank.manager.dense.runtime.watch_mismatches

    for rank, (logits, mismatches) in enumerate(cluster.shared(model, 2, body, dense=dense and {**DENSE, **dense})):
        assert torch.equal(logits[0], expected[0]) and torch.equal(logits[1], expected[1][rank])
        assert not mismatches


@pytest.mark.parametrize("copy", ["per_slice", "batched", "gather"])
def test_standalone_changes_no_bit(model, cluster, copy):
    def body(rank):
        return compute(rank), rank.report()["ledger"]["slot_bytes"]

    without = cluster.lockstep(model, 2, body, dense=None)
    for (logits, slots), (plain, none) in zip(cluster.lockstep(model, 2, body, dense={**DENSE, "copy": copy}), without):
        assert all(map(torch.equal, logits, plain)) and slots > none == 0


def forward(rank, tokens):
    return rank.loop.forward(torch.tensor([tokens]), rank.model.new_state(1, len(tokens)))


@pytest.mark.parametrize("what", ["dense", "experts"])
def test_a_bit_flipped_in_a_peers_row_is_found_without_waiting_for_the_device(model, cluster, what, caplog):
    """Fails when the results of checks on the copy stream are never read."""
    every = 2

    def body(rank):
        manager = rank.manager
        for _ in range(3):
            forward(rank, prompt(0, 3))
        manager.group.barrier("serving")
        if rank.rank == 1:
            rank.device.drain()
            if what == "dense":
                manager.dense.weights.store.row(1, 2)[70] ^= 4
            else:
                (table,) = [t for t in manager.experts.transport.tables if (t.spec.pos, t.spec.name) == (1, "w2")]
                manager.experts.transport._own_rows(table)[1].view(-1).view(torch.uint8)[9] ^= 4
        manager.group.barrier("flipped")
        synchronised = sum(call[0] == "cuCtxSynchronize" for call in rank.domain.driver.api.calls)
        for _ in range(every * LAYERS):
            forward(rank, prompt(0, 3))
        if rank.rank == 0 and what == "dense":  # an expert's row is looked at again for the message
            waits = sum(call[0] == "cuCtxSynchronize" for call in rank.domain.driver.api.calls)
            assert waits == synchronised
        rank.device.drain()
        error = manager.verification_error
        if error is not None:
            with pytest.raises(VerificationError):
                rank.logits(prompt(0, 3))
        manager.group.barrier("found")
        return str(error)

    texts = cluster.shared(model, 2, body, dwdp={"verify_every": every})
    if what == "dense":
        assert all("layer 2 attention" in text and "a wrong byte is behind" in text for text in texts)
    else:
        assert "layer 2 table w2, expert row 5 copied from rank 1" in texts[0] and "first byte" in texts[0]


def test_checks_of_right_rows_find_nothing_and_are_all_read(model, cluster):
    def body(rank):
        for _ in range(2 * LAYERS + 1):
            forward(rank, prompt(0, 3))
        rank.device.drain()
        assert rank.manager.verification_error is None
        return rank.manager.experts.verified_forward

    assert all(found >= 2 * LAYERS for found in cluster.shared(model, 2, body, dwdp={"verify_every": 1}))


def test_sampled_checks_are_work_of_the_copy_stream_and_the_host_waits_for_none(model, cluster):
    """Fails when a check is enqueued elsewhere, or its result is fetched by a call that waits."""
    waiting = {"cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize", "cuMemcpyDtoH", "cuMemcpyHtoD"}

    def body(rank):
        forward(rank, prompt(0, 3))
        api, start = rank.domain.driver.api, len(rank.domain.driver.api.calls)
        for _ in range(2 * LAYERS):
            forward(rank, prompt(0, 3))
        calls = api.calls[start:]
        sums = [c for c in calls if c[0] == "cuLaunchKernel" and api._functions[c[1]] == "row_checksums"]
        assert len(sums) >= 3 * (2 * LAYERS - 1)  # a layer's experts, attention and dense MoE weights in each forward
        assert {int(call[9]) for call in sums} == {int(rank.device.copy.raw)}
        # The stand-in for a compute stream waits for that one itself.
        compute = ("cuStreamSynchronize", rank.device.compute.raw)
        assert [call for call in calls if call[0] in waiting and call[:2] != compute] == []
        rank.device.drain()
        assert rank.manager.verification_error is None

    cluster.shared(model, 2, body, dwdp={"verify_every": 1})


def test_an_update_in_place_gives_the_new_models_logits(model, tmp_path, cluster):
    new = write_random(tmp_path / "new", seed=8, num_experts=7)
    expected = replicated(new, lambda rank: rank.logits(prompt(0, LENGTH)))

    def body(rank):
        old = rank.logits(prompt(0, LENGTH))
        rank.update_weights(str(new))
        return old, rank.logits(prompt(0, LENGTH))

    for old, logits in cluster.shared(model, 2, body, dense=None):
        assert torch.equal(logits, expected) and not torch.equal(old, expected)


@pytest.mark.parametrize(
    "call, number",
    [("cuMemCreate", 6), ("cuMemMap", 30), ("cuLaunchKernel", 3), ("cuMemcpyAsync", 5), ("cuStreamSynchronize", 4)],
)
def test_a_failing_call_on_one_rank_ends_every_rank_and_leaves_nothing(model, cluster, call, number, monkeypatch):
    """Fails when what was prepared for plans and checks is not given back by a set-up that fails."""
    made = cluster.memory

    def failing(config, where, rank, done, **options):
        domain, device = made(config, where, rank, done, **options)
        count = []
        if rank == 1:
            domain.driver.api.fail[call] = lambda *_: (
                count.append(1),
                CUresult.CUDA_ERROR_INVALID_VALUE if len(count) == number else None,
            )[1]
        return domain, device

    monkeypatch.setattr(memory, "create_memory", failing)
    with pytest.raises(Exception, match=f"{call} failed with CUDA_ERROR_INVALID_VALUE"):
        cluster.shared(model, 2, lambda rank: None)
    cluster.check_nothing_left()


def test_ranks_on_one_gpu_are_refused_unless_they_may_share_it(model, cluster):
    cluster.memory.shared = True
    with pytest.raises(Exception, match="ranks 0, 1 are on one device, GPU-.*allow_shared_device"):
        cluster.shared(model, 2, lambda rank: None)
    assert cluster.shared(model, 2, lambda rank: rank.rank, dwdp={"allow_shared_device": True}) == [0, 1]


def test_a_forced_type_that_does_not_work_names_it(model, cluster):
    settings = resolve(model, ranks=2, device="cpu", dwdp={"page_granules": 1}, dense_dwdp=None).settings
    settings = msgspec.structs.replace(settings, dwdp={**settings.dwdp, "handle_type": "fabric"})
    with pytest.raises(Exception, match="FABRIC handles were asked for and do not work.*NOT_PERMITTED"):
        cluster.ranks(2, settings, lambda rank: None)
    cluster.check_nothing_left()


def test_a_release_gives_back_what_was_prepared(model, cluster):
    """Before the domain is closed. Fails when the runtimes forget neither plans nor checks."""

    def body(rank):
        rank.logits(prompt(0, 5))
        api = rank.domain.driver.api
        assert len(api._allocated) > 2 * LAYERS  # tables of gathers, and of checks
        rank.manager.release()
        return len(api._allocated)

    assert cluster.shared(model, 2, body, dwdp={"prefetch_gather": True, "verify_every": 3}) == [0, 0]


def test_a_dense_set_up_that_is_given_up_keeps_nothing_prepared(model, expected, cluster, monkeypatch):
    """Fails when it does not forget its plans."""

    def broken(*_):
        raise VerificationError("a byte was lost")

    monkeypatch.setattr(CudaMover, "first_differences", broken)

    def body(rank):
        return rank.logits(prompt(rank.rank, LENGTH)), len(rank.manager.experts.mover._copies)

    dense = {**DENSE, "required": False}
    for number, (logits, copies) in enumerate(cluster.shared(model, 2, body, dense=dense)):
        assert torch.equal(logits, expected[1][number]) and copies == LAYERS
