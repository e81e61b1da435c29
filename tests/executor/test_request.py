"""A request that cannot be served is refused with the field and the numbers."""

import numpy as np
import pytest

from dwdp.errors import RequestError
from dwdp.executor.request import SamplingParams, check_prompt


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 0}, ["max_tokens", "0"]),
        ({"max_tokens": 2.5}, ["max_tokens", "2.5"]),
        ({"max_tokens": True}, ["max_tokens", "True"]),
        ({"temperature": -0.5}, ["temperature", "-0.5"]),
        ({"temperature": float("nan")}, ["temperature", "nan"]),
        ({"temperature": "hot"}, ["temperature", "hot"]),
        ({"top_k": -2}, ["top_k", "-2"]),
        ({"top_p": 0.0}, ["top_p", "0.0"]),
        ({"top_p": 1.5}, ["top_p", "1.5"]),
        ({"seed": -1}, ["seed", "-1"]),
        ({"stop": ("a", "")}, ["stop"]),
        ({"stop": 3}, ["stop", "3"]),
        ({"ignore_eos": 1}, ["ignore_eos", "1"]),
        ({"logprobs": 21}, ["logprobs", "20", "21"]),
        ({"n": 2}, ["n must be 1", "2"]),
        ({"n": 1.0}, ["n", "1.0"]),
        ({"top_k": 2**63}, ["top_k", str(2**63)]),
        ({"temperature": 10**400}, ["temperature", "more than 100 digits"]),
        ({"max_tokens": np.bool_(True)}, ["max_tokens", "True"]),
        ({"stop": "a\ud800"}, ["stop", "position 1"]),
    ],
)
def test_a_bad_sampling_field_is_refused_by_name_and_value(fields, words):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**fields)
    assert all(word in str(caught.value) for word in words)


def test_one_stop_text_and_a_list_of_them_mean_the_same():
    assert SamplingParams(stop="end").stop == SamplingParams(stop=["end"]).stop == ("end",)
    assert SamplingParams(stop=None).stop == ()


def test_top_k_of_minus_one_means_all_tokens():
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


@pytest.mark.parametrize(
    ("token_ids", "max_tokens", "words"),
    [
        ([], 1, ["empty"]),
        ([1, 2, 3], 8, ["3", "8", "10"]),
        ([1, 64], 1, ["64", "position 1", "63"]),
        ([-1], 1, ["-1"]),
        ([True], 1, ["True"]),
        ([1.0], 1, ["1.0"]),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused_with_the_numbers(token_ids, max_tokens, words):
    with pytest.raises(RequestError) as caught:
        check_prompt(token_ids, SamplingParams(max_tokens=max_tokens), vocab_size=64, max_seq_len=10)
    assert all(word in str(caught.value) for word in words)


def test_a_prompt_that_fills_max_seq_len_exactly_is_taken():
    check_prompt([1, 2], SamplingParams(max_tokens=8), vocab_size=64, max_seq_len=10)


def test_numbers_of_numpy_are_taken_as_pythons():
    given = SamplingParams(max_tokens=np.int64(3), temperature=np.float32(0.5), seed=np.uint8(7), n=np.int32(1))
    assert given == SamplingParams(max_tokens=3, temperature=0.5, seed=7)
    types = [type(value) for value in (given.max_tokens, given.temperature, given.seed, given.n)]
    assert types == [int, float, int, int]
