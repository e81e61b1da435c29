"""Dense DWDP alone on rank threads: real memory, real copies, a toy decoder."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

from dwdp.config.schema import DenseConfig
from dwdp.device.host import HostDevice
from dwdp.group.threads import run_rank_threads
from dwdp.memory.host import HostDomain
from dwdp.runtime.counters import Counters
from dwdp.runtime.manager import DenseDwdpManager
from tests.support.toy_decoder import ToyModel, value_bytes

NOTHING_LIVE = {"handles": 0, "mappings": 0, "ranges": 0, "descriptors": 0}


def config(**changes):
    return DenseConfig(**({"enabled": True, "min_bytes": 1} | changes))


@contextlib.contextmanager
def host_parts(group, **device_options):
    with HostDomain(group.rank, granule_bytes=4096) as domain, HostDevice(**device_options) as device:
        yield domain, device


def dense_ranks(
    n,
    body,
    *,
    settings=None,
    prepare=None,
    num_layers=3,
    build=None,
    device_options=None,
    verify_every=0,
    width=24,
    parts=None,
):
    """Runs body(rank) on n rank threads; `rank` has group, domain, device, manager, model, counters and setup().

    settings: rank -> DenseConfig; build: makes another model than the toy decoder; prepare(rank number, model)
    changes a model before set-up. device_options: of HostDevice. parts: group -> context manager of another domain
    and device. Afterwards everything is given back, and nothing may be live.
    """

    def run(group):
        group.join({})
        settings_of = settings or (lambda rank: config())
        with (parts or host_parts)(group, **(device_options or {})) as (domain, device):
            manager = DenseDwdpManager(settings_of(group.rank))
            manager.register()
            rank = SimpleNamespace(group=group, domain=domain, device=device, manager=manager, counters=Counters())
            rank.model = ToyModel(num_layers, width) if build is None else build()
            if prepare is not None:
                prepare(group.rank, rank.model)
            rank.setup = lambda: manager.setup(
                rank.model,
                group=group,
                domain=domain,
                device=device,
                counters=rank.counters,
                free_bytes=lambda: 1 << 30,
                verify_every=verify_every,
            )
            try:
                return body(rank)
            finally:
                for step in (manager.drain, manager.unmap_imports):
                    step()
                if manager.weights is not None:
                    group.barrier("test: unmapped", timeout_seconds=10)
                manager.release_own()
                manager.unregister()
                live = domain.live()
                assert live == NOTHING_LIVE, live

    return run_rank_threads(n, run, timeout=30)


def forward_and_check(rank, expected, count=2, start=True):
    """Forwards whose reads find every layer's original bytes."""

    def read(layer, segment):
        for name, tensor in layer.weights(segment).items():
            assert value_bytes(tensor) == expected[layer.index, segment, name], (layer.index, segment, name)

    for _ in range(count):
        if start:
            rank.manager.runtime.start_forward()
        rank.model(read)
