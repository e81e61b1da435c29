"""nano-k3: its data keeps the held-out pairs out, its training step learns, the shipped weights add up."""

from __future__ import annotations

import json
import random
import re
import zlib
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

import dwdp
from dwdp.config.files import load_config_file
from dwdp.model.config import ModelConfig
from dwdp.model.decoder import KimiK3Model
from dwdp.model.loader import load_model
from dwdp.tools import nano_data, nano_fast, train_nano
from dwdp.tools.nano_batches import Batches
from dwdp.tools.nano_measure import Load, exact_match, expert_shares
from dwdp.tools.nano_step import Step, copy_all

FOLDER = Path(dwdp.__file__).parent / "models" / "nano-k3"
TEXTS = [
    "Tom has 3 apples and buys 48 more. How many has he?\nHe has 3+48 = <<3+48=51>>51.\n#### 51\n",
    "A book of 120 pages costs $14. Ann reads half of it. How many pages are left?\nShe reads 120/2 = 60.\n",
    "Sara sells 7 cakes a day for 5 days. How many is that?\nIt is 7*5 = <<7*5=35>>35 cakes.\n#### 35\n",
]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def model():
    return load_model(FOLDER, dtype=torch.float32)


@pytest.fixture(scope="module")
def batches(tokenizer):
    return Batches(
        tokenizer, TEXTS * 4, questions=3000, short=64, long=8, length=48, seed=3, device="cpu"
    )  # fmt: skip


# --- tokenizer


def test_every_digit_operator_and_newline_is_one_token_wherever_it_stands(tokenizer):
    text = "12345-67890=-55545\n"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text)
    assert [tokenizer.decode([i]) for i in ids] == list(text)


def test_text_comes_back_from_its_tokens(tokenizer):
    for text in [*TEXTS, "7+8=15\n", "  two  spaces\n\nünï ✓ <b>"]:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_every_id_fits_the_vocabulary(tokenizer):
    config = json.loads((FOLDER / "config.json").read_text())
    assert max(tokenizer.get_vocab().values()) < config["vocab_size"]
    assert tokenizer.token_to_id(nano_data.END_OF_TEXT) == config["eos_token_id"]
    assert tokenizer.token_to_id(nano_data.PAD) == config["pad_token_id"]


def test_a_tokenizer_trained_again_has_the_same_guarantees():
    fresh = nano_data.train_tokenizer(TEXTS * 3, 300)
    assert len(fresh.encode("90-81=9\n").ids) == 8
    assert max(fresh.get_vocab().values()) < 300


# --- held-out pairs


def _crc32(text: str) -> int:
    """CRC32 bit by bit, as RFC 1952 has it: independent of the code under test."""
    crc = 0xFFFFFFFF
    for byte in text.encode():
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0xEDB88320 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


HELD, HELD_CRC = (10, "+", 12), 389505500


def test_a_pair_is_held_out_when_crc32_of_it_with_spaces_is_a_multiple_of_100():
    a, op, b = HELD
    assert _crc32(f"{a} {op} {b}") == HELD_CRC
    assert HELD_CRC % 100 == 0
    assert nano_data.held_out(*HELD)
    assert not nano_data.held_out(a, op, b + 1)


def test_training_never_draws_a_held_out_pair():
    rng = random.Random(11)
    drawn = [nano_data.draw(rng) for _ in range(60_000)]
    assert not [q for q in drawn if zlib.crc32("{} {} {}".format(*q).encode()) % 100 == 0]
    # Without the rule one in a hundred would be, and every length and operator is there.
    assert {(len(str(a)), op, len(str(b))) for a, op, b in drawn} == {
        (i, op, j) for i in (1, 2, 3) for j in (1, 2, 3) for op in "+-"
    }


class OnlyHeldOutAtFirst:
    """A stub generator whose first pair is held out."""

    def __init__(self):
        self.numbers = [HELD[0], HELD[2], 21, 34]

    def choices(self, population, weights, k):
        return [population[0]] * k

    def randint(self, low, high):
        return self.numbers.pop(0)

    def choice(self, options):
        return "+"


def test_a_held_out_draw_is_thrown_away_and_drawn_again():
    assert nano_data.draw(OnlyHeldOutAtFirst()) == (21, "+", 34)
    assert nano_data.draw(OnlyHeldOutAtFirst(), held=True) == HELD


def test_held_out_questions_are_distinct_and_held_out():
    questions = nano_data.held_out_questions(200)
    assert len(set(questions)) == 200
    assert all(zlib.crc32(f"{a} {op} {b}".encode()) % 100 == 0 for a, op, b in questions)
    assert nano_data.held_out_questions(50) == questions[:50]


def test_documents_with_a_held_out_pair_are_left_out():
    a, op, b = HELD
    rows = [
        {"question": "How many?", "answer": f"It is <<{a}{op}{b}={a + b}>>."},
        {"question": f"What is {a} {op} {b}?", "answer": "Much."},
        {"question": "How many?", "answer": "It is <<21+34=55>>."},
    ]
    train, left_out = nano_data.split_documents(rows)
    assert train == ["How many?\nIt is <<21+34=55>>.\n"]
    assert len(left_out) == 2


# --- batches


def test_the_loss_covers_exactly_the_answers_of_short_rows(tokenizer, batches):
    short, _ = batches.next()
    assert short.inputs.shape == (64, nano_data.LINE_TOKENS - 1)
    for inputs, targets, weight in zip(*short.tensors()):
        ids = [*inputs.tolist(), targets[-1].item()]
        text = tokenizer.decode(ids, skip_special_tokens=False)
        a, op, b, result = re.fullmatch(
            r"(\d+)([+-])(\d+)=(-?\d+)\n<\|endoftext\|>(?:<\|pad\|>)*", text
        ).groups()  # fmt: skip
        assert int(result) == nano_data.answer(int(a), op, int(b))
        assert zlib.crc32(f"{a} {op} {b}".encode()) % 100
        assert tokenizer.decode(targets[weight == 1].tolist(), skip_special_tokens=False) == (
            f"{result}\n<|endoftext|>"
        )
        assert set(weight.tolist()) <= {0.0, 1.0}


def test_the_loss_covers_exactly_the_answers_of_long_rows_and_all_text(tokenizer, batches):
    _, long = batches.next()
    assert long.inputs.shape == (8, 48)
    for inputs, targets, weight in list(zip(*long.tensors()))[:4]:
        lines = tokenizer.decode([inputs[0].item(), *targets.tolist()]).split("\n")
        last = re.sub(r"^[^=]*(=|$)", "", lines[-1])
        answers = [line.split("=")[1] for line in lines[:-1]] + ([last] if last else [])
        got = tokenizer.decode(targets[weight == 1].tolist())
        assert got == "\n".join(answers) + ("" if last else "\n")
        assert re.fullmatch(r"\d+[+-]\d+=-?\d+", lines[0]), "a row starts at a line"
    assert (long.weight[4:] == 1).all()


def test_too_little_to_fill_a_row_is_refused(tokenizer):
    with pytest.raises(ValueError, match="2 questions"):
        Batches(tokenizer, TEXTS, questions=2, short=1, long=2, length=48, seed=0, device="cpu")


# --- the step


def test_quick_replacements_compute_what_they_replace():
    torch.manual_seed(0)
    a, b = torch.randn(3, 2, 48, 48) * 0.3, torch.randn(3, 2, 48, 5)
    want = torch.linalg.solve_triangular(a.double().tril(-1), b.double(), upper=False, unitriangular=True)
    got = nano_fast.solve(a.double(), b.double(), upper=False, unitriangular=True)
    assert torch.allclose(got, want, rtol=1e-9, atol=1e-9)
    ids = torch.randint(7, (100,))
    assert torch.equal(nano_fast.count(ids, minlength=9), torch.bincount(ids, minlength=9))
    with pytest.raises(ValueError, match="whole blocks"):
        nano_fast.solve(a[..., :20, :20], b[..., :20, :], upper=False, unitriangular=True)


def test_copy_all_pairs_tensors_of_mixed_dtypes():
    sources = [torch.full((3,), 1.5), torch.full((2,), 2.5, dtype=torch.bfloat16), torch.full((1,), 3.5)]
    targets = [torch.zeros(3, dtype=torch.bfloat16), torch.zeros(2), torch.zeros(1)]
    copy_all(targets, sources)
    assert [t[0].item() for t in targets] == [1.5, 2.5, 3.5]


def test_the_loss_falls_and_the_balance_moves_over_five_steps(tokenizer):
    linear = train_nano.CONFIG["linear_attn_config"] | {"kda_layers": [1, 2], "full_attn_layers": [3, 4]}
    shallow = train_nano.CONFIG | {"num_hidden_layers": 4, "linear_attn_config": linear}
    fresh = KimiK3Model(ModelConfig.from_dict(shallow), dtype=torch.bfloat16, device="cpu")
    train_nano.initialise(fresh, seed=0)
    batches = Batches(tokenizer, TEXTS, questions=500, short=24, long=4, length=32, seed=3, device="cpu")
    short, long = batches.next()
    step = Step(fresh, short, long, fast=nano_fast.Fast(compiled=False), balance_rate=1e-3)
    first = step.losses.clone()
    step.lr.fill_(2e-3)
    plain = torch.bincount
    for _ in range(5):
        step()
    assert torch.bincount is plain
    assert (step.losses < first - 0.5).all()
    for index, gate in step.balance.gates.items():
        rises = gate.e_score_correction_bias > 0
        picks = step.balance.picks[index]
        assert picks.sum() == (short.inputs.numel() + long.inputs.numel()) * 4
        assert rises.any() and not rises.all()
    for master, weight in zip(step.masters, step.weights):
        assert torch.equal(master.to(weight.dtype), weight), "weights are their rounded masters"


def test_the_learning_rate_warms_up_and_decays():
    rates = [train_nano.learning_rate(step, step / 1000, 1.0) for step in range(1001)]
    assert rates[0] < 0.01 and abs(rates[1000] - 0.01) < 1e-6
    assert 190 < rates.index(max(rates)) < 210


# --- what is shipped


def test_the_shipped_config_is_the_trained_one_and_has_the_promised_size(model):
    shipped = json.loads((FOLDER / "config.json").read_text())
    assert shipped == train_nano.CONFIG
    config = model.config
    assert 4e6 < sum(p.numel() for p in model.parameters()) < 5e6
    assert config.num_hidden_layers >= 14 and config.num_experts >= 32
    kinds = [config.layer_kind(i) for i in range(config.num_hidden_layers)]
    assert kinds[-2:] == ["mla", "mla"] and "kda" in kinds


def test_the_shipped_weights_answer_held_out_questions(model, tokenizer):
    right, misses = exact_match(model, tokenizer, 60, "cpu")
    assert right >= 54, misses


def test_wrong_weights_answer_nothing(tokenizer, model):
    shifted = load_model(FOLDER, dtype=torch.float32)
    with torch.no_grad():
        shifted.lm_head.weight.copy_(model.lm_head.weight.roll(1, 0))
    assert exact_match(shifted, tokenizer, 20, "cpu")[0] == 0


def test_no_expert_of_the_shipped_weights_is_unused(model, tokenizer):
    shares = expert_shares(model, tokenizer, "cpu", questions=400)
    assert len(shares) == 13
    assert min(min(s) for s in shares.values()) > 0
    assert max(max(s) for s in shares.values()) < 0.2
    assert all(abs(sum(s) - 1) < 1e-9 and len(s) == 32 for s in shares.values())
    assert not model.model.layers[1].block_sparse_moe.gate._forward_hooks, "measuring leaves no hook behind"


def test_load_counts_until_it_is_cleared(model):
    load = Load(model)
    model(torch.tensor([[5, 6, 7]]))
    assert {int(p.sum()) for p in load.picks.values()} == {12}
    load.clear()
    assert {int(p.sum()) for p in load.picks.values()} == {0}
    load.remove()


def test_the_card_says_what_a_user_needs():
    card = (FOLDER / "README.md").read_text()
    assert re.search(r"^prompt: `\{a\}\+\{b\}=`$", card, re.M)
    assert re.search(r"^prompt-subtraction: `\{a\}-\{b\}=`$", card, re.M)
    record = json.loads((FOLDER / "training.json").read_text())
    curve = {row[0]: row[1:] for row in record["loss_curve"]}
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", card, re.M)
    assert len(rows) >= 10
    for step, *losses in rows:
        assert [float(x) for x in losses] == curve[int(step)]
    assert f"{record['steps']:,} steps" in card and record["torch"] in card


def test_the_shipped_server_config_switches_dense_dwdp_on():
    config = load_config_file(FOLDER / "dwdp.yaml")
    assert config.dense_dwdp.enabled and config.dense_dwdp.min_bytes == 1
