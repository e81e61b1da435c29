"""Expert setup on rank threads over real host memory: right bytes, and all or nothing under faults.

Mutation-checked once, each caught by a test below: edges filled from rank 0 always (edge test); the plan of
the last layer not run before its check; `restore` without the last table; imported handles not released; a
rank that raises before it enters the next collective (the others then wait until the deadline).
"""

import ctypes
import gc
import logging
import threading

import pytest
import torch

from dwdp.errors import MemoryDomainError, PrefetchRingMemoryError, VerificationError
from dwdp.memory import host as host_module
from dwdp.runtime import setup_experts as module
from dwdp.weights import mover
from dwdp.weights.ring import PrefetchRing
from dwdp.weights.transport import ExpertTransport
from tests.weights.fake_experts import (
    GRANULE,
    build_model,
    dwdp_memfds,
    dwdp_threads,
    on_ranks,
    partition_of,
    raw,
    reference_layers,
    same_bytes,
    set_up,
    snapshot,
    take_down,
    unchanged,
)

KINDS = [
    (1, 7, 0, 0),
    (2, 7, 0, 0),
    (3, 7, 0, 0),
    (4, 33, 0, 0),
    (4, 32, 8, 8),
    (3, 7, 3, 2),
    (4, 33, 12, 7),
    (3, 32, 11, 11),
]


def run_forwards(model, runtime, reference, num_forwards=3):
    for _ in range(num_forwards):
        runtime.start_forward()
        for pos, (tables, _) in enumerate(reference):
            layer = model.moe_layers()[pos]
            if layer.dwdp is not None:
                layer.dwdp.bind(layer.dwdp_pos)
            for name, whole in tables.items():
                assert same_bytes(layer.expert_tables()[name], whole), (pos, name)
            if layer.dwdp is not None:
                layer.dwdp.finish(layer.dwdp_pos)


@pytest.mark.parametrize("ranks, experts, size, stride", KINDS)
@pytest.mark.parametrize("slots, layers", [(2, 3), (3, 2), (4, 5)])
def test_every_bound_layer_has_the_originals_bytes(ranks, experts, size, stride, slots, layers, caplog):
    partition = partition_of(ranks, experts, size, stride)
    reference = reference_layers(experts, layers)

    def body(group, domain, device):
        model, runtime = set_up(group, reference, partition, domain, device, num_slots=slots)
        for layer, (_, small) in zip(model.moe_layers(), reference):
            assert (layer.first_expert, layer.num_rows) == (0, experts)
            assert all(same_bytes(layer.small_tensors()[name], whole) for name, whole in small.items())
        run_forwards(model, runtime, reference)
        counters, start_end = runtime.counters, partition.ranges[group.rank]
        own = start_end[1] - start_end[0]
        row = sum(t[0].numel() * t.element_size() for tables, _ in reference for t in tables.values())
        report = runtime.report
        assert report["expert_moved_bytes"] == experts * row
        assert report["freed_bytes"] == (experts - own) * row
        assert counters.demand_fetches == counters.restarts == counters.synchronisations == 0
        if ranks > 1:
            assert report["stored_bytes"] + report["ring_bytes"] == domain.allocated_bytes
            assert report["ring_bytes"] == sum(report["pages_per_slot"]) * report["page_bytes"] > 0
            first = min(slots, layers)
            assert counters.copies == 3 * layers + first and runtime.primed
            assert domain.live()["descriptors"] == 0
        else:
            assert report["stored_bytes"] == report["ring_bytes"] == counters.copies == domain.allocated_bytes == 0
        take_down(runtime, group)
        assert domain.live() == {"handles": 0, "mappings": 0, "ranges": 0, "descriptors": 0}
        if ranks > 1:
            assert all(t.shape[0] == 0 for layer in model.moe_layers() for t in layer.expert_tables().values())
        return counters.copied_bytes

    copied = on_ranks(ranks, body)
    if ranks > 1:
        assert all(nbytes > 0 for nbytes in copied)
    assert "tensors over it are alive" not in caplog.text
    gc.collect()
    assert dwdp_memfds() == []


def test_edge_bytes_are_right_before_any_copy_runs():
    partition = partition_of(4, 33)
    reference = reference_layers(33, 2)

    def body(group, domain, device):
        model, runtime = set_up(group, reference, partition, domain, device, verify="off")
        for table in runtime.transport.tables:
            handle, b = table.geometry.handle, table.spec.row_nbytes
            whole = raw(reference[table.spec.pos][0][table.spec.name])
            inside = domain.tensor(table.area, table.geometry.before, (handle.nbytes,), torch.uint8)
            expected = whole[handle.page_start : min(handle.page_end, 33 * b)]
            assert raw(inside) == expected.ljust(handle.nbytes, b"\0"), table.spec
        del inside
        take_down(runtime, group)

    original = mover.run_plan
    mover.run_plan = lambda plan: None  # the plans would write the same edge bytes
    try:
        on_ranks(4, body)
    finally:
        mover.run_plan = original


def test_the_number_of_collectives_does_not_grow_with_the_layers():
    def count(num_layers):
        reference, partition = reference_layers(7, num_layers), partition_of(2, 7)

        def body(group, domain, device):
            before = group._number
            _, runtime = set_up(group, reference, partition, domain, device)
            collectives = group._number - before
            take_down(runtime, group)
            return collectives

        return on_ranks(2, body)

    assert count(1) == count(6)


class Injected(RuntimeError):
    pass


def fail_in(owner, name, rank, monkeypatch, *, call=1, rank_of=None, after=False):
    """The `call`-th call of `owner.name` on `rank` raises."""
    original, calls = getattr(owner, name), []
    rank_of = rank_of or (lambda args: args[0].rank)

    def wrapper(*args, **kwargs):
        if rank_of(args) == rank:
            calls.append(1)
            if len(calls) == call:
                if after:
                    original(*args, **kwargs)
                raise Injected(f"{name} of rank {rank}")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapper)


SETUP, HOST = module._Setup, "dwdp.memory.host.HostDomain"

# step -> how it is made to fail on one rank, and the phase in which all ranks must learn of it
STEPS = {
    "describe": ((SETUP, "_describe"), {}, "expert handshake"),
    "first handle": ((HOST, "create"), {"call": 1}, "expert handles"),
    "third handle": ((HOST, "create"), {"call": 3}, "expert handles"),
    "reserve": ((HOST, "reserve"), {"call": 2}, "expert handles"),
    "own map": ((HOST, "map"), {"call": 2}, "expert handles"),
    "seal": ((HOST, "seal"), {"call": 2}, "expert handles"),
    "after the last table": ((ExpertTransport, "take_in"), {"after": True}, "expert handles"),
    "import": ((HOST, "_add_handle"), {"call": 6 + 2}, "expert mapping"),
    "map of a peer": ((HOST, "map"), {"call": 6 + 3}, "expert mapping"),
    "ring": ((HOST, "create"), {"call": 6 + 2}, "expert scalars"),
    "map of a page": ((HOST, "map"), {"call": 6 + 12 + 2}, "expert scalars"),
    "access": ((HOST, "probe"), {"call": 3}, "expert scalars"),
    "edges": ((ExpertTransport, "edges"), {}, "expert scalars"),
    "build": ((SETUP, "_build"), {"after": True}, "expert scalars"),
}


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("step", STEPS)
def test_a_failure_on_one_rank_raises_everywhere_and_leaves_nothing(step, rank, monkeypatch, caplog):
    (owner, name), options, phase = STEPS[step]
    if owner == HOST:
        from dwdp.memory.host import HostDomain as owner
    fail_in(owner, name, rank, monkeypatch, **options)
    reference, partition = reference_layers(7), partition_of(3, 7)
    threads = dwdp_threads()

    def body(group, domain, device):
        model = build_model(reference, partition, group.rank)
        before = snapshot(model)
        with pytest.raises(RuntimeError) as caught:
            module.setup_experts(model, group=group, domain=domain, device=device, partition=partition, num_slots=2)
        assert unchanged(model, before) and model.unusable is None
        assert domain.live() == {"handles": 0, "mappings": 0, "ranges": 0, "descriptors": 0}
        assert domain.allocated_bytes == 0
        group.barrier("still usable")  # all ranks left setup after the same collective
        monkeypatch.undo()
        group.barrier("fault gone")
        runtime = module.setup_experts(
            model, group=group, domain=domain, device=device, partition=partition, num_slots=2
        )
        run_forwards(model, runtime, reference, 1)
        take_down(runtime, group)
        return caught.value

    errors = on_ranks(3, body)
    assert isinstance(errors[rank], Injected)
    for other in {0, 1, 2} - {rank}:
        assert f"rank {rank} failed in phase {phase!r}" in str(errors[other])
        assert f"{name} of rank {rank}" in str(errors[other])
    del errors
    gc.collect()
    assert dwdp_memfds() == [] and dwdp_threads() == threads
    assert "tensors over it are alive" not in caplog.text


@pytest.mark.parametrize("change", ["partition", "dtype", "layers"])
def test_a_rank_that_is_unlike_the_others_is_named_on_every_rank(change):
    reference, partition = reference_layers(7), partition_of(3, 7)
    other = reference_layers(7, 2) if change == "layers" else reference_layers(7)
    if change == "dtype":
        other[1][0]["w13"] = other[1][0]["w13"].view(torch.int8)

    def body(group, domain, device):
        mine = partition_of(3, 7, 3, 2) if (group.rank, change) == (0, "partition") else partition
        model = build_model(other if group.rank == 0 else reference, mine, group.rank)
        before = snapshot(model)
        with pytest.raises(RuntimeError) as caught:
            module.setup_experts(model, group=group, domain=domain, device=device, partition=mine, num_slots=2)
        assert unchanged(model, before)
        return str(caught.value)

    texts = on_ranks(3, body)
    assert len(set(texts)) == 1 and "rank 0 has" in texts[0] and "rank 1 has" not in texts[0]


@pytest.mark.parametrize("what", ["table", "small", "scalar"])
def test_copies_that_must_be_equal_and_are_not_are_refused_on_every_rank(what):
    reference, partition = reference_layers(7), partition_of(3, 7, 3, 2)  # expert 2 is on ranks 0 and 1

    def body(group, domain, device):
        model = build_model(reference, partition, group.rank)
        if group.rank == 1:
            layer = model.moe_layers()[1]
            wrong = {"table": layer.w2, "small": layer.alpha, "scalar": layer.input_scale}[what]
            wrong.data.view(-1).view(torch.uint8)[0] ^= 1
        before = snapshot(model)
        with pytest.raises(VerificationError) as caught:
            module.setup_experts(model, group=group, domain=domain, device=device, partition=partition, num_slots=2)
        assert unchanged(model, before) and domain.allocated_bytes == 0
        return str(caught.value)

    texts = on_ranks(3, body)
    expected = {
        "table": "layer 2 table w2 expert 2 differs on rank 0 and rank 1",
        "small": "layer 2 alpha of expert 2 differs on rank 0 and rank 1",
        "scalar": "layer 2 input_scale differs on rank 1",
    }
    assert len(set(texts)) == 1 and expected[what] in texts[0]


def flip_after_take_in(monkeypatch, rank, table_index=1, row=1):
    """Flips a byte of an own row of `rank` once its rows are in the handle."""
    take_in = ExpertTransport.take_in

    def wrapper(self):
        take_in(self)
        if self.rank == rank:
            self._own_rows(self.tables[table_index])[row].view(-1).view(torch.uint8)[3] ^= 0x80

    monkeypatch.setattr(ExpertTransport, "take_in", wrapper)


def test_a_flipped_byte_is_caught_before_anything_is_served(monkeypatch):
    flip_after_take_in(monkeypatch, 2)
    reference, partition = reference_layers(7), partition_of(3, 7)

    def body(group, domain, device):
        with pytest.raises(RuntimeError) as caught:
            set_up(group, reference, partition, domain, device)
        return caught.value

    errors = on_ranks(3, body)
    assert [type(error) for error in errors[:2]] == [VerificationError, VerificationError]
    assert "layer 1 table w2, expert row 6 copied from rank 2" in str(errors[0]) and "first byte" in str(errors[0])
    assert "rank 0 failed in phase 'expert scalars'" in str(errors[2])


def test_a_copy_that_loses_a_byte_is_named_with_its_first_wrong_byte(monkeypatch):
    original = mover.run_plan

    def losing(plan):
        original(plan)
        piece = plan.slices[-1]
        (ctypes.c_ubyte * 8).from_address(piece.dst)[5] ^= 1

    monkeypatch.setattr(mover, "run_plan", losing)
    reference, partition = reference_layers(7), partition_of(2, 7)

    def body(group, domain, device):
        with pytest.raises(VerificationError, match="first wrong byte 5 of the row.*IOMMU or PCIe ACS"):
            set_up(group, reference, partition, domain, device)

    on_ranks(2, body)


@pytest.mark.parametrize("verify, served", [("off", True), ("sample", True), ("full", False)])
def test_with_verification_off_or_beside_the_sample_wrong_bytes_are_served(verify, served, monkeypatch):
    flip_after_take_in(monkeypatch, 1, row=1)  # rank 1 stores experts 4 to 7: row 1 is inside a run
    reference, partition = reference_layers(8), partition_of(2, 8)

    def body(group, domain, device):
        if not served:
            with pytest.raises(RuntimeError):
                set_up(group, reference, partition, domain, device, verify=verify)
            return
        model, runtime = set_up(group, reference, partition, domain, device, verify=verify)
        runtime.start_forward()
        runtime.bind(0)
        wrong = model.moe_layers()[0].expert_tables()["w2"]
        assert not same_bytes(wrong, reference[0][0]["w2"])
        assert same_bytes(wrong[:5], reference[0][0]["w2"][:5]) and same_bytes(wrong[6:], reference[0][0]["w2"][6:])
        del wrong
        take_down(runtime, group)

    on_ranks(2, body)


def test_a_ring_that_does_not_fit_is_refused_with_its_remedies_and_restored():
    reference, partition = reference_layers(7), partition_of(3, 7)

    def body(group, domain, device):
        model = build_model(reference, partition, group.rank)
        before = snapshot(model)
        declared = 100_000 if group.rank == 1 else None
        with pytest.raises(RuntimeError) as caught:
            module.setup_experts(
                model, group=group, domain=domain, device=device, partition=partition, num_slots=3,
                host_memory_bytes=declared, dense_would_help=True,
            )  # fmt: skip
        assert unchanged(model, before)
        return caught.value

    errors = on_ranks(3, body)
    assert isinstance(errors[1], PrefetchRingMemoryError)
    for text in map(str, errors):
        assert "dense DWDP" in text and "fewer prefetch slots" in text and "a larger N" in text


def test_a_ring_fits_its_share_of_the_host_also_when_a_peer_has_allocated_its_own_first(monkeypatch):
    """Both rings fit the host, and rank 1 asks when rank 0's is there already."""
    reference, partition = reference_layers(64), partition_of(2, 64)
    rings: dict[int, PrefetchRing] = {}
    first = threading.Event()
    make, allocate = PrefetchRing.__init__, PrefetchRing.allocate

    def making(self, domain, *args):
        make(self, domain, *args)
        rings[domain.rank] = self
        if domain.rank == 1:
            assert first.wait(20)

    def allocating(self):
        allocate(self)
        if self.domain.rank == 0:
            first.set()

    monkeypatch.setattr(PrefetchRing, "__init__", making)
    monkeypatch.setattr(PrefetchRing, "allocate", allocating)

    def body(group, domain, device):
        _, runtime = set_up(group, reference, partition, domain, device)
        take_down(runtime, group)
        return runtime.report["ring_bytes"]

    needed = on_ranks(2, body)
    rounding = 2 * 6 * 2 * GRANULE  # of both ranks' six handles
    assert rounding < min(needed), "a host with that much more could not tell the two ways to count apart"
    first.clear(), rings.clear()

    def available():
        return sum(needed) + rounding - sum(ring.nbytes for ring in list(rings.values()))

    monkeypatch.setattr(host_module, "available_bytes", available)
    assert on_ranks(2, body) == needed


def test_every_rank_that_fails_while_it_moves_in_is_named(monkeypatch):
    take_in = ExpertTransport.take_in

    def failing(self):
        take_in(self)
        if self.rank < 2:
            raise Injected(f"rank {self.rank} is out")

    monkeypatch.setattr(ExpertTransport, "take_in", failing)
    reference, partition = reference_layers(7), partition_of(3, 7)

    def body(group, domain, device):
        with pytest.raises(RuntimeError) as caught:
            set_up(group, reference, partition, domain, device)
        return str(caught.value)

    text = on_ranks(3, body)[2]
    assert "rank 0 is out" in text and "rank 1 is out" in text


def test_one_rank_says_that_nothing_moves(caplog):
    reference, partition = reference_layers(7), partition_of(1, 7)
    with caplog.at_level(logging.INFO, logger="dwdp.runtime"):
        on_ranks(1, lambda *parts: set_up(parts[0], reference, partition, *parts[1:]))
    assert "expert DWDP (balanced, 1 x 7 of 7): one rank holds all experts, nothing moves" in caplog.text


def test_a_model_that_cannot_be_restored_is_marked_unusable_and_nothing_stays_mapped(monkeypatch, caplog):
    fail_in(SETUP, "_build", 1, monkeypatch)
    reference, partition = reference_layers(7), partition_of(2, 7)

    def body(group, domain, device):
        model = build_model(reference, partition, group.rank)
        options = {"restorable": False} if group.rank == 0 else {}
        if group.rank == 1:  # the copy back does not fit
            restore = ExpertTransport.restore

            def no_memory(self):
                if self.rank == 1:
                    raise MemoryError("no room for the rows")
                restore(self)

            monkeypatch.setattr(ExpertTransport, "restore", no_memory)
        with pytest.raises(RuntimeError) as caught:
            module.setup_experts(
                model, group=group, domain=domain, device=device, partition=partition, num_slots=2, **options
            )
        assert model.unusable is caught.value
        assert all(t.shape[0] == 0 for layer in model.moe_layers() for t in layer.expert_tables().values())
        assert domain.live() == {"handles": 0, "mappings": 0, "ranges": 0, "descriptors": 0}

    on_ranks(2, body)
    assert "rank 1: the experts could not be copied back" in caplog.text and "no room for the rows" in caplog.text


def test_an_interrupt_aborts_the_group_and_restores_this_rank(monkeypatch):
    reference, partition = reference_layers(7), partition_of(3, 7)
    original = SETUP._build

    def interrupted(self):
        if self.rank == 1:
            raise KeyboardInterrupt
        return original(self)

    monkeypatch.setattr(SETUP, "_build", interrupted)
    told = [threading.Event() for _ in range(3)]

    def body(group, domain, device):
        model = build_model(reference, partition, group.rank)
        before = snapshot(model)
        with pytest.raises(KeyboardInterrupt if group.rank == 1 else RuntimeError) as caught:
            module.setup_experts(model, group=group, domain=domain, device=device, partition=partition, num_slots=2)
        assert unchanged(model, before) and domain.live()["handles"] == 0
        told[group.rank].set()
        # Rank 1 stays in the group until its peers were told: its leaving would end their wait too.
        assert all(event.wait(20) for event in told)
        return str(caught.value)

    texts = on_ranks(3, body)
    assert "aborted" in texts[0] and "rank 1" in texts[0] and "rank 1" in texts[2]


def test_tables_that_cannot_be_moved_are_refused_by_name():
    reference, partition = reference_layers(7), partition_of(2, 7)

    def strided(layer, domain):
        layer.w2.data = layer.w2.data.repeat(1, 1, 2)[..., ::2]

    def padded(layer, domain):
        layer.w2.data = layer.w2.data.repeat(2, 1, 1)[: layer.w2.shape[0]]

    def short(layer, domain):
        layer.w2.data = layer.w2.data[1:].clone()

    def elsewhere(layer, domain):
        layer.first_expert += 1

    def mapped(layer, domain):
        area = domain.reserve(64 * GRANULE)
        domain.map(area, 0, domain.create(64 * GRANULE, "slot"), writable=True)
        layer.w2.data = domain.tensor(area, 0, tuple(layer.w2.shape), layer.w2.dtype)

    expected = {
        strided: "layer 1 table w2 is a part of a larger or strided storage",
        padded: "layer 1 table w2 is a part of a larger or strided storage",
        short: "layer 1 table w2 has 3 rows, rank 0 stores 4",
        elsewhere: "layer 1 has 7 experts and begins at 1",
        mapped: "layer 1 table w2 lies in mapped memory already",
    }
    for spoil, text in expected.items():

        def body(group, domain, device, spoil=spoil):
            model = build_model(reference, partition, group.rank)
            if group.rank == 0:
                spoil(model.moe_layers()[0], domain)
            with pytest.raises((RuntimeError, ValueError)) as caught:
                module.setup_experts(model, group=group, domain=domain, device=device, partition=partition, num_slots=2)
            return str(caught.value)

        for message in on_ranks(2, body):
            assert text in message


def test_the_mapping_budget_doubles_the_pages_or_names_both_numbers():
    from dwdp.device.host import HostDevice
    from dwdp.group.threads import run_rank_threads
    from dwdp.memory.host import HostDomain

    reference, partition = reference_layers(33, 2), partition_of(2, 33)

    def main(group, budget):
        group.join({})
        with (
            HostDomain(group.rank, granule_bytes=GRANULE, page_granules=1, mapping_budget=budget) as domain,
            HostDevice() as device,
        ):
            model, runtime = set_up(group, reference, partition, domain, device)
            assert domain.mapping_budget.used <= budget and domain.page_bytes > GRANULE
            run_forwards(model, runtime, reference, 1)
            take_down(runtime, group)

    run_rank_threads(2, lambda group: main(group, 40))
    with pytest.raises(MemoryDomainError, match="the plan needs 10 mappings.*7 are left"):
        run_rank_threads(2, lambda group: main(group, 7))


def test_free_memory_is_logged_before_the_first_collective_and_after(caplog):
    reference, partition = reference_layers(7), partition_of(2, 7)

    def body(group, domain, device):
        _, runtime = set_up(group, reference, partition, domain, device)
        take_down(runtime, group)
        return runtime.report["ring_bytes"], runtime.report["page_bytes"]

    with caplog.at_level(logging.INFO, logger="dwdp.runtime"):
        (ring, page), _ = on_ranks(2, body)
    text = "\n".join(record.getMessage() for record in caplog.records)
    assert "balanced, 1 x 4 + 1 x 3 of 7): waiting for all 2 ranks; free memory before setup" in text
    assert f"expert ring: {ring} bytes" in text and f"pages of {page} bytes; free memory after the ring" in text
    assert "free memory after setup" in text


def test_setup_again_with_another_size_gives_memory_back_each_time():
    used = []
    for ranks in (2, 3, 2, 4, 1):
        reference, partition = reference_layers(8, 2), partition_of(ranks, 8)

        def body(group, domain, device, reference=reference, partition=partition):
            model, runtime = set_up(group, reference, partition, domain, device)
            run_forwards(model, runtime, reference, 1)
            del model  # release works without the model
            take_down(runtime, group)
            runtime.release()
            return domain.allocated_bytes

        used += on_ranks(ranks, body)
        gc.collect()
        assert dwdp_memfds() == []
    assert set(used) == {0}
