"""Streams and events of a GPU: every call of the hot path is one call of the driver, and the host never waits.

[Note: exposed waits] How long compute waited for a copy shows only on the device: two timing events lie around the
wait on the compute stream, and what passed between them is read much later, when somebody asks or, where nobody does,
a few at each wait: all at once would hold a forward up for milliseconds. It holds a few microseconds of the events
themselves.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from threading import get_ident
from typing import Any

from dwdp.device.host import check_kind, unique_name
from dwdp.errors import DwdpError
from dwdp.memory.driver import Driver

logger = logging.getLogger(__name__)

PENDING_WAITS = 256  # measured waits whose time nobody has asked for; from then on each wait reads the oldest
READ_AT_A_WAIT = 2  # more than one, so that those of a host that was far ahead become fewer again
DISABLE_TIMING = "CU_EVENT_DISABLE_TIMING"


class CudaStream:
    """raw: the driver's stream."""

    def __init__(self, device: CudaDevice, name: str, raw: Any) -> None:
        self.device, self.name, self.raw = device, name, raw


class CudaEvent:
    """See [Note: events] in device.py, which is what the driver does."""

    __slots__ = ("name", "raw")

    def __init__(self, name: str, raw: Any) -> None:
        self.name, self.raw = name, raw


class CudaDevice:
    """Streams of one rank on the GPU `index`. A context manager; `close()` finishes the work and gives all back.

    compute is torch's current stream of the thread that makes this, and must be current in every hook; copy and the
    `num_aux` auxiliary streams are its own, copy with the highest priority.
    trace: keep ops in the neutral form with `nbytes`, and `t0` and `t1` (seconds of time.perf_counter) once
        `stamp_trace` has read them; every op then has timing events of its own, for short runs
    measure_waits: keep `exposed_wait_seconds`, see [Note: exposed waits]; a trace measures it too
    driver, current_stream: what has the names of cuda.bindings.driver, and what gives torch's current raw stream;
        for tests

    Work that fails on the device shows itself in a later call of the driver, and the process must end then.
    """

    def __init__(
        self,
        index: int,
        *,
        trace: bool = False,
        measure_waits: bool = False,
        num_aux: int = 0,
        driver: Any = None,
        current_stream: Callable[[], int] | None = None,
    ) -> None:
        if num_aux < 0:
            raise ValueError(f"num_aux is {num_aux}, it must not be negative")
        self.index = index
        self.driver = Driver(driver, index)
        self.synchronisations = 0
        self.error: BaseException | None = None
        self.trace: list[dict] | None = [] if trace else None
        self._measure = measure_waits or trace
        self._exposed = 0.0
        self._by_layer: dict[int, float] = {}
        self._closed = False
        self._thread: int | None = None  # the last one that copies were submitted in
        self._event_names: dict[str, int] = {}
        self._events: list[Any] = []
        self._own_streams: list[Any] = []
        self._timers: list[Any] = []  # all timing events; those of a trace are kept until the end
        self._free_timers: list[Any] = []
        self._waits: deque = deque()  # (layer, timing event before, timing event behind)
        self._stamps: list[tuple[dict, Any, Any]] = []  # ops and their timing events
        api = self.driver.api
        self._ok, self._not_ready = api.CUresult.CUDA_SUCCESS, api.CUresult.CUDA_ERROR_NOT_READY
        self._record, self._wait, self._elapsed = api.cuEventRecord, api.cuStreamWaitEvent, api.cuEventElapsedTime
        self._current = current_stream or _torch_current_stream(index)
        self._is_capturing = self._compute_is_capturing if current_stream else _torch_is_capturing()
        try:
            _, highest = self.driver("cuCtxGetStreamPriorityRange")
            self.compute = CudaStream(self, "compute", self._wrap(self._current()))
            self.copy = CudaStream(self, "copy", self._new_stream(highest))
            self.auxiliary = tuple(CudaStream(self, f"aux{i}", self._new_stream(0)) for i in range(num_aux))
            self._start = self._timer()
            self._put(self._start, self.compute)
            self.driver("cuEventSynchronize", self._start)
            self._started_at = time.perf_counter()
        except BaseException:
            self.close()
            raise

    # ---- the hot path ----

    def event(self, name: str) -> CudaEvent:
        flags = int(getattr(self.driver.api.CUevent_flags, DISABLE_TIMING))
        raw = self.driver("cuEventCreate", flags, what=f"event {name}")
        self._events.append(raw)
        return CudaEvent(unique_name(name, self._event_names), raw)

    def record(
        self, event: CudaEvent, stream: CudaStream, *, slot: str | None = None, layer: int | None = None
    ) -> None:
        self._check(stream)
        (result,) = self._record(event.raw, stream.raw)
        if result != self._ok:
            raise self._failed("cuEventRecord", result, event, stream)
        if self.trace is not None:
            timer = self._put(self._timer(), stream)
            self._stamps.append((self._op(stream.name, "record", slot, layer, event.name), timer, timer))

    def wait(self, stream: CudaStream, event: CudaEvent, *, slot: str | None = None, layer: int | None = None) -> None:
        self._wait_for(stream, (event,), slot, layer)

    def wait_all(self, stream: CudaStream, events: Mapping[str, CudaEvent], layer: int) -> None:
        if self.trace is None:
            self._wait_for(stream, events.values(), None, layer)
        else:  # each wait has its own op and times
            for slot, event in events.items():
                self._wait_for(stream, (event,), slot, layer)

    def _wait_for(self, stream: CudaStream, events: Iterable[CudaEvent], slot: str | None, layer: int | None) -> None:
        """Measured as one wait."""
        self._check(stream)
        before = None
        if self._measure and (stream is self.compute or self.trace is not None):
            before = self._put(self._timer(), stream)
        for event in events:
            (result,) = self._wait(stream.raw, event.raw, 0)
            if result != self._ok:
                raise self._failed("cuStreamWaitEvent", result, event, stream)
        if before is not None:
            behind = self._put(self._timer(), stream)
            if self.trace is not None:
                self._stamps.append((self._op(stream.name, "wait", slot, layer, event.name), before, behind))
            if stream is self.compute:
                self._waits.append((layer, before, behind))
                if len(self._waits) > PENDING_WAITS:
                    self._read_waits(READ_AT_A_WAIT)

    def enqueue(
        self,
        stream: CudaStream,
        fn: Any,
        *,
        kind: str = "copy",
        slot: str | None = None,
        layer: int | None = None,
        nbytes: int = 0,
    ) -> None:
        """A prepared submission (`fn.submit(raw stream)`) or any callable, which runs with `stream` as torch's current
        one. Either only enqueues work; what it raises is raised here."""
        self._check(stream)
        check_kind(kind)
        before = None if self.trace is None else self._put(self._timer(), stream)
        if fn is not None:
            if self._thread != get_ident():  # a launch needs it, and torch may not know this thread yet
                self.driver.make_current()
                self._thread = get_ident()
            submit = getattr(fn, "submit", None)
            if submit is not None:
                submit(stream.raw)
            else:
                self._run_on(stream, fn)
        if before is not None:
            op = self._op(stream.name, kind, slot, layer, None)
            op["nbytes"] = nbytes
            self._stamps.append((op, before, self._put(self._timer(), stream)))

    def mark(self, name: str, layer: int | None = None) -> None:
        if self.trace is not None:
            op = self._op("host", "mark", None, layer, None)
            op["name"] = name
            op["t0"] = op["t1"] = time.perf_counter()

    def note_read(self, slot: str, layer: int) -> None:
        if self.trace is not None:
            self.enqueue(self.compute, None, kind="read", slot=slot, layer=layer)

    # ---- what waits ----

    def synchronize(self) -> None:
        self.synchronisations += 1
        self._synchronize()

    def drain(self) -> BaseException | None:
        try:
            if not self._closed:
                self._synchronize()
        except Exception as error:
            self.error = self.error or error
        return self.error

    def recover(self) -> BaseException | None:
        """As `drain`. An error that the device keeps will be there again."""
        error = self.drain()
        self.error = None
        return error

    @property
    def exposed_wait_seconds(self) -> float:
        """Time that compute waited, of the waits that are over; 0 unless it is measured."""
        self._read_waits()
        return self._exposed

    @property
    def exposed_wait_by_layer(self) -> dict[int, float]:
        self._read_waits()
        return self._by_layer

    def stamp_trace(self) -> list[dict]:
        """The trace, each op with `t0` and `t1`; waits for the device."""
        if self.trace is None:
            raise DwdpError("this device was made without a trace")
        stamps, self._stamps = self._stamps, []
        if stamps:
            self.driver("cuCtxSynchronize")
        for op, before, behind in stamps:
            op["t0"], op["t1"] = self._time(before), self._time(behind)
        return self.trace

    def close(self) -> None:
        """Finish all work and give events and streams back. Idempotent; errors are logged, not raised."""
        if self._closed:
            return
        self._closed = True
        try:
            self.driver("cuCtxSynchronize")
            self._read_waits()
        except Exception:
            logger.exception("work of a closed device had failed")
        for name, handles in (
            ("cuEventDestroy", [*self._events, *self._timers]),
            ("cuStreamDestroy", self._own_streams),
        ):
            for handle in handles:
                try:
                    self.driver(name, handle)
                except Exception:
                    logger.exception("%s of device %d failed", name, self.index)
        self._events, self._own_streams, self._timers = [], [], []
        self._waits.clear()
        self._stamps.clear()

    def __enter__(self) -> CudaDevice:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    # ---- helpers ----

    def _check(self, stream: CudaStream) -> None:
        if stream.device is not self:
            raise ValueError(f"stream {stream.name} belongs to another device")
        if self._closed:
            raise DwdpError(f"the device of stream {stream.name} is closed")
        if stream is not self.compute:
            return
        if self._current() != int(stream.raw):
            raise DwdpError(
                "the forward runs on another CUDA stream than the one that DWDP was set up on, so its reads would not "
                "wait for the copies: leave CUDA graphs and torch.cuda.stream out around the model"
            )
        if self._is_capturing():
            raise DwdpError("DWDP cannot run under CUDA graph capture: leave CUDA graphs out")

    def _compute_is_capturing(self) -> bool:
        result, status = self.driver.api.cuStreamIsCapturing(self.compute.raw)[:2]
        idle = self.driver.api.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
        return result != self._ok or status != idle

    def _synchronize(self) -> None:
        op = self._op("host", "sync", None, None, None)
        start = time.perf_counter()
        self.driver("cuCtxSynchronize")
        if op is not None:
            op["t0"], op["t1"] = start, time.perf_counter()

    def _run_on(self, stream: CudaStream, fn: Callable[[], None]) -> None:
        if stream is self.compute:
            fn()
            return
        import torch

        with torch.cuda.stream(torch.cuda.ExternalStream(int(stream.raw), device=self.index)):
            fn()

    def _new_stream(self, priority: int) -> Any:
        flag = int(self.driver.api.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self._own_streams.append(self.driver("cuStreamCreateWithPriority", flag, priority))
        return self._own_streams[-1]

    def _wrap(self, raw: int) -> Any:
        return self.driver.api.CUstream(raw)

    def _timer(self) -> Any:
        if self._free_timers:
            return self._free_timers.pop()
        timer = self.driver("cuEventCreate", int(self.driver.api.CUevent_flags.CU_EVENT_DEFAULT))
        self._timers.append(timer)
        return timer

    def _put(self, timer: Any, stream: CudaStream) -> Any:
        (result,) = self._record(timer, stream.raw)
        if result != self._ok:
            raise self.driver.error("cuEventRecord", result, f"a timing event on stream {stream.name}")
        return timer

    def _time(self, timer: Any) -> float:
        """Seconds of time.perf_counter at which the device reached a timing event."""
        return self._started_at + self.driver("cuEventElapsedTime", self._start, timer) / 1e3

    def _read_waits(self, most: int | None = None) -> None:
        """Counts the waits that are over, in order; at most so many."""
        while self._waits and most != 0:
            layer, before, behind = self._waits[0]
            result, milliseconds = self._elapsed(before, behind)
            if result == self._not_ready:
                return
            if result != self._ok:
                raise self.driver.error("cuEventElapsedTime", result, f"a measured wait of layer {layer}")
            self._waits.popleft()
            seconds = milliseconds / 1e3
            self._exposed += seconds
            if layer is not None:
                self._by_layer[layer] = self._by_layer.get(layer, 0.0) + seconds
            if self.trace is None:
                self._free_timers += (before, behind)
            if most is not None:
                most -= 1

    def _failed(self, call: str, result: Any, event: CudaEvent, stream: CudaStream) -> Exception:
        return self.driver.error(call, result, f"event {event.name} on stream {stream.name}")

    def _op(self, stream: str, kind: str, slot: str | None, layer: int | None, event: str | None) -> dict | None:
        if self.trace is None:
            return None
        op = {"stream": stream, "kind": kind, "slot": slot, "layer": layer, "event": event}
        self.trace.append(op)
        return op


def _torch_current_stream(index: int) -> Callable[[], int]:
    """Torch's current stream of the calling thread on a device, as a number, at the price of a C call."""
    import torch

    torch.cuda.init()
    return lambda: torch._C._cuda_getCurrentRawStream(index)


def _torch_is_capturing() -> Callable[[], bool]:
    """Whether torch's current stream is captured, at the price of a C call: the driver's through its bindings costs a
    hook as much as all else that it asks the driver."""
    from torch.cuda import is_current_stream_capturing

    return is_current_stream_capturing
