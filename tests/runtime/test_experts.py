"""The expert runtime on real streams: right bytes under slow reads and slow copies, overlap, counters, the
end.

Mutation-checked once, each caught by a test below: the end-of-read event recorded for the other slot;
recorded in `bind`; no wait for it before a copy; no wait for the ready event in `bind`; the ready event
recorded before the copy.
"""

import gc
import time

import pytest
import torch

from dwdp.device.host import HostDevice
from dwdp.device.recording import RecordingDevice
from dwdp.errors import DwdpError, VerificationError
from dwdp.runtime.experts import ExpertRuntime
from dwdp.weights.plan import CopyPlan, CopySlice
from tests.weights.fake_experts import (
    dwdp_memfds,
    on_ranks,
    partition_of,
    reference_layers,
    same_bytes,
    set_up,
    take_down,
)

NBYTES = 4096


class Weights:
    """Layers of constant bytes that are gathered into slots; reads look at every byte, slowly."""

    def __init__(self, device, num_layers, num_slots, read_seconds=0.0, **options):
        self.device, self.read_seconds = device, read_seconds
        self.sources = [torch.full((NBYTES,), layer + 1, dtype=torch.uint8) for layer in range(num_layers)]
        self.slots = [torch.zeros(NBYTES, dtype=torch.uint8) for _ in range(min(num_slots, num_layers))]
        plans = []
        for layer, source in enumerate(self.sources):
            slot = self.slots[layer % len(self.slots)]
            plans.append(CopyPlan((CopySlice(slot.data_ptr(), source.data_ptr(), NBYTES, 1),), NBYTES))
        self.runtime = ExpertRuntime(device, plans, num_slots, **options)
        self.wrong = []

    def read(self, layer):
        slot = self.slots[layer % len(self.slots)]

        def kernel():
            first = bool((slot == layer + 1).all())
            time.sleep(self.read_seconds)
            if not (first and bool((slot == layer + 1).all())):
                self.wrong.append(layer)

        name = f"E{layer % len(self.slots)}"
        self.device.enqueue(self.device.compute, kernel, kind="read", slot=name, layer=layer)

    def forward(self, start=True, abort=None):
        """abort: (layer, "bind" | "read"), where the forward ends."""
        if start:
            self.runtime.start_forward()
        for layer in range(len(self.sources)):
            if abort == (layer, "bind"):
                return
            self.runtime.bind(layer)
            self.read(layer)
            if abort == (layer, "read"):
                return
            self.runtime.finish(layer)


@pytest.mark.parametrize("layers, slots", [(4, 2), (5, 2), (5, 3), (3, 4), (1, 2)])
@pytest.mark.parametrize("slow", ["reads", "copies"])
def test_every_read_sees_its_layers_bytes_with_slow_reads_and_slow_copies(layers, slots, slow):
    speed = NBYTES / 0.004 if slow == "copies" else None
    with HostDevice(compute_worker=True, copy_bytes_per_second=speed) as device:
        weights = Weights(device, layers, slots, read_seconds=0.004 if slow == "reads" else 0)
        weights.forward()
        weights.forward(abort=(layers - 1, "bind"))
        weights.forward()
        weights.forward(abort=(layers // 2, "read"))
        weights.forward(start=False)
        weights.forward(abort=(0, "read"))
        weights.forward()
        device.synchronize()
        assert weights.wrong == []
        assert weights.runtime.counters.demand_fetches == 1


def test_new_weights_are_read_after_an_invalidation():
    with HostDevice(compute_worker=True) as device:
        weights = Weights(device, 4, 2)
        weights.forward()
        device.synchronize()
        assert weights.runtime.primed
        for layer, source in enumerate(weights.sources):
            source.fill_(layer + 1)
        weights.slots[0].fill_(99)  # what an old copy would have left
        weights.runtime.invalidate_prefetch()
        assert not weights.runtime.in_flight
        weights.forward()
        device.synchronize()
        assert weights.wrong == [] and weights.runtime.counters.restarts == 0


def test_a_clean_run_is_enqueued_as_the_figure_says():
    with RecordingDevice() as device:
        Weights(device, 2, 2).forward()
        lines = [
            f"{op['name']}({op['layer']})" if op["kind"] == "mark"
            else f"{op['stream']} {op['kind']} {op['event'] or op['slot']} layer {op['layer']}"
            for op in device.ops
        ]  # fmt: skip
    assert (
        lines
        == """\
copy wait E0 end of read layer 0
copy copy E0 layer 0
copy record E0 ready layer 0
copy wait E1 end of read layer 1
copy copy E1 layer 1
copy record E1 ready layer 1
bind(0)
compute wait E0 ready layer 0
compute read E0 layer 0
finish(0)
compute record E0 end of read layer 0
copy wait E0 end of read layer 0
copy copy E0 layer 0
copy record E0 ready layer 0
bind(1)
compute wait E1 ready layer 1
compute read E1 layer 1
finish(1)
compute record E1 end of read layer 1
copy wait E1 end of read layer 1
copy copy E1 layer 1
copy record E1 ready layer 1""".splitlines()
    )


def test_an_abort_inside_an_issue_claims_no_slot():
    for failing in ["wait", "copy", "record"]:

        def abort(op, failing=failing):
            if op["kind"] == failing and op["slot"] == "E1":
                raise KeyboardInterrupt

        with RecordingDevice(before_op=abort) as device:
            weights = Weights(device, 4, 3)
            with pytest.raises(KeyboardInterrupt):
                weights.runtime.start_forward()
            assert not weights.runtime.in_flight
            device.before_op = None
            device.ops.clear()
            weights.runtime.start_forward()
            assert [op["layer"] for op in device.ops if op["kind"] == "copy"] == [1, 2]
            assert weights.runtime.in_flight and weights.runtime.counters.copies == 3


def test_copies_overlap_reads_and_what_does_not_is_exposed():
    """A busy machine delays a run now and then; overlap that is not there is in none of five."""
    copy, read, layers = 0.01, 0.02, 6

    def measure():
        with HostDevice(copy_bytes_per_second=NBYTES / copy, trace=True) as device:
            weights = Weights(device, layers, 2, read_seconds=read)
            weights.forward()
            start = time.perf_counter()
            weights.forward()
            took = time.perf_counter() - start
            device.drain()
            copies = [op for op in device.trace if op["kind"] == "copy"]
            reads = [op for op in device.trace if op["kind"] == "read"]
        assert weights.wrong == []
        overlap = sum(max(0, min(a["t1"], b["t1"]) - max(a["t0"], b["t0"])) for a in copies for b in reads)
        return overlap, took, device.exposed_wait_seconds

    tried = []
    for _ in range(5):
        overlap, took, exposed = measure()
        tried.append((overlap, took, exposed))
        # most of the copying runs beside reads
        if overlap > 0.6 * copy * layers and took < layers * (copy + read) and exposed < 0.5 * 2 * layers * copy:
            break
    else:
        raise AssertionError(tried)
    with HostDevice(copy_bytes_per_second=NBYTES / copy) as device:  # no reads to hide behind
        weights = Weights(device, layers, 2)  # named: copies of the next forward still write into its slots
        weights.forward()
        assert device.exposed_wait_seconds > 0.5 * layers * copy


def test_counters_and_priming():
    with HostDevice() as device:
        weights = Weights(device, 5, 3)
        runtime = weights.runtime
        weights.forward(start=False)
        assert runtime.counters.demand_fetches == runtime.counters.restarts == 1 and runtime.primed
        runtime.start_forward()
        assert runtime.primed  # nothing was left to issue
        runtime.invalidate_prefetch()
        runtime.start_forward()
        assert runtime.in_flight and not runtime.primed
        weights.forward(abort=(2, "read"))
        weights.forward()
        assert runtime.counters.synchronisations == 1 == device.synchronisations
        assert runtime.counters.copied_bytes == NBYTES * runtime.counters.copies
        assert runtime.counters.fences == runtime.counters.barriers == 0


def test_a_restart_a_demand_fetch_and_a_synchronisation_are_logged_by_layer(caplog):
    with HostDevice() as device, caplog.at_level("INFO", logger="dwdp.runtime"):
        weights = Weights(device, 5, 2)
        weights.forward()
        weights.runtime.bind(3)
        weights.runtime.bind(1)  # while layer 3 is bound
        counters = weights.runtime.counters
        assert (counters.restarts, counters.demand_fetches, counters.synchronisations) == (2, 2, 1)
    for line in (
        "the expert prefetch restarts at layer 3",
        "expert layer 3 is fetched on demand",
        "the device is synchronised: expert layer 3 was bound and not finished",
        "the expert prefetch restarts at layer 1",
        "expert layer 1 is fetched on demand",
    ):
        assert caplog.messages.count(line) == 1, line


def test_an_error_of_a_copy_reaches_the_host_and_does_not_stop_the_release():
    with HostDevice() as device:
        weights = Weights(device, 2, 2)

        def broken():
            raise OSError("the link is down")

        device.enqueue(device.copy, broken)
        with pytest.raises(OSError, match="the link is down"):
            weights.forward()
        weights.runtime.release()
        with pytest.raises(DwdpError, match="expert DWDP was released"):
            weights.runtime.bind(0)


def test_a_rank_alone_has_nothing_to_prefetch():
    with HostDevice() as device:
        runtime = ExpertRuntime(device, [], 2)
        runtime.start_forward()
        runtime.invalidate_prefetch()
        assert not runtime.primed and runtime.counters.copies == 0
        runtime.release()


def test_a_dead_peers_rows_are_served_on():
    reference, partition = reference_layers(7), partition_of(2, 7)
    left = []

    def body(group, domain, device):
        model, runtime = set_up(group, reference, partition, domain, device)
        if group.rank == 1:
            del model
            runtime.release()  # as a process that ends: its own mappings are gone, nobody is told
            domain.close()
            left.append(1)
            return
        while not left:
            time.sleep(0.001)
        for _ in range(2):
            runtime.start_forward()
            for pos, layer in enumerate(model.moe_layers()):
                layer.dwdp.bind(pos)
                for name, whole in reference[pos][0].items():
                    assert same_bytes(layer.expert_tables()[name], whole)
                layer.dwdp.finish(pos)
        runtime.release()

    on_ranks(2, body)
    gc.collect()
    assert dwdp_memfds() == []


def test_a_check_beside_the_forwards_finds_rows_that_changed():
    reference, partition = reference_layers(7), partition_of(2, 7)

    def body(group, domain, device):
        model, runtime = set_up(group, reference, partition, domain, device, verify_every=2)

        def forward():
            runtime.start_forward()
            for pos in range(3):
                runtime.bind(pos)
                runtime.finish(pos)
            device.drain()

        checked, compare = [], runtime.checker.compare
        runtime.checker.compare = lambda pos, *a, **o: (checked.append(pos), compare(pos, *a, **o))[1]
        for _ in range(5):
            forward()
        assert runtime.verification_error is None and runtime.verified_forward == 4
        assert checked == [1, 2], "the layers take turns"
        group.barrier("checked")
        if group.rank == 1:
            for table in runtime.transport.tables:
                runtime.transport._own_rows(table)[1].view(-1).view(torch.uint8)[2] ^= 1
        group.barrier("spoiled")
        forward(), forward()
        error = runtime.verification_error
        forward(), forward()
        assert runtime.verification_error is error, "the first mismatch is kept"
        group.barrier("done")
        take_down(runtime, group)
        return error

    spoiled, own = on_ranks(2, body)
    assert own is None
    assert isinstance(spoiled, VerificationError)
    assert "expert row 5 copied from rank 1" in str(spoiled) and "first byte" in str(spoiled)


def test_release_detaches_the_model_once_and_keeps_a_foreign_manager():
    reference, partition = reference_layers(7), partition_of(2, 7)

    def body(group, domain, device):
        model, runtime = set_up(group, reference, partition, domain, device)
        foreign = object()
        model.moe_layers()[1].dwdp = foreign
        kept = model.moe_layers()[1].expert_tables()
        runtime.drain()
        group.barrier("drained")
        runtime.unmap_imports()
        assert model.moe_layers()[1].dwdp is foreign and model.moe_layers()[0].dwdp is None
        assert model.moe_layers()[0].expert_tables()["w13"].shape[0] == 0
        assert kept["w13"].shape[0] == 7
        del kept
        model.moe_layers()[1].rebind({name: torch.empty(0) for name in ("w13", "w2")}, {})
        group.barrier("unmapped")
        runtime.release_own()
        runtime.release()
        assert domain.live() == {"handles": 0, "mappings": 0, "ranges": 0, "descriptors": 0}

    on_ranks(2, body)
