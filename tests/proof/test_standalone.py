"""Dense DWDP alone on an attention-DP instance: the same bits as without it, its own order of copies, aborts that the
next forward recovers from, and failures that end on every rank alike.

The reads that the traces are judged by are the windows that the hooks open and close: see `with_reads`.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from pathlib import Path

import msgspec
import pytest
import torch

from dwdp import LLM, SamplingParams
from dwdp.config.schema import DenseConfig
from dwdp.errors import DwdpError, GroupError, GroupTimeoutError, ModelReleasedError
from dwdp.executor.create import build_rank
from dwdp.executor.messages import WorkItem
from dwdp.executor.settings import resolve
from dwdp.group.threads import run_rank_threads
from dwdp.memory.host import HostCalls
from dwdp.model import loader
from dwdp.partition.collect import collect
from dwdp.runtime.dense_manager import DenseDwdpManager, current_dense_manager
from dwdp.runtime.slots import slot_bytes
from dwdp.runtime.standalone import StandaloneDenseManager
from dwdp.tools.copy_order import Setting, order_problems
from dwdp.tools.races import find_races
from tests.support.system import STANDALONE, lockstep, prompt, replicated, write_random
from tests.test_llm import alive

LENGTH, LAYERS = 18, 4
ATTENTION = {**STANDALONE, "segments": "attn"}
both_segments = pytest.mark.parametrize("dense", [STANDALONE, ATTENTION], ids=["attn,moe", "attn"])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.set_num_threads(1)
    return write_random(tmp_path_factory.mktemp("m") / "model", num_experts=7)


def compute(rank) -> dict[str, torch.Tensor | list]:
    """Prefill, chunks with decode, and a batch, of lengths that differ from rank to rank."""
    own = rank.rank
    items = [WorkItem(i, prompt(own + i, 3 + 2 * own), SamplingParams(max_tokens=5 - own)) for i in range(3 - own)]
    return {
        "prefill": rank.logits(prompt(own, LENGTH + own)),
        "chunks": rank.logits(prompt(own, LENGTH - own), chunk_size=7, decode=3),
        "hashes": [one.logits_sha256 for one in rank.generate(items, logits_sha256=True)],
    }


@pytest.fixture(scope="module")
def without(model):
    """What the same instance computes with dense DWDP off."""
    return functools.cache(lambda n, dtype="float32": lockstep(model, n, compute, dtype=dtype))


def standalone_settings(model, n: int):
    return resolve(model, tp_size=n, attention_dp=True, device="cpu", dense_dwdp=STANDALONE, environ={}).settings


def assert_same(found: dict, expected: dict) -> None:
    for name, value in expected.items():
        assert torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("n", [2, 3])
@both_segments
def test_logits_are_bit_for_bit_those_of_the_same_instance_without_it(model, without, n, dense, dtype):
    """Fails when the wait for a layer's copies is left out: they are throttled to be slower than the layers."""

    def body(rank):
        return compute(rank), rank.report()

    results = lockstep(model, n, body, dense=dense, dtype=dtype, copy_bytes_per_second=20e6)
    for (found, report), expected in zip(results, without(n, dtype)):
        assert_same(found, expected)
        counters, ledger = report["counters"], report["ledger"]
        for key in ("demand_fetches", "fences", "barriers", "restarts", "synchronisations", "primed_forwards"):
            assert counters[key] == 0, key
        assert counters["copies"] == LAYERS * counters["forwards"] > 0
        assert ledger["expert_moved_bytes"] == ledger["ring_bytes"] == 0


@pytest.mark.parametrize("copy, kernel", [("per_slice", "auto"), ("gather", "auto"), ("gather", "ldst")])
def test_every_transfer_copies_the_same_and_is_reported(model, without, copy, kernel):
    """Batched is the default and has the cases above."""

    def settings_of(_, settings):
        return msgspec.structs.replace(settings, dense_gather_kernel=kernel)

    def body(rank):
        plans = [plan for plans in rank.manager.runtime.plans for plan in plans.values()]
        return compute(rank), rank.manager.report, plans

    results = lockstep(model, 2, body, dense={**STANDALONE, "copy": copy}, settings_of=settings_of)
    for (found, report, plans), expected in zip(results, without(2)):
        assert_same(found, expected)
        used = {"auto": "tma"}.get(kernel, kernel) if copy == "gather" else None
        assert (report["transfer"], report["gather_kernel"]) == (copy, used)
        assert all((plan.gather is not None) == (copy == "gather") and not plan.batch for plan in plans)


@both_segments
def test_the_ledger_and_the_copied_bytes_are_the_layouts_arithmetic(model, dense):
    def layout_of(rank):
        segments = DenseConfig(**dense).segments
        return collect(rank.model, num_ranks=2, segments=segments, min_bytes=1, strict=False).layout

    def body(rank):
        rank.logits(prompt(0, 4))
        return rank.report()

    layout = replicated(model, layout_of)
    for rank, report in enumerate(lockstep(model, 2, body, dense=dense)):
        ledger, granule = report["ledger"], 65536
        moved = sum(storage.nbytes for blob in layout.blobs for storage in blob.storages)
        stored = -(-sum(blob.row_nbytes for blob in layout.blobs) // granule) * granule
        assert ledger["moved_bytes"] == ledger["dense_moved_bytes"] == moved > 0
        assert ledger["stored_bytes"] == stored
        assert ledger["slot_bytes"] == slot_bytes(layout, granule)
        assert ledger["freed_bytes"] == moved - layout.share_nbytes(rank)
        # both ranks gather once a forward, and what they gather are whole rows
        assert report["counters"]["copied_bytes"] == sum(blob.nbytes for blob in layout.blobs)


# ---- the order of the copies ----


def traced(rank, *steps) -> list[dict]:
    start = len(rank.device.trace)
    for step in steps:
        step()
    return rank.device.trace[start:]


def setting_of(dense: dict) -> Setting:
    return Setting(LAYERS, 2, "standalone", "A" if dense is ATTENTION else "AD")


@both_segments
def test_copies_are_in_the_standalone_order_and_race_with_no_read(model, dense):
    """Fails without the fill at H2, with one at H3, and when a copy does not wait for its slot's end of read."""

    def body(rank):
        return traced(rank, lambda: rank.logits(prompt(0, 9), chunk_size=4, decode=2))

    for trace in lockstep(model, 2, body, dense=dense, trace=True):
        assert find_races(trace) == []
        assert order_problems(trace, setting_of(dense)) == []
        assert sum(op["kind"] == "read" for op in trace) == 2 * sum(op["kind"] == "copy" for op in trace) > 0


def test_a_rank_without_tokens_copies_nothing_and_its_peers_read_its_rows(model, without):
    def body(rank):
        start = len(rank.device.trace)
        rank.generate([WorkItem(0, prompt(0, 5), SamplingParams(max_tokens=4))] if rank.rank == 0 else [])
        return [op["kind"] for op in rank.device.trace[start:]], rank.report()["counters"]

    busy, idle = lockstep(model, 2, body, dense=STANDALONE, trace=True)
    assert "copy" in busy[0] and idle[0] == []
    assert idle[1]["copies"] == idle[1]["forwards"] == 0 and busy[1]["forwards"] == 4


class _Abort(Exception):
    pass


@pytest.mark.parametrize("start", [True, False], ids=["started", "not started"])
@pytest.mark.parametrize("layer", [1, 2, LAYERS])
@pytest.mark.parametrize("hook", ["h1", "h2", "h3"])
def test_a_forward_aborted_in_a_hook_is_recovered_by_the_next_one(model, without, hook, layer, start):
    """Every rank aborts at the same place, before the hook of `layer`; the next forward has the right bits.

    Fails when H0 trusts a slot after an abort, and when its barrier is left out (a race).
    """

    def body(rank):
        manager, original = rank.manager, getattr(rank.manager, hook)

        def aborting(index):
            if index == layer:
                manager.device.mark("abort")
                raise _Abort
            original(index)

        def abort():
            setattr(manager, hook, aborting)
            ids = torch.tensor([prompt(rank.rank, 6)])
            with pytest.raises(_Abort):
                rank.loop.forward(ids, rank.model.new_state(1, 6))
            setattr(manager, hook, original)
            if not start:
                manager.start_forward = lambda: None

        def go_on():
            rank.results = rank.logits(prompt(rank.rank, LENGTH + rank.rank))

        trace = traced(rank, abort, go_on)
        return trace, rank.results, rank.report()["counters"]

    for (trace, logits, counters), expected in zip(lockstep(model, 2, body, dense=STANDALONE, trace=True), without(2)):
        assert torch.equal(logits, expected["prefill"])
        assert find_races(trace) == []
        assert order_problems(trace, setting_of(STANDALONE)) == []
        assert (counters["barriers"], counters["fences"], counters["demand_fetches"]) == (1, 0, 0)


# ---- failures ----


def fail_memfd(monkeypatch, rank: int) -> None:
    original = HostCalls.memfd

    def memfd(self, name, nbytes):
        if name.startswith("dwdp-dense-A1") and threading.current_thread().name.endswith(f"-{rank}"):
            raise OSError(28, "no space in this test")
        return original(self, name, nbytes)

    monkeypatch.setattr(HostCalls, "memfd", memfd)


def test_a_set_up_that_fails_is_an_error_on_every_rank_and_leaves_nothing(model, monkeypatch):
    domains = []
    fail_memfd(monkeypatch, 1)
    enter = StandaloneDenseManager.__enter__
    monkeypatch.setattr(
        StandaloneDenseManager, "__enter__", lambda manager: domains.append(manager.domain) or enter(manager)
    )
    with pytest.raises(OSError, match="no space in this test") as caught:
        lockstep(model, 3, lambda rank: pytest.fail("served"), dense=STANDALONE, timeout=20)
    told = sorted(caught.value.__notes__)
    for rank, note in zip((0, 2), told, strict=True):
        assert note.startswith(f"rank {rank} raised") and ": rank 1 " in note and "no space in this test" in note
    assert len(domains) == 3 and not any(any(domain.live().values()) for domain in domains)


def test_where_it_is_not_required_a_failed_set_up_serves_on_with_replicated_weights(
    model, without, monkeypatch, caplog
):
    fail_memfd(monkeypatch, 1)

    def body(rank):
        report = rank.report()
        return compute(rank), rank.manager.report["status"], report["ledger"], rank.report()["counters"]

    for (found, status, ledger, counters), expected in zip(
        lockstep(model, 2, body, dense={**STANDALONE, "required": False}), without(2)
    ):
        assert_same(found, expected)
        assert status == "abandoned" and "serves on with replicated dense weights" in caplog.text
        assert ledger["moved_bytes"] == ledger["slot_bytes"] == ledger["stored_bytes"] == counters["copies"] == 0
        assert counters["forwards"] > 0


def test_a_rank_with_it_off_never_joins_and_the_others_name_it_at_the_deadline(model):
    errors = {}

    def settings_of(rank, settings):
        return msgspec.structs.replace(settings, dense_dwdp=None) if rank == 2 else settings

    settings = standalone_settings(model, 3)

    def run(group):
        group.timeout_seconds = 2.0
        try:
            build_rank(settings_of(group.rank, settings), group, rank=group.rank)
        except GroupError as error:
            errors[group.rank] = error

    run_rank_threads(3, run, timeout=30)
    assert set(errors) == {0, 1, 2}
    first = next(errors[rank] for rank in (0, 1) if "is dense DWDP" in str(errors[rank]))
    assert isinstance(first, GroupTimeoutError)
    assert "rank 2 of 3 did not come to 'join'" in str(first) and "DWDP_DENSE" in str(first)


@pytest.mark.parametrize("field, value", [("copy", "gather"), ("segments", ["attn"]), ("min_bytes", 77)])
def test_ranks_with_different_settings_are_named_with_what_differs(model, field, value):
    def settings_of(rank, settings):
        changed = {**settings.dense_dwdp, field: value}
        return msgspec.structs.replace(settings, dense_dwdp=changed) if rank else settings

    with pytest.raises(DwdpError, match=f"differ.*dense_dwdp.{field}"):
        lockstep(model, 2, lambda rank: None, dense=STANDALONE, settings_of=settings_of, timeout=20)


@pytest.mark.parametrize("error", [OSError("disk gone"), KeyboardInterrupt()])
def test_a_rank_that_fails_to_load_raises_its_own_error_and_ends_its_peers(model, monkeypatch, error):
    load_model, seen = loader.load_model, {}

    def failing(*args, **options):
        if threading.current_thread().name.endswith("-1"):
            raise error
        return load_model(*args, **options)

    monkeypatch.setattr(loader, "load_model", failing)
    settings = standalone_settings(model, 2)

    def run(group):
        try:
            build_rank(settings, group, rank=group.rank)
        except BaseException as raised:
            seen[group.rank] = raised
        assert current_dense_manager() is None

    run_rank_threads(2, run, timeout=20)
    assert seen[1] is error and isinstance(seen[0], GroupError) and "rank 1" in str(seen[0])
    assert (str(error) or "KeyboardInterrupt") in str(seen[0])  # the reason, and not only that it left


def test_a_manager_that_was_registered_before_is_left_alone(model):
    settings = standalone_settings(model, 2)

    def run(group):
        first = DenseDwdpManager(DenseConfig(enabled=True))
        first.register()
        with pytest.raises(DwdpError, match="registered already"):
            build_rank(settings, group, rank=group.rank)
        return current_dense_manager() is first

    assert run_rank_threads(2, run, timeout=20) == [True, True]


def test_weights_that_have_moved_are_not_loaded_in_place_and_a_released_model_does_not_run(model):
    def body(rank):
        built, report, manager = rank.model, rank.manager.report, rank.manager
        with pytest.raises(DwdpError, match="build and load a new"):
            built.load_state_dict({})
        assert manager.setup(built) is report  # without a collective: rank 1 does not call it
        rank.logits(prompt(0, 5))
        rank.manager.prefetch_first_layers()  # copies of the next forward are on their way
        domain = rank.domain
        rank.release()
        assert not any(domain.live().values())
        with pytest.raises(ModelReleasedError):
            built(torch.tensor([[1]]))
        with pytest.raises(ModelReleasedError):
            manager.setup(built)

    lockstep(model, 2, body, dense=STANDALONE, copy_bytes_per_second=5e6)


@pytest.mark.parametrize("role", ["generation", "both"])
def test_a_role_that_decodes_passes_with_one_warning_naming_the_bytes_of_a_step(model, role, caplog):
    def gathered(rank):
        rank.logits(prompt(0, 4))
        return rank.report()["counters"]["copied_bytes"]

    caplog.set_level(logging.WARNING, "dwdp")
    fields = {"tp_size": 2, "attention_dp": True, "dense_dwdp": STANDALONE, "role": role}
    launch = resolve(model, device="cpu", environ={}, **fields)
    assert launch.mode == "standalone"
    (line,) = [one.getMessage() for one in caplog.records if "gathers" in one.getMessage()]
    assert f" {lockstep(model, 2, gathered, dense=STANDALONE)[0]} bytes" in line and role in line


# ---- rank processes ----


def test_rank_processes_give_the_same_bits_and_leave_nothing_behind(warm_start):
    prompts = ["123+456=", "900-77=", "5+6="]
    params = [SamplingParams(max_tokens=k, ignore_eos=True) for k in (5, 2, 3)]

    def run(dense):
        with LLM("nano-k3", tp_size=2, attention_dp=True, device="cpu", dense_dwdp=dense, quiet=True) as llm:
            hashes = [one.outputs[0].logits_sha256 for one in llm.generate(prompts, params, logits_sha256=True)]
            logits = llm.logits(list(range(30, 47)), rank=1, chunk_size=6, decode=3)
            reports, folder = llm.report(), llm._frontend._folder
            llm.release()
            maps = [Path(f"/proc/{report['pid']}/maps").read_text() for report in reports]
            pids = [report["pid"] for report in reports]
        assert not alive(pids) and not os.path.exists(folder)
        assert not any("memfd:dwdp" in one for one in maps)
        return hashes, logits, reports

    with warm_start():
        off = run(None)
    on = run(STANDALONE)
    assert on[0] == off[0] and torch.equal(on[1], off[1])
    for report in on[2]:
        assert report["counters"]["demand_fetches"] == report["counters"]["fences"] == 0
        assert report["ledger"]["replicated_bytes"] < off[2][0]["ledger"]["replicated_bytes"] / 1.5
