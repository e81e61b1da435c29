"""Prepared copies on a fake driver move the same bytes in every way; the gather's table for any alignment."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dwdp.device.nvrtc import compile_cubin
from dwdp.errors import DwdpError, MemoryDomainError
from dwdp.memory.driver import Driver, DriverError
from dwdp.weights.cuda_copy import (
    GRAPH_FROM,
    BatchedCopy,
    GatherCopy,
    GatherKernel,
    GraphCopy,
    PerSliceCopy,
    available_transfers,
)
from dwdp.weights.gather_kernel import (
    CHUNK_BYTES,
    LARGEST_UNIT,
    OPTIONS,
    SHARED_BYTES,
    SMALLEST_UNIT,
    SOURCE,
    STAGES,
    STAGES_AHEAD,
    kernel_table,
)  # fmt: skip
from dwdp.weights.plan import CopyPlan, CopySlice
from tests.memory.fake_driver import GRANULE, CUresult, FakeCudaDomain, FakeDriver, FakeMachine


def no_compiler(source, arch, options):
    assert arch == "sm_90" and "-DCHUNK=32768" in options
    return b"cubin"


class Setting:
    """Memory of 8 granules to read and 8 to write, a driver and a stream."""

    def __init__(self, **driver_options):
        self.api = FakeDriver(FakeMachine(), **driver_options)
        self.domain = FakeCudaDomain(0, 0, handle_type="posix_fd", driver=self.api)
        self.driver = self.domain.driver
        self.size = 8 * GRANULE
        self.addresses = []
        for what in ("src", "dst"):
            handle, area = self.domain.create(self.size, what), self.domain.reserve(self.size)
            self.domain.map(area, 0, handle, writable=True)
            self.addresses.append(area.address)
        self.areas = list(self.domain._ranges.values())
        values = np.random.default_rng(1).integers(0, 256, self.size, dtype=np.uint8)
        self.src[:] = values
        _, self.stream = self.api.cuStreamCreateWithPriority(1, -5)

    def view(self, i):
        import torch

        return self.domain.tensor(self.areas[i], 0, (self.size,), torch.uint8).numpy()

    src = property(lambda self: self.view(0))
    dst = property(lambda self: self.view(1))

    def slices(self, parts):
        """parts: (dst offset, src offset, nbytes, peer)."""
        src, dst = self.addresses
        return [CopySlice(dst + to, src + at, nbytes, peer) for to, at, nbytes, peer in parts]

    def run(self, copy):
        copy.submit(self.stream)
        assert self.api.cuStreamSynchronize(self.stream) == (CUresult.CUDA_SUCCESS,)

    def close(self):
        self.api.cuStreamDestroy(self.stream)
        self.domain.close()


@pytest.fixture
def setting():
    setting = Setting()
    yield setting
    setting.close()
    assert setting.api.live()[3] == 0


PARTS = [
    (0, 0, 5 * GRANULE, 1),  # all aligned
    (5 * GRANULE + 3, 5 * GRANULE + 19, 1000, 2),  # a head and a tail
    (6 * GRANULE, 6 * GRANULE + 1, 40_000, 3),  # ends are not aligned alike
    (7 * GRANULE, 7 * GRANULE, 7, 2),  # less than a bulk copy
    (7 * GRANULE + 100, 7 * GRANULE + 84, 9, 1),  # lies across a multiple of 16
    (7 * GRANULE + 200, 7 * GRANULE + 200, 0, 3),  # empty
]


def prepared(setting, transfer, slices):
    if transfer == "per_slice":
        return PerSliceCopy(setting.driver, slices), None
    if transfer == "batched":
        return BatchedCopy(setting.driver, slices), None
    if transfer == "graph":
        return GraphCopy(setting.driver, slices), None
    kernel = GatherKernel(setting.driver, 0, transfer, num_ctas=4, compiler=no_compiler)
    return GatherCopy(kernel, slices), kernel


@pytest.mark.parametrize("transfer", ["per_slice", "graph", "batched", "tma", "ldst"])
def test_every_transfer_moves_the_slices_and_nothing_else(setting, transfer):
    copy, kernel = prepared(setting, transfer, setting.slices(PARTS))
    expected = np.zeros(setting.size, dtype=np.uint8)
    for to, at, nbytes, _ in PARTS:
        expected[to : to + nbytes] = setting.src[at : at + nbytes]
    assert copy.nbytes == sum(part[2] for part in PARTS)
    setting.run(copy)
    assert np.array_equal(setting.dst, expected)
    setting.dst[:] = 0
    setting.run(copy)  # again, from the same arguments
    assert np.array_equal(setting.dst, expected)
    copy.close(), copy.close()
    if kernel is not None:
        assert kernel.name == transfer
        kernel.close(), kernel.close()


def test_a_table_has_landed_before_its_kernel_can_run(setting):
    """A stream of its own does not wait for the default one, on which small writes land behind the driver's call.
    Mutation-checked: with the call alone, and no wait behind it, the kernel reads what lay there before."""
    setting.api.seconds_per_write = 0.05
    kernel = GatherKernel(setting.driver, 0, "ldst", compiler=no_compiler)
    copy = GatherCopy(kernel, setting.slices(PARTS[:1]))
    setting.run(copy)
    assert (setting.dst[: 5 * GRANULE] == setting.src[: 5 * GRANULE]).all()
    copy.close()
    kernel.close()


@pytest.mark.parametrize("call", ["cuStreamBeginCapture", "cuMemcpyAsync", "cuStreamEndCapture", "cuGraphInstantiate"])
def test_copies_that_cannot_be_made_one_graph_leave_nothing(setting, call):
    before = setting.api.live()
    setting.api.fail[call] = CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(DriverError, match=call):
        GraphCopy(setting.driver, setting.slices(PARTS))
    setting.api.fail.clear()
    assert setting.api.live() == before


def test_several_copies_of_a_plan_are_one_launch(setting):
    """The host's cost of a layer does not grow with the number of peers."""
    slices = tuple(setting.slices([(100 * i, 100 * i, 100, 1) for i in range(GRAPH_FROM)]))
    for count, calls in ((GRAPH_FROM - 1, ["cuMemcpyAsync"] * (GRAPH_FROM - 1)), (GRAPH_FROM, ["cuGraphLaunch"])):
        plan = CopyPlan(slices[:count], sum(piece.nbytes for piece in slices[:count]))
        copy = setting.domain.mover.submission(plan)
        setting.api.calls.clear()
        setting.run(copy)
        copies = [name for name, *_ in setting.api.calls if name in ("cuMemcpyAsync", "cuGraphLaunch")]
        assert copies == calls
        setting.domain.mover.forget([plan])


@pytest.mark.parametrize("transfer", ["per_slice", "graph", "batched", "tma"])
def test_the_host_only_submits(setting, transfer):
    copy, _ = prepared(setting, transfer, setting.slices(PARTS))
    gate = threading.Event()
    setting.api._stream(setting.stream).put(lambda: gate.wait(5))
    setting.api.calls.clear()
    copy.submit(setting.stream)
    calls = [call[0] for call in setting.api.calls]
    assert len(calls) == (5 if transfer == "per_slice" else 1) and not setting.dst.any()
    gate.set()
    assert setting.api.cuStreamSynchronize(setting.stream) and setting.dst.any()
    copy.close()


@pytest.mark.parametrize("transfer", ["per_slice", "batched", "tma"])
def test_a_layer_without_remote_rows_submits_nothing(setting, transfer):
    copy, _ = prepared(setting, transfer, [])
    setting.api.calls.clear()
    copy.submit(setting.stream)
    assert setting.api.calls == [] and copy.nbytes == 0
    copy.close()


def test_a_failing_submission_names_call_result_and_sizes(setting):
    outside = [CopySlice(setting.addresses[1], setting.addresses[0] + setting.size, 4096, 1)]
    with pytest.raises(DriverError, match="cuMemcpyAsync failed with CUDA_ERROR_INVALID_VALUE .1. for 4096 bytes from"):
        PerSliceCopy(setting.driver, outside).submit(setting.stream)
    with pytest.raises(DriverError, match="cuMemcpyBatchAsync failed.*for 1 slices of 4096 bytes together"):
        BatchedCopy(setting.driver, outside).submit(setting.stream)
    setting.api.fail["cuLaunchKernel"] = CUresult.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
    copy, _ = prepared(setting, "tma", setting.slices(PARTS))
    with pytest.raises(DriverError, match="cuLaunchKernel failed with CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"):
        copy.submit(setting.stream)
    copy.close()


def test_batched_copies_are_refused_where_the_driver_lacks_them():
    setting = Setting(version=12040)
    with pytest.raises(DwdpError, match="contention_opt.*CUDA 13.0.*the driver is of CUDA 12.4; update"):
        BatchedCopy(setting.driver, setting.slices(PARTS))
    setting.close()


def test_a_demanded_kernel_that_the_device_cannot_run_is_refused_and_auto_takes_the_other():
    def compiler(source, arch, options):
        assert arch == "sm_80"
        return b"cubin"

    setting = Setting(capability=(8, 0))
    with pytest.raises(DwdpError, match="tma needs compute capability 9.0, device 0 has 8.0; take ldst"):
        GatherKernel(setting.driver, 0, "tma", compiler=compiler)
    kernel = GatherKernel(setting.driver, 0, compiler=compiler)
    assert kernel.name == "ldst" and SHARED_BYTES["ldst"] == 0
    with pytest.raises(ValueError, match="gather_kernel is 'cute', not one of auto, tma, ldst"):
        GatherKernel(setting.driver, 0, "cute", compiler=compiler)
    with pytest.raises(ValueError, match="at least one CTA"):
        GatherKernel(setting.driver, 0, num_ctas=0, compiler=compiler)
    setting.close()


@pytest.mark.parametrize("call", ["cuModuleGetFunction", "cuFuncSetAttribute"])
def test_a_kernel_that_is_not_found_or_cannot_have_its_memory_is_unloaded_again(setting, call):
    setting.api.fail[call] = CUresult.CUDA_ERROR_INVALID_VALUE
    unloaded = []
    setting.api.fail["cuModuleUnload"] = lambda module: unloaded.append(module)
    with pytest.raises(DwdpError, match=call):
        GatherKernel(setting.driver, 0, "tma", compiler=no_compiler)
    assert len(unloaded) == 1


def test_closing_logs_what_fails_and_frees_the_rest(setting, caplog):
    copy, kernel = prepared(setting, "tma", setting.slices(PARTS))
    frees = []
    setting.api.fail["cuMemFree"] = lambda address: (
        frees.append(address),
        CUresult.CUDA_ERROR_INVALID_VALUE if len(frees) == 1 else None,
    )[1]
    setting.api.fail["cuModuleUnload"] = CUresult.CUDA_ERROR_INVALID_HANDLE
    copy.close(), copy.close(), kernel.close(), kernel.close()
    assert len(frees) == 2 and caplog.text.count("Traceback") == 2
    object.__getattribute__(setting.api, "cuMemFree")(frees[0])


def test_what_a_device_can_do_is_told_for_the_gate():
    def broken(source, arch, options):
        raise MemoryDomainError("NVRTC cannot be loaded, install nvidia-cuda-nvrtc")

    setting = Setting()
    assert available_transfers(setting.driver, 0, compiler=no_compiler) == dict.fromkeys(
        ("per_slice", "batched", "gather")
    )
    found = available_transfers(setting.driver, 0, compiler=broken)
    assert found["gather"] == "NVRTC cannot be loaded, install nvidia-cuda-nvrtc" and found["batched"] is None
    setting.close()
    setting = Setting(version=12080, capability=(8, 0))
    found = available_transfers(setting.driver, 0, gather_kernel="tma", compiler=lambda *args: b"cubin")
    assert "CUDA 13.0" in found["batched"] and "compute capability 9.0" in found["gather"]
    setting.close()


def test_a_gather_that_cannot_allocate_its_second_table_gives_the_first_back(setting):
    kernel = GatherKernel(setting.driver, 0, compiler=no_compiler)
    calls = []

    def second(size):
        calls.append(size)
        return CUresult.CUDA_ERROR_OUT_OF_MEMORY if len(calls) == 2 else None

    setting.api.fail["cuMemAlloc"] = second
    with pytest.raises(DriverError, match="cuMemAlloc failed with CUDA_ERROR_OUT_OF_MEMORY"):
        GatherCopy(kernel, setting.slices(PARTS))
    assert setting.api.live()[3] == 0


# the table


SLICES = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 3 * SMALLEST_UNIT), st.integers(1, 4)), max_size=8
)


@settings(max_examples=150)
@given(SLICES, st.integers(1, 24))
def test_units_and_edges_cover_every_byte_once_and_units_are_aligned(parts, num_ctas):
    """Fails when a head, a tail or a last unit is dropped or one is too long."""
    slices, at = [], 1 << 20
    for to, of, nbytes, peer in parts:
        slices.append(CopySlice(at + to, (1 << 30) + at + of, nbytes, peer))
        at += 4 * SMALLEST_UNIT
    table = kernel_table(slices, num_ctas)
    wanted, found = {}, {}
    for piece in slices:
        if piece.nbytes:
            wanted[piece.dst] = (piece.src, piece.nbytes)
    assert not (table.units % 16).any() and (table.units[:, 2] > 0).all() and (table.edges[:, 2] > 0).all()
    assert (table.units[:, 2] <= LARGEST_UNIT).all()
    for dst, src, nbytes in sorted([*table.units.tolist(), *table.edges.tolist()]):
        start = next((s for s, (_, n) in found.items() if s + n == dst and found[s][0] + n == src), None)
        if start is None or dst in wanted:
            found[dst] = (src, nbytes)
        else:
            found[start] = (found[start][0], found[start][1] + nbytes)
    assert found == wanted and table.nbytes == sum(piece.nbytes for piece in slices)
    edge_bytes = sum(piece.nbytes if (piece.dst - piece.src) % 16 else min(piece.nbytes, 30) for piece in slices)
    assert table.edges[:, 2].sum() <= edge_bytes  # no more by plain stores than alignment asks for


def test_units_are_dealt_over_the_peers_and_sized_for_the_launch():
    slices = [CopySlice(i << 32, (i << 32) + (1 << 44), 64 << 20, i) for i in (3, 1, 2)]
    table = kernel_table(slices, 16)
    peers = (table.units[:, 0] >> 32).tolist()
    assert peers[:9] == [3, 1, 2] * 3 and len(table.edges) == 0
    assert len(table.units) >= 16 * 32 * 0.9
    few = kernel_table([CopySlice(0, 1 << 44, 100 << 30, 1)], 16)
    assert few.units[:, 2].max() == LARGEST_UNIT and few.units.nbytes == 24 * 102_400


def test_a_unit_never_reaches_into_another_slice_of_an_uneven_deal():
    slices = [CopySlice(0, 1 << 40, 10 * SMALLEST_UNIT, 1), CopySlice(1 << 30, 1 << 41, SMALLEST_UNIT, 2)]
    units = kernel_table(slices, 1).units
    assert units[:3, 0].tolist() == [0, 1 << 30, SMALLEST_UNIT] and len(units) == 11


# the pipeline of the bulk kernel, step by step


@pytest.mark.parametrize("num_chunks", [0, 1, STAGES_AHEAD, STAGES - 1, STAGES, STAGES + 1, 3 * STAGES + 2])
def test_a_stage_is_loaded_only_when_its_last_store_has_read_it(num_chunks):
    """The loop of gather_tma in Python: stores read in order, as bulk groups do, and as late as they may.

    Fails when the wait lets one store more be outstanding, or the stages ahead are as many as the stages.
    """
    loaded = stored = has_read = 0
    held = {}
    while True:
        if loaded < num_chunks:
            if loaded >= STAGES:
                has_read = max(has_read, stored - (STAGES - STAGES_AHEAD))  # wait_group.read
            old = held.get(loaded % STAGES)
            assert old is None or old < has_read, f"chunk {loaded} overwrites chunk {old}"
            held[loaded % STAGES] = loaded
            loaded += 1
            if loaded - stored < STAGES_AHEAD:
                continue
        if stored == loaded:
            break
        assert held[stored % STAGES] == stored
        stored += 1
    assert stored == num_chunks and 'wait_group.read %0;" ::"n"(STAGES - AHEAD)' in SOURCE


def test_the_stages_fit_the_shared_memory_of_an_sm():
    assert SHARED_BYTES["tma"] == STAGES * CHUNK_BYTES <= 227 * 1024 - 1024 and CHUNK_BYTES % 16 == 0


# compiled without a GPU


@pytest.mark.parametrize("arch, symbols", [("sm_90", [b"gather_tma", b"gather_ldst"]), ("sm_80", [b"gather_ldst"])])
def test_the_gather_kernels_compile(arch, symbols):
    pytest.importorskip("cuda.bindings.nvrtc")
    try:
        cubin = compile_cubin(SOURCE, arch, OPTIONS)
    except MemoryDomainError as error:
        if "cannot be loaded" in str(error):
            pytest.skip(str(error))
        raise
    assert cubin[:4] == b"\x7fELF" and all(symbol in cubin for symbol in symbols)
    with pytest.raises(MemoryDomainError, match="could not compile for sm_90.*identifier"):
        compile_cubin("__global__ void f() { undefined(); }", "sm_90")


def test_a_missing_compiler_is_told(monkeypatch):
    import sys

    for name in ("cuda", "cuda.bindings", "cuda.bindings.nvrtc"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MemoryDomainError, match="NVRTC.*pip install 'dwdp.gpu.'"):
        compile_cubin(SOURCE, "sm_90")


def test_the_driver_object_tells_its_version():
    driver = Driver(FakeDriver(FakeMachine(), version=12090))
    assert driver.version() == 12090


def test_what_is_prepared_is_given_back_by_any_thread(caplog):
    """Fails when tables, modules or events are given back in the context of the thread that made them only."""
    setting = Setting()
    mover = setting.domain.mover
    mover.sums([(setting.addresses[0], 64)])
    check = mover.check(lambda: [(setting.addresses[0], 64)], lambda sums: None)
    check.submit(setting.stream)
    plan = SimpleNamespace(
        batch=(), slices=(), gather=SimpleNamespace(kernel="tma", rows=[SimpleNamespace(peer=1, first=0, end=1)],
        descriptors=[CopySlice(setting.addresses[1], setting.addresses[0], 64, 1)]),
    )  # fmt: skip
    mover.submission(plan)
    assert len(setting.api._allocated) == 4  # two tables of sums, their pinned copy, a table of units
    thread = threading.Thread(target=setting.domain.close)
    thread.start()
    thread.join()
    assert setting.api._allocated == {} and setting.api._events == {} and "could not" not in caplog.text


def test_a_check_whose_query_fails_is_an_error(caplog):
    setting = Setting()
    judged = []
    check = setting.domain.mover.check(lambda: [(setting.addresses[0], 64)], judged.append)
    gate = threading.Event()
    setting.api._stream(setting.stream).put(gate.wait)
    check.submit(setting.stream)
    check.submit(setting.stream)  # left out, without a wait: the first result has not been read
    assert not check.poll() and judged == []
    setting.api.fail["cuEventQuery"] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(DriverError, match="cuEventQuery failed with CUDA_ERROR_ILLEGAL_ADDRESS.*a check"):
        check.poll()
    setting.api.fail.clear()
    gate.set()
    setting.api.cuStreamSynchronize(setting.stream)
    assert check.poll() and len(judged) == 1
