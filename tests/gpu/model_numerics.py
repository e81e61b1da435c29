"""The whole model with kernels on beside the fp32 oracle, in every format, and packed batches beside single ones.

The oracle is the torch form in fp32 on the host with the bf16 model's values (`precision.fp32_oracle`), which the tests
of `tests/model` show to be equal to another implementation within 2e-4. Bounds and counting are theirs as well. On the
host the kernels of norms, experts, router and FP8 projections run in the interpreter and attention in the torch form,
since the interpreter's products know no bf16.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor

from dwdp.kernels import activation, attention, gated, kda, moe, product, rows, short_conv
from dwdp.model.decoder import KimiK3Model
from dwdp.model.loader import load_model
from dwdp.model.quant_linear import FP8Linear
from tests.gpu.model_site import Site
from tests.support import precision
from tests.support.precision import NANO, NANO_FOLDER, TINY, Picks, Precision, fp32_oracle
from tests.support.system import write_random
from tests.support.tiny import TWO_LAYERS, WIDER, token_ids

# name -> (expert format, FP8 attention)
FORMATS = {
    "plain": ("plain", False),
    "plain, FP8 kept": ("plain", True),
    "mxfp4": ("mxfp4", False),
    "nvfp4": ("nvfp4", False),
    "nvfp4, FP8 kept": ("nvfp4", True),
}
# The seams behind which kernels are; what returns None was not one.
SEAMS = (
    (attention, "attend"), (short_conv, "short_conv"), (kda, "delta_rule"), (gated, "gated"), (moe, "routed"),
    (product, "linear"), (rows, "rms_norm"), (rows, "residual_mix"), (activation, "gated_activation"),
)  # fmt: skip


@contextlib.contextmanager
def kernels(site: Site) -> Iterator[Counter]:
    """-> calls of each seam so far. On the host attention stays in the torch form."""
    calls: Counter = Counter()

    def counting(name, original):
        def call(*args, **options):
            out = original(*args, **options)
            calls[name] += out is not None
            return out

        return call

    with contextlib.ExitStack() as stack:
        for module, name in SEAMS:
            stack.enter_context(mock.patch.object(module, name, counting(name, getattr(module, name))))
        if site.cpu:
            for where in ("kda", "mla"):
                stack.enter_context(mock.patch(f"dwdp.model.{where}.use_triton", lambda x: False))
        yield calls


def expected(model: KimiK3Model, forwards: int, *, cpu: bool) -> dict[str, int]:
    """Calls that so many forwards make when nothing falls back."""
    config = model.config
    kinds = Counter(config.layer_kind(i) for i in range(config.num_hidden_layers))
    fp8 = sum(isinstance(module, FP8Linear) for module in model.modules())
    # attend reads kv_b_proj itself; every other FP8 projection is one product
    per_forward = {"routed": len(model.moe_layers()), "linear": len(model.moe_layers()) + fp8}
    if not cpu:
        per_forward |= {"attend": kinds["mla"], "short_conv": kinds["kda"], "delta_rule": kinds["kda"]}
        per_forward["gated"] = config.num_hidden_layers
    return {name: forwards * count for name, count in per_forward.items()}


def check_ran(site: Site, name: str, calls: Counter, model: KimiK3Model, forwards: int) -> None:
    wanted = expected(model, forwards, cpu=site.cpu)
    wrong = {what: (calls[what], count) for what, count in wanted.items() if calls[what] != count}
    wrong |= {what: (0, "some") for what in ("rms_norm", "residual_mix", "gated_activation") if not calls[what]}
    site.check(
        f"{name}: kernels ran", not wrong, f"calls of the kernels' seams {dict(calls)}; (found, wanted): {wrong}"
    )


def judge(site: Site, name: str, found: Precision) -> None:
    wrong, text = found.result()
    site.check(name, not wrong, f"{text}{f'; not {wrong}' if wrong else ''}")


def bounds(site: Site, full: precision.Bounds) -> precision.Bounds:
    return replace(full, clear=0) if site.cpu else full


def tiny(site: Site, name: str) -> None:
    """Random weights; the oracle's experts, so that one flip does not count as many wrong logits."""
    expert_format, fp8 = FORMATS[name]
    tokens, seeds, changes = (6, 1, TWO_LAYERS) if site.cpu else (500, 3, WIDER)
    found, torch_form = Precision(bounds(site, TINY)), Precision(bounds(site, TINY))
    with kernels(site) as calls:
        for seed in range(seeds):
            folder = site.folder(f"tiny {name} {seed}")
            write_random(folder, seed=seed, expert_format=expert_format, fp8_attention=fp8, **changes)
            oracle, picks, ids = fp32_oracle(folder), Picks(), token_ids(tokens, seed=seed)
            with picks.recorded(oracle), site.form("torch"):
                want = oracle(ids)
            model = load_model(folder, dtype=torch.bfloat16, device=site.device, keep_fp8=fp8)
            with picks.taken(model, found.flipped):
                found.add(model(ids), want)
            with picks.taken(model, torch_form.flipped), site.form("torch"):
                torch_form.add(model(ids), want)
    judge(site, f"tiny, {name}, against the fp32 oracle", found)
    site.note(f"tiny, {name}, the torch form for comparison", torch_form.result()[1])
    check_ran(site, f"tiny, {name}", calls, model, seeds)
    packed_batches(site, f"tiny, {name}", model, [token_ids(n, seed=n) for n in site.lengths()], TINY, forced=True)


def nano(site: Site) -> None:
    """The shipped model, which picks its own experts."""
    prompts = [ids[:, :4] for ids in precision.nano_prompts()[:1]] if site.cpu else precision.nano_prompts()
    with site.form("torch"):
        oracle = load_model(NANO_FOLDER, dtype=torch.float32)
        wanted = [oracle(ids) for ids in prompts]
    model = load_model(NANO_FOLDER, dtype=torch.bfloat16, device=site.device)
    found = Precision(bounds(site, NANO))
    with kernels(site) as calls:
        for ids, want in zip(prompts, wanted):
            found.add(model(ids), want)
    judge(site, "nano-k3, plain, against the fp32 oracle", found)
    check_ran(site, "nano-k3", calls, model, len(prompts))
    if not site.cpu:
        packed_batches(site, "nano-k3", model, prompts, NANO, forced=False)


def packed_batches(
    site: Site, name: str, model: KimiK3Model, prompts: list[Tensor], full: precision.Bounds, *, forced: bool
) -> None:
    """Prefill of all prompts but for a token each, then that token of all, in two packed batches and one by one."""
    prompts = [ids[0] for ids in prompts]
    lengths = [len(ids) - 1 for ids in prompts]
    picks, found, alone = Picks(), Precision(bounds(site, full)), [[], []]
    with kernels(site):
        with contextlib.ExitStack() as stack:
            states = [model.new_state(1, len(ids)) for ids in prompts]
            if forced:
                stack.enter_context(picks.recorded(model))
            for step, parts in enumerate(([ids[:-1] for ids in prompts], [ids[-1:] for ids in prompts])):
                alone[step] = [model(ids[None], state)[0] for ids, state in zip(parts, states)]
        with picks.taken(model, found.flipped) if forced else contextlib.nullcontext():
            state = model.new_state(len(prompts), max(map(len, prompts)))
            together = model(torch.cat([ids[:-1] for ids in prompts]), state, lengths=lengths)
            found.add(together, torch.cat(alone[0]))
            together = model(torch.cat([ids[-1:] for ids in prompts]), state, lengths=[1] * len(prompts))
            found.add(together, torch.cat(alone[1]))
    judge(site, f"{name}, packed batches against one by one", found)


def cases(site: Site) -> list[tuple[str, float, object]]:
    """(name, seconds that it takes at most, body)."""
    found = [(f"tiny, {name}", 8.0, lambda site, name=name: tiny(site, name)) for name in FORMATS]
    return [*found, ("nano-k3", 20.0, nano)]
