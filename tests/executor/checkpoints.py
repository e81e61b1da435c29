"""Tiny checkpoint folders for the executor's tests."""

from __future__ import annotations

import json
from pathlib import Path

from dwdp.model.writer import TensorToWrite, write_checkpoint
from tests.support.tiny import random_tensors, tiny_config_dict, tiny_model_config


def write_tiny(folder: Path, *, tokenizer: bool = True, tensors: dict | None = None, **changes) -> Path:
    """A checkpoint of random weights; its tokenizer has one token a byte, 320 ids of which 256 are bytes."""
    if tensors is None:
        tensors = random_tensors(tiny_model_config(**changes))
    entries = [TensorToWrite(n, v.dtype, tuple(v.shape), lambda v=v: v) for n, v in tensors.items()]
    write_checkpoint(folder, tiny_config_dict(**changes), entries)
    if tokenizer:
        (folder / "tokenizer.json").write_text(json.dumps(_byte_tokenizer()))
    return folder


def _byte_tokenizer() -> dict:
    # the printable stand-ins for bytes that byte-level tokenizers use
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = iter(range(256, 512))
    names = [chr(b) if b in printable else chr(next(other)) for b in range(256)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {name: i for i, name in enumerate(names)},
            "merges": [],
        },
    }
