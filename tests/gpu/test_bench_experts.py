"""The measurement of expert copies: whole on the fake driver anywhere, at Kimi-K3's widths on a GPU."""

from __future__ import annotations

import json

import pytest

from tests.gpu.bench_experts import main
from tests.gpu.experts_site import K3, TRANSFERS, kinds
from tests.gpu.experts_variants import VARIANTS, WAYS


def check(found: dict, sizes: tuple[int, ...], *, with_variants: bool) -> None:
    assert found["failed"] == [] and found["skipped"] == []
    rows = found["rows"]
    for size in sizes:
        reads = [row for row in rows if row["what"] == "reads" and row["ranks"] == size]
        assert len(reads) == 4 * len(TRANSFERS) * 2 and all(row["rows"] > 0 == row["wrong"] for row in reads)
        controls = [row for row in rows if row["what"] == "control" and row["ranks"] == size]
        assert {row["deaf"] for row in controls} == {"compute", "copy"} and all(row["wrong"] for row in controls)
        rates = [row for row in rows if row["what"] == "rates" and row["ranks"] == size]
        assert set(TRANSFERS) < {row["method"] for row in rates} and all(row["alone"] > 0 for row in rates)
    variants = [row for row in rows if row["what"] == "variants"]
    refused = [row["variant"] for row in variants if "error" in row]
    assert all("the library alone" in name for name in refused), refused  # where there is no such library
    assert all(row.get("wrong", 0) == 0 < row["bytes_per_second"] for row in variants if "error" not in row)
    num_ways = sum(map(len, WAYS.values()))
    assert len(variants) == (len(VARIANTS) + 2 * num_ways) * (len(sizes) if with_variants else 0)
    host = [row for row in rows if row["what"] == "host"]
    assert len(host) == 2 * len(TRANSFERS) + 1 and all(0 < row["median"] <= row["p90"] for row in host)
    runs = {row["num_ranks"]: row["descriptors"] for row in host if row["transfer"] == "per_slice"}
    assert runs == {8: 6 * 7, 16: 6 * 15}


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_each_kind_of_partition_fits_the_memory_that_ranks_share(size):
    for kind in kinds(size, fake=False):
        own = kind.size or -(-kind.num_experts // size)
        rows = size * (kind.num_layers * own + 2 * (kind.num_experts - own))
        assert 90e9 < rows * K3.expert_nbytes < 130e9, kind


def test_two_ranks_on_the_fake_driver(tmp_path):
    """Fails when the runtime leaves out the copy's wait for the slot's end of read, or compute's for the copy."""
    assert main(["--fake", "--ranks", "2", "--variants", "--json", str(tmp_path / "found.json")]) == 0
    check(json.loads((tmp_path / "found.json").read_text()), (2,), with_variants=True)


@pytest.mark.gpu
@pytest.mark.timeout(240)
def test_two_and_four_ranks_share_a_gpu_at_the_widths_of_kimi_k3(tmp_path):
    assert main(["--seconds", "180", "--json", str(tmp_path / "found.json")]) == 0
    check(json.loads((tmp_path / "found.json").read_text()), (2, 4), with_variants=False)
