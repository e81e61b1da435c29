"""Trains nano-k3, the small Kimi-K3 that ships with the package, and measures it.

    python -m dwdp.tools.train_nano train --data train.jsonl --out nano-k3 --steps 3500 --graph --compile
    python -m dwdp.tools.train_nano evaluate --model nano-k3

Training wants a GPU (three minutes on one H200, after two of compiling); on a CPU, `--device cpu --steps 2
--short 32 --long 2 --questions 2000` and neither --graph nor --compile shows it run.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch

from dwdp.model.config import ModelConfig
from dwdp.model.decoder import KimiK3Model
from dwdp.tools import nano_data as data
from dwdp.tools.nano_batches import Batches, tokens
from dwdp.tools.nano_fast import Fast, captured
from dwdp.tools.nano_measure import exact_match, expert_shares, text_loss
from dwdp.tools.nano_step import Step

CONFIG = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "model_type": "kimi_linear",
    "dtype": "bfloat16",
    "vocab_size": 1024,
    "hidden_size": 128,
    "num_hidden_layers": 14,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 256,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "num_experts": 32,
    "num_experts_per_token": 4,
    "num_shared_experts": 1,
    "moe_intermediate_size": 48,
    "routed_expert_hidden_size": 48,
    "latent_moe_use_norm": True,
    "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc",
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_renormalize": True,
    "routed_scaling_factor": 1.0,
    "attn_res_block_size": 12,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "linear_attn_config": {
        "num_heads": 4,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
        "full_attn_layers": [4, 8, 13, 14],
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 12],
    },
}


def initialise(model: KimiK3Model, seed: int) -> None:
    """Scaled normal weights; gates start with decays from very slow to medium."""
    generator = torch.Generator().manual_seed(seed)
    layers = model.config.num_hidden_layers
    with torch.no_grad():
        for name, p in model.named_parameters():
            leaf = name.rsplit(".", 2)[-2:]
            if "norm" in name.split(".")[-2]:
                value = torch.ones(p.shape)
            elif "res_proj" in name or leaf[-1] == "e_score_correction_bias":
                value = torch.zeros(p.shape)
            elif leaf[-1] == "A_log":
                value = torch.zeros(p.shape)
            elif leaf[-1] == "dt_bias":
                value = -6.0 * torch.rand(p.shape, generator=generator)
            elif "conv1d" in name:
                value = torch.rand(p.shape, generator=generator) - 0.5
            elif "embed_tokens" in name:
                value = torch.randn(p.shape, generator=generator)
            else:
                value = torch.randn(p.shape, generator=generator) / math.sqrt(p.shape[-1])
                if leaf[0] in ("o_proj", "down_proj", "routed_expert_up_proj"):
                    value = value / math.sqrt(2 * layers)
            p.copy_(value)


def learning_rate(step: int, done: float, peak: float) -> float:
    """Linear warm-up over 200 steps, then a cosine to 1 % as `done` goes from 0 to 1."""
    return peak * min(1.0, (step + 1) / 200) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def new_model(arguments: argparse.Namespace, documents: list[str]):
    """Model and tokenizer to train: fresh ones, or those of `--resume`."""
    if arguments.resume is None:
        tokenizer = data.train_tokenizer(documents, CONFIG["vocab_size"])
        model = KimiK3Model(ModelConfig.from_dict(CONFIG), dtype=torch.bfloat16, device=arguments.device)
        initialise(model, arguments.seed)
        return model, tokenizer
    from tokenizers import Tokenizer

    from dwdp.model.loader import load_model

    model = load_model(arguments.resume, dtype=torch.bfloat16, device=arguments.device)
    for name, p in model.named_parameters():
        p.requires_grad_(not name.endswith("e_score_correction_bias"))
    return model, Tokenizer.from_file(str(arguments.resume / "tokenizer.json"))


def train(arguments: argparse.Namespace) -> None:
    began = time.perf_counter()
    torch.manual_seed(arguments.seed)
    documents, left_out = data.split_documents(data.read_gsm8k(arguments.data))
    model, tokenizer = new_model(arguments, documents)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {len(documents)} documents", flush=True)
    batches = Batches(
        tokenizer, documents, questions=arguments.questions, short=arguments.short, long=arguments.long,
        length=arguments.length, seed=arguments.seed, device=arguments.device,
    )  # fmt: skip
    short, long = batches.next()
    run = step = Step(model, short, long, fast=Fast(compiled=arguments.compile), balance_rate=1e-3)
    print(f"data and first pass: {time.perf_counter() - began:.0f} s", flush=True)
    if arguments.graph:
        run = captured(step)
    trained_from = time.perf_counter()
    print(f"ready to train: {trained_from - began:.0f} s", flush=True)
    curve, steps, done, next_check = [], 0, 0.0, trained_from + 30
    while done < 1.0:
        step.lr.fill_(learning_rate(steps, done, arguments.peak))
        if done >= 0.9:
            step.balance.rate.zero_()
        for mine, new in zip((short, long), batches.next()):
            mine.copy_(new)
        run()
        steps += 1
        now = time.perf_counter()
        done = steps / arguments.steps if arguments.steps else 0.0
        if arguments.seconds:
            done = max(done, (now - trained_from) / (arguments.seconds - (trained_from - began)))
        if steps % arguments.every == 0 or steps == 1 or done >= 1.0:
            curve.append((steps, *step.losses.tolist()))
            one, many, text = curve[-1][1:]
            print(f"{steps}: one {one:.4f} many {many:.4f} text {text:.4f} {now - began:.0f} s", flush=True)
        if now > next_check:
            print("exact of 100:", exact_match(model, tokenizer, 100, arguments.device), flush=True)
            write(arguments.out, model, tokenizer)
            next_check = time.perf_counter() + 60
    seconds = time.perf_counter() - trained_from
    record = {
        "steps": steps, "short_rows": arguments.short, "long_rows": arguments.long,
        "length": arguments.length, "questions": arguments.questions, "peak": arguments.peak,
        "seed": arguments.seed, "seconds": round(seconds, 1),
        "seconds_with_start": round(seconds + trained_from - began, 1),
        "torch": torch.__version__, "documents": len(documents), "documents_left_out": len(left_out),
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "loss_columns": ["step", "one question a row", "many questions a row", "text"],
        "loss_curve": [[s, *(round(x, 4) for x in losses)] for s, *losses in curve],
    }  # fmt: skip
    save(arguments, model, tokenizer, record, left_out)


def write(out: Path, model: KimiK3Model, tokenizer) -> None:
    from dwdp.model.writer import save_checkpoint

    save_checkpoint(out, model, CONFIG)
    tokenizer.save(str(out / "tokenizer.json"))


def save(arguments, model: KimiK3Model, tokenizer, record: dict, left_out: list[str]) -> None:
    out = arguments.out
    write(out, model, tokenizer)
    (out / "training.json").write_text(json.dumps(record) + "\n")
    ids = torch.from_numpy(tokens(tokenizer, left_out)).to(arguments.device)
    record["text_loss_left_out"] = round(text_loss(model, ids, arguments.length), 4)
    shares = expert_shares(model, tokenizer, arguments.device)
    record["expert_shares"] = {str(i): [round(x, 4) for x in s] for i, s in shares.items()}
    (out / "training.json").write_text(json.dumps(record) + "\n")
    flat = [x for s in shares.values() for x in s]
    print(f"loss of the text left out: {record['text_loss_left_out']}", flush=True)
    print(f"shares {min(flat):.4f} to {max(flat):.4f}", flush=True)
    print("exact of 500:", exact_match(model, tokenizer, 500, arguments.device), flush=True)


def evaluate(arguments: argparse.Namespace) -> int:
    """Exact match of saved weights on the held-out questions, and the share of tokens an expert gets."""
    from tokenizers import Tokenizer

    from dwdp.model.loader import load_model

    model = load_model(arguments.model, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    right, misses = exact_match(model, tokenizer, arguments.count, "cpu")
    print(f"exact match {right} of {arguments.count}; misses {misses}")
    shares = [s for layer in expert_shares(model, tokenizer, "cpu").values() for s in layer]
    unused = shares.count(0.0)
    print(f"expert share of tokens: least {min(shares):.4f}, most {max(shares):.4f}, unused {unused}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    t = commands.add_parser("train")
    t.add_argument("--data", type=Path, required=True, help="the jsonl file of GSM8K's train split")
    t.add_argument("--out", type=Path, required=True)
    t.add_argument("--resume", type=Path, help="go on from this model's weights")
    t.add_argument("--steps", type=int, default=0)
    t.add_argument("--seconds", type=float, default=0.0, help="stop after this long, the start included")
    t.add_argument("--compile", action="store_true", help="torch.compile the elementwise parts")
    t.add_argument("--graph", action="store_true", help="run the step as one CUDA graph")
    t.add_argument("--short", type=int, default=1024, help="rows of one question in a step")
    t.add_argument("--long", type=int, default=64, help="rows of many questions, and of text, in a step")
    t.add_argument("--length", type=int, default=128, help="tokens of a long row")
    t.add_argument("--questions", type=int, default=2_000_000, help="how many to draw beforehand")
    t.add_argument("--peak", type=float, default=2e-3, help="largest learning rate")
    t.add_argument("--seed", type=int, default=0)
    t.add_argument("--every", type=int, default=100, help="steps between two lines of the loss curve")
    t.add_argument("--device", default="cuda")
    e = commands.add_parser("evaluate")
    e.add_argument("--model", type=Path, required=True)
    e.add_argument("--count", type=int, default=500)
    arguments = parser.parse_args()
    if arguments.command == "evaluate":
        return evaluate(arguments)
    if not (arguments.steps or arguments.seconds):
        parser.error("train needs --steps or --seconds")
    train(arguments)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
