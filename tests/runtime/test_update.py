"""Weight updates of running ranks: the next forward has the bits of the new checkpoint, or nothing has changed, or no
forward runs.

Mutation-checked once, each caught by a test below: no `invalidate_prefetch` (first layers stale); no drain before the
vote; no barrier before the first write, and neither vote nor barrier; no refill of the edges; no `renew` of the
checksums; no `assemble` of the small tensors; `began` never set (a half-updated model goes on); replicated tensors not
compared.
"""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dwdp.errors import (
    CheckpointError,
    DwdpError,
    GroupError,
    GroupTimeoutError,
    ModelReleasedError,
    ModelUnusableError,
    RankDiedError,
    VerificationError,
)
from dwdp.model.loader import WeightUpdate
from dwdp.tools.races import find_races
from dwdp.weights import mover
from dwdp.weights.transport import ExpertTransport
from tests.support.system import DENSE, prompt, replicated, shared, write_random

LENGTH = 12
FORMATS = {
    "plain": {},
    "nvfp4": {"expert_format": "nvfp4", "fp8_attention": True, "moe_intermediate_size": 32},
    "mxfp4": {"expert_format": "mxfp4", "routed_expert_hidden_size": 64},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """format -> (folder, another folder of the same config)."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        name: tuple(
            write_random(folder / f"{name}-{seed}", seed=seed, num_experts=7, num_experts_per_token=3, **changes)
            for seed in (3, 4)
        )
        for name, changes in FORMATS.items()
    }


@pytest.fixture(scope="module")
def expected(checkpoints):
    """Logits of replicated weights, by folder."""
    return {
        folder: replicated(folder, lambda rank: rank.logits(prompt(0, LENGTH)))
        for pair in checkpoints.values()
        for folder in pair
    }


def check_bits(rank, logits) -> None:
    for _ in range(2):
        assert torch.equal(rank.logits(prompt(0, LENGTH)), logits), f"rank {rank.rank}"


def changed_copy(source: Path, target: Path, change) -> Path:
    """The checkpoint with `change(tensors)` made to its one file."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


# ---- right ----


@pytest.mark.parametrize("verify", ["full", "sample", "off"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("fmt", FORMATS)
def test_logits_after_an_update_are_those_of_the_new_checkpoint_bit_for_bit(checkpoints, expected, fmt, ranks, verify):
    """Twice there and back, each row checked again by the ranks beside every forward (verify_every=1)."""
    old, new = checkpoints[fmt]
    assert not torch.equal(expected[old], expected[new])

    def body(rank):
        check_bits(rank, expected[old])
        for folder in (new, old, new):
            rank.update_weights(folder)
            check_bits(rank, expected[folder])
        rank.device.drain()
        assert rank.manager.verification_error is None
        assert rank.manager.experts.verified_forward is not None
        counters = rank.report()["counters"]
        assert counters["demand_fetches"] == counters["restarts"] == counters["synchronisations"] == 0

    shared(old, ranks, body, dense=None, dwdp={"verify_every": 1, "verify": verify})


@pytest.mark.parametrize("size, stride", [(3, 2), (3, 3)])
def test_redundant_and_capped_partitions_are_updated_too(checkpoints, expected, size, stride):
    old, new = checkpoints["nvfp4"]

    def body(rank):
        rank.update_weights(new)
        check_bits(rank, expected[new])

    shared(old, 3, body, dense=None, dwdp={"num_experts_per_worker": size, "num_prefetch_experts": stride})


@pytest.mark.parametrize("fmt", FORMATS)
def test_one_rank_and_replicated_weights_are_loaded_in_place(checkpoints, expected, fmt):
    old, new = checkpoints[fmt]

    def body(rank):
        for folder in (new, old):
            rank.update_weights(folder)
            check_bits(rank, expected[folder])

    replicated(old, body)
    shared(old, 1, body, dense=None)


def test_edge_bytes_are_those_of_the_new_owners_before_any_copy_runs(checkpoints):
    """The plans write the same bytes later, so only with verification off, which runs none, the refill shows."""
    old, new = checkpoints["plain"]
    whole = replicated(
        new, lambda rank: [{n: t.clone() for n, t in m.expert_tables().items()} for m in rank.model.moe_layers()]
    )

    def body(rank):
        rank.update_weights(new)
        edges = 0
        for table in rank.manager.experts.transport.tables:
            handle, b = table.geometry.handle, table.spec.row_nbytes
            data = whole[table.spec.pos][table.spec.name].view(-1).view(torch.uint8)[handle.page_start :]
            data = data[: handle.nbytes]
            inside = rank.domain.tensor(table.area, table.geometry.before, (len(data),), torch.uint8)
            assert torch.equal(inside, data), table.spec
            start, end = rank.manager.partition.ranges[rank.rank]
            edges += len(data) - (end - start) * b
        assert edges > 0

    shared(old, 3, body, dense=None, dwdp={"verify": "off", "host_granule_bytes": 65536})


def test_an_update_keeps_the_recorded_trace_free_of_races(checkpoints, expected):
    """Behind a whole forward, and behind one that was given up with a layer bound."""
    old, new = checkpoints["plain"]

    def body(rank):
        check_bits(rank, expected[old])
        rank.update_weights(new)
        check_bits(rank, expected[new])
        experts = rank.model.moe_layers()[1]
        forward, experts.forward = experts.forward, None  # not callable: raises between bind and finish
        with pytest.raises(TypeError):
            rank.logits(prompt(0, LENGTH))
        experts.forward = forward
        rank.update_weights(old)
        check_bits(rank, expected[old])
        ops = [{key: op.get(key) for key in ("stream", "kind", "slot", "layer", "event")} for op in rank.device.trace]
        assert find_races({"ops": ops}) == []
        return rank.report()["counters"]["synchronisations"]

    assert shared(old, 2, body, dense=None, trace=True) == [1, 1]


# ---- when ----


def test_no_rank_writes_before_every_rank_has_finished_its_step(checkpoints, expected):
    old, new = checkpoints["plain"]
    together = threading.Barrier(2)

    def body(rank):
        check_bits(rank, expected[old])
        together.wait(20)
        if rank.rank == 1:
            time.sleep(0.2)  # rank 0 is in its update by now
            check_bits(rank, expected[old])
        rank.update_weights(new)
        check_bits(rank, expected[new])

    shared(old, 2, body, dense=None)


def test_no_rank_writes_before_every_copy_is_drained(checkpoints, expected, monkeypatch):
    """A copy that is in flight when the update is called, with its rows checked behind it, has the old rows."""
    old, new = checkpoints["plain"]
    slow, run_plan, write = threading.Event(), mover.run_plan, WeightUpdate.write
    happened = []

    def held_up(plan):
        if slow.is_set() and threading.current_thread().name == "dwdp-copy":  # the update runs plans itself too
            time.sleep(0.1)
            happened.append("copy")
        run_plan(plan)

    def writing(self):
        happened.append("write")
        write(self)

    monkeypatch.setattr(mover, "run_plan", held_up)
    monkeypatch.setattr(WeightUpdate, "write", writing)
    together = threading.Barrier(2)

    def body(rank):
        together.wait(20)
        slow.set()
        check_bits(rank, expected[old])  # leaves the next forward's first copies in flight
        together.wait(20)
        rank.update_weights(new)
        slow.clear()
        check_bits(rank, expected[new])
        rank.device.drain()
        assert rank.manager.verification_error is None

    shared(old, 2, body, dense=None, dwdp={"verify_every": 1})
    first = happened.index("write")
    assert "copy" not in happened[first:] and happened.count("copy") > 8


# ---- refused, with nothing changed ----


def bad_checkpoints(good: Path, folder: Path) -> dict[str, Path]:
    def missing(tensors):
        del tensors["language_model.lm_head.weight"]

    def missing_expert(tensors):
        del tensors["language_model.model.layers.2.block_sparse_moe.experts.5.w3.weight"]

    def misshapen(tensors):
        tensors["language_model.model.norm.weight"] = torch.zeros(3)

    def long_a_log(tensors):
        tensors["language_model.model.layers.0.self_attn.A_log"][-1] = 1.0  # behind the heads

    made = {
        f.__name__: changed_copy(good, folder / f.__name__, f) for f in (missing, missing_expert, misshapen, long_a_log)
    }
    made["truncated"] = changed_copy(good, folder / "truncated", lambda _: None)
    with open(made["truncated"] / "model.safetensors", "r+b") as file:
        file.truncate(50_000)
    made["other config"] = write_random(folder / "config", seed=4, num_experts=7, num_experts_per_token=2)
    made["other format"] = write_random(
        folder / "format", seed=4, num_experts=7, num_experts_per_token=3, expert_format="nvfp4"
    )
    made["absent"] = folder / "absent"
    return made


def test_a_checkpoint_that_is_bad_on_one_rank_changes_nothing_anywhere_and_names_the_rank(
    checkpoints, expected, tmp_path
):
    old, new = checkpoints["plain"]
    bad = bad_checkpoints(new, tmp_path)

    def body(rank):
        check_bits(rank, expected[old])
        copies = rank.report()["counters"]["copies"]
        texts = {}
        for name, folder in bad.items():
            with pytest.raises(CheckpointError if rank.rank == 1 else GroupError) as caught:
                rank.update_weights(folder if rank.rank == 1 else new)
            texts[name] = str(caught.value)
            assert rank.model.unusable is None
        assert rank.report()["counters"]["copies"] == copies
        check_bits(rank, expected[old])
        rank.update_weights(new)
        check_bits(rank, expected[new])
        return texts

    first, second, third = shared(old, 3, body, dense=None)
    for name, words in {
        "missing": "lm_head.weight", "missing_expert": "experts.5.w3.weight", "misshapen": "model.norm.weight",
        "long_a_log": "A_log of 32 values has a tail",
        "truncated": "truncated", "other config": "num_experts_per_token differ",
        "other format": "quantization_config differ", "absent": "not a checkpoint folder",
    }.items():  # fmt: skip
        for text in (first[name], second[name], third[name]):
            assert "rank 1" in text and words in text and "\n" not in text, (name, text)


def test_ranks_that_are_given_different_tensors_are_refused_before_anything_changes(checkpoints, expected, tmp_path):
    old, new = checkpoints["plain"]
    other = changed_copy(
        new, tmp_path / "other", lambda t: t.update({n: v.float() for n, v in t.items() if "lm_head" in n})
    )

    def body(rank):
        with pytest.raises(CheckpointError, match="rank 2 has"):
            rank.update_weights(other if rank.rank == 2 else new)
        assert rank.model.unusable is None
        check_bits(rank, expected[old])

    shared(old, 3, body, dense=None)


def test_a_model_whose_dense_weights_have_moved_refuses_and_says_how_to_go_on(checkpoints, expected):
    old, new = checkpoints["plain"]

    def body(rank):
        with pytest.raises(DwdpError, match="dense DWDP has spread .* build and load a new model"):
            rank.update_weights(new)
        check_bits(rank, expected[old])

    shared(old, 2, body, dense=DENSE)


def test_a_released_rank_refuses(checkpoints):
    old, new = checkpoints["plain"]

    def body(rank):
        manager, model = rank.manager, rank.model
        rank.release()
        for update in (lambda: rank.update_weights(new), lambda: manager.update_weights(model, None)):
            with pytest.raises(ModelReleasedError):
                update()

    shared(old, 2, body, dense=None)


def test_a_dead_rank_is_named_before_anything_changes(checkpoints, expected, monkeypatch):
    old, new = checkpoints["plain"]

    def body(rank):
        group = rank.manager.group
        group.barrier("test: set up")
        if rank.rank == 2:
            group._peers.close()  # its sockets end without a goodbye, as when its process is killed
            return
        while 2 not in group.dead:
            time.sleep(0.01)
        with pytest.raises(DwdpError, match=r"without ranks \[2\], which are dead"):
            rank.update_weights(new)
        assert rank.model.unusable is None
        check_bits(rank, expected[old])

    shared(old, 3, body, dense=None)


def test_a_rank_that_gives_the_vote_up_when_others_are_through_it_meets_no_changed_rows(
    checkpoints, expected, monkeypatch
):
    """Nobody writes before the barrier, to which that rank does not come. Fails without the barrier."""
    old, new = checkpoints["plain"]
    over = threading.Barrier(2)

    def body(rank):
        group = rank.manager.group
        if rank.rank == 0:
            with pytest.raises(GroupError, match="rank 1"):
                rank.update_weights(new)
            over.wait(20)
            with pytest.raises(ModelUnusableError):  # it cannot know whether rank 1 was through
                rank.logits(prompt(0, LENGTH))
            over.wait(20)
            return
        vote = group.vote_with

        def gives_up(*args):
            vote(*args)
            time.sleep(0.2)
            group.abort("gave up")
            raise GroupTimeoutError("gave up")

        monkeypatch.setattr(group, "vote_with", gives_up)
        with pytest.raises(GroupTimeoutError):
            rank.update_weights(new)
        over.wait(20)
        check_bits(rank, expected[old])
        over.wait(20)

    shared(old, 2, body, dense=None)


# ---- failed half way ----


def unusable_everywhere(rank, new, error: type, match: str) -> str:
    with pytest.raises(error, match=match) as caught:
        rank.update_weights(new)
    assert rank.model.unusable is not None
    for use in (lambda: rank.logits(prompt(0, LENGTH)), lambda: rank.update_weights(new)):
        with pytest.raises((ModelUnusableError, GroupError), match=match):
            use()
    return str(caught.value)


def test_a_read_error_on_one_rank_makes_every_model_unusable_with_the_first_error(checkpoints, tmp_path, monkeypatch):
    old, new = checkpoints["plain"]
    write = WeightUpdate.write

    def failing(self):
        if threading.current_thread().name.endswith("-1"):
            raise OSError("disk gone")
        write(self)

    monkeypatch.setattr(WeightUpdate, "write", failing)

    def body(rank):
        return unusable_everywhere(rank, new, OSError if rank.rank == 1 else GroupError, "disk gone")

    texts = shared(old, 3, body, dense=None)
    assert "rank 1 failed in phase 'weight update: rows'" in texts[0]


@pytest.mark.parametrize("which", ["copy of an expert", "replicated tensor", "lost byte"])
def test_rows_and_tensors_that_do_not_agree_afterwards_make_every_model_unusable(
    checkpoints, tmp_path, monkeypatch, which
):
    old, new = checkpoints["plain"]
    other = new
    if which == "lost byte":
        sum_own_rows = ExpertTransport.sum_own_rows

        def then_lose(self):
            sums = sum_own_rows(self)
            if self.rank == 1:
                self._own_rows(self.tables[1])[-1].view(-1).view(torch.uint8)[5] ^= 1
            return sums

        monkeypatch.setattr(ExpertTransport, "sum_own_rows", then_lose)
    else:
        name = "lm_head.weight" if "replicated" in which else "model.layers.1.block_sparse_moe.experts.2.w2.weight"
        other = changed_copy(new, tmp_path / "other", lambda tensors: tensors[f"language_model.{name}"].neg_())
    words = {
        "copy of an expert": "layer 1 table w2 expert 2 differs on rank 0 and rank 1",
        "replicated tensor": "the replicated tensors .checksum.",
        "lost byte": "copied from rank",
    }[which]

    def body(rank):
        unusable_everywhere(rank, other if rank.rank == 1 else new, (VerificationError, GroupError), words)

    shared(old, 3, body, dense=None, dwdp={"num_experts_per_worker": 3, "num_prefetch_experts": 2})


def test_an_interrupt_half_way_tells_the_peers(checkpoints, monkeypatch):
    old, new = checkpoints["plain"]
    write = WeightUpdate.write

    def interrupted(self):
        if threading.current_thread().name.endswith("-1"):
            raise KeyboardInterrupt
        write(self)

    monkeypatch.setattr(WeightUpdate, "write", interrupted)
    told = threading.Barrier(2)

    def body(rank):
        with pytest.raises(KeyboardInterrupt if rank.rank == 1 else GroupError) as caught:
            rank.update_weights(new)
        told.wait(20)
        with pytest.raises(ModelUnusableError):
            rank.logits(prompt(0, LENGTH))
        return str(caught.value)

    texts = shared(old, 2, body, dense=None)
    assert "rank 1" in texts[0] and "interrupted" in texts[0]


def test_a_rank_that_dies_half_way_is_named_and_the_others_do_not_run_on(checkpoints, monkeypatch):
    old, new = checkpoints["plain"]
    write = WeightUpdate.write

    class Died(BaseException):
        """What nothing in the rank reacts to, as when its process is killed."""

    def dying(self):
        if threading.current_thread().name.endswith("-2"):
            raise Died
        write(self)

    monkeypatch.setattr(WeightUpdate, "write", dying)
    over = threading.Barrier(3)

    def body(rank):
        group = rank.manager.group
        if rank.rank == 2:
            group.abort = lambda reason: None
            with pytest.raises(Died):
                rank.update_weights(new)
            group._peers.close()
            over.wait(20)
            return
        with pytest.raises(RankDiedError, match="rank 2"):
            rank.update_weights(new)
        over.wait(20)
        with pytest.raises(ModelUnusableError, match="rank 2"):
            rank.logits(prompt(0, LENGTH))

    shared(old, 3, body, dense=None)


def test_without_a_group_a_failed_update_marks_the_model_too(checkpoints, expected, monkeypatch):
    old, new = checkpoints["plain"]

    def body(rank):
        with pytest.raises(CheckpointError, match="rank 0: "):
            rank.update_weights("absent")
        check_bits(rank, expected[old])
        monkeypatch.setattr(WeightUpdate, "write", lambda self: (_ for _ in ()).throw(OSError("disk gone")))
        with pytest.raises(OSError, match="disk gone"):
            rank.update_weights(new)
        with pytest.raises(ModelUnusableError, match="disk gone"):
            rank.logits(prompt(0, LENGTH))

    replicated(old, body)
