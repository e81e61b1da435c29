"""The check of whole layers, in the interpreter; `python -m tests.gpu.check_layers` has their rates on a GPU."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton")

import torch  # noqa: E402

from dwdp.kernels import moe  # noqa: E402
from dwdp.model.moe import RoutedExperts  # noqa: E402
from tests.gpu import check_layers, layers_site  # noqa: E402


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """The check sets the form of kernels; put back behind it."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("DWDP_KERNELS", "auto")


def test_every_line_runs_in_the_interpreter_with_tiny_widths(tmp_path, capsys, monkeypatch):
    """But for the routed experts' kernels, which take most of the time and are tested by themselves."""
    monkeypatch.setattr(moe, "routed", lambda x, ids, weights, experts: x.float() * weights.sum(1, keepdim=True))
    found = tmp_path / "found.json"
    assert check_layers.main(["--cpu", "--json", str(found)]) == 0
    document, text = json.loads(found.read_text()), capsys.readouterr().out
    assert document["failed"] == [] and text.splitlines()[-1] == "all checks hold"
    one, both = (document["numbers"][f"2 tokens, {name}"] for name in ("1 sequence", "2 sequences"))
    for row in (one, both):
        assert row["ms"] == pytest.approx(row["dense_ms"] + row["routed_ms"]) and row["routed_ms"] > 0
    assert both["ratio"] == pytest.approx(both["ms"] / one["ms"])
    assert document["numbers"]["decode, 2 sequences behind 4"]["gb_per_s"] > 0


def through_experts(layers):
    """Of a step, nothing but the routed experts and the marks around them."""
    for layer in layers:
        layer.block_sparse_moe.experts(torch.zeros(1, 128), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))


def test_kernels_of_the_dense_part_are_those_of_the_step_without_the_routed_experts(monkeypatch, tmp_path):
    """Listing the whole step's in place of the difference was seen to fail this; no comparison of bits, the next."""

    def some_step(layers, case):
        through_experts(layers)
        return [torch.ones(3).exp().neg()]

    monkeypatch.setattr(layers_site, "step", some_step)
    monkeypatch.setattr(RoutedExperts, "forward", lambda self, x, ids, weights: x.float().neg().cos())
    found = tmp_path / "found.json"
    assert check_layers.main(["--cpu", "--profile", "--json", str(found)]) == 0
    listed = json.loads(found.read_text())["numbers"]["2 tokens, kernels"]
    dense, routed = ({one["kernel"]: one["count"] for one in listed[part]} for part in ("dense", "routed"))
    assert (dense["aten::exp"], dense["aten::neg"]) == (1, 1) and "aten::cos" not in dense
    assert (routed["aten::cos"], routed["aten::neg"]) == (2, 2) and "aten::exp" not in routed


def test_a_wrong_value_other_bits_and_too_large_a_workspace_fail_the_check(monkeypatch, capsys):
    """Its own negative control: each step gives other values, of the routed experts nothing but their marks is run."""
    numbers = iter([float("nan"), *range(1, 99)])

    def wrong(layers, case):
        through_experts(layers)
        return [torch.tensor(next(numbers))]

    monkeypatch.setattr(layers_site, "step", wrong)
    monkeypatch.setattr(RoutedExperts, "forward", lambda self, x, ids, weights: x.float())
    monkeypatch.setattr(check_layers, "WORKSPACE_BYTES", -1)
    assert check_layers.main(["--cpu"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("FAILED: 2 tokens, 1 sequence: values that are not finite; 2 tokens, 1 sequence: other bits")
    assert last.count("not finite") == 1 and last.count("other bits") == 3 and last.count("routed experts take") == 3


def test_a_size_that_is_not_whole_sequences_is_refused_in_one_line(capsys):
    with pytest.raises(SystemExit):
        check_layers.main(["--tokens", "100"])
    assert "--tokens must be multiples of 64" in capsys.readouterr().err.splitlines()[-1]


def test_flops_are_those_of_the_release():
    """Sizes: 443,740,416 of a KDA block, 232,196,096 of an MLA block, 189,927,808 of a dense part. Those among them
    that are no matrix multiply nothing."""
    site = check_layers.Site(True, 1)
    site.config = layers_site.layers_config(False, "mxfp4")
    site.cpu = False  # counts of the real layers, without their tensors
    site.device = "meta"
    layers = [
        layers_site.DecoderLayer(
            site.config, index, dtype=torch.bfloat16, expert_format="mxfp4", expert_range=(0, 896), device="meta"
        )
        for index in layers_site.LAYERS
    ]
    batch = layers_site.PackedBatch.of([128, 128])
    case = layers_site.Case(batch, torch.empty(0), [], [])
    weights = 2 * 443_740_416 + 232_196_096 + 3 * 189_927_808
    core = 2 * 2 * 96 * (4 * 64 * 128 + 3 * 128**2) + 129 * 96 * (128 + 64 + 128)
    want = 256 * (2 * weights + core)
    assert layers_site.dense_flops(site, layers, case) == pytest.approx(want, rel=2e-3)
    assert layers_site.routed_flops(site, 256) == 3 * 256 * 16 * 3 * 2 * 3072 * 3584
    assert layers_site.expert_bytes(layers) == 3 * 896 * 17_547_264
