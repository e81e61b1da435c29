"""The recording device writes what the host device would do."""

import inspect

import pytest

from dwdp.device.device import Device
from dwdp.device.host import HostDevice
from dwdp.device.recording import RecordingDevice


def program(device):
    ready, read = device.event("ready"), device.event("read")
    device.mark("start")
    for layer in range(2):
        device.wait(device.copy, read, slot="E0", layer=layer)
        device.enqueue(device.copy, lambda: None, slot="E0", layer=layer, nbytes=10)
        device.record(ready, device.copy)
        device.wait(device.compute, ready, layer=layer)
        device.enqueue(device.compute, None, kind="read", slot="E0", layer=layer)
        device.record(read, device.auxiliary[0])
    device.synchronize()
    device.drain()
    return device.trace


def test_ops_are_those_of_the_host_device():
    with HostDevice(trace=True, num_aux=1) as host, RecordingDevice(num_aux=1) as recording:
        timed = [{k: v for k, v in op.items() if k not in ("t0", "t1", "nbytes")} for op in program(host)]
        assert program(recording) == timed == recording.ops
        assert recording.synchronisations == host.synchronisations == 1


def test_marks_have_a_name_and_the_rest_exactly_the_neutral_keys():
    ops = program(RecordingDevice(num_aux=1))
    assert ops[0] == {
        "stream": "host", "kind": "mark", "slot": None, "layer": None, "event": None, "name": "start"
    }  # fmt: skip
    assert all(list(op) == ["stream", "kind", "slot", "layer", "event"] for op in ops[1:])


def test_work_runs_only_with_execute_and_then_at_once():
    for execute, expected in ((False, []), (True, [1])):
        ran, device = [], RecordingDevice(execute=execute)
        device.enqueue(device.copy, lambda ran=ran: ran.append(1))
        assert ran == expected


def test_abort_before_an_op_leaves_it_unrecorded():
    def abort(op):
        if op["kind"] == "record":
            raise KeyboardInterrupt

    device = RecordingDevice(before_op=abort)
    device.enqueue(device.copy, None)
    with pytest.raises(KeyboardInterrupt):
        device.record(device.event("e"), device.copy)
    assert [op["kind"] for op in device.ops] == ["copy"]


def test_bad_kinds_and_foreign_streams_are_refused():
    device, other = RecordingDevice(), RecordingDevice()
    with pytest.raises(ValueError, match="copy or read"):
        device.enqueue(device.copy, None, kind="sync")
    with pytest.raises(ValueError, match="another device"):
        device.record(device.event("e"), other.copy)


@pytest.mark.parametrize("kind", [HostDevice, RecordingDevice])
def test_devices_have_the_surface_of_the_protocol(kind):
    for name, method in inspect.getmembers(Device, inspect.isfunction):
        if not name.startswith("_"):
            theirs = inspect.signature(getattr(kind, name))
            assert list(theirs.parameters) == list(inspect.signature(method).parameters), name
    with kind() as device:
        for name in Device.__annotations__:
            assert hasattr(device, name), name
        assert [s.name for s in (device.compute, device.copy)] == ["compute", "copy"]
