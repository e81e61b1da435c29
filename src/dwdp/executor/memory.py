"""The memory domain and the device of one rank: on a GPU where the rank computes on one, else the host's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dwdp.errors import ConfigError

if TYPE_CHECKING:
    import torch

DoneWith = Callable[[str, Callable[[], object]], None]


def rank_device(name: str, rank: int) -> torch.device:
    """The torch device of a rank: with `cuda` GPU rank mod count of those that its process sees, made current.

    A process that is shown one GPU of its own uses that one; what two GPUs are is told by their UUIDs.
    """
    import torch

    if name != "cuda":
        return torch.device(name)
    where = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(where)
    return where


def create_memory(
    config,
    where: torch.device,
    rank: int,
    done: DoneWith,
    *,
    copy_bytes_per_second: float | None = None,
    trace: bool = False,
) -> tuple[Any, Any]:
    """(domain, device). config: a DwdpConfig; done(name, undo): called for each that was made.

    copy_bytes_per_second: of the host's device, which throttles its copies; trace: the device records what it does.
    """
    if where.type == "cuda":
        if copy_bytes_per_second is not None:
            raise ConfigError("copies of a GPU cannot be throttled")
        return _on_cuda(config, where.index, rank, done, trace)
    from dwdp.device.host import HostDevice
    from dwdp.memory.host import HostDomain

    domain = HostDomain(
        rank,
        granule_bytes=config.host_granule_bytes,
        page_granules=config.page_granules,
        mapping_budget=config.mapping_budget,
    )
    done("memory domain", domain.close)
    device = HostDevice(copy_bytes_per_second=copy_bytes_per_second, trace=trace)
    done("device", device.close)
    return domain, device


def _on_cuda(config, index: int, rank: int, done: DoneWith, trace: bool) -> tuple[Any, Any]:
    from dwdp.device.cuda import CudaDevice
    from dwdp.memory.vmm import CudaDomain

    budget = {} if config.mapping_budget is None else {"mapping_budget": config.mapping_budget}
    domain = CudaDomain(rank, index, page_granules=config.page_granules, handle_type=config.handle_type, **budget)
    done("memory domain", domain.close)
    device = CudaDevice(index, trace=trace, measure_waits=True)
    done("device", device.close)
    return domain, device


def held_bytes(domain, where: torch.device, model_nbytes: int) -> dict[str, int]:
    """What a rank holds now: `domain_bytes` (rows, handles, ring, slots), `torch_bytes` (on a GPU all that torch's
    allocator has taken, cached blocks too, else the model's own `model_nbytes`) and `total_bytes`. domain: or None."""
    import torch

    own = 0 if domain is None else domain.allocated_bytes
    of_torch = torch.cuda.memory_reserved(where) if where.type == "cuda" else model_nbytes
    return {"domain_bytes": own, "torch_bytes": of_torch, "total_bytes": own + of_torch}


def where_joined(domain, where: torch.device) -> dict[str, Any]:
    """What a rank says about its memory and its device when it joins. domain: None without one."""
    from dwdp.memory.driver import Driver

    uuid = getattr(domain, "uuid", None)
    if uuid is None and where.type == "cuda":
        uuid = Driver().device_uuid(where.index)
    return {"memory": "none" if domain is None else domain.name, "device": where.type, "device_uuid": uuid}


def choose_handles(domain, group) -> None:
    """After the join and before any handle is exported: which type the ranks share memory by. Collective on CUDA."""
    if domain.name == "cuda":
        from dwdp.memory.capability import choose_handle_type

        choose_handle_type(domain, group)
