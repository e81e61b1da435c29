"""On a GPU: `python -m pytest tests/gpu/test_doctor.py -m gpu -s`. What the doctor and the FABRIC check find there.

What does not work on the machine must be told with its reason; nothing may read back wrong.
"""

from __future__ import annotations

import json

import pytest
import torch

from dwdp.tools import fabric_check
from dwdp.tools.cli import run
from dwdp.tools.doctor_memory import imex_channels
from dwdp.tools.doctor_text import print_document


@pytest.mark.gpu
def test_the_doctor_finds_every_pair_right(capsys):
    shared = [] if torch.cuda.device_count() > 1 else ["--allow-shared-device"]
    code = run(["doctor", "--ranks", "2", "--memory", "cuda", "--json", *shared])
    document = json.loads(capsys.readouterr().out)
    with capsys.disabled():
        print_document(document)
    assert document["problems"] == [] and code == 0
    assert [pair["bytes_ok"] for pair in document["pairs"]] == [True, True]
    assert all(pair["read_only"] and pair["peer_access"] and pair["gb_per_s"] > 10 for pair in document["pairs"])
    assert all(row["gb_per_s"] > 10 for row in document["many_to_one"]) and len(document["many_to_one"]) == 2
    assert document["copy_bytes"] == 256 << 20 and {one["granularity"] for one in document["devices"]} == {2 << 20}
    assert all(one["works"] for one in document["transfers"])
    types = {one["type"]: one for one in document["handle_types"]}
    assert types["FABRIC"]["works"] is bool(imex_channels()) or "cuMem" in types["FABRIC"]["why"]
    assert types["POSIX_FD"]["works"] and document["descriptor_passing"]["scm_rights"]["works"] is not False


@pytest.mark.gpu
def test_the_fabric_check_works_or_says_which_call_was_refused(capsys):
    code = fabric_check.main(["--mib", "64"])
    shown = capsys.readouterr()
    with capsys.disabled():
        print(shown.out, shown.err)
    if imex_channels():
        assert code == 0 and "FABRIC works between two processes" in shown.out
    else:
        assert code == 1 and "cuMemCreate failed with CUDA_ERROR_NOT_PERMITTED" in shown.out
        assert "nvidia-caps-imex-channels" in shown.out
