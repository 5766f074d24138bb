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
            picked_TKP = self._tokens(by.source.selector.block, chosen_TKY, len(kv_PCKH))
            assert not (picked_TKP & ~seen_TP[:, None]).all(-1).any(), "a token chose none before it"
            picked_KTP = (picked_TKP & seen_TP[:, None]).transpose(0, 1)
            seen_TP = picked_KTP.repeat_interleave(q_TNH.shape[1] // len(picked_KTP), 0)
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
        selector, num = self.reads[layer].source.selector, len(key_PJ)
        score_TIP = q_TIJ.float() @ key_PJ.float().T
        if selector.score == "relu":
            score_TIP = (score_TIP.relu() * weight_TI[..., None]).sum(1, keepdim=True)
        score_TIP = score_TIP.masked_fill(~causal(len(q_TIJ), num).to(score_TIP.device)[:, None], float("-inf"))
        blocks = -(-num // selector.block)
        score_TIU = F.pad(score_TIP, (0, blocks * selector.block - num), value=float("-inf")).unflatten(
            2, (blocks, selector.block)).amax(-1)
        last_T = torch.arange(num - len(q_TIJ), num, device=score_TIU.device)
        block_U = torch.arange(blocks, device=score_TIU.device)
        kept_TU = (block_U * selector.block < selector.first) | (
            (block_U + 1) * selector.block > last_T[:, None] + 1 - selector.last)
        order_TIU = score_TIU.masked_fill(kept_TU[:, None] & (score_TIU > float("-inf")), float("inf"))
        chosen_TIY = order_TIU.sort(descending=True, stable=True).indices[..., :selector.top_k]
        past = order_TIU.gather(2, chosen_TIY) == float("-inf")
        chosen_TIY = chosen_TIY.where(~past, blocks).sort().values
        chosen_TIY = chosen_TIY.where(chosen_TIY < blocks, -1).int()
        self.chosen.setdefault(layer, []).append(chosen_TIY)
        self.scores.setdefault(layer, []).append(score_TIU)
        return chosen_TIY

    @staticmethod
    def _tokens(block: int, chosen_TKY: Tensor, num: int) -> Tensor:
        """Which tokens of so many the blocks have, [T, K, P]."""
        blocks = -(-num // block)
        has_TKU = torch.zeros(*chosen_TKY.shape[:2], blocks + 1, dtype=torch.bool, device=chosen_TKY.device)
        has_TKU.scatter_(2, chosen_TKY.long().where(chosen_TKY >= 0, blocks), True)
        return has_TKU[..., :-1].repeat_interleave(block, -1)[..., :num]

    def state(self, layer: int, tokens: int) -> States:
        pool, before = self.states[layer], 0 if layer in self.begun else -1
        self.begun.add(layer)
        return States.of(pool, (0, tokens), torch.tensor([before], device=pool.device),
                         torch.tensor([*[-1] * (tokens - 1), 0], device=pool.device))


def causal(num_new: int, num_all: int) -> Tensor:
    """[new, all]: which positions each of the newest tokens sees."""
    return torch.ones(num_new, num_all, dtype=torch.bool).tril(num_all - num_new)
