"""The check of attention's kernels: whole in the interpreter anywhere, at Kimi-K3's widths on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from dwdp import env
from tests.gpu import attention_numerics, check_attention

pytest.importorskip("triton")


def test_every_line_runs_in_the_interpreter_with_tiny_widths(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("DWDP_KERNELS", "auto")  # put back as it was behind the check
    found = tmp_path / "found.json"
    assert check_attention.main(["--cpu", "--json", str(found)]) == 0
    document, text = json.loads(found.read_text()), capsys.readouterr().out
    assert document["failed"] == [] and "all checks hold" in text.splitlines()[-1]
    names = "\n".join(document["numbers"])
    for what in ("latent attention", "delta rule, chunks", "kda block", "mla block", "plain product", "plain copy",
                 "latent attention, FlashMLA", "latent attention, Triton", "20, FlashMLA", "20, Triton",
                 "workspace", "KDA block", "MLA block", "sweep, decode", "sweep, prefill"):  # fmt: skip
        assert what in names


def test_a_difference_above_its_bound_fails_the_check(monkeypatch, capsys):
    """Its own negative control: a case that raises, and a difference that is NaN."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("DWDP_KERNELS", "auto")

    def wrong(site):
        site.check("nothing", float("nan"), 1.0)
        raise RuntimeError("injected")

    monkeypatch.setattr(attention_numerics, "CASES", (("wrong", 0, wrong),))
    monkeypatch.setattr("tests.gpu.attention_rates.CASES", ())
    assert check_attention.main(["--cpu"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("FAILED: nothing: nan > 1.0e+00; wrong: RuntimeError: injected")


@pytest.mark.gpu
def test_on_a_gpu():
    environ = env.child_environment(TRITON_INTERPRET=None)
    command = [sys.executable, "-m", "tests.gpu.check_attention", "--seconds", "85"]
    done = subprocess.run(command, env=environ, cwd=os.getcwd(), timeout=110)
    assert done.returncode == 0
