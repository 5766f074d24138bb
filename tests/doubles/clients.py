"""Processes under a server, and what a client hears when one of them is killed."""
from __future__ import annotations

import random
import socket
from pathlib import Path

import httpx

WAIT_S = 60
TINY = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 512, "hidden_size": 64,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "tie_word_embeddings": False}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def children(pid: int) -> list[int]:
    """Processes that any thread of `pid` has started, and theirs; none of one that is gone."""
    try:
        own = [int(child) for task in Path(f"/proc/{pid}/task").iterdir()
               for child in (task / "children").read_text().split()]
    except OSError:
        return []
    return own + [child for one in own for child in children(one)]


def ask(url: str, seed: int) -> str:
    """What a client hears of a long request: its error's code, or that the connection broke."""
    prompt = random.Random(seed).choices(range(512), k=100 + 50 * seed)
    try:
        answer = httpx.post(f"{url}/v1/completions", timeout=WAIT_S, json={
            "prompt": prompt, "max_tokens": 3500, "temperature": 0, "ignore_eos": True})
    except httpx.TransportError as e:
        return type(e).__name__
    told = answer.json()["error"]
    assert answer.status_code == 503 and set(told) == {"message", "type", "param", "code"}, answer.text
    return told["code"]
