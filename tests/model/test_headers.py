"""Headers: the fast path and the slow one read the same, and ModelOpt's own file speaks where config.json is silent."""

import json
import os
import struct

import pytest

from dwdp.errors import CheckpointError
from dwdp.model import safetensors_file
from dwdp.model.folder import open_folder
from dwdp.model.formats import read_formats
from dwdp.model.headers import Headers, read_config
from dwdp.model.loader import load_reads
from tests.support.sparse_k3 import make_sparse
from tests.support.tiny import tiny_config_dict

TABLE = {"language_model.model.layers.1.block_sparse_moe.experts": {"quant_algo": "NVFP4", "group_size": 16}}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": TABLE}
EXPERT = "model.layers.1.block_sparse_moe.experts.0.w1"


def write_file(folder, text: bytes, nbytes: int):
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(nbytes))


def test_both_paths_find_the_same_tensors(tmp_path, monkeypatch):
    data = {"model_type": "kimi_k3", "text_config": tiny_config_dict()}
    make_sparse(tmp_path, "nvfp4", data=data, num_files=5)
    fast = Headers(tmp_path)
    monkeypatch.setattr(safetensors_file, "_fast_entries", lambda *arguments: None)
    slow = Headers(tmp_path)
    assert fast.entries == slow.entries and list(fast.entries) == list(slow.entries) and len(fast.files) == 5
    assert fast.digest() == slow.digest()


@pytest.mark.parametrize(
    ("header", "nbytes", "message"),
    [
        (b"{" + b",".join([b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'] * 2) + b"}", 1, "a appears twice"),
        (b'{"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}}', 1, "bad shape [1.0]"),
        (b'{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}', 1, "bad shape [True]"),
        (b'{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}', 1, "bad shape [-1]"),
        (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}}', 1, "bad data_offsets [1, 0]"),
        (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}}', 1, "bad data_offsets"),
        (b'{"a":{"dtype":"U4","shape":[1],"data_offsets":[0,1]}}', 1, "unknown dtype 'U4'"),
        (b'{"a":{"shape":[1],"data_offsets":[0,1]}}', 1, "unknown dtype None"),
        (b'{"a":7}', 0, "its entry is not an object"),
        (b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,1]}}', 1, "takes 2 bytes, data_offsets span 1"),
        (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}', 2, "1 bytes of no tensor before a"),
        (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 2, "1 bytes behind its last tensor"),
        (b'{"a":{"dtype":"U8","shape":[' + b"9" * 30 + b'],"data_offsets":[0,1]}}', 1, "bad shape [999"),
        (b'{"a":{"dtype":"U8","shape":[' + b"99999999," * 400_000 + b'1],"data_offsets":[0,1]}}', 1, "bad shape [9"),
        (b'{"a":{"dtype":"U8","shape":[' + b"9999999999," * 60 + b'1],"data_offsets":[0,1]}}', 1, "no file holds"),
        (b'{"a":{"dtype":"U8","shape":[0,' + b"9" * 4000 + b'],"data_offsets":[0,0]}}', 0, "bad shape [0, 999"),
        (b"[" * 100_000, 0, "bad header"),
    ],
)  # fmt: skip
def test_what_the_fast_path_does_not_like_the_slow_one_names(tmp_path, header, nbytes, message):
    write_file(tmp_path, header, nbytes)
    with pytest.raises(CheckpointError) as refused:
        Headers(tmp_path)
    assert message in str(refused.value) and "model.safetensors" in str(refused.value)
    assert len(str(refused.value)) < 2000


def test_metadata_of_any_kind_and_empty_tensors_pass(tmp_path):
    for metadata in (b'{"format":"pt"}', b'{"dtype":"x","shape":"y"}', b"{}"):
        write_file(
            tmp_path,
            b'{"__metadata__":' + metadata + b',"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
            b'"a":{"dtype":"F32","shape":[0,3],"data_offsets":[0,0]}}',
            4,
        )
        assert [(e.name, e.nbytes) for e in Headers(tmp_path).entries.values()] == [("a", 0), ("b", 4)]


# -- hf_quant_config.json ------------------------------------------------------------------------------------------


def write_configs(folder, config, own):
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": own}))


def test_modelopts_own_file_is_read_where_the_config_is_silent(tmp_path):
    write_configs(tmp_path, {}, MODELOPT)
    declared = read_formats(tmp_path, read_config(tmp_path)).declared(EXPERT)
    assert declared.format == "nvfp4" and declared.entry.startswith("hf_quant_config.json quantized_layers entry")
    write_configs(tmp_path, {}, {"quant_algo": "W4A8_AWQ"})
    with pytest.raises(CheckpointError, match=r"hf_quant_config.json has quant_method 'modelopt' and .*'W4A8_AWQ'"):
        read_formats(tmp_path, read_config(tmp_path))


@pytest.mark.parametrize("nested", [False, True])
def test_two_that_say_the_same_pass_and_two_that_differ_are_refused(tmp_path, nested):
    def config(quantization):
        return (
            {"text_config": {"quantization_config": quantization}} if nested else {"quantization_config": quantization}
        )

    unprefixed = {name.removeprefix("language_model."): entry for name, entry in TABLE.items()}
    write_configs(tmp_path, config(MODELOPT), MODELOPT | {"quantized_layers": unprefixed})
    assert read_config(tmp_path) == config(MODELOPT)
    write_configs(
        tmp_path, config(MODELOPT), MODELOPT | {"quantized_layers": TABLE | {"lm_head": {"quant_algo": "FP8"}}}
    )
    with pytest.raises(CheckpointError, match=r"hf_quant_config.json do not .*'lm_head' is None in one and 'FP8'"):
        read_config(tmp_path)
    write_configs(tmp_path, config({"quant_method": "compressed-tensors"}), MODELOPT)
    with pytest.raises(CheckpointError, match="quant_algo is None in one and 'MIXED_PRECISION' in the other"):
        read_config(tmp_path)


SMALL_FILES = ["config.json", "generation_config.json", "hf_quant_config.json", "model.safetensors.index.json"]
SMALL_FILES += ["tiktoken.model", "tokenizer_config.json", "tokenizer.json"]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", SMALL_FILES)
@pytest.mark.parametrize("kind", ["pipe", "link to nothing", "folder"])
def test_a_small_file_that_cannot_be_read_is_refused_and_not_waited_for(tmp_path, name, kind):
    make_sparse(tmp_path, "nvfp4", data={"model_type": "kimi_k3", "text_config": tiny_config_dict(vocab_size=1024)})
    (tmp_path / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    elif kind == "folder":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).symlink_to("nowhere")
    with pytest.raises(CheckpointError) as refused:
        open_folder(tmp_path)
    reason = "No such file or directory" if kind == "link to nothing" else "it is not a regular file"
    assert str(refused.value) == f"{tmp_path / name} cannot be read: {reason}"


def test_an_index_that_names_a_file_no_system_can_hold_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x" * 300}}))
    with pytest.raises(CheckpointError, match="xxx, which the folder does not hold"):
        Headers(tmp_path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("opens", [open_folder, load_reads])
def test_experts_that_a_wrong_number_makes_up_are_counted_and_not_listed(tmp_path, opens):
    """100,000 in place of 8 experts are 1.2 million missing matrices, and with more layers billions."""
    text = tiny_config_dict(vocab_size=1024)
    make_sparse(tmp_path, "nvfp4", data={"model_type": "kimi_k3", "text_config": text})
    data = json.loads((tmp_path / "config.json").read_text())
    data["text_config"]["num_experts"] = 100_000
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match="100000 experts in each of 4 layers, which are 1200000") as refused:
        opens(tmp_path)
    assert len(str(refused.value)) < 500
