"""Paged attention from torch's own kernels: a row's pages are gathered, then fused attention or
matmuls run over them, whichever wins.

Each row of a step is a part (`prepare`), in blocks of queries. Decode takes this way only without a C compiler,
or with head dimensions that C does not take.

    T tokens of the step   C queries of a row   S context   E keys of a block
    P pages of the pool   N query heads   K KV heads   g = N / K   G page size   H head dim
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.attention.paged_attention.decoded import of_floats, sound_of
from penstock.kernels.attention.paged_attention.spec import (
    AttentionSpec,
    Prepared,
    Row,
    begin_of,
    beside_sinks,
    compose,
    pages_of,
    rows_of,
)
from penstock.kernels.platform import Platform, has_tiles, multiplies_bf16
from penstock.kernels.types.ragged import Ragged

# Queries of a prefill chunk handled at once: the masked triangle is small, matmuls are large. Twice as many
# make the fused kernel faster, and its mask too large behind a long context.
_BLOCK, _CONTEXT_LONG = 128, 16384


def probe(platform: Platform) -> str:
    return f"{platform.best('amx_bf16', 'avx512_bf16', 'avx512_f', 'avx2', 'sve')} through torch"


def prepare(layout: Ragged, spec: AttentionSpec) -> Prepared:
    return compose([([row], of_floats(sound_of(SdpaChunk), [row], spec, layout)) for row in rows_of(layout)], layout)


def _gather(pool_PKGH: Tensor, pages_n: Tensor) -> Tensor:
    """[K, n, G, H], contiguous: a page's tokens of one head lie together, so a head is one pass."""
    heads, size, dim = pool_PKGH.shape[1:]
    out_KnGH = pool_PKGH.new_empty(heads, len(pages_n), size, dim)
    for head in range(heads):
        torch.index_select(pool_PKGH[:, head], 0, pages_n, out=out_KnGH[head])
    return out_KnGH


class _Context:
    """k or v of one row, [K, S, H], gathered: of positions `begin` and on."""

    def __init__(self, row: Row, layout: Ragged, begin: int = 0) -> None:
        self._pages, self._length = pages_of(row, layout, begin), row.context - begin

    def __call__(self, pool_PKGH: Tensor) -> Tensor:
        return _gather(pool_PKGH, self._pages).flatten(1, 2)[:, :self._length]


class SdpaChunk:
    """The queries of one row, a block at a time, each over the keys up to its last: from the first
    that its first query sees.

    bf16 goes through the fused kernel where the CPU has tiles for it, through matmuls where it multiplies
    bf16 otherwise, and is converted to f32 elsewhere. Capped scores are f32, through matmuls. A key or value
    that is not finite reaches queries that do not see it: `Sound` is what keeps it from them.
    """

    def __init__(self, row: Row, spec: AttentionSpec, layout: Ragged) -> None:
        begin = begin_of(row, spec, layout)
        self._context = _Context(row, layout, begin)
        self._sinks_N: Tensor | None = None
        self._spec, self._count, self._length = spec, row.count, row.context - begin
        bf16 = spec.dtype == torch.bfloat16 and multiplies_bf16() and not spec.softcap
        products = bool(spec.softcap) or (bf16 and not has_tiles())
        self._block = _BLOCK if products or row.context > _CONTEXT_LONG else 2 * _BLOCK
        block = min(self._block, row.count)
        width = min(self._length, block + spec.window - 1) if spec.window else self._length
        self._dtype = spec.dtype if bf16 else torch.float32
        # Aligned at the lower right corner: every block and its keys is a view of this one mask.
        self._hides = torch.ones(block, width, dtype=torch.bool).triu_(width - block + 1)
        if spec.window:
            self._hides |= torch.ones_like(self._hides).tril_(width - block - spec.window)
        if not products:                        # the fused kernel adds it
            self._hides = torch.zeros(block, width, dtype=self._dtype).masked_fill_(self._hides, -torch.inf)
        self._run = self._matmuls if products else self._fused
        self._unused = torch.empty((), dtype=self._dtype)

    def __call__(self, q_TNH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor,
                 sinks_N: Tensor | None = None) -> Tensor:
        spec, self._sinks_N = self._spec, sinks_N
        k_KSH, v_KSH = (self._context(pool_PKGH).to(self._dtype) for pool_PKGH in (k_PKGH, v_PKGH))
        out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
        heads = (-1, spec.num_kv_heads, spec.group, spec.head_dim)
        q_CKgH, out_CKgH = q_TNH.to(self._dtype).view(heads), out_TNH.view(heads)
        for start in range(0, self._count, self._block):
            end = min(start + self._block, self._count)
            visible = self._length - self._count + end
            first = spec.first_seen(visible - (end - start))
            mask = self._hides[start - end:, first - visible:]
            if spec.first and not first:        # the first token's own query is in this block
                mask = mask.clone()
                mask[1:, 0] = True if mask.dtype == torch.bool else -torch.inf
            self._run(q_CKgH[start:end], k_KSH[:, first:visible], v_KSH[:, first:visible], mask,
                      out_CKgH[start:end])
        return out_TNH

    def _fused(self, q_CKgH: Tensor, k_KEH: Tensor, v_KEH: Tensor, mask_CE: Tensor,
               out_CKgH: Tensor) -> None:
        """KV heads are the batch, a group's query heads share theirs through a zero stride."""
        shape = (-1, self._spec.group, -1, -1)
        given = (q_CKgH.permute(1, 2, 0, 3), k_KEH.unsqueeze(1).expand(shape),
                 v_KEH.unsqueeze(1).expand(shape))
        if self._sinks_N is None:
            out_KgCH = F.scaled_dot_product_attention(*given, attn_mask=mask_CE, scale=self._spec.scale)
        else:
            out_KgCH, lse_KgC = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *given, attn_mask=mask_CE, scale=self._spec.scale)
            out_KgCH = beside_sinks(out_KgCH, lse_KgC, self._sinks_N.view(*lse_KgC.shape[:2], 1))
        out_CKgH.copy_(out_KgCH.permute(2, 0, 1, 3))

    def _matmuls(self, q_CKgH: Tensor, k_KEH: Tensor, v_KEH: Tensor, mask_CE: Tensor,
                 out_CKgH: Tensor) -> None:
        """Scores in memory, in bf16: oneDNN's bf16 matmul makes it 3x the fused kernel."""
        queries, group = mask_CE.shape[0], self._spec.group
        q_KcH = q_CKgH.transpose(0, 1).flatten(1, 2)
        scores_KcE = torch.baddbmm(self._unused, q_KcH, k_KEH.transpose(1, 2), beta=0,
                                   alpha=self._spec.scale)
        if self._spec.softcap:
            scores_KcE.div_(self._spec.softcap).tanh_().mul_(self._spec.softcap)
        scores_KCgE = scores_KcE.view(-1, queries, group, mask_CE.shape[1])
        hides = 0 if self._spec.window else -queries
        scores_KCgE[..., hides:].masked_fill_(mask_CE[:, None, hides:], -torch.inf)
        out_KcH = torch.bmm(torch.softmax(scores_KcE, -1), v_KEH)
        out_KCgH = out_KcH.view(-1, queries, group, out_KcH.shape[2])
        if self._sinks_N is not None:
            lse_KCg = torch.logsumexp(scores_KCgE.float(), -1)
            out_KCgH = beside_sinks(out_KCgH, lse_KCg, self._sinks_N.view(-1, 1, group))
        out_CKgH.copy_(out_KCgH.transpose(0, 1))
