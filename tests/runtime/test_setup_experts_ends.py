"""How expert set-up and its release end: when the clean-up fails too, beside other groups, and at the limits."""

from __future__ import annotations

import ctypes
import gc
import logging
import threading

import pytest
import torch
import torch.distributed as dist

from dwdp.device.host import HostDevice
from dwdp.errors import MemoryBudgetError, MemoryDomainError
from dwdp.group.backends import StoreGroup
from dwdp.group.threads import run_rank_threads
from dwdp.memory.host import HostDomain
from dwdp.runtime import setup_experts as module
from dwdp.weights.ring import PrefetchRing
from dwdp.weights.transport import ExpertTransport
from tests.weights.fake_experts import (
    GRANULE,
    FakeExperts,
    FakeModel,
    build_model,
    dwdp_memfds,
    on_ranks,
    partition_of,
    rank_parts,
    reference_layers,
    same_bytes,
    set_up,
    snapshot,
    take_down,
    unchanged,
)

NOTHING = {"handles": 0, "mappings": 0, "ranges": 0, "descriptors": 0}


def setup_on(model, group, domain, device, partition):
    return module.setup_experts(model, group=group, domain=domain, device=device, partition=partition, num_slots=2)


def forward(model, reference):
    """One forward that finds every layer's original bytes."""
    layers = model.moe_layers()
    layers[0].dwdp.start_forward()
    for pos, (tables, _) in enumerate(reference):
        layers[pos].dwdp.bind(pos)
        for name, whole in tables.items():
            assert same_bytes(layers[pos].expert_tables()[name], whole), (pos, name)
        layers[pos].dwdp.finish(pos)


# ---- the first error is the one that is raised ----


class FirstError(RuntimeError):
    pass


FIRST = {
    "pages": (PrefetchRing, "allocate"),
    "edges": (ExpertTransport, "edges"),
    "tensors": (ExpertTransport, "full_tensor"),
}
SECOND = {
    "ring": (PrefetchRing, "close"),
    "peers": (ExpertTransport, "unmap_imports"),
    "originals": (ExpertTransport, "restore"),
}


@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize("first", FIRST)
def test_an_error_of_the_clean_up_is_logged_and_the_one_that_led_to_it_is_raised(first, second, monkeypatch, caplog):
    """Fails when the rollback raises its own error, or when one step of it keeps another from running."""
    (owner, name), (cleaner, cleaning) = FIRST[first], SECOND[second]
    original, clean = getattr(owner, name), getattr(cleaner, cleaning)

    def on_rank_1():
        return threading.current_thread().name.endswith("-rank-1")

    def failing(self, *args):
        if on_rank_1():
            raise FirstError(f"{first} of rank 1")
        return original(self, *args)

    def failing_too(self, *args):
        clean(self, *args)
        if on_rank_1():
            raise OSError(f"{second} of rank 1 went wrong as well")

    monkeypatch.setattr(owner, name, failing)
    monkeypatch.setattr(cleaner, cleaning, failing_too)
    reference, partition = reference_layers(7), partition_of(3, 7)

    def body(group, domain, device):
        model = build_model(reference, partition, group.rank)
        before = snapshot(model)
        with pytest.raises(RuntimeError) as caught:
            setup_on(model, group, domain, device, partition)
        # A handle that was given back twice would leave less than nothing.
        assert domain.live() == NOTHING and domain.allocated_bytes == domain.mapping_budget.used == 0
        if group.rank == 1 and second == "originals":
            assert model.unusable is caught.value
        else:
            assert unchanged(model, before) and model.unusable is None
        group.barrier("all ranks left after the same collective")
        return caught.value

    errors = on_ranks(3, body)
    assert isinstance(errors[1], FirstError) and str(errors[1]) == f"{first} of rank 1"
    for rank in (0, 2):
        assert f"rank 1 failed in phase 'expert scalars': FirstError: {first}" in str(errors[rank])
    assert caplog.text.count(f"OSError: {second} of rank 1 went wrong as well") >= 1
    gc.collect()
    assert dwdp_memfds() == []


@pytest.mark.parametrize("page", [0, 1, -1])
@pytest.mark.parametrize("error", [MemoryDomainError("no page left"), MemoryError("none at all")])
def test_a_page_of_the_second_slot_that_fails_gives_everything_back_and_is_the_error_raised(page, error):
    reference, partition = reference_layers(7), partition_of(2, 7)

    def body(group, domain, device):
        model = build_model(reference, partition, group.rank)
        before, create, pages = snapshot(model), domain.create, []

        def failing(nbytes, what, **options):
            if what == "ring-1" and group.rank == 0:
                pages.append(nbytes)
                if len(pages) == 1 + page % needed:
                    raise error
            return create(nbytes, what, **options)

        domain.create = failing
        with pytest.raises(Exception) as caught:
            setup_on(model, group, domain, device, partition)
        assert unchanged(model, before) and domain.live() == NOTHING and domain.allocated_bytes == 0
        return caught.value

    def count(group, domain, device):
        _, runtime = set_up(group, reference, partition, domain, device)
        take_down(runtime, group)
        return runtime.report["pages_per_slot"][1]

    needed = on_ranks(2, count)[0]
    assert needed > 2
    raised, told = on_ranks(2, body)
    assert raised is error
    assert "rank 0 failed in phase 'expert scalars'" in str(told) and str(error) in str(told)


# ---- access ----


def test_every_mapping_is_proved_before_the_last_vote_and_every_byte_of_it_can_be_read_after(monkeypatch):
    """Fails when set-up leaves out `probe`, or when it probes own ranges only."""
    reference, partition = reference_layers(33), partition_of(4, 33)
    proved, probe = {}, HostDomain.probe
    monkeypatch.setattr(HostDomain, "probe", lambda self, area: proved.setdefault(id(area), probe(self, area)))

    def body(group, domain, device):
        model, runtime = set_up(group, reference, partition, domain, device, verify="off")
        transport = runtime.transport
        areas = [table.area for table in transport.tables] + transport.peer_areas
        assert sum(proved[id(area)] for area in areas) == sum(area.nbytes for area in areas) // GRANULE
        for area in areas:
            assert not area.freed and area.covers(0, area.nbytes)
            assert len(ctypes.string_at(area.address, area.nbytes)) == area.nbytes
        del model
        group.barrier("read")
        take_down(runtime, group)

    on_ranks(4, body)


# ---- layers that DWDP does not manage, names that change after loading ----


def test_a_layer_that_is_not_managed_stays_whole_from_set_up_to_release():
    reference, partition = reference_layers(7), partition_of(3, 7)

    def body(group, domain, device):
        model = build_model(reference, partition, group.rank)
        model.draft = FakeExperts(9, *reference[0], 7, (0, 7))
        whole, tables = snapshot(model.draft), dict(model.draft.named_parameters())
        runtime = setup_on(model, group, domain, device, partition)
        forward(model, reference)
        for _ in range(2):
            assert all(model.draft.get_parameter(name) is table for name, table in tables.items())
            assert all(same_bytes(table, whole[name]) for name, table in tables.items())
            assert (model.draft.first_expert, model.draft.num_rows, model.draft.dwdp) == (0, 7, None)
            assert not any(map(domain.holds, tables.values()))
            take_down(runtime, group)

    on_ranks(3, body)


def test_a_managed_layer_that_holds_all_experts_is_refused_and_not_cut():
    reference, partition = reference_layers(7), partition_of(3, 7)

    def body(group, domain, device):
        model = build_model(reference, partition, group.rank)
        model.layers.append(FakeExperts(9, *reference[0], 7, (0, 7)))
        before = snapshot(model)
        with pytest.raises((ValueError, RuntimeError), match="layer 9 "):
            setup_on(model, group, domain, device, partition)
        after = snapshot(model)
        assert all(same_bytes(after[name], table) for name, table in before.items())

    on_ranks(3, body)


def test_tables_are_found_by_the_names_that_they_have_after_loading():
    """A module that replaces a table when its weights are processed is moved with its new table."""
    reference, partition = reference_layers(7), partition_of(2, 7)
    packed = [({"w13_packed" if k == "w13" else k: v for k, v in t.items()}, small) for t, small in reference]

    def body(group, domain, device):
        model = build_model(reference, partition, group.rank)
        for layer in model.moe_layers():
            table = layer.w13.data
            del layer.w13
            layer.register_parameter("w13_packed", torch.nn.Parameter(table.clone(), requires_grad=False))
            layer._tables = tuple("w13_packed" if name == "w13" else name for name in layer._tables)
        runtime = setup_on(model, group, domain, device, partition)
        assert not any(hasattr(layer, "w13") for layer in model.moe_layers())
        forward(model, packed)
        take_down(runtime, group)

    on_ranks(2, body)


def test_a_table_without_bytes_or_in_the_storage_of_another_is_refused_by_name():
    reference, partition = reference_layers(7), partition_of(2, 7)

    def shared(layers):
        layers[2].w2.data = layers[1].w13.data.view(torch.uint8).view(-1)[: layers[2].w2.nbytes].view(torch.bfloat16)
        layers[2].w2.data = layers[2].w2.data.view(-1, 5)

    def meta(layers):
        layers[1].w13 = torch.nn.Parameter(layers[1].w13.to("meta"), requires_grad=False)

    def same(layers):
        layers[1].w13 = layers[1].w2

    for spoil, text in (
        (shared, "layer 3 table w2 is a part of a larger"),
        (meta, "layer 2 table w13 has no bytes"),
        (same, "layer 2 table w2 shares its storage with layer 2 table w13"),
    ):

        def body(group, domain, device, spoil=spoil, text=text):
            model = build_model(reference, partition, group.rank)
            if group.rank == 1:
                spoil(model.moe_layers())
            with pytest.raises((ValueError, RuntimeError), match=text):
                setup_on(model, group, domain, device, partition)
            assert domain.live() == NOTHING

        on_ranks(2, body)


def test_experts_whose_transform_has_not_run_are_refused_on_every_rank_by_their_layer():
    reference, partition = reference_layers(7), partition_of(2, 7)

    def body(group, domain, device):
        model = build_model(reference, partition, group.rank)
        before = snapshot(model)
        model.moe_layers()[1].weights_transformed = group.rank == 0
        with pytest.raises((ValueError, RuntimeError), match="experts of layer 2 still wait for their post-load"):
            setup_on(model, group, domain, device, partition)
        assert unchanged(model, before)

    on_ranks(2, body)


# ---- many layers ----

DEEP, TABLES = 128, {"w13": 40, "w2": 24}  # layers, bytes of a row


def deep_model(partition, rank):
    whole = {name: torch.arange(partition.num_experts * b).to(torch.uint8).view(-1, b) for name, b in TABLES.items()}
    return FakeModel(
        [FakeExperts(pos + 1, whole, {}, partition.num_experts, partition.ranges[rank]) for pos in range(DEEP)]
    ), [(whole, {})] * DEEP  # fmt: skip


def deep_ranks(n, mapping_budget, body):
    def main(group):
        group.join({})
        options = {"granule_bytes": GRANULE, "page_granules": 1, "mapping_budget": mapping_budget}
        with HostDomain(group.rank, **options) as domain, HostDevice() as device:
            return body(group, domain, device)

    return run_rank_threads(n, main)


def test_128_layers_hold_exactly_the_mappings_and_handles_that_were_counted_before_the_first_one():
    """One handle a table, layer and rank; tables of a granule need no ring page. The budget is the count itself."""
    partition = partition_of(2, 16)
    needed = DEEP * len(TABLES) * 2

    def body(group, domain, device):
        model, reference = deep_model(partition, group.rank)
        runtime = setup_on(model, group, domain, device, partition)
        assert domain.live()["handles"] == needed and domain.live()["descriptors"] == 0
        used = domain.mapping_budget.used
        forward(model, reference)
        take_down(runtime, group)
        return used

    assert deep_ranks(2, needed, body) == [needed] * 2


def test_128_layers_on_8_ranks_over_the_limit_are_refused_with_both_numbers_before_the_first_handle():
    partition = partition_of(8, 16)
    needed = DEEP * len(TABLES) * 8

    def body(group, domain, device):
        model, _ = deep_model(partition, group.rank)
        before, create, made = snapshot(model), domain.create, []
        domain.create = lambda *args, **options: (made.append(args), create(*args, **options))[1]
        with pytest.raises(MemoryBudgetError) as caught:
            setup_on(model, group, domain, device, partition)
        assert made == [] and domain.live() == NOTHING and unchanged(model, before)
        return str(caught.value)

    for text in deep_ranks(8, needed - 1, body):
        assert f"the plan needs {needed} mappings with pages of any size, {needed - 1} are left" in text
        assert "mapping_budget" in text


# ---- groups beside each other ----


def test_two_groups_of_a_world_set_up_apart_and_a_late_one_holds_nobody_up_nor_a_larger_one_later():
    """Ranks 0, 1 and ranks 2, 3 are groups of two; then all four are one. Group 1 begins when group 0 has finished."""
    store, finished, failed = dist.HashStore(), threading.Event(), []
    halves, everybody = partition_of(2, 7), partition_of(4, 7)

    def one_set_up(group, partition, reference):
        with rank_parts(group.rank) as (domain, device):
            model, runtime = set_up(group, reference, partition, domain, device)
            for _ in range(2):
                forward(model, reference)
            take_down(runtime, group)
            assert domain.live() == NOTHING

    def main(world_rank):
        number, rank = divmod(world_rank, 2)
        if number == 1:
            assert finished.wait(20)
        with StoreGroup(store, rank, 2, name=f"half-{number}", timeout_seconds=20) as group:
            group.join({})
            for _ in range(1 + number):  # the groups have made different numbers of collectives
                one_set_up(group, halves, reference_layers(7, 2 + number))
        finished.set()
        with StoreGroup(store, world_rank, 4, name="all", timeout_seconds=20) as group:
            group.join({})
            one_set_up(group, everybody, reference_layers(7))

    def guarded(world_rank):
        try:
            main(world_rank)
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=guarded, args=(rank,), daemon=True) for rank in range(4)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    assert failed == [] and not any(thread.is_alive() for thread in threads)


def test_a_set_up_that_fails_in_one_group_of_a_world_does_not_touch_another():
    """Both are in set-up when rank 1 of the first group fails; the second one serves, and then the first one too."""
    store, partition, reference = dist.HashStore(), partition_of(2, 7), reference_layers(7)
    half_way, outcomes = threading.Barrier(4), {}

    def main(world_rank):
        number, rank = divmod(world_rank, 2)
        with (
            StoreGroup(store, rank, 2, name=f"half-{number}", timeout_seconds=20) as group,
            rank_parts(rank) as (domain, device),
        ):
            group.join({})
            vote = group.vote

            def meeting(phase, error):
                if phase == "expert mapping":
                    half_way.wait(20)
                    if world_rank == 1:
                        error = FirstError("rank 1 of the first group")
                return vote(phase, error)

            group.vote = meeting
            model = build_model(reference, partition, rank)
            try:
                runtime = setup_on(model, group, domain, device, partition)
            except RuntimeError as error:
                outcomes[world_rank] = str(error)
                group.vote = vote
                runtime = setup_on(model, group, domain, device, partition)
            forward(model, reference)
            take_down(runtime, group)
            outcomes.setdefault(world_rank, "served")

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(4)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    first = "rank 1 of the first group"
    assert outcomes[1] == first and first in outcomes[0] and outcomes[2] == outcomes[3] == "served"


# ---- release ----


@pytest.mark.parametrize("failing", [0, 1, -1])
def test_an_unmap_that_fails_in_the_release_is_logged_once_and_everything_else_is_given_back(failing, caplog):
    """The first, the second and the last range of rank 1."""
    reference, partition = reference_layers(7), partition_of(2, 7)

    def body(group, domain, device):
        model, runtime = set_up(group, reference, partition, domain, device)
        forward(model, reference)
        ranges = [area.address for area in domain._ranges.values()]
        munmap, unmapped = domain.calls.munmap, []

        def unmap(address, nbytes):
            munmap(address, nbytes)
            unmapped.append(address)
            if group.rank == 1 and address == ranges[failing]:
                raise MemoryDomainError("this range does not go")

        domain.calls.munmap = unmap
        take_down(runtime, group)
        runtime.release()
        assert sorted(unmapped) == sorted(ranges), "each once"
        assert domain.live() == NOTHING and domain.allocated_bytes == 0

    with caplog.at_level(logging.ERROR):
        on_ranks(2, body)
    assert caplog.text.count("MemoryDomainError: this range does not go") == 1
    assert "rank 1: unmap of a range failed" in caplog.text and "rank 0: unmap" not in caplog.text
    gc.collect()
    assert dwdp_memfds() == []
