"""A GGUF that stays packed: its greedy tokens on a GPU beside a CPU's.

    PYTHONPATH=src python lab/device/gguf_tokens.py FILE.gguf|demo [--devices cpu cuda]

A CPU computes in float32, a GPU in bfloat16: an answer ends at the first token that differs, and it counts as wrong
if the CPU has its two best further apart than CLEAR. Exit status 1: an answer is wrong.
"""
from __future__ import annotations

import argparse
import sys

from penstock import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Once upon a time, in a small village by the sea,", "def fibonacci(n):",
           "Water boils at", "List three colours:", "Der schnelle braune Fuchs", "1, 2, 3, 5, 8,",
           "Q: What is the largest planet?\nA:"]
TOKENS, CLEAR = 32, 0.2         # nats

options = argparse.ArgumentParser()
options.add_argument("model")
options.add_argument("--devices", nargs=2, default=["cpu", "cuda"])
given = options.parse_args()
params, answers = SamplingParams(temperature=0.0, max_tokens=TOKENS, logprobs=2, ignore_eos=True), []
for device in given.devices:
    with LLM(given.model, dtype="gguf", device=device, kv_cache_memory_bytes="100M", max_model_len=512) as llm:
        answers.append([result.outputs[0] for result in llm.generate(PROMPTS, params)])
same = wrong = 0
for prompt, exact, found in zip(PROMPTS, *answers, strict=True):
    for i, (right, token) in enumerate(zip(exact.token_ids, found.token_ids, strict=True)):
        if right != token:
            best, next_best = sorted((one.logprob for one in exact.logprobs[i].values()), reverse=True)[:2]
            wrong += best - next_best > CLEAR
            print(f"{prompt!r}: token {i} differs, {best - next_best:.3f} nats apart")
            break
        same += 1
print(f"{same} of {TOKENS * len(PROMPTS)} tokens are equal; {wrong} answers are wrong")
sys.exit(wrong > 0)
