"""Whole ranks over the CUDA domain and device without a GPU: CPU tensors stand in for its memory."""

from __future__ import annotations

from tests.device.test_cuda import FakeCudaDevice
from tests.memory.fake_driver import FakeCudaDomain, FakeDriver, FakeMachine


class ComputesHere(FakeCudaDevice):
    """The model computes in the calling thread, so a wait of the compute stream is over before what follows it."""

    def _wait_for(self, stream, events, *where):
        super()._wait_for(stream, events, *where)
        if stream is self.compute:
            self.api.cuStreamSynchronize(stream.raw)


class FakeMemory:
    """`create_memory` on fake GPUs: one a rank, or with `shared` one for all. drivers: by rank."""

    def __init__(self, *, shared: bool = False, **options) -> None:
        self.machine, self.shared, self.options = FakeMachine(), shared, options
        self.drivers: dict[int, FakeDriver] = {}

    def __call__(self, config, where, rank, done, *, copy_bytes_per_second=None, trace=False):
        driver = self.drivers[rank] = FakeDriver(self.machine, **self.options)
        index = 0 if self.shared else rank
        domain = FakeCudaDomain(
            rank, index, page_granules=config.page_granules, handle_type=config.handle_type, driver=driver
        )
        done("memory domain", domain.close)
        device = ComputesHere(api=driver, trace=trace, measure_waits=True)
        done("device", device.close)
        return domain, device
