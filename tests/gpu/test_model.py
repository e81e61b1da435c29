"""The whole model on a GPU: golden tensors that another implementation made, and the check with kernels on. What the
check is made of runs on the host too, so that it is not first tried on a GPU."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from dwdp import env
from dwdp.model.config import ModelConfig
from dwdp.model.decoder import KimiK3Model
from tests.gpu import check_model, model_identity
from tests.gpu.model_site import Site
from tests.support import make_golden
from tests.support.tiny import fill_model, tiny_model_config

ROOT = Path(__file__).parents[2]


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setenv("DWDP_KERNELS", "triton")
    return Site(True, 60, tmp_path, data=tmp_path / "test.jsonl")


def test_numerics_of_a_packed_format_in_the_interpreter(monkeypatch, tmp_path):
    pytest.importorskip("triton")
    from tests.gpu import model_numerics

    monkeypatch.setenv("DWDP_KERNELS", "auto")  # put back as it was behind the check
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    body = lambda site: model_numerics.tiny(site, "mxfp4")  # noqa: E731
    monkeypatch.setattr(model_numerics, "cases", lambda site: [("mxfp4", 0, body)])
    found = tmp_path / "found.json"
    assert check_model.main(["--cpu", "--only", "numerics", "--json", str(found)]) == 0
    document = json.loads(found.read_text())
    assert document["failed"] == [] and [row["verdict"] for row in document["rows"]] == ["", "ok", "", "ok", "ok"]


@pytest.mark.parametrize("lost", ["routed", "linear", "attend", "delta_rule", "gated", "rms_norm"])
def test_a_form_that_fell_back_is_found(site, lost):
    """Negative control: all seams were called often enough but one."""
    pytest.importorskip("triton")
    from tests.gpu import model_numerics

    site.cpu = False
    model = KimiK3Model(tiny_model_config(), device="meta")
    calls = Counter(model_numerics.expected(model, 3, cpu=False))
    calls.update(rms_norm=1, residual_mix=1, gated_activation=1)
    model_numerics.check_ran(site, "all", calls, model, 3)
    assert site.failed == [] and calls["routed"] == 4 * 3
    calls[lost] -= 1
    model_numerics.check_ran(site, "one less", calls, model, 3)
    assert len(site.failed) == 1 and lost in site.failed[0].rpartition("(found, wanted)")[2]


def test_bytes_are_the_plans_and_a_plan_of_widened_projections_is_not_theirs(site, monkeypatch):
    pytest.importorskip("triton")
    from tests.gpu import model_memory

    form = "nvfp4, FP8 kept"
    monkeypatch.setattr(model_memory, "FORMATS", {form: model_memory.FORMATS[form]})
    model_memory.write(site)
    found, original = [], model_memory.ranks.run
    monkeypatch.setattr(model_memory.ranks, "run", lambda *a, **o: found.append(original(*a, **o)) or found[0])
    model_memory.held(site, 2)
    assert site.failed == [] and len([row for row in site.rows if row["verdict"] == "ok"]) == 1
    plan_of = model_memory.plan_of
    monkeypatch.setattr(model_memory, "plan_of", lambda folder, n, name, fp8: plan_of(folder, n, name, False))
    monkeypatch.setattr(model_memory.ranks, "run", lambda *args, **options: found[0])
    model_memory.held(site, 2)
    assert len(site.failed) == 1 and "dense_moved_bytes" in site.failed[0]


@pytest.mark.parametrize(
    ("last", "form", "wrong"), [("6 of 6", "torch", 0), ("5 of 6", "torch", 1), ("6 of 6", "triton", 1)]
)
def test_what_the_example_says_is_judged(site, monkeypatch, last, form, wrong):
    example = site.folders / "example.py"
    line = f"kernels ['{form}', '{form}'], copies"
    example.write_text(f"print({line!r}); print({line!r}); print({last!r})")
    monkeypatch.setattr(model_identity, "EXAMPLE", example)
    for name, needed, body in model_identity.cases(site):
        site.case(name, needed, body)
    assert len(site.failed) == wrong


@pytest.mark.gpu
@pytest.mark.timeout(260)
def test_numerics_and_memory_with_kernels_on_a_gpu():
    command = [sys.executable, "-m", "tests.gpu.check_model", "--seconds", "240", "--only", "numerics,memory"]
    done = subprocess.run(command, env=env.child_environment(TRITON_INTERPRET=None), cwd=ROOT, timeout=255)
    assert done.returncode == 0


@pytest.mark.gpu
def test_fp32_logits_equal_the_golden_ones_whole_and_in_chunks():
    weights, golden = make_golden.load()
    config = ModelConfig.from_dict(make_golden.CONFIG)
    model = KimiK3Model(config, dtype=torch.float32, device="cuda")
    fill_model(model, {name: tensor.float() for name, tensor in weights.items()})
    ids, want = golden["ids"].view(1, -1).cuda(), golden["logits"].view(-1, config.vocab_size)
    with torch.no_grad():
        whole = model(ids)[0].cpu()
        state = model.new_state(1, ids.shape[1])
        parts = torch.cat([model(ids[:, a:b], state)[0] for a, b in ((0, 70), (70, 96), (96, 97))]).cpu()
    assert (whole - want).abs().max() < 1e-4
    assert (parts - want).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no question"),
        ('{"question": "a"}\n{"q": 1}', "line 2 is no JSON object with a question"),
        ("[1]", "line 1"),
        ('{"question": 1}', "line 1"),
        ("{", "line 1"),
    ],
)
def test_questions_of_another_shape_are_named(tmp_path, text, reason):
    """Of the example: an empty comparison would have passed."""
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=reason):
        runpy.run_path(str(model_identity.EXAMPLE))["questions"](path)
    path.write_text('\n{"question": "a"}\n')
    assert runpy.run_path(str(model_identity.EXAMPLE))["questions"](path) == ["a\n"]
