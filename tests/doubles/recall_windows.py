"""A model with sliding windows that recalls without training: its weights are written down, as in `recall_blocks`.

Layer 0 reads all and gives each token the code of the one before it. Layers 1 and 2 have a window, and each KV head
looks up the keys of one class in four there: an answer is in the window of its layer, or nowhere.

    V words   D residual stream   H head dim   N query heads   K KV heads
"""
from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import where
from driven import backends
from recall_blocks import ANSWER, BEFORE, ONE, OWN, D, H, K, N, codes, of_class
from recall_engine import Model
from torch import Tensor

from penstock.eval import words
from penstock.kernels.fused import layer
from penstock.kernels.gemm import linear
from penstock.model import registry as families

LAYERS, WINDOW, THETA = 3, 600, 1e9
# RoPE turns dims in pairs, H // 2 apart, the first ones fast: these tell positions apart, codes are in slow ones.
FREQUENCIES, SLOW = 16, 32
CONFIG = {
    "model_type": "qwen3", "vocab_size": words.VOCAB, "hidden_size": D, "num_hidden_layers": LAYERS,
    "num_attention_heads": N, "num_key_value_heads": K, "head_dim": H, "rope_theta": THETA, "intermediate_size": 16,
    "max_position_embeddings": 16384, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "use_sliding_window": True,
    "sliding_window": WINDOW, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}


def position(shift: int) -> Tensor:
    """[H], of length 1: what RoPE makes the position, and `shift` more."""
    turn, found = shift * THETA ** (-torch.arange(FREQUENCIES) / (H // 2)), torch.zeros(H)
    found[:FREQUENCIES], found[H // 2:H // 2 + FREQUENCIES] = turn.cos(), turn.sin()
    return found / FREQUENCIES ** 0.5


def weights() -> Iterator[tuple[str, Tensor]]:
    """What is not named adds nothing."""
    own, before, answer = (slice(at, at + H) for at in (OWN, BEFORE, ANSWER))
    given = {name: torch.zeros(shape) for name, shape in families.tensor_shapes(CONFIG)}
    given["model.embed_tokens.weight"][:, own] = codes()
    given["model.embed_tokens.weight"][:, ONE] = 1
    given["lm_head.weight"][:, answer] = 6 * codes()
    scale = (D / 2) ** -0.5             # undoes the norm before a layer, about
    for name, tensor in given.items():
        if name.endswith("norm.weight"):
            tensor.fill_((6 if "layers.0." in name else 3) if name.endswith(("q_norm.weight", "k_norm.weight")) else 1)
    for i in range(LAYERS):
        q, k, v, o = (given[f"model.layers.{i}.self_attn.{part}_proj.weight"] for part in "qkvo")
        q, k, v, o = q.view(N, H, D), k.view(K, H, D), v.view(K, H, D), o.view(D, N, H)
        v[:, :, own] = torch.eye(H)
        o[before if i == 0 else answer] = scale * torch.eye(H)[:, None] / (N if i == 0 else N // K)
        if i == 0:
            q[:, :, ONE], k[:, :, ONE] = position(-1), position(0)
            continue
        for h in range(K):
            found = of_class(K * (i - 1) + h, SLOW)
            q[N // K * h:N // K * (h + 1), :, own], k[h, :, before] = found, found
    yield from given.items()


@functools.cache
def model(_topk: int, dtype: torch.dtype, stage=None):
    """The model, or one stage of it."""
    chosen = backends(("linear", "layer"))
    made = families.build(CONFIG, dtype=dtype, linear=functools.partial(linear.pack, backend=chosen["linear"].name),
                          ops=layer.OP.use(chosen["layer"].name), stage=stage)
    for name, tensor in weights():
        if made.wants(name):
            made.load(name, tensor.to(where.DEVICE))
    made.finish()
    return made


WINDOWS = Model(model, LAYERS, 0)
