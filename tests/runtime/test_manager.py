"""The managers on the real tiny model: set-up in order, forwards, aborts, teardown, guards.

Mutation-checked once, each caught by a test below: experts set up before dense; H0 without the start of the expert
prefetch; a start that ignores an aborted forward; experts started before dense priming; no `unusable` after a late
failure; release without detaching; the mark left out; `__exit__` that does not unregister.
"""

from __future__ import annotations

import contextvars
import gc
import os
from types import SimpleNamespace

import pytest
import torch

from dwdp.config.schema import DenseConfig, DwdpConfig
from dwdp.device.host import HostDevice
from dwdp.errors import DwdpError, GroupError, ModelReleasedError, ModelUnusableError, PrefetchRingMemoryError
from dwdp.group.threads import run_rank_threads
from dwdp.memory.host import HostDomain
from dwdp.model.decoder import KimiK3Model
from dwdp.partition.experts import ExpertPartition
from dwdp.runtime import dense
from dwdp.runtime import manager as manager_module
from dwdp.runtime.manager import DenseDwdpManager, DwdpManager, current_dense_manager, refuse_weight_change
from dwdp.runtime.setup_experts import outside_bytes
from tests.support.tiny import fill_model, random_tensors, tiny_model, tiny_model_config, token_ids

NOTHING_LIVE = {"handles": 0, "mappings": 0, "ranges": 0, "descriptors": 0}
CONFIG = tiny_model_config()
TENSORS = random_tensors(CONFIG)
IDS = token_ids(12)


def dense_config(**changes):
    return DenseConfig(**({"enabled": True, "min_bytes": 1024} | changes))


def reference_logits(ids=IDS):
    return tiny_model(CONFIG, TENSORS)(ids)


def rank_model(partition, rank, config=CONFIG, tensors=TENSORS):
    """The tiny model with this rank's experts, as the loader leaves it."""
    start, end = partition.ranges[rank]
    model = KimiK3Model(config, dtype=torch.float32, device="cpu", expert_range=(start, end)).requires_grad_(False)

    def is_mine(name):
        return ".experts." not in name or start <= int(name.split(".experts.")[1].split(".")[0]) < end

    return fill_model(model, {name: tensor for name, tensor in tensors.items() if is_mine(name)})


def on_ranks(n, body, *, dense=None, prepare=None, device_options=None, of=(CONFIG, TENSORS), **fields):
    """Runs body(rank) on n rank threads; rank: group, domain, device, manager, model, setup().

    dense: DenseConfig, or rank -> DenseConfig or None. The manager is left, and nothing may be live afterwards.
    """

    def run(group):
        group.join({})
        config = DwdpConfig(dwdp_size=n, page_granules=2, **fields)
        mine = dense(group.rank) if callable(dense) else dense
        options = {"granule_bytes": 4096, "page_granules": 2}
        with HostDomain(group.rank, **options) as domain, HostDevice(**(device_options or {})) as device:
            experts = of[0].num_experts
            manager = DwdpManager(config, mine, group=group, domain=domain, device=device, num_experts=experts)
            with manager:
                model = rank_model(manager.partition, group.rank, *of)
                rank = SimpleNamespace(group=group, domain=domain, device=device, manager=manager, model=model)
                rank.setup = lambda: manager.setup(rank.model)
                if prepare is not None:
                    prepare(rank)
                result = body(rank)
                group.barrier("test: body done")
            assert current_dense_manager() is None
            assert domain.live() == NOTHING_LIVE, domain.live()
            return result

    return run_rank_threads(n, run, timeout=60)


def step(rank, ids=IDS):
    rank.manager.start_forward()
    logits = rank.model(ids)
    rank.manager.end_forward()
    return logits


# ---- a clean run ----


@pytest.mark.parametrize("segments", [("attn", "moe"), ("attn",)])
@pytest.mark.parametrize(("num_ranks", "slots"), [(2, 2), (3, 3)])
def test_logits_are_those_of_the_replicated_model_bit_for_bit(num_ranks, slots, segments):
    expected = reference_logits()

    def body(rank):
        report = rank.setup()
        assert report["dense"]["status"] == "committed" and report["dense"]["covered_layers"] == 4
        for _ in range(4):
            assert torch.equal(step(rank), expected)
        counters = rank.manager.counters()
        for name in ("demand_fetches", "fences", "barriers", "synchronisations"):
            assert counters[name] == 0, name
        assert (counters["forwards"], counters["primed_forwards"]) == (4, 3)
        assert counters["copies"] == 4 * 8 + 2 + min(slots, 4)
        assert rank.setup() is report
        return rank.manager.ledger(), rank.domain.allocated_bytes

    results = on_ranks(num_ranks, body, dense=dense_config(segments=segments, debug=1), num_prefetch_slots=slots)
    for ledger, allocated in results:
        assert ledger["moved_bytes"] == ledger["expert_moved_bytes"] + ledger["dense_moved_bytes"] > 0
        assert allocated == ledger["stored_bytes"] + ledger["ring_bytes"] + ledger["slot_bytes"]
    moved = results[0][0]["moved_bytes"]
    assert sum(moved - ledger["freed_bytes"] for ledger, _ in results) == moved


def test_a_warm_up_forward_without_a_start_is_right_too():
    expected = reference_logits()

    def body(rank):
        rank.setup()
        for _ in range(3):
            assert torch.equal(rank.model(IDS), expected)
        counters = rank.manager.counters()
        assert counters["demand_fetches"] == counters["fences"] == counters["barriers"] == 0
        rank.manager.end_forward()
        assert rank.manager.counters()["primed_forwards"] == 1

    on_ranks(2, body, dense=dense_config())


def test_prefill_in_chunks_and_decode_read_inside_the_windows():
    """Slots hold NaN before their first copy and other layers afterwards, so a read outside shows in the logits."""
    ids = token_ids(9)
    reference = tiny_model(CONFIG, TENSORS)
    state = reference.new_state(1, 9)
    expected = torch.cat([reference(ids[:, a:b], state) for a, b in ((0, 4), (4, 7), (7, 8), (8, 9))], 1)

    def body(rank):
        rank.setup()
        state, parts = rank.model.new_state(1, 9), []
        for a, b in ((0, 4), (4, 7), (7, 8), (8, 9)):
            rank.manager.start_forward()
            parts.append(rank.model(ids[:, a:b], state))
            rank.manager.end_forward()
        assert torch.equal(torch.cat(parts, 1), expected)

    on_ranks(2, body, dense=dense_config(min_bytes=1, debug=1), device_options={"copy_bytes_per_second": 50e6})


def order(trace):
    """The copies of a trace in host enqueue order, with starts and hooks that enqueue, as text."""
    words, last = [], None
    for op in trace:
        if op["kind"] == "mark" and op["name"] in ("start", "H0", "barrier", "end"):
            words.append(op["name"])
        elif op["kind"] == "sync":
            words.append("sync")
        elif op["kind"] == "copy":
            name = ("E" if op["slot"].startswith("E") else "L") + f"({op['layer'] + 1})"
            if name != last:
                words.append(name)
        last = words[-1] if words else None
    return " ".join(words)


def test_the_copy_order_of_two_forwards():
    def body(rank):
        rank.setup()
        rank.device.trace.clear()
        step(rank)
        step(rank)
        return order(rank.device.trace)

    for text in on_ranks(2, body, dense=dense_config(), device_options={"trace": True}):
        assert text == (
            "start L(1) L(2) E(1) E(2) H0 L(3) E(3) L(4) E(4) E(1) E(2) L(1) L(2) end "
            "start H0 L(3) E(3) L(4) E(4) E(1) E(2) L(1) L(2) end"
        )


class Abort(Exception):
    pass


@pytest.mark.parametrize("started", [True, False])
def test_after_an_abort_at_any_hook_h0_recovers_in_order_and_the_next_forward_is_right(started):
    expected = reference_logits()

    def body(rank):
        rank.setup()
        points = [(name, pos) for pos in range(4) for name in ("h1", "h2", "bind", "finish", "h3")]
        for number, (name, pos) in enumerate(points):
            step(rank)
            before = rank.manager.counters()
            owner = rank.manager.experts if name in ("bind", "finish") else rank.manager.dense
            argument = pos if name in ("bind", "finish") else pos + 1
            real = getattr(owner, name)

            def stopping(index, real=real, argument=argument):
                if index == argument:
                    raise Abort
                real(index)

            setattr(owner, name, stopping)
            with pytest.raises(Abort):
                rank.manager.start_forward()
                rank.model(IDS)
            setattr(owner, name, real)
            rank.device.trace.clear()
            if started:
                rank.manager.start_forward()
            assert torch.equal(rank.model(IDS), expected), (name, pos)
            rank.manager.end_forward()
            text = order(rank.device.trace).removeprefix("start ")
            dense_part = "H0 barrier L(1) L(2)"
            assert text.startswith(dense_part), (name, pos, text)
            experts = text.removeprefix(dense_part).split(" L(3)")[0].strip()
            if number <= 2 or number == len(points) - 1:
                assert experts == "", "E is in flight"
            elif name == "finish":
                assert experts == "sync E(1) E(2)", (name, pos, text)
            else:
                assert experts == "E(1) E(2)", (name, pos, text)
            after = rank.manager.counters()
            assert after["barriers"] == before["barriers"] + 1
            assert after["demand_fetches"] == after["fences"] == 0
            assert after["primed_forwards"] == before["primed_forwards"], "an aborted forward leaves nothing primed"

    on_ranks(2, body, dense=dense_config(debug=1), device_options={"trace": True})


def test_invalidation_gathers_experts_again_and_leaves_dense_copies():
    expected = reference_logits()

    def body(rank):
        rank.setup()
        step(rank)
        rank.manager.invalidate_prefetch()
        rank.device.trace.clear()
        assert torch.equal(step(rank), expected)
        return order(rank.device.trace)

    for text in on_ranks(2, body, dense=dense_config(), device_options={"trace": True}):
        assert text.startswith("start E(1) E(2) H0 L(3)")


# ---- set-up ----


def test_dense_commits_before_the_ring_is_checked_so_that_both_fit():
    """Memory between the two orders' peaks: with dense off the ring does not fit, and the message says what helps."""
    config = tiny_model_config(
        num_hidden_layers=8,
        num_experts=160,
        linear_attn_config={"kda_layers": [*range(1, 8)], "full_attn_layers": [8]},
    )
    of = (config, random_tensors(config))

    def peaks(rank):
        before = outside_bytes(rank.model, rank.domain)
        rank.setup()
        after = outside_bytes(rank.model, rank.domain) + rank.domain.allocated_bytes
        ledger = rank.manager.ledger()
        moving_in = before + rank.manager.report["dense"]["stored_bytes"] + ledger["slot_bytes"]
        return max(moving_in, after), before + ledger["ring_bytes"]

    with_dense, without = (max(peak) for peak in zip(*on_ranks(4, peaks, dense=dense_config(), of=of)))
    assert with_dense < without
    limit = (with_dense + without) // 2

    def fits(rank):
        assert rank.setup()["dense"]["status"] == "committed"

    on_ranks(4, fits, dense=dense_config(), of=of, host_memory_bytes=limit)

    def too_large(rank):
        with pytest.raises(RuntimeError, match="DWDP_DENSE=1"):
            rank.setup()

    on_ranks(4, too_large, of=of, host_memory_bytes=limit)


def test_ranks_that_differ_on_dense_all_raise():
    def body(rank):
        with pytest.raises(DwdpError, match="DWDP_DENSE .rank 0: on, rank 1: off"):
            rank.setup()
        assert rank.domain.live() == NOTHING_LIVE and rank.model.unusable is None

    on_ranks(2, body, dense=lambda rank: dense_config() if rank == 0 else None)


def test_required_off_serves_on_with_replicated_dense_weights():
    expected = reference_logits()

    def body(rank):
        report = rank.setup()
        assert report["dense"]["status"] == "abandoned"
        assert torch.equal(step(rank), expected)
        assert rank.manager.ledger()["dense_moved_bytes"] == rank.manager.ledger()["slot_bytes"] == 0
        assert rank.manager.ledger()["expert_moved_bytes"] > 0
        refuse_weight_change(rank.model)

    on_ranks(2, body, dense=lambda rank: dense_config(required=False, min_bytes=1024 + rank))


def without_roots(rank):
    for layer in rank.model.model.layers:
        layer.dense_dwdp_roots = lambda: {}


def test_a_model_without_roots_is_an_error_with_required_and_no_dense_collective(caplog):
    tags = []

    def body(rank):
        real = rank.group.vote_with
        rank.group.vote_with = lambda phase, *args: (tags.append(phase), real(phase, *args))[1]
        with pytest.raises(DwdpError, match="no layer of KimiK3Model declares dense roots"):
            rank.manager.check_model(rank.model)
        with pytest.raises(DwdpError, match="DWDP_DENSE_REQUIRED=0"):
            rank.setup()

    on_ranks(2, body, dense=dense_config(), prepare=without_roots)
    assert tags == []
    expected = reference_logits()

    def goes_on(rank):
        rank.manager.check_model(rank.model)
        assert rank.setup()["dense"]["status"] == "no roots"
        assert torch.equal(step(rank), expected)

    on_ranks(2, goes_on, dense=dense_config(required=False), prepare=without_roots)
    said = [r for r in caplog.records if "declares dense roots; its dense weights stay replicated" in r.message]
    assert len(said) == 2, "once a rank"


def test_no_covered_layer_is_no_failure():
    expected = reference_logits()

    def body(rank):
        assert rank.setup()["dense"]["status"] == "nothing covered"
        assert torch.equal(step(rank), expected)

    on_ranks(2, body, dense=dense_config(min_bytes=1 << 30))


def test_an_expert_failure_behind_the_dense_commit_marks_the_model_unusable_and_releases_all():
    descriptors = len(os.listdir("/proc/self/fd"))

    def body(rank):
        if rank.group.rank == 1:
            real = rank.domain.create

            def create(nbytes, what, **options):
                if what.startswith("experts-3"):
                    raise OSError("no memory for experts")
                return real(nbytes, what, **options)

            rank.domain.create = create
        with pytest.raises((OSError, RuntimeError), match="no memory for experts") as caught:
            rank.setup()
        assert isinstance(caught.value, OSError) is (rank.group.rank == 1)
        tables = [table for experts in rank.model.moe_layers()[:2] for table in experts.expert_tables().values()]
        assert not any(table.numel() for table in tables), "nothing is copied back"
        assert rank.domain.live() == NOTHING_LIVE and rank.domain.allocated_bytes == 0
        with pytest.raises(DwdpError, match="no memory for experts"):
            rank.model(IDS)
        for refused in (lambda: rank.setup(), lambda: refuse_weight_change(rank.model)):
            with pytest.raises(DwdpError, match="cannot run any more"):
                refused()

    on_ranks(2, body, dense=dense_config())
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_failure_of_the_last_step_of_set_up_leaves_an_unusable_model_and_nothing_live():
    def body(rank):
        def fails():
            raise OSError("the last step failed")

        rank.group.mark_setup_done = fails
        with pytest.raises(OSError, match="the last step failed"):
            rank.setup()
        assert rank.domain.live() == NOTHING_LIVE
        with pytest.raises(DwdpError, match="the last step failed"):
            rank.model(IDS)

    on_ranks(2, body, dense=dense_config())


def test_a_dense_runtime_that_cannot_be_made_behind_the_commit_leaves_nothing_and_ends_the_others(monkeypatch):
    """Fails when the rows and slots of a commit without a runtime are nobody's to give back."""
    real = dense.DenseRuntime.__init__

    def init(self, device, *args, **options):
        if device is broken[0]:
            raise OSError("no more events")
        real(self, device, *args, **options)

    monkeypatch.setattr(dense.DenseRuntime, "__init__", init)
    broken = [None]

    def body(rank):
        if rank.group.rank == 1:
            broken[0] = rank.device
        rank.group.barrier("one is broken")
        with pytest.raises((OSError, GroupError), match="no more events") as caught:
            rank.setup()
        assert isinstance(caught.value, OSError) is (rank.group.rank == 1)
        assert rank.domain.live() == NOTHING_LIVE
        if rank.group.rank == 1:  # the other may have heard of it in the last vote and be as it was
            with pytest.raises(ModelUnusableError, match="no more events"):
                rank.model(IDS)
        return True

    def alone(rank):
        try:
            return body(rank)
        finally:
            rank.group.barrier = lambda *args, **options: None  # it was aborted

    assert on_ranks(2, alone, dense=dense_config()) == [True, True]


def test_an_expert_weight_inside_a_dense_slot_is_refused_before_the_transport(monkeypatch):
    real = DwdpManager._setup_experts

    def with_a_weight_in_a_slot(self, model, report):
        experts = model.moe_layers()[1]
        slot = self.dense.weights.slots.slots["D0"].data
        nbytes = experts.w2.numel() * 4
        experts.w2.data = slot[:nbytes].view(torch.float32).view(experts.w2.shape)
        return real(self, model, report)

    monkeypatch.setattr(DwdpManager, "_setup_experts", with_a_weight_in_a_slot)

    def body(rank):
        with pytest.raises(ValueError, match="layer 2 table w2 (lies in|is a part of a larger)"):
            rank.setup()
        assert not any("experts" in handle.what for handle in rank.domain._handles.values())
        rank.model.moe_layers()[1].w2.data = torch.empty(0)

    on_ranks(2, body, dense=dense_config())


def test_more_expert_slots_are_said_once(caplog):
    caplog.set_level("INFO", logger=manager_module.__name__)
    on_ranks(2, lambda rank: rank.setup(), dense=dense_config(), num_prefetch_slots=3)
    assert caplog.text.count("each layer's expert copy runs ahead of its dense copy") == 2  # one a rank
    with pytest.raises(DwdpError, match="dwdp_size > 1"):
        DwdpManager(DwdpConfig(dwdp_size=1), dense_config(), group=None, domain=None, device=None, num_experts=8)


# ---- registration ----


def test_layers_capture_the_registered_manager_and_none_without():
    def build():
        return KimiK3Model(CONFIG, dtype=torch.float32, device="meta")

    manager = DenseDwdpManager(dense_config())
    manager.register()
    try:
        with pytest.raises(DwdpError, match="registered already"):
            DenseDwdpManager(dense_config()).register()
        model = build()
        assert model.dense is manager and all(layer.dense is manager for layer in model.model.layers)
        assert contextvars.Context().run(current_dense_manager) is None, "another rank's context has its own"
    finally:
        manager.unregister()
    assert current_dense_manager() is None and build().dense is None
    other = DenseDwdpManager(dense_config())
    other.register()
    manager.unregister()
    assert current_dense_manager() is other, "a foreign manager is left alone"
    other.unregister()


def test_hooks_do_nothing_before_set_up():
    manager = DenseDwdpManager(dense_config())
    manager.h0()
    for hook in (manager.h1, manager.h2, manager.h3):
        hook(1)


# ---- teardown ----


def memfds():
    with open("/proc/self/maps") as maps:
        return sum("memfd:dwdp-" in line for line in maps)


@pytest.mark.parametrize("dropped", [False, True])
def test_release_gives_everything_back_with_copies_in_flight_and_without_the_model(dropped):
    def body(rank):
        rank.setup()
        step(rank)
        rank.manager.start_forward()  # the next forward's copies are under way
        model = rank.model
        if dropped:
            rank.model = model = None
            gc.collect()
        rank.manager.release()
        rank.manager.release()
        assert rank.domain.live() == NOTHING_LIVE and rank.domain.allocated_bytes == 0
        if dropped:
            return
        assert model.released
        with pytest.raises(ModelReleasedError):
            model(IDS)
        with pytest.raises(ModelReleasedError):
            refuse_weight_change(model)
        layer = model.model.layers[2]
        assert layer.self_attn.o_proj.weight.numel() == 0
        assert all(table.numel() == 0 for table in layer.block_sparse_moe.experts.expert_tables().values())
        with pytest.raises(ModelReleasedError):
            rank.manager.setup(model)

    on_ranks(2, body, dense=dense_config(), device_options={"copy_bytes_per_second": 20e6})
    assert memfds() == 0


def test_memory_goes_only_behind_the_barriers_of_the_release_and_dense_goes_first():
    def body(rank):
        rank.setup()
        steps, group = [], rank.group
        for name, owner in (("dense", rank.manager.dense), ("experts", rank.manager.experts)):
            for step_name in ("drain", "unmap_imports", "release_own"):
                real = getattr(owner, step_name)
                noted = f"{name} {step_name}"
                setattr(owner, step_name, lambda real=real, noted=noted: (steps.append(noted), real()))
        barrier = group.barrier
        group.barrier = lambda tag, **options: (steps.append(tag), barrier(tag, **options))
        rank.manager.release()
        del group.barrier
        return steps

    expected = ["dense drain", "experts drain", "release: copies drained"]
    expected += ["dense unmap_imports", "experts unmap_imports", "release: peers unmapped"]
    expected += ["dense release_own", "experts release_own"]
    assert on_ranks(2, body, dense=dense_config()) == [expected] * 2


def test_dense_p1_counts_the_weights_that_the_declared_memory_holds_already():
    def body(rank):
        with pytest.raises(DwdpError, match="dense DWDP needs .* but 4096 bytes are free"):
            rank.setup()
        assert rank.model.unusable is None

    def declare(rank):
        size = outside_bytes(rank.model, rank.domain) + 4096
        rank.manager.config = rank.manager.config.model_copy(update={"host_memory_bytes": size})

    on_ranks(2, body, dense=dense_config(), prepare=declare)


def test_set_up_again_in_one_process_with_another_number_of_ranks():
    expected = reference_logits()

    def body(rank):
        rank.setup()
        assert torch.equal(step(rank), expected)
        rank.manager.release()

    for num_ranks in (2, 3, 2):
        on_ranks(num_ranks, body, dense=dense_config())
        assert memfds() == 0


def test_a_failing_step_of_the_release_is_logged_and_stops_nothing(caplog):
    def body(rank):
        rank.setup()
        real = rank.manager.dense.unmap_imports

        def fails():
            real()
            raise OSError("unmap went wrong")

        rank.manager.dense.unmap_imports = fails
        rank.manager.release()
        assert rank.domain.live() == NOTHING_LIVE

    on_ranks(2, body, dense=dense_config())
    assert "unmap went wrong" in caplog.text


def test_weight_changes_are_refused_on_the_model_its_decoder_and_through_wrappers():
    def body(rank):
        refuse_weight_change(rank.model)
        rank.setup()
        wrapper = torch.nn.Module()
        wrapper.inner = rank.model
        for target in (rank.model, rank.model.model, wrapper, SimpleNamespace(model=rank.model)):
            with pytest.raises(DwdpError, match="cannot be loaded or updated"):
                refuse_weight_change(target)
        refuse_weight_change(torch.nn.Linear(2, 2))

    on_ranks(2, body, dense=dense_config())


def test_expert_dwdp_alone_needs_no_dense_manager_and_one_rank_no_group():
    expected = reference_logits()

    def body(rank):
        assert rank.manager.dense is None and rank.model.dense is None
        assert rank.setup()["dense"]["status"] == "off"
        for _ in range(3):
            assert torch.equal(step(rank), expected)
        assert rank.manager.counters()["primed_forwards"] == 2
        refuse_weight_change(rank.model)  # experts alone may be updated

    on_ranks(2, body)
    with HostDomain(0, granule_bytes=4096) as domain, HostDevice() as device:
        alone = DwdpManager(DwdpConfig(dwdp_size=1), None, group=None, domain=domain, device=device, num_experts=8)
        with alone:
            model = rank_model(ExpertPartition.from_config(DwdpConfig(dwdp_size=1), num_experts=8), 0)
            alone.setup(model)
            assert torch.equal(model(IDS), expected)


def test_a_ring_that_does_not_fit_is_picklable_and_keeps_the_model_without_dense():
    def body(rank):
        with pytest.raises(RuntimeError) as caught:
            rank.setup()
        assert isinstance(caught.value, PrefetchRingMemoryError) or rank.group.rank == 1
        assert rank.model.unusable is None

    on_ranks(2, body, host_memory_bytes=1 << 20)
