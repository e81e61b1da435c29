"""Greedy answers with DWDP on and replicated, by the example that a user has."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from dwdp.env import child_environment
from tests.gpu.model_site import Site

EXAMPLE = Path(__file__).parents[2] / "examples" / "gsm8k_identity.py"
QUESTIONS = 1319


def cases(site: Site) -> list:
    if site.data is None:
        site.note("GSM8K", "left out: no --data")
        return []
    return [("GSM8K", 90.0, answers)]


def answers(site: Site) -> None:
    """On a GPU a prompt is a forward of some thousand launches, and so is a step of a batch: batches are large."""
    form, wanted = "triton", QUESTIONS
    options = ["--device", "cuda", "--allow-shared-device", "--max-batch-size", "128"]
    if site.cpu:
        form, wanted = "torch", 6
        options = ["--limit", str(wanted), "--max-tokens", "4", "--max-batch-size", "2"]
    command = [sys.executable, str(EXAMPLE), "--data", str(site.data), *options]
    seconds = 300.0 if site.cpu else site.left()
    process = subprocess.Popen(
        command, env=child_environment(DWDP_KERNELS=form), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()  # its ranks leave when it is gone
        out, err = process.communicate()
        err += f"\nended after {seconds:.0f} s"
    lines = out.splitlines()
    for line in lines[:-1]:
        site.note("GSM8K, an arm", line)
    site.check(
        f"GSM8K: {wanted} of {wanted} answers are the same",
        process.returncode == 0 and lines[-1:] == [f"{wanted} of {wanted}"],
        f"{lines[-1] if lines else 'nothing printed'}{'' if process.returncode == 0 else '; ' + err.strip()[-300:]}",
    )
    forms = re.findall(r"kernels \[(.*?)\]", out)
    site.check("GSM8K: the form of both arms' ranks", forms == [f"'{form}', '{form}'"] * 2, str(forms))
