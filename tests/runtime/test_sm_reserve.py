"""SMs that compute leaves free: who sets the number, who drops it, and what reads it."""

import logging
import os
from types import SimpleNamespace

import pytest
import torch

from dwdp.config.schema import DenseConfig, DwdpConfig
from dwdp.errors import ConfigError
from dwdp.group.threads import run_rank_threads
from dwdp.memory.host import HostDomain
from dwdp.runtime.manager import DwdpManager, current_dense_manager
from dwdp.runtime.sm_reserve import drop_reserve, leaving_sms, reserved_sms
from dwdp.runtime.standalone import StandaloneDenseManager
from dwdp.weights.transfers import Transfer
from tests.memory.fake_driver import FakeCudaDomain, FakeDriver, FakeMachine


@pytest.fixture(autouse=True)
def no_reserve():
    yield
    drop_reserve()


@pytest.fixture
def domain():
    with FakeCudaDomain(0, 0, driver=FakeDriver(FakeMachine())) as domain:
        yield domain


def manager(domain, dense=None, **fields):
    config = DwdpConfig(dwdp_size=2, **fields)
    return DwdpManager(config, dense, group=SimpleNamespace(), domain=domain, device=None, num_experts=4)


@pytest.mark.parametrize(
    "fields, sms",
    [({}, 0), ({"contention_opt": True}, 0), ({"prefetch_gather": True}, 16), ({"sm_reserve": 5}, 5),
     ({"prefetch_gather": True, "sm_reserve": 5}, 5), ({"prefetch_gather": True, "sm_reserve": 0}, 0)],
)  # fmt: skip
def test_the_gathers_sms_are_reserved_unless_a_number_is_pinned(domain, fields, sms):
    """Before the model is built, and dropped at the end, also after a failure."""
    with manager(domain, **fields):
        assert reserved_sms() == sms
    assert reserved_sms() == 0
    with pytest.raises(ValueError):
        with manager(domain, **fields):
            raise ValueError
    assert reserved_sms() == 0


def test_the_hosts_gather_holds_no_sm():
    with HostDomain(0) as domain, manager(domain, prefetch_gather=True):
        assert reserved_sms() == 0


@pytest.mark.parametrize("name, pinned, sms", [("gather", None, 16), ("batched", None, 0), ("batched", 3, 3)])
def test_standalone_reserves_alike(domain, name, pinned, sms):
    dense = DenseConfig(enabled=True)
    options = {"group": SimpleNamespace(), "domain": domain, "device": None, "sm_reserve": pinned}
    with StandaloneDenseManager(dense, transfer=Transfer.named(name), **options):
        assert reserved_sms() == sms
    assert reserved_sms() == 0


def test_torchs_persistent_kernels_are_told_inside_and_not_outside(domain):
    told = torch._C._get_sm_carveout_experimental
    before = told()
    with leaving_sms():
        assert told() == before
    with manager(domain, prefetch_gather=True):
        with pytest.raises(ValueError):
            with leaving_sms():
                assert told() == 16
                raise ValueError
        assert told() == before


COOPERATIVE = ("DWDP_DISABLE_COOP_ROUTING", "TLLM_ROUTING_DISABLE_COOP_LAUNCH")


@pytest.fixture
def unset(monkeypatch):
    for name in COOPERATIVE:
        monkeypatch.delenv(name, raising=False)


def cooperative():
    return tuple(os.environ.get(name) for name in COOPERATIVE)


@pytest.mark.parametrize("fields, value", [({}, None), ({"sm_reserve": 5}, None), ({"prefetch_gather": True}, "1")])
def test_cooperative_launches_are_off_as_long_as_a_gather_takes_sms(domain, unset, fields, value):
    """Under both names, for this process, and told in the status. Fails when the reserve's end leaves them set."""
    with manager(domain, **fields) as one:
        one.group.dead = ()
        assert cooperative() == (value, value)
        assert (
            one.status()["cooperative_launches"] is (value is None) and one.status()["reserved_sms"] == reserved_sms()
        )
    assert cooperative() == (None, None)
    with pytest.raises(ValueError):
        with manager(domain, **fields):
            raise ValueError
    assert cooperative() == (None, None)


@pytest.mark.parametrize("name", COOPERATIVE)
@pytest.mark.parametrize("value", ["0", "on"])
def test_a_users_value_is_kept_and_told_to_whoever_asks_by_the_other_name(
    domain, unset, monkeypatch, caplog, name, value
):
    monkeypatch.setenv(name, value)
    with manager(domain, prefetch_gather=True):
        assert cooperative() == (value, value)
    assert os.environ.pop(name) == value and cooperative() == (None, None)
    assert (f"{name}=0 is kept: cooperative launches of MoE routing wait" in caplog.text) == (value == "0")


def test_rank_threads_of_one_process_hold_it_together(unset):
    """Fails when the first rank that ends takes it from the others."""

    def staggered(group):
        with FakeCudaDomain(0, 0, driver=FakeDriver(FakeMachine())) as domain:
            one = manager(domain, prefetch_gather=True)
            one.__enter__()
            group.barrier("both")
            if group.rank == 0:
                one.__exit__(None, None, None)
            group.barrier("one left")
            seen = cooperative()
            group.barrier("seen")
            if group.rank == 1:
                one.__exit__(None, None, None)
            return seen

    assert run_rank_threads(2, staggered) == [("1", "1")] * 2
    assert cooperative() == (None, None)


def test_a_reserve_that_cannot_be_made_unregisters_the_manager(domain, monkeypatch, caplog):
    """Fails when what was registered before stays: a later manager would be refused as a second one."""
    monkeypatch.setenv(COOPERATIVE[0], "0")
    monkeypatch.setenv(COOPERATIVE[1], "1")
    with caplog.at_level(logging.CRITICAL), pytest.raises(ConfigError, match="are both set and differ"):
        manager(domain, DenseConfig(enabled=True), prefetch_gather=True).__enter__()
    assert current_dense_manager() is None and reserved_sms() == 0
    assert cooperative() == ("0", "1")
