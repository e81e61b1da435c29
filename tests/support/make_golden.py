"""Make tests/data/tiny_k3_golden.safetensors: tiny Kimi-K3 weights with another implementation's results.

    python -m tests.support.make_golden            write the file
    python -m tests.support.make_golden --check    compute anew and compare with the file; exit 1 if unlike

The file serves machines without mlx-lm (GPU machines, macOS). Weights that a bf16 model keeps in bf16 are
stored so: fp32 and bf16 models of the file hold the same numbers. Logits and states are mlx-lm's, in fp32.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dwdp.model.config import ModelConfig
from dwdp.model.decoder import KimiK3Model
from tests.support.tiny import random_tensors, tiny_config_dict, token_ids

PATH = Path(__file__).parents[1] / "data" / "tiny_k3_golden.safetensors"
NUM_TOKENS = 97  # a whole chunk of 64, and a part
TOLERANCE = 1e-4
# Narrower than the usual tiny config, so that the file stays below 1 MB.
CONFIG = tiny_config_dict(vocab_size=256, moe_intermediate_size=16, num_experts=8)


def bf16_exact(config: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as a bf16 checkpoint has them: fp32 where a bf16 model keeps fp32, else bf16."""
    model = KimiK3Model(config, dtype=torch.bfloat16, device="meta")
    fp32 = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
    return {name: t if name in fp32 else t.bfloat16() for name, t in tensors.items()}


def make() -> dict[str, Tensor]:
    from tests.support.oracle import MlxK3, to_torch

    config = ModelConfig.from_dict(CONFIG)
    weights = bf16_exact(config, random_tensors(config, seed=7))
    oracle = MlxK3(CONFIG, {name: t.float() for name, t in weights.items()})
    ids = token_ids(NUM_TOKENS, seed=7, vocab=config.vocab_size)
    cache = oracle.new_cache()
    golden = {f"weights.{name}": t for name, t in weights.items()}
    golden["ids"], golden["logits"] = ids, oracle.logits(ids, cache)
    for layer in range(config.num_hidden_layers):
        if config.layer_kind(layer) == "kda":
            conv, recurrent = (to_torch(a) for a in cache[layer].state[0][:2])
            golden[f"state.{layer}.conv"] = conv
            golden[f"state.{layer}.recurrent"] = recurrent.transpose(-1, -2)  # theirs is [V, K]
    return {name: t.contiguous() for name, t in golden.items()}


def load() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights by release name, and the results (ids, logits, state.LAYER.conv, state.LAYER.recurrent)."""
    golden = load_file(PATH)
    weights = {n.removeprefix("weights."): t for n, t in golden.items() if n.startswith("weights.")}
    return weights, {n: t for n, t in golden.items() if not n.startswith("weights.")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the file instead of writing it")
    check = parser.parse_args().check
    golden = make()
    if not check:
        PATH.parent.mkdir(exist_ok=True)
        save_file(golden, PATH)
        print(f"{PATH}: {PATH.stat().st_size} bytes, {len(golden)} tensors")
        return 0
    stored = load_file(PATH)
    if stored.keys() != golden.keys():
        print(f"names differ: {sorted(stored.keys() ^ golden.keys())}")
        return 1
    largest = {n: (golden[n].double() - stored[n].double()).abs().max().item() for n in golden}
    worst = max(largest, key=largest.get)
    print(f"largest difference {largest[worst]:.2e} in {worst}")
    return int(largest[worst] > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
