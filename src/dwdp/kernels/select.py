"""Which form of a computation runs: the torch form, which is the reference, or Triton kernels.

`DWDP_KERNELS` says so: `torch` and `triton` are taken as they are, `auto` (the default) means kernels on GPUs on which
their checks have passed and the torch form elsewhere.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from dwdp import env
from dwdp.errors import ConfigError

# Major compute capabilities of GPUs on which tests/gpu's check_attention, check_moe and check_model have passed.
CHECKED_ON: frozenset[int] = frozenset({9})
KERNEL_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})


def kernels_for(device: torch.device | str, environ: env.Environ = None) -> str:
    """The form that runs on `device`, `torch` or `triton`.

    Raises ConfigError when kernels are asked for where they cannot run: without Triton, or on the host, where only
    Triton's interpreter (TRITON_INTERPRET=1, very slow) runs them.
    """
    device = torch.device(device)
    asked = env.kernels(environ)
    if asked == "torch" or (asked == "auto" and device.type != "cuda"):  # at once: every layer asks many times
        return "torch"
    index = device.index
    if device.type == "cuda" and index is None:
        index = torch.cuda.current_device()
    return _form(device.type, index, asked, env.triton_interpreted(environ))


@functools.cache
def _form(kind: str, index: int | None, asked: str, interpreted: bool) -> str:
    installed = importlib.util.find_spec("triton") is not None
    if asked == "triton":
        if kind != "cuda" and not interpreted:
            raise ConfigError(f"DWDP_KERNELS=triton needs a GPU, and this model is on {kind}: use auto or torch")
        if not installed:
            raise ConfigError("DWDP_KERNELS=triton, but triton is not installed: pip install 'dwdp[gpu]'")
        return "triton"
    checked = torch.cuda.get_device_capability(index)[0] in CHECKED_ON
    if not (checked and installed):
        return "torch"
    from dwdp.kernels.lang import MISSING

    return "torch" if MISSING else "triton"


@functools.cache
def hopper(device: torch.device) -> bool:
    """Whether `device` is a GPU of the kind that FlashMLA and the product of `packed.py` are for."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def use_triton(x: Tensor) -> bool:
    """Whether a computation on `x` runs as kernels. They have no backward and none is for fp64: there, whatever was
    asked for, the torch form runs. Raises as `kernels_for` does."""
    if kernels_for(x.device) != "triton" or x.dtype not in KERNEL_DTYPES:
        return False
    return not (x.requires_grad and torch.is_grad_enabled())
