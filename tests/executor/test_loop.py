"""The loop computes every position once, starts every forward through the manager, and ends where it
should."""

import hashlib

import pytest
import torch

from dwdp.executor.loop import SimpleLoop
from dwdp.executor.messages import WorkItem
from dwdp.executor.request import SamplingParams
from tests.support.tiny import tiny_model, tiny_model_config


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return tiny_model(tiny_model_config())


class Forwards:
    """Stands in for a manager and writes down what the loop tells it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start_forward(self) -> None:
        self.calls.append("start")

    def end_forward(self) -> None:
        self.calls.append("end")


def items(*prompts: list[int], **params) -> list[WorkItem]:
    return [WorkItem(i, prompt, SamplingParams(**params)) for i, prompt in enumerate(prompts)]


def test_greedy_tokens_are_those_of_one_forward_over_the_whole_sequence(model):
    (result,) = SimpleLoop(model).generate(items([5, 9, 11], max_tokens=6))
    logits = model(torch.tensor([[5, 9, 11, *result.token_ids]]))[0]
    assert result.token_ids == logits.argmax(-1).tolist()[2:-1]
    assert result.finish_reason == "length"


def test_a_batch_of_different_lengths_gives_each_prompt_its_own_tokens(model):
    prompts = [[5, 9, 11], [7], [1, 2, 3, 4, 5, 6]]
    work = [WorkItem(i, prompt, SamplingParams(max_tokens=k)) for i, (prompt, k) in enumerate(zip(prompts, (2, 7, 4)))]
    together = SimpleLoop(model).generate(work)
    alone = [SimpleLoop(model).generate([one])[0] for one in work]
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    assert [len(r.token_ids) for r in together] == [2, 7, 4]


def test_each_prompt_and_each_decode_step_is_one_forward_started_and_ended_by_the_manager(model):
    manager = Forwards()
    loop = SimpleLoop(model, manager)
    loop.generate(items([5], [6, 7], max_tokens=4))
    assert manager.calls == ["start", "end"] * (2 + 3)
    assert loop.forwards == 5


def test_a_forward_that_raises_is_not_counted_as_ended(model):
    manager = Forwards()
    with pytest.raises(IndexError):
        SimpleLoop(model, manager).forward(torch.tensor([[10_000]]), model.new_state(1, 1))
    assert manager.calls == ["start"]


def test_a_static_batch_holds_at_most_the_maximum(model):
    loop = SimpleLoop(model, max_batch_size=2)
    results = loop.generate(items([1], [2], [3], max_tokens=2))
    assert [r.index for r in results] == [0, 1, 2]
    assert loop.forwards == 3 + 2


def test_the_hash_covers_every_computed_position_in_order(model):
    loop = SimpleLoop(model)
    (result,) = loop.generate(items([5, 9, 11], max_tokens=4), logits_sha256=True)
    rows = loop.logits([5, 9, 11, *result.token_ids[:-1]], decode=3)
    assert rows.shape == (3 + 4 - 1, 320)
    assert result.logits_sha256 == hashlib.sha256(rows.numpy().astype("<f4").tobytes()).hexdigest()


def test_chunks_and_decode_steps_carry_the_state_on(model):
    loop = SimpleLoop(model)
    ids = list(range(20, 33))
    whole = loop.logits(ids)
    assert loop.forwards == 1
    for cut in ({"chunk_size": 4}, {"decode": 5}, {"chunk_size": 3, "decode": 13}):
        torch.testing.assert_close(loop.logits(ids, **cut), whole, atol=1e-4, rtol=0)
    assert loop.forwards == 1 + 4 + (1 + 5) + 13


def test_the_end_token_ends_a_completion_unless_it_is_ignored(model):
    free = SimpleLoop(model).generate(items([5, 9], max_tokens=6))[0].token_ids
    loop = SimpleLoop(model, eos_ids=[free[2]])
    (stopped,) = loop.generate(items([5, 9], max_tokens=6))
    assert (stopped.token_ids, stopped.finish_reason, stopped.stop_reason) == (free[:3], "stop", free[2])
    (ignored,) = loop.generate(items([5, 9], max_tokens=6, ignore_eos=True))
    assert (ignored.token_ids, ignored.finish_reason) == (free, "length")


def test_a_stop_string_may_span_tokens(model):
    free = SimpleLoop(model).generate(items([5, 9], max_tokens=6))[0].token_ids
    text = f"<{free[1]}><{free[2]}>"
    loop = SimpleLoop(model, decode=lambda ids: "".join(f"<{i}>" for i in ids))
    (stopped,) = loop.generate(items([5, 9], max_tokens=6, stop=("nowhere", text)))
    assert (stopped.token_ids, stopped.finish_reason, stopped.stop_reason) == (free[:3], "stop", text)


def test_a_seed_gives_the_same_sample_alone_and_in_a_batch(model):
    params = {"max_tokens": 5, "temperature": 1.0, "seed": 3}
    alone = SimpleLoop(model).generate(items([5, 9], **params))[0]
    beside = SimpleLoop(model).generate(items([5, 9], [8], [1, 2, 3], **params))[0]
    assert alone.token_ids == beside.token_ids


def test_a_rank_without_prompts_runs_no_forward(model):
    manager = Forwards()
    assert SimpleLoop(model, manager).generate([]) == []
    assert manager.calls == []
