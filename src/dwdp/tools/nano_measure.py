"""Measures nano-k3: exact match on the held-out questions, loss on text, and the experts' shares."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F

from dwdp.model.decoder import KimiK3Model
from dwdp.tools import nano_data as data
from dwdp.tools import nano_fast


class Load:
    """Counts, per MoE layer, how often each expert was picked since `clear`."""

    def __init__(self, model: KimiK3Model) -> None:
        self.gates = {
            index: layer.block_sparse_moe.gate
            for index, layer in enumerate(model.model.layers)
            if hasattr(layer, "block_sparse_moe")
        }
        device, self.num_experts = model.lm_head.weight.device, model.config.num_experts
        self.picks = {i: torch.zeros(self.num_experts, dtype=torch.int64, device=device) for i in self.gates}
        self.hooks = [gate.register_forward_hook(self._adding(i)) for i, gate in self.gates.items()]

    def _adding(self, index: int):
        def add(module, inputs, outputs):
            self.picks[index].add_(nano_fast.count(outputs[0].flatten(), minlength=self.num_experts))

        return add

    def clear(self) -> None:
        for picks in self.picks.values():
            picks.zero_()

    def shares(self) -> dict[int, list[float]]:
        """Layer -> each expert's share of the picks."""
        return {i: (picks.double() / picks.sum()).tolist() for i, picks in self.picks.items()}

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()


@torch.no_grad()
def generate_batch(model: KimiK3Model, prompts: torch.Tensor, steps: int) -> torch.Tensor:
    """Greedy continuations [batch, steps] of prompts [batch, tokens], all of one length."""
    state = model.new_state(prompts.shape[0], prompts.shape[1] + steps)
    token = model(prompts, state)[:, -1].argmax(-1)
    tokens = [token]
    for _ in range(steps - 1):
        token = model(token[:, None], state)[:, -1].argmax(-1)
        tokens.append(token)
    return torch.stack(tokens, dim=1)


@torch.no_grad()
def exact_match(model: KimiK3Model, tokenizer, count: int, device) -> tuple[int, list[str]]:
    """How many of the first `count` held-out questions get exactly their completion, then the end.

    Also up to five answers that are wrong.
    """
    groups: dict[int, list[tuple[str, str]]] = {}
    for question in data.held_out_questions(count):
        prompt, completion = data.line(*question)
        groups.setdefault(len(prompt), []).append((prompt, completion))
    end = tokenizer.token_to_id(data.END_OF_TEXT)
    right, misses = 0, []
    for pairs in groups.values():
        prompts = torch.tensor([tokenizer.encode(p).ids for p, _ in pairs], device=device)
        # At most a minus and three digits, or four digits; then the newline and the end of text.
        for (prompt, completion), ids in zip(pairs, generate_batch(model, prompts, 6).tolist()):
            text = tokenizer.decode(ids[: ids.index(end)] if end in ids else ids)
            if text == completion:
                right += 1
            elif len(misses) < 5:
                misses.append(f"{prompt}{text}")
    return right, misses


@torch.no_grad()
def text_loss(model: KimiK3Model, ids: torch.Tensor, length: int) -> float:
    """Mean loss per token of text, in rows of `length` tokens."""
    rows = ids[: (len(ids) - 1) // length * length + 1].long()
    losses = [
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()) * len(x)
        for x, y in zip(rows[:-1].view(-1, length).split(64), rows[1:].view(-1, length).split(64))
    ]
    return (sum(losses) / (len(rows) // length)).item()


@torch.no_grad()
def expert_shares(model: KimiK3Model, tokenizer, device, questions: int = 2000) -> dict[int, list[float]]:
    """Layer -> share of the tokens that each expert gets, over seeded questions that are not held out."""
    load, rng = Load(model), random.Random(1)
    lines = "".join("".join(data.line(*data.draw(rng))) for _ in range(questions))
    ids = tokenizer.encode(lines).ids
    model(torch.tensor(ids[: len(ids) // 128 * 128], device=device).view(-1, 128))
    load.remove()
    return load.shares()
