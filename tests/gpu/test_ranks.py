"""On a GPU: `python -m pytest tests/gpu -m gpu`. Rank processes share it, or take one each where there are several.

The first test runs the scenarios' code on the fake driver, so that it is not first tried on a GPU.
"""

from __future__ import annotations

import json
import logging

import pytest

from dwdp.executor.settings import model_folder
from tests.gpu import faulty, scenarios, timelines
from tests.gpu.ranks import one_after_another, run
from tests.support.system import write_random

NANO = model_folder("nano-k3")
LARGER = {"num_experts": 16, "routed_expert_hidden_size": 1024, "moe_intermediate_size": 512, "hidden_size": 128}

logger = logging.getLogger(__name__)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_random(tmp_path_factory.mktemp("m") / "tiny", num_experts=7)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """As `larger`, with MXFP4 experts."""
    return write_random(tmp_path_factory.mktemp("m") / "packed", expert_format="mxfp4", **LARGER)


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    """Tables of many pages: 48 MiB of experts a layer."""
    return write_random(tmp_path_factory.mktemp("m") / "larger", **LARGER)


ON_THE_FAKE_DRIVER = {
    "timeline": (timelines.timeline, 5),
    "slow reads": (timelines.slow_reads, 0.2, 1),
    "faults": (faulty.every_step, 1, 60.0, 9),  # a sample of what runs on a GPU
}


@pytest.fixture(scope="module")
def on_the_fake_driver(tiny, tmp_path_factory):
    """Name -> rank -> what the scenario returned; in one pair of processes."""
    works = {name: (work, tiny, *arguments) for name, (work, *arguments) in ON_THE_FAKE_DRIVER.items()}
    works["timeline"] += (tmp_path_factory.mktemp("timeline"),)
    found = run(one_after_another, 2, works, fake=True)
    return {name: {rank: by_name[name] for rank, by_name in found.items()} for name in works}


def returned(outcome: dict) -> dict:
    failed = [text for text, _ in outcome.values() if text]
    assert not failed, "\n".join(failed)
    return {rank: value for rank, (_, value) in outcome.items()}


@pytest.mark.parametrize("scenario", [scenarios.attached, scenarios.standalone])
def test_scenarios_on_the_fake_driver(tiny, scenario):
    assert len(run(scenario, 2, tiny, fake=True)) == 2


def check_timelines(found: dict, forwards: int, layers: int) -> None:
    for counts in found.values():
        assert counts["copy"] > forwards * layers * 2 and counts["wait"] > counts["copy"], counts


def test_the_timeline_of_5_forwards_on_the_fake_driver(on_the_fake_driver):
    check_timelines(returned(on_the_fake_driver["timeline"]), 5, 4)


def check_slow_reads(found: dict) -> None:
    for counts in found.values():
        assert counts == {"of": counts["of"], "right": 0, "mutated": counts["of"], "races": ["overwritten"]}


def test_an_end_of_read_before_the_kernel_is_found_by_order_and_by_bytes_on_the_fake_driver(on_the_fake_driver):
    """Fails when copies do not wait for the end of read (the right schedule then reads wrong bytes), and when the
    runtime puts its reads elsewhere in the trace."""
    check_slow_reads(returned(on_the_fake_driver["slow reads"]))


def check_faults(found: dict) -> None:
    wrong = {rank: outcome["wrong"] for rank, outcome in found.items()}
    assert not any(wrong.values()), wrong
    logger.info("%d failures; skipped for want of time: %s", found[0]["cases"], found[0]["skipped"])
    assert not [case for case in found[0]["skipped"] if " 1 of " in case], found[0]["skipped"]
    ends = {end for outcome in found.values() for end in outcome["ends"]}
    assert ends >= {"no model", "unusable", "restored", "dense committed", "dense abandoned"}, ends


def test_a_failing_step_of_set_up_leaves_nothing_on_the_fake_driver(on_the_fake_driver):
    """Fails when something that a step made is not given back, a rank skips a collective, or a model that was loaded
    plainly is not put back."""
    check_faults(returned(on_the_fake_driver["faults"]))


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
@pytest.mark.timeout(280)
@pytest.mark.parametrize(("name", "ranks"), [("nano-k3", 2), ("nano-k3", 4), ("packed", 2)])
def test_attached_with_kernels_is_bitwise_equal_to_replicated_with_every_transfer(name, ranks, packed, monkeypatch):
    """Kernels must take the same tiles and the same form wherever weights lie. Rank processes inherit the switch."""
    monkeypatch.setenv("DWDP_KERNELS", "triton")
    found = run(scenarios.attached, ranks, NANO if name == "nano-k3" else packed, seconds=250)
    forms = {report["kernels"] for reports in found.values() for report in reports.values()}
    assert forms == {"triton"} and found[0]["batched"]["ledger"]["dense_moved_bytes"] > 0


@pytest.mark.gpu
@pytest.mark.timeout(280)
def test_standalone_with_kernels_is_bitwise_equal_to_the_instance_without_it(monkeypatch):
    monkeypatch.setenv("DWDP_KERNELS", "triton")
    run(scenarios.standalone, 2, NANO, seconds=250)


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
def test_every_failing_step_of_set_up_on_every_rank_leaves_the_gpu_as_before(tiny):
    """Further calls of a point that the time is too short for are named; a point that was never tried fails."""
    found = run(faulty.every_step, 2, tiny, 2, 85.0)
    logger.info("%s", {rank: outcome["left_bytes"] for rank, outcome in found.items()})
    check_faults(found)


@pytest.mark.gpu
def test_an_end_of_read_before_the_kernel_is_found_by_order_and_by_bytes(larger):
    """With tables that fill pages of a ring: all rows of a smaller one fit in the pages that a rank has anyway, and no
    copy can then overwrite another layer's."""
    check_slow_reads(run(timelines.slow_reads, 2, larger, 0.02, 3))


@pytest.mark.gpu
def test_the_timeline_of_50_forwards_has_no_race(tmp_path):
    check_timelines(run(timelines.timeline, 2, NANO, 50, tmp_path), 50, 13)


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
