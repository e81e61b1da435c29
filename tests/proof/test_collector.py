"""The collector on the real layers: what is declared moves, nothing of it stays, and is read in its window only.

Mutation-checked: each mutation test below shows one that the recorder or the walk catches.
"""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch

import dwdp
from dwdp.model import decoder, kda, mla, moe
from dwdp.model.config import ModelConfig
from dwdp.model.decoder import KimiK3Model
from dwdp.model.loader import load_model
from dwdp.partition.collect import collect
from dwdp.runtime import setup_dense
from tests.support.system import DENSE, prompt, replicated, shared, write_random
from tests.support.tiny import tiny_48b_config_dict, tiny_config_dict
from tests.support.windows import WindowRecorder

NANO = Path(dwdp.__file__).parent / "models" / "nano-k3"
MOE_ROOTS = (
    "gate",
    "shared_experts",
    "routed_expert_down_proj",
    "routed_expert_up_proj",
    "routed_expert_norm",
)
FORMATS = {
    "bf16": {},
    "fp8": {"fp8_attention": True},
    "nvfp4": {"expert_format": "nvfp4"},
    "mxfp4": {"expert_format": "mxfp4"},
}


# ---- exactly what is declared ----


def kimi(changes) -> KimiK3Model:
    return KimiK3Model(ModelConfig.from_dict(changes), dtype=torch.float32, device="cpu").requires_grad_(False)


@pytest.mark.parametrize("roots", ["declared", "discover"])
@pytest.mark.parametrize("name", ["nano-k3", "tiny K3", "48B"])
def test_of_each_moe_layer_attention_and_five_roots_move_and_nothing_else(name, roots):
    if name == "nano-k3":
        model = load_model(NANO, dtype=torch.bfloat16)
    else:
        model = kimi(tiny_config_dict() if name == "tiny K3" else tiny_48b_config_dict())
    expected = {
        (i, segment, parameter)
        for i, layer in enumerate(model.model.layers)
        if i > 0
        for parameter, _ in model.named_parameters()
        for segment, roots_of in (("A", ["self_attn"]), ("D", [f"block_sparse_moe.{root}" for root in MOE_ROOTS]))
        if any(parameter.startswith(f"model.layers.{i}.{root}.") for root in roots_of)
        and not parameter.endswith("e_score_correction_bias")
    }
    # What discovery leaves out (layer norms and the like) would be an error with strict.
    strict = roots == "declared"
    found = collect(model, num_ranks=2, segments=("attn", "moe"), min_bytes=1, strict=strict, roots=roots)
    assert {
        (blob.layer_index, blob.segment, view.name)
        for blob in found.layout.blobs
        for storage in blob.storages
        for view in storage.views
    } == expected
    per_layer = {i: sum(place[0] == i for place in expected) for i in range(len(model.model.layers))}
    assert per_layer[0] == 0 and all(count > 8 for i, count in per_layer.items() if i)
    assert not any(".experts." in name for _, _, name in expected)


# ---- nothing of it stays ----


def live_storages() -> dict[int, torch.Tensor]:
    """Address of a storage's object -> a tensor over it, for every tensor of the process."""
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    return {t.untyped_storage()._cdata: t for t in tensors if t.layout == torch.strided and not t.is_meta}


def compute(rank) -> None:
    rank.logits(prompt(rank.rank, 24), chunk_size=9, decode=3)


def strays(model, ranks=2):
    """Storages that a rank has after a commit and forwards beside the model's own, our memory and what was before."""
    replicated(model, compute, dtype="bfloat16")  # fills the tables of formats that a process keeps
    gc.collect()
    before = set(live_storages())
    originals = []
    real = setup_dense.find_leaks

    def body(rank):
        compute(rank)
        rank.manager.group.barrier("every rank has computed")
        if rank.rank != 0:
            rank.manager.group.barrier("rank 0 has looked")
            return None
        gc.collect()
        found = []
        own = [t for module in all_modules for t in [*module.parameters(), *module.buffers()]]
        known = {t.untyped_storage()._cdata for t in own} | before
        for cdata, tensor in live_storages().items():
            if cdata not in known and not any(domain.holds(tensor) for domain in domains):
                found.append((tensor.untyped_storage().nbytes(), tuple(tensor.shape)))
        found += [(name, "original") for ref, name in originals if not ref.expired()]
        rank.manager.group.barrier("rank 0 has looked")
        return found

    all_modules, domains = [], []

    def remember(rank):
        all_modules.append(rank.model)
        domains.append(rank.domain)
        return body(rank)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup_dense, "find_leaks", lambda o, **kw: (originals.extend(o), real(o, **kw))[1])
        found = shared(model, ranks, remember, dense={**DENSE, "strict": True}, dtype="bfloat16")[0]
    assert len(originals) > 40
    return found


@pytest.mark.parametrize("form", FORMATS)
def test_after_a_commit_and_every_kind_of_forward_no_weight_of_a_covered_layer_lives_outside_slots(form, tmp_path):
    """Threshold one byte: whatever is alive is the model's own (and replicated), DWDP's memory, or older."""
    assert strays(write_random(tmp_path / "model", **FORMATS[form])) == []


def test_a_copy_that_a_forward_keeps_is_found(tmp_path, monkeypatch):
    real = mla.LatentAttention._absorbed

    def keeping(self, *args):
        kept.append(self.kv_b_proj.weight.float())
        return real(self, *args)

    kept = []
    monkeypatch.setattr(mla.LatentAttention, "_absorbed", keeping)
    assert strays(write_random(tmp_path / "model")) != []


# ---- every read lies in its window ----


def forwards(rank) -> dict[str, tuple]:
    """Runs every path of the model; name -> (problems, tensors that move and were not read) of each."""
    recorder = WindowRecorder(rank)
    model, found = rank.model, {}

    def run(name, ids, state=None, **options):
        rank.manager.start_forward()
        recorder.reads = set()
        seen = len(recorder.problems)
        with recorder:
            model(ids, state, **options)
        rank.manager.end_forward()
        moved = {name for name, *_ in recorder.weights.values()}
        found[name] = (recorder.problems[seen:], moved - recorder.reads)

    ids = torch.tensor([prompt(rank.rank, 24), prompt(rank.rank + 1, 24)])
    with torch.no_grad():
        run("without a state", ids[:1, :20])
        one, two = model.new_state(1, 32), model.new_state(2, 16)
        run("prefill", ids[:1, :20], one)
        run("chunk over a cached prefix", ids[:1, 20:24], one)
        run("decode", ids[:1, :1], one, last_only=True)
        run("decode again", ids[:1, 1:2], one)
        run("batched prefill", ids[:, :9], two)
        run("batched decode", ids[:, :1], two)
    return found


def check_windows(model, *, own_rows="copy", **options):
    (found, _) = shared(model, 2, forwards, dense={**DENSE, "strict": True, "own_rows": own_rows}, **options)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMATS)
def test_every_read_of_a_slot_lies_in_its_window_on_every_path(form, dtype, tmp_path):
    found = check_windows(write_random(tmp_path / "model", **FORMATS[form]), dtype=dtype)
    assert found == dict.fromkeys(found, ([], set())) and len(found) == 7


def test_every_read_of_nano_and_of_a_kimi_linear_lies_in_its_window(tmp_path):
    linear = tiny_48b_config_dict()
    for model in (NANO, write_random(tmp_path / "linear", **{key: linear[key] for key in CHANGED_IN_48B})):
        found = check_windows(model)
        assert found == dict.fromkeys(found, ([], set()))


def test_every_read_lies_in_its_window_where_own_rows_are_mapped(tmp_path):
    """Each layer has a range of its own there, with pages that other layers have too."""
    found = check_windows(write_random(tmp_path / "model"), own_rows="map")
    assert found == dict.fromkeys(found, ([], set()))


CHANGED_IN_48B = [key for key, value in tiny_48b_config_dict().items() if tiny_config_dict()[key] != value]


# ---- what the recorder catches ----


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_random(tmp_path_factory.mktemp("windows") / "model")


def problems_of(model) -> str:
    return "\n".join(problem for problems, _ in check_windows(model).values() for problem in problems)


def test_a_view_kept_from_attention_and_read_in_the_moe_block_is_caught(model, monkeypatch):
    real_attention, real_moe = kda.KimiDeltaAttention.forward, moe.LatentMoE.forward
    kept = threading.local()  # each rank its own

    def attention(self, *args):
        kept.view = self.o_proj.weight.t()
        return real_attention(self, *args)

    def block(self, x):
        view = vars(kept).pop("view", None)
        if view is not None:
            view.sum()
        return real_moe(self, x)

    monkeypatch.setattr(kda.KimiDeltaAttention, "forward", attention)
    monkeypatch.setattr(moe.LatentMoE, "forward", block)
    assert "self_attn.o_proj.weight while None is open" in problems_of(model)


def test_a_view_kept_from_one_forward_to_the_next_is_caught_though_its_layer_is_in_the_slot(model, monkeypatch):
    real = mla.LatentAttention._absorbed

    def absorbed(self, *args):
        if not hasattr(self, "halves"):
            self.halves = [self.kv_b_proj.weight[:4]]
        self.halves[0].sum()
        return real(self, *args)

    monkeypatch.setattr(mla.LatentAttention, "_absorbed", absorbed)
    assert "reads a view of model.layers.3.self_attn.kv_b_proj.weight that was made in an earlier" in problems_of(model)


def test_a_read_before_h1_and_one_behind_h3_are_caught(model, monkeypatch):
    real, layers = decoder.DecoderLayer.forward, []

    def forward(self, *args):
        layers.append(self)
        if self.index == 2:
            self.self_attn.g_proj.weight.sum()  # before its H1
        out = real(self, *args)
        if self.index == 3:
            self.block_sparse_moe.gate.weight.sum()  # behind its H3
        return out

    monkeypatch.setattr(decoder.DecoderLayer, "forward", forward)
    found = problems_of(model)
    assert "reads model.layers.2.self_attn.g_proj.weight while None is open" in found
    assert "reads model.layers.3.block_sparse_moe.gate.weight while None is open" in found
