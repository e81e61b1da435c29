"""The CUDA driver through cuda-bindings: each failed call is a `DriverError` that says what to do.

Nothing is imported before a `Driver` is made, so that everything else works where there is no CUDA.
"""

from __future__ import annotations

from typing import Any

from dwdp.errors import MemoryDomainError

IMEX_CURE = (
    "FABRIC handles need an IMEX channel: a file below /dev/nvidia-caps-imex-channels that this process may open "
    "(in a container, pass that device in), the nvidia-imex service on every host of the NVLink domain, and a "
    "fabric that is up (nvidia-smi -q | grep -A2 Fabric)"
)
FABRIC_MANAGER_CURE = (
    "the fabric manager has not finished or does not run: see nvidia-smi -q | grep -A2 Fabric (State must be "
    "Completed) and systemctl status nvidia-fabricmanager, then start again"
)
CURES = {
    "CUDA_ERROR_OUT_OF_MEMORY": "free memory on the device, use more ranks or fewer slots",
    "CUDA_ERROR_SYSTEM_NOT_READY": FABRIC_MANAGER_CURE,
    "CUDA_ERROR_NOT_INITIALIZED": FABRIC_MANAGER_CURE,
    "CUDA_ERROR_NO_DEVICE": "no GPU is visible: see nvidia-smi and CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_INVALID_DEVICE": "the process sees fewer GPUs: see CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the kernel module and libcuda are of different versions: restart the driver",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "a copy or kernel left its mappings; the process must be started again",
}


class DriverError(MemoryDomainError):
    """A CUDA driver call that failed. call: its name; result: the CUresult's name."""

    def __init__(self, call: str, result: str, text: str) -> None:
        self.call, self.result = call, result
        super().__init__(text)

    def __reduce__(self):
        return (type(self), (self.call, self.result, self.args[0]))

    @property
    def out_of_memory(self) -> bool:
        return self.result == "CUDA_ERROR_OUT_OF_MEMORY"


class Driver:
    """`driver("cuMemCreate", ...)` calls it and returns what it returns behind its result, or raises.

    api: what has the names of `cuda.bindings.driver`; None imports it. device: of every call, see [Note: the current
    context]; None makes no context, and is for questions only. Raises MemoryDomainError where the package or the
    driver's library is missing.

    [Note: the current context] A thread that has no context current, or another device's, can neither make nor give
    back memory, events, streams and modules of a device. So every call made through here has the device's primary
    context, which torch uses too, made current in the calling thread first; what ends in another thread than the one
    that it began in is given back all the same.
    """

    def __init__(self, api: Any = None, device: int | None = None) -> None:
        self.api = _import_bindings() if api is None else api
        self.device, self._context = device, None
        self._call("cuInit", 0)

    def __call__(self, name: str, *args: Any, what: str = "") -> Any:
        """what: the names and sizes that an error tells."""
        if self.device is not None:
            self.make_current()
        return self._call(name, *args, what=what)

    def make_current(self) -> None:
        """See [Note: the current context]; for those who call `api` themselves."""
        where = f"device {self.device}"
        if self._context is None:
            device = self._call("cuDeviceGet", self.device, what=where)
            self._context = self._call("cuDevicePrimaryCtxRetain", device, what=where)
        self._call("cuCtxSetCurrent", self._context, what=where)

    def write(self, address: int, host: int, nbytes: int, *, what: str) -> None:
        """Copies `nbytes` bytes of plain host memory to the device's, where every stream sees them from here on.

        The driver's own call returns when it has read the host's memory; a stream that does not wait for the default
        one could still find what was there before.
        """
        self("cuMemcpyHtoD", address, host, nbytes, what=what)
        self("cuStreamSynchronize", self.api.CUstream(0), what=what)

    def reached(self, event: Any, what: str = "") -> bool:
        """Whether the work in front of an event's record is over; raises where that work, or the event, has failed."""
        (result,) = self.api.cuEventQuery(event)
        results = self.api.CUresult
        if result not in (results.CUDA_SUCCESS, results.CUDA_ERROR_NOT_READY):
            raise self.error("cuEventQuery", result, what)
        return result == results.CUDA_SUCCESS

    def _call(self, name: str, *args: Any, what: str = "") -> Any:
        try:
            result, *values = getattr(self.api, name)(*args)
        except (AttributeError, RuntimeError) as error:  # bindings raise RuntimeError for a missing symbol
            raise DriverError(
                name, "missing", f"{name} cannot be called: {error}; install cuda-bindings and a driver that have it"
            ) from error
        if int(result) != 0:
            raise self.error(name, result, what)
        return values[0] if len(values) == 1 else tuple(values) if values else None

    def error(self, call: str, result: Any, what: str = "") -> DriverError:
        """The error of a failed call, with the cure that is known for its result."""
        name = getattr(result, "name", str(result))
        cure = CURES.get(name, "see the CUDA driver API's page of the call for this result")
        if what.startswith("FABRIC") and not name.endswith(("OUT_OF_MEMORY", "SYSTEM_NOT_READY")):
            cure = IMEX_CURE
        return DriverError(call, name, f"{call} failed with {name} ({int(result)}) for {what or 'this call'}; {cure}")

    def device_uuid(self, index: int) -> str:
        """The device's identity on every host and under every CUDA_VISIBLE_DEVICES: GPU-xxxxxxxx-xxxx-..."""
        uuid = self("cuDeviceGetUuid", self("cuDeviceGet", index, what=f"device {index}"))
        text = bytes(uuid.bytes)[:16].hex()
        return "GPU-" + "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))

    def attribute(self, name: str, index: int) -> int:
        """A device attribute by its name behind CU_DEVICE_ATTRIBUTE_."""
        attribute = getattr(self.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self("cuDeviceGetAttribute", attribute, self("cuDeviceGet", index, what=f"device {index}")))

    def version(self) -> int:
        """CUDA version of the driver as it counts: 13000 for 13.0."""
        return int(self("cuDriverGetVersion"))


def _import_bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise MemoryDomainError(
            "the CUDA memory domain needs the package cuda-bindings, which is not installed: "
            f"pip install 'dwdp[gpu]' ({error})"
        ) from error
    return driver
