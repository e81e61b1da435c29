"""Forwards of a whole rank that fail anywhere, for proofs on the host and on a GPU."""

from __future__ import annotations

import random

import torch

LAYERS = 4  # managed ones of the tiny model


class Aborted(Exception):
    """What a forward fails with."""


def forward(rank, tokens):
    return rank.loop.forward(torch.tensor([tokens]), rank.model.new_state(1, len(tokens)))


def fail_at_random(rank, random_source):
    """Lets the next forward fail where a random one of its hooks begins or has ended. -> how to take it back."""
    owner, name = random_source.choice(
        [(rank.manager.dense.runtime, hook) for hook in ("h0", "h1", "h2", "h3")]
        + [(rank.manager.experts, hook) for hook in ("bind", "finish")]
    )
    hook, calls = getattr(owner, name), random_source.randrange(1 if name == "h0" else LAYERS)
    behind = random_source.random() < 0.5

    def failing(*arguments):
        nonlocal calls
        calls -= 1
        if calls < 0 and not behind:
            raise Aborted
        hook(*arguments)
        if calls < 0:
            raise Aborted

    setattr(owner, name, failing)
    return lambda: delattr(owner, name)


def forward_with_aborts(rank, tokens, expected, count, seed) -> tuple[int, int]:
    """-> (forwards that were aborted, forwards whose logits were asserted to be `expected`). Now and then the expert
    prefetch is invalidated too."""
    source, aborts, rights = random.Random(seed), 0, 0
    for _ in range(count):
        undo = fail_at_random(rank, source) if source.random() < 0.3 else None
        if source.random() < 0.2 and undo is None:
            rank.manager.invalidate_prefetch()
        try:
            logits = forward(rank, tokens)
        except Aborted:
            aborts += 1
        else:
            assert torch.equal(logits, expected)
            rights += 1
        finally:
            if undo is not None:
                undo()
    return aborts, rights
