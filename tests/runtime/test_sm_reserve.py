"""SMs that compute leaves free: who sets the number, who drops it, and what reads it."""

from types import SimpleNamespace

import pytest
import torch

from dwdp.config.schema import DenseConfig, DwdpConfig
from dwdp.memory.host import HostDomain
from dwdp.runtime.manager import DwdpManager
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
