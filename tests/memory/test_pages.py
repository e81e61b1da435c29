"""Budgets, page sizes and the pool of ring pages."""

import logging

import pytest

from dwdp.errors import MemoryBudgetError, MemoryDomainError
from dwdp.memory.host import HostDomain
from dwdp.memory.pages import PagePool, fit_page_bytes


def plan(total, fixed=0):
    return lambda page_bytes: fixed + -(-total // page_bytes)


def test_page_stays_when_the_plan_fits():
    assert fit_page_bytes(64, plan(640), 10) == 64


def test_page_doubles_until_the_plan_fits_and_the_log_says_so(caplog):
    with caplog.at_level(logging.INFO):
        assert fit_page_bytes(64, plan(6400, fixed=3), 30) == 256
    assert "pages doubled from 64 to 256 bytes" in caplog.text
    assert "28 mappings where 103 pass the budget of 30" in caplog.text


def test_descriptors_double_the_page_too():
    size = fit_page_bytes(64, plan(64), 10, num_descriptors_for=plan(6400), descriptor_budget=50)
    assert size == 128


def test_plan_that_no_page_size_fits_is_refused_with_both_numbers():
    with pytest.raises(MemoryBudgetError, match="13 mappings.*10 are left"):
        fit_page_bytes(64, plan(64, fixed=12), 10)
    with pytest.raises(MemoryBudgetError, match="13 descriptors.*10 are left"):
        fit_page_bytes(64, plan(64), 10, num_descriptors_for=plan(64, fixed=12), descriptor_budget=10)


def test_domain_doubles_its_pages_within_what_is_left_of_its_budget():
    with HostDomain(0, granule_bytes=4096, page_granules=2, mapping_budget=12) as domain:
        areas = [domain.reserve(4096) for _ in range(2)]
        assert domain.plan_page_bytes(plan(10 * 8192)) == domain.page_bytes == 8192
        areas.append(domain.reserve(4096))
        assert domain.plan_page_bytes(plan(10 * 8192)) == domain.page_bytes == 16384
        assert domain.grow_pages() == domain.page_bytes == 32768


def test_pool_owns_its_pages_and_gives_each_back_once():
    with HostDomain(0, granule_bytes=4096, page_granules=2) as domain:
        with PagePool(domain) as pool:
            pages = pool.allocate(2, "ring0") + pool.allocate(1, "ring1")
            assert [page.nbytes for page in pages] == [8192] * 3
            assert (pool.num_pages, pool.nbytes, domain.allocated_bytes) == (3, 24576, 24576)
        pool.close()
        assert domain.allocated_bytes == 0 and domain.live()["handles"] == 0
        assert pool.num_pages == 0


@pytest.mark.parametrize("fail_at", [0, 1, 4])
def test_failing_page_releases_the_pages_before_it_once_and_raises_its_own_error(fail_at):
    class Boom(MemoryDomainError):
        pass

    with HostDomain(0, granule_bytes=4096) as domain:
        kept = PagePool(domain)
        kept.allocate(1, "kept")
        released, create, close_fd = [], domain.create, domain.calls.close_fd

        def failing_create(nbytes, what, **options):
            if domain.live()["handles"] == 1 + fail_at:
                raise Boom("page")
            return create(nbytes, what, **options)

        def failing_close(fd):
            released.append(fd)
            close_fd(fd)
            raise OSError("release")  # must not hide the allocation's error nor stop the others

        domain.create, domain.calls.close_fd = failing_create, failing_close
        with pytest.raises(Boom, match="page"):
            kept.allocate(5, "ring")
        assert len(released) == len(set(released)) == fail_at
        assert domain.live()["handles"] == 1 and kept.num_pages == 1
        domain.calls.close_fd = close_fd
        kept.close()
        assert domain.allocated_bytes == 0


def test_interrupt_while_allocating_releases_too():
    with HostDomain(0, granule_bytes=4096) as domain:
        create = domain.create

        def interrupted(nbytes, what, **options):
            if domain.live()["handles"] == 2:
                raise KeyboardInterrupt
            return create(nbytes, what, **options)

        domain.create = interrupted
        with pytest.raises(KeyboardInterrupt):
            PagePool(domain).allocate(3, "ring")
        assert domain.allocated_bytes == 0


def test_pool_passes_no_descriptor_budget():
    with HostDomain(0, granule_bytes=4096, descriptor_budget=3) as domain:
        pool = PagePool(domain)
        with pytest.raises(MemoryBudgetError, match="4 open descriptors, the budget is 3"):
            pool.allocate(4, "ring")
        assert domain.live()["descriptors"] == 0
        pages = pool.allocate(3, "ring")
        for page in pages:
            page.close_fd()
        assert len(pool.allocate(3, "ring")) == 3  # closed descriptors do not count
