"""Streams and events of a GPU on a fake driver whose streams are threads: order, waits, counts, traces, refusals."""

import logging
import threading
import time
from types import SimpleNamespace

import pytest

from dwdp.device.cuda import CudaDevice
from dwdp.errors import DwdpError
from dwdp.memory.driver import DriverError
from dwdp.tools.trace import chrome_trace
from tests.memory.fake_driver import CUresult, FakeDriver, FakeMachine, zero_live


class FakeCudaDevice(CudaDevice):
    """The compute stream is one of the fake's; work that is no prepared submission runs on the fake's streams."""

    def __init__(self, **options):
        self.api = options.pop("api", None) or FakeDriver(FakeMachine())
        self.now = None  # another stream that torch would have made current
        self.api.cuInit(0)
        self.api.cuCtxSetCurrent(0)
        _, self.torch_stream = self.api.cuStreamCreateWithPriority(1, 0)
        super().__init__(0, driver=self.api, current_stream=lambda: int(self.now or self.torch_stream), **options)

    def _run_on(self, stream, fn):
        self.api._stream(stream.raw).put(fn)

    def close(self):
        super().close()
        if self.torch_stream is not None:
            self.api.cuStreamDestroy(self.torch_stream)
            self.torch_stream = None


class Prepared:
    def __init__(self, device, work):
        self.device, self.work = device, work

    def submit(self, stream):
        self.device.api._stream(stream).put(self.work)


@pytest.fixture
def device():
    with FakeCudaDevice(num_aux=1) as device:
        yield device
    assert device.api.live() == zero_live()


def test_copies_run_in_order_beside_the_host_and_a_wait_orders_streams(device):
    """Fails when `wait` or `record` is left out: the copy then runs before the read, or the read before the copy."""
    seen, gate = [], threading.Event()
    ready, read = device.event("ready"), device.event("read")
    device.enqueue(device.compute, lambda: (gate.wait(5), seen.append("read 0")), kind="read")
    device.record(read, device.compute)
    device.wait(device.copy, read)
    device.enqueue(device.copy, Prepared(device, lambda: (time.sleep(0.02), seen.append("copy 1"))))
    device.record(ready, device.copy)
    device.wait(device.compute, ready)
    device.enqueue(device.compute, lambda: seen.append("read 1"), kind="read")
    assert seen == []  # the host did not wait
    gate.set()
    device.synchronize()
    assert seen == ["read 0", "copy 1", "read 1"]


def test_a_wait_captures_the_latest_record_and_an_unrecorded_event_waits_for_nothing(device):
    gate, event = threading.Event(), device.event("e")
    device.wait(device.compute, event)
    device.record(event, device.copy)
    device.wait(device.compute, event)
    device.enqueue(device.copy, lambda: gate.wait(5))
    device.record(event, device.copy)  # later: moves no wait that was made
    done = []
    device.enqueue(device.compute, lambda: done.append(1), kind="read")
    device.api.cuStreamSynchronize(device.compute.raw)
    assert done == [1]
    gate.set()


@pytest.mark.parametrize("trace", [False, True])
def test_the_waits_of_a_layers_slots_are_made_together_and_measured_as_one(trace):
    """Mutation-checked: with a wait for the last event alone the read comes before the first slot's copy."""
    with FakeCudaDevice(measure_waits=True, trace=trace) as device:
        events, seen = {slot: device.event(slot) for slot in ("A0", "D0")}, []
        device.enqueue(device.copy, Prepared(device, lambda: (time.sleep(0.05), seen.append("A0"))))
        device.record(events["A0"], device.copy)
        device.wait_all(device.compute, events, 3)
        device.enqueue(device.compute, lambda: seen.append("read"), kind="read")
        device.synchronize()
        assert seen == ["A0", "read"] and len(device._waits) == (2 if trace else 1)
        assert 0.04 < device.exposed_wait_by_layer[3] < 0.5
        if trace:
            waits = [op for op in device.trace if op["kind"] == "wait"]
            assert [(op["slot"], op["layer"]) for op in waits] == [("A0", 3), ("D0", 3)]


def test_the_copy_stream_has_the_highest_priority_and_events_keep_no_time(device):
    assert device.api._streams[int(device.copy.raw)].priority == -5
    assert device.api._streams[int(device.auxiliary[0].raw)].priority == 0
    event = device.event("a")
    assert not device.api._events[event.raw].timed
    assert [device.event("a").name, device.event("b").name] == ["a#2", "b"]


def test_synchronisations_are_counted_and_drain_is_not(device):
    done = []
    device.enqueue(device.copy, lambda: (time.sleep(0.02), done.append(1)))
    assert device.drain() is None and done == [1] and device.synchronisations == 0
    device.synchronize()
    assert device.synchronisations == 1


def test_an_error_of_the_device_is_raised_by_synchronize_and_returned_by_drain(device, caplog):
    device.api.fail["cuCtxSynchronize"] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(DriverError, match="cuCtxSynchronize failed with CUDA_ERROR_ILLEGAL_ADDRESS.*mappings"):
        device.synchronize()
    assert isinstance(device.drain(), DriverError)
    assert isinstance(device.recover(), DriverError)  # the device keeps it
    device.api.fail.clear()
    assert device.recover() is None and device.drain() is None


@pytest.mark.parametrize("call", ["cuEventRecord", "cuStreamWaitEvent"])
def test_a_failing_call_names_event_and_stream(device, call):
    event = device.event("E0 ready")
    device.api.fail[call] = CUresult.CUDA_ERROR_INVALID_HANDLE
    with pytest.raises(DriverError, match=f"{call} failed with .*INVALID_HANDLE.* event E0 ready on stream copy"):
        device.record(event, device.copy)
        device.wait(device.copy, event)
    device.api.fail.clear()


def test_another_current_stream_and_graph_capture_are_refused(device):
    event = device.event("e")
    device.now = device.copy.raw
    for call in (lambda: device.wait(device.compute, event), lambda: device.record(event, device.compute)):
        with pytest.raises(DwdpError, match="another CUDA stream.*leave CUDA graphs and torch.cuda.stream out"):
            call()
    device.record(event, device.copy)  # the copy stream is the device's own business
    device.now = None
    device.api.capturing = True
    with pytest.raises(DwdpError, match="graph capture"):
        device.wait(device.compute, event)
    device.api.capturing = False
    device.api.fail["cuStreamIsCapturing"] = CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
    with pytest.raises(DwdpError, match="graph capture"):
        device.enqueue(device.compute, None, kind="read")
    device.api.fail.clear()


def test_streams_of_another_device_kinds_and_a_closed_device_are_refused(device):
    with FakeCudaDevice() as other:
        with pytest.raises(ValueError, match="another device"):
            device.record(device.event("e"), other.copy)
    with pytest.raises(ValueError, match="copy or read"):
        device.enqueue(device.copy, None, kind="write")
    with pytest.raises(DwdpError, match="closed"):
        other.enqueue(other.copy, None)
    with pytest.raises(ValueError, match="num_aux is -1"):
        FakeCudaDevice(num_aux=-1)


def late_copy(device, seconds, layer):
    """Compute waits `seconds` for a copy of a layer."""
    event = device.event("ready")
    device.enqueue(device.copy, lambda: time.sleep(seconds), slot="E0", layer=layer, nbytes=7)
    device.record(event, device.copy, slot="E0", layer=layer)
    device.wait(device.compute, event, slot="E0", layer=layer)


def test_exposed_waits_are_read_later_by_layer_and_only_where_they_are_measured():
    """Fails when the events lie on the copy stream or only one of them is behind the wait."""
    with FakeCudaDevice(measure_waits=True) as device:
        late_copy(device, 0.05, 3)
        assert device.exposed_wait_seconds == 0  # not over, and nobody waits for it
        device.synchronize()
        late_copy(device, 0.0, 4)
        device.synchronize()
        assert 0.04 < device.exposed_wait_seconds < 0.5
        assert 0.04 < device.exposed_wait_by_layer[3] < 0.5 and 0 <= device.exposed_wait_by_layer[4] < 0.5
        timers = len(device.api._events)
        for _ in range(5):
            late_copy(device, 0.0, 4)
            device.synchronize()
            assert device.exposed_wait_seconds > 0
        assert len(device.api._events) == timers + 5  # one event each of `late_copy`, timers are used again
        assert device.trace is None
        with pytest.raises(DwdpError, match="without a trace"):
            device.stamp_trace()
    assert device.api.live() == zero_live() and device.exposed_wait_seconds > 0
    with FakeCudaDevice() as device:
        late_copy(device, 0.02, 3)
        device.synchronize()
        assert device.exposed_wait_seconds == 0 and device.exposed_wait_by_layer == {}


def test_waits_that_nobody_asks_for_do_not_pile_up(monkeypatch):
    monkeypatch.setattr("dwdp.device.cuda.PENDING_WAITS", 8)
    with FakeCudaDevice(measure_waits=True) as device:
        event = device.event("e")
        for _ in range(200):
            device.record(event, device.copy)
            device.wait(device.compute, event)
            device.drain()
        assert len(device.api._events) <= 2 * (8 + 2) + 2


def test_no_wait_reads_more_than_a_few_of_those_before_it(monkeypatch):
    """Fails when all that has piled up is read at once: the forward would stop there for as long as that takes."""
    monkeypatch.setattr("dwdp.device.cuda.PENDING_WAITS", 8)
    with FakeCudaDevice(measure_waits=True) as device:
        event, gate = device.event("e"), threading.Event()
        device.enqueue(device.compute, lambda: gate.wait(5), kind="read")
        for _ in range(50):  # the host is far ahead: no wait is over
            device.wait(device.compute, event, layer=1)
        assert len(device._waits) == 50
        gate.set()
        device.drain()
        for number in range(60):
            device.api.calls.clear()
            device.wait(device.compute, event, layer=1)
            device.drain()
            read = [name for name, *_ in device.api.calls].count("cuEventElapsedTime")
            assert read <= 2, number
        assert 8 <= len(device._waits) <= 10
        assert device.exposed_wait_seconds > 0 and not device._waits


def test_a_trace_has_the_neutral_form_with_the_times_of_the_device():
    with FakeCudaDevice(trace=True) as device:
        start = time.perf_counter()
        device.mark("bind", 2)
        late_copy(device, 0.05, 2)
        device.enqueue(device.compute, None, kind="read", slot="E0", layer=2)
        ops = device.stamp_trace()
        end = time.perf_counter()
    shown = [(op["stream"], op["kind"], op["slot"], op["layer"], op["event"]) for op in ops]
    assert shown == [
        ("host", "mark", None, 2, None),
        ("copy", "copy", "E0", 2, None),
        ("copy", "record", "E0", 2, "ready"),
        ("compute", "wait", "E0", 2, "ready"),
        ("compute", "read", "E0", 2, None),
    ]
    mark, copy, record, wait, read = ops
    assert mark["name"] == "bind" and copy["nbytes"] == 7
    assert all(start - 0.02 <= op["t0"] <= op["t1"] <= end + 0.02 for op in ops)
    assert copy["t1"] - copy["t0"] > 0.04 and wait["t1"] - wait["t0"] > 0.03
    assert copy["t1"] <= record["t0"] + 0.01 and record["t0"] <= wait["t1"] + 0.01 and wait["t1"] <= read["t0"] + 0.01
    assert 0.03 < device.exposed_wait_by_layer[2] < 0.5


def test_a_trace_becomes_a_chrome_trace():
    with FakeCudaDevice(trace=True) as device:
        device.mark("bind", 2)
        late_copy(device, 0.03, 2)
        device.synchronize()
        shown = chrome_trace(device.stamp_trace(), rank=3)
    events = [event for event in shown["traceEvents"] if event["ph"] in "Xi"]
    assert [event["name"] for event in events] == [
        "bind layer 2", "copy E0 layer 2", "record E0 layer 2", "wait E0 layer 2", "sync",
    ]  # fmt: skip
    rows = {event["args"]["name"]: event["tid"] for event in shown["traceEvents"] if event["name"] == "thread_name"}
    assert set(rows) == {"host", "copy", "compute"} and {event["pid"] for event in events} == {3}
    copy = events[1]
    assert copy["tid"] == rows["copy"] and copy["dur"] > 20_000 and copy["args"]["nbytes"] == 7
    assert min(event["ts"] for event in events) == 0
    assert chrome_trace([{"stream": "host", "kind": "mark"}])["traceEvents"][1:] == []  # without times: left out


def test_closing_gives_events_and_streams_back_and_logs_what_fails(caplog):
    device = FakeCudaDevice(num_aux=2, measure_waits=True)
    late_copy(device, 0.0, 1)
    device.api.fail["cuEventDestroy"] = lambda event: (
        CUresult.CUDA_ERROR_INVALID_HANDLE if event == min(device.api._events) else None
    )
    with caplog.at_level(logging.ERROR):
        device.close()
    assert caplog.text.count("cuEventDestroy of device 0 failed") >= 1 and "Traceback" in caplog.text
    assert device.api.live()[5] == 0
    device.close()


def test_a_failing_start_leaves_no_stream():
    api = FakeDriver(FakeMachine(), fail={"cuEventSynchronize": CUresult.CUDA_ERROR_ILLEGAL_ADDRESS})
    with pytest.raises(DriverError, match="cuEventSynchronize"):
        FakeCudaDevice(api=api, num_aux=1)
    assert api.live() == zero_live()


def test_a_device_that_another_thread_drives_and_closes_is_given_back(caplog):
    """Fails when a call relies on the context of the thread that made the device."""
    device = FakeCudaDevice(num_aux=1, measure_waits=True)
    copied = []

    def elsewhere():
        def copy():  # as a prepared copy of the driver's does
            assert device.api._has_context()
            copied.append(1)

        device.enqueue(device.copy, SimpleNamespace(submit=lambda stream: copy()))
        device.record(device.event("made there"), device.copy)
        device.close()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert copied == [1] and device.api.live() == zero_live() and caplog.text == ""


def test_a_query_that_fails_is_an_error_and_no_wait_that_goes_on(device):
    """Fails when every result but success is taken for not ready."""
    device._measure = True
    late_copy(device, 0.0, 1)
    device.api.fail["cuEventElapsedTime"] = CUresult.CUDA_ERROR_NOT_READY
    assert device.exposed_wait_seconds == 0
    device.api.fail["cuEventElapsedTime"] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(DriverError, match="cuEventElapsedTime failed with CUDA_ERROR_ILLEGAL_ADDRESS.*wait of layer 1"):
        _ = device.exposed_wait_seconds
    device.api.fail.clear()
