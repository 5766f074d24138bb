"""A model of MiniMax-M3's shape that recalls without training: its weights are written down, from random codes of
words.

Layer 0 reads all and gives each token the code of the one before it. Layers 1 and 2 select, and each KV head looks up
the keys of one class in four: its query is the code of a key, its keys are codes of what came before a token, its
values are codes of tokens. So an answer is there only if this KV head of this layer has read the block with the pair.

    V words   D residual stream   H head dim   N query heads   K KV heads
"""
from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import where
from driven import backends
from recall_engine import Model
from torch import Tensor

from penstock.eval import words
from penstock.kernels.fused import layer
from penstock.kernels.gemm import experts, linear
from penstock.model import registry as families

BLOCK, LAYERS = 16, 3
H, N, K, CLASSES = 128, 4, 2, 4
TURNED, SLOT = H // 2, 32               # dims that RoPE turns, and those of a class in a code
OWN, BEFORE, ANSWER, ONE, D = 0, H, 2 * H, 3 * H, 3 * H + 16       # where they lie in the residual stream
FREQUENCIES = 16                        # that tell one position from the next
CONFIG = {
    "model_type": "minimax_m3", "vocab_size": words.VOCAB, "hidden_size": D, "num_hidden_layers": LAYERS,
    "num_attention_heads": N, "num_key_value_heads": K, "head_dim": H, "rotary_dim": TURNED, "rope_theta": 1e4,
    "dense_intermediate_size": 16, "intermediate_size": 16, "shared_intermediate_size": 16, "num_local_experts": 2,
    "num_experts_per_tok": 1, "max_position_embeddings": 16384, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "moe_layer_freq": [0, 1, 1], "sparse_attention_config": {
        "sparse_attention_freq": [0, 1, 1], "sparse_num_index_heads": K, "sparse_index_dim": H,
        "sparse_block_size": BLOCK, "sparse_topk_blocks": 4}}


def codes() -> Tensor:
    """[V, H]: of length 1, a word's in the slot of its class."""
    found = torch.zeros(words.VOCAB, CLASSES, SLOT)
    drawn = torch.randn(words.VOCAB, SLOT, generator=torch.Generator().manual_seed(0))
    of = torch.arange(words.VOCAB)
    found[of, of % CLASSES] = drawn / drawn.norm(dim=1, keepdim=True)
    return found.flatten(1)


def position(shift: int) -> Tensor:
    """[H], of length 1: what RoPE makes the position, and `shift` more."""
    turn = shift * 1e4 ** (-torch.arange(FREQUENCIES) / (TURNED // 2))
    found = torch.zeros(H)
    found[:FREQUENCIES], found[TURNED // 2:TURNED // 2 + FREQUENCIES] = turn.cos(), turn.sin()
    return found / FREQUENCIES ** 0.5


def of_class(number: int, at: int) -> Tensor:
    """[H, H]: takes the class's slot of a code to dims from `at` on."""
    found = torch.zeros(H, H)
    found[at:at + SLOT, SLOT * number:SLOT * (number + 1)] = torch.eye(SLOT)
    return found


def layer_of(key: int) -> int:
    """Which layer looks this word up."""
    return 1 + key % CLASSES // K


def weights() -> Iterator[tuple[str, Tensor]]:
    """What is not named adds nothing."""
    own, before, answer = (slice(at, at + H) for at in (OWN, BEFORE, ANSWER))
    given = {name: torch.zeros(shape) for name, shape in families.tensor_shapes(CONFIG)}
    heads = {part: [w.view(-1, H, D) if part != "o_proj" else w.view(D, N, H) for i in range(LAYERS)
                    for w in [given[f"model.layers.{i}.self_attn.{part}.weight"]]] for part in (
        "q_proj", "k_proj", "v_proj", "o_proj")}
    given["model.embed_tokens.weight"][:, own] = codes()
    given["model.embed_tokens.weight"][:, ONE] = 1
    given["lm_head.weight"][:, answer] = 6 * codes()
    scale = (D / 2) ** -0.5             # undoes the norm before a layer, about
    for i in range(LAYERS):
        heads["v_proj"][i][:, :, own] = torch.eye(H)
        to = before if i == 0 else answer
        heads["o_proj"][i][to] = scale * torch.eye(H)[:, None] / (N if i == 0 else N // K)
        for name, gain in (("q_norm", 5), ("k_norm", 5)) if i == 0 else (("q_norm", 2), ("k_norm", 2)):
            given[f"model.layers.{i}.self_attn.{name}.weight"].fill_(gain)
    heads["q_proj"][0][:, :, ONE], heads["k_proj"][0][:, :, ONE] = position(-1), position(0)
    for i in range(1, LAYERS):
        index_q, index_k = (given[f"model.layers.{i}.self_attn.index_{part}_proj.weight"].view(-1, H, D)
                            for part in "qk")
        # Of blocks without the key the nearest: the choice does not hang on what rounding leaves.
        index_q[:, :, ONE] = index_k[:, :, ONE] = 0.1 * position(0)
        for h in range(K):
            number, at = K * (i - 1) + h, TURNED + SLOT * h
            index_q[h, :, own], found = of_class(number, at), of_class(number, at)
            index_k[0, :, before] += found
            heads["q_proj"][i][N // K * h:N // K * (h + 1), :, own] = of_class(number, TURNED)
            heads["k_proj"][i][h, :, before] = of_class(number, TURNED)
    yield from given.items()


@functools.cache
def model(topk: int, dtype: torch.dtype, stage=None):
    """The model, or one stage of it. topk: tokens that a query reads of each KV head."""
    sparse = {**CONFIG["sparse_attention_config"], "sparse_topk_blocks": topk // BLOCK}
    chosen = backends(("linear", "layer", "experts"))
    made = families.build({**CONFIG, "sparse_attention_config": sparse}, dtype=dtype,
                          linear=functools.partial(linear.pack, backend=chosen["linear"].name),
                          ops=layer.OP.use(chosen["layer"].name), stage=stage,
                          experts=experts.OP.use(chosen["experts"].name))
    for name, tensor in weights():
        if made.wants(name):
            made.load(name, tensor.to(where.DEVICE))
    made.finish()
    return made


BLOCKS = Model(model, LAYERS, BLOCK)
