"""Ranks that step together: the tokens of replicated weights, whatever each rank has to do, and a named end of all
when one of them fails."""

from __future__ import annotations

import datetime
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist

from dwdp import LLM, SamplingParams
from dwdp.errors import CheckpointError, DwdpError, GroupError, GroupTimeoutError, ModelUnusableError, RankDiedError
from dwdp.executor.messages import WorkItem
from dwdp.group.backends import StoreGroup
from dwdp.group.ranks import Host
from dwdp.group.tensors import TensorExchange
from dwdp.group.threads import run_rank_threads
from dwdp.model.loader import WeightUpdate
from dwdp.model.lockstep import LockstepExperts
from tests.executor.checkpoints import write_tiny
from tests.support.groups import free_port
from tests.support.mpirun import environment, mpirun, segments  # noqa: F401  (a fixture of this module)
from tests.support.system import lockstep, prompt, replicated, write_random
from tests.test_llm import alive
from tests.tools.test_cli import finish, start

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Seven experts: neither two nor three ranks divide them evenly."""
    torch.set_num_threads(1)
    return write_random(tmp_path_factory.mktemp("m") / "model", num_experts=7)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny"), num_experts=7)


def joined(group) -> TensorExchange:
    group.join({})
    return TensorExchange(group)


def items(rank: int, *lengths: tuple[int, int], **params) -> list[WorkItem]:
    """A work item for each (prompt length, output length)."""
    return [
        WorkItem(i, prompt(10 * rank + i, length), SamplingParams(max_tokens=out, ignore_eos=True, **params))
        for i, (length, out) in enumerate(lengths)
    ]


WORK = {0: [(9, 6), (4, 2)], 1: [(3, 1)], 2: [(17, 3), (1, 9), (2, 2)]}


@pytest.mark.parametrize("n", [2, 3])
def test_unequal_prompts_and_outputs_give_the_tokens_and_logits_of_replicated_weights(model, n):
    def whole(rank):
        found = []
        for r in range(n):
            rows = [result.token_ids for result in rank.generate(items(r, *WORK[r]))]
            found.append((rows, rank.logits(prompt(r, 5 + 6 * r), chunk_size=4 - r, decode=r)))
        return found

    def body(rank):
        assert rank.model.moe_layers()[0].num_rows == (7 // n) + (rank.rank < 7 % n)
        rows = [result.token_ids for result in rank.generate(items(rank.rank, *WORK[rank.rank]))]
        return rows, rank.logits(prompt(rank.rank, 5 + 6 * rank.rank), chunk_size=4 - rank.rank, decode=rank.rank)

    for (tokens, logits), (expected, reference) in zip(lockstep(model, n, body), replicated(model, whole)):
        assert tokens == expected
        assert (logits - reference).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("expert_format", "dtype"), [("mxfp4", "float32"), ("nvfp4", "float32"), ("plain", "bfloat16")]
)
def test_packed_experts_and_bf16_are_divided_too(tmp_path, expert_format, dtype):
    folder = write_random(
        tmp_path / "m", expert_format=expert_format, num_experts=7, moe_intermediate_size=32,
        routed_expert_hidden_size=64,
    )  # fmt: skip
    expected = replicated(folder, lambda rank: rank.logits(prompt(0, 12), decode=2), dtype=dtype)
    tolerance = TOLERANCE if dtype == "float32" else 0.05 * expected.abs().max()
    for logits in lockstep(folder, 2, lambda rank: rank.logits(prompt(0, 12), decode=2), dtype=dtype):
        assert (logits - expected).abs().max() < tolerance


def test_sampled_tokens_are_those_of_replicated_weights(model):
    def generate(rank):
        return [one.token_ids for one in rank.generate(items(0, (5, 8), (3, 4), temperature=1.0, seed=7))]

    expected = replicated(model, generate)
    assert lockstep(model, 2, generate) == [expected, expected]


def test_a_rank_without_requests_runs_no_forward_and_holds_nobody_up(model):
    """Fails when a rank returns from a call without accompanying the others: they then wait for the deadline."""
    work = items(0, (5, 4), (2, 1), (8, 7), (1, 3), (6, 2))

    def body(rank):
        results = rank.generate(work if rank.rank == 0 else [])
        return [one.token_ids for one in results], rank.report()["counters"]["forwards"]

    expected = replicated(model, lambda rank: [one.token_ids for one in rank.generate(work)])
    busy, *idle = lockstep(model, 3, body)
    assert busy == (expected, 5 + 6)
    assert idle == [([], 0)] * 2


class _Contributions:
    """Stands in for RoutedExperts whose experts here add `value` to every token."""

    dtype = torch.float32

    def __init__(self, value: float) -> None:
        self.value = value

    def contributions(self, x, ids, weights):
        return torch.full(x.shape, self.value)


def test_what_the_ranks_add_to_a_token_is_summed_in_rank_order_on_every_rank():
    """(1e8 - 1e8) + 1 is 1, and 0 in float32 when the 1 is added to one of the large ones first.

    Fails when the sum begins with the rank's own part or runs backwards.
    """
    values = [1e8, -1e8, 1.0]

    def body(group):
        group.join({})
        with TensorExchange(group) as exchange:
            experts = _Contributions(values[group.rank])
            step = LockstepExperts(exchange, [experts])
            for tokens in ([2, 0, 3], [1, 1, 1]):
                own = tokens[group.rank]
                assert step.begin(own)
                ids = torch.zeros((own, 1), dtype=torch.int64)
                total = experts.lockstep.routed(experts, torch.zeros(own, 4), ids, torch.zeros(own, 1))
                assert torch.equal(total, torch.ones(own, 4))
            assert not step.begin(0)
            group.barrier("done")

    run_rank_threads(3, body, timeout=20)


def test_a_rank_in_another_step_or_with_other_tokens_than_it_announced_is_refused():
    def body(group):
        with joined(group) as exchange:
            step = LockstepExperts(exchange, [])
            step.begin(1)
            with pytest.raises(GroupError, match="brings 2 tokens to a step that began with 1"):
                step.routed(_Contributions(0.0), torch.zeros(2, 4), torch.zeros(2, 1), torch.zeros(2, 1))
            step._steps += group.rank
            with pytest.raises(GroupError, match="different steps .rank 0: 1, rank 1: 2"):
                step.begin(1)

    run_rank_threads(2, body, timeout=20)


def test_ranks_of_several_hosts_are_refused_by_name():
    store, refused = dist.HashStore(), {}

    def run(rank):
        host = Host(f"boot-{rank}", ("here", "there")[rank])
        with StoreGroup(store, rank, 2, token="a secret of the test", host=host, timeout_seconds=20) as group:
            group.join({})
            with pytest.raises(DwdpError) as caught:
                TensorExchange(group)
            refused[rank] = str(caught.value)
            group.barrier("refused")

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(refused) == 2 and all("host here (rank 0), host there (rank 1)" in text for text in refused.values())


def test_a_rank_that_does_not_come_ends_the_wait_of_the_others_at_the_deadline():
    ended = threading.Event()

    def body(group):
        with joined(group) as exchange:
            if group.rank == 1:
                ended.wait(20)
                return
            group.timeout_seconds = 1.0
            exchange._gloo.set_timeout(datetime.timedelta(seconds=1))
            with pytest.raises(GroupTimeoutError, match="within 1 s .*DWDP_RENDEZVOUS_TIMEOUT_S"):
                exchange.all_gather(torch.zeros(1))
            with pytest.raises(GroupError, match="has left the step"):
                exchange.all_gather(torch.zeros(1))
            ended.set()

    run_rank_threads(2, body, timeout=20)


def test_a_rank_that_fails_in_a_step_ends_it_for_the_others_with_its_reason(model):
    """Fails when the loop does not abort the exchange: the others then wait for the rank until the deadline."""
    seen = {}

    def body(rank):
        if rank.rank == 1:
            rank.model.model.layers[3].register_forward_pre_hook(lambda *_: 1 / 0)
        started = time.monotonic()
        try:
            rank.generate(items(rank.rank, (4, 3)))
        except (ZeroDivisionError, GroupError) as error:
            seen[rank.rank] = (error, time.monotonic() - started)

    lockstep(model, 3, body, timeout=30)
    assert isinstance(seen[1][0], ZeroDivisionError)
    for rank in (0, 2):
        error, seconds = seen[rank]
        assert isinstance(error, GroupError) and seconds < 5
        assert "rank 1" in str(error) and "division by zero" in str(error)


def test_a_rank_that_fails_between_its_calls_ends_the_steps_of_the_others(model):
    """Fails when a rank that leaves with an error does not abort the exchange: its teardown then waits for the
    others, who wait for its part of a step."""
    seen = {}

    def body(rank):
        if rank.rank == 1:
            raise OSError("disk gone")
        started = time.monotonic()
        with pytest.raises(GroupError, match="rank 1.*disk gone") as caught:
            rank.generate(items(rank.rank, (4, 3)))
        seen[rank.rank] = (caught.value, time.monotonic() - started)

    with pytest.raises(OSError, match="disk gone"):
        lockstep(model, 2, body, timeout=30)
    assert seen[0][1] < 5


# ---- weight updates ----


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Other weights for the config of `model`."""
    return write_random(tmp_path_factory.mktemp("other") / "other", seed=8, num_experts=7)


def completions(rank):
    return [result.token_ids for result in rank.generate(items(rank.rank, (5, 4)))]


def test_weights_are_updated_on_all_ranks(model, other):
    def body(rank):
        rank.update_weights(other)
        updated = completions(rank)
        rank.update_weights(model)
        return updated, completions(rank)

    assert lockstep(model, 2, body) == list(zip(lockstep(other, 2, completions), lockstep(model, 2, completions)))


def test_a_rank_whose_checkpoint_is_unreadable_stops_the_update_of_all(model, other, monkeypatch):
    """Fails when the ranks do not vote: those that could read it then compute with the old experts of the others."""
    expected = lockstep(model, 2, completions)
    real = WeightUpdate._check_values

    def body(rank):
        broken.rank = rank.rank
        with pytest.raises((CheckpointError, GroupError), match="rank 1.*unreadable"):
            rank.update_weights(other)
        return completions(rank)

    broken = threading.local()

    def check_values(update):
        if broken.rank == 1:
            raise CheckpointError("unreadable")
        real(update)

    monkeypatch.setattr(WeightUpdate, "_check_values", check_values)
    assert lockstep(model, 2, body) == expected


def test_after_an_update_that_failed_half_way_no_rank_steps_and_all_can_be_released(model, other, monkeypatch):
    """Fails when a rank begins a step with a model it may not run: that ends the steps of the instance for good."""
    broken = threading.local()
    real = WeightUpdate.write

    def write(update):
        real(update)
        if broken.rank == 1:
            raise OSError("half way")

    def body(rank):
        broken.rank = rank.rank
        with pytest.raises((OSError, GroupError), match="half way"):
            rank.update_weights(other)
        for _ in range(2):
            with pytest.raises(ModelUnusableError, match="half way"):
                completions(rank)
        assert not rank.exchange.broken

    monkeypatch.setattr(WeightUpdate, "write", write)
    lockstep(model, 2, body)


def test_ranks_with_different_models_dtypes_or_sizes_are_named_with_what_differs(model):
    def settings_of(rank, settings):
        return msgspec.structs.replace(settings, dtype="bfloat16") if rank else settings

    with pytest.raises(GroupError, match="rank 0.*rank 1.*dtype"):
        lockstep(model, 2, lambda rank: None, settings_of=settings_of, timeout=20)


# ---- rank processes ----

PARAMS = [SamplingParams(max_tokens=k, ignore_eos=True) for k in (6, 2, 4)]


def listening() -> dict[int, set[str]]:
    """Inode -> local address of every TCP socket of this machine that listens."""
    found = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                found[int(fields[9])] = fields[1].rpartition(":")[0]
    return found


def sockets_of(pid: int) -> set[int]:
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    return {int(link[8:-1]) for link in links if link.startswith("socket:")}


def test_nano_k3_answers_as_with_replicated_weights_and_everything_listens_on_loopback(warm_start):
    prompts = ["123+456=", "900-77=", "5+6="]

    def run(llm):
        texts = [output.outputs[0].text for output in llm.generate(prompts, PARAMS)]
        one = llm.generate("5+6=", PARAMS[0])[0].outputs[0].text  # the other rank has nothing to do
        return texts, one, llm.logits(list(range(20, 33)), rank=1, chunk_size=5, decode=2)

    with warm_start(), LLM("nano-k3", ranks=2, replicated=True, device="cpu", quiet=True) as llm:
        expected = run(llm)
    with warm_start(), LLM("nano-k3", tp_size=2, attention_dp=True, device="cpu", quiet=True) as llm:
        found = run(llm)
        reports = llm.report()
        pids = [report["pid"] for report in reports]
        addresses = {
            address
            for inode, address in listening().items()
            for pid in [*pids, os.getpid()]
            if inode in sockets_of(pid)
        }
        llm.release()
        llm.setup()
        assert run(llm)[:2] == expected[:2]
    assert found[:2] == expected[:2] and (found[2] - expected[2]).abs().max() < TOLERANCE
    assert addresses == {"0100007F"}
    assert all(report["ledger"]["moved_bytes"] == 0 and report["counters"]["forwards"] > 0 for report in reports)
    assert not alive(pids)


def test_a_rank_killed_in_a_step_is_named_and_everything_is_ended(tiny):
    with LLM(tiny, tp_size=2, attention_dp=True, device="cpu", quiet=True) as llm:
        pids = [report["pid"] for report in llm.report()]
        killer = threading.Timer(1.0, os.kill, (pids[1], signal.SIGKILL))
        killer.start()
        with pytest.raises(RankDiedError, match="rank 1 died"):
            llm.generate(["a", "b"], SamplingParams(max_tokens=4000, ignore_eos=True))
        killed = time.monotonic()
        assert not alive(pids)
    assert time.monotonic() - killed < 5


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "server.yaml"
    path.write_text("tp_size: 2\nattention_dp: true\ndense_dwdp: {enabled: true, min_bytes: 1, copy: per_slice}\n")
    return ["--config", str(path), "--quiet"]


RUN = ("--prompt", "a", "--prompt", "bc", "--prompt", "d", "--max-tokens", "3", "--ignore-eos", "--json")


@pytest.fixture(scope="module")
def together(tiny, config):
    """The document of a run with ranks of its own."""
    return finish(start(tiny, *RUN, *config))


def test_the_command_runs_it_by_its_config_with_its_own_ranks_and_with_independent_processes(tiny, config, together):
    run = (*RUN, *config)
    whole = finish(start(tiny, *run, "--replicated"))
    tokens = [[output["token_ids"] for output in one["outputs"]] for one in (together, whole)]
    assert tokens[0] == tokens[1]
    assert together["partition"] == {"kind": "balanced", "ranges": [[0, 4], [4, 7]]} and whole["partition"] is None
    assert len(together["ranks"]) == len(whole["ranks"]) == 2
    assert [one["ledger"]["moved_bytes"] > 0 for one in (*together["ranks"], *whole["ranks"])] == [
        True,
        True,
        False,
        False,
    ]

    address = {"DWDP_MASTER_ADDR": "127.0.0.1", "DWDP_MASTER_PORT": str(free_port())}
    processes = [start(tiny, *run, env=address | {"DWDP_RANK": str(rank)}) for rank in (0, 1)]
    documents = [finish(process) for process in processes]
    assert documents[0]["outputs"] + documents[1]["outputs"] == [together["outputs"][i] for i in (0, 2, 1)]
    assert [one["ranks"][0]["ledger"] for one in documents] == [one["ledger"] for one in together["ranks"]]


def test_an_independent_process_names_the_rank_that_died_in_a_step(tiny, config):
    address = {"DWDP_MASTER_ADDR": "127.0.0.1", "DWDP_MASTER_PORT": str(free_port())}
    run = ("--prompt", "a", "--prompt", "b", "--max-tokens", "4000", "--ignore-eos", "--json", *config)
    processes = [start(tiny, *run, env=address | {"DWDP_RANK": str(rank)}) for rank in (0, 1)]
    try:
        deadline = time.monotonic() + 60
        while not all("dense" in Path(f"/proc/{one.pid}/maps").read_text() for one in processes):
            assert time.monotonic() < deadline and processes[0].poll() is None
            time.sleep(0.1)
        time.sleep(1.0)
        processes[0].kill()
        out, err = processes[1].communicate(timeout=10)
        assert processes[1].returncode == 1 and out == ""
        assert len(err.splitlines()) == 1 and "rank 0" in err and "died" in err
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_processes_that_meet_over_mpi_step_together_on_a_store_that_rank_0_serves(tiny, config, together):
    command = [*mpirun("-n", "2"), sys.executable, "-m", "dwdp.tools.cli", "generate", "--model", str(tiny)]
    done = subprocess.run(
        [*command, "--device", "cpu", *RUN, *config], env=environment(), capture_output=True, text=True, timeout=90
    )
    documents = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda one: one["ranks"][0]["rank"])
    assert done.returncode == 0 and len(documents) == 2, done.stderr
    assert documents[0]["outputs"] + documents[1]["outputs"] == [together["outputs"][i] for i in (0, 2, 1)]
