"""The checksum that host and GPU share: its definition, what it catches, and the prepared form on a fake driver."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dwdp.device.nvrtc import compile_cubin
from dwdp.errors import MemoryDomainError
from dwdp.memory.checksum import BLOCK_WORDS, FACTOR, LENGTH, MASK, checksum, checksum_of, row_checksums
from dwdp.weights.cuda_checksum import OPTIONS, SOURCE, THREADS, ChecksumKernel, DeviceChecksums
from tests.memory.fake_driver import CUresult
from tests.weights.test_cuda_copy import Setting


def by_definition(data: bytes) -> int:
    padded = data + bytes(-len(data) % 4)
    words = [int.from_bytes(padded[i : i + 4], "little") for i in range(0, len(padded), 4)]
    return (len(data) * LENGTH + sum(w * (1 + 2 * FACTOR * i) for i, w in enumerate(words))) & MASK


def random_bytes(n, seed=0):
    return np.random.default_rng(seed).integers(0, 256, n, dtype=np.uint8)


@pytest.mark.parametrize("n", [0, 1, 3, 4, 5, 4095, 4 * BLOCK_WORDS - 1, 4 * BLOCK_WORDS, 4 * BLOCK_WORDS + 7, 300_001])
def test_the_fast_form_is_the_definition(n):
    data = random_bytes(n)
    assert checksum_of(data) == by_definition(data.tobytes()) == checksum(data.ctypes.data, n)


def test_values_do_not_change_between_versions():
    """Ranks of one group compare them, a checkpoint's may be kept."""
    assert checksum_of(np.arange(10, dtype=np.uint8)) == by_definition(bytes(range(10))) == 0xBB474A1E76B07A72


@settings(max_examples=200)
@given(st.integers(1, 400), st.integers(0, 399), st.integers(1, 255))
def test_one_changed_byte_shows(n, at, change):
    data = random_bytes(n)
    changed = data.copy()
    changed[at % n] ^= change
    assert checksum_of(changed) != checksum_of(data)


@settings(max_examples=200)
@given(st.integers(0, 99), st.integers(0, 99), st.integers(0, 1 << 32), st.integers(0, 1 << 32))
def test_two_words_that_change_places_show(i, j, first, second):
    words = np.zeros(100, dtype=np.uint32)
    words[i], words[j] = first & 0xFFFFFFFF, second & 0xFFFFFFFF
    swapped = words.copy()
    swapped[i], swapped[j] = words[j], words[i]
    same = np.array_equal(words, swapped)
    assert (checksum_of(words.view(np.uint8)) == checksum_of(swapped.view(np.uint8))) is same


def test_lost_tails_shifts_and_swapped_rows_show():
    data = random_bytes(4096)
    sums = row_checksums(data.ctypes.data, 8, 512)
    assert len(set(sums)) == 8 and sums == [checksum_of(data[i : i + 512]) for i in range(0, 4096, 512)]
    zeros = np.zeros(64, dtype=np.uint8)
    assert len({checksum_of(zeros[:n]) for n in range(1, 65)}) == 64  # zeros of another length
    for lost in (1, 4, 16, 256):
        torn = data.copy()
        torn[-lost:] = 0
        assert checksum_of(torn) != checksum_of(data) and checksum_of(np.roll(data, lost)) != checksum_of(data)


# prepared


def test_the_prepared_form_gives_the_hosts_checksums_again_and_again(monkeypatch):
    monkeypatch.setattr("dwdp.weights.cuda_checksum.BYTES_PER_CTA", 1 << 17)
    setting = Setting()
    kernel = ChecksumKernel(setting.driver, 0, compiler=lambda *args: b"cubin")
    base = setting.addresses[0]
    rows = [(base, 5000), (base + 5000, 1), (base + 7001, 3 << 17), (base, 0)]
    sums = DeviceChecksums(kernel, rows)
    for _ in range(2):
        setting.src[:100] += 1
        sums.submit(setting.stream)
        setting.api.cuStreamSynchronize(setting.stream)
        assert sums.read() == [checksum(*row) for row in rows]
    launches = [call for call in setting.api.calls if call[0] == "cuLaunchKernel"]
    assert [call[2] for call in launches] == [12, 12] and launches[0][5] == THREADS
    none = DeviceChecksums(kernel, [])
    none.submit(setting.stream)
    assert none.read() == []
    sums.close(), sums.close(), none.close(), kernel.close()
    assert setting.api.live()[3] == 0
    setting.close()


def test_a_failing_table_leaves_nothing():
    setting = Setting()
    kernel = ChecksumKernel(setting.driver, 0, compiler=lambda *args: b"cubin")
    setting.api.fail["cuMemcpyHtoD"] = CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(MemoryDomainError, match="cuMemcpyHtoD"):
        DeviceChecksums(kernel, [(setting.addresses[0], 16)])
    assert setting.api.live()[3] == 0
    setting.api.fail.clear()
    setting.close()


def test_the_kernel_compiles():
    pytest.importorskip("cuda.bindings.nvrtc")
    try:
        assert b"row_checksums" in compile_cubin(SOURCE, "sm_90", OPTIONS)
    except MemoryDomainError as error:
        if "cannot be loaded" in str(error):
            pytest.skip(str(error))
        raise
