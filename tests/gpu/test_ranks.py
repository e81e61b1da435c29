"""On a GPU: `python -m pytest tests/gpu -m gpu`. Rank processes share it, or take one each where there are several.

The first test runs the scenarios' code on the fake driver, so that it is not first tried on a GPU.
"""

from __future__ import annotations

import json
import logging

import pytest

from dwdp.executor.settings import model_folder
from tests.gpu import scenarios
from tests.gpu.ranks import run
from tests.support.system import write_random

NANO = model_folder("nano-k3")
LARGER = {"num_experts": 16, "routed_expert_hidden_size": 1024, "moe_intermediate_size": 512, "hidden_size": 128}
FAILING = (
    ("cuMemCreate", 9),
    ("cuMemImportFromShareableHandle", 5),
    ("cuMemSetAccess", 20),
    ("cuStreamSynchronize", 6),
)
CACHES = 64 << 20  # bytes that libraries may keep once they were used; a model of these tests has more

logger = logging.getLogger(__name__)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_random(tmp_path_factory.mktemp("m") / "tiny", num_experts=7)


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    """Tables of many pages: 48 MiB of experts a layer."""
    return write_random(tmp_path_factory.mktemp("m") / "larger", **LARGER)


@pytest.mark.parametrize(
    "scenario, arguments",
    [
        ("attached", ()),
        ("standalone", ()),
        ("timeline", (5,)),
        ("failing", (FAILING,)),
    ],
)
def test_scenarios_on_the_fake_driver(tiny, scenario, arguments):
    assert len(run(getattr(scenarios, scenario), 2, tiny, *arguments, fake=True)) == 2


def test_the_killed_rank_on_the_fake_driver(tiny):
    assert run(scenarios.survived, 3, tiny, 1, fake=True, lost=(1,)) == {0: [1], 2: [1]}


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["nano-k3", "larger"])
def test_attached_is_bitwise_equal_to_replicated_with_every_transfer(name, ranks, larger):
    found = run(scenarios.attached, ranks, NANO if name == "nano-k3" else larger)
    if name == "larger":
        ledger = found[0]["per_slice"]["ledger"]
        assert ledger["ring_bytes"] > 0 and ledger["freed_bytes"] > ledger["moved_bytes"] // 3, ledger
    logger.info("%s", json.dumps(found[0]["batched"]))


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_standalone_is_bitwise_equal_to_the_instance_without_it(ranks):
    run(scenarios.standalone, ranks, NANO)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 3])
def test_500_forwards_with_aborts_find_no_wrong_byte_in_a_slot(tiny, ranks):
    run(scenarios.soak, ranks, tiny, 500)


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["dense", "experts"])
def test_a_bit_flipped_in_a_peers_row_is_found_beside_the_forwards(tiny, what):
    found = run(scenarios.checks, 2, tiny, what)
    if what == "dense":
        assert all("layer 2 attention" in text for text in found.values())
    else:
        assert "layer 2 table w2, expert row 5 copied from rank 1" in found[0]


@pytest.mark.gpu
def test_an_update_in_place_gives_the_other_models_bits(tiny, tmp_path):
    run(scenarios.updated, 2, tiny, write_random(tmp_path / "new", seed=8, num_experts=7))


@pytest.mark.gpu
def test_ranks_outlive_a_killed_one_and_read_its_memory_right(larger):
    assert run(scenarios.survived, 3, larger, 1, lost=(1,)) == {0: [1], 2: [1]}


@pytest.mark.gpu
def test_a_failing_step_leaves_the_gpus_memory_as_before(larger):
    for rank, left in run(scenarios.failing, 2, larger, FAILING).items():
        assert all(nbytes < CACHES for nbytes in left), (rank, left)


@pytest.mark.gpu
def test_the_timeline_of_50_forwards_has_no_race():
    for counts in run(scenarios.timeline, 2, NANO, 50).values():
        assert counts["copy"] > 50 * 13 * 2 and counts["wait"] > counts["copy"], counts


@pytest.mark.gpu
def test_the_offline_api_serves_from_a_gpu_as_it_does_replicated():
    from dwdp import LLM, SamplingParams

    ids = list(range(5, 40))
    with LLM("nano-k3", ranks=1, device="cuda") as llm:
        expected = llm.logits(ids, chunk_size=10, decode=2)
        (text,) = llm.generate(["17+25="], SamplingParams(max_tokens=8))
    dwdp, dense = {"allow_shared_device": True, "contention_opt": True}, {"enabled": True, "min_bytes": 1}
    with LLM("nano-k3", ranks=2, device="cuda", dwdp=dwdp, dense_dwdp=dense) as llm:
        for rank in range(2):
            assert (llm.logits(ids, rank=rank, chunk_size=10, decode=2) == expected).all()
        (again,) = llm.generate(["17+25="], SamplingParams(max_tokens=8))
        assert again.outputs[0].token_ids == text.outputs[0].token_ids
        assert all(report["ledger"]["dense_moved_bytes"] > 0 for report in llm.report())
        llm.release()
        llm.setup()
        assert (llm.logits(ids, rank=1, chunk_size=10, decode=2) == expected).all()
