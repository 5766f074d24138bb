"""The hybrid recall model for training: plain torch, parameters named as transformers' qwen3_next names them.

`B` rows, `T` tokens, `D` width, `N` heads of states with keys of `S` and values of `V`, `C` chunks of 64
tokens. The one layer that attends is the first: what it sees has no neighbours yet, so pairs can only be kept
in the states of the others.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from net import MLP, How, Lookup, initialise, linear
from torch import Tensor, nn

from penstock.eval import words

D, HEADS, KV_HEADS, HEAD, ROPE = 256, 4, 2, 64, 16
N, S, V, TAPS, CHUNK = 4, 128, 128, 4, 64
LAYERS = ["full_attention", "linear_attention", "linear_attention", "linear_attention"]
CONFIG = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": words.VOCAB,
    "hidden_size": D,
    "intermediate_size": 2 * D,
    "num_hidden_layers": len(LAYERS),
    "layer_types": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "linear_num_value_heads": N,
    "linear_num_key_heads": N,
    "linear_key_head_dim": S,
    "linear_value_head_dim": V,
    "linear_conv_kernel_dim": TAPS,
    "num_experts": 0,
    "mlp_only_layers": list(range(len(LAYERS))),
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 16384,
    "rope_theta": 10000.0,
    "partial_rotary_factor": ROPE / HEAD,
    "bos_token_id": None,
    "eos_token_id": words.END,
    "pad_token_id": None,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
}


class Norm(nn.Module):
    """RMSNorm in float32, times 1 + w."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], 1 + self.weight, 1e-6)


class Inverse(torch.autograd.Function):
    """Of unit lower triangular matrices [..., C, C], from blocks of one row on, each twice as large."""

    @staticmethod
    def forward(ctx, lower: Tensor) -> Tensor:
        size = lower.shape[-1]
        blocks = lower.new_ones(*lower.shape[:-2], size, 1, 1)
        width = 1
        while width < size:
            pairs = size // (2 * width)
            grid = lower.unflatten(-1, (pairs, 2 * width)).unflatten(-3, (pairs, 2 * width))
            below = grid.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)[..., width:, :width]
            first, second = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
            corner = -second @ below @ first
            blocks = torch.cat(
                [F.pad(first, (0, width)), torch.cat([corner, second], -1)],
                -2,
            )
            width *= 2
        inverse = blocks[..., 0, :, :]
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        turned = inverse.transpose(-1, -2)
        return -(turned @ grad @ turned)


def fused(work: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled where it runs on a GPU: there memory is what these wait for, and they are most of a step."""
    compiled = torch.compile(work, dynamic=False)

    @functools.wraps(work)
    def call(first: Tensor, *rest: Tensor) -> Any:
        return (compiled if first.is_cuda else work)(first, *rest)

    return call


@fused
def prepared(
    qkvz: Tensor, ba: Tensor, taps: Tensor, dt_bias: Tensor, A_log: Tensor, age: Tensor
) -> tuple[Tensor, ...]:
    """What `delta` reads, [chunks, N, ...] each, float32. Its shapes do not depend on the length of a row.

    qkvz [tokens, N * (2 S + 2 V)] and ba [tokens, 2 N] of all rows, one behind the other;
    taps [N * (2 S + V), 1, TAPS]; age [tokens]: how many tokens of its row each has before it.
    """
    mixed = qkvz.float().unflatten(-1, (N, -1))
    q, k, v, _ = (part.flatten(1) for part in mixed.split([S, S, V, V], -1))
    b, a = ba.float().unflatten(-1, (N, 2)).unbind(-1)
    x = torch.cat([q, k, v], -1)
    y = x * taps[:, 0, TAPS - 1]
    for i in range(1, TAPS):
        y = y + F.pad(x, (0, 0, i, 0))[: len(x)] * (age >= i)[:, None] * taps[:, 0, TAPS - 1 - i]
    parts = F.silu(y).split([N * S, N * S, N * V], -1)
    q, k, v = (part.view(-1, CHUNK, N, part.shape[-1] // N).transpose(1, 2) for part in parts)
    q, k = (p * torch.rsqrt((p * p).sum(-1, keepdim=True) + 1e-6) for p in (q, k))
    q = q * S**-0.5
    decay = (-A_log.exp() * F.softplus(a + dt_bias)).view(-1, CHUNK, N).transpose(1, 2).cumsum(-1)
    write = b.sigmoid().view(-1, CHUNK, N).transpose(1, 2)[..., None]
    at = torch.arange(CHUNK, device=q.device)
    between = decay[..., :, None] - decay[..., None, :]
    between = between.masked_fill(at[:, None] < at, float("-inf")).exp()
    lower = (k * write) @ k.transpose(-1, -2) * between
    lower = torch.where(at[:, None] > at, lower, (at[:, None] == at).float())
    grown = decay.exp()[..., None]
    inside = q @ k.transpose(-1, -2) * between
    left = (decay[..., -1:] - decay).exp()[..., None]
    return q * grown, k * left, v * write, k * write * grown, lower, inside, decay[..., -1].exp()


def before(turn: Tensor, add: Tensor) -> Tensor:
    """The state that each chunk begins with, of a row's first with 0: S' = turn S + add, [C, B * N, S, S] and
    [C, B * N, S, V]. One chunk behind the other: rounds of all would read and write turns log C times."""
    states = [torch.zeros_like(add[0])]
    for each, more in zip(turn[:-1].unbind(), add[:-1].unbind(), strict=True):
        states.append(torch.baddbmm(more, each, states[-1]))
    return torch.stack(states)


def delta(
    rows: int, q: Tensor, k: Tensor, v: Tensor, asked: Tensor, lower: Tensor, inside: Tensor, last: Tensor
) -> Tensor:
    """The gated delta rule over what `prepared` returns: [chunks, N, CHUNK, V]."""
    inverse = Inverse.apply(lower)
    values, asked = inverse @ v, inverse @ asked
    turned = k.transpose(-1, -2)
    eye = torch.eye(S, device=q.device)
    turn, add = last[..., None, None] * eye - turned @ asked, turned @ values
    state = before(*(x.unflatten(0, (rows, -1)).transpose(0, 1).flatten(1, 2) for x in (turn, add)))
    state = state.unflatten(1, (rows, N)).transpose(0, 1).flatten(0, 1)
    return q @ state + inside @ (values - asked @ state)


@fused
def gated(out: Tensor, qkvz: Tensor, weight: Tensor) -> Tensor:
    """out [chunks, N, CHUNK, V] normalised, times the gate in qkvz: [tokens, N * V]."""
    z = qkvz.float().unflatten(-1, (N, -1))[..., -V:]
    out = out.transpose(1, 2).flatten(0, 1)
    out = out * torch.rsqrt((out * out).mean(-1, keepdim=True) + 1e-6) * weight
    return (out * F.silu(z)).flatten(1)


class GatedDelta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_proj_qkvz, self.in_proj_ba = linear(D, N * (2 * S + 2 * V)), linear(D, 2 * N)
        self.conv1d = nn.Conv1d(N * (2 * S + V), N * (2 * S + V), TAPS, groups=N * (2 * S + V), bias=False)
        # Over 4,096 tokens a state loses 2.5 %: what is asked for is thousands of tokens back.
        self.dt_bias = nn.Parameter(torch.full((N,), -6.0))
        self.A_log = nn.Parameter(torch.full((N,), -6.0))
        self.norm = nn.RMSNorm(V, eps=1e-6)
        self.out_proj = linear(N * V, D)

    def look_up(self) -> None:
        """Begins as one who looks up: each word is written under the word before it, and asked for by the
        same projection. From random taps nothing is learnt for 1,000 steps."""
        rows = self.in_proj_qkvz.weight.view(N, 2 * S + 2 * V, D)
        rows[:, S : 2 * S] = rows[:, :S]
        keys = slice(N * S, 2 * N * S)
        taps = self.conv1d.weight.zero_()[:, 0]
        taps[:, -1] = 1
        taps[keys] = taps[keys].roll(-1, -1)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """T: a multiple of CHUNK."""
        rows, tokens = x_BTD.shape[:2]
        qkvz, ba = (w(x_BTD).flatten(0, 1) for w in (self.in_proj_qkvz, self.in_proj_ba))
        age = torch.arange(tokens, device=x_BTD.device).repeat(rows)
        with torch.autocast(x_BTD.device.type, enabled=False):
            out = delta(rows, *prepared(qkvz, ba, self.conv1d.weight, self.dt_bias, self.A_log, age))
            out = gated(out, qkvz, self.norm.weight)
        return self.out_proj(out).unflatten(0, (rows, tokens))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = linear(D, 2 * HEADS * HEAD)
        self.k_proj, self.v_proj = linear(D, KV_HEADS * HEAD), linear(D, KV_HEADS * HEAD)
        self.q_norm, self.k_norm, self.o_proj = Norm(HEAD), Norm(HEAD), linear(HEADS * HEAD, D)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, gate = self.q_proj(x_BTD).unflatten(-1, (HEADS, 2 * HEAD)).chunk(2, -1)
        k, v = (w(x_BTD).unflatten(-1, (KV_HEADS, HEAD)) for w in (self.k_proj, self.v_proj))
        rates = 10000.0 ** (-torch.arange(0, ROPE, 2, device=q.device) / ROPE)
        turn = torch.arange(q.shape[1], device=q.device)[:, None, None] * rates
        q, k = (rotated(x, turn.cos(), turn.sin()) for x in (self.q_norm(q), self.k_norm(k)))
        each = HEADS // KV_HEADS
        k, v = (x.repeat_interleave(each, 2) for x in (k, v))
        q, k, v = (x.transpose(1, 2).to(v.dtype) for x in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.o_proj((y * gate.sigmoid()).flatten(2))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first ROPE of x [B, T, N, HEAD], in halves."""
    a, b, rest = x.split([ROPE // 2, ROPE // 2, HEAD - ROPE], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm, self.mlp = Norm(D), Norm(D), MLP()
        self.mixer = "self_attn" if kind == "full_attention" else "linear_attn"
        self.add_module(self.mixer, Attention() if kind == "full_attention" else GatedDelta())

    def forward(self, x: Tensor) -> Tensor:
        x = x + getattr(self, self.mixer)(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Recall(nn.Module):
    """As `net.Recall`, without an indexer. The head begins as the embeddings: what is found is said."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.ModuleList(Block(kind) for kind in LAYERS)
        self.model = nn.ModuleDict(
            {"embed_tokens": nn.Embedding(words.VOCAB, D), "layers": layers, "norm": Norm(D)}
        )
        self.lm_head = linear(D, words.VOCAB)
        initialise(self)
        with torch.no_grad():
            self.lm_head.weight.copy_(self.model["embed_tokens"].weight * D**-0.5)
            for block in layers:
                if block.mixer == "linear_attn":
                    block.linear_attn.look_up()

    def forward(self, ids_BT: Tensor, how: How) -> tuple[Tensor, Tensor]:
        """Logits [B, T, vocabulary], and no loss of an indexer."""
        x = Lookup.apply(self.model["embed_tokens"].weight, ids_BT)
        for block in self.model["layers"]:
            x = block(x)
        return self.lm_head(self.model["norm"](x)), x.new_zeros(())

    def parts(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        return list(self.parameters()), []
