"""Dense set-up on rank threads: what it commits, what it restores, who is named.

Mutation-checked once, each caught by a test below: no restore after P5; P4 without its comparison; a failure of one
phase that skips its collective; exported descriptors kept after P3; REQUIRED ignored; originals kept after P6; NaN fill
left out; the watchdog comparing nothing.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import threading
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dwdp.config.schema import DenseConfig
from dwdp.device.host import HostDevice
from dwdp.errors import DwdpError, GroupTimeoutError, VerificationError
from dwdp.memory.host import HostDomain
from dwdp.runtime import leaks, setup_dense
from dwdp.runtime.manager import refuse_weight_change
from dwdp.runtime.setup_dense import DenseSetup
from dwdp.weights import mover
from tests.support.dense_ranks import NOTHING_LIVE, config, dense_ranks, forward_and_check
from tests.support.tiny import tiny_model, tiny_model_config
from tests.support.toy_decoder import ToyModel, snapshot, value_bytes

COLLECTIVES = ("dense P1", "dense P2", "dense P3", "dense P4", "dense P5")


def test_a_commit_moves_every_root_and_frees_the_originals():
    def body(rank):
        expected = snapshot(rank.model)
        report = rank.setup()
        layout = rank.manager.weights.layout
        assert report["status"] == "committed" and report["leaks"] == 0 and report["covered_layers"] == 3
        assert report["moved_bytes"] == sum(s.nbytes for b in layout.blobs for s in b.storages)
        assert rank.domain.allocated_bytes == report["stored_bytes"] + report["slot_bytes"]
        assert rank.domain.live()["descriptors"] == 0, "mappings keep the memory"
        slots = {slot.data.untyped_storage().data_ptr() for slot in rank.manager.weights.slots.slots.values()}
        for layer in rank.model.layers[1:]:
            for segment in ("attn", "moe"):
                for tensor in layer.weights(segment).values():
                    assert tensor.untyped_storage().data_ptr() in slots
            assert layer.attn.rows.data_ptr() == layer.attn.q[1:3].data_ptr(), "aliases stay aliases"
            assert layer.attn.scratch.untyped_storage().data_ptr() not in slots
            assert isinstance(layer.attn.q, torch.nn.Parameter)
        assert rank.setup() is report, "no second collective, and the same report"
        forward_and_check(rank, expected)
        return report

    reports = dense_ranks(3, body)
    assert len({report["digest"] for report in reports}) == 1
    assert sum(report["moved_bytes"] - report["freed_bytes"] for report in reports) == reports[0]["moved_bytes"]


def test_a_parameter_keeps_its_python_attributes_and_its_other_names():
    def prepare(rank, model):
        attn = model.layers[2].attn
        attn.q.origin = "a file"
        attn.register_parameter("tied", attn.q)

    def body(rank):
        rank.setup()
        attn = rank.model.layers[2].attn
        assert attn.q.origin == "a file"
        assert attn.tied is attn.q

    dense_ranks(2, body, prepare=prepare)


def test_set_up_makes_five_collectives():
    calls = []

    def body(rank):
        for name in ("vote", "vote_with", "exchange_fds", "barrier"):
            real = getattr(rank.group, name)

            def counted(tag, *args, real=real, **kwargs):
                if rank.group.rank == 0 and str(tag).startswith("dense"):
                    calls.append(tag)
                return real(tag, *args, **kwargs)

            setattr(rank.group, name, counted)
        rank.setup()

    dense_ranks(2, body)
    assert tuple(dict.fromkeys(tag.removesuffix(": descriptors") for tag in calls)) == COLLECTIVES


# ---- failures ----


def fail_in(monkeypatch, phase, rank, kind=OSError):
    """Makes `phase` fail on one rank, after it has done its work."""
    name = {
        "dense P1": "_local_report",
        "dense P2": "_write_rows",
        "dense P3": "_map_peers",
        "dense P4": "_compare_slot",
        "dense P5": "_compare_modules",
    }[phase]
    real = getattr(DenseSetup, name)

    def failing(self, *args):
        result = real(self, *args)
        if self.group.rank == rank:
            raise kind(f"injected in {phase}")
        return result

    monkeypatch.setattr(DenseSetup, name, failing)


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("phase", COLLECTIVES)
@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_a_failure_on_any_rank_in_any_phase_restores_every_tensor_and_leaks_nothing(n, phase, required, monkeypatch):
    for failing in range(n):
        with monkeypatch.context() as patch:
            fail_in(patch, phase, failing)
            descriptors = len(os.listdir("/proc/self/fd"))

            def body(rank):
                before = snapshot(rank.model)
                objects = {id(p): p.data_ptr() for p in rank.model.parameters()}
                outcome = None
                try:
                    outcome = rank.setup()["status"]
                except Exception as failure:
                    outcome = failure
                assert snapshot(rank.model) == before
                assert {id(p): p.data_ptr() for p in rank.model.parameters()} == objects
                assert rank.domain.live() == NOTHING_LIVE and rank.domain.allocated_bytes == 0
                assert rank.manager.runtime is None and not hasattr(rank.model, "dense_dwdp_moved")
                refuse_weight_change(rank.model)  # passes: such a model loads as usual
                rank.model(lambda layer, segment: None)  # hooks do nothing
                return outcome

            outcomes = dense_ranks(n, body, settings=lambda rank: config(required=required))
            gc.collect()
            assert len(os.listdir("/proc/self/fd")) == descriptors
        if not required:
            assert outcomes == ["abandoned"] * n
            continue
        for rank, error in enumerate(outcomes):
            if rank == failing:
                assert isinstance(error, OSError)
            else:
                assert isinstance(error, RuntimeError)
                assert f"rank {failing}" in str(error) and phase in str(error) and "injected" in str(error)


def test_a_failed_check_keeps_no_tensor_over_a_slot_that_is_given_back(monkeypatch, caplog):
    monkeypatch.setattr(setup_dense, "_value_bytes", lambda tensor: torch.rand(4))

    def body(rank):
        with pytest.raises(VerificationError, match="reads other bytes") as caught:
            rank.setup()
        return caught.value

    dense_ranks(2, body)
    assert "tensors over it are alive" not in caplog.text


def test_an_abandoned_set_up_runs_again(monkeypatch):
    def body(rank):
        expected = snapshot(rank.model)
        with monkeypatch.context() as patch:
            if rank.group.rank == 1:
                patch.setattr(rank.domain, "seal", lambda handle: (_ for _ in ()).throw(OSError("once")))
            assert rank.setup()["status"] == "abandoned"
        assert rank.setup()["status"] == "committed"
        forward_and_check(rank, expected)

    dense_ranks(2, body, settings=lambda rank: config(required=False))


def test_an_interrupt_on_one_rank_raises_there_and_is_named_elsewhere(monkeypatch):
    fail_in(monkeypatch, "dense P3", 1, KeyboardInterrupt)

    def body(rank):
        before = snapshot(rank.model)
        with pytest.raises(BaseException) as caught:  # noqa: PT011, B017
            rank.setup()
        assert snapshot(rank.model) == before
        return caught.value

    errors = dense_ranks(3, body)
    assert isinstance(errors[1], KeyboardInterrupt)
    assert all("rank 1" in str(errors[rank]) for rank in (0, 2))


def test_a_collective_that_fails_itself_raises_what_its_rank_had_failed_with():
    def broken(*args):
        raise GroupTimeoutError("rank 1 is missing")

    group = SimpleNamespace(rank=0, size=2, vote_with=broken)
    with HostDomain(0) as domain, HostDevice() as device:
        setup = DenseSetup(ToyModel(1), config(), group=group, domain=domain, device=device, free_bytes=lambda: 0)
        with pytest.raises(DwdpError, match="0 bytes are free") as caught:
            setup.run()
    assert isinstance(caught.value.__context__, GroupTimeoutError)


def test_too_little_memory_is_refused_in_p1_with_both_sizes(monkeypatch):
    def body(rank):
        setup = DenseSetup(
            rank.model,
            config(),
            group=rank.group,
            domain=rank.domain,
            device=rank.device,
            free_bytes=lambda: 5000 if rank.group.rank == 1 else 1 << 30,
        )
        with pytest.raises(RuntimeError, match="for its slots on rank 1 but 5000 bytes are free"):
            setup.run()
        assert rank.domain.live() == NOTHING_LIVE

    dense_ranks(3, body)


# ---- disagreement ----


def errors_of(n, **options):
    def body(rank):
        before = {name: value_bytes(tensor) for name, tensor in rank.model.named_parameters()}
        with pytest.raises(DwdpError) as caught:
            rank.setup()
        assert {name: value_bytes(tensor) for name, tensor in rank.model.named_parameters()} == before
        return str(caught.value)

    return dense_ranks(n, body, **options)


@pytest.mark.parametrize("required", [True, False])
def test_ranks_that_differ_on_dense_all_raise(required):
    def body(rank):
        settings = config(required=required, enabled=rank.group.rank != 2)
        setup = DenseSetup(
            rank.model, settings, group=rank.group, domain=rank.domain, device=rank.device, free_bytes=lambda: 1 << 30
        )
        with pytest.raises(DwdpError, match="DWDP_DENSE .rank 0: on, rank 1: on, rank 2: off"):
            setup.run()

    dense_ranks(3, body)


def test_ranks_that_differ_on_required_all_raise_even_when_one_of_them_failed(monkeypatch):
    fail_in(monkeypatch, "dense P1", 0)
    messages = errors_of(3, settings=lambda rank: config(required=rank != 1))
    assert all("DWDP_DENSE_REQUIRED (rank 0: on, rank 1: off, rank 2: on)" in message for message in messages)


def test_off_on_all_ranks_ends_there_without_work():
    def body(rank):
        off = DenseConfig(enabled=False)
        options = {"group": rank.group, "domain": rank.domain, "device": rank.device}
        report, weights = DenseSetup(rank.model, off, free_bytes=lambda: 0, **options).run()
        assert report["status"] == "off" and weights is None and report["moved_bytes"] == 0

    dense_ranks(2, body)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"min_bytes": 7}, "dense_dwdp.min_bytes"),
        ({"strict": True}, "dense_dwdp.strict"),
        ({"segments": ("attn",)}, "dense_dwdp.segments"),
        ({"store_chunk_mb": 3}, "dense_dwdp.store_chunk_mb"),
        ({"debug": 1}, "dense_dwdp.debug"),
        ({"load": "sharded"}, "dense_dwdp.load"),
        ({"own_rows": "map"}, "dense_dwdp.own_rows"),
    ],
)
@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_a_rank_with_another_switch_is_named_with_it(n, change, named):
    for message in errors_of(n, settings=lambda rank: config(**(change if rank == 1 else {}))):
        others = [rank for rank in range(n) if rank != 1 and f"rank {rank}" in message]
        assert "rank 1 has " + named in message
        assert others == ([0] if n == 2 else []), "without a majority every rank is listed"


def test_one_flipped_weight_byte_is_named_by_rank_layer_and_tensor():
    def flip(rank, model):
        if rank == 2:
            model.layers[3].shared.down.data.view(torch.uint8)[0, 5] ^= 1

    for message in errors_of(3, prepare=flip):
        assert "rank 2 has the checksum of layers.3.shared.down (layer 3 MoE-dense)" in message
        assert "rank 0" not in message and ";" not in message, "nothing else differs"


def test_one_other_dtype_is_named():
    def retype(rank, model):
        if rank == 0:
            model.layers[2].attn.o.data = model.layers[2].attn.o.data.to(torch.float16)

    for message in errors_of(3, prepare=retype):
        assert "rank 0 has layer 2 attention storage" in message and "torch.float16" in message


def other_shape(layer):
    layer.shared.down = torch.nn.Parameter(torch.zeros(24, 50), requires_grad=False)


def other_name(layer):
    layer.shared.low = layer.shared.down
    del layer.shared.down


def one_more(layer):
    layer.gate.extra = torch.nn.Parameter(torch.zeros(80), requires_grad=False)


def tied(layer):
    layer.shared.down = layer.shared.up


def one_view_less(layer):
    del layer.attn.rows


def other_stride(layer):
    layer.shared.down.data = layer.shared.down.data.t().contiguous().t()


def larger_storage(layer):
    layer.shared.down.data = torch.zeros(2000)[: 24 * 48].view(24, 48)


def held_elsewhere(layer):
    layer.shared.cached = [layer.shared.down.data]


@pytest.mark.parametrize(
    "change", [other_shape, other_name, one_more, tied, one_view_less, other_stride, larger_storage, held_elsewhere]
)
def test_a_rank_with_another_layout_is_named_with_its_layer(change):
    def prepare(rank, model):
        if rank == 1:
            change(model.layers[2])

    for message in errors_of(3, prepare=prepare):
        assert "rank 1 has " in message and "layer 2 " in message
        assert "rank 0 has" not in message and "rank 2 has" not in message and "layer 3" not in message


def test_shared_experts_that_were_cut_over_the_ranks_are_refused():
    """No forward adds such parts up again: each rank would compute with its own part only."""

    def cut(rank, model):
        for layer in model.layers[1:]:
            layer.shared.up.data = layer.shared.up.data.chunk(3)[rank].clone()

    for message in errors_of(3, prepare=cut):
        assert "shared.up (layer 1 MoE-dense)" in message and all(f"rank {rank} has" in message for rank in range(3))


def unfinished(model):
    model.layers[2].shared.weights_transformed = False


def without_bytes(model):
    model.layers[2].shared.up = torch.nn.Parameter(torch.empty(9, 9, device="meta"), requires_grad=False)


def unknown_attribute(model):
    model.layers[2].shared.table = torch.zeros(300)


def shared_across_layers(model):
    model.layers[2].shared.up = model.layers[1].shared.up


def another_managers_hooks(model):
    model.layers[2].dense = None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (unfinished, "Weights of layer 2 still waits for its post-load transform"),
        (without_bytes, "layers.2.shared.up has no bytes"),
        (unknown_attribute, "layers.2.shared.table .1200 bytes, a plain attribute. is in neither"),
        (shared_across_layers, "is shared across layers 1, 2"),
        (another_managers_hooks, "layer 2 calls the hooks of no dense DWDP manager or of another one"),
    ],
)
def test_what_a_rank_may_not_move_is_told_by_it_and_named_with_the_rank_elsewhere(change, message):
    def prepare(rank, model):
        if rank == 1:
            change(model)

    messages = []

    def body(rank):
        objects = [(id(p), p.data_ptr()) for p in rank.model.parameters()]
        with pytest.raises(DwdpError, match=message) as caught:
            rank.setup()
        assert [(id(p), p.data_ptr()) for p in rank.model.parameters()] == objects
        messages.append((rank.group.rank, str(caught.value)))

    dense_ranks(3, body, prepare=prepare, settings=lambda rank: config(strict=True))
    assert all(("rank 1 failed in phase 'dense P1'" in text) == (rank != 1) for rank, text in messages)


def test_a_rank_that_discovers_where_others_read_declarations_is_named():
    messages = []

    def body(rank):
        with pytest.raises(DwdpError) as caught:
            rank.setup()
        messages.append(str(caught.value))

    def settings(rank):
        return config(roots="discover" if rank == 1 else "declared")

    dense_ranks(3, body, settings=settings, build=lambda: tiny_model(tiny_model_config()))
    assert len(messages) == 3 and all("rank 1 has dense_dwdp.roots 'discover'" in message for message in messages)


def test_two_ranks_that_differ_are_both_listed_with_their_values():
    for message in errors_of(2, settings=lambda rank: config(min_bytes=1 + rank)):
        assert "rank 0 has dense_dwdp.min_bytes '1'" in message
        assert "rank 1 has dense_dwdp.min_bytes '2'" in message


def test_required_off_serves_on_after_a_disagreement(caplog):
    def body(rank):
        before = snapshot(rank.model)
        report = rank.setup()
        assert report["status"] == "abandoned" and "min_bytes" in report["problem"]
        assert snapshot(rank.model) == before

    dense_ranks(2, body, settings=lambda rank: config(required=False, min_bytes=1 + rank))
    assert "serves on with replicated dense weights" in caplog.text


# ---- what the checks of set-up catch ----


def test_a_wrong_byte_on_the_way_is_found_before_the_commit(monkeypatch):
    real = mover.run_plan

    def one_write_lost(plan):
        real(plan)
        ctypes.memset(plan.slices[0].dst + 17, 0, 1)

    monkeypatch.setattr(mover, "run_plan", one_write_lost)

    def body(rank):
        before = snapshot(rank.model)
        with pytest.raises(VerificationError) as caught:
            rank.setup()
        assert snapshot(rank.model) == before
        return str(caught.value), 1 - rank.group.rank

    for message, peer in dense_ranks(2, body):
        assert "IOMMU and ACS" in message
        assert message.startswith("layer 1 attention gathered into slot A0 differs from the original first at")
        assert f"in the row of rank {peer}" in message, "the first slice copies the next rank's row"


# ---- nothing to move, leaks, debug ----


def test_a_pad_byte_that_is_not_zero_is_found_too(monkeypatch):
    real = mover.run_plan

    def one_byte_more(plan):
        real(plan)
        ctypes.memset(max(piece.dst + piece.nbytes for piece in plan.slices) - 1, 1, 1)

    monkeypatch.setattr(mover, "run_plan", one_byte_more)

    def body(rank):
        with pytest.raises(VerificationError, match="first at pad byte"):
            rank.setup()

    dense_ranks(2, body)


def test_no_covered_layer_is_a_warning_and_commits_nothing(caplog):
    def body(rank):
        report = rank.setup()
        assert report["status"] == "nothing covered" and rank.manager.runtime is None
        assert rank.domain.allocated_bytes == 0

    dense_ranks(2, body, settings=lambda rank: config(min_bytes=1 << 30))
    assert "moves nothing" in caplog.text
    strict = errors_of(2, settings=lambda rank: config(min_bytes=1 << 30, strict=True))
    assert all("no layer has a weight of" in message for message in strict)


def test_a_leak_is_counted_and_its_holder_named_with_debug(caplog):
    def body(rank):
        holder = SimpleNamespace(kept=rank.model.layers[2].attn.o.data)
        before = value_bytes(holder.kept)
        report = rank.setup()
        assert report["leaks"] == 1
        assert value_bytes(holder.kept) == before, "who holds an original still reads it"

    dense_ranks(2, body, settings=lambda rank: config(debug=1))
    assert "still alive after the commit: layers.2.attn.o (held by tensor (24, 7) in" in caplog.text
    assert "kept of SimpleNamespace" in caplog.text


def test_the_search_for_one_ranks_holders_is_no_holder_for_another(monkeypatch):
    searching, go_on = threading.Event(), threading.Event()

    def slow_get_objects():
        objects = gc.get_objects()
        searching.set()
        assert go_on.wait(20)
        return objects

    slow = SimpleNamespace(collect=gc.collect, get_referrers=gc.get_referrers, get_objects=slow_get_objects)
    monkeypatch.setattr(leaks, "gc", slow)
    kept, dropped = torch.zeros(8), [torch.zeros(8)]
    found = {}

    def search(name, reference):
        found[name] = leaks.find_leaks([(reference, name)], name_holders=True)

    refs = {"kept": StorageWeakRef(kept.untyped_storage()), "dropped": StorageWeakRef(dropped[0].untyped_storage())}
    first, second = (threading.Thread(target=search, args=item) for item in refs.items())
    first.start()
    assert searching.wait(20)
    dropped.clear()
    second.start()
    second.join(0.2)
    go_on.set()
    first.join(), second.join()
    assert found["dropped"] == [] and len(found["kept"]) == 1


def test_a_failure_behind_the_last_vote_marks_the_model_unusable_and_tells_the_peers(monkeypatch):
    real, failing = setup_dense.find_leaks, []

    def fails(*args, **options):
        if threading.current_thread() in failing:
            raise OSError("P6 went wrong")
        return real(*args, **options)

    monkeypatch.setattr(setup_dense, "find_leaks", fails)

    def body(rank):
        if rank.group.rank == 1:
            failing.append(threading.current_thread())
        with pytest.raises((OSError, DwdpError), match="P6 went wrong") as caught:
            rank.setup()
            rank.group.barrier("next")
        if rank.group.rank == 1:
            assert rank.model.unusable is caught.value and rank.domain.live() == NOTHING_LIVE
            assert all(tensor.numel() == 0 for tensor in rank.model.layers[1].weights("attn").values())
        rank.manager.drain()
        rank.manager.unmap_imports()
        rank.manager.release_own()

    dense_ranks(2, body)


def test_a_leak_raises_on_its_rank_with_strict_and_aborts_the_group():
    def body(rank):
        kept = [rank.model.layers[2].attn.o.data] if rank.group.rank == 1 else []
        with pytest.raises(DwdpError) as caught:
            rank.setup()
            rank.group.barrier("next")  # the others learn of it in their next collective at the latest
        rank.manager.drain()
        rank.manager.unmap_imports()
        rank.manager.release_own()
        return str(caught.value), len(kept)

    messages = [message for message, _ in dense_ranks(2, body, settings=lambda rank: config(strict=True))]
    assert messages[1].startswith("dense DWDP (strict): originals are still alive after the commit: layers.2.attn.o")
    assert messages[0].startswith("rank 1 aborted the group") and "layers.2.attn.o" in messages[0]


def test_slots_are_nan_at_commit_with_debug():
    def body(rank):
        rank.setup()
        for slot in rank.manager.weights.slots.slots.values():
            assert bool((slot.data == 0xFF).all())
        for tensor in rank.model.layers[1].weights("attn").values():
            assert bool(tensor.isnan().all()), "a read before its copy shows itself"

    dense_ranks(2, body, settings=lambda rank: config(debug=1))


@pytest.mark.parametrize("strict", [False, True])
def test_the_watchdog_names_slot_and_first_wrong_byte(strict, caplog):
    caplog.set_level(logging.ERROR)

    def body(rank):
        expected = snapshot(rank.model)
        rank.setup()
        forward_and_check(rank, expected)
        runtime = rank.manager.runtime
        assert runtime.watch_mismatches == 0, "a right gather is accepted"
        assert rank.counters.synchronisations == 2 * 3, "each check waits for the device, and is counted"

        def spoil(hook, index):
            if hook == "H1" and index == 2:
                rank.device.drain()
                rank.manager.weights.slots.slots["D1"].data[700] ^= 1

        if strict:
            with pytest.raises(VerificationError, match="slot D1"):
                rank.model(at=spoil)
        else:
            rank.model(at=spoil)
        assert runtime.watch_mismatches == 1

    dense_ranks(2, body, settings=lambda rank: config(debug=2, strict=strict))
    assert "slot D1 does not hold the bytes of layer 2 MoE-dense; the first wrong byte is 700" in caplog.text


def test_after_release_tensors_are_empty_and_hooks_do_nothing():
    def body(rank):
        rank.setup()
        rank.manager.drain()
        rank.manager.unmap_imports()
        rank.group.barrier("unmapped")
        rank.manager.release_own()
        assert rank.domain.live() == NOTHING_LIVE and rank.domain.allocated_bytes == 0
        assert all(t.numel() == 0 for t in rank.model.layers[1].weights("attn").values())
        rank.model()
        with pytest.raises(DwdpError, match="spread this model's weights"):
            refuse_weight_change(rank.model)

    dense_ranks(2, body)
