"""How a prefill chunk is cut for a CUDA device: padding and pieces, on any device; there with its kernels."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels.attention.paged_attention import AttentionSpec, cuda, reference
from penstock.kernels.types.ragged import Ragged

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool,
          cudnn: bool) -> tuple[Tensor, Tensor]:
    k, v = (x.float().repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    scores = q.float() @ k.transpose(1, 2) * scale
    if causal:
        assert q.shape[1] == k.shape[1]
        scores = scores.where(torch.ones(scores.shape[1:], dtype=torch.bool).tril(), -torch.inf)
    return (scores.softmax(-1) @ v).to(q.dtype), scores.logsumexp(-1)


def merged(a: Tensor, a_log: Tensor, b: Tensor, b_log: Tensor) -> Tensor:
    share = torch.sigmoid(b_log - a_log)[..., None]
    return (a.float() * (1 - share) + b.float() * share).to(a.dtype)


def gathered(k: Tensor, v: Tensor, pages: Tensor, context: int, length: int) -> Tensor:
    out = k.new_zeros(2, k.shape[1], length, k.shape[3])
    for plane, pool in enumerate((k, v)):
        out[plane, :, :context] = pool[pages.long()].transpose(0, 1).flatten(1, 2)[:, :context]
    return out


def padded(q: Tensor, lead: int, length: int) -> Tensor:
    return torch.cat((q.new_zeros(lead, *q.shape[1:]), q, q.new_zeros(length - lead - len(q), *q.shape[1:])))


@pytest.mark.parametrize("large", [8, 10**6])
@pytest.mark.parametrize("count, context", [(40, 40), (17, 17), (33, 300), (16, 144), (200, 333), (9, 129)])
def test_a_chunk_in_pieces_equals_the_reference(count, context, large, monkeypatch):
    """With `large` 8 every chunk is padded and cut as the largest are."""
    monkeypatch.setattr(cuda, "_LARGE", large)
    monkeypatch.setattr(cuda, "_ROUND", 32)
    monkeypatch.setattr(cuda, "_STEP", 64)
    if DEVICE == "cpu":
        monkeypatch.setattr(cuda, "fused", plain)
        monkeypatch.setattr(cuda, "_gather", gathered)
        monkeypatch.setattr(cuda, "_pad", padded)
        monkeypatch.setattr(cuda, "_merge", merged)
    generator = torch.Generator().manual_seed(context)
    size, heads, kv_heads, dim = 16, 6, 2, 64
    num = -(-context // size)
    pool = torch.full((num + 4, kv_heads, 2, size, dim), float("nan"))
    pages = torch.randperm(num + 4, generator=generator)[:num]
    values = torch.randn(context, 2, kv_heads, dim, generator=generator)
    at = torch.arange(context)
    pool[pages[at // size], :, :, at % size] = values.transpose(1, 2)
    pool = pool.to(DEVICE, torch.bfloat16)
    q = torch.randn(count, heads + 1, dim, generator=generator).to(DEVICE, torch.bfloat16)[:, 1:]
    table = torch.full((3, num + 1), -1, dtype=torch.int32, device=DEVICE)
    table[1, :num] = pages.to(DEVICE)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    layout = Ragged((0, count), (context,), (1,), table, none, none, size)
    spec = AttentionSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, dtype=torch.bfloat16,
                         scale=0.1)
    k, v = pool[:, :, 0], pool[:, :, 1]
    got, want = cuda.plan(layout, spec)(q, k, v), reference.plan(layout, spec)(q, k, v)
    assert got.shape == want.shape and got.is_contiguous()
    gap = (got.float() - want.float()).abs().max() / want.float().abs().max()
    assert gap < 2e-2


def test_pieces_are_few_lengths():
    step = cuda._STEP
    for n in (0, 1, 2, 3, 7, 31, 64):
        found = cuda.pieces(n * step)
        assert [a for a, _ in found] == [0, *(b for _, b in found)][:len(found)]
        assert not found or found[-1][1] == n * step
        assert len(found) <= 6 and all((b - a) // step & ((b - a) // step - 1) == 0 for a, b in found)
