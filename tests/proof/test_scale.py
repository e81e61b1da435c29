"""Sixteen ranks and Kimi-K3's 92 MoE layers of 896 experts, rows scaled by 1/4096: set-up in time, or refused early.

`python -m tests.proof.test_scale PORT` is the run itself: it forks the ranks. They are processes because the 16
ranks together hold more mappings and descriptors than one process may have; the refusals run in threads.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
import traceback

import pytest
import torch

from dwdp import env
from dwdp.device.host import HostDevice
from dwdp.errors import MemoryBudgetError
from dwdp.group.backends import StoreGroup, connect_store, host_store
from dwdp.group.threads import run_rank_threads
from dwdp.memory.host import HostDomain
from dwdp.runtime.setup_experts import setup_experts
from tests.weights.fake_experts import FakeExperts, FakeModel, partition_of, take_down

RANKS, LAYERS, EXPERTS, GRANULE = 16, 92, 896, 4096
ROWS = {"w13": 2688, "w13_scale": 336, "w2": 1344, "w2_scale": 168}  # bytes; the real ones are 4096 times these
HANDLES = LAYERS * len(ROWS) * RANKS  # own and imported, of one rank
ULIMIT = 1024
SETUP_SECONDS = 60.0
HARD_LIMIT = resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def patterns() -> dict[str, torch.Tensor]:
    """name -> [E, row bytes] of layer 0; layer l has it xor l."""
    generator = torch.Generator().manual_seed(16)
    return {
        name: torch.randint(0, 256, (EXPERTS, b), generator=generator, dtype=torch.uint8) for name, b in ROWS.items()
    }


def build_model(rank: int, partition, num_layers: int, base: dict[str, torch.Tensor]) -> FakeModel:
    small = {"w13_scale_2": torch.arange(EXPERTS) / 7, "w2_scale_2": torch.arange(EXPERTS) / 9}
    layers = []
    for index in range(num_layers):
        layer = FakeExperts(index + 1, base, small, EXPERTS, partition.ranges[rank])
        for table in layer.expert_tables().values():
            table ^= index
        layers.append(layer)
    return FakeModel(layers)


def count_collectives(group) -> dict[str, int]:
    """Counts from now on what rank code calls and, as `rounds`, the messages that everybody waits for."""
    counts = {"allgather": 0, "exchange_fds": 0, "rounds": 0}

    def wrap(method: str, key: str) -> None:
        original = getattr(group, method)

        def counted(*args, **kwargs):
            counts[key] += 1
            return original(*args, **kwargs)

        setattr(group, method, counted)

    wrap("allgather", "allgather")
    wrap("exchange_fds", "exchange_fds")
    wrap("_run", "rounds")
    return counts


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def kernel_mappings() -> int:
    with open("/proc/self/maps", "rb") as maps:
        return sum(1 for _ in maps)


def run_rank(rank: int, port: int) -> dict:
    """One rank of the large run -> what it measured."""
    base, partition = patterns(), partition_of(RANKS, EXPERTS)
    model = build_model(rank, partition, LAYERS, base)
    group = StoreGroup(connect_store(port, timeout_seconds=60), rank, RANKS, timeout_seconds=90)
    with (
        group,
        HostDomain(rank, granule_bytes=GRANULE, page_granules=8, descriptor_budget=HANDLES) as domain,
        HostDevice() as device,
    ):
        group.join({})
        collectives, peak = count_collectives(group), []
        exchange = group.exchange_fds

        def measured(*args, **kwargs):
            answer = exchange(*args, **kwargs)
            peak.append(open_descriptors())
            return answer

        group.exchange_fds = measured
        start = time.monotonic()
        runtime = setup_experts(
            model, group=group, domain=domain, device=device, partition=partition, num_slots=2, verify="sample"
        )
        found = {
            "seconds": time.monotonic() - start,
            "collectives": dict(collectives),
            "handles": len(domain._handles),
            "peak_descriptors": peak[0],
            "descriptors_after": domain.live()["descriptors"],
            "mappings": domain.mapping_budget.used,
            "mapping_budget": domain.mapping_budget.limit,
            "kernel_mappings": kernel_mappings(),
            "page_bytes": domain.page_bytes,
            "ring_bytes": runtime.report["ring_bytes"],
            "stored_bytes": runtime.report["stored_bytes"],
        }
        found["right"] = forward_is_right(model, runtime, base)
        group.mark_setup_done()
        take_down(runtime, group)
        found["live"] = domain.live()
    return found


def forward_is_right(model, runtime, base: dict[str, torch.Tensor]) -> bool:
    """Whether a forward finds the bytes of all experts in some layers, and can run through all."""
    right = True
    runtime.start_forward()
    for pos, layer in enumerate(model.moe_layers()):
        layer.dwdp.bind(pos)
        if pos in (0, 1, LAYERS // 2, LAYERS - 1):
            tables = layer.expert_tables()
            right &= all(torch.equal(tables[name], whole ^ pos) for name, whole in base.items())
        layer.dwdp.finish(pos)
    return right


def main(port: int) -> None:
    children = []
    for rank in range(RANKS):
        # Forked, so that torch is imported once; nothing has started a thread yet.
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                line = json.dumps({"rank": rank} | run_rank(rank, port)) + "\n"
                os.write(1, line.encode())
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(json.dumps({"cpu_seconds": usage.ru_utime + usage.ru_stime}), flush=True)


@pytest.mark.alone
@pytest.mark.skipif(0 <= HARD_LIMIT < HANDLES + 500, reason=f"needs ulimit -Hn {HANDLES + 500}, it is {HARD_LIMIT}")
def test_sixteen_ranks_set_92_layers_up_within_a_minute_and_with_no_more_collectives_than_two_ranks():
    store, port = host_store()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.proof.test_scale", str(port)],
        env=env.child_environment(OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=100)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)
    del store
    lines = [json.loads(line) for line in out.splitlines()]
    ranks = [line for line in lines if "rank" in line]
    assert sorted(line["rank"] for line in ranks) == list(range(RANKS)), err
    one = min(ranks, key=lambda line: line["rank"])
    print(
        f"\n{RANKS} ranks x {LAYERS} layers: set-up {max(line['seconds'] for line in ranks):.1f} s; "
        f"{max(line['peak_descriptors'] for line in ranks)} descriptors open at most (budget {HANDLES}), "
        f"{max(line['mappings'] for line in ranks)} mappings (budget {one['mapping_budget']}, the kernel lists "
        f"{max(line['kernel_mappings'] for line in ranks)}) a rank; pages of {one['page_bytes']} bytes, "
        f"ring {one['ring_bytes']}, stored {one['stored_bytes']} bytes; {one['collectives']}; "
        f"{lines[-1].get('cpu_seconds', 0.0):.1f} s of CPU in all"
    )
    two = collectives_of_two_ranks()
    for line in ranks:
        assert line["seconds"] < SETUP_SECONDS
        assert line["right"] and line["collectives"] == two
        assert line["live"] == {"handles": 0, "mappings": 0, "ranges": 0, "descriptors": 0}
        assert line["descriptors_after"] == 0
        assert HANDLES <= line["peak_descriptors"] < HANDLES + 64
        assert HANDLES < line["mappings"] <= line["mapping_budget"]


def collectives_of_two_ranks() -> dict[str, int]:
    partition, base = partition_of(2, EXPERTS), patterns()

    def body(group):
        group.join({})
        with HostDomain(group.rank, granule_bytes=GRANULE) as domain, HostDevice() as device:
            model = build_model(group.rank, partition, 2, base)
            counts = count_collectives(group)
            runtime = setup_experts(
                model, group=group, domain=domain, device=device, partition=partition, num_slots=2, verify="sample"
            )
            counts = dict(counts)
            take_down(runtime, group)
            return counts

    first, second = run_rank_threads(2, body)
    assert first == second
    return first


@pytest.mark.parametrize(
    "budget, numbers",
    [
        ("descriptor_budget", f"would make {HANDLES} open descriptors, the budget is {ULIMIT}"),
        ("mapping_budget", rf"the plan needs \d+ mappings with pages of any size, {ULIMIT} are left"),
    ],
)
def test_a_budget_of_1024_is_refused_before_the_first_handle_on_every_rank(budget, numbers):
    """Mutation-checked: fails without the check in `ExpertTransport.take_in`, or without the one of the plan's
    mappings in `_Setup._move`."""
    partition = partition_of(RANKS, EXPERTS)
    base = {name: whole[:, :8].contiguous() for name, whole in patterns().items()}  # only the counts matter here

    def body(group):
        group.join({})
        with (
            HostDomain(group.rank, granule_bytes=GRANULE, page_granules=2, **{budget: ULIMIT}) as domain,
            HostDevice() as device,
        ):
            model, created = build_model(group.rank, partition, LAYERS, base), []
            create = domain.create
            domain.create = lambda *args, **options: (created.append(args), create(*args, **options))[1]
            with pytest.raises(MemoryBudgetError, match=numbers) as caught:
                setup_experts(
                    model, group=group, domain=domain, device=device, partition=partition, num_slots=2,
                    verify="sample",
                )  # fmt: skip
            assert created == [] and model.unusable is None and domain.allocated_bytes == 0
            assert domain.live() == {"handles": 0, "mappings": 0, "ranges": 0, "descriptors": 0}
            start, end = partition.ranges[group.rank]
            last = model.moe_layers()[-1].expert_tables()
            assert all(torch.equal(last[name], base[name][start:end] ^ (LAYERS - 1)) for name in base)
            return str(caught.value)

    print(f"\nrefused: {run_rank_threads(RANKS, body)[0]}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
