"""The offline API on real rank processes: same bits with DWDP on and off, honest reports, and no orphan,
ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dwdp import LLM, SamplingParams
from dwdp.env import child_environment
from dwdp.errors import (
    CheckpointError,
    DwdpError,
    ModelReleasedError,
    ModelUnusableError,
    RankDiedError,
    RequestError,
)
from dwdp.executor import messages
from tests.executor.checkpoints import write_tiny
from tests.support.tiny import random_tensors, tiny_model_config

ROOT = Path(__file__).parent.parent
PROMPTS = ["one", [7, 8, 9, 10, 11], "three", "and a fourth", [1]]
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
# small granules, so that a tiny layer has a ring
EXPERTS = {"host_granule_bytes": 4096, "page_granules": 1}
DENSE = {"enabled": True, "min_bytes": 0}
LEDGER = {
    "moved_bytes", "expert_moved_bytes", "dense_moved_bytes", "stored_bytes", "ring_bytes", "slot_bytes",
    "freed_bytes", "replicated_bytes",
}  # fmt: skip
COUNTERS = {
    "copies", "copied_bytes", "demand_fetches", "fences", "barriers", "restarts", "synchronisations",
    "exposed_wait_seconds", "forwards", "primed_forwards",
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def replicated(tiny, warm_start):
    with warm_start():
        llm = LLM(tiny, ranks=2, replicated=True, device="cpu", quiet=True)
    with llm:
        yield llm


@pytest.fixture(scope="module")
def spread(tiny):
    """Expert and dense DWDP over two ranks."""
    with LLM(tiny, ranks=2, dwdp=EXPERTS, dense_dwdp=DENSE, device="cpu", quiet=True) as llm:
        yield llm


def alive(pids: list[int]) -> list[int]:
    def runs(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    return [pid for pid in pids if runs(pid)]


def wait_until_gone(pids: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pids)


def memfds(pid: int) -> list[str]:
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "memfd:dwdp" in line]


def answers(llm: LLM) -> list[tuple[list[int], str]]:
    outputs = llm.generate(PROMPTS, PARAMS, logits_sha256=True)
    return [(output.outputs[0].token_ids, output.outputs[0].logits_sha256) for output in outputs]


def test_tokens_and_logits_are_bitwise_the_same_with_dwdp_on_and_off(spread, replicated):
    with_dwdp = answers(spread)
    assert with_dwdp == answers(replicated)
    assert all(len(tokens) == 6 and len(digest) == 64 for tokens, digest in with_dwdp)
    assert answers(spread) == with_dwdp


def test_logits_of_either_rank_and_any_cut_are_bitwise_the_same_with_dwdp_on_and_off(spread, replicated):
    ids = list(range(40, 60))
    for rank, cut in ((0, {}), (1, {"chunk_size": 6, "decode": 3})):
        ours, whole = spread.logits(ids, rank=rank, **cut), replicated.logits(ids, rank=rank, **cut)
        assert ours.dtype == torch.float32 and ours.shape == (20, 320)
        assert torch.equal(ours, whole)


def test_one_rank_without_dwdp_gives_the_tokens_of_each_prompt(tiny, replicated):
    with LLM(tiny, device="cpu", quiet=True) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        report = llm.report()
    assert [o.outputs[0].token_ids for o in outputs] == [tokens for tokens, _ in answers(replicated)]
    assert [o.prompt for o in outputs] == ["one", None, "three", "and a fourth", None]
    assert outputs[0].prompt_token_ids == list(b"one")
    assert all(o.outputs[0].finish_reason == "length" for o in outputs)
    assert len(report) == 1 and report[0]["ledger"]["stored_bytes"] == 0


def test_prompt_i_runs_on_rank_i_mod_n_and_a_rank_without_work_runs_no_forward(spread):
    before = [report["counters"]["forwards"] for report in spread.report()]
    outputs = spread.generate(["only one"], PARAMS)
    after = [report["counters"]["forwards"] for report in spread.report()]
    assert outputs[0].rank == 0
    assert [b - a for a, b in zip(before, after)] == [6, 0]
    assert [o.rank for o in spread.generate(PROMPTS, PARAMS)] == [0, 1, 0, 1, 0]


def test_reports_have_every_key_and_the_ledger_adds_up(spread, replicated):
    for rank, (ours, whole) in enumerate(zip(spread.report(), replicated.report())):
        for report in (ours, whole):
            assert report["rank"] == rank and alive([report["pid"]]) and report["kernels"] == "torch"
            assert set(report["ledger"]) == LEDGER and set(report["counters"]) == COUNTERS
        ledger, base = ours["ledger"], whole["ledger"]
        assert ledger["moved_bytes"] == ledger["expert_moved_bytes"] + ledger["dense_moved_bytes"] > 0
        assert ledger["dense_moved_bytes"] > 0 and ledger["slot_bytes"] > 0 and ledger["ring_bytes"] > 0
        # what a rank holds now: on the host nothing but its own memory and its model
        own = ledger["stored_bytes"] + ledger["ring_bytes"] + ledger["slot_bytes"]
        assert ours["memory"] == {
            "domain_bytes": own, "torch_bytes": ledger["replicated_bytes"],
            "total_bytes": own + ledger["replicated_bytes"],
        }  # fmt: skip
        assert whole["memory"]["total_bytes"] == whole["memory"]["torch_bytes"] == base["replicated_bytes"] > 0
        # what DWDP manages and what stays replicated are together the whole model
        assert ledger["moved_bytes"] + ledger["replicated_bytes"] == base["replicated_bytes"]
        assert [base[key] for key in ("moved_bytes", "stored_bytes", "ring_bytes", "slot_bytes")] == [0] * 4
    counters = spread.report()[0]["counters"]
    assert counters["forwards"] > 0 and counters["copies"] > 0 and counters["copied_bytes"] > 0
    assert counters["primed_forwards"] >= counters["forwards"] - 1
    assert counters["demand_fetches"] == counters["fences"] == 0


def test_release_leaves_nothing_mapped_and_setup_again_gives_the_same_bits(spread):
    before, pids = answers(spread), [report["pid"] for report in spread.report()]
    assert all(memfds(pid) for pid in pids)
    for _ in range(2):
        spread.release()
        assert not any(memfds(pid) for pid in pids)
        assert [r["ledger"]["replicated_bytes"] for r in spread.report()] == [0, 0]
        assert [r["memory"]["total_bytes"] for r in spread.report()] == [0, 0]
        with pytest.raises(ModelReleasedError):
            spread.generate("no", PARAMS)
        spread.setup()
        assert [report["pid"] for report in spread.report()] == pids
        assert answers(spread) == before


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda llm: llm.generate([[]]), ["empty"]),
        (lambda llm: llm.generate("x" * 4090, SamplingParams(max_tokens=7)), ["4090", "7", "4096"]),
        (lambda llm: llm.generate([[320]]), ["320", "319"]),
        (lambda llm: llm.generate(["a", "b"], [PARAMS]), ["sampling_params", "2"]),
        (lambda llm: llm.logits([1], rank=2), ["rank", "2"]),
        (lambda llm: llm.logits([1], rank=0.0), ["rank", "0.0"]),
        (lambda llm: llm.logits([1], rank=True), ["rank", "True"]),
        (lambda llm: llm.logits([1], chunk_size=1.5), ["chunk_size", "1.5"]),
        (lambda llm: llm.logits([1], decode="1"), ["decode", "'1'"]),
        (lambda llm: llm.logits("a"), ["token_ids", "str"]),
        (lambda llm: llm.logits([2**70]), ["token_ids", str(2**70)]),
        (lambda llm: llm.generate(None), ["prompts", "NoneType"]),
        (lambda llm: llm.generate({"prompt": "a"}), ["prompts", "dict"]),
        (lambda llm: llm.generate(b"abc"), ["prompts", "bytes"]),
        (lambda llm: llm.generate([{1, 2}]), ["prompt", "set"]),
        (lambda llm: llm.generate(["a\ud800"]), ["prompt", "position 1"]),
        (lambda llm: llm.generate("a", 5), ["sampling_params", "int"]),
        (lambda llm: llm.generate(["a"], [None]), ["sampling_params", "NoneType"]),
        (lambda llm: llm.logits([1], chunk_size=0), ["chunk_size", "0"]),
        (lambda llm: llm.logits([1], decode=2), ["decode", "2"]),
        (lambda llm: llm.logits([-1]), ["-1"]),
    ],
)
def test_a_refused_request_names_its_numbers_and_the_ranks_go_on(replicated, call, words):
    with pytest.raises(RequestError) as caught:
        call(replicated)
    assert all(word in str(caught.value) for word in words)
    assert len(replicated.generate("still here", PARAMS)) == 1


def test_arrays_are_prompts_row_by_row_and_a_chunk_may_be_longer_than_the_prompt(replicated):
    def tokens(prompts):
        return [output.prompt_token_ids for output in replicated.generate(prompts, PARAMS)]

    assert tokens(np.array([1, 2])) == tokens(torch.tensor([1, 2])) == tokens((1, 2)) == [[1, 2]]
    assert tokens(np.array([[1, 2], [3, 4]])) == tokens(torch.tensor([[1, 2], [3, 4]])) == [[1, 2], [3, 4]]
    assert tokens([torch.tensor([5]), torch.tensor([6])]) == [[5], [6]]
    whole = replicated.logits([1, 2, 3])
    assert torch.equal(replicated.logits([1, 2, 3], rank=np.int64(0), chunk_size=2**70), whole)


def test_sampling_is_repeatable_and_stop_strings_are_cut(replicated):
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=5, logprobs=1)
    first, second = (replicated.generate("abc", params)[0].outputs[0] for _ in range(2))
    assert first == second
    assert len(first.logprobs) == 20 and first.cumulative_logprob < 0
    text = next(c for c in first.text if c.isascii())
    stopped = replicated.generate("abc", SamplingParams(max_tokens=20, temperature=1.0, seed=5, stop=text))
    assert stopped[0].outputs[0].text == first.text[: first.text.index(text)]
    assert stopped[0].outputs[0].finish_reason == "stop"


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Other weights for the same config."""
    folder = tmp_path_factory.mktemp("other")
    return write_tiny(folder, tensors=random_tensors(tiny_model_config(), seed=5))


def test_weights_are_updated_in_the_running_ranks_and_a_bad_checkpoint_changes_nothing(
    tiny, other, replicated, tmp_path, warm_start
):
    old = answers(replicated)
    bad = write_tiny(tmp_path / "bad", num_experts_per_token=2)
    with warm_start(), LLM(tiny, ranks=2, dwdp=EXPERTS | {"verify_every": 1}, device="cpu", quiet=True) as llm:
        pids = [report["pid"] for report in llm.report()]
        assert answers(llm) == old
        llm.update_weights(other)
        new = answers(llm)
        assert new != old
        for folder, words in (
            (bad, "num_experts_per_token differ"),
            (tmp_path / "none", r"does not exist \(update_weights takes"),
        ):
            with pytest.raises(CheckpointError, match=words) as caught:
                llm.update_weights(folder)
            assert "\n" not in str(caught.value) and ("rank " in str(caught.value) or folder != bad)
        assert answers(llm) == new
        llm.release()
        with pytest.raises(ModelReleasedError):
            llm.update_weights(tiny)
        llm.setup()
        assert answers(llm) == new, "a set-up behind an update loads the new weights"
        llm.update_weights(tiny)
        assert answers(llm) == old and [report["pid"] for report in llm.report()] == pids
    with warm_start(), LLM(tiny, ranks=2, replicated=True, device="cpu", quiet=True) as llm:
        llm.update_weights(other)
        assert answers(llm) == new
        with pytest.raises(CheckpointError, match="rank .: .*num_experts_per_token differ"):
            llm.update_weights(bad)
        assert answers(llm) == new


@pytest.mark.parametrize("interrupted", [False, True])
def test_replicated_ranks_of_which_one_failed_in_an_update_compute_nothing_until_set_up_again(
    tiny, other, replicated, monkeypatch, warm_start, interrupted
):
    """They have no group to vote in. Fails when the front end does not tell the ranks that have the new weights."""
    old = answers(replicated)
    with warm_start(), LLM(tiny, ranks=2, replicated=True, device="cpu", quiet=True) as llm:
        real = llm._frontend.call

        def call(commands):
            if isinstance(commands[0], messages.UpdateWeights) and not commands[0].check_only:
                if interrupted:
                    raise KeyboardInterrupt
                commands[1] = messages.UpdateWeights(commands[1].call, "/nonexistent")
            return real(commands)

        monkeypatch.setattr(llm._frontend, "call", call)
        with pytest.raises(KeyboardInterrupt if interrupted else CheckpointError):
            llm.update_weights(other)
        monkeypatch.undo()
        for step in (lambda: answers(llm), lambda: llm.logits([1, 2]), lambda: llm.update_weights(other)):
            with pytest.raises(ModelUnusableError, match="a weight update that not every rank has done"):
                step()
        llm.release()
        llm.setup()
        assert answers(llm) == old


def test_an_update_of_weights_that_dense_dwdp_has_moved_is_refused(spread, other):
    before = answers(spread)
    with pytest.raises(DwdpError, match="dense DWDP has spread this model's weights .* build and load a new model"):
        spread.update_weights(other)
    assert answers(spread) == before


def test_a_killed_rank_is_named_and_everything_is_ended(tiny):
    with LLM(tiny, ranks=2, device="cpu", quiet=True) as llm:
        pids = [report["pid"] for report in llm.report()]
        os.kill(pids[1], signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(RankDiedError, match="rank 1 died") as caught:
            while True:
                llm.generate("abc", PARAMS)
        assert caught.value.rank == 1 and time.monotonic() - started < 2
        assert not alive(pids)
        errors = []
        for _ in range(2):
            with pytest.raises(RankDiedError, match="rank 1 died") as caught:
                llm.report()
            errors.append(caught.value)
        assert errors[0] is not errors[1]  # the same one would gather the frames of every raise


def test_close_ends_the_ranks_and_may_be_called_again(tiny):
    llm = LLM(tiny, device="cpu", quiet=True)
    pids = [report["pid"] for report in llm.report()]
    llm.close()
    llm.close()
    assert not alive(pids)
    with pytest.raises(DwdpError, match="closed"):
        llm.generate("abc")


def test_interrupts_while_it_closes_are_raised_when_nothing_is_left(tiny, monkeypatch):
    """Ctrl-C again and again. Fails when an interrupt ends the clean-up: the folder of sockets stays then."""
    llm = LLM(tiny, ranks=2, replicated=True, device="cpu", quiet=True)
    pids = [report["pid"] for report in llm.report()]
    folder = Path(llm._frontend._folder)
    real_join, real_term, interrupts = threading.Thread.join, llm._frontend._context.term, [1, 2]

    def join(thread, *args):
        if len(interrupts) == 2 and threading.current_thread() is threading.main_thread():
            interrupts.pop()
            raise KeyboardInterrupt
        real_join(thread, *args)

    def term():
        if interrupts:
            interrupts.pop()
            raise KeyboardInterrupt
        real_term()

    monkeypatch.setattr(threading.Thread, "join", join)
    monkeypatch.setattr(llm._frontend, "_context", SimpleNamespace(term=term))
    with pytest.raises(KeyboardInterrupt):
        llm.close()
    assert not interrupts and not folder.exists() and not alive(pids)
    llm.close()


def test_close_of_another_thread_ends_a_call_under_way(tiny):
    llm = LLM(tiny, device="cpu", quiet=True)
    pids = [report["pid"] for report in llm.report()]
    raised = []

    def generate():
        try:
            llm.generate("a", SamplingParams(max_tokens=4000, ignore_eos=True))
        except DwdpError as error:
            raised.append(str(error))

    thread = threading.Thread(target=generate)
    thread.start()
    time.sleep(0.5)
    llm.close()
    thread.join(5)
    assert raised == ["the LLM is closed"] and not alive(pids)


def test_a_frozen_rank_delays_close_by_its_bound_only(tiny):
    llm = LLM(tiny, device="cpu", quiet=True)
    pids = [report["pid"] for report in llm.report()]
    os.kill(pids[0], signal.SIGSTOP)
    started = time.monotonic()
    llm.close()
    assert not alive(pids) and time.monotonic() - started < 8


PARENT = """
import sys
from dwdp import LLM
llm = LLM(sys.argv[1], ranks=2, device="cpu", quiet=True)
print(llm._frontend._folder, *[report["pid"] for report in llm.report()], flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("frozen", [False, True])
def test_ranks_leave_by_themselves_when_their_parent_is_killed(tiny, frozen):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tiny)],
        env=child_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        folder, *pids = parent.stdout.readline().split()
        pids = [int(pid) for pid in pids]
        assert len(alive(pids)) == 2 and Path(folder).stat().st_mode & 0o777 == 0o700
        if frozen:
            os.kill(pids[0], signal.SIGSTOP)
    finally:
        parent.kill()
        parent.wait()
    wait_until_gone(pids, 5)
    assert not Path(folder).exists()
