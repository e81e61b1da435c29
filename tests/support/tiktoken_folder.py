"""A small vocabulary in tiktoken's format, made by a real byte-pair training of a fixed text, and its folder."""

from __future__ import annotations

import base64
import json
from collections import Counter
from functools import cache
from pathlib import Path

CORPUS = """The quick brown fox jumps over the lazy dog. It's what they'd said; we'll see, THEY'RE not I'm.
def gather(rows, start=0, *, stride=1):\n    return [row[start::stride] for row in rows if row is not None]\n
    for (int i = 0; i < 1024; ++i) { sum += weights[i] * 3.14159; }\n\treturn sum;\n
分布式权重数据并行：每个专家只存在于一个等级上。模型的权重在等级之间共享。模型 模型
Быстрая коричневая лиса прыгает через ленивую собаку. Веса модели разделены.
Η γρήγορη καφέ αλεπού. Das Gewicht über ÄÖÜ straße. Ça naïve café déjà-vu.
これはテストです。カタカナとひらがなと漢字。한국어 문장도 있습니다. مرحبا بالعالم हिन्दी पाठ
🙂🙂🚀 👩‍💻 <|im_end|> <|open|> [BOS] [EOS] 0123456789 2024-11-30 1,000,000\n\n\n        \t\t  """


@cache
def trained_ranks(num_merges: int = 500) -> dict[bytes, int]:
    """The 256 bytes and then one token a merge, of the most frequent pair, the smaller one at ties."""
    words = Counter(tuple(bytes([b]) for b in word.encode()) for word in _words(CORPUS))
    ranks = {bytes([byte]): byte for byte in range(256)}
    while len(ranks) < 256 + num_merges:
        pairs: Counter = Counter()
        for word, count in words.items():
            for pair in zip(word, word[1:]):
                pairs[pair] += count
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        ranks.setdefault(best[0] + best[1], len(ranks))
        words = Counter({_merge(word, best): count for word, count in words.items()})
    return ranks


def _words(text: str) -> list[str]:
    """Runs of the same kind of character, with the blank before them, so that merges do not cross words."""
    words, kind = [""], None
    for character in text:
        now = "space" if character.isspace() else "word" if character.isalnum() else "other"
        if now != kind and words[-1] != " ":
            words.append("")
        words[-1] += character
        kind = now
    return [word for word in words if word]


def _merge(word: tuple[bytes, ...], pair: tuple[bytes, bytes]) -> tuple[bytes, ...]:
    merged, at = [], 0
    while at < len(word):
        together = word[at : at + 2] == pair
        merged.append(pair[0] + pair[1] if together else word[at])
        at += 2 if together else 1
    return tuple(merged)


def write_tiktoken(folder: Path, ranks: dict[bytes, int], named: dict[int, str] | None = None) -> None:
    """named: offset behind the ranks -> a control token's text."""
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    (folder / "tiktoken.model").write_text("".join(lines))
    added = {
        str(len(ranks) + offset): {"content": text, "special": not text.startswith("<think")}
        for offset, text in (named or {}).items()
    }
    document = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(document))
