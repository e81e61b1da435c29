"""tiktoken.model: the ids of the tiktoken package itself, control text that stays text, whole characters as they come.

The pattern is written down here once more; that each alternative counts was shown by leaving it out of the code.
"""

import base64
import json
import random

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from dwdp.errors import CheckpointError
from dwdp.model import tiktoken_model
from dwdp.model.text_stream import TextStream
from dwdp.model.tokenizer import load_tokenizer
from tests.support.tiktoken_folder import CORPUS, trained_ranks, write_tiktoken

KIMI = (
    r"""[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"""
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"""
    r"""[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"""
    r"""\s*[\r\n]+|\s+(?!\S)|\s+"""
)
RANKS = trained_ranks()
NAMED = {0: "[BOS]", 1: "[EOS]", 2: "<|end_of_msg|>", 3: "<|open|>", 65: "<think>", 255: "[PAD]"}
VOCAB = len(RANKS) + 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiktoken")
    (path / "config.json").write_text(json.dumps({"eos_token_id": len(RANKS) + 2}))
    write_tiktoken(path, RANKS, NAMED)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder, VOCAB)


@pytest.fixture(scope="module")
def reference():
    return tiktoken.Encoding("reference", pat_str=KIMI, mergeable_ranks=RANKS, special_tokens={})


def mixed_strings(count: int) -> list[str]:
    """Pieces of several scripts, code, emoji, control-token look-alikes and white space, joined at random."""
    rng = random.Random(20261130)
    pieces = [CORPUS[at : at + 12] for at in range(0, len(CORPUS), 5)]
    pieces += [" ", "  ", "\n", "\r\n", "\t", " \n ", "\u3000", "\xa0", "\u2003", "   \n\n  ", "\x00", "\x1c", "\ufeff"]
    pieces += [*NAMED.values(), "<|reserved_token_700|>", "<|endoftext|>", "[UNK]", "</s>", "<|im_end|"]
    pieces += [
        "don't",
        "I'LL",
        "'s",
        "THEY'RE",
        "x'Ve",
        "漢字カナ",
        "模型model",
        "ÀÉî",
        "ǅ",
        "ʰ",
        "e\u0301",
        "१२३४",
        "½",
    ]
    pieces += ["👩‍👩‍👧", "🏳️‍🌈", "!?…", "->", "//", "==\n", "1234567", "3.14", "_x1", "#!/bin/sh", "\U0001f600\n"]
    return ["".join(rng.choices(pieces, k=rng.randint(1, 9))) for _ in range(count)]


def test_ten_thousand_mixed_strings_have_the_ids_of_the_package(tokenizer, reference):
    strings = mixed_strings(10_000)
    used: set[int] = set()
    for text in strings:
        ids = tokenizer.encode(text)
        assert ids == reference.encode_ordinary(text), text
        assert tokenizer.decode(ids) == text
        used.update(ids)
    assert max(used) < len(RANKS)
    assert len([one for one in used if one >= 256]) > 150  # many merges are only steps to others


@pytest.mark.parametrize("tail", ["", "x", " x", "\n", "!", "\u3000\n\n", "模", "7"])
@pytest.mark.parametrize("blank", [" ", "\t ", "\u3000", " \u2028"])
def test_long_runs_of_white_space_are_cut_out_without_a_change(tokenizer, reference, monkeypatch, blank, tail):
    monkeypatch.setattr(tiktoken_model, "MOST_BLANKS", 6)
    short = load_tokenizer_of(tokenizer)
    for head in ("", "a", "a\n", "!", "!\n", "\r", "模"):
        for length in range(1, 15):
            text = head + blank * length + tail
            assert short.encode(text) == reference.encode_ordinary(text), text
            text += text
            assert short.encode(text) == reference.encode_ordinary(text), text


def load_tokenizer_of(tokenizer):
    """The same ranks, with the limit of now."""
    return tiktoken_model.TiktokenModel(RANKS, ["x"] * 256, frozenset())


@pytest.mark.parametrize("blank", [" ", "\t", "\u3000"])
def test_blanks_without_end_are_encoded(tokenizer, blank):
    """tiktoken alone panics on the first of these."""
    for text in (f"{blank * 600_000}x", f"a{blank * 600_000}\nb"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("control", [*NAMED.values(), f"<|reserved_token_{len(RANKS) + 9}|>"])
def test_the_text_of_a_control_token_never_becomes_its_id(tokenizer, control):
    for text in (control, f"a{control}b", control * 3):
        ids = tokenizer.encode(text)
        assert max(ids) < len(RANKS) and tokenizer.decode(ids) == text


def test_decoding_leaves_special_tokens_out_unless_asked(tokenizer):
    first = len(RANKS)
    ids = [first, *tokenizer.encode("ok"), first + 65, first + 9, first + 2, VOCAB, -1]
    assert tokenizer.decode(ids) == "ok<think>"
    whole = f"[BOS]ok<think><|reserved_token_{first + 9}|><|end_of_msg|>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == whole
    assert tokenizer.eos_ids == (first + 2,)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=30), cuts=st.lists(st.integers(1, 4), max_size=60))
def test_a_stream_gives_whole_characters_that_add_up(text, cuts):
    """Bytes one by one are the hardest tokens; that nothing is held back for ever is its last line."""
    stream = TextStream(lambda ids: bytes(ids).decode("utf-8", errors="replace"))
    data, parts = list(text.encode()), []
    for size in cuts:
        parts.append(stream.add(data[:size]))
        data = data[size:]
    parts.append(stream.add(data))
    assert all("\ufffd" not in part for part in parts) or "\ufffd" in text
    assert "".join(parts) + stream.end() == text
    assert stream.end() == ""


@settings(max_examples=50, deadline=None)
@given(ids=st.lists(st.integers(0, VOCAB - 1), max_size=25))
def test_a_stream_of_any_ids_adds_up_to_decoding_them_at_once(ids):
    model = tiktoken_model.TiktokenModel(RANKS, ["<c>"] * 256, frozenset([VOCAB - 1]))
    stream = TextStream(model.decode)
    assert "".join(stream.add([one]) for one in ids) + stream.end() == model.decode(ids)


def test_a_character_of_several_tokens_comes_with_its_last(tokenizer):
    ids = tokenizer.encode("a🚁b")  # no merge knows it
    stream = tokenizer.stream()
    parts = [stream.add([one]) for one in ids]
    assert len(ids) > 4 and [part for part in parts if part] == ["a", "🚁", "b"]


def test_tokenizer_json_comes_first_and_without_a_tokenizer_config_names_are_reserved(tmp_path, folder):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tiktoken.model").write_bytes((folder / "tiktoken.model").read_bytes())
    assert load_tokenizer(tmp_path, VOCAB).decode([len(RANKS)], skip_special_tokens=False) == (
        f"<|reserved_token_{len(RANKS)}|>"
    )
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="tokenizer.json cannot be read"):
        load_tokenizer(tmp_path, VOCAB)


def _lines(ranks=RANKS):
    return [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda lines: [*lines, "%%% 900"], [f"line {len(RANKS) + 1}", "base64", "%%%"]),
        (lambda lines: [*lines, "YWJjZGVm"], [f"line {len(RANKS) + 1}", "rank"]),
        (lambda lines: [*lines, f"{lines[300].split()[0]} {len(lines)}"], [f"line {len(RANKS) + 1}", "already"]),
        (lambda lines: [*lines[:-1], lines[-1].split()[0] + " 9999"], [f"rank {len(RANKS) - 1}"]),
        (lambda lines: [*lines[:-1], lines[-1].split()[0] + " 3"], ["two with another rank"]),
        (lambda lines: [f"{line.split()[0]} {i}" for i, line in enumerate(lines[:7] + lines[8:])], ["0x07"]),
        (lambda lines: [*lines, "YWJjZGVmZ2hpams= " + str(len(lines))], [f"id {VOCAB}", f"vocab_size is {VOCAB}"]),
    ],
)
def test_a_broken_tiktoken_model_is_one_line(tmp_path, folder, edit, words):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tiktoken.model").write_text("\n".join(edit(_lines())) + "\n")
    with pytest.raises(CheckpointError, match="tiktoken.model") as refused:
        load_tokenizer(tmp_path, VOCAB)
    assert all(word in str(refused.value) for word in words), str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("added", "words"),
    [
        ({"5": {"content": "x"}}, ["id 5", "'x'", f"{len(RANKS)} to {VOCAB - 1}"]),
        ({str(VOCAB): {"content": "x"}}, [f"id {VOCAB}"]),
        ({"a": {"content": "x"}}, ["'a'"]),
        ({str(VOCAB - 1): {"content": ""}}, [str(VOCAB - 1)]),
        ({str(VOCAB - 1): {"content": "x"}, str(VOCAB - 2): {"content": "x"}}, ["'x' two ids"]),
        ([1], ["not an object"]),
    ],
)
def test_control_tokens_that_are_none_are_refused(tmp_path, folder, added, words):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tiktoken.model").write_text("\n".join(_lines()))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    with pytest.raises(CheckpointError, match="tokenizer_config.json added_tokens_decoder") as refused:
        load_tokenizer(tmp_path, VOCAB)
    assert all(word in str(refused.value) for word in words), str(refused.value)


@pytest.mark.parametrize(
    ("key", "content", "message"),
    [
        (str(len(RANKS)), "a\ud800", "is no id with its content"),
        ("9" * 5000, "a", "is no id with its content"),
        (f"0{len(RANKS)}", "a", f"names id {len(RANKS)} twice"),
    ],
)
def test_an_added_token_that_is_no_text_or_no_single_id_is_refused(tmp_path, key, content, message):
    (tmp_path / "config.json").write_text("{}")
    write_tiktoken(tmp_path, RANKS)
    added = {str(len(RANKS)): {"content": "[BOS]"}} | {key: {"content": content}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    with pytest.raises(CheckpointError, match=f"tokenizer_config.json added_tokens_decoder .*{message}") as refused:
        load_tokenizer(tmp_path, VOCAB)
    assert len(str(refused.value)) < 500
