"""Broken folders, headers and indexes are refused in one line with file, tensor and sizes."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from dwdp.errors import CheckpointError
from dwdp.model.checkpoint import Checkpoint, checkpoint_digest
from dwdp.model.headers import read_config
from dwdp.model.shards import TensorToWrite, write_checkpoint
from dwdp.model.writer import random_checkpoint
from tests.support.tiny import tiny_config_dict


def folder_of(tmp_path, shards=1):
    """Three small float32 tensors a, b, c of 4, 8 and 12 bytes."""
    tensors = [
        TensorToWrite(n, torch.float32, (i,), lambda i=i: torch.arange(i, dtype=torch.float32))
        for i, n in enumerate("abc", 1)
    ]
    write_checkpoint(tmp_path, {"model_type": "x"}, tensors, shards=shards)
    return tmp_path


def refusal(folder):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError) as refused:
        Checkpoint(folder)
    assert len(os.listdir("/proc/self/fd")) == before, "a refused checkpoint stays open"
    assert "\n" not in str(refused.value)
    return str(refused.value)


def write_raw(folder, header, data=bytes(24)):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


def header(**changes):
    base = {
        "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        "c": {"dtype": "F32", "shape": [3], "data_offsets": [12, 24]},
    }
    for name, change in changes.items():
        base[name] = {**base.get(name, {}), **change}
    return base


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_tensors_are_read_in_place_and_in_order(tmp_path, shards):
    log = []
    with Checkpoint(folder_of(tmp_path, shards), read_log=lambda *read: log.append(read)) as checkpoint:
        assert list(checkpoint.entries) == ["a", "b", "c"] and len(checkpoint.files) == shards
        log.clear()
        out = torch.full((3,), -1.0)
        checkpoint.read_into(checkpoint.entries["c"], out)
        assert out.tolist() == [0, 1, 2] and checkpoint.read(checkpoint.entries["b"]).tolist() == [0, 1]
        entry = checkpoint.entries["c"]
        assert log[0] == (entry.file, entry.offset, 12)
        with pytest.raises(ValueError, match="12 bytes do not go into these 8"):
            checkpoint.read_into(entry, torch.empty(2))
        with pytest.raises(ValueError, match="do not go into"):
            checkpoint.read_into(entry, torch.empty(3, 2)[:, 0])


def test_files_of_the_safetensors_library_are_read(tmp_path):
    tensors = {"x": torch.randn(3, 5).bfloat16(), "y": torch.tensor(2.5), "z": torch.empty(0, 4)}
    save_file(tensors, tmp_path / "any.safetensors", metadata={"k": "v"})
    (tmp_path / "config.json").write_text("{}")
    with Checkpoint(tmp_path) as checkpoint:
        for name, value in tensors.items():
            got = checkpoint.read(checkpoint.entries[name])
            assert got.shape == value.shape and got.dtype == value.dtype and torch.equal(got, value)


@pytest.mark.parametrize("keep", [0, 7, 20, -1, -13])
def test_a_truncated_file_is_named_with_its_sizes(tmp_path, keep):
    file = folder_of(tmp_path) / "model.safetensors"
    size = file.stat().st_size
    left = keep if keep >= 0 else size + keep
    os.truncate(file, left)
    text = refusal(tmp_path)
    assert str(file) in text and "truncated" in text and f"{left} bytes" in text
    if keep < 0:
        assert f"tensor c ends at byte {size}" in text


@pytest.mark.parametrize(
    "broken, message",
    [
        (b"{", "bad header"),
        (b"\xff\xfe", "bad header"),
        (b"[1]", "not a JSON object"),
        (b'{"a": 1, "a": 2}', "a appears twice"),
        ({"a": 3}, "tensor a: its entry is not an object"),
        (header(a={"dtype": "F99"}), "tensor a: unknown dtype 'F99'"),
        (header(a={"shape": [-1]}), r"tensor a: bad shape [-1]"),
        (header(a={"shape": [1.0]}), r"tensor a: bad shape [1.0]"),
        (header(a={"data_offsets": [4, 0]}), "tensor a: bad data_offsets"),
        (header(a={"data_offsets": [-4, 0]}), "tensor a: bad data_offsets"),
        (header(b={"shape": [3]}), "tensor b: F32 [3] takes 12 bytes, data_offsets span 8"),
        (header(c={"data_offsets": [8, 20]}), "tensor c at byte"),
        (header(c={"data_offsets": [16, 28]}), "truncated: tensor c ends at byte"),
        (header(d={"dtype": "U8", "shape": [1], "data_offsets": [30, 31]}), "tensor d ends at byte"),
    ],
)
def test_bad_headers_are_named(tmp_path, broken, message):
    write_raw(folder_of(tmp_path), broken)
    text = refusal(tmp_path)
    assert message in text and "model.safetensors" in text


def test_overlap_gap_and_surplus_are_told_apart(tmp_path):
    folder = folder_of(tmp_path)
    write_raw(folder, header(c={"data_offsets": [8, 20]}))
    assert "overlaps b, which ends at" in refusal(folder) and "bytes behind" not in refusal(folder)
    write_raw(folder, {k: v for k, v in header().items() if k != "b"})
    assert "8 bytes of no tensor before c" in refusal(folder)
    write_raw(folder, header(), bytes(25))
    assert "1 bytes behind its last tensor" in refusal(folder)


def test_a_header_longer_than_the_file_is_no_allocation(tmp_path):
    file = folder_of(tmp_path) / "model.safetensors"
    file.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    assert f"a header of {1 << 62} bytes in a file of 10 bytes" in refusal(tmp_path)


def test_every_bad_file_is_in_the_line(tmp_path):
    folder = folder_of(tmp_path, shards=3)
    for i in (1, 3):
        os.truncate(folder / f"model-{i:05d}-of-00003.safetensors", 5)
    text = refusal(folder)
    assert "model-00001-of-00003" in text and "model-00003-of-00003" in text and "00002-of" not in text


def test_a_missing_shard_is_named(tmp_path):
    folder = folder_of(tmp_path, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    text = refusal(folder)
    assert "model.safetensors.index.json names model-00002-of-00003.safetensors" in text


def edit_index(folder, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def test_an_index_that_does_not_fit_the_files_is_named(tmp_path):
    folder = folder_of(tmp_path, shards=2)
    files = sorted(f.name for f in folder.glob("*.safetensors"))

    def swap(index):
        index["weight_map"]["a"] = files[1]
        index["weight_map"]["ghost"] = files[0]
        del index["weight_map"]["b"]

    edit_index(folder, swap)
    text = refusal(folder)
    for part in (f"tensor a is not in {files[1]}", f"tensor ghost is not in {files[0]}", "tensor b of"):
        assert part in text


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/passwd", "", 3, ".."])
def test_an_index_that_points_out_of_its_folder_is_refused(tmp_path, file):
    folder = folder_of(tmp_path, shards=2)
    edit_index(folder, lambda index: index["weight_map"].update(a=file))
    assert f"places tensor a in {file!r}" in refusal(folder)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    folder = folder_of(tmp_path, shards=2)
    save_file({"a": torch.ones(1)}, folder / "z.safetensors")
    edit_index(folder, lambda index: index["weight_map"].update(a="z.safetensors"))
    assert "tensor a is in both" in refusal(folder)


def test_folders_without_their_files_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere is not a checkpoint folder"):
        Checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="config.json cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "holds no safetensors file" in refusal(tmp_path)
    for name in ("x", "y"):
        save_file({name: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    assert "holds 2 safetensors files and no model.safetensors.index.json" in refusal(tmp_path)
    for text, message in (("{", "is not JSON"), ("[]", "is not a JSON object"), ("\x80", "JSON")):
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
        assert message in refusal(tmp_path) and "config.json" in refusal(tmp_path)


def test_a_file_that_shrinks_after_its_header_is_named(tmp_path):
    with Checkpoint(folder_of(tmp_path)) as checkpoint:
        os.truncate(tmp_path / "model.safetensors", checkpoint.entries["c"].offset + 3)
        with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated: tensor c ends at byte"):
            checkpoint.read(checkpoint.entries["c"])


def test_the_digest_sees_config_names_shapes_and_dtypes_but_not_shards(tmp_path):
    def digest(name, change=None, **options):
        config = tiny_config_dict(**(change or {}))
        random_checkpoint(tmp_path / name, config, **options)
        return checkpoint_digest(tmp_path / name)

    same = digest("a")
    assert same == digest("b", shards=3) == digest("c", seed=9) and len(same) == 64
    others = [
        digest("d", {"rms_norm_eps": 2e-5}),
        digest("e", {"vocab_size": 321}),
        digest("f", dtype="fp32"),
        digest("g", prefix=""),
        digest("h", expert_format="mxfp4"),
    ]
    assert len({same, *others}) == 6


def test_files_nested_beyond_reading_are_named(tmp_path):
    (tmp_path / "config.json").write_bytes(b"[" * 100_000)
    with pytest.raises(CheckpointError, match="config.json is not JSON"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    header = b"[" * 100_000
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match="model.safetensors has a bad header"):
        Checkpoint(tmp_path)
