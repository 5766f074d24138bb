"""An Attend that keeps everything of one request in lists: what the engine's pages must amount to.

    T tokens of the step   P positions stored   N query heads   K KV heads   C planes   H head dim
    I index heads   J index head dim   S chosen tokens of a query
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
import where
from torch import Tensor

from penstock.kernels.types.states import States
from penstock.model.base import CacheShape, LocalLayer, Reads


class Dense:
    """Causal by position, of some layers in a window. `chosen` keeps, per layer, what `select` returned for
    each step, `scores` all scores that it chose from."""

    def __init__(self, reads: Mapping[LocalLayer, Reads], groups: Sequence[CacheShape] = ()) -> None:
        self.reads, groups = reads, [group for group in groups if not group.drafts]
        self.windows = {int(layer): group.window for group in groups for layer in group.layers}
        self.stored: dict[int, Tensor] = {}
        self.keys: dict[int, Tensor] = {}
        self.chosen: dict[int, list[Tensor]] = {}
        self.scores: dict[int, list[Tensor]] = {}
        self.states = {int(layer): torch.full((1, group.num_kv_heads * group.head_dim), float("nan"),
                                              device=where.DEVICE)
                       for group in groups if group.snapshot for layer in group.layers}
        self.begun: set[int] = set()            # layers with a state

    def __call__(self, layer: LocalLayer, q_TNH: Tensor, kv_TCKH: Tensor | None, chosen_TKY: Tensor | None = None,
                 sinks_N: Tensor | None = None) -> Tensor:
        by = self.reads[layer]
        source = by.source.layer
        assert (kv_TCKH is None) == (source != layer), f"layer {layer} reads what layer {source} has written"
        if kv_TCKH is not None:
            held = [self.stored[layer]] if layer in self.stored else []
            self.stored[layer] = torch.cat([*held, kv_TCKH])
        kv_PCKH = self.stored[source]
        seen_TP = causal(len(q_TNH), len(kv_PCKH)).to(q_TNH.device)
        if chosen_TKY is not None:
            chosen_TS = chosen_TKY[:, 0]
            padded = torch.zeros(len(q_TNH), len(kv_PCKH) + 1, dtype=torch.bool, device=q_TNH.device)
            padded.scatter_(1, chosen_TS.long().where(chosen_TS >= 0, len(kv_PCKH)), True)
            assert not (padded[:, :-1] & ~seen_TP).any(), "a token chose one after it"
            seen_TP = padded[:, :-1]
        if window := self.windows.get(source, 0):
            seen_TP = seen_TP.triu(len(kv_PCKH) - len(q_TNH) - window + 1)
        k_KPH = kv_PCKH[:, 0].transpose(0, 1)
        v_KPH = k_KPH[..., :by.value_dim] if by.value_dim else kv_PCKH[:, 1].transpose(0, 1)
        assert by.sinks == (sinks_N is not None)
        if by.softcap or sinks_N is not None:
            k_NPH, v_NPH = (x.repeat_interleave(q_TNH.shape[1] // len(x), 0) for x in (k_KPH, v_KPH))
            score_NTP = q_TNH.transpose(0, 1) @ k_NPH.mT * by.scale
            if cap := by.softcap:
                score_NTP = cap * torch.tanh(score_NTP / cap)
            score_NTP = score_NTP.masked_fill(~seen_TP, float("-inf"))
            if sinks_N is not None:
                sink_NT1 = sinks_N[:, None, None].expand(-1, len(q_TNH), 1)
                score_NTP = torch.cat((score_NTP, sink_NT1), -1)
            return (score_NTP.softmax(-1)[..., :len(kv_PCKH)] @ v_NPH).transpose(0, 1)
        return F.scaled_dot_product_attention(
            q_TNH.transpose(0, 1)[None], k_KPH[None], v_KPH[None], attn_mask=seen_TP,
            enable_gqa=True, scale=by.scale)[0].transpose(0, 1)

    def select(self, layer: LocalLayer, q_TIJ: Tensor, weight_TI: Tensor | None, key_TJ: Tensor) -> Tensor:
        held = [self.keys[layer]] if layer in self.keys else []
        key_PJ = self.keys[layer] = torch.cat([*held, key_TJ])
        score_TIP = (q_TIJ.float() @ key_PJ.float().T).relu()
        score_TP = (score_TIP * weight_TI[..., None]).sum(1)
        score_TP = score_TP.masked_fill(~causal(len(q_TIJ), len(key_PJ)).to(score_TP.device), float("-inf"))
        chosen_TS = score_TP.sort(descending=True, stable=True).indices[:, :self.reads[layer].source.selector.top_k]
        past = score_TP.gather(1, chosen_TS) == float("-inf")
        chosen_TS = chosen_TS.where(~past, len(key_PJ)).sort().values
        chosen_TS = chosen_TS.where(chosen_TS < len(key_PJ), -1).int()
        self.chosen.setdefault(layer, []).append(chosen_TS)
        self.scores.setdefault(layer, []).append(score_TP)
        return chosen_TS[:, None]

    def state(self, layer: int, tokens: int) -> States:
        pool, before = self.states[layer], 0 if layer in self.begun else -1
        self.begun.add(layer)
        return States.of(pool, (0, tokens), torch.tensor([before], device=pool.device),
                         torch.tensor([*[-1] * (tokens - 1), 0], device=pool.device))


def causal(num_new: int, num_all: int) -> Tensor:
    """[new, all]: which positions each of the newest tokens sees."""
    return torch.ones(num_new, num_all, dtype=torch.bool).tril(num_all - num_new)
