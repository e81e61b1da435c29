"""Decode through FlashMLA without a GPU: when it is chosen, what it is given, and its place beside our kernels."""

from __future__ import annotations

import logging
from importlib import metadata

import pytest
import torch

from dwdp.kernels import flash_mla, select
from dwdp.kernels.attention import attend
from dwdp.kernels.batch import PackedBatch
from dwdp.kernels.decode import Blocks
from dwdp.model.config import ModelConfig
from dwdp.model.state import ModelState
from dwdp.runtime.sm_reserve import drop_reserve, reserve_sms
from tests.kernels.references import attention_case, decode_by_pages
from tests.support.tiny import tiny_config_dict, tiny_model, tiny_model_config, token_ids

WIDE = dict(latent=512, rope=64)


@pytest.fixture
def library(monkeypatch):
    """FlashMLA on the host: its operation in torch, here for the interpreter's fp32; returns what counts its calls."""
    calls = []

    def operation(*given):
        calls.append(given)
        return decode_by_pages(*given)

    monkeypatch.setattr(flash_mla, "operation", lambda: operation)
    monkeypatch.setattr(select, "hopper", lambda device: True)
    monkeypatch.setattr(flash_mla, "DTYPE", "float32")
    return calls


@pytest.fixture
def small_blocks(monkeypatch):
    pytest.importorskip("triton")
    for name in ("attention.prefill_blocks", "decode.decode_blocks"):
        monkeypatch.setattr(f"dwdp.kernels.{name}", lambda dtype: Blocks(16, 16, 4, 1))


def attended(case):
    case.batch.plans.clear()
    return attend(case.query, case.rows, case.batch, case.cache, case.weight, span=32, **case.where)


@pytest.mark.parametrize(
    ("lengths", "starts"),
    [([1, 1, 1], [37, 127, 64]), ([1, 18, 1, 2], [9, 0, 100, 30])],
    ids=["decode alone", "beside prefill"],
)
def test_a_packed_batch_gives_what_the_formula_and_our_kernel_give(library, small_blocks, monkeypatch, lengths, starts):
    """Slots are not in order and NaN stands behind contexts. Mutations that fail here: contexts without the new row,
    pages of slots counted in sequence order, rope columns left as they were made, a scale of 1."""
    case = attention_case(lengths, starts, heads=2, capacity=128, **WIDE)
    got = attended(case)
    assert len(library) == 1
    torch.testing.assert_close(got.double(), case.expected(), atol=2e-5, rtol=0)
    monkeypatch.setattr(select, "hopper", lambda device: False)
    torch.testing.assert_close(got, attended(case), atol=2e-5, rtol=0)
    assert len(library) == 1


def test_what_a_forward_needs_is_made_once_for_all_layers(library, small_blocks):
    """The first layer's call makes the schedule, the others give it back. Mutation: a key of `plans` that differs by
    layer, or a schedule that is dropped."""
    case = attention_case([1, 3, 1], [70, 0, 12], heads=2, capacity=128, **WIDE)
    case.batch.plans.clear()
    for _ in range(3):
        attend(case.query, case.rows, case.batch, case.cache, case.weight, span=32, **case.where)
    first, *others = library
    assert first[7:] == (None, None) and len(others) == 2
    for given in others:
        assert given[3] is first[3] and given[4] is first[4]
        assert given[7] is others[0][7] is not None and given[8] is others[0][8] is not None
    assert given[0].is_contiguous() and given[1].data_ptr() == case.cache.data_ptr()


def test_a_model_makes_one_plan_a_forward_for_all_of_its_layers(library, small_blocks, monkeypatch):
    """Decode beside prefill, then decode alone, in a state that is read where it lies. Mutation: pages that are not
    kept are made by every layer."""
    config = tiny_model_config(
        num_hidden_layers=3, linear_attn_config={"full_attn_layers": [1, 2, 3], "kda_layers": []}
    )
    model, made = tiny_model(config), []
    monkeypatch.setattr(flash_mla, "LATENT", config.kv_lora_rank)
    monkeypatch.setattr(flash_mla, "ROPE", config.qk_rope_head_dim)
    pages = flash_mla.Pages
    monkeypatch.setattr(flash_mla, "Pages", lambda *given: made.append(given) or pages(*given))

    def run():
        state, outs = model.new_state(2, 64), []
        for lengths, slots in [((3, 18), (1, 0)), ((1, 5), (0, 1)), ((1, 1), (1, 0))]:
            ids = torch.cat([token_ids(n, seed=n)[0] for n in lengths])
            outs.append(model(ids, state, lengths=lengths, slots=slots))
        return torch.cat(outs)

    with torch.no_grad():
        monkeypatch.setenv("DWDP_KERNELS", "torch")
        want = run()
        assert not library
        monkeypatch.setenv("DWDP_KERNELS", "triton")
        torch.testing.assert_close(run(), want, atol=5e-5, rtol=0)
    assert [table.shape[0] for table, _ in made] == [1, 2] and len(library) == 6
    assert [call[7] is None for call in library] == [True, False, False] * 2


def test_pages_of_each_sequence_lie_in_its_slot(library):
    batch = PackedBatch.of([1, 1], starts=[200, 63], slots=[3, 0], state_batch=4)
    cache, query = torch.zeros(4, 256, 576), torch.zeros(2, 5, 192)
    plans: dict = {}
    made = flash_mla.pages(plans, batch.slot_index, batch.first_positions + 1, 201, query, cache, 512)
    assert made.table.tolist() == [[12, 13, 14, 15], [0, 1, 2, 3]] and made.lengths.tolist() == [201, 64]
    assert made.table.dtype == made.lengths.dtype == torch.int32 and list(plans.values()) == [made]


def test_it_is_chosen_for_what_it_computes_and_nothing_else(library, monkeypatch):
    """Each condition alone decides."""
    monkeypatch.setattr(flash_mla, "DTYPE", "bfloat16")
    query, cache = torch.zeros(2, 96, 192, dtype=torch.bfloat16), torch.zeros(3, 128, 576, dtype=torch.bfloat16)
    runs = flash_mla.runs_on
    assert runs(query, cache, 512)
    assert not runs(query.half(), cache.half(), 512) and not runs(query.half(), cache, 512)
    assert not runs(query, cache, 448)  # of 512 + 64 columns cut elsewhere
    assert not runs(query, torch.zeros(3, 128, 577, dtype=torch.bfloat16), 512)
    assert not runs(query, torch.zeros(3, 129, 576, dtype=torch.bfloat16), 512)
    assert not runs(query, torch.zeros(6, 128, 576, dtype=torch.bfloat16)[::2], 512)
    assert not runs(query, torch.zeros(3, 128, 640, dtype=torch.bfloat16)[..., :576], 512)
    with monkeypatch.context() as patched:
        patched.setattr(flash_mla, "operation", lambda: None)
        assert not runs(query, cache, 512)
    reserve_sms(16, 0)  # its programs would take the SMs of a gather
    try:
        assert not runs(query, cache, 512)
    finally:
        drop_reserve()
    assert runs(query, cache, 512)
    monkeypatch.undo()
    assert not select.hopper(torch.device("cpu")) and not runs(query, cache, 512)
    for major in (8, 9, 10):
        select.hopper.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))  # noqa: B023
        assert select.hopper(torch.device("cuda", 7)) is (major == 9)
    select.hopper.cache_clear()


class Package:
    def __init__(self, version: str) -> None:
        self.version = version

    def locate_file(self, path: str) -> str:
        return f"/nowhere/{path}"


@pytest.mark.parametrize("found", [None, "0.9", flash_mla.FLASH_MLA_VERSION])
def test_a_library_that_cannot_be_used_is_one_line_of_the_log(monkeypatch, caplog, found):
    """Missing, of another version, or a file that does not load."""

    def distribution(name):
        assert name == "sgl-flash-mla"
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return Package(found)

    monkeypatch.setattr(metadata, "distribution", distribution)
    flash_mla.operation.cache_clear()
    try:
        with caplog.at_level(logging.INFO, logger=flash_mla.__name__):
            assert flash_mla.operation() is None and flash_mla.operation() is None
    finally:
        flash_mla.operation.cache_clear()
    (record,) = caplog.records
    text = record.getMessage()
    assert record.levelno == logging.INFO and "pip install --no-deps sgl-flash-mla==1.0.0" in text
    assert {None: "PackageNotFoundError", "0.9": "sgl-flash-mla is 0.9"}.get(found, "_C_legacy") in text


def test_new_states_are_whole_pages_where_the_library_might_read_them():
    bf16 = torch.bfloat16
    assert [flash_mla.padded(n, 576, bf16, "cuda:1") for n in (1, 64, 65)] == [64, 64, 128]
    for width, dtype, device in ((576, bf16, "cpu"), (576, torch.float32, "cuda"), (40, bf16, "cuda")):
        assert flash_mla.padded(65, width, dtype, device) == 65


def test_padding_is_no_room_and_moves_with_its_sequence(monkeypatch):
    """Mutation: rows of `stack` that are not padded fail here, and a `capacity` that is."""
    monkeypatch.setattr("dwdp.model.state.padded", lambda capacity, *where: -(-capacity // 8) * 8)
    config = ModelConfig.from_dict(tiny_config_dict())

    def of(capacity):
        return ModelState.zeros(config, 1, capacity, dtype=torch.float32, device="cpu")

    def rows(state):
        return {layer.rows.shape[1] for layer in state.layers.values() if hasattr(layer, "rows")}

    short, long = of(3), of(13)
    assert rows(short) == {8} and rows(long) == {16} and long.capacity == 13
    for state in (short, long):
        for layer in state.layers.values():
            if hasattr(layer, "rows"):
                layer.rows[:, :2] = 7.0
        state.lengths[:] = [2]
    joined = ModelState.stack([short, long])
    assert rows(joined) == rows(joined.select([1])) == {16} and joined.capacity == 13
    assert all(bool((l.rows[:, :2] == 7).all()) for l in joined.layers.values() if hasattr(l, "rows"))
    assert long.nbytes - short.nbytes == 8 * config.mla_cache_width * 4 * len(
        [l for l in long.layers.values() if hasattr(l, "rows")]
    )
    with pytest.raises(ValueError, match="room for 13 tokens"):
        joined.begin(2, 12)
