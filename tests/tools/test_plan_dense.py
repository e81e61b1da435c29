"""`dwdp plan --dense`: the layout that the collector finds, the ledger of a real set-up, and Kimi-K3 by hand."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dwdp.config.schema import DenseConfig
from dwdp.executor.settings import model_folder
from dwdp.model.config import ModelConfig
from dwdp.model.decoder import KimiK3Model
from dwdp.model.dense_shapes import EMBEDDING, EXCLUDED, MOE_OFF, SMALL, dense_shapes
from dwdp.model.loader import load_model
from dwdp.model.writer import random_checkpoint
from dwdp.partition.collect import collect
from dwdp.runtime.slots import page_places, slot_bytes
from dwdp.tools import plan
from dwdp.tools.cli import run
from dwdp.tools.hardware import GPUS
from dwdp.tools.plan_dense import DenseSizes
from dwdp.weights.store import RowStore
from tests.support.system import shared
from tests.support.tiny import tiny_48b_config_dict, tiny_config_dict
from tests.tools.test_plan import K3, planned, refused

GIB, MIB, GRANULE = 1 << 30, 1 << 20, 2 << 20
NANO = model_folder("nano-k3")
KIMI_LINEAR_48B = tiny_48b_config_dict(
    vocab_size=163840, hidden_size=2304, num_hidden_layers=27, num_attention_heads=32, num_key_value_heads=32,
    intermediate_size=9216, q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
    v_head_dim=128, num_experts=256, num_experts_per_token=8, moe_intermediate_size=1024,
    linear_attn_config={
        "num_heads": 32, "head_dim": 128,
        "kda_layers": [i for i in range(1, 28) if i % 4 and i != 27], "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
    },
)  # fmt: skip
CONFIGS = {
    "tiny": tiny_config_dict(),
    "no query latent, two dense layers": tiny_config_dict(first_k_dense_replace=2, q_lora_rank=None),
    "no shared experts, odd widths": tiny_config_dict(num_shared_experts=0, vocab_size=321, kv_lora_rank=33),
    "predecessor, tiny": tiny_48b_config_dict(),
    "predecessor, like 48B": KIMI_LINEAR_48B,
    "nano-k3": json.loads((NANO / "config.json").read_text()),
    "kimi-k3": K3,
}
LARGE = ("predecessor, like 48B", "kimi-k3")
FORMATS = {"plain": torch.bfloat16, "mxfp4": torch.bfloat16, "nvfp4": torch.bfloat16, "fp32": torch.float32}
BOTH, ATTENTION = ("attn", "moe"), ("attn",)
CASES = [
    (name, form, segments)
    for name in CONFIGS
    for form in FORMATS
    for segments in (BOTH, ATTENTION)
    if not (name in LARGE and segments == ATTENTION and form != "nvfp4")  # the dense tensors are the same
    and not (name == "nano-k3" and form == "mxfp4")  # its experts' widths are no multiples of 32
]


@cache
def meta_model(name: str, form: str) -> KimiK3Model:
    expert_format = "plain" if form == "fp32" else form
    return KimiK3Model(
        ModelConfig.from_dict(CONFIGS[name]), dtype=FORMATS[form], expert_format=expert_format, device="meta"
    )


def sizes_of(name: str, expert_format: str = "plain", **settings) -> tuple[plan.ModelSizes, DenseSizes]:
    config = ModelConfig.from_dict(CONFIGS[name])
    sizes = plan.ModelSizes.of(config, expert_format)
    return sizes, DenseSizes.of(config, DenseConfig(**settings), factor_nbytes=sizes.factor_nbytes)


@pytest.mark.parametrize(("name", "form", "segments"), CASES, ids=str)
def test_the_layout_is_the_one_that_the_collector_finds(name, segments, form):
    """Blob for blob, storage for storage, digest included; fails when a tensor's order, dtype or place differs."""
    config, model, dtype = ModelConfig.from_dict(CONFIGS[name]), meta_model(name, form), FORMATS[form]
    everything = sum(parameter.nbytes for parameter in model.parameters())
    tables = sum(t.nbytes for experts in model.moe_layers() for t in experts.expert_tables().values())
    factors = sum(t.nbytes for experts in model.moe_layers() for t in experts.small_tensors().values())
    for min_bytes in (1 << 20, 1 << 40) if name in LARGE else (0, 1, 512, 4096, 1 << 20):
        shapes = dense_shapes(config, segments=segments, min_bytes=min_bytes, dtype=str(dtype).removeprefix("torch."))
        assert shapes.layout.moved_nbytes + sum(shapes.stays.values()) == everything - tables - factors
        for num_ranks in (8,) if name in LARGE else (2, 3, 8):
            found = collect(
                model, num_ranks=num_ranks, segments=segments, min_bytes=min_bytes, strict=True, without_bytes=True
            )
            layout = shapes.layout_of(num_ranks)
            assert layout == found.layout
            assert layout.digest == found.layout.digest
            if dtype != torch.bfloat16:
                continue
            for chunk_mb, granularity in ((0, GRANULE), (1, 4096), (700, GRANULE)):
                _, dense = sizes_of(name, form, segments=segments, min_bytes=min_bytes, store_chunk_mb=chunk_mb)
                planned_dense = dense.on(num_ranks, granularity)
                own = planned_dense.fullest
                store = RowStore(SimpleNamespace(granularity=granularity), found.layout, 0, chunk_bytes=chunk_mb << 20)
                assert own.stored_bytes == store.nbytes
                assert own.handles == tuple(chunk.nbytes for chunk in store.chunks[0])
                assert own.slot_bytes == slot_bytes(found.layout, granularity)
                assert planned_dense.moved_bytes == found.layout.moved_nbytes
                assert planned_dense.replicated_bytes == everything - tables - found.layout.moved_nbytes
                for blob in found.layout.blobs:
                    kind = f"a_{config.layer_kind(blob.layer_index)}" if blob.segment == "A" else "d"
                    assert getattr(planned_dense, f"{kind}_bytes") == blob.moved_nbytes, blob.name


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("form", ["plain", "plain+fp8", "mxfp4", "nvfp4", "nvfp4+fp8"])
def test_a_loaded_checkpoint_has_the_layout_in_every_format(tmp_path, form, dtype):
    """FP8 attention is widened when it is loaded, so that it moves in the model's dtype."""
    expert_format, _, fp8 = form.partition("+")
    random_checkpoint(tmp_path, tiny_config_dict(), seed=0, expert_format=expert_format, fp8_attention=bool(fp8))
    model = load_model(tmp_path, dtype=dtype)
    found = collect(model, num_ranks=3, segments=("attn", "moe"), min_bytes=1, strict=True)
    shapes = dense_shapes(model.config, segments=("attn", "moe"), min_bytes=1, dtype=dtype)
    assert shapes.layout_of(3) == found.layout


@pytest.mark.parametrize(
    ("n", "settings"),
    [
        (2, {"min_bytes": 1}),
        (3, {"min_bytes": 1}),
        (3, {"min_bytes": 1, "store_chunk_mb": 1}),
        (2, {"min_bytes": 16000, "segments": "attn"}),
        (2, {"min_bytes": 1, "own_rows": "map"}),
        (3, {"min_bytes": 1, "own_rows": "map"}),
        (3, {"min_bytes": 16000, "segments": "attn", "own_rows": "map"}),
        (2, {"min_bytes": 1, "roots": "discover"}),
    ],
    ids=str,
)
def test_the_plan_is_the_ledger_of_a_real_set_up(n, settings):
    """Rank by rank, as ranks differ where own rows are mapped in place; fails when a plan takes one rank's for all."""

    def held(rank):
        ledger, weights = rank.report()["ledger"], rank.manager.dense.weights
        dense = ledger["stored_bytes"] - rank.manager.report["experts"]["stored_bytes"]
        areas = [*weights.store.ranges.values(), *weights.slots._ranges]
        mapped = sum(len(area.mappings) for area in areas)
        return ledger["dense_moved_bytes"], dense, ledger["slot_bytes"], ledger["replicated_bytes"], mapped

    found = shared(NANO, n, held, dense={"enabled": True} | settings, dtype="bfloat16")
    dense = sizes_of("nano-k3", **settings)[1].on(n, 4096, page_bytes=2 * 4096)
    ranks = [dense.rank(rank) for rank in range(n)]
    assert found == [
        (dense.moved_bytes, own.stored_bytes, own.slot_bytes, dense.replicated_bytes, own.mappings) for own in ranks
    ]
    assert dense.moved_bytes > 0 and dense.mappings == max(own.mappings for own in ranks)
    document = dense.document()
    assert document["stored_bytes"] + document["slot_bytes"] == max(own.nbytes for own in ranks)
    if settings.get("own_rows") == "map":
        assert len(dense.fullest.handles) == len(dense.layout.blobs)
        assert len(set(ranks)) > 1, "ranks differ"
    else:
        assert len(dense.fullest.handles) == (2 if "store_chunk_mb" in settings else 1)


def up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def test_kimi_k3_by_hand(capsys):
    """Fails when the router's bias moves, FP8 attention stays eight bits wide, or rows are not rounded to 256."""
    hidden, width, experts, latent, shared_width = 7168, 96 * 128, 896, 3584, 6144
    kda = 2 * (5 * width * hidden + 128 * hidden + width * 128 + 96 * hidden)  # convolutions and the rest are small
    mla = 2 * (1536 * hidden + 18432 * 1536 + 576 * hidden + 24576 * 512 + 2 * width * hidden)
    moe = 2 * (experts * hidden + 3 * shared_width * hidden + 2 * latent * hidden)
    document = planned(capsys, "--ranks", "8", "--format", "nvfp4", "--dense")
    assert set(document) == {"partition", "page_bytes", "ranks", "dense"}
    row = lambda nbytes: up(up(nbytes, 8) // 8, 256)  # noqa: E731
    stored = up(68 * row(kda) + 24 * row(mla) + 92 * row(moe), GRANULE)
    moved = 68 * kda + 24 * mla + 92 * moe
    assert document["dense"] == {
        "a_kda_bytes": kda,
        "a_mla_bytes": mla,
        "d_bytes": moe,
        "moved_bytes": moved,
        "stored_bytes": stored,
        "slot_bytes": 2 * up(8 * row(kda), GRANULE) + 3 * up(8 * row(moe), GRANULE),
        "replicated_bytes": plan.ModelSizes.of(ModelConfig.from_dict(K3), "nvfp4").whole_nbytes - moved,
    }
    assert moved == pytest.approx(106.42e9, rel=1e-4)
    # with its projections in FP8 and a router in fp32 it would be the 56.10 GB of the formula for the public model
    narrow_kda = kda - 5 * width * hidden
    narrow_mla = mla // 2 + 3 * 24576 * 512  # kv_b in bf16, and two absorbed copies of half of it each
    narrow_moe = moe // 2 + 3 * experts * hidden
    assert 68 * narrow_kda + 24 * narrow_mla + 92 * narrow_moe == 56_103_796_736
    mxfp4 = planned(capsys, "--ranks", "8", "--dense")["dense"]
    factors = 92 * 896 * 3 * 4
    assert mxfp4 == document["dense"] | {"replicated_bytes": document["dense"]["replicated_bytes"] - factors}


def test_what_stays_says_why():
    _, dense = sizes_of("kimi-k3", "nvfp4")
    assert dense.stays[EMBEDDING] == 2 * 163840 * 7168 * 2
    assert dense.stays[EXCLUDED] == 92 * 896 * 4
    assert 0 < dense.stays[SMALL] < 0.05 * GIB and MOE_OFF not in dense.stays
    _, attention = sizes_of("kimi-k3", "nvfp4", segments="attn")
    everything_moe = 92 * dense.kinds["D"][1] + dense.stays[SMALL] - attention.stays[SMALL]
    assert attention.stays[MOE_OFF] == everything_moe
    for sizes in (dense, attention):
        assert sum(sizes.stays.values()) == sizes.on(8, GRANULE).replicated_bytes


@pytest.mark.parametrize(("gpu", "fewest"), [("h200", 17), ("gb300", 7)])
def test_kimi_k3_fits_where_experts_alone_do_not(capsys, gpu, fewest):
    options = ("--format", "nvfp4", "--gpu", gpu, "--dense")
    assert planned(capsys, "--ranks", "8", *options)["smallest_ranks_that_fit"] == fewest
    for ranks, fits in ((fewest - 1, False), (fewest, True)):
        assert planned(capsys, "--ranks", str(ranks), *options)["fits"] is fits
        assert planned(capsys, "--ranks", str(ranks), *options[:-1])["fits"] is False


def test_rows_and_slots_take_the_place_of_whole_weights(capsys):
    options = ("--ranks", "12", "--format", "nvfp4", "--gpu", "gb300")
    alone, document = planned(capsys, *options), planned(capsys, *options, "--dense")
    assert document["ranks"] == alone["ranks"]
    dense = document["dense"]
    state = document["state_bytes_per_sequence"]
    left = min(
        GPUS["gb300"].memory_bytes - rank["handle_bytes"] - rank["ring_bytes"] - plan.WORKING_RESERVE_BYTES - state
        - dense["stored_bytes"] - dense["slot_bytes"] - dense["replicated_bytes"]
        for rank in document["ranks"]
    )  # fmt: skip
    assert document["kv_tokens"] == int(0.9 * left) // (64 * 24 * 576 * 2) * 64
    assert document["kv_tokens"] > 5 * alone["kv_tokens"]
    # a layer's copy brings in the eleven other rows of its blobs too
    gathered = (
        (document["copy_seconds_per_layer"] - alone["copy_seconds_per_layer"]) * GPUS["gb300"].link_gb_per_s * 1e9
    )
    assert gathered == pytest.approx(dense["moved_bytes"] / 92 * 11 / 12, rel=1e-4)
    assert document["load_bytes_per_rank"] == alone["load_bytes_per_rank"]
    assert run(["plan", "--model", "kimi-k3", *options, "--dense"]) == 0
    text = capsys.readouterr().out
    gained = document["kv_tokens"] - alone["kv_tokens"]
    assert f"{gained:,} more than the {alone['kv_tokens']:,} with experts alone" in text
    assert "in 0.9 of what is left" in text and "load: sharded" not in text
    run(["plan", "--model", "kimi-k3", "--ranks", "17", "--format", "nvfp4", "--gpu", "h200", "--dense"])
    text = capsys.readouterr().out
    assert "experts alone do not fit" in text and "17 (with experts alone: none)" in text
    assert "more than the GPU has, unless it loads straight into rows (load: sharded)" in text


def test_the_readme_shows_what_is_printed(capsys):
    """Fails when a number or a sentence changes and README.md does not."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    shown = readme.split("\n$ dwdp plan ")[1].split("```")[0].splitlines()
    assert run(["plan", *shown[0].split()]) == 0
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    missing = [line for line in shown[1:] if line != "..." and " ".join(line.split()) not in printed]
    assert len(shown) > 15 and missing == []


def test_dense_mappings_come_out_of_the_budget(monkeypatch):
    sizes, dense = sizes_of("kimi-k3", "nvfp4")
    most = max(rank.mappings for rank in plan.make_plan(sizes, plan.Split(8), 2).ranks)
    monkeypatch.setattr(plan, "MAPPING_BUDGET", most)
    assert plan.make_plan(sizes, plan.Split(8), 2).page_bytes == 16 * MIB
    assert plan.make_plan(sizes, plan.Split(8), 2, dense=dense).page_bytes == 32 * MIB
    monkeypatch.setattr(plan, "MAPPING_BUDGET", most + 8 + 5)  # a handle of each rank and five slots
    assert plan.make_plan(sizes, plan.Split(8), 2, dense=dense).page_bytes == 16 * MIB


def test_own_rows_in_place_share_the_rings_pages_and_the_budget(monkeypatch):
    """Fails when slots keep small pages where the budget makes the ring's grow."""
    sizes, dense = sizes_of("kimi-k3", "nvfp4", own_rows="map")
    plain = plan.make_plan(sizes, plan.Split(8), 2, dense=dense)
    assert plain.page_bytes == plain.dense.page_bytes == 16 * MIB
    assert plain.dense.rank(0).mappings == 8 * 184 + sum(
        len(offsets) for blobs in page_places(plain.dense.layout, 0, GRANULE, 16 * MIB).values() for _, offsets in blobs
    )
    most = max(rank.mappings for rank in plain.ranks)
    monkeypatch.setattr(plan, "MAPPING_BUDGET", most + plain.dense.mappings)
    assert plan.make_plan(sizes, plan.Split(8), 2, dense=dense).page_bytes == 16 * MIB
    monkeypatch.setattr(plan, "MAPPING_BUDGET", most - 1)
    tight = plan.make_plan(sizes, plan.Split(8), 2, dense=dense)
    assert tight.page_bytes == tight.dense.page_bytes == 32 * MIB
    monkeypatch.setattr(plan, "MAPPING_BUDGET", 1000)
    assert plan.smallest_ranks_that_fit(sizes, 2, GPUS["gb300"], dense=dense) is None


def test_own_rows_in_place_need_smaller_slots_and_never_a_second_size_of_handles(capsys, tmp_path):
    file = tmp_path / "server.yaml"
    file.write_text("dense_dwdp: {own_rows: map}\n")
    plain, mapped = dense_of(capsys), dense_of(capsys, "--config", str(file))
    same = ("a_kda_bytes", "a_mla_bytes", "d_bytes", "moved_bytes", "replicated_bytes")
    assert list(mapped) == list(plain) and [mapped[key] for key in same] == [plain[key] for key in same]
    assert mapped["slot_bytes"] < plain["slot_bytes"]
    assert plain["stored_bytes"] < mapped["stored_bytes"] < plain["stored_bytes"] + 2 * 184 * GRANULE
    options = ["--ranks", "8", "--dense", "--config", str(file)]
    assert run(["plan", "--model", "kimi-k3", "--gpu", "gb300", *options]) == 0
    text = capsys.readouterr().out
    assert "The fullest rank stores a row of each" in text and "184 handles of a row each, mapped in place" in text
    assert "pages of 16 MiB around the own row" in text
    refused(capsys, ["plan", "--model", "kimi-k3", *options, "--store-chunk-mb", "64"], "own_rows: map", "64")


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in LARGE])
def test_roots_that_are_discovered_are_planned_like_declared_ones(name, capsys, tmp_path):
    for segments in (BOTH, ATTENTION):
        shapes = dense_shapes(ModelConfig.from_dict(CONFIGS[name]), segments=segments, min_bytes=512)
        found = collect(
            meta_model(name, "plain"), num_ranks=3, segments=segments, min_bytes=512, strict=True, without_bytes=True,
            roots="discover",
        )  # fmt: skip
        assert shapes.layout_of(3) == found.layout
    file = tmp_path / "server.yaml"
    file.write_text("dense_dwdp: {roots: discover}\n")
    assert dense_of(capsys, "--config", str(file)) == dense_of(capsys)


def dense_of(capsys, *more: str) -> dict:
    assert run(["plan", "--model", "kimi-k3", "--ranks", "8", "--dense", *more, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["dense"]


def test_options_the_config_file_and_the_environment_set_what_moves(capsys, monkeypatch, tmp_path):
    plain = dense_of(capsys)
    attention = dense_of(capsys, "--segments", "attn")
    large = dense_of(capsys, "--min-bytes", str(100 * MIB))
    chunked = dense_of(capsys, "--store-chunk-mb", "512")
    assert attention["d_bytes"] == 0 < attention["a_kda_bytes"] == plain["a_kda_bytes"]
    assert attention["moved_bytes"] + 92 * plain["d_bytes"] == plain["moved_bytes"]
    assert 0 < large["moved_bytes"] < plain["moved_bytes"]
    assert plain["stored_bytes"] < chunked["stored_bytes"] < plain["stored_bytes"] + 40 * GRANULE
    file = tmp_path / "server.yaml"
    file.write_text("role: context\ndense_dwdp:\n  segments: [attn]\n  min_bytes: 1\n")
    from_file = dense_of(capsys, "--config", str(file))
    assert from_file == dense_of(capsys, "--segments", "attn", "--min-bytes", "1")
    assert dense_of(capsys, "--config", str(file), "--segments", "attn,moe", "--min-bytes", "1048576") == plain
    # the environment wins, as in a launch, and one line says so
    monkeypatch.setenv("TRTLLM_DWDP_DENSE_SEGMENTS", "attn")
    assert run(["plan", "--model", "kimi-k3", "--ranks", "8", "--dense", "--segments", "attn,moe", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["dense"] == attention
    (line,) = captured.err.splitlines()
    assert "TRTLLM_DWDP_DENSE_SEGMENTS=attn overrides dense_dwdp.segments" in line
    monkeypatch.setenv("TRTLLM_DWDP_DENSE_SEGMENTS", "moe")
    refused(capsys, ["plan", "--model", "kimi-k3", "--ranks", "8", "--dense"], "TRTLLM_DWDP_DENSE_SEGMENTS='moe'")


def test_the_config_files_expert_section_counts_and_what_no_plan_follows_is_refused(capsys, tmp_path):
    file = tmp_path / "server.yaml"
    file.write_text("dwdp: {num_experts_per_worker: 82, num_prefetch_experts: 74, num_prefetch_slots: 3}\n")
    base = ["--ranks", "12"]
    asked = planned(capsys, *base, "--size", "82", "--stride", "74", "--slots", "3")
    assert planned(capsys, *base, "--config", str(file)) == asked
    assert planned(capsys, *base, "--config", str(file), "--slots", "2") != asked
    arguments = ["plan", "--model", "kimi-k3", *base, "--dense", "--config", str(file)]
    for text, words in (
        ("dwdp: {dwdp_size: 8}", ["dwdp_size is 8", "12 ranks"]),
        ("dwdp: {page_granules: 4}", ["dwdp.page_granules 4"]),
        ("dwdp: {mapping_budget: 4}", ["dwdp.mapping_budget 4"]),
        ("dense_dwdp: {min_byte: 1}", ["min_byte", "unknown key"]),
        ("replicated: true", ["replicated"]),
    ):
        file.write_text(text)
        refused(capsys, arguments, str(file), *words)


def test_the_models_own_config_is_used(capsys, tmp_path):
    """nano-k3 ships min_bytes 1, without which none of its small matrices would move."""
    arguments = ["plan", "--model", "nano-k3", "--ranks", "2", "--dense"]
    assert run([*arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == 1 and "dwdp.yaml is used" in captured.err
    document = json.loads(captured.out)["dense"]
    assert document == sizes_of("nano-k3", min_bytes=1)[1].on(2, GRANULE).document()
    empty = tmp_path / "empty.yaml"
    empty.write_text("{}")
    assert run([*arguments, "--config", str(empty), "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)["dense"]
    assert captured.err == "" and document["moved_bytes"] == document["stored_bytes"] == document["slot_bytes"] == 0
    assert run([*arguments, "--config", str(empty)]) == 0
    assert "Dense DWDP moves nothing" in capsys.readouterr().out


def test_dense_dwdp_that_a_launch_would_have_and_a_plan_leaves_out_is_one_note(capsys, monkeypatch, tmp_path):
    def notes(*more):
        assert run(["plan", "--model", "nano-k3", "--ranks", "2", *more]) == 0
        return [line for line in capsys.readouterr().err.splitlines() if "--dense plans it" in line]

    (note,) = notes()  # nano-k3's own file has it on
    assert "dwdp.yaml (dense_dwdp.enabled) switches dense DWDP on" in note
    assert notes("--dense") == []
    file = tmp_path / "plain.yaml"
    file.write_text("ranks: 2")
    assert notes("--config", str(file)) == []
    monkeypatch.setenv("DWDP_DENSE", "yes")
    (note,) = notes("--config", str(file))
    assert "DWDP_DENSE=yes switches dense DWDP on" in note
    monkeypatch.setenv("DWDP_DENSE", "0")
    assert notes() == []
