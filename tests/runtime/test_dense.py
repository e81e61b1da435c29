"""The dense runtime: what it enqueues, and that every read finds its layer's bytes, also after any abort.

Mutation-checked once, each caught by a test below: an end of read recorded for the other slot; no wait for the end of
read; no wait for ready; a barrier that forgets an auxiliary stream; ready recorded before the copy; a hook that
ignores tracing.
"""

from __future__ import annotations

import time

import pytest
import torch

from dwdp.device.recording import RecordingDevice
from dwdp.errors import DwdpError
from dwdp.runtime import setup_dense
from dwdp.runtime.counters import Counters
from dwdp.runtime.dense import DenseRuntime
from dwdp.runtime.dense_schedule import DenseSchedule
from dwdp.weights.plan import CopyPlan
from dwdp.weights.store import RowStore
from tests.support.dense_ranks import config, dense_ranks, forward_and_check
from tests.support.toy_decoder import snapshot, value_bytes


def recorded(num_layers=3, *, segments="AD", num_aux=0, schedule=DenseSchedule, first_index=1, **options):
    """A runtime over a recording device; layer_index counts from `first_index`, copies move nothing."""
    device = RecordingDevice(num_aux=num_aux)
    schedule = schedule([segments] * num_layers, prefetch_next_pass=True)
    plans = [{slot: CopyPlan((), 10) for slot in schedule.slots_of(pos)} for pos in range(num_layers)]
    positions = {pos + first_index: pos for pos in range(num_layers)}
    return DenseRuntime(device, schedule, positions, plans, Counters(), **options)


def forward(runtime, layers=None):
    runtime.h0()
    for index in layers or [0, *runtime.positions]:
        runtime.h1(index)
        runtime.h2(index)
        runtime.h3(index)


def text(ops):
    return [
        " ".join(
            str(op[key]) for key in ("stream", "kind", "name", "event", "slot", "layer") if op.get(key) is not None
        )
        for op in ops
    ]


def test_the_trace_of_one_layer_names_stream_kind_event_and_slot():
    runtime = recorded(1)
    forward(runtime)
    assert text(runtime.device.ops) == [
        "host mark H0",
        "copy wait read-end-A0 A0 0",
        "copy wait read-end-D0 D0 0",
        "copy copy A0 0",
        "copy copy D0 0",
        "copy record ready-A0 A0 0",
        "copy record ready-D0 D0 0",
        "host mark H1 0",
        "compute wait ready-A0 A0 0",
        "compute wait ready-D0 D0 0",
        "host mark H2 0",
        "compute record read-end-A0 A0 0",
        "host mark H3 0",
        "compute record read-end-D0 D0 0",
        "copy wait read-end-A0 A0 0",
        "copy wait read-end-D0 D0 0",
        "copy copy A0 0",
        "copy copy D0 0",
        "copy record ready-A0 A0 0",
        "copy record ready-D0 D0 0",
    ]


@pytest.mark.parametrize("segments", ["AD", "A"])
@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 5, 92])
def test_a_clean_run_has_no_fence_demand_barrier_or_synchronisation_and_ends_primed(num_layers, segments):
    runtime = recorded(num_layers, segments=segments)
    for number in range(1, 5):
        runtime.start_forward()
        forward(runtime)
        assert runtime.primed
        copies = number * num_layers + min(2, num_layers)
        assert runtime.counters == Counters(copies=copies, copied_bytes=copies * 10 * len(segments))
    assert runtime.device.synchronisations == 0
    assert not [op for op in runtime.device.ops if op.get("name") in ("fence", "demand", "barrier")]


def test_the_barrier_after_an_abort_and_the_fence_go_behind_every_stream_that_reads():
    for spoil, name in (("abort", "barrier"), ("jump", "fence")):
        runtime = recorded(6, num_aux=2)
        forward(runtime, [1])
        runtime.h1(2)
        runtime.device.ops.clear()
        runtime.h0() if spoil == "abort" else runtime.h1(5)
        ops = text(runtime.device.ops)
        at = next(i for i, op in enumerate(ops) if op.startswith(f"host mark {name}"))
        waits = [f"{verb} dense-now-{s}" for s in ("compute", "aux0", "aux1") for verb in (f"{s} record", "copy wait")]
        assert ops[at + 1 : at + 7] == waits
        assert getattr(runtime.counters, name + "s") == 1
        assert ops.index("copy copy " + ("A0 0" if spoil == "abort" else "A0 4")) > at


def test_layers_that_are_not_covered_and_a_released_runtime_do_nothing():
    runtime = recorded()
    for hook in (runtime.h1, runtime.h2, runtime.h3):
        hook(0)
        hook(77)
    assert runtime.device.ops == []
    runtime.release()
    runtime.start_forward()
    forward(runtime)
    assert runtime.device.ops == []


def test_fences_and_demand_fetches_are_logged_by_layer(caplog):
    runtime = recorded(6)
    forward(runtime, [1])
    runtime.h1(2)
    runtime.h1(5)
    assert runtime.counters.fences == runtime.counters.demand_fetches == 1
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sum("fence" in line and "covered layer 4" in line for line in said) == 1
    assert sum("covered layer 4 were not enqueued" in line and "copied now" in line for line in said) == 1


def test_a_demand_fetch_is_counted_and_an_error_with_strict():
    runtime = recorded()
    forward(runtime, [2])
    assert runtime.counters.demand_fetches == 1
    strict = recorded(strict=True)
    strict.h0()
    with pytest.raises(DwdpError, match="covered layer 1 were not enqueued .* .DWDP_DENSE_STRICT"):
        strict.h1(2)


def test_hooks_raise_while_the_model_is_traced_or_captured(monkeypatch):
    runtime = recorded()

    def step(x):
        runtime.h0()
        return x + 1

    with pytest.raises(RuntimeError, match="cannot be compiled"):
        torch.compile(step, backend="eager")(torch.ones(1))
    with pytest.raises(RuntimeError, match="cannot be compiled"):
        torch.compile(step, backend="eager", fullgraph=True)(torch.ones(1))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="without CUDA graphs"):
        runtime.h0()
    assert runtime.device.ops == []


# ---- real copies ----

SLOW = {"copy_bytes_per_second": 20e6}  # a layer of the toy takes about half a millisecond


@pytest.mark.parametrize("segments", [("attn", "moe"), ("attn",)])
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5])
def test_every_read_finds_its_layers_bytes_behind_slow_copies(num_ranks, segments):
    num_layers = 1 + num_ranks % 5

    def body(rank):
        expected = snapshot(rank.model)
        rank.setup()
        forward_and_check(rank, expected, count=3)
        counters = rank.counters
        assert counters.copies == 3 * num_layers + min(2, num_layers)
        assert (counters.demand_fetches, counters.fences, counters.barriers, counters.synchronisations) == (0,) * 4
        assert rank.device.exposed_wait_seconds > 0

    dense_ranks(
        num_ranks,
        body,
        settings=lambda rank: config(segments=segments, debug=1),
        num_layers=num_layers,
        device_options=SLOW,
    )


def test_slow_reads_on_a_compute_worker_are_never_overwritten():
    """Compute is a stream of its own here: only the events keep a copy from overwriting what is still to be read."""

    def body(rank):
        expected = snapshot(rank.model)
        rank.setup()
        wrong = []

        def kernel(layer, segment):
            time.sleep(0.002)
            for name, tensor in layer.weights(segment).items():
                if value_bytes(tensor) != expected[layer.index, segment, name]:
                    wrong.append((layer.index, segment, name))

        def read(layer, segment):
            rank.device.enqueue(rank.device.compute, lambda: kernel(layer, segment), kind="read", layer=layer.index)

        for _ in range(3):
            rank.manager.runtime.start_forward()
            rank.model(read)
        rank.device.synchronize()
        assert wrong == [] and rank.counters.demand_fetches == rank.counters.fences == 0

    dense_ranks(2, body, num_layers=5, device_options={"compute_worker": True}, settings=lambda rank: config(debug=1))


def test_several_store_handles_serve_the_same_bytes(monkeypatch):
    def in_small_chunks(domain, layout, config, rank):
        return RowStore(domain, layout, rank, chunk_bytes=6_000)

    monkeypatch.setattr(setup_dense, "new_row_store", in_small_chunks)

    def body(rank):
        expected = snapshot(rank.model)
        rank.setup()
        assert len(rank.manager.weights.store.handles) > 1
        forward_and_check(rank, expected)

    dense_ranks(3, body, num_layers=4)


class Abort(Exception):
    pass


@pytest.mark.parametrize("num_layers", [1, 2, 3, 5])
def test_after_an_abort_at_any_hook_the_next_forward_is_right_with_and_without_a_start(num_layers):
    def body(rank):
        expected = snapshot(rank.model)
        rank.setup()
        points = []
        rank.model(at=lambda hook, index: points.append((hook, index)))
        for started in (True, False):
            for number in range(1, len(points)):
                seen = []

                def stop(hook, index, seen=seen, number=number):
                    seen.append(hook)
                    if len(seen) > number:
                        raise Abort

                with pytest.raises(Abort):
                    rank.model(at=stop)
                barriers = rank.counters.barriers
                if started:
                    rank.manager.runtime.start_forward()
                forward_and_check(rank, expected, count=1, start=False)
                covered = points[number][0] != "H0" and number > 0
                over = rank.counters.barriers == barriers
                assert covered and (not over), points[number]
        assert rank.counters.demand_fetches == rank.counters.fences == 0

    dense_ranks(2, body, num_layers=num_layers, settings=lambda rank: config(debug=1))


def test_an_abort_inside_any_copy_is_recovered():
    """Fails at every operation that a forward enqueues on the device, one after the other."""

    def body(rank):
        expected = snapshot(rank.model)
        rank.setup()
        forward_and_check(rank, expected, count=1)
        device, left = rank.device, [0]
        reals = {name: getattr(device, name) for name in ("record", "wait", "enqueue")}

        def counted(name):
            def call(*args, **kwargs):
                left[0] -= 1
                if left[0] == 0:
                    raise Abort(name)
                return reals[name](*args, **kwargs)

            return call

        for number in range(1, 200):
            left[0] = number
            for name in reals:
                setattr(device, name, counted(name))
            try:
                rank.manager.runtime.start_forward()
                rank.model()
                break
            except Abort:
                pass
            finally:
                for name, real in reals.items():
                    setattr(device, name, real)
            forward_and_check(rank, expected, count=1, start=number % 2 == 0)
        assert number > 40
        assert rank.counters.demand_fetches == rank.counters.fences == 0

    dense_ranks(2, body, num_layers=4, settings=lambda rank: config(debug=1))


def test_without_the_fill_at_h2_layers_are_fetched_on_demand_and_bytes_are_still_right():
    class NoFill(DenseSchedule):
        def h2(self, pos):
            yield from self._close("A", pos)

        def h3(self, pos):
            yield from self._close("D", pos)
            self.open = self.open and pos != self.num_layers - 1

    def body(rank):
        expected = snapshot(rank.model)
        rank.setup()
        schedule = rank.manager.runtime.schedule
        rank.manager.runtime.schedule = NoFill(schedule.segments, prefetch_next_pass=True)
        forward_and_check(rank, expected)
        assert rank.counters.demand_fetches == 2 * 3

    dense_ranks(2, body, num_layers=5)


def test_a_missing_end_of_read_is_detected_by_the_bytes():
    """Sensitivity of the test with slow reads: without the record at H2 the copy runs into the read window."""

    def body(rank):
        expected = snapshot(rank.model)
        rank.setup()
        real, wrong = rank.device.record, []

        def record(event, stream, **where):
            if not event.name.startswith("read-end-A"):
                real(event, stream, **where)

        rank.device.record = record

        def kernel(layer):
            time.sleep(0.005)
            wrong.extend(
                name
                for name, tensor in layer.weights("attn").items()
                if value_bytes(tensor) != expected[layer.index, "attn", name]
            )

        def read(layer, segment):
            if segment == "attn":
                rank.device.enqueue(rank.device.compute, lambda: kernel(layer), kind="read", layer=layer.index)

        rank.model(read)
        rank.device.synchronize()
        assert wrong

    dense_ranks(
        2, body, num_layers=5, device_options={"compute_worker": True}, settings=lambda rank: config(segments=("attn",))
    )


def test_every_so_many_forwards_a_layer_is_verified_on_the_copy_stream():
    def body(rank):
        expected = snapshot(rank.model)
        rank.setup()
        runtime = rank.manager.runtime
        checked, judge = [], runtime.checker.judge
        runtime.checker.judge = lambda pos, slot, *a, **o: (checked.append((pos, slot)), judge(pos, slot, *a, **o))[1]
        forward_and_check(rank, expected, count=5)
        rank.device.drain()
        assert runtime.verification_error is None
        assert checked == [(1, "A1"), (1, "D1"), (2, "A0"), (2, "D2")], "the layers take turns"
        # after forward 6 the next copy of pos 3 mod 3 = 0 is checked: spoil a row of it
        store = rank.manager.weights.store
        rank.group.barrier("checked")
        store.row(rank.group.rank, 1)[5] ^= 1
        rank.group.barrier("spoiled")
        for _ in range(2):
            rank.model()
        rank.device.drain()
        assert "layer 1 MoE-dense" in str(runtime.verification_error)
        assert "a row itself has changed since set-up" in str(runtime.verification_error)
        assert rank.counters.synchronisations == 0

    dense_ranks(2, body, verify_every=2)
