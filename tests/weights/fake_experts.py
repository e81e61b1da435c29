"""A model of routed experts only, its rank's rows of a reference, and rank threads over real host memory."""

import contextlib
import hashlib
import os
import threading
from types import SimpleNamespace

import torch
from torch import nn

from dwdp.device.host import HostDevice
from dwdp.group.threads import run_rank_threads
from dwdp.memory.host import HostDomain
from dwdp.partition.experts import ExpertPartition
from dwdp.runtime.setup_experts import setup_experts

GRANULE = 4096

# name -> (shape of a row, dtype); rows of 10 to 8,200 bytes: smaller than a granule, larger, no multiples.
LAYERS = [
    {"w13": ((25,), torch.float32), "w2": ((2, 1250), torch.int16)},
    {"w13": ((24,), torch.uint8), "w2": ((2050,), torch.float32)},
    {"w13": ((7, 3), torch.float64), "w2": ((5,), torch.bfloat16)},
]
SMALL = {"alpha": ((2,), torch.float32), "gain": ((), torch.float32)}


def partition_of(num_ranks, num_experts, size=0, stride=0):
    config = SimpleNamespace(dwdp_size=num_ranks, num_experts_per_worker=size, num_prefetch_experts=stride)
    return ExpertPartition.from_config(config, num_experts=num_experts)


def random_tensor(shape, dtype, *key):
    seed = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:4], "big")
    generator = torch.Generator().manual_seed(seed)
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)


class FakeExperts(nn.Module):
    """What model/moe.py offers to the runtime, over tables of any shape."""

    def __init__(self, layer_index, tables, small, num_experts, expert_range):
        super().__init__()
        start, end = expert_range
        self.layer_index, self.num_experts = layer_index, num_experts
        self.first_expert, self.num_rows = start, end - start
        self.dwdp, self.dwdp_pos = None, None
        self._tables, self._small = tuple(tables), tuple(small)
        for name, table in {**tables, **small}.items():
            whole = table.ndim == 0 or (name in small and table.shape[0] != num_experts)
            rows = table if whole else table[start:end]
            self.register_parameter(name, nn.Parameter(rows.clone(), requires_grad=False))

    def expert_tables(self):
        return {name: getattr(self, name).detach() for name in self._tables}

    def small_tensors(self):
        return {name: getattr(self, name).detach() for name in self._small}

    def rebind(self, tables, small):
        for name, table in {**tables, **small}.items():
            self._parameters[name] = nn.Parameter(table, requires_grad=False)
        self.first_expert, self.num_rows = 0, self.num_experts


class FakeModel(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.unusable = None

    def moe_layers(self):
        return list(self.layers)


def reference_layers(num_experts, num_layers=3, small=True):
    """Per layer (tables, small tensors) with all experts."""
    layers = []
    for index in range(num_layers):
        tables, smalls = LAYERS[index % len(LAYERS)], SMALL if small else {}
        pick = {
            name: random_tensor((num_experts, *shape), dtype, index, name)
            for name, (shape, dtype) in {**tables, **smalls}.items()
        }
        scalar = {"input_scale": torch.tensor(0.5 + index)} if small else {}
        layers.append(({name: pick[name] for name in tables}, {name: pick[name] for name in smalls} | scalar))
    return layers


def build_model(reference, partition, rank, first_layer=1):
    layers = [
        FakeExperts(first_layer + index, tables, small, partition.num_experts, partition.ranges[rank])
        for index, (tables, small) in enumerate(reference)
    ]
    return FakeModel(layers)


def same_bytes(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and raw(a) == raw(b)


def raw(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def snapshot(model):
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def unchanged(model, before):
    now = dict(model.named_parameters())
    ranges = {(layer.first_expert, layer.num_rows) for layer in model.moe_layers()}
    return now.keys() == before.keys() and all(same_bytes(now[k], before[k]) for k in before) and len(ranges) == 1


@contextlib.contextmanager
def rank_parts(rank, **device_options):
    with (
        HostDomain(rank, granule_bytes=GRANULE, page_granules=2) as domain,
        HostDevice(**device_options) as device,
    ):
        yield domain, device


def set_up(group, reference, partition, domain, device, **options):
    model = build_model(reference, partition, group.rank)
    options.setdefault("num_slots", 2)
    runtime = setup_experts(model, group=group, domain=domain, device=device, partition=partition, **options)
    return model, runtime


def take_down(runtime, group):
    runtime.drain()
    group.barrier("copies drained")
    runtime.unmap_imports()
    group.barrier("imports unmapped")
    runtime.release_own()


def on_ranks(num_ranks, body, **device_options):
    """Runs `body(group, domain, device)` on rank threads that have joined; returns the results by rank."""

    def main(group):
        group.join({})
        with rank_parts(group.rank, **device_options) as (domain, device):
            return body(group, domain, device)

    return run_rank_threads(num_ranks, main)


def dwdp_memfds():
    """The memfds of ours that this process has open or mapped."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    with open("/proc/self/maps", encoding="utf-8") as maps:
        names += [line.split(maxsplit=5)[-1] for line in maps]
    return sorted(name for name in names if "memfd:dwdp-" in name)


def dwdp_threads():
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("dwdp"))
