"""Text for nano-k3: GSM8K questions with answers, and generated addition and subtraction.

A pair of numbers is *held out* when CRC32 of `a op b` modulo 100 is 0; training never draws it, and leaves
out the GSM8K documents that hold one, so that the held-out questions measure arithmetic and not memory.
"""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

PROMPTS = {"+": "{a}+{b}=", "-": "{a}-{b}="}
END_OF_TEXT = "<|endoftext|>"
BEGIN_OF_TEXT = "<|begin|>"
PAD = "<|pad|>"
# Smallest and largest number of one, two and three digits, and how often each length is drawn.
RANGES, SHARES = ((0, 9), (10, 99), (100, 999)), (1, 3, 6)
# The longest line, `100-999=-899`, its newline and the end of text.
LINE_TOKENS = 14
_PAIR = re.compile(r"(?<!\d)(?=(\d+)\s*([+-])\s*(\d+))")


def held_out(a: int, op: str, b: int) -> bool:
    """Whether the question is kept for measuring: CRC32 of `a op b`, written with or without spaces."""
    return any(zlib.crc32(text.encode()) % 100 == 0 for text in (f"{a} {op} {b}", f"{a}{op}{b}"))


def answer(a: int, op: str, b: int) -> int:
    return a + b if op == "+" else a - b


def line(a: int, op: str, b: int) -> tuple[str, str]:
    """(prompt, completion) of one question; the completion is the answer's digits and a newline."""
    return PROMPTS[op].format(a=a, b=b), f"{answer(a, op, b)}\n"


def draw(rng: random.Random, *, held: bool = False) -> tuple[int, str, int]:
    """One question of two numbers from 0 to 999."""
    while True:
        a, b = (rng.randint(*bounds) for bounds in rng.choices(RANGES, SHARES, k=2))
        op = rng.choice("+-")
        if held_out(a, op, b) == held:
            return a, op, b


def held_out_questions(count: int, seed: int = 0) -> list[tuple[int, str, int]]:
    """The first `count` different held-out questions of a seeded stream, additions and subtractions."""
    rng, found = random.Random(seed), {}
    while len(found) < count:
        question = draw(rng, held=True)
        a, op, b = question
        if zlib.crc32(f"{a} {op} {b}".encode()) % 100 == 0:
            found[question] = None
    return list(found)


def read_gsm8k(path: str | Path) -> list[dict]:
    """Rows {question, answer} of a GSM8K jsonl file; ValueError names a line without the two keys."""
    rows = [json.loads(text) for text in Path(path).read_text(encoding="utf-8").splitlines() if text.strip()]
    for number, row in enumerate(rows, 1):
        if not {"question", "answer"} <= row.keys():
            raise ValueError(f"{path} line {number}: needs the keys question and answer")
    return rows


def document(row: dict) -> str:
    return f"{row['question']}\n{row['answer']}\n"


def holds_held_out(text: str) -> bool:
    """Whether a held-out `a + b` or `a - b` stands in the text."""
    return any(held_out(int(a), op, int(b)) for a, op, b in _PAIR.findall(text))


def split_documents(rows: Sequence[dict]) -> tuple[list[str], list[str]]:
    """The documents to train on, and those left out because they hold a held-out pair."""
    train, left_out = [], []
    for text in map(document, rows):
        (left_out if holds_held_out(text) else train).append(text)
    return train, left_out


def train_tokenizer(texts: list[str], vocab_size: int):
    """A byte-level BPE whose digits, operators and newlines are always single tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"[0-9]|[-+=*/<>]|\n"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BEGIN_OF_TEXT, END_OF_TEXT, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
