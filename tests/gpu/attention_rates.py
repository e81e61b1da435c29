"""What attention's kernels reach: FLOP/s beside a plain product of the same run, bytes/s, workspace."""

from __future__ import annotations

import torch

from dwdp.kernels import attention, flash_mla
from dwdp.kernels.attention import SPAN, attend
from dwdp.kernels.decode import Blocks, rows_of_heads
from tests.gpu.attention_site import Site, flash_mla_missing

TARGET_SHARE = 0.6  # of the bytes that a copy reads and writes in the same time


def plain_product(site: Site) -> None:
    """The rate that the others are put beside; random operands."""
    size = 32 if site.cpu else 8192
    a, b = site.noise(size, size), site.noise(size, size)
    seconds = site.seconds_of(lambda: a @ b, repeats=10)
    site.raw_rate = 2 * size**3 / seconds
    site.row("plain product", f"{site.raw_rate / 1e12:.0f} TFLOP/s", flops_per_second=site.raw_rate)


def kda_blocks(site: Site) -> None:
    """Whole KDA blocks and their projections alone, of one sequence and of 64."""
    block = site.kda()
    linear, hidden = site.config.linear_attn_config, site.config.hidden_size
    weights = [p for name, p in block.named_parameters() if "proj" in name]
    # Per token and head, in chunks of 64: four products with the chunk, three with the state.
    core = 2 * linear.num_heads * (4 * 64 * linear.head_dim + 3 * linear.head_dim**2)
    dense = 2 * sum(p.numel() for p in weights)
    for tokens in [6] if site.cpu else [1024, 4096, 16384]:
        for count in (1, 2 if site.cpu else 64):
            batch = site.batch([tokens // count] * count)
            x, state = site.noise(1, tokens, hidden), site.kda_state(count)
            whole = site.seconds_of(lambda: block(x, state, batch))  # noqa: B023
            pairs = _operands(weights, x[0])
            alone = site.seconds_of(lambda: [torch.nn.functional.linear(*pair) for pair in pairs])  # noqa: B023
            _rate(site, f"KDA block, {tokens} tokens, {count} sequences", tokens * (core + dense), whole, alone,
                  tokens * dense)  # fmt: skip
            if site.left() < 30 and not site.cpu:
                return


def _operands(weights: list, x: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each weight with x's tokens, whose columns are repeated or cut to its inputs."""
    wides = {
        n: x if n == x.shape[1] else x.repeat(1, -(-n // x.shape[1]))[:, :n] for n in {w.shape[1] for w in weights}
    }
    return [(wides[weight.shape[1]], weight) for weight in weights]


def _rate(site: Site, name: str, flops: float, seconds: float, alone: float, dense: float) -> None:
    rate, dense_rate = flops / seconds, dense / alone
    site.row(
        name,
        f"{seconds * 1e3:.2f} ms, {rate / 1e12:.0f} TFLOP/s = {rate / site.raw_rate:.0%} of plain; projections alone "
        f"{alone * 1e3:.2f} ms, {dense_rate / site.raw_rate:.0%}; the rest {(seconds - alone) * 1e3:.2f} ms",
        seconds=seconds, flops_per_second=rate, projections_seconds=alone,
    )  # fmt: skip


def mla_blocks(site: Site) -> None:
    """Whole MLA blocks of new sequences, and what their attention takes beside the projections."""
    block = site.mla()
    config = site.config
    weights = [p for name, p in block.named_parameters() if "proj" in name]
    dense = 2 * sum(p.numel() for p in weights)
    pair = 2 * block.num_heads * (block.nope + block.rope + block.value)
    for tokens in [6] if site.cpu else [1024, 4096, 16384]:
        for count in (1, 2 if site.cpu else 64):
            length = tokens // count
            batch, x = site.batch([length] * count), site.noise(1, tokens, config.hidden_size)
            state = site.mla_state(count, length, 0)
            whole = site.seconds_of(lambda: block(x, state, batch))  # noqa: B023
            pairs = _operands(weights, x[0])
            alone = site.seconds_of(lambda: [torch.nn.functional.linear(*pair) for pair in pairs])  # noqa: B023
            flops = tokens * dense + count * length * (length + 1) // 2 * pair
            _rate(site, f"MLA block, {tokens} tokens, {count} sequences", flops, whole, alone, tokens * dense)
            if site.left() < 20 and not site.cpu:
                return


def _chunk(site: Site, before: int, new: int, span: int):
    """A call of attention for one chunk of `new` tokens behind `before`, and its FLOPs."""
    config = site.config
    heads, latent, width = config.num_attention_heads, config.kv_lora_rank, config.mla_cache_width
    nope, value = config.qk_nope_head_dim, config.v_head_dim
    rope = width - latent
    batch = site.batch([new], [before])
    query, cache = site.noise(new, heads, nope + rope), site.noise(1, before + new, width)
    weight = site.noise(heads * (nope + value), latent, scale=latent**-0.5)
    rows = cache[0, before:]
    pairs = new * before + new * (new + 1) // 2
    flops = 2 * heads * (pairs * (nope + rope + value) + (before + new) * latent * (nope + value))
    scale = (nope + rope) ** -0.5

    def run():
        return attend(query, rows, batch, cache, weight, nope=nope, value=value, scale=scale, span=span)

    return run, flops


def workspace(site: Site) -> None:
    """A chunk of 8,192 behind 128k cached tokens takes no more memory than behind 16k."""
    new, span = (4, 16) if site.cpu else (8192, SPAN)
    peaks = {}
    for before in (16, 48) if site.cpu else (16384, 131072):
        run, flops = _chunk(site, before, new, span)
        run()
        peaks[before] = site.peak_bytes(run)
        seconds = site.seconds_of(run, repeats=3)
        rate = flops / seconds
        site.row(f"chunk of {new} behind {before}",
                 f"{seconds * 1e3:.1f} ms, {rate / 1e12:.0f} TFLOP/s = {rate / site.raw_rate:.0%} of plain, "
                 f"workspace {peaks[before] / 2**30:.2f} GiB",
                 seconds=seconds, workspace_bytes=peaks[before])  # fmt: skip
        del run
    small, large = peaks.values()
    site.check("workspace that grows with the context, MiB", (large - small) / 2**20, 1.0)


def plain_copy(site: Site) -> None:
    """The bandwidth that decode is put beside: of the device's own copy, bytes read and bytes written."""
    source = torch.zeros(1 << 10 if site.cpu else 1 << 31, dtype=torch.uint8, device=site.device)
    copied = torch.empty_like(source)
    seconds = site.seconds_of(lambda: copied.copy_(source), repeats=10)
    site.copy_rate = 2 * source.nbytes / seconds
    site.row("plain copy", f"{site.copy_rate / 1e12:.2f} TB/s, read and written", bytes_per_second=site.copy_rate)


def _decode_case(site: Site, count: int, context: int):
    """One layer's decode but for its two products, by FlashMLA with `plans` and by our kernel without; bytes; FLOPs."""
    config = site.config
    heads, latent, width = config.num_attention_heads, config.kv_lora_rank, config.mla_cache_width
    cache = site.noise(count, -(-context // flash_mla.PAGE) * flash_mla.PAGE, width)
    joined, rope = site.noise(count, heads, width), site.noise(count, heads, width - latent)
    slots = torch.arange(count, device=site.device)
    contexts = torch.full_like(slots, context)
    scale = (config.qk_nope_head_dim + width - latent) ** -0.5

    def run(plans: dict | None = None, blocks: Blocks | None = None, splits: int | None = None):
        joined[..., latent:].copy_(rope)
        pages = None
        if plans is not None:
            pages = flash_mla.pages(plans, slots, contexts, context, joined, cache, latent)
            assert pages is not None
        return rows_of_heads(
            joined, cache, slots, contexts, context, latent, scale=scale, pages=pages, blocks=blocks, splits=splits
        )

    pairs = 2 * heads * (latent + width)
    return run, cache[:, :context].numel() * cache.element_size(), count * context * pairs


def decode(site: Site) -> None:
    """Latent rows per second of both forms of decode, read once, beside the bandwidth of a copy; layers follow each
    other as in a forward, FlashMLA's with the plan of the first."""
    missing = flash_mla_missing(site)
    layers = 1 if site.cpu else 8
    for count, context in [(2, 20)] if site.cpu else [(32, 32768), (1, 131072), (64, 2048)]:
        run, nbytes, flops = _decode_case(site, count, context)
        for form in ("FlashMLA", "Triton"):
            name = f"decode, {count} sequences of {context}, {form}"
            if form == "FlashMLA" and missing is not None:
                site.row(name, f"MISSING: {missing}")
                continue
            plans = {} if form == "FlashMLA" else None
            run(plans)
            seconds = site.seconds_of(lambda: [run(plans) for _ in range(layers)]) / layers  # noqa: B023
            planned = ""
            if form == "FlashMLA":
                first = site.seconds_of(lambda: run({}))  # noqa: B023
                alone = site.seconds_of(lambda: run(plans))  # noqa: B023
                planned = f", a forward's plan {max(0.0, first - alone) * 1e6:.0f} us"
            share = nbytes / seconds / site.copy_rate
            wanted = form == "FlashMLA" or missing is not None
            missed = wanted and not share >= TARGET_SHARE and (count, context) == (32, 32768)
            site.row(name,
                     f"{seconds * 1e6:.0f} us, {nbytes / seconds / 1e12:.2f} TB/s = {share:.0%} of a copy "
                     f"(target {TARGET_SHARE:.0%}){' MISSED' if missed else ''}, {flops / seconds / 1e12:.0f} TFLOP/s"
                     f"{planned}", seconds=seconds, share=share)  # fmt: skip


SWEPT_DECODE = (
    Blocks(64, 64, 8, 2),
    Blocks(64, 32, 8, 3),
    Blocks(64, 16, 8, 4),
    Blocks(32, 64, 8, 2),
    Blocks(32, 64, 4, 2),
)
SWEPT_PREFILL = (Blocks(128, 64, 8, 3), Blocks(128, 64, 8, 2), Blocks(128, 128, 8, 2), Blocks(64, 64, 4, 3))


def sweep(site: Site) -> None:
    """Other block sizes, for whoever sets the defaults; none is needed for the result."""
    run, nbytes, _ = _decode_case(site, *((2, 20) if site.cpu else (32, 32768)))
    for blocks in [Blocks(16, 16, 4, 1)] if site.cpu else SWEPT_DECODE:
        for splits in (2,) if site.cpu else (2, 4, 8):
            if site.left() < 6 and not site.cpu:
                return
            seconds = _tried(site, lambda: run(None, blocks, splits))  # noqa: B023
            text = "does not run" if seconds is None else f"{seconds * 1e6:.0f} us, {nbytes / seconds / 1e12:.2f} TB/s"
            site.row(f"sweep, decode, {_named(blocks)}, {splits} splits", text, seconds=seconds)
    original = attention.prefill_blocks
    try:
        for blocks in [Blocks(16, 16, 4, 1)] if site.cpu else SWEPT_PREFILL:
            if site.left() < 8 and not site.cpu:
                return
            attention.prefill_blocks = lambda dtype: blocks  # noqa: B023
            run, flops = _chunk(site, 0, 6 if site.cpu else 8192, SPAN)
            seconds = _tried(site, run)
            text = (
                "does not run" if seconds is None else f"{seconds * 1e3:.2f} ms, {flops / seconds / 1e12:.0f} TFLOP/s"
            )
            site.row(f"sweep, prefill, {_named(blocks)}", text, seconds=seconds)
    finally:
        attention.prefill_blocks = original


def _tried(site: Site, body) -> float | None:
    """None for blocks that this compiler gives more than the GPU has."""
    try:
        return site.seconds_of(body, repeats=3)
    except Exception as error:
        print(f"  {type(error).__name__}: {str(error)[:120]}")
        return None


def _named(blocks: Blocks) -> str:
    return f"{blocks.rows} x {blocks.keys}, {blocks.warps} warps, {blocks.stages} stages"


CASES = (
    ("plain product", 2, plain_product),
    ("plain copy", 2, plain_copy),
    ("decode", 6, decode),
    ("workspace", 8, workspace),
    ("KDA blocks", 10, kda_blocks),
    ("MLA blocks", 8, mla_blocks),
    ("sweep", 10, sweep),
)
