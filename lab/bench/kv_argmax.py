"""Best tokens and perplexity of a text by what type its KV has: chunks of 32 tokens, so nearly all is read from pages.

    PYTHONPATH=src python lab/bench/kv_argmax.py TEXT.txt [MODEL]
"""
import math
import sys
from pathlib import Path

from penstock import LLM, SamplingParams

TEXT, MODEL = Path(sys.argv[1]).read_text(), sys.argv[2] if len(sys.argv) > 2 else "demo"
PARTS = [TEXT[2000:5600], TEXT[60000:63600]]


def read(kept: str) -> tuple[list[int], list[float]]:
    best, losses = list[int](), list[float]()
    with LLM(MODEL, dtype="float32", device="cpu", max_model_len=2048, kv_cache_memory_bytes="200M", prefix_cache=False,
             max_num_batched_tokens=32, max_num_seqs=2, kv_cache_dtype=kept) as llm:
        for result in llm.generate(PARTS, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)):
            for token, said in zip(result.prompt_token_ids, result.prompt_logprobs, strict=True):
                if said:
                    best.append(max(said, key=lambda one: said[one].logprob))
                    losses.append(-said[token].logprob)
    return best, losses


(right, base), (found, lost) = read("auto"), read("fp8")
same = sum(a == b for a, b in zip(right, found, strict=True))
print(f"{len(base)} tokens: {same / len(base):.1%} have the best token of float32 KV; "
      f"perplexity {math.exp(sum(base) / len(base)):.2f}, fp8 {math.exp((sum(lost) - sum(base)) / len(base)) - 1:+.2%}")
