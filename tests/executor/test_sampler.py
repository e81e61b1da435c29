"""Tokens are drawn from the right set with the right weights, repeatably by seed."""

import math
from collections import Counter

import pytest
import torch

from dwdp.executor.request import SamplingParams
from dwdp.executor.sampler import RequestSampler, filter_logits, top_logprobs

LOGITS = torch.log(torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2]))


def draw(params: SamplingParams, count: int = 1, logits: torch.Tensor = LOGITS) -> list[int]:
    sampler = RequestSampler(params)
    return [sampler.sample(logits)[0] for _ in range(count)]


def test_greedy_takes_the_lowest_id_of_equal_logits():
    assert draw(SamplingParams(), logits=torch.tensor([0.0, 2.0, 1.0, 2.0])) == [1]


def test_sampling_follows_the_temperature():
    counts = Counter(draw(SamplingParams(temperature=0.5, seed=1), 4000))
    weights = [p**2 for p in (0.1, 0.4, 0.05, 0.25, 0.2)]
    for token, weight in enumerate(weights):
        assert counts[token] / 4000 == pytest.approx(weight / sum(weights), abs=0.03)


def test_a_seed_repeats_a_sequence_of_draws_and_another_seed_does_not():
    first = draw(SamplingParams(temperature=1.0, seed=7), 50)
    assert draw(SamplingParams(temperature=1.0, seed=7), 50) == first
    assert draw(SamplingParams(temperature=1.0, seed=8), 50) != first


def test_top_k_keeps_the_k_best_and_top_p_the_smallest_set_that_reaches_p():
    def kept(**cuts):
        values = filter_logits(LOGITS.clone(), **cuts)
        return {i for i, value in enumerate(values.tolist()) if math.isfinite(value)}

    assert kept(top_k=2, top_p=1.0) == {1, 3}
    assert kept(top_k=0, top_p=0.6) == {1, 3}
    assert kept(top_k=0, top_p=0.66) == {1, 3, 4}
    assert kept(top_k=0, top_p=1e-9) == {1}
    assert kept(top_k=99, top_p=1.0) == {0, 1, 2, 3, 4}


def test_only_kept_tokens_are_ever_drawn():
    assert set(draw(SamplingParams(temperature=5.0, top_k=2, seed=0), 200)) == {1, 3}


def test_logprobs_are_of_the_unchanged_distribution_and_name_the_chosen_token():
    result = top_logprobs(LOGITS, 4, 2)
    assert set(result) == {1, 3, 4}
    assert result[4].logprob == pytest.approx(math.log(0.2), abs=1e-6) and result[4].rank == 3
    assert result[1].logprob == pytest.approx(math.log(0.4), abs=1e-6) and result[1].rank == 1
    assert set(top_logprobs(LOGITS, 2, 0)) == {2}


def test_logits_that_are_not_numbers_never_become_a_token():
    with pytest.raises(ValueError, match="NaN"):
        draw(SamplingParams(), logits=torch.tensor([0.0, float("nan")]))


@pytest.mark.parametrize("temperature", [1e-300, 5e-324])
def test_the_smallest_temperature_draws_the_best_token(temperature):
    params = SamplingParams(temperature=temperature, top_k=3, top_p=0.9, seed=1)
    assert draw(params, 5, logits=1000 * LOGITS) == [1] * 5
