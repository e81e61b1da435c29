"""generation_config.json: what a request has that does not say; what it says wins; bad values are one line."""

import json
import logging
from types import SimpleNamespace

import pytest

from dwdp.errors import CheckpointError, RequestError
from dwdp.executor.generation import read_sampling_defaults
from dwdp.executor.prompts import prepare
from dwdp.executor.request import SamplingParams
from dwdp.executor.settings import resolve
from dwdp.model.writer import random_checkpoint
from tests.support.tiny import tiny_config_dict

FILE = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 50, "eos_token_id": [7, 9], "do_sample": True}


def read(folder, **values):
    (folder / "generation_config.json").write_text(json.dumps(values))
    return read_sampling_defaults(folder)


def launch(folder, max_seq_len=100, **values):
    settings, model_config = SimpleNamespace(max_seq_len=max_seq_len), SimpleNamespace(vocab_size=320)
    return SimpleNamespace(
        settings=settings, model_config=model_config, tokenizer=None, sampling=read(folder, **values)
    )


def params(launched, given, prompt=(1, 2, 3)):
    _, [item] = prepare(launched, [list(prompt)], given)
    return item.params


def test_a_folder_without_the_file_changes_nothing(tmp_path):
    defaults = read_sampling_defaults(tmp_path)
    assert defaults.params({}, 100) == SamplingParams() and defaults.describe() == ""


def test_the_file_fills_in_what_a_request_leaves_out(tmp_path):
    launched = launch(tmp_path, **FILE)
    whole = SamplingParams(max_tokens=50, temperature=0.6, top_p=0.95, top_k=20)
    assert params(launched, None) == params(launched, {}) == whole
    given = {"temperature": 0.0, "max_tokens": 2, "seed": 3}
    assert params(launched, given) == SamplingParams(max_tokens=2, temperature=0, top_p=0.95, top_k=20, seed=3)
    assert params(launched, SamplingParams(max_tokens=5)) == SamplingParams(max_tokens=5)


def test_new_tokens_of_the_file_are_cut_to_the_room_and_those_of_a_request_refused(tmp_path):
    launched = launch(tmp_path, max_seq_len=40, **FILE)
    assert params(launched, None).max_tokens == 37
    assert params(launched, {"top_k": 0}, range(1, 40)).max_tokens == 1
    with pytest.raises(RequestError, match="max_tokens 50 is over max_seq_len 40"):
        params(launched, {"max_tokens": 50})
    with pytest.raises(RequestError, match="40 tokens"):
        params(launched, None, range(1, 41))


def test_a_field_that_is_none_is_refused_by_name(tmp_path):
    with pytest.raises(RequestError, match="no field max_new_tokens; there are max_tokens"):
        params(launch(tmp_path), {"max_new_tokens": 4})
    with pytest.raises(RequestError, match="temperature must not be negative"):
        params(launch(tmp_path), {"temperature": -1})


def test_greedy_by_do_sample_and_nulls_say_nothing(tmp_path):
    assert read(tmp_path, temperature=0.7, do_sample=False).fields == {"temperature": 0.0}
    assert read(tmp_path, temperature=None, top_k=None, do_sample=None).fields == {}
    assert read(tmp_path, top_k=-1).fields == {"top_k": 0}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.5}, "temperature must not be negative, got -0.5"),
        ({"temperature": "warm"}, "temperature must be a finite number, got 'warm'"),
        ({"top_p": 0}, "top_p must be over 0"),
        ({"top_k": 1.5}, "top_k must be a whole number, got 1.5"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"do_sample": "yes"}, "do_sample must be true or false, got 'yes'"),
    ],
)
def test_bad_values_are_one_line_that_names_file_and_key(tmp_path, values, message):
    with pytest.raises(CheckpointError) as refused:
        read(tmp_path, **({"top_k": True} | values))
    text = str(refused.value)
    assert text.startswith(f"{tmp_path}/generation_config.json: ") and message in text and "\n" not in text
    assert "top_k" in text  # every bad value is on the line


def test_a_launch_says_what_it_takes_from_the_file_and_refuses_a_bad_one(tmp_path, caplog):
    random_checkpoint(tmp_path, tiny_config_dict(eos_token_id=3))
    (tmp_path / "generation_config.json").write_text(json.dumps(FILE | {"repetition_penalty": 1.1, "min_p": 0}))
    with caplog.at_level(logging.INFO, "dwdp"):
        launched = resolve(tmp_path, device="cpu", environ={})
    assert launched.sampling.fields == {"max_tokens": 50, "temperature": 0.6, "top_p": 0.95, "top_k": 20}
    lines = [record.getMessage() for record in caplog.records if "generation_config" in record.getMessage()]
    assert lines == [
        "where a request does not say: max_tokens 50, temperature 0.6, top_p 0.95, top_k 20 (generation_config.json)",
        "generation_config.json: repetition_penalty 1.1 has no effect",
    ]
    (tmp_path / "generation_config.json").write_text('{"top_p": 2}')
    with pytest.raises(CheckpointError, match="generation_config.json: top_p must be over 0 and at most 1, got 2"):
        resolve(tmp_path, device="cpu", environ={})
