"""FP8 projections that stay FP8: the same logits from half the bytes, however loaded, as a plan counts them."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dwdp.model import quant, quant_linear
from dwdp.model.config import ModelConfig
from dwdp.model.dense_shapes import dense_shapes
from dwdp.model.formats import read_formats
from dwdp.model.kept_fp8 import held_tensors, kept_fp8
from dwdp.model.loader import WeightUpdate, load_model
from dwdp.model.quant_linear import FP8Linear
from dwdp.partition.collect import collect
from dwdp.tools.plan import ModelSizes, read_model, run_plan
from tests.support.system import DENSE, build_rank, prompt, resolve, run_rank_threads, write_random
from tests.support.tiny import token_ids

FP8 = torch.float8_e4m3fn
# widths that leave partial blocks of 128 rows and columns
CHANGES = dict(hidden_size=192, fp8_attention=True, expert_format="nvfp4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_random(tmp_path_factory.mktemp("fp8") / "model", **CHANGES)


def config_and_kept(folder):
    document = json.loads((folder / "config.json").read_text())
    config = ModelConfig.from_dict(document)
    return config, kept_fp8(config, read_formats(folder, document))


def linear(outputs: int, inputs: int) -> tuple[FP8Linear, torch.Tensor]:
    """A projection, and its decoded weight in fp32."""
    weight, scale = quant.quantise_fp8_block(torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1)))
    module = FP8Linear(inputs, outputs, device="cpu")
    module.weight.data.copy_(weight)
    module.weight_scale.data.copy_(scale[:, 0, :, 0])
    return module, quant.dequantise_fp8_block(weight, scale, torch.float32)


def test_a_kept_model_computes_the_same_logits_from_half_the_bytes(folder):
    config, kept = config_and_kept(folder)
    wide, narrow = load_model(folder, dtype="bf16"), load_model(folder, dtype="bf16", keep_fp8=True)
    ids = token_ids(9)
    assert torch.equal(wide(ids), narrow(ids))
    modules = {name for name, module in narrow.named_modules() if isinstance(module, FP8Linear)}
    assert modules == kept and len(kept) > 20 and not any("kv_b_proj" in name for name in kept)
    bytes_of = [sum(p.nbytes for n, p in m.named_parameters() if n.rpartition(".")[0] in kept) for m in (wide, narrow)]
    assert 0.5 < bytes_of[1] / bytes_of[0] < 0.52


def test_what_a_kept_model_holds_is_what_a_plan_counts(folder):
    """Names, shapes and dtypes in the model's order, and the dense layout to the byte."""
    config, kept = config_and_kept(folder)
    model = load_model(folder, dtype="bf16", keep_fp8=True)
    held = {
        name: (tuple(p.shape), str(p.dtype).removeprefix("torch."))
        for name, p in model.named_parameters()
        if ".block_sparse_moe.experts." not in name
    }
    assert list(held.items()) == [(name, (t.shape, t.dtype)) for name, t in held_tensors(config, kept).items()]
    found = collect(model, num_ranks=2, segments=("attn", "moe"), min_bytes=1, strict=True)
    planned = dense_shapes(config, segments=("attn", "moe"), min_bytes=1, kept_fp8=kept)
    assert found.layout.digest == planned.layout_of(2).digest
    whole = sum(p.nbytes for p in model.parameters())
    sizes = ModelSizes.of(config, "nvfp4", kept)
    assert sizes.whole_nbytes + sizes.num_layers * sizes.layer_nbytes == whole


def test_a_plan_takes_it_from_the_config_file(folder, tmp_path, capsys):
    """Of a folder, and of the released NVFP4 folder by name, whose KDA projections take half."""

    def planned(model: str, format: str | None, keep: bool) -> dict:
        file = tmp_path / "plan.json"
        file.write_text(json.dumps({"ranks": 2, "keep_fp8": keep}))
        options = {"experts": {}, "dense": True, "dense_options": {"min_bytes": 1}}
        run_plan(model, 2, format, None, config_file=file, as_json=True, **options)
        return json.loads(capsys.readouterr().out)["dense"]

    config, kept = config_and_kept(folder)
    want = dense_shapes(config, segments=("attn", "moe"), min_bytes=1, kept_fp8=kept).layout.moved_nbytes
    assert planned(str(folder), None, True)["moved_bytes"] == want < planned(str(folder), None, False)["moved_bytes"]
    assert read_model("kimi-k3", "nvfp4").format_name == "nvfp4"
    wide, narrow = (planned("kimi-k3", "nvfp4", keep)["a_kda_bytes"] for keep in (False, True))
    scales = 5 * (12288 // 128) * (7168 // 128) * 4
    assert wide - narrow == 5 * 12288 * 7168 - scales
    assert planned("kimi-k3", "mxfp4", True)["a_kda_bytes"] == wide


@pytest.mark.parametrize("load", ["whole", "sharded"])
def test_ranks_that_share_kept_weights_compute_the_replicated_logits(folder, load):
    def settings(ranks: int, **more):
        asked = dict(ranks=ranks, dtype="bfloat16", device="cpu", keep_fp8=True, **more)
        return resolve(folder, **asked).settings

    with build_rank(settings(1)) as alone:
        want = [alone.logits(prompt(r, 12)) for r in range(2)]
    both = settings(2, dense_dwdp={**DENSE, "load": load})

    def body(group):
        with build_rank(both, group, rank=group.rank) as rank:
            return rank.logits(prompt(group.rank, 12)), rank.report()["ledger"]["dense_moved_bytes"]

    config, kept = config_and_kept(folder)
    moved = dense_shapes(config, segments=("attn", "moe"), min_bytes=1, kept_fp8=kept).layout.moved_nbytes
    for rank, (logits, found) in enumerate(run_rank_threads(2, body, timeout=60)):
        assert torch.equal(logits, want[rank]) and found == moved


def test_an_update_writes_kept_weights_in_place(folder, tmp_path):
    other = write_random(tmp_path / "other", seed=8, **CHANGES)
    model = load_model(folder, dtype="bf16", keep_fp8=True)
    with WeightUpdate(other, model) as update:
        update.write()
    want = load_model(other, dtype="bf16", keep_fp8=True)
    for (name, got), expected in zip(model.named_parameters(), want.parameters()):
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8)), name


class Largest(TorchDispatchMode):
    """The largest storage that an operation inside makes."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not any(
            isinstance(a, torch.Tensor) and a.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
            for a in args
        ):
            self.nbytes = max(self.nbytes, out.untyped_storage().nbytes())
        return out


def test_the_torch_form_decodes_some_rows_at_a_time(monkeypatch):
    """Of 700 x 300 in fp32, 840,000 bytes: never more than the limit, and the same values."""
    module, wide = linear(700, 300)
    x = torch.randn(2, 3, 300)
    with Largest() as unbounded:
        module(x)
    monkeypatch.setattr(quant_linear, "DECODED_BYTES", 256 * 300 * 4)
    with Largest() as bounded:
        got = module(x)
    torch.testing.assert_close(got, F.linear(x, wide), atol=1e-4, rtol=1e-5)
    assert unbounded.nbytes == 700 * 300 * 4 and bounded.nbytes == 256 * 300 * 4
    assert quant_linear.DECODED_BYTES < 64 << 20 and 12288 * 7168 * 2 > 64 << 20
