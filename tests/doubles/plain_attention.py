"""Paged attention as it is defined, token by token."""
from __future__ import annotations

import torch
import torch.nn.functional as F


def plain(layout, spec):
    """Paged attention, one token at a time: the definition."""
    def attend(q, k_pages, v_pages, sinks=None):
        assert sinks is None
        out = torch.empty_like(q)
        for i, row in enumerate(layout.rows):
            first, last = layout.query_start[i], layout.query_start[i + 1]
            pages = layout.pages_RM[row, :-(-layout.context[i] // layout.page_size)].tolist()
            for t in range(first, last):
                seen = layout.context[i] - (last - first) + (t - first) + 1
                k, v = (x[pages].transpose(1, 2).flatten(0, 1)[:seen] for x in (k_pages, v_pages))
                group = q.shape[1] // k.shape[1]
                k, v = (x.repeat_interleave(group, 1) for x in (k, v))
                w = (torch.einsum("nh,snh->ns", q[t], k) * spec.scale).softmax(-1)
                out[t] = torch.einsum("ns,snh->nh", w, v)
        return out
    return attend


def causal(layer, q, kv, chosen=None, *, sinks_N=None):
    """Dense attention over one whole sequence, without sinks."""
    assert chosen is None and sinks_N is None
    q, k, v = (x.transpose(0, 1)[None] for x in (q, *kv.unbind(1)))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)
