"""How near a bf16 model is to an fp32 oracle: one counting and one set of bounds, on a CPU and on a GPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dwdp.executor.settings import model_folder
from dwdp.model.decoder import KimiK3Model
from dwdp.model.loader import load_model
from dwdp.model.moe import Router
from dwdp.model.tokenizer import load_tokenizer
from dwdp.tools import nano_data


@dataclass(frozen=True)
class Bounds:
    """Of the differences between logits; near_tie: the margin of the oracle's two best logits below which rounding
    alone may turn them around. clear: fewest tokens above it, of which `agreement` must have the oracle's top-1.
    flips: of the tokens of a layer, those for which a router would pick other experts."""

    median: float
    p99: float
    near_tie: float
    flips: float = 1.0
    clear: int = 500
    agreement: float = 0.995


TINY = Bounds(0.03, 0.3, near_tie=0.2, flips=0.05)  # random weights, logits with a standard deviation of 1
NANO = Bounds(0.2, 2.0, near_tie=1.0)  # trained ones: about the 99th percentile of the bf16 error


class Precision:
    """Logits beside those of an oracle, added up over several prompts."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._errors: list[Tensor] = []
        self._margins: list[Tensor] = []
        self._agreed: list[Tensor] = []
        self.flipped: list[Tensor] = []

    def add(self, got: Tensor, want: Tensor) -> None:
        """[..., vocab] of both."""
        got, want = got.float().cpu(), want.float().cpu()
        self._errors.append((got - want).abs().flatten())
        best = want.topk(2, -1).values
        self._margins.append((best[..., 0] - best[..., 1]).flatten())
        self._agreed.append((got.argmax(-1) == want.argmax(-1)).flatten().float())

    def result(self) -> tuple[list[str], str]:
        """(what is not within the bounds, the figures)."""
        bounds, error = self.bounds, torch.cat(self._errors)
        clear = torch.cat(self._margins) > bounds.near_tie
        agreed = torch.cat(self._agreed)
        agreement = agreed[clear].mean().item()
        flips = torch.cat(self.flipped).mean().item() if self.flipped else 0.0
        median, p99 = error.median().item(), error.kthvalue(max(1, int(0.99 * error.numel()))).values.item()
        holds = {
            f"median below {bounds.median}": median < bounds.median,
            f"p99 below {bounds.p99}": p99 < bounds.p99,
            f"{bounds.clear} clear tokens": int(clear.sum()) > bounds.clear,
            f"agreement of {bounds.agreement}": agreement >= bounds.agreement,
            f"flips below {bounds.flips}": flips < bounds.flips,
        }
        text = (
            f"median {median:.3f}, p99 {p99:.3f}; top-1 agrees on {agreed.mean().item():.2%} of {agreed.numel()}, "
            f"on {agreement:.2%} of the {int(clear.sum())} tokens with a margin above {bounds.near_tie}; other experts "
            f"for {flips:.1%} of the tokens of a layer"
        )
        return [what for what, held in holds.items() if not held], text


class Picks:
    """The experts that one model's routers picked, for another's to take: another pick changes a token's logits."""

    def __init__(self) -> None:
        self._rows: list[list[Tensor]] = []

    @contextmanager
    def recorded(self, model: KimiK3Model) -> Iterator[None]:
        """Of forwards in here, behind those of before."""
        found: list[list[Tensor]] = self._rows or [[] for _ in _routers(model)]
        hooks = [
            router.register_forward_hook(lambda module, args, out, to=to: to.append(out[0].cpu()))
            for router, to in zip(_routers(model), found)
        ]
        try:
            yield
        finally:
            self._rows = found
            for hook in hooks:
                hook.remove()

    @contextmanager
    def taken(self, model: KimiK3Model, flipped: list[Tensor]) -> Iterator[None]:
        """Forwards in here pick what is recorded, token by token in that order; flipped: gets, for each call, which
        tokens would have got other experts."""
        left = [torch.cat(rows) for rows in self._rows]

        def take(router: Router, args, out, index: int):
            count = args[0].shape[0]
            chosen, left[index] = left[index][:count].to(out[0].device), left[index][count:]
            assert len(chosen) == count, "more tokens than were recorded"
            flipped.append((chosen != out[0]).any(-1).float().cpu())
            scores = torch.sigmoid(args[0].float() @ router.weight.float().T).gather(-1, chosen)
            return chosen, scores / scores.sum(-1, keepdim=True)

        hooks = [
            router.register_forward_hook(lambda module, args, out, index=index: take(module, args, out, index))
            for index, router in enumerate(_routers(model))
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _routers(model: KimiK3Model) -> list[Router]:
    return [module for module in model.modules() if isinstance(module, Router)]


@torch.no_grad()
def fp32_oracle(folder: Path) -> KimiK3Model:
    """The torch form in fp32 on the host, with the values that a bf16 model of this folder computes with: packed
    experts and FP8 projections are decoded to bf16, and plain ones take their place."""
    narrow = load_model(folder, dtype=torch.bfloat16)
    wide = KimiK3Model(narrow.config, dtype=torch.float32, device="cpu").requires_grad_(False)
    values = dict(narrow.named_parameters())
    for name, parameter in wide.named_parameters():
        if ".block_sparse_moe.experts." not in name:
            parameter.copy_(values[name])
    for ours, packed in zip(wide.moe_layers(), narrow.moe_layers()):
        for row in range(ours.num_rows):
            w13, w2 = packed._weights_of(row)
            ours.w13[row], ours.w2[row] = w13, w2
    return wide


NANO_FOLDER = model_folder("nano-k3")
NANO_TEXTS = [
    "Mia has 14 pencils and buys 3 boxes of 12 pencils each. How many pencils does she have now?\n",
    "A train travels 60 miles in one hour. How far does it travel in 4 hours and 30 minutes?\n",
    "There are 25 students in a class. If 11 of them play chess, how many do not play chess?\nThere are 25-11 = ",
    "Tom earns $15 an hour and works 8 hours a day. He saves half of it. How much does he save in 5 days?\n",
    "She sold 48/2 = <<48/2=24>>24 cookies on Monday.\nIn all she sold 48+24 = <<48+24=72>>72 cookies.\n#### 72\n",
    "If each apple costs $2 and each orange costs $3, then 4 apples and 5 oranges cost 4*2+5*3 = <<4*2+5*3=23>>$",
]


def nano_prompts() -> list[Tensor]:
    """Ids [1, tokens] of lines as nano-k3 was trained on, and of NANO_TEXTS."""
    rng = random.Random(5)
    lines = ["".join("".join(nano_data.line(*nano_data.draw(rng))) for _ in range(40)) for _ in range(6)]
    tokenizer = load_tokenizer(NANO_FOLDER, 1024)
    return [torch.tensor([tokenizer.encode(text)]) for text in [*lines, *NANO_TEXTS]]
