r"""Greedy answers to every GSM8K test question, with DWDP on and on replicated weights: the token ids must agree.

    python examples/gsm8k_identity.py --data test.jsonl
    DWDP_KERNELS=triton python examples/gsm8k_identity.py --data test.jsonl --device cuda --allow-shared-device \
        --max-batch-size 128

Both arms run the same number of ranks, batches and threads; EOS is ignored so that every question gives
`--max-tokens` tokens. A line for each arm says in which form its ranks computed. The last line is
`<equal> of <questions>`; the exit code is 1 unless all are equal.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from dwdp import LLM, SamplingParams
from dwdp.errors import DwdpError


def run(arguments: argparse.Namespace, prompts: list[str], *, replicated: bool) -> list[list[int]]:
    """Token ids of every prompt's completion."""
    if replicated:
        options = {"replicated": True}
    else:
        shared = {"allow_shared_device": True} if arguments.allow_shared_device else {}
        options = {"dwdp": shared, "dense_dwdp": {"enabled": True, "min_bytes": 1}}
    options |= {"device": arguments.device, "dtype": arguments.dtype, "max_batch_size": arguments.max_batch_size}
    params = SamplingParams(max_tokens=arguments.max_tokens, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    with LLM(arguments.model, ranks=arguments.ranks, quiet=True, **options) as llm:
        loaded = time.perf_counter()
        outputs = llm.generate(prompts, params)
        ended = time.perf_counter()
        report = llm.report()
    counters = [entry["counters"] for entry in report]
    name = "replicated" if replicated else "dwdp"
    tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
    print(
        f"{name}: {tokens} tokens, start {loaded - began:.1f} s, generation {ended - loaded:.1f} s, "
        f"kernels {[entry['kernels'] for entry in report]}, forwards {[c['forwards'] for c in counters]}, "
        f"copies {[c['copies'] for c in counters]}, demand fetches {[c['demand_fetches'] for c in counters]}, "
        f"fences {[c['fences'] for c in counters]}",
        flush=True,
    )
    return [list(o.outputs[0].token_ids) for o in outputs]


def questions(path: Path) -> list[str]:
    """Of a file with one JSON object a line. Raises ValueError naming the first line that is none, or no question."""
    found = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not text.strip():
            continue
        try:
            question = json.loads(text)["question"]
        except (TypeError, KeyError, ValueError):
            question = None
        if not isinstance(question, str):
            raise ValueError(f"{path}: line {number} is no JSON object with a question")
        found.append(question + "\n")
    if not found:
        raise ValueError(f"{path} has no question")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="GSM8K test.jsonl (MIT licence, OpenAI)")
    parser.add_argument("--model", default="nano-k3")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--allow-shared-device", action="store_true", help="ranks may be on one GPU")
    parser.add_argument("--max-batch-size", type=int, default=32, help="sequences that decode together, in both arms")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--limit", type=int, default=None, help="only the first LIMIT questions")
    arguments = parser.parse_args()
    if arguments.limit is not None and arguments.limit < 1:
        parser.error(f"--limit is {arguments.limit}: at least one question is compared")
    try:
        prompts = questions(arguments.data)[: arguments.limit]
        shared = run(arguments, prompts, replicated=False)
        whole = run(arguments, prompts, replicated=True)
    except (OSError, ValueError, DwdpError) as error:
        print(f"gsm8k_identity: {error}", file=sys.stderr)
        return 2
    equal = sum(a == b for a, b in zip(shared, whole, strict=True))
    print(f"{equal} of {len(prompts)}")
    return 0 if equal == len(prompts) else 1


if __name__ == "__main__":
    sys.exit(main())
