"""A checkpoint becomes exactly the model it describes, from this rank's bytes alone, or is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dwdp.env import child_environment
from dwdp.errors import CheckpointError, ConfigError, ModelMemoryError
from dwdp.model import loader, quant, read_plan
from dwdp.model.checkpoint import Checkpoint
from dwdp.model.loader import load_model, load_reads
from dwdp.model.writer import random_checkpoint
from tests.support.tiny import tiny_48b_config_dict, tiny_config_dict, token_ids

PREFIX = "language_model."
EXPERT = "model.layers.1.block_sparse_moe.experts.2.w1"
FORMATS = [("plain", False), ("mxfp4", False), ("nvfp4", False), ("nvfp4", True), ("plain", True)]


def stored(folder):
    """Every tensor of the folder under its name without prefix, read by the safetensors library."""
    files = sorted(folder.glob("*.safetensors"))
    return {k.removeprefix(PREFIX): v for file in files for k, v in load_file(file).items()}


def rewrite(folder, mutate, prefix=PREFIX):
    """Applies `mutate(tensors, text_config)` to a one-file checkpoint, names without prefix."""
    config = json.loads((folder / "config.json").read_text())
    tensors = stored(folder)
    mutate(tensors, config)
    save_file({prefix + k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def refusal(folder, **options):
    """The one line with which loading is refused."""
    with pytest.raises(CheckpointError) as refused:
        load_model(folder, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def problems(folder, **options):
    text = refusal(folder, **options)
    assert text.startswith(f"{folder}: ")
    found = text.removeprefix(f"{folder}: ").split("; ")
    assert found == sorted(found)
    return found


def expected_parameters(tensors, config, dtype, expert_format):
    """The model's non-expert parameters and logical expert weights, by the plainest formulas."""
    heads = config["linear_attn_config"]["num_heads"]
    want = {}
    for name, value in tensors.items():
        if ".experts." in name:
            continue
        if value.dtype == torch.float8_e4m3fn:
            scale = tensors[f"{name}_scale"][:, 0, :, 0]
            scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            value = value.float() * scale[: value.shape[0], : value.shape[1]]
        if name.endswith("A_log"):
            value = value[:heads]
        kept = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
        if not name.endswith("_scale"):
            want[name] = value.to(torch.float32 if name.endswith(kept) else dtype)
    return want


def expert_weight(tensors, module, expert_format, dtype):
    if expert_format == "mxfp4":
        return quant.dequantise_mxfp4(tensors[f"{module}.weight_packed"], tensors[f"{module}.weight_scale"], dtype)
    weight = tensors[f"{module}.weight"]
    if expert_format == "nvfp4":
        scale, factor = tensors[f"{module}.weight_scale"], tensors[f"{module}.weight_scale_2"]
        return quant.dequantise_nvfp4(weight, scale, factor, dtype)
    return weight.to(dtype)


@pytest.mark.parametrize("expert_format, fp8", FORMATS)
@pytest.mark.parametrize("prefix, shards, dtype", [("", 1, "float32"), (PREFIX, 3, "bf16"), (PREFIX, 1, "fp32")])
def test_every_parameter_equals_the_reference(tmp_path, expert_format, fp8, prefix, shards, dtype):
    config = tiny_config_dict(hidden_size=192)  # a partial second FP8 block
    options = dict(expert_format=expert_format, fp8_attention=fp8, prefix=prefix, shards=shards)
    random_checkpoint(tmp_path, config, **options)
    model, tensors = load_model(tmp_path, dtype=dtype), stored(tmp_path)
    parameters = dict(model.named_parameters())
    for name, want in expected_parameters(tensors, config, model.dtype, expert_format).items():
        got = parameters.pop(name)
        assert got.dtype == want.dtype and torch.equal(got, want), name
    assert all(".experts." in name for name in parameters)
    for experts in model.moe_layers():
        for e in range(8):
            base = f"model.layers.{experts.layer_index}.block_sparse_moe.experts.{e}"
            w1, w2, w3 = (expert_weight(tensors, f"{base}.{w}", expert_format, model.dtype) for w in ("w1", "w2", "w3"))
            w13, down = experts._weights_of(e)
            assert torch.equal(w13, torch.cat([w1, w3])) and torch.equal(down, w2)
        if expert_format != "plain":
            assert experts.w13.dtype == torch.uint8
    assert not any(p.requires_grad for p in model.parameters()) and not model.training


@pytest.mark.parametrize("expert_format, fp8", FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_tensors_that_are_cut_into_many_reads_have_the_same_bytes(tmp_path, monkeypatch, expert_format, fp8, dtype):
    """Fails when a cut goes through an element, or a piece lands beside the one before it."""
    random_checkpoint(tmp_path, tiny_config_dict(hidden_size=192), expert_format=expert_format, fp8_attention=fp8)
    log, whole = [], load_model(tmp_path, dtype=dtype).state_dict()
    monkeypatch.setattr(read_plan, "MAX_READ_NBYTES", 1111)
    cut = load_model(tmp_path, dtype=dtype, read_log=lambda *read: log.append(read)).state_dict()
    assert sum(nbytes <= 1111 for _, _, nbytes in log) > 300
    for name, value in whole.items():
        assert torch.equal(cut[name].view(torch.uint8), value.view(torch.uint8)), name


def test_packed_tables_hold_the_files_bytes(tmp_path):
    random_checkpoint(tmp_path, tiny_config_dict(), expert_format="nvfp4")
    experts, tensors = load_model(tmp_path, expert_range=(2, 5)).moe_layers()[1], stored(tmp_path)
    base = "model.layers.2.block_sparse_moe.experts"
    assert experts.first_expert == 2 and experts.w13.shape == (3, 64, 16)
    for row, e in enumerate((2, 3, 4)):
        for part, w in ((slice(0, 32), "w1"), (slice(32, 64), "w3")):
            assert torch.equal(experts.w13[row, part], tensors[f"{base}.{e}.{w}.weight"])
            assert torch.equal(
                experts.w13_scale[row, part].view(torch.uint8),
                tensors[f"{base}.{e}.{w}.weight_scale"].view(torch.uint8),
            )
        factors = [tensors[f"{base}.{e}.{w}.weight_scale_2"] for w in ("w1", "w3")]
        assert experts.w13_scale_2[row].tolist() == [f.item() for f in factors]
        assert experts.w2_scale_2[row] == tensors[f"{base}.{e}.w2.weight_scale_2"]


def test_the_predecessors_config_loads_too(tmp_path):
    random_checkpoint(tmp_path, tiny_48b_config_dict(), prefix="")
    with torch.no_grad():
        assert load_model(tmp_path)(token_ids(7)).isfinite().all()


@pytest.mark.parametrize("expert_format", ["plain", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_rank_reads_its_own_experts_bytes_and_no_others(tmp_path, expert_format, shards):
    random_checkpoint(tmp_path, tiny_config_dict(), expert_format=expert_format, shards=shards)
    with Checkpoint(tmp_path) as checkpoint:
        entries = checkpoint.entries
    start_of_data = {}
    for entry in entries.values():
        start_of_data[entry.file] = min(entry.offset, start_of_data.get(entry.file, entry.offset))
    log = []
    load_model(tmp_path, expert_range=(2, 5), read_log=lambda *read: log.append(read))
    reads = [read for read in log if read[1] >= start_of_data[read[0]]]
    headers = [read for read in log if read[1] < start_of_data[read[0]]]
    assert sum(n for _, _, n in headers) == sum(start_of_data.values())
    mine = []
    for name, entry in entries.items():
        expert = name.split(".experts.")[1].split(".")[0] if ".experts." in name else None
        if expert in (None, "2", "3", "4") and not name.endswith("input_scale"):
            mine.append((entry.file, entry.offset, entry.nbytes))
    assert [(e.file, e.offset, e.nbytes) for e in load_reads(tmp_path, expert_range=(2, 5))] == sorted(mine)
    assert reads == sorted(reads), "each file once, offsets ascending"
    for (file, offset, nbytes), (next_file, next_offset, _) in zip(reads, reads[1:]):
        assert file != next_file or offset + nbytes <= next_offset, "a byte is read twice"
    for file, offset, nbytes in mine:
        assert any(f == file and o <= offset and offset + nbytes <= o + n for f, o, n in reads)
    needed = sum(nbytes for _, _, nbytes in mine)
    assert needed <= sum(nbytes for _, _, nbytes in reads) <= 1.05 * needed
    assert len(reads) < len(mine) / 3


def test_nothing_is_mapped_and_no_descriptor_stays_open(tmp_path):
    random_checkpoint(tmp_path, tiny_config_dict(), shards=2)

    def held():
        maps = Path("/proc/self/maps").read_text()
        targets = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_link(fd)]
        return str(tmp_path) in maps, [t for t in targets if str(tmp_path) in t]

    during = []
    model = load_model(tmp_path, progress=lambda done, total: during.append(held()))
    assert during and all(not mapped and len(files) <= 2 for mapped, files in during)
    assert held() == (False, [])
    assert model.lm_head.weight.isfinite().all()
    rewrite_file = tmp_path / "model-00002-of-00002.safetensors"
    os.truncate(rewrite_file, rewrite_file.stat().st_size - 1)
    refusal(tmp_path)
    assert held() == (False, [])


def _is_link(fd):
    return os.path.islink(f"/proc/self/fd/{fd}")


def test_progress_counts_this_ranks_bytes_to_the_end(tmp_path):
    random_checkpoint(tmp_path, tiny_config_dict())
    seen = []
    load_model(tmp_path, expert_range=(0, 2), progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    total = sum(e.nbytes for e in load_reads(tmp_path, expert_range=(0, 2)))
    assert seen[-1] == (total, total) and {of for _, of in seen} == {total} and len(seen) > 3


def test_the_peak_is_the_model_and_the_buffers(tmp_path):
    # 134 MB of bf16 become 268 MB of float32 by way of staging memory
    config = tiny_config_dict(vocab_size=65536, hidden_size=256, intermediate_size=43690)
    random_checkpoint(tmp_path, config)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("this kernel does not reset the peak of resident memory")
    before = _status("VmRSS")
    model = load_model(tmp_path)
    peak, size = _status("VmHWM") - before, sum(p.nbytes for p in model.parameters())
    assert size > 200e6
    assert peak < size + (128 << 20), (peak, size)


def _status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


# -- names ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensors", [0, 7])
def test_a_gpu_without_room_for_the_weights_is_one_clear_line(tmp_path, monkeypatch, tensors):
    """Fails when torch's own error, which has many lines, comes through, or when a sum leaves tensors out."""
    random_checkpoint(tmp_path, tiny_config_dict())
    nbytes, real, taken = sum(p.nbytes for p in load_model(tmp_path).parameters()), loader._memory_for, []

    def with_little_room(*args, **options):
        if len(taken) == tensors:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        taken.append(real(*args, **options))
        return taken[-1]

    monkeypatch.setattr(loader, "_memory_for", with_little_room)
    with pytest.raises(ModelMemoryError, match="load: sharded") as caught:
        load_model(tmp_path)
    text = str(caught.value)
    assert f"take {nbytes} bytes" in text and f"ran out {sum(t.nbytes for t in taken)} bytes on" in text
    assert "\n" not in text


def test_vision_tensors_are_skipped_by_their_first_part_only(tmp_path):
    random_checkpoint(tmp_path, tiny_config_dict())
    rewrite(
        tmp_path,
        lambda tensors, _: tensors.update({"vision_tower.a.weight": torch.ones(2)}),
        prefix="",
    )
    load_model(tmp_path)
    rewrite(tmp_path, lambda tensors, _: tensors.update({"mm_projector.b": torch.ones(3, dtype=torch.int64)}), "")
    load_model(tmp_path)
    rewrite(tmp_path, lambda tensors, _: tensors.update({"my.vision_tower.c": torch.ones(2)}), "")
    assert problems(tmp_path) == ["extra tensor my.vision_tower.c (F32 [2])"]


def test_the_legacy_spelling_of_residual_projections_is_accepted(tmp_path):
    random_checkpoint(tmp_path, tiny_config_dict())
    before = load_model(tmp_path).state_dict()

    def rename(tensors, _):
        for name in [n for n in tensors if n.endswith("_res_proj.weight")]:
            tensors[name.replace("_res_proj.weight", "_res.proj_weight")] = tensors.pop(name)

    rewrite(tmp_path, rename)
    assert any(name.endswith("output_attn_res.proj_weight") for name in stored(tmp_path))
    after = load_model(tmp_path).state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_tensor_under_two_names_is_refused(tmp_path):
    random_checkpoint(tmp_path, tiny_config_dict(), prefix="")
    twice = PREFIX + "lm_head.weight"
    rewrite(tmp_path, lambda t, _: t.update({twice: t["lm_head.weight"].clone()}), prefix="")
    rewritten = load_file(tmp_path / "model.safetensors")
    rewritten[twice] = rewritten["lm_head.weight"].clone()
    save_file(rewritten, tmp_path / "model.safetensors")
    assert problems(tmp_path) == [f"tensors {twice} and lm_head.weight are the same one"] or problems(tmp_path) == [
        f"tensors lm_head.weight and {twice} are the same one"
    ]


@pytest.mark.parametrize("shape", [(4,), (5,), (128,), (1, 1, 4, 1)])
def test_a_log_may_have_any_tail_of_zeros(tmp_path, shape):
    random_checkpoint(tmp_path, tiny_config_dict())
    name, values = "model.layers.1.self_attn.A_log", torch.tensor([0.25, 0.5, 0.75, 1.0])

    def reshape(tensors, _):
        padded = torch.zeros(shape).flatten()
        padded[:4] = values
        tensors[name] = padded.view(shape)

    rewrite(tmp_path, reshape)
    assert torch.equal(load_model(tmp_path).model.layers[1].self_attn.A_log, values)


@pytest.mark.parametrize("value", [1e-30, float("nan")])
def test_a_log_with_a_tail_that_is_not_zero_is_refused(tmp_path, value):
    random_checkpoint(tmp_path, tiny_config_dict())
    rewrite(tmp_path, lambda tensors, _: tensors["model.layers.1.self_attn.A_log"][-1:].fill_(value))
    assert "model.layers.1.self_attn.A_log of 32 values has a tail behind its 4 heads" in refusal(tmp_path)


# -- faults of names, shapes and dtypes ----------------------------------------------------------------------


def test_all_missing_extra_and_misshapen_tensors_are_in_one_sorted_line(tmp_path):
    random_checkpoint(tmp_path, tiny_config_dict())

    def mutate(tensors, _):
        del tensors["model.norm.weight"]
        del tensors[f"{EXPERT}.weight"]
        del tensors["model.layers.4.self_attn.kv_b_proj.weight"]
        tensors["model.layers.9.extra"] = torch.ones(2)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].clone()
        tensors["model.layers.3.block_sparse_moe.experts.7.w2.weight"] = torch.ones(32, 16)
        tensors["model.layers.0.self_attn.A_log"] = torch.zeros(3)

    rewrite(tmp_path, mutate)
    floats, name = "BF16/F16/F32", PREFIX + "model.layers"
    want = sorted(
        [
            f"missing tensor {PREFIX}model.norm.weight ({floats} [64])",
            f"missing tensor {PREFIX}{EXPERT}.weight ({floats} [32, 32])",
            f"missing tensor {name}.4.self_attn.kv_b_proj.weight ({floats} [128, 32])",
            f"extra tensor {name}.9.extra (F32 [2])",
            f"tensor {PREFIX}lm_head.weight is BF16 [319, 64], not {floats} [320, 64]",
            f"tensor {name}.3.block_sparse_moe.experts.7.w2.weight is F32 [32, 16], not {floats} [32, 32]",
            f"tensor {name}.0.self_attn.A_log is F32 [3], not {floats} [4]",
        ]
    )
    assert problems(tmp_path) == want
    # the faults of experts that another rank holds are found just the same
    assert problems(tmp_path, expert_range=(0, 1)) == want


@pytest.mark.parametrize("expert_format", ["mxfp4", "nvfp4"])
def test_faults_of_packed_experts_are_found(tmp_path, expert_format):
    random_checkpoint(tmp_path, tiny_config_dict(), expert_format=expert_format)
    weight = f"{EXPERT}.weight_packed" if expert_format == "mxfp4" else f"{EXPERT}.weight"
    other = EXPERT.replace("w1", "w3")

    def mutate(tensors, _):
        del tensors[f"{EXPERT}.weight_scale"]
        tensors[weight] = torch.zeros(32, 15, dtype=torch.uint8)
        scale = tensors[f"{other}.weight_scale"]
        tensors[f"{other}.weight_scale"] = torch.ones(scale.shape)

    rewrite(tmp_path, mutate)
    scale, groups = ("U8", 1) if expert_format == "mxfp4" else ("F8_E4M3", 2)
    assert problems(tmp_path) == [
        f"missing tensor {PREFIX}{EXPERT}.weight_scale ({scale} [32, {groups}])",
        f"tensor {PREFIX}{weight} is U8 [32, 15], not U8 [32, 16]",
        f"tensor {PREFIX}{other}.weight_scale is F32 [32, {groups}], not {scale} [32, {groups}]",
    ]


def test_nvfp4_without_its_matrix_factor_is_refused_and_input_scale_is_optional(tmp_path):
    random_checkpoint(tmp_path, tiny_config_dict(), expert_format="nvfp4")
    rewrite(tmp_path, lambda tensors, _: [tensors.pop(n) for n in list(tensors) if n.endswith("input_scale")])
    load_model(tmp_path)
    rewrite(tmp_path, lambda tensors, _: tensors.pop(f"{EXPERT}.weight_scale_2"))
    assert problems(tmp_path) == [f"missing tensor {PREFIX}{EXPERT}.weight_scale_2 (F32 [])"]


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", f"{EXPERT}.weight", "model.norm.weight"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_a_dtype_that_is_no_weights_is_refused(tmp_path, name, dtype):
    random_checkpoint(tmp_path, tiny_config_dict())
    rewrite(tmp_path, lambda tensors, _: tensors.update({name: tensors[name].to(dtype)}))
    (problem,) = problems(tmp_path)
    assert problem.startswith(f"tensor {PREFIX}{name} is {'I64' if dtype == torch.int64 else 'F64'} [")


# -- FP8 -----------------------------------------------------------------------------------------------------

Q = "model.layers.0.self_attn.q_proj.weight"


def test_fp8_without_its_scale_is_refused_even_when_shapes_fit(tmp_path):
    random_checkpoint(tmp_path, tiny_config_dict(), fp8_attention=True)
    rewrite(tmp_path, lambda tensors, _: tensors.pop(f"{Q}_scale"))
    (problem,) = problems(tmp_path)
    assert problem.startswith(f"tensor {PREFIX}{Q} is FP8 without its scale {PREFIX}{Q}_scale")


def test_fp8_of_an_unquantised_checkpoint_is_refused(tmp_path):
    random_checkpoint(tmp_path, tiny_config_dict())
    rewrite(tmp_path, lambda tensors, _: tensors.update({Q: tensors[Q].to(torch.float8_e4m3fn)}))
    (problem,) = problems(tmp_path)
    assert (
        problem.startswith(f"tensor {PREFIX}{Q} is FP8 without its scale")
        and "absence of a quantization_config" in problem
    )
    conv = "model.layers.0.self_attn.q_conv1d.weight"
    rewrite(tmp_path, lambda tensors, _: tensors.update({conv: tensors[conv].to(torch.float8_e4m3fn)}))
    assert any(f"{conv} is F8_E4M3" in problem for problem in problems(tmp_path))


def test_an_fp8_scale_of_the_wrong_blocks_is_refused_and_two_dimensions_pass(tmp_path):
    random_checkpoint(tmp_path, tiny_config_dict(hidden_size=192), fp8_attention=True)
    rewrite(tmp_path, lambda t, _: t.update({f"{Q}_scale": t[f"{Q}_scale"][:, 0, :, 0].clone()}))
    model = load_model(tmp_path)
    tensors = stored(tmp_path)
    want = quant.dequantise_fp8_block(tensors[Q], tensors[f"{Q}_scale"], torch.float32)
    assert torch.equal(model.model.layers[0].self_attn.q_proj.weight, want)
    rewrite(tmp_path, lambda t, _: t.update({f"{Q}_scale": torch.ones(1, 1, 1, 1)}))
    assert problems(tmp_path) == [f"tensor {PREFIX}{Q}_scale is F32 [1, 1, 1, 1], not F32 [1, 1, 2, 1]"]


def test_fp8_weight_and_scale_in_either_file_order_give_the_same_values(tmp_path):
    random_checkpoint(tmp_path / "one", tiny_config_dict(), fp8_attention=True)
    want = load_model(tmp_path / "one", dtype="bf16").state_dict()
    tensors = load_file(tmp_path / "one" / "model.safetensors")
    scales = {k: v for k, v in tensors.items() if k.endswith("_scale")}
    rest = {k: v for k, v in tensors.items() if k not in scales}
    for order, (first, second) in {"scale first": (scales, rest), "weight first": (rest, scales)}.items():
        folder = tmp_path / order
        folder.mkdir()
        (folder / "config.json").write_text((tmp_path / "one" / "config.json").read_text())
        save_file(first, folder / "a.safetensors")
        save_file(second, folder / "b.safetensors")
        weight_map = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(second, "b.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        got = load_model(folder, dtype="bf16").state_dict()
        assert all(torch.equal(got[name], value) for name, value in want.items()), order


# -- quantization_config against the tensors -----------------------------------------------------------------


def test_packed_tensors_of_a_config_that_is_silent_are_refused_naming_each(tmp_path):
    random_checkpoint(tmp_path, tiny_config_dict(), expert_format="mxfp4")
    rewrite(tmp_path, lambda _, config: config.pop("quantization_config"))
    found = problems(tmp_path)
    assert len(found) == 4 * 8 * 3
    assert (
        f"tensor {PREFIX}{EXPERT}.weight_packed is U8 [32, 16], which is mxfp4, but the absence of a "
        "quantization_config makes it plain" in found
    )


def test_plain_tensors_of_a_config_that_says_mxfp4_are_refused(tmp_path):
    random_checkpoint(tmp_path / "packed", tiny_config_dict(), expert_format="mxfp4")
    random_checkpoint(tmp_path / "plain", tiny_config_dict())
    (tmp_path / "plain" / "config.json").write_text((tmp_path / "packed" / "config.json").read_text())
    found = problems(tmp_path / "plain")
    assert len(found) == 4 * 8 * 3
    assert all("which is plain" in p and "config_groups.group_0 target 'Linear'" in p for p in found)


def test_an_ignore_list_that_names_packed_tensors_is_refused_naming_both(tmp_path):
    random_checkpoint(tmp_path, tiny_config_dict(), expert_format="mxfp4")
    pattern = r"re:.*layers\.1\.block_sparse_moe\.experts\.2\.w1"
    rewrite(tmp_path, lambda _, config: config["quantization_config"]["ignore"].append(pattern))
    (problem,) = problems(tmp_path)
    assert f"{PREFIX}{EXPERT}.weight_packed" in problem and f"ignore entry {pattern!r}" in problem


@pytest.mark.parametrize("dropped", ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*lm_head.*"])
def test_an_ignore_list_that_forgets_plain_tensors_is_refused_naming_both(tmp_path, dropped):
    random_checkpoint(tmp_path, tiny_config_dict(), expert_format="mxfp4")
    rewrite(tmp_path, lambda _, config: config["quantization_config"]["ignore"].remove(dropped))
    found = problems(tmp_path)
    assert all("which is plain" in p and "no entry of its ignore list" in p for p in found)
    assert all(dropped.strip("re:.*") in p.split()[1] for p in found)


def test_what_the_release_leaves_plain_without_naming_it_passes(tmp_path):
    random_checkpoint(tmp_path, tiny_config_dict(), expert_format="mxfp4")
    dense = r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"
    rewrite(tmp_path, lambda _, config: config["quantization_config"]["ignore"].remove(dense))
    load_model(tmp_path)
    rewrite(tmp_path, lambda t, _: t.pop("model.layers.1.block_sparse_moe.routed_expert_down_proj.weight"))
    (problem,) = problems(tmp_path)
    assert problem.startswith("missing tensor") and "(BF16/F16/F32 [32, 64])" in problem


def test_ignore_entries_may_be_names_with_or_without_prefix_and_patterns(tmp_path):
    random_checkpoint(tmp_path, tiny_config_dict(), expert_format="mxfp4")
    names = [
        "lm_head",
        "language_model.model.layers.0.self_attn",
        "*self_attn*",
        "shared_experts",
        "re:.*mlp.*",
    ]
    rewrite(tmp_path, lambda _, config: config["quantization_config"].update(ignore=names))
    load_model(tmp_path)


def test_a_compressed_tensors_format_without_groups_speaks_of_the_experts_alone(tmp_path):
    random_checkpoint(tmp_path, tiny_config_dict(), expert_format="mxfp4")
    bare = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    rewrite(tmp_path, lambda _, config: config.update(quantization_config=bare))
    assert load_model(tmp_path).expert_format == "mxfp4"
    rewrite(tmp_path, lambda t, _: t.update({f"{EXPERT}.weight": t.pop(f"{EXPERT}.weight_packed").float()}))
    assert any(f"{PREFIX}{EXPERT}.weight is F32" in problem for problem in problems(tmp_path))


@pytest.mark.parametrize("where", ["text_config", "top"])
def test_quantization_config_is_read_on_top_and_in_text_config(tmp_path, where):
    config = {"model_type": "kimi_k3", "text_config": tiny_config_dict()}
    random_checkpoint(tmp_path, config, expert_format="nvfp4", fp8_attention=True)
    if where == "top":
        rewrite(tmp_path, lambda _, c: c.update(quantization_config=c["text_config"].pop("quantization_config")))
    assert load_model(tmp_path).expert_format == "nvfp4"
    if where == "top":
        rewrite(tmp_path, lambda _, c: c["text_config"].update(quantization_config={"quant_method": "x"}))
        assert "two different quantization_config" in refusal(tmp_path)


def table_of(config):
    return config["quantization_config"]["quantized_layers"]


def test_a_table_that_misses_or_misnames_a_module_is_refused_naming_both(tmp_path):
    random_checkpoint(tmp_path, tiny_config_dict(), expert_format="nvfp4", fp8_attention=True)
    q, o = (f"{PREFIX}model.layers.0.self_attn.{p}_proj" for p in "qo")

    def mutate(_, config):
        table = table_of(config)
        del table[q], table[PREFIX + EXPERT]
        table[f"{PREFIX}model.layers.0.self_attn.b_proj"] = {"quant_algo": "FP8_PB_WO"}
        table[o] = {"quant_algo": "NVFP4"}

    rewrite(tmp_path, mutate)
    found = problems(tmp_path)
    assert len(found) == 4
    for name, entry in (
        (q, "quantized_layers, which has no entry for it"),
        (PREFIX + EXPERT, "quantized_layers, which has no entry for it"),
        (f"{PREFIX}model.layers.0.self_attn.b_proj", f"{PREFIX}model.layers.0.self_attn.b_proj' (FP8_PB_WO)"),
        (o, f"{o}' (NVFP4)"),
    ):
        assert any(f"tensor {name}.weight" in problem and entry in problem for problem in found), name


def test_table_entries_may_be_parents_patterns_and_lack_the_prefix(tmp_path):
    random_checkpoint(tmp_path, tiny_config_dict(), expert_format="nvfp4")
    parents = {"model.layers.1.block_sparse_moe.experts": {"quant_algo": "NVFP4"}}
    parents["*.block_sparse_moe.experts.*"] = {"quant_algo": "nvfp4", "group_size": 16}
    rewrite(tmp_path, lambda _, config: config["quantization_config"].update(quantized_layers=parents))
    assert load_model(tmp_path).expert_format == "nvfp4"


def test_a_table_and_an_ignore_list_that_name_the_same_module_are_refused(tmp_path):
    random_checkpoint(tmp_path, tiny_config_dict(), expert_format="nvfp4")
    rewrite(tmp_path, lambda _, config: config["quantization_config"].update(ignore=["lm_head", f"*{EXPERT}"]))
    (problem,) = problems(tmp_path)
    assert f"tensor {PREFIX}{EXPERT}.weight" in problem and f"ignore entry '*{EXPERT}'" in problem


def test_only_routed_experts_may_be_four_bit_and_they_may_not_be_fp8(tmp_path):
    random_checkpoint(tmp_path, tiny_config_dict(), expert_format="nvfp4")
    module = "model.layers.1.block_sparse_moe.shared_experts.up_proj"

    def pack_shared(tensors, config):
        packed, scale, factor = quant.quantise_nvfp4(tensors[f"{module}.weight"].float())
        tensors |= {f"{module}.weight": packed, f"{module}.weight_scale": scale}
        tensors[f"{module}.weight_scale_2"] = factor
        table_of(config)[module] = {"quant_algo": "NVFP4"}

    rewrite(tmp_path, pack_shared)
    (problem,) = problems(tmp_path)
    assert f"tensor {PREFIX}{module}.weight" in problem and "only routed experts" in problem
    rewrite(
        tmp_path,
        lambda _, c: [e.update(quant_algo="FP8_PB_WO", group_size=128) for e in table_of(c).values()],
    )
    assert "routed experts are not served in FP8" in refusal(tmp_path)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"quant_method": "gptq"}, "quant_method 'gptq'"),
        ({"quant_algo": "NVFP4"}, "quant_algo 'NVFP4'"),
        ({"quantized_layers": None}, "without a quantized_layers table"),
        ({"quantized_layers": {"lm_head": {"quant_algo": "W4A16"}}}, "'lm_head' has quant_algo 'W4A16'"),
        ({"quantized_layers": {"lm_head": {"quant_algo": "NVFP4", "group_size": 32}}}, "has group_size 32"),
        ({"ignore": [3]}, "ignore is not a list of names"),
    ],
)
def test_modelopt_configs_that_are_not_served_are_named(tmp_path, change, message):
    random_checkpoint(tmp_path, tiny_config_dict(), expert_format="nvfp4")
    rewrite(tmp_path, lambda _, config: config["quantization_config"].update(change))
    assert message in refusal(tmp_path) and "config.json quantization_config" in refusal(tmp_path)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"config_groups": {}}, "config_groups is not an object with groups"),
        ({"config_groups": None, "format": "int4"}, "format 'int4'"),
        (
            {"config_groups": {"g": {"format": "int-quantized", "targets": ["Linear"]}}},
            "format 'int-quantized'",
        ),
        ({"config_groups": {"g": {"targets": ["Linear"], "weights": {"group_size": 64}}}}, "groups of 64"),
        ({"config_groups": {"g": {"targets": "Linear"}}}, "config_groups.g has no list of targets"),
        ({"ignore": ["re:("]}, "bad regular expression 're:('"),
    ],
)
def test_compressed_tensors_configs_that_are_not_served_are_named(tmp_path, change, message):
    random_checkpoint(tmp_path, tiny_config_dict(), expert_format="mxfp4")
    rewrite(tmp_path, lambda _, config: config["quantization_config"].update(change))
    assert message in refusal(tmp_path)


# -- options -------------------------------------------------------------------------------------------------


def test_dtype_names_auto_and_unknown(tmp_path):
    random_checkpoint(tmp_path, tiny_config_dict())
    assert load_model(tmp_path).dtype == torch.float32
    assert load_model(tmp_path, dtype="bfloat16").lm_head.weight.dtype == torch.bfloat16
    assert load_model(tmp_path, dtype=torch.float16).lm_head.weight.dtype == torch.float16
    with pytest.raises(ConfigError, match="dtype 'int8' is unknown"):
        load_model(tmp_path, dtype="int8")


@pytest.mark.parametrize("wrong", [(0, 9), (3, 3), (-1, 2)])
def test_an_expert_range_outside_the_model_is_refused_with_its_numbers(tmp_path, wrong):
    random_checkpoint(tmp_path, tiny_config_dict())
    with pytest.raises(ValueError, match=rf"{wrong[0]}\.\.{wrong[1]} is not inside 0\.\.8"):
        load_model(tmp_path, expert_range=wrong)


def test_a_config_the_model_cannot_serve_names_the_file(tmp_path):
    random_checkpoint(tmp_path, tiny_config_dict())
    rewrite(tmp_path, lambda _, config: config.pop("kv_lora_rank"))
    assert "config.json: the model config lacks kv_lora_rank" in refusal(tmp_path)


def test_token_ids_outside_the_vocabulary_are_refused_before_weights_are_read(tmp_path):
    random_checkpoint(tmp_path, tiny_config_dict(eos_token_id=320))
    assert "eos_token_id 320, outside the vocab_size of 320" in refusal(tmp_path)


def test_reading_and_building_load_no_compiler_and_leave_no_folder(tmp_path):
    """A meta model with noise in it would be run through torch's compiler, `empty_like` of one through sympy."""
    random_checkpoint(tmp_path / "model", tiny_config_dict())
    (tmp_path / "tmp").mkdir()
    code = (
        "import sys; from dwdp.model.loader import load_model, load_reads; "
        "load_reads(sys.argv[1]); load_model(sys.argv[1]); assert not {'torch._dynamo', 'sympy'} & sys.modules.keys()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "model")]
    subprocess.run(command, env=child_environment(TMPDIR=str(tmp_path / "tmp")), check=True, timeout=60)
    assert list((tmp_path / "tmp").iterdir()) == []
