"""Random weights whose choices survive rounding: which tokens or blocks an indexer selects, and which experts a router.

Scores of random weights lie so near to each other that what bfloat16 rounds away decides which are chosen, and then
logits are others. Here the first dims of the residual stream say a token's class, and no layer adds to them. Routers
and index queries read those alone. A query of MLA looks for one class, of which a context has fewer tokens than are
selected: these score above 0, all others exactly 0, and of equals the first positions are taken. A query of blocks
looks for one class too, and prefers near blocks by a wide step.

    V words   D model dim
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

CLASSES = 16
# What a config needs: dims for the classes in the stream, in queries of low rank and in index heads beside what turns.
WIDE = {"hidden_size": 64, "q_lora_rank": 48, "index_head_dim": 32, "head_dim": 32}
KEPT = 1e-3             # of what layers add to the classes' dims: not 0, which some formats cannot scale
LESS = .25              # of a score, so that what layers add to the classes' dims scores 0
TURN, PHASE, NEAR = 2, .6, .7       # the pair of RoPE that counts how far a block is, .01 a token; its phase, its size


def steady(config: Mapping[str, Any]) -> Callable[[str, Tensor], Tensor]:
    """change(name, tensor): the tensor of a checkpoint of MLA with an indexer, or of MiniMax-M3's shape; the config
    has WIDE."""
    eye, heads = torch.eye(CLASSES), config["index_n_heads"]
    turned = config["qk_rope_head_dim"] if "qk_rope_head_dim" in config else config["rotary_dim"]

    def change(name: str, tensor: Tensor) -> Tensor:
        part, layer = name.rpartition("layers.")[2], int((name.split("layers.")[1:] or ["0"])[0].split(".")[0])
        found = tensor.clone()
        if "embed_tokens" in part:
            found[:, :CLASSES] = eye[torch.arange(len(tensor)) % CLASSES] / 2
        elif "lm_head" in part:
            found /= 2 if "qk_rope_head_dim" in config else 4       # M3's norms are twice as large
        elif part.endswith(("o_proj.weight", "down_proj.weight")):
            found /= 2
            found[:CLASSES] *= KEPT
        elif part.endswith(("gate.weight", "indexer.weights_proj.weight", "indexer.wk.weight", "indexer.wq_b.weight",
                            "index_q_proj.weight", "index_k_proj.weight", "_bias", "k_norm.bias")):
            found.zero_()
        if part.endswith("gate.weight"):
            for number in range(CLASSES):
                found[number % len(found), number], found[(number + 1) % len(found), number] = 2, 1
        elif part.endswith("indexer.weights_proj.weight"):
            found[:, :CLASSES] = 1
        elif part.endswith("indexer.wk.weight"):
            found[turned:turned + CLASSES, :CLASSES] = eye
        elif part.endswith("indexer.k_norm.bias"):
            found[-1] = 1
        elif part.endswith("q_a_proj.weight"):
            found[:CLASSES] = 0
            found[:CLASSES, :CLASSES] = eye
        elif part.endswith("indexer.wq_b.weight"):
            found.view(heads, -1, found.shape[1])[:, -1, :CLASSES] = -LESS
            for number in range(CLASSES):           # a head for each class, another class in each layer
                found.view(heads, -1, found.shape[1])[
                    number % heads, turned + (number + 5 * layer) % CLASSES, number] = 1
        elif part.endswith("index_k_proj.weight"):
            found[turned:turned + CLASSES, :CLASSES] = eye
            found[TURN, :CLASSES] = NEAR
        elif part.endswith("index_q_proj.weight"):
            for head, rows in enumerate(found.view(heads, -1, found.shape[1])):
                rows[turned:turned + CLASSES, :CLASSES] = eye.roll(5 * layer + head, 0)
                rows[TURN, :CLASSES] = NEAR * torch.tensor(PHASE).cos()
                rows[TURN + turned // 2, :CLASSES] = NEAR * torch.tensor(PHASE).sin()
        return found
    return change


def faint(name: str, tensor: Tensor) -> Tensor:
    """The tensor of a llama with fp8 KV out of a GGUF: layers add half as much, and logits are .3 of theirs. A value
    that is rounded may have the next code of fp8, which moves logprobs by .034 then, else .18; another's page by .3."""
    if name == "model.norm.weight":
        return tensor * .3
    return tensor / 2 if name.endswith(("o_proj.weight", "down_proj.weight")) else tensor
