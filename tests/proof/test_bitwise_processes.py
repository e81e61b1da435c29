"""One case of every number of ranks and partition kind with real rank processes: the same bits as replicated."""

from __future__ import annotations

import functools

import pytest
import torch

from dwdp import LLM, SamplingParams
from tests.proof.test_bitwise import pairs
from tests.support.system import DENSE, SMALL_PAGES, prompt, write_random

pytestmark = pytest.mark.usefixtures("warm_ranks")

LENGTH = 20
# kind -> number of experts that has it for N ranks
EXPERTS = {
    "balanced": lambda n: 7,
    "uniform": lambda n: 33 if n == 3 else 32,
    "redundant": lambda n: 33 if n > 2 else 7,
    "capped": lambda n: 33 if n != 3 else 7,
}
CASES = [(n, kind) for n in (2, 3, 4) for kind in EXPERTS]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    @functools.cache
    def model(num_experts: int):
        folder = tmp_path_factory.mktemp("models") / f"e{num_experts}"
        return write_random(folder, num_experts=num_experts, num_experts_per_token=3)

    return model


def compute(llm: LLM, n: int):
    """Tokens of 2 n prompts, and the last rank's logits in chunks and steps."""
    outputs = llm.generate([prompt(i, LENGTH) for i in range(2 * n)], SamplingParams(max_tokens=4, ignore_eos=True))
    logits = torch.as_tensor(llm.logits(prompt(0, LENGTH), rank=n - 1, chunk_size=7, decode=2))
    return [list(o.outputs[0].token_ids) for o in outputs], logits


@pytest.fixture(scope="module")
def references(models):
    @functools.cache
    def reference(num_experts: int, n: int):
        with LLM(models(num_experts), ranks=n, replicated=True, device="cpu", dtype="float32") as llm:
            return compute(llm, n)

    return reference


@pytest.mark.parametrize("n, kind", CASES)
def test_rank_processes_give_the_bits_of_replicated_weights(models, references, n, kind):
    num_experts = EXPERTS[kind](n)
    size, stride = pairs(num_experts, n)[kind]
    dwdp = {**SMALL_PAGES, "num_experts_per_worker": size, "num_prefetch_experts": stride}
    with LLM(models(num_experts), ranks=n, dwdp=dwdp, dense_dwdp=DENSE, device="cpu", dtype="float32") as llm:
        tokens, logits = compute(llm, n)
        report = llm.report()
    expected_tokens, expected_logits = references(num_experts, n)
    assert tokens == expected_tokens
    assert torch.equal(logits, expected_logits)
    for entry in report:
        counters, ledger = entry["counters"], entry["ledger"]
        assert counters["demand_fetches"] == counters["fences"] == 0
        assert counters["primed_forwards"] == counters["forwards"] - 1
        assert min(ledger[k] for k in ("expert_moved_bytes", "dense_moved_bytes", "slot_bytes")) > 0
