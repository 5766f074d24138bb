"""Decode of the Qwen3-8B shape without grammars, all rows under a JSON schema, and all with penalties and
logprobs: tokens/s in turns, then what 100 steps of each do, by the profiler. Before that, what a tiny model
of random weights in float32 says to 32 prompts, most under masks, on the device and on its machine's CPU.

    PYTHONPATH=src:bench/device python lab/device/masks.py OUT [--tokens-only] [--layers 36] [--rounds 3]

Vocabularies are made up: every byte, words, and what JSON is written with.
"""
from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from penstock import LLM, SamplingParams
from penstock.config.request.grammar import Grammar

ITEM = {"type": "object", "additionalProperties": False, "required": ["name", "kind", "count"],
        "properties": {"name": {"type": "string"}, "kind": {"enum": ["a", "b", "cc"]},
                       "count": {"type": "integer"}}}
# No answer ends early.
SCHEMA = Grammar("json_schema", json.dumps({"type": "array", "minItems": 5000, "items": ITEM}))
DRAWN = {"temperature": 0.8, "top_p": 0.95, "seed": 1, "max_tokens": None}
ARMS = {"plain": SamplingParams(**DRAWN), "masked": SamplingParams(grammar=SCHEMA, **DRAWN),
        "penalties and logprobs": SamplingParams(
            frequency_penalty=0.5, presence_penalty=0.2, repetition_penalty=1.1, logprobs=5, **DRAWN)}
GREEDY = SamplingParams(temperature=0.0, max_tokens=None)
NEW = 128
TINY = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 128,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
        "intermediate_size": 256, "vocab_size": 620, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False}


def tokenizer_of(size: int) -> Tokenizer:
    """Of so many ids, the last one an end."""
    rng = random.Random(size)
    vocab = {piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for piece in ('{"', '":', '",', '"}', "},", 'Ġ"', "[{", "]}", '":Ġ"', '",Ġ"', "name", "kind", "count"):
        vocab[piece] = len(vocab)
    while len(vocab) < size - 1:
        word = "".join(rng.choices("etaoinshrdlucmfwypvbgk", k=rng.randrange(2, 9)))
        vocab.setdefault(rng.choice(("", "", "Ġ")) + word, len(vocab))
    raw = Tokenizer(models.BPE(vocab, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    return raw


# ---------------------------------------------------------------- the same tokens
def kinds() -> list[SamplingParams]:
    """Of 32 prompts."""
    grammars = (Grammar("json_schema", json.dumps(ITEM)), SCHEMA,
                Grammar("regex", "([a-z]+ [0-9]{2,3},? ?)+"),
                Grammar("choice", '["yes", "no", "perhaps not"]'))
    more: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0}, {"seed": 3}, {"seed": 4, "top_k": 40, "top_p": 0.9},
        {"temperature": 0.0, "frequency_penalty": 1.0, "repetition_penalty": 1.2, "logprobs": 3},
        {"seed": 5, "presence_penalty": 1.0, "min_p": 0.05}, {"temperature": 0.0, "logit_bias": {300: 1.0}},
        {"seed": 6, "temperature": 1.5})
    made = [SamplingParams(max_tokens=64, grammar=grammar, **one) for grammar in grammars for one in more]
    return [*made, *(SamplingParams(max_tokens=64, ignore_eos=True, **one) for one in more[:4])]


def tiny_model(folder: str) -> None:
    """Peaked enough that rounding moves no token."""
    from safetensors.torch import save_file

    from penstock.model import registry
    Path(folder, "config.json").write_text(json.dumps(TINY))
    Path(folder, "generation_config.json").write_text(json.dumps({"eos_token_id": 599}))
    tokenizer_of(600).save(f"{folder}/tokenizer.json")
    save_file({name: (tensor if "norm" in name else tensor * (12 if "lm_head" in name else 4)).contiguous()
               for name, tensor in registry.dummy_tensors(TINY, 1)}, f"{folder}/model.safetensors")


def tiny_tokens(folder: str, device: str) -> list[list[int]]:
    """What the tiny model says there to each prompt."""
    rng = random.Random(7)
    prompts = [{"prompt_token_ids": [rng.randrange(256, 590) for _ in range(rng.randrange(20, 300))]}
               for _ in kinds()]
    with LLM(folder, dtype="float32", device=device, max_num_seqs=32, hbm_bytes=1 << 30) as llm:
        return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, kinds(), use_tqdm=False)]


def compared() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        tiny_model(folder)
        want, got = (tiny_tokens(folder, device) for device in ("cpu", "cuda"))
    return {"arm": "tokens equal to a CPU's, float32", "prompts": len(want),
            "equal": sum(a == b for a, b in zip(want, got, strict=True)), "tokens": sum(map(len, got)),
            "first_difference": [next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
                                      min(len(a), len(b)))
                                 for a, b in zip(want, got, strict=True) if a != b]}


# ---------------------------------------------------------------- speed
def measured(layers: int, requests: int, prompt: int, rounds: int, steps: int) -> list[dict[str, Any]]:
    from direct import QWEN3_8B, Direct, build_model
    from steps import LEAD, TAIL, profiled, prompts_of, report

    from penstock.exec.sampling.grammar import Grammars, Vocabulary
    config = QWEN3_8B | {"num_hidden_layers": layers}
    raw = tokenizer_of(151_669)
    grammars = Grammars(lambda: Vocabulary(raw.to_str(), (151_668,)))
    longest = prompt + max(NEW, LEAD + steps + TAIL + requests) + 32
    engine = Direct(build_model(config), rows=requests, max_len=longest, buckets=(requests,),
                    hbm_tokens=requests * (longest + 64), prefix_cache=True, grammars=grammars)
    prompts = prompts_of(requests, prompt)
    engine.run(prompts, 4)                          # from now on they are cached
    mean: dict[str, list[float]] = {arm: [] for arm in ARMS}
    middle: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for again in range(rounds + 1):                 # the first one warms up
        for arm, params in ARMS.items():
            ran = engine.run(prompts, NEW, params=params)
            assert all(len(said) == NEW for said in ran.tokens.values()), "a request has failed"
            if again:
                mean[arm].append(sum(ran.step_s[4:]) / len(ran.step_s[4:]))
                middle[arm].append(median(ran.step_s[4:]))
    rows: list[dict[str, Any]] = []
    for arm, params in ({"greedy": GREEDY} | ARMS).items():
        row: dict[str, Any] = {"arm": arm, "requests": requests, "prompt": prompt}
        if arm in mean:
            row |= {"tokens_s": [round(requests / s, 1) for s in mean[arm]],
                    "median_step_ms": [round(1e3 * s, 3) for s in middle[arm]],
                    "over_plain": [round(a / b, 4) for a, b in zip(mean["plain"], mean[arm], strict=True)]}
        rows.append(row | report(profiled(engine, prompts, steps, params), steps))
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens-only", action="store_true")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    from direct import write
    rows = [compared()]
    if not args.tokens_only:
        rows += measured(args.layers, args.requests, args.prompt, args.rounds, args.steps)
    write("masks", args.out, rows)


if __name__ == "__main__":
    main()
