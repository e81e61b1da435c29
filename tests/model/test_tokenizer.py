"""Text is data: nothing is added to it, control text stays text; ids outside the vocabulary are refused."""

import json

import pytest
import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers, processors

from dwdp.errors import CheckpointError, RequestError
from dwdp.model.tokenizer import check_tokenizer, eos_token_ids, load_tokenizer


def _folder(tmp_path, config=None, generation=None, edit=None):
    """Bytes are 0..255, then <|bos|> 256 and <|end|> 257 (special), <think> 258 and four spaces 259 (not)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|bos|>", "<|end|>"])
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("    ", special=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A <|end|>", special_tokens=[("<|bos|>", 256), ("<|end|>", 257)]
    )
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=40, pad_id=0)
    if edit is not None:
        edit(tokenizer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps(config or {}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return tmp_path


def test_text_round_trips_with_nothing_added_cut_or_padded(tmp_path):
    tokenizer = load_tokenizer(_folder(tmp_path), 260)
    text = "longer than five tokens: é\n"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode()) and max(ids) < 256
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("control", ["<|end|>", "<|bos|>", "<think>"])
def test_the_text_of_a_control_token_stays_text(tmp_path, control):
    tokenizer = load_tokenizer(_folder(tmp_path), 260)
    ids = tokenizer.encode(f"a{control}b")
    assert max(ids) < 256 and tokenizer.decode(ids) == f"a{control}b"


def test_white_space_tokens_are_no_control_text(tmp_path):
    assert load_tokenizer(_folder(tmp_path), 260).encode("    ") == [259]


def test_decoding_leaves_special_tokens_out_unless_asked(tmp_path):
    tokenizer = load_tokenizer(_folder(tmp_path), 260)
    ids = tokenizer.encode("ok") + [258, 257]
    assert tokenizer.decode(ids) == "ok<think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "ok<think><|end|>"


def test_without_tokenizer_json_there_is_none_but_ids_are_still_checked(tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert load_tokenizer(tmp_path, 8) is None
    with pytest.raises(CheckpointError, match="eos_token_id 7, outside the vocab_size of 7"):
        load_tokenizer(tmp_path, 7)


def test_an_id_at_the_vocab_size_is_refused_with_token_and_numbers(tmp_path):
    folder = _folder(tmp_path)
    with pytest.raises(CheckpointError, match=r"tokenizer.json: token '    ' has id 259, .*vocab_size is 259"):
        check_tokenizer(folder, 259)
    check_tokenizer(folder, 260)


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "pad_token_id"])
@pytest.mark.parametrize("value", [260, -1, "<|end|>", [257, 300], True])
def test_an_id_outside_the_vocabulary_is_refused_naming_key_and_value(tmp_path, key, value):
    for config in ({key: value}, {"text_config": {key: value}}):
        with pytest.raises(CheckpointError) as refused:
            load_tokenizer(_folder(tmp_path, config), 260)
        assert f"{key} {value!r}, outside the vocab_size of 260" in str(refused.value)
        assert "config.json" in str(refused.value) and "\n" not in str(refused.value)


def test_end_ids_come_from_all_three_places(tmp_path):
    config = {"eos_token_id": [5, 3], "pad_token_id": None, "text_config": {"eos_token_id": 9}}
    folder = _folder(tmp_path, config, {"eos_token_id": [3, 11]})
    assert load_tokenizer(folder, 260).eos_ids == (3, 5, 9, 11)
    assert eos_token_ids(folder, 260) == (3, 5, 9, 11)


def test_a_broken_tokenizer_json_is_one_line_naming_the_file(tmp_path):
    folder = _folder(tmp_path)
    (folder / "tokenizer.json").write_text('{"model":\n 3')
    with pytest.raises(CheckpointError, match="tokenizer.json cannot be read") as refused:
        load_tokenizer(folder, 260)
    assert "\n" not in str(refused.value)


def test_a_generation_config_that_is_no_file_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").mkdir()
    with pytest.raises(CheckpointError, match="generation_config.json cannot be read"):
        eos_token_ids(tmp_path, 10)


WORDS = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}


def test_what_the_library_gives_up_on_is_refused_in_a_line(tmp_path):
    """Its Rust code panics on a broken character map, which Python sees as a BaseException; a text that a vocabulary
    lacks words for is a bare Exception."""
    (tmp_path / "config.json").write_text("{}")
    broken = {"type": "Precompiled", "precompiled_charsmap": ""}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [], "normalizer": broken, "model": WORDS}))
    with pytest.raises(CheckpointError, match="tokenizer.json cannot be read: Precompiled"):
        load_tokenizer(tmp_path, 260)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [], "model": WORDS}))
    tokenizer = load_tokenizer(tmp_path, 260)
    assert tokenizer.encode("a") == [0]
    with pytest.raises(RequestError, match=r"no tokens for the text: .*\[UNK\]"):
        tokenizer.encode("b")
