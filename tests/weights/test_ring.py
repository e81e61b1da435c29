"""The ring: pages shared by the layers of a slot, checked before the first page, given back once."""

import pickle
from types import SimpleNamespace

import pytest

from dwdp.errors import MemoryDomainError, PrefetchRingMemoryError
from dwdp.memory.host import HostDomain
from dwdp.weights.plan import composite_geometry
from dwdp.weights.ring import PrefetchRing


@pytest.fixture
def domain():
    with HostDomain(0, granule_bytes=4096, page_granules=2) as domain:
        yield domain


def layers_of(domain, row_bytes_of_layers, experts=10, own=(4, 6)):
    def table(b):
        geometry = composite_geometry(b, *own, experts, domain.granularity, domain.page_bytes)
        return SimpleNamespace(geometry=geometry, area=domain.reserve(geometry.nbytes))

    return [[table(b) for b in layer] for layer in row_bytes_of_layers]


def test_a_slot_has_the_pages_of_its_largest_layer_and_its_layers_share_them(domain):
    layers = layers_of(domain, [[5000], [3000, 100], [9000], [100]])
    ring = PrefetchRing(domain, layers, 2)
    needs = [sum(len(t.geometry.page_offsets(domain.page_bytes)) for t in layer) for layer in layers]
    assert ring.slot_pages == [max(needs[0], needs[2]), max(needs[1], needs[3])] and needs[0] < needs[2]
    ring.allocate()
    assert ring.nbytes == sum(ring.slot_nbytes) == domain.allocated_bytes
    assert domain.live()["descriptors"] == 0  # each closed when its last layer had mapped it
    pages = [{id(m.handle) for table in layer for m in table.area.mappings} for layer in layers]
    assert pages[0] <= pages[2] and pages[1] >= pages[3] and not pages[0] & pages[1]
    ring.close()
    ring.close()
    assert domain.live()["handles"] == 0


def test_fewer_layers_than_slots_take_one_slot_each(domain):
    assert PrefetchRing(domain, layers_of(domain, [[5000]]), 4).num_slots == 1


def test_a_ring_larger_than_free_memory_is_refused_before_the_first_page(domain):
    ring = PrefetchRing(domain, layers_of(domain, [[5000], [3000], [70]]), 3)
    needed = sum(ring.slot_nbytes)
    ring.check_fits(needed, [])
    with pytest.raises(PrefetchRingMemoryError) as caught:
        ring.check_fits(needed - 1, ["a larger N (dwdp_size)"])
    error = pickle.loads(pickle.dumps(caught.value))
    text = str(error)
    assert error.slot_nbytes == ring.slot_nbytes and error.free_nbytes == needed - 1
    assert all(str(nbytes) in text for nbytes in [*ring.slot_nbytes, needed - 1]) and "a larger N" in text
    assert domain.allocated_bytes == 0


def test_a_page_that_fails_gives_every_page_back_once_and_its_error_is_raised(domain, monkeypatch):
    ring = PrefetchRing(domain, layers_of(domain, [[5000], [3000]]), 2)
    fails_at = ring.slot_pages[0] + 2  # a page of slot 1
    released, made = [], []
    create, release = domain.create, domain.release

    def failing(nbytes, what, **options):
        if len(made) == fails_at:
            raise MemoryDomainError("no page left")
        made.append(create(nbytes, what, **options))
        return made[-1]

    monkeypatch.setattr(domain, "create", failing)
    monkeypatch.setattr(domain, "release", lambda handle: (released.append(id(handle)), release(handle)))
    with pytest.raises(MemoryDomainError, match="no page left"):
        ring.allocate()
    ring.close()
    assert sorted(released) == sorted(map(id, made)) and domain.live()["handles"] == 0


def test_free_memory_is_the_declared_size_less_what_is_held_or_a_share_of_the_host():
    with HostDomain(0) as domain:
        assert domain.free_bytes(100_000, held_bytes=9192, ranks_on_host=4) == 90_808
        assert domain.free_bytes(100, held_bytes=9192, ranks_on_host=4) == 0
        alone = domain.free_bytes(held_bytes=9192, ranks_on_host=1)
        shared = domain.free_bytes(held_bytes=9192, ranks_on_host=4)
    assert 0 < shared < alone / 2
