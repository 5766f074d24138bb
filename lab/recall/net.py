"""The recall model for training: plain torch, parameters named as transformers' deepseek_v32 names them.

`B` rows, `T` tokens, `D` width, `N` heads, `R` sampled query positions. It has no cache and no decode: whole
sequences only. Three modes: "dense" (indexer unused), "warm" (dense, the indexer learns where attention goes,
the rest is frozen), "joint" (each token attends to the index_topk that the indexer chose, both learn).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.eval import words

CONFIG = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "vocab_size": words.VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 4,  # every layer: no experts
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 192,
    "kv_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 256,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 16384,
    "rope_theta": 10000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": None,
    "eos_token_id": words.END,
    "pad_token_id": None,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
}
D, N, NOPE, ROPE, LATENT, QRANK = 256, 8, 32, 16, 96, 192
INDEX_HEADS, INDEX_DIM = 8, 32
NEVER = -1e30


class Lookup(torch.autograd.Function):
    """weight[ids], with a backward pass that a CUDA graph can hold: no sort, no wait."""

    @staticmethod
    def forward(ctx, weight: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = weight.shape[0]
        return weight[ids]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        grad = grad.flatten(0, -2)
        return grad.new_zeros(ctx.rows, grad.shape[-1]).index_add_(0, ids.flatten(), grad), None


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Norm(nn.RMSNorm):
    """RMSNorm in float32: mixed types have no fused kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


def norm(width: int) -> Norm:
    return Norm(width, eps=1e-6)


def angles(tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos, sin [T, ROPE / 2] in float32."""
    rates = 10000.0 ** (-torch.arange(0, ROPE, 2, device=device) / ROPE)
    turn = torch.arange(tokens, device=device)[:, None] * rates
    return turn.cos(), turn.sin()


def turned(x: Tensor, rope: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """x [..., T, ROPE] rotated; pairs are neighbours (attention) or half the width apart (indexer)."""
    cos, sin = rope[0].to(x.dtype), rope[1].to(x.dtype)
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Indexer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq_b, self.wk = linear(QRANK, INDEX_HEADS * INDEX_DIM), linear(D, INDEX_DIM)
        self.k_norm = nn.LayerNorm(INDEX_DIM, eps=1e-6)
        self.weights_proj = linear(D, INDEX_HEADS)

    def forward(
        self, x_BTD: Tensor, q_BTQ: Tensor, rope: tuple[Tensor, Tensor], rows_R: Tensor | None
    ) -> Tensor:
        """Scores [B, R or T, T] in float32, of the query positions rows_R or of all."""
        k = self.k_norm(self.wk(x_BTD))
        k = torch.cat([turned(k[..., :ROPE], rope, False), k[..., ROPE:]], -1)
        if rows_R is not None:
            x_BTD, q_BTQ, rope = x_BTD[:, rows_R], q_BTQ[:, rows_R], (rope[0][rows_R], rope[1][rows_R])
        q = self.wq_b(q_BTQ).unflatten(-1, (INDEX_HEADS, INDEX_DIM)).transpose(1, 2)
        q = torch.cat([turned(q[..., :ROPE], rope, False), q[..., ROPE:]], -1)
        weights = self.weights_proj(x_BTD).float() * (INDEX_HEADS * INDEX_DIM) ** -0.5
        total = 0.0
        for head in range(INDEX_HEADS):
            total = total + F.relu(q[:, head] @ k.transpose(-1, -2)) * weights[..., head, None]
        return total


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_a_proj, self.q_a_layernorm = linear(D, QRANK), norm(QRANK)
        self.q_b_proj = linear(QRANK, N * (NOPE + ROPE))
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = linear(D, LATENT + ROPE), norm(LATENT)
        self.kv_b_proj = linear(LATENT, N * 2 * NOPE)
        self.o_proj = linear(N * NOPE, D)
        self.indexer = Indexer()

    def forward(self, x: Tensor, how: "How") -> tuple[Tensor, Tensor]:
        """The layer's output [B, T, D], and KL(attention || indexer), 0 in "dense"."""
        residual = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(residual).unflatten(-1, (N, NOPE + ROPE)).transpose(1, 2)
        q = torch.cat([q[..., :NOPE], turned(q[..., NOPE:], how.rope, True)], -1)
        both = self.kv_a_proj_with_mqa(x)
        shared = turned(both[..., LATENT:].unsqueeze(1), how.rope, True)
        kv = (
            self.kv_b_proj(self.kv_a_layernorm(both[..., :LATENT]))
            .unflatten(-1, (N, 2 * NOPE))
            .transpose(1, 2)
        )
        k = torch.cat([kv[..., :NOPE], shared.expand(-1, N, -1, -1)], -1)
        # Padded to the width of q and k: the fast kernels want one width.
        v = F.pad(kv[..., NOPE:], (0, ROPE))
        if how.mode == "dense":
            y, loss = F.scaled_dot_product_attention(q, k, v, is_causal=True), x.new_zeros(())
        else:
            keep = how.keep(self.indexer, x.detach(), residual.detach())
            loss = self.divergence(x.detach(), residual.detach(), q.detach(), k.detach(), keep, how)
            if keep is None:
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep.unsqueeze(1))
        return self.o_proj(y[..., :NOPE].transpose(1, 2).flatten(2)), loss

    def divergence(
        self, x: Tensor, residual: Tensor, q: Tensor, k: Tensor, keep: Tensor | None, how: "How"
    ) -> Tensor:
        """KL(attention summed over heads || softmax of index scores), over `keep`; mean of how.rows_R."""
        if how.rows_R is None:
            return x.new_zeros(())
        allowed = (how.causal if keep is None else keep)[..., how.rows_R, :]
        with torch.no_grad():
            target = x.new_zeros((), dtype=torch.float32)
            for head in range(N):
                s = (q[:, head, how.rows_R] @ k[:, head].transpose(-1, -2)).float() * (NOPE + ROPE) ** -0.5
                target = target + s.masked_fill(~allowed, NEVER).softmax(-1)
            target = target / N
            entropy = -(target * target.clamp_min(1e-20).log()).sum(-1).mean()
        with torch.enable_grad():
            scores = self.indexer(x, residual, how.rope, how.rows_R).masked_fill(~allowed, NEVER)
            return -(target * scores.log_softmax(-1)).sum(-1).mean() - entropy


class How:
    """What a forward pass does: mode, how many tokens are chosen, whose index scores are trained."""

    def __init__(self, mode: str, tokens: int, topk: int, device: torch.device, rows_R: Tensor | None = None):
        self.mode, self.topk, self.rows_R = mode, min(topk, tokens), rows_R
        self.rope = angles(tokens, device)
        self.causal = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()

    def keep(self, indexer: Indexer, x: Tensor, residual: Tensor) -> Tensor | None:
        """[B, T, T] the chosen tokens; None stands for all."""
        if self.mode == "warm":
            return None
        with torch.no_grad():
            if self.mode == "shuffled":
                scores = torch.rand(x.shape[0], x.shape[1], x.shape[1], device=x.device)
            else:
                scores = indexer(x, residual, self.rope, None)
            chosen = scores.masked_fill(~self.causal, NEVER).topk(self.topk, -1).indices
            return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True) & self.causal


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = linear(D, 2 * D), linear(D, 2 * D), linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = norm(D), Attention()
        self.post_attention_layernorm, self.mlp = norm(D), MLP()

    def forward(self, x: Tensor, how: How) -> tuple[Tensor, Tensor]:
        y, loss = self.self_attn(self.input_layernorm(x), how)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), loss


def initialise(model: nn.Module) -> None:
    """Layers begin as nothing added to the stream; products keep its size."""
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(weight)
        elif "embed_tokens" in name:
            nn.init.normal_(weight, std=1.0)
        elif weight.ndim == 2:
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)


class Recall(nn.Module):
    """Embeddings of std 1, an untied head, output projections from 0: tied ones of std 0.02 learn nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(words.VOCAB, D),
                "layers": nn.ModuleList(Block() for _ in range(4)),
                "norm": norm(D),
            }
        )
        self.lm_head = linear(D, words.VOCAB)
        initialise(self)

    def forward(self, ids_BT: Tensor, how: How) -> tuple[Tensor, Tensor]:
        """Logits [B, T, vocabulary] and the indexers' summed loss."""
        x = Lookup.apply(self.model["embed_tokens"].weight, ids_BT)
        losses = []
        # In "warm" only the indexers learn; `divergence` turns gradients on again for them.
        with torch.set_grad_enabled(torch.is_grad_enabled() and how.mode != "warm"):
            for block in self.model["layers"]:
                x, loss = block(x, how)
                losses.append(loss)
            x = self.model["norm"](x)
        return self.lm_head(x), torch.stack(losses).sum()

    def parts(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Parameters of the model and of its indexers."""
        named = list(self.named_parameters())
        return [p for n, p in named if ".indexer." not in n], [p for n, p in named if ".indexer." in n]
