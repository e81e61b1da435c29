"""What every field of a config and every switch changes: a table of observables, and a check that it is complete.

`python -m tests.config.observables --check` lists the fields and switches that have no entry and exits with 1.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Iterator
from typing import Any

import torch
from pydantic import BaseModel

from dwdp import env
from dwdp.config.schema import ServeConfig
from tests.config.observed import ATTACHED, DIVIDED, EXPERTS, LOCAL, STANDALONE, UNSET, fp8_model, wide_model
from tests.config.observing import (
    Observable,
    alone_in_a_group_of_two,
    appears,
    becomes,
    beside_a_gather,
    failure,
    form_on_the_host,
    forwards_of_three_prompts,
    handles,
    kept,
    ledger,
    longest,
    of_a_foreign_decoder,
    on_one_gpu,
    place,
    ranges,
    refusal,
    refused_with,
    saying,
    sockets_lie_in,
    with_a_rank_whose_token_is_one,
)

REFUSED = "the refusal's text"

# ---- fields ----

DWDP = [
    Observable("dwdp.dwdp_size", REFUSED, 2, 3, refusal, refused_with("dwdp_size is 3 but there are 2 ranks")),
    Observable("dwdp.num_groups", REFUSED, 1, 2, refusal, refused_with("num_groups 2 x dwdp_size 2", "needs 4 ranks")),
    Observable(
        "dwdp.num_experts_per_worker", "ranges of the ranks, or the refusal with the nearest right pair", 4, 5,
        lambda asked: asked.refusal or ranges(asked),
        lambda base, changed: base == [[0, 4], [4, 7]] and "4/4" in changed and "E=7" in changed.replace(" ", ""),
        others={**EXPERTS, "dwdp": {**EXPERTS["dwdp"], "num_prefetch_experts": 4}},
    ),
    Observable(
        "dwdp.num_prefetch_experts", "expert bytes that all ranks store", 4, 3,
        lambda asked: (ranges(asked), sum(rank.ledger["stored_bytes"] for rank in asked.run.ranks)),
        lambda base, changed: (
            (base[0], changed[0]) == ([[0, 4], [4, 7]], [[0, 4], [3, 7]]) and changed[1] > base[1]
        ),
        others={**EXPERTS, "dwdp": {**EXPERTS["dwdp"], "num_experts_per_worker": 4}},
    ),
    Observable(
        "dwdp.num_prefetch_slots", "ring bytes and the slots that experts are copied into", 2, 3,
        lambda asked: (ledger("ring_bytes")(asked), kept("E")(asked)),
        lambda base, changed: (
            2 * changed[0] == 3 * base[0] > 0 and (base[1], changed[1]) == (["E0", "E1"], ["E0", "E1", "E2"])
        ),
    ),
    Observable(
        "dwdp.contention_opt", "copies, slices and rows that a layer submits", False, True,
        lambda asked: asked.first.submissions,
        lambda base, changed: base[0] > 0 == base[1] and changed[0] == 0 < changed[1],
    ),
    Observable(
        "dwdp.prefetch_gather", "copies, slices and rows that a layer submits", False, True,
        lambda asked: asked.first.submissions,
        lambda base, changed: base[0] > 0 == base[2] and changed == (0, 0, 1),
    ),
    Observable(
        "dwdp.gather_kernel", "kernel in the status of experts and dense weights", "tma", "ldst",
        lambda asked: [asked.first.report[part]["gather_kernel"] for part in ("experts", "dense")],
        becomes(["tma", "tma"], ["ldst", "ldst"]),
        others={**ATTACHED, "dwdp": {**ATTACHED["dwdp"], "prefetch_gather": True}},
    ),
    Observable("dwdp.sm_reserve", REFUSED, UNSET, 4, refusal, refused_with("dwdp.sm_reserve: 4", "needs a GPU")),
    Observable("dwdp.memory", REFUSED, "host", "cuda", refusal, refused_with("dwdp.memory: cuda")),
    Observable("dwdp.handle_type", REFUSED, "auto", "fabric", refusal, refused_with("dwdp.handle_type: fabric")),
    Observable(
        "dwdp.host_memory_bytes", "error of the ring", 1 << 30, 1 << 18, failure,
        lambda base, changed: base is None and "prefetch" in changed and "free" in changed,
        others=EXPERTS,
    ),
    Observable(
        "dwdp.host_granule_bytes", "size of every handle", 4096, 65536,
        lambda asked: [nbytes for _, nbytes in asked.first.handles],
        lambda base, changed: (
            any(nbytes % 65536 for nbytes in base) and not any(nbytes % 65536 for nbytes in changed)
        ),
    ),
    Observable(
        "dwdp.page_granules", "bytes of a ring page", 2, 4, lambda asked: asked.first.page_bytes,
        becomes(2 * 4096, 4 * 4096),
    ),
    Observable(
        "dwdp.mapping_budget", "bytes of a ring page", UNSET, 30, lambda asked: asked.first.page_bytes,
        becomes(2 * 4096, 4 * 4096),
        others=EXPERTS,
    ),
    Observable(
        "dwdp.allow_shared_device", "whether ranks on one GPU may join", False, True, on_one_gpu,
        lambda base, changed: "on one device, GPU-1" in base and changed is None,
    ),
    Observable(
        "dwdp.verify", "rows that set-up compares", "full", "sample", lambda asked: asked.run.checked["set-up"],
        lambda base, changed: base == 4 * 2 * 7 > changed > 0,
    ),
    Observable(
        "dwdp.verify", "rows that set-up compares", "full", "off", lambda asked: asked.run.checked["set-up"],
        becomes(4 * 2 * 7, 0),
    ),
    Observable(
        "dwdp.verify_every", "rows compared beside forwards", 0, 1,
        lambda asked: asked.run.checked["beside forwards"],
        lambda base, changed: base == 0 < changed,
    ),
]  # fmt: skip

DENSE = [
    Observable(
        "dense_dwdp.enabled", "mode, and dense bytes that move", False, True,
        lambda asked: (asked.launch.mode, asked.first.ledger["dense_moved_bytes"] > 0),
        becomes(("off", False), ("attached", True)),
    ),
    Observable(
        "dense_dwdp.copy", "transfer in the status, standalone", "batched", "per_slice",
        lambda asked: asked.first.dense["transfer"], becomes("batched", "per_slice"), others=STANDALONE,
    ),
    Observable(
        "dense_dwdp.copy", "a warning, attached", UNSET, "gather", saying("dense copy mode"),
        appears("'gather'", "ignored"),
    ),
    Observable(
        "dense_dwdp.required", "the error of a failed set-up, or replicated weights", True, False,
        lambda asked: asked.run.error or [rank.dense["status"] for rank in asked.run.ranks],
        lambda base, changed: "injected" in base and changed == ["abandoned", "abandoned"],
        fault="a gathered blob cannot be compared",
    ),
    Observable(
        "dense_dwdp.segments", "slots that are copied into, and dense bytes that move", "attn,moe", "attn",
        lambda asked: (kept("AD")(asked), asked.first.ledger["dense_moved_bytes"]),
        lambda base, changed: (
            base[0] == ["A0", "A1", "D0", "D1", "D2"] and changed[0] == ["A0", "A1"] and 0 < changed[1] < base[1]
        ),
    ),
    Observable(
        "dense_dwdp.min_bytes", "dense bytes that move", 1, 8192, ledger("dense_moved_bytes"),
        lambda base, changed: base > changed > 0,
    ),
    Observable(
        "dense_dwdp.store_chunk_mb", "handles of own rows", 0, 1, handles("dense-store"),
        lambda base, changed: (
            len(base) == 1 < len(changed) and all(nbytes <= 1 << 20 for _, nbytes in changed)
        ),
        others={**ATTACHED, "model": wide_model},
    ),
    Observable(
        "dense_dwdp.strict", "whether a set-up that moves nothing is an error", False, True, failure,
        lambda base, changed: base is None and "strict" in changed and "lower min_bytes" in changed,
        others={**ATTACHED, "dense_dwdp": {"enabled": True, "min_bytes": 1 << 40}},
    ),
    Observable(
        "dense_dwdp.debug", "NaN bytes in every slot at the commit", 0, 1, lambda asked: asked.first.nan,
        becomes(False, True),
    ),
    Observable(
        "dense_dwdp.debug", "waits of the watchdog", 1, 2, lambda asked: asked.first.counters["synchronisations"],
        lambda base, changed: base == 0 < changed,
    ),
    Observable(
        "dense_dwdp.load", "bytes of whole dense weights when set-up begins", "whole", "sharded",
        lambda asked: (
            asked.run.loaded_bytes - asked.first.ledger["replicated_bytes"], asked.first.ledger["dense_moved_bytes"]
        ),
        lambda base, changed: base[0] == base[1] == changed[1] > 0 == changed[0],
    ),
    Observable(
        "dense_dwdp.roots", "what moves of a decoder that declares nothing", "declared", "discover",
        of_a_foreign_decoder,
        lambda base, changed: isinstance(base, str) and "roots" in base and changed["moved_bytes"] > 0,
        asks=False,
    ),
    Observable(
        "dense_dwdp.own_rows", "handles of own rows, and bytes that forwards copy", "copy", "map",
        lambda asked: (len(handles("dense-store")(asked)), asked.first.counters["copied_bytes"]),
        lambda base, changed: base[0] == 1 and changed[0] == 4 * 2 and 0 < changed[1] < base[1],
    ),
]  # fmt: skip

SERVE = [
    Observable(
        "ranks", "ranges of the ranks", 1, 2, ranges, becomes(None, [[0, 4], [4, 7]]), others=LOCAL,
    ),
    Observable(
        "replicated", "bytes that move, and that a rank holds whole", False, True,
        lambda asked: [asked.first.ledger[key] for key in ("moved_bytes", "replicated_bytes")],
        lambda base, changed: base[0] > 0 == changed[0] and changed[1] > base[1],
    ),
    Observable(
        "role", REFUSED, "context", "generation", refusal,
        refused_with("attached dense DWDP needs role context", "'generation'"),
    ),
    Observable("role", "a warning, standalone", "context", "both", saying("role both"), appears("every step gathers"),
        others=STANDALONE,
    ),
    Observable(
        "tp_size", "ranges of the ranks", 2, 3, ranges, becomes([[0, 4], [4, 7]], [[0, 3], [3, 5], [5, 7]]),
        others={**LOCAL, "attention_dp": True},
    ),
    Observable(
        "attention_dp", REFUSED, True, False, refusal,
        lambda base, changed: base is None and "tp_size 2 needs attention_dp: true" in changed, others=DIVIDED,
    ),
    Observable(
        "overlap_scheduler", REFUSED, False, True, refusal,
        refused_with("attached dense DWDP needs the overlap scheduler off"),
    ),
    Observable(
        "overlap_scheduler", REFUSED, False, True, refusal,
        refused_with("overlap_scheduler: true is not supported yet"),
        others=LOCAL,
    ),
    Observable(
        "dtype", "bytes that move, and logits", "float32", "bfloat16",
        lambda asked: (asked.first.ledger["dense_moved_bytes"], asked.first.logits),
        lambda base, changed: base[0] > 1.5 * changed[0] and not torch.equal(base[1], changed[1]),
    ),
    Observable(
        "keep_fp8", "bytes that move of a checkpoint with FP8 projections", False, True,
        lambda asked: asked.first.ledger["dense_moved_bytes"],
        lambda base, changed: changed < 0.8 * base,
        others={**ATTACHED, "model": fp8_model},
    ),
    Observable("device", REFUSED, "cpu", "cuda", refusal, refused_with("device cuda: a GPU was asked for")),
    Observable(
        "max_seq_len", "refusal of a prompt of 30 tokens", UNSET, 30, longest,
        refused_with("30 tokens + max_tokens 1", "max_seq_len 30"),
    ),
    Observable(
        "max_batch_size", "forwards for three prompts and two tokens each", UNSET, 2, forwards_of_three_prompts,
        becomes(3 + 1, 3 + 2), others=LOCAL,
    ),
    Observable(
        "dwdp", "ranges of one rank", UNSET, {}, ranges, becomes(None, [[0, 7]]), others=LOCAL,
    ),
    Observable(
        "dense_dwdp", "mode", UNSET, {"enabled": True}, lambda asked: asked.launch.mode, becomes("off", "attached"),
        others=EXPERTS,
    ),
]  # fmt: skip


# ---- switches ----


def text_of(value: Any) -> Any:
    """A field's value as a switch spells it."""
    if value is UNSET:
        return UNSET
    return str(int(value)) if isinstance(value, bool | int) else str(value)


def _overriding(section: str, fields: dict[str, str], entries: list[Observable]) -> Iterator[Observable]:
    """A switch that overrides a field shows in what the field shows in."""
    for name, switch in fields.items():
        for one in entries:
            if one.name == f"{section}.{name}" and one.asks:
                values = {"base": text_of(one.base), "changed": text_of(one.changed)}
                yield Observable(switch, one.what, **values, see=one.see, expect=one.expect, others=one.others,
                                 fault=one.fault)  # fmt: skip


def _without_effect(name: str, text: str) -> Observable:
    return Observable(
        name, "a warning", UNSET, text, saying("has no effect"), appears("not supported yet"), others=LOCAL
    )


SWITCHES = [
    *_overriding("dwdp", env.EXPERT_FIELDS, DWDP),
    *_overriding("dense_dwdp", env.DENSE_FIELDS, DENSE),
    Observable(
        "DWDP_GATHER_KERNEL", "kernel in the status, standalone", "tma", "ldst",
        lambda asked: asked.first.dense["gather_kernel"], becomes("tma", "ldst"),
        others={**STANDALONE, "dense_dwdp": {**STANDALONE["dense_dwdp"], "copy": "gather"}},
    ),
    Observable(
        "DWDP_SM_RESERVE", "the refusal's text, standalone", UNSET, "4", refusal,
        refused_with("SM_RESERVE=4", "needs a GPU"), others=STANDALONE,
    ),
    Observable(
        "DWDP_DISABLE_COOP_ROUTING", "what launchers of cooperative kernels find beside a gather", "0", "1",
        beside_a_gather, becomes(("0", True), ("1", False)), asks=False,
    ),
    Observable(
        "DWDP_KERNELS", "form of a model on the host, or why there is none", "auto", "triton", form_on_the_host,
        lambda base, changed: base == "torch" and "needs a GPU" in changed, asks=False,
    ),
    *(_without_effect(name, "30" if name.endswith("_S") else "1") for name in env.WITHOUT_EFFECT),
    Observable(
        "DWDP_RANK", "rank of this process", "0", "1", place, becomes((0, "a", 1234), (1, "a", 1234)), asks=False
    ),
    Observable(
        "DWDP_MASTER_ADDR", "address of the store", "a", "b", place, becomes((1, "a", 1234), (1, "b", 1234)), asks=False
    ),
    Observable(
        "DWDP_MASTER_PORT", "port of the store", "1", "2", place, becomes((1, "a", 1), (1, "a", 2)), asks=False
    ),
    Observable(
        "DWDP_SOCKET_DIR", "whether sockets lie in folder a", "a", "b", sockets_lie_in, becomes(True, False), asks=False
    ),
    Observable(
        "DWDP_GROUP_TOKEN", "error of the join", "one", "two", with_a_rank_whose_token_is_one,
        lambda base, changed: base is None and "different group tokens" in changed, asks=False,
    ),
    Observable(
        "DWDP_RENDEZVOUS_TIMEOUT_S", "deadline in the error of the join", "0.2", "0.3", alone_in_a_group_of_two,
        lambda base, changed: "0.2 s" in base and "0.3 s" in changed, asks=False,
    ),
]  # fmt: skip

TABLE = [*SERVE, *DWDP, *DENSE, *SWITCHES]


# ---- the check ----


def field_paths(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every field of a config and of its sections, `section.field`."""
    paths = []
    for name, one in model.model_fields.items():
        paths.append(prefix + name)
        for part in (one.annotation, *typing.get_args(one.annotation)):
            if isinstance(part, type) and issubclass(part, BaseModel):
                paths += field_paths(part, f"{prefix}{name}.")
    return paths


def problems(model: type[BaseModel] = ServeConfig) -> list[str]:
    """One line for each field and switch without an entry, and for each entry of none."""
    known = [*field_paths(model), *env.SWITCHES]
    named = {one.name for one in TABLE}
    return [
        *(
            f"{name}: no observable in tests/config/observables.py; add what it changes when it alone is changed"
            for name in known
            if name not in named
        ),
        *(f"{name}: has an observable and is neither a field nor a switch" for name in sorted(named - set(known))),
    ]


def main(arguments: list[str], model: type[BaseModel] = ServeConfig) -> int:
    if arguments != ["--check"]:
        print("usage: python -m tests.config.observables --check", file=sys.stderr)
        return 2
    found = problems(model)
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
