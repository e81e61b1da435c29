"""One training step of nano-k3: losses, gradients, optimizer, and the balance of the experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dwdp.model.decoder import KimiK3Model
from dwdp.tools.nano_batches import Rows
from dwdp.tools.nano_fast import Fast, chunk
from dwdp.tools.nano_measure import Load


class Balance(Load):
    """Keeps every expert in use: its selection bias rises while it gets fewer tokens than the mean."""

    def __init__(self, model: KimiK3Model, rate: float) -> None:
        super().__init__(model)
        self.rate = torch.tensor(rate, device=model.lm_head.weight.device)

    @torch.no_grad()
    def update(self) -> None:
        for index, gate in self.gates.items():
            picks = self.picks[index].float()
            gate.e_score_correction_bias.add_(self.rate * torch.sign(picks.mean() - picks))


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """targets[i].copy_(sources[i]), the pairs of equal dtypes in one kernel."""
    groups: dict[tuple, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for target, source in zip(targets, sources):
        groups.setdefault((target.dtype, source.dtype), []).append((target, source))
    for pairs in groups.values():
        torch._foreach_copy_(*map(list, zip(*pairs)))


class Step:
    """One training step on the tensors `short` and `long`; `losses` are those of short, long and text rows.

    The model has bf16 weights as they will ship, each with an fp32 master that the optimizer moves.
    """

    def __init__(self, model: KimiK3Model, short: Rows, long: Rows, *, fast: Fast, balance_rate: float) -> None:
        self.model, self.short, self.long, self.fast = model, short, long, fast
        self.balance = Balance(model, balance_rate)
        device = model.lm_head.weight.device
        self.lr, self.losses = torch.tensor(0.0, device=device), torch.zeros(3, device=device)
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self._backward()
        # Layer 0's first residual mix is not used.
        self.weights = [p for p in self.weights if p.grad is not None]
        self.masters = [p.detach().float().clone() for p in self.weights]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        on_gpu = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [m for m in self.masters if m.dim() >= 2], "weight_decay": 0.05},
                {"params": [m for m in self.masters if m.dim() < 2], "weight_decay": 0.0},
            ],
            lr=self.lr, betas=(0.9, 0.98), fused=on_gpu, capturable=on_gpu,
        )  # fmt: skip
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr

    def _loss(self, rows: Rows) -> list[torch.Tensor]:
        """Mean losses of the rows' first and second half."""
        logits = self.model(rows.inputs)
        losses = F.cross_entropy(logits.flatten(0, 1), rows.targets.flatten(), reduction="none")
        weighted = losses.view(rows.weight.shape) * rows.weight
        halves = zip(weighted.chunk(2), rows.weight.chunk(2))
        return [loss.sum() / weight.sum() for loss, weight in halves]

    def _backward(self) -> None:
        for p in self.weights:
            p.grad = None
        with self.fast:
            with chunk(16):
                short = sum(self._loss(self.short)) / 2
            long, text = self._loss(self.long)
            (short + 0.5 * long + 0.5 * text).backward()
        self.losses.copy_(torch.stack([short.detach(), long.detach(), text.detach()]))

    def __call__(self) -> None:
        self.balance.clear()
        self._backward()
        copy_all([m.grad for m in self.masters], [p.grad for p in self.weights])
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        with torch.no_grad():
            copy_all(self.weights, self.masters)
        self.balance.update()
