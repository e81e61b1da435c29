"""Finding originals that something still holds after their bytes have moved, and what holds them."""

from __future__ import annotations

import gc
import logging
import threading

import torch
from torch.multiprocessing.reductions import StorageWeakRef

logger = logging.getLogger(__name__)

# A search holds every tensor of the process for a moment: ranks that are threads must not see each other's.
_search_lock = threading.Lock()


def find_leaks(originals: list[tuple[StorageWeakRef, str]], *, name_holders: bool) -> list[str]:
    """Originals that something still holds, as text; with `name_holders` what holds them is named."""
    leaks = []
    with _search_lock:
        if any(not ref.expired() for ref, _ in originals):
            gc.collect()  # a cycle is no holder
        for ref, name in originals:
            if not ref.expired():
                holders = _holders(ref.cdata) if name_holders else None
                named = "" if holders is None else f" (held by {'; '.join(holders) or 'no Python object'})"
                leaks.append(f"{name}{named}")
    for leak in leaks:
        logger.warning("dense DWDP: this original is still alive after the commit: %s", leak)
    return leaks


def _holders(cdata: int) -> list[str]:
    """What holds the tensors over a storage, each as text: "kept of Cache", "a list"."""
    # type(), not isinstance: some objects answer __class__ with code of their own.
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    tensors = [t for t in tensors if t.layout == torch.strided and t.untyped_storage()._cdata == cdata]
    found = []
    while tensors:
        tensor = tensors.pop()
        where = []
        for holder in gc.get_referrers(tensor):  # a loop: a comprehension would hold the tensor in a cell
            where.append(_holder(holder, id(tensor)))
        named = ", ".join(filter(None, where))
        found.append(f"tensor {tuple(tensor.shape)} in {named or 'a local variable'}")
    return found


def _holder(holder: object, held: int) -> str | None:
    if type(holder).__name__ == "frame":
        return None
    if not isinstance(holder, dict):
        return f"a {type(holder).__name__}"
    names = ", ".join(str(key) for key, value in holder.items() if id(value) == held)
    owners = [o for o in gc.get_referrers(holder) if type(o).__name__ != "frame" and _dict_of(o) is holder]
    return f"{names} of {type(owners[0]).__name__ if owners else 'a dict'}"


def _dict_of(thing: object) -> dict | None:
    try:
        return object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return None
