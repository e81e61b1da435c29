"""Handles, ranges, mappings, seals and tensors of the host domain."""

import ctypes
import errno
import gc
import logging
import mmap
import os
import resource
import threading

import pytest
import torch

from dwdp.errors import MemoryBudgetError, MemoryDomainError
from dwdp.memory import libc
from dwdp.memory.host import HostDomain
from tests.support.closed import refuses_everything

G = 4096


@pytest.fixture
def domain():
    with HostDomain(3, granule_bytes=G, page_granules=2) as domain:
        yield domain


def maps():
    with open("/proc/self/maps") as file:
        return file.read().splitlines()


def own_maps(name="dwdp-"):
    return [line for line in maps() if f"memfd:{name}" in line]


def num_fds():
    return len(os.listdir("/proc/self/fd"))


def fill(domain, handle, value):
    area = domain.reserve(handle.nbytes)
    domain.map(area, 0, handle, writable=True)
    domain.tensor(area, 0, (handle.nbytes,), torch.uint8).fill_(value)
    domain.free(area)


def exported(domain, nbytes=G, value=7):
    """(handle, writable tensor) of a handle that its owner mapped, wrote and sealed."""
    handle = domain.create(nbytes, "own")
    area = domain.reserve(nbytes)
    domain.map(area, 0, handle, writable=True)
    tensor = domain.tensor(area, 0, (nbytes,), torch.uint8).fill_(value)
    domain.seal(handle)
    return handle, tensor


# names and sizes


def test_memfd_is_named_after_what_and_rank_and_starts_as_zeros(domain):
    handle = domain.create(2 * G, "experts.4.w13")
    area = domain.reserve(2 * G)
    domain.map(area, 0, handle, writable=True)
    assert len(own_maps("dwdp-experts.4.w13-3 ")) == 1
    assert os.fstat(handle.fd).st_size == 2 * G
    assert not domain.tensor(area, 0, (2 * G,), torch.uint8).any()


@pytest.mark.parametrize("nbytes", [0, -G, 1, G + 1])
def test_sizes_that_are_no_multiple_of_the_granule_are_refused(domain, nbytes):
    for call in (lambda: domain.create(nbytes, "x"), lambda: domain.reserve(nbytes)):
        with pytest.raises(ValueError, match=f"{nbytes} bytes, not a positive multiple of {G}"):
            call()


@pytest.mark.parametrize("granule", [0, 100, -4096, 6000])
def test_granule_must_be_a_multiple_of_the_system_page(granule):
    with pytest.raises(ValueError, match=f"host_granule_bytes is {granule}"):
        HostDomain(0, granule_bytes=granule)


@pytest.mark.parametrize("what", ["", "a b", "a/b", "a\nb", "x" * 300])
def test_names_that_cannot_be_read_back_from_the_maps_are_refused(domain, what):
    with pytest.raises(ValueError, match="memfd's name"):
        domain.create(G, what)


def test_handle_larger_than_the_available_memory_is_refused_before_it_takes_any(domain):
    with pytest.raises(MemoryDomainError, match=f"{1 << 50} bytes but this host has"):
        domain.create(1 << 50, "huge")
    assert domain.allocated_bytes == 0 and domain.live()["descriptors"] == 0


def test_memory_is_allocated_at_creation_not_at_first_touch(domain):
    handle = domain.create(64 * G, "own")
    assert os.fstat(handle.fd).st_blocks * 512 >= 64 * G


# composite ranges


def test_composite_range_reads_right_through_one_tensor(domain):
    """[page | handle | page] is one tensor, on both granules."""
    pages = [domain.create(domain.page_bytes, "ring") for _ in range(2)]
    own = domain.create(3 * G, "own")
    area = domain.reserve(2 * domain.page_bytes + 3 * G)
    for offset, handle, value in ((0, pages[0], 1), (2 * G, own, 2), (5 * G, pages[1], 3)):
        fill(domain, handle, value)
        domain.map(area, offset, handle, writable=True)
    tensor = domain.tensor(area, 0, (7, G), torch.uint8)
    assert tensor.data_ptr() == area.address and tensor.is_contiguous()
    assert tensor.float().mean(1).tolist() == [1, 1, 2, 2, 2, 3, 3]
    tensor[1, G - 1 :] = 9
    again = domain.reserve(2 * G)
    domain.map(again, 0, pages[0], writable=False)
    assert domain.tensor(again, 0, (2, G), torch.uint8)[1, -1] == 9


def test_ring_page_is_mapped_writable_by_several_layers(domain):
    page = domain.create(domain.page_bytes, "ring")
    tensors = []
    for _ in range(3):
        area = domain.reserve(domain.page_bytes)
        domain.map(area, 0, page, writable=True)
        tensors.append(domain.tensor(area, 0, (domain.page_bytes,), torch.uint8))
    page.close_fd()
    tensors[2].fill_(5)
    assert all(bool((t == 5).all()) for t in tensors)
    assert len({t.data_ptr() for t in tensors}) == 3


def test_mapping_over_a_mapping_or_out_of_bounds_is_refused(domain):
    handle, big = domain.create(2 * G, "a"), domain.create(8 * G, "b")
    area = domain.reserve(4 * G)
    domain.map(area, G, handle, writable=True)
    for offset in (0, G, 2 * G):
        with pytest.raises(ValueError, match="would lie over a mapping"):
            domain.map(area, offset, handle, writable=True)
    for offset, what in ((3 * G, handle), (-G, handle), (100, handle), (0, big)):
        with pytest.raises(ValueError, match="does not fit"):
            domain.map(area, offset, what, writable=True)
    assert domain.live()["mappings"] == 1


def test_unmapped_bytes_stay_reserved_and_can_be_mapped_again(domain):
    handle = domain.create(G, "own")
    area = domain.reserve(3 * G)
    mapping = domain.map(area, G, handle, writable=True)
    assert domain.unmap(mapping) is None and domain.unmap(mapping) is None
    line = f"{area.address:x}-"
    assert any(m.startswith(line) and "---p" in m for m in maps())
    with pytest.raises(MemoryDomainError, match="not mapped"):
        domain.tensor(area, G, (4,), torch.uint8)
    domain.map(area, G, handle, writable=True)
    assert domain.tensor(area, G, (4,), torch.uint8).tolist() == [0] * 4


# access


def test_peer_reads_a_sealed_handle_and_cannot_map_or_write_it(domain):
    handle, tensor = exported(domain, value=7)
    with HostDomain(4, granule_bytes=G) as peer:
        theirs = peer.import_handle(os.dup(handle.fd), G)
        area = peer.reserve(G)
        with pytest.raises(MemoryDomainError, match="read-only"):
            peer.map(area, 0, theirs, writable=True)
        peer.map(area, 0, theirs, writable=False)
        view = peer.tensor(area, 0, (G,), torch.uint8)
        assert bool((view == 7).all())
        tensor.fill_(8)  # the owner's own map goes on writing
        assert bool((view == 8).all())
        assert own_maps()[0].split()[1][:2] in ("rw", "r-")
        assert {line.split()[1] for line in own_maps("dwdp-own-3")} == {"rw-s", "r--s"}
        # And not by going around our interface.
        with pytest.raises(PermissionError):
            mmap.mmap(theirs.fd, G, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.pwrite(theirs.fd, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(theirs.fd, 0)
        mprotect = ctypes.CDLL(None, use_errno=True).mprotect
        mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        assert mprotect(area.address, G, 3) != 0 and ctypes.get_errno() == errno.EACCES
        peer.probe(area)
        with pytest.raises(MemoryDomainError, match="a peer's"):
            peer.seal(theirs)


def test_owner_maps_no_second_time_writable_after_the_seal(domain):
    handle, _ = exported(domain)
    area = domain.reserve(G)
    with pytest.raises(MemoryDomainError, match="mmap failed with EPERM.*own, writable.*read-only"):
        domain.map(area, 0, handle, writable=True)
    domain.map(area, 0, handle, writable=False)  # the failed map left the hole in place
    domain.seal(handle)


def test_seal_before_the_writable_map_is_refused(domain):
    handle = domain.create(G, "own")
    with pytest.raises(MemoryDomainError, match="before its writable map"):
        domain.seal(handle)
    handle.close_fd()
    with pytest.raises(MemoryDomainError, match="closed"):
        domain.seal(handle)


def test_no_handle_can_be_shrunk_under_a_reader(domain):
    handle = domain.create(G, "ring")
    for size in (0, 2 * G):
        with pytest.raises(PermissionError):
            os.ftruncate(handle.fd, size)


def test_import_of_a_file_of_another_size_is_refused_and_closes_the_descriptor(domain):
    handle = domain.create(G, "own")
    fd = os.dup(handle.fd)
    with pytest.raises(MemoryDomainError, match=f"{G} bytes where its owner announced {2 * G} bytes"):
        domain.import_handle(fd, 2 * G)
    with pytest.raises(OSError):
        os.fstat(fd)
    assert domain.live()["handles"] == 1


def test_probe_proves_every_granule_and_changes_nothing(domain):
    handle = domain.create(1100 * G, "own")  # more granules than one call takes
    peer, _ = exported(domain)
    area = domain.reserve(1101 * G)
    domain.map(area, 0, handle, writable=True)
    tensor = domain.tensor(area, 0, (1100, G), torch.uint8)
    tensor[:] = (torch.arange(1100) % 251).to(torch.uint8)[:, None]
    before = tensor.clone()
    domain.map(area, 1100 * G, peer, writable=False)
    assert domain.probe(area) == 1101
    assert torch.equal(tensor, before)


@pytest.mark.parametrize("prot,granule", [(0, 0), (0, 2), (1, 1)])
def test_probe_raises_where_access_is_missing_instead_of_crashing(domain, prot, granule):
    handle = domain.create(4 * G, "own")
    area = domain.reserve(4 * G)
    domain.map(area, 0, handle, writable=True)
    fds = num_fds()
    libc_ = ctypes.CDLL(None)
    libc_.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert libc_.mprotect(area.address + granule * G, G, prot) == 0
    with pytest.raises(MemoryDomainError, match=f"no access to byte {granule * G} of handle own"):
        domain.probe(area)
    assert num_fds() == fds


# tensors


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64, torch.float8_e4m3fn,
              torch.float8_e8m0fnu, torch.bool]
)  # fmt: skip
def test_tensor_is_the_memory_itself_in_every_dtype(domain, dtype):
    handle = domain.create(G, "own")
    area = domain.reserve(2 * G)
    domain.map(area, G, handle, writable=True)
    offset = G + 3 * dtype.itemsize
    tensor = domain.tensor(area, offset, (5, 4), dtype)
    assert (tensor.shape, tensor.dtype, tensor.data_ptr()) == ((5, 4), dtype, area.address + offset)
    assert tensor.untyped_storage().nbytes() == 20 * dtype.itemsize
    tensor.copy_((torch.arange(20) % 2).to(torch.float32).to(dtype).view(5, 4))
    raw = ctypes.string_at(area.address + offset, 20 * dtype.itemsize)
    assert raw == bytes(tensor.clone().view(torch.uint8).flatten().tolist()) and any(raw)


def test_tensor_bounds_alignment_and_holes_are_errors_not_copies(domain):
    handle = domain.create(G, "own")
    area = domain.reserve(3 * G)
    domain.map(area, G, handle, writable=True)
    with pytest.raises(ValueError, match="leaves its range"):
        domain.tensor(area, 2 * G, (G + 1,), torch.uint8)
    with pytest.raises(ValueError, match="leaves its range"):
        domain.tensor(area, -1, (1,), torch.uint8)
    with pytest.raises(ValueError, match="not a multiple of the 4 bytes"):
        domain.tensor(area, G + 2, (1,), torch.float32)
    for offset, n in ((G - 1, 1), (G - 1, 2), (2 * G - 1, 2), (0, 3 * G)):
        with pytest.raises(MemoryDomainError, match="not mapped"):
            domain.tensor(area, offset, (n,), torch.uint8)
    with pytest.raises(ValueError, match="shape"):
        domain.tensor(area, G, (-1, 2), torch.uint8)
    assert domain.tensor(area, G, (0, 7), torch.float32).shape == (0, 7)
    assert domain.tensor(area, G, (), torch.float32).shape == ()


def test_tensor_keeps_its_range_alive(domain):
    handle = domain.create(G, "own")
    area = domain.reserve(G)
    domain.map(area, 0, handle, writable=True)
    view = domain.tensor(area, 0, (G,), torch.uint8)[5:9]
    address = area.address
    domain.release(handle)
    del area, handle
    gc.collect()
    view.fill_(4)
    assert ctypes.string_at(address + 5, 4) == b"\4" * 4


def test_range_freed_under_a_tensor_keeps_its_addresses_until_the_tensor_dies(domain, caplog):
    """A late access must fault; it must never meet memory that somebody else was given there."""
    handle = domain.create(G, "own")
    area = domain.reserve(G)
    domain.map(area, 0, handle, writable=True)
    tensors = [domain.tensor(area, 0, (4,), torch.uint8), domain.tensor(area, 8, (4,), torch.uint8)]
    unmapped, munmap = [], domain.calls.munmap
    domain.calls.munmap = lambda *args: (unmapped.append(args), munmap(*args))
    domain.free(area)
    domain.release(handle)
    assert "2 tensors over it are alive" in caplog.text
    assert not own_maps() and domain.allocated_bytes == 0 and not unmapped
    assert any(int(m.split("-")[0], 16) <= area.address < int(m.split("-")[1].split()[0], 16) for m in maps())
    tensors.pop()
    assert not unmapped
    tensors.pop()
    assert unmapped == [(area.address, G)]


def test_domain_knows_which_storages_lie_in_it(domain):
    handle = domain.create(G, "own")
    area = domain.reserve(G)
    domain.map(area, 0, handle, writable=True)
    inside, outside = domain.tensor(area, 64, (8, 8), torch.uint8), torch.zeros(8, 8)
    assert domain.address_of(inside.T[3, 2:]) == area.address + 64
    assert domain.holds(inside[1]) and not domain.holds(outside) and not domain.holds(torch.empty(0))
    assert domain.contains(area.address, G) and not domain.contains(area.address, G + 1)
    assert not domain.contains(area.address - 1, 2)
    del inside
    domain.free(area)
    assert not domain.contains(area.address, 1)


# budgets


def test_mapping_budget_counts_mappings_and_holes_and_refuses_before_it_is_passed():
    with HostDomain(0, granule_bytes=G, mapping_budget=4) as domain:
        handles = [domain.create(G, "a") for _ in range(4)]
        area = domain.reserve(5 * G)
        domain.map(area, G, handles[0], writable=True)  # hole, mapping, hole
        assert domain.mapping_budget.used == 3
        domain.map(area, 0, handles[1], writable=True)  # takes the place of a hole
        assert domain.mapping_budget.used == 3
        middle = domain.map(area, 4 * G, handles[2], writable=True)
        assert domain.mapping_budget.used == 4
        with pytest.raises(MemoryBudgetError, match="5 mappings, the budget is 4.*max_map_count"):
            domain.reserve(G)
        domain.unmap(middle)
        assert domain.mapping_budget.used == 3
        second = domain.reserve(G)
        assert domain.mapping_budget.used == 4
        domain.free(second)
        domain.free(area)
        assert domain.mapping_budget.used == 0


def test_mapping_count_agrees_with_the_kernel(domain):
    area = domain.reserve(6 * G)
    for offset in (4, 1, 0):
        domain.map(area, offset * G, domain.create(G, f"h{offset}"), writable=True)
    spans = [[int(x, 16) for x in m.split()[0].split("-")] for m in maps()]
    inside = [s for s in spans if s[0] < area.address + 6 * G and s[1] > area.address]
    # Two holes, one of which the kernel may have joined to somebody else's.
    assert len(inside) == domain.mapping_budget.used == 5


def test_filling_ranges_never_needs_more_than_their_mappings():
    """The plan counts mappings only: holes on the way must not pass a budget that the plan fits."""
    with HostDomain(0, granule_bytes=G, mapping_budget=9) as domain:
        areas = [domain.reserve(3 * G) for _ in range(3)]
        for order in ((0, 1, 2), (1, 0, 2), (2, 1, 0)):
            area = areas.pop()
            for offset in order:
                domain.map(area, offset * G, domain.create(G, "h"), writable=True)
        assert domain.mapping_budget.used == domain.live()["mappings"] == 9


def test_descriptor_budget_is_refused_before_it_is_passed_for_imports_too():
    with HostDomain(0, granule_bytes=G, descriptor_budget=2) as domain:
        handle = domain.create(G, "a")
        domain.import_handle(os.dup(handle.fd), G)
        with pytest.raises(MemoryBudgetError, match="3 open descriptors, the budget is 2"):
            domain.create(G, "b")
        fds = num_fds()
        with pytest.raises(MemoryBudgetError):
            domain.import_handle(os.dup(handle.fd), G)
        assert num_fds() == fds
        handle.close_fd()
        handle.close_fd()
        domain.create(G, "b")


def test_default_budgets_leave_ten_percent_and_raise_the_descriptor_limit():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
        with HostDomain(0) as domain:
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
            assert domain.descriptor_budget.limit == hard * 9 // 10
            with open("/proc/sys/vm/max_map_count") as file:
                assert domain.mapping_budget.limit == int(file.read()) * 9 // 10
            assert (domain.granularity, domain.page_bytes) == (65536, 8 * 65536)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# failures


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EPERM, errno.EAGAIN, errno.ENODEV])
def test_failing_mmap_names_call_errno_sizes_and_cure_and_leaves_the_hole(domain, monkeypatch, code):
    handle = domain.create(2 * G, "own")
    area = domain.reserve(2 * G)
    real = domain.calls._mmap

    def failing(address, nbytes, prot, flags, fd, offset):
        if fd >= 0:
            ctypes.set_errno(code)
            return libc.MAP_FAILED
        return real(address, nbytes, prot, flags, fd, offset)

    monkeypatch.setattr(domain.calls, "_mmap", failing)
    name = errno.errorcode[code]
    with pytest.raises(MemoryDomainError, match=f"mmap failed with {name}.*own.*8192 bytes; \\w+") as e:
        domain.map(area, 0, handle, writable=True)
    assert e.value.errno == code
    assert domain.live() == {"handles": 1, "mappings": 0, "ranges": 1, "descriptors": 1}
    monkeypatch.undo()
    domain.map(area, 0, handle, writable=True)


def test_map_that_lost_its_hole_gets_it_back(domain, monkeypatch):
    """MAP_FIXED may drop what was there before it fails."""
    handle = domain.create(G, "own")
    area = domain.reserve(3 * G)
    real = domain.calls._mmap

    def failing(address, nbytes, prot, flags, fd, offset):
        if fd >= 0:
            domain.calls.munmap(address, nbytes)
            ctypes.set_errno(errno.ENOMEM)
            return libc.MAP_FAILED
        return real(address, nbytes, prot, flags, fd, offset)

    monkeypatch.setattr(domain.calls, "_mmap", failing)
    with pytest.raises(MemoryDomainError, match="ENOMEM"):
        domain.map(area, G, handle, writable=True)
    spans = [[int(x, 16) for x in m.split()[0].split("-")] for m in maps()]
    for at in range(3):
        assert any(s[0] <= area.address + at * G < s[1] for s in spans)


def test_failing_reservation_and_memfd_leave_nothing(domain, monkeypatch):
    fds = num_fds()

    def failing(*args):
        raise OSError(errno.EMFILE, "x")

    monkeypatch.setattr(libc.os, "memfd_create", failing)
    with pytest.raises(MemoryDomainError, match="memfd_create failed with EMFILE.*own-3 of 4096.*ulimit -n"):
        domain.create(G, "own")
    monkeypatch.undo()
    full = OSError(errno.ENOSPC, "x")
    for error, raised in ((full, MemoryDomainError), (KeyboardInterrupt(), KeyboardInterrupt)):

        def failing_allocation(*args, error=error):
            raise error

        monkeypatch.setattr(libc.os, "posix_fallocate", failing_allocation)
        with pytest.raises(raised):
            domain.create(G, "own")
        monkeypatch.undo()
    with pytest.raises(MemoryDomainError, match="mmap failed with ENOMEM"):
        domain.reserve(1 << 60)
    assert num_fds() == fds and domain.allocated_bytes == 0
    assert domain.live() == {"handles": 0, "mappings": 0, "ranges": 0, "descriptors": 0}


def test_failing_release_is_logged_with_its_traceback_and_stops_nothing(caplog):
    domain = HostDomain(5, granule_bytes=G)
    areas = [domain.reserve(G) for _ in range(3)]
    handles = [domain.create(G, f"h{i}") for i in range(3)]
    for area, handle in zip(areas, handles):
        domain.map(area, 0, handle, writable=True)
    munmap, close_fd, seen = domain.calls.munmap, domain.calls.close_fd, []

    def failing_munmap(address, nbytes):
        seen.append(address)
        munmap(address, nbytes)
        if address == areas[1].address:
            raise MemoryDomainError("munmap of the second")

    def failing_close(fd):
        seen.append(fd)
        close_fd(fd)
        if len(seen) == 4:
            raise OSError("close of the first")

    domain.calls.munmap, domain.calls.close_fd = failing_munmap, failing_close
    with caplog.at_level(logging.ERROR):
        errors = domain.close()
    assert [str(e) for e in errors] == ["munmap of the second", "close of the first"]
    assert len(seen) == len(set(seen)) == 6
    assert caplog.text.count("Traceback") == 2
    assert "rank 5: unmap of a range failed" in caplog.text
    assert "close of h0's descriptor failed" in caplog.text
    assert not own_maps() and domain.close() == []


def test_failed_unmap_is_returned_and_not_tried_again(domain, caplog):
    area = domain.reserve(G)
    mapping = domain.map(area, 0, domain.create(G, "own"), writable=True)
    mmap_call, calls = domain.calls.mmap, []

    def failing(*args):
        calls.append(args)
        raise MemoryDomainError("no unmap")

    domain.calls.mmap = failing
    assert str(domain.unmap(mapping)) == "no unmap"
    assert domain.unmap(mapping) is None and len(calls) == 1
    domain.calls.mmap = mmap_call
    assert "Traceback" in caplog.text


def test_cleanup_does_not_hide_the_error_that_led_to_it():
    with pytest.raises(KeyError, match="first"):
        with HostDomain(0, granule_bytes=G) as domain:
            domain.create(G, "own")
            domain.calls.close_fd = lambda fd: (os.close(fd), 1 / 0)
            raise KeyError("first")


# the end


def test_release_and_close_are_idempotent_and_memory_counts_until_it_is_unmapped(domain):
    handle = domain.create(2 * G, "own")
    area = domain.reserve(2 * G)
    domain.map(area, 0, handle, writable=True)
    assert domain.release(handle) is None and domain.release(handle) is None
    assert domain.allocated_bytes == 2 * G  # still mapped
    domain.free(area)
    domain.free(area)
    assert domain.allocated_bytes == 0
    with pytest.raises(MemoryDomainError, match="descriptor is closed"):
        domain.map(domain.reserve(2 * G), 0, handle, writable=True)
    other = domain.create(G, "other")
    with pytest.raises(MemoryDomainError, match="range was freed"):
        domain.map(area, 0, other, writable=True)
    domain.close()
    domain.close()
    refuses_everything(domain, "rank 3 is closed")


def test_five_cycles_leave_descriptors_mappings_memory_and_threads_as_before():
    def cycle():
        with HostDomain(0, granule_bytes=G) as domain, HostDomain(1, granule_bytes=G) as peer:
            for i in range(10):
                handle = domain.create(3 * G, f"layer{i}")
                area = domain.reserve(5 * G)
                domain.map(area, G, handle, writable=True)
                domain.seal(handle)
                theirs = peer.reserve(3 * G)
                peer.map(theirs, 0, peer.import_handle(os.dup(handle.fd), 3 * G), writable=False)
                domain.tensor(area, G, (3 * G,), torch.uint8).fill_(i)
                domain.probe(area)
                assert peer.tensor(theirs, 0, (1,), torch.uint8).item() == i
            assert len(own_maps()) == 20
        assert domain.allocated_bytes == peer.allocated_bytes == 0
        assert domain.mapping_budget.used == 0
        return num_fds(), len(own_maps()), threading.active_count(), len(maps())

    cycle()
    gc.collect()
    before = cycle()
    after = [cycle() for _ in range(5)]
    assert all(a[:3] == before[:3] for a in after) and before[1] == 0
    assert after[-1][3] <= before[3] + 2  # the interpreter's own; a leaked cycle would be 20 or more
