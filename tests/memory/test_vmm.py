"""The CUDA domain on a fake driver that keeps CUDA's rules: handles, ranges, rights, budgets, failures, the end."""

import builtins
import ctypes
import gc
import logging
import os
import pickle
import subprocess
import sys
import threading

import pytest
import torch

from dwdp.errors import MemoryBudgetError, MemoryDomainError
from dwdp.memory.driver import Driver, DriverError
from dwdp.memory.vmm import DeviceBytes
from tests.memory.fake_driver import ENUMS, GRANULE, CUresult, FakeCudaDomain, FakeDriver, FakeMachine, zero_live
from tests.support.closed import refuses_everything

G = GRANULE
NOTHING = {"handles": 0, "mappings": 0, "ranges": 0, "descriptors": 0}


@pytest.fixture
def machine():
    return FakeMachine()


def make(machine, rank=0, *, handle_type="posix_fd", index=None, domain_options=None, **driver_options):
    driver = FakeDriver(machine, **driver_options)
    index = rank if index is None else index
    return FakeCudaDomain(rank, index, handle_type=handle_type, driver=driver, **(domain_options or {}))


def num_fds():
    return len(os.listdir("/proc/self/fd"))


def mapped(domain, nbytes=G, value=7, what="own"):
    """(handle, range, tensor) of an own handle that is mapped and filled."""
    handle = domain.create(nbytes, what)
    area = domain.reserve(nbytes)
    domain.map(area, 0, handle, writable=True)
    return handle, area, domain.tensor(area, 0, (nbytes,), torch.uint8).fill_(value)


def taken(peer, exported, nbytes):
    """A peer's handle imported and mapped: (handle, range)."""
    handle = peer.import_handle(exported, nbytes)
    area = peer.reserve(nbytes)
    peer.map(area, 0, handle, writable=False)
    return handle, area


# bytes


@pytest.mark.parametrize("handle_type", ["posix_fd", "fabric"])
def test_a_peer_reads_the_owners_bytes_read_only(machine, handle_type):
    with make(machine, 0, handle_type=handle_type, imex=True) as owner:
        host = "host0" if handle_type == "posix_fd" else "host1"
        with make(machine, 1, handle_type=handle_type, imex=True, host=host) as peer:
            handle, _, tensor = mapped(owner, 2 * G, 9)
            owner.seal(handle)
            exported = owner.export(handle)
            assert isinstance(exported, int if handle_type == "posix_fd" else bytes)
            theirs, area = taken(peer, os.dup(exported) if isinstance(exported, int) else exported, 2 * G)
            handle.close_fd(), theirs.close_fd()
            tensor[G + 3] = 1
            assert peer.tensor(area, G, (5,), torch.uint8).tolist() == [9, 9, 9, 1, 9]
            assert peer.driver.api._mappings[area.address].rights == 1
            assert peer.peers_read_only and owner.exports_descriptors is (handle_type == "posix_fd")
            with pytest.raises(MemoryDomainError, match="read-only"):
                peer.map(peer.reserve(2 * G), 0, theirs, writable=True)


def test_a_composite_range_is_one_tensor_over_pages_and_the_own_handle(machine):
    with make(machine, domain_options={"page_granules": 2}) as domain:
        pages = [domain.create(domain.page_bytes, "ring", exportable=False) for _ in range(2)]
        own = domain.create(3 * G, "own")
        area = domain.reserve(7 * G)
        for offset, handle, value in ((0, pages[0], 1), (2 * G, own, 2), (5 * G, pages[1], 3)):
            domain.map(area, offset, handle, writable=True)
            domain.tensor(area, offset, (handle.nbytes,), torch.uint8).fill_(value)
        tensor = domain.tensor(area, 0, (7, G), torch.uint8)
        assert tensor.data_ptr() == area.address and tensor[:, 0].tolist() == [1, 1, 2, 2, 2, 3, 3]
        assert domain.probe(area) == 6 and domain.holds(tensor) and domain.contains(area.address, 7 * G)
        again = domain.reserve(2 * G)
        domain.map(again, 0, pages[0], writable=True)  # a page serves several layers
        assert domain.tensor(again, 0, (1,), torch.uint8).item() == 1
        assert domain.allocated_bytes == machine.used == 7 * G


def test_memory_is_taken_until_the_last_importer_has_unmapped_it(machine):
    """The exporter's memory is pinned by its importers; release and the owner's death change nothing of that."""
    owner, peer = make(machine, 0), make(machine, 1)
    handle, area, tensor = mapped(owner, G, 5)
    theirs, there = taken(peer, os.dup(owner.export(handle)), G)
    del tensor
    owner.close()
    assert owner.allocated_bytes == 0 and machine.used == G
    assert peer.tensor(there, 0, (1,), torch.uint8).item() == 5
    peer.release(theirs)
    assert machine.used == G
    gc.collect()
    peer.free(there)
    assert machine.used == 0
    peer.close()
    assert owner.driver.api.live() == peer.driver.api.live() == zero_live()


def test_a_dead_exporters_bytes_stay_readable(machine):
    owner, peer = make(machine, 0), make(machine, 1)
    handle, _, tensor = mapped(owner, G, 6)
    _, there = taken(peer, os.dup(owner.export(handle)), G)
    del tensor
    owner.driver.api.end()
    assert peer.tensor(there, G - 1, (1,), torch.uint8).item() == 6
    peer.close()
    assert machine.used == 0


# the driver's rules show as errors that name call, result, sizes and cure


def test_handles_map_only_whole_and_at_offset_zero(machine):
    """Of the fake itself: what the domain never asks for."""
    domain = make(machine)
    handle, area = domain.create(2 * G, "own"), domain.reserve(4 * G)
    call = domain.driver.api.cuMemMap
    assert call(area.address, G, 0, handle.raw, 0) == (CUresult.CUDA_ERROR_NOT_SUPPORTED,)
    assert call(area.address, 2 * G, G, handle.raw, 0) == (CUresult.CUDA_ERROR_NOT_SUPPORTED,)
    assert call(area.address, 4 * G, 0, handle.raw, 0) == (CUresult.CUDA_ERROR_INVALID_VALUE,)
    assert call(area.address, 2 * G, 0, handle.raw, 0) == (CUresult.CUDA_SUCCESS,)
    assert call(area.address + G, 2 * G, 0, handle.raw, 0) == (CUresult.CUDA_ERROR_INVALID_VALUE,)
    byte = ctypes.create_string_buffer(1)
    read = domain.driver.api.cuMemcpyDtoH
    assert read(ctypes.addressof(byte), area.address, 1) == (CUresult.CUDA_ERROR_INVALID_VALUE,)  # no access yet
    assert domain.driver.api.cuMemAddressFree(area.address, 4 * G) == (CUresult.CUDA_ERROR_INVALID_VALUE,)
    assert domain.driver.api.cuMemUnmap(area.address, G) == (CUresult.CUDA_ERROR_INVALID_VALUE,)
    assert domain.driver.api.cuMemUnmap(area.address, 2 * G) == (CUresult.CUDA_SUCCESS,)
    assert domain.driver.api.cuMemUnmap(area.address, 2 * G) == (CUresult.CUDA_ERROR_INVALID_VALUE,)
    raw = handle.raw
    domain.close()
    assert domain.driver.api.cuMemRelease(raw) == (CUresult.CUDA_ERROR_INVALID_VALUE,)


@pytest.mark.parametrize("nbytes", [0, -G, 1, G + 1])
def test_sizes_that_are_no_multiple_of_the_granule_are_refused(machine, nbytes):
    with make(machine) as domain:
        for call in (lambda: domain.create(nbytes, "x"), lambda: domain.reserve(nbytes)):
            with pytest.raises(ValueError, match=f"{nbytes} bytes, not a positive multiple of {G}"):
                call()


def test_out_of_memory_names_handle_sizes_and_cure(machine):
    with make(machine, 2) as domain:
        size = machine.gpu_bytes + G
        text = (
            f"cuMemCreate failed with CUDA_ERROR_OUT_OF_MEMORY .2.*POSIX_FD handle big of {size} bytes on rank 2.*slots"
        )
        with pytest.raises(DriverError, match=text) as caught:
            domain.create(size, "big")
        assert caught.value.out_of_memory and domain.allocated_bytes == machine.used == 0
        again = pickle.loads(pickle.dumps(caught.value))
        assert (again.call, again.result, str(again)) == ("cuMemCreate", caught.value.result, str(caught.value))


def test_fabric_without_an_imex_channel_names_the_channel(machine):
    with make(machine, handle_type="fabric") as domain:
        with pytest.raises(DriverError, match="NOT_PERMITTED.*/dev/nvidia-caps-imex-channels.*container.*nvidia-smi"):
            domain.create(G, "own")


def test_a_fabric_that_is_not_ready_names_the_fabric_manager(machine):
    with pytest.raises(DriverError, match="SYSTEM_NOT_READY.*fabric manager.*nvidia-smi -q.*nvidia-fabricmanager"):
        make(machine, fail={"cuInit": CUresult.CUDA_ERROR_SYSTEM_NOT_READY})


def test_what_cannot_be_exported_is_refused_before_the_driver_is_asked(machine):
    """Exporting an imported handle again is INVALID_VALUE; memory without an exportable type has no NVLink path."""
    with make(machine, 0) as owner, make(machine, 1) as peer:
        handle, _, _ = mapped(owner)
        theirs, _ = taken(peer, os.dup(owner.export(handle)), G)
        page = owner.create(G, "ring", exportable=False)
        kinds = peer.driver.api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        assert peer.driver.api.cuMemExportToShareableHandle(theirs.raw, kinds, 0)[0] == 1
        owner.release(handle)
        for domain, one, why in ((peer, theirs, "a peer's"), (owner, page, "without an exportable"),
                                 (owner, handle, "released")):  # fmt: skip
            with pytest.raises(MemoryDomainError, match=f"cannot be exported: it .*{why}"):
                domain.export(one)


def test_auto_makes_no_exportable_handle_before_a_type_was_chosen(machine):
    with make(machine, handle_type="auto") as domain:
        with pytest.raises(MemoryDomainError, match="before a handle type was chosen"):
            domain.create(G, "own")
        domain.create(G, "ring", exportable=False)
        with pytest.raises(ValueError, match="handle_type is 'ipc', not one of auto, fabric, posix_fd"):
            make(machine, handle_type="ipc")


@pytest.mark.parametrize("wrong", ["a file", "another size", "short bytes", "unknown bytes"])
def test_a_wrong_import_is_an_error_and_closes_its_descriptor(machine, wrong):
    with make(machine, 0, imex=True) as owner, make(machine, 1, imex=True) as peer:
        handle, _, _ = mapped(owner, 2 * G)
        before = num_fds()
        if wrong == "another size":
            fd = owner.export(handle)
            before = num_fds()
            theirs = peer.import_handle(os.dup(fd), G)
            area = peer.reserve(G)
            with pytest.raises(DriverError, match="cuMemMap failed with CUDA_ERROR_NOT_SUPPORTED"):
                peer.map(area, 0, theirs, writable=False)
            peer.release(theirs)
        else:
            exported = {"a file": lambda: os.open("/dev/null", os.O_RDONLY), "short bytes": lambda: b"x" * 63,
                        "unknown bytes": lambda: b"x" * 64}[wrong]()  # fmt: skip
            with pytest.raises(MemoryDomainError, match="63 were sent" if wrong == "short bytes" else "INVALID_VALUE"):
                peer.import_handle(exported, 2 * G)
        assert num_fds() == before and peer.live()["handles"] == 0


def test_where_read_only_is_refused_the_peer_is_mapped_writable_and_that_is_said_once(machine, caplog):
    def refuse(address, size, access, count):
        return CUresult.CUDA_ERROR_NOT_SUPPORTED if access[0].flags == 1 else None

    with make(machine, 0) as owner, make(machine, 1, fail={"cuMemSetAccess": refuse}) as peer:
        handle, _, _ = mapped(owner)
        areas = [taken(peer, os.dup(owner.export(handle)), G)[1] for _ in range(3)]
        assert all(peer.driver.api._mappings[area.address].rights == 3 for area in areas)
        assert caplog.text.count("maps its peers' memory writable") == 1 and "PROT_READ" in caplog.text
        assert peer.describe()["peers_read_only"] is False and owner.describe()["peers_read_only"] is True
        tried = [call for call in peer.driver.api.calls if call[0] == "cuMemSetAccess" and call[3][0].flags == 1]
        assert len(tried) == 1


def test_a_refused_access_unmaps_again_and_a_shortage_is_no_refusal_of_read_only(machine):
    short = {"cuMemSetAccess": CUresult.CUDA_ERROR_OUT_OF_MEMORY}
    with make(machine, 0) as owner, make(machine, 1, fail=short) as peer:
        handle, _, _ = mapped(owner)
        theirs, area = peer.import_handle(os.dup(owner.export(handle)), G), peer.reserve(G)
        with pytest.raises(
            DriverError, match="cuMemSetAccess failed with CUDA_ERROR_OUT_OF_MEMORY.*offset 0 on rank 1"
        ):
            peer.map(area, 0, theirs, writable=False)
        assert peer.peers_read_only and not peer.driver.api._mappings and peer.live()["mappings"] == 0
        assert peer.mapping_budget.used == 0
        peer.driver.api.fail.clear()
        peer.map(area, 0, theirs, writable=False)


def test_probe_finds_a_mapping_without_access_and_changes_nothing(machine):
    with make(machine) as domain:
        _, area, tensor = mapped(domain, 2 * G, 8)
        assert domain.probe(area) == 2 and tensor.unique().tolist() == [8]
        domain.driver.api._mappings[area.address].rights = 0
        with pytest.raises(DriverError, match="cuMemcpyDtoH failed.*byte 0 of handle own of .* bytes, mapped writable"):
            domain.probe(area)
        domain.driver.api._mappings[area.address].rights = 1
        with pytest.raises(DriverError, match="cuMemcpyHtoD failed"):
            domain.probe(area)


# tensors


def test_a_tensor_describes_the_memory_to_torch_without_a_copy():
    hold = object()
    given = DeviceBytes(0x7F0000000000, 12, hold)
    interface = given.__cuda_array_interface__
    assert interface["data"] == (0x7F0000000000, False) and interface["shape"] == (12,)
    assert interface["typestr"] == "|u1" and interface["strides"] is None and given.hold is hold


def test_tensors_over_holes_and_out_of_bounds_are_refused(machine):
    with make(machine) as domain:
        handle, area = domain.create(G, "own"), domain.reserve(3 * G)
        domain.map(area, G, handle, writable=True)
        for offset, n in ((G - 1, 2), (2 * G - 1, 2), (0, 3 * G)):
            with pytest.raises(MemoryDomainError, match="not mapped"):
                domain.tensor(area, offset, (n,), torch.uint8)
        with pytest.raises(ValueError, match="leaves its range"):
            domain.tensor(area, 3 * G - 1, (2,), torch.uint8)
        with pytest.raises(ValueError, match="not a multiple of the 4 bytes"):
            domain.tensor(area, G + 2, (1,), torch.float32)


def test_a_range_freed_under_a_tensor_keeps_its_addresses_until_the_tensor_dies(machine, caplog):
    """A late access must fault; it must never meet memory that somebody else was given there."""
    domain = make(machine)
    handle, area, tensor = mapped(domain)
    domain.free(area)
    domain.release(handle)
    assert "1 tensors over it are alive" in caplog.text
    api = domain.driver.api
    assert machine.used == 0 and area.address in api._ranges and not api._mappings
    del tensor
    gc.collect()
    assert area.address not in api._ranges
    domain.close()


# budgets


def test_mappings_are_counted_and_pages_double_to_fit(machine):
    with make(machine, domain_options={"mapping_budget": 10, "page_granules": 1}) as domain:
        area, handle = domain.reserve(16 * G), domain.create(G, "own")
        for i in range(10):
            domain.map(area, i * G, handle, writable=True)
        assert domain.mapping_budget.used == 10
        with pytest.raises(MemoryBudgetError, match="11 mappings, the budget is 10"):
            domain.map(area, 12 * G, handle, writable=True)
        mapping = area.mappings[4]
        domain.unmap(mapping), domain.unmap(mapping)
        assert domain.mapping_budget.used == 9
        domain.free(area)
        assert domain.mapping_budget.used == 0
        assert domain.plan_page_bytes(lambda page: 40 * G // page) == 4 * G


def test_defaults_are_those_of_the_driver(machine):
    with make(machine) as domain:
        assert domain.mapping_budget.limit == 120_000 and domain.page_bytes == 8 * G == 8 * domain.granularity
        assert domain.uuid == "GPU-686f7374-302f-3000-0000-000000000000"
        assert domain.describe()["device"] == domain.uuid
        domain.create(3 * G, "own")
        assert domain.free_bytes() == machine.gpu_bytes - 3 * G


def test_exported_descriptors_are_counted_and_close_on_exec(machine):
    with make(machine) as domain:
        handle, _, _ = mapped(domain)
        fd = domain.export(handle)
        assert domain.export(handle) == fd and domain.live()["descriptors"] == 1 and not os.get_inheritable(fd)
        handle.close_fd(), handle.close_fd()
        assert domain.live()["descriptors"] == 0
        with pytest.raises(OSError):
            os.fstat(fd)
        assert domain.export(handle) > 0  # exported anew


# failures and the end


def test_a_failing_unmap_is_logged_once_and_returned_and_everything_else_is_released(machine, caplog):
    domain = make(machine, 5)
    parts = [mapped(domain, what=f"h{i}") for i in range(3)]
    second = parts[1][1].address
    del parts
    gc.collect()
    domain.driver.api.fail["cuMemUnmap"] = lambda address, size: (
        CUresult.CUDA_ERROR_INVALID_VALUE if address == second else None
    )
    with caplog.at_level(logging.ERROR):
        errors = domain.close()
    assert [error.call for error in errors] == ["cuMemUnmap"] and caplog.text.count("Traceback") == 1
    assert "rank 5: unmap of h1 failed" in caplog.text
    # The second range keeps its addresses: something is still mapped there.
    assert domain.driver.api.live() == [0, 1, 1, 0, 0, 0, 0] and domain.live() == NOTHING
    assert domain.close() == []


def test_each_handle_is_released_once_and_what_fails_is_not_tried_again(machine, caplog):
    with make(machine) as domain:
        handle, area, _ = mapped(domain)
        domain.driver.api.fail["cuMemRelease"] = CUresult.CUDA_ERROR_INVALID_VALUE
        assert domain.release(handle).call == "cuMemRelease"
        assert domain.release(handle) is None
        assert [call[0] for call in domain.driver.api.calls].count("cuMemRelease") == 1
        assert "Traceback" in caplog.text
        with pytest.raises(MemoryDomainError, match="cannot be mapped: it was released"):
            domain.map(domain.reserve(G), 0, handle, writable=True)


def test_cleanup_does_not_hide_the_error_that_led_to_it(machine):
    with pytest.raises(KeyError, match="first"):
        with make(machine) as domain:
            mapped(domain)
            domain.driver.api.fail["cuMemRelease"] = CUresult.CUDA_ERROR_INVALID_VALUE
            raise KeyError("first")


def test_a_closed_domain_refuses_and_its_import_closes_the_descriptor(machine):
    domain = make(machine, 3)
    domain.close(), domain.close()
    refuses_everything(domain, "cuda memory of rank 3 is closed")


def test_five_cycles_leave_memory_descriptors_handles_and_ranges_as_before(machine):
    def cycle():
        with make(machine, 0) as domain, make(machine, 1) as peer:
            for i in range(5):
                handle, area, tensor = mapped(domain, 3 * G, i)
                domain.seal(handle)
                theirs, there = taken(peer, os.dup(domain.export(handle)), 3 * G)
                domain.probe(area), peer.probe(there)
                assert peer.tensor(there, 0, (1,), torch.uint8).item() == i
            del tensor
            gc.collect()
        assert domain.allocated_bytes == domain.mapping_budget.used == 0 and machine.used == 0
        assert domain.driver.api.live() == peer.driver.api.live() == zero_live()
        return num_fds(), threading.active_count()

    first = cycle()
    assert all(cycle() == first for _ in range(5))


# where CUDA is missing


def test_the_cuda_domain_without_cuda_bindings_names_the_package(monkeypatch):
    real = builtins.__import__

    def blocked(name, *args, **kwargs):
        if name.split(".")[0] == "cuda":
            raise ImportError("No module named 'cuda'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", blocked)
    with pytest.raises(MemoryDomainError, match="needs the package cuda-bindings.*pip install 'dwdp.gpu.'"):
        FakeCudaDomain(0, 0)


def test_the_cuda_modules_import_where_cuda_is_missing():
    code = (
        "import sys; sys.modules['cuda'] = None\n"
        "import dwdp, dwdp.memory.vmm, dwdp.memory.capability, dwdp.device.cuda, dwdp.device.nvrtc\n"
        "import dwdp.weights.cuda_copy, dwdp.weights.cuda_checksum\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_driver_without_a_call_names_it():
    class Old(FakeDriver):
        def __getattribute__(self, name):
            if name == "cuMemCreate":
                raise AttributeError(name)
            return super().__getattribute__(name)

    domain = FakeCudaDomain(0, 0, handle_type="posix_fd", driver=Old(FakeMachine()))
    with pytest.raises(DriverError, match="cuMemCreate cannot be called.*install cuda-bindings"):
        domain.create(G, "own")


def test_the_fake_names_only_what_cuda_bindings_has():
    api = pytest.importorskip("cuda.bindings.driver")
    for enum in ENUMS:
        for member in enum:
            assert int(getattr(getattr(api, enum.__name__), member.name)) == member.value
    for name in [name for name in dir(FakeDriver) if name.startswith(("cu", "CU"))]:
        assert hasattr(api, name), name
    properties, access, copy = api.CUmemAllocationProp(), api.CUmemAccessDesc(), api.CUmemcpyAttributes()
    properties.location.id = access.location.id = 3
    properties.requestedHandleTypes = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
    access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
    copy.srcAccessOrder = api.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    assert properties.location.id == access.location.id == 3
    assert int(api.CUstream(7)) == 7 and int(api.CUdeviceptr(9)) == 9


def test_driver_without_a_gpu_is_one_clear_error():
    pytest.importorskip("cuda.bindings.driver")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(MemoryDomainError, match="cuInit"):
        Driver()
