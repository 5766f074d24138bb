"""All layers of a step in which every row decodes, in one call (`stack.c`).

With one row a layer takes 300 us on two cores, of which Python between ten calls was a quarter.

    T tokens of the step   D model dim   H head dim
"""
from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock.kernels.attention.paged_attention.native import Paged
from penstock.kernels.c.build import address, entry
from penstock.kernels.gemm.linear.panels import Args, Product
from penstock.kernels.platform import KernelError

SOURCE = Path(__file__).with_name("stack.c")
_P, _N = ctypes.c_void_p, ctypes.c_int64


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Weights of one layer, all of one dtype. `q_norm`, `k_norm` [H]: of every head before RoPE; None: none."""

    norm_in: Tensor
    qkv: Callable[[Tensor], Tensor]
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Callable[[Tensor], Tensor]
    norm_mlp: Tensor
    gate_up: Callable[[Tensor], Tensor]
    down: Callable[[Tensor], Tensor]

    @property
    def products(self) -> list[Product]:
        """qkv, out, gate_up and down, those that are multiplied in C."""
        return [p for p in (self.qkv, self.out, self.gate_up, self.down) if isinstance(p, Product)]


class _Layer(ctypes.Structure):
    """`Layer` of stack.c."""

    _fields_ = (*((name, Args) for name in ("qkv", "out", "gate_up", "down")),
                *((name, _P) for name in ("norm_in", "norm_mlp", "q_norm", "k_norm")))


class _Stack(ctypes.Structure):
    """`Stack` of stack.c."""

    _fields_ = (
        *((name, _P) for name in ("linear", "norm", "rotate", "norm_rotate", "gate", "attend", "layers")),
        *((name, _N) for name in ("num_layers", "dim", "heads", "kv_heads", "head_dim", "width", "bf16")),
        ("eps", ctypes.c_float))


class _Step(ctypes.Structure):
    """`Step` of stack.c."""

    _fields_ = (*((name, _P) for name in ("h", "before", "delta", "cosine", "sine", "page", "offset", "pools",
                                          "attend")), ("tokens", _N))


class Stack:
    """Layers of one shape and dtype."""

    def __init__(self, layers: Sequence[LayerWeights], functions: Sequence[Callable[..., object]], *,
                 heads: int, kv_heads: int, head_dim: int, eps: float) -> None:
        """functions: norm, rotate, norm_rotate and gate of layer.c."""
        first = layers[0].products
        self._dtype, self._dim = first[0].dtype, first[0].inputs
        array = (_Layer * len(layers))(*map(_layer, layers))
        self._held = layers, array                  # `_stack` has only their addresses
        self._stack = _Stack(
            *map(address, (first[0].run, *functions)), None, ctypes.addressof(array), len(layers), self._dim,
            heads, kv_heads, head_dim, first[3].inputs, self._dtype is torch.bfloat16, eps)
        self._run = entry(SOURCE, "penstock_stack", _P)

    def __call__(self, h_TD: Tensor, delta_TD: Tensor | None, cos_T1H: Tensor, sin_T1H: Tensor,
                 paged: Paged) -> Tensor:
        """delta_TD, which the last layer leaves to be added to h; h is changed in place. `paged` has pools
        for each of the layers. Raises KernelError: no memory."""
        tokens, dim = h_TD.shape
        for tensor in (h_TD, cos_T1H, sin_T1H, h_TD if delta_TD is None else delta_TD):
            assert tensor.dtype is self._dtype and tensor.is_contiguous() and len(tensor) == tokens
        assert dim == self._dim and len(paged.pools) == 2 * self._stack.num_layers
        assert paged.decodes.step.num_queries == tokens
        if self._stack.attend is None:      # not built where another implementation of attention runs
            self._stack.attend = address(paged.decodes.kernel())
        out_TD = torch.empty_like(h_TD)
        step = _Step(*map(_pointer, (h_TD, delta_TD, out_TD, cos_T1H, sin_T1H, paged.page_T, paged.offset_T)),
                     ctypes.addressof(paged.pools), ctypes.addressof(paged.decodes.step), tokens)
        if self._run(ctypes.byref(self._stack), ctypes.byref(step), torch.get_num_threads()):
            raise KernelError(f"no memory for {tokens} tokens")
        return out_TD


def _layer(w: LayerWeights) -> _Layer:
    return _Layer(*(product.args for product in w.products),
                  *map(_pointer, (w.norm_in, w.norm_mlp, w.q_norm, w.k_norm)))


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
