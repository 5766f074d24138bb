"""Tensor-parallel ranks of tiny models as threads of one process."""
from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from penstock.exec.step.links import split
from penstock.kernels.gemm import linear
from penstock.kernels.state import scan
from penstock.kernels.types.packed import Packed
from penstock.model.base import Stage
from penstock.model.parts import TpRank, even

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 136,
    "num_hidden_layers": 4, "num_attention_heads": 12, "num_key_value_heads": 4,
    "head_dim": 8, "max_position_embeddings": 64,
    "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
# States of 8 key heads, as files of either have them, and of one, which all heads have.
DELTA = {**LLAMA, "attention_bias": False, "mlp_bias": False, "layer_types": ["linear_attention", "full_attention"] * 2,
         "linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": 6, "linear_value_head_dim": 4,
         "partial_rotary_factor": 0.5}
NEXT = {**DELTA, "model_type": "qwen3_next", "num_experts": 0}
MAMBA = {**LLAMA, "model_type": "bamba", "attention_bias": False, "attn_layer_indices": [1, 3], "mamba_n_heads": 16,
         "mamba_d_head": 4, "mamba_n_groups": 1, "mamba_d_state": 6, "mamba_proj_bias": True}
STATES = {"qwen3_next": NEXT, "qwen3_5_text": {**DELTA, "model_type": "qwen3_5_text"}, "bamba": MAMBA}
SCAN = scan.OP.use("reference")


def parts(pp: int, tp: int, ranges: int = 1, block: int = 16) -> list[Stage]:
    tp_ranks = [TpRank(i, tp, ranges, block) for i in range(tp)]
    return [replace(stage, tp_rank=tp_rank) for stage in split(even(4, pp)) for tp_rank in tp_ranks]


class Threads:
    """`model.base.TpGroup` of TP ranks that are threads, in turns."""

    def __init__(self, size: int) -> None:
        self.size, self._at, self._given = size, threading.Barrier(size, timeout=60), {}

    def _all(self, index: int, x: torch.Tensor) -> list[torch.Tensor]:
        self._given[index] = x.clone()
        self._at.wait()
        found = [self._given[i] for i in range(self.size)]
        self._at.wait()
        return found

    def of(self, index: int) -> Any:
        all_of = self._all

        class One:
            def all_reduce(self, x_TD):
                x_TD.copy_(sum(all_of(index, x_TD)))

            def all_gather(self, x_BV, num):
                return torch.cat(all_of(index, x_BV), 1)
        return One()


def packed(weight: torch.Tensor | Packed, bias: torch.Tensor | None) -> Any:
    if isinstance(weight, Packed):
        return linear.pack(weight, bias, backend="reference")
    return lambda x_TI: F.linear(x_TI, weight, bias)
