"""Streams and events of the host device."""

import logging
import os
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch

from dwdp.device.host import HostDevice
from dwdp.errors import DwdpError


class Gate:
    """Work that runs until it is opened."""

    def __init__(self):
        self.started, self.opened = threading.Event(), threading.Event()

    def __call__(self):
        self.started.set()
        assert self.opened.wait(20)


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.opened.set()


# events


def test_event_that_was_never_recorded_waits_for_nothing(gate):
    with HostDevice() as device:
        device.enqueue(device.copy, gate)
        device.wait(device.compute, device.event("never"))
        assert not gate.opened.is_set()
        gate.opened.set()


def test_wait_blocks_compute_until_the_recorded_work_is_done():
    done = []
    with HostDevice() as device:
        event = device.event("ready")
        device.enqueue(device.copy, lambda: (time.sleep(0.03), done.append(1)))
        device.record(event, device.copy)
        assert not event.query()
        device.wait(device.compute, event)
        assert done == [1] and event.query()


def test_wait_does_not_wait_for_work_after_the_record(gate):
    with HostDevice() as device:
        event = device.event("ready")
        device.record(event, device.copy)
        device.enqueue(device.copy, gate)
        device.wait(device.compute, event)
        assert not gate.opened.is_set()
        gate.opened.set()


def test_wait_captures_the_latest_record_at_the_time_of_the_call(gate):
    """A record after the wait's call must not move it."""
    order = []
    with HostDevice(num_aux=2) as device:
        first, second = device.auxiliary
        event, hold = device.event("ready"), device.event("hold")
        held = Gate()
        device.enqueue(device.copy, held)
        device.record(hold, device.copy)
        device.record(event, first)
        device.wait(second, hold)
        device.wait(second, event)  # the first record
        device.enqueue(second, lambda: order.append("waiter"))
        device.enqueue(first, gate)
        device.record(event, first)  # moves the event behind the gate, not the wait above
        held.opened.set()
        deadline = time.monotonic() + 20
        while not order and time.monotonic() < deadline:
            time.sleep(0.001)
        assert order == ["waiter"] and not gate.opened.is_set()
        assert not event.query()
        gate.opened.set()
        device.wait(device.compute, event)  # the second record


def test_rerecorded_event_waits_for_the_new_work_each_time():
    seen = []
    with HostDevice() as device:
        event = device.event("ready")
        for i in range(50):
            device.enqueue(device.copy, lambda i=i: seen.append(i))
            device.record(event, device.copy)
            device.wait(device.compute, event)
            assert seen[-1] == i


def test_record_on_the_calling_thread_is_complete_at_once(gate):
    with HostDevice() as device:
        device.enqueue(device.copy, gate)
        event = device.event("read")
        device.record(event, device.compute)
        assert event.query()
        gate.opened.set()


def test_copy_waits_for_the_end_of_a_read_on_another_worker(gate):
    order = []
    with HostDevice(compute_worker=True) as device:
        read = device.event("end-of-read")
        device.enqueue(device.compute, lambda: (gate(), order.append("read")), kind="read")
        device.record(read, device.compute)
        device.wait(device.copy, read)
        device.enqueue(device.copy, lambda: order.append("copy"))
        assert gate.started.wait(20)
        gate.opened.set()
        device.synchronize()
        assert order == ["read", "copy"]


def test_waits_between_workers_neither_deadlock_nor_block_the_host(gate):
    """Ring of waits over four workers behind one gate: the host enqueues all of it at once."""
    count = []
    with HostDevice(compute_worker=True, num_aux=2) as device:
        streams = [device.compute, device.copy, *device.auxiliary]
        events = [device.event(f"e{i}") for i in range(4)]
        device.enqueue(device.compute, gate)
        for turn in range(400):
            me, before = turn % 4, (turn - 1) % 4
            device.wait(streams[me], events[before])
            device.enqueue(streams[me], lambda turn=turn: count.append(turn))
            device.record(events[me], streams[me])
        assert count == []  # the gate is closed, and yet the host came here
        gate.opened.set()
        device.synchronize()
        assert count == list(range(400))


def test_event_names_in_a_trace_are_distinct():
    with HostDevice() as device:
        assert [device.event("e").name for _ in range(3)] == ["e", "e#2", "e#3"]


# work


def test_work_of_a_stream_runs_in_order_and_beside_the_calling_thread():
    order = []
    with HostDevice() as device:
        event = device.event("ready")
        start = time.perf_counter()
        for i in range(5):
            device.enqueue(device.copy, lambda i=i: (time.sleep(0.02), order.append(i)))
        device.record(event, device.copy)
        assert time.perf_counter() - start < 0.02
        time.sleep(0.12)  # compute of the calling thread
        device.wait(device.compute, event)
        assert order == list(range(5))
        assert time.perf_counter() - start < 0.19  # one after the other would be 0.22
        assert device.exposed_wait_seconds < 0.05


def test_compute_on_the_calling_thread_runs_and_raises_at_once():
    with HostDevice() as device:
        ran = []
        device.enqueue(device.compute, lambda: ran.append(threading.get_ident()), kind="read")
        assert ran == [threading.get_ident()]
        with pytest.raises(ZeroDivisionError):
            device.enqueue(device.compute, lambda: 1 / 0, kind="read")
        device.synchronize()  # the caller has it already; the device is as good as before


def test_threads_of_workers_compute_with_one_thread_and_others_keep_theirs():
    seen, before = {}, torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with HostDevice(num_aux=1) as device:
            for stream in (device.copy, *device.auxiliary):
                device.enqueue(stream, lambda s=stream: seen.update({s.name: torch.get_num_threads()}))
            device.synchronize()
            other = threading.Thread(target=lambda: seen.update(later=torch.get_num_threads()))
            other.start()
            other.join()
            assert seen == {"copy": 1, "aux0": 1, "later": 2} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_one_operation_costs_the_host_microseconds():
    with HostDevice() as device:
        event = device.event("e")
        best = 1.0
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(200):
                device.wait(device.copy, event)
                device.enqueue(device.copy, None)
                device.record(event, device.copy)
            best = min(best, (time.perf_counter() - start) / 600)
        assert best < 40e-6


def test_work_is_of_a_known_kind_and_a_stream_of_its_device():
    with HostDevice() as device, HostDevice() as other:
        with pytest.raises(ValueError, match="copy or read, not 'write'"):
            device.enqueue(device.copy, None, kind="write")
        for call in (
            lambda: device.enqueue(other.copy, None),
            lambda: device.record(device.event("e"), other.copy),
            lambda: device.wait(other.compute, device.event("e")),
        ):
            with pytest.raises(ValueError, match="another device"):
                call()


# exposed wait


def test_exposed_wait_is_what_compute_waits_and_is_kept_by_layer():
    with HostDevice(trace=True) as device:
        event = device.event("ready")
        for layer, seconds in ((0, 0.03), (1, 0.06), (0, 0.02)):
            device.enqueue(device.copy, lambda s=seconds: time.sleep(s))
            device.record(event, device.copy)
            device.wait(device.compute, event, layer=layer)
            device.wait(device.compute, event, layer=2)  # reached: waits for nothing
        device.enqueue(device.copy, lambda: time.sleep(0.01))
        device.synchronize()  # the host's wait, not compute's
        by_layer = device.exposed_wait_by_layer
        assert set(by_layer) == {0, 1}
        assert 0.045 < by_layer[0] < 0.12 and 0.055 < by_layer[1] < 0.13
        assert device.exposed_wait_seconds == pytest.approx(sum(by_layer.values()))
        waits = [op["t1"] - op["t0"] for op in device.trace if op["kind"] == "wait"]
        assert sum(waits) == pytest.approx(device.exposed_wait_seconds)


def test_exposed_wait_of_a_compute_worker_is_its_own():
    with HostDevice(compute_worker=True) as device:
        event = device.event("ready")
        device.enqueue(device.copy, lambda: time.sleep(0.05))
        device.record(event, device.copy)
        start = time.perf_counter()
        device.wait(device.compute, event, layer=4)
        assert time.perf_counter() - start < 0.03
        device.synchronize()
        assert 0.03 < device.exposed_wait_by_layer[4] < 0.15


# throttle


def seconds_of(device, sizes, work=lambda: None):
    event = device.event("end")
    start = time.perf_counter()
    for nbytes in sizes:
        device.enqueue(device.copy, work, nbytes=nbytes)
    device.record(event, device.copy)
    device.wait(device.compute, event)
    return time.perf_counter() - start


def nearest(expected, measure):
    """Best of some measurements: others use this machine's cores too."""
    return min((measure() for _ in range(4)), key=lambda seconds: abs(seconds - expected))


@pytest.mark.alone
@pytest.mark.parametrize("sizes", [[10_000_000] * 8, [100_000] * 800, [79_000_000, 1_000_000]])
def test_throttled_copies_take_what_the_link_would_within_five_percent(sizes):
    with HostDevice(copy_bytes_per_second=400e6) as device:
        assert nearest(0.2, lambda: seconds_of(device, sizes)) == pytest.approx(0.2, rel=0.05)


@pytest.mark.alone
def test_throttle_counts_the_copying_itself_and_starts_anew_after_a_pause():
    with HostDevice(copy_bytes_per_second=100e6) as device:
        device.enqueue(device.copy, lambda: None, nbytes=1_000_000)
        time.sleep(0.1)  # an idle link saves nothing up
        seconds = nearest(0.1, lambda: seconds_of(device, [2_000_000] * 5, lambda: time.sleep(0.01)))
        assert seconds == pytest.approx(0.1, rel=0.05)
        # Work slower than the link is not made up for later.
        assert seconds_of(device, [100_000] * 5 + [5_000_000], lambda: time.sleep(0.01)) > 0.095


def test_throttle_sleeps_instead_of_burning_a_core():
    with HostDevice(copy_bytes_per_second=100e6) as device:
        cpu = time.process_time()
        seconds_of(device, [1_000_000] * 20)
        assert time.process_time() - cpu < 0.1


def test_throttled_link_is_idle_while_its_stream_waits():
    with HostDevice(copy_bytes_per_second=100e6, num_aux=1) as device:
        event, end = device.event("e"), device.event("end")
        device.enqueue(device.auxiliary[0], lambda: time.sleep(0.08))
        device.record(event, device.auxiliary[0])
        device.wait(device.copy, event)
        start = time.perf_counter()
        device.enqueue(device.copy, lambda: None, nbytes=5_000_000)
        device.record(end, device.copy)
        device.wait(device.compute, end)
        assert time.perf_counter() - start > 0.12


# errors


def test_error_in_a_copy_is_raised_at_the_next_wait_and_stops_later_work():
    ran = []
    with HostDevice(trace=True) as device:
        event = device.event("ready")
        device.enqueue(device.copy, lambda: ran.append(0))
        device.enqueue(device.copy, lambda: 1 / 0, slot="E1", layer=7)
        device.enqueue(device.copy, lambda: ran.append(1))
        device.record(event, device.copy)
        with pytest.raises(ZeroDivisionError) as caught:
            device.wait(device.compute, event)
        assert ran == [0] and event.query()
        assert "stream copy: copy of slot E1, layer 7" in caught.value.__notes__[0]
        with pytest.raises(ZeroDivisionError):  # bytes that were not copied stay wrong
            device.wait(device.compute, event)
        with pytest.raises(ZeroDivisionError):
            device.synchronize()
        assert isinstance(device.drain(), ZeroDivisionError)
        assert len(caught.value.__notes__) == 1


def test_error_in_one_worker_lets_waiters_on_others_go_on_without_running_work():
    ran = []
    device = HostDevice(compute_worker=True)
    event = device.event("ready")
    device.enqueue(device.copy, lambda: (time.sleep(0.02), 1 / 0))
    device.record(event, device.copy)
    device.wait(device.compute, event)
    device.enqueue(device.compute, lambda: ran.append("read of bytes that never came"), kind="read")
    with pytest.raises(ZeroDivisionError):
        device.synchronize()
    assert ran == []
    device.close()


def test_error_at_close_is_logged_and_not_raised_over_another(caplog):
    with caplog.at_level(logging.ERROR), pytest.raises(KeyError, match="first"):
        with HostDevice() as device:
            device.enqueue(device.copy, lambda: 1 / 0)
            raise KeyError("first")
    assert "ZeroDivisionError" in caplog.text and "Traceback" in caplog.text
    caplog.clear()
    device.close()
    assert not caplog.text


# the end


def test_close_finishes_the_work_in_flight_first():
    done = []
    device = HostDevice(num_aux=1)
    event = device.event("e")
    for _ in range(5):
        device.enqueue(device.copy, lambda: (time.sleep(0.005), done.append(1)))
    device.record(event, device.copy)
    device.wait(device.auxiliary[0], event)
    device.enqueue(device.auxiliary[0], lambda: done.append(2))
    device.close()
    assert done == [1] * 5 + [2]
    device.close()
    with pytest.raises(DwdpError, match="closed"):
        device.enqueue(device.copy, None)
    assert device.drain() is None


def test_only_synchronize_is_counted():
    with HostDevice() as device:
        device.drain()
        device.synchronize()
        device.synchronize()
        assert device.synchronisations == 2


def test_devices_leave_no_thread_and_no_descriptor():
    threads, fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with HostDevice(compute_worker=True, num_aux=2) as device:
            assert threading.active_count() == threads + 4
            assert not any(t.daemon for t in threading.enumerate() if t.name.startswith("dwdp-"))
            device.enqueue(device.copy, lambda: None)
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == fds


def test_worker_lets_go_of_work_that_is_done():
    class Held:
        pass

    with HostDevice() as device:
        held = Held()
        gone = weakref.ref(held)
        device.enqueue(device.copy, lambda held=held: None)
        del held
        deadline = time.monotonic() + 20
        while gone() is not None and time.monotonic() < deadline:
            time.sleep(0.002)
        assert gone() is None  # with nothing enqueued after it


def test_program_that_forgets_to_close_ends():
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "from dwdp.device.host import HostDevice\n"
        "device = HostDevice(num_aux=1); print('end')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, "end\n"), result.stderr


@pytest.mark.parametrize("settings", [{"copy_bytes_per_second": 0}, {"num_aux": -1}])
def test_settings_without_a_meaning_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        HostDevice(**settings)
    assert not [t for t in threading.enumerate() if t.name.startswith("dwdp-")]


# traces


def test_trace_is_in_the_neutral_form_in_the_hosts_order():
    with HostDevice(trace=True) as device:
        ready, read = device.event("ready E0"), device.event("read E0")
        device.mark("start")
        device.wait(device.copy, read, slot="E0", layer=0)
        device.enqueue(device.copy, lambda: time.sleep(0.02), slot="E0", layer=0, nbytes=5)
        device.record(ready, device.copy, slot="E0", layer=0)
        device.mark("bind", 0)
        device.wait(device.compute, ready, slot="E0", layer=0)
        device.enqueue(device.compute, None, kind="read", slot="E0", layer=0)
        device.record(read, device.compute, slot="E0", layer=0)
        device.synchronize()
        neutral = [
            {k: op[k] for k in ("stream", "kind", "slot", "layer", "event")} | {"name": op.get("name")}
            for op in device.trace
        ]
    assert [tuple(op.values()) for op in neutral] == [
        ("host", "mark", None, None, None, "start"),
        ("copy", "wait", "E0", 0, "read E0", None),
        ("copy", "copy", "E0", 0, None, None),
        ("copy", "record", "E0", 0, "ready E0", None),
        ("host", "mark", None, 0, None, "bind"),
        ("compute", "wait", "E0", 0, "ready E0", None),
        ("compute", "read", "E0", 0, None, None),
        ("compute", "record", "E0", 0, "read E0", None),
        ("host", "sync", None, None, None, None),
    ]
    copy, wait = device.trace[2], device.trace[5]
    assert copy["nbytes"] == 5 and copy["t1"] - copy["t0"] >= 0.02
    assert copy["t1"] <= device.trace[3]["t0"] <= wait["t1"]
    assert all(op["t0"] <= op["t1"] for op in device.trace)


def test_nothing_is_traced_unless_asked():
    with HostDevice() as device:
        device.mark("start")
        assert device.trace is None
