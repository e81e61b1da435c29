"""Weights are read straight into the handles that peers map: nothing moves, and what cannot be undone is said.

Mutation-checked once, each caught by a test below: `_give_up` that forgets what was loaded; `release` that does;
`make_room` without `close` when it fails; `detach` left out (tensors outlive their range); budgets checked behind the
first handle; `own` addresses not compared; geometry kept from before the pages grew.
"""

from __future__ import annotations

import gc
import threading
import traceback

import pytest
import torch

from dwdp.errors import DwdpError, GroupError, MemoryBudgetError, ModelUnusableError
from dwdp.executor.create import build_rank
from dwdp.executor.settings import resolve
from dwdp.group.comm import Group
from dwdp.group.threads import run_rank_threads
from dwdp.memory.host import HostDomain
from dwdp.memory.libc import HostCalls
from dwdp.model import loader, reader
from dwdp.runtime import setup_experts as module
from dwdp.runtime.manager import DwdpManager
from dwdp.runtime.setup_dense import DenseSetup
from dwdp.runtime.setup_experts import LoadedTables, make_room, outside_bytes, setup_experts
from dwdp.weights.transport import ExpertTransport
from tests.support.system import DENSE, SMALL_PAGES, prompt, replicated, shared, write_random
from tests.weights.fake_experts import (
    build_model,
    dwdp_memfds,
    on_ranks,
    partition_of,
    raw,
    reference_layers,
    take_down,
)

NOTHING = {"handles": 0, "mappings": 0, "ranges": 0, "descriptors": 0}
LENGTH = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_random(tmp_path_factory.mktemp("model") / "m", num_experts=7, num_experts_per_token=3)


def set_up(folder, n, monkeypatch, dense=None):
    """build_rank on n ranks that fail -> by rank (error, model, what was live just before the domain was closed)."""
    settings = resolve(folder, ranks=n, dtype="float32", device="cpu", dwdp=SMALL_PAGES, dense_dwdp=dense).settings
    live, models, errors = {}, {}, {}
    close, prepare = HostDomain.close, DwdpManager.prepare

    def closing(domain):
        live.setdefault(domain.rank, domain.live())
        return close(domain)

    def preparing(manager, built):
        models[manager.group.rank] = built
        prepare(manager, built)

    monkeypatch.setattr(HostDomain, "close", closing)
    monkeypatch.setattr(DwdpManager, "prepare", preparing)

    def run(group):
        try:
            build_rank(settings, group, rank=group.rank).release()
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            errors[group.rank] = error

    run_rank_threads(n, run, timeout=20)
    return [(errors.get(rank), models.get(rank), live[rank]) for rank in range(n)]


def fail_on(monkeypatch, owner, name, rank, error, *, call=1, rank_of=lambda args: args[0].rank, after=False):
    """The `call`-th call of `owner.name` on `rank` raises `error`."""
    original, calls = getattr(owner, name), []

    def wrapper(*args, **kwargs):
        if rank_of(args) == rank:
            calls.append(1)
            if len(calls) == call:
                if after:
                    original(*args, **kwargs)
                raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapper)


# ---- nothing moves ----


@pytest.mark.parametrize("fmt", ["plain", "nvfp4", "mxfp4"])
def test_rows_are_read_into_the_handles_and_setup_copies_none(tmp_path, monkeypatch, fmt):
    folder = write_random(
        tmp_path / "m", num_experts=7, expert_format=fmt, routed_expert_hidden_size=64, fp8_attention=fmt == "nvfp4"
    )
    expected = replicated(folder, lambda rank: rank.logits(prompt(0, LENGTH)), dtype="bfloat16")
    managers, complete, into_handles, before = {}, reader._Run._complete, [], {}
    prepare, setup, copy = DwdpManager.prepare, DwdpManager.setup, torch.Tensor.copy_

    def preparing(manager, built):
        prepare(manager, built)
        managers[manager.group.rank] = manager
        assert all(t.is_cpu for experts in built.moe_layers() for t in experts.expert_tables().values())
        assert all(t.is_meta for experts in built.moe_layers() for t in experts.small_tensors().values())

    def completing(run, i, room):
        name, held = run.landings[i].entry.name, any(manager.domain.holds(room) for manager in managers.values())
        if ".experts." in name and not name.endswith(("_scale_2", "input_scale")):
            into_handles.append(held)
        else:
            assert not held, name
        complete(run, i, room)

    def setting_up(manager, loaded):
        before[manager.group.rank] = outside_bytes(loaded, manager.domain), manager.domain.allocated_bytes
        report = setup(manager, loaded)
        return report

    def copying(target, source, *args):
        assert not any(manager.domain.holds(target) for manager in managers.values()), "a table is copied"
        return copy(target, source, *args)

    monkeypatch.setattr(DwdpManager, "prepare", preparing)
    monkeypatch.setattr(DwdpManager, "setup", setting_up)
    monkeypatch.setattr(reader._Run, "_complete", completing)
    monkeypatch.setattr(torch.Tensor, "copy_", copying)

    def body(rank):
        outside, allocated = before[rank.rank]
        ledger = rank.report()["ledger"]
        assert allocated == ledger["stored_bytes"]
        small = sum(t.nbytes for e in rank.model.moe_layers() for t in e.small_tensors().values())
        assert outside <= ledger["replicated_bytes"] <= outside + small
        return rank.logits(prompt(0, LENGTH))

    for logits in shared(folder, 2, body, dense=None, dtype="bfloat16"):
        assert torch.equal(logits, expected)
    assert into_handles and all(into_handles)


def test_one_rank_alone_keeps_ordinary_memory(model):
    def body(rank):
        assert rank.domain.live() == NOTHING
        return rank.report()["ledger"]["stored_bytes"]

    assert shared(model, 1, body, dense=None) == [0]


def loaded_tables(reference, partition, rank, domain):
    """A model whose tables were on the meta device and were then read into handles."""
    whole = build_model(reference, partition, rank)
    built = build_model(reference, partition, rank)
    for experts in built.moe_layers():
        for name in experts.expert_tables():
            table = getattr(experts, name)
            setattr(experts, name, torch.nn.Parameter(table.to("meta"), requires_grad=False))
    loaded = make_room(built, domain, partition, rank)
    for experts, source in zip(built.moe_layers(), whole.moe_layers()):
        for name, rows in source.expert_tables().items():
            experts.expert_tables()[name].view(torch.uint8).copy_(rows.view(torch.uint8))
    return built, loaded


def test_pages_that_must_grow_after_loading_move_the_handles_to_their_new_places():
    """Dense DWDP maps memory between the two, so that a plan made before loading may no longer fit."""
    partition, reference = partition_of(2, 33), reference_layers(33, 2)

    def body(group, domain, device):
        built, loaded = loaded_tables(reference, partition, group.rank, domain)
        before = domain.page_bytes
        domain.mapping_budget.limit = domain.mapping_budget.used + 26
        runtime = setup_experts(
            built, group=group, domain=domain, device=device, partition=partition, num_slots=2, loaded=loaded
        )
        assert domain.page_bytes > before
        assert domain.mapping_budget.used <= domain.mapping_budget.limit
        runtime.start_forward()
        for pos, (tables, _) in enumerate(reference):
            runtime.bind(pos)
            for name, whole in tables.items():
                assert raw(built.moe_layers()[pos].expert_tables()[name]) == raw(whole)
            runtime.finish(pos)
        take_down(runtime, group)
        assert domain.live() == NOTHING

    on_ranks(2, body)


def test_a_table_in_mapped_memory_of_another_setup_is_refused_beside_loaded_ones():
    partition, reference = partition_of(2, 7), reference_layers(7)

    def body(group, domain, device):
        built, loaded = loaded_tables(reference, partition, group.rank, domain)
        other, others = loaded_tables(reference, partition, group.rank, domain)
        if group.rank == 0:
            built.moe_layers()[0].w2.data = other.moe_layers()[0].w2.data
        with pytest.raises((ValueError, RuntimeError), match="layer 1 table w2 lies in mapped memory already"):
            setup_experts(
                built, group=group, domain=domain, device=device, partition=partition, num_slots=2, loaded=loaded
            )
        assert built.unusable is not None
        others.close()
        del built, other
        assert domain.live() == NOTHING

    on_ranks(2, body)


@pytest.mark.parametrize("budget, limit", [("descriptor_budget", 7), ("mapping_budget", 7)])
def test_budgets_are_checked_before_the_first_handle(budget, limit):
    partition, reference = partition_of(2, 7), reference_layers(7, 2)

    def body(group, domain, device):
        getattr(domain, budget).limit = limit
        create, created = domain.create, []
        domain.create = lambda *args, **options: (created.append(args), create(*args, **options))[1]
        with pytest.raises(MemoryBudgetError):
            loaded_tables(reference, partition, group.rank, domain)
        assert created == [] and domain.live() == NOTHING

    on_ranks(2, body)


# ---- a load that fails gives everything back ----


@pytest.mark.parametrize("error", [OSError("disk gone"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", ["handle", "map", "read", "behind the last read"])
@pytest.mark.parametrize("dense", [None, DENSE])
def test_a_failure_before_or_while_loading_leaves_nothing(model, monkeypatch, caplog, step, error, dense):
    owner, name, options = {
        "handle": (HostDomain, "create", {"call": 3}),
        "map": (HostDomain, "map", {"call": 3}),
        "read": (reader._Run, "_complete", {"call": 150}),
        "behind the last read": (loader, "_fill", {"after": True}),
    }[step]
    if owner in (reader._Run, loader):
        options["rank_of"] = lambda args: int(threading.current_thread().name.rsplit("-", 1)[1])
    fail_on(monkeypatch, owner, name, 1, error, **options)
    outcomes = set_up(model, 2, monkeypatch, dense)
    assert outcomes[1][0] is error
    assert isinstance(outcomes[0][0], GroupError) and "rank 1" in str(outcomes[0][0])
    for _, built, live in outcomes:
        assert live == NOTHING
        if built is not None:
            assert built.released or step in ("handle", "map") or built.unusable is not None
            assert not any(t.numel() for e in built.moe_layers() for t in e.expert_tables().values() if t.is_cpu)
    del outcomes
    gc.collect()
    assert dwdp_memfds() == [] and "tensors over it are alive" not in caplog.text


# ---- a set-up that fails behind it ----


STEPS = {
    "describe": (module._Setup, "_describe", {}),
    "map where it belongs": (HostDomain, "map", {"call": 8 + 3}),
    "moved in": (ExpertTransport, "take_in", {"after": True}),
    "seal": (HostCalls, "seal_future_writes", {"rank_of": None}),
    "map of a peer": (ExpertTransport, "_map_peer", {}),
    "build": (module._Setup, "_build", {"after": True}),
    "last step": (Group, "mark_setup_done", {}),
}


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("step", STEPS)
def test_a_failure_of_set_up_marks_the_model_unusable_on_every_rank_and_leaves_nothing(
    model, monkeypatch, caplog, step, rank
):
    owner, name, options = STEPS[step]
    if "rank_of" in options:
        options = {"rank_of": lambda args: int(threading.current_thread().name.rsplit("-", 1)[1])}
    fail_on(monkeypatch, owner, name, rank, OSError("injected"), **options)
    outcomes = set_up(model, 3, monkeypatch)
    for at, (error, built, live) in enumerate(outcomes):
        assert isinstance(error, OSError) is (at == rank) and "injected" in str(error)
        assert live == NOTHING and built.unusable is not None
        with pytest.raises((ModelUnusableError, DwdpError)):
            built(torch.tensor([[1, 2]]))
        assert not any(t.numel() for e in built.moe_layers() for t in e.expert_tables().values())
    del outcomes, built
    gc.collect()
    assert dwdp_memfds() == [] and "tensors over it are alive" not in caplog.text


def test_a_failure_of_dense_set_up_marks_a_loaded_model_unusable_too(model, monkeypatch):
    fail_on(monkeypatch, DenseSetup, "_local_report", 1, OSError("no dense"), rank_of=lambda args: args[0].group.rank)
    for _, built, live in set_up(model, 2, monkeypatch, DENSE):
        assert live == NOTHING and "no dense" in str(built.unusable)


# ---- the manager ----


def test_a_manager_takes_one_model_and_gives_back_what_it_prepared_for_a_set_up_that_never_came():
    from dwdp.config.schema import DwdpConfig
    from dwdp.device.host import HostDevice

    partition, reference = partition_of(2, 7), reference_layers(7)

    def meta_model(rank):
        built = build_model(reference, partition, rank)
        for experts in built.moe_layers():
            for name in experts.expert_tables():
                setattr(experts, name, torch.nn.Parameter(getattr(experts, name).to("meta"), requires_grad=False))
        return built

    def body(group):
        group.join({})
        with HostDomain(group.rank, granule_bytes=4096) as domain, HostDevice() as device:
            manager = DwdpManager(
                DwdpConfig(dwdp_size=2), None, group=group, domain=domain, device=device, num_experts=7
            )
            with manager:
                built, other = meta_model(group.rank), meta_model(group.rank)
                manager.prepare(built)
                with pytest.raises(DwdpError, match="has a model already"):
                    manager.prepare(other)
                with pytest.raises(DwdpError, match="another model"):
                    manager.setup(other)
                assert domain.live()["handles"] == 6
            assert domain.live() == NOTHING and built.released
            assert isinstance(manager._loaded, LoadedTables | None) and manager._loaded is None

    run_rank_threads(2, body, timeout=20)
