"""Packed batches: each sequence gets what it would get alone, and no other's state is touched."""

from __future__ import annotations

import pytest
import torch

from dwdp.kernels.batch import PackedBatch
from dwdp.model import decoder
from dwdp.model.state import KdaState
from tests.support.tiny import tiny_48b_config_dict, tiny_model, tiny_model_config, token_ids

CONFIG = tiny_model_config()
# Rounding of fp32 sums in another order, on logits of scale 4; see tests/model/test_decoder.py.
CLOSE = dict(atol=5e-5, rtol=0)


@pytest.fixture(scope="module")
def model():
    return tiny_model(CONFIG)


def prompts(*lengths: int) -> list[torch.Tensor]:
    return [token_ids(n, seed=n)[0] for n in lengths]


def tensors(state) -> list[torch.Tensor]:
    return [
        t.clone()
        for layer in state.layers.values()
        for t in ((layer.conv, layer.recurrent) if isinstance(layer, KdaState) else (layer.rows,))
    ]


def run(model, state, ids: list[torch.Tensor], **options):
    return model(torch.cat(ids), state, lengths=[len(one) for one in ids], **options)


def test_prefill_chunks_and_decode_equal_one_by_one(model):
    """Sequences at every stage in one batch: new ones, second chunks, single tokens. Mutation: `starts` of zero for
    all, or the sequences' bounds moved by one, fail here."""
    state = model.new_state(4, 160)
    alone = [model.new_state(1, 160) for _ in range(4)]
    for lengths, slots in [((5, 64, 1), (0, 1, 2)), ((70, 1, 3, 2), (3, 0, 2, 1)), ((1, 1, 1, 1), (0, 1, 2, 3))]:
        ids = [(one + 7 * len(slots)) % CONFIG.vocab_size for one in prompts(*lengths)]
        before = [state.lengths[slot] for slot in slots]
        got = run(model, state, ids, slots=slots)
        assert got.shape == (sum(lengths), CONFIG.vocab_size)
        for part, one, slot in zip(got.split(lengths), ids, slots):
            torch.testing.assert_close(part, model(one[None], alone[slot])[0], **CLOSE)
        assert [state.lengths[slot] for slot in slots] == [a + n for a, n in zip(before, lengths)]
    assert state.lengths == [5 + 1 + 1, 64 + 2 + 1, 1 + 3 + 1, 70 + 1]
    for together, one in zip(tensors(state), zip(*map(tensors, alone))):
        torch.testing.assert_close(together, torch.cat(one), atol=5e-5, rtol=0)


def test_without_a_state_and_with_the_predecessors_switches():
    from dwdp.model.config import ModelConfig

    model = tiny_model(ModelConfig.from_dict(tiny_48b_config_dict()))
    ids = prompts(3, 66)
    for part, one in zip(run(model, None, ids).split((3, 66)), ids):
        torch.testing.assert_close(part, model(one[None])[0], **CLOSE)


def test_the_other_sequences_of_a_state_keep_their_bits(model):
    state = model.new_state(3, 16)
    run(model, state, prompts(4, 5, 6))
    before = tensors(state)
    run(model, state, prompts(2), slots=[1])
    assert state.lengths == [4, 7, 6]
    for old, new in zip(before, tensors(state)):
        assert torch.equal(old[[0, 2]], new[[0, 2]])
        assert not torch.equal(old[1], new[1])


def test_last_only_gives_the_last_token_of_each(model):
    ids = prompts(3, 1, 7)
    whole = run(model, None, ids)
    torch.testing.assert_close(run(model, None, ids, last_only=True), whole[[2, 3, 10]], **CLOSE)


def test_a_packed_forward_that_raises_leaves_the_state_as_it_was(model, monkeypatch):
    state, twin = model.new_state(3, 24), model.new_state(3, 24)
    for one in (state, twin):
        run(model, one, prompts(4, 5, 6))
    before = [t for t in tensors(state)]

    class Injected(RuntimeError):
        pass

    def failing(*args):
        raise Injected

    with monkeypatch.context() as patched:
        patched.setattr(decoder.LatentMoE, "forward", failing)
        with pytest.raises(Injected):
            run(model, state, prompts(7, 3), slots=[2, 0])
    assert state.lengths == [4, 5, 6]
    kda = [i for i, (a, b) in enumerate(zip(before, tensors(state))) if torch.equal(a, b)]
    assert len(kda) >= 6
    for slots in ([2, 0], [0, 1]):
        assert torch.equal(run(model, state, prompts(7, 3), slots=slots), run(model, twin, prompts(7, 3), slots=slots))
    for a, b in zip(tensors(state), tensors(twin)):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("lengths", "options", "words"),
    [
        ([2, 3], {}, "the 5 tokens of lengths"),
        ([4, 0], {}, "at least one new token"),
        ([2, 2], {"slots": [1, 1]}, "not different places of a state of 3"),
        ([2, 2], {"slots": [0, 3]}, "not different places of a state of 3"),
        ([2, 2], {"slots": [0, -1]}, "not different places"),
        ([2, 2], {"slots": [0]}, "2 lengths has 1 slots"),
        ([1, 1, 1, 1], {}, "not different places of a state of 3"),
        ([4], {"slots": [2]}, "room for 8 tokens a sequence; the longest has 6 and 4 more"),
    ],
)
def test_batches_that_do_not_fit_are_refused_with_the_numbers(model, lengths, options, words):
    state = model.new_state(3, 8)
    run(model, state, prompts(6), slots=[2])
    before = tensors(state)
    with pytest.raises(ValueError, match=words):
        model(torch.zeros(4, dtype=torch.int64), state, lengths=lengths, **options)
    assert state.lengths == [0, 0, 6]
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(state)))


def test_slots_need_a_state_and_lengths(model):
    with pytest.raises(ValueError, match="there is none"):
        model(torch.zeros(2, dtype=torch.int64), lengths=[1, 1], slots=[0, 1])
    with pytest.raises(ValueError, match="says its lengths"):
        model(torch.zeros(1, 2, dtype=torch.int64), slots=[0])
    with pytest.raises(ValueError, match="must be the 2 tokens"):
        model(torch.zeros(1, 2, dtype=torch.int64), lengths=[2])


def test_tokens_know_their_sequence_and_position():
    batch = PackedBatch.of([3, 1, 5], starts=[10, 0, 2], slots=[2, 0, 1], state_batch=3)
    assert batch.cu_seqlens.tolist() == batch.host_cu_seqlens.tolist() == [0, 3, 4, 9]
    assert batch.token_sequences.tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 2]
    assert batch.token_positions.tolist() == [10, 11, 12, 0, 2, 3, 4, 5, 6]
    assert batch.num_tokens == 9 and not batch.in_order and PackedBatch.of([1, 2]).in_order
    assert not PackedBatch.of([1, 2], state_batch=3).in_order
