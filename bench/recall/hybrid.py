"""The hybrid recall model for training: plain torch, parameters named as transformers' qwen3_next names them.

`B` rows, `T` tokens, `D` width, `N` heads of states with keys of `S` and values of `V`, `C` chunks of 64
tokens. The one layer that attends is the first: what it sees has no neighbours yet, so pairs can only be kept
in the states of the others.
"""

import torch
import torch.nn.functional as F
from net import MLP, How, Lookup, initialise, linear
from torch import Tensor, nn

from penstock.eval import words

D, HEADS, KV_HEADS, HEAD, ROPE = 256, 4, 2, 64, 16
N, S, V, TAPS, CHUNK = 8, 64, 64, 4, 64
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


def delta(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, write: Tensor) -> Tensor:
    """The gated delta rule in chunks: q, k [B, N, T, S], v [B, N, T, V], decay (its logarithm) and write
    [B, N, T], all float32; returns [B, N, T, V]. T is cut into chunks of CHUNK or is shorter."""
    tokens = q.shape[2]
    size = min(CHUNK, tokens)
    q, k, v = (x.unflatten(2, (-1, size)) for x in (q, k, v))
    decay, write = decay.unflatten(2, (-1, size)).cumsum(-1), write.unflatten(2, (-1, size))[..., None]
    upper = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(upper, float("-inf")).exp()
    eye = torch.eye(size, device=q.device)
    lower = ((k * write) @ k.transpose(-1, -2) * between).tril(-1) + eye
    inverse = Inverse.apply(lower)
    grown = decay.exp()[..., None]
    values, asked = inverse @ (v * write), inverse @ (k * write * grown)
    inside = q @ k.transpose(-1, -2) * between
    q = q * grown
    k = k * (decay[..., -1:] - decay).exp()[..., None]
    last = decay[..., -1].exp()[..., None, None]
    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    out = []
    for c in range(q.shape[2]):
        fresh = values[:, :, c] - asked[:, :, c] @ state
        out.append(q[:, :, c] @ state + inside[:, :, c] @ fresh)
        state = state * last[:, :, c] + k[:, :, c].transpose(-1, -2) @ fresh
    return torch.stack(out, 2).flatten(2, 3)


class GatedDelta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_proj_qkvz, self.in_proj_ba = linear(D, N * (2 * S + 2 * V)), linear(D, 2 * N)
        self.conv1d = nn.Conv1d(N * (2 * S + V), N * (2 * S + V), TAPS, groups=N * (2 * S + V), bias=False)
        # Slow to forget: what is asked for is thousands of tokens back.
        self.dt_bias = nn.Parameter(torch.full((N,), -3.0))
        self.A_log = nn.Parameter(torch.linspace(-7.0, -3.0, N))
        self.norm = nn.RMSNorm(V, eps=1e-6)
        self.out_proj = linear(N * V, D)

    def forward(self, x_BTD: Tensor) -> Tensor:
        tokens = x_BTD.shape[1]
        mixed = self.in_proj_qkvz(x_BTD).float().unflatten(-1, (N, -1))
        q, k, v, z = (part.flatten(2) for part in mixed.split([S, S, V, V], -1))
        b, a = self.in_proj_ba(x_BTD).float().unflatten(-1, (N, 2)).unbind(-1)
        y = F.pad(torch.cat([q, k, v], -1), (0, 0, TAPS - 1, 0))
        y = F.silu(sum(y[:, i : i + tokens] * self.conv1d.weight[:, 0, i] for i in range(TAPS)))
        q, k, v = (
            part.unflatten(-1, (N, -1)).transpose(1, 2) for part in y.split([N * S, N * S, N * V], -1)
        )
        q, k = (p * torch.rsqrt((p * p).sum(-1, keepdim=True) + 1e-6) for p in (q, k))
        decay = -self.A_log.exp() * F.softplus(a + self.dt_bias)
        with torch.autocast(x_BTD.device.type, enabled=False):
            out = delta(q * S**-0.5, k, v, decay.transpose(1, 2), b.sigmoid().transpose(1, 2))
        out = self.norm(out.transpose(1, 2)).flatten(2) * F.silu(z)
        return self.out_proj(out)


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
    """As `net.Recall`, without an indexer."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.ModuleList(Block(kind) for kind in LAYERS)
        self.model = nn.ModuleDict(
            {"embed_tokens": nn.Embedding(words.VOCAB, D), "layers": layers, "norm": Norm(D)}
        )
        self.lm_head = linear(D, words.VOCAB)
        initialise(self)

    def forward(self, ids_BT: Tensor, how: How) -> tuple[Tensor, Tensor]:
        """Logits [B, T, vocabulary], and no loss of an indexer."""
        x = Lookup.apply(self.model["embed_tokens"].weight, ids_BT)
        for block in self.model["layers"]:
            x = block(x)
        return self.lm_head(self.model["norm"](x)), x.new_zeros(())

    def parts(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        return list(self.parameters()), []
