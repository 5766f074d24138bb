"""The demo model over weights that stay as packed as its file: the same answers as in float32."""
from __future__ import annotations

import json

import pytest

from penstock import LLM, SamplingParams
from penstock.config.base.errors import ConfigError

PROMPTS = ["The capital of France is", "Once upon a time, in a small village by the sea,",
           "def fibonacci(n):", "Water boils at", "List three colours:", "Der schnelle braune Fuchs",
           "Q: What is the largest planet?\nA:", "1, 2, 3, 5, 8,"]
TINY = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64, "hidden_act": "silu", "tie_word_embeddings": False}
TIE = 1e-2          # nats between the two best, below which either may be taken


@pytest.mark.covers(weights="packed")
def test_codes_answer_as_floats_do():
    params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=2, ignore_eos=True)
    answers = {}
    for dtype in ("gguf", "float32"):
        with LLM("demo", dtype=dtype, kv_cache_memory_bytes="100M") as llm:
            answers[dtype] = [result.outputs[0] for result in llm.generate(PROMPTS, params)]
    same = 0
    for packed, exact in zip(answers["gguf"], answers["float32"], strict=True):
        for ours, theirs, best in zip(packed.token_ids, exact.token_ids, exact.logprobs, strict=True):
            if ours != theirs:
                first, second = sorted((one.logprob for one in best.values()), reverse=True)[:2]
                assert first - second < TIE, (ours, theirs, best)
                break
            same += 1
    assert same > 100                       # ties are rare: most answers agree to the end


def test_a_model_without_blocks_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"--dtype gguf: .* is neither a \.gguf file nor"), \
            LLM(str(tmp_path), dtype="gguf"):
        pass
