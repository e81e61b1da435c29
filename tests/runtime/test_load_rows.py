"""Dense weights that are loaded straight into rows: the same bytes as loaded whole, less memory, and one way out.

Mutation-checked once, each caught by a test below: the first byte of every part is not written; checksums are not
compared in P4 and P5; a failed load keeps its store; the model is not marked unusable; parts are kept; whole FP8
weights are read.
"""

from __future__ import annotations

import json
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef

from dwdp.config.schema import DenseConfig
from dwdp.errors import DwdpError, GroupError, VerificationError
from dwdp.executor.create import build_rank
from dwdp.executor.settings import resolve
from dwdp.group.threads import run_rank_threads
from dwdp.memory.host import HostDomain
from dwdp.model import loader, read_plan, reader
from dwdp.model.config import ModelConfig
from dwdp.model.decoder import KimiK3Model
from dwdp.model.headers import read_config
from dwdp.model.landing import Landings
from dwdp.runtime import load_rows
from dwdp.runtime.dense_manager import DenseDwdpManager
from dwdp.weights.store import RowStore
from tests.support.system import DENSE, SMALL_PAGES, lockstep, prompt, replicated, shared, write_random
from tests.support.tiny import tiny_config_dict

SHARDED = {**DENSE, "load": "sharded"}
LENGTH = 14
NOTHING = {"handles": 0, "mappings": 0, "ranges": 0, "descriptors": 0}


def compute(rank):
    tokens = prompt(0, LENGTH)
    return {"prefill": rank.logits(tokens), "chunks": rank.logits(tokens, chunk_size=5, decode=3)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_random(tmp_path_factory.mktemp("m") / "model", num_experts=7)


@pytest.fixture(scope="module")
def expected(model):
    return replicated(model, compute)


def same(found, expected) -> bool:
    return all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("more", [{}, {"own_rows": "map"}, {"segments": "attn"}, {"store_chunk_mb": 1}])
def test_logits_and_ledger_are_those_of_weights_that_were_loaded_whole(model, expected, n, more):
    def body(rank):
        return compute(rank), rank.report()

    whole = shared(model, n, body, dense={**DENSE, **more})
    sharded = shared(model, n, body, dense={**SHARDED, **more})
    for (_, reference), (found, report) in zip(whole, sharded):
        assert same(found, expected)
        assert report["ledger"] == reference["ledger"] and report["ledger"]["dense_moved_bytes"] > 0
        assert report["counters"]["demand_fetches"] == report["counters"]["fences"] == 0


def test_standalone_logits_are_bit_for_bit_those_of_the_same_instance_without_it(model):
    off = lockstep(model, 2, compute)
    for found, reference in zip(lockstep(model, 2, compute, dense=SHARDED), off, strict=True):
        assert same(found, reference)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_block_scaled_weights_are_widened_on_the_way_into_rows(tmp_path, dtype):
    folder = write_random(tmp_path / "fp8", num_experts=7, fp8_attention=True)
    reference = replicated(folder, compute, dtype=dtype)
    for found in shared(folder, 2, compute, dense=SHARDED, dtype=dtype):
        assert same(found, reference)


def test_every_byte_goes_to_the_row_that_it_belongs_to(model):
    def body(rank):
        store = rank.manager.dense.weights.store
        return [store.row(rank.rank, number).clone() for number in range(len(store.layout.blobs))]

    whole, sharded = (shared(model, 3, body, dense=dense) for dense in (DENSE, SHARDED))
    for mine, theirs in zip(sharded, whole, strict=True):
        assert len(mine) > 0 and all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("fp8", [False, True])
def test_what_does_not_go_straight_into_a_row_is_gone_before_the_next(tmp_path, monkeypatch, fp8):
    """So that no more than what reads in flight hold lies beside the rows, whatever the number of layers."""
    folder = write_random(tmp_path / "m", num_experts=7, fp8_attention=fp8)
    monkeypatch.setattr(read_plan, "MAX_READ_NBYTES", 512)
    beside: dict[int, list[StorageWeakRef]] = {}
    most, straight = [], []
    take = load_rows.LoadedRows._take

    def watching(self, number, i, values):
        mine = beside.setdefault(self.store.rank, [])
        if values.data_ptr() == self.store.part(number, i).data_ptr():
            straight.append(values.nbytes)
        else:
            mine.append(StorageWeakRef(values.untyped_storage()))
        most.append(sum(not storage.expired() for storage in mine))
        take(self, number, i, values)

    monkeypatch.setattr(load_rows.LoadedRows, "_take", watching)
    for rank in shared(folder, 2, lambda rank: rank.rank, dense=SHARDED, dtype="bfloat16"):
        assert all(storage.expired() for storage in beside[rank])
        assert (len(beside[rank]) > 8) if fp8 else len(straight) > 60
    assert max(most) <= 1


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_that_are_cut_into_many_reads_have_the_same_bytes(tmp_path, monkeypatch, fp8, dtype):
    config = tiny_config_dict()["linear_attn_config"] | {
        "head_dim": 80
    }  # 320 rows of weights: the third block is partial
    folder = write_random(tmp_path / "m", num_experts=7, fp8_attention=fp8, hidden_size=192, linear_attn_config=config)

    def body(rank):
        store = rank.manager.dense.weights.store
        return [store.row(rank.rank, number).clone() for number in range(len(store.layout.blobs))]

    whole = shared(folder, 3, body, dense=DENSE, dtype=dtype)
    monkeypatch.setattr(read_plan, "MAX_READ_NBYTES", 1111)
    cut = shared(folder, 3, body, dense=SHARDED, dtype=dtype)
    for mine, theirs in zip(cut, whole, strict=True):
        assert len(mine) > 0 and all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_scales_far_behind_their_weights_are_read_first(tmp_path, monkeypatch):
    """Else all FP8 weights of a rank would wait beside its rows, in the worst of orders."""
    folder = write_random(tmp_path / "m", num_experts=7, fp8_attention=True)
    tensors = load_file(folder / "model.safetensors")
    scales = {k: v for k, v in tensors.items() if k.endswith("_scale")}
    save_file({k: v for k, v in tensors.items() if k not in scales}, folder / "a.safetensors")
    save_file(scales, folder / "b.safetensors")
    weight_map = {k: "b.safetensors" if k in scales else "a.safetensors" for k in tensors}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    reference = replicated(folder, compute)
    waiting, have = [], Landings._scale_if_both

    def watching(self, name):
        have(self, name)
        waiting.append(len(self._unscaled.keys() & self._parts.keys()))

    monkeypatch.setattr(Landings, "_scale_if_both", watching)
    for found in shared(folder, 2, compute, dense={**SHARDED, "segments": "attn"}):
        assert same(found, reference)
    assert len(waiting) > 50 and max(waiting) == 0


def cap(model, n: int) -> int:
    """Memory of a rank in which its weights whole and rows and slots do not fit together, though either does."""

    def body(rank):
        ledger = rank.report()["ledger"]
        return ledger["stored_bytes"] + ledger["slot_bytes"] + ledger["ring_bytes"] + ledger["replicated_bytes"]

    return max(shared(model, n, body, dense=DENSE))


def test_a_model_starts_in_memory_that_its_weights_whole_exceed(model, expected):
    limit = {"host_memory_bytes": cap(model, 2)}
    for found in shared(model, 2, compute, dense=SHARDED, dwdp=limit):
        assert same(found, expected)
    with pytest.raises(DwdpError, match="dense DWDP needs .* bytes are free"):
        shared(model, 2, compute, dense=DENSE, dwdp=limit)


# ---- failures ----


def errors(model, n: int) -> dict[int, Exception]:
    """What each of n ranks raised."""
    found = {}
    settings = resolve(model, ranks=n, dtype="float32", device="cpu", dwdp=SMALL_PAGES, dense_dwdp=SHARDED).settings

    def run(group):
        try:
            with build_rank(settings, group, rank=group.rank) as rank:
                compute(rank)
        except Exception as error:
            found[group.rank] = error

    run_rank_threads(n, run, timeout=30)
    return found


def test_a_wrong_byte_on_the_way_is_an_error_on_every_rank_and_leaves_nothing(model, monkeypatch):
    exports, domains, unusable = RowStore.exports, [], []

    def spoiling(self):
        if self.rank == 1:
            self.row(1, 2)[0] ^= 1
        domains.append(self.domain)
        return exports(self)

    def kept(self, model, *args, **options):
        unusable.append(model)
        return made(self, model, *args, **options)

    made = load_rows.LoadedRows.__init__
    monkeypatch.setattr(RowStore, "exports", spoiling)
    monkeypatch.setattr(load_rows.LoadedRows, "__init__", kept)
    found = errors(model, 3)
    assert all(isinstance(found[rank], (VerificationError, GroupError)) for rank in range(3)), found
    assert any("does not hold the bytes of" in str(error) for error in found.values())
    assert len(domains) == 3 and all(domain.live() == NOTHING for domain in domains)
    assert len(unusable) == 3 and all(one.unusable is not None for one in unusable)
    with pytest.raises(Exception, match="does not hold the bytes of|cannot run"):
        unusable[0](torch.tensor([[1]]))


def test_standalone_too_a_failed_set_up_leaves_no_model_to_serve_on_with(model, monkeypatch):
    exports, seen = RowStore.exports, []

    def failing(self):
        if self.rank == 1:
            raise OSError("no descriptor in this test")
        return exports(self)

    made = load_rows.LoadedRows.__init__
    monkeypatch.setattr(RowStore, "exports", failing)
    monkeypatch.setattr(
        load_rows.LoadedRows, "__init__", lambda self, model, *args: seen.append(model) or made(self, model, *args)
    )
    with pytest.raises(OSError, match="no descriptor in this test"):
        lockstep(model, 2, compute, dense=SHARDED, timeout=20)
    assert len(seen) == 2 and all(one.unusable is not None for one in seen)


def test_rows_that_no_set_up_took_over_are_given_back_by_the_manager(model):
    def body(group):
        group.join({})
        with HostDomain(group.rank, granule_bytes=4096) as domain:
            manager = DenseDwdpManager(DenseConfig(enabled=True, min_bytes=1, load="sharded"))
            parts = manager.make_room(meta_model(model), domain=domain, group=group)
            assert len(parts) > 40 and domain.allocated_bytes > 0
            manager.drop_loaded()
            manager.drop_loaded()
            return domain.live(), domain.allocated_bytes

    assert run_rank_threads(2, body, timeout=20) == [(NOTHING, 0)] * 2


def meta_model(folder):
    return KimiK3Model(ModelConfig.from_dict(read_config(folder)), device="meta")


@pytest.mark.parametrize("error", [OSError("disk gone"), KeyboardInterrupt()])
def test_a_load_that_fails_on_the_way_gives_the_rows_back(model, monkeypatch, error):
    domains, complete = [], reader._Run._complete
    opened = HostDomain.__init__

    def note(self, *args, **options):
        opened(self, *args, **options)
        domains.append(self)

    def failing(run, i, room):
        if "layers.3" in run.landings[i].entry.name:
            raise error
        complete(run, i, room)

    monkeypatch.setattr(HostDomain, "__init__", note)
    monkeypatch.setattr(reader._Run, "_complete", failing)
    with pytest.raises(type(error)):
        shared(model, 2, compute, dense=SHARDED, timeout=20)
    assert len(domains) == 2 and all(domain.live() == NOTHING for domain in domains)


def test_a_tensor_that_was_not_read_is_named(model, monkeypatch):
    of = Landings.of

    def forgetting(self, entry, place):
        return None if place.parameter == "model.layers.2.self_attn.o_proj.weight" else of(self, entry, place)

    monkeypatch.setattr(Landings, "of", forgetting)
    with pytest.raises(DwdpError, match="layers.2.self_attn.o_proj.weight was not loaded into its row"):
        shared(model, 2, compute, dense=SHARDED, timeout=20)


# ---- what is read ----


@pytest.mark.parametrize("fp8", [False, True])
def test_each_rank_reads_its_own_rows_and_what_stays_whole_and_nothing_else(tmp_path, monkeypatch, fp8):
    """Counted on the files. Matrix rows of FP8 weights are read whole, and their scales."""
    folder = write_random(tmp_path / "m", num_experts=7, fp8_attention=fp8)
    read: dict[int, int] = {}
    load_model = loader.load_model

    def counted(path, **options):
        rank = int(threading.current_thread().name.rsplit("-", 1)[1])

        def log(file, offset, nbytes):
            read[rank] = read.get(rank, 0) + nbytes

        return load_model(path, **options, read_log=log)

    monkeypatch.setattr(loader, "load_model", counted)
    monkeypatch.setattr(read_plan, "OVER_READ", 0)  # no gap is read along
    totals = {}
    for load in ("whole", "sharded"):
        read.clear()
        dense = {**DENSE, "load": load}
        reports = shared(folder, 3, lambda rank: rank.report()["ledger"], dense=dense, dtype="bfloat16")
        totals[load] = dict(read)
    for rank, ledger in enumerate(reports):
        saved = totals["whole"][rank] - totals["sharded"][rank]
        freed = ledger["freed_bytes"] - expert_freed(folder, rank)
        if fp8:  # half of the bf16 bytes of those projections are in the file, and rows begin inside matrix rows
            assert 0.4 * freed < saved < freed
        else:  # A_log has a tail in the file, which is read with it or not at all
            assert 0 <= saved - freed <= 4 * (128 - 16)


def expert_freed(folder, rank: int) -> int:
    """Bytes of the experts that rank does not store, which neither way reads."""

    def body(one):
        return one.report()["ledger"]["freed_bytes"]

    return shared(folder, 3, body, dense=None, dtype="bfloat16")[rank]
