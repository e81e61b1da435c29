"""`dwdp plan PATH --reads R` of a folder as released: every byte of the text is read once a host, and counted right.

What a rank must read is computed here from the lists that the folder was made from.
"""

from __future__ import annotations

import json
import math

import pytest
import safetensors.torch
import torch

from dwdp.config.schema import DenseConfig
from dwdp.model import loader
from dwdp.model.config import ModelConfig
from dwdp.model.decoder import KimiK3Model
from dwdp.model.folder import open_folder
from dwdp.model.headers import Headers
from dwdp.model.safetensors_file import ITEMSIZE, TensorEntry
from dwdp.model.writer import random_checkpoint
from dwdp.partition.layout import cuts
from dwdp.runtime.load_rows import collect_dense
from dwdp.tools import plan_folder
from dwdp.tools.cli import run
from tests.support.sparse_k3 import make_sparse, run_plan_alone, text_tensors, vision_tensors, write_tokenizer
from tests.support.tiny import tiny_config_dict

DATA = {"model_type": "kimi_k3", "text_config": tiny_config_dict(vocab_size=1024)}
FILES = 7


@pytest.fixture(scope="module", params=["mxfp4", "nvfp4"])
def release(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    make_sparse(folder, request.param, data=DATA, num_files=FILES)
    return folder, request.param


def nbytes(tensor) -> int:
    return math.prod(tensor[2]) * ITEMSIZE[tensor[1]]


def expert_of(name: str) -> int | None:
    _, found, rest = name.partition(".experts.")
    return int(rest.split(".")[0]) if found else None


def document(capsys, *arguments) -> dict:
    assert run(["plan", *map(str, arguments), "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("vision tensors") == 1 and len(captured.err.splitlines()) == 1
    return json.loads(captured.out)


def sharded(tmp_path, **values) -> list:
    (tmp_path / "sharded.json").write_text(json.dumps({"dense_dwdp": {"enabled": True, "load": "sharded", **values}}))
    return ["--dense", "--config", tmp_path / "sharded.json", "--min-bytes", "0"]


@pytest.mark.parametrize("load", ["whole", "sharded"])
def test_ranks_read_their_experts_and_every_dense_byte_once(capsys, tmp_path, release, load):
    folder, form = release
    more = sharded(tmp_path) if load == "sharded" else []
    tensors = list(text_tensors(ModelConfig.from_dict(DATA), form))
    dense = sum(nbytes(t) for t in tensors if expert_of(t[0]) is None)
    seen: list[tuple[str, int, int]] = []
    for rank in range(3):
        found = document(capsys, folder, "--ranks", 3, "--reads", rank, *more)
        start, end = found["partition"]["ranges"][rank]
        own = sum(nbytes(t) for t in tensors if (e := expert_of(t[0])) is not None and start <= e < end)
        row, reads = found["ranks"][rank], found["reads"]
        assert row["expert_bytes"] == own and row["load_bytes"] == own + row["dense_bytes"]
        assert row["load_bytes"] == sum(read["nbytes"] for read in reads)
        places = [(read["file"], read["offset"], read["offset"] + read["nbytes"]) for read in reads]
        assert places == sorted(places)
        assert all(a[0] != b[0] or a[2] < b[1] for a, b in zip(places, places[1:]))  # none could be merged
        seen += places
    assert sum(row["dense_bytes"] for row in found["ranks"]) == dense
    vision = list(vision_tensors())
    assert found["checkpoint"] == {
        "format": form,
        "files": FILES,
        "tensors": len(tensors) + len(vision),
        "skipped_bytes": sum(map(nbytes, vision)),
    }
    # together the reads are the text tensors, each byte of them once
    wanted = sorted((e.file, e.offset, e.end) for e in Headers(folder).entries.values() if "language_model" in e.name)
    assert joined(sorted(seen)) == joined(wanted)
    # and each rank needs its own rows of what moves, as set-up finds them in the model, and all of the rest
    own_rows = [0, 0, 0] if load == "whole" else rows_of_a_model(tensors)
    for row, own in zip(found["ranks"], own_rows):
        assert row["dense_bytes"] + row["cached_bytes"] == own + dense - sum(own_rows)
        assert row["dense_bytes"] > own


def rows_of_a_model(tensors) -> list[int]:
    """Bytes in the files of each of three ranks' rows, with min_bytes 0."""
    model = KimiK3Model(ModelConfig.from_dict(DATA), dtype=torch.bfloat16, device="meta")
    layout = collect_dense(model, DenseConfig(min_bytes=0), 3, without_bytes=True).layout
    stored = {name: ITEMSIZE[dtype] for name, dtype, _ in tensors}
    found = [0, 0, 0]
    for blob in layout.blobs:
        for cut in cuts(blob):
            view = blob.storages[cut.storage].views[0]
            if not view.name.endswith("A_log"):  # read whole, for its tail
                itemsize = 4 if "float32" in view.dtype else 2
                found[cut.row] += (cut.end - cut.start) // itemsize * stored[view.name]
    return found


def joined(ranges):
    """Ranges that touch as one; none may overlap."""
    found = []
    for file, start, end in ranges:
        if start == end:
            continue
        if found and found[-1][0] == file and found[-1][2] == start:
            found[-1][2] = end
            continue
        assert not found or found[-1][0] != file or found[-1][2] < start
        found.append([file, start, end])
    return found


@pytest.mark.parametrize(
    ("expert_format", "fp8"), [("plain", False), ("plain", True), ("mxfp4", False), ("nvfp4", True)]
)
def test_the_plan_has_the_bytes_that_the_loader_needs(capsys, tmp_path, monkeypatch, expert_format, fp8):
    """What is read along between two ranges does not count: a plan of reads is held to 1.05 of it by its own test."""
    random_checkpoint(tmp_path, tiny_config_dict(), expert_format=expert_format, fp8_attention=fp8, shards=3)
    assert run(["plan", str(tmp_path), "--ranks", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    entries = Headers(tmp_path).entries.values()
    unread = [e for e in entries if e.name.endswith(".input_scale")]  # of four-bit activations
    real, needed = loader.read_landings, []

    def read_landings(*args, **options):
        result = real(*args, **options)
        needed.append(result.needed)
        return result

    monkeypatch.setattr(loader, "read_landings", read_landings)
    for row, (start, end) in zip(found["ranks"], found["partition"]["ranges"]):
        needed.clear()
        loader.load_model(tmp_path, expert_range=(start, end))
        own = sum(e.nbytes for e in unread if start <= expert_of(e.name) < end)
        assert sum(needed) + own == row["load_bytes"] + row["cached_bytes"]


def test_the_text_names_files_ranges_and_the_exact_sum(capsys, tmp_path, release):
    folder, form = release
    assert run(["plan", str(folder), "--ranks", "3", "--reads", "1"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("Rank 1 reads ") and out.splitlines()[-1].endswith("(exactly).")
    assert "load: whole: every rank reads all" in out and "page cache" in out
    assert f"model-00001-of-{FILES:06d}.safetensors" in out and "largest gap" in out
    assert run(["plan", str(folder), "--ranks", "3", *map(str, sharded(tmp_path))]) == 0
    assert "load: sharded: of the dense weights that move a rank reads its own rows alone" in capsys.readouterr().out


def test_reads_that_do_not_add_up_are_an_error(release, monkeypatch):
    """The sum is computed twice, on two ways."""
    from dwdp.errors import DwdpError
    from dwdp.model.folder import open_folder
    from dwdp.partition.experts import ExpertPartition

    folder = open_folder(release[0])
    plan = plan_folder.LoadPlan(folder, ExpertPartition.balanced(2, 8))
    merged = plan_folder._merged
    monkeypatch.setattr(plan_folder, "_merged", lambda ranges: merged(ranges[1:]))
    with pytest.raises(DwdpError, match="rank 1's reads have"):
        plan.reads(1)


def refused(capsys, arguments, *words) -> None:
    assert run(["plan", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1
    assert all(word in captured.err for word in words), captured.err


def test_what_a_folder_is_not_is_one_line(capsys, tmp_path, release):
    folder, _ = release
    refused(capsys, [folder, "--ranks", 2, "--reads", 2], "--reads 2", "--ranks 2", "0 to 1")
    refused(capsys, [folder, "--reads", -1], "--reads")
    refused(capsys, [folder, "--model", folder], "two models")
    refused(capsys, ["--ranks", 2], "no model", "--model")
    refused(capsys, ["kimi-k3", "--ranks", 2, "--reads", 0], "--reads 0", "kimi-k3", "no folder")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    refused(capsys, [tmp_path, "--ranks", 2, "--reads", 0], "--reads 0", "safetensors")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "deepseek_v3"}))
    refused(capsys, [tmp_path], "deepseek_v3", "kimi_k3", "kimi_linear")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.update({"vision.w": torch.ones(2)}), ["extra tensor vision.w (F32 [2])"]),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), ["tensor model.norm.weight is F32 [3]"]),
        (lambda t: t.pop("lm_head.weight"), ["missing tensor lm_head.weight"]),
        (
            lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn)}),
            ["FP8 without its scale"],
        ),
    ],
)
def test_a_wrong_tensor_is_refused_as_the_loader_refuses_it(capsys, tmp_path, change, words):
    random_checkpoint(tmp_path, tiny_config_dict(), prefix="", expert_format="mxfp4")
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    change(tensors)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError) as loading:
        loader.load_model(tmp_path)
    refused(capsys, [tmp_path, "--ranks", 2], *words, str(loading.value))


def test_a_folder_is_planned_without_torch_in_little_memory(release):
    result = run_plan_alone(release[0], "--ranks", "4", "--reads", "3")
    assert result.returncode == 0, result.stderr
    vision, figures = result.stderr.splitlines()
    assert "137 vision tensors" in vision
    assert json.loads(figures)["peak_mib"] < 120 and not json.loads(figures)["torch"]


def test_a_released_folder_generates_as_it_is(capsys, tmp_path):
    """Vision tensors, tiktoken.model, defaults of generation_config.json: one line of the log each, and an answer."""
    config = tiny_config_dict(vocab_size=1024)
    random_checkpoint(tmp_path, config, expert_format="mxfp4")
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    tensors |= {"vision_tower.a": torch.ones(5), "mm_projector.b": torch.ones(2, 3)}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    write_tokenizer(tmp_path, 1024)
    arguments = ["generate", "--model", str(tmp_path), "--prompt", "<|end_of_msg|>", "--ranks", "2", "--device", "cpu"]
    assert run([*arguments, "--max-tokens", "3", "--temperature", "0", "--json"]) == 0
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert [line for line in lines if "vision" in line] == [
        "INFO 2 vision tensors of 44 bytes are skipped (vision_tower.*, mm_projector.*): only text is served"
    ]
    assert len([line for line in lines if "temperature 1.0, top_p 0.95 (generation_config.json)" in line]) == 1
    assert 1 <= len(json.loads(captured.out)["outputs"][0]["token_ids"]) <= 3


def test_a_vision_tensor_may_be_named_as_an_expert_is(release):
    folder = open_folder(release[0])
    entries = folder.headers.entries
    before = plan_folder._divide(folder)
    odd = "vision_tower.block_sparse_moe.experts.gate.weight"
    entries[odd] = TensorEntry(odd, "U8", (1,), "x", 0, 1)
    assert plan_folder._divide(folder) == before
