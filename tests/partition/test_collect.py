"""What holds a weight decides whether it moves: views, ties, containers, closures, copies; nothing found stays behind.

Mutation-checked once, each caught by a test below: closures, partials or tensors' own attributes not looked into; a
walk that enters modules of the model; storages keyed by tensor; parameters replaced instead of repointed; a subclass
asked about its bytes; a plain view that keeps its old base.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections import OrderedDict, deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dwdp.errors import DwdpError
from dwdp.partition.collect import collect
from tests.support.dense_ranks import config, dense_ranks, forward_and_check
from tests.support.toy_decoder import ToyModel, snapshot, value_bytes


def collected(model, *, min_bytes=1, strict=False, **options):
    options = {"num_ranks": 3, "segments": ("attn", "moe")} | options
    return collect(model, min_bytes=min_bytes, strict=strict, **options)


def storages(model, **options):
    """The views of every storage that moves, as a set of names each."""
    blobs = collected(model, **options).layout.blobs
    return [{view.name for view in storage.views} for blob in blobs for storage in blob.storages]


def moved_names(model, **options):
    return set().union(*storages(model, **options))


# ---- who may hold a view of what moves ----


class Cached:
    """No module, and no container."""

    def __init__(self, tensor) -> None:
        self.tensor = tensor

    def read(self):
        return self.tensor


class Slotted:
    __slots__ = ("tensor",)

    def __init__(self, tensor) -> None:
        self.tensor = tensor


def closure_over(view):
    return lambda x: x @ view


def default_argument(view):
    def read(x, weight=view):
        return x @ weight

    return read


def memoised(view):
    @functools.cache
    def read():
        return view

    read()
    return read


def attribute_of_a_tensor(view):
    holder = torch.zeros(1)
    holder.turned = view
    return holder


def module_outside_the_tree(view):
    module = nn.Module()
    module.register_buffer("turned", view)
    return [module]


HOLDERS = {
    "list": lambda view: [view],
    "tuple": lambda view: (view, 1),
    "dict": lambda view: {"turned": view},
    "ordered dict": lambda view: OrderedDict(turned=view),
    "set": lambda view: {view},
    "deque": lambda view: deque([view]),
    "nested": lambda view: {"a": [(0, {"b": [view]})]},
    "closure": closure_over,
    "default argument": default_argument,
    "partial": lambda view: functools.partial(torch.matmul, view),
    "partial's keyword": lambda view: functools.partial(torch.matmul, other=view),
    "bound method": lambda view: Cached(view).read,
    "object": Cached,
    "object with slots": Slotted,
    "namespace": lambda view: SimpleNamespace(turned=view),
    "memo": memoised,
    "tensor's attribute": attribute_of_a_tensor,
    "module in a list": module_outside_the_tree,
}


@pytest.mark.parametrize("view", ["alias", "transposed", "part"])
@pytest.mark.parametrize("kind", HOLDERS)
def test_a_view_that_something_else_holds_keeps_its_storage_whole_and_names_the_holder(kind, view):
    model = ToyModel(2)
    attn = model.layers[1].attn
    attn.kept = HOLDERS[kind]({"alias": attn.o.data, "transposed": attn.o.data.t(), "part": attn.o.data[2:4]}[view])
    names = moved_names(model)
    assert "layers.1.attn.o" not in names and "layers.2.attn.o" in names and "layers.1.attn.q" in names
    (line,) = [line for line in collected(model).stays if "(336 bytes" in line]
    assert line.startswith("layers.1.attn.kept (336 bytes, held in a")
    with pytest.raises(DwdpError, match="layers.1.attn.kept .* in neither dense_dwdp_allowed nor dense_dwdp_excluded"):
        collected(model, strict=True)


@pytest.mark.parametrize("kind", HOLDERS)
def test_a_holder_elsewhere_in_the_model_keeps_it_too(kind):
    model = ToyModel(2)
    model.norms = nn.ModuleList([nn.LayerNorm(3)])
    model.norms[0].kept = HOLDERS[kind](model.layers[2].shared.up.data)
    assert "layers.2.shared.up" not in moved_names(model)
    with pytest.raises(DwdpError, match="layers.2.shared.up .* shares its storage with norms.0.kept"):
        collected(model, strict=True)


def test_a_forward_hook_that_holds_a_view_is_a_holder():
    model = ToyModel(1)
    attn = model.layers[1].attn
    attn.register_forward_hook(functools.partial(lambda view, *_: view, attn.q.data[0]))
    assert "layers.1.attn.q" not in moved_names(model)


def test_a_module_that_holds_others_or_itself_holds_no_view():
    model = ToyModel(2)
    for layer in model.layers:
        layer.attn.parent = [layer]
        layer.attn.root = lambda: model
        layer.attn.own = layer.attn.forward
    assert moved_names(model) == moved_names(ToyModel(2))
    collected(model, strict=True)


def test_a_fused_copy_made_at_construction_stays_and_is_an_error_with_strict():
    model = ToyModel(1)
    attn = model.layers[1].attn
    attn.fused = torch.cat([attn.q.data, attn.q.data])
    assert not any("fused" in name for name in moved_names(model)) and "layers.1.attn.q" in moved_names(model)
    with pytest.raises(DwdpError, match="layers.1.attn.fused .4800 bytes, a plain attribute. is in neither"):
        collected(model, strict=True)
    attn.fused = [attn.fused]
    with pytest.raises(DwdpError, match="layers.1.attn.fused .4800 bytes, held in a list. is in neither"):
        collected(model, strict=True)
    collected(model, min_bytes=4801, strict=True)


def test_parameters_over_one_fused_storage_move_as_one_storage():
    model = ToyModel(1)
    attn = model.layers[1].attn
    fused = torch.randn(72, 24)
    for i, name in enumerate(("wq", "wk", "wv")):
        attn.register_parameter(name, nn.Parameter(fused[24 * i : 24 * i + 24], requires_grad=False))
    found = [names for names in storages(model, strict=True) if "layers.1.attn.wq" in names]
    assert found == [{f"layers.1.attn.{name}" for name in ("wq", "wk", "wv")}]


def test_ties_move_once_with_every_name():
    model = ToyModel(1)
    layer = model.layers[1]
    layer.attn.register_parameter("same", layer.attn.o)  # one parameter under two names
    layer.shared.other = nn.Parameter(layer.shared.up.data, requires_grad=False)  # two parameters over one storage
    found = storages(model, strict=True)
    assert {"layers.1.attn.o", "layers.1.attn.same"} in found
    assert {"layers.1.shared.up", "layers.1.shared.other"} in found
    assert len(found) == len(storages(ToyModel(1)))


def test_a_buffer_that_is_not_saved_moves_where_roots_are_declared():
    model = ToyModel(1)
    model.layers[1].attn.register_buffer("table", torch.zeros(99), persistent=False)
    assert "layers.1.attn.table" in moved_names(model, strict=True)


def test_what_has_no_bytes_of_its_own_stays_and_is_an_error_with_strict():
    model = ToyModel(1)
    model.layers[1].attn.o = nn.Parameter(torch.eye(24).to_sparse(), requires_grad=False)
    assert "layers.1.attn.o" not in moved_names(model)
    with pytest.raises(DwdpError, match="layers.1.attn.o has the layout torch.sparse_coo"):
        collected(model, strict=True)


def test_a_wrapper_of_tensors_stays_and_is_an_error_with_strict():
    from torch.testing._internal.two_tensor import TwoTensor

    model = ToyModel(1)
    model.layers[1].attn.o = nn.Parameter(TwoTensor(torch.zeros(8, 8), torch.zeros(8, 8)), requires_grad=False)
    assert "layers.1.attn.o" not in moved_names(model)
    with pytest.raises(DwdpError, match="layers.1.attn.o .256 bytes, held in a TwoTensor. is in neither"):
        collected(model, strict=True)


# ---- the same everywhere ----


def test_what_else_holds_a_storage_does_not_change_the_order():
    one, other = ToyModel(2), ToyModel(2)
    # Seen before layer 1's own weights, under a name that may not move.
    other._modules = {"late": nn.Module(), **other._modules}
    other._modules["late"].kept = [other.layers[2].shared.down, other.layers[1].gate.weight]
    kept = {"layers.2.shared.down", "layers.1.gate.weight"}
    order = [view.name for blob in collected(one).layout.blobs for s in blob.storages for view in s.views]
    found = [view.name for blob in collected(other).layout.blobs for s in blob.storages for view in s.views]
    assert found == [name for name in order if name not in kept]


SCRIPT = """
import torch
from dwdp.partition.layout import original_checksums
from tests.partition.test_collect import collected
from tests.support.foreign_decoders import HubModel, build
from tests.support.toy_decoder import ToyModel
model = ToyModel(3, seed=5)
model.layers[2].attn.kept = {model.layers[2].attn.o, model.layers[2].attn.q}
for found in (collected(model), collected(build(HubModel, seed=3), roots="discover")):
    print(found.layout.digest)
    for number, blob in enumerate(found.layout.blobs):
        originals = [found.storage_bytes(number, i) for i in range(len(blob.storages))]
        print(*original_checksums(blob, originals))
"""


def test_digest_and_checksums_are_the_same_in_every_process():
    outputs = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
        ).stdout
        for seed in ("0", "77")
    }
    assert len(outputs) == 1 and outputs.pop().count("\n") > 14


# ---- repointed ----


class OwnParameter(nn.Parameter):
    """A subclass that has a say in every call, and objects to one that moves its bytes."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function == torch.Tensor.data.__set__:
            raise TypeError("not without me")
        return super().__torch_function__(function, types, args, kwargs or {})


def test_parameters_stay_the_same_objects_with_class_gradient_flag_and_attributes():
    def prepare(rank, model):
        layer = model.layers[2]
        layer.attn.o = OwnParameter(layer.attn.o.data)
        layer.attn.o.loader = "rows"
        layer.shared.other = nn.Parameter(layer.shared.up.data, requires_grad=True)
        layer.gate.register_buffer("kept", torch.arange(50.0), persistent=False)

    def body(rank):
        layer = rank.model.layers[2]
        tensors = [*layer.parameters(), *layer.buffers(), layer.attn.rows]
        facts = [(id(t), type(t), t.requires_grad, t.dtype, t.shape, t.stride(), dict(t.__dict__)) for t in tensors]
        outside = layer.attn.o  # whoever holds a parameter sees what the model sees
        expected = snapshot(rank.model)
        assert rank.setup()["leaks"] == 0
        after = [*layer.parameters(), *layer.buffers(), layer.attn.rows]
        assert facts == [
            (id(t), type(t), t.requires_grad, t.dtype, t.shape, t.stride(), dict(t.__dict__)) for t in after
        ]
        assert outside is layer.attn.o and rank.domain.holds(outside)
        assert layer.shared.other.data_ptr() == layer.shared.up.data_ptr() and rank.domain.holds(layer.gate.kept)
        assert "kept" in layer.gate._non_persistent_buffers_set
        forward_and_check(rank, expected)

    dense_ranks(2, body, prepare=prepare, settings=lambda rank: config(strict=True, debug=1))


def test_a_view_whose_base_nobody_else_holds_keeps_no_original_alive():
    def prepare(rank, model):
        model.layers[1].attn.rows = model.layers[1].attn.q.data[1:3]  # its base is a tensor that only it knows
        model.layers[1].attn.rows.note = "mine"

    def body(rank):
        expected = snapshot(rank.model)
        assert rank.setup()["leaks"] == 0
        assert rank.model.layers[1].attn.rows.note == "mine"
        forward_and_check(rank, expected)

    dense_ranks(2, body, prepare=prepare, settings=lambda rank: config(strict=True))


def test_weights_made_in_inference_mode_move_like_others():
    def prepare(rank, model):
        with torch.inference_mode():
            model.layers[1].attn.o = nn.Parameter(torch.ones(24, 7), requires_grad=False)

    def body(rank):
        expected = snapshot(rank.model)
        assert rank.setup()["leaks"] == 0 and rank.domain.holds(rank.model.layers[1].attn.o)
        forward_and_check(rank, expected)

    dense_ranks(2, body, prepare=prepare)


def test_what_stays_keeps_its_values_beside_what_moves():
    def prepare(rank, model):
        model.layers[1].attn.kept = [model.layers[1].attn.o.data.t()]

    def body(rank):
        kept = rank.model.layers[1].attn.kept[0]
        before = value_bytes(kept)
        expected = snapshot(rank.model)
        rank.setup()
        assert not rank.domain.holds(rank.model.layers[1].attn.o)
        forward_and_check(rank, expected)
        assert value_bytes(kept) == before and kept.data_ptr() == rank.model.layers[1].attn.o.data_ptr()

    dense_ranks(2, body, prepare=prepare)
